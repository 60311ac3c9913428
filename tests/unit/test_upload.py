"""Files into GPU memory through pinned slots, on the stand-in: every byte, every failure, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.interrupts import interrupt

import standin
from vram import driver as drivers
from vram.arrays import upload, weights
from vram.arrays.file_copy import changed
from vram.arrays.pieces import Pieces
from vram.arrays.upload import Ring, close_rings, ring_of
from vram.bench.files import write_weights
from vram.errors import ClosedError, DriverError, UsageError
from vram.memory import Region
from vram.spec import Location

pytestmark = pytest.mark.standin
GPU = Location("cuda", 0)
SLOT = 2 << 20
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _rings() -> Iterator[None]:
    """What :func:`ring_of` keeps is given back before the ledger looks."""
    yield
    close_rings()


@pytest.fixture
def driver() -> Any:
    return drivers.get(GPU)


@pytest.fixture
def ring(driver: Any) -> Iterator[Ring]:
    """Four threads, slots far smaller than the files."""
    made = Ring(driver, GPU, threads=4, slot=SLOT // 16)
    yield made
    made.close()


@contextlib.contextmanager
def memory_file(data: bytes) -> Iterator[int]:
    """Lend a file of memory with these bytes."""
    fd = os.memfd_create("target")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[tuple[int, bytes]]:
    """An open file of an odd size, and its contents."""
    data = np.random.default_rng(7).bytes(5 * MIB + 4321)
    path = tmp_path / "data"
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    yield fd, data
    os.close(fd)


@pytest.fixture
def region(driver: Any) -> Iterator[Region]:
    with Region.create(GPU, driver=driver, capacity=8 * MIB, nbytes=8 * MIB) as made:
        driver.fill(made.address, 0xEE, made.nbytes)
        yield made


def bytes_at(region: Region, offset: int, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    region.driver.copy_out(memoryview(found), region.address + offset)
    return bytes(found)


def cut_short() -> Exception:
    return changed("data")


@pytest.mark.parametrize(
    ("start", "offset", "nbytes"),
    [
        (0, 0, 0),
        (0, 0, 1),
        (3, 5, 7),
        (1, 4097, SLOT // 16),  # exactly a slot
        (0, 1, SLOT // 16 + 1),
        (13, 0, SLOT // 16 * 8),  # every slot once
        (4321, 777, 3 * MIB + 1),
        (0, 3, 5 * MIB + 4321),  # all of it
    ],
)
def test_every_byte_arrives_where_it_belongs(
    ring: Ring, file: tuple[int, bytes], region: Region, start: int, offset: int, nbytes: int
) -> None:
    fd, data = file
    ring.upload(fd, [(start, region.address + offset, nbytes)], cut_short)
    assert bytes_at(region, offset, nbytes) == data[start : start + nbytes]
    assert bytes_at(region, 0, offset) == b"\xee" * offset
    assert bytes_at(region, offset + nbytes, 4096) == b"\xee" * 4096


def test_it_returns_when_the_gpu_is_done(ring: Ring, file: tuple[int, bytes], region: Region) -> None:
    """With copies that wait until somebody waits for them: slots are not overwritten early, and the end is awaited."""
    fd, data = file
    control = standin.Standin()
    control.clear()
    control.defer()
    try:
        ring.upload(fd, [(0, region.address, len(data))], cut_short)
        assert control.live().get("pending", 0) == 0
        assert control.illegal() == 0
    finally:
        control.defer(on=False)
    assert bytes_at(region, 0, len(data)) == data


# -- the other way ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes", [[], [1], [SLOT // 16], [3 * MIB + 1, 5, 0, SLOT // 16 + 1, 2 * MIB], [70_001] * 40])
def test_every_byte_comes_back_to_where_it_belongs(ring: Ring, region: Region, sizes: list[int]) -> None:
    """Of several spans at once, and with copies that wait until somebody waits for them."""
    data = np.random.default_rng(8).bytes(region.nbytes)
    region.driver.copy_in(region.address, memoryview(data))
    control = standin.Standin()
    with memory_file(b"\xee" * 16 * MIB) as target:
        blocks, at = [], 3
        for size in sizes:
            blocks.append((region.address + at, target, 2 * at, size))
            at += size
        control.clear()
        control.defer()
        try:
            ring.download(blocks)
            assert control.live().get("pending", 0) == 0
            assert control.illegal() == 0
        finally:
            control.defer(on=False)
        wanted = bytearray(b"\xee" * 16 * MIB)
        for source, _, there, size in blocks:
            here = source - region.address
            wanted[there : there + size] = data[here : here + size]
        assert os.pread(target, len(wanted) + 1, 0) == wanted


@pytest.mark.parametrize("way", ["upload", "download"])
def test_an_interrupt_leaves_no_thread_at_memory_that_may_be_given_up(
    ring: Ring, file: tuple[int, bytes], region: Region, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: threads that have not begun begin nothing, and those that have are waited for."""
    fd, data = file
    at_work: set[int] = set()
    is_left = threading.Event()
    shots = [signal.SIGINT]

    def act() -> None:
        if way == "upload":
            ring.upload(fd, [(0, region.address, 2 * MIB)], cut_short)
        else:
            ring.download([(region.address, target, 0, 2 * MIB)])

    real = Pieces.next

    def noted(work: Any) -> Any:
        me = threading.get_ident()
        at_work.discard(me)
        found = real(work)
        if found is not None:
            at_work.add(me)
            if shots:
                signal.pthread_kill(threading.main_thread().ident or 0, shots.pop())
                is_left.wait(0.3)  # it is still at work when whoever does not wait for it has left
        return found

    with memory_file(b"") as target:
        came = [interrupt(nth, act).came for nth in range(1, 200, 4)]
        assert sum(came) > 20
        monkeypatch.setattr(Pieces, "next", noted)
        with pytest.raises(KeyboardInterrupt):
            act()
        still = set(at_work)
        is_left.set()
        assert not still
        act()
        if way == "upload":
            assert bytes_at(region, 0, 2 * MIB) == data[: 2 * MIB]


