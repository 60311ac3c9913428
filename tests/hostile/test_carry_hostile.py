"""Carriers and readers that lie, stall, repeat and make things up: typed errors in time, nothing half-published."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.carried import Nodes, model, nodes, same, write_key
from tests.support.carriers import DATA, honest, lying, properly, sock_address
from tests.support.deadlines import SOON, until
from tests.support.samples import some

import vram
from vram.errors import (
    AccessDeniedError,
    OutOfMemoryError,
    PeerError,
    PeerGoneError,
    ProtocolError,
    QuotaError,
    UsageError,
    VramError,
)
from vram.nodes import carrier as carriers
from vram.nodes import messages as m
from vram.nodes import server as servers
from vram.nodes.carrier import Carrier
from vram.nodes.connection import Connection, connect
from vram.nodes.digests import digest

READER = b"r" * 16
PIECE = m.PIECE


@pytest.fixture
def two() -> Iterator[Nodes]:
    with nodes() as found:
        yield found


def nothing_is_here(two: Nodes) -> bool:
    return vram.list_entries(keeper=two.here) == []


# -- carriers that lie ------------------------------------------------------------------------------------------------


def test_the_liar_can_tell_the_truth(two: Nodes) -> None:
    with lying(properly) as address:
        vram.replicate(address, "model", keeper=two.here)
    with vram.attach("model", keeper=two.here) as lease:
        assert not lease["w"].numpy().any()


PLACE = m.ArrayPlace
LAYOUTS: dict[str, dict[str, Any]] = {
    "extents that overlap": {"extents": ((0, 2000), (1000, 2000))},
    "an extent past the end": {"extents": ((0, 3001),)},
    "an empty extent": {"extents": ((0, 0), (0, 3000))},
    "more pieces than are read": {"nbytes": 2**46, "extents": ((0, 2**46),)},
    "an array past the end": {"arrays": {"w": PLACE(1, 3000, "uint8", (3000,))}},
    "an array of another size": {"arrays": {"w": PLACE(0, 3000, "uint8", (3001,))}},
    "a shape past all numbers": {"arrays": {"w": PLACE(0, 3000, "uint8", (2**47,) * 64)}},
    "no such type": {"arrays": {"w": PLACE(0, 3000, "object", (3000,))}},
    "an array without a name": {"arrays": {"": PLACE(0, 3000, "uint8", (3000,))}},
    "a name past all bounds": {"arrays": {"w" * 2000: PLACE(0, 3000, "uint8", (3000,))}},
    "another entry": {"name": "other"},
    "more than an entry may say": {"meta": {"k": "x" * 10_000}},
}


@pytest.mark.parametrize("lie", some([*LAYOUTS], 3))
def test_a_layout_that_cannot_be_is_refused(two: Nodes, lie: str) -> None:
    asked: list[object] = []

    def answers(request: Any, connection: Connection) -> object:
        asked.append(type(request))
        return properly(request, connection, honest(**LAYOUTS[lie]))

    with lying(answers) as address:
        with pytest.raises(ProtocolError):
            vram.replicate(address, "model", timeout=5.0, keeper=two.here)
    assert asked == [m.Open]
    assert nothing_is_here(two)


def test_more_than_there_is_room_for_is_refused_before_anything_is_transferred(two: Nodes) -> None:
    asked: list[object] = []

    def answers(request: Any, connection: Connection) -> object:
        asked.append(request)
        return properly(request, connection, honest(2**43))

    with lying(answers) as address:
        with pytest.raises((OutOfMemoryError, QuotaError)):
            vram.replicate(address, "model", keeper=two.here)
    assert [type(one) for one in asked] == [m.Open]
    assert nothing_is_here(two)


ANSWERS: dict[str, Callable[[Any, Connection], object]] = {
    "a digest that nothing has": lambda request, _: m.Assigned(0, b"x" * 16) if isinstance(request, m.Next) else None,
    "a piece that is not there": lambda request, _: m.Assigned(7, b"x" * 16) if isinstance(request, m.Next) else None,
    "nothing to get": lambda request, _: m.Finished() if isinstance(request, m.Next) else None,
    "another piece": lambda request, _: m.PieceHead(1, 3000) if isinstance(request, m.Fetch) else None,
    "a delta that nobody asked for": lambda request, _: (
        m.PieceHead(0, 3000, 9) if isinstance(request, m.Fetch) else None
    ),
    "a piece of another size": lambda request, _: m.PieceHead(0, 2999) if isinstance(request, m.Fetch) else None,
    "an answer to nothing": lambda request, _: m.Newest(1) if isinstance(request, m.Fetch) else None,
    "an answer to something else": lambda request, _: m.DigestList(()) if isinstance(request, m.Next) else None,
}


@pytest.mark.parametrize("lie", some([*ANSWERS], 2))
def test_what_it_says_later_is_not_believed_either(two: Nodes, lie: str) -> None:
    with lying(lambda request, connection: ANSWERS[lie](request, connection) or properly(request, connection)) as at:
        with pytest.raises(ProtocolError):
            vram.replicate(at, "model", timeout=5.0, keeper=two.here)
    assert nothing_is_here(two)


@pytest.mark.parametrize("kind", some(["asleep", "busy", "quota", "made up"], 1))
def test_a_reader_that_refuses_what_it_was_to_give_on_is_left_alone(two: Nodes, tmp_path: Path, kind: str) -> None:
    secret = b"k" * 32
    key = write_key(tmp_path / "key", secret)

    def refuses(request: Any, connection: Connection) -> object:
        return m.Finished() if isinstance(request, m.Open) else m.Refused(kind, "not for you")

    with lying(refuses, secret) as peer:

        def sends(request: Any, connection: Connection) -> object:
            if isinstance(request, m.Next) and request.arrived is None:
                return m.Assigned(0, digest(DATA), peer)
            return properly(request, connection)

        with lying(sends, secret) as address:
            assert vram.replicate(address, "model", key=key, keeper=two.here).from_peers == 0


def test_what_one_connection_has_checked_no_other_one_writes_to(two: Nodes) -> None:
    """The carrier has two connections get the same piece, and the slower one brings other bytes."""
    nbytes = PIECE + 1000
    whole = m.Opened(
        "model", 1, 0, b"i" * 16, nbytes, ((0, nbytes),), {"w": m.ArrayPlace(0, nbytes, "uint8", (nbytes,))}, {},
        {"tcp": b""},
    )  # fmt: skip
    parts = [bytes(PIECE), bytes(1000)]
    came: dict[Connection, list[int]] = {}
    right = threading.Event()

    def answers(request: Any, connection: Connection) -> object:
        if isinstance(request, m.Open):
            return whole
        mine = came.setdefault(connection, [])
        is_first = connection is next(iter(came))
        if isinstance(request, m.Next):
            if request.arrived and mine[-1] == 1:
                right.set()
            left = [number for number in (1, 0) if number not in mine]
            mine += left[:1]  # the connection that lied is not asked for the piece again
            return m.Assigned(left[0], digest(parts[left[0]])) if left else m.Finished()
        connection.send(m.PieceHead(request.number, len(parts[request.number])), SOON)
        data = parts[request.number]
        if is_first and request.number == 1:
            right.wait(1.5)  # which comes sooner where nobody waits for this one
            data = b"x" * 1000
        connection.send_bytes(memoryview(data), SOON)
        return None

    with lying(answers) as address:
        vram.replicate(address, "model", streams=2, share=False, keeper=two.here)
    with vram.attach("model", keeper=two.here) as lease:
        assert not lease["w"].numpy().any()


def test_refusals_are_typed_and_say_no_more_than_a_line(two: Nodes) -> None:
    with lying(lambda request, connection: m.Refused("made up", "a\nb\x1b[31m")) as address:
        with pytest.raises(PeerError) as caught:
            vram.replicate(address, "model", keeper=two.here)
    assert type(caught.value) is PeerError
    assert str(caught.value).isprintable()


# -- who is let in ----------------------------------------------------------------------------------------------------
def test_a_carrier_that_does_not_have_the_key_is_not_believed(two: Nodes, tmp_path: Path) -> None:
    key = write_key(tmp_path / "key")

    def accept_anybody(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        connection = Connection(sock)
        connection.hear(m.Hello, SOON)
        connection.request(m.Challenge(b"n" * 32), m.Proof, SOON)
        connection.send(m.Proof(b"m" * 32), SOON)
        with contextlib.suppress(VramError):
            connection.receive(SOON)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept_anybody, args=(listener,))
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(AccessDeniedError, match="does not have the key"):
            vram.replicate(address, "model", key=key, keeper=two.here)
        thread.join(SOON)
        assert not thread.is_alive()


def test_s9_another_protocol_is_refused_with_both_numbers(two: Nodes) -> None:
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        sock = socket.create_connection(("127.0.0.1", int(carrier.address.rpartition(":")[2])), SOON)
        connection = Connection(sock)
        connection.send(m.Hello(7, b"n" * 32), SOON)
        said = connection.receive(SOON)
        assert isinstance(said, m.Refused)
        assert said.message.startswith(f"protocol {m.PROTOCOL} is spoken here, and 7 by you")
        connection.close()


@pytest.fixture
def kept(two: Nodes, tmp_path: Path) -> Iterator[tuple[Carrier, bytes]]:
    """A carrier of a small model, and its key."""
    key = write_key(tmp_path / "key")
    vram.publish("model", model(1000), keeper=two.origin)
    with Carrier("127.0.0.1:0", key=key, keeper=two.origin) as carrier:
        yield carrier, key.read_bytes()


def framed(data: bytes) -> bytes:
    """Return the bytes that some data is sent as."""
    return struct.pack("<I", len(data)) + data


def test_nothing_long_is_read_from_strangers(kept: tuple[Carrier, bytes]) -> None:
    carrier, _ = kept
    with socket.create_connection(sock_address(carrier), SOON) as stranger:
        stranger.sendall(struct.pack("<I", m.MAX_GREETING + 1))
        stranger.settimeout(SOON)
        said = b""
        while block := stranger.recv(1000):  # it says why, and hangs up without waiting for the rest
            said += block
        assert b"at most 512 are read" in said


def test_strangers_that_say_nothing_keep_nobody_out(
    two: Nodes, kept: tuple[Carrier, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_GREETING", 0.5)
    carrier, _ = kept
    with contextlib.ExitStack() as stage:
        for _ in range(80):
            stage.enter_context(socket.create_connection(sock_address(carrier), SOON))
        vram.replicate(carrier.address, "model", key=tmp_path / "key", keeper=two.here)


def test_a_reader_that_reads_nothing_is_let_go(kept: tuple[Carrier, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "PATIENCE", 0.3)
    carrier, key = kept
    vram.publish("large", {"w": np.zeros(PIECE, np.uint8)}, keeper=carrier._keeper)
    connection = connect(carrier.address, key, SOON)
    connection.request(m.Open("large", 0, 0, READER), m.Opened, SOON)
    for _ in range(4):
        connection.send(m.Fetch(0), SOON)
    until(lambda: not carrier._server._threads, what="the end of its thread")
    connection.close()


# -- messages that nobody says ----------------------------------------------------------------------------------------
REQUESTS = [
    m.Open("model", 0, 0, READER),
    m.Open("model", 1, 0, READER, b"l" * 16, "127.0.0.1:7", b"\xff" * 4),
    m.Next(True),
    m.Fetch(0),
    m.Digests(0),
    m.Ask("tcp", b"x"),
    m.Watch("model", 1, 0, 0.0),
]


def mutated(order: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(order.randint(0, 3)):
        what = order.randrange(4)
        at = order.randrange(len(data)) if data else 0
        if what == 0 and data:
            data[at] = order.randrange(256)
        elif what == 1 and data:
            data[at] ^= 1 << order.randrange(8)
        elif what == 2:
            del data[at : at + order.randint(1, 8)]
        else:
            data[at:at] = order.randbytes(order.randint(1, 8))
    return bytes(data)


def mutate_for(carrier: Carrier, key: bytes, count: int, seed: int) -> int:
    """Say so many mutated messages, as a reader that was let in; return how many were answered."""
    order = random.Random(seed)
    connection: Connection | None = None
    answered = 0
    for _ in range(count):
        if connection is None:
            connection = connect(carrier.address, key, SOON)
            if order.random() < 0.7:
                connection.request(REQUESTS[0], m.Opened, SOON)
        raw = mutated(order, m.encode(order.choice(REQUESTS)))
        connection.send_bytes(memoryview(framed(raw)), SOON)
        try:
            reply = connection.receive(SOON)
            answered += 1
            if isinstance(reply, m.PieceHead):
                connection._fill(memoryview(bytearray(reply.nbytes)), time.monotonic() + SOON)
            if isinstance(reply, m.Refused) and reply.kind == "protocol":
                raise PeerGoneError("it hangs up")
        except PeerGoneError:
            connection.close()
            connection = None
    if connection is not None:
        connection.close()
    return answered


def test_mutated_messages_end_at_most_their_own_connection(
    two: Nodes, kept: tuple[Carrier, bytes], tmp_path: Path
) -> None:
    carrier, key = kept
    assert mutate_for(carrier, key, 1500, 7) > 300
    vram.replicate(carrier.address, "model", key=tmp_path / "key", keeper=two.here)
    with vram.attach("model", keeper=two.here) as lease:
        assert same(lease, model(1000))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))  # each far below what is taken for a hang
def test_a_million_mutated_messages(two: Nodes, kept: tuple[Carrier, bytes], tmp_path: Path, part: int) -> None:
    carrier, key = kept
    mutate_for(carrier, key, 50_000, random.randrange(2**32))
    vram.replicate(carrier.address, "model", key=tmp_path / "key", keeper=two.here)


def test_random_bytes_from_strangers_do_nothing(kept: tuple[Carrier, bytes]) -> None:
    carrier, key = kept
    order = random.Random(3)
    hello = m.encode(m.Hello(m.PROTOCOL, b"n" * 32))
    for _ in range(300):
        raw = mutated(order, hello) if order.random() < 0.7 else order.randbytes(order.randrange(600))
        frame = framed(raw)
        with socket.create_connection(sock_address(carrier), SOON) as stranger:
            stranger.sendall(frame if order.random() < 0.8 else order.randbytes(len(frame)))
    with contextlib.closing(connect(carrier.address, key, SOON)) as connection:
        connection.request(m.Open("model", 0, 0, READER), m.Opened, SOON)


def test_names_and_numbers_that_cannot_be(two: Nodes) -> None:
    for given in ({"name": "../x"}, {"streams": 0}, {"streams": True}, {"version": 0}, {"share": 1}, {"timeout": -1}):
        asked: dict[str, Any] = {"name": "model", **given}
        with pytest.raises(UsageError):
            vram.replicate("127.0.0.1:1", asked.pop("name"), keeper=two.here, **asked)
