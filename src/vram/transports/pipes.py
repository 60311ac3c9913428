"""An exchange over two named pipes, one each way. Bytes only."""

from __future__ import annotations

import errno
import os
import select
import stat
import struct

from ..errors import PeerGoneError, ProtocolError, UsageError
from ..lifetime import Claim
from .exchanges import ByteExchange, taken

_LENGTH = struct.Struct("<I")


class PipeExchange(ByteExchange):
    """Over two named pipes, ``PATH.there`` and ``PATH.back``.

    Messages are no longer than what the kernel writes to a pipe in one piece, so none is ever half there.
    """

    __slots__ = ("_got", "_read_from", "_write_to")

    way = "named pipes"
    most = getattr(select, "PIPE_BUF", 512) - _LENGTH.size  # POSIX promises that much

    def __init__(self, fds: list[int], claim: Claim, end: int) -> None:
        self._read_from, self._write_to = fds[end], fds[1 - end]
        self._got = bytearray()
        super().__init__(fds, claim, end)

    @staticmethod
    def _make(path: str, fds: list[int], names: list[str]) -> None:
        for name in (f"{path}.there", f"{path}.back"):
            try:
                os.mkfifo(name, 0o600)
            except OSError as error:
                raise taken(name, error) from None
            names.append(name)
        _open_pipe(names[0], os.O_RDONLY, fds)

    @staticmethod
    def _meet(path: str, fds: list[int], end: int) -> bool | None:
        """Open a pipe to write to, once somebody reads from it. The connecting end opens both before the other."""
        try:
            _open_pipe(f"{path}.{'there' if end else 'back'}", os.O_WRONLY, fds)
        except OSError as error:
            if error.errno not in (errno.ENXIO, errno.ENOENT):
                raise
            if not end and _events(fds[0]) & select.POLLHUP:  # told once somebody had it open
                raise PeerGoneError(f"who connected to {path} is gone already") from None
            return None
        if end:
            try:
                _open_pipe(f"{path}.back", os.O_RDONLY, fds)
            except FileNotFoundError:
                raise PeerGoneError(f"who listened at {path} has stopped") from None
        return True

    def _write(self, payload: bytes) -> bool | None:
        try:
            os.write(self._write_to, _LENGTH.pack(len(payload)) + payload)  # all of it or nothing: see the class
        except BrokenPipeError:
            raise PeerGoneError("the other end of the pipes closed them") from None
        except BlockingIOError:
            return None
        return True

    def _read(self) -> bytes | None:
        while (payload := self._next()) is None:
            try:
                more = os.read(self._read_from, 1 << 16)
            except BlockingIOError:
                return None
            if not more:  # the end, or the other end has not opened it yet
                return None
            self._got += more
        return payload

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

    def is_gone(self) -> bool:
        """Whether the other end is gone."""
        self.handle  # noqa: B018  (the check)
        return bool(_events(self._read_from) or _events(self._write_to))


def _open_pipe(path: str, flags: int, fds: list[int]) -> None:
    fds.append(os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))
    if not stat.S_ISFIFO(os.fstat(fds[-1]).st_mode):
        raise UsageError(f"{path} is no named pipe")


def _events(fd: int) -> int:
    """Return what there is to say of a pipe's end without being asked: hang-up, and errors."""
    poller = select.poll()
    poller.register(fd, 0)
    return sum(events for _, events in poller.poll(0))
