"""The verbs that are awaited do what the others do, and whoever is cancelled has left nothing behind (I4)."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import later
from tests.support.places import short_directory

import vram
from vram import aio
from vram.entries import followed
from vram.errors import (
    ClosedError,
    MismatchError,
    NotFoundError,
    PeerGoneError,
    UsageError,
    WaitTimeoutError,
)
from vram.keeper import background
from vram.keeper.client import close_client
from vram.keeper.private import KeeperProcess

with_keeper = pytest.mark.usefixtures("kept")


def publish(value: int) -> int:
    return vram.publish("n", {"w": np.full(8, value)}).version


def first(array: Any) -> int:
    return int(array.numpy()[0])


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(main, SOON)

    return asyncio.run(bounded())


async def soon(condition: Callable[[], object]) -> None:
    """Wait for something, without stopping the loop."""
    while not condition():
        await asyncio.sleep(0.001)


@with_keeper
def test_what_is_there_is_attached_at_once() -> None:
    publish(1)

    async def main() -> None:
        with await aio.attach("n") as lease:
            assert first(lease["w"]) == 1
        with pytest.raises(NotFoundError):
            await aio.attach("m")
        with pytest.raises(WaitTimeoutError):
            await aio.attach("m", timeout=0.01)
        with pytest.raises(MismatchError):
            await aio.attach("n", owner=os.geteuid() + 1)
        with pytest.raises(PeerGoneError):
            await aio.attach("n", keeper="/nowhere/keeper.sock")
        with pytest.raises(UsageError):
            await aio.attach("n", access="w")

    run(main())


@with_keeper
def test_many_wait_in_one_thread_and_hear_of_it_at_once() -> None:
    async def main() -> list[int]:
        calls = [asyncio.create_task(aio.attach("n", timeout=None)) for _ in range(20)]
        await soon(lambda: vram.statistics().waiting == 20)
        assert sum(thread.name == "vram: keeper" for thread in threading.enumerate()) == 1
        publish(3)
        found = []
        for call in calls:
            with await call as lease:
                found.append(first(lease["w"]))
        return found

    assert run(main()) == [3] * 20


@with_keeper
def test_a_call_of_another_thread_may_read_the_answer() -> None:
    """Both use one connection, and whoever reads does so for all."""

    async def main() -> None:
        call = asyncio.create_task(aio.attach("n", timeout=None))
        await soon(lambda: vram.statistics().waiting == 1)
        over = threading.Event()

        def ask() -> int:
            count = 0
            while not over.is_set():
                vram.statistics()
                count += 1
            return count

        threads = [later(ask) for _ in range(3)]
        publish(1)
        lease = await call
        assert first(lease["w"]) == 1
        lease.close()
        over.set()
        for thread, came in threads:
            thread.join(SOON)
            assert came[0] > 0

    run(main())


def test_a_keeper_is_waited_for() -> None:
    with short_directory() as place:
        path = f"{place}/k"

        async def main() -> None:
            call = asyncio.create_task(aio.attach("n", timeout=SOON, keeper=path))
            await asyncio.sleep(0)
            keeper = await asyncio.to_thread(KeeperProcess, path)
            try:
                await asyncio.to_thread(vram.publish, "n", {"w": np.full(8, 4)}, keeper=path)
                with await call as lease:
                    assert first(lease["w"]) == 4
                gone = asyncio.create_task(aio.attach("m", timeout=None, keeper=path))
                await soon(lambda: vram.statistics(keeper=path).waiting == 1)
            finally:
                keeper.kill()
            with pytest.raises(PeerGoneError):
                await gone

        run(main())
        close_client(path)


@with_keeper
@pytest.mark.parametrize("what", ["there", "awaited", "follow"])
def test_cancelling_at_any_moment_gives_everything_back(what: str) -> None:
    """At each turn of the loop that the call takes, and between its answer and who waits for it."""
    publish(1)

    async def once(turns: int) -> bool:
        if what == "there":
            call: asyncio.Task[Any] = asyncio.create_task(aio.attach("n"))
        elif what == "awaited":
            call = asyncio.create_task(aio.attach("m", timeout=None))
        else:
            call = asyncio.create_task(aio.follow("n"))
        for turn in range(turns):
            await asyncio.sleep(0.0005 * (turn > 3))
            if call.done():
                break
        call.cancel()
        try:
            (await call).close()
        except asyncio.CancelledError:
            return True
        return False

    cancelled = [run(once(turns)) for turns in range(30)]
    assert cancelled[0]
    assert what != "awaited" or all(cancelled)
    until(lambda: not vram.statistics().leases, what="the return of every lease")
    until(lambda: not vram.statistics().waiting, what="the end of every wait")


@with_keeper
def test_what_came_in_the_moment_of_the_cancel_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    publish(1)
    calls: list[asyncio.Task[vram.Lease]] = []
    mapped = followed.Wanted.mapped

    def and_cancel(*given: Any, **options: Any) -> vram.Lease:
        made = mapped(*given, **options)
        calls[0].get_loop().call_soon_threadsafe(calls[0].cancel)
        return made

    monkeypatch.setattr(followed.Wanted, "mapped", and_cancel)

    async def main() -> None:
        calls.append(asyncio.create_task(aio.attach("n")))
        with pytest.raises(asyncio.CancelledError):
            await calls[0]

    run(main())
    until(lambda: not vram.statistics().leases, what="the return of the lease")


@with_keeper
def test_a_loop_that_ends_leaves_nothing() -> None:
    publish(1)
    loop = asyncio.new_event_loop()
    call = loop.create_task(aio.attach("m", timeout=None))
    loop.run_until_complete(asyncio.sleep(0))
    call.cancel()
    loop.run_until_complete(asyncio.gather(call, return_exceptions=True))
    loop.close()
    until(lambda: not vram.statistics().waiting, what="the end of the wait")
    until(lambda: not background.following._users, what="the end of the call")


@with_keeper
@pytest.mark.filterwarnings("ignore:.*was destroyed but it is pending")
def test_a_loop_that_is_closed_in_the_middle_of_a_call_keeps_no_lease() -> None:
    loop = asyncio.new_event_loop()
    call = loop.create_task(aio.attach("m", timeout=None))
    call._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.run_until_complete(asyncio.sleep(0))
    until(lambda: vram.statistics().waiting == 1, what="the wait")
    loop.close()
    del call
    gc.collect()
    vram.publish("m", {"w": np.arange(4)})
    until(lambda: not vram.statistics().waiting, what="the end of the wait")
    until(lambda: not vram.statistics().leases, what="the return of the lease")
    until(lambda: not background.following._users, what="the end of the call")


@with_keeper
def test_versions_are_awaited() -> None:
    publish(1)

    async def main() -> list[int]:
        seen: list[int] = []
        async with asyncio.timeout(SOON):
            with await aio.follow("n") as model:
                async for lease in model:
                    seen.append(first(lease["w"]))
                    if seen[-1] == 5:
                        break
                    await asyncio.to_thread(publish, seen[-1] + 1)
                assert not model.bells
        return seen

    assert run(main()) == [1, 2, 3, 4, 5]


@with_keeper
def test_waiting_for_a_version_ends_when_it_is_cancelled_or_closed() -> None:
    publish(1)

    async def main() -> None:
        with vram.follow("n") as model:

            async def versions(seen: list[int]) -> None:
                async for lease in model:
                    seen.append(first(lease["w"]))

            seen: list[int] = []
            one, other = asyncio.create_task(versions([])), asyncio.create_task(versions(seen))
            await soon(lambda: len(model.bells) == 2)
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one
            assert len(model.bells) == 1
            await asyncio.to_thread(publish, 2)
            await soon(lambda: seen == [1, 2] and len(model.bells) == 1)
            model.close()
            await other
            assert seen == [1, 2]
            with pytest.raises(ClosedError):
                aiter(model)

    run(main())


def test_what_is_lent_is_borrowed() -> None:
    with short_directory() as place:

        async def main() -> None:
            call = asyncio.create_task(aio.borrow(f"{place}/l", timeout=SOON))
            await asyncio.sleep(0)
            with vram.lend(vram.zeros(8, device="host"), at=f"{place}/l"):
                with await call as lease:
                    assert lease.array.shape == (8,)
                late = asyncio.create_task(aio.borrow(f"{place}/none", timeout=None))
                await asyncio.sleep(0.01)
                late.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await late
            with pytest.raises(WaitTimeoutError):
                await aio.borrow(f"{place}/none", timeout=0.01)

        run(main())
        close_client(f"{place}/l")


def test_what_is_sent_is_received() -> None:
    async def main() -> None:
        ours, theirs = vram.ArrayChannel.pair()
        with ours, theirs:
            with pytest.raises(WaitTimeoutError):
                await aio.recv(theirs, timeout=0.01)
            call = asyncio.create_task(aio.recv(theirs))
            await asyncio.sleep(0)
            ours.send({"a": vram.zeros(4, device="host"), "b": 1}, timeout=SOON)
            got = await call
            assert (got["b"], got["a"].shape) == (1, (4,))
            cancelled = asyncio.create_task(aio.recv(theirs))
            await asyncio.sleep(0)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            two = [asyncio.create_task(aio.recv(theirs)) for _ in range(2)]
            await asyncio.sleep(0)
            ours.send(5, timeout=SOON)
            ours.send(6, timeout=SOON)
            assert sorted(await asyncio.gather(*two)) == [5, 6]
            end = asyncio.create_task(aio.recv(theirs))
            await asyncio.sleep(0)
            ours.close()
            with pytest.raises(PeerGoneError):
                await end

    run(main())


def test_nobody_loads_asyncio_who_does_not_use_it() -> None:
    program = """
