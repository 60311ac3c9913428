"""S7: an owner of writable memory that goes on asking for it to be sealed, while somebody maps it.

The kernel refuses every shared mapping for as long as it decides, and its owner decides how often it is asked. What is
counted here is the time that a mapping sleeps, on a clock that only its sleep moves on.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.deadlines import until
from tests.support.memfds import WRITABLE, WRITE, make_memfd
from tests.support.memfds import memfds as memfds_of
from tests.support.read_only_pages import ADD_SEALS, GRANULE, Pages
from tests.support.spoiled_descriptors import _Nobody as Nobody

import vram
from vram import driver as drivers
from vram.driver import memfds
from vram.driver.protocol import UNDECIDED
from vram.entries import lease as leases
from vram.entries.followed import Wanted
from vram.entries.lease import Lease
from vram.errors import ProtocolError, VramError, WaitTimeoutError
from vram.handover import conversation
from vram.handover.messages import MemoryPart, Part, Value, encode
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.leases import Attachment, Segment
from vram.memory import Received, Region, chunks
from vram.sharing.channel import Channel
from vram.sharing.descriptor import MANIFEST_VERSION, ArrayEntry, Manifest, MemoryDescriptor, SegmentEntry
from vram.sharing.descriptor import encode_manifest as encoded
from vram.spec import HOST

MEMORIES = 4
AFTER = 600  # pauses of a millisecond, after which one owner has enough
SECONDS = 30  # for a hang


class Asking:
    """A memfd whose owner asks for a seal over and over, in vain: a page of it is in use."""

    def __init__(self) -> None:
        self.fd = make_memfd(GRANULE, seals=WRITABLE)
        with mmap.mmap(self.fd, GRANULE) as shared:
            view = ctypes.c_char.from_buffer(shared)
            self._page = Pages(ctypes.addressof(view))
            del view
        self._is_over = False
        # Two: while the kernel answers one, the other waits for its turn.
        self._threads = [threading.Thread(target=self._ask) for _ in range(2)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._is_over:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.fd, ADD_SEALS, WRITE)

    @property
    def is_refused(self) -> bool:
        """Whether the kernel refuses mappings now."""
        try:
            mmap.mmap(self.fd, GRANULE).close()
        except PermissionError:
            return True
        return False

    def stop(self) -> None:
        """Ask no more; the kernel's last answer has come then."""
        self._is_over = True
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()

    def close(self) -> None:
        self.stop()
        self._page.let_go()
        os.close(self.fd)


class Clock:
    """In place of the module `time`: a pause takes none, but is counted; and after so many, the next owner stops."""

    def __init__(self, owners: list[Asking]) -> None:
        self.pauses, self.slept = 0, 0.0
        self._owners = iter(owners)

    def monotonic(self) -> float:
        return time.monotonic() + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.pauses += 1
        if self.pauses % AFTER == 0 and (owner := next(self._owners, None)) is not None:
            owner.stop()


@pytest.fixture
def owners() -> Iterator[list[Asking]]:
    with contextlib.ExitStack() as stage:
        made = [stage.enter_context(contextlib.closing(Asking())) for _ in range(MEMORIES)]
        for one in made:
            until(lambda one=one: one.is_refused, what="the kernel's refusal")  # type: ignore[misc]
        yield made


@pytest.fixture
def clock(owners: list[Asking], monkeypatch: pytest.MonkeyPatch) -> Clock:
    made: Any = Clock(owners)
    for module in (memfds, chunks, leases, conversation):
        monkeypatch.setattr(module, "time", made)
    return made


MEMORY = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, 4096, GRANULE)


def one_region(owners: list[Asking]) -> None:
    """All of them segments of one memory."""
    Region.from_allocations(drivers.get(HOST), [Received(one.fd, GRANULE) for one in owners], managed=True).close()


