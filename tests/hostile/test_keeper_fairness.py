"""One user asks as much as it can, and the others do not wait for it. As other users, with real connections.

No test here measures time: the keeper's answers carry the moment at which they were made, by its own clock.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from tests.support.other_users import OTHER, keeper_of, needs_root
from tests.support.peers import Peer, running
from tests.support.users import GREEDY, KIB4, MODEST, being, moment, open_to_all, peers

from vram.keeper import messages as m
from vram.keeper.client import KeeperClient
from vram.keeper.private import KeeperProcess, short_directory
from vram.testing.keeper import memfds, until

pytestmark = [
    pytest.mark.slow,
    needs_root,
]  # goes with the fair shares of a keeper


@contextlib.contextmanager
def stopped(keeper: KeeperProcess) -> Iterator[None]:
    """So that everything is there before the first is read."""
    os.kill(keeper.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(keeper.pid, signal.SIGCONT)


CONNECTIONS, EACH = 150, 60


def ask_much(greedy: list[Peer]) -> None:
    for peer in greedy:
        for call in range(1, EACH + 1):
            peer.send(m.encode(m.Statistics(call)))


def test_who_asks_little_does_not_wait_for_who_asks_much() -> None:
    """In turn by connection, all 9,000 requests of the one were answered before the 60th of the other."""
    with open_to_all() as keeper, peers(keeper, GREEDY, CONNECTIONS) as greedy, peers(keeper, MODEST, 1) as (modest,):
        with stopped(keeper):
            ask_much(greedy)
            for call in range(1, EACH + 1):
                modest.send(m.encode(m.Statistics(call)))
        last = max(moment(modest.hear()) for _ in range(EACH))
        answered = [moment(peer.hear()) for _ in range(EACH) for peer in greedy]  # and nobody starves
        assert len(answered) == CONNECTIONS * EACH
        earlier = sum(one <= last for one in answered)
        assert earlier < len(answered) // 2, "who asked little had to wait for who asked much"


def test_who_waits_is_answered_in_order_and_may_go() -> None:
    """A peer that goes while its requests wait costs the keeper nothing that stays."""
    with open_to_all() as keeper, KeeperClient.connect(keeper.path) as good:
        idle = len(os.listdir(f"/proc/{keeper.pid}/fd"))
        with peers(keeper, GREEDY, CONNECTIONS) as greedy:
            with stopped(keeper):
                ask_much(greedy)
            good.statistics()
            for peer in greedy[::2]:
                peer.close()
            for peer in greedy[1::2]:
                calls = [reply.call for _ in range(EACH) if isinstance(reply := peer.hear(), m.KeeperStatistics)]
                assert calls == list(range(1, EACH + 1))
        until(lambda: good.statistics().connections == 1, what="the end of all connections")
        until(lambda: len(os.listdir(f"/proc/{keeper.pid}/fd")) == idle, what="the end of their descriptors")


def test_what_waits_moves_with_a_takeover() -> None:
    with open_to_all() as keeper, peers(keeper, GREEDY, CONNECTIONS) as greedy, peers(keeper, MODEST, 1) as (modest,):
        with stopped(keeper):
            ask_much(greedy)
            modest.send(m.encode(m.Statistics(1)))
        moment(modest.hear())
        with running(keeper.path, "--takeover") as successor:
            moment(modest.ask(m.encode(m.Statistics(2))))
            pids = set()
            for _ in range(EACH):
                for peer in greedy:
                    reply = peer.hear()
                    assert isinstance(reply, m.KeeperStatistics)
                    pids.add(reply.pid)
            assert pids <= {keeper.pid, successor.pid}
            assert len(greedy) == CONNECTIONS


def test_a_thousand_leases_that_end_at_once_are_ended_in_parts() -> None:
    """With the connection, or with one message: what another connection asks meanwhile is answered in between.

    Of the same user, so that this is not for fairness.
    """
    with open_to_all() as keeper, KeeperClient.connect(keeper.path) as good, memfds(1) as fds:
        good.publish("w", [KIB4], fds)
        for way in ("one message", "the end"):
            with peers(keeper, 0, 1) as (greedy,):
                leases = []
                for call in range(1, 4_001):
                    greedy.send(m.encode(m.Attach(call, "w")))
                    attached = greedy.hear()
                    assert isinstance(attached, m.Attached)
                    leases.append(attached.lease)
                with peers(keeper, 0, 1) as (modest,):
                    with stopped(keeper):
                        if way == "the end":
                            greedy.close()
                        else:
                            greedy.send(m.encode(m.Release(9_999, leases)))
                        for call in range(1, 31):
                            modest.send(m.encode(m.Statistics(call)))
                    seen = [modest.hear() for _ in range(30)]
                    left = [one.leases for one in seen if isinstance(one, m.KeeperStatistics)]
                    assert len(left) == 30
                    assert len(set(left)) > 10, "others were answered before the leases began to end, or after all had"
                if way != "the end":
                    assert greedy.hear() == m.Done(9_999)
                    assert good.statistics().leases == 0
            until(lambda: good.statistics().leases == 0, what="the end of the leases")


def test_a_thousand_who_wait_for_one_name_are_served_in_parts() -> None:
    """What another user asks meanwhile is answered in between, whatever each of the thousand expects."""
    notes = {f"{number:03x}": "v" for number in range(100)}
    with (
        open_to_all() as keeper,
        peers(keeper, GREEDY, 1) as (greedy,),
        peers(keeper, OTHER, 1) as (owner,),
        peers(keeper, MODEST, 1) as (modest,),
    ):
        for call in range(1, 1_001):
            wanted = {**notes, "063": f"other {call}"}
            greedy.send(m.encode(m.Attach(call, "w", expect=wanted, wait=None)))
        before = greedy.ask(m.encode(m.Statistics(9_999)))
        assert isinstance(before, m.KeeperStatistics)
        assert before.waiting == 1_000
        with memfds(1) as fds, stopped(keeper):
            owner.send(m.encode(m.Publish(1, "w", [m.SegmentRow(4096, 1, 0)], ["host"], meta=notes)), fds)
            for call in range(1, 31):
                modest.send(m.encode(m.Statistics(call)))
        seen = [modest.hear() for _ in range(30)]
        waiting = [one.waiting for one in seen if isinstance(one, m.KeeperStatistics)]
        assert len(waiting) == 30
        assert len(set(waiting)) > 10, "others were answered before all who wait were served, or after"
        for call in range(1, 1_001):
            refused = greedy.hear()
            assert isinstance(refused, m.Error)
            assert (refused.call, refused.kind) == (call, "MismatchError")


# -- connections ------------------------------------------------------------------------------------------------------


def is_refused(stranger: Peer) -> bool:
    with contextlib.suppress(BrokenPipeError):  # it was told already
        stranger.send(m.encode(m.Hello(1, 1, "many")))
    reply = stranger.hear() or stranger.hear()  # what was refused has not read the greeting: that is told first
    if isinstance(reply, m.Error):
        assert reply.kind == "CapacityError"
        return True
    assert isinstance(reply, m.Welcome)
    return False


def test_the_keepers_own_user_gets_in_whatever_others_hold() -> None:
    """Two users take what they can, each half of all connections; root looks, makes room, and takes over."""
    with open_to_all(descriptors=512) as keeper, contextlib.ExitStack() as stack:
        refused = 0
        for uid in (GREEDY, MODEST):
            for _ in range(200):
                with being(uid):
                    peer = Peer(keeper.path, greet=False)
                stack.callback(peer.close)
                refused += is_refused(peer)
        assert 200 < refused < 300, "two users may have all but some of 170"
        with KeeperClient.connect(keeper.path) as good:
            assert good.statistics().connections == 400 - refused + 1
            with memfds(1) as fds:
                good.publish("w", [KIB4], fds)
            with running(keeper.path, "--takeover", launcher=["sh", "-c", 'ulimit -n 512; exec "$@"', "sh"]):
                assert [entry.name for entry in good.list()] == ["w"]
                with KeeperClient.connect(keeper.path) as another:
                    another.remove("w")
                with being(MODEST):
                    late = Peer(keeper.path, greet=False)
                assert is_refused(late)
                late.close()


# -- descriptors in flight --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def keeper_of_another(**options: float) -> Iterator[str]:
    """A keeper that is not root's, so that it may have 512 descriptors in flight; everybody may connect."""
    with short_directory() as place:
        os.chown(place, OTHER, OTHER)
        os.chmod(place, 0o711)
        with keeper_of(OTHER, f"{place}/k", descriptors=512, mode=0o666, **options):
            yield f"{place}/k"


