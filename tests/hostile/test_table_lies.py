"""What a stranger's entry says of a table: of lengths, offsets, codes, text, types and zones (S7)."""

from __future__ import annotations

import contextlib
import copy
import datetime
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tables_apart import Arrays, read, taken_apart

from vram.arrays.columns import ENTRY, MAX_WORDS, Column, Parts, check_zone, decode_table
from vram.errors import ProtocolError, UsageError

pd = pytest.importorskip("pandas", reason="pandas is not installed")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pl = pytest.importorskip("polars", reason="polars is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threads_of_polars")]  # goes with our own form of tables


TEXT = ["one, longer than twelve bytes", None, "ü", ""] * 3


def victim() -> tuple[dict[str, Any], Arrays]:
    return taken_apart(
        pd.DataFrame(
            {
                "n": np.arange(12),
                "b": [True, False] * 6,
                "s": pd.array(TEXT, dtype="str"),
                "c": pd.Categorical([*"xyz", None] * 3),
                "m": pd.array([1, 2, None] * 4, dtype="Int64"),
                "z": pd.date_range("2020", periods=12, tz="Europe/Berlin"),
                "v": pd.array([1, None] * 6, dtype="int32[pyarrow]"),
                "d": pd.array([datetime.date(2020, 1, 1)] * 12, dtype=pd.ArrowDtype(pa.date32())),
            }
        )
    )


def column(words: dict[str, Any], label: str) -> dict[str, Any]:
    return next(one for one in words["columns"] if one["label"] == label)


def put(name: str, at: int, value: Any) -> Callable[[dict[str, Any], Arrays], None]:
    def change(words: dict[str, Any], arrays: Arrays) -> None:
        arrays[name][at] = value

    return change


def say(label: str, /, **said: Any) -> Callable[[dict[str, Any], Arrays], None]:
    def change(words: dict[str, Any], arrays: Arrays) -> None:
        column(words, label).update(said)

    return change


def replace(name: str, make: Callable[[Any], Any]) -> Callable[[dict[str, Any], Arrays], None]:
    def change(words: dict[str, Any], arrays: Arrays) -> None:
        arrays[name] = make(arrays[name])

    return change


def rows(number: int) -> Callable[[dict[str, Any], Arrays], None]:
    def change(words: dict[str, Any], arrays: Arrays) -> None:
        words["rows"] = number
        words["span"].update(stop=number)

    return change


def shift(array: Any) -> Any:
    """The same numbers, at an address that is none for them."""
    raw = np.empty(array.nbytes + 1, np.uint8)[1:]
    raw[...] = array.view(np.uint8)
    return raw.view(array.dtype)


LIES = {
    "offsets that go back": (put("s:offsets", 3, 0), "column 's' .*go back"),
    "offsets that begin before there is anything": (put("s:offsets", 0, -1), "offsets go from -1"),
    "offsets that end behind it": (put("s:offsets", 12, 2**62), "in 93 bytes"),
    "offsets in the middle that are far away": (put("s:offsets", 5, 2**62), "go back"),
    "text that is none": (put("s", 0, 0xFF), "column 's' .*UTF8|column 's' .*UTF-8"),
    "text that begins within a character": (put("s:offsets", 3, 30), "column 's' .*(?i:utf)"),
    "codes beyond all categories": (put("c", 5, 3), "codes go from -1 to 3, for 3 categories"),
    "codes below none": (put("c", 5, -2), "codes go from -2"),
    "categories that are no text": (put("c:categories", 0, 0xFF), "a category is no text"),
    "categories that go back": (put("c:categories:offsets", 1, 9), "column 'c' .*go back"),
    "categories of which two are the same": (put("c:categories", 0, ord("y")), "column 'c' .*unique"),
    "codes that stand for nothing": (say("c", categories=None), "stand for nothing"),
    "truth that is neither": (replace("b", lambda a: (a.view(np.uint8) * 2).view(np.bool_)), "'b' .*neither 0 nor 1"),
    "a mask that is neither": (replace("m:missing", lambda a: (a.view(np.uint8) + 2).view(np.bool_)), "'m' .*neither"),
    "more rows than values": (rows(13), "column 'n' .*not 13 of"),
    "rows without end": (rows(2**48), "not 281474976710656 of"),
    "fewer bits than rows": (replace("v:valid", lambda a: a[:1]), "'v' .*not 2 of uint8"),
    "values of Python": (replace("n", lambda a: a.astype(object)), "'n' .*object"),
    "values in two dimensions": (replace("n", lambda a: a.reshape(12, 1)), r"'n' .*\(12, 1\)"),
    "numbers where no number may lie": (replace("n", shift), "'n' .*lies at an address"),
    "an array that is not there": (say("n", data="nowhere"), "'nowhere' is not in the entry"),
    "the description as a column": (say("n", data=ENTRY), "is not in the entry"),
    "dates of 64 bits": (say("d", unit="date64"), "'d' .*not 12 of int64"),
    "a zone that is a file": (say("z", zone="dateutil//etc/passwd"), "time zone"),
    "a zone that is a path": (say("z", zone="../../etc/passwd"), "time zone"),
    "a zone that is none": (say("z", zone="Mars/Olympus"), "'z' .*Mars"),
    "a zone of numbers": (say("n", zone="UTC"), "said to be the time zone of int64"),
    "a kind that is none": (say("n", kind="pickle"), "nothing this version reads"),
    "a mask for points in time": (
        lambda words, arrays: (
            column(words, "m").pop("missing"),
            say("z", missing="m:missing", zone="")(words, arrays),
        ),
        "missing by bytes",
    ),
    "two columns of one name": (say("n", label="b"), "the same name"),
    "a column without a name": (say("n", label=None), "the same name, or none"),
}


