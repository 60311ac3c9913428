"""One connection of the keeper: what came in, what has to go out, and how long a peer may keep us waiting.

Nothing here blocks. An answer is sent at once; what the peer's socket has no room for waits in a queue, and while
anything waits nothing more is read from that peer, so that the queue is bounded by what it had asked for before.
"""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..sharing.channel import ALL_FDS, MAX_MESSAGE, Credentials, receive, transmit
from ..sharing.channel import hang_up as hang_up_socket
from ..sharing.parcels import Collector
from .records import Claim, Lease, Publication, Session

if TYPE_CHECKING:
    from .messages import Publish
    from .server import KeeperServer

MAX_QUEUED = 4 * 1024 * 1024  # bytes of answers that one peer may leave unread
_EACH = 256  # bytes that any answer in a queue costs besides, about
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
    """The descriptors of one version, counted by the catalogue and by every queued answer that carries them.
    Without the count, a lease given back early would let a queued answer send a number that means another file."""

    __slots__ = ("_dispose", "_uses", "fds", "nbytes", "number")

    def __init__(
        self, fds: list[int], nbytes: int, dispose: Callable[[list[int], int], None], *, number: int = 0
    ) -> None:
        self.fds = fds
        self.nbytes = nbytes
        self.number = number  # under which a guardian has the first of them
        self._uses = 1
        self._dispose = dispose

    def keep(self) -> None:
        """Count one more use."""
        self._uses += 1

    def drop(self) -> None:
        """Count one use less; the last one closes the descriptors."""
        self._uses -= 1
        if not self._uses:
            fds, self.fds = self.fds, []
            self._dispose(fds, self.number)


class Partial:
    """A publication whose descriptors have not all come; the server disposes of those in `fds`.
    `nbytes` is the memory behind them; `since` is when the last of them came."""

    __slots__ = ("fds", "nbytes", "publication", "request", "since")

    def __init__(self, publication: Publication, request: Publish, nbytes: int) -> None:
        self.publication = publication
        self.request = request
        self.fds = Collector(publication.handles, is_armed=False)
        self.nbytes = nbytes
        self.since = 0.0


class Unsettled:
    """The calls that a client of the keeper before may make once more (None: it has not said which): the versions that
    were published (0: only done) and what was granted, by call. Calls that are `answered` may come all the same."""

    __slots__ = ("answered", "calls", "granted", "outcomes")

    def __init__(self, session: Session, outcomes: dict[int, int]) -> None:
        self.calls: range | None = None
        self.outcomes = outcomes
        self.granted: dict[int, Lease | Claim] = {one.call: one for one in session.granted}
        self.answered: set[int] = set()

    def limit(self, calls: range) -> None:
        """Forget all other calls than these."""
        self.calls = calls
        self.outcomes = {call: version for call, version in self.outcomes.items() if call in calls}
        self.granted = {call: one for call, one in self.granted.items() if call in calls}

    def __contains__(self, call: int) -> bool:
        return self.calls is None or call in self.calls


