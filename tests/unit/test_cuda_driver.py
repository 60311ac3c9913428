"""What is particular to the CUDA driver, on the stand-in: its errors, places, contexts and devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.threads import race

import standin
import vram
from vram import driver as drivers
from vram.arrays import Array
from vram.driver.cuda import CudaDriver, failures
from vram.driver.cuda.devices import _current_node
from vram.driver.protocol import DeviceMemory, Driver, MemoryProperties
from vram.errors import (
    AddressSpaceError,
    DeviceLostError,
    DriverError,
    OutOfMemoryError,
    ProtocolError,
    UnsupportedError,
    UsageError,
)
from vram.memory import AddressReservation, MemoryMapping, PhysicalAllocation, Region
from vram.spec import Access, AllocationFlags, AllocationSpec, HandleKind, Location

pytestmark = pytest.mark.standin
G = 2 << 20
GPU, OTHER = Location("cuda", 0), Location("cuda", 1)
FD, NONE = HandleKind.POSIX_FD, HandleKind.NONE
RW, READ = Access.READ_WRITE, Access.READ
# What the manual says of a code after which nothing works any more (CUDA Driver API, "Data types used by CUDA driver",
# CUresult; cuda.h has the same words): the process must be relaunched, the context is gone, or the hardware failed.
LOST_WORDS = re.compile(r"must be terminated and relaunched|cannot be used anymore|an uncorrectable \w+ error")


@pytest.fixture
def cuda() -> CudaDriver:
    found = drivers.get(GPU)
    assert isinstance(found, CudaDriver)
    return found


@pytest.fixture
def control() -> Iterator[standin.Standin]:
    found = standin.Standin()
    found.clear()
    yield found
    found.clear()


def test_the_parts_have_every_call_and_do_not_know_the_driver() -> None:
    driver = CudaDriver()
    calls = {name for one in (Driver, DeviceMemory) for name in vars(one) if not name.startswith("_")} - {"name"}
    assert [name for name in calls if not callable(getattr(driver, name, None))] == []
    gone = weakref.ref(driver)
    del driver  # without the collector: bound methods of the parts are no cycle
    assert gone() is None


def child(script: str, python: tuple[str, ...] = (), **settings: object) -> str:
    """Return what a script prints in a process of its own, which must end well and say nothing on its error stream."""
    environment = standin.child_environment(**settings) if "LD_LIBRARY_PATH" not in settings else dict(os.environ)
    if "LD_LIBRARY_PATH" in settings:
        environment["LD_LIBRARY_PATH"] = str(settings["LD_LIBRARY_PATH"])
    done = subprocess.run(
        [sys.executable, *python, "-c", script],
        capture_output=True, text=True, timeout=300, env=environment, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.strip()


ASK = """
from vram import driver
from vram.errors import UnsupportedError
from vram.spec import HandleKind, Location
for _ in range(2):  # a driver that could not be had is looked for again, and the answer is the same
    try:
        cuda = driver.get(Location("cuda"))
        {then}
    except UnsupportedError as error:
        said = str(error)
    else:
        said = "it works"
print(said)
"""


def asked(then: str = "pass", before: str = "", **settings: object) -> str:
    return child(before + ASK.format(then=then), **settings)


def lost_by_the_manual() -> tuple[set[int], set[int]]:
    """Read the codes out of the header's own comments: those that are the end, and all that it knows."""
    include = standin._include()
    assert include is not None
    text = (include / "cuda.h").read_text()
    found = re.findall(r"/\*\*((?:(?!\*/).)*)\*/\s*CUDA_ERROR_\w+\s*=\s*(\d+)", text, re.DOTALL)
    lost = {int(code) for words, code in found if LOST_WORDS.search(" ".join(words.replace("*", " ").split()))}
    return lost, {int(code) for _, code in found}


