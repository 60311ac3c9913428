"""The pool for torch without a GPU: what torch calls, called as torch calls it, and every torch that will not do.

Where torch itself would be asked there is something like it (``torch_like``); what the real one does is seen in
``tests/gpu/test_torch_pool.py``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.deadlines import SOON
from tests.support.threads import race
from tests.support.torch_like import OutOfMemoryError, TorchLike, as_torch, read, write  # noqa: F401

import standin
import vram
from vram import driver as drivers
from vram.arrays import torch_allocator, torch_pool
from vram.errors import AsleepError, ForkedError, UnsupportedError, UsageError
from vram.memory.sleep import sleep_regions
from vram.spec import Location

GPU = Location("cuda", 0)
MIB = 1 << 20
on_gpu = pytest.mark.standin


@pytest.fixture
def pool(torch: TorchLike) -> vram.TorchPool:
    return vram.TorchPool("cuda:0")


@pytest.fixture
def kept() -> Iterator[vram.Keeper]:
    """A keeper, this process's default."""
    with vram.private_keeper() as keeper:
        yield keeper


def tag_at(address: int) -> str:
    return next(one.tag for one in torch_pool._segments.copy() if one.views.region.address == address)


class Tensor:
    """Bytes on a GPU, as torch shows its tensors."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3, "strides": None,
        }  # fmt: skip


# -- a torch that will not do -----------------------------------------------------------------------------------
def test_without_torch_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match=r"a pool for torch needs torch; have no such package"):
        torch_allocator.check_torch(torch_allocator.import_torch())


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: its views are not tested"
)
def test_a_torch_built_without_cuda_is_told() -> None:
    import torch as real

    if real.version.cuda is not None:
        pytest.fail("CI's torch is one without CUDA")
    with pytest.raises(UnsupportedError, match=r"_cuda_customAllocator.*built without CUDA"):
        torch_allocator.check_torch(real)


def test_settings_that_somebody_else_made_are_kept(torch: TorchLike) -> None:
    before = torch.settings
    torch_allocator.check_torch(torch)
    assert torch.settings == before + ",release_lock_on_cudamalloc:True"
    torch_allocator.release_lock(torch)
    assert torch.settings == before + ",release_lock_on_cudamalloc:True"
    for given, wanted in {
        "": "release_lock_on_cudamalloc:True",
        "release_lock_on_cudamalloc:False, max_split_size_mb:64,": (
            "release_lock_on_cudamalloc:False,max_split_size_mb:64,release_lock_on_cudamalloc:True"
        ),
    }.items():
        torch.settings = given
        torch_allocator.release_lock(torch)
        assert torch.settings == wanted


# -- what torch calls -------------------------------------------------------------------------------------------
@on_gpu
def test_segments_sleep_and_wake_with_their_bytes(torch: TorchLike, pool: vram.TorchPool) -> None:
    with pool.use("weights"):
        weights = torch.empty(4 * MIB)
    with pool.use("kv"):
        kv = torch.empty(2 * MIB)
    write(weights, b"weights")
    write(kv, b"kv")
    assert repr(pool) == "<TorchPool cuda:0, 6 MiB awake, 0 B asleep>"
    for _ in range(2):
        slept = pool.sleep(offload=["weights"], discard=["kv"])
        assert (slept.freed, slept.nbytes) == (6 * MIB, 4 * MIB)
        assert pool.usage() == {"weights": torch_pool.Usage(0, 4 * MIB), "kv": torch_pool.Usage(0, 2 * MIB)}
        with pytest.raises(AsleepError, match=r"'kv'.* is asleep: wake it first"), pool.use("kv"):
            pass
        assert pool.wake(["weights"]).nbytes == 4 * MIB
        assert pool.wake(["kv"], fill=7).discarded == 2 * MIB
        assert (read(weights, 7), read(kv, 4)) == (b"weights", b"\7\7\7\7")
        assert pool.usage() == {"weights": torch_pool.Usage(4 * MIB, 0), "kv": torch_pool.Usage(2 * MIB, 0)}
    assert pool.wake().nbytes == 0


@on_gpu
def test_to_a_directory_and_back(torch: TorchLike, pool: vram.TorchPool, tmp_path: Path) -> None:
    with pool.use("weights"):
        address = torch.empty(2 * MIB)
    write(address, b"bytes")
    pool.sleep(offload=["weights"], to=tmp_path)
    pool.wake()
    assert read(address, 5) == b"bytes"
    with pytest.raises(UsageError, match="is no directory"):
        pool.sleep(offload=["weights"], to=tmp_path / "missing")
    assert read(address, 5) == b"bytes"


@on_gpu
def test_only_what_torch_has_given_back_is_unmapped(torch: TorchLike, pool: vram.TorchPool) -> None:
    with pool.use("kv"):
        kept, dropped = torch.empty(2 * MIB), torch.empty(2 * MIB)
        assert pool.trim() == 0
    write(kept, b"kept")
    torch.drop(dropped)
    assert pool.trim() == 0  # torch has it in its cache
    pool.close()
    assert pool.usage() == {"kv": torch_pool.Usage(2 * MIB, 0)}
    assert read(kept, 4) == b"kept"
    torch.drop(kept)
    pool.close()
    assert pool.usage() == {}
    with pool.use("kv"):
        again = torch.empty(2 * MIB)
    assert pool.usage() == {"kv": torch_pool.Usage(2 * MIB, 0)}
    assert again


@on_gpu
def test_what_is_on_its_way_to_torch_is_left_alone(torch: TorchLike, pool: vram.TorchPool) -> None:
    """Another thread looks while torch has asked for a segment and has not noted it yet."""
    with pool.use("kv"):
        before = torch.empty(2 * MIB)
        made = torch.pools[-1].allocate(2 * MIB, 0, None)  # and torch does nothing with it yet
        torch.frees += 1
        looking = threading.Thread(target=pool.trim)
        looking.start()
        looking.join(SOON)
        assert not looking.is_alive()
        assert pool.usage() == {"kv": torch_pool.Usage(4 * MIB, 0)}
        torch.pools[-1].taken[made] = 2 * MIB
    assert pool.trim() == 0
    assert sorted(found["address"] for found in torch.snapshot()) == sorted((before, made))


@on_gpu
def test_nothing_is_unmapped_while_a_graph_is_captured(torch: TorchLike, pool: vram.TorchPool) -> None:
    with pool.use("kv"):
        torch.drop(torch.empty(2 * MIB))
    torch.capturing = True
    pool.close()
    assert torch.snapshot() != []  # nor is torch's cache emptied
    torch.empty_cache()
    assert torch.snapshot() == []
    assert pool.trim() == 0
    assert pool.usage() == {"kv": torch_pool.Usage(2 * MIB, 0)}
    torch.capturing = False
    assert pool.trim() == 2 * MIB
    assert pool.usage() == {}


@on_gpu
def test_out_of_memory_is_torchs_own_and_says_why(torch: TorchLike, pool: vram.TorchPool) -> None:
    total = drivers.get(GPU).device_info(GPU).total_bytes
    with pytest.raises(OutOfMemoryError) as caught, pool.use("kv"):
        torch.empty(2 * total)
    assert any(note.startswith("vram: OutOfMemoryError: ") for note in caught.value.__notes__)

    def fail_later() -> None:
        with pool.use("kv"):
            with pytest.raises(OutOfMemoryError):
                torch.empty(2 * total)
            assert torch.empty(2 * MIB)
            raise LookupError

    with pytest.raises(LookupError) as other:
        fail_later()
    assert not hasattr(other.value, "__notes__")  # which is not about that


@on_gpu
def test_what_torch_gave_back_is_unmapped_before_memory_is_short(torch: TorchLike, pool: vram.TorchPool) -> None:
    with pool.use("kv"):
        dropped = torch.empty(2 * MIB)
    with pool.use("weights"):
        torch.drop(dropped)
        torch.pools[0].cached.clear()
        torch.frees += 1
        with standin.Standin().failing("cuMemCreate", nth=1, code=2):
            assert torch.empty(2 * MIB)
    assert pool.usage() == {"weights": torch_pool.Usage(2 * MIB, 0)}


@on_gpu
def test_blocks_nest_and_each_thread_has_its_own(torch: TorchLike, pool: vram.TorchPool) -> None:
    made: list[tuple[str, int]] = []

    def work() -> None:
        with pool.use("weights"):
            made.append(("weights", torch.empty(2 * MIB)))

    with pool.use("weights"):
        made.append(("weights", torch.empty(2 * MIB)))
        with pool.use("weights"):
            made.append(("weights", torch.empty(2 * MIB)))
        with pool.use("kv"):
            torch.drop(torch.empty(4 * MIB))
            with pool.use("weights"):
                made.append(("weights", torch.empty(2 * MIB)))  # not from the cache of the block around it
            race(*[work] * 3)
        made.append(("weights", torch.empty(2 * MIB)))
    assert {address: tag_at(address) for _, address in made} == {at: tag for tag, at in made}
    assert pool.usage()["weights"].awake == 7 * 2 * MIB
    assert not torch.entered


@on_gpu
def test_a_tensor_is_known_by_its_storage(torch: TorchLike, pool: vram.TorchPool) -> None:
    with pool.use("kv"):
        address = torch.empty(4 * MIB)

    def tensor(at: int, nbytes: int) -> Any:
        storage = SimpleNamespace(data_ptr=lambda: at, nbytes=lambda: nbytes)
        return SimpleNamespace(untyped_storage=lambda: storage, shape=(nbytes,), device="cuda:0")

    assert pool.tag_of(tensor(address, 4 * MIB)) == "kv"
    assert pool.tag_of(tensor(address + MIB, MIB)) == "kv"
    for wrong in (tensor(address, 4 * MIB + 1), tensor(address - 1, 2)):
        with pytest.raises(UsageError, match="not of <TorchPool"):
            pool.tag_of(wrong)
    other = vram.TorchPool("cuda:0")
    with pytest.raises(UsageError, match="not of <TorchPool"):
        other.tag_of(tensor(address, 1))


@on_gpu
def test_wrong_calls_are_told(torch: TorchLike, pool: vram.TorchPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool.use("weights"):
        torch.empty(2 * MIB)
    for wanted, call in {
        "has no memory called \\['kv'\\]; it has \\['weights'\\]": lambda: pool.sleep(offload=["kv"]),
        "has no memory called": lambda: pool.wake(["kv"]),
        "at once": lambda: pool.sleep(offload=["weights"], discard=["weights"]),
        "list of names": lambda: pool.sleep("weights"),
        "fill is a byte": lambda: pool.wake(fill=256),
        "a tag is a name": lambda: pool.use("").__enter__(),
        "'refuse' or 'unmap'": lambda: pool.sleep(["weights"], shared="both"),  # type: ignore[arg-type]
        "on a GPU": lambda: vram.TorchPool("host"),
    }.items():
        with pytest.raises(UsageError, match=wanted):
            call()
    assert pool.usage() == {"weights": torch_pool.Usage(2 * MIB, 0)}
    monkeypatch.setattr(pool, "_process", os.getpid() + 1)
    with pytest.raises(ForkedError, match="spawn"):
        pool.close()


def test_an_interrupt_never_comes_back_as_an_address(torch: TorchLike, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts that arrive when torch is about to call give it the address that it asked for, or 0.

    A function that is interrupted at its first instruction returns, through ctypes, what was on the stack: most of the
    time the address of the segment before.
    """
    main, stop = threading.get_ident(), threading.Event()
    monkeypatch.setattr(torch_pool, "_allocate", lambda nbytes, graph: nbytes * 2)
    serving = torch_pool._serve(torch)
    allocate = torch._make(serving.allocator).allocate
    raising = [False]

    def interrupt() -> None:
        while not stop.is_set():
            signal.pthread_kill(main, signal.SIGALRM)
            sum(range(500))  # with Python's lock, which the main thread waits for when it comes back from torch

    def take(*_: object) -> None:
        if raising[0]:
            raise KeyboardInterrupt

    wrong: tuple[int, int] | None = None
    before, interval = signal.signal(signal.SIGALRM, take), sys.getswitchinterval()
    thread = threading.Thread(target=interrupt)
    sys.setswitchinterval(1e-5)
    deadline, asked, interrupted = time.monotonic() + SOON, 0, 0
    try:
        thread.start()
        while interrupted < 50 and time.monotonic() < deadline and wrong is None:
            asked += 1
            try:
                raising[0] = True
                answer = allocate(asked, 0, None)
                raising[0] = False
            except KeyboardInterrupt:  # on the way there or back, which is Python's in this test
                raising[0] = False
                continue
            interrupted += answer is None
            wrong = None if answer in (None, 2 * asked) else (asked, answer)
    finally:
        raising[0] = False
        stop.set()
        thread.join(SOON)
        signal.signal(signal.SIGALRM, before)
        sys.setswitchinterval(interval)
        torch_pool._here.failed = None
    assert wrong is None
    assert interrupted >= 50
    serving.check()


