"""Manifests: what describes the arrays of an entry, in a message or in sealed memory of its own."""

from __future__ import annotations

import functools
import os
import struct

from .. import driver as drivers
from ..errors import ProtocolError
from ..keeper.client import Attachment, KeeperClient
from ..memory import PhysicalAllocation, Received, Region
from ..open_files import is_memory
from ..sharing.descriptor import MAX_MANIFEST, Manifest, decode_manifest, encode_manifest, most_manifest
from ..spec import HOST, HandleKind, round_up

_LENGTH = struct.Struct("<Q")
_SHORT = 4096  # bytes of a manifest that is remembered
_GROWN = 64 << 10  # bytes, besides, that the manifest of a version may have more than that of one it has grown from


def sealed_copy(data: bytes) -> PhysicalAllocation:
    """Return sealed host memory that holds `data`, its length in front: a manifest too long for a message."""
    driver = drivers.get(HOST)
    with Region.create(
        HOST, driver=driver, capacity=_LENGTH.size + len(data), nbytes=_LENGTH.size + len(data), inherited=False
    ) as region:
        driver.copy_in(region.address, memoryview(_LENGTH.pack(len(data)) + data))
        region.freeze()
        (allocation,), _ = region.segments(0, region.nbytes)
        return allocation


def sealed_size(data: bytes) -> int:
    """Return the bytes of memory that :func:`sealed_copy` takes for them."""
    granule = drivers.get(HOST).mem_granularity(HOST, HandleKind.POSIX_FD).recommended
    return round_up(_LENGTH.size + len(data), granule)


def read_manifest(client: KeeperClient, attachment: Attachment, *, older: Manifest | None = None) -> Manifest:
    """Return the manifest of a lease, whose descriptors are lent. It is read only: other leases may share it.
    With `older`, a manifest of another user that is much longer than that is refused with ProtocolError."""
    nbytes, count = sum([segment.size for segment in attachment.segments]), len(attachment.segments)
    data = attachment.manifest
    if attachment.manifest_fd is None and len(data) <= _SHORT:
        return _read_again(data, nbytes, count)
    strange = is_strange(client, attachment)
    longest = most_manifest(nbytes, strange=strange)
    if older is not None and strange:
        longest = min(longest, 2 * len(encode_manifest(older)) + _GROWN)
    if attachment.manifest_fd is not None:
        return _decoded(read_sealed(attachment.fds[0], longest), nbytes, count, strange)
    if len(data) > longest:
        raise ProtocolError(f"a manifest of {len(data)} bytes; at most {longest} are read of what may have grown")
    return _decoded(data, nbytes, count, strange)


def _decoded(data: bytes | bytearray, nbytes: int, count: int, strange: bool = False) -> Manifest:
    """Read a manifest that came with so many bytes of memory, and so many descriptors of it."""
    manifest = decode_manifest(data, nbytes, strange=strange)
    if manifest.descriptors != count:
        raise ProtocolError(f"{count} file descriptors came, and the manifest names {manifest.descriptors}")
    return manifest


def is_strange(client: KeeperClient, attachment: Attachment) -> bool:
    """Whether what a lease is on was published, or is lent, by another user than this one and root."""
    # A keeper has asked the kernel who it was; a lender says so of itself.
    owner = client.server().uid if client.lends else attachment.owner
    return owner not in (0, os.geteuid())


# An entry that is attached again and again says the same each time, and reading it is a twentieth of an attach. The
# result is the meaning of these very bytes beside so much memory, whoever sent them: nothing else is taken from one
# lease to another.
_read_again = functools.lru_cache(maxsize=64)(_decoded)


def read_sealed(fd: int, longest: int = MAX_MANIFEST) -> bytearray:
    """Return the at most `longest` bytes that :func:`sealed_copy` stored in another process; they are untrusted.
    `fd` is lent."""
    if not is_memory(fd):  # nothing else is asked for its size: a file system in user space may never answer
        raise ProtocolError("a manifest came as a descriptor of something that is no shared memory (memfd)")
    longest = min(longest, MAX_MANIFEST)
    driver = drivers.get(HOST)
    granule = driver.mem_granularity(HOST, HandleKind.POSIX_FD).minimum
    most = round_up(_LENGTH.size + longest, granule)
    nbytes = min(max(os.fstat(fd).st_size // granule, 1) * granule, most)
    with Region.from_allocations(driver, [Received(fd, nbytes)], managed=True) as region:
        head = bytearray(_LENGTH.size)
        driver.copy_out(memoryview(head), region.address)
        (size,) = _LENGTH.unpack(head)
        if size > min(region.nbytes - _LENGTH.size, longest):
            raise ProtocolError(
                f"a manifest of {size} bytes is said to be in {region.nbytes} bytes of memory; at most {longest} are "
                f"read of such an entry"
            )
        data = bytearray(size)
        driver.copy_out(memoryview(data), region.address + _LENGTH.size)
        return data