import sys, numpy as np, vram
with vram.private_keeper() as k:
    vram.publish("n", {"w": np.zeros(4)}, keeper=k)
    with vram.follow("n", keeper=k) as model:
        model["w"], next(iter(model))
assert "asyncio" not in sys.modules, "loaded"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=SOON)


# -- rings -----------------------------------------------------------------------------------------------------------
@with_keeper
def test_frames_come_to_a_loop_while_others_go_on_and_end_with_the_ring() -> None:
    ring = vram.Ring.create("camera", shape=4, dtype="uint8", slots=4)
    came: list[tuple[int, int]] = []
    ticks = 0

    async def consume(name: str) -> int:
        with await aio.attach_ring(name, timeout=SOON) as frames:
            count = 0
            async for frame in frames:
                came.append((frame.sequence, int(frame.array[0])))
                count += 1
            with pytest.raises(PeerGoneError):
                frames.next(timeout=0)
            return count

    async def main() -> list[int]:
        nonlocal ticks
        tasks = [asyncio.create_task(consume("camera")) for _ in range(2)]
        for number in range(1, 9):
            await soon(lambda: vram.statistics().leases == 2)
            ring.put(np.full(4, number, np.uint8), timeout=0)
            await soon(lambda number=number: came.count((number, number)) == 2)
            ticks += 1
        ring.close()
        return await asyncio.gather(*tasks)

    assert run(main()) == [8, 8]
    assert ticks == 8


