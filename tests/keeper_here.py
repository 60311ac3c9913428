"""A keeper that serves from a thread of the test's own process, for a look into it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from vram.keeper.server import KeeperServer
from vram.testing.keeper import SOON

__all__ = ["serving"]


@contextlib.contextmanager
def serving(server: KeeperServer) -> Iterator[KeeperServer]:
    """Have a keeper serve from a thread for the length of a block, or until another takes over from it."""
    ready = threading.Event()
    thread = threading.Thread(target=server.serve, args=(ready.set,), kwargs={"signals": False})
    thread.start()
    try:
        assert ready.wait(SOON)
        yield server
    finally:
        with contextlib.suppress(RuntimeError):  # its loop is closed: it was taken over from
            server.loop.call_soon_threadsafe(server.stop)
        thread.join(SOON)
        assert not thread.is_alive()