@on_gpu
def test_an_interrupt_in_an_allocation_ends_the_block(
    torch: TorchLike, pool: vram.TorchPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch_pool.Region, "create", create)
    with pytest.raises(KeyboardInterrupt) as caught, pool.use("kv"):
        torch.empty(2 * MIB)
    assert isinstance(caught.value.__cause__, OutOfMemoryError)


def test_what_torch_frees_with_is_native(torch: TorchLike) -> None:
    """So that it needs no lock of Python's: torch calls it with its own lock held, whatever the settings are."""
    handed: list[tuple[int, int]] = []
    torch._C._cuda_customAllocator = lambda *addresses: handed.append(addresses)
    torch_pool._serve(torch)
    assert handed[0][1] == ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value


# -- cuBLAS's workspaces ----------------------------------------------------------------------------------------
def takes(pool: vram.TorchPool, address: int) -> bool:
    """Whether a segment of a pool begins there."""
    return any(one.views.region.address == address for one in pool._of(None))


@on_gpu
def test_a_workspace_in_memory_that_a_block_made_is_let_go_of_at_its_end(
    torch: TorchLike, pool: vram.TorchPool
) -> None:
    """So that what is captured next on that stream, by whomever, holds none in memory of the pool."""
    with pool.use("weights"):
        assert takes(pool, torch.multiply())
    assert torch.workspaces == {}
    assert not takes(pool, torch.multiply())


