"""Following a name: its current version, whichever that is, and the next one as soon as it is published.

This follows the *name*: each version is attached anew, other memory under other addresses. A lease that was attached
with ``follow=True`` follows the *memory*: it goes on, when it is told to, to versions that are its own one with more
behind it, and nothing moves (:mod:`.following`).

Whoever reads has a lease of their own on the version that they began with (:class:`FollowedLease`), which costs no call
of the keeper. The memory is mapped once in a process for each follower, and given back with the last lease, array or
view of it: references are the pins, so nothing has to be waited for, and nothing can be taken away under a reader.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import (
    ClosedError,
    MismatchError,
    NotFoundError,
    PeerGoneError,
    UsageError,
    VramError,
)
from ..keeper.client import Attachment, KeeperClient
from ..keeper.notices import listen
from ..keeper.pending import PendingLease
from ..keeper.rules import check_name
from ..keeper.tasks import Worker, report, worker_of
from ..lifetime import Claim, Owned, own
from ..sharing.channel import close_fds
from ..spec import Location, check_timeout
from .attach import check_access, user_of
from .keepers import TIMEOUT, as_notes, check_flag, check_owner, wait_for_keeper
from .lease import Lease, asked, wire_access

if TYPE_CHECKING:
    from ..arrays import Array
    from ..keeper.client import Subscription
    from ..keeper.session import Keeper
    from .reading import Page, Section

__all__ = ["FollowedLease", "Follower", "Wanted", "follow"]

_NAP = 1.0  # seconds after which who waits looks by itself: an interrupt may keep somebody from ringing
_FIRST_LOOK, _LAST_LOOK = 0.01, 1.0  # seconds between two looks for a keeper that is gone
_AGAIN = 1.0  # seconds after which what could not be attached is tried again, if nothing tells of it
# Of the time of its thread, one part is spent on versions that come one upon the other, and so many are left alone.
_REST, _LONGEST_REST = 3, 5.0  # seconds, of the latter

_L = TypeVar("_L", bound=Lease)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is attached, each time."""

    name: str
    access: str
    expect: dict[str, str] | None
    owner: int | None
    user: Location | None
    wake: bool
    same_arrays: bool

    @property
    def asked(self) -> dict[str, Any]:
        """What the keeper is asked for, but for the time."""
        purpose = "wake" if self.wake else ""
        access = wire_access(self.access)
        return {"access": access, "expect": self.expect or None, "owner": self.owner, "purpose": purpose}

    def mapped(
        self,
        client: KeeperClient,
        attachment: Attachment,
        timeout: float | None,
        kind: type[_L],
        *,
        follow: bool = False,
    ) -> _L:
        """Map what was leased, after waking it if it is parked."""
        if attachment.moves:
            from .park import wake_and_lease  # few entries are parked

            def again() -> Attachment:
                return client.lease(self.name, timeout=timeout, **self.asked)

            attachment = wake_and_lease(client, attachment, self.user, again)
        return kind(client, attachment, self.access, user=self.user, timeout=timeout, follow=follow)

    def as_root(self, client: KeeperClient, attachment: Attachment, timeout: float | None) -> _Version:
        """Map it as the one lease of a follower."""
        return self.mapped(client, attachment, timeout, _Version)

    def check(self, before: Lease | None, newer: Lease) -> None:
        """Raise MismatchError unless a version has the arrays that it has to have."""
        if not self.same_arrays or before is None:
            return
        was, now = before._manifest.arrays, newer._manifest.arrays
        for name in {**was, **now}:
            old, new = was.get(name), now.get(name)
            if old is not None and new is not None and (old.dtype, old.shape) == (new.dtype, new.shape):
                continue
            shown = [(one and f"{one.dtype} {list(one.shape)}") or "not there" for one in (old, new)]
            raise MismatchError(
                f"{newer.name!r} version {newer.version} has other arrays than version {before.version}, as is refused "
                f"with same_arrays=True: {name!r:.80} was {shown[0]}, and is {shown[1]}"
            )


class _Version(Lease):
    """The one lease of a follower on a version; it ends when nobody refers to it any more."""

    __slots__ = ()
    _warn_on_leak = False


