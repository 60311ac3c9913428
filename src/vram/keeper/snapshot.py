"""The catalogue's books as plain data, for a keeper that takes over; tokens become numbers.

Written by one version of this library and read by another: fields are only ever added at the end, with defaults. The
rows stand in :mod:`.records`, each behind the record that it is of; what both have by the same name moves by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from msgspec import Raw, Struct

from .accounts import Quotas
from .catalogue import CLAIM_TIMEOUT, Catalogue
from .fields import record_from
from .ordered import Ordered
from .records import (
    Claim,
    Lease,
    Name,
    Publication,
    PublicationRow,
    Round,
    Session,
    SessionRow,
    TermRow,
    Version,
    VersionRow,
    Waiter,
    WaiterRow,
    packed,
)
from .users import by_number

__all__ = ["Books", "restore", "save"]


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
        sessions=[record_from(SessionRow, one) for one in sessions],
        versions=[
            record_from(
                VersionRow,
                one,
                current=catalogue.is_current(one),
                token=number(one.token),
                body=bytes(one.body),
                leases=[(lease.id, lease.session.id, lease.access, lease.since) for lease in one.leases.values()],
                watchers=list(one.watchers),
            )
            for one in catalogue.all_versions()
        ],
        publications=[
            record_from(PublicationRow, one, session=session.id)
            for session in sessions
            for one in session.publications.values()
        ],
        waiters=[
            record_from(WaiterRow, one, session=one.session.id)
            for line in catalogue._waiters.values()
            for one in line.values()
        ],
        claims=[(one.id, one.session.id, one.name) for one in catalogue.claims.values()],
        terms=[record_from(TermRow, one, claim=one.id, run=list(one.run.items())) for one in catalogue.claims.values()],
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
    made.sessions.update((row.id, record_from(Session, row)) for row in books.sessions)
    for one in books.versions:
        _restore_version(made, one, token(one.token))
    made._sorted.sort()
    publications = {}
    for entry in books.publications:
        session = made.sessions[entry.session]
        publication = record_from(Publication, entry, session=session, notes=packed(entry.meta), body=None)
        publications[entry.id] = session.publications[entry.id] = publication
        made.accounts.add(session.uid, publication.charge, entry.entries, entry.handles)
    for wait in books.waiters:
        expected = None if wait.expect is None else packed(wait.expect)
        waiter = record_from(Waiter, wait, session=made.sessions[wait.session], expected=expected)
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
    version = record_from(Version, row, token=token, notes=packed(row.meta), body=Raw(), leases=Ordered(), watchers={})
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
