"""Views: each holds a pin of its own (I6), in whatever order things are dropped (I1), and memory stays what it is."""

from __future__ import annotations

import ctypes
import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import pytest
from tests.support.threads import race

from vram import driver, lifetime
from vram.arrays import Array
from vram.arrays.views import RegionViews, close_when_unused, find
from vram.driver.protocol import Driver
from vram.errors import BusyError
from vram.memory import Region
from vram.spec import HOST

VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
BUFFERS = sys.version_info >= (3, 12)


@pytest.fixture
def host() -> Driver:
    return driver.get(HOST)


@pytest.fixture
def array(host: Driver) -> Iterator[Array]:
    with Array.create(host, HOST, (4, 6), "float32", capacity=100) as made:
        made[:] = np.arange(24).reshape(4, 6)
        yield made


def read_only(array: Array) -> Array:
    """A second array over the same memory, mapped for reading, whose region goes with it."""
    allocations, _ = array.region.segments(0, array.nbytes)
    region = Region.from_allocations(array.region.driver, allocations, nbytes=array.nbytes, managed=True)
    for allocation in allocations:
        allocation.close()
    made = Array(region, array.dtype, array.shape)
    close_when_unused(region)
    return made


VIEWS: dict[str, Callable[[Array], object]] = {
    "numpy": lambda array: array.numpy(),
    "slice": lambda array: array.numpy()[1:3, ::2],
    "slice of a slice": lambda array: array.numpy()[1:][:2].T[::2],
    "other type": lambda array: array.numpy().view("int32"),
    "reshaped": lambda array: array.numpy().reshape(-1),
    "full": lambda array: array.numpy(full=True)[:4],
    "memoryview": lambda array: array.memoryview(),
    "slice of a memoryview": lambda array: array.memoryview().cast("B")[4:90],
    "numpy of a memoryview": lambda array: np.asarray(array.memoryview())[1:],
    "asarray": lambda array: np.asarray(array),
    "array interface": lambda array: np.asarray(_Interface(array)),
    "from_dlpack": lambda array: np.from_dlpack(array),
    "capsule": lambda array: array.__dlpack__(),
    "array": lambda array: array[1:3],
    "view of a row": lambda array: array[2].numpy(),
}


class _Interface:
    """Offers nothing but numpy's array interface."""

    def __init__(self, array: Array) -> None:
        self.__array_interface__ = array.__array_interface__


# -- who keeps the memory -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", VIEWS)
def test_close_under_a_view_defers_to_its_end(host: Driver, kind: str) -> None:
    """I6, for every way to look: the memory goes with the view, not with the array, and not later."""
    array = Array.create(host, HOST, (4, 6), "float32", capacity=100)
    array.fill(1.5)
    region = array.region._claim.handle
    view = VIEWS[kind](array)
    with pytest.raises(BusyError):
        array.close(strict=True)
    if kind != "array":  # one that is open keeps the region object too
        array.close()
    else:
        del array
    assert region.is_open
    if isinstance(view, np.ndarray):
        np.testing.assert_array_equal(view.view("float32"), np.float32(1.5))
        if view.flags.writeable:  # numpy 1 calls all that comes by DLPack read-only
            view[...] = 2
    del view
    assert not region.is_open


def test_every_order_of_dropping(host: Driver) -> None:
    """I1: array, view, slice of the view and slice of the array, in all 24 orders."""
    for order in itertools.permutations(range(4)):
        array = Array.create(host, HOST, (4, 6), "float32")
        handle = array.region.handle
        view = array.numpy()
        things: list[object] = [array, view, view[1:, 2], array[2:]]
        del array, view
        for number in order:
            assert handle.is_open
            things[number] = None
        assert not handle.is_open


def test_cycles_are_collected_in_whatever_order(host: Driver) -> None:
    """I1 where finalizers run in an order of Python's own."""
    for order in itertools.permutations(range(4)):
        array = Array.create(host, HOST, (4, 6), "float32")
        handle = array.region.handle
        things = (array, array.numpy()[1:], array[1:], array.region)
        cycle: list[object] = [things[number] for number in order]
        cycle.append(cycle)
        del array, things, cycle
        gc.collect()
        assert not handle.is_open


def test_views_are_dropped_in_many_threads(array: Array) -> None:
    """I3: what a finalizer does waits for nobody."""

    def work() -> None:
        for _ in range(500):
            array.numpy()[1:]
            array[1:3]

    race(*[work] * 4)
    assert len(lifetime.live()) >= 1
    array.close(strict=True)


# -- what a view shows ----------------------------------------------------------------------------------------------
def test_views_show_the_same_bytes(array: Array) -> None:
    expected = np.arange(24, dtype="float32").reshape(4, 6)
    for view in (array.numpy(), np.asarray(array), np.from_dlpack(array), np.asarray(array.memoryview()), array.copy()):
        np.testing.assert_array_equal(view, expected)
    array.numpy()[1, 1] = 70
    assert np.from_dlpack(array)[1, 1] == 70
    assert array.memoryview()[1, 1] == 70