class FollowedLease(Lease):
    """A reader's own lease on the version of a follower that was current when it was asked for.

    It is a :class:`Lease` in all but this: it need not be closed, since dropping it gives it up, and it does not go on
    to other versions (:meth:`refresh`): the follower does. Arrays of it stay valid when it is closed or dropped.
    """

    __slots__ = ("_root",)
    _warn_on_leak = False

    _root: _Version | None

    def __init__(self, root: _Version) -> None:
        self.access = root.access
        self._attachment, self._client, self._manifest = root._attachment, root._client, root._manifest
        self._follows, self._user, self._words = root._follows, root._user, root._words
        self._regions, self._return, self._revoked = root._regions, root._return, root._revoked
        self._arrays = root._arrays  # the same array for all who ask for it
        self._signal = None
        self._subscriptions = []
        self._callbacks = []
        self._moving = threading.RLock()
        self._root = root
        self._claim = root._claim.handle.claim("a reader of a follower")

    # Sections are the process's, whichever of its leases they were entered by: one page for all.
    @property
    def _page(self) -> Page | None:  # type: ignore[override]
        return None if self._root is None else self._root._page

    def reading(self, *, stream: object = None, timeout: float | None = TIMEOUT) -> Section:
        """Return a section; see :meth:`Lease.reading`."""
        self.handle  # noqa: B018
        root = self._root
        return Lease.reading(self if root is None else root, stream=stream, timeout=timeout)

    def refresh(self) -> tuple[str, ...]:
        """Refuse: the follower goes on, and this stays on its version.

        Raises
        ------
        UsageError
            Always.
        """
        raise UsageError(f"{self!r} belongs to a follower, which goes on by itself: ask that for its current lease")

    def keep_only(self, name: str) -> Array:
        """Give up the lease object and return one of its arrays, which holds the version until it is dropped."""
        array = self[name]
        self.close()
        return array

    def _unmap(self) -> None:
        self._arrays, self._regions, self._root = {}, (), None
        self._claim.release()


