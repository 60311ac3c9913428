"""Updates of what has two slots: readers move when they like, and nothing is ever torn (I14)."""

from __future__ import annotations

import gc
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from tests.support import update_children as children
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import later
from tests.support.samples import in_turns
from tests.support.update_children import ROWS, publish, seen, seen_here
from tests.support.updates import child, steps, steps_of_an_update, tear, words_of, write

import vram
from vram import driver as drivers
from vram.entries import reading
from vram.entries.swap import slot_of
from vram.errors import (
    AccessDeniedError,
    BusyError,
    ClosedError,
    NotFoundError,
    PeerGoneError,
    TornError,
    UsageError,
    WaitTimeoutError,
)
from vram.handover.exports import ExportTable
from vram.spec import HOST

pytestmark = pytest.mark.usefixtures("kept")


# -- one process, in words -------------------------------------------------------------------------------------------
def test_an_update_goes_into_the_other_slot_and_readers_move_there() -> None:
    mine = publish(swap=True)
    with vram.attach("w") as lease:
        assert (lease.updatable, lease.torn, len(lease.slots)) == (True, False, 2)
        where = [{name: array.address for name, array in slot.items()} for slot in lease.slots]
        assert not set(where[0].values()) & set(where[1].values())
        views = [{name: array.numpy() for name, array in slot.items()} for slot in lease.slots]
        written = set()
        for version in range(1, 6):
            if version > 1:
                with vram.update("w") as arrays:
                    written.add(arrays["a0"].address)
                    for array in arrays.values():
                        array.numpy()[:] = version
            with lease.reading() as number:
                assert (number, lease.slot) == (version, (version - 1) % 2)
                assert {name: array.address for name, array in lease.items()} == where[lease.slot]
                assert all((view == version).all() for view in views[lease.slot].values())
                assert all((view == version).all() for view in lease.numpy().values())
                assert [name for name, array in lease.items() if array is lease.slots[lease.slot][name]] == list(lease)
        assert lease.wait(newer_than=4, timeout=0) == 5
        assert len(written) == 2
        assert mine["a0"].address in written, "what is shared where it is, is one of the two"
        assert lease.nbytes >= 2 * sum(array.nbytes for array in mine.values())


def test_an_update_waits_for_nobody_in_the_current_version_and_for_who_is_one_behind() -> None:
    publish(swap=True)
    with vram.attach("w") as lease, vram.attach("w") as other:
        with lease.reading() as version:
            write(2, timeout=0)
            assert (version, lease.slot, seen(other)) == (1, 0, (2, [2]))
            assert all((array.numpy() == 1).all() for array in lease.values())
            with pytest.raises(BusyError, match=r"of the version before the current one") as refused:
                write(3, timeout=0.05)
            assert len(refused.value.holders) == 1
            assert f"pid {os.getpid()}, uid {os.getuid()}" in refused.value.holders[0]
            assert seen(other) == (2, [2]), "what was not begun has changed something"
            with lease.reading() as inner:
                assert (inner, lease.slot) == (1, 0), "a section inside another one has moved"
            assert seen_here(lease) == [1]
            thread, came = later(lambda: write(3))
            until(lambda: other._words is not None and other._words[reading.NEXT] == 3)
            assert not came
        thread.join(SOON)
        assert came == [None]
        assert seen(lease) == seen(other) == (3, [3])


def test_one_array_of_a_slot_is_kept() -> None:
    publish(swap=True)
    lease = vram.attach("w")
    with lease.reading():
        array = lease.keep_only("a0")
    assert lease.is_closed
    assert (array.numpy() == 1).all()
    write(2, timeout=0)
    assert (array.numpy() == 1).all(), "it is of the slot that was current"


def test_a_reader_that_is_still_entering_is_in_either_slot() -> None:
    publish(swap=True)
    with vram.attach("w") as lease:
        assert seen(lease) == (1, [1])
        for version, word, waits in ((1, 1, False), (2, 2, False), (3, 2, True), (3, 3, True), (3, 4, True)):
            lease._pages[0].slots[9] = word
            if waits:
                with pytest.raises(BusyError):
                    write(version + 1, timeout=0.02)
            else:
                write(version + 1, timeout=0.02)
        lease._pages[0].slots[9] = 1
        write(4, timeout=0.02)
        assert seen(lease) == (4, [4])


