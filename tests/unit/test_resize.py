"""Growth of many arrays as users write it; what regions do is in tests/contracts/resize.py."""

from __future__ import annotations

import errno
import functools
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.support.deadlines import SOON
from tests.support.faulty_driver import FaultyDriver
from tests.support.forked import end_of, forked, refused
from tests.support.other_users import as_user
from tests.support.samples import in_turns
from tests.support.threads import race

import vram
from vram import driver as drivers
from vram.driver.host import HostDriver
from vram.errors import BusyError, CapacityError, ClosedError, DriverError, OutOfMemoryError, UsageError, VramError
from vram.memory import Region, ahead
from vram.memory.ahead import Prepared, keep_ready, make_ahead
from vram.memory.chunks import Kind
from vram.memory.resize import resize_regions
from vram.spec import HOST, AllocationFlags, HandleKind, Location

G = 2 << 20
GPU = Location("cuda", 0)
ALONE = 54_321  # a user of whom no other process is


@pytest.fixture
def arrays() -> Iterator[list[vram.Array]]:
    made = [vram.zeros((4, 64), "int32", device="host", capacity=1 << 20, chunk="2MiB") for _ in range(5)]
    for number, array in enumerate(made):
        array[:] = number + 1
    yield made
    for array in made:
        array.close()


def looks(arrays: list[vram.Array]) -> list[object]:
    return [(array.shape, array.region.nbytes, array.region.layout, array.numpy().sum()) for array in arrays]


def test_some_grow_and_some_shrink_and_none_moves_i5(arrays: list[vram.Array]) -> None:
    addresses = [array.address for array in arrays]
    vram.resize({arrays[0]: 100_000, arrays[1]: 1, arrays[2]: 0, arrays[3]: 50_000, arrays[4]: 4})
    assert [len(array) for array in arrays] == [100_000, 1, 0, 50_000, 4]
    assert [array.address for array in arrays] == addresses
    assert arrays[0].numpy()[:4].min() == 1
    assert not arrays[0].numpy()[4:].any()
    assert arrays[1].numpy().max() == 2
    vram.resize({})


@pytest.mark.parametrize("kind", ["slice", "attached", "scalar", "not an array", "rows", "capacity", "twin", "closed"])
def test_what_cannot_be_is_refused_and_says_which(arrays: list[vram.Array], kind: str) -> None:
    arrays[1].close()
    arrays.pop(1)
    before = looks(arrays)
    one, closed = arrays[0], vram.zeros(1, device="host")
    closed.close()
    with vram.private_keeper(), vram.zeros((), device="host") as scalar:
        vram.publish("n", {"x": one})
        with vram.attach("n") as lease:
            two = arrays[2]
            wrong: dict[str, tuple[Callable[[], Any], Any, Any, str]] = {
                "slice": (lambda: two[1:], 9, UsageError, r"\(3, 64\).*memory of others"),
                "attached": (lambda: lease["x"], 9, UsageError, "memory of others"),
                "scalar": (lambda: scalar, 9, UsageError, "no dimension"),
                "not an array": (lambda: b"bytes", 9, UsageError, "arrays are resized"),
                "rows": (lambda: two, 1.5, UsageError, "rows must be"),
                "capacity": (lambda: two, (1 << 20) + 1, CapacityError, r"1048577 rows.*\(4, 64\)"),
                "twin": (lambda: vram.Array(arrays[1].region, "int32", 4, owns_growth=True), 9, UsageError, "one of"),
                "closed": (lambda: closed, 1, ClosedError, "closed"),
            }
            make, rows, error, says = wrong[kind]
            thing = make()
            for order in (1, -1):
                with pytest.raises(error, match=says):
                    vram.resize(dict([(arrays[3], 50_000), (arrays[1], 1), (thing, rows)][::order]))
                assert looks(arrays)[1:] == before[1:]
            del thing
    with pytest.raises(UsageError, match="dict of arrays"):
        vram.resize([(one, 1)])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no CUDA event"):
        vram.resize({arrays[1]: 1}, after="soon")


