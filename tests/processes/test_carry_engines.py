"""Engines by the contract alone: measured, chosen, said in the result; and what becomes of those that fail."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence

import numpy as np
import pytest
from tests.support.carried import Nodes, model, same
from tests.support.deadlines import SOON, until
from tests.support.samples import in_turns

import vram
from vram.errors import BusyError, PeerError, ProtocolError, UnsupportedError
from vram.memory.long_work import watching
from vram.nodes import messages as m
from vram.nodes.address import read_key
from vram.nodes.carrier import Carrier
from vram.nodes.connection import Connection, connect
from vram.nodes.engine import Offering, Reading, Span
from vram.nodes.messages import Piece
from vram.nodes.tcp import TCP
from vram.spec import HOST, Location
from vram.typing import Replicated

PIECE = 16 << 20
_numbers = itertools.count()


class Within:
    """An engine for two ends in one process: it copies from memory to memory, after a while."""

    def __init__(self, name: str, seconds: float = 0.0, *, opens: bool = True, offers: bool = True) -> None:
        self.name, self.seconds, self.opens, self.offers = name, seconds, opens, offers
        self.fails = False
        self.offered: dict[bytes, Sequence[Span]] = {}
        self.pieces: list[int] = []
        self.sizes: list[int] = []
        self.closed = 0

    def reaches(self, location: Location) -> bool:
        return location == HOST

    def offer(self, spans: Sequence[Span]) -> Offering:
        if not self.offers:
            raise UnsupportedError(self.name, "something", "nothing")
        return Offered(self, spans)

    def open(self, data: bytes, link: Connection) -> Reading:
        if not self.opens:
            raise UnsupportedError(self.name, "something", "nothing")
        return Reads(self, data, link)


class Offered:
    def __init__(self, engine: Within, spans: Sequence[Span]) -> None:
        self.engine, self.data = engine, b"%d" % next(_numbers)
        engine.offered[self.data] = spans
        self.is_closed = False

    def answer(self, asked: bytes) -> bytes:
        if asked != b"ready?":
            raise ProtocolError("that is no question")
        return b"ready"

    def close(self) -> None:
        self.is_closed = True
        del self.engine.offered[self.data]


class Reads:
    def __init__(self, engine: Within, data: bytes, link: Connection) -> None:
        self.engine, self.data, self.link = engine, data, link

    def read(self, piece: Piece, into: Span, timeout: float) -> None:
        if self.engine.fails:
            raise PeerError("it fails")
        assert self.link.ask(self.engine.name, b"ready?", timeout) == b"ready"
        time.sleep(self.engine.seconds)
        self.engine.pieces.append(piece.number)
        self.engine.sizes.append(piece.nbytes)
        for span in self.engine.offered[self.data]:
            if span.offset <= piece.offset < span.offset + span.nbytes:
                at = piece.offset - span.offset
                assert span.view is not None
                assert into.view is not None
                into.view[:] = span.view[at : at + piece.nbytes]

    def close(self) -> None:
        self.engine.closed += 1


def replicated(two: Nodes, *engines: Within, here: Sequence[Within] | None = None, streams: int = 2) -> Replicated:
    arrays = model(5 * PIECE)
    vram.publish("model", arrays, keeper=two.origin)
    with Carrier("127.0.0.1:0", engines=engines, keeper=two.origin) as carrier:
        done = vram.replicate(
            carrier.address, "model", engines=engines if here is None else here, streams=streams, keeper=two.here
        )
    with vram.attach("model", keeper=two.here) as lease:
        assert same(lease, arrays)
    assert all(not engine.offered for engine in engines)
    return done


def test_the_fastest_moves_the_bytes(two: Nodes) -> None:
    fast, slow = Within("fast"), Within("slow", 1.0)
    done = replicated(two, slow, fast)
    assert set(done.rates) == {"slow", "fast", "tcp"}
    assert done.engine in ("fast", "tcp")  # whichever is faster here
    assert done.rates["slow"] < min(done.rates["fast"], done.rates["tcp"])
    assert slow.sizes.count(PIECE) in (1, 2)  # it was measured with; small ones that came before do not count
    assert slow.closed == 1


@pytest.mark.slow
def test_an_engine_that_is_slow_at_first_is_measured_again(two: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is read first NIXL makes its connections, and opens memory of a GPU: measured, 0.1 GB/s and then 3.6."""
    warming, read = Within("warming", 1.0), Reads.read

    def reads(self: Reads, piece: Piece, into: Span, timeout: float) -> None:
        read(self, piece, into, timeout)
        if piece.nbytes == PIECE:
            self.engine.seconds = 0.0

    monkeypatch.setattr(Reads, "read", reads)
    assert replicated(two, warming).rates["warming"] > 4 * PIECE / 1.0


