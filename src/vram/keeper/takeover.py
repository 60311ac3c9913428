"""One keeper takes over from another of the same user, and no reader notices.

Everything moves: the listening socket, every connection with what is queued for it, every descriptor of memory,
leases, waiters, claims, half-finished publications. Descriptors go in parts, each acknowledged before the next. What
the entries say, which may be gigabytes, goes ahead in parts, while it is more than one.

::

    old keeper                                             new keeper (--takeover)

    serving                                                connecting; each checks that the other is of its own user
       |        <--------------- Takeover ----------------    |
    serving     ------- Bodies (one memfd) ------------->    |   (as often as it takes)
       |        <--------------- Takeover ----------------    |
    handing over: nothing is read or written for anybody   receiving
       |        ----- HandOver + state (one memfd) ------>    |
       |        <-------------- Received -----------------    |
       |        ----- Descriptors + up to 253 fds ------->    |
       |        <-------------- Received -----------------    |   (as often as it takes)
       |        <-------------- Working ------------------    |   (now and then; the same before HandOver + state)
       |        <---------------- Commit -----------------  has everything, and it is consistent
    letting go                                             committed: must not give up any more
       |        -------------- Committed ---------------->    |
    waiting                                                listening
       |        <--------------- Serving -----------------    |
    exits, leaving the socket's path alone                 serving

What happens when something fails:

* Until it has got ``Commit``, the old keeper decides. If the new one dies, says anything unexpected, or is silent
  for :data:`PATIENCE` seconds, the old one says ``Abandoned``, closes, and serves on as if nothing had been.
* After ``Committed`` the old one touches nothing, and waits: for ``Serving``, then it exits; or for the end of the
  connection without it, then the new one died before it served anybody, and the old one serves on.
* Once it has sent ``Commit`` the new one has to be ready to serve. ``Abandoned`` sends it away. The end of the
  connection without ``Abandoned`` means that the old one died: it has everything, so it serves.
* If the old one dies before that, what it held is lost, as whenever a keeper dies; the new one says so and ends.
* One that is followed by another when it dies (:mod:`.survival`) leaves that one the connection, and how far it was: it
  says ``Abandoned`` before ``Commit``, and waits in the place of the dead one after it. ``Serving`` stays in the socket
  for it. A new keeper has its own holder know everything, and this connection, before it says ``Serving``: who follows
  that one says it too.

At no point do both serve, and only if both die does nobody.

How long all of it takes is bounded by what there is, not by a deadline: whoever gets on with it is waited for, and says
``Working`` where nothing else is due from it for long. Who gets stuck says nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import Struct

from ..errors import (
    AccessDeniedError,
    BusyError,
    NotFoundError,
    PeerError,
    PeerGoneError,
    ProtocolError,
    UnsupportedError,
    VramError,
)
from ..open_files import close_fds
from ..sharing.channel import MAX_MESSAGE, Channel, peer_credentials
from ..sharing.parcels import Collector, Sender
from ..sharing.unread import pass_rights
from . import event_log
from . import messages as m
from .bind import Listener, Permissions
from .connection import Connection, Held, Partial
from .failures import raised
from .limits import Quotas
from .records import Version
from .rpc_connection import GREETINGS, HungUpError, greet, open_channel
from .server import KeeperServer
from .settling import Unsettled, UnsettledRow
from .snapshot import Ahead, Bodies, Books, join_bodies, restore, save, silent, split_bodies

FORMAT = 1
PATIENCE = 10.0  # seconds that each waits for one message of the other
_SAID_EACH = 1.0  # seconds, after which one says that it is at work
_MAX_STATE = 1 << 31  # bytes: what stands in it besides bodies has some hundred bytes an entry
_MAX_AHEAD = 1 << 26  # the same, of bodies that go ahead, to who receives them


class PartialRow(Struct, array_like=True):
    """A publication whose descriptors have not all come; its descriptors follow those of all versions."""

    call: int
    publication: int
    request: bytes
    descriptors: int
    nbytes: int


class ConnectionRow(Struct, array_like=True):
    """A connection; `session` 0 is one that has not said hello."""

    session: int
    in_flight: int
    waiting_since: float | None
    queue: list[tuple[bytes, int, int, int]]  # payload, number of the token or -1, first and last descriptor
    partials: list[PartialRow]
    unsettled: UnsettledRow | None = None  # what it was asked to


class State(Struct, array_like=True):
    """All that moves, but for descriptors: they come as listener, connections, by token, by partial publication.
    Keepers of other versions read and write it too: new fields go last, with a default."""

    books: Books
    tokens: list[tuple[int, int]]  # number of descriptors, bytes
    connections: list[ConnectionRow]
    limits: Quotas | None = None  # those that were chosen, or the defaults; None: of a keeper that did not say
    claim_timeout: float | None = None  # the same
    pid: int = 0  # who hands over; 0: of a keeper that did not say
    lent: bool = False  # whether the listener is a service manager's


@dataclass(frozen=True, slots=True)
class Succession:
    """The limits before and after a takeover (None: an older version did not say); claims are in seconds.
    `pid` is 0 in another PID namespace; `command` started the keeper that was taken over, and is empty if unseen."""

    pid: int
    before: Quotas | None
    now: Quotas
    claims_before: float | None
    claims_now: float
    command: tuple[str, ...] = ()


_S = TypeVar("_S", bound=Struct)
_state = msgspec.msgpack.Decoder(State)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Not to collect cycles for the length of a block, that makes much and no garbage: it would be looked through for
    some again and again, which is a third of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Work:
    """Tells the other side now and then that there is progress, if it understands that."""

    def __init__(self, channel: Channel, *, is_heard: bool) -> None:
        self._channel = channel
        self._is_heard = is_heard
        self._since = time.monotonic()

    def __call__(self) -> None:
        if self._is_heard and time.monotonic() - self._since >= _SAID_EACH:
            self._channel.send(m.encode(m.Working()), timeout=PATIENCE)
            self._since = time.monotonic()


# -- the old keeper -------------------------------------------------------------------------------------------------


def hand_over(server: KeeperServer, connection: Connection, request: m.Takeover) -> None:
    """Give everything to the successor at the other end of `connection`; the loop stops meanwhile.
    With `precopy` the next part of the bodies goes first, and the successor asks again."""
    if connection.credentials.uid != os.geteuid():
        raise AccessDeniedError(
            f"only uid {os.geteuid()}, who runs this keeper, may take it over, not uid {connection.credentials.uid}"
        )
    if connection.session is not None and (connection.session.leases or connection.queue):
        raise ProtocolError("a connection that holds leases cannot take over")
    ahead = server.ahead.setdefault(connection, Ahead())
    if request.precopy:
        part = ahead.part(server.catalogue)
        if part:
            _send_bodies(server, connection, request.call, part)
            return
    # From here on it is no client any more: it is not among what moves.
    channel = Channel(socket.socket(fileno=os.dup(connection.sock.fileno())))
    server.giving(channel.fileno())
    connection.close(hang_up=False)
    server.paused = True
    try:
        if _give(server, channel, request, ahead):
            server.successor = True
            event_log.say("vram.keeper.handed_over", process__pid=channel.peer().pid)
            server.stop()
            return
    except Exception as error:  # noqa: BLE001  (whatever it is: this keeper has everybody's memory and must go on)
        event_log.gave_up_takeover(error)
        with contextlib.suppress(VramError, OSError):
            channel.send(m.encode(m.Abandoned(str(error)[:1000])), timeout=0)
    finally:
        channel.close()
    server.leaving(False)
    # Nothing was unregistered: the loop stood still, and goes on where it was.
    server.listener.sock.listen(1024)  # a successor that came this far had put its name on the socket
    pass_rights(server.listener.sock, False)
    server.paused = False


def _send_bodies(server: KeeperServer, connection: Connection, call: int, versions: list[Version]) -> None:
    head, bodies = join_bodies(versions)
    size = len(head) + sum(map(len, bodies))
    held = Held([_memory(b"".join([head, *bodies]))], size, server.dispose)
    connection.send(m.encode(m.Bodies(call, len(head), size)), held, 0, 1)
    held.drop()


def _memory(payload: bytes) -> int:
    """Return a memfd with these bytes."""
    memory = os.memfd_create("vram-takeover", os.MFD_CLOEXEC)
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(payload)
    except BaseException:
        os.close(memory)
        raise
    return memory


def _give(server: KeeperServer, channel: Channel, request: m.Takeover, ahead: Container[Version]) -> bool:
    """Return True once the successor serves, False if it died after Committed was sent; raise for anything else."""
    call = request.call
    if not request.goes_on:
        for sock in [server.listener.sock, *(stranger.sock for stranger in server.pending)]:
            pass_rights(sock, True)  # it would not do that itself
    payload, fds = _collect(server, ahead, _Work(channel, is_heard=request.patient))
    memory = _memory(payload)
    try:
        offer = m.HandOver(call, FORMAT, len(payload), len(fds), patient=True)
        channel.send(m.encode(offer), [memory], timeout=PATIENCE)
    finally:
        os.close(memory)
    parcels = Sender(len(fds))
    parcels.acknowledge(_hear(channel, m.Received).received)  # the state
    for part in parcels:
        channel.send(m.encode(m.Descriptors(call, part.start)), fds[part], timeout=PATIENCE)
        parcels.acknowledge(_hear(channel, m.Received).received)
    _hear(channel, m.Commit)
    server.leaving(True)
    try:
        channel.send(m.encode(m.Committed()), timeout=PATIENCE)
    except PeerGoneError:
        return False
    return await_serving(channel)


def await_serving(channel: Channel) -> bool:
    """Wait until the other side serves; return False once it is gone without that. The message stays to be read again.
    There is no deadline: a successor that got ``Committed`` may serve at any moment."""
    looks = 2  # of which one may only find that it has left something unread
    while looks:
        channel.brings_descriptors(None)
        payload = channel.peek(MAX_MESSAGE)
        if not payload:
            looks -= 1
        elif isinstance(m.decode_succession(payload), m.Serving):
            return True
        else:
            payload, fds = channel.recv(timeout=PATIENCE)
            _read_word(payload, fds, (m.Serving,))
            close_fds(fds)
    return False


@uncollected()
def _collect(
    server: KeeperServer, ahead: Container[Version], tell: Callable[[], None] = silent
) -> tuple[bytes, list[int]]:
    numbers: dict[Held, int] = {}

    def number(held: Held) -> int:
        return numbers.setdefault(held, len(numbers))

    books = save(server.catalogue, number, ahead, tell)
    unsettled = {} if server.service.settling is None else server.service.settling.waiting
    connections = [*server.pending, *server.connections.values()]
    rows = [
        ConnectionRow(
            0 if one.session is None else one.session.id,
            one.in_flight,
            one.waiting_since,
            [(payload, -1 if held is None else number(held), start, stop) for payload, held, start, stop in one.queue],
            [
                PartialRow(call, part.publication.id, m.encode(part.request), len(part.fds), part.nbytes)
                for call, part in one.partials.items()
            ],
            unsettled[one].row() if one in unsettled else None,
        )
        for one in connections
    ]
    tokens = [(len(held.fds), held.nbytes) for held in numbers]
    state = State(books, tokens, rows, server.quotas, server.catalogue.claim_timeout, os.getpid(), server.listener.lent)
    fds = [server.listener.sock.fileno(), *(one.sock.fileno() for one in connections)]
    for held in numbers:
        fds += held.fds
    for one in connections:
        for part in one.partials.values():
            fds += part.fds
    return msgspec.msgpack.encode(state), fds


# -- the new keeper -------------------------------------------------------------------------------------------------


def take_over(server: KeeperServer, given: Collection[str] = ()) -> Succession | None:
    """Fill `server` with all of the keeper at its path, which exits; return None if none runs there. Limits named in
    `given` hold from now on, all others move. Raises BusyError if that keeper serves on, PeerGoneError if it died."""
    with contextlib.ExitStack() as stack:
        chosen = (server.mode, server.gid) != (None, None)
        for left in reversed(range(GREETINGS)):
            try:
                permissions = Permissions(server.path) if chosen else None
                channel = stack.enter_context(open_channel(server.path, server.is_chosen, PATIENCE))
            except (PeerGoneError, NotFoundError):
                return None
            who = channel.peer()
            if who.uid != os.geteuid():
                raise AccessDeniedError(f"the keeper at {server.path} is of uid {who.uid}, not of uid {os.geteuid()}")
            command = _command(who.pid or 0)  # which is gone with it
            try:
                greet(channel, server.path, "successor", PATIENCE)
                break
            except HungUpError:  # a keeper that was killed: where another follows, it is there
                if not left:
                    raise
        _ask(channel, server.main_pid)
        state, fds, bodies, is_heard = _receive(channel, server.main_pid)
        try:
            before = state.limits
            now = server.quotas if before is None else _with(server.quotas, before, given)
            claims = server.catalogue.claim_timeout
            if state.claim_timeout is not None and "claim_timeout" not in given:
                claims = state.claim_timeout
            sockets = unpack(server, state, fds, now, claims, bodies, _Work(channel, is_heard=is_heard))
        except BaseException:
            close_fds(fds)
            raise
        try:
            if permissions:
                permissions.change(server.mode, server.gid)
            _commit(channel)
        except BaseException:
            _drop(server, sockets, permissions)
            raise
        _settle_in(server, sockets[0], lent=state.lent)
        server.taking(channel.fileno())
        with contextlib.suppress(PeerError):  # it died just now; it had let go
            channel.send(m.encode(m.Serving()), timeout=PATIENCE)
        server.taken()
    # Not who listened when this process connected: another may have taken over since, and this connection with it.
    pid = (state.pid or who.pid) if who.pid else 0
    return Succession(pid, before, now, state.claim_timeout, claims, command)


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


def _ask(channel: Channel, main_pid: int) -> None:
    request = m.Takeover(1, goes_on=True, precopy=True, patient=True, main_pid=main_pid)
    channel.send(m.encode(request), timeout=PATIENCE)


def _receive_bodies(channel: Channel, main_pid: int) -> tuple[Bodies, m.HandOver, list[int]]:
    """Take what went ahead and ask again, until the rest comes; return what is to be heard of that first."""
    bodies: dict[tuple[str, int], tuple[bytes, bytes]] = {}
    while True:
        said: m.Bodies | m.HandOver
        said, memory = _hear_with_fds(channel, m.HandOver, m.Bodies)
        if isinstance(said, m.HandOver):
            return bodies, said, memory
        try:
            if len(memory) != 1 or not said.head <= said.size <= _MAX_AHEAD:
                raise ProtocolError("bodies of entries without their memory")
            payload = _read(memory[0], said.size)
        finally:
            close_fds(memory)
        bodies.update(split_bodies(payload[: said.head], memoryview(payload)[said.head :]))
        _ask(channel, main_pid)


def _read(memory: int, size: int) -> bytes:
    with open(memory, "rb", closefd=False) as file:
        file.seek(0)
        return file.read(size)


def _receive(channel: Channel, main_pid: int = 0) -> tuple[State, list[int], Bodies, bool]:
    """Take everything; the last is whether it is heard that this process is at work."""
    bodies, offer, memory = _receive_bodies(channel, main_pid)
    try:
        if offer.format != FORMAT:
            raise UnsupportedError(
                "taking over", f"state of format {FORMAT}", f"format {offer.format}", "Update the older keeper"
            )
        if len(memory) != 1 or offer.size > _MAX_STATE:
            raise ProtocolError("a hand-over without its state")
        payload = _read(memory[0], offer.size)
    finally:
        close_fds(memory)
    try:
        with uncollected():
            state = _state.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the state of the running keeper is unreadable: {error}") from None
    fds = Collector(offer.total)
    try:
        channel.send(m.encode(m.Received(0)), timeout=PATIENCE)
        while True:
            if fds.is_complete:
                break
            part, came = _hear_with_fds(channel, m.Descriptors)
            try:
                fds.take(part.offset, came)
            finally:
                close_fds(came)  # of a part that was not taken
            channel.send(m.encode(m.Received(len(fds))), timeout=PATIENCE)
    except BaseException:
        close_fds(fds)
        raise
    return state, fds, bodies, offer.patient


@uncollected()
def unpack(
    server: KeeperServer,
    state: State,
    fds: list[int],
    quotas: Quotas,
    claim_timeout: float,
    bodies: Bodies,
    tell: Callable[[], None] = silent,
) -> list[socket.socket]:
    """Rebuild everything; return the sockets, the listener first. What is in `fds` afterwards is nobody's."""
    count = 1 + len(state.connections)
    partials = [row for connection in state.connections for row in connection.partials]
    expected = count + sum(number for number, _ in state.tokens) + sum(row.descriptors for row in partials)
    if len(fds) != expected:
        raise ProtocolError(f"{len(fds)} descriptors came for a state of {expected}")
    start = count

    def following(number: int) -> list[int]:
        nonlocal start
        start += number
        return fds[start - number : start]

    server.limit(quotas)  # before anything is counted
    tokens = [Held(following(number), nbytes, server.dispose, uses=0) for number, nbytes in state.tokens]

    def token(index: int) -> Held:
        held = tokens[index]
        held.keep()
        return held

    catalogue, publications = restore(
        state.books,
        token,
        server.catalogue.accounts.quotas,
        keeper_uid=server.catalogue.accounts.keeper_uid,
        nobody=server.catalogue.nobody,
        claim_timeout=claim_timeout,
        bodies=bodies,
        tell=tell,
    )
    sockets: list[socket.socket] = []
    try:
        for fd in fds[:count]:
            sockets.append(socket.socket(fileno=fd))
        made = [_connection(server, sock) for sock in sockets[1:]]
    except BaseException:
        for sock in sockets:
            sock.detach()  # `fds` still owns the numbers
        raise
    for connection, row in zip(made, state.connections, strict=True):
        connection.in_flight = row.in_flight
        connection.waiting_since = row.waiting_since
        for payload, index, start, stop in row.queue:
            connection.enqueue(payload, token(index) if index >= 0 else None, start, stop)
        for part in row.partials:
            partial = Partial(publications[part.publication], m.decode_request(part.request), server.now())
            partial.fds.take(0, following(part.descriptors))
            partial.nbytes = part.nbytes
            connection.partials[part.call] = partial
        server.add(connection)
        if row.session:
            connection.session = catalogue.sessions[row.session]
            server.connections[row.session] = connection
            if row.unsettled is not None:
                server.service.settle(connection, Unsettled.of(row.unsettled, connection.session))
        else:
            server.pending[connection] = None
    server.replace_catalogue(catalogue)
    fds.clear()
    return sockets


