"""The keeper's address: a socket in the file system, made where nobody listens, and removed by its maker.

Its directory belongs to this user or to root, and nobody else may write there: no other user can put anything in the
place of the socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import shlex
import socket
import stat
import time
from collections.abc import Iterator

from ..errors import BusyError, DriverError, UsageError
from ..lifetime import waiting
from ..sharing.channel import descriptor_limit, peer_credentials
from .rules import HANDSHAKE

_LAST_GROUP = 2**32 - 2  # the one after it means "leave it as it is" to chown(2)


class Listener:
    """A listening socket at a path, where a dead keeper's socket is replaced; its maker removes it.
    `mode` and `group` are in force before anybody can connect."""

    inode: tuple[int, int] | None

    def __init__(self, path: str, *, mode: int = 0o600, group: str | None = None) -> None:
        self.path = path
        gid = None if group is None else group_id(group)
        try:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                _is_dead(path)  # before the lock, which whoever serves there may have for good
                with _locked(os.path.dirname(path)):
                    _clear_path(path)
                    self._bind(mode, gid)
            except BaseException:
                self.sock.close()
                raise
        except OSError as error:
            what = f"cannot listen at {path} (mode {mode:04o}, group {group})"
            if error.errno in (errno.EMFILE, errno.ENFILE):  # no matter of the path
                raise DriverError(what, error.errno, errno.errorcode[error.errno], descriptor_limit()) from None
            raise UsageError(f"{what}: {error}") from None  # no such directory, not allowed, no place for sockets
        self.sock.setblocking(False)

    def _bind(self, mode: int, gid: int | None) -> None:
        """Bind, and listen with the right mode: before that nobody can connect."""
        self.sock.bind(self.path)
        try:
            _set(self.path, mode, gid)
            self.sock.listen(1024)
        except BaseException:
            os.unlink(self.path)
            raise
        self.inode = _inode(self.path)

    @classmethod
    def adopt(cls, path: str, sock: socket.socket) -> Listener:
        """Take over the socket that another keeper bound to `path`."""
        self = cls.__new__(cls)
        self.path = path
        self.sock = sock
        sock.setblocking(False)
        os.set_inheritable(sock.fileno(), False)
        sock.listen(1024)  # again, so that clients see this process's credentials and not its predecessor's
        self.inode = _inode(path)  # None: somebody removed it, and who is connected is served
        return self

    def unlink(self) -> None:
        """Take the path away, if it is still this socket's."""
        with contextlib.suppress(OSError):
            if self.inode is not None and _inode(self.path) == self.inode:
                os.unlink(self.path)
                self.inode = None  # once: its number may be another socket's when this one is closed


def set_permissions(path: str, mode: int | None, gid: int | None) -> None:
    """Set mode and group of a socket that is there; None leaves one as it is."""
    try:
        _set(path, mode, gid)
    except OSError as error:
        raise UsageError(f"cannot change mode or group of {path}: {error.strerror}") from None


def group_id(group: str) -> int:
    """Return the number of a group, given by name or number."""
    if group.isascii() and group.isdecimal():
        if len(group) > 10 or int(group) > _LAST_GROUP:
            raise UsageError(f"group {group:.40} is no number of a group: 0 to {_LAST_GROUP}")
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):  # ValueError: a zero byte, or what no file name has
        raise UsageError(f"there is no group {group!r}") from None


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Have the directory locked: two keepers that start at once must not both find the other's socket dead."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
            raise UsageError(
                f"cannot listen in {directory}: it belongs to uid {found.st_uid} with mode "
                f"{stat.S_IMODE(found.st_mode):04o}, and whoever may write there could take the socket's place. Make "
                f"one of your own: install -d -m 700 {shlex.quote(os.path.join(directory, f'vram-{os.geteuid()}'))}"
            )
        deadline = time.monotonic() + HANDSHAKE  # longer than a keeper takes to start
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BusyError(
                        f"another process has locked {directory} for {HANDSHAKE:g} s; is a keeper starting?"
                    ) from None
                waiting(time.sleep, 0.01)
        yield
    finally:
        os.close(fd)


def _set(path: str, mode: int | None, gid: int | None) -> None:
    if gid is not None:  # first: before, the mode would let another group in
        os.chown(path, -1, gid)
    if mode is not None:
        os.chmod(path, mode)


def _clear_path(path: str) -> None:
    """Remove a socket that no process listens on. Anything else is left alone, with BusyError or UsageError."""
    if _is_dead(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _is_dead(path: str) -> bool:
    """Whether there is a socket that nobody listens on; raise if there is something else, or somebody listens."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(found.st_mode):
        raise UsageError(f"{path} exists and is no socket; choose another path or remove it")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.setblocking(False)
            probe.connect(path)
        except BlockingIOError:  # its queue is full: it lives, if barely
            raise BusyError(f"a process listens at {path} and is too busy to answer") from None
        except FileNotFoundError:  # another one that starts has just removed it
            return False
        except OSError as error:
            if error.errno == errno.EPROTOTYPE:
                raise BusyError(f"another kind of server listens at {path}; choose another path") from None
            if error.errno != errno.ECONNREFUSED:
                raise UsageError(f"cannot tell who is at {path}: {error.strerror}; choose another path") from None
        else:
            who = peer_credentials(probe)
            if who.pid == os.getpid():
                raise BusyError(f"this process serves {path} already: close that, or choose another path")
            raise BusyError(
                f"pid {who.pid}, uid {who.uid} serves {path} already; use that, choose another path, or replace a "
                f"keeper with --takeover"
            )
    return True


def _inode(path: str) -> tuple[int, int] | None:
    """Which file is at a path; None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
