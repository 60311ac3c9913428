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

An interrupt (Ctrl-C, or whatever a signal handler raises) comes at almost any line of the main thread, too (I12): where
a Python function begins, where a loop jumps back, and where a call of a C function has returned; never between other
steps, and never in a finalizer so that its caller sees it. Three things follow. Sections are ``with`` blocks, which it
cannot leave locked, if their loops jump back without a condition (tests/unit/test_loops.py). What a C function returns
is stored by :func:`uninterrupted` before an interrupt can come. And an undo that was interrupted is called again, so
every undo must be able to go on from where it was. Only then is the interrupt passed on.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import itertools
import os
import sys
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .errors import BusyError, ClosedError, ForkedError, LeakWarning, ReleaseWarning, UsageError

if TYPE_CHECKING:
    from typing import Self

_T = TypeVar("_T")
_C = TypeVar("_C", bound="Claim")

_lock = threading.RLock()
_released: deque[tuple[Handle, int]] = deque()
_guards: dict[int, _Guard] = {}  # by serial number, of every claim
_lost: deque[_Guard] = deque()  # of claims that went, and that nobody has released
_unclosed: deque[Callable[[], Any]] = deque()
# The callback of a weak reference that an object with a finalizer keeps to itself, and drops at the finalizer's end:
# it is counted as stuck() if an interrupt kept that from running (I12). An interrupt can come where a finalizer begins,
# and Python drops the rest of it; what then sees the object go is C, where none comes.
unclosed = _unclosed.append
_live: dict[int, Handle] = {}
_stuck: list[Handle] = []
_serials = itertools.count(1)
_generation = 0  # counts forks on the way from the first process to this one
_forked = (0, 0.0)  # the last child of this process: whatever was there when it was forked has a lower number; and when
_exiting = False
_local = threading.local()

_OPEN, _CLOSING, _OWED, _CLOSED, _STUCK = range(5)  # owed: an interrupt came while it was closing
_INTERRUPTS = 8  # that an undo may meet, one after the other, before it is given up as failed
_claimed = attrgetter("claimed")
_NONE: tuple[tuple[Handle, int], ...] = ()
_RELEASED, _COLLECTED = 0, -1  # in place of a claim's serial number, which is positive


Label = str | Callable[[], str]


