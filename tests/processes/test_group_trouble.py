"""Groups on bad days: stopped, forked, interrupted and lying ranks, and memory that one of them cannot have."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest
from tests.support import group_children as children
from tests.support.deadlines import AT_ONCE, SOON
from tests.support.groups import _raised, right, run, started, until_here, until_listening
from tests.support.interrupts import chosen, interrupt, points

import vram
from vram import driver, lifetime
from vram.collectives import hub, messages, symmetric
from vram.collectives.signals import ARRIVED
from vram.errors import CapacityError, ClosedError, PeerError, PeerGoneError, UsageError, VramError
from vram.sharing.channel import Channel, Credentials
from vram.spec import HOST


# -- killed, stopped, forked ------------------------------------------------------------------------------------------
def test_rank_0_that_dies_while_they_meet_is_named(at: str) -> None:
    came: list[BaseException] = []
    with started(at, 4, children.wait_at_barrier, [0]) as (zero,):
        thread = threading.Thread(
            target=lambda: came.append(_raised(lambda: vram.Group(rank=1, size=4, at=at, timeout=SOON)))
        )
        until_here(at, 4, 0)
        thread.start()
        until_here(at, 4, 0, 1)
        zero.kill()
        thread.join(SOON)
    assert isinstance(came[0], PeerGoneError)
    assert came[0].ranks == (0,)


@pytest.mark.parametrize("call", ["barrier", "symmetric"])
def test_a_rank_that_is_stopped_is_named_at_the_deadline_and_hears_it_when_it_goes_on(at: str, call: str) -> None:
    with started(at, 3, children.call_briefly) as ranks:
        assert [rank.said() for rank in ranks] == ["formed"] * 3
        stopped = ranks[1].process.pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        for rank in ranks:
            rank.pipe.send(call)
        for rank in (ranks[0], ranks[2]):
            kind, words, _ = rank.said()
            # Whoever's patience is over first names who is late; the other one may hear of it before its own is.
            assert (kind, "rank 1" in words) == ("WaitTimeoutError", True) or (kind, call) == (
                "PeerGoneError",
                "barrier",
            )
        os.kill(stopped, signal.SIGCONT)
        kind, words, _ = ranks[1].said()
        assert kind in ("PeerGoneError", "passed") if call == "barrier" else kind == "WaitTimeoutError"


def test_a_forked_child_is_no_rank_and_keeps_none_alive(at: str) -> None:
    with started(at, 2, children.fork_and_wait) as (zero, one):
        assert one.said() == ("ForkedError", False)
        assert one.process.pid is not None
        os.kill(one.process.pid, signal.SIGKILL)  # the child that it forked lives on
        kind, words = zero.said()
        assert (kind, words) == (
            "PeerGoneError",
            "the process of rank 1 has ended: those who are left make a new group",
        )


# -- interrupts -------------------------------------------------------------------------------------------------------
MOST = 120  # points of each, the different ones first


def books(at: str) -> dict[str, Any]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "memory": driver.get(HOST).live(),
        "handles": len(lifetime.live()),
        "paths": os.listdir(os.path.dirname(at)),
    }


def more(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what there is now that was not there before. A thread of an earlier test may have ended meanwhile."""
    counts = ("descriptors", "threads", "handles")
    return {
        key: (before[key], now[key])
        for key in now
        if (now[key] > before[key] if key in counts else now[key] != before[key])
    }


def compute(group: vram.Group) -> None:
    with group.symmetric(100, device="host", capacity=2**20) as buffer:
        group.all_reduce(buffer)
        buffer.resize(2**20)
        group.all_reduce(np.ones(3))
        group.barrier()


