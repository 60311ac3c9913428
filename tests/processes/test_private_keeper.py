"""A private keeper: an object that runs from the call to its close(), and nothing of it stays, whoever is killed."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON, until
from tests.support.forked import end_of, refused
from tests.support.interrupts import chosen, interrupt, points
from tests.support.limits import limited
from tests.support.memfds import memfds
from tests.support.places import private_socket, short_directory
from tests.support.samples import in_turns, least, some

import vram
from vram import lifetime
from vram.errors import ClosedError, LeakWarning, PeerGoneError, UsageError
from vram.keeper.client import KeeperClient, Segment, close_client
from vram.keeper.private import KeeperProcess


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A temporary directory of its own, and no keeper that anything else has chosen."""
    with short_directory() as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.setenv("TMPDIR", directory)
        monkeypatch.delenv("VRAM_KEEPER", raising=False)
        yield directory


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second where it goes between opening and reading
        return False


def program(code: str, *arguments: str, expect: int = 0) -> str:
    """Run a program of its own; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=4 * SOON,
        check=False,
    )
    assert (done.returncode, done.stderr) == (expect, ""), done.stdout
    return done.stdout


# -- who starts it ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"], ids=["stdin", "stdout", "stderr", "all"])
def test_it_starts_where_standard_files_are_closed(place: str, closed: str) -> None:
    """The descriptors of a child then have numbers at which it is given its own standard files."""
    code = """
import os, sys, traceback
import numpy as np, vram
said = "?"
try:
    with vram.private_keeper():
        vram.publish("x", {"a": np.arange(5)})
        with vram.attach("x") as lease:
            said = f"got {lease['a'].numpy().sum()}"
except BaseException:
    said = traceback.format_exc()
os.write(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT, 0o600), said.encode())
"""
    out = Path(place, "out")
    shell = ["bash", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, code, str(out)]
    subprocess.run(shell, timeout=4 * SOON, check=False)
    assert out.read_text() == "got 10"


def test_an_application_that_is_no_python_does_not_start_itself(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would for ever: with ``-m vram.keeper`` as its arguments."""
    started = Path(place, "started")
    application = Path(place, "application")
    application.write_text(f"#!/bin/sh\ntouch {started}\n")
    application.chmod(0o700)
    python = sys.executable
    monkeypatch.setattr(sys, "executable", str(application))
    for is_frozen in (False, True):
        monkeypatch.setattr(sys, "frozen", is_frozen, raising=False)
        with pytest.raises(UsageError, match=r"is this application and no Python.*set VRAM_PYTHON"):
            vram.private_keeper()
    assert not started.exists()
    monkeypatch.setenv("VRAM_PYTHON", python)
    with vram.private_keeper():
        assert vram.list_entries() == []


# -- an object --------------------------------------------------------------------------------------------------------
def test_it_runs_from_the_call_to_the_close(place: str) -> None:
    kept = vram.private_keeper(max_bytes="8MiB", max_entries=2)
    try:
        assert type(kept) is vram.Keeper
        assert repr(kept) == f"<Keeper at {kept.path}>"
        assert os.environ["VRAM_KEEPER"] == kept.path
        found = vram.statistics()
        assert [limit.most for limit in found.limits[:2]] == [8 << 20, 2]
        assert vram.list_entries(keeper=kept) == []
        assert not kept.is_closed
    finally:
        kept.close()
    kept.close()
    assert kept.is_closed
    assert not alive(found.pid)
    assert os.listdir(place) == []
    assert "VRAM_KEEPER" not in os.environ
    assert repr(kept) == f"<Keeper at {kept.path}, closed>"
    with pytest.raises(ClosedError, match="was closed here"):
        vram.list_entries(keeper=kept)
    with pytest.raises(ClosedError), kept:
        pass
    with pytest.raises(PeerGoneError):
        vram.list_entries(keeper=kept.path)


@pytest.mark.usefixtures("executed_keepers")
def test_i4_without_descriptors_none_is_lost(place: str) -> None:
    used = {int(fd) for fd in os.listdir("/proc/self/fd")}
    free = [fd for fd in range(2000) if fd not in used]
    for left in range(7):
        with limited(resource.RLIMIT_NOFILE, free[left]), pytest.raises(OSError):
            KeeperProcess(f"{place}/k")
    assert {int(fd) for fd in os.listdir("/proc/self/fd")} == used


