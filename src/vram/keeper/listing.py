"""Listings of a catalogue, in pages that fit into one message each."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import msgspec

from ..errors import NotFoundError
from ..version import __version__
from . import messages as m
from .admission import first_word
from .catalogue import Catalogue
from .metering import bytes_by_device
from .records import Lease, Session, Version
from .reports import EntryInfo, HolderInfo, VersionInfo
from .rules import check_prefix

# Bytes of rows; one alone may have more, and never as many as a message. Everybody else waits while a page is made:
# 0.2 ms, most of it for about 50 rows of entries. Where a page begins is looked up, so that many of them cost no more.
_PAGE = 16 * 1024
# Leases that one answer goes through to the producer of a ring, and pages of theirs that it looks at: it asks for the
# rest. By the clock as well: whoever watches its page (inotify), or has it swapped out, makes each look dear.
_STEPS, _LOOKS, _LOOKING = 4096, 512, 0.002
_entry = msgspec.msgpack.Decoder(m.Entry)


def entries(catalogue: Catalogue, request: m.List, now: float) -> m.Listing:
    """Return the names behind ``request.after``, as many as fit."""
    check_prefix(request.prefix)
    rows: list[Any] = []
    room = _PAGE // 2 if request.devices else _PAGE
    for version, older in catalogue.current(request.prefix, request.after):
        leases, held = catalogue.held(version.name)
        size = len(version.notes)
        left_out = size if size > request.most_meta else 0
        row = EntryInfo(
            name=version.name,
            version=version.number,
            owner=version.owner,
            nbytes=m.saturated(version.nbytes),
            segments=version.handles,
            writable=version.writable,
            readers=len(version.leases),
            retired=older,
            age=now - version.published,
            ttl_left=None if version.expires is None else version.expires - now,
            meta={} if left_out else _packed(version),
            leases=leases,
            held_bytes=m.saturated(held),
            left_out=left_out,
            parked=version.parked,
            updatable=version.updates > 0,
            devices=_devices(version) if request.devices else (),
        )
        room -= _add(rows, row, room)
        if room < 0:
            break
    return m.Listing(request.call, rows, room < 0)


def versions(catalogue: Catalogue, request: m.Versions, now: float) -> m.VersionList:
    """Return the versions of a name above ``request.after``, as many as fit."""
    rows: list[Any] = []
    room = _PAGE
    for version in catalogue.versions_of(request.name, request.after):
        room -= _add(rows, _version(catalogue, version, now), room)
        if room < 0:
            break
    return m.VersionList(request.call, rows, room < 0)


def _add(rows: list[Any], row: msgspec.Struct, room: int) -> int:
    """Add an encoded row if there is room for it or none before it; return its size.
    The size is measured: a page that no message carries would end the connection."""
    encoded = m.encode(row)
    if len(encoded) <= room or not rows:
        rows.append(msgspec.Raw(encoded))
    return len(encoded)


def _packed(version: Version) -> Any:
    """The meta of a version, packed: it is stored as it is sent."""
    return msgspec.Raw(version.notes)


def _devices(version: Version) -> tuple[str, ...]:
    return tuple(device for device, _ in sorted(bytes_by_device(version), key=lambda place: -place[1]))


def _version(catalogue: Catalogue, version: Version, now: float) -> VersionInfo:
    entry = _entry.decode(version.body)
    return VersionInfo(
        version=version.number,
        owner=version.owner,
        is_current=catalogue.is_current(version),
        writable=version.writable,
        nbytes=m.saturated(version.nbytes),
        sizes=tuple(piece.size for piece in entry.segments),
        devices=tuple(entry.devices),
        readers=len(version.leases),
        age=now - version.published,
        ttl_left=None if version.expires is None else version.expires - now,
        publisher_pid=version.publisher_pid or None,
        publisher_label=version.publisher_label,
        meta=_packed(version),
        is_revoked=version.revoked,
        publisher_host=version.publisher_host,
        parked=version.parked,
        updatable=version.updates > 0,
    )


def holders(catalogue: Catalogue, request: m.Holders, now: float) -> m.HolderList:
    """Return the leases on a version above ``request.after``, as many as fit, in order of their numbers."""
    for version in catalogue.versions_of(request.name, request.version - 1):
        if version.number == request.version:
            return _holders(request.call, version.leases.beginning(request.after + 1), now)
        break
    return m.HolderList(request.call, [], False)


def cursors(catalogue: Catalogue, session: Session, request: m.Cursors) -> m.CursorList:
    """Return with which frame each reader of a ring is done, of the leases behind ``request.after``, as many as fit."""
    rows: list[m.CursorRow] = []
    steps, looks, room, through = 0, 0, _PAGE, request.after
    late = time.monotonic() + _LOOKING
    for lease in catalogue.cursors(session, request.name, request.version, request.after):
        if steps == _STEPS or looks == _LOOKS or room <= 0 or (looks and time.monotonic() > late):
            return m.CursorList(request.call, rows, True, through)
        steps, through = steps + 1, lease.id
        if lease.page is None:
            continue
        looks += 1
        word, whose = first_word(lease.page.fds[0]), lease.session
        if word:
            rows.append(m.CursorRow(lease.id, word, whose.pid, whose.uid, whose.label, whose.host))
            room -= 64 + len(whose.label) + len(whose.host)
    return m.CursorList(request.call, rows, False, through)


def leases(catalogue: Catalogue, session: Session, request: m.Leases, now: float) -> m.HolderList:
    """Return the leases on names that begin with ``request.prefix``, by name, version and number, as many as fit.
    ``request.after`` is the last lease sent to this session, or one that exists; else its place is not known."""
    check_prefix(request.prefix)
    place = ("", 0, 0)
    if request.after:
        place = session.place
        if place[2] != request.after:
            last = catalogue.leases.get(request.after)
            if last is None:
                raise NotFoundError(f"lease {request.after}, behind which the list was to go on, is over: list anew")
            place = (last.version.name, last.version.number, last.id)
    page = _holders(request.call, catalogue.leases_under(request.prefix, place), now)
    if page.rows:
        row: Any = page.rows[-1]
        session.place = (row.name, row.version, row.lease_id)
    return page


def _holders(call: int, asked: Iterable[Lease], now: float) -> m.HolderList:
    rows: list[Any] = []
    room = 2 * _PAGE  # these rows are made more quickly
    for lease in asked:
        session, version = lease.session, lease.version
        room -= 120 + 4 * len(session.label) + len(session.host) + len(version.name)
        if room < 0 and rows:
            return m.HolderList(call, rows, True)
        rows.append(holder(lease, now))
    return m.HolderList(call, rows, False)


def holder(lease: Lease, now: float) -> HolderInfo:
    """Return the row of one lease."""
    session, version = lease.session, lease.version
    return HolderInfo(
        lease_id=lease.id,
        version=version.number,
        pid=session.pid or None,
        uid=session.uid,
        label=session.label,
        access=lease.access,
        age=now - lease.since,
        nbytes=m.saturated(version.nbytes),
        name=version.name,
        host=session.host,
    )


def statistics(
    catalogue: Catalogue,
    request: m.Statistics,
    *,
    pid: int,
    uptime: float,
    connections: int,
    lost_rows: int = 0,
) -> m.KeeperStatistics:
    """Return how much a keeper holds: the catalogue's counts, and those of the process."""
    total, quotas = catalogue.accounts.total, catalogue.accounts.quotas
    return m.KeeperStatistics(
        call=request.call,
        pid=pid,
        uptime=uptime,
        entries=catalogue.entries,
        versions=catalogue.versions,
        leases=len(catalogue.leases),
        connections=connections,
        waiting=catalogue.waiting,
        nbytes=m.saturated(total.nbytes),
        descriptors=total.handles,
        quotas=[None if most is None else m.saturated(most) for most in msgspec.structs.astuple(quotas)],
        keeper_version=__version__,
        lost_rows=lost_rows,
    )