@pytest.mark.parametrize("lie", LIES)
def test_s7_a_lie_about_a_table_is_refused_and_the_column_named(lie: str) -> None:
    words, arrays = victim()
    assert read(words, arrays).shape == (12, 8)
    change, said = LIES[lie]
    change(words, arrays)
    with pytest.raises(ProtocolError, match=said):
        read(words, arrays)


@pytest.mark.parametrize("library", ["pandas", "polars", "arrow"])
@pytest.mark.parametrize(
    ("at", "value", "said"),
    [
        (0, -1, "less than no bytes"),
        (2, 1, "none of its 1"),
        (2, -1, "none of its 1"),
        (3, 2**31 - 1, "outside of its buffer"),
        (3, -1, "outside of its buffer"),
        (0, 2**31 - 1, "outside of its buffer"),
    ],
)
def test_s7_text_that_says_it_is_elsewhere_is_refused(library: str, at: int, value: int, said: str) -> None:
    words, arrays = taken_apart(pl.DataFrame({"s": TEXT}))
    assert words["columns"][0]["kind"] == "views"
    arrays["s"][at] = value
    with pytest.raises(ProtocolError, match=f"column 's' .*{said}"):
        read(words, arrays, library)


def test_what_lies_under_a_missing_row_is_nobodys_lie() -> None:
    words, arrays = taken_apart(pl.DataFrame({"s": TEXT, "c": pl.Series(["a", None] * 6, dtype=pl.Categorical)}))
    assert not arrays["s"][4:8].any(), "which is how our publishers have it"
    arrays["c"][1] = 99
    for library in ("arrow", "pandas"):
        found = read(words, arrays, library)
        assert list(found["s"].isna() if library == "pandas" else found["s"].is_null().to_pylist())[:2] == [False, True]


@pytest.mark.parametrize("library", ["pandas", "polars", "arrow"])
@pytest.mark.parametrize("lie", [(1 << 20, 0x41414141, 5, 0x7FF00000), (-5, 7, 7, 7), (13, 0, 0, 2**31 - 1)])
def test_s7_text_under_a_missing_row_that_is_elsewhere_is_refused(library: str, lie: tuple[int, ...]) -> None:
    """polars follows it: comparing two such columns ended the process, and writing them wrote what lies there."""
    words, arrays = taken_apart(pl.DataFrame({"s": TEXT}))
    arrays["s"][4:8] = lie
    with pytest.raises(ProtocolError, match="column 's' "):
        read(words, arrays, library)


@pytest.mark.parametrize("library", ["polars", "arrow"])
def test_s7_an_index_alone_takes_no_memory_of_the_reader(library: str) -> None:
    """A hundred bytes of a stranger took eight for each row that they spoke of."""
    rows = 2**40
    words = {
        "version": 1,
        "library": library,
        "rows": rows,
        "columns": [],
        "span": {"start": 1, "stop": rows + 1, "step": 1},
    }
    with pytest.raises(UsageError, match="no columns: ask for lease"):
        read(words, {})
    assert read(words, {}, "pandas").shape == (rows, 0)


