"""Arrays: shape and type on a region; growth at one address (I5), busy shrinks (I6), and what is refused."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.deadlines import SOON
from tests.support.faulty_driver import FaultyDriver
from tests.support.forked import end_of
from tests.support.keeper_here import later
from tests.support.samples import is_whole
from tests.support.threads import race

import vram
from vram import driver
from vram.arrays import Array
from vram.driver.protocol import Driver, HostMemory
from vram.errors import (
    BusyError,
    CapacityError,
    ClosedError,
    ForkedError,
    RangeError,
    ReadOnlyError,
    UnsupportedError,
    UsageError,
)
from vram.memory import Region
from vram.spec import HOST, Access

MIB = 1 << 20


@pytest.fixture
def host() -> Driver:
    return driver.get(HOST)


@pytest.fixture
def vectors(host: Driver) -> Iterator[Array]:
    """Four rows of many that are possible; a row is 1.5 KiB, a chunk 2 MiB."""
    with Array.create(host, HOST, (4, 384), "float32", capacity=(1_000_000, 384), chunk="2MiB") as array:
        yield array


# -- what it is -----------------------------------------------------------------------------------------------------
def test_what_it_says_of_itself(vectors: Array) -> None:
    assert vectors.shape == (4, 384)
    assert (vectors.ndim, vectors.size, vectors.itemsize, vectors.nbytes, len(vectors)) == (2, 1536, 4, 6144, 4)
    assert vectors.dtype == np.float32
    assert vectors.capacity == (1_000_000, 384)
    assert vectors.device == HOST
    assert vectors.address == vectors.region.address
    assert not vectors.readonly
    assert repr(vectors) == f"<Array float32 (4, 384) host {vectors.address:#x} 6 KiB rw [0 0 0 ... 0 0 0]>"


@pytest.mark.parametrize("shape", [(), (0,), (3,), (0, 4), (2, 0), (2, 3, 1)])
def test_every_type_in_every_shape_is_zero_at_first(host: Driver, shape: tuple[int, ...]) -> None:
    for name in ("bool", "int8", "float16", "complex128", "longdouble", "datetime64[s]", "S5", "U3", "V6"):
        _check_zeros(host, name, shape)


def _check_zeros(host: Driver, name: str, shape: tuple[int, ...]) -> None:
    with Array.create(host, HOST, shape, name) as array:
        view = array.numpy()
        assert view.shape == shape == array.shape
        assert view.dtype == np.dtype(name)
        assert view.flags.writeable
        assert view.tobytes() == bytes(array.nbytes)
        assert array.nbytes == view.nbytes
        assert array.address


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4", "complex32"])
def test_types_that_numpy_lacks(host: Driver, name: str) -> None:
    if not hasattr(ml_dtypes, name):
        pytest.skip(f"this ml_dtypes has no {name}")
    with Array.create(host, HOST, (2, 3), name) as array:
        view = array.numpy()
        view[:] = np.asarray([[0.5, 1, 2], [2, 1, 0.5]]).astype(view.dtype)
        assert view.dtype == np.dtype(getattr(ml_dtypes, name)) == array.dtype
        np.testing.assert_array_equal(array.numpy(), view)
        np.testing.assert_array_equal(np.asarray(array), view)
        assert np.asarray(array).dtype == view.dtype


# -- arguments ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shape", "error", "says"),
    [
        (-1, UsageError, "not negative"),
        ((3, -2), UsageError, "not negative"),
        (True, UsageError, "not negative"),
        ("33", UsageError, "sequence of ints"),
        (2.5, UsageError, "made of ints"),
        ((2, 2.5), UsageError, "made of ints"),
        (None, UsageError, "made of ints"),
        ((1,) * 33, UsageError, "at most 32"),
        ((2**40, 2**40), RangeError, "addresses end"),
        (2**62, RangeError, "addresses end"),
        ((2**62, 2**62, 0), RangeError, "addresses end"),
        ((0, 2**62), RangeError, "addresses end"),
        ((2**62, 0), RangeError, "addresses end"),
    ],
)
def test_shapes_that_cannot_be(host: Driver, shape: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Array.create(host, HOST, shape, "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capacity", "error", "says"),
    [
        ((10, 5), UsageError, r"write \(10, 4\)"),
        ((10,), UsageError, "first dimension"),
        ((), UsageError, "first dimension"),
        ((2, 4), CapacityError, "less than the 3"),
        (2, CapacityError, "less than the 3"),
        ("10", UsageError, "number of rows"),
        ((2**60, 4), RangeError, "addresses end"),
    ],
)
def test_capacities_that_cannot_be(host: Driver, capacity: object, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Array.create(host, HOST, (3, 4), "float32", capacity=capacity)  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [np.zeros(2), "10", 1.5, True])
def test_a_capacity_on_a_region_is_a_number_of_rows(host: Driver, capacity: object) -> None:
    with Region.create(HOST, driver=host, capacity="4MiB", nbytes=100) as region:
        with pytest.raises(UsageError, match="the capacity must be made of ints"):
            Array(region, "int32", (2,), capacity=capacity)  # type: ignore[arg-type]


def test_a_shape_that_no_empty_array_has_is_refused_on_memory_that_is_there(host: Driver) -> None:
    with Array.create(host, HOST, 4, "uint8") as array:
        with pytest.raises(RangeError, match="addresses end"):
            Array(array.region, "uint8", (2**62, 2**62, 0))
        with Array(array.region, "uint8", (2**62, 0)) as empty:
            assert empty.numpy().shape == (2**62, 0)


def test_an_array_without_dimensions_cannot_grow(host: Driver) -> None:
    with pytest.raises(UsageError, match="cannot grow"):
        Array.create(host, HOST, (), "float32", capacity=3)
    with Array.create(host, HOST, (), "float32") as array:
        with pytest.raises(UsageError, match="no dimension"):
            array.resize(2)
        with pytest.raises(UsageError, match="no length"):
            len(array)


def test_an_array_on_a_region_lies_within_it(host: Driver) -> None:
    with Region.create(HOST, driver=host, capacity="4MiB", nbytes=100) as region:
        with Array(region, "int8", 40, offset=60) as array:
            assert array.address == region.address + 60
            assert array.capacity == (40,)
        for shape, offset in ((41, 60), (1, 100), (0, 101), (1, -1)):
            with pytest.raises(RangeError):
                Array(region, "int8", shape, offset=offset)
            with pytest.raises(RangeError):
                Array(region, "int8", shape, offset=offset, owns_growth=True)
        with pytest.raises(CapacityError):
            Array(region, "int8", 40, capacity=39)
        with pytest.raises(CapacityError):
            Array(region, "int8", 40, capacity=4 * MIB + 1)


# -- growing and shrinking ------------------------------------------------------------------------------------------
def test_growing_keeps_address_contents_and_views(vectors: Array) -> None:
    """I5: an address never changes; I6: growing under live views is fine."""
    address, view = vectors.address, vectors.numpy()
    view[:] = 7
    for rows in (5, 4096, 100_000):
        vectors.resize(rows)
        assert vectors.shape == (rows, 384)
        assert vectors.address == address
        assert vectors.numpy()[:4].min() == 7
        assert not vectors.numpy()[4:].any()
    assert view.shape == (4, 384)
    view[0, 0] = 8
    assert vectors.numpy()[0, 0] == 8


def test_from_nothing_to_nothing(host: Driver) -> None:
    with Array.create(host, HOST, (0, 384), "float32", capacity=10_000) as array:
        assert array.numpy().shape == (0, 384)
        assert array.region.mapped == 0
        array.resize(10_000)
        array.fill(1)
        array.resize(0)
        assert array.region.mapped == 0
        assert array.numpy().shape == (0, 384)


def test_shrinking_below_a_slice_of_a_view_is_busy(vectors: Array) -> None:
    """I6: a slice of a view counts, and it counts as the view it was taken from."""
    part = vectors.numpy()[1:3, ::2].T
    with pytest.raises(BusyError):
        vectors.resize(2)
    del part
    vectors.resize(2)


def test_shrinking_beside_a_view_of_what_stays(vectors: Array) -> None:
    vectors.resize(10_000)
    first = vectors[:4].numpy()
    first[:] = 5
    vectors.resize(4)
    assert vectors.region.mapped == 2 * MIB
    assert first.min() == 5


def test_two_threads_that_resize_and_look(host: Driver) -> None:
    """No view ever reaches beyond what is mapped: that would be a SIGBUS, not an exception (I11)."""
    stop = threading.Event()

    with Array.create(host, HOST, (1, 64), "int8", capacity=4 * MIB // 64 * 8, chunk="2MiB") as array:

        def change(seed: int) -> None:
            rng = np.random.default_rng(seed)
            for rows in rng.integers(0, array.capacity[0], 150 if is_whole() else 30):
                with contextlib.suppress(BusyError):
                    array.resize(int(rows))

        def look() -> None:
            while not stop.is_set():
                view = array.numpy()
                if len(view):
                    view[0, 0] = view[-1, -1]
                del view

        looker, came = later(look)
        try:
            race(lambda: change(1), lambda: change(2))
        finally:
            stop.set()
            looker.join(SOON)
    assert came == [None]


# -- parts ----------------------------------------------------------------------------------------------------------
@given(st.slices(7) | st.integers(-9, 9))
def test_parts_are_what_numpy_says(key: slice | int) -> None:
    with Array.create(driver.get(HOST), HOST, (7, 3), "int32") as array:
        array[:] = np.arange(21).reshape(7, 3)
        try:
            expected = array.numpy()[key]
        except IndexError:
            with pytest.raises(RangeError):
                array[key]
            return
        if isinstance(key, slice) and key.indices(7)[2] != 1:
            with pytest.raises(UsageError, match=r"use \.numpy\(\)"):
                array[key]
            return
        with array[key] as part:
            np.testing.assert_array_equal(part.numpy(), expected)
            assert part.shape == expected.shape
            if expected.size:
                assert part.address == expected.__array_interface__["data"][0]


@pytest.mark.parametrize(
    "key", [(0, 0), ..., None, "a", 1.5, [0, 1], np.array([True] * 4), slice("a", None), slice(0, 4, 2)]
)
def test_other_indexing_is_numpys(vectors: Array, key: object) -> None:
    with pytest.raises(UsageError, match=r"use \.numpy\(\)"):
        vectors[key]  # type: ignore[index]


def test_a_copy_is_numpys_own(vectors: Array) -> None:
    made = vectors.copy()
    vectors.fill(1)
    assert not made.any()
    assert made.flags.owndata
    assert vectors.to_host().all()


def test_read_only_memory_is_refused_before_it_is_touched(host: Driver) -> None:
    with Array.create(host, HOST, 4, "int8") as array:
        array.fill(3)
        allocations, _ = array.region.segments(0, 4)
        with Region.from_allocations(host, allocations, nbytes=4) as region, Array(region, "int8", 4) as reader:
            assert reader.readonly
            assert repr(reader).endswith("4 B r [3 3 3 3]>")
            assert reader.numpy().tolist() == [3] * 4
            assert not reader.numpy().flags.writeable
            for write in (lambda: reader.fill(1), lambda: reader.__setitem__(0, 1)):
                with pytest.raises(ReadOnlyError, match="cow"):
                    write()
            with pytest.raises(ValueError, match="WRITEABLE"):
                reader.numpy().flags.writeable = True
        for allocation in allocations:
            allocation.close()


def test_memory_without_access_is_not_shown(host: Driver) -> None:
    with Region.create(HOST, driver=host, capacity="2MiB", nbytes=4, access=Access.NONE) as region:
        with Array(region, "int8", 4) as array, pytest.raises(UsageError, match="without access"):
            array.numpy()


# -- closing --------------------------------------------------------------------------------------------------------
def test_a_closed_array_says_so(vectors: Array) -> None:
    vectors.close()
    vectors.close()  # I2: idempotent
    assert vectors.is_closed
    for use in (
        vectors.numpy,
        vectors.memoryview,
        vectors.copy,
        vectors.__dlpack__,
        lambda: vectors[0],
        lambda: vectors.fill(1),
        lambda: vectors.resize(1),
        lambda: vectors.address,
        lambda: vectors.region,
        vectors.__enter__,
    ):
        with pytest.raises(ClosedError, match="was closed"):
            use()
    assert vectors.shape == (4, 384)


def test_arrays_on_a_region_outlive_it(host: Driver) -> None:
    region = Region.create(HOST, driver=host, capacity="2MiB", nbytes=8)
    array = Array(region, "int8", 8)
    region.close()
    array.fill(1)
    part = array[2:]
    array.close()
    assert part.numpy().all()
    part.close()


def test_strict_names_what_looks(vectors: Array) -> None:
    """I2: close(strict=True) changes nothing while there are other claims."""
    view, part = vectors.numpy(), vectors[0]
    with pytest.raises(BusyError, match="numpy view") as caught:
        vectors.close(strict=True)
    assert len(caught.value.holders) == 2
    del caught, view
    with pytest.raises(BusyError, match="slice"):
        vectors.close(strict=True)
    part.close()
    assert not vectors.is_closed
    vectors.close(strict=True)
    assert vectors.is_closed


def test_strict_on_a_part_looks_at_that_part(vectors: Array) -> None:
    first, last = vectors[0], vectors[3]
    view = last.numpy()
    with pytest.raises(BusyError, match="numpy view"):
        last.close(strict=True)
    first.close(strict=True)
    del view
    last.close(strict=True)


# -- elsewhere ------------------------------------------------------------------------------------------------------
def test_plain_pickle_is_refused_with_the_ways_that_work(vectors: Array) -> None:
    with pytest.raises(UsageError, match=r"publish the array .* Queue"):
        pickle.dumps(vectors)


def test_provenance_decides_how_it_pickles(host: Driver) -> None:
    class Known:
        published = True

        def reduce(self, array: Array) -> tuple[object, ...] | None:
            return (tuple, (array.shape,)) if self.published else None

    known = Known()
    region = Region.create(HOST, driver=host, capacity="2MiB", nbytes=8)
    with region, Array(region, "int8", (2, 4), provenance=known) as array:
        assert pickle.loads(pickle.dumps(array)) == (2, 4)
        assert pickle.loads(pickle.dumps(array[1:])) == (1, 4)
        known.published = False
        with pytest.raises(UsageError):
            pickle.dumps(array)


def test_identity_and_hash(vectors: Array) -> None:
    assert vectors == vectors
    assert vectors != vectors[:]
    assert len({vectors, vectors}) == 1


def test_memory_that_the_cpu_cannot_address(host: Driver) -> None:
    far: Any = FaultyDriver(host, hide=[HostMemory])
    with Array.create(far, HOST, (2, 3), "int16") as array:
        far.copy_in(array.address, memoryview(np.arange(6, dtype="int16")))  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match=r"\.to_host\(\)"):
            array.numpy()
        with pytest.raises(BufferError):
            array.__dlpack_device__()
        assert array.copy().tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_views_stay_and_arrays_are_inert(vectors: Array) -> None:
    """I7: the child's handles are inert; inherited views stay readable."""
    view = vectors.numpy()
    view[:] = 6

    def work() -> int:
        assert view.min() == 6
        assert vectors.shape == (4, 384)
        for use in (vectors.numpy, lambda: vectors[0], lambda: vectors.resize(9), lambda: vectors.fill(1)):
            with pytest.raises(ForkedError, match="belongs to the parent"):
                use()
        vectors.close()
        return int(view.min() == 6)

    assert end_of(work) == 1
    assert vectors.numpy().min() == 6


def test_what_numpy_has_and_an_array_has_not_is_said() -> None:
    with vram.zeros(3, "float32", device="host") as array:
        with pytest.raises(AttributeError, match=r"no attribute 'mean': it is memory alone; array\.numpy\(\)"):
            array.mean()  # type: ignore[attr-defined]
        with pytest.raises(AttributeError, match=r"no attribute 'maen'$"):
            array.maen()  # type: ignore[attr-defined]
        assert not hasattr(array, "__array_struct__")
