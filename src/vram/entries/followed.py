"""What is followed for all followers of a process that ask for the same: one lease, one mapping, one ear for news.

The work goes on in the thread :data:`vram.keeper.background.following` (:class:`Following`). Each follower has a seat
there (:class:`Seat`): its own lease on that mapping, its own arrays, its own callback and state. So a keeper that has a
new version tells each process once, and is asked once for it; closing one follower takes nothing from the others.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import ClosedError, MismatchError, NotFoundError, PeerGoneError, UsageError, VramError
from ..keeper.background import following as working
from ..keeper.background import report
from ..keeper.client import KeeperClient, PendingLease
from ..keeper.leases import Attachment
from ..spec import Location
from .keepers import TIMEOUT, wait_for_keeper
from .lease import Lease, wire_access

if TYPE_CHECKING:
    from ..arrays import Array
    from ..keeper.notices import Subscription
    from ..sharing.descriptor import ArrayEntry
    from .reading import Page, Section

_FIRST_LOOK, _LAST_LOOK = 0.01, 1.0  # seconds between two looks for a keeper that is gone
_SOON = 0.001  # seconds after which it is tried again to end, where somebody joins in that moment
_AGAIN = 1.0  # seconds after which what could not be attached is tried again, if nothing tells of it
# Of the time of its thread, one part is spent on versions that come one upon the other, and so many are left alone.
_REST, _LONGEST_REST = 3, 5.0  # seconds, of the latter
_UNDECIDED = 0.02  # seconds for memory that is being asked to be sealed: all followers wait meanwhile

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

    def check(self, before: tuple[int, Mapping[str, ArrayEntry]], newer: Lease) -> None:
        """Raise MismatchError unless a version has the arrays that it has to have: those of a version before it."""
        if not self.same_arrays:
            return
        (number, was), now = before, newer._manifest.arrays
        for name in {**was, **now}:
            old, new = was.get(name), now.get(name)
            if old is not None and new is not None and (old.dtype, old.shape) == (new.dtype, new.shape):
                continue
            shown = [(one and f"{one.dtype} {list(one.shape)}") or "not there" for one in (old, new)]
            raise MismatchError(
                f"{newer.name!r} version {newer.version} has other arrays than version {number}, as is refused "
                f"with same_arrays=True: {name!r:.80} was {shown[0]}, and is {shown[1]}"
            )


class _Version(Lease):
    """The one lease of a follower on a version; it ends when nobody refers to it any more."""

    __slots__ = ()
    _warn_on_leak = False


class FollowedLease(Lease):
    """A reader's own lease on the version that was a follower's current one when it was asked for.
    It stays on that version and may be dropped unclosed; its arrays stay valid after that."""

    __slots__ = ("_root",)
    _warn_on_leak = False

    _root: _Version | None

    def __init__(self, root: _Version, arrays: dict[str | tuple[int, str], Array] | None = None) -> None:
        self.access = root.access
        self._attachment, self._client, self._manifest = root._attachment, root._client, root._manifest
        self._follows, self._user = root._follows, root._user
        self._words, self._since = root._words, root._since
        self._regions, self._return, self._revoked = root._regions, root._return, root._revoked
        self._arrays = {} if arrays is None else arrays  # the same array for all who ask one follower for it
        self._signal = None
        self._subscriptions = []
        self._callbacks = []
        self._moving = threading.RLock()
        self._root = root
        self._claim = root._claim.handle.claim("a reader of a follower")

    def again(self) -> FollowedLease:
        """Return another lease on the same version, with the same arrays."""
        root = self._root
        if root is None:
            raise ClosedError(f"{self!r} was closed")
        return FollowedLease(root, self._arrays)

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
        """Raise UsageError: the follower goes on to newer versions, and this lease stays on its own."""
        raise UsageError(f"{self!r} belongs to a follower, which goes on by itself: ask that for its current lease")

    def keep_only(self, name: str) -> Array:
        """Give up the lease object and return one of its arrays, which holds the version until it is dropped."""
        array = self[name]
        self.close()
        return array

    def _unmap(self) -> None:
        self._arrays, self._regions, self._root = {}, (), None
        self._claim.release()


class _Now(NamedTuple):
    """The state of one follower, exchanged as a whole: a thread never sees parts of two states.
    `versions` counts the versions so far; `problem` says why the lease is not on the name's current version."""

    versions: int
    lease: FollowedLease | None
    state: str = "current"
    problem: VramError | None = None


