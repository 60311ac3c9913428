"""The keeper's address: a socket in the file system, made where nobody listens, and removed by its maker.

The directory may belong to another user, or to everybody: whoever may write there can put another file, or a symbolic
link, in the place of ours between any two calls. So nothing is done to the socket by its path. It is bound, given its
mode and group, and listened on inside a directory of our own that nobody else can enter, and only then linked to where
it belongs, all of it relative to descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import grp
import os
import secrets
import select
import socket
import stat
import time
from collections.abc import Iterator

from ..errors import AccessDeniedError, BusyError, DriverError, NotFoundError, UsageError, VramError
from ..lifetime import uninterrupted
from ..sharing.channel import descriptor_limit, peer_credentials
from ..sharing.unread import pass_rights
from .killed import was_killed

__all__ = ["Listener", "Permissions", "clear_path", "group_id", "lock_directory"]

_LAST_GROUP = 2**32 - 2  # the one after it means "leave it as it is" to chown(2)
_START_WAIT = 5.0  # seconds to wait for another keeper of this user that is starting at the same path
_TRIES = 16  # how often the path is looked at again when what was there has changed meanwhile
_ANSWER = 2.0  # seconds for an answer of what listens, where the process that did was killed
_LONGEST = 64  # bytes of a name that is bound to, behind /proc/self/fd/<number>/


class Listener:
    """A listening socket at a path: made where nobody listens, and removed by its maker.

    Parameters
    ----------
    path : str
        Where. What a dead keeper left there is replaced.
    mode, group : int, str or None
        Permissions and group of the socket, in force before anybody can connect. The process's umask has no part in
        it, and is not touched.
    directory_fd : int
        Borrowed: a descriptor of the directory, which holds its lock, and which nobody else can enter. Then the socket
        is bound at its path: there is nothing else in the directory at any time.

    Raises
    ------
    BusyError
        If somebody listens there.
    UsageError
        If something else than a socket is there, or the group does not exist or is not this user's to give.
    DriverError
        If this process, or the system, has no descriptor left.
    """

    inode: tuple[int, int] | None
    lent: bool = False  # by a service manager, which goes on listening when the keeper has ended

    def __init__(self, path: str, *, mode: int = 0o600, group: str | None = None, directory_fd: int = -1) -> None:
        self.path = path
        gid = -1 if group is None else group_id(group)
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise _refused(error, f"cannot listen at {path}") from None
        # Before anybody can connect, and until the greeting: a connection that is refused has none in its queue.
        pass_rights(sock, False)
        try:
            if directory_fd >= 0:
                lock_directory(directory_fd, os.path.dirname(path))  # again does nothing: it is the open file's
                clear_path(path, directory_fd)
                self.inode = _bind(sock, directory_fd, os.path.basename(path), path, mode, gid)
            else:
                with _directory(path) as directory, _private(directory, path) as private:
                    self.inode = _bind_and_link(sock, private, path, mode, gid, directory)
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):  # of the path: no such directory, not allowed, no place for sockets
                raise _refused(error, f"cannot listen at {path} (mode {mode:04o}, group {group})") from None
            raise
        sock.setblocking(False)
        self.sock = sock

    @classmethod
    def adopt(cls, path: str, sock: socket.socket, *, lent: bool = False) -> Listener:
        """Take over the socket that another process bound to `path`; if it is `lent`, the path stays that one's."""
        self = cls.__new__(cls)
        self.path = path
        self.sock = sock
        self.lent = lent
        sock.setblocking(False)
        pass_rights(sock, False)  # its maker may have been of another version
        sock.listen(1024)  # again, so that clients see this process's credentials and not its predecessor's
        self.inode = None
        if lent:
            return self
        with contextlib.suppress(OSError):  # somebody removed it: those who are connected are served all the same
            found = os.lstat(path)
            self.inode = (found.st_dev, found.st_ino)
        return self

    def unlink(self) -> None:
        """Take the path away, if it is still this socket's."""
        with contextlib.suppress(OSError), _directory(self.path) as directory:
            name = os.path.basename(self.path)
            if self.inode is not None and _inode(name, directory) == self.inode:
                (_,) = map(functools.partial(os.unlink, dir_fd=directory), (name,))  # see lifetime.uninterrupted
                self.inode = None  # once: its number may be another socket's when this one is closed


