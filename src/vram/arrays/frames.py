"""Tables of pandas, polars and Arrow as arrays: each column's own memory, to be published without a copy in between.

None of these libraries is loaded here before a table of it was given. What becomes of the arrays again is in
:mod:`.rebuilt`; what is said of them, in :mod:`.columns`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import UnsupportedError, UsageError
from ..sharing.descriptor import check_array_name
from .columns import ENTRY, MAX_WORDS, VERSION, Categories, Column, IndexRange, TableWords, check_zone
from .dtypes import as_dtype, dtype_name
from .numpy_on_use import np
from .sources import Source
from .tables import is_frame

if TYPE_CHECKING:
    from .views import NDArray

_DROP = {
    "pandas": "leave it out: table.drop(columns=[{0!r}])",
    "polars": "leave it out: table.drop({0!r})",
    "arrow": "leave it out: table.drop_columns([{0!r}])",
}


def parts_of(table: Any) -> dict[str, Any]:
    """Return the arrays that a table is published as, with what says so.

    Nothing is copied: they are views of the table's memory, or say how they are written where they will lie.

    Raises
    ------
    UsageError
        If there is a column, or an index, that cannot be published. It says which, of what type, and what to do.
    UnsupportedError
        If pyarrow is needed, and not there.
    """
    library = is_frame(table)
    taken = _Taken(library)
    words = {"pandas": _of_pandas, "polars": _of_polars, "arrow": _of_arrow}[library](table, taken)
    data = msgspec.json.encode(words)
    if len(data) > MAX_WORDS:
        raise UsageError(
            f"what is to be said of {len(words.columns)} columns is {len(data)} bytes; {MAX_WORDS} is the most. "
            f"Publish some of the columns at a time, or give shorter names"
        )
    taken.arrays[ENTRY] = np.frombuffer(data, np.uint8)
    return taken.arrays


class _Taken:
    """The arrays so far. A column's values are called as the column is, where that is free."""

    def __init__(self, library: str) -> None:
        self.library = library
        self.arrays: dict[str, Any] = {}
        self._labels: set[str | int] = set()
        self._at: Any = None

    def begin(self, label: Any) -> str | int:
        """Go on to a column, and return its name.

        Raises
        ------
        UsageError
            If another column has it, or it is none that is kept.
        """
        self._at = label
        named = _label_of(label, "column")
        if named in self._labels:
            raise UsageError(
                f"two columns of the table are called {named!r:.80}, and a name is how a reader finds one: "
                f"rename them, table.columns = [...]"
            )
        self._labels.add(named)
        return named

    def add(self, wanted: str, array: Any) -> str:
        """Take an array in, and return what it is called."""
        name = wanted
        try:
            check_array_name(name)
        except UsageError:
            name = f"column {len(self._labels)}"
        while name in self.arrays or name == ENTRY:
            name += "'"
        self.arrays[name] = array
        return name

    def refuse(self, dtype: object, remedy: str = "") -> UsageError:
        """Return the error for a column of a type that is not published."""
        where = "the index" if self._at is None else f"column {self._at!r:.80}"
        drop = "drop it: table.reset_index(drop=True)" if self._at is None else _DROP[self.library].format(self._at)
        remedy = remedy or "convert it with .astype(...)"
        if self.library == "polars":
            remedy = remedy.replace(".astype(", ".cast(")
        return UsageError(
            f"{where} of the table is of type {dtype!s:.80}, which has no memory to share: {remedy}, or {drop}"
        )


def _label_of(label: Any, what: str) -> str | int:
    """Return a name as it is published; it may be text or a number."""
    if isinstance(label, str):
        try:
            if len(label) <= 1024 and label.encode():
                return str(label)
            if not label:
                return ""
        except UnicodeEncodeError:
            pass
        raise UsageError(f"{what} name {label[:40]!r} is longer than 1024 characters, or no UTF-8: rename it")
    if hasattr(label, "__index__") and not isinstance(label, (bool, np.bool_)):
        number = int(label)
        if -(2**63) <= number < 2**63:
            return number
    if isinstance(label, tuple):
        raise UsageError(
            f"{what} name {label!r:.80} has several levels (MultiIndex), which are not published: join them, "
            f'table.columns = ["/".join(map(str, c)) for c in table.columns]'
        )
    raise UsageError(
        f"{what} name {label!r:.80} is of type {type(label).__name__}; names are text or integers: rename it, such as "
        f"by table.columns = table.columns.map(str)"
    )


