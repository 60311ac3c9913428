"""The views of a keeper: listings of its catalogue, in pages that fit into one message each, and counts.

Requests are counted as they are answered. The usage of users is in the accounts already; the bytes on each device are
looked up when somebody asks.
"""

from __future__ import annotations

import bisect
import heapq
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from ..version import __version__
from . import messages as m
from .admission import first_word, is_zero
from .catalogue import Catalogue
from .limits import limit_called
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

# Seconds that the keeper worked on a request. Most take 20 to 200 us.
BOUNDS: Final = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3, 1.0)
MOST_ROWS: Final = 100  # users, and devices
_HOST: Final = "host"


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


# -- counts ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Counts:
    """The counts of all requests of one kind."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))  # the last is for what took longer
    seconds: float = 0.0
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, seconds: float, error: Exception | None) -> None:
        """Count a request, the seconds that were worked on it, and the error if it failed."""
        self.buckets[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds
        if error is not None:
            self.errors[type(error).__name__] += 1


def measurements(
    call: int, counted: Mapping[str, Counts], catalogue: Catalogue, *, uptime: float, connections: Mapping[int, int]
) -> m.Measurements:
    """Return all counts, of requests by their kind. `uptime` is in seconds; `connections` has their number by uid."""
    return m.Measurements(
        call=call,
        uptime=uptime,
        processor=time.process_time(),
        resident=_resident(),
        bounds=list(BOUNDS),
        requests=[
            m.RequestRow(kind, sum(counts.buckets), counts.seconds, counts.buckets, counts.errors)
            for kind, counts in sorted(counted.items())
        ],
        users=_users(catalogue, connections),
        devices=_device_rows(catalogue),
    )


def _users(catalogue: Catalogue, connections: Mapping[int, int]) -> list[m.UserInfo]:
    accounts, leases = catalogue.accounts, Counter[int]()
    for session in catalogue.sessions.values():
        leases[session.uid] += len(session.leases)
    rows = []
    for uid in accounts.users() | connections.keys() | leases.keys():
        used = accounts.of(uid)
        nbytes = m.saturated(used.nbytes)
        rows.append(m.UserInfo(uid, nbytes, used.entries, used.handles, leases[uid], connections.get(uid, 0)))
    return heapq.nlargest(MOST_ROWS, rows, key=lambda row: (row.nbytes, row.connections))


def _device_rows(catalogue: Catalogue) -> list[m.DeviceRow]:
    nbytes, versions = Counter[str](), Counter[str]()
    for version in catalogue.versions.values():
        for device, size in bytes_by_device(version):
            nbytes[device] += size
            versions[device] += 1
    return [m.DeviceRow(device, m.saturated(size), versions[device]) for device, size in nbytes.most_common(MOST_ROWS)]


def kind_of(request: m.Request) -> str:
    """Return the name that a request is counted under: its message, or ``revoke`` for a removal that revokes."""
    if type(request) is m.Remove and request.revoke:
        return "revoke"
    return str(type(request).__struct_config__.tag)


def bytes_by_device(version: Version) -> list[tuple[str, int]]:
    """Return the bytes that a version has on each device. A parked version is on the host."""
    if version.places is None:  # the entry is decoded once, when somebody asks: who publishes does not pay for it
        entry = _entry.decode(version.body)
        # Only of those that a segment is on, whose descriptors are bounded: a publisher may name 64 that none is.
        sums = Counter[int]()
        for piece in entry.segments:
            sums[piece.device] += piece.size
        version.places = [(sys.intern(entry.devices[number]), nbytes) for number, nbytes in sums.items()]
    return [(_HOST, version.nbytes)] if version.parked or not version.places else version.places


def _resident() -> int:
    """Bytes of memory that this process has; 0 where /proc is not there."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
