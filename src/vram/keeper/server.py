"""The keeper's process: a listening socket, a loop, and the descriptors of everybody's memory.

One thread does everything but closing: of memory, which takes a second for 8 GiB, in a second thread, and of what
strangers sent, which takes as long as they please, in threads of :mod:`.slow_close`.
Per message there is one ``recvmsg``, the catalogue's dictionaries, and one ``sendmsg``; no coroutines, no tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import islice

from ..errors import QuotaError, UnsupportedError
from ..sharing.channel import MAX_FDS, Credentials, close_fds, peer_credentials, transmit
from ..sharing.unread import pass_rights
from ..spec import format_size
from . import messages as m
from .accounts import Quotas
from .bind import Listener, group_id
from .catalogue import CLAIM_TIMEOUT, PART, Catalogue
from .connection import Connection
from .failures import failure
from .in_flight import InFlight
from .paths import find_path, prepare_directory
from .records import Session
from .service import Service
from .slow_close import INLINE, MOMENT, SlowCloser
from .snapshot import Ahead
from .turns import Turns
from .users import UserNames

__all__ = ["PATIENCE", "KeeperServer"]

PATIENCE = 30.0  # seconds that a peer may owe a greeting or leave what it asked for unread
_MAX_CONNECTIONS = 8_192
_KEPT_BACK = 32  # of these are kept back for the keeper's own user, for queries, removals and takeovers
_SPARE = 64  # descriptors kept back from everybody, where there are many: for accepting, refusing, handing over
_MANY = 16_384  # descriptors, with which there is room for messages of every user at once
_RESUMED = 16  # connections that were put aside and are read from again, before everybody else gets a turn
_LEAST = 192  # descriptors without which a keeper is none
_ACCEPT_AGAIN = 0.25  # seconds
_CLOSING = 5.0  # seconds for closing what is left at the end; the kernel closes the rest when the process is gone


class KeeperServer:
    """A keeper.

    Parameters
    ----------
    socket_path : str or None
        Where to listen; None is the default path of this user.
    mode : int or None
        Permissions of the socket: every user who may connect may attach. None is 0600 for a new one; one that is taken
        over from another keeper stays as it is.
    group : str or None
        Group of the socket, by name or number; None leaves it, too.
    max_bytes, max_entries : int or None
        Ceilings for all entries together; None is none.
    max_bytes_per_user, max_entries_per_user : int or None
        Ceilings for each user but the one who runs the keeper.
    patience : float
        Seconds that a peer may keep the keeper waiting before it is disconnected.
    claim_timeout : float
        Seconds after which the claim to publish a name passes to the next waiter.
    raises_limit : bool
        Whether to raise this process's limit of descriptors as far as it goes.
    directory_fd : int
        Borrowed: a descriptor of the socket's directory that holds its lock.
    hand_over : callable
        Gives everything to a successor that asks for it, as :func:`.takeover.hand_over` does; without, nobody can take
        over.
    """

    listener: Listener

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        mode: int | None = None,
        group: str | None = None,
        max_bytes: int | None = None,
        max_entries: int | None = None,
        max_bytes_per_user: int | None = None,
        max_entries_per_user: int | None = None,
        patience: float = PATIENCE,
        claim_timeout: float = CLAIM_TIMEOUT,
        raises_limit: bool = True,
        directory_fd: int = -1,
        hand_over: Callable[[KeeperServer, Connection, m.Takeover], None] | None = None,
    ) -> None:
        self.path, self._chosen = find_path(socket_path)
        self.mode = mode
        self.group = group
        self.gid = None if group is None else group_id(group)  # or UsageError, before anything is taken over
        self._directory_fd = directory_fd
        self._hand_over = hand_over
        self.patience = patience
        self.pid = os.getpid()
        self.now = time.monotonic
        self.started = self.now()
        limit = _raise_limit() if raises_limit else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.max_connections = min(_MAX_CONNECTIONS, limit // 3)
        self.kept_back = min(_KEPT_BACK, limit // 48)
        if limit < _LEAST:
            raise UnsupportedError(
                "a keeper",
                f"{_LEAST} descriptors at least",
                f"{limit} (RLIMIT_NOFILE)",
                f"ulimit -n {_LEAST}, better 1024 or more",
            )
        spare = min(_SPARE, max(16, limit // 32))
        # Kept back too, for descriptors of clients that take long to close: of each user as many as one message has.
        message = MAX_FDS if limit >= _MANY else min(32, limit // 32)
        slow = limit // 16 if limit >= _MANY else limit // 8
        self.ancillary = socket.CMSG_SPACE(message * 4)
        self.slow_closer = SlowCloser(slow, message, os.geteuid(), self._has_room_again)
        self._max_refused = spare // 2
        handles = limit - self.max_connections - spare - slow
        # In flight are at most as many descriptors of a user as RLIMIT_NOFILE says: one peer gets a small share.
        self.part = max(4, min(MAX_FDS, limit // 64))
        self.in_flight = InFlight(limit, is_own=self.is_own, now=self.now)
        self.catalogue = Catalogue(
            Quotas(max_bytes, max_entries, handles, max_bytes_per_user, max_entries_per_user, handles // 2),
            keeper_uid=os.geteuid(),
            nobody=_overflow_uid(),
            claim_timeout=claim_timeout,
            why_not=UserNames().why_not,
        )
        self.connections: dict[int, Connection] = {}
        self.pending: dict[Connection, None] = {}  # connected, and have not said hello
        self.lingering: dict[Connection, None] = {}  # closed, and what was sent may still be read
        self.ahead: dict[Connection, Ahead] = {}  # what went ahead to those who are about to take over
        self.by_user: dict[int, int] = {}  # connections, until their sockets are closed
        # By user, who sent descriptors before others of the same user were closed.
        self.aside: dict[int, dict[Connection, None]] = {}
        self._resuming: set[int] = set()  # users of those, whose turn to go on has been asked for
        self._refused = 0  # sockets of connections that were refused, until they are closed
        self.paused = False
        self.closing = False
        # Calls of which a predecessor has not done all, and leases that they give back; None: there was none.
        self.left_over: list[tuple[Connection, int, list[int]]] | None = None
        self.successor = False  # another process serves on: leave the path to it
        self._bound = False
        self.service = Service(self)
        self.handle = self.service.handle
        self.turns = Turns(self)
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # made by serve()
        self._watched: dict[Connection, None] = {}
        self._ticking = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._closer: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closer_thread: threading.Thread | None = None
        self.freeing: dict[int, int] = {}  # bytes by user that the closer's thread has not freed yet
        self._spare_fd = -1

    # -- from start to end ----------------------------------------------------------------------------------------
    def listen(self) -> None:
        """Bind the socket; :meth:`serve` does it otherwise. Raises what :class:`Listener` raises."""
        prepare_directory(self.path, self._chosen)
        mode = 0o600 if self.mode is None else self.mode
        self.listen_on(Listener(self.path, mode=mode, group=self.group, directory_fd=self._directory_fd))

    def listen_on(self, listener: Listener) -> None:
        """Serve on a socket that is there already."""
        self.listener = listener
        self._bound = True

    def serve(self, ready: Callable[[], None] | None = None, *, parent_fd: int = -1, signals: bool = True) -> None:
        """Serve until :meth:`stop`, or until another keeper has taken over.

        Parameters
        ----------
        ready : callable
            Called once clients can connect.
        parent_fd : int
            Borrowed; stop when it reads end of file: a pipe whose other end somebody holds as long as this keeper is
            wanted.
        signals : bool
            Stop at SIGTERM and SIGINT, and at SIGHUP where there is a terminal that can hang up; only in a process's
            main thread.
        """
        if not self._bound:
            self.listen()
        # Not asyncio.run(): there are no coroutines here, only descriptors that become ready.
        self.loop = asyncio.SelectorEventLoop(self.turns.selector)
        try:
            for number in _ending() if signals else ():
                self.loop.add_signal_handler(number, self.stop)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # our starter may have had it blocked, and so we
            if parent_fd >= 0:
                self.loop.add_reader(parent_fd, self._parent_gone, parent_fd)
            self._start()
            if ready is not None:
                ready()
            self.loop.run_forever()
        finally:
            if not self.successor:
                self.listener.unlink()
            self._shut_down()

    def stop(self) -> None:
        """Return from :meth:`serve`."""
        self.loop.stop()

    def _start(self) -> None:
        """Accept, read and write."""
        self._accepting()
        for connection in self.lingering:
            connection.has_read_all()
            self.watch_over(connection)
        for connection in [*self.pending, *self.connections.values()]:
            connection.has_read_all()  # one that was taken over has been sent we do not know how much
            if connection.queue:
                connection.writable()
            else:
                connection.resume()
            if not connection.closed and (connection.waiting_since is not None or connection.partials):
                self.watch_over(connection)
        if self.left_over is not None:
            self.service.go_on(self.left_over)
        self.schedule()

    def is_own(self, uid: int) -> bool:
        """Whether this is the user who runs the keeper, whom the ceilings for each user do not bind."""
        return uid == self.catalogue.accounts.keeper_uid

    @property
    def is_chosen(self) -> bool:
        """Whether somebody chose the path."""
        return self._chosen

    def replace_catalogue(self, catalogue: Catalogue) -> None:
        """Go on with the books of another keeper."""
        self.catalogue = self.service.catalogue = catalogue

    def close_everything(self) -> None:
        """Close every connection and all memory, and tell nobody."""
        # Nobody is told anything any more: a successor may be talking on these very sockets.
        self.paused = self.closing = True
        for connection in [*self.pending, *self.connections.values()]:
            connection.close()
        for connection in list(self.lingering):
            self._stop_lingering(connection, at_once=True)
        self.service.finish()
        for version in self.catalogue.all_versions():
            version.token.drop()

    def _shut_down(self) -> None:
        self.close_everything()
        self.listener.sock.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        self._closer.put(None)
        if self._closer_thread is not None:
            self._closer_thread.join(_CLOSING)
        self.loop.close()

    def _parent_gone(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(fd, 64):
                self.stop()

    def hand_over(self, connection: Connection, request: m.Takeover) -> None:
        """Let another process of the same user take over, if `hand_over` was given."""
        if self._hand_over is None:
            raise UnsupportedError(
                "taking over", "a keeper that was started by `vram keep`", f"one inside of pid {self.pid}"
            )
        self._hand_over(self, connection, request)

    # -- connections ----------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        if self.paused:
            return
        if self.turns.may_accept(self._accept_in_turn):
            self._accept_one()
        else:
            self.loop.remove_reader(self.listener.sock)

    def _accept_in_turn(self) -> None:
        self._accepting()
        self._accept_one(in_turn=True)

    def _accept_one(self, *, in_turn: bool = False) -> None:
        # Before Linux 6.16 those who are refused may have sent descriptors, which are closed elsewhere.
        if self._refused >= self._max_refused or self._spare_fd < 0:
            self.loop.remove_reader(self.listener.sock)
            self.loop.call_later(_ACCEPT_AGAIN, self._accepting)
            return
        with self.turns.accepting(in_turn=in_turn) as charge:
            try:
                sock, _ = self.listener.sock.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._refuse_without_descriptors()
                    return
                if error.errno in (errno.ENOMEM, errno.ENOBUFS):
                    return
                raise
            credentials = peer_credentials(sock)
            charge(credentials.uid)
            self._greet(sock, credentials)

    def _accepting(self) -> None:
        if self.paused:  # a timer of before
            return
        self._keep_spare()
        self.loop.add_reader(self.listener.sock, self._accept)

    def _keep_spare(self) -> None:
        if self._spare_fd < 0:
            with contextlib.suppress(OSError):
                self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _greet(self, sock: socket.socket, credentials: Credentials) -> None:
        sock.setblocking(False)
        total, most = sum(self.by_user.values()), self.max_connections
        own = self.is_own(credentials.uid)
        if not own and (total >= most - self.kept_back or self.by_user.get(credentials.uid, 0) >= most // 2):
            self._refuse(
                sock,
                f"the keeper serves {total} connections already ({most} at most, half of them for one user, "
                f"{self.kept_back} for its own)",
            )
            return
        if total >= most:
            self._refuse(sock, f"the keeper serves {total} connections already, as many as it may have")
            return
        connection = Connection(self, sock, credentials)
        self.add(connection)
        self.pending[connection] = None
        connection.owes()
        connection.resume()

    def add(self, connection: Connection) -> None:
        """Count a connection, until its socket is closed."""
        uid = connection.credentials.uid
        self.by_user[uid] = self.by_user.get(uid, 0) + 1

    def _refuse_without_descriptors(self) -> None:
        """At the limit, accept with the one descriptor kept for it: to be told is better than to hang."""
        os.close(self._spare_fd)
        self._spare_fd = -1
        try:
            with contextlib.suppress(OSError):
                sock, _ = self.listener.sock.accept()
                self._refuse(sock, "the keeper has no descriptors left for another connection (RLIMIT_NOFILE)")
        finally:
            self._keep_spare()

    def _refuse(self, sock: socket.socket, why: str) -> None:
        try:
            with contextlib.suppress(OSError):
                transmit(sock, m.encode(failure(0, QuotaError(why))), (), socket.MSG_DONTWAIT)
        finally:
            if not self.slow_closer.close_socket(sock, peer_credentials(sock).uid, self._refused_closed):
                self._refused += 1

    def _refused_closed(self) -> None:
        def count() -> None:
            self._refused -= 1

        self._call(count)

    def _call(self, callback: Callable[[], None]) -> None:
        """Have a function called in the loop's thread, from another one."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: it does not matter any more
            self.loop.call_soon_threadsafe(callback)

    def welcome(self, connection: Connection, session: Session) -> None:
        """A connection has said hello: from now on it is known by its session."""
        del self.pending[connection]
        if self.service.takes_descriptors:
            pass_rights(connection.sock, True)
        connection.session = session
        self.connections[session.id] = connection

    def gone(self, connection: Connection) -> None:
        """A connection was closed: end its session and all that depends on it."""
        self.pending.pop(connection, None)
        self._watched.pop(connection, None)
        self.ahead.pop(connection, None)
        if connection.in_flight or connection.unread:
            self.linger(connection)
        elif not connection.is_open:
            self._left(connection)
        if connection.session is not None:
            self.connections.pop(connection.session.id, None)
            self.service.leave(connection.session)

    def linger(self, connection: Connection) -> None:
        """Keep the socket of a closed connection until the peer has read everything, or has closed its own."""
        self.lingering[connection] = None
        self.watch_over(connection)

    def socket_closed(self, connection: Connection) -> None:
        """The socket of a connection, with the unread messages in it, was closed by another thread."""
        self._call(partial(self._left, connection))

    def _left(self, connection: Connection) -> None:
        """From now on its user has one connection less."""
        uid = connection.credentials.uid
        self.by_user[uid] -= 1
        if not self.by_user[uid]:
            del self.by_user[uid]
            self.in_flight.forget(uid)

    def _stop_lingering(self, connection: Connection, *, at_once: bool = False) -> None:
        if connection.stop_lingering(at_once=at_once):
            del self.lingering[connection]
            self._watched.pop(connection, None)
            if not connection.is_open:
                self._left(connection)

    # -- descriptors of clients -------------------------------------------------------------------------------------
    def put_aside(self, connection: Connection) -> None:
        """Read nothing more from a connection until descriptors that its user sent before are closed."""
        connection.park(self.now())
        self.aside.setdefault(connection.credentials.uid, {})[connection] = None
        self._resume_aside()  # they may be by now

    def no_longer_aside(self, connection: Connection) -> None:
        """It is read from again, or closed."""
        uid = connection.credentials.uid
        waiting = self.aside.get(uid, {})
        waiting.pop(connection, None)
        if not waiting:
            self.aside.pop(uid, None)

    def _has_room_again(self) -> None:
        self._call(self._resume_aside)

    def _resume_aside(self) -> None:
        if self.paused or not self.aside:
            return
        self.slow_closer.is_awaited = True  # before the question
        for uid in self.aside.keys() - self._resuming:
            self._resume_later(uid)

    def _resume_later(self, uid: int) -> None:
        """Read again from some of a user's connections, when it is that user's turn, as long as there is room."""
        if self.slow_closer.takes(uid):
            self._resuming.add(uid)
            self.turns.later(uid, partial(self._resume_some, uid))

    def _resume_some(self, uid: int) -> None:
        self._resuming.discard(uid)
        for connection in list(islice(self.aside.get(uid, ()), _RESUMED)):
            self.no_longer_aside(connection)
            connection.unpark(self.now())
        if uid in self.aside:
            self._resume_later(uid)

    # -- time -----------------------------------------------------------------------------------------------------
    def schedule(self) -> None:
        """Have the catalogue's next deadline met."""
        due = self.catalogue.next_deadline
        if due is None or due >= self._timer_at or self.paused:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due
        self._timer = self.loop.call_later(max(0.0, due - self.now()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        self._timer_at = float("inf")
        if not self.paused:
            self.service.carry_out(self.catalogue.expire(self.now(), PART))
            self.schedule()

    def watch_over(self, connection: Connection) -> None:
        """Disconnect this peer if it goes on owing something; end publications of which nothing more comes."""
        self._watched[connection] = None
        if not self._ticking:
            self._ticking = True
            self.loop.call_later(min(1.0, self.patience / 4), self._tick)

    def _tick(self) -> None:
        self._ticking = False
        if self.paused:
            return
        now = self.now()
        for connection in list(self._watched):
            if connection.closed:  # it lingers, or was closed by the end of one before it
                if connection in self.lingering:
                    self._stop_lingering(connection)
                continue
            if connection.overdue(now, self.patience):
                connection.close()
                continue
            waiting = () if connection.parked is not None else connection.partials.values()
            for late in [one for one in waiting if now - one.since > self.patience]:
                self.service.give_up(connection, late)
            if connection.waiting_since is None and not connection.partials:
                self._watched.pop(connection, None)
        if self._watched:
            self._ticking = True
            self.loop.call_later(min(1.0, self.patience / 4), self._tick)

    # -- memory ---------------------------------------------------------------------------------------------------
    def dispose(self, fds: list[int], nbytes: int, *, uid: int | None = None) -> None:
        """Close descriptors that are not used any more: big ones, and slow ones, in another thread.

        Parameters
        ----------
        nbytes : int
            Bytes of memory behind them, as they were counted.
        uid : int, optional
            The user whose memory it was: until it is freed, it is in :attr:`freeing`.
        """
        if nbytes <= INLINE:
            rest = iter(fds)
            end = time.monotonic() + MOMENT
            for fd in rest:
                close_fds([fd])  # goes through the POSIX locks of the file, which may be thousands
                if time.monotonic() > end:
                    break
            if left := list(rest):
                self._work(partial(close_fds, left))
            return
        close = partial(close_fds, fds)
        if uid is None:
            self._work(close)
            return
        self.freeing[uid] = self.freeing.get(uid, 0) + nbytes
        self._work(partial(self._close_and_tell, close, uid, nbytes))

    def _close_and_tell(self, close: Callable[[], None], uid: int, nbytes: int) -> None:
        close()
        self._call(partial(self._is_freed, uid, nbytes))

    def _is_freed(self, uid: int, nbytes: int) -> None:
        self.freeing[uid] -= nbytes
        if not self.freeing[uid]:
            del self.freeing[uid]

    def check_freeing(self, uid: int) -> None:
        """Raise QuotaError while more memory that a user removed waits to be freed than that user may have.

        It does not count any more; but a client that removes faster than one thread frees would hold any amount.
        """
        quotas = self.catalogue.accounts.quotas
        ceilings = [quotas.max_bytes, None if self.is_own(uid) else quotas.user_bytes]
        waits = self.freeing.get(uid, 0)
        for most in ceilings:
            if most is not None and waits > most:
                raise QuotaError(
                    f"{format_size(waits)} that uid {uid} had here are still being freed, more than the "
                    f"{format_size(most)} that it may have; try again when they are"
                )

    def _work(self, task: Callable[[], None]) -> None:
        """Run a task that takes as long as there is memory to free: in one other thread, in order."""
        if self._closer_thread is None:
            self._closer_thread = threading.Thread(target=self._work_in_background, name="closer", daemon=True)
            self._closer_thread.start()
        self._closer.put(task)

    def _work_in_background(self) -> None:
        while (task := self._closer.get()) is not None:
            task()


def _ending() -> tuple[signal.Signals, ...]:
    """Return the signals that end a keeper, and ignore SIGHUP where it does not say that a terminal is gone.

    A process that was started with SIGHUP ignored (nohup) goes on ignoring it. One without a terminal (setsid, a
    service, a private keeper) has none to lose, and many programs take the signal as "read your configuration again".
    """
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        try:
            os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
            return signal.SIGTERM, signal.SIGINT, signal.SIGHUP
        except OSError:  # ENXIO: no controlling terminal
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return signal.SIGTERM, signal.SIGINT


def _raise_limit() -> int:
    """Raise the number of descriptors this process may have as far as it goes, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return wanted if soft == resource.RLIM_INFINITY else min(soft, 1 << 20)


def _overflow_uid() -> int:
    try:
        with open("/proc/sys/kernel/overflowuid", "rb") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65_534
