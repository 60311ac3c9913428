"""One connection to a keeper, shared by all threads of a process: requests, answers, and what nobody waits for.

How threads share it: each sends its request and waits for the answer with its number. One of those who wait reads for
all of them, puts down what is for others and, when its own answer has come, leaves reading to the next.

A waiter hangs up a bell, then looks, then sleeps; a change is made first, and then all bells are rung.
That takes no lock, so that a finalizer in the middle of it cannot find one held by its own thread.

A signal handler cannot have an answer while its own thread is the one that reads or sends, so a call inside a call of
the same thread is refused.

Finalizers give leases back too (S5), and may run in any thread at any point: :meth:`RpcConnection.release_later` only
appends to a queue and *tries* to send; who holds the lock for sending looks at the queue again (I3).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from ..errors import (
    AccessDeniedError,
    BusyError,
    ClosedError,
    DriverError,
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
from .paths import (
    check_directory,
    check_server,
    check_socket,
    find_path,
    how_to_be_let_in,
    how_to_start,
    may_connect,
)
from .rules import clip_host, clip_label

if TYPE_CHECKING:
    from typing import Self

CONNECT_SECONDS = 5.0  # for a connection and its greeting, where the caller names no time
GRACE = 30.0  # seconds within which a keeper answers what it does not have to wait for
_LENDERS_GRACE = 2.0  # the same of a lender, which has little to do, and may be stopped
_LENDER_GONE = (
    "the lender at {path} is gone. What came by descriptor stays; memory of cudaMalloc or of a pool is undefined, "
    "unless it was asked back before. Borrow again when somebody lends there"
)
_TAKE_BACK = 1.0  # seconds that whoever ends a call is kept waiting for what came of it
_NAP = 1.0  # seconds that a sleep lasts: a signal that comes just before one does not end it
_MOMENT = 0.1  # seconds that who is late already waits for its turn to say so
GREETINGS = 3  # connections that are made before it counts that they were hung up on
_LAST_WORDS = 16  # messages that are read of what a side that takes nothing any more has said
_GOODBYE = 1.0  # seconds that reading them may take
_MOST_SAID = 4096  # messages without a number that are kept, and numbers in one message
_GIVEN_UP = 1024  # calls that were given up, and are remembered
_R = TypeVar("_R", bound=msgspec.Struct)


class HungUpError(PeerGoneError):
    """Who listens hung up in place of a greeting."""


class Answer(NamedTuple):
    """The answer to a call: its holder uses what it grants, or gives it back (:meth:`RpcConnection._drop`).
    `lost`: there was no room for all of its descriptors."""

    reply: m.Reply
    fds: list[int]
    lost: bool = False


class Repeats:
    """The requests of one connection that are not known to be done, for a keeper that goes on for another one. Calls in
    `due` are sent again by waiting threads, which have their descriptors. `keeper` is the number of the keeper that was
    told last what comes (0: none)."""

    def __init__(self) -> None:
        self.due: set[int] = set()
        self.keeper = 0
        self._given_up: deque[int] = deque(maxlen=_GIVEN_UP)
        # What a call was sent as, and `last` of then: with the lock for sending, as all but :meth:`over`.
        self.sent: dict[int, tuple[bytes, Sequence[int], int]] = {}
        self.said: deque[tuple[int, bytes]] = deque(maxlen=_MOST_SAID)
        self.last = self.heard = 0  # numbers of what was said: the last, and the last that an answer came behind

    def says(self, payload: bytes) -> None:
        """Note a message without a number that is about to be sent."""
        self._forget_heard()
        self.last += 1
        self.said.append((self.last, payload))

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

    def _forget_heard(self) -> None:
        while self.said and self.said[0][0] <= self.heard:
            self.said.popleft()

    def begin(self, keeper: int) -> list[bytes]:
        """Return what is to be said at once to that keeper, before :meth:`begun`. Nothing if that was said."""
        if keeper == self.keeper:
            return []
        self.keeper = 0
        self._forget_heard()
        self.due = set(self.sent)
        calls, given_up = sorted(self.due), list(self._given_up)
        said = [payload for _, payload in list(self.said)]
        for start in range(0, max(1, len(calls)), _MOST_SAID):
            more = start + _MOST_SAID < len(calls)
            words = m.Repeating(0, keeper, calls[start : start + _MOST_SAID], [] if more else given_up, more)
            said.append(m.encode(words))
        return said

    def begun(self, keeper: int) -> None:
        """From now on the calls that are due are sent."""
        self.keeper = keeper

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
    grace = GRACE

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
        self._calls = itertools.count(1)
        self._sending = threading.Lock()
        self._bells: deque[threading.Lock] = deque()  # one for each sleeper, released to wake it
        self._reading = threading.Lock()  # had by who reads for all; only ever tried
        self._expected: dict[int, deque[Answer]] = {}  # a tray for each call that waits
        self._inside: set[int] = set()  # threads in the middle of a call
        self._failure: VramError | None = None
        self._is_gone = False  # the other side takes nothing any more, or its end was found
        self._given_back: deque[int] = deque()  # leases; claims are below zero
        self._unheard: deque[int] = deque()  # calls that nobody waits for, which has still to be said
        self._leases: dict[int, tuple[str, int]] = {}
        self._repeats: Repeats | None = None  # of a keeper, after which another one may go on; not of a lender
        self.taken_back: set[tuple[str, int]] = set()  # names and versions whose leases were ended by force

    @classmethod
    @shielded
    def connect(
        cls,
        path: str | None = None,
        *,
        timeout: float = CONNECT_SECONDS,
        label: str = "",
        like: RpcConnection | None = None,
    ) -> Self:
        """Connect to a keeper within `timeout` seconds; other users see `label`, which is not verified.
        `like` is a connection to the same server: PeerGoneError is raised if another server has come to the path."""
        deadline = time.monotonic() + timeout
        found, chosen = find_path(path)
        for left in reversed(range(GREETINGS)):
            channel = open_channel(found, chosen, max(0.001, deadline - time.monotonic()))
            try:
                welcome = greet(channel, found, label, deadline - time.monotonic())
                if like is not None and like.lends != welcome.lends:
                    raise PeerGoneError(like.lost())
                break
            except HungUpError as error:  # a keeper that was killed, perhaps: where another follows, it is there
                channel.close()
                if not left or time.monotonic() > deadline:
                    raise PeerGoneError(str(error)) from None
            except BaseException:
                channel.close()
                raise
        made = cls(channel, found, label, welcome.pid)
        if welcome.lends:
            made.lends, made.grace, made.lost_message = welcome.lends, _LENDERS_GRACE, _LENDER_GONE
        else:
            made._repeats = Repeats()
        return made

    def lost(self) -> str:
        """Say that the other side is gone, and what to do."""
        return self.lost_message.format(path=self.path, advice=how_to_start(self.path))

    def process(self) -> int:
        """Return the pid of who listened when this connected, by the kernel's word; 0 if it is not to be seen."""
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
        if self._pid != os.getpid():  # the parent's; its locks may be held by threads that are not here
            return
        if self._failure is None:
            self._failure = PeerGoneError(f"the connection to the keeper at {self.path} was closed here")
        self._wake_waiters()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}, {'open' if self.is_usable else 'closed'}>"

    # -- giving back ------------------------------------------------------------------------------------------------
    @shielded
    def release_later(self, lease_id: int) -> None:
        """Give a lease back without waiting; with the next call at the latest. Safe in a finalizer; never raises."""
        self._leases.pop(lease_id, None)
        self._given_back.append(lease_id)
        self._flush()

    @shielded
    def abandon_later(self, claim: int) -> None:
        """The same with a claim on a name."""
        self._given_back.append(-claim)
        self._flush()

    # -- asking -----------------------------------------------------------------------------------------------------
    def _ask(self, request: m.Request, call: int, fds: Sequence[int] = ()) -> m.Reply:
        """Send a request whose answer carries no descriptors and return the answer."""
        answer = self._converse(request, call, fds, self.grace)
        if answer.fds:
            self._drop(answer)
            raise self._protocol_error(answer.reply)
        return answer.reply

    @shielded
    def _converse(self, request: m.Request, call: int, fds: Sequence[int], timeout: float | None) -> Answer:
        """Send a request and wait for the answer with its number; an answer that is an error is raised."""
        if self._pid != os.getpid():
            self._channel.fileno()  # raises ForkedError, before any lock that a lost thread may hold
        me = threading.get_ident()
        if me in self._inside:
            raise BusyError(
                f"this thread is in the middle of a call to the keeper at {self.path}, which a signal handler or "
                f"finalizer interrupted: do it after that call, or in another thread"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        tray: deque[Answer] = deque()
        cancels, is_sent = isinstance(request, m.Cancel), False
        self._inside.add(me)
        self._expected[call] = tray
        try:
            self._send(m.encode(request), fds, deadline, call if not cancels else 0)
            is_sent = True
            answer = self._wait(call, tray, deadline)
        except BaseException as error:
            # Ended, or too late: the answer may still come, and must not be taken for nobody's lease.
            self._expected.pop(call, None)
            arrived = _take(tray)
            if arrived is not None:
                self._drop(arrived)
            elif isinstance(error, (PeerGoneError, ClosedError)):
                pass
            elif is_sent:
                if self._repeats is not None:
                    self._repeats.over(call, is_answered=False)  # it is not to be made again
                if not cancels:
                    self._take_back(call, me, isinstance(error, VramError))
            elif isinstance(request, m.Cancel):
                if isinstance(error, VramError):  # there is no room: it says the same by its end
                    self._fail(self._not_heard(), said=True)
                else:  # all leases are not to end because whoever waits has no patience
                    self._unheard.append(request.waiting)
                    self._flush()
            raise
        finally:
            self._inside.discard(me)
            if self._repeats is not None and call in self._repeats.sent:  # not in one that was answered
                self._repeats.over(call, is_answered=False)
        if isinstance(answer.reply, m.Error):
            raise raised(answer.reply)
        if answer.lost:
            raise self._no_room(answer)
        return answer

    def _no_room(self, answer: Answer) -> DriverError:
        """Give back what an answer grants that had descriptors for which there was no room here; return the error."""
        self._drop(answer)
        return DriverError(
            f"receiving descriptors from the keeper at {self.path}", errno.EMFILE, "EMFILE", descriptor_limit()
        )

    def _take_back(self, call: int, me: int, is_late: bool) -> None:
        """Tell the keeper that nobody waits for the answer to a call; unless it `is_late`, wait a moment for its word:
        an answer that was on its way is here then, and has given back what it grants."""
        if is_late:
            self._say_unheard(m.Cancel(0, call))
            return
        self._inside.discard(me)
        number = next(self._calls)
        with contextlib.suppress(VramError, OSError):
            self._converse(m.Cancel(number, call), number, (), _TAKE_BACK)

    def _send(self, payload: bytes, fds: Sequence[int], deadline: float | None, call: int) -> None:
        """Send a request before a deadline; what this raises was not sent. Without a call it needs room now."""
        if self._failure is not None:
            raise self._failure_again()
        begin = time.monotonic()
        until = begin + GRACE if deadline is None else min(begin + GRACE, deadline)
        if not (self._sending.acquire(False) or take(self._sending, max(0.0, until - begin))):
            raise self._timed_out()  # another thread of this process waits to send
        try:
            if self._given_back or self._unheard:
                self._give_back(until if call else 0.0)
            if call and self._repeats is not None:
                self._repeats.sent[call] = payload, fds, self._repeats.last
            self._channel.send(payload, fds, timeout=max(0.0, until - time.monotonic()) if call else 0.0)
        except (PeerGoneError, ClosedError):
            raise self._fail(deadline=until) from None
        finally:
            self._sending.release()
            if self._given_back:  # a finalizer in this very block found the lock taken
                self._flush()

    def _wait(self, call: int, tray: deque[Answer], deadline: float | None) -> Answer:
        reads = False
        try:
            while True:
                reads = reads or self._reading.acquire(False)
                bell = None if reads else self._hang_up_a_bell()  # before the look: what comes in between rings it
                if tray:
                    del self._expected[call]  # first, or the reader would put a second answer into it
                    if self._repeats is not None:
                        self._repeats.over(call, is_answered=True)
                    return tray.popleft()
                if self._failure is not None:
                    raise self._failure_again()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise self._timed_out()
                if self._repeats is not None and self._repeats.due:
                    self._ask_again(call)
                if bell is None:
                    self._read_one(left)
                    continue
                if self._reading.locked():
                    waiting(bell.acquire, True, _NAP if left is None else min(left, _NAP))
                with contextlib.suppress(ValueError):
                    self._bells.remove(bell)  # nobody rang
        finally:
            if reads:
                self._reading.release()
                if self._bells:
                    self._wake_waiters()

    def _hang_up_a_bell(self) -> threading.Lock:
        bell = threading.Lock()
        bell.acquire()
        self._bells.append(bell)
        return bell

    def _wake_waiters(self) -> None:
        """Wake everybody who waits, to look again."""
        while self._bells:
            try:
                self._bells.popleft().release()
            except IndexError:  # another thread was quicker
                return

    def _read_one(self, timeout: float | None) -> None:
        """Read one message and give it to whom it is for. Called with the lock for reading."""
        lost = False
        try:
            payload, fds = self._channel.take(timeout=timeout)
        except WaitTimeoutError:
            raise self._timed_out() from None
        except ClosedError:
            raise self._fail() from None
        except DescriptorsLostError as error:  # a matter of one call, not of the connection
            payload, fds, lost = error.payload, [], True  # not the error: its frames would have it, and all theirs
        except PeerGoneError as error:
            raise self._fail(error) from None
        except ProtocolError as error:  # too long; messages keep their borders, so the next one may be right
            self._unreadable(error, fds=False)
            return
        self._sort(payload, fds, lost)

    def _sort(self, payload: bytes, fds: list[int], lost: bool) -> None:
        """Deliver what was taken off the socket."""
        try:
            answer = Answer(m.decode_reply(payload), fds, lost)
        except ProtocolError as error:
            has_fds = bool(fds)
            close_fds(fds)
            self._unreadable(error, fds=has_fds)
            return
        if (fds or lost) and not isinstance(answer.reply, (m.Attached, m.Descriptors)):
            self._drop(answer)
            raise self._ended_for(f"sent descriptors with {type(answer.reply).__name__}, which has none")
        self._deliver(answer)

    def _unreadable(self, error: ProtocolError, *, fds: bool) -> None:
        """Fail the call that an unreadable message answers, or all that wait if it names none; the connection goes on.
        It carries all leases of this process. Only descriptors with a message that grants no lease end it."""
        whose, lease = getattr(error, "call", None), getattr(error, "lease", 0)
        if lease:
            self.release_later(lease)
        elif fds:
            raise self._ended_for("sent descriptors with a message that makes no sense")
        named = list(self._expected) if whose is None else [whose]
        numbers = [number for number in named if number in self._expected]
        for number in numbers:
            self._deliver(Answer(m.Error(number, ProtocolError.__name__, str(error)[:4000]), []))

    def _deliver(self, answer: Answer) -> None:
        reply = answer.reply
        number = getattr(reply, "call", 0)  # a greeting has none
        whose = self._expected.get(number)
        if whose is not None and not whose:  # a call has one answer
            whose.append(answer)
            if self._bells:
                self._wake_waiters()
            # Whoever gave up meanwhile looks into the tray once, and perhaps did before this came.
            if self._expected.get(number) is not whose:
                left = _take(whose)
                if left is not None:
                    self._drop(left)
            return
        if number == 0 and isinstance(reply, m.Error):
            if len(reply.details) == 2 and reply.details[1].isdecimal():
                self.taken_back.add((reply.details[0], int(reply.details[1][:20])))
            raise self._fail(raised(reply), said=True)
        if isinstance(reply, m.Recovered) and self._repeats is not None:
            if not self._is_gone:  # else that one has ended, too, and the thread that found out may have the lock
                self._recovered(reply, self._repeats)
            return
        if isinstance(reply, m.Welcome) and self._repeats is not None:
            return  # of a keeper that follows one which may not have said it
        self._drop(answer)  # of a call that was given up

    def _recovered(self, reply: m.Recovered, repeats: Repeats) -> None:
        """Another keeper goes on: say again what may not have been heard, and have the calls that wait asked again."""
        self.server_pid = reply.pid
        try:
            with self._sending:
                for payload in repeats.begin(reply.keeper):
                    self._channel.send(payload, timeout=GRACE)
                repeats.begun(reply.keeper)
        except BaseException:  # half of it was said: that keeper would heed no call any more
            self._fail(PeerGoneError(f"the next keeper at {self.path} was not told of all calls"), said=True)
            raise
        self._wake_waiters()
        self._flush()

    def _ask_again(self, call: int) -> None:
        """Send this thread's request once more, to the keeper that goes on."""
        with self._sending:
            again = None if self._repeats is None else self._repeats.take(call)
            if again is not None:
                self._channel.send(*again, timeout=GRACE)

    def _ended_for(self, what: str) -> VramError:
        """End the connection for what the other side did; return what to raise."""
        return self._fail(ProtocolError(f"what listens at {self.path} {what}: the connection is ended"))

    def _drop(self, answer: Answer) -> None:
        """Give back what an answer grants that nobody uses. Never waits."""
        if isinstance(answer.reply, m.Attached):
            self.release_later(answer.reply.lease)
        elif isinstance(answer.reply, m.Claimed):
            self.abandon_later(answer.reply.claim)
        close_fds(answer.fds)

    def _say_unheard(self, request: m.Request) -> None:
        """Send what needs no answer, if there is room now."""
        if self._sending.acquire(True, _MOMENT):
            try:
                with contextlib.suppress(VramError, OSError):
                    self._say(request, 0.0)
            finally:
                self._sending.release()
        self._flush()

    def _give_back(self, until: float) -> None:
        """Send what was queued, as far as there is room before a time. Called with the lock for sending."""
        while self._unheard:
            self._say(m.Cancel(0, self._unheard[0]), until)
            self._unheard.popleft()
        queue = self._given_back
        # By index: others append meanwhile. Taken out when it is sent: twice does no harm.
        if len(queue) == 1 and (only := queue[0]) > 0:  # as nearly always
            payload = m.encode(m.Release(0, [only]))  # as _say does, in fewer calls
            if self._repeats is not None:  # as says() does
                self._repeats.last += 1
                self._repeats.said.append((self._repeats.last, payload))
            self._channel.send(payload, timeout=max(0.0, until - time.monotonic()))
            queue.popleft()
            return
        some = [queue[at] for at in range(min(len(queue), 4096))]
        while some:
            claims = [at for at, number in enumerate(some) if number < 0]
            leases = some[: claims[0]] if claims else some[:]
            self._say(m.Release(0, leases) if leases else m.Abandon(0, -some[0]), until)
            for _ in leases or some[:1]:
                queue.popleft()
            del some[: len(leases) or 1]

    def _say(self, request: m.Request, until: float) -> None:
        """Send what needs no answer. Called with the lock for sending."""
        payload = m.encode(request)
        if self._repeats is not None:
            self._repeats.says(payload)
        self._channel.send(payload, timeout=max(0.0, until - time.monotonic()))

    def _flush(self) -> None:
        """Send what was queued, unless somebody is sending: they look at the queue again. Never waits."""
        while (self._given_back or self._unheard) and self._failure is None and self._pid == os.getpid():
            if not self._sending.acquire(False):
                return
            try:
                self._give_back(0)
            except (VramError, OSError):
                return  # no room now
            finally:
                self._sending.release()

    # -- inside: failing ------------------------------------------------------------------------------------------
    def _fail(self, error: VramError | None = None, *, said: bool = False, deadline: float | None = None) -> VramError:
        """The connection is of no use any more; say so to everybody, in the other side's words if it `said` why."""
        gone = error is None or (isinstance(error, PeerGoneError) and not said)
        if self._failure is None and gone:
            self._hear_goodbye(deadline)
        if self._failure is None:
            self._failure = PeerGoneError(self.lost()) if error is None or gone else error
        self._wake_waiters()
        self._channel.close()
        return self._failure_again()

    def _hear_goodbye(self, deadline: float | None) -> None:
        """Read what came before the other side hung up, which may say why; never waits.
        A peer that only takes nothing more may go on talking: a few messages are read, and none with descriptors."""
        if self._pid != os.getpid():
            return
        until = time.monotonic() + _GOODBYE
        if deadline is not None:
            until = min(until, deadline)
        self._is_gone = True
        if not self._reading.acquire(False):
            return
        try:
            with contextlib.suppress(VramError, ValueError):  # ValueError: another thread has closed it
                for number in range(_LAST_WORDS):
                    if self._failure is not None or self._channel.brings_descriptors(0):
                        break
                    if number and time.monotonic() >= until:  # the first is read in any case
                        break
                    self._read_one(0)
        finally:
            self._reading.release()

    def _failure_again(self) -> VramError:
        failure = self._failure or PeerGoneError("no failure")
        try:
            return type(failure)(*failure.args)
        except TypeError:  # an exception of more arguments than its message
            return PeerGoneError(str(failure))

    def _not_heard(self) -> PeerGoneError:
        return PeerGoneError(
            f"the connection to {self.path} (pid {self.server_pid}) was ended here: who listens there reads nothing, "
            f"and was to hear that a call waits no longer. What is mapped stays, its leases are over"
        )

    def _timed_out(self) -> WaitTimeoutError:
        return WaitTimeoutError(f"the keeper at {self.path} (pid {self.server_pid}) did not answer in time")

    def _protocol_error(self, reply: object) -> VramError:
        return self._fail(ProtocolError(f"the keeper at {self.path} answered {type(reply).__name__} out of turn"))

    def _expect(self, kind: type[_R], reply: object) -> _R:
        if type(reply) is not kind:
            raise self._protocol_error(reply)
        return reply


def _take(tray: deque[Answer]) -> Answer | None:
    """Take what is in a tray: of two who try, one gets it."""
    try:
        return tray.popleft()
    except IndexError:
        return None


def open_channel(path: str, chosen: bool, timeout: float) -> Channel:
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


def greet(channel: Channel, path: str, label: str, timeout: float) -> m.Welcome:
    """Say hello and return what the keeper answers; see :meth:`RpcConnection.connect` for the errors."""
    with contextlib.suppress(PeerGoneError):  # it may have said why it hung up
        channel.send(m.encode(m.Hello(m.PROTOCOL, clip_label(label), own_host())), timeout=max(0.01, timeout))
    try:
        # Who listens may be a stranger, who is to send nothing that would have to be closed before it is known.
        if channel.brings_descriptors(max(0.01, timeout)):
            raise ProtocolError("descriptors came with its first message")
        payload, _ = channel.take(timeout=0)
        reply = m.decode_reply(payload)
    except WaitTimeoutError:
        raise WaitTimeoutError(
            f"what listens at {path} did not answer: a keeper that hangs, or no keeper. {silent_words(channel.peer())}"
        ) from None
    except PeerGoneError:
        raise HungUpError(f"what listens at {path} hung up: a keeper that stops, or no keeper") from None
    except ProtocolError as error:
        raise ProtocolError(f"what listens at {path} is no keeper ({error})") from None
    if isinstance(reply, m.Error):
        raise raised(reply)
    if isinstance(reply, m.Recovered):
        raise HungUpError(f"the keeper at {path} was killed before it had greeted, and another goes on: connect again")
    if not isinstance(reply, m.Welcome):
        raise ProtocolError(f"what listens at {path} is no keeper: it answered {type(reply).__name__}")
    return reply
