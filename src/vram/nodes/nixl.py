"""The engine of NVIDIA's NIXL: one-sided reads over UCX, by RDMA, shared memory or TCP, also of GPU memory.

Memory that cannot be registered, and GPU memory at first, goes through a ring of four buffers of 16 MiB. Agents meet
over the connection to the carrier, without NIXL's listener and without pickled descriptors. NIXL
neither encrypts nor authenticates, and UCX writes to any address the other end names: both ends must trust each other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from .. import driver as drivers
from ..errors import (
    BusyError,
    DriverError,
    PeerError,
    PeerGoneError,
    ProtocolError,
    UnsupportedError,
    UsageError,
    WaitTimeoutError,
)
from ..lifetime import waiting
from ..memory import Region
from ..memory.foreign import create_legacy
from ..spec import HOST, Location, printable
from . import messages as m
from .connection import Connection
from .engine import Offering, Reading, Span
from .messages import Piece
from .stock import host_view

NAME: Final = "nixl"
SLOTS = 4  # buffers of the ring, of a piece each
_FIRST = 10.0  # seconds for the first bytes, after which this engine is said not to reach the other node
_PROBE = 4096  # bytes of them
_SLOT_WAIT = 5.0  # seconds that a reader waits for a buffer
_PAUSE, _LONGEST_PAUSE = 100e-6, 1e-3  # seconds between two looks at a transfer: NIXL has no call that waits
_MAX_SPANS = 4096
_DEVICES = "UCX_NET_DEVICES"

_T = TypeVar("_T")
_Number = Annotated[int, Meta(ge=0, lt=2**62)]


# -- what the two halves say to each other -----------------------------------------------------------------------------
class _Place(Struct, frozen=True, array_like=True):
    """Bytes of the replica, and where the source has them registered."""

    offset: _Number
    address: _Number
    nbytes: _Number
    device: Annotated[int, Meta(ge=0, lt=1024)]


class _Offered(Struct, frozen=True):
    """For the reader: NIXL's own description of the source, and its memory."""

    metadata: Annotated[bytes, Meta(min_length=1, max_length=1 << 19)]
    memory: Literal["DRAM", "VRAM"]
    places: Annotated[tuple[_Place, ...], Meta(min_length=1, max_length=_MAX_SPANS)]
    is_ring: bool = False  # whether these are buffers of a ring, a piece each
    why: Annotated[str, Meta(max_length=m.MAX_WHY)] = ""  # it is offered in another way than the best


class _Stage(Struct, frozen=True, tag=True):
    """Copy these bytes of the replica into a buffer of the ring."""

    offset: _Number
    nbytes: Annotated[int, Meta(ge=1, le=m.PIECE)]


class _Taken(Struct, frozen=True, tag=True):
    """A buffer is the reader's, who says the same once it was read."""

    slot: Annotated[int, Meta(ge=0, lt=SLOTS)]
    ticket: _Number


def _decode(kind: Callable[[bytes], _T], data: bytes) -> _T:
    try:
        return kind(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"nixl: {error}") from None


_encode = msgspec.msgpack.Encoder().encode
_as_offered = msgspec.msgpack.Decoder(_Offered).decode
_as_request = msgspec.msgpack.Decoder(_Stage | _Taken).decode
_as_taken = msgspec.msgpack.Decoder(_Taken).decode


