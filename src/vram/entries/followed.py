"""The work for a follower: its lease on the current version, and one on the next as soon as there is one.

All of it is done in the thread :data:`vram.keeper.background.following`, one step at a time (:meth:`Following.step`).
News of the version wake it, a lease that was waited for does, or it is made again after a pause.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import ClosedError, MismatchError, NotFoundError, PeerGoneError, UsageError, VramError
from ..keeper.background import following as working
from ..keeper.background import report
from ..keeper.client import Attachment, KeeperClient, PendingLease
from ..spec import Location
from .keepers import current_of, wait_for_keeper
from .lease import Lease

if TYPE_CHECKING:
    from ..keeper.background import Subscription

_FIRST_PAUSE, _LAST_PAUSE = 0.01, 1.0  # seconds until another try, if nothing tells when it may succeed
_UNDECIDED = 0.02  # seconds for memory that is being asked to be sealed: all followers wait meanwhile

_L = TypeVar("_L", bound=Lease)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments of each attach."""

    name: str
    access: str
    asked: dict[str, Any]  # of the keeper, but for the time
    user: Location | None
    same_arrays: bool

    def mapped(
        self, client: KeeperClient, attachment: Attachment, timeout: float | None, kind: type[_L], *,
        growing: bool = False, only: Sequence[str] | None = None, patience: float | None = 0.0,
    ) -> _L:  # fmt: skip
        """Map what was leased, after waking it if it is parked."""
        if attachment.moves:
            from .park import wake_and_lease  # few entries are parked

            asked = {**self.asked, "timeout": timeout}
            attachment = wake_and_lease(client, attachment, self.user, asked, time.monotonic(), patience)
        return kind(client, attachment, self.access, user=self.user, timeout=timeout, growing=growing, only=only)


class FollowedLease(Lease):
    """A reader's own lease on the version that was a follower's current one when it was asked for.
    It stays on that version and may be dropped unclosed; its arrays stay valid after that."""

    __slots__ = ()
    _warn_on_leak = False
    _is_shared = True

    def again(self) -> FollowedLease:
        """Return another lease on the same mapping, with the same arrays. The keeper knows of one."""
        made = FollowedLease.__new__(FollowedLease)
        for name in Lease.__slots__:
            setattr(made, name, getattr(self, name))
        made._news = {}
        made._claim = self.handle.claim("a reader of a follower")
        return made

    def refresh(self) -> tuple[str, ...]:
        """Raise UsageError: the follower goes on to newer versions, and this lease stays on its own."""
        raise UsageError(f"{self!r} belongs to a follower, which goes on by itself: ask that for its current lease")

    def _unmap(self) -> None:
        """Let go of what other leases on the same mapping may still use: it is unmapped with the last of them."""
        self._arrays, self._regions, self._pages = {}, (), []
        self._claim.release()


class Now(NamedTuple):
    """The state of a follower, exchanged as a whole: a thread never sees parts of two states.
    `versions` counts the versions so far; `problem` says why the lease is not on the name's current version."""

    versions: int
    lease: FollowedLease | None
    state: str = "current"
    problem: VramError | None = None


