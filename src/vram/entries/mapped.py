"""A leased version, mapped into this process: its manifest is read, and its memories are mapped under one handle."""

from __future__ import annotations

import fnmatch
import math
import os
import time
import weakref
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..arrays import Array
from ..arrays.dtypes import dtype_of
from ..driver.protocol import UNDECIDED
from ..errors import AsleepError, CapacityError, NotFoundError, ProtocolError, UsageError
from ..keeper.client import Attachment, KeeperClient
from ..lifetime import Claim, own, unwinding
from ..memory import Region
from ..open_files import close_fds
from ..sharing.descriptor import STRANGERS_ADDRESSES, HandleEntry, Manifest, MemoryDescriptor
from ..sharing.mapping import ACCESS, map_memory
from ..spec import Location, format_size
from .manifests import is_strange, read_manifest

if TYPE_CHECKING:
    import numpy as np

    from .lease import Lease

_W = TypeVar("_W")  # a memory as a whole
_P = TypeVar("_P")  # an array in it

leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()  # of this process, by id()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=leases.clear)  # they are the parent's


class LeaseReturn:
    """The undo of a lease's handle, on which all its mappings depend: the lease is given back, by the grantor's number,
    after the last unmap (S5). `later` takes that number, and neither waits nor raises, since finalizers reach it."""

    # The undo runs in whatever thread drops the last view, also while another one is about to wait for the grantor's
    # answer. `_due` holds the id from the undo on; whoever takes it out, an atomic step, gives the lease back.

    __slots__ = ("_due", "_wait", "granted")

    def __init__(self, lease_id: int, later: Callable[[int], None]) -> None:
        # One value, so that a lease on a newer version that holds the same memory takes its place in one step.
        self.granted = lease_id, later
        self._wait = False
        self._due: list[int] = []

    @property
    def lease_id(self) -> int:
        """The grantor's number for it. Raises AsleepError if the lease sleeps and was given back."""
        if not self.granted[0]:
            raise AsleepError("the lease was released as it fell asleep: lease.wake() first")
        return self.granted[0]

    @property
    def is_released(self) -> bool:
        """Whether the lease was given back though its holder is there, and sleeps."""
        return not self.granted[0]

    def release(self) -> None:
        """Give the lease back while its holder sleeps."""
        (lease_id, later), self.granted = self.granted, (0, _nothing)
        later(lease_id)

    def keep_back(self) -> None:
        """From now on only mark the lease as due: its holder wants to give it back itself and wait for the answer."""
        self._wait = True

    @property
    def is_due(self) -> bool:
        """Whether nothing is mapped under the lease any more, and it was not given back yet."""
        return bool(self._due)

    def take(self) -> bool:
        """Whether the lease is due and it is now the caller who has to give it back."""
        try:
            self._due.pop()
        except IndexError:
            return False
        return True

    def send_on(self) -> None:
        """Undo :meth:`keep_back`: if something is still mapped, the last view to go gives the lease back."""
        self._wait = False
        if self.take():  # it went in between, or whoever wanted to give it back could not
            lease_id, later = self.granted
            later(lease_id)

    def __call__(self) -> None:
        self._due.append(self.granted[0])
        if not self._wait and self.take():
            lease_id, later = self.granted
            later(lease_id)


def _nothing(_lease_id: int) -> None:
    """Give nothing back: see :meth:`LeaseReturn.release`."""


_Update = tuple[memoryview, int]  # the words of a publisher that updates in place, and the last update by then


def map_version(
    client: KeeperClient, leased: Attachment, access: str, *, user: Location | None = None, stream: int | None = None,
    timeout: float | None = None, growing: bool = False, only: Sequence[str] | None = None,
) -> tuple[Manifest, tuple[Region, ...], LeaseReturn, Claim, _Update | None]:  # fmt: skip
    """Map a leased version, whose descriptors it takes; the claim is the first on the lease's handle, which each
    mapping keeps, and which the :class:`LeaseReturn` undoes. `only` has patterns of arrays: other memories are not
    mapped. If it raises, the lease is given back."""
    returns = LeaseReturn(leased.lease_id, client.release_later)
    claim = own(f"lease on {leased.name!r} version {leased.version}", returns)
    depends, fds, update = (claim.handle,), leased.fds, None
    regions: list[Region] = []
    try:
        manifest = read_manifest(client, leased)
        _check(client, leased, manifest, access, growing)
        if manifest.updatable:
            from .reading import VERSION, words_of  # few leases are on what is updated

            words = words_of(fds[-1], leased.name)
            update = words, words[VERSION]
        # One time for all its memories, during which their owner may have them sealed. 0 is no time to wait for
        # others; what the kernel needs is not that.
        until = time.monotonic() + min(timeout or UNDECIDED, UNDECIDED)
        chosen, numbers = (manifest, None) if only is None else choose(manifest, only, leased)
        for memory, entry, given in memories_of(leased, manifest, numbers):
            if entry is None:
                region = map_memory(
                    memory, given, access=access, depends=depends, growing=growing, user=user,
                    sealed=not leased.writable, until=until, updatable=manifest.updatable,
                )  # fmt: skip
            else:
                from ..handover.by_handle import open_leased  # most leases are on what has descriptors

                fd = None if entry.pool < 0 else fds[len(fds) - manifest.pools + entry.pool]
                key = leased.name, leased.version
                region = open_leased(client, key, memory, entry, fd, access, depends, user)
            region.is_updatable = manifest.slots > 1  # no array on it may leave this process: it is of no version long
            regions.append(region)
        if manifest.events:
            from ..handover.stream_events import wait_for  # few name a stream

            for event in wait_for(manifest.events, stream):
                for region in regions:  # what is waited for stays until the memory is unmapped
                    region.handle.depend(event)
    except BaseException as error:
        with unwinding(error):
            for region in reversed(regions):
                region.close()
            claim.release()
        raise
    finally:
        close_fds(fds)  # mappings hold descriptors of their own
    return chosen, tuple(regions), returns, claim, update


