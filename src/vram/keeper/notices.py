"""News of versions, above all that one is revoked: one thread of this process hears them for all listeners.

The thread and its connections, which carry no leases, exist while there are listeners or holders (:func:`hold`). It
only tries the lock, and calls back; :func:`listen` asks the keeper in the caller's thread and without the lock. To stop
takes no lock: it appends to a queue and wakes the thread, so that callbacks and finalizers may do it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import BusyError, ClosedError, ProtocolError, QuotaError, VramError, WaitTimeoutError
from ..lifetime import take
from ..sharing.channel import Channel
from . import messages as m
from .rpc_connection import CONNECT_SECONDS, GRACE, Answer, RpcConnection

if TYPE_CHECKING:
    from .rpc_connection import Repeats

Key = tuple[str, int]  # name and version
_NOTHING: Key = "", 0  # what no version is
_AT_ONCE = 64  # messages that are read before what they say is passed on
_NEWS = 16  # pieces of news of one watched version; it has fewer


class Subscription:
    """One callback that waits for news of one version, made by :func:`listen` and :func:`signal`.
    `of_all` means any news, and the end of the keeper; otherwise only a revocation counts. `owner` is held weakly."""

    __slots__ = ("__weakref__", "_owner", "_tell", "key", "line", "number", "of_all")

    _numbers = itertools.count(1)

    def __init__(self, key: Key, owner: object, tell: Callable[[Any], object], *, of_all: bool = False) -> None:
        self.key = key
        self.of_all = of_all
        self.number = next(self._numbers)
        self.line: _Line | None = None
        self._tell: list[Callable[[Any], object]] = [tell]  # whoever takes it out may call it, once
        me = weakref.ref(self)

        def gone(_: object) -> None:
            subscription = me()
            if subscription is not None and _thread is not None:  # as at the very end of the interpreter
                subscription.stop()

        self._owner = weakref.ref(owner, gone)

    @property
    def is_over(self) -> bool:
        """Whether it was called back, or stopped."""
        return not self._tell

    def stop(self) -> None:
        """Not to be called back any more; a callback that has begun goes on. Idempotent, takes no lock."""
        self._tell.clear()
        _thread.leave(self)

    def call(self) -> None:
        """Tell the owner, unless that was done or nobody listens. What the callback raises is reported, not raised."""
        try:
            tell = self._tell.pop()
        except IndexError:
            return
        owner = self._owner()
        if owner is None:
            return
        try:
            tell(owner)
        except BaseException as error:  # noqa: BLE001  (somebody else's code, and others wait to be told)
            # Aloud, as what ends a thread is; but the thread goes on.
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
            )


class Signal:
    """A descriptor that becomes readable, and stays so, with the first news of a version. Made by :func:`signal`."""

    __slots__ = ("__weakref__", "_reader", "_writer", "subscription")

    def __init__(self) -> None:
        self.subscription: Subscription | None = None
        self._reader, self._writer = Channel.pair()  # which look after themselves: forks, the collector

    def fileno(self) -> int:
        """Lend the descriptor to wait on with select, poll or an event loop."""
        return self._reader.fileno()

    def give(self) -> None:
        """Make it readable. It is an end of file, which stays, also if somebody reads."""
        self._writer.close()

    def close(self) -> None:
        """Listen no more, and close the descriptor. Idempotent."""
        if self.subscription is not None:
            self.subscription.stop()
        self._reader.close()
        self._writer.close()


class _Line(RpcConnection):
    """A connection that hears what happens to the versions it watches."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.listeners: dict[int, Subscription] = {}
        self.asking: dict[int, Subscription] = {}
        self.heard: deque[m.Notice] = deque()
        self._watched = self._noticed = 0  # how often news were asked for, and how many pieces of them came

    def is_like(self, other: RpcConnection) -> bool:
        """Whether another connection leads to the same keeper, or lender."""
        return (self.path, self.lends) == (other.path, other.lends)

    def enter(self, subscription: Subscription) -> None:
        """Note a listener before the keeper is asked, so that its first news has an address.
        Called with the thread's lock: a connection without listeners is closed."""
        subscription.line = self
        self.asking[subscription.number] = subscription  # until it has asked: it may be told before that is answered
        self.listeners[subscription.number] = subscription
        self._watched += 1

    def watch(self, subscription: Subscription) -> None:
        """Ask for news of a version. Who listens was entered, and is not any more if this raises."""
        try:
            call = next(self._calls)
            self._expect(m.Done, self._ask(m.Watch(call, *subscription.key), call))
        except BaseException:
            self.listeners.pop(subscription.number, None)
            raise

    def pump(self) -> None:
        """Read some of what there is, without waiting. Raises what ends the connection."""
        if not self._reading.acquire(blocking=False):
            time.sleep(0.001)  # a caller of `watch` reads, and leaves to the thread what is for it
            return
        try:
            with contextlib.suppress(WaitTimeoutError):
                for _ in range(_AT_ONCE):  # the rest is there when what these say was passed on
                    self._read_one(0)
        finally:
            self._reading.release()
            self._wake_waiters()

    def _deliver(self, answer: Answer) -> None:
        if isinstance(answer.reply, m.Notice):
            self.heard.append(answer.reply)
            self._noticed += 1
            if self._noticed > _NEWS * self._watched:
                raise self._fail(ProtocolError(f"what listens at {self.path} tells of one version again and again"))
        else:
            super()._deliver(answer)

    def _recovered(self, reply: m.Recovered, repeats: Repeats) -> None:
        super()._recovered(reply, repeats)
        with self._sending:  # what was told and did not arrive is told again
            for subscription in list(self.listeners.values()):
                if subscription.key == _NOTHING:
                    continue
                self._watched += 1
                self._channel.send(m.encode(m.Watch(0, *subscription.key)), timeout=GRACE)


