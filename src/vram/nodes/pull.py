"""The transfer of one version: connections that pieces come over, checked one by one, until all of them are here.

The state of a connection ends with it; pieces that have arrived and are right stay. Each thread has a connection of its
own to the carrier, asks it for one piece after the other and from whom to get it, and makes the connection anew when it
broke.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from ..arrays import Array
from ..arrays.views import close_when_unused
from ..errors import (
    BusyError,
    NotFoundError,
    PeerError,
    PeerGoneError,
    ProtocolError,
    UnsupportedError,
    VramError,
    WaitTimeoutError,
)
from ..lifetime import let_in, waiting
from ..memory import Region
from ..spec import HOST, printable
from . import messages as m
from .connection import Connection, connect
from .delta_engine import NO_BASE, Base, Deltas
from .digests import content, digest
from .engine import Engine, Reading, Span
from .messages import Piece
from .server import Server
from .stock import host_view
from .tcp import TCP

if TYPE_CHECKING:
    from typing import Self

_SLOWEST = 1 << 20  # bytes a second that a piece is waited for, besides the timeout
_TRIES = 3  # times that a piece may come wrong from the carrier; wrong deltas after which no more are asked for
_KEPT = 8  # what fraction of a piece a delta may be that is kept for other readers
_FIRST_PAUSE, _LAST_PAUSE = 0.02, 1.0  # seconds between two tries to reach a carrier
_GIVING = 10.0  # seconds that another reader may be silent, or not read
_LINGER = 10.0  # seconds that others are waited for, once all is here
_QUIET = 1.0  # seconds without a request after which nobody is expected any more
_BUSY = 0.1  # seconds before a piece is asked for again for which an engine had no room
_LOOK = 0.1  # seconds between two questions whether they still lack something
_LEAST = 2.0  # seconds that whoever listens has to answer, where nobody waits for anything
_LONGEST = 60.0  # seconds of silence after which a connection is made anew, however long all may take
_PEERS = 16  # connections to other readers that a thread keeps
_CONNECT = 5.0  # seconds of one try to reach somebody, and that another reader has to answer, at most


class ReplacedError(NotFoundError):
    """The version that was begun is not to be had any more: the entry was published anew, or removed."""


class Pull:
    """The transfer of one version (0: the current one) into memory of this process, within a ``with`` block.
    `base` is what is here.
    `timeout` is seconds without progress, `rates` in bytes a second; `why` has by engine why it is unused or slow."""

    def __init__(
        self,
        address: str,
        key: bytes,
        name: str,
        version: int,
        *,
        timeout: float | None,
        engines: Sequence[Engine],
        share: bool,
        base: Base = NO_BASE,
    ) -> None:
        self._address, self._key, self._name, self._version = address, key, name, version
        self._updates = 0
        self._timeout = math.inf if timeout is None else timeout
        self._share = share
        self._engines = {engine.name: engine for engine in (*engines, TCP)}
        self._reader = secrets.token_bytes(16)
        self._reaching = threading.Lock()  # one connection is made at a time; held over calls that wait
        self._links: dict[Connection, dict[str, Reading]] = {}  # and what engines read over each, by engine
        self._first: Connection | None = None
        self._arrived: bool | None = None  # what is to be said next on the first connection
        self._is_over = False
        self._failure: BaseException | None = None
        self._broken: VramError | None = None  # the last error of a connection since a piece arrived
        self._progress = time.monotonic()
        self._pieces: tuple[Piece, ...] = ()
        self._done: set[int] = set()
        self._busy: set[int] = set()  # pieces that some thread writes to
        self._changed = threading.Condition()
        self._digests: dict[int, bytes] = {}  # of what is done
        self._wrong: Counter[int] = Counter()  # piece: how often it came wrong from the carrier
        self._others_lack = False
        self._base = base
        self._deltas: Deltas | None = None
        self._packed: dict[int, bytearray] = {}  # deltas that came, by piece
        self._torn: set[int] = set()  # pieces whose deltas were wrong
        self._came_whole = 0  # pieces in place of deltas that were asked for
        self._layout = self._instance = b""
        self._offers: dict[str, bytes] = {}
        self._region: Region | None = None
        self._whole: tuple[Array, memoryview] | None = None
        self._server: Server | None = None  # gives pieces to other readers
        self._giving = 0
        self._gave = time.monotonic()
        self.nbytes = self.from_peers = self.delta_bytes = self.reconnected = 0
        self.seconds = 0.0  # that filling took
        self.engine = ""
        self.rates: dict[str, float] = {}
        self.why: dict[str, str] = {}

    # -- the whole ----------------------------------------------------------------------------------------------------
    def open(self) -> m.Opened:
        """Reach the carrier, and return what it offers."""
        self._first, opened = self._reach()
        return opened

    def use_deltas(self, keeper: str, why_not: str, region: Region | None = None) -> None:
        """Have what a keeper here has, or a region, as the base of deltas, if the carrier knows it."""
        if not self._base[2] or why_not:
            return
        try:
            self._deltas = Deltas(self._name, self._base[2], keeper, region)
        except VramError as error:
            self.why["delta"] = printable(str(error))

    def fill(self, region: Region, streams: int) -> None:
        """Fill a region of the host or of a GPU, which this object closes from now on.
        Raises ReplacedError if the version went while the connection was broken."""
        began = time.monotonic()
        self._region = region
        if region.location == HOST:
            self._whole = host_view(region)
        self._choose()
        self._progress = time.monotonic()
        while missing := len(self._pieces) - len(self._done):
            self._in_threads(min(streams, missing))
            if missing := len(self._pieces) - len(self._done):
                # A connection broke, and the carrier has yet to hear that what it was to bring is not coming; or some
                # of what it takes for here was found to be of something else: it is told anew what is.
                self._check_progress(
                    self._broken
                    or ProtocolError(f"{self._address} says that all was sent, and {missing} pieces are missing")
                )
                self._reader = secrets.token_bytes(16)
                waiting(time.sleep, _FIRST_PAUSE)
        self.seconds = time.monotonic() - began
        if self._deltas is not None:  # it holds a version that is about to be replaced
            self._deltas.close()
        if self._torn:
            self.why["delta"] = f"{len(self._torn)} of {len(self._pieces)} deltas were wrong: the pieces came whole"
        elif self._deltas is not None and self.engine != TCP.name:
            self.why["delta"] = f"{self.engine} moves whole pieces"
        elif self._came_whole:
            said = f"{self._came_whole} of {len(self._pieces)} pieces came whole"
            why = "their deltas are more than half as long, or another reader gave them"
            self.why.setdefault("delta", f"{said}: {why}")

    def arrived(self) -> int:
        """Return how many bytes are here and right."""
        return sum(self._pieces[number].nbytes for number in tuple(self._done))

    def content(self) -> str:
        """Return what two replicas have in common exactly if their layout and their bytes are the same."""
        return content(self._layout, [self._digests[piece.number] for piece in self._pieces])

    def linger(self) -> None:
        """Go on giving pieces to readers that get them from here, as long as any lack some; for 10 s at most."""
        until = time.monotonic() + _LINGER
        links = list(self._links)
        if self._server is None or not links:
            return
        with contextlib.suppress(VramError):
            while self._others_lack and time.monotonic() < until:
                if not self._giving and time.monotonic() - self._gave > _QUIET:
                    return
                waiting(time.sleep, _LOOK)
                given = links[0].request(m.Next(), m.Direction, self._patience)
                self._others_lack = isinstance(given, m.Finished) and given.others

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            self._drop(link)
        if self._deltas is not None:
            self._deltas.close()
        if self._whole is not None:
            whole, view = self._whole
            self._whole = None
            view.release()
            whole.close()
        if self._region is not None:
            close_when_unused(self._region)

    # -- threads ------------------------------------------------------------------------------------------------------
    def _in_threads(self, count: int) -> None:
        """Get pieces until the carrier has none for us any more."""
        threads = [threading.Thread(target=self._work, name="vram replicate", daemon=True) for _ in range(count)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive() and not self._is_over:
                    thread.join(_LOOK)
                    let_in()
        except BaseException:
            self._is_over = True
            raise
        finally:
            while any(thread.is_alive() for thread in threads):  # it is over: they are woken
                for link in list(self._links):
                    link.cut()
                time.sleep(0.02)
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        buffer = memoryview(b"") if self._whole is not None else memoryview(bytearray(m.PIECE))
        peers: dict[str, Connection] = {}
        with self._changed:
            link, self._first = self._first, None
        arrived = None if link is None else self._arrived
        try:
            is_through = False
            while not self._is_over and not is_through:
                try:
                    if link is None:
                        link, _ = self._reach()
                    # It stays for as long as others may be sent here: with the last of them we are forgotten.
                    is_through = self._converse(link, arrived, buffer, peers)
                except (PeerGoneError, WaitTimeoutError) as error:
                    if link is not None:
                        self._drop(link)
                    link, arrived, self._broken = None, None, error
                    self._check_progress(error)
                    self.reconnected += 1
        except BaseException as error:  # noqa: BLE001  (raised by whoever waits for the threads)
            with self._changed:
                if self._failure is None and not self._is_over:
                    self._failure = error
                self._is_over = True
        finally:
            for peer in peers.values():
                self._drop(peer)

    def _converse(
        self, link: Connection, arrived: bool | None, buffer: memoryview, peers: dict[str, Connection]
    ) -> bool:
        """Get one piece after the other, until there is none: then return True."""
        while not self._is_over:
            if time.monotonic() - self._progress > self._patience + m.PIECE / _SLOWEST:
                raise WaitTimeoutError(f"{self._address} has given nothing for {self._patience:g} s")
            given = link.request(m.Next(arrived), m.Direction, self._patience)
            arrived = None
            if isinstance(given, m.Finished):
                self._others_lack = given.others
                return True
            if isinstance(given, m.Assigned):
                arrived = False
                try:
                    arrived = self._get(link, given, buffer, peers)
                except BusyError:  # other readers have what it takes: asked again, for as long as anything comes
                    time.sleep(_BUSY)
        return False

    # -- a connection to the carrier ----------------------------------------------------------------------------------
    @property
    def _patience(self) -> float:
        return min(max(self._timeout, _LEAST), _LONGEST)

    def _check_progress(self, error: VramError) -> None:
        """Raise an error if nothing has come for too long."""
        if time.monotonic() - self._progress >= self._timeout:
            raise error

    def _reach(self) -> tuple[Connection, m.Opened]:
        """Connect to the carrier and open the entry, as soon as there is one."""
        pause = _FIRST_PAUSE
        while True:
            try:
                with self._reaching:
                    return self._open()
            except (PeerGoneError, WaitTimeoutError) as error:
                self._check_progress(error)
            if self._is_over:
                raise PeerGoneError(f"{self._address} is reached by nobody any more")
            waiting(time.sleep, pause)
            pause = min(2 * pause, _LAST_PAUSE)

    def _open(self) -> tuple[Connection, m.Opened]:
        link = self._connect(self._address, min(self._patience, _CONNECT), self._patience)
        try:
            if self._share and self._key and self._server is None:
                self._server = Server(link.here, 0, self._key, self._give)
            serves = "" if self._server is None else self._server.address
            have = sum(1 << number for number in tuple(self._done)).to_bytes(-(-len(self._pieces) // 8), "little")
            request = m.Open(
                self._name, self._version, self._updates, self._reader, self._layout, serves, have, *self._base
            )
            try:
                opened = link.request(request, m.Opened, self._patience)
            except NotFoundError as error:
                if self._layout:
                    raise ReplacedError(str(error)) from None
                raise
            if not self._layout:
                self._begin(opened)
            elif m.layout_digest(opened) != self._layout:
                raise ReplacedError(f"{self._address} has another {self._name!r} than it had")
            if opened.instance != self._instance:
                self._compare(link)
                self._instance = opened.instance
            self._offers = opened.offers
            if opened.whole:
                self.why["delta"] = printable(opened.whole)
        except BaseException:
            self._drop(link)
            raise
        return link, opened

    def _begin(self, opened: m.Opened) -> None:
        if opened.name != self._name or self._version not in (0, opened.version):
            raise ProtocolError(
                f"{self._address} offers {opened.name!r} version {opened.version}, which is another one"
            )
        self._pieces = m.check_layout(opened)
        self.nbytes = sum(piece.nbytes for piece in self._pieces)
        self._version, self._updates, self._layout = opened.version, opened.updates, m.layout_digest(opened)
        for name in self._engines.keys() - opened.offers.keys():
            self.why[name] = printable(opened.refusals.get(name, "the carrier does not have it"))

    def _compare(self, link: Connection) -> None:
        """Forget what is not of what is offered now: the carrier may have begun anew, and its keeper too."""
        if not self._done:
            return
        digests = link.digests(len(self._pieces), self._patience)
        for number in tuple(self._done):
            if digests[number] != self._digests[number]:
                self._done.discard(number)

    def _connect(self, address: str, timeout: float, pause: float) -> Connection:
        link = connect(address, self._key, timeout, pause=pause)
        self._links[link] = {}
        return link

    def _drop(self, link: Connection) -> None:
        try:
            for reading in self._links.pop(link).values():
                reading.close()
        finally:
            link.close()

    def _reading(self, link: Connection, engine: Engine) -> Reading:
        """Return an engine at work on a connection."""
        there = self._links[link]
        if engine.name not in there:
            there[engine.name] = engine.open(self._offers.get(engine.name, b""), link)
        return there[engine.name]

    # -- a piece ------------------------------------------------------------------------------------------------------
    def _choose(self) -> None:
        """Choose the engine that moves the bytes: of several the one that moves a piece of this fastest."""
        usable = [name for name in self._engines if name in self._offers]
        if not usable:
            raise UnsupportedError("a replica", f"one of the engines {list(self._offers)}", f"{list(self._engines)}")
        self.engine = usable[-1]
        if len(usable) == 1:
            return
        link = cast("Connection", self._first)
        buffer = memoryview(bytearray(m.PIECE))
        # Each twice, and by the better of the two: what is read first makes connections, and opens memory of GPUs.
        for name in (*usable, *usable):
            if self.rates.get(name) != 0.0 and not self._measure(link, name, buffer):
                break
        # Where nothing was measured: the last one is tcp.
        self.engine = max(reversed(usable), key=lambda name: self.rates.get(name, 0.0))

    def _measure(self, link: Connection, name: str, buffer: memoryview) -> bool:
        """Get a piece by an engine and note its rate; return False if the carrier has no piece left for this reader.
        A piece much smaller than others measures the round trip instead of the rate, and another one follows."""
        largest = max((piece.nbytes for piece in self._pieces), default=0)
        self.engine = name
        while isinstance(given := link.request(m.Next(self._arrived), m.Direction, self._patience), m.Assigned):
            nbytes, rate = self._piece(given.number).nbytes, 0.0
            try:
                self._reading(link, self._engines[name])  # what it takes to begin is not of its rate
                began = time.perf_counter()
                if self._get(link, m.Assigned(given.number, given.digest), buffer, {}):
                    rate = nbytes / (time.perf_counter() - began)
            except (PeerError, UnsupportedError, BusyError) as error:  # not chosen; the result says 0 bytes a second
                self.why[name] = printable(str(error))
            self._arrived = bool(rate)
            if not rate or nbytes > largest // 2:
                self.rates[name] = rate and max(self.rates.get(name, 0.0), rate)
                return True
        self._arrived = None
        return False

    def _piece(self, number: int) -> Piece:
        if number >= len(self._pieces):
            raise ProtocolError(f"{self._address} names piece {number} of {len(self._pieces)}")
        return self._pieces[number]

    def _get(self, link: Connection, given: m.Assigned, buffer: memoryview, peers: dict[str, Connection]) -> bool:
        """Get a piece, and say whether it is here and right."""
        piece = self._piece(given.number)
        # A carrier that lost a connection gives its pieces to others of ours: what one thread has checked, no other one
        # may be writing to.
        with self._changed:
            free = self._changed.wait_for(lambda: piece.number not in self._busy, self._patience)
            if not free or piece.number in self._done:
                return free
            self._busy.add(piece.number)
        try:
            return self._get_now(link, piece, given, buffer, peers)
        finally:
            with self._changed:
                self._busy.discard(piece.number)
                self._changed.notify_all()

    def _get_now(
        self, link: Connection, piece: Piece, given: m.Assigned, buffer: memoryview, peers: dict[str, Connection]
    ) -> bool:
        if not given.peer:
            patience = self._patience + piece.nbytes / _SLOWEST
            if self._read_or_patch(link, self._engines[self.engine], piece, given.digest, buffer, patience):
                return True
            self._wrong[piece.number] += 1
            if self._wrong[piece.number] >= _TRIES:
                raise ProtocolError(f"piece {piece.number} from {self._address} was wrong {_TRIES} times")
            return False
        peer, patience = peers.pop(given.peer, None), min(self._patience, _CONNECT)
        with contextlib.suppress(VramError):  # whatever a reader does wrong, the carrier has it too
            if peer is None:
                peer = self._connect(given.peer, patience, patience)
            if self._read_or_patch(peer, TCP, piece, given.digest, buffer, patience + piece.nbytes / _SLOWEST):
                self.from_peers += piece.nbytes
                peers[given.peer] = peer  # behind the others: the one that was of use longest ago goes
                if len(peers) > _PEERS:
                    self._drop(peers.pop(next(iter(peers))))
                return True
        if peer is not None:
            self._drop(peer)
        return False

    def _read_or_patch(
        self, link: Connection, engine: Engine, piece: Piece, expected: bytes, buffer: memoryview, patience: float
    ) -> bool:
        """Fill a piece by a delta where there may be one, or else whole."""
        if engine is TCP and self._deltas is not None and len(self._torn) < _TRIES:
            if self._read(link, self._deltas, piece, expected, buffer, patience):
                return True
            self._torn.add(piece.number)
        return self._read(link, engine, piece, expected, buffer, patience)

    def _read(
        self, link: Connection, engine: Engine, piece: Piece, expected: bytes, buffer: memoryview, patience: float
    ) -> bool:
        """Have an engine fill a piece, and check it."""
        region = cast("Region", self._region)
        reading = self._reading(link, engine)
        address = region.address + piece.offset
        with self._view(piece, buffer) as view:
            if self._whole is not None:
                reading.read(piece, Span(piece.offset, address, piece.nbytes, HOST, view), patience)
            elif engine.reaches(region.location):
                reading.read(piece, Span(piece.offset, address, piece.nbytes, region.location, None), patience)
                region.driver.copy_out(view, address)
            else:
                reading.read(piece, Span(piece.offset, 0, piece.nbytes, HOST, view), patience)
                region.driver.copy_in(address, view)
            found = digest(view)
        if found != expected:
            return False
        if why := getattr(reading, "why", ""):
            self.why[engine.name] = printable(why)
        packed = getattr(reading, "packed", None)
        with self._changed:
            if engine is self._deltas and packed is None:
                self._came_whole += 1
            if packed is not None:
                self.delta_bytes += len(packed)
                # Others get it from here, but what takes much memory: for them the piece is here as well.
                if self._server is not None and len(packed) <= piece.nbytes // _KEPT:
                    self._packed[piece.number] = packed
            self._digests[piece.number] = found
            self._done.add(piece.number)
            self._progress, self._broken = time.monotonic(), None
        return True

    # -- other readers ------------------------------------------------------------------------------------------------
    def _give(self, connection: Connection) -> None:
        """Give another reader pieces that are here and right, of which it checks the digests."""
        while True:
            asked = connection.hear(m.Fetch, _GIVING)
            number = asked.number
            with self._changed:
                self._giving += 1
            try:
                if self._region is None or number not in self._done:
                    connection.send(m.refusal(NotFoundError(f"piece {number} is not here")), _GIVING)
                    continue
                piece = self._pieces[number]
                if asked.base and asked.base == self._base[2] and (packed := self._packed.get(number)) is not None:
                    connection.send(m.PieceHead(number, piece.nbytes, len(packed)), _GIVING)
                    connection.send_bytes(memoryview(packed), _GIVING)
                    continue
                with self._view(piece, memoryview(bytearray(0 if self._whole else piece.nbytes))) as data:
                    if self._whole is None:
                        self._region.driver.copy_out(data, self._region.address + piece.offset)
                    connection.send(m.PieceHead(number, piece.nbytes), _GIVING)
                    connection.send_bytes(data, _GIVING)
            finally:
                with self._changed:
                    self._giving -= 1
                    self._gave = time.monotonic()

    def _view(self, piece: Piece, buffer: memoryview) -> memoryview:
        """Return the bytes of a piece on the host; of a GPU's, where they may be staged in a buffer."""
        if self._whole is not None:
            return self._whole[1][piece.offset : piece.offset + piece.nbytes]
        return buffer[: piece.nbytes]
