"""Carriers that are honest, and carriers that lie."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from tests.support.deadlines import SOON

from vram.nodes import messages as m
from vram.nodes.carrier import Carrier
from vram.nodes.connection import Connection
from vram.nodes.digests import digest
from vram.nodes.server import Server


def honest(nbytes: int = 3000, **lies: Any) -> m.Opened:
    arrays = {"w": m.ArrayPlace(0, nbytes, "uint8", (nbytes,))}
    said = m.Opened("model", 1, 0, b"i" * 16, nbytes, ((0, nbytes),), arrays, {}, {"tcp": b""})
    return msgspec.structs.replace(said, **lies)


DATA = bytes(3000)


@contextlib.contextmanager
def lying(answers: Callable[[Any, Connection], object], key: bytes = b"") -> Iterator[str]:
    """Run a carrier that answers as it likes."""

    def serve(connection: Connection) -> None:
        while True:
            request = connection.receive(SOON)
            reply = answers(request, connection)
            if reply is not None:
                connection.send(reply, SOON)

    server = Server("127.0.0.1", 0, key, serve)
    try:
        yield server.address
    finally:
        server.close()


def properly(request: Any, connection: Connection, opened: m.Opened | None = None) -> object:
    """Answer as a carrier of one small piece of zeros does."""
    if isinstance(request, m.Open):
        return opened or honest()
    if isinstance(request, m.Next):
        return m.Finished() if request.arrived else m.Assigned(0, digest(DATA))
    connection.send(m.PieceHead(0, len(DATA)), SOON)
    connection.send_bytes(memoryview(DATA), SOON)
    return None


def sock_address(carrier: Carrier) -> tuple[str, int]:
    host, _, port = carrier.address.rpartition(":")
    return host, int(port)
