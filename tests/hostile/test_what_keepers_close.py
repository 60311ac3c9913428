"""What a keeper closes, its sender waits for, whoever gave it back; and what is due is done a little at a time."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
import tracemalloc
from dataclasses import astuple

import pytest
from tests.support.catalogues import lease, publish
from tests.support.keeper_here import serving
from tests.support.keepers_for_all import connect, for_all
from tests.support.many_locks import locked
from tests.support.open_files import keeper_here
from tests.support.other_users import needs_root
from tests.support.peers import Peer
from tests.support.stuck_files import stuck
from tests.support.users import GREEDY, KIB4, MODEST, being, open_to_all

from vram.errors import QuotaError
from vram.keeper import messages as m
from vram.keeper import slow_close
from vram.keeper.catalogue import PART, Catalogue
from vram.keeper.client import KeeperClient, Segment
from vram.keeper.limits import Quotas
from vram.keeper.private import short_directory
from vram.keeper.server import KeeperServer
from vram.keeper.slow_close import Unclosed
from vram.keeper.takeover import hand_over, take_over
from vram.open_files import close_fds
from vram.testing.keeper import SOON, memfds, until

pytestmark = pytest.mark.slow  # goes with lanes of closing

MIB = 1 << 20
MIB8 = Segment(8 * MIB)


# -- what a reader is the last to give back ---------------------------------------------------------------------------


def follow(owner: KeeperClient, reader: KeeperClient, count: int) -> None:
    """Publish so many versions, each in memory of its own, of which the reader has each until it has the next, and
    gives back the last as well."""
    before: list[int] = []
    for _ in range(count):
        with memfds(1, 8 * MIB) as fds:
            owner.publish("model", [MIB8], fds)
        held = reader.attach("model")
        close_fds(held.fds)
        reader.release(before)
        before = [held.lease_id]
    reader.release(before)


@needs_root
def test_what_a_reader_gives_back_last_waits_and_counts_for_its_publisher() -> None:
    """It was closed on the reader's account: the publisher had any amount held, and the reader could not publish."""
    with for_all(quotas=Quotas(user_bytes=16 * MIB)) as server, contextlib.ExitStack() as stack:
        fds = stack.enter_context(memfds(3, 8 * MIB))
        more = stack.enter_context(memfds(1, 9 * MIB))
        owner, reader = (connect(stack, server.path, uid) for uid in (GREEDY, MODEST))
        closer = server.slow_closer
        with stuck(closer, GREEDY):
            follow(owner, reader, 3)  # 16 MiB of them wait, and the last is current
            with pytest.raises(QuotaError, match=rf"uid {GREEDY} may hold 16 MiB.*16 MiB are still being freed"):
                owner.publish("model", [Segment(9 * MIB)], more)
            assert closer.of(MODEST) == Unclosed(), "an honest reader pays for it"
            for number in range(2):
                reader.publish(f"own{number}", [MIB8], fds[number : number + 1])
        until(lambda: closer.total == Unclosed(), what="the end of what was given back")
        owner.publish("model", [MIB8], fds[2:])
        for name, client in (("model", owner), ("own0", reader), ("own1", reader)):
            client.remove(name)
        until(lambda: closer.total == Unclosed(), what="the end of all memory")
        accounts = server.catalogue.accounts
        assert not any(astuple(accounts.total))
        assert accounts._by_user == accounts._old == {}


@needs_root
def test_a_publisher_with_many_locks_has_no_more_held_than_twice_its_ceiling() -> None:
    """From one process to another, with a file that takes its time: 2.5 GiB were held where 128 MiB were allowed."""
    options = ("--max-bytes", "64MiB", "--max-bytes-per-user", "16MiB")
    with open_to_all(*options) as keeper, contextlib.ExitStack() as stack, locked(200_000) as heavy:
        fds = stack.enter_context(memfds(2, 8 * MIB))
        owner, reader = (connect(stack, keeper.path, uid) for uid in (GREEDY, MODEST))
        owner.publish("model", [KIB4] * 250, [heavy] * 250, writable=True)
        held = reader.attach("model")
        close_fds(held.fds)
        owner.publish("model", [KIB4], stack.enter_context(memfds(1)))
        reader.release([held.lease_id])  # four seconds of closing, or so
        with pytest.raises(QuotaError, match=rf"uid {GREEDY} may hold 16 MiB.* are still being freed"):
            follow(owner, reader, 20)
        reader.publish("own", [MIB8, MIB8], fds)


