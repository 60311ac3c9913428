"""The rows of a keeper's state: what the journal has, what moves to the next keeper, and what a catalogue is made of.

A row that is put replaces the one of the same kind and key; :class:`Gone` deletes it. Nothing else is needed to go on:
sums, orders and deadlines follow from the rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import Raw, Struct

from .catalogue import Catalogue
from .connection import Held
from .records import Claim, Lease, Session, Version, Waiter, record_from


class OptionsRow(Struct, array_like=True, tag=0):
    """The keeper's process, of which there is one row. `next_id` is above every number that was given out; `options` of
    the command line hold after a restart, too."""

    next_id: int
    pid: int
    options: list[str] = []


class SessionRow(Struct, array_like=True, tag=2):
    """A session, and the number of the socket of its connection."""

    id: int
    uid: int
    pid: int
    label: str
    host: str = ""
    peer: int = 0


class VersionRow(Struct, array_like=True, tag=3):
    """The part of a version that changes only as its bytes move. Its descriptors have numbers from `first` on."""

    id: int
    name: str
    number: int
    owner: int
    first: int
    nbytes: int
    handles: int
    writable: bool
    notes: Raw
    body: Raw
    published: float
    publisher_pid: int
    publisher_label: str
    publisher_host: str = ""
    publisher: int = 0
    pieces: dict[int, int] = {}
    known: int = 0


class StateRow(Struct, array_like=True, tag=4):
    """The part of a version that changes often; `moving` is the lease by which its bytes move."""

    id: int
    current: bool
    expires: float | None = None
    withdrawn: bool = False
    revoked: bool = False
    writer: int = 0  # the session
    updates: int = 0
    updating: bool = False
    torn: bool = False
    parked: bool = False
    moving: int = 0


class LeaseRow(Struct, array_like=True, tag=5):
    """A lease. Its page of words has number `page` (0: none) and so many bytes."""

    id: int
    session: int
    version: int
    access: str
    since: float
    call: int = 0
    page: int = 0
    page_bytes: int = 0
    purpose: str = ""
    asleep: bool = False


class WatchRow(Struct, array_like=True, tag=6):
    """A session that is to hear what becomes of a version."""

    session: int
    version: int


class NameRow(Struct, array_like=True, tag=9):
    """The last number of a version of a name, if that version is gone; of the empty name, the last of all names that
    were forgotten."""

    name: str
    last: int


class OutcomeRow(Struct, array_like=True, tag=10):
    """The outcome of a call that its client may make again: a version, or only that it was done.
    Leases and claims have the number of their call themselves."""

    session: int
    call: int
    version: int = 0


Key = int | str | tuple[int, int]


class Gone(Struct, array_like=True, tag=11):
    """The row of a kind (its tag) and key is no more."""

    kind: int
    key: Key


Row = (
    OptionsRow | SessionRow | VersionRow | StateRow | LeaseRow | WatchRow | Claim | Waiter | NameRow
    | OutcomeRow | Gone
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Raw]).decode
_all = msgspec.msgpack.Decoder(list[Row]).decode
_row = msgspec.msgpack.Decoder(Row).decode
_KEYS: dict[type, Callable[[Any], Key]] = {
    OptionsRow: lambda _: 0,
    Waiter: attrgetter("order"), NameRow: attrgetter("name"),
    WatchRow: attrgetter("session", "version"), OutcomeRow: attrgetter("session", "call"),
    **dict.fromkeys([SessionRow, VersionRow, StateRow, LeaseRow, Claim], attrgetter("id")),
}  # fmt: skip
_TAGS: dict[type, int] = {kind: kind.__struct_config__.tag for kind in _KEYS}  # type: ignore[attr-defined]
_NUMBERED = {SessionRow, VersionRow, LeaseRow, Claim, Waiter}  # from one counter
_KINDS = {tag: kind for kind, tag in _TAGS.items()}


def gone(kind: type, key: Key) -> Gone:
    """Return the row that deletes the one of a kind and key."""
    return Gone(_TAGS[kind], key)


# -- reading ----------------------------------------------------------------------------------------------------------
class Replayed:
    """The rows that a journal leaves; `bad` counts those that cannot be read, or that name what there is not."""

    def __init__(self, records: Iterable[bytes]) -> None:
        self.bad = 0
        self.rows: dict[type, dict[Key, Any]] = {kind: {} for kind in _KINDS.values()}
        self.next_id = 1
        for record in records:
            try:
                rows = _all(record)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                rows = self._readable(record)
            for row in rows:
                self._put(row)

    def _readable(self, record: bytes) -> list[Any]:
        """Return the rows of a record that can be read."""
        rows = []
        try:
            several = _decode(record)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.bad += 1
            return []
        for one in several:
            try:
                rows.append(_row(one))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                self.bad += 1
        return rows

    def _put(self, row: Any) -> None:
        if isinstance(row, Gone):
            self.rows.get(_KINDS.get(row.kind, Gone), {}).pop(row.key, None)
            return
        kind = type(row)
        key: Any = _KEYS[kind](row)
        self.rows[kind][key] = row
        if kind in _NUMBERED:
            self.next_id = max(self.next_id, key + 1)

    def of(self, kind: type) -> list[Any]:
        """Return the rows of a kind, in the order in which they came."""
        return list(self.rows[kind].values())

    @property
    def options(self) -> OptionsRow | None:
        """The keeper's settings; None if they were lost."""
        return self.rows[OptionsRow].get(0)

    def restore(self, made: Catalogue, token: Callable[[int, int, int], Held | None]) -> None:
        """Fill a catalogue. `token` makes what holds so many descriptors from a number on, and their bytes; None if
        they are not there. A row that names what there is not is left out, and counted."""
        options = self.options
        made.ids = itertools.count(max(self.next_id, 1 if options is None else options.next_id))
        made.names.numbers.update((row.name, row.last) for row in self.of(NameRow))
        made.names.floor = made.names.numbers.pop("", 0)
        for row in self.of(SessionRow):
            made.sessions[row.id] = record_from(Session, row)
        versions = self._versions(made, token)
        for row in self.of(LeaseRow):
            session, version = made.sessions.get(row.session), versions.get(row.version)
            has_holder = session is not None and version is not None
            page = token(row.page, 1, row.page_bytes) if row.page and has_holder else None
            if session is None or version is None or (row.page and page is None):
                self.bad += 1
                continue
            lease = record_from(Lease, row, session=session, version=version, page=page)
            made.book(lease)
            if page is not None:
                made.accounts.add(session.uid, page.nbytes, 0, 1)
        for row in self.of(WatchRow):
            session, version = made.sessions.get(row.session), versions.get(row.version)
            if session is None or version is None:
                self.bad += 1
                continue
            version.watchers[session.id] = session
            session.watches[version.name, version.number] = version
        for row in self.of(StateRow):
            move = made.leases.get(row.moving)
            if move is not None and move.version.id == row.id:
                move.version.move = move
        for waiter in sorted(self.of(Waiter), key=lambda row: int(row.order)):  # first come, first served
            if waiter.session in made.sessions:
                made.line_up(waiter)
            else:
                self.bad += 1
        for claim in self.of(Claim):
            if claim.session in made.sessions and made.waiting.claim_of(claim.name) is None:
                made.waiting.add_claim(claim)
            else:
                self.bad += 1
        for version in [one for one in versions.values() if not one.leases and not made.is_current(one)]:
            made.forget(version)  # nobody has it: a lease of it was lost
            version.token.drop()
        made.changed.clear()

    def _versions(self, made: Catalogue, token: Callable[[int, int, int], Held | None]) -> dict[int, Version]:
        found: dict[int, Version] = {}
        for row in sorted(self.of(VersionRow), key=lambda row: (row.name, row.id)):
            state = self.rows[StateRow].get(row.id)
            held = token(row.first, row.handles, row.nbytes) if state is not None else None
            if state is None or held is None:
                self.bad += 1
                continue
            writer = made.sessions.get(state.writer)
            version = record_from(
                Version, row, token=held, notes=bytes(row.notes), expires=state.expires, withdrawn=state.withdrawn,
                revoked=state.revoked, writer=writer, updates=state.updates, parked=state.parked,
                updating=state.updating and writer is not None,
                torn=state.torn or (state.updating and writer is None),
            )  # fmt: skip
            version.settle(bytes(row.body))
            known = made.names.add(row.name)
            known.last = max(known.last, row.number)
            if state.current:
                if known.current is not None:  # a row that said so was lost
                    known.older[known.current.number] = known.current
                made.names.set_current(known, version)
            else:
                known.older[row.number] = version
            made.versions[version.id] = found[version.id] = version
        for version in found.values():
            if made.is_current(version):
                made.accounts.keep(version.owner, version, 1)
                made.schedule(version.expires, version)
            else:  # counts against those who lease it
                made.accounts.total.keep(version)
            if version.writer is not None:
                version.writer.written[version.name, version.number] = version
        return found


