"""Followers against a model that knows one thing: what the name stands for now, and what each has of it.

Versions come singly and many at once, are removed and wanted back, and have other arrays; keepers are killed, replaced
and taken over from; followers come, close, close each other in callbacks and are asked by event loops. After each step
every follower comes to what the model says, what was read before is what it was, and in the end nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.support.deadlines import SOON, until
from tests.support.places import short_directory

import vram
from vram import aio
from vram.errors import NotFoundError, PeerGoneError
from vram.keeper import background
from vram.keeper.client import close_client
from vram.keeper.private import KeeperProcess

MOST = 6  # followers
CELLS = st.sampled_from([100, 200])
PICK = st.integers(0, 1_000)
KINDS = st.sampled_from(["plain", "plain", "callback", "once", "same", "cow"])


@dataclass(eq=False)
class Following:
    """A follower, and what it has as the model sees it."""

    kind: str
    value: int | None  # None: nothing is here
    cells: int
    state: str = "current"
    is_lost: bool = False  # whether the keeper was killed that knew of it
    model: Any = None
    seen: list[int] = field(default_factory=list)  # what its callback was told of

    def told(self, lease: vram.Lease) -> None:
        self.seen.append(read(lease["w"]))
        if self.kind == "once" and len(self.seen) > 1:
            self.model.close()  # in the callback

    def publish(self, value: int, cells: int) -> None:
        if self.kind == "same" and cells != self.cells:
            if self.value is not None:
                self.state = "refused"
        else:
            self.value, self.cells, self.state, self.is_lost = value, cells, "current", False

    def miss(self) -> None:
        """The name stands for nothing."""
        if self.value is not None:
            self.state = "removed"

    @property
    def is_as_said(self) -> bool:
        if self.kind == "once" and self.seen and self.value not in (self.seen[0], None):
            return bool(self.model.is_closed)
        if self.model.state != self.state:
            return False
        try:
            found = read(self.model["w"])
        except (NotFoundError, PeerGoneError):
            return self.value is None
        last = self.seen[-1:] == [self.value] or self.value is None
        return found == self.value and (last or self.kind not in ("callback", "once"))


def read(array: Any) -> int:
    values = array.numpy()
    assert (values == values[0]).all()
    return int(values[0])


class FollowMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.stage = contextlib.ExitStack()
        patch = self.stage.enter_context(pytest.MonkeyPatch.context())
        self.path = os.path.join(self.stage.enter_context(short_directory()), "k")
        patch.setenv("VRAM_KEEPER", self.path)
        self.keeper = KeeperProcess(self.path, ["--survive"])
        self.values = 0
        self.current: tuple[int, int] | None = None  # value and cells
        self.following: list[Following] = []
        self.kept: list[tuple[Any, int]] = []  # what readers have

    def picked(self, number: int) -> Following:
        return self.following[number % len(self.following)]

    # -- what happens to the name ---------------------------------------------------------------------------------
    @rule(cells=CELLS, count=st.sampled_from([1, 1, 1, 7]))
    def publish(self, cells: int, count: int) -> None:
        for _ in range(count):
            self.values += 1
            vram.publish("n", {"w": np.full(cells, self.values)})
        self.current = self.values, cells
        for one in self.following:
            one.publish(*self.current)

    @precondition(lambda self: self.current)
    @rule()
    def remove(self) -> None:
        vram.remove("n")
        self.current = None
        for one in self.following:
            one.miss()

    @precondition(lambda self: self.current)
    @rule()
    def revoke(self) -> None:
        vram.revoke("n", timeout=0)  # also the versions before that somebody stays on who refused the current one
        for one in self.following:
            if one.value is not None and not one.is_lost:
                one.value, one.state = None, "revoked"
            else:
                one.miss()
        self.current = None

    @rule()
    def end_the_keeper(self) -> None:
        self.keeper.stop()
        self.keeper = KeeperProcess(self.path, ["--survive"])
        self.current = None
        for one in self.following:
            one.is_lost = True
            one.miss()

    @rule()
    def take_over(self) -> None:
        old, self.keeper = self.keeper, KeeperProcess(self.path, ["--takeover"])
        assert old.process.wait(SOON) == 0
        old.stop()  # which only lets go of it

    # -- who follows ----------------------------------------------------------------------------------------------
    @precondition(lambda self: self.current and len(self.following) < MOST)
    @rule(kind=KINDS)
    def follow(self, kind: str) -> None:
        assert self.current is not None
        one = Following(kind, *self.current)
        options: dict[str, Any] = {"same": {"same_arrays": True}, "cow": {"access": "cow"}}.get(kind, {})
        if kind in ("callback", "once"):
            options["on_version"] = one.told
        one.model = vram.follow("n", **options)
        assert read(one.model["w"]) == one.value  # at once
        self.following.append(one)
        until(lambda: one.is_as_said, what=f"the beginning of {one}")

    @precondition(lambda self: self.current)
    @rule()
    def ask_in_a_loop(self) -> None:
        async def main() -> tuple[int, int]:
            with await aio.follow("n", timeout=SOON) as model:
                async for lease in model:
                    return read(lease["w"]), read(model["w"])
            raise AssertionError("no version")

        assert self.current is not None
        assert set(asyncio.run(asyncio.wait_for(main(), SOON))) == {self.current[0]}

    @precondition(lambda self: self.following)
    @rule(number=PICK)
    def close(self, number: int) -> None:
        one = self.picked(number)
        one.model.close()
        assert one.model.state == "closed"
        self.following.remove(one)

    # -- who reads ------------------------------------------------------------------------------------------------
    @precondition(lambda self: self.following and len(self.kept) < 4)
    @rule(number=PICK, is_view=st.booleans())
    def keep(self, number: int, is_view: bool) -> None:
        one = self.picked(number)
        if one.value is not None:
            lease = one.model.current()
            self.kept.append((lease["w"].numpy() if is_view else lease, one.value))

    @precondition(lambda self: self.kept)
    @rule()
    def drop(self) -> None:
        self.kept.pop(0)

    @invariant()
    def all_come_to_what_the_name_stands_for(self) -> None:
        for one in self.following:
            until(lambda one=one: one.is_as_said, what=f"{one}, {one.model}")
            assert one.seen == sorted(set(one.seen))
        self.following = [one for one in self.following if not one.model.is_closed]
        for held, value in self.kept:
            array = held if isinstance(held, np.ndarray) else held["w"].numpy()
            assert (array == value).all()

    def teardown(self) -> None:
        if not hasattr(self, "keeper"):
            return
        try:
            self.kept.clear()
            for one in self.following:
                one.model.close()
            self.following.clear()
            gc.collect()
            until(lambda: not vram.statistics().leases, what="the return of every lease")
            until(lambda: not background.following._users, what="the end of the tasks")
        finally:
            close_client(self.path)
            assert self.keeper.stop() == 0
            self.stage.close()


# What depends on the time cannot be made smaller.
_PHASES = [Phase.explicit, Phase.generate]

TestShortRuns = FollowMachine.TestCase
TestShortRuns.settings = settings(max_examples=2, stateful_step_count=15, deadline=None, phases=_PHASES)


@pytest.mark.slow
class TestLongRuns:
    """In parts: all of it takes ten minutes on a busy machine, and a test of fifteen is taken for one that hangs."""

    @pytest.mark.parametrize("part", range(8))
    def test_part(self, part: int) -> None:
        long = settings(max_examples=5, stateful_step_count=40, deadline=None, phases=_PHASES)
        run_state_machine_as_test(FollowMachine, settings=long)
