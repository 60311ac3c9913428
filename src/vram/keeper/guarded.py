"""A keeper that goes on: its state is rows in a journal, from which the next keeper is made.

The guardian (:mod:`.guardian`) has duplicates of all descriptors and of the journal, and starts the next keeper when
this one dies. That one makes its state from the rows, has the same connections, and asks each client for the calls
that were not answered: they come once more, and take effect once, because the rows say which of them had one.

The order: the guardian has a descriptor, then its row is written, then the answer is sent.

A planned restart (``vram keep --takeover``), which is an upgrade too, is a crash that was asked for, with another
guardian::

    guardian of `vram keep --takeover`, its keeper          running keeper          its guardian

      |  starts a keeper, gives it a socket
      |               |  ------ Takeover + the socket ------> |
      |               |  <-------------- Done --------------- |  --- the socket -->  |
      |               |                                     ends                     |
      |  <- G: everything -|
      |  --------------------- give me everything (G) over the socket -------------> |
      |  <------------------------------ all descriptors --------------------------  |
      |  -- everything --> |
                    is made of the rows, and is about to serve
                      |  ---------------- you may end (E) over the socket -------->  |
                    serves                                                         ends

The first guardian starts a keeper of its own, as after a crash, if the socket ends without ``E``: when the new
guardian and its keeper are both gone. So one keeper serves, whatever else is killed, and no reader notices. While the
descriptors move, the first guardian alone has everything: if it is killed then, all is lost.
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from .. import errors
from ..sharing.channel import ALL_FDS, peer_credentials, receive
from ..sharing.channel import hang_up as hang_up_socket
from . import event_log
from . import messages as m
from .bind import Listener, set_permissions
from .connection import Connection, Held, Unsettled
from .journal import Journal
from .records import Notify, Session
from .rows import OptionsRow, OutcomeRow, Replayed, Row, changes, encode, everything
from .rules import GUARDIAN
from .server import ENDING, KeeperServer

# Numbers of descriptors. At a planned restart BEFORE is the connection to the guardian that gave everything; TO_HAND is
# its other end, to be handed to the running keeper.
JOURNAL, LISTENER, BEFORE, TO_HAND, _FIRST = 0, 1, 2, 3, 4
_PART = 200  # in one message
_DROPPED = 64  # numbers that are told together, or after so many seconds:
_TOLD_AFTER = 0.05
_LEAST = 4 << 20  # a journal begins anew after so many bytes, or so many times its beginning, whichever is more
_TIMES = 2
_ROWS = 1024  # in one record
_OUTCOMES = 65_536  # the latest, of all clients: only of those that were not answered is asked again
_SOCKET, _RIGHTS = int(socket.SOL_SOCKET), socket.SCM_RIGHTS  # no member of an enum, which is asked for its number


def guardian_command() -> list[str]:
    """Return how a guardian is started: isolated, and without what is installed, of which it needs nothing."""
    return [sys.executable, "-I", "-S", os.path.join(os.path.dirname(__file__), "guardian.py")]


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
    """The connection to the guardian, which it owns, and what the guardian has.
    `command` is how the next keeper is started."""

    def __init__(self, sock: socket.socket, command: list[str]) -> None:
        self.command = command
        self.next = _FIRST
        self.held: dict[int, int] = {}  # by number, the descriptors that the guardian has duplicates of
        self.watch: Callable[[bool], None] = lambda _: None  # called before the socket is another one, and after
        self.replaced: Callable[[int], None] = lambda _: None  # told the pid of another guardian
        self.is_there = True
        self._dropped: list[int] = []
        self._child = 0
        self.pid = peer_credentials(sock).pid or 0
        self._guardian = _open_parent(self.pid)
        self._talk_over(sock)

    def _talk_over(self, sock: socket.socket) -> None:
        self.sock = sock
        os.set_inheritable(sock.fileno(), False)
        sock.setblocking(True)
        # No message waits longer to be sent; by the kernel, since Python would poll before each.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(GUARDIAN), 0))

    def keep(self, fds: Sequence[int]) -> int:
        """Have descriptors held; return the number of the first."""
        first = self.next
        self.next += len(fds)
        self.keep_as(first, fds)
        return first

    def keep_as(self, first: int, fds: Sequence[int]) -> None:
        """Have descriptors held under such a number, and those that follow it."""
        self.held.update(enumerate(fds, start=first))
        for start in range(0, len(fds), _PART):
            self.tell(b"K", first + start, fds=fds[start : start + _PART])

    def drop(self, *numbers: int) -> None:
        """Have what stands under these numbers held no longer, soon."""
        for number in numbers:
            self.held.pop(number, None)
        self._dropped += numbers
        if len(self._dropped) >= _DROPPED:
            self.flush()

    def flush(self) -> None:
        """Tell now what is to be held no longer."""
        while self._dropped:
            some, self._dropped = self._dropped[:4096], self._dropped[4096:]
            self.tell(b"D", *some)

    def tell(self, kind: bytes, *numbers: int, fds: Sequence[int] = ()) -> None:
        """Say something. A guardian that does not hear it is replaced, and the next one knows all of it."""
        payload = kind + struct.pack(f"<{len(numbers)}Q", *numbers)
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
                raise errors.PeerGoneError(
                    f"the guardian of this keeper (pid {self.pid}) ended before it had given everything: there is "
                    f"nothing to serve. See what runs (vram ls), and start the keeper again (vram keep)"
                )
            if not fds:
                self.held = dict(found)
                self.next = max([self.next, *(number + 1 for number in found)])
                return found
            numbers = struct.unpack(f"<{len(payload) // 8}Q", payload)
            found.update(zip(numbers, fds, strict=True))

    def replace(self) -> None:
        """Start another guardian, and give it all that there is. Raises OSError if that is not to be had now."""
        self.is_there = False  # until it is told all; whoever watches tries again
        self.watch(False)
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
        self._talk_over(ours)
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
        for number in sorted(self.held, reverse=True):  # the journal last: who has it has everything
            _send(self.sock, b"K" + struct.pack("<Q", number), [self.held[number]])
        self.sock.sendall(b"R")
        self.is_there = True
        self.watch(True)


def _reap(pid: int) -> None:
    """Wait for the end of a child."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _open_parent(pid: int) -> int:
    """Return a descriptor of the process that started this one, if that is `pid`; else -1: it is gone."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(pid)
        if os.getppid() == pid:
            return fd
        os.close(fd)
    return -1


class Guard:
    """The guardian, at `link`, and the journal: with them another keeper goes on when this one dies."""

    server: KeeperServer

    def __init__(self, link: GuardianLink) -> None:
        self.link = link
        self.kept = link.everything()  # by number, until the keeper has recovered
        self.journal: Journal | None = None  # that the next keeper can go on from
        self.compact_at = 0
        self.is_restart = False  # a planned one
        self._before: socket.socket | None = None  # to the guardian that gave everything
        self._rows: list[Row] = []  # of connections and outcomes, to be written with the next change
        self._telling = False

    # -- the beginning ------------------------------------------------------------------------------------------------
    def recover(self) -> OptionsRow | None:
        """Go on where a dead keeper stopped; return its settings, None if there was none. Raises ProtocolError if its
        journal is none: what it kept is lost."""
        server, kept = self.server, self.kept
        if JOURNAL not in kept:  # it died before it served
            self._let_go(kept)
            return None
        try:
            journal = Journal(kept.pop(JOURNAL))
        except errors.ProtocolError as error:
            raise errors.ProtocolError(f"{error}; what was kept is lost, and has to be published again") from None
        if BEFORE in kept:
            self._before = socket.socket(fileno=kept.pop(BEFORE))
        journal.inherit()
        options = adopt(server, journal, kept)
        self._let_go(kept)  # which the guardian had not been told to drop yet
        self.journal = journal
        if server.lost_rows:
            rows, entries = server.lost_rows, server.catalogue.names.entries
            said = f"{rows} rows of the journal could not be read: what they said is lost; {entries} entries are kept"
            event_log.say(
                "vram.keeper.rows_lost",
                logging.ERROR,
                otherwise=f"vram keep: {said}",
                fields={"vram.keeper.rows": rows, "vram.keeper.entries": entries},
            )
            self.compact()  # without what is lost
        self.is_restart = self._before is not None
        if self.is_restart:
            set_permissions(server.path, server.mode, server.gid)
        self.compact_at = self.journal.nbytes + _LEAST
        return options

    def _let_go(self, kept: dict[int, int]) -> None:
        """Close what is not needed, in other threads, and have it held no longer."""
        self.link.drop(*kept)
        self.link.flush()
        for number, fd in kept.items():
            if number >= _FIRST and stat.S_ISSOCK(os.fstat(fd).st_mode):
                sock = socket.socket(fileno=fd)
                hang_up_socket(sock)
                sock.detach()
            self.server.close_soon([fd])

    def begin(self) -> None:
        """Begin a journal if there is none, and end the guardian that gave everything: this keeper serves."""
        if self.journal is None:
            self.link.keep_as(LISTENER, [self.server.listener.sock.fileno()])
            # A number that no journal of another keeper has: clients tell by it which of them goes on.
            self._begin_journal(time.monotonic_ns() // 1000)
        else:
            self._rows.append(self._options())
            self.flush()
        if self._before is not None:
            if signal.sigpending().intersection(ENDING):
                raise errors.BusyError("told to end before it served: the keeper before goes on")
            with contextlib.suppress(OSError):
                self._before.sendall(b"E")
            self.link.drop(BEFORE)
            self.link.flush()
            self._before.close()
            self._before = None

    def greet_again(self) -> None:
        """Tell every client of the keeper before that this one goes on, and ask for its unanswered calls."""
        server, catalogue = self.server, self.server.catalogue
        server.service.generation = generation = 0 if self.journal is None else self.journal.generation
        for orphan in [one for one in catalogue.sessions.values() if one.id not in server.connections]:
            server.service.leave(orphan)  # its connection was gone already
        for connection in list(server.connections.values()):
            session = connection.session
            if connection.closed or session is None:
                continue
            connection.send(m.encode(m.Recovered(0, generation, server.pid)))
            for version in [one for one in session.watches.values() if not catalogue.is_current(one)]:
                current = catalogue.names.current(version.name)  # that news may not have been sent
                reason = "revoked" if version.revoked else "removed" if version.withdrawn else "replaced"
                number = 0 if current is None else current.number
                server.service.carry_out([Notify(session, version.name, version.number, reason, number)])
            if not connection.queue:
                connection.resume()

    def watch(self) -> None:
        """Tell the guardian that this keeper serves, and see whether it is there, from now on."""
        self._watch(True)
        self.link.watch = self._watch
        self.link.tell(b"R")

    def _watch(self, watches: bool) -> None:
        """The guardian says nothing unasked: if there is something to read, it is gone."""
        if watches:
            self.server.loop.add_reader(self.link.sock, self._replace)
        else:
            self.server.loop.remove_reader(self.link.sock)
            self.server.loop.call_later(_TOLD_AFTER, lambda: None if self.link.is_there else self._replace())

    def _replace(self) -> None:
        with contextlib.suppress(OSError):  # it is tried again
            self.link.replace()

    # -- the journal --------------------------------------------------------------------------------------------------
    def _begin_journal(self, generation: int) -> None:
        """Write all that the server has into a new journal."""
        with uncollected():
            rows: list[Row] = [self._options(), *everything(self.server.catalogue, self._number)]
            rows += [row for connection in self.server.connections.values() for row in _outcomes(connection)]
            records = [encode(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)]
            self.journal = Journal.new(generation, sum(map(len, records)))
            for record in records:
                self.journal.append(record)
        self._rows.clear()
        self.compact_at = max(_LEAST, _TIMES * self.journal.nbytes)
        self.link.keep_as(JOURNAL, [self.journal.fd])

    def _options(self) -> OptionsRow:
        server = self.server
        return OptionsRow(next(server.catalogue.ids), os.getpid(), server.options)

    def _number(self, held: Held) -> int:
        """Return the number of the first descriptor, which the guardian has from now on."""
        if not held.number:
            held.number = self.link.keep(held.fds)
        return held.number

    def flush(self) -> None:
        """Write down what changed, before anybody hears of it."""
        catalogue, journal = self.server.catalogue, self.journal
        if catalogue.changed or self._rows:
            self.server.take_note()
            rows = [*self._rows, *changes(catalogue, self._number)]
            self._rows.clear()
            if journal is not None:
                journal.append(encode(rows))
                if journal.nbytes > self.compact_at and self.server.loop is not None:
                    self.compact_at = sys.maxsize  # until it is done
                    self.server.loop.call_soon(self.compact)

    def compact(self) -> None:
        """Begin the journal anew."""
        before = self.journal
        if self.server.paused or before is None:
            return
        self.compact_at = 0  # if this fails it is tried again
        try:
            self._begin_journal(before.generation)
        finally:
            if self.journal is not before:
                before.close()

    # -- what changes besides the catalogue ---------------------------------------------------------------------------
    def welcome(self, connection: Connection, session: Session) -> None:
        """Have the socket of a session held; one without a greeting is not, since its client connects again."""
        session.peer = self.link.keep([connection.sock.fileno()])

    def did(self, session: Session, call: int, version: int = 0) -> None:
        """Note the outcome of a call that is not to be done twice."""
        self._rows.append(OutcomeRow(session.id, call, version))

    def forget(self, first: int, count: int) -> None:
        """Have descriptors held no longer, soon."""
        self.flush()  # first: no row is to name what is gone
        self.link.drop(*range(first, first + count))
        if not self._telling and self.server.loop is not None:
            self._telling = True
            self.server.loop.call_later(_TOLD_AFTER, self._tell)

    def _tell(self) -> None:
        self._telling = False
        self.link.flush()


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no cycles for the length of a block that makes much and no garbage: that is a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _outcomes(connection: Connection) -> Iterator[OutcomeRow]:
    """Yield the outcomes of calls whose client has not made room for the answer, or may make them again."""
    if connection.session is None:
        return
    if connection.unsettled is not None:
        for call, version in connection.unsettled.outcomes.items():
            yield OutcomeRow(connection.session.id, call, version)
    for payload, *_ in connection.queue:
        said = m.decode_reply(payload)
        if isinstance(said, (m.Published, m.Done)):
            yield OutcomeRow(connection.session.id, said.call, said.version if isinstance(said, m.Published) else 0)


@uncollected()
def adopt(server: KeeperServer, journal: Journal, kept: dict[int, int]) -> OptionsRow:
    """Make a server's state of a journal and of descriptors by number; what is taken over leaves `kept`."""
    replayed = Replayed(journal.records())
    options = replayed.options
    if options is None or LISTENER not in kept:
        raise errors.ProtocolError("the journal of the keeper before lacks its beginning: what was kept is lost")

    def token(first: int, count: int, nbytes: int) -> Held | None:
        numbers = range(first, first + count)
        if not all(map(kept.__contains__, numbers)):
            return None
        return Held(list(map(kept.pop, numbers)), nbytes, server.dispose, number=first)

    replayed.restore(server.catalogue, token)
    outcomes: dict[int, dict[int, int]] = {}
    for row in replayed.of(OutcomeRow)[-_OUTCOMES:]:
        outcomes.setdefault(row.session, {})[row.call] = row.version
    for session in server.catalogue.sessions.values():
        if session.peer in kept:
            connection = server.add(socket.socket(fileno=kept.pop(session.peer)))
            granted = {one.call: one for one in session.granted}
            connection.unsettled = Unsettled(outcomes.get(session.id, {}), granted)
            server.introduce(connection, session)
    server.lost_rows = journal.bad + replayed.bad
    server.listener = Listener.adopt(server.path, socket.socket(fileno=kept.pop(LISTENER)))
    return options