def test_why_an_engine_is_not_used_is_said_to_the_reader(two: Nodes) -> None:
    refused, unopened, unknown = Within("refused", offers=False), Within("unopened", opens=False), Within("unknown")
    failing = Within("failing")
    failing.fails = True
    arrays = model(5 * PIECE)
    vram.publish("model", arrays, keeper=two.origin)
    refused.offer = _refuse  # type: ignore[method-assign]
    with Carrier("127.0.0.1:0", engines=[refused, unopened, failing], keeper=two.origin) as carrier:
        done = vram.replicate(
            carrier.address, "model", engines=[refused, unopened, unknown, failing], keeper=two.here
        )  # fmt: skip
    assert done.engine == "tcp"
    assert "no such memory" in done.why["refused"]
    assert "something" in done.why["unopened"]
    assert done.why["unknown"] == "the carrier does not have it"
    assert done.why["failing"] == "it fails"
    assert "tcp" not in done.why


def _refuse(spans: Sequence[Span]) -> Offering:
    raise UnsupportedError("this engine", "other memory", "no such memory")


@in_turns(5)
def test_an_engine_that_fails_is_measured_as_such_and_not_chosen(two: Nodes) -> None:
    failing = Within("failing")
    failing.fails = True
    done = replicated(two, failing)
    assert (done.engine, done.rates["failing"]) == ("tcp", 0.0)


def test_an_engine_that_cannot_be_opened_here_is_said(two: Nodes) -> None:
    done = replicated(two, Within("closed", opens=False))
    assert (done.engine, done.rates["closed"]) == ("tcp", 0.0)


def test_what_is_not_known_here_is_not_tried(two: Nodes) -> None:
    assert replicated(two, Within("there alone"), here=()).rates == {}


def test_what_is_not_offered_is_not_tried(two: Nodes) -> None:
    engine = Within("not for this memory", offers=False)
    assert replicated(two, engine).rates == {}
    assert engine.pieces == []


def test_a_small_entry_comes_whole_although_there_is_no_piece_for_each(two: Nodes) -> None:
    arrays = model(1000)
    vram.publish("model", arrays, keeper=two.origin)
    engines = [Within("a"), Within("b"), Within("c")]
    with Carrier("127.0.0.1:0", engines=engines, keeper=two.origin) as carrier:
        done = vram.replicate(carrier.address, "model", engines=engines, keeper=two.here)
    assert set(done.rates) == {"a"}
    with vram.attach("model", keeper=two.here) as lease:
        assert same(lease, arrays)


def test_an_entry_without_bytes_comes_with_engines_to_choose_from(two: Nodes) -> None:
    vram.publish("model", {"none": np.zeros((0, 4))}, keeper=two.origin)
    engines = [Within("a")]
    with Carrier("127.0.0.1:0", engines=engines, keeper=two.origin) as carrier:
        done = vram.replicate(carrier.address, "model", engines=engines, keeper=two.here)
    assert (done.nbytes, done.arrays, done.rates) == (0, 1, {})


@in_turns(5)
def test_whoever_watches_sees_how_far_it_has_come(two: Nodes) -> None:
    seen: list[tuple[str, int, bool]] = []

    class Watched(Within):
        def open(self, data: bytes, link: Connection) -> Reading:
            seen.extend((work.what, work.total, 0 <= work.look() < work.total) for work in list(under_way))
            return super().open(data, link)

    with watching() as under_way:
        done = replicated(two, Watched("watched"))
        assert under_way == []
    assert seen
    assert set(seen) == {("replicating model", done.nbytes, True)}