class Following:
    """One follower as its thread knows it, without keeping it alive, but by `holder` if it has a callback.
    `bells` has a call for each thread, and each task of an event loop, that waits."""

    def __init__(
        self, wanted: Wanted, lease: FollowedLease, keeper: str | None, tell: Callable[[Lease], object] | None
    ) -> None:
        self.now = Now(1, lease)
        self.bells: deque[Callable[[], object]] = deque()
        self.holder: object = None
        self._wanted = wanted
        self._keeper = keeper
        self._tell = tell
        self._told = 0  # the count of the version that the callback was told of last
        self._is_over = False
        self._before = lease.version, lease._manifest.arrays  # of the last version that was, also when it was let go
        self._pending: PendingLease | None = None
        self._news: Subscription | None = None  # of the name's current version, or of the last one that was
        self._pause = _FIRST_PAUSE

    # -- from any thread ----------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Have the thread take steps until it is stopped. Raises RuntimeError if no thread can be started."""
        working.add(self)
        self.wake()

    def stop(self) -> None:
        """End it. Never waits: finalizers come here."""
        self._is_over = True
        self.now = self.now._replace(lease=None)
        self.holder = None
        self._ring()
        self.wake()

    def wake(self, _: object = None) -> None:
        """Have the next step made soon."""
        working.post(self.step)

    def _ring(self) -> None:
        """Wake everybody who waits, to look again."""
        while self.bells:
            with contextlib.suppress(IndexError, RuntimeError):  # another thread was quicker; an event loop is closed
                self.bells.popleft()()

    # -- in the thread ------------------------------------------------------------------------------------------------
    def step(self) -> float | None:
        """Look what the name stands for, and go on to it; return the time of the next step, if one is due."""
        if self._is_over:
            self._end()
            return None
        wanted, is_first = self._wanted, not self._told
        self._call()
        self._heed_revoke()
        client: KeeperClient | None = None
        try:
            if is_first:  # it was leased just now
                return self._settle()
            pending = self._pending
            client = wait_for_keeper(self._keeper, 0.0)[0] if pending is None else pending.client
            try:
                found = client.attach(wanted.name, timeout=0.0, **wanted.asked) if pending is None else pending.take()
            except NotFoundError as error:
                self._miss(client, error)
                return None
            return None if found is None else self._go_on(client, found)
        except (PeerGoneError, ClosedError) as error:
            return self._lose(error)
        except VramError as error:
            return self._refuse(client, error)

    def _put(self, now: Now) -> None:
        self.now = now
        if self._is_over:  # closed meanwhile, by another thread
            self.now = now._replace(lease=None)

    def _say(self, state: str, error: VramError | None = None) -> None:
        now = self.now
        if error is not None:  # without the frames that it came by, which hold memory as long as it is kept
            error.__traceback__ = error.__context__ = error.__cause__ = None
        # Where nothing is here, it is so for the reason that there was.
        self._put(now._replace(state=state if now.lease is not None else now.state, problem=error))

    def _later(self) -> float:
        """Return when to try again."""
        pause, self._pause = self._pause, min(2 * self._pause, _LAST_PAUSE)
        return time.monotonic() + pause

    def _call(self) -> None:
        """Tell of the version that is current, unless that was done."""
        versions, lease, _, _ = self.now
        if lease is None or versions == self._told:
            return
        self._told = versions
        if self._tell is None:
            return
        try:
            self._tell(lease.again())
        except BaseException as error:  # noqa: BLE001  (somebody else's code, and others wait to be told)
            report(error)

    def _go_on(self, client: KeeperClient, attachment: Attachment) -> float | None:
        """Be on the version that was leased."""
        self._pending = None
        self._pause = _FIRST_PAUSE
        root = self.now.lease
        if root is not None and root._client is client and root.version == attachment.version and not attachment.moves:
            client.give_back(attachment)
            self._say("current")
        else:
            root = self._wanted.mapped(client, attachment, _UNDECIDED, FollowedLease)
            self._check(root)
            self._before = root.version, root._manifest.arrays
            self._put(Now(self.now.versions + 1, root))
            self._ring()
            self._call()  # before the keeper is asked for news of it: whoever waits has waited long enough
        return self._settle()

    def _check(self, newer: Lease) -> None:
        """Raise MismatchError unless a version has the arrays that it has to have: those of the version before it."""
        if not self._wanted.same_arrays:
            return
        (number, was), now = self._before, newer._manifest.arrays
        for name in {**was, **now}:
            old, new = was.get(name), now.get(name)
            if old is not None and new is not None and (old.dtype, old.shape) == (new.dtype, new.shape):
                continue
            shown = [(one and f"{one.dtype} {list(one.shape)}") or "not there" for one in (old, new)]
            raise MismatchError(
                f"{newer.name!r} version {newer.version} has other arrays than version {number}, as is refused "
                f"with same_arrays=True: {name!r:.80} was {shown[0]}, and is {shown[1]}"
            )

    def _settle(self) -> float | None:
        """Hear of what comes after the version that is current."""
        root = self.now.lease
        if root is None:  # closed meanwhile
            return None
        try:
            self._listen(root._client, root.version)
        except (PeerGoneError, ClosedError):
            raise
        except VramError as error:  # no room to watch it: it is looked for now and then
            self._say("current", error)
            return self._later()
        return None

    def _listen(self, client: KeeperClient, version: int) -> bool:
        """Hear of news of a version; return whether it is another one than before."""
        key, news = (self._wanted.name, version), self._news
        if news is not None:
            if news.key == key and not news.is_over:
                return False
            news.stop()
        self._news = client.watch(key, self, Following.wake, of_all=True)
        return True

    def _miss(self, client: KeeperClient, error: VramError) -> None:
        """It was removed, or revoked: wait until it is published again."""
        self._say("removed", error)
        self._mind_revoke()
        self._pending = PendingLease(client, self._wanted.name, self.wake, **self._wanted.asked)

    def _lose(self, error: VramError) -> float:
        """The keeper is gone, or the connection: what is mapped stays; look for another one."""
        self._pending = None
        self._heed_revoke()
        self._say("lost", error)
        return self._later()

    def _refuse(self, client: KeeperClient | None, error: VramError) -> float | None:
        """It cannot be on the newest version: it stays on its own, and waits for another one."""
        self._pending = None
        self._say("refused", error)
        self._mind_revoke()
        if client is None:
            return self._later()
        with contextlib.suppress(VramError):
            newest = current_of(client, self._wanted.name)
            if newest is not None:
                if self._listen(client, newest.version):
                    return time.monotonic()  # it may have come after the one that was refused: look once more
                if isinstance(error, MismatchError):
                    return None  # the next one is told of, and this one stays what it is
        return self._later()

    def _mind_revoke(self) -> None:
        """Ask to be told when the version is wanted back on which this stays though it is not current."""
        root = self.now.lease
        if root is not None and not root._hears().callbacks:
            with contextlib.suppress(VramError):
                root.on_revoke(self.wake)

    def _heed_revoke(self) -> None:
        """Let the version go that its owner wants back."""
        root = self.now.lease
        if root is not None and root._revoked:
            problem = NotFoundError(
                f"{root.name!r} version {root.version} was revoked by its owner, and nothing newer was published since"
            )
            self._put(Now(self.now.versions, None, "revoked", problem))

    def _end(self) -> None:
        if self._news is not None:
            self._news.stop()
        if self._pending is not None:
            self._pending.cancel()
        working.discard(self)