# -- errors of the driver -----------------------------------------------------------------------------------------
def test_every_status_has_a_name_and_words(cuda: CudaDriver, control: standin.Standin) -> None:
    codes = [int(code) for code in cuda.bindings.api.CUresult if int(code)]
    assert len(codes) > 90
    lost, _ = lost_by_the_manual()
    assert len(lost) >= 12
    for code in codes:
        mine = CudaDriver()  # several of these codes are its end
        with control.failing("cuMemAddressReserve", code=code), pytest.raises(DriverError) as caught:
            mine.address_reserve(G)
        error = caught.value
        assert (error.call, error.code) == ("cuMemAddressReserve", code)
        assert error.name.startswith("CUDA_ERROR_"), error
        assert not error.name[11:].isdigit(), error
        assert len(str(error).partition(": ")[2]) > 4, error
        assert isinstance(error, DeviceLostError) == (code in lost), error
        assert isinstance(error, AddressSpaceError) == (code in (1, 2))


@pytest.mark.parametrize("code", [4711, 998, 2_000_000_000])
def test_a_status_that_nobody_knows_is_tolerated(cuda: CudaDriver, control: standin.Standin, code: int) -> None:
    with control.failing("cuMemCreate", code=code), pytest.raises(DriverError) as caught:
        cuda.mem_create(G, GPU, FD)
    assert (caught.value.code, caught.value.name) == (code, f"CUDA_ERROR_{code}")
    assert f"({code})" in str(caught.value)
    cuda.mem_release(cuda.mem_create(G, GPU, FD))


def test_no_memory_and_no_addresses_are_different_errors(cuda: CudaDriver, control: standin.Standin) -> None:
    with pytest.raises(AddressSpaceError, match="addresses") as none:
        cuda.address_reserve(1 << 50)
    assert not isinstance(none.value, OutOfMemoryError)
    with pytest.raises(OutOfMemoryError, match="on cuda:0") as full:
        cuda.mem_create(1 << 50, GPU, FD)
    assert not isinstance(full.value, AddressSpaceError)
    control.set_free(1, G)
    try:
        with pytest.raises(OutOfMemoryError, match="cuda:1"):
            Region.create(OTHER, driver=cuda, capacity=4 * G, nbytes=2 * G)
    finally:
        control.set_free(1, None)


def test_which_codes_are_the_end() -> None:
    """Each that the manual says it of. One that this header does not know yet came with a later one."""
    lost, known = lost_by_the_manual()
    assert lost == failures._LOST & known
    assert "another process" in str(failures.failure("x", 46, "CUDA_ERROR_DEVICE_UNAVAILABLE"))


# -- bad input ----------------------------------------------------------------------------------------------------
def refused(call: Callable[..., object], *arguments: object) -> str:
    """Return what is said to a call that is the caller's mistake, or beyond this machine; nothing changes."""
    driver = drivers.get(GPU)
    before, fds = driver.live(), len(os.listdir("/proc/self/fd"))
    with pytest.raises((UsageError, UnsupportedError, ProtocolError)) as caught:
        call(*arguments)
    assert driver.live() == before
    assert len(os.listdir("/proc/self/fd")) == fds
    return str(caught.value)


NOWHERE = ["cuda:2", "cuda:9999", "cuda:GPU-00000000-0000-0000-0000-000000000000"]


@pytest.mark.parametrize("place", NOWHERE)
def test_a_device_that_is_not_there(cuda: CudaDriver, place: str) -> None:
    where = Location.parse(place)
    calls: list[tuple[Callable[..., object], tuple[object, ...]]] = [
        (cuda.mem_create, (G, where, FD)), (cuda.mem_granularity, (where, FD)), (cuda.device_info, (where,)),
        (cuda.mem_info, (where,)), (cuda.synchronize, (where,)), (cuda.stream_create, (where,)),
        (cuda.support, (where,)), (cuda.canonical, (where,)),
    ]  # fmt: skip
    for call, arguments in calls:
        said = refused(call, *arguments)
        assert place in said
        assert f"no {place} among the 2 GPUs visible to this process" in said
        assert cuda.device_info(GPU).uuid in said


