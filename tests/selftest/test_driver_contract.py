"""Drivers that break one rule each, and the test of the contract that must catch it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.selftest import reasons

MUTANTS = '''
"""The host driver with one bug per class."""
import fcntl, gc, os, threading
import pytest
from vram.driver import libc
from vram.driver.host import HostDriver
from vram.errors import UsageError
from vram.spec import HOST, Access, HandleKind
from vram.testing.driver import DriverContract

class Mutant(DriverContract):
    offers = frozenset({"HostAddressable", "CopyOnWrite", "DirectMapping", "Sealing", "Identity", "ZeroBacking"})
    kind = HostDriver

    @pytest.fixture
    def driver(self):
        return self.kind()

    @pytest.fixture
    def location(self):
        return HOST


class TestFreesByAddressAlone(Mutant):
    class kind(HostDriver):
        def address_free(self, address, nbytes):
            found = self._books.reservations.at.get(address)
            super().address_free(address, found.nbytes if found else nbytes)


class TestUnmapsHalves(Mutant):
    class kind(HostDriver):
        def mem_unmap(self, address, nbytes):
            mapping = self._books.mappings.get(address)
            super().mem_unmap(address, mapping.nbytes if mapping and nbytes < mapping.nbytes else nbytes)


class TestAllowsAccessOverGaps(Mutant):
    class kind(HostDriver):
        def mem_set_access(self, address, nbytes, access, locations):
            for mapping in self._books.whole("x", address, nbytes, gaps=True):
                super().mem_set_access(mapping.address, mapping.nbytes, access, locations)


class TestMapsReadableAtOnce(Mutant):
    class kind(HostDriver):
        def mem_map(self, address, nbytes, offset, handle):
            super().mem_map(address, nbytes, offset, handle)
            self.mem_set_access(address, nbytes, Access.READ, (HOST,))


class TestMapsOverOthers(Mutant):
    class kind(HostDriver):
        def mem_map(self, address, nbytes, offset, handle):
            while True:
                try:
                    return super().mem_map(address, nbytes, offset, handle)
                except UsageError as error:
                    if "mapped at" not in str(error):
                        raise
                    self.mem_unmap(address, self._books.mappings[address].nbytes)


class TestReleasesWhatIsMapped(Mutant):
    class kind(HostDriver):
        def mem_release(self, handle):
            memory = self._books.handles.get(handle)
            super().mem_release(handle)
            for mapping in tuple(self._books.mappings.values()):
                if mapping.memory is memory:
                    self.mem_unmap(mapping.address, mapping.nbytes)


class TestKeepsReleasedMemory(Mutant):
    class kind(HostDriver):
        def mem_release(self, handle):
            self.mem_properties(handle)


class TestExportsOneDescriptorToAll(Mutant):
    class kind(HostDriver):
        def mem_export(self, handle, kind):
            super().mem_export(handle, kind)
            return self._books.memory("x", handle).fd()


class TestExportsInheritable(Mutant):
    class kind(HostDriver):
        def mem_export(self, handle, kind):
            fd = super().mem_export(handle, kind)
            os.set_inheritable(fd, True)
            return fd


class TestExportsAnything(Mutant):
    class kind(HostDriver):
        def mem_export(self, handle, kind):
            return fcntl.fcntl(self._books.memory("x", handle).fd(), fcntl.F_DUPFD_CLOEXEC, 3)


class TestBelievesWhatItIsTold(Mutant):
    class kind(HostDriver):
        def mem_import(self, fd, kind, nbytes):
            from vram.driver.books import Memory
            return self._books.new_handle(Memory(os.dup(fd), nbytes, kind, None))


class TestTakesTheDescriptor(Mutant):
    class kind(HostDriver):
        def mem_import(self, fd, kind, nbytes):
            handle = super().mem_import(fd, kind, nbytes)
            os.close(fd)
            return handle


class TestLeaksWhenItRefuses(Mutant):
    class kind(HostDriver):
        def mem_map(self, address, nbytes, offset, handle):
            memory = self._books.memory("x", handle)
            try:
                super().mem_map(address, nbytes, offset, handle)
            except UsageError:
                self._books.new_handle(memory)
                raise


class TestSealsOnlyTheFuture(Mutant):
    class kind(HostDriver):
        def mem_seal(self, handle):
            fcntl.fcntl(self._books.memory("x", handle).fd(), libc.F_ADD_SEALS, libc.F_SEAL_FUTURE_WRITE)


class TestCopiesNothingOnWrite(Mutant):
    class kind(HostDriver):
        mem_map_private = HostDriver.mem_map


class TestOffersMoreThanItSays(Mutant):
    offers = frozenset({"HostAddressable", "CopyOnWrite", "DirectMapping", "Sealing"})


class TestKeepsAHandleToItself(Mutant):
    class kind(HostDriver):
        def mem_map_new(self, address, nbytes, location, kinds, access):
            super().mem_map_new(address, nbytes, location, kinds, access)
            self.mem_retain(address)


class TestAllowsMoreThanAsked(Mutant):
    class kind(HostDriver):
        def mem_map_import(self, address, nbytes, fd, kind, access, *, private):
            super().mem_map_import(address, nbytes, fd, kind, max(access, Access.READ), private=private)


class TestTakesTheDescriptorItMaps(Mutant):
    class kind(HostDriver):
        def mem_map_import(self, address, nbytes, fd, kind, access, *, private):
            super().mem_map_import(address, nbytes, fd, kind, access, private=private)
            os.close(fd)


class TestForgetsTheMemoryItCannotMap(Mutant):
    class kind(HostDriver):
        def _create(self, call, nbytes, location, kinds, use):
            def forgetful(memory):
                memory.hold("nobody")
                result = use(memory)
                memory.drop("nobody")
                return result
            return super()._create(call, nbytes, location, kinds, forgetful)


class TestSharesWhatIsPrivate(Mutant):
    class kind(HostDriver):
        def mem_map_import(self, address, nbytes, fd, kind, access, *, private):
            super().mem_map_import(address, nbytes, fd, kind, access, private=False)


class TestGivesOutDirtyMemory(Mutant):
    class kind(HostDriver):
        old = []
        def mem_create(self, nbytes, location, kinds):
            fresh = super().mem_create(nbytes, location, kinds)
            memory = self._books.memory("x", fresh)
            os.pwrite(memory.fd(), b"secret", 0)
            return fresh


class TestWaitsInAnUndo(Mutant):
    """Deadlocks when a finalizer comes while the lock is held; the contract's own deadline ends it."""
    class kind(HostDriver):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()
        def mem_create(self, *args):
            with self.lock:
                gc.collect()  # with bad luck the collector comes just here
                return super().mem_create(*args)
        def mem_release(self, handle):
            if not self.lock.acquire(timeout=0.2):
                raise RuntimeError("would wait for ever")
            self.lock.release()
            super().mem_release(handle)


