"""One connection of the keeper: what came in, what has to go out, and how long a peer may keep us waiting.

Nothing here blocks. An answer is sent at once; what the peer's socket has no room for waits in a queue, and while
anything waits nothing more is read from that peer, so that the queue is bounded by what it had asked for before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ..sharing.channel import ALL_FDS, MAX_MESSAGE, Credentials, receive, transmit
from ..sharing.parcels import Collector
from . import messages as m
from .failures import failure
from .in_flight import InFlight
from .records import Publication, Session
from .slow_close import SlowCloser, brings_fds, receive_whole
from .turns import Turns, TurnsHost

__all__ = ["Connection", "ConnectionHost", "Held", "Partial"]

MAX_QUEUED = 4 * 1024 * 1024  # bytes of answers that one peer may leave unread
_EACH = 256  # bytes that any answer in a queue costs besides, about
# What an answer costs while it is in the socket: the kernel rounds its size up to the next power of two at most, and
# adds its own notes. Measured on Linux 6.18: 768 bytes for one of 100, 16,640 for one of 8,200, 69,888 for the longest.
_TIMES, _EACH_SENT = 2, 1024
# Of unread answers each socket takes as many bytes as one longest message has, and some; the kernel doubles the number,
# for its own notes, and takes one message beyond it. It would be a fifth of a megabyte else, times 4,096 connections.
_SEND_BUFFER = (MAX_MESSAGE + 16 * 1024) // 2
# A plain int: the flags of the socket module are enums, and their | costs a microsecond in every message.
_DONTWAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
_SENT, _LOST = 0, -1
# Seconds until descriptors that could not be put in flight are tried again: at first, and at most. It doubles, since
# thousands of peers that do not read must not keep the loop busy.
_RETRY, _RETRY_AT_MOST = 0.001, 1.0


class Held:
    """The descriptors of one version, counted: by the catalogue and by every queued answer that carries them.

    Without the count, a lease given back while its answer is queued would let a number be sent that means another
    file by then.

    Parameters
    ----------
    owner : int
        The user who sent them, and on whose account they are closed, whoever uses them last: how long that takes is
        their sender's doing.
    """

    __slots__ = ("_dispose", "_uses", "fds", "nbytes", "owner")

    def __init__(
        self, fds: list[int], nbytes: int, owner: int, dispose: Callable[[list[int], int, int], None], *, uses: int = 1
    ) -> None:
        self.fds = fds
        self.nbytes = nbytes
        self.owner = owner
        self._uses = uses
        self._dispose = dispose

    def keep(self) -> None:
        """Count one more use."""
        self._uses += 1

    def drop(self) -> None:
        """Count one use less; the last one closes the descriptors."""
        self._uses -= 1
        if not self._uses:
            fds, self.fds = self.fds, []
            self._dispose(fds, self.nbytes, self.owner)


class Partial:
    """A publication whose descriptors have not all come.

    Attributes
    ----------
    fds : Collector
        Those that have, which the server disposes of.
    nbytes : int
        What is behind those that have, as it is counted.
    since : float
        When the last of them came.
    """

    __slots__ = ("fds", "nbytes", "publication", "request", "since")

    def __init__(self, publication: Publication, request: object, since: float) -> None:
        self.publication = publication
        self.request = request
        self.since = since
        self.fds = Collector(publication.handles, is_armed=False)
        self.nbytes = 0


class ConnectionHost(TurnsHost, Protocol):
    """What a connection needs of the server that it belongs to.

    Attributes
    ----------
    ancillary : int
        Room for the descriptors of one message of anybody but the keeper's own user, in bytes of ancillary data.
    part : int
        Descriptors that one peer may have in flight.
    closing : bool
        Whether it is at its end, and nobody is told anything any more.
    """

    ancillary: int
    part: int
    closing: bool
    in_flight: InFlight
    slow_closer: SlowCloser
    turns: Turns

    def is_own(self, uid: int) -> bool:
        """Whether this is the user who runs the keeper."""
        ...

    def handle(self, connection: Connection, payload: bytes, fds: list[int], cut: bool) -> None:
        """Do what one message asks for. Descriptors that are taken over are removed from `fds`.

        Parameters
        ----------
        cut : bool
            Whether there was more than there is room for.
        """
        ...

    def watch_over(self, connection: Connection) -> None:
        """Close this connection once it is :meth:`~Connection.overdue`."""
        ...

    def put_aside(self, connection: Connection) -> None:
        """Park a connection until descriptors that its user sent before are closed."""
        ...

    def no_longer_aside(self, connection: Connection) -> None:
        """It is read from again, or closed."""
        ...

    def dispose(self, fds: list[int], nbytes: int, uid: int) -> None:
        """Close descriptors of so much memory, which user `uid` had sent."""
        ...

    def gone(self, connection: Connection) -> None:
        """A connection was closed: undo what it had done."""
        ...

    def socket_closed(self, connection: Connection) -> None:
        """The socket of a closed connection was closed now, by another thread."""
        ...


class Connection:
    """A peer, from accept to end of file.

    Attributes
    ----------
    session : Session or None
        None until the peer has said hello.
    waiting_since : float or None
        Since when the peer has owed us something: its greeting, or reading what is queued or in flight.
    parked : float or None
        Since when something of the peer waits to be read until it is its user's turn (see :mod:`.turns`), or until what
        the user sent before is closed (see :mod:`.slow_close`).
    held : bool
        Whether nothing is read from it until the keeper has done all of what it asked for last.
    repeats : bool
        Whether its peer says again what was not answered, when it hears that another keeper goes on.
    is_open : bool
        Whether this process has its socket.
    moved : bool
        Whether what is queued came from another keeper, whose ceilings may have been higher: it stays.
    in_flight : int
        Descriptors sent since the peer was last known to have read everything. A closed connection with any lingers:
        its socket stays open, since without it nobody could tell when they are read.
    unread : int
        Bytes sent since then, as the kernel counts them or more. A closed connection lingers for these as well.
    seen : int
        How many of them there were when it was polled last.
    hoards : bool
        Whether these were much of what its user may leave unread when that was full: it owes reading them.
    room : int
        For the descriptors of one message, in bytes of ancillary data.
    share : Share
        What all connections of the same user have left unread; see :mod:`.in_flight`.
    """

    __slots__ = (
        "closed",
        "credentials",
        "held",
        "hoards",
        "in_flight",
        "is_open",
        "moved",
        "parked",
        "partials",
        "queue",
        "queued",
        "reading",
        "repeats",
        "retry",
        "room",
        "seen",
        "server",
        "session",
        "share",
        "sock",
        "unread",
        "version",
        "waiting_since",
        "writing",
    )

    def __init__(self, server: ConnectionHost, sock: socket.socket, credentials: Credentials) -> None:
        self.server = server
        self.sock = sock
        self.credentials = credentials
        self.session: Session | None = None
        self.version = 0
        self.repeats = False
        self.partials: dict[int, Partial] = {}
        self.queue: deque[tuple[bytes, Held | None, int, int]] = deque()
        self.queued = 0
        self.in_flight = 0
        self.unread = self.seen = 0
        self.hoards = False
        self.share = server.in_flight.of(credentials.uid)
        self.waiting_since: float | None = None
        self.retry = _RETRY
        self.reading = False
        self.parked: float | None = None
        self.held = False
        self.writing = False
        self.closed = False
        self.is_open = True
        self.moved = False
        self.room = ALL_FDS if server.is_own(credentials.uid) else server.ancillary
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    # -- in -------------------------------------------------------------------------------------------------------
    def readable(self) -> None:
        """Have one message read, now or when it is this user's turn."""
        if not self.server.paused:  # due in the same turn of the loop in which a successor took over
            self.server.turns.ready(self)

    def read(self) -> None:
        """Take one message off the socket and have it answered. One at a time: the others get their turn."""
        closer, uid = self.server.slow_closer, self.credentials.uid
        may_take, is_narrow = closer.takes(uid), self.room < ALL_FDS
        brings = (is_narrow or not may_take) and brings_fds(self.sock)
        if brings and not may_take:
            self.server.put_aside(self)
            return
        try:
            if brings and is_narrow:
                payload, fds, cut = receive_whole(self.sock, self.room)
            else:
                payload, fds, cut = receive(self.sock, _DONTWAIT, self.room)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        try:
            if payload:
                self.server.handle(self, payload, fds, cut)
            if not payload or (cut and is_narrow):
                self.close()
        finally:
            if fds:  # whoever takes them empties the list
                closer.close_fds(fds, uid)

    def resume(self) -> None:
        """Read from this peer."""
        if not self.reading and not self.closed and not self.held and self.parked is None:
            self.reading = True
            self.server.loop.add_reader(self.sock, self.readable)

    def pause(self) -> None:
        """Read nothing more from this peer for now."""
        if self.reading:
            self.reading = False
            self.server.loop.remove_reader(self.sock)

    def hold(self) -> None:
        """Read nothing more from this peer until :meth:`go_on`: it asked for more than is done at once."""
        self.held = True
        self.pause()

    def go_on(self) -> None:
        """What this peer asked for is done."""
        self.held = False
        if not self.queue:
            self.resume()

    def park(self, now: float) -> None:
        """Read nothing more from this peer until :meth:`unpark`, whatever else is resumed in between."""
        self.pause()
        self.parked = now

    def unpark(self, now: float) -> bool:
        """It is its turn; return whether to read. What it owes is due as much later as we kept it waiting."""
        late = now - (now if self.parked is None else self.parked)
        self.parked = None
        if self.session is None and self.waiting_since is not None:
            self.waiting_since += late
        for unfinished in self.partials.values():
            unfinished.since += late
        if self.queue:  # it has to read first what there is for it
            return False
        self.resume()
        return self.reading

    # -- out ------------------------------------------------------------------------------------------------------
    def send(self, payload: bytes, held: Held | None = None, start: int = 0, stop: int = 0) -> None:
        """Send a message, with ``held.fds[start:stop]``, now or as soon as the peer makes room."""
        if self.closed:
            return
        if not self.queue and self._try(payload, held, start, stop) <= _SENT:
            return
        if held is not None:
            held.keep()
        self.enqueue(payload, held, start, stop)
        refusal = self.server.in_flight.refusal(self.credentials.uid, self.share, len(payload) + _EACH)
        if self.queued > MAX_QUEUED or (refusal is not None and not self.moved):
            if refusal is not None:  # heard where the socket has room: what waits may wait for descriptors in flight
                self._try(m.encode(failure(0, refusal)), None, 0, 0)
            self.close()
            return
        self.pause()
        if len(self.queue) == 1:
            self.owes()
            self._wait_for_room()

    def enqueue(self, payload: bytes, held: Held | None, start: int, stop: int) -> None:
        """Put a message into the queue, which has one use of `held` from now on."""
        self.queue.append((payload, held, start, stop))
        self._count_queued(len(payload) + _EACH)

    def _count_queued(self, nbytes: int) -> None:
        self.queued += nbytes
        self.server.in_flight.enqueue(self.share, nbytes)

    def owes(self) -> None:
        """Note that the peer has to do something within the server's patience."""
        if self.waiting_since is None:
            self.waiting_since = self.server.now()
            self.server.watch_over(self)

    def has_read_all(self) -> bool:
        """Whether nothing that was sent is still unread (``SIOCOUTQ``, see unix(7))."""
        (unread,) = struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, b"\0\0\0\0"))
        # What was sent since it was polled last takes half of what it was counted as at least: with less, it has read.
        has_read = unread < (self.seen + self.unread) // 2
        self.seen = unread
        self.server.in_flight.found(self, unread)
        if has_read and not self.in_flight and self.session is not None and self.waiting_since is not None:
            self.waiting_since = self.server.now()
        if self.hoards and not self.closed:
            self.owes()
        return bool(unread == 0)

    def _try(self, payload: bytes, held: Held | None, start: int, stop: int) -> int:
        """Send now if possible: return _SENT, _LOST with the connection, or the errno that stands in the way."""
        if held is None:
            fds: list[int] = []
        else:
            fds = held.fds[start:stop]
            # Descriptors in flight are limited per user of the whole machine, so each peer gets one part of them:
            # who does not read what came before gets nothing more. So it is with all peers of one user.
            if self.in_flight and self.in_flight + len(fds) > self.server.part and not self.has_read_all():
                return errno.ETOOMANYREFS
            if fds and not self.server.in_flight.has_room(self.share, len(fds)):
                return errno.ETOOMANYREFS
        # What is in sockets is the keeper's memory to the kernel, and limited per user, too. This costs two additions.
        share, nbytes = self.share, _TIMES * len(payload) + _EACH_SENT
        if share.sent + nbytes > share.max_queued and not self.server.in_flight.has_room_for(share, nbytes):
            return errno.ETOOMANYREFS
        try:
            transmit(self.sock, payload, fds, _DONTWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS):
                return error.errno
            self.close()
            return _LOST
        if not self.unread:
            share.receivers[self] = None
        self.unread += nbytes
        share.sent += nbytes
        if fds:
            self.server.in_flight.count(self, len(fds))
            self.waiting_since = self.server.now()  # to read these, from now
            self.server.watch_over(self)
        return _SENT

    def _wait_for_room(self, code: int = errno.EAGAIN) -> None:
        if code == errno.EAGAIN:
            if not self.writing:
                self.writing = True
                self.server.loop.add_writer(self.sock, self.writable)
        else:
            # No event tells when descriptors left flight, or others read, so look again soon.
            self.not_writing()
            self.server.loop.call_later(self.retry, self._try_again)
            self.retry = min(self.retry * 2, _RETRY_AT_MOST)

    def _try_again(self) -> None:
        with self.server.turns.charged(self.credentials.uid):  # in nobody's turn, and there may be thousands
            self.writable()

    def not_writing(self) -> None:
        """Do not look for room in this peer's socket for now."""
        if self.writing:
            self.writing = False
            self.server.loop.remove_writer(self.sock)

    def writable(self) -> None:
        """Send what is queued, as far as it goes."""
        if self.closed or self.server.paused:  # a timer of before
            return
        while self.queue:
            payload, held, start, stop = self.queue[0]
            code = self._try(payload, held, start, stop)
            if code == _LOST:
                return
            if code != _SENT:
                self._wait_for_room(code)
                return
            self.waiting_since = self.server.now()
            self.retry = _RETRY
            self.queue.popleft()
            self._count_queued(-len(payload) - _EACH)
            if held is not None:
                held.drop()
        self.moved = False
        self.not_writing()
        self.resume()

    # -- end ------------------------------------------------------------------------------------------------------
    def close(self, *, hang_up: bool = True) -> None:
        """End the connection and everything that depends on it. Idempotent.

        Parameters
        ----------
        hang_up : bool
            False where this process has the socket, or another process will have it, once more.
        """
        if self.closed:
            return
        self.closed = True
        self.pause()
        if self.parked is not None:
            self.server.turns.drop(self)
            self.server.no_longer_aside(self)
        self.not_writing()
        hang_up = hang_up and not self.server.closing
        if hang_up and (self.in_flight or self.unread) and not self.has_read_all():
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)  # the end for the peer, as if it was closed
        else:
            self.server.in_flight.landed(self)
            self._close_socket(hang_up=hang_up)
        for _, held, _, _ in self.queue:
            if held is not None:
                held.drop()
        self.queue.clear()
        self._count_queued(-self.queued)
        for unfinished in self.partials.values():
            self.server.dispose(unfinished.fds.detach(), unfinished.nbytes, self.credentials.uid)
        self.partials.clear()
        self.server.gone(self)

    def _close_socket(self, *, hang_up: bool) -> None:
        closer, closed = self.server.slow_closer, partial(self.server.socket_closed, self)
        self.is_open = not closer.close_socket(self.sock, self.credentials.uid, closed, hang_up=hang_up)

    def stop_lingering(self, *, at_once: bool = False) -> bool:
        """End a closed connection once its peer has read everything or hung up; whether it lingers no more."""
        if not at_once and not self.has_read_all():
            return False
        self.server.in_flight.landed(self)
        self._close_socket(hang_up=not self.server.closing)
        return True

    def overdue(self, now: float, patience: float) -> bool:
        """Whether the peer has kept us waiting for too long; forgets about one that owes nothing any more."""
        if self.closed or self.waiting_since is None or (self.session is None and self.parked is not None):
            return False
        if self.in_flight or self.hoards:
            self.has_read_all()  # then both are up to date
        if self.session is not None and not (self.queue or self.in_flight or self.hoards):
            self.waiting_since = None
            return False
        if self.session is not None and self.queue and not self.writing and self.has_read_all():
            self.waiting_since = now  # it is not the one that does not read: others hold all that may be in flight
            return False
        return now - self.waiting_since > patience
