"""Ctrl-C at a point of one's choice: what the tests of I12 have in common.

Python asks for signals where a function begins, where a loop jumps back, where a call of a C function returns, and
where one returns that C has called. A profile function sees all of these but the second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import vram

__all__ = [
    "MEMORY",
    "Point",
    "chosen",
    "in_a_finalizer",
    "interrupt",
    "interrupt_finalizers",
    "points",
    "room",
    "signals",
]

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
    if finalizers:
        return in_a_finalizer(frame)
    # A generator is also "called" when it is dropped half done, where Python does not ask.
    return frame.f_code.co_name != "<genexpr>" and not in_a_finalizer(frame)


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
    """Yield the numbers of `most` points: of each different one its first time, and then others, at random."""
    first = {point: number for number, point in reversed(list(enumerate(found, 1)))}
    each = sorted(first.values())
    pick = random.Random(seed)
    if len(each) > most:
        each = sorted(pick.sample(each, most))
    rest = sorted(set(range(1, len(found) + 1)) - set(each))
    yield from each
    yield from sorted(pick.sample(rest, min(len(rest), most - len(each))))