# -- writing ----------------------------------------------------------------------------------------------------------
def changes(catalogue: Catalogue, number_of: Callable[[Held], int]) -> list[Row]:
    """Return the rows of what changed in a catalogue since the last time. `number_of` gives the number of the first
    descriptor of what a version or a page is in."""
    changed = catalogue.changed
    rows: list[Row] = []
    for one, is_whole in changed.items():
        kind = type(one)
        if kind is Lease:
            rows.append(_lease(catalogue, one, number_of))  # type: ignore[arg-type]
        elif kind is Version:
            rows += _version(catalogue, one, is_whole, number_of)  # type: ignore[arg-type]
        else:
            rows.append(_WRITERS[kind](catalogue, one))
    changed.clear()
    return rows


def everything(catalogue: Catalogue, number_of: Callable[[Held], int]) -> list[Row]:
    """Return the rows of all that a catalogue has."""
    changed, names = catalogue.changed, catalogue.names
    changed.clear()
    changed.update(dict.fromkeys(["", *names.numbers, *names.known, *catalogue.sessions.values()], False))
    changed.update(dict.fromkeys(catalogue.versions.values(), True))
    changed.update(dict.fromkeys([*catalogue.leases.values(), *catalogue.waiting.claims.values()], False))
    for session in catalogue.sessions.values():
        changed.update(dict.fromkeys([*session.waiters.values()], False))
        changed.update(dict.fromkeys([(session, version) for version in session.watches.values()], False))
    return changes(catalogue, number_of)


