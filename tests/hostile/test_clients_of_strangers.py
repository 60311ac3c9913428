"""What a stranger does to a client who borrows, receives or lists what is the stranger's, or asks strangers to let go.

Each of these costs a client a bounded time and bounded memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.deadlines import SOON
from tests.support.descriptor_limits import limit_of_descriptors
from tests.support.floods import ended, long_array
from tests.support.keeper_here import later, open_to_all
from tests.support.memfds import FUTURE_WRITE, WRITABLE, make_memfd, memfds
from tests.support.other_users import _become, needs_root
from tests.support.users import GREEDY, being

import vram
from vram.entries.placement import Placement
from vram.errors import DriverError, PeerGoneError, ProtocolError, UsageError, WaitTimeoutError
from vram.handover import conversation
from vram.handover.messages import AwaitedPart, MemoryPart, NextPart, Part, Reference, Shared, Value, encode
from vram.keeper import client as client_module
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.leases import Segment
from vram.keeper.private import short_directory
from vram.open_files import close_fds
from vram.sharing.channel import Channel
from vram.sharing.descriptor import MemoryDescriptor, SegmentEntry

pytestmark = pytest.mark.slow  # goes with the defence against keepers

GRANULE = 2 << 20
GET_SEALS = 1034


@contextlib.contextmanager
def stranger(act: Callable[[], object]) -> Iterator[None]:
    """Have another user do something, in a process that keeps what came of it until the end of the block."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            _become(GREEDY)
            kept = act()
            os.write(writer, b"r")
            signal.pause()
            assert kept
        except BaseException as error:
            print("the stranger:", repr(error), file=sys.stderr)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            assert pipe.read(1) == b"r", "the attack did not begin"
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextlib.contextmanager
def lent_by_a_stranger(fd: int) -> Iterator[str]:
    """Memory that another user lends as read-only and has not sealed; yields the path."""

    def lend(path: str) -> Any:
        Placement.freeze, Placement.descriptors = (lambda self: None), (lambda self: [fd])  # type: ignore[method-assign]
        return vram.lend(vram.zeros(4096, "uint8", device="host"), at=path, mode=0o666)

    with short_directory() as place:
        with vram.zeros(8, "uint8", device="host") as array, vram.lend(array, at=f"{place}/s"):
            pass  # loads what the other user may not be able to read
        os.chown(place, GREEDY, -1)
        os.chmod(place, 0o755)
        with stranger(lambda: lend(f"{place}/s")):
            yield f"{place}/s"
        close_client(f"{place}/s")


@needs_root
@pytest.mark.parametrize("sealed", [WRITABLE, WRITABLE | FUTURE_WRITE], ids=["not at all", "future"])
def test_a_borrower_seals_nothing_of_a_stranger(sealed: int) -> None:
    fd = make_memfd(GRANULE, seals=sealed)
    try:
        with lent_by_a_stranger(fd) as path:
            with pytest.raises(ProtocolError, match=r"said to be read-only.*F_SEAL_WRITE.*writable=True"):
                vram.borrow(path)
            assert fcntl.fcntl(fd, GET_SEALS) == sealed
    finally:
        os.close(fd)


# -- receiving --------------------------------------------------------------------------------------------------------
def shown(number: int, *, asks: bool) -> bytes:
    """Memory of one descriptor, whose sender waits for the acknowledgement or not."""
    memory = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, GRANULE, GRANULE)
    part = MemoryPart(number, 0, True, True, memory)
    return encode(AwaitedPart(part) if asks else Part(part))


def fill(channel: vram.ArrayChannel) -> int:
    """Send until the other end, which reads nothing, has no room; return how many messages that took."""
    for count in itertools.count():
        try:
            channel.send(b"x" * 1000, timeout=0)
        except WaitTimeoutError:
            return count
    raise AssertionError


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_a_receiver_hears_of_its_deadline_where_its_peer_reads_no_acknowledgement(timeout: float) -> None:
    """And nothing is lost: each part is acknowledged once, as soon as the other end reads."""
    count = 5
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, memfds(1, GRANULE, seals=WRITABLE) as fds:
        sent = fill(channel)
        for number in range(1, count + 1):
            raw.send(shown(number, asks=True), fds, timeout=SOON)
        for _ in range(3):
            found = ended(lambda: channel.recv(timeout=timeout), channel)
            assert isinstance(found, WaitTimeoutError), found
        raw.send(encode(Shared(Reference(count, 1, 0, "uint8", (4,)))), timeout=SOON)
        raw.send(encode(Value("last")), timeout=SOON)
        assert channel.recv(timeout=SOON).numpy().tobytes() == b"0\0\0\0", "what comes behind is not held up"
        for _ in range(sent):
            raw.recv(timeout=SOON)
        assert channel.recv(timeout=SOON) == "last"
        assert [raw.recv(timeout=SOON)[0] for _ in range(count)] == [encode(NextPart())] * count
        with pytest.raises(WaitTimeoutError):
            raw.recv(timeout=0)


