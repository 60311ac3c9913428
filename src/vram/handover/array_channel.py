"""A connection that carries arrays: the memory once, then ids."""

from __future__ import annotations

import socket
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ReleaseWarning, UsageError, VramError, WaitTimeoutError
from ..lifetime import Owned, shielded
from ..sharing.channel import Channel
from .conversation import Conversation, deadline_in

if TYPE_CHECKING:
    from ..arrays.hints import StreamLike


class ArrayChannel(Owned):
    """Sends arrays to another process and back without copying them.

    The first time an array's memory is sent its file descriptors travel; after that an id does, and a hand-over
    costs about as much as any small message. The receiver sees the same memory, read-write unless it was published
    read-only. An array that its owner resized and sends again appears at the same address there. An array that comes
    back to where it was made is the same object, and what is sent again is the same object at the receiver while it
    is in use there.

    Parameters
    ----------
    channel : Channel or socket.socket
        A connection, taken over: a connected ``AF_UNIX``/``SOCK_SEQPACKET`` socket that you have already, or what
        :meth:`pair` or :meth:`connect` makes.

    Notes
    -----
    One thread may send while another receives. A sent array is not copied: sender and receiver must agree on who
    writes when; the message itself orders everything written before it. When the sender closes an array, the
    receiver's own arrays over it stay valid until they are dropped, and can be sent back: what the other end has stays
    known, and allocated, at the end that sent it until the other end has said that it let go, or is gone: both are
    heard with the next send or recv, and the latter when an array that was sent is dropped, too. That holds for memory
    of ``cudaMalloc`` and of pools as long as both ends are open: drop such arrays before you close the end that
    received them.
    """

    __slots__ = ("_channel", "_talk")

    @shielded
    def __init__(self, channel: Channel | socket.socket) -> None:
        channel = channel if isinstance(channel, Channel) else Channel(channel)
        channel.only_memory = True
        self._channel = channel
        self._talk = Conversation(channel)
        channel.handle  # noqa: B018  (the check)
        channel._warn_on_leak = True  # in a collected cycle its finalizer may come first
        self._claim = channel._claim  # taken over: one claim, whichever of the two is closed

    @classmethod
    @shielded
    def pair(cls) -> tuple[ArrayChannel, ArrayChannel]:
        """Return two ends that are connected with each other.

        One of them can be an argument of a ``multiprocessing`` process: close it here once the process has started.
        """
        one, other = Channel.pair()
        return cls(one), cls(other)

    @classmethod
    @shielded
    def connect(cls, path: str, timeout: float | None = None) -> ArrayChannel:
        """Connect to a listener at a unix socket path; see :meth:`Channel.connect` for the errors."""
        return cls(Channel.connect(path, timeout))

    def fileno(self) -> int:
        """Lend the socket's descriptor, to wait for messages with."""
        return self._channel.fileno()

    def give_away(self) -> int:
        """Lend the socket's descriptor for another process to take this end over; close this object then.

        Raises
        ------
        UsageError
            If something was sent or received here: the other end knows memory by the numbers of this one.
        """
        if not self._talk.is_fresh:
            raise UsageError("this end was used already; hand the end of a channel on before anything is sent on it")
        return self._channel.give_away()

    @shielded
    def send(self, value: Any, *, stream: StreamLike | None = None, timeout: float | None = None) -> None:
        """Send an array, a plain value (None, bool, int, float, str, bytes), or a tuple, list or dict of all these.

        Anything that :func:`vram.share` takes is an array here, such as a tensor on a GPU. Its owner is kept until the
        other end is done with it, if its memory lives only as long as that. Memory goes as whole allocations: the other
        end can read all of them, such as the rest of the array that a slice is of. Containers arrive as they were sent,
        up to 32 in one another, with at most 512 arrays and 64 KiB of everything else; an array that is in one twice is
        the same object twice. If one thing in it cannot be sent, nothing is.

        Parameters
        ----------
        value : object
            The value to send, as above.
        stream : int or stream, optional
            The stream whose work fills the memory: the receiver waits for that, by an interprocess event. By default
            this call waits for all work of the GPUs that the memory is on.
        timeout : float or None
            Seconds to wait, for all of it, while the other end does not read; None waits for ever.

        Raises
        ------
        UsageError
            If a value is not one that a channel carries, or is too large, with the path to it.
        UnsupportedError
            If an array's memory cannot leave this process, as that of numpy cannot, with what to do instead.
        PeerGoneError
            If the other end is closed.
        WaitTimeoutError
            If the time passed.
        """
        self.handle  # noqa: B018  (before the lock: in a forked child nobody would ever let go of it)
        self._talk.send(value, stream, deadline_in(timeout))

    def recv(self, *, stream: StreamLike | None = None, timeout: float | None = None) -> Any:
        """Receive what the other end sent next.

        Parameters
        ----------
        stream : int or stream, optional
            A stream that is to wait for the work which fills an array, if its sender named a stream. By default this
            call waits for it.
        timeout : float or None
            Seconds to wait; None waits for ever.

        Returns
        -------
        Array, value, or container of these

        Notes
        -----
        Parts of large memory are acknowledged here. Where the other end has no room for that, since it reads nothing,
        the next call does it: who waits for :meth:`fileno` instead comes again after a while.

        Raises
        ------
        WaitTimeoutError
            If nothing came in time, or the work that fills it was not done by then: it comes again.
        PeerGoneError
            If the other end is closed.
        ProtocolError
            If what came is not what this end understands. Where this process had no room for descriptors, or could not
            map memory, the next arrays on that memory raise it too, until the other end hears of it, in its next `recv`
            or some messages later: then it sends the memory anew.
        """
        return _receive([self], stream, timeout)

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Close the connection and let go of what the other end shared; arrays that are alive keep their memory.

        Memory of ``cudaMalloc`` or of a pool that was sent, and that the other end still uses a second later, is kept
        for as long as this process lives, with a ReleaseWarning: the other end can no longer say that it is done.
        """
        if self.is_closed:
            return
        if left := self._talk.end(self, partial(super().close, strict=strict)):
            warnings.warn(left, ReleaseWarning, stacklevel=3)

    @shielded
    def __del__(self) -> None:
        if hasattr(self, "_claim") and not self.is_closed and (left := self._talk.leave_behind(self)):
            self._channel._warn_on_leak = False  # one warning, the one that says more
            warnings.warn(left, ReleaseWarning, stacklevel=3)
        else:
            super().__del__()

    def __repr__(self) -> str:
        return f"<ArrayChannel, {'closed' if self.is_closed else f'fd {self._channel.fileno()}'}>"


def _put_back(taken: list[Any], _: object) -> None:
    """Have what was received, and nobody got, come again."""
    channel, value = taken
    channel._talk.inbox.appendleft(value)


@shielded(undo=_put_back)
def _receive(taken: list[Any], stream: StreamLike | None, timeout: float | None) -> Any:
    """Receive over the channel in a list, which has afterwards what was taken out of its inbox as well."""
    channel: ArrayChannel = taken[0]
    deadline = deadline_in(timeout)
    channel.handle  # noqa: B018  (before the lock, as in send)
    talk = channel._talk
    taken.append(talk.next(deadline))
    try:
        return talk.finished(taken[1], stream, deadline)
    except BaseException as error:
        value = taken.pop()
        # Ctrl-C, or the sender's work took longer than the deadline: nobody got it, so it comes again.
        if not isinstance(error, VramError) or isinstance(error, WaitTimeoutError):
            talk.inbox.appendleft(value)
        del value  # or an error in there, which keeps this frame, would keep itself and all that its callers hold
        raise