class Seat:
    """One follower's part in a :class:`Following`: its own lease, callback and state.
    `bells` has one lock for each thread that waits; `holder` keeps a follower alive that has a callback."""

    __slots__ = ("bells", "following", "holder", "is_new", "is_over", "now", "tell")

    def __init__(self, lease: FollowedLease, tell: Callable[[Lease], object] | None) -> None:
        self.now = _Now(1, lease)
        self.tell = tell
        self.bells: deque[Any] = deque()
        self.holder: object = None
        self.following: Following | None = None
        self.is_over = False
        self.is_new = True

    def stop(self) -> None:
        """End it, for this one alone. Never waits: finalizers come here."""
        self.is_over = True
        self.now = self.now._replace(lease=None)
        self.holder = None
        self.ring()
        if self.following is not None:
            self.following.leave(self)

    def ring(self) -> None:
        """Wake everybody who waits, to look again."""
        while self.bells:
            with contextlib.suppress(IndexError):  # another thread was quicker
                self.bells.popleft().release()

    # -- in the thread ------------------------------------------------------------------------------------------------
    def is_on(self, root: _Version) -> bool:
        """Whether its lease is on that version, however it is mapped."""
        lease = self.now.lease
        return lease is not None and lease._client is root._client and lease.version == root.version

    def put(self, now: _Now) -> None:
        """Have it on something else."""
        self.now = now
        if self.is_over:  # closed meanwhile, by another thread
            self.now = now._replace(lease=None)

    def take(self, root: _Version) -> None:
        """Go on to a version."""
        self.put(_Now(self.now.versions + 1, FollowedLease(root)))
        self.ring()

    def call(self) -> None:
        """Tell of the version that is current."""
        lease = self.now.lease
        if self.tell is None or self.is_over or lease is None:
            return
        try:
            self.tell(lease.again())
        except BaseException as error:  # noqa: BLE001  (somebody else's code, and others wait to be told)
            report(error)


