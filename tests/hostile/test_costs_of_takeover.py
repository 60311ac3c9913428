"""MEDIUM: what one user had in a keeper stopped it for seconds at a takeover, and past ten seconds prevented it.

A hundred thousand tiny entries, leases on all of them, and thousands of waiters that expect as much as can be said.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import socket
import threading
import tracemalloc
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.support.deadlines import SOON
from tests.support.keeper_here import serving
from tests.support.pages import calls_of

from vram.errors import ProtocolError
from vram.keeper import messages as m
from vram.keeper import records, snapshot, takeover
from vram.keeper.catalogue import Catalogue
from vram.keeper.limits import MOST_ENTRIES, Quotas
from vram.keeper.private import short_directory
from vram.keeper.records import Session, Waiter
from vram.keeper.server import KeeperServer
from vram.keeper.snapshot import Ahead, Books, restore, save
from vram.sharing.channel import Channel

pytestmark = pytest.mark.slow  # goes with takeover by a successor

MANY = 2_000
KEEPER, ANN, NOBODY = 1000, 1001, 65_534
MUCH = {f"{number:03d}": "value" for number in range(512)}  # as much as can be said, in as many pieces


@pytest.fixture
def server() -> Iterator[KeeperServer]:
    """One that does not serve yet."""
    with short_directory() as place:
        yield KeeperServer(f"{place}/k", hand_over=takeover.hand_over)


@pytest.fixture
def books() -> Catalogue:
    return Catalogue(keeper_uid=KEEPER, nobody=NOBODY)


def publish(books: Catalogue, session: Session, name: str) -> None:
    version, _ = books.commit(books.begin(session, name, nbytes=1, handles=1), name, 0.0)
    version.settle(b"\xc0 " + name.encode())


def wait(books: Catalogue, session: Session, call: int, expect: dict[str, str] | None = MUCH) -> Waiter:
    made = books.attach(session, f"w{call}", 0.0, call=call, expect=expect, wait=None)
    assert isinstance(made, Waiter)
    return made


def successor_of(books: Catalogue) -> Catalogue:
    """The books as another keeper has them, by way of the bytes that it is sent."""
    tokens = {version.token: number for number, version in enumerate(books.all_versions())}
    written = msgspec.msgpack.encode(save(books, tokens.__getitem__))
    read = msgspec.msgpack.decode(written, type=Books)
    return restore(read, list(tokens).__getitem__, Quotas(), keeper_uid=KEEPER, nobody=NOBODY)[0]


# -- how long it takes -------------------------------------------------------------------------------------------------


class Numbers(list[int]):
    """Counts how many of its numbers are copied or moved, and of parts of it."""

    def __init__(self, given: Iterable[int], moved: list[int]) -> None:
        super().__init__(given)
        self.moved = moved

    def __getitem__(self, which: Any) -> Any:
        got = super().__getitem__(which)
        if not isinstance(which, slice):
            return got
        self.moved.append(len(got))
        return Numbers(got, self.moved)

    def __delitem__(self, which: Any) -> None:
        super().__delitem__(which)
        self.moved.append(len(self))


def test_taking_descriptors_apart_costs_as_much_as_there_are(server: KeeperServer) -> None:
    """Of each version in turn, the numbers of all that come behind it were moved."""
    listener = socket.socket(socket.AF_UNIX)
    moved: list[int] = []
    fds = Numbers([listener.detach(), *range(10**6, 10**6 + 3 * MANY)], moved)  # of memory that nobody has
    state = takeover.State(Books(1, 0, {}, [], [], [], [], [], []), [(3, 4096)] * MANY, [])
    (taken,) = takeover.unpack(server, state, fds, Quotas(), 1.0, {})
    taken.close()
    assert not fds, "what is in there is nobody's"
    assert 3 * MANY <= sum(moved) < 10 * MANY


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_MOST_OF_PART", 50)


def parts_of(count: int) -> list[int]:
    """What each part costs of so many tiny entries, in calls of functions."""
    books = Catalogue(keeper_uid=KEEPER)
    ann = books.connect(KEEPER)
    for number in range(count):
        publish(books, ann, f"w{number}")
    ahead, costs, went = Ahead(), [], 0
    while True:
        part: list[Any] = []
        costs.append(calls_of(lambda part=part: part.extend(ahead.part(books))))  # type: ignore[misc]
        if not part:
            assert went == count
            assert all(version in ahead for version in books.all_versions())
            return costs
        went += len(part)


@pytest.mark.usefixtures("small_parts")
def test_what_goes_ahead_next_costs_as_much_as_it_is() -> None:
    """Each time that a part was asked for, the keeper could go through all entries: 0.24 s with 200,000 of them."""
    few, many = parts_of(200), parts_of(1_000)
    assert len(many) > 2 * len(few)
    assert max(many) <= max(few) + 50


def test_what_is_gone_goes_ahead_no_more(books: Catalogue) -> None:
    ann = books.connect(KEEPER)
    for number in range(MANY):
        publish(books, ann, f"w{number:04d}")
    ahead = Ahead()
    first = ahead.part(books)
    for number in range(MANY - 10):
        books.remove(ann, f"w{number:04d}", now=0.0)
    publish(books, ann, "late")
    second = ahead.part(books)
    assert [one.name for one in second] == [f"w{number:04d}" for number in range(MANY - 10, MANY)]
    assert not ahead.part(books)
    assert [one.name for one in books.all_versions() if one not in ahead] == ["late"]
    for one in second:
        books.remove(ann, one.name, now=0.0)
    assert len(first) == 1024


def test_a_round_all_of_which_is_gone_is_over(books: Catalogue) -> None:
    ann = books.connect(KEEPER)
    for number in range(MANY):
        publish(books, ann, f"w{number:04d}")
    ahead = Ahead()
    assert ahead.part(books)
    for number in range(MANY):
        books.remove(ann, f"w{number:04d}", now=0.0)
    publish(books, ann, "late")
    assert ahead.part(books) == []


@pytest.mark.usefixtures("small_parts")
def test_who_publishes_without_end_does_not_keep_a_successor_away(books: Catalogue) -> None:
    ann = books.connect(KEEPER)
    ahead, parts, numbers = Ahead(), 0, itertools.cycle(range(200))
    while True:
        for number in itertools.islice(numbers, 150):
            publish(books, ann, f"w{number:04d}")
        if not ahead.part(books):
            break
        parts += 1
        assert parts <= 4 * snapshot.ROUNDS
    assert parts >= snapshot.ROUNDS


def test_whoever_writes_much_down_or_reads_it_looks_for_no_garbage(server: KeeperServer) -> None:
    """Each time that the collector came, it went through all that was made so far."""
    books = server.catalogue
    ann = books.connect(books.accounts.keeper_uid)
    for number in range(MANY):
        publish(books, ann, f"w{number}")
        books._names[f"w{number}"].current.token = takeover.Held([], 0, server.dispose)  # type: ignore[union-attr]
    listener = socket.socket(socket.AF_UNIX)
    server.listener = SimpleNamespace(sock=listener, lent=False)  # type: ignore[assignment]
    seen: list[str] = []

    def note(phase: str, _: object) -> None:
        seen.append(phase)

    before = gc.get_threshold()
    gc.set_threshold(100)
    gc.callbacks.append(note)
    try:
        payload, fds = takeover._collect(server, ())
        state = takeover._state.decode(payload)
        seen.clear()  # what msgspec made
        payload, fds = takeover._collect(server, ())
        (taken,) = takeover.unpack(server, state, fds, Quotas(), 1.0, {})
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    taken.detach()
    listener.close()
    assert len(seen) < 10, "but once in between"
    assert gc.isenabled(), "afterwards as before"


def test_one_user_has_so_many_entries_unless_somebody_chose_otherwise(server: KeeperServer) -> None:
    assert server.catalogue.accounts.quotas.user_entries == MOST_ENTRIES == 32_768
    with short_directory() as place:
        chosen = KeeperServer(f"{place}/k", quotas=Quotas(user_entries=None))
        assert chosen.catalogue.accounts.quotas.user_entries is None


# -- waiters with much to say ------------------------------------------------------------------------------------------


def test_what_waiters_expect_moves_as_it_is_kept(books: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """As dicts it took twenty times the memory, on both sides, and half a second for each user."""
    ann = books.connect(ANN)
    there = [wait(books, ann, call) for call in range(1, 101)]
    said = sum(len(waiter.expected or b"") for waiter in there)
    assert said == 100 * len(records.packed(MUCH))
    unpacked: list[object] = []
    monkeypatch.setattr(records, "_unpack", unpacked.append)
    tracemalloc.start()
    try:
        successor = successor_of(books)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 5 * said, "much more than is said"
    assert not unpacked
    (session,) = successor.sessions.values()
    assert [one.expected for one in session.waiters.values()] == [one.expected for one in there]


def test_s7_what_a_waiter_expects_is_a_map(books: Catalogue) -> None:
    ann = books.connect(ANN)
    wait(books, ann, 1)
    state = save(books, str)  # type: ignore[arg-type]
    state.waiters[0].expect = msgspec.Raw(b"\x05")
    with pytest.raises(ProtocolError, match="notes that are none"):
        restore(state, str, Quotas(), keeper_uid=KEEPER, nobody=NOBODY)


# -- who gets on with it is waited for ---------------------------------------------------------------------------------


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers that say of every entry that they have got on with it."""
    monkeypatch.setattr(takeover, "_SAID_EACH", 0.0)
    monkeypatch.setattr(snapshot, "_STEP", 1)