@in_turns(5)
@pytest.mark.usefixtures("executed_keepers")
def test_an_interrupt_leaves_no_keeper_that_nobody_knows_of_i12(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it comes before the start, while that is waited for, or once it serves."""
    monkeypatch.setenv("VRAM_KEEPER", "/nowhere/k")
    vram.private_keeper().close()
    found = points(lambda: vram.private_keeper().close())
    assert "_end" in {call for name, _, _, call in found if name == "private.py"}
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeakWarning)  # what was made and never handed out is dropped
        came = 0
        for nth in [1, *chosen(found, 40, 11)]:  # a late one may not come
            came += interrupt(nth, lambda: vram.private_keeper().close()).came
            gc.collect()
            until(lambda: not lifetime.stuck() and os.listdir(place) == [], what=f"no directory, after point {nth}")
            until(lambda: len(os.listdir("/proc/self/fd")) == before, what=f"no descriptor, after point {nth}")
            assert os.environ["VRAM_KEEPER"] == "/nowhere/k", f"after point {nth}"
    assert came >= least(30)  # how many points there are depends on how long it takes


@pytest.mark.parametrize("order", some([(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)], 1))
def test_the_default_is_the_newest_that_is_open_and_in_the_end_what_it_was(
    place: str, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]
) -> None:
    monkeypatch.setenv("VRAM_KEEPER", "/nowhere/k")
    kept = [vram.private_keeper() for _ in range(3)]
    left = [one.path for one in kept]
    try:
        for index in order:
            kept[index].close()
            left.remove(kept[index].path)
            assert os.environ["VRAM_KEEPER"] == (left[-1] if left else "/nowhere/k")
    finally:
        for one in kept:
            one.close()


@pytest.mark.parametrize("what", ["missing", "a file", "not ours to write to"])
def test_a_temporary_directory_that_is_none_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    with short_directory() as place:  # where the path is long another place is taken
        where = Path(place, "t")
        if what == "a file":
            where.write_text("")
        monkeypatch.setattr(tempfile, "tempdir", "/proc/1" if what == "not ours to write to" else str(where))
        with pytest.raises(vram.errors.UsageError, match="set TMPDIR to one that is there"):
            vram.private_keeper()


def test_i2_one_that_is_dropped_ends_with_a_warning(place: str) -> None:
    kept = vram.private_keeper()
    pid = vram.statistics().pid
    names = {"kept": kept}
    del kept
    with pytest.warns(LeakWarning, match="private keeper at .* was not closed"):
        names.clear()
    gc.collect()
    assert not alive(pid)
    assert os.listdir(place) == []
    assert "VRAM_KEEPER" not in os.environ


def test_i8_cells_of_a_notebook_share_it_and_its_end_leaves_nothing(place: str) -> None:
    """No close(): the interpreter's exit ends the process, removes the directory, and warns of nothing."""
    said = program("""
import code, os
cells = '''
import vram, numpy
k = vram.private_keeper()

p = vram.publish("x", {"a": numpy.arange(5)})

with vram.attach("x") as lease:
    print(int(lease["a"].numpy().sum()))

print(vram.statistics().pid)
'''
names = {}
for cell in cells.split("\\n\\n"):
    exec(compile(cell, "<cell>", "exec"), names)
""")
    total, pid = said.split()
    assert int(total) == 10
    until(lambda: not alive(int(pid)), what="the end of the keeper")
    assert os.listdir(place) == []


def test_i7_a_forked_child_neither_ends_it_nor_owns_it(place: str) -> None:
    with vram.private_keeper() as kept:
        pid = vram.statistics().pid

        def work() -> int:
            nonlocal kept
            count = refused(kept.__enter__)
            with KeeperClient.connect(kept.path) as connection:  # as one that runs already
                count *= connection.list() == []
            kept.close()
            del kept
            gc.collect()
            return count

        assert end_of(work) == 1
        assert alive(pid)
        assert os.environ["VRAM_KEEPER"] == kept.path
        assert vram.list_entries() == []


def test_pickled_it_is_one_that_runs_already(place: str) -> None:
    with vram.private_keeper() as kept:
        copy = pickle.loads(pickle.dumps(kept))
        assert copy.path == kept.path
        assert vram.list_entries(keeper=copy) == []
        copy.close()
        del copy
        gc.collect()
        assert vram.list_entries() == []


def test_one_that_runs_already_is_not_ended(place: str) -> None:
    with private_socket() as path:
        other = vram.Keeper(path)
        assert vram.list_entries(keeper=other) == []
        with other:
            pass
        assert other.is_closed
        assert vram.list_entries(keeper=path) == []
        close_client(path)


@pytest.mark.usefixtures("executed_keepers")
def test_one_that_does_not_start_leaves_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "bananas")  # which no interpreter starts with
    with pytest.raises(PeerGoneError, match="PYTHONHASHSEED"):
        vram.private_keeper()
    assert os.listdir(place) == []
    assert "VRAM_KEEPER" not in os.environ


