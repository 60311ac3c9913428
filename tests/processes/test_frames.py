"""Tables of pandas, polars and Arrow: published as one memory, attached as tables whose columns are that memory."""

from __future__ import annotations

import datetime
import gc
import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

import vram
from vram.errors import UnsupportedError, UsageError

pd = pytest.importorskip("pandas", reason="pandas is not installed")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pl = pytest.importorskip("polars", reason="polars is not installed")
polars_testing = pytest.importorskip("polars.testing", reason="polars is not installed")
pytestmark = pytest.mark.usefixtures("threads_of_polars")

WORDS = ["a", "ü", None, "", "a longer one, beyond twelve bytes"]
LIBRARIES = ("pandas", "polars", "arrow")


def of_pandas() -> Any:
    arrow = pd.ArrowDtype
    return pd.DataFrame(
        {
            "int": np.arange(5, dtype="int32"),
            "float": [0.5, np.nan, 1, 2, np.inf],
            "half": np.arange(5, dtype="float16"),
            "bool": [True, False, True, False, True],
            "time": pd.to_datetime(["2020-01-01", None, "2021-03-04", "1950-02-02", "2020-01-01"]),
            "zoned": pd.date_range("2020", periods=5, tz="Europe/Berlin", unit="ns"),
            "utc": pd.date_range("2020", periods=5, tz="UTC", unit="s"),
            "fixed": pd.date_range("2020", periods=5, tz=datetime.timezone(datetime.timedelta(hours=-5, minutes=-30))),
            "span": pd.to_timedelta([1, None, 3, 4, 5], unit="s"),
            "kinds": pd.Categorical(["x", "y", None, "x", "x"], ordered=True),
            "numbers": pd.Categorical([1.5, 2, 2, 1.5, None]),
            "text": pd.array(WORDS, dtype="str"),
            "string": pd.array(WORDS, dtype="string[pyarrow]"),
            "Int64": pd.array([1, None, 3, 4, 5], dtype="Int64"),
            "Float32": pd.array([1, None, 3, 4, 5], dtype="Float32"),
            "boolean": pd.array([True, None, False, True, True], dtype="boolean"),
            "arrow": pd.array([1, None, 3, 4, 5], dtype=arrow(pa.uint16())),
            "date": pd.array([datetime.date(2020, 1, 1)] * 5, dtype=arrow(pa.date32())),
            "bits": pd.array([True, None, False, True, True], dtype=arrow(pa.bool_())),
            "blob": pd.array([b"\xff", None, b"", b"abc", b"d"], dtype=arrow(pa.large_binary())),
            "": range(5),
            "vram.table": range(5),
        },
        index=pd.Index([*"vwxyz"], name="key"),
    )


def of_polars() -> Any:
    return pl.DataFrame(
        {
            "int": pl.Series([1, None, 3, 4, 5], dtype=pl.Int16),
            "float": [0.5, None, float("nan"), 2.0, 3.0],
            "bool": [True, None, False, True, False],
            "text": WORDS,
            "kinds": pl.Series(["u", "v", None, "u", "u"], dtype=pl.Categorical),
            "enum": pl.Series(["u", "v", None, "v", "u"], dtype=pl.Enum(["v", "u", "w"])),
            "date": [datetime.date(2020, 1, day) for day in range(1, 6)],
            "hour": [datetime.time(hour) for hour in range(5)],
            "zoned": pl.Series(range(5)).cast(pl.Datetime("us", "Europe/Berlin")),
            "span": pl.Series(range(5)).cast(pl.Duration("ms")),
            "blob": [b"\xff", None, b"", b"abc", b"d"],
        }
    )


def same(one: Any, other: Any) -> None:
    """Compare tables of any of the three, types included."""
    if isinstance(one, pd.DataFrame):
        pd.testing.assert_frame_equal(one, other, check_freq=False)
    elif isinstance(one, pl.DataFrame):
        polars_testing.assert_frame_equal(one, other)
    else:
        assert one.schema.equals(other.schema)
        polars_testing.assert_frame_equal(pl.from_arrow(one), pl.from_arrow(other))  # to Arrow, NaN is not NaN


def there_and_back(table: Any, library: str | None = None, *, check: bool = True) -> Any:
    vram.publish("table", table)
    with vram.attach("table") as lease:
        return lease.table(library, check=check)  # type: ignore[arg-type]


