"""Ctrl-C at a point of one's choice: a real SIGINT, which Python handles where it next asks for signals."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import NamedTuple

from tests.support import samples

import vram

SAMPLE = 8
Point = tuple[str, int, str, str]  # file, line, event, and what was called
_LIBRARY = os.path.dirname(vram.__file__)
# As the kernel's signal does it: Python handles it when it next asks. Called from C, so that it does not ask at once.
_send = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyErr_SetInterrupt", ctypes.pythonapi))


class Interrupted(NamedTuple):
    """What came of a call with an interrupt.

    Attributes
    ----------
    came : bool
        Whether the call had as many points.
    returned : bool
        Whether the call was done; KeyboardInterrupt came after it then, if it came.
    """

    came: bool
    returned: bool


class _Shot:
    """Its end sends the signal."""


def _is_here(frame: FrameType, event: str) -> bool:
    """Whether Python asks for signals here, in the library, and does not only print what they raise."""
    if event not in ("call", "c_return") or not frame.f_code.co_filename.startswith(_LIBRARY):
        return False
    above: FrameType | None = frame
    while above is not None and above.f_code.co_name != "__del__":
        above = above.f_back
    return above is None


def interrupt(nth: int, act: Callable[[], object]) -> Interrupted:
    """Run `act`, and send SIGINT at the Nth point of the library where Python asks for signals."""
    left, returned = nth, False
    shots: list[object] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal left
        if not _is_here(frame, event):
            return
        left -= 1
        if left:
            return
        sys.setprofile(None)
        shot = _Shot()
        shots.append(weakref.ref(shot, _send))  # it goes when this function has returned, and so in C

    before, hook = sys.getprofile(), sys.unraisablehook
    made = None  # kept until the interrupt is over: it is to come while things are made, not while they are undone
    sys.unraisablehook = lambda said: None if said.exc_type is KeyboardInterrupt else hook(said)
    sys.setprofile(profile)
    try:
        made = act()
        returned = True
        _ask()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(before)
        sys.unraisablehook = hook
    del made
    return Interrupted(left <= 0, returned)


def _ask() -> None:
    """Let Python ask for signals."""


def points(act: Callable[[], object]) -> list[Point]:
    """Run `act` and return the points where an interrupt could have come."""
    found: list[Point] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if _is_here(frame, event):
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
