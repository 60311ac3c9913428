"""The link of a keeper to its guardian."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON, until

from vram.keeper.guarded import GuardianLink

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a guardian needs Linux")


@pytest.fixture
def link() -> Iterator[GuardianLink]:
    """A link to a guardian of this process, which asks for no keeper."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = GuardianLink(ours, ["/bin/true"])
    theirs.close()  # as if its first guardian had died
    yield made
    made.end()
    made.sock.close()
    for pid in filter(None, [made._child]):
        os.waitpid(pid, 0)
    if made._guardian >= 0:
        os.close(made._guardian)


def held_by(link: GuardianLink) -> dict[int, int]:
    found = link.everything()
    for fd in found.values():
        os.close(fd)
    return found


def test_a_guardian_that_cannot_be_replaced_now_is_replaced_later(
    link: GuardianLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the interpreter is gone, say, or no process is to be had: what is kept then is told to the next one."""
    watches: list[bool] = []
    link.watch = watches.append
    read, write = os.pipe()
    try:
        with monkeypatch.context() as gone:
            gone.setattr(sys, "executable", "/no/python")
            with pytest.raises(FileNotFoundError):
                link.keep([read])
        assert (watches, link.is_there) == ([False], False)
        number = link.keep([write])
        assert (watches, link.is_there) == ([False, False, True], True)
        assert held_by(link).keys() == {number - 1, number}
    finally:
        os.close(read)
        os.close(write)


def test_a_guardian_that_stands_still_is_waited_for_by_the_keeper_that_goes_on(
    link: GuardianLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has what is kept: to give up would be to lose it."""
    monkeypatch.setattr("vram.keeper.guarded.GUARDIAN", 1)
    link.replace()
    os.kill(link.pid, signal.SIGSTOP)
    until(lambda: " T " in Path(f"/proc/{link.pid}/stat").read_text(), what="a guardian that is stopped")
    found: list[dict[int, int]] = []
    asking = threading.Thread(target=lambda: found.append(held_by(link)))
    asking.start()
    asking.join(1.5)
    assert asking.is_alive()
    os.kill(link.pid, signal.SIGCONT)
    asking.join(SOON)
    assert found == [{}]
