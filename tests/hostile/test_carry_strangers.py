"""Strangers at carriers and readers: who can keep others out, and who is believed."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.carried import Nodes, model, nodes, write_key
from tests.support.carriers import honest, lying, properly, sock_address
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import serving
from tests.support.other_users import OTHER, needs_root
from tests.support.samples import some

import vram
from vram.collectives.routes import read_routes
from vram.errors import AccessDeniedError, PeerGoneError, ProtocolError, UsageError
from vram.keeper.client import close_client
from vram.keeper.private import short_directory
from vram.keeper.server import KeeperServer
from vram.nodes import carrier as carriers
from vram.nodes import messages as m
from vram.nodes import server as servers
from vram.nodes.address import parse_address, read_key
from vram.nodes.carrier import Carrier
from vram.nodes.connection import Connection, connect
from vram.nodes.digests import digest
from vram.nodes.follow import follow
from vram.nodes.nixl import Nixl
from vram.nodes.stock import Stock
from vram.nodes.swarm import SENDS

PIECE = m.PIECE


@pytest.fixture
def two() -> Iterator[Nodes]:
    with nodes() as found:
        yield found


def reader(carrier: Carrier, key: bytes = b"", name: str = "model", serves: str = "") -> Connection:
    """Return a connection that has opened an entry, and says that it has all of it."""
    made = connect(carrier.address, key, SOON)
    made.ask(m.Open(name, 0, secrets.token_bytes(16), b"", serves, b"\xff" * 8), SOON)
    return made


# -- who keeps others out ---------------------------------------------------------------------------------------------
def test_who_has_the_key_is_let_in_whatever_strangers_keep_open(two: Nodes, tmp_path: Path) -> None:
    """Whoever came while 64 strangers said nothing was hung up on: 1 of 148 who had the key got in."""
    key = write_key(tmp_path / "key")
    with Carrier("127.0.0.1:0", key=key, keeper=two.origin) as carrier, contextlib.ExitStack() as stage:
        for _ in range(2 * servers._STRANGERS):
            stage.enter_context(socket.create_connection(sock_address(carrier), SOON))
        until(lambda: len(carrier._server._threads) >= servers._STRANGERS, what="strangers")
        began = time.monotonic()
        connect(carrier.address, key.read_bytes(), SOON).close()
        assert time.monotonic() - began < servers._GREETING / 2
        until(lambda: len(carrier._server._threads) <= servers._STRANGERS, what="the end of the others")


def test_one_connection_keeps_one_of_the_sends_of_the_source(two: Nodes, tmp_path: Path) -> None:
    """One that asked for eight pieces and got none had all others wait for 5 s for each of theirs."""
    key = write_key(tmp_path / "key")
    vram.publish("model", {"w": np.zeros((SENDS + 2) * PIECE, np.uint8)}, keeper=two.origin)
    with Carrier("127.0.0.1:0", key=key, keeper=two.origin) as carrier:
        greedy, other = (connect(carrier.address, key.read_bytes(), SOON) for _ in range(2))
        with greedy, other:
            for one in (greedy, other):
                one.ask(m.Open("model", 0, secrets.token_bytes(16)), SOON)
            for _ in range(SENDS):
                assert isinstance(greedy.ask(m.Next(), SOON), m.Assigned)
            given = other.ask(m.Next(), SOON)
            assert isinstance(given, m.Assigned)
            assert not given.peer


def test_without_a_key_no_reader_keeps_another_one_waiting(two: Nodes) -> None:
    vram.publish("model", {"w": np.zeros(SENDS * PIECE + 1, np.uint8)}, keeper=two.origin)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier, contextlib.ExitStack() as stage:
        for _ in range(SENDS + 1):
            one = stage.enter_context(connect(carrier.address, b"", SOON))
            one.ask(m.Open("model", 0, secrets.token_bytes(16)), SOON)
            assert isinstance(one.ask(m.Next(), SOON), m.Assigned)


def test_an_update_that_never_ends_keeps_nobody_from_other_entries(two: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opened another entry waited 10 s for each question for one that is being updated."""
    vram.publish("busy", {"w": np.zeros(10, np.uint8)}, updatable=True, keeper=two.origin)
    vram.publish("model", model(1000), keeper=two.origin)
    waits = threading.Event()
    stock = carriers.Stock

    def told(lease: Any, digests: Any) -> Any:
        if lease.name == "busy":
            waits.set()
        return stock(lease, digests)

    monkeypatch.setattr(carriers, "Stock", told)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        with vram.update("busy", keeper=two.origin), connect(carrier.address, b"", SOON) as stuck:
            stuck.send(m.Open("busy", 0, secrets.token_bytes(16)), SOON)
            assert waits.wait(SOON)
            began = time.monotonic()
            reader(carrier).close()
            assert time.monotonic() - began < 5
        until(lambda: not carrier._building, what="the end of what was got ready")