# -- NIXL --------------------------------------------------------------------------------------------------------------
class _Agent:
    """An agent of NIXL's. Its calls are not for several threads at a time, so that each is made under a lock."""

    def __init__(self, devices: str | None) -> None:
        try:
            import nixl
        except ImportError as error:
            raise UnsupportedError(
                "the engine nixl", "NIXL 1.5 or newer", f"an import that failed: {error}",
                "pip install --no-deps nixl nixl-cu13",
            ) from error  # fmt: skip
        self.name = f"vram-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(8)}"
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._peers: dict[str, int] = {}  # readings by peer
        chosen = devices is not None and _DEVICES not in os.environ
        if chosen:
            os.environ[_DEVICES] = str(devices)  # which UCX reads while it is set up
        try:
            config = nixl.nixl_agent_config(enable_prog_thread=True, enable_listen_thread=False, backends=["UCX"])
            self._api: Any = nixl.nixl_agent(self.name, config)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise UnsupportedError("the engine nixl", "an agent with UCX", what) from error
        finally:
            if chosen:
                os.environ.pop(_DEVICES, None)

    @property
    def is_usable(self) -> bool:
        """Whether it was not given up, and is of this process."""
        return self._api is not None and self.pid == os.getpid()

    def call(self, function: Callable[[Any], _T], what: str) -> _T:
        """Call a function of NIXL; its own errors are raised as PeerGoneError or PeerError, which name `what`."""
        with self._lock:
            if not self.is_usable:
                raise PeerGoneError(f"nixl: {what}: the agent was given up, with a transfer that did not end")
            try:
                return function(self._api)
            except Exception as error:
                if not type(error).__name__.startswith("nixl"):  # they have no base of their own
                    raise
                raise _as_ours(error, what) from error

    def register(
        self, rows: Sequence[tuple[int, int, int, str]], memory: str, places: Sequence[Location], what: str
    ) -> Any:
        """Have memory of a kind registered, which is at these places; see :meth:`call`."""
        for location in {*places} - {HOST}:
            # UCX takes memory of a GPU only where that has its primary context, which comes with the first call that
            # needs it; to make memory and to map it does not.
            drivers.get(location).mem_info(location)
        return self.call(lambda api: api.register_memory(rows, mem_type=memory), what)

    def unregister(self, registered: Any, what: str) -> None:
        """Undo a registration."""
        with contextlib.suppress(PeerError):
            self.call(lambda api: api.deregister_memory(registered), what)

    def describe(
        self, rows: Sequence[tuple[int, int, int, str]], memory: str, places: Sequence[Location], what: str
    ) -> tuple[bytes, Callable[[], None]]:
        """Have memory registered, and return the agent's description of it for others, and what undoes that."""
        registered = self.register(rows, memory, places, what)
        try:
            said: bytes = self.call(
                lambda api: api.get_partial_agent_metadata(registered, True, ["UCX"]), "its description"
            )
        except BaseException:
            self.unregister(registered, what)
            raise
        return said, functools.partial(self.unregister, registered, what)

    def add(self, metadata: bytes) -> str:
        """Have the agent know another one; once for each time until :meth:`drop`."""
        peer = self.call(lambda api: api.add_remote_agent(metadata), "the other agent")
        name = peer.decode() if isinstance(peer, bytes) else str(peer)
        with self._lock:
            self._peers[name] = self._peers.get(name, 0) + 1
        return name

    def drop(self, peer: str) -> None:
        """Forget another agent, unless another reading is of the same."""
        with self._lock:
            left = self._peers.get(peer, 1) - 1
            if left:
                self._peers[peer] = left
                return
            self._peers.pop(peer, None)
        with contextlib.suppress(PeerError):
            self.call(lambda api: api.remove_remote_agent(peer), "the other agent")

    def give_up(self) -> None:
        """End it, and with it all that it still writes to. Idempotent."""
        with self._lock:
            self._api = None  # its destructor ends the thread that moves bytes, and closes what it has open


class _RefusedError(PeerError):
    """A reader's own memory cannot be registered."""


def _as_ours(error: Exception, what: str) -> PeerError:
    name = type(error).__name__
    said = f"nixl: {what}: {name}: {error}"
    return PeerGoneError(said) if name in ("nixlRemoteDisconnectError", "nixlCancelledError") else PeerError(said)


def devices_of(host: str) -> str | None:
    """Return the UCX devices of an IPv4 address of this machine: the interface and its RDMA devices; None for all."""
    import fcntl
    import struct

    if host.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # it has no address
                if socket.inet_ntoa(fcntl.ioctl(probe, 0x8915, asked)[20:24]) == host:  # SIOCGIFADDR
                    rdma = sorted(Path(f"/sys/class/net/{name}/device/infiniband").glob("*"))
                    ports = [f"{one.name}:{port.name}" for one in rdma for port in sorted((one / "ports").glob("*"))]
                    return ",".join([*ports, name])
    return None