def test_a_view_of_what_would_go_keeps_all_as_it_is_i6(arrays: list[vram.Array]) -> None:
    views = [arrays[0].numpy(), arrays[2].numpy()[3:]]
    before = looks(arrays)
    with pytest.raises(BusyError, match="1 more") as caught:
        vram.resize({arrays[0]: 1, arrays[1]: 200_000, arrays[2]: 2})
    assert len(caught.value.holders) == 2
    assert looks(arrays) == before
    vram.resize({arrays[0]: 4, arrays[1]: 200_000, arrays[3]: 2})
    del views
    vram.resize({arrays[0]: 1, arrays[1]: 0, arrays[2]: 2})


def test_in_a_forked_child_it_is_refused_i7(arrays: list[vram.Array]) -> None:
    assert end_of(lambda: refused(lambda: vram.resize(dict.fromkeys(arrays, 9)))) == 1
    vram.resize(dict.fromkeys(arrays, 9))


@pytest.fixture
def nothing_ready() -> Iterator[None]:
    yield
    vram.memory.trim()


@pytest.mark.usefixtures("nothing_ready")
@pytest.mark.parametrize("odd", ["x", -1, float("nan"), True, 10**400], ids=["text", "-1", "nan", "bool", "huge"])
def test_what_is_no_number_of_seconds_to_wait(odd: object) -> None:
    prepared = vram.prepare("host", "2MiB", chunk="2MiB")
    with pytest.raises(UsageError, match="number of seconds"):
        prepared.wait(odd)  # type: ignore[arg-type]
    assert prepared.wait(10**9)
    with pytest.raises(UsageError, match="number of seconds"):
        prepared.wait(odd)  # type: ignore[arg-type]  # also when there is nothing to wait for
    prepared.close()


@pytest.mark.usefixtures("nothing_ready")
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_who_grows_where_no_thread_is_to_be_had_makes_its_own_memory() -> None:
    def act() -> tuple[str, int, int]:
        with vram.zeros((0, 1 << 20), "int8", device="host", capacity=4, chunk="2MiB") as array:
            prepared = vram.prepare("host", "2MiB", chunk="2MiB")
            said = ""
            try:
                prepared.wait(SOON)
            except RuntimeError as error:
                said = str(error)
            array.resize(2)
            return said, prepared.ready, array.nbytes

    def alone() -> tuple[str, int, int]:
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))  # counts what this user has on this machine
        return act()

    assert act()[0] == ""  # and everything is imported
    vram.memory.trim()
    said, ready, nbytes = as_user(ALONE, alone)
    assert "thread" in said
    assert (ready, nbytes) == (0, 2 << 20)


@pytest.mark.standin
def test_zeros_that_were_begun_end_before_anything_is_unmapped() -> None:
    import standin

    control, driver = standin.Standin(), FaultyDriver(drivers.get(GPU))
    regions = [Region.create(GPU, driver=driver, capacity=8 * G, chunk=G, nbytes=2 * G) for _ in range(2)]
    prepared = keep_ready(Kind(driver, GPU, HandleKind.POSIX_FD, AllocationFlags.NONE, G), 1)
    assert prepared.wait(SOON)
    prepared._most = 9  # there is room, and the thread has not come to it
    for region in regions:
        driver.fill(region.address, 1, region.nbytes)
    control.defer()
    try:
        control.clear()
        with driver.inject("fill_async", 2) as fault:
            resize_regions(dict.fromkeys(regions, 0))
        assert fault.fired
        assert control.calls("cuStreamSynchronize") == 1  # which the first was waited for with
        driver.synchronize(GPU)
        assert control.illegal() == 0
    finally:
        control.defer(False)
    assert isinstance(prepared.error, DriverError) or prepared.wait(SOON)
    prepared.close()
    for region in regions:
        region.close()


