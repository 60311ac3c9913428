"""What users have in flight: their shares, and sockets that stay open for what was not read when they ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from tests.support.in_flight import OWN, Peer, of, shares_of, within
from tests.support.keeper_here import serving
from tests.support.servers import connect, make

from vram.errors import QuotaError
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient, Segment
from vram.keeper.limits import MOST_QUEUED
from vram.keeper.private import short_directory
from vram.keeper.server import KeeperServer
from vram.keeper.takeover import take_over
from vram.sharing.channel import Channel, close_fds
from vram.testing.keeper import SOON, memfds, until

pytestmark = pytest.mark.slow  # goes with what is counted in flight

ME = os.geteuid()


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as place:
        yield f"{place}/k"


def unread(stack: contextlib.ExitStack, server: KeeperServer, path: str, label: str = "late") -> Channel:
    """Return a connection to which an answer with three descriptors is on its way."""
    raw = stack.enter_context(Channel.connect(path, SOON))
    raw.send(m.encode(m.Hello(1, 1, label)), timeout=SOON)
    raw.recv(timeout=SOON)
    raw.send(m.encode(m.Attach(2, "w")), timeout=SOON)
    until(lambda: of(server, label).in_flight == 3, what="the answer")
    return raw


def publish(client: KeeperClient) -> None:
    with memfds(3) as fds:
        client.publish("w", [Segment(4096)] * 3, fds)


def read_all(raw: Channel) -> None:
    payload, fds = raw.recv(timeout=SOON)
    assert isinstance(m.decode_reply(payload), m.Attached)
    assert len(fds) == 3
    close_fds(fds)


@pytest.mark.parametrize("reads", [True, False], ids=["it reads", "it hangs up"])
def test_the_socket_of_who_did_not_read_stays_until_it_did(path: str, reads: bool) -> None:
    with serving(make(path)) as server, contextlib.ExitStack() as stack:
        publish(good := connect(stack, path))
        raw = unread(stack, server, path)
        connection = of(server, "late")
        within(server, connection.close)
        found = good.statistics()
        assert (found.connections, found.leases) == (1, 0), "all but its socket is over"
        assert list(server.lingering) == [connection]
        assert server.by_user == {ME: 2}
        assert connection.share.count == 3
        if reads:
            read_all(raw)
        else:
            raw.close()
        # It counts until it is closed, which another thread may do, and the keeper's then hears.
        until(lambda: server.by_user == {ME: 1}, what="the end of the socket")
        assert not server.lingering
        assert connection.share.count == 0
        assert connection.sock.fileno() == -1


def test_sockets_that_linger_are_among_the_connections_of_their_user(path: str) -> None:
    with serving(make(path)) as server, contextlib.ExitStack() as stack:
        publish(connect(stack, path))
        for label in "ab":
            unread(stack, server, path, label)
            within(server, of(server, label).close)
        with pytest.raises(QuotaError, match="half of all are for one user"):
            connect(stack, path)


def test_sockets_that_linger_move_with_a_takeover(path: str) -> None:
    with contextlib.ExitStack() as stack:
        first, second = make(path, connections=12), make(path, connections=12)
        stack.enter_context(serving(first))
        publish(good := connect(stack, path))
        raw = unread(stack, first, path)
        unread(stack, first, path, "connected")
        within(first, of(first, "late").close)
        good.list()
        assert take_over(second)
        share = second.in_flight.of(ME)
        assert (len(second.lingering), second.by_user[ME], share.count) == (1, 3, 6)
        stack.enter_context(serving(second))
        assert good.statistics().connections == 2
        read_all(raw)
        until(lambda: second.by_user == {ME: 2}, what="the end of the socket")
        assert not second.lingering
        assert share.count == 3


def test_a_keeper_that_ends_lets_go_of_sockets_that_linger(path: str) -> None:
    with contextlib.ExitStack() as stack:
        with serving(make(path)) as server:
            publish(connect(stack, path))
            unread(stack, server, path)
            connection = of(server, "late")
            within(server, connection.close)
            assert server.lingering
        assert not server.lingering
        assert connection.sock.fileno() == -1


def test_what_was_read_counts_no_more_when_somebody_needs_the_room(path: str) -> None:
    """Nobody says so when something was read: whoever finds no room looks, at its own connections and at others'."""
    with serving(make(path, connections=40)) as server, contextlib.ExitStack() as stack:
        publish(connect(stack, path))
        server.in_flight.room = 8  # and so one user may have four, of which one answer takes three
        for _ in range(10):
            close_fds(connect(stack, path).attach("w").fds)


# -- shares -----------------------------------------------------------------------------------------------------------


def test_users_share_half_and_the_keepers_own_has_a_quarter_besides() -> None:
    shares = shares_of(1_200)
    assert Peer(shares, 1).takes(1_200) == 300, "half of the half, alone"
    assert Peer(shares, 1).takes(1) == 0, "with whatever connection"
    assert Peer(shares, 2).takes(1_200) == 150, "half of what is left"
    for uid in range(3, 8):
        assert Peer(shares, uid).takes(1) == 1
    own = Peer(shares, OWN)
    assert 300 < own.takes(1_200) < 400
    assert Peer(shares, 9).takes(1) == 1, "also when the keeper's own user reads nothing"


def test_a_share_is_free_again_when_its_user_reads() -> None:
    shares = shares_of(1_200)
    one, other = Peer(shares, 1), Peer(shares, 1)
    assert one.takes(200) + other.takes(200) == 300
    one.reads = True
    shares.of(1).looked = float("-inf")  # it need not have been looked at for a while
    assert other.takes(300) == 200
    assert other.share.count == 300


def test_only_the_keepers_own_user_may_leave_any_number_of_bytes_unread() -> None:
    shares = shares_of(1_200)
    assert shares.of(1).max_queued == MOST_QUEUED
    assert shares.of(OWN).max_queued == float("inf")