class Following:
    """The work for all followers of this process that ask for the same.
    It has one lease and one mapping of the current version, and gives each seat a lease of its own on that."""

    def __init__(self, wanted: Wanted, root: _Version, keeper: str | None, key: object) -> None:
        self.wanted = wanted
        self.key = key
        self.root: _Version | None = root
        self.is_over = False
        self.pending: PendingLease | None = None
        self.seats: dict[Seat, None] = {}  # changed in single steps
        self._keeper = keeper
        self._taken = root.version, root._manifest.arrays  # the last version that was, also when it was let go
        self._news = False
        self._is_new = True  # nobody listens for the next one yet
        self._subscriptions: list[Subscription] = []
        self._is_minded = False  # whether it is asked if the version is revoked on which this stays
        self._looked_at = 0  # the number of a version that is refused, and whose news are listened for
        self._retry: float | None = None
        self._pause = _FIRST_LOOK
        self._rest = 0.0
        self._mapping = 0.0  # seconds that this step waited for a version to be mapped

    # -- from any thread ----------------------------------------------------------------------------------------------
    def leave(self, seat: Seat) -> None:
        """One follower is over. Never waits: finalizers come here."""
        self.seats.pop(seat, None)
        if not self.seats:
            self.root = None  # now, and not when the thread comes to it; who joins brings a lease
        self.wake()

    def wake(self) -> None:
        """Have the next step made soon."""
        working.post(self.step)

    def hear(self) -> None:
        """There are news of a version. In the thread of the news."""
        self._news = True
        self.wake()

    # -- in the thread ------------------------------------------------------------------------------------------------
    def step(self) -> float | None:
        """Go on, if there is something to go on to; return the time of the next step, if one is due."""
        if self.is_over:
            return None
        if not self.seats:
            if not _retire(self):
                return time.monotonic() + _SOON
            self.is_over = True
            self._end()
            return None
        self._welcome()
        if time.monotonic() < self._rest:
            return self._rest
        begun = time.thread_time()
        self._mapping = 0.0
        root = self.root
        if root is not None and root._revoked:
            self._let_go(root)
        elif root is not None and self._is_new:
            self._listen(root)
        del root
        client: KeeperClient | None = None
        try:
            if self.pending is None:
                if not self._news and (self._retry is None or time.monotonic() < self._retry):
                    return self._retry
                self._news, self._retry = False, None
                client, _ = wait_for_keeper(self._keeper, 0.0)
                attachment = client.lease(self.wanted.name, timeout=0.0, **self.wanted.asked)
            else:
                client = self.pending.client
                found = self.pending.take()
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
        # Of this thread's time, not of the clock's: what waits for a busy machine is no work. But mapping may wait for
        # whoever published it, and then as much is left to what else goes on at this keeper.
        spent = max(_REST * (time.thread_time() - begun), self._mapping)
        self._rest = time.monotonic() + min(spent, _LONGEST_REST)
        return self._rest if self._news or self._is_new else self._retry

    def _welcome(self) -> None:
        """Have those who joined on the same version as all others, and tell them of it."""
        new = [seat for seat in list(self.seats) if seat.is_new]
        for seat in new:
            seat.is_new = False
            root, lease = self.root, seat.now.lease
            brought = None if lease is None else lease._root
            if lease is None or brought is None or brought is root:
                continue
            if root is None and lease._client.is_usable:
                self.root, self._is_new = brought, True
            elif root is None or root._client is not lease._client:
                self._news = True  # one of them is of a keeper that is gone: look which
            elif lease.version > root.version:
                self.root, self._is_new = brought, True
            elif seat.is_on(root):  # mapped twice, since both came at once: one of them goes with who has begun to read
                seat.put(seat.now._replace(lease=FollowedLease(root)))
        if new:
            told = self._settle()
            for seat in dict.fromkeys([*new, *told]):
                seat.call()

    def _seated(self) -> list[Seat]:
        """Those that were welcomed: who joins in the middle of a step is on a version that it has not looked at."""
        return [seat for seat in list(self.seats) if not seat.is_new]

    def _settle(self) -> list[Seat]:
        """Have all seats on the version that is current; return those that were not."""
        root = self.root
        if root is None:
            return []
        late = [seat for seat in self._seated() if not seat.is_on(root)]
        for seat in late:
            seat.take(root)
        return late

    def _go_on(self, client: KeeperClient, attachment: Attachment) -> None:
        before = self.root
        self._pause = _FIRST_LOOK
        if before is not None and _is_of(before, client, attachment):
            client.give_back(attachment)
            self._is_new = True  # its news have been heard
            told = self._settle()
            self._say("current", None)
            self._listen(before)
        else:
            since = time.monotonic()
            try:
                root = self.wanted.as_root(client, attachment, _UNDECIDED)
            finally:
                self._mapping = time.monotonic() - since
            try:
                self.wanted.check(self._taken, root)
            except MismatchError:
                root.close()
                raise
            self.root, self._is_new, self._is_minded = root, True, False
            self._taken = root.version, root._manifest.arrays
            if not self.seats:
                self.root = None
            # Before the keeper is asked for news of it: whoever waits has waited long enough.
            told = self._settle()
            self._say("current", None)
        del before
        for seat in told:
            seat.call()
        now = self.root
        if now is not None and self._is_new:
            self._listen(now)

    def _say(self, state: str, problem: VramError | None) -> None:
        for seat in self._seated():
            now = seat.now
            # Where nothing is here, it is so for the reason that there was.
            shown = now.state if now.lease is None and state != "current" else state
            if (shown, problem) != (now.state, now.problem):
                seat.put(now._replace(state=shown, problem=problem))

    def _listen(self, root: _Version) -> None:
        """Listen for news of the version that there is now."""
        self._is_new = False
        self._forget()
        try:
            self._subscriptions.append(root._client.listen(root._return.lease_id, self, Following.hear, of_all=True))
        except (PeerGoneError, ClosedError) as error:
            self._lose(error)
        except VramError as error:  # no room to watch it: it is looked for now and then
            for seat in self._seated():
                seat.put(seat.now._replace(problem=_alone(error)))
            self._retry = time.monotonic() + _AGAIN
            self._news = False

    def _miss(self, client: KeeperClient | None, error: VramError) -> None:
        """It was removed, or revoked: wait until it is published again."""
        self.pending = None
        self._say("removed", _alone(error))
        self._mind_revoke()
        if client is not None:
            try:
                self.pending = PendingLease(client, self.wanted.name, _waker(self), **self.wanted.asked)
            except VramError as gone:
                self._lose(gone)

    def _lose(self, error: VramError) -> None:
        """The keeper is gone, or the connection: what is mapped stays; look for another one."""
        self.pending = None
        root = self.root
        if root is not None and (root.name, root.version) in root._client.taken_back:
            self._let_go(root)
        for seat in self._seated():
            state = "revoked" if seat.now.state == "revoked" else "lost"
            seat.put(seat.now._replace(state=state, problem=_alone(error)))
        self._retry = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, _LAST_LOOK)

    def _refuse(self, client: KeeperClient | None, error: VramError) -> None:
        """It cannot be on the newest version: it stays on its own, and waits for another one."""
        self.pending = None
        root = self.root
        self._say("refused", _alone(error))
        self._retry = time.monotonic() + _AGAIN
        self._forget()
        self._mind_revoke()
        if root is not None and client is root._client:
            with contextlib.suppress(VramError):
                newest = self.wanted.name, client.newest(root._return.lease_id)
                self._subscriptions.append(client.watch(newest, self, Following.hear, of_all=True))
                if newest[1] != self._looked_at:  # it may have come after the one that was refused: look once more
                    self._looked_at, self._news = newest[1], True
                if isinstance(error, MismatchError):
                    self._retry = None  # the next one is told of, and this one stays what it is

    def _mind_revoke(self) -> None:
        """Ask to be told when the version is wanted back on which this stays though it is not current."""
        root = self.root
        if root is None or self._is_minded:
            return
        tell = partial(_revoked, weakref.ref(self))
        with contextlib.suppress(VramError):
            self._subscriptions.append(root._client.listen(root._return.lease_id, root, tell))
            self._is_minded = True

    def _let_go(self, root: _Version) -> None:
        problem = NotFoundError(
            f"{root.name!r} version {root.version} was revoked by its owner, and nothing newer was published since"
        )
        self.root = None
        for seat in self._seated():
            if seat.is_on(root):
                seat.put(_Now(seat.now.versions, None, "revoked", problem))

    def _forget(self) -> None:
        for subscription in self._subscriptions:
            subscription.stop()
        self._subscriptions.clear()
        self._is_minded = False

    def _end(self) -> None:
        self._forget()
        if self.pending is not None:
            self.pending.cancel()
            self.pending = None
        working.discard(self)


