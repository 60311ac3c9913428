"""The carrier: offers a keeper's entries to other nodes. It is an ordinary client; the keeper knows no network."""

from __future__ import annotations

import math
import os
import secrets
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from ..entries.attach import attach
from ..entries.keepers import check_flag, connect
from ..entries.reading import VERSION
from ..errors import (
    AccessDeniedError,
    BusyError,
    NotFoundError,
    PeerGoneError,
    ProtocolError,
    TornError,
    UnsupportedError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from ..lifetime import Owned, own, shielded, wait_for
from ..spec import check_timeout, printable
from . import messages as m
from .address import parse_address, place_of, read_key
from .connection import Connection
from .digests import check_installed
from .engine import Engine, Offering
from .server import Server
from .stock import Stock
from .swarm import SENDS, Swarm
from .tcp import TCP

if TYPE_CHECKING:
    from ..entries.lease import Lease
    from ..keeper.private import Keeper

__all__ = ["Carrier"]

PATIENCE = 60.0  # seconds that a reader may be silent, or not read
KEPT = 30.0  # seconds that a version stays leased for a reader whose connection broke
_COPIES = 2  # of what is updated in place that nobody pulls
_WAIT = 0.2  # seconds that a reader waits for others before it is told to ask again
_LONG = 5.0  # seconds of that after which the source sends a piece itself
_ANSWERS = 16  # of an engine that has something to forget once their connection is over: a reader takes one at a time


_Key = tuple[str, int, int]


def _updates(lease: Lease) -> int:
    """Return the number of the last update in place of what a lease is on; 0 for what is not updated so."""
    return 0 if lease._words is None else lease._words[VERSION]


class _Offered:
    """A version that is being pulled, with those who pull it; it owns the lease, and is used once it is ready."""

    stock: Stock
    swarm: Swarm
    offers: dict[str, Offering]  # by engine
    refusals: dict[str, str]  # engine: why it is not offered

    def __init__(self, lease: Lease, updates: int) -> None:
        self.lease = lease
        self.updates = updates  # in place, from when it was attached; then those that the copy has
        self.instance = secrets.token_bytes(16)
        self.changed = threading.Condition()
        self.connections: Counter[bytes] = Counter()  # by reader
        self.users = 0
        self.since = time.monotonic()
        self.idle_since = 0.0
        self.is_ready = False
        self._failure = ""  # of who was to get it ready
        self._getting_ready = threading.Lock()  # held for as long as a copy takes, for others who come meanwhile

    def get_ready(self, engines: Iterable[Engine], sends: float) -> None:
        """Have everything there that readers ask for."""
        with self._getting_ready:
            if self.is_ready:
                return
            if self._failure:
                raise BusyError(self._failure)
            try:
                self._get_ready(engines, sends)
            except BaseException as error:
                self._failure = str(error) or type(error).__name__
                self.lease.close()
                if isinstance(error, TornError):
                    raise BusyError(str(error)) from None
                raise
            self.is_ready = True

    def _get_ready(self, engines: Iterable[Engine], sends: float) -> None:
        self.stock = Stock(self.lease)
        self.offers, self.refusals = {}, {}
        for engine in engines:
            try:
                self.offers[engine.name] = engine.offer(self.stock.spans)
            except UnsupportedError as error:  # such memory; the others go on
                self.refusals[engine.name] = printable(str(error)[: m.MAX_WHY])
        self.swarm = Swarm(len(self.stock.pieces), sends)

    def opened(self) -> m.Opened:
        """Return what a reader is told of it."""
        lease, stock = self.lease, self.stock
        extents = tuple((span.offset, span.nbytes) for span in stock.spans)
        offers = {name: offering.data for name, offering in self.offers.items()}
        return m.Opened(
            lease.name, lease.version, stock.updates, self.instance, stock.nbytes, extents, stock.arrays, lease.meta,
            offers, self.refusals,
        )  # fmt: skip

    @property
    def key(self) -> _Key:
        """The name, the version, and the number of its last update."""
        return self.lease.name, self.lease.version, self.updates

    @property
    def content(self) -> str:
        """The digest of all of it, once those of its pieces are known."""
        return self.stock.content(m.layout_digest(self.opened()))

    def close(self) -> None:
        """Give everything back."""
        for offering in self.offers.values():
            offering.close()
        self.stock.close()


class Carrier(Owned):
    """Offers the entries of a keeper to readers on other nodes, until it is closed.

    Parameters
    ----------
    address : str
        Where to listen, such as ``"127.0.0.1:7070"``; port 0 chooses one.
    key : path-like, optional
        The file with the key that all nodes have in common, by default ``$VRAM_NODES_KEY``. Without one only loopback
        addresses are listened at, and only processes of this user are let in, by a key of this user's own.
    prefix : str
        Offer only entries whose names begin with this.
    names : sequence of str
        Other addresses at which readers reach it, ``HOST:PORT`` as they write them: names, and what ports are forwarded
        from. A reader that means none of these, nor the address in numbers that its connection has here, is refused:
        somebody passed it on. No other carrier with the same key may have one of them.
    engines : sequence of Engine, optional
        Engines besides tcp that can move bytes: at most 7, with names of at most 32 printable characters.
    deltas : bool
        Send readers that have the version before what changed since. Of each entry the version that was pulled last
        stays leased until 30 s after another one was pulled: it takes the memory of one version more.
    keeper : Keeper, str or PathLike, optional
        The keeper with the entries; see :func:`vram.attach`.

    Attributes
    ----------
    address : str
        Where it listens.
    has_named_key : bool
        Whether a key was named; if not, readers show this user's own.
    """

    __slots__ = (
        "_bases",
        "_closing",
        "_deltas",
        "_engines",
        "_keeper",
        "_lock",
        "_offered",
        "_prefix",
        "_sent",
        "_server",
        "address",
        "has_named_key",
    )  # fmt: skip

    @shielded
    def __init__(
        self,
        address: str,
        *,
        key: str | os.PathLike[str] | None = None,
        prefix: str = "",
        names: Sequence[str] = (),
        engines: Sequence[Engine] = (),
        deltas: bool = False,
        keeper: Keeper | str | os.PathLike[str] | None = None,
    ) -> None:
        check_installed()
        self._deltas = check_flag(deltas, "deltas")
        self._engines = (TCP, *engines)
        host, port = parse_address(address)
        places = [place_of(*parse_address(name)) for name in names]
        secret = read_key(key)
        self._keeper = connect(keeper).path
        self._prefix = prefix
        self._lock = threading.Lock()
        self._offered: dict[_Key, _Offered] = {}
        self._bases: dict[str, _Offered] = {}  # name: what was pulled last; that counts as a user
        self._closing = threading.Event()
        self._sent = 0
        self.has_named_key = bool(secret)  # else readers are on this machine, and to pass pieces on only costs time
        self._server = Server(host, port, secret, self._serve, places)
        self.address = self._server.address
        self._claim = own(lambda: f"carrier at {address}", self._end)
        threading.Thread(target=self._sweep, name="vram carrier", daemon=True).start()

    @property
    def sent(self) -> int:
        """Bytes of pieces that it has sent, by tcp, altogether."""
        return self._sent

    @shielded
    def wait(self, *, timeout: float | None = None) -> None:
        """Return when it is closed, by another thread.

        Parameters
        ----------
        timeout : float or None
            Seconds after which it returns in any case; None: never.
        """
        wait_for(self._closing, check_timeout(timeout))

    def _end(self) -> None:
        self._closing.set()
        self._server.close()
        with self._lock:
            bases = list(self._bases.values())
            self._bases.clear()
        for offered in bases:
            self._leave(offered)
        for key in list(self._offered):
            self._let_go(key)

    # -- what is offered ----------------------------------------------------------------------------------------------
    def _enter(self, name: str, version: int, updates: int) -> _Offered:
        """Return a version that is offered, which is used until :meth:`_leave`."""
        self._check_name(name)
        with self._lock:
            offered = self._offered.get((name, version, updates))
            if offered is not None:  # leased since before: it may have been replaced
                offered.users += 1
        if offered is None:
            offered = self._attached(name, version)
        try:
            offered.get_ready(self._engines, SENDS if self.has_named_key else math.inf)
        except BaseException:
            with self._lock:
                if self._offered.get(offered.key) is offered:
                    del self._offered[offered.key]
            raise
        with self._lock:
            if offered.updates != offered.stock.updates:  # once more before it was copied
                if self._offered.get(offered.key) is offered:
                    del self._offered[offered.key]
                offered.updates = offered.stock.updates
                self._offered.setdefault(offered.key, offered)
        return offered

    def _check_name(self, name: str) -> None:
        if not name.startswith(self._prefix):
            raise AccessDeniedError(f"only entries under {self._prefix!r:.80} are offered, not {name!r:.80}")

    def _attached(self, name: str, version: int) -> _Offered:
        try:
            lease = attach(name, version=version or None, keeper=self._keeper)
        except UsageError as error:  # a name that no entry can have
            raise NotFoundError(str(error)) from None
        updates = _updates(lease)
        with self._lock:
            offered = self._offered.get((name, lease.version, updates))
            if offered is None or offered.lease._client is not lease._client:  # of a keeper before, which has ended
                offered = self._offered[name, lease.version, updates] = _Offered(lease, updates)
            offered.users += 1
        if offered.lease is not lease:
            lease.close()
        return offered

    def _leave(self, offered: _Offered) -> None:
        key = offered.key
        with self._lock:
            offered.users -= 1
            offered.idle_since = time.monotonic()
            # A base that was replaced is kept for readers that have yet to hear of that; but of copies, of which each
            # update may take one, only the newest and the one before.
            is_unknown = not offered.users and self._offered.setdefault(key, offered) is not offered
            copies = sorted((one for one in self._offered if one[2] and one[:2] == key[:2]), reverse=True)[_COPIES:]
            over = [self._offered.pop(one) for one in copies if not self._offered[one].users]
        for one in over:
            one.close()
        if is_unknown:
            offered.close()
        elif self._closing.is_set():  # the end has not waited for this thread
            self._let_go(key)

    def _sweep(self) -> None:
        """Give back what nobody has pulled for a while, and the bases of names that are gone."""
        while not self._closing.wait(KEPT / 10):
            now = time.monotonic()
            for key, offered in list(self._offered.items()):
                # The source of a copy can have been written to since: the next reader gets another.
                if now - offered.idle_since > KEPT:
                    self._let_go(key)
            for name, base in list(self._bases.items()):
                if not self._is_published(name):
                    with self._lock:
                        was_base = self._bases.get(name) is base
                        if was_base:
                            del self._bases[name]
                    if was_base:
                        self._leave(base)

    def _is_published(self, name: str) -> bool:
        """Whether a name has a current version, as far as the keeper can be asked."""
        try:
            return any(row.is_current for row in connect(self._keeper).versions(name))
        except NotFoundError:
            return False
        except VramError:  # another keeper may go on
            return True

    def _let_go(self, key: _Key) -> None:
        with self._lock:
            offered = self._offered.get(key)
            if offered is None or offered.users > (self._bases.get(key[0]) is offered):
                return
            del self._offered[key]
            is_base = offered.users
        if not is_base:
            offered.close()

    def _pulled(self, offered: _Offered) -> None:
        """Keep a version that a reader has, for deltas from it to the next one."""
        if not self._deltas or (offered.stock.is_copy and not offered.updates):
            return
        name = offered.lease.name
        with self._lock:
            before = self._bases.get(name)
            if self._closing.is_set() or (before is not None and before.since >= offered.since):
                return  # also where a slow reader comes to the end of an older one
            self._bases[name] = offered
            offered.users += 1
        if before is not None:
            self._leave(before)

    def _enter_base(self, asked: m.Open, offered: _Offered) -> tuple[_Offered | None, str]:
        """Return what a reader has, which is used until :meth:`_leave`; None and why, if there are no deltas to it."""
        if not self._deltas:
            return None, "the carrier sends no deltas (vram carry --deltas does)"
        with self._lock:
            key = asked.name, asked.base_version, asked.base_updates
            base = self._bases.get(asked.name)
            if base is None or base.key != key:
                base = self._offered.get(key)
            if base is None or not base.is_ready:
                return None, f"the carrier does not have version {asked.base_version} any more"
            base.users += 1
        why = ""
        if not base.stock.has_layout_of(offered.stock):
            why = f"the arrays lie elsewhere than in version {asked.base_version}"
        elif base.content != asked.base.hex():
            why = f"the carrier does not know the version {asked.base_version} that the reader has"
        if why:
            self._leave(base)
        return None if why else base, why

    # -- a connection -------------------------------------------------------------------------------------------------
    def _serve(self, connection: Connection) -> None:
        """Answer one reader, in a thread of its own."""
        session = _Session(self, connection)
        try:
            while not self._closing.is_set():
                request = connection.receive(PATIENCE)
                try:
                    session.answer(request)
                except VramError as error:
                    connection.send(m.refusal(error), PATIENCE)
                    if isinstance(error, ProtocolError):
                        raise
        finally:
            session.end()


class _Session:
    """Versions that one connection has opened."""

    def __init__(self, carrier: Carrier, connection: Connection) -> None:
        self._carrier, self._connection = carrier, connection
        self._offered: _Offered | None = None
        self._base: _Offered | None = None
        self._base_content = b""
        self._reader = b""
        self._waits_since: float | None = None
        self._given: int | None = None  # the piece that this connection is getting
        self._answers: dict[str, deque[bytes]] = {}  # by engine

    def answer(self, request: m.Message) -> None:
        """Answer a request. Raises VramError to refuse it."""
        say, offered = self._connection.send, self._offered
        if isinstance(request, m.Open):
            say(self._open(request), PATIENCE)
        elif isinstance(request, m.Watch):
            say(self._watch(request), PATIENCE)
        elif offered is None:
            raise ProtocolError(f"{type(request).__name__} before anything was opened")
        elif isinstance(request, m.Next):
            say(self._next(offered, request), PATIENCE)
        elif isinstance(request, m.Fetch):
            self._send(offered, request)
        elif isinstance(request, m.Digests):
            numbers = range(request.first, min(request.first + m.AT_ONCE, len(offered.stock.pieces)))
            say(m.DigestList(tuple(offered.stock.digest(number) for number in numbers)), PATIENCE)
            if numbers.stop == len(offered.stock.pieces):  # it has all of it already, or some
                self._carrier._pulled(offered)
        elif isinstance(request, m.Ask) and request.engine in offered.offers:
            offering = offered.offers[request.engine]
            answer = offering.answer(request.data)
            if answer and hasattr(offering, "forget"):
                self._answers.setdefault(request.engine, deque(maxlen=_ANSWERS)).append(answer)
            say(m.Answer(answer), PATIENCE)
        else:
            raise ProtocolError(f"{request!r:.80} is asked of no carrier that offers this")

    def _open(self, request: m.Open) -> m.Opened:
        if self._offered is not None:
            raise ProtocolError("a connection opens one entry")
        offered = self._carrier._enter(request.name, request.version, request.updates)
        opened = offered.opened()
        if request.layout and request.layout != m.layout_digest(opened):
            self._carrier._leave(offered)
            raise NotFoundError(f"{request.name!r} version {request.version} is another one than it was")
        self._offered, self._reader = offered, request.puller
        with offered.changed:
            offered.connections[self._reader] += 1
            if offered.connections[self._reader] == 1:
                have = int.from_bytes(request.have, "little")
                has = (number for number in range(len(offered.stock.pieces)) if have >> number & 1)
                # Others get pieces from it at its own host, and only among those who have the key.
                is_own = request.serves.rpartition(":")[0] == self._connection.where.rpartition(":")[0]
                offered.swarm.join(self._reader, request.serves if is_own and self._carrier.has_named_key else "", has)
                offered.changed.notify_all()
        if not request.base:
            return opened
        self._base, why = self._carrier._enter_base(request, offered)
        self._base_content = request.base
        return msgspec.structs.replace(opened, whole=why)

    def _next(self, offered: _Offered, request: m.Next) -> m.Direction:
        until = time.monotonic() + _WAIT
        with offered.changed:
            if self._given is not None:
                end = offered.swarm.got if request.arrived else offered.swarm.failed
                end(self._reader, self._given)
                self._given = None
                offered.changed.notify_all()
            while True:
                if offered.swarm.is_done(self._reader):
                    self._carrier._pulled(offered)
                    return m.Finished(not offered.swarm.are_done)
                now = time.monotonic()
                if self._waits_since is None:
                    self._waits_since = now
                given = offered.swarm.next(self._reader, insist=now - self._waits_since > _LONG)
                if given is not None:
                    self._waits_since = None
                    self._given = given.number
                    break
                if now >= until:
                    return m.Wait()
                offered.changed.wait(until - now)
        return m.Assigned(given.number, offered.stock.digest(given.number), given.peer)

    def _send(self, offered: _Offered, request: m.Fetch) -> None:
        pieces, number, base = offered.stock.pieces, request.number, self._base
        if number >= len(pieces):
            raise ProtocolError(f"piece {number} of {len(pieces)}")
        nbytes = pieces[number].nbytes
        delta = None
        if base is not None and request.base == self._base_content:
            delta = offered.stock.delta(number, base.stock)
        if delta is None:
            self._connection.send(m.PieceHead(number, nbytes), PATIENCE)
            offered.stock.send(number, self._connection, PATIENCE)
        else:
            nbytes = len(delta)
            self._connection.send(m.PieceHead(number, pieces[number].nbytes, nbytes), PATIENCE)
            self._connection.send_bytes(memoryview(delta), PATIENCE)
        with self._carrier._lock:
            self._carrier._sent += nbytes

    def _watch(self, request: m.Watch) -> m.Newest:
        """Return the current version once it is another one or updated, time is up, or the reader has gone."""
        carrier, until = self._carrier, time.monotonic() + request.seconds
        carrier._check_name(request.name)
        while not carrier._closing.is_set():
            left = max(0.0, until - time.monotonic())
            try:
                with attach(request.name, timeout=min(left, _WAIT), keeper=carrier._keeper) as lease:
                    updates = _updates(lease)
                    if (lease.version, updates) != (request.version, request.updates):
                        return m.Newest(lease.version, updates)
                    poll = select.poll()
                    poll.register(self._connection, select.POLLRDHUP)
                    if updates:
                        is_updated = self._await_update(lease, updates, until, poll)
                    else:
                        poll.register(lease, select.POLLIN)
                        poll.poll(left * 1000)
                        is_updated = lease.is_stale()
                    if not is_updated or time.monotonic() >= until:
                        return m.Newest(lease.version, updates)
            except (NotFoundError, WaitTimeoutError):
                if not left:
                    break
        return m.Newest(0)

    def _await_update(self, lease: Lease, updates: int, until: float, poll: select.poll) -> bool:
        """Whether a lease was updated, or replaced, before a time, and while the reader is there."""
        while (left := until - time.monotonic()) > 0 and not poll.poll(0):
            try:
                lease.wait(newer_than=updates, timeout=min(left, _WAIT))
                return True
            except WaitTimeoutError:
                continue
            except NotFoundError:
                return True
            except (TornError, PeerGoneError):  # nothing to be had now; whoever publishes it anew is heard of here
                if lease.is_stale():
                    return True
                poll.poll(min(left, _WAIT) * 1000)
        return False

    def end(self) -> None:
        """The connection is over: what it was getting, others may get."""
        offered = self._offered
        if offered is None:
            return
        try:
            for name, answers in self._answers.items():  # engines take back what they gave to this reader
                cast("Any", offered.offers[name]).forget(tuple(answers))
        finally:
            with offered.changed:
                if self._given is not None:
                    offered.swarm.failed(self._reader, self._given)
                offered.connections[self._reader] -= 1
                if not offered.connections[self._reader]:
                    del offered.connections[self._reader]
                    offered.swarm.leave(self._reader)
                offered.changed.notify_all()
            self._carrier._leave(offered)
            if self._base is not None:
                self._carrier._leave(self._base)
