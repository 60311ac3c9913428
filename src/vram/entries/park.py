"""Park an entry: its bytes move from a GPU into memory of the host, and back once somebody attaches it to wake it.

The keeper holds descriptors and maps nothing, so the bytes are moved by the processes that can map them: by whoever
parks, and by the one of those who wake that the keeper lets (:class:`.keeper.records.Move`). Either makes a copy that
nobody sees yet, and hands it over as the memory of the same version in one step. Until then the bytes are where they
were; from then on they are in the copy: whoever dies in between has changed nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from .. import driver as drivers
from ..arrays.upload import ring_of
from ..errors import BusyError, NotFoundError, OutOfMemoryError, ProtocolError, UsageError
from ..keeper.client import Attachment, KeeperClient, Segment
from ..keeper.rules import MAX_MANIFEST
from ..lifetime import shielded, waiting
from ..memory import PhysicalAllocation, Region
from ..memory.long_work import long_work
from ..open_files import close_fds
from ..sharing.descriptor import Manifest, MemoryDescriptor, SegmentEntry, encode_manifest
from ..sharing.mapping import device_name, location_of, map_memory
from ..spec import HOST, Access, Location, check_timeout, format_size
from .keepers import TIMEOUT, connect
from .manifests import read_manifest, sealed_copy

if TYPE_CHECKING:
    from ..keeper.private import Keeper
    from ..keeper.reports import EntryInfo
    from ..lifetime import Handle

_FIRST_LOOK, _LAST_LOOK = 0.005, 0.25  # seconds between two tries, while somebody holds what is to be parked
_INSTANT = 0.001  # seconds
_SHOWN = 3  # entries that an error names
_KNOWN = 1024  # names of which it is known what this process has of them itself


@dataclass(frozen=True, slots=True)
class ParkReport:
    """The result of parking: `nbytes` were moved to host memory, `freed` are bytes that the device has back.
    `holders` may keep the rest from being freed until they close it or end; `seconds` includes the wait for leases."""

    name: str
    version: int
    nbytes: int
    freed: int
    holders: tuple[str, ...]
    seconds: float


@shielded
def park(
    name: str, *, timeout: float | None = TIMEOUT, keeper: Keeper | str | os.PathLike[str] | None = None
) -> ParkReport:
    """Move the memory of a published entry from its GPU to the host, where the keeper holds it until it is woken.

    The entry keeps its name, version, `meta` and owner. Attaching it raises AsleepError, but for
    ``vram.attach(name, wake=True)``, which moves the bytes back. Either all of it is parked or nothing has changed,
    also if this process is killed meanwhile.

    Parameters
    ----------
    name : str
        The entry, whose current version is parked. This user has to have published it.
    timeout : float or None
        Seconds to wait until nobody has a lease on it; 0 does not wait, None waits for ever. A process that attaches it
        while it is copied has it: it is not parked then, and tried again within that time.
    keeper : Keeper, str or PathLike, optional
        The keeper to ask; see :func:`vram.attach`.

    Returns
    -------
    ParkReport
        The bytes that were moved, how many of them the device has back, and who may hold the rest.

    Raises
    ------
    BusyError
        If somebody still has a lease on it, this process included: it names them, with uid, pid and bytes.
    AccessDeniedError
        If another user published it.
    NotFoundError
        If there is no such entry, or it was replaced or removed meanwhile.
    AsleepError
        If it is parked already.
    UsageError
        If all of it is memory of the host, where there is nothing to gain, or it was published with ``writable=True``
        or ``updatable=True``: what others write while it is parked would be lost.
    OutOfMemoryError, QuotaError
        If the host, or the keeper, has no room for it.
    UnsupportedError
        If this process does not see the GPU that it is on, or the keeper is older than this.
    PeerGoneError
        If there is no keeper.
    """
    began = time.monotonic()
    seconds = check_timeout(timeout)
    client = connect(keeper)
    pause = _FIRST_LOOK
    while True:
        try:
            return _park(client, name, began)
        except BusyError:
            left = None if seconds is None else began + seconds - time.monotonic()
            if left is not None and left <= 0:
                raise
        # Nobody tells when a lease is over; as of a revocation, most are soon or not for long.
        waiting(time.sleep, pause if left is None else min(pause, left))
        pause = min(pause * 1.5, _LAST_LOOK)


def _park(client: KeeperClient, name: str, began: float) -> ParkReport:
    lease = client.attach(name, purpose="park")
    with _given_back(client, lease):
        manifest = _manifest_of(client, lease)
        moved, places = _on_gpus(manifest)
        if not moved:
            raise UsageError(
                f"{name!r} version {lease.version} is in memory of the host already: to park it would free nothing. "
                f"Remove it (vram.remove) once it is saved elsewhere, such as in a file"
            )
        _move(client, lease, manifest, dict.fromkeys(places, HOST), manifest)
    return _report(client, lease, moved, began)


def remember(client: KeeperClient, name: str, version: int, held: list[tuple[Handle | None, int]]) -> None:
    """Note what memory of a publication this process holds, for :func:`park` to report.
    Each call forgets up to two names whose memory was closed; beyond :data:`_KNOWN` names the least recent goes."""
    known = client.placed
    if known is None:
        known = client.placed = {}
    known.pop(name, None)
    if held:
        known[name] = version, held
    for other in list(known)[:2]:
        published = known.pop(other, None)
        if published is not None and _bytes_here(published[1]):
            known[other] = published
    if len(known) > _KNOWN:
        known.pop(next(iter(known)), None)


def _bytes_here(held: list[tuple[Handle | None, int]]) -> int:
    return sum(nbytes for handle, nbytes in held if handle is None or not handle.is_over)


def _report(client: KeeperClient, lease: Attachment, moved: int, began: float) -> ParkReport:
    version, placed = (client.placed or {}).get(lease.name, (0, []))
    here = _bytes_here(placed) if version == lease.version else 0
    holders = []
    if here:
        holders.append(f"arrays of this process, pid {os.getpid()} ({format_size(here)})")
    if lease.has_publisher:
        holders.append(f"the process that published it, which is still there ({format_size(moved)} at most)")
    freed = 0 if lease.has_publisher else max(0, moved - here)
    return ParkReport(lease.name, lease.version, moved, freed, tuple(holders), time.monotonic() - began)


def wake_and_lease(
    client: KeeperClient, lease: Attachment, user: Location | None, asked: dict[str, Any], began: float = 0.0,
    patience: float | None = 0.0,
) -> Attachment:  # fmt: skip
    """Move the bytes of a parked version back by a lease granted for that, then lease the current version as `asked`,
    in what is left of its time since `began`. Also if another process was faster, or the version went. `patience` is
    in seconds, for a GPU that has no room."""
    name, timeout = lease.name, asked.get("timeout")
    until = None if patience is None else time.monotonic() + patience
    pause = _FIRST_LOOK

    def ask() -> Attachment:
        if not timeout:
            return client.attach(name, **asked)
        # Not 0 for who waits, since time that is over is another error than being asked not to wait.
        return client.attach(name, **{**asked, "timeout": max(began + timeout - time.monotonic(), _INSTANT)})

    while lease.moves:  # again, if it was parked again since
        found: Attachment | None = None
        try:
            with _given_back(client, lease):
                manifest = _manifest_of(client, lease)
                _, devices = _on_gpus(manifest)
                places = {number: user or location_of(device) for number, device in devices.items()}
                try:
                    with contextlib.suppress(BusyError, NotFoundError):
                        _move(client, lease, manifest, places, _moved_to(manifest, places))
                    found = ask()  # before this lease goes: nobody parks it in between
                except OutOfMemoryError as error:
                    if until is not None and time.monotonic() >= until:
                        error.args = (f"{error}. {_who_is_on(client, name, {*places.values()})}",)
                        raise
        except BaseException:
            if found is not None:
                client.give_back(found)
            raise
        if found is None:  # nobody tells when memory of a GPU is free
            waiting(time.sleep, pause)
            pause = min(pause * 1.5, _LAST_LOOK)
            found = ask()
        lease = found
    return lease


def _who_is_on(client: KeeperClient, name: str, places: set[Location]) -> str:
    """Say which other entries of the keeper are on some GPUs, largest first."""
    names = {device_name(place) for place in places}
    found: list[EntryInfo] = []
    after, is_more = "", True
    while is_more:
        rows, is_more = client.page(after=after)
        found += [row for row in rows if row.name != name and names.intersection(row.devices)]
        after = rows[-1].name if rows else ""
    if not found:
        return "No other entry of this keeper is on that GPU: other programs have its memory (nvidia-smi names them)"
    found.sort(key=lambda row: -row.nbytes)
    shown = ", ".join(f"{row.name!r} of uid {row.owner} ({format_size(row.nbytes)})" for row in found[:_SHOWN])
    return f"On that GPU are {shown}{', ...' * (len(found) > _SHOWN)}: park or remove one, or wait_for_memory="


@contextlib.contextmanager
def _given_back(client: KeeperClient, lease: Attachment) -> Iterator[None]:
    """Give a lease and its descriptors back at the end of a block."""
    try:
        yield
    finally:
        close_fds(lease.fds)
        lease.fds.clear()
        client.release([lease.lease_id])


def _manifest_of(client: KeeperClient, lease: Attachment) -> Manifest:
    """Read what is in a version that moves. While it is parked, too, that says where it was published."""
    manifest = read_manifest(client, lease)
    if manifest.descriptors != len(lease.segments) or manifest.handles or manifest.pools or manifest.updatable:
        raise ProtocolError(f"{lease.name!r} version {lease.version} is described as memory that no keeper moves")
    return manifest


def _on_gpus(manifest: Manifest) -> tuple[int, dict[int, str]]:
    """Return the bytes of the memories that are, or were published, on GPUs; and by their numbers, on which."""
    found = {number: one for number, one in enumerate(manifest.memories) if one.device != "host"}
    nbytes = sum(segment.nbytes for one in found.values() for segment in one.segments)
    return nbytes, {number: one.device for number, one in found.items()}


def _moved_to(manifest: Manifest, places: dict[int, Location]) -> Manifest:
    """Return what describes the same memories in other places."""
    memories = list(manifest.memories)
    for number, place in places.items():
        memories[number] = msgspec.structs.replace(memories[number], device=device_name(place))
    return msgspec.structs.replace(manifest, memories=tuple(memories))


@dataclass(slots=True)
class _Moved:
    """A segment that moves: where it was published and what it is in, open as `fd`, and the memory that it moves to."""

    segment: SegmentEntry
    device: str
    fd: int
    target: PhysicalAllocation
    place: Location

    @property
    def source(self) -> MemoryDescriptor:
        """The memory that it is in now, alone."""
        device = self.device if self.place == HOST else "host"
        return MemoryDescriptor(device, (self.segment,), 0, self.segment.nbytes, self.segment.nbytes)


def _move(
    client: KeeperClient, lease: Attachment, manifest: Manifest, places: dict[int, Location], after: Manifest
) -> None:
    """Copy the memories with the numbers in `places` there, and have the keeper hold the copies instead.
    Readers get `after` as the manifest from then on."""
    rows = [(segment, number, memory) for number, memory in enumerate(manifest.memories) for segment in memory.segments]
    fds = lease.fds[len(lease.fds) - len(rows) :]  # behind the manifest's, if it has a descriptor of its own
    segments = [Segment(segment.nbytes) for segment, _, _ in rows]
    due = [index for index, (_, number, _) in enumerate(rows) if number in places]
    with contextlib.ExitStack() as made:
        copies: dict[int, PhysicalAllocation] = {}
        for index in due:  # all memory before any bytes: where there is not enough, that is known at once
            segment, number, _ = rows[index]
            place = places[number]
            copies[index] = PhysicalAllocation.create(drivers.get(place), segment.nbytes, place)
            made.enter_context(copies[index])
        moved = []
        for index, target in copies.items():
            segment, number, memory = rows[index]
            moved.append(_Moved(segment, memory.device, fds[index], target, places[number]))
        verb = "waking" if HOST not in places.values() else "parking"
        with long_work(f"{verb} {lease.name}", sum(one.segment.nbytes for one in moved)):
            _copy(moved)
        # The last close of them frees the bytes, for seconds. The keeper has them too, and closes them in a thread.
        left = {one.fd for one in moved}
        lease.fds[:] = [fd for fd in lease.fds if fd not in left]
        close_fds([*left])
        for index, one in zip(due, moved, strict=True):
            if one.place == HOST:
                one.target.seal()
            fds[index] = one.target.export()
            segments[index] = Segment(one.segment.nbytes, device=device_name(one.place))
        inline = encode_manifest(after)
        extra = inline if len(inline) > MAX_MANIFEST else b""
        manifest_fd = made.enter_context(sealed_copy(extra)).export() if extra else None
        client.publish(
            lease.name,
            segments,
            fds,
            manifest=b"" if extra else inline,
            manifest_fd=manifest_fd,
            lease=lease.lease_id,
        )


def _copy(moved: Sequence[_Moved]) -> None:
    """Copy segments to their new memory, between GPUs and the host, whose memory is a file for it."""
    to_gpus: dict[Location, list[tuple[int, int, int, int]]] = {}
    to_host: dict[Location, list[tuple[int, int, int, int]]] = {}
    into: list[Handle] = []
    with contextlib.ExitStack() as mapped:
        for one in moved:
            old = mapped.enter_context(map_memory(one.source, [one.fd], access="r", sealed=one.place != HOST))
            into.append(old.handle)
            if one.place == HOST:
                to_host.setdefault(old.users[0], []).append((old.address, one.target.export(), 0, old.nbytes))
                continue
            new = mapped.enter_context(
                Region.from_allocations(
                    drivers.get(one.place), [one.target], access=Access.READ_WRITE, location=one.place, managed=True
                )
            )
            into.append(new.handle)
            to_gpus.setdefault(new.users[0], []).append((one.fd, 0, new.address, old.nbytes))
        for gpu, copies in to_host.items():
            ring_of(drivers.get(gpu), gpu).download(copies, into=into)
        for gpu, reads in to_gpus.items():
            ring_of(drivers.get(gpu), gpu).upload_files(reads, _cut_off, into=into)


def _cut_off(_: int) -> ProtocolError:
    return ProtocolError("what is parked ends before its last byte: it is not what was parked")
