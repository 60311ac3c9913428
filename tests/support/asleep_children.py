"""The tests of leases that sleep: what runs in other processes, and what a process has."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import vram
from vram import driver as drivers
from vram.arrays.views import RegionViews
from vram.errors import AsleepError, BusyError
from vram.keeper.client import close_client
from vram.spec import Location


def sleep_and_wake(pipe: Connection, name: str) -> None:
    """Attach, sleep when told to, and wake when told to; say the first byte of each array."""
    with vram.attach(name) as lease:
        pipe.send({key: int(lease[key].to_host().flat[0]) for key in lease})
        pipe.recv()
        pipe.send(lease.sleep())
        pipe.recv()
        lease.wake()
        pipe.send({key: int(lease[key].to_host().flat[0]) for key in lease})
        pipe.recv()
    pipe.send("closed")


def read_and_sleep(pipe: Connection, name: str) -> None:
    """Have two threads read in sections while this one sleeps and wakes; say how often both came about."""
    counts = [0, 0]
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            with contextlib.suppress(AsleepError), lease.reading():
                view = lease["a"].numpy()
                counts[0] += int(view[0, 0]) + int(view[-1, -1]) > 0
            time.sleep(0.001)  # or there were always somebody inside

    with vram.attach(name) as lease:
        threads = [threading.Thread(target=read) for _ in range(2)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 1.0
        while time.monotonic() < until or min(counts) <= 10:
            with contextlib.suppress(BusyError):
                lease.sleep()
                lease.wake()
                counts[1] += 1
        over.set()
        for thread in threads:
            thread.join()
    pipe.send(min(counts))
    pipe.recv()


def tensor_over(array: vram.Array) -> Any:
    """Return what a tensor of torch over the first bytes of read-only memory of the host is over."""
    assert array.pin is not None
    return RegionViews.of(array.region).writable_view(array.pin, array.offset, (10,), np.dtype("uint8"))


def free_on_gpu() -> int:
    """Return the bytes that are free on the first GPU, once what others let go of is seen."""
    gc.collect()
    gpu = Location("cuda", 0)
    return drivers.get(gpu).mem_info(gpu)[0]  # type: ignore[attr-defined, no-any-return]


def disconnect() -> None:
    """End the connection to the default keeper."""
    close_client(os.environ["VRAM_KEEPER"])


def descriptors() -> list[str]:
    """Return what this process has open, but for the folder that is read for this."""
    found = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(one) for one in found if os.path.lexists(one))


def mappings() -> list[str]:
    """Return the memfds that are mapped here."""
    with open("/proc/self/maps") as maps:
        return sorted(line.split()[4] for line in maps if "memfd:" in line)


def threads() -> list[str]:
    """Return the names of the threads of this process."""
    return sorted(thread.name for thread in threading.enumerate())
