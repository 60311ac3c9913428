"""Leases asleep: their memory goes back to whoever keeps it, and comes again behind the same addresses.

The keeper keeps the version of a lease that sleeps and may park it; a lease that was released gets the newest version.
Leases are mapped again by leases of their own, which take the place of those that slept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from ..arrays.views import RegionViews, is_written
from ..driver.protocol import UNDECIDED
from ..errors import AsleepError, BusyError, MismatchError, UsageError, VramError
from ..keeper.client import clients, close_client
from ..lifetime import live, shielded, unwinding
from ..memory import Region
from ..memory.backups import LentBackup
from ..memory.sleep import sleep_regions, wake_regions
from ..open_files import close_fds
from ..sharing.descriptor import Manifest
from ..sharing.mapping import not_memory, receive
from ..spec import check_timeout
from .following import alone, move, reconnect
from .keepers import TIMEOUT
from .manifests import read_manifest
from .mapped import LeaseReturn, choose, leases, memories_of, wire_access

if TYPE_CHECKING:
    from ..keeper.background import Subscription
    from ..keeper.client import Attachment, KeeperClient
    from .lease import Lease

Rows = tuple[dict[Region, LentBackup], ...]  # by memory of a lease: what sleeps of it, and how


class _Words:
    """Stands for the words of the publisher of a lease that sleeps."""

    def __init__(self, described: str) -> None:
        self._described = described

    def __getitem__(self, index: int) -> int:
        raise AsleepError(f"the lease on {self._described} is asleep: lease.wake() first")


class Ready(NamedTuple):
    """The lease by which one that sleeps is to be mapped."""

    lease: Lease
    client: KeeperClient
    attachment: Attachment
    manifest: Manifest
    words: memoryview | None
    listening: list[Subscription] | None  # None: those that there are are of the same version


# -- falling asleep -----------------------------------------------------------------------------------------------
@shielded
def put_to_sleep(several: Sequence[Lease], *, release: bool) -> int:
    """Put leases to sleep, all or none, and return how many bytes were mapped; with `release` they are given back."""
    with ExitStack() as held:
        for lease in several:
            held.enter_context(alone(lease, "sleep"))
            _check(lease)
        for lease in several:
            _refuse_sections(lease, held)
        nbytes = sum(lease.nbytes for lease in several)
        rows = [_rows(lease) for lease in several]
        resting: list[Lease] = []
        try:
            for lease in several:
                # First: what fails here has changed nothing, and a keeper that is gone could give nothing back.
                lease._client.rest(lease._return.lease_id)
                resting.append(lease)
            sleep_regions({region: backup for row in rows for one in row for region, backup in one.items()})
        except BaseException as error:
            with unwinding(error):
                _awake(resting)
            raise
        for lease, row in zip(several, rows, strict=True):
            lease._asleep = row
            lease._pages.clear()
            if release:
                lease._return.release()
        return nbytes


def _awake(resting: Sequence[Lease]) -> None:
    for lease in resting:
        with suppress(VramError):  # a keeper that is gone parks nothing
            lease._client.rest(lease._return.lease_id, asleep=False)


def _check(lease: Lease) -> None:
    if lease._asleep is not None:
        raise AsleepError(f"{lease!r} is asleep already")
    if lease._is_shared:
        raise UsageError(f"{lease!r} shares its mapping with all leases of its follower: stop following it, and attach")
    if lease.access == "cow":
        raise UsageError(f"{lease!r} is a private copy: what was written to it is nowhere else")
    from .reading import RING, STATE

    if lease._words is not None and lease._words[STATE] == RING:
        raise UsageError(f"{lease!r} is on a ring, which is read frame by frame: close its reader, and attach it again")


def _refuse_sections(lease: Lease, held: ExitStack) -> None:
    """Have nobody enter a section of a lease, or make its page; that is undone at the end of `held`, unless the lease
    sleeps by then. Raises BusyError if a thread is in one."""
    if lease._words is None:
        return
    from .reading import alone_with_pages

    words: Any = _Words(lease._described())
    with alone_with_pages():
        held.callback(_reopen, lease, lease._words)
        lease._words = words
        for page in lease._pages:
            page.gate = words
            if inside := page.inside():
                raise BusyError(f"{lease!r} cannot sleep while it is read", tuple(inside))


def _reopen(lease: Lease, words: memoryview) -> None:
    if lease._asleep is None:
        lease._words = words
        for page in lease._pages:
            page.gate = words


def _rows(lease: Lease) -> Rows:
    """Return what is to sleep: the memories, and the private mappings that tensors of torch are over."""
    rows = []
    for region in lease._regions:
        views = RegionViews.of(region)
        regions = [region]
        if views.private is not None:
            private = views.private.region
            if is_written(private, 0, private.mapped):
                raise BusyError(
                    f"{lease!r} cannot sleep: tensors over it were written to, which is in this process only. Copy "
                    f"what is needed, and drop them",
                    private.pinned_by(),
                )
            regions.append(private)
        rows.append({one: LentBackup(one.chunks, lease.handle) for one in regions})
    return tuple(rows)


# -- waking ---------------------------------------------------------------------------------------------------------
@shielded
def wake(
    several: Sequence[Lease], *, newest: bool = False, timeout: float | None = 0.0, patience: float | None = 0.0
) -> None:
    """Wake leases, all or none; with `newest`, or if they were released, on the newest version of the same layout.
    `timeout` is in seconds for the keepers and names, `patience` for room on GPUs."""
    with ExitStack() as held:
        for lease in several:
            held.enter_context(alone(lease, "wake"))
        asleep = [lease for lease in several if lease._asleep is not None]
        ready: list[Ready] = []
        try:
            for lease in asleep:
                ready.append(_prepare(lease, newest or lease._return.is_released, timeout, patience))
            try:
                wake_regions(region for lease in asleep for row in lease._asleep or () for region in row)
            except UsageError as error:  # in numbers that the publisher chose
                raise not_memory(error) from None
        except BaseException as error:
            with unwinding(error):
                for one in ready:
                    _undo(one)
            raise
        finally:
            for one in ready:
                close_fds(one.attachment.fds)
            for lease in asleep:
                for row in lease._asleep or ():
                    for backup in row.values():
                        backup.given = ()
        for one in ready:
            _show(one)


def _show(ready: Ready) -> None:
    """Have a lease that is mapped again be awake."""
    lease = ready.lease
    with ExitStack() as held:
        if ready.words is not None:
            from .reading import VERSION, alone_with_pages

            held.enter_context(alone_with_pages())  # no page is made of the lease of before
            lease._words, lease._since = ready.words, ready.words[VERSION]
        lease._asleep = None
        move(lease, ready.client, ready.attachment, ready.manifest, ready.listening)


def _undo(ready: Ready) -> None:
    for subscription in ready.listening or ():
        subscription.stop()
    ready.client.release_later(ready.attachment.lease_id)


def _prepare(lease: Lease, newest: bool, timeout: float | None, patience: float | None) -> Ready:
    """Lease the version that a lease is to be mapped of, and put its memory where it wakes."""
    client, attachment = _lease_again(lease, newest, timeout, patience)
    try:
        manifest, numbers = read_manifest(client, attachment), None
        if lease._only is not None:
            manifest, numbers = choose(manifest, lease._only, attachment)
        if reason := _difference(lease._manifest, manifest):
            raise MismatchError(
                f"{lease.name!r} version {attachment.version} cannot be mapped where version {lease.version} was: "
                f"{reason}. Attach it anew (upgrade the lease)"
            )
        until = time.monotonic() + UNDECIDED
        whole = manifest if numbers is None else read_manifest(client, attachment)
        memories = memories_of(attachment, whole, numbers)
        for row, (memory, _, fds) in zip(lease._asleep or (), memories, strict=True):
            is_sealed = memory.device == "host" and not attachment.writable
            given = receive(memory.segments, fds, until, sealed=is_sealed, updatable=manifest.updatable)
            for backup in row.values():
                backup.given = given
        words = None
        if manifest.updatable:
            from .reading import words_of

            words = words_of(attachment.fds[-1], lease.name)
        is_same = client is lease._client and attachment.version == lease.version and lease._news
        listening = None if is_same else lease._hears().listen_anew(lease, client, attachment.version)
        return Ready(lease, client, attachment, manifest, words, listening)
    except BaseException:
        client.give_back(attachment)
        raise


def _lease_again(
    lease: Lease, newest: bool, timeout: float | None, patience: float | None
) -> tuple[KeeperClient, Attachment]:
    client, left = lease._client, timeout
    if newest:
        client, left = reconnect(lease, timeout)
    asked: dict[str, Any] = {
        "version": None if newest else lease.version, "access": wire_access(lease.access), "timeout": left,
        "owner": None if client.lends else lease.owner, "purpose": "wake",
    }  # fmt: skip
    began = time.monotonic()
    attachment = client.attach(lease.name, **asked)
    if attachment.moves:
        from .park import wake_and_lease

        attachment = wake_and_lease(client, attachment, lease._user, asked, began, patience)
    return client, attachment


def _difference(older: Manifest, newer: Manifest) -> str:
    """Return in what two layouts differ, the first thing that is found; empty if they are the same."""
    if newer.handles or newer.pools:
        return "it is memory of another kind"
    if older.updatable != newer.updatable or older.slots != newer.slots:
        return "it is updated in another way"
    for name in older.arrays.keys() ^ newer.arrays.keys():
        return f"array {name!r:.80} is {'gone' if name in older.arrays else 'new'}"
    for name, entry in older.arrays.items():
        there = newer.arrays[name]
        if (entry.dtype, entry.shape) != (there.dtype, there.shape):
            return (
                f"array {name!r:.80} is of {there.dtype} {there.shape} there, and of {entry.dtype} {entry.shape} here"
            )
        if entry != there:
            return f"array {name!r:.80} lies elsewhere"
    for ours, theirs in zip(older.memories, newer.memories, strict=False):
        if ours.device != theirs.device:
            return f"its memory is on {theirs.device}, and this one's on {ours.device}"
        sizes, others = [[segment.nbytes for segment in one.segments] for one in (ours, theirs)]
        if sizes != others or ours.offset != theirs.offset:
            return f"its memory has segments of {others} bytes, and this one's of {sizes}"
    return "" if len(older.memories) == len(newer.memories) else "it lies in another number of memories"


# -- a process without any ------------------------------------------------------------------------------------------
@shielded
def detach_all() -> int:
    """Put all leases of this process to sleep, give them back, and end its connections to keepers.

    Nothing of what others keep is mapped or open here afterwards, and no thread of the library waits for news of it, so
    that the process can be stopped, and its state be saved: :func:`reattach_all` goes on, also in another container,
    with another keeper that has entries of the same names and layouts. All leases sleep, or none.

    Returns
    -------
    int
        Bytes that were mapped by leases.

    Raises
    ------
    BusyError
        If a lease cannot sleep now (:meth:`Lease.sleep`), arrays or views of a closed one are alive, or this process
        updates an entry in place, which ends with its connection. Nothing has changed then.
    PeerGoneError
        If a keeper is gone, which could not give the memory back: close its leases. Nothing has changed then.
    UsageError
        If a lease cannot sleep at all: a private copy, one of a follower, of a ring, or on borrowed memory that has no
        descriptor. Close it first.

    Notes
    -----
    Memory that this process made itself stays, as does what it offers: loans, groups, arrays in queues.
    """
    for one in clients():
        if one.writers:
            raise BusyError("this process updates entries in place, which would end", tuple(map(repr, one.writers)))
    several = _open_leases()
    open_handles = {lease._claim.handle for lease in several}
    if kept := [one.label for one in live() if isinstance(one._undo, LeaseReturn) and one not in open_handles]:
        raise BusyError("arrays and views are mapped whose leases are closed: drop them first", tuple(kept))
    nbytes = put_to_sleep([lease for lease in several if lease._asleep is None], release=True)
    for lease in several:
        if not lease._return.is_released:
            lease._return.release()
        for news in lease._news.values():
            news.replace([])
    for one in clients():
        close_client(one.path)
    return nbytes


@shielded
def reattach_all(*, timeout: float | None = TIMEOUT, wait_for_memory: float | None = 0.0) -> int:
    """Wake all leases of this process that were released, each on the newest version of its name: all of them or none.

    Parameters
    ----------
    timeout, wait_for_memory : float or None
        As in :func:`vram.attach`, in seconds.

    Returns
    -------
    int
        Bytes that are mapped by them now.

    Raises
    ------
    MismatchError, NotFoundError, PeerGoneError, OutOfMemoryError
        As :meth:`Lease.wake`. All of them are still asleep then.
    """
    checked = check_timeout(timeout), check_timeout(wait_for_memory, "wait_for_memory")
    several = [lease for lease in _open_leases() if lease._asleep is not None and lease._return.is_released]
    wake(several, newest=True, timeout=checked[0], patience=checked[1])
    return sum(lease.nbytes for lease in several)


def _open_leases() -> list[Lease]:
    return [lease for lease in list(leases.values()) if not lease.is_closed]
