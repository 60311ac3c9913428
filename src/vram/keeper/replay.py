"""Making the calls of a log again: the books, and which connections there were, as the keeper before had them."""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import msgspec

from ..errors import ProtocolError, VramError
from . import messages as m
from . import recorded as kinds
from .catalogue import Catalogue
from .connection import Held
from .publications import settle
from .records import (
    Claim,
    Claimed,
    Effect,
    Evicted,
    Free,
    Granted,
    Move,
    Publication,
    Refused,
    Session,
    Version,
    Waiter,
)

_REMEMBERED = 4096  # results of each connection

_decode = msgspec.msgpack.Decoder().decode


@dataclass(slots=True)
class Peer:
    """A connection, as the log has it; `evicted` says why it was to be ended.
    `results` has by call a Lease, a Claim, the number of a published version, an error, or None for done."""

    number: int
    session: int = 0
    results: OrderedDict[int, Any] = field(default_factory=OrderedDict)
    evicted: Evicted | None = None

    def note(self, call: int, result: object) -> None:
        """Remember what came of a call."""
        if call:
            self.results[call] = result
            if len(self.results) > _REMEMBERED:
                self.results.popitem(last=False)


class Replay:
    """The state in which a log leaves a catalogue. The log has the names of users, and the system is not asked.
    `token` makes a token of descriptors that are not here yet: first number, how many, and their bytes."""

    def __init__(self, catalogue: Catalogue, peers: Iterable[Peer], token: Callable[[int, int, int], Held]) -> None:
        self.catalogue = catalogue
        self.peers = {peer.number: peer for peer in peers}
        self._by_session = {peer.session: peer for peer in self.peers.values() if peer.session}
        self.token = token
        self.requests: dict[int, bytes] = {}  # of publications
        self.committing: tuple[Publication, bytes] | None = None  # what a record that did not fit was to publish

    def apply(self, kind: int, body: bytes) -> None:
        """Make the call of one record again. Raises ProtocolError if its outcome is not the log's."""
        try:
            effects = self._apply(kind, body)
        except VramError as error:
            if isinstance(error, ProtocolError):
                raise
            raise ProtocolError(f"the log of the keeper before does not fit its books: {error}") from None
        except (LookupError, ValueError, TypeError, struct.error, msgspec.MsgspecError) as error:
            raise ProtocolError(f"the log of the keeper before does not fit its books: {error!r}") from None
        for effect in effects:
            self._hear(effect)

    def _hear(self, effect: Effect) -> None:
        if isinstance(effect, Free):
            effect.token.drop()
        elif isinstance(effect, (Evicted, Granted, Claimed, Refused)):
            peer = self._by_session.get(effect.session.id)
            if peer is None:
                return
            if isinstance(effect, Evicted):
                peer.evicted = effect
            elif isinstance(effect, Granted):
                peer.note(effect.call, effect.lease)
            elif isinstance(effect, Claimed):
                peer.note(effect.call, effect.claim)
            else:
                peer.note(effect.call, effect.error)

    def _apply(self, kind: int, body: bytes) -> Iterable[Effect]:
        books = self.catalogue
        if kind == kinds.ATTACH:
            return self._attach(body)
        if kind == kinds.RELEASE:
            number, now = kinds.RELEASE_HEAD.unpack_from(body)
            leases = struct.unpack_from(f"<{len(body) // 8 - 2}Q", body, kinds.RELEASE_HEAD.size)
            return books.release_all(books.sessions[number], leases, now)
        if kind == kinds.BEGIN:
            return self._begin(body)
        said = _decode(body)
        if kind == kinds.CONNECT:
            number, uid, pid, label, host = said
            _check("session", books.connect(uid, pid, label, host).id, number)
        elif kind == kinds.EXPIRE:
            return books.expire(*said)
        elif kind == kinds.OPENED:
            self.peers[said[0]] = Peer(said[0])
        elif kind == kinds.WELCOMED:
            peer = self.peers[said[0]]
            peer.session = said[1]
            self._by_session[peer.session] = peer
        elif kind == kinds.CLOSED:
            gone = self.peers.pop(said[0], None)
            if gone is not None:
                self._by_session.pop(gone.session, None)
        else:
            return self._of_session(kind, said)
        return ()

    def _attach(self, body: bytes) -> Iterable[Effect]:
        number, came, now = kinds.ATTACH_HEAD.unpack_from(body)
        request = cast("m.Attach", m.decode_request(body[kinds.ATTACH_HEAD.size :]))
        session = self.catalogue.sessions[number]
        result = self.catalogue.attach(
            session,
            request.name,
            now,
            call=request.call,
            version=request.version,
            access=request.access,
            expect=request.expect,
            wait=request.wait,
            claim=request.claim,
            owner=request.owner,
            purpose=request.purpose,
        )
        if isinstance(result, Waiter):
            _check("waiter", result.order, came)
            return ()
        _check("lease", result.id, came)
        peer = self._by_session.get(number)
        if peer is not None:
            peer.note(request.call, result)
        return ()

    def _begin(self, body: bytes) -> Iterable[Effect]:
        (size,) = kinds.BEGIN_HEAD.unpack_from(body)
        start = kinds.BEGIN_HEAD.size
        session, number, name, rest = _decode(body[start : start + size])
        publication = self.catalogue.begin(self.catalogue.sessions[session], name, **rest)
        _check("publication", publication.id, number)
        self.requests[number] = body[start + size :]
        return ()

    def _of_session(self, kind: int, said: list[Any]) -> Iterable[Effect]:
        books, session = self.catalogue, self.catalogue.sessions.get(said[0])
        if session is None:
            raise ProtocolError(f"the log names session {said[0]}, which there is not")
        if kind == kinds.COMMIT:
            return self._commit(session, said)
        if kind == kinds.ARRIVED:
            books.arrived(session.publications[said[1]], *said[2:])
        elif kind == kinds.ABANDON:
            self.requests.pop(said[1], None)
            if said[1] in session.publications:
                books.abandon(session.publications[said[1]])
        elif kind == kinds.LEAVE:
            return books.disconnect(session, said[1])
        elif kind == kinds.USER:
            session.user = said[1]
        elif kind == kinds.CANCEL:
            books.cancel(session, said[1])
        elif kind == kinds.DROP_CLAIM:
            return books.drop_claim(session, said[1], said[2])
        elif kind == kinds.REMOVE:
            effects = books.remove(session, said[1], said[2], now=said[3], revoke=said[4], force=said[5])
            self._note(session, said[6], None)
            return effects
        elif kind == kinds.PAGE:
            page = self.token(said[2], 1, said[3])
            return books.give_page(session, said[1], page)
        elif kind == kinds.UPDATE:
            books.update(session, said[1], said[2])
        elif kind == kinds.UPDATED:
            books.updated(session, said[1], said[2], said[3], whole=said[4])
        elif kind == kinds.WATCH:
            books.watch(session, said[1], said[2])
        else:
            raise ProtocolError(f"the log has a record of kind {kind}, which there is not")
        return ()

    def _note(self, session: Session, call: int, result: object) -> None:
        peer = self._by_session.get(session.id)
        if peer is not None:
            peer.note(call, result)

    def _commit(self, session: Session, said: list[Any]) -> Iterable[Effect]:
        _, publication, number, first, handles, now, nbytes, held, call = said
        token = self.token(first, handles, held)
        under_way = session.publications[publication]
        self.committing = under_way, self.requests.pop(publication)
        request = cast("m.Publish", m.decode_request(self.committing[1]))
        version, effects = self.catalogue.commit(under_way, token, now, nbytes=nbytes)
        _check("version", version.number, number)
        self.committing = None
        settle(version, request)
        self._note(session, call, number)
        return effects

    def finish(self) -> None:
        """End what nobody will go on with: publications of which not everything had come."""
        for session in self.catalogue.sessions.values():
            for publication in list(session.publications.values()):
                self.catalogue.abandon(publication)


def _check(what: str, number: int, said: int) -> None:
    if number != said:
        raise ProtocolError(f"the log of the keeper before does not fit its books: {what} {number}, not {said}")


def renumber(catalogue: Catalogue, next_id: int) -> None:
    """Have a catalogue count on from `next_id`, and its deadlines stand in an order that does not depend on how they
    came: so it goes on alike where it was written down and where it was read."""

    def place(due: Waiter | Version | Claim | Move) -> tuple[object, ...]:
        if isinstance(due, Waiter):
            return 0, "", due.order
        if isinstance(due, Version):
            return 1, due.name, due.number
        return (2, "", due.id) if isinstance(due, Claim) else (3, "", due.lease.id)

    awaited = sorted((when, place(due), due) for when, _, due in catalogue._deadlines if catalogue._is_awaited(due))
    catalogue._deadlines = [(when, at - len(awaited), due) for at, (when, _, due) in enumerate(awaited)]
    catalogue._stale_deadlines = 0
    catalogue._ids = count(next_id)
