"""This process's address for arrays that travel inside pickles of :mod:`multiprocessing`.

A pickle cannot carry file descriptors, and its sender does not know who will read it. So it carries an address and an
id: the socket of the process that wrote it, and its number for the memory. The reader connects there once, fetches the
descriptors of a memory once, and finds it in its cache ever after. Each process has one such :class:`Endpoint`, made
on first use: a listening socket and one thread that serves fetches.

Who keeps the memory alive in between? Every array that was pickled and not yet unpickled is *in flight*: it pins its
memory at the sender, until the reader says ``Took``. What nobody ever unpickles (its queue was thrown away) would stay
for ever, so a flight whose sender has dropped the array ends after :data:`FLIGHT_SECONDS`. A reader that was killed is
known by the end of file of its connection, without a ``Bye`` before it: what was meant for it can be shrunk at once,
and ends after :data:`ORPHAN_SECONDS` unless another reader takes it.

The socket is in Linux's abstract namespace: nothing is left in the file system whoever is killed. It serves processes
of the same user only, as the kernel vouches for them, and its name is not guessable.
"""

from __future__ import annotations

import contextlib
import operator
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from multiprocessing.util import Finalize

import msgspec

from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..errors import BusyError, ClosedError, PeerGoneError, ProtocolError, VramError, WaitTimeoutError
from ..lifetime import Claim, Handle, begin, uninterrupted
from ..memory import Pin
from ..sharing.channel import Channel, close_fds, peer_credentials
from . import flights
from .fetching import FETCH_SECONDS, TELL_SECONDS, Reader, Source
from .flights import Flights
from .handover import Lender, Lent
from .wire import Bye, Fetch, Gone, Part, Reference, Took, decode_request, encode

__all__ = ["Endpoint", "endpoint", "shut_down"]

_SOON = 0.01  # seconds until what a peer had no room for is tried again
_MOST_OWED = 1_000_000  # memories that a peer that does not read may be behind


class _Thread(threading.local):
    """The number of the thread that asks, among those that pickled; 0 is none yet."""

    number = 0


