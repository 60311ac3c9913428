"""share, explain and copy: each kind of memory is looked at, and shared or refused with the reason (S2, S3, I6)."""

from __future__ import annotations

import gc
import math
import mmap
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.other_process import OtherProcess
from tests.support.raw_cuda import CudaStranger, Maker

import standin
import vram
from vram import driver as drivers
from vram.errors import CapacityError, ReadOnlyError, UnsupportedError, UsageError, VramError
from vram.memory.foreign import ForeignRegion
from vram.spec import Access, HandleKind, Location

FD, LEGACY, POOL, NONE = HandleKind.POSIX_FD, HandleKind.LEGACY_IPC, HandleKind.POOL, HandleKind.NONE
GPU = Location("cuda", 0)
GRANULE = 2 << 20
MIB = 1 << 20


class Interface:
    """An array of another library, as ``__cuda_array_interface__`` shows it."""

    def __init__(
        self, address: int, shape: Any, dtype: str = "<f4", *, readonly: bool = False, strides: Any = None
    ) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, readonly), "shape": shape if isinstance(shape, tuple) else (shape,), "typestr": dtype,
            "version": 3, "strides": strides,
        }  # fmt: skip


def refuses(obj: object, *words: str, kind: type[VramError] = UnsupportedError) -> None:
    """`share` refuses with these words, and `explain` says no, with the same."""
    with pytest.raises(kind) as caught:
        vram.share(obj)
    route = vram.explain(obj)
    assert not route
    assert route.kind is NONE
    for word in words:
        assert word in str(caught.value)
        assert word in str(route)
    del caught, obj
    gc.collect()  # what the traceback kept


# -- memory of the host ---------------------------------------------------------------------------------------------
def test_an_array_of_ours_is_shared_as_it_is() -> None:
    with vram.zeros((4, 3), "int16", device="host") as a:
        assert vram.share(a) is a
        route = vram.explain(a)
        assert (route.kind, route.made_by, route.device, route.nbytes) == (FD, "vram", "host", 24)
        assert (route.segments, route.offset, route.outlives_maker) == (1, 0, True)
        assert route
        assert "file descriptor" in str(route)
        assert vram.explain(a[2:]).offset == 12


def test_a_view_of_ours_is_found_with_its_place_in_it() -> None:
    with vram.zeros((8, 4), "int32", device="host") as a:
        view = a.numpy()[2:5]
        assert vram.explain(view).offset == 32
        with vram.share(view) as shared:
            assert (shared.shape, shared.dtype, shared.address) == ((3, 4), view.dtype, a.address + 32)
            assert shared.region is a.region
            shared[0] = 7
            assert view[0].tolist() == [7] * 4
        whole = (a.address + 32, 16, "host")
        assert vram.explain(whole).kind is FD
        with vram.share(whole) as row:
            assert row.to_host().view("i4").tolist() == [7] * 4


def test_i6_a_view_of_ours_keeps_the_memory_when_the_array_is_closed() -> None:
    a = vram.zeros(10, "int32", device="host")
    shared = vram.share(a.numpy()[5:])
    a.close()
    shared[...] = 3
    assert shared.to_host().tolist() == [3] * 5
    shared.close()


@pytest.mark.parametrize("flip", [lambda v: v[::2], lambda v: v[::-1], lambda v: v.T, lambda v: v[:, 1:]])
def test_what_does_not_lie_one_behind_the_other_is_a_mistake_that_names_the_copy(flip: Any) -> None:
    with vram.zeros((4, 4), "int32", device="host") as a:
        a.numpy()[...] = np.arange(16).reshape(4, 4)
        view = flip(a.numpy())
        with pytest.raises(UsageError, match=r"one behind the other.*vram.copy"):
            vram.share(view)
        with vram.copy(view) as copied:
            assert (copied.to_host() == view).all()
            assert copied.region is not a.region
        del view


def test_s3_memory_of_this_process_alone_is_refused_and_can_be_copied() -> None:
    plain = np.arange(6.0)
    refuses(plain, "this process alone", "vram.copy")
    refuses(memoryview(bytearray(16)), "this process alone")
    with pytest.raises(UsageError, match="no array"):
        vram.share("text")
    with pytest.raises(UsageError, match="no array"):
        vram.explain(object())
    with vram.copy(plain) as copied:
        assert str(copied.device) == "host"
        assert copied.to_host().tolist() == plain.tolist()
        assert vram.explain(copied)


