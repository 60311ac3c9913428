"""A keeper's state in another process: what the next keeper is made of, and the restart that gives it to that process.

::

    running keeper                                        next keeper (`vram keep --takeover`)

    serving                                               connecting; each checks that the other is of its own user
       |        <--------------- Takeover ----------------   |
    standing still; the state is written as rows             |
       |        ---- HandOver + journal of these rows ---->  |
       |        <----- Takeover: from which on -----------   |
       |        ----- Descriptors + up to 253 fds ------->   |  (as often as it takes)
       |                                              made of the rows; its guardian has everything
       |                                              journal.take(): from here on it serves
    journal.keep() fails: it ends       <--- end of the connection

At most one of the two serves, because :meth:`.Journal.take` and :meth:`.Journal.keep` decide under one lock, once: the
next keeper takes, or the running one, if the next one is gone or silent for :data:`REQUEST`, keeps. A guardian of each
has that journal too, so that a keeper which follows one that died in the middle decides in its place.

No reader notices: connections, memory, leases, waiters and claims move, and clients make their unanswered calls again.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ..errors import (
    AccessDeniedError,
    BusyError,
    NotFoundError,
    PeerGoneError,
    ProtocolError,
    VramError,
)
from ..open_files import close_fds
from ..sharing.channel import MAX_FDS, Channel, peer_credentials
from . import event_log
from . import messages as m
from .bind import Listener, Permissions
from .catalogue import Catalogue
from .connection import Connection, Held
from .failures import failure, goodbye, raised
from .greeting import GREETINGS, HungUpError, greet, open_channel
from .journal import Journal
from .limits import Quotas
from .records import Evicted, Notify
from .rows import OptionsRow, OutcomeRow, PeerRow, Replayed, Row, SessionRow, encode, everything
from .rules import REQUEST
from .server import KeeperServer

LISTENER = 1  # the number of the listener's descriptor
_ROWS = 1024  # in one record
_OUTCOMES = 65_536  # the latest, of all clients: only of those that were not answered is asked again


@dataclass(frozen=True, slots=True)
class Succession:
    """The limits before and after a restart; claims are in seconds.
    `pid` is 0 in another PID namespace; `command` started the keeper before, and is empty if unseen."""

    pid: int
    before: Quotas
    now: Quotas
    claims_before: float
    claims_now: float
    command: tuple[str, ...] = ()


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


# -- writing a state, and making one ----------------------------------------------------------------------------------
@uncollected()
def written(
    server: KeeperServer, number_of: Callable[[Held], int], peers: dict[Connection, int], generation: int
) -> Journal:
    """Return a new journal with all that a server has, in rows. `number_of` numbers the descriptors of what is held."""
    catalogue = server.catalogue
    next_id = next(catalogue._ids)
    rows: list[Row] = [OptionsRow(server.quotas, catalogue.claim_timeout, next_id, os.getpid(), server.listener.lent)]
    rows += [PeerRow(number, 0 if one.session is None else one.session.id) for one, number in peers.items()]
    rows += everything(catalogue, number_of)
    rows += [row for one in peers for row in _outcomes(server, one)]
    records = [encode(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)]
    journal = Journal.new(generation, sum(map(len, records)))
    for record in records:
        journal.append(record)
    return journal


def _outcomes(server: KeeperServer, connection: Connection) -> Iterator[OutcomeRow]:
    """Yield the outcomes of calls whose client has not made room for the answer, or may make them again."""
    session, settling = connection.session, server.service.settling
    if session is None:
        return
    if settling is not None and connection in settling.waiting:
        for call, version in settling.waiting[connection].outcomes.items():
            yield OutcomeRow(session.id, call, version)
    for payload, *_ in connection.queue:
        said = m.decode_reply(payload)
        if isinstance(said, (m.Published, m.Done)):
            yield OutcomeRow(session.id, said.call, said.version if isinstance(said, m.Published) else 0)


@dataclass(slots=True)
class Peer:
    """A connection that moved, by the number of its socket: what its client may ask for again, and why it ends."""

    number: int
    outcomes: dict[int, int]
    evicted: tuple[str, int] | None


@uncollected()
def adopt(
    server: KeeperServer,
    journal: Journal,
    kept: dict[int, int],
    quotas: Callable[[Quotas], Quotas],
    claim_timeout: float | None,
) -> tuple[dict[Connection, Peer], OptionsRow]:
    """Make a server's state of a journal and of descriptors by number; what is taken over leaves `kept`.
    `quotas` turns the limits of before into those of now; a `claim_timeout` of None is as before."""
    replayed = Replayed(journal.records())
    options = replayed.options
    if options is None or LISTENER not in kept:
        raise ProtocolError("the journal of the keeper before lacks its beginning: what was kept is lost")

    def token(first: int, count: int, nbytes: int) -> Held | None:
        numbers = range(first, first + count)
        if not all(map(kept.__contains__, numbers)):
            return None
        return Held(list(map(kept.pop, numbers)), nbytes, server.dispose)

    before = server.catalogue
    made = Catalogue(
        keeper_uid=before.accounts.keeper_uid, nobody=before.nobody, name_of=before.name_of,
        claim_timeout=options.claim_timeout if claim_timeout is None else claim_timeout,
    )  # fmt: skip
    replayed.restore(made, token)
    server.replace_catalogue(made)
    server.limit(quotas(options.limits))
    outcomes: dict[int, dict[int, int]] = {}
    for row in replayed.of(OutcomeRow)[-_OUTCOMES:]:
        outcomes.setdefault(row.session, {})[row.call] = row.version
    evicted = {row.id: row.evicted for row in replayed.of(SessionRow) if row.evicted}
    peers: dict[Connection, Peer] = {}
    for row in replayed.of(PeerRow):
        fd = kept.pop(row.number, None)
        if fd is None:
            continue
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        connection = Connection(server, sock, peer_credentials(sock))
        KeeperServer.add(server, connection)
        session = made.sessions.get(row.session)
        if session is None:
            server.pending[connection] = None
        else:
            connection.session = session
            server.connections[session.id] = connection
        peers[connection] = peer = Peer(row.number, outcomes.get(row.session, {}), evicted.get(row.session))
        if session is not None:  # also in what this keeper writes down before it has said that it goes on
            server.service.settle(connection, 0, peer.outcomes)
    server.lost_rows = journal.bad + replayed.bad
    server.listen_on(Listener.adopt(server.path, socket.socket(fileno=kept.pop(LISTENER)), lent=options.lent))
    return peers, options


def greet_again(server: KeeperServer, peers: dict[Connection, Peer], keeper: int) -> None:
    """Tell every client that this keeper, number `keeper`, goes on, and ask for its unanswered calls."""
    catalogue = server.catalogue
    for orphan in [one for one in catalogue.sessions.values() if one.id not in server.connections]:
        server.service.leave(orphan)  # its connection was gone already
    for connection, peer in peers.items():
        session = connection.session
        if connection.closed:
            continue
        if session is None:  # its greeting may be lost: it connects again
            connection.close()
        elif peer.evicted is not None:
            connection.send(m.encode(goodbye(Evicted(session, *peer.evicted), server.path)))
            connection.close()
        else:
            server.service.settle(connection, keeper, peer.outcomes)
            connection.send(m.encode(m.Recovered(0, keeper, server.pid)))
            for version in [one for one in session.watches.values() if not catalogue.is_current(one)]:
                current = catalogue._current(version.name)  # that news may not have been sent
                reason = "revoked" if version.revoked else "removed" if version.withdrawn else "replaced"
                number = 0 if current is None else current.number
                server.service.carry_out([Notify(session, version.name, version.number, reason, number)])


# -- the running keeper -----------------------------------------------------------------------------------------------
def hand_over(server: KeeperServer, connection: Connection, request: m.Takeover) -> None:
    """Give everything to the process at the other end of `connection`; nobody is served meanwhile."""
    if connection.credentials.uid != os.geteuid():
        raise AccessDeniedError(
            f"only uid {os.geteuid()}, who runs this keeper, may take it over, not uid {connection.credentials.uid}"
        )
    if request.offset or (connection.session is not None and (connection.session.leases or connection.queue)):
        raise ProtocolError("a connection that holds leases cannot take over")
    # From here on it is no client any more: it is not among what moves.
    channel = Channel(socket.socket(fileno=os.dup(connection.sock.fileno())))
    connection.close(hang_up=False)
    server.flush()
    server.paused = True
    journal: Journal | None = None
    try:
        journal = _give(server, channel, request)
    except Exception as error:  # noqa: BLE001  (whatever it is: this keeper has everybody's memory and must go on)
        _gave_up(error)
        with contextlib.suppress(VramError, OSError):
            said = BusyError(f"the running keeper serves on: {error}")
            channel.send(m.encode(failure(request.call, said)), timeout=0)
    serves_on = journal is None or journal.keep()
    pid = channel.peer().pid
    channel.close()
    if journal is not None:
        if serves_on:
            server.gave(None)
        journal.close()
    if not serves_on:
        server.successor = True
        event_log.say("vram.keeper.handed_over", fields={"process.pid": pid})
        server.stop()
        return
    # Nothing was unregistered: the loop stood still, and goes on where it was.
    server.listener.sock.listen(1024)  # a process that came this far had put its name on the socket
    server.paused = False


def _gave_up(error: Exception) -> None:
    said = f"vram keep: a takeover failed, serving on: {error}"
    event_log.say("vram.keeper.takeover_failed", logging.ERROR, error=error, otherwise=said)


def _give(server: KeeperServer, channel: Channel, request: m.Takeover) -> Journal:
    """Send everything, and wait for the end of the connection; return the journal that says who serves."""
    peers = [*server.pending, *server.connections.values()]
    fds = [server.listener.sock.fileno(), *(one.sock.fileno() for one in peers)]  # the first of them has number 1

    def number(held: Held) -> int:
        fds.extend(held.fds)
        return 1 + len(fds) - len(held.fds)

    numbers = {one: at for at, one in enumerate(peers, start=LISTENER + 1)}
    journal = written(server, number, numbers, time.monotonic_ns() // 1000)
    server.gave(journal)
    try:
        channel.send(m.encode(m.HandOver(request.call, len(fds))), [journal.fd], timeout=REQUEST)
        sent = 0
        while sent < len(fds):
            asked = _hear(channel, m.Takeover)
            part = fds[asked.offset : asked.offset + MAX_FDS]
            channel.send(m.encode(m.Descriptors(asked.call, asked.offset)), part, timeout=REQUEST)
            sent = asked.offset + len(part)
        with contextlib.suppress(PeerGoneError):
            channel.recv(timeout=REQUEST)
    except Exception as error:  # noqa: BLE001  (the journal says who serves, whatever it is)
        _gave_up(error)
    return journal


# -- the next keeper --------------------------------------------------------------------------------------------------
def take_over(server: KeeperServer, given: Collection[str] = ()) -> Succession | None:
    """Fill `server` with all of the keeper at its path, which exits; return None if none runs there. Limits named in
    `given` hold from now on, all others move. Raises BusyError if that keeper serves on, PeerGoneError if it died."""
    with contextlib.ExitStack() as stack:
        chosen = (server.mode, server.gid) != (None, None)
        for left in reversed(range(GREETINGS)):
            try:
                permissions = Permissions(server.path) if chosen else None
                channel = stack.enter_context(open_channel(server.path, server.is_chosen, REQUEST))
            except (PeerGoneError, NotFoundError):
                return None
            who = channel.peer()
            if who.uid != os.geteuid():
                raise AccessDeniedError(f"the keeper at {server.path} is of uid {who.uid}, not of uid {os.geteuid()}")
            command = _command(who.pid or 0)  # which is gone with it
            try:
                greet(channel, server.path, "successor", REQUEST)
                journal, kept = _receive(channel, server.main_pid)
                break
            except HungUpError:  # another keeper goes on there
                if not left:
                    raise
            except PeerGoneError:
                raise PeerGoneError(
                    "the running keeper died while it handed over: if another goes on for it, take over from that one"
                ) from None
        limits: list[Quotas] = []

        def now(before: Quotas) -> Quotas:
            limits.append(before)
            return _with(server.quotas, before, given)

        claims = server.catalogue.claim_timeout if "claim_timeout" in given else None
        try:
            peers, options = adopt(server, journal, kept, now, claims)
            if permissions:
                permissions.change(server.mode, server.gid)
            greet_all = partial(greet_again, server, peers)
            server.took(journal, greet_all)
            if not journal.take():
                raise BusyError("the running keeper serves on: this one was not ready in time")
        except BaseException:
            if permissions:
                permissions.restore()
            server.close_everything()
            close_fds(list(kept.values()))
            raise
        server.took(None, greet_all)
        close_fds(list(kept.values()))
        journal.close()
    # Not who listened when this process connected: another may have taken over since, and this connection with it.
    pid = (options.pid or who.pid or 0) if who.pid else 0
    return Succession(pid, limits[0], server.quotas, options.claim_timeout, server.catalogue.claim_timeout, command)


def _receive(channel: Channel, main_pid: int) -> tuple[Journal, dict[int, int]]:
    """Take the journal, and all descriptors by number."""
    channel.send(m.encode(m.Takeover(1, main_pid=main_pid)), timeout=REQUEST)
    payload, came = channel.recv(timeout=REQUEST)
    try:
        offer = _word(payload, m.HandOver)
        if len(came) != 1:
            raise ProtocolError("a hand-over without its journal")
    except BaseException:
        close_fds(came)
        raise
    journal = Journal(came[0])
    kept: dict[int, int] = {}
    try:
        while len(kept) < offer.total:
            channel.send(m.encode(m.Takeover(1, len(kept))), timeout=REQUEST)
            payload, came = channel.recv(timeout=REQUEST)
            kept.update(enumerate(came, start=1 + len(kept)))
            _word(payload, m.Descriptors)
            if not came:
                raise ProtocolError("the running keeper sends fewer descriptors than it says")
    except BaseException:
        close_fds(list(kept.values()))
        journal.close()
        raise
    return journal, kept


def _command(pid: int) -> tuple[str, ...]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return tuple(os.fsdecode(part) for part in file.read().split(b"\0")[:-1])
    except OSError:  # in another PID namespace
        return ()


def _with(quotas: Quotas, limits: Quotas, given: Collection[str]) -> Quotas:
    """Return the limits of another keeper, but for those that were given here."""
    names = (name for name in Quotas.__struct_fields__ if name in given)
    return msgspec.structs.replace(limits, **{name: getattr(quotas, name) for name in names})


def _hear(channel: Channel, kind: Any) -> Any:
    payload, fds = channel.recv(timeout=REQUEST)
    close_fds(fds)
    return _word(payload, kind)


def _word(payload: bytes, kind: Any) -> Any:
    """Return what was said, which is to be of a kind."""
    said = m.decode_succession(payload)
    if isinstance(said, m.Recovered):
        raise HungUpError("the running keeper was killed just now, and another goes on: take over from that one")
    if isinstance(said, m.Error):
        raise raised(said)
    if not isinstance(said, kind):
        raise ProtocolError(f"{type(said).__name__} was said where {kind.__name__} was due")
    return said
