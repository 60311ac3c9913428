"""Ctrl-C at every point of the adapter of kvcached (I12): no page on another's memory, none lost, no lock held."""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.interrupts import Point, chosen, interrupt, points
from tests.support.samples import nths

from vram import driver, lifetime
from vram.engines import kvcached, kvcached_tensors
from vram.spec import HOST

PAGE = 2 << 20
PAGES = 6
SOON = 10.0


@pytest.fixture(autouse=True)
def tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no torch, numpy's arrays over the same memory stand for its tensors."""
    if importlib.util.find_spec("torch") is None:
        monkeypatch.setattr(kvcached_tensors._Shown, "tensor", lambda self, device: np.asarray(self))


class Engine:
    """Tensors of two layers, and their pages."""

    def __init__(self, *, memory: bool = True, ahead: bool = False) -> None:
        kvcached.shutdown_kvcached()
        self.tensors: list[Any] = []
        if memory:
            kvcached.init_kvcached("cpu", PAGE, False)
            self.tensors = kvcached.create_kv_tensors(2 * PAGES * PAGE, 1, "cpu", 1)
        self.pages = kvcached.PageAllocator(
            1, PAGES * PAGE, PAGE, contiguous_layout=False, enable_page_prealloc=ahead,
            ipc_name=f"vram-test-{os.getpid()}",
        )  # fmt: skip
        if not memory:
            self.pages.set_use_worker_ipc(True)
            self.pages.set_broadcast_map_callback(lambda world, offsets: None)
            self.pages.set_broadcast_unmap_callback(lambda world, offsets: None)
        self.pages._most = 1
        self.taken = [self.pages.alloc_page().page_id for _ in range(3)]
        self.got: list[int] = []

    def check(self, *, interrupted_free: bool = False) -> None:
        """What holds after an interrupt, whatever it was in."""
        said: list[bool] = []

        def look() -> None:
            for lock in (self.pages._lock, kvcached_tensors._state.lock):
                if lock.acquire(timeout=SOON):
                    said.append(True)
                    lock.release()

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(3 * SOON)
        assert said == [True, True], "a lock is held"
        state = self.pages.get_page_state()
        mine = self.taken + self.got
        assert state["inuse_pages"] in ({0, len(mine)} if interrupted_free else {len(mine)}), (state, mine)
        if not state["inuse_pages"]:
            mine.clear()
        free = state["free_pages"]
        more = [self.pages.alloc_page().page_id for _ in range(free)]
        assert sorted(mine + more) == list(range(state["total_pages"]))
        for tensor in self.tensors:
            half = len(tensor) // 2
            for start in (0, half):
                for page in mine + more:
                    tensor[start + page * PAGE] = page + 1
                assert [int(tensor[start + page * PAGE]) for page in mine + more] == [p + 1 for p in mine + more]


ACTS: dict[str, Callable[[Engine], object]] = {
    "alloc": lambda engine: engine.got.append(engine.pages.alloc_page().page_id),
    "free": lambda engine: engine.pages.free_pages(engine.taken),
    "state": lambda engine: engine.pages.get_page_state(),
    "limit": lambda engine: engine.pages.check_and_get_resize_target(PAGES * PAGE),
    "grow": lambda engine: engine.pages.resize((PAGES + 2) * PAGE),
    "shrink": lambda engine: engine.pages.resize((PAGES - 2) * PAGE),
}


@pytest.mark.parametrize("act", ACTS)
def test_an_interrupt_leaves_each_page_in_one_place_and_no_lock_held_i12(act: str) -> None:
    for nth in nths():
        engine = Engine(memory=False)
        hit = interrupt(nth, lambda: ACTS[act](engine)).came  # noqa: B023  (called here)
        if not hit:
            break
        engine.check(interrupted_free=act == "free")
    assert nth > 3
    kvcached.shutdown_kvcached()


def test_an_interrupt_of_a_trim_loses_no_page_i12() -> None:
    for nth in nths():
        engine = Engine(memory=False)
        engine.pages._most = 3
        engine.pages.free_pages(engine.taken)
        engine.taken = []
        if not interrupt(nth, engine.pages.trim).came:
            break
        engine.check()
    assert nth > 3


def seen(act: str) -> list[Point]:
    engine = Engine()
    return points(lambda: ACTS[act](engine))


def once(act: str, nth: int) -> None:
    engine = Engine()
    interrupt(nth, lambda: ACTS[act](engine))
    engine.check(interrupted_free=act == "free")


@pytest.mark.parametrize("act", ["alloc", "free"])
def test_an_interrupt_puts_no_two_pages_on_one_memory_i12(act: str) -> None:
    before = driver.get(HOST).live().handles
    found = seen(act)
    assert len(found) > 100
    for nth in chosen(found, 80, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was made and never handed out is dropped, as anything may be
            once(act, nth)
            gc.collect(0)
    kvcached.shutdown_kvcached()
    gc.collect()
    assert not lifetime.stuck()
    assert driver.get(HOST).live().handles == before
