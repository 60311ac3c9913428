"""Any order of calls, against a model that is too slow and too simple to be wrong in the same way.

The model keeps lists and searches them. What changes is written as rows, and now and then the catalogue is restored of
these, as after a crash: nothing may come of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.support.catalogues import attach, begin
from tests.support.restored import Rows

from vram.errors import VramError
from vram.keeper.catalogue import Catalogue
from vram.keeper.limits import Quotas
from vram.keeper.records import (
    Answered,
    Claim,
    Effect,
    Free,
    Lease,
    Notify,
    Publication,
    Session,
)

KEEPER, ANN, BOB, NOBODY = 1, 2, 3, 65_534
QUOTAS = Quotas(
    max_bytes=40, max_entries=3, user_bytes=25, user_entries=2, user_descriptors=12, max_descriptors=22,
)  # fmt: skip
PIECES = {901: 2, 902: 5, 903: 9}  # memory that several versions may have, and its bytes
NAMES = st.sampled_from(["a", "b", "c/d", f"~{BOB}/e"])
METAS = st.sampled_from([{}, {"k": "1"}, {"k": "2"}, {"k": "1", "l": "x"}])
EXPECTS = st.sampled_from([None, {}, {"k": "1"}, {"k": "2"}])
PICK = st.integers(0, 1_000)


@dataclass
class MVersion:
    name: str
    number: int
    owner: int
    token: str
    nbytes: int
    handles: int
    writable: bool
    meta: dict[str, str]
    expires: float | None
    state: str = "current"  # current, superseded, withdrawn, freed
    watchers: list[int] = field(default_factory=list)
    revoked: bool = False
    pieces: frozenset[int] = frozenset()  # among its bytes, too


@dataclass
class MWaiter:
    session: int
    call: int
    name: str
    wants: int
    access: str
    expect: dict[str, str] | None
    claims: bool
    deadline: float | None
    owner: int | None


def nbytes_of(items: list[tuple[int, frozenset[int]]]) -> int:
    """Bytes of some versions together, of which each piece counts once."""
    loose = sum(nbytes - sum(PIECES[piece] for piece in pieces) for nbytes, pieces in items)
    return loose + sum(PIECES[piece] for piece in set().union(*(pieces for _, pieces in items)))


class Model:
    """What the catalogue should do, said in the plainest way."""

    def __init__(self) -> None:
        self.uids: dict[int, int] = {}
        self.versions: list[MVersion] = []
        self.leases: list[tuple[int, MVersion]] = []  # session, version; identity by position is enough
        self.waiters: list[MWaiter] = []
        self.claims: dict[str, int] = {}  # by name, the session
        self.now = 0.0
        # Session, name, bytes, handles, entries, pieces.
        self.pending: dict[int, tuple[int, str, int, int, int, frozenset[int]]] = {}

    def current(self, name: str) -> MVersion | None:
        found = [v for v in self.versions if v.name == name and v.state == "current"]
        assert len(found) <= 1
        return found[0] if found else None

    def holds(self, uid: int, version: MVersion) -> bool:
        return any(v is version and self.uids[s] == uid for s, v in self.leases)

    def counts(self, version: MVersion, uid: int | None) -> bool:
        """Whether a version counts against a user; None: against the keeper."""
        if version.state == "freed" or uid is None:
            return version.state != "freed"
        return version.owner == uid if version.state == "current" else self.holds(uid, version)

    def used(self, uid: int | None, *, without: MVersion | None = None) -> tuple[int, int, int]:
        """Bytes, entries and descriptors of a user, or of all."""
        alive = [v for v in self.versions if v is not without and self.counts(v, uid)]
        under_way = [p for p in self.pending.values() if uid in (None, self.uids[p[0]])]
        return (
            nbytes_of([(v.nbytes, v.pieces) for v in alive] + [(p[2], p[5]) for p in under_way]),
            sum(v.state == "current" for v in alive) + sum(p[4] for p in under_way),
            sum(v.handles for v in alive) + sum(p[3] for p in under_way),
        )

    def bytes_with(self, uid: int | None, nbytes: int, pieces: frozenset[int], without: MVersion | None) -> int:
        """What a user, or all, would have with one version more."""
        alive = [v for v in self.versions if v is not without and self.counts(v, uid)]
        under_way = [p for p in self.pending.values() if uid in (None, self.uids[p[0]])]
        all_of_them = [(v.nbytes, v.pieces) for v in alive] + [(p[2], p[5]) for p in under_way]
        return nbytes_of([*all_of_them, (nbytes, pieces)])

    def may_lease(self, uid: int, version: MVersion) -> bool:
        """Whether what a user holds of old versions, this one included, leaves it below its ceilings."""
        comes = version.state != "current" and not self.holds(uid, version)
        old = any(v.state in ("superseded", "withdrawn") and self.holds(uid, v) for v in self.versions)
        if uid == KEEPER or not (comes or old):
            return True
        b, _, h = self.used(uid)
        if comes:
            b, h = self.bytes_with(uid, version.nbytes, version.pieces, None), h + version.handles
        assert QUOTAS.user_bytes is not None
        assert QUOTAS.user_descriptors is not None
        return b <= QUOTAS.user_bytes and h <= QUOTAS.user_descriptors

    def fits(self, uid: int, name: str, nbytes: int, handles: int, pieces: frozenset[int]) -> bool:
        """Whether there is room for one more; where nothing is asked for, there is."""
        previous = self.current(name)
        entries = int(previous is None)
        gone = previous if previous is not None and not any(v is previous for _, v in self.leases) else None
        ceilings: list[tuple[int | None, str, MVersion | None]] = [(None, "max", gone)]
        if uid != KEEPER:
            moves = previous is not None and previous.owner == uid and not self.holds(uid, previous)
            ceilings.append((uid, "user", previous if moves else None))
        for whose, prefix, without in ceilings:
            now, then = self.used(whose), self.used(whose, without=without)
            most = [getattr(QUOTAS, f"{prefix}_{what}") for what in ("bytes", "entries", "descriptors")]
            asked = [self.bytes_with(whose, nbytes, pieces, None) - now[0], entries, handles]
            then_bytes = self.bytes_with(whose, nbytes, pieces, without)
            would = [then_bytes, now[1] + entries, then[2] + handles]
            for limit, more, total in zip(most, asked, would, strict=True):
                if limit is not None and more and total > limit:
                    return False
        return True

    def is_home_of_another(self, uid: int, name: str) -> bool:
        return name.startswith("~") and not name.startswith(f"~{uid}/")

    def may_publish(self, uid: int, name: str) -> str | None:
        if uid == NOBODY or self.is_home_of_another(uid, name):
            return "AccessDeniedError"
        current = self.current(name)
        return "AccessDeniedError" if current is not None and current.owner != uid else None

    def settle(self, version: MVersion) -> list[Any]:
        if version.state in ("superseded", "withdrawn") and not any(v is version for _, v in self.leases):
            version.state = "freed"
            version.watchers.clear()
            return [("free", version.token)]
        return []

    def notify(self, version: MVersion, reason: str) -> list[Any]:
        current = self.current(version.name)
        number = current.number if current else 0
        return [("notify", s, version.name, version.number, reason, number) for s in version.watchers]

    def attempt(self, waiter: MWaiter) -> Any:
        """What an attach gets as things stand: an error's name, a version, "claim" or "wait"."""
        current = self.current(waiter.name)
        uid = self.uids[waiter.session]
        version = current
        if waiter.wants:
            same = [v for v in self.versions if (v.name, v.number) == (waiter.name, waiter.wants)]
            if same and same[0].state in ("current", "superseded"):
                version = same[0]
            elif same or waiter.wants <= max((v.number for v in self.versions if v.name == waiter.name), default=0):
                return "NotFoundError"
            else:
                return "wait"
        if version is not None:
            if waiter.owner not in (None, version.owner):
                return "MismatchError"
            if all(version.meta.get(k) == v for k, v in (waiter.expect or {}).items()):
                if waiter.access == "rw" and not version.writable:
                    return "AccessDeniedError"
                return version if self.may_lease(uid, version) else "QuotaError"
            if not waiter.claims or version.owner != uid:
                return "MismatchError"
        if not waiter.claims:
            return "wait"
        there = self.claims.get(waiter.name)
        if self.is_home_of_another(uid, waiter.name) or waiter.owner not in (None, uid):
            made_by = None if there is None else self.uids[there]
            return "wait" if there is not None and waiter.owner in (None, made_by) else "AccessDeniedError"
        return "claim" if there is None else "wait"

    def serve(self, name: str) -> list[Any]:
        effects: list[Any] = []
        line = [w for w in self.waiters if w.name == name]
        for waiter in line:
            got = self.attempt(waiter)
            if got == "wait":
                continue
            self.waiters.remove(waiter)
            if got == "claim":
                self.claims[name] = waiter.session
                effects.append(("claimed", waiter.session, waiter.call, name))
            elif isinstance(got, str):
                effects.append(("refused", waiter.session, waiter.call, got))
            else:
                self.leases.append((waiter.session, got))
                effects.append(("granted", waiter.session, waiter.call, got.number))
        return effects

    def withdraw(self, version: MVersion, reason: str) -> list[Any]:
        version.state = "withdrawn"
        version.expires = None
        return self.notify(version, reason) + self.settle(version)


