"""Arrays through channels: descriptors once, ids ever after; growth followed; peers that die or lie (S4, S6, S7)."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support import workers
from tests.support.children import CHILDREN
from tests.support.deadlines import AT_ONCE, SOON
from tests.support.forked import end_of, refused
from tests.support.memfds import READ_ONLY, WRITABLE, make_memfd
from tests.support.places import short_directory
from tests.support.threads import race

import vram
from vram import ArrayChannel
from vram.errors import (
    AccessDeniedError,
    BusyError,
    ClosedError,
    LeakWarning,
    PeerGoneError,
    ProtocolError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from vram.sharing.channel import MAX_FDS, Channel

GRANULE = 2 << 20


def rows(count: int = 8, **options: Any) -> vram.Array:
    array = vram.empty((count, 4), "int64", device="host", **options)
    array.numpy()[:] = np.arange(count * 4).reshape(count, 4)
    return array


def pass_on(one: ArrayChannel, other: ArrayChannel, array: vram.Array) -> vram.Array:
    one.send(array, timeout=SOON)
    found = other.recv(timeout=SOON)
    assert isinstance(found, vram.Array)
    return found


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:vram (")


@contextmanager
def sent() -> Iterator[list[int]]:
    """How many descriptors went with each message."""
    counts: list[int] = []
    really = Channel.send

    def send(self: Channel, payload: Any, fds: Any = (), **options: Any) -> None:
        really(self, payload, fds, **options)
        counts.append(len(fds))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "send", send)
        yield counts


# -- with another process -------------------------------------------------------------------------------------------


@pytest.fixture
def echo() -> Iterator[tuple[ArrayChannel, Any]]:
    """A channel to a process that sends everything back, and the process."""
    with short_directory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        path = os.path.join(directory, "channel.sock")
        listener.bind(path)
        listener.listen()
        listener.settimeout(SOON)
        process = CHILDREN.Process(target=workers.echo, args=(path,))
        process.start()
        try:
            accepted, _ = listener.accept()
            with ArrayChannel(Channel(accepted)) as channel:
                yield channel, process
        finally:
            process.kill()
            process.join(SOON)
            process.close()


def test_another_process_uses_the_same_memory(echo: tuple[ArrayChannel, Any]) -> None:
    channel, process = echo
    with rows(capacity=1_000_000) as a:
        with sent() as descriptors:
            for n in range(1, 4):
                channel.send(a)
                assert channel.recv(timeout=SOON) is a, "what comes back home is the same object"
                assert a.numpy()[0, 0] == n
        assert descriptors == [1, 0, 0, 0], "the memory once, then an id"
        channel.send("where")
        address, shape, readonly = channel.recv(timeout=SOON)
        assert (shape, readonly) == ([8, 4], False)
        before = len(a.region.chunks)
        a.resize(900_000)
        assert len(a.region.chunks) > before
        channel.send(a)
        assert channel.recv(timeout=SOON) is a
        assert a.numpy()[899_999, 3] == 1
        channel.send("where")
        assert channel.recv(timeout=SOON) == [address, [900_000, 4], False], "growth is at the same address"
        channel.send({"plain": [1, None, "x", b"y", 2.5]})
        assert channel.recv(timeout=SOON) == {"plain": [1, None, "x", b"y", 2.5]}
    channel.send("drop")
    assert channel.recv(timeout=SOON) == 0, "what was closed here is unmapped there"
    channel.send(None)
    process.join(SOON)
    assert process.exitcode == 0
    with pytest.raises(PeerGoneError):
        channel.recv(timeout=SOON)


def test_an_end_can_be_the_argument_of_a_process() -> None:
    one, other = ArrayChannel.pair()
    process = CHILDREN.Process(target=workers.echo, args=(other,))
    process.start()
    other.close()
    try:
        with one, rows() as a:
            one.send(a)
            assert one.recv(timeout=SOON) is a
            assert a.numpy()[0, 0] == 1
            with pytest.raises(UsageError, match="used already"):
                one.give_away()
            one.send(None)
            process.join(SOON)
            assert process.exitcode == 0
            with pytest.raises(PeerGoneError):
                one.recv(timeout=SOON)
    finally:
        process.kill()
        process.join(SOON)
        process.close()


def held_memory() -> int:
    """Return how much memory of ours has a descriptor here, in the inodes of memfds."""
    gc.collect()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:vram"):
                found.add(os.stat(f"/proc/self/fd/{fd}").st_ino)
    return len(found)


@pytest.mark.parametrize("heard_by", ["send", "recv", "the drop of an array"])
def test_what_a_killed_peer_did_not_read_is_freed_when_its_end_is_heard_of(
    echo: tuple[ArrayChannel, Any], heard_by: str
) -> None:
    """It was until the channel was closed."""
    channel, process = echo
    channel.send(1)
    assert channel.recv(timeout=SOON) == 1
    before = held_memory()
    os.kill(process.pid, signal.SIGSTOP)
    kept = rows()
    for array in (rows(), rows(), kept):
        channel.send(array, timeout=SOON)
    del array
    assert held_memory() == before + 3, "it may come back"
    process.kill()
    process.join(SOON)
    assert kept.numpy()[0, 1] == 1
    if heard_by == "send":
        with pytest.raises(PeerGoneError):
            channel.send(2)
        assert held_memory() == before + 1
    elif heard_by == "recv":
        with pytest.raises(PeerGoneError):
            channel.recv(timeout=SOON)
        assert held_memory() == before + 1
    kept.close()
    del kept
    assert held_memory() == before


def test_what_a_dead_peer_had_said_is_heard_before_its_memory_is_freed() -> None:
    """An array that comes back is there, although the send that failed had to do with the end of the other side."""
    one, other = ArrayChannel.pair()
    with one:
        with other:
            with rows() as a:
                other.send(pass_on(one, other, a))
            one.send(1)  # unread: the end of file comes with an error before it
        with pytest.raises(PeerGoneError):
            one.send(2)
        back = one.recv(timeout=SOON)
        assert back.numpy()[7, 3] == 31
        with pytest.raises(PeerGoneError):
            one.recv(timeout=SOON)
        assert back.numpy()[7, 3] == 31


# -- what the receiver sees -----------------------------------------------------------------------------------------


def test_a_slice_sent_first_does_not_hide_the_array(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    one, other = pair
    with rows() as a, a[2:5] as part:
        back = [pass_on(other, one, pass_on(one, other, x)) for x in (part, a, a[5:6], part, a)]
        assert back[0] is part
        assert back[1] is a
        assert back[2].numpy().tolist() == [[20, 21, 22, 23]], "a slice that nobody kept is made anew"
        assert back[3] is part
        assert back[4] is a
        part_of_it = pass_on(one, other, a)[1:3]
        with pass_on(other, one, part_of_it) as home:
            assert home.address == a.address + 32


def test_what_its_owner_closed_can_be_sent_all_the_same(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    """Whoever still has an array may hand it on, also back, where it is memory of another by now."""
    one, other = pair
    a = rows()
    b = pass_on(one, other, a)
    assert pass_on(other, one, b) is a
    a.close()
    one.send("closed")
    assert other.recv(timeout=SOON) == "closed"
    c = pass_on(other, one, b)
    assert c.numpy()[7, 3] == 31
    assert pass_on(one, other, c) is b
    c.close()
    b.close()


def test_i5_growth_is_followed_at_the_same_address(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    one, other = pair
    with rows(0, capacity=2_000_000) as a:
        first = pass_on(one, other, a)
        assert first.shape == (0, 4)
        views = []
        for count in (1, 8, 100_000, 1_000_000, 2_000_000):
            a.resize(count)
            a[count - 1] = count
            found = pass_on(one, other, a)
            assert found.address == first.address
            assert found.numpy()[count - 1, 0] == count
            views.append(found.numpy()[:1])
            assert pass_on(other, one, found) is a
        assert len({view.__array_interface__["data"][0] for view in views}) == 1
        del views, found
        first.close()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), ()])
def test_empty_and_single_ones_arrive(pair: tuple[ArrayChannel, ArrayChannel], shape: tuple[int, ...]) -> None:
    with vram.zeros(shape, "float32", device="host") as a:
        found = pass_on(*pair, a)
        assert (found.shape, found.dtype) == (shape, a.dtype)
        assert pass_on(pair[1], pair[0], found) is a
        found.close()


def test_s8_read_only_memory_arrives_read_only(pair: tuple[ArrayChannel, ArrayChannel], kept: vram.Keeper) -> None:
    one, other = pair
    with rows() as a:
        before = pass_on(one, other, a)
        assert not before.readonly
        vram.publish("n", {"a": a})
        after = pass_on(one, other, a)
        assert after.readonly
        assert pass_on(other, one, after) is a
        with vram.attach("n") as lease:
            assert pass_on(one, other, lease["a"]).readonly
            assert lease["a"].numpy()[7, 3] == 31
        before.close()
        after.close()


def test_private_memory_cannot_be_sent(pair: tuple[ArrayChannel, ArrayChannel], kept: vram.Keeper) -> None:
    vram.publish("n", {"x": np.arange(3)})
    with vram.attach("n", access="cow") as lease:
        with pytest.raises(UsageError, match="private copy"):
            pair[0].send(lease["x"])
        pair[0].send("and on")
        assert pair[1].recv(timeout=SOON) == "and on"


# -- in parts -------------------------------------------------------------------------------------------------------


def chunked(count: int) -> vram.Array:
    """An array of so many chunks, of which little is ever touched."""
    array = vram.empty((count, GRANULE), "uint8", device="host", chunk=GRANULE)
    array.numpy()[:, 0] = np.arange(count) % 251
    return array


def test_s4_descriptors_go_in_parts_that_are_acknowledged(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    one, other = pair
    received: list[Any] = []
    thread = threading.Thread(target=lambda: received.append(other.recv(timeout=SOON)))
    with chunked(600) as a:
        thread.start()
        with sent() as counts:
            one.send(a, timeout=SOON)
        thread.join(SOON)
        (found,) = received
        assert [count for count in counts if count] == [MAX_FDS, MAX_FDS, 600 - 2 * MAX_FDS]
        assert (found.numpy()[:, 0] == a.numpy()[:, 0]).all()
        found.close()


def test_s4_two_that_send_many_parts_to_each_other_do_not_wait_for_ever(
    pair: tuple[ArrayChannel, ArrayChannel],
) -> None:
    def work(number: int) -> int:
        with chunked(300 + number) as array:
            pair[number].send(array, timeout=SOON)
            theirs = pair[number].recv(timeout=SOON)
            pair[number].send("done", timeout=SOON)
            assert pair[number].recv(timeout=SOON) == "done"
            return int(theirs.numpy()[:, 0].sum())

    assert race(lambda: work(0), lambda: work(1)) == [int((np.arange(300 + n) % 251).sum()) for n in (1, 0)]


def test_s4_a_peer_that_does_not_read_costs_one_part(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    one, other = pair
    with chunked(600) as a:
        with sent() as counts:
            for _ in range(2):
                started = time.monotonic()
                with pytest.raises(WaitTimeoutError):
                    one.send(a, timeout=0.1)
                assert time.monotonic() - started < AT_ONCE
            with pytest.raises(WaitTimeoutError):
                one.send(a, timeout=0)
        assert sum(counts) == MAX_FDS
        # It reads after all: the rest follows from where it stopped.
        received: list[Any] = []
        thread = threading.Thread(target=lambda: received.append(other.recv(timeout=SOON)))
        thread.start()
        one.send(a, timeout=SOON)
        thread.join(SOON)
        assert (received[0].numpy()[:, 0] == a.numpy()[:, 0]).all()
        received.pop().close()


def test_what_arrives_while_sending_is_not_lost(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    """A sender that waits for an answer takes messages off the socket; they are for whoever receives next."""
    one, other = pair
    a = rows()
    b = pass_on(other, one, a)
    a.close()
    other.send("first")
    one.send(b)
    assert (other.recv(timeout=SOON).numpy() == b.numpy()).all()
    other.send("second")
    with chunked(300) as c:
        thread = threading.Thread(target=lambda: other.send(other.recv(timeout=SOON).shape[0]))
        thread.start()
        one.send(c, timeout=SOON)
        thread.join(SOON)
    assert [one.recv(timeout=SOON) for _ in range(3)] == ["first", "second", 300]
    b.close()


# -- the end --------------------------------------------------------------------------------------------------------


def test_i3_an_array_that_is_collected_while_sending_is_forgotten_too(
    pair: tuple[ArrayChannel, ArrayChannel],
) -> None:
    """A finalizer in the middle of send() only leaves a note; the note is delivered, also when send() fails."""
    one, other = pair
    before = mappings()
    loop: list[Any] = [rows()]
    loop.append(loop)
    pass_on(one, other, loop[0])

    class Unsendable:
        def __reduce__(self) -> Any:
            raise AssertionError

    really = one._channel.send

    def send(*arguments: Any, **options: Any) -> None:
        gc.collect()
        really(*arguments, **options)

    del loop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "send", lambda self, *rest, **options: (gc.collect(), really(*rest, **options))[1])
        one.send("next")
    with pytest.raises(UsageError, match="plain values"):
        one.send(Unsendable())
    other.recv(timeout=SOON)
    with pytest.raises(WaitTimeoutError):
        other.recv(timeout=0.05)
    assert mappings() == before


def test_i6_what_is_alive_outlives_the_channel() -> None:
    one, other = ArrayChannel.pair()
    with rows() as a:
        found = pass_on(one, other, a)
        part = found[2:3]
        one.close()
        with pytest.raises(PeerGoneError):
            other.recv(timeout=SOON)
        other.close()
        other.close()
        assert repr(other) == "<ArrayChannel, closed>"
        for use in (lambda: other.send(1), other.recv, other.fileno):
            with pytest.raises(ClosedError):
                use()
        assert found.numpy()[7, 3] == 31
        found.close()
        assert part.numpy()[0, 0] == 8
        part.close()


def test_i2_a_strict_close_refuses_only_for_others(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    one, other = pair
    one.close(strict=True)
    assert one.is_closed
    claim = other._channel.handle.claim("somebody else")
    with pytest.raises(BusyError, match="somebody else"):
        other.close(strict=True)
    assert not other.is_closed
    claim.release()


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_i2_a_channel_that_is_dropped_leaves_nothing_and_is_named(in_a_cycle: bool) -> None:
    one, other = ArrayChannel.pair()
    labels = {
        f"channel on fd {end.fileno()} was not closed; use it in a with block or call close()" for end in (one, other)
    }
    with rows() as a:
        pass_on(one, other, a).close()
        if in_a_cycle:
            cycle: list[object] = [one, other]
            cycle.append(cycle)
            del cycle
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            del one, other
            gc.collect()
    assert {str(one.message) for one in caught} == labels
    assert [one.category for one in caught] == [LeakWarning, LeakWarning]


@pytest.mark.parametrize(
    "left_open",
    [
        "ends = vram.ArrayChannel.pair()",
        "ends = vram.ArrayChannel.pair(); cycle = [ends]; cycle.append(cycle)",
        "vram.publish('x', {'a': vram.zeros(4, 'uint8', device='host')}); lease = vram.attach('x')",
    ],
)
def test_i8_what_is_open_when_the_process_ends_is_left_to_the_kernel_without_a_word(
    kept: object, left_open: str
) -> None:
    """Not with a warning of Python's own about a socket that nobody here has made."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", f"import vram; {left_open}"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_i7_a_forked_child_cannot_use_it(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    one, other = pair
    with rows() as a:
        found = pass_on(one, other, a)
        views = [found.numpy()]

        def work() -> int:
            count = refused(lambda: one.send(1), lambda: one.recv(timeout=1), lambda: one.send(a))
            one.close()
            other.close()
            return count * int(views[0][7, 3] == 31)

        assert end_of(work) == 3
        assert pass_on(other, one, found) is a
        found.close()
        views.clear()