@on_gpu
def test_a_workspace_that_graphs_of_torchs_may_hold_is_left_where_it_is(torch: TorchLike, pool: vram.TorchPool) -> None:
    """Whatever torch puts there next would be written to by a graph that holds it."""
    held = torch.multiply()
    with pool.use("weights"):
        pass
    assert list(torch.workspaces.values()) == [held]
    with pool.use("kv"):
        torch.drop(torch.empty(8 * MIB))
        torch.capturing = True  # this thread captures, and leaves a block within
    torch.capturing = False
    assert list(torch.workspaces.values()) == [held]
    pool.close()  # by then there may be one of the pool's
    assert torch.workspaces == {}


@on_gpu
@pytest.mark.parametrize("how", ["pool", "regions", "publish", "close"])
def test_a_workspace_in_memory_that_a_block_found_is_let_go_of_when_that_is_to_go(
    torch: TorchLike, pool: vram.TorchPool, kept: vram.Keeper, how: str
) -> None:
    with pool.use("weights"):
        weights, room = torch.empty(2 * MIB), torch.empty(8 * MIB)
    torch.drop(room)
    with pool.use("weights"):
        assert torch.multiply() == room
    assert torch.workspaces
    if how == "pool":
        pool.sleep(discard=["weights"])
    elif how == "regions":
        sleep_regions(dict.fromkeys(pool.regions(["weights"])))
    elif how == "publish":
        assert vram.publish("w", {"w": Tensor(weights, 2 * MIB)}).copied == {}
    else:
        pool.close()
        assert pool.usage() == {"weights": torch_pool.Usage(2 * MIB, 0)}
    assert torch.workspaces == {}


