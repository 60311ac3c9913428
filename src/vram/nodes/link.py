"""What a reader says to a node: a carrier, or another reader."""

from __future__ import annotations

import time

from ..errors import ProtocolError
from . import messages as m
from .connection import Connection, connect
from .engine import Engine, Reading
from .messages import Piece


class Link:
    """One authenticated connection of a reader, and the readings open on it; for one thread, but for :meth:`cut`.
    `timeout` is the seconds to connect, `pause` the seconds that the other end may be silent within a piece."""

    def __init__(self, address: str, key: bytes, timeout: float, *, pause: float = 5.0) -> None:
        self._connection: Connection = connect(address, key, timeout)
        self._pause = pause
        self.here = self._connection.here
        self.where = self._connection.where
        self._readings: dict[str, Reading] = {}

    def open(self, request: m.Open, timeout: float) -> m.Opened:
        """Have a carrier offer an entry."""
        reply = self._connection.ask(request, timeout)
        if not isinstance(reply, m.Opened) or reply.name != request.name:
            raise self._odd(reply)
        return reply

    def join(self, request: m.Open, timeout: float) -> None:
        """Have another reader give on what it has."""
        reply = self._connection.ask(request, timeout)
        if not isinstance(reply, m.Finished):
            raise self._odd(reply)

    def next(self, request: m.Next, timeout: float) -> m.Assigned | m.Wait | m.Finished:
        """Ask which piece is to be got."""
        reply = self._connection.ask(request, timeout)
        if not isinstance(reply, (m.Assigned, m.Wait, m.Finished)):
            raise self._odd(reply)
        return reply

    def digests(self, count: int, timeout: float) -> list[bytes]:
        """Return the digests of all pieces."""
        found: list[bytes] = []
        until = time.monotonic() + timeout
        while len(found) < count:
            # Each may have to be found out first, from memory: few at a time, so that a timeout is one of silence.
            reply = self._connection.ask(m.Digests(len(found), 16), max(0.001, until - time.monotonic()))
            if not isinstance(reply, m.DigestList) or not 1 <= len(reply.digests) <= min(16, count - len(found)):
                raise self._odd(reply)
            found += reply.digests
            until = time.monotonic() + timeout
        return found

    def newest(self, name: str, version: int, seconds: float, timeout: float) -> int:
        """Return the current version of a name, once it is another one than `version`, or after so many seconds."""
        reply = self._connection.ask(m.Watch(name, version, seconds), seconds + timeout)
        if not isinstance(reply, m.Newest):
            raise self._odd(reply)
        return reply.version

    def reading(self, engine: Engine, offer: bytes) -> Reading:
        """Return an engine at work on this connection."""
        there = self._readings.get(engine.name)
        if there is None:
            there = self._readings[engine.name] = engine.open(offer, self)
        return there

    # -- for engines --------------------------------------------------------------------------------------------------
    def fetch(self, piece: Piece, into: memoryview, timeout: float) -> None:
        """Have the bytes of a piece sent on this connection; see :class:`~.engine.Link`."""
        until = time.monotonic() + timeout
        reply = self._connection.ask(m.Fetch(piece.number), timeout)
        if not isinstance(reply, m.PieceHead) or reply.number != piece.number or reply.nbytes != piece.nbytes:
            raise self._odd(reply)
        self._connection.receive_bytes(into, max(0.001, until - time.monotonic()), pause=self._pause)

    def ask(self, engine: str, data: bytes, timeout: float) -> bytes:
        """Return what the other half of an engine answers; see :class:`~.engine.Link`."""
        reply = self._connection.ask(m.Ask(engine, data), timeout)
        if not isinstance(reply, m.Answer):
            raise self._odd(reply)
        return reply.data

    # -- the end ------------------------------------------------------------------------------------------------------
    def cut(self) -> None:
        """Wake whoever waits here."""
        self._connection.cut()

    def close(self) -> None:
        """End it. Idempotent."""
        readings = list(self._readings.values())
        self._readings.clear()
        try:
            for reading in readings:
                reading.close()
        finally:
            self._connection.close()

    def _odd(self, reply: object) -> ProtocolError:
        return ProtocolError(f"{self.where} answers something else than was asked: {reply!r:.80}")
