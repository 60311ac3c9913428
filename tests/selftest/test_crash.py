"""The short form of `make crash` runs, and finds what it is to find."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.crash.run import content, look
from tests.support.deadlines import SOON
from tests.support.memfds import make_memfd

from vram.keeper.client import Attachment
from vram.open_files import close_fds

RUN = Path(__file__).parents[1] / "crash" / "run.py"


def test_the_short_form_runs() -> None:
    """So that the long one, which CI does not run, cannot rot; its seed has kills of each kind."""
    done = subprocess.run(
        [sys.executable, str(RUN), "--kills", "15", "--seed", "6"],
        capture_output=True, text=True, timeout=6 * SOON, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(
        r"crash: 15 of 15 kills \((\d+) of keepers, (\d+) of guardians, (\d+) of both\), (\d+) planned restarts and "
        r"[\d,]+ calls of 4 clients in \d+ s, compared 1 times; an answer took at most [\d.]+ s: nothing lost",
        last,
    )
    assert found, last
    assert all(int(count) for count in found.groups())


def flipped(body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1])


@pytest.mark.parametrize("change", [None, flipped])
def test_wrong_bytes_are_found(change: Callable[[bytes], bytes] | None) -> None:
    right = content(1, "c1/n0", 7)
    fd = make_memfd(content=right if change is None else change(right))
    found = Attachment(1, "c1/n0", 7, os.getuid(), [], [fd], b"", None, {}, False)
    try:
        if change is None:
            assert look(found) == right
        else:
            with pytest.raises(AssertionError, match="wrong bytes in c1/n0 version 7"):
                look(found)
    finally:
        close_fds([fd])