def test_s7_columns_that_share_memory_are_refused() -> None:
    """Thousands of columns of one array took an eighth of it each, made again for every one."""
    n = np.zeros(1000, bool)
    column = {"kind": "values", "data": "n"}
    words = {"version": 1, "library": "arrow", "rows": 1000, "columns": [column | {"label": label} for label in "ab"]}
    with pytest.raises(ProtocolError, match="two columns of the table are said to lie in one array"):
        read(words, {"n": n})
    words["columns"][1]["data"] = "m"  # type: ignore[index]
    with pytest.raises(ProtocolError, match="two arrays of the table lie in the same memory"):
        read(words, {"n": n, "m": n[:]})
    assert read(words, {"n": n, "m": n.copy()}).num_columns == 2
    assert read(words, {"n": n, "m": n[:]}, whole=False).num_columns == 2, "one's own are believed"


@pytest.mark.parametrize(
    ("span", "fine"),
    [((0, 12, 1), True), ((5, -7, -1), True), ((0, 13, 1), False), ((0, 12, 0), False), ((0, 2**62, 1), False)],
)
def test_s7_a_range_of_other_rows_is_refused(span: tuple[int, int, int], fine: bool) -> None:
    words, arrays = victim()
    words["span"] = dict(zip(("start", "stop", "step"), span, strict=True))
    if fine:
        assert read(words, arrays).index.tolist() == list(range(*span))
    else:
        with pytest.raises(ProtocolError, match="the index of the table is said to be"):
            read(words, arrays)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"null", b"[" * 100_000, b"\x80\x04.", b'{"version":1e400}', b"\xff", b" " * (MAX_WORDS + 1)]
)
def test_s7_what_describes_no_table_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_table(np.frombuffer(data, np.uint8))


def test_a_table_of_a_later_version_says_so() -> None:
    words, arrays = victim()
    words |= {"version": 2, "more": [1]}
    with pytest.raises(ProtocolError, match="a table of version 2; this library reads 1"):
        read(words, arrays)
    assert read(words | {"version": 1}, arrays).shape == (12, 8), "what is unknown is ignored (S9)"


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "America/Argentina/Buenos_Aires", "Etc/GMT+5", "+05:30"])
def test_zones_are_names_or_offsets(zone: str) -> None:
    assert check_zone(zone)


@pytest.mark.parametrize(
    "zone", ["", "/etc/passwd", "../x", "dateutil/UTC", "a/../b", "tzlocal()", "x" * 99, "+5", "UTC\n"]
)
def test_paths_are_no_zones(zone: str) -> None:
    assert not check_zone(zone)


# -- anything at all ------------------------------------------------------------------------------------------------
@given(st.data())
def test_s7_whatever_is_said_of_a_table_is_a_table_or_an_error(data: st.DataObject) -> None:
    words, arrays = victim()
    name = data.draw(st.sampled_from(sorted(arrays)))
    raw = arrays[name].view(np.uint8)
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, raw.size - 1))] = data.draw(st.integers(0, 255))
    said = msgspec.json.encode(words)
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, len(said) - 1))
        said = said[:at] + bytes([data.draw(st.sampled_from(b'0123456789",:[]{}-e nulltruefasd'))]) + said[at + 1 :]
    for library in ("pandas", "polars", "arrow"):
        try:
            found = read(said, arrays, library)
        except (ProtocolError, UsageError):
            continue
        assert len(found) <= 12
        if library == "polars":  # which panics, as an exception, where it prints a day that no calendar has
            found = found.drop([name for name, kind in found.schema.items() if kind.is_temporal()])
        with contextlib.suppress(ValueError, OverflowError, NotImplementedError):  # of a year that no calendar has
            str(found)  # looks at the values


def test_a_check_takes_no_memory_by_the_row() -> None:
    """It looks at a million rows at a time, and at the last of them, too."""
    count = (1 << 20) + 5
    parts = {"o": np.arange(count + 1), "d": np.zeros(count, np.uint8)}
    text = Column("text", "d", "x", offsets="o")
    Parts(parts, count, whole=True).check(text)
    for wrong in (1 << 20, count - 1):
        lying = copy.deepcopy(parts)
        lying["o"][wrong] = lying["o"][wrong - 1] - 1
        with pytest.raises(ProtocolError, match="go back"):
            Parts(lying, count, whole=True).check(text)
        Parts(lying, count, whole=False).check(text)


def test_dates_that_pandas_has_no_room_for_are_refused_by_name() -> None:
    """pandas converts them as it makes the table, and raised an error of its own."""
    words, arrays = victim()
    arrays["n"] = np.full(12, 2**60, "m8[W]")
    with pytest.raises(UsageError, match="pandas makes no table of these columns"):
        read(words, arrays)
