"""A keeper that is none, or a bad one: its clients say so, keep no descriptor it sent, and do not hang (S7)."""

from __future__ import annotations

import resource
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.deadlines import SOON
from tests.support.impostors import ENTRY, impostor, says
from tests.support.memfds import memfds

from vram.errors import (
    DriverError,
    InternalError,
    NotFoundError,
    PeerGoneError,
    ProtocolError,
    QuotaError,
    UnsupportedError,
    VramError,
    WaitTimeoutError,
)
from vram.keeper import messages as m
from vram.keeper import rpc_connection
from vram.keeper.client import KeeperClient
from vram.keeper.leases import Segment
from vram.keeper.rpc_connection import GREETINGS
from vram.open_files import close_fds
from vram.sharing.channel import Channel

pytestmark = pytest.mark.slow  # goes with the defence against keepers


@pytest.mark.parametrize(
    ("greeting", "expected"),
    [
        (b"220 mail.example ESMTP", ProtocolError),
        (m.encode(m.Done(0)), ProtocolError),
        (m.encode(m.Error(0, "QuotaError", "full")), QuotaError),
        (m.encode(m.Error(0, "UnsupportedError", "x", ["a", "b", "c", "d"])), UnsupportedError),
        (m.encode(m.Error(0, "MemoryError", "x")), InternalError),
        (None, PeerGoneError),
    ],
)
def test_what_greets_like_no_keeper(greeting: bytes | None, expected: type[VramError]) -> None:
    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        if greeting is not None:
            channel.send(greeting, timeout=SOON)

    # Whoever hangs up is asked again: a keeper that was killed may have been, and another be there.
    with impostor(answer, times=GREETINGS if greeting is None else 1) as path, pytest.raises(expected) as caught:
        KeeperClient.connect(path)
    assert path in str(caught.value) or greeting is not None


ATTACHED = m.encode(m.Attached(1, 1, 1, ENTRY))
BAD_ANSWERS: list[tuple[str, Any, Sequence[Any]]] = [
    ("garbage", "attach", [b"garbage"]),
    ("garbage with descriptors", "attach", [(b"garbage", 200)]),
    ("another answer", "attach", [(m.encode(m.Done(1)), 3)]),
    ("a claim that was not asked for", "attach", [m.encode(m.Claimed(1, 5))]),
    ("too many descriptors", "attach", [(ATTACHED, 2)]),
    ("more descriptors that do not come", "attach", [(m.encode(m.Attached(1, 1, 2, ENTRY)), 1), m.encode(m.Done(2))]),
    ("no further descriptors", "attach", [(m.encode(m.Attached(1, 1, 2, ENTRY)), 1), m.encode(m.Descriptors(2, 1))]),
    ("none first", "attach", [m.encode(m.Attached(1, 1, 1, ENTRY)), (m.encode(m.Descriptors(2, 0)), 1)]),
    ("others first", "attach", [(m.encode(m.Attached(1, 1, 2, ENTRY)), 1), (m.encode(m.Descriptors(2, 0)), 1)]),
    ("as many as it says but not as it describes", "attach", [(m.encode(m.Attached(1, 1, 2, ENTRY)), 2)]),
    (
        "a device that is not in its list",
        "attach",
        [
            (
                m.encode(
                    m.Attached(1, 1, 1, m.Entry("w", 1, 0, False, [m.SegmentRow(1, 1, 9)], ["host"], b"", False, {}))
                ),
                1,
            )
        ],
    ),
    ("descriptors with what has none", "list", [(m.encode(m.Listing(1, [], False)), 5)]),
    ("parts for ever", "publish", [m.encode(m.NextPart(1, 1))]),
    ("an end in the middle", "publish", [m.encode(m.NextPart(1, 0))]),
]


