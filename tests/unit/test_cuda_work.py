"""Bytes moved by the GPU, on the stand-in: done when the call returns, by a GPU that may touch all of it, and rights
that are kept for each place by itself."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
from tests.support.order import undone_until_waited_for
from tests.support.raw_cuda import CudaStranger

import standin
from vram import driver as drivers
from vram.driver.cuda import CudaDriver
from vram.errors import DriverError, UsageError
from vram.spec import Access, Location
from vram.testing.driver import Scene

pytestmark = pytest.mark.standin
G = 2 << 20
GPU, OTHER = Location("cuda", 0), Location("cuda", 1)
NONE, READ, RW = Access.NONE, Access.READ, Access.READ_WRITE


@pytest.fixture
def cuda() -> CudaDriver:
    found = drivers.get(GPU)
    assert isinstance(found, CudaDriver)
    return found


@pytest.fixture
def scene(cuda: CudaDriver) -> Iterator[Scene]:
    with Scene(cuda, GPU) as scene:
        yield scene


@pytest.fixture
def there(cuda: CudaDriver) -> Iterator[Scene]:
    """The same on the other GPU."""
    with Scene(cuda, OTHER) as scene:
        yield scene


@pytest.fixture
def deferred(scene: Scene, there: Scene) -> Iterator[standin.Standin]:
    """Work waits until somebody synchronises: what was not waited for is not there. Ends before the memory does."""
    with undone_until_waited_for() as control:
        yield control
    control.clear()


def now(address: int, nbytes: int) -> bytes:
    """Return the bytes as they are at this moment; any call of the driver could be what waits for them."""
    return ctypes.string_at(address, nbytes)


# -- done when they return ------------------------------------------------------------------------------------------
def test_s10_a_fill_is_done_when_it_returns(scene: Scene, deferred: standin.Standin) -> None:
    address, _ = scene.memory()
    scene.driver.fill(address + 3, 7, 9)
    assert now(address, 13) == bytes(3) + b"\7" * 9 + b"\0", "the fill is still to be done"


def test_s10_a_copy_is_done_when_it_returns(scene: Scene, deferred: standin.Standin) -> None:
    address, _ = scene.memory()
    scene.write(address, b"here")
    assert now(address, 4) == b"here", "the copy from the host is still to be done"
    scene.driver.copy(address + 100, address, 4)
    assert now(address + 100, 4) == b"here", "the copy is still to be done"


def test_s10_a_copy_between_gpus_is_done_when_it_returns(scene: Scene, there: Scene, deferred: standin.Standin) -> None:
    """Of memory of ours: one GPU is given the right to read for as long as it takes."""
    source, target = scene.memory()[0], there.memory()[0]
    scene.write(source, b"sent")
    scene.driver.copy(target, source, 4)
    assert now(target, 4) == b"sent", "the copy between GPUs is still to be done"
    assert scene.driver.mem_get_access(source, OTHER) == NONE
    assert deferred.illegal() == 0


def test_s10_a_copy_of_foreign_memory_to_another_gpu_is_done_when_it_returns(
    scene: Scene, there: Scene, deferred: standin.Standin
) -> None:
    """Nobody may lend rights to memory of cudaMalloc: it goes by context, as a peer copy."""
    target = there.memory()[0]
    with CudaStranger() as stranger:
        source = stranger.legacy(4096)
        window = scene.driver.window_open(source, 4096, GPU, RW)  # type: ignore[attr-defined]
        scene.write(source, b"sent")
        deferred.clear()
        scene.driver.copy(target, source, 4)
        assert deferred.calls("cuMemcpyPeerAsync") == 1
        assert now(target, 4) == b"sent", "the peer copy is still to be done"
        scene.driver.window_close(window)  # type: ignore[attr-defined]


def test_s10_a_copy_into_page_locked_memory_is_done_when_it_returns(scene: Scene, deferred: standin.Standin) -> None:
    """Into memory that the driver does not know it waits by itself; into what it knows it does not."""
    address, _ = scene.memory()
    found = bytearray(4)
    start = ctypes.addressof(ctypes.c_char.from_buffer(found))
    scene.write(address, b"back")
    scene.driver.host_register(start, 4, GPU)
    try:
        scene.driver.copy_out(memoryview(found), address)
        assert now(start, 4) == b"back", "the copy to the host is still to be done"
    finally:
        scene.driver.host_unregister(start)


# -- who does the work ----------------------------------------------------------------------------------------------
def one_for_each(scene: Scene, *rights: dict[Location, Access]) -> int:
    """Return the address of mappings of a granule, one behind the other, each with rights of its own."""
    base = scene.reserve(len(rights))
    for number, each in enumerate(rights):
        address = scene.map(base + number * G, scene.create(), NONE)
        for place, access in each.items():
            scene.driver.mem_set_access(address, G, access, (place,))
    return base


def test_a_gpu_with_access_to_a_part_does_not_do_the_work(scene: Scene) -> None:
    driver = scene.driver
    base = one_for_each(scene, {GPU: RW}, {OTHER: RW})
    other = scene.memory()[0]
    calls: list[Callable[[], object]] = [
        lambda: driver.fill(base + G - 2, 1, 4),
        lambda: driver.copy(base + G - 2, other, 4),
        lambda: driver.copy(other, base + G - 2, 4),
        lambda: scene.write(base + G - 2, b"four"),
        lambda: scene.read(base + G - 2, 4),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="no GPU may access all of it"):
            call()


def test_the_gpu_with_access_to_all_of_it_does_the_work(scene: Scene) -> None:
    """Also where another comes first, and may touch one part but not the next, or only read it."""
    driver = scene.driver
    for first, second in (({GPU: RW, OTHER: RW}, {OTHER: RW}), ({GPU: RW, OTHER: RW}, {GPU: READ, OTHER: RW})):
        base = one_for_each(scene, first, second)
        scene.write(base + G - 2, b"four")
        assert scene.read(base + G - 2, 4) == b"four"
        driver.copy(base + 7, base + G - 2, 4)
        driver.fill(base + G - 1, 7, 2)
        assert now(base + 7, 4) == b"four"
        assert now(base + G - 2, 4) == b"f\7\7r"


def test_a_right_of_one_gpu_leaves_those_of_the_others(scene: Scene) -> None:
    """In our books, which decide who does the work, as in the driver's."""
    driver = scene.driver
    base = one_for_each(scene, {GPU: RW, OTHER: READ})
    assert [driver.mem_get_access(base, place) for place in (GPU, OTHER)] == [RW, READ]
    driver.fill(base, 5, 4)
    driver.mem_set_access(base, G, NONE, (GPU,))
    assert scene.read(base, 4) == b"\5" * 4
    with pytest.raises(UsageError, match="access"):
        driver.fill(base, 6, 4)
    driver.mem_set_access(base, G, RW, (GPU,))
    driver.mem_set_access(base, G, NONE, (OTHER,))
    driver.fill(base, 6, 4)
    assert scene.read(base, 4) == b"\6" * 4


