"""The requests of a keeper: the catalogue decides, this module carries out its effects."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from .. import errors
from ..sharing.channel import MAX_MESSAGE
from ..sharing.parcels import Collector, next_part
from . import event_log, listing
from . import messages as m
from .admission import InadmissibleError, admit_page, look_at
from .connection import Connection, Held, Partial, Unsettled
from .failures import failure
from .listing import Counts, kind_of, measurements
from .records import (
    Claim,
    Effect,
    Free,
    Lease,
    Notify,
    Publication,
    Session,
    Version,
    Waiter,
    exact,
    record_from,
)

if TYPE_CHECKING:
    from .server import KeeperServer


_LONGEST = MAX_MESSAGE - 256  # readers get what was published in one message, with some numbers more
_LISTINGS: dict[type, Any] = {m.List: listing.entries, m.Versions: listing.versions, m.Holders: listing.holders}


class Service:
    """Answers requests on behalf of a server."""

    lends = ""  # of a lender, its random id

    def __init__(self, server: KeeperServer) -> None:
        self.server = server
        self.catalogue = server.catalogue
        self._due: deque[Effect] = deque()
        self._at_work = False
        # Each returns the reply, or None where it has sent one, or a later effect is one. Effects of the catalogue that
        # follow the reply are put into `_due`.
        self.handlers: dict[type, Callable[[Connection, Session, Any, list[int]], msgspec.Struct | None]] = {
            m.Attach: self._attach,
            m.Release: self._release,
            m.Sleep: self._sleep,
            m.Publish: self._publish,
            m.Offer: self._offer,
            m.Part: self._part,
            m.More: self._more,
            m.Cancel: self._cancel,
            m.State: self._state,
            m.Watch: self._watch,
            m.Remove: self._remove,
            m.Statistics: self._statistics,
            m.Takeover: self._takeover,
            m.Page: self._page,
            m.Update: self._update,
            m.Pages: lambda _connection, session, request, _fds: listing.pages(self.catalogue, session, request),
            m.Measure: self._measure,
            m.Repeating: self._repeating,
            **dict.fromkeys(_LISTINGS, self._list),
        }
        self.counts: defaultdict[str, Counts] = defaultdict(Counts)  # by the kind of request
        self.generation = 0  # of which keeper this is, where clients of the one before make calls once more

    def handle(self, connection: Connection, payload: bytes, fds: list[int], cut: bool) -> None:
        """Answer one message. Descriptors that are taken over are removed from `fds`."""
        begin = time.perf_counter()
        kind, error = self._answer(connection, payload, fds, cut)
        spent = time.perf_counter() - begin
        self.counts[kind].add(spent, error)
        event_log.answered(connection, kind, spent, error)
        self.server.flush()

    def _answer(
        self, connection: Connection, payload: bytes, fds: list[int], cut: bool
    ) -> tuple[str, Exception | None]:
        """Answer one message; return what it was, and the error, if it failed."""
        session = connection.session
        call, kind = 0, "hello" if session is None else "unreadable"
        reply: msgspec.Struct | None
        try:
            if session is None:
                reply = self._greet(connection, payload, fds)
            else:
                request = m.decode_request(payload)
                call, kind = request.call, kind_of(request)
                unsettled = connection.unsettled
                if unsettled is not None and self._was_done(connection, session, unsettled, request):
                    return kind, None
                if cut:
                    self._cut(payload)
                if fds and type(request) not in (m.Publish, m.Part, m.Page, m.Takeover):
                    raise errors.ProtocolError(f"{len(fds)} descriptors came with a message that has none")
                if len(payload) > _LONGEST and type(request) is m.Publish:
                    raise errors.UsageError(f"a description of {len(payload)} bytes; {_LONGEST} is the most")
                reply = self.handlers[type(request)](connection, session, request, fds)
            if reply is not None and (call or session is None):
                connection.send(m.encode(reply))
            if self._due:
                self.carry_out(())
            else:
                self.server.schedule()
        except Exception as error:  # noqa: BLE001  (a mistake of ours must cost no more than this connection)
            failed: Exception = error
            if isinstance(error, m.MistakenRequestError):
                call, failed = error.call, errors.UsageError(str(error))
            connection.send(m.encode(failure(call, failed)))
            # A peer that breaks the protocol, or speaks another, cannot be understood any further.
            breaks = isinstance(failed, errors.ProtocolError) and not isinstance(failed, InadmissibleError)
            if breaks or session is None or not isinstance(failed, errors.VramError):
                connection.close()
            return kind, failed
        return kind, None

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Carry out effects of the catalogue, and the effects that follow from them, in a queue.
        Telling a peer may find it dead: a thousand dead peers would be a thousand nested calls."""
        self._due.extend(effects)
        if self._at_work:  # the call that is at work sees what has come
            return
        self._at_work = True
        try:
            while self._due:
                self._do(self._due.popleft())
        finally:
            self._at_work = False
        self.server.schedule()

    def leave(self, session: Session) -> None:
        """End a session whose connection is gone."""
        self.carry_out(self.catalogue.disconnect(session, self.server.now()))
        self.server.flush()

    def _do(self, effect: Effect) -> None:
        if isinstance(effect, Free):
            effect.token.drop()
            return
        connection = self.server.connections.get(effect.session.id)
        if connection is None or self.server.paused:
            return
        if isinstance(effect, Notify):
            notice = m.Notice(0, effect.name, effect.version, effect.reason, effect.current)
            connection.send(m.encode(notice))
            return
        if connection.unsettled is not None:
            connection.unsettled.answered.add(effect.call)
        if isinstance(effect.result, errors.VramError):
            connection.send(m.encode(failure(effect.call, effect.result)))
        else:
            self._grant(connection, effect.call, effect.result)

    # -- calls that come once more -------------------------------------------------------------------------------
    def _was_done(self, connection: Connection, session: Session, unsettled: Unsettled, request: m.Request) -> bool:
        """Whether a request of a client of the keeper before comes once more and is done: the client gets the answer
        again. Calls that come before the client has said which they are count for nothing: they come again, or not."""
        call = request.call
        if not call or call not in unsettled or isinstance(request, m.Cancel):
            return False
        if unsettled.calls is None or call in unsettled.answered:
            return True
        granted = unsettled.granted.get(call)
        if granted is not None and (granted.id in session.leases or granted.id in session.claims):
            self._grant(connection, call, granted)
        elif call not in unsettled.outcomes:
            return call in session.waiters
        else:
            version = unsettled.outcomes[call]
            connection.send(m.encode(m.Published(call, version) if version else m.Done(call)))
        return True

    def _repeating(self, connection: Connection, session: Session, request: m.Repeating, fds: list[int]) -> None:
        if connection.unsettled is not None and request.keeper == self.generation:
            connection.unsettled.limit(range(request.first, request.last + 1))

    # -- the conversation -----------------------------------------------------------------------------------------
    def _greet(self, connection: Connection, payload: bytes, fds: list[int]) -> m.Welcome:
        hello = m.decode_hello(payload)
        if fds:
            raise errors.ProtocolError("descriptors came with a greeting")
        m.check_protocol(hello)
        uid, pid = connection.credentials.uid, connection.credentials.pid or 0
        self.server.welcome(connection, self.catalogue.connect(uid, pid, hello.label, hello.host))
        return m.Welcome(self.server.pid, self.lends)

    def _cut(self, payload: bytes) -> None:
        if len(payload) > MAX_MESSAGE:
            raise errors.ProtocolError(f"a message is longer than {MAX_MESSAGE} bytes")
        raise errors.QuotaError(
            "the keeper has no room for so many descriptors in one message (RLIMIT_NOFILE): remove entries, or send "
            "fewer at once"
        )

    # -- publishing -----------------------------------------------------------------------------------------------
    def _publish(self, connection: Connection, session: Session, request: m.Publish, fds: list[int]) -> m.Reply:
        if any(piece.device >= len(request.devices) for piece in request.segments):
            raise errors.ProtocolError("a segment names a device that is not in the list")
        if request.call in connection.partials or not request.call:
            raise errors.ProtocolError(f"call {request.call} cannot begin a publication")
        total = len(request.segments) + request.manifest_fd
        found = look_at(request, 0, fds[:total])  # how many they may be, is said below
        publication = self.catalogue.begin(
            session, request, nbytes=max(sum(piece.size for piece in request.segments), found.nbytes), handles=total,
            pieces=found.pieces, known=found.known,
        )  # fmt: skip
        partial = connection.partials[request.call] = Partial(
            publication, found.nbytes, Collector(total, is_armed=False)
        )
        return self._take(connection, partial, request.call, 0, fds)

    def _offer(self, connection: Connection, session: Session, request: m.Offer, fds: list[int]) -> m.Reply:
        asked = m.Publish(request.call, request.name, [], [], meta=request.meta, ttl=request.ttl, claim=request.claim)
        self.catalogue.abandon(self.catalogue.begin(session, asked, nbytes=request.nbytes, handles=request.handles))
        return m.Done(request.call)

    def _part(self, connection: Connection, session: Session, request: m.Part, fds: list[int]) -> m.Reply:
        partial = connection.partials.get(request.publish)
        if partial is None:
            raise errors.NotFoundError(
                f"no publication {request.publish} is under way on this connection: it is over, or no part of it came "
                f"for {self.server.patience:g} s; publish again"
            )
        return self._take(connection, partial, request.call, request.offset, fds)

    def _take(self, connection: Connection, partial: Partial, call: int, offset: int, fds: list[int]) -> m.Reply:
        """Keep one part of a publication; with the last part the version is published."""
        publication = partial.publication
        request = publication.asked
        try:
            partial.fds.check(offset, fds)
            if offset:  # the first part was looked at before there was room for it
                # Descriptors count as they arrive, or a client that never sends the rest would hold them for nothing.
                found = look_at(request, offset, fds)
                arrived = partial.nbytes + found.nbytes
                self.catalogue.arrived(publication, arrived, found.pieces, found.known)
                partial.nbytes = arrived
        except errors.VramError:
            self.give_up(connection, partial)
            raise
        partial.fds.take(offset, fds)
        if not partial.fds.is_complete:
            partial.since = self.server.now()
            self.server.watch_over(connection)
            return m.NextPart(call, len(partial.fds))
        del connection.partials[request.call]
        version = self.commit(publication, Held(partial.fds.detach(), partial.nbytes, self.server.dispose))
        self.server.did(publication.session, call, version.number)
        return m.Published(call, version.number)

    def commit(self, publication: Publication, held: Held) -> Version:
        """Make a publication a version, in what is `held`. Effects follow the next reply."""
        names = self.catalogue.names.entries
        try:
            version, effects = self.catalogue.commit(publication, held, self.server.now(), nbytes=held.nbytes)
        except BaseException:
            held.drop()
            raise
        notes: Any = msgspec.Raw(version.notes)
        entry = record_from(m.Entry, publication.asked, version=version.number, owner=version.owner, meta=notes)
        version.settle(exact(m.encode(entry)))
        event_log.say(
            "vram.entry.published" if self.catalogue.names.entries > names else "vram.entry.replaced",
            who=publication.session,
            fields={
                "vram.entry.name": version.name,
                "vram.entry.version": version.number,
                "vram.entry.size": version.nbytes,
            },
        )
        self._due.extend(effects)
        return version

    def give_up(self, connection: Connection, partial: Partial) -> None:
        """End a publication that will not be completed, and close its descriptors."""
        del connection.partials[partial.publication.asked.call]
        self.catalogue.abandon(partial.publication)
        self.server.dispose(partial.fds.detach())

    # -- attaching ------------------------------------------------------------------------------------------------
    def _attach(self, connection: Connection, session: Session, request: m.Attach, fds: list[int]) -> None:
        result = self.catalogue.attach(session, request, self.server.now())
        if not isinstance(result, Waiter):
            self._grant(connection, request.call, result)

    def _grant(self, connection: Connection, call: int, granted: Lease | Claim) -> None:
        """Send a lease, with the first of its descriptors, or a claim."""
        if isinstance(granted, Claim):
            connection.send(m.encode(m.Claimed(call, granted.id)))
            return
        version, holder = granted.version, granted.session.id
        moves = bool(granted.purpose)
        has_publisher = moves and version.publisher != holder and version.publisher in self.catalogue.sessions
        held: Held = version.token
        said = m.Attached(call, granted.id, len(held.fds), version.body, moves, has_publisher)
        self._send_part(connection, said, held, 0)

    def _more(self, connection: Connection, session: Session, request: m.More, fds: list[int]) -> None:
        lease = self.catalogue.lease(session, request.lease)
        if lease.purpose == "over":  # what its first descriptors are of may be gone
            raise errors.BusyError(f"lease {request.lease} was to move what was attached or moved since")
        said = m.Descriptors(request.call, request.offset)
        self._send_part(connection, said, lease.version.token, request.offset)

    def _send_part(self, connection: Connection, said: m.Reply, held: Held, start: int) -> None:
        part = next_part(len(held.fds), start, self.server.part)
        connection.send(m.encode(said), held, part.start, part.stop)

    def _release(self, connection: Connection, session: Session, request: m.Release, fds: list[int]) -> m.Reply:
        self._due.extend(self.catalogue.release_all(session, request.leases, self.server.now()))
        return m.Done(request.call)

    def _sleep(self, connection: Connection, session: Session, request: m.Sleep, fds: list[int]) -> m.Reply:
        self.catalogue.rest(session, request.lease, asleep=request.asleep)
        return m.Done(request.call)

    def _cancel(self, connection: Connection, session: Session, request: m.Cancel, fds: list[int]) -> m.Reply:
        self.catalogue.cancel(session, request.waiting)
        granted = [one.id for one in session.granted if one.call == request.waiting]
        self._due.extend(self.catalogue.release_all(session, granted, self.server.now()))
        return m.Done(request.call)

    # -- updating in place ----------------------------------------------------------------------------------------
    def _page(self, connection: Connection, session: Session, request: m.Page, fds: list[int]) -> m.Reply:
        if len(fds) != 1:
            raise errors.ProtocolError(f"{len(fds)} descriptors came as the page of a lease")
        nbytes = admit_page(fds[0], f"the page of lease {request.lease}")
        page = Held(list(fds), nbytes, self.server.dispose)
        self._due.extend(self.catalogue.give_page(session, request.lease, page))
        fds.clear()  # the lease has it now
        return m.Done(request.call)

    def _update(self, connection: Connection, session: Session, request: m.Update, fds: list[int]) -> m.Reply:
        if request.whole is None:
            self.catalogue.update(session, request.name, request.version)
        else:
            self.catalogue.updated(session, request.name, request.version, request.updates, whole=request.whole)
        return m.Done(request.call)

    # -- looking --------------------------------------------------------------------------------------------------
    def _state(self, connection: Connection, session: Session, request: m.State, fds: list[int]) -> m.Reply:
        one, current = self.catalogue.state(session, request.lease)
        number = 0 if current is None else current.number
        updates = one.updates, one.updating, one.torn, one.writer is not None
        return m.LeaseState(request.call, one is not current, number, one.revoked, *updates)

    def _watch(self, connection: Connection, session: Session, request: m.Watch, fds: list[int]) -> m.Reply:
        news = self.catalogue.watch(session, request.name, request.version)
        if news is not None:
            self._due.append(news)
        return m.Done(request.call)

    def _list(self, connection: Connection, session: Session, request: Any, fds: list[int]) -> m.Reply:
        rows: m.Rows = _LISTINGS[type(request)](self.catalogue, request, self.server.now())
        return rows

    def _statistics(self, connection: Connection, session: Session, request: m.Statistics, fds: list[int]) -> m.Reply:
        server = self.server
        return listing.statistics(
            self.catalogue, request, pid=server.pid, uptime=server.now() - server.started,
            connections=len(server.connections), lost_rows=server.lost_rows,
        )  # fmt: skip

    def _measure(self, connection: Connection, session: Session, request: m.Measure, fds: list[int]) -> m.Reply:
        uptime = self.server.now() - self.server.started
        return measurements(request.call, self.counts, self.catalogue, uptime=uptime, connections=self.server.by_user)

    def _remove(self, connection: Connection, session: Session, request: m.Remove, fds: list[int]) -> m.Reply:
        effects = self.catalogue.remove(
            session, request.name, request.version, now=self.server.now(), revoke=request.revoke
        )
        event_log.say(
            "vram.entry.revoked" if request.revoke else "vram.entry.removed",
            who=session,
            fields={
                "vram.entry.name": request.name,
                "vram.entry.version": request.version or None,
            },
        )
        self.server.did(session, request.call)
        self._due.extend(effects)
        return m.Done(request.call)

    def _takeover(self, connection: Connection, session: Session, request: m.Takeover, fds: list[int]) -> None:
        if not self.server.is_own(connection.credentials.uid):
            uid = self.catalogue.accounts.keeper_uid
            raise errors.AccessDeniedError(
                f"only uid {uid}, who runs this keeper, may restart it, not uid {session.uid}"
            )
        if len(fds) != 1:
            raise errors.ProtocolError(f"{len(fds)} descriptors came to take over with, not one")
        if self.server.disk is not None and self.server.disk.is_ending:
            raise errors.BusyError("this keeper is ending: it saves what is to be saved before that")
        self.server.about_to_restart(session.pid)
        connection.send(m.encode(m.Done(request.call)))
        self.server.hand_over(fds[0])
