"""The catalogue's books as plain data, for a keeper that takes over; tokens become numbers.

Other versions of this library read and write it: fields are only added, at the end, with defaults. Fields that a row
has by the same name as its record (:mod:`.records`) move by themselves. The bodies of versions, most of all that moves,
go ahead in parts while the other keeper serves (:class:`BodyRow`), to a successor that can take them so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from ..errors import ProtocolError
from .catalogue import CLAIM_TIMEOUT, Catalogue
from .fields import record_from
from .limits import Quotas
from .ordered import Ordered
from .records import (
    Claim,
    ClaimRow,
    Lease,
    Move,
    Name,
    Publication,
    PublicationRow,
    Session,
    SessionRow,
    Version,
    VersionRow,
    Waiter,
    WaiterRow,
)
from .rules import name_of

MAX_PART = 1 << 20  # bytes of bodies that go ahead at once, but for the end of the last: a millisecond or so
_MOST_OF_PART = 1024  # of them
_STEP = 1024  # rows that are written or read between two times that progress is told
ROUNDS = 8  # over what was published since the round before, until the rest goes with the books, however much it is

_NOTHING, _NO_NOTES = b"\xc0", Raw(b"\x80")
_MAPS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])  # the first byte of any
_T = TypeVar("_T")

Bodies = Mapping[tuple[str, int], tuple[bytes, bytes]]  # by name and number: the body of a version, and its packed meta


class Books(Struct, array_like=True):
    """Everything a catalogue knows."""

    next_id: int
    floor: int
    last: dict[str, int]
    numbers: list[tuple[str, int]]
    sessions: list[SessionRow]
    versions: list[VersionRow]
    publications: list[PublicationRow]
    waiters: list[WaiterRow]
    claims: list[ClaimRow]
    passed: list[tuple[int, int, str, int]] = []  # session, claim, name, number
    sizes: list[tuple[int | None, dict[int, int]]] = []  # see Accounts.grown


class BodyRow(Struct, array_like=True):
    """A body that goes ahead of the books: of which version it is, and its bytes; so many of the last are its meta."""

    name: str
    number: int
    nbytes: int
    meta: int


_body_rows = msgspec.msgpack.Decoder(list[BodyRow])


def join_bodies(versions: Iterable[Version]) -> tuple[bytes, list[memoryview]]:
    """Return which versions these are, encoded, and their bodies."""
    rows, bodies = [], []
    for one in versions:
        bodies.append(memoryview(one.body))
        rows.append(BodyRow(one.name, one.number, len(bodies[-1]), len(one.notes)))
    return msgspec.msgpack.encode(rows), bodies


def split_bodies(head: bytes, rest: memoryview) -> dict[tuple[str, int], tuple[bytes, bytes]]:
    """Return the bodies and notes that :func:`join_bodies` was given, by name and number."""
    try:
        rows = _body_rows.decode(head)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"what the running keeper says of its entries is unreadable: {error}") from None
    if sum(row.nbytes for row in rows) != len(rest) or not all(0 < row.meta <= row.nbytes for row in rows):
        raise ProtocolError("the running keeper sends other bodies of entries than it says")
    found, end = {}, 0
    for row in rows:
        start, end = end, end + row.nbytes
        found[row.name, row.number] = (bytes(rest[start:end]), bytes(rest[end - row.meta : end]))
    return found


class Ahead:
    """The versions whose bodies went ahead to a process that is about to take over: in the order in which they came,
    so that the next part is found without a look at all that there are."""

    __slots__ = ("_last", "_rounds", "_until")

    def __init__(self) -> None:
        self._last = 0  # serial number of the last that went ahead,
        self._until = 0  # and of the last that goes in this round
        self._rounds = 0

    def __contains__(self, version: object) -> bool:
        return isinstance(version, Version) and version.serial <= self._last

    def part(self, catalogue: Catalogue) -> list[Version]:
        """Return the versions whose bodies go next; none if the rest, which may be some, goes with the books."""
        while True:
            if self._last >= self._until:
                new = catalogue.versions_after(self._last)
                _part(new)
                if self._rounds >= ROUNDS or next(new, None) is None:
                    return []  # it is no more than one part, or too much is published meanwhile
                self._rounds += 1
                self._until = catalogue.latest
            part = _part(catalogue.versions_after(self._last), self._until)
            if part:
                self._last = part[-1].serial
                return part
            self._last = self._until  # all of the rest were freed


def _part(versions: Iterator[Version], until: int | None = None) -> list[Version]:
    """Return those whose bodies are one part."""
    part: list[Version] = []
    room = MAX_PART
    for one in versions:
        if until is not None and one.serial > until:
            break
        part.append(one)
        room -= len(memoryview(one.body))
        if room <= 0 or len(part) >= _MOST_OF_PART:
            break
    return part


def _in_steps(rows: Iterable[_T], tell: Callable[[], None]) -> Iterator[_T]:
    """Yield all of them, and tell that there is progress now and then."""
    for count, row in enumerate(rows, start=1):
        yield row
        if not count % _STEP:
            tell()


def silent() -> None:
    """Tell nobody."""


def save(
    catalogue: Catalogue,
    number: Callable[[Any], int],
    ahead: Container[Version] = (),
    tell: Callable[[], None] = silent,
) -> Books:
    """Return the books of a catalogue. `number` gives each token and page the number that :func:`restore` finds it by.
    The bodies of versions in `ahead` are left out. `tell` is called now and then."""
    sessions = catalogue.sessions.values()
    return Books(
        next_id=next(catalogue._ids),
        floor=catalogue._floor,
        last=dict(catalogue._last),
        numbers=list(catalogue._numbers.items()),
        sessions=[record_from(SessionRow, one) for one in sessions],
        versions=[
            record_from(
                VersionRow,
                one,
                current=catalogue.is_current(one),
                token=number(one.token),
                leases=[(lease.id, lease.session.id, lease.access, lease.since) for lease in one.leases.values()],
                watchers=list(one.watchers),
                writing=0 if one.writer is None else one.writer.id,
                pages=[(lease.id, number(lease.page)) for lease in one.leases.values() if lease.page is not None],
                purposes=[(lease.id, lease.purpose) for lease in one.leases.values() if lease.purpose],
                ended=[(lease.id, lease.ended) for lease in one.leases.values() if lease.ended],
                moving=None if one.move is None else (one.move.lease.id, one.move.since, one.move.until),
                **(
                    {"body": b"", "meta": _NO_NOTES}
                    if one in ahead
                    else {"body": bytes(one.body), "meta": Raw(one.notes)}
                ),
            )
            for one in _in_steps(catalogue.all_versions(), tell)
        ],
        publications=[
            record_from(PublicationRow, one, session=session.id, meta=Raw(one.notes))
            for session in sessions
            for one in session.publications.values()
        ],
        waiters=[
            record_from(
                WaiterRow, one, session=one.session.id, expect=Raw(_NOTHING if one.expected is None else one.expected)
            )
            for line in catalogue._waiters.values()
            for one in line.values()
        ],
        claims=[record_from(ClaimRow, one, session=one.session.id) for one in catalogue.claims.values()],
        passed=[
            (session.id, claim, name, last) for session in sessions for claim, (name, last) in session.passed.items()
        ],
        sizes=catalogue.accounts.grown(
            itertools.chain(
                catalogue.all_versions(), *(one.publications.values() for one in sessions if one.publications)
            )
        ),
    )


def restore(
    books: Books,
    token: Callable[[int], Any],
    quotas: Quotas,
    *,
    keeper_uid: int,
    nobody: int,
    claim_timeout: float = CLAIM_TIMEOUT,
    name_of: Callable[[int], str] = name_of,
    bodies: Bodies | None = None,
    tell: Callable[[], None] = silent,
) -> tuple[Catalogue, dict[int, Publication]]:
    """Return a catalogue that goes on where another stopped, and its publications under way by id.
    `bodies` went ahead, perhaps more than are needed; what exceeds `quotas` stays. `tell` is called now and then."""
    made = Catalogue(quotas, keeper_uid=keeper_uid, nobody=nobody, claim_timeout=claim_timeout, name_of=name_of)
    made._ids = itertools.count(books.next_id)
    made._floor = books.floor
    made._last = dict(books.last)
    made._numbers.update(books.numbers)
    made.sessions.update((row.id, record_from(Session, row)) for row in books.sessions)
    for one in _in_steps(books.versions, tell):
        _restore_version(made, one, token, bodies or {})
    made._sorted.sort()
    publications = {}
    for entry in books.publications:
        session = made.sessions[entry.session]
        publication = record_from(Publication, entry, session=session, notes=_notes(entry.meta), body=None)
        publications[entry.id] = session.publications[entry.id] = publication
        made.accounts.keep(session.uid, publication, entry.entries)
    made.accounts.grow(books.sizes)
    for wait in _in_steps(books.waiters, tell):
        expected = None if bytes(wait.expect) == _NOTHING else _notes(wait.expect)
        waiter = record_from(Waiter, wait, session=made.sessions[wait.session], expected=expected)
        made.line_up(waiter)
        if waiter.deadline is not None:
            made._schedule(waiter.deadline, waiter)
    for held in books.claims:
        claim = record_from(Claim, held, session=made.sessions[held.session])
        made.claims[claim.id] = made._claim_of[claim.name] = claim.session.claims[claim.id] = claim
        if claim.until is not None:
            made._schedule(claim.until, claim)
    for owner, number, name, last in books.passed:
        made.sessions[owner].passed[number] = (name, last)
    return made, publications


def _notes(moved: Raw) -> bytes:
    """Return notes in memory of their own, not in that of all that moved; as a dict they would take twenty times it."""
    notes = bytes(moved)
    if notes[0] not in _MAPS:
        raise ProtocolError("the running keeper hands over notes that are none")
    return notes


def _restore_version(made: Catalogue, row: VersionRow, token: Callable[[int], Any], bodies: Bodies) -> None:
    body, notes = (row.body, b"") if row.body else bodies.get((row.name, row.number), (b"", b""))
    if not body:
        raise ProtocolError(f"{row.name!r} version {row.number} came without its body")
    notes = notes or _notes(row.meta)
    version = record_from(Version, row, token=token(row.token), notes=notes, body=Raw(), leases=Ordered(), watchers={})
    version.settle(body)
    known = made._names.setdefault(row.name, Name(row.name))
    if row.current:
        known.current = version
        made._sorted.append(row.name)
    else:
        known.older[row.number] = version
    made.enter(version)
    if row.current:
        made.accounts.keep(row.owner, version, 1)
    else:  # counts against those who lease it
        made.accounts.total.keep(version)
    if row.expires is not None:
        made._schedule(row.expires, version)
    if row.writing:
        version.writer = made.sessions[row.writing]
        version.writer.written[version.name, version.number] = version
    for number, owner, access, since in row.leases:
        made.book(Lease(number, made.sessions[owner], version, access, since))
    for number, index in row.pages:
        lease = version.leases[number]
        lease.page = token(index)
        made.accounts.add(lease.session.uid, lease.page.nbytes, 0, 1)
    for number, purpose in row.purposes:
        version.leases[number].purpose = purpose
    for number, ended in row.ended:
        version.leases[number].ended = ended
    if row.moving is not None:
        number, since, until = row.moving
        version.move = Move(version.leases[number], since, until)
        if until is not None:
            made._schedule(until, version.move)
    for watcher in row.watchers:
        session = made.sessions[watcher]
        version.watchers[watcher] = session
        session.watches[row.name, row.number] = version
