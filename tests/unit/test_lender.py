"""The thread that lends: what it was asked for too late is not done, and takes nothing from anybody."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.support.deadlines import SOON

import vram
from vram.errors import WaitTimeoutError
from vram.keeper import lend_server
from vram.lifetime import wait_for


def test_i9_descriptors_of_a_call_that_nobody_waits_for_are_closed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the thread's when the caller gives up: it closes them with its end, and does not use them before."""
    server = lend_server.LendServer(str(tmp_path / "lent"))
    server.start()
    go_on, busy = threading.Event(), threading.Event()

    def block() -> None:
        busy.set()
        go_on.wait(SOON)

    try:
        server.keeper.loop.call_soon_threadsafe(block)
        assert busy.wait(SOON)
        monkeypatch.setattr(lend_server, "REQUEST", 0.05)
        with vram.zeros(4, "uint8", device="host") as array:
            (allocation,), _ = array.region.segments(0, 4)
            with pytest.raises(WaitTimeoutError, match="did not answer"):
                server.lend(
                    [lend_server.Segment(allocation.nbytes)], [allocation.export()], b"", None,
                    nbytes=4, writable=True, meta={}, keeps=None,
                )  # fmt: skip
            allocation.close()
        ours = [os.open(os.devnull, os.O_RDONLY) for _ in range(16)]  # numbers that are free
        monkeypatch.setattr(lend_server, "REQUEST", 30.0)
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
    server = lend_server.LendServer(str(tmp_path / "lent"))
    server.start()
    found: list[object] = []
    asked = threading.Event()

    def ask() -> None:
        found.append(server.holders())
        asked.set()

    server.keeper.loop.call_soon_threadsafe(ask)
    assert asked.wait(SOON)
    assert found == [[]]
    server.end(when_idle=False)
    server.join()


def test_an_interrupted_call_is_an_interrupt_and_done_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what was asked for was done meanwhile."""
    server = lend_server.LendServer(str(tmp_path / "lent"))
    server.start()

    def interrupted(event: threading.Event, timeout: float | None = None) -> bool:
        wait_for(event, timeout)
        raise KeyboardInterrupt

    monkeypatch.setattr(lend_server, "wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        server.holders()
    monkeypatch.undo()
    assert server.holders() == []
    server.end(when_idle=False)
    server.join()
