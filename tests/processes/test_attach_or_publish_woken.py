"""Of many, one brings back what is parked, and nobody loads it; unless it is gone meanwhile (I13)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tests.support.children import child
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import later
from tests.support.park_children import GPU, NAME, act, check, is_parked, publish

import vram
from vram.entries import park as parking
from vram.errors import AsleepError, NotFoundError, OutOfMemoryError, UsageError, WaitTimeoutError
from vram.keeper.client import KeeperClient

pytestmark = [pytest.mark.usefixtures("kept"), pytest.mark.standin]
MINE = {"config": "mine"}


def refuse() -> Mapping[str, Any]:
    raise AssertionError("it was loaded")


def woken(**options: Any) -> vram.Lease:
    return vram.attach_or_publish(NAME, options.pop("load", refuse), wake=True, timeout=SOON, **options)


def test_what_is_parked_is_brought_back_and_not_loaded() -> None:
    publish(GPU).close()
    number = vram.entry(NAME).version
    vram.park(NAME)
    with pytest.raises(AsleepError, match="wake=True"):
        vram.attach_or_publish(NAME, refuse, timeout=SOON)
    assert is_parked()
    with woken(expect={"k": "v"}) as lease:
        check(lease)
        assert lease.version == number
        with woken() as again:  # it is awake
            check(again)
    assert not is_parked()
    for options in ({"wake": 1}, {"growing": "yes"}):
        with pytest.raises(UsageError, match="must be True or False"):
            vram.attach_or_publish(NAME, refuse, **options)


def test_what_is_not_there_is_loaded_and_who_comes_later_wakes_it() -> None:
    def load() -> Mapping[str, Any]:
        return {"w": vram.asarray(np.arange(5), device=GPU)}

    with woken(load=load) as lease:
        assert lease["w"].to_host().tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError, match="was loaded"):
        woken(expect=MINE)  # what is there is another one
    vram.park(NAME)
    with woken() as lease:
        assert lease["w"].to_host().tolist() == [0, 1, 2, 3, 4]


def test_who_comes_while_another_wakes_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(GPU).close()
    vram.park(NAME)
    with child(act, "wake", 0, SOON, "_copy") as other:
        assert other.said()[2] == "_copy"
        with pytest.raises(WaitTimeoutError, match="was not woken in time"):
            vram.attach_or_publish(NAME, refuse, wake=True, timeout=0.05)
        thread, came = later(woken)
        until(lambda: vram.statistics().waiting == 1, what="a waiter")
        assert not came
        other.tell()
        thread.join(SOON)
        with came[0] as lease:
            check(lease)
        assert other.said()[0] == "woke"
        other.tell()


@pytest.mark.parametrize("what", ["removed", "replaced"])
def test_what_is_gone_while_it_is_woken_is_loaded_or_attached(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    publish(GPU).close()
    vram.park(NAME)
    real = parking._move

    def move(client: KeeperClient, *given: Any) -> None:
        monkeypatch.setattr(parking, "_move", real)
        with KeeperClient.connect(os.environ["VRAM_KEEPER"]) as other:
            other.remove(NAME)
            if what == "replaced":
                vram.publish(NAME, {"w": np.ones(3)})
        real(client, *given)

    monkeypatch.setattr(parking, "_move", move)
    loaded: list[int] = []

    def load() -> Mapping[str, Any]:
        loaded.append(1)
        return {"w": np.zeros(3)}

    with woken(load=load) as lease:
        assert lease["w"].numpy().tolist() == ([0.0] * 3 if what == "removed" else [1.0] * 3)
    assert len(loaded) == (what == "removed")


def test_what_is_removed_while_another_process_wakes_it_is_loaded_without_that_one() -> None:
    """That one waits for it to be published again, before it lets go of its right to wake it."""
    publish(GPU).close()
    vram.park(NAME)

    def load() -> Mapping[str, Any]:
        return {"a": np.arange(1024), "b": np.arange(1)}

    with child(act, "wake", 0, SOON, "_copy") as other:
        assert other.said()[2] == "_copy"
        thread, came = later(lambda: woken(load=load))
        until(lambda: vram.statistics().waiting == 1, what="a waiter")
        vram.remove(NAME)
        thread.join(SOON)
        assert not thread.is_alive()
        with came[0] as lease:
            assert lease["a"].numpy().tolist() == list(range(1024))
        other.kill()


def test_without_room_on_the_gpu_it_stays_parked_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(GPU).close()
    vram.park(NAME)

    def none(*given: Any) -> None:
        raise OutOfMemoryError("there is no room", 2, "CUDA_ERROR_OUT_OF_MEMORY")

    with monkeypatch.context() as patched:
        patched.setattr(parking, "_move", none)
        with pytest.raises(OutOfMemoryError):
            woken()
    assert is_parked()
    with woken() as lease:
        check(lease)


def test_what_is_loaded_or_attached_may_follow() -> None:
    vectors = vram.zeros((2, 4), device="host", capacity=1_000_000)

    def load() -> Mapping[str, Any]:
        return {"x": vectors}

    with vectors:
        mine = vram.attach_or_publish("vectors", load, writable=True, growing=True)
        theirs = vram.attach_or_publish("vectors", refuse, growing=True)
        fixed = vram.attach_or_publish("vectors", refuse)
        with mine, theirs, fixed:
            vectors.resize(900_000)
            vram.publish("vectors", {"x": vectors}, writable=True)
            for lease in (mine, theirs):
                assert lease.refresh() == ("x",)
                assert len(lease["x"]) == 900_000
            with pytest.raises(vram.errors.CapacityError):
                fixed.refresh()
    vram.remove("vectors")
    with pytest.raises(NotFoundError):
        vram.attach("vectors", growing=True)