# -- the engine --------------------------------------------------------------------------------------------------------
class Nixl:
    """NIXL as an engine of :class:`~vram.nodes.carrier.Carrier` and :func:`vram.replicate`, for many threads at a time.
    `host` is the address whose devices are used, unless ``$UCX_NET_DEVICES`` names others. `trusted` has to be True:
    the other end, and all that reach the devices, can read and write all memory of this process."""

    name = NAME

    def __init__(self, host: str = "127.0.0.1", *, ring: bool = False, trusted: bool = False) -> None:
        if trusted is not True:
            raise UsageError(
                "by NIXL the other end, and whoever reaches the devices that it uses, can read and write all memory of "
                "this process, whatever is registered: where all of them may do what this user may, say trusted=True; "
                "tcp, which is always there, lets nobody"
            )
        self._devices, self._only_ring = devices_of(host), ring
        self._lock = threading.Lock()
        self._made: _Agent | None = None

    def _agent(self) -> _Agent:
        with self._lock:
            if self._made is None or not self._made.is_usable:
                self._made = _Agent(self._devices)
            return self._made

    def close(self) -> None:
        """End the agent: nobody reads what was offered any more. Idempotent; the next use makes another agent."""
        with self._lock:
            if self._made is not None:
                self._made.give_up()
                self._made = None

    def reaches(self, location: Location) -> bool:
        """Whether it writes to a place by itself: the host, and GPUs that have an ordinal."""
        return location == HOST or (location.kind == "cuda" and str(location.id).isdecimal())

    def offer(self, spans: Sequence[Span]) -> Offering:
        """Register memory, or a ring to copy it into; see :meth:`~.engine.Engine.offer`."""
        agent = self._agent()
        if not spans or len(spans) > _MAX_SPANS:
            raise UnsupportedError("the engine nixl", f"1 to {_MAX_SPANS} pieces of memory", f"{len(spans)}")
        whys: list[str] = []
        for way in self._ways(spans):
            try:
                return way(agent, spans, printable("; ".join(whys)[: m.MAX_WHY]))
            except (PeerError, UnsupportedError, DriverError) as error:
                whys.append(str(error))
        raise UnsupportedError("the engine nixl", "memory that it can register", "; ".join(whys))

    def _ways(self, spans: Sequence[Span]) -> Iterator[Callable[[_Agent, Sequence[Span], str], Offering]]:
        """Say how memory can be offered, the best way first."""
        places = {span.location for span in spans}
        if len(places) == 1 and HOST not in places:
            yield functools.partial(_Ring, places.pop())
        if not self._only_ring and len({_memory_of(span.location) for span in spans}) == 1:
            yield _Direct
        if all(span.view is not None or span.location != HOST for span in spans):
            yield functools.partial(_Ring, HOST)

    def open(self, data: bytes, link: Connection) -> Reading:
        """Begin to read; see :meth:`~.engine.Engine.open`."""
        offered = _decode(_as_offered, data)
        agent = self._agent()
        try:
            peer = agent.add(offered.metadata)
        except PeerError as error:
            raise UnsupportedError(
                "the engine nixl", "the description of an agent that it can reach", str(error)
            ) from error
        reading = _Reading(agent, peer, offered, link)
        try:
            reading.reach()
        except BaseException:
            reading.close()
            raise
        return reading


def _memory_of(location: Location) -> Literal["DRAM", "VRAM"]:
    return "DRAM" if location == HOST else "VRAM"


def _device_of(location: Location) -> int:
    return 0 if location == HOST else int(location.id)


class _Direct:
    """Memory that is registered as it is."""

    def __init__(self, agent: _Agent, spans: Sequence[Span], why: str) -> None:
        memory = _memory_of(spans[0].location)
        offered = tuple(_Place(span.offset, span.address, span.nbytes, _device_of(span.location)) for span in spans)
        rows = [(one.address, one.nbytes, one.device, "") for one in offered]
        metadata, self.close = agent.describe(rows, memory, [span.location for span in spans], "registration")
        self.data = _encode(_Offered(metadata, memory, offered, why=why))

    def answer(self, asked: bytes) -> bytes:
        raise ProtocolError(f"nixl is asked nothing where memory is read in place, and was asked {asked!r:.40}")


