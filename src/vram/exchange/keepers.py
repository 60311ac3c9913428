"""Ask a keeper what it holds."""

from __future__ import annotations

from ..keeper.client import EntryInfo, KeeperClient, StatisticsInfo, client
from ..keeper.session import Keeper

__all__ = ["connect", "list_entries", "remove", "show", "statistics"]


def connect(keeper: Keeper | str | None) -> KeeperClient:
    """Return this process's connection to a keeper, made on first use."""
    return client(keeper.path if isinstance(keeper, Keeper) else keeper)


def list_entries(prefix: str = "", *, keeper: Keeper | str | None = None) -> list[EntryInfo]:
    """Return what is published under names that begin with `prefix`, sorted by name."""
    return connect(keeper).list(prefix)


def show(name: str, *, keeper: Keeper | str | None = None) -> EntryInfo:
    """Describe one entry: its versions with their sizes, its `meta`, owner and holders.

    Raises
    ------
    NotFoundError
        If there is no such entry.
    """
    return connect(keeper).show(name)


def remove(name: str, *, version: int | None = None, keeper: Keeper | str | None = None) -> None:
    """Retire an entry, or one version of it. Its memory is freed with the last lease.

    Raises
    ------
    NotFoundError
        If there is no such entry or version.
    AccessDeniedError
        If it belongs to another user.
    """
    connect(keeper).remove(name, version)


def statistics(*, keeper: Keeper | str | None = None) -> StatisticsInfo:
    """Return the keeper's counts: entries, bytes, leases, connections."""
    return connect(keeper).statistics()
