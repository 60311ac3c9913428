"""A keeper to which every user may connect."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from tests.support.open_files import keeper_here
from tests.support.users import being

from vram.keeper.client import KeeperClient
from vram.keeper.server import KeeperServer


def connect(stack: contextlib.ExitStack, path: str, uid: int) -> KeeperClient:
    with being(uid):
        return stack.enter_context(KeeperClient.connect(path))


@contextlib.contextmanager
def for_all(**options: Any) -> Iterator[KeeperServer]:
    """A keeper in a thread of this process, to which every user may connect."""
    with keeper_here(mode=0o666, **options) as server:
        os.chmod(os.path.dirname(server.path), 0o711)
        yield server
