"""Interrupts on purpose: at each point of the rooms below where Python can raise one, one after the other."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from types import FrameType

__all__ = ["in_a_finalizer", "interrupt", "interrupts"]

ROOMS = tuple(f"{os.sep}vram{os.sep}{room}" for room in (f"memory{os.sep}", f"driver{os.sep}", "lifetime.py"))
# As the kernel's signal does it: Python handles it when it next asks. Called from C, so that it does not ask at once.
_send = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyErr_SetInterrupt", ctypes.pythonapi))


class _Shot:
    """Its end sends the signal."""


def in_a_finalizer(frame: FrameType | None) -> bool:
    """Whether Python would print an interrupt that comes here, and go on: nobody is told of it."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def _is_called_by_name(frame: FrameType) -> bool:
    """Whether a function of Python has called this one, as it seems: then Python does not ask when it returns."""
    return frame.f_back is not None and frame.f_code.co_name in frame.f_back.f_code.co_names


def interrupt(nth: int, act: Callable[[], object]) -> bool:
    """Run `act`, with an interrupt at the Nth point of the rooms; whether there are as many.

    The points are where a function begins, where a call of a builtin function has returned, and wherever Python next
    asks for signals after a function has returned: at once if a partial, a class or another object of C has called it.
    """
    number, met = count(1), False
    shots: list[object] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal met
        if event not in ("call", "c_return", "return") or not any(room in frame.f_code.co_filename for room in ROOMS):
            return
        if event == "return" and _is_called_by_name(frame):
            return
        if (
            frame.f_code.co_name == "<genexpr>"
        ):  # also "called" when one is dropped half done, where Python does not ask
            return
        if in_a_finalizer(frame) or next(number) != nth:
            return
        sys.setprofile(None)
        met = True
        if event != "return":
            raise KeyboardInterrupt
        shot = _Shot()
        shots.append(weakref.ref(shot, _send))  # it goes when this function has returned, and so in C

    before = sys.getprofile()
    made = None  # kept until the interrupts are over: they are to come while things are made, not while they are undone
    with interrupts():
        sys.setprofile(profile)
        try:
            made = act()
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(before)
    del made
    return met


@contextmanager
def interrupts() -> Iterator[None]:
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
