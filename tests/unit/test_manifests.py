"""What a lease's manifest says is read once, and believed no more the second time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vram.entries import manifests
from vram.errors import ProtocolError
from vram.keeper import messages as m
from vram.keeper.client import Attachment, KeeperClient, Segment
from vram.sharing.channel import Channel
from vram.sharing.descriptor import (
    MANIFEST_VERSION,
    ArrayEntry,
    Manifest,
    MemoryDescriptor,
    SegmentEntry,
    encode_manifest,
)

GRANULE = 2 << 20


@pytest.fixture
def client() -> Iterator[KeeperClient]:
    one, other = Channel.pair()
    with one, other, KeeperClient(one, "/nowhere", "", m.Welcome(0)) as client:
        yield client


def leased(number: int, data: bytes) -> Attachment:
    """A lease on one segment, described by `data`."""
    return Attachment(number, "w", number, 0, (Segment(GRANULE),), [], data, None, {}, False)


def described(arrays: int) -> bytes:
    memory = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, GRANULE, GRANULE)
    entries = {f"layer.{number}": ArrayEntry(0, 0, 8, "float32", (2,)) for number in range(arrays)}
    return encode_manifest(Manifest(MANIFEST_VERSION, (memory,), entries))


def test_a_short_manifest_that_comes_again_is_not_read_again(client: KeeperClient) -> None:
    first = manifests.read_manifest(client, leased(1, described(2)))
    assert manifests.read_manifest(client, leased(2, described(2))) is first
    other = manifests.read_manifest(client, leased(3, described(3)))
    assert (list(first.arrays), list(other.arrays)) == (["layer.0", "layer.1"], ["layer.0", "layer.1", "layer.2"])


def test_a_long_one_is_not_remembered(client: KeeperClient) -> None:
    data = described(500)
    assert len(data) > 4096
    assert manifests.read_manifest(client, leased(1, data)) is not manifests.read_manifest(
        client, leased(2, bytes(bytearray(data)))
    )


def test_s7_what_is_wrong_is_refused_each_time(client: KeeperClient) -> None:
    wrong = described(2)[:-1]
    for number in (1, 2):
        with pytest.raises(ProtocolError, match="not a manifest"):
            manifests.read_manifest(client, leased(number, wrong))