def test_i4_a_refused_right_is_not_in_the_books(scene: Scene) -> None:
    base = one_for_each(scene, {GPU: READ})
    control = standin.Standin()
    with control.failing("cuMemSetAccess"), pytest.raises(DriverError):
        scene.driver.mem_set_access(base, G, RW, (GPU,))
    with pytest.raises(UsageError, match="access"):
        scene.driver.fill(base, 1, 1)


def test_i4_a_loan_whose_end_fails_does_not_keep_the_others(scene: Scene, there: Scene) -> None:
    """A copy between GPUs lends rights past the books: nobody would ever take back what it forgets."""
    target = there.memory(2)[0]
    base = one_for_each(scene, {GPU: RW}, {GPU: RW}, {GPU: RW})
    scene.write(base + G - 2, b"four")
    with standin.Standin().failing("cuMemSetAccess", nth=5) as control:  # of three loans, the end of the second
        with pytest.raises(DriverError):
            scene.driver.copy(target, base + G - 2, G + 4)
        assert control.calls("cuMemSetAccess") == 6
    assert [scene.driver.mem_get_access(base + at * G, OTHER) for at in range(3)] == [NONE, READ, NONE]
    scene.driver.copy(target, base + G - 2, G + 4)
    assert [scene.driver.mem_get_access(base + at * G, OTHER) for at in range(3)] == [NONE, NONE, NONE]
    assert now(target, 4) == b"four"


# -- taking back ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
def test_i4_an_undo_that_failed_can_be_tried_again(scene: Scene, call: str) -> None:
    """Until then what it did not take back is in the books, and as good as before."""
    address = scene.reserve(2)
    handle = scene.create()
    scene.write(scene.map(address, handle), b"here")
    scene.map(address + G, scene.create())
    if call == "cuMemAddressFree":
        scene.unmap(address, 2)
    undo: dict[str, Callable[[], object]] = {
        "cuMemUnmap": lambda: scene.driver.mem_unmap(address, 2 * G),
        "cuMemRelease": lambda: scene.driver.mem_release(handle),
        "cuMemAddressFree": lambda: scene.driver.address_free(address, 2 * G),
    }
    before = scene.driver.live()
    with standin.Standin().failing(call), pytest.raises(DriverError):
        undo[call]()
    assert scene.driver.live() == before
    if call != "cuMemAddressFree":
        assert scene.read(address, 4) == b"here"
        scene.unmap(address, 2)
    scene.release(handle)
    scene.free(address)
