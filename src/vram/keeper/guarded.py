"""A keeper that goes on: its state is rows in a journal, from which the next keeper is made.

The guardian (:mod:`.guardian`) has duplicates of all descriptors and of the journal, and starts the next keeper when
this one dies. At a planned restart (:mod:`.restart`) another guardian gets all that from the first one, and starts the
next keeper. Either way that makes its state from the rows, has the same connections, and asks each client for the calls
that were not answered: they come once more, and take effect once, because the rows say which of them had one.

The order: the guardian has a descriptor, then its row is written, then the answer is sent.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .. import errors
from ..sharing.channel import ALL_FDS, peer_credentials, receive
from ..sharing.channel import hang_up as hang_up_socket
from . import event_log
from .bind import set_permissions
from .connection import Connection, Held
from .journal import Journal
from .records import Session
from .restart import LISTENER, adopt, greet_again, written
from .rows import OutcomeRow, PeerRow, Row, changes, encode, gone
from .rules import GUARDIAN
from .server import KeeperServer

# Numbers of descriptors. BEFORE is the connection to the guardian that gave everything at a planned restart.
JOURNAL, BEFORE, _FIRST = 0, 2, 4
_PART = 200  # in one message
_DROPPED = 64  # numbers that are told together, or after so many seconds:
_TOLD_AFTER = 0.05
_LEAST = 4 << 20  # a journal begins anew after so many bytes, or so many times its beginning, whichever is more
_TIMES = 2
_SOCKET, _RIGHTS = int(socket.SOL_SOCKET), socket.SCM_RIGHTS  # no member of an enum, which is asked for its number

_number = struct.Struct("<Q").pack


def guardian_command() -> list[str]:
    """Return how a guardian is started: isolated, and without what is installed, of which it needs nothing."""
    return [sys.executable, "-I", "-S", os.path.join(os.path.dirname(__file__), "guardian.py")]


def _limit(sock: socket.socket) -> None:
    """Have no message wait longer than that to be sent; by the kernel, since Python would poll before each."""
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GUARDIAN), 0))


def _send(sock: socket.socket, payload: bytes, fds: Sequence[int]) -> None:
    """Send a message; while too many descriptors are on their way, wait until the guardian has taken some."""
    rights = [(_SOCKET, _RIGHTS, array.array("i", fds))] if fds else []
    until = 0.0
    while True:
        try:
            sock.sendmsg([payload], rights)
            return
        except OSError as error:
            until = until or time.monotonic() + GUARDIAN
            if error.errno not in (errno.ETOOMANYREFS, errno.ENOBUFS) or time.monotonic() > until:
                raise
            time.sleep(0.001)


class GuardianLink:
    """The connection to the guardian, which it owns, and the numbers of what the guardian has.
    `command` is how the next keeper is started."""

    def __init__(self, sock: socket.socket, command: list[str]) -> None:
        self.sock = sock
        self.command = command
        self.next = _FIRST
        self.number_of: dict[int, int] = {}  # by descriptor, of memory
        self.others: Callable[[], dict[int, int]] = dict  # by number, descriptors besides those
        self.watch: Callable[[bool], None] = lambda _: None  # called before the socket is another one, and after
        self.replaced: Callable[[int], None] = lambda _: None  # told the pid of another guardian
        self.failed: Callable[[], None] = lambda: None  # called where no other can be started now
        self.is_there = True
        self._dropped: list[int] = []
        self._child = 0
        self.pid = peer_credentials(sock).pid or 0
        self._guardian = _open_parent(self.pid)
        _limit(sock)
        os.set_inheritable(sock.fileno(), False)

    def keep(self, fds: Sequence[int]) -> int:
        """Have descriptors of memory held; return the number of the first."""
        first = self.next
        self.next += len(fds)
        if len(fds) == 1:  # as nearly always
            self.number_of[fds[0]] = first
            self.tell(b"K", first, fds=fds)
            return first
        for number, fd in enumerate(fds, start=first):
            self.number_of[fd] = number
        self.keep_as(first, fds)
        return first

    def keep_as(self, first: int, fds: Sequence[int]) -> None:
        """Have descriptors held under such a number, and those that follow it."""
        for start in range(0, len(fds), _PART):
            self.tell(b"K", first + start, fds=fds[start : start + _PART])

    def forget(self, fds: Sequence[int]) -> None:
        """Have descriptors of memory held no longer, soon."""
        number_of = self.number_of
        numbers = [number_of.pop(fd) for fd in fds if fd in number_of]
        self.drop(*numbers)

    def drop(self, *numbers: int) -> None:
        """Have what stands under these numbers held no longer, soon."""
        self._dropped += numbers
        if len(self._dropped) >= _DROPPED:
            self.flush()

    @property
    def owes(self) -> bool:
        """Whether there is something to :meth:`flush`."""
        return bool(self._dropped)

    def flush(self) -> None:
        """Tell now what is to be held no longer."""
        while self._dropped:
            some, self._dropped = self._dropped[:4096], self._dropped[4096:]
            self.tell(b"D", *some)

    def tell(self, kind: bytes, *numbers: int, fds: Sequence[int] = ()) -> None:
        """Say something. A guardian that does not hear it is replaced, and the next one knows all of it."""
        payload = kind + (_number(*numbers) if len(numbers) == 1 else struct.pack(f"<{len(numbers)}Q", *numbers))
        try:
            _send(self.sock, payload, fds)
        except OSError:
            self.replace()
            _send(self.sock, payload, fds)

    def hand_to(self, fd: int) -> None:
        """Have another guardian, at the other end of a socket, get everything once this keeper is gone."""
        self.flush()
        self.tell(b"N", fds=[fd])

    def end(self) -> None:
        """Tell that this keeper ends, and nobody follows it."""
        with contextlib.suppress(OSError):
            self.sock.sendall(b"E")

    def everything(self) -> dict[int, int]:
        """Return all that is held, as descriptors of this process's own, by number."""
        found: dict[int, int] = {}
        while True:
            self.sock.sendall(b"G" + struct.pack("<Q", len(found)))
            payload, fds, _ = receive(self.sock, 0, ALL_FDS)
            if not payload:
                raise errors.PeerGoneError("the guardian of what the keeper before had died")
            if not fds:
                return found
            numbers = struct.unpack(f"<{len(payload) // 8}Q", payload)
            found.update(zip(numbers, fds, strict=True))

    def replace(self) -> None:
        """Start another guardian, and give it all that there is. Raises OSError if that is not to be had now."""
        self.is_there = False
        self.watch(False)
        try:
            self._replace()
        except OSError:
            self.failed()
            raise
        self.is_there = True
        self.watch(True)

    def _replace(self) -> None:
        before, child = self.sock, self._child
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.set_inheritable(theirs.fileno(), True)
            command = [*guardian_command(), "--of", str(theirs.fileno()), str(os.getpid()), *self.command]
            self.pid = self._child = os.posix_spawn(command[0], command, os.environ)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.sock = ours
        _limit(ours)
        self.replaced(self._child)  # before the other one ends, which may be the process of a service
        if self._guardian >= 0:  # one that only stands still would start keepers of its own, later
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._guardian, signal.SIGKILL)
            os.close(self._guardian)
        before.close()
        if child:  # its end may take long, where what it closes does: nobody waits for that
            threading.Thread(target=_reap, args=(child,), daemon=True).start()
        self._guardian = os.pidfd_open(self._child)
        self._dropped.clear()  # it is not given those
        held = {**{number: fd for fd, number in self.number_of.items()}, **self.others()}
        for number, fd in held.items():
            _send(self.sock, b"K" + _number(number), [fd])
        self.sock.sendall(b"R")


