"""Readers and publishers of what is updated in place that lie: to the keeper, and to each other (S7, I14)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.support.deadlines import until
from tests.support.keeper_here import keeper_here
from tests.support.memfds import FUTURE_WRITE, GROW, SHRINK, make_memfd, memfds
from tests.support.other_users import needs_root
from tests.support.peers import Peer
from tests.support.samples import some
from tests.support.update_children import seen
from tests.support.updates import MIB2, PAGE
from tests.support.users import GREEDY, being

import vram
from vram.driver import words
from vram.entries import reading
from vram.errors import (
    AccessDeniedError,
    NotFoundError,
    ProtocolError,
    QuotaError,
    TornError,
    UsageError,
    WaitTimeoutError,
)
from vram.keeper import messages as m
from vram.keeper.client import Attachment, KeeperClient, Segment, close_client
from vram.keeper.server import KeeperServer
from vram.open_files import close_fds
from vram.sharing.descriptor import (
    MANIFEST_VERSION,
    ArrayEntry,
    Manifest,
    MemoryDescriptor,
    SegmentEntry,
    encode_manifest,
)


@pytest.fixture
def server() -> Iterator[KeeperServer]:
    with keeper_here() as made:
        yield made
        until(lambda: not made.catalogue.leases and not made.connections, what="the end of everybody")
        for version in made.catalogue.versions.values():
            assert version.writer is None


@contextlib.contextmanager
def updatable(client: KeeperClient, name: str = "w", **options: object) -> Iterator[memoryview]:
    """Publish by hand, and yield the words of the publisher."""
    manifest = Manifest(
        MANIFEST_VERSION,
        (MemoryDescriptor("host", (SegmentEntry(MIB2, 1),), 0, MIB2, MIB2),),
        {"a": ArrayEntry(0, 0, 8, "int64", (1,))},
        updatable=True,
    )
    page: list[int] = []
    try:
        mine = words.make(page)
        mine[reading.VERSION] = 1
        with memfds(1, MIB2, seals=PAGE) as fds:
            client.publish(
                name, [Segment(MIB2), Segment(words.PAGE)], [*fds, *page], manifest=encode_manifest(manifest),
                updatable=True,
            )  # fmt: skip
        yield mine
        client.remove(name)
    finally:
        close_fds(page)


@contextlib.contextmanager
def leased(client: KeeperClient, name: str = "w") -> Iterator[Attachment]:
    held = client.attach(name)
    close_fds(held.fds)
    yield held
    client.release([held.lease_id])


# -- to the keeper ---------------------------------------------------------------------------------------------------
UNFIT: dict[str, Callable[[], int]] = {
    "a page without seals": lambda: make_memfd(4096, seals=0),
    "a page that others can write": lambda: make_memfd(4096, seals=SHRINK | GROW),
    "a page that can be cut": lambda: make_memfd(4096, seals=FUTURE_WRITE),
    "two pages": lambda: make_memfd(8192, seals=PAGE),
    "half a page": lambda: make_memfd(2048, seals=PAGE),
    "no memory at all": lambda: os.open("/dev/null", os.O_RDWR),
}


@pytest.mark.parametrize("what", some([*UNFIT], 2))
def test_s7_a_page_that_is_none_is_refused_and_costs_only_its_call(server: KeeperServer, what: str) -> None:
    with KeeperClient.connect(server.path) as client, updatable(client), leased(client) as held:
        fd = UNFIT[what]()
        try:
            with pytest.raises(ProtocolError):
                client.give_page(held.lease_id, fd)
        finally:
            os.close(fd)
        assert server.catalogue.leases[held.lease_id].page is None
        assert server.catalogue.accounts.total.handles == 2


def test_s7_pages_go_with_leases_and_count_for_their_holders(server: KeeperServer) -> None:
    accounts = server.catalogue.accounts
    with KeeperClient.connect(server.path) as client, updatable(client), memfds(3, seals=PAGE) as pages:
        before = accounts.total.handles, accounts.total.nbytes
        with leased(client) as held:
            for fd in pages:  # who was interrupted gives it once more: the last one counts
                client.give_page(held.lease_id, fd)
                assert (accounts.total.handles, accounts.total.nbytes) == (before[0] + 1, before[1] + 4096)
        assert (accounts.total.handles, accounts.total.nbytes) == before
        with KeeperClient.connect(server.path) as other:
            held = other.attach("w")
            close_fds(held.fds)
            other.give_page(held.lease_id, pages[0])
        until(lambda: accounts.total.handles == before[0], what="the end of a page with its connection")
        with pytest.raises(NotFoundError):
            client.give_page(held.lease_id, pages[0])


def test_s7_pages_of_what_is_not_updated_and_of_others_leases_are_refused(server: KeeperServer) -> None:
    with KeeperClient.connect(server.path) as client, KeeperClient.connect(server.path) as other:
        with memfds(2) as fds:
            client.publish("plain", [Segment(4096)], fds[:1])
            with leased(client, "plain") as held:
                with memfds(1, seals=PAGE) as (page,):
                    with pytest.raises(UsageError, match="never updated in place"):
                        client.give_page(held.lease_id, page)
                    with pytest.raises(NotFoundError, match="not held by this connection"):
                        other.give_page(held.lease_id, page)
                    for call in (lambda: other.state(held.lease_id), lambda: other.is_stale(held)):
                        with pytest.raises(NotFoundError):
                            call()  # type: ignore[operator]
            client.remove("plain")


def test_s7_a_page_comes_with_one_descriptor(server: KeeperServer) -> None:
    for count in (0, 2):
        with contextlib.closing(Peer(server.path)) as peer, memfds(2, seals=PAGE) as fds:
            said = peer.ask(m.encode(m.Page(1, 1)), fds[:count])
            assert isinstance(said, m.Error)
            assert peer.is_cut_off()


def test_s7_only_who_updates_gets_pages_and_says_that_it_is_over(server: KeeperServer) -> None:
    with KeeperClient.connect(server.path) as client, KeeperClient.connect(server.path) as other, updatable(client):
        client.begin_update("w", 1)
        with pytest.raises(AccessDeniedError, match="only the process that published"):
            other.begin_update("w", 1)
        with pytest.raises(UsageError, match="did not publish"):
            other.pages("w", 1, 0)
        other.end_update("w", 1, 7, whole=True)  # nothing of its own to note
        (version,) = server.catalogue.versions.values()
        assert (version.updating, version.torn, version.updates) == (True, False, 1)
        seen = client.pages("w", 1, 0)
        assert (seen.rows, seen.more, seen.looked) == ([], False, [])
        client.end_update("w", 1, 7, whole=False)
        assert (version.updating, version.torn, version.updates) == (False, True, 7)


def test_s7_memory_that_others_can_write_is_not_published_to_be_updated(server: KeeperServer) -> None:
    with KeeperClient.connect(server.path) as client:
        for seals in (SHRINK | GROW, FUTURE_WRITE):
            with memfds(2, seals=seals) as fds, pytest.raises(ProtocolError):
                client.publish("w", [Segment(4096)] * 2, fds, updatable=True)
        with memfds(2, seals=PAGE) as fds:
            with pytest.raises(UsageError, match="one of the two"):
                client.publish("w", [Segment(4096)] * 2, fds, updatable=True, writable=True)
            with pytest.raises(ProtocolError, match="F_SEAL_FUTURE_WRITE only"):
                client.publish("w", [Segment(4096)] * 2, fds)
        gpu = Segment(4096, device="GPU-00000000-0000-0000-0000-000000000000")
        with memfds(1, seals=SHRINK) as fds, pytest.raises(ProtocolError, match="not sealed against shrinking"):
            client.publish("w", [gpu], fds, updatable=True)
        with open(os.devnull, "rb") as file, pytest.raises(ProtocolError, match="no memory of a GPU"):
            client.publish("w", [gpu], [file.fileno()], updatable=True)


def test_s7_many_pages_are_looked_at_in_parts(server: KeeperServer) -> None:
    quiet: list[int] = []
    busy: list[int] = []
    words.make(quiet)
    said = words.make(busy)
    with KeeperClient.connect(server.path) as client, updatable(client):
        with KeeperClient.connect(server.path) as other:
            held = [other.attach("w") for _ in range(1200)]
            for one in held:
                close_fds(one.fds)
            numbers = sorted(one.lease_id for one in held)
            inside = numbers[600::2]
            for number in numbers[::2]:
                other.give_page(number, busy[0] if number >= inside[0] else quiet[0])
            client.begin_update("w", 1)

            def looks() -> list[m.PageList]:
                found = [client.pages("w", 1, 0)]
                while found[-1].more:
                    found.append(client.pages("w", 1, found[-1].through))
                assert all(sum(count for *_, count in one.looked) <= 512 for one in found)
                assert all(sum(count for *_, count in one.looked) <= 32 for one in found if one.rows[1:])
                assert sum(count for one in found for *_, count in one.looked) == 600
                return found

            assert [row for found in looks() for row in found.rows] == []
            said[7] = 1
            rows = [row for found in looks() for row in found.rows]
            assert [row.lease for row in rows] == inside
            assert {(row.pid, row.uid) for row in rows} == {(os.getpid(), os.getuid())}
    close_fds([*quiet, *busy])


@needs_root
def test_s7_pages_are_bounded_as_all_descriptors_of_a_user() -> None:
    with keeper_here(mode=0o666) as server:
        accounts = server.catalogue.accounts
        accounts.quotas = msgspec.structs.replace(accounts.quotas, user_descriptors=4)
        os.chmod(os.path.dirname(server.path), 0o711)
        with KeeperClient.connect(server.path) as owner, updatable(owner):
            with being(GREEDY):
                greedy = KeeperClient.connect(server.path)
            with greedy, memfds(1, seals=PAGE) as (page,):
                held = [greedy.attach("w") for _ in range(6)]
                for one in held:
                    close_fds(one.fds)
                for one in held[:4]:
                    greedy.give_page(one.lease_id, page)
                with pytest.raises(QuotaError, match=f"uid {GREEDY}"):
                    greedy.give_page(held[4].lease_id, page)
                greedy.release([held[0].lease_id])
                greedy.give_page(held[4].lease_id, page)
            until(lambda: server.catalogue.accounts.total.handles == 2, what="the end of the pages")


# -- to each other ---------------------------------------------------------------------------------------------------
@pytest.fixture
def path(server: KeeperServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("VRAM_KEEPER", server.path)
    yield server.path
    close_client(server.path)


def test_s7_a_publisher_whose_words_lie_costs_its_readers_their_time_and_no_more(path: str) -> None:
    with KeeperClient.connect(path) as liar, updatable(liar) as word, vram.attach("w") as lease:
        assert seen(lease)[0] == 1
        word[reading.VERSION] = 2**64 - 1
        assert seen(lease)[0] == lease.wait(newer_than=5) == 2**64 - 1
        word[reading.STATE] = 2**63
        with pytest.raises(TornError):
            seen(lease)
        assert lease.torn
        word[reading.STATE] = reading.UPDATING  # and the keeper hears nothing of it
        with pytest.raises(WaitTimeoutError):
            seen(lease, timeout=0.3)
        assert not any(lease._pages[0].slots)


def test_s7_a_publishers_page_that_is_none_is_refused(path: str) -> None:
    manifest = Manifest(
        MANIFEST_VERSION,
        (MemoryDescriptor("host", (SegmentEntry(MIB2, 1),), 0, MIB2, MIB2),),
        {"a": ArrayEntry(0, 0, 8, "int64", (1,))},
        updatable=True,
    )
    with KeeperClient.connect(path) as liar, memfds(2, MIB2, seals=PAGE) as fds:
        both = [Segment(MIB2)] * 2
        liar.publish("big", both, fds, manifest=encode_manifest(manifest), updatable=True)
        with pytest.raises(ProtocolError, match="a page of words has 4096 bytes"):
            vram.attach("big")
        liar.publish("none", both[:1], fds[:1], manifest=encode_manifest(manifest), updatable=True)
        with pytest.raises(ProtocolError, match="1 file descriptors came, and the manifest names 2"):
            vram.attach("none")
        quiet = Manifest(MANIFEST_VERSION, manifest.memories, manifest.arrays)
        liar.publish("silent", both[:1], fds[:1], manifest=encode_manifest(quiet), updatable=True)
        with pytest.raises(ProtocolError, match="can still be written by others"):
            vram.attach("silent")
