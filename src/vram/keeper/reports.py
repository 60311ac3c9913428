"""Reports of a keeper about its entries, versions and leases: plain values, independent of the wire.

They have the fields of the rows in :mod:`.messages` by the same names, so that a new field of a row arrives by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from ..markup import table
from ..spec import format_count, format_size
from . import messages as m
from .limits import LIMITS, Quotas
from .records import record_from
from .rules import clip_host, clip_label, describe_process

# One after the other is looked at, each for all that it says: the last ones need not be unpacked for every key.
_unpacked = functools.lru_cache(maxsize=4)(msgspec.msgpack.Decoder(dict[str, str]).decode)


class PackedMeta(Mapping[str, str]):
    """The metadata of a version; ``dict(meta)`` copies it. It is kept packed, as it was sent:
    strangers may publish many entries with 512 keys each, and dicts take twenty times as much memory."""

    __slots__ = ("_packed",)

    def __init__(self, meta: Mapping[str, str]) -> None:
        self._packed: bytes = m.encode(meta)

    def __getitem__(self, key: str) -> str:
        return _unpacked(self._packed)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(_unpacked(self._packed))

    def __len__(self) -> int:
        return len(_unpacked(self._packed))

    def __repr__(self) -> str:
        return repr(_unpacked(self._packed))


_SAYS_NOTHING = PackedMeta({})


@dataclass(frozen=True, slots=True)
class HolderInfo:
    """A lease and the process that holds it. As a string it names that process.

    `pid` and `uid` are verified by the kernel; `label` and `host` are claims of the process, at most 120 and 64
    characters, none of which a terminal would obey.

    Attributes
    ----------
    pid : int or None
        As the keeper sees it; None for a process in a PID namespace that the keeper does not see into. Then `host`
        tells containers apart: each has a name of its own, unless it was given another's.
    age : float
        Seconds since it was attached.
    name, version : str, int
        The version that is leased.
    nbytes : int
        Bytes of that version's memory, which its other readers share.
    """

    lease_id: int
    pid: int | None
    uid: int
    label: str
    access: str
    age: float
    name: str
    version: int
    nbytes: int
    host: str = ""

    def __str__(self) -> str:
        return describe_process(self.pid, self.uid, self.label, self.host)


@dataclass(frozen=True, slots=True)
class RevokeInfo:
    """The leases that are left after a revoke; none, if all readers released in time or were ended by force.

    At most 1,000 leases are listed.

    Attributes
    ----------
    holders : tuple of HolderInfo
        The leases that are left, by version and age. Empty if all were released.
    nbytes : int
        Bytes of memory that they keep, each version's once.
    forced : tuple of HolderInfo
        The leases that were ended by force. Their processes keep their mappings, and the kernel keeps the memory for
        them, until they close it or end: the keeper does not count it any more.
    more : int
        How many leases there were beyond those that are listed.
    """

    name: str
    holders: tuple[HolderInfo, ...]
    nbytes: int
    forced: tuple[HolderInfo, ...] = ()
    more: int = 0


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version of an entry; `age` and `ttl_left` in seconds, `nbytes` what it occupies.

    `is_revoked` says whether its readers were asked to release it; they are the `holders`. `parked` says whether its
    bytes are in memory of the host until it is attached with ``wake=True``; then that is what `devices` names.
    `updatable` says that it may be updated in place, or could be until its publisher ended.
    """

    version: int
    owner: int
    is_current: bool
    writable: bool
    nbytes: int
    sizes: tuple[int, ...]
    devices: tuple[str, ...]
    readers: int
    age: float
    ttl_left: float | None
    publisher_pid: int | None
    publisher_label: str
    meta: Mapping[str, str]
    holders: tuple[HolderInfo, ...] = ()
    is_revoked: bool = False
    publisher_host: str = ""
    parked: bool = False
    updatable: bool = False


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """One array of a version, as its publisher described it: the name of its element type, its shape, its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, repr=False)
class EntryInfo:
    """One name. From ``list_entries`` without its versions, from ``entry`` with them, oldest first.

    Attributes
    ----------
    version : int
        The current version, or 0 if only older ones are left, held by their readers.
    nbytes : int
        Bytes of the current version.
    retired : int
        Older versions that readers still hold.
    arrays : tuple of ArrayInfo, or None
        What the current version holds. Only :func:`vram.entry` reads it; None if it did not, if no version is current,
        or if what the publisher wrote cannot be read.
    leases : int
        Leases on all its versions together; `readers` are those on the version that is shown.
    held_bytes : int
        Bytes of the versions that somebody holds, each once, since readers share them.
    left_out : int
        Bytes of `meta` where that was longer than the request allowed, and is empty here.
    parked : bool
        Whether the bytes of the current version are in memory of the host, until it is attached with ``wake=True``.
    updatable : bool
        Whether the current version may be updated in place, or could be until its publisher ended.
    devices : tuple of str
        What the current version is on: ``"host"``, UUIDs of GPUs. Only :func:`vram.entry` says it.
    """

    name: str
    version: int
    owner: int
    nbytes: int
    segments: int
    writable: bool
    readers: int
    retired: int
    age: float
    ttl_left: float | None
    meta: Mapping[str, str] = field(default_factory=dict)
    versions: tuple[VersionInfo, ...] = ()
    arrays: tuple[ArrayInfo, ...] | None = None
    leases: int = 0
    held_bytes: int = 0
    left_out: int = 0
    parked: bool = False
    updatable: bool = False
    devices: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<EntryInfo {self.name!r} {', '.join(self._facts())}>"

    def _facts(self) -> list[str]:
        """What is said of it in a line."""
        if not self.version:
            return [f"{format_count(self.retired, 'retired version')}, no current one"]
        facts = [f"version {self.version}", format_size(self.nbytes), "rw" if self.writable else "r"]
        facts += ["parked"] * self.parked + ["updatable"] * self.updatable
        if self.arrays is not None:
            facts.append(format_count(len(self.arrays), "array"))
        return [*facts, format_count(self.readers, "reader"), *([f"{self.retired} retired"] if self.retired else [])]

    def _repr_html_(self) -> str:
        arrays = self.arrays or ()
        rows = (
            (one.name, one.dtype, " x ".join(map(str, one.shape)) or "-", format_size(one.nbytes)) for one in arrays
        )
        said = [f"{key}={value}" for key, value in self.meta.items()]
        return table(
            self.name, ("array", "type", "shape", "size"), rows, facts=[*self._facts(), *said[:8]], count=len(arrays)
        )


_Info = TypeVar("_Info")


class Listing(list[_Info]):
    """A list whose ``repr`` is short, and which a notebook shows as a table: entries or holders."""

    __slots__ = ()

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self[:_FEW]))
        return f"[{shown}, and {len(self) - _FEW:,} more]" if len(self) > _FEW else f"[{shown}]"

    def _repr_html_(self) -> str:
        if any(isinstance(one, HolderInfo) for one in self[:1]):
            header: tuple[str, ...] = ("name", "version", "size", "process", "access", "held for")
            rows = (_holder_cells(one) for one in self if isinstance(one, HolderInfo))
            return table(format_count(len(self), "lease"), header, rows, count=len(self))
        header = ("name", "version", "size", "access", "readers", "uid")
        entries = (_entry_cells(one) for one in self if isinstance(one, EntryInfo))
        return table(format_count(len(self), "entry", "entries"), header, entries, count=len(self))


_FEW = 10  # of a listing that its repr shows


def access_of(row: EntryInfo | VersionInfo | m.EntryRow) -> str:
    """Return what may be done with a version now."""
    return "parked" if row.parked else "updatable" if row.updatable else "rw" if row.writable else "r"


def _entry_cells(one: EntryInfo) -> tuple[object, ...]:
    return one.name, one.version or "-", format_size(one.nbytes), access_of(one), one.readers, one.owner


def _holder_cells(one: HolderInfo) -> tuple[object, ...]:
    return one.name, one.version, format_size(one.nbytes), str(one), one.access, f"{one.age:.0f} s"


@dataclass(frozen=True, slots=True)
class LimitInfo:
    """One quantity that a keeper has ceilings for; ``None`` is no ceiling.

    Attributes
    ----------
    name : str
        ``"bytes"``, ``"entries"``, ``"descriptors"`` or ``"connections"``.
    used : int
        By all users together.
    most : int or None
        How much all may use together. ``vram keep`` sets it by `option`.
    most_per_user : int or None
        How much each user may, but for the one who runs the keeper. ``vram keep`` sets it by ``<option>-per-user``.
    option : str
        Such as ``--max-bytes``.
    """

    name: str
    used: int
    most: int | None
    most_per_user: int | None
    option: str


@dataclass(frozen=True, slots=True)
class UserInfo:
    """The usage of one user, as it counts against that user's ceilings; `uid` None is all users that are not listed.
    `nbytes` counts memory that the user has published, and old versions that it leases."""

    uid: int | None
    nbytes: int
    entries: int
    descriptors: int
    leases: int
    connections: int


@dataclass(frozen=True, slots=True)
class StatisticsInfo:
    """How much a keeper holds, and its ceilings (None: none).

    Attributes
    ----------
    stuck : int
        Memory, addresses and leases that the calling process, not the keeper, failed to release, and holds until it
        ends. A ReleaseWarning reported each of them when that happened.
    limits : tuple of LimitInfo
        Everything that has a ceiling, how much of it is used, and the ceilings.
    keeper_version : str
        The version of this library that the keeper runs.
    lost_rows : int
        Rows of the journal of the keeper before that this one could not read: what they said is lost.
    """

    pid: int
    uptime: float
    entries: int
    versions: int
    leases: int
    connections: int
    waiting: int
    nbytes: int
    descriptors: int
    max_bytes: int | None
    max_entries: int | None
    max_descriptors: int | None
    stuck: int = 0
    limits: tuple[LimitInfo, ...] = ()
    keeper_version: str = ""
    lost_rows: int = 0


def version_info(row: m.VersionRow, holders: tuple[HolderInfo, ...]) -> VersionInfo:
    """Read a row of a page of versions."""
    return record_from(
        VersionInfo,
        row,
        sizes=tuple(row.sizes),
        devices=tuple(row.devices),
        publisher_pid=row.publisher_pid or None,
        publisher_label=clip_label(row.publisher_label),
        publisher_host=clip_host(row.publisher_host),
        meta=PackedMeta(row.meta) if row.meta else _SAYS_NOTHING,
        holders=holders,
        is_revoked=bool(row.is_revoked),
    )


def entry_info(row: m.EntryRow) -> EntryInfo:
    """Read a row of a listing."""
    meta = PackedMeta(row.meta) if row.meta else _SAYS_NOTHING
    return record_from(EntryInfo, row, meta=meta, devices=tuple(row.devices))


def shown_entry(name: str, versions: Sequence[VersionInfo]) -> EntryInfo:
    """Return the entry of a name from its versions, at least one: it shows the current one, or else the newest."""
    current = next((version for version in versions if version.is_current), None)
    shown = current or versions[-1]
    held = [version for version in versions if version.holders]
    return record_from(
        EntryInfo,
        shown,
        name=name,
        version=0 if current is None else current.version,
        nbytes=0 if current is None else current.nbytes,
        segments=len(shown.sizes),
        retired=len(versions) - (current is not None),
        versions=tuple(versions),
        leases=sum(len(version.holders) for version in held),
        held_bytes=sum(version.nbytes for version in held),
    )


def holder_info(row: m.HolderRow) -> HolderInfo:
    """Read a row of a page of holders."""
    return record_from(HolderInfo, row, pid=row.pid or None, label=clip_label(row.label), host=clip_host(row.host))


def statistics_info(reply: m.KeeperStatistics, stuck: int) -> StatisticsInfo:
    """Read a keeper's statistics."""
    most = dict(zip(Quotas.__struct_fields__, reply.quotas, strict=True))
    limits = tuple(
        LimitInfo(
            limit.name,
            reply.nbytes if limit.name == "bytes" else getattr(reply, limit.name),
            most.get(f"max_{limit.name}"),
            most.get(f"user_{limit.name}"),
            limit.option(of_user=False),
        )
        for limit in LIMITS
    )
    totals = {name: most[name] for name in ("max_bytes", "max_entries", "max_descriptors")}
    return record_from(StatisticsInfo, reply, stuck=stuck, limits=limits, **totals)


def user_info(row: m.UserRow) -> UserInfo:
    """Read what one user has."""
    return record_from(UserInfo, row)