def _reap(pid: int) -> None:
    """Wait for the end of a child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _open_parent(pid: int | None) -> int:
    """Return a descriptor of the process that started this one, if that is `pid`; else -1: it is gone."""
    if not pid:
        return -1
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return -1
    if os.getppid() != pid:
        os.close(fd)
        return -1
    return fd


class GuardedServer(KeeperServer):
    """A keeper with a guardian, at `link`. The other arguments are those of :class:`KeeperServer`."""

    journal: Journal

    def __init__(self, *arguments: Any, link: GuardianLink, **options: Any) -> None:
        self.link = link
        self.numbers: dict[Connection, int] = {}  # under which their sockets are held
        self.compact_at = 0
        self._has_journal = False  # that the next keeper can go on from
        self._rows: list[Row] = []  # of connections and outcomes, to be written with the next change
        self._found: dict[int, int] = {}  # by number, what the keeper before had, as far as it is not settled yet
        self._stopped = False
        self._before: socket.socket | None = None  # to the guardian that gave everything
        self._telling = self._compacting = False
        self.taken_from = 0  # the pid of the keeper before, at a planned restart
        super().__init__(*arguments, **options)
        link.others = self._others

    def _others(self) -> dict[int, int]:
        held = dict(self._found)
        held.update((number, one.sock.fileno()) for one, number in self.numbers.items())
        if self._before is not None:
            held[BEFORE] = self._before.fileno()
        if self._bound:
            held[LISTENER] = self.listener.sock.fileno()
        if self._has_journal:
            held[JOURNAL] = self.journal.fd  # last: who has it has everything
        return held

    # -- the beginning ------------------------------------------------------------------------------------------------
    def recover(self) -> bool:
        """Go on where a dead keeper stopped; return False if there was none. Raises ProtocolError if its journal is
        none: what it kept is lost."""
        kept = self.link.everything()
        if JOURNAL not in kept:  # it died before it served
            self._let_go(kept)
            return False
        self._found = kept
        try:
            journal = Journal(kept.pop(JOURNAL))
        except errors.ProtocolError as error:
            raise errors.ProtocolError(f"{error}; what was kept is lost, and has to be published again") from None
        if BEFORE in kept:
            self._before = socket.socket(fileno=kept.pop(BEFORE))
        journal.inherit()
        self.link.number_of = {fd: number for number, fd in kept.items()}
        peers, options = adopt(self, journal, kept)
        self.numbers = peers
        self.link.number_of = {fd: self.link.number_of[fd] for held in self._memory() for fd in held.fds}
        there = [*self.numbers.values(), *self.link.number_of.values(), *kept]
        self.link.next = max([_FIRST, *(number + 1 for number in there)])
        self._let_go(kept)  # told to be dropped, and not yet heard
        self.journal, self._has_journal = journal, True
        if self.lost_rows:
            rows, entries = self.lost_rows, self.catalogue.entries
            said = f"{rows} rows of the journal could not be read: what they said is lost; {entries} entries are kept"
            event_log.say(
                "vram.keeper.rows_lost",
                logging.ERROR,
                otherwise=f"vram keep: {said}",
                fields={"vram.keeper.rows": rows, "vram.keeper.entries": entries},
            )
            self.compact()  # without what is lost
        if self._before is not None:
            self.taken_from = options.pid
            set_permissions(self.path, self.mode, self.gid)
        self.compact_at = self.journal.nbytes + _LEAST
        self.greeting = partial(greet_again, self, peers, self.journal.generation)
        return True

    def _memory(self) -> list[Held]:
        pages = [lease.page for lease in self.catalogue.leases.values() if lease.page is not None]
        return [*(version.token for version in self.catalogue.versions.values()), *pages]

    def _let_go(self, kept: dict[int, int]) -> None:
        """Close what is not needed, in other threads, and have it held no longer."""
        self._found = {}  # another guardian is not given those
        for number, fd in kept.items():
            if number >= _FIRST and stat.S_ISSOCK(os.fstat(fd).st_mode):
                sock = socket.socket(fileno=fd)
                hang_up_socket(sock)
                sock.detach()
            self.close_soon([fd])
        self.link.drop(*kept)
        self.link.flush()

    def begin(self) -> None:
        """Have all that there is held, and begin a journal, where there is none."""
        if self._has_journal:
            return
        self.link.keep_as(LISTENER, [self.listener.sock.fileno()])
        for connection in [*self.pending, *self.connections.values()]:
            self._hold(connection)
        for held in self._memory():
            self.link.keep(held.fds)
        # A number that no journal of another keeper has: clients tell by it which of them goes on.
        self._begin_journal(time.monotonic_ns() // 1000)

    def _begin_journal(self, generation: int) -> None:
        self.journal = written(self, self._number, self.numbers, generation)
        self._rows.clear()
        self._has_journal = True
        self.compact_at = max(_LEAST, _TIMES * self.journal.nbytes)
        self.link.keep_as(JOURNAL, [self.journal.fd])

    def _number(self, held: Held) -> int:
        """Return the number of the first descriptor, which the guardian has from now on."""
        number = self.link.number_of.get(held.fds[0])
        return self.link.keep(held.fds) if number is None else number

    def flush(self) -> None:
        """Write down what changed, before anybody hears of it."""
        catalogue = self.catalogue
        if catalogue.changed or self._rows:
            rows = [*self._rows, *changes(catalogue, self._number)]
            self._rows.clear()
            if self._has_journal:
                self.journal.append(encode(rows))
                if self.journal.nbytes > self.compact_at and not self._compacting and self._is_serving:
                    self._compacting = True
                    self.loop.call_soon(self.compact)

    @property
    def _is_serving(self) -> bool:
        return self.loop is not None and not self.loop.is_closed()

    def compact(self) -> None:
        """Begin the journal anew."""
        self._compacting = False
        if self.paused:
            return
        before = self.journal
        try:
            self._begin_journal(before.generation)
        finally:
            if self.journal is not before:
                before.close()

    # -- serving ------------------------------------------------------------------------------------------------------
    def serve(self, ready: Callable[[], None] | None = None, **options: Any) -> None:
        """Serve until :meth:`stop`; see :meth:`KeeperServer.serve`."""
        if not self._bound:
            self.listen()
        self.begin()
        if self._before is not None:  # that guardian goes on unless it is told so; from here on this keeper serves
            with contextlib.suppress(OSError):
                self._before.sendall(b"E")
            self._before.close()
            self._before = None
            self.link.drop(BEFORE)
            self.link.flush()

        def begun() -> None:
            self._watch_guardian(True)
            self.link.watch = self._watch_guardian
            self.link.failed = self._replace_later
            self.link.tell(b"R")
            if ready is not None:
                ready()

        super().serve(begun, **options)

    def _watch_guardian(self, watches: bool) -> None:
        """The guardian says nothing unasked: if there is something to read, it is gone."""
        if watches:
            self.loop.add_reader(self.link.sock, self._replace_guardian)
        else:
            self.loop.remove_reader(self.link.sock)

    def _replace_guardian(self) -> None:
        with contextlib.suppress(OSError):  # it is tried again
            self.link.replace()

    def _replace_later(self) -> None:
        def again() -> None:
            if not self.link.is_there:
                self._replace_guardian()

        self.loop.call_later(_TOLD_AFTER, again)

    def stop(self) -> None:
        """Return from :meth:`serve`; nobody follows."""
        self._stopped = True
        self.link.end()
        super().stop()

    def hand_over(self, fd: int) -> None:
        """Stand still and end, as if this process was killed: a guardian at the other end of `fd` gets everything."""
        self.paused = True
        self.flush()
        self.link.hand_to(fd)
        super().stop()

    @property
    def main_pid(self) -> int:
        """The guardian: whoever watches it would see each end of a keeper as the end of the service."""
        return self.link.pid

    @property
    def is_followed(self) -> bool:
        """Whether another keeper goes on with everything."""
        return not self._stopped

    def close_everything(self) -> None:
        """Close everything, unless it is another keeper's from now on."""
        if self._stopped or not self._has_journal:
            self._has_journal = False
            super().close_everything()

    # -- what changes -------------------------------------------------------------------------------------------------
    def add(self, connection: Connection) -> None:
        """Count a connection, and have its socket held."""
        super().add(connection)
        self._rows.append(PeerRow(self._hold(connection)))

    def _hold(self, connection: Connection) -> int:
        number = self.numbers[connection] = self.link.next
        self.link.next += 1
        self.link.keep_as(number, [connection.sock.fileno()])
        return number

    def welcome(self, connection: Connection, session: Session) -> None:
        """A connection has said hello."""
        self._rows.append(PeerRow(self.numbers[connection], session.id))
        super().welcome(connection, session)

    def did(self, session: Session, call: int, version: int = 0) -> None:
        """Note the outcome of a call that is not to be done twice."""
        self._rows.append(OutcomeRow(session.id, call, version))

    def gone(self, connection: Connection) -> None:
        """A connection was closed: it is held no longer."""
        number = 0 if self.paused else self.numbers.pop(connection, 0)
        if number:
            self._rows.append(gone(PeerRow, number))
        super().gone(connection)
        if number:
            self.flush()  # of one that had no session
            self.link.drop(number)
            self._tell_soon()

    def dispose(self, fds: list[int]) -> None:
        """Close descriptors that are not used any more, here and where they are held."""
        self.flush()  # first: no row is to name what is gone
        self.link.forget(fds)
        self._tell_soon()
        super().dispose(fds)

    def _tell_soon(self) -> None:
        if self.link.owes and not self._telling and self._is_serving:
            self._telling = True
            self.loop.call_later(_TOLD_AFTER, self._tell)

    def _tell(self) -> None:
        self._telling = False
        self.link.flush()
