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
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..errors import QuotaError, UnsupportedError
from ..open_files import close_fds
from ..sharing.channel import MAX_FDS, Credentials, peer_credentials, transmit
from . import event_log
from . import messages as m
from .bind import Listener, group_id
from .catalogue import CLAIM_TIMEOUT, Catalogue
from .connection import Connection
from .failures import failure
from .limits import Quotas, limit_called, over
from .paths import find_path, prepare_directory
from .records import Session
from .rules import IDLE
from .service import Service

if TYPE_CHECKING:
    from .guarded import Guard

_CONNECTIONS = limit_called("connections")
_MAX_CONNECTIONS = 8_192
_KEPT_BACK = 32  # of these are kept back for the keeper's own user, for queries, removals and restarts
_SPARE = 64  # descriptors kept back from everybody, where there are many: for accepting, refusing, handing over
LEAST = 192  # descriptors without which a keeper is none
_ACCEPT_AGAIN = 0.25  # seconds
_CLOSERS = 8  # threads that close: the last descriptor of memory frees it, a second for 8 GiB


def _take_no_signals() -> None:
    """Leave signals to the main thread: a handler that another thread runs as the interpreter ends finds none (SIGSEGV
    in CPython 3.11)."""
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


class KeeperServer:
    """A keeper. `mode` and `group` None are 0600 and no change, or those of the keeper before.
    `patience` and `claim_timeout` are seconds."""

    listener: Listener

    def __init__(
        self,
        socket_path: str | None = None,
        *,
        mode: int | None = None,
        group: str | None = None,
        quotas: Quotas | None = None,
        patience: float = IDLE,
        claim_timeout: float = CLAIM_TIMEOUT,
        raises_limit: bool = True,
        guard: Guard | None = None,
    ) -> None:
        self.guard = guard
        self.is_followed = guard is not None  # another keeper goes on with everything when this process ends
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
        self.closer = ThreadPoolExecutor(_CLOSERS, "vram: closing", _take_no_signals)
        self.max_handles = most_handles(limit)
        # In flight are at most as many descriptors of a user as RLIMIT_NOFILE says: one peer gets a small share.
        self.part = max(4, min(MAX_FDS, limit // 64))
        self.catalogue = Catalogue(
            keeper_uid=os.geteuid(),
            nobody=_overflow_uid(),
            claim_timeout=claim_timeout,
        )
        self.quotas = quotas or Quotas()  # as they were chosen; this process may have less room than that
        self.limit(self.quotas)
        self.connections: dict[int, Connection] = {}
        self.pending: dict[Connection, None] = {}  # connected, and have not said hello
        self.by_user: dict[int, int] = {}  # connections
        self.paused = False
        self.closing = False
        self.is_bound = False
        self.options: list[str] = []  # of the command line, which hold after a restart, too
        self.lost_rows = 0  # of the state of the keeper before, which could not be read
        # Called before a process restarts this keeper; raises if that is not to be.
        self.about_to_restart: Callable[[int], None] = self._stays
        # Tells the clients of the keeper before that this one goes on.
        self.greeting: Callable[[], None] = lambda: None
        self.service = Service(self)
        self.handle = self.service.handle
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # made by serve()
        self._watched: dict[Connection, None] = {}
        self._ticking = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._spare_fd = -1

    # -- from start to end ----------------------------------------------------------------------------------------
    def listen(self) -> None:
        """Bind the socket; :meth:`serve` does it otherwise. Raises what :class:`Listener` raises."""
        prepare_directory(self.path, self._chosen)
        mode = 0o600 if self.mode is None else self.mode
        self.listen_on(Listener(self.path, mode=mode, group=self.group))

    def listen_on(self, listener: Listener) -> None:
        """Serve on a socket that is there already."""
        self.listener = listener
        self.is_bound = True

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
        # Not asyncio.run(): there are no coroutines here, only descriptors that become ready.
        self.loop = asyncio.SelectorEventLoop()
        heard: EndingSignals | None = None
        try:
            if signals:
                heard = EndingSignals(self.loop, self.stop)
            if parent_fd >= 0:
                self.loop.add_reader(parent_fd, self._parent_gone, parent_fd)
            self._start()
            if ready is not None:
                ready()
            if self.guard is not None:
                self.guard.watch()
            self.loop.run_forever()
        finally:
            if heard is not None:
                heard.ignore()
            if not self.is_followed:
                if ending is not None:
                    ending()
                self.listener.unlink()
            self._shut_down()

    def stop(self) -> None:
        """Return from :meth:`serve`; nobody follows."""
        self.is_followed = False
        if self.guard is not None:
            self.guard.link.end()
        self.loop.stop()

    @property
    def is_serving(self) -> bool:
        """Whether the loop runs, or is about to."""
        return self.loop is not None and not self.loop.is_closed()

    def _start(self) -> None:
        """Accept, read and write."""
        self.greeting()
        self._accepting()
        for connection in [*self.pending, *self.connections.values()]:
            if connection.queue:
                connection.writable()
            else:
                connection.resume()
            if not connection.closed and (connection.waiting_since is not None or connection.partials):
                self.watch_over(connection)
        self.schedule()

    def is_own(self, uid: int) -> bool:
        """Whether this is the user who runs the keeper, whom the ceilings for each user do not bind."""
        return uid == self.catalogue.accounts.keeper_uid

    @property
    def is_chosen(self) -> bool:
        """Whether somebody chose the path."""
        return self._chosen

    def limit(self, quotas: Quotas) -> None:
        """Change the quotas. Entries that exceed the new ones stay."""
        self.quotas = quotas
        self.catalogue.accounts.quotas = quotas.within(self.max_connections, self.max_handles)

    def replace_catalogue(self, catalogue: Catalogue) -> None:
        """Go on with the books of another keeper."""
        self.catalogue = self.service.catalogue = catalogue

    def close_everything(self) -> None:
        """Close every connection and all memory, and tell nobody, unless another keeper goes on with them."""
        if self.is_followed and self.guard is not None and self.guard.journal is not None:
            return
        self.paused = self.closing = True
        for connection in [*self.pending, *self.connections.values()]:
            connection.close()
        for version in self.catalogue.versions.values():
            version.token.drop()
        for lease in self.catalogue.leases.values():
            if lease.page is not None:
                lease.page.drop()

    def _shut_down(self) -> None:
        self.close_everything()
        self.listener.sock.close()
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
        self.loop.close()
        self.closer.shutdown()

    def _parent_gone(self, fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(fd, 64):
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
            self.catalogue.changed.clear()

    def did(self, session: Session, call: int, version: int = 0) -> None:
        """Note the outcome of a call that is not to be done twice."""
        if self.guard is not None:
            self.guard.did(session, call, version)

    # -- connections ----------------------------------------------------------------------------------------------
    def _accept(self) -> None:
        if self.paused:
            return
        if self._spare_fd < 0:  # the last refusal used it, and there was none to be had since
            self.loop.remove_reader(self.listener.sock)
            self.loop.call_later(_ACCEPT_AGAIN, self._accepting)
            return
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
        self._greet(sock, peer_credentials(sock))

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
        self.count(connection)
        if self.guard is not None:
            self.guard.add(connection)
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

    def count(self, connection: Connection) -> None:
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
        event_log.say("vram.client.refused", logging.WARNING, peer_credentials(sock), why)
        try:
            with contextlib.suppress(OSError):
                transmit(sock, m.encode(failure(0, why)), (), socket.MSG_DONTWAIT)
        finally:
            sock.close()

    def welcome(self, connection: Connection, session: Session) -> None:
        """A connection has said hello: from now on it is known by its session."""
        del self.pending[connection]
        connection.session = session
        if self.guard is not None:
            self.guard.welcome(connection, session)
        self.connections[session.id] = connection
        event_log.say("vram.client.connected", logging.DEBUG, connection)

    def gone(self, connection: Connection) -> None:
        """A connection was closed: end its session and all that depends on it."""
        self.pending.pop(connection, None)
        self._watched.pop(connection, None)
        uid = connection.credentials.uid
        self.by_user[uid] -= 1
        if not self.by_user[uid]:
            del self.by_user[uid]
        if connection.session is not None:
            self.connections.pop(connection.session.id, None)
            event_log.say("vram.client.disconnected", logging.DEBUG, connection)
            self.service.leave(connection.session)
        if self.guard is not None and not self.paused:
            self.guard.gone(connection)

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
            self.expire()
            self.schedule()

    def expire(self) -> None:
        """Do what is due."""
        self.service.expire()
        self.flush()

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
            if connection.overdue(now, self.patience):
                event_log.say("vram.client.overdue", logging.WARNING, connection)
                connection.close()
            for late in [one for one in connection.partials.values() if now - one.since > self.patience]:
                self.service.give_up(connection, late)
            if connection.closed or (connection.waiting_since is None and not connection.partials):
                self._watched.pop(connection, None)
        if self._watched:
            self._ticking = True
            self.loop.call_later(min(1.0, self.patience / 4), self._tick)

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


class EndingSignals:
    """The signals that end this process: `told` is called in a turn of `loop`, once or more.
    Made in the main thread; the loop may be closed only after :meth:`ignore`.

    Not asyncio's: at its end the loop would give each signal its default action back, and so would the interpreter at
    its own. A keeper that is told once more, by a service manager that tells every process of a service, would die of
    that in the middle of closing, with the status of a failure."""

    def __init__(self, loop: asyncio.AbstractEventLoop, told: Callable[[], None]) -> None:
        self._loop, self._told = loop, told
        self._heard, self._wakes = socket.socketpair()
        self._heard.setblocking(False)
        self._wakes.setblocking(False)
        loop.add_reader(self._heard, self._hear)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)  # full, it has been told often enough
        self._numbers = _ending()
        for number in self._numbers:
            signal.signal(number, _nothing)
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)  # our starter may have had them blocked, and so we

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            numbers = self._heard.recv(4096)
            if any(number in numbers for number in self._numbers):
                self._told()

    def ignore(self) -> None:
        """Hear of them no more, and ignore them as long as this process is there."""
        # Blocked as well: what came between Python's last look and the other action is said to be ignored, on stderr.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        for number in self._numbers:
            signal.signal(number, signal.SIG_IGN)  # in every thread: those that were started before have them unblocked
        signal.set_wakeup_fd(-1)
        self._loop.remove_reader(self._heard)
        self._heard.close()
        self._wakes.close()


def _nothing(_number: int, _frame: object) -> None:
    """Handle a signal: only with a handler is its number written to the wakeup descriptor."""


def _ending() -> tuple[signal.Signals, ...]:
    """Return the signals that end a keeper. SIGHUP is ignored if it was before (nohup), or without a terminal to lose:
    many programs take it as a request to read their configuration again."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        try:
            os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
            return signal.SIGTERM, signal.SIGINT, signal.SIGHUP
        except OSError:  # ENXIO: no controlling terminal
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return signal.SIGTERM, signal.SIGINT
