"""A client of a keeper that says whatever a test has it say."""

from __future__ import annotations

import array
import contextlib
import socket
from collections.abc import Iterator, Sequence

from tests.support.deadlines import SOON

from vram.keeper import messages as m
from vram.keeper.private import KeeperProcess
from vram.open_files import close_fds
from vram.sharing.channel import MAX_FDS, MAX_MESSAGE

SEGMENT = m.SegmentRow(4096, 1, 0)


class Peer:
    """A raw connection that sends what it likes."""

    def __init__(self, path: str, *, greet: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(SOON)
        self.sock.connect(path)
        self.greeted = greet
        self.is_refused = False
        if greet:
            assert isinstance(self.ask(m.encode(m.Hello(m.PROTOCOL, "hostile"))), m.Welcome)

    def send(self, payload: bytes, fds: list[int] | None = None) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.sock.sendmsg([payload], rights, socket.MSG_NOSIGNAL)
        except PermissionError:  # from Linux 6.16 on the kernel lets no descriptors through before the greeting
            if self.greeted:
                raise
            self.is_refused = True
            self.sock.sendmsg([payload], [], socket.MSG_NOSIGNAL)

    def hear(self) -> m.Reply | None:
        """Return what the keeper says next; None if it has closed."""
        try:
            payload, fds, _, _ = socket.recv_fds(self.sock, MAX_MESSAGE, MAX_FDS)
        except ConnectionResetError:
            return None
        close_fds(fds)
        return m.decode_reply(payload) if payload else None

    def ask(self, payload: bytes, fds: list[int] | None = None) -> m.Reply | None:
        self.send(payload, fds)
        return self.hear()

    def is_cut_off(self) -> bool:
        """Whether the keeper closes, after an error or without."""
        try:
            while (reply := self.hear()) is not None:
                if not isinstance(reply, m.Error):
                    return False
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.sock.close()


@contextlib.contextmanager
def running(path: str, *options: str, launcher: Sequence[str] = ()) -> Iterator[KeeperProcess]:
    process = KeeperProcess(path, options, launcher=launcher)
    try:
        yield process
        assert (process.stop(), process.said()) == (0, "")
    finally:
        process.kill()
