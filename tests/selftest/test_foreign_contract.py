"""Bugs about memory of others planted in the CUDA driver, and the test of the contract that must catch each."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.selftest import reasons

import standin

pytestmark = pytest.mark.standin

MUTANTS = '''
"""The CUDA driver with one bug per class, here and in the other process."""
import os, sys
sys.path.insert(0, {tests!r})
import standin
standin.preload()
import pytest
from dataclasses import replace
from strangers import CudaStranger
from vram.driver.cuda import CudaDriver
from vram.driver.cuda.objects import Window
from vram.errors import DriverError, ProtocolError, UsageError
from vram.spec import Access, HandleKind, Location
from vram.testing.foreign import ForeignContract


class Mutant(ForeignContract):
    offers = frozenset({{"Foreign", "InterprocessEvents", "LegacyIpc", "Pools"}})
    kind = CudaDriver

    @pytest.fixture
    def driver(self):
        return self.kind()

    @pytest.fixture
    def location(self):
        return Location("cuda", 0)

    @pytest.fixture(scope="class")
    @classmethod
    def elsewhere(cls):
        return cls.kind

    @pytest.fixture
    def stranger(self, driver):
        with CudaStranger() as stranger:
            yield stranger


class TestClosesTwice(Mutant):
    class kind(CudaDriver):
        def ipc_close(self, address):
            super().ipc_close(address)
            try:
                self._contexts[0].run(lambda: self._call("cuIpcCloseMemHandle", address))
            except DriverError:
                pass


class TestImportsAPointerTwice(Mutant):
    class kind(CudaDriver):
        def pool_open_pointer(self, pool, handle, nbytes):
            self._pointers.clear()
            return super().pool_open_pointer(pool, handle, nbytes)


class TestFreesThePointerOfAnother(Mutant):
    """When it refuses to open it again."""
    class kind(CudaDriver):
        def pool_open_pointer(self, pool, handle, nbytes):
            try:
                return super().pool_open_pointer(pool, handle, nbytes)
            except UsageError:
                for address in self._pointers:
                    self._contexts[0].run(lambda: self._call("cuMemFreeAsync", address, 1))
                raise


class TestExportsAnyEvent(Mutant):
    class kind(CudaDriver):
        def event_export(self, event):
            try:
                return super().event_export(event)
            except UsageError:
                return bytes(64)


class TestSaysWhatTheDriverSays(Mutant):
    class kind(CudaDriver):
        def event_export(self, event):
            from vram.driver.cuda.foreign import bytes_of
            return bytes_of(self._at(event).run(lambda: self._call("cuIpcGetEventHandle", event)))


class TestOpensOwnEvents(Mutant):
    class kind(CudaDriver):
        def event_import(self, handle, location):
            try:
                return super().event_import(handle, location)
            except UsageError:
                return self.event_create(location)


class TestBelievesSizes(Mutant):
    class kind(CudaDriver):
        def _check_opened(self, window, call):
            pass


class TestLeavesItOpenWhenItRefuses(Mutant):
    class kind(CudaDriver):
        def _take_back_window(self, number, window, stream=0):
            if len(self._windows) > 1 or window.kind != "ipc":
                return super()._take_back_window(number, window, stream)


class TestGivesTheHandleOfTheBase(Mutant):
    """As the driver itself does for an address inside."""
    class kind(CudaDriver):
        def ipc_export(self, address):
            return super().ipc_export(self.pointer_info(address).base)


class TestPadsHandles(Mutant):
    class kind(CudaDriver):
        def ipc_open(self, handle, nbytes, location):
            return super().ipc_open(handle[:64].ljust(64, b"\\0"), nbytes, location)


class TestTriesToSeeIfItWorks(Mutant):
    """What is at an address, found out by calls that may succeed for something else."""
    class kind(CudaDriver):
        def pointer_info(self, address):
            info = super().pointer_info(address)
            if info.made_by == "pool":
                info = replace(info, made_by="opened")
            return info


class TestTakesReservationsForMemory(Mutant):
    """The range of an address is the whole reservation."""
    class kind(CudaDriver):
        def pointer_info(self, address):
            info = super().pointer_info(address)
            attributes = self._api.CUpointer_attribute
            base = int(self._call("cuPointerGetAttribute", attributes(11), address))
            nbytes = int(self._call("cuPointerGetAttribute", attributes(12), address))
            return replace(info, base=base, nbytes=nbytes)


class TestTellsByAddress(Mutant):
    """An identity that comes again with the address."""
    class kind(CudaDriver):
        def pointer_identity(self, address):
            super().pointer_identity(address)
            return self.pointer_info(address).base


class TestAdoptsOnce(Mutant):
    class kind(CudaDriver):
        def mem_adopt(self, address):
            known = self.__dict__.setdefault("known", {{}})
            identity = self.pointer_identity(address)
            if identity not in known:
                known[identity] = super().mem_adopt(address)
            return known[identity]


class TestKeepsNoRights(Mutant):
    class kind(CudaDriver):
        def window_open(self, address, nbytes, location, access):
            return super().window_open(address, nbytes, location, Access.READ_WRITE)


class TestTheFirstWindowDecides(Mutant):
    class kind(CudaDriver):
        def _accessible(self, call, address, nbytes, access):
            for window in tuple(self._windows.values()):
                if window.address <= address < window.address + window.nbytes and window.access < access:
                    raise UsageError("refused by the first window")
            return super()._accessible(call, address, nbytes, access)


class TestWindowsWithoutAnEnd(Mutant):
    class kind(CudaDriver):
        def _accessible(self, call, address, nbytes, access):
            for window in tuple(self._windows.values()):
                if window.address <= address < window.address + window.nbytes:
                    return [window]
            return super()._accessible(call, address, nbytes, access)


class TestTakesTheDescriptor(Mutant):
    class kind(CudaDriver):
        def pool_import(self, fd, kind, location):
            try:
                return super().pool_import(fd, kind, location)
            except ProtocolError:
                os.close(fd)
                raise


class TestExportsInheritable(Mutant):
    class kind(CudaDriver):
        def pool_export(self, pool, kind):
            fd = super().pool_export(pool, kind)
            os.set_inheritable(fd, True)
            return fd


class TestFreesInNoOrder(Mutant):
    """What is freed stays in the books."""
    class kind(CudaDriver):
        def pool_free(self, address, stream):
            super().pool_free(address, stream)
            self._write_down(Window(address, 1, {{(1, 0): Access.READ_WRITE}}, "pool"))


class TestIsFine(Mutant):
    pass
'''

CAUGHT_BY = {
    "ClosesTwice": (
        "opened_twice_it_is_closed_as_often",
        "DriverError: cuMemcpyDtoHAsync failed: CUDA_ERROR_INVALID_VALUE",
    ),
    "ImportsAPointerTwice": ("no_pointer_is_open_twice", "DID NOT RAISE UsageError"),
    "FreesThePointerOfAnother": (
        "no_pointer_is_open_twice",
        "DriverError: cuMemcpyHtoDAsync failed: CUDA_ERROR_INVALID_VALUE",
    ),
    "ExportsAnyEvent": ("only_an_event_made_for_it_is_exported", "DID NOT RAISE UsageError"),
    "SaysWhatTheDriverSays": (
        "only_an_event_made_for_it_is_exported",
        "DriverError: cuIpcGetEventHandle failed: CUDA_ERROR_INVALID_HANDLE",
    ),
    "OpensOwnEvents": ("not_in_the_process_that_made_the_event", "DID NOT RAISE UsageError"),
    "BelievesSizes": ("a_size_that_is_not_there_is_refused", "DID NOT RAISE ProtocolError"),
    "LeavesItOpenWhenItRefuses": ("a_size_that_is_not_there_is_refused", 'assert other.call("live") == before'),
    "GivesTheHandleOfTheBase": ("only_the_base_of_such_memory_has_a_handle", "DID NOT RAISE UsageError"),
    "PadsHandles": ("bytes_that_are_no_handle_of_memory", "DID NOT RAISE ProtocolError"),
    "TriesToSeeIfItWorks": ("memory_of_a_pool", '== ("pool", pool, RW)'),
    "TakesReservationsForMemory": (
        "mapped_memory_is_one_allocation_at_a_time",
        "assert [(info.base, info.nbytes) for info in found] ==",
    ),
    "TellsByAddress": ("an_identity_never_comes_again", "assert 6 == 10"),
    "AdoptsOnce": ("adopted_memory_outlives_its_owner", "assert first != second"),
    "KeepsNoRights": ("a_window_has_the_rights_that_were_said", "DID NOT RAISE UsageError"),
    "TheFirstWindowDecides": ("a_window_has_the_rights_that_were_said", "UsageError: refused by the first window"),
    "WindowsWithoutAnEnd": ("bytes_outside_a_window_are_refused", "DID NOT RAISE UsageError"),
    "TakesTheDescriptor": ("a_descriptor_that_is_of_no_pool", "the caller's"),
    "ExportsInheritable": ("a_pool_is_exported_as_it_was_made_to", "assert not os.get_inheritable("),
    "FreesInNoOrder": (
        "what_is_given_back_twice_is_refused",
        "DriverError: cuMemFreeAsync failed: CUDA_ERROR_INVALID_VALUE",
    ),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """Run each mutant against the test that should catch it; and the driver without a bug against all of these."""
    folder: Path = tmp_path_factory.mktemp("mutants")
    (folder / "test_mutants.py").write_text(MUTANTS.format(tests=str(Path(standin.__file__).parents[1])))
    chosen = [f"test_mutants.py::Test{mutant}::test_{test}" for mutant, (test, _) in CAUGHT_BY.items()]
    chosen += [f"test_mutants.py::TestIsFine::test_{test}" for test in sorted({test for test, _ in CAUGHT_BY.values()})]
    return reasons.run(folder, chosen, standin.child_environment())


@pytest.mark.parametrize(("mutant", "test", "because"), [(name, *why) for name, why in CAUGHT_BY.items()])
def test_the_contract_catches(ran, mutant, test, because):
    reasons.require_of(ran, f"::Test{mutant}::test_{test}", because)


def test_and_nothing_else(ran):
    assert reasons.passed(ran, "TestIsFine") == {test for test, _ in CAUGHT_BY.values()}
