"""The keeper's process: a listening socket, a loop, and the descriptors of everybody's memory.

One thread does everything but closing: memory takes a second for 8 GiB, and what strangers sent as long as they please.
That is done in threads of :mod:`.slow_close`; and the database of users is asked in threads of :mod:`.lookups`.
Per message there is one ``recvmsg``, the catalogue's dictionaries, and one ``sendmsg``; no coroutines, no tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from itertools import islice

from ..errors import QuotaError, UnsupportedError
from ..sharing.channel import MAX_FDS, Credentials, peer_credentials, transmit
from ..sharing.unread import pass_rights
from ..spec import format_count, format_size
from . import event_log
from . import messages as m
from .bind import Listener, group_id
from .catalogue import CLAIM_TIMEOUT, Catalogue
from .connection import Connection, Partial
from .ending import EndingSignals
from .failures import failure
from .in_flight import InFlight
from .limits import Quotas, limit_called, over
from .lookups import Lookups
from .paths import find_path, prepare_directory
from .records import Session
from .service import Service
from .slow_close import SlowCloser
from .snapshot import Ahead
from .turns import Turns
from .users import UserNames

__all__ = ["PATIENCE", "KeeperServer"]

PATIENCE = 30.0  # seconds that a peer may owe a greeting or leave what it asked for unread
_CONNECTIONS = limit_called("connections")
_MAX_CONNECTIONS = 8_192
_KEPT_BACK = 32  # of these are kept back for the keeper's own user, for queries, removals and takeovers
_SPARE = 64  # descriptors kept back from everybody, where there are many: for accepting, refusing, handing over
_MANY = 16_384  # descriptors, with which a smaller part of them is room enough for what takes long to close
_SENT_AT_ONCE = 32  # descriptors that a client sends in one message
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
    quotas : Quotas, optional
        Ceilings, for all together and for each user but the one who runs the keeper.
    patience : float
        Seconds that a peer may keep the keeper waiting before it is disconnected.
    claim_timeout : float
        Seconds after which the claim to publish a name passes to the next waiter.
    raises_limit : bool
        Whether to raise this process's limit of descriptors as far as it goes.
    directory_fd : int
        Borrowed: a descriptor of the socket's directory that holds its lock.
    names : UserNames, optional
        Whose names under ``~name/`` are; by default those of this system.
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
        quotas: Quotas | None = None,
        patience: float = PATIENCE,
        claim_timeout: float = CLAIM_TIMEOUT,
        raises_limit: bool = True,
        directory_fd: int = -1,
        names: UserNames | None = None,
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
        # Kept back too, for descriptors of clients that take long to close: of each user as many as one message has and
        # a few. From 4,096 on there is room for those of eleven users and another message, and some.
        message = min(MAX_FDS, max(limit // 256, min(_SENT_AT_ONCE, limit // 32)))
        slow = limit // 16 if limit >= _MANY else limit // 8
        self.ancillary = socket.CMSG_SPACE(message * 4)
        self.slow_closer = SlowCloser(slow, message, os.geteuid(), self._has_room_again)
        self._max_refused = spare // 2
        self.max_handles = limit - self.max_connections - spare - slow
        # In flight are at most as many descriptors of a user as RLIMIT_NOFILE says: one peer gets a small share.
        self.part = max(4, min(MAX_FDS, limit // 64))
        self.in_flight = InFlight(limit, is_own=self.is_own, now=self.now)
        names = names or UserNames()
        self.lookups = Lookups(self, names)
        self.catalogue = Catalogue(
            keeper_uid=os.geteuid(),
            nobody=_overflow_uid(),
            claim_timeout=claim_timeout,
            why_not=names.why_not,
        )
        self.quotas = quotas or Quotas()  # as they were chosen; this process may have less room than that
        self.limit(self.quotas)
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
        self._late: dict[int, dict[Connection, None]] = {}  # by user, those whose end waits for that user's turn
        self._ticking = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
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

    def serve(
        self,
        ready: Callable[[], None] | None = None,
        *,
        parent_fd: int = -1,
        signals: bool = True,
        ending: Callable[[], None] | None = None,
    ) -> None:
        """Serve until :meth:`stop`, or until another keeper has taken over.

        Parameters
        ----------
        ready : callable
            Called once clients can connect.
        parent_fd : int
            Borrowed; stop when it reads end of file: a pipe whose other end somebody holds as long as this keeper is
            wanted.
        signals : bool
            Stop at SIGTERM and SIGINT, and at SIGHUP where there is a terminal that can hang up, and ignore them from
            then on; only in the main thread of a process that ends with this.
        ending : callable
            Called once nobody is served any more, before what is left is closed; not if another keeper took over.
        """
        if not self._bound:
            self.listen()
        # Not asyncio.run(): there are no coroutines here, only descriptors that become ready.
        self.loop = asyncio.SelectorEventLoop(self.turns.selector)
        heard: EndingSignals | None = None
        try:
            if signals:
                heard = EndingSignals(self.loop, self.stop)
            if parent_fd >= 0:
                self.loop.add_reader(parent_fd, self._parent_gone, parent_fd)
            self._start()
            if ready is not None:
                ready()
            self.loop.run_forever()
        finally:
            if heard is not None:
                heard.ignore()
            if not self.successor and ending is not None:
                ending()
            if self.unlinks:
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

    @property
    def main_pid(self) -> int:
        """The process that a service manager is to watch."""
        return self.pid

    @property
    def unlinks(self) -> bool:
        """Whether the socket's path goes with this process."""
        return not self.successor

    def limit(self, quotas: Quotas) -> None:
        """Have other ceilings from now on. What is there already stays, also if it is more."""
        self.quotas = quotas
        self.catalogue.accounts.quotas = quotas.within(self.max_connections, self.max_handles)
        self.in_flight.limit(quotas)

    def replace_catalogue(self, catalogue: Catalogue) -> None:
        """Go on with the books of another keeper."""
        self.catalogue = catalogue
        self.service.turn_to(catalogue)

    def close_everything(self) -> None:
        """Close every connection and all memory, and tell nobody."""
        # Nobody is told anything any more: a successor may be talking on these very sockets.
        self.paused = self.closing = True
        for connection in [*self.pending, *self.connections.values()]:
            connection.close()
        for connection in list(self.lingering):
            self._stop_lingering(connection, at_once=True)
        self.lookups.finish(0.0)
        self.service.finish()
        for version in self.catalogue.all_versions():
            version.token.drop()
        for lease in self.catalogue.leases.values():
            if lease.page is not None:
                lease.page.drop()

    def _shut_down(self) -> None:
        self.close_everything()
        self.listener.sock.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        self.slow_closer.finish(_CLOSING)
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

    # -- takeovers: what each side's next keeper has to know, where one follows (see :mod:`.survival`) ----------------
    def giving(self, fd: int) -> None:
        """The process at the other end of a connection is about to be given everything."""

    def leaving(self, leaves: bool) -> None:
        """From here on it may serve; or it does not, and this keeper serves on."""

    def taking(self, fd: int) -> None:
        """This process was given everything over a connection, at whose other end nobody serves any more."""

    def taken(self) -> None:
        """That was told, and this process serves."""

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
        refusal = self._no_connection(credentials.uid)
        if refusal is not None:
            self._refuse(sock, refusal)
            return
        connection = Connection(self, sock, credentials)
        self.add(connection)
        self.pending[connection] = None
        connection.owes()
        connection.resume()

    def _no_connection(self, uid: int) -> QuotaError | None:
        """Say why a user may not have another connection, if it may not."""
        quotas = self.quotas.within(self.max_connections, self.max_handles)
        most, of_user = quotas.max_connections or 0, quotas.user_connections or 0
        total, used = sum(self.by_user.values()), self.by_user.get(uid, 0)
        more = f" (half of all are for one user unless otherwise chosen, and {self.kept_back} for the keeper's own)"
        if self.is_own(uid):  # who has to get in to raise a ceiling
            most = min(most + self.kept_back, self.max_connections)
        else:
            most = min(most, self.max_connections - self.kept_back)
        if total >= most:
            return over(_CONNECTIONS, "the keeper", most, total, 1, of_user=False, more=more)
        if used >= of_user and not self.is_own(uid):
            return over(_CONNECTIONS, f"uid {uid}", of_user, used, 1, of_user=True, more=more)
        return None

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
                why = "the keeper has no descriptors left for another connection (RLIMIT_NOFILE)"
                self._refuse(sock, QuotaError(why))
        finally:
            self._keep_spare()

    def _refuse(self, sock: socket.socket, why: QuotaError) -> None:
        event_log.refused(peer_credentials(sock), str(why))
        try:
            with contextlib.suppress(OSError):
                transmit(sock, m.encode(failure(0, why)), (), socket.MSG_DONTWAIT)
        finally:
            if not self.slow_closer.close_socket(sock, peer_credentials(sock).uid, self._refused_closed):
                self._refused += 1

    def _refused_closed(self) -> None:
        def count() -> None:
            self._refused -= 1

        self.call(count)

    def call(self, callback: Callable[[], None]) -> None:
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
        event_log.connected(connection)

    def gone(self, connection: Connection) -> None:
        """A connection was closed: end its session and all that depends on it."""
        self.pending.pop(connection, None)
        self._watched.pop(connection, None)
        self.ahead.pop(connection, None)
        if self.service.settling is not None:
            self.service.settling.waiting.pop(connection, None)
        if connection.in_flight or connection.unread:
            self.linger(connection)
        elif not connection.is_open:
            self._left(connection)
        if connection.session is not None:
            self.connections.pop(connection.session.id, None)
            event_log.disconnected(connection)
            self.service.leave(connection.session)

    def linger(self, connection: Connection) -> None:
        """Keep the socket of a closed connection until the peer has read everything, or has closed its own."""
        self.lingering[connection] = None
        self.watch_over(connection)

    def socket_closed(self, connection: Connection) -> None:
        """The socket of a connection, with the unread messages in it, was closed by another thread."""
        self.call(partial(self._left, connection))

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
        self.call(self._resume_aside)

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
            self.service.expire()
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
        # One user may have thousands that are late at once. They are found here, and end when it is that user's turn.
        looked_at: dict[int, int] = {}
        with self.turns.shared(looked_at):
            for connection in list(self._watched):
                uid = connection.credentials.uid
                looked_at[uid] = looked_at.get(uid, 0) + 1
                if self._is_late(connection):
                    self._end_later(connection)
                    continue
                if connection.closed or connection.waiting_since is not None or connection.partials:
                    continue
                self._watched.pop(connection, None)
        if self._watched:
            self._ticking = True
            self.loop.call_later(min(1.0, self.patience / 4), self._tick)

    def _is_late(self, connection: Connection) -> bool:
        """Whether there is something to end of a connection: all of it, publications, or that it lingers."""
        if connection.closed:
            return connection in self.lingering and connection.has_read_all()
        return connection.overdue(self.now(), self.patience) or bool(self._late_partials(connection))

    def _late_partials(self, connection: Connection) -> list[Partial]:
        waiting = () if connection.parked is not None else connection.partials.values()
        return [one for one in waiting if self.now() - one.since > self.patience]

    def _end_later(self, connection: Connection) -> None:
        uid = connection.credentials.uid
        if uid not in self._late:
            self.turns.later(uid, partial(self._end_next, uid))
        self._late.setdefault(uid, {})[connection] = None

    def _end_next(self, uid: int) -> None:
        """End what is late of one connection: it may not be any more."""
        connection = next(iter(self._late[uid]))
        del self._late[uid][connection]
        if connection.closed:
            if connection in self.lingering:
                self._stop_lingering(connection)
        elif connection.overdue(self.now(), self.patience):
            event_log.overdue(connection)
            connection.close()
        else:
            for late in self._late_partials(connection):
                self.service.give_up(connection, late)
        if self._late[uid]:
            self.turns.later(uid, partial(self._end_next, uid))
        else:
            del self._late[uid]

    # -- memory ---------------------------------------------------------------------------------------------------
    def dispose(self, fds: list[int], nbytes: int, uid: int) -> None:
        """Close descriptors that are not used any more.

        Parameters
        ----------
        nbytes : int
            Bytes of memory behind them, as they were counted.
        uid : int
            The user who sent them, whom others do not wait for, and who may not have as many more until they are
            closed.
        """
        self.slow_closer.free(fds, nbytes, uid)

    def check_freeing(self, uid: int, handles: int, nbytes: int) -> None:
        """Raise QuotaError while what a user had published, and is not freed yet, leaves no room for so much more.

        It is on the books no more; but a client that removes faster than it is freed would hold any amount, and so
        would one whose readers let go faster. Of memory there may be as much once more as may be held, with what is
        asked for. Descriptors count as if nothing had been removed.
        """
        accounts, closer, own = self.catalogue.accounts, self.slow_closer, self.is_own(uid)
        quotas = accounts.quotas
        for most_bytes, most_handles, held, waits, whose in (
            (quotas.max_bytes, quotas.max_descriptors, accounts.total, closer.total, "the keeper"),
            (
                None if own else quotas.user_bytes,
                None if own else quotas.user_descriptors,
                accounts.of(uid),
                closer.of(uid),
                f"uid {uid}",
            ),
        ):
            would = held.nbytes + waits.nbytes + nbytes
            if most_bytes is not None and nbytes and waits.nbytes and would > 2 * most_bytes:
                raise QuotaError(
                    f"no room for {format_size(nbytes)} more: {whose} may hold {format_size(most_bytes)}, and as much "
                    f"that is not held any more until it is freed; it holds {format_size(held.nbytes)}, and "
                    f"{format_size(waits.nbytes)} are still being freed; try again when they are"
                )
            if most_handles is not None and waits.handles and held.handles + waits.handles + handles > most_handles:
                raise QuotaError(
                    f"no room for {format_count(handles, 'descriptor')} more: {whose} may hold {most_handles}, holds "
                    f"{held.handles}, and {waits.handles} that were removed are still being closed; try again when "
                    f"they are"
                )


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
