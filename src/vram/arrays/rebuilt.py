"""Tables made again of the arrays that they were published as: columns of pandas, polars or Arrow over shared memory.

What a library would believe, such as where text begins, was checked before it comes there: see :mod:`.columns`.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ProtocolError, UnsupportedError, UsageError
from .columns import Categories, Column, Parts, TableWords, decode_table
from .numpy_on_use import np

if TYPE_CHECKING:
    from .views import NDArray

_NAT = -(2**63)  # of numpy: the point in time that there is not
_ARROW_UNITS = ("s", "ms", "us", "ns")
_INSTALL = {"pandas": ("pandas", "pyarrow"), "polars": ("polars", "pyarrow"), "pyarrow": ("pyarrow",)}
_MODULES = {"pandas": "pandas", "polars": "polars", "arrow": "pyarrow"}


def table_of(data: NDArray, arrays: Mapping[str, NDArray], library: str | None, *, whole: bool) -> Any:
    """Make a table of arrays.

    Parameters
    ----------
    data : numpy.ndarray
        What is said of it.
    arrays : mapping of str to numpy.ndarray
        By name.
    library : {"pandas", "polars", "arrow"}, optional
        Whose table to make; by default that of the one that was published.
    whole : bool
        Check all that is believed afterwards, also what costs time by the row.

    Raises
    ------
    ProtocolError
        If what is said of the table is not so.
    UnsupportedError
        If the library is not there.
    UsageError
        If a column has no counterpart in that library.
    """
    words = decode_table(data)
    chosen = words.library if library is None else library
    _load(_MODULES[chosen], f"a table of {chosen}")
    parts = Parts(arrays, words.rows, whole=whole)
    columns = [*words.columns, *([] if words.index is None else [words.index])]
    if whole:
        parts.check_memory(columns)
    for column in columns:
        with _in_column(column):
            parts.check(column)
    build = _Build(parts)
    if chosen == "pandas":
        return _as_pandas(words, build)
    table = _as_arrow(words, build)
    if chosen == "arrow":
        return table
    return _as_polars(words, build, table)


def _load(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        remedy = f"pip install {' '.join(_INSTALL[module])}"
        if module != "pyarrow":
            remedy += ', or ask for the table of another library: lease.table("arrow")'
        raise UnsupportedError(what, module, "none installed", remedy) from None


@contextlib.contextmanager
def _in_column(column: Column) -> Iterator[None]:
    """Have what is wrong with a column say which one it is, whatever library has found it."""
    try:
        yield
    except ProtocolError as error:
        raise ProtocolError(f"{_called(column)} of the table is described wrongly: {error!s:.300}") from None
    except (UsageError, UnsupportedError):
        raise
    except (ValueError, TypeError, LookupError, OverflowError, NotImplementedError) as error:
        raise ProtocolError(f"{_called(column)} of the table is described wrongly: {error!s:.300}") from error


@contextlib.contextmanager
def _refused_by(library: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust, in polars
            raise
        raise UsageError(
            f"{library} makes no table of these columns: {error!s:.300}; ask for another library"
        ) from error


def _called(column: Column) -> str:
    return "the index" if column.label is None else f"column {column.label!r:.80}"


class _Build:
    """Makes columns of parts that were checked."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.rows = parts.rows

    # -- of Arrow ---------------------------------------------------------------------------------------------------
    def arrow(self, column: Column) -> Any:
        """Return a column as an array of Arrow: over the same memory, unless Arrow has it in another way."""
        pa = _load("pyarrow", f"{_called(column)} of the table")
        parts, rows = self._parts, self.rows
        data = parts.data(column)
        valid, nulls = self._validity(column, data)
        if column.kind == "values":
            kind = self._arrow_type(column, data)
            if data.dtype.kind == "b":
                data = np.packbits(data, bitorder="little")
            return pa.Array.from_buffers(kind, rows, [valid, pa.py_buffer(data)], nulls)
        if column.kind == "bits":
            return pa.Array.from_buffers(pa.bool_(), rows, [valid, pa.py_buffer(data)], nulls)
        if column.kind == "codes":
            return self._arrow_codes(column, data, valid, nulls)
        if column.kind == "views":
            buffers = [pa.py_buffer(one) for one in parts.buffers(column)]
            found = pa.Array.from_buffers(pa.string_view(), rows, [valid, pa.py_buffer(data), *buffers], nulls)
        else:
            kind = pa.large_string() if column.kind == "text" else pa.large_binary()
            offsets = pa.py_buffer(parts.offsets(column))
            found = pa.Array.from_buffers(kind, rows, [valid, offsets, pa.py_buffer(data)], nulls)
        if parts.whole:
            found.validate(full=True)  # UTF-8, besides
        return found

    def _arrow_type(self, column: Column, data: NDArray) -> Any:
        pa = _load("pyarrow", f"{_called(column)} of the table")
        if column.unit:
            return pa.type_for_alias(column.unit)
        kind, dtype = data.dtype.kind, data.dtype
        if kind in "mM":
            unit = np.datetime_data(dtype)
            if unit[1] == 1 and unit[0] in _ARROW_UNITS:
                return pa.timestamp(unit[0], column.zone or None) if kind == "M" else pa.duration(unit[0])
        elif kind in "biuf" and dtype.itemsize <= 8:
            return pa.from_numpy_dtype(dtype)
        raise UsageError(f'{_called(column)} is of type {dtype}, which Arrow has none for: lease.table("pandas")')

    def _validity(self, column: Column, data: NDArray) -> tuple[Any, int]:
        """Return the bits of the rows that there are, as a buffer, and how many there are not; -1 to be counted."""
        pa = _load("pyarrow", f"{_called(column)} of the table")
        bits, missing = self._parts.valid(column), self._parts.missing(column)
        if bits is not None:
            return pa.py_buffer(bits), -1
        if missing is None and column.kind == "values" and data.dtype.kind in "mM":
            missing = data.view(np.int64) == _NAT
        elif missing is None and column.kind == "codes" and data.dtype.kind == "i":
            missing = data < 0
        if missing is None or not missing.any():
            return None, 0
        return pa.py_buffer(np.packbits(~missing, bitorder="little")), -1

    def _arrow_codes(self, column: Column, data: NDArray, valid: Any, nulls: int) -> Any:
        pa = _load("pyarrow", f"{_called(column)} of the table")
        indices = pa.Array.from_buffers(pa.from_numpy_dtype(data.dtype), self.rows, [valid, pa.py_buffer(data)], nulls)
        found = self.categories(column)
        values = pa.array(found, pa.large_string()) if isinstance(found, list) else pa.array(found)
        # What is not to be believed was looked at before, also under rows that there are not.
        return pa.DictionaryArray.from_arrays(indices, values, ordered=column.ordered, safe=False)

    def categories(self, column: Column) -> NDArray | list[str]:
        words = column.categories or Categories("", 0)
        return self._parts.categories(words)

    # -- of pandas --------------------------------------------------------------------------------------------------
    def pandas(self, column: Column) -> Any:
        """Return a column as pandas has it: as numpy's values where it can, as Arrow's where not."""
        pd = _load("pandas", "a table of pandas")
        parts = self._parts
        data, missing = parts.data(column), parts.missing(column)
        if column.kind == "codes":
            return self._categorical(column, data)
        if column.kind in ("text", "views") and column.form != "arrow":
            if column.kind == "views":  # pandas has no such text; this is a copy
                pa = _load("pyarrow", f"{_called(column)} of the table")
                text = self.arrow(column).cast(pa.large_string())
            else:
                text = self.arrow(column)
            return pd.StringDtype("pyarrow", na_value=pd.NA if column.form == "string" else np.nan).__from_arrow__(text)
        plain = column.kind == "values" and not column.unit and not column.valid and column.form != "arrow"
        if not plain:
            array = self.arrow(column)
            return pd.ArrowDtype(array.type).__from_arrow__(array)
        if missing is not None:
            masked = {"b": pd.arrays.BooleanArray, "f": pd.arrays.FloatingArray}.get(data.dtype.kind)
            masked = masked or (pd.arrays.IntegerArray if data.dtype.kind in "iu" else None)
            if masked is None:
                raise ProtocolError(f"rows of {data.dtype} are said to be missing by bytes")
            return masked(data, missing, copy=False)
        if column.zone:
            unit = np.datetime_data(data.dtype)[0]
            return pd.Series(data, copy=False).array.view(pd.DatetimeTZDtype(unit, _time_zone(column.zone)))
        return data

    def _categorical(self, column: Column, data: NDArray) -> Any:
        pd = _load("pandas", "a table of pandas")
        words = column.categories or Categories("", 0)
        found = self.categories(column)
        index = pd.Index(found, dtype=words.dtype or "str") if isinstance(found, list) else pd.Index(found)
        valid = self._parts.valid(column)
        if valid is not None or data.dtype.kind == "u":  # pandas says -1 of what is missing
            data = data.astype(np.int64 if data.dtype.itemsize >= 4 else np.int32)
            if valid is not None:
                data[~np.unpackbits(valid, count=self.rows, bitorder="little").view(np.bool_)] = -1
        return pd.Categorical.from_codes(data, dtype=pd.CategoricalDtype(index, column.ordered), validate=False)