@on_gpu
def test_a_graph_takes_a_workspace_of_its_own_and_leaves_none(torch: TorchLike, pool: vram.TorchPool) -> None:
    before = torch.multiply(7)
    with pool.capture("graph") as number, torch.cuda.graph(object(), number, None, "global"):
        own = torch.multiply(7)
    assert own != before
    assert takes(pool, own)
    assert torch.workspaces == {}
    other = torch.multiply(7)
    assert not takes(pool, other)
    pool.sleep(offload=["graph"])
    assert torch.multiply(7) == other  # none can be in memory that sleeps: it is left where it is
    pool.wake()


# -- graphs and bypasses ----------------------------------------------------------------------------------------
@on_gpu
def test_a_graph_has_its_memory_wherever_it_is_captured(torch: TorchLike, pool: vram.TorchPool) -> None:
    """Outside of the block that gave its number, in a block of another tag, and in another thread."""
    made: list[int] = []
    with pool.capture("graph") as number:
        pass

    def capture() -> None:
        with torch.cuda.graph(object(), number, None, "global"):
            made.append(torch.empty(2 * MIB))

    capture()
    with pool.use("kv"):
        capture()
    thread = threading.Thread(target=capture)
    thread.start()
    thread.join(SOON)
    assert [tag_at(one) for one in made] == ["graph"] * 3
    assert "captured graph" in torch_pool._why_not_whole({made[2]: [(0, MIB)]})[made[2]]


