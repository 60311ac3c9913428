"""A lease goes on to a newer version that is the one it has, with more behind it: nothing moves, nothing is copied.

The serial numbers of its segments tell which version it extends, which their maker chose at random when it first
published them (:attr:`~vram.memory.PhysicalAllocation.serial`): a version whose segments begin with those that are
mapped here holds the same memory. They are the publisher's word. So only a version of the same user is looked at, as
the keeper verified it: the user whose memory is mapped anyway, and who could write anything there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec.structs import replace

from ..driver.protocol import UNDECIDED
from ..errors import (
    AsleepError,
    BusyError,
    CapacityError,
    ClosedError,
    MismatchError,
    NotFoundError,
    PeerGoneError,
    ProtocolError,
    UsageError,
    VramError,
)
from ..keeper.client import Attachment, KeeperClient
from ..lifetime import take, unwinding
from ..memory import Region
from ..open_files import close_fds
from ..sharing.descriptor import ArrayEntry, Manifest, SegmentEntry
from ..sharing.mapping import extend_memory
from .keepers import wait_for_keeper
from .manifests import is_strange, read_manifest
from .mapped import wire_access

if TYPE_CHECKING:
    from ..keeper.background import Subscription
    from .lease import Lease


_L = TypeVar("_L", bound="Lease")


class _Added(NamedTuple):
    """The memory that comes behind one memory of a lease."""

    region: Region
    segments: Sequence[SegmentEntry]
    fds: Sequence[int]


def refresh(lease: Lease) -> tuple[str, ...]:
    """Go on to the newest version; see :meth:`Lease.refresh <vram.entries.lease.Lease.refresh>`."""
    if lease._only is not None:
        raise UsageError(f"{lease!r} has some of the arrays, and does not grow: upgrade() attaches the newest version")
    with alone(lease, "refresh"):
        found = newest(lease)
        if found is None:
            return ()
        client, attachment = found
        try:
            return _go_on(lease, client, attachment)
        except BaseException:
            client.release_later(attachment.lease_id)
            raise
        finally:
            close_fds(attachment.fds)  # what is mapped holds descriptors of its own


@contextlib.contextmanager
def alone(lease: Lease, what: str) -> Iterator[None]:
    """Keep a lease, and have no other thread change what it is on, for the length of a block."""
    moving = lease._hears().moving
    if moving._is_owned():  # type: ignore[attr-defined]  # threading.Condition asks the same
        raise BusyError(f"{lease!r} is being changed by the very code that this call to {what} interrupted")
    take(moving)
    try:
        # Another thread may close it meanwhile: it is given back when this is over.
        with lease.handle.claim(what):
            yield
    finally:
        moving.release()


def reconnect(lease: Lease, timeout: float | None = 0.0) -> tuple[KeeperClient, float | None]:
    """Return the connection to whoever serves at the path, another keeper by now or a lender; and the time left."""
    try:
        return wait_for_keeper(lease._client.path, timeout)
    except PeerGoneError as error:
        raise PeerGoneError(lease._client.lost()) from error


def newest(lease: Lease) -> tuple[KeeperClient, Attachment] | None:
    """Lease the newest version of the same user, and return it with its connection; None if it is this one."""
    lease.handle  # noqa: B018
    client = lease._client
    try:
        if not client.is_stale(lease._leased):
            return None
    except PeerGoneError:
        client, _ = reconnect(lease)
    return client, client.attach(lease.name, access=wire_access(lease.access), owner=lease.owner)


def tell_of_growth(callback: Callable[[_L], object], lease: _L) -> None:
    """Call back if a lease can go on to a newer version; in the listening thread, after news of its own version.
    If it cannot, but may to a version that replaces the newer one, listen for news of the newer one."""
    before, number = lease._attachment, 0
    try:
        with contextlib.suppress(PeerGoneError):
            number = lease._client.state(before.lease_id).current  # first: what comes after it is heard of
        found = newest(lease)
        if found is None:
            return
        client, attachment = found
        try:
            _refuse_rights(lease, attachment)
            # Another user may publish again and again what takes a while to read, and every thread waits while it is:
            # whoever refreshes sees what it is.
            if attachment.manifest_fd is None or not is_strange(client, attachment):
                _plan(lease, read_manifest(client, attachment, older=lease._manifest), attachment)
        finally:
            client.give_back(attachment)
    except (ClosedError, NotFoundError, PeerGoneError):
        return
    except (AsleepError, MismatchError, ProtocolError):
        with contextlib.suppress(VramError):  # as in lease.on_grow(), which could say so
            _listen_on(callback, lease, before, number)
        return
    except VramError:
        pass  # it cannot be seen now, as for a quota: whoever refreshes will hear why
    if not lease.is_closed:
        callback(lease)


def _listen_on(callback: Callable[[_L], object], lease: _L, before: Attachment, number: int) -> None:
    """Have :func:`tell_of_growth` called with news of a version that the lease does not go on to."""
    if not number or lease.is_closed:
        return
    tell = partial(tell_of_growth, callback)
    subscription = lease._client.watch((before.name, number), lease, tell, of_all=True)
    subscriptions = lease._hears().subscriptions
    subscriptions.append(subscription)
    for one in list(subscriptions):
        if not one.is_over:
            continue
        with contextlib.suppress(ValueError):  # another thread was quicker
            subscriptions.remove(one)
    if lease._attachment is not before or lease.is_closed:  # meanwhile, in another thread, which listens there
        subscription.stop()


def _go_on(lease: Lease, client: KeeperClient, attachment: Attachment) -> tuple[str, ...]:
    before = lease._manifest
    _refuse_rights(lease, attachment)
    manifest, added = _plan(lease, read_manifest(client, attachment, older=before), attachment)
    _check_room(lease, attachment, added)
    sizes = [(one.region, one.region.nbytes) for one in added]
    until = time.monotonic() + UNDECIDED
    try:
        for one in added:
            extend_memory(one.region, one.segments, one.fds, until=until)
        listening = lease._hears().listen_anew(lease, client, attachment.version)
    except BaseException as error:
        with unwinding(error):
            for region, nbytes in reversed(sizes):
                if region.nbytes != nbytes:
                    region.shrink(nbytes)
        raise
    move(lease, client, attachment, manifest, listening)
    return tuple([name for name, entry in before.arrays.items() if manifest.arrays[name].nbytes > entry.nbytes])


def move(
    lease: Lease, client: KeeperClient, attachment: Attachment, manifest: Manifest,
    listening: list[Subscription] | None,
) -> None:  # fmt: skip
    """Have a lease be one on the newer version, and give the older back."""
    old, later = lease._return.granted
    lease._return.granted = attachment.lease_id, client.release_later
    if client is not lease._client or attachment.version != lease.version:
        lease._revoked = False
    lease._client, lease._attachment, lease._manifest = client, attachment, manifest
    arrays: dict[Any, Any] = lease._arrays
    for name, array in list(arrays.items()):
        known: Any = array.provenance  # by which it is pickled: the older version may be gone by then
        array.provenance = known and known._replace(version=attachment.version, layout=array.region.layout)
        if manifest.slots == 1 and array.nbytes < manifest.arrays[name].nbytes:
            arrays.pop(name, None)  # not closed: whoever has it keeps it
    if listening is not None:
        lease._hears().replace(listening)
    if lease.is_closed:
        lease._hears().stop()
    later(old)  # the memory stays: the newer version has it, too


def _check_room(lease: Lease, attachment: Attachment, added: Sequence[_Added]) -> None:
    """Refuse what does not fit behind the addresses that there are, and what is asleep, before anything is mapped."""
    for one in added:
        if one.region.asleep is not None:
            raise one.region.sleeps()
        total = one.region.mapped + sum([segment.nbytes for segment in one.segments])
        if total > one.region.capacity:
            raise CapacityError(
                f"{lease.name!r} version {attachment.version} has {total} bytes, and there are addresses for "
                f"{one.region.capacity} behind those of version {lease.version}: attach it with growing=True, which "
                f"sets all aside that it may grow to"
            )


def _refuse_rights(lease: Lease, attachment: Attachment) -> None:
    """Refuse what cannot have grown, whatever its manifest says: that costs nothing to see."""
    reason = ""
    if not (lease._attachment.writable and attachment.writable):  # what is sealed does not grow (S8)
        reason = "only what is published with writable=True can be"
    elif len(attachment.segments) < len(lease._attachment.segments):
        reason = f"it has {len(attachment.segments)} segments, and this one {len(lease._attachment.segments)}"
    if reason:
        raise MismatchError(
            f"{lease.name!r} version {attachment.version} is not version {lease.version} with more behind it: "
            f"{reason}. Attach it anew (upgrade the lease)"
        )


def _plan(lease: Lease, newer: Manifest, attachment: Attachment) -> tuple[Manifest, list[_Added]]:
    """Return the manifest of a newer version, its memories in mapped order, and what is to be mapped in addition.
    Raises MismatchError unless that version is the mapped one with more behind it."""
    older = lease._manifest
    if newer.handles or newer.pools or newer.updatable:
        raise MismatchError(
            f"{lease.name!r} version {attachment.version} is memory of another kind than version {lease.version}. "
            f"Attach it anew (upgrade the lease)"
        )
    at = len(attachment.fds) - len(attachment.segments)  # a manifest that has a descriptor of its own comes first
    try:
        numbers = _match(older, newer)
    except LookupError as error:
        raise MismatchError(
            f"{lease.name!r} version {attachment.version} is not version {lease.version} with more behind it: "
            f"{error.args[0]}. Attach it anew (upgrade the lease)"
        ) from None
    starts = _starts(newer)
    added = []
    for number, theirs in enumerate(numbers):
        segments = newer.memories[theirs].segments
        count = len(older.memories[number].segments)
        first = at + starts[theirs]
        if count < len(segments):
            fds = attachment.fds[first + count : first + len(segments)]
            added.append(_Added(lease._regions[number], segments[count:], fds))
    ours = {theirs: number for number, theirs in enumerate(numbers)}
    serials = [serial for theirs in numbers for serial in _serials(newer, starts, theirs)]
    arrays = {name: replace(entry, memory=ours[entry.memory]) for name, entry in newer.arrays.items()}
    memories = tuple([newer.memories[theirs] for theirs in numbers])
    return Manifest(newer.version, memories, arrays, serials=tuple(serials)), added


def _starts(manifest: Manifest) -> list[int]:
    """Return where the segments of each memory begin among those of all."""
    found = [0]
    for memory in manifest.memories:
        found.append(found[-1] + len(memory.segments))
    return found


def _serials(manifest: Manifest, starts: Sequence[int], number: int) -> tuple[int, ...]:
    return manifest.serials[starts[number] : starts[number + 1]]


def _match(older: Manifest, newer: Manifest) -> list[int]:
    """Return which memory of the newer manifest each of the older one is; LookupError, with the reason, if none."""
    if not older.serials or not newer.serials:
        which = "this one" if not older.serials else "that one"
        raise LookupError(f"{which} was not published with writable=True, or was copied, so that it cannot grow")
    if len(older.memories) != len(newer.memories):
        raise LookupError(f"it lies in {len(newer.memories)} memories, and this one in {len(older.memories)}")
    found: dict[int, int] = {}
    for name, entry in older.arrays.items():
        longer = newer.arrays.get(name)
        if longer is None:
            raise LookupError(f"it has no array {name!r:.80}")
        if reason := _why_not(entry, longer):
            raise LookupError(f"array {name!r:.80} {reason}")
        start = older.memories[entry.memory].offset + entry.offset
        if (
            found.setdefault(entry.memory, longer.memory) != longer.memory
            or start != newer.memories[longer.memory].offset + longer.offset
        ):
            raise LookupError(f"array {name!r:.80} lies elsewhere")
    ours, theirs = _starts(older), _starts(newer)
    numbers = [found.get(number, -1) for number in range(len(older.memories))]
    if sorted(numbers) != list(range(len(numbers))):
        raise LookupError("its arrays are in other memories")
    for number, other in enumerate(numbers):
        mine = older.memories[number]
        count = len(mine.segments)
        more = newer.memories[other]
        if (
            mine.device != more.device
            or mine.segments != more.segments[:count]
            or _serials(older, ours, number) != _serials(newer, theirs, other)[:count]
        ):
            raise LookupError("its memory is not the same")
    return numbers


def _why_not(entry: ArrayEntry, longer: ArrayEntry) -> str:
    """Return why an array is not another one with more rows; empty if it is."""
    if entry.dtype != longer.dtype or entry.shape[1:] != longer.shape[1:] or len(entry.shape) != len(longer.shape):
        return f"is of {longer.dtype} {longer.shape} there, and of {entry.dtype} {entry.shape} here"
    if not entry.shape and longer.nbytes != entry.nbytes:
        return f"has {longer.nbytes} bytes there, and {entry.nbytes} here"
    if longer.shape < entry.shape or longer.nbytes < entry.nbytes:
        return f"has {longer.shape[0]} rows there, and {entry.shape[0]} here"
    return ""
