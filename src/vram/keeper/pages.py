"""What people are shown of a catalogue, cut into pages that fit into one message each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from . import messages as m
from .catalogue import Catalogue
from .records import Version
from .rules import check_prefix

if TYPE_CHECKING:
    from .server import KeeperServer

__all__ = ["entries", "holders", "statistics", "versions"]

_PAGE = 40 * 1024  # bytes of rows, as an upper estimate
_entry = msgspec.msgpack.Decoder(m.Entry)


def entries(catalogue: Catalogue, request: m.List, now: float) -> m.Listing:
    """Return the names behind ``request.after``, as many as fit."""
    check_prefix(request.prefix)
    rows: list[m.EntryRow] = []
    room = _PAGE
    for version, older in catalogue.current(request.prefix, request.after):
        room -= 100 + len(version.name) + _weight(version.meta)
        if room < 0 and rows:
            break
        rows.append(
            m.EntryRow(
                version.name,
                version.number,
                version.owner,
                version.nbytes,
                version.handles,
                version.writable,
                len(version.leases),
                older,
                now - version.published,
                None if version.expires is None else version.expires - now,
                version.meta,
            )
        )
    return m.Listing(request.call, rows, room < 0)


def versions(catalogue: Catalogue, request: m.Versions, now: float) -> m.VersionList:
    """Return the versions of a name above ``request.after``, as many as fit."""
    rows: list[m.VersionRow] = []
    room = _PAGE
    for version in catalogue.versions_of(request.name):
        if version.number <= request.after:
            continue
        room -= 300 + 10 * version.handles + _weight(version.meta)
        if room < 0 and rows:
            break
        rows.append(_version(catalogue, version, now))
    return m.VersionList(request.call, rows, room < 0)


def _version(catalogue: Catalogue, version: Version, now: float) -> m.VersionRow:
    entry = _entry.decode(version.body)
    return m.VersionRow(
        version.number,
        version.owner,
        catalogue.is_current(version),
        version.writable,
        version.nbytes,
        [piece.size for piece in entry.segments],
        entry.devices,
        len(version.leases),
        now - version.published,
        None if version.expires is None else version.expires - now,
        version.publisher_pid,
        version.publisher_label,
        version.meta,
    )


def holders(catalogue: Catalogue, request: m.Holders, now: float) -> m.HolderList:
    """Return the leases on a version above ``request.after``, as many as fit, in order of their numbers."""
    rows: list[m.HolderRow] = []
    room = _PAGE
    for version in catalogue.versions_of(request.name):
        if version.number != request.version:
            continue
        for lease in version.leases.values():  # each one's number is higher than those before it
            if lease.id <= request.after:
                continue
            who = lease.session
            room -= 60 + 4 * len(who.label)
            if room < 0:
                break
            rows.append(
                m.HolderRow(lease.id, version.number, who.pid, who.uid, who.label, lease.access, now - lease.since)
            )
    return m.HolderList(request.call, rows, room < 0)


def statistics(server: KeeperServer, request: m.Statistics) -> m.KeeperStatistics:
    """Return what a keeper holds."""
    books = server.catalogue
    total, quotas = books.accounts.total, books.accounts.quotas
    return m.KeeperStatistics(
        request.call,
        server.pid,
        server.now() - server.started,
        books.entries,
        books.versions,
        len(books.leases),
        len(server.connections),
        books.waiting,
        total.nbytes,
        total.handles,
        quotas.max_bytes,
        quotas.max_entries,
        quotas.max_handles,
    )


def _weight(meta: dict[str, str]) -> int:
    """At most how many bytes the meta of an entry takes in a message."""
    return sum(4 * (len(key) + len(value)) + 10 for key, value in meta.items()) if meta else 1
