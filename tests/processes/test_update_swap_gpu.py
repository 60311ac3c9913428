"""Updates of two slots in memory of a GPU: its work is ordered with the sections of readers (I14, S10)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import SOON
from tests.support.gpu_updates import GPU, HERE, copied, fill
from tests.support.update_children import ROWS, publish, read_until, seen, seen_here
from tests.support.updates import child, tear, write

import standin
import vram
from vram import driver as drivers
from vram.errors import BusyError, DriverError, UsageError

pytestmark = [pytest.mark.usefixtures("kept")]


class GpuSwaps:
    @pytest.fixture(autouse=True)
    def deferred(self) -> Any:
        """On the stand-in work is left undone until somebody waits for it, so that a missing wait is seen."""
        if os.environ.get("VRAM_TEST_GPU"):
            yield
            return
        standin.Standin().defer()
        try:
            yield
        finally:
            standin.Standin().capture(0)
            standin.Standin().defer(False)

    def test_an_update_goes_into_the_other_slot_and_readers_move_there(self) -> None:
        publish(device=GPU, swap=True)
        with vram.attach("w") as lease:
            where = [{name: array.address for name, array in slot.items()} for slot in lease.slots]
            assert not set(where[0].values()) & set(where[1].values())
            for version in range(1, 5):
                if version > 1:
                    write(version, timeout=SOON)
                with lease.reading() as number:
                    assert (number, lease.slot) == (version, (version - 1) % 2)
                    assert {name: array.address for name, array in lease.items()} == where[lease.slot]
                    assert seen_here(lease) == [version]
                    assert all(array.readonly for array in lease.values())
            with lease.reading():
                write(5, timeout=SOON)
                assert seen_here(lease) == [4]
                with pytest.raises(BusyError, match="of the version before the current one"):
                    write(6, timeout=0.05)
            assert seen(lease) == (5, [5])

    @pytest.mark.parametrize("named", [True, False], ids=["stream", "all"])
    def test_what_a_section_had_the_gpu_read_is_read_before_its_slot_is_written(
        self, streams: list[int], named: bool
    ) -> None:
        publish(device=GPU, count=1, swap=True)
        with vram.attach("w") as lease, vram.zeros(ROWS, "int64", device=GPU) as target:
            with lease.reading(stream=streams[0] if named else None):
                copied(lease["a0"], target, streams[0])
                with vram.update("w", stream=streams[1]) as arrays:
                    fill(arrays["a0"], 2, streams[1])
            with vram.update("w", stream=streams[1]) as arrays:
                fill(arrays["a0"], 3, streams[1])
            drivers.get(HERE).synchronize(HERE)
            assert np.unique(target.to_host()).tolist() == [1]
            assert seen(lease) == (3, [0x0303030303030303])

    def test_what_is_copied_over_is_there_when_the_version_is_announced(self, streams: list[int]) -> None:
        publish(device=GPU, count=3, swap=True)
        with vram.attach("w") as lease:
            with vram.update("w", only=["a1"], stream=streams[0]) as arrays:
                fill(arrays["a1"], 0, streams[0])
            with vram.zeros(ROWS, "int64", device=GPU) as target, lease.reading(stream=streams[1]):
                copied(lease["a2"], target, streams[1])
                drivers.get(HERE).synchronize(HERE)
                assert np.unique(target.to_host()).tolist() == [1]
            with vram.update("w", only=["a0"]) as arrays:
                arrays["a0"].fill(7)
            with lease.reading() as version:
                assert version == 3
                assert [np.unique(array.to_host()).tolist() for array in lease.values()] == [[7], [0], [1]]

    def test_what_a_block_that_raised_left_on_the_gpu_comes_before_the_next_one(self, streams: list[int]) -> None:
        publish(device=GPU, count=1, swap=True)
        with vram.attach("w") as lease:

            def begin() -> None:
                with vram.update("w", stream=streams[0]) as arrays:
                    fill(arrays["a0"], 99, streams[0])
                    raise KeyError("wrong")

            with pytest.raises(KeyError):
                begin()  # and no section since, which would wait for it
            with vram.update("w", stream=streams[1]) as arrays:
                fill(arrays["a0"], 0, streams[1])
            drivers.get(HERE).synchronize(HERE)
            assert seen(lease) == (2, [0])
            tear()
            assert (lease.torn, seen(lease)) == (False, (2, [0]))

    def test_readers_in_other_processes_see_exactly_one_version(self) -> None:
        last = 60
        publish(device=GPU, swap=True)
        with child(read_until, last) as one, child(read_until, last) as two:
            assert [reader.said() for reader in (one, two)] == ["ready"] * 2
            for value in range(2, last + 1):
                write(value, timeout=SOON)
            for reader in (one, two):
                sections = reader.said()
                assert isinstance(sections, int), sections
                assert sections > 1


@pytest.mark.standin
class TestOnTheStandin(GpuSwaps):
    def test_an_update_that_cannot_wait_changes_nothing(self, streams: list[int]) -> None:
        """The GPU cannot be waited for while something captures: readers stay where they are, and nothing is torn."""
        publish(device=GPU, swap=True)
        with vram.attach("w") as lease:
            begun = vram.update("w")
            begun.__enter__()["a0"].fill(2)
            standin.Standin().capture(streams[0])
            with pytest.raises(DriverError, match="capturing a graph"):
                begun.__exit__(None, None, None)
            with pytest.raises(UsageError, match="captures a graph"):
                vram.update("w", stream=streams[0]).__enter__()
            standin.Standin().capture(0)
            assert (lease.torn, seen(lease)) == (False, (1, [1]))
            write(3)
            assert seen(lease) == (2, [3])

    def test_memory_of_both_kinds_has_two_slots_each(self) -> None:
        vram.publish(
            "w", {"here": np.ones(5, "int64"), "there": vram.asarray(np.ones(9, "int64"), device=GPU)},
            updatable=True, swap=True, consume=False,
        )  # fmt: skip
        with vram.attach("w") as lease:
            for value in (2, 3):
                write(value)
                with lease.reading():
                    assert [str(array.device) for array in lease.values()] == ["host", GPU]
                    assert seen_here(lease) == [value]
            with vram.update("w", only=["there"]) as arrays:
                arrays["there"].fill(4)
            with lease.reading():
                assert [int(array.to_host()[0]) for array in lease.values()] == [3, 4]


@pytest.mark.gpu
class TestOnHardware(GpuSwaps):
    pass