def _connection(server: KeeperServer, sock: socket.socket) -> Connection:
    sock.setblocking(False)
    return Connection(server, sock, peer_credentials(sock))


def _commit(channel: Channel) -> None:
    """Say that everything is here; return once this process is the one to serve."""
    channel.send(m.encode(m.Commit()), timeout=PATIENCE)
    with contextlib.suppress(PeerGoneError):  # the old keeper died after it gave us everything
        # Without a deadline: who has committed may be relied on at any moment, until it hears Abandoned.
        _hear(channel, m.Committed, for_ever=True)


def _settle_in(server: KeeperServer, listener: socket.socket, *, lent: bool) -> None:
    server.listen_on(Listener.adopt(server.path, listener, lent=lent))


def _drop(server: KeeperServer, sockets: list[socket.socket], permissions: Permissions | None) -> None:
    """The old keeper serves on: close our copies, leave the socket as it was, and say nothing to anybody."""
    if permissions:
        permissions.restore()
    server.close_everything()
    sockets[0].close()


# -- both -----------------------------------------------------------------------------------------------------------


def _hear(channel: Channel, kind: type[_S], for_ever: bool = False) -> _S:
    said, fds = _hear_with_fds(channel, kind, for_ever=for_ever)
    close_fds(fds)
    return said


def _hear_with_fds(channel: Channel, *kinds: type[_S], for_ever: bool = False) -> tuple[_S, list[int]]:
    while True:
        payload, fds = channel.recv(timeout=None if for_ever else PATIENCE)
        said = _read_word(payload, fds, kinds)
        if said is not None:
            return said, fds
        close_fds(fds)


def _read_word(payload: bytes, fds: list[int], kinds: tuple[type[_S], ...]) -> _S | None:
    """Return what was said, or None if that is only that the other is at work."""
    try:
        said = m.decode_succession(payload)
        if isinstance(said, (m.Working, m.Welcome)):  # or a greeting once more, of a keeper that follows one
            return None
        if isinstance(said, m.Abandoned):
            raise BusyError(f"the running keeper serves on: {said.why}")
        if isinstance(said, m.Recovered):
            raise BusyError("the running keeper was killed just now, and another goes on: take over from that one")
        if isinstance(said, m.Error):
            raise raised(said)
        if not isinstance(said, kinds):
            raise ProtocolError(f"{type(said).__name__} was said where {kinds[0].__name__} was due")
    except BaseException:
        close_fds(fds)
        raise
    return said
