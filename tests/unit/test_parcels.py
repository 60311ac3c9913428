"""Any number of descriptors in parts, each acknowledged before the next (S4), and owned by one at any time (I9)."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.samples import in_turns

from vram.errors import InternalError, ProtocolError
from vram.open_files import close_fds
from vram.sharing.channel import MAX_FDS
from vram.sharing.parcels import Collector, Sender, Unread, check_next, next_part

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="descriptors of memory need Linux")

COUNTS = st.integers(0, 3 * MAX_FDS + 1)
MOST = st.integers(1, MAX_FDS + 2)


def memfds(count: int) -> list[int]:
    return [os.memfd_create(f"parcel-{number}", os.MFD_CLOEXEC) for number in range(count)]


def names(fds: list[int]) -> list[str]:
    return [os.readlink(f"/proc/self/fd/{fd}").split(" ")[0].rpartition("-")[2] for fd in fds]


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


# -- sending --------------------------------------------------------------------------------------------------------
@given(COUNTS, MOST)
def test_s4_what_is_sent_in_parts_is_collected_whole_and_in_order(total: int, most: int) -> None:
    numbers, collected = list(range(1000, 1000 + total)), Collector(total, is_armed=False)
    sender = Sender(total, most)
    lengths = []
    for part in sender:
        assert not collected.is_complete
        came = numbers[part]
        lengths.append(len(came))
        collected.take(part.start, came)
        assert came == []
        sender.acknowledge(len(collected))
    assert collected.is_complete
    assert collected.detach() == numbers
    assert not collected
    # As few as can be: all but the last are full.
    assert lengths == [most] * (total // most) + [total % most] * (total % most > 0)


@in_turns(5)
@given(COUNTS, MOST, st.data())
def test_s4_an_acknowledgement_is_of_all_that_was_sent(total: int, most: int, data: st.DataObject) -> None:
    sender = Sender(total, most)
    sender.acknowledge(0)
    for part in sender:
        wrong = data.draw(st.integers(-1, total + 1).filter(lambda one: one != part.stop))  # noqa: B023  (drawn here)
        with pytest.raises(ProtocolError, match=f"has {wrong} descriptors, and {part.stop} of {total} were sent"):
            sender.acknowledge(wrong)
        sender.acknowledge(part.stop)


def test_s4_no_part_is_sent_before_the_one_before_it_is_acknowledged() -> None:
    parts = iter(Sender(3, 1))
    assert next(parts) == slice(0, 1)
    with pytest.raises(InternalError, match="0 of 1"):
        next(parts)


@given(COUNTS, MOST, st.integers(-2, 3 * MAX_FDS + 3))
def test_s4_a_part_that_is_asked_for_is_there(total: int, most: int, start: int) -> None:
    if total == start == 0:
        assert next_part(0, 0, most) == slice(0, 0), "what has none is one part"
    elif 0 <= start < total:
        part = next_part(total, start, most)
        assert part == slice(start, part.stop)
        assert len(range(total)[part]) == min(most, total - start)
    else:
        with pytest.raises(ProtocolError, match=f"descriptor {start} of {total} was asked for"):
            next_part(total, start, most)


@given(st.lists(st.sampled_from(["send", "acknowledge"])))
def test_s4_a_part_is_acknowledged_once_and_not_long_before_it_is_sent(steps: list[str]) -> None:
    """Whatever the other side says: at most one part more than it has taken is ever under way, and one of good will."""
    unread = Unread()
    for step in steps:
        if step == "send":
            if not unread.is_awaited:
                unread.sent += 1
        elif unread.taken <= unread.sent:
            unread.check()
            unread.taken += 1
        else:
            with pytest.raises(ProtocolError, match="were acknowledged"):
                unread.check()
        assert -1 <= unread.sent - unread.taken <= 1
        assert unread.is_awaited is (unread.sent - unread.taken == 1)


@given(st.lists(st.tuples(st.integers(0, MAX_FDS), st.booleans())))
def test_s4_few_descriptors_are_sent_without_an_acknowledgement(parts: list[tuple[int, bool]]) -> None:
    """Of parts that are the last of theirs, too: no more than one message has, and one message besides."""
    unread, on_the_way = Unread(), 0
    for count, is_last in parts:
        if unread.is_awaited:
            unread.taken += 1
            on_the_way = 0
        on_the_way += count
        if unread.asks(count, is_last=is_last):
            unread.sent, unread.unasked = unread.sent + 1, 0
        else:
            assert is_last, "another part follows"
            unread.unasked += count
        assert on_the_way <= 2 * MAX_FDS


# -- collecting -----------------------------------------------------------------------------------------------------
@given(st.integers(0, 40), st.lists(st.tuples(st.integers(-1, 41), st.integers(0, 12)), max_size=30))
def test_s7_a_part_that_is_not_the_next_is_refused_and_changes_nothing(
    total: int, parts: list[tuple[int, int]]
) -> None:
    collected, here = Collector(total, is_armed=False), list[int]()
    for number, (offset, count) in enumerate(parts):
        came = [1000 * number + index for index in range(count)]
        said = list(came)
        if offset == len(here) and count and len(here) + count <= total:
            collected.take(offset, came)
            here += said
            assert came == []
        else:
            with pytest.raises(ProtocolError):
                collected.take(offset, came)
            assert came == said
        assert collected == here
        assert collected.is_complete is (len(here) >= total)


@pytest.mark.parametrize(
    ("offset", "count", "said"),
    [
        (1, 1, "descriptors from 1 on came after 2"),
        (3, 1, "descriptors from 3 on came after 2"),
        (2, 0, "0 descriptors came, and 2 of 4 are here"),
        (2, 3, "3 descriptors came, and 2 of 4 are here"),
    ],
)
def test_s7_a_refused_part_is_closed_by_who_received_it_and_all_others_with_the_list(
    offset: int, count: int, said: str
) -> None:
    before = open_fds()
    collected = Collector(4)
    collected.take(0, memfds(2))
    came = memfds(count)
    with pytest.raises(ProtocolError, match=said):
        collected.take(offset, came)
    assert len(came) == count
    close_fds(came)
    assert names(collected) == ["0", "1"], "what was here is still open"
    del collected
    assert open_fds() == before


def test_i9_what_is_given_away_is_not_closed() -> None:
    collected = Collector(2)
    collected.take(0, memfds(2))
    fds = collected.detach()
    del collected
    assert names(fds) == ["0", "1"]
    close_fds(fds)


def test_i9_what_somebody_else_closes_is_left_to_them() -> None:
    collected = Collector(1, is_armed=False)
    fds = memfds(1)
    mine = list(fds)
    collected.take(0, fds)
    del collected
    assert names(mine) == ["0"]
    close_fds(mine)


# -- the rest -------------------------------------------------------------------------------------------------------
def test_what_comes_next_is_said() -> None:
    check_next(3, 3, "segments")
    for offset in (2, 4):
        with pytest.raises(ProtocolError, match=f"segments of memory 1 from {offset} on came after 3"):
            check_next(offset, 3, "segments of memory 1")
