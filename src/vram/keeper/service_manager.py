"""systemd's protocols for a service: socket activation and ``sd_notify``.

A keeper takes over a listener (``LISTEN_FDS``) and sends its state to ``NOTIFY_SOCKET``. Both are stable interfaces of
a few environment variables and a datagram: no library is needed.
"""

from __future__ import annotations

import os
import socket
import stat
import time

from ..errors import UsageError
from .bind import Listener, group_id

_FIRST = 3  # SD_LISTEN_FDS_START
_DIGITS = 20  # of a number of microseconds, at most
_SHORTEST = 20_000  # microseconds between signs of life that anybody means
_NAME = "keeper"  # FileDescriptorName= of the listener, where several descriptors are passed
_OTHERS = 0o002  # who may write to a socket may connect
_BEYOND_OWNER = 0o022


class ServiceManager:
    """The service manager that hears how this process is; `address` is ``NOTIFY_SOCKET`` (None: there is none).
    `watchdog` is ``WATCHDOG_USEC``, in microseconds, or 0; `interval` is the seconds between two signs of life, half of
    what the manager waits for, or 0 if it waits for none."""

    def __init__(self, address: str | None, watchdog: int = 0) -> None:
        self._address = None
        if address and address[0] in "/@":  # what else it may be (vsock) has no place for a keeper
            self._address = "\0" + address[1:] if address[0] == "@" else address
        self.interval = watchdog / 2_000_000 if self._address else 0.0

    @classmethod
    def found(cls) -> ServiceManager:
        """Return the manager that the environment names. Its variables stay, for the next keeper."""
        text = os.environ.get("WATCHDOG_USEC", "")
        meant = os.environ.get("WATCHDOG_PID") in (None, str(os.getpid()))
        address = os.environ.get("NOTIFY_SOCKET")
        if not meant or not text.isascii() or not text.isdecimal() or len(text) > _DIGITS:
            return cls(address)
        return cls(address, max(int(text), _SHORTEST) if int(text) else 0)

    def __bool__(self) -> bool:
        return self._address is not None

    def tell(self, **variables: object) -> None:
        """Send assignments, such as ``READY=1``. A manager that does not hear is no reason for a keeper to end."""
        if self._address is None:
            return
        message = "\n".join(f"{name}={value}" for name, value in variables.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(message.encode(), self._address)
        except OSError:
            pass

    def reloading(self) -> None:
        """Say that a restart begins; ``READY=1`` follows from the next keeper."""
        self.tell(RELOADING=1, MONOTONIC_USEC=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)


def given_listener(path: str | None, mode: int | None, group: str | None) -> Listener | None:
    """Return the listener that the service manager opened for this process, or None if it passed nothing.
    Raises UsageError if it is elsewhere than `path`, or lets in more users than `mode` and `group`."""
    fds = _passed()
    if not fds:
        return None
    for fd, _ in fds:
        os.set_inheritable(fd, False)
    if len(fds) > 1:
        fds = [(fd, name) for fd, name in fds if name == _NAME]
    if len(fds) != 1:
        raise UsageError(
            f"several descriptors were passed (LISTEN_FDS), and {len(fds)} of them are named {_NAME!r}: give the "
            f"keeper's socket unit FileDescriptorName={_NAME}"
        )
    ((fd, _),) = fds
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        raise UsageError(f"descriptor {fd} was passed (LISTEN_FDS) and is no socket: {error.strerror}") from None
    try:
        where = _check_kind(sock)
        if path is not None and not _is_same(path, where):
            raise UsageError(
                f"the socket that was passed listens at {where}, not at {path}: say the same path in --socket and in "
                f"ListenSequentialPacket="
            )
        _check_permissions(where, mode, group)
    except BaseException:
        sock.close()
        raise
    return Listener.adopt(where, sock, lent=True)


def leave_to_children() -> None:
    """Have a process that this one starts give the signs of life that are expected of this one."""
    if os.environ.get("WATCHDOG_PID") == str(os.getpid()):
        del os.environ["WATCHDOG_PID"]


def is_same_service(pid: int | None) -> bool:
    """Whether a process is in the control group of this one, which is how systemd knows whose it is."""
    try:
        with open("/proc/self/cgroup", "rb") as ours, open(f"/proc/{pid}/cgroup", "rb") as theirs:
            return ours.read() == theirs.read()
    except OSError:
        return False


def _passed() -> list[tuple[int, str]]:
    """Take the descriptors that are meant for this process out of its environment, with their names."""
    pid, count, names = (os.environ.get(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES"))
    if pid != str(os.getpid()) or not count.isdecimal():  # of whoever started us, and inherited: not for us
        return []
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    called = names.split(":") if names else []
    called += [""] * (int(count) - len(called))
    return [(_FIRST + index, called[index]) for index in range(int(count))]


def _check_kind(sock: socket.socket) -> str:
    """Return the path of a listening socket of packets, or raise."""
    if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET:
        raise UsageError(
            f"the socket that was passed is of {_name(sock.family)} and {_name(sock.type)}, and a keeper's is of "
            f"AF_UNIX and SOCK_SEQPACKET: write ListenSequentialPacket=/path in the socket unit, not ListenStream="
        )
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        raise UsageError(
            "the socket that was passed does not listen: with Accept=yes a unit passes connections; leave that out"
        )
    where = sock.getsockname()
    if not isinstance(where, str) or not where.startswith("/"):
        raise UsageError(
            f"the socket that was passed is at {where!r}, which is no path: everybody of this network namespace could "
            f"connect. Write ListenSequentialPacket=/path in the socket unit"
        )
    return where


def _name(number: object) -> str:
    return str(getattr(number, "name", number))


def _is_same(path: str, where: str) -> bool:
    """Whether both are one place, also where one of them leads there by links (/var/run)."""
    ours, theirs = (
        os.path.join(os.path.realpath(os.path.dirname(one)), os.path.basename(one)) for one in (path, where)
    )
    return ours == theirs


def _check_permissions(where: str, mode: int | None, group: str | None) -> None:
    """Raise if the path lets in more than it should, or is where clients would not trust this process."""
    try:
        found, directory = os.lstat(where), os.stat(os.path.dirname(where))
    except OSError as error:
        raise UsageError(
            f"the socket that was passed was made at {where}, where it is no more ({error.strerror}): restart the "
            f"socket unit, and keep what removes it from doing so (RuntimeDirectoryPreserve=yes in the service)"
        ) from None
    has = stat.S_IMODE(found.st_mode)
    if not stat.S_ISSOCK(found.st_mode):
        raise UsageError(f"the socket that was passed was made at {where}, where something else is: restart its unit")
    if mode is None and has & _OTHERS:
        raise UsageError(
            f"{where} has mode {has:04o}: every user could attach all there is. 0666 is what systemd takes where "
            f"nothing is said: write SocketMode=0600 or 0660 in the socket unit, or start the keeper with --mode "
            f"{has:04o} if that is meant"
        )
    if mode is not None and has & ~mode:
        raise UsageError(
            f"{where} has mode {has:04o}, which lets in more than --mode {mode:04o}: write SocketMode={mode:04o} in "
            f"the socket unit"
        )
    if group is not None and found.st_gid != group_id(group):
        raise UsageError(
            f"{where} is of group {found.st_gid}, not of {group}: write SocketGroup={group} in the socket unit"
        )
    uid = os.geteuid()
    if has & _BEYOND_OWNER and uid and (directory.st_uid != uid or directory.st_mode & _BEYOND_OWNER):
        raise UsageError(
            f"{os.path.dirname(where)} is of uid {directory.st_uid} with mode {stat.S_IMODE(directory.st_mode):04o}: "
            f"other users trust a keeper of uid {uid} only in a directory that is its own and that nobody else can "
            f"write to. Write RuntimeDirectory=vram and RuntimeDirectoryPreserve=yes in the service unit, or chown it"
        )
