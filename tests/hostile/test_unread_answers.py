"""What one user leaves in the kernel on the keeper's account, and has it do in nobody's turn.

Answers that fill no socket wait in no queue of the keeper's. They are its memory all the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
import time
from collections.abc import Iterator

import pytest
from tests.support.catalogues import lease, publish
from tests.support.in_flight import Peer as Receiver
from tests.support.in_flight import of, shares_of, within
from tests.support.keeper_here import serving
from tests.support.other_users import needs_root
from tests.support.peers import Peer
from tests.support.servers import connect, make
from tests.support.users import GREEDY, MODEST, open_to_all, peers

from vram.errors import NotFoundError, ProtocolError
from vram.keeper import catalogue as module
from vram.keeper import messages as m
from vram.keeper.admission import admit
from vram.keeper.catalogue import Catalogue
from vram.keeper.client import KeeperClient, Segment
from vram.keeper.limits import MOST_QUEUED
from vram.keeper.private import short_directory
from vram.keeper.records import Waiter
from vram.keeper.server import KeeperServer
from vram.keeper.takeover import take_over
from vram.sharing.channel import MAX_MESSAGE, Channel
from vram.spec import HandleKind
from vram.testing.keeper import READ_ONLY, SOON, WRITABLE, memfds, until

pytestmark = pytest.mark.slow  # goes with what is counted in flight

ME = os.geteuid()
KIB = 1024
NAMES = 60


def unread_by(peer: Peer) -> int:
    """Bytes that a peer could read now."""
    (nbytes,) = struct.unpack("i", fcntl.ioctl(peer.sock, termios.FIONREAD, b"\0\0\0\0"))
    return int(nbytes)


def publish_some(client: KeeperClient) -> None:
    """So that a list of all entries takes 8 KiB or more."""
    with memfds(1) as fds:
        for number in range(NAMES):
            client.publish(f"n{number}", [Segment(4096)], fds, meta={"a": "x" * 60})


# -- bytes in sockets -------------------------------------------------------------------------------------------------


@needs_root
def test_answers_that_fill_no_socket_are_bounded_for_each_user_and_end_with_the_keepers_patience() -> None:
    """Else 4,096 connections of one user have the kernel keep a gigabyte and a half."""
    count, each = 600, 6
    with open_to_all("--patience", "2") as keeper, KeeperClient.connect(keeper.path) as own:
        publish_some(own)
        with peers(keeper, GREEDY, count) as greedy, peers(keeper, MODEST, 1) as (modest,):
            for peer in greedy:
                for call in range(each):
                    peer.send(m.encode(m.List(call + 1, "")))
            assert isinstance(modest.ask(m.encode(m.Statistics(1))), m.KeeperStatistics)
            until(lambda: max(unread_by(peer) for peer in greedy) > 4 * KIB, what="answers that nobody reads")
            until(lambda: own.statistics().connections < count, what="the end of some who do not read", seconds=30)
            assert sum(unread_by(peer) for peer in greedy) <= MOST_QUEUED
            assert isinstance(modest.ask(m.encode(m.List(2, ""))), m.Listing)
        until(lambda: own.statistics().connections == 1, what="the end of them all")


@contextlib.contextmanager
def tight(path: str, *, patience: float = 30.0, most: int = 256 * KIB, connections: int = 60) -> Iterator[KeeperServer]:
    """A keeper that lets one user leave only so many bytes unread."""
    server = make(path, connections=connections)
    server.patience = patience
    share = server.in_flight.of(ME)
    share.max_queued = most
    with serving(server):
        share = server.in_flight.of(ME)
        share.max_queued = most
        yield server


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as place:
        yield f"{place}/k"


@contextlib.contextmanager
def connected(path: str, count: int) -> Iterator[list[Peer]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(Peer(path))
            stack.callback(made[-1].close)
        yield made


def test_who_reads_late_is_not_cut_off_for_others_of_the_same_user(path: str) -> None:
    """One has a small answer unread for longer than the keeper is patient; the others what fills their user's share."""
    with tight(path, patience=1.0) as server, contextlib.ExitStack() as stack:
        late, again = stack.enter_context(connected(path, 2))
        late.send(m.encode(m.Statistics(1)))
        until(lambda: unread_by(late) > 0, what="an answer")
        modest = list(server.connections.values())
        greedy = stack.enter_context(connected(path, 16))
        most = [one for one in server.connections.values() if one not in modest]

        def send() -> None:
            for one in most:
                one.send(bytes(8_200))  # none of these fills a socket; all but one fill the share

        until(lambda: all(one.waiting_since is None for one in most), what="that their greetings are over")
        within(server, send)
        assert [len(one.queue) for one in most] == [0] * 15 + [1]
        until(lambda: sum(one.closed for one in most) == 15, what="the end of those who hold the most", seconds=30)
        assert not any(one.closed for one in modest), "who holds little has to go"
        assert isinstance(late.hear(), m.KeeperStatistics)
        for peer in greedy:
            peer.close()
        for peer in (late, again):
            assert isinstance(peer.ask(m.encode(m.Statistics(2))), m.KeeperStatistics)


