"""The transport over shared memory of the host: more than the ring has, what breaks off half-way, deaths, lies."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.support import transport_children as children
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.lend_children import Interface, Sources, numbers
from tests.support.remote_transports import GRANULE, greeting, memory, piece
from tests.support.transports import child

import standin
import vram
from vram.arrays.share import over
from vram.errors import PeerGoneError, ProtocolError, UsageError, VramError, WaitTimeoutError
from vram.handover.messages import Reference, Shared, Value, encode
from vram.transports import ShmTransport, SocketExchange, VmmTransport

LENGTH = 50_001


def values(seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, LENGTH, dtype=np.uint8)


class Sending:
    """A send in another thread, and how it ended."""

    def __init__(self, transport: Any, array: Any, **options: Any) -> None:
        self.error: BaseException | None = None
        self._work = lambda: transport.send(array, **options)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except vram.errors.VramError as error:
            self.error = error

    def end(self) -> BaseException | None:
        self._thread.join(SOON)
        assert not self._thread.is_alive()
        return self.error


class Stepwise:
    """An exchange that lets messages go as they are allowed to."""

    carries_fds = True

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.most = inner.most
        self.allowed = threading.Semaphore(0)

    def send(self, payload: bytes, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        assert self.allowed.acquire(timeout=SOON)
        self._inner.send(payload, fds, timeout=timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


PLACES = [
    pytest.param("host", "host"),
    pytest.param("cuda:0", "cuda:1", marks=pytest.mark.standin),
    pytest.param("cuda:0", "host", marks=pytest.mark.standin),
    pytest.param("host", "cuda:0", marks=pytest.mark.standin),
]


@pytest.mark.parametrize(("src", "dst"), PLACES)
@pytest.mark.parametrize(("slots", "slot"), [(2, 64), (2, 4096), (3, 8190)])
def test_more_than_the_ring_has_goes_through_it(src: str, dst: str, slots: int, slot: int) -> None:
    one, other = SocketExchange.pair()
    with ShmTransport(src, dst, one, slots=slots, slot=slot, timeout=SOON) as sender:
        with ShmTransport(src, dst, other) as receiver, vram.empty(LENGTH, "uint8", device=src) as array:
            with vram.zeros(LENGTH, "uint8", device=dst) as target:
                for turn in range(2 if slot > 64 else 1):
                    array[...] = values(turn)
                    sending = Sending(sender, array)
                    with receiver.recv(target if turn else None, timeout=SOON) as came:
                        assert (came.to_host() == values(turn)).all()
                    assert sending.end() is None
            assert receiver.statistics().imported == 1


@pytest.mark.standin
def test_where_memory_cannot_be_pinned_it_goes_through_plain_memory() -> None:
    control = standin.Standin()
    one, other = SocketExchange.pair()
    with control.failing("cuMemHostRegister", nth=1, code=2):
        with ShmTransport("cuda:0", "cuda:1", one) as sender, ShmTransport("cuda:0", "cuda:1", other) as receiver:
            with vram.empty(LENGTH, "uint8", device="cuda:0") as array:
                array[...] = values()
                sender.send(array)
                with receiver.recv(timeout=SOON) as came:
                    assert (came.to_host() == values()).all()
            assert sender._ring is not None
            assert not sender._ring.is_pinned
            assert receiver._theirs is not None
            assert receiver._theirs.is_pinned


@pytest.mark.standin
@pytest.mark.parametrize("kind", ["legacy", "pool", "private pool"])
def test_memory_of_every_kind_is_copied(kind: str) -> None:
    """Also of a pool that was not made to be shared, which no other transport between processes takes."""
    ends = [SocketExchange.pair() for _ in range(2)]
    with Sources() as sources, ShmTransport("cuda:0", "host", ends[0][0]) as sender:
        if kind == "private pool":
            made = Interface(sources.stranger.pooled(GRANULE, shareable=False)[1])
            with over(made) as there:
                there[...] = numbers()
            with VmmTransport("cuda:0", "cuda:0", ends[1][0]) as refusing:
                with pytest.raises(UsageError, match="made without a handle type") as refused:
                    refusing.send(made)
                assert "shm" in str(refused.value)
        else:
            made = sources.make(kind)
        with ShmTransport("cuda:0", "host", ends[0][1]) as receiver:
            sender.send(made)
            with receiver.recv(timeout=SOON) as came:
                assert (came.numpy() == numbers()).all()
    for pair in ends:
        for end in pair:
            end.close()


# -- what breaks off half-way ---------------------------------------------------------------------------------------
def test_what_its_sender_gave_up_is_never_received() -> None:
    one, other = SocketExchange.pair()
    with ShmTransport("host", "host", one, slots=2, slot=4096, timeout=0.02) as sender:
        with ShmTransport("host", "host", other) as receiver, vram.asarray(values(), device="host") as large:
            with vram.asarray(values(1)[:9000], device="host") as small:
                for _ in range(3):
                    with pytest.raises(WaitTimeoutError, match="took nothing out of the shared memory"):
                        sender.send(large)
                sender.timeout = SOON
                sending = Sending(sender, small)
                with receiver.recv(timeout=SOON) as came:
                    assert (came.numpy() == values(1)[:9000]).all()
                assert sending.end() is None
                sender.synchronize(timeout=SOON)
                assert (receiver.statistics().received.messages, sender.statistics().sent.messages) == (1, 1)


@pytest.mark.parametrize("first", ["its own memory", "a buffer"])
def test_what_came_half_way_goes_on_where_it_was(first: str) -> None:
    one, other = SocketExchange.pair()
    steps = Stepwise(one)
    steps.allowed.release()
    with ShmTransport("host", "host", steps, slots=2, slot=4096, timeout=SOON) as sender:
        with ShmTransport("host", "host", other) as receiver, vram.asarray(values(), device="host") as array:
            sending = Sending(sender, array)
            with vram.zeros(LENGTH, "uint8", device="host") as one_target:
                with vram.zeros(LENGTH, "uint8", device="host") as target:
                    for _ in range(4):  # the ring, and chunks
                        steps.allowed.release()
                        with pytest.raises(WaitTimeoutError):
                            receiver.recv(one_target if first == "a buffer" else None, timeout=0.02)
                    steps.allowed.release(100)
                    assert receiver.recv(target, timeout=SOON) is target
                    assert (target.numpy() == values()).all()
            assert sending.end() is None
            assert receiver.statistics().received.messages == 1


# -- deaths ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["host", pytest.param("cuda:0", marks=pytest.mark.standin)])
def test_a_receiver_killed_in_the_middle_of_a_transfer_is_known_at_once(place: str, path: str) -> None:
    with (
        child(children.holder, "shm", path, place) as (process, _),
        vram.zeros(40 << 20, "uint8", device=place) as array,
    ):
        with ShmTransport(place, place, SocketExchange.listen(path, SOON)) as transport:
            sending = Sending(transport, array)
            until(lambda: transport._claimed == 16 << 20, what="a full ring")
            started = time.monotonic()
            process.kill()
            assert isinstance(sending.end(), PeerGoneError)
            assert time.monotonic() - started < AT_ONCE


# -- lies (S7) ------------------------------------------------------------------------------------------------------
def test_s7_chunks_that_cannot_be_are_refused() -> None:
    cases: dict[str, list[bytes]] = {
        "of no ring": [piece(0, 10, 100, of=2)],
        "beyond the ring": [piece(0, 10, 100, offset=GRANULE - 9)],
        "more than the array has": [piece(0, 101, 100)],
        "not the next bytes": [piece(0, 10, 100), piece(20, 10, 100)],
        "of another array": [piece(0, 10, 100), piece(10, 10, 101)],
        "the end first": [piece(90, 10, 100)],
        "before the beginning": [piece(-1, 10, 100)],
        "nothing of something": [piece(0, 0, 100)],
        "something of nothing": [piece(0, 10, 0)],
        "of no type": [piece(0, 8, 1, dtype="float99")],
        "of no shape": [piece(0, 8, 1 << 63)],
        "of a negative shape": [piece(0, 8, -1)],
        "memory itself": [encode(Shared(Reference(1, 1, 0, "uint8", (1,))))],
    }
    with vram.zeros(10, "uint8", device="host") as array:
        (allocation,), _ = array.region.segments(0, 10)
        with allocation:
            for payloads in cases.values():
                one, other = SocketExchange.pair()

                def say(one: SocketExchange = one, payloads: list[bytes] = payloads) -> None:
                    with contextlib.suppress(VramError):  # hung up on, with some of it unsaid
                        for payload in payloads:
                            one.send(payload)

                talk = threading.Thread(target=say)
                with one, ShmTransport("host", "host", other) as transport:
                    one.send(greeting("shm"))
                    one.send(memory(1), [allocation.export()])
                    talk.start()
                    with pytest.raises(ProtocolError):
                        transport.recv(timeout=SOON)
                talk.join(SOON)
                assert not talk.is_alive()


def test_bytes_are_not_said_where_memory_is_shown() -> None:
    one, other = SocketExchange.pair()
    with one, VmmTransport("host", "host", other) as transport:
        one.send(greeting("vmm"))
        one.send(encode(Value([1, 2])))  # type: ignore[arg-type]
        with pytest.raises(ProtocolError, match="not said on the vmm transport"):
            transport.recv(timeout=SOON)


def test_it_takes_two_chunks() -> None:
    one, other = SocketExchange.pair()
    with one, other:
        for wrong in ({"slots": 1}, {"slot": 0}):
            with pytest.raises(UsageError, match="two or more"):
                ShmTransport("host", "host", one, **wrong)  # type: ignore[arg-type]
