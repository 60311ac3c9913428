"""The catalogue's books as plain data, for a keeper that takes over; tokens become numbers.

Written by one version of this library and read by another: fields are only ever added at the end, with defaults.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from msgspec import Raw, Struct

from .accounts import Quotas
from .catalogue import CLAIM_TIMEOUT, Catalogue
from .records import Claim, Lease, Name, Publication, Round, Session, Version, Waiter, packed
from .users import by_number

__all__ = ["Books", "restore", "save"]


class SessionRow(Struct, array_like=True):
    """A session."""

    id: int
    uid: int
    pid: int
    label: str
    host: str = ""


class VersionRow(Struct, array_like=True):
    """A version; `token` is a number that the caller chose, `body` is encoded as readers get it."""

    name: str
    number: int
    current: bool
    owner: int
    token: int
    nbytes: int
    handles: int
    writable: bool
    meta: dict[str, str]
    body: bytes
    published: float
    expires: float | None
    publisher_pid: int
    publisher_label: str
    withdrawn: bool
    leases: list[tuple[int, int, str, float]]  # id, session, access, since
    watchers: list[int]  # sessions
    revoked: bool = False
    publisher_host: str = ""
    record: int = 0


class PublicationRow(Struct, array_like=True):
    """A publication under way."""

    id: int
    session: int
    name: str
    nbytes: int
    handles: int
    entries: int
    writable: bool
    meta: dict[str, str]
    ttl: float | None
    claim: int
    record: int = 0


class WaiterRow(Struct, array_like=True):
    """An attach that waits."""

    order: int
    session: int
    call: int
    name: str
    wants: int
    access: str
    expect: dict[str, str] | None
    claims: bool
    deadline: float | None
    owner: int | None = None


class TermRow(Struct, array_like=True):
    """How long a claim lasts, and what was before it; those of an older keeper begin anew."""

    claim: int
    since: float
    until: float | None
    number: int
    run: list[tuple[int, float]]


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
    claims: list[tuple[int, int, str]]  # id, session, name
    terms: list[TermRow] = []
    passed: list[tuple[int, int, str, int]] = []  # session, claim, name, number
    rounds: list[tuple[str, bool]] = []  # names, and whether there is a new version, for those who wait


def save(catalogue: Catalogue, number: Callable[[Any], int]) -> Books:
    """Write down a catalogue.

    Parameters
    ----------
    number : callable
        Gives each version's token the number that :func:`restore` will find it by.
    """
    sessions = catalogue.sessions.values()
    return Books(
        next_id=next(catalogue._ids),
        floor=catalogue._floor,
        last=dict(catalogue._last),
        numbers=list(catalogue._numbers.items()),
        sessions=[SessionRow(one.id, one.uid, one.pid, one.label, one.host) for one in sessions],
        versions=[
            VersionRow(
                one.name,
                one.number,
                catalogue.is_current(one),
                one.owner,
                number(one.token),
                one.nbytes,
                one.handles,
                one.writable,
                one.meta,
                bytes(one.body),
                one.published,
                one.expires,
                one.publisher_pid,
                one.publisher_label,
                one.withdrawn,
                [(lease.id, lease.session.id, lease.access, lease.since) for lease in one.leases.values()],
                list(one.watchers),
                one.revoked,
                one.publisher_host,
                one.record,
            )
            for one in catalogue.all_versions()
        ],
        publications=[
            PublicationRow(
                one.id,
                one.session.id,
                one.name,
                one.nbytes,
                one.handles,
                one.entries,
                one.writable,
                one.meta,
                one.ttl,
                one.claim,
                one.record,
            )
            for session in sessions
            for one in session.publications.values()
        ],
        waiters=[
            WaiterRow(
                one.order,
                one.session.id,
                one.call,
                one.name,
                one.wants,
                one.access,
                one.expect,
                one.claims,
                one.deadline,
                one.owner,
            )
            for line in catalogue._waiters.values()
            for one in line.values()
        ],
        claims=[(one.id, one.session.id, one.name) for one in catalogue.claims.values()],
        terms=[
            TermRow(one.id, one.since, one.until, one.number, list(one.run.items()))
            for one in catalogue.claims.values()
        ],
        passed=[
            (session.id, claim, name, last) for session in sessions for claim, (name, last) in session.passed.items()
        ],
        rounds=[(name, among.every) for name, among in catalogue._rounds.items()],
    )


def restore(
    books: Books,
    token: Callable[[int], Any],
    quotas: Quotas,
    *,
    keeper_uid: int,
    nobody: int,
    claim_timeout: float = CLAIM_TIMEOUT,
    why_not: Callable[[int, str], str] = by_number,
    now: float = 0.0,
) -> tuple[Catalogue, dict[int, Publication]]:
    """Make a catalogue that goes on where another stopped.

    Parameters
    ----------
    token : callable
        Gives the token for the number it was written down with.
    quotas : Quotas
        The ceilings from now on. What is held already stays, also if it is more.
    claim_timeout : float
        Seconds, for claims from now on.
    now : float
        When the time of claims begins of which the other did not say when it ends.

    Returns
    -------
    catalogue : Catalogue
    publications : dict of int to Publication
        Those under way, by id.
    """
    made = Catalogue(quotas, keeper_uid=keeper_uid, nobody=nobody, claim_timeout=claim_timeout, why_not=why_not)
    made._ids = itertools.count(books.next_id)
    made._floor = books.floor
    made._last = dict(books.last)
    made._numbers.update(books.numbers)
    for row in books.sessions:
        made.sessions[row.id] = Session(row.id, row.uid, row.pid, row.label, row.host)
    for one in books.versions:
        _restore_version(made, one, token(one.token))
    made._sorted.sort()
    publications = {}
    for entry in books.publications:
        session = made.sessions[entry.session]
        publication = Publication(
            entry.id,
            session,
            entry.name,
            entry.nbytes,
            entry.handles,
            entry.entries,
            entry.writable,
            packed(entry.meta),
            None,
            entry.ttl,
            entry.claim,
            entry.record,
        )
        publications[entry.id] = session.publications[entry.id] = publication
        made.accounts.add(session.uid, publication.charge, entry.entries, entry.handles)
    for wait in books.waiters:
        session = made.sessions[wait.session]
        waiter = Waiter(
            wait.order,
            session,
            wait.call,
            wait.name,
            wait.wants,
            wait.access,
            None if wait.expect is None else packed(wait.expect),
            wait.claims,
            wait.deadline,
            wait.owner,
        )
        made.line_up(waiter)
        if waiter.deadline is not None:
            made._schedule(waiter.deadline, waiter)
    terms = {term.claim: term for term in books.terms}
    for number, owner, name in books.claims:
        _restore_claim(made, Claim(number, made.sessions[owner], name, now, now, 0, {}), terms.get(number), now)
    for owner, number, name, last in books.passed:
        made.sessions[owner].passed[number] = (name, last)
    for session in made.sessions.values():
        made.accounts.count(session)
    made._rounds.update((name, Round(every=every)) for name, every in books.rounds)
    return made, publications


def _restore_claim(made: Catalogue, claim: Claim, term: TermRow | None, now: float) -> None:
    if term is None:
        claim.until = now + made.claim_timeout
        claim.number = made._last_number(claim.name)
        claim.run[claim.session.uid] = claim.until
    else:
        claim.since, claim.until, claim.number, claim.run = term.since, term.until, term.number, dict(term.run)
    made.claims[claim.id] = made._claim_of[claim.name] = claim.session.claims[claim.id] = claim
    if claim.until is not None:
        made._schedule(claim.until, claim)


def _restore_version(made: Catalogue, row: VersionRow, token: Any) -> None:
    version = Version(
        row.name,
        row.number,
        row.owner,
        token,
        row.nbytes,
        row.handles,
        row.writable,
        packed(row.meta),
        Raw(),
        row.published,
        row.expires,
        row.publisher_pid,
        row.publisher_label,
        row.record,
        withdrawn=row.withdrawn,
        revoked=row.revoked,
        publisher_host=row.publisher_host,
    )
    version.settle(row.body)
    known = made._names.setdefault(row.name, Name(row.name))
    if row.current:
        known.current = version
        made._sorted.append(row.name)
    else:
        known.older[row.number] = version
    made.versions += 1
    if row.current:
        made.accounts.add(row.owner, version.charge, 1, row.handles)
    else:  # counts against those who lease it
        made.accounts.total.add(version.charge, 0, row.handles)
    if row.expires is not None:
        made._schedule(row.expires, version)
    for number, owner, access, since in row.leases:
        made.book(Lease(number, made.sessions[owner], version, access, since))
    for watcher in row.watchers:
        session = made.sessions[watcher]
        version.watchers[watcher] = session
        session.watches[row.name, row.number] = version
