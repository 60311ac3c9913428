"""Updates in place: readers, steps, and what a torn one looks like."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support import children as processes
from tests.support import update_children
from tests.support.deadlines import SOON
from tests.support.memfds import FUTURE_WRITE, GROW, SHRINK

import vram
from vram import driver as drivers
from vram.driver import words
from vram.keeper.client import KeeperClient
from vram.spec import Location

MIB2 = 2 << 20
PAGE = SHRINK | GROW | FUTURE_WRITE  # the seals of a page of readers
GPU, OTHER = "cuda:0", "cuda:1"
HERE = Location("cuda", 0)


def child(act: Callable[..., None], *given: Any) -> contextlib.AbstractContextManager[processes.Child]:
    """Run a function that is told the keeper's path and a pipe in a process of its own, which is killed in the end."""
    return processes.child(act, *given, first=(os.environ["VRAM_KEEPER"],), may_end=False)


def write(value: int, *, timeout: float | None = SOON) -> None:
    """Update what :func:`publish` published, and fill it with a number."""
    with vram.update("w", timeout=timeout) as arrays:
        for array in arrays.values():
            array.fill(value)


def tear(act: Callable[[], object] = lambda: None) -> None:
    """Begin an update, write some of it, and fail."""

    def begin() -> None:
        with vram.update("w", timeout=SOON) as arrays:
            arrays["a0"].fill(99)
            act()
            raise KeyError("wrong")

    with pytest.raises(KeyError):
        begin()


def steps(
    act: Callable[..., None], *, beside: Callable[[processes.Child], Any]
) -> Iterator[tuple[str, processes.Child]]:
    """Run a child again and again, each time up to its next step, until there is no further one."""
    for number in range(1, 30):
        with child(act, number) as victim:
            beside(victim)
            at = victim.said()
            yield at, victim
            if at in ("done", "outside"):
                return
    raise AssertionError("it has no end")


def words_of(lease: vram.Lease) -> Any:
    assert lease._words is not None
    return lease._words


def steps_of_an_update(monkeypatch: pytest.MonkeyPatch, state: Callable[[], str]) -> list[str]:
    """Update, and return the order of its barriers (each with what a reader finds then), its look and its writing."""
    order: list[str] = []
    real_barrier, real_look = words.barrier, KeeperClient.pages

    def barrier() -> None:
        order.append(f"barrier, {state()}")
        real_barrier()

    def look(*given: Any) -> Any:
        order.append("look")
        return real_look(*given)

    with monkeypatch.context() as patched:
        patched.setattr(words, "barrier", barrier)
        patched.setattr(KeeperClient, "pages", look)
        with vram.update("w") as arrays:
            order.append("write")
            for array in arrays.values():
                array.fill(2)
    return order


def fill(array: vram.Array, value: int, stream: int) -> None:
    """Fill an array with a byte, on a stream."""
    driver: Any = drivers.get(HERE)
    driver.fill_async(array.address, value, array.nbytes, stream)


def copied(source: vram.Array, target: vram.Array, stream: int) -> None:
    """Copy one array into another, on a stream."""
    driver: Any = drivers.get(HERE)
    driver.copy_async(target.address, source.address, source.nbytes, stream)


def update_under_readers(readers: int, least: int) -> None:
    """Update so many times at least, and until each of the readers has seen five versions, none of them torn."""
    with contextlib.ExitStack() as stack:
        reading = [stack.enter_context(child(update_children.read_until_told, 5)) for _ in range(readers)]
        assert [reader.said() for reader in reading] == ["ready"] * readers
        value, end = 1, time.monotonic() + SOON
        while value < least or not all(reader.pipe.poll() for reader in reading):
            assert time.monotonic() < end, f"not all have seen five of {value} versions"
            value += 1
            write(value, timeout=SOON)
        assert [reader.said() for reader in reading] == [5] * readers
        for reader in reading:
            reader.tell()
        assert [reader.said() for reader in reading] == ["told"] * readers
