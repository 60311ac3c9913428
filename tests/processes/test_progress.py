"""A bar on a terminal: while a command works, gone afterwards, and nothing of it where nobody looks."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.terminal import on_terminal

import vram

MIB = 1 << 20
# The command line, which stops in the middle of a file until a key comes: then a bar has been drawn.
HELD = """
import os, sys
from vram.cli import main
splice, done = os.splice, 0
def held(*arguments):
    global done
    count = splice(*arguments)
    if len(arguments) == 4:  # out of the file, not into the memory
        done += count
        if done >= 4 << 20 and done - count < 4 << 20:
            sys.stdin.read(1)
    return count
os.splice = held
sys.argv = ["vram", *sys.argv[1:]]
main()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.safetensors"
    save_file({"a": np.ones(8 * MIB, "uint8")}, path)
    return path


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", HELD, *map(str, arguments)]


def test_a_file_is_published_under_a_bar_that_goes(kept: vram.Keeper, file: Path) -> None:
    with on_terminal(command("publish-file", "model", file)) as terminal:
        terminal.until(lambda: "% " in terminal.before)
        assert "publishing model" in terminal.before
        assert " of 8 MiB" in terminal.before
        terminal.press("\n")
        assert terminal.end() == 0
        assert terminal.has_cursor
        # What is said last stands alone in its line: the bar's was emptied before.
        assert "\rmodel version 1: 1 array, 8 MiB on host, read into shared memory\r\n" in terminal.before
    with vram.attach("model") as lease:
        assert (lease["a"].numpy() == 1).all()


def test_ctrl_c_under_a_bar_leaves_nothing_published_and_a_cursor(kept: vram.Keeper, file: Path) -> None:
    with on_terminal(command("publish-file", "model", file)) as terminal:
        terminal.until(lambda: "% " in terminal.before)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() not in (0, None)
        assert terminal.has_cursor
        assert "Traceback" not in terminal.before
    assert vram.list_entries() == []


SLEEPER = """
import sys, vram
from vram.memory import backups
write = backups.os.pwrite
def held(*arguments):
    sys.stdin.read(1)
    return write(*arguments)
with vram.show_progress():
    with vram.zeros(4 << 20, "uint8", device="host") as array:
        backups.os.pwrite = held
        vram.sleep(array, to=sys.argv[1])
        backups.os.pwrite = write
        vram.wake(array)
print("awake")
"""


def test_a_program_shows_what_sleeps_to_a_file(tmp_path: Path) -> None:
    with on_terminal([sys.executable, "-c", SLEEPER, str(tmp_path)], width=140) as terminal:
        terminal.until(lambda: "putting memory to sleep in" in terminal.before)
        assert "0 B of 4 MiB" in terminal.before
        terminal.press("\n")
        assert terminal.end() == 0
        assert "awake" in terminal.before
