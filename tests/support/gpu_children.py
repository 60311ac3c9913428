"""What runs in the other processes of the tests of GPU memory."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import vram
from vram import driver as drivers
from vram.handover import pickling
from vram.spec import Location


def publish_and_wait(pipe: Connection, device: str, rows: int) -> None:
    """Publish numbers under a name, and wait to be killed."""
    with vram.empty((rows, 256), "float32", device=device, capacity=4 * rows, chunk="2MiB") as a:
        a[:] = np.arange(rows, dtype="float32")[:, None]
        pipe.send(vram.publish("numbers", {"a": a[: rows // 2], "b": a[rows // 2 :]}).zero_copy)
        pipe.recv()


def read(pipe: Connection, device: str | None) -> None:
    """Attach, and say what is there and where; then wait."""
    with vram.attach("numbers", device=device) as lease:
        found = {name: array.to_host()[:, 0].tolist() for name, array in lease.items()}
        where = str(lease["a"].device), lease["a"].__dlpack_device__(), lease["a"].readonly
        pipe.send((found, where))
        pipe.recv()
    pipe.send("released")


class Interface:
    """Numbers of another library, as ``__cuda_array_interface__`` shows them."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": shape, "typestr": "<i4", "version": 3}


def borrow(pipe: Connection, path: str) -> None:
    """Borrow one array, say where it is and what is in it, and add one."""
    with vram.borrow(path, access="rw") as lease:
        found = lease.array.to_host()
        where = str(lease.array.device), lease.array.__dlpack_device__()
        lease.array[:] = found + 1
    pipe.send((*where, found.tolist()))


def read_hidden(pipe: Connection) -> None:
    """Attach although the GPU is hidden from this process; say what came of it."""
    try:
        vram.attach("numbers").close()
    except vram.errors.VramError as error:
        pipe.send((type(error).__name__, str(error)))


def echo(channel: vram.ArrayChannel) -> None:
    """Add one to every array that comes, on the GPU's own memory, and send it back."""
    with channel:
        while (array := channel.recv()) is not None:
            array[:] = array.to_host() + 1
            channel.send(array)
            del array


def from_queue(incoming: Any, outgoing: Any) -> None:
    """Take arrays out of a queue; put their sums into another."""
    while (array := incoming.get()) is not None:
        outgoing.put(float(array.to_host().sum()))
        del array
    pickling.shut_down()


def devices(pipe: Connection) -> None:
    """Say which contexts this process has, after it made, mapped and shared memory of its first GPU."""
    driver: Any = drivers.get(Location("cuda"))
    with vram.empty(1 << 20, device="cuda:0") as a:
        (allocation,), _ = a.region.segments(0, a.nbytes)
        os.fstat(allocation.export())
        before = [device.is_used for device in driver.devices.all]
        a.fill(1)
        pipe.send((before, [device.is_used for device in driver.devices.all]))
