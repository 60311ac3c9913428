"""Names, versions, leases, claims and waiters: who may do what in which state. No I/O, no clock, no descriptors.

The caller says what time it is, keeps the memory itself behind an opaque *token* per version, and carries out the
effects that come back, in their order.

The states of a version
-----------------------
::

    begin --> reserved --commit--> current --newer version--> superseded --last lease--> freed
                 |                    |                            |
              abandon          remove, ttl, revoke           remove, revoke
              disconnect              v                            v
                 v                 withdrawn ------------------ last lease --> freed
              nothing happened

* A reader sees all of a version or none: it exists from ``commit`` on.
* The current version can be leased by name; a superseded one only by its number, and only while somebody still holds
  it; a withdrawn one only by a session whose lease on it sleeps, which wakes by another.
* A withdrawn version may be revoked later: its readers are asked to let go, once. Nothing takes it from them.
* Numbers grow by name and are not used again, also after a removal, for as long as the catalogue lives.
* The current version counts against its owner; an older version counts against each user that leases it. A user over
  its quota gets no new lease until it releases one, and may not publish.
* A name belongs to the user who published its current version. Nobody else may replace it, root included, and only
  the user who runs the keeper may remove it (who could end the keeper as well): so nobody can fill it for good.
* An unmapped user owns nothing: it reads.

* The bytes of the current version may move: to memory of the host (it is parked), and back (it is woken). Its number,
  notes and owner stay. Only its owner may move them, and nobody gets at it while it is parked. A move begins with a
  lease that is for it, ends with that lease at the latest, and comes about in one step, in :meth:`commit`, or not at
  all. An attach during a park gets a lease on the version, and the park is given up. An attach during a wake waits for
  it; the next in line wakes the version if the waking lease ends early.

* A name under ``~uid/`` belongs to the user of that uid: nobody else may publish or claim it.

Waiters are served first come, first served by name. A claim makes one of them the one who publishes; it passes to the
next when its holder gives up or goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import structs

from ..errors import AccessDeniedError, BusyError, MismatchError, NotFoundError, QuotaError, UsageError, VramError
from ..sharing.descriptor import MAX_SEGMENTS
from . import rights
from .failures import busy, gone, mismatch, too_late, unknown
from .limits import Accounts, Asked, Quotas
from .messages import Attach, Publish
from .names import Names
from .records import (
    Answered,
    Claim,
    Effect,
    Free,
    Lease,
    Name,
    Notify,
    Publication,
    Session,
    Version,
    Waiter,
    beginning,
    packed,
)
from .rules import check_meta, check_name, check_size, check_ttl, clip_host, clip_label
from .waiting import Due, Waiting

MAX_LEASES = 65_536  # of one connection
MAX_WAITERS = 1_024  # of one connection
MAX_CLAIMS = 256  # of one connection
MAX_PUBLICATIONS = 16  # of one connection, at the same time
MAX_WATCHES = 1_024  # of one connection

NO_PIECES: Mapping[int, int] = MappingProxyType({})


class Catalogue:
    """The books of a keeper. Times are seconds on the caller's clock, which never goes back.
    The cost of an operation depends on the waiters and leases that it touches, not on how many entries there are."""

    def __init__(self, quotas: Quotas | None = None, *, keeper_uid: int = 0) -> None:
        self.accounts = Accounts(quotas or Quotas(), keeper_uid)
        self.sessions: dict[int, Session] = {}
        self.leases: dict[int, Lease] = {}
        self.versions: dict[int, Version] = {}
        self.names = Names()
        self.waiting = Waiting(self.sessions)
        self.ids = itertools.count(1)
        # Changes that are not written down yet: records, (session, version) of watches, and names whose last number is
        # another. True is of a version all of which is to be written, and not only its state.
        self.changed: dict[object, bool] = {}

    # -- connections ----------------------------------------------------------------------------------------------
    def connect(self, uid: int, pid: int = 0, label: str = "", host: str = "") -> Session:
        """Open a session for a verified user. `label` and `host` are claims of the process, clipped for display."""
        session = Session(next(self.ids), uid, pid, clip_label(label), clip_host(host))
        self.sessions[session.id] = session
        self.changed[session] = False
        return session

    def disconnect(self, session: Session, now: float) -> list[Effect]:
        """End a session and all that depends on it, as if it had given everything back itself."""
        if self.sessions.pop(session.id, None) is None:
            return []
        self.changed[session] = False
        for watched in session.watches.values():
            del watched.watchers[session.id]
            self.changed[session, watched] = False
        session.watches.clear()
        for waiter in list(session.waiters.values()):
            self._forget(waiter, session)
        for publication in list(session.publications.values()):
            self.abandon(publication)
        for version in session.written.values():  # nobody else will ever finish what it had begun
            version.writer, version.torn, version.updating = None, version.torn or version.updating, False
            self.changed.setdefault(version, False)
        session.written.clear()
        effects: list[Effect] = []
        for claim in list(session.claims.values()):
            self._unclaim(claim, session)
            effects += self._serve(claim.name, now)
        return effects + self.release_all(session, sorted(session.leases), now)

    # -- publishing -----------------------------------------------------------------------------------------------
    def begin(
        self,
        session: Session,
        asked: Publish,
        *,
        nbytes: int,
        handles: int,
        least: int = 1,
        pieces: Mapping[int, int] = NO_PIECES,
        known: int = 0,
    ) -> Publication:
        """Reserve room for a version, or with a lease for memory that the bytes of an existing version move to.
        `pieces` is memory that is here already, `known` bytes in all: what other versions have as well counts once.
        `least` is the fewest descriptors that there may be."""
        name = check_name(asked.name)
        notes = packed(check_meta(asked.meta))
        check_ttl(asked.ttl)
        check_size(nbytes)
        if asked.updatable and asked.writable:
            raise UsageError("what its publisher alone updates cannot be written by its readers: one of the two")
        if not least <= handles <= MAX_SEGMENTS + 1:
            raise UsageError(f"a version has 1 to {MAX_SEGMENTS} segments, not {handles}")
        if len(session.publications) >= MAX_PUBLICATIONS:
            raise QuotaError(f"this connection publishes {MAX_PUBLICATIONS} versions at a time already")
        if asked.claim:
            self._check_claim(session, name, asked.claim)
        current = self._current(name)
        rights.publish(session, name, current)
        if asked.lease:
            self._movable(session, name, asked.lease)
            if asked.writable or asked.updatable:
                raise UsageError("what moves is read-only: neither writable nor updatable")
        if asked.meta:
            asked = structs.replace(asked, meta={})
        entries = int(current is None)
        publication = Publication(0, session, asked, nbytes, handles, entries, notes, dict(pieces), known)
        self.accounts.admit(session.uid, publication, entries, current, goes=bool(asked.lease))
        publication.id = next(self.ids)  # after all that may refuse it: what raises changes nothing
        session.publications[publication.id] = publication
        self.accounts.keep(session.uid, publication, entries)
        return publication

    def arrived(
        self, publication: Publication, nbytes: int, pieces: Mapping[int, int] = NO_PIECES, known: int = 0
    ) -> None:
        """Count the bytes of a publication that have arrived, where they are more than was stated.
        `nbytes` is of all parts, `pieces` and `known` of the last one. QuotaError leaves the publication as it was."""
        one, uid = publication, publication.session.uid
        more = check_size(nbytes) - one.nbytes
        if more <= 0 and not pieces:
            return
        before = one.nbytes, one.pieces, one.known
        self.accounts.drop(uid, one, one.entries)
        try:
            one.nbytes, one.pieces, one.known = max(nbytes, one.nbytes), {**one.pieces, **pieces}, one.known + known
            if more > 0:
                self.accounts.admit(uid, one, one.entries, self._current(one.asked.name), goes=bool(one.asked.lease))
        except BaseException:
            one.nbytes, one.pieces, one.known = before
            raise
        finally:
            self.accounts.keep(uid, one, one.entries)

    def commit(
        self, publication: Publication, token: Any, now: float, *, nbytes: int | None = None
    ) -> tuple[Version, list[Effect]]:
        """Make a version the current one of its name, or move the bytes of that one; serve the waiters.
        The publication is over in any case. If this raises, the token is still the caller's to free."""
        session, asked = publication.session, publication.asked
        name = asked.name
        if session.publications.get(publication.id) is not publication:
            raise UsageError("this publication is over")
        self.abandon(publication)
        claim = session.claims.get(asked.claim)  # not if it was given up meanwhile
        previous = self._current(name)
        rights.publish(session, name, previous)
        nbytes = check_size(publication.nbytes if nbytes is None else nbytes)
        publication.nbytes = nbytes
        if asked.lease:
            return self._move(publication, token, now, nbytes)
        self.accounts.admit(session.uid, publication, int(previous is None), previous)
        known = self.names.add(name)
        known.last += 1
        version = Version(
            name, known.last, session.uid, token, nbytes, publication.handles, asked.writable, publication.notes, now,
            None if asked.ttl is None else now + asked.ttl, session.pid, session.label, publisher_host=session.host,
            publisher=session.id, pieces=publication.pieces, known=publication.known,
        )  # fmt: skip
        if asked.updatable:
            version.writer, version.updates = session, 1
            session.written[name, version.number] = version
        effects: list[Effect] = []
        self.accounts.keep(version.owner, version, 1)  # before what it replaces goes, which may have the same memory
        if previous is not None:
            self.accounts.add(previous.owner, 0, -1, 0)
            previous.expires = None
            self.accounts.retire(previous)
            self.changed.setdefault(previous, False)
            effects += self._notify(previous, "replaced", known.last)
            if previous.leases:
                known.older[previous.number] = previous
            else:
                effects.append(self._free(previous))
        self.names.set_current(known, version)
        version.id = next(self.ids)
        self.versions[version.id] = version
        self.changed[version] = True
        self.schedule(version.expires, version)
        if claim is not None:
            self._unclaim(claim, session)
        effects += self._serve(name, now)
        return version, effects

    def abandon(self, publication: Publication) -> None:
        """Give up a publication: its room is free again. Idempotent."""
        one = publication
        if one.session.publications.pop(one.id, None) is not None:
            self.accounts.drop(one.session.uid, one, one.entries)

    # -- attaching ------------------------------------------------------------------------------------------------
    def attach(self, session: Session, asked: Attach, now: float) -> Lease | Claim | Waiter:
        """Lease a version (0: the current one), wait for it up to ``asked.wait`` seconds, or claim its name.
        A version of another user than ``asked.owner`` is an error at once, never waited for. With a purpose the lease
        may be one to move its bytes by: its own `purpose` says so."""
        name, expected = asked.name, None
        if name not in self.names.known:
            check_name(name)
        if asked.claim:
            rights.be_mapped(session, name)
        if asked.expect is not None:
            expected = packed(check_meta(asked.expect, what="expect"))
            asked = structs.replace(asked, expect=None)
        waiter = Waiter(0, session.id, asked, expected)
        result = self._try(waiter, session, now)
        if not isinstance(result, Waiter):
            return result
        if asked.wait == 0.0:
            raise self._missing(waiter, now)
        if asked.call in session.waiters:
            raise UsageError(f"call {asked.call} waits already")
        if len(session.waiters) >= MAX_WAITERS:
            raise QuotaError(f"{MAX_WAITERS} calls of this connection wait already")
        waiter.order = next(self.ids)
        waiter.deadline = None if asked.wait is None else now + asked.wait
        self.line_up(waiter)
        self.changed[waiter] = False
        return waiter

    def cancel(self, session: Session, call: int) -> None:
        """Stop waiting. Idempotent."""
        waiter = session.waiters.get(call)
        if waiter is not None:
            self._forget(waiter, session)

    def release(self, session: Session, number: int, now: float) -> list[Effect]:
        """End a lease of this session, or a claim, which the next in line gets; one that is over is no mistake."""
        lease = session.leases.get(number)
        if lease is not None:
            return self._end(lease, now)
        claim = session.claims.get(number)
        if claim is None:
            return []
        self._unclaim(claim, session)
        return self._serve(claim.name, now)

    def release_all(self, session: Session, numbers: Sequence[int], now: float) -> list[Effect]:
        """End some leases and claims of this session, as :meth:`release` does."""
        return [effect for number in numbers for effect in self.release(session, number, now)]

    def rest(self, session: Session, lease_id: int, *, asleep: bool) -> None:
        """Note that nothing is mapped by a lease, so that its version may be parked, or that something is again."""
        lease = self.lease(session, lease_id)
        lease.asleep = asleep
        self.changed[lease] = False

    # -- retiring -------------------------------------------------------------------------------------------------
    def remove(
        self, session: Session, name: str, version: int = 0, *, now: float, revoke: bool = False
    ) -> list[Effect]:
        """Take a name, or one version of it, out of the catalogue; memory is freed with its last lease.
        `revoke` asks readers to let go, also of removed versions."""
        known = self.names.known.get(name)
        if known is None:
            raise unknown(check_name(name))
        current = known.current
        if version:
            one = self.names.find(name, version)
            if one is None or (one.withdrawn and not revoke):
                raise self._gone(name, version)
            doomed = [one]
        else:
            there = [one for one in (*known.older.values(), current) if one is not None]
            doomed = [one for one in there if revoke or not one.withdrawn]
            # Superseded versions of another owner, from before the name changed hands, are not this user's to take.
            doomed = [one for one in doomed if current is None or one.owner == current.owner or one is current]
            if not doomed:
                raise unknown(name)
            if current is None and revoke:  # what is left of several owners: each asks for their own
                doomed = [one for one in doomed if session.uid in (one.owner, self.accounts.keeper_uid)] or doomed
        rights.remove(session, doomed, self.accounts.keeper_uid)
        effects: list[Effect] = []
        for one in doomed:
            asked, one.revoked = one.revoked, one.revoked or revoke
            self.changed.setdefault(one, False)
            if not one.withdrawn:
                effects += self._withdraw(one, "revoked" if revoke else "removed", now)
            elif not asked:
                there_is = self._current(name)
                effects += self._notify(one, "revoked", 0 if there_is is None else there_is.number)
        return effects

    def expire(self, now: float) -> list[Effect]:
        """Do what is due: end waits whose time has passed, and retire versions whose time to live is over."""
        effects: list[Effect] = []
        for due in self.waiting.past(now):
            if isinstance(due, Waiter):
                name, session = due.asked.name, self.sessions[due.session]
                self._forget(due, session)
                error = too_late(due, self._claimed(name), self._current(name), now)
                effects.append(Answered(session, due.asked.call, error))
            else:
                due.expires = None
                effects += self._withdraw(due, "expired", now)
        return effects

    @property
    def next_deadline(self) -> float | None:
        """When :meth:`expire` should be called next; None if nothing waits. May be early, never late."""
        return self.waiting.next

    # -- updating in place ----------------------------------------------------------------------------------------
    def give_page(self, session: Session, lease_id: int, page: Any) -> list[Effect]:
        """Keep the page of words of a lease while the lease lasts, in place of an earlier page; its holder pays for it.
        If this raises, the page is still the caller's."""
        lease = self.lease(session, lease_id)
        if not lease.version.updates:
            raise UsageError(f"lease {lease_id} is on what is never updated in place")
        self.accounts.admit(session.uid, Asked(page.nbytes, 1))
        effects: list[Effect] = [] if lease.page is None else [self._free_page(lease)]
        self.accounts.add(session.uid, page.nbytes, 0, 1)
        lease.page = page
        self.changed[lease] = False
        return effects

    def update(self, session: Session, name: str, number: int) -> Version:
        """Note that a session begins to update a version in place; an update whose end was not heard begins anew.
        Raises NotFoundError if the version is not current, AccessDeniedError if another connection published it."""
        version = session.written.get((name, number))
        current = self._current(name)
        if version is None:
            check_name(name)
            if current is None or current.number != number:
                raise self._gone(name, number)
            raise rights.not_the_writer(current)
        if version is not current:
            raise NotFoundError(f"{name!r} version {number} was replaced or removed; its readers keep what they have")
        version.updating = True
        self.changed.setdefault(version, False)
        return version

    def updated(self, session: Session, name: str, number: int, updates: int, *, whole: bool) -> None:
        """Note that an update is over. Of a version that is gone meanwhile there is nothing to note."""
        version = session.written.get((name, number))
        if version is not None:
            version.updating, version.torn, version.updates = False, not whole, max(1, updates)
            self.changed.setdefault(version, False)

    def pages(self, session: Session, name: str, number: int, after: int) -> Iterator[Lease]:
        """Return the leases above `after` on an updatable version of this session."""
        version = session.written.get((name, number))
        if version is None:
            raise UsageError(f"this connection did not publish {name!r} version {number} to be updated")
        return beginning(version.leases, after + 1)

    # -- watching -------------------------------------------------------------------------------------------------
    def state(self, session: Session, lease_id: int) -> tuple[Version, Version | None]:
        """Return the version of a lease, and the current one of that name."""
        version = self.lease(session, lease_id).version
        return version, self._current(version.name)

    @staticmethod
    def lease(session: Session, lease_id: int) -> Lease:
        """Return a lease of this session."""
        lease = session.leases.get(lease_id)
        if lease is None:
            raise NotFoundError(f"lease {lease_id} is not held by this connection")
        return lease

    def watch(self, session: Session, name: str, version: int) -> Notify | None:
        """Notify the session when a version is replaced, removed, expired or revoked; at once if that has happened.
        The watch lasts as long as the version."""
        check_name(name)
        current, watched = self._current(name), self.names.find(name, version)
        number = 0 if current is None else current.number
        news = None
        if watched is None or watched is not current:
            reason = "removed"
            if watched is not None and (watched.revoked or not watched.withdrawn):
                reason = "revoked" if watched.revoked else "replaced"
            news = Notify(session, name, version, reason, number)
        if watched is not None:
            if len(session.watches) >= MAX_WATCHES and (name, version) not in session.watches:
                raise QuotaError(f"this connection watches {MAX_WATCHES} versions already")
            session.watches[name, version] = watched
            watched.watchers[session.id] = session
            self.changed[session, watched] = False
        return news

    # -- looking --------------------------------------------------------------------------------------------------
    def is_current(self, version: Version) -> bool:
        """Whether attaching by name gives this version."""
        return self._current(version.name) is version

    # -- inside: deciding -----------------------------------------------------------------------------------------
    def _current(self, name: str) -> Version | None:
        return self.names.current(name)

    def _try(self, waiter: Waiter, session: Session, now: float) -> Lease | Claim | Waiter:
        """Serve an attach as things stand; return the waiter itself if it has to wait."""
        asked, name, wants = waiter.asked, waiter.asked.name, waiter.asked.version
        version = self._current(name)
        if wants and (version is None or version.number != wants):
            version = self.names.find(name, wants)
            if version is None or (version.withdrawn and not version.is_to_wake(session)):
                if wants <= self.names.last(name):
                    raise self._gone(name, wants)
                return waiter
        if version is not None:
            if asked.owner not in (None, version.owner):
                raise MismatchError(
                    f"{name!r} version {version.number} belongs to uid {version.owner}, and not to uid {asked.owner} "
                    f"as was expected: take another name, one under ~{asked.owner}/ is that user's alone"
                )
            if waiter.expected is None or waiter.notes.items() <= version.meta.items():
                if version.parked or asked.purpose == "park":
                    return self._begin_move(waiter, session, version, now)
                return self._lease(session, version, asked.access, now, asked.call)
            if not asked.claim or version.owner != session.uid:
                raise mismatch(waiter, session, version)
        if not asked.claim:
            return waiter
        there = self.waiting.claim_of(name)
        try:
            rights.claim(session, name, asked.owner)
        except AccessDeniedError:
            if there is None or asked.owner not in (None, self.sessions[there.session].uid):
                raise
            return waiter  # another user, who may, is about to publish it
        if there is not None:
            return waiter
        if len(session.claims) >= MAX_CLAIMS:
            raise QuotaError(f"this connection holds {MAX_CLAIMS} claims already; publish or abandon some")
        return self._claim(session, name, now, asked.call)

    def _claim(self, session: Session, name: str, now: float, call: int) -> Claim:
        """Give a session the claim on a name."""
        claim = Claim(next(self.ids), session.id, name, now, call)
        self.changed[claim] = False
        self.waiting.add_claim(claim)
        return claim

    def _lease(self, session: Session, version: Version, access: str, now: float, call: int) -> Lease:
        if access == "rw":
            rights.write(version)
        if len(session.leases) >= MAX_LEASES:
            raise QuotaError(f"this connection holds {MAX_LEASES} leases already; close some")
        self.accounts.check_lease(session.uid, version, is_current=self.is_current(version))
        if version.move is not None and not version.parked:
            self._end_move(version)  # of who is parking it: readers come first
        lease = Lease(next(self.ids), session, version, access, now, call)
        self.book(lease)
        self.changed[lease] = False
        return lease

    def _begin_move(self, waiter: Waiter, session: Session, version: Version, now: float) -> Lease | Waiter:
        """Serve who would park a version, and everybody who comes to one that is parked."""
        purpose = waiter.asked.purpose
        if not rights.move(session, version, purpose, is_current=self.is_current(version)):
            return waiter  # another one is about to
        lease = self._lease(session, version, waiter.asked.access, now, waiter.asked.call)
        lease.purpose = purpose
        version.move = lease
        self.changed.setdefault(version, False)
        return lease

    def _movable(self, session: Session, name: str, number: int) -> tuple[Version, Lease]:
        """Return the version whose bytes a session may move by a lease, and that lease."""
        lease = session.leases.get(number)
        if lease is None or lease.version.name != name or not lease.purpose:
            raise UsageError(f"lease {number} gives no right to move the bytes of {name!r}")
        version = lease.version
        what = f"{name!r} version {version.number}"
        if not self.is_current(version):
            raise NotFoundError(f"{what} was replaced or removed while its bytes were moved")
        if lease.purpose == "over":
            readers = tuple(str(one.session) for one in version.leases.values() if one is not lease)
            raise BusyError(f"{what} was attached while its bytes were moved: they stay where they are", readers[:20])
        return version, lease

    def _move(self, publication: Publication, token: Any, now: float, nbytes: int) -> tuple[Version, list[Effect]]:
        """Have other memory hold the bytes of a version: what they were in is freed, and counts no more."""
        session, name = publication.session, publication.asked.name
        version, lease = self._movable(session, name, publication.asked.lease)
        self.accounts.admit(session.uid, publication, 0, version, goes=True)
        freed = Free(version.token)
        self.accounts.drop(version.owner, version, 1)
        version.token, version.nbytes, version.handles = token, nbytes, publication.handles
        version.pieces, version.known = publication.pieces, publication.known
        self.accounts.keep(version.owner, version, 1)
        version.parked = lease.purpose == "park"
        version.move, lease.purpose = None, "over"
        self.changed[lease] = False
        self.changed[version] = True
        return version, [freed, *self._serve(name, now)]

    def _end_move(self, version: Version) -> None:
        """End what is under way, if anything is."""
        move, version.move = version.move, None
        if move is not None:
            self.changed.setdefault(version, False)
            if not version.parked:
                move.purpose = "over"
                self.changed[move] = False

    def _serve(self, name: str, now: float) -> list[Effect]:
        """Serve the waiters of a name in the order in which they came.
        If it is parked, waiters that may wake it come first; the others wait, or are refused."""
        line = self.waiting.line_of(name)
        current = self._current(name)
        if current is not None and current.parked:
            line.sort(key=lambda one: not one.asked.purpose or self.sessions[one.session].uid != current.owner)
        effects: list[Effect] = []
        for waiter in line:
            session = self.sessions[waiter.session]
            result: Lease | Claim | Waiter | VramError
            try:
                result = self._try(waiter, session, now)
            except VramError as error:
                result = error
            if not isinstance(result, Waiter):
                self._forget(waiter, session)
                effects.append(Answered(session, waiter.asked.call, result))
        return effects

    def _check_claim(self, session: Session, name: str, claim: int) -> None:
        """Raise unless a session has a claim on a name."""
        held = session.claims.get(claim)
        if held is None or held.name != name:
            raise UsageError(f"claim {claim} on {name!r} is not held by this connection")

    # -- inside: changing -----------------------------------------------------------------------------------------
    def book(self, lease: Lease) -> None:
        """Note a lease wherever it is looked for; for this class, and for who restores one."""
        version, uid = lease.version, lease.session.uid
        known = self.names.known[version.name]
        version.leases[lease.id] = lease.session.leases[lease.id] = self.leases[lease.id] = lease
        before = version.holders.get(uid, 0)
        version.holders[uid] = before + 1
        if not before and known.current is not version:
            self.accounts.hold(uid, version)

    def _end(self, lease: Lease, now: float) -> list[Effect]:
        version, session = lease.version, lease.session
        known = self.names.known[version.name]
        del self.leases[lease.id], session.leases[lease.id], version.leases[lease.id]
        self.changed[lease] = False
        effects: list[Effect] = [] if lease.page is None else [self._free_page(lease)]
        moved = version.move is lease
        if moved:
            self._end_move(version)
        version.holders[session.uid] -= 1
        if not version.holders[session.uid]:
            del version.holders[session.uid]
            if known.current is not version:
                self.accounts.release_version(session.uid, version)
        if not version.leases and known.current is not version:
            del known.older[version.number]
            effects.append(self._free(version))
            self._tidy(known)
        return effects + self._serve(version.name, now) if moved else effects  # the next in line wakes it

    def _free_page(self, lease: Lease) -> Free:
        page, lease.page = lease.page, None
        self.accounts.add(lease.session.uid, -page.nbytes, 0, -1)
        return Free(page)

    def _withdraw(self, version: Version, reason: str, now: float) -> list[Effect]:
        """current, superseded -> withdrawn; freed at once if nobody holds it."""
        name = version.name
        known = self.names.known[name]
        version.withdrawn = True
        self.changed.setdefault(version, False)
        effects: list[Effect] = []
        if known.current is version:
            self.names.retire(known, version)
            self.accounts.add(version.owner, 0, -1, 0)
            self.accounts.retire(version)
            version.expires = None
        current, move = known.current, version.move
        effects += self._notify(version, reason, 0 if current is None else current.number)
        if not version.leases:
            del known.older[version.number]
            effects.append(self._free(version))
            self._tidy(known)
        if move is not None and version.parked:  # who waits for that to be over may publish it now
            self._end_move(version)
            effects += self._serve(name, now)
        return effects

    def forget(self, version: Version) -> None:
        """Take out a version whose memory is gone already, and that nobody holds."""
        self._withdraw(version, "removed", 0.0)

    def _free(self, version: Version) -> Free:
        del self.versions[version.id]
        self.changed[version] = False
        if version.number == self.names.last(version.name):  # else the versions that are there say it
            self.changed[version.name] = False
        if version.writer is not None:
            del version.writer.written[version.name, version.number]
        self.accounts.total.drop(version)  # of no user's any more
        for session in version.watchers.values():
            del session.watches[version.name, version.number]
            self.changed[session, version] = False
        version.watchers.clear()
        return Free(version.token)

    def _tidy(self, known: Name) -> None:
        forgotten = self.names.tidy(known)
        if forgotten:
            self.changed[forgotten] = self.changed[""] = False

    def _unclaim(self, claim: Claim, session: Session) -> None:
        self.waiting.remove_claim(claim, session)
        self.changed[claim] = False

    @staticmethod
    def _notify(version: Version, reason: str, current: int) -> list[Effect]:
        return [Notify(session, version.name, version.number, reason, current) for session in version.watchers.values()]

    # -- inside: waiting ------------------------------------------------------------------------------------------
    def schedule(self, when: float | None, due: Due) -> None:
        """Note a deadline, if there is one; for this class, and for who restores one."""
        self.waiting.schedule(when, due, len(self.versions))

    def line_up(self, waiter: Waiter) -> None:
        """Note a waiter wherever it is looked for; for this class, and for who restores one."""
        self.waiting.add(waiter)
        self.schedule(waiter.deadline, waiter)

    def _forget(self, waiter: Waiter, session: Session) -> None:
        self.waiting.remove(waiter, session)
        self.changed[waiter] = False

    def _gone(self, name: str, version: int) -> NotFoundError:
        return gone(name, version, self._current(name), self.names.last(name))

    def _claimed(self, name: str) -> tuple[Session, float] | None:
        """Return who has the claim on a name, and since when."""
        claim = self.waiting.claim_of(name)
        return None if claim is None else (self.sessions[claim.session], claim.since)

    def _missing(self, waiter: Waiter, now: float) -> VramError:
        name, wants = waiter.asked.name, waiter.asked.version
        error = busy(waiter, self._claimed(name), self._current(name), now)
        if error is not None:
            return error
        return self._gone(name, wants) if wants and name in self.names.known else unknown(name)