class _Following:
    """What goes on in the worker's thread: it has the version that is current, and exchanges it.

    Attributes
    ----------
    now : tuple of int and Lease
        How many versions there were so far, and the one that is current; None if there is none to be had.
    state : str
        See :attr:`Follower.state`.
    problem : VramError or None
        Why it is not on what the name stands for.
    """

    def __init__(
        self, wanted: Wanted, root: _Version, keeper: str | None, tell: Callable[[Lease], object] | None
    ) -> None:
        self.wanted = wanted
        self.now: tuple[int, _Version | None] = (1, root)
        self.state = "current"
        self.problem: VramError | None = None
        self.is_over = False
        self.pending: PendingLease | None = None
        self.bells: deque[Any] = deque()  # one for each who waits, released to wake them
        self.worker: Worker = worker_of(root._client.path)
        self.holder: Follower | None = None  # where somebody is to be called back, whoever else knows of it
        self._keeper = keeper
        self._tell = tell
        self._news = False
        self._is_new = True  # nobody listens for the next one yet
        self._subscriptions: list[Subscription] = []
        self._minded = 0  # the number of the version of which it is asked whether it is revoked
        self._looked_at = 0  # the number of a version that is refused, and whose news are listened for
        self._retry: float | None = None
        self._pause = _FIRST_LOOK
        self._rest = 0.0

    # -- from any thread ----------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """End it. Never waits: finalizers come here."""
        self.is_over = True
        self.now = self.now[0], None
        self.holder = None
        self.ring()
        self.worker.wake(self)

    def hear(self) -> None:
        """There are news of a version. In the thread of the notices."""
        self._news = True
        self.worker.wake(self)

    def ring(self) -> None:
        """Wake everybody who waits, to look again."""
        while self.bells:
            with contextlib.suppress(IndexError):  # another thread was quicker
                self.bells.popleft().release()

    # -- in the thread ------------------------------------------------------------------------------------------------
    def step(self) -> float | None:
        """Go on, if there is something to go on to; see :class:`~vram.keeper.tasks.Task`."""
        if self.is_over:
            self._end()
            return None
        begun = time.monotonic()
        if begun < self._rest:
            return self._rest
        root = self.now[1]
        if root is not None and root._revoked:
            self._let_go(root)
        del root
        if self._is_new:
            self._arrive()
        client: KeeperClient | None = None
        try:
            if self.pending is None:
                if not self._news and (self._retry is None or begun < self._retry):
                    return self._retry
                self._news, self._retry = False, None
                client, _ = wait_for_keeper(self._keeper, 0.0)
                attachment = client.lease(self.wanted.name, timeout=0.0, **self.wanted.asked)
            else:
                client = self.pending.connection
                found = self.pending.look()
                if found is None:
                    return None
                self.pending, attachment = None, found
            self._go_on(client, attachment)
        except NotFoundError as error:
            self._miss(client, error)
        except (PeerGoneError, ClosedError) as error:
            self._lose(error)
        except VramError as error:
            self._refuse(client, error)
        over = time.monotonic()
        self._rest = over + min(_REST * (over - begun), _LONGEST_REST)
        return self._rest if self._news or self._is_new else self._retry

    def _go_on(self, client: KeeperClient, attachment: Attachment) -> None:
        count, before = self.now
        self._pause = _FIRST_LOOK
        if before is not None and before._client is client and before.version == attachment.version:
            if attachment.answer is not None:
                attachment.answer.give_back()
            close_fds(attachment.fds, client.path)
            attachment.fds.clear()
            self.state, self.problem, self._is_new = "current", None, True  # its news have been heard
            self._listen(before)
            return
        root = self.wanted.as_root(client, attachment, 0.0)
        try:
            self.wanted.check(before, root)
        except MismatchError:
            root.close()
            raise
        self.now = count + 1, root
        self.state, self.problem = "current", None
        if self.is_over:
            self.now = count + 1, None
        self.ring()  # before the keeper is asked for news of it: whoever waits has waited long enough
        del before
        self._arrive()

    def _arrive(self) -> None:
        """Listen for news of the version that there is now, and tell of it."""
        root = self.now[1]
        if root is None:
            self._is_new = False
            return
        self._listen(root)
        if self._tell is not None and not self.is_over:
            try:
                self._tell(FollowedLease(root))
            except BaseException as error:  # noqa: BLE001  (somebody else's code, and others wait to be told)
                report(error)

    def _listen(self, root: _Version) -> None:
        self._is_new = False
        self._forget()
        try:
            heard = root._client.listen(root._return.lease_id, self, _Following.hear, of_all=True)
            self._subscriptions.append(heard)
        except (PeerGoneError, ClosedError) as error:
            self._lose(error)
        except VramError as error:  # no room to watch it: it is looked for now and then
            self.problem = _alone(error)
            self._retry = time.monotonic() + _AGAIN
            self._news = False

    def _miss(self, client: KeeperClient | None, error: VramError) -> None:
        """It was removed, or revoked: wait until it is published again."""
        self.pending = None
        if self.now[1] is not None:
            self.state = "removed"
        self.problem = _alone(error)
        self._mind_revoke()
        if client is not None:
            try:
                self.pending = PendingLease(client, self.wanted.name, timeout=None, **self.wanted.asked)
            except VramError as gone:
                self._lose(gone)

    def _lose(self, error: VramError) -> None:
        """The keeper is gone, or the connection: what is mapped stays; look for another one."""
        self.pending = None
        root = self.now[1]
        if root is not None and (root.name, root.version) in root._client.taken_back:
            self._let_go(root)
        if self.state != "revoked":
            self.state = "lost"
        self.problem = _alone(error)
        self._retry = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LAST_LOOK)

    def _refuse(self, client: KeeperClient | None, error: VramError) -> None:
        """It cannot be on the newest version: it stays on its own, and waits for another one."""
        self.pending = None
        root = self.now[1]
        if root is not None:
            self.state = "refused"
        self.problem = _alone(error)
        self._retry = time.monotonic() + _AGAIN
        self._forget()
        self._mind_revoke()
        if root is not None and client is root._client:
            with contextlib.suppress(VramError):
                newest = self.wanted.name, client.newest(root._return.lease_id)
                self._subscriptions.append(listen(client, newest, self, _Following.hear, of_all=True))
                if newest[1] != self._looked_at:  # it may have come after the one that was refused: look once more
                    self._looked_at, self._news = newest[1], True
                if isinstance(error, MismatchError):
                    self._retry = None  # the next one is told of, and this one stays what it is

    def _mind_revoke(self) -> None:
        """Ask to be told when the version is wanted back on which this stays though it is not current."""
        count, root = self.now
        if root is None or self._minded == count:
            return
        tell = partial(_revoked, weakref.ref(self))
        with contextlib.suppress(VramError):
            self._subscriptions.append(root._client.listen(root._return.lease_id, root, tell))
            self._minded = count

    def _let_go(self, root: _Version) -> None:
        self.now = self.now[0], None
        self.state = "revoked"
        self.problem = NotFoundError(
            f"{root.name!r} version {root.version} was revoked by its owner, and nothing newer was published since"
        )

    def _forget(self) -> None:
        for subscription in self._subscriptions:
            subscription.stop()
        self._subscriptions.clear()
        self._minded = 0

    def _end(self) -> None:
        self._forget()
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None


