"""Which processes have memory mapped because they were forked from this one: only the kernel knows, in ``/proc``.

A forked child keeps host memory mapped until it ends or becomes another program. A process that was seen without the
memory never gets it, nor do its children, so that it is looked at once; looks go on until two in a row missed no
process. A process that cannot be looked at, and may be a child, counts as having it.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from ..driver.protocol import HostMemory
from ..lifetime import forked_since, last_fork
from .allocation import Memory
from .chunks import Chunk

_LOOKS = 32  # at most, for two in a row that miss nobody
_INIT = (0, 1)  # whose children orphans become, unless an ancestor asked for them

_File = tuple[bytes, bytes]  # a device and an inode, as the kernel writes them
_NONE: frozenset[_File] = frozenset()


class _Process(NamedTuple):
    """What is known of a process without looking at its memory: its parent, and what tells it from others."""

    parent: int
    started: int  # clock ticks since the machine was booted
    uid: int  # 0 also of one that nobody may look at
    is_over: bool  # what it maps is to be found with another thread of it, if at all
    has_threads: bool


def is_inherited(chunk: Chunk) -> bool:
    """Whether a child was forked since a chunk's memory was mapped first, and may share it; nothing of a GPU works
    in one."""
    return _forked_at(chunk) is not None and isinstance(chunk.undo.where.driver, HostMemory)


def may_be_inherited(memory: Memory) -> bool:
    """Whether a child was forked since memory was mapped first, as far as that is known of memory by itself."""
    since = memory.first_mapped
    return bool(since) and forked_since(since) is not None and isinstance(memory.driver, HostMemory)


def _forked_at(chunk: Chunk) -> float | None:
    memory = chunk.known  # which may have been mapped before, and was not made anew since
    return chunk.mapping.forked_at if memory is None else forked_since(memory.first_mapped)


class Children:
    """Who was forked from this process, or from its children, and has memory of it mapped: as of the first question."""

    __slots__ = ("_at", "_files", "_fork", "_here", "_known", "_me", "_mine", "_others", "_uids", "_unknown")

    _files: frozenset[_File]
    _mine: _Process

    def __init__(self) -> None:
        self._fork = last_fork()
        self._here: dict[int, _File] | None = None  # by the first address
        self._others: dict[str, frozenset[_File] | None] = {}  # by who it is; None: nobody may look what it has
        self._unknown = ""  # why it cannot be told who has something
        self._at = "/proc"  # what is looked at
        self._me, self._uids = os.getpid(), set(os.getresuid())
        self._known: dict[tuple[int, int], frozenset[_File] | None] = {}  # by number and start

    @property
    def is_old(self) -> bool:
        """Whether something was forked since this was made."""
        return self._fork != last_fork()

    def of(self, chunk: Chunk) -> tuple[str, ...]:
        """Return who has a chunk's memory mapped, or may."""
        when = _forked_at(chunk)
        if when is None or not is_inherited(chunk):
            return ()
        if self._here is None:
            self._look()
        file = (self._here or {}).get(chunk.undo.where.address + chunk.start)
        found = [who for who, files in self._others.items() if files is None or file in files]
        if not found and (file is None or self._unknown):
            at = time.strftime("%H:%M:%S", time.localtime(when))
            why = self._unknown or "this process's own mappings do not show it"
            return (f"a forked child, of {at}, which may have it mapped ({why})",)
        return tuple(found)

    def _look(self) -> None:
        """Look at all processes until two looks in a row have missed nobody, and found the same."""
        self._here = {}
        try:
            self._here = _files(str(self._me))
            self._mine = _stat(str(self._me))
        except OSError as error:
            self._unknown = f"there is no /proc to see whether it has: {error.strerror or error}"
            return
        self._files = frozenset(self._here.values())
        before: object = None
        for _ in range(_LOOKS):
            try:
                missed = self._look_once()
            except OSError as error:
                self._unknown = f"{self._at} cannot be looked at: {error.strerror or error}"
                break
            if missed is None and before == self._others:
                break
            before = self._others if missed is None else None
        else:
            self._unknown = f"processes end before they can be looked at, such as {missed or 'those that have it'}"

    def _look_once(self) -> str | None:
        """Look at all processes, and return one who has ended before it was looked at and may have been a child.
        Who has some of the memory is in `_others`, and which files; None where nobody may look."""
        processes: dict[int, _Process] = {}
        self._at = "/proc"
        missed: str | None = None
        for pid in _pids():  # all of them before any is looked at: who is whose child is read once of each
            if pid == self._me:
                processes[pid] = self._mine
                continue
            self._at = f"process {pid}"
            try:
                processes[pid] = _stat(str(pid))
            except (FileNotFoundError, ProcessLookupError):
                missed = self._at
            except PermissionError:  # /proc is mounted so that it hides what nobody may look at: who knows whose it is
                continue
        kin = _kin(processes, self._me)
        self._others = {}
        for pid, is_sure in kin.items():
            self._at = f"process {pid}"
            process = processes[pid]
            key = pid, process.started
            if process.is_over and not process.has_threads:
                if (
                    key not in self._known or self._known[key] != _NONE
                ):  # it was not when it was listed: who knows whom it has forked
                    missed = self._at
                self._known[key] = _NONE
            elif key not in self._known:
                try:
                    has = set(_files(str(pid)).values())
                    if not has and self._is_headless(pid):
                        has.update(*[_files(f"{pid}/task/{thread}").values() for thread in _threads(pid)])
                    self._known[key] = self._files & has
                except (FileNotFoundError, ProcessLookupError):
                    if is_sure or self._may_be_mine(pid, process.uid):
                        missed = self._at
                    continue
                except PermissionError:
                    self._known[key] = None if is_sure or self._may_be_mine(pid, process.uid) else _NONE
            files = self._known[key]
            if files is None:
                who = f"a forked child, process {pid}" if is_sure else f"process {pid}, which may be a forked child"
                self._others[f"{who}, and which nobody may look at"] = None
            elif files:
                self._others[f"a forked child, process {pid}"] = files
        return missed

    @staticmethod
    def _is_headless(pid: int) -> bool:
        """Whether the first thread of a process has ended, and others go on."""
        process = _stat(str(pid))
        return process.is_over and process.has_threads

    def _may_be_mine(self, pid: int, uid: int) -> bool:
        """Whether an orphan may be one of ours, as far as its user tells: who is not root cannot become another."""
        if 0 in self._uids or uid in self._uids:
            return True
        return uid == 0 and bool(_uids(pid) & self._uids)  # nobody may look at it: then it is said to be root's


