"""Sizes that a publisher states wrongly: of its arrays, and of a manifest that comes as memory (S7)."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator

import msgspec
import pytest
from tests.support.memfds import READ_ONLY, make_memfd
from tests.support.spoiled_descriptors import _Nobody

from vram.driver import libc
from vram.entries import manifests
from vram.entries.lease import Lease
from vram.entries.manifests import read_sealed
from vram.errors import ProtocolError
from vram.keeper.client import Attachment, Segment
from vram.sharing.channel import Channel
from vram.sharing.descriptor import (
    MANIFEST_VERSION,
    MAX_MANIFEST,
    ArrayEntry,
    Manifest,
    MemoryDescriptor,
    SegmentEntry,
    encode_manifest,
)

GRANULE = 2 << 20
LENGTH = 8  # bytes in front of a manifest that comes as memory


@pytest.fixture
def client() -> Iterator[_Nobody]:
    one, other = Channel.pair()
    with one, other, _Nobody(one) as client:
        yield client


# -- arrays ---------------------------------------------------------------------------------------------------------
def lease(client: _Nobody, *arrays: ArrayEntry) -> Lease:
    """Attach arrays that are said to lie in the first 4096 bytes of a granule."""
    memory = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, 4096, GRANULE)
    data = encode_manifest(Manifest(MANIFEST_VERSION, (memory,), {str(n): entry for n, entry in enumerate(arrays)}))
    fds = [make_memfd(GRANULE, seals=READ_ONLY)]
    return Lease(client, Attachment(1, "n", 1, 0, (Segment(GRANULE),), fds, data, None, {}, False), "r")


@pytest.mark.parametrize(
    ("nbytes", "dtype", "shape"),
    [
        (16, "uint8", (8192,)),  # beyond what was published, and within what is mapped
        (16, "uint8", (17,)),
        (16, "uint8", (15,)),
        (16, "float32", (16,)),
        (4096, "uint8", ()),
        (0, "uint8", (1,)),
        (1, "uint8", (0,)),
        (8, "uint8", (2**61, 2**61, 8)),
    ],
)
def test_s7_an_array_of_other_bytes_than_stated_is_refused(
    client: _Nobody, nbytes: int, dtype: str, shape: tuple[int, ...]
) -> None:
    with lease(client, ArrayEntry(0, 0, nbytes, dtype, shape), ArrayEntry(0, 0, 16, "uint8", (16,))) as found:
        with pytest.raises(ProtocolError, match=f"not its {nbytes} bytes"):
            found["0"]
        assert found["1"].nbytes == 16, "the others are as good as before"


# -- a manifest that comes as memory --------------------------------------------------------------------------------
def sealed(said: int, data: bytes = b"", nbytes: int = GRANULE) -> int:
    """Return memory as a publisher hands it over, which says that so many bytes of a manifest are in it."""
    fd = os.memfd_create("manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, struct.pack("<Q", said) + data, 0)
    fcntl.fcntl(fd, libc.F_ADD_SEALS, READ_ONLY)
    return fd


ROOM = GRANULE - LENGTH


def test_s7_what_fits_is_read_to_its_last_byte() -> None:
    """Or what follows would show nothing."""
    for said in (0, 1, ROOM):
        fd = sealed(said, os.urandom(ROOM))
        assert read_sealed(fd) == os.pread(fd, said, LENGTH)
        os.close(fd)


@pytest.mark.parametrize(
    "said", [ROOM + 1, GRANULE, MAX_MANIFEST, MAX_MANIFEST + 1, 2**47, 2**63 - 1, 2**63, 2**64 - 1]
)
def test_s7_a_manifest_longer_than_its_memory_is_refused(said: int) -> None:
    fd = sealed(said)
    try:
        with pytest.raises(ProtocolError, match=f"a manifest of {said} bytes is said to be in {GRANULE} bytes"):
            read_sealed(fd)
    finally:
        os.close(fd)


def test_s7_a_manifest_longer_than_any_is_refused_also_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "MAX_MANIFEST", GRANULE)  # a smaller one, so that nobody reads 256 MiB
    for said in (GRANULE, GRANULE + 1):
        fd = sealed(said, nbytes=3 * GRANULE)
        try:
            if said <= GRANULE:
                assert len(read_sealed(fd)) == GRANULE
            else:
                with pytest.raises(ProtocolError, match=f"a manifest of {said} bytes"):
                    read_sealed(fd)
        finally:
            os.close(fd)


def test_s7_a_manifest_in_what_is_no_memory_is_refused() -> None:
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb"), pytest.raises(ProtocolError, match="no shared memory"):
        read_sealed(reader)


def test_s7_a_lease_on_a_manifest_that_lies_is_given_back(client: _Nobody) -> None:
    data = msgspec.msgpack.encode(Manifest(MANIFEST_VERSION, (), {}))
    for number, said in enumerate((ROOM + 1, 2**64 - 1, len(data) - 1)):
        fds = [sealed(said, data)]
        attachment = Attachment(number, "n", 1, 0, (), fds, b"", fds[0], {}, False)
        with pytest.raises(ProtocolError):
            Lease(client, attachment, "r")
        assert client.returned == list(range(number + 1))