def test_who_enters_says_so_of_both_slots_until_it_knows_which() -> None:
    """Or the publisher could look in between: at a thread that has looked where it will be, and has not said so."""
    publish(swap=True)
    with vram.attach("w") as lease:
        assert seen(lease) == (1, [1])
        (slot,) = page_of(lease).slots_of.values()
        real, said = slot.words, []

        class Words:
            def __getitem__(self, index: int) -> int:
                if index == reading.VERSION:
                    said.append(slot.slots[slot.index])
                return int(real[index])

        slot.words = Words()  # type: ignore[assignment]
        with lease.reading():
            said.append(slot.slots[slot.index])
        assert slot.slots[slot.index] == 0
        assert said == [reading.EITHER, 1, 1], "where it looks, inside, and where it leaves"
        slot.words = real


def test_arrays_are_asked_for_inside_of_sections() -> None:
    publish(swap=True)
    with vram.attach("w") as lease:
        for ask in (
            lambda: lease["a0"], lambda: list(lease.values()), lease.numpy, lambda: lease.slot, lambda: lease.array,
        ):  # fmt: skip
            with pytest.raises(UsageError, match=r"this thread is in none|ask by name"):
                ask()
        with pytest.raises(NotFoundError, match="no array 'x'"):
            lease.slots[1]["x"]
        with lease.reading():
            with pytest.raises(NotFoundError, match="no array 'x'"):
                lease["x"]
            for ask in (lambda: lease["a0"], lambda: lease.slot):
                thread, came = later(ask)
                thread.join(SOON)
                assert isinstance(came[0], UsageError), "a thread without a section gets what another one's is in"
            assert seen_here(lease) == [1]
        with pytest.raises(UsageError):
            lease["a0"]
        slots = lease.slots
        assert repr(slots[1]).startswith("<slot 1 of <Lease 'w' version ")
        assert [len(slot) for slot in slots] == [3, 3]
    for ask in (lambda: slots[0]["a0"], lambda: lease.slot):
        with pytest.raises(ClosedError):
            ask()


def test_what_has_one_slot_says_so() -> None:
    publish()
    with vram.attach("w") as lease:
        assert lease.slots == (lease,)
        assert lease.slot == 0
        with lease.reading():
            assert lease.slot == 0


def test_arguments_that_cannot_be() -> None:
    arrays = {"a": np.zeros(3)}
    for verb in (vram.publish, lambda *given, **named: vram.attach_or_publish(given[0], lambda: given[1], **named)):
        with pytest.raises(UsageError, match="needs updatable=True"):
            verb("x", arrays, swap=True)  # type: ignore[operator]
        with pytest.raises(UsageError, match="choose one of them"):
            verb("x", arrays, swap=True, updatable=True, writable=True)  # type: ignore[operator]
        with pytest.raises(UsageError, match="swap must be True or False"):
            verb("x", arrays, swap=1, updatable=True)  # type: ignore[operator]
    publish(swap=True)
    with pytest.raises(UsageError, match="no private copy of either stays whole"):
        vram.attach("w", access="cow")
    with pytest.raises(AccessDeniedError):
        vram.attach("w", access="rw")
    with pytest.raises(UsageError, match="no array 'x'"):
        vram.update("w", only=["x"]).__enter__()
    with vram.attach("w") as lease:
        assert seen(lease) == (1, [1])
        write(2)
        assert seen(lease) == (2, [2])


def test_what_is_loaded_or_consumed_has_two_slots(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"x": np.ones(4), "y": np.ones((2, 3), "int16"), "empty": np.ones((0, 3))}, path)
    assert vram.publish_file("w", path, device="host", updatable=True, swap=True).zero_copy
    with vram.attach("w") as lease:
        with vram.update("w") as arrays:
            arrays["y"].fill(7)
        with lease.reading() as version:
            assert (version, lease["y"].numpy().tolist()) == (2, [[7] * 3] * 2)
            assert lease["x"].numpy().tolist() == [1] * 4
            assert lease["empty"].shape == (0, 3)
    vram.remove("w")
    sources: dict[str, Any] = {"a": np.ones(1000), "b": vram.asarray(np.ones(1000), device="host")}
    vram.publish("w", sources, updatable=True, swap=True, consume=True)
    assert not sources
    with vram.attach("w") as lease:
        write(3)
        assert seen(lease) == (2, [3])
    vram.remove("w")
    with vram.attach_or_publish("w", lambda: {"a": np.ones(3)}, updatable=True, swap=True) as lease:
        assert len(lease.slots) == 2
        write(3)
        assert seen(lease) == (2, [3])