def test_s3_a_mapping_of_a_file_is_refused_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "values"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 8192) as mapped:
        view = np.frombuffer(mapped, "u1")
        refuses(view[100:], str(path), "vram.copy")
        del view
    shared = shared_memory.SharedMemory(create=True, size=4096)
    try:
        view = np.frombuffer(shared.buf, "i4")
        refuses(view, shared.name, "vram.copy")
        with vram.copy(view) as copied:
            assert copied.nbytes == view.nbytes
        del view
    finally:
        gc.collect()
        shared.close()
        shared.unlink()


def test_zero_bytes_are_shared_as_nothing() -> None:
    for nothing in (np.empty((0, 3), "f8"), np.empty((2, 0), "i2")):
        assert vram.explain(nothing)
        with vram.share(nothing) as shared:
            assert (shared.shape, shared.dtype, shared.nbytes) == (nothing.shape, nothing.dtype, 0)
    with vram.share((1, 0, "host")) as shared:
        assert shared.nbytes == 0


def test_a_private_copy_says_that_nobody_else_could_see_it() -> None:
    with vram.private_keeper(), vram.zeros(4, device="host") as a:
        vram.publish("n", {"a": a})
        with vram.attach("n", access="cow") as lease:
            route = vram.explain(lease["a"])
            assert not route
            assert "private" in route.reason
            del route


@pytest.mark.parametrize(
    "span",
    [
        (0, 10, "host"), (-5, 10, "host"), (1 << 64, 10, "host"), (4096, -1, "host"), (4096, "many", "host"),
        (4096, 1.5, "host"), (4096, 10, "gpu"), (4096, 10, "cuda:99"), (4096, 10, "cuda:host"), (True, 10, "host"),
    ],
)  # fmt: skip
def test_i10_a_span_that_cannot_be_is_a_typed_error(span: tuple[Any, ...]) -> None:
    for call in (vram.share, vram.explain, vram.copy):
        with pytest.raises((UsageError, UnsupportedError)):
            call(span)


def test_s3_a_span_of_the_host_must_be_ours() -> None:
    plain = np.arange(10)
    with pytest.raises(UnsupportedError, match="no vram memory"):
        vram.share((plain.__array_interface__["data"][0], 10, "host"))
    with vram.zeros(8, "uint8", device="host") as a, pytest.raises(UnsupportedError, match="no vram memory"):
        vram.share((a.address, a.region.nbytes + 1, "host"))


def test_a_read_only_source_is_shared_read_only_or_not_at_all() -> None:
    """numpy's flag is about one view; what was frozen stays so through every array on it."""
    with vram.private_keeper(), vram.zeros(8, "int32", device="host") as a:
        vram.publish("n", {"a": a})
        with vram.share(a.numpy()) as shared:
            assert shared.readonly
            with pytest.raises(ReadOnlyError):
                shared[...] = 1


def test_copy_makes_another_array_even_of_one_of_ours() -> None:
    with vram.zeros(4, "int32", device="host") as a, vram.copy(a) as b:
        assert b is not a
        b[...] = 5
        assert a.to_host().tolist() == [0] * 4
    with vram.copy([[1, 2], [3, 4]]) as listed, vram.copy(7) as scalar:
        assert listed.to_host().tolist() == [[1, 2], [3, 4]]
        assert scalar.to_host().tolist() == 7
    with vram.zeros(16, "uint8", device="host") as a, vram.copy((a.address + 4, 8, "host")) as part:
        assert part.nbytes == 8


# -- memory of a GPU that another library made ----------------------------------------------------------------------
@pytest.fixture
def stranger() -> Iterator[CudaStranger]:
    if (why := standin.missing()) is not None:
        pytest.skip(why)
    with CudaStranger() as made:
        yield made


@pytest.fixture
def control(stranger: CudaStranger) -> standin.Standin:
    made = standin.Standin()
    made.clear()
    return made


def remap(stranger: CudaStranger, address: int, kinds: HandleKind) -> None:
    """Put another allocation of a granule where one is mapped."""
    api = stranger.api
    stranger.ok("cuMemUnmap", address, GRANULE)
    where, prop, right = api.CUmemLocation(), api.CUmemAllocationProp(), api.CUmemAccessDesc()
    where.type, where.id = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    prop.type, prop.location = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED, where
    prop.requestedHandleTypes = api.CUmemAllocationHandleType(int(kinds))
    handle = stranger.ok("cuMemCreate", GRANULE, prop, 0)
    stranger.ok("cuMemMap", address, GRANULE, 0, handle, 0)
    stranger.ok("cuMemRelease", handle)
    right.location, right.flags = where, api.CUmemAccess_flags(3)
    stranger.ok("cuMemSetAccess", address, GRANULE, [right], 1)


