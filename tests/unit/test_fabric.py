"""Memory and multicast objects that leave by 64 bytes, on the stand-in, where the fabric works if a test says so."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import standin
from vram import driver as drivers
from vram.driver.cuda import CudaDriver
from vram.driver.host import HostDriver
from vram.errors import ProtocolError, UnsupportedError, UsageError
from vram.memory import AddressReservation, MemoryMapping, MulticastObject, PhysicalAllocation, Region
from vram.spec import HandleKind, Location

pytestmark = pytest.mark.standin
G = 2 << 20
GPU, OTHER = Location("cuda", 0), Location("cuda", 1)
FD, FABRIC, BOTH = HandleKind.POSIX_FD, HandleKind.FABRIC, HandleKind.POSIX_FD | HandleKind.FABRIC
NOT_PERMITTED, NOT_SUPPORTED = 800, 801


@pytest.fixture
def control() -> Iterator[standin.Standin]:
    found = standin.Standin()
    found.clear()
    found.fabric()
    yield found
    found.fabric(False)
    found.clear()


@pytest.fixture
def cuda(control: standin.Standin) -> CudaDriver:
    found = drivers.get(GPU)
    assert isinstance(found, CudaDriver)
    return found


@pytest.fixture
def close() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def child(script: str, *arguments: str, **settings: object) -> str:
    """Return what a script prints in a process of its own, where the fabric works."""
    environment = standin.child_environment(**{"fabric": True, **settings})
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


# -- memory -------------------------------------------------------------------------------------------------------
def test_an_allocation_leaves_by_64_bytes(cuda: CudaDriver, control: standin.Standin) -> None:
    with PhysicalAllocation.create(cuda, G, GPU, handle_kinds=BOTH) as here:
        assert repr(here) == "<PhysicalAllocation cuda:0 2 MiB, posix_fd|fabric>"
        control.clear()
        data = here.export_fabric()
        assert (len(data), here.export_fabric()) == (64, data)
        assert control.calls("cuMemExportToShareableHandle") == 1, "asked once, and kept"
        assert repr(here) == "<PhysicalAllocation cuda:0 2 MiB, posix_fd|fabric, exported>"
        with PhysicalAllocation.import_fabric(cuda, bytearray(data), "2MiB", "cuda:0") as there:
            assert (there.location, there.nbytes, there.handle_kinds) == (GPU, G, FABRIC)
            assert there.export_fabric() == data
            with AddressReservation.reserve(cuda, 2 * G) as where:
                with MemoryMapping.map(where, 0, here) as one, MemoryMapping.map(where, G, there) as other:
                    cuda.fill(one.address, 7, 5)
                    found = bytearray(6)
                    cuda.copy_out(memoryview(found), other.address)
                    assert found == b"\7\7\7\7\7\0"


def test_where_memory_of_this_process_is_is_told(cuda: CudaDriver) -> None:
    """Whatever GPU was named to work on it."""
    with PhysicalAllocation.create(cuda, G, OTHER, handle_kinds=FABRIC) as here:
        with PhysicalAllocation.import_fabric(cuda, here.export_fabric(), G, GPU) as there:
            assert there.location == there.properties().location == OTHER


OPENS = """
import sys
from vram import driver
from vram.errors import UnsupportedError
from vram.memory import *
from vram.spec import Access, Location
cuda, here = driver.get(Location("cuda")), Location("cuda", 0)
with PhysicalAllocation.import_fabric(cuda, bytes.fromhex(sys.argv[1]), 2 << 20, here) as there:
    print(there.location, there.properties().location)
    with Region.from_allocations(cuda, [there], access=Access.READ_WRITE) as region:
        found = bytearray(6)
        cuda.copy_out(memoryview(found), region.address)
        cuda.copy_in(region.address, memoryview(b"theirs"))
        print(found.decode(), region.get_access().letters)
    try:
        cuda.sharing._place_of_memory(cuda.mem_native_handle(there.driver_handle))
    except UnsupportedError as error:
        print(error)