def test_a_receiver_acknowledges_as_soon_as_its_peer_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for that as it waits for messages: its peer may send nothing before."""
    waits = threading.Event()
    poll = Channel._poll

    def told(self: Channel, events: int, timeout: float | None) -> list[tuple[int, int]]:
        waits.set()
        return poll(self, events, timeout)

    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, memfds(1, GRANULE, seals=WRITABLE) as fds:
        sent = fill(channel)
        raw.send(shown(1, asks=True), fds, timeout=SOON)
        with pytest.raises(WaitTimeoutError):
            channel.recv(timeout=0)
        monkeypatch.setattr(Channel, "_poll", told)
        thread, came = later(lambda: channel.recv(timeout=SOON))
        assert waits.wait(SOON)
        monkeypatch.undo()
        for _ in range(sent):
            raw.recv(timeout=SOON)
        assert raw.recv(timeout=SOON)[0] == encode(NextPart())
        raw.send(encode(Value("then")), timeout=SOON)
        thread.join(SOON)
        assert came == ["then"]


def test_a_sender_acknowledges_what_its_peer_had_no_room_for() -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, memfds(1, GRANULE, seals=WRITABLE) as fds:
        sent = fill(channel)
        raw.send(shown(1, asks=True), fds, timeout=SOON)
        with pytest.raises(WaitTimeoutError):
            channel.recv(timeout=0)
        for _ in range(sent):
            raw.recv(timeout=SOON)
        channel.send("more", timeout=SOON)
        assert {raw.recv(timeout=SOON)[0] for _ in range(2)} == {encode(NextPart()), encode(Value("more"))}


def test_what_a_peer_sent_before_it_went_is_received_though_it_hears_no_acknowledgement() -> None:
    raw, end = Channel.pair()
    with vram.ArrayChannel(end) as channel, memfds(1, GRANULE, seals=WRITABLE) as fds:
        with raw:
            raw.send(shown(1, asks=True), fds, timeout=SOON)
            raw.send(encode(Shared(Reference(1, 1, 0, "uint8", (4,)))), timeout=SOON)
        assert channel.recv(timeout=SOON).numpy().tobytes() == b"0\0\0\0"
        with pytest.raises(PeerGoneError):
            channel.recv(timeout=SOON)


# -- sending ----------------------------------------------------------------------------------------------------------
class Clock:
    """The time, which somebody can turn on."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.turned = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.turned


def test_one_deadline_is_for_all_parts_of_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that takes each part just in time has a sender wait for one timeout, not for one a part."""
    clock = Clock()
    monkeypatch.setattr(conversation, "time", clock)
    raw, end = Channel.pair()

    def take_one() -> None:
        close_fds(raw.recv(timeout=SOON)[1])
        clock.turned += 2 * SOON
        raw.send(encode(NextPart()), timeout=SOON)

    with raw, vram.ArrayChannel(end) as channel, long_array() as one, long_array() as other:
        thread, came = later(take_one)
        found = ended(lambda: channel.send([one, other], timeout=SOON), channel)
        thread.join(SOON)
        assert came == [None]
        assert isinstance(found, WaitTimeoutError), found
        assert "took no part of the memory" in str(found)


@pytest.mark.parametrize("timeout", [-1, "1", True, float("nan"), 10**400])
def test_a_sender_says_what_is_no_timeout(timeout: object) -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel, pytest.raises(UsageError, match="not a number of seconds"):
        channel.send(1, timeout=timeout)  # type: ignore[arg-type]


# -- attaching --------------------------------------------------------------------------------------------------------
@needs_root
def test_no_stranger_s_entry_takes_all_descriptors_of_who_attaches_it() -> None:
    """1,000 of 1,024 were open, and whatever else the process did found none."""
    with open_to_all() as path, memfds(1) as fds, contextlib.ExitStack() as stack:
        with being(GREEDY):
            greedy = stack.enter_context(KeeperClient.connect(path))
        one = stack.enter_context(KeeperClient.connect(path))
        for client, name, count in ((greedy, "large", 1000), (greedy, "small", 600), (one, "own", 900)):
            client.publish(name, [Segment(4096)] * count, fds * count)
        with limit_of_descriptors(1024):
            before = len(os.listdir("/proc/self/fd"))
            for attach in (one.attach, one.lease, one.attach_or_claim, one.lease_or_claim):
                with pytest.raises(DriverError, match="less than a quarter") as caught:
                    attach("large", timeout=SOON)
                assert caught.value.name == "EMFILE"
                assert f"more descriptors from 'large', an entry of uid {GREEDY}" in str(caught.value)
                assert "`ulimit -n " in str(caught.value)
                assert len(os.listdir("/proc/self/fd")) == before
                assert one.statistics().leases == 0
            for name, count in (("small", 600), ("own", 900)):
                found = one.attach(name)
                assert len(found.fds) == count
                close_fds(found.fds)
        with limit_of_descriptors(2048):
            leased = one.lease("large")
            assert len(leased.fds) == 1000
        one.give_back(leased)


# -- asking to let go -------------------------------------------------------------------------------------------------
def test_a_revocation_names_some_of_the_holders_and_says_how_many_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is over by then: how many leases a stranger has is no reason to go on."""
    monkeypatch.setattr(client_module, "_LISTED", 10)
    with open_to_all() as path, memfds(1) as fds, KeeperClient.connect(path) as client:
        held = []
        for count in (4, 8, 3):
            client.publish("n", [Segment(4096)], fds)
            held += [client.attach("n") for _ in range(count)]
        for one in held:
            close_fds(one.fds)
        asked: list[object] = []
        ask = KeeperClient._ask
        monkeypatch.setattr(KeeperClient, "_ask", lambda *words: (asked.append(words[1]), ask(*words))[1])
        left = client.revoke("n", timeout=0)
        assert [one.lease_id for one in left.holders] == [one.lease_id for one in held[:10]]
        assert (left.more, left.nbytes) == (5, 3 * 4096)
        assert sum(isinstance(one, m.Holders) for one in asked) == 2, "the third version's are not asked for"
        client.release([one.lease_id for one in held[:5]])
        again = client.revoke("n", timeout=0)
        assert (len(again.holders), again.more, again.nbytes) == (10, 0, 2 * 4096)
        with KeeperClient.connect(path) as other:
            taken = other.revoke("n", timeout=0, force=True)
            assert (len(taken.forced), taken.holders, taken.more) == (10, (), 0)
