"""Arrays in pools, queues, pipes and managers whose other end has ended, or that cannot be had: nobody hangs (I11)."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.managers import SyncManager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import SOON, until
from tests.support.samples import some

import vram
from vram.errors import ClosedError, DriverError, LeakWarning, NotFoundError, PeerGoneError
from vram.handover import pickling

pytestmark = [
    pytest.mark.usefixtures("hand_over"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
METHODS = ("spawn", "fork", "forkserver")


@pytest.fixture(params=some(METHODS, 2))
def context(request: pytest.FixtureRequest) -> Any:
    return multiprocessing.get_context(request.param)


def make(count: int) -> vram.Array:
    array = vram.zeros((count,), "f4", device="host")
    array.numpy()[:] = 2
    return array


def attached(name: str) -> vram.Array:
    array = vram.attach(name)["a"]
    gc.collect()
    return array


def total(array: vram.Array) -> float:
    return float(array.numpy().sum())


def dumps(array: vram.Array) -> bytes:
    return bytes(ForkingPickler.dumps(array))


def put(there: Any, count: int) -> None:
    (there.put if hasattr(there, "put") else there.send)(make(count))


def put_and_close(there: Any) -> None:
    array = make(3)
    array.close()
    there.put(array)


def put_and_flush(there: Any) -> None:
    there.put(make(3))
    there.close()
    there.join_thread()


def end_of(process: Any) -> None:
    process.join(SOON)
    assert process.exitcode == 0
    process.close()


def test_workers_of_one_task_end_after_their_arrays_were_taken(context: Any) -> None:
    heard: list[Any] = []
    with context.Pool(2, maxtasksperchild=1) as pool:
        assert [total(one) for one in pool.map_async(make, [1, 2, 3], chunksize=1).get(SOON)] == [2, 4, 6]
        if context.get_start_method() == "fork":  # quick to start
            assert total(pool.apply(make, (5,))) == 10
            assert [total(one) for one in pool.imap(make, [1, 2])] == [2, 4]
            assert sorted(total(one) for one in pool.imap_unordered(make, [1, 2])) == [2, 4]
        pool.apply_async(make, (7,), callback=heard.append).get(SOON)
        pool.close()
        pool.join()
    assert [total(one) for one in heard] == [14]


@pytest.mark.parametrize("method", some(["spawn", "forkserver"], 1))  # Python refuses max_tasks_per_child with fork
def test_an_executor_of_one_task_a_child_returns_arrays(method: str) -> None:
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context, max_tasks_per_child=1) as pool:
        assert [total(one) for one in pool.map(make, [1, 2, 3], timeout=SOON)] == [2, 4, 6]


def test_an_argument_that_is_gone_is_an_error_of_its_task(context: Any) -> None:
    heard: list[BaseException] = []
    with vram.private_keeper():
        vram.publish("x", {"a": np.ones(10, "f4")})
        with pytest.warns(LeakWarning):  # the lease is dropped with its object, and the array keeps its memory
            array = attached("x")
        with context.Pool(1) as pool:
            assert pool.apply(total, (array,)) == 10
            vram.remove("x")
            with pytest.raises(NotFoundError, match="'x' version 1"):
                pool.apply_async(total, (array,), error_callback=heard.append).get(SOON)
            assert isinstance(heard[0], NotFoundError)
            assert pool.apply(abs, (-1,)) == 1  # the pool works on
            pool.close()
            pool.join()
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            with pytest.raises(NotFoundError, match="'x' version 1"):
                executor.submit(total, array).result(SOON)
            assert executor.submit(abs, -1).result(SOON) == 1
        array.close()


@pytest.mark.parametrize("kind", ["Queue", "SimpleQueue", "Pipe"])
def test_a_producer_that_ends_waits_until_its_array_is_taken(context: Any, kind: str) -> None:
    if kind == "Pipe":
        ours, theirs = context.Pipe()
    else:
        ours = theirs = getattr(context, kind)()
    process = context.Process(target=put, args=(theirs, 5))
    process.start()
    array = ours.recv() if kind == "Pipe" else ours.get()
    assert total(array) == 10
    end_of(process)
    for end in {ours, theirs}:
        end.close()
    if kind == "Queue":
        ours.join_thread()


def test_a_manager_keeps_the_array_of_a_worker_that_ended(context: Any) -> None:
    manager = SyncManager(ctx=context)
    manager.start()
    try:
        queue = manager.Queue()
        process = context.Process(target=put, args=(queue, 5))
        process.start()
        end_of(process)
        array = queue.get(timeout=SOON)
        assert total(array) == 10
        array.close()
    finally:
        manager.shutdown()


def test_an_array_that_nobody_took_in_time_raises_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork, which inherits the patience of this process."""
    monkeypatch.setattr(pickling, "LINGER_SECONDS", 0.1)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=put, args=(queue, 5))
    process.start()
    end_of(process)
    lost = queue.get(timeout=SOON)
    assert (lost.shape, lost.dtype, lost.nbytes, lost.is_closed) == ((5,), np.dtype("f4"), 20, False)
    assert "lost: the process that sent this array is gone" in repr(lost) + lost._repr_html_()
    with pytest.raises(PeerGoneError), vram.private_keeper():
        vram.publish("x", {"a": lost})
    uses: list[Any] = [total, lambda a: a.region, lambda a: a[0], lambda a: a.resize(2), lambda a: a.copy(), dumps]
    for use in uses:
        with pytest.raises(PeerGoneError, match=r"^the process that sent .* publish arrays that must outlive"):
            use(lost)
    lost.close()
    assert lost.is_closed
    for use in uses:
        with pytest.raises(ClosedError):
            use(lost)
    queue.close()
    queue.join_thread()


def test_a_queue_that_its_producer_flushed_is_waited_for() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=put_and_flush, args=(queue,))
    process.start()
    assert queue._reader.poll(SOON)
    process.join(1.0)
    assert process.exitcode is None
    assert total(queue.get(timeout=SOON)) == 6
    end_of(process)
    queue.close()
    queue.join_thread()


def test_what_a_feeder_thread_cannot_pickle_raises_where_it_is_used(context: Any) -> None:
    queue = context.Queue()
    process = context.Process(target=put_and_close, args=(queue,))
    process.start()
    array = queue.get(timeout=SOON)
    with pytest.raises(ClosedError, match=rf"^process {process.pid}, which was to send .*: .* was closed"):
        array.numpy()
    end_of(process)
    queue.close()
    queue.join_thread()


def put_without_descriptors(queue: Any) -> None:
    first, second = make(1), make(2)
    queue.put(first)
    until(lambda: queue._buffer is not None and not queue._buffer)
    ForkingPickler.dumps(first)  # all that this takes is loaded now
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), 4096))
    with contextlib.suppress(OSError):
        while True:
            os.open("/dev/null", os.O_RDONLY)
    queue.put(second)


def test_a_sender_without_descriptors_says_so_and_not_the_receiver() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=put_without_descriptors, args=(queue,))
    process.start()
    assert total(queue.get(timeout=SOON)) == 2
    lost = queue.get(timeout=SOON)
    with pytest.raises(DriverError, match=rf"^process {process.pid}, which was to send .*: .*EMFILE.*RLIMIT_NOFILE"):
        lost.numpy()
    end_of(process)
    queue.close()
    queue.join_thread()