TABLES = {
    "pandas": of_pandas,
    "pandas, a range for an index": lambda: of_pandas().reset_index(drop=True),
    "pandas, some rows": lambda: of_pandas().iloc[1:4],
    "pandas, every second row": lambda: of_pandas().iloc[::2],
    "pandas, no rows": lambda: of_pandas().iloc[:0],
    "pandas, nothing": lambda: pd.DataFrame(),
    "pandas, one block": lambda: pd.DataFrame(np.arange(12.0).reshape(4, 3), columns=[*"abc"]),
    "pandas, numbered columns": lambda: pd.DataFrame({7: [1.5], 8: [2]}),
    "pandas, levels of the index": lambda: pd.DataFrame(
        {"a": [1]}, index=pd.MultiIndex.from_tuples([("x", 1)], names=["k", "n"])
    ),
    "pandas, named columns": lambda: pd.DataFrame({"a": [1]}).rename_axis(columns="what"),
    "pandas, points in time for an index": lambda: pd.DataFrame(
        {"a": [1, 2]}, index=pd.DatetimeIndex(["2020-01-01", "2020-01-05"], tz="UTC")
    ),
    "polars": of_polars,
    "polars, some rows": lambda: of_polars().slice(1, 3),
    "polars, filtered": lambda: of_polars().filter(pl.col("int") != 3),
    "polars, in chunks": lambda: pl.concat([of_polars(), of_polars().slice(2)], rechunk=False),
    "polars, no rows": lambda: of_polars().head(0),
    "polars, nothing": lambda: pl.DataFrame(),
    "arrow": lambda: of_polars().drop("enum", "kinds").to_arrow(),
    "arrow, a batch": lambda: pa.record_batch({"a": [1, 2]}),
    "arrow, in chunks": lambda: pa.concat_tables([t := of_polars().drop("enum").to_arrow(), t.slice(1, 2)]),
    "arrow, codes that differ": lambda: pa.table(
        {"a": pa.chunked_array([pa.array(["x", "y"]).dictionary_encode(), pa.array(["z", "y"]).dictionary_encode()])}
    ),
    "arrow, numbers for codes": lambda: pa.table({"a": pa.array([5, 7, 5]).dictionary_encode()}),
}


@pytest.mark.parametrize("check", [False, True], ids=["believed", "checked"])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_comes_back_as_it_was(kept: vram.Keeper, name: str, check: bool) -> None:
    table = TABLES[name]()
    found = there_and_back(table, check=check)
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    if name == "arrow, codes that differ":
        assert found.to_pydict() == table.to_pydict()
        return
    same(table, found)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("source", ["pandas", "polars"])
def test_a_table_of_one_library_is_attached_as_one_of_another(kept: vram.Keeper, source: str, library: str) -> None:
    table = TABLES[source]()
    if source == "pandas":  # polars has no zones but those with a name
        table = table.drop(columns=["fixed"])
    found = there_and_back(table, library)
    rows = found if library == "pandas" else found.to_pandas()
    assert len(rows) == 5
    assert rows["text"].isna().tolist() == [False, False, True, False, False]
    assert rows["text"].dropna().tolist() == [word for word in WORDS if word is not None]
    assert rows["kinds"].isna().sum() == 1
    assert rows["kinds"].dropna().tolist() == list(
        table["kinds"].drop_nulls() if source == "polars" else ["x", "y", "x", "x"]
    )
    assert rows["bool"].tolist()[0]
    if source == "pandas" and library != "pandas":
        assert found["key"].to_pylist() == [*"vwxyz"] if library == "arrow" else found["key"].to_list() == [*"vwxyz"]
        assert found["time"].null_count == 1 if library == "arrow" else found["time"].null_count() == 1


# -- no copy beyond the first ----------------------------------------------------------------------------------------
def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_publishing_and_attaching_make_no_copy_beside_the_entry(kept: vram.Keeper) -> None:
    """numpy's allocations, at their peak, and what Arrow has allocated: next to nothing."""
    rows = 1 << 20
    text = pa.Array.from_buffers(
        pa.large_string(), rows, [None, pa.py_buffer(np.arange(0, 8 * (rows + 1), 8)), pa.py_buffer(b"x" * 8 * rows)]
    )
    codes = pd.Categorical.from_codes(np.zeros(rows, np.int8), ["x"])
    table = pd.DataFrame({"a": np.arange(rows), "b": np.ones(rows), "c": codes}, copy=False)
    table["s"] = pd.StringDtype("pyarrow", na_value=np.nan).__from_arrow__(text)
    there_and_back(table.head(1))  # what is imported is no copy
    nbytes, of_arrow = 33 * rows, pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        vram.publish("table", table)
        with vram.attach("table") as lease:
            found = lease.table()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < nbytes // 20  # a byte a row says which categories are missing
    assert pa.total_allocated_bytes() - of_arrow < nbytes // 1000
    assert found["s"].iloc[-1] == "x" * 8


def test_columns_of_polars_are_the_memory_of_the_entry(kept: vram.Keeper) -> None:
    vram.publish("table", of_polars())
    with vram.attach("table") as lease:
        found, stream = lease.table(), lease["vram.table"].numpy()
    for name in ("int", "float", "bool", "date", "hour", "zoned", "span"):
        array = found[name].get_chunks()[0].to_arrow()
        assert address(stream) <= array.buffers()[1].address < address(stream) + stream.nbytes, name


