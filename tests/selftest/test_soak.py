"""The judge of `make soak` catches what grows, and its short form runs."""

from __future__ import annotations

import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.soak.judge import Sample, grown, look_at, table
from tests.support.deadlines import SOON
from tests.support.memfds import make_memfd

RUN = Path(__file__).parents[1] / "soak" / "run.py"
COUNTS = {"leases": 0, "connections": 5}
kept: list[object] = []


def nothing() -> None:
    """Hold no more than before."""


def a_descriptor() -> None:
    kept.append(os.open("/dev/null", os.O_RDONLY))


def a_mapping() -> None:
    fd = make_memfd()
    kept.append(mmap.mmap(fd, 4096, prot=mmap.PROT_READ))
    os.close(fd)


def four_megabytes() -> None:
    memory = mmap.mmap(-1, 1 << 22)  # not of the allocator, which may have as much to spare
    memory.write(b"x" * len(memory))
    kept.append(memory)


def taken(leak: Callable[[], None], count: int = 12) -> list[Sample]:
    """Return samples of this very process, before each of which it leaks."""
    samples = []
    for number in range(count):
        leak()
        samples.append(Sample(number, {"attaches": number}, {"me": look_at(os.getpid()), "the keeper": COUNTS}))
    return samples


@pytest.fixture(autouse=True)
def give_back() -> object:
    yield
    for one in kept:
        if isinstance(one, int):
            os.close(one)
        elif isinstance(one, mmap.mmap):
            one.close()
    kept.clear()


@pytest.mark.parametrize(
    ("leak", "what"), [(a_descriptor, "fds"), (a_mapping, "shared"), (four_megabytes, "rss")], ids=["fd", "map", "rss"]
)
def test_what_a_process_really_leaks_is_found(leak: Callable[[], None], what: str) -> None:
    lines = grown(taken(leak))
    assert any(re.match(rf"me: {what} grew from [\d,]+ to [\d,]+; ", line) for line in lines), lines


def test_a_process_that_holds_what_it_held_is_flat() -> None:
    samples = taken(nothing)
    assert grown(samples) == []
    assert len({len(line) > 60 for line in table(samples)}) == 1


@pytest.mark.parametrize("what", ["leases", "connections"])
def test_one_more_that_the_keeper_counts_is_found(what: str) -> None:
    samples = [Sample(at, {}, {"the keeper": {**COUNTS, what: COUNTS[what] + at // 6}}) for at in range(9)]
    (line,) = grown(samples)
    assert line.startswith(f"the keeper: {what} grew from")


def test_what_comes_and_goes_is_flat() -> None:
    """An odd sample among many is a worker that had not come to rest; one that stays high is a leak."""
    samples = [Sample(at, {}, {"it": {"fds": 10 + 3 * (at == 8), "rss": 50 << 20}}) for at in range(9)]
    assert grown(samples) == []


@pytest.mark.slow
def test_the_short_form_runs() -> None:
    """So that the long one, which CI does not run, cannot rot."""
    done = subprocess.run(
        [sys.executable, str(RUN), "--minutes", "0.1"], capture_output=True, text=True, timeout=4 * SOON, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    found = re.fullmatch(
        r"soak: ([\d,]+) of 10,000,000 hand-overs and ([\d,]+) of 1,000,000 attaches by 4 processes in \d+ s, "
        r"\d+ samples: flat",
        last,
    )
    assert found, last
    assert all(int(count.replace(",", "")) > 100 for count in found.groups())
