"""The calls that clients make again at a keeper that goes on for another one, and their outcomes so far.

The keeper says ``Recovered`` to each client. Until a client has said ``Repeating``, the keeper heeds only
messages without a number; then the client's calls come once more. A call whose outcome is in the rows gets that as its
answer; all other calls are done.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import errors
from . import event_log
from . import messages as m
from .failures import failure
from .records import Claim, Lease, Session

if TYPE_CHECKING:
    from .connection import Connection

_MOST_DUE = 4096  # calls of one client


class Unsettled:
    """The calls that a client may make again; `keeper` is the number of the keeper that asked it to, and `outcomes` has
    the versions that were published (0: only done), by call.
    Calls in `due` come, once that `is_known`; `answered` waited and were answered since, and may come all the same."""

    __slots__ = ("answered", "due", "given_up", "granted", "is_known", "keeper", "outcomes")

    def __init__(self, keeper: int, outcomes: Mapping[int, int], session: Session | None) -> None:
        self.keeper = keeper
        self.outcomes = dict(outcomes)
        there: list[Any] = [] if session is None else [*session.leases.values(), *session.claims.values()]
        self.granted: dict[int, Lease | Claim] = {one.call: one for one in there}
        self.given_up = 0  # how many it has said
        self.due: set[int] = set()
        self.answered: set[int] = set()
        self.is_known = False


class Settling:
    """The clients of a service that may make calls again."""

    def __init__(self, service: Any) -> None:
        self.service = service
        self.waiting: dict[Connection, Unsettled] = {}

    def is_over(self, connection: Connection, payload: bytes) -> bool:
        """Whether a request of such a client needs nothing more to be done."""
        unsettled, session = self.waiting[connection], connection.session
        try:
            request = m.decode_request(payload)
        except errors.VramError:
            return False
        if session is None:
            return False
        if isinstance(request, m.Repeating):
            self._repeating(connection, session, unsettled, request)
            return True
        call = request.call
        if isinstance(request, m.Cancel):
            self._take_back(session, unsettled, request.waiting)
            self._settle(connection, unsettled)
            return False
        if not unsettled.is_known:  # said before it heard of that: what has a number comes again
            return call != 0
        if call not in unsettled.due:
            return False
        unsettled.due.discard(call)
        self._settle(connection, unsettled)
        if call in unsettled.answered:
            unsettled.answered.discard(call)
            return True
        return self._answer(connection, session, unsettled, call) or (
            call in session.waiters and isinstance(request, m.Attach)
        )

    def _repeating(self, connection: Connection, session: Session, unsettled: Unsettled, request: m.Repeating) -> None:
        if request.keeper != unsettled.keeper or unsettled.is_known:
            return
        unsettled.due.update(request.calls)
        unsettled.given_up += len(request.given_up)
        if max(len(unsettled.due), unsettled.given_up) > _MOST_DUE:
            said = errors.ProtocolError(f"more than {_MOST_DUE} calls that come again")
            event_log.failed(connection, "repeating", said)
            connection.send(m.encode(failure(0, said)))
            connection.close()
            return
        unsettled.is_known = not request.more
        if unsettled.is_known:
            unsettled.answered &= unsettled.due
        for given_up in request.given_up:
            self._take_back(session, unsettled, given_up)
        self._settle(connection, unsettled)

    def _answer(self, connection: Connection, session: Session, unsettled: Unsettled, call: int) -> bool:
        """Say again what came of a call, if anything did and that is still so."""
        service, granted = self.service, _granted(session, unsettled, call)
        if isinstance(granted, Lease):
            service._send_lease(connection, call, granted)
        elif isinstance(granted, Claim):
            service._tell_claim(connection, call, granted)
        elif call not in unsettled.outcomes:
            return False
        elif version := unsettled.outcomes.pop(call):
            connection.send(m.encode(m.Published(call, version)))
        else:
            service._done(connection, call)
        return True

    def answers(self, connection: Connection, call: int, granted: Lease | Claim | None) -> None:
        """A call that waited is answered now, and would be made again if it came once more."""
        unsettled = self.waiting.get(connection)
        if unsettled is not None and granted is not None:
            unsettled.granted[call] = granted
        if unsettled is not None and (not unsettled.is_known or call in unsettled.due):
            unsettled.answered.add(call)

    def _settle(self, connection: Connection, unsettled: Unsettled) -> None:
        if unsettled.is_known and not unsettled.due:
            self.waiting.pop(connection, None)

    def _take_back(self, session: Session, unsettled: Unsettled, call: int) -> None:
        """Take back what a call was granted that nobody waits for any more: its client may not have heard of it."""
        service = self.service
        unsettled.due.discard(call)
        unsettled.outcomes.pop(call, None)
        granted = _granted(session, unsettled, call)
        if isinstance(granted, Lease):
            service.carry_out(service.catalogue.release_all(session, [granted.id], service.server.now()))
        elif isinstance(granted, Claim):
            service.carry_out(service.catalogue.drop_claim(session, granted.id, service.server.now()))
        else:
            service.catalogue.cancel(session, call)


def _granted(session: Session, unsettled: Unsettled, call: int) -> Lease | Claim | None:
    """Return the lease or claim that a call was granted, if it is not over."""
    one = unsettled.granted.get(call)
    is_there = one is not None and one in (session.leases.get(one.id), session.claims.get(one.id))
    return one if is_there else None