class Handle:
    """One thing to take back, counted.

    Not made directly: :func:`own` makes it together with its first claim, so that no handle is ever without one, and
    fills both in.
    """

    __slots__ = ("_at_exit", "_claims", "_depends", "_generation", "_id", "_label", "_state", "_undo")

    _label: Label
    _undo: Callable[[], object] | None
    _at_exit: bool
    _claims: dict[int, tuple[object, object]]  # by serial number: who, and the owner's tag
    _depends: dict[int, Handle]
    _generation: int
    _state: int
    _id: int

    @property
    def label(self) -> str:
        """What it is, for errors."""
        return self._label if isinstance(self._label, str) else self._label()

    @property
    def is_open(self) -> bool:
        """Whether the undo has not begun and this is the process it belongs to."""
        return self._state == _OPEN and self._generation == _generation

    @property
    def is_over(self) -> bool:
        """Whether the undo has come to its end, not only begun; also if it failed, or is none of this process's."""
        return self._state in (_CLOSED, _STUCK) or self._generation != _generation

    @property
    def forked_at(self) -> float | None:
        """When a child was last forked since this was made, in seconds since 1970; None if none was.

        The child shares memory of the host that was mapped, and nobody is told when it has ended.
        """
        return forked_since(self._id)

    def check(self) -> None:
        """Raise :class:`ForkedError` or :class:`ClosedError` unless the handle is open here.

        What every operation comes by asks before it calls this: a call costs more than the answer.
        """
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
        """Take a claim.

        Parameters
        ----------
        holder : str or object
            Who holds on, as :class:`BusyError` will name it: by what ``str()`` says of it at that time.
        tag : object
            Anything the owner of the handle wants to find again in :meth:`tags`.
        kind : type of Claim, optional
            What the claim is to be an object of: a class of the owner's, who fills in what it has besides.

        Raises
        ------
        ClosedError, ForkedError
            If there is nothing left to hold on to.
        """
        serial = next(_serials)
        claim = Claim.__new__(kind or Claim)
        claim.handle, claim._serial = self, _RELEASED
        try:
            with _lock:
                if self._state != _OPEN or self._generation != _generation:
                    self.check()
                guard = _Guard(claim, _lost.append)
                guard.claimed = (self, serial)
                # Steps that no interrupt divides: there is somebody who gives it up. Who looks for tags finds it last.
                claim._serial = serial
                _guards[serial] = guard
                self._claims[serial] = (holder, tag)
        finally:
            if _released:
                _settle()
        return claim

    def keep(self, label: Label, undo: Callable[[], object] | None, *, depends: Iterable[Handle] = ()) -> Handle:
        """Take ownership of something just made, as a dependency of this handle: :func:`own` and :meth:`adopt` in one.

        It goes with this handle, also while the caller is still making it: for who has a claim on this one, or has
        told nobody of it yet. See :func:`own` for the parameters and errors.
        """
        made = Handle.__new__(Handle)
        serial = next(_serials)
        made._label, made._undo, made._at_exit = label, undo, False
        made._claims, made._depends = {serial: (self, None)}, {}
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
                    other._claims[number] = (made, None)
                    made._depends[number] = other
                    undone = ((other, number), *undone)
                self._depends[serial] = made
            if _released:
                _settle()
        except BaseException:
            made._undo = None
            made._state = _CLOSED
            queue += undone  # before any call, where the next interrupt could come
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
                other._claims[serial] = (self, None)
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
                    other._claims[serial] = (self, None)
                    self._depends[serial] = other
                    claim._serial = _RELEASED
                    _guards.pop(serial, None)
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
                    if handle not in due or uninterrupted(self._depends.pop, serial, None) is None:
                        continue
                    _released.append((handle, serial))
                    due.discard(handle)
        finally:
            _settle()

    def holders(self, *, besides: Handle | None = None) -> tuple[str, ...]:
        """Return the labels of all claims, oldest first, but for those of one handle that depends on this one."""
        return tuple(
            _who(holder) for holder, _ in list(self._claims.values()) if besides is None or holder is not besides
        )

    def needs(self) -> tuple[str, ...]:
        """Return the labels of what must outlive this, oldest first."""
        return tuple(other.label for other in list(self._depends.copy().values()))

    def tags(self) -> tuple[object, ...]:
        """Return the tags of all claims that have one, oldest first.

        A claim that was given up has none, also while its release waits in the queue for a moment.
        """
        tagged = [(serial, tag) for serial, (_, tag) in tuple(self._claims.copy().items()) if tag is not None]
        return tuple(tag for serial, tag in tagged if _is_held(serial))

    def __repr__(self) -> str:
        state = ("open", "closing", "closing", "closed", "stuck")[self._state]
        return f"<Handle {self.label}, {state}, {len(self._claims)} claims>"

    def _finish(self) -> None:
        """Undo, then let go of the dependencies, newest first. Called by whoever dropped the last claim.

        After an interrupt the undo is called again, and the interrupt passed on once all is done. If one comes outside
        of the undo, this is called again, too: the state tells that it is not over.
        """
        interrupt: list[BaseException] = []
        try:
            while True:
                if self._undo is None or self._generation != _generation or _exiting:
                    break
                try:
                    self._undo()
                    break
                except BaseException as error:  # noqa: BLE001  (passed on below)
                    if isinstance(error, Exception) or len(interrupt) == _INTERRUPTS:
                        # What this stands on must outlive it, and it may still be there: keep both rather than free
                        # in a wrong order. That is a leak, said aloud.
                        self._state = _STUCK
                        _stuck.append(self)
                        _live.pop(self._id, None)
                        _report(f"could not take back {self.label}: {error}; it stays allocated until the process ends")
                        return
                    interrupt.append(error)
            self._undo = None  # often a closure over its owner
            if self._depends:
                _released.extend([(other, serial) for serial, other in reversed(self._depends.items())])
                self._depends = {}
            self._state = _CLOSED
            _live.pop(self._id, None)
        finally:
            if interrupt:
                try:
                    raise interrupt[0]
                finally:
                    interrupt.clear()  # they hold this frame