# -- bad days ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("nbytes", [100, 6 * MIB])
def test_a_file_that_ends_early_is_an_error(ring: Ring, file: tuple[int, bytes], region: Region, nbytes: int) -> None:
    """One piece, or many in several threads."""
    fd, data = file
    start = 0 if nbytes > len(data) else len(data) - 50
    with pytest.raises(UsageError, match="'data' changed while it was read"):
        ring.upload(fd, [(start, region.address, nbytes)], cut_short)
    ring.upload(fd, [(0, region.address, len(data))], cut_short)  # and it still works
    assert bytes_at(region, 0, len(data)) == data


def test_a_read_that_fails_is_raised(ring: Ring, region: Region, tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with pytest.raises(IsADirectoryError):
            ring.upload(directory, [(0, region.address, 3 * MIB)], cut_short)
    finally:
        os.close(directory)
    assert bytes_at(region, 0, 4096) == b"\xee" * 4096


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuEventSynchronize", "cuStreamSynchronize"])
@pytest.mark.parametrize("nth", [1, 5])
@pytest.mark.parametrize("forever", [False, True])
def test_a_driver_call_that_fails_is_raised_and_the_ring_goes_on(
    ring: Ring, file: tuple[int, bytes], region: Region, call: str, nth: int, forever: bool
) -> None:
    """I4: once and for good; no thread is left (the ledger looks), and the next file arrives."""
    fd, data = file
    if call == "cuStreamSynchronize":
        nth = 1  # there is one
    with standin.Standin().failing(call, nth=nth, forever=forever), pytest.raises(DriverError) as caught:
        ring.upload(fd, [(0, region.address, len(data))], cut_short)
    assert caught.value.call == call
    ring.upload(fd, [(0, region.address, len(data))], cut_short)
    assert bytes_at(region, 0, len(data)) == data


@pytest.mark.parametrize("call", ["cuMemHostRegister", "cuStreamCreate", "cuEventCreate"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_ring_that_cannot_be_made_leaves_nothing(driver: Any, call: str, nth: int) -> None:
    """I4, and the ledger: no pinned memory, stream or event; :func:`ring_of` keeps no half-made one."""
    if nth > 1 and call != "cuEventCreate":
        nth = 1  # there is one
    with standin.Standin().failing(call, nth=nth, code=2), pytest.raises(MemoryError):
        ring_of(driver, GPU)
    assert GPU not in upload._rings
    assert ring_of(driver, GPU) is upload._rings[GPU]


def test_close_gives_everything_back(driver: Any, file: tuple[int, bytes], region: Region) -> None:
    fd, _ = file
    control = standin.Standin()
    before = control.live()
    made = Ring(driver, GPU, threads=2, slot=4096)
    during = control.live()
    kinds = ("host", "streams", "events")
    assert [during.get(kind, 0) - before.get(kind, 0) for kind in kinds] == [1, 1, 4]
    made.close()
    made.close()
    assert control.live() == before
    with pytest.raises(ClosedError, match="ring"):
        made.upload(fd, [(0, region.address, 1)], cut_short)


def test_close_waits_for_the_file_that_is_on_its_way(
    driver: Any, file: tuple[int, bytes], region: Region, monkeypatch: pytest.MonkeyPatch
) -> None:
    fd, data = file
    made = Ring(driver, GPU, threads=2, slot=SLOT)
    reading, may_read = threading.Event(), threading.Event()
    real = upload._read

    def slow(*arguments: Any) -> None:
        reading.set()
        assert may_read.wait(120)
        real(*arguments)

    monkeypatch.setattr(upload, "_read", slow)
    loader = threading.Thread(target=made.upload, args=(fd, [(0, region.address, len(data))], cut_short))
    loader.start()
    assert reading.wait(120)
    closer = threading.Thread(target=made.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    may_read.set()
    for thread in (loader, closer):
        thread.join(120)
        assert not thread.is_alive()
    assert bytes_at(region, 0, len(data)) == data


# -- the way there ----------------------------------------------------------------------------------------------


def test_a_file_that_changes_under_the_ring_leaves_no_arrays(
    tmp_path: Path, driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I4: the region that was made for it is gone, too (the ledger looks)."""
    path = tmp_path / "w.safetensors"
    write_weights(path, {"a": 5 * MIB})
    plan = weights.plan(path)
    real = upload._read

    def cut(*arguments: Any) -> None:
        os.truncate(path, 4096)
        real(*arguments)

    monkeypatch.setattr(upload, "_read", cut)
    with pytest.raises(UsageError, match="changed while it was read"):
        weights.load(plan, driver, GPU)
