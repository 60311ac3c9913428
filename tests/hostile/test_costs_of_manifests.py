"""What another user says of its entry, and what reading that costs whoever attaches, follows or lists it (S7)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
from tests.support.keeper_here import open_to_all
from tests.support.memfds import make_memfd
from tests.support.other_users import needs_root
from tests.support.users import GREEDY, being

import vram
from vram.entries.manifests import sealed_copy
from vram.errors import CapacityError, MismatchError, ProtocolError
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.leases import Segment
from vram.sharing.descriptor import (
    MANIFEST_VERSION,
    MAX_ADDRESSES,
    STRANGERS_ADDRESSES,
    STRANGERS_ARRAYS,
    STRANGERS_MANIFEST,
    ArrayEntry,
    Manifest,
    MemoryDescriptor,
    SegmentEntry,
)

pytestmark = [
    pytest.mark.slow,
    needs_root,
]  # goes with the counts in manifests
SPARSE = 64 << 20  # bytes that are stated, and taken by nobody
MIB2 = 2 << 20


@pytest.fixture
def path() -> Iterator[str]:
    with open_to_all() as found:
        yield found
        close_client(found)


@pytest.fixture
def stranger(path: str) -> Iterator[KeeperClient]:
    with being(GREEDY):
        client = KeeperClient.connect(path)
    with client:
        yield client


def publish(client: KeeperClient, name: str, arrays: int, *, nbytes: int = 8, dimensions: int = 1) -> None:
    """Publish one array, and as many empty ones besides as are asked for, as a program that means harm does."""
    memory = MemoryDescriptor("host", (SegmentEntry(SPARSE, 1),), 0, SPARSE, SPARSE)
    empty = ArrayEntry(0, 0, 0, "uint8", (0,) * dimensions)
    entries = {"x": ArrayEntry(0, 0, nbytes, "uint8", (nbytes,)), **{str(n): empty for n in range(arrays - 1)}}
    data = msgspec.msgpack.encode(Manifest(MANIFEST_VERSION, (memory,), entries, serials=(7,)))
    fd = make_memfd(SPARSE)
    allocation = sealed_copy(data)
    manifest = allocation.export()
    try:
        client.publish(name, [Segment(SPARSE)], [fd], manifest_fd=manifest, writable=True)
    finally:
        os.close(fd)
        allocation.close()


def test_s7_of_another_user_no_more_is_read_than_takes_a_moment(path: str, stranger: KeeperClient) -> None:
    publish(stranger, "w", STRANGERS_ARRAYS + 1)
    with pytest.raises(ProtocolError, match=f"names {STRANGERS_ARRAYS + 1} arrays; at most {STRANGERS_ARRAYS} can be"):
        vram.attach("w", keeper=path, timeout=0)
    assert vram.entry("w", keeper=path).arrays is None
    with KeeperClient.connect(path) as mine:
        publish(mine, "mine", STRANGERS_ARRAYS + 1)  # who runs this may say as much as ever
        with vram.attach("mine", keeper=path) as lease:
            assert len(lease) == STRANGERS_ARRAYS + 1


def test_s7_of_another_user_what_is_too_long_is_not_read(path: str, stranger: KeeperClient) -> None:
    publish(stranger, "w", STRANGERS_MANIFEST // 64, dimensions=64)
    with pytest.raises(ProtocolError, match=rf"at most {STRANGERS_MANIFEST} are read"):
        vram.attach("w", keeper=path, timeout=0)


def test_s7_as_much_as_is_read_of_another_user_can_be_attached(path: str, stranger: KeeperClient) -> None:
    publish(stranger, "w", STRANGERS_ARRAYS)
    with vram.attach("w", keeper=path) as lease:
        assert len(lease) == STRANGERS_ARRAYS


def test_s7_another_user_has_no_more_than_an_eighth_of_the_addresses_set_aside(
    path: str, stranger: KeeperClient
) -> None:
    each = MAX_ADDRESSES // 128
    count = STRANGERS_ADDRESSES // each
    fd = make_memfd(MIB2)
    try:
        for name, memories in (("much", count), ("more", count + 1)):
            manifest = Manifest(
                MANIFEST_VERSION,
                tuple(MemoryDescriptor("host", (SegmentEntry(MIB2, 1),), 0, MIB2, each) for _ in range(memories)),
                {"x": ArrayEntry(0, 0, 8, "uint8", (8,))},
                serials=tuple(range(memories)),
            )
            stranger.publish(
                name,
                [Segment(MIB2)] * memories,
                [fd] * memories,
                manifest=msgspec.msgpack.encode(manifest),
                writable=True,
            )
    finally:
        os.close(fd)
    vram.attach("much", keeper=path, follow=True).close()
    with pytest.raises(CapacityError, match="without follow=True"):
        vram.attach("more", keeper=path, follow=True)
    vram.attach("more", keeper=path).close()


def test_s7_what_is_smaller_and_has_no_dimension_has_not_grown(path: str, stranger: KeeperClient) -> None:
    memory = MemoryDescriptor("host", (SegmentEntry(MIB2, 1),), 0, MIB2, MIB2)
    fd = make_memfd(MIB2)
    try:
        for nbytes in (8, 4):
            manifest = Manifest(MANIFEST_VERSION, (memory,), {"x": ArrayEntry(0, 0, nbytes, "?", ())}, serials=(1,))
            data = msgspec.msgpack.encode(manifest)
            stranger.publish("w", [Segment(MIB2)], [fd], manifest=data, writable=True)
            if nbytes == 8:
                lease = vram.attach("w", keeper=path)
    finally:
        os.close(fd)
    with lease, pytest.raises(MismatchError, match="has 4 bytes there, and 8 here"):
        lease.refresh()
