"""Peers of a channel that say without end what nobody asked for."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from tests.support.deadlines import SOON

import vram
from vram.errors import WaitTimeoutError
from vram.sharing.channel import MAX_FDS, Channel
from vram.transports import SocketExchange

# Sends one message without end, or numbers in order, each with so many bytes.
FLOOD = """
import itertools, socket, sys
sock, what = socket.socket(fileno=int(sys.argv[1])), sys.stdin.buffer.read()
padding = int(sys.argv[2])
try:
    for number in itertools.count():
        if padding < 0:
            sock.send(what)
        else:
            sock.send(b"\\x92\\xa1x\\x92\\xce" + number.to_bytes(4, "big") + b"\\xc5"
                      + padding.to_bytes(2, "big") + bytes(padding))
except OSError:
    pass
"""


@contextlib.contextmanager
def flooded(what: bytes = b"", padding: int = -1) -> Iterator[Channel]:
    """An end whose peer is another process that sends without end and reads nothing."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    flood = subprocess.Popen(
        [sys.executable, "-S", "-c", FLOOD, str(there.fileno()), str(padding)],
        stdin=subprocess.PIPE, pass_fds=[there.fileno()],
    )  # fmt: skip
    there.close()
    assert flood.stdin is not None
    flood.stdin.write(what)
    flood.stdin.close()
    try:
        with Channel(here) as end:
            end._poll(select.POLLIN, SOON)
            assert end.peek(1)
            yield end
    finally:
        flood.kill()
        flood.wait(SOON)


def ended(act: Callable[[], object], channel: contextlib.AbstractContextManager[object]) -> object:
    """Return what a call returned or raised; where it does not end it is ended, and this fails."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(act())
        except vram.errors.VramError as error:
            found.append(error.with_traceback(None))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON / 4)
    is_ended = not thread.is_alive()
    if not is_ended:
        channel.close()  # type: ignore[attr-defined]
        thread.join(SOON)
    assert is_ended, "it did not end"
    return found[0]


def unread(end: Channel | SocketExchange) -> int:
    count = 0
    with contextlib.suppress(WaitTimeoutError):
        while True:
            end.recv(timeout=0)
            count += 1
    return count


@contextlib.contextmanager
def long_array() -> Iterator[vram.Array]:
    """An array whose descriptors go in two messages: the second waits until the first is acknowledged."""
    with vram.zeros(1, "uint8", device="host", capacity=(MAX_FDS + 2) * (2 << 20)) as array:
        for count in range(2, MAX_FDS + 2):
            array.resize((count - 1) * (2 << 20) + 1)
        assert len(array.region.layout) > MAX_FDS
        yield array