class Connection:
    """A peer, from accept to end of file; `session` is None until its hello. `in_flight` counts descriptors sent since
    it had read everything; `waiting_since` is when it began to owe a greeting, or to read what was sent. `unsettled` is
    of one that was a client of the keeper before."""

    __slots__ = (
        "closed",
        "credentials",
        "in_flight",
        "number",
        "partials",
        "queue",
        "queued",
        "reading",
        "retry",
        "server",
        "session",
        "sock",
        "unsettled",
        "waiting_since",
        "writing",
    )

    def __init__(self, server: KeeperServer, sock: socket.socket, credentials: Credentials) -> None:
        self.server = server
        self.sock = sock
        self.credentials = credentials
        self.session: Session | None = None
        self.partials: dict[int, Partial] = {}
        self.queue: deque[tuple[bytes, Held | None, int, int]] = deque()
        self.queued = 0
        self.in_flight = 0
        self.waiting_since: float | None = None
        self.retry = _RETRY
        self.reading = False
        self.writing = False
        self.closed = False
        self.number = 0  # under which a guardian has the socket
        self.unsettled: Unsettled | None = None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    # -- in -------------------------------------------------------------------------------------------------------
    def readable(self) -> None:
        """Take one message off the socket and have it answered. One at a time: the others get their turn."""
        if self.server.paused:  # due in the same turn of the loop in which the keeper ends
            return
        try:
            payload, fds, cut = receive(self.sock, _DONTWAIT, ALL_FDS)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        try:
            if payload:
                self.server.handle(self, payload, fds, cut)
            else:
                self.close()
        finally:
            if fds:  # a handler that takes them empties the list
                self.server.close_soon(fds)

    def resume(self) -> None:
        """Read from this peer."""
        if not self.reading and not self.closed:
            self.reading = True
            self.server.loop.add_reader(self.sock, self.readable)

    def pause(self) -> None:
        """Read nothing more from this peer for now."""
        if self.reading:
            self.reading = False
            self.server.loop.remove_reader(self.sock)

    # -- out ------------------------------------------------------------------------------------------------------
    def send(self, payload: bytes, held: Held | None = None, start: int = 0, stop: int = 0) -> None:
        """Send a message, with ``held.fds[start:stop]``, now or as soon as the peer makes room."""
        if self.closed:
            return
        self.server.flush()
        if not self.queue and self._try(payload, held, start, stop) <= _SENT:
            return
        if held is not None:
            held.keep()
        self.enqueue(payload, held, start, stop)
        if self.queued > MAX_QUEUED:
            self.close()
            return
        self.pause()
        if len(self.queue) == 1:
            self.owes()
            self._wait_for_room()

    def enqueue(self, payload: bytes, held: Held | None, start: int, stop: int) -> None:
        """Put a message into the queue, which has one use of `held` from now on."""
        self.queue.append((payload, held, start, stop))
        self.queued += len(payload) + _EACH

    def owes(self) -> None:
        """Note that the peer has to do something within the server's patience."""
        if self.waiting_since is None:
            self.waiting_since = self.server.now()
            self.server.watch_over(self)

    def has_read_all(self) -> bool:
        """Whether nothing that was sent is still unread (``SIOCOUTQ``, see unix(7))."""
        (unread,) = struct.unpack("i", fcntl.ioctl(self.sock, termios.TIOCOUTQ, b"\0\0\0\0"))
        if not unread:
            self.in_flight = 0
        return not unread

    def _try(self, payload: bytes, held: Held | None, start: int, stop: int) -> int:
        """Send now if possible: return _SENT, _LOST with the connection, or the errno that stands in the way."""
        if held is None:
            fds: list[int] = []
        else:
            fds = held.fds[start:stop]
            # Descriptors in flight are limited per user of the whole machine, so each peer gets one part of them:
            # who does not read what came before gets nothing more.
            if self.in_flight and self.in_flight + len(fds) > self.server.part and not self.has_read_all():
                return errno.ETOOMANYREFS
        try:
            transmit(self.sock, payload, fds, _DONTWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS):
                return error.errno
            self.close()
            return _LOST
        if fds:
            self.in_flight += len(fds)
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
            self.server.loop.call_later(self.retry, self.writable)
            self.retry = min(self.retry * 2, _RETRY_AT_MOST)

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
            self.queued -= len(payload) + _EACH
            if held is not None:
                held.drop()
        self.not_writing()
        self.resume()

    # -- end ------------------------------------------------------------------------------------------------------
    def close(self, *, hang_up: bool = True) -> None:
        """End the connection and everything that depends on it. Idempotent.
        `hang_up` is False where this process has the socket once more, or another process will have it."""
        if self.closed:
            return
        self.closed = True
        self.pause()
        self.not_writing()
        if hang_up and not self.server.closing:
            hang_up_socket(self.sock)
            self.server.close_soon([self.sock.detach()])  # what is unread in it may be memory, and takes time to free
        else:
            self.sock.close()
        for _, held, _, _ in self.queue:
            if held is not None:
                held.drop()
        self.queue.clear()
        self.queued = 0
        for unfinished in self.partials.values():
            self.server.dispose(unfinished.fds.detach())
        self.partials.clear()
        self.server.gone(self)

    def overdue(self, now: float, patience: float) -> bool:
        """Whether the peer has kept us waiting for too long; clears the deadline where nothing is due."""
        if self.closed or self.waiting_since is None:
            return False
        if self.session is not None:
            has_read = self.has_read_all()
            if not (self.queue or self.in_flight):
                self.waiting_since = None
                return False
            if self.queue and not self.writing and has_read:
                self.waiting_since = now  # others hold all descriptors that may be in flight
                return False
        return now - self.waiting_since > patience
