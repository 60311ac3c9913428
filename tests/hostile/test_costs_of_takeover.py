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
import time
import tracemalloc
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.support.keeper_here import serving
from tests.support.pages import calls_of
from tests.support.peers import Peer

from vram.errors import ProtocolError, QuotaError
from vram.keeper import messages as m
from vram.keeper import records, snapshot, takeover
from vram.keeper.accounts import MOST_WORDS
from vram.keeper.catalogue import Catalogue
from vram.keeper.connection import Connection
from vram.keeper.limits import MOST_ENTRIES, Quotas
from vram.keeper.private import short_directory
from vram.keeper.records import Claim, Session, Waiter
from vram.keeper.server import KeeperServer
from vram.keeper.service import Releasing
from vram.keeper.snapshot import Ahead, Books, restore, save
from vram.keeper.turns import Turns
from vram.sharing.channel import Channel, close_fds, peer_credentials
from vram.testing.keeper import SOON

pytestmark = pytest.mark.slow  # goes with takeover by a successor

MANY = 2_000
KEEPER, ANN, NOBODY = 1000, 1001, 65_534
MUCH = {f"{number:03d}": "value" for number in range(512)}  # as much as can be said, in as many pieces


@pytest.fixture
def server() -> Iterator[KeeperServer]:
    """One that does not serve yet."""
    with short_directory() as place:
        made = KeeperServer(f"{place}/k", hand_over=takeover.hand_over)
        yield made
        made.turns.selector.close()


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
        books.remove(ann, f"w{number:04d}")
    publish(books, ann, "late")
    second = ahead.part(books)
    assert [one.name for one in second] == [f"w{number:04d}" for number in range(MANY - 10, MANY)]
    assert not ahead.part(books)
    assert [one.name for one in books.all_versions() if one not in ahead] == ["late"]
    for one in second:
        books.remove(ann, one.name)
    assert len(first) == 1024


def test_a_round_all_of_which_is_gone_is_over(books: Catalogue) -> None:
    ann = books.connect(KEEPER)
    for number in range(MANY):
        publish(books, ann, f"w{number:04d}")
    ahead = Ahead()
    assert ahead.part(books)
    for number in range(MANY):
        books.remove(ann, f"w{number:04d}")
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
        books._names[f"w{number}"].current.token = takeover.Held([], 0, ann.uid, server.dispose)  # type: ignore[union-attr]
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
        chosen.turns.selector.close()


# -- waiters with much to say ------------------------------------------------------------------------------------------