# -- memory that is made ahead ----------------------------------------------------------------------------------
@pytest.mark.usefixtures("nothing_ready")
def test_arrays_grow_into_what_was_prepared_and_shrink_into_it(arrays: list[vram.Array]) -> None:
    prepared = vram.prepare("host", "16MiB", chunk="2MiB")
    assert prepared.wait(SOON)
    assert repr(prepared) == "<Prepared host 16 MiB of 16 MiB in chunks of 2 MiB>"
    for array in arrays:
        array[:] = 77
    kept = drivers.get(HOST).live().nbytes
    vram.resize(dict.fromkeys(arrays, 8192 * 2))  # a chunk more for each
    assert prepared.wait(SOON)
    assert drivers.get(HOST).live().nbytes == kept + 5 * G
    for array in arrays:
        array[:] = 5
    vram.resize(dict.fromkeys(arrays, 0))
    assert prepared.ready == 16 << 20
    vram.resize(dict.fromkeys(arrays, 8192))
    assert not any(array.numpy().any() for array in arrays)
    assert vram.prepare("host", "4MiB", chunk=2 << 20) is prepared  # the latest holds
    assert prepared.wait(SOON)
    assert (prepared.nbytes, prepared.ready) == (4 << 20, 4 << 20)
    vram.prepare("host", 0, chunk="2MiB")
    assert (prepared.nbytes, prepared.ready) == (0, 0)
    assert "0 B of 0 B" in repr(prepared)
    prepared.close()
    assert vram.memory.trim() == 0


def test_memory_made_for_a_growth_is_what_the_growth_maps_or_goes() -> None:
    with Region.create("host", capacity=8 * G) as region:
        (made,) = make_ahead(region, 2 * G)
        region.grow(2 * G)
        assert region.segments(0, 2 * G)[0][0].identity() == made.identity()
        made.close()
        make_ahead(region, 3 * G)
        with pytest.raises(BusyError, match="is grown already"):
            region.grow(4 * G)
        region.grow(4 * G)
        make_ahead(region, 8 * G)  # goes with the region


@pytest.mark.parametrize(
    ("arguments", "chunk", "says"),
    [
        (("host", "1MiB"), "2MiB", "less than one chunk"),
        (("host", "1MiB"), 0, "chunk is 0"),
        (("host", -1), "2MiB", "nbytes"),
        (("host", "much"), "2MiB", "much"),
        (("nowhere", "1MiB"), "2MiB", "nowhere"),
    ],
)
def test_what_cannot_be_prepared_is_refused(arguments: tuple[Any, Any], chunk: Any, says: str) -> None:
    with pytest.raises(VramError, match=says):
        vram.prepare(*arguments, chunk=chunk)


def test_what_is_ready_gives_way_to_a_growth_that_finds_too_little_i4() -> None:
    driver = FaultyDriver(HostDriver())
    kind = Kind(driver, HOST, HandleKind.POSIX_FD, AllocationFlags.NONE, 2 * G)
    prepared = keep_ready(kind, 3)
    assert prepared.wait(SOON)
    with Region.create(HOST, driver=driver, capacity=8 * G, chunk=G, nbytes=G) as region:
        with driver.inject("mem_map_new", error=OutOfMemoryError("injected", 12, "ENOMEM")):
            region.grow(3 * G)
        assert region.mapped == 3 * G
        assert prepared.wait(SOON)  # it is made again, if there is enough
        failing = OutOfMemoryError("injected", 12, "ENOMEM")
        with driver.inject("mem_map_new", error=failing, forever=True), pytest.raises(OutOfMemoryError):
            region.grow(4 * G)
        assert region.mapped == 3 * G
    prepared.close()
    assert driver.live().nbytes == 0


@pytest.mark.usefixtures("nothing_ready")
def test_in_a_forked_child_nothing_is_ready_i7() -> None:
    prepared = vram.prepare("host", "4MiB", chunk="2MiB")
    assert prepared.wait(SOON)

    def work() -> int:
        assert (prepared.ready, prepared.nbytes, prepared.wait(1)) == (0, 0, False)
        prepared.close()
        assert vram.memory.trim() == 0
        with vram.zeros((1, G), "int8", device="host", capacity=4, chunk="2MiB") as array:
            mine = vram.prepare("host", "4MiB", chunk="2MiB")
            assert mine is not prepared
            assert mine.wait(SOON)
            vram.resize({array: 3})
            array[:] = 3
            assert mine.wait(SOON)  # a thread makes it anew
        return int(vram.memory.trim() > 0)

    assert end_of(work) == 1
    assert prepared.ready == 4 << 20