def told(effects: list[Effect]) -> list[Any]:
    """Effects as plain tuples."""
    out: list[Any] = []
    for effect in effects:
        match effect:
            case Free(token):
                out.append(("free", token))
            case Answered(session, call, Lease() as lease):
                out.append(("granted", session.id, call, lease.version.number))
            case Answered(session, call, Claim() as claim):
                out.append(("claimed", session.id, call, claim.name))
            case Answered(session, call, error):
                out.append(("refused", session.id, call, type(error).__name__))
            case Notify(session, name, version, reason, current):
                out.append(("notify", session.id, name, version, reason, current))
    return out


def same(real: list[Effect], expected: list[Any]) -> None:
    """The same effects; each kind in the same order, unless those of several names come together."""
    for kind in ("granted", "claimed", "refused", "notify", "free"):
        mine = [effect for effect in told(real) if effect[0] == kind]
        theirs = [effect for effect in expected if effect[0] == kind]
        if kind in ("free", "notify"):
            mine.sort()
            theirs.sort()
        assert mine == theirs


class CatalogueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.real = Catalogue(QUOTAS, keeper_uid=KEEPER)
        self.model = Model()
        self.now = 0.0
        self.tokens = 0
        self.calls = 0
        self.publications: dict[int, Publication] = {}
        self.rows = Rows()

    # -- picking ------------------------------------------------------------------------------------------------
    def session(self, pick: int) -> Session:
        return list(self.real.sessions.values())[pick % len(self.real.sessions)]

    def fails(self, expected: str, method: Any, *arguments: Any, **options: Any) -> None:
        with pytest.raises(VramError) as caught:
            method(*arguments, **options)
        assert type(caught.value).__name__ == expected

    # -- connections --------------------------------------------------------------------------------------------
    @rule(uid=st.sampled_from([KEEPER, ANN, ANN, BOB, NOBODY]))
    def connect(self, uid: int) -> None:
        session = self.real.connect(uid)
        self.model.uids[session.id] = uid

    @precondition(lambda self: self.real.sessions)
    @rule(pick=PICK)
    def disconnect(self, pick: int) -> None:
        session = self.session(pick)
        model = self.model
        expected: list[Any] = []
        model.waiters = [w for w in model.waiters if w.session != session.id]
        for version in model.versions:
            version.watchers = [s for s in version.watchers if s != session.id]
        for key in [k for k, p in model.pending.items() if p[0] == session.id]:
            del model.pending[key], self.publications[key]
        for name in [n for n, c in model.claims.items() if c == session.id]:
            del model.claims[name]
            expected += model.serve(name)
        held = [v for s, v in model.leases if s == session.id]
        model.leases = [(s, v) for s, v in model.leases if s != session.id]
        for version in held:
            expected += model.settle(version)
        same(self.real.disconnect(session, self.now), expected)
        del model.uids[session.id]

    # -- publishing ---------------------------------------------------------------------------------------------
    @precondition(lambda self: self.real.sessions and len(self.publications) < 4)
    @rule(
        pick=PICK,
        name=NAMES,
        nbytes=st.integers(1, 20),
        handles=st.integers(1, 6),
        writable=st.booleans(),
        meta=METAS,
        ttl=st.sampled_from([None, None, 3.0, 10.0]),
        use_claim=st.booleans(),
        at_once=st.integers(0, 3),
        pieces=st.frozensets(st.sampled_from(sorted(PIECES)), max_size=2),
    )
    def begin(
        self,
        pick: int,
        name: str,
        nbytes: int,
        handles: int,
        writable: bool,
        meta: dict[str, str],
        ttl: float | None,
        use_claim: bool,
        at_once: int,
        pieces: frozenset[int] = frozenset(),
    ) -> None:
        session = self.session(pick)
        known = sum(PIECES[piece] for piece in pieces)
        nbytes += known
        options: dict[str, Any] = {"nbytes": nbytes, "handles": handles, "writable": writable, "meta": meta, "ttl": ttl}
        if use_claim:
            mine = [c.id for c in session.claims.values() if c.name == name]
            options["claim"] = mine[pick % len(mine)] if mine else 0
        refused = self.model.may_publish(session.uid, name)
        options |= {"pieces": {piece: PIECES[piece] for piece in pieces}, "known": known}
        if refused is None and not self.model.fits(session.uid, name, nbytes, handles, pieces):
            refused = "QuotaError"
        if refused is not None:
            self.fails(refused, begin, self.real, session, name, **options)
            return
        publication = begin(self.real, session, name, **options)
        entries = int(self.model.current(name) is None)
        self.model.pending[publication.id] = (session.id, name, nbytes, handles, entries, pieces)
        self.publications[publication.id] = publication
        if at_once:
            self.finish(publication)

    @precondition(lambda self: self.publications)
    @rule(pick=PICK, give_up=st.booleans())
    def end(self, pick: int, give_up: bool) -> None:
        publication = list(self.publications.values())[pick % len(self.publications)]
        if give_up:
            self.real.abandon(publication)
            del self.model.pending[publication.id], self.publications[publication.id]
        else:
            self.finish(publication)

    def finish(self, publication: Publication) -> None:
        model = self.model
        session_id, name, nbytes, handles, _, pieces = model.pending.pop(publication.id)
        del self.publications[publication.id]
        uid = model.uids[session_id]
        self.tokens += 1
        token = f"token {self.tokens}"
        session_claims = dict(self.real.sessions[session_id].claims)
        refused = model.may_publish(uid, name)
        if refused is None and not model.fits(uid, name, nbytes, handles, pieces):
            refused = "QuotaError"
        if refused is not None:
            self.fails(refused, self.real.commit, publication, token, self.now)
            return
        previous = model.current(name)
        number = 1 + max((v.number for v in model.versions if v.name == name), default=0)
        meta = msgspec.msgpack.decode(publication.notes)
        expires = None if publication.asked.ttl is None else self.now + publication.asked.ttl
        made = MVersion(name, number, uid, token, nbytes, handles, publication.asked.writable, meta, expires, "coming")
        made.pieces = pieces
        model.versions.append(made)
        expected: list[Any] = []
        if previous is not None:
            previous.state, previous.expires = "superseded", None
        made.state = "current"
        if previous is not None:
            expected += model.notify(previous, "replaced")
            expected += model.settle(previous)
        if publication.asked.claim in session_claims:
            del model.claims[name]
        expected += model.serve(name)
        version, effects = self.real.commit(publication, token, self.now)
        assert version.number == number
        same(effects, expected)

    # -- attaching ----------------------------------------------------------------------------------------------
    @precondition(lambda self: self.real.sessions)
    @rule(
        pick=PICK,
        name=NAMES,
        wants=st.integers(0, 3),
        access=st.sampled_from(["r", "rw", "cow"]),
        expect=EXPECTS,
        wait=st.sampled_from([0.0, 0.0, 2.0, 6.0, None]),
        claim=st.booleans(),
        owner=st.sampled_from([None, None, None, ANN, BOB]),
    )
    def attach(
        self,
        pick: int,
        name: str,
        wants: int,
        access: str,
        expect: dict[str, str] | None,
        wait: float | None,
        claim: bool,
        owner: int | None,
    ) -> None:
        session = self.session(pick)
        wants = 0 if claim else wants
        self.calls += 1
        model = self.model
        waiter = MWaiter(
            session.id, self.calls, name, wants, access, expect, claim, None if wait is None else self.now + wait, owner
        )
        got = "AccessDeniedError" if claim and session.uid == NOBODY else model.attempt(waiter)
        if got == "wait" and wait == 0.0:
            got = "BusyError" if claim and name in model.claims else "NotFoundError"
        options: dict[str, Any] = {"call": self.calls, "version": wants, "access": access}
        options |= {"expect": expect, "wait": wait, "claim": claim, "owner": owner}
        if isinstance(got, str) and got not in ("wait", "claim"):
            self.fails(got, attach, self.real, session, name, self.now, **options)
            return
        real = attach(self.real, session, name, self.now, **options)
        if got == "wait":
            model.waiters.append(waiter)
            assert not isinstance(real, Lease | Claim)
        elif got == "claim":
            assert isinstance(real, Claim)
            model.claims[name] = session.id
        else:
            assert isinstance(real, Lease)
            assert real.version.token == got.token
            model.leases.append((session.id, got))

    @precondition(lambda self: any(v.state == "current" for v in self.model.versions))
    @rule(pick=PICK, reader=PICK, nbytes=st.integers(1, 6))
    def replace_under_a_reader(self, pick: int, reader: int, nbytes: int) -> None:
        """What calls at random seldom do in a row: read what is there, and have its owner publish the next."""
        there = [v for v in self.model.versions if v.state == "current"]
        version = there[pick % len(there)]
        owners = [at for at, s in enumerate(self.real.sessions.values()) if s.uid == version.owner]
        if owners:
            self.attach(reader, version.name, 0, "r", None, 0.0, False, None)
            self.begin(owners[0], version.name, nbytes, 1, False, {}, None, False, 1)

    @precondition(lambda self: self.real.leases)
    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        lease = list(self.real.leases.values())[pick % len(self.real.leases)]
        model = self.model
        version = next(v for v in model.versions if v.token == lease.version.token)
        model.leases.remove((lease.session.id, version))
        same(self.real.release(lease.session, lease.id, self.now), model.settle(version))

    @precondition(lambda self: self.model.waiters)
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        waiter = self.model.waiters.pop(pick % len(self.model.waiters))
        self.real.cancel(self.real.sessions[waiter.session], waiter.call)

    @precondition(lambda self: self.real.waiting.claims)
    @rule(pick=PICK)
    def drop_claim(self, pick: int) -> None:
        claim = list(self.real.waiting.claims.values())[pick % len(self.real.waiting.claims)]
        del self.model.claims[claim.name]
        expected = self.model.serve(claim.name)
        same(self.real.release(self.real.sessions[claim.session], claim.id, self.now), expected)

    # -- retiring -----------------------------------------------------------------------------------------------
    @precondition(lambda self: self.real.sessions)
    @rule(pick=PICK, name=NAMES, number=st.integers(0, 3), revoke=st.booleans())
    def remove(self, pick: int, name: str, number: int, revoke: bool) -> None:
        session = self.session(pick)
        model = self.model
        options: dict[str, Any] = {"now": self.now, "revoke": revoke}
        states = ("current", "superseded", "withdrawn") if revoke else ("current", "superseded")
        usable = [v for v in model.versions if v.name == name and v.state in states]
        current = model.current(name)
        if number:
            doomed = [v for v in usable if v.number == number]
        else:
            doomed = [v for v in usable if current is None or v.owner == current.owner]
            if revoke and current is None:
                doomed = [v for v in doomed if session.uid in (v.owner, KEEPER)] or doomed
        if not doomed:
            self.fails("NotFoundError", self.real.remove, session, name, number, **options)
            return
        if any(session.uid not in (v.owner, KEEPER) for v in doomed):
            self.fails("AccessDeniedError", self.real.remove, session, name, number, **options)
            return
        expected: list[Any] = []
        for version in doomed:  # oldest first, so what is current is told of the others as such
            asked, version.revoked = version.revoked, version.revoked or revoke
            if version.state != "withdrawn":
                expected += model.withdraw(version, "revoked" if revoke else "removed")
            elif not asked:
                expected += model.notify(version, "revoked")
        same(self.real.remove(session, name, number, **options), expected)

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        model = self.model
        model.now = self.now
        expected: list[Any] = []
        due: list[tuple[float, Any]] = [(w.deadline, w) for w in model.waiters if w.deadline is not None]
        due += [(v.expires, v) for v in model.versions if v.expires is not None]
        for _, one in sorted((item for item in due if item[0] <= self.now), key=lambda item: item[0]):
            match one:
                case MWaiter():
                    model.waiters.remove(one)
                    expected.append(("refused", one.session, one.call, "WaitTimeoutError"))
                case MVersion():
                    expected += model.withdraw(one, "expired")
        deadline = self.real.next_deadline
        earliest = min(
            [w.deadline for w in model.waiters if w.deadline is not None]
            + [v.expires for v in model.versions if v.expires is not None],
            default=None,
        )
        assert earliest is None or (deadline is not None and deadline <= earliest)
        real: list[Effect] = []
        while (due := self.real.next_deadline) is not None and due <= self.now:
            real += self.real.expire(self.now)
        same(real, expected)

    # -- news ---------------------------------------------------------------------------------------------------
    @precondition(lambda self: self.real.sessions)
    @rule(pick=PICK, name=NAMES, number=st.integers(1, 3))
    def watch(self, pick: int, name: str, number: int) -> None:
        session = self.session(pick)
        model = self.model
        current = model.current(name)
        version = next((v for v in model.versions if (v.name, v.number) == (name, number)), None)
        expected: list[Any] = []
        if version is None or version.state != "current":
            reason = "replaced" if version is not None and version.state == "superseded" else "removed"
            if version is not None and version.revoked and version.state == "withdrawn":
                reason = "revoked"
            expected.append(("notify", session.id, name, number, reason, current.number if current else 0))
        if version is not None and version.state != "freed" and session.id not in version.watchers:
            version.watchers.append(session.id)
        news = self.real.watch(session, name, number)
        same([] if news is None else [news], expected)

    # -- restart ------------------------------------------------------------------------------------------------
    @invariant()
    def write(self) -> None:
        self.rows.write(self.real)

    @rule(anew=st.booleans())
    def restart(self, anew: bool) -> None:
        """What changed in each step is enough; so is all that there is now."""
        for publication in list(self.publications.values()):
            self.real.abandon(publication)
            del self.model.pending[publication.id], self.publications[publication.id]
        if anew:
            self.rows = Rows()
            self.rows.write_all(self.real)
        else:
            self.rows.write(self.real)
        self.real = self.rows.restore(QUOTAS, keeper_uid=KEEPER)

    # -- always -------------------------------------------------------------------------------------------------
    @invariant()
    def the_books_agree(self) -> None:
        real, model = self.real, self.model
        total = real.accounts.total
        assert (total.nbytes, total.entries, total.handles) == model.used(None)
        for uid in (KEEPER, ANN, BOB, NOBODY):
            used = real.accounts.of(uid)
            assert (used.nbytes, used.entries, used.handles) == model.used(uid)
        assert sorted(v.token for v in real.versions.values()) == sorted(
            v.token for v in model.versions if v.state != "freed"
        )
        assert len(real.versions) == sum(v.state != "freed" for v in model.versions)
        assert [v.name for v, _ in real.names.listed()] == sorted(
            v.name for v in model.versions if v.state == "current"
        )
        assert len(real.leases) == len(model.leases)
        assert sorted((v.token, s) for s, v in model.leases) == sorted(
            (one.version.token, one.session.id) for one in real.names.leases_under("")
        )
        for name in ("a", "b", "c/d", "e"):
            held = [v for _, v in model.leases if v.name == name]
            assert real.names.held(name) == (len(held), sum({v.token: v.nbytes for v in held}.values()))
        found = [(one.version.name, one.version.number, one.id) for one in real.names.leases_under("")]
        assert found == sorted(found)
        assert real.waiting.count == len(model.waiters)
        assert {c.name: c.session for c in real.waiting.claims.values()} == model.claims
        assert set(real.sessions) == set(model.uids)


TestCatalogueMachine = CatalogueMachine.TestCase
TestCatalogueMachine.settings = settings(stateful_step_count=60)
