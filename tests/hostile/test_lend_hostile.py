"""What a hostile lender, or the other end of a channel, says of memory by handle: typed errors, nothing left (S7)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.support.memfds import READ_ONLY, make_memfd
from tests.support.other_process import OtherProcess
from tests.support.raw_cuda import Maker
from tests.support.spoiled_descriptors import _Nobody, spoil_bytes, spoil_values

import standin
import vram
from vram import driver as drivers
from vram.entries.lease import Lease
from vram.errors import AddressSpaceError, DriverError, ProtocolError, UnsupportedError, VramError
from vram.handover.messages import (
    EventIs,
    MemoryPart,
    NextPart,
    Part,
    Reference,
    Returned,
    Shared,
    Unmap,
    Unref,
    Value,
    encode,
)
from vram.keeper.client import Attachment, Segment
from vram.open_files import close_fds
from vram.sharing.channel import Channel
from vram.sharing.descriptor import (
    MANIFEST_VERSION,
    ArrayEntry,
    EventEntry,
    HandleEntry,
    Manifest,
    MemoryDescriptor,
    SegmentEntry,
    encode_manifest,
)
from vram.spec import HandleKind, Location

pytestmark = pytest.mark.standin
GPU = Location("cuda", 0)
GRANULE = 2 << 20
LEGACY, POOL, FD = int(HandleKind.LEGACY_IPC), int(HandleKind.POOL), int(HandleKind.POSIX_FD)
RANDOM = random.Random(11).randbytes(64)


class Theirs:
    """Memory of another process, which is there: what is said of it is the lie."""

    def __init__(self, other: OtherProcess) -> None:
        driver: Any = drivers.get(GPU)
        driver.stream_destroy(driver.stream_create(GPU))
        self.other = other
        self.uuid = driver.device_info(GPU).uuid
        self.legacy = other.call("ipc_export", other.call("legacy", GRANULE))
        pool, address = other.call("pooled", GRANULE, shareable=True)
        self.pool_fd = other.take_fd(other.call("pool_export", pool))
        self.pointer = other.call("pool_export_pointer", address)
        other_pool, other_address = other.call("pooled", GRANULE, shareable=True)
        self.other_pool_fd = other.take_fd(other.call("pool_export", other_pool))
        self.other_pointer = other.call("pool_export_pointer", other_address)
        event = other.call("event_create", GPU, interprocess=True)
        self.event = other.call("event_export", event)

    def memory(self, kind: int, *, nbytes: int = GRANULE, device: str | None = None) -> MemoryDescriptor:
        return MemoryDescriptor(device or self.uuid, (SegmentEntry(nbytes, kind),), 0, nbytes, nbytes)

    def manifest(self) -> Manifest:
        memories = (self.memory(FD, device="host"), self.memory(LEGACY), self.memory(POOL))
        arrays = {name: ArrayEntry(n, 256, 4000, "float32", (10, 100)) for n, name in enumerate(("h", "x", "p"))}
        handles = (HandleEntry(1, self.legacy), HandleEntry(2, self.pointer, 0))
        return Manifest(MANIFEST_VERSION, memories, arrays, handles, 1, (EventEntry(self.uuid, self.event),))


@pytest.fixture(scope="module")
def theirs() -> Iterator[Theirs]:
    with OtherProcess(Maker) as other:
        made = Theirs(other)
        yield made
        close_fds([made.pool_fd, made.other_pool_fd])


@pytest.fixture(autouse=True)
def whole(theirs: Theirs) -> Iterator[None]:
    """The device is not lost, and the other process's memory is still there."""
    control = standin.Standin()
    control.clear()
    yield
    assert control.illegal() == 0
    driver: Any = drivers.get(GPU)
    driver.synchronize(GPU)
    driver.ipc_close(driver.ipc_open(theirs.legacy, GRANULE, GPU))


def lease(
    client: _Nobody, manifest: bytes, fds: list[int], *, access: str = "r", number: int = 1, is_lent: bool = True
) -> Lease:
    """Make a lease as `borrow` does; the descriptors are given away."""
    segments = tuple(Segment(GRANULE) for _ in fds)
    attachment = Attachment(number, "lent", number, 0, segments, fds, manifest, None, {}, False)
    client.lends = "a lender" if is_lent else ""
    return Lease(client, attachment, access)


@pytest.fixture
def client() -> Iterator[_Nobody]:
    one, other = Channel.pair()
    with one, other, _Nobody(one) as client:
        yield client