def test_places_of_the_host(cuda: CudaDriver) -> None:
    assert "NUMA" in refused(cuda.mem_create, G, Location("cuda", "host"), FD)
    assert "handle_kinds=HandleKind.NONE" in refused(cuda.mem_granularity, Location("cuda", "host"), FD)
    assert "cuda:numa:99" in refused(cuda.mem_create, G, Location("cuda", "numa:99"), FD)
    assert "cuda:elsewhere" in refused(cuda.mem_create, G, Location("cuda", "elsewhere"), FD)
    assert "cuda:..." in refused(cuda.mem_create, G, Location("host"), FD)
    assert "cuda:numa:2" in refused(cuda.mem_create, G, Location("cuda", "numa:2"), FD)
    for where, kinds in (("host", NONE), ("numa:0", FD), ("numa:1", FD), ("numa", FD), ("numa", NONE)):
        handle = cuda.mem_create(G, Location("cuda", where), kinds)
        found = cuda.mem_properties(handle)
        assert (found.handle_kinds, found.nbytes) == (kinds, G)
        here = where if where != "numa" else f"numa:{_current_node()}"
        assert str(found.location) == f"cuda:{here}"
        cuda.mem_release(handle)


def test_memory_of_another_node_of_the_host_stays_there(cuda: CudaDriver) -> None:
    """Sent to another process as well: the place is told by the driver, not by who sends it."""
    home = Location("cuda", "numa:1")
    with PhysicalAllocation.create(cuda, G, home) as memory:
        again = cuda.mem_import(memory.export(), FD, G)
        assert cuda.mem_properties(again).location == home
        cuda.mem_release(again)


def test_what_is_of_a_gpu_only_names_one(cuda: CudaDriver) -> None:
    for call in (cuda.device_info, cuda.stream_create, cuda.mem_info):
        assert "name a GPU" in refused(call, Location("cuda", "numa:0"))


def test_memory_of_the_host_is_copied_by_the_cpu_and_the_gpu(cuda: CudaDriver) -> None:
    home = Location("cuda", "numa:0")
    with (
        Region.create(home, driver=cuda, capacity=G, nbytes=G, users=[home, GPU]) as region,
        Array(region, "int8", G) as here,
    ):
        here.fill(5)
        assert (here[:9].to_host() == 5).all()
        with pytest.raises(UsageError, match="of no GPU"):
            cuda.ordinal_of(region.address)
    with pytest.raises(UsageError, match="no address"):
        cuda.ordinal_of(4096)


@pytest.mark.parametrize("kinds", [HandleKind.WIN32, HandleKind.WIN32_KMT, HandleKind.LEGACY_IPC, HandleKind.POOL])
def test_kinds_of_other_systems_and_apis(cuda: CudaDriver, kinds: HandleKind) -> None:
    for asked_for in (kinds, kinds | FD):
        said = refused(cuda.mem_create, G, GPU, asked_for)
        assert "POSIX_FD" in said
        assert ("Linux" in said) == bool(kinds & (HandleKind.WIN32 | HandleKind.WIN32_KMT))
    handle = cuda.mem_create(G, GPU, FD)
    refused(cuda.mem_export, handle, kinds)
    refused(cuda.mem_import, 0, kinds, G)
    cuda.mem_release(handle)


# -- what memory is meant for -------------------------------------------------------------------------------------
FLAGS = AllocationFlags.COMPRESSIBLE | AllocationFlags.GPU_DIRECT_RDMA | AllocationFlags.TILE_POOL


def test_an_imported_allocation_has_the_kind_that_it_came_by(cuda: CudaDriver) -> None:
    """The driver itself says NONE of it: measured."""
    with PhysicalAllocation.create(cuda, AllocationSpec(G, OTHER, FD, FLAGS)) as here:
        with PhysicalAllocation.import_(cuda, here.export(), G) as there:
            told = FLAGS & ~AllocationFlags.GPU_DIRECT_RDMA  # measured, too
            assert here.properties() == MemoryProperties(OTHER, FD, G, FLAGS)
            assert there.properties() == MemoryProperties(OTHER, FD, G, told)
            assert there.flags == told
            assert repr(there) == "<PhysicalAllocation cuda:1 2 MiB, posix_fd, compressible|tile_pool>"


def test_regions_are_made_for_what_they_are_meant_for(cuda: CudaDriver) -> None:
    with Region.create(
        GPU, driver=cuda, capacity=4 * G, nbytes=1, chunk=G, flags=AllocationFlags.GPU_DIRECT_RDMA
    ) as region:
        region.grow(3 * G)
        assert [piece.flags for piece in region.segments(0, 3 * G)[0]] == [AllocationFlags.GPU_DIRECT_RDMA] * 3


