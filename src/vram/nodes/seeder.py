"""A reader that gives on what it has: the pieces that have arrived here and are right, to other readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ..errors import NotFoundError
from . import messages as m
from .connection import Connection
from .messages import Piece
from .server import Server

PATIENCE = 10.0  # seconds that another reader may be silent, or not read
_QUIET = 1.0  # seconds without a request after which nobody is expected any more


class Seeder:
    """A server that gives this reader's pieces to other readers, who check their digests as of any other piece.
    `take` returns a piece and its bytes, which this object releases, or None if the piece is not here."""

    def __init__(self, host: str, key: bytes, take: Callable[[int], tuple[Piece, memoryview] | None]) -> None:
        self._take = take
        self._lock = threading.Lock()
        self._active = 0
        self._last = time.monotonic()
        self._server = Server(host, 0, key, self._serve)

    def open(self) -> None:
        """Begin; see :meth:`Server.open`."""
        self._server.open()

    @property
    def address(self) -> str:
        """Where it is reached; empty before it is open."""
        return self._server.address

    def _serve(self, connection: Connection) -> None:
        while True:
            self._send(connection, connection.hear(m.Fetch, PATIENCE).number)

    def _send(self, connection: Connection, number: int) -> None:
        with self._lock:
            self._active += 1
        try:
            found = self._take(number)
            if found is None:
                connection.send(m.refusal(NotFoundError(f"piece {number} is not here")), PATIENCE)
                return
            piece, data = found
            with data:
                connection.send(m.PieceHead(number, piece.nbytes), PATIENCE)
                connection.send_bytes(data, PATIENCE)
        finally:
            with self._lock:
                self._active -= 1
                self._last = time.monotonic()

    def is_wanted(self) -> bool:
        """Whether somebody is being sent a piece, or was a moment ago."""
        return bool(self._active) or time.monotonic() - self._last < _QUIET

    def close(self) -> None:
        """End it; who is being sent a piece gets it elsewhere. Idempotent."""
        self._server.close()
