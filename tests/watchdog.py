"""A run of tests that always ends, with a summary, and leaves no process behind.

A run that takes longer than ``VRAM_TEST_LIMIT`` seconds, or is told to end by SIGTERM, says which tests were running,
dumps every stack, kills what it started and is red. So is a run in which a worker of pytest-xdist died: no worker is
replaced, since a replacement waits for ever for work that ``--dist loadfile`` never gives it.

A test that failed may have spoiled what it shares with its neighbours, such as a process that serves a whole module:
what outlives a test is taken down after one that failed, and made anew for the next.

All processes of a run carry its mark in their environment, so that those that no longer have a living parent are found.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Renewal", "Watchdog", "install"]

_MARK = "VRAM_TEST_RUN"
_GRACE = 60.0  # seconds that pytest has to end after it was told to, and that a process has which ends on its own
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


def install(config: pytest.Config) -> None:
    """Watch over this run, from the process that the others report to. Call it in ``pytest_configure``."""
    config.pluginmanager.register(Renewal(), "renewal")
    # Ignored in a job in the background of a shell, and in all that it starts: what a test interrupts would go on.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        # SIGABRT is sent for its stacks, not for a core file.
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        return
    if getattr(config.option, "maxworkerrestart", "0") is None:
        config.option.maxworkerrestart = "0"
    config.pluginmanager.register(Watchdog(config, float(os.environ.get("VRAM_TEST_LIMIT") or "inf")), "watchdog")


class Renewal:
    """After a test that failed, fixtures of every scope are taken down."""

    def __init__(self) -> None:
        self._failed_before = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Remember how many tests had failed."""
        self._failed_before = item.session.testsfailed
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Take everything down, not only what the next test does not need, if this one failed in any phase."""
        try:
            result = yield
        except BaseException:
            item.session._setupstate.teardown_exact(None)
            raise
        if item.session.testsfailed > self._failed_before:
            item.session._setupstate.teardown_exact(None)
        return result


class Watchdog:
    """The plugin. Its thread waits for the end, the limit, and deaths of workers."""

    def __init__(self, config: pytest.Config, limit: float) -> None:
        self._several = bool(getattr(config.option, "tx", None))
        self._limit = limit
        self._mark = f"{os.getpid()}.{time.monotonic_ns()}"
        self._before = os.environ.get(_MARK, "")
        os.environ[_MARK] = f"{self._before} {self._mark}"  # a run within a run belongs to both
        self._stderr = os.dup(2)  # pytest takes the other one
        self._running: dict[str, float] = {}
        self._ended = threading.Event()
        self._told: str | None = None
        self._wrong: list[str] = []
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._handler: Any = None

    # -- what pytest says -------------------------------------------------------------------------------------------
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        """Begin. Tests of a run without workers see the signal as it is elsewhere."""
        if self._several:
            self._handler = signal.signal(signal.SIGTERM, self._terminated)
        if self._several or self._limit < float("inf"):
            self._thread.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note what runs."""
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Note what has run."""
        self._running.pop(nodeid, None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Note the death of a worker, which need not have been running a test."""
        if error:
            self._wrong.append(f"worker {node.gateway.id} died: {str(error).strip().splitlines()[-1]}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """End, once the workers have; what is left after a while is killed, and the run is red."""
        self._ended.set()
        if self._several and self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
        deadline = time.monotonic() + (_GRACE if not self._wrong else 1.0)
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            self._wrong.append(f"was left behind and killed: pid {pid} ({_words(pid)})")
        self._kill(lambda pid: pid in left)
        os.environ[_MARK] = self._before
        if self._wrong and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what went wrong besides the tests."""
        if self._wrong:
            terminalreporter.section("the run itself", red=True)
            for line in self._wrong:
                terminalreporter.line(line)

    # -- the end that comes from outside ------------------------------------------------------------------------------
    def _terminated(self, number: int, frame: object) -> None:
        self._told = "it was ended by SIGTERM"

    def _watch(self) -> None:
        deadline = time.monotonic() + self._limit
        buried: set[int] = set()
        while not self._ended.wait(0.2):
            if self._several:
                self._bury(buried)
            if self._told or time.monotonic() > deadline:
                self._strike(self._told or f"it took longer than {self._limit:g} s (VRAM_TEST_LIMIT)")
                return

    def _bury(self, buried: set[int]) -> None:
        """Kill the children of a dead worker: those that hold its pipe would keep its end from being known."""
        for pid in _children(os.getpid()):
            if _state(pid) == "Z" and pid not in buried:
                buried.add(pid)
                self._kill(lambda pid: not self._is_below_a_living_worker(pid))

    def _is_below_a_living_worker(self, pid: int) -> bool:
        while pid > 1:
            parent = _parent(pid)
            if parent == os.getpid():
                return _state(pid) != "Z"
            pid = parent
        return False

    def _strike(self, why: str) -> None:
        now = time.monotonic()
        running = [f"{nodeid}, for {now - since:.0f} s" for nodeid, since in list(self._running.items())]
        self._wrong.append(f"it did not end: {why}")
        self._wrong += [f"was running: {line}" for line in running] or ["no test was running"]
        os.write(self._stderr, "".join(f"\n{line}" for line in [*self._wrong, "the stacks:", ""]).encode())
        if self._several:
            # A handler of pytest's own makes each dump its stacks as it dies; its death ends the run with a summary.
            for pid in _children(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
            self._until(lambda: all(_state(pid) in "ZX" for pid in _children(os.getpid())), 10.0)
        else:
            faulthandler.dump_traceback(self._stderr)
            os.kill(os.getpid(), signal.SIGINT)
        self._kill(lambda pid: True)
        if not self._until(self._ended.is_set, _GRACE):
            os.write(self._stderr, b"\npytest does not end either; this ends it\n")
            self._kill(lambda pid: True)
            os._exit(1)

    def _until(self, predicate: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not predicate():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    # -- processes ----------------------------------------------------------------------------------------------------
    def _processes(self) -> list[int]:
        """Return the living processes of this run, but for this one."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid() and _state(int(entry.name)) not in "ZX":
                with contextlib.suppress(OSError):  # it is gone, or another user's
                    variables = (entry / "environ").read_bytes().split(b"\0")
                    marks = next((v for v in variables if v.startswith(_MARK.encode() + b"=")), b"").decode()
                    if self._mark in marks.partition("=")[2].split():
                        found.append(int(entry.name))
        return found

    def _left(self) -> list[int]:
        """Return those that do not end with this process, as the helpers of its own multiprocessing do.

        A process that a helper forked, such as a child by the method forkserver, has the same words, and does not.
        """
        return [pid for pid in self._processes() if not _is_helper(pid)]

    def _kill(self, chosen: Callable[[int], bool]) -> None:
        for _ in range(5):  # what one of them starts meanwhile is found the next time
            pids = [pid for pid in self._processes() if chosen(pid)]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                return
            time.sleep(0.05)


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def _state(pid: int) -> str:
    return _stat(pid)[0]


def _parent(pid: int) -> int:
    return int(_stat(pid)[1])


def _is_helper(pid: int) -> bool:
    return _parent(pid) == os.getpid() and any(name in _words(pid) for name in _HELPERS)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120].strip()
    except OSError:
        return "gone"
