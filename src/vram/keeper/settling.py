"""What clients say again to a keeper that follows one which was killed, and what came of it then.

It says ``Recovered`` to each. Until a client has said ``Repeating`` only what has no number is heeded; then its calls
come once more. What the log has an outcome of is answered with that, all else is done. A client may be idle, and say
nothing of it for long; so all of this moves when another keeper takes over, and stands at the beginning of a new log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from .. import errors
from . import event_log
from . import messages as m
from .failures import failure, raised
from .records import Claim, Lease, Session

if TYPE_CHECKING:
    from .connection import Connection

_MOST_DUE = 4096  # calls that come again: of more, nobody knows what came of them (replay)


class ResultRow(Struct, array_like=True):
    """What came of a call: a lease, a claim, a version, an error, or only that it was done."""

    call: int
    lease: int = 0
    claim: int = 0
    version: int = 0
    error: bytes = b""


class UnsettledRow(Struct, array_like=True):
    """What a client was asked to say again, at a takeover."""

    keeper: int  # who asked; 0: nobody did
    is_known: bool = False
    due: list[int] = []
    results: list[ResultRow] = []
    answered: list[int] = []


class Unsettled:
    """The requests that a client may say again; `keeper` is the number of the keeper that asked it to.
    Calls in `due` come, once that `is_known`; `answered` waited and were answered since, and may come all the same."""

    __slots__ = ("answered", "due", "is_known", "keeper", "results")

    def __init__(self, keeper: int, results: dict[int, Any]) -> None:
        self.keeper = keeper
        self.results = results
        self.due: set[int] = set()
        self.answered: set[int] = set()
        self.is_known = False

    def row(self) -> UnsettledRow:
        """Return it as it is written down."""
        results = result_rows(self.results)
        return UnsettledRow(self.keeper, self.is_known, sorted(self.due), results, sorted(self.answered))

    @classmethod
    def of(cls, row: UnsettledRow, session: Session) -> Unsettled:
        """Return what was written down."""
        made = cls(row.keeper, results_of(row.results, session))
        made.due.update(row.due)
        made.answered.update(row.answered)
        made.is_known = row.is_known
        return made


def result_rows(results: Mapping[int, Any]) -> list[ResultRow]:
    """Write down what came of calls."""
    rows = []
    for call, result in results.items():
        if isinstance(result, Lease):
            row = ResultRow(call, lease=result.id)
        elif isinstance(result, Claim):
            row = ResultRow(call, claim=result.id)
        elif isinstance(result, errors.VramError):
            row = ResultRow(call, error=m.encode(failure(call, result)))
        else:
            row = ResultRow(call, version=result or 0)
        rows.append(row)
    return rows


def queued_rows(queue: Iterable[tuple[bytes, object, int, int]]) -> list[ResultRow]:
    """Write down what the answers say that a client has not made room for: if the keeper dies they are not sent."""
    rows = []
    for payload, *_ in queue:
        said = m.decode_reply(payload)
        if isinstance(said, m.Attached):
            rows.append(ResultRow(said.call, lease=said.lease))
        elif isinstance(said, m.Claimed):
            rows.append(ResultRow(said.call, claim=said.claim))
        elif isinstance(said, m.Published):
            rows.append(ResultRow(said.call, version=said.version))
        elif isinstance(said, m.Error) and said.call:
            rows.append(ResultRow(said.call, error=payload))
        elif isinstance(said, m.Done):
            rows.append(ResultRow(said.call))
    return rows


def results_of(rows: list[ResultRow], session: Session | None) -> dict[int, Any]:
    """Return what came of calls. A lease or a claim that is over is left out: the call would be made again."""
    results: dict[int, Any] = {}
    for row in rows:
        if row.lease or row.claim:
            there = session and (session.leases.get(row.lease) if row.lease else session.claims.get(row.claim))
            if there:
                results[row.call] = there
        elif row.error:
            said = m.decode_reply(row.error)
            results[row.call] = raised(said) if isinstance(said, m.Error) else None
        else:
            results[row.call] = row.version or None
    return results


class Settling:
    """The clients of a service that may say something again."""

    def __init__(self, service: Any) -> None:
        self.service = service
        self.waiting: dict[Connection, Unsettled] = {}

    def is_over(self, connection: Connection, payload: bytes) -> bool:
        """Whether a request of a client that was asked to say everything again needs nothing more to be done."""
        unsettled, session = self.waiting[connection], connection.session
        try:
            request = m.decode_request(payload)
        except errors.VramError:
            return False
        call = request.call
        if session is None:
            return False
        if type(request) is m.Repeating:
            if request.keeper == unsettled.keeper and not unsettled.is_known:
                unsettled.due.update(request.calls)
                if len(unsettled.due) > _MOST_DUE:
                    said = errors.ProtocolError(f"more than {_MOST_DUE} calls that come again")
                    event_log.failed(connection, "repeating", said)
                    connection.send(m.encode(failure(0, said)))
                    connection.close()
                    return True
                unsettled.is_known = not request.more
                if unsettled.is_known:
                    unsettled.answered &= unsettled.due
                for given_up in request.given_up:
                    self._take_back(session, unsettled, given_up)
                self._settle(connection, unsettled)
            return True
        if type(request) is m.Cancel:
            self._take_back(session, unsettled, request.waiting)
            self._settle(connection, unsettled)
        if not unsettled.is_known:  # said before it heard of that: what has a number comes again
            return call != 0
        if call not in unsettled.due:
            return False
        unsettled.due.discard(call)
        self._settle(connection, unsettled)
        if call in unsettled.answered:
            unsettled.answered.discard(call)
            return True
        if call not in unsettled.results:
            return call in session.waiters and type(request) is m.Attach
        return self._answer(connection, session, call, unsettled.results.pop(call))

    def _answer(self, connection: Connection, session: Session, call: int, result: object) -> bool:
        """Say again what came of a call, if that is still so."""
        service = self.service
        if isinstance(result, Lease):
            if result.id not in session.leases:
                return False
            service._send_lease(connection, call, result)
        elif isinstance(result, Claim):
            if result.id not in session.claims:
                return False
            service._tell_claim(connection, call, result)
        elif isinstance(result, errors.VramError):
            connection.send(m.encode(failure(call, result)))
        elif result is None:
            service._done(connection, call)
        else:
            connection.send(m.encode(m.Published(call, result)))  # type: ignore[arg-type]
        return True

    def answers(self, connection: Connection, call: int) -> None:
        """A call that waited is answered now, and would be made again if it came once more."""
        unsettled = self.waiting.get(connection)
        if unsettled is not None and (not unsettled.is_known or call in unsettled.due):
            unsettled.answered.add(call)

    def _settle(self, connection: Connection, unsettled: Unsettled) -> None:
        if unsettled.is_known and not unsettled.due:
            self.waiting.pop(connection, None)

    def _take_back(self, session: Session, unsettled: Unsettled, call: int) -> None:
        """Take back what a call was granted that nobody waits for any more: who granted it may not have said so."""
        service = self.service
        unsettled.due.discard(call)
        result = unsettled.results.pop(call, None)
        if isinstance(result, Lease):
            service.carry_out(service.catalogue.release_all(session, [result.id], service.server.now()))
        elif isinstance(result, Claim):
            service.carry_out(service.catalogue.drop_claim(session, result.id, service.server.now()))
        else:
            service.catalogue.cancel(session, call)
