"""Samples of exhaustive tests, drawn by the number of the commit: ``make test`` runs them, ``make test-all`` all.

A test that enumerates takes :func:`some` or :func:`nths`. ``--part 3/20`` chooses a part of the selected tests, so that
CI runs another twentieth of them at each commit.
"""

from __future__ import annotations

import functools
import os
import random
import subprocess
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
NOT_NOW = "not its turn at this commit; VRAM_TEST_ALL=1 runs it"


@functools.cache
def seed() -> int:
    """Return ``VRAM_TEST_SEED``, or the number of the commit; 0 outside of a repository."""
    if given := os.environ.get("VRAM_TEST_SEED"):
        return int(given)
    count = ["git", "-C", str(Path(__file__).parent), "rev-list", "--count", "HEAD"]
    done = subprocess.run(count, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else 0


def is_whole() -> bool:
    """Whether everything is wanted, as in ``make test-all``: ``VRAM_TEST_ALL=1``."""
    return os.environ.get("VRAM_TEST_ALL") == "1"


def some(cases: Sequence[T], count: int) -> list[T]:
    """Return some of the cases, in order, others at each commit; all of them in ``make test-all``."""
    if is_whole() or len(cases) <= count:
        return list(cases)
    return [cases[index] for index in sorted(random.Random(seed()).sample(range(len(cases)), count))]


def in_turns(commits: int) -> Callable[[F], F]:
    """Run an expensive test at one commit in `commits`; at the others it is marked slow. Its name decides which."""

    def marked(test: F) -> F:
        is_its_turn = zlib.crc32(f"{test.__module__}.{test.__qualname__}".encode()) % commits == seed() % commits
        return test if is_its_turn else cast("F", pytest.mark.slow(reason=NOT_NOW)(test))

    return marked


def least(count: int) -> int:
    """Return how many of an enumeration must have been tried at least: `count`, or one of a sample."""
    return count if is_whole() else 1


def rounds(whole: int, sample: int) -> int:
    """Return the number of repetitions of a random test: `whole` in ``make test-all``, `sample` otherwise."""
    return whole if is_whole() else sample


def nths() -> Iterator[int]:
    """Count from 1 on, for a loop that ends itself: by ones in ``make test-all``, else in steps that grow by chance.

    So the first points are tried, some in the middle, and how it is beyond the last; others at each commit.
    """
    nth, pick = 1, random.Random(seed())
    while True:
        yield nth
        nth += 1 if is_whole() else pick.randint(1, nth + 1)


class Parts:
    """Leaves out the tests of other parts."""

    @pytest.hookimpl(trylast=True)  # after -m has selected
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what is not of the part that ``--part`` names."""
        named: str | None = config.getoption("--part")
        if named is None:
            return
        part, parts = map(int, named.split("/"))
        chosen = [zlib.crc32(item.nodeid.encode()) % parts == part % parts for item in items]
        config.hook.pytest_deselected(items=[item for item, is_in in zip(items, chosen, strict=True) if not is_in])
        items[:] = [item for item, is_in in zip(items, chosen, strict=True) if is_in]