def _waker(following: Following) -> Callable[[], None]:
    """Return what wakes it; a connection that has this does not keep it."""
    found = weakref.ref(following)

    def wake() -> None:
        following = found()
        if following is not None:
            following.wake()

    return wake


# Those of this process, which more followers may join. A lock for who joins and for the end of one: no finalizer takes
# it, nor is it held over a call that waits.
_shared: dict[object, Following] = {}
_joining = threading.RLock()


def _key(wanted: Wanted, keeper: str | None, path: str) -> object:
    """Return what followers that share a mapping have in common; None if this one needs a mapping of its own.
    Copies are private, and with `same_arrays` a newer version is judged by the arrays that a follower began with."""
    if wanted.access == "cow" or wanted.same_arrays:
        return None
    expect = None if wanted.expect is None else frozenset(wanted.expect.items())
    return path, keeper, wanted.name, wanted.access, expect, wanted.owner, wanted.user, wanted.wake


def first_lease(
    wanted: Wanted, keeper: str | None, client: KeeperClient, attachment: Attachment, timeout: float | None
) -> FollowedLease:
    """Map what was leased for a follower, unless another one of this process has it mapped."""
    key = _key(wanted, keeper, client.path)
    shared = None if key is None else _shared.get(key)
    root = None if shared is None else shared.root
    if root is not None and _is_of(root, client, attachment):
        client.give_back(attachment)
        return FollowedLease(root)
    return FollowedLease(wanted.as_root(client, attachment, timeout))


def join(wanted: Wanted, keeper: str | None, root: _Version, seat: Seat) -> None:
    """Have a seat go on with those of this process that ask for the same, or as the first of them."""
    key = _key(wanted, keeper, root._client.path)
    with _joining:
        following = None if key is None else _shared.get(key)
        is_first = following is None
        if following is None:
            following = Following(wanted, root, keeper, key)
        seat.following = following
        following.seats[seat] = None
        if is_first:
            working.add(following)
            if key is not None:
                _shared[key] = following
        following.wake()


def _retire(following: Following) -> bool:
    """End what has no seats any more, unless somebody joins it in this moment."""
    if not _joining.acquire(blocking=False):
        return False
    try:
        if following.seats:
            return False
        if _shared.get(following.key) is following:
            del _shared[following.key]
        return True
    finally:
        _joining.release()


def _after_fork_in_child() -> None:
    """The threads are the parent's, and so is what goes on in them."""
    global _joining
    _shared.clear()
    _joining = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _is_of(root: _Version, client: KeeperClient, attachment: Attachment) -> bool:
    """Whether what was leased is what is mapped already."""
    return root._client is client and root.version == attachment.version and not attachment.moves


def _alone(error: VramError) -> VramError:
    """Return an error without the frames that it came by, which hold memory as long as it is kept."""
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


def _revoked(task: weakref.ref[Following], root: Lease) -> None:
    root._revoked = True
    found = task()
    if found is not None:
        found.wake()
