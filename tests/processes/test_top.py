"""``vram top`` on a terminal, its keys included, and without a terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.support.deadlines import SOON
from tests.support.places import short_directory
from tests.support.terminal import Terminal, on_terminal

import vram
from vram.cli.top import Screen
from vram.errors import NotFoundError
from vram.keeper.private import KeeperProcess

pytestmark = pytest.mark.slow

VRAM = Path(sys.executable).with_name("vram")


@pytest.fixture
def kept() -> Iterator[vram.Keeper]:
    with vram.private_keeper() as keeper:
        yield keeper


def publish(keeper: vram.Keeper, *names: str, length: int = 4) -> None:
    with vram.copy(np.zeros(length), device="host") as array:
        for name in names:
            vram.publish(name, {"a": array}, keeper=keeper)


@contextmanager
def top(path: str, *options: str, width: int = 100, height: int = 30) -> Iterator[Terminal]:
    command = [str(VRAM), "top", "--socket", path, "--interval", "0.1", *options]
    with on_terminal(command, width, height) as terminal:
        yield terminal


def names(terminal: Terminal) -> list[str]:
    """Return the names in the table, as they stand there."""
    lines = terminal.text.splitlines()
    head = next((number for number, line in enumerate(lines) if line.startswith("name")), len(lines))
    return [found[0] for line in lines[head + 1 : -1] if (found := re.match(r"\S+(?=  .*\d)", line))]


def test_keys_sort_and_leave(kept: vram.Keeper) -> None:
    publish(kept, "a", "c")
    publish(kept, "b", length=1 << 20)
    with vram.attach("c", keeper=kept), top(kept.path, width=120) as terminal:
        terminal.shows("3 entries, 1 lease", "attach", "sorted by name", f"uid {os.getuid()}")
        assert names(terminal) == ["a", "b", "c"]
        for expected in ("version", "size", "leases"):
            terminal.press("s")
            terminal.shows(f"sorted by {expected}")
            first = {"version": "a", "size": "b", "leases": "c"}[expected]
            terminal.until(lambda first=first: names(terminal)[:1] == [first])
        terminal.press("q")
        assert terminal.end() == 0


@pytest.mark.parametrize("width", [80, 40])
def test_narrow_terminals_and_other_sizes_on_the_way(kept: vram.Keeper, width: int) -> None:
    publish(kept, *(f"n{number}" for number in range(9)))
    with top(kept.path, width=width) as terminal:
        terminal.until(lambda: terminal.text.startswith("vram top"))
        terminal.shows("9 entries", "n8")
        terminal.resize(120, 40)
        terminal.shows("9 entries", "n8", "held")
        terminal.press("q")
        assert terminal.end() == 0


def test_a_keeper_that_dies_and_comes_back() -> None:
    with short_directory() as directory:
        path = os.path.join(directory, "k.sock")
        keeper = KeeperProcess(path)
        try:
            with top(path, width=160) as terminal:
                terminal.shows(f"pid {keeper.pid}")
                keeper.process.kill()
                terminal.shows("as it was seen last")
                keeper.stop()
                keeper = KeeperProcess(path)
                terminal.shows(f"pid {keeper.pid}")
                terminal.press("q")
                assert terminal.end() == 0
        finally:
            keeper.stop()


@pytest.mark.parametrize(("how", "status"), [("q", 0), (signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_the_terminal_is_as_it_was(kept: vram.Keeper, how: str | signal.Signals, status: int) -> None:
    with top(kept.path) as terminal:
        terminal.shows("0 entries")
        assert terminal.is_other
        if isinstance(how, str):
            terminal.press(how)
        else:
            terminal.process.send_signal(how)
        assert terminal.end() == status
        assert not terminal.is_other
        assert terminal.has_cursor
        assert termios.tcgetattr(terminal.fd) == terminal.settings


def test_once_prints_one_table_anywhere(kept: vram.Keeper) -> None:
    publish(kept, "a", "b", "c")
    for _ in range(3):
        vram.attach("a", keeper=kept).close(wait=True)
    with pytest.raises(NotFoundError):
        vram.attach("none", keeper=kept)
    done = subprocess.run(
        [VRAM, "top", "--once", "--interval", "0.1", "--sort", "age", "--socket", kept.path],
        capture_output=True, text=True, timeout=SOON, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 entries, 0 leases, 2 MiB" in done.stdout
    assert re.search(r"^c .*^b .*^a ", done.stdout, re.MULTILINE | re.DOTALL)
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ((), "needs a terminal to draw on and to read keys from; --once prints"),
        (("--sort", "colour"), "--sort 'colour' is no column; there are name, version"),
        (("--once", "--socket", "/nonexistent/k.sock"), "/nonexistent/k.sock"),
    ],
)
def test_what_cannot_be_is_one_line(kept: vram.Keeper, options: tuple[str, ...], why: str) -> None:
    done = subprocess.run(
        [VRAM, "top", "--socket", kept.path, *options],
        capture_output=True, text=True, timeout=SOON, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert why in done.stderr


def test_a_keeper_that_goes_while_it_answers_leaves_the_last_answers(
    kept: vram.Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(kept, "a", "b")
    screen = Screen(kept.path, "name")
    screen.look()
    client = screen._client
    assert client is not None
    before = type(client).page
    monkeypatch.setattr(type(client), "page", lambda *given: (client.close(), before(*given))[1])
    screen.look()
    assert ([row.name for row in screen._rows], bool(screen.trouble)) == (["a", "b"], True)
