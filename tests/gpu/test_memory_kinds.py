"""What memory is asked to be, and by which other ways it goes, on a real GPU: is what the stand-in plays right?

No multicast object is ever made here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from vram import driver as drivers
from vram.driver.cuda.attributes import attribute
from vram.errors import ProtocolError, UnsupportedError
from vram.memory import AddressReservation, MemoryMapping, MulticastObject, PhysicalAllocation, Region
from vram.spec import Access, AllocationFlags, AllocationSpec, HandleKind, Location

pytestmark = pytest.mark.gpu
GPU, OTHER = Location("cuda", 0), Location("cuda", 1)
FD, FABRIC = HandleKind.POSIX_FD, HandleKind.FABRIC
IS_GPU_DIRECT_RDMA_CAPABLE = 15  # CU_POINTER_ATTRIBUTE_*


@pytest.fixture
def cuda() -> Any:
    return drivers.get(GPU)


@pytest.fixture
def granule(cuda: Any) -> int:
    return int(cuda.mem_granularity(GPU, FD).recommended)


@pytest.fixture
def mapped(cuda: Any, granule: int) -> Iterator[AddressReservation]:
    with AddressReservation.reserve(cuda, 2 * granule) as where:
        yield where


def works(cuda: Any, name: str) -> None:
    """Go on where a capability works; else say why not, in one line."""
    if why := getattr(cuda.support(GPU), name):
        pytest.skip(f"no {name} here: {why}")


def load(cuda: Any, address: int, nbytes: int) -> bytes:
    found = bytearray(nbytes)
    cuda.copy_out(memoryview(found), address)
    return bytes(found)


# -- flags ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flag", list(AllocationFlags), ids=lambda flag: flag.name.lower())
def test_what_is_granted_is_in_the_properties(cuda: Any, granule: int, flag: AllocationFlags) -> None:
    works(cuda, str(flag.name).lower())
    with PhysicalAllocation.create(cuda, AllocationSpec(granule, GPU, FD, flag)) as memory:
        found = memory.properties()
        assert (found.location, found.handle_kinds, found.nbytes) == (GPU, FD, granule)
        assert memory.flags == flag
        assert found.flags & ~flag == AllocationFlags.NONE, "the driver granted what nobody asked for"


@pytest.mark.parametrize("name", ["compressible", "gpu_direct_rdma"])
def test_such_memory_is_mapped_shared_and_opened_again(
    cuda: Any, granule: int, mapped: AddressReservation, name: str
) -> None:
    works(cuda, name)
    flag = AllocationFlags[name.upper()]
    with PhysicalAllocation.create(cuda, AllocationSpec(granule, GPU, FD, flag)) as memory:
        with MemoryMapping.map(mapped, 0, memory) as mapping:
            cuda.fill(mapping.address, 7, granule)
            with PhysicalAllocation.import_(cuda, memory.export(), granule) as there:
                with MemoryMapping.map(mapped, granule, there) as again:
                    assert load(cuda, again.address + granule - 3, 3) == b"\7\7\7"
                # As one H200 answered: of imported memory it is not told that it is for RDMA.
                assert there.flags == flag & ~AllocationFlags.GPU_DIRECT_RDMA


def test_memory_for_rdma_says_so_at_its_address(cuda: Any, granule: int, mapped: AddressReservation) -> None:
    works(cuda, "gpu_direct_rdma")
    spec = AllocationSpec(granule, GPU, FD, AllocationFlags.GPU_DIRECT_RDMA)
    with PhysicalAllocation.create(cuda, spec) as memory, MemoryMapping.map(mapped, 0, memory) as mapping:
        assert attribute(cuda.bindings, IS_GPU_DIRECT_RDMA_CAPABLE, mapping.address) == 1


# -- handles of CUDA's own, and rights --------------------------------------------------------------------------------
def test_a_native_handle_is_one_of_cuda(cuda: Any, granule: int, mapped: AddressReservation) -> None:
    from cuda.bindings import driver as api

    with PhysicalAllocation.create(cuda, granule, GPU) as memory:
        native = memory.native_handle
        status, prop = api.cuMemGetAllocationPropertiesFromHandle(native)
        assert (int(status), prop.location.id) == (0, 0)
        assert int(api.cuMemMap(mapped.address, granule, 0, native, 0)[0]) == 0
        status, again = api.cuMemRetainAllocationHandle(mapped.address)
        assert (int(status), int(again)) == (0, native), "measured: the same number"
        assert int(api.cuMemRelease(again)[0]) == 0
        assert int(api.cuMemUnmap(mapped.address, granule)[0]) == 0


def test_rights_of_two_gpus_are_told_apart(cuda: Any, granule: int, two_gpus: None) -> None:
    if why := cuda.peer_refusal(1, 0):
        pytest.skip(why)
    with Region.create(GPU, driver=cuda, capacity=2 * granule, nbytes=2 * granule, chunk=granule) as region:
        assert (region.get_access(), region.get_access(OTHER)) == (Access.READ_WRITE, Access.NONE)
        cuda.mem_set_access(region.address, granule, Access.READ, [OTHER])
        assert region.get_access(OTHER) is Access.NONE, "the second chunk is not its own to read"
        cuda.mem_set_access(region.address, 2 * granule, Access.READ, [OTHER])
        assert (region.get_access(), region.get_access(OTHER)) == (Access.READ_WRITE, Access.READ)


# -- the fabric -------------------------------------------------------------------------------------------------------
OPENS = """
import sys
from vram import driver
from vram.memory import PhysicalAllocation, Region
from vram.spec import Location
cuda, here = driver.get(Location("cuda")), Location("cuda", 0)
nbytes = int(sys.argv[2])
with PhysicalAllocation.import_fabric(cuda, bytes.fromhex(sys.argv[1]), nbytes, here) as there:
    with Region.from_allocations(cuda, [there]) as region:
        found = bytearray(6)
        cuda.copy_out(memoryview(found), region.address)
        print(there.location, found.decode())
