"""Runs that would never end, planted: each ends, is red, says which test it was, and leaves no process behind (I11)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.support.deadlines import AT_ONCE, until

pytestmark = pytest.mark.slow  # each test is a run of tests

pytest.importorskip("xdist", reason="pytest-xdist is not installed here")

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0  # a run of these takes 2 s, and hangs for ever without the watchdog
CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import watchdog
def pytest_configure(config):
    watchdog.install(config)
"""
FILES = 2
HARMLESS = "def test_harmless():\n    pass\n"
# Whatever it starts writes its pid down, so that somebody can look whether it is gone.
STARTS = """
import os, signal, subprocess, sys, threading, time
def note(pid):
    with open("pids", "a") as file:
        file.write(f"{pid}\\n")
def start(**how):
    note(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], **how).pid)
def fork():
    if not (pid := os.fork()):
        time.sleep(3600)
        os._exit(0)
    note(pid)
"""


class Run:
    """A run of pytest in a directory of its own, on files of which the first is planted."""

    def __init__(self, folder: Path, planted: str, *options: str, **environment: str) -> None:
        self.folder = folder
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "test_a.py").write_text(STARTS + textwrap.dedent(planted) + HARMLESS)
        for number in range(FILES):
            (folder / f"test_b{number}.py").write_text(HARMLESS)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "VRAM_TEST_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**kept, "VRAM_TEST_RUN": os.environ.get("VRAM_TEST_RUN", ""), **environment},
        )  # fmt: skip

    def end(self) -> str:
        """Return what it printed; it has ended by itself, is red, and has left nothing."""
        try:
            printed, _ = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail("it hangs:\n" + self.process.communicate()[0][-3000:])
        assert self.process.returncode in (1, 2), printed[-3000:]
        assert re.search(r"^=+ .*\bin \d[\d.]*s", printed, re.MULTILINE), "no summary:\n" + printed[-3000:]
        noted = self.folder / "pids"
        for pid in noted.read_text().split() if noted.exists() else []:
            # What was killed takes a moment to go.
            until(
                lambda pid=pid: is_gone(pid),
                seconds=AT_ONCE,
                what=f"the end of {pid}, whose run said {printed[-3000:]}",
            )
        return printed


def is_gone(pid: str) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


SEVERAL = ("-n", "2", "--dist", "loadfile")


@pytest.mark.parametrize("death", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)"])
def test_a_worker_that_dies_ends_the_run_with_a_summary(tmp_path: Path, death: str) -> None:
    """A replacement would wait for ever for work: pytest-xdist gives it none with --dist loadfile."""
    planted = f"""
        def test_planted():
            start(start_new_session=True)
            {death}
    """
    printed = Run(tmp_path, planted, *SEVERAL).end()
    assert re.search(r"worker 'gw\d' crashed while running 'test_a.py::test_planted'", printed), printed


def test_a_test_that_hangs_ends_with_its_stack(tmp_path: Path) -> None:
    planted = """
        def test_planted():
            start()
            threading.Event().wait()
    """
    options = ("-o", "faulthandler_timeout=2", "-o", "faulthandler_exit_on_timeout=true")
    printed = Run(tmp_path, planted, *SEVERAL, *options).end()
    assert re.search(r"test_a.py\", line \d+ in test_planted", printed), printed
    assert re.search(r"worker 'gw\d' crashed while running 'test_a.py::test_planted'", printed), printed


@pytest.mark.parametrize(
    ("hang", "several"),
    [("threading.Event().wait()", ()), ("os.system('sleep 3600')", SEVERAL)],
    ids=["one process", "several"],
)
def test_a_run_past_its_limit_ends_with_what_was_running(tmp_path: Path, hang: str, several: tuple[str, ...]) -> None:
    planted = f"""
        def test_planted():
            start()
            start(start_new_session=True)
            {hang}
    """
    for limit in ("5", "20", "80"):  # a busy machine may not have come to the test in the first of them
        place = tmp_path / limit
        place.mkdir()
        printed = Run(place, planted, *several, VRAM_TEST_LIMIT=limit).end()
        assert f"it did not end: it took longer than {limit} s (VRAM_TEST_LIMIT)" in printed, printed
        if (place / "pids").exists():
            break
    assert re.search(r"was running: test_a.py::test_planted, for \d+ s", printed), printed
    assert re.search(r"test_a.py\", line \d+ in test_planted", printed), printed


def test_a_run_that_is_told_to_end_says_what_was_running(tmp_path: Path) -> None:
    planted = """
        def test_planted():
            start()
            threading.Event().wait()
    """
    run = Run(tmp_path, planted, *SEVERAL)
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.process.send_signal(signal.SIGTERM)
    printed = run.end()
    assert "it did not end: it was ended by SIGTERM" in printed, printed
    assert "was running: test_a.py::test_planted" in printed, printed


def test_a_process_that_outlives_the_run_makes_it_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = """
        import watchdog
        watchdog._GRACE = 0.5
        def test_planted():
            start(start_new_session=True)
    """
    printed = Run(tmp_path, planted, "-W", "ignore").end()
    assert re.search(r"was left behind and killed: pid \d+ \(.*time.sleep\(3600\)\)", printed), printed


@pytest.mark.parametrize("dies", ["before", "in the test", "afterwards"])
def test_a_test_that_fails_spoils_nothing_for_its_neighbours(tmp_path: Path, dies: str) -> None:
    """What serves the whole module is made anew, whichever phase of the test it died in."""
    planted = f"""
        import pytest
        DIES = {dies!r}
        made = []
        @pytest.fixture(scope="module")
        def server():
            made.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            if DIES == "before" and len(made) == 1:
                raise OSError("planted: it does not start")
            yield made[-1]
        @pytest.fixture(autouse=True)
        def ended():
            yield
            for process in made[:-1]:
                process.kill()
                process.communicate()
        @pytest.fixture(scope="module", autouse=True)
        def end():
            yield
            for process in made:
                process.kill()
                process.communicate()
        @pytest.fixture
        def served(server):
            yield server
            if DIES == "afterwards" and len(made) == 1:
                server.kill()
                raise OSError("planted: it died afterwards")
        @pytest.mark.parametrize("number", range(4))
        def test_planted(served, number):
            if DIES == "in the test" and len(made) == 1:
                served.kill()
                served.wait()
            served.stdin.write(b"x")
            served.stdin.flush()
            assert served.stdout.read(1) == b"x"
    """
    printed = Run(tmp_path, planted).end()
    summary = printed.splitlines()[-1]
    wrong, passed = {"before": ("1 error", 3), "in the test": ("1 failed", 3), "afterwards": ("1 error", 4)}[dies]
    assert wrong in summary, printed
    assert f"{passed + 1 + FILES} passed" in summary, printed
