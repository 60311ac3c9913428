"""``vram top`` on a terminal, keys included; and what it sees, without one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.deadlines import AT_ONCE, SOON
from tests.support.terminal import Terminal, on_terminal

import vram
from vram.cli.top import run_top
from vram.errors import NotFoundError, UsageError
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient
from vram.keeper.private import KeeperProcess, short_directory
from vram.metrics import watch
from vram.metrics.watch import KEYS, PAGES, Wanted, Watcher

pytestmark = pytest.mark.slow  # goes with the keys of the live screen

VRAM = Path(sys.executable).with_name("vram")


@pytest.fixture
def kept() -> Iterator[vram.Keeper]:
    with vram.private_keeper() as keeper:
        yield keeper


def publish(keeper: vram.Keeper, *names: str, length: int = 4) -> None:
    with vram.copy(np.zeros(length), device="host") as array:
        for name in names:
            vram.publish(name, {"a": array}, keeper=keeper)


@contextlib.contextmanager
def top(path: str, *options: str, width: int = 100, height: int = 30) -> Iterator[Terminal]:
    command = [str(VRAM), "top", "--socket", path, "--interval", "0.1", *options]
    with on_terminal(command, width, height) as terminal:
        yield terminal


def names(terminal: Terminal) -> list[str]:
    """The names in the table, as they stand there."""
    lines = terminal.text.splitlines()
    head = next((number for number, line in enumerate(lines) if line.startswith("name")), len(lines))
    return [found[0] for line in lines[head + 1 : -1] if (found := re.match(r"\S+(?=  .*\d)", line))]


# -- what is seen -----------------------------------------------------------------------------------------------------
def test_a_look_has_entries_numbers_and_rates(kept: vram.Keeper) -> None:
    publish(kept, "a", "b")
    lease = vram.attach("b", keeper=kept)
    with contextlib.closing(Watcher(kept.path)) as watcher:
        watcher.look(Wanted())
        for _ in range(3):
            vram.attach("a", keeper=kept).close(wait=True)
        with pytest.raises(NotFoundError):
            vram.attach("none", keeper=kept)
        view = watcher.look(Wanted(opened="b"))
    assert [(row.name, row.leases, row.devices) for row in view.rows] == [("a", 0, ["host"]), ("b", 1, ["host"])]
    assert (view.is_whole, view.known, view.trouble) == (True, 2, "")
    attach = view.done["attach"]
    assert attach.per_second > 0
    assert attach.errors == pytest.approx(attach.per_second / 4)
    assert 0 < (attach.median or 0.0) <= (attach.high or 0.0)
    assert view.history.of("attach") == (attach.per_second,)
    # Both names have one memory: a user has it once, and a device is said to have what each version has there.
    assert view.history.of(f"user {os.geteuid()}") == (2 << 20,)
    assert view.history.of("device host") == (4 << 20,)
    assert [holder.pid for holder in view.holders] == [os.getpid()]
    lease.close()


def test_every_key_sorts_both_ways(kept: vram.Keeper) -> None:
    publish(kept, "a", "c")
    publish(kept, "b", length=1 << 20)
    publish(kept, "c")
    with vram.attach("a", keeper=kept), contextlib.closing(Watcher(kept.path)) as watcher:

        def order(key: str, backwards: bool = False) -> str:
            return "".join(row.name for row in watcher.look(Wanted(key=key, backwards=backwards)).rows)

        assert (order("name"), order("name", True)) == ("abc", "cba")
        assert (order("size"), order("size", True)[-1]) == ("bac", "b")
        assert order("leases")[0] == order("held")[0] == order("leases", True)[-1] == "a"
        assert order("version")[0] == order("age")[0] == "c"
        assert all(sorted(order(key)) == sorted(order(key, True)) == list("abc") for key in KEYS)


def test_only_the_pages_that_are_seen_are_asked_for(kept: vram.Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(kept, *(f"n{number:04}" for number in range(700)))
    asked: list[str] = []
    page = KeeperClient.page

    def counted(self: KeeperClient, prefix: str = "", after: str = "") -> m.Listing:
        asked.append(after)
        return page(self, prefix, after)

    monkeypatch.setattr(KeeperClient, "page", counted)
    with contextlib.closing(Watcher(kept.path)) as watcher:
        view = watcher.look(Wanted(count=20))
        assert ([row.name for row in view.rows], len(asked)) == ([f"n{number:04}" for number in range(20)], 1)
        assert not view.is_whole
        each = view.known
        asked.clear()
        view = watcher.look(Wanted(first=each - 5, count=20))
        assert asked == [f"n{each - 21:04}", f"n{each - 21 + each:04}"][: len(asked)]
        assert view.rows[0].name >= f"n{each - 20:04}"
        asked.clear()
        for _ in range(700 // each + 2):  # the last ones, from wherever it is
            view = watcher.look(Wanted(first=690, count=20))
        assert view.rows[-1].name == "n0699"
        asked.clear()
        watcher.look(Wanted(first=680, count=20))
        assert len(asked) == 1
        monkeypatch.setattr(watch, "PAGES", 3)
        asked.clear()
        watcher.look(Wanted(key="size"))
        assert len(asked) == 3  # a part of the round with each look, however many there are
    assert PAGES * each < 1_000


def test_what_comes_and_goes_is_seen_in_every_order(kept: vram.Keeper) -> None:
    publish(kept, *(f"n{number:03}" for number in range(200)))
    with contextlib.closing(Watcher(kept.path)) as watcher:
        for wanted in (Wanted(count=500), Wanted(count=500, key="size"), Wanted(count=500, backwards=True)):
            assert len(watcher.look(wanted).rows) == 200
        vram.remove("n199", keeper=kept)
        vram.remove("n000", keeper=kept)
        vram.remove("n100", keeper=kept)
        publish(kept, "n100a")
        for wanted in (Wanted(count=500), Wanted(count=500, key="size"), Wanted(count=500, backwards=True)):
            found = {row.name for row in watcher.look(wanted).rows}
            assert len(found) == 198
            assert "n100a" in found
            assert not found & {"n000", "n100", "n199"}
        assert [row.name for row in watcher.look(Wanted(prefix="n10")).rows][:2] == ["n100a", "n101"]


def test_a_keeper_that_is_gone_is_said_and_the_next_is_found() -> None:
    with short_directory() as directory:
        path = os.path.join(directory, "k.sock")
        with contextlib.closing(Watcher(path)) as watcher:
            assert path in watcher.look(Wanted()).trouble
            for _ in range(2):
                keeper = KeeperProcess(path)
                try:
                    view = watcher.look(Wanted())
                    assert (view.trouble, view.held is not None and view.held.pid) == ("", keeper.pid)
                finally:
                    keeper.stop()
                view = watcher.look(Wanted())
                assert view.trouble
                assert view.held is not None  # as it was


def test_there_is_no_other_key(kept: vram.Keeper) -> None:
    with pytest.raises(UsageError, match="cannot sort by 'colour': there are name, version"):
        Watcher(kept.path).look(Wanted(key="colour"))


# -- on a terminal ----------------------------------------------------------------------------------------------------
def test_keys_select_sort_filter_and_scroll(kept: vram.Keeper) -> None:
    publish(kept, *(f"n{number:02}" for number in range(60)))
    publish(kept, "z", length=1 << 20)
    with vram.attach("n07", keeper=kept), top(kept.path) as terminal:
        terminal.shows("61 entries, 1 lease", "attach", "n00", " of 61 ")  # which stands in the last line
        first = names(terminal)
        assert first[0] == "n00"
        terminal.press("\x1b[6~")
        terminal.until(lambda: names(terminal)[:1] == [f"n{len(first):02}"])
        terminal.press("G")
        terminal.until(lambda: names(terminal)[-1:] == ["z"])
        terminal.press("g")
        terminal.until(lambda: names(terminal)[:1] == ["n00"])
        terminal.press("3")
        terminal.until(lambda: names(terminal)[:1] == ["z"])
        terminal.shows("size▼")
        terminal.press("r")
        terminal.until(lambda: names(terminal)[:1] == ["n00"])
        terminal.shows("size▲")
        terminal.press("s")
        terminal.until(lambda: names(terminal)[:1] == ["n07"])
        terminal.press("1/n5\r")
        terminal.until(lambda: names(terminal) == [f"n5{number}" for number in range(10)])
        terminal.press("/\x1b")
        terminal.until(lambda: names(terminal)[:1] == ["n00"])
        terminal.press("j" * 7 + "\r")
        terminal.shows("who holds", f"pid {os.getpid()}")
        terminal.press("h")
        terminal.shows("revoke the selected entry; asks")
        terminal.press(" ")
        terminal.until(lambda: names(terminal)[:1] == ["n00"])
        terminal.press("q")
        assert terminal.end() == 0


def test_revoke_asks_and_says_what_came_of_it(kept: vram.Keeper) -> None:
    publish(kept, "a", "b")
    with vram.attach("b", keeper=kept), top(kept.path) as terminal:
        terminal.until(lambda: names(terminal) == ["a", "b"])
        terminal.press("x")
        terminal.shows("revoke a (0 leases)? y: yes")
        terminal.press("n")
        terminal.shows("a was not revoked")
        terminal.press("jx")
        terminal.shows("revoke b (1 lease)? y: yes")
        terminal.press("y")
        terminal.shows("b is revoked: 1 lease left")
        terminal.until(lambda: names(terminal) == ["a"])
        assert [entry.name for entry in vram.list_entries(keeper=kept)] == ["a"]
        terminal.press("x")
        terminal.shows("revoke a (0 leases)?")
        vram.remove("a", keeper=kept)
        publish(kept, "c")
        terminal.until(lambda: names(terminal) == ["c"])
        terminal.press("y")  # to the question that was asked
        terminal.shows("a is not revoked:")
        assert [entry.name for entry in vram.list_entries(keeper=kept)] == ["c"]


def test_it_stands_still_while_it_is_paused(kept: vram.Keeper) -> None:
    with top(kept.path) as terminal:
        terminal.shows("0 entries", "(no entries)")
        terminal.press("p")
        terminal.shows("PAUSED")
        publish(kept, "a")
        terminal.press("h")
        terminal.shows("select an entry")
        assert "1 entry" not in terminal.text
        terminal.press(" p")
        terminal.shows("1 entry,")
        assert "PAUSED" not in terminal.text


@pytest.mark.parametrize("width", [80, 40, 20, 3])
def test_narrow_terminals_and_other_sizes_on_the_way(kept: vram.Keeper, width: int) -> None:
    publish(kept, *(f"n{number}" for number in range(9)))
    with top(kept.path, width=width) as terminal:
        terminal.until(lambda: terminal.text.startswith("vra" if width == 3 else "vram top"))
        for size in ((120, 40), (40, 10), (width, 2), (100, 30)):
            terminal.resize(*size)
            terminal.until(lambda: terminal.text.startswith("vra"))
        terminal.shows("9 entries", "n8")
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
                terminal.until(lambda: "as it was" not in terminal.text)
                terminal.press("q")
                assert terminal.end() == 0
        finally:
            keeper.stop()


def test_keys_are_obeyed_while_a_keeper_does_not_answer() -> None:
    with short_directory() as directory:
        keeper = KeeperProcess(os.path.join(directory, "k.sock"))
        try:
            with top(keeper.path) as terminal:
                terminal.shows("0 entries")
                os.kill(keeper.pid, signal.SIGSTOP)
                terminal.press("h")
                terminal.shows("select an entry")
                terminal.press(" q")
                terminal.until(lambda: terminal.process.poll() == 0, AT_ONCE)
        finally:
            os.kill(keeper.pid, signal.SIGCONT)
            keeper.stop()


@pytest.mark.parametrize(("how", "status"), [("q", 0), ("\x03", 0), (signal.SIGTERM, 143)])
def test_the_terminal_is_as_it_was(kept: vram.Keeper, how: str | signal.Signals, status: int) -> None:
    script = 'stty -a; "$@"; echo "status $?"; stty -a'
    command = ["setsid", "-cw", "bash", "-c", script, "bash", str(VRAM), "top", "--socket", kept.path]
    with on_terminal(command) as terminal:
        terminal.shows("0 entries")
        assert terminal.is_other
        assert not terminal.has_cursor
        if isinstance(how, str):
            terminal.press(how)
        else:
            (pid,) = [
                int(one)
                for one in os.listdir("/proc")
                if one.isdigit() and kept.path.encode() in _command_line(one) and b"setsid" not in _command_line(one)
                and b"bash" not in _command_line(one) and b"vram.keeper" not in _command_line(one)
            ]  # fmt: skip
            os.kill(pid, how)
        terminal.end()
        assert not terminal.is_other
        assert terminal.has_cursor
        before, _, after = terminal.before.partition(f"status {status}")
        assert after, terminal.before
        assert before.split() == after.split()


def _command_line(pid: str) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_ctrl_z_gives_the_terminal_back_until_it_goes_on(kept: vram.Keeper) -> None:
    with top(kept.path) as terminal:
        terminal.shows("0 entries")
        terminal.process.send_signal(signal.SIGTSTP)
        terminal.until(lambda: not terminal.is_other and termios.tcgetattr(terminal.fd)[3] & termios.ICANON)
        assert terminal.has_cursor
        publish(kept, "a")
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until(lambda: terminal.is_other)
        terminal.shows("1 entry,")
        terminal.press("q")
        assert terminal.end() == 0


# -- without a terminal -----------------------------------------------------------------------------------------------
def test_once_prints_one_table_anywhere(kept: vram.Keeper) -> None:
    publish(kept, "a", "b", "c")
    done = subprocess.run(
        [VRAM, "top", "--once", "--interval", "0.1", "--sort", "age", "--socket", kept.path],
        capture_output=True, text=True, timeout=SOON, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 entries" in done.stdout
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


def test_no_terminal_is_a_mistake_of_use(kept: vram.Keeper) -> None:
    with pytest.raises(UsageError, match="--once"):
        run_top(kept.path, interval=1.0, sort="name", once=False)