@pytest.mark.parametrize("what", ["meet", "compute", "close"])
def test_an_interrupt_leaves_nothing_of_a_group_i12(at: str, what: str) -> None:
    def once(nth: int | None) -> list[Any]:
        """Interrupt at the Nth point, and end what is left; or return the points."""
        made: list[vram.Group] = []

        def meet() -> None:
            made.append(vram.Group(rank=0, size=1, at=at, timeout=SOON))

        if what != "meet":
            meet()
        act = {"meet": meet, "compute": lambda: compute(made[0]), "close": lambda: made[0].close()}[what]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = points(act) if nth is None else []
            if nth is not None:
                interrupt(nth, act)
            for group in made:
                group.close()
        return found

    for _ in range(2):
        once(1 << 30)
    gc.collect()
    before = books(at)
    found = once(None)
    for nth in chosen(found, MOST, seed=18):
        once(nth)
        deadline = time.monotonic() + AT_ONCE
        while left := more(before, books(at)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gc.collect()
            assert time.monotonic() < deadline, f"left by an interrupt at {found[nth - 1]}, point {nth}: {left}"


# -- growing ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("whose", ["others", "own"])
def test_memory_that_one_rank_cannot_map_is_given_back_on_all(
    at: str, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 2**20
    fails = threading.local()

    def failing(where: Any, name: str) -> None:
        call = getattr(where, name)

        def act(*given: Any) -> Any:
            # Not the first one of the others: some are mapped then. Nor the way back of its own.
            if getattr(fails, "now", False) and (given[1] == 2 * rows if whose == "own" else fails.seen):
                raise CapacityError("not here")
            fails.seen = True
            return call(*given)

        monkeypatch.setattr(where, name, act)

    for where, name in [(vram.Array, "resize")] if whose == "own" else [
        (symmetric, "extend_memory"), (symmetric, "map_peer")
    ]:  # fmt: skip
        failing(where, name)

    def work(group: vram.Group) -> list[str]:
        with group.symmetric(rows, "int32", device="host", capacity=3 * rows) as buffer:
            fails.now, fails.seen = group.rank == 1, False
            first = _raised(lambda: buffer.resize(2 * rows))
            fails.seen = False
            second = _raised(lambda: group.symmetric(2 * rows, "int32", device="host"))
            fails.now = False
            assert buffer.sizes() == dict.fromkeys(buffer.sizes(), 4 * rows)
            assert [peer.shape for peer in buffer.peers] == [(rows,)] * 3
            buffer.resize(3 * rows)
            buffer.array.numpy()[:] = np.arange(3 * rows) + group.rank
            group.barrier()
            for rank, peer in enumerate(buffer.peers):
                assert (peer.numpy() == np.arange(3 * rows) + rank).all()
            group.barrier()
        return [f"{type(error).__name__}: {error}" for error in (first, second)]

    zero, one, two = right(run(3, at, work))
    assert one == ["CapacityError: not here"] * 2
    assert zero == two == ["PeerError: rank 1 of the group 'group' could not: CapacityError: not here"] * 2


def test_a_buffer_does_not_grow_without_its_group(at: str) -> None:
    with vram.Group(rank=0, size=1, at=at, timeout=SOON) as group:
        buffer = group.symmetric(4, device="host")
    with pytest.raises(ClosedError):
        buffer.resize(5)
    del group
    with pytest.raises(ClosedError, match="is gone"):
        buffer.resize(5)
    buffer.close()


# -- elements ---------------------------------------------------------------------------------------------------------
def test_the_number_of_a_call_passes_the_32_bits_that_are_waited_on(at: str) -> None:
    def work(group: vram.Group) -> None:
        group._signals._own[ARRIVED] = 2**32 - 5
        for number in range(20):
            value = np.array([number + group.rank])
            group.all_reduce(value)
            assert value[0] == 3 * number + 3
        assert group._signals.arrived > 2**32 + 10

    right(run(3, at, work))


@pytest.mark.parametrize("each", [5, 1_500_000])
def test_in_place_is_where_the_part_of_the_rank_lies_and_all_other_overlaps_are_refused(at: str, each: int) -> None:
    size = 3

    def work(group: vram.Group) -> None:
        rank = group.rank
        whole = np.zeros((size, each), np.int64)
        whole[rank] = rank + 1
        group.all_gather(whole[rank], whole)
        assert (whole == np.array([[1], [2], [3]])).all()
        whole += 10 * rank
        group.all_to_all(whole, whole)
        assert (whole == rank + 1 + np.array([[0], [10], [20]])).all()
        group.reduce_scatter(whole, whole[rank])
        assert (whole[rank] == 3 * 10 * rank + 6).all()
        for act in (
            lambda: group.all_gather(whole[rank - 1], whole),
            lambda: group.reduce_scatter(whole, whole[rank - 1]),
            lambda: group.all_reduce(whole.reshape(-1)[1:], out=whole.reshape(-1)[:-1]),
        ):
            with pytest.raises(UsageError, match="overlap"):
                act()
        group.barrier()

    right(run(size, at, work))


# -- others who speak what ranks speak --------------------------------------------------------------------------------
@contextlib.contextmanager
def zero_waits(at: str, size: int = 2) -> Any:
    """Rank 0 waits for the others; what came of it is in the list, at the end."""
    came: list[Any] = []

    def come() -> None:
        try:
            with vram.Group(rank=0, size=size, at=at, timeout=SOON) as group:
                group.barrier()
        except VramError as error:
            came.append(error)

    thread = threading.Thread(target=come)
    thread.start()
    try:
        until_here(at, size + 1, 0) if size > 2 else until_listening(at)
        yield came
    finally:
        thread.join(SOON)
        assert not thread.is_alive()


def hello(at: str, message: object) -> Channel:
    channel = Channel.connect(at, SOON)
    channel.send(messages.encode(message))
    return channel


def heard(channel: Channel) -> Any:
    return messages.decode_from_hub(channel.recv(timeout=SOON)[0])


def test_ranks_of_other_versions_are_refused_and_all_hear_it(at: str) -> None:
    with zero_waits(at) as came, hello(at, messages.Hello(0, "group", 1, 2)) as channel:
        assert "rank 1 speaks protocol 0" in heard(channel).why
    assert isinstance(came[0], UsageError)
    assert "use one version of vram in all ranks" in str(came[0])


def test_another_user_is_not_let_in(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "peer_credentials", lambda sock: Credentials(1, os.geteuid() + 1, 1))
    with zero_waits(at) as came:
        channel = Channel.connect(at, SOON)
        with channel, contextlib.suppress(PeerGoneError):
            channel.send(messages.encode(messages.Hello(messages.PROTOCOL, "group", 1, 2)))
            pytest.fail(f"{heard(channel)} was said to another user")
        monkeypatch.undo()
        with vram.Group(rank=1, size=2, at=at, timeout=SOON) as group:
            group.barrier()
    assert came == []


# -- threads ----------------------------------------------------------------------------------------------------------
def test_closing_in_another_thread_ends_a_call_here_and_on_the_others(at: str) -> None:
    heard = [threading.Event(), threading.Event()]  # of ranks 0 and 1: who looks after rank 2 has come may pass

    def work(group: vram.Group) -> BaseException:
        if group.rank == 2:
            assert all(one.wait(SOON) for one in heard)
            with contextlib.suppress(PeerGoneError):
                group.barrier()  # all have come to this one
            return _raised(group.barrier)

        def close() -> None:
            while not group._signals.arrived:
                time.sleep(0.001)
            group.close()

        thread = threading.Thread(target=close)
        if group.rank == 1:
            thread.start()
        try:
            return _raised(group.barrier)
        finally:
            heard[group.rank].set()
            if group.rank == 1:
                thread.join(SOON)

    for error in right_errors(run(3, at, work)):
        assert isinstance(error, PeerGoneError)
        assert error.ranks == (1,)
        assert "gave up in the middle of a call" in str(error), "and has not left, between two calls"


def right_errors(came: list[Any]) -> list[BaseException]:
    assert all(isinstance(one, PeerError) for one in came), came
    return came


def test_a_buffer_of_another_group_is_refused(at: str) -> None:
    with (
        vram.Group("one", rank=0, size=1, at=at, timeout=SOON) as one,
        vram.Group("two", rank=0, size=1, at=at, timeout=SOON) as two,
        one.symmetric(4, device="host") as buffer,
    ):
        with pytest.raises(UsageError, match="none of the group 'two'"):
            two.all_reduce(buffer)
        two.all_reduce(buffer.array)
        one.all_reduce(buffer)
