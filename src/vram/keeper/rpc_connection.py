"""One connection to a keeper, shared by all threads of a process: requests, replies and notices.

A caller that waits for its reply reads what comes, for all others too; while no caller does, a thread reads
(:func:`_read`). The reader puts an answer into its :class:`Call` and calls its `ring`, which wakes the thread or event
loop that asked. Notices go to the subscriptions (:mod:`.background`), which are called in another thread: the reader
runs no code of users.

Finalizers give leases back too (S5), and may run in any thread at any point: :meth:`RpcConnection.release_later` only
appends to a queue and *tries* to send; the thread that holds the lock for sending looks at the queue again (I3).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ..errors import (
    AccessDeniedError,
    BusyError,
    ClosedError,
    DriverError,
    InternalError,
    PeerGoneError,
    ProtocolError,
    VramError,
    WaitTimeoutError,
)
from ..lifetime import shielded, take, waiting
from ..open_files import close_fds
from ..sharing.channel import Channel, DescriptorsLostError, descriptor_limit
from . import messages as m
from .failures import raised, silent_words
from .paths import check_directory, check_server, check_socket, find_path, how_to_be_let_in, how_to_start, may_connect
from .rules import CANCEL, GOODBYE, HANDSHAKE, LENDER_REQUEST, REQUEST, clip_host, clip_label

if TYPE_CHECKING:
    from typing import Self

    from ..sharing.channel import Credentials
    from .background import Subscription

GREETINGS = 5  # connections that are made before it counts that they were hung up on
_MEANWHILE = 0.01  # seconds that what comes is waited for, while there is no room to send
_NAP = 1.0  # seconds that a sleep lasts: a signal that comes just before one does not end it
READING = "vram: keeper"  # the name of the thread that reads while no caller does
_R = TypeVar("_R", bound=msgspec.Struct)
# A reply and its descriptors, None if there was no room for them: its holder uses what it grants, or gives it back.
Answer = tuple["m.Reply", "list[int] | None"]


class Call:
    """A request, and the answer once the thread that reads has put it there: the thread that takes it out has it.
    `ring` is called in any thread when there is something to see: the answer, a failure, or another keeper."""

    __slots__ = ("answers", "fds", "generation", "is_given_up", "number", "payload", "ring")

    def __init__(
        self, connection: RpcConnection, request: m.Request, ring: Callable[[], object], fds: Sequence[int] = ()
    ) -> None:
        self.number = request.call
        self.payload = m.encode(request)
        self.fds = fds  # lent until the call is over
        self.ring = ring
        self.generation = -1  # of the keeper that it was sent to last
        self.answers: list[Answer] = []
        self.is_given_up = False
        connection._calls[self.number] = self


class RpcConnection:
    """A connection to a keeper without requests of its own; :class:`~vram.keeper.client.KeeperClient` has those.
    `lends` is the id of a lender, empty for a keeper; `grace` is the seconds for an answer that needs no wait."""

    lends = ""
    grace = REQUEST

    def __init__(self, channel: Channel, path: str, label: str, welcome: m.Welcome) -> None:
        self.path = path
        self.label = label
        self.server_pid = welcome.pid
        if welcome.lends:
            self.lends, self.grace = welcome.lends, LENDER_REQUEST
        channel.only_memory = True
        self._channel = channel
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._sending = threading.RLock()  # reentrant only to be asked whether the thread itself has it
        # To read. Reentrant: a signal handler, or a finalizer, may make a call where its own thread reads.
        self._turn = threading.RLock()
        self._calls: dict[int, Call] = {}  # without an answer; the thread that takes one out decides its end
        self._failure: VramError | None = None
        self.subscriptions: dict[Subscription, None] = {}  # in the order in which they hear
        # Another keeper may go on for this one. Each call that waits is sent to it again, and what was said without a
        # number is said again: behind which call that was, until a call with a higher number is answered.
        self._generation = 0  # how many keepers went on for another
        self._unsaid: deque[m.Release | m.Cancel] = deque()
        self._said: deque[tuple[int, bytes]] = deque()
        self._came: deque[tuple[bytes, list[int], bool]] = deque()  # taken while sending, by who has the turn to read
        self._sent = self._heard = 0  # the highest numbers of calls that were sent, and that were answered
        # The thread that reads while no caller does. It has the connection only while there is a message.
        self._watch = select.epoll(1)  # of that thread, which a caller that reads asks to look away
        self._fd = channel.fileno()  # open until the reading thread has the turn after a failure
        self._watch.register(self._fd, select.EPOLLIN)
        self._reading = threading.Thread(
            target=_read, args=(weakref.ref(self), channel, self._watch, self._turn), name=READING, daemon=True
        )
        try:
            self._reading.start()
        except RuntimeError as error:
            self._watch.close()
            channel.close()
            raise DriverError(f"starting a thread for {path}", errno.EAGAIN, "EAGAIN", str(error)) from None

    @classmethod
    @shielded
    def connect(cls, path: str | None = None, *, timeout: float = HANDSHAKE, label: str = "") -> Self:
        """Connect to a keeper within `timeout` seconds; other users see `label`, which is not verified."""
        deadline = time.monotonic() + timeout
        found, chosen = find_path(path)
        for left in reversed(range(GREETINGS)):
            channel = _open_channel(found, chosen, max(0.001, deadline - time.monotonic()))
            try:
                welcome = _greet(channel, found, label, max(0.01, deadline - time.monotonic()))
                break
            except BaseException as error:
                channel.close()
                # Hung up on by a keeper that was killed, perhaps: where another follows, it is there.
                if not (left and isinstance(error, PeerGoneError) and time.monotonic() <= deadline):
                    raise
        return cls(channel, found, label, welcome)

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be empty by then
        if not is_ending() and getattr(self, "_pid", 0) == os.getpid():
            self._channel.hang_up()  # which has the reading thread end

    def lost(self) -> str:
        """Say that the other side is gone, and what to do."""
        if self.lends:
            return (
                f"the lender at {self.path} is gone. Memory that came by descriptor stays; memory of cudaMalloc or of "
                f"a pool is undefined, unless it was asked back before. Borrow again when somebody lends there"
            )
        return (
            f"the keeper at {self.path} is gone; what is mapped stays, its leases are over, and what it kept has to be "
            f"published again; {how_to_start(self.path)}"
        )

    def server(self) -> Credentials:
        """Return who listened when this connected, as the kernel says."""
        return self._channel.peer()

    @property
    def is_usable(self) -> bool:
        """Whether this is the process that connected and, as far as is known, the keeper is still there."""
        if self._pid != os.getpid() or self._failure is not None:
            return False
        poller = select.poll()
        poller.register(self._fd, 0)  # hang-up and errors are always told
        return not poller.poll(0) and self._failure is None  # else the descriptor may be another file's by now

    @shielded
    def close(self) -> None:
        """End the connection; the keeper takes all its leases back. Idempotent."""
        if self._pid == os.getpid():  # else it is the parent's
            self._fail(PeerGoneError(f"the connection to the keeper at {self.path} was closed here"))
            # A finalizer may call this in the middle of reading.
            is_reading = self._reading is threading.current_thread() or self._turn._is_owned()  # type: ignore[attr-defined]
            if not is_reading:
                self._reading.join(GOODBYE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}, {'open' if self.is_usable else 'closed'}>"

    # -- asking -----------------------------------------------------------------------------------------------------
    def _request(
        self, kind: type[_R], request: Callable[..., m.Request], *fields: object, fds: Sequence[int] = ()
    ) -> _R:
        """Make a request of the fields behind its number, and return its reply, which is to be of a kind."""
        reply, _ = self._converse(request(next(self._numbers), *fields), fds, time.monotonic() + self.grace)
        if type(reply) is not kind:
            raise self._protocol_error(reply)
        return reply

    @shielded
    def _converse(self, request: m.Request, fds: Sequence[int], deadline: float | None) -> tuple[m.Reply, list[int]]:
        """Send a request and wait for its reply and descriptors; a reply that is an error is raised."""
        bell = threading.Lock()
        bell.acquire()
        call = Call(self, request, bell.release, fds)
        reads = self._pid == os.getpid() and self._turn.acquire(False)
        if reads and self._failure is not None:  # the descriptor may be closed; :meth:`_send` says why
            self._turn.release()
            reads = False
        if reads:
            poller = select.poll()
            poller.register(self._fd, select.POLLIN)
            self._watch.modify(self._fd, 0)  # the reading thread looks away
        try:
            self._send(call, deadline)
            while True:
                seconds = _NAP if deadline is None else min(_NAP, deadline - time.monotonic())
                if seconds <= 0:
                    raise self._timed_out()
                if not reads:
                    waiting(bell.acquire, True, seconds)
                elif waiting(poller.poll, seconds * 1000):
                    self._hear(0)
                if call.answers:
                    break
                self.look(call, deadline)
        except BaseException as error:
            self.give_up(call, is_late=isinstance(error, VramError) or type(request) is m.Cancel)
            raise
        finally:
            if reads:
                self._watch.modify(self._fd, select.EPOLLIN)
                self._turn.release()
        reply, received = call.answers.pop()
        if type(reply) is m.Error or received is None:
            raise self._refused(reply)
        return reply, received

    def look(self, call: Call, deadline: float | None = None) -> None:
        """Raise what ended the connection, or send a call again to the keeper that goes on, before a deadline."""
        if (self._failure is not None or call.generation != self._generation) and not call.answers:
            self._send(call, deadline)

    def give_up(self, call: Call, *, is_late: bool = True) -> None:
        """End a call whose caller waits no longer: the keeper is told, and what it grants is given back. Unless it
        `is_late`, wait a moment for the keeper's word: it answers in order, so what was granted has come back then."""
        if self._calls.pop(call.number, None) is None:
            call.is_given_up = True  # first: the thread that is about to deliver the answer looks afterwards
            self._drop_answer(call)
        elif call.generation >= 0:
            self._unsaid.append(m.Cancel(0, call.number))
            self._flush()
            if not is_late and self._failure is None:
                with contextlib.suppress(VramError, OSError):
                    self._converse(m.Cancel(next(self._numbers), call.number), (), time.monotonic() + CANCEL)

    def _drop_answer(self, call: Call) -> None:
        with contextlib.suppress(IndexError):
            self._drop(*call.answers.pop())

    def _drop(self, reply: m.Reply, fds: list[int] | None) -> None:
        """Give back what a reply grants that nobody uses. Never waits."""
        if isinstance(reply, m.Attached):
            self.release_later(reply.lease)
        elif isinstance(reply, m.Claimed):
            self.release_later(reply.claim)
        close_fds(fds or [])

    # -- sending ----------------------------------------------------------------------------------------------------
    def _lock(self, until: float) -> None:
        """Take the lock for sending before a time."""
        if self._sending._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise BusyError(
                f"this thread is in the middle of sending to the keeper at {self.path}, which a signal handler or "
                f"finalizer interrupted: do it after that call, or in another thread"
            )
        while not self._sending.acquire(False):  # another thread of this process sends
            if self._turn._is_owned():  # type: ignore[attr-defined]
                self._take_meanwhile()
                is_late = time.monotonic() > until
            elif take(self._sending, max(0.0, until - time.monotonic())):
                return
            else:
                is_late = True
            if is_late:
                raise self._timed_out()

    def _push(self, payload: bytes, fds: Sequence[int], until: float) -> None:
        """Send a message before a time, with the lock for sending. A keeper that nobody reads from reads nothing: who
        has the turn to read takes what comes meanwhile."""
        while self._turn._is_owned():  # type: ignore[attr-defined]
            try:
                return self._channel.send(payload, fds, timeout=0.0)
            except WaitTimeoutError:
                if time.monotonic() > until:
                    raise
                self._take_meanwhile()
        return self._channel.send(payload, fds, timeout=max(0.0, until - time.monotonic()))

    def _take_meanwhile(self) -> None:
        """Take a message off the socket, if one comes soon, for :meth:`_hear` to deliver."""
        if self._channel.wait(_MEANWHILE):
            try:
                self._came.append((*self._channel.take(timeout=0.0), False))
            except DescriptorsLostError as error:
                self._came.append((error.payload, [], True))

    def _send(self, call: Call, deadline: float | None = None) -> None:
        """Send a call before a deadline (``time.monotonic``), or send it again; what this raises was not sent."""
        if self._pid != os.getpid():
            self._channel.fileno()  # raises ForkedError, before any lock that a lost thread may hold
        if self._failure is not None:
            raise self._failure_again()
        until = time.monotonic() + REQUEST
        if deadline is not None and deadline < until:
            until = deadline
        if self._sending._is_owned() or not self._sending.acquire(False):  # type: ignore[attr-defined]
            self._lock(until)
        try:
            if self._unsaid:
                self._say(until)
            try:
                self._channel.send(call.payload, call.fds, timeout=0.0)
            except WaitTimeoutError:  # few have to wait, and a call costs more
                self._push(call.payload, call.fds, until)
            call.generation = self._generation
            if call.number > self._sent:
                self._sent = call.number
        except (PeerGoneError, ClosedError):
            raise self._hung_up() from None
        finally:
            self._sending.release()
            if self._unsaid:  # by a finalizer that found the lock taken
                self._flush()
            while self._came and self._turn._is_owned():  # type: ignore[attr-defined]
                self._hear(0)

    @shielded
    def release_later(self, lease_id: int) -> None:
        """Give a lease or claim back without waiting; with the next call at the latest. Safe in a finalizer."""
        self._unsaid.append(m.Release(0, [lease_id]))
        self._flush()

    def _flush(self) -> None:
        """Say what was queued, unless another thread is sending: it looks at the queue again. Never waits."""
        while self._unsaid and self._failure is None and self._pid == os.getpid():
            if self._sending._is_owned() or not self._sending.acquire(False):  # type: ignore[attr-defined]
                return
            try:
                self._say(0)
            except (VramError, OSError):
                return  # no room now
            finally:
                self._sending.release()

    def _say(self, until: float) -> None:
        """Say what was queued, as far as there is room before a time. Called with the lock for sending."""
        while self._said and self._said[0][0] < self._heard:
            self._said.popleft()
        while self._unsaid:
            payload = m.encode(self._unsaid[0])
            try:
                self._channel.send(payload, timeout=0.0)
            except WaitTimeoutError:
                self._push(payload, (), until)
            self._said.append((self._sent, payload))
            self._unsaid.popleft()  # only now: what is said twice does no harm

    # -- reading ------------------------------------------------------------------------------------------------------
    def _hear(self, seconds: float) -> None:
        """Read and deliver a message that comes within `seconds`. Called with the turn to read."""
        lost = False
        try:
            try:
                if self._came:
                    payload, fds, lost = self._came.popleft()
                else:
                    payload, fds = self._channel.take(timeout=seconds)
            except DescriptorsLostError as error:  # a matter of one call, not of the connection
                payload, fds, lost = error.payload, [], True
            reply = m.decode_reply(payload)
        except WaitTimeoutError:
            return
        except ProtocolError as error:
            self._fail(error.with_traceback(None))
            return
        except VramError:
            self._fail()
            return
        except OSError as error:
            self._fail(InternalError(f"reading from the keeper at {self.path} failed: {error}"))
            return
        if (fds or lost) and not isinstance(reply, (m.Attached, m.Descriptors)):
            self._drop(reply, fds)
            said = f"what listens at {self.path} sent descriptors with {type(reply).__name__}, which has none"
            self._fail(ProtocolError(f"{said}: the connection is ended"))
            return
        number = getattr(reply, "call", 0)  # a greeting has none
        call = self._calls.pop(number, None)
        if call is not None:
            if number > self._heard:
                self._heard = number
            call.answers.append((reply, None if lost else fds))
            if call.is_given_up:
                self._drop_answer(call)
            try:  # noqa: SIM105  (as _ring() does, in a call less)
                call.ring()
            except RuntimeError:
                pass
        elif isinstance(reply, m.Notice):
            for one in list(self.subscriptions):
                # A newer version harms nobody.
                if one.key == (reply.name, reply.version) and (reply.reason == "revoked" or one.of_all):
                    self.subscriptions.pop(one, None)
                    one.post()
        elif number == 0 and isinstance(reply, m.Error):
            self._fail(raised(reply))
        elif isinstance(reply, m.Recovered) and not self.lends:
            self._recovered(reply)
        else:  # of a call that was given up, or the greeting of a keeper that follows another
            self._drop(reply, fds)

    def _recovered(self, reply: m.Recovered) -> None:
        """Another keeper goes on: say again what may not have been heard, and have the calls that wait sent again."""
        self.server_pid = reply.pid
        until = time.monotonic() + REQUEST
        try:
            self._lock(until)
            try:
                for payload in [said for behind, said in self._said if behind >= self._heard]:
                    self._push(payload, (), until)
                for one in list(self._unsaid):  # it is said once more later, but has to come before what follows
                    self._push(m.encode(one), (), until)
                last = next(self._numbers)
                repeating = m.Repeating(0, reply.keeper, min(list(self._calls), default=last), last)
                self._push(m.encode(repeating), (), until)
                self._generation += 1  # from now on the calls that wait are sent
                # News that did not arrive. A watch that was not accepted yet is a call, which is sent again.
                for key in {one.key for one in list(self.subscriptions) if one.is_accepted}:
                    self._push(m.encode(m.Watch(0, *key)), (), until)
            finally:
                self._sending.release()
        except VramError:  # half of it was said: that keeper would heed no call any more
            self._fail(PeerGoneError(f"the next keeper at {self.path} was not told of all calls"))
            return
        self._flush()
        while self._came:
            self._hear(0)
        for call in list(self._calls.values()):
            _ring(call)

    # -- failing ------------------------------------------------------------------------------------------------------
    def _fail(self, error: VramError | None = None) -> VramError:
        """The connection is of no use any more: tell all who wait; the first reason stays. Return what to raise."""
        if self._failure is None:
            self._failure = PeerGoneError(self.lost()) if error is None else error
        self._channel.hang_up()  # which has the reading thread end
        for call in list(self._calls.values()):
            _ring(call)
        while self.subscriptions:
            with contextlib.suppress(KeyError):  # another thread was quicker
                one, _ = self.subscriptions.popitem()
                if one.of_all:
                    one.post()
                else:
                    one.stop()
        return self._failure_again()

    def _hung_up(self) -> VramError:
        """The other side takes nothing any more. Read the rest, which may say why; return what to raise."""
        if self._turn.acquire(True, GOODBYE):  # who has it reads the end too
            try:
                until = time.monotonic() + GOODBYE
                while self._failure is None and time.monotonic() < until:
                    self._hear(GOODBYE)
            finally:
                self._turn.release()
        return self._fail()

    def _failure_again(self) -> VramError:
        failure = self._failure or PeerGoneError("no failure")
        try:
            return type(failure)(*failure.args)
        except TypeError:  # an exception of more arguments than its message
            return PeerGoneError(str(failure))

    def _timed_out(self) -> WaitTimeoutError:
        return WaitTimeoutError(f"the keeper at {self.path} (pid {self.server_pid}) did not answer in time")

    def _refused(self, reply: m.Reply) -> VramError:
        """Return the error that a reply is, or that it had descriptors and there was no room for them."""
        if isinstance(reply, m.Error):
            return raised(reply)
        self._drop(reply, None)
        what = f"receiving descriptors from the keeper at {self.path}"
        return DriverError(what, errno.EMFILE, "EMFILE", descriptor_limit())

    def _protocol_error(self, reply: object) -> VramError:
        return self._fail(ProtocolError(f"the keeper at {self.path} answered {type(reply).__name__} out of turn"))


