"""The thread that lends: what it was asked for too late is not done, and takes nothing from anybody."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.support.deadlines import SOON, until

import vram
from vram.entries.lend import Lending
from vram.errors import WaitTimeoutError
from vram.keeper import lend_server
from vram.keeper.client import close_client
from vram.lifetime import Gate, Owned


def test_i9_descriptors_of_a_call_that_nobody_waits_for_are_closed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the thread's when the caller gives up: it closes them with its end, and does not use them before."""
    wanted = lend_server.Wanted()
    server = lend_server.LendServer(str(tmp_path / "lent"), wanted)
    server.start()
    go_on, busy = threading.Event(), threading.Event()

    def block() -> None:
        busy.set()
        go_on.wait(SOON)

    try:
        server.loop.call_soon_threadsafe(block)
        assert busy.wait(SOON)
        monkeypatch.setattr(lend_server, "_ANSWER", 0.05)
        with vram.zeros(4, "uint8", device="host") as array:
            (allocation,), _ = array.region.segments(0, 4)
            with pytest.raises(WaitTimeoutError, match="did not answer"):
                server.lend(
                    [lend_server.Segment(allocation.nbytes)], [allocation.export()], b"", None,
                    nbytes=4, writable=True, meta={}, keeps=None,
                )  # fmt: skip
            allocation.close()
        ours = [os.open(os.devnull, os.O_RDONLY) for _ in range(16)]  # numbers that are free
        monkeypatch.setattr(lend_server, "_ANSWER", 30.0)
        go_on.set()
        assert server.holders() == []  # behind what came too late
        assert server._version is None
    finally:
        go_on.set()
        server.end(when_idle=False)
        server.join()
    for fd in ours:
        os.fstat(fd)
        os.close(fd)


def test_the_thread_may_be_asked_by_itself(tmp_path: Path) -> None:
    """By the finalizer of an owner that it lets go of, say: it would wait for its own answer."""
    wanted = lend_server.Wanted()
    server = lend_server.LendServer(str(tmp_path / "lent"), wanted)
    server.start()
    found: list[object] = []
    asked = threading.Event()

    def ask() -> None:
        found.append(server.holders())
        asked.set()

    server.loop.call_soon_threadsafe(ask)
    assert asked.wait(SOON)
    assert found == [[]]
    server.end(when_idle=False)
    server.join()


def test_an_interrupted_call_is_an_interrupt_and_done_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what was asked for was done meanwhile."""
    wanted = lend_server.Wanted()
    server = lend_server.LendServer(str(tmp_path / "lent"), wanted)
    server.start()
    asked = 0

    wait = Gate.wait

    def interrupted(gate: Gate, timeout: float | None = None) -> bool:
        nonlocal asked
        asked += 1
        is_open = wait(gate, timeout)
        if asked == 1:
            raise KeyboardInterrupt
        return is_open

    monkeypatch.setattr(Gate, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.holders()
    monkeypatch.undo()
    assert server.holders() == []
    server.end(when_idle=False)
    server.join()


def test_a_lender_that_nobody_wants_ends_without_being_told_i12(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    wanted = lend_server.Wanted()
    server = lend_server.LendServer(str(tmp_path / "lent"), wanted)
    server.start()
    assert os.listdir(tmp_path) == ["lent"]
    del wanted
    until(lambda: not lenders(), what="the end of the thread")
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


@pytest.mark.parametrize("when", ["begun", "closed"])
def test_a_lender_ends_where_every_step_to_its_end_is_interrupted_i12(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Any number of interrupts; whoever lends at the path next waits for what nobody could wait for."""
    path = str(tmp_path / "lent")

    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    with vram.zeros(4, "uint8", device="host") as array:
        vram.lend(array, at=path).close()
        descriptors = len(os.listdir("/proc/self/fd"))
        kept = []
        for _ in range(20):
            lending = vram.lend(array, at=path) if when == "closed" else None
            with monkeypatch.context() as patch:
                patch.setattr(lend_server.LendServer, "end", interrupted)
                patch.setattr(lend_server.LendServer, "join", interrupted)
                patch.setattr(Owned, "close", interrupted)
                if lending is None:
                    patch.setattr(Lending, "__init__", interrupted)
                with pytest.raises(KeyboardInterrupt) as caught:
                    vram.lend(array, at=path) if lending is None else lending.close()
                kept.append(caught)  # with all frames that it went through
            vram.lend(array, at=path).close()
            if lending is not None:
                lending.close()  # again: there is nothing left to end
        until(lambda: not lenders(), what="the end of every thread")
        assert os.listdir(tmp_path) == []
        assert len(os.listdir("/proc/self/fd")) == descriptors


def lenders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lender"]


def test_words_of_a_lender_are_not_those_of_a_keeper(tmp_path: Path) -> None:
    path = str(tmp_path / "lent")
    with vram.asarray(b"abc", device="host") as array:
        lending = vram.lend(array, at=path)
        with vram.borrow(path) as lease:
            with pytest.raises(vram.errors.AccessDeniedError, match="may only be read: borrow it with"):
                vram.borrow(path, access="rw")
            with pytest.raises(vram.errors.AccessDeniedError, match=r"is a lender, not a keeper.*Lending.revoke"):
                vram.revoke("lent", keeper=path)
            lending.close()
            for use in (lambda: lease.is_stale(), lambda: lease.is_revoked(), lease.upgrade, lease.fileno):
                with pytest.raises(vram.errors.PeerGoneError, match=r"the lender at .* is gone.*Borrow again") as gone:
                    use()
                assert "vram keep" not in str(gone.value)
            with vram.lend(array, at=path):
                assert (lease.is_stale(), lease.is_revoked()) == (True, False)
                with lease.upgrade() as again:
                    assert not again.is_stale()
            assert lease.array.numpy().tobytes() == b"abc"
    close_client(path)
