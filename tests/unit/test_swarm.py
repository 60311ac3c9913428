"""Who gets which piece from whom: any order of joins, ends, failures and departures, against what must hold."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram.nodes.swarm import SENDS, TRIES, UPLOADS, Swarm


def pull(swarm: Swarm, readers: dict[bytes, str], count: int, seed: int = 0) -> dict[bytes, set[int]]:
    """Have readers pull in a random order until all have all of it; return what each got."""
    order = random.Random(seed)
    got: dict[bytes, set[int]] = {reader: set() for reader in readers}
    getting: list[tuple[bytes, int, str]] = []
    by_address = {address: reader for reader, address in readers.items() if address}
    for _ in range(100 * count * len(readers)):
        reader = order.choice(list(readers))
        given_ = swarm.next(reader)
        if given_ is not None:
            assert given_.number not in got[reader]
            assert not given_.peer or given_.number in got[by_address[given_.peer]]
            getting.append((reader, given_.number, given_.peer))
        if getting and order.random() < 0.6:
            who, number, _ = getting.pop(order.randrange(len(getting)))
            got[who].add(number)
            swarm.got(who, number)
        if not getting and all(swarm.is_done(one) for one in readers):
            return got
    raise AssertionError("they never get all of it")


@pytest.mark.parametrize("seed", range(5))
def test_sixteen_that_come_together_take_little_more_than_one_copy_from_the_source(seed: int) -> None:
    count = 40
    swarm = Swarm(count)
    readers = {bytes([number]): f"10.0.0.{number}:1" for number in range(16)}
    for reader, address in readers.items():
        swarm.join(reader, address)
    got = pull(swarm, readers, count, seed)
    assert all(numbers == set(range(count)) for numbers in got.values())
    assert swarm.sent == count
    assert swarm.are_done


def test_who_comes_late_gets_all_of_it_from_others() -> None:
    swarm = Swarm(10)
    swarm.join(b"a", "a:1")
    pull(swarm, {b"a": "a:1"}, 10)
    swarm.join(b"b", "b:1")
    for _ in range(10):
        given_ = swarm.next(b"b")
        assert given_ is not None
        assert given_.peer == "a:1"
        swarm.got(b"b", given_.number)
    assert swarm.is_done(b"b")
    assert swarm.sent == 10


def test_readers_that_share_nothing_get_all_of_it_from_the_source() -> None:
    swarm = Swarm(10)
    for reader in (b"a", b"b"):
        swarm.join(reader, "")
    pull(swarm, {b"a": "", b"b": ""}, 10)
    assert swarm.sent == 20


def test_what_only_one_that_leaves_was_getting_comes_from_the_source_again() -> None:
    swarm = Swarm(1)
    swarm.join(b"a", "a:1")
    swarm.join(b"b", "b:1")
    assert swarm.next(b"a") == (0, "")
    assert swarm.next(b"b") is None
    assert not swarm.is_done(b"b")
    swarm.leave(b"a")
    assert swarm.next(b"b") == (0, "")
    assert swarm.sent == 2


def test_who_has_waited_long_gets_it_from_the_source_although_another_is_getting_it() -> None:
    swarm = Swarm(1)
    swarm.join(b"a", "a:1")
    swarm.join(b"b", "b:1")
    swarm.next(b"a")
    assert swarm.next(b"b", insist=True) == (0, "")


def test_nobody_sends_more_pieces_at_a_time_than_it_may() -> None:
    swarm = Swarm(UPLOADS + 2)
    swarm.join(b"a", "a:1", range(UPLOADS + 2))
    swarm.join(b"b", "")
    begun = [swarm.next(b"b") for _ in range(UPLOADS)]
    assert {one.peer for one in begun if one} == {"a:1"}
    assert swarm.next(b"b") is None
    first = begun[0]
    assert first is not None
    swarm.got(b"b", first.number)
    assert swarm.next(b"b") is not None


def test_a_reader_from_whom_nothing_can_be_had_is_asked_no_more() -> None:
    swarm = Swarm(2)
    swarm.join(b"a", "a:1", [0, 1])
    swarm.join(b"b", "b:1")
    for _ in range(TRIES):
        given_ = swarm.next(b"b")
        assert given_ is not None
        assert given_.peer == "a:1"
        swarm.failed(b"b", given_.number)
    given_ = swarm.next(b"b")
    assert given_ is not None
    assert given_.peer == ""


def test_what_nobody_was_told_to_get_counts_for_nothing() -> None:
    """A reader cannot make others ask it for what it claims to have."""
    swarm = Swarm(2)
    swarm.join(b"a", "a:1")
    swarm.got(b"a", 1)
    swarm.failed(b"a", 0)
    swarm.join(b"b", "")
    assert {swarm.next(b"b"), swarm.next(b"b")} == {(0, ""), (1, "")}


def test_two_readers_at_one_address_are_not_both_asked_there() -> None:
    swarm = Swarm(1)
    swarm.join(b"a", "x:1", [0])
    swarm.join(b"b", "x:1")
    assert swarm.next(b"b") == (0, "x:1")
    swarm.leave(b"b")
    swarm.leave(b"a")
    swarm.join(b"c", "")
    assert swarm.next(b"c") == (0, "")  # nobody else has it any more


@given(st.data())
def test_whatever_happens_all_is_counted(data: st.DataObject) -> None:
    """After any calls, once everybody has left, nothing is left; meanwhile whoever lacks something can get it."""
    count = data.draw(st.integers(1, 6))
    swarm = Swarm(count)
    getting: dict[bytes, set[int]] = {}
    for _ in range(data.draw(st.integers(0, 60))):
        known = sorted(getting)
        verb = data.draw(st.sampled_from(["join", "next", "got", "failed", "leave"]))
        if verb == "join" or not known:
            reader = data.draw(st.sampled_from([b"a", b"b", b"c", b"d"]))
            serves = data.draw(st.sampled_from(["", "one:1", reader.decode() + ":1"]))
            swarm.join(reader, serves, data.draw(st.sets(st.integers(0, 7))))
            getting[reader] = set()
            continue
        reader = data.draw(st.sampled_from(known))
        if verb == "leave":
            swarm.leave(reader)
            del getting[reader]
        elif verb == "next":
            given_ = swarm.next(reader, insist=data.draw(st.booleans()))
            if given_ is not None:
                assert given_.number not in getting[reader]
                getting[reader].add(given_.number)
        else:
            number = data.draw(st.integers(0, count - 1))
            getattr(swarm, verb)(reader, number)
            getting[reader].discard(number)
        for one, numbers in getting.items():
            assert set(swarm._readers[one].getting) == numbers
    for reader in list(getting):
        swarm.leave(reader)
    assert (swarm._readers, swarm._serving) == ({}, {})
    assert swarm._coming == [0] * count
    assert swarm._rare == set(range(count))
    assert not any(swarm._holders)
    swarm.join(b"new", "")
    assert {swarm.next(b"new") for _ in range(count)} == {(number, "") for number in range(count)}


def test_the_source_sends_a_few_pieces_at_a_time_to_several_readers() -> None:
    swarm = Swarm(3 * SENDS)
    swarm.join(b"a", "a:1")
    begun = [swarm.next(b"a") for _ in range(SENDS + 1)]  # as many as it asks for, alone
    swarm.join(b"b", "b:1")
    assert swarm.next(b"b") is None
    for one in begun[:2]:
        assert one is not None
        swarm.failed(b"a", one.number)
    assert swarm.next(b"b") is not None