def test_a_reader_has_no_long_messages_read(two: Nodes, tmp_path: Path) -> None:
    """40 connections, each with half a message of 16 MiB, had a carrier take 640 MiB."""
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier, connect(carrier.address, b"", SOON) as one:
        one.send_bytes(memoryview((m.MAX_REQUEST + 1).to_bytes(4, "little") + bytes(16)), SOON)
        with pytest.raises(PeerGoneError):
            one.receive(2.0)


def test_what_lies_far_apart_is_laid_out_array_by_array() -> None:
    """Each array was looked for among all extents: 65,536 of a stranger's took minutes."""
    region, count = object(), 20_000
    arrays: dict[str, Any] = {
        f"a{at}": SimpleNamespace(region=region, offset=at * (3 << 20), nbytes=8, dtype=np.dtype("f8"), shape=())
        for at in range(count)
    }
    stock = Stock.__new__(Stock)
    began = time.process_time()
    stock._lay_out(arrays)
    assert time.process_time() - began < 5
    assert [place.offset for place in stock.arrays.values()] == [4096 * number for number in range(count)]


# -- who is believed --------------------------------------------------------------------------------------------------
SERVES = ["127.0.0.1:9", "a..b:1", "x" * 70 + ":1", "localhost:1", "192.0.2.1:7", "no address"]


@pytest.mark.slow
@pytest.mark.parametrize("serves", SERVES)
def test_without_a_key_nobody_is_sent_to_another_reader(two: Nodes, serves: str) -> None:
    """A reader that says where it gives on what it has, and gives nothing: for all others the transfer failed."""
    vram.publish("model", model(1000), keeper=two.origin)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        with reader(carrier, serves=serves), connect(carrier.address, b"", SOON) as other:
            other.ask(m.Open("model", 0, secrets.token_bytes(16)), SOON)
            given = other.ask(m.Next(), SOON)
            assert isinstance(given, m.Assigned)
            assert not given.peer
            assert vram.replicate(carrier.address, "model", keeper=two.here).from_peers == 0


@pytest.mark.parametrize("serves", some(["127.0.0.1:9", *SERVES[1:]], 2))
def test_a_reader_is_asked_at_its_own_host_alone(two: Nodes, tmp_path: Path, serves: str) -> None:
    key = write_key(tmp_path / "key")
    vram.publish("model", model(1000), keeper=two.origin)
    with Carrier("127.0.0.1:0", key=key, keeper=two.origin) as carrier:
        with reader(carrier, key.read_bytes(), serves=serves), connect(carrier.address, key.read_bytes(), SOON) as one:
            one.ask(m.Open("model", 0, secrets.token_bytes(16)), SOON)
            given = one.ask(m.Next(), SOON)
            assert isinstance(given, m.Assigned)
            assert given.peer == (serves if serves == SERVES[0] else "")


