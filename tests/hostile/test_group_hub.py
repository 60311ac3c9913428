"""Groups whose rank 0 lies: the owner of a directory that was named to meet in may be another user."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON

from vram.collectives import messages as m
from vram.collectives.hub import Hub
from vram.collectives.spoke import Spoke
from vram.collectives.votes import _offer_of, close_said
from vram.errors import PeerGoneError, ProtocolError, WaitTimeoutError
from vram.sharing.channel import Channel

FDS = 20


def count_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def met() -> Iterator[tuple[Spoke, Channel]]:
    """Rank 1 of two, which has met rank 0, and what rank 0's end of its connection is."""
    ours, hub = Channel.pair()
    spoke = Spoke(ours, "group", 1, 2, lambda: None)
    spoke.open()
    try:
        hub.send(m.encode(m.Formed((1, 2))))
        spoke.form(SOON)
        yield spoke, hub
    finally:
        spoke.close()
        spoke.join()
        hub.close()


@contextlib.contextmanager
def memory() -> Iterator[list[int]]:
    """Lend descriptors of memory, as many as a vote may bring."""
    fd = os.memfd_create("said")
    try:
        yield [fd] * FDS
    finally:
        os.close(fd)


def say(hub: Channel, *said: object, fds: list[int] | None = None) -> bool:
    """Say it all; False if the other end hangs up on it."""
    try:
        for one in said:
            hub.send(m.encode(one), fds or (), timeout=SOON)
    except PeerGoneError:
        return False
    return True


def hangs_up(hub: Channel) -> bool:
    hub.recv(timeout=SOON)  # who it is
    with pytest.raises(PeerGoneError):
        hub.recv(timeout=SOON)
    return True


def failed(stage: int) -> m.Failed:
    return m.Failed(stage, 0, (1,))


def test_a_late_rank_hears_of_each_stage_that_failed_and_of_the_one_that_has_not() -> None:
    def answer() -> None:
        for _ in range(3):
            said = m.decode_to_hub(hub.recv(timeout=SOON)[0])
            assert isinstance(said, m.Vote)
            came = m.Came(3, ((b"c", 0), (said.data, 0)))
            hub.send(m.encode(came if said.stage == 3 else failed(said.stage)))

    with met() as (spoke, hub):
        say(hub, failed(1), failed(2))
        hub.recv(timeout=SOON)  # who it is
        thread = threading.Thread(target=answer)
        thread.start()
        for _ in range(2):
            with pytest.raises(WaitTimeoutError, match="rank 1 did not come"):
                spoke.vote(b"mine", (), SOON)
        assert [data for data, _ in spoke.vote(b"mine", (), SOON)] == [b"c", b"mine"]
        thread.join(SOON)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "said",
    [[m.Came(1, ((b"x", FDS),))], [m.Gone(2, True)]],
    ids=["a stage that this rank has not come to", "the end of a rank that there is not"],
)
def test_what_no_hub_says_ends_the_connection(said: list[object]) -> None:
    with memory() as fds:
        before = count_fds()
        with met() as (spoke, hub):
            for one in said:
                say(hub, one, fds=fds if isinstance(one, m.Came) else None)
            assert hangs_up(hub)
            with pytest.raises(PeerGoneError):
                spoke.vote(b"", (), SOON)
        assert count_fds() == before


@pytest.mark.parametrize(
    "came",
    [
        [m.Came(1, ((b"x", FDS), (b"y", 0), (b"z", 0)))],
        [m.Came(1, ((b"x", FDS),)), m.Came(1, ((b"y", FDS), (b"z", 0)))],
        [m.Came(1, ((b"x", FDS + 1), (b"y", 0)))],
        [m.Came(1, ((b"x", FDS - 1), (b"y", 1)))],
    ],
    ids=["more ranks", "more ranks later", "more descriptors than came", "fewer"],
)
def test_a_reply_that_does_not_add_up_ends_the_connection(came: list[m.Came]) -> None:
    def answer() -> None:
        hub.recv(timeout=SOON)  # who it is
        hub.recv(timeout=SOON)  # its vote
        say(hub, *came, fds=fds)

    with memory() as fds:
        before = count_fds()
        with met() as (spoke, hub):
            thread = threading.Thread(target=answer)
            thread.start()
            with pytest.raises(ProtocolError, match="came to stage 1"):
                spoke.vote(b"mine", (), SOON)
            thread.join(SOON)
            assert not thread.is_alive()
        assert count_fds() == before


# -- the hub itself ---------------------------------------------------------------------------------------------------
def test_a_rank_that_reads_nothing_keeps_nobody_waiting_and_hears_all_of_it(tmp_path: Path) -> None:
    stages, data = range(1, 21), bytes(m.MAX_DATA)
    made = Hub(at := str(tmp_path / "hub"), "group", 2)
    spoke = Spoke(made.channel, "group", 0, 2, lambda: None, made)
    try:
        spoke.open()
        with Channel.connect(at, SOON) as slow, memory() as fds:
            say(slow, m.Hello(m.PROTOCOL, "group", 1, 2))
            spoke.form(SOON)
            for stage in stages:
                assert say(slow, m.Vote(stage, data), fds=fds)
                said = spoke.vote(data, fds, SOON)
                assert [(one, len(theirs)) for one, theirs in said] == [(data, 0), (data, FDS)]
                close_said(said)
            heard: list[tuple[int, bytes]] = []
            while len(heard) < 2 * len(stages):
                payload, theirs = slow.recv(timeout=SOON)
                close_said([((), theirs)])
                match m.decode_from_hub(payload):
                    case m.Came(stage=stage, votes=votes):
                        heard += [(stage, one) for one, _ in votes]
            assert heard == [(stage, data) for stage in stages for _ in range(2)]
    finally:
        spoke.close()
        spoke.join()


# -- what it says of memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("said", [b"", b"\x93\x01\x02\x03", b"\x92\xa1\xff\xa0", b"\x91" * 5000])
def test_what_is_no_offer_names_who_said_it(said: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 3"):
        _offer_of(3, (said, []))
