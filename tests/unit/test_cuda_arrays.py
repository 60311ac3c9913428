"""Arrays in GPU memory, on the stand-in: what they say of themselves, and what is copied in and out."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from tests.support.order import undone_until_waited_for
from tests.support.raw_cuda import CudaStranger

import standin
import vram
from vram import driver as drivers
from vram.arrays import Array
from vram.arrays.dlpack import _python, _tensor_in, _Versioned
from vram.arrays.dlpack import capsule as dlpack_capsule
from vram.errors import BusyError, ProtocolError, ReadOnlyError, UnsupportedError, UsageError
from vram.memory import Received, Region
from vram.spec import Access, Location

pytestmark = pytest.mark.standin
GPU = Location("cuda", 0)
OTHER = Location("cuda", 1)


def made(shape: object = (8, 4), dtype: object = "int32", location: Location = GPU, **options: object) -> Array:
    return Array.create(drivers.get(location), location, shape, dtype, **options)  # type: ignore[arg-type]


@pytest.fixture
def array() -> Iterator[Array]:
    with made() as a:
        a[:] = np.arange(32).reshape(8, 4)
        yield a


@pytest.fixture
def stream() -> Iterator[int]:
    driver = drivers.get(GPU)
    found = driver.stream_create(GPU)
    yield found
    driver.stream_destroy(found)


def test_what_it_is(array: Array) -> None:
    assert (array.shape, array.dtype, array.nbytes, array.device) == ((8, 4), np.dtype("int32"), 128, GPU)
    assert repr(array).startswith("<Array int32 (8, 4) cuda:0 0x")
    assert array.address % (2 << 20) == 0


def test_a_device_named_by_uuid_is_the_same_device() -> None:
    uuid = drivers.get(OTHER).device_info(OTHER).uuid
    with vram.zeros(4, device=f"cuda:{uuid}") as a:
        assert (a.device, a.__dlpack_device__()) == (OTHER, (2, 1))
        assert vram.asarray(a, device="cuda:1") is a
    with made(4, location=Location("cuda", uuid)) as a:
        assert a.device == OTHER


def test_memory_of_another_gpu_than_was_said_is_refused() -> None:
    """S7: what a peer says of its memory is compared with what the driver says."""
    driver = drivers.get(GPU)
    with made() as a:
        (allocation,), _ = a.region.segments(0, a.nbytes)
        with pytest.raises(ProtocolError, match="not on cuda:1"):
            Region.from_allocations(driver, [Received(allocation.export(), allocation.nbytes)], location=OTHER)


def test_s10_all_devices_that_may_work_on_it_are_waited_for() -> None:
    control, driver = standin.Standin(), drivers.get(GPU)
    with Region.create(GPU, driver=driver, capacity=1 << 21, nbytes=1 << 21, users=[OTHER, GPU]) as region:
        driver.mem_info(OTHER), driver.mem_info(GPU)  # now both have contexts
        control.clear()
        region.synchronize()
        assert control.calls("cuCtxSynchronize") == 2


def test_copies_between_gpus_leave_the_rights_as_they_were() -> None:
    driver = drivers.get(GPU)
    with vram.asarray(np.arange(100), device=GPU) as a:
        for failing in (None, "cuMemcpyDtoDAsync"):
            control = standin.Standin()
            with control.failing(failing or "cuCtxCreate", 1, 2):
                if failing:
                    with pytest.raises(vram.errors.OutOfMemoryError):
                        vram.asarray(a, device=OTHER)
                else:
                    with vram.asarray(a, device=OTHER) as b:
                        assert (b.to_host() == np.arange(100)).all()
            assert driver.mem_get_access(a.address, OTHER) == Access.NONE
            assert driver.mem_get_access(a.address, GPU) == Access.READ_WRITE


def test_rows_are_written_from_the_host_and_read_back(array: Array) -> None:
    assert (array.to_host() == np.arange(32).reshape(8, 4)).all()
    array[2] = 7
    array[3:5] = [[1, 2, 3, 4]]
    array[-1] = np.array([9.0, 8, 7, 6])
    wanted = np.arange(32, dtype="int32").reshape(8, 4)
    wanted[2], wanted[3:5], wanted[-1] = 7, [1, 2, 3, 4], [9, 8, 7, 6]
    assert (array.to_host() == wanted).all()
    array[2:3].fill(-1)
    assert (array[2].to_host() == -1).all()
    array.fill(3)
    assert (array.to_host() == 3).all()
    array[...] = wanted
    assert (array.to_host() == wanted).all()
    array[4:4] = 5
    assert (array.to_host() == wanted).all()


def test_large_values_are_written_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vram.arrays.gpu._AT_ONCE", 1000)
    with made((1000, 3), "float64") as a:
        a.fill(2.5)
        assert (a.to_host() == 2.5).all()
        a[:] = np.asfortranarray(np.arange(3000.0).reshape(1000, 3))
        assert (a.to_host() == np.arange(3000.0).reshape(1000, 3)).all()


def test_values_and_indices_that_do_not_fit_are_refused(array: Array) -> None:
    before = array.to_host()
    for key, value in ((0, [1, 2]), (slice(None), "text"), ((0, 1), 5), (None, 1), (9, 1), (slice(0, 4, 2), 1)):
        with pytest.raises(UsageError):
            array[key] = value  # type: ignore[index]
    assert (array.to_host() == before).all()


def test_what_the_cpu_cannot_see_names_what_can(array: Array) -> None:
    with pytest.raises(UnsupportedError, match="to_host"):
        array.numpy()
    with pytest.raises(UnsupportedError, match="to_host"):
        np.asarray(array)
    with pytest.raises(UnsupportedError, match="to_host"):
        array.memoryview()


def test_shrinking_waits_for_all_work_or_for_the_event_that_is_named(stream: int) -> None:
    control, driver = standin.Standin(), drivers.get(GPU)
    control.defer()
    event = driver.event_create(GPU)
    try:
        with made((8, 1 << 19), "int32", capacity=8, chunk="2MiB") as a:
            for after in (None, event, SimpleNamespace(cuda_event=event)):
                a.resize(8)
                control.clear()
                driver.fill_async(a.address, 1, a.nbytes, stream)
                driver.event_record(event, stream)
                a.resize(4, after=after)
                assert control.illegal() == 0, "the fill was done before its memory went"
                assert control.calls("cuEventSynchronize") == (after is not None)
                assert bool(control.calls("cuCtxSynchronize")) == (after is None)
            with pytest.raises(UsageError, match="no CUDA event"):
                a.resize(2, after="soon")
            assert a.shape[0] == 4
            control.clear()
            driver.fill_async(a.address, 1, a.nbytes, stream)
        assert control.illegal() == 0, "closing waits, too"
    finally:
        control.defer(False)
        driver.event_destroy(event)


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("version", [None, (1, 0)])
def test_capsules_say_gpu(dtype: str, version: tuple[int, int] | None) -> None:
    with made((3, 5), dtype, location=OTHER) as a:
        assert a.__dlpack_device__() == (2, 1)
        capsule = a.__dlpack__(stream=-1, max_version=version)
        tensor = _tensor_in(capsule)
        assert (tensor.data, tensor.device_type, tensor.device_id) == (a.address, 2, 1)
        assert list((ctypes.c_int64 * 2).from_address(tensor.shape)) == [3, 5]
        assert tensor.bits * tensor.lanes == 8 * a.itemsize
        a.close()
        driver = drivers.get(OTHER)
        assert driver.live().mappings == 1, "the capsule keeps it (I6)"
        del capsule, tensor
        gc.collect()
        assert driver.live().mappings == 0


def test_capsules_of_read_only_memory_say_so() -> None:
    driver = drivers.get(GPU)
    with Region.create(GPU, driver=driver, capacity=1 << 21, nbytes=1 << 21, access=Access.READ) as region:
        with Array(region, "int8", 100) as a:
            with pytest.raises(BufferError):
                a.__dlpack__(stream=-1)
            capsule = a.__dlpack__(stream=-1, max_version=(1, 0))
            versioned = _Versioned.from_address(_python.PyCapsule_GetPointer(capsule, b"dltensor_versioned"))
            assert versioned.flags & 1
            assert a.__cuda_array_interface__["data"] == (a.address, True)
            with pytest.raises(ReadOnlyError):
                a[0] = 1
            with pytest.raises(ReadOnlyError):
                a.fill(1)
            del capsule, versioned


def test_capsules_for_another_device_or_as_copies_are_refused(array: Array) -> None:
    with pytest.raises(BufferError, match="to_host"):
        array.__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError):
        array.__dlpack__(dl_device=(2, 1))
    with pytest.raises(BufferError, match="copy"):
        array.__dlpack__(copy=True)


def test_the_cuda_array_interface() -> None:
    array = made()
    said = array.__cuda_array_interface__
    assert said == {
        "version": 3, "shape": (8, 4), "typestr": "<i4", "data": (array.address, False), "strides": None,
        "stream": None,
    }  # fmt: skip
    assert array[2:].__cuda_array_interface__["data"] == (array.address + 32, False)
    array.close()
    del array
    with made((0, 3)) as empty:
        assert empty.__cuda_array_interface__["data"][0] == 0
    with made(4, "bfloat16") as a:
        assert not hasattr(a, "__cuda_array_interface__")
    with Array.create(drivers.get(Location("host")), "host", 4, "int8") as a:
        assert not hasattr(a, "__cuda_array_interface__")


def test_i6_who_took_the_interface_keeps_the_memory_by_keeping_the_array() -> None:
    a = made()
    consumer = SimpleNamespace(owner=a, said=a.__cuda_array_interface__)
    with pytest.raises(BusyError, match="CUDA array interface"):
        a.close(strict=True)
    a.close()
    driver = drivers.get(GPU)
    assert driver.live().mappings == 1
    del a, consumer
    gc.collect()
    assert driver.live().mappings == 0


def test_work_under_way_is_waited_for_on_the_gpu(stream: int) -> None:
    control, array = standin.Standin(), made()
    array.stream = SimpleNamespace(cuda_stream=stream)
    assert array.stream == stream
    assert array.__cuda_array_interface__["stream"] == stream
    control.clear()
    array.__dlpack__(stream=1, max_version=(1, 0))
    assert (control.calls("cuEventRecord"), control.calls("cuStreamWaitEvent")) == (1, 1)
    control.clear()
    array.__dlpack__(stream=-1, max_version=(1, 0))
    array.__dlpack__(stream=stream, max_version=(1, 0))
    assert control.calls("cuStreamWaitEvent") == 0
    array.stream = None
    array.__dlpack__(stream=1, max_version=(1, 0))
    assert control.calls("cuStreamWaitEvent") == 0
    assert array.__cuda_array_interface__["stream"] is None
    array.close()


def test_a_copy_to_the_host_waits_for_the_stream(stream: int) -> None:
    driver = drivers.get(GPU)
    with undone_until_waited_for(), made(100, "uint8") as a:
        driver.fill_async(a.address, 7, 100, stream)
        a.stream = stream
        assert (a.to_host() == 7).all()


@pytest.mark.parametrize("stream", [0, -1, True, "legacy", SimpleNamespace()])
def test_what_is_no_stream_is_refused(array: Array, stream: object) -> None:
    if isinstance(stream, SimpleNamespace):
        array.stream = SimpleNamespace(ptr=0)  # CuPy's null stream: the legacy default
        assert array.stream == 1
        return
    with pytest.raises(UsageError):
        array.stream = stream


def test_memory_of_the_host_has_no_streams() -> None:
    with Array.create(drivers.get(Location("host")), "host", 4, "int8") as a:
        with pytest.raises(UsageError, match="no streams"):
            a.stream = 1
        assert a.stream is None


class Speaker:
    """An array of a library that speaks DLPack alone."""

    def __init__(self, array: Array, **changes: object) -> None:
        self.array = array
        self.changes = changes

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: object) -> object:
        if self.changes.get("old") and options:
            raise TypeError("max_version is not known")
        capsule = self.array.__dlpack__(stream=stream, **options)  # type: ignore[arg-type]
        for name, value in self.changes.items():
            if name != "old":
                setattr(_tensor_in(capsule), name, value)
        return capsule


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex64", "bfloat16", "float8_e4m3fn"])
def test_dlpack_comes_in_from_the_gpu(dtype: str, old: bool) -> None:
    with made((3, 4), dtype) as a:
        a[:] = np.arange(12).reshape(3, 4).astype(a.dtype)
        with vram.asarray(Speaker(a, old=old), device="cuda:0") as b:
            assert (b.dtype, b.shape) == (a.dtype, a.shape)
            assert b.address != a.address
            assert (b.to_host() == a.to_host()).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"code": 77}, "not known"), ({"lanes": 4}, "not known"), ({"device_type": 1}, "device type 1")],
)
def test_what_dlpack_says_must_make_an_array(changes: dict[str, object], says: str) -> None:
    with made((3, 4), "float32") as a, pytest.raises(UsageError, match=says):
        vram.asarray(Speaker(a, **changes), device="cuda:0")
    gc.collect()


def test_what_a_capsule_calls_read_only_is_a_read_only_source() -> None:
    """Those from before versions cannot say it, and read-only memory goes into none of them."""
    from vram.arrays.sources import as_source

    driver = drivers.get(GPU)
    for access in (Access.READ, Access.READ_WRITE):
        with Region.create(GPU, driver=driver, capacity=1 << 21, nbytes=1 << 21, access=access) as region:
            with Array(region, "int8", 100) as a:
                assert as_source(Speaker(a)).readonly is (access is Access.READ)
                if access is Access.READ_WRITE:
                    assert as_source(Speaker(a, old=True)).readonly is False


class OfAnother:
    """Memory of another library, behind a capsule that says whether it may be written."""

    def __init__(self, address: int, count: int, readonly: bool) -> None:
        said = {"version": 3, "data": (address, readonly), "shape": (count,), "typestr": "<f4"}
        self.view = np.asarray(SimpleNamespace(__array_interface__=said))

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None) -> object:
        return dlpack_capsule(self.view, self.view.dtype, max_version=max_version, gpu=0)


def test_memory_of_others_that_a_capsule_calls_read_only_is_not_written() -> None:
    with CudaStranger() as stranger:
        base = stranger.legacy(4096)
        with vram.share(OfAnother(base, 10, False)) as first:
            first[...] = 1
            with vram.share(OfAnother(base, 10, True)) as shared:
                assert shared.readonly
                with pytest.raises(ReadOnlyError):
                    shared[...] = 2
                assert shared.to_host().tolist() == [1] * 10
            assert not first.readonly


def test_s10_what_is_written_from_the_host_comes_after_what_the_stream_writes(stream: int) -> None:
    driver = drivers.get(GPU)
    with undone_until_waited_for(), made((4, 4), "uint8") as a:
        driver.fill_async(a.address, 1, 16, stream)
        a.stream = stream
        a.fill(2)
        assert (a.to_host() == 2).all()


def test_i4_users_that_do_not_exist_are_refused_before_anything_is_made() -> None:
    driver, before = drivers.get(GPU), standin.Standin().live()
    with pytest.raises(UsageError, match="cuda:9"):
        Region.create(GPU, driver=driver, capacity="4MiB", nbytes="4MiB", users=["cuda:0", "cuda:9"])
    assert standin.Standin().live() == before


def test_a_stream_of_any_gpu_that_may_access_it_is_waited_for(stream: int) -> None:
    driver = drivers.get(GPU)
    with Region.create(GPU, driver=driver, capacity=1 << 21, nbytes=1 << 21, users=[OTHER, GPU]) as region:
        with Array(region, "int8", 100) as a:
            a.stream = stream  # of the second
            a.__dlpack__(stream=1, max_version=(1, 0))
            a.stream = 12345
            with pytest.raises(UsageError, match=r"array\.stream"):
                a.__dlpack__(stream=1, max_version=(1, 0))


@pytest.mark.parametrize("word", ["ptr", "cuda_stream", "__cuda_stream__"])
@pytest.mark.parametrize("value", [None, "abc", 5.5j, (0,)])
def test_objects_that_only_look_like_streams_are_refused(array: Array, word: str, value: object) -> None:
    with pytest.raises(UsageError):
        array.stream = SimpleNamespace(**{word: value})
    with pytest.raises(UsageError):
        array.resize(4, after=SimpleNamespace(ptr=value))
    for number in (300, -1, 1e99):
        with made(4, "uint8") as a, pytest.raises(UsageError):
            a[0:1] = number