def test_the_array_interface_is_numpys_own(array: Array) -> None:
    ours, numpys = array.__array_interface__, array.numpy().__array_interface__
    assert {key: ours[key] for key in ("shape", "typestr", "version")} == {
        key: numpys[key] for key in ("shape", "typestr", "version")
    }


def test_array_protocol(array: Array) -> None:
    assert np.array(array).flags.owndata
    assert array.__array__(np.dtype("int8")).dtype == np.int8
    assert array.__array__().base is not None
    assert array.__array__(copy=True).flags.owndata
    with pytest.raises(ValueError, match="takes a copy"):
        array.__array__("int8", copy=False)


@pytest.mark.parametrize(("name", "shown"), [("bfloat16", "H"), ("float8_e4m3fn", "B"), ("datetime64[ns]", ("L", "Q"))])
def test_memoryview_of_what_has_no_letter(host: Driver, name: str, shown: str | tuple[str, ...]) -> None:
    with Array.create(host, HOST, (2, 3), name) as array:
        with array.memoryview() as view:
            assert view.format in shown
            assert view.shape == (2, 3)
            assert view.nbytes == array.nbytes
            assert not view.readonly


@pytest.mark.skipif(not BUFFERS, reason="the buffer protocol for Python classes begins with Python 3.12")
def test_buffer_protocol(array: Array, host: Driver) -> None:
    with memoryview(array) as view:  # type: ignore[arg-type]
        assert view.format == "f"
        assert view.shape == (4, 6)
        view[0, 1] = 44
        with pytest.raises(BusyError):
            array.close(strict=True)
    assert array.numpy()[0, 1] == 44
    assert bytes(array) == array.numpy().tobytes()  # type: ignore[call-overload]
    with Array.create(host, HOST, 3, "bfloat16") as other, pytest.raises(BufferError, match="no letter"):
        memoryview(other)  # type: ignore[arg-type]
    reader = read_only(array)
    with memoryview(reader) as view:  # type: ignore[arg-type]
        assert view.readonly
    with pytest.raises((BufferError, TypeError)):
        ctypes.c_char.from_buffer(reader)  # type: ignore[arg-type]
    reader.close()


@pytest.mark.skipif(BUFFERS, reason="Python 3.12 has the buffer protocol for Python classes")
def test_no_buffer_protocol_before_3_12(array: Array) -> None:
    assert not hasattr(array, "__buffer__")
    with pytest.raises(TypeError):
        memoryview(array)  # type: ignore[arg-type]


def test_full_shows_what_growth_will_bring(array: Array) -> None:
    view = array.numpy(full=True)
    assert view.shape == (100, 6) == array.capacity
    array.resize(100)
    array[99] = 5
    assert view[99].tolist() == [5] * 6
    with pytest.raises(BusyError, match="numpy view"):
        array.resize(99)
    del view
    array.resize(1)


# -- read-only ------------------------------------------------------------------------------------------------------
def test_freezing_switches_views_to_read_only(array: Array) -> None:
    """numpy then says what the kernel would answer with SIGSEGV."""
    views = [array.numpy(), array[1:].numpy(), array.numpy(full=True)]
    gone = array.numpy()
    del gone
    array.region.freeze()
    RegionViews.of(array.region).freeze_views()
    for view in (*views, array.numpy(), np.asarray(array)):
        assert not view.flags.writeable  # looked at first: were it not so, the write below would kill this process
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        assert view[0].min() >= 0
    assert array.readonly
    assert array.memoryview().readonly
    del view, views


def test_freezing_reaches_the_views_of_dropped_arrays(array: Array) -> None:
    view = array[2:].numpy()
    array.region.freeze()
    RegionViews.of(array.region).freeze_views()
    assert not view.flags.writeable


def test_read_only_cannot_be_switched_off(array: Array) -> None:
    reader = read_only(array)
    for view in (reader.numpy(), np.asarray(reader), reader.numpy()[1:]):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    assert reader.memoryview().readonly
    reader.close()


# -- DLPack ---------------------------------------------------------------------------------------------------------
def _capsule_name(capsule: object) -> str:
    return repr(capsule).split('"')[1]


def _capsule_dtype(capsule: object) -> tuple[int, int, int]:
    """Read code, bits and lanes as the header of DLPack 1.0 lays them out."""
    name = _capsule_name(capsule).encode()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    at = pointer(capsule, name) + (52 if name.endswith(b"versioned") else 20)
    code, bits = (ctypes.c_uint8 * 2).from_address(at)
    return code, bits, ctypes.c_uint16.from_address(at + 2).value


VERSIONS = [None, (0, 8), *([(1, 0), (1, 1), (9, 0)] if VERSIONED else [])]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_capsule_that_nobody_consumes_frees_its_pin(host: Driver, version: tuple[int, int] | None) -> None:
    array = Array.create(host, HOST, (4, 6), "float32")
    handle = array.region.handle
    capsule = array.__dlpack__(max_version=version)
    versioned = version is not None and version >= (1, 0)
    assert _capsule_name(capsule) == ("dltensor_versioned" if versioned else "dltensor")
    with pytest.raises(BusyError, match="DLPack capsule"):
        array.close(strict=True)
    array.close()
    assert handle.is_open
    del capsule
    assert not handle.is_open