def descriptors(theirs: Theirs) -> list[int]:
    return [make_memfd(GRANULE, seals=READ_ONLY), os.dup(theirs.pool_fd)]


def test_what_is_true_is_taken(theirs: Theirs, client: _Nobody) -> None:
    """Or all of the following would show nothing."""
    with lease(client, encode_manifest(theirs.manifest()), descriptors(theirs)) as found:
        assert [array.to_host().sum() for array in found.values()] == [0, 0, 0]
    assert client.returned == [1]


def test_a_keeper_has_no_memory_by_handle(theirs: Theirs, client: _Nobody) -> None:
    with pytest.raises(ProtocolError, match="none to keep"):
        lease(client, encode_manifest(theirs.manifest()), descriptors(theirs), is_lent=False)


# What is said, and how it is refused.
LIES: dict[str, Callable[[Theirs, Manifest], Manifest]] = {
    "larger than the allocation": lambda t, m: memories(m, 1, t.memory(LEGACY, nbytes=2 * GRANULE)),
    "much larger": lambda t, m: memories(m, 1, t.memory(LEGACY, nbytes=2**46)),
    "a pool's allocation that is larger": lambda t, m: memories(m, 2, t.memory(POOL, nbytes=2 * GRANULE)),
    "legacy that is said to be of a pool": lambda t, m: handles(m, HandleEntry(1, t.legacy, 0), m.handles[1]),
    "a handle of zeros": lambda t, m: handles(m, HandleEntry(1, bytes(64)), m.handles[1]),
    "a handle of another boot": lambda t, m: handles(m, HandleEntry(1, RANDOM), m.handles[1]),
    "a pointer of zeros": lambda t, m: handles(m, m.handles[0], HandleEntry(2, bytes(64), 0)),
    "a pointer of another boot": lambda t, m: handles(m, m.handles[0], HandleEntry(2, RANDOM, 0)),
    "a pointer of another pool": lambda t, m: handles(m, m.handles[0], HandleEntry(2, t.other_pointer, 0)),
    "a pointer as a legacy handle": lambda t, m: handles(m, HandleEntry(1, t.pointer), m.handles[1]),
    "a legacy handle as a pointer": lambda t, m: handles(m, m.handles[0], HandleEntry(2, t.legacy, 0)),
    "an event as a handle": lambda t, m: handles(m, HandleEntry(1, t.event), m.handles[1]),
    "one pool too many": lambda t, m: replaced(m, pools=2),
    "one pool too few": lambda t, m: replaced(m, pools=0),
    "the wrong pool": lambda t, m: handles(m, m.handles[0], HandleEntry(2, t.pointer, 1)),
    "no handles": lambda t, m: replaced(m, handles=()),
    "two handles of one": lambda t, m: handles(m, m.handles[0], m.handles[0]),
    "a handle of what has a descriptor": lambda t, m: handles(m, HandleEntry(0, t.legacy), *m.handles),
    "a handle of nothing": lambda t, m: handles(m, HandleEntry(3, t.legacy), *m.handles),
    "on the host": lambda t, m: memories(m, 1, t.memory(LEGACY, device="host")),
    "a pool on the host": lambda t, m: memories(m, 2, t.memory(POOL, device="host")),
    "on an ordinal": lambda t, m: memories(m, 1, t.memory(LEGACY, device="cuda:0")),
    "on a GPU that nobody has": lambda t, m: memories(m, 1, t.memory(LEGACY, device=f"GPU-{'0' * 8}" + t.uuid[12:])),
    "another kind": lambda t, m: memories(m, 1, t.memory(int(HandleKind.FABRIC))),
    "no kind": lambda t, m: memories(m, 1, t.memory(0)),
    "two segments": lambda t, m: memories(
        m, 1, MemoryDescriptor(t.uuid, (SegmentEntry(GRANULE, LEGACY),) * 2, 0, GRANULE, 2 * GRANULE)
    ),
    "an array beyond its memory": lambda t, m: replaced(
        m, arrays={"x": ArrayEntry(1, GRANULE - 8, 16, "uint8", (16,))}
    ),
    "an array of a type that nobody knows": lambda t, m: replaced(
        m, arrays={"x": ArrayEntry(1, 0, 16, "float17", (16,))}
    ),
    "another version": lambda t, m: replaced(m, version=2),
}


def replaced(manifest: Manifest, **fields: Any) -> Manifest:
    return msgspec.structs.replace(manifest, **fields)