@needs_root
def test_memory_that_is_refused_is_closed_whatever_of_its_sender_closes_slowly() -> None:
    """It counts for no ceiling: behind what does not close, it was a message and some, of any size."""
    with for_all(quotas=Quotas(user_bytes=16 * MIB)) as server, contextlib.ExitStack() as stack:
        fds = stack.enter_context(memfds(2, 8 * MIB))
        one = connect(stack, server.path, GREEDY)
        closer = server.slow_closer
        with stuck(closer, GREEDY, 0):
            for _ in range(3):
                one.publish("w", [MIB8], fds[:1])
                one.remove("w")
            for _ in range(10):
                with pytest.raises(QuotaError):
                    one.publish("w", [MIB8, MIB8], fds)
            until(lambda: not closer.of(GREEDY).sent, what="the end of what was refused")
            assert closer.of(GREEDY).nbytes == 24 * MIB


@needs_root
def test_all_that_waits_to_be_freed_is_bounded_for_all_users_together() -> None:
    """Each user's was: together they had the keeper hold as many times its ceiling as they were."""
    with for_all(quotas=Quotas(max_bytes=16 * MIB)) as server, contextlib.ExitStack() as stack:
        fds = stack.enter_context(memfds(1, 8 * MIB))
        one, other = (connect(stack, server.path, uid) for uid in (GREEDY, MODEST))
        with stuck(server.slow_closer, GREEDY):
            for _ in range(3):
                one.publish("w", [MIB8], fds)
                one.remove("w")
            other.publish("v", [MIB8], fds)
            with pytest.raises(QuotaError, match=r"the keeper may hold 16 MiB.*it holds 8 MiB, and 24 MiB are still"):
                other.publish("u", [KIB4], stack.enter_context(memfds(1)))
        server.slow_closer.finish(SOON)
        other.publish("u", [MIB8], fds)


def test_memory_that_is_more_than_was_said_waits_for_room_as_it_comes() -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(keeper_here(quotas=Quotas(max_bytes=16 * MIB)))
        client = stack.enter_context(KeeperClient.connect(server.path))
        fds, more = (stack.enter_context(memfds(1, size * MIB)) for size in (8, 9))
        with stuck(server.slow_closer, os.geteuid()):
            for _ in range(3):
                client.publish("w", [MIB8], fds)
                client.remove("w")
            client.offer("small", 4096)
            with pytest.raises(QuotaError, match=r"it holds 0 B, and 24 MiB are still being freed"):
                client.publish("small", [KIB4], more)
        server.slow_closer.finish(SOON)
        client.publish("small", [KIB4], more)


@needs_root
def test_whose_memory_it_is_moves_with_a_takeover() -> None:
    with short_directory() as place, contextlib.ExitStack() as stack:
        os.chmod(place, 0o711)
        first, second = (
            KeeperServer(f"{place}/k", mode=0o666, raises_limit=False, hand_over=hand_over) for _ in range(2)
        )
        stack.enter_context(serving(first))
        fds = stack.enter_context(memfds(2))
        owner, reader = (connect(stack, first.path, uid) for uid in (GREEDY, MODEST))
        owner.publish("w", [KIB4], fds[:1])
        held = reader.attach("w")
        close_fds(held.fds)
        owner.publish("w", [KIB4], fds[1:])
        assert take_over(second)
        stack.enter_context(serving(second))
        with stuck(second.slow_closer, GREEDY, 0):
            reader.release([held.lease_id])
            until(lambda: second.slow_closer.total.handles, what="the end of the first version")
            assert second.slow_closer.of(GREEDY) == Unclosed(handles=1, nbytes=4096)


