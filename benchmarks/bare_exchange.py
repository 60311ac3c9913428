"""Memory of GPUs that all of some processes have mapped, by bare driver calls: what a group's is held against.

The necessary steps and nothing else: each rank makes memory that can leave it, sends the descriptor to all others, maps
theirs, and hears that all have.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import time
from pathlib import Path

from vram.bench.children import DEADLINE
from vram.bench.gpu import Bare


class BareExchange:
    """One rank, with a socket of datagrams that the others send to.

    All ranks have made theirs before any exchanges something.
    """

    def __init__(self, stage: contextlib.ExitStack, bare: Bare, place: str, rank: int, size: int) -> None:
        self._bare = bare
        self._rank = rank
        self._paths = [str(Path(place) / f"bare-{one}") for one in range(size)]
        self._socket = stage.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._socket.bind(self._paths[rank])
        self._socket.settimeout(DEADLINE)
        self._came: dict[bytes, list[list[int]]] = {b"memory": [], b"mapped": []}

    def set_up(self, nbytes: int) -> float:
        """Return the seconds that it takes until all ranks have mapped so many bytes of each."""
        with contextlib.ExitStack() as undo:
            begin = time.perf_counter()
            self._exchange(nbytes, undo)
            return time.perf_counter() - begin

    def _exchange(self, nbytes: int, undo: contextlib.ExitStack) -> None:
        api, ok, bare = self._bare.api, self._bare.ok, self._bare
        memory = ok(api.cuMemCreate(nbytes, bare.prop, 0))
        undo.callback(api.cuMemRelease, memory)
        self._map(memory, nbytes, undo)
        fd = int(ok(api.cuMemExportToShareableHandle(memory, bare.fd_kind, 0)))
        undo.callback(os.close, fd)
        self._tell(b"memory", [fd])
        for fds in self._hear(b"memory"):
            theirs = ok(api.cuMemImportFromShareableHandle(fds[0], bare.fd_kind))
            os.close(fds[0])
            undo.callback(api.cuMemRelease, theirs)
            self._map(theirs, nbytes, undo)
        self._tell(b"mapped", [])
        self._hear(b"mapped")

    def _map(self, memory: object, nbytes: int, undo: contextlib.ExitStack) -> None:
        api, ok, bare = self._bare.api, self._bare.ok, self._bare
        address = ok(api.cuMemAddressReserve(nbytes, 0, 0, 0))
        undo.callback(api.cuMemAddressFree, address, nbytes)
        ok(api.cuMemMap(address, nbytes, 0, memory, 0))
        undo.callback(api.cuMemUnmap, address, nbytes)
        ok(api.cuMemSetAccess(address, nbytes, bare.grants, 1))

    def _tell(self, what: bytes, fds: list[int]) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        for path in self._paths[: self._rank] + self._paths[self._rank + 1 :]:
            self._socket.sendmsg([what], rights, 0, path)  # socket.send_fds leaves the address out

    def _hear(self, what: bytes) -> list[list[int]]:
        """Return the descriptors that each of the others has sent with a word; the next may have come too."""
        while len(self._came[what]) < len(self._paths) - 1:
            said, fds, _, _ = socket.recv_fds(self._socket, 16, 1)
            self._came[said].append(list(fds))
        found, self._came[what] = self._came[what], []
        return found
