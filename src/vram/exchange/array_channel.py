"""A connection that carries arrays: the memory once, then ids."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ..arrays import Array
from ..errors import ClosedError, ProtocolError, UsageError, VramError, WaitTimeoutError
from ..lifetime import Owned
from ..sharing.channel import Channel, close_fds
from .handover import Borrower, Lender, MemoryPart, Reference, Size, refer

__all__ = ["ArrayChannel"]


class _Shared(Struct, frozen=True, array_like=True, tag="v"):
    """An array on memory that the sender of this message shared."""

    reference: Reference


class _Returned(Struct, frozen=True, array_like=True, tag="r"):
    """An array on memory that the receiver of this message shared."""

    reference: Reference


class _Memory(Struct, frozen=True, array_like=True, tag="m"):
    """Memory, with its descriptors."""

    part: MemoryPart


class _GoOn(Struct, frozen=True, array_like=True, tag="g"):
    """The part was taken: send the next."""


class _Forget(Struct, frozen=True, array_like=True, tag="f"):
    """The sender unmapped these: let go of them."""

    memories: Annotated[tuple[Size, ...], Meta(max_length=4096)]


class _Value(Struct, frozen=True, array_like=True, tag="x"):
    """Anything else that msgpack can say."""

    value: Any


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Shared | _Returned | _Memory | _GoOn | _Forget | _Value).decode


class ArrayChannel(Owned):
    """Sends arrays to another process and back without copying them.

    The first time an array's memory is sent its file descriptors travel; after that an id does, and a hand-over
    costs about as much as any small message. The receiver sees the same memory, read-write unless it was published
    read-only. An array that its owner resized and sends again appears at the same address there. An array that comes
    back to where it was made is the same object.

    Parameters
    ----------
    channel : Channel
        A connection, taken over; :meth:`pair` and :meth:`connect` make one.

    Notes
    -----
    One thread may send while another receives. What is sent is not copied: sender and receiver must agree on who
    writes when; the message itself orders everything written before it. When the sender closes an array, the
    receiver's own arrays over it stay valid until they are dropped.
    """

    __slots__ = ("_borrower", "_channel", "_inbox", "_lender", "_receiving", "_retired", "_sending", "_went_on")

    _warn_on_leak = False

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lender = Lender(self._retire)
        self._borrower = Borrower()
        self._retired: deque[int] = deque()
        self._inbox: deque[object] = deque()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._went_on = threading.Semaphore(0)
        self._claim = channel.handle.claim("array channel")

    @classmethod
    def pair(cls) -> tuple[ArrayChannel, ArrayChannel]:
        """Return two ends that are connected with each other."""
        one, other = Channel.pair()
        return cls(one), cls(other)

    @classmethod
    def connect(cls, path: str, timeout: float | None = None) -> ArrayChannel:
        """Connect to a listener at a unix socket path; see :meth:`Channel.connect` for the errors."""
        return cls(Channel.connect(path, timeout))

    def fileno(self) -> int:
        """Lend the socket's descriptor, to wait for messages with."""
        return self._channel.fileno()

    def send(self, value: object, *, timeout: float | None = None) -> None:
        """Send an array, or any value that msgpack can say (None, numbers, strings, bytes, lists, dicts).

        Parameters
        ----------
        timeout : float or None
            Seconds to wait while the other end does not read; None waits for ever.

        Raises
        ------
        UsageError
            If the array's memory cannot leave this process, or the value cannot be said.
        PeerGoneError
            If the other end is closed.
        WaitTimeoutError
            If the time passed.
        """
        with self._sender():
            if isinstance(value, Array):
                message = self._refer(value, timeout)
            else:
                try:
                    message = _encode(_Value(value))
                except (TypeError, ValueError, OverflowError) as error:
                    raise UsageError(f"a channel carries vram arrays and plain values: {error}") from None
            self._channel.send(message, timeout=timeout)

    def recv(self, *, timeout: float | None = None) -> Any:
        """Receive what the other end sent next.

        Parameters
        ----------
        timeout : float or None
            Seconds to wait; None waits for ever.

        Returns
        -------
        Array or value

        Raises
        ------
        WaitTimeoutError
            If nothing came in time.
        PeerGoneError
            If the other end is closed.
        ProtocolError
            If what came is not what this end understands.
        """
        with self._receiving:
            while not self._inbox:
                self._take(timeout)
            return self._inbox.popleft()

    def close(self, *, strict: bool = False) -> None:
        """Close the connection and let go of what the other end shared; arrays that are alive keep their memory."""
        if self.is_closed:
            return
        super().close(strict=strict)
        self._channel.close()
        self._lender.close()
        self._borrower.close()

    def __repr__(self) -> str:
        return f"<ArrayChannel, {'closed' if self.is_closed else f'fd {self._channel.fileno()}'}>"

    # -- sending ------------------------------------------------------------------------------------------------
    def _refer(self, array: Array, timeout: float | None) -> bytes:
        number = self._borrower.number_of(array)
        if number is not None:
            return _encode(_Returned(refer(number, 0, array)))
        lent = self._lender.lend(array)
        for part, fds in lent.parts(lent.sent):
            self._channel.send(_encode(_Memory(part)), fds, timeout=timeout)
            if not part.last:  # a peer that does not read must not cost more than one part of descriptors (S4)
                self._wait_until_taken(timeout)
            lent.sent = part.first + len(fds)
        return _encode(_Shared(refer(lent.id, lent.sent, array)))

    def _wait_until_taken(self, timeout: float | None) -> None:
        while not self._went_on.acquire(timeout=0.0):
            # Whoever receives may be another thread, which then takes the answer; look again soon.
            if self._receiving.acquire(timeout=0.01):
                try:
                    self._take(timeout)
                finally:
                    self._receiving.release()

    @contextmanager
    def _sender(self) -> Iterator[None]:
        with self._sending:
            self._flush()
            yield
        while self._retired and self._sending.acquire(blocking=False):
            try:
                if not self._flush():
                    return
            finally:
                self._sending.release()

    def _retire(self, number: int) -> None:
        """A memory that was lent is unmapped here. Reached from finalizers: never waits."""
        self._retired.append(number)
        if self._sending.acquire(blocking=False):
            try:
                self._flush()
            finally:
                self._sending.release()

    def _flush(self) -> bool:
        """Tell the other end what to forget, if it reads. Called with the sending lock."""
        while self._retired:
            number = self._retired[0]
            try:
                self._channel.send(_encode(_Forget((number,))), timeout=0)
            except WaitTimeoutError:
                return False
            except (VramError, OSError):  # the end of the connection makes the other end forget everything
                self._retired.clear()
                return True
            self._retired.popleft()
        return True

    # -- receiving ----------------------------------------------------------------------------------------------
    def _take(self, timeout: float | None) -> None:
        """Take one message off the socket. Called with the receiving lock."""
        payload, fds = self._channel.recv(timeout=timeout)
        try:
            try:
                message = _decode(payload)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ProtocolError(f"not a message between array channels: {error}") from None
            if isinstance(message, _Shared):
                self._inbox.append(self._borrower.array(message.reference))
            elif isinstance(message, _Value):
                self._inbox.append(message.value)
            elif isinstance(message, _Returned):
                array = self._lender.at_home(message.reference)
                if array is None:
                    raise ClosedError(
                        f"an array of memory {message.reference.memory} came back after it was closed here"
                    )
                self._inbox.append(array)
            elif isinstance(message, _Memory):
                self._borrower.learn(message.part, fds)
                if not message.part.last:
                    self._channel.send(_encode(_GoOn()), timeout=timeout)
            elif isinstance(message, _Forget):
                for number in message.memories:
                    self._borrower.forget(number)
            else:
                self._went_on.release()
        finally:
            close_fds(fds)
