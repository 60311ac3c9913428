"""Growth of many against an independent model with real bytes: any mix of larger, smaller, pinned, kept and failing.

The model knows nothing of chunks that are ready. It says what every call must do, all or nothing, and what every byte
that was ever written must read as: what a shrink left in a chunk that stays comes back, all else that is new is zero.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.contracts.region import load, store
from tests.support.deadlines import SOON
from tests.support.faulty_driver import FaultyDriver

from vram import lifetime
from vram.driver.host import HostDriver
from vram.errors import BusyError, CapacityError, OutOfMemoryError, VramError
from vram.memory import Region
from vram.memory.ahead import Prepared, keep_ready
from vram.memory.chunks import Kind
from vram.memory.resize import resize_regions
from vram.spec import HOST, AllocationFlags, HandleKind

G = 2 << 20
MOST = 5  # chunks that a region can have
COUNT = 4

sizes = st.builds(lambda chunks, beside: max(chunks * G + beside, 0), st.integers(0, MOST), st.sampled_from([-7, 0, 7]))
spots = st.builds(lambda chunk, at: chunk * G + at, st.integers(0, MOST - 1), st.sampled_from([0, 9, G - 1]))


@dataclass(eq=False)
class Area:
    """A region as the model has it."""

    region: Region
    nbytes: int = 0
    written: dict[int, int] = field(default_factory=dict)
    pins: list[tuple[Any, int]] = field(default_factory=list)

    def become(self, nbytes: int) -> None:
        end = -(-nbytes // G) * G if nbytes < self.nbytes else MOST * G
        self.written = {at: value for at, value in self.written.items() if at < end}
        self.nbytes = nbytes


class ResizeMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.driver = FaultyDriver(HostDriver())
        self.areas = [Area(Region.create(HOST, driver=self.driver, capacity=MOST * G, chunk=G)) for _ in range(COUNT)]
        self.prepared: Prepared | None = None

    @rule(new=st.dictionaries(st.integers(0, COUNT - 1), sizes, min_size=1), fails=st.sampled_from([0, 0, 0, 1, 3]))
    def resize(self, new: dict[int, int], fails: int) -> None:
        changes = {self.areas[number]: nbytes for number, nbytes in new.items()}
        wrong: list[type[VramError]] = []
        if any(nbytes > MOST * G for nbytes in changes.values()):
            wrong.append(CapacityError)
        if any(stop > nbytes for area, nbytes in changes.items() if nbytes < area.nbytes for _, stop in area.pins):
            wrong.append(BusyError)
        call = {area.region: nbytes for area, nbytes in changes.items()}
        error = OutOfMemoryError("injected", errno.ENOMEM, "ENOMEM")
        if fails:
            methods = {"mem_map", "mem_map_new", "mem_set_access"}
            with self.driver.inject(methods, fails, error, forever=True, only_here=True) as fault:
                raised = self.outcome(call)
            if fault.fired:
                assert raised is error
                return
        else:
            raised = self.outcome(call)
        assert (type(raised) in wrong) if wrong else raised is None
        if raised is None:
            for area, nbytes in changes.items():
                area.become(nbytes)

    def outcome(self, call: dict[Region, int]) -> BaseException | None:
        try:
            resize_regions(call)
        except VramError as error:
            return error
        return None

    @rule(number=st.integers(0, COUNT - 1), at=spots, value=st.integers(1, 255))
    def write(self, number: int, at: int, value: int) -> None:
        area = self.areas[number]
        if at < area.nbytes:
            store(self.driver, area.region.address + at, bytes([value]))
            area.written[at] = value

    @rule(number=st.integers(0, COUNT - 1), at=spots)
    def pin(self, number: int, at: int) -> None:
        area = self.areas[number]
        if at < area.nbytes:
            area.pins.append((area.region.pin(0, at + 1, "pin"), at + 1))

    @precondition(lambda self: any(area.pins for area in self.areas))
    @rule(number=st.integers(0, COUNT - 1))
    def let_go(self, number: int) -> None:
        for pin, _ in self.areas[number].pins:
            pin.release()
        self.areas[number].pins.clear()

    @rule(number=st.integers(0, COUNT - 1))
    def share(self, number: int) -> None:
        """From now on its memory is never kept."""
        for one in self.areas[number].region.segments(0, self.areas[number].nbytes)[0]:
            one.export()
            one.close()

    @rule(most=st.integers(0, 6))
    def prepare(self, most: int) -> None:
        self.prepared = keep_ready(Kind(self.driver, HOST, HandleKind.POSIX_FD, AllocationFlags.NONE, G), most)
        assert self.prepared.wait(SOON) is (most > 0)

    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        if self.prepared is not None and self.prepared.nbytes:
            self.prepared._refill()  # a failure may have kept the thread from it
            assert self.prepared.wait(SOON)
            assert self.prepared.ready == self.prepared.nbytes
        mapped = 0
        for area in self.areas:
            region = area.region
            assert region.nbytes == area.nbytes
            mapped += region.mapped
            for at in (chunk * G + offset for chunk in range(MOST) for offset in (0, 9, G - 1)):
                if at < area.nbytes:
                    assert load(self.driver, region.address + at, 1)[0] == area.written.get(at, 0), (at, area)
        live = self.driver.live()
        assert live.nbytes == mapped + (0 if self.prepared is None else self.prepared.ready)
        assert not lifetime.stuck()

    def teardown(self) -> None:
        for area in self.areas:
            for pin, _ in area.pins:
                pin.release()
            area.region.close()
        if self.prepared is not None:
            self.prepared.close()
        assert self.driver.live().nbytes == 0


TestShortRuns = ResizeMachine.TestCase
TestShortRuns.settings = settings(max_examples=30, stateful_step_count=25)


@pytest.mark.slow
class TestLongRuns(ResizeMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=400, stateful_step_count=60)
