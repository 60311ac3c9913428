"""The guardian: it hears the keeper whatever it closes."""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
import threading
import time
from typing import Any

import pytest
from tests.support.deadlines import SOON

from vram.keeper import guardian as module
from vram.keeper.guardian import Guardian


class _Os:
    """The module, but for how long a close takes."""

    def __init__(self) -> None:
        self.may_close = threading.Event()
        self.closing: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def close(self, fd: int) -> None:
        self.closing.append(fd)
        assert self.may_close.wait(SOON)
        os.close(fd)


class _Spawning:
    """The module, but no process can be made for a while."""

    def __init__(self, fails: int, code: int) -> None:
        self.fails, self.code = fails, code

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def posix_spawn(self, *_: object) -> int:
        self.fails -= 1
        if self.fails >= 0:
            raise OSError(self.code, os.strerror(self.code))
        return 4242


def stop_closing(guardian: Guardian) -> None:
    """Wait until all is closed, and no thread of it is left."""
    end = time.monotonic() + SOON
    while guardian._threads:
        assert time.monotonic() < end
        time.sleep(0.001)
    while guardian._spare:
        module.os.close(guardian._spare.pop())  # as a test has put it there


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM])
def test_a_keeper_that_cannot_be_started_now_is_started_later(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(module, "os", _Spawning(3, code))
    monkeypatch.setattr(module, "_REST", 0.0)
    guardian = Guardian(["keeper"])
    try:
        with pytest.raises(OSError):
            guardian.start().close()  # nothing is held, and whoever started it hears why it does not begin
        guardian.kept[1] = 0
        guardian.start().close()
        assert guardian.keeper == 4242
    finally:
        guardian.kept.clear()
        stop_closing(guardian)


def test_a_file_that_closes_slowly_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Os()
    monkeypatch.setattr(module, "os", slow)
    guardian = Guardian([])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=guardian.hold, args=(theirs,))
    thread.start()
    try:
        ours.settimeout(SOON)
        with open(os.devnull, "rb") as first, open(os.devnull, "rb") as second:
            rights = array.array("i", [first.fileno(), second.fileno()])
            ours.sendmsg([b"K" + struct.pack("<Q", 7)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        ours.send(b"D" + struct.pack("<QQ", 7, 9))
        ours.send(b"G" + struct.pack("<Q", 0))
        numbers, fds, _, _ = socket.recv_fds(ours, 100, 10)
        assert struct.unpack("<Q", numbers) == (8,)
        assert len(fds) == 1
        os.close(fds[0])
        assert not slow.may_close.is_set()
    finally:
        slow.may_close.set()
        ours.close()
        thread.join(SOON)
        guardian._close(8)
        stop_closing(guardian)
        theirs.close()
    assert len(slow.closing) == 4  # and what was kept back to start another keeper with
