"""Pickles of arrays as multiprocessing makes them."""

from __future__ import annotations

import os
import socket
from multiprocessing.reduction import ForkingPickler
from typing import Any

import msgspec
import numpy as np
from tests.support.deadlines import SOON

import vram
from vram.handover.reducers import _rebuild


def rows(count: int = 10, **options: Any) -> vram.Array:
    array = vram.empty((count, 4), "int64", device="host", **options)
    array.numpy()[:] = np.arange(count * 4).reshape(count, 4)
    return array


def dumps(array: vram.Array) -> bytes:
    return bytes(ForkingPickler.dumps(array))


def loads(pickled: bytes) -> vram.Array:
    found = ForkingPickler.loads(pickled)
    assert isinstance(found, vram.Array)
    found.region  # (raises if it could not be had)
    return found


def knock(address: str) -> bytes | str:
    """Connect to an endpoint and ask for its first memory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(SOON)
        try:
            sock.connect(address)
            sock.send(msgspec.msgpack.encode(["fetch", 1, 0]))
            payload, fds, _, _ = socket.recv_fds(sock, 1000, 8)
            for fd in fds:
                os.close(fd)
            return payload[:3]
        except OSError as error:
            return type(error).__name__


def dumps_for(address: str) -> bytes:
    """A pickle that somebody made up."""
    return bytes(ForkingPickler.dumps(_Reference(address)))


class _Reference:
    def __init__(self, address: str, memory: int = 1, segments: int = 1, shape: tuple[int, ...] = (4,)) -> None:
        self.arguments = (address, memory, (segments, 0, "int64", shape), "", 0, 0)

    def __reduce__(self) -> Any:
        return _rebuild, self.arguments
