"""Tables of routes of ranks on GPUs: they have to be the same, and ranks hear it before anything is computed."""

from __future__ import annotations

from types import MappingProxyType

import pytest
from tests.support.deadlines import SOON
from tests.support.threads import race

import vram
from vram.collectives.routes import PUSH, Routes, Step
from vram.errors import UnsupportedError, UsageError

pytestmark = pytest.mark.standin
TABLES = [Routes(), Routes(MappingProxyType({(2, "float32", "sum"): (Step(None, PUSH),)}), "measured")]


def computed(at: str, routes: list[Routes]) -> list[tuple[type[BaseException], str]]:
    """Have two ranks sum up on a GPU, each with its table; return what each raised, and its words."""

    def act(rank: int) -> tuple[type[BaseException], str]:
        came: tuple[type[BaseException], str] = (BaseException, "")
        with vram.zeros(8, "float32", device="cuda:0") as array:
            with vram.Group(rank=rank, size=2, at=at, timeout=SOON, routes=routes[rank], share_gpus=True) as group:
                try:
                    group.all_reduce(array)
                except vram.errors.VramError as error:
                    came = (type(error), str(error))  # not the error, which keeps the array
                group.barrier()
        return came

    return race(lambda: act(0), lambda: act(1))


def test_ranks_with_different_tables_hear_it_and_which_rank_has_another(at: str) -> None:
    for rank, (kind, words) in enumerate(computed(at, TABLES)):
        assert issubclass(kind, UsageError)
        assert f"rank {1 - rank} called kernels (the table of routes {TABLES[1 - rank].digest})" in words


def test_ranks_with_one_table_go_on(at: str) -> None:
    """To where this machine has no kernels: what compiles them is not there, or the stand-in, which runs none."""
    for kind, _ in computed(at, [TABLES[1], Routes(TABLES[1].entries, "elsewhere")]):
        assert issubclass(kind, UnsupportedError)
