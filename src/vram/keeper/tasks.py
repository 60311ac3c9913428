"""Tasks that go on while nobody waits for them: one thread for each keeper takes one step of each task at a time.

A task follows a name, or waits for an event loop; each would sleep nearly always in a thread of its own, and would
delay revocations in the thread of :mod:`.notices`. A step never waits for what may never come: events call
:meth:`Worker.wake`, which takes no lock and never waits, so that finalizers may call it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

from ..errors import ClosedError, VramError, WaitTimeoutError
from ..sharing.channel import Channel
from .pending import hear, listen_for

if TYPE_CHECKING:
    from .pending import PendingLease

_NAP = 1.0  # seconds after which answers are looked for again: they may be late by then


class Task(Protocol):
    """A task of a worker; once it `is_over` it is stepped once more, to let go of what it has.
    `pending` is the lease that it waits for over the connection to the keeper."""

    is_over: bool
    pending: PendingLease | None

    def step(self) -> float | None:
        """Do what can be done now, without raising.
        Return the :func:`time.monotonic` of the next step; None if that is when the task is woken."""


class Worker:
    """The thread of one keeper, and what goes on in it. Made by :func:`worker_of`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._pid = os.getpid()
        # Reentrant: a finalizer, or a signal handler, may add a task where this thread was adding one.
        self._lock = threading.RLock()
        self._due: dict[Task, float | None] = {}
        self._woken: deque[Task] = deque()
        self._thread: threading.Thread | None = None
        self._bell: tuple[Channel, Channel] | None = None  # (the thread's to read, everybody's to write)

    def add(self, task: Task) -> None:
        """Have a task go on, from now to its end. Raises RuntimeError if no thread can be started."""
        with self._lock:
            self._due[task] = None
            try:
                self._start()
            except BaseException:
                self._due.pop(task, None)
                raise
        self.wake(task)

    def wake(self, task: Task) -> None:
        """Have a task stepped soon. Never waits: finalizers and callbacks come here."""
        if self._pid == os.getpid():
            self._woken.append(task)
            self.ring()

    def ring(self) -> None:
        """Have the thread look at what was woken, and for answers."""
        bell = self._bell
        if bell is not None:
            with contextlib.suppress(VramError, OSError):  # full, or closed: it is awake, or there is nothing to do
                bell[1].send(b"!", timeout=0)

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            bell = Channel.pair()
            thread = threading.Thread(target=self._run, args=(bell[0],), name="vram: following", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # there is none to be had
                for end in bell:
                    end.close()
                raise
            self._bell, self._thread = bell, thread

    # -- in the thread ----------------------------------------------------------------------------------------------
    def _run(self, bell: Channel) -> None:
        while self._sleep(bell):
            now = time.monotonic()
            woken = self._take_woken()
            for task, due in list(self._due.items()):
                if task not in woken and task.pending is None and (due is None or due > now):
                    continue
                is_over = task.is_over  # before the step, which lets go of everything then
                self._due[task] = _stepped(task)
                if is_over:
                    self._due.pop(task, None)
            del woken
            task = None  # type: ignore[assignment]  # or what it knows stayed until the next news
            if self._is_over():
                return
        bell.close()  # nobody rings it any more

    def _take_woken(self) -> set[Task]:
        found = set()
        with contextlib.suppress(IndexError):
            while True:
                found.add(self._woken.popleft())
        return found

    def _sleep(self, bell: Channel) -> bool:
        """Wait for the bell, an answer or the next step; return whether there still is a bell."""
        waiting = [task.pending for task in list(self._due) if task.pending is not None]
        times = [due for due in list(self._due.values()) if due is not None]
        poll = select.poll()
        try:
            poll.register(bell.fileno(), select.POLLIN)
        except ClosedError:
            return False
        if waiting:
            times.append(time.monotonic() + _NAP)
        connections = {pending.connection for pending in waiting}
        for connection in connections:
            with contextlib.suppress(ClosedError):
                poll.register(listen_for(connection, self.ring), select.POLLIN)
        if not self._woken and not any(pending.has_come for pending in waiting):
            left = None if not times else max(0.0, min(times) - time.monotonic())
            poll.poll(None if left is None else left * 1000 + 1)
        for connection in connections:
            hear(connection)
        try:
            while True:
                bell.recv(timeout=0)
        except WaitTimeoutError:
            return True
        except VramError:
            return False

    def _is_over(self) -> bool:
        """Close the bell if there is nothing to do any more."""
        if not self._lock.acquire(blocking=False):
            return False  # somebody adds a task, and wakes us
        try:
            if self._due:
                return False
            bell, self._bell, self._thread = self._bell, None, None
            for end in bell or ():
                end.close()
            self._woken.clear()
            return True
        finally:
            self._lock.release()


def _stepped(task: Task) -> float | None:
    try:
        return task.step()
    except BaseException as error:  # noqa: BLE001  (a mistake of ours: others go on, and so does it)
        report(error)
        return time.monotonic() + _NAP


def report(error: BaseException) -> None:
    """Say aloud what somebody else's code raised, as what ends a thread is; but the thread goes on."""
    threading.excepthook(
        threading.ExceptHookArgs((type(error), error, error.__traceback__, threading.current_thread()))
    )


_workers: dict[str, Worker] = {}  # changed in single steps, without a lock


def worker_of(path: str) -> Worker:
    """Return the worker of the keeper, or lender, at a path. It has a thread as long as it has tasks."""
    return _workers.setdefault(path, Worker(path))


def _after_fork_in_child() -> None:
    """The threads are the parent's, and so is what goes on in them."""
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
