"""How the columns of a table lie in the arrays of an entry: what is said of it, and what of that is believed.

A table is published as arrays, a few for each column, and one more, :data:`ENTRY`, which says in JSON what they are.
All of it may be a stranger's. Nothing in it is evaluated; it is bounded, and typed; and of what it says of lengths,
offsets and codes nothing reaches a library that would believe it before it was checked (S7).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from ..errors import ProtocolError
from .numpy_on_use import np

if TYPE_CHECKING:
    from .views import NDArray

ENTRY = "vram.table"  # the array that makes a table of an entry
VERSION = 1
MAX_WORDS = 4 << 20  # bytes of what is said of one table
LIBRARIES = ("pandas", "polars", "arrow")
_AT_ONCE = 1 << 20  # rows that are looked at together, so that a check takes no memory by the row

_Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_Label = Annotated[str, Meta(max_length=1024)] | _Int
_Name = Annotated[str, Meta(max_length=1024)]
_ZONE = re.compile(r"[A-Za-z][A-Za-z0-9_+-]{0,31}(/[A-Za-z0-9_+-]{1,31}){0,3}")
_FIXED = re.compile(r"[+-][0-9]{2}:[0-9]{2}")
_CODES = "iu"
_VALUES = "biufcmM"


class Categories(Struct, frozen=True, omit_defaults=True):
    """The values that the codes of a column stand for: an array, of text with its offsets."""

    data: _Name
    rows: Annotated[int, Meta(ge=0, le=2**48)]
    offsets: _Name = ""
    dtype: Literal["", "str", "object"] = ""  # of pandas' Index of them, where they are text


class Column(Struct, frozen=True, omit_defaults=True):
    """One column: the names of its arrays, and how the library that had it sees them.

    Attributes
    ----------
    kind : str
        ``values``, one behind the other; ``bits``, eight booleans to a byte; ``text`` and ``bytes``, which lie between
        offsets; ``views``, text of which each row says in 16 bytes where it is; ``codes``, with `categories`.
    data : str
        The array of values, bits, bytes, views or codes.
    label : str, int or None
        What the column is called. None for an index without a name.
    offsets : str
        Of ``text`` and ``bytes``: 64 bits each, one more than rows.
    buffers : tuple of str
        Of ``views``: what they point into.
    valid, missing : str
        Which rows there are: a bit each, 1 for those that are, as Arrow has it; or a byte each, 1 for those that are
        not, as pandas has it.
    form : str
        As what its library holds it.
    unit : str
        Of dates and times of day, which are numbers to numpy: Arrow's name for the type.
    zone : str
        The time zone in which points in time are shown.
    """

    kind: Literal["values", "bits", "text", "bytes", "views", "codes"]
    data: _Name
    label: _Label | None = None
    offsets: _Name = ""
    buffers: Annotated[tuple[_Name, ...], Meta(max_length=4096)] = ()
    valid: _Name = ""
    missing: _Name = ""
    form: Literal["", "masked", "arrow", "str", "string", "enum"] = ""
    unit: Literal["", "date32", "date64", "time32[s]", "time32[ms]", "time64[us]", "time64[ns]"] = ""
    zone: Annotated[str, Meta(max_length=128)] = ""
    categories: Categories | None = None
    ordered: bool = False


class IndexRange(Struct, frozen=True, omit_defaults=True):
    """A RangeIndex: there are no bytes of it."""

    start: _Int
    stop: _Int
    step: _Int
    label: _Label | None = None


class TableWords(Struct, frozen=True, omit_defaults=True):
    """All that is said of a table. Unknown fields are ignored (S9)."""

    version: int
    library: Literal["pandas", "polars", "arrow"]
    rows: Annotated[int, Meta(ge=0, le=2**48)]
    columns: tuple[Column, ...]
    index: Column | None = None
    span: IndexRange | None = None
    heading: _Label | None = None  # what pandas calls the columns together: df.columns.name


_decoder = msgspec.json.Decoder(TableWords)


def decode_table(data: NDArray) -> TableWords:
    """Read what was said of a table.

    Raises
    ------
    ProtocolError
        If it is not that, or contradicts itself.
    """
    if data.dtype != np.uint8 or data.ndim != 1 or data.nbytes > MAX_WORDS:
        raise ProtocolError(f"what describes the table is {data.nbytes} bytes of {data.dtype}; at most {MAX_WORDS}")
    try:
        words = _decoder.decode(data.tobytes())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"what describes the table is nothing this version reads: {error!s:.200}") from None
    if words.version != VERSION:
        raise ProtocolError(f"a table of version {words.version}; this library reads {VERSION}")
    labels = [column.label for column in words.columns]
    if len(set(labels)) < len(labels) or None in labels:
        raise ProtocolError("columns of the table have the same name, or none")
    if words.span is not None:
        span = words.span
        if words.index is not None or not span.step or len(range(span.start, span.stop, span.step)) != words.rows:
            raise ProtocolError(f"the index of the table is said to be {span}, for {words.rows} rows")
    return words


def check_zone(zone: str) -> bool:
    """Whether that may be a time zone: a name in the database, or a fixed offset; never a path."""
    return bool(_FIXED.fullmatch(zone) or (_ZONE.fullmatch(zone) and not zone.startswith("dateutil")))


class Parts:
    """The arrays of an entry, as what the columns of a table say they are.

    Parameters
    ----------
    arrays : mapping of str to numpy.ndarray
        By name.
    rows : int
        Of the table.
    whole : bool
        Look at every offset, code and truth value. What is of constant cost is looked at in any case: that each array
        is there, of its type, as long as it has to be, and that offsets begin and end within what they point into.
    """

    def __init__(self, arrays: Mapping[str, NDArray], rows: int, *, whole: bool) -> None:
        self._arrays = arrays
        self.rows = rows
        self.whole = whole

    def check_memory(self, columns: Iterable[Column]) -> None:
        """Raise ProtocolError if two arrays of columns lie in the same memory.

        What a library makes of each, such as bits of bytes, is in proportion to the entry then: many columns of one
        array would take any amount.
        """
        names = [name for column in columns for name in _arrays_of(column)]
        if len(set(names)) < len(names):
            raise ProtocolError("two columns of the table are said to lie in one array")
        spans = sorted(
            (array.__array_interface__["data"][0], array.nbytes)
            for array in map(self._arrays.get, names)
            if array is not None and array.nbytes
        )
        if any(start + nbytes > following for (start, nbytes), (following, _) in itertools.pairwise(spans)):
            raise ProtocolError("two arrays of the table lie in the same memory")

    def check(self, column: Column) -> None:
        """Raise ProtocolError unless the arrays of a column are what it says."""
        data = self.data(column)
        if column.zone and (data.dtype.kind != "M" or not check_zone(column.zone)):
            raise ProtocolError(f"{column.zone[:80]!r} is said to be the time zone of {data.dtype}")
        if column.missing:
            self._check_truth(self._named(column.missing, "bool", self.rows))
        if column.valid:
            self.valid(column)
        if column.kind in ("text", "bytes"):
            self._check_offsets(self.offsets(column), data)
        elif column.kind == "views":
            if self.whole:
                self._check_views(column, data)
        elif column.kind == "codes":
            self._check_codes(column, data)
        elif column.kind == "values" and data.dtype.kind == "b":
            self._check_truth(data)

    # -- the arrays -------------------------------------------------------------------------------------------------
    def data(self, column: Column) -> NDArray:
        """Return the array that a column has in any case."""
        if column.kind == "values":
            unit = column.unit
            return self._named(column.data, f"int{unit[4:6]}" if unit else _VALUES, self.rows)
        if column.kind == "codes":
            return self._named(column.data, _CODES, self.rows)
        if column.kind == "bits":
            return self._named(column.data, "uint8", _bytes(self.rows))
        if column.kind == "views":
            return self._named(column.data, "int32", 4 * self.rows)
        return self._named(column.data, "uint8")

    def offsets(self, column: Column) -> NDArray:
        """Return where each row of text or bytes begins, and the last one ends."""
        return self._named(column.offsets, "int64", self.rows + 1)

    def buffers(self, column: Column) -> list[NDArray]:
        """Return what the views of a column point into."""
        return [self._named(name, "uint8") for name in column.buffers]

    def valid(self, column: Column) -> NDArray | None:
        """Return a bit for each row that there is; None if there are all, or it is said by bytes."""
        return self._named(column.valid, "uint8", _bytes(self.rows)) if column.valid else None

    def missing(self, column: Column) -> NDArray | None:
        """Return a byte for each row that there is not; None if there are all, or it is said by bits."""
        return self._named(column.missing, "bool", self.rows) if column.missing else None

    def categories(self, categories: Categories) -> NDArray | list[str]:
        """Return what codes stand for.

        Raises
        ------
        ProtocolError
            If it is text that is no UTF-8, whoever wrote it: it is made strings of here.
        """
        if not categories.offsets:
            return self._named(categories.data, _VALUES, categories.rows)
        data = self._named(categories.data, "uint8")
        offsets = self._named(categories.offsets, "int64", categories.rows + 1)
        self._check_offsets(offsets, data, always=True)
        blob, at = data.tobytes(), offsets.tolist()
        try:
            return [blob[start:stop].decode() for start, stop in itertools.pairwise(at)]
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a category is no text: {error}") from None

    def _named(self, name: str, dtype: str, length: int | None = None) -> NDArray:
        """Return an array that is of a type, or of one of several kinds of types, and of a length."""
        array = self._arrays.get(name)
        if array is None:
            raise ProtocolError(f"its array {name[:80]!r} is not in the entry")
        fits = array.dtype.kind in dtype if dtype in (_VALUES, _CODES) else array.dtype == dtype
        if not fits or array.ndim != 1 or (length is not None and len(array) != length):
            raise ProtocolError(f"its array {name[:80]!r} is {array.shape} of {array.dtype}, not {length} of {dtype}")
        if not array.flags.aligned or not array.flags.c_contiguous:
            raise ProtocolError(f"its array {name[:80]!r} lies at an address that is none for {array.dtype}")
        return array

    # -- what they say ----------------------------------------------------------------------------------------------
    def _check_truth(self, array: NDArray) -> None:
        """Refuse bytes that are neither true nor false: a compiler may have relied on there being none."""
        if self.whole and array.size and array.view(np.uint8).max() > 1:
            raise ProtocolError("bytes of its truth values are neither 0 nor 1")

    def _check_offsets(self, offsets: NDArray, data: NDArray, *, always: bool = False) -> None:
        if offsets[0] < 0 or offsets[-1] > len(data) or offsets[-1] < offsets[0]:
            raise ProtocolError(f"its offsets go from {offsets[0]} to {offsets[-1]}, in {len(data)} bytes")
        if self.whole or always:
            for at in range(0, len(offsets) - 1, _AT_ONCE):
                some = offsets[at : at + _AT_ONCE + 1]
                if (some[1:] < some[:-1]).any():
                    raise ProtocolError("its offsets go back")

    def _check_views(self, column: Column, data: NDArray) -> None:
        sizes = np.array([len(buffer) for buffer in self.buffers(column)] or [0], np.int64)
        # Also of rows that there are not: polars follows those as well. Our publishers have zeros there.
        for at in range(0, self.rows, _AT_ONCE):
            some = data[4 * at : 4 * (at + _AT_ONCE)].reshape(-1, 4)
            if (some[:, 0] < 0).any():
                raise ProtocolError("a row is said to have less than no bytes")
            long = some[some[:, 0] > 12]
            number, offset = long[:, 2], long[:, 3].astype(np.int64)
            if ((number < 0) | (number >= len(column.buffers))).any():
                raise ProtocolError(f"a row is said to lie in a buffer that is none of its {len(column.buffers)}")
            if ((offset < 0) | (offset + long[:, 0] > sizes[number])).any():
                raise ProtocolError("a row is said to lie outside of its buffer")

    def _check_codes(self, column: Column, data: NDArray) -> None:
        if column.categories is None:
            raise ProtocolError("its codes stand for nothing")
        if not self.whole:
            return
        most, valid = column.categories.rows, self.valid(column)
        for at in range(0, self.rows, _AT_ONCE):
            some = data[at : at + _AT_ONCE]
            if valid is not None:
                some = some[np.unpackbits(valid[at // 8 :], count=len(some), bitorder="little").view(np.bool_)]
            if some.size and (some.max() >= most or some.min() < (0 if column.valid else -1)):
                raise ProtocolError(f"its codes go from {some.min()} to {some.max()}, for {most} categories")


def _arrays_of(column: Column) -> list[str]:
    """Return the names of all arrays of a column."""
    words = column.categories
    named = [column.data, column.offsets, column.valid, column.missing, *column.buffers]
    return [name for name in (*named, *((words.data, words.offsets) if words is not None else ())) if name]


def _bytes(rows: int) -> int:
    """How many bytes so many bits take."""
    return (rows + 7) // 8