class _Thread:
    """The thread, and what it looks after. One for each process; anew after a fork."""

    def __init__(self) -> None:
        # Reentrant only to be asked who has it: a signal handler must not wait for its own thread.
        self._lock = threading.RLock()
        # Held by who connects to a path: one for each, or who does not greet would keep those waiting who listen
        # elsewhere.
        self._connecting: dict[str, threading.RLock] = {}
        self._lines: list[_Line] = []
        self._left: deque[Subscription] = deque()
        self._thread: threading.Thread | None = None
        self._bell: tuple[Channel, Channel] | None = None  # (ours to read, everybody's to write)

    def join(self, like: RpcConnection, subscription: Subscription) -> None:
        """Have a version watched, and the thread run."""
        refused: _Line | None = None
        try:
            while True:
                line, is_new = self._line(like, subscription, refused)
                try:
                    line.watch(subscription)
                    return
                except QuotaError:  # for one connection; it may be one of its own only
                    if is_new:
                        raise
                    refused = line
                finally:
                    line.asking.pop(subscription.number, None)
        finally:
            self._wake()

    def _line(self, like: RpcConnection, subscription: Subscription, refused: _Line | None) -> tuple[_Line, bool]:
        """Enter who listens into a connection that may watch one more; return that, and whether it was made for it."""
        connecting = self._connecting.setdefault(like.path, threading.RLock())
        if self._lock._is_owned() or connecting._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise BusyError("this thread is about to listen already: what interrupted it cannot listen as well")
        line = self._enter(like, subscription, refused)
        if line is not None:
            return line, False
        deadline = time.monotonic() + CONNECT_SECONDS
        if not take(connecting, CONNECT_SECONDS):
            raise WaitTimeoutError(f"what listens at {like.path} has not greeted another thread that listens either")
        try:
            line = self._enter(like, subscription, refused)  # the other thread has made one, perhaps
            if line is not None:
                return line, False
            left = max(0.001, deadline - time.monotonic())
            made = _Line.connect(like.path, label=like.label, like=like, timeout=left)
            try:
                with self._lock:
                    self._start()
                    self._lines.append(made)  # the thread closes it if nobody comes to listen on it
                    made.enter(subscription)
            except BaseException:
                made.close()
                raise
            return made, True
        finally:
            connecting.release()

    def _enter(self, like: RpcConnection, subscription: Subscription, refused: _Line | None) -> _Line | None:
        """Enter who listens into the latest connection that there is, unless that one takes no more."""
        with self._lock:
            line = next((one for one in reversed(self._lines) if one.is_like(like) and one.is_usable), None)
            if line is None or line is refused:
                return None
            self._start()
            line.enter(subscription)
            return line

    def hold(self, line: _Line, holder: Subscription) -> None:
        """Keep a connection, if it is there still, until its holder leaves."""
        with self._lock:
            if line in self._lines:
                holder.line = line
                line.listeners[holder.number] = holder

    def leave(self, subscription: Subscription) -> None:
        """Somebody stopped listening. Never waits: finalizers and callbacks come here."""
        line = subscription.line
        # Not in a forked child, and not after the call: the thread may be over, and nobody would look at the queue.
        if line is not None and line._pid == os.getpid() and subscription.number in line.listeners:
            self._left.append(subscription)
            self._wake()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            bell = Channel.pair()
            thread = threading.Thread(target=self._run, args=(bell[0],), name="vram: revoked leases", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there is none to be had
                for end in bell:
                    end.close()
                raise
            self._bell, self._thread = bell, thread

    def _wake(self) -> None:
        bell = self._bell
        if bell is not None:
            with contextlib.suppress(VramError, OSError):  # full, or closed: it is awake, or there is nothing to do
                bell[1].send(b"!", timeout=0)

    # -- in the thread ----------------------------------------------------------------------------------------------
    def _run(self, bell: Channel) -> None:
        while self._sleep(bell):
            for line in list(self._lines):
                try:
                    line.pump()
                except VramError:  # the keeper is gone, and what it said before is heard
                    with contextlib.suppress(ValueError):
                        self._lines.remove(line)
                    line.close()
                _pass_on(line)
                if line not in self._lines:
                    for subscription in list(line.listeners.values()):
                        if subscription.of_all:
                            subscription.call()
                    line.listeners.clear()
                del line  # or what it knows stayed until the next news
            self._drop_those_who_left()
            if self._is_over():
                return
        bell.close()  # nobody rings it any more

    def _sleep(self, bell: Channel) -> bool:
        """Wait for news or the bell; return whether there still is one."""
        poll = select.poll()
        try:
            poll.register(bell.fileno(), select.POLLIN)
        except ClosedError:
            return False
        for line in list(self._lines):
            with contextlib.suppress(ClosedError):
                poll.register(line._channel.fileno(), select.POLLIN)
        poll.poll()
        try:
            while True:
                bell.recv(timeout=0)
        except WaitTimeoutError:
            return True
        except VramError:
            return False

    def _drop_those_who_left(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                subscription = self._left.popleft()
                if subscription.line is not None:
                    subscription.line.listeners.pop(subscription.number, None)

    def _is_over(self) -> bool:
        """Close what nobody listens on, and say whether that was all."""
        if not self._lock.acquire(blocking=False):
            return False  # somebody comes to listen, and wakes us
        try:
            for line in list(self._lines):
                if line.listeners or line.asking:
                    continue
                self._lines.remove(line)
                line.close()
            if self._lines:
                return False
            bell, self._bell, self._thread = self._bell, None, None
            for end in bell or ():
                end.close()
            return True
        finally:
            self._lock.release()


def _pass_on(line: _Line) -> None:
    while line.heard:
        notice = line.heard.popleft()
        key, is_revoked = (notice.name, notice.version), notice.reason == "revoked"  # a newer version harms nobody
        told = [one for one in list(line.listeners.values()) if one.key == key and (is_revoked or one.of_all)]
        for subscription in told:
            line.listeners.pop(subscription.number, None)
            subscription.call()


def listen(
    connection: RpcConnection, key: Key, owner: object, tell: Callable[[Any], object], *, of_all: bool = False
) -> Subscription:
    """Have ``tell(owner)`` called once, in the listening thread, when a version is revoked, or if it was already.
    `connection` has a lease on the version; `owner` is held weakly. In a signal handler BusyError may be raised."""
    return _join(connection, Subscription(key, owner, tell, of_all=of_all))


def hold(subscription: Subscription, owner: object) -> Subscription:
    """Keep a subscription's connection while it has no listeners, for callers that listen again and again.
    Stop the result to let go; it ends also with its `owner`, who is held weakly, and with the keeper."""
    holder = Subscription(_NOTHING, owner, _ignore)
    if subscription.line is not None:
        _thread.hold(subscription.line, holder)
    return holder


def _ignore(_: object) -> None:
    """Nothing is told of nothing."""


def signal(connection: RpcConnection, key: Key) -> Signal:
    """Return a signal that is readable once a version is replaced, removed, expired or revoked, or its keeper gone.
    If that has happened already, it is readable soon. Errors are those of :func:`listen`."""
    made = Signal()
    try:
        made.subscription = _join(connection, Subscription(key, made, Signal.give, of_all=True))
    except BaseException:
        made.close()
        raise
    return made


def _join(connection: RpcConnection, subscription: Subscription) -> Subscription:
    try:
        _thread.join(connection, subscription)
    except BaseException:  # the wait was ended, perhaps, when the keeper had agreed
        subscription.stop()
        raise
    return subscription


_thread = _Thread()


def _after_fork_in_child() -> None:
    """The thread is the parent's, and so is what it listens on, which the channels have closed here."""
    global _thread
    _thread = _Thread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
