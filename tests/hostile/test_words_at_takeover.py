"""HIGH: what entries say, besides their memory, stopped the keeper's loop at a takeover for seconds, or prevented it.

One user published thousands of entries of a page each, with a manifest of 32 KiB, and devices and meta of 4 KB each.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.support.keeper_here import serving
from tests.support.other_users import needs_root
from tests.support.peers import Peer, running
from tests.support.users import GREEDY, MODEST, being, open_to_all

from vram.errors import QuotaError
from vram.keeper import messages as m
from vram.keeper import takeover
from vram.keeper.accounts import MOST_WORDS
from vram.keeper.catalogue import Catalogue
from vram.keeper.client import KeeperClient
from vram.keeper.private import KeeperProcess, short_directory
from vram.keeper.records import Lease, packed
from vram.keeper.rules import MAX_MANIFEST, MAX_META
from vram.keeper.server import KeeperServer
from vram.keeper.service import _DEVICE
from vram.keeper.snapshot import MAX_PART, restore, save
from vram.sharing.channel import MAX_FDS, MAX_MESSAGE, close_fds
from vram.testing.keeper import SOON, memfds, until

pytestmark = pytest.mark.slow  # goes with takeover by a successor

MANIFEST = b"m" * MAX_MANIFEST
META = {"a": "x" * (MAX_META - 1)}
MANY = 60  # entries that say more than goes ahead at once
KEEPER, ANN, BOB = 1000, 1001, 1002


def wordy(name: str, manifest: bytes = MANIFEST) -> bytes:
    devices = ["host", *(f"d{number:063d}" for number in range(63))]
    return m.encode(m.Publish(1, name, [m.SegmentRow(4096, 1, 0)], devices, manifest, meta=META))


def publish(peer: Peer, name: str, fds: list[int], manifest: bytes = MANIFEST) -> m.Reply | None:
    return peer.ask(wordy(name, manifest), fds)


@contextlib.contextmanager
def with_much_said() -> Iterator[tuple[KeeperProcess, Peer, list[int]]]:
    """A keeper of many wordy entries, who published them, and some memory."""
    with short_directory() as place, memfds(1) as fds, running(f"{place}/k") as keeper:
        peer = Peer(keeper.path)
        for number in range(MANY):
            assert publish(peer, f"w{number:02d}", fds) == m.Published(1, 1)
        try:
            yield keeper, peer, fds
        finally:
            peer.close()


def next_of(peer: Peer, **options: bool) -> tuple[Any, bytes]:
    """Ask for everything, and return the answer with what is in its memory."""
    peer.send(m.encode(m.Takeover(1, goes_on=True, **options)))
    payload, fds, _, _ = socket.recv_fds(peer.sock, MAX_MESSAGE, MAX_FDS)
    try:
        said = m.decode_succession(payload)
        return said, os.pread(fds[0], said.size, 0) if fds else b""  # type: ignore[union-attr]
    finally:
        close_fds(fds)


def read(content: bytes) -> takeover.State:
    return msgspec.msgpack.decode(content, type=takeover.State)


# -- a takeover --------------------------------------------------------------------------------------------------------


def test_what_entries_say_goes_ahead_in_parts_while_the_keeper_serves() -> None:
    with with_much_said() as (keeper, publisher, fds):
        successor = Peer(keeper.path)
        parts = 0
        while True:
            said, content = next_of(successor, precopy=True)
            if isinstance(said, m.HandOver):
                break
            assert MAX_PART <= len(content) < MAX_PART + MAX_MESSAGE or parts == 2
            parts += 1
            assert publish(publisher, f"late{parts}", fds, b"late") == m.Published(1, 1)
        assert parts == -(-MANY * (len(MANIFEST) + 2 * MAX_META) // MAX_PART) == 3
        late = {row.name: row.body for row in read(content).books.versions if row.body}
        assert sorted(late) == ["late1", "late2", "late3"]
        assert MANIFEST not in content
        assert content.count(META["a"].encode()) == 2 * len(late)  # in the body, and beside it as ever
        successor.close()
        assert isinstance(publisher.ask(m.encode(m.Statistics(2))), m.KeeperStatistics), "it serves on"
        assert "the other side" in keeper.said() or "a takeover failed, serving on" in keeper.said()
        keeper._stderr.truncate(0)


def test_everything_is_there_after_a_takeover_of_much_and_what_changed_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with with_much_said() as (keeper, publisher, fds):
        parts = []
        split = takeover.split_bodies

        def while_it_serves(head: bytes, rest: memoryview) -> dict[tuple[str, int], tuple[bytes, bytes]]:
            parts.append(split(head, rest))
            if len(parts) == 1:
                assert publish(publisher, "w00", fds, b"second") == m.Published(1, 2)
                assert publisher.ask(m.encode(m.Remove(2, "w01"))) == m.Done(2)
                assert publish(publisher, "w01", fds, b"anew") == m.Published(1, 2)
                assert publisher.ask(m.encode(m.Remove(2, "w02"))) == m.Done(2)
            return parts[-1]

        monkeypatch.setattr(takeover, "split_bodies", while_it_serves)
        successor = KeeperServer(keeper.path)
        assert takeover.take_over(successor) is not None
        assert len(parts) == 3
        with serving(successor), KeeperClient.connect(keeper.path) as client:
            for number in range(MANY):
                if number == 2:
                    continue
                held = client.attach(f"w{number:02d}")
                close_fds(held.fds)
                expected = {0: (2, b"second"), 1: (2, b"anew")}.get(number, (1, MANIFEST))
                assert (held.version, held.manifest, held.meta) == (*expected, META)
            assert client.statistics().entries == MANY - 1
            rows = client.list()
            assert [row.meta for row in rows] == [META] * (MANY - 1)
        assert keeper.process.wait(SOON) == 0


def test_s9_an_older_successor_gets_all_at_once() -> None:
    with with_much_said() as (keeper, publisher, _):
        successor = Peer(keeper.path)
        said, content = next_of(successor)
        assert isinstance(said, m.HandOver)
        assert content.count(MANIFEST) == MANY
        assert all(row.meta == msgspec.Raw(packed(META)) for row in read(content).books.versions)
        successor.close()
        assert isinstance(publisher.ask(m.encode(m.Statistics(2))), m.KeeperStatistics)
        keeper._stderr.truncate(0)


def test_s9_an_older_successor_is_refused_what_it_would_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by stopping for everybody until the state is written down."""
    monkeypatch.setattr(takeover, "_MAX_STATE", len(MANIFEST))
    with short_directory() as place, memfds(1) as fds:
        server = KeeperServer(f"{place}/k", hand_over=takeover.hand_over)
        with serving(server):
            peer = Peer(server.path)
            assert publish(peer, "w", fds) == m.Published(1, 1)
            older = Peer(server.path)
            answer = older.ask(m.encode(m.Takeover(2, goes_on=True)))
            assert isinstance(answer, m.Error)
            assert answer.kind == "UnsupportedError"
            assert "takes what entries say in parts" in answer.text
            assert isinstance(peer.ask(m.encode(m.Statistics(2))), m.KeeperStatistics)
            peer.close()
            older.close()


