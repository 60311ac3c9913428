"""This process's address for arrays that travel inside pickles of :mod:`multiprocessing`.

A pickle cannot carry file descriptors, and its sender does not know who will read it. So it carries an address and an
id: the socket of the process that wrote it, and its number for the memory. The reader connects there once, fetches the
descriptors of a memory once, and finds it in its cache ever after. Each process has one such :class:`Endpoint`, made
on first use: a listening socket and one thread that serves fetches.

Who keeps the memory alive in between? Every array that was pickled and not yet unpickled is *in flight*: it pins its
memory at the sender, until the reader says ``Took``. What nobody ever unpickles (its reader was killed, its queue
thrown away) would stay for ever, so a flight whose sender has dropped the array ends after :data:`FLIGHT_SECONDS`.

The socket is in Linux's abstract namespace: nothing is left in the file system whoever is killed. It serves processes
of the same user only, as the kernel vouches for them, and its name is not guessable.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from queue import Empty, SimpleQueue
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..errors import ClosedError, PeerGoneError, ProtocolError, VramError, WaitTimeoutError
from ..lifetime import Handle
from ..memory import Pin
from ..sharing.channel import Channel, close_fds, peer_credentials
from .handover import Borrower, Count, Lender, MemoryPart, Reference, Size, UnknownMemoryError

__all__ = ["FLIGHT_SECONDS", "Endpoint", "endpoint", "shut_down"]

FLIGHT_SECONDS = 600.0
FETCH_SECONDS = 30.0


class _Fetch(Struct, frozen=True, array_like=True, tag="fetch"):
    """Send the descriptors of a memory from the `first` segment on, one part an answer."""

    memory: Size
    first: Count


class _Took(Struct, frozen=True, array_like=True, tag="took"):
    """So many pickled arrays on this memory were unpickled."""

    memory: Size
    times: Size


class _Part(Struct, frozen=True, array_like=True, tag="part"):
    """The answer to a fetch, with descriptors."""

    part: MemoryPart


class _Gone(Struct, frozen=True, array_like=True, tag="gone"):
    """The answer to a fetch of what is not there any more."""

    memory: Size


class _Forget(Struct, frozen=True, array_like=True, tag="forget"):
    """These were unmapped by their lender: let go of them."""

    memories: Annotated[tuple[Size, ...], Meta(max_length=4096)]


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(_Fetch | _Took).decode
_decode_reply = msgspec.msgpack.Decoder(_Part | _Gone | _Forget).decode


class _Flight:
    """The pin of a memory that was pickled more often than it was unpickled."""

    __slots__ = ("count", "pin", "since")

    def __init__(self, pin: Pin) -> None:
        self.pin = pin
        self.count = 0
        self.since = time.monotonic()


class _Lending:
    """The connection to one process whose arrays this one uses."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.borrower = Borrower()
        self.lock = threading.Lock()  # the borrower's
        self.answers: SimpleQueue[tuple[_Part | _Gone, list[int]] | None] = SimpleQueue()
        self.forgets: deque[int] = deque()
        self.is_gone = False

    def array(self, reference: Reference) -> Array:
        """Return the array, fetching what is not known of its memory."""
        self.tidy()
        with self.lock:
            while True:
                try:
                    return self.borrower.array(reference)
                except UnknownMemoryError as unknown:
                    self._fetch(unknown.memory, unknown.known)

    def _fetch(self, memory: int, first: int) -> None:
        gone = PeerGoneError(f"the process that sent memory {memory} is gone, and with it what was not fetched yet")
        if self.is_gone:
            raise gone
        self.channel.send(_encode(_Fetch(memory, first)), timeout=FETCH_SECONDS)
        try:
            answer = self.answers.get(timeout=FETCH_SECONDS)
        except Empty:
            raise WaitTimeoutError(f"memory {memory} was not sent for {FETCH_SECONDS:g} s") from None
        if answer is None:
            raise gone
        message, fds = answer
        try:
            if isinstance(message, _Gone):
                raise ClosedError(f"memory {memory} was closed by its sender before it was taken out of the queue")
            self.borrower.learn(message.part, fds)
        finally:
            close_fds(fds)

    def tidy(self) -> None:
        """Do what the lender asked for, unless somebody is at it."""
        while self.forgets and self.lock.acquire(blocking=False):
            try:
                with contextlib.suppress(IndexError):
                    while True:
                        self.borrower.forget(self.forgets.popleft())
            finally:
                self.lock.release()

    def end(self) -> None:
        """The lender is gone. Arrays that are alive keep their memory."""
        self.is_gone = True
        self.answers.put(None)
        self.forgets.extend(self.borrower.numbers())
        self.tidy()