# -- room for what closes slowly --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [4096, 8192, 16_383, 16_384, 20_000, 32_768, 65_535, 65_536, 1 << 20])
def test_it_takes_a_dozen_users_to_fill_the_room_for_what_closes_slowly(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two users did with 16,384 descriptors, and three with 20,000: nobody else published."""
    monkeypatch.setattr(slow_close, "_MAX_THREADS", 0)  # so that nothing of it closes
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    with short_directory() as place:
        server = KeeperServer(f"{place}/k", raises_limit=False)
    closer, message = server.slow_closer, (server.ancillary - socket.CMSG_LEN(0)) // 4
    users = 0
    while closer.takes(GREEDY):
        users += 1
        for count in (closer._few, message):
            if closer.takes(GREEDY + users):
                closer.close_fds(range(-count, 0), GREEDY + users)
        assert not closer.takes(GREEDY + users)
    assert users >= 12
    assert message >= 32, "a client sends so many at once"


@needs_root
@pytest.mark.parametrize("descriptors", [4096, 16_384])
def test_the_largest_publication_goes_through_where_messages_are_small(descriptors: int) -> None:
    with open_to_all(descriptors=descriptors) as keeper, contextlib.ExitStack() as stack:
        fds = stack.enter_context(memfds(1))
        modest = connect(stack, keeper.path, MODEST)
        assert modest.publish("large", [KIB4] * 1024, fds * 1024, manifest_fd=fds[0]) == 1
        with being(MODEST):
            peer = stack.enter_context(contextlib.closing(Peer(keeper.path)))
        most = max(32, descriptors // 256)
        said = m.Publish(1, "w", [m.SegmentRow(4096, 1, 0)] * most, ["host"])
        assert peer.ask(m.encode(said), fds * most) == m.Published(1, 1)


# -- what is due at once ----------------------------------------------------------------------------------------------


def test_what_is_due_is_done_a_little_at_a_time_also_where_nothing_follows_from_it() -> None:
    """Entries that are still leased end without an effect: all of them at once were 0.3 s for 32,768."""
    books = Catalogue(keeper_uid=0)
    owner, reader = books.connect(GREEDY), books.connect(MODEST)
    count = 10 * PART
    for number in range(count):
        publish(books, owner, f"w{number}", ttl=5.0)
        lease(books, reader, f"w{number}")
    whose: dict[int, int] = {}
    left = []
    while books.entries:
        assert books.expire(10.0, PART, whose) == []
        left.append(books.entries)
    assert left == [count - PART * done for done in range(1, 11)]
    assert whose == {GREEDY: count}, "nobody pays for it"


@needs_root
def test_many_entries_that_end_at_once_end_with_others_answered_in_between() -> None:
    """As another user: what the loop does at once of them is counted, and nobody's time."""
    with for_all() as server, contextlib.ExitStack() as stack:
        fds = stack.enter_context(memfds(1))
        greedy, modest = (connect(stack, server.path, uid) for uid in (GREEDY, MODEST))
        looked_at: list[int] = []
        right = server.service.expire

        def expire() -> None:
            before = server.catalogue.entries
            right()
            looked_at.append(before - server.catalogue.entries)

        server.service.expire = expire  # type: ignore[method-assign]
        for number in range(100):
            greedy.publish(f"w{number}", [KIB4], fds, ttl=3600.0)
            close_fds(greedy.attach(f"w{number}").fds)
        server.now = lambda: time.monotonic() + 7200.0
        server.loop.call_soon_threadsafe(server._expire)
        until(lambda: not modest.statistics().entries, what="the end of them all")
        assert max(looked_at) <= PART
        assert modest.statistics().versions == 100, "who has them keeps them"


# -- half a publication -----------------------------------------------------------------------------------------------


def test_half_a_publication_counts_what_the_keeper_keeps_of_it() -> None:
    """Names of devices took five times what they counted: 300 MiB for one user, who sends no second part."""
    devices = ["host", *(f"d{number:012}" for number in range(63))]
    count = 16 * 8
    with keeper_here() as server, contextlib.ExitStack() as stack:
        fds = stack.enter_context(memfds(1))
        stack.enter_context(KeeperClient.connect(server.path)).publish("first", [KIB4], fds)
        peers = [stack.enter_context(contextlib.closing(Peer(server.path))) for _ in range(8)]
        words = server.catalogue.accounts.total.words
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for call in range(1, 17):
                half = m.encode(m.Publish(call, "first", [m.SegmentRow(4096, 1, 0)] * 2, devices))
                for peer in peers:
                    assert isinstance(peer.ask(half, fds), m.NextPart)
            kept = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        counted = server.catalogue.accounts.total.words - words
    each = 2_500  # of one of which nothing is said: a connection has 16 at most
    assert kept < counted + count * each, f"{(kept - counted) // count} bytes of each are kept and not counted"
