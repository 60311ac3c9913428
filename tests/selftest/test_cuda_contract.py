"""Bugs planted in the CUDA driver, and the test of the contract that must catch each, on the stand-in."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.selftest import reasons

import standin

pytestmark = pytest.mark.standin

MUTANTS = '''
"""The CUDA driver with one bug per class."""
import os, sys
sys.path.insert(0, {tests!r})
import standin
standin.preload()
import pytest
from vram.driver.cuda import CudaDriver
from vram.driver.cuda.devices import Current
from vram.driver.protocol import Support
from vram.errors import DriverError, UsageError
from vram.spec import Access, HandleKind, Location
from vram.testing.driver import DriverContract
from vram.testing.memory import MemoryContract

class Mutant(DriverContract):
    offers = frozenset({{"Fabric", "Multicast", "NativeHandles", "StreamOrdered"}})
    kind = CudaDriver

    @pytest.fixture
    def driver(self):
        return self.kind()

    @pytest.fixture
    def location(self):
        return Location("cuda", 0)


class MemoryMutant(MemoryContract):
    offers = Mutant.offers
    driver, location, kind = Mutant.driver, Mutant.location, CudaDriver


class TestForgetsToRelease(Mutant):
    class kind(CudaDriver):
        def mem_release(self, handle):
            self.mem_properties(handle)


class TestUnmapsTheBooksOnly(Mutant):
    class kind(CudaDriver):
        def mem_unmap(self, address, nbytes):
            due = self._books.whole("x", address, nbytes, gaps=True)
            for mapping in due:
                mapping.take()
                self._books.withdraw(mapping)


class TestExportsInheritable(Mutant):
    class kind(CudaDriver):
        def mem_export(self, handle, kind):
            fd = super().mem_export(handle, kind)
            os.set_inheritable(fd, True)
            return fd


class TestTakesTheDescriptor(Mutant):
    class kind(CudaDriver):
        def mem_import(self, fd, kind, nbytes):
            handle = super().mem_import(fd, kind, nbytes)
            os.close(fd)
            return handle


class TestLeaksWhenItRefuses(Mutant):
    class kind(CudaDriver):
        def mem_map(self, address, nbytes, offset, handle):
            memory = self._books.memory("x", handle)
            try:
                super().mem_map(address, nbytes, offset, handle)
            except UsageError:
                self._books.new_handle(memory)
                raise


class TestSaysWhatTheDriverSays(Mutant):
    """Without the books: one error for every mistake."""
    class kind(CudaDriver):
        def mem_set_access(self, address, nbytes, access, locations):
            self._call("cuMemSetAccess", address, nbytes, (self._grant(access, (1, 0)),), 1)


class TestCopiesWords(Mutant):
    class kind(CudaDriver):
        def copy_in(self, destination, source):
            source = source.cast("B")
            super().copy_in(destination, source[: len(source) // 4 * 4])


class TestGivesAccessToTheFirstOnly(Mutant):
    class kind(CudaDriver):
        def mem_get_access(self, address, location):
            return Access.READ_WRITE


class TestAsksTheDriverToExportImports(Mutant):
    """It answers INVALID_VALUE to that, measured."""
    class kind(CudaDriver):
        def mem_import(self, fd, kind, nbytes):
            handle = super().mem_import(fd, kind, nbytes)
            os.close(self._books.memory("x", handle)._fds.pop())
            return handle


class TestLetsEverybodyWrite(Mutant):
    class kind(CudaDriver):
        def mem_set_access(self, address, nbytes, access, locations):
            super().mem_set_access(address, nbytes, Access.READ_WRITE, locations)


class TestRetainsNothing(Mutant):
    """Other memory, of the same size."""
    class kind(CudaDriver):
        def mem_retain(self, address):
            memory = self._books.mapping_at("x", address).memory
            return self.mem_create(memory.nbytes, Location("cuda", 0), HandleKind.POSIX_FD)


class TestForgetsWhatMemoryIsFor(Mutant):
    class kind(CudaDriver):
        def mem_create(self, nbytes, location, kinds, flags=0):
            return super().mem_create(nbytes, location, kinds)


class TestSaysThatAllWorks(Mutant):
    class kind(CudaDriver):
        def support(self, location):
            return Support(*[""] * 10)


class TestLendsOneHandle(Mutant):
    class kind(CudaDriver):
        def mem_native_handle(self, handle):
            super().mem_native_handle(handle)
            return 7


class TestCutsTheFabricHandle(Mutant):
    class kind(CudaDriver):
        def mem_export_fabric(self, handle):
            return super().mem_export_fabric(handle)[:63]


class TestFillsTheFabricHandle(Mutant):
    class kind(CudaDriver):
        def mem_import_fabric(self, data, nbytes, location):
            return super().mem_import_fabric((data + bytes(64))[:64], nbytes, location)


class TestOpensOtherMemory(Mutant):
    class kind(CudaDriver):
        def mem_import_fabric(self, data, nbytes, location):
            return self.mem_create(nbytes, location, HandleKind.FABRIC)


class TestForgetsTheMemory(MemoryMutant):
    class kind(CudaDriver):
        def mem_release(self, handle):
            pass


class TestUnmapsNothing(MemoryMutant):
    """An undo that says nothing although the device is well."""
    class kind(CudaDriver):
        def mem_unmap(self, address, nbytes):
            pass


class TestIsFine(Mutant):
    pass


class TestIsFineToo(MemoryMutant):
    pass
'''

CAUGHT_BY = {
    "ForgetsToRelease": ("a_handle_is_released_once", "DID NOT RAISE UsageError"),
    "UnmapsTheBooksOnly": (
        "unmap_takes_whole_mappings",
        "DriverError: cuMemAddressFree failed: CUDA_ERROR_INVALID_VALUE",
    ),
    "ExportsInheritable": ("export_and_import", "assert not os.get_inheritable("),
    "TakesTheDescriptor": ("export_and_import", "the caller's"),
    "LeaksWhenItRefuses": ("an_allocation_is_mapped_whole", "assert self.driver.live() == before"),
    "SaysWhatTheDriverSays": (
        "set_access_takes_whole_mappings_without_a_gap",
        "DriverError: cuMemSetAccess failed: CUDA_ERROR_INVALID_VALUE",
    ),
    "CopiesWords": ("bytes_across_adjacent_mappings", "assert b'acro\\x00\\x00' == b'across'"),
    "GivesAccessToTheFirstOnly": ("a_new_mapping_has_no_access", "assert <Access.READ_WRITE: 3> == <Access.NONE: 0>"),
    "AsksTheDriverToExportImports": (
        "imported_memory_can_be_exported_again",
        "DriverError: cuMemExportToShareableHandle failed: CUDA_ERROR_INVALID_VALUE",
    ),
    "LetsEverybodyWrite": ("read_only_is_real", "assert <Access.READ_WRITE: 3> == <Access.READ: 1>"),
    "ForgetsWhatMemoryIsFor": (
        "flags_are_granted_or_refused[gpu_direct_rdma]",
        "<AllocationFlags.GPU_DIRECT_RDMA: 256> in <AllocationFlags.NONE: 0>",
    ),
    "SaysThatAllWorks": (
        "support_is_what_works",
        "UnsupportedError: mem_create on cuda:0: <AllocationFlags.HW_DECOMPRESS: 131072> needs a GPU with",
    ),
    "LendsOneHandle": ("native_handles", "assert 7 != 7"),
    "CutsTheFabricHandle": ("the_fabric_works_or_says_what_it_takes", "assert 63 == 64"),
    "FillsTheFabricHandle": ("a_fabric_handle_is_not_believed", "DID NOT RAISE ProtocolError"),
    "OpensOtherMemory": ("fabric_export_and_import", '== b"shared"'),
    "RetainsNothing": ("retain", '== b"retained"'),
}
CAUGHT_BY_MEMORY = {
    "ForgetsTheMemory": ("an_allocation_is_zeroed_counted_and_given_back", "assert driver.live() =="),
    "UnmapsNothing": ("shrinking_gives_back_whole_chunks", "assert 8388608 == (8388608 - (2 * 2097152))"),
}
ALL = CAUGHT_BY | CAUGHT_BY_MEMORY


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Run each mutant against the test that should catch it; and the driver without a bug against all of these."""
    folder: Path = tmp_path_factory.mktemp("mutants")
    (folder / "test_mutants.py").write_text(MUTANTS.format(tests=str(Path(standin.__file__).parents[1])))
    chosen = [f"test_mutants.py::Test{mutant}::test_{test}" for mutant, (test, _) in ALL.items()]
    chosen += [f"test_mutants.py::TestIsFine::test_{test}" for test in sorted({test for test, _ in CAUGHT_BY.values()})]
    chosen += [f"test_mutants.py::TestIsFineToo::test_{test}" for test, _ in CAUGHT_BY_MEMORY.values()]
    return reasons.run(folder, chosen, standin.child_environment(fabric=True))


@pytest.mark.parametrize(("mutant", "test", "because"), [(name, *why) for name, why in ALL.items()])
def test_the_contract_catches(ran, mutant, test, because):
    reasons.require_of(ran, f"::Test{mutant}::test_{test}", because)


def test_and_nothing_else(ran):
    assert reasons.passed(ran, "TestIsFine") == {test for test, _ in ALL.values()}
