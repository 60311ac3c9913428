"""Metrics of a keeper: its requests and their duration, and usage by user and device (``vram metrics``, ``vram top``).

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
from typing import Final

import msgspec

from . import messages as m
from .catalogue import Catalogue
from .records import Version

# Seconds that the keeper worked on a request. Most take 20 to 200 us.
BOUNDS: Final = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3, 1.0)
MOST_ROWS: Final = 100  # users, and devices
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_HOST: Final = "host"
_entry = msgspec.msgpack.Decoder(m.Entry)


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
        devices=_devices(catalogue),
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


def _devices(catalogue: Catalogue) -> list[m.DeviceRow]:
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
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