class _Ring:
    """Buffers into which pieces are copied before they are read."""

    def __init__(self, location: Location, agent: _Agent, spans: Sequence[Span], why: str) -> None:
        self._spans = tuple(spans)
        self._changed = threading.Condition()
        self._taken: dict[int, int] = {}  # slot: the ticket of the reader who has it
        self._tickets = itertools.count(1)
        nbytes = SLOTS * m.PIECE
        if location == HOST:
            made = Region.create(HOST, capacity=nbytes, nbytes=nbytes)
        else:
            made = create_legacy(drivers.get(location), nbytes, location)
        self._memory: Region | None = made
        memory, device = _memory_of(location), _device_of(location)
        what = f"registration of a ring on {location}"
        try:
            rows = [(made.address, nbytes, device, "")]
            metadata, self._unregister = agent.describe(rows, memory, [location], what)
        except BaseException:
            made.close()
            raise
        slots = tuple(_Place(at, made.address + at, m.PIECE, device) for at in range(0, nbytes, m.PIECE))
        self.data = _encode(_Offered(metadata, memory, slots, is_ring=True, why=why))

    def answer(self, asked: bytes) -> bytes:
        """Copy a piece into a buffer, or take one back. Raises BusyError if none was given back for 5 s."""
        request = _decode(_as_request, asked)
        if isinstance(request, _Taken):
            self._give_back(request)
            return b""
        span = _holding(self._spans, request.offset, request.nbytes)
        taken = self._take()
        try:
            with self._changed:
                memory = self._memory
                if memory is None:
                    raise PeerGoneError("nixl: what was offered is not any more")
                self._copy(memory, taken.slot * m.PIECE, span, request.offset - span.offset, request.nbytes)
        except BaseException:
            self._give_back(taken)  # nobody was told of it
            raise
        return _encode(taken)

    def forget(self, answers: Sequence[bytes]) -> None:
        """Give back the buffers of a reader who is gone; see :class:`~.engine.Offering`."""
        for answer in answers:
            self._give_back(_decode(_as_taken, answer))

    def _give_back(self, taken: _Taken) -> None:
        """Give a buffer back, unless it was given back and is another reader's."""
        with self._changed:
            if self._taken.get(taken.slot) == taken.ticket:
                del self._taken[taken.slot]
                self._changed.notify()

    def _copy(self, memory: Region, at: int, span: Span, start: int, nbytes: int) -> None:
        target, source = memory.address + at, span.address + start
        if span.view is not None:
            memory.driver.copy_in(target, span.view[start : start + nbytes])
        elif memory.location == HOST:
            array, view = host_view(memory)
            try:
                with view, view[at : at + nbytes] as slot:
                    drivers.get(span.location).copy_out(slot, source)
            finally:
                array.close()
        else:
            memory.driver.copy(target, source, nbytes)

    def _take(self) -> _Taken:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._taken) < SLOTS, _SLOT_WAIT):
                raise BusyError(f"nixl: all {SLOTS} buffers have been taken for {_SLOT_WAIT:g} s")
            slot = next(one for one in range(SLOTS) if one not in self._taken)
            self._taken[slot] = next(self._tickets)
            return _Taken(slot, self._taken[slot])

    def close(self) -> None:
        self._unregister()
        with self._changed:
            memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()


def _holding(parts: Sequence[_T], offset: int, nbytes: int) -> _T:
    """Return the one of several spans or places that has these bytes."""
    for part in cast("Sequence[Any]", parts):
        if part.offset <= offset and offset + nbytes <= part.offset + part.nbytes:
            return cast("_T", part)
    raise ProtocolError(f"nixl: bytes {offset} to {offset + nbytes} are not in one piece of memory that is offered")


