"""The holder: it hears the keeper whatever it closes."""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

from vram.keeper import holder as module
from vram.keeper.holder import Holder
from vram.testing.keeper import SOON

if TYPE_CHECKING:
    import pytest


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


def test_a_file_that_closes_slowly_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Os()
    monkeypatch.setattr(module, "os", slow)
    holder = Holder([])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thread = threading.Thread(target=holder.hold, args=(theirs,))
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
        holder._close(8)
        holder.stop_closing()
        theirs.close()
    closers = [one for one in threading.enumerate() if "_close_all" in one.name]
    for one in closers:
        one.join(SOON)
    assert len(slow.closing) == 2