def test_a_table_outlives_its_lease_and_its_maker_and_is_not_written_to(kept: vram.Keeper) -> None:
    program = 'import pandas, vram; vram.publish("table", pandas.DataFrame({"int": range(5), "s": [*"vwxyz"]}))'
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=300)
    with vram.attach("table") as lease:
        found = lease.table()
    same(found, pd.DataFrame({"int": range(5), "s": [*"vwxyz"]}))
    with pytest.raises(ValueError, match="read-only"):
        found.loc[0, "int"] = 9
    mine = found.copy()
    mine.loc[0, "int"] = 9
    assert (mine["int"].iloc[0], found["int"].iloc[0]) == (9, 0)
    del mine, found
    gc.collect()


def test_one_loads_a_table_and_all_get_it(kept: vram.Keeper) -> None:
    with vram.attach_or_publish("table", of_polars, expect={"v": "1"}) as lease:
        same(lease.table(), of_polars())
    with vram.attach_or_publish("table", pytest.fail, expect={"v": "1"}) as lease:
        same(lease.table(), of_polars())


def test_of_what_was_filtered_nothing_else_is_published(kept: vram.Keeper) -> None:
    """A publication shows what was published: polars keeps the bytes of rows that are gone."""
    table = pl.DataFrame(
        {"n": [1, 2, 3], "s": ["public, and longer than twelve bytes", "secret " * 9, "public again, long"]}
    )
    for some in (table.filter(pl.col("n") != 2), table[[0, 2]], table.sort("n", descending=True).slice(0, 1)):
        vram.publish("table", some)
        with vram.attach("table") as lease:
            whole = b"".join(array.tobytes() for array in lease.numpy().values())
            same(lease.table(), some)
        assert b"public" in whole
        assert b"secret" not in whole
    vram.publish("table", table.to_arrow().slice(2))
    with vram.attach("table") as lease:
        assert b"secret" not in b"".join(array.tobytes() for array in lease.numpy().values())


def test_many_columns_take_one_memory(kept: vram.Keeper) -> None:
    table = pd.DataFrame({f"c{n}": np.arange(3) for n in range(500)})
    vram.publish("table", table)
    assert vram.entry("table").nbytes == 2 << 20
    with vram.attach("table") as lease:
        same(lease.table(), table)


# -- what is no such table -------------------------------------------------------------------------------------------
REFUSED = {
    "objects": (lambda: pd.DataFrame({"ok": [1], "bad one": [object()]}), "bad one with type object"),
    "mixed categories": (lambda: pd.DataFrame({"c": pd.Categorical(["x", 1])}), "so it cannot be published"),
    "the same name twice": (lambda: pd.DataFrame([[1, 2]], columns=["a", "a"]), "Duplicate column names"),
    "names of two types": (lambda: pd.DataFrame({"a": [1], 7: [1]}), r"columns\.map\(str\)"),
    "complex numbers": (lambda: pd.DataFrame({"z": [1j]}), "z with type complex128"),
    "no columns": (lambda: pd.DataFrame(index=pd.RangeIndex(2)), "an index and no columns"),
    "objects of polars": (
        lambda: pl.DataFrame({"o": pl.Series([object()], dtype=pl.Object)}),
        "column 'o' of the table holds Python",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_column_that_cannot_be_shared_is_named_and_nothing_happens(kept: vram.Keeper, why: str) -> None:
    make, words = REFUSED[why]
    with pytest.raises(UsageError, match=words):
        vram.publish("table", make())
    assert vram.list_entries() == []


@pytest.mark.parametrize("flag", ["writable", "updatable", "swap", "consume"])
def test_a_table_is_read_only_and_stays_whole(kept: vram.Keeper, flag: str) -> None:
    with pytest.raises(UsageError, match=r"a table is published read-only|a DataFrame is fixed"):
        vram.publish("table", of_pandas(), **{"updatable": flag == "swap", flag: True})


def test_what_is_no_table_and_what_no_library(kept: vram.Keeper) -> None:
    vram.publish("arrays", {"a": np.arange(3)})
    with vram.attach("arrays") as lease:
        with pytest.raises(UsageError, match="published as arrays, not as a table"):
            lease.table()
    vram.publish("table", pd.DataFrame({"z": [1]}))
    with vram.attach("table") as lease:
        with pytest.raises(UsageError, match="'pandas', 'polars', 'arrow'"):
            lease.table("numpy")  # type: ignore[arg-type]


def test_arrays_that_are_written_to_are_no_table(kept: vram.Keeper) -> None:
    """Offsets that were checked may be others a moment later."""
    with vram.attach_or_publish("table", lambda: pd.DataFrame({"a": [1]})) as lease:
        arrays = {name: array.numpy().copy() for name, array in lease.items()}
    for flags in ({"writable": True}, {"updatable": True}):
        vram.publish("table", arrays, **flags)  # type: ignore[arg-type]
        with vram.attach("table") as lease, pytest.raises(UsageError, match="can still be written to"):
            lease.table()


def test_a_library_that_is_not_there_is_named(kept: vram.Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    vram.publish("table", pd.DataFrame({"a": [1]}))
    monkeypatch.setitem(sys.modules, "polars", None)
    with vram.attach("table") as lease:
        with pytest.raises(UnsupportedError, match="pip install pyarrow polars"):
            lease.table("polars")
        assert lease.table()["a"].tolist() == [1]