def handles(manifest: Manifest, *entries: HandleEntry) -> Manifest:
    return replaced(manifest, handles=entries)


def memories(manifest: Manifest, number: int, memory: MemoryDescriptor) -> Manifest:
    row = list(manifest.memories)
    row[number] = memory
    return replaced(manifest, memories=tuple(row))


@pytest.mark.parametrize("lie", LIES)
def test_s7_a_manifest_that_lies_is_refused_with_a_typed_error(lie: str, theirs: Theirs, client: _Nobody) -> None:
    data = msgspec.msgpack.encode(LIES[lie](theirs, theirs.manifest()))
    with pytest.raises((ProtocolError, UnsupportedError)):
        use(client, data, descriptors(theirs))
    assert client.returned == [1], "the lease is given back"


def use(client: _Nobody, data: bytes, fds: list[int], number: int = 1) -> None:
    """Make a lease, and look at all that is in it."""
    with lease(client, data, fds, number=number) as found:
        for name in found:
            look_at(found[name])


def look_at(array: vram.Array) -> None:
    """Read an array. The offset in a legacy handle is checked by nobody (measured): there may be nothing there."""
    try:
        assert array.to_host().nbytes == array.nbytes
    except DriverError as error:
        if not error.call.startswith("cuMemcpy") or array.region.made_by != "opened":  # type: ignore[attr-defined]
            raise


@pytest.mark.parametrize("what", ["memory", "pipe", "file", "another pool", "device"])
def test_s7_a_descriptor_that_is_no_pool_is_refused(what: str, theirs: Theirs, client: _Nobody) -> None:
    fds = [make_memfd(GRANULE, seals=READ_ONLY)]
    reader, writer = os.pipe()
    fds.append({
        "memory": lambda: make_memfd(GRANULE, seals=READ_ONLY),
        "pipe": lambda: os.dup(reader),
        "file": lambda: os.open(__file__, os.O_RDONLY),
        "another pool": lambda: os.dup(theirs.other_pool_fd),
        "device": lambda: os.open("/dev/null", os.O_RDWR),
    }[what]())  # fmt: skip
    with pytest.raises(ProtocolError):
        use(client, encode_manifest(theirs.manifest()), fds)
    close_fds([reader, writer])


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_s7_another_number_of_descriptors_is_refused_before_any_driver_call(
    count: int, theirs: Theirs, client: _Nobody
) -> None:
    control = standin.Standin()
    control.clear()
    with pytest.raises(ProtocolError, match="descriptors came"):
        use(client, encode_manifest(theirs.manifest()), [os.dup(theirs.pool_fd) for _ in range(count)])
    assert control.called() == {}


@pytest.mark.parametrize("data", [bytes(64), RANDOM], ids=["zeros", "another boot"])
def test_s7_an_event_that_is_none_is_refused_and_the_lease_given_back(
    data: bytes, theirs: Theirs, client: _Nobody
) -> None:
    manifest = replaced(theirs.manifest(), events=(EventEntry(theirs.uuid, data),))
    with pytest.raises(ProtocolError):
        lease(client, encode_manifest(manifest), descriptors(theirs))


LONG = int(os.environ.get("VRAM_FUZZ_ROUNDS", "20000"))  # of each seed in the long runs


def attach_mutated(theirs: Theirs, client: _Nobody, seed: int, rounds: int) -> int:
    """Borrow by mutated manifests; return how many could be."""
    chance = random.Random(seed)
    right = msgspec.msgpack.encode(theirs.manifest())
    taken = 0
    for number in range(1, rounds + 1):
        data = chance.choice([spoil_bytes, spoil_values, spoil_values])(chance, right, 2)
        try:
            use(client, data, descriptors(theirs), number)
            taken += 1
        except (ProtocolError, UnsupportedError, AddressSpaceError):  # the last for 128 TiB, which may be there
            pass
        except VramError as error:
            pytest.fail(f"seed {seed}, manifest {number}: {type(error).__name__}: {error}\n{data.hex()}")
    assert client.returned == list(range(1, rounds + 1)), "a lease was kept"
    return taken


def test_s7_mutated_manifests_are_refused_or_shown(theirs: Theirs, client: _Nobody) -> None:
    assert attach_mutated(theirs, client, 5, 3_000) > 100


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 105))
def test_s7_mutated_manifests_are_refused_or_shown_at_length(theirs: Theirs, client: _Nobody, seed: int) -> None:
    attach_mutated(theirs, client, seed, LONG)