@pytest.mark.parametrize("ceiling", [-1, 1.5, True, "many", 2**63, float("nan"), object()])
@pytest.mark.parametrize("name", ["max_bytes", "max_entries"])
def test_a_ceiling_that_is_none_is_refused_before_anything_is_started(place: str, name: str, ceiling: object) -> None:
    with pytest.raises(UsageError, match=f"^(--)?{name} ".replace("_", ".")):
        vram.private_keeper(**{name: ceiling})  # type: ignore[arg-type]
    assert os.listdir(place) == []


@pytest.mark.usefixtures("executed_keepers")
def test_one_started_with_its_signals_blocked_ends_as_any_other(place: str) -> None:
    """As in a thread of a program that takes its signals in another one."""
    ending = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    try:
        kept = KeeperProcess.private()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    kept.stop()
    assert kept.process.returncode == 0, "it had to be killed"


# -- what stays of it -------------------------------------------------------------------------------------------------
KILLED = """
import os, signal, sys, vram
kept = vram.private_keeper()
print(vram.statistics().pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_stays_when_its_owner_is_killed(place: str) -> None:
    pid = int(program(KILLED, expect=-signal.SIGKILL))
    until(lambda: not os.listdir(place), what="the end of the directory")
    until(lambda: not alive(pid), what="the end of the keeper")


# -- SIGHUP -----------------------------------------------------------------------------------------------------------

# A session of its own with standard input as its terminal, as a login has; then a keeper in its place.
LOGIN = """
import fcntl, os, signal, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
# Not as whoever runs the tests has it: they may run under nohup themselves.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-P", "-m", "vram.keeper", *sys.argv[2:]])
"""


@contextlib.contextmanager
def on_a_terminal(path: str, how: str) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Run a keeper on a terminal; yield it and, in a list, the end of the terminal that can be closed."""
    ours, theirs = os.openpty()
    ends = [ours]
    ready, ready_child = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", LOGIN, how, "--socket", path, "--ready-fd", str(ready_child)],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(ready_child,),
        )
    finally:
        os.close(theirs)
        os.close(ready_child)
    try:
        assert f"serving at {path} ".encode() in os.read(ready, 4096)
        yield process, ends
    finally:
        os.close(ready)
        process.kill()
        process.wait()
        for end in ends:
            os.close(end)


def serves(path: str) -> bool:
    with KeeperClient.connect(path) as connection:
        return connection.list() != []


def publish(path: str) -> None:
    with KeeperClient.connect(path) as connection, memfds(1) as fds:
        connection.publish("w", [Segment(4096)], fds)


def test_the_end_of_its_terminal_ends_a_keeper_as_sigterm_does(place: str) -> None:
    path = f"{place}/k"
    with on_a_terminal(path, "login") as (process, ends):
        publish(path)
        os.close(ends.pop())
        assert process.wait(SOON) == 0
        assert os.listdir(place) == []


def test_under_nohup_a_keeper_outlives_its_terminal(place: str) -> None:
    path = f"{place}/k"
    with on_a_terminal(path, "nohup") as (process, ends):
        publish(path)
        os.close(ends.pop())
        process.send_signal(signal.SIGHUP)
        for _ in range(3):
            assert serves(path)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SOON) == 0
        assert os.listdir(place) == []


def test_a_private_keeper_ignores_sighup_and_ends_with_its_owner(place: str) -> None:
    with vram.private_keeper() as kept:
        publish(kept.path)
        pid = vram.statistics().pid
        os.kill(pid, signal.SIGHUP)
        for _ in range(3):
            assert serves(kept.path)
        assert alive(pid)
    assert not alive(pid)
    assert os.listdir(place) == []
