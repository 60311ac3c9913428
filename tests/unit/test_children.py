"""Forked children keep the memory of the host that they inherited from being zeroed under their eyes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.deadlines import SOON, until
from tests.support.forked import forked

import vram
from vram.driver import forks
from vram.errors import BusyError


@pytest.fixture
def array() -> Iterator[vram.Array]:
    with vram.asarray([1.0], device="host") as made:
        yield made


def _refused(array: vram.Array) -> bool:
    """Whether a child keeps an array awake; it is awake afterwards."""
    try:
        vram.sleep(array, None)
    except BusyError as error:
        return "a child that was forked at " in str(error.holders)
    vram.wake(array)
    return False


def test_a_child_keeps_memory_awake_until_it_ends(array: vram.Array) -> None:
    with forked():
        assert _refused(array)
        with vram.asarray([2.0], device="host") as later:
            assert not _refused(later)
    assert not _refused(array)


def test_an_orphan_keeps_memory_awake_until_it_ends(array: vram.Array) -> None:
    asked, ask = os.pipe()
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        if os.fork():
            os._exit(0)
        os.close(ask)
        os.write(tell, b"1")
        os.read(asked, 1)
        os._exit(0)
    os.close(asked)
    os.close(tell)
    os.waitpid(pid, 0)
    assert os.read(told, 1) == b"1"
    assert _refused(array)
    os.close(ask)
    assert os.read(told, 1) == b""  # it has ended, or is about to
    until(lambda: not _refused(array), what="the end of the orphan, which goes on for a moment")
    os.close(told)


def test_a_child_that_becomes_another_program_has_the_memory_no_more(array: vram.Array) -> None:
    asked, ask = os.pipe()
    told, tell = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.dup2(asked, 0)
            os.dup2(tell, 1)
            os.execv(sys.executable, [sys.executable, "-c", "print(flush=True); input()"])
        finally:
            os._exit(99)
    os.close(asked)
    os.close(tell)
    try:
        assert os.read(told, 1) == b"\n"
        assert not _refused(array)
    finally:
        os.write(ask, b"\n")
        os.waitpid(pid, 0)
        os.close(ask)
        os.close(told)


def test_a_child_that_was_killed_has_the_memory_no_more(array: vram.Array) -> None:
    pid = os.fork()
    if not pid:
        signal.pause()
    assert _refused(array)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert not _refused(array)


def test_many_children_take_few_descriptors(array: vram.Array) -> None:
    before = len(os.listdir("/proc/self/fd"))
    asked, ask = os.pipe()
    children = []
    for _ in range(40):
        children.append(os.fork())
        if not children[-1]:
            os.close(ask)
            os.read(asked, 1)
            os._exit(0)
    os.close(asked)
    assert len(os.listdir("/proc/self/fd")) - before <= forks._MOST + 1
    assert _refused(array)
    os.close(ask)
    for child in children:
        os.waitpid(child, 0)
    assert not _refused(array)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_child_forks_as_its_parent_does(array: vram.Array) -> None:
    def work() -> int:
        with vram.asarray([3.0], device="host") as own:
            before = _refused(own)
            with forked():
                meanwhile = _refused(own)
            return 10 * before + 1 * meanwhile + 2 * _refused(own)

    with forked(work) as child:
        assert child.end() == 1


def test_programs_that_are_started_are_no_children(array: vram.Array) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not _refused(array)
        process.communicate(b"\n", timeout=SOON)