def test_who_comes_second_gets_everything_of_the_first() -> None:
    """What went ahead to one connection is nothing to the next keeper, which that connection moves to."""
    with with_much_said() as (keeper, _, _):
        second = Peer(keeper.path)
        said, first_part = next_of(second, precopy=True)
        assert isinstance(said, m.Bodies)
        successor = KeeperServer(keeper.path, hand_over=takeover.hand_over)
        assert takeover.take_over(successor) is not None
        with serving(successor):
            again, content = next_of(second, precopy=True)
            assert isinstance(again, m.Bodies)
            assert content == first_part
            assert len(successor.ahead) == 1
            second.close()
            with KeeperClient.connect(keeper.path) as client:
                until(lambda: client.statistics().connections == 2)  # the publisher and this one
            assert not successor.ahead, "what went ahead to who is gone is forgotten"
        assert keeper.process.wait(SOON) == 0


# -- how much one user may say -----------------------------------------------------------------------------------------


def check_full(peers: dict[str, Peer], fds: list[int]) -> None:
    """The greedy one says as much as it may; everybody else may go on."""
    greedy = peers["greedy"]
    refused = publish(greedy, "one-more", fds)
    assert isinstance(refused, m.Error)
    assert refused.kind == "CapacityError"  # as a QuotaError is called there
    assert "64 MiB of manifests, devices and meta" in refused.text
    assert "put a hash into meta" in refused.text
    assert "raise the keeper's limit" not in refused.text
    assert isinstance(publish(greedy, "w0000", fds), m.Published), "in the place of another"
    for name in ("modest", "own"):
        assert isinstance(publish(peers[name], name, fds), m.Published)
    assert greedy.ask(m.encode(m.Remove(2, "w0001"))) == m.Done(2)
    assert isinstance(publish(greedy, "w0001", fds), m.Published), "there is room again"


