"""Tables of pandas, polars and Arrow in one memory: a stream of Arrow's IPC, whose columns are read where they lie.

Arrow does the work (`Arrow Columnar Format, "Serialization and Interprocess Communication"
<https://arrow.apache.org/docs/format/Columnar.html>`_), and pandas and polars convert to it and back. None of the
three is loaded here before a table of it was given.
"""

from __future__ import annotations

import contextlib
import importlib
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import ProtocolError, UnsupportedError, UsageError
from ..sharing.descriptor import check_array_name
from .create import empty
from .dtypes import as_dtype, dtype_name
from .tables import is_frame

if TYPE_CHECKING:
    from .views import NDArray

ENTRY = "vram.table"  # the name of the array that the stream is
LIBRARIES = ("pandas", "polars", "arrow")
_MODULES = {"pandas": "pandas", "polars": "polars", "arrow": "pyarrow"}
_FROM = b"vram.library"  # in the metadata of the schema: the library of the table that was published


def arrays_of_table(table: Any) -> dict[str, Any]:
    """Write a table into memory that can be shared, once, and return the arrays to publish: the stream, then columns of
    numbers without missing values, on the same memory. Raises UsageError for a column that Arrow cannot hold."""
    library = is_frame(table)
    pa = _load("arrow", f"publishing a table of {library}")
    with _refused(f"this table of {library} has no form in Arrow, so it cannot be published"):
        whole = {"pandas": _from_pandas, "polars": _from_polars, "arrow": _from_arrow}[library](table)
        schema = whole.schema.with_metadata({**(whole.schema.metadata or {}), _FROM: library.encode()})
        # One batch, also where there are no rows: categories come with a batch.
        columns = [each.chunk(0) if each.num_chunks == 1 else each.combine_chunks() for each in whole.columns]
        whole = pa.RecordBatch.from_arrays(columns, schema=schema)
        sized = pa.MockOutputStream()
        _write(whole, sized)
    memory = empty(sized.size(), "uint8", device="host")
    view = memory.numpy()
    _write(whole, pa.FixedSizeBufferWriter(pa.py_buffer(view)))
    found: dict[str, Any] = {ENTRY: memory}
    start = view.__array_interface__["data"][0]
    written = pa.ipc.open_stream(pa.py_buffer(view)).read_all()
    for name, column in zip(written.column_names, written.columns, strict=True):
        dtype = _plain_dtype(name, column)
        if dtype is None or name in found:
            continue
        one = column.chunk(0)
        at = one.buffers()[1].address - start + one.offset * dtype.itemsize
        found[name] = view[at : at + len(one) * dtype.itemsize].view(dtype)
    return found


def table_from(data: NDArray, library: str | None, *, whole: bool) -> Any:
    """Return the table of a stream, whose columns are its memory, for `library`, by default the publisher's.
    With `whole` every offset, code and character is checked, at a cost by the row: for what a stranger has written."""
    pa = _load("arrow", "reading a table")
    try:
        if whole:
            _refuse_compressed(pa, data)
        table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
        table.validate(full=whole)
    except (pa.ArrowException, OSError, ValueError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"the table is described wrongly: {error!s:.300}") from None
    metadata = dict(table.schema.metadata or {})
    chosen = library or metadata.pop(_FROM, b"arrow").decode(errors="replace")
    metadata.pop(_FROM, None)
    if chosen not in LIBRARIES:
        raise ProtocolError(f"the table is said to be of {chosen!r:.40}")
    table = table.replace_schema_metadata(metadata or None)
    if chosen == "arrow":
        return table
    module = _load(chosen, f"a table of {chosen}")
    with _refused(f"{chosen} makes no table of these columns; ask for another library"):
        if chosen == "pandas":
            return table.to_pandas(split_blocks=True)  # each column for itself, or numbers would be copied
        return module.from_arrow(table, rechunk=False) if table.num_columns else module.DataFrame()


def _write(batch: Any, sink: Any) -> None:
    import pyarrow as pa

    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)