def test_who_reads_is_served_however_much_that_is(path: str) -> None:
    """What was sent is counted until somebody asks the kernel: then it finds that it was read."""
    with tight(path) as server, contextlib.ExitStack() as stack:
        good = connect(stack, path)
        publish_some(good)
        (peer,) = stack.enter_context(connected(path, 1))
        for _ in range(100):  # three times what one may leave unread
            assert len(good.list()) == NAMES
            assert isinstance(peer.ask(m.encode(m.List(1, ""))), m.Listing)
        share = server.in_flight.of(ME)
        assert 0 < share.sent <= share.max_queued
        within(server, lambda: [one.has_read_all() for one in server.connections.values()] and None)
        assert (share.sent, share.receivers) == (0, {})


def test_bytes_are_counted_until_the_kernel_says_that_they_were_read() -> None:
    shares = shares_of(1_200)
    much, little = Receiver(shares, 1), Receiver(shares, 1)
    share = much.share
    shares.found(little, 768)
    shares.found(much, MOST_QUEUED)
    assert (little.hoards, much.hoards) == (False, True)
    assert not shares.has_room_for(share, 1)
    assert shares.has_room_for(Receiver(shares, 2).share, 1), "others have their own"
    much.reads = True
    assert not shares.has_room_for(share, 1), "nobody is polled again so soon"
    share.asked = float("-inf")
    assert shares.has_room_for(share, 1)
    assert (share.sent, list(share.receivers), much.hoards) == (768, [little], False)


def test_who_reads_some_in_time_goes_on(path: str) -> None:
    """It has much unread whenever it is looked at, and reads all the time."""
    patience = 2.0
    with tight(path, patience=patience, most=64 * KIB) as server, contextlib.ExitStack() as stack:
        (peer,) = stack.enter_context(connected(path, 1))
        connection = of(server, "hostile")

        def send() -> None:
            within(server, lambda: connection.send(bytes(8_200)))

        def read() -> None:
            assert len(peer.sock.recv(MAX_MESSAGE)) == 8_200

        for _ in range(4):  # three of which have room
            send()
        assert len(connection.queue) == 1
        assert connection.hoards
        for _ in range(2):
            read()
        until(lambda: not connection.queue, what="room for the fourth")
        assert not connection.closed
        end = server.now() + 2.5 * patience
        while server.now() < end:
            send()
            read()
            assert not connection.queue, "only a socket that is not full shows anything here"
            time.sleep(patience / 20)
        assert connection.hoards
        assert not connection.closed


def test_a_socket_has_room_for_one_longest_message_and_little_more(path: str) -> None:
    with serving(make(path)) as server, contextlib.ExitStack() as stack:
        raw = stack.enter_context(Channel.connect(path, SOON))
        raw.send(m.encode(m.Hello(1, 1, "one")), timeout=SOON)
        raw.recv(timeout=SOON)
        connection = of(server, "one")
        for _ in range(3):
            within(server, lambda: connection.send(bytes(MAX_MESSAGE)))
        assert len(connection.queue) == 1, "two are more than what there is room for"
        for _ in range(3):
            payload, _ = raw.recv(timeout=SOON)
            assert len(payload) == MAX_MESSAGE
        until(lambda: not connection.queue, what="the end of the queue")


def test_what_a_closed_connection_left_unread_counts_until_it_is_read(path: str) -> None:
    """Who is cut off could else fill another socket, and another."""
    with serving(make(path)) as server, contextlib.ExitStack() as stack:
        publish_some(good := connect(stack, path))
        (late,) = stack.enter_context(connected(path, 1))
        late.send(m.encode(m.List(1, "")))
        until(lambda: unread_by(late) > 4 * KIB, what="an answer")
        connection = of(server, "hostile")
        within(server, connection.close)
        assert good.statistics().connections == 1
        assert list(server.lingering) == [connection]
        assert server.by_user == {ME: 2}
        assert connection.unread > 4 * KIB
        assert connection.share.sent >= connection.unread
        assert isinstance(late.hear(), m.Listing)
        assert late.hear() is None
        until(lambda: server.by_user == {ME: 1}, what="the end of the socket")
        assert not server.lingering


