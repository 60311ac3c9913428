"""Readers and publishers of two slots that lie: to the keeper, and to each other (S7, I14)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace
from tests.support.deadlines import until
from tests.support.keeper_here import keeper_here
from tests.support.memfds import memfds
from tests.support.updates import MIB2, PAGE

import vram
from vram.driver import words
from vram.entries import reading
from vram.errors import ProtocolError, QuotaError, TornError, UsageError
from vram.keeper.client import KeeperClient, Segment, close_client
from vram.keeper.server import KeeperServer
from vram.open_files import close_fds
from vram.sharing.descriptor import (
    MANIFEST_VERSION,
    ArrayEntry,
    Manifest,
    MemoryDescriptor,
    SegmentEntry,
    decode_manifest,
    encode_manifest,
)

MEMORY = MemoryDescriptor("host", (SegmentEntry(MIB2, 1),), 0, MIB2, MIB2)
HONEST = Manifest(
    MANIFEST_VERSION, (MEMORY, MEMORY), {"a": ArrayEntry(0, 0, 8, "int64", (1,))}, updatable=True, slots=2
)


@pytest.fixture
def server() -> Iterator[KeeperServer]:
    with keeper_here() as made:
        yield made
        until(lambda: not made.catalogue.leases and not made.connections, what="the end of everybody")


@pytest.fixture
def path(server: KeeperServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("VRAM_KEEPER", server.path)
    yield server.path
    close_client(server.path)


@contextlib.contextmanager
def swapping(client: KeeperClient) -> Iterator[memoryview]:
    """Publish two slots by hand, and yield the words of the publisher."""
    page: list[int] = []
    try:
        mine = words.make(page)
        mine[reading.VERSION] = 1
        with memfds(2, MIB2, seals=PAGE) as fds:
            client.publish(
                "w", [Segment(MIB2), Segment(MIB2), Segment(words.PAGE)], [*fds, *page],
                manifest=encode_manifest(HONEST), updatable=True,
            )  # fmt: skip
        yield mine
        client.remove("w")
    finally:
        close_fds(page)


WRONG: dict[str, dict[str, Any]] = {
    "is never updated": {"updatable": False},
    "has one memory": {"memories": (MEMORY,)},
    "has three memories": {"memories": (MEMORY,) * 3},
    "has a short second slot": {"memories": (MEMORY, MemoryDescriptor("host", MEMORY.segments, 0, MIB2 - 1, MIB2))},
    "has its second slot elsewhere": {"memories": (MEMORY, MemoryDescriptor("GPU-x", MEMORY.segments, 0, MIB2, MIB2))},
    "has its arrays in the second slot": {"arrays": {"a": ArrayEntry(1, 0, 8, "int64", (1,))}},
    "has three slots": {"memories": (MEMORY,) * 3, "slots": 3},
    "has none": {"slots": 0},
}


@pytest.mark.parametrize("what", WRONG)
def test_s7_a_manifest_of_slots_that_cannot_be_is_refused(what: str) -> None:
    assert decode_manifest(encode_manifest(HONEST)) == HONEST
    with pytest.raises(ProtocolError):
        decode_manifest(encode_manifest(replace(HONEST, **WRONG[what])))


def test_s7_a_publisher_whose_words_lie_costs_its_readers_what_they_read_and_no_more(path: str) -> None:
    with KeeperClient.connect(path) as liar, swapping(liar) as word, vram.attach("w") as lease:
        for version in (1, 2, 2**64 - 1, 2**63, 0):
            word[reading.VERSION] = version
            with lease.reading() as found:
                assert found == version
                if version:
                    assert lease.slot == (version - 1) % 2
                    assert lease["a"].shape == (1,)
        section = lease.reading()
        section.__enter__()
        word[reading.VERSION] = 7
        with pytest.raises(TornError):
            section.__exit__(None, None, None)
        for state in (2**63, reading.UPDATING):
            word[reading.STATE] = state
            with pytest.raises((TornError, vram.errors.WaitTimeoutError)), lease.reading(timeout=0.3):
                raise AssertionError("it was admitted")
        assert not any(lease._pages[0].slots)


def test_s7_a_look_leaves_out_who_is_in_one_slot_and_nobody_else(server: KeeperServer) -> None:
    page: list[int] = []
    said = words.make(page)
    with KeeperClient.connect(server.path) as client, swapping(client):
        held = client.attach("w")
        close_fds(held.fds)
        client.give_page(held.lease_id, page[0])
        client.begin_update("w", 1)

        def named(but: int) -> bool:
            return bool(client.pages("w", 1, 0, but).rows)

        assert [named(but) for but in (0, 1, 2)] == [False] * 3
        for one, found in (
            ({0: 1}, [True, False, True]),
            ({511: 2}, [True, True, False]),
            ({3: 3}, [True] * 3),
            ({3: 1, 4: 2}, [True] * 3),
            ({7: 4}, [True] * 3),
            ({8: 2**64 - 1}, [True] * 3),
            ({9: 2**8}, [True] * 3),
            ({0: 1, 300: 1, 511: 1}, [True, False, True]),
        ):
            for index, value in one.items():
                said[index] = value
            assert [named(but) for but in (0, 1, 2)] == found, one
            for index in one:
                said[index] = 0
        client.release([held.lease_id])
        with KeeperClient.connect(server.path) as other, pytest.raises(UsageError, match="not a request"):
            other.pages("w", 1, 0, 3)
    close_fds(page)


def test_s7_both_slots_count_against_what_may_be_published(server: KeeperServer, path: str) -> None:
    accounts = server.catalogue.accounts
    with vram.zeros(MIB2, "uint8", device="host") as array:
        vram.publish("w", {"a": array}, updatable=True, swap=True)
        assert accounts.total.nbytes == 2 * MIB2 + words.PAGE
        accounts.quotas = structs.replace(accounts.quotas, max_bytes=5 * MIB2)
        with pytest.raises(QuotaError):
            vram.publish("x", {"a": vram.copy(array), "b": array}, updatable=True, swap=True)
        vram.publish("x", {"a": array}, updatable=True, swap=True)
        assert accounts.total.nbytes == 4 * MIB2 + 2 * words.PAGE
        for name in ("w", "x"):
            vram.remove(name)
