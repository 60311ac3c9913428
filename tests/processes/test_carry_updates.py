"""Updates in place travel: to replicas in which each is a version, and to replicas that are updated in place."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.support.carried import Nodes, carrying, nodes, same
from tests.support.deadlines import SOON, until
from tests.support.deltas import SIZE, count_offered, following, is_here, next_of, offering, weights
from tests.support.wires import wire

import vram
from vram.errors import AccessDeniedError, BusyError, MismatchError, UsageError

Arrays = dict[str, Any]


def update(two: Nodes, arrays: Arrays) -> None:
    with vram.update("model", timeout=SOON, keeper=two.origin) as there:
        for name, array in arrays.items():
            there[name].numpy()[...] = array


def test_each_update_comes_as_a_version_and_as_what_changed(two: Nodes) -> None:
    arrays = weights()
    vram.publish("model", arrays, updatable=True, keeper=two.origin)
    with offering(two.origin) as carrier:
        with following(carrier.address, two.here) as versions:
            for updates in (1, 2, 3):
                done = next(versions)
                assert (done.version, done.origin_version, done.origin_updates, done.why) == (updates, 1, updates, {})
                assert updates == 1 or 0 < done.delta_bytes <= SIZE / 12
                assert is_here(two, arrays)
                update(two, arrays := next_of(arrays))
            next(versions)
        update(two, arrays := next_of(arrays))
        with following(carrier.address, two.here) as versions:  # it goes on from what is here
            assert 0 < next(versions).delta_bytes <= SIZE / 12
        assert is_here(two, arrays)


def test_a_replica_in_place_keeps_the_addresses_of_its_readers(two: Nodes) -> None:
    arrays = weights()
    vram.publish("model", arrays, meta={"of": "a trainer"}, updatable=True, keeper=two.origin)
    with (
        offering(two.origin) as carrier,
        following(carrier.address, two.here, in_place=True) as versions,
    ):
        next(versions)
        with vram.attach("model", keeper=two.here) as lease:
            where = [slot["w"].address for slot in lease.slots]
            for updates in (1, 2, 3, 4):
                with lease.reading() as number:
                    assert number == updates
                    assert same(lease, arrays)
                    assert lease["w"].address == where[(updates - 1) % 2]
                update(two, arrays := next_of(arrays))
                done = next(versions)
                assert (done.version, done.origin_version, done.origin_updates) == (1, 1, updates + 1)
                assert 0 < done.delta_bytes <= SIZE / 12
            assert lease.meta == {"of": "a trainer", "origin": carrier.address}
            vram.publish("model", next_of(arrays), meta={"of": "a trainer"}, keeper=two.origin)
            done = next(versions)  # another version of the same layout is an update as well
            assert (done.version, done.origin_version, done.origin_updates) == (1, 2, 0)
            with lease.reading():
                assert same(lease, next_of(arrays))
            vram.publish("model", {"other": np.arange(9)}, keeper=two.origin)
            assert next(versions).version == 2
            assert lease.is_stale()


def test_no_reader_sees_half_of_an_update_and_none_waits(two: Nodes) -> None:
    seen: list[int] = []
    is_over = threading.Event()

    def read() -> None:
        with vram.attach("model", keeper=two.here) as lease:
            while not is_over.is_set():
                with lease.reading():
                    found = set(np.unique(lease["w"].numpy()[:: 1 << 12]))
                assert len(found) == 1
                seen.extend(map(int, found))

    vram.publish("model", {"w": np.zeros(SIZE, np.uint8)}, updatable=True, keeper=two.origin)
    with (
        offering(two.origin) as carrier,
        following(carrier.address, two.here, in_place=True) as versions,
        ThreadPoolExecutor(1) as threads,
    ):
        next(versions)
        reader = threads.submit(read)
        try:
            for value in range(1, 6):
                update(two, {"w": np.full(SIZE, value, np.uint8)})
                assert next(versions).origin_updates == value + 1
                until(lambda value=value: value in seen, what="the value")  # type: ignore[misc]
        finally:
            is_over.set()
        reader.result(SOON)
    assert seen == sorted(seen)


def test_a_reader_that_stays_in_its_section_is_named_and_waited_for(two: Nodes) -> None:
    vram.publish("model", {"w": np.zeros(9)}, updatable=True, keeper=two.origin)
    with offering(two.origin) as carrier, following(carrier.address, two.here, in_place=True, timeout=0.5) as versions:
        next(versions)
        with vram.attach("model", keeper=two.here) as lease, lease.reading():
            update(two, {"w": np.ones(9)})
            next(versions)  # into the other slot
            update(two, {"w": np.full(9, 2.0)})
            with pytest.raises(BusyError, match=f"pid {os.getpid()}"):
                next(versions)
            assert same(lease, {"w": np.zeros(9)})
        with following(carrier.address, two.here, in_place="yes") as wrong, pytest.raises(UsageError, match="in_place"):
            next(wrong)


def test_a_carrier_that_is_killed_in_an_update_is_gone_on_with(two: Nodes) -> None:
    arrays = weights()
    vram.publish("model", arrays, updatable=True, keeper=two.origin)
    with (
        wire() as link,
        carrying(two.origin, "--deltas", "--name", link.address) as (first, address),
        carrying(two.origin, "--deltas", "--name", link.address) as (_, other),
        following(link.address, two.here, in_place=True, streams=1) as versions,
    ):
        link.target = address
        next(versions)
        before = link.passed
        update(two, arrays := next_of(arrays))

        def change(block: bytes, at: int) -> bytes:
            if link.passed - before > 600_000 and link.target == address:  # in the second delta
                link.target = other
                first.kill()
            return block

        link.change = change
        done = next(versions)
        assert done.reconnected >= 1
        with vram.attach("model", keeper=two.here) as lease, lease.reading():
            assert same(lease, arrays)


def test_the_carrier_keeps_few_copies_whatever_the_number_of_updates(two: Nodes) -> None:
    vram.publish("model", {"w": np.zeros(9)}, updatable=True, keeper=two.origin)
    with offering(two.origin) as carrier, following(carrier.address, two.here, in_place=True) as versions:
        for value in range(20):
            next(versions)
            update(two, {"w": np.full(9, float(value))})
        assert count_offered(carrier) <= 3  # the newest, the one before, and the base


def test_an_origin_that_begins_anew_and_counts_as_before_is_followed(two: Nodes) -> None:
    with (
        nodes() as more,
        wire() as link,
        carrying(two.origin, "--name", link.address) as (first, address),
        carrying(more.origin, "--name", link.address) as (_, other),
        following(link.address, two.here, in_place=True) as versions,
    ):
        vram.publish("model", {"w": np.zeros(9)}, updatable=True, keeper=two.origin)
        vram.publish("model", {"w": np.ones(9)}, updatable=True, keeper=more.origin)
        link.target = address
        next(versions)
        link.target = other
        first.kill()
        next(versions)
        assert is_here_in_place(two, {"w": np.ones(9)})


def test_another_layout_whose_transfer_breaks_is_not_begun(two: Nodes) -> None:
    vram.publish("model", {"w": np.zeros(9)}, updatable=True, keeper=two.origin)
    with (
        wire() as link,
        carrying(two.origin, "--name", link.address) as (first, address),
        carrying(two.origin, "--name", link.address) as (_, other),
        following(link.address, two.here, in_place=True, streams=1) as versions,
    ):
        link.target = address
        next(versions)
        before = link.passed
        vram.publish("model", weights(), keeper=two.origin)

        def change(block: bytes, at: int) -> bytes:
            if link.passed - before > 600_000 and link.target == address:
                vram.publish("model", {"w": np.ones(9)}, updatable=True, keeper=two.origin)
                link.target = other
                first.kill()
            return block

        link.change = change
        until(lambda: next(versions).origin_version == 3, what="the first layout again")
        assert is_here_in_place(two, {"w": np.ones(9)})


def test_a_replica_is_an_origin_itself(two: Nodes) -> None:
    arrays = weights()
    vram.publish("model", arrays, updatable=True, keeper=two.origin)
    with (
        nodes() as more,
        offering(two.origin) as carrier,
        offering(two.here) as second,
        following(carrier.address, two.here) as versions,
        following(second.address, more.here, in_place=True) as third,
        following(second.address, more.origin) as fourth,
    ):
        for number in (1, 2, 3):
            next(versions)
            assert next(third).version == 1
            done = next(fourth)
            assert (done.version, done.origin_updates) == (number, 0)
            assert number == 1 or 0 < done.delta_bytes <= SIZE / 12
            assert is_here_in_place(Nodes(two.here, more.here), arrays)
            update(two, arrays := next_of(arrays))


def test_one_process_has_a_replica_in_place(two: Nodes) -> None:
    vram.publish("model", {"w": np.zeros(9)}, updatable=True, keeper=two.origin)
    vram.publish("model", {"w": np.zeros(9)}, keeper=two.here)
    with offering(two.origin) as carrier:
        with following(carrier.address, two.here, in_place=True) as versions:
            with pytest.raises(MismatchError):
                next(versions)
            assert not carrier.sent
        vram.remove("model", keeper=two.here)
        with (
            following(carrier.address, two.here, in_place=True) as versions,
            following(carrier.address, two.here, in_place=True) as others,
        ):
            next(versions)
            with pytest.raises(AccessDeniedError, match="another process"):
                next(others)


def test_all_readers_of_a_torn_entry_hear_why(two: Nodes) -> None:
    vram.publish("model", {"w": np.zeros(9)}, updatable=True, keeper=two.origin)
    with contextlib.suppress(ZeroDivisionError), vram.update("model", keeper=two.origin):
        1 / 0
    with offering(two.origin) as carrier, ThreadPoolExecutor(4) as threads:
        due = [threads.submit(vram.replicate, carrier.address, "model", keeper=two.here) for _ in range(4)]
        assert [type(one.exception(SOON)) for one in due] == [BusyError] * 4


def test_an_update_that_was_not_finished_does_not_travel(two: Nodes) -> None:
    vram.publish("model", {"w": np.zeros(9)}, updatable=True, keeper=two.origin)
    with (
        offering(two.origin) as carrier,
        following(carrier.address, two.here, in_place=True) as versions,
        ThreadPoolExecutor(1) as threads,
    ):
        next(versions)
        with contextlib.suppress(ZeroDivisionError), vram.update("model", keeper=two.origin) as arrays:
            arrays["w"].fill(1.0)
            1 / 0
        due = threads.submit(next, versions)
        with pytest.raises(TimeoutError):
            due.result(1.0)
        assert is_here_in_place(two, {"w": np.zeros(9)})
        update(two, {"w": np.full(9, 2.0)})
        due.result(SOON)
        assert is_here_in_place(two, {"w": np.full(9, 2.0)})


def is_here_in_place(two: Nodes, arrays: Arrays) -> bool:
    with vram.attach("model", keeper=two.here) as lease, lease.reading():
        return same(lease, arrays)
