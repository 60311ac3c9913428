"""The threads that make calls while nobody waits: one for each, as long as it has users."""

from __future__ import annotations

import threading

import pytest
from tests.support.deadlines import until

from vram.keeper.background import Worker


def running(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_a_call_is_made_again_at_the_time_that_it_returned() -> None:
    worker, made = Worker("test: again"), [0]

    def act() -> float | None:
        made[0] += 1
        return 0.0 if made[0] < 3 else None

    worker.add(made.append)
    worker.post(act)
    until(lambda: made == [3], what="the third call")
    worker.discard(made.append)
    until(lambda: not running("test: again"), what="the end of the thread")


def test_what_is_due_comes_though_another_call_is_posted_without_end() -> None:
    worker, made = Worker("test: busy"), [0]

    def again() -> None:
        if made[0] < 2:
            worker.post(again)

    def due() -> float | None:
        made[0] += 1
        return 0.0 if made[0] < 2 else None

    worker.add(made.append)
    worker.post(again)
    worker.post(due)
    until(lambda: made == [2], what="the second call")
    worker.discard(made.append)
    until(lambda: not running("test: busy"), what="the end of the thread")


def test_a_user_that_comes_while_the_thread_is_started_has_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a signal handler or a finalizer does: a thread that nobody counts would never end."""
    worker, start = Worker("test: one"), threading.Thread.start

    def and_another(self: threading.Thread) -> None:
        worker.add("another")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", and_another)
    worker.add("first")
    assert running("test: one") == 1
    worker.discard("first")
    worker.discard("another")
    until(lambda: not running("test: one"), what="the end of the thread")


def test_a_thread_that_cannot_be_started_leaves_no_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = Worker("test: none")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(RuntimeError):
            worker.add("first")
    worker.add("second")
    worker.discard("second")
    until(lambda: not running("test: none"), what="the end of the thread")
