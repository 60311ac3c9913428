"""Updates of memory of a GPU, in one slot and in two: its work is ordered with the sections of readers (I14, S10)."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.deadlines import SOON
from tests.support.update_children import ROWS, publish, seen, seen_here
from tests.support.updates import GPU, HERE, OTHER, copied, fill, tear, update_under_readers, write

import standin
import vram
from vram import driver as drivers
from vram.errors import AsleepError, BusyError, DriverError, TornError, UnsupportedError, UsageError

pytestmark = [pytest.mark.usefixtures("kept")]


def came_to(target: vram.Array) -> list[int]:
    """Return what is in memory once the GPU has done all that it was told."""
    drivers.get(HERE).synchronize(HERE)
    return np.unique(target.to_host()).tolist()  # type: ignore[no-any-return]


def raising(stream: int) -> None:
    """Have the GPU write, in an update that raises."""
    with contextlib.suppress(KeyError), vram.update("w", stream=stream) as arrays:
        fill(arrays["a0"], 99, stream)
        raise KeyError("wrong")


class GpuUpdates:
    @pytest.fixture(autouse=True)
    def deferred(self) -> Iterator[None]:
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

    def test_memory_of_both_kinds_and_copies_are_updated_together(self) -> None:
        with vram.zeros(100, "int64", device=GPU) as left:
            vram.publish("other", {"left": left}, writable=True)
            receipt = vram.publish("w", {"here": np.zeros(5, "int64"), "there": left}, updatable=True)
            assert set(receipt.copied) == {"here", "there"}
            assert "left this process before" in receipt.copied["there"]
        with vram.attach("w") as lease:
            assert [str(array.device) for array in lease.values()] == ["host", GPU]
            write(3)
            assert seen(lease) == (2, [3])

    # -- the order of work on the GPU -----------------------------------------------------------------------------
    @pytest.mark.parametrize("named", [True, False], ids=["stream", "all"])
    def test_what_a_section_had_the_gpu_read_is_read_before_the_next_update(
        self, streams: list[int], named: bool
    ) -> None:
        publish(device=GPU, count=1)
        with vram.attach("w") as lease, vram.zeros(ROWS, "int64", device=GPU) as target:
            with lease.reading(stream=streams[0] if named else None):
                copied(lease["a0"], target, streams[0])
            write(2)
            assert came_to(target) == [1]

    @pytest.mark.parametrize("named", [True, False], ids=["stream", "all"])
    def test_what_an_update_had_the_gpu_write_is_there_when_it_is_announced(
        self, streams: list[int], named: bool
    ) -> None:
        publish(device=GPU, count=1)
        with vram.attach("w") as lease, vram.zeros(ROWS, "int64", device=GPU) as target:
            with vram.update("w", stream=streams[0] if named else None) as arrays:
                fill(arrays["a0"], 1, streams[0])
            with lease.reading(stream=streams[1]):
                copied(lease["a0"], target, streams[1])
            assert came_to(target) == [0x0101010101010101]

    def test_an_inner_section_waits_for_a_stream_of_its_own(self, streams: list[int]) -> None:
        publish(device=GPU, count=1)
        with vram.attach("w") as lease, vram.zeros(ROWS, "int64", device=GPU) as target:
            with lease.reading(stream=streams[0]), lease.reading(stream=streams[1]):
                copied(lease["a0"], target, streams[1])
            write(2)
            assert came_to(target) == [1]

    def test_what_an_interrupt_leaves_of_a_section_waits_for_the_gpu(self, streams: list[int]) -> None:
        """As if ``__exit__`` had never begun (I12)."""
        publish(device=GPU, count=1)
        with vram.attach("w") as lease, vram.zeros(ROWS, "int64", device=GPU) as target:
            section = lease.reading(stream=streams[0])
            section.__enter__()
            copied(lease["a0"], target, streams[0])
            del section
            gc.collect()
            write(2)
            assert came_to(target) == [1]

    # -- torn -----------------------------------------------------------------------------------------------------
    def test_what_a_torn_update_left_on_the_gpu_does_not_come_after_the_next_one(self, streams: list[int]) -> None:
        publish(device=GPU, count=1)
        with vram.attach("w") as lease:
            raising(streams[0])
            with pytest.raises(TornError):
                seen(lease)
            with vram.update("w", stream=streams[1]) as arrays:
                fill(arrays["a0"], 0, streams[1])
            drivers.get(HERE).synchronize(HERE)
            assert seen(lease) == (2, [0])

    @pytest.mark.parametrize("swap", [False, True], ids=["one slot", "two slots"])
    def test_readers_in_other_processes_never_see_half_of_an_update(self, swap: bool) -> None:
        publish(device=GPU, swap=swap)
        update_under_readers(2, 60)

    @pytest.mark.usefixtures("two_gpus")
    def test_a_reader_on_another_gpu(self) -> None:
        publish(device=GPU)
        with vram.attach("w", device=OTHER) as lease:
            assert lease["a0"].__dlpack_device__() == (2, 1)
            write(2)
            assert seen(lease) == (2, [2])

    # -- who may not ----------------------------------------------------------------------------------------------
    def test_memory_of_the_host_has_no_stream(self, streams: list[int]) -> None:
        publish()
        with vram.attach("w") as lease:
            with pytest.raises(UnsupportedError, match="streams"):
                lease.reading(stream=streams[0])
            with pytest.raises(UnsupportedError, match="streams"):
                vram.update("w", stream=streams[0]).__enter__()
            assert seen(lease) == (1, [1])
            write(2)
            assert seen(lease) == (2, [2])

    def test_what_is_no_stream_is_refused_before_anything_waits(self) -> None:
        publish(device=GPU)
        with vram.attach("w") as lease:
            for wrong in (0, True, "s", -1):
                with pytest.raises(UsageError):
                    lease.reading(stream=wrong)
                with pytest.raises(UsageError):
                    vram.update("w", stream=wrong).__enter__()
            assert seen(lease) == (1, [1])
            write(2)
            assert seen(lease) == (2, [2])

    def test_what_is_asleep_is_not_published_and_what_is_published_does_not_sleep(self) -> None:
        with vram.zeros(10, device=GPU) as array:
            vram.sleep([array], to=None)
            with pytest.raises(AsleepError):
                vram.publish("w", {"a": array}, updatable=True)
            vram.wake([array])
            vram.publish("w", {"a": array}, updatable=True)
            with pytest.raises(BusyError):
                vram.sleep([array], to=None)
            write(3)
        with vram.attach("w") as lease:
            assert seen(lease)[0] == 2

    # -- two slots ------------------------------------------------------------------------------------------------
    def test_an_update_of_two_slots_goes_into_the_other_and_readers_move_there(self) -> None:
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
            assert came_to(target) == [1]
            assert seen(lease) == (3, [0x0303030303030303])

    def test_what_is_copied_over_is_there_when_the_version_is_announced(self, streams: list[int]) -> None:
        publish(device=GPU, count=3, swap=True)
        with vram.attach("w") as lease:
            with vram.update("w", only=["a1"], stream=streams[0]) as arrays:
                fill(arrays["a1"], 0, streams[0])
            with vram.zeros(ROWS, "int64", device=GPU) as target, lease.reading(stream=streams[1]):
                copied(lease["a2"], target, streams[1])
                assert came_to(target) == [1]
            with vram.update("w", only=["a0"]) as arrays:
                arrays["a0"].fill(7)
            with lease.reading() as version:
                assert version == 3
                assert [np.unique(array.to_host()).tolist() for array in lease.values()] == [[7], [0], [1]]

    def test_what_a_block_that_raised_left_on_the_gpu_comes_before_the_next_one(self, streams: list[int]) -> None:
        publish(device=GPU, count=1, swap=True)
        with vram.attach("w") as lease:
            raising(streams[0])  # and no section since, which would wait for it
            with vram.update("w", stream=streams[1]) as arrays:
                fill(arrays["a0"], 0, streams[1])
            drivers.get(HERE).synchronize(HERE)
            assert seen(lease) == (2, [0])
            tear()
            assert (lease.torn, seen(lease)) == (False, (2, [0]))


@pytest.mark.standin
class TestOnTheStandin(GpuUpdates):
    def test_a_stream_that_captures_is_refused(self, streams: list[int]) -> None:
        publish(device=GPU)
        with vram.attach("w") as lease:
            lease.reading()  # gives the page to the keeper
            standin.Standin().capture(streams[0])
            with pytest.raises(UsageError, match="captures a graph"):
                lease.reading(stream=streams[0])
            with pytest.raises(UsageError, match="captures a graph"):
                vram.update("w", stream=streams[0]).__enter__()
            with lease.reading(stream=streams[1]) as version:
                assert version == 1
            with vram.update("w", stream=streams[1]) as arrays:
                for array in arrays.values():
                    fill(array, 0, streams[1])
            standin.Standin().capture(0)
            assert seen(lease) == (2, [0])

    def test_a_section_that_cannot_wait_does_not_end(self, streams: list[int]) -> None:
        """Fail closed: the publisher waits until the lease is over."""
        publish(device=GPU)
        with vram.attach("w") as lease, vram.attach("w") as other:
            section = lease.reading()
            section.__enter__()
            standin.Standin().capture(streams[0])
            with pytest.raises(DriverError, match="capturing a graph"):
                section.__exit__(None, None, None)
            del section
            gc.collect()
            standin.Standin().capture(0)
            with pytest.raises(BusyError, match="1 of its readers"):
                write(2, timeout=0.05)
            lease.close()
            write(2)
            assert seen(other) == (2, [2])

    def test_an_interrupt_while_a_section_waits_costs_nothing(self, streams: list[int]) -> None:
        """I12: the section waits once more when it is dropped, and has ended then."""
        publish(device=GPU, count=1)
        with vram.attach("w") as lease, vram.zeros(ROWS, "int64", device=GPU) as target:

            def read(stream: int) -> None:
                with lease.reading(stream=stream):
                    copied(lease["a0"], target, stream)
                    standin.Standin().interrupt("cuStreamSynchronize")

            with pytest.raises(KeyboardInterrupt):
                read(streams[0])
            gc.collect()
            assert not any(lease._pages[0].slots)
            write(2)
            assert came_to(target) == [1]

    def test_an_interrupt_while_an_update_waits_comes_when_it_is_whole(self) -> None:
        """I12: what the GPU does cannot be taken back any more."""
        publish(device=GPU)
        with vram.attach("w") as lease:
            lease.reading()

            def interrupted() -> None:
                with vram.update("w", timeout=SOON) as arrays:
                    arrays["a0"].fill(9)
                    standin.Standin().interrupt("cuCtxSynchronize")

            with pytest.raises(KeyboardInterrupt):
                interrupted()
            assert seen(lease) == (2, [1, 9])
            write(2)
            assert seen(lease) == (3, [2])

    def test_an_update_that_cannot_wait_is_torn(self, streams: list[int]) -> None:
        publish(device=GPU)
        with vram.attach("w") as lease:
            lease.reading()
            update = vram.update("w", timeout=SOON)
            with pytest.raises(DriverError, match="capturing a graph"), update:
                standin.Standin().capture(streams[0])
            standin.Standin().capture(0)
            with pytest.raises(TornError):
                seen(lease)
            write(2)
            assert seen(lease) == (2, [2])

    def test_an_update_of_two_slots_that_cannot_wait_changes_nothing(self, streams: list[int]) -> None:
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


@pytest.mark.gpu
class TestOnHardware(GpuUpdates):
    pass