class Endpoint:
    """This process's side of all hand-overs by pickle. Use :func:`endpoint`."""

    def __init__(self) -> None:
        token = secrets.token_hex(12)
        self.address = f"\0vram-{token}"
        self.lender = Lender(self._retire)
        self._flights: dict[int, _Flight] = {}
        self._lendings: dict[str, _Lending] = {}
        self._origins: dict[Handle, tuple[str, int]] = {}
        self._lock = threading.Lock()  # of the three above; never taken by a finalizer
        self._retired: deque[int] = deque()
        self._borrowers: set[Channel] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._wake = -1
        try:
            self._listener.bind(self.address)
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except BaseException:
            self._close_sockets()
            raise
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, ("accept", None))
        self._selector.register(self._wake, selectors.EVENT_READ, ("wake", None))
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="vram-endpoint", daemon=True)
        self._thread.start()

    # -- pickling -----------------------------------------------------------------------------------------------
    def write_down(self, array: Array) -> tuple[object, ...]:
        """Return what a pickle says of an array, and keep its memory until that is unpickled."""
        with self._lock:
            lent = self.lender.lend(array)
            flight = self._flights.get(lent.id)
            if flight is None:
                region = array.region
                pin = region.pin(0, region.nbytes, "in flight to another process")
                flight = self._flights[lent.id] = _Flight(pin)
            flight.count += 1
            origin, number = self._origins.get(array.region.handle, ("", 0))
        segments = len(lent.fds) if array.nbytes else 0
        return (self.address, lent.id, segments, array.offset, dtype_name(array.dtype), array.shape, origin, number)

    def read(
        self,
        address: str,
        memory: int,
        segments: int,
        offset: int,
        dtype: str,
        shape: tuple[int, ...],
        origin: str,
        origin_memory: int,
    ) -> Array:
        """Return the array that a pickle means; the very object if it was made in this process.

        Raises
        ------
        PeerGoneError
            If the memory is not known here and its sender is gone.
        ClosedError
            If it was dropped by its sender, and nobody unpickled it for :data:`FLIGHT_SECONDS`.
        """
        if origin == self.address or address == self.address:
            number = origin_memory if origin == self.address else memory
            array = self.lender.at_home(Reference(number, segments, offset, dtype, shape))
            if array is not None:
                self._took(address, memory)
                return array
        lending = self._lending(address)
        array = lending.array(Reference(memory, segments, offset, dtype, shape))
        handle = array.region.handle
        if handle not in self._origins:
            with self._lock:
                self._origins[handle] = (origin, origin_memory) if origin else (address, memory)
        self._took(address, memory)
        return array

    def _took(self, address: str, memory: int) -> None:
        if address == self.address:
            self._land(memory, 1)
            return
        # The sender only needs it to end the flight: a queue that is full, or an end, is no reason to fail here.
        with contextlib.suppress(WaitTimeoutError, PeerGoneError):
            self._lending(address).channel.send(_encode(_Took(memory, 1)), timeout=1.0)

    def _lending(self, address: str) -> _Lending:
        lending = self._lendings.get(address)
        if lending is not None:
            return lending
        with self._lock:
            lending = self._lendings.get(address)
            if lending is not None:
                return lending
            try:
                channel = Channel.connect(address, FETCH_SECONDS)
            except PeerGoneError:
                raise PeerGoneError(
                    "the process that sent this array is gone; publish arrays that must outlive their maker"
                ) from None
            if channel.peer().uid != os.geteuid():
                channel.close()
                raise ProtocolError("the array's address is served by another user")
            lending = self._lendings[address] = _Lending(channel)
            self._selector.register(channel, selectors.EVENT_READ, ("lending", lending))
            self._poke()
            return lending

    def _land(self, memory: int, times: int) -> None:
        with self._lock:
            flight = self._flights.get(memory)
            if flight is None:
                return
            flight.count -= times
            flight.since = time.monotonic()
            if flight.count > 0:
                return
            del self._flights[memory]
        flight.pin.release()

    # -- the thread ---------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(timeout=FLIGHT_SECONDS / 10):
                kind, peer = key.data
                try:
                    if kind == "accept":
                        self._accept()
                    elif kind == "wake":
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                    elif kind == "lending":
                        self._hear(peer)
                    else:
                        self._answer(peer)
                except (VramError, OSError, msgspec.MsgspecError):
                    self._drop(peer)
            self._tell_retired()
            self._end_stale_flights()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = self._listener.accept()
            if peer_credentials(sock).uid != os.geteuid():
                sock.close()
                return
            channel = Channel(sock)
            self._borrowers.add(channel)
            self._selector.register(channel, selectors.EVENT_READ, ("borrower", channel))

    def _answer(self, channel: Channel) -> None:
        """Serve a process that uses our arrays."""
        payload, fds = channel.recv(timeout=0)
        close_fds(fds)
        request = _decode_request(payload)
        if isinstance(request, _Took):
            self._land(request.memory, request.times)
            return
        lent = self.lender.find(request.memory)
        part = None if lent is None else next(lent.parts(request.first), None)
        if part is None:
            channel.send(_encode(_Gone(request.memory)), timeout=0)
        else:
            channel.send(_encode(_Part(part[0])), part[1], timeout=0)

    def _hear(self, lending: _Lending) -> None:
        """Take what a process whose arrays we use has to say."""
        payload, fds = lending.channel.recv(timeout=0)
        message = None
        try:
            message = _decode_reply(payload)
        finally:
            if message is None or isinstance(message, _Forget):
                close_fds(fds)
        if isinstance(message, _Forget):
            lending.forgets.extend(message.memories)
            lending.tidy()
        else:
            lending.answers.put((message, fds))

    def _drop(self, peer: Channel | _Lending | None) -> None:
        if peer is None:
            return
        channel = peer.channel if isinstance(peer, _Lending) else peer
        with contextlib.suppress(KeyError, ValueError, ClosedError):
            self._selector.unregister(channel)
        if isinstance(peer, _Lending):
            with self._lock:
                self._lendings = {a: known for a, known in self._lendings.items() if known is not peer}
            peer.end()
        else:
            self._borrowers.discard(peer)
        channel.close()

    def _retire(self, memory: int) -> None:
        """A memory that was lent is unmapped here. Reached from finalizers: only leaves a note for the thread."""
        self._retired.append(memory)
        self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)

    def _tell_retired(self) -> None:
        while self._retired:
            message = _encode(_Forget((self._retired.popleft(),)))
            for channel in tuple(self._borrowers):
                try:
                    channel.send(message, timeout=0)
                except (VramError, OSError):  # one who does not read is cut off: it would keep the memory for ever
                    self._drop(channel)
        gone = [handle for handle in tuple(self._origins) if not handle.is_open]
        for handle in gone:
            self._origins.pop(handle, None)

    def _end_stale_flights(self) -> None:
        horizon = time.monotonic() - FLIGHT_SECONDS
        with self._lock:
            stale = [n for n, flight in self._flights.items() if flight.since < horizon and not self._at_home(n)]
            ended = [self._flights.pop(number) for number in stale]
        for flight in ended:
            flight.pin.release()

    def _at_home(self, memory: int) -> bool:
        lent = self.lender.find(memory)
        return lent is not None and lent.array() is not None

    # -- the end ------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Stop the thread, end all flights, and let go of what others lent."""
        self._stopping = True
        self._poke()
        self._thread.join(5.0)
        with self._lock:
            flights, self._flights = self._flights, {}
            lendings, self._lendings = self._lendings, {}
        for flight in flights.values():
            flight.pin.release()
        for lending in lendings.values():
            lending.end()
            lending.channel.close()
        self.lender.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for channel in tuple(getattr(self, "_borrowers", ())):
            channel.close()
        if hasattr(self, "_selector"):
            self._selector.close()
        self._listener.close()
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1


_current: Endpoint | None = None
_making = threading.Lock()


def endpoint() -> Endpoint:
    """Return this process's endpoint, made on first use."""
    global _current
    if _current is None:
        with _making:
            if _current is None:
                _current = Endpoint()
    return _current


def shut_down() -> None:
    """Close this process's endpoint: arrays that are in flight are lost. The next hand-over makes a new one."""
    global _current
    with _making:
        ended, _current = _current, None
    if ended is not None:
        ended.close()


def _after_fork_in_child() -> None:
    """The child gets an endpoint of its own; the parent's sockets must not stay open here."""
    global _current, _making
    inherited, _current = _current, None
    _making = threading.Lock()
    if inherited is not None:
        inherited._listener.close()
        with contextlib.suppress(OSError):
            os.close(inherited._wake)
        inherited._wake = -1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
