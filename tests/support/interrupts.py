"""Ctrl-C at a point of one's choice: what the tests of I12 have in common.

Python asks for signals where a function begins, where a loop jumps back, where a call of a C function returns, and
where one returns that C has called. A profile function sees all of these but the second.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import linecache
import os
import random
import signal
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from tests.support import samples

import vram

__all__ = [
    "MEMORY",
    "Point",
    "chosen",
    "in_a_finalizer",
    "interrupt",
    "interrupt_again",
    "interrupt_finalizers",
    "keeping",
    "pairs",
    "points",
    "room",
    "signals",
]

SAMPLE = 4
Point = tuple[str, int, str, str]  # file, line, event, and what was called
_LIBRARY = os.path.dirname(vram.__file__)
_STANDARD = sysconfig.get_paths()["stdlib"]
# As the kernel's signal does it: Python handles it when it next asks. Called from C, so that it does not ask at once.
_send = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyErr_SetInterrupt", ctypes.pythonapi))


def room(*names: str) -> tuple[str, ...]:
    """Return how the files of rooms of vram begin, and of modules of Python: ``"memory/"``, ``"std:socket"``."""
    return tuple(
        os.path.join(_STANDARD, name.removeprefix("std:")) if name.startswith("std:") else os.path.join(_LIBRARY, name)
        for name in names
    )


MEMORY = room("memory/", "driver/", "lifetime.py")


class _Shot:
    """Its end sends the signal."""


def in_a_finalizer(frame: FrameType | None) -> bool:
    """Whether Python would print an interrupt that comes here, and go on: nobody is told of it."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _is_here(frame: FrameType, event: str, rooms: tuple[str, ...], returns: bool, *, finalizers: bool = False) -> bool:
    if event not in ("call", "c_return") and not (event == "return" and returns and not _is_called_by_name(frame)):
        return False
    if not frame.f_code.co_filename.startswith(rooms):
        return False
    if event == "call" and frame.f_code.co_name == "_insist" and not _is_asked_for(frame.f_back):
        return False
    if finalizers:
        return in_a_finalizer(frame)
    code = frame.f_code
    # A generator that goes on is "called" as well, also where it is dropped half done: there Python does not ask.
    has_begun = code.co_flags & inspect.CO_GENERATOR and frame.f_lineno != code.co_firstlineno
    if event == "call" and has_begun and code.co_name != "_insist":
        return False
    return code.co_name != "<genexpr>" and not in_a_finalizer(frame)


def _is_asked_for(frame: FrameType | None) -> bool:
    """Whether a frame asks for a call's end: one that is dropped is "called" as well, where Python does not ask."""
    return frame is not None and "next(ending" in linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def _is_called_by_name(frame: FrameType) -> bool:
    """Whether a function of Python has called this one, as it seems: then Python does not ask when it returns."""
    return frame.f_back is not None and frame.f_code.co_name in frame.f_back.f_code.co_names


def interrupt_finalizers(nth: int, act: Callable[[], object], rooms: tuple[str, ...] = MEMORY) -> bool:
    """Run `act`, with an interrupt at the Nth point within finalizers, the line where each begins included.

    Python prints such an interrupt, and drops what is left of the finalizer; here it is not printed.
    """
    left = nth

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if _is_here(frame, event, rooms, returns=False, finalizers=True):
            left -= 1
            if not left:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before, hook = sys.getprofile(), sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(before)
        sys.unraisablehook = hook
    return left <= 0


def interrupt(nth: int, act: Callable[[], object], rooms: tuple[str, ...] = MEMORY, *, returns: bool = True) -> bool:
    """Run `act`, with an interrupt at the Nth point of the rooms where one can come; whether there are as many.

    With `returns` also where a function of Python has returned that an object of C called: a partial, a class.
    """
    left = nth
    shots: list[object] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if not _is_here(frame, event, rooms, returns):
            return
        left -= 1
        if left:
            return
        sys.setprofile(None)
        if event != "return":
            raise KeyboardInterrupt
        shot = _Shot()
        shots.append(weakref.ref(shot, _send))  # it goes when this function has returned, and so in C

    before = sys.getprofile()
    made = None  # kept until the interrupts are over: they are to come while things are made, not while they are undone
    with signals() if returns else contextlib.nullcontext():
        sys.setprofile(profile)
        try:
            made = act()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(before)
    del made
    return left <= 0