@with_keeper
def test_waiting_for_a_frame_ends_when_it_is_cancelled_and_loses_none() -> None:
    with vram.Ring.create("camera", shape=4, dtype="uint8", slots=2) as ring:

        async def main() -> list[int]:
            with await aio.attach_ring("camera") as frames:
                for _ in range(3):
                    waiting = asyncio.ensure_future(anext(aiter(frames)))
                    await soon(lambda: any(one.name == WAITS for one in threading.enumerate()))
                    waiting.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await waiting
                    await soon(lambda: not any(one.name == WAITS for one in threading.enumerate()))
                ring.put(np.full(4, 1, np.uint8))
                ring.put(np.full(4, 2, np.uint8))
                return [(await anext(aiter(frames))).sequence for _ in range(2)]

        assert run(main()) == [1, 2]


@with_keeper
def test_a_loop_hears_that_the_producer_is_gone() -> None:
    producer = (
        "import sys, numpy as np, vram; ring = vram.Ring.create('camera', shape=4, dtype='uint8'); "
        "ring.put(np.ones(4, np.uint8)); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", producer], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()

        async def main() -> list[int]:
            came: list[int] = []
            with await aio.attach_ring("camera") as frames:
                coming = aiter(frames)
                came.append((await anext(coming)).sequence)
                process.kill()
                with pytest.raises(PeerGoneError, match="is gone, and all its frames were read"):
                    await anext(coming)
                with pytest.raises(NotFoundError):
                    await aio.attach_ring("other")
            return came

        assert run(main()) == [1]


WAITS = "vram: waiting for a frame"
