"""Tables of routes of ranks on GPUs: they have to be the same, and ranks hear it before anything is computed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest

import vram
from vram.collectives.routes import PUSH, Routes, Step
from vram.errors import UnsupportedError, UsageError
from vram.keeper.private import short_directory
from vram.testing.keeper import SOON

pytestmark = pytest.mark.standin
TABLES = [Routes(), Routes(MappingProxyType({(2, "float32", "sum"): (Step(None, PUSH),)}), "measured")]


@pytest.fixture
def at() -> Iterator[str]:
    with short_directory() as directory:
        yield os.path.join(directory, "group.sock")


def computed(at: str, routes: list[Routes]) -> list[BaseException | None]:
    """Have two ranks sum up on a GPU, each with its table; return what each raised."""
    came: list[BaseException | None] = [None, None]

    def act(rank: int) -> None:
        with vram.zeros(8, "float32", device="cuda:0") as array:
            with vram.Group(rank=rank, size=2, at=at, timeout=SOON, routes=routes[rank]) as group:
                try:
                    group.all_reduce(array)
                except vram.errors.VramError as error:
                    came[rank] = error
                group.barrier()

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return came


def test_ranks_with_different_tables_hear_it_and_which_rank_has_another(at: str) -> None:
    first, second = computed(at, TABLES)
    words: Any = [(UsageError, first, "rank 1"), (UsageError, second, "rank 0")]
    for kind, error, rank in words:
        assert isinstance(error, kind)
        assert f"{rank} called kernels (the table of routes {TABLES[int(rank[-1])].digest})" in str(error)


def test_ranks_with_one_table_go_on(at: str) -> None:
    """To where this machine has no kernels: what compiles them is not there, or the stand-in, which runs none."""
    for error in computed(at, [TABLES[1], Routes(TABLES[1].entries, "elsewhere")]):
        assert isinstance(error, UnsupportedError)
