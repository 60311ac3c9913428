"""Messages and file descriptors between two processes, over a connected unix socket that keeps message borders.

One message is up to 64 KiB of payload and up to 253 descriptors (the kernel's limit for one ``SCM_RIGHTS``), sent and
received whole or not at all: ``SOCK_SEQPACKET`` knows no half messages. The meaning of a message is not decided here.

:class:`Channel` and the keeper's server are built on :func:`transmit` and :func:`receive`. Only a guardian and its
keeper pass descriptors by themselves, since a guardian imports nothing of the library.
"""

from __future__ import annotations

import _socket
import contextlib
import errno
import os
import select
import socket
import struct
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if sys.platform != "win32":
    import fcntl
    import resource

from .. import lifetime
from ..errors import (
    AccessDeniedError,
    BusyError,
    ClosedError,
    DriverError,
    ForkedError,
    PeerGoneError,
    ProtocolError,
    UnsupportedError,
    UsageError,
    WaitTimeoutError,
)
from ..lifetime import waiting
from ..open_files import F_GET_SEALS, close_fds, is_gpu, is_memory
from ..spec import check_timeout

if TYPE_CHECKING:
    from typing import Self

Payload = bytes | bytearray | memoryview
MAX_MESSAGE = 64 * 1024
MAX_FDS = 253
ALL_FDS = socket.CMSG_SPACE(MAX_FDS * 4) if hasattr(socket, "CMSG_SPACE") else 0  # bytes of ancillary data
MAX_PATH = 107  # sun_path has 108 bytes, one of them for the final zero

# As plain ints: the flags of the socket module are enums, and their | costs a microsecond in every message.
_NOSIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
_DONTWAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
_AT_ONCE = _DONTWAIT | _NOSIGNAL
_PEEK = int(getattr(socket, "MSG_PEEK", 0))
_CLOEXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNC = int(getattr(socket, "MSG_TRUNC", 0))
_CTRUNC = int(getattr(socket, "MSG_CTRUNC", 0))
_TRUNCATED = _TRUNC | _CTRUNC
_STRANGERS = 1 << 30  # none of the kernel's flags: descriptors of what is no memory
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.ESHUTDOWN)
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_DAY = 86_400.0  # poll() and the locks of Python take no longer than weeks, or years: longer waits are many of these
_IN_FLIGHT_WAIT = 10.0  # seconds to wait for other messages of this user to be read before giving up

_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


class DescriptorsLostError(ProtocolError):
    """A message arrived, but this process had no room for all of its descriptors: those that came were closed.
    `payload` is whole, and its sender believes that this process has the descriptors."""

    payload: bytes = b""


class OwnedFds(list[int]):
    """Received descriptors: while `is_armed`, dropping the list closes what is still in it."""

    is_armed = True

    def __del__(self) -> None:
        if self and self.is_armed:
            close_fds(self)


def hang_up(sock: _socket.socket) -> None:
    """End a connection for every process that has this socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The process on the other side, as the kernel says, verified. `pid` is None in a PID namespace that is invisible
    here; an unmapped user reads as the overflow uid, usually 65534."""

    pid: int | None
    uid: int
    gid: int


def check_sockets() -> None:
    """Raise :class:`UnsupportedError` where gevent or its like has put other sockets in the place of Python's."""
    if not issubclass(socket.socket, _socket.socket):
        raise UnsupportedError(
            "vram",
            "the sockets and threads of Python",
            f"those of {socket.socket.__module__.partition('.')[0]}, where a thread of vram would stop all others",
            "Use vram in a process that is not patched: under gunicorn that has the worker class sync, gthread or "
            "uvicorn_worker.UvicornWorker",
        )


def peer_credentials(sock: socket.socket) -> Credentials:
    """Return who connected, or who listened, on the other side of a unix socket (``SO_PEERCRED``, see unix(7))."""
    pid, uid, gid = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return Credentials(pid or None, uid, gid)


