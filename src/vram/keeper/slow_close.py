"""Closing what clients sent, which may take as long as the client pleases: all descriptors of a keeper are closed here.

Closing the last reference to a file can block: a TCP socket with SO_LINGER and unsent data for the time it says, a file
of a FUSE mount until its server answers, a memfd until its pages are freed (0.1 s for 512 MiB). All come as
descriptors, taken off a socket or unread in its queue. And each close of a memfd, the last or not, goes through the
POSIX locks of its file, of which its sender may have made millions in seconds, by unlocking every second byte of one:
77 ms a close for a million. Nothing that the kernel says in a bounded time tells such a file from others: whoever walks
those locks holds what the question would wait for. So nothing that a client sent is closed in the loop's thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..sharing.channel import receive
from ..sharing.unread import drain
from ..sharing.unread import hang_up as end_connection

__all__ = ["SlowCloser", "Unclosed", "brings_fds", "receive_whole"]

_MAX_THREADS = 64  # and one for the keeper's own user
_STAYS = 0.5  # seconds
_PART = 64  # descriptors of memory that are closed, and not counted any more, at a time
_DONTWAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
_PEEK = int(getattr(socket, "MSG_PEEK", 0)) | _DONTWAIT
_CTRUNC = int(getattr(socket, "MSG_CTRUNC", 0))


@dataclass(slots=True)
class Unclosed:
    """What waits to be closed, what is being closed included.

    Attributes
    ----------
    sent : int
        Descriptors that came with messages and were not taken: they were never on the books.
    handles, nbytes : int
        Descriptors that were on the books, and the bytes of memory behind them.
    """

    sent: int = 0
    handles: int = 0
    nbytes: int = 0

    def add(self, other: Unclosed, sign: int = 1) -> None:
        """Count as much more, or with the sign -1 less."""
        self.sent += sign * other.sent
        self.handles += sign * other.handles
        self.nbytes += sign * other.nbytes


_Task = tuple[Callable[[], object], Unclosed]  # what closes something, and what that is


class SlowCloser:
    """Closes what may take long in other threads: one for each user, so that no user waits for another.

    Parameters
    ----------
    room : int
        How many descriptors that were sent may wait to be closed.
    message : int
        How many of them one message may bring.
    own : int
        The user who runs the keeper: room for one message of theirs is kept back.
    on_room : callable
        Called in a thread of this once :meth:`takes` may answer otherwise, if :attr:`is_awaited` was set before.

    Attributes
    ----------
    is_awaited : bool
        Whether somebody waits for :meth:`takes` to be true. Set by the caller, before it asks; reset with the call.
    total : Unclosed
        What waits of all users.

    Notes
    -----
    What one user has to be closed waits in two lanes, of each of which one thread at a time takes one task: where there
    are more lanes than threads, each has one task done before any has its next. What was not taken has a lane of its
    own, as no ceiling of bytes counts it: behind memory that closes slowly, it would be as much as its sender likes.

    The threads are daemons, at most 64. The process cannot end while one of them is stuck in the kernel, not even
    killed: what it has open stays so until then (:mod:`vram.keeper.killed`).
    """

    def __init__(self, room: int, message: int, own: int, on_room: Callable[[], None]) -> None:
        self.is_awaited = False
        self.total = Unclosed()
        self._few = message // 4
        self._room = room - 2 * message  # so much may be open where another message of anybody else still fits
        self._own = own
        self._on_room = on_room
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._freed = threading.Condition(self._lock)
        self._idle = 0  # threads that wait for a lane
        self._lanes: dict[int, deque[_Task]] = {}  # by user, or ~user; also while the last task is done
        self._waiting: dict[int, Unclosed] = {}  # by user; sockets are not counted
        self._unserved: deque[int] = deque()  # lanes that no thread has
        self._threads = 0

    def takes(self, uid: int) -> bool:
        """Whether to take another message with descriptors from this user: not while more than a few are open."""
        return self.of(uid).sent <= self._few and (uid == self._own or self.total.sent <= self._room)

    def of(self, uid: int) -> Unclosed:
        """Return what of one user waits."""
        return self._waiting.get(uid) or Unclosed()

    def close_fds(self, fds: Sequence[int], uid: int) -> None:
        """Close descriptors that came from a user and were not taken."""
        self._put(~uid, *((partial(_close_sent, fd), Unclosed(sent=1)) for fd in fds))

    def keep(self, uid: int, count: int) -> None:
        """Count so many more descriptors that came from a user and wait to be taken, or less."""
        if not count:
            return
        with self._lock:
            self._count(uid, Unclosed(sent=count), 1)
        if count < 0 and self.is_awaited:
            self.is_awaited = False
            self._on_room()

    def free(self, fds: list[int], nbytes: int, uid: int) -> None:
        """Close descriptors of a user's memory that is on the books no more. It counts until then.

        Parameters
        ----------
        nbytes : int
            Bytes of memory behind them, as they were counted.
        """
        parts = [fds[first : first + _PART] for first in range(0, len(fds), _PART)]
        tasks = [(partial(_close_each, part), Unclosed(handles=len(part))) for part in parts]
        if tasks:
            tasks[-1][1].nbytes = nbytes
        self._put(uid, *tasks)

    def close_socket(self, sock: socket.socket, uid: int, closed: Callable[[], None], *, hang_up: bool = True) -> bool:
        """Close a unix socket with all that is unread in it.

        Parameters
        ----------
        closed : callable
            Called once it is, in another thread, if descriptors are unread: they may be anything.
        hang_up : bool
            End the connection at once, and for every process that has this socket. Otherwise what is unread stays.

        Returns
        -------
        bool
            Whether it is closed already. Then `closed` is not called.
        """
        if end_connection(sock) if hang_up else _is_empty(sock):
            sock.close()
            return True

        def close() -> None:
            if hang_up:
                drain(sock)  # another process may have this socket, too, and close it last: it is to find nothing
            sock.close()
            closed()

        self._put(~uid, (close, Unclosed()))
        return False

    def finish(self, seconds: float | None) -> None:
        """Wait until all memory that was on the books is freed, at most so long."""
        with self._lock:
            self._freed.wait_for(lambda: not self.total.handles, seconds)

    def _put(self, number: int, *tasks: _Task) -> None:
        """Put tasks into a lane: that of a user, or with ~user that of what the user sent and nobody took."""
        if not tasks:
            return
        with self._lock:
            lane = self._lanes.get(number)
            if lane is None:
                lane = self._lanes[number] = deque()
                self._line_up(number)
            lane.extend(tasks)
            for _, what in tasks:
                self._count(_user(number), what, 1)
            if self._idle:
                self._ready.notify()
            is_own = _user(number) == self._own
            start = len(self._unserved) > self._idle and self._threads < _MAX_THREADS + is_own
            self._threads += start
        if start:
            try:
                threading.Thread(target=self._work, name="closer", daemon=True).start()
            except RuntimeError:  # no thread can be started now; the next call tries again
                with self._lock:
                    self._threads -= 1

    def _line_up(self, number: int) -> None:
        """Have a lane served, after those that wait for it already."""
        if _user(number) == self._own:
            self._unserved.appendleft(number)
        else:
            self._unserved.append(number)

    def _count(self, uid: int, what: Unclosed, sign: int) -> None:
        self.total.add(what, sign)
        waiting = self._waiting.setdefault(uid, Unclosed())
        waiting.add(what, sign)
        if waiting == Unclosed():
            del self._waiting[uid]
        if not self.total.handles:
            self._freed.notify_all()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._unserved:  # starting a thread makes the loop wait, so this one stays a moment
                    self._idle += 1
                    self._ready.wait(_STAYS)
                    self._idle -= 1
                if not self._unserved:
                    self._threads -= 1
                    return
                number = self._unserved.popleft()
                close, what = self._lanes[number].popleft()
            close()
            with self._lock:
                self._count(_user(number), what, -1)
                if self._lanes[number]:
                    self._line_up(number)
                else:
                    del self._lanes[number]
            if what.sent and self.is_awaited:
                self.is_awaited = False
                self._on_room()


def _user(lane: int) -> int:
    """Return whose lane that is."""
    return lane if lane >= 0 else ~lane


def brings_fds(sock: socket.socket) -> bool:
    """Whether the next message on a unix socket carries descriptors. They are not received."""
    try:
        *_, said, _ = sock.recvmsg(1, 0, _PEEK)
    except OSError:
        return False
    return bool(said & _CTRUNC)


def receive_whole(sock: socket.socket, room: int) -> tuple[bytes, list[int], bool]:
    """Receive a message with all of its descriptors. One that has more than there is `room` for stays where it is.

    What has no room in a message that is received is closed by the kernel, in this thread and however long it takes. So
    it is looked at first, by which its descriptors are open here, and then thrown away, which closes none of them.

    Returns
    -------
    payload, fds : bytes, list of int
    cut : bool
        Whether there is more to it, and it stays: nothing can be received here any more.
    """
    payload, fds, cut = receive(sock, _PEEK, room)
    if not cut:
        sock.recvmsg(1, 0, _DONTWAIT)
    return payload, fds, cut


def _close_each(fds: Sequence[int]) -> None:
    """Close memory here, however long that takes: not as a reader does, who leaves it to threads that nobody counts."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _close_sent(fd: int) -> None:
    with contextlib.suppress(OSError):
        _abort(fd)
        os.close(fd)


def _abort(fd: int) -> None:
    """Have a lingering socket not linger. Its sender may set it again: this saves time, not the thread."""
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=fd)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        finally:
            sock.detach()


def _is_empty(sock: socket.socket) -> bool:
    """Whether nothing is unread in a unix socket, or its end."""
    try:
        sock.recvmsg(1, 0, _PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False