def test_compression_that_the_driver_declines_is_no_error() -> None:
    then = """
        from vram.memory import AllocationFlags, AllocationSpec, PhysicalAllocation
        both = AllocationFlags.COMPRESSIBLE | AllocationFlags.GPU_DIRECT_RDMA
        with PhysicalAllocation.create(cuda, AllocationSpec(2 << 20, Location("cuda", 0), flags=both)) as memory:
            print(repr(memory.flags), memory.properties().flags == memory.flags)"""
    assert asked(then, declines_compression=1).startswith("<AllocationFlags.GPU_DIRECT_RDMA: 256> True")


@pytest.mark.parametrize(
    ("flag", "needs"),
    [
        ("COMPRESSIBLE", "a GPU with compute data compression"),
        ("GPU_DIRECT_RDMA", "a GPU and a system with GPUDirect RDMA"),
        ("TILE_POOL", "a GPU with sparse CUDA arrays"),
        ("HW_DECOMPRESS", "a GPU with a decompression engine"),
    ],
)
def test_what_a_device_lacks_is_named(flag: str, needs: str) -> None:
    lacks = "compressible,rdma,tile_pool,decompression"
    before = "from vram.memory import AllocationFlags\n"
    for call in ("mem_create(2 << 20, ", "mem_granularity("):
        said = asked(f"cuda.{call}Location('cuda', 0), HandleKind(1), AllocationFlags.{flag})", before, lacks=lacks)
        assert f"on cuda:0: <AllocationFlags.{flag}: " in said
        assert f"needs {needs}; have vram stand-in 0, which says that it has not. Leave the flag out" in said


def test_a_flag_of_a_later_driver() -> None:
    then = "cuda.mem_create(2 << 20, Location('cuda', 0), HandleKind(1), AllocationFlags.HW_DECOMPRESS)"
    before = "from vram.memory import AllocationFlags\n"
    said = asked(then, before, driver_version=12070, lacks="")
    assert "needs a driver of CUDA 12.8; have 12.7. Upgrade the NVIDIA driver, or leave the flag out" in said
    assert asked(then.replace("cuda.mem_create", "cuda.mem_release(cuda.mem_create") + ")", before, lacks="") == (
        "it works"
    )


def test_memory_of_the_host_is_meant_for_nothing(cuda: CudaDriver) -> None:
    for place in ("numa:0", "host"):
        said = refused(cuda.mem_create, G, Location("cuda", place), NONE, AllocationFlags.GPU_DIRECT_RDMA)
        assert "needs memory of a GPU; have memory of the host" in said


def test_flags_that_the_driver_refuses_after_all(cuda: CudaDriver, control: standin.Standin) -> None:
    for code in (1, 801):
        with control.failing("cuMemCreate", code=code), pytest.raises(UnsupportedError) as caught:
            cuda.mem_create(G, GPU, FD, AllocationFlags.COMPRESSIBLE)
        assert "take these flags together" in str(caught.value)
        assert caught.value.remedy.startswith("Leave flags out")


def test_memory_whose_properties_are_not_told_is_not_made(cuda: CudaDriver, control: standin.Standin) -> None:
    """I4."""
    before = cuda.live()
    with control.failing("cuMemGetAllocationPropertiesFromHandle"), pytest.raises(DriverError):
        PhysicalAllocation.create(cuda, AllocationSpec(G, GPU, flags=AllocationFlags.COMPRESSIBLE))
    assert cuda.live() == before


def test_what_was_imported_is_exported_again(cuda: CudaDriver) -> None:
    """The driver refuses that (measured): so the descriptor that it came from goes on."""
    with PhysicalAllocation.create(cuda, G, GPU) as first, Region.from_allocations(cuda, [first], access=RW) as here:
        cuda.fill(here.address, 9, G)
        with PhysicalAllocation.import_(cuda, first.export(), G) as second:
            again = second.export()
            assert not os.get_inheritable(again)
            with PhysicalAllocation.import_(cuda, again, G) as third, Region.from_allocations(cuda, [third]) as there:
                found = bytearray(4)
                cuda.copy_out(memoryview(found), there.address)
                assert found == b"\x09" * 4


