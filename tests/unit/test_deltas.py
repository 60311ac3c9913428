"""Deltas of pieces: there and back, how small they are, and those of peers who lie."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from vram.errors import ProtocolError
from vram.nodes.deltas import pack, unpack

BLOCK = 1 << 20  # bytes that are looked at at a time


def some_bytes(nbytes: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def changed(old: bytes, every: int) -> bytes:
    """Change one word of so many."""
    new = bytearray(old)
    for at in range(0, len(old), 2 * every):
        new[at] ^= 0x5A
    return bytes(new)


def patched(delta: bytes, old: bytes) -> bytes:
    into = bytearray(b"\xff" * len(old))
    unpack(delta, memoryview(old), memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("nbytes", [64, 65, 1001, BLOCK, BLOCK + 1, 2 * BLOCK + 14])
@pytest.mark.parametrize("every", [3, 50, 10**9])
def test_a_piece_comes_back(nbytes: int, every: int) -> None:
    old = some_bytes(nbytes)
    new = changed(old, every)
    new = new[:-1] + bytes((new[-1] ^ 1,))
    delta = pack(memoryview(old), memoryview(new))
    if delta is None:
        assert nbytes < 100  # zstd adds some bytes
    else:
        assert len(delta) <= nbytes // 2
        assert patched(delta, old) == new


def test_an_empty_delta_says_that_nothing_changed() -> None:
    assert patched(b"", b"abc") == b"abc"


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_two_percent_travel_in_a_twelfth(dtype: type) -> None:
    draw = np.random.default_rng(1)
    old = draw.integers(0, 256, 4 << 20, dtype=np.uint8).view(dtype)
    new = old.copy()
    new[draw.choice(len(old), len(old) // 50, replace=False)] ^= draw.integers(1, 256, len(old) // 50, dtype=dtype)
    delta = pack(old.view(np.uint8).data, new.view(np.uint8).data)
    assert delta is not None
    assert len(delta) <= old.nbytes / 12
    assert patched(delta, old.tobytes()) == new.tobytes()


def test_what_changed_most_is_no_delta() -> None:
    old, new = some_bytes(100_000, 1), some_bytes(100_000, 2)
    assert pack(memoryview(old), memoryview(new)) is None


OLD = some_bytes(5001)
DELTA = pack(memoryview(OLD), memoryview(changed(OLD, 9))) or b""


@given(st.integers(0, len(DELTA) - 1), st.integers(1, 255), st.integers(0, len(DELTA)))
def test_a_torn_delta_is_a_typed_error_or_other_bytes(at: int, flip: int, end: int) -> None:
    torn = DELTA[:at] + bytes((DELTA[at] ^ flip,)) + DELTA[at + 1 :]
    for one in (torn, DELTA[:end] or b"x", torn + b"x"):
        with contextlib.suppress(ProtocolError):
            assert len(patched(one, OLD)) == len(OLD)


LIES = {
    "no frame": b"x" * 100,
    "too short": zstandard.compress(bytes(5000)),
    "nothing": zstandard.compress(b""),
    "cut off": DELTA[:-5],
    "64 MiB": zstandard.compress(bytes(1 << 26)),
    "a length past all memory": b"\x28\xb5\x2f\xfd\xe0" + (1 << 62).to_bytes(8, "little") + b"\x01\x00\x00",
    "a window of 2 GiB": b"\x28\xb5\x2f\xfd\x00\xa8" + b"\x01\x00\x00",
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_peer_makes_up_takes_no_memory_and_is_refused_but_for_its_end(lie: str) -> None:
    into = bytearray(len(OLD))
    tracemalloc.start()
    try:
        with contextlib.nullcontext() if lie == "64 MiB" else pytest.raises(ProtocolError):
            unpack(LIES[lie], memoryview(OLD), memoryview(into))
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_a_base_of_another_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a base of 5001 bytes for a piece of 5000"):
        unpack(DELTA, memoryview(OLD), memoryview(bytearray(5000)))