@pytest.mark.parametrize("peer", ["a..b:1", "x" * 70 + ":1", "localhost:1"])
def test_a_carrier_has_no_reader_look_for_names(
    two: Nodes, tmp_path: Path, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = write_key(tmp_path / "key")
    asked: list[object] = []
    look = socket.getaddrinfo

    def noted(host: Any, *rest: Any, **more: Any) -> Any:
        asked.append(host)
        return look(host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", noted)

    def answers(request: Any, connection: Connection) -> object:
        if isinstance(request, m.Next) and not request.got and not request.failed:
            return m.Assigned(0, digest(bytes(3000)), peer)
        return properly(request, connection)

    with lying(answers, key.read_bytes()) as address:
        vram.replicate(address, "model", key=key, keeper=two.here)
    assert set(asked) == {"127.0.0.1"}


def test_a_reader_keeps_few_connections_to_others(two: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept one to each that it was ever sent to: a fleet of some 500 took all of its descriptors."""
    from vram.nodes import pull

    monkeypatch.setattr(pull, "_PEERS", 2)
    key = write_key(tmp_path / "key")
    count, connected = 6, set[Connection]()
    most = 0

    def gives(request: Any, connection: Connection) -> object:
        nonlocal most
        if isinstance(request, m.Open):
            connected.add(connection)
            return m.Finished()
        most = max(most, sum(one.fileno() >= 0 and not one.is_over() for one in connected))
        connection.send(m.PieceHead(request.number, 10), SOON)
        connection.send_bytes(memoryview(bytes(10)), SOON)
        return None

    with contextlib.ExitStack() as stage:
        peers = [stage.enter_context(lying(gives, key.read_bytes())) for _ in range(count)]
        extents = tuple((4096 * number, 10) for number in range(count))
        opened = honest(4096 * count, extents=extents)
        left = list(range(count))

        def answers(request: Any, connection: Connection) -> object:
            if isinstance(request, m.Open):
                return opened
            if not left:
                return m.Finished()
            number = left.pop()
            return m.Assigned(number, digest(bytes(10)), peers[number])

        address = stage.enter_context(lying(answers, key.read_bytes()))
        done = vram.replicate(address, "model", key=key, streams=1, keeper=two.here)
        assert done.from_peers == 10 * count
        assert most <= 3
        for one in connected:
            one.close()


@needs_root
def test_what_another_user_says_is_a_replica_is_not_believed(two: Nodes) -> None:
    """Another user published the name, with the origin in its meta: its bytes were taken for the carrier's."""
    vram.publish("model", {"w": np.ones(10, np.uint8)}, keeper=two.origin)
    with short_directory() as place:
        os.chmod(place, 0o755)
        path = f"{place}/k"
        with serving(KeeperServer(path, mode=0o666)), Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
            os.seteuid(OTHER)
            try:
                vram.publish("model", {"w": np.zeros(10, np.uint8)}, meta={"origin": carrier.address}, keeper=path)
            finally:
                os.seteuid(0)
            for if_missing in (True, False):
                with pytest.raises(AccessDeniedError, match=f"uid {OTHER}"):
                    vram.replicate(carrier.address, "model", if_missing=if_missing, keeper=path)
            with pytest.raises(AccessDeniedError, match=f"uid {OTHER}"):
                next(follow(carrier.address, "model", timeout=SOON, keeper=path))
            close_client(path)


def test_pieces_of_broken_connections_are_not_said_to_be_missing(two: Nodes) -> None:
    """A carrier takes them for on their way until it hears of the end: four of these, and the transfer had failed."""
    cuts = 0
    was_cut = False

    def answers(request: Any, connection: Connection) -> object:
        nonlocal cuts, was_cut
        if isinstance(request, m.Fetch) and cuts < 6:
            cuts, was_cut = cuts + 1, True
            connection.cut()
            raise PeerGoneError("it was cut")
        if isinstance(request, m.Next) and was_cut:
            was_cut = False
            return m.Finished()
        return properly(request, connection)

    with lying(answers) as address:
        assert vram.replicate(address, "model", streams=1, keeper=two.here).reconnected == 6


def test_text_that_is_none_in_what_nixl_is_said_to_offer_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        Nixl(trusted=True).open(b"\x82\xa8metadata\xc4\x01x\xa6memory\xa1\xff", None)  # type: ignore[arg-type]


# -- what is asked again and again ------------------------------------------------------------------------------------
def test_who_follows_what_is_not_offered_asks_a_few_times_a_second(two: Nodes) -> None:
    asked: list[float] = []

    def answers(request: Any, connection: Connection) -> object:
        asked.append(time.monotonic())
        return m.Newest(0) if len(asked) < 20 else m.Refused("access", "enough")

    with lying(answers) as address, pytest.raises(AccessDeniedError, match="enough"):
        next(follow(address, "model", timeout=SOON, keeper=two.here))
    assert asked[-1] - asked[0] > 0.5


# -- files ------------------------------------------------------------------------------------------------------------
def test_a_key_that_is_no_file_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for odd in (tmp_path, tmp_path / "loop", "/dev/null/key", "a" * 5000):
        with pytest.raises(UsageError):
            read_key(odd)


@pytest.mark.parametrize("text", ["nothing", "9464", ":9464", "host:", "host:x", "host:99999", "h:1²", 5])
def test_an_address_has_a_host_and_a_port(text: object) -> None:
    with pytest.raises(UsageError, match="is no address"):
        parse_address(text)
    assert parse_address("[::1]:9464") == ("::1", 9464)


def test_a_table_of_routes_that_is_no_file_hangs_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "deep").write_text("[" * 200_000)
    for odd in ("fifo", "deep"):
        with pytest.raises(UsageError):
            read_routes(tmp_path / odd)