"""


@pytest.mark.parametrize("visible", ["0", "1"])
def test_another_process_opens_memory_by_the_fabric(
    cuda: Any, granule: int, mapped: AddressReservation, visible: str
) -> None:
    works(cuda, "fabric")
    if visible == "1" and cuda.device_count() < 2:
        pytest.skip("it takes two GPUs")
    if os.environ.get("CUDA_VISIBLE_DEVICES") and visible == "1":
        pytest.skip("CUDA_VISIBLE_DEVICES is set, and this hides a GPU by it")
    with PhysicalAllocation.create(cuda, granule, GPU, handle_kinds=FABRIC) as memory:
        with MemoryMapping.map(mapped, 0, memory) as mapping:
            cuda.copy_in(mapping.address, memoryview(b"fabric"))
            cuda.synchronize(GPU)
            environment = dict(os.environ)
            if visible == "1":
                environment["CUDA_VISIBLE_DEVICES"] = visible
            done = subprocess.run(
                [sys.executable, "-c", OPENS, memory.export_fabric().hex(), str(granule)],
                capture_output=True, text=True, timeout=300, env=environment, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-2000:]
            assert done.stdout.strip() == "cuda:0 fabric"


def test_without_a_channel_nothing_is_opened(cuda: Any, granule: int) -> None:
    if not cuda.support(GPU).fabric:
        pytest.skip("there is an IMEX channel here")
    with pytest.raises((UnsupportedError, ProtocolError)) as caught:
        PhysicalAllocation.import_fabric(cuda, bytes(64), granule, GPU)
    assert isinstance(caught.value, UnsupportedError), f"the stand-in says NOT_PERMITTED, and here: {caught.value}"


# -- multicast: questions only ----------------------------------------------------------------------------------------
def test_multicast_granularity_is_told_while_it_is_off(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    works(cuda, "multicast")
    monkeypatch.setenv("VRAM_MULTICAST", "off")
    count = cuda.device_count()
    found = MulticastObject.granularity(cuda, count, "1GiB", FD)
    assert found.minimum & (found.minimum - 1) == 0
    assert found.recommended % found.minimum == 0
    assert found.minimum % cuda.mem_granularity(GPU, FD).minimum == 0
    with pytest.raises(UnsupportedError, match="VRAM_MULTICAST"):
        cuda.multicast_create(count, found.recommended, FD)