def transmit(sock: socket.socket, payload: Payload, fds: Sequence[int] = (), flags: int = 0) -> None:
    """Send one message. `fds` are lent. Raises OSError as the kernel reports it, without having sent anything."""
    if fds:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]
        sock.sendmsg([payload], rights, flags | _NOSIGNAL)
    else:
        sock.send(payload, flags | _NOSIGNAL)


def receive(sock: socket.socket, flags: int = 0, room: int = ALL_FDS) -> tuple[bytes, list[int], bool]:
    """Receive a message; return its payload (empty at the end), its descriptors, and whether any of it was cut off. The
    descriptors, also of a cut message, are close-on-exec and the caller's to close. `room` is ancillary bytes."""
    payload, fds, cut = _receive(sock, flags, room)
    if isinstance(fds, OwnedFds):
        fds.is_armed = False
    return payload, fds, cut != 0


def _receive(
    sock: socket.socket, flags: int, room: int = ALL_FDS, only_memory: bool = False
) -> tuple[bytes, list[int], int]:
    """The same, but says what is wrong: MSG_TRUNC, MSG_CTRUNC, _STRANGERS, several or 0. The list is an OwnedFds.
    Ctrl-C is let in where the call may wait."""
    if flags & _DONTWAIT:
        payload, ancillary, said, _ = sock.recvmsg(MAX_MESSAGE + 1, room, flags | _CLOEXEC)
    else:
        payload, ancillary, said, _ = waiting(sock.recvmsg, MAX_MESSAGE + 1, room, flags | _CLOEXEC)
    cut = said & _TRUNCATED
    if len(payload) > MAX_MESSAGE:
        cut |= _TRUNC
    if not ancillary:
        return payload, [], cut
    numbers = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(data[: len(data) - len(data) % 4])
    fds = OwnedFds(numbers)
    if only_memory:
        try:
            for fd in fds:
                fcntl.fcntl(fd, F_GET_SEALS)  # is_memory spelt out: a call less for each
        except OSError:
            if not all(is_memory(fd) or is_gpu(fd) for fd in fds):
                cut |= _STRANGERS
    return payload, fds, cut


def connect(
    path: str, timeout: float | None = None, check: Callable[[Credentials], None] | None = None
) -> socket.socket:
    """Connect to the message socket at `path` (at most 107 bytes); `timeout` is for a full listener's queue.
    `check` raises for a listener not to speak to."""
    if sys.platform != "linux":
        raise UnsupportedError("a channel between processes", "Linux (SOCK_SEQPACKET)", sys.platform)
    check_path(path)
    check_timeout(timeout)
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise _no_room("socket(AF_UNIX, SOCK_SEQPACKET)", error) from None
    try:
        if timeout is not None:
            # A non-blocking connect to a full unix listener fails at once and cannot be polled for; this waits.
            _set_deadline(sock, socket.SO_SNDTIMEO, max(timeout, 0.001))
        waiting(sock.connect, path)
        if timeout is not None:
            _set_deadline(sock, socket.SO_SNDTIMEO, 0.0)
    except BaseException as error:
        sock.close()
        if isinstance(error, BlockingIOError):
            raise WaitTimeoutError(f"the listener at {path} accepted nobody for {timeout:g} s") from None
        if isinstance(error, PermissionError):
            raise AccessDeniedError(f"may not connect to {path}: its permissions keep uid {os.geteuid()} out") from None
        if isinstance(error, OSError):
            if error.errno in (errno.EPROTOTYPE, errno.ENOTSOCK):
                raise ProtocolError(f"{path} is a socket of another kind, not one for messages") from None
            raise PeerGoneError(f"nobody listens at {path} ({error.strerror})") from None
        raise
    if check is not None:
        try:
            check(peer_credentials(sock))
        except BaseException:
            sock.close()
            raise
    return sock