def test_no_driver(tmp_path: Path) -> None:
    said = asked(LD_LIBRARY_PATH=str(tmp_path))
    assert "needs an NVIDIA driver (libcuda.so.1)" in said
    assert 'device="host"' in said


def test_no_devices() -> None:
    said = asked(devices=0)
    assert "needs a GPU" in said
    assert "13.0" in said
    assert "CUDA_VISIBLE_DEVICES" not in said
    said = asked(visible_devices="")
    assert "needs a GPU" in said
    assert "CUDA_VISIBLE_DEVICES=''" in said


def test_a_driver_that_is_too_old() -> None:
    then = 'cuda.mem_create(2 << 20, Location("cuda", "numa:0"), HandleKind(1))'
    said = asked(then, driver_version=11080)
    assert "needs a driver of CUDA 12.2; have 11.8" in said
    assert "Upgrade the NVIDIA driver" in said
    assert asked("print(cuda.versions[0], cuda.support(Location('cuda', 0)).posix_fd)", driver_version=11080) == (
        "11.8 \n11.8 \nit works"
    )


def test_the_oldest_driver_that_is_taken_works() -> None:
    then = "cuda.mem_release(cuda.mem_create(2 << 20, Location('cuda', 1), HandleKind(1)))"
    assert asked(f"{then}; print('made')", driver_version=11040) == "made\nmade\nit works"


def test_a_driver_that_lacks_a_function() -> None:
    said = asked("cuda.address_reserve(2 << 20)", no_symbols="cuMemAddressReserve")
    assert said.startswith("cuMemAddressReserve needs a driver that has this function; have driver 13.0"), said
    assert "Upgrade the NVIDIA driver" in said


def test_a_device_without_virtual_memory_management() -> None:
    said = asked("cuda.mem_create(2 << 20, Location('cuda', 0), HandleKind(1))", no_vmm=1)
    assert "virtual memory management on cuda:0 needs a device that has it" in said


def test_no_bindings() -> None:
    said = asked(before="import sys; sys.modules['cuda.bindings'] = None\n")
    assert "the package cuda-bindings" in said
    assert "pip install '.[cuda13]' in a clone of vram" in said


def test_bindings_that_are_too_old() -> None:
    old = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: "12.8.0" if name == "cuda-bindings" else version(name)
"""
    said = asked(before=old)
    assert "needs cuda-bindings 12.9.6 or newer; have 12.8.0" in said
    assert "pip install -U" in said


def test_a_function_that_the_bindings_lack(cuda: CudaDriver) -> None:
    with pytest.raises(UnsupportedError, match=r"cuda-bindings that know it; have cuda-bindings 1[23]\."):
        cuda.bindings("cuTimeTravel")
    assert not cuda.bindings.has("cuTimeTravel")


# -- support ------------------------------------------------------------------------------------------------------
def test_support_is_found_out_once_and_says_why(control: standin.Standin) -> None:
    mine = CudaDriver()
    control.clear()
    found = mine.support(GPU)
    assert (found.vmm, found.posix_fd) == ("", "")
    assert "IMEX" in found.fabric
    assert "a GPU with a decompression engine" in found.hw_decompress
    assert "needs VRAM_MULTICAST=on; have VRAM_MULTICAST not set" in found.multicast
    assert set(found.missing()) == {"fabric", "hw_decompress", "multicast"}
    assert control.calls("cuMemCreate") == 6
    assert control.calls("cuMemExportToShareableHandle") == control.calls("cuMemImportFromShareableHandle") == 1
    assert control.calls("cuMulticastCreate") == 0
    asked_once = sum(control.called().values())
    assert mine.support(GPU) is found
    assert sum(control.called().values()) == asked_once
    assert not any((mine.live().handles, mine.live().mappings))


def test_multicast_is_there_where_it_is_on() -> None:
    on = "import os; os.environ['VRAM_MULTICAST'] = 'on'"
    then = "print(repr(cuda.support(Location('cuda', 0)).multicast))"
    assert asked(then, before=on).startswith("''")


def test_support_names_what_a_device_lacks() -> None:
    then = (
        "print(sorted(item for item in cuda.support(Location('cuda', 0)).missing().items() if item[0] != 'multicast'))"
    )
    flags = ["compressible", "gpu_direct_rdma", "hw_decompress", "tile_pool"]
    said = asked(then, fabric=1, lacks="compressible,rdma,tile_pool,decompression")
    assert re.findall(r"\('(\w+)', ", said.splitlines()[0]) == flags
    assert asked(then, fabric=1, lacks="").splitlines()[0] == "[]"
    said = asked(then, fabric=1, lacks="", declines_compression=1).splitlines()[0]
    assert said == (
        "[('compressible', 'the driver takes <AllocationFlags.COMPRESSIBLE: 1> and makes memory without it')]"
    )
    assert "'legacy_ipc'" not in asked(then, driver_version=11080)


# -- contexts -----------------------------------------------------------------------------------------------------
CONTEXTS = """
import os, threading, sys
from vram import driver
from vram.memory import *
from vram.spec import Access, HandleKind, Location
cuda = driver.get(Location("cuda"))
control = standin.Standin()
G, GPU, OTHER = 2 << 20, Location("cuda", 0), Location("cuda", 1)
def contexts():
    return control.live().get("contexts", 0)