class _Guard(weakref.ref["Claim"]):
    """Sees a claim go whose finalizer an interrupt kept from running (I12).

    An interrupt can come where a finalizer begins, and Python drops the rest of it. What this calls is C, where none
    comes. The claim is released with whatever is released next.
    """

    __slots__ = ("claimed",)

    claimed: tuple[Handle, int]


class Claim:
    """One reason to keep a handle. Let go with :meth:`release`; garbage collection does it too.

    Made by :func:`own` and :meth:`Handle.claim`, which fill it in.

    Attributes
    ----------
    handle : Handle
        What it keeps.
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
            _settle()  # of what an interrupt may have left
            return
        if strict and self.handle._generation == _generation:
            try:
                with _lock:
                    # Claims whose release is only queued are no reason to refuse.
                    queued = set(map(itemgetter(1), filter(lambda due: due[0] is self.handle, list(_released))))
                    claims = tuple(self.handle._claims.copy().items())
                    others = tuple(_who(holder) for s, (holder, _) in claims if s != serial and s not in queued)
                    if others:
                        raise BusyError(f"{self.handle.label} is still in use", others)
                    self._serial = _RELEASED
                    _released.append((self.handle, serial))
            finally:
                _settle()
            return
        self._serial = _RELEASED
        try:
            _released.append((self.handle, serial))
        finally:
            _settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:
        try:
            serial = self._serial
        except AttributeError:  # an interrupt may come before it is set
            return
        if serial > 0 and _exiting is False:  # at the very end of the interpreter it is None, as all that is used below
            self._serial = _COLLECTED
            _released.append((self.handle, serial))
            _settle()


def own(
    label: Label,
    undo: Callable[[], object] | None,
    *,
    depends: Iterable[Handle] = (),
    holder: str = "owner",
    at_exit: bool = False,
) -> Claim:
    """Take ownership of something just made, and return the first claim on it.

    Parameters
    ----------
    label : str, or callable that returns one
        What it is, for errors: ``"allocation of 2 MiB on host"``. Called only when somebody wants to read it.
    undo : callable or None
        The one call that takes it back. Called at most once, in any thread, without locks held.
    depends : iterable of Handle
        What must outlive it.
    holder : str
        Name of the first claim's holder.
    at_exit : bool
        Undo at interpreter exit as well: for what the kernel does not take back, such as socket paths (I8).

    Raises
    ------
    ClosedError, ForkedError
        If a dependency is gone. `undo` has then not been called: the caller still owns the thing.
    """
    # Without constructors: everything that is made comes by here, and nothing else makes these two.
    handle, claim = Handle.__new__(Handle), Claim.__new__(Claim)
    serial = next(_serials)
    handle._label, handle._undo, handle._at_exit = label, undo, at_exit
    handle._claims, handle._depends = {serial: (holder, None)}, {}
    handle._generation, handle._state, handle._id = _generation, _OPEN, serial
    claim.handle, claim._serial = handle, serial
    queue, undone = _released, _NONE
    try:
        _guards[serial] = guard = _Guard(claim, _lost.append)
        guard.claimed = (handle, serial)
        if depends:
            with _lock:  # Handle.depend for each, under one lock
                for other in depends:
                    if other._state != _OPEN or other._generation != _generation:
                        other.check()
                    number = next(_serials)
                    other._claims[number] = (handle, None)
                    handle._depends[number] = other
                    undone = ((other, number), *undone)
            if _released:
                _settle()
    except BaseException:
        handle._undo = None
        handle._state = _CLOSED
        queue += undone  # before any call, where the next interrupt could come
        _guards.pop(serial, None)
        _settle()
        raise
    _live[serial] = handle
    return claim


def uninterrupted(call: Callable[..., _T], *arguments: object) -> _T:
    """Call a C function and return what it returns, so that no interrupt comes before that is stored.

    An interrupt is raised after a call of a C function, before its result is assigned. Unpacking is no call: here the
    interpreter asks for interrupts before the function runs, and then not until the caller makes its next call. What
    every operation comes by does it itself: ``(result,) = starmap(call, [arguments])``.

    Parameters
    ----------
    call : callable
        Implemented in C: a builtin function, or one that ctypes made.
    *arguments
        Its positional arguments.
    """
    (result,) = itertools.starmap(call, (arguments,))
    return result


def holding(locks: Iterable[Any], act: Callable[[], _T]) -> _T:
    """Call a function while this thread has several locks, and return what it returns.

    As many ``with`` blocks, one in the other, would do it, and as safe from interrupts: a lock is taken and noted in
    one step of C, and when all is over no call of the interpreter's comes before the last of them is free.

    Parameters
    ----------
    locks : iterable
        In the order in which everybody takes them.
    act : callable
        Takes no argument.
    """
    held: list[Any] = []
    letting_go = map(methodcaller("release"), held)
    try:
        held.extend(filter(methodcaller("acquire"), locks))
        return act()
    finally:
        _ = [*letting_go]


def insisting(act: Callable[[Any], object]) -> Iterator[None]:
    """Return the end of a call of several steps, which no interrupt keeps from being reached (I12).

    Made before the first step, ``ending = insisting(end)``, it is taken by ``next(ending, None)``, in ``finally`` or
    ``except BaseException``. A second interrupt, while the first is dealt with, would come where the function begins
    that is to deal with it. Here it comes within a ``try`` that was begun before: the function is called again, as an
    undo of a handle is, and the interrupt passed on when it has returned. After eight of them it is given up, which is
    said and counted as :func:`stuck`.

    Parameters
    ----------
    act : callable
        Takes the error that is being raised, or None. It has to be able to go on from where it was.
    """
    ending = _insist(act)
    next(ending)
    return ending


def _insist(act: Callable[[Any], object]) -> Iterator[None]:
    before = sys.exception()  # what whoever calls is dealing with is no error of this call
    interrupt: BaseException | None = None
    left, is_wanted, is_over = _INTERRUPTS, False, False
    while True:
        if is_over:
            break
        try:  # for an interrupt that comes where the inner loop jumps back
            while True:
                if is_over:
                    break
                try:
                    if not is_wanted:
                        try:
                            yield
                        except GeneratorExit:
                            return  # nobody wanted it
                        is_wanted = True
                    error = sys.exception()
                    act(None if error is before else error)
                    is_over = True
                except Exception as failure:
                    is_over = True
                    if interrupt is None:
                        raise
                    interrupt.add_note(f"and then: {failure}")
                except BaseException as found:  # noqa: BLE001  (passed on below)
                    interrupt, is_wanted = found, True
                    left -= 1
                    is_over = not left
        except Exception:
            raise
        except BaseException as found:  # noqa: BLE001  (as above)
            interrupt = found
    before = error = None
    if interrupt is None:
        return
    try:
        if not left:
            unclosed(_nobody)
            _report("interrupts in a row kept a call from its end: what it had begun stays until the process ends")
        raise interrupt
    finally:
        interrupt = None  # it holds this frame


def _nobody() -> None:
    """In the place of a reference to something that is no more."""


class Gate:
    """Something that happens once, and can be waited for: an event without an interrupt's harm (I12).

    ``threading.Event``, ``Condition`` and ``Future`` take their lock in Python code. An interrupt may come between the
    lock and the block that lets go of it, and whoever has to tell would then wait for ever.
    """

    __slots__ = ("_lock", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def open(self) -> None:
        """It has happened. For one thread at a time; idempotent."""
        if not self.is_open:
            self.is_open = True
            self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has happened, for at most so many seconds; return whether it has."""
        held, seconds = False, -1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)
        try:
            held = uninterrupted(self._lock.acquire, True, seconds)
        finally:
            if held:
                self._lock.release()
        return self.is_open


