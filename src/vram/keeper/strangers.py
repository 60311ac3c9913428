"""Closing what strangers sent, where it may take as long as they please.

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
from collections import deque
from collections.abc import Sequence

__all__ = ["INLINE", "StrangersCloser"]

# Bytes of memory up to which closing it is cheaper at once than in another thread. One message may end as many as it
# can name, some thousands, while everybody else waits: so it is little.
INLINE = 1 << 16

_MAX_THREADS = 64
_F_GET_SEALS = 1034  # <linux/fcntl.h>
_PASSCRED = getattr(socket, "SO_PASSCRED", 16)
_PEEK = int(socket.MSG_PEEK) | int(getattr(socket, "MSG_DONTWAIT", 0))


class StrangersCloser:
    """Closes what does not close at once in other threads: each user's in one, so that nobody waits for another.

    Parameters
    ----------
    room : int
        How many descriptors may wait to be closed before :attr:`is_full`; half of them of one user.

    Notes
    -----
    The threads are daemons, at most 64: the process ends whatever they are stuck in.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._lock = threading.Lock()
        self._lanes: dict[int, deque[int | socket.socket]] = {}
        self._waiting: dict[int, int] = {}  # by user, what is being closed included
        self._total = 0
        self._unserved: deque[int] = deque()
        self._threads = 0

    @property
    def is_full(self) -> bool:
        """Whether more waits to be closed than there is room for."""
        return self._total >= self.room

    def owes(self, uid: int) -> bool:
        """Whether so much of this user's waits to be closed that nothing more should be taken from it."""
        return self._waiting.get(uid, 0) > self.room // 2

    def close_fds(self, fds: Sequence[int], uid: int) -> None:
        """Close descriptors that came from a user. A little memory closes here, anything else elsewhere."""
        slow: list[int | socket.socket] = []
        for fd in fds:
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
        self._put(slow, uid)

    def close_socket(self, sock: socket.socket, uid: int, *, hang_up: bool = True) -> None:
        """Close a unix socket with all that is unread in it.

        Parameters
        ----------
        hang_up : bool
            End the connection at once, and for every process that has this socket.
        """
        if hang_up:
            with contextlib.suppress(OSError):  # also: from here on nothing more gets into its queue
                sock.shutdown(socket.SHUT_RDWR)
        if _has_unread(sock):
            self._put([sock], uid)
        else:
            sock.close()

    def _put(self, things: Sequence[int | socket.socket], uid: int) -> None:
        if not things:
            return
        with self._lock:
            lane = self._lanes.get(uid)
            if lane is None:
                lane = self._lanes[uid] = deque()
                self._unserved.append(uid)
            lane.extend(things)
            self._total += len(things)
            self._waiting[uid] = self._waiting.get(uid, 0) + len(things)
            start = bool(self._unserved) and self._threads < _MAX_THREADS
            self._threads += start
        if start:
            try:
                threading.Thread(target=self._work, name="strangers' closer", daemon=True).start()
            except RuntimeError:  # no thread to be had now; whatever comes next tries again
                with self._lock:
                    self._threads -= 1

    def _work(self) -> None:
        while True:
            with self._lock:
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
                    del self._lanes[uid], self._waiting[uid]
                    return
                thing = lane.popleft()
            with contextlib.suppress(OSError):
                if isinstance(thing, socket.socket):
                    thing.close()
                else:
                    _abort(thing)
                    os.close(thing)
            with self._lock:
                self._total -= 1
                self._waiting[uid] -= 1


def _abort(fd: int) -> None:
    """Have a lingering socket not linger. Its sender may set it again: this saves time, not the thread."""
    with contextlib.suppress(OSError):
        sock = socket.socket(fileno=fd)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        finally:
            sock.detach()


def _has_unread(sock: socket.socket) -> bool:
    """Whether messages wait in the queue of a unix socket. An empty message is told from the end by whose it is."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _PASSCRED, 1)
        payload, _, said, _ = sock.recvmsg(1, 0, _PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return bool(payload) or bool(said & socket.MSG_CTRUNC)
