"""What listens in the place of a keeper and lies."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from tests.support.deadlines import SOON
from tests.support.memfds import memfds
from tests.support.places import short_directory

from vram.errors import PeerGoneError, WaitTimeoutError
from vram.keeper import messages as m
from vram.open_files import close_fds
from vram.sharing.channel import Channel

SEGMENT = m.SegmentRow(4096, 1, 0)


ENTRY = m.Entry("w", 1, 0, False, [SEGMENT], ["host"], b"", False, {})


@contextlib.contextmanager
def impostor(answer: Callable[[Channel], None], *, times: int = 1) -> Iterator[str]:
    """Something that listens and talks to each of the next connections as it likes; yields its path."""
    wrong: list[BaseException] = []

    def serve() -> None:
        try:
            for _ in range(times):
                with Channel(listener.accept()[0]) as channel:
                    with contextlib.suppress(PeerGoneError):
                        answer(channel)
        except BaseException as error:
            wrong.append(error)

    with short_directory() as place, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{place}/k")
        listener.listen()
        listener.settimeout(SOON)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"{place}/k"
        finally:
            thread.join(SOON)
        assert wrong == []


def says(*words: bytes | tuple[bytes, int]) -> Callable[[Channel], None]:
    """Answer the greeting, then each message with the next of `words`, some with so many descriptors; then hang up."""

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(1)), timeout=SOON)
        with memfds(1) as fds:
            for word in words:
                close_fds(channel.recv(timeout=SOON)[1])
                payload, count = (word, 0) if isinstance(word, bytes) else word
                channel.send(payload, fds * count, timeout=SOON)
            with contextlib.suppress(WaitTimeoutError):
                while True:
                    close_fds(channel.recv(timeout=0.2)[1])

    return answer
