"""Reports of a keeper about its entries, versions and leases, as they are sent and as users see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from ..markup import table
from ..spec import format_count, format_size
from . import messages as m
from .messages import UserInfo as UserInfo
from .records import record_from
from .rules import describe_process

_Devices = Annotated[tuple[m.Word, ...], Meta(max_length=64)]


class HolderInfo(Struct, frozen=True):
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
    is_asleep : bool
        Whether nothing of it is mapped there: see :meth:`Lease.sleep <vram.entries.lease.Lease.sleep>`.
    """

    lease_id: m.Number
    pid: m.Number | None
    uid: m.Number
    label: m.Label
    access: m.Word
    age: float
    name: m.Name
    version: m.Number
    nbytes: m.Size
    host: m.Label = ""
    is_asleep: bool = False

    @property
    def rights(self) -> str:
        """Its `access`, and whether it sleeps, for a table."""
        return f"{self.access}, asleep" if self.is_asleep else self.access

    def __str__(self) -> str:
        return describe_process(self.pid, self.uid, self.label, self.host)


@dataclass(frozen=True, slots=True)
class RevokeInfo:
    """The leases that are left after a revoke; none, if all readers released in time.

    At most 1,000 leases are listed.

    Attributes
    ----------
    holders : tuple of HolderInfo
        The leases that are left, by version and age. Empty if all were released.
    nbytes : int
        Bytes of memory that they keep, each version's once.
    more : int
        How many leases there were beyond those that are listed.
    """

    name: str
    holders: tuple[HolderInfo, ...]
    nbytes: int
    more: int = 0


class VersionInfo(Struct, frozen=True):
    """One version of an entry; `age` and `ttl_left` in seconds, `nbytes` what it occupies.

    `is_revoked` says whether its readers were asked to release it; they are the `holders`. `parked` says whether its
    bytes are in memory of the host until it is attached with ``wake=True``; then that is what `devices` names.
    `updatable` says that it may be updated in place, or could be until its publisher ended.
    """

    version: m.Number
    owner: m.Number
    is_current: bool
    writable: bool
    nbytes: m.Size
    sizes: Annotated[tuple[m.Size, ...], Meta(max_length=1024)]
    devices: _Devices
    readers: m.Number
    age: float
    ttl_left: float | None
    publisher_pid: m.Number | None
    publisher_label: m.Label
    meta: m.Notes
    holders: tuple[HolderInfo, ...] = ()
    is_revoked: bool = False
    publisher_host: m.Label = ""
    parked: bool = False
    updatable: bool = False


class ArrayInfo(Struct, frozen=True):
    """One array of a version, as its publisher described it: the name of its element type, its shape, its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class EntryInfo(Struct, frozen=True):
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
        The arrays of the current version. Only :func:`vram.entry` reads it; None if it did not, if no version is
        current, or if what the publisher wrote cannot be read.
    leases : int
        Leases on all its versions together; `readers` are those on the version that is shown.
    held_bytes : int
        Bytes of the versions that somebody holds, each once, since readers share them.
    parked : bool
        Whether the bytes of the current version are in memory of the host, until it is attached with ``wake=True``.
    updatable : bool
        Whether the current version may be updated in place, or could be until its publisher ended.
    devices : tuple of str
        The devices of the current version: ``"host"``, UUIDs of GPUs. Only :func:`vram.entry` says it.
    """

    name: m.Name
    version: m.Number
    owner: m.Number
    nbytes: m.Size
    segments: m.Number
    writable: bool
    readers: m.Number
    retired: m.Number
    age: float
    ttl_left: float | None
    meta: m.Notes = {}
    versions: tuple[VersionInfo, ...] = ()
    arrays: tuple[ArrayInfo, ...] | None = None
    leases: m.Number = 0
    held_bytes: m.Size = 0
    parked: bool = False
    updatable: bool = False
    devices: _Devices = ()

    def __repr__(self) -> str:
        return f"<EntryInfo {self.name!r} {', '.join(self._facts())}>"

    def _facts(self) -> list[str]:
        """Return the facts of a one-line summary."""
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


def access_of(row: EntryInfo | VersionInfo) -> str:
    """Return what may be done with a version now."""
    return "parked" if row.parked else "updatable" if row.updatable else "rw" if row.writable else "r"


def _entry_cells(one: EntryInfo) -> tuple[object, ...]:
    return one.name, one.version or "-", format_size(one.nbytes), access_of(one), one.readers, one.owner


def _holder_cells(one: HolderInfo) -> tuple[object, ...]:
    return one.name, one.version, format_size(one.nbytes), str(one), one.rights, f"{one.age:.0f} s"


class LimitInfo(Struct, frozen=True):
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


class StatisticsInfo(Struct, frozen=True):
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
    stuck: int = 0
    limits: tuple[LimitInfo, ...] = ()
    keeper_version: str = ""
    lost_rows: int = 0


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