# -- pandas ----------------------------------------------------------------------------------------------------------
def _of_pandas(table: Any, taken: _Taken) -> TableWords:
    import pandas as pd

    if table.columns.nlevels > 1:
        _label_of(table.columns[0] if len(table.columns) else (), "column")
    if table.index.nlevels > 1:
        names = ", ".join(repr(name) for name in table.index.names)
        raise UsageError(
            f"the index of the table has {table.index.nlevels} levels ({names:.80}), a MultiIndex, which is not "
            f"published: make columns of it, table.reset_index()"
        )
    columns = []
    for position, label in enumerate(table.columns):
        named = taken.begin(label)
        columns.append(_pandas_column(table.iloc[:, position].array, named, str(named), taken))
    index, span = table.index, None
    name = None if index.name is None else _label_of(index.name, "index")
    kept = None
    if isinstance(index, pd.RangeIndex):
        if not all(-(2**63) <= edge < 2**63 for edge in (index.start, index.stop, index.step)):
            raise UsageError("the index of the table has numbers beyond 64 bits: table.reset_index(drop=True)")
        span = IndexRange(index.start, index.stop, index.step, name)
    else:
        taken._at = None
        kept = _pandas_column(index.array, name, "index", taken)
    heading = None if table.columns.name is None else _label_of(table.columns.name, "heading")
    return TableWords(VERSION, "pandas", len(table), tuple(columns), kept, span, heading)


def _pandas_column(array: Any, label: str | int | None, name: str, taken: _Taken) -> Column:
    import pandas as pd

    dtype = array.dtype
    if isinstance(array, pd.arrays.NumpyExtensionArray) and not isinstance(dtype, pd.StringDtype):
        dtype = dtype.numpy_dtype
    if isinstance(array, pd.Categorical):
        categories = _pandas_categories(array.categories, name, taken)
        data = taken.add(name, np.asarray(array.codes))
        return Column("codes", data, label, categories=categories, ordered=bool(array.ordered))
    if isinstance(array, (pd.arrays.IntegerArray, pd.arrays.FloatingArray, pd.arrays.BooleanArray)):
        # Its two arrays; what pandas offers to all makes a copy of each.
        data = taken.add(name, _numpy_values(array._data, taken))
        return Column("values", data, label, missing=taken.add(f"{name}:missing", array._mask), form="masked")
    if isinstance(dtype, pd.DatetimeTZDtype):
        zone = _zone(dtype.tz, taken, dtype)
        data = taken.add(name, np.asarray(array, dtype=f"M8[{dtype.unit}]"))
        return Column("values", data, label, zone=zone)
    if isinstance(dtype, pd.StringDtype):
        if dtype.storage != "pyarrow":
            raise taken.refuse(dtype, 'convert it with .astype("string[pyarrow]"), which needs pyarrow')
        form = "string" if dtype.na_value is pd.NA else "str"
        return _arrow_column(array.__arrow_array__(), label, name, taken, form)
    if isinstance(dtype, pd.ArrowDtype):
        return _arrow_column(array.__arrow_array__(), label, name, taken, "arrow")
    if isinstance(dtype, np.dtype):
        if dtype.hasobject:
            raise taken.refuse(dtype, 'convert it, text with .astype("string[pyarrow]") or .astype("category")')
        return Column("values", taken.add(name, _numpy_values(np.asarray(array), taken)), label)
    raise taken.refuse(dtype)


def _numpy_values(values: NDArray, taken: _Taken) -> NDArray:
    try:
        dtype_name(as_dtype(values.dtype))
    except UsageError as error:
        raise taken.refuse(values.dtype) from error
    if values.dtype.kind not in "biufcmM":
        raise taken.refuse(values.dtype)
    return values


