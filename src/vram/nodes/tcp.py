"""The engine that is always there: the bytes of a piece, on the connection itself.

A carrier sends them from the memory, and a reader receives them into memory. Memory of a GPU goes through a buffer of
the host. Several connections are several streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ..errors import ProtocolError
from ..spec import HOST, Location
from .connection import Connection
from .engine import Engine, Offering, Reading, Span
from .messages import Piece


class _Offering:
    data = b""

    def answer(self, asked: bytes) -> bytes:
        raise ProtocolError(f"tcp is asked nothing, and was asked {asked!r:.40}")

    def close(self) -> None:
        pass


class _Reading:
    def __init__(self, link: Connection) -> None:
        self._link = link

    def read(self, piece: Piece, into: Span, timeout: float) -> None:
        self._link.fetch(piece, cast("memoryview", into.view), timeout)

    def close(self) -> None:
        pass


class _Tcp:
    name = "tcp"

    def reaches(self, location: Location) -> bool:
        return location == HOST

    def offer(self, spans: Sequence[Span]) -> Offering:
        return _Offering()

    def open(self, data: bytes, link: Connection) -> Reading:
        return _Reading(link)


TCP: Engine = _Tcp()