def _time_zone(zone: str) -> Any:
    """Return a time zone by its name, which was checked to be one: pandas itself would read files by their paths."""
    import datetime
    import zoneinfo

    if zone == "UTC":
        return datetime.UTC
    if zone[0] in "+-":
        offset = datetime.timedelta(hours=int(zone[1:3]), minutes=int(zone[4:6]))
        return datetime.timezone(-offset if zone[0] == "-" else offset)
    return zoneinfo.ZoneInfo(zone)


def _as_pandas(words: TableWords, build: _Build) -> Any:
    pd = _load("pandas", "a table of pandas")
    made: dict[int, Any] = {}
    for position, column in enumerate(words.columns):
        with _in_column(column):
            made[position] = build.pandas(column)
    if words.index is not None:
        with _in_column(words.index):
            index = pd.Index(build.pandas(words.index), name=words.index.label, copy=False)
    elif words.span is not None:
        span = words.span
        index = pd.RangeIndex(span.start, span.stop, span.step, name=span.label)
    else:
        index = pd.RangeIndex(words.rows)
    with _refused_by("pandas"):  # it has no weeks and no years, and makes something else of them
        table = pd.DataFrame(made, index=index, copy=False)
    if made:
        table.columns = pd.Index([column.label for column in words.columns], name=words.heading)
    return table


