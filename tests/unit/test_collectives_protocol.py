"""A model of the protocols in ``collectives/kernels.cu``, run in random orders: what a rank reads is what was meant.

Blocks are generators that yield wherever another rank could come between. The kernels of a rank retire in their order,
its blocks run at once, and a scheduler goes on with any of them. Each protection has a control: without it, orders are
found in which a rank reads something else, or waits for ever.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.samples import rounds, some

PACKETS, PUSH, SHARES = "packets", "push", "shares"
EMPTY = None
SLOTS = 8
WAITS = "waits"


@dataclass(frozen=True)
class Rules:
    """The protocol, and what is left out of it."""

    halves: int = 2
    numbers_calls: bool = True  # not blocks
    waits_at_the_end: bool = True  # of what goes by shares


@dataclass(frozen=True)
class Call:
    """What all ranks do in one call: with which protocol, how many blocks, and how many slots."""

    protocol: str
    blocks: int
    size: int


class WrongError(Exception):
    """A rank has read what was not meant."""


class Model:
    """Some ranks that make some calls."""

    def __init__(self, size: int, calls: list[Call], rules: Rules) -> None:
        self.ranks, self.calls, self.rules = range(size), calls, rules
        halves = range(rules.halves)
        self.packets = [[[[(0, EMPTY)] * SLOTS for _ in self.ranks] for _ in halves] for _ in self.ranks]
        self.pushed = [[[[EMPTY] * SLOTS for _ in self.ranks] for _ in halves] for _ in self.ranks]
        self.flags = [[[[[0] * SLOTS for _ in self.ranks] for _ in range(2)] for _ in halves] for _ in self.ranks]
        self.inputs = [-1] * size  # of which call it is
        self.outputs = [[(-1, -1)] * SLOTS for _ in self.ranks]
        self.done = [[0] * SLOTS for _ in self.ranks]  # calls that a block of a rank has made, where those are numbered

    def block(self, rank: int, at: int, number: int) -> Iterator[str]:
        """Make one block's part of a call."""
        call = self.calls[at]
        if self.rules.numbers_calls:
            count = at + 1
        else:
            self.done[rank][number] += 1
            count = self.done[rank][number]
        half = count % self.rules.halves
        others = [other for other in self.ranks if other != rank]
        slots = range(number, call.size, call.blocks)
        if call.protocol == SHARES:
            yield from self.meet(rank, half, 0, number, count)
            for other in others:
                if self.inputs[other] != at:
                    raise WrongError(f"rank {rank} reads the input of call {self.inputs[other]} in call {at}")
                yield ""
            for other in self.ranks:
                for slot in slots:
                    if slot % len(self.ranks) == rank:
                        self.outputs[other][slot] = (at, rank)
                        yield ""
            if self.rules.waits_at_the_end:
                yield from self.meet(rank, half, 1, number, count)
            return
        for slot in slots:
            for other in others:
                if call.protocol == PACKETS:
                    self.packets[other][half][rank][slot] = (count, (rank, at))
                else:
                    self.pushed[other][half][rank][slot] = (rank, at)
                yield ""
        for slot in slots:
            for other in others:
                while True:
                    if call.protocol == PACKETS:
                        said, value = self.packets[rank][half][other][slot]
                        has_come = said == count
                    else:
                        value = self.pushed[rank][half][other][slot]
                        has_come = value is not EMPTY
                    if has_come:
                        break
                    yield WAITS
                if value != (other, at):
                    raise WrongError(f"rank {rank} has {value} of rank {other} in call {at}")
                if call.protocol == PUSH:
                    self.pushed[rank][half][other][slot] = EMPTY
                yield ""

    def meet(self, rank: int, half: int, which: int, number: int, count: int) -> Iterator[str]:
        for other in self.ranks:
            if other != rank:
                self.flags[other][half][which][rank][number] = count
                yield ""
        for other in self.ranks:
            while other != rank and self.flags[rank][half][which][other][number] != count:
                yield WAITS

    def run(self, choose: random.Random) -> None:
        """Make all calls; raises WrongError, also if nobody can go on."""
        running: list[list[Iterator[str]]] = [[] for _ in self.ranks]
        at = [-1] * len(self.ranks)
        favourite = choose.choice(self.ranks)
        waiting: set[Iterator[str]] = set()  # what has waited since anybody last did anything
        while True:
            for rank in self.ranks:
                if running[rank]:
                    continue
                if at[rank] >= 0 and self.calls[at[rank]].protocol == SHARES:
                    size = self.calls[at[rank]].size
                    wanted = [(at[rank], slot % len(self.ranks)) for slot in range(size)]
                    if self.outputs[rank][:size] != wanted:
                        raise WrongError(f"rank {rank} goes on from call {at[rank]} with {self.outputs[rank][:size]}")
                if at[rank] + 1 < len(self.calls):
                    at[rank] += 1
                    self.inputs[rank] = at[rank]
                    running[rank] = [self.block(rank, at[rank], b) for b in range(self.calls[at[rank]].blocks)]
            if not any(running):
                return
            able = [[block for block in blocks if block not in waiting] for blocks in running]
            alive = [rank for rank in self.ranks if able[rank]]
            if not alive:
                raise WrongError(f"nobody goes on: calls {at}")
            # One rank is often far ahead of the others: that is where halves are needed.
            rank = favourite if favourite in alive and choose.random() < 0.7 else choose.choice(alive)
            block = choose.choice(able[rank])
            try:
                waits = next(block) == WAITS
            except StopIteration:
                running[rank].remove(block)
                waits = False
            if waits:
                waiting.add(block)
            else:
                waiting.clear()


def call_of(choose: random.Random) -> Call:
    return Call(choose.choice([PACKETS, PUSH, SHARES]), choose.choice([1, 2, 4]), choose.choice([4, 8]))


def failures(rules: Rules, protocols: tuple[str, ...], orders: int = 150) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in range(orders):
        choose = random.Random(seed)
        calls = [call for call in (call_of(choose) for _ in range(60)) if call.protocol in protocols][:12]
        try:
            Model(2, calls, rules).run(choose)
        except WrongError as error:
            found["hangs" if "nobody goes on" in str(error) else "wrong"] += 1
    return found


@settings(max_examples=rounds(settings.default.max_examples, 15))
@given(st.integers(2, 4), st.integers(0, 2**32 - 1))
def test_no_order_has_a_rank_read_what_was_not_meant(size: int, seed: int) -> None:
    choose = random.Random(seed)  # a run makes more choices than Hypothesis draws for one example
    Model(size, [call_of(choose) for _ in range(10)], Rules()).run(choose)


@pytest.mark.parametrize(
    ("rules", "protocols"),
    some(
        [
            (Rules(halves=1), (PACKETS,)),
            (Rules(halves=1), (PUSH,)),
            (Rules(halves=1), (PACKETS, PUSH, SHARES)),
            (Rules(numbers_calls=False), (PACKETS,)),
            (Rules(numbers_calls=False), (PACKETS, PUSH, SHARES)),
            (Rules(waits_at_the_end=False), (SHARES,)),
        ],
        1,
    ),
    ids=str,
)
def test_without_a_protection_an_order_is_found(rules: Rules, protocols: tuple[str, ...]) -> None:
    assert failures(rules, protocols), "the model finds nothing"
    assert not failures(Rules(), protocols)
