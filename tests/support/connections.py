"""The connections of this process to keepers, for tests that need new ones."""

from __future__ import annotations

from vram.keeper import client


def close_clients() -> None:
    """End all connections that this process made by :func:`vram.keeper.client.client`."""
    for path in list(client._clients):
        client.close_client(path)
