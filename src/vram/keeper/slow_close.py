"""Closing descriptors that clients sent, which may take as long as the client pleases.

Closing the last reference to a file can block: a TCP socket with SO_LINGER and unsent data for the time it says, a file
of a FUSE mount until its server answers, a memfd until its pages are freed (0.1 s for 512 MiB). All come as
descriptors, taken off a socket or unread in its queue.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from ..sharing.channel import receive
from ..sharing.unread import hang_up as end_connection

__all__ = ["INLINE", "MOMENT", "SlowCloser", "brings_fds", "receive_whole"]

# Bytes of memory up to which closing it is cheaper at once than in another thread. One message may end as many as it
# can name, some thousands, while everybody else waits: so it is little.
INLINE = 1 << 16
MOMENT = 0.001  # seconds after which the rest is closed in another thread, however little memory it is

_MAX_THREADS = 64  # and one for the keeper's own user
_STAYS = 0.5  # seconds
_F_GET_SEALS = 1034  # <linux/fcntl.h>
_DONTWAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
_PEEK = int(getattr(socket, "MSG_PEEK", 0)) | _DONTWAIT
_CTRUNC = int(getattr(socket, "MSG_CTRUNC", 0))


class SlowCloser:
    """Closes slow descriptors in other threads: one for each user, so that no user waits for another.

    Parameters
    ----------
    room : int
        How many descriptors may wait to be closed.
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

    Notes
    -----
    The threads are daemons, at most 64. The process cannot end while one of them is stuck in the kernel, not even
    killed: what it has open stays so until then (:mod:`vram.keeper.killed`).
    """

    def __init__(self, room: int, message: int, own: int, on_room: Callable[[], None]) -> None:
        self.is_awaited = False
        self._few = message // 4
        self._room = room - 2 * message  # so much may be open where another message of anybody else still fits
        self._own = own
        self._on_room = on_room
        self._lock = threading.Lock()
        self._ready = threading.Condition(self._lock)
        self._idle = 0  # threads that wait for a lane
        self._lanes: dict[int, deque[int | tuple[socket.socket, Callable[[], None]]]] = {}
        self._waiting: dict[int, int] = {}  # descriptors by user, what is being closed included; sockets are not
        self._total = 0
        self._unserved: deque[int] = deque()
        self._threads = 0

    def takes(self, uid: int) -> bool:
        """Whether to take another message with descriptors from this user: not while more than a few are open."""
        return self._waiting.get(uid, 0) <= self._few and (uid == self._own or self._total <= self._room)

    def close_fds(self, fds: Sequence[int], uid: int) -> None:
        """Close descriptors that came from a user. A little memory closes here, for a moment; anything else elsewhere.

        Each close of a memfd goes through the POSIX locks of its file, which its sender may have made thousands of.
        """
        slow: list[int] = []
        rest = iter(fds)
        end = time.monotonic() + MOMENT
        for fd in rest:
            try:
                fcntl.fcntl(fd, _F_GET_SEALS)  # asks no file system, as fstat would
                taken = os.fstat(fd).st_blocks * 512  # of what can be sealed, which is no file of anybody's server
            except OSError:
                slow.append(fd)
                continue
            if taken > INLINE:
                slow.append(fd)
            else:
                os.close(fd)
                if time.monotonic() > end:
                    slow += rest
                    break
        self._put(slow, uid, len(slow))

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
        self._put([(sock, closed)], uid, 0)
        return False

    def _put(self, things: Sequence[int | tuple[socket.socket, Callable[[], None]]], uid: int, fds: int) -> None:
        if not things:
            return
        with self._lock:
            lane = self._lanes.get(uid)
            if lane is None:
                lane = self._lanes[uid] = deque()
                if uid == self._own:
                    self._unserved.appendleft(uid)
                else:
                    self._unserved.append(uid)
            lane.extend(things)
            self._count(uid, fds)
            if self._idle:
                self._ready.notify()
            start = len(self._unserved) > self._idle and self._threads < _MAX_THREADS + (uid == self._own)
            self._threads += start
        if start:
            try:
                threading.Thread(target=self._work, name="strangers' closer", daemon=True).start()
            except RuntimeError:  # no thread can be started now; the next call tries again
                with self._lock:
                    self._threads -= 1

    def _count(self, uid: int, fds: int) -> None:
        self._total += fds
        waiting = self._waiting.get(uid, 0) + fds
        if waiting:
            self._waiting[uid] = waiting
        else:
            self._waiting.pop(uid, None)

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
                uid = self._unserved.popleft()
            self._serve(uid)

    def _serve(self, uid: int) -> None:
        while True:
            with self._lock:
                lane = self._lanes[uid]
                if not lane:
                    del self._lanes[uid]
                    return
                thing = lane.popleft()
            if isinstance(thing, int):
                with contextlib.suppress(OSError):
                    _abort(thing)
                    os.close(thing)
                with self._lock:
                    self._count(uid, -1)
                if self.is_awaited:
                    self.is_awaited = False
                    self._on_room()
            else:
                sock, closed = thing
                sock.close()
                closed()


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
