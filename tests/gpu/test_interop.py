"""Arrays on a real GPU, seen by PyTorch, CuPy, JAX and Numba; each is tested where it is installed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import vram
from vram import driver as drivers
from vram.arrays import Array
from vram.driver.protocol import LiveObjects
from vram.errors import BusyError
from vram.memory import Region
from vram.spec import Access, Location

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # other libraries' warnings are not ours
GPU = Location("cuda", 0)
WANTED = np.arange(4096, dtype="float32").reshape(64, 64)


def made() -> Array:
    """What took the CUDA array interface of it keeps it as long as the object lives: so it is no fixture."""
    return vram.asarray(WANTED, device=GPU)


@pytest.fixture
def array() -> Iterator[Array]:
    with made() as a:
        yield a


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


@pytest.fixture
def numba_cuda() -> Any:
    return pytest.importorskip("numba.cuda")


def read_only() -> Array:
    """An array that this process may only read."""
    driver = drivers.get(GPU)
    with vram.asarray(WANTED, device=GPU) as source:
        allocations, _ = source.region.segments(0, source.nbytes)
        region = Region.from_allocations(driver, allocations, access=Access.READ, managed=True)
    a = Array(region, "float32", (64, 64))
    region.close()
    return a


def test_torch_sees_and_changes_it(torch: Any) -> None:
    array = made()
    tensor = array.torch()
    assert (tensor.device.type, tensor.device.index, tuple(tensor.shape)) == ("cuda", 0, (64, 64))
    assert tensor.data_ptr() == array.address
    tensor += 1
    torch.cuda.synchronize()
    assert (array.to_host() == WANTED + 1).all()
    for taken in (torch.from_dlpack(array), torch.as_tensor(array, device="cuda")):
        assert taken.data_ptr() == array.address
    array.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16", "complex64", "bool", "int64"])
def test_torch_sees_every_element_type(torch: Any, dtype: str) -> None:
    wanted = np.arange(12).reshape(3, 4).astype(getattr(ml_dtypes, dtype, dtype))
    with vram.asarray(wanted, device=GPU) as a:
        tensor = a.torch()
        assert tensor.dtype == getattr(torch, dtype)
        assert (tensor.cpu().to(torch.complex128).numpy() == wanted.astype("complex128")).all()
        assert (a.to_host() == wanted).all()


def test_i6_a_tensor_keeps_the_memory(torch: Any) -> None:
    driver = drivers.get(GPU)
    before = driver.live()
    array = vram.asarray(WANTED, device=GPU)
    tensor = array.torch()[3:5]
    with pytest.raises(BusyError):
        array.close(strict=True)
    array.close()
    assert (tensor.cpu().numpy() == WANTED[3:5]).all()
    del tensor
    gc.collect()
    assert driver.live() == before


def test_torch_full_needs_no_new_tensor_for_growth(torch: Any) -> None:
    with vram.empty((0, 1024), "float32", device=GPU, capacity=1 << 20) as a:
        whole = a.torch(full=True)
        assert tuple(whole.shape) == (1 << 20, 1024)
        a.resize(4096)
        whole[:4096] = 5
        torch.cuda.synchronize()
        assert (a.to_host() == 5).all()
        with pytest.raises(BusyError):
            a.resize(0)
        del whole


def test_torch_works_on_read_only_memory(torch: Any) -> None:
    with read_only() as a:
        tensor = a.torch()
        assert float(tensor.sum()) == WANTED.sum()
        del tensor


def test_cupy_by_interface_and_by_dlpack(cupy: Any) -> None:
    array = made()
    for taken in (cupy.asarray(array), cupy.from_dlpack(array)):
        assert taken.data.ptr == array.address
        assert (cupy.asnumpy(taken) == WANTED).all()
    taken *= 2
    cupy.cuda.Device(0).synchronize()
    assert (array.to_host() == WANTED * 2).all()
    array.close()


def test_jax_by_dlpack(array: Array, jax: Any) -> None:
    taken = jax.dlpack.from_dlpack(array)
    assert (np.asarray(taken) == WANTED).all()
    assert float(taken.sum()) == WANTED.sum()
    del taken


def test_numba_by_interface(numba_cuda: Any) -> None:
    array = made()
    taken = numba_cuda.as_cuda_array(array)
    assert (taken.copy_to_host() == WANTED).all()
    array.close()


def test_a_numba_kernel_changes_it(numba_cuda: Any) -> None:
    @numba_cuda.jit
    def double(data: Any) -> None:
        i, j = numba_cuda.grid(2)
        if i < data.shape[0] and j < data.shape[1]:
            data[i, j] *= 2

    try:
        double[(8, 8), (8, 8)](numba_cuda.device_array((64, 64), "float32"))
    except AttributeError as error:
        pytest.skip(f"this numba-cuda compiles no kernel at all with numpy {np.__version__}: {error}")
    array = made()
    double[(8, 8), (8, 8)](numba_cuda.as_cuda_array(array))
    numba_cuda.synchronize()
    assert (array.to_host() == WANTED * 2).all()
    array.close()


def test_s10_a_consumers_stream_waits_for_ours(torch: Any) -> None:
    """A long fill on one stream, read on another without any synchronisation of ours."""
    side, reader = torch.cuda.Stream(), torch.cuda.Stream()
    with vram.empty((1 << 26,), "int32", device=GPU) as a:
        for number in range(1, 6):
            with torch.cuda.stream(side):
                tensor = a.torch()
                for _ in range(20):
                    tensor.fill_(0)
                tensor.fill_(number)
            a.stream = side
            with torch.cuda.stream(reader):
                taken = torch.from_dlpack(a)
                assert bool((taken == number).all())
        a.stream = None
        del tensor, taken


@pytest.mark.usefixtures("two_gpus")  # there must be one that is not used
def test_no_context_on_a_gpu_that_is_not_used() -> None:
    driver: Any = drivers.get(GPU)
    used = [device.is_used for device in driver.devices.all[1:]]
    with vram.zeros(1 << 20, device=GPU) as a:
        a.fill(1)
    assert [device.is_used for device in driver.devices.all[1:]] == used


def test_the_books_are_empty() -> None:
    gc.collect()
    assert drivers.get(GPU).live() == LiveObjects(0, 0, 0, 0)
