"""Tensors over our memory and our memory recognized in tensors. torch is optional: all of it is skipped without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from vram import driver
from vram.arrays import Array
from vram.arrays.dtypes import as_dtype, dtype_name, dtype_of
from vram.arrays.sources import as_source
from vram.arrays.torch import to_torch_dtype
from vram.arrays.views import find
from vram.driver.protocol import Driver
from vram.errors import UnsupportedError, UsageError
from vram.memory import Region
from vram.spec import HOST

torch = pytest.importorskip("torch", reason="torch is not installed: its views are not tested")

PLAIN = ["bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64", "complex128"]
EXTENDED = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
NEWER = ["uint16", "uint32", "uint64", "float8_e8m0fnu", "complex32"]


@pytest.fixture
def host() -> Driver:
    return driver.get(HOST)


@pytest.fixture
def array(host: Driver) -> Iterator[Array]:
    with Array.create(host, HOST, (4, 6), "float32", capacity=1000) as made:
        made[:] = np.arange(24).reshape(4, 6)
        yield made


def test_packed_types_are_torchs_own_or_bytes(host: Driver) -> None:
    for name in ("float4_e2m1fn_x2", "float6_e2m3fn_packed"):
        wanted = getattr(torch, name, torch.uint8)
        with Array.create(host, HOST, (2, 3), dtype_of(name)) as array:
            array.numpy()[:] = 7
            assert repr(array).startswith(f"<Array {name} (2, 3) ")
            tensor = array.torch()
            assert (tensor.dtype, tuple(tensor.shape)) == (wanted, (2, 3))
            assert tensor.view(torch.uint8).tolist() == [[7] * 3] * 2
            assert dtype_name(as_source(tensor).dtype) == (name if wanted != torch.uint8 else "uint8")
            del tensor


@pytest.mark.parametrize("name", PLAIN + EXTENDED + NEWER)
def test_every_type_that_both_know(host: Driver, name: str) -> None:
    wanted = getattr(torch, name, None)
    if wanted is None or not (hasattr(np, name) or hasattr(ml_dtypes, name)):
        pytest.skip(f"torch or ml_dtypes is too old for {name}")
    for shape in ((2, 3), (), (0, 3)):
        with Array.create(host, HOST, shape, wanted) as array:
            tensor = array.torch()
            assert tensor.dtype == wanted == to_torch_dtype(array.dtype)
            assert tuple(tensor.shape) == shape
            assert as_dtype(tensor.dtype) == array.dtype
            if array.size:
                assert tensor.data_ptr() == array.address
                array.numpy()[...] = 1
                assert tensor.to(torch.complex64 if "complex" in name else torch.float32).abs().min() == 1
            del tensor
            array.close(strict=True)


@pytest.mark.parametrize("name", ["S3", "datetime64[s]", "int4", "longdouble", ">f4"])
def test_types_that_torch_lacks(host: Driver, name: str) -> None:
    with Array.create(host, HOST, 3, name) as array, pytest.raises(UnsupportedError, match=r"\.numpy\(\)"):
        array.torch()


def test_both_see_what_the_other_writes(array: Array) -> None:
    tensor = array.torch()
    tensor[1] = 5
    assert array.numpy()[1].tolist() == [5] * 6
    array[2] = 7
    assert tensor[2].tolist() == [7] * 6
    tensor.add_(1)
    assert array.numpy()[2, 0] == 8


def test_read_only_memory_is_shown_too(array: Array) -> None:
    """torch knows no read-only tensors; reading is what they are for."""
    allocations, _ = array.region.segments(0, array.nbytes)
    with Region.from_allocations(array.region.driver, allocations, nbytes=array.nbytes) as region:
        with Array(region, "float32", (4, 6)) as reader:
            assert reader.torch().sum() == 276
            assert torch.from_dlpack(reader).sum() == 276
    for allocation in allocations:
        allocation.close()


def test_torchs_own_ways_in(array: Array) -> None:
    for tensor in (torch.from_dlpack(array), torch.from_numpy(array.numpy()), torch.as_tensor(array.numpy())):
        assert tensor.data_ptr() == array.address
        tensor[0, 0] = 42
    del tensor
    array.close(strict=True)


def test_bfloat16_by_dlpack_alone(host: Driver) -> None:
    """The capsule itself says bfloat16, which numpy cannot."""
    with Array.create(host, HOST, (2, 3), "bfloat16") as array:
        tensor = torch.from_dlpack(array)
        assert tensor.dtype == torch.bfloat16
        tensor[:] = 1.5
        assert array.numpy().astype("float32").min() == 1.5


# -- the way back ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", PLAIN + EXTENDED)
def test_a_tensor_is_a_source(name: str) -> None:
    dtype = getattr(torch, name)
    tensor = torch.ones((3, 4)).to(dtype)
    source = as_source(tensor)
    assert source.dtype == as_dtype(dtype)
    assert (source.address, source.shape, source.contiguous) == (tensor.data_ptr(), (3, 4), True)
    assert source.nbytes == tensor.numel() * tensor.element_size()
    assert abs(source.view.astype("complex64")).min() == 1
    turned = as_source(tensor.t()[1:])
    assert not turned.contiguous
    assert turned.view.shape == (3, 3)
    assert abs(turned.view.astype("complex64")).min() == 1


def test_what_torch_only_promises_is_made(host: Driver) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    assert as_source(tensor.conj()).view.tolist() == [1 - 2j, 3 + 1j]
    assert as_source(torch.ones(3, requires_grad=True)).view.tolist() == [1, 1, 1]
    assert as_source(torch.nn.Parameter(torch.zeros(2))).shape == (2,)


def test_tensors_without_plain_memory() -> None:
    with pytest.raises(UsageError, match="dense"):
        as_source(torch.ones(3, 3).to_sparse())
    with pytest.raises(UsageError, match="on meta"):
        as_source(torch.empty(3, device="meta"))
    with pytest.raises(UsageError, match="uint8"):
        as_source(torch.zeros(3, dtype=torch.uint8).view(torch.bits8))


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_our_memory_is_recognized_in_a_tensor(host: Driver, name: str) -> None:
    with Array.create(host, HOST, (4, 6), name) as array:
        source = as_source(array.torch()[1:])
        found = find(source.address, source.nbytes)
        assert found == (array.region, 6 * array.itemsize)
        del source, found


def test_tensors_at_interpreter_exit() -> None:
    """They may go after everything of ours has."""
    code = """
import sys, torch
from vram import driver
from vram.arrays import Array
from vram.spec import HOST
def make(name):
    return Array.create(driver.get(HOST), HOST, (4, 6), name).torch()
kept = make("float32")
sys.kept = [make("bfloat16")]
sys.kept.append(sys.kept)
torch.kept = make("int8").numpy()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
