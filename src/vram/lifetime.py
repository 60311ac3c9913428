"""Counted handles: every driver object is undone once, in the right order, whoever lets go of it last.

A :class:`Handle` stands for one thing that must be taken back (an address range, an allocation, a mapping, a file
descriptor, a lease). It knows the one call that undoes it and the handles it depends on. A :class:`Claim` is one
reason to keep a handle; a dependency is a claim too. When the last claim goes the undo runs, and only after it has
returned do the claims on the dependencies go (invariant I1).

Why not ``weakref.finalize`` or ``__del__`` per object: in a collected cycle Python finalizes in an order of its own.
Here finalizers only append to a queue; counts decide the order.

Concurrency, in three paragraphs. ``_lock`` guards counts and states, for a few dictionary operations at a time; it is
never held while an undo runs. Finalizers never wait for it: they append to ``_released`` and *try* the lock; whoever
holds it looks at the queue again after letting go, so nothing appended is forgotten (invariant I3).

The collector runs anybody's finalizers at almost any line, also while this very thread holds the lock, and such a
finalizer may claim and close things like everybody else. So the lock is reentrant; a claim that comes in the middle of
a guarded section does no harm there, and the queue is worked off only outside of all sections. Before Python 3.12 it
also runs in the middle of ``tuple(a_dict.items())``, which then finds the dictionary changed and raises. So what
finalizers may change is read from a ``copy()`` of it, or into a ``list``, in the middle of which it does not run.

Ctrl-C is deferred while something is changed (I12): public verbs are :func:`shielded`, and so is the undo of what they
made, in a finalizer too. No other module deals with signals; one that waits says so with :func:`waiting`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # C functions: those of `signal` are wrapped in Python, and slow
import _thread
import atexit
import contextlib
import functools
import itertools
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from operator import itemgetter
from types import BuiltinFunctionType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from .errors import BusyError, ClosedError, ForkedError, LeakWarning, ReleaseWarning, UsageError

if TYPE_CHECKING:
    from typing import Self

_P = ParamSpec("_P")
_T = TypeVar("_T")
_C = TypeVar("_C", bound="Claim")

_lock = threading.RLock()
_released: deque[tuple[Handle, int]] = deque()
_lost: deque[_Guard] = deque()  # of claims whose finalizer did not come to its end
_live: dict[int, Handle] = {}
_stuck: list[Handle] = []
_serials = itertools.count(1)
_generation = 0  # counts forks on the way from the first process to this one
_forked = (0, 0.0)  # the last child of this process: whatever was there when it was forked has a lower number; and when
_exiting = False
_local = threading.local()

_OPEN, _CLOSING, _CLOSED, _STUCK = range(4)
_SLICE = 0.1  # seconds that a wait without a system call of its own lasts before an interrupt is let in
_NONE: tuple[tuple[Handle, int], ...] = ()
_RELEASED, _COLLECTED = 0, -1  # in place of a claim's serial number, which is positive


# -- the interrupt shield (I12) ----------------------------------------------------------------------------------------
_SIGINT = int(_signal.SIGINT)
_EXPOSED, _SHIELDED, _WAITING = range(3)
_main = threading.main_thread().ident  # the thread in which Python runs signal handlers
_shield = _EXPOSED  # state of that thread
_interrupted = False  # a SIGINT came under the shield, and the handler has not run yet


# The one that runs when the shield is lifted.
_handler: Callable[[int, FrameType | None], object] = _signal.default_int_handler


@overload
def shielded(function: Callable[_P, _T], /) -> Callable[_P, _T]: ...
@overload
def shielded(*, undo: Callable[..., object]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]: ...
def shielded(function: Any = None, /, *, undo: Callable[..., object] | None = None) -> Any:
    """Defer SIGINT on the main thread while a function runs; its handler runs at the end of the outermost such call.
    A handler that raises keeps the result from the caller: `undo` is called then, with the first argument and the
    result, where dropping the result does not take it back."""
    if function is None:
        return functools.partial(_shielded, undo=undo)
    return _shielded(function)


def _shielded(
    function: Callable[_P, _T], *, undo: Callable[..., object] | None = None, is_late: bool = False
) -> Callable[_P, _T]:
    """Shield a function; with `is_late` (a finalizer, whose errors Python only prints) the interrupt comes afterwards.
    CPython takes signals after a C call, but not if unpacking an iterator makes it: so ``starmap`` leaves no gap."""

    take_back = None if undo is None else _shielded(undo)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        global _handler, _interrupted, _main, _shield
        if _shield == _SHIELDED or _thread.get_ident() != _main:
            return function(*args, **kwargs)
        handler = _signal.getsignal(_SIGINT)
        if not callable(handler):
            return function(*args, **kwargs)
        before = _shield, _handler
        try:
            (_,) = itertools.starmap(_signal.signal, _noting)
        except ValueError:  # an embedded interpreter, or one of several: Python handles signals elsewhere
            _main = None
            return function(*args, **kwargs)
        back = take_back
        try:
            if handler is not _note:  # as it is in what `waiting` calls
                _handler = handler
            _shield = _SHIELDED
            result = function(*args, **kwargs)
            return result
        except BaseException:
            back = None
            raise
        finally:
            # `_note` handles a pending signal before it is replaced: Python does so in this very call.
            (_,) = itertools.starmap(_signal.signal, ((_SIGINT, handler),))
            _shield, _handler = before
            if _interrupted:
                _interrupted = False
                if is_late:
                    (_,) = itertools.starmap(_thread.interrupt_main, ((_SIGINT,),))
                else:
                    try:
                        handler(_SIGINT, sys._getframe(1))
                    except BaseException as error:
                        try:
                            if back is not None:
                                back(args[0], result)
                        except Exception as problem:  # noqa: BLE001  (the interrupt is what the caller has to hear)
                            error.add_note(f"not taken back: {problem!r}")
                        raise

    return call


def _note(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT in place of the handler that was there: later, under the shield."""
    global _interrupted
    if _shield == _SHIELDED:
        _interrupted = True
    else:
        _handler(number, frame)


