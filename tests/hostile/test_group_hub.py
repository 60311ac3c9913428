"""Groups whose rank 0 lies: the owner of a directory that was named to meet in may be another user."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Iterator

import pytest
from tests.support.deadlines import SOON, until

import vram
from vram.arrays import Array
from vram.collectives import messages as m
from vram.collectives.group import _offer_of
from vram.collectives.spoke import Said, Spoke
from vram.collectives.symmetric import SymmetricBuffer, describe_from, map_peer
from vram.errors import PeerGoneError, ProtocolError, WaitTimeoutError
from vram.sharing.channel import Channel
from vram.sharing.descriptor import MemoryDescriptor, SegmentEntry
from vram.spec import HandleKind

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


def test_a_late_rank_hears_of_each_stage_that_failed_and_of_the_one_that_has_not() -> None:
    def answer() -> None:
        for _ in range(3):
            said = m.decode_to_hub(hub.recv(timeout=SOON)[0])
            assert isinstance(said, m.Vote)
            hub.send(m.encode(m.Came(3, 1, said.data) if said.stage == 3 else m.Failed(said.stage, 0, (1,))))

    with met() as (spoke, hub):
        say(hub, m.Came(1, 0, b"a"), m.Failed(1, 0, (1,)), m.Came(2, 0, b"b"), m.Failed(2, 0, (1,)), m.Came(3, 0, b"c"))
        until(lambda: spoke._ahead == 3, what="the third stage")
        hub.recv(timeout=SOON)  # who it is
        thread = threading.Thread(target=answer)
        thread.start()
        for _ in range(2):
            with pytest.raises(WaitTimeoutError, match="rank 1 did not come"):
                spoke.vote(b"mine", (), SOON)
        assert [said.data for said in spoke.vote(b"mine", (), SOON)] == [b"c", b"mine"]
        thread.join(SOON)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "said",
    [
        [m.Came(1, 0, b"x"), m.Came(1, 0, b"y")],
        [m.Came(1, 2, b"x")],
        [m.Gone(2, True)],
        [m.Came(1, 0, b"x"), m.Came(3, 0, b"x")],
        [m.Came(1, 0, b"x"), m.Failed(2, 0, ()), m.Came(2, 0, b"x")],
    ],
    ids=[
        "a second word of a rank",
        "a rank that there is not",
        "the end of one",
        "two stages at once",
        "the failure of another stage",
    ],
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


# -- what it says of memory -------------------------------------------------------------------------------------------
NBYTES = 1 << 18


def described(size: int, capacity: int) -> MemoryDescriptor:
    return MemoryDescriptor("host", (SegmentEntry(size, HandleKind.POSIX_FD),), 0, NBYTES, capacity)


@pytest.mark.parametrize(("size", "capacity"), [(2 << 20, 1 << 46), (1 << 46, 1 << 46), (1 << 46, 2 << 20)])
def test_a_rank_takes_no_addresses_because_another_one_says_so(size: int, capacity: int) -> None:
    """Ten buffers of 256 KiB took all of the 128 TiB that a process has."""
    fd = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    try:
        with vram.empty(NBYTES, "u1", device="host") as like:
            with pytest.raises(ProtocolError):
                map_peer(described(size, capacity), [fd], like, 1, 0)
            assert map_peer_of_one_that_is_honest(like) == NBYTES
    finally:
        os.close(fd)


def map_peer_of_one_that_is_honest(like: vram.Array) -> int:
    with vram.empty(NBYTES, "u1", device="host", chunk="8MiB") as theirs:
        descriptor, fds = describe_from(theirs, 0)
        region = map_peer(descriptor, fds, like, 1, 0)
        with Array(region, "u1", NBYTES) as mapped:
            nbytes = mapped.nbytes
        region.close()
        return nbytes


class Grows:
    def resize(self, buffer: SymmetricBuffer, rows: int) -> None:
        raise AssertionError


def test_memory_that_did_not_grow_as_it_was_said_to_is_refused() -> None:
    """This rank had grown by then, and stayed so."""
    grows = Grows()
    with (
        vram.empty(NBYTES, "u1", device="host", capacity=8 << 20) as mine,
        vram.empty(NBYTES, "u1", device="host", capacity=8 << 20) as theirs,
    ):
        descriptor, fds = describe_from(theirs, 0)
        regions = {0: map_peer(descriptor, fds, mine, 1, 0)}
        with SymmetricBuffer(mine, regions, 1, 0, "group", weakref.WeakMethod(grows.resize)) as buffer:
            mine.resize(8 << 20)
            with pytest.raises(ProtocolError, match="rank 0"):
                buffer.learn(0, descriptor.segments, [])
            mine.resize(NBYTES)


@pytest.mark.parametrize("said", [b"", b"\x93\x01\x02\x03", b"\x92\xa1\xff\xa0", b"\x91" * 5000])
def test_what_is_no_offer_names_who_said_it(said: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 3"):
        _offer_of(3, Said(said, []))