@needs_root
def test_what_all_entries_of_one_user_say_is_bounded_where_no_ceiling_is_set() -> None:
    with contextlib.ExitStack() as stack:
        fds, keeper = stack.enter_context(memfds(1)), stack.enter_context(open_to_all())
        peers = {}
        for name, uid in (("greedy", GREEDY), ("modest", MODEST), ("own", 0)):
            with being(uid):
                peers[name] = Peer(keeper.path)
            stack.callback(peers[name].close)
        for number in range(MOST_WORDS // (len(wordy("w0000")) + 64 * _DEVICE)):
            assert publish(peers["greedy"], f"w{number:04d}", fds) == m.Published(1, 1)
        check_full(peers, fds)
        successor = KeeperServer(keeper.path)
        assert takeover.take_over(successor) is not None
        with serving(successor):
            check_full(peers, fds)
        assert keeper.process.wait(SOON) == 0


@pytest.fixture
def books() -> Catalogue:
    return Catalogue(keeper_uid=KEEPER)


def said(books: Catalogue) -> tuple[int, int, int]:
    return tuple(one.words for one in (books.accounts.total, books.accounts.of(ANN), books.accounts.of(BOB)))  # type: ignore[return-value]


def test_words_count_against_whom_the_bytes_count(books: Catalogue) -> None:
    ann, bob = books.connect(ANN), books.connect(BOB)

    def begin(name: str, words: int) -> Any:
        return books.begin(ann, name, nbytes=1, handles=1, words=words, body=b"\xc0")

    def commit(publication: Any) -> None:
        books.commit(publication, publication.id, 0.0)

    first = begin("w", 30)
    assert said(books) == (30, 30, 0)
    commit(first)
    assert said(books) == (30, 30, 0)
    lease = books.attach(bob, "w", 0.0)
    assert isinstance(lease, Lease)
    commit(begin("w", 7))
    assert said(books) == (37, 7, 30), "the old version is of who holds it"
    half = begin("half", 500)
    written = msgspec.msgpack.encode(save(books, lambda token: int(token)))
    moved, _ = restore(
        msgspec.msgpack.decode(written, type=type(save(books, int))),
        str,
        books.accounts.quotas,
        keeper_uid=KEEPER,
        nobody=9,
    )
    assert said(moved) == said(books) == (537, 507, 30)
    books.abandon(half)
    books.release(bob, lease.id)
    assert said(books) == (7, 7, 0)
    books.remove(ann, "w")
    assert said(books) == (0, 0, 0)


def test_no_user_says_more_by_old_versions_publications_under_way_or_replacements(books: Catalogue) -> None:
    ann, bob, own = books.connect(ANN), books.connect(BOB), books.connect(KEEPER)
    half = MOST_WORDS // 2

    def begin(session: Any, name: str, words: int) -> Any:
        return books.begin(session, name, nbytes=1, handles=1, words=words, body=b"\xc0")

    books.commit(begin(ann, "w", half), "1", 0.0)
    under_way = begin(ann, "x", half)
    with pytest.raises(QuotaError, match="64 MiB of manifests, devices and meta"):
        begin(ann, "y", 1)
    begin(own, "y", 3 * half)  # the keeper's own user is bound by no ceiling
    books.abandon(under_way)
    books.commit(begin(ann, "w", MOST_WORDS), "2", 0.0)  # in the place of what it replaces
    with pytest.raises(QuotaError):
        begin(ann, "w", MOST_WORDS + 1)
    lease = books.attach(bob, "w", 0.0)
    assert isinstance(lease, Lease)
    books.remove(ann, "w")
    with pytest.raises(QuotaError, match="Uid 1002 leases 'w' version 2"):
        begin(bob, "bobs", 1)
    books.commit(begin(ann, "w", 1), "3", 0.0)
    held = books.attach(bob, "w", 0.0)
    assert isinstance(held, Lease)
    books.commit(begin(ann, "w", 1), "4", 0.0)
    with pytest.raises(QuotaError, match="no lease on 'w' version 4: uid 1002 may hold 64 MiB of manifests"):
        books.attach(bob, "w", 0.0)
    books.release(bob, held.id)
    assert isinstance(books.attach(bob, "w", 0.0), Lease)