@on_gpu
@pytest.mark.parametrize("ends", [True, False])
def test_memory_that_a_thread_took_outside_of_blocks_is_found_when_it_is_freed(
    torch: TorchLike, pool: vram.TorchPool, ends: bool
) -> None:
    """It has come back from torch if it is over, or if torch has the memory in its books; it never comes by here."""
    captured, stop = threading.Event(), threading.Event()
    with pool.capture("graph") as number:
        pass

    def capture() -> None:
        with torch.cuda.graph(object(), number, None, "global"):
            torch.empty(2 * MIB)
        captured.set()
        stop.wait(0 if ends else SOON)

    thread = threading.Thread(target=capture)
    thread.start()
    assert captured.wait(SOON)
    if ends:
        thread.join(SOON)
    else:
        torch.frees += 1
        assert pool.trim() == 0
    torch.pools[0].taken.clear()
    torch.frees += 1
    assert pool.trim() == 2 * MIB
    stop.set()
    thread.join(SOON)


@on_gpu
def test_what_a_thread_of_no_pythons_asked_for_is_left_alone_until_torch_has_it(
    torch: TorchLike, pool: vram.TorchPool
) -> None:
    """Such as those of backward, in a graph. Python may know it only while it calls, and not until torch has noted."""
    with pool.capture("graph"):
        pass
    made, native = torch.pools[-1], ctypes.CDLL(None)
    thread, address = ctypes.c_void_p(), ctypes.c_void_p()
    begin = ctypes.cast(made.allocate, ctypes.c_void_p)
    assert native.pthread_create(ctypes.byref(thread), None, begin, ctypes.c_void_p(2 * MIB)) == 0
    assert native.pthread_join(thread, ctypes.byref(address)) == 0
    assert address.value is not None
    assert tag_at(address.value) == "graph"
    torch.frees += 1
    assert pool.trim() == 0
    made.taken[address.value] = 2 * MIB
    torch.frees += 1
    assert pool.trim() == 0
    made.taken.clear()
    torch.frees += 1
    assert pool.trim() == 2 * MIB


@on_gpu
@pytest.mark.parametrize("kind", ["use", "capture", "bypass"])
def test_a_block_is_left_by_the_thread_that_entered_it(torch: TorchLike, pool: vram.TorchPool, kind: str) -> None:
    block = pool.bypass() if kind == "bypass" else getattr(pool, kind)("kv")
    block.__enter__()
    with pytest.raises(UsageError, match="left by another thread"):
        race(lambda: block.__exit__(None, None, None))
    assert not torch_pool._here.within
    assert not torch.entered
    with pool.use("kv"):  # this thread goes on as if it had left it
        assert takes(pool, torch.empty(2 * MIB))


@on_gpu
def test_in_a_bypass_torch_allocates_in_its_ordinary_memory_and_goes_on_with_it(
    torch: TorchLike, pool: vram.TorchPool
) -> None:
    other = vram.TorchPool("cuda:0")
    with pool.use("weights"), other.use("kv"), other.use("weights"):
        uses = [one.uses for one in torch.pools]
        with other.bypass():
            ordinary = torch.empty(2 * MIB)
            with pool.bypass():
                assert torch.empty(2 * MIB) in torch.ordinary.taken
            with pool.use("kv"):
                nested = torch.empty(2 * MIB)
                with pool.bypass():
                    torch.drop(ordinary)
                    assert torch.empty(2 * MIB) == ordinary  # no cache of its own that grows
                again = torch.empty(2 * MIB)
            assert torch.empty(2 * MIB) in torch.ordinary.taken
        assert [one.uses for one in torch.pools[:3]] == uses
        last = torch.empty(2 * MIB)
        torch.capturing = True
        with pool.bypass():
            captured = torch.empty(2 * MIB)  # which a graph, or the block, holds on to
        torch.capturing = False
    assert [tag_at(one) for one in (nested, again, last, captured)] == ["kv", "kv", "weights", "weights"]
    assert takes(other, last)
    assert len(torch.pools) == 4
    assert not torch.entered