"""


def test_memory_of_a_gpu_that_is_not_of_this_process(cuda: CudaDriver) -> None:
    """On another machine, which the stand-in plays by a GPU that is hidden from the other process."""
    with Region.create(GPU, driver=cuda, capacity=G, nbytes=100, handle_kinds=FABRIC) as region:
        assert region.may_clear
        cuda.copy_in(region.address, memoryview(b"memory"))
        (piece,), _ = region.segments(0, 100)
        said = child(OPENS, piece.export_fabric().hex(), visible_devices="1").splitlines()
        assert said[:2] == ["cuda:0 cuda:0", "memory rw"]
        assert said[2].startswith("opening memory of a GPU needs that GPU, visible to this process; have CUDA_VISIBLE")
        assert not region.may_clear, "somebody else may have it"
        found = bytearray(6)
        cuda.copy_out(memoryview(found), region.address)
        assert found == b"theirs"
        said = child(OPENS, piece.export_fabric().hex()).splitlines()
        assert said == ["cuda:0 cuda:0", "theirs rw"]


def test_what_was_not_made_for_it_does_not_leave_by_it(cuda: CudaDriver) -> None:
    with PhysicalAllocation.create(cuda, G, GPU) as memory:
        with pytest.raises(UsageError, match=r"as FABRIC: it was created for POSIX_FD.*handle_kinds=HandleKind.FABRIC"):
            memory.export_fabric()
    with PhysicalAllocation.create(cuda, G, GPU, handle_kinds=FABRIC) as memory:
        with pytest.raises(UsageError, match=r"leaves as 64 bytes, not by a descriptor: export_fabric\(\)"):
            memory.export(FABRIC)
        with pytest.raises(UsageError, match=r"leaves as 64 bytes, not by a descriptor"):
            cuda.mem_export(memory.driver_handle, FABRIC)
        with pytest.raises(UsageError, match=r"created for FABRIC"):
            memory.export()
    for wrong in (5, "x" * 64, None):
        with pytest.raises(UsageError, match=r"is bytes, not"):
            PhysicalAllocation.import_fabric(cuda, wrong, G, GPU)  # type: ignore[arg-type]


def test_a_host_has_no_fabric() -> None:
    driver = HostDriver()
    with PhysicalAllocation.create(driver, G, "host") as memory:
        with pytest.raises(UnsupportedError, match=r"fabric needs a driver of GPUs; have the host driver.*export\(\)"):
            memory.export_fabric()
    with pytest.raises(UnsupportedError, match=r"64-byte handles of the fabric"):
        PhysicalAllocation.import_fabric(driver, bytes(64), G, "host")


@pytest.mark.parametrize(
    ("code", "error", "said"),
    [
        (NOT_PERMITTED, UnsupportedError, "an IMEX channel that this process may use"),
        (NOT_SUPPORTED, UnsupportedError, "GPUs that NVLink joins to the memory's own"),
        (1, ProtocolError, "name no memory that a driver exported"),
        (999, ProtocolError, "name no memory that a driver exported"),
    ],
)
def test_why_the_driver_opens_nothing(
    cuda: CudaDriver, control: standin.Standin, code: int, error: type[Exception], said: str
) -> None:
    with PhysicalAllocation.create(cuda, G, GPU, handle_kinds=FABRIC) as memory:
        data, before = memory.export_fabric(), cuda.live()
        with control.failing("cuMemImportFromShareableHandle", code=code), pytest.raises(error, match=said):
            PhysicalAllocation.import_fabric(cuda, data, G, GPU)
        with (
            control.failing("cuMemGetAllocationPropertiesFromHandle"),
            pytest.raises(Exception, match=r"CUDA_ERROR_UNKNOWN"),
        ):
            PhysicalAllocation.import_fabric(cuda, data, G, GPU)
        assert cuda.live() == before  # I4


def test_an_export_that_is_not_permitted(cuda: CudaDriver, control: standin.Standin) -> None:
    with PhysicalAllocation.create(cuda, G, GPU, handle_kinds=FABRIC) as memory:
        with control.failing("cuMemExportToShareableHandle", code=NOT_PERMITTED):
            with pytest.raises(UnsupportedError, match="IMEX"):
                memory.export_fabric()
        assert memory.export_fabric()


@pytest.mark.parametrize(
    "call", ["mem_import_fabric(bytes(64), 2 << 20, here)", "multicast_import_fabric(bytes(64), 2 << 20)"]
)
def test_before_12_3_there_is_no_such_kind(call: str) -> None:
    """Not the fault of a missing IMEX channel, which no setting would bring."""
    script = f"""