def _kin(processes: dict[int, _Process], me: int) -> dict[int, bool]:
    """Return which processes are descended from a process (True), or may be (False), in one walk over all.
    An orphan becomes a child of init or of a subreaper among the ancestors, so a later child of those may be."""
    above = set(_INIT)
    at, began = me, processes[me].started
    while at in processes and at not in above:
        above.add(at)
        at = processes[at].parent
    above.discard(me)
    verdicts: dict[int, bool | None] = {me: True}  # None: it is not
    for pid in processes:
        path: list[int] = []
        at = pid
        while at not in verdicts:
            path.append(at)
            verdicts[at] = False  # until it is known: also of who has ended meanwhile, and in a circle of such numbers
            process = processes.get(at)
            if process is not None and (at in above or process.started < began):
                verdicts[at] = None
            if process is None or verdicts[at] is None or process.parent in above:
                break
            at = process.parent
        found = verdicts[at]
        for number in path:
            verdicts[number] = found
    return {pid: verdict for pid, verdict in verdicts.items() if verdict is not None and pid in processes and pid != me}


def _pids() -> list[int]:
    """Return the processes that there are, the latest first: those are the first to be gone."""
    return sorted(map(int, filter(str.isdigit, os.listdir("/proc"))), reverse=True)


def _threads(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/task")


def _stat(pid: str) -> _Process:
    with open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
        uid = os.fstat(stat.fileno()).st_uid
    return _Process(int(fields[1]), int(fields[19]), uid, fields[0] in b"ZX", int(fields[17]) > 1)


def _uids(pid: int) -> set[int]:
    """Return which users a process is, which may be asked of any."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            said = status.read().partition(b"\nUid:")[2].partition(b"\n")[0]
        return set(map(int, said.split()))
    except OSError:
        pass
    return set()


def _files(pid: str) -> dict[int, _File]:
    """Return which memory without a name a process has mapped, by the first address of each mapping."""
    found: dict[int, _File] = {}
    with open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            if b"/memfd:" not in line:
                continue
            span, _, _, device, inode, _ = line.split(maxsplit=5)
            found[int(span.partition(b"-")[0], 16)] = (device, inode)
    return found
