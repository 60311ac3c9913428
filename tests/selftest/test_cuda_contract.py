"""Bugs planted in the CUDA driver, and the test of the contract that must catch each, on the stand-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
from vram.errors import DriverError, UsageError
from vram.spec import Access, HandleKind, Location
from vram.testing.driver import DriverContract
from vram.testing.memory import MemoryContract

class Mutant(DriverContract):
    offers = frozenset({{"Multicast", "StreamOrdered"}})
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
                self._books.strike(mapping)
                mapping.memory.drop(mapping)


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
                self._new_handle(memory, 0)
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
    class kind(CudaDriver):
        def mem_retain(self, address):
            memory = self._books.mapping_at("x", address).memory
            return next(handle for handle, held in self._books.handles.items() if held is memory)


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
    "ForgetsToRelease": "a_handle_is_released_once",
    "UnmapsTheBooksOnly": "unmap_takes_whole_mappings",
    "ExportsInheritable": "export_and_import",
    "TakesTheDescriptor": "export_and_import",
    "LeaksWhenItRefuses": "an_allocation_is_mapped_whole",
    "SaysWhatTheDriverSays": "set_access_takes_whole_mappings_without_a_gap",
    "CopiesWords": "bytes_across_adjacent_mappings",
    "GivesAccessToTheFirstOnly": "a_new_mapping_has_no_access",
    "AsksTheDriverToExportImports": "imported_memory_can_be_exported_again",
    "LetsEverybodyWrite": "read_only_is_real",
    "RetainsNothing": "retain",
}
CAUGHT_BY_MEMORY = {
    "ForgetsTheMemory": "an_allocation_is_zeroed_counted_and_given_back",
    "UnmapsNothing": "shrinking_gives_back_whole_chunks",
}
ALL = CAUGHT_BY | CAUGHT_BY_MEMORY


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Run each mutant against the test that should catch it; and the driver without a bug against all of these."""
    folder: Path = tmp_path_factory.mktemp("mutants")
    (folder / "test_mutants.py").write_text(MUTANTS.format(tests=str(Path(standin.__file__).parents[1])))
    chosen = [f"test_mutants.py::Test{mutant}::test_{test}" for mutant, test in ALL.items()]
    chosen += [f"test_mutants.py::TestIsFine::test_{test}" for test in sorted(set(CAUGHT_BY.values()))]
    chosen += [f"test_mutants.py::TestIsFineToo::test_{test}" for test in sorted(set(CAUGHT_BY_MEMORY.values()))]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "--tb=line", "--rootdir", str(folder)]
    done = subprocess.run(
        [*command, *chosen],
        capture_output=True, text=True, timeout=300, cwd=folder, check=False, env=standin.child_environment(),
    )  # fmt: skip
    found: dict[tuple[str, str], str] = {}
    for line in done.stdout.splitlines():
        word, _, place = line.partition(" test_mutants.py::Test")
        if word in ("PASSED", "FAILED", "ERROR") and place:
            mutant, _, test = place.split(" ")[0].partition("::test_")
            found[mutant, test] = word
    assert found, done.stdout + done.stderr
    return found


@pytest.mark.parametrize(("mutant", "test"), ALL.items())
def test_the_contract_catches(outcomes, mutant, test):
    assert outcomes[mutant, test] in ("FAILED", "ERROR")


def test_and_nothing_else(outcomes):
    fine = {test: word for (mutant, test), word in outcomes.items() if mutant.startswith("IsFine")}
    assert fine == dict.fromkeys(ALL.values(), "PASSED")