class Endpoint:
    """This process's side of all hand-overs by pickle. Use :func:`endpoint`; made here it has to be opened."""

    def __init__(self) -> None:
        self.address = f"\0vram-{secrets.token_hex(12)}"
        self.lender = Lender(self._retire)
        self.flights = Flights(self._retire, self.lender.find, self._who_unpickles)
        self._thread_of = _Thread()
        self._numbered = 0  # threads that pickled
        self._last: tuple[weakref.ref[Array], tuple[object, ...], Lent, tuple[object, ...]] | None = None
        self._sources: dict[str, Source] = {}
        self._origins: dict[Handle, tuple[str, int]] = {}
        self._lock = threading.Lock()  # of lending, and of the two above; never taken by a finalizer
        self._retired: deque[int] = deque()
        self._readers: dict[int, Reader] = {}
        self._is_to_tell = False  # whether the thread has to, soon
        self._stopping = False
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def open(self) -> None:
        """Begin to serve. Not done by the constructor: what a class returns can be lost to an interrupt (I12)."""
        try:
            self._listener.bind(self.address)
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._wake = uninterrupted(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._serve, name="vram-endpoint", daemon=True)
            begin(self._thread)
            # A process that ends tells what it has taken. multiprocessing's own way: its children run no atexit.
            self._last_words = Finalize(None, self._take_leave, exitpriority=10)
        except BaseException:
            self._stopping = True  # an interrupt: the thread may run
            self._poke()
            if self._thread is not None and self._thread.ident is not None:
                self._thread.join(5.0)
            self._close_sockets()
            raise

    # -- pickling -----------------------------------------------------------------------------------------------
    def write_down(self, array: Array) -> tuple[object, ...]:
        """Return what a pickle says of an array, and keep its memory until that is unpickled."""
        region = array.region
        region.synchronize()  # whoever unpickles it may read it at once (S10)
        has_begun = False
        try:
            # The same array again is what queues are for. Each of these is replaced, never changed.
            with self._lock:
                if self._stopping:
                    self._check()
                by = self._thread_of.number or self._number_thread()
                state = (array.shape, region.layout, region.access, by)
                last = self._last
                if last is not None and last[0]() is array and all(map(operator.is_, state, last[1])):
                    lent, written = last[2:]
                else:
                    lent, written = self._write_anew(array, by)
                    self._last = (weakref.ref(array), state, lent, written)
                self.flights.begin(lent, region, by)
                has_begun = True
        except BaseException:
            if has_begun:  # an interrupt: nobody will unpickle it
                self.flights.land(lent.id, [1], by)
            raise
        return written

    def _number_thread(self) -> int:
        self._numbered += 1  # with the lock
        self._thread_of.number = self._numbered
        return self._numbered

    def _write_anew(self, array: Array, by: int) -> tuple[Lent, tuple[object, ...]]:
        lent = self.lender.lend(array)
        origin, number = self._origins.get(array.region.handle, ("", 0))
        where = (len(lent.fds) if array.nbytes else 0, array.offset, dtype_name(array.dtype), array.shape)
        return lent, (self.address, lent.id, *where, origin, number, by)

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
        by: int = 0,
    ) -> Array:
        """Return the array that a pickle means; the very object if it was made in this process.

        Raises
        ------
        PeerGoneError
            If the memory is not known here and its sender is gone.
        ClosedError
            If it was dropped by its sender, and nobody unpickled it for :data:`~vram.exchange.flights.FLIGHT_SECONDS`,
            or for :data:`~vram.exchange.flights.ORPHAN_SECONDS` after whoever was to do so had been killed.
        """
        reference = Reference(memory, segments, offset, dtype, shape)
        # Where it came from, before it came from the process that pickled it.
        first = Reference(origin_memory, segments, offset, dtype, shape) if origin else reference
        times = [1]
        try:
            array = self._known(origin or address, first)
            if array is None:
                array = self._source(address).array(reference, by)
                handle = array.region.handle
                if handle not in self._origins:
                    with self._lock:
                        self._origins[handle] = (origin, origin_memory) if origin else (address, memory)
            self._took(address, memory, times, by)
        except BaseException as error:  # it is not in its queue any more
            is_interrupt = not isinstance(error, Exception)
            # Who failed to connect does not try again; an interrupt may have come before that.
            if is_interrupt or address == self.address or address in self._sources:
                self._took(address, memory, times, by)
            if is_interrupt:
                self._poke()  # it may have come before that, too
            raise
        return array

    def _known(self, address: str, reference: Reference) -> Array | None:
        """Return an array on memory that is mapped here already, as its owner or as a borrower."""
        if address == self.address:
            lent = self._lent(reference.memory)
            return None if lent is None else lent.at_home(reference)
        source = self._sources.get(address)
        return None if source is None else source.known(reference)

    def _lent(self, memory: int) -> Lent | None:
        """Return what was lent under an id. In flight it outlives its being lent anew, as after a freeze."""
        return self.lender.find(memory) or self.flights.find(memory)

    def _took(self, address: str, memory: int, times: list[int], by: int) -> None:
        """Say that arrays arrived. Called again after an interrupt: `times` is emptied once they are counted."""
        if address == self.address:
            self.flights.land(memory, times, by)
            return
        try:
            source = self._sources.get(address) or self._source(address)
            if source.took(memory, times, by) and not self._is_to_tell:
                self._is_to_tell = True
                self._poke()
        except (VramError, OSError):  # a sender that is gone needs not be told
            pass

    def _source(self, address: str) -> Source:
        source = self._sources.get(address)
        if source is not None:
            return source
        try:
            channel = Channel.connect(address, FETCH_SECONDS)
        except PeerGoneError:
            raise PeerGoneError(
                "the process that sent this array is gone; publish arrays that must outlive their maker"
            ) from None
        try:
            if channel.peer().uid != os.geteuid():
                raise ProtocolError("the array's address is served by another user")
            with self._lock:
                self._check()
                source = self._sources.get(address)
                if source is None:
                    made = Source(channel)
                    try:
                        self._selector.register(made.fd, selectors.EVENT_READ, made)  # first: or nobody would hear it
                        source = self._sources[address] = made
                    except BaseException:
                        with contextlib.suppress(KeyError, ValueError):
                            self._selector.unregister(made.fd)
                        raise
        finally:
            if source is None or source.channel is not channel:  # refused, or another thread was faster
                channel.close()
        return source

    def _check(self) -> None:
        if self._stopping:
            raise ClosedError("hand-overs between processes were shut down here while this one began")

    # -- the thread ---------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        told, look = 0.0, 0.0
        while not self._stopping:
            behind = [reader for reader in self._readers.values() if reader.asked or reader.forgets]
            wait = min(_SOON, look) if behind else look
            if self._is_to_tell:
                wait = min(wait, max(0.0, told + TELL_SECONDS - time.monotonic()))
            for key, _ in self._selector.select(timeout=wait):
                self._react(key)
            if self._is_to_tell and time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                self._tell_taken()
            if self._retired or self._origins:
                self._tell_retired()
            for reader in tuple(self._readers.values()):
                if reader.asked or reader.forgets or not reader.is_heard:
                    self._catch_up(reader)
            look = self.flights.end_stale()

    def _react(self, key: selectors.SelectorKey) -> None:
        peer = key.data
        is_over = False
        try:
            if isinstance(peer, Source):
                peer.hear()
            elif isinstance(peer, Reader):
                self._listen_to(peer)
            elif key.fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            else:
                self._accept()
        except (VramError, OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._drop(peer)
            is_over = isinstance(error, PeerGoneError)
        except Exception:  # noqa: BLE001  (a mistake of ours must cost no more than this connection)
            traceback.print_exc(file=sys.stderr)
            self._drop(peer)
        if is_over and isinstance(peer, Reader) and not peer.said_bye:
            for by in peer.threads:
                if not self._readers_of(by):
                    self.flights.orphan(by)

    def _readers_of(self, by: int) -> list[Reader]:
        """Return who is connected and has unpickled something that a thread pickled."""
        return [reader for reader in tuple(self._readers.values()) if by in reader.threads]

    def _who_unpickles(self, by: int) -> str:
        readers = self._readers_of(by)
        if not readers:
            return (
                f"Nobody is connected who unpickled any of these: have it unpickled and dropped, or try again "
                f"{flights.FLIGHT_SECONDS:g} s after it was pickled"
            )
        pids = ", ".join(f"{reader.pid or 'of another PID namespace'}" for reader in readers[:8])
        return f"Have process{'es' * (len(readers) > 1)} {pids} take it out of the queue, or end: that lets go of it"

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor left for it: it keeps waiting, and this thread must not spin
            time.sleep(_SOON)
            return
        if peer_credentials(sock).uid != os.geteuid():
            sock.close()
            return
        reader = Reader(Channel(sock))
        self._readers[reader.fd] = reader
        self._listen(reader, True)

    def _listen_to(self, reader: Reader) -> None:
        """Take one message from a process that uses our arrays."""
        payload, fds = reader.channel.take(timeout=0)
        if fds:
            close_fds(fds)
        request = decode_request(payload)
        if isinstance(request, Bye):
            reader.said_bye = True
            return
        if 0 < request.by <= self._numbered:
            reader.threads.add(request.by)
        if isinstance(request, Took):
            self.flights.land(request.memory, [request.times], request.by)
        else:
            reader.asked.append((request, time.monotonic() + FETCH_SECONDS))

    def _catch_up(self, reader: Reader) -> None:
        """Send what a process is owed, as far as there is room; who does not read for too long is cut off."""
        try:
            reader.tell_forgotten()
            while reader.asked:
                self._answer(reader, reader.asked[0][0])
                reader.asked.popleft()
        except (WaitTimeoutError, BusyError):
            late = reader.asked and reader.asked[0][1] < time.monotonic()
            if late or len(reader.forgets) > _MOST_OWED:
                self._drop(reader)
                return
        except PeerGoneError:  # what it said before it went is still to be heard, and ends in an end of file
            reader.forgets.clear()
            reader.asked.clear()
        except (VramError, OSError):
            self._drop(reader)
            return
        self._listen(reader, not reader.asked)

    def _listen(self, reader: Reader, wanted: bool) -> None:
        """Take further requests, or none as long as those before have no answer."""
        if wanted and not reader.is_heard:
            self._selector.register(reader.fd, selectors.EVENT_READ, reader)
        elif reader.is_heard and not wanted:
            self._selector.unregister(reader.fd)
        reader.is_heard = wanted

    def _answer(self, reader: Reader, request: Fetch) -> None:
        lent = self._lent(request.memory)
        kept: Pin | Claim | None = None
        if lent is not None:
            with contextlib.suppress(ClosedError):
                kept = lent.keep()
        try:
            part = None if lent is None or kept is None else next(lent.parts(request.first), None)
            if part is None:
                reader.channel.send(encode(Gone(request.memory)), timeout=0)
            else:
                reader.channel.send(encode(Part(part[0])), part[1], timeout=0)
        finally:
            if kept is not None:
                kept.release()

    def _drop(self, peer: Source | Reader | None) -> None:
        """The connection to a peer is over; a peer that is dropped already is not looked at again."""
        if isinstance(peer, Reader):
            if self._readers.get(peer.fd) is peer:
                del self._readers[peer.fd]
                self._listen(peer, False)
                peer.channel.close()
        elif isinstance(peer, Source):
            with self._lock:
                address = next((at for at, known in self._sources.items() if known is peer), None)
                if address is None:
                    return
                del self._sources[address]
                self._selector.unregister(peer.fd)
            peer.end()

    def _retire(self, memory: int) -> None:
        """A memory that was lent is unmapped here. Reached from finalizers: only leaves a note for the thread."""
        self._retired.append(memory)
        self._poke()

    def _poke(self) -> None:
        if self._wake >= 0:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake, 1)

    def _tell_taken(self, timeout: float = 0.0) -> None:
        self._is_to_tell = False  # first: what is taken from here on is told the next time
        for source in tuple(self._sources.values()):
            if source.tell(timeout):
                self._is_to_tell = True

    def _take_leave(self) -> None:
        """Tell all who sent something what was taken of it, and that this process ends of its own accord."""
        self._tell_taken(1.0)
        for source in tuple(self._sources.values()):
            source.take_leave()

    def _tell_retired(self) -> None:
        while self._retired:
            memory = self._retired.popleft()
            for reader in self._readers.values():
                reader.forgets.append(memory)
        for handle in tuple(self._origins):
            if not handle.is_open:
                self._origins.pop(handle, None)

    # -- the end ------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Stop the thread, end all flights, and let go of what others lent."""
        self._stopping = True
        self._last_words.cancel()
        self._poke()
        if self._thread is not None:
            self._thread.join(5.0)
        self._take_leave()
        self.flights.end_all()
        with self._lock:
            sources, self._sources = self._sources, {}
        for source in sources.values():
            source.end()
        self.lender.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        wake, self._wake = self._wake, -1
        for reader in self._readers.values():
            reader.channel.close()
        self._readers = {}
        self._selector.close()
        self._listener.close()
        if wake >= 0:
            os.close(wake)


_current: Endpoint | None = None
_making = threading.Lock()


def endpoint() -> Endpoint:
    """Return this process's endpoint, made on first use."""
    global _current
    if _current is None:
        with _making:
            if _current is None:
                made = Endpoint()
                made.open()
                _current = made
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
        inherited._close_sockets()  # the copies of this process; the parent's selector goes on


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