class _Reading:
    """A reader's half."""

    def __init__(self, agent: _Agent, peer: str, offered: _Offered, link: Connection) -> None:
        self._agent, self._peer, self._offered, self._link = agent, peer, offered, link
        self._is_staged = False
        self.why = printable(offered.why)

    def reach(self) -> None:
        """Read the first bytes, which connects. Raises UnsupportedError if the other node cannot be read."""
        first = self._offered.places[0]
        with memoryview(bytearray(min(first.nbytes, _PROBE))) as probe:
            try:
                self._read_at(first, 0, Span(0, 0, len(probe), HOST, probe), time.monotonic() + _FIRST)
            except PeerError as error:
                raise UnsupportedError("the engine nixl", "a way to read from the other node", str(error)) from error

    def read(self, piece: Piece, into: Span, timeout: float) -> None:
        """Fill a piece; see :meth:`~.engine.Reading.read`."""
        until = time.monotonic() + timeout
        if into.view is not None:
            self._fill(piece, into, until)
            return
        if not self._is_staged:
            try:
                self._fill(piece, into, until)
                return
            except _RefusedError as error:
                self._is_staged = True
                self.why = "; ".join(filter(None, (self.why, f"staged in memory of the host: {error}")))
        with memoryview(bytearray(piece.nbytes)) as buffer:
            self._fill(piece, Span(into.offset, 0, into.nbytes, HOST, buffer), until)
            drivers.get(into.location).copy_in(into.address, buffer)

    def _fill(self, piece: Piece, into: Span, until: float) -> None:
        places = self._offered.places
        if not self._offered.is_ring:
            place = _holding(places, piece.offset, piece.nbytes)
            self._read_at(place, piece.offset - place.offset, into, until)
            return
        answer = self._link.ask(NAME, _encode(_Stage(piece.offset, piece.nbytes)), _left(until))
        slot = _decode(_as_taken, answer).slot
        if slot >= len(places):
            raise ProtocolError(f"nixl: buffer {slot} of a ring of {len(places)}")
        refused: _RefusedError | None = None
        try:
            self._read_at(places[slot], 0, into, until)
        except _RefusedError as error:
            refused = error  # nothing was read: the buffer is given back, since this connection goes on
        self._link.ask(NAME, answer, _left(until))
        if refused is not None:
            raise refused

    def _transfer(self, handle: Any, nbytes: int, until: float) -> None:
        call = self._agent.call
        state, pause = call(lambda api: api.transfer(handle), "a read"), _PAUSE
        while state == "PROC":
            if time.monotonic() >= until:
                raise WaitTimeoutError(f"nixl: {nbytes} bytes did not come in time")
            waiting(time.sleep, pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            state = call(lambda api: api.check_xfer_state(handle), "a read")
        if state != "DONE":
            raise PeerGoneError(f"nixl: a read ended as {state!r:.40}")

    def _read_at(self, place: _Place, start: int, into: Span, until: float) -> None:
        call, nbytes = self._agent.call, into.nbytes
        here, own = _device_of(into.location), _memory_of(into.location)
        row = [(into.address if into.view is None else _address_of(into.view), nbytes, here)]
        there = [(place.address + start, nbytes, place.device)]
        try:
            registered = self._agent.register([(*row[0], "")], own, [into.location], "registration")
        except PeerGoneError:
            raise
        except PeerError as error:
            raise _RefusedError(str(error)) from error
        try:
            handle: Any = call(
                lambda api: api.initialize_xfer(
                    "READ", api.get_xfer_descs(row, mem_type=own),
                    api.get_xfer_descs(there, mem_type=self._offered.memory), self._peer,
                ), "a read",
            )  # fmt: skip
            is_over = False
            try:
                self._transfer(handle, nbytes, until)
                is_over = True
            except PeerGoneError:
                is_over = True  # NIXL has ended it
                raise
            finally:
                if is_over:
                    with contextlib.suppress(PeerError):
                        call(lambda api: api.release_xfer_handle(handle), "a read")
                else:
                    del handle
                    self._agent.give_up()  # else it would go on writing to memory that is somebody else's by then
        finally:
            self._agent.unregister(registered, "registration")

    def close(self) -> None:
        self._agent.drop(self._peer)


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def _address_of(view: memoryview) -> int:
    """Return where the bytes of a view begin."""
    from ..arrays.numpy_on_use import np  # pieces that are staged lie in a buffer of the reader's

    return int(np.frombuffer(view, "u1").__array_interface__["data"][0])