PART = 512 // 64  # descriptors that one connection may leave unread


def one_as(stack: contextlib.ExitStack, path: str, uid: int, *, greet: bool = True) -> Peer:
    with being(uid):
        peer = Peer(path, greet=greet)
    stack.callback(peer.close)
    return peer


def publish_big(peer: Peer, fd: int) -> None:
    big = m.Publish(1, "big", [m.SegmentRow(4096, 1, 0)] * PART, ["host"])
    assert isinstance(peer.ask(m.encode(big), [fd] * PART), m.Published)


def test_who_reads_is_not_cut_off_for_those_who_do_not() -> None:
    """One user's connections hold all that it may have in flight; another one of the same user has read everything."""
    with keeper_of_another(patience=3.0) as path, memfds(1) as (fd,), contextlib.ExitStack() as stack:
        modest = one_as(stack, path, GREEDY)
        publish_big(modest, fd)
        held = modest.ask(m.encode(m.Attach(2, "big")))
        assert isinstance(held, m.Attached)
        greedy = [one_as(stack, path, GREEDY) for _ in range(512 // PART + 8)]
        for peer in greedy:
            peer.send(m.encode(m.Attach(1, "big")))
        modest.send(m.encode(m.Attach(3, "big")))
        late = one_as(stack, path, MODEST, greet=False)
        assert late.is_cut_off()  # and so would be whoever has owed something for longer
        for peer in greedy:  # until then what they did not read is in flight
            peer.close()
        assert isinstance(modest.hear(), m.Attached)
        assert modest.ask(m.encode(m.Stale(4, held.lease))) == m.IsStale(4, False, 1)


def test_what_one_user_does_not_read_is_in_nobody_elses_way() -> None:
    """Nor when its connections were closed for it, and it keeps its ends of them: the kernel goes on counting."""
    with (
        keeper_of_another(patience=1.0) as path,
        memfds(1) as (fd,),
        contextlib.ExitStack() as stack,
        contextlib.ExitStack() as theirs,
    ):
        own, modest = one_as(stack, path, OTHER), one_as(stack, path, MODEST)
        publish_big(modest, fd)
        for turn in range(6):  # 6 * 12 * 8 descriptors are more than 512
            for _ in range(12):
                one_as(theirs, path, GREEDY).send(m.encode(m.Attach(1, "big")))
            for peer in (modest, own):
                assert isinstance(peer.ask(m.encode(m.Attach(2 + turn, "big"))), m.Attached)
            assert one_as(stack, path, MODEST, greet=False).is_cut_off()  # and so are those that did not read
        one = one_as(stack, path, GREEDY)
        one.send(m.encode(m.Attach(1, "big")))
        theirs.close()
        assert isinstance(one.hear(), m.Attached), "with what it did not read its user's share is free again"


def test_users_that_do_not_read_leave_room_for_the_next_one() -> None:
    with keeper_of_another() as path, memfds(1) as (fd,), contextlib.ExitStack() as stack:
        publish_big(one_as(stack, path, MODEST), fd)
        for uid in range(6001, 6006):
            for _ in range(20):
                one_as(stack, path, uid).send(m.encode(m.Attach(1, "big")))
        for uid in (MODEST, OTHER):
            assert isinstance(one_as(stack, path, uid).ask(m.encode(m.Attach(1, "big"))), m.Attached)


# -- answers that wait ------------------------------------------------------------------------------------------------


def test_answers_that_one_user_does_not_read_are_bounded_over_its_connections() -> None:
    """They end with some of its connections; who else waits for the same gets them."""
    calls, connections = 60, 12
    with open_to_all() as keeper, KeeperClient.connect(keeper.path) as good, memfds(1) as (fd,):
        with peers(keeper, GREEDY, connections) as greedy, peers(keeper, MODEST, 2) as modest:
            for peer in [*greedy, *modest]:
                for call in range(1, calls + 1):
                    peer.send(m.encode(m.Attach(call, "big", wait=1000.0)))
            until(lambda: good.statistics().waiting == calls * (connections + 2), what="all waits")
            good.publish("big", [KIB4], [fd], manifest=b"m" * 32_000, meta={f"k{i}": "v" * 300 for i in range(13)})
            for peer in modest:
                for _ in range(calls):
                    assert isinstance(peer.hear(), m.Attached)
            others = len(modest) + 1
            until(lambda: good.statistics().connections - others < 10, what="the end of some of 12 connections")
            assert good.statistics().connections - others > 5, "with some 2 MiB unread for each, 16 MiB are 8 of them"