@pytest.mark.parametrize("version", VERSIONS)
def test_a_capsule_that_is_consumed_frees_it_with_its_consumer(host: Driver, version: tuple[int, int] | None) -> None:
    array = Array.create(host, HOST, (4, 6), "float32")
    handle = array.region.handle
    array.fill(3)

    class Handed:
        def __init__(self, capsule: object) -> None:
            self.capsule = capsule

        def __dlpack__(self, **_: object) -> object:
            return self.capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    handed = Handed(array.__dlpack__(max_version=version))
    view = np.from_dlpack(handed)
    assert _capsule_name(handed.capsule).startswith("used")
    array.close()
    del handed, array
    assert handle.is_open
    assert view.min() == 3
    del view
    assert not handle.is_open


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("name", "code", "bits"),
    [
        ("bfloat16", 4, 16),
        ("float8_e4m3fn", 10, 8),
        ("float8_e5m2", 12, 8),
        ("float8_e8m0fnu", 14, 8),
        ("float32", 2, 32),
    ],
)
def test_what_numpy_cannot_say_is_said(
    host: Driver, name: str, code: int, bits: int, version: tuple[int, int] | None
) -> None:
    if not hasattr(np, name) and not hasattr(ml_dtypes, name):
        pytest.skip(f"this ml_dtypes has no {name}")
    with Array.create(host, HOST, (2, 3), name) as array:
        assert _capsule_dtype(array.__dlpack__(max_version=version)) == (code, bits, 1)


@pytest.mark.parametrize("name", ["S4", "datetime64[s]", "int4", "float4_e2m1fn", "V3", ">f4", "longdouble"])
def test_what_dlpack_cannot_say_is_a_buffer_error(host: Driver, name: str) -> None:
    with Array.create(host, HOST, (2, 3), name) as array, pytest.raises(BufferError):
        array.__dlpack__()


def test_read_only_memory_goes_only_to_who_can_be_told(array: Array) -> None:
    reader = read_only(array)
    with pytest.raises(BufferError, match=r"readonly|read-only"):
        reader.__dlpack__()
    if VERSIONED:
        assert not np.from_dlpack(reader).flags.writeable
    reader.close()


def test_dlpack_arguments(array: Array) -> None:
    assert array.__dlpack_device__() == (1, 0)
    assert array.__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError, match="to_host"):
        array.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="stream"):
        array.__dlpack__(stream=1)
    copy = array.__dlpack__(copy=True)
    array.close(strict=True)
    del copy


def test_capsules_at_interpreter_exit() -> None:
    """A consumer may let go after our modules are gone: the deleter must not be a callback of ours."""
    code = """
import sys, numpy as np
from vram import driver
from vram.arrays import Array
from vram.spec import HOST
class Late:
    def __del__(self, np=np):
        self.view.sum()
a = Array.create(driver.get(HOST), HOST, (4, 6), "bfloat16")
late = Late(); late.view = np.asarray(a).view("uint16"); late.me = late; late.capsule = a.__dlpack__()
sys.late = late
sys.modules["keeps"] = [np.from_dlpack(Array.create(driver.get(HOST), HOST, 3, "int8")), a.__dlpack__()]
"""
    done = subprocess.run([sys.executable, "-X", "dev", "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


# -- recognizing our own --------------------------------------------------------------------------------------------
def _address(view: object) -> int:
    return int(np.asarray(view).__array_interface__["data"][0])


@pytest.mark.parametrize("kind", ["numpy", "slice", "slice of a slice", "from_dlpack", "memoryview", "view of a row"])
def test_a_view_is_found_as_ours(array: Array, kind: str) -> None:
    view = VIEWS[kind](array)
    found = find(_address(view), np.asarray(view).nbytes)
    assert found is not None
    region, offset = found
    assert region is array.region
    assert offset == _address(view) - array.address


def test_what_is_not_ours_is_not_found(array: Array) -> None:
    other = np.zeros(10)
    assert find(_address(other), other.nbytes) is None
    assert find(array.address - 1, 1) is None
    assert find(array.address, array.region.nbytes + 1) is None
    assert find(array.address + array.region.nbytes, 1) is None
    assert find(0, 0) is None
    assert find(2**63, 1) is None


def test_an_address_that_is_used_again_is_the_new_regions(host: Driver) -> None:
    seen = set()
    for _ in range(200):
        with Array.create(host, HOST, 10, "int8") as array:
            found = find(array.address, 10)
            assert found is not None
            assert found[0] is array.region
            seen.add(array.address)
    assert all(find(address, 1) is None for address in seen)


def test_let_go_closes_with_the_last_array(host: Driver) -> None:
    region = Region.create(HOST, driver=host, capacity="2MiB", nbytes=8)
    first, last = Array(region, "int8", 4), Array(region, "int8", 4, offset=4)
    close_when_unused(region)
    first.close()
    assert not region.is_closed
    last.close()
    assert region.is_closed
    alone = Region.create(HOST, driver=host, capacity="2MiB")
    close_when_unused(alone)
    assert alone.is_closed