def _pandas_categories(index: Any, name: str, taken: _Taken) -> Categories:
    dtype = index.dtype
    if isinstance(dtype, np.dtype) and dtype.kind in "biufcmM":
        return Categories(taken.add(f"{name}:categories", _numpy_values(np.asarray(index), taken)), len(index))
    values = list(index)
    if not all(isinstance(value, str) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        remedy = "have categories that are all text, or all numbers: .cat.rename_categories(...)"
        raise taken.refuse(f"category of {', '.join(kinds):.60}", remedy)
    return _text_categories(values, name, taken, "object" if isinstance(dtype, np.dtype) else "str")


def _text_categories(values: Sequence[str], name: str, taken: _Taken, dtype: Any) -> Categories:
    try:
        encoded = [value.encode() for value in values]
    except UnicodeEncodeError:
        raise taken.refuse("category, one of which is no UTF-8", "rename it") from None
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(one) for one in encoded], out=offsets[1:])
    data = taken.add(f"{name}:categories", np.frombuffer(b"".join(encoded), np.uint8))
    return Categories(data, len(encoded), taken.add(f"{name}:categories:offsets", offsets), dtype)


def _zone(zone: object, taken: _Taken, dtype: object) -> str:
    """Return what a time zone is called, in words that other libraries and processes know."""
    said = str(getattr(zone, "key", None) or zone)
    fixed = re.fullmatch(r"(?:UTC)?([+-]\d{2}:\d{2})", said)
    said = fixed[1] if fixed else said
    if not check_zone(said):
        raise taken.refuse(dtype, 'convert it with .dt.tz_convert("UTC")')
    return said


# -- polars ----------------------------------------------------------------------------------------------------------
def _of_polars(table: Any, taken: _Taken) -> TableWords:
    _pyarrow("publishing a table of polars")
    columns = []
    for series in table.iter_columns():
        label = taken.begin(series.name)
        columns.append(_polars_column(series, label, str(label), taken))
    return TableWords(VERSION, "polars", table.height, tuple(columns))


def _polars_column(series: Any, label: str | int, name: str, taken: _Taken) -> Column:
    import polars as pl

    if series.dtype == pl.String:
        found = _polars_text(series, label, name, taken)
        return found if found is not None else _later_text(series, label, name, taken)
    if series.dtype == pl.Object or series.dtype.is_nested():
        raise taken.refuse(series.dtype, "cast it, or make columns of it (.explode(), .struct.unnest())")
    from pyarrow import ArrowException

    try:
        chunked = _chunked([chunk.to_arrow() for chunk in series.get_chunks()])
    except ArrowException:  # a type that polars alone has, such as integers of 128 bits
        raise taken.refuse(series.dtype, "cast it") from None
    return _arrow_column(chunked, label, name, taken, "enum" if series.dtype == pl.Enum else "")


def _polars_text(series: Any, label: str | int, name: str, taken: _Taken) -> Column | None:
    """Return text as polars has it, if all of its memory is text of this column, which is so unless it was filtered."""
    import polars as pl

    chunks = series.get_chunks()
    if len(chunks) != 1 or not len(series):
        return None
    array = chunks[0].to_arrow(compat_level=pl.CompatLevel.newest())
    valid, views, *buffers = array.buffers()
    data = np.frombuffer(views, np.int32, count=4 * len(array), offset=16 * array.offset)
    rows = data.reshape(-1, 4)
    if valid is not None and array.null_count and (rows[~_truth(array)] != 0).any():
        return None  # words under a missing row
    long = rows[rows[:, 0] > 12].astype(np.int64)
    length, number, offset = long[:, 0], long[:, 2], long[:, 3]
    # One behind the other, from the first byte of each buffer to its last.
    starts = np.cumsum([0, *[buffer.size for buffer in buffers]])
    at = np.append(starts[number] + offset, starts[-1])
    if (at[1:] != at[:-1] + length).any() or at[0] != 0 or len(buffers) > 1024:
        return None
    names = [taken.add(f"{name}:text {count}", np.frombuffer(one, np.uint8)) for count, one in enumerate(buffers)]
    valid_name = _validity(_chunked([array]), name, taken)
    return Column("views", taken.add(name, data), label, buffers=tuple(names), valid=valid_name)