@pytest.mark.parametrize(("what", "call", "words"), BAD_ANSWERS, ids=[what for what, _, _ in BAD_ANSWERS])
def test_answers_that_cannot_be(what: str, call: str, words: Sequence[Any]) -> None:
    with impostor(says(*words)) as path, KeeperClient.connect(path) as client:
        with memfds(1) as fds, pytest.raises((ProtocolError, PeerGoneError)):
            {
                "attach": lambda: client.attach("w"),
                "list": lambda: client.list(),
                "publish": lambda: client.publish("w", [Segment(4096)], fds),
            }[call]()


@pytest.mark.parametrize("received", [0, 1, 31, 33, 70, 71])
def test_s4_a_keeper_that_asks_for_other_parts_than_the_next_is_sent_no_more(received: int) -> None:
    """One that asks for the second again and again was sent parts without end."""
    heard: list[m.Request] = []

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(1)), timeout=SOON)
        for _ in range(4):
            payload, fds = channel.recv(timeout=SOON)
            close_fds(fds)
            heard.append(m.decode_request(payload))
            channel.send(m.encode(m.NextPart(heard[-1].call, received)), timeout=SOON)

    with impostor(answer) as path, KeeperClient.connect(path) as client, memfds(70) as fds:
        with pytest.raises(ProtocolError, match=f"has {received} descriptors, and 32 of 70 were sent"):
            client.publish("w", [Segment(4096)] * 70, fds)
    assert [type(one) for one in heard] == [m.Publish]


def test_errors_are_raised_and_the_connection_goes_on() -> None:
    words = [
        m.encode(m.Error(1, "NotFoundError", "no such thing")),
        m.encode(m.Error(2, "KeyboardInterrupt", "?")),
        m.encode(m.Listing(3, [], False)),
    ]
    with impostor(says(*words)) as path, KeeperClient.connect(path) as client:
        with pytest.raises(NotFoundError, match="no such thing"):
            client.attach("w")
        with pytest.raises(InternalError):
            client.attach("w")
        assert client.list() == []


def test_answers_that_nobody_waits_for_are_given_back() -> None:
    """A lease and a claim that come too late, or for nobody, go straight back."""
    heard: list[m.Request] = []

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(1)), timeout=SOON)
        call = m.decode_request(channel.recv(timeout=SOON)[0]).call
        with memfds(1) as fds:
            channel.send(m.encode(m.Attached(99, 7, 1, ENTRY)), fds, timeout=SOON)
            channel.send(m.encode(m.Claimed(98, 8)), timeout=SOON)
            channel.send(m.encode(m.Notice(0, "w", 1, "replaced", 2)), timeout=SOON)
        channel.send(m.encode(m.Listing(call, [], False)), timeout=SOON)
        heard.extend(m.decode_request(channel.recv(timeout=SOON)[0]) for _ in range(2))

    with impostor(answer) as path, KeeperClient.connect(path) as client:
        assert client.list() == []
    assert heard == [m.Release(0, [7]), m.Abandon(0, 8)]


def test_a_keeper_that_falls_silent_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_connection.RpcConnection, "grace", 0.1)
    with impostor(says()) as path, KeeperClient.connect(path) as client:
        with pytest.raises(WaitTimeoutError, match="did not answer"):
            client.list()


def test_a_lease_whose_descriptors_were_lost_is_given_back_and_the_connection_goes_on() -> None:
    """F6."""
    heard: list[m.Request] = []
    room = threading.Event()

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(1)), timeout=SOON)
        with memfds(8) as fds:
            channel.recv(timeout=SOON)
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))  # of the one process that both sides are
            try:
                channel.send(m.encode(m.Attached(1, 5, 1, ENTRY)), fds, timeout=SOON)
                room.wait(SOON)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        heard.append(m.decode_request(channel.recv(timeout=SOON)[0]))
        call = m.decode_request(channel.recv(timeout=SOON)[0]).call
        channel.send(m.encode(m.Listing(call, [], False)), timeout=SOON)

    with impostor(answer) as path, KeeperClient.connect(path) as client:
        try:
            with pytest.raises(DriverError, match="RLIMIT_NOFILE"):
                client.attach_or_claim("w")
        finally:
            room.set()
        assert client.list() == []
    assert heard == [m.Release(0, [5])]