def test_what_was_given_to_a_reader_who_is_gone_is_taken_back(two: Nodes) -> None:
    """Else its buffers of a ring are missing for a minute, and who is under way fails."""
    forgotten: list[tuple[bytes, ...]] = []

    class Keeps(Offered):
        def answer(self, asked: bytes) -> bytes:
            return asked

        def forget(self, answers: tuple[bytes, ...]) -> None:
            assert not self.is_closed
            forgotten.append(answers)

    class Staging(Within):
        def offer(self, spans: Sequence[Span]) -> Offering:
            return Keeps(self, spans)

    vram.publish("model", model(1000), keeper=two.origin)
    engine = Staging("staging")
    with Carrier("127.0.0.1:0", engines=[Within("plain"), engine], keeper=two.origin) as carrier:
        for asked in (b"", b"one"), tuple(b"%d" % n for n in range(20)), ():
            reader = connected(carrier)
            for one in asked:
                assert reader.ask("staging", one, SOON) == one
            reader.close()
            if asked:
                until(lambda: forgotten, what="a word that the reader is gone")
                assert forgotten.pop() == tuple(one for one in asked if one)[-16:]
        last = connected(carrier)
        assert last.ask("staging", b"last", SOON) == b"last"
    last.close()
    assert forgotten == [(b"last",)], "before what is offered is closed"


def connected(carrier: Carrier) -> Connection:
    reader = connect(carrier.address, read_key(None), SOON)
    reader.request(m.Open("model", 0, 0, secrets.token_bytes(16)), m.Opened, SOON)
    return reader


@in_turns(5)
@pytest.mark.parametrize("busy", [2, 5])
def test_an_engine_whose_buffers_others_have_is_asked_again(
    two: Nodes, monkeypatch: pytest.MonkeyPatch, busy: int
) -> None:
    fetch = Connection.fetch
    refused: list[bytes] = []

    class Full(Offered):
        def answer(self, asked: bytes) -> bytes:
            if self.engine.sizes.count(PIECE) >= 2 and len(refused) < busy:  # it was measured
                refused.append(asked)
                raise BusyError("all buffers are taken")
            return super().answer(asked)

    class Filling(Within):
        def offer(self, spans: Sequence[Span]) -> Offering:
            return Full(self, spans)

    monkeypatch.setattr(Connection, "fetch", lambda *given: (time.sleep(0.3), fetch(*given))[1])
    done = replicated(two, Filling("filling"))
    assert done.engine == "filling"
    assert len(refused) == busy
    assert "filling" not in done.why


DIRTY = "\x1b]0;x\x07\nvram: all is well \ud800"
CLEAN = "?]0;x??vram: all is well ?"


def test_reasons_of_a_carrier_are_such_that_they_can_be_said_and_shown(two: Nodes) -> None:
    class Refusing(Within):
        def offer(self, spans: Sequence[Span]) -> Offering:
            raise UnsupportedError(self.name, DIRTY + "w" * 1000, "nothing")

    vram.publish("model", model(1000), keeper=two.origin)
    engine = Refusing("refusing")
    with Carrier("127.0.0.1:0", engines=[engine], keeper=two.origin) as carrier:
        assert set(vram.replicate(carrier.address, "model", keeper=two.here).why) == set()
        why = vram.replicate(carrier.address, "model", engines=[engine], keeper=two.here).why["refusing"]
    assert CLEAN in why
    assert len(why) == m.MAX_WHY
    with pytest.raises(PeerError, match=r"needs \?\]0;x"):
        raise m.refused(m.refusal(UnsupportedError("it", DIRTY, "no")), "there")


def test_tcp_is_asked_nothing() -> None:
    offering = TCP.offer(())
    with pytest.raises(ProtocolError):
        offering.answer(b"x")
    offering.close()