def _later_text(series: Any, label: str | int, name: str, taken: _Taken) -> Column:
    """Convert text when it is copied, so that no two columns are there converted at a time."""
    rows, nbytes = len(series), int(series.str.len_bytes().sum() or 0)
    converted: list[Any] = []

    def offsets_of() -> Any:
        converted[:] = [series.to_arrow()]
        return converted[0]

    def write_offsets(out: NDArray) -> None:
        _write_offsets([offsets_of()], out)

    def write_data(out: NDArray) -> None:
        array = converted[0] if converted else offsets_of()
        converted.clear()
        at = 0
        for piece in _text_pieces([array])[1]:
            out[at : at + len(piece)] = piece
            at += len(piece)

    valid = ""
    if series.null_count():
        present = series.is_not_null()
        valid = taken.add(f"{name}:valid", _written(np.uint8, (rows + 7) // 8, _bit_writer([present.to_arrow()], 1)))
    offsets = taken.add(f"{name}:offsets", _written(np.int64, rows + 1, write_offsets))
    data = taken.add(name, _written(np.uint8, nbytes, write_data))
    return Column("text", data, label, offsets=offsets, valid=valid)


# -- Arrow -----------------------------------------------------------------------------------------------------------
def _of_arrow(table: Any, taken: _Taken) -> TableWords:
    columns = []
    for label, column in zip(table.schema.names, table.columns, strict=True):
        named = taken.begin(label)
        chunked = column if hasattr(column, "chunks") else _chunked([column])
        columns.append(_arrow_column(chunked, named, str(named), taken))
    return TableWords(VERSION, "arrow", table.num_rows, tuple(columns))


def _arrow_column(chunked: Any, label: str | int | None, name: str, taken: _Taken, form: Any = "") -> Column:
    pa = _pyarrow("a column of Arrow")
    t, kind = pa.types, chunked.type
    if t.is_dictionary(kind):
        return _arrow_codes(chunked, label, name, taken, form)
    if t.is_string_view(kind):
        chunked, kind = chunked.cast(pa.large_string()), pa.large_string()
    if t.is_boolean(kind):
        data = taken.add(name, _written(np.uint8, (len(chunked) + 7) // 8, _bit_writer(chunked.chunks, 1)))
        return Column("bits", data, label, valid=_validity(chunked, name, taken), form=form)
    if t.is_string(kind) or t.is_large_string(kind) or t.is_binary(kind) or t.is_large_binary(kind):
        offsets, pieces = _text_pieces(chunked.chunks)
        text = t.is_string(kind) or t.is_large_string(kind)
        return Column(
            "text" if text else "bytes",
            taken.add(name, _joined(np.uint8, pieces)),
            label,
            offsets=taken.add(f"{name}:offsets", offsets),
            valid=_validity(chunked, name, taken),
            form=form,
        )
    unit = zone = ""
    if t.is_timestamp(kind):
        dtype, zone = np.dtype(f"M8[{kind.unit}]"), _zone(kind.tz, taken, kind) if kind.tz else ""
    elif t.is_duration(kind):
        dtype = np.dtype(f"m8[{kind.unit}]")
    elif t.is_date(kind) or t.is_time(kind):
        unit = str(kind).partition("[")[0] if t.is_date(kind) else str(kind)
        dtype = np.dtype(f"int{kind.bit_width}")
    elif t.is_integer(kind) or t.is_floating(kind):
        dtype = np.dtype(kind.to_pandas_dtype())
    else:
        remedy = "convert it with .astype(...)" if taken.library != "arrow" else "convert it with .cast(...)"
        if t.is_nested(kind):
            remedy = "make columns of what is in it"
        raise taken.refuse(kind, remedy)
    data = taken.add(name, _joined(dtype, [_fixed(chunk, dtype) for chunk in chunked.chunks]))
    valid = _validity(chunked, name, taken)
    return Column("values", data, label, valid=valid, form=form, unit=unit, zone=zone)  # type: ignore[arg-type]


def _arrow_codes(chunked: Any, label: str | int | None, name: str, taken: _Taken, form: Any) -> Column:
    pa = _pyarrow("a column of Arrow")
    kind = chunked.type
    if chunked.num_chunks > 1:
        chunked = chunked.unify_dictionaries()
    values = chunked.chunk(0).dictionary if chunked.num_chunks else pa.array([], kind.value_type)
    text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    if values.null_count or not (text or pa.types.is_integer(values.type) or pa.types.is_floating(values.type)):
        raise taken.refuse(kind, "have categories that are all text, or all numbers")
    if text:
        categories = _text_categories(values.to_pylist(), name, taken, "")
    else:
        dtype = np.dtype(values.type.to_pandas_dtype())
        categories = Categories(taken.add(f"{name}:categories", _fixed(values, dtype)), len(values))
    indices = _chunked([chunk.indices for chunk in chunked.chunks], kind.index_type)
    dtype = np.dtype(kind.index_type.to_pandas_dtype())
    data = taken.add(name, _joined(dtype, [_fixed(chunk, dtype) for chunk in indices.chunks]))
    valid = _validity(indices, name, taken)
    return Column("codes", data, label, valid=valid, form=form, categories=categories, ordered=kind.ordered)


def _validity(chunked: Any, name: str, taken: _Taken) -> str:
    """Take in the bits that say which rows there are; none are needed where there are all."""
    if not chunked.null_count:
        return ""
    return taken.add(f"{name}:valid", _written(np.uint8, (len(chunked) + 7) // 8, _bit_writer(chunked.chunks, 0)))


def _chunked(chunks: Sequence[Any], kind: Any = None) -> Any:
    return _pyarrow("a column of Arrow").chunked_array(chunks, kind if not chunks else None)


def _fixed(chunk: Any, dtype: np.dtype[Any]) -> NDArray:
    """Return the values of a chunk that are one behind the other."""
    if not len(chunk):
        return np.empty(0, dtype)
    return np.frombuffer(chunk.buffers()[1], dtype, count=len(chunk), offset=chunk.offset * dtype.itemsize)


def _truth(chunk: Any, which: int = 0) -> NDArray:
    """Return bits of a chunk as a byte each: which rows there are (buffer 0), or its truth values (buffer 1)."""
    buffer = chunk.buffers()[which]
    if buffer is None or not len(chunk):
        return np.ones(len(chunk), np.bool_)
    first = chunk.offset // 8
    bits = np.frombuffer(buffer, np.uint8, count=(chunk.offset + len(chunk) + 7) // 8 - first, offset=first)
    skip = chunk.offset % 8
    return np.unpackbits(bits, count=skip + len(chunk), bitorder="little")[skip:].view(np.bool_)


def _bit_writer(chunks: Iterable[Any], which: int) -> Callable[[NDArray], None]:
    def write(out: NDArray) -> None:
        pieces = [_truth(chunk, which) for chunk in chunks] or [np.empty(0, np.bool_)]
        out[...] = np.packbits(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), bitorder="little")

    return write


def _text_pieces(chunks: Sequence[Any]) -> tuple[NDArray | Source, list[NDArray]]:
    """Return the offsets of text, from 0 on, and its bytes: of each chunk what its rows are, and no more."""
    pieces = []
    for chunk in chunks:
        at = _offsets(chunk)
        data = chunk.buffers()[2]
        blob = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
        pieces.append(blob[at[0] : at[-1]])
    if len(chunks) == 1 and (at := _offsets(chunks[0])).dtype == np.int64 and at[0] == 0:
        return at, pieces
    rows = sum(len(chunk) for chunk in chunks)
    return _written(np.int64, rows + 1, lambda out: _write_offsets(chunks, out)), pieces


def _offsets(chunk: Any) -> NDArray:
    dtype = np.dtype(np.int64 if str(chunk.type).startswith("large") else np.int32)
    buffer = chunk.buffers()[1]
    if buffer is None or not buffer.size:
        return np.zeros(1, dtype)
    return np.frombuffer(buffer, dtype, count=len(chunk) + 1, offset=chunk.offset * dtype.itemsize)


def _write_offsets(chunks: Sequence[Any], out: NDArray) -> None:
    row = base = 0
    out[0] = 0
    for chunk in chunks:
        at = _offsets(chunk)
        np.add(at[1:], base - int(at[0]), out=out[row + 1 : row + len(at)], casting="unsafe", dtype=np.int64)
        row, base = row + len(at) - 1, base + int(at[-1]) - int(at[0])


def _joined(dtype: Any, pieces: Sequence[NDArray]) -> NDArray | Source:
    """Return pieces one behind the other, without making that anywhere but where it will be published."""
    if len(pieces) == 1:
        return pieces[0]

    def write(out: NDArray) -> None:
        at = 0
        for piece in pieces:
            out[at : at + len(piece)] = piece
            at += len(piece)

    return _written(dtype, sum(len(piece) for piece in pieces), write)


def _written(dtype: Any, length: int, write: Callable[[NDArray], None]) -> NDArray | Source:
    """Return an array that there is not yet, with what writes it."""
    return Source(np.broadcast_to(np.zeros((), dtype), (length,)), write)


def _pyarrow(what: str) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UnsupportedError(what, "pyarrow", "none installed", "pip install pyarrow") from None
    return pyarrow
