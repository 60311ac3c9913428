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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..sharing.channel import ALL_FDS, MAX_MESSAGE, Credentials, receive, transmit
from ..sharing.channel import hang_up as hang_up_socket
from ..sharing.parcels import Collector
from .records import Claim, Lease, Publication, Session

if TYPE_CHECKING:
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


@dataclass(slots=True, eq=False)
class Held:
    """The descriptors of one version, counted by the catalogue and by every queued answer that carries them.
    Without the count, a lease given back early would let a queued answer send a number that means another file."""

    fds: list[int]
    nbytes: int
    dispose: Callable[[list[int], int], None]  # called with the descriptors, and `number`
    number: int = 0  # under which a guardian has the first of them
    uses: int = 1

    def keep(self) -> None:
        """Count one more use."""
        self.uses += 1

    def drop(self) -> None:
        """Count one use less; the last one closes the descriptors."""
        self.uses -= 1
        if not self.uses:
            fds, self.fds = self.fds, []
            self.dispose(fds, self.number)


@dataclass(slots=True, eq=False)
class Partial:
    """A publication whose descriptors have not all come; the server disposes of those in `fds`."""

    publication: Publication
    nbytes: int  # of the memory behind those that came
    fds: Collector
    since: float = 0.0  # when the last of them came


@dataclass(slots=True, eq=False)
class Unsettled:
    """The calls that a client of the keeper before may make once more (None: it has not said which): the versions that
    were published (0: only done) and what was granted, by call. Calls that are `answered` may come all the same."""

    outcomes: dict[int, int]
    granted: dict[int, Lease | Claim]
    calls: range | None = None
    answered: set[int] = field(default_factory=set)

    def limit(self, calls: range) -> None:
        """Forget all other calls than these."""
        self.calls = calls
        self.outcomes = {call: version for call, version in self.outcomes.items() if call in calls}
        self.granted = {call: one for call, one in self.granted.items() if call in calls}

    def __contains__(self, call: int) -> bool:
        return self.calls is None or call in self.calls


@dataclass(slots=True, eq=False)
class Connection:
    """A peer, from accept to end of file."""

    server: KeeperServer
    sock: socket.socket
    credentials: Credentials
    session: Session | None = None  # from its hello on
    partials: dict[int, Partial] = field(default_factory=dict)
    queue: deque[tuple[bytes, Held | None, int, int]] = field(default_factory=deque)
    queued: int = 0  # bytes
    in_flight: int = 0  # descriptors sent since it had read everything
    waiting_since: float | None = None  # when it began to owe a greeting, or to read what was sent
    retry: float = _RETRY
    writing: bool = False
    closed: bool = False
    unsettled: Unsettled | None = None  # of one that was a client of the keeper before

    def __post_init__(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

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
                self.server.service.handle(self, payload, fds, cut)
            else:
                self.close()
        finally:
            if fds:  # a handler that takes them empties the list
                self.server.close_soon(fds)

    def resume(self) -> None:
        """Read from this peer."""
        if not self.closed:
            self.server.loop.add_reader(self.sock, self.readable)

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
        self.queue.append((payload, held, start, stop))  # which has one use of `held` from now on
        self.queued += len(payload) + _EACH
        if self.queued > MAX_QUEUED:
            self.close()
            return
        self.server.loop.remove_reader(self.sock)
        if len(self.queue) == 1:
            self.owes()
            self._wait_for_room()

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
        self.writing = code == errno.EAGAIN
        if self.writing:
            self.server.loop.add_writer(self.sock, self.writable)
        else:
            # No event tells when descriptors left flight, or others read, so look again soon.
            self.server.loop.remove_writer(self.sock)
            self.server.loop.call_later(self.retry, self.writable)
            self.retry = min(self.retry * 2, _RETRY_AT_MOST)

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
        self.writing = False
        self.server.loop.remove_writer(self.sock)
        self.resume()

    # -- end ------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End the connection and everything that depends on it. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.server.loop.remove_reader(self.sock)
        self.server.loop.remove_writer(self.sock)
        if self.server.paused:
            self.sock.close()
        else:
            hang_up_socket(self.sock)
            self.server.close_soon([self.sock.detach()])  # what is unread in it may be memory, and takes time to free
        for _, held, _, _ in self.queue:
            if held is not None:
                held.drop()
        self.queue.clear()
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
