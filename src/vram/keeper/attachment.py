"""Segments, attachments and claims: what a client gives to publish and gets by attaching, independent of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ProtocolError
from ..spec import HandleKind
from . import messages as m


class Segment(NamedTuple):
    """The memory behind one descriptor: bytes, kind of handle, and ``"host"`` or the UUID of its GPU."""

    size: int
    kind: int = int(HandleKind.POSIX_FD)
    device: str = "host"


@dataclass(slots=True)
class Attachment:
    """A lease and its descriptors, both the caller's: ``fds[0]`` is the manifest's if `manifest_fd` is not None.
    `moves` is the right to move the bytes; then `has_publisher` says that another connection published it and lives."""

    lease_id: int
    name: str
    version: int
    owner: int
    segments: Sequence[m.SegmentRow]
    fds: list[int]
    manifest: bytes
    manifest_fd: int | None
    meta: dict[str, str]
    writable: bool
    moves: bool = False
    has_publisher: bool = False


@dataclass(frozen=True, slots=True)
class PublishClaim:
    """The right to publish `name`: pass `id` to publish, or abandon it. After `seconds` it passes to the next waiter
    (None: as soon as there is a waiter); the name may still be published until another client has."""

    id: int
    name: str
    seconds: float | None = None


def check_total(reply: m.Attached) -> None:
    """Raise :class:`ProtocolError` unless as many descriptors are to come as the entry has."""
    total = len(reply.entry.segments) + reply.entry.manifest_fd
    if reply.total != total:
        raise ProtocolError(f"a lease is said to come with {reply.total} descriptors for {total}")


def attachment(reply: m.Attached, fds: list[int]) -> Attachment:
    """Read a lease; raises :class:`ProtocolError` unless its descriptors are as many as it says."""
    entry = reply.entry
    total, devices = len(entry.segments) + entry.manifest_fd, entry.devices
    if len(fds) != total:
        raise ProtocolError(f"a lease came with {len(fds)} descriptors for {total}")
    for segment in entry.segments:
        if segment.device >= len(devices):
            raise ProtocolError(f"a lease came with memory on device {segment.device} of {len(devices)}")
    return Attachment(
        lease_id=reply.lease,
        name=entry.name,
        version=entry.version,
        owner=entry.owner,
        segments=entry.segments,
        fds=fds,
        manifest=entry.manifest,
        manifest_fd=fds[0] if entry.manifest_fd else None,
        meta=entry.meta,
        writable=entry.writable,
        moves=reply.moves,
        has_publisher=reply.has_publisher,
    )