class Permissions:
    """Mode and group of a socket that is there, to change through a descriptor of it.

    Parameters
    ----------
    path : str
        The socket.

    Raises
    ------
    NotFoundError
        If nothing is there.
    AccessDeniedError
        If that is no socket of this user.

    Attributes
    ----------
    through : str
        A path that leads to this very socket, whatever is put at `path` meanwhile: who connects by it knows whose
        socket it is.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise NotFoundError(f"no socket at {path}: {error.strerror}") from None
        self.through = f"/proc/self/fd/{self._fd}"
        self._was = found = os.fstat(self._fd)
        if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
            os.close(self._fd)
            raise AccessDeniedError(f"{path} is no socket of uid {os.geteuid()}: its permissions are not changed")

    def change(self, mode: int | None, gid: int | None) -> None:
        """Set them; None leaves one as it is.

        Raises
        ------
        UsageError
            If the kernel refuses, as it does a group that is not this user's to give. Nothing was changed.
        """
        try:
            _set(self._fd, stat.S_IMODE(self._was.st_mode) if mode is None else mode, -1 if gid is None else gid)
        except OSError as error:
            self.restore()
            raise UsageError(f"cannot change mode or group of {self.path}: {error.strerror}") from None

    def restore(self) -> None:
        """Set the mode and group that were there before."""
        with contextlib.suppress(OSError):
            _set(self._fd, stat.S_IMODE(self._was.st_mode), self._was.st_gid)

    def close(self) -> None:
        """Close the descriptor; the mode and group that were set stay."""
        os.close(self._fd)


def group_id(group: str) -> int:
    """Return the number of a group, given by name or number.

    Raises
    ------
    UsageError
        If there is no such group, or no group has such a number.
    """
    if group.isascii() and group.isdecimal():
        if len(group) > 10 or int(group) > _LAST_GROUP:
            raise UsageError(f"group {group:.40} is no number of a group: 0 to {_LAST_GROUP}")
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):  # ValueError: a zero byte, or what no file name has
        raise UsageError(f"there is no group {group!r}") from None


@contextlib.contextmanager
def _directory(path: str) -> Iterator[int]:
    """The directory that a path lies in: one and the same in all that follows, whatever its name leads to then."""
    # Whoever ends a lender comes here, in the main thread too, where an interrupt may come (I12).
    fd = uninterrupted(os.open, os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _private(directory: int, path: str) -> Iterator[int]:
    """A directory beside the socket that nobody else can enter, locked, so by nobody else either.

    Two keepers that start at once must not both find the other's socket dead: one at a time for each path and user.
    (Another user could not remove what is ours, or is root, or owns the directory.)
    """
    # Always the same for a user, so that what a killed process left is found again.
    name = f".{os.path.basename(path)}.{os.geteuid()}"
    deadline = time.monotonic() + _START_WAIT
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=directory)
        fd = -1
        try:
            fd = _enter(directory, name)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Still there, or whoever had it before took it away when it was done.
            if _inode(name, directory) == _inode("", fd):
                break
        except _NotOursError:  # somebody put it there, where others may write: then without a lock
            name = f".{secrets.token_hex(12)}"
        except FileNotFoundError:
            pass
        except BlockingIOError:
            time.sleep(0.01)
        except BaseException:
            _close(fd)
            raise
        _close(fd)
        if time.monotonic() > deadline:
            raise BusyError(
                f"another process of uid {os.geteuid()} has been about to listen at {path} for {_START_WAIT:g} s; is a "
                f"keeper starting? It holds {os.path.dirname(path)}/{name}, also if it was stopped meanwhile"
            )
    try:
        yield fd
    finally:
        with contextlib.suppress(OSError):  # removed, or not empty: of no use to anybody, and no harm
            os.rmdir(name, dir_fd=directory)
        os.close(fd)


class _NotOursError(Exception):
    """The file at a path is no directory of this user alone."""


def _enter(directory: int, name: str) -> int:
    """Open a directory of this user alone."""
    try:
        door = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise _NotOursError from None
        raise
    try:
        found = os.fstat(door)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise _NotOursError
        if found.st_mode & 0o700 != 0o700:  # made under a umask that keeps its own user out
            os.chmod(f"/proc/self/fd/{door}", 0o700)
        return os.open(f"/proc/self/fd/{door}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(door)


def _refused(error: OSError, what: str) -> VramError:
    if error.errno in (errno.EMFILE, errno.ENFILE):  # no matter of the path
        return DriverError(what, error.errno, errno.errorcode[error.errno], descriptor_limit())
    return UsageError(f"{what}: {error}")


def _bind_and_link(
    sock: socket.socket, private: int, path: str, mode: int, gid: int, directory: int
) -> tuple[int, int]:
    """Bind and listen in the private directory, then link the socket to where it belongs."""
    name = os.path.basename(path)
    inner = name if len(os.fsencode(name)) <= _LONGEST else "socket"
    _discard(inner, private)
    try:
        inode = _bind(sock, private, inner, path, mode, gid)
        for _ in range(_TRIES):
            if _put(inner, private, name, directory):
                return inode
            clear_path(path, directory)
        raise BusyError(f"other processes keep listening at {path} and stopping: choose another path")
    finally:
        _discard(inner, private)


def _bind(sock: socket.socket, private: int, inner: str, path: str, mode: int, gid: int) -> tuple[int, int]:
    """Bind and listen in a directory that nobody else can enter, with the right mode before anybody can connect."""
    sock.bind(f"/proc/self/fd/{private}/{inner}")
    try:
        fd = os.open(inner, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=private)
        try:
            found = os.fstat(fd)
            if not stat.S_ISSOCK(found.st_mode):
                raise UsageError(f"cannot listen at {path}: a socket was bound there, and something else is there now")
            _set(fd, mode, gid)
        finally:
            os.close(fd)
        sock.listen(1024)
    except BaseException:
        _discard(inner, private)
        raise
    return found.st_dev, found.st_ino


def _set(fd: int, mode: int, gid: int) -> None:
    """Give a file its group and mode, through a descriptor that nothing else can take the place of."""
    if gid != -1:  # first: before, the mode would let another group in
        os.chown(f"/proc/self/fd/{fd}", -1, gid)
    os.chmod(f"/proc/self/fd/{fd}", mode)


def _put(inner: str, private: int, name: str, directory: int) -> bool:
    """Make the socket appear under its name, listening already; False if something is there."""
    try:
        os.link(inner, name, src_dir_fd=private, dst_dir_fd=directory, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        # A file system without hard links. Of two who start here at once, as different users, one would be lost.
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        if _inode(name, directory) is not None:
            return False
        os.rename(inner, name, src_dir_fd=private, dst_dir_fd=directory)
    return True


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


def clear_path(path: str, directory: int) -> None:
    """Remove a socket that nobody listens on any more, if that is what is there.

    Parameters
    ----------
    directory : int
        Borrowed: a descriptor of the directory that `path` lies in.

    Raises
    ------
    BusyError, UsageError
        If somebody listens there, or it is something else: it is left alone.
    """
    name = os.path.basename(path)
    try:
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return
    try:
        found = os.fstat(fd)
        if not stat.S_ISSOCK(found.st_mode):
            raise UsageError(f"{path} exists and is no socket; choose another path or remove it")
        _probe(path, f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    # The inode of a socket that nobody listens on is dead for good.
    if _inode(name, directory) == (found.st_dev, found.st_ino):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)


def _probe(path: str, through: str) -> None:
    """Raise unless nobody listens on a socket, or only a process that was killed and does not go."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        probe.setblocking(False)
        probe.connect(through)
    except BlockingIOError:  # its queue is full: it lives, if barely
        raise BusyError(f"a process listens at {path} and is too busy to answer") from None
    except OSError as error:
        if error.errno == errno.EPROTOTYPE:
            raise BusyError(f"another kind of server listens at {path}; choose another path") from None
        if error.errno != errno.ECONNREFUSED:
            raise UsageError(f"cannot tell who is at {path}: {error.strerror}; choose another path") from None
    else:
        who = peer_credentials(probe)
        if was_killed(who.pid) and not _is_heard(probe):
            return
        if who.pid == os.getpid():
            raise BusyError(f"this process serves {path} already: close that, or choose another path")
        raise BusyError(
            f"pid {who.pid}, uid {who.uid} serves {path} already; use that, choose another path, or replace a "
            f"keeper with --takeover"
        )
    finally:
        probe.close()


def _is_heard(probe: socket.socket) -> bool:
    """Whether anybody answers, or hangs up: another process may have the socket of one that was killed, and serve."""
    try:
        probe.send(b"?")
    except OSError:
        return True
    poll = select.poll()
    poll.register(probe, select.POLLIN)
    return bool(poll.poll(_ANSWER * 1000))


def _inode(name: str, directory: int) -> tuple[int, int] | None:
    """Which file has a name in a directory; the directory itself for no name, None if there is none."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False) if name else os.fstat(directory)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _discard(name: str, private: int) -> None:
    """Remove a socket of ours from the private directory."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(name, dir_fd=private, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=private)


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
