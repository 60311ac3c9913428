"""One connection to a keeper, shared by all threads of a process: requests, replies and notices.

A caller that waits for its reply reads what comes, for all others too; while no caller does, a thread reads
(:func:`_read`). The reader puts a reply into its :class:`Call` and calls its `ring`, which wakes the thread or event
loop that asked. Notices go to the subscriptions (:mod:`.notices`), which make their calls in a thread of their own: the
reader runs no code of users.

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
from typing import TYPE_CHECKING, NamedTuple, TypeVar

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

    from .notices import Subscription

_LENDER_GONE = (
    "the lender at {path} is gone. What came by descriptor stays; memory of cudaMalloc or of a pool is undefined, "
    "unless it was asked back before. Borrow again when somebody lends there"
)
GREETINGS = 3  # connections that are made before it counts that they were hung up on
_NAP = 1.0  # seconds that a sleep lasts: a signal that comes just before one does not end it
READING = "vram: keeper"  # the name of the thread that reads while no caller does
_MOST_SAID = 4096  # messages without a number that are kept, and numbers in one message
_GIVEN_UP = 1024  # calls that were given up, and are remembered
_R = TypeVar("_R", bound=msgspec.Struct)


class Answer(NamedTuple):
    """The reply to a call: its holder uses what it grants, or gives it back (:meth:`RpcConnection._drop`).
    `lost`: there was no room for all of its descriptors."""

    reply: m.Reply
    fds: list[int]
    lost: bool = False


class Call:
    """A request that was sent, and its reply once the thread that reads has put it there: the thread that takes it out
    has it. `ring` is called in any thread when there is something to see: the reply, a failure, or another keeper."""

    __slots__ = ("answers", "is_given_up", "number", "ring")

    def __init__(self, number: int, ring: Callable[[], object]) -> None:
        self.number = number
        self.ring = ring
        self.answers: list[Answer] = []
        self.is_given_up = False


class Repeats:
    """The requests of one connection that are not known to be done, for a keeper that goes on for another one. Calls in
    `due` are sent again by their callers, which have their descriptors. `keeper` is the number of the keeper that was
    told so last (0: none)."""

    def __init__(self) -> None:
        self.due: set[int] = set()
        self.keeper = 0
        self._given_up: deque[int] = deque(maxlen=_GIVEN_UP)
        # The message of each unanswered call, and `last` at that time. Needs the lock for sending, except in
        # :meth:`over`.
        self.sent: dict[int, tuple[bytes, Sequence[int], int]] = {}
        self.said: deque[tuple[int, bytes]] = deque(maxlen=_MOST_SAID)
        self.last = self.heard = 0  # numbers of what was said: the last, and the last that an answer came behind

    def over(self, call: int, *, is_answered: bool) -> None:
        """Forget a call; one that was answered shows that what was said before was heard."""
        sent = self.sent.pop(call, None)
        self.due.discard(call)
        if sent is None:
            return
        if not is_answered:
            self._given_up.append(call)
        else:  # without the lock: what takes a number back to an earlier one costs that something is said twice
            self.heard = max(self.heard, sent[2])

    def begin(self, keeper: int, last: int) -> list[bytes]:
        """Return what is to be said at once to that keeper, before :meth:`begun`; `last` is the last call so far."""
        self.keeper = 0
        while self.said and self.said[0][0] <= self.heard:
            self.said.popleft()
        self.due = set(self.sent)
        given_up = [m.encode(m.Cancel(0, call)) for call in list(self._given_up)]
        repeating = m.encode(m.Repeating(0, keeper, min(self.due, default=last), last))
        return [*(payload for _, payload in list(self.said)), *given_up, repeating]

    def take(self, call: int) -> tuple[bytes, Sequence[int]] | None:
        """Return what a call is to be sent as once more, if it is."""
        if call not in self.due or not self.keeper:
            return None
        self.due.discard(call)
        sent = self.sent.get(call)
        return None if sent is None else sent[:2]


class RpcConnection:
    """A connection to a keeper without requests of its own; :class:`~vram.keeper.client.KeeperClient` has those.
    `lends` is the id of a lender, empty for a keeper; `grace` is the seconds for an answer that needs no wait."""

    lends = ""
    grace = REQUEST

    lost_message = (
        "the keeper at {path} is gone; what is mapped stays, its leases are over, and what it kept has to be "
        "published again; {advice}"
    )

    def __init__(self, channel: Channel, path: str, label: str, server_pid: int) -> None:
        self.path = path
        self.label = label
        self.server_pid = server_pid
        channel.only_memory = True
        self._channel = channel
        self._pid = os.getpid()
        self._numbers = itertools.count(1)
        self._sending = threading.RLock()  # reentrant only to be asked whether the thread itself has it
        # To read. Reentrant: a signal handler, or a finalizer, may make a call where its own thread reads.
        self._turn = threading.RLock()
        self._calls: dict[int, Call] = {}  # without a reply; the thread that takes one out decides its end
        self._failure: VramError | None = None
        self._given_back: deque[int] = deque()  # leases and claims
        self._cancelled: deque[int] = deque()  # calls without a caller, of which the keeper is yet to be told
        self._leases: dict[int, tuple[str, int]] = {}
        self._repeats: Repeats | None = None  # of a keeper, after which another one may go on; not of a lender
        self.subscriptions: dict[int, Subscription] = {}
        self.taken_back: set[tuple[str, int]] = set()  # names and versions whose leases were ended by force

    @classmethod
    @shielded
    def connect(cls, path: str | None = None, *, timeout: float = HANDSHAKE, label: str = "") -> Self:
        """Connect to a keeper within `timeout` seconds; other users see `label`, which is not verified."""
        deadline = time.monotonic() + timeout
        found, chosen = find_path(path)
        for left in reversed(range(GREETINGS)):
            channel = _open_channel(found, chosen, max(0.001, deadline - time.monotonic()))
            try:
                welcome = _greet(channel, found, label, deadline - time.monotonic())
                break
            except _HungUpError as error:  # a keeper that was killed, perhaps: where another follows, it is there
                channel.close()
                if not left or time.monotonic() > deadline:
                    raise PeerGoneError(str(error)) from None
            except BaseException:
                channel.close()
                raise
        made = cls(channel, found, label, welcome.pid)
        if welcome.lends:
            made.lends, made.grace, made.lost_message = welcome.lends, LENDER_REQUEST, _LENDER_GONE
        else:
            made._repeats = Repeats()
        made._start()
        return made

    def _start(self) -> None:
        """Start the thread that reads while no caller does. It has the connection only while there is a message."""
        self._watch = select.epoll(1)  # of that thread, which a caller that reads asks to look away
        self._fd = self._channel.fileno()  # open until the reading thread has the turn after a failure
        self._watch.register(self._fd, select.EPOLLIN)
        self._reading = threading.Thread(
            target=_read,
            args=(weakref.ref(self), self._channel, self._watch, self._turn),
            name=READING,
            daemon=True,
        )
        try:
            self._reading.start()
        except RuntimeError as error:
            self._watch.close()
            self._channel.close()
            raise DriverError(f"starting a thread for {self.path}", errno.EAGAIN, "EAGAIN", str(error)) from None

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be empty by then
        if not is_ending() and getattr(self, "_pid", 0) == os.getpid():
            self._channel.hang_up()  # which has the reading thread end

    def lost(self) -> str:
        """Say that the other side is gone, and what to do."""
        return self.lost_message.format(path=self.path, advice=how_to_start(self.path))

    def process(self) -> int:
        """Return the pid of the listener when this connected, as the kernel says; 0 if it is not to be seen."""
        return self._channel.peer().pid or 0

    @property
    def is_usable(self) -> bool:
        """Whether this is the process that connected and, as far as is known, the keeper is still there."""
        if self._pid != os.getpid() or self._failure is not None:
            return False
        try:
            return not self._channel.is_gone()
        except ClosedError:
            return False

    def server_uid(self) -> int:
        """Return the user who listens there, as the kernel says."""
        return self._channel.peer().uid

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

    # -- giving back ------------------------------------------------------------------------------------------------
    @shielded
    def release_later(self, lease_id: int) -> None:
        """Give a lease or claim back without waiting; with the next call at the latest. Safe in a finalizer."""
        self._leases.pop(lease_id, None)
        self._given_back.append(lease_id)
        self._flush()

    # -- asking -----------------------------------------------------------------------------------------------------
    def _request(
        self, kind: type[_R], request: Callable[..., m.Request], *fields: object, fds: Sequence[int] = ()
    ) -> _R:
        """Make a request of the fields behind its number, and return its reply, which is to be of a kind."""
        call = next(self._numbers)
        reply = self._ask(request(call, *fields), call, fds)
        if type(reply) is not kind:
            raise self._protocol_error(reply)
        return reply

    def _ask(self, request: m.Request, number: int, fds: Sequence[int] = ()) -> m.Reply:
        """Send a request whose reply carries no descriptors and return the reply."""
        answer = self._converse(request, number, fds, self.grace)
        if answer.fds:
            self._drop(answer)
            raise self._protocol_error(answer.reply)
        return answer.reply

    @shielded
    def _converse(self, request: m.Request, number: int, fds: Sequence[int], timeout: float | None) -> Answer:
        """Send a request and wait for the reply with its number; a reply that is an error is raised."""
        deadline = None if timeout is None else time.monotonic() + timeout
        bell = threading.Lock()
        bell.acquire()
        call = Call(number, bell.release)
        reads = self._pid == os.getpid() and self._turn.acquire(False)
        if reads and self._failure is not None:  # and the descriptor may be closed
            self._turn.release()
            raise self._failure_again()
        if reads:
            poller = select.poll()
            poller.register(self._fd, select.POLLIN)
            self._watch.modify(self._fd, 0)  # the reading thread looks away
        try:
            self.begin(call, request, fds, deadline)
            left = timeout
            try:
                while True:
                    seconds = _NAP if left is None else min(left, _NAP)
                    if not reads:
                        waiting(bell.acquire, True, seconds)
                    elif waiting(poller.poll, seconds * 1000):
                        self._hear(0)
                    if call.answers:
                        break
                    self.look(call, deadline)
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise self._timed_out()
            except BaseException as error:
                if isinstance(request, m.Cancel):
                    self._calls.pop(number, None)
                else:
                    self.give_up(call, is_late=isinstance(error, VramError))
                raise
        finally:
            if reads:
                self._watch.modify(self._fd, select.EPOLLIN)
                self._turn.release()
        answer = call.answers.pop()
        if type(answer.reply) is m.Error or answer.lost:
            self.received(answer)
        return answer

    def begin(self, call: Call, request: m.Request, fds: Sequence[int] = (), deadline: float | None = None) -> None:
        """Send a request before a deadline (``time.monotonic``). `fds` are lent until the call is over."""
        if self._pid != os.getpid():
            self._channel.fileno()  # raises ForkedError, before any lock that a lost thread may hold
        self._calls[call.number] = call
        try:
            self._send(m.encode(request), fds, deadline, 0 if isinstance(request, m.Cancel) else call.number)
        except BaseException:
            self._calls.pop(call.number, None)
            if self._repeats is not None:
                self._repeats.over(call.number, is_answered=False)
            raise

    def look(self, call: Call, deadline: float | None = None) -> None:
        """Raise what ended the connection, or send a call again to the keeper that goes on, before a deadline."""
        if self._failure is not None and not call.answers:
            raise self._failure_again()
        repeats = self._repeats
        if repeats is not None and call.number in repeats.due:
            until = time.monotonic() + REQUEST
            if deadline is not None and deadline < until:
                until = deadline
            self._lock(until)
            try:
                again = repeats.take(call.number)
                if again is not None:
                    self._channel.send(*again, timeout=max(0.0, until - time.monotonic()))
            except (PeerGoneError, ClosedError):
                raise self._hung_up() from None
            finally:
                self._unlock()

    def give_up(self, call: Call, *, is_late: bool = True) -> None:
        """End a call whose caller waits no longer: the keeper is told, and what it grants is given back. Unless it
        `is_late`, wait a moment for the keeper's word: it answers in order, so what was granted has come back then."""
        if self._calls.pop(call.number, None) is None:
            call.is_given_up = True  # first: the thread that is about to deliver the reply looks afterwards
            self._drop_late(call)
            return
        if self._repeats is not None:
            self._repeats.over(call.number, is_answered=False)
        if not is_late and self._failure is None:
            number = next(self._numbers)
            with contextlib.suppress(VramError, OSError):
                self._converse(m.Cancel(number, call.number), number, (), CANCEL)
                return
        self._cancelled.append(call.number)
        self._flush()

    def received(self, answer: Answer) -> Answer:
        """Return the reply to a call; raise an error that it is, or that it had descriptors and there was no room."""
        if isinstance(answer.reply, m.Error):
            raise raised(answer.reply)
        if answer.lost:
            self._drop(answer)
            raise DriverError(
                f"receiving descriptors from the keeper at {self.path}", errno.EMFILE, "EMFILE", descriptor_limit()
            )
        return answer

    # -- sending ----------------------------------------------------------------------------------------------------
    def _lock(self, until: float) -> None:
        """Take the lock for sending before a time."""
        if self._sending._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
            raise BusyError(
                f"this thread is in the middle of sending to the keeper at {self.path}, which a signal handler or "
                f"finalizer interrupted: do it after that call, or in another thread"
            )
        if not (self._sending.acquire(False) or take(self._sending, max(0.0, until - time.monotonic()))):
            raise self._timed_out()  # another thread of this process waits to send

    def _unlock(self) -> None:
        self._sending.release()
        if self._given_back or self._cancelled:  # by a finalizer that found the lock taken
            self._flush()

    def _send(self, payload: bytes, fds: Sequence[int], deadline: float | None, number: int) -> None:
        """Send a request before a deadline; what this raises was not sent. Without a number it needs room now."""
        if self._failure is not None:
            raise self._failure_again()
        until = time.monotonic() + REQUEST
        if deadline is not None and deadline < until:
            until = deadline
        if self._sending._is_owned() or not self._sending.acquire(False):  # type: ignore[attr-defined]
            self._lock(until)
        try:
            if self._given_back or self._cancelled:
                self._give_back(until if number else 0.0)
            if number and self._repeats is not None:
                self._repeats.sent[number] = payload, fds, self._repeats.last
            self._channel.send(payload, fds, timeout=max(0.0, until - time.monotonic()) if number else 0.0)
        except (PeerGoneError, ClosedError):
            raise self._hung_up() from None
        finally:
            self._sending.release()
            if self._given_back or self._cancelled:  # by a finalizer that found the lock taken
                self._flush()

    def _give_back(self, until: float) -> None:
        """Send what was queued, as far as there is room before a time. Called with the lock for sending."""
        request: m.Request
        while self._cancelled or self._given_back:
            queue, count = self._given_back, 1
            if self._cancelled:
                queue, request = self._cancelled, m.Cancel(0, self._cancelled[0])
            else:  # by index: others append meanwhile. Popped only after the send, which may be done twice without harm
                count = min(len(queue), _MOST_SAID)
                request = m.Release(0, [queue[at] for at in range(count)])
            payload = m.encode(request)
            self._channel.send(payload, timeout=max(0.0, until - time.monotonic()))
            if self._repeats is not None:
                self._repeats.last += 1
                self._repeats.said.append((self._repeats.last, payload))
            for _ in range(count):
                queue.popleft()

    def _flush(self) -> None:
        """Send what was queued, unless another thread is sending: it looks at the queue again. Never waits."""
        while (self._given_back or self._cancelled) and self._failure is None and self._pid == os.getpid():
            if self._sending._is_owned() or not self._sending.acquire(False):  # type: ignore[attr-defined]
                return
            try:
                self._give_back(0)
            except (VramError, OSError):
                return  # no room now
            finally:
                self._sending.release()

    # -- reading ------------------------------------------------------------------------------------------------------
    def _hear(self, seconds: float) -> None:
        """Read and deliver a message that comes within `seconds`. Called with the turn to read."""
        lost = False
        try:
            payload, fds = self._channel.take(timeout=seconds)
        except WaitTimeoutError:
            return
        except DescriptorsLostError as error:  # a matter of one call, not of the connection
            payload, fds, lost = error.payload, [], True
        except ProtocolError as error:
            self._fail(error.with_traceback(None))
            return
        except VramError:
            self._fail()
            return
        except OSError as error:
            self._fail(InternalError(f"reading from the keeper at {self.path} failed: {error}"))
            return
        self._sort(payload, fds, lost)

    def _sort(self, payload: bytes, fds: list[int], lost: bool) -> None:
        """Deliver what was taken off the socket."""
        try:
            answer = Answer(m.decode_reply(payload), fds, lost)
        except ProtocolError as error:
            close_fds(fds)
            self._fail(error.with_traceback(None))
            return
        reply = answer.reply
        if (fds or lost) and not isinstance(reply, (m.Attached, m.Descriptors)):
            self._drop(answer)
            said = f"what listens at {self.path} sent descriptors with {type(reply).__name__}, which has none"
            self._fail(ProtocolError(f"{said}: the connection is ended"))
            return
        number = getattr(reply, "call", 0)  # a greeting has none
        call = self._calls.pop(number, None)
        if call is not None:
            if self._repeats is not None:
                self._repeats.over(number, is_answered=True)
            call.answers.append(answer)
            if call.is_given_up:
                self._drop_late(call)
            try:  # noqa: SIM105  (as _ring() does, in a call less)
                call.ring()
            except RuntimeError:
                pass
        elif isinstance(reply, m.Notice):
            self._tell((reply.name, reply.version), reply.reason == "revoked")
        elif number == 0 and isinstance(reply, m.Error):
            if len(reply.details) == 2 and reply.details[1].isdecimal():
                self.taken_back.add((reply.details[0], int(reply.details[1][:20])))
            self._fail(raised(reply))
        elif isinstance(reply, m.Recovered) and self._repeats is not None:
            self._recovered(reply, self._repeats)
        else:  # of a call that was given up, or the greeting of a keeper that follows another
            self._drop(answer)

    def _tell(self, key: tuple[str, int], is_revoked: bool) -> None:
        """Have the subscriptions to a version called, for which it is news."""
        for number, one in list(self.subscriptions.items()):
            if one.key == key and (is_revoked or one.of_all):  # a newer version harms nobody
                self.subscriptions.pop(number, None)
                one.post()

    def _recovered(self, reply: m.Recovered, repeats: Repeats) -> None:
        """Another keeper goes on: say again what may not have been heard, and have the calls that wait sent again."""
        self.server_pid = reply.pid
        until = time.monotonic() + REQUEST
        came: list[tuple[bytes, list[int]]] = []

        def say(payload: bytes) -> None:
            while True:
                try:
                    return self._channel.send(payload, timeout=0.0)
                except WaitTimeoutError:
                    if time.monotonic() > until:
                        raise
                    if self._channel.wait(until - time.monotonic()):  # a keeper that nobody reads from reads nothing
                        came.append(self._channel.take(timeout=0.0))

        try:
            self._lock(until)
            try:
                for payload in repeats.begin(reply.keeper, next(self._numbers)):
                    say(payload)
                repeats.keeper = reply.keeper  # from now on the calls that are due are sent
                # News that did not arrive. A watch that was not accepted yet is a call, which is sent again.
                for key in {one.key for one in list(self.subscriptions.values()) if one.is_accepted}:
                    say(m.encode(m.Watch(0, *key)))
            finally:
                self._unlock()
        except VramError:  # half of it was said: that keeper would heed no call any more
            self._fail(PeerGoneError(f"the next keeper at {self.path} was not told of all calls"))
            return
        for message, fds in came:
            self._sort(message, fds, False)
        for call in list(self._calls.values()):
            _ring(call)

    def _drop_late(self, call: Call) -> None:
        with contextlib.suppress(IndexError):
            self._drop(call.answers.pop())

    def _drop(self, answer: Answer) -> None:
        """Give back what an answer grants that nobody uses. Never waits."""
        if isinstance(answer.reply, m.Attached):
            self.release_later(answer.reply.lease)
        elif isinstance(answer.reply, m.Claimed):
            self.release_later(answer.reply.claim)
        close_fds(answer.fds)

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
                _, one = self.subscriptions.popitem()
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

    def _protocol_error(self, reply: object) -> VramError:
        return self._fail(ProtocolError(f"the keeper at {self.path} answered {type(reply).__name__} out of turn"))

    def _expect(self, kind: type[_R], reply: object) -> _R:
        if type(reply) is not kind:
            raise self._protocol_error(reply)
        return reply