def _alone(error: VramError) -> VramError:
    """Return an error without the frames that it came by, which hold memory as long as it is kept."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def _revoked(task: weakref.ref[_Following], root: Lease) -> None:
    root._revoked = True
    found = task()
    if found is not None:
        found.worker.wake(found)


class Follower(Owned):
    """The current version of an entry, whichever that is. Made by :func:`follow`; close it, or use it in ``with``.

    Iterating yields a lease for the version that there is and then for each newer one, waiting for it; versions that
    were replaced before they were asked for are left out. A lease is closed when the next one is asked for; its arrays
    stay valid. Each iteration is its own, in any thread. ``async for`` does the same in an event loop. Both end when
    the follower is closed.
    """

    __slots__ = ("_task",)

    def __init__(
        self, wanted: Wanted, root: _Version, keeper: str | None, on_version: Callable[[Lease], object] | None
    ) -> None:
        self._task = task = _Following(wanted, root, keeper, on_version)
        claim: Claim = own(f"follower of {wanted.name!r}", task.stop)
        try:
            if on_version is not None:
                task.holder = self
            task.worker.add(task)
        except BaseException:
            claim.release()
            raise
        self._claim = claim

    @property
    def name(self) -> str:
        """The name that is followed."""
        return self._task.wanted.name

    @property
    def version(self) -> int:
        """The number of the version that is current here; it begins anew where another keeper serves.

        Raises
        ------
        NotFoundError, PeerGoneError
            As :meth:`current`.
        """
        return self._root().version

    @property
    def state(self) -> str:
        """What is known of the version that is current here.

        * ``"current"``: the name stands for it.
        * ``"removed"``: the name stands for nothing; this version stays until it is published again.
        * ``"refused"``: there is a newer one that cannot be taken, see :attr:`refused`; this one stays.
        * ``"lost"``: the keeper is gone; this version stays until another one serves at its path.
        * ``"revoked"``: its owner wanted it back, and it was let go; nothing is here until it is published again.
        * ``"closed"``: the follower was.
        """
        return "closed" if self.is_closed else self._task.state

    @property
    def refused(self) -> VramError | None:
        """Why what the name stands for is not here, such as a MismatchError; None if it is."""
        return self._task.problem

    @asked
    def is_stale(self) -> bool:
        """Ask whether the name is known to stand for something else than what is here, or for nothing. No call."""
        self.handle  # noqa: B018
        return self._task.state != "current"

    def current(self) -> FollowedLease:
        """Return a lease on the version that is current now, which stays on it: for all that has to be of one version.

        It costs no call of the keeper. Give it up by ``with`` or ``close()``, or drop it: as long as there is one, or
        an array or view of that version, its memory stays mapped.

        Raises
        ------
        NotFoundError
            If it was revoked, and nothing was published since.
        PeerGoneError
            If nothing is here, and the keeper is gone.
        ClosedError, ForkedError
            If the follower was closed; in a forked child, whose parent has it.
        """
        return FollowedLease(self._root())

    def __getitem__(self, name: str) -> Array:
        return self._root()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._root()

    def __iter__(self) -> Iterator[FollowedLease]:
        self.handle  # noqa: B018
        return _Versions(self)

    def __aiter__(self) -> AsyncIterator[FollowedLease]:
        self.handle  # noqa: B018
        from .event_loop import Versions  # asyncio is loaded by who uses it

        return Versions(self)

    @property
    def bells(self) -> deque[Any]:
        """What is released to wake those who wait, of threads and of event loops."""
        return self._task.bells

    def _root(self) -> _Version:
        self.handle  # noqa: B018
        task = self._task
        root = task.now[1]
        if root is None:
            self.handle  # noqa: B018  (closed meanwhile)
            problem = task.problem
            kind = PeerGoneError if isinstance(problem, PeerGoneError) else NotFoundError
            raise kind(str(problem)) from problem
        return root

    def newer(self, seen: int) -> tuple[int, FollowedLease | None]:
        """Return the number of the version that is current, and a lease on it if that is another than was seen."""
        self.handle  # noqa: B018
        count, root = self._task.now
        if root is None or count == seen:
            return seen, None
        return count, FollowedLease(root)

    def __repr__(self) -> str:
        root = None if self.is_closed else self._task.now[1]
        on = "" if root is None else f", version {root.version}"
        return f"<Follower of {self.name!r}, {self.state}{on}>"


class _Versions(Iterator[FollowedLease]):
    """The versions of a follower, one after the other."""

    __slots__ = ("_follower", "_given", "_seen")

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._given: FollowedLease | None = None
        self._seen = 0

    def __next__(self) -> FollowedLease:
        follower, given = self._follower, self._given
        if given is not None:
            given.close()  # the variable of a loop has it, and would keep its memory while this waits
        while True:
            if follower.is_closed:
                raise StopIteration
            bell = threading.Lock()
            bell.acquire()
            follower.bells.append(bell)  # before the look: what comes in between rings it
            try:
                self._seen, lease = follower.newer(self._seen)
                if lease is not None:
                    self._given = lease
                    return lease
                bell.acquire(timeout=_NAP)
            except ClosedError:
                if not follower.is_closed:  # in a forked child
                    raise
            finally:
                with contextlib.suppress(ValueError):
                    follower.bells.remove(bell)


def follow(
    name: str,
    *,
    on_version: Callable[[Lease], object] | None = None,
    access: str = "r",
    expect: Mapping[str, str] | None = None,
    same_arrays: bool = False,
    timeout: float | None = TIMEOUT,
    device: str | Location | None = None,
    owner: int | str | None = None,
    wake: bool = False,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Follower:
    """Attach a published entry, and each newer version of it as soon as it is published.

    The newer version is mapped by a thread of the library, and then takes the place of the older one, which is given
    back when nobody uses it any more: no lease, array or view of it is left. So a reader may be on a version that is a
    little old, and never on memory that was freed.

    What was removed stays here until it is published again; what was revoked (:func:`revoke`) is let go. If the keeper
    goes away, the version that is here stays, until another one serves at its path and has the name.
    :attr:`Follower.state` says which of these it is.

    This follows the name, from memory to memory. For memory that grows in place, with readers whose addresses must not
    change, see `follow` of :func:`attach`.

    Parameters
    ----------
    name : str
        What it is published as.
    on_version : callable, optional
        Called with a lease for the first version and each newer one, from a thread of the library named ``vram:
        following``: one for all followers at a keeper, which wait for it as long as it takes. What it raises goes to
        :func:`threading.excepthook`. The follower goes on then until it is closed, also if nothing refers to it.
    access : {"r", "rw", "cow"}
        As of :func:`attach`.
    expect : mapping of str to str, optional
        What the `meta` of each version must say. A newer one that says something else is not taken, and the one before
        stays: see :attr:`Follower.refused`.
    same_arrays : bool
        Treat a newer version in the same way unless its arrays have the same names, types and shapes as before.
    timeout : float or None
        Seconds to wait for a keeper, and for the first version; 0 does not wait, None waits for ever.
    device : str, optional
        As of :func:`attach`.
    owner : int or str, optional
        The user whom each version must belong to; see :func:`attach`.
    wake : bool
        Bring back what is parked; see :func:`attach`. Without it the version before stays while the newer is parked.
    keeper : Keeper, str or PathLike, optional
        Whom to ask; see :func:`attach`.

    Returns
    -------
    Follower
        A context manager: ``model["w"]`` is of the version that is current, ``model.current()`` a lease on it, and
        ``for lease in model`` waits for each newer one.

    Raises
    ------
    UsageError
        For what cannot be, as :func:`attach`.
    NotFoundError, WaitTimeoutError
        If nothing was published, or not within `timeout`.
    PeerGoneError
        If there is no keeper, or none came within `timeout`, or it went away before the first version was here.
    MismatchError, AccessDeniedError, AsleepError, QuotaError, UnsupportedError
        As :func:`attach`, of the first version; of later ones see :attr:`Follower.refused`.

    Examples
    --------
    >>> with vram.follow("policy") as model:
    ...     print(model["w"].numpy().sum())
    """
    wanted = as_wanted(name, access, expect, same_arrays, device, owner, wake)
    check_callback(on_version)
    client, left = wait_for_keeper(keeper, check_timeout(timeout))
    if client.lends:
        raise UsageError(f"a process lends at {client.path}, and lends one version: borrow it with vram.borrow")
    root = wanted.as_root(client, client.lease(wanted.name, timeout=left, **wanted.asked), left)
    return Follower(wanted, root, None if keeper is None else client.path, on_version)


def as_wanted(
    name: str,
    access: str,
    expect: Mapping[str, str] | None,
    same_arrays: bool,
    device: str | Location | None,
    owner: int | str | None,
    wake: bool,
) -> Wanted:
    """Check what :func:`follow` was given."""
    check_access(access)
    wanted = None if expect is None else as_notes(expect, what="expect")
    same_arrays, wake = check_flag(same_arrays, "same_arrays"), check_flag(wake, "wake")
    return Wanted(check_name(name), access, wanted, check_owner(owner), user_of(device), wake, same_arrays)


def check_callback(callback: object) -> None:
    """Raise UsageError for what cannot be called."""
    if callback is not None and not callable(callback):
        raise UsageError(f"on_version {callback!r:.80} cannot be called; it takes the lease")
