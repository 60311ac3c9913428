"""A keeper that is none, or a bad one: its clients say so, keep no descriptor it sent, and do not hang (S7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.deadlines import SOON
from tests.support.impostors import ENTRY, impostor, says
from tests.support.memfds import memfds

from vram.errors import PeerGoneError, ProtocolError, WaitTimeoutError
from vram.keeper import messages as m
from vram.keeper import rpc_connection
from vram.keeper.client import KeeperClient, Segment
from vram.sharing.channel import Channel

pytestmark = pytest.mark.slow  # goes with the defence against keepers
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
    ("descriptors with what has none", "list", [(m.encode(m.Rows(1, [], False)), 5)]),
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
        channel.send(m.encode(m.Rows(call, [], False)), timeout=SOON)
        heard.extend(m.decode_request(channel.recv(timeout=SOON)[0]) for _ in range(2))

    with impostor(answer) as path, KeeperClient.connect(path) as client:
        assert client.list() == []
    assert heard == [m.Release(0, [7]), m.Release(0, [8])]


def test_a_keeper_that_falls_silent_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_connection.RpcConnection, "grace", 0.1)
    with impostor(says()) as path, KeeperClient.connect(path) as client:
        with pytest.raises(WaitTimeoutError, match="did not answer"):
            client.list()
