"""An exchange over two named pipes, one each way. Bytes only."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import PeerGoneError, ProtocolError, UsageError, WaitTimeoutError
from .exchanges import ByteExchange, _taken, check_system, closing_on_error, wait_until

if TYPE_CHECKING:
    from typing import Self

__all__ = ["PipeExchange"]

_LENGTH = struct.Struct("<I")
_HELLO = b"vrampipe"
_SLICE = 0.1  # seconds between two looks at whether it was closed here


class PipeExchange(ByteExchange):
    """Over two named pipes, ``PATH.there`` and ``PATH.back``.

    Messages are no longer than what the kernel writes to a pipe in one piece, so none is ever half there.
    """

    __slots__ = ("_got", "_read_from", "_reading", "_write_to", "_writing")

    way = "named pipes"
    most = getattr(select, "PIPE_BUF", 512) - _LENGTH.size  # POSIX promises that much

    def __init__(self, read_from: int, write_to: int) -> None:
        self._read_from, self._write_to = read_from, write_to
        self._got = bytearray()
        # Closing takes both, so that no number is read from that belongs to somebody else by then; no finalizer does.
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._own([read_from, write_to])

    @classmethod
    def listen(cls, path: str, timeout: float | None = None) -> Self:
        """Make the pipes and wait for the other end; see :class:`SocketExchange`."""
        check_system(cls.way)
        there, back = f"{path}.there", f"{path}.back"
        made: list[str] = []
        fds: list[int] = []
        try:
            with closing_on_error(fds):
                for name in (there, back):
                    try:
                        os.mkfifo(name, 0o600)
                    except OSError as error:
                        raise _taken(name, error) from None
                    made.append(name)
                fds.append(_opened(there, os.O_RDONLY))

                def answered() -> int | None:
                    fd = _reader(back)
                    if fd is None and _events(fds[0]) & select.POLLHUP:  # told once somebody has written
                        raise PeerGoneError(f"who connected to {path} is gone already")
                    return fd

                fds.append(wait_until(answered, timeout, f"nobody connected to {path}"))
                return cls._greeted(fds, timeout)
        finally:
            for name in made:
                with contextlib.suppress(OSError):
                    os.unlink(name)

    @classmethod
    def connect(cls, path: str, timeout: float | None = None) -> Self:
        """Open the pipes of who waits there, or will; see :class:`SocketExchange`."""
        check_system(cls.way)
        fds: list[int] = []
        what = f"nobody listens at {path}"
        with closing_on_error(fds):
            fds.append(wait_until(lambda: _reader(f"{path}.there"), timeout, what))
            # The other pipe was made before; read first, or its end could not write to it.
            fds.insert(0, _opened(f"{path}.back", os.O_RDONLY))
            return cls._greeted(fds, timeout)

    @classmethod
    def _greeted(cls, fds: list[int], timeout: float | None) -> Self:
        """Say that both pipes are open here, and wait to hear it. From then on an end of file is the other's end."""
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            os.write(fds[1], _HELLO)
        except BrokenPipeError:
            raise PeerGoneError("the other end of the pipes closed them") from None
        heard = b""
        while len(heard) < len(_HELLO):
            if _events(fds[1]) & select.POLLERR:  # nobody reads there any more
                raise PeerGoneError("the other end of the pipes closed them")
            _wait(fds[0], select.POLLIN, deadline, "the other end of the pipes said nothing")
            with contextlib.suppress(BlockingIOError):
                more = os.read(fds[0], len(_HELLO) - len(heard))
                if not more:
                    raise PeerGoneError("the other end of the pipes closed them")
                heard += more
        if heard != _HELLO:
            raise ProtocolError(f"what is at the other end of the pipes says {heard!r}")
        return cls(*fds)

    def send(self, payload: bytes, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        """Send one message; see :class:`Exchange`."""
        self._check(payload, fds, self.most)
        deadline = None if timeout is None else time.monotonic() + timeout
        message = _LENGTH.pack(len(payload)) + payload
        while True:
            with self._writing:
                self.handle  # noqa: B018  (closed meanwhile?)
                try:
                    os.write(self._write_to, message)  # all of it or nothing: see the class
                    return
                except BrokenPipeError:
                    raise PeerGoneError("the other end of the pipes closed them") from None
                except BlockingIOError:
                    _wait(self._write_to, select.POLLOUT, deadline, "the other end read nothing")

    def recv(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """Return the next message; see :class:`Exchange`."""
        self.handle  # noqa: B018  (the check)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._reading:
                self.handle  # noqa: B018  (closed meanwhile?)
                payload = self._next()
                if payload is not None:
                    return payload, []
                _wait(self._read_from, select.POLLIN, deadline, "no message came")
                with contextlib.suppress(BlockingIOError):
                    more = os.read(self._read_from, 1 << 16)
                    if not more:
                        raise PeerGoneError("the other end of the pipes closed them")
                    self._got += more

    def _next(self) -> bytes | None:
        if len(self._got) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._got)
        if not 0 < length <= self.most:
            raise ProtocolError(f"a message of {length} bytes is said to come; over pipes it has 1 to {self.most}")
        stop = _LENGTH.size + length
        if len(self._got) < stop:
            return None
        payload = bytes(self._got[_LENGTH.size : stop])
        del self._got[:stop]
        return payload

    def close(self, *, strict: bool = False) -> None:
        """End it; see :class:`Exchange`."""
        if not self._claim.handle.is_open:  # or in a forked child, where nobody would ever let go of the locks
            super().close(strict=strict)
            return
        with self._reading, self._writing:
            super().close(strict=strict)

    def is_gone(self) -> bool:
        """Whether the other end is gone."""
        self.handle  # noqa: B018  (the check)
        return bool(_events(self._read_from))


def _opened(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"{path} is no named pipe")
    return fd


def _reader(path: str) -> int | None:
    """Return the end of a pipe to write to, once it is there and somebody has it open to read."""
    try:
        return _opened(path, os.O_WRONLY)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            return None
        raise


def _events(fd: int) -> int:
    """Return what there is to say of a pipe's end without being asked: hang-up, and errors."""
    poll = select.poll()
    poll.register(fd, 0)
    return sum(events for _, events in poll.poll(0))


def _wait(fd: int, events: int, deadline: float | None, what: str) -> None:
    """Return when something can be done with a descriptor, or after a moment: the caller looks again."""
    left = _SLICE if deadline is None else deadline - time.monotonic()
    poll = select.poll()
    poll.register(fd, events)
    if not poll.poll(max(0.0, min(left, _SLICE)) * 1000) and deadline is not None and time.monotonic() >= deadline:
        raise WaitTimeoutError(f"{what} in time")
