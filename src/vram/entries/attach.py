"""Attach what was published, and publish what is not there yet."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from .. import driver as drivers
from ..driver import visible
from ..errors import AsleepError, BusyError, MismatchError, NotFoundError, UsageError, VramError
from ..keeper.client import Attachment, KeeperClient
from ..keeper.messages import Claimed
from ..keeper.rules import check_name, check_version
from ..lifetime import shielded, waiting
from ..spec import HOST, Location, check_timeout
from .keepers import as_notes, check_flag, check_flags, check_owner, wait_for_keeper
from .lease import Lease
from .mapped import wire_access

if TYPE_CHECKING:
    from ..arrays.hints import ArrayLike, ModuleLike, TableLike
    from ..keeper.private import Keeper

# The entry that this thread is loading: the keeper's path and the name. A context goes along into the tasks that it
# starts.
_loading: ContextVar[frozenset[tuple[str, str]]] = ContextVar("loading", default=frozenset())


@shielded
def attach(
    name: str,
    *,
    access: str = "r",
    version: int | None = None,
    expect: Mapping[str, str] | None = None,
    timeout: float | None = 0.0,
    device: str | Location | None = None,
    owner: int | str | None = None,
    only: Sequence[str] | None = None,
    growing: bool = False,
    wake: bool = False,
    wait_for_memory: float | None = 0.0,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Lease:
    """Attach a published entry: map its memory into this process, without a copy.

    For example::

        with vram.attach("model", timeout=60.0) as lease:
            weights = lease["w"].numpy()  # or .torch(); lease.numpy() is a dict of all

    Parameters
    ----------
    name : str
        The name it was published under.
    access : {"r", "rw", "cow"}
        Read-only (the kernel enforces it), shared and writable (if it was published writable), or copy on write:
        writes stay in this process.
    version : int, optional
        A particular version: the current one, or one that was replaced and that somebody still holds. By default the
        current one.
    expect : mapping of str to str, optional
        Values that the entry's `meta` must have under these keys. Its publisher wrote that, whoever they are: see
        `owner`.
    timeout : float or None
        Seconds to wait for a keeper to be there, to greet, and for the name to be published, all together; None waits
        for ever. 0 does not wait for either to come; a keeper that listens has 2 s to greet, then.
    device : str, optional
        The GPU that will work on memory of a GPU, such as ``"cuda:1"``: it reads the memory of the other one over the
        link between the two, if they are peers. By default the one that the memory is on. Memory of the host is
        not concerned.
    owner : int or str, optional
        The user whom it must belong to, by uid or by name: who published it, as the kernel vouches for them. Where
        several users may connect, any of them may publish under any name that is free, but for names under ``~uid/``,
        which are that user's alone.
    only : sequence of str, optional
        Patterns of names, such as ``["layers.0.*", "norm"]`` (``*``, ``?`` and ``[...]`` as of :mod:`fnmatch`): the
        lease has the arrays whose whole name matches one, and memory in which there is none of them is not mapped. It
        holds the version as any lease does. Not with `growing`.
    growing : bool
        Set aside the addresses that its arrays may grow to, as their maker did, so that :meth:`Lease.refresh` can map
        what is added behind the same addresses. It costs addresses only.
    wake : bool
        Bring the bytes back if the entry is parked (:func:`vram.park`): to the GPU where they were, or to `device`, and
        all readers find them there. Of many that do this at the same time one copies, the next in line if that one
        fails or dies, and the others wait, as long as `timeout` says. Only the user who published it can do that;
        another can wait while it is being done.
    wait_for_memory : float or None
        With `wake`, seconds to wait until the GPU has room for it; None waits for ever.
    keeper : Keeper, str or PathLike, optional
        The keeper to ask: a :class:`Keeper`, or the path of its socket. By default ``$VRAM_KEEPER`` or the user's own.

    Returns
    -------
    Lease
        A mapping of names to arrays, and a context manager.

    Raises
    ------
    UsageError
        For a name, access, version, time or device that cannot be, or if this process told that keeper another label.
    NotFoundError
        If there is no such entry or version, or no array for one of the patterns in `only`.
    MismatchError
        If the entry's `meta` differs from `expect`, or it belongs to another user than `owner`: also while it was
        waited for, since nobody else can publish it as long as that user keeps the name.
    AccessDeniedError
        If it asks to write to what was published read-only; with `wake`, if it is parked and another user published it.
    QuotaError
        If this user has come past its ceilings at the keeper by leases on versions that are not current any more; it
        says which. With `wake`, also if there is no room for its bytes.
    AsleepError
        If it is parked, without `wake`.
    BusyError
        With `wake` and without a `timeout`, if another process is bringing it back.
    OutOfMemoryError
        With `wake`, if there is no room for it on the GPU, nor within `wait_for_memory`: it is still parked, and whole,
        and the next in line tries. The error names other entries that are there.
    WaitTimeoutError
        If nothing was published, or woken, within `timeout`, or whoever listens there did not greet.
    PeerGoneError
        If there is no keeper, or none came within `timeout`. If it went away while this waited for the name, at once:
        what was to be published there is not, and the next keeper knows nothing of it. Attach again to wait for that.
    UnsupportedError
        If the memory is on a GPU that this process does not see, or that `device` cannot access; the reason is given.
    """
    shared = access if type(access) is str and access == "r" else wire_access(access)  # as nearly all ask
    if growing is not False:
        growing = check_flag(growing, "growing")
    if only is not None:
        only = check_patterns(only, growing=growing)
    user = None if device is None else user_of(device)
    if version is not None:
        check_version(version)
    wanted = None if expect is None else as_notes(expect, what="expect")
    uid = None if owner is None else check_owner(owner)
    seconds = timeout if type(timeout) is float and not timeout else check_timeout(timeout)
    client, left = wait_for_keeper(keeper, seconds)
    began = time.monotonic()
    purpose = "wake" if wake is not False and check_flag(wake, "wake") else ""
    patience: float | None = 0.0
    if type(wait_for_memory) is not float or wait_for_memory:
        patience = check_timeout(wait_for_memory, "wait_for_memory")
    asked: dict[str, Any] = {
        "version": version, "access": shared, "expect": wanted or None, "timeout": left, "owner": uid,
        "purpose": purpose,
    }  # fmt: skip
    attachment = client.attach(name, **asked)
    if attachment.moves:
        from .park import wake_and_lease  # few entries are parked

        attachment = wake_and_lease(client, attachment, user, asked, began, patience)
    return Lease(client, attachment, access, user=user, timeout=left, growing=growing, only=only)


def check_patterns(only: object, *, growing: bool) -> list[str]:
    """Return patterns of names. Raises UsageError for what is none."""
    if not isinstance(only, (list, tuple, set, frozenset)) or not only:
        raise UsageError(f'only is a list of patterns, such as ["layers.0.*"], and not {only!r:.60}')
    wrong = [one for one in only if not isinstance(one, str)]
    if wrong:
        raise UsageError(f"{wrong[0]!r:.40} in only is no name of an array, nor a pattern of names")
    if growing:
        raise UsageError("only= with growing=True: attach all of what grows")
    return list(only)


@shielded
def attach_or_publish(
    name: str,
    load: Callable[[], Mapping[str, ArrayLike] | ModuleLike | TableLike],
    *,
    expect: Mapping[str, str] | None = None,
    access: str = "r",
    writable: bool = False,
    whole: bool = False,
    updatable: bool = False,
    swap: bool = False,
    ttl: float | None = None,
    timeout: float | None = None,
    device: str | Location | None = None,
    owner: int | str | None = None,
    growing: bool = False,
    wake: bool = False,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Lease:
    """Attach an entry, or be the one process that loads and publishes it while the others wait.

    Of any number of processes that call this at the same time, one calls `load`. If it fails or dies, the next one
    in line does. An entry whose `meta` differs from `expect` counts as missing and is replaced.

    Parameters
    ----------
    load : callable
        Returns the mapping, the module or the table to publish; its `meta` will be `expect`. Its vram arrays are shared
        as they are, where there is nothing else in their memory (see `whole` in :func:`publish`); the others are
        copied, one by one, and let go of, so that a mapping that nothing else refers to costs no second copy.
    updatable, swap : bool
        Publish the loaded arrays so that this process can call :func:`vram.update`. An entry that
        is there already is attached as it is: ``lease.updatable`` tells, and the length of ``lease.slots``.
    timeout : float or None
        Seconds to wait for a keeper to be there and to greet, and then for another process to load, each time it does;
        0 does not wait for either, None waits for ever.
    owner : int or str, optional
        The user whom it must belong to, as of :func:`attach`. A process of another user does not load: this attaches
        what `owner` has published, or waits while a process of that user is loading.
    growing : bool
        As of :func:`attach`, also for what this process loads.
    wake : bool
        As of :func:`attach`: what is parked is there, and is brought back; nobody loads it. If it is removed meanwhile,
        one of those who wait loads it after all.
    access, expect, keeper, device, writable, whole, ttl
        As of :func:`attach` and :func:`publish`.

    Raises
    ------
    WaitTimeoutError
        If another process was still loading after `timeout` seconds; it says which, and since when.
    MismatchError
        If what is there belongs to another user and differs from `expect`, or from `owner`.
    AccessDeniedError
        If nothing is there, and this user may not publish it: not under ``~uid/`` of another, nor for another `owner`.
    PeerGoneError
        If there is no keeper, or none came within `timeout`; or, at once, if it went away meanwhile.
    AsleepError
        If it is parked, without `wake`.
    BusyError
        If this is called for a name in the course of the `load` that is to publish it, which would wait for itself.
    """
    shared = wire_access(access)
    writable, whole, updatable, swap = check_flags(writable=writable, whole=whole, updatable=updatable, swap=swap)
    growing, wake = check_flags(growing=growing, wake=wake)
    if updatable or swap:
        from .publish import check_writers  # who only reads needs none of that

        check_writers(writable=writable, updatable=updatable, swap=swap)
    if access == "rw" and not writable:
        raise UsageError('access="rw" needs writable=True: what is published read-only is read-only for everybody')
    if not callable(load):
        raise UsageError(f"load must be a function that returns the mapping to publish, not {load!r:.80}")
    meta = as_notes(expect, what="expect")
    uid = check_owner(owner)
    seconds = check_timeout(timeout)
    user = user_of(device)
    client, left = wait_for_keeper(keeper, seconds)
    key = (client.path, check_name(name))
    if key in _loading.get():
        raise BusyError(
            f"attach_or_publish({name!r}) inside the load() of {name!r} would wait for itself: load it there, or "
            f"attach another name"
        )
    asked: dict[str, Any] = {
        "expect": meta or None, "access": shared, "owner": uid, "purpose": "wake" if wake else "",
    }  # fmt: skip
    missed = (NotFoundError, AsleepError) if wake else (NotFoundError,)
    while True:
        got = client.attach_or_claim(name, timeout=left, **asked)
        if isinstance(got, Attachment):
            if got.moves:
                from .park import wake_and_lease  # few entries are parked

                try:
                    got = wake_and_lease(client, got, user, asked)
                except (BusyError, NotFoundError, MismatchError):  # others were faster, or it is gone: look again
                    continue
            return Lease(client, got, access, user=user, timeout=left, growing=growing)
        before = _loading.set(_loading.get() | {key})
        try:
            version = _load_and_publish(client, name, load, meta, writable, whole, updatable, swap, ttl, got)
        except BaseException:
            with contextlib.suppress(VramError):
                client.abandon(got)
            raise
        finally:
            _loading.reset(before)
        with contextlib.suppress(*missed):  # replaced, removed or parked already: look again
            again = client.attach(name, version=version, access=shared)
            return Lease(client, again, access, user=user, growing=growing)


def _load_and_publish(
    client: KeeperClient, name: str, load: Callable[[], Any], meta: dict[str, str], writable: bool, whole: bool,
    updatable: bool, swap: bool, ttl: float | None, claim: Claimed,
) -> int:  # fmt: skip
    from .publish import arrays_in, publish_to  # what a reader does not need is as much again as what it does

    loaded = waiting(load)
    found = loaded if isinstance(loaded, Mapping) else arrays_in(loaded, writable=writable, updatable=updatable or swap)
    if found is None:
        raise UsageError(f"load() returned {loaded!r:.80}; it returns a mapping of arrays, a module or a table")
    # A mapping of our own, to take out of what is copied. Arrays shared in place stay the loader's to close.
    arrays = dict(found)
    del loaded, found
    published = publish_to(
        client, name, arrays, meta=meta, writable=writable, ttl=ttl, consume=True, whole=whole, claim=claim,
        updatable=updatable, swap=swap,
    )  # fmt: skip
    return published.version


def user_of(device: str | Location | None) -> Location | None:
    """Return the GPU that will work on what is attached; None for the one that it is on."""
    if device is None:
        return None
    location = Location.parse(device)
    if location != HOST:
        drivers.get(location).device_info(location)  # a GPU that is there, or an error that says which are
    return None if location == HOST else visible(location)
