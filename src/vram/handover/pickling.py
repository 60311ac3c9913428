"""This process's address for arrays that travel inside pickles of :mod:`multiprocessing`.

A pickle carries the address of its writer's :class:`Endpoint` and a memory's number; the reader fetches descriptors
once. An array in flight pins its memory until the reader says ``Unpickled``. The socket is abstract, so that nothing is
left in the file system; any process can connect, and only processes of the same user are served.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import operator
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

import msgspec

from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..errors import BusyError, ClosedError, PeerGoneError, ProtocolError, VramError, WaitTimeoutError
from ..lifetime import Claim, Handle, shielded, take, waiting
from ..memory import Pin, Region
from ..open_files import close_fds
from ..sharing.channel import Channel, Credentials, check_sockets, peer_credentials
from . import messages as m
from .exports import Export, ExportTable
from .imports import ImportTable, UnknownMemoryError

# -- what is on its way -----------------------------------------------------------------------------------------------
FLIGHT_SECONDS = 600.0
LINGER_SECONDS = 10.0  # a worker that ends waits so long for each next array that it pickled to be taken
ORPHAN_SECONDS = 10.0  # for whoever takes the place of a process that died to unpickle what was meant for it


class _Flight:
    """A memory that one thread pickled more often than it was unpickled since.
    While it has its pin the owner cannot shrink the memory. A claim alone keeps the memory, of whatever size."""

    __slots__ = ("by", "count", "export", "kept", "since", "until", "who")

    def __init__(self, export: Export, by: int, who: Callable[[int], str]) -> None:
        self.export = export
        self.by = by
        self.who = who
        self.kept: Pin | Claim | None = None
        self.count = 0
        self.since = 0.0
        self.until = math.inf  # when it ends: its readers died

    def __str__(self) -> str:
        """Say who holds it and what to do, for the BusyError of a shrink."""
        return (
            f"in flight to another process (pickled, and {max(self.count, 1)} times not yet unpickled). "
            f"{self.who(self.by)}"
        )

    def pin(self, region: Region) -> None:
        """Pin all that a region has by now."""
        if self.kept is None:
            self.kept = region.pin(0, region.nbytes, self)
        elif not isinstance(self.kept, Pin) or region.nbytes > self.kept.stop:
            self.keep(region.pin(0, region.nbytes, self))

    def loosen(self) -> None:
        """Keep the memory, and let its owner shrink it."""
        if isinstance(self.kept, Pin):
            self.keep(self.export.memory.claim("in flight to another process"))

    def keep(self, kept: Pin | Claim | None) -> None:
        """Keep the memory in another way from now on, or no longer."""
        before, self.kept = self.kept, kept
        if before is not None:
            before.release()


class Flights:
    """Keeps memory until what was pickled of it has arrived, or for :data:`FLIGHT_SECONDS` after the last sign once the
    sender dropped the array (:data:`ORPHAN_SECONDS` after a reader's death). Flights are told apart by pickling thread:
    its reader is expected to unpickle the rest, too. `late` gets ids exported anew while in flight."""

    def __init__(
        self, late: Callable[[int], None], export: Callable[[int], Export | None], who: Callable[[int], str]
    ) -> None:
        self._late = late
        self._lent = export
        self._who = who
        self._flights: dict[tuple[int, int], _Flight] = {}  # by memory and thread
        self._landed = 0.0  # when an array arrived last
        self._lock = threading.Lock()  # never taken by a finalizer

    def begin(self, export: Export, region: Region, by: int) -> None:
        """One more array on this memory was pickled, by the thread of this number."""
        with self._lock:
            flight = self._flights.get((export.id, by)) or _Flight(export, by, self._who)
            flight.pin(region)
            flight.since, flight.until = time.monotonic(), math.inf
            flight.count += 1
            self._flights[export.id, by] = flight

    def find(self, memory: int) -> Export | None:
        """Return what is in flight under an id, if it is."""
        with self._lock:
            return next((flight.export for (number, _), flight in self._flights.items() if number == memory), None)

    def land(self, memory: int, times: int, by: int = 0) -> None:
        """So many arrays on a memory arrived; 0 for `by` is whoever pickled it."""
        with self._lock:
            if not by:
                by = next((thread for number, thread in self._flights if number == memory), 0)
            flight = self._flights.get((memory, by))
            if flight is None:
                return
            flight.since = self._landed = time.monotonic()
            flight.until = math.inf
            flight.count -= times
            if flight.count > 0:
                return
            del self._flights[memory, by]
        self._end(flight)

    def orphan(self, by: int) -> None:
        """All who unpickled what a thread pickled are gone, and the last of them did not take its leave."""
        until = time.monotonic() + ORPHAN_SECONDS
        with self._lock:
            for (_, thread), flight in self._flights.items():
                if thread == by:
                    flight.loosen()
                    flight.until = until

    def last_sign(self) -> float | None:
        """Return when an array was pickled or arrived last, as of ``time.monotonic``; None if nothing is in flight."""
        with self._lock:
            since = [flight.since for flight in self._flights.values()]
        return max([self._landed, *since]) if since else None

    def end_stale(self) -> float:
        """End the flights that nobody seems to wait for; return in how many seconds to look again."""
        now = time.monotonic()
        with self._lock:
            stale = [key for key, flight in self._flights.items() if self._is_over(flight, now)]
            ended = [self._flights.pop(key) for key in stale]
            soon = min([flight.until for flight in self._flights.values()], default=math.inf) - now
        for flight in ended:
            self._end(flight)
        return max(0.0, min(FLIGHT_SECONDS / 10, soon))

    def _is_over(self, flight: _Flight, now: float) -> bool:
        if flight.until <= now:
            return True
        if flight.since >= now - FLIGHT_SECONDS:
            return False
        if flight.export.has_local_array:  # then whoever comes late finds it all the same; its size is its owner's
            flight.loosen()
            return False
        return True

    def end_all(self) -> None:
        """End every flight: what has not arrived is lost."""
        with self._lock:
            flights, self._flights = self._flights, {}
        for flight in flights.values():
            flight.keep(None)

    def _end(self, flight: _Flight) -> None:
        late = self._lent(flight.export.id) is not flight.export
        flight.keep(None)
        if late:
            self._late(flight.export.id)


# -- the connections to either side -----------------------------------------------------------------------------------
FETCH_SECONDS = 30.0
TELL_SECONDS = 0.02  # between two messages about what was taken: each wakes a thread of the sender's
_TICK = 1e-3  # seconds until the endpoint looks again at a connection that somebody else hears


class FetchServer:
    """A process that uses our arrays: what it asked for and is owed, while its socket has no room. `threads` are those
    here that pickled something that it unpickled; `said_bye` says that it ends of its own accord."""

    __slots__ = ("asked", "channel", "fd", "pid", "said_bye", "threads", "unmaps")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.fd = channel.fileno()
        self.pid = channel.peer().pid
        self.threads: set[int] = set()
        self.said_bye = False
        self.asked: deque[tuple[m.Fetch, float]] = deque()
        self.unmaps: deque[int] = deque()


class FetchClient:
    """The connection to one process whose arrays this one uses; it takes the channel over. A thread that asks hears the
    answer itself; the endpoint's thread hears what comes unasked."""

    def __init__(self, channel: Channel) -> None:
        channel.only_memory = True
        self.channel = channel
        self.fd = channel.fileno()
        self._imports = ImportTable()
        self._lock = threading.Lock()  # of the imports, and of receiving; never taken by a finalizer
        self._taken: defaultdict[tuple[int, int], int] = defaultdict(int)  # memories, by whom, and how often
        self._told = 0.0

    def array(self, reference: m.Reference, by: int = 0) -> Array:
        """Return the array that a reference means, fetching what is not known of its memory; thread `by` pickled it.
        Raises PeerGoneError if the process is gone, ClosedError if it has let go of the memory."""
        asked: int | None = None
        take(self._lock)
        try:
            while (found := self._imports.find(reference)) is None:
                known = self._imports.known(reference.memory)
                if known == asked:  # it answered, and we are none the wiser
                    raise UnknownMemoryError(reference.memory, known)
                asked = known
                self._fetch(reference.memory, max(known, 0), by)
            return found
        finally:
            self._lock.release()

    def known(self, reference: m.Reference) -> Array | None:
        """Return the array if its memory is mapped here already."""
        if not self._lock.acquire(False):
            take(self._lock)
        try:
            return self._imports.find(reference)
        finally:
            self._lock.release()

    # -- what was taken -----------------------------------------------------------------------------------------
    def received(self, memory: int, by: int) -> bool:
        """An array on a memory was unpickled; return whether the process has still to be told, by :meth:`tell`."""
        self._taken[memory, by] += 1
        if time.monotonic() - self._told < TELL_SECONDS:
            return True
        return self.tell()

    def tell(self, timeout: float = 0.0) -> bool:
        """Tell the process what was taken since the last time; return whether that has to be tried again. Each is told
        once: twice would end a flight that somebody is still to unpickle. A full queue or an end is no error."""
        self._told = time.monotonic()
        try:
            while self._taken:
                (memory, by), times = self._taken.popitem()
                try:
                    self.channel.send(m.encode(m.Unpickled(memory, times, by)), timeout=timeout)
                except WaitTimeoutError:
                    self._taken[memory, by] += times
                    return True
        except KeyError:  # another thread tells it
            pass
        except (VramError, OSError):
            self._taken.clear()
        return False

    def take_leave(self) -> None:
        """Tell the process, once all is said that was taken, that this one ends of its own accord."""
        with contextlib.suppress(VramError, OSError):  # it then keeps less long what others might still unpickle
            self.channel.send(m.encode(m.Bye()), timeout=TELL_SECONDS)

    def _fetch(self, memory: int, first: int, by: int) -> None:
        """Ask for the segments of a memory from `first` on, and map what comes. Called with the lock."""
        deadline = time.monotonic() + FETCH_SECONDS
        try:
            self.channel.send(m.encode(m.Fetch(memory, first, by)), timeout=FETCH_SECONDS)
            while True:
                message, fds = self._hear(max(0.0, deadline - time.monotonic()))
                if isinstance(message, m.Gone) and message.memory == memory:
                    raise ClosedError(f"memory {memory} was closed by its sender before it was taken out of the queue")
                if isinstance(message, m.Part) and (message.part.memory, message.part.first) == (memory, first):
                    self._imports.learn(message.part, fds)
                    return
                # Else the late answer to somebody who did not wait for it.
        except WaitTimeoutError:
            raise WaitTimeoutError(f"memory {memory} was not sent for {FETCH_SECONDS:g} s") from None
        except (PeerGoneError, ClosedError):
            if self.channel.is_closed or self.channel.is_gone():
                raise _gone(memory) from None
            raise

    def _hear(self, timeout: float) -> tuple[object, list[int]]:
        """Take one message off the socket, and let go of what it asks for. Its descriptors close with the list."""
        payload, fds = self.channel.take(timeout=timeout)
        try:
            message = m.decode_reply(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.channel.hang_up()
            raise ProtocolError(f"not a message between endpoints: {error}") from None
        if isinstance(message, m.Unmap):
            for memory in message.memories:
                self._imports.release(memory)
        return message, fds

    # -- what the endpoint's thread does ------------------------------------------------------------------------
    def hear(self) -> None:
        """Hear what came unasked, unless somebody asks, who hears it. Raises ProtocolError if it is no message,
        PeerGoneError if the process is gone."""
        if not self._lock.acquire(False):
            time.sleep(_TICK)
            return
        try:
            self._hear(0.0)
        except WaitTimeoutError:  # somebody who asked was faster
            pass
        finally:
            self._lock.release()

    def end(self) -> None:
        """The process is gone. Arrays that are alive keep their memory; nothing else does."""
        self.channel.close()  # first: it wakes whoever waits for an answer
        with self._lock:
            self._imports.close()


def _gone(memory: int) -> PeerGoneError:
    return PeerGoneError(
        f"the process that sent memory {memory} is gone, and with it what was not fetched yet; "
        f"publish arrays that must outlive their maker"
    )


# -- this process's endpoint ------------------------------------------------------------------------------------------
_SOON = 0.01  # seconds until what a peer had no room for is tried again
_ACCEPTED = 64  # connections, before the others are heard again


class Endpoint:
    """This process's side of all hand-overs by pickle. Use :func:`endpoint`."""

    def __init__(self) -> None:
        check_sockets()
        self.address = f"\0vram-{secrets.token_hex(12)}"
        self.exports = ExportTable(self._retire)
        self.flights = Flights(self._retire, self.exports.find, self._who_unpickles)
        self._thread_of = threading.local()  # its number, among those that pickled
        self._numbered = 0  # threads that pickled
        self._last: tuple[weakref.ref[Array], tuple[object, ...], Export, tuple[object, ...]] | None = None
        self._clients: dict[str, FetchClient] = {}
        self._origins: dict[Handle, tuple[str, int]] = {}
        self._lock = threading.Lock()  # of lending, and of the two above; never taken by a finalizer
        self._retired: deque[int] = deque()
        self._servers: dict[int, FetchServer] = {}
        self._is_to_tell = False  # whether the thread has to, soon
        self._stopping = False
        self._wake = -1
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._serve, name="vram-endpoint", daemon=True)
        try:
            self._listener.bind(self.address)
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            self._thread.start()
        except BaseException:
            self._close_sockets()
            raise

    # -- pickling -----------------------------------------------------------------------------------------------
    def reduce(self, array: Array) -> tuple[object, ...]:
        """Return what a pickle says of an array, and keep its memory until that is unpickled."""
        region = array.region
        if region.is_private:  # what was written to it is in no memory that others could map
            return self.reduce(copy.copy(array))
        region.synchronize()  # whoever unpickles it may read it at once (S10)
        # The same array again is what queues are for. Each of these is replaced, never changed.
        with self._lock:
            if self._stopping:
                self._check()
            by = getattr(self._thread_of, "number", 0)
            if not by:
                self._numbered = self._thread_of.number = by = self._numbered + 1
            state = (array.shape, region.layout, region.access, by)
            last = self._last
            if last is not None and last[0]() is array and all(map(operator.is_, state, last[1])):
                export, written = last[2:]
            else:
                export, written = self._reduce_anew(array, by)
                self._last = (weakref.ref(array), state, export, written)
            self.flights.begin(export, region, by)
        return written

    def take_back(self, address: str, memory: int, *written: object) -> None:
        """Keep memory no longer for a pickle, which was not made of what :meth:`reduce` returned."""
        self.flights.land(memory, 1, getattr(self._thread_of, "number", 0))

    def _reduce_anew(self, array: Array, by: int) -> tuple[Export, tuple[object, ...]]:
        export = self.exports.export(array)
        origin, number = self._origins.get(array.region.handle, ("", 0))
        where = (len(export.fds) if array.nbytes else 0, array.offset, dtype_name(array.dtype), array.shape)
        return export, (self.address, export.id, where, origin, number, by)

    def read(self, address: str, memory: int, where: tuple[Any, ...], origin: str, first_memory: int, by: int) -> Array:
        """Return the array that a pickle means; the very object if it was made in this process. Raises PeerGoneError if
        its sender is gone and the memory unknown here, ClosedError if it was dropped and its flight has ended."""
        reference = m.Reference(memory, *where)  # segments, offset, dtype, shape
        # Where it came from, before it came from the process that pickled it.
        first = m.Reference(first_memory, *where) if origin else reference
        try:
            array = self._known(origin or address, first)
            if array is None:
                array = self._client(address).array(reference, by)
                handle = array.region.handle
                if handle not in self._origins:
                    with self._lock:
                        self._origins[handle] = (origin, first_memory) if origin else (address, memory)
        except BaseException as error:  # it is not in its queue any more
            # An address that cannot be reached is not tried again, but after Ctrl-C.
            if not isinstance(error, Exception) or address == self.address or address in self._clients:
                self._received(address, memory, by)
            raise
        self._received(address, memory, by)
        return array

    def _known(self, address: str, reference: m.Reference) -> Array | None:
        """Return an array on memory that is mapped here already, as its owner's or as an import."""
        if address == self.address:
            export = self._lent(reference.memory)
            return None if export is None else export.local_array(reference)
        client = self._clients.get(address)
        return None if client is None else client.known(reference)

    def _lent(self, memory: int) -> Export | None:
        """Return what was exported under an id. In flight it outlives its being exported anew, as after a freeze."""
        return self.exports.find(memory) or self.flights.find(memory)

    def _received(self, address: str, memory: int, by: int) -> None:
        """Say that an array arrived."""
        if address == self.address:
            self.flights.land(memory, 1, by)
            return
        try:
            client = self._clients.get(address) or self._client(address)
            if client.received(memory, by) and not self._is_to_tell:
                self._is_to_tell = True
                self._poke()
        except (VramError, OSError):  # a sender that is gone needs not be told
            pass

    def _client(self, address: str) -> FetchClient:
        client = self._clients.get(address)
        if client is not None:
            return client
        try:
            channel = Channel.connect(address, FETCH_SECONDS, _check_user)
        except PeerGoneError:
            raise PeerGoneError(
                "the process that sent this array is gone; publish arrays that must outlive their maker"
            ) from None
        try:
            with self._lock:
                self._check()
                client = self._clients.get(address)
                if client is None:
                    made = FetchClient(channel)
                    self._selector.register(made.fd, selectors.EVENT_READ, made)  # first: or nobody would hear it
                    client = self._clients[address] = made
        finally:
            if client is None or client.channel is not channel:  # refused, or another thread was faster
                channel.close()
        return client

    def _check(self) -> None:
        if self._stopping:
            raise ClosedError("hand-overs between processes were shut down here while this one began")

    # -- the thread ---------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        told, look = 0.0, 0.0
        while not self._stopping:
            behind = [server for server in self._servers.values() if server.asked or server.unmaps]
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
            for server in list(self._servers.values()):
                if server.asked or server.unmaps:
                    self._catch_up(server)
            look = self.flights.end_stale()

    def _react(self, key: selectors.SelectorKey) -> None:
        peer = key.data
        is_over = False
        try:
            if isinstance(peer, FetchClient):
                peer.hear()
            elif isinstance(peer, FetchServer):
                self._listen_to(peer)
            elif key.fd == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
            else:
                self._accept()
        except (VramError, OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._drop(peer)
            is_over = isinstance(error, PeerGoneError)
        if is_over and isinstance(peer, FetchServer) and not peer.said_bye:
            for by in peer.threads:
                if not self._servers_of(by):
                    self.flights.orphan(by)

    def _servers_of(self, by: int) -> list[FetchServer]:
        """Return who is connected and has unpickled something that a thread pickled."""
        return [server for server in list(self._servers.values()) if by in server.threads]

    def _who_unpickles(self, by: int) -> str:
        servers = self._servers_of(by)
        if not servers:
            return (
                f"Nobody is connected who unpickled any of these: have it unpickled and dropped, or try again "
                f"{FLIGHT_SECONDS:g} s after it was pickled"
            )
        pids = ", ".join(f"{server.pid or 'of another PID namespace'}" for server in servers[:8])
        return f"Have process{'es' * (len(servers) > 1)} {pids} take it out of the queue, or end: that lets go of it"

    def _accept(self) -> None:
        """Accept some of those who connected, and hang up on other users."""
        for _ in range(_ACCEPTED):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is left for it: it keeps waiting, and this thread must not spin
                time.sleep(_SOON)
                return
            if peer_credentials(sock).uid != os.geteuid():
                sock.close()
                continue
            server = FetchServer(Channel(sock))
            self._servers[server.fd] = server
            self._selector.register(server.fd, selectors.EVENT_READ, server)

    def _listen_to(self, server: FetchServer) -> None:
        """Take one message from a process that uses our arrays."""
        payload, fds = server.channel.take(timeout=0)
        if fds:
            close_fds(fds)
        request = m.decode_request(payload)
        if isinstance(request, m.Bye):
            server.said_bye = True
            return
        if 0 < request.by <= self._numbered:
            server.threads.add(request.by)
        if isinstance(request, m.Unpickled):
            self.flights.land(request.memory, request.times, request.by)
        else:
            server.asked.append((request, time.monotonic() + FETCH_SECONDS))

    def _catch_up(self, server: FetchServer) -> None:
        """Send what a process is owed, as far as there is room; who does not read for too long is cut off."""
        try:
            while server.unmaps:
                some = tuple(itertools.islice(server.unmaps, m.MAX_UNMAPPED))
                server.channel.send(m.encode(m.Unmap(some)), timeout=0)
                for _ in some:
                    server.unmaps.popleft()
            while server.asked:
                self._answer(server, server.asked[0][0])
                server.asked.popleft()
        except (WaitTimeoutError, BusyError):
            if server.asked and server.asked[0][1] < time.monotonic():
                self._drop(server)
        except PeerGoneError:  # what it said before it went is still to be heard, and ends in an end of file
            server.unmaps.clear()
            server.asked.clear()
        except (VramError, OSError):
            self._drop(server)

    def _answer(self, server: FetchServer, request: m.Fetch) -> None:
        export = self._lent(request.memory)
        kept: Pin | Claim | None = None
        if export is not None:
            with contextlib.suppress(ClosedError):
                kept = export.keep()
        try:
            part = None if export is None or kept is None else export.part(request.first)
            if part is None:
                server.channel.send(m.encode(m.Gone(request.memory)), timeout=0)
            else:
                server.channel.send(m.encode(m.Part(part[0])), part[1], timeout=0)
        finally:
            if kept is not None:
                kept.release()

    def _drop(self, peer: FetchClient | FetchServer | None) -> None:
        """The connection to a peer is over; a peer that is dropped already is not looked at again."""
        if isinstance(peer, FetchServer):
            if self._servers.get(peer.fd) is peer:
                del self._servers[peer.fd]
                self._selector.unregister(peer.fd)
                peer.channel.close()
        elif isinstance(peer, FetchClient):
            with self._lock:
                address = next((at for at, known in self._clients.items() if known is peer), None)
                if address is None:
                    return
                del self._clients[address]
                self._selector.unregister(peer.fd)
            peer.end()

    def _retire(self, memory: int) -> None:
        """A memory that was exported is unmapped here. Reached from finalizers: only leaves a note for the thread."""
        self._retired.append(memory)
        self._poke()

    def _poke(self) -> None:
        if self._wake >= 0:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake, 1)

    def _tell_taken(self, timeout: float = 0.0) -> None:
        self._is_to_tell = False  # first: what is taken from here on is told the next time
        for client in list(self._clients.values()):
            if client.tell(timeout):
                self._is_to_tell = True

    def linger(self) -> None:
        """Serve on, in a process that multiprocessing started, until the arrays that it pickled are taken: a pool reads
        results after its workers have ended. The parent's end ends this."""
        parent = parent_process()
        if parent is None:
            return
        with contextlib.suppress(KeyboardInterrupt):  # then it waits no longer
            while parent.is_alive():
                since = self.flights.last_sign()
                if since is None or time.monotonic() - since > LINGER_SECONDS:
                    return
                waiting(wait, [parent.sentinel], _SOON)

    def _take_leave(self, *, is_over: bool = True) -> None:
        """Tell all senders what was taken, and that this process ends of its own accord."""
        self._tell_taken(1.0)
        for client in list(self._clients.values()) if is_over else ():
            client.take_leave()

    def _tell_retired(self) -> None:
        while self._retired:
            memory = self._retired.popleft()
            for server in self._servers.values():
                server.unmaps.append(memory)
        for handle in list(self._origins):
            if not handle.is_open:
                self._origins.pop(handle, None)

    # -- the end ------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Stop the thread, end all flights, and let go of what others exported."""
        self._stopping = True
        self._poke()
        self._thread.join(5.0)
        self._take_leave()
        self.flights.end_all()
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.end()
        self.exports.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        wake, self._wake = self._wake, -1
        for server in self._servers.values():
            server.channel.close()
        self._servers = {}
        self._selector.close()
        self._listener.close()
        if wake >= 0:
            os.close(wake)


def _check_user(listens: Credentials) -> None:
    if listens.uid != os.geteuid():
        raise ProtocolError("the array's address is served by another user")


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


@shielded
def shut_down() -> None:
    """Close this process's endpoint: arrays that are in flight are lost. The next hand-over makes a new one."""
    global _current
    with _making:
        ended, _current = _current, None
    if ended is not None:
        ended.close()


@shielded
def end_of_process() -> None:
    """Serve what is still to be taken, as :mod:`multiprocessing` ends this process."""
    if _current is not None:
        _current._take_leave(is_over=False)
        _current.linger()
        _current._take_leave()


def _after_fork_in_child() -> None:
    """The child gets an endpoint of its own; the parent's sockets must not stay open here."""
    global _current, _making
    inherited, _current = _current, None
    _making = threading.Lock()
    if inherited is not None:
        inherited._close_sockets()  # the copies of this process; the parent's selector goes on


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