# -- how a connection begins -------------------------------------------------------------------------------------------
class _HungUpError(PeerGoneError):
    """The listener hung up in place of a greeting."""


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
    """Say hello and return what the keeper answers; see :meth:`RpcConnection.connect` for the errors."""
    with contextlib.suppress(PeerGoneError):  # it may have said why it hung up
        channel.send(m.encode(m.Hello(m.PROTOCOL, clip_label(label), own_host())), timeout=max(0.01, timeout))
    try:
        payload, _ = channel.take(timeout=max(0.01, timeout))
        reply = m.decode_reply(payload)
    except WaitTimeoutError:
        raise WaitTimeoutError(
            f"what listens at {path} did not answer: a keeper that hangs, or no keeper. {silent_words(channel.peer())}"
        ) from None
    except PeerGoneError:
        raise _HungUpError(f"what listens at {path} hung up: a keeper that stops, or no keeper") from None
    except ProtocolError as error:
        raise ProtocolError(f"what listens at {path} is no keeper ({error})") from None
    if isinstance(reply, m.Error):
        raise raised(reply)
    if isinstance(reply, m.Recovered):
        raise _HungUpError(f"the keeper at {path} was killed before it had greeted, and another goes on: connect again")
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
    while _is_there(whose, watch.poll(maxevents=1)):
        pass
    with turn:
        watch.close()
        channel.close()


def _is_there(whose: weakref.ref[RpcConnection], _: object) -> bool:
    """Read a message; return whether there will be more. Nothing keeps the connection while there is none."""
    connection = whose()
    if connection is None:
        return False
    with connection._turn:
        if connection._failure is None:
            try:
                connection._hear(0)
            except BaseException as error:  # noqa: BLE001  (all who wait hear of it)
                connection._fail(InternalError(f"reading from the keeper at {connection.path} failed: {error!r}"))
        return connection._failure is None