def interrupt_again(nths: Sequence[int], act: Callable[[], object], rooms: tuple[str, ...] = MEMORY) -> list[int]:
    """Run `act`, with an interrupt at a point, and others while that one is dealt with.

    Parameters
    ----------
    nths : sequence of int
        The point at which the first comes, counted from the beginning; of each further one how many points after the
        one before it.

    Returns
    -------
    list of int
        How many points there were up to the first interrupt, from there to the second, and so on: as many as `nths`
        where all came; the last of them until the end where not.
    """
    came, seen = 0, [0]

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal came
        if not _is_here(frame, event, rooms, returns=False):
            return
        seen[came] += 1
        if seen[came] < nths[came]:
            return
        came += 1
        sys.setprofile(None)
        if came < len(nths):
            seen.append(0)
            # Python drops a profile function that raises: what follows is watched from where the error is seen next.
            outer: FrameType | None = frame
            while outer is not None:
                outer.f_trace, outer.f_trace_lines, outer = watch, False, outer.f_back
            sys.settrace(watch)
        raise KeyboardInterrupt

    def watch(frame: FrameType, event: str, argument: object) -> object:
        if event == "exception":
            sys.settrace(None)
            sys.setprofile(profile)
        return watch

    before, tracing = sys.getprofile(), sys.gettrace()
    made = None
    sys.setprofile(profile)
    try:
        made = act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)
        sys.settrace(tracing)
    del made
    return seen


def keeping(act: Callable[[], object], kept: list[BaseException]) -> Callable[[], object]:
    """Return what does the same, and keeps the error that it raises, with all that its frames hold."""

    def keep() -> object:
        try:
            return act()
        except BaseException as error:
            kept.append(error)
            raise

    return keep


def pairs(
    make: Callable[[], Callable[[], object]], most: int, seed: int, rooms: tuple[str, ...] = MEMORY, *, again: int = 3
) -> Iterator[tuple[int, int]]:
    """Yield points for two interrupts: `most` first ones, as :func:`chosen` picks them, and `again` seconds of each.

    Parameters
    ----------
    make : callable
        Returns what is to be interrupted, anew; it is called for each first point, to see how many come after that.
    """
    pick = random.Random(seed)
    for first in chosen(points(make(), rooms), most, seed):
        found = interrupt_again([first, sys.maxsize], make(), rooms)
        if len(found) < 2 or not found[1]:
            continue
        for second in sorted(pick.sample(range(1, found[1] + 1), min(again, found[1]))):
            yield first, second


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt in a block, but in finalizers; one that comes late is nobody's."""

    def handle(number: int, frame: FrameType | None) -> None:
        if not in_a_finalizer(frame):
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
        _ask()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)


def _ask() -> None:
    """Let Python ask for signals."""


def points(act: Callable[[], object], rooms: tuple[str, ...]) -> list[Point]:
    """Run `act` and return the points where an interrupt could have come, but those where a function has returned."""
    found: list[Point] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if _is_here(frame, event, rooms, returns=False):
            code = frame.f_code
            called = getattr(argument, "__name__", code.co_name)
            found.append((os.path.basename(code.co_filename), frame.f_lineno, event, called))

    before = sys.getprofile()
    sys.setprofile(profile)
    made = None
    try:
        made = act()
    finally:
        sys.setprofile(before)
    del made
    return found


def chosen(found: Sequence[Point], most: int, seed: int) -> Iterator[int]:
    """Yield the numbers of `most` points: of each different one its first time, and then others, at random.

    ``make test`` takes :data:`SAMPLE` of these, others at each commit.
    """
    first = {point: number for number, point in reversed(list(enumerate(found, 1)))}
    each = sorted(first.values())
    pick = random.Random(seed)
    if len(each) > most:
        each = sorted(pick.sample(each, most))
    rest = sorted(set(range(1, len(found) + 1)) - set(each))
    more = sorted(pick.sample(rest, min(len(rest), most - len(each))))
    yield from samples.some([*each, *more], SAMPLE)