def test_what_is_unread_is_known_after_a_takeover(path: str) -> None:
    with contextlib.ExitStack() as stack:
        first, second = make(path, connections=12), make(path, connections=12)
        stack.enter_context(serving(first))
        publish_some(connect(stack, path))
        late, closed = stack.enter_context(connected(path, 2))
        closed.send(m.encode(m.List(1, "")))
        strangers = [one for one in first.connections.values() if one.session and one.session.label == "hostile"]
        until(lambda: any(one.unread > 4 * KIB for one in strangers), what="an answer")
        (gone,) = [one for one in strangers if one.unread > 4 * KIB]
        within(first, gone.close)
        late.send(m.encode(m.List(1, "")))
        until(lambda: unread_by(late) > 4 * KIB, what="an answer")
        assert take_over(second)
        stack.enter_context(serving(second))
        share = second.in_flight.of(ME)
        assert 16 * KIB < share.sent < 48 * KIB
        assert len(second.lingering) == 1
        assert isinstance(closed.hear(), m.Listing)
        until(lambda: not second.lingering, what="the end of the socket")
        assert 8 * KIB < share.sent < 24 * KIB


# -- timers -----------------------------------------------------------------------------------------------------------


def test_who_cannot_be_sent_its_descriptors_is_tried_ever_less_often_and_pays_for_it(path: str) -> None:
    with serving(make(path)) as server, contextlib.ExitStack() as stack, memfds(3) as fds:
        connect(stack, path).publish("w", [Segment(4096)] * 3, fds)
        (late,) = stack.enter_context(connected(path, 1))
        charged: list[int] = []
        charge = server.turns.charged

        def noted(uid: int) -> contextlib.AbstractContextManager[None]:
            charged.append(uid)
            return charge(uid)

        server.turns.charged = noted  # type: ignore[method-assign]
        server.in_flight.room = 0
        late.send(m.encode(m.Attach(1, "w")))
        until(lambda: len(charged) >= 6, what="six tries", seconds=30)
        assert set(charged) == {ME}
        connection = of(server, "hostile")
        until(lambda: connection.retry == 1.0, what="a second between two tries")
        server.in_flight.room = 100
        assert isinstance(late.hear(), m.Attached)


# -- huge pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("device", ["host", "GPU-8d6f3b1c-0000-0000-0000-000000000000"])
def test_s7_memory_of_a_pool_of_huge_pages_is_refused(device: str, writable: bool) -> None:
    """A fault that finds the pool empty kills its reader; and what is in it counts for nobody."""
    seals = WRITABLE if writable else READ_ONLY
    try:
        fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"no MFD_HUGETLB here: {error.strerror}")
    try:
        os.ftruncate(fd, 2 << 20)
        fcntl.fcntl(fd, 1033, seals)
        with pytest.raises(ProtocolError, match="segment 0 is of a limited pool of huge pages"):
            admit(fd, 4096, kind=HandleKind.POSIX_FD, device=device, writable=writable, what="segment 0")
    finally:
        os.close(fd)
    with memfds(1, 2 << 20, seals=seals) as (fine,):
        kind = HandleKind.POSIX_FD
        assert admit(fine, 4096, kind=kind, device=device, writable=writable, what="segment 0") == 2 << 20


# -- numbers of names that were forgotten -----------------------------------------------------------------------------


def test_who_waits_for_a_number_that_can_come_waits_and_others_are_told_which_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under a name that is not known the next number is above those of all that were forgotten: this may be one."""
    monkeypatch.setattr(module, "MAX_REMEMBERED", 1)
    books = Catalogue()
    ann, bob = books.connect(1001), books.connect(1002)
    for _ in range(5):
        publish(books, ann, "old")
    books.remove(ann, "old")
    publish(books, ann, "older")
    books.remove(ann, "older")
    with pytest.raises(NotFoundError, match=r"'new' version 5 is gone or was never there; .* next one is 6"):
        books.attach(bob, "new", 0.0, call=1, version=5, wait=60.0)
    assert isinstance(books.attach(bob, "new", 0.0, call=2, version=6, wait=60.0), Waiter)
    version, effects = publish(books, ann, "new")
    assert version.number == 6
    assert effects
    assert lease(books, bob, "new").version is version
