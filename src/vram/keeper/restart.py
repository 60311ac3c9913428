"""A keeper's state in another process: the next keeper is made of a journal and of descriptors by number.

It is the same after a crash and at a planned restart, which is an upgrade too (``vram keep --takeover``)::

    guardian of `vram keep --takeover`, its keeper          running keeper          its guardian

      |  starts a keeper, gives it a socket
      |               |  ------ Takeover + the socket ------> |
      |               |  <----- HandOver: its options ------  |  --- the socket -->  |
      |               |                                     ends                     |
      |  <- G: everything -|
      |  --------------------- give me everything (G) over the socket -------------> |
      |  <------------------------------ all descriptors --------------------------  |
      |  -- everything --> |
                    is made of the rows, and is about to serve
                      |  ---------------- you may end (E) over the socket -------->  |
                    serves                                                         ends

The first guardian starts a keeper of its own, as after a crash, if the socket ends without ``E``: when the new
guardian and its keeper are both gone. So whoever else is killed, one keeper serves, and no reader notices. While the
descriptors move, the first guardian alone has everything: if it is killed then, all is lost.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Callable, Iterator

from ..errors import ProtocolError
from ..sharing.channel import peer_credentials
from . import messages as m
from .bind import Listener
from .catalogue import Catalogue
from .connection import Connection, Held, Unsettled
from .failures import goodbye
from .journal import Journal
from .records import Evicted, Notify
from .rows import OptionsRow, OutcomeRow, PeerRow, Replayed, Row, encode, everything
from .server import KeeperServer

LISTENER = 1  # the number of the listener's descriptor
_ROWS = 1024  # in one record
_OUTCOMES = 65_536  # the latest, of all clients: only of those that were not answered is asked again


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
def written(server: KeeperServer, number_of: Callable[[Held], int], generation: int) -> Journal:
    """Return a new journal with all that a server has, in rows. `number_of` numbers the descriptors of what is held."""
    catalogue, peers = server.catalogue, [*server.pending, *server.connections.values()]
    rows: list[Row] = [options_of(server)]
    rows += [PeerRow(one.number, 0 if one.session is None else one.session.id) for one in peers]
    rows += everything(catalogue, number_of)
    rows += [row for one in peers for row in _outcomes(one)]
    records = [encode(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)]
    journal = Journal.new(generation, sum(map(len, records)))
    for record in records:
        journal.append(record)
    return journal


def options_of(server: KeeperServer) -> OptionsRow:
    """Return the row of the keeper's process."""
    return OptionsRow(next(server.catalogue.ids), os.getpid(), server.listener.lent, server.options)


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
        raise ProtocolError("the journal of the keeper before lacks its beginning: what was kept is lost")

    def token(first: int, count: int, nbytes: int) -> Held | None:
        numbers = range(first, first + count)
        if not all(map(kept.__contains__, numbers)):
            return None
        return Held(list(map(kept.pop, numbers)), nbytes, server.dispose, number=first)

    before = server.catalogue
    made = Catalogue(
        keeper_uid=before.accounts.keeper_uid, nobody=before.nobody, name_of=before.name_of,
        claim_timeout=before.claim_timeout,
    )  # fmt: skip
    replayed.restore(made, token)
    server.replace_catalogue(made)
    server.limit(server.quotas)
    outcomes: dict[int, dict[int, int]] = {}
    for row in replayed.of(OutcomeRow)[-_OUTCOMES:]:
        outcomes.setdefault(row.session, {})[row.call] = row.version
    for row in replayed.of(PeerRow):
        fd = kept.pop(row.number, None)
        if fd is None:
            continue
        sock = socket.socket(fileno=fd)
        sock.setblocking(False)
        connection = Connection(server, sock, peer_credentials(sock))
        connection.number = row.number
        server.count(connection)
        session = made.sessions.get(row.session)
        if session is None:
            server.pending[connection] = None
        else:
            connection.session = session
            connection.unsettled = Unsettled(session, outcomes.get(row.session, {}))
            server.connections[session.id] = connection
    server.lost_rows = journal.bad + replayed.bad
    server.listen_on(Listener.adopt(server.path, socket.socket(fileno=kept.pop(LISTENER)), lent=options.lent))
    return options


def greet_again(server: KeeperServer, keeper: int) -> None:
    """Tell every client that this keeper, number `keeper`, goes on, and ask for its unanswered calls."""
    catalogue = server.catalogue
    server.service.generation = keeper
    for orphan in [one for one in catalogue.sessions.values() if one.id not in server.connections]:
        server.service.leave(orphan)  # its connection was gone already
    for connection in [*server.pending, *server.connections.values()]:
        session = connection.session
        if connection.closed:
            continue
        if session is None:  # its greeting may be lost: it connects again
            connection.close()
        elif session.evicted is not None:
            connection.send(m.encode(goodbye(Evicted(session, *session.evicted), server.path)))
            connection.close()
        else:
            connection.send(m.encode(m.Recovered(0, keeper, server.pid)))
            for version in [one for one in session.watches.values() if not catalogue.is_current(one)]:
                current = catalogue.names.current(version.name)  # that news may not have been sent
                reason = "revoked" if version.revoked else "removed" if version.withdrawn else "replaced"
                number = 0 if current is None else current.number
                server.service.carry_out([Notify(session, version.name, version.number, reason, number)])
