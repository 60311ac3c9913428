"""What a stranger's table may say (S7): it becomes a table, or an error of ours."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vram.arrays.arrow_tables import table_from
from vram.errors import ProtocolError, UsageError

pd = pytest.importorskip("pandas", reason="pandas is not installed")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")


def stream_of(table: Any, **options: Any) -> bytearray:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return bytearray(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("codes", [False, True], ids=["columns", "dictionaries"])
def test_s7_a_strangers_table_is_not_unpacked(codes: bool) -> None:
    """A few bytes may say that they become many."""
    column = pa.array(["x" * 1000] * 1000)
    table = pa.table({"s": column.dictionary_encode() if codes else column})
    packed = np.frombuffer(bytes(stream_of(table, compression="zstd")), np.uint8)
    with pytest.raises(ProtocolError, match="is compressed"):
        table_from(packed, None, whole=True)
    plain = np.frombuffer(bytes(stream_of(table)), np.uint8)
    assert table_from(plain, "arrow", whole=True).equals(table)


VICTIM = stream_of(
    pa.Table.from_pandas(
        pd.DataFrame(
            {
                "n": np.arange(5),
                "s": pd.array(["a", None, "", "longer than twelve bytes", "ü"], dtype="str"),
                "c": pd.Categorical([*"xyz", None, "x"]),
                "z": pd.date_range("2020", periods=5, tz="Europe/Berlin"),
            }
        )
    )
)


@given(changes=st.lists(st.tuples(st.integers(0, len(VICTIM) - 1), st.integers(0, 255)), min_size=1, max_size=4))
@settings(deadline=None)
def test_s7_whatever_a_stranger_writes_is_a_table_or_an_error_of_ours(changes: list[tuple[int, int]]) -> None:
    words = bytearray(VICTIM)
    for at, value in changes:
        words[at] = value
    with contextlib.suppress(ProtocolError, UsageError):
        table_from(np.frombuffer(bytes(words), np.uint8), None, whole=True)


@given(stop=st.integers(0, len(VICTIM) - 1))
@settings(deadline=None)
def test_s7_a_stream_that_was_cut_off_is_an_error_or_has_fewer_rows(stop: int) -> None:
    with contextlib.suppress(ProtocolError, UsageError):
        assert len(table_from(np.frombuffer(bytes(VICTIM[:stop]), np.uint8), "arrow", whole=True)) in (0, 5)