def test_an_array_of_a_slot_does_not_leave_the_process() -> None:
    mine = publish(swap=True)
    with vram.attach("w") as lease:
        table = ExportTable(lambda number: None)
        for array in (mine["a0"], lease.slots[0]["a0"], lease.slots[1]["a0"]):
            with pytest.raises(UsageError):
                pickle.dumps(array)
            with pytest.raises(UsageError, match="updatable=True"):
                table.export(array)
            assert vram.publish("again", {"a": array}).copied


def test_to_look_whether_an_array_is_there_is_not_to_ask_for_it() -> None:
    publish(swap=True)
    with vram.attach("w") as lease:
        for value in (5, 6):
            with vram.update("w") as arrays:
                assert "a1" in arrays
                assert arrays.keys() & {"a1"}
                assert arrays != {}
                assert arrays.get("none") is None
                arrays["a0"].fill(value)
        with vram.update("w") as arrays:
            arrays["a1"].fill(7)
        with vram.update("w") as arrays:
            assert "a1" in arrays
        with lease.reading():
            assert [int(lease[name].numpy()[0]) for name in ("a0", "a1")] == [6, 7]


def test_only_what_differs_is_copied_over(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(swap=True)
    copied: list[int] = []
    kind: Any = type(drivers.get(HOST))
    real = kind.copy

    def copy(self: Any, destination: int, source: int, nbytes: int) -> None:
        copied.append(nbytes)
        real(self, destination, source, nbytes)

    monkeypatch.setattr(kind, "copy", copy)
    for value in (2, 3):
        write(value)
    assert copied == []
    for names, nbytes in ((["a0"], 2), (["a0"], 0), (["a1"], 1), (None, 0)):
        copied.clear()
        with vram.update("w", only=names) as arrays:
            for array in arrays.values():
                array.fill(4)
        assert sum(copied) == nbytes * 8 * ROWS


def test_two_names_of_the_same_memory_are_written_by_either() -> None:
    with vram.empty((ROWS,), "int64", device="host") as array:
        array.fill(1)
        vram.publish("w", {"embed": array, "head": array, "part": array[10:20]}, updatable=True, swap=True)
    with vram.attach("w") as lease:
        for value, name in ((2, "embed"), (3, "head"), (4, "part"), (5, "head"), (6, "part"), (7, "part")):
            with vram.update("w", only=[name]) as arrays:
                arrays[name].fill(value)
            with lease.reading():
                found = {name: np.unique(array.numpy()).tolist() for name, array in lease.items()}
            part, whole = (value, {4: 3, 6: 5, 7: 5}[value]) if name == "part" else (value, value)
            assert found["part"] == [part]
            assert found["embed"] == found["head"] == sorted({part, whole})


NAMES = ("a0", "a1", "a2")
STEPS = st.lists(
    st.tuples(st.sets(st.sampled_from(NAMES)), st.booleans(), st.sampled_from(["whole", "raises", "dropped"])),
    max_size=12,
)


@in_turns(5)
@settings(max_examples=40, deadline=None)
@given(STEPS)
def test_each_version_is_the_one_before_and_what_was_written(did: list[tuple[set[str], bool, str]]) -> None:
    """Against a model with real bytes; a reader stays in each version until the one after the next one is due."""
    publish(swap=True)
    model, value, version = dict.fromkeys(NAMES, 1), 1, 1
    with vram.attach("w") as lease, vram.attach("w") as slow:
        section = slow.reading()
        section.__enter__()
        before = dict(model)
        for names, named, how in did:
            value += 1
            begun = vram.update("w", only=names if named and names else None, timeout=SOON)
            if slow_is_behind(slow, version):
                section.__exit__(None, None, None)
                section = slow.reading()
                assert section.__enter__() == version
                before = dict(model)
            arrays = begun.__enter__()
            for name in names:
                arrays[name].fill(value)
            if how == "whole":
                begun.__exit__(None, None, None)
                model |= dict.fromkeys(names, value)
                version += 1
            elif how == "raises":
                begun.__exit__(KeyError, KeyError(), None)
            del begun, arrays
            gc.collect()
            assert {name: np.unique(array.numpy()).tolist() for name, array in slow.items()} == {
                name: [number] for name, number in before.items()
            }
            with lease.reading() as number:
                assert (number, lease.torn) == (version, False)
                found = {name: np.unique(array.numpy()).tolist() for name, array in lease.items()}
            assert found == {name: [number] for name, number in model.items()}
        section.__exit__(None, None, None)
    vram.remove("w")


def slow_is_behind(lease: vram.Lease, version: int) -> bool:
    return lease.slot != slot_of(version)


# -- who dies, and where -----------------------------------------------------------------------------------------------
def test_a_block_that_raises_changes_nothing_and_the_next_one_is_whole() -> None:
    publish(swap=True)
    with vram.attach("w") as lease:
        with lease.reading():
            tear()
            assert seen_here(lease) == [1]
        assert (lease.torn, seen(lease)) == (False, (1, [1]))
        with pytest.raises(WaitTimeoutError):
            lease.wait(newer_than=1, timeout=0.01)
        with vram.update("w", only=["a1"]) as arrays:
            arrays["a1"].fill(5)
        with lease.reading():
            assert [int(array.numpy()[0]) for array in lease.values()] == [1, 5, 1]
            assert seen_here(lease) == [1, 5]
        begun = vram.update("w")
        begun.__enter__()["a0"].fill(2)
        del begun
        gc.collect()
        with vram.update("w", only=["a2"]) as arrays:
            arrays["a2"].fill(6)
        with lease.reading():
            assert [np.unique(array.numpy()).tolist() for array in lease.values()] == [[1], [5], [6]]
        write(7)
        assert seen(lease) == (4, [7])


def test_a_publisher_may_be_killed_at_any_step_and_readers_go_on() -> None:
    leases: list[vram.Lease] = []

    def attach(victim: Any) -> None:
        assert victim.said() == "published"
        leases.append(vram.attach("w"))
        assert seen(leases[0]) == (1, [1])
        victim.tell()

    found = {}
    for at, victim in steps(_write_stopping, beside=attach):
        (lease,) = leases
        with lease, lease.reading() as version:
            assert seen_here(lease) == [version], at
            victim.kill()
            assert seen_here(lease) == [version], at
            with vram.attach("w") as another:
                assert (another.torn, seen(another)) == (False, (version, [version])), at
            assert not lease.torn, at
            with pytest.raises(PeerGoneError):
                lease.wait(newer_than=2, timeout=SOON)
            with pytest.raises(AccessDeniedError, match="which is gone: publish it again"):
                vram.update("w").__enter__()
            found[at] = version
        leases.clear()
        vram.remove("w")
    assert found["begin_update"] == found["pages"] == found["array 0"] == found["array 2"] == 1
    assert (found["end_update"], found["done"]) == (2, 2)
    assert "barrier" in found


def _write_stopping(path: str, pipe: Any, stop_at: int) -> None:
    children.write_stopping(path, pipe, stop_at, "host", True)


def page_of(lease: vram.Lease) -> reading.Page:
    lease.reading()
    return lease._pages[0]


@pytest.mark.parametrize("updates", [1, 2])
def test_a_section_that_was_cut_off_is_whole_after_one_update_and_torn_after_two(updates: int) -> None:
    with child(_write_twice, updates) as publisher:
        assert publisher.said() == "published"
        with vram.attach("w") as lease:
            section = lease.reading()
            assert section.__enter__() == 1
            lease._client._channel.hang_up()
            publisher.tell()
            assert publisher.said() == "done"
            if updates == 1:
                assert seen_here(lease) == [1]
                section.__exit__(None, None, None)
            else:
                with pytest.raises(TornError, match="updated while it was read"):
                    section.__exit__(None, None, None)
            publisher.kill()


def _write_twice(path: str, pipe: Any, updates: int) -> None:
    os.environ["VRAM_KEEPER"] = path
    publish(swap=True)
    pipe.send("published")
    pipe.recv()
    for value in range(updates):
        write(2 + value)
    pipe.send("done")
    pipe.recv()


def test_a_barrier_stands_between_the_version_and_the_look_at_the_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may be seen after a later load: without the barrier a reader enters the slot that is written next."""
    publish(swap=True)
    with vram.attach("w") as lease:
        assert seen(lease) == (1, [1])

        def state() -> str:
            return f"next {words_of(lease)[reading.NEXT]}, now {words_of(lease)[reading.VERSION]}"

        order = steps_of_an_update(monkeypatch, state)
        first = "barrier, next 2, now 1"
        assert order == [first, "look", first, "write", first]
