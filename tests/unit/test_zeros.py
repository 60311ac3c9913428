"""``backing="zero"`` as users have it: arrays, the kernel's own view of it on the host, forks, threads, publishing."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.faulty_driver import FaultyDriver
from tests.support.forked import end_of

import vram
from vram import driver as drivers
from vram.errors import BusyError, UsageError
from vram.memory import Region
from vram.memory.resize import resize_regions
from vram.spec import Location

G = 2 << 20
ROW = 4096  # bytes


def made(rows: int = 512, *, capacity: int = 16 * 512) -> vram.Array:
    return vram.zeros((rows, ROW // 8), device="host", dtype="int64", capacity=capacity, chunk=G, backing="zero")


def mappings(array: vram.Array) -> list[str]:
    """What the kernel says is mapped over the capacity of an array."""
    stop = array.address + array.region.capacity
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) < stop and int(end, 16) > array.address:
            found.append(line.split()[1])
    return found


def test_a_row_too_far_reads_zeros_by_its_address() -> None:
    with made() as array:
        array.fill(7)
        assert array.numpy().shape == (512, 512)
        assert len(array) == 512
        for row in (512, 513, 4000, 16 * 512 - 1):
            assert ctypes.string_at(array.address + row * ROW, ROW) == bytes(ROW)
        array.resize(3 * 512 + 1)
        assert not array.numpy()[512:].any()
        array.fill(8)
        array.resize(512)
        assert ctypes.string_at(array.address + 2 * 512 * ROW, 8 * ROW) == bytes(8 * ROW)


def test_all_rows_are_seen_with_full_and_only_those_that_are_there_are_written() -> None:
    with made() as array:
        whole = array.numpy(full=True)
        assert whole.shape == (16 * 512, 512)
        assert not whole.any()
        array.resize(1024)
        whole[1023] = 3
        assert (array.numpy()[1023] == 3).all()
        with pytest.raises(BusyError):
            array.resize(0)


def test_zeros_cost_the_host_one_mapping_and_no_memory() -> None:
    with made(0, capacity=(64 << 30) // ROW) as array:
        assert mappings(array) == ["r--p"]
        before = int(Path("/proc/self/statm").read_text().split()[1])
        for at in range(0, 4 << 30, 64 << 20):
            ctypes.string_at(array.address + at, 4096)
        assert int(Path("/proc/self/statm").read_text().split()[1]) - before < 1024  # pages
        array.resize(3 * 512)
        assert mappings(array)[-1] == "r--p"
        array.resize(512)
        assert mappings(array) == ["rw-s", "r--p"]
        array.resize(0)
        assert mappings(array) == ["r--p"]


WRITES = """
import ctypes
import vram
array = vram.zeros((4, 512), "int64", device="host", capacity=100_000, backing="zero")
print(ctypes.string_at(array.address + array.region.mapped, 8), flush=True)
ctypes.memset(array.address + array.region.mapped, 1, 8)
"""


def test_a_write_too_far_faults_as_ever() -> None:
    done = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (-11, f"{bytes(8)!r}\n")


READS = """
import ctypes, threading
import vram
array = vram.zeros((0, 512), "int64", device="host", capacity=16 * 512, chunk="2MiB", backing="zero")
address, done, seen = array.address, threading.Event(), set()
def read():
    while not done.is_set():
        for chunk in range(16):
            seen.add(ctypes.string_at(address + chunk * (2 << 20) + 8, 8))
threads = [threading.Thread(target=read) for _ in range(2)]
for thread in threads:
    thread.start()
for turn in range(300):
    array.resize((turn * 7 % 17) * 512)
done.set()
for thread in threads:
    thread.join()
print(seen)
"""


def test_who_reads_while_it_changes_never_faults() -> None:
    """What is mapped takes the place of zeros in one step, and gives way to them in one."""
    done = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{ {bytes(8)} }\n", "")


def test_i7_a_forked_child_reads_zeros_too() -> None:
    with made() as array:
        assert end_of(lambda: ctypes.string_at(array.address + 600 * ROW, 8) == bytes(8)) == 1
        array.resize(1024)


def test_it_is_asked_for_by_every_maker_and_nothing_else_is() -> None:
    for array in (
        vram.empty(3, device="host", capacity=10_000_000, backing="zero"),
        vram.zeros(3, device="host", capacity=10_000_000, backing="zero"),
        vram.asarray(np.ones(3, "float32"), device="host", capacity=10_000_000, backing="zero"),
    ):
        with array:
            assert ctypes.string_at(array.address + array.region.capacity - 8, 8) == bytes(8)
            with vram.asarray(array, device="host", backing="zero") as other:  # one that has it, and no other
                assert other is not array
    for backing in ("ones", 0, True):
        with pytest.raises(UsageError, match="backing"):
            vram.empty(3, device="host", backing=backing)  # type: ignore[arg-type]


@pytest.mark.standin
def test_growing_over_zeros_waits_for_the_event_that_is_given_and_else_for_the_device() -> None:
    gpu = Location("cuda", 0)
    driver = FaultyDriver(drivers.get(gpu))
    with Region.create(gpu, driver=driver, capacity=8 * G, chunk=G, nbytes=G, backing="zero") as region:
        stream = driver.inner.stream_create(gpu)
        event = driver.inner.event_create(gpu)
        driver.inner.event_record(event, stream)
        for after, call in ((None, "synchronize"), (event, "event_synchronize")):
            driver.clear()
            resize_regions({region: region.nbytes + G}, after=after)
            calls = {"synchronize", "event_synchronize", "mem_create", "mem_map_new", "mem_unmap", "mem_map"}
            order = [name for name in driver.calls if name in calls]
            assert order == [call, "mem_create", "mem_unmap", "mem_map"]
        driver.inner.event_destroy(event)
        driver.inner.stream_destroy(stream)