def attempt(act: Callable[[], object]) -> bool:
    """Whether it works; if not it says so by an error of ours."""
    try:
        act()
    except VramError:
        return False
    return True


@pytest.mark.standin
class TestOfAnotherLibrary:
    def test_s3_cudamalloc_memory_goes_by_handle(self, stranger: CudaStranger) -> None:
        base = stranger.legacy(MIB)
        x = Interface(base + 4096, (10, 100))
        route = vram.explain(x)
        assert (route.kind, route.made_by, route.device, route.nbytes) == (LEGACY, "legacy", "cuda:0", 4000)
        assert (route.segments, route.offset, route.outlives_maker) == (1, 4096, False)
        assert "64-byte" in str(route)
        with vram.share(x) as a:
            assert (a.address, a.shape, a.offset, a.region.nbytes) == (base + 4096, (10, 100), 4096, MIB)
            a[...] = np.arange(1000, dtype="f4").reshape(10, 100)
            assert (a[3].to_host() == np.arange(300, 400, dtype="f4")).all()
            a[2] = 0.5
            assert (vram.share((base + 4096 + 800, 400, "cuda:0")).to_host().view("f4") == 0.5).all()
            for change in (lambda: a.resize(5), lambda: a.region.grow(2 * MIB), lambda: a.region.resize(MIB)):
                with pytest.raises((UsageError, CapacityError)):
                    change()

    def test_s2_a_span_beyond_its_allocation_is_refused(self, stranger: CudaStranger) -> None:
        base = stranger.legacy(MIB)
        vram.share(Interface(base, MIB // 4)).close()
        for x in (Interface(base, MIB // 4 + 1), Interface(base + MIB - 4, 2), (base + 1, MIB, "cuda:0")):
            with pytest.raises(UsageError):
                vram.share(x)
            assert not vram.explain(x)
        with pytest.raises(UsageError):
            vram.share(Interface(0x1000, 10))

    @pytest.mark.parametrize("data", [(1.5, False), (math.inf, False), ("1", False), (None, False), 5, ()])
    def test_an_interface_whose_address_is_none_is_refused(self, data: Any) -> None:
        x = Interface(0, 4)
        x.__cuda_array_interface__["data"] = data
        for verb in (vram.share, vram.copy, vram.explain):
            with pytest.raises(UsageError, match="CUDA array interface"):
                verb(x)

    def test_an_interface_whose_shape_is_none_is_refused(self, stranger: CudaStranger) -> None:
        base = stranger.legacy(MIB)
        for shape in ((1.5,), (-1,), ("a",), (2, -2), (math.nan,)):
            with pytest.raises(UsageError, match="CUDA array interface"):
                vram.share(Interface(base, shape))
        for strides in ((1.5,), (math.inf,), 3):
            with pytest.raises(UsageError, match="CUDA array interface"):
                vram.share(Interface(base, (4,), strides=strides))

    def test_strides_on_a_gpu_are_refused(self, stranger: CudaStranger) -> None:
        base = stranger.legacy(MIB)
        for x in (Interface(base, (4, 4), strides=(32, 4)), Interface(base + 400, 10, strides=(-4,))):
            with pytest.raises(UsageError, match="one behind the other"):
                vram.share(x)
            with pytest.raises(UsageError):
                vram.copy(x)
        with vram.share(Interface(base, (4, 4), strides=(16, 4))) as dense:
            assert dense.shape == (4, 4)

    def test_i5_memory_that_took_the_place_of_another_is_another(self, stranger: CudaStranger) -> None:
        base = stranger.mapped((GRANULE,), FD)
        first = vram.share(Interface(base, 10))
        remap(stranger, base, FD)  # under our feet: nobody can hinder its owner
        with vram.share(Interface(base + 64, 10)) as second:
            assert second.region is not first.region
            assert second.region.infos[0].identity != first.region.infos[0].identity  # type: ignore[attr-defined]
        first.close()
        remap(stranger, base, NONE)
        refuses(Interface(base, 10), "handle type 0")

    def test_memory_that_is_gone_is_refused(self, stranger: CudaStranger) -> None:
        base = stranger.legacy(MIB)
        x = Interface(base, 10)
        vram.share(x).close()
        stranger.free(base)
        with pytest.raises(UsageError):
            vram.share(x)
        with pytest.raises(UsageError):
            vram.explain(x)

    def test_i6_the_owner_is_kept_until_the_last_of_slices_and_views_is_gone(self, stranger: CudaStranger) -> None:
        x = Interface(stranger.legacy(MIB), (8, 8))
        gone = weakref.ref(x)
        array = vram.share(x)
        del x
        part = array[2:4]
        array.close()
        del array
        gc.collect()
        assert gone() is not None
        seen = part.__dlpack__()
        interface = part[0]
        part.close()
        del part
        gc.collect()
        assert gone() is not None
        del seen
        gc.collect()
        assert gone() is not None
        del interface
        gc.collect()
        assert gone() is None
        assert drivers.get(GPU).live().mappings == 0

    # -- virtual memory management --------------------------------------------------------------------------------
    def test_s3_mapped_memory_goes_by_descriptor(self, stranger: CudaStranger) -> None:
        base = stranger.mapped((GRANULE,), FD)
        x = Interface(base + 64, 100)
        route = vram.explain(x)
        assert (route.kind, route.made_by, route.segments, route.offset) == (FD, "vmm", 1, 64)
        assert route.outlives_maker
        with vram.share(x) as a:
            a[...] = 2
            (allocation,), offset = a.region.segments(a.offset, a.offset + a.nbytes)
            assert (allocation.nbytes, offset) == (GRANULE, 64)
            assert allocation.export() >= 0
            allocation.close()

    def test_s2_a_span_of_several_chunks_is_one(self, stranger: CudaStranger) -> None:
        base = stranger.mapped((GRANULE, 2 * GRANULE, GRANULE), FD)
        route = vram.explain((base + 100, 3 * GRANULE, "cuda:0"))
        assert (route.kind, route.segments, route.offset) == (FD, 3, 100)
        with vram.share((base + 100, 3 * GRANULE, "cuda:0")) as a:
            assert a.region.chunks == (GRANULE, 2 * GRANULE, GRANULE)
            a[...] = 9
            assert (a.to_host() == 9).all()
        with vram.share((base + GRANULE, GRANULE, "cuda:0")) as inner:
            assert inner.region.chunks == (2 * GRANULE,)
            assert vram.explain((base + GRANULE, GRANULE, "cuda:0")).segments == 1

    def test_s2_a_gap_in_a_span_is_refused(self, stranger: CudaStranger) -> None:
        base = stranger.mapped((GRANULE, GRANULE, GRANULE), FD)
        stranger.ok("cuMemUnmap", base + GRANULE, GRANULE)
        with pytest.raises(UsageError, match="end beyond"):
            vram.share((base, 3 * GRANULE, "cuda:0"))
        route = vram.explain((base, 3 * GRANULE, "cuda:0"))
        assert not route
        assert f"{base + GRANULE:#x}" in route.reason
        stranger._frees[base] = [
            lambda: stranger.ok("cuMemUnmap", base, GRANULE),
            lambda: stranger.ok("cuMemUnmap", base + 2 * GRANULE, GRANULE),
            lambda: stranger.ok("cuMemAddressFree", base, 3 * GRANULE),
        ]

    def test_s3_one_chunk_of_handle_type_0_spoils_the_span(self, stranger: CudaStranger) -> None:
        base = stranger.mapped((GRANULE, GRANULE), NONE)
        refuses((base, GRANULE + 1, "cuda:0"), "handle type 0", "vram.copy")
        mixed = stranger.mapped((GRANULE, GRANULE), FD)
        remap(stranger, mixed + GRANULE, NONE)
        assert vram.explain((mixed, GRANULE, "cuda:0"))
        refuses((mixed, GRANULE + 1, "cuda:0"), "handle type 0", "vram.copy")
        with vram.copy((mixed, GRANULE + 1, "cuda:0")) as copied:
            assert copied.nbytes == GRANULE + 1

    def test_memory_that_its_gpu_may_only_read(self, stranger: CudaStranger) -> None:
        base = stranger.mapped((GRANULE,), FD, Access.READ)
        with vram.share(Interface(base, 10)) as a:
            assert a.to_host().tolist() == [0] * 10
            with pytest.raises(VramError):
                a[...] = 1

    # -- pools ----------------------------------------------------------------------------------------------------
    def test_s3_a_pool_that_can_be_exported(self, stranger: CudaStranger) -> None:
        _, base = stranger.pooled(MIB, shareable=True)
        route = vram.explain(Interface(base + 256, 64))
        assert (route.kind, route.made_by, route.offset, route.outlives_maker) == (POOL, "pool", 256, False)
        with vram.share(Interface(base + 256, 64)) as a:
            a[...] = 4
            assert a.to_host().tolist() == [4] * 64

    def test_s3_a_pool_that_cannot_says_so(self, stranger: CudaStranger) -> None:
        _, base = stranger.pooled(MIB, shareable=False)
        refuses(Interface(base, 10), "without a handle type", "vram.copy")
        address = int(stranger.ok("cuMemAllocAsync", MIB, 1))
        try:
            refuses(Interface(address, 10), "default pool", "vram.copy")
            with vram.copy(Interface(address, 10)) as copied:
                assert vram.explain(copied)
        finally:
            stranger.ok("cuMemFreeAsync", address, 1)
            stranger.ok("cuStreamSynchronize", 1)

    def test_s3_page_locked_memory_of_the_host(self, stranger: CudaStranger) -> None:
        base = stranger.pinned(4096)
        route = vram.explain((base, 4096, "cuda:0"))
        assert not route
        assert "page-locked" in str(route)
        with pytest.raises(VramError):
            vram.share((base, 4096, "cuda:0"))

    def test_s3_memory_opened_from_another_process_is_its_owners_to_share(self, stranger: CudaStranger) -> None:
        with OtherProcess(Maker) as other:
            base = other.call("legacy", MIB)
            handle = other.call("ipc_export", base)
            driver: Any = drivers.get(GPU)
            address = driver.ipc_open(handle, MIB, GPU)
            try:
                refuses(Interface(address + 64, 10), "another process", "vram.copy")
                with vram.copy(Interface(address, 10)) as copied:
                    assert copied.nbytes == 40
            finally:
                driver.ipc_close(address)
            other.call("free", base)

    # -- publishing -----------------------------------------------------------------------------------------------
    def test_publish_shares_what_a_descriptor_stands_for_and_copies_the_rest(self, stranger: CudaStranger) -> None:
        """Memory that lives only as long as its maker is never kept by a keeper: it is copied, and that is said."""
        vmm, legacy = stranger.mapped((GRANULE, GRANULE), FD), stranger.legacy(MIB)
        _, pool = stranger.pooled(MIB, shareable=True)
        with vram.private_keeper():
            arrays = {
                "vmm": vram.share((vmm + 64, GRANULE, "cuda:0")),
                "legacy": vram.share(Interface(legacy + 64, 10)),
                "pool": vram.share(Interface(pool, 10)),
                "plain": np.arange(3.0),
            }
            for number, name in enumerate(("vmm", "legacy", "pool")):
                arrays[name][...] = number + 1  # type: ignore[index]
            done = vram.publish("part", arrays)
            assert set(done.copied) == {"vmm", "legacy", "pool", "plain"}
            assert "memory that holds more" in done.copied["vmm"]  # and whose allocator puts something else there
            with vram.attach("part") as lease:
                assert lease["vmm"].to_host().tolist() == [1] * GRANULE
            done = vram.publish("n", arrays, whole=True)
            assert set(done.copied) == {"legacy", "pool", "plain"}
            assert "only as long as its maker" in done.copied["legacy"]
            assert "as long as its maker" in done.copied["pool"]
            for name in ("vmm", "legacy", "pool"):
                arrays[name].close()  # type: ignore[union-attr]
            stranger.free(vmm)
            stranger.free(legacy)
            stranger.free(pool)
            with vram.attach("n") as lease:
                assert lease["vmm"].to_host().tolist() == [1] * GRANULE
                assert lease["legacy"].to_host().tolist() == [2] * 10
                assert lease["pool"].to_host().tolist() == [3] * 10
                assert not isinstance(lease["vmm"].region, ForeignRegion)
            assert vram.list_entries()[0].name == "n"

    # -- mistakes leave nothing -----------------------------------------------------------------------------------
    def test_i4_what_fails_leaves_nothing(self, stranger: CudaStranger, control: standin.Standin) -> None:
        for name in ("cuPointerGetAttribute", "cuPointerGetAttributes", "cuMemGetAddressRange", "cuMemGetAccess"):
            for nth in range(1, 10):
                base = stranger.mapped((GRANULE, GRANULE), FD)
                with control.failing(name, nth, forever=True):
                    done = attempt(lambda base=base: vram.share((base, 2 * GRANULE, "cuda:0")).close())
                assert drivers.get(GPU).live().mappings == 0
                stranger.free(base)
                if done:
                    break
            assert done
            assert nth > 1

    def test_a_span_names_the_gpu_that_it_is_on(self, stranger: CudaStranger) -> None:
        base = stranger.legacy(4096)
        wrong = (base, 16, "cuda:1")
        for call in (vram.share, vram.copy):
            with pytest.raises(UsageError, match="on cuda:0, not on cuda:1"):
                call(wrong)
        route = vram.explain(wrong)
        assert not route
        assert "cuda:0" in route.reason