def _from_pandas(table: Any) -> Any:
    import pyarrow as pa

    names = {type(name) for name in table.columns}
    if table.columns.nlevels == 1 and len(names) > 1 and str in names:
        raise UsageError(
            "the columns of the table are called by text and by numbers: name all by text, such as by "
            "table.columns = table.columns.map(str)"
        )
    if len(table) and not len(table.columns):
        raise UsageError("the table has an index and no columns: make it one, table.reset_index()")
    found = pa.Table.from_pandas(table)
    for number, dtype in enumerate(table.dtypes):
        if getattr(dtype, "kind", "") == "f" and type(dtype).__module__.startswith("numpy"):
            # NaN stays the number that it is: as a missing value it would be copied when it is attached.
            column = pa.array(table.iloc[:, number].to_numpy(), from_pandas=False)
            found = found.set_column(number, found.schema.field(number), column)
    return found


def _from_polars(table: Any) -> Any:
    objects = [name for name, dtype in table.schema.items() if str(dtype) == "Object"]
    if objects:  # which it would hand over as their addresses
        raise UsageError(f"column {objects[0]!r:.80} of the table holds Python objects: convert it, or leave it out")
    return table.to_arrow()  # text by offsets: of its own form polars keeps the bytes of rows that were filtered out


def _from_arrow(table: Any) -> Any:
    import pyarrow as pa

    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    large = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}  # as above
    if not any(field.type in large for field in table.schema):
        return table
    fields = [field.with_type(large.get(field.type, field.type)) for field in table.schema]
    return table.cast(pa.schema(fields, table.schema.metadata))


def _plain_dtype(name: str, column: Any) -> Any:
    """Return the dtype of a column that is an array as it lies; None for all others."""
    if column.null_count or column.num_chunks != 1:
        return None
    try:
        check_array_name(name)
        dtype = as_dtype(column.type.to_pandas_dtype())
        dtype_name(dtype)
    except (UsageError, NotImplementedError, TypeError, ValueError):
        return None
    return dtype if dtype.kind in "iufmM" and dtype.itemsize * 8 == column.type.bit_width else None


def _refuse_compressed(pa: Any, data: NDArray) -> None:
    """Refuse buffers that Arrow would unpack into memory as large as a stranger says. Fields as in ``Message.fbs``: 2
    is a message's header, 3 a record batch's ``compression``, 1 the record batch of a dictionary batch."""
    for message in pa.ipc.MessageReader.open_stream(pa.py_buffer(data)):
        words = message.metadata.to_pybytes()
        header = _field(words, _table(words, 0), 2)
        if message.type == "dictionary" and header is not None:
            header = _field(words, _table(words, header), 1)
        if message.type in ("record batch", "dictionary") and (
            header is None or _field(words, _table(words, header), 3) is not None
        ):
            raise ProtocolError("the table is compressed: its columns are not the memory itself")


def _table(words: bytes, at: int) -> int:
    """Return where a table of a flatbuffer is that an offset refers to."""
    return at + int(struct.unpack_from("<I", words, at)[0])


def _field(words: bytes, table: int, number: int) -> int | None:
    """Return where a field of such a table lies; None if it is left out."""
    layout = table - struct.unpack_from("<i", words, table)[0]
    if 4 + 2 * number >= struct.unpack_from("<H", words, layout)[0]:
        return None
    offset = struct.unpack_from("<H", words, layout + 4 + 2 * number)[0]
    return table + offset if offset else None


def _load(library: str, what: str) -> Any:
    module = _MODULES[library]
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UnsupportedError(
            what, module, "no such package", f"Install it: pip install pyarrow{f' {module}' * (library != 'arrow')}"
        ) from None


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    """Say what a library could not do with a table."""
    try:
        yield
    except (UsageError, UnsupportedError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust, in polars
            raise
        raise UsageError(f"{what}: {' '.join(map(str, error.args)) or type(error).__name__:.400}") from error
