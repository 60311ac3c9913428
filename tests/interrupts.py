"""Ctrl-C at a point of one's choice: what the tests of I12 have in common.

Python delivers an interrupt where a function begins, where a loop jumps back and where a call of a C function returns.
A profile function sees the first and the last of these, and what it raises goes up from there.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import vram

__all__ = ["Point", "chosen", "interrupt", "points", "room"]

Point = tuple[str, int, str, str]  # file, line, event, and what was called
_LIBRARY = os.path.dirname(vram.__file__)
_STANDARD = sysconfig.get_paths()["stdlib"]


def room(*names: str) -> tuple[str, ...]:
    """Return how the files of rooms of vram begin, and of modules of Python: ``"memory/"``, ``"std:socket"``."""
    return tuple(
        os.path.join(_STANDARD, name.removeprefix("std:")) if name.startswith("std:") else os.path.join(_LIBRARY, name)
        for name in names
    )


def in_a_finalizer(frame: FrameType | None) -> bool:
    """Whether Python would print an interrupt that comes here, and go on: nobody is told of it."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _is_here(frame: FrameType, event: str, rooms: tuple[str, ...]) -> bool:
    if event not in ("call", "c_return"):
        return False
    return frame.f_code.co_filename.startswith(rooms) and not in_a_finalizer(frame)


def interrupt(nth: int, act: Callable[[], object], rooms: tuple[str, ...]) -> bool:
    """Run `act`, with an interrupt at the Nth point of the rooms where one can come; whether it came."""
    left = nth

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if _is_here(frame, event, rooms):
            left -= 1
            if not left:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(profile)
    made = None  # kept until the interrupts are over: they are to come while things are made, not while they are undone
    try:
        made = act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    del made
    return left <= 0


def points(act: Callable[[], object], rooms: tuple[str, ...]) -> list[Point]:
    """Run `act` and return the points where an interrupt could have come."""
    found: list[Point] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if _is_here(frame, event, rooms):
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