@pytest.mark.usefixtures("nothing_ready")
def test_what_a_forked_child_may_look_at_is_not_kept_i7(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would see zeros, and then what another array has there, and could write to that."""
    monkeypatch.setattr(Prepared, "_refill", lambda self: None)  # the thread has not come to it
    prepared = vram.prepare("host", "16MiB", chunk="2MiB")
    with vram.zeros((4, G), "int8", device="host", capacity=8, chunk="2MiB") as array:
        array[:] = 7
        views = [array.numpy()]
        with forked(lambda: int(not (views[0] == 7).all())) as child:
            views.clear()
            array.resize(1)
            assert prepared.ready == 0
            array.resize(3)
            vram.sleep(array, shared="unmap", to=None)
            vram.wake(array)  # mapped anew, and the same memory
            array.resize(0)
            assert prepared.ready == 2 * G  # the two that were made since
            assert child.end() == 0


@pytest.mark.usefixtures("nothing_ready")
def test_what_is_kept_while_a_child_is_forked_is_not_kept_i7(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread forks when it was found that no child has the memory, and before it is unmapped."""
    monkeypatch.setattr(Prepared, "_refill", lambda self: None)
    zero = ahead._zero
    prepared = vram.prepare("host", "8MiB", chunk="2MiB")
    with ExitStack() as stack:

        def fork(*given: Any) -> None:
            stack.enter_context(forked())
            zero(*given)

        with vram.zeros((2, G), "int8", device="host", capacity=8, chunk="2MiB") as array:
            monkeypatch.setattr(ahead, "_zero", fork)
            array.resize(1)
            assert prepared.ready == 0
            monkeypatch.setattr(ahead, "_zero", zero)
            array.resize(0)
            assert prepared.ready == 0  # it was there as well
            array.resize(2)
            array.resize(0)
            assert prepared.ready == 2 * G


def test_what_is_prepared_leaves_descriptors_for_others_and_gives_way_to_a_growth_that_finds_none() -> None:
    """Each chunk of the host takes one: a quarter of those that there may be stays free."""
    code = f"""
import os, resource, vram, vram.errors
from vram.memory.ahead import Prepared
other = vram.zeros((0, 1 << 22), "int8", device="host", capacity=16, chunk="4MiB")
other.resize(1)
array = vram.zeros((8, 1 << 21), "int8", device="host", capacity=99, chunk="2MiB")
array[:] = 7
vram.prepare("host", "2MiB", chunk="2MiB").wait({SOON})
resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
prepared = vram.prepare("host", "1GiB", chunk="2MiB")
try:
    prepared.wait({SOON})
except vram.errors.CapacityError as error:
    print(str(error).partition(":")[0])
held = []
for _ in range(96 // 4 - 1):
    held.append(os.open("/dev/null", os.O_RDONLY))
ready, refill = prepared.ready, Prepared._refill
Prepared._refill = lambda self: None
array.resize(1)
Prepared._refill = refill
print(ready > 40 << 20, prepared.ready == ready, "nothing more is kept")
try:
    for _ in range(99):
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print(error.strerror)
other.resize(9)
print(prepared.ready, other.nbytes >> 22)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    said, kept, full, end = ran.stdout.splitlines()
    assert "less than a quarter of the 96 descriptors" in said
    assert kept == "True True nothing more is kept"
    assert full == os.strerror(errno.EMFILE)
    assert end == "0 9"


@in_turns(5)
@pytest.mark.usefixtures("nothing_ready")
def test_threads_that_prepare_trim_and_resize(arrays: list[vram.Array]) -> None:
    def prepare() -> None:
        chance = random.Random(0)
        for _ in range(60):
            if chance.randint(0, 1):
                vram.memory.trim()
            else:
                vram.prepare("host", chance.randint(1, 9) * G, chunk=G)

    def resize(seed: int) -> None:
        chance, array = random.Random(seed), arrays[seed]
        for _ in range(60):
            array.resize(chance.randint(0, 40_000))
            assert not array.numpy().any()
            array[:] = seed
            array.resize(0)

    for array in arrays:
        array.resize(0)
    race(prepare, *(functools.partial(resize, seed) for seed in (1, 2, 3)))