def _as_polars(words: TableWords, build: _Build, table: Any) -> Any:
    polars = _load("polars", "a table of polars")
    if not table.num_columns:
        return polars.DataFrame()
    of_enums = [one for one in words.columns if one.form == "enum"]
    with _refused_by("polars"):
        found = polars.from_arrow(table, rechunk=False)
        enums = {str(one.label): build.categories(one) for one in of_enums}
        return found.with_columns([polars.col(name).cast(polars.Enum(kept)) for name, kept in enums.items()])


def _as_arrow(words: TableWords, build: _Build) -> Any:
    pa = _load("pyarrow", "a table of Arrow")
    names, arrays = [], []
    for column in (*words.columns, *([] if words.index is None else [words.index])):
        with _in_column(column):
            arrays.append(build.arrow(column))
        names.append("index" if column.label is None else str(column.label))
    span = words.span
    if span is not None and (span.start, span.step, span.label) != (0, 1, None):
        if not arrays:  # there are no rows in memory either, and would be as many here as somebody says
            raise UsageError(f'the table has an index, {span}, and no columns: ask for lease.table("pandas")')
        arrays.append(pa.array(np.arange(span.start, span.stop, span.step, dtype=np.int64)))
        names.append("index" if span.label is None else str(span.label))
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UsageError(
            f"two columns of the table would be called {twice[0]!r:.80} there, one being the index: "
            f'ask for lease.table("pandas")'
        )
    return pa.Table.from_arrays(arrays, names=names)
