"""kvcached's ``vmm_ops`` over our memory: pages anywhere in the tensors of all layers, and the books over them.

The tensors are of the host here. What of kvcached's own tests runs against it is for ``make test-engines``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.support.faulty_driver import UNDO, FaultyDriver

from vram import driver
from vram.engines import kvcached, kvcached_tensors
from vram.errors import DriverError, UsageError
from vram.spec import HOST

PAGE = 2 << 20
SOON = 30.0


@pytest.fixture(autouse=True)
def tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no torch, numpy's arrays over the same memory stand for its tensors."""
    if importlib.util.find_spec("torch") is None:
        monkeypatch.setattr(kvcached_tensors._Shown, "tensor", lambda self, device: np.asarray(self))


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> FaultyDriver:
    found = FaultyDriver(driver.get(HOST))
    monkeypatch.setattr(driver, "get", lambda _: found)
    return found


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    kvcached.shutdown_kvcached()
    gc.collect()


@pytest.fixture
def name() -> str:
    return f"vram-test-{os.getpid()}"


def separate(layers: int = 2, pages: int = 4) -> list[Any]:
    """Tensors of layers, with as many pages each for keys and for values."""
    kvcached.init_kvcached("cpu", PAGE, False)
    return kvcached.create_kv_tensors(2 * pages * PAGE, 1, "cpu", layers)


def first_bytes(tensors: list[Any]) -> list[list[int]]:
    return [[int(tensor[start]) for start in range(0, len(tensor), PAGE)] for tensor in tensors]


def allocator(name: str, pages: int = 8, **options: Any) -> kvcached.PageAllocator:
    options = {"enable_page_prealloc": False, "num_kv_buffers": 2, "contiguous_layout": False} | options
    return kvcached.PageAllocator(2, pages * PAGE, PAGE, ipc_name=name, **options)


# -- memory -------------------------------------------------------------------------------------------------------
def test_pages_are_mapped_anywhere_and_in_all_layers() -> None:
    tensors = separate()
    assert kvcached.kv_tensors_created()
    assert [str(tensor.dtype).split(".")[-1] for tensor in tensors] == ["int8"] * 2
    assert kvcached.map_to_kv_tensors([3 * PAGE, 1 * PAGE])
    for tensor in tensors:
        for page in (1, 3, 4 + 1, 4 + 3):  # keys, and values in the other half
            tensor[page * PAGE : (page + 1) * PAGE] = page
    assert first_bytes(tensors) == [[0, 1, 0, 3, 0, 5, 0, 7]] * 2
    assert kvcached.unmap_from_kv_tensors([1 * PAGE])
    assert first_bytes(tensors) == [[0, 0, 0, 3, 0, 0, 0, 7]] * 2