def begin(thread: threading.Thread, *, otherwise: Callable[[BaseException], object] | None = None) -> None:
    """Start a thread so that an interrupt leaves it running or not begun, and never waiting for who started it (I12).

    ``Thread.start`` waits by means of a ``Condition``, see :class:`Gate`; so another thread calls it, where none comes.

    Parameters
    ----------
    otherwise : callable, optional
        Called by that other thread, with the error, if it cannot be started. Then nobody waits for it here: that takes
        up to a millisecond, and five where the new thread has much to do.

    Raises
    ------
    RuntimeError
        If there is no thread to be had.
    """
    begun = Gate()
    wrong: list[BaseException] = []

    def start() -> None:
        try:
            thread.start()
        except BaseException as error:  # noqa: BLE001  (raised below)
            (otherwise or wrong.append)(error)
        finally:
            begun.open()

    uninterrupted(_thread.start_new_thread, start, ())
    if otherwise is None:
        begun.wait()
    if wrong:
        raise wrong.pop()


def last_fork() -> object:
    """Return what is another one as soon as a child is forked."""
    return _forked


def forked_since(serial: int) -> float | None:
    """Return when a child was last forked since a handle of a serial number was made; see :attr:`Handle.forked_at`."""
    number, when = _forked
    return when if serial < number else None