# -- over a channel -------------------------------------------------------------------------------------------------
def conversation(theirs: Theirs) -> list[tuple[Any, bool]]:
    """What the other end of a channel may say, and whether the pool's descriptor comes with it."""
    return [
        (Part(MemoryPart(1, 0, True, True, theirs.memory(LEGACY), theirs.legacy)), False),
        (Part(MemoryPart(2, 0, True, True, theirs.memory(POOL), theirs.pointer, 0)), True),
        (EventIs(1, EventEntry(theirs.uuid, theirs.event)), False),
        (Shared(Reference(1, 1, 64, "float32", (10,)), 1, 1), False),
        (Shared(Reference(2, 1, 64, "int64", (10,)), 2), False),
        (Shared(Reference(1, 1, 0, "uint8", (GRANULE,)), 3), False),
        (Value([1, "two"]), False),
        (NextPart(), False),
        (Unmap((1,)), False),
    ]


def hear(channel: vram.ArrayChannel, most: int = 20) -> list[Any]:
    """Receive all there is; errors too."""
    heard: list[Any] = []
    for _ in range(most):
        try:
            heard.append(channel.recv(timeout=0))
        except vram.errors.WaitTimeoutError:
            break
        except (ProtocolError, UnsupportedError, AddressSpaceError, vram.errors.ClosedError) as error:
            heard.append(type(error))
    return heard


def test_what_is_true_is_heard(theirs: Theirs) -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel:
        for message, with_pool in conversation(theirs):
            raw.send(encode(message), [theirs.pool_fd] if with_pool else ())
        heard = hear(channel)
        assert [type(one) for one in heard] == [vram.Array, vram.Array, vram.Array, list]
        assert heard[2].nbytes == GRANULE
        del heard


SAID: dict[str, Callable[[Theirs], list[tuple[Any, list[int]]]]] = {
    "a reference to nothing": lambda t: [(Shared(Reference(9, 1, 0, "uint8", (1,)), 1), [])],
    "an event that nobody knows": lambda t: [
        (Part(MemoryPart(1, 0, True, True, t.memory(LEGACY), t.legacy)), []),
        (Shared(Reference(1, 1, 0, "uint8", (1,)), 0, 7), []),
    ],
    "an event that is none": lambda t: [(EventIs(1, EventEntry(t.uuid, RANDOM)), [])],
    "event number 0": lambda t: [(EventIs(0, EventEntry(t.uuid, t.event)), [])],
    "event number 2**40": lambda t: [(EventIs(2**40, EventEntry(t.uuid, t.event)), [])],
    "an event of the host": lambda t: [(EventIs(1, EventEntry("host", t.event)), [])],
    "given back what was never sent": lambda t: [(Unref(((1, 1),)), [])],
    "given back no times": lambda t: [(Unref(((1, 0),)), [])],
    "returned what was never sent": lambda t: [(Returned(Reference(1, 0, 0, "uint8", (1,))), [])],
    "a handle and two descriptors": lambda t: [
        (Part(MemoryPart(1, 0, True, True, t.memory(POOL), t.pointer, 0)), [t.pool_fd, t.pool_fd])
    ],
    "a pool without its descriptor": lambda t: [(Part(MemoryPart(1, 0, True, True, t.memory(POOL), t.pointer, 0)), [])],
    "legacy with a descriptor": lambda t: [
        (Part(MemoryPart(1, 0, True, True, t.memory(LEGACY), t.legacy)), [t.pool_fd])
    ],
    "a short handle": lambda t: [(Part(MemoryPart(1, 0, True, True, t.memory(LEGACY), t.legacy[:63])), [])],
    "a handle for what has a descriptor": lambda t: [
        (Part(MemoryPart(1, 0, True, True, t.memory(FD), t.legacy)), [t.pool_fd])
    ],
    "a kind without a handle": lambda t: [(Part(MemoryPart(1, 0, True, True, t.memory(LEGACY))), [])],
    "a pool as memory": lambda t: [(Part(MemoryPart(1, 0, True, True, t.memory(FD))), [t.pool_fd])],
    "more of it": lambda t: [
        (Part(MemoryPart(1, 0, True, True, t.memory(LEGACY), t.legacy)), []),
        (Part(MemoryPart(1, 1, True, True, t.memory(LEGACY), t.legacy)), []),
    ],
    "more of it by descriptor": lambda t: [
        (Part(MemoryPart(1, 0, True, True, t.memory(LEGACY), t.legacy)), []),
        (Part(MemoryPart(1, 1, True, True, t.memory(FD))), [t.pool_fd]),
    ],
    "larger than it is": lambda t: [
        (Part(MemoryPart(1, 0, True, True, t.memory(LEGACY, nbytes=2 * GRANULE), t.legacy)), [])
    ],
    "a pool's memory larger than it is": lambda t: [
        (Part(MemoryPart(1, 0, True, True, t.memory(POOL, nbytes=2 * GRANULE), t.pointer, 0)), [t.pool_fd])
    ],
    "the same memory in two sizes": lambda t: [
        (Part(MemoryPart(1, 0, True, True, t.memory(POOL), t.pointer, 0)), [t.pool_fd]),
        (Part(MemoryPart(2, 0, True, True, t.memory(POOL, nbytes=2 * GRANULE), t.pointer, 0)), [t.pool_fd]),
    ],
    "an array beyond its memory": lambda t: [
        (Part(MemoryPart(1, 0, True, True, t.memory(LEGACY), t.legacy)), []),
        (Shared(Reference(1, 1, GRANULE - 1, "uint8", (2,)), 1), []),
    ],
    "on the host": lambda t: [(Part(MemoryPart(1, 0, True, True, t.memory(LEGACY, device="host"), t.legacy)), [])],
}