def one_lease(owners: list[Asking], timeout: float | None = None) -> None:
    """All of them memories of one entry."""
    one, other = Channel.pair()
    with one, other:
        arrays = {str(number): ArrayEntry(number, 0, 4, "uint8", (4,)) for number in range(MEMORIES)}
        data = encoded(Manifest(MANIFEST_VERSION, (MEMORY,) * MEMORIES, arrays))
        fds = [os.dup(owner.fd) for owner in owners]
        attachment = Attachment(1, "n", 1, 0, (Segment(GRANULE),) * MEMORIES, fds, data, None, {}, True)
        client: Any = Nobody(one)
        Lease(client, attachment, "r", timeout=timeout).close()


def one_receive(owners: list[Asking]) -> None:
    """Each in a message of its own, that one call receives, with half a second to spare."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with vram.ArrayChannel(ours) as channel, theirs:
        for number, owner in enumerate(owners):
            part = Part(MemoryPart(number, 0, True, True, MEMORY))
            socket.send_fds(theirs, [encode(part)], [owner.fd])
        theirs.send(encode(Value(1)))
        channel.recv(timeout=UNDECIDED / 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("map_all", "most"),
    [
        pytest.param(one_region, UNDECIDED, id="segments of one memory"),
        pytest.param(one_lease, UNDECIDED, id="memories of one lease"),
        pytest.param(
            lambda owners: one_lease(owners, UNDECIDED / 4), UNDECIDED / 4, id="memories of one lease, with a timeout"
        ),
        pytest.param(one_receive, 1.5 * UNDECIDED, id="messages that one call receives"),
    ],
)
def test_s7_owners_who_go_on_asking_for_seals_are_waited_for_once(
    owners: list[Asking], clock: Clock, map_all: Callable[[list[Asking]], None], most: float
) -> None:
    """Each of them for 0.6 s; alone that would be waited for."""
    # One that got in between two questions is mapped without waiting: after the last pause there may be nothing left to
    # refuse, only that the time of the call is over.
    with contextlib.suppress(ProtocolError, WaitTimeoutError):
        map_all(owners)
    assert 0 < clock.slept <= most + 0.01, "one time for all of them"


def test_s7_the_error_says_what_the_owner_does(owners: list[Asking], clock: Clock) -> None:
    clock._owners = iter(())  # nobody stops
    refused: list[str] = []
    for _ in range(5):  # it may be mapped between two questions
        try:
            one_region(owners)
        except VramError as error:
            refused.append(f"{type(error).__name__}: {error}")
    assert refused
    assert all(said.startswith("ProtocolError") and "asks for the memory to be sealed" in said for said in refused)


@pytest.mark.slow
def test_a_follower_waits_for_a_moment_since_others_wait_for_it(
    owners: list[Asking], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a second for each version: as long no other follower, and no awaited call, at that keeper went on."""
    waits: list[float] = []
    real = Wanted.as_root

    def mapped(wanted: Wanted, client: KeeperClient, attachment: Attachment, timeout: float | None) -> Any:
        before = clock.slept
        try:
            return real(wanted, client, attachment, timeout)
        finally:
            waits.append(clock.slept - before)

    clock._owners = iter(())  # nobody stops
    data = encoded(Manifest(MANIFEST_VERSION, (MEMORY,), {"a": ArrayEntry(0, 0, 4, "uint8", (4,))}))
    with vram.private_keeper() as kept, KeeperClient.connect(kept.path) as publisher:
        with memfds_of(1, GRANULE, seals=WRITABLE) as (first,):
            publisher.publish("n", [Segment(GRANULE)], [first], manifest=data, writable=True)
        with vram.follow("n", access="rw", keeper=kept) as follower:
            monkeypatch.setattr(Wanted, "as_root", mapped)

            def publish_and_look() -> bool:  # one may be mapped between two questions
                publisher.publish("n", [Segment(GRANULE)], [owners[0].fd], manifest=data, writable=True)
                return any(waits)

            until(publish_and_look, what="a version that is waited for")
            owners[0].stop()
            until(lambda: follower.state == "current", what="the one that can be mapped at last")
        assert max(waits) < 0.1
    close_client(kept.path)