def memories_of(
    leased: Attachment, manifest: Manifest, numbers: Container[int] | None
) -> list[tuple[MemoryDescriptor, HandleEntry | None, list[int]]]:
    """Return the memories of a version, or those of some `numbers`: each with its handle, if that is how it came, and
    with its descriptors, which are lent."""
    found = []
    at = len(leased.fds) - len(leased.segments)  # a manifest that has a descriptor of its own comes first
    handles = {entry.memory: entry for entry in manifest.handles} if manifest.handles else {}
    for number, memory in enumerate(manifest.memories):
        entry = handles.get(number)
        given = leased.fds[at : at + len(memory.segments)] if entry is None else []
        at += len(given)
        if numbers is None or number in numbers:
            found.append((memory, entry, given))
    return found


def choose(manifest: Manifest, only: Sequence[str], leased: Attachment) -> tuple[Manifest, dict[int, int]]:
    """Return the manifest of the arrays that match a pattern, and the new number of each memory that they lie in."""
    chosen: set[str] = set()
    for pattern in only:
        found = [pattern] if pattern in manifest.arrays else fnmatch.filter(manifest.arrays, pattern)
        if not found:
            raise NotFoundError(
                f"{leased.name!r} version {leased.version} has no array like {pattern!r:.80}; it has "
                f"{', '.join(map(repr, list(manifest.arrays)[:3]))}{', ...' * (len(manifest.arrays) > 3)}"
            )
        chosen.update(found)
    arrays = {name: entry for name, entry in manifest.arrays.items() if name in chosen}
    step = manifest.memories_of_a_slot
    used = {entry.memory + step * slot for entry in arrays.values() for slot in range(manifest.slots)}
    numbers = {number: new for new, number in enumerate(sorted(used))}
    return msgspec.structs.replace(
        manifest,
        memories=tuple(manifest.memories[number] for number in numbers),
        arrays={name: msgspec.structs.replace(entry, memory=numbers[entry.memory]) for name, entry in arrays.items()},
        handles=tuple(
            msgspec.structs.replace(one, memory=numbers[one.memory]) for one in manifest.handles if one.memory in used
        ),
    ), numbers


def wire_access(access: object) -> str:
    """Return what the keeper is asked for, as a private copy only reads what is shared; raise UsageError for none."""
    if not isinstance(access, str) or access not in ACCESS:
        raise UsageError(f'access {access!r:.40} is not one of "r", "rw", "cow"')
    return "rw" if access == "rw" else "r"


def _check(client: KeeperClient, leased: Attachment, manifest: Manifest, access: str, growing: bool) -> None:
    """Refuse what does not fit together, and of another user what would leave this process few addresses."""
    if (manifest.handles or manifest.events) and not client.lends:
        raise ProtocolError(f"{leased.name!r} is of memory that lives as long as its maker: none to keep")
    if manifest.slots > 1 and access == "cow":
        raise UsageError(
            f"{leased.name!r} was published with swap=True: its bytes move from one memory to another, "
            f'and no private copy of either stays whole; attach with access="r"'
        )
    total = sum([memory.capacity for memory in manifest.memories] if growing else [one.size for one in leased.segments])
    if total > STRANGERS_ADDRESSES and is_strange(client, leased):
        raise CapacityError(
            f"{leased.name!r} of uid {leased.owner} has, or may grow to, {format_size(total)}; for an entry of "
            f"another user at most {format_size(STRANGERS_ADDRESSES)} of addresses are used"
            + (": attach it without growing=True" if growing else "")
        )


def parts(
    lease: Lease,
    show: Callable[[Array], _W],
    part_of: Callable[[_W, int, np.dtype[Any], tuple[int, ...]], _P | None],
    alone: Callable[[Array], _P],
) -> dict[str, _P]:
    """Return the arrays of a lease, each as a part of its memory, which is shown once, as bytes."""
    manifest = lease._manifest
    wholes: dict[int, _W] = {}
    found: dict[str, _P] = {}
    first = manifest.memories_of_a_slot * lease.slot if manifest.slots > 1 else 0
    for name, entry in manifest.arrays.items():
        number = first + entry.memory
        memory = manifest.memories[number]
        part = None
        dtype = dtype_of(entry.dtype) if entry.nbytes else None
        if dtype is not None and entry.nbytes == dtype.itemsize * math.prod(entry.shape):
            whole = wholes.get(number)
            if whole is None:
                region = lease._regions[number]
                whole = wholes[number] = show(Array(region, "uint8", region.nbytes))
            part = part_of(whole, memory.offset + entry.offset, dtype, entry.shape)
        # Rare or wrong cases are looked at alone.
        found[name] = alone(lease[name]) if part is None else part
    return found