def test_an_event_that_is_said_twice_is_refused(theirs: Theirs) -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel:
        for _ in range(2):
            raw.send(encode(EventIs(1, EventEntry(theirs.uuid, theirs.event))))
        raw.send(encode(Value("still there")))
        assert hear(channel)[0] is ProtocolError


@pytest.mark.parametrize("what", SAID)
def test_s7_a_channel_that_lies_is_refused_with_a_typed_error(what: str, theirs: Theirs) -> None:
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel:
        messages = SAID[what](theirs)
        for message, fds in messages:
            raw.send(encode(message), fds)
        heard = hear(channel)
        assert [one for one in heard if isinstance(one, type)], f"{what} was taken: {heard}"
        del heard
        raw.send(encode(Value("still there")))
        assert hear(channel)[-1] == "still there"


def listen_to_mutated(theirs: Theirs, seed: int, rounds: int) -> int:
    """Say mutated things to one end of a channel; return how many arrays came out of that."""
    chance = random.Random(seed)
    arrays = 0
    right = [(encode(message), with_pool) for message, with_pool in conversation(theirs)]
    for number in range(rounds):
        raw, end = Channel.pair()
        with raw, vram.ArrayChannel(end) as channel:
            spoilt = chance.randrange(len(right))
            for at, (payload, with_pool) in enumerate(right):
                fds = [theirs.pool_fd] * with_pool
                if at == spoilt or chance.random() < 0.1:
                    payload = chance.choice([spoil_bytes, spoil_values, spoil_values])(chance, payload, 2) or b"\xc1"
                    if chance.random() < 0.1:
                        fds = [theirs.other_pool_fd] * chance.randrange(3)
                raw.send(payload[:65_536], fds)
            try:
                for one in hear(channel):
                    if isinstance(one, vram.Array):
                        arrays += 1
                        look_at(one)
                    del one
            except VramError as error:
                pytest.fail(f"seed {seed}, round {number}: {type(error).__name__}: {error}\n{payload.hex()}")
    return arrays


def test_s7_mutated_messages_are_refused_or_shown(theirs: Theirs) -> None:
    assert listen_to_mutated(theirs, 17, 1_500) > 500


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 205))
def test_s7_mutated_messages_are_refused_or_shown_at_length(theirs: Theirs, seed: int) -> None:
    listen_to_mutated(theirs, seed, LONG * 2 // 5)


def test_s7_no_driver_call_is_made_with_numbers_that_do_not_fit(theirs: Theirs) -> None:
    control = standin.Standin()
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel:
        control.clear()
        for nbytes, capacity in ((2**62, 2**62), (GRANULE, 2**48), (GRANULE, 1), (2**63, 2**63)):
            memory = MemoryDescriptor(theirs.uuid, (SegmentEntry(nbytes, LEGACY),), 0, min(nbytes, GRANULE), capacity)
            raw.send(encode(Part(MemoryPart(1, 0, True, True, memory, theirs.legacy))))
            assert hear(channel) == [ProtocolError]
        assert control.called() == {}
