"""One connection to a keeper, shared by all threads of a process: requests, answers, and what nobody waits for.

How threads share it: each sends its request and waits for the answer with its number. One of those who wait reads for
all of them, puts down what is for others and, when its own answer has come, leaves reading to the next. Nobody is
woken but for an answer or to read.

Finalizers give leases back too (S5), and may run in any thread at any point: :meth:`Conversation.release_later` only
appends to a queue and *tries* to send; who holds the lock for sending looks at the queue again (I3).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ..errors import ClosedError, PeerGoneError, ProtocolError, VramError, WaitTimeoutError
from ..sharing.channel import Channel, close_fds
from . import messages as m
from .failures import raised
from .paths import check_directory, check_server, find_path
from .rules import clip_label

if TYPE_CHECKING:
    from typing import Self

__all__ = ["GRACE", "Conversation", "greet", "open_channel"]

GRACE = 30.0  # seconds within which a keeper answers what it does not have to wait for
_R = TypeVar("_R", bound=msgspec.Struct)


class Conversation:
    """A connection to a keeper, without words of its own: :class:`~vram.keeper.client.KeeperClient` has those."""

    def __init__(self, channel: Channel, path: str, label: str, server_pid: int) -> None:
        self.path = path
        self.label = label
        self.server_pid = server_pid
        self._channel = channel
        self._pid = os.getpid()
        self._calls = itertools.count(1)
        self._sending = threading.Lock()
        self._waiting = threading.Condition(threading.Lock())
        self._someone_reads = False
        self._expected: dict[int, tuple[m.Reply, list[int]] | None] = {}
        self._failure: VramError | None = None
        self._given_back: deque[int] = deque()
        self._leases: dict[int, tuple[str, int]] = {}

    @classmethod
    def connect(cls, path: str | None = None, *, timeout: float = 5.0, label: str = "") -> Self:
        """Connect to a keeper.

        Parameters
        ----------
        path : str or None
            Its socket; None is the default path of this user (:func:`~vram.keeper.paths.default_path`).
        timeout : float
            Seconds for all of it.
        label : str
            What this process calls itself, shown to whoever asks who holds what. Not verified.

        Raises
        ------
        PeerGoneError
            If no keeper is there.
        AccessDeniedError
            If the path does not let this user in, or a user listens there who is not to be trusted.
        ProtocolError
            If what listens there is no keeper.
        UnsupportedError
            If the keeper speaks no protocol version that this library speaks.
        WaitTimeoutError
            If it did not answer in time.
        """
        deadline = time.monotonic() + timeout
        found, chosen = find_path(path)
        channel = open_channel(found, chosen, timeout)
        try:
            welcome = greet(channel, found, label, deadline - time.monotonic())
        except BaseException:
            channel.close()
            raise
        return cls(channel, found, label, welcome.pid)

    @property
    def is_usable(self) -> bool:
        """Whether this is the process that connected and, as far as is known, the keeper is still there."""
        if self._pid != os.getpid() or self._failure is not None or self._channel.is_closed:
            return False
        return not self._channel.is_hung_up()

    def close(self) -> None:
        """End the connection; the keeper takes all its leases back. Idempotent."""
        if self._pid != os.getpid():  # the parent's; its locks may be held by threads that are not here
            return
        with self._waiting:
            if self._failure is None:
                self._failure = PeerGoneError(f"the connection to the keeper at {self.path} was closed here")
            self._waiting.notify_all()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}, {'open' if self.is_usable else 'closed'}>"

    # -- giving back ------------------------------------------------------------------------------------------------
    def release_later(self, lease_id: int) -> None:
        """Give a lease back without waiting; with the next call at the latest. Safe in a finalizer; never raises."""
        self._leases.pop(lease_id, None)
        self._given_back.append(lease_id)
        self._flush()

    # -- asking -----------------------------------------------------------------------------------------------------
    def _ask(self, request: m.Request, call: int, fds: Sequence[int] = ()) -> m.Reply:
        """Send a request whose answer carries no descriptors and return the answer."""
        reply, came = self._converse(request, call, fds, GRACE)
        if came:
            close_fds(came)
            self._lost(reply, [])
            raise self._confused(reply)
        return reply

    def _converse(
        self, request: m.Request, call: int, fds: Sequence[int], timeout: float | None
    ) -> tuple[m.Reply, list[int]]:
        """Send a request and wait for the answer with its number; an answer that is an error is raised."""
        if self._pid != os.getpid():
            self._channel.fileno()  # raises ForkedError, before any lock that a lost thread may hold
        deadline = None if timeout is None else time.monotonic() + timeout
        self._expected[call] = None
        try:
            self._send(m.encode(request), fds)
            reply, came = self._wait(call, deadline)
        except BaseException as error:
            # Interrupted, or too late: the answer may still come, and must not be taken for nobody's lease.
            with self._waiting:
                arrived = self._expected.pop(call, None)
            if arrived is not None:
                self._lost(*arrived)
            elif not isinstance(error, PeerGoneError):
                self._say_unheard(m.Cancel(0, call))
            raise
        if isinstance(reply, m.Error):
            close_fds(came)
            raise raised(reply)
        return reply, came

    def _send(self, payload: bytes, fds: Sequence[int]) -> None:
        self._check()
        try:
            with self._sending:
                if self._given_back:
                    self._channel.send(m.encode(m.Release(0, self._returns())), timeout=GRACE)
                self._channel.send(payload, fds, timeout=GRACE)
        except (PeerGoneError, ClosedError):
            raise self._fail() from None
        finally:
            if self._given_back:  # a finalizer in this very block found the lock taken
                self._flush()

    def _wait(self, call: int, deadline: float | None) -> tuple[m.Reply, list[int]]:
        expected = self._expected
        with self._waiting:
            while True:
                arrived = expected[call]
                if arrived is not None:
                    del expected[call]
                    return arrived
                if self._failure is not None:
                    raise self._failure_again()
                if not self._someone_reads:
                    self._someone_reads = True
                    break
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise self._silent()
                self._waiting.wait(left)
        try:
            return self._read_for_all(call, deadline)
        finally:
            with self._waiting:
                self._someone_reads = False
                if expected:
                    self._waiting.notify_all()

    def _read_for_all(self, call: int, deadline: float | None) -> tuple[m.Reply, list[int]]:
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise self._silent()
            try:
                payload, fds = self._channel.recv(timeout=left)
            except WaitTimeoutError:
                raise self._silent() from None
            except ClosedError:
                raise self._fail() from None
            except (PeerGoneError, ProtocolError) as error:
                raise self._fail(error) from None
            try:
                reply = m.decode_reply(payload)
            except BaseException as error:
                close_fds(fds)
                if isinstance(error, ProtocolError):
                    raise self._fail(error) from None
                raise
            number = reply.call if not isinstance(reply, m.Welcome) else 0
            if number == call:
                with self._waiting:
                    self._expected.pop(call, None)
                return reply, fds
            with self._waiting:
                if number in self._expected:
                    self._expected[number] = (reply, fds)
                    self._waiting.notify_all()
                    continue
            if number == 0 and isinstance(reply, m.Error):
                close_fds(fds)
                raise self._fail(raised(reply))
            self._lost(reply, fds)

    def _lost(self, reply: object, fds: Sequence[int]) -> None:
        """An answer that nobody waits for: give back what it grants."""
        close_fds(fds)
        if isinstance(reply, m.Attached):
            self.release_later(reply.lease)
        elif isinstance(reply, m.Claimed):
            self._say_unheard(m.Abandon(0, reply.claim))

    def _say_unheard(self, request: m.Request) -> None:
        """Send what needs no answer, if that is possible at all."""
        with contextlib.suppress(VramError, OSError):
            with self._sending:
                self._channel.send(m.encode(request), timeout=1.0)
        self._flush()

    def _returns(self) -> list[int]:
        """Take what finalizers queued, as much as one message holds."""
        leases: list[int] = []
        with contextlib.suppress(IndexError):
            while len(leases) < 4096:
                leases.append(self._given_back.popleft())
        return leases

    def _flush(self) -> None:
        """Send what finalizers queued, unless somebody is sending: they look at the queue again. Never waits."""
        while self._given_back and self._failure is None and self._pid == os.getpid():
            if not self._sending.acquire(blocking=False):
                return
            leases: list[int] = []
            try:
                leases = self._returns()
                self._channel.send(m.encode(m.Release(0, leases)), timeout=0)
            except (VramError, OSError):
                self._given_back.extend(leases)  # no room now; the next call takes them along
                return
            finally:
                self._sending.release()

    # -- inside: failing ------------------------------------------------------------------------------------------
    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure_again()

    def _fail(self, error: VramError | None = None) -> VramError:
        """The connection is of no use any more; say so to everybody."""
        with self._waiting:
            if self._failure is None:
                if error is None or isinstance(error, PeerGoneError):
                    error = PeerGoneError(
                        f"the keeper at {self.path} is gone; what is mapped stays, its leases are over. Start one with "
                        f"`vram keep --socket {self.path}` and publish again"
                    )
                self._failure = error
            self._waiting.notify_all()
        self._channel.close()
        return self._failure_again()

    def _failure_again(self) -> VramError:
        failure = self._failure or PeerGoneError("no failure")
        try:
            return type(failure)(*failure.args)
        except TypeError:  # an exception of more arguments than its message
            return PeerGoneError(str(failure))

    def _silent(self) -> WaitTimeoutError:
        return WaitTimeoutError(f"the keeper at {self.path} (pid {self.server_pid}) did not answer in time")

    def _confused(self, reply: object) -> VramError:
        return self._fail(ProtocolError(f"the keeper at {self.path} answered {type(reply).__name__} out of turn"))

    def _be(self, kind: type[_R], reply: object) -> _R:
        if type(reply) is not kind:
            raise self._confused(reply)
        return reply


def open_channel(path: str, chosen: bool, timeout: float) -> Channel:
    """Connect to whoever listens at `path`, and make sure that they are to be trusted."""
    if not chosen:
        check_directory(os.path.dirname(path))
    try:
        channel = Channel.connect(path, timeout)
    except PeerGoneError as error:
        raise PeerGoneError(f"no keeper: {error}; start one with `vram keep --socket {path}`") from None
    try:
        check_server(path, chosen, channel.peer())
    except BaseException:
        channel.close()
        raise
    return channel


def greet(channel: Channel, path: str, label: str, timeout: float) -> m.Welcome:
    """Say hello and return what the keeper answers; see :meth:`Conversation.connect` for the errors."""
    with contextlib.suppress(PeerGoneError):  # it may have said why it hung up
        channel.send(m.encode(m.Hello(m.OLDEST, m.PROTOCOL, clip_label(label))), timeout=5.0)
    try:
        payload, fds = channel.recv(timeout=max(0.01, timeout))
        close_fds(fds)
        reply = m.decode_reply(payload)
    except WaitTimeoutError:
        raise WaitTimeoutError(f"what listens at {path} did not answer: a keeper that hangs, or no keeper") from None
    except PeerGoneError:
        raise PeerGoneError(f"what listens at {path} hung up: a keeper that stops, or no keeper") from None
    except ProtocolError as error:
        raise ProtocolError(f"what listens at {path} is no keeper ({error})") from None
    if isinstance(reply, m.Error):
        raise raised(reply)
    if not isinstance(reply, m.Welcome):
        raise ProtocolError(f"what listens at {path} is no keeper: it answered {type(reply).__name__}")
    return reply