def test_what_waiters_expect_moves_as_it_is_kept(books: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """As dicts it took twenty times the memory, on both sides, and half a second for each user."""
    ann = books.connect(ANN)
    there = [wait(books, ann, call) for call in range(1, 101)]
    said = sum(waiter.words for waiter in there)
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
    assert successor.accounts.of(ANN).words == said


def test_what_waiters_expect_counts_as_words(books: Catalogue) -> None:
    ann, bob, own = books.connect(ANN), books.connect(NOBODY - 1), books.connect(KEEPER)
    waiter = wait(books, ann, 1)
    assert books.accounts.of(ANN).words == books.accounts.total.words == waiter.words > 0
    books.begin(ann, "much", nbytes=1, handles=1, words=MOST_WORDS - waiter.words)
    with pytest.raises(QuotaError, match="64 MiB of manifests, devices and meta"):
        wait(books, ann, 2, {"a": "b"})
    assert wait(books, ann, 2, None).words == 0, "who expects nothing says nothing"
    assert wait(books, bob, 1).words == waiter.words
    books.begin(own, "own", nbytes=1, handles=1, words=MOST_WORDS)
    wait(books, own, 1)
    books.cancel(ann, 1)
    wait(books, ann, 3, {"a": "b"})
    books.disconnect(ann, 0.0)
    assert books.accounts.of(ANN).words == 0
    assert ann.tally.waiters == 0


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
        version.token = takeover.Held([os.memfd_create("w")], 0, ann.uid, server.dispose)
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


@pytest.mark.usefixtures("talkative")
def test_s9_an_older_successor_does_not_hear_that_the_keeper_is_at_work(server: KeeperServer) -> None:
    ann = server.catalogue.connect(os.geteuid())
    publish(server.catalogue, ann, "w")
    version = server.catalogue._names["w"].current
    assert version is not None
    version.token = takeover.Held([os.memfd_create("w")], 0, ann.uid, server.dispose)
    with serving(server):
        older = Peer(server.path)
        older.send(m.encode(m.Takeover(1, goes_on=True)))
        payload, fds, _, _ = socket.recv_fds(older.sock, 1 << 16, 8)
        close_fds(fds)
        assert isinstance(m.decode_succession(payload), m.HandOver)
        older.sock.close()


@pytest.mark.usefixtures("talkative")
def test_s9_an_older_keeper_does_not_hear_that_its_successor_is_at_work() -> None:
    here, there = Channel.pair()
    with contextlib.closing(here), contextlib.closing(there):
        takeover._Work(here, is_heard=False)()
        here.send(b"!", timeout=SOON)
        assert there.recv(timeout=SOON)[0] == b"!"


@pytest.fixture
def idle(server: KeeperServer) -> KeeperServer:
    """It serves as far as it knows, and nothing that waits for its turn gets it."""
    nothing = SimpleNamespace(cancel=lambda: None)
    server.loop = SimpleNamespace(call_soon=lambda _: nothing, call_later=lambda *_: nothing)  # type: ignore[assignment]
    return server


# -- what is under way -------------------------------------------------------------------------------------------------


class Looks(dict[Any, int]):
    """Counts how often it is gone through."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        self.looks += 1
        return super().__iter__()


@pytest.mark.parametrize("is_told", [True, False], ids=["an older successor", "any, of a claim"])
def test_all_that_is_decided_is_done_before_it_is_written_down(idle: KeeperServer, is_told: bool) -> None:
    """A part of it may decide more than is done at once: then the keeper asked for ever whether the rest was done."""
    books, service = idle.catalogue, idle.service
    ann = books.connect(ANN)
    for call in range(1, 1_001):
        assert isinstance(books.attach(ann, "w", 0.0, call=call, wait=None), Waiter)
    _, effects = books.commit(books.begin(ann, "w", nbytes=1, handles=1), "t", 0.0)
    service.carry_out(effects, ANN)
    assert books.waiting > 900
    steps = itertools.count(1)
    work = service._work

    def counted(most: int | None) -> None:
        assert next(steps) < 1_000, "it goes on for ever"
        work(most)

    service._work = counted  # type: ignore[method-assign]
    if not is_told:
        books._rounds["w"].before = Claim(1, ann, "w", 0.0, None, 0, {})
    service.finish(for_successor=not is_told)
    assert (books.waiting, len(books.leases)) == (0, 1_000)
    assert not service._due
    assert not service._parts


def test_what_ends_in_an_error_keeps_nobody_elses_turn() -> None:
    """Whoever waited was served when the next request came, if one came."""
    due: list[Any] = []

    def soon(act: Any) -> Any:
        due.append(act)
        return SimpleNamespace(cancel=lambda: due.remove(act))

    loop = SimpleNamespace(call_soon=soon, call_later=lambda _, act: soon(act))
    turns = Turns(SimpleNamespace(by_user={1: 1, 2: 1}, loop=loop, paused=False, now=time.monotonic))  # type: ignore[arg-type]
    turns.selector.close()
    done: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    turns.later(1, fail)
    turns.later(2, lambda: done.append(2))
    with pytest.raises(ZeroDivisionError):
        due.pop()()
    assert due, "nobody will have a turn"
    due.pop()()
    assert done == [2]


def test_what_connections_are_about_to_give_back_is_found_at_once(server: KeeperServer) -> None:
    """Not for each of thousands of connections among thousands of such calls."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
    connections = [Connection(server, one, peer_credentials(one)) for one, _ in pairs]
    server.pending.update(dict.fromkeys(connections))
    server.service._parts = parts = Looks()
    for number, connection in enumerate(connections):
        parts[Releasing(connection, number, [number])] = 0
    listener = socket.socket(socket.AF_UNIX)
    server.listener = SimpleNamespace(sock=listener, lent=False)  # type: ignore[assignment]
    parts.looks = 0
    payload, _ = takeover._collect(server, ())
    state = takeover._state.decode(payload)
    assert [row.releasing for row in state.connections] == [[(number, [number])] for number in range(20)]
    assert parts.looks == 1
    listener.close()
    for pair in pairs:
        for end in pair:
            end.close()