with PhysicalAllocation.create(cuda, G, GPU) as memory:
    with PhysicalAllocation.import_(cuda, memory.export(), G) as again:
        region = Region.from_allocations(cuda, [memory, again], access=Access.READ_WRITE, users=[GPU, OTHER])
        handle = cuda.mem_retain(region.address)
        cuda.mem_release(handle)
        cuda.mem_get_access(region.address, OTHER)
        cuda.device_info(OTHER), cuda.support(GPU), cuda.synchronize(GPU), cuda.synchronize(OTHER)
        print(contexts())
        cuda.fill(region.address, 3, G)
        print(contexts(), [device.is_used for device in cuda.devices.all])
        region.close()
        cuda.synchronize(OTHER)
print(contexts())
"""


def test_no_context_but_where_work_is_done() -> None:
    """Not by reserving, making, mapping and sharing memory; and on the GPU that copies, only."""
    tests = str(Path(standin.__file__).parents[1])
    said = child(f"import sys; sys.path.insert(0, {tests!r}); import standin\n" + CONTEXTS)
    assert said.splitlines() == ["0", "1 [True, False]", "1"]


def everything(cuda: CudaDriver) -> None:
    with (
        Array.create(cuda, GPU, (9, 9), "int32", capacity=G, chunk=G) as one,
        Array.create(cuda, OTHER, 81, "int32") as two,
    ):
        one[:] = 7
        one.resize(G // 64)
        cuda.copy(two.address, one.address, two.nbytes)
        assert (two.to_host() == 7).all()
        stream, event = cuda.stream_create(OTHER), cuda.event_create(OTHER)
        cuda.fill_async(two.address, 1, 4, stream)
        cuda.copy_async(two.address, one.address, 8, stream)
        cuda.event_record(event, stream)
        cuda.stream_wait(stream, event, OTHER)
        assert not cuda.stream_is_capturing(stream, OTHER)
        cuda.event_synchronize(event)
        assert cuda.event_is_done(event)
        cuda.stream_synchronize(stream, OTHER)
        cuda.event_destroy(event)
        cuda.stream_destroy(stream)
        cuda.synchronize(GPU)
        cuda.mem_info(OTHER)
        assert (cuda.ordinal_of(one.address), cuda.ordinal_of(two.address)) == (0, 1)


def test_threads_without_a_context_can_do_everything(cuda: CudaDriver) -> None:
    def work() -> None:
        api = cuda.bindings.api
        assert int(api.cuCtxGetCurrent()[1]) == 0
        everything(cuda)
        assert int(api.cuCtxGetCurrent()[1]) == 0

    race(work)


def test_a_copy_is_put_on_a_stream_of_whoever_made_it(cuda: CudaDriver, control: standin.Standin) -> None:
    api = cuda.bindings.api
    with vram.zeros(8, "uint8", device="cuda:0") as one, vram.zeros(8, "uint8", device="cuda:0") as two:
        one[:] = 5

        gone = 0

        def work() -> None:
            nonlocal gone
            api.cuCtxSetCurrent(cuda.devices.device(GPU).context)
            gone = int(api.cuStreamCreate(1)[1])
            control.defer()
            cuda.launch_copy(two.address, one.address, 8, gone, GPU)
            api.cuStreamSynchronize(gone)
            api.cuStreamDestroy(gone)
            api.cuCtxSetCurrent(api.CUcontext(0))

        race(work)
        assert (two.to_host() == 5).all()
        with pytest.raises(UsageError, match=f"launch_copy: {gone:#x} is no stream"):
            cuda.launch_copy(two.address, one.address, 8, gone, GPU)


def test_a_stream_says_whether_it_captures(cuda: CudaDriver, control: standin.Standin) -> None:
    stream, other = cuda.stream_create(GPU), cuda.stream_create(GPU)
    try:
        control.capture(stream)
        assert cuda.stream_is_capturing(stream, GPU)
        assert not cuda.stream_is_capturing(other, GPU)
        with control.failing("cuStreamIsCapturing", code=906):  # the legacy stream, which waits for one that does
            assert cuda.stream_is_capturing(1, GPU)
        with pytest.raises(DriverError, match="end the capture first"):
            cuda.synchronize(GPU)
    finally:
        control.capture(0)
        cuda.stream_destroy(stream)
        cuda.stream_destroy(other)
    with pytest.raises(UsageError, match="no stream"):
        cuda.stream_is_capturing(stream, GPU)


def test_the_context_of_the_thread_is_as_before(cuda: CudaDriver, control: standin.Standin) -> None:
    def work() -> None:
        api = cuda.bindings.api
        mine = int(cuda.devices.all[1].context)
        api.cuCtxPushCurrent(mine)
        everything(cuda)
        assert int(api.cuCtxGetCurrent()[1]) == mine
        with Array.create(cuda, GPU, 64, "int8") as array:
            for name in ("cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuCtxPushCurrent"):
                with control.failing(name), pytest.raises(DriverError):
                    array.to_host()
                assert int(api.cuCtxGetCurrent()[1]) == mine
            control.clear()
            array.to_host()
            assert control.calls("cuCtxPushCurrent") == control.calls("cuCtxPopCurrent") == 1
        for name, call in (("cuStreamCreate", cuda.stream_create), ("cuEventCreate", cuda.event_create)):
            with control.failing(name), pytest.raises(DriverError):
                call(GPU)
            assert int(api.cuCtxGetCurrent()[1]) == mine
        api.cuCtxPopCurrent()
        assert int(api.cuCtxGetCurrent()[1]) == 0

    race(work)


# -- several devices ----------------------------------------------------------------------------------------------
def test_one_call_gives_a_mapping_to_two_gpus(cuda: CudaDriver, control: standin.Standin) -> None:
    with PhysicalAllocation.create(cuda, G, GPU) as memory, AddressReservation.reserve(cuda, G) as where:
        with MemoryMapping.map(where, 0, memory, access=Access.NONE) as mapping:
            control.clear()
            mapping.set_access(RW, [GPU, OTHER])
            assert control.calls("cuMemSetAccess") == 1
            assert [cuda.mem_get_access(mapping.address, place) for place in (GPU, OTHER)] == [RW, RW]
            mapping.set_access(READ, [OTHER])
            assert [cuda.mem_get_access(mapping.address, place) for place in (GPU, OTHER)] == [RW, READ]
            mapping.set_access(Access.NONE, [GPU])
            assert [cuda.mem_get_access(mapping.address, place) for place in (GPU, OTHER)] == [Access.NONE, READ]
            with pytest.raises(UsageError, match="access"):
                cuda.fill(mapping.address, 1, 4)


def test_gpus_that_are_no_peers() -> None:
    then = """
        from vram.memory import Region
        from vram.spec import HandleKind
        GPU, OTHER = Location("cuda", 0), Location("cuda", 1)
        before = cuda.live()
        try:
            Region.create(GPU, driver=cuda, capacity=2 << 20, nbytes=2 << 20, users=[GPU, OTHER])
        finally:
            assert cuda.live() == before"""
    said = asked(then, no_peer=1)
    assert said.startswith("access of cuda:1 to memory on cuda:0 needs peer access between the two; have "), said
    assert "no peers" in said
    assert "Copy over the host" in said
