"""Listings of a catalogue, in pages that fit into one message each."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from ..version import __version__
from . import messages as m
from .admission import first_word, is_zero
from .catalogue import Catalogue
from .limits import limit_called
from .metering import bytes_by_device
from .records import Lease, Session, Version
from .reports import EntryInfo, HolderInfo, LimitInfo, StatisticsInfo, VersionInfo
from .rules import check_prefix

# Bytes of rows; one alone may have more, and never as many as a message. Everybody else waits while a page is made:
# 0.2 ms, most of it for about 50 rows of entries. Where a page begins is looked up, so that many of them cost no more.
_PAGE = 16 * 1024
# Pages of leases that one answer looks at, less than a millisecond's worth; and with rows of readers in a section, for
# which it is asked again until they have left.
_LOOKS, _FEW_LOOKS = 512, 32
_entry = msgspec.msgpack.Decoder(m.Entry)


def entries(catalogue: Catalogue, request: m.List, now: float) -> m.Rows:
    """Return the names behind ``request.after``, as many as fit."""
    check_prefix(request.prefix)
    rows: list[Any] = []
    room = _PAGE // 2 if request.devices else _PAGE
    for version, older in catalogue.names.listed(request.prefix, request.after):
        leases, held = catalogue.names.held(version.name)
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
            meta={} if request.devices else _packed(version),
            leases=leases,
            held_bytes=m.saturated(held),
            parked=version.parked,
            updatable=version.updates > 0,
            devices=_devices(version) if request.devices else (),
        )
        room -= _add(rows, row, room)
        if room < 0:
            break
    return m.Rows(request.call, rows, room < 0)


def versions(catalogue: Catalogue, request: m.Versions, now: float) -> m.Rows:
    """Return the versions of a name above ``request.after``, as many as fit."""
    rows: list[Any] = []
    room = _PAGE
    for version in catalogue.names.versions_of(request.name, request.after):
        room -= _add(rows, _version(catalogue, version, now), room)
        if room < 0:
            break
    return m.Rows(request.call, rows, room < 0)


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


def pages(catalogue: Catalogue, session: Session, request: m.Pages) -> m.PageList:
    """Return the leases above ``request.after`` whose pages have such words, as many as fit."""
    rows: list[m.PageRow] = []
    looked: Counter[tuple[int, int]] = Counter()
    looks, room, through, more = 0, _PAGE, request.after, False
    for lease in catalogue.pages(session, request.name, request.version, request.after):
        if looks >= (_FEW_LOOKS if rows and not request.first else _LOOKS) or room <= 0:
            more = True
            break
        through = lease.id
        if lease.page is None:
            continue
        fd, holder = lease.page.fds[0], lease.session
        looks += 1
        looked[holder.pid, holder.uid] += 1
        word = first_word(fd) if request.first else not is_zero(fd, request.but)
        if word:
            rows.append(m.PageRow(lease.id, holder.pid, holder.uid, holder.label, holder.host, int(word)))
            room -= 64 + len(holder.label) + len(holder.host)
    return m.PageList(request.call, rows, more, through, [(*key, count) for key, count in looked.items()])


def holders(catalogue: Catalogue, request: m.Holders, now: float) -> m.Rows:
    """Return the leases on names that begin with ``request.prefix`` behind ``request.after``, as many as fit."""
    rows: list[Any] = []
    room = 2 * _PAGE  # these rows are made more quickly
    for lease in catalogue.names.leases_under(check_prefix(request.prefix), request.after):
        session, version = lease.session, lease.version
        room -= 120 + 4 * len(session.label) + len(session.host) + len(version.name)
        if room < 0 and rows:
            return m.Rows(request.call, rows, True)
        rows.append(holder(lease, now))
    return m.Rows(request.call, rows, False)


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
        is_asleep=lease.asleep,
    )


def statistics(
    catalogue: Catalogue, request: m.Statistics, *, pid: int, uptime: float, connections: int, lost_rows: int
) -> m.Rows:
    """Return how much a keeper holds: the catalogue's counts, and those of the process."""
    total, quotas = catalogue.accounts.total, catalogue.accounts.quotas
    nbytes = m.saturated(total.nbytes)
    used = {
        "bytes": nbytes, "entries": catalogue.names.entries, "descriptors": total.handles, "connections": connections,
    }  # fmt: skip
    info = StatisticsInfo(
        pid=pid,
        uptime=uptime,
        entries=catalogue.names.entries,
        versions=len(catalogue.versions),
        leases=len(catalogue.leases),
        connections=connections,
        waiting=catalogue.waiting.count,
        nbytes=nbytes,
        descriptors=total.handles,
        limits=tuple(
            LimitInfo(
                name, number, getattr(quotas, f"max_{name}"), getattr(quotas, f"user_{name}"),
                limit_called(name).option(of_user=False),
            )
            for name, number in used.items()
        ),
        keeper_version=__version__,
        lost_rows=lost_rows,
    )  # fmt: skip
    return m.Rows(request.call, [msgspec.Raw(m.encode(info))], False)
