"""The signals that end a keeper: its loop hears of them, and from its end on they are ignored.

Not asyncio's: at its end the loop would give each signal its default action back, and so would the interpreter at its
own. A keeper that is told once more, by a service manager that tells every process of a service, would die of that in
the middle of closing, with the status of a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable


class EndingSignals:
    """The signals that end this process: `told` is called in a turn of `loop`, once or more.
    Made in the main thread; the loop may be closed only after :meth:`ignore`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, told: Callable[[], None]) -> None:
        self._loop, self._told = loop, told
        self._heard, self._wakes = socket.socketpair()
        self._heard.setblocking(False)
        self._wakes.setblocking(False)
        loop.add_reader(self._heard, self._hear)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)  # full, it has been told often enough
        self._numbers = _ending()
        for number in self._numbers:
            signal.signal(number, _nothing)
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)  # our starter may have had them blocked, and so we

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = self._heard.recv(4096)
            if any(number in numbers for number in self._numbers):
                self._told()

    def ignore(self) -> None:
        """Hear of them no more, and ignore them as long as this process is there."""
        # Blocked as well: what came between Python's last look and the other action is said to be ignored, on stderr.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)  # in every thread: those that were started before have them unblocked
        signal.set_wakeup_fd(-1)
        self._loop.remove_reader(self._heard)
        self._heard.close()
        self._wakes.close()


def _nothing(_number: int, _frame: object) -> None:
    """Handle a signal: only with a handler is its number written to the wakeup descriptor."""


def _ending() -> tuple[signal.Signals, ...]:
    """Return the signals that end a keeper. SIGHUP is ignored if it was before (nohup), or without a terminal to lose:
    many programs take it as a request to read their configuration again."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        try:
            os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
            return signal.SIGTERM, signal.SIGINT, signal.SIGHUP
        except OSError:  # ENXIO: no controlling terminal
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return signal.SIGTERM, signal.SIGINT
