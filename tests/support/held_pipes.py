"""A named pipe that is called like a GPU's device, and that its maker holds: ``with held_pipe()``.

Whoever may have a user namespace may mount what it likes at /dev of a mount namespace of its own; the kernel calls the
files there what they are called there. The pipe is held by a process of its own, of another user where the test is
root's: it splices from the pipe to a socket that nobody reads, and has it locked meanwhile. Whatever waits for the
pipe is freed when that process dies; it is killed after a time in any case, so that a test that fails does not hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

__all__ = ["DEADLINE", "HeldPipe", "Refused", "held_pipe"]

DEADLINE = 40.0  # seconds until the process is killed, and nothing waits for the pipe any more
_OTHER = 4242  # any user but root
_REFUSED = 77  # the exit status of what may have no such namespace
_NAME = "/dev/nvidia0"
_MODES = {"rw": os.O_RDWR, "r": os.O_RDONLY | os.O_NONBLOCK, "w": os.O_WRONLY}
_NEW_NAMESPACES = 0x10020000  # CLONE_NEWUSER | CLONE_NEWNS
_SET_DUMPABLE = 4  # PR_SET_DUMPABLE


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _make() -> bool:
    """Make the pipe in namespaces of this process's own; return whether it may."""
    library = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a namespace that has no other user: its root will do
            os.setgroups([])
            os.setresgid(_OTHER, _OTHER, _OTHER)
            os.setresuid(_OTHER, _OTHER, _OTHER)
        library.prctl(_SET_DUMPABLE, 1)  # or this process may not write to its own /proc/self
    user, group = os.geteuid(), os.getegid()
    if library.unshare(_NEW_NAMESPACES):
        return False
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {user} 1")
    _write("/proc/self/gid_map", f"0 {group} 1")
    if library.mount(b"held", b"/dev", b"tmpfs", 0, None):
        return False
    os.mkfifo(_NAME)
    return True


def _hold(control: socket.socket) -> None:
    """Send the pipe, and hold it for as long as the other end of the socket is open and reads nothing."""
    fds = [os.open(_NAME, mode) for mode in _MODES.values()]
    socket.send_fds(control, [b"."], fds)
    control.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            control.send(bytes(4096))
    control.setblocking(True)
    os.write(fds[0], bytes(4096))
    with contextlib.suppress(ConnectionError):
        os.splice(fds[0], control.fileno(), 4096)


class Refused(Exception):
    """The kernel lets us have no such namespaces."""


class HeldPipe:
    """A pipe of another process: descriptors of it, by how they were opened ("rw", "r", "w")."""

    def __init__(self, holder: subprocess.Popen[bytes], fds: list[int]) -> None:
        self.holder = holder
        self.fds = dict(zip(_MODES, fds, strict=True))
        self._is_dead = False  # from before the kill, which frees who waits before the process is gone

    def die(self) -> None:
        """Kill the process that holds it, by which all who wait for the pipe are freed."""
        self._is_dead = True
        self.holder.send_signal(signal.SIGKILL)
        self.holder.wait()

    @property
    def is_held(self) -> bool:
        """Whether the process lives, and whatever waits for the pipe hangs."""
        return not self._is_dead and self.holder.poll() is None

    def _wait_until_held(self) -> None:
        """From when it has sent them on, it sleeps nowhere but in its splice."""
        end = time.monotonic() + DEADLINE
        while self.is_held and time.monotonic() < end:
            with open(f"/proc/{self.holder.pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "S":
                    return
            time.sleep(0.005)
        raise AssertionError("nobody holds the pipe")


@contextlib.contextmanager
def held_pipe() -> Iterator[HeldPipe]:
    """Have such a pipe, held for at most DEADLINE seconds."""
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE)
    with ours:
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            holder = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        fds: list[int] = []
        try:
            _, fds, _, _ = socket.recv_fds(ours, 1, len(_MODES))
            if not fds:
                assert holder.wait() == _REFUSED, "the process that makes the pipe failed"
                raise Refused
            pipe = HeldPipe(holder, fds)
            timer = threading.Timer(DEADLINE, pipe.die)
            timer.start()
            try:
                pipe._wait_until_held()
                yield pipe
            finally:
                timer.cancel()
                timer.join()
        finally:
            holder.kill()
            holder.wait()
            for fd in fds:
                os.close(fd)


if __name__ == "__main__":
    if not _make():
        sys.exit(_REFUSED)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _hold(connection)