import os
os.environ["VRAM_MULTICAST"] = "on"
from vram import driver
from vram.errors import UnsupportedError
from vram.spec import Location
here = Location("cuda", 0)
try:
    driver.get(here).{call}
except UnsupportedError as error:
    print(error)
"""
    said = child(script, driver_version=12020)
    assert "needs a driver of CUDA 12.3; have 12.2. Upgrade the NVIDIA driver" in said
    assert "IMEX" not in said


# -- what it is said that there is ----------------------------------------------------------------------------------
def test_it_is_probed_the_whole_way(control: standin.Standin) -> None:
    mine = CudaDriver()
    before = mine.live()
    with control.failing("cuMemImportFromShareableHandle", nth=2, code=NOT_PERMITTED):  # the first is the descriptor's
        assert "opening memory by a fabric handle needs an IMEX channel" in mine.support(GPU).fabric
    assert mine.live() == before
    mine = CudaDriver()
    with control.failing("cuMemExportToShareableHandle", nth=2, code=NOT_PERMITTED):
        assert "exporting memory as FABRIC needs an IMEX channel" in mine.support(GPU).fabric
    mine = CudaDriver()
    assert mine.support(GPU).fabric == ""
    assert mine.live() == before


# -- multicast objects ------------------------------------------------------------------------------------------------
@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        monkeypatch.delenv(switch, raising=False)
    monkeypatch.setenv("VRAM_MULTICAST", "on")


def test_a_multicast_object_leaves_by_64_bytes(cuda: Any, close: contextlib.ExitStack, on: None) -> None:
    here = close.enter_context(MulticastObject.create(cuda, 2, G, handle_kinds=FABRIC))
    data = here.export_fabric()
    assert (len(data), here.export_fabric()) == (64, data)
    assert repr(here).endswith("0/2 devices, 0 bound, exported>")
    there = close.enter_context(MulticastObject.import_fabric(cuda, data, G, 2))
    assert there.handle_kinds == FABRIC
    assert there.export_fabric() == data
    here.add_device("cuda:0")
    there.added_elsewhere(1)
    there.add_device("cuda:1")
    here.added_elsewhere(1)
    where = close.enter_context(AddressReservation.reserve(cuda, 3 * G))
    views = []
    for number, (team, place) in enumerate(((here, GPU), (there, OTHER))):
        memory = close.enter_context(PhysicalAllocation.create(cuda, G, place, handle_kinds=FABRIC))
        views.append(close.enter_context(MemoryMapping.map(where, number * G, memory)))
        team.bind(memory)
    with here.map(where, 2 * G) as mapping:
        cuda.copy_in(mapping.address, memoryview(b"both"))
    for view in views:
        found = bytearray(4)
        cuda.copy_out(memoryview(found), view.address)
        assert found == b"both"


def test_memory_and_objects_of_the_fabric_are_told_apart(cuda: Any, close: contextlib.ExitStack, on: None) -> None:
    team = close.enter_context(MulticastObject.create(cuda, 2, G, handle_kinds=FABRIC))
    memory = close.enter_context(PhysicalAllocation.create(cuda, G, GPU, handle_kinds=FABRIC))
    before = cuda.live()
    with pytest.raises(ProtocolError, match=r"no memory, but something else .* such as a multicast object"):
        PhysicalAllocation.import_fabric(cuda, team.export_fabric(), G, GPU)
    with pytest.raises(ProtocolError, match=r"this is memory, not a multicast object"):
        MulticastObject.import_fabric(cuda, memory.export_fabric(), G, 2)
    with pytest.raises(ProtocolError, match=r"has 64 bytes, not 3"):
        MulticastObject.import_fabric(cuda, b"abc", G, 2)
    with pytest.raises(UsageError, match=r"leaves as 64 bytes, not by a descriptor"):
        team.export(FABRIC)
    assert cuda.live() == before
    plain = close.enter_context(MulticastObject.create(cuda, 2, G))
    with pytest.raises(UsageError, match=r"as FABRIC: it was created for POSIX_FD"):
        plain.export_fabric()
    with pytest.raises(UsageError, match=r"cannot leave the process as FABRIC"):
        cuda.mem_export_fabric(plain.driver_handle)
