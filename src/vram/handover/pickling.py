"""This process's address for arrays that travel inside pickles of :mod:`multiprocessing`.

A pickle carries the address of its writer's :class:`Endpoint` and a memory's number; the reader fetches descriptors
once. An array in flight pins its memory until the reader says ``Unpickled``. The socket is abstract, so that nothing is
left in the file system; any process can connect, and only processes of the same user are served.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import wait
from typing import Any

from ..arrays import Array
from ..arrays.dtypes import dtype_name
from ..errors import BusyError, ClosedError, PeerGoneError, ProtocolError, VramError, WaitTimeoutError
from ..lifetime import Claim, Handle, held, shielded, take, waiting
from ..memory import Pin, Region
from ..sharing.channel import Channel, Credentials, check_sockets, peer_credentials
from . import messages as m
from .conversation import Conversation, Failure
from .exports import Export, ExportTable

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
        self.kept: Pin | Claim
        self.count = 0
        self.since = 0.0
        self.until = math.inf  # when it ends: its readers died

    def __str__(self) -> str:
        """Say who holds it and what to do, for the BusyError of a shrink."""
        return (
            f"in flight to another process (pickled, and {max(self.count, 1)} times not yet unpickled). "
            f"{self.who(self.by)}"
        )

    def loosen(self) -> None:
        """Keep the memory, and let its owner shrink it."""
        if isinstance(self.kept, Pin):
            pinned, self.kept = self.kept, self.export.memory.claim("in flight to another process")
            pinned.release()


class Flights:
    """Keeps memory until what was pickled of it has arrived, or for :data:`FLIGHT_SECONDS` after the last sign once the
    sender dropped the array (:data:`ORPHAN_SECONDS` after a reader's death). Flights are told apart by pickling thread:
    its reader is expected to unpickle the rest, too. `late` gets ids exported anew while in flight."""

    def __init__(self, exports: ExportTable, late: Callable[[int], None], who: Callable[[int], str]) -> None:
        self._exports = exports
        self._late = late
        self._who = who
        self._flights: dict[tuple[int, int], _Flight] = {}  # by memory and thread
        self._landed = 0.0  # when an array arrived last
        self._lock = threading.Lock()  # never taken by a finalizer

    def begin(self, export: Export, region: Region, by: int) -> None:
        """One more array on this memory was pickled, by the thread of this number."""
        with self._lock:
            flight = self._flights.get((export.id, by))
            if flight is None:
                flight = _Flight(export, by, self._who)
                flight.kept = region.pin(0, region.nbytes, flight)
                self._flights[export.id, by] = flight
            elif not isinstance(flight.kept, Pin) or region.nbytes > flight.kept.stop:  # all that it has by now
                before, flight.kept = flight.kept, region.pin(0, region.nbytes, flight)
                before.release()
            flight.since, flight.until = time.monotonic(), math.inf
            flight.count += 1

    def find(self, memory: int) -> Export | None:
        """Return what was exported under an id. In flight it outlives its being exported anew, as after a freeze."""
        if (export := self._exports.by_id.get(memory)) is not None:
            return export
        with self._lock:
            return next((flight.export for (number, _), flight in self._flights.items() if number == memory), None)

    def land(self, memory: int, by: int) -> None:
        """An array on a memory arrived that a thread pickled."""
        with self._lock:
            flight = self._flights.get((memory, by))
            if flight is None:
                return
            flight.since = self._landed = time.monotonic()
            flight.until = math.inf
            flight.count -= 1
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
            flight.kept.release()

    def _end(self, flight: _Flight) -> None:
        late = self._exports.by_id.get(flight.export.id) is not flight.export
        flight.kept.release()
        if late:
            self._late(flight.export.id)


# -- the connections to either side -----------------------------------------------------------------------------------
FETCH_SECONDS = 30.0
TELL_SECONDS = 0.02  # between two messages about what was taken: each wakes a thread of the sender's
_TICK = 1e-3  # seconds until the endpoint looks again at a connection that somebody else hears


class FetchServer:
    """A process that uses our arrays, and what it asked for and is owed, while its socket has no room. `threads` are
    those here that pickled something that it unpickled; `said_bye` says that it ends of its own accord."""

    __slots__ = ("asked", "fd", "key", "pid", "said_bye", "talk", "threads")

    def __init__(self, channel: Channel) -> None:
        self.talk = Conversation(channel, decode=m.decode_request)
        self.fd = self.key = channel.fileno()
        self.pid = channel.peer().pid
        self.threads: set[int] = set()
        self.said_bye = False
        self.asked: deque[tuple[m.Fetch, float]] = deque()

    def end(self) -> None:
        """The process is gone, or is served no longer."""
        self.talk.link.close()


class FetchClient:
    """The connection to one process whose arrays this one uses; it takes the channel over. A thread that asks hears the
    answer itself; the endpoint's thread hears what comes unasked."""

    def __init__(self, channel: Channel, address: str) -> None:
        channel.only_memory = True
        self.talk = Conversation(channel, decode=m.decode_reply)
        self.fd = channel.fileno()
        self.key = address
        self._lock = threading.Lock()  # of the imports, and of receiving; never taken by a finalizer
        self.told = 0.0  # when the process was told last

    def array(self, reference: m.Reference, by: int) -> Array:
        """Return the array that a reference means, fetching what is not known of its memory; thread `by` pickled it.
        Raises PeerGoneError if the process is gone, ClosedError if it has let go of the memory."""
        imports, asked = self.talk.imports, None
        if not self._lock.acquire(False):
            take(self._lock)
        try:
            while (found := imports.find(reference)) is None:
                known = imports.known(reference.memory)
                if known == asked:  # it answered, and we are none the wiser
                    return imports.array(reference)
                asked = known
                self._fetch(reference.memory, max(known, 0), by)
            return found
        finally:
            self._lock.release()

    def known(self, reference: m.Reference) -> Array | None:
        """Return the array if its memory is mapped here already."""
        with held(self._lock):
            return self.talk.imports.find(reference)

    def _fetch(self, memory: int, first: int, by: int) -> None:
        """Ask for the segments of a memory from `first` on, and map what comes. Called with the lock."""
        talk, deadline = self.talk, time.monotonic() + FETCH_SECONDS
        talk.inbox.clear()  # the answer to somebody who did not wait for it
        try:
            talk.link.send(m.encode(m.Fetch(memory, first, by)), timeout=FETCH_SECONDS)
            while True:
                talk.hear_until(talk.inbox.__len__, deadline, f"memory {memory} was not sent")
                if isinstance(talk.inbox[0], Failure):
                    talk.finished(talk.inbox.popleft(), None, deadline)  # raises what it is
                answer = talk.inbox.popleft()
                if isinstance(answer, m.Part) and (answer.part.memory, answer.part.first) == (memory, first):
                    return
                if isinstance(answer, m.Gone) and answer.memory == memory:
                    raise ClosedError(f"memory {memory} was closed by its sender before it was taken out of the queue")
        except (PeerGoneError, ClosedError):
            if talk.link.is_closed or talk.link.is_gone():
                raise PeerGoneError(
                    f"the process that sent memory {memory} is gone, and with it what was not fetched yet; "
                    f"publish arrays that must outlive their maker"
                ) from None
            raise

    def take_leave(self) -> None:
        """Tell the process, once all is said that was taken, that this one ends of its own accord."""
        with contextlib.suppress(VramError, OSError):  # it then keeps less long what others might still unpickle
            self.talk.link.send(m.encode(m.Bye()), timeout=TELL_SECONDS)

    # -- what the endpoint's thread does ------------------------------------------------------------------------
    def hear(self) -> None:
        """Hear what came unasked, unless somebody asks, who hears it. Raises PeerGoneError if the process is gone."""
        if not self._lock.acquire(False):
            time.sleep(_TICK)
            return
        try:
            self.talk.hear_next(0.0)
            self.talk.inbox.clear()  # nobody asked
        except WaitTimeoutError:  # somebody who asked was faster
            pass
        finally:
            self._lock.release()

    def end(self) -> None:
        """The process is gone. Arrays that are alive keep their memory; nothing else does."""
        self.talk.link.close()  # first: it wakes whoever waits for an answer
        with self._lock:
            self.talk.close()


# -- this process's endpoint ------------------------------------------------------------------------------------------
_SOON = 0.01  # seconds until what a peer had no room for is tried again


class Endpoint:
    """This process's side of all hand-overs by pickle. Use :func:`endpoint`."""

    def __init__(self) -> None:
        check_sockets()
        self.address = f"\0vram-{secrets.token_hex(12)}"
        self.exports = ExportTable(self._retire)
        self.flights = Flights(self.exports, self._retire, self._who_unpickles)
        self._thread_of = threading.local()  # its number, among those that pickled
        self._numbered = 0  # threads that pickled
        self._last: tuple[weakref.ref[Array], tuple[object, ...], Export, tuple[object, ...]] | None = None
        self._clients: dict[str, FetchClient] = {}
        self._origins: dict[Handle, tuple[str, int]] = {}
        self._lock = threading.Lock()  # of lending, and of the two above; never taken by a finalizer
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
                export = self.exports.export(array)
                origin, number = self._origins.get(region.handle, ("", 0))
                where = (len(export.fds) if array.nbytes else 0, array.offset, dtype_name(array.dtype), array.shape)
                written = self.address, export.id, where, origin, number, by
                self._last = (weakref.ref(array), state, export, written)
            self.flights.begin(export, region, by)
        return written

    def take_back(self, address: str, memory: int, *written: object) -> None:
        """Keep memory no longer for a pickle, which was not made of what :meth:`reduce` returned."""
        self.flights.land(memory, getattr(self._thread_of, "number", 0))

    def read(self, address: str, memory: int, where: tuple[Any, ...], origin: str, first_memory: int, by: int) -> Array:
        """Return the array that a pickle means; the very object if it was made in this process. Raises PeerGoneError if
        its sender is gone and the memory unknown here, ClosedError if it was dropped and its flight has ended."""
        reference = m.Reference(memory, *where)  # segments, offset, dtype, shape
        # Where it came from, before it came from the process that pickled it.
        first = m.Reference(first_memory, *where) if origin else reference
        array: Array | None = None
        try:
            if (origin or address) == self.address:
                export = self.flights.find(first.memory)
                array = None if export is None else export.local_array(first)
            elif origin and (maker := self._clients.get(origin)) is not None:
                array = maker.known(first)
            if array is None:
                client = self._clients.get(address) or self._connect(address)
                array = client.array(reference, by)
                handle = array.region.handle
                if handle not in self._origins:
                    with self._lock:
                        for old in [one for one in self._origins if not one.is_open]:
                            del self._origins[old]
                        self._origins[handle] = (origin, first_memory) if origin else (address, memory)
        except BaseException as error:  # it is not in its queue any more
            # An address that cannot be reached is not tried again, but after Ctrl-C.
            if not isinstance(error, Exception) or address == self.address or address in self._clients:
                self._received(address, memory, by)
            raise
        self._received(address, memory, by)
        return array

    def _received(self, address: str, memory: int, by: int) -> None:
        """Say that an array arrived."""
        if address == self.address:
            self.flights.land(memory, by)
            return
        try:
            client = self._clients.get(address) or self._connect(address)
            client.talk.outbox.append(("unpickled", (memory, by)))
            if time.monotonic() - client.told >= TELL_SECONDS:
                client.told = time.monotonic()
                client.talk.send_outbox()
            if client.talk.outbox and not self._is_to_tell:
                self._is_to_tell = True
                self._poke()
        except (VramError, OSError):  # a sender that is gone needs not be told
            pass

    def _connect(self, address: str) -> FetchClient:
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
                    made = FetchClient(channel, address)
                    self._selector.register(made.fd, selectors.EVENT_READ, made)  # first: or nobody would hear it
                    client = self._clients[address] = made
        finally:
            if client is None or client.talk.link is not channel:  # refused, or another thread was faster
                channel.close()
        return client

    def _check(self) -> None:
        if self._stopping:
            raise ClosedError("hand-overs between processes were shut down here while this one began")

    # -- the thread ---------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        told, look = 0.0, 0.0
        while not self._stopping:
            behind = [server for server in self._servers.values() if server.asked or server.talk.outbox]
            wait = min(_SOON, look) if behind else look
            if self._is_to_tell:
                wait = min(wait, max(0.0, told + TELL_SECONDS - time.monotonic()))
            for key, _ in self._selector.select(timeout=wait):
                self._react(key)
            if self._is_to_tell and time.monotonic() - told >= TELL_SECONDS:
                told = time.monotonic()
                self._tell_taken()
            for server in list(self._servers.values()):
                if server.asked or server.talk.outbox:
                    self._catch_up(server)
            look = self.flights.end_stale()

    def _react(self, key: selectors.SelectorKey) -> None:
        peer = key.data
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
        except (VramError, OSError) as error:
            if peer is not None:
                self._drop(peer)
            if isinstance(error, PeerGoneError) and isinstance(peer, FetchServer) and not peer.said_bye:
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
        """Accept one of those who connected, or hang up on another user."""
        try:
            sock, _ = self._listener.accept()
        except OSError:  # no descriptor is left for it: it keeps waiting, and this thread must not spin
            time.sleep(_SOON)
            return
        if peer_credentials(sock).uid != os.geteuid():
            sock.close()
            return
        server = FetchServer(Channel(sock))
        self._servers[server.fd] = server
        self._selector.register(server.fd, selectors.EVENT_READ, server)

    def _listen_to(self, server: FetchServer) -> None:
        """Take one message from a process that uses our arrays. Nonsense costs its connection."""
        server.talk.hear_next(0.0)
        for request in server.talk.inbox:
            if isinstance(request, Failure):
                raise request.error
            if isinstance(request, m.Bye):
                server.said_bye = True
            elif isinstance(request, m.Unpickled):
                for memory, by in request.arrays:
                    server.threads.add(min(by, self._numbered))
                    self.flights.land(memory, by)
            elif isinstance(request, m.Fetch):
                server.threads.add(min(request.by, self._numbered))
                server.asked.append((request, time.monotonic() + FETCH_SECONDS))
        server.talk.inbox.clear()

    def _catch_up(self, server: FetchServer) -> None:
        """Send what a process is owed, as far as there is room; who does not read for too long is cut off."""
        server.talk.send_outbox()
        try:
            while server.asked:
                self._answer(server, server.asked[0][0])
                server.asked.popleft()
        except (WaitTimeoutError, BusyError):
            if server.asked[0][1] < time.monotonic():
                self._drop(server)
        except PeerGoneError:  # what it said before it went is still to be heard, and ends in an end of file
            server.asked.clear()
        except (VramError, OSError):
            self._drop(server)

    def _answer(self, server: FetchServer, request: m.Fetch) -> None:
        export = self.flights.find(request.memory)
        if export is not None:
            with contextlib.suppress(ClosedError):
                kept = export.keep()
                try:
                    if (found := export.part(request.first)) is not None:
                        server.talk.link.send(m.encode(m.Part(found[0])), found[1], timeout=0)
                        return
                finally:
                    kept.release()
        server.talk.link.send(m.encode(m.Gone(request.memory)), timeout=0)

    def _drop(self, peer: FetchClient | FetchServer) -> None:
        """The connection to a peer is over; a peer that is dropped already is not looked at again."""
        peers: dict[Any, Any] = self._servers if isinstance(peer, FetchServer) else self._clients
        with self._lock:
            if peers.get(peer.key) is not peer:
                return
            del peers[peer.key]
            self._selector.unregister(peer.fd)
        peer.end()

    def _retire(self, memory: int) -> None:
        """A memory that was exported is unmapped here. Reached from finalizers: only leaves notes for the thread."""
        for server in list(self._servers.values()):
            server.talk.outbox.append(("unmap", memory))
        self._poke()

    def _poke(self) -> None:
        if self._wake >= 0:
            with contextlib.suppress(OSError):
                os.eventfd_write(self._wake, 1)

    def _tell_taken(self, timeout: float = 0.0) -> None:
        self._is_to_tell = False  # first: what is taken from here on is told the next time
        for client in list(self._clients.values()):
            client.told = time.monotonic()
            client.talk.send_outbox(timeout)
            self._is_to_tell = self._is_to_tell or bool(client.talk.outbox)

    def linger(self) -> None:
        """Serve on, in a process that multiprocessing started, until the arrays that it pickled are taken: a pool reads
        results after its workers have ended. The parent's end ends this."""
        self._tell_taken(1.0)
        parent = parent_process()
        if parent is None:
            return
        with contextlib.suppress(KeyboardInterrupt):  # then it waits no longer
            while parent.is_alive():
                since = self.flights.last_sign()
                if since is None or time.monotonic() - since > LINGER_SECONDS:
                    return
                waiting(wait, [parent.sentinel], _SOON)

    def take_leave(self) -> None:
        """Tell all senders what was taken, and that this process ends of its own accord."""
        self._tell_taken(1.0)
        for client in list(self._clients.values()):
            client.take_leave()

    # -- the end ------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Stop the thread, end all flights, and let go of what others exported."""
        self._stopping = True
        self._poke()
        self._thread.join(5.0)
        self.take_leave()
        self.flights.end_all()
        for client in list(self._clients.values()):
            self._drop(client)
        self.exports.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        wake, self._wake = self._wake, -1
        for server in self._servers.values():
            server.end()
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
        _current.linger()
        _current.take_leave()


def _after_fork_in_child() -> None:
    """The child gets an endpoint of its own; the parent's sockets must not stay open here."""
    global _current, _making
    inherited, _current = _current, None
    _making = threading.Lock()
    if inherited is not None:
        inherited._close_sockets()  # the copies of this process; the parent's selector goes on


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