def test_all_layers_are_in_one_tensor_with_the_contiguous_layout() -> None:
    kvcached.init_kvcached("cpu", PAGE, True)
    (tensor,) = kvcached.create_kv_tensors(2 * 4 * PAGE, 2, "cpu", 3)
    block = PAGE * 3 * 2
    assert str(tensor.dtype).endswith("int16")
    assert len(tensor) * 2 == 4 * block
    kvcached.map_to_kv_tensors([2 * block])
    tensor[2 * block // 2 : 3 * block // 2] = 7
    assert [int(tensor[page * block // 2]) for page in range(4)] == [0, 0, 7, 0]
    assert int(tensor[3 * block // 2 - 1]) == 7


def test_a_unified_pool_maps_one_page_of_each_layer() -> None:
    kvcached.init_kvcached("cpu", PAGE, False)
    tensors = kvcached.create_kv_tensors(8 * PAGE, 1, "cpu", 2, unified_pool=True)
    before = driver.get(HOST).live().handles
    kvcached.map_to_kv_tensors([5 * PAGE])  # in the second half, which would be of values otherwise
    assert driver.get(HOST).live().handles == before + 2
    tensors[0][5 * PAGE] = 1
    assert first_bytes(tensors) == [[0, 0, 0, 0, 0, 1, 0, 0], [0] * 8]


def test_mapping_again_changes_nothing_and_unmapping_gives_the_memory_back() -> None:
    tensors = separate()
    before = driver.get(HOST).live().handles
    kvcached.map_to_kv_tensors([PAGE])
    tensors[0][PAGE] = 9
    kvcached.map_to_kv_tensors([PAGE, PAGE])
    assert int(tensors[0][PAGE]) == 9
    assert driver.get(HOST).live().handles == before + 4
    kvcached.unmap_from_kv_tensors([PAGE, 0])
    assert driver.get(HOST).live().handles == before
    assert first_bytes(tensors) == [[0] * 8] * 2


@pytest.mark.parametrize("verb", ["map_to_kv_tensors", "unmap_from_kv_tensors"])
def test_all_layers_are_changed_or_none(faulty: FaultyDriver, verb: str) -> None:
    tensors = separate()
    kvcached.map_to_kv_tensors([0, PAGE])
    for tensor in tensors:
        for page in (0, 1, 4, 5):
            tensor[page * PAGE] = 1 + page
    offsets = [2 * PAGE, 3 * PAGE] if verb.startswith("map") else [0, PAGE]
    bytes_before, live = first_bytes(tensors), faulty.live()
    assert bytes_before[1] == [1, 2, 0, 0, 5, 6, 0, 0]
    calls = {"mem_create", "mem_map", "mem_set_access", "synchronize"}
    for nth in itertools.count(1):
        with faulty.inject(calls - UNDO, nth=nth) as fault, contextlib.suppress(DriverError):
            getattr(kvcached, verb)(offsets)
        if not fault.fired:
            break
        assert faulty.live() == live, nth  # first: what is there and not accessible would end this process
        assert first_bytes(tensors) == bytes_before, nth
        for tensor in tensors:  # and what has no memory of its own can be written to, as before
            tensor[7 * PAGE] = 0
    assert nth > 10
    assert first_bytes(tensors) == ([[0] * 8] * 2 if verb.startswith("un") else bytes_before)


def test_unmapping_waits_for_the_device_first(faulty: FaultyDriver) -> None:
    separate()
    kvcached.map_to_kv_tensors([0, PAGE])
    faulty.clear()
    kvcached.unmap_from_kv_tensors([0, PAGE])
    assert faulty.calls[0] == "synchronize"
    assert faulty.count("synchronize") == 1


@pytest.mark.parametrize("offset", [1, PAGE // 2, -PAGE, 4 * PAGE, 1 << 60])
def test_what_is_no_offset_of_a_page_is_refused(offset: int) -> None:
    tensors = separate()
    with pytest.raises(UsageError, match=f"at most {3 * PAGE}"):
        kvcached.map_to_kv_tensors([0, offset])
    tensors[0][0] = 1
    assert int(tensors[0][PAGE]) == 1, "the page that all share: nothing was mapped"
    tensors[0][0] = 0


def test_a_tensor_keeps_its_addresses_and_the_memory_goes_at_shutdown() -> None:
    before = driver.get(HOST).live()
    tensors = separate()
    kvcached.map_to_kv_tensors([0])
    tensors[0][0] = 5
    part = tensors[0][:10]
    kvcached.shutdown_kvcached()
    with pytest.raises(UsageError, match="init_kvcached"):
        kvcached.kv_tensors_created()
    assert int(part[0]) == 0
    assert driver.get(HOST).live().handles == before.handles + 1, "the page of zeros"
    del tensors, part
    gc.collect()
    assert driver.get(HOST).live() == before


def test_groups_are_mapped_on_their_own() -> None:
    tensors = separate()
    assert not kvcached.kv_tensors_created(3)
    assert not kvcached.map_to_kv_tensors([0], 3)
    others = kvcached.create_kv_tensors(8 * PAGE, 1, "cpu", 1, group_id=3)
    kvcached.map_to_kv_tensors([0], group_id=3)
    others[0][0] = 4
    assert first_bytes(tensors) == [[0] * 8] * 2
    assert first_bytes(others) == [[4, *[0] * 7]]


def test_the_same_question_gets_the_same_tensors() -> None:
    tensors = separate()
    assert kvcached.create_kv_tensors(8 * PAGE, 1, "cpu", 2)[1] is tensors[1]
    with pytest.raises(UsageError, match="were created as"):
        kvcached.create_kv_tensors(8 * PAGE, 1, "cpu", 3)


def test_sizes_that_are_no_whole_pages_are_refused() -> None:
    kvcached.init_kvcached("cpu", PAGE, False)
    with pytest.raises(UsageError, match="whole pages"):
        kvcached.create_kv_tensors(3 * PAGE, 1, "cpu", 1)
    with pytest.raises(UsageError, match="1, 2, 4 or 8"):
        kvcached.create_kv_tensors(4 * PAGE, 3, "cpu", 1)
    with pytest.raises(UsageError, match="multiple of 2097152"):
        kvcached.init_kvcached("cpu", PAGE + 1)
    assert driver.get(HOST).live().handles == 0


# -- the books ----------------------------------------------------------------------------------------------------
def test_blocks_over_the_end_of_a_page_are_of_none() -> None:
    page = kvcached.InternalPage(1, 100)
    page.init(30)
    assert page.get_free_blocks() == [4, 5]
    assert page.alloc(1) == [4]
    assert not page.empty()
    assert not page.full()
    assert page.alloc() == [5]
    assert page.full()
    with pytest.raises(RuntimeError, match="Not enough free blocks"):
        page.alloc(1)
    page.free_batch([5, 4])
    assert page.empty()
    assert page.num_free_blocks() == 2
    assert kvcached.InternalPage.get_num_blocks(100, 30) == 3


def test_pages_are_taken_mapped_and_given_back(name: str) -> None:
    tensors = separate(pages=8)
    before = driver.get(HOST).live().handles
    pages = allocator(name)
    taken = [pages.alloc_page().page_id for _ in range(3)]
    assert taken == [0, 1, 2]
    assert pages.get_num_inuse_pages() == 3
    for tensor in tensors:
        tensor[2 * PAGE] = 2
        assert int(tensor[3 * PAGE]) == 0
    pages.free_pages(taken)
    assert pages.get_page_state() == {"total_pages": 8, "free_pages": 8, "inuse_pages": 0, "reserved_pages": 3}
    pages.trim()
    assert pages.get_num_reserved_pages() == 0
    assert driver.get(HOST).live().handles == before


def test_a_page_that_cannot_be_mapped_is_a_miss_and_stays_free(faulty: FaultyDriver, name: str) -> None:
    separate(pages=8)
    pages = allocator(name)
    with faulty.inject("mem_create", nth=3), pytest.raises(RuntimeError, match=r"Failed to map page 0: .*mem_create"):
        pages.alloc_page()
    assert pages.get_page_state()["free_pages"] == 8
    assert pages.alloc_page().page_id == 0


def test_pages_whose_unmapping_fails_are_not_lost(faulty: FaultyDriver, name: str) -> None:
    separate(pages=8)
    pages = allocator(name)
    taken = [pages.alloc_page().page_id for _ in range(8)]
    pages._most = 0
    with faulty.inject("synchronize"), pytest.raises(DriverError):
        pages.free_pages(taken)
    assert pages.get_page_state()["free_pages"] == 8
    assert sorted(pages.alloc_page().page_id for _ in range(8)) == taken


def test_a_limit_that_falls_and_rises_again_gives_out_each_page_once(name: str) -> None:
    separate(pages=12)
    pages = allocator(name, pages=10)
    taken = [pages.alloc_page().page_id for _ in range(4)]
    assert not pages.resize(3 * PAGE)
    assert pages.resize(5 * PAGE)
    assert pages.get_num_total_pages() == 5
    assert pages.resize(12 * PAGE)
    assert pages.get_num_free_pages() == 8
    taken += [pages.alloc_page().page_id for _ in range(8)]
    assert sorted(taken) == list(range(12))
    with pytest.raises(RuntimeError, match="No free pages left"):
        pages.alloc_page()


def test_a_limit_below_what_is_mapped_ahead_trims_that(name: str) -> None:
    separate(pages=8)
    pages = allocator(name)
    pages.free_pages([pages.alloc_page().page_id for _ in range(6)])
    assert pages.get_num_reserved_pages() == 6
    assert pages.resize(2 * PAGE)
    assert pages.get_page_state() == {"total_pages": 2, "free_pages": 2, "inuse_pages": 0, "reserved_pages": 0}


def test_a_page_is_waited_for_while_a_thread_maps_it_ahead(name: str) -> None:
    """kvcached's issue 371: with its lock held by one who waits for Python's, both would wait for ever."""
    separate(pages=5)
    pages = allocator(name, pages=5, enable_page_prealloc=True)
    inside, go_on = threading.Event(), threading.Event()

    def slow(world: int, offsets: list[int]) -> None:
        inside.set()
        assert go_on.wait(SOON)

    pages.set_use_worker_ipc(True)
    pages.set_broadcast_map_callback(slow)
    pages.set_broadcast_unmap_callback(lambda world, offsets: None)
    pages.start_prealloc_thread()
    try:
        assert inside.wait(SOON)
        taken: list[int] = []
        taker = threading.Thread(target=lambda: taken.append(pages.alloc_page().page_id))
        taker.start()
        go_on.set()
        taker.join(SOON)
        assert len(taken) == 1
    finally:
        pages.stop_prealloc_thread()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vram: kvcached")]


def test_other_processes_are_told_the_offsets(name: str) -> None:
    told: list[tuple[str, int, list[int]]] = []
    pages = allocator(name, world_size=2, contiguous_layout=True)
    pages.set_broadcast_map_callback(lambda world, offsets: told.append(("map", world, offsets)))
    pages.set_broadcast_unmap_callback(lambda world, offsets: told.append(("unmap", world, offsets)))
    pages.free_page(pages.alloc_page().page_id)
    pages.free_page(pages.alloc_page().page_id)  # which is mapped still
    pages.trim()
    each = PAGE * 2 * 2
    assert told == [("map", 2, [0]), ("unmap", 2, [0])]
    pages.alloc_page(), pages.alloc_page()
    assert told[-1] == ("map", 2, [2 * each]), "what was given back last comes last"


def test_kvctl_sees_what_is_in_use_and_sets_the_limit(name: str) -> None:
    pages = allocator(name, world_size=2)
    pages.set_broadcast_map_callback(lambda world, offsets: None)
    pages.alloc_page()
    path = Path("/dev/shm", name)
    numbers = memoryview(path.read_bytes()).cast("q")
    assert numbers.tolist() == [8 * PAGE * 4, PAGE * 4, 0]
    assert pages.check_and_get_resize_target(8 * PAGE) == -1
    path.write_bytes((4 * PAGE * 4).to_bytes(8, "little") + bytes(16))
    assert pages.check_and_get_resize_target(8 * PAGE) == 4 * PAGE
    del pages
    gc.collect()
    assert not path.exists()


def test_kvcached_takes_it_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvcached.vmm_ops", raising=False)
    package = ModuleType("kvcached")
    monkeypatch.setitem(sys.modules, "kvcached", package)
    kvcached.install()
    kvcached.install()
    assert sys.modules["kvcached.vmm_ops"] is kvcached
    assert package.vmm_ops is kvcached
    monkeypatch.setitem(sys.modules, "kvcached.vmm_ops", ModuleType("theirs"))
    with pytest.raises(UsageError, match="before kvcached is imported"):
        kvcached.install()


def test_it_loads_without_torch() -> None:
    code = "import sys; from vram.engines import kvcached; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=SOON).returncode == 0


# -- the limit ----------------------------------------------------------------------------------------------------
def shared(name: str, *, ahead: bool = False) -> kvcached.PageAllocator:
    """An allocator whose pages are another process's."""
    pages = allocator(name, enable_page_prealloc=ahead)
    pages.set_use_worker_ipc(True)
    pages.set_broadcast_map_callback(lambda world, offsets: None)
    pages.set_broadcast_unmap_callback(lambda world, offsets: None)
    return pages


def limit(name: str) -> list[int]:
    return memoryview(Path("/dev/shm", name).read_bytes()).cast("q").tolist()


def set_limit(name: str, pages: int) -> None:
    """As kvctl does it."""
    with Path("/dev/shm", name).open("r+b") as file:
        file.write((pages * PAGE * 4).to_bytes(8, "little"))


def test_an_allocator_made_anew_keeps_its_limit_when_the_first_one_goes(name: str) -> None:
    first = shared(name)
    first.alloc_page()
    second = shared(name)
    del first
    gc.collect()
    assert limit(name) == [8 * PAGE * 4, 0, 0]
    second.alloc_page()
    assert limit(name) == [8 * PAGE * 4, PAGE * 4, 0]
    assert second.check_and_get_resize_target(8 * PAGE) == -1
    del second
    gc.collect()
    assert not Path("/dev/shm", name).exists()


def test_the_end_of_one_engine_leaves_the_other_its_limit(name: str) -> None:
    engine, other = shared(name), shared(name)
    set_limit(name, 6)
    assert engine.check_and_get_resize_target(8 * PAGE) == 6 * PAGE
    del other  # whose file it was: it was made last
    gc.collect()
    assert engine.check_and_get_resize_target(6 * PAGE) == -1
    page = engine.alloc_page()
    assert limit(name) == [6 * PAGE * 4, PAGE * 4, 0], "what kvctl said last holds, and not a limit of 0"
    assert engine.check_and_get_resize_target(6 * PAGE) == -1
    engine.free_page(page.page_id)
    del engine
    gc.collect()
    assert not Path("/dev/shm", name).exists(), "it is removed by who made it again"