def _lease(catalogue: Catalogue, one: Lease, number_of: Callable[[Held], int]) -> Row:
    if one.id not in catalogue.leases:
        return gone(LeaseRow, one.id)
    page = one.page
    if page is None and not one.purpose and not one.asleep:  # as nearly all are
        return LeaseRow(one.id, one.session.id, one.version.id, one.access, one.since, one.call)
    return LeaseRow(
        one.id, one.session.id, one.version.id, one.access, one.since, one.call,
        0 if page is None else number_of(page), 0 if page is None else page.nbytes, one.purpose, one.asleep,
    )  # fmt: skip


def _version(catalogue: Catalogue, one: Version, is_whole: bool, number_of: Callable[[Held], int]) -> Iterator[Row]:
    if one.id not in catalogue.versions:
        yield gone(VersionRow, one.id)  # its state says nothing without it
        return
    if is_whole:
        yield VersionRow(
            one.id, one.name, one.number, one.owner, number_of(one.token), one.nbytes, one.handles, one.writable,
            Raw(one.notes), Raw(one.body), one.published, one.publisher_pid, one.publisher_label, one.publisher_host,
            one.publisher, one.pieces, one.known,
        )  # fmt: skip
    writer, move = one.writer, one.move
    yield StateRow(
        one.id, catalogue.is_current(one), one.expires, one.withdrawn, one.revoked, 0 if writer is None else writer.id,
        one.updates, one.updating, one.torn, one.parked,
        0 if move is None else move.id,
    )  # fmt: skip


def _session(catalogue: Catalogue, one: Session) -> Row:
    return record_from(SessionRow, one) if one.id in catalogue.sessions else gone(SessionRow, one.id)


def _claim(catalogue: Catalogue, one: Claim) -> Row:
    return one if one.id in catalogue.waiting.claims else gone(Claim, one.id)


def _waiter(catalogue: Catalogue, one: Waiter) -> Row:
    session = catalogue.sessions.get(one.session)
    is_there = session is not None and session.waiters.get(one.asked.call) is one
    return one if is_there else gone(Waiter, one.order)


def _watch(catalogue: Catalogue, one: tuple[Session, Version]) -> Row:
    session, version = one
    if session.id in version.watchers:
        return WatchRow(session.id, version.id)
    return gone(WatchRow, (session.id, version.id))


def _name(catalogue: Catalogue, one: str) -> Row:
    names = catalogue.names
    if one and one not in names.known and one not in names.numbers:
        return gone(NameRow, one)
    return NameRow(one, names.last(one) if one else names.floor)


_WRITERS: dict[type, Callable[[Catalogue, Any], Row]] = {
    Session: _session, Claim: _claim, Waiter: _waiter, tuple: _watch, str: _name,
}  # fmt: skip