def test_who_is_at_work_is_waited_for_anew() -> None:
    """As often as it says so, and for what is due only."""
    here, there = Channel.pair()
    with contextlib.closing(here), contextlib.closing(there):
        for _ in range(5):
            there.send(m.encode(m.Working()), timeout=SOON)
        there.send(m.encode(m.Commit()), timeout=SOON)
        assert takeover._hear(here, m.Commit) == m.Commit()
        there.send(m.encode(m.Working()), timeout=SOON)
        there.send(m.encode(m.Serving()), timeout=SOON)
        with pytest.raises(ProtocolError, match="Serving was said where Commit was due"):
            takeover._hear(here, m.Commit)


@pytest.mark.usefixtures("talkative")
def test_both_say_that_they_are_at_work(server: KeeperServer, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, type]] = []
    read = m.decode_succession

    def note(payload: bytes) -> Any:
        said = read(payload)
        heard.append((threading.get_ident(), type(said)))
        return said

    second = KeeperServer(server.path, hand_over=takeover.hand_over)
    ann = server.catalogue.connect(os.geteuid())
    for number in range(10):
        publish(server.catalogue, ann, f"w{number}")
        version = server.catalogue._names[f"w{number}"].current
        assert version is not None
        version.token = takeover.Held([os.memfd_create("w")], 0, server.dispose)
    with serving(server):
        monkeypatch.setattr(m, "decode_succession", note)
        assert takeover.take_over(second) is not None
    me = threading.get_ident()
    mine = [kind for thread, kind in heard if thread == me]
    its = [kind for thread, kind in heard if thread != me]
    assert mine == [*[m.Working] * 10, m.HandOver, m.Descriptors, m.Committed]
    assert its == [m.Received, m.Received, *[m.Working] * 10, m.Commit, m.Serving]
    with serving(second):
        pass


# -- what is under way -------------------------------------------------------------------------------------------------
