"""The engine for NIXL on doubles of its agents: tests/engines/check_nixl.py has it on NIXL itself, where that is."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.support import nixl_like
from tests.support.deadlines import SOON

import vram
from vram import driver as drivers
from vram.errors import (
    BusyError,
    PeerError,
    PeerGoneError,
    ProtocolError,
    UnsupportedError,
    UsageError,
    WaitTimeoutError,
)
from vram.nodes import messages as m
from vram.nodes import nixl as room
from vram.nodes.engine import Span
from vram.nodes.messages import Piece
from vram.nodes.nixl import SLOTS, Nixl, devices_of
from vram.spec import HOST, Location

PIECE = Piece(1, 8192, 4096)


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> nixl_like.Network:
    made = nixl_like.Network()
    monkeypatch.setitem(sys.modules, "nixl", nixl_like.module(made))
    return made


class Link:
    """A connection to an offering of this process."""

    def __init__(self, offering: Any) -> None:
        self._offering = offering

    def fetch(self, piece: Piece, into: memoryview, timeout: float) -> None:
        raise AssertionError("not by tcp")

    def ask(self, engine: str, data: bytes, timeout: float) -> bytes:
        assert engine == "nixl"
        answer: bytes = self._offering.answer(data)
        return answer


@contextlib.contextmanager
def offered(engine: Nixl, view: bool = True) -> Iterator[Any]:
    with vram.empty((m.PIECE,), "u1", device="host") as array:
        array.numpy()[:] = 7
        with array.numpy().data as seen:
            offering = engine.offer([Span(0, array.address, m.PIECE, HOST, seen if view else None)])
            try:
                yield offering
            finally:
                offering.close()


def read(engine: Nixl, offering: Any, piece: Piece = PIECE, data: bytes | None = None) -> bytes:
    reading = engine.open(offering.data if data is None else data, Link(offering))
    try:
        with memoryview(bytearray(piece.nbytes)) as into:
            reading.read(piece, Span(piece.offset, 0, piece.nbytes, HOST, into), SOON)
            return bytes(into)
    finally:
        reading.close()


def test_whoever_uses_it_says_that_the_other_end_is_trusted(network: nixl_like.Network) -> None:
    for said in ({}, {"trusted": False}, {"trusted": 1}):
        with pytest.raises(UsageError, match="trusted=True"):
            Nixl(**said)  # type: ignore[arg-type]
    assert network.made == 0


@pytest.mark.parametrize("ring", [False, True])
def test_a_piece_is_read_and_nothing_stays_registered(network: nixl_like.Network, ring: bool) -> None:
    engine = Nixl(trusted=True, ring=ring)
    with offered(engine) as offering:
        assert read(engine, offering) == b"\7" * 4096
        (agent,) = network.agents.values()
        assert agent.name.startswith("vram-")
        assert agent.handles == 0
        assert agent.peers == []
        assert len(agent.registered) == 1
    assert agent.registered == []
    engine.close()


def test_memory_that_cannot_be_registered_is_copied_into_a_ring(network: nixl_like.Network) -> None:
    engine = Nixl(trusted=True)
    with vram.empty((m.PIECE,), "u1", device="host") as array:
        array.numpy()[:] = 9
        network.refuses.add(array.address)
        with array.numpy().data as seen:
            offering = engine.offer([Span(0, array.address, m.PIECE, HOST, seen)])
            said = msgspec.msgpack.decode(offering.data)
            assert (said["is_ring"], len(said["places"])) == (True, SLOTS)
            assert read(engine, offering) == b"\t" * 4096
            assert offering._taken == {}, "the buffer was given back"
            offering.close()
            with pytest.raises(PeerGoneError, match="not any more"):
                offering.answer(msgspec.msgpack.encode(room._Stage(0, 4096)))
        with pytest.raises(UnsupportedError, match="memory that it can register"):
            engine.offer([Span(0, array.address, m.PIECE, HOST, None)])


def test_buffers_that_nobody_gives_back_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_SLOT_WAIT", 0.02)
    ask = msgspec.msgpack.encode(room._Stage(0, 4096))
    with offered(Nixl(trusted=True, ring=True)) as offering:
        given = [offering.answer(ask) for _ in range(SLOTS)]
        assert {room._as_taken(one).slot for one in given} == set(range(SLOTS))
        with pytest.raises(BusyError, match="4 buffers"):
            offering.answer(ask)
        offering.answer(given[2])
        assert room._as_taken(offering.answer(ask)).slot == room._as_taken(given[2]).slot
        offering.answer(given[2])
        with pytest.raises(BusyError):
            offering.answer(ask)  # what is given back twice is another reader's by then


def test_a_reader_who_is_gone_keeps_no_buffer_and_takes_no_one_elses() -> None:
    ask = room._encode(room._Stage(0, 4096))
    with offered(Nixl(trusted=True, ring=True)) as offering:
        mine = [offering.answer(ask) for _ in range(2)]
        others = offering.answer(ask)
        offering.answer(mine[0])
        again = offering.answer(ask)  # by somebody else, in the buffer that was given back
        offering.forget(mine)
        held = {msgspec.msgpack.decode(one)["slot"] for one in (others, again)}
        assert set(offering._taken) == held


def test_why_it_is_offered_in_another_way_can_be_said_and_shown(network: nixl_like.Network) -> None:
    engine = Nixl(trusted=True)
    with vram.empty((m.PIECE,), "u1", device="host") as array, array.numpy().data as seen:

        def refuse(kind: str, row: Any) -> bool:
            if row[0] == array.address:
                raise nixl_like.nixlBackendError("\x1b[2J \ud800")
            return False

        network.refuses_kind = refuse
        offering = engine.offer([Span(0, array.address, m.PIECE, HOST, seen)])
        try:
            said = msgspec.msgpack.decode(offering.data)
            assert said["why"].endswith("nixlBackendError: ?[2J ?")
            reading: Any = engine.open(msgspec.msgpack.encode({**said, "why": "\x1b[2J\n"}), Link(offering))
            assert reading.why == "?[2J?"
            reading.close()
        finally:
            offering.close()


def test_what_is_asked_of_a_ring_is_not_believed() -> None:
    with offered(Nixl(trusted=True, ring=True)) as offering:
        for asked in (b"", b"\xc1", msgspec.msgpack.encode(room._Stage(m.PIECE - 1, 4096)), b"\x81\xa4type\xa1x"):
            with pytest.raises(ProtocolError):
                offering.answer(asked)
        assert offering._taken == {}
    with offered(Nixl(trusted=True)) as offering, pytest.raises(ProtocolError, match="asked nothing"):
        offering.answer(b"")


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"metadata": b"agent x", "memory": "DRAM"},
        {"metadata": b"agent x", "memory": "FILE", "places": [(0, 0, 1, 0)]},
        {"metadata": b"agent x", "memory": "DRAM", "places": []},
        {"metadata": b"agent x", "memory": "DRAM", "places": [(0, 0, 1, 0)] * 4097},
        {"metadata": b"", "memory": "DRAM", "places": [(0, 0, 1, 0)]},
        {"metadata": b"agent x", "memory": "DRAM", "places": [(-1, 0, 1, 0)]},
    ],
)
def test_what_is_no_offer_is_a_protocol_error(said: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        Nixl(trusted=True).open(msgspec.msgpack.encode(said), None)  # type: ignore[arg-type]


def test_an_engine_that_cannot_reach_the_other_node_is_not_used(network: nixl_like.Network) -> None:
    engine = Nixl(trusted=True)
    with offered(engine) as offering:
        said = msgspec.msgpack.decode(offering.data)
        for changed in ({"metadata": b"stranger"}, {"metadata": b"agent gone"}, {"places": [(0, 4096, 4096, 0)]}):
            with pytest.raises(UnsupportedError, match="nixl"):
                engine.open(msgspec.msgpack.encode({**said, **changed}), Link(offering))
    assert all(agent.peers == [] for agent in network.agents.values())


def test_pieces_outside_of_what_is_offered_are_not_read() -> None:
    for ring in (False, True):
        engine = Nixl(trusted=True, ring=ring)
        with offered(engine) as offering, pytest.raises(ProtocolError):
            read(engine, offering, Piece(0, m.PIECE - 1, 2))


def test_a_source_that_goes_is_gone_and_one_that_refuses_is_an_error(network: nixl_like.Network) -> None:
    engine, reader = Nixl(trusted=True), Nixl(trusted=True)
    with offered(engine) as offering:
        reading = reader.open(offering.data, Link(offering))
        with memoryview(bytearray(4096)) as into:
            span = Span(8192, 0, 4096, HOST, into)
            source = network.agents[reading._peer]
            rows, source.registered = source.registered, []
            with pytest.raises(PeerError, match="nixlNotFoundError"):
                reading.read(PIECE, span, SOON)
            source.registered = rows
            del network.agents[source.name]
            with pytest.raises(PeerGoneError, match="nixlRemoteDisconnectError"):
                reading.read(PIECE, span, SOON)
            network.agents[source.name] = source
            reading.read(PIECE, span, SOON)
        reading.close()


def test_a_read_that_does_not_end_ends_the_agent_so_that_it_writes_no_more(network: nixl_like.Network) -> None:
    engine, reader = Nixl(trusted=True), Nixl(trusted=True)
    with offered(engine) as offering:
        reading = reader.open(offering.data, Link(offering))
        network.is_stuck = True
        with memoryview(bytearray(4096)) as into:
            span = Span(8192, 0, 4096, HOST, into)
            with pytest.raises(WaitTimeoutError, match="did not come in time"):
                reading.read(PIECE, span, 0.01)
            with pytest.raises(PeerGoneError, match="given up"):
                reading.read(PIECE, span, 0.01)
        reading.close()
        network.is_stuck = False
        assert read(reader, offering) == b"\7" * 4096, "by another agent"
        assert network.made == 3


def test_without_nixl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(UnsupportedError, match="--no-deps nixl"):
        Nixl(trusted=True).offer([])


# -- memory of GPUs, on the stand-in -----------------------------------------------------------------------------------
GPU, OTHER = Location("cuda", 0), Location("cuda", 1)


@contextlib.contextmanager
def offered_of_gpu(engine: Nixl) -> Iterator[tuple[Any, Any]]:
    """A piece full of sevens on a GPU, and what is offered of it."""
    with vram.empty((m.PIECE,), "u1", device=str(GPU)) as array:
        array.region.driver.fill(array.address, 7, m.PIECE)
        offering = engine.offer([Span(0, array.address, m.PIECE, GPU, None)])
        try:
            yield offering, msgspec.msgpack.decode(offering.data)
        finally:
            offering.close()


def read_to_gpu(engine: Nixl, offering: Any) -> tuple[bytes, str]:
    """Read a piece into memory of another GPU; return it, and what the engine says of how."""
    reading: Any = engine.open(offering.data, Link(offering))
    with vram.zeros((PIECE.nbytes,), "u1", device=str(OTHER)) as array, contextlib.closing(reading):
        reading.read(PIECE, Span(PIECE.offset, array.address, PIECE.nbytes, OTHER, None), SOON)
        got = bytearray(PIECE.nbytes)
        array.region.driver.copy_out(memoryview(got), array.address)
        return bytes(got), reading.why


@pytest.mark.standin
def test_memory_of_a_gpu_goes_through_a_ring_that_its_own_kind_of_sharing_reaches(network: nixl_like.Network) -> None:
    engine, reader = Nixl(trusted=True), Nixl(trusted=True)
    with offered_of_gpu(engine) as (offering, said):
        assert (said["memory"], said["is_ring"], len(said["places"]), said["why"]) == ("VRAM", True, SLOTS, "")
        driver: Any = drivers.get(GPU)
        assert driver.pointer_info(said["places"][0][1]).made_by == "legacy"
        assert read_to_gpu(reader, offering) == (b"\7" * 4096, "")
        assert read(reader, offering) == b"\7" * 4096, "to the host as well"
        assert offering._taken == {}, "the buffer was given back"
    assert [agent.registered for agent in network.agents.values()] == [[], []]


@pytest.mark.standin
def test_without_such_a_ring_memory_of_a_gpu_is_read_where_it_is_or_from_the_host_and_that_is_said(
    network: nixl_like.Network,
) -> None:
    reader = Nixl(trusted=True)
    network.refuses_kind = lambda kind, row: kind == "VRAM" and row[1] == SLOTS * m.PIECE
    with offered_of_gpu(Nixl(trusted=True)) as (offering, said):
        assert (said["memory"], len(said["places"]), said["is_ring"]) == ("VRAM", 1, False)
        got, why = read_to_gpu(reader, offering)
        assert got == b"\7" * 4096
        assert "a ring on cuda:0: nixlBackendError" in why
    network.refuses_kind = lambda kind, row: kind == "VRAM"
    with offered_of_gpu(Nixl(trusted=True)) as (offering, said):
        assert (said["memory"], len(said["places"]), said["is_ring"]) == ("DRAM", SLOTS, True)
        got, why = read_to_gpu(reader, offering)
        assert got == b"\7" * 4096
        assert why.count("nixlBackendError") == 3, "the ring, the memory itself, and the reader's own"
        assert "staged in memory of the host" in why
        assert offering._taken == {}, "a buffer that was not read is given back, too"
    network.refuses_kind = lambda kind, row: True
    with pytest.raises(UnsupportedError, match=r"a ring on cuda:0.*a ring on host"), offered_of_gpu(reader):
        pass


@pytest.mark.standin
def test_a_gpu_has_its_context_before_its_memory_is_registered(
    network: nixl_like.Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UCX refuses it otherwise: seen on NIXL 1.5.1 with an array that nobody had touched yet."""
    log: list[str] = []
    driver: Any = drivers.get(GPU)
    plain = driver.mem_info
    monkeypatch.setattr(driver, "mem_info", lambda at: (log.append(f"context of {at}"), plain(at))[1])
    network.refuses_kind = lambda kind, row: (log.append(f"{kind} of {row[2]}"), False)[1]
    with offered_of_gpu(Nixl(trusted=True)) as (offering, _):
        read_to_gpu(Nixl(trusted=True), offering)
    assert log.index("context of cuda:0") < log.index("VRAM of 0")
    assert log.index("context of cuda:1") < log.index("VRAM of 1")


def test_places_and_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Nixl(trusted=True)
    assert engine.reaches(HOST)
    assert engine.reaches(Location.parse("cuda:1"))
    assert not engine.reaches(Location("cuda", "numa"))
    assert devices_of("127.0.0.1") == "lo"
    assert devices_of("203.0.113.7") is None, "nobody's address here: all devices"
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    seen: list[str | None] = []
    made = sys.modules["nixl"].nixl_agent
    monkeypatch.setattr(
        sys.modules["nixl"], "nixl_agent", lambda *a: (seen.append(os.environ.get("UCX_NET_DEVICES")), made(*a))[1]
    )
    engine._agent()
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    Nixl(trusted=True)._agent()
    assert seen == ["lo", "mlx5_0:1"]
    monkeypatch.delenv("UCX_NET_DEVICES")
    Nixl(trusted=True)._agent()
    assert "UCX_NET_DEVICES" not in os.environ
