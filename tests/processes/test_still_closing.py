"""What strangers sent and other threads still have to close: an attach waits for it, a forked child has it as well."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.support.deadlines import until

import vram
from vram import open_files
from vram.errors import WaitTimeoutError
from vram.keeper.client import client
from vram.sharing.channel import may_be_unclosed

pytestmark = pytest.mark.slow  # goes with lanes of closing

OWN = 20  # that a thread may just be closing, of what this process itself has dropped


@pytest.fixture
def waiting() -> Iterator[open_files._Slow]:
    """Some that no thread comes to, as behind one whose file has a million locks."""
    one = open_files._Slow([], "")
    one.turn.acquire()
    open_files.pending[one] = None
    yield one
    open_files.pending.pop(one)


def test_an_attach_waits_while_many_are_still_being_closed(kept: vram.Keeper, waiting: open_files._Slow) -> None:
    """Each attach of a stranger's entry brought more: five of them took all 1,024 that a reader may have."""
    with vram.zeros(10, device="host") as array:
        vram.publish("w", {"w": array})
    here = client(kept.path)
    before, here.grace = here.grace, 0.05
    waiting.sender = kept.path
    try:
        waiting.fds.extend([-1] * (may_be_unclosed() - OWN))
        vram.attach("w").close()
        waiting.fds.extend([-1] * (OWN + 1))
        with pytest.raises(WaitTimeoutError, match=r"\d+ descriptors .* still being closed"):
            vram.attach("w")
        assert here.statistics().leases == 0
    finally:
        here.grace = before
        waiting.fds.clear()
    vram.attach("w").close()


def test_what_others_sent_keeps_nobody_from_attaching(kept: vram.Keeper, waiting: open_files._Slow) -> None:
    """Two peers of channels had made every attach wait: each had sent 253 sockets that linger."""
    with vram.zeros(10, device="host") as array:
        vram.publish("w", {"w": array})
    waiting.sender = "connection 1"
    waiting.fds.extend([-1] * (may_be_unclosed() + OWN))
    vram.attach("w", timeout=0).close()
    waiting.fds.clear()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_attaches_what_it_likes(kept: vram.Keeper, waiting: open_files._Slow) -> None:
    """Nobody there had begun with what its parent was closing, and each attach waited for that in vain."""
    with vram.zeros(10, device="host") as array:
        vram.publish("w", {"w": array})
    waiting.sender = kept.path
    waiting.fds.extend([-1] * (may_be_unclosed() + OWN))
    child = os.fork()
    if not child:
        code = 1
        try:
            vram.attach("w").close()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    waiting.fds.clear()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_closes_what_its_parent_was_closing(waiting: open_files._Slow) -> None:
    """All but the one that a thread is at: its number may be another file's by then."""
    ends = [end for _ in range(2) for end in os.pipe()]
    waiting.fds.extend(ends)
    child = os.fork()
    if not child:
        code = 1
        try:
            more = os.pipe()
            open_files.close_fds(list(more))
            gone = (*more, *ends[:-1])
            until(lambda: not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in gone), what="the end of them")
            code = 0 if os.path.exists(f"/proc/self/fd/{ends[-1]}") else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    waiting.fds.clear()
    for end in ends:
        os.close(end)
