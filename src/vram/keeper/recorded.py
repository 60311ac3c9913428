"""A catalogue that writes down every call that changed it, before anybody hears of what came of that.

What is written are the calls, not what they changed: :mod:`.replay` makes them again, and since a catalogue is told the
time and everything else from outside, the same comes of them. A call that raised changed nothing, and is not written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from .catalogue import NO_PIECES, Catalogue
from .record_log import RecordLog
from .records import Claim, Effect, Lease, Notify, Publication, Session, Version, Waiter

(
    ATTACH, RELEASE, CONNECT, BEGIN, ARRIVED, COMMIT, ABANDON, CANCEL, DROP_CLAIM, REMOVE, EXPIRE, PAGE, UPDATE,
    UPDATED, WATCH, LEAVE, OPENED, WELCOMED, CLOSED, USER,
) = range(1, 21)  # fmt: skip

ATTACH_HEAD = struct.Struct("<QQd")  # session, what came of it, when
BEGIN_HEAD = struct.Struct("<I")  # bytes of the arguments, before the request
RELEASE_HEAD = struct.Struct("<Qd")  # session, when; before the leases
_ONE = struct.Struct("<QdQ")  # the same, and one lease

_attach_head = ATTACH_HEAD.pack
_encode = msgspec.msgpack.Encoder().encode


class Keeping(Protocol):
    """Whoever holds descriptors for the next keeper."""

    def keep(self, fds: Sequence[int]) -> int:
        """Have them held; return the number of the first."""
        ...

    def forget(self, fds: Sequence[int]) -> None:
        """Have them held no longer."""
        ...


class RecordedCatalogue(Catalogue):
    """A catalogue with a log. `payload` is the request that is being done, as it came.
    `call` is its number, where it may come again and would have another effect then."""

    log: RecordLog
    keeping: Keeping
    payload: bytes = b""
    call: int = 0
    _within = False

    @classmethod
    def of(cls, catalogue: Catalogue, log: RecordLog, keeping: Keeping) -> RecordedCatalogue:
        """Return one that goes on with the books of another, which is not to be used any more."""
        made = cls.__new__(cls)
        for name, value in vars(catalogue).items():
            setattr(made, name, value)  # not into its dict: what has one of its own is looked up slowly each time
        made.log, made.keeping = log, keeping
        return made

    def write(self, kind: int, *said: Any) -> None:
        """Write a record."""
        self.log.append(kind, _encode(said))

    def user_of(self, session: Session) -> str:
        """Return the name of a session's user; see :meth:`.Catalogue.user_of`."""
        if session.user is None:
            self.write(USER, session.id, super().user_of(session))  # which stays also where the call raises after all
        return super().user_of(session)

    # -- most often ---------------------------------------------------------------------------------------------------
    def attach(
        self,
        session: Session,
        name: str,
        now: float,
        *,
        call: int = 0,
        version: int = 0,
        access: str = "r",
        expect: Mapping[str, str] | None = None,
        wait: float | None = 0.0,
        claim: bool = False,
        owner: int | None = None,
        purpose: str = "",
    ) -> Lease | Claim | Waiter:
        """Lease a version; see :meth:`.Catalogue.attach`."""
        # Its arguments one by one: the fastest way to pass them on, in what is called most often.
        result = Catalogue.attach(
            self, session, name, now, call=call, version=version, access=access, expect=expect, wait=wait, claim=claim,
            owner=owner, purpose=purpose,
        )  # fmt: skip
        number = result.order if isinstance(result, Waiter) else result.id
        self.log.append(ATTACH, _attach_head(session.id, number, now) + self.payload)
        return result

    def release_all(self, session: Session, lease_ids: Sequence[int], now: float) -> list[Effect]:
        """End some leases; see :meth:`.Catalogue.release_all`."""
        effects = Catalogue.release_all(self, session, lease_ids, now)
        if not self._within:
            if len(lease_ids) == 1:
                self.log.append(RELEASE, _ONE.pack(session.id, now, lease_ids[0]))
            elif lease_ids:
                leases = struct.pack(f"<{len(lease_ids)}Q", *lease_ids)
                self.log.append(RELEASE, RELEASE_HEAD.pack(session.id, now) + leases)
        return effects

    # -- connections --------------------------------------------------------------------------------------------------
    def connect(self, uid: int, pid: int = 0, label: str = "", host: str = "") -> Session:
        """Open a session; see :meth:`.Catalogue.connect`."""
        session = super().connect(uid, pid, label, host)
        self.write(CONNECT, session.id, uid, pid, label, host)
        return session

    def disconnect(self, session: Session, now: float) -> list[Effect]:
        """End a session; see :meth:`.Catalogue.disconnect`."""
        self._within = True
        try:
            effects = super().disconnect(session, now)
        finally:
            self._within = False
        self.write(LEAVE, session.id, now)
        return effects

    # -- publishing ---------------------------------------------------------------------------------------------------
    def begin(self, session: Session, name: str, **rest: Any) -> Publication:
        """Reserve room; see :meth:`.Catalogue.begin`."""
        publication = Catalogue.begin(self, session, name, **rest)
        said = _encode((session.id, publication.id, name, rest))
        self.log.append(BEGIN, BEGIN_HEAD.pack(len(said)) + said + self.payload)
        return publication

    def arrived(
        self, publication: Publication, nbytes: int, pieces: Mapping[int, int] = NO_PIECES, known: int = 0
    ) -> None:
        """Count what came; see :meth:`.Catalogue.arrived`."""
        super().arrived(publication, nbytes, pieces, known)
        self.write(ARRIVED, publication.session.id, publication.id, nbytes, dict(pieces), known)

    def commit(
        self, publication: Publication, token: Any, now: float, *, nbytes: int | None = None
    ) -> tuple[Version, list[Effect]]:
        """Make a version the current one; see :meth:`.Catalogue.commit`."""
        session = publication.session
        first = self.keeping.keep(token.fds)
        self._within = True
        try:
            version, effects = Catalogue.commit(self, publication, token, now, nbytes=nbytes)
        except BaseException:
            self.keeping.forget(token.fds)
            self.write(ABANDON, session.id, publication.id)
            raise
        finally:
            self._within = False
        self.write(
            COMMIT, session.id, publication.id, version.number, first, len(token.fds), now, nbytes, token.nbytes,
            self.call,
        )  # fmt: skip
        return version, effects

    def abandon(self, publication: Publication) -> None:
        """Give up a publication; see :meth:`.Catalogue.abandon`."""
        is_open = publication.id in publication.session.publications
        Catalogue.abandon(self, publication)
        if is_open and not self._within:
            self.write(ABANDON, publication.session.id, publication.id)

    # -- the rest -----------------------------------------------------------------------------------------------------
    def cancel(self, session: Session, call: int) -> None:
        """Stop waiting; see :meth:`.Catalogue.cancel`."""
        is_waiting = call in session.waiters
        super().cancel(session, call)
        if is_waiting:
            self.write(CANCEL, session.id, call)

    def drop_claim(self, session: Session, claim_id: int, now: float) -> list[Effect]:
        """Give up a claim; see :meth:`.Catalogue.drop_claim`."""
        self._within = True
        try:
            effects = super().drop_claim(session, claim_id, now)
        finally:
            self._within = False
        self.write(DROP_CLAIM, session.id, claim_id, now)
        return effects

    def remove(
        self, session: Session, name: str, version: int = 0, *, now: float, revoke: bool = False, force: bool = False
    ) -> list[Effect]:
        """Take a name out; see :meth:`.Catalogue.remove`."""
        effects = super().remove(session, name, version, now=now, revoke=revoke, force=force)
        self.write(REMOVE, session.id, name, version, now, revoke, force, self.call)
        return effects

    def expire(self, now: float) -> list[Effect]:
        """Do what is due; see :meth:`.Catalogue.expire`."""
        due = self.next_deadline
        if due is None or due > now:
            return []
        effects = super().expire(now)
        self.write(EXPIRE, now)
        return effects

    def give_page(self, session: Session, lease_id: int, page: Any) -> list[Effect]:
        """Keep a page; see :meth:`.Catalogue.give_page`."""
        effects = super().give_page(session, lease_id, page)
        self.write(PAGE, session.id, lease_id, self.keeping.keep(page.fds), page.nbytes)
        return effects

    def update(self, session: Session, name: str, number: int) -> Version:
        """Note that an update begins; see :meth:`.Catalogue.update`."""
        version = super().update(session, name, number)
        self.write(UPDATE, session.id, name, number)
        return version

    def updated(self, session: Session, name: str, number: int, updates: int, *, whole: bool) -> None:
        """Note that an update is over; see :meth:`.Catalogue.updated`."""
        super().updated(session, name, number, updates, whole=whole)
        self.write(UPDATED, session.id, name, number, updates, whole)

    def watch(self, session: Session, name: str, version: int) -> Notify | None:
        """Watch a version; see :meth:`.Catalogue.watch`."""
        news = super().watch(session, name, version)
        self.write(WATCH, session.id, name, version)
        return news
