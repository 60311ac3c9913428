"""A server of a keeper in this process, and clients of it."""

from __future__ import annotations

import contextlib
import os

from vram.keeper.client import KeeperClient
from vram.keeper.restart import hand_over
from vram.keeper.server import KeeperServer

SOMEBODY_ELSE = os.geteuid() + 1


def make(path: str, *, uid: int = SOMEBODY_ELSE, connections: int = 6, kept_back: int = 0) -> KeeperServer:
    """Return a keeper that another user runs, as far as it knows, and that serves few connections."""
    server = KeeperServer(path, raises_limit=False, hand_over=hand_over)
    server.catalogue.accounts.keeper_uid = uid
    server.max_connections = connections
    server.kept_back = kept_back
    return server


def connect(stack: contextlib.ExitStack, path: str) -> KeeperClient:
    return stack.enter_context(KeeperClient.connect(path))
