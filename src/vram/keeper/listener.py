"""The keeper's address: a socket in the file system, made where nobody listens and taken away by who made it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
import time

from ..errors import BusyError, UsageError
from ..sharing.channel import peer_credentials

__all__ = ["Listener", "clear_path", "lock_directory"]

_LAST_GROUP = 2**32 - 2  # the one after it means "leave it as it is" to chown(2)
_START_WAIT = 5.0  # seconds to wait for another keeper that is starting in the same directory


class Listener:
    """A listening socket at a path: made where nobody listens, taken away again by who made it.

    Parameters
    ----------
    path : str
        Where. What a dead keeper left there is replaced.
    mode, group : int, str or None
        Permissions and group of the socket, in force before anybody can connect.
    directory_fd : int
        Lent: a descriptor of the directory that holds its lock already.

    Raises
    ------
    BusyError
        If somebody listens there.
    UsageError
        If something else than a socket is there, or the group does not exist or is not this user's to give.
    """

    inode: tuple[int, int] | None

    def __init__(self, path: str, *, mode: int = 0o600, group: str | None = None, directory_fd: int = -1) -> None:
        self.path = path
        gid = -1 if group is None else _group(group)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            _is_dead(path)  # or whoever serves there is named before a lock that it may hold is waited for
            # Two keepers that start at once must not both find the other's socket dead: one at a time per directory.
            where = os.path.dirname(path)
            directory = (
                os.dup(directory_fd)
                if directory_fd >= 0
                else os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            )
            try:
                lock_directory(directory, where)  # once more does nothing: the lock is the open file's
                clear_path(path)
                umask = os.umask(0o777 & ~mode)
                try:
                    sock.bind(path)
                finally:
                    os.umask(umask)
                found = os.lstat(path)
                self.inode = (found.st_dev, found.st_ino)
                try:
                    os.chmod(path, mode)
                    if gid != -1:
                        os.chown(path, -1, gid)
                    sock.listen(1024)
                except BaseException:
                    self.unlink()
                    raise
            finally:
                os.close(directory)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):  # of the path: no such directory, not allowed, no place for sockets
                raise UsageError(f"cannot listen at {path} (mode {mode:04o}, group {group}): {error}") from None
            raise
        sock.setblocking(False)
        self.sock = sock

    @classmethod
    def adopt(cls, path: str, sock: socket.socket) -> Listener:
        """Take over the socket that another process bound to `path`."""
        self = cls.__new__(cls)
        self.path = path
        self.sock = sock
        sock.setblocking(False)
        sock.listen(1024)  # again, so that clients see this process's credentials and not its predecessor's
        self.inode = None
        with contextlib.suppress(OSError):  # somebody removed it: those who are connected are served all the same
            found = os.lstat(path)
            self.inode = (found.st_dev, found.st_ino)
        return self

    def unlink(self) -> None:
        """Take the path away, if it is still this socket's."""
        with contextlib.suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self.inode:
                os.unlink(self.path)


def _group(group: str) -> int:
    if group.isascii() and group.isdecimal():
        if len(group) > 10 or int(group) > _LAST_GROUP:
            raise UsageError(f"group {group:.40} is no number of a group: 0 to {_LAST_GROUP}")
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):  # ValueError: a zero byte, or what no file name has
        raise UsageError(f"there is no group {group!r}") from None


def lock_directory(fd: int, directory: str) -> None:
    """Lock a directory for as long as any descriptor of this open file is open.

    Raises
    ------
    BusyError
        If another process has it for longer than a keeper takes to start.
    """
    deadline = time.monotonic() + _START_WAIT
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise BusyError(
                    f"another process has locked {directory} for {_START_WAIT:g} s; is a keeper starting?"
                ) from None
            time.sleep(0.01)


def clear_path(path: str) -> None:
    """Remove a socket that nobody listens on any more.

    Raises
    ------
    BusyError, UsageError
        If somebody listens there, or it is something else: it is left alone.
    """
    if _is_dead(path):
        os.unlink(path)


def _is_dead(path: str) -> bool:
    """Whether there is a socket that nobody listens on; False if there is nothing. Raises for anything else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(found.st_mode):
        raise UsageError(f"{path} exists and is no socket; choose another path or remove it")
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        probe.setblocking(False)
        probe.connect(path)
    except BlockingIOError:  # its queue is full: it lives, if barely
        raise BusyError(f"a process listens at {path} and is too busy to answer") from None
    except OSError as error:
        if error.errno == errno.EPROTOTYPE:
            raise BusyError(f"another kind of server listens at {path}; choose another path") from None
        if error.errno != errno.ECONNREFUSED:
            raise UsageError(f"cannot tell who is at {path}: {error.strerror}; choose another path") from None
        return True
    else:
        who = peer_credentials(probe)
        raise BusyError(
            f"pid {who.pid}, uid {who.uid} serves {path} already; use that, choose another path, or replace a "
            f"keeper with --takeover"
        )
    finally:
        probe.close()
