"""Tables of routes of ranks on GPUs: they have to be the same, and ranks hear it before anything is computed."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from tests.support.deadlines import SOON

import vram
from vram.collectives.routes import PUSH, Routes, Step
from vram.errors import UnsupportedError, UsageError

pytestmark = pytest.mark.standin
TABLES = [Routes(), Routes(MappingProxyType({(2, "float32", "sum"): (Step(None, PUSH),)}), "measured")]


def computed(at: str, routes: list[Routes]) -> list[tuple[type[BaseException], str]]:
    """Have two ranks sum up on a GPU, each with its table; return what each raised, and its words."""
    came: list[tuple[type[BaseException], str]] = [(BaseException, "")] * 2

    def act(rank: int) -> None:
        with vram.zeros(8, "float32", device="cuda:0") as array:
            with vram.Group(rank=rank, size=2, at=at, timeout=SOON, routes=routes[rank], share_gpus=True) as group:
                try:
                    group.all_reduce(array)
                except vram.errors.VramError as error:
                    came[rank] = (type(error), str(error))  # not the error, which keeps the array
                group.barrier()

    threads = [threading.Thread(target=act, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return came


def test_ranks_with_different_tables_hear_it_and_which_rank_has_another(at: str) -> None:
    for rank, (kind, words) in enumerate(computed(at, TABLES)):
        assert issubclass(kind, UsageError)
        assert f"rank {1 - rank} called kernels (the table of routes {TABLES[1 - rank].digest})" in words


def test_ranks_with_one_table_go_on(at: str) -> None:
    """To where this machine has no kernels: what compiles them is not there, or the stand-in, which runs none."""
    for kind, _ in computed(at, [TABLES[1], Routes(TABLES[1].entries, "elsewhere")]):
        assert issubclass(kind, UnsupportedError)


def test_words_that_another_thread_is_writing_stay_mapped_while_a_group_is_closed(at: str) -> None:
    with vram.Group(rank=0, size=1, at=at, timeout=SOON) as group:
        with vram.zeros(8, "float32", device="cuda:0") as array, pytest.raises(UnsupportedError):
            group.all_reduce(array)
        space = group._gpu()._space
        assert space is not None
        words = space._words
        address = np.frombuffer(words, np.uint8).ctypes.data
    assert is_mapped(address)
    words[0] = 1
    space.stop()
    space.check()
    del words
    gc.collect()
    assert not is_mapped(address)


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(word, 16) for word in line.split()[0].split("-"))
        if first <= address < last:
            return "w" in line.split()[1]
    return False
