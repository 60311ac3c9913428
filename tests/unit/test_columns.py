"""Columns of any type, with rows missing and without, cut and joined in any way, come back as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pd = pytest.importorskip("pandas", reason="pandas is not installed")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pl = pytest.importorskip("polars", reason="polars is not installed")
from tests.support.tables_apart import read, taken_apart  # noqa: E402  (which is left out where one of them is missing)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threads_of_polars")]  # goes with our own form of tables

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
ARROW = {
    **{
        str(kind): (kind, st.integers(0, 100)) for kind in (pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.uint64())
    },
    **{str(kind): (kind, st.integers(-99, 99).map(float)) for kind in (pa.float32(), pa.float64())},
    **{str(kind): (kind, st.integers(0, 80_000)) for kind in (pa.date32(), pa.time32("s"), pa.time64("ns"))},
    **{str(kind): (kind, st.integers(0, 2**40)) for kind in (pa.timestamp("us", "Asia/Tokyo"), pa.duration("ms"))},
    "bool": (pa.bool_(), st.booleans()),
    "string": (pa.string(), TEXT),
    "large_string": (pa.large_string(), TEXT),
    "binary": (pa.binary(), st.binary(max_size=20)),
}


@st.composite
def chunked(draw: st.DrawFn, name: str) -> Any:
    """A column of Arrow in several chunks, each a part of a longer one, so that bits and offsets begin anywhere."""
    kind, values = ARROW[name]
    chunks = []
    for _ in range(draw(st.integers(0, 3))):
        some = draw(st.lists(st.none() | values, max_size=20))
        array = pa.array(some, kind)
        start = draw(st.integers(0, len(some)))
        chunks.append(array[start : draw(st.integers(start, len(some)))])
    return pa.chunked_array(chunks, kind)


@pytest.mark.parametrize("name", ARROW)
@given(data=st.data())
def test_a_column_of_arrow_comes_back_however_it_was_cut(name: str, data: st.DataObject) -> None:
    column = data.draw(chunked(name))
    found = read(*taken_apart(pa.table({"c": column})))
    found.validate(full=True)
    assert found["c"].to_pylist() == column.to_pylist()
    assert found["c"].num_chunks <= 1


@given(data=st.data())
def test_codes_of_chunks_that_count_differently_come_back(data: st.DataObject) -> None:
    chunks = [
        pa.array(some, pa.string()).dictionary_encode() for some in data.draw(st.lists(st.lists(st.none() | TEXT)))
    ]
    column = pa.chunked_array(chunks, pa.dictionary(pa.int32(), pa.string()))
    assert read(*taken_apart(pa.table({"c": column})))["c"].to_pylist() == column.to_pylist()


@given(st.lists(st.none() | TEXT, max_size=30), st.data())
def test_text_of_polars_comes_back_however_it_was_chosen(values: list[str | None], data: st.DataObject) -> None:
    table = pl.DataFrame({"s": pl.Series(values, dtype=pl.String)})
    chosen = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=30)) if values else []
    for some in (table, table[chosen], table.slice(1, 3), pl.concat([table, table[chosen]], rechunk=False)):
        words, arrays = taken_apart(some)
        for library in ("polars", "pandas", "arrow"):
            found = read(words, arrays, library)
            assert pl.DataFrame(found)["s"].to_list() == some["s"].to_list()
        kept = sum(len(value.encode()) for value in some["s"] if value is not None)
        assert sum(array.nbytes for name, array in arrays.items() if array.dtype == np.uint8) <= kept + len(some)


NUMPY = ("bool", "int8", "uint32", "int64", "float16", "float64", "complex64", "datetime64[s]", "timedelta64[ns]")


@pytest.mark.parametrize("dtype", NUMPY)
@given(rows=st.integers(0, 20), step=st.integers(1, 3), label=TEXT | st.integers(-(2**63), 2**63 - 1))
def test_a_column_of_numpy_comes_back_as_it_was(dtype: str, rows: int, step: int, label: str | int) -> None:
    values = np.arange(rows).astype("int64").astype(dtype)
    table = pd.DataFrame({label: values[::step]}, copy=False)
    found = read(*taken_apart(table))
    pd.testing.assert_frame_equal(found, table)
    assert found.dtypes.tolist() == table.dtypes.tolist()


@pytest.mark.parametrize("dtype", ["Int8", "UInt64", "Float32", "boolean", "string[pyarrow]", "str", "category"])
@given(rows=st.lists(st.none() | st.booleans(), max_size=20), start=st.integers(0, 9))
def test_a_column_of_pandas_with_rows_missing_comes_back_as_it_was(
    dtype: str, rows: list[bool | None], start: int
) -> None:
    text = [None if row is None else f"{row}, which is longer than twelve bytes" for row in rows]
    values = text if dtype in ("string[pyarrow]", "str", "category") else rows
    table = pd.DataFrame({"c": pd.Series(pd.array(values, dtype="str" if dtype == "category" else dtype))})
    table = table.astype(dtype).iloc[start:]
    pd.testing.assert_frame_equal(read(*taken_apart(table)), table)
