"""The keeper's process: a listening socket, a loop, and the descriptors of everybody's memory.

One thread does everything but closing, for which there are threads.
Per message there is one ``recvmsg``, the catalogue's dictionaries, and one ``sendmsg``; no coroutines, no tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..errors import QuotaError, UnsupportedError
from ..open_files import close_fds
from ..sharing.channel import MAX_FDS, peer_credentials, transmit
from . import event_log
from . import messages as m
from .bind import Listener, group_id
from .catalogue import Catalogue
from .connection import Connection
from .failures import failure
from .limits import Quotas, limit_called, over
from .paths import find_path, prepare_directory
from .records import Session
from .rules import IDLE
from .service import Service

if TYPE_CHECKING:
    from .disk import Disk
    from .guarded import Guard

_CONNECTIONS = limit_called("connections")
_MAX_CONNECTIONS = 8_192
_KEPT_BACK = 32  # of these are kept back for the keeper's own user, for queries, removals and restarts
_SPARE = 64  # descriptors kept back from everybody, where there are many: for accepting, refusing, handing over
LEAST = 192  # descriptors without which a keeper is none
_TRY_AGAIN = 0.25  # seconds
ENDING = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
_CLOSERS = 8  # threads that close: the last descriptor of memory frees it, a second for 8 GiB


class KeeperServer:
    """A keeper. `mode` and `group` None are 0600 and no change, or those of the keeper before.
    `patience` is in seconds."""

    listener: Listener

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        mode: int | None = None,
        group: str | None = None,
        quotas: Quotas | None = None,
        patience: float = IDLE,
        raises_limit: bool = True,
        guard: Guard | None = None,
    ) -> None:
        self.guard = guard
        self.is_followed = False  # another keeper goes on with everything when this process ends
        if guard is not None:
            guard.server = self
        self.path, self._chosen = find_path(socket_path)
        self.mode = mode
        self.group = group
        self.gid = None if group is None else group_id(group)
        self.patience = patience
        self.pid = os.getpid()
        self.now = time.monotonic
        self.started = self.now()
        limit = _raise_limit() if raises_limit else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.max_connections = min(_MAX_CONNECTIONS, limit // 3)
        self.kept_back = min(_KEPT_BACK, limit // 48)
        if limit < LEAST:
            raise UnsupportedError(
                "a keeper",
                f"{LEAST} descriptors at least",
                f"{limit} (RLIMIT_NOFILE)",
                f"ulimit -n {LEAST}, better 1024 or more",
            )
        self.closer = ThreadPoolExecutor(_CLOSERS, "vram: closing")
        self.max_handles = most_handles(limit)
        # In flight are at most as many descriptors of a user as RLIMIT_NOFILE says: one peer gets a small share.
        self.part = max(4, min(MAX_FDS, limit // 64))
        self.catalogue = Catalogue(keeper_uid=os.geteuid())
        self.limit(quotas or Quotas())
        self.connections: dict[int, Connection] = {}
        self.pending: dict[Connection, None] = {}  # connected, and have not said hello
        self.by_user = Counter[int]()  # connections
        self.paused = False  # from when another keeper is handed everything, or all is closed: nobody is served
        self.options: list[str] = []  # of the command line, which hold after a restart, too
        self.lost_rows = 0  # of the state of the keeper before, which could not be read
        # Called before a process restarts this keeper; raises if that is not to be.
        self.about_to_restart: Callable[[int], None] = self._stays
        self.disk: Disk | None = None
        self.service = Service(self)
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # made by serve()
        self._watched: dict[Connection, None] = {}
        self._look_at = float("inf")  # when those are looked at next
        self._timer: asyncio.TimerHandle | None = None

    # -- from start to end ----------------------------------------------------------------------------------------
    def listen(self) -> None:
        """Bind the socket; :meth:`serve` does it otherwise. Raises what :class:`Listener` raises."""
        prepare_directory(self.path, self._chosen)
        mode = 0o600 if self.mode is None else self.mode
        self.listener = Listener(self.path, mode=mode, group=self.group)

    @property
    def is_bound(self) -> bool:
        """Whether there is a listener."""
        return hasattr(self, "listener")

    def serve(
        self,
        ready: Callable[[], None] | None = None,
        *,
        parent_fd: int = -1,
        signals: bool = True,
        ending: Callable[[], None] | None = None,
    ) -> None:
        """Serve until :meth:`stop`, or end of file at `parent_fd` (lent). `signals` needs the main thread.
        `ready` is called once clients can connect, `ending` when no client is served, unless it is followed."""
        if not self.is_bound:
            self.listen()
        if self.guard is not None:
            self.guard.begin()
            self.is_followed = True
        # Not asyncio.run(): there are no coroutines here, only descriptors that become ready.
        self.loop = asyncio.SelectorEventLoop()
        try:
            if signals:
                self._hear_signals()
            if parent_fd >= 0:
                self.loop.add_reader(parent_fd, self._parent_gone, parent_fd)
            if self.guard is not None:
                self.guard.greet_again()
            self._accepting()
            self.schedule()
            if self.disk is not None:
                self.disk.begin(ready or (lambda: None))
            elif ready is not None:
                ready()
            if self.guard is not None:
                self.guard.watch()
            self.loop.run_forever()
        finally:
            if not self.is_followed:
                if ending is not None:
                    ending()
                self.listener.unlink()
            self._shut_down()

    def _hear_signals(self) -> None:
        """Have a thread wait for the signals that end this process, which are blocked in all threads to its very end.
        A service manager may tell every process of a service once more: none of them can kill this one as it closes,
        and have it end with the status of a failure."""
        numbers, loop = _ending(), self.loop
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

        def hear() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                while signal.sigwait(numbers):
                    loop.call_soon_threadsafe(self.stop)

        try:
            threading.Thread(target=hear, name="vram: signals", daemon=True).start()
        except RuntimeError:  # there can be no thread now, and what is kept must not be lost for that
            loop.call_later(_TRY_AGAIN, self._hear_signals)

    def stop(self) -> None:
        """Return from :meth:`serve`, and nobody follows; the first call is heard once all is on disk that is to be."""
        if self.disk is not None and self.disk.finish(self.stop):
            return
        self.is_followed = False
        if self.guard is not None:
            self.guard.link.end()
        self.loop.stop()

    def is_own(self, uid: int) -> bool:
        """Whether this is the user who runs the keeper, whom the ceilings for each user do not bind."""
        return uid == self.catalogue.accounts.keeper_uid

    def limit(self, quotas: Quotas) -> None:
        """Change the quotas, within what this process has room for. Entries that exceed the new ones stay."""
        self.catalogue.accounts.quotas = quotas.within(self.max_connections, self.max_handles)

    def _shut_down(self) -> None:
        """Close every connection and all memory, and tell nobody, unless another keeper goes on with them."""
        if not self.is_followed:
            self.paused = True
            for connection in [*self.pending, *self.connections.values()]:
                connection.close()
            pages = [lease.page for lease in self.catalogue.leases.values() if lease.page is not None]
            for held in [*(version.token for version in self.catalogue.versions.values()), *pages]:
                held.drop()
        self.listener.sock.close()
        self.loop.close()
        self.closer.shutdown()

    def _parent_gone(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(fd, 64):
                self.loop.remove_reader(fd)  # it would be read again and again
                self.stop()

    def _stays(self, pid: int) -> None:
        raise UnsupportedError(
            "a planned restart",
            "a keeper with a guardian",
            f"pid {self.pid}, whose entries end with it (--ephemeral)",
            "Stop it, and start one without --ephemeral",
        )

    def hand_over(self, fd: int) -> None:
        """Serve no more, have the guardian give everything to the one at the other end of `fd`, and end."""
        self.paused = True
        self.flush()
        if self.guard is not None:
            self.guard.link.hand_to(fd)
        self.loop.stop()

    # -- what changes, where it is written down -------------------------------------------------------------------
    def flush(self) -> None:
        """Write down what changed, before anybody hears of it."""
        if self.guard is not None:
            self.guard.flush()
        else:
            self.take_note()
            self.catalogue.changed.clear()

    def take_note(self) -> None:
        """Have what changed saved to disk as well, if entries are."""
        if self.disk is not None:
            self.disk.note(self.catalogue.changed)

    def did(self, session: Session, call: int, version: int = 0) -> None:
        """Note the outcome of a call that is not to be done twice."""
        if self.guard is not None:
            self.guard.did(session, call, version)

    # -- connections ----------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        if self.paused:
            return
        try:
            sock, _ = self.listener.sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.loop.remove_reader(self.listener.sock)
                self.loop.call_later(_TRY_AGAIN, self._accepting)
            elif error.errno not in (errno.EAGAIN, errno.ECONNABORTED, errno.ENOMEM, errno.ENOBUFS):
                raise
            return
        refusal = self._no_connection(peer_credentials(sock).uid)
        if refusal is not None:
            self._refuse(sock, refusal)
            return
        connection = self.add(sock)
        connection.owes()
        connection.resume()

    def _accepting(self) -> None:
        if not self.paused:  # a timer of before
            self.loop.add_reader(self.listener.sock, self._accept)

    def _refuse(self, sock: socket.socket, why: QuotaError) -> None:
        event_log.say("vram.client.refused", logging.WARNING, peer_credentials(sock), why)
        with sock, contextlib.suppress(OSError):
            transmit(sock, m.encode(failure(0, why)), (), socket.MSG_DONTWAIT)

    def _no_connection(self, uid: int) -> QuotaError | None:
        """Say why a user may not have another connection, if it may not."""
        quotas = self.catalogue.accounts.quotas
        most, of_user = quotas.max_connections or 0, quotas.user_connections or 0
        total, used = self.by_user.total(), self.by_user[uid]
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

    def add(self, sock: socket.socket) -> Connection:
        """Return a connection, which has not said hello, and is counted until its socket is closed."""
        sock.setblocking(False)
        connection = Connection(self, sock, peer_credentials(sock))
        self.by_user[connection.credentials.uid] += 1
        self.pending[connection] = None
        return connection

    def introduce(self, connection: Connection, session: Session) -> None:
        """Know a connection by its session from now on."""
        del self.pending[connection]
        connection.session = session
        self.connections[session.id] = connection

    def welcome(self, connection: Connection, session: Session) -> None:
        """A connection has said hello."""
        self.introduce(connection, session)
        if self.guard is not None:
            self.guard.welcome(connection, session)
        event_log.say("vram.client.connected", logging.DEBUG, connection)

    def gone(self, connection: Connection) -> None:
        """A connection was closed: end its session and all that depends on it."""
        self.pending.pop(connection, None)
        self._watched.pop(connection, None)
        self.by_user -= Counter([connection.credentials.uid])  # users without a connection are left out
        if connection.session is not None:
            self.connections.pop(connection.session.id, None)
            event_log.say("vram.client.disconnected", logging.DEBUG, connection)
            self.service.leave(connection.session)
            if self.guard is not None and not self.paused:
                self.guard.forget(connection.session.peer, 1)

    # -- time -----------------------------------------------------------------------------------------------------
    def schedule(self) -> None:
        """Have the next deadline met: of the catalogue, or of a connection that owes something."""
        due = self.catalogue.next_deadline
        due = self._look_at if due is None else min(due, self._look_at)
        if self.paused or due == float("inf"):
            return
        if self._timer is not None:
            if self._timer.when() <= due:  # the loop's clock is the same
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(due, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self.paused:
            return
        self.service.carry_out(self.catalogue.expire(self.now()))
        self.flush()
        if self._look_at <= self.now():
            self._look()
        self.schedule()

    def watch_over(self, connection: Connection) -> None:
        """Disconnect this peer if it goes on owing something; end publications of which nothing more comes."""
        self._watched[connection] = None
        if self._look_at == float("inf"):
            self._look_at = self.now() + min(1.0, self.patience / 4)
            self.schedule()

    def _look(self) -> None:
        watched, self._watched, self._look_at, now = self._watched, {}, float("inf"), self.now()
        for connection in watched:
            if connection.overdue(now, self.patience):
                event_log.say("vram.client.overdue", logging.WARNING, connection)
                connection.close()
            for late in [one for one in connection.partials.values() if now - one.since > self.patience]:
                self.service.give_up(connection, late)
            if not connection.closed and (connection.waiting_since is not None or connection.partials):
                self.watch_over(connection)

    # -- memory ---------------------------------------------------------------------------------------------------
    def dispose(self, fds: list[int], number: int = 0) -> None:
        """Close descriptors of memory, which a guardian has from `number` on (0: it has not)."""
        if self.guard is not None and number:
            self.guard.forget(number, len(fds))
        self.close_soon(fds)

    def close_soon(self, fds: Sequence[int]) -> None:
        """Close descriptors in another thread."""
        if fds:
            self.closer.submit(close_fds, list(fds))


def most_handles(limit: int) -> int:
    """Return how many descriptors of memory are kept by a process that may have so many in all."""
    # Descriptors that wait to be closed are open, too, and so is one message of them for each closing thread.
    return limit - min(_MAX_CONNECTIONS, limit // 3) - min(_SPARE, max(16, limit // 32)) - limit // 16


def _raise_limit() -> int:
    """Raise the number of descriptors this process may have as far as it goes, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else min(hard, 1 << 20)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return soft
    return wanted


def _ending() -> tuple[signal.Signals, ...]:
    """Return the signals that end a keeper. SIGHUP is ignored if it was before (nohup), or without a terminal to lose:
    many programs take it as a request to read their configuration again."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        try:
            os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
            return ENDING
        except OSError:  # ENXIO: no controlling terminal
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return signal.SIGTERM, signal.SIGINT