_noting = ((_SIGINT, _note),)


def waiting(call: Callable[..., _T], *arguments: Any) -> _T:
    """Make a call that takes long or is the user's, and let interrupts in, an earlier one included. An interrupt may
    lose the result of a function in Python, which returns nothing that must be given back; of one in C it does not."""
    global _interrupted, _shield
    if _shield != _SHIELDED or _thread.get_ident() != _main:
        return call(*arguments)
    _shield = _WAITING
    try:
        if _interrupted:
            _interrupted = False
            _handler(_SIGINT, sys._getframe(1))
        if type(call) is BuiltinFunctionType:
            result: _T
            (result,), _shield = itertools.starmap(call, (arguments,)), _SHIELDED  # without a gap, as in `_shielded`
            return result
        return call(*arguments)
    finally:
        _shield = _SHIELDED


def let_in() -> None:
    """Raise what Ctrl-C raises, if it was pressed under the shield: between the pieces of a long call."""
    if _interrupted:
        waiting(_thread.get_ident)  # whatever the call


def wait_for(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait for an event, for at most so many seconds, and return whether it has come. Interrupts are let in."""
    return _in_slices(event.wait, timeout) or event.is_set()


def take(lock: Any, timeout: float | None = None) -> bool:
    """Take a lock that another thread may hold for long; return whether it was had in so many seconds. As above."""
    return _in_slices(partial(lock.acquire, True), timeout)


@contextlib.contextmanager
def held(lock: Any) -> Iterator[None]:
    """Hold such a lock for a block. As above."""
    take(lock)
    try:
        yield
    finally:
        lock.release()


def _in_slices(ask: Callable[[float], bool], timeout: float | None) -> bool:
    until = None if timeout is None else time.monotonic() + timeout
    while not ask(_SLICE if until is None else max(0.0, min(_SLICE, until - time.monotonic()))):
        let_in()
        if until is not None and time.monotonic() >= until:
            return False
    return True


Label = str | Callable[[], str]


class Handle:
    """A counted thing to take back. :func:`own` makes it together with its first claim: no handle is without a
    claim."""

    __slots__ = ("_at_exit", "_claims", "_depends", "_generation", "_id", "_label", "_state", "_undo")

    _label: Label
    _undo: Callable[[], object] | None
    _at_exit: bool
    _claims: dict[int, tuple[object, object, object]]  # by serial number: who, the owner's tag, and a guard
    _depends: dict[int, Handle]
    _generation: int
    _state: int
    _id: int

    @property
    def label(self) -> str:
        """The name of the thing, for errors."""
        return self._label if isinstance(self._label, str) else self._label()

    @property
    def is_open(self) -> bool:
        """Whether the undo has not begun and this is the process it belongs to."""
        return self._state == _OPEN and self._generation == _generation

    @property
    def is_over(self) -> bool:
        """Whether the undo has come to its end, not only begun; also if it failed, or is none of this process's."""
        return self._state in (_CLOSED, _STUCK) or self._generation != _generation

    def check(self) -> None:
        """Raise :class:`ForkedError` or :class:`ClosedError` unless the handle is open in this process.
        Hot paths look at the state before they call this: a call costs more than the answer."""
        if self._generation != _generation:
            raise ForkedError(
                f"{self.label} belongs to the parent of this fork; send it over an ArrayChannel or a multiprocessing "
                f"queue, attach by name, or start workers with the spawn method"
            )
        if self._state != _OPEN:
            raise ClosedError(f"{self.label} is closed")

    @overload
    def claim(self, holder: object, tag: object = None) -> Claim: ...
    @overload
    def claim(self, holder: object, tag: object, kind: type[_C]) -> _C: ...
    def claim(self, holder: object, tag: object = None, kind: type[Claim] | None = None) -> Claim:
        """Take a claim; `holder` names it in :class:`BusyError`, by ``str()`` at that time, and :meth:`tags` returns
        `tag`. `kind` is a subclass of :class:`Claim`, whose own fields the caller fills in."""
        serial = next(_serials)
        claim = Claim.__new__(kind or Claim)
        claim.handle, claim._serial = self, _RELEASED
        try:
            with _lock:
                if self._state != _OPEN or self._generation != _generation:
                    self.check()
                claim._serial = serial
                guard = _Guard(claim, _lost.append)
                guard.claimed = (self, serial)
                self._claims[serial] = (holder, tag, guard)
        finally:
            if _released:
                _settle()
        return claim

    def keep(self, label: Label, undo: Callable[[], object] | None, *, depends: Iterable[Handle] = ()) -> Handle:
        """Take ownership of something just made, as a dependency of this handle: :func:`own` and :meth:`adopt` in one.
        If this raises, `undo` has not been called, and the caller still owns the thing."""
        made = Handle.__new__(Handle)
        serial = next(_serials)
        made._label, made._undo, made._at_exit = label, undo, False
        made._claims, made._depends = {serial: (self, None, None)}, {}
        made._generation, made._state, made._id = _generation, _OPEN, serial
        queue, undone = _released, _NONE
        try:
            with _lock:
                if self._state != _OPEN or self._generation != _generation:
                    self.check()
                for other in depends:
                    if other._state != _OPEN or other._generation != _generation:
                        other.check()
                    number = next(_serials)
                    other._claims[number] = (made, None, None)
                    made._depends[number] = other
                    undone = ((other, number), *undone)
                self._depends[serial] = made
            if _released:
                _settle()
        except BaseException:
            made._undo = None
            made._state = _CLOSED
            queue += undone
            self._depends.pop(serial, None)
            _settle()
            raise
        _live[serial] = made
        return made

    def depend(self, other: Handle) -> None:
        """Keep `other` until this handle's undo has returned (or :meth:`drop_dependency`)."""
        serial = next(_serials)
        try:
            with _lock:
                for one in (other, self):
                    if one._state == _OPEN and one._generation == _generation:
                        continue
                    one.check()
                other._claims[serial] = (self, None, None)
                self._depends[serial] = other
        finally:
            _settle()

    def adopt(self, *claims: Claim) -> None:
        """Turn claims into dependencies: :meth:`depend` and the release of each in one step."""
        try:
            with _lock:
                if self._state != _OPEN or self._generation != _generation:
                    self.check()
                for claim in claims:
                    other = claim.handle
                    if other._state != _OPEN or other._generation != _generation:
                        other.check()
                    serial = claim._serial
                    if serial <= 0:
                        raise ClosedError(f"this claim on {other.label} was given up")
                    other._claims[serial] = (self, None, None)
                    self._depends[serial] = other
                    claim._serial = _RELEASED
        finally:
            if _released:
                _settle()

    def drop_dependency(self, *others: Handle) -> None:
        """Give up the newest claim that this handle has on each of `others`; of them the newest first."""
        due = set(others)
        try:
            with _lock:
                for serial, handle in reversed(self._depends.copy().items()):
                    if not due:
                        break
                    # A finalizer may run here and drop the same dependency: whoever pops it has it, the other looks on.
                    if handle not in due or self._depends.pop(serial, None) is None:
                        continue
                    _released.append((handle, serial))
                    due.discard(handle)
        finally:
            _settle()

    def holders(self, *, besides: Collection[object] = ()) -> tuple[str, ...]:
        """Return the labels of all claims, oldest first, but for those of some handles that depend on this one."""
        return tuple(
            _who(holder) for holder, _, _ in list(self._claims.values()) if not any(holder is one for one in besides)
        )

    def needs(self) -> tuple[str, ...]:
        """Return the labels of what must outlive this, oldest first."""
        return tuple(other.label for other in list(self._depends.copy().values()))

    def tags(self) -> tuple[object, ...]:
        """Return the tags of all claims that have a tag, oldest first.
        A released claim has none, also while its release still waits in the queue."""
        tagged = [(serial, tag) for serial, (_, tag, _) in tuple(self._claims.copy().items()) if tag is not None]
        if not tagged:
            return ()
        queued = {serial for _, serial in list(_released)}
        return tuple(tag for serial, tag in tagged if serial not in queued)

    def __repr__(self) -> str:
        state = ("open", "closing", "closed", "stuck")[self._state]
        return f"<Handle {self.label}, {state}, {len(self._claims)} claims>"

    def _finish(self) -> None:
        """Undo, then let go of the dependencies, newest first. Called by whoever dropped the last claim."""
        try:
            if self._undo is not None and self._generation == _generation and not _exiting:
                self._undo()
        except BaseException as error:
            # The dependencies must outlive it, and it may still be there: both stay, rather than to be freed in a
            # wrong order. That is a leak, said aloud.
            self._state = _STUCK
            _stuck.append(self)
            _live.pop(self._id, None)
            _report(f"could not take back {self.label}: {error}; it stays allocated until the process ends")
            if not isinstance(error, Exception):
                raise
            return
        self._undo = None  # often a closure over its owner
        if self._depends:
            _released.extend([(other, serial) for serial, other in reversed(self._depends.items())])
            self._depends = {}
        self._state = _CLOSED
        _live.pop(self._id, None)


class _Guard(weakref.ref["Claim"]):
    """A weak reference that sees a claim go whose finalizer was cut short: Python prints an interrupt there, and drops
    the rest. This callback is C, which is not interrupted. The claim is released with whatever is released next."""

    __slots__ = ("claimed",)

    claimed: tuple[Handle, int]


class Claim:
    """One reason to keep a handle. Let go with :meth:`release`; garbage collection does it too.

    Made by :func:`own` and :meth:`Handle.claim`, which fill it in.

    Attributes
    ----------
    handle : Handle
        The object that it keeps.
    """

    __slots__ = ("__weakref__", "_serial", "handle")

    handle: Handle
    _serial: int

    @property
    def is_released(self) -> bool:
        """Whether this claim was given up."""
        return self._serial <= 0

    def release(self, *, strict: bool = False) -> None:
        """Give the claim up; the last one out undoes the handle. Idempotent.

        Parameters
        ----------
        strict : bool
            Refuse, and change nothing, while there are other claims.

        Raises
        ------
        BusyError
            Only if `strict`, naming the other claims.
        """
        serial = self._serial
        if serial <= 0:
            if _released:
                _settle()
            return
        if strict and self.handle._generation == _generation:
            try:
                with _lock:
                    # Claims whose release is only queued are no reason to refuse.
                    queued = set(map(itemgetter(1), filter(lambda due: due[0] is self.handle, list(_released))))
                    claims = tuple(self.handle._claims.copy().items())
                    others = tuple(_who(holder) for s, (holder, _, _) in claims if s != serial and s not in queued)
                    if others:
                        raise BusyError(f"{self.handle.label} is still in use", others)
                    self._serial = _RELEASED
                    _released.append((self.handle, serial))
            finally:
                _settle()
            return
        left = self.handle._claims
        if len(left) > 1:
            left.pop(serial, None)  # before it counts as released: an interrupt may come after each call
            if left:  # whoever leaves none looks what is to be undone
                self._serial = _RELEASED
                return
        self._serial = _RELEASED
        _released.append((self.handle, serial))
        _settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        try:
            serial = self._serial
        except AttributeError:  # it was not made whole
            return
        if serial > 0 and _exiting is False:  # at the very end of the interpreter it is None, as all that is used below
            self._serial = _COLLECTED
            left = self.handle._claims
            if len(left) > 1:
                left.pop(serial, None)
                if left:  # as in release()
                    return
            _released.append((self.handle, serial))
            _settle(is_late=True)


def own(
    label: Label,
    undo: Callable[[], object] | None,
    *,
    depends: Iterable[Handle] = (),
    holder: str = "owner",
    at_exit: bool = False,
) -> Claim:
    """Take ownership of something just made, and return the first claim on it. If this raises, `undo` was not called.
    `undo` runs at most once, in any thread, without locks held; with `at_exit` also at interpreter exit (I8)."""
    # Without constructors: everything that is made comes by here, and nothing else makes these two.
    handle, claim = Handle.__new__(Handle), Claim.__new__(Claim)
    serial = next(_serials)
    guard = _Guard(claim, _lost.append)
    guard.claimed = (handle, serial)
    handle._label, handle._undo, handle._at_exit = label, undo, at_exit
    handle._claims, handle._depends = {serial: (holder, None, guard)}, {}
    handle._generation, handle._state, handle._id = _generation, _OPEN, serial
    claim.handle, claim._serial = handle, serial
    queue, undone = _released, _NONE
    try:
        if depends:
            with _lock:  # Handle.depend for each, under one lock
                for other in depends:
                    if other._state != _OPEN or other._generation != _generation:
                        other.check()
                    number = next(_serials)
                    other._claims[number] = (handle, None, None)
                    handle._depends[number] = other
                    undone = ((other, number), *undone)
            if _released:
                _settle()
    except BaseException:
        handle._undo = None
        handle._state = _CLOSED
        queue += undone
        _settle()
        raise
    _live[serial] = handle
    return claim


def last_fork() -> tuple[int, float]:
    """Return the number of the last fork of a child, which is above those of all handles that were there, and its time
    in seconds since 1970."""
    return _forked


def live() -> tuple[Handle, ...]:
    """Return every handle of this process that has not been undone."""
    _settle()
    return tuple(_live.copy().values())


def stuck() -> tuple[Handle, ...]:
    """Return the handles whose undo failed: kept, with all they depend on, until the process ends."""
    _settle()  # what goes only now may fail as well
    return tuple(_stuck)


@contextlib.contextmanager
def unwinding(error: BaseException) -> Iterator[None]:
    """While this runs, an undo that fails in this thread becomes a note on `error` instead of a warning (I4)."""
    previous = getattr(_local, "error", None)
    _local.error = error
    try:
        yield
    finally:
        _local.error = previous


@contextlib.contextmanager
def noted(error: BaseException) -> Iterator[None]:
    """While this runs, a failure becomes a note on `error`, which is the one that is raised (I4)."""
    try:
        yield
    except Exception as second:  # noqa: BLE001  (whatever it is, the first one is raised)
        error.add_note(f"and then: {second}")


class Owned:
    """A facade over one claim: what users close.

    Subclasses set ``_claim`` last in their constructor, so that an object whose construction failed owns nothing.
    """

    __slots__ = ("__weakref__", "_claim")

    _claim: Claim
    _warn_on_leak = True

    @property
    def handle(self) -> Handle:
        """The counted handle behind this object, for things that must not outlive it.

        Raises
        ------
        ClosedError, ForkedError
            If this object was closed, or belongs to the parent of a fork.
        """
        claim = self._claim
        handle = claim.handle
        if claim._serial <= 0:
            raise ClosedError(f"{handle.label} was closed")
        if handle._state != _OPEN or handle._generation != _generation:
            handle.check()  # which says what is wrong; spelt out before, since every operation comes by here
        return handle

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called on this object."""
        return self._claim._serial <= 0

    def close(self, *, strict: bool = False) -> None:
        """Give up this object's claim. The thing is taken back now, or with its last claim.

        Idempotent. Never raises unless `strict`.

        Parameters
        ----------
        strict : bool
            Refuse, and change nothing, while anybody else has a claim.

        Raises
        ------
        BusyError
            Only if `strict`, naming the other claims.
        """
        self._claim.release(strict=strict)

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError(
            f"{self._claim.handle.label} belongs to this process and cannot be pickled or copied; send arrays, or the "
            f"name that they were published under"
        )

    def __enter__(self) -> Self:
        self.handle  # noqa: B018  (raises when it is too late)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with unwinding(error):
                self.close()

    def __del__(self) -> None:
        claim = getattr(self, "_claim", None)
        if claim is None or claim._serial == _RELEASED or _exiting is not False:
            return
        handle = claim.handle
        # In a collected cycle the claim's own finalizer may have come first and undone everything: still a leak.
        if self._warn_on_leak and handle._generation == _generation:
            _report(f"{handle.label} was not closed; use it in a with block or call close()", LeakWarning)
        if claim._serial > 0:
            _released.append((handle, claim._serial))
            claim._serial = _RELEASED
            _settle(is_late=True)


class FileDescriptor(Owned):
    """A file descriptor with one owner at any time (invariant I9): :meth:`adopt` takes, ``fileno`` lends,
    :meth:`detach` gives away."""

    __slots__ = ("_fds",)

    _warn_on_leak = False  # closing one late is harmless; the ledger still sees it

    def __init__(self, fd: int, label: str) -> None:
        self._fds = [fd]  # what is in here gets closed
        self._claim = own(label, partial(close_all, self._fds))  # a method of ours would keep this object alive

    @classmethod
    def adopt(cls, fd: int, label: str = "") -> FileDescriptor:
        """Take ownership of an open descriptor; the caller must not close it any more."""
        return cls(fd, label or f"fd {fd}")

    def fileno(self) -> int:
        """Lend the number, which is valid as long as this object is open."""
        self.handle  # noqa: B018
        return self._fds[0]

    def detach(self) -> int:
        """Give the descriptor away: the caller closes it. Raises BusyError if something depends on it staying open."""
        fd = self.fileno()
        self._fds.clear()
        try:
            self._claim.release(strict=True)
        except BusyError:
            self._fds.append(fd)
            raise
        return fd


def _who(holder: object) -> str:
    return holder.label if isinstance(holder, Handle) else str(holder)


def close_all(fds: list[int]) -> None:
    """Close descriptors, and take their numbers out of a list."""
    while fds:
        os.close(fds.pop())


def _settle(is_late: bool = False, is_shielded: bool = False) -> None:
    """Work off the queue of released claims. Never waits: whoever holds the lock will look at the queue again."""
    if not is_shielded and _shield != _SHIELDED and _thread.get_ident() == _main:
        (_settle_late if is_late else _settle_now)(is_late, True)
        return
    while _lost:
        with contextlib.suppress(IndexError):  # another thread was quicker
            _released.append(_lost.popleft().claimed)
    while _released and not _lock._is_owned():  # type: ignore[attr-defined]  # threading.Condition asks the same
        if not _lock.acquire(False):
            return
        due: Handle | None = None
        try:
            while _released and due is None:
                handle, serial = _released.popleft()
                handle._claims.pop(serial, None)
                if not handle._claims and handle._state == _OPEN:
                    handle._state = _CLOSING
                    due = handle
        finally:
            _lock.release()
        if due is not None:
            due._finish()


_settle_now = shielded(_settle)
_settle_late = _shielded(_settle, is_late=True)  # for finalizers


def report(message: str) -> None:
    """Say, as a ReleaseWarning, that something went wrong which nobody can be told by an error. Never raises."""
    _report(message)


def _report(message: str, category: type[Warning] = ReleaseWarning) -> None:
    """Warn, or note it on the error being unwound. Never raises, also where warnings are errors."""
    error = getattr(_local, "error", None)
    if error is not None and category is ReleaseWarning:
        error.add_note(message)
        return
    try:
        warnings.warn(message, category, stacklevel=4)
    except Exception as problem:  # noqa: BLE001  (the warning itself, or what a replaced showwarning raised)
        _Unraisable(problem)


class _Unraisable:
    """Hand an exception to ``sys.unraisablehook``, whose argument only the interpreter can make: by raising it in a
    finalizer."""

    __slots__ = ("_problem",)

    def __init__(self, problem: Exception) -> None:
        self._problem = problem

    def __del__(self) -> None:
        raise self._problem


def _after_fork_in_child() -> None:
    """Make everything inherited inert (I7): its owner is the parent, and the lock may have been held by a thread
    that does not exist here."""
    global _generation, _interrupted, _lock, _main, _shield
    _generation += 1
    _lock = threading.RLock()
    other, _main = _main, _thread.get_ident()
    if other != _main and _shield != _EXPOSED:  # the parent's main thread was in a call
        _signal.signal(_SIGINT, _handler)
        _shield, _interrupted = _EXPOSED, False
    _released.clear()
    _lost.clear()
    _live.clear()
    _stuck.clear()


def _at_fork() -> None:
    """Note that there is a child: before, since other threads ask meanwhile, and after, since they make things."""
    global _forked
    _forked = next(_serials), time.time()


def _at_exit() -> None:
    """Take back only what the kernel will not (I8)."""
    global _exiting
    _settle()
    for handle in reversed(list(_live.values())):  # what was made later may stand on what was made before
        if handle._at_exit and handle._undo is not None:
            undo, handle._undo = handle._undo, None
            with contextlib.suppress(Exception):
                undo()
    _exiting = True


if hasattr(os, "register_at_fork"):  # not on Windows, where there is nothing to do
    os.register_at_fork(before=_at_fork, after_in_parent=_at_fork, after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