def test_a_bypass_that_is_interrupted_leaves_all_as_it_was(
    torch: TorchLike, pool: vram.TorchPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = torch._C._cuda_endAllocateToPool
    with pool.use("weights"):
        for done in (False, True):

            def interrupted(device: int, number: tuple[int, int], done: bool = done) -> None:
                if done:
                    end(device, number)
                raise KeyboardInterrupt

            with monkeypatch.context() as patched:
                patched.setattr(torch._C, "_cuda_endAllocateToPool", interrupted)
                with pytest.raises(KeyboardInterrupt), pool.bypass():
                    pass
            assert [one.uses for _, one in torch.entered] == [2]
            assert len(torch_pool._here.within) == 1
    assert [one.uses for one in torch.pools] == [1]


# -- what is published ------------------------------------------------------------------------------------------
@on_gpu
def test_torch_puts_nothing_more_into_memory_that_was_published(
    torch: TorchLike, pool: vram.TorchPool, kept: vram.Keeper
) -> None:
    with pool.use("weights"):
        published, beside = torch.empty(4 * MIB), torch.empty(4 * MIB)
    with pool.use("kv"):
        cache = torch.empty(4 * MIB)
    assert vram.publish("w", {"w": Tensor(published, 4 * MIB)}).copied == {}
    torch.drop(published)
    torch.drop(beside)
    torch.drop(cache)
    with pool.use("weights"):
        assert torch.empty(4 * MIB) not in (published, beside)
    with pool.use("kv"):
        assert torch.empty(4 * MIB) == cache
    assert torch.pools[0].uses == 0  # torch gives the rest back when it is asked to


@on_gpu
def test_what_torch_may_still_put_tensors_into_is_copied_when_it_is_published(
    torch: TorchLike, pool: vram.TorchPool, kept: vram.Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pool.use("weights"):
        one = torch.empty(4 * MIB)
        copied = vram.publish("inside", {"w": Tensor(one, 4 * MIB)}).copied
        assert "in a block of use('weights')" in copied["w"]
        assert "in a block" in vram.publish("inside", {"w": Tensor(one, 4 * MIB)}, whole=True).copied["w"]
        torch.drop(one)
        assert torch.empty(4 * MIB) == one  # torch goes on with what it has
    state = "active_allocated"

    def snapshot() -> list[dict[str, Any]]:
        blocks = [(one, MIB, "active_allocated"), (one + MIB, 2 * MIB, "inactive"), (one + 3 * MIB, MIB, state)]
        return [
            {"address": one, "blocks": [{"address": at, "size": size, "state": state} for at, size, state in blocks]}
        ]

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "memory_snapshot", snapshot)
        copied = vram.publish("part", {"w": Tensor(one, MIB)}).copied
        assert "another tensor of torch's" in copied["w"]
        state = "inactive"  # it is all zero
        assert vram.publish("part", {"w": Tensor(one, MIB)}).copied == {}


@on_gpu
def test_memory_of_a_graph_is_copied_when_it_is_published(
    torch: TorchLike, pool: vram.TorchPool, kept: vram.Keeper, tmp_path: Path
) -> None:
    with pool.capture("graph") as number, torch.cuda.graph(object(), number, None, "global"):
        static = torch.empty(2 * MIB)
    copied = vram.publish("w", {"w": Tensor(static, 2 * MIB)}).copied
    assert "captured graph" in copied["w"]
    with vram.lend(
        {"w": Tensor(static, 2 * MIB)}, at=tmp_path / "s"
    ) as lending:  # it goes as it is, as long as this process likes
        assert lending.nbytes == 2 * MIB
