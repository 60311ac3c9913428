"""Transports between processes: the contract over every exchange, deaths at every step, and what is not available."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.contracts.transport import FullTransportContract
from tests.support import transport_children as children
from tests.support.deadlines import AT_ONCE, SOON
from tests.support.keeper_here import later
from tests.support.remote_transports import greeting
from tests.support.samples import in_turns, some
from tests.support.transports import answer, child

import vram
from vram import driver as drivers
from vram.errors import BusyError, PeerGoneError, ProtocolError, UnsupportedError, UsageError, WaitTimeoutError
from vram.spec import HOST, Location
from vram.testing import Ends
from vram.transports import ExportedBuffer, IpcTransport, SocketExchange, VmmTransport
from vram.transports.remote import VERSION

GPU = Location("cuda", 0)


@pytest.fixture(scope="module")
def maker() -> Iterator[Connection]:
    """The process that sends, for one test after the other."""
    with child(children.sender) as (_, pipe):
        assert answer(pipe) == "here"  # or the ledger would see one program become another
        yield pipe


class ChildEnds(Ends):
    """The sender runs in a child."""

    def __init__(self, receiver: Any, pipe: Connection, elsewhere: Location) -> None:
        self.receiver, self.pipe, self.elsewhere = receiver, pipe, elsewhere

    def send(self, data: bytes, offset: int = 0) -> None:
        self.pipe.send(("send", data, offset))
        assert answer(self.pipe) == "done"

    def export(self, data: bytes, offset: int = 0) -> ExportedBuffer:
        self.pipe.send(("export", data, offset))
        return ExportedBuffer(self.receiver.kind, answer(self.pipe))


class Between(FullTransportContract):
    kind: str

    @contextlib.contextmanager
    def connected(self, pipe: Connection, way: str, path: str, src: str, dst: str) -> Iterator[Ends]:
        pipe.send((self.kind, way, path, src, dst))
        receiver = children.KINDS[self.kind](src, dst, children.WAYS[way].listen(path, SOON), timeout=SOON)
        try:
            yield ChildEnds(receiver, pipe, HOST)
        finally:
            receiver.close()
            pipe.send(("end",))


class Legacy(Between):
    kind = "ipc"

    @pytest.fixture(params=["socket", "pipes", "memory"])
    def ends(self, request: pytest.FixtureRequest, maker: Connection, path: str) -> Iterator[Ends]:
        with self.connected(maker, request.param, path, "cuda:0", "cuda:0") as ends:
            yield ends


@pytest.mark.usefixtures("two_gpus")
class LegacyToAPeer(Between):
    kind = "ipc"

    @pytest.fixture
    def ends(self, maker: Connection, path: str) -> Iterator[Ends]:
        with self.connected(maker, "socket", path, "cuda:0", "cuda:1") as ends:
            yield ends


@pytest.mark.usefixtures("two_gpus")
class Descriptors(Between):
    kind = "vmm"

    @pytest.fixture
    def ends(self, maker: Connection, path: str) -> Iterator[Ends]:
        with self.connected(maker, "socket", path, "cuda:0", "cuda:1") as ends:
            yield ends

    def test_a_handle_brought_by_hand(self) -> None:  # type: ignore[override]
        """Descriptors cannot be brought through a pipe; see tests/conformance."""


@pytest.mark.usefixtures("two_gpus")
class SharedMemory(Between):
    kind = "shm"

    @pytest.fixture(params=[("cuda:0", "cuda:1"), ("cuda:0", "host"), ("host", "cuda:0")], ids=["two", "down", "up"])
    def ends(self, request: pytest.FixtureRequest, maker: Connection, path: str) -> Iterator[Ends]:
        with self.connected(maker, "socket", path, *request.param) as ends:
            ends.elsewhere = next(
                Location.parse(place) for place in ("host", "cuda:0") if place not in request.param[1]
            )
            yield ends

    def test_a_handle_brought_by_hand(self) -> None:  # type: ignore[override]
        """Descriptors cannot be brought through a pipe; see tests/conformance."""


@pytest.mark.standin
class TestLegacyOnTheStandin(Legacy):
    pass


@pytest.mark.standin
class TestSharedMemoryOnTheStandin(SharedMemory):
    pass


@pytest.mark.standin
class TestLegacyToAPeerOnTheStandin(LegacyToAPeer):
    pass


@pytest.mark.standin
class TestDescriptorsOnTheStandin(Descriptors):
    pass


@pytest.mark.gpu
class TestLegacyOnHardware(Legacy):
    pass


@pytest.mark.gpu
class TestDescriptorsOnHardware(Descriptors):
    pass


@pytest.mark.gpu
class TestSharedMemoryOnHardware(SharedMemory):
    pass


# -- deaths ---------------------------------------------------------------------------------------------------------
DEATHS = [
    pytest.param("vmm", "socket", "host", 5, id="vmm-host"),
    pytest.param("vmm", "socket", "cuda:0", 5, id="vmm-gpu", marks=pytest.mark.standin),
    pytest.param("shm", "socket", "host", 6, id="shm-host"),
    pytest.param("shm", "socket", "cuda:0", 6, id="shm-gpu", marks=pytest.mark.standin),
    pytest.param("ipc", "socket", "cuda:0", 3, id="ipc-socket", marks=pytest.mark.standin),
    pytest.param("ipc", "pipes", "cuda:0", 3, id="ipc-pipes", marks=pytest.mark.standin),
    pytest.param("ipc", "memory", "cuda:0", 3, id="ipc-memory", marks=pytest.mark.standin),
]


@pytest.mark.parametrize(("kind", "way", "place", "steps"), some([*DEATHS], 2))
def test_a_sender_killed_at_any_step_is_known_at_once(kind: str, way: str, place: str, steps: int, path: str) -> None:
    """Before its hello, between the parts of its memory, before and after the message itself."""
    for after in range(steps):
        with child(children.dying_sender, kind, way, path, place, after) as (process, _):
            try:
                exchange = children.WAYS[way].listen(path, SOON)
            except PeerGoneError:  # it connected and died between two looks
                assert (way, after) == ("pipes", 0)
                continue
            with children.KINDS[kind](place, place, exchange) as transport:
                with contextlib.suppress(PeerGoneError):
                    transport.recv(timeout=SOON).close()  # vmm memory that was there whole is right: it is ours, too
                    assert (kind, after) != ("ipc", 0)
                process.join(SOON)
                started = time.monotonic()
                for use in (lambda: transport.recv(timeout=SOON), lambda: transport.recv(timeout=SOON)):
                    with pytest.raises(PeerGoneError):
                        use()
                assert time.monotonic() - started < AT_ONCE


@pytest.mark.parametrize(("kind", "way", "place", "_steps"), DEATHS)
def test_a_receiver_killed_is_known_at_once(kind: str, way: str, place: str, _steps: int, path: str) -> None:
    array, address = (vram.zeros(1000, "uint8", device=place), 0)
    if kind == "ipc":
        array.close()
        address = children.cuda_malloc(1000)
        array = children.legacy_array(address, 1000)
    with child(children.receiver, kind, way, path, place) as (process, pipe), array:
        with children.KINDS[kind](place, place, children.WAYS[way].listen(path, SOON)) as transport:
            transport.send(array)
            assert answer(pipe) == 1000
            transport.synchronize(timeout=SOON)
            process.kill()
            process.join(SOON)
            started = time.monotonic()
            with pytest.raises(PeerGoneError):
                transport.send(array)
            assert time.monotonic() - started < AT_ONCE
    if address:
        del transport
        children.cuda_free(address)


@contextlib.contextmanager
def last_words(kind: str, path: str, place: str, words: bytes, times: int = 1) -> Iterator[tuple[Any, Any]]:
    """A process that has sent something, and what receives here."""
    with child(children.sender) as (process, pipe):
        assert answer(pipe) == "here"
        pipe.send((kind, "socket", path, place, place))
        with children.KINDS[kind](place, place, SocketExchange.listen(path, SOON)) as transport:
            for _ in range(times):
                pipe.send(("send", words, 3))
                assert answer(pipe) == "done"
            yield process, transport


def killed(process: Any) -> None:
    process.kill()
    process.join(SOON)


@pytest.mark.standin
def test_what_a_dead_process_sent_is_refused_where_its_memory_died_with_it(path: str) -> None:
    with last_words("ipc", path, "cuda:0", b"words") as (process, transport):
        killed(process)
        with pytest.raises((PeerGoneError, ProtocolError)):
            transport.recv(timeout=SOON)


@pytest.mark.standin
@pytest.mark.parametrize("given", [False, True], ids=["its memory", "a buffer"])
def test_what_a_dead_process_sent_is_refused_also_where_its_memory_is_open(path: str, given: bool) -> None:
    """The driver may show something there still: nobody can say what."""
    with last_words("ipc", path, "cuda:0", b"words", 3) as (process, transport):
        with vram.zeros(9, "uint8", device="cuda:0") as buffer:
            transport.recv(timeout=SOON).close()
            assert transport.statistics().imported == 1
            killed(process)
            for _ in range(3):  # what is refused stays refused
                with pytest.raises(PeerGoneError, match="and its memory with it"):
                    transport.recv(buffer if given else None, timeout=SOON)
            assert set(buffer.to_host()) == {0}


@pytest.mark.standin
def test_what_was_copied_while_its_maker_died_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = drivers.get(GPU)
    really = driver.copy
    with last_words("ipc", path, "cuda:0", b"words") as (process, transport):
        monkeypatch.setattr(driver, "copy", lambda *arguments: (really(*arguments), killed(process)))
        with vram.zeros(9, "uint8", device="cuda:0") as buffer:
            with pytest.raises(PeerGoneError, match="and its memory with it"):
                transport.recv(buffer, timeout=SOON)


def test_what_a_dead_process_sent_is_there_where_a_descriptor_keeps_it(path: str) -> None:
    with last_words("vmm", path, "host", b"last words") as (process, transport):
        killed(process)
        with transport.recv(timeout=SOON) as array:
            assert array.numpy().tobytes() == b"last words"
        with pytest.raises(PeerGoneError):
            transport.recv(timeout=SOON)


# -- what travels how -----------------------------------------------------------------------------------------------
@pytest.mark.standin
def test_memory_that_travels_another_way_says_which() -> None:
    one, other = SocketExchange.pair()
    with other, IpcTransport("cuda:0", "cuda:0", one) as transport, vram.zeros(10, "uint8", device="cuda:0") as array:
        for use in (transport.send, transport.export):
            with pytest.raises(UsageError, match="vmm transport"):
                use(array)


@pytest.mark.parametrize("way", ["pipes", "memory"])
def test_descriptors_over_bytes_only_are_refused_with_the_reason(way: str, path: str) -> None:
    with child(children.talker, way, path):
        with children.WAYS[way].listen(path, SOON) as exchange:
            with pytest.raises(UnsupportedError, match="SocketExchange"):
                VmmTransport("host", "host", exchange)
            with pytest.raises(UnsupportedError, match="bytes only"):
                exchange.send(b"x", [0])


@pytest.mark.parametrize("way", ["socket", "pipes", "memory"])
def test_an_exchange_brings_messages_there_and_back(way: str, path: str) -> None:
    """Whole and in order, more of them than it has room for; and knows the end."""
    with child(children.talker, way, path) as (process, _):
        with children.WAYS[way].listen(path, SOON) as exchange:
            for length in [1, 2, 100, exchange.most // 2, *range(1, 300)]:
                payload = os.urandom(length)
                exchange.send(payload, timeout=SOON)
                assert exchange.recv(timeout=SOON) == (payload * 2, [])
            for bad in (b"", bytes(exchange.most + 1)):
                with pytest.raises(UsageError):
                    exchange.send(bad)
            with pytest.raises(WaitTimeoutError):
                exchange.recv(timeout=0.01)
            assert not exchange.is_gone()
            process.kill()
            process.join(SOON)
            started = time.monotonic()
            with pytest.raises(PeerGoneError):
                exchange.recv(timeout=SOON)
            with pytest.raises(PeerGoneError):
                exchange.send(b"anybody?", timeout=SOON)
            assert exchange.is_gone()
            assert time.monotonic() - started < AT_ONCE
    assert not list(Path(path).parent.iterdir()), "what was made to meet is gone"


@pytest.mark.parametrize("way", ["socket", "pipes", "memory"])
def test_closing_an_exchange_is_the_end_for_the_other(way: str, path: str) -> None:
    with child(children.talker, way, path) as (_, pipe):
        children.WAYS[way].listen(path, SOON).close()
        assert answer(pipe) == "gone"


@pytest.mark.parametrize("way", ["socket", "pipes", "memory"])
def test_closing_an_exchange_wakes_who_waits_here(way: str, path: str) -> None:
    with child(children.talker, way, path):
        exchange = children.WAYS[way].listen(path, SOON)
        waiting, ended = later(lambda: exchange.recv(timeout=SOON))
        exchange.close()
        waiting.join(SOON)
        assert [type(error) for error in ended] == [vram.errors.ClosedError]


@pytest.mark.parametrize("way", ["socket", "pipes", "memory"])
def test_nobody_there_is_waited_for_and_no_longer(way: str, path: str) -> None:
    for meet in (children.WAYS[way].connect, children.WAYS[way].listen):
        with pytest.raises(WaitTimeoutError):
            meet(path, 0.02)
    assert not list(Path(path).parent.iterdir())
    for name in (path, f"{path}.there"):
        Path(name).touch()
    with pytest.raises(BusyError):
        children.WAYS[way].listen(path, 0.02)


def test_a_full_exchange_waits_and_says_so(path: str) -> None:
    """At most 64 messages are under way: then the sender waits for the receiver, as long as it was told to."""
    one, other = SocketExchange.pair()
    with VmmTransport("host", "host", one, timeout=0.02) as sender, VmmTransport("host", "host", other) as receiver:
        with vram.zeros(10, "uint8", device="host") as array:
            for _ in range(64):
                sender.send(array)
            with pytest.raises(WaitTimeoutError):
                sender.send(array)
            with pytest.raises(WaitTimeoutError):
                sender.synchronize(timeout=0.02)
            for _ in range(64):
                receiver.recv(timeout=SOON).close()
            sender.synchronize(timeout=SOON)
            sender.send(array)
            assert receiver.statistics().imported == 1


# -- what is not available ------------------------------------------------------------------------------------------
@pytest.mark.standin
def test_gpus_that_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAM_STANDIN_NO_PEER", "0,1")
    with child(children.without_peers) as (_, pipe):
        answers, refused, chosen, moved = answer(pipe)
    assert {kind for kind, (is_available, _) in answers.items() if is_available} == {"staged", "shm"}
    assert all("no peers" in reason for kind, (_, reason) in answers.items() if kind not in ("staged", "shm"))
    assert "no peers" in refused
    assert (chosen, moved) == ("staged", 7)


@in_turns(5)
def test_no_driver_at_all() -> None:
    """As on a machine without one: the loader finds nothing, and says so."""
    code = (
        "import sys, types; from tests.support.transport_children import without_a_driver as work; "
        "work(types.SimpleNamespace(send=lambda found: print(repr(found))))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(__file__).parents[2] / part) for part in ("", "tests", "src"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    answers, best, said = eval(done.stdout)
    if any(is_available for is_available, _ in answers.values()):
        pytest.skip("this machine has a driver")
    assert all(reason for _, reason in answers.values())
    assert best == "staged"
    assert all(f"{kind}: " in said for kind in ("peer", "staged", "vmm", "ipc", "shm"))


def test_other_machines_words_are_not_believed() -> None:
    """S7: what is no message, comes too early, or names what was never described."""
    from vram.handover.messages import MemoryPart, Part, Reference, Shared, Unmap, Value, encode
    from vram.sharing.descriptor import MemoryDescriptor, SegmentEntry

    def by_handle(data: bytes) -> bytes:
        memory = MemoryDescriptor("host", (SegmentEntry(4096, 4),), 0, 4096, 4096)
        return encode(Part(MemoryPart(1, 0, True, True, memory, data)))

    hello = greeting("vmm")
    shared = encode(Shared(Reference(1, 1, 0, "uint8", (1,))))
    cases = {
        "without a greeting": [encode(Value(5))],  # type: ignore[arg-type]
        "a value that is none": [hello, encode(Value(5))],  # type: ignore[arg-type]
        "an array first": [shared],
        "another kind": [greeting("ipc")],
        "another version": [greeting("vmm", VERSION - 1)],
        "never described": [hello, shared],
        "64 bytes": [hello, by_handle(bytes(64))],
        "negative": [hello, encode(["k", -1])],
    }
    for payloads in cases.values():
        one, other = SocketExchange.pair()
        with one, VmmTransport("host", "host", other) as transport:
            for payload in payloads:
                one.send(payload)
            with pytest.raises(ProtocolError):
                transport.recv(timeout=SOON)
    one, other = SocketExchange.pair()
    with one, VmmTransport("host", "host", other) as transport:
        one.send(hello)
        one.send(encode(Unmap((7,))))  # what was never known may well be forgotten
        with pytest.raises(WaitTimeoutError):
            transport.recv(timeout=0.01)


def test_what_was_said_before_the_end_is_received_by_who_comes_late() -> None:
    one, other = SocketExchange.pair()
    with vram.zeros(10, "uint8", device="host") as array:
        with VmmTransport("host", "host", one) as sender:
            sender.send(array)
        with VmmTransport("host", "host", other) as receiver:
            assert receiver.recv(timeout=SOON).nbytes == 10
            for use in (lambda: receiver.recv(timeout=SOON), lambda: receiver.send(array)):
                with pytest.raises(PeerGoneError):
                    use()


def test_what_was_received_is_as_writable_as_it_was_for_its_sender() -> None:
    one, other = SocketExchange.pair()
    with VmmTransport("host", "host", one) as sender, VmmTransport("host", "host", other) as receiver:
        with vram.zeros(10, "uint8", device="host") as array:
            sender.send(array)
            with receiver.recv(timeout=SOON) as seen:
                seen.numpy()[3] = 7
                assert array.numpy()[3] == 7
            array.region.freeze()
            sender.send(array)
            with receiver.recv(timeout=SOON) as seen:
                assert seen.readonly
                assert seen.numpy()[3] == 7
            with receiver.import_(sender.export(array)) as seen:
                assert seen.readonly