def live() -> tuple[Handle, ...]:
    """Return every handle of this process that has not been undone."""
    _settle()
    return tuple(_live.copy().values())


def stuck() -> tuple[Handle, ...]:
    """Return the handles whose undo failed: kept, with all they depend on, until the process ends.

    Besides, one for each object whose finalizer was to close something, and was kept from it (:data:`unclosed`).
    """
    _settle()  # what goes only now may fail as well
    while _unclosed:
        with contextlib.suppress(IndexError):  # another thread was quicker
            _unclosed.popleft()
            handle = own("what an interrupted finalizer did not close", None).handle
            handle._state = _STUCK
            _stuck.append(handle)
            _live.pop(handle._id, None)
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
        """Give up this object's claim. What nobody else claims is taken back now, the rest with its last claim.

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
        claim.release()


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
        """Lend the number: valid as long as this object is open.

        Raises
        ------
        ClosedError, ForkedError
            If it is not.
        """
        self.handle  # noqa: B018
        return self._fds[0]

    def detach(self) -> int:
        """Give the descriptor away: the caller closes it; this object is closed and closes nothing.

        Raises
        ------
        BusyError
            If something else depends on the descriptor staying open.
        """
        fd = self.fileno()
        self._fds.clear()
        try:
            self._claim.release(strict=True)
        except BusyError:
            self._fds.append(fd)
            raise
        return fd


def _is_held(serial: int) -> bool:
    """Whether somebody has the claim of this number, and has not given it up."""
    guard = _guards.get(serial)
    claim = None if guard is None else guard()
    return claim is not None and claim._serial == serial


def _who(holder: object) -> str:
    return holder.label if isinstance(holder, Handle) else str(holder)


def close_all(fds: list[int]) -> None:
    """Close descriptors and take their numbers out of a list: an undo that can be called again after an interrupt."""
    while fds:
        # Popped and closed in one step: a number that was popped only would stay open, one that was closed only would
        # be closed twice.
        (_,) = map(os.close, map(fds.pop, (-1,)))


def _settle() -> None:
    """Work off the queue of released claims. Never waits: whoever holds the lock will look at the queue again."""
    while _lost:
        with contextlib.suppress(IndexError):  # another thread was quicker
            # From one queue to the other in one step.
            _released.extend(map(_claimed, itertools.starmap(_lost.popleft, ((),))))
    while _released and not _lock._is_owned():  # type: ignore[attr-defined]  # threading.Condition asks the same
        due: Handle | None = None
        try:
            held = False
            try:
                (held,) = map(_lock.acquire, (False,))  # as uninterrupted() does it
                if not held:
                    return
                while True:
                    if not _released or due is not None:
                        break
                    handle, serial = _released[0]
                    handle._claims.pop(serial, None)
                    _guards.pop(serial, None)
                    if not handle._claims and handle._state in (_OPEN, _OWED):
                        handle._state = _CLOSING
                        due = handle
                    _released.popleft()
            finally:
                if held:
                    _lock.release()
            if due is not None:
                due._finish()
        except BaseException:
            # An interrupt. What is left to do is done now, and then it is passed on.
            if due is not None and due._state == _CLOSING:
                due._state = _OWED
                _released.appendleft((due, 0))
            _settle()
            raise


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
    global _generation, _lock
    _generation += 1
    _lock = threading.RLock()
    _released.clear()
    _guards.clear()
    _lost.clear()
    _unclosed.clear()
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
