"""A server of TCP connections: it listens, greets, and has one thread for each, which runs a given function."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection

from ..errors import PeerGoneError, VramError
from .address import is_in_numbers, place_of, show_address
from .connection import Connection, greet, listen
from .own_key import own_key

_GREETING = 5.0  # seconds that whoever comes has to show the key
_CONNECTIONS = 4096
_END = 5.0  # seconds that a thread has to end once its connection is cut
_REST = 0.05  # seconds before another try to let somebody in, where there is no descriptor to be had


class Server:
    """A server at an address until :meth:`close`; port 0 chooses a port. Readers may also mean `names`.
    `serve` is called for each authenticated connection in a thread of its own; the connection ends with the call."""

    def __init__(
        self, host: str, port: int, key: bytes, serve: Callable[[Connection], None], names: Collection[str] = ()
    ) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._threads: dict[Connection, threading.Thread] = {}
        self._is_closing = False
        self._sock = listen(host, port, key)
        try:
            self._key = key or own_key()
        except BaseException:
            self._sock.close()
            raise
        where = self._sock.getsockname()
        self.address = show_address(where)
        self._names = {*names} if is_in_numbers(host) else {*names, place_of(host, where[1])}
        self._thread = threading.Thread(target=self._accept, name=f"vram nodes {self.address}", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._is_closing:
            try:
                sock, _ = self._sock.accept()
            except OSError:  # it is shut down, or there is no descriptor to be had
                time.sleep(_REST)
                continue
            with self._lock:
                if self._is_closing or len(self._threads) >= _CONNECTIONS:
                    sock.close()
                    continue
                try:
                    connection = Connection(sock)
                    thread = threading.Thread(
                        target=self._run, args=(connection,), name="vram nodes connection", daemon=True
                    )
                    thread.start()
                except (PeerGoneError, RuntimeError):  # it is gone already, or no thread is to be had
                    sock.close()
                    continue
                self._threads[connection] = thread

    def _run(self, connection: Connection) -> None:
        try:
            with contextlib.suppress(VramError), connection:
                greet(connection, self._key, _GREETING, self._names)
                self._serve(connection)
        finally:
            with self._lock:
                self._threads.pop(connection, None)

    def close(self) -> None:
        """Let nobody in any more, end all connections, and wait for their threads. Idempotent."""
        with self._lock:
            self._is_closing = True
            threads = dict(self._threads)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        for connection in threads:
            connection.cut()
        until = time.monotonic() + _END
        for thread in (self._thread, *threads.values()):
            thread.join(max(0.0, until - time.monotonic()))
        self._sock.close()