class TestIsFine(Mutant):
    pass
'''

CAUGHT_BY = {
    "FreesByAddressAlone": ("free_names_exactly_what_was_reserved", "DID NOT RAISE UsageError"),
    "UnmapsHalves": ("unmap_takes_whole_mappings", "DID NOT RAISE UsageError"),
    "AllowsAccessOverGaps": ("set_access_takes_whole_mappings_without_a_gap", "DID NOT RAISE UsageError"),
    "MapsReadableAtOnce": ("a_new_mapping_has_no_access", "assert <Access.READ: 1> == <Access.NONE: 0>"),
    "MapsOverOthers": ("mappings_do_not_overlap", "DID NOT RAISE UsageError"),
    "ReleasesWhatIsMapped": ("release_while_mapped", "RangeError: copy_out: nothing is mapped at"),
    "KeepsReleasedMemory": ("a_handle_is_released_once", "DID NOT RAISE UsageError"),
    "ExportsOneDescriptorToAll": ("export_and_import", "assert fd != other"),
    "ExportsInheritable": ("export_and_import", "assert not os.get_inheritable("),
    "ExportsAnything": ("only_memory_made_for_it_is_exported", "DID NOT RAISE UsageError"),
    "BelievesWhatItIsTold": ("import_believes_nothing", "DID NOT RAISE ProtocolError"),
    "TakesTheDescriptor": ("export_and_import", "the caller's"),
    "LeaksWhenItRefuses": ("an_allocation_is_mapped_whole", "assert self.driver.live() == before"),
    "SealsOnlyTheFuture": ("seal", "assert sealing.mem_is_sealed(handle)"),
    "CopiesNothingOnWrite": ("copy_on_write", "assert b'changed!' == b'original'"),
    "OffersMoreThanItSays": ("offers_exactly_what_it_says", "== self.offers"),
    "KeepsAHandleToItself": ("new_memory_in_one_call", "assert (now.handles, now.mappings, now.nbytes) =="),
    "AllowsMoreThanAsked": ("an_import_in_one_call", "assert <Access.READ: 1> == <Access.NONE: 0>"),
    "TakesTheDescriptorItMaps": ("an_import_in_one_call", "UsageError: mem_map_import"),
    "ForgetsTheMemoryItCannotMap": ("what_is_refused_leaves_nothing", 'assert len(os.listdir("/proc/self/fd"))'),
    "SharesWhatIsPrivate": ("a_private_import", "assert (b'changed!', b'changed!') == (b'original', b'changed!')"),
    "GivesOutDirtyMemory": ("new_memory_is_zeroed", "assert 4194"),
    "WaitsInAnUndo": ("undo_calls_from_finalizers", "assert driver.live() =="),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Run each mutant against the test that should catch it; and the driver without a bug against all of these."""
    folder: Path = tmp_path_factory.mktemp("mutants")
    (folder / "test_mutants.py").write_text(MUTANTS)
    chosen = [f"test_mutants.py::Test{mutant}::test_{test}" for mutant, (test, _) in CAUGHT_BY.items()]
    chosen += [f"test_mutants.py::TestIsFine::test_{test}" for test in sorted({test for test, _ in CAUGHT_BY.values()})]
    return reasons.run(folder, chosen)


@pytest.mark.parametrize(("mutant", "test", "because"), [(name, *why) for name, why in CAUGHT_BY.items()])
def test_the_contract_catches(ran, mutant, test, because):
    reasons.require_of(ran, f"::Test{mutant}::test_{test}", because)


def test_and_nothing_else(ran):
    assert reasons.passed(ran, "TestIsFine") == {test for test, _ in CAUGHT_BY.values()}
