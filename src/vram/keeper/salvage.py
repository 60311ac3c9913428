"""What is sure, of a log that does not fit the books: the entries, and not who was connected and had them.

A second line of defence: a mistake of ours in :mod:`.replay`, or in what is written down, is to cost every client its
connection, and nobody an entry. Entries need little of the books: a publication says all of what there is from then on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, cast

import msgspec

from ..errors import VramError
from . import messages as m
from . import recorded as kinds
from .catalogue import Catalogue
from .fields import record_from
from .limits import Quotas
from .publications import settle
from .records import Free, Publication, Version, VersionRow
from .replay import Peer, Replay
from .rules import home_of
from .snapshot import Books, restore

_BEYOND = 1 << 32  # numbers that calls behind the record may have drawn
_RUN = (
    "nbytes", "handles", "writable", "meta", "ttl", "record", "updatable", "lease", "pieces", "known",
)  # fmt: skip

_decode = msgspec.msgpack.Decoder().decode
_Begun = tuple[int, str, dict[str, Any], bytes]  # session, name, what begin() was told, request


class Salvage:
    """The entries of a replay that ended too soon; `catalogue` has them without sessions, leases, claims and waiters.
    The catalogue of the replay is not to be used any more."""

    def __init__(self, replay: Replay) -> None:
        before = replay.catalogue
        self._token = replay.token
        self._peers = replay.peers
        self._users = {one.id: (one.uid, one.pid, one.label, one.host) for one in before.sessions.values()}
        begun = [one for session in before.sessions.values() for one in session.publications.values()]
        self._begun: dict[int, _Begun] = {
            one.id: _begun(one, replay.requests[one.id]) for one in begun if one.id in replay.requests
        }
        if replay.committing is not None:
            one, request = replay.committing
            self._begun[one.id] = _begun(one, request)
        self._quotas = before.accounts.quotas
        self.catalogue = _entries_of(before)

    def go_on(self, records: Iterable[tuple[int, bytes]]) -> None:
        """Do what the records from the one that did not fit on say of entries, as far as that can be."""
        for kind, body in records:
            try:
                self._apply(kind, body)
            except (VramError, LookupError, ValueError, TypeError, msgspec.MsgspecError):
                continue  # of that there is nothing to be had
        for session in list(self.catalogue.sessions.values()):
            _drop(self.catalogue.disconnect(session, 0.0))
        self.catalogue.accounts.quotas = self._quotas

    def _apply(self, kind: int, body: bytes) -> None:
        if kind == kinds.BEGIN:
            (size,) = kinds.BEGIN_HEAD.unpack_from(body)
            start = kinds.BEGIN_HEAD.size
            session, number, name, rest = _decode(body[start : start + size])
            self._begun[number] = session, name, rest, body[start + size :]
        elif kind in (kinds.ATTACH, kinds.RELEASE):
            return
        else:
            self._other(kind, _decode(body))

    def _other(self, kind: int, said: list[Any]) -> None:
        if kind == kinds.COMMIT:
            self._commit(*said)
        elif kind == kinds.ARRIVED:
            _, number, nbytes, pieces, known = said
            rest = self._begun[number][2]
            rest["nbytes"] = max(nbytes, rest["nbytes"])
            rest["pieces"], rest["known"] = {**(rest.get("pieces") or {}), **pieces}, rest.get("known", 0) + known
        elif kind == kinds.ABANDON:
            self._begun.pop(said[1], None)
        elif kind == kinds.REMOVE:
            current = self.catalogue._current(said[1])
            if current is not None and said[2] in (0, current.number):
                _drop(self.catalogue._withdraw(current, "removed", 0.0))
        elif kind == kinds.CONNECT:
            self._users[said[0]] = (said[1], said[2], said[3], said[4])
        elif kind == kinds.OPENED:
            self._peers[said[0]] = Peer(said[0])
        elif kind == kinds.CLOSED:
            self._peers.pop(said[0], None)

    def _commit(
        self,
        _session: int,
        publication: int,
        number: int,
        first: int,
        handles: int,
        now: float,
        nbytes: int | None,
        held: int,
        _call: int,
    ) -> None:
        session, name, rest, request = self._begun.pop(publication)
        books = self.catalogue
        token = self._token(first, handles, held)
        words = cast("m.Publish", m.decode_request(request))
        current = books._current(name)
        if rest.get("lease"):
            if current is None or current.number != number:
                return
            self._move(current, token, rest, nbytes)
            settle(current, words)
            return
        uid, pid, label, host = self._users[session]
        if current is not None and (current.owner != uid or current.number >= number):
            # It was gone by then, or it is this one, under another number.
            _drop(books._withdraw(current, "removed", now))
        last = books._last if name in books._last else books._numbers
        last[name] = number - 1
        maker = books.connect(uid, pid, label, host)
        maker.user = home_of(name)  # that user could, or the log would not say so
        under_way = books.begin(maker, name, **{**rest, "claim": 0})
        version, effects = books.commit(under_way, token, now, nbytes=nbytes)
        settle(version, words)
        version.publisher = session
        _drop([*effects, *books.disconnect(maker, now)])

    def _move(self, version: Version, token: Any, rest: dict[str, Any], nbytes: int | None) -> None:
        """Have other memory hold the bytes of a version, which is parked then if it was not."""
        books = self.catalogue
        books.accounts.drop(version.owner, version, 1)
        version.token, version.nbytes, version.handles = token, nbytes or rest["nbytes"], rest["handles"]
        version.pieces, version.known = rest.get("pieces") or {}, rest.get("known", 0)
        version.parked = not version.parked
        books.accounts.keep(version.owner, version, 1)


def _begun(one: Publication, request: bytes) -> _Begun:
    return one.session.id, one.name, {name: getattr(one, name) for name in _RUN}, request


def _drop(effects: Iterable[object]) -> None:
    for effect in effects:
        if isinstance(effect, Free):
            effect.token.drop()


def _entries_of(before: Catalogue) -> Catalogue:
    """Return a catalogue with the entries of another one, and nothing else of it."""
    tokens: list[Any] = []

    def number(token: Any) -> int:
        tokens.append(token)
        return len(tokens) - 1

    there = [known.current for known in before._names.values() if known.current is not None]
    rows = [
        record_from(
            VersionRow, one, current=True, token=number(one.token), leases=[], watchers=[], meta=msgspec.Raw(one.notes),
            body=bytes(one.body), updating=False, torn=one.torn or one.updating, ended=[],
        )
        for one in there
    ]  # fmt: skip
    names = {one.name for one in there}
    last = {name: number for name, number in before._last.items() if name in names}
    gone = [(name, number) for name, number in before._last.items() if name not in names]
    next_id, numbers = next(before._ids) + _BEYOND, [*before._numbers.items(), *gone]
    books = Books(next_id, before._floor, last, numbers, [], rows, [], [], [])
    unlimited = Quotas(user_entries=None)  # what was published once had room
    made, _ = restore(
        books, tokens.__getitem__, unlimited, keeper_uid=before.accounts.keeper_uid, nobody=before.nobody,
        claim_timeout=before.claim_timeout,
    )  # fmt: skip
    made._ids = itertools.count(books.next_id)
    return made
