"""The other process of the benchmarks of lending: borrows, or does the same with bare calls, as it is told."""

from __future__ import annotations

import contextlib
import socket
import time
from array import array
from multiprocessing.connection import Connection
from typing import Any

import vram

from ..sharing.channel import Channel, close_fds
from ..spec import Location
from .bare_calls import Bare, bare_calls

__all__ = ["BARE", "borrower", "take_lists"]

BARE = 4096  # bytes of a message between bare ends: a handle, or nothing


def borrower(pipe: Connection, packets: socket.socket, sock: socket.socket, device: str) -> None:
    """Told what comes over which connection. Ends when its parent hangs up."""
    location = Location.parse(device)
    with contextlib.ExitStack() as stage:
        bare = None if location.kind == "host" else stage.enter_context(bare_calls(location))
        channel = stage.enter_context(vram.ArrayChannel(Channel(sock)))
        pipe.send("ready")
        while True:
            what, *rest = pipe.recv()
            if what == "borrow":
                _borrow(pipe, *rest)
            elif what == "again":
                _borrow_again(pipe, *rest)
            elif what == "bare":
                for _ in range(rest[2]):
                    _bare(packets, bare, rest[0], rest[1])
            elif what == "packets":
                for _ in range(rest[0]):
                    packets.send(packets.recv(200))
            else:
                for _ in range(rest[0]):
                    value = channel.recv()
                    channel.send(1)
                value = None  # noqa: F841  (let go of before the next command)


def _borrow(pipe: Connection, path: str, as_torch: bool) -> None:
    """Borrow all of it, have every array in hand, say so; give it back when told."""
    lease = vram.borrow(path)
    held: Any = lease.torch() if as_torch else dict(lease.items())
    pipe.send(len(held))
    pipe.recv()
    held.clear()
    lease.close(wait=True)
    pipe.send("given back")


def _borrow_again(pipe: Connection, path: str, times: int) -> None:
    """Borrow and give back what is lent already."""
    begin = time.perf_counter()
    for _ in range(times):
        vram.borrow(path).close()
    pipe.send((time.perf_counter() - begin) / times)


def _bare(packets: socket.socket, bare: Bare | None, kind: str, nbytes: int) -> None:
    """Receive a handle, open what it stands for, close it, answer: what every hand-written way comes to."""
    payload, ancillary, _, _ = packets.recvmsg(BARE, 1024)
    fds = array("i")
    for _, _, data in ancillary:
        fds.frombytes(data)
    if kind == "host":
        import mmap

        mmap.mmap(fds[0], nbytes, prot=mmap.PROT_READ).close()
    elif bare is not None:
        _open(bare, kind, nbytes, payload, list(fds))
    close_fds(list(fds))
    packets.send(b"done")


def _open(bare: Bare, kind: str, nbytes: int, payload: bytes, fds: list[int]) -> None:
    api, ok = bare.api, bare.ok
    if kind == "fd":
        base = ok(api.cuMemAddressReserve(nbytes, 0, 0, 0))
        handle = ok(api.cuMemImportFromShareableHandle(fds[0], bare.fd_kind))
        ok(api.cuMemMap(base, nbytes, 0, handle, 0))
        ok(api.cuMemRelease(handle))
        ok(api.cuMemSetAccess(base, nbytes, bare.grants, 1))
        ok(api.cuMemUnmap(base, nbytes))
        ok(api.cuMemAddressFree(base, nbytes))
    elif kind == "legacy":
        ok(api.cuIpcCloseMemHandle(ok(api.cuIpcOpenMemHandle(bare.struct(api.CUipcMemHandle, payload), 1))))
    else:
        pool = ok(api.cuMemPoolImportFromShareableHandle(fds[0], bare.fd_kind, 0))
        address = ok(api.cuMemPoolImportPointer(pool, bare.struct(api.CUmemPoolPtrExportData, payload)))
        ok(api.cuMemFreeAsync(address, 1))
        ok(api.cuStreamSynchronize(1))
        ok(api.cuMemPoolDestroy(pool))


def take_lists(pipe: Connection, there: Any, back: Any) -> None:
    """The other process of torch's: takes tensors, or lists of them, out of a queue. Ends with None."""
    import torch

    torch.cuda.init()
    pipe.send("ready")
    while (tensors := there.get()) is not None:
        back.put(len(tensors))
        del tensors
    back.put(0)
