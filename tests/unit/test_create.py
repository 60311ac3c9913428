"""Arrays made by the verbs: where their pages come from."""

from __future__ import annotations

import os

import numpy as np
import pytest

import vram
from vram.errors import UsageError

MIB = 1 << 20


def touched(array: vram.Array) -> int:
    """Return the bytes of an array's memory that have pages."""
    allocations, _ = array.region.segments(0, array.region.nbytes)
    total = 0
    for allocation in allocations:
        with allocation:
            total += os.fstat(allocation.export()).st_blocks * 512
    return total


@pytest.mark.parametrize("make", [vram.empty, vram.zeros])
def test_pages_are_touched_at_first_use_or_ahead(make: type[vram.Array]) -> None:
    with make((8, MIB), "uint8", device="host", capacity=16) as array:
        assert touched(array) == 0
        assert not array.numpy()[3].any()
    with make((8, MIB), "uint8", device="host", capacity=16, populate=True) as array:
        assert touched(array) == 8 * MIB
        assert not array.numpy().any()


def test_what_is_converted_can_be_populated_too() -> None:
    source = np.arange(10, dtype="uint8")
    with vram.asarray(source, device="host", chunk="2MiB") as array:
        assert 0 < touched(array) < 2 * MIB
        assert vram.asarray(array, device="host", populate=True) is array
        assert touched(array) == 2 * MIB
        assert array.numpy().tolist() == source.tolist()
    with vram.asarray(source, device="host", chunk="2MiB", populate=True) as array:
        assert touched(array) == 2 * MIB
        assert array.numpy().tolist() == source.tolist()


def test_text_does_not_convert_to_numbers() -> None:
    with pytest.raises(UsageError, match="does not convert"):
        vram.asarray(np.array(["a"]), "float32", device="host")
