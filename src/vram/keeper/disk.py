"""Entries that survive a reboot: a folder that has what this keeper's own user published, written behind.

A keeper maps no memory, and waits for no disk. So a program does the work (:mod:`vram.entries.persist`): it is given
names and their versions, has the folder agree with them, and ends. The thread that waits for it is not the keeper's.
Versions with a time to live, and those that readers may write to, are as good as removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import subprocess
import sys
import threading
from asyncio import TimerHandle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from ..errors import AccessDeniedError, BusyError, UsageError
from ..spec import format_count
from . import event_log
from .paths import make_own
from .records import Version

if TYPE_CHECKING:
    from .server import KeeperServer

PROGRAM = [sys.executable, "-P", "-m", "vram.entries.persist"]
SOON = 1.0  # seconds from a change until it is saved: what comes together is saved together
REST = 30.0  # seconds at least between two saves of an entry
AGAIN = 60.0  # seconds until what failed is tried again
_TWICE = 1.0  # seconds in which a signal that comes again is the same one: from a terminal, and from the guardian
_ROUNDS = 3  # at the end, for what is published meanwhile
_EVENTS = {
    "saved": ("vram.disk.saved", "vram.disk.not_saved"),
    "restored": ("vram.disk.restored", "vram.disk.not_restored"),
    "removed": ("vram.disk.removed", "vram.disk.not_removed"),
}
_START = ""  # among the names that are due: all of them, and what the folder has besides


def own_folder(folder: str) -> str:
    """Return a folder without links, made if it is missing. Raises AccessDeniedError if others may write to it."""
    if not folder:
        raise UsageError("--persist '' is no folder")
    try:
        return str(make_own(Path(folder)))
    except OSError as error:
        raise AccessDeniedError(f"{error}: entries are published from there, so it has to be yours alone") from None


class Wanted(Struct, array_like=True):
    """An entry as the folder is to have it: its version, 0 for none, and the updates that this has had in place."""

    name: str
    version: int
    updates: int


class Order(Struct):
    """The input of the program. Version numbers are those of the keepers of one `instance`, which follow each other.
    With `is_start` the folder may have what no keeper of this instance had, which is published."""

    folder: str
    socket: str
    instance: str
    prefix: str
    is_start: bool
    rows: list[Wanted]


class Outcome(Struct):
    """A line of the program's output: what was done to an entry, or not done, and why not."""

    name: str
    done: str
    error: str = ""
    is_final: bool = False  # trying again makes no sense until there is another version


