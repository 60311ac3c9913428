"""A keeper that is followed by another one when it dies: what it gives to its holder, and how the next one begins.

:mod:`.holder` has duplicates of all descriptors, and of the log that a :class:`.RecordedCatalogue` writes. The next
keeper makes the calls of the log again (:mod:`.replay`), has the same connections, and asks each client for what was
not answered: those requests come once more, and take effect once, because the log says which of them had one.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec
from msgspec import Struct

from .. import errors
from ..open_files import close_fds
from ..sharing.channel import ALL_FDS, Channel, peer_credentials, receive
from ..sharing.unread import close_filled
from . import event_log
from . import messages as m
from . import recorded as kinds
from .bind import Listener
from .connection import Connection, Held
from .failures import failure, goodbye
from .record_log import DIGEST, GIVEN, HAND, TAKEN, RecordLog
from .recorded import RecordedCatalogue
from .records import Session
from .replay import Peer, Replay, renumber
from .server import KeeperServer
from .service import Service
from .settling import ResultRow, Settling, Unsettled, queued_rows, result_rows, results_of
from .snapshot import save
from .takeover import PATIENCE, State, await_serving, uncollected, unpack

if TYPE_CHECKING:
    from .catalogue import Catalogue

# Numbers of descriptors; the third is the connection to the other keeper while one takes over.
_LOG, _LISTENER, _SUCCESSION, _FIRST = 0, 1, 2, 3
_PART = 200  # in one message
_DROPPED = 64  # numbers that are told together, or after so many seconds:
_TOLD_AFTER = 0.05
_PATIENCE = 5.0  # seconds that a holder may take nothing
_MOST_DEATHS = 3  # in a row, with the same request in hand: then who sent it is disconnected
_LEAST = 4 << 20  # bytes of records after which a log may begin anew, and how many times its base they are then
_TIMES = 2
_SOCKET, _RIGHTS = int(socket.SOL_SOCKET), socket.SCM_RIGHTS  # no member of an enum, which is asked for its number

_number = struct.Struct("<Q").pack


def holder_command() -> list[str]:
    """Return how a holder is started: isolated, and without what is installed, of which it needs nothing."""
    return [sys.executable, "-I", "-S", os.path.join(os.path.dirname(__file__), "holder.py")]


def _limit(sock: socket.socket) -> None:
    """Have nothing wait longer than that on a socket; by the kernel, since Python would poll before each message."""
    sock.setblocking(True)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(_PATIENCE), 0))


class PeerRow(Struct, array_like=True):
    """A connection."""

    number: int
    session: int  # or 0
    results: list[ResultRow]  # of calls that may come again: of a client that was asked for them, or is not answered


class _Base(Struct, array_like=True):
    """What a log begins with."""

    state: State  # without connections
    numbers: list[int]  # of the descriptors of its tokens
    peers: list[PeerRow]  # connections
    requests: list[tuple[int, bytes]]  # publications of which not everything has come


_base = msgspec.msgpack.Decoder(_Base)


class HolderLink:
    """The connection to the holder, which it owns, and the numbers of what the holder has.
    `command` is how the next keeper is started."""

    def __init__(self, sock: socket.socket, command: list[str]) -> None:
        self.sock = sock
        self.command = command
        self.next = _FIRST
        self.number_of: dict[int, int] = {}  # by descriptor, of memory
        self.others: Callable[[], dict[int, int]] = dict  # by number, descriptors besides those
        self.watch: Callable[[bool], None] = lambda _: None  # called before the socket is another one, and after
        self.replaced: Callable[[int], None] = lambda _: None  # told the pid of another holder
        self._dropped: list[int] = []
        self._child = 0
        self.pid = peer_credentials(sock).pid or 0
        self._holder = _open_parent(self.pid)
        _limit(sock)
        os.set_inheritable(sock.fileno(), False)

    def keep(self, fds: Sequence[int]) -> int:
        """Have descriptors of memory held; return the number of the first."""
        first = self.next
        self.next += len(fds)
        if len(fds) == 1:  # as nearly always
            self.number_of[fds[0]] = first
            self.tell(b"K", first, fds=fds)
            return first
        for number, fd in enumerate(fds, start=first):
            self.number_of[fd] = number
        self.keep_as(first, fds)
        return first

    def keep_as(self, first: int, fds: Sequence[int]) -> None:
        """Have descriptors held under such a number, and those that follow it."""
        for start in range(0, len(fds), _PART):
            self.tell(b"K", first + start, fds=fds[start : start + _PART])

    def forget(self, fds: Sequence[int]) -> None:
        """Have descriptors of memory held no longer, soon."""
        number_of = self.number_of
        numbers = [number_of.pop(fd) for fd in fds if fd in number_of]
        self.drop(*numbers)

    def drop(self, *numbers: int) -> None:
        """Have what stands under these numbers held no longer, soon."""
        self._dropped += numbers
        if len(self._dropped) >= _DROPPED:
            self.flush()

    @property
    def owes(self) -> bool:
        """Whether there is something to :meth:`flush`."""
        return bool(self._dropped)

    def flush(self) -> None:
        """Tell now what is to be held no longer."""
        while self._dropped:
            some, self._dropped = self._dropped[:4096], self._dropped[4096:]
            self.tell(b"D", *some)

    def tell(self, kind: bytes, *numbers: int, fds: Sequence[int] = ()) -> None:
        """Say something. A holder that does not hear it is replaced, and the next one knows all of it."""
        payload = kind + (_number(*numbers) if len(numbers) == 1 else struct.pack(f"<{len(numbers)}Q", *numbers))
        rights = [(_SOCKET, _RIGHTS, array.array("i", fds))] if fds else []
        until = 0.0
        while True:
            try:
                self.sock.sendmsg([payload], rights)
                return
            except OSError as error:
                until = until or time.monotonic() + _PATIENCE
                if error.errno not in (errno.ETOOMANYREFS, errno.ENOBUFS) or time.monotonic() > until:
                    break
                time.sleep(0.001)  # until it has taken what is on its way
        self.replace()
        self.sock.sendmsg([payload], rights)

    def end(self) -> None:
        """Tell that this keeper ends, and nobody follows it."""
        with contextlib.suppress(OSError):
            self.sock.sendall(b"E")

    def everything(self) -> dict[int, int]:
        """Return all that is held, as descriptors of this process's own, by number."""
        found: dict[int, int] = {}
        while True:
            self.sock.sendall(b"G" + struct.pack("<Q", len(found)))
            payload, fds, _ = receive(self.sock, 0, ALL_FDS)
            if not payload:
                raise errors.PeerGoneError("the holder of what the keeper before had died")
            if not fds:
                return found
            numbers = struct.unpack(f"<{len(payload) // 8}Q", payload)
            found.update(zip(numbers, fds, strict=True))

    def replace(self) -> None:
        """Start another holder, and give it all that there is."""
        self.watch(False)
        before, child = self.sock, self._child
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(_PATIENCE)
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            command = [*holder_command(), "--of", str(theirs.fileno()), str(os.getpid()), *self.command]
            self.pid = self._child = os.posix_spawn(command[0], command, os.environ)
        self.replaced(self._child)  # before the other one ends, which may be the process of a service
        if self._holder >= 0:  # one that only stands still would start keepers of its own, later
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._holder, signal.SIGKILL)
            os.close(self._holder)
        before.close()
        if child:  # its end may take long, where what it closes does: nobody waits for that
            threading.Thread(target=_reap, args=(child,), daemon=True).start()
        self._holder = os.pidfd_open(self._child)
        self._dropped.clear()  # it is not given those
        held = {**{number: fd for fd, number in self.number_of.items()}, **self.others()}
        for number, fd in held.items():
            self.sock.sendmsg(
                [b"K" + struct.pack("<Q", number)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
            )
        self.sock.sendall(b"R")
        self.watch(True)


def _reap(pid: int) -> None:
    """Wait for the end of a child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _open_parent(pid: int | None) -> int:
    """Return a descriptor of the process that started this one, if that is `pid`; else -1: it is gone."""
    if not pid:
        return -1
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return -1
    if os.getppid() != pid:
        os.close(fd)
        return -1
    return fd


class SurvivingService(Service):
    """A service that takes down whose request it is doing, and knows those that come again."""

    survives = True
    catalogue: RecordedCatalogue

    def __init__(self, server: SurvivingServer) -> None:
        super().__init__(server)
        self._server = server
        self.settling: Settling = Settling(self)
        self._unsettled = self.settling.waiting

    def handle(self, connection: Connection, payload: bytes, fds: list[int], cut: bool) -> None:
        """Answer one message, unless the keeper before has done what it asks for."""
        server, books = self._server, self.catalogue
        log = server.log
        words = log.words  # as take_in_hand() and done(), in what is called most often
        words[HAND], words[DIGEST] = server.numbers[connection], crc32(payload)
        books.payload, books.call = payload, 0
        unsettled = self._unsettled
        if not (unsettled and connection in unsettled and self.settling.is_over(connection, payload)):
            Service.handle(self, connection, payload, fds, cut)
        words[HAND] = 0
        if log.end > server.compact_at:
            if log.has_room:
                server.compact_soon()
            else:  # nobody else's request is done before
                server.compact()

    def expire(self) -> None:
        """Do some of what is due; see :meth:`.Service.expire`."""
        super().expire()
        self._server.look_at_log()

    def leave(self, session: Session) -> None:
        """End a session; see :meth:`.Service.leave`."""
        super().leave(session)
        self._server.look_at_log()

    def settle(self, connection: Connection, unsettled: Unsettled) -> None:
        """Go on with what a predecessor had asked a client to say again."""
        self.settling.waiting[connection] = unsettled

    def _take(self, connection: Connection, partial: Any, call: int, offset: int, fds: list[int]) -> None:
        self.catalogue.call = call
        super()._take(connection, partial, call, offset, fds)

    def _remove(self, connection: Connection, session: Session, request: m.Remove, fds: list[int]) -> None:
        self.catalogue.call = request.call
        super()._remove(connection, session, request, fds)


class SurvivingServer(KeeperServer):
    """A keeper with a holder, at `link`. The other arguments are those of :class:`KeeperServer`."""

    log: RecordLog
    service: SurvivingService

    def __init__(self, *arguments: Any, link: HolderLink, **options: Any) -> None:
        self.link = link
        self.numbers: dict[Connection, int] = {}  # under which their sockets are held
        self.compact_at = 0
        self._records = False
        self._has_log = False  # that the next keeper can go on from
        self._found: dict[int, int] = {}  # by number, what the keeper before had, as far as it is not settled yet
        self._stopped = False
        self._telling = self._compacting = False
        self._peers: dict[int, Peer] = {}
        self._blamed = 0
        self._hand = 0
        self._succession = -1  # to the other keeper, while one takes over; borrowed
        super().__init__(*arguments, **options)
        self.service = SurvivingService(self)
        self.handle = self.service.handle
        link.others = self._others

    def _others(self) -> dict[int, int]:
        held = dict(self._found)
        held.update((number, one.sock.fileno()) for one, number in self.numbers.items())
        if self._bound:
            held[_LISTENER] = self.listener.sock.fileno()
        if self._succession >= 0:
            held[_SUCCESSION] = self._succession
        if self._has_log:
            held[_LOG] = self.log.fd  # last: who has it has everything
        return held

    # -- the beginning ------------------------------------------------------------------------------------------------
    @uncollected()
    def recover(self) -> bool:
        """Go on where a dead keeper stopped; return False if there was none. A broken log raises ProtocolError:
        what it kept is lost. If a successor of it serves, :attr:`successor` is true, and nothing is here."""
        kept = self.link.everything()
        if _LOG not in kept:  # it died before it served: clients, of which it had been given some, are to hear that
            self._let_go(kept, hang_up=False)  # a keeper that it took over from may serve them
            return False
        self._found = kept
        try:
            self.log = RecordLog(kept.pop(_LOG))
        except errors.ProtocolError as error:
            raise errors.ProtocolError(f"{error}; what was kept is lost, and has to be published again") from None
        self._has_log = True
        if _SUCCESSION in kept and self._is_succeeded(kept.pop(_SUCCESSION)):
            close_fds(list(kept.values()))
            self.log.close()
            self.successor = True
            return True
        self._hand, blamed = self.log.inherit(_MOST_DEATHS)
        self._blamed = self._hand if blamed else 0
        base = _base.decode(self.log.base)
        quotas = self.quotas if base.state.limits is None else base.state.limits
        claims = base.state.claim_timeout or self.catalogue.claim_timeout
        listener = kept.pop(_LISTENER)
        (sock,) = unpack(self, base.state, [listener, *map(_away, base.numbers)], quotas, claims, {})
        self.listen_on(Listener.adopt(self.path, sock, lent=base.state.lent))
        renumber(self.catalogue, base.state.books.next_id)

        def token(first: int, handles: int, nbytes: int) -> Held:
            return Held([_away(first + index) for index in range(handles)], nbytes, self.dispose)

        peers = [Peer(row.number, row.session) for row in base.peers]
        for peer, row in zip(peers, base.peers, strict=True):
            peer.results.update(results_of(row.results, self.catalogue.sessions.get(row.session)))
        replay = Replay(self.catalogue, peers, token)
        replay.requests.update(base.requests)
        unfit = self._replay(replay)
        self.link.next = max([_FIRST, *(number + 1 for number in kept), *(number + 1 for number in replay.peers)])
        if unfit is None:
            self._settle_memory(kept)
            self._settle_peers(replay, kept)
        else:
            self._end_peers(replay, kept, unfit)
        self._let_go(kept)  # told to be dropped, and not yet heard
        if unfit is not None:  # the next one is to find a log that fits
            before = self.log
            self._begin_log(before.generation)
            before.close()
            event_log.salvaged(unfit, self.catalogue.entries)
        self._record(self.catalogue)
        for session in list(self.catalogue.sessions.values()):
            for publication in list(session.publications.values()):  # its client says all of it again
                self.catalogue.abandon(publication)
        return True

    def _replay(self, replay: Replay) -> Exception | None:
        """Make the calls of the log again. If one does not fit, keep the entries, and return why."""
        records = self.log.records()
        try:
            for kind, body in records:
                try:
                    replay.apply(kind, body)
                except Exception as error:  # noqa: BLE001  (a mistake of ours is to cost nobody an entry)
                    self._salvage(replay, chain([(kind, body)], records))
                    return error
        except errors.ProtocolError as error:  # it was changed: what is behind that is no record
            self._salvage(replay, [])
            return error
        return None

    def _salvage(self, replay: Replay, records: Iterable[tuple[int, bytes]]) -> None:
        from .salvage import Salvage  # loaded here: it never should be

        salvage = Salvage(replay)
        salvage.go_on(records)
        self.replace_catalogue(salvage.catalogue)

    def _end_peers(self, replay: Replay, kept: dict[int, int], unfit: Exception) -> None:
        """Tell every client that this keeper knows nothing of it, and forget the entries whose memory is gone."""
        for version in self.catalogue.all_versions():
            if not all(_away(fd) in kept for fd in version.token.fds):  # it was removed behind what does not fit
                self.catalogue.forget(version)
        self._settle_memory(kept)
        said = errors.PeerGoneError(
            f"the keeper was killed, and its log does not fit its books ({unfit}): entries are kept, and every client "
            f"is disconnected: its leases and claims are over, what is mapped stays mapped"
        )
        for number in [number for number in replay.peers if number in kept]:
            sock = socket.socket(fileno=kept[number])  # it is let go of with all that is not needed
            with contextlib.suppress(OSError):
                sock.setblocking(False)
                sock.send(m.encode(failure(0, said)))
            sock.detach()

    def _let_go(self, kept: dict[int, int], *, hang_up: bool = True) -> None:
        """Close what is not needed, in other threads, and have it held no longer."""
        self._found = {}  # another holder is not given those
        for number, fd in kept.items():
            if hang_up and number >= _FIRST and stat.S_ISSOCK(os.fstat(fd).st_mode):
                sock = socket.socket(fileno=fd)
                sock.setblocking(False)
                close_filled(sock, self.closer)
            else:
                self.closer.close([fd])
        self.link.drop(*kept)
        self.link.flush()

    def _is_succeeded(self, fd: int) -> bool:
        """Bring a takeover to its end in which the keeper before died; return whether its successor serves."""
        channel = Channel(socket.socket(fileno=fd))
        try:
            if self.log.takeover == GIVEN:
                with contextlib.suppress(errors.PeerError):  # perhaps once more
                    channel.send(m.encode(m.Committed()), timeout=PATIENCE)
                if await_serving(channel):
                    return True
            was_taken = self.log.takeover == TAKEN
            said = m.Serving() if was_taken else m.Abandoned("it was killed, and another goes on")
            with contextlib.suppress(errors.VramError, OSError):
                channel.send(m.encode(said), timeout=0)
        finally:
            channel.close()
        self.log.takeover = 0
        self.link.drop(_SUCCESSION)
        self.link.flush()
        return False

    def _settle_memory(self, kept: dict[int, int]) -> None:
        pages = [lease.page for lease in self.catalogue.leases.values() if lease.page is not None]
        for held in dict.fromkeys([*(version.token for version in self.catalogue.all_versions()), *pages]):
            numbers = [_away(fd) for fd in held.fds]
            if not all(number in kept for number in numbers):
                raise errors.ProtocolError("the holder lacks memory that the log names: what was kept is lost")
            held.fds = [kept.pop(number) for number in numbers]
            self.link.number_of.update(zip(held.fds, numbers, strict=True))

    def _settle_peers(self, replay: Replay, kept: dict[int, int]) -> None:
        for peer in replay.peers.values():
            fd = kept.pop(peer.number, None)
            if fd is None:
                raise errors.ProtocolError("the holder lacks a connection that the log names: what was kept is lost")
            sock = socket.socket(fileno=fd)
            sock.setblocking(False)
            connection = Connection(self, sock, peer_credentials(sock))
            self.numbers[connection] = peer.number
            super().add(connection)
            session = self.catalogue.sessions.get(peer.session)
            if session is None:
                self.pending[connection] = None
            else:
                connection.session = session
                self.connections[session.id] = connection
            self._peers[peer.number] = peer

    def begin(self) -> None:
        """Have all that there is held, and begin a log, where there is none."""
        if self._records:
            return
        self.link.keep_as(_LISTENER, [self.listener.sock.fileno()])
        pages = [lease.page for lease in self.catalogue.leases.values() if lease.page is not None]
        for held in dict.fromkeys([*(version.token for version in self.catalogue.all_versions()), *pages]):
            self.link.keep(held.fds)
        # A number that no log of a keeper has which was taken over: clients tell by it which of them was killed.
        first = time.monotonic_ns() // 1000
        self._begin_log(first, TAKEN if self._succession >= 0 else 0)
        self._record(self.catalogue)

    def _record(self, catalogue: Catalogue) -> None:
        self._records = True
        self.compact_at = self.log.begin + max(_LEAST, _TIMES * (self.log.begin))
        self.replace_catalogue(RecordedCatalogue.of(catalogue, self.log, self.link))

    def _begin_log(self, generation: int, takeover: int = 0) -> None:
        numbers: dict[Held, int] = {}
        catalogue = self.catalogue
        books = save(catalogue, lambda held: numbers.setdefault(held, len(numbers)))
        tokens = [(len(held.fds), held.nbytes) for held in numbers]
        renumber(catalogue, books.next_id)
        open_ones = [one for one in self.numbers if not one.closed]
        unsettled = self.service.settling.waiting
        base = _Base(
            State(books, tokens, [], self.quotas, catalogue.claim_timeout, os.getpid(), self.listener.lent),
            [self.link.number_of[fd] for held in numbers for fd in held.fds],
            [
                PeerRow(
                    self.numbers[one],
                    0 if one.session is None else one.session.id,
                    [*(result_rows(unsettled[one].results) if one in unsettled else []), *queued_rows(one.queue)],
                )
                for one in open_ones
            ],
            [(part.publication.id, m.encode(part.request)) for one in open_ones for part in one.partials.values()],
        )
        self.log = RecordLog.new(msgspec.msgpack.encode(base), generation)
        self.log.takeover = takeover
        self._has_log = True
        self.link.keep_as(_LOG, [self.log.fd])

    def look_at_log(self) -> None:
        """See to it that the log begins anew when it is time."""
        if self._records and self.log.end > self.compact_at:
            self.compact_soon()

    def compact_soon(self) -> None:
        """Begin the log anew in the loop's next turn."""
        if not self._compacting:
            self._compacting = True
            self.loop.call_later(0.0, self.compact)

    def compact(self) -> None:
        """Begin the log anew."""
        self._compacting = False
        if self.paused:
            return
        before = self.log
        self._begin_log(before.generation)
        before.close()
        self._record(self.catalogue)

    # -- serving ------------------------------------------------------------------------------------------------------
    def serve(self, ready: Callable[[], None] | None = None, **options: Any) -> None:
        """Serve until :meth:`stop`; see :meth:`KeeperServer.serve`."""
        if not self._bound:
            self.listen()
        self.begin()

        def begun() -> None:
            self._watch_holder(True)
            self.link.watch = self._watch_holder
            self.link.tell(b"R")
            if ready is not None:
                ready()

        super().serve(begun, **options)

    def _start(self) -> None:
        for connection, number in list(self.numbers.items()):
            peer = self._peers.pop(number, None)
            if peer is None:
                continue
            if number == self._blamed:
                said = errors.PeerGoneError(
                    f"{_MOST_DEATHS} keepers in a row died of what this process asked for: its connection is ended"
                )
                connection.send(m.encode(failure(0, said)))
            elif peer.evicted is not None:
                connection.send(m.encode(goodbye(peer.evicted, self.path)))
            elif peer.session == 0:
                if number != self._hand:
                    continue
            else:
                if number == self._hand and not peer.results:  # perhaps its greeting was not answered
                    welcome = m.Welcome(self.pid, "", True)
                    connection.send(m.encode(welcome))
                self.service.settling.waiting[connection] = Unsettled(self.log.generation, peer.results)
                connection.send(m.encode(m.Recovered(0, self.log.generation, self.pid)))
                continue
            connection.close()
        super()._start()

    def _watch_holder(self, watches: bool) -> None:
        """The holder says nothing unasked: if there is something to read, it is gone."""
        if watches:
            self.loop.add_reader(self.link.sock, self.link.replace)
        else:
            self.loop.remove_reader(self.link.sock)

    def stop(self) -> None:
        """Return from :meth:`serve`; nobody follows."""
        self._stopped = True
        self.link.end()
        super().stop()

    # -- takeovers: whoever follows finds how far one is, and the connection to the other keeper ----------------------
    def giving(self, fd: int) -> None:
        """Have the next keeper know the process that is to be given everything."""
        self._succession = fd
        self.link.keep_as(_SUCCESSION, [fd])

    def leaving(self, leaves: bool) -> None:
        """Have the next keeper know whether that process may serve."""
        self.log.takeover = GIVEN if leaves else 0
        if not leaves:
            self._succession = -1
            self.link.drop(_SUCCESSION)
            self.link.flush()

    def taking(self, fd: int) -> None:
        """Have everything held before the keeper that gave it ends, and the next one know that keeper."""
        self._succession = fd
        self.link.keep_as(_SUCCESSION, [fd])
        self.begin()

    def taken(self) -> None:
        """Forget that one."""
        self._succession = -1
        self.link.drop(_SUCCESSION)
        self.link.flush()
        self.log.takeover = 0

    @property
    def main_pid(self) -> int:
        """The holder: whoever watches it would see each end of a keeper as the end of the service."""
        return self.link.pid

    @property
    def unlinks(self) -> bool:
        """Whether the socket's path goes with this process: not if another follows."""
        return self._stopped and super().unlinks

    def close_everything(self) -> None:
        """Close everything, unless it is another keeper's from now on."""
        if self._stopped or not self._records:
            self._records = False
            super().close_everything()

    # -- what changes -------------------------------------------------------------------------------------------------
    def add(self, connection: Connection) -> None:
        """Count a connection, and have its socket held."""
        super().add(connection)
        number = self.numbers[connection] = self.link.next
        self.link.next += 1
        self.link.keep_as(number, [connection.sock.fileno()])
        if self._records:
            self.catalogue.write(kinds.OPENED, number)  # type: ignore[attr-defined]

    def welcome(self, connection: Connection, session: Session) -> None:
        """A connection has said hello."""
        books: RecordedCatalogue = self.catalogue  # type: ignore[assignment]
        books.write(kinds.WELCOMED, self.numbers[connection], session.id)
        super().welcome(connection, session)

    def gone(self, connection: Connection) -> None:
        """A connection was closed: it is held no longer."""
        number = self.numbers.pop(connection, 0)
        if number:
            if self._records:
                self.catalogue.write(kinds.CLOSED, number)  # type: ignore[attr-defined]
            self.link.drop(number)
            self._tell_soon()
        super().gone(connection)

    def dispose(self, fds: list[int]) -> None:
        """Close descriptors that are not used any more, here and where they are held."""
        if fds and fds[0] < -1:  # of the keeper before, and not here: what is not needed is dropped in the end
            return
        self.link.forget(fds)
        self._tell_soon()
        super().dispose(fds)

    def _tell_soon(self) -> None:
        if self.link.owes and not self._telling and self.loop is not None and not self.loop.is_closed():
            self._telling = True
            self.loop.call_later(_TOLD_AFTER, self._tell)

    def _tell(self) -> None:
        self._telling = False
        self.link.flush()


def _away(number: int) -> int:
    """Write the number of a descriptor that is not here yet as no descriptor can be, and back."""
    return -2 - number