def check_path(path: str) -> None:
    """Raise :class:`UsageError` for a socket path that the kernel has no room for."""
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError as error:  # half a surrogate pair, which stands for no byte
        raise UsageError(f"socket path {path!r} is no file name: {error.reason} at {error.start}") from None
    if not 0 < size <= MAX_PATH or "\0" in path[1:]:  # one in front: the abstract namespace
        raise UsageError(f"socket path {path!r} has {size} bytes; a unix socket's path has 1 to {MAX_PATH}")


class _Socket(socket.socket):
    """A socket that is dropped without a word, at exit above all: who has to close what is on it is warned by us."""

    __slots__ = ()

    __del__ = _socket.socket.close


def poll(sock: _socket.socket, events: int, timeout: float | None) -> list[tuple[int, int]]:
    """Wait for events of a socket, and let Ctrl-C in; after a long while it returns without any, to be called again."""
    poller = select.poll()
    poller.register(sock, events)
    return waiting(poller.poll, None if timeout is None else min(max(0.0, timeout), _DAY) * 1000)


class Channel(lifetime.Owned):
    """A connected message socket, taken over; any thread may send or receive. `only_memory` hangs up on
    descriptors of anything else. A forked child's copy is closed."""

    __slots__ = (
        "_back", "_handle", "_has_hung_up", "_ours", "_sock", "_warn_on_leak", "only_memory",
    )  # fmt: skip

    def __init__(self, sock: _socket.socket) -> None:
        if not isinstance(sock, _socket.socket) or sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
            check_sockets()
            raise UsageError(f"a channel takes a unix socket of type SOCK_SEQPACKET, not {sock!r:.200}")
        self._sock = moved = _Socket(sock.family, sock.type, sock.proto, sock.detach())
        moved.settimeout(None)
        moved.set_inheritable(False)
        self._warn_on_leak = False  # a socket closed late harms nobody; the ledger still sees it
        self._ours = ours = [True]  # until it was given away
        self.only_memory = False
        self._has_hung_up = False
        self._back: list[tuple[bytes, list[int]]] = []  # received, and nobody got it
        _open_channels.add(self)

        def undo() -> None:
            # The shutdown wakes whoever is blocked in recvmsg; closing the number alone would not. It also ends the
            # connection for every process that has the socket, which is not for us to do once we gave it away.
            if ours[0]:
                hang_up(moved)
            moved.close()

        self._claim = lifetime.own(f"channel on fd {moved.fileno()}", undo)
        self._handle = self._claim.handle

    @classmethod
    def connect(
        cls, path: str, timeout: float | None = None, check: Callable[[Credentials], None] | None = None
    ) -> Self:
        """Connect to a listener; see :func:`connect` for the parameters and errors."""
        return cls(connect(path, timeout, check))

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return two channels that are connected with each other."""
        try:
            one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _no_room("socketpair(AF_UNIX, SOCK_SEQPACKET)", error) from None
        first = cls(one)
        try:
            return first, cls(other)
        except BaseException:
            first.close()
            other.close()
            raise

    def fileno(self) -> int:
        """Lend the descriptor, to poll or to pass to a child; valid as long as this channel is open."""
        self.handle  # noqa: B018
        return self._sock.fileno()

    def is_gone(self) -> bool:
        """Whether the other side has closed, whatever may still be unread. Does not wait."""
        poller = select.poll()
        try:
            poller.register(self._sock, 0)  # hang-up and errors are always told
        except ValueError:  # its socket is closed
            self.handle  # noqa: B018  (says so)
            raise
        return bool(poller.poll(0))

    def peek(self, count: int) -> bytes:
        """Return the first bytes of the next message, which stays there; none if there is no message now."""
        self.handle  # noqa: B018  (the check)
        if self._has_hung_up:
            return b""
        try:
            return self._sock.recv(count, _DONTWAIT | _PEEK)
        except OSError:  # whoever receives it hears what is wrong
            return b""

    def wait(self, timeout: float | None) -> bool:
        """Wait for room to send, or for something to receive, such as the end: return whether that is there."""
        self.handle  # noqa: B018  (the check)
        return any(event != select.POLLOUT for _, event in self._poll(select.POLLIN | select.POLLOUT, timeout))

    def give_away(self) -> int:
        """Lend the descriptor for another process to take this end over. Closing this object then ends nothing."""
        fd = self.fileno()
        self._ours[0] = False
        return fd

    def peer(self) -> Credentials:
        """Return the verified identity of the process that connected or listened on the other side."""
        self.handle  # noqa: B018
        return peer_credentials(self._sock)

    def send(self, payload: Payload, fds: Sequence[int] = (), *, timeout: float | None = None) -> None:
        """Send a message of 1 to 65,536 bytes with up to 253 lent descriptors. Raises WaitTimeoutError or
        AccessDeniedError (``SO_PASSRIGHTS``) with nothing sent, PeerGoneError, or BusyError: too many are unread."""
        size = payload.nbytes if isinstance(payload, memoryview) else len(payload)
        if not 0 < size <= MAX_MESSAGE or len(fds) > MAX_FDS:
            raise UsageError(
                f"a message of {size} bytes and {len(fds)} descriptors; it has 1 to {MAX_MESSAGE} and at most {MAX_FDS}"
            )
        if timeout is not None and not (type(timeout) in (float, int) and timeout >= 0):
            check_timeout(timeout)
        try:
            if fds:
                transmit(self._sock, payload, fds, _DONTWAIT)
            else:
                self._sock.send(payload, _AT_ONCE)  # transmit spelt out: every message comes by here
        except OSError as error:
            self._send_again(error, payload, fds, timeout)

    def _send_again(self, error: OSError, payload: Payload, fds: Sequence[int], timeout: float | None) -> None:
        started = time.monotonic()
        deadline = None if timeout is None else started + timeout
        while True:
            now = time.monotonic()
            left = None if deadline is None else deadline - now
            if error.errno == errno.ETOOMANYREFS:
                if now - started > _IN_FLIGHT_WAIT or (left is not None and left <= 0):
                    raise BusyError(
                        "too many descriptors of this user are in flight: other messages with descriptors have to be "
                        "read first (RLIMIT_NOFILE is the limit)"
                    ) from None
                waiting(time.sleep, 0.001)
            elif error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
                if left is not None and left <= 0:
                    raise WaitTimeoutError(f"the peer read nothing for {timeout:g} s") from None
                self._poll(select.POLLOUT, left)
            elif error.errno == errno.EBADF and self._handle.is_open:
                raise UsageError(f"one of the descriptors {list(fds)[:8]} is not open") from None
            elif error.errno == errno.EPERM and fds:
                raise AccessDeniedError(
                    f"the other side takes no descriptors: its socket is set to pass none (SO_PASSRIGHTS), and so a "
                    f"message with {len(fds)} of them was not sent"
                ) from None
            else:
                raise self._translate(error) from None
            self.handle  # noqa: B018  (the check)
            try:
                return transmit(self._sock, payload, fds, _DONTWAIT)
            except OSError as again:
                error = again

    def put_back(self, came: tuple[bytes, list[int]]) -> None:
        """Have a message that was received, and nobody got, come again."""
        if isinstance(came[1], OwnedFds):
            came[1].is_armed = True
        self._back.append(came)

    def recv(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """Receive a message; its close-on-exec descriptors are the caller's. Raises WaitTimeoutError, PeerGoneError at
        the end, or ProtocolError: too long, lost descriptors (with the payload), or no memory (:attr:`only_memory`)."""
        payload, fds = self.take(timeout=timeout)
        if isinstance(fds, OwnedFds):
            fds.is_armed = False
        return payload, fds

    def take(self, *, timeout: float | None = None) -> tuple[bytes, list[int]]:
        """Receive one message as :meth:`recv` does, whose descriptors are closed with the list that they are in, unless
        it is emptied."""
        if timeout is not None and not (type(timeout) in (float, int) and timeout >= 0):
            check_timeout(timeout)
        if self._has_hung_up:
            raise PeerGoneError("the connection was ended here: what came over it was no memory, or no sense")
        if self._back:
            with contextlib.suppress(IndexError):  # another thread was quicker
                return self._back.pop()
        deadline = None
        reset = False
        flags = 0 if timeout is None else _DONTWAIT
        while True:
            try:
                payload, fds, cut = _receive(self._sock, flags, ALL_FDS, self.only_memory)
            except OSError as error:
                if error.errno == errno.ECONNRESET and not reset:
                    reset = True  # it closed without reading what we sent; what it had said comes behind this
                    continue
                if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK):
                    raise self._translate(error) from None
                if timeout is not None:
                    deadline = deadline or time.monotonic() + timeout
                    if timeout == 0 or deadline <= time.monotonic():
                        raise WaitTimeoutError(f"no message came for {timeout:.3g} s") from None
                self.handle  # noqa: B018  (the check)
                self._poll(select.POLLIN, deadline and deadline - time.monotonic())
                continue
            if payload and not cut:
                return payload, fds
            came = len(fds)
            if cut & _STRANGERS:
                self.hang_up()
            close_fds(fds)
            if cut:
                raise _cut_off(payload, came, cut)
            self.handle  # noqa: B018  (closed here, in another thread, reads as an end of file too)
            raise PeerGoneError("the other side closed the connection")

    def hang_up(self) -> None:
        """End the connection, and receive nothing that is left in it."""
        self._has_hung_up = True
        hang_up(self._sock)

    def _poll(self, events: int, timeout: float | None) -> list[tuple[int, int]]:
        try:
            return poll(self._sock, events, timeout)
        except ValueError:  # its socket was closed meanwhile
            self.handle  # noqa: B018  (says so)
            raise

    def _translate(self, error: OSError) -> Exception:
        if error.errno in _GONE:
            return PeerGoneError("the other side closed the connection")
        if error.errno == errno.EBADF:  # the socket was closed with this object, here or in the child of a fork
            try:
                self.handle  # noqa: B018  (says which)
            except (ClosedError, ForkedError) as closed:
                return closed
        return error


def _cut_off(payload: bytes, came: int, cut: int) -> ProtocolError:
    if cut & _STRANGERS:
        return ProtocolError(
            f"of {came} descriptors that came some are no shared memory, nor a GPU's: a file, a directory or a pipe, a "
            f"socket or the like. The connection is ended"
        )
    if cut & _TRUNC:
        return ProtocolError(f"a message was longer than {MAX_MESSAGE} bytes, the most that one has")
    error = DescriptorsLostError(
        f"this process has no room for its descriptors: {came} of those of a message of {len(payload)} bytes came "
        f"({descriptor_limit()})"
    )
    error.payload = payload
    return error


def _no_room(call: str, error: OSError) -> Exception:
    if error.errno not in _NO_ROOM:
        return error
    return DriverError(call, error.errno, errno.errorcode[error.errno], f"{error.strerror} ({descriptor_limit()})")


def descriptor_limit() -> str:
    """How many descriptors this process may have and how to have more, for errors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"RLIMIT_NOFILE is {soft}, and can be raised to {hard}: `ulimit -n {hard}`"


def check_free(count: int, what: str) -> None:
    """Raise :class:`DriverError` unless this process may have so many more descriptors."""
    found: list[int] = []
    try:
        while len(found) < count:
            found.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        number = error.errno or 0
        raise DriverError(what, number, errno.errorcode.get(number, ""), descriptor_limit()) from None
    finally:
        for fd in found:
            os.close(fd)


def _set_deadline(sock: socket.socket, option: int, seconds: float) -> None:
    seconds = min(seconds, 1e9)  # 31 years; infinity has no int
    whole = int(seconds)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", whole, int((seconds - whole) * 1e6)))


def _after_fork_in_child() -> None:
    """Let go of the parent's connections: while a copy is open here, its peer would not see the parent's end."""
    for channel in list(_open_channels):
        with contextlib.suppress(OSError):
            channel._sock.close()
    _open_channels.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
