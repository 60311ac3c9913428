"""What lies between two nodes: forwards bytes, counts them, and cuts, stops or changes them when it is told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from tests.support.deadlines import SOON

from vram.nodes.carrier import Carrier


class Wire:
    """Forwards connections to an address.

    Attributes
    ----------
    address : str
        Where it listens.
    target : str
        Where it forwards to; may be changed for the connections to come.
    passed : int
        Bytes that went to the readers.
    connections : int
        How many came.
    cut_after : list of int
        Taken one for each connection: bytes to the reader after which it is cut; what has none is not.
    cuts_readers_only : bool
        Whether a carrier whose connection is cut does not hear of it.
    change : callable
        Called with each block to a reader and its offset in its connection; returns what is passed on.
    """

    def __init__(self) -> None:
        self.target = ""
        self.passed = self.connections = 0
        self.cut_after: list[int] = []
        self.change: Callable[[bytes, int], bytes] = lambda block, at: block
        self.is_stalled = threading.Event()
        self.cuts_readers_only = False
        self._lock = threading.Lock()
        self._socks: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._is_over = False
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *given: object) -> None:
        thread = threading.Thread(target=work, args=given, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _accept(self) -> None:
        while not self._is_over:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self.target.rpartition(":")
            try:
                theirs = socket.create_connection((host, int(port)), SOON)
            except OSError:
                ours.close()
                continue
            with self._lock:
                self._socks |= {ours, theirs}
                self.connections += 1
                limit = self.cut_after.pop(0) if self.cut_after else -1
            self._start(self._forward, ours, theirs, -1, False)
            self._start(self._forward, theirs, ours, limit, True)

    def _forward(self, source: socket.socket, sink: socket.socket, limit: int, counts: bool) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while at != limit:
                block = source.recv((1 << 16) if limit < 0 else min(1 << 16, limit - at))
                if not block:
                    break
                if counts:
                    while self.is_stalled.is_set() and not self._is_over:
                        self.is_stalled.wait(0.01)
                    self.passed += len(block)
                    block = self.change(block, at)
                at += len(block)
                sink.sendall(block)
        reader = sink if counts else source
        for sock in (reader,) if self.cuts_readers_only else (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def carrier(self, keeper: str, *, deltas: bool = False) -> Iterator[Carrier]:
        """Begin a carrier that is meant where this address is; the first of them is what this forwards to."""
        with Carrier("127.0.0.1:0", names=[self.address], deltas=deltas, keeper=keeper) as carrier:
            self.target = self.target or carrier.address
            yield carrier

    def cut(self) -> None:
        """Cut all connections that there are."""
        with self._lock:
            for sock in self._socks:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End it."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(SOON)
            assert not thread.is_alive()
        for sock in self._socks:
            sock.close()


@contextlib.contextmanager
def wire() -> Iterator[Wire]:
    """Lay a wire for the length of a block: its carriers are begun with it, since readers mean its address."""
    laid = Wire()
    try:
        yield laid
    finally:
        laid.close()
