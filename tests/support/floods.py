"""Peers of a channel that say without end what nobody asked for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from tests.support.deadlines import SOON

import vram
from vram.errors import WaitTimeoutError
from vram.sharing.channel import MAX_FDS, Channel
from vram.transports import SocketExchange


def ended(act: Callable[[], object], channel: contextlib.AbstractContextManager[object]) -> object:
    """Return what a call returned or raised; where it does not end it is ended, and this fails."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(act())
        except vram.errors.VramError as error:
            found.append(error.with_traceback(None))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON / 4)
    is_ended = not thread.is_alive()
    if not is_ended:
        channel.close()  # type: ignore[attr-defined]
        thread.join(SOON)
    assert is_ended, "it did not end"
    return found[0]


def unread(end: Channel | SocketExchange) -> int:
    count = 0
    with contextlib.suppress(WaitTimeoutError):
        while True:
            end.recv(timeout=0)
            count += 1
    return count


@contextlib.contextmanager
def long_array() -> Iterator[vram.Array]:
    """An array whose descriptors go in two messages: the second waits until the first is acknowledged."""
    with vram.zeros(1, "uint8", device="host", capacity=(MAX_FDS + 2) * (2 << 20)) as array:
        for count in range(2, MAX_FDS + 2):
            array.resize((count - 1) * (2 << 20) + 1)
        assert len(array.region.layout) > MAX_FDS
        yield array
