"""A file system in user space whose files can be opened and answer nothing else, ever: ``with unanswered_files()``.

The daemon is a process of its own, which speaks just enough of the protocol of /dev/fuse (<linux/fuse.h>). Whatever is
stuck in one of its files is freed when it dies, with ENOTCONN; it is killed after a time in any case, so that a test
that fails does not hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator

DEADLINE = 40.0  # seconds until the daemon is killed, and nothing is stuck any more
_LOOKUP, _FORGET, _GETATTR, _OPEN, _RELEASE, _INIT, _BATCH_FORGET = 1, 2, 3, 14, 18, 26, 42
_HEADER = struct.Struct("<IIQQIIIHH")  # fuse_in_header
_MODES = {b"file": stat.S_IFREG, b"nvidia0": stat.S_IFREG, b"nvidiactl": stat.S_IFIFO}
_DETACH = 2  # MNT_DETACH


def _attributes(ino: int, mode: int) -> bytes:
    return struct.pack("<6Q10I", ino, 4 << 20, 8192, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


def _answer(opcode: int, node: int, body: bytes) -> tuple[int, bytes] | None:
    """Return the error number and the body of an answer; None for no answer at all."""
    if opcode == _INIT:
        return 0, struct.pack("<IIIIHHIIHHII", 7, 31, 0, 0, 12, 9, 4096, 1, 0, 0, 0, 0) + bytes(24)
    if opcode == _LOOKUP:
        mode = _MODES.get(name := body.rstrip(b"\0"))
        if mode is None:
            return -2, b""
        ino = 2 + list(_MODES).index(name)
        return 0, struct.pack("<QQQQII", ino, 0, 3600, 0, 0, 0) + _attributes(ino, mode | 0o666)
    if opcode == _GETATTR and node == 1:
        return 0, struct.pack("<QII", 3600, 0, 0) + _attributes(1, stat.S_IFDIR | 0o755)
    if opcode == _OPEN:
        return 0, struct.pack("<QII", 0, 0, 0)
    if opcode == _RELEASE:
        return 0, b""
    return None


def _serve(place: str) -> None:
    fd = os.open("/dev/fuse", os.O_RDWR)
    library = ctypes.CDLL(None, use_errno=True)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if library.mount(b"unanswered", place.encode(), b"fuse", 0, options):
        print(f"mount: {os.strerror(ctypes.get_errno())}", flush=True)
        return
    print("ready", flush=True)
    while True:
        request = os.read(fd, 1 << 20)
        _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
        answer = None if opcode in (_FORGET, _BATCH_FORGET) else _answer(opcode, node, request[_HEADER.size :])
        if answer is not None:
            error, body = answer
            os.write(fd, struct.pack("<IiQ", 16 + len(body), error, unique) + body)


def missing() -> str | None:
    """Return why there can be no such file system here; None if there can."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK) or os.geteuid() != 0:
        return "needs root and /dev/fuse, to mount a file system in user space"
    with contextlib.suppress(Refused), unanswered_files():
        return None
    return "needs root and /dev/fuse, to mount a file system in user space"


class Refused(Exception):
    """The kernel mounts nothing for us."""


class Unanswered:
    """Files of the file system, opened here."""

    def __init__(self, place: str, daemon: subprocess.Popen[str]) -> None:
        self.place = place
        self.daemon = daemon
        self._fds: list[int] = []
        self._is_dead = False  # from before the kill, which frees who waits before the process is gone

    def open(self, name: str = "file") -> int:
        """Open one, which is closed once the daemon is dead."""
        fd = os.open(f"{self.place}/{name}", os.O_RDWR)
        self._fds.append(fd)
        return fd

    def die(self) -> None:
        """Kill the daemon, by which all who wait for it are freed."""
        self._is_dead = True
        self.daemon.send_signal(signal.SIGKILL)
        self.daemon.wait()

    @property
    def is_served(self) -> bool:
        """Whether the daemon lives, and whatever asks it hangs."""
        return not self._is_dead and self.daemon.poll() is None

    def _end(self) -> None:
        self.die()
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)


@contextlib.contextmanager
def unanswered_files() -> Iterator[Unanswered]:
    """Mount the file system, for at most DEADLINE seconds."""
    with tempfile.TemporaryDirectory(prefix="vram-fuse-") as place:
        daemon = subprocess.Popen([sys.executable, __file__, place], stdout=subprocess.PIPE, text=True)
        files = Unanswered(place, daemon)
        timer = threading.Timer(DEADLINE, files.die)
        try:
            assert daemon.stdout is not None
            if daemon.stdout.readline() != "ready\n":
                raise Refused
            timer.start()
            yield files
        finally:
            timer.cancel()
            files._end()
            assert daemon.stdout is not None
            daemon.stdout.close()
            ctypes.CDLL(None).umount2(place.encode(), _DETACH)
            if timer.ident is not None:
                timer.join()


if __name__ == "__main__":
    _serve(sys.argv[1])