class Disk:
    """The folder of a keeper, for names that begin with `prefix`, as seen in the thread of the keeper's loop.
    `instance` is the same for keepers that follow each other, `follows` whether this one follows another."""

    def __init__(self, server: KeeperServer, folder: str, prefix: str, instance: str, *, follows: bool) -> None:
        self.folder, self.prefix, self.instance, self.follows = folder, prefix, instance, follows
        self.published = 0  # entries, out of the folder
        self._server = server
        self._due: dict[str, float] = {}  # names, and when
        self._saved: dict[str, float] = {}  # when an entry was saved last, as long as that is not long ago
        self._told: dict[str, str] = {}  # what was said of an entry that failed
        self._timer: TimerHandle | None = None
        self._program: subprocess.Popen[bytes] | None = None
        self._is_running = False
        self._ready: Callable[[], None] | None = None
        self._over: Callable[[], None] | None = None
        self._over_since, self._rounds = 0.0, _ROUNDS
        self._lock = self._take()

    def _take(self) -> int:
        """Return the lock of the folder, which ends with this process. Raises BusyError if another keeper has it."""
        try:
            lock = os.open(os.path.join(self.folder, ",keeper"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:  # nothing can be saved there, which the program says; what is there is published
            return -1
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the process of a keeper that is followed has ended
        except BlockingIOError:
            os.close(lock)
            raise BusyError(f"another keeper saves in {self.folder}: give each a folder of its own") from None
        return lock

    def begin(self, ready: Callable[[], None]) -> None:
        """Have the folder and the keeper agree. A keeper that follows no other is ready once what the folder has is
        published."""
        if self.follows:
            ready()
        else:
            self._ready = ready
        self._run(is_start=True)

    def note(self, changed: Iterable[object]) -> None:
        """Some records of the catalogue have changed."""
        soon = self._server.now() + SOON
        for one in changed:
            if isinstance(one, Version) and self._is_ours(one):
                rest = self._saved.get(one.name, 0.0) + REST if self._wanted(one.name).version else 0.0
                # No later than it was due before, or what changes all the time would never be.
                when = min(max(soon, rest), self._due.get(one.name, math.inf))
                self._due[one.name] = when
                self._plan(when)

    def finish(self, then: Callable[[], None]) -> bool:
        """Save what is due, and then call something; return False if there is nothing, or at the second call."""
        now = self._server.now()
        if self.is_ending:
            return self._rounds > 0 and now - self._over_since < _TWICE
        if self._ready is not None and self._program is not None:  # what is not published stays where it is
            self._ready = None
            self._program.kill()
        self._due.pop(_START, None)
        if not (self._is_running or self._due):
            return False
        self._over, self._over_since = then, now
        if not self._is_running:
            self._look()
        return True

    @property
    def is_ending(self) -> bool:
        """Whether the keeper only waits for what is to be saved."""
        return self._over is not None

    def _is_ours(self, version: Version) -> bool:
        return self._server.is_own(version.owner) and version.name.startswith(self.prefix)

    def _wanted(self, name: str) -> Wanted:
        """Return what the folder is to have of a name."""
        version = self._server.catalogue.names.current(name)
        if version is None or not self._is_ours(version) or version.expires is not None or version.writable:
            return Wanted(name, 0, 0)
        return Wanted(name, version.number, version.updates)

    def _plan(self, when: float) -> None:
        """Look at what is due at that time, at the latest."""
        loop = self._server.loop
        if loop is None or self._is_running or (self._timer is not None and self._timer.when() <= when):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when, self._look)

    def _look(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = math.inf if self.is_ending else self._server.now()
        names = [name for name, when in self._due.items() if when <= now]
        self._rounds -= self.is_ending
        if names and not self._server.paused and self._rounds >= 0:
            for name in names:
                del self._due[name]
            self._run(names, is_start=_START in names)
        elif self._over is not None:
            self._rounds = 0
            self._over()
        elif self._due:
            self._plan(min(self._due.values()))

    def _run(self, names: Iterable[str] = (), *, is_start: bool = False) -> None:
        """Run the program for some names, or for all."""
        self._is_running = True
        if is_start:
            names = {version.name for version in self._server.catalogue.versions.values() if self._is_ours(version)}
        rows = [self._wanted(name) for name in names if name]
        given = Order(self.folder, self._server.path, self.instance, self.prefix, is_start, rows)
        loop = self._server.loop

        def work() -> None:
            said, error = b"", ""
            try:
                with subprocess.Popen(PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
                    self._program = program
                    said, _ = program.communicate(msgspec.json.encode(given))
                if program.returncode:
                    error = f"the program that saves ended with status {program.returncode}"
            except OSError as failure:
                error = str(failure)
            with contextlib.suppress(RuntimeError):  # the keeper has ended
                loop.call_soon_threadsafe(self._done, rows, is_start, said, error)

        try:
            threading.Thread(target=work, name="vram: disk", daemon=True).start()
        except RuntimeError as failure:  # there can be no thread now
            self._done(rows, is_start, b"", str(failure))

    def _done(self, rows: list[Wanted], is_start: bool, said: bytes, error: str) -> None:
        """Take note of what the program did; what it did not do is due again."""
        self._is_running, self._program, now = False, None, self._server.now()
        self._saved = {name: when for name, when in self._saved.items() if when + REST > now}
        outcomes = [msgspec.json.decode(line, type=Outcome) for line in said.splitlines()]
        if error:
            known = {outcome.name for outcome in outcomes}
            outcomes += [Outcome(row.name, "saved", error) for row in rows if row.name not in known]
            outcomes += [Outcome(_START, "restored", error)] if is_start else []
        for one in outcomes:
            self._say(one)
            if one.error:
                if not one.is_final:  # of what cannot be published the catalogue knows nothing: a start looks at it
                    self._due.setdefault(_START if one.done == "restored" else one.name, now + AGAIN)
            elif one.done == "saved":
                self._saved[one.name] = now
            elif one.done == "restored":
                self.published += 1
        ready, self._ready = self._ready, None
        if ready is not None:
            ready()
        if self.is_ending:
            for one in outcomes:  # there is no other time
                if one.error:
                    self._due.pop(one.name or _START, None)
        self._look()

    def _say(self, one: Outcome) -> None:
        """Log an outcome; of a failure once, until it is another one."""
        fields = {"vram.entry.name": one.name or self.folder}
        if not one.error:
            self._told.pop(one.name, None)
            event_log.say(_EVENTS[one.done][0], fields=fields)
        elif self._told.get(one.name) != one.error:
            self._told[one.name] = one.error
            event_log.say(
                _EVENTS[one.done][1], logging.WARNING, fields={**fields, "error.message": one.error},
                otherwise=f"vram keep: {one.name or self.folder}: not {one.done}: {one.error}",
            )  # fmt: skip

    def __str__(self) -> str:
        return f"{format_count(self.published, 'entry', 'entries')} published from {self.folder}"
