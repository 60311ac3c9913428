"""Which forked children have memory mapped, looked up in /proc while they come and go: see vram.memory.children."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.support.deadlines import SOON, until
from tests.support.forked import forked
from tests.support.other_users import as_user

import vram
from vram.errors import BusyError
from vram.memory import children
from vram.memory.children import _Process

PR_SET_DUMPABLE = 4
_EXIT = {"x86_64": 60, "aarch64": 93}.get(platform.machine(), 0)  # SYS_exit, of one thread


@pytest.fixture
def array() -> Iterator[vram.Array]:
    with vram.asarray([1.0], device="host") as made:
        yield made


class Chain:
    """A child that, each time it is asked, is forked once more and ends."""

    def __init__(self) -> None:
        self.asked, self.ask = os.pipe()
        self.told, self.tell = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                os.close(self.ask)
                os.close(self.told)
                while os.read(self.asked, 1):
                    parent = os.getpid()
                    if not os.fork():
                        while os.getppid() == parent:  # until it is an orphan: the one before has ended
                            os.sched_yield()
                        os.write(self.tell, os.getpid().to_bytes(4, "little"))
                    else:
                        os._exit(0)
            finally:
                os._exit(0)
        os.close(self.asked)
        os.close(self.tell)
        self.last = self.pid

    def hop(self) -> None:
        os.write(self.ask, b"1")
        self.last = int.from_bytes(os.read(self.told, 4), "little")

    def end(self) -> None:
        os.close(self.ask)
        os.close(self.told)
        os.waitpid(self.pid, 0)


def _prctl(option: int, value: int) -> None:
    assert ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0


@contextmanager
def _daemon() -> Iterator[None]:
    """Have another process beside, which is this user's, not a child of whoever begins one in the block, and later."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        yield
        process.communicate()


@pytest.fixture
def chain(array: vram.Array) -> Iterator[Chain]:
    made = Chain()
    yield made
    made.end()


@pytest.mark.parametrize("hops", [1, 3])
def test_a_child_that_goes_on_in_another_process_while_it_is_looked_for_is_found(
    hops: int, array: vram.Array, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, left = children._pids, [hops]

    def hop() -> list[int]:
        found = listed()
        if left[0]:
            left[0] -= 1
            chain.hop()
        return found

    monkeypatch.setattr(children, "_pids", hop)
    with pytest.raises(BusyError) as caught:
        vram.sleep(array, None)
    assert not left[0]
    assert caught.value.holders == (f"a forked child, process {chain.last} ({array.region.mapped >> 20} MiB)",)


def _orphan(work: Callable[[], object]) -> int:
    """Fork a child that forks another one and ends; return the other, which does some work and waits to be killed."""
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            if not os.fork():
                while os.getppid() != 1:
                    os.sched_yield()
                work()
                os.write(tell, os.getpid().to_bytes(4, "little"))
                os.close(tell)
                threading.Event().wait(SOON)
        finally:
            os._exit(0)
    os.close(tell)
    os.waitpid(pid, 0)
    other = int.from_bytes(os.read(told, 4), "little")
    os.close(told)
    return other


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{pid}") or children._stat(str(pid)).is_over)


def _sleep_beside(pid: int, array: vram.Array) -> str:
    """Return what keeps an array awake beside a process, which is then killed; and it sleeps."""
    try:
        vram.sleep(array, None, shared="refuse")
        found = "nothing"
    except BusyError as error:
        found = str(error.holders)
    _end(pid)
    return found if vram.sleep(array, None).freed else "it did not sleep"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root: becomes another user")
def test_an_orphan_that_nobody_may_look_at_counts_as_having_it() -> None:
    def act() -> tuple[int, str]:
        _prctl(PR_SET_DUMPABLE, 1)  # another user than who began it is not to be looked at, either
        with vram.asarray([1.0], device="host") as array:
            with forked():
                pass
            assert vram.sleep(array, None).freed  # beside processes of root that began later than this one
            vram.wake(array)
            pid = _orphan(lambda: _prctl(PR_SET_DUMPABLE, 0))
            return pid, _sleep_beside(pid, array)

    with vram.asarray([1.0], device="host") as array:  # who cannot read the files needs what is imported by now
        vram.sleep(array, None)
    with _daemon():
        pid, found = as_user(30_000 + os.getpid() % 30_000, act)  # nobody else's: processes of one user may be children
    assert f"process {pid}, which may be a forked child, and which nobody may look at" in found


def test_a_child_whose_main_thread_has_ended_has_it_still(array: vram.Array) -> None:
    view = array.numpy()

    def go_on() -> None:
        def wait() -> None:
            until(lambda: children._stat(str(os.getpid())).is_over)
            os.write(tell, bytes([int(view[0])]))
            threading.Event().wait(SOON)
            os._exit(0)

        threading.Thread(target=wait).start()
        ctypes.CDLL(None).syscall(_EXIT, 0)

    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            go_on()
        finally:
            os._exit(99)
    os.close(tell)
    try:
        assert os.read(told, 1) == b"\1"
        with pytest.raises(BusyError, match=f"a forked child, process {pid}"):
            vram.sleep(array, None)
    finally:
        os.close(told)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert vram.sleep(array, None).freed


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_what_cannot_be_looked_at_is_not_taken_for_ended(
    number: int, array: vram.Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = children._files

    def fail(pid: str) -> Any:
        if pid == str(child.pid):
            raise OSError(number, os.strerror(number))
        return files(pid)

    with forked() as child:
        monkeypatch.setattr(children, "_files", fail)
        with pytest.raises(BusyError) as caught:
            vram.sleep(array, None)
        assert f"process {child.pid} cannot be looked at: {os.strerror(number)}" in str(caught.value.holders)
    monkeypatch.undo()
    assert vram.sleep(array, None).freed


def test_who_is_descended_from_whom() -> None:
    def process(parent: int, started: int) -> _Process:
        return _Process(parent, started, 0, False, False)

    found = children._kin(
        {
            1: process(0, 0), 5: process(1, 10), 10: process(5, 20),  # the first, the shell, this one
            11: process(10, 20), 12: process(11, 30),  # a child, and its child
            20: process(1, 21), 21: process(20, 22), 22: process(5, 25),  # orphans, and the child of one
            30: process(1, 19), 31: process(30, 40), 32: process(5, 19),  # older, and whose parent is
            40: process(99, 50), 41: process(40, 51), 50: process(0, 60),  # the parent has ended; from another place
            60: process(61, 70), 61: process(60, 70),  # numbers that were used again while they were read
        },
        10,
    )  # fmt: skip
    assert found == {11: True, 12: True, **dict.fromkeys((20, 21, 22, 40, 41, 50, 60, 61), False)}
