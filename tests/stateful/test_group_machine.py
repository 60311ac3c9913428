"""Groups under random calls, of which some fail, disagree or end a rank: all ranks hear the same of each.

Ranks are threads that make the calls of one script. What each call has to come to on each rank follows from the script;
after a call that nobody's end was in, the group goes on.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.deadlines import SOON
from tests.support.places import short_directory

import vram
from vram.errors import PeerError, PeerGoneError, UsageError, VramError


@dataclass(frozen=True)
class Step:
    """One call of all ranks, and which of them does something else in it."""

    what: str
    rank: int


def steps(size: int) -> st.SearchStrategy[list[Step]]:
    each = st.builds(
        Step,
        st.sampled_from(
            [
                "make", "cannot make", "make another", "sum", "sum of another size", "grow", "cannot grow", "barrier",
                "leave",
            ]
        ),
        st.integers(0, size - 1),
    )  # fmt: skip
    return st.lists(each, min_size=1, max_size=8)


class Rank:
    """What one rank does, and the memory that it has."""

    def __init__(self, group: vram.Group) -> None:
        self.group = group
        self.buffer = group.symmetric(4, "float32", device="host", capacity=1 << 12)
        self.grown = 0

    def make(self, step: Step) -> None:
        """Make a call of the script."""
        group = self.group
        odd = step.rank == group.rank
        if step.what == "leave" and odd:
            group.close()
        elif step.what in ("barrier", "leave"):
            group.barrier()
        elif step.what in ("make", "cannot make", "make another"):
            shape: Any = 8
            if odd and step.what == "cannot make":
                shape = 0
            elif odd and step.what == "make another":
                shape = 9
            group.symmetric(shape, "int32", device="host").close()
        elif step.what in ("sum", "sum of another size"):
            array = np.full(10 + (odd and step.what == "sum of another size"), group.rank + 1.0, np.float32)
            group.all_reduce(array)
            assert (array == group.size * (group.size + 1) / 2).all()
        else:
            rows = 1 << 20 if odd and step.what == "cannot grow" else 4 + 4 * (self.grown + 1)
            self.buffer.resize(rows)
            self.grown += 1
            assert len(self.buffer.array) == rows == len(self.buffer.peers[step.rank])


def expected(step: Step, rank: int, size: int) -> tuple[type[VramError] | None, int | None]:
    """Return what a call raises on a rank, and the rank that this names, if it is another one."""
    odd = step.rank == rank
    if size == 1:
        return {"cannot make": UsageError, "cannot grow": VramError}.get(step.what), None
    if step.what == "cannot make":
        return (UsageError, None) if odd else (PeerError, step.rank)
    if step.what == "cannot grow":
        return (VramError, None)
    if step.what in ("make another", "sum of another size"):
        return UsageError, None
    if step.what == "leave":
        return (None, None) if odd else (PeerGoneError, step.rank)
    return None, None


@settings(deadline=None)
@given(st.integers(1, 3).flatmap(lambda size: st.tuples(st.just(size), steps(size))))
def test_all_ranks_hear_the_same_of_every_call(script: tuple[int, list[Step]]) -> None:
    size, calls = script
    wrong: list[str] = []

    def act(rank: int, at: str) -> None:
        try:
            with vram.Group(rank=rank, size=size, at=at, timeout=SOON) as group:
                one = Rank(group)
                for step in calls:
                    kind, blamed = expected(step, rank, size)
                    try:
                        one.make(step)
                        came: VramError | None = None
                    except VramError as error:
                        came = error
                    if (came is None) != (kind is None) or (kind is not None and not isinstance(came, kind)):
                        wrong.append(f"rank {rank}, {step}: {came!r}, not {kind}")
                    if isinstance(came, PeerGoneError) and blamed not in came.ranks:
                        wrong.append(f"rank {rank}, {step}: {came!r} blames {came.ranks}, not {blamed}")
                    if step.what == "leave" or wrong:
                        break
                one.buffer.close()
        except BaseException as error:
            wrong.append(f"rank {rank}: {error!r}")

    with short_directory() as place:
        at = os.path.join(place, "group.sock")
        threads = [threading.Thread(target=act, args=(rank, at)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * SOON)
            assert not thread.is_alive(), wrong
    assert wrong == []