def test_what_cannot_be_said_is_refused_and_nothing_is_sent(pair: tuple[ArrayChannel, ArrayChannel]) -> None:
    one, other = pair
    for value in (object(), iter({1, 2}), 2**70, "\ud800", b"x" * 70_000, [object()], {"a": rows}):
        with pytest.raises(UsageError):
            one.send(value)
        one.send("and on")
        assert other.recv(timeout=SOON) == "and on"


# -- hostile peers --------------------------------------------------------------------------------------------------

encode = msgspec.msgpack.encode
HOST = ["host", [[GRANULE, 1]], 0, GRANULE, GRANULE]


def part(memory: int = 1, first: int = 0, last: object = True, writable: object = True, **spoilt: object) -> list[Any]:
    device, segments, offset, nbytes, capacity = (
        spoilt.get(name, value)
        for name, value in zip(("device", "segments", "offset", "nbytes", "capacity"), HOST, strict=True)
    )
    return ["m", [memory, first, last, writable, [device, segments, offset, nbytes, capacity]]]


def shared(
    memory: int = 1, segments: int = 1, offset: object = 0, dtype: object = "int64", shape: object = (4,)
) -> Any:
    return ["v", [memory, segments, offset, dtype, shape]]


GARBAGE: list[bytes] = [
    b"\xc1",
    b"\x00",
    b"x" * 60_000,
    encode(None),
    encode(["m"]),
    encode(["q", 1]),
    encode({"m": 1}),
    encode(["v", [1]]),
    encode(["v", [-1, 0, 0, "int64", [1]]]),
    encode(["v", [1, 5000, 0, "int64", [1]]]),
    encode(["f", ["x"]]),
    encode(["f", [1] * 5000]),
    b"\x92\xa1x" + b"\x91" * 50_000 + b"\xc0",
]
LIES: list[tuple[list[Any], list[tuple[int, int]]]] = [
    # a message, and the (size, seals) of the memfds that go with it
    (part(), []),
    (part(), [(GRANULE, WRITABLE)] * 2),
    (part(), [(GRANULE, 0)]),
    (part(), [(GRANULE // 2, WRITABLE)]),
    (part(segments=[[2 * GRANULE, 1]], nbytes=2 * GRANULE, capacity=2 * GRANULE), [(GRANULE, WRITABLE)]),
    (part(segments=[[4096, 1]], nbytes=4096), [(GRANULE, WRITABLE)]),
    (part(segments=[[GRANULE, 8]]), [(GRANULE, WRITABLE)]),
    (part(segments=[[0, 1]], nbytes=0), [(GRANULE, WRITABLE)]),
    (part(nbytes=2 * GRANULE), [(GRANULE, WRITABLE)]),
    (part(offset=GRANULE), [(GRANULE, WRITABLE)]),
    (part(capacity=GRANULE - 1), [(GRANULE, WRITABLE)]),
    (part(capacity=2**60), [(GRANULE, WRITABLE)]),
    (part(first=1), [(GRANULE, WRITABLE)]),
    (part(device="cuda:0"), [(GRANULE, WRITABLE)]),
    (part(device="0"), [(GRANULE, WRITABLE)]),
    (part(device="GPU-x"), [(GRANULE, WRITABLE)]),
    (shared(), []),
    (shared(memory=2**60), []),
    (["r", [1, 0, 0, "int64", [1]]], []),
    (["r", [2**62, 0, 0, "int64", [1]]], []),
]


def tell(sock: socket.socket, message: bytes, fds: list[int]) -> None:
    socket.send_fds(sock, [message], fds)
    for fd in fds:
        os.close(fd)


def test_s7_garbage_is_refused(hostile: tuple[socket.socket, ArrayChannel]) -> None:
    sock, channel = hostile
    for garbage in GARBAGE:
        print(garbage[:20])  # shown where it fails
        tell(sock, garbage, [make_memfd(), make_memfd()])
        with pytest.raises(ProtocolError):
            channel.recv(timeout=SOON)
        sock.send(encode(["x", "and on"]))
        assert channel.recv(timeout=SOON) == "and on"


def test_s7_lies_are_refused(hostile: tuple[socket.socket, ArrayChannel]) -> None:
    sock, channel = hostile
    before = mappings()
    for message, memfds in LIES:
        print(message, memfds)
        tell(sock, encode(message), [make_memfd(size, seals=seals) for size, seals in memfds])
        with pytest.raises((ProtocolError, ClosedError)):
            channel.recv(timeout=SOON)
        assert mappings() == before
        sock.send(encode(["x", "and on"]))
        assert channel.recv(timeout=SOON) == "and on"


def test_s7_memory_that_is_not_as_it_was_said_to_be_is_refused(hostile: tuple[socket.socket, ArrayChannel]) -> None:
    sock, channel = hostile
    tell(sock, encode(part()), [make_memfd(GRANULE, seals=READ_ONLY)])
    with pytest.raises(VramError):  # said to be writable, and is not
        channel.recv(timeout=SOON)


FALSE_REFERENCES = [
    shared(shape=(GRANULE,)),
    shared(offset=GRANULE),
    shared(offset=2**62),
    shared(segments=2),
    shared(dtype="float33"),
    shared(dtype="O"),
    shared(dtype="S99999999"),
    shared(shape=(2**62, 2**62)),
    shared(shape=(1,) * 50),
    shared(memory=2),
]


def test_s7_references_that_lie_are_refused() -> None:
    for reference in FALSE_REFERENCES:
        print(reference)
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one as sock, ArrayChannel(Channel(other)) as channel, rows() as a:
            tell(sock, encode(part()), [make_memfd(GRANULE, seals=WRITABLE)])
            tell(sock, encode(reference), [])
            with pytest.raises(ProtocolError):
                channel.recv(timeout=SOON)
            tell(sock, encode(shared()), [])
            assert channel.recv(timeout=SOON).shape == (4,)
            # The same of memory that is ours and is said to come back.
            channel.send(a)
            tell(sock, encode(["r", reference[1]]), [])
            if reference[1][1] == 2:
                assert channel.recv(timeout=SOON).shape == (4,)  # how many segments there are is known at home
            else:
                with pytest.raises((ProtocolError, ClosedError)):
                    channel.recv(timeout=SOON)
    gc.collect()


def test_s7_the_same_memory_described_twice_is_mapped_once(hostile: tuple[socket.socket, ArrayChannel]) -> None:
    sock, channel = hostile
    before = mappings()
    for _ in range(2):
        tell(sock, encode(part()), [make_memfd(GRANULE, seals=WRITABLE)])
        tell(sock, encode(["x", 1]), [])
        assert channel.recv(timeout=SOON) == 1
        assert channel._talk.imports.regions.keys() == {1}
    tell(sock, encode(["f", [1]]), [])
    tell(sock, encode(["x", 2]), [])
    assert channel.recv(timeout=SOON) == 2
    assert mappings() == before


def test_s4_an_acknowledgement_of_no_part_is_refused(hostile: tuple[socket.socket, ArrayChannel]) -> None:
    """A part may be acknowledged before it is counted, so one comes too early, and no more."""
    sock, channel = hostile
    for number in range(3):
        tell(sock, encode(["g"]), [])
        tell(sock, encode(["x", number]), [])
    assert channel.recv(timeout=SOON) == 0
    for number in (1, 2):
        with pytest.raises(ProtocolError, match="2 parts were acknowledged, and 0 were sent"):
            channel.recv(timeout=SOON)
        assert channel.recv(timeout=SOON) == number


def test_s7_random_messages_cost_nothing_but_themselves(hostile: tuple[socket.socket, ArrayChannel]) -> None:
    """Well-formed messages with single items spoilt, with the wrong descriptors, in any order."""
    sock, channel = hostile
    chance = random.Random(20_252)
    before = mappings()
    numbers = [0, 1, 2, 3, -1, 253, 1024, GRANULE, 2**47, 2**62, 2**63, None, "host", [], True, 0.5]
    arrived = 0
    with rows() as a:
        channel.send(a)
        for number in range(2500):
            message: list[Any] = chance.choice(
                [part(memory=number % 5), part(chance.randrange(5), 1, False), shared(chance.randrange(5)),
                 ["r", [1, 0, 0, "int64", [4]]], ["f", [chance.randrange(5)]], ["g"], ["x", number]]
            )  # fmt: skip
            if chance.random() < 0.6:
                holder: Any = message
                while isinstance(holder[-1], list) and holder[-1] and chance.random() < 0.8:
                    holder = chance.choice([item for item in holder if isinstance(item, list) and item])
                holder[chance.randrange(len(holder))] = chance.choice(numbers)
            kinds = [WRITABLE, WRITABLE, WRITABLE, READ_ONLY, 0]
            # What has none is refused with some.
            counts = [0, 0, 1, 1, 1, 2] if message[0] == "m" else [0, 0, 0, 1]
            fds = [make_memfd(GRANULE, seals=chance.choice(kinds)) for _ in range(chance.choice(counts))]
            tell(sock, encode(message), fds)
            try:
                while True:
                    found = channel.recv(timeout=0)
                    arrived += 1
                    if isinstance(found, vram.Array):
                        assert found.numpy().size >= 0
                    del found
            except WaitTimeoutError:
                pass
            except (ProtocolError, ClosedError, AccessDeniedError):
                pass
            sock.setblocking(False)
            try:
                while True:
                    sock.recv(100_000)
            except BlockingIOError:
                sock.setblocking(True)
    assert arrived > 300
    channel.close()
    assert mappings() == before
