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
from ..lifetime import Claim, shielded, unwinding, waiting
from .exchanges import ByteExchange, _taken, check_system, own_paths, wait_until

if TYPE_CHECKING:
    from typing import Self

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

    def __init__(self, fds: list[int], claim: Claim) -> None:
        self._read_from, self._write_to = fds
        self._got = bytearray()
        # Closing takes both, so that no number is read from that belongs to somebody else by then; no finalizer does.
        self._reading, self._writing = threading.Lock(), threading.Lock()
        super().__init__(fds, claim)

    @classmethod
    @shielded
    def listen(cls, path: str, timeout: float | None = None) -> Self:
        """Make the pipes and wait for the other end; see :class:`SocketExchange`."""
        check_system(cls.way)
        there, back = f"{path}.there", f"{path}.back"
        names: list[str] = []
        fds: list[int] = []
        paths, claim = own_paths(names), cls._owning(fds)
        try:
            for name in (there, back):
                try:
                    os.mkfifo(name, 0o600)
                except OSError as error:
                    raise _taken(name, error) from None
                names.append(name)
            _open_pipe(there, os.O_RDONLY, fds)

            def answered() -> bool | None:
                is_open = _is_read(back, fds)
                if not is_open and _events(fds[0]) & select.POLLHUP:  # told once somebody has written
                    raise PeerGoneError(f"who connected to {path} is gone already")
                return is_open

            wait_until(answered, timeout, f"nobody connected to {path}")
            return cls._greeted(fds, claim, timeout)
        except BaseException as error:
            with unwinding(error):
                claim.release()
            raise
        finally:
            paths.release()

    @classmethod
    @shielded
    def connect(cls, path: str, timeout: float | None = None) -> Self:
        """Open the pipes of who waits there, or will; see :class:`SocketExchange`."""
        check_system(cls.way)
        fds: list[int] = []
        claim = cls._owning(fds)
        try:
            wait_until(lambda: _is_read(f"{path}.there", fds), timeout, f"nobody listens at {path}")
            # The other pipe was made before; read first, or its end could not write to it.
            try:
                _open_pipe(f"{path}.back", os.O_RDONLY, fds)
            except FileNotFoundError:
                raise PeerGoneError(f"who listened at {path} has stopped") from None
            fds.reverse()
            return cls._greeted(fds, claim, timeout)
        except BaseException as error:
            with unwinding(error):
                claim.release()
            raise

    @classmethod
    def _greeted(cls, fds: list[int], claim: Claim, timeout: float | None) -> Self:
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
            if not _wait(fds[0], select.POLLIN, deadline, "the other end of the pipes said nothing"):
                continue  # to read would be the end of file, as long as the other end has not opened it
            with contextlib.suppress(BlockingIOError):
                more = os.read(fds[0], len(_HELLO) - len(heard))
                if not more:
                    raise PeerGoneError("the other end of the pipes closed them")
                heard += more
        if heard != _HELLO:
            raise ProtocolError(f"what is at the other end of the pipes says {heard!r}")
        return cls(fds, claim)

    @shielded
    def send(self, payload: bytes, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        """Send one message; see :class:`Exchange`."""
        self._check(payload, fds, self.most)
        deadline = None if timeout is None else time.monotonic() + timeout
        message = _LENGTH.pack(len(payload)) + payload
        while True:
            try:
                with self._writing:
                    self.handle  # noqa: B018  (closed meanwhile?)
                    os.write(self._write_to, message)  # all of it or nothing: see the class
                return
            except BrokenPipeError:
                raise PeerGoneError("the other end of the pipes closed them") from None
            except BlockingIOError:
                _wait(self._write_to, select.POLLOUT, deadline, "the other end read nothing")

    def _put_back(self, came: tuple[bytes, list[int]]) -> None:
        """Have a message that was received, and nobody got, come again."""
        with self._reading:
            self._got[:0] = _LENGTH.pack(len(came[0])) + came[0]

    @shielded(undo=_put_back)
    def recv(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """Return the next message; see :class:`Exchange`."""
        self.handle  # noqa: B018  (the check)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                with self._reading:
                    self.handle  # noqa: B018  (closed meanwhile?)
                    while (payload := self._next()) is None:
                        more = os.read(self._read_from, 1 << 16)
                        if not more:
                            raise PeerGoneError("the other end of the pipes closed them")
                        self._got += more
                return payload, []
            except BlockingIOError:
                _wait(self._read_from, select.POLLIN, deadline, "no message came")

    def _next(self) -> bytes | None:
        """Take a message out of what was read; None if it is not whole yet."""
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

    @shielded
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


def _open_pipe(path: str, flags: int, fds: list[int]) -> None:
    fds.append(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISFIFO(os.fstat(fds[-1]).st_mode):
        raise UsageError(f"{path} is no named pipe")


def _is_read(path: str, fds: list[int]) -> bool | None:
    """Open the end of a pipe to write to, once it is there and somebody has it open to read: None if not yet."""
    try:
        _open_pipe(path, os.O_WRONLY, fds)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENOENT):
            return None
        raise
    return True


def _events(fd: int) -> int:
    """Return what there is to say of a pipe's end without being asked: hang-up, and errors."""
    poll = select.poll()
    poll.register(fd, 0)
    return sum(events for _, events in poll.poll(0))


def _wait(fd: int, events: int, deadline: float | None, what: str) -> bool:
    """Wait for a descriptor, a moment at most; return whether something can be done with it, else the caller looks
    again. Raises WaitTimeoutError at the deadline."""
    left = _SLICE if deadline is None else deadline - time.monotonic()
    poll = select.poll()
    poll.register(fd, events)
    if waiting(poll.poll, max(0.0, min(left, _SLICE)) * 1000):
        return True
    if deadline is not None and time.monotonic() >= deadline:
        raise WaitTimeoutError(f"{what} in time")
    return False