# -- how a connection begins -------------------------------------------------------------------------------------------
def _open_channel(path: str, chosen: bool, timeout: float) -> Channel:
    """Connect to whoever listens at `path`, and make sure that they are to be trusted."""
    if not chosen:
        check_directory(os.path.dirname(path))
    try:
        return Channel.connect(path, timeout, lambda server: check_server(path, chosen, server))
    except PeerGoneError as error:
        check_socket(path)
        raise PeerGoneError(f"no keeper: {error}; {how_to_start(path)}") from None
    except AccessDeniedError:
        if may_connect(path):  # it is who listens that was refused, by check_server
            raise
        raise AccessDeniedError(f"may not connect to {path}: {how_to_be_let_in(path)}") from None


def own_host() -> str:
    """Return what this process's host is called: in a container its own name, unless it was given another's."""
    return clip_host(os.uname().nodename)


def _greet(channel: Channel, path: str, label: str, timeout: float) -> m.Welcome:
    """Say hello and return what the keeper answers. Raises PeerGoneError if it hung up in place of a greeting."""
    with contextlib.suppress(PeerGoneError):  # it may have said why it hung up
        channel.send(m.encode(m.Hello(m.PROTOCOL, clip_label(label), own_host())), timeout=timeout)
    try:
        payload, _ = channel.take(timeout=timeout)
        reply = m.decode_reply(payload)
    except WaitTimeoutError:
        raise WaitTimeoutError(
            f"what listens at {path} did not answer: a keeper that hangs, or no keeper. {silent_words(channel.peer())}"
        ) from None
    except PeerGoneError:
        raise PeerGoneError(f"what listens at {path} hung up: a keeper that stops, or no keeper") from None
    except ProtocolError as error:
        raise ProtocolError(f"what listens at {path} is no keeper ({error})") from None
    if isinstance(reply, m.Error):
        raise raised(reply)
    if isinstance(reply, m.Recovered):
        raise PeerGoneError(f"the keeper at {path} was killed before it greeted, and another goes on: connect again")
    if not isinstance(reply, m.Welcome):
        raise ProtocolError(f"what listens at {path} is no keeper: it answered {type(reply).__name__}")
    return reply


# -- the thread that reads -------------------------------------------------------------------------------------------
def _ring(call: Call) -> None:
    with contextlib.suppress(RuntimeError):  # the lock was released before, or the event loop is closed
        call.ring()


def _read(whose: weakref.ref[RpcConnection], channel: Channel, watch: select.epoll, turn: threading.RLock) -> None:
    """Read what comes over a connection while no caller does, and close it at its end: nobody else may, since a
    descriptor that another thread closes could be another file's by the next system call."""
    is_there = True
    while is_there:
        watch.poll(maxevents=1)
        connection = whose()
        if connection is None:
            break
        with turn:
            try:
                if connection._failure is None:
                    connection._hear(0)
            except BaseException as error:  # noqa: BLE001  (all who wait hear of it)
                connection._fail(InternalError(f"reading from the keeper at {connection.path} failed: {error!r}"))
            is_there = connection._failure is None
        del connection  # nothing keeps it while there is no message
    with turn:
        watch.close()
        channel.close()
