"""A keeper that is none, or a bad one: its clients say so, keep no descriptor it sent, and do not hang (S7)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.deadlines import AT_ONCE, SOON
from tests.support.impostors import ENTRY, impostor, says
from tests.support.keeper_here import later
from tests.support.memfds import memfds

from vram.errors import (
    PeerGoneError,
    ProtocolError,
    WaitTimeoutError,
)
from vram.keeper import messages as m
from vram.keeper import rpc_connection
from vram.keeper.client import KeeperClient
from vram.keeper.leases import Segment
from vram.sharing.channel import Channel
from vram.sharing.descriptor import ArrayEntry, Manifest, MemoryDescriptor, SegmentEntry, encode_manifest

pytestmark = pytest.mark.slow  # goes with the defence against keepers


GRANULE = 2 << 20
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


def test_a_call_is_over_in_time_though_its_lender_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who lends has as much of a borrower's time as its timeout says (docs/security.md)."""
    for name in ("GRACE", "_TAKE_BACK"):
        monkeypatch.setattr(rpc_connection, name, 1e6)  # what waits for longer than its deadline waits for ever
    over = threading.Event()

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(1)), timeout=SOON)
        over.wait(SOON)

    with impostor(answer) as path, KeeperClient.connect(path) as client:
        client.grace = 0.05
        for size in (1000, 1):  # until there is no room, not even for a byte
            with contextlib.suppress(WaitTimeoutError):
                while True:
                    client._channel.send(b"x" * size, timeout=0)
        for given_back in ((), (), (7,)):  # as by a finalizer: it is sent before the next request
            client._given_back.extend(given_back)
            thread, came = later(lambda: client.lease("w", timeout=0.05))
            thread.join(AT_ONCE)
            assert came, "it waits to send"
            assert isinstance(came[0], WaitTimeoutError), came
        assert client.is_usable
        over.set()


# -- a lease in parts -----------------------------------------------------------------------------------------------


def manifest() -> bytes:
    memory = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, 8, GRANULE)
    return encode_manifest(Manifest(1, (memory,), {"x": ArrayEntry(0, 0, 8, "float64", (1,))}))


def in_parts(total: int, count: int, given: list[int], pause: float) -> Callable[[Channel], None]:
    """A keeper whose entry has `count` segments, of `total` that are said to come, one with each answer."""
    segments = [m.SegmentRow(GRANULE, 1, 0)] * count
    entry = m.Entry("w", 1, 0, False, segments, ["host"], manifest(), False, {})

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(os.getpid())), timeout=SOON)
        with memfds(1) as fds:
            while True:
                request = m.decode_request(channel.recv(timeout=SOON)[0])
                if isinstance(request, m.Attach):
                    channel.send(m.encode(m.Attached(request.call, 1, total, entry)), fds, timeout=SOON)
                elif isinstance(request, m.More):
                    time.sleep(pause)
                    given.append(request.offset)
                    channel.send(m.encode(m.Descriptors(request.call, request.offset)), fds, timeout=SOON)
                elif request.call:
                    channel.send(m.encode(m.Done(request.call)), timeout=SOON)

    return answer


def test_a_lease_in_parts_is_not_waited_for_beyond_its_deadline() -> None:
    """Each part had the time of a whole answer: a thousand of them half an hour."""
    given: list[int] = []
    with impostor(in_parts(200, 200, given, 0.05)) as path, KeeperClient.connect(path) as one:
        one.grace = 0.5
        with pytest.raises(WaitTimeoutError):
            one.lease("w", timeout=0.2)
        assert len(given) < 199


def test_more_descriptors_than_the_entry_has_are_not_asked_for() -> None:
    """They were counted once all had come, and until then took up what this process may have open."""
    given: list[int] = []
    with impostor(in_parts(10**9, 2, given, 0.0)) as path, KeeperClient.connect(path) as one:
        with pytest.raises(ProtocolError, match="1000000000 descriptors for 2"):
            one.lease("w", timeout=SOON)
        assert given == []
