"""The records of the catalogue, and the effects that it returns to its caller.

The rows in which they are written down are those of :mod:`.rows`. Notes are kept packed, as a map of strings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ..errors import VramError
from .messages import Attach, Publish
from .rules import describe_process

_T = TypeVar("_T")

_encode = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(dict[str, str]).decode
_LITTLE = 128  # bytes of notes, up to which a copy takes no more than a view of the body that they are part of


def packed(notes: dict[str, str]) -> bytes:
    """Return notes as the books keep them: as a dict 512 small ones would take 90 KB."""
    return exact(_encode(notes))


def exact(encoded: bytes) -> bytes:
    """Return a copy in memory of its own size: an encoder leaves room behind its output, up to half as much."""
    return bytes(memoryview(encoded))


@dataclass(slots=True, eq=False)
class Session:
    """One connection: the process at its other end, and everything that ends with it."""

    id: int
    uid: int
    pid: int
    label: str
    host: str = ""  # claimed by the process, as the label is: neither is believed
    leases: dict[int, Lease] = field(default_factory=dict)
    publications: dict[int, Publication] = field(default_factory=dict)
    waiters: dict[int, Waiter] = field(default_factory=dict)  # by the client's number of the call
    claims: dict[int, Claim] = field(default_factory=dict)
    watches: dict[tuple[str, int], Version] = field(default_factory=dict)
    written: dict[tuple[str, int], Version] = field(default_factory=dict)  # versions that it may update in place
    peer: int = 0  # under which a guardian has the socket

    @property
    def granted(self) -> Iterator[Lease | Claim]:
        """Yield its leases and claims."""
        yield from self.leases.values()
        yield from self.claims.values()

    def __str__(self) -> str:
        return describe_process(self.pid, self.uid, self.label, self.host)


@dataclass(slots=True, eq=False)
class Version:
    """One version of a name. `handles` counts descriptors, `notes` is the packed meta; `body` is carried, not read."""

    name: str
    number: int
    owner: int
    token: Any
    nbytes: int
    handles: int
    writable: bool
    notes: bytes | memoryview
    published: float
    expires: float | None
    publisher_pid: int
    publisher_label: str
    body: Any = b"\xc0"  # nothing, until whoever has the publication settles it
    leases: dict[int, Lease] = field(default_factory=dict)
    watchers: dict[int, Session] = field(default_factory=dict)
    holders: dict[int, int] = field(default_factory=dict)  # how many leases each user has on it
    withdrawn: bool = False
    revoked: bool = False  # and its readers were asked to let go
    publisher_host: str = ""
    id: int = 0
    writer: Session | None = None  # who may update it in place: the connection that published it so
    updates: int = 0  # 1 from the beginning, and 1 more for each that was whole; 0: not to be updated
    updating: bool = False
    torn: bool = False  # the last update was begun and not finished
    publisher: int = 0  # the session that published it, which may be gone
    parked: bool = False  # its bytes are in memory of the host, until somebody wakes it
    move: Lease | None = None  # by which they are being moved, and with which that ends at the latest
    pieces: dict[int, int] = field(default_factory=dict)  # its memory that others may have too, see Kept in accounts
    known: int = 0  # so many of its bytes are in those
    places: list[tuple[str, int]] | None = None  # the bytes on each device, once somebody asked

    @property
    def loose(self) -> int:
        """The bytes that no other version has, as far as can be known."""
        return self.nbytes - self.known

    @property
    def meta(self) -> dict[str, str]:
        """The metadata that its publisher gave."""
        return _unpack(self.notes)

    def is_to_wake(self, session: Session) -> bool:
        """Whether a session has a lease on it that sleeps."""
        return any(lease.session is session and lease.asleep for lease in self.leases.values())

    def settle(self, body: bytes) -> None:
        """Keep the encoded entry that readers get, which has the memory of its own size (:func:`exact`); the notes are
        kept once, where it ends with them."""
        if len(self.notes) > _LITTLE and body.endswith(self.notes):
            self.notes = memoryview(body)[-len(self.notes) :]
        self.body = msgspec.Raw(body)
        self.places = None


@dataclass(slots=True, eq=False)
class Lease:
    """The right of one connection to use one version."""

    id: int
    session: Session
    version: Version
    access: str
    since: float
    call: int = 0  # of its holder, by which it was granted
    page: Any = None  # the words in which its holder says that it reads what may be updated
    purpose: str = ""  # "park" or "wake", of who may move the bytes of its version; "over" once it may not any more
    asleep: bool = False  # nothing is mapped by it, so that the version may be parked


@dataclass(slots=True, eq=False)
class Publication:
    """A version on its way, as it was `asked` for: its room is reserved, nobody sees it. Its `notes` are packed."""

    id: int
    session: Session
    asked: Publish
    nbytes: int
    handles: int
    entries: int
    notes: bytes
    pieces: dict[int, int] = field(default_factory=dict)  # as of a version, of what has arrived
    known: int = 0

    @property
    def loose(self) -> int:
        """The bytes that no version has, as far as can be known."""
        return self.nbytes - self.known


class Claim(Struct, eq=False, array_like=True, tag=7):
    """The right and duty of one session to publish a name. It is its own row."""

    id: int
    session: int
    name: str
    since: float
    call: int = 0  # of its holder, by which it was granted


class Waiter(Struct, eq=False, array_like=True, tag=8):
    """An attach that waits: what was `asked`, and until when. The metadata that it expects is kept packed.
    It is its own row."""

    order: int
    session: int
    asked: Attach
    expected: bytes | None = None
    deadline: float | None = None

    @property
    def notes(self) -> dict[str, str]:
        """The metadata that a version must have; empty if any will do."""
        return {} if self.expected is None else _unpack(self.expected)


@dataclass(frozen=True, slots=True)
class Free:
    """This memory has no claim left."""

    token: Any


@dataclass(frozen=True, slots=True)
class Answered:
    """The end of an attach that waited: its lease, the claim to publish, or the error that it is refused with."""

    session: Session
    call: int
    result: Lease | Claim | VramError


@dataclass(frozen=True, slots=True)
class Notify:
    """An event of a version that the session watches; `current` is the number of the current version, or 0."""

    session: Session
    name: str
    version: int
    reason: str
    current: int


Effect = Free | Answered | Notify


@dataclass(slots=True, eq=False)
class Name:
    """The state of a name; it exists while the name has a version that is current or leased."""

    name: str
    current: Version | None = None
    older: dict[int, Version] = field(default_factory=dict)  # superseded or withdrawn, and still leased
    last: int = 0  # the number of its last version

    def beginning(self, number: int) -> Iterator[Version]:
        """Yield its versions from such a number on, oldest first."""
        yield from beginning(self.older, number)
        if self.current is not None and self.current.number >= number:
            yield self.current


def beginning(things: dict[int, _T], key: int) -> Iterator[_T]:
    """Yield the values of a dict whose keys grow, from a key on. It may not change meanwhile."""
    keys = list(things)
    return map(things.__getitem__, keys[bisect_left(keys, key) :])


def record_from(kind: Callable[..., _T], source: object, /, **others: Any) -> _T:
    """Return a record of `kind`, a dataclass or Struct, with the fields that `source` has by the same names.
    Properties of `source` count as fields; `others` override."""
    other: Any = type(source)
    names, values = _shared(kind, other)
    return kind(**{**dict(zip(names, values(source), strict=True)), **others})


@cache
def _shared(kind: Any, source: Any) -> tuple[tuple[str, ...], Callable[[object], tuple[Any, ...]]]:
    """The names of the fields of one kind that the other has too, and what gets their values."""
    names = tuple(name for name in kind.__match_args__ if hasattr(source, name))
    if len(names) < 2:  # of which attrgetter makes no tuple
        return names, lambda one: tuple(getattr(one, name) for name in names)
    return names, attrgetter(*names)
