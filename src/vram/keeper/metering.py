"""What a keeper has done, for whom, and how long it worked on it: for ``vram metrics`` and ``vram top``.

Counted as requests are answered. Who has how much is in the accounts already; only the bytes of each device are
looked up when somebody asks, since who publishes should not pay for that: what came since is read then.
"""

from __future__ import annotations

import bisect
import heapq
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Final

import msgspec

from . import messages as m
from .catalogue import Catalogue
from .records import Version

# Seconds that the keeper worked on a request. Most take 20 to 200 us.
BOUNDS: Final = (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 100e-3, 1.0)
MOST_ROWS: Final = 100  # users, and devices; what the others have is one row
_READ: Final = 1_000  # versions whose devices one answer reads, at 3 us each: others wait for it
_SEGMENTS: Final = 4_096  # and of how many segments, whichever comes first
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
_HOST: Final = "host"
_entry = msgspec.msgpack.Decoder(m.Entry)


class _Kind:
    """All requests of one kind."""

    __slots__ = ("buckets", "errors", "seconds")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS) + 1)  # the last is for what took longer
        self.seconds = 0.0
        self.errors: dict[str, int] = {}


class Meter:
    """The counts of one keeper, whose books are `catalogue`."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._kinds: dict[str, _Kind] = {}
        self._places: dict[int, list[tuple[str, int]]] = {}  # of each version, by its serial: bytes by device
        self._sums: dict[str, list[int]] = {}  # of each device: bytes and versions
        self._read = 0  # the serial of the last version whose devices were read

    def turn_to(self, catalogue: Catalogue) -> None:
        """Go on counting with other books."""
        self._catalogue = catalogue
        self._places.clear()
        self._sums.clear()
        self._read = 0

    def count(self, kind: str, seconds: float, error: str = "") -> None:
        """Count a request, the seconds that were worked on it, and the name of the error if it failed."""
        counts = self._kinds.get(kind)
        if counts is None:
            counts = self._kinds[kind] = _Kind()
        counts.buckets[bisect.bisect_left(BOUNDS, seconds)] += 1
        counts.seconds += seconds
        if error:
            counts.errors[error] = counts.errors.get(error, 0) + 1

    def report(self, call: int, *, uptime: float, connections: Mapping[int, int]) -> m.Measurements:
        """Return all counts. `uptime` is in seconds; `connections` has the number of connections by uid."""
        more = self._read_places()
        return m.Measurements(
            call=call,
            uptime=uptime,
            processor=time.process_time(),
            resident=_resident(),
            bounds=list(BOUNDS),
            requests=[
                m.RequestRow(kind, sum(counts.buckets), counts.seconds, counts.buckets, counts.errors)
                for kind, counts in sorted(self._kinds.items())
            ],
            users=self._users(connections),
            devices=self._devices(),
            more=more,
        )

    def _users(self, connections: Mapping[int, int]) -> list[m.UserInfo]:
        accounts, leases = self._catalogue.accounts, Counter[int]()
        for session in self._catalogue.sessions.values():
            leases[session.uid] += len(session.leases)
        rows = []
        for uid in accounts.users() | connections.keys() | leases.keys():
            used = accounts.of(uid)
            rows.append(
                m.UserInfo(
                    uid,
                    m.saturated(used.nbytes),
                    used.entries,
                    used.handles,
                    leases[uid],
                    connections.get(uid, 0),
                )
            )
        most = heapq.nlargest(MOST_ROWS, rows, key=lambda row: (row.nbytes, row.connections))
        if len(rows) > MOST_ROWS:
            listed = {row.uid for row in most}
            rest = [row for row in rows if row.uid not in listed]
            most.append(
                m.UserInfo(
                    None,
                    m.saturated(sum(row.nbytes for row in rest)),
                    sum(row.entries for row in rest),
                    sum(row.descriptors for row in rest),
                    sum(row.leases for row in rest),
                    sum(row.connections for row in rest),
                )
            )
        return most

    def _devices(self) -> list[m.DeviceRow]:
        most = heapq.nlargest(MOST_ROWS, self._sums.items(), key=lambda item: item[1][0])
        rows = [m.DeviceRow(device, m.saturated(nbytes), count) for device, (nbytes, count) in most]
        if len(self._sums) > MOST_ROWS:
            listed = {device for device, _ in most}
            rest = [counts for device, counts in self._sums.items() if device not in listed]
            nbytes, count = sum(nbytes for nbytes, _ in rest), sum(count for _, count in rest)
            rows.append(m.DeviceRow(None, m.saturated(nbytes), count))
        return rows

    def _read_places(self) -> bool:
        """Forget the versions that are gone, and read some of those that are new; return whether more are."""
        catalogue, places = self._catalogue, self._places
        for serial in [serial for serial in places if not catalogue.has_serial(serial)]:
            self._add(places.pop(serial), -1)
        new = catalogue.versions_after(self._read)  # what was moved is among them, by a new serial number
        versions = segments = 0
        for version in new:
            if versions >= _READ or segments >= _SEGMENTS:
                return True
            versions, segments = versions + 1, segments + version.handles
            self._read = version.serial
            places[version.serial] = found = bytes_by_device(version)
            self._add(found, 1)
        return False

    def _add(self, places: list[tuple[str, int]], times: int) -> None:
        for device, nbytes in places:
            counts = self._sums.setdefault(device, [0, 0])
            counts[0] += times * nbytes
            counts[1] += times
            if not counts[1]:
                del self._sums[device]


def kind_of(request: m.Request) -> str:
    """What a request is counted as: by the name of its message, but a removal that asks readers to let go apart."""
    if type(request) is m.Remove and request.revoke:
        return "revoke"
    return str(type(request).__struct_config__.tag)


def bytes_by_device(version: Version) -> list[tuple[str, int]]:
    """Return the bytes that a version has on each device. What is parked is on the host, whatever it is to wake on."""
    entry = _entry.decode(version.body)
    if not entry.devices or version.parked:
        return [(_HOST, version.nbytes)]
    # Only of those that a segment is on, whose descriptors are bounded: a publisher may name 64 that none is.
    sums: dict[int, int] = {}
    for piece in entry.segments:
        sums[piece.device] = sums.get(piece.device, 0) + piece.size
    return [(sys.intern(entry.devices[number]), nbytes) for number, nbytes in sums.items()]


def _resident() -> int:
    """Bytes of memory that this process has; 0 where /proc is not there."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0
