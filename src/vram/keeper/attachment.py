"""Segments, attachments and claims: what a client gives to publish and gets by attaching, independent of the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
