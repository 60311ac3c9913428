"""Every operation on GPU memory with every call of NVIDIA's driver failing in turn, on the stand-in: nothing is left,
nothing has changed, and the first error is the one that is raised (I4).

Unlike ``test_memory_faults.py`` this is below our own driver: its contexts, streams and conversions fail too.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.support.samples import nths, some
from tests.support.stuck import take_back_what_is_stuck

import standin
from vram import lifetime
from vram.arrays import Array
from vram.arrays.gpu import copy_rows
from vram.arrays.sources import of_array
from vram.driver.cuda import CudaDriver
from vram.errors import DriverError, OutOfMemoryError, ProtocolError, ReleaseWarning, UnsupportedError, VramError
from vram.memory import AddressReservation, MemoryMapping, PhysicalAllocation, Received, Region
from vram.spec import Access, AllocationFlags, AllocationSpec, HandleKind, Location

pytestmark = pytest.mark.standin
G = 2 << 20
HERE, THERE = Location("cuda", 0), Location("cuda", 1)
RW, READ = Access.READ_WRITE, Access.READ
CODES = {1: "INVALID_VALUE", 2: "OUT_OF_MEMORY", 999: "UNKNOWN"}
BALANCE = "cuCtxPopCurrent"


@dataclass
class Scene:
    """What there is before the operation, all of it made without faults, on a driver that has not seen anything yet."""

    driver: CudaDriver
    allocation: PhysicalAllocation
    reservation: AddressReservation
    mapping: MemoryMapping
    region: Region
    array: Array
    exported: PhysicalAllocation
    streams: list[int]
    event: int
    pinned: np.ndarray[Any, Any]
    made: list[Any] = field(default_factory=list)

    @classmethod
    def make(cls) -> Scene:
        driver = CudaDriver()
        allocation = PhysicalAllocation.create(driver, G, HERE)
        reservation = AddressReservation.reserve(driver, 4 * G)
        mapping = MemoryMapping.map(reservation, 0, allocation)
        region = Region.create(HERE, driver=driver, capacity=16 * G, chunk=G, nbytes=3 * G - 5, users=[HERE, THERE])
        array = Array.create(driver, HERE, (G // 4, 4), "int32", capacity=3 * G // 4, chunk=G)
        exported = PhysicalAllocation.create(driver, G, HERE)
        exported.export()
        streams = [driver.stream_create(HERE), driver.stream_create(HERE)]
        event, pinned = driver.event_create(HERE), np.zeros(4096, "uint8")
        scene = cls(driver, allocation, reservation, mapping, region, array, exported, streams, event, pinned)
        driver.memory._ways.clear()  # so that what is asked only once is asked again
        driver.memory._least = 0
        return scene

    def keep(self, thing: Any) -> None:
        self.made.append(thing)

    def also(self, undo: Callable[[int], object], number: int) -> None:
        self.made.append(lifetime.own("made by an operation", lambda: undo(number)))

    def state(self) -> object:
        """Everything that an operation which failed must leave as it was; contexts stay, by design."""
        counts = {kind: n for kind, n in standin.Standin().live().items() if not kind.startswith("context")}
        driver = self.driver
        return (
            driver.live(),
            counts,
            [sorted(table.out) for table in (driver.work.streams, driver.work.events, driver.work.registered)],
            {handle._id: handle.holders() for handle in lifetime.live()},
            len(os.listdir("/proc/self/fd")),
            (self.region.nbytes, self.region.chunks, self.region.access, self.region.mapped),
            (self.array.shape, self.array.region.mapped),
            [driver.mem_get_access(self.region.address, where) for where in (HERE, THERE)],
            driver.mem_get_access(self.mapping.address, HERE),
            driver.mem_get_access(self.mapping.address, THERE),
        )

    def close(self) -> None:
        for claim in self.made:
            (claim.release if isinstance(claim, lifetime.Claim) else claim.close)()
        for thing in (self.array, self.region, self.mapping, self.reservation, self.allocation, self.exported):
            thing.close()
        for stream in self.streams:
            self.driver.stream_destroy(stream)
        self.driver.event_destroy(self.event)


def received(s: Scene) -> list[PhysicalAllocation | Received]:
    return [Received(s.exported.export(), G), s.allocation, Received(s.exported.export(), G)]


def retain(s: Scene) -> None:
    s.also(s.driver.mem_release, s.driver.mem_retain(s.region.address + G))


def shown_on_a_stream(s: Scene) -> None:
    s.array.stream = s.streams[0]  # type: ignore[assignment]
    s.keep_capsule = s.array.__dlpack__(stream=s.streams[1])  # type: ignore[attr-defined]
    del s.keep_capsule  # type: ignore[attr-defined]


def record_and_wait(s: Scene) -> None:
    s.driver.event_record(s.event, s.streams[0])
    s.driver.stream_wait(s.streams[1], s.event, HERE)
    s.driver.event_is_done(s.event)
    s.driver.event_synchronize(s.event)
    s.driver.stream_synchronize(s.streams[1], HERE)


def registered(s: Scene) -> None:
    address = s.pinned.ctypes.data
    s.driver.host_register(address, 4096, HERE)
    s.also(s.driver.host_unregister, address)


def other_gpu(s: Scene) -> None:
    with Array.create(s.driver, THERE, (4, 4), "int32") as there:
        copy_rows(there.region, 0, of_array(s.array[:4]))


def by_the_fabric(s: Scene) -> None:
    control = standin.Standin()
    control.fabric()
    try:
        s.keep(PhysicalAllocation.create(s.driver, G, HERE, handle_kinds=HandleKind.FABRIC))
        s.keep(PhysicalAllocation.import_fabric(s.driver, s.made[-1].export_fabric(), G, HERE))
    except BaseException:
        while s.made:
            s.made.pop().close()
        raise
    finally:
        control.fabric(False)


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "a driver": lambda s: CudaDriver(),
    "create an allocation": lambda s: s.keep(PhysicalAllocation.create(s.driver, 2 * G, HERE)),
    "create for RDMA": lambda s: s.keep(
        PhysicalAllocation.create(s.driver, AllocationSpec(G, HERE, flags=AllocationFlags.GPU_DIRECT_RDMA))
    ),
    "grow for RDMA": lambda s: s.keep(
        Region.create(
            HERE, driver=s.driver, capacity=2 * G, nbytes=2 * G, chunk=G, flags=AllocationFlags.GPU_DIRECT_RDMA
        )
    ),
    "export and import by the fabric": by_the_fabric,
    "properties": lambda s: s.allocation.properties(),
    "rights": lambda s: (s.mapping.get_access(THERE), s.region.get_access(THERE)),
    "create on the host": lambda s: s.keep(PhysicalAllocation.create(s.driver, G, "cuda:numa:0")),
    "import an allocation": lambda s: s.keep(PhysicalAllocation.import_(s.driver, s.exported.export(), G)),
    "export": lambda s: s.allocation.export(),
    "retain": retain,
    "reserve": lambda s: s.keep(AddressReservation.reserve(s.driver, G)),
    "map": lambda s: s.keep(MemoryMapping.map(s.reservation, G, s.allocation)),
    "set access of two": lambda s: s.mapping.set_access(READ, [HERE, THERE]),
    "create a region": lambda s: s.keep(
        Region.create(HERE, driver=s.driver, capacity=8 * G, nbytes=3 * G + 1, chunk=G, users=[HERE, THERE])
    ),
    "grow": lambda s: s.region.grow(6 * G),
    "shrink": lambda s: s.region.shrink(1),
    "close": lambda s: Region.create(HERE, driver=s.driver, capacity=8 * G, nbytes=2 * G, chunk=G).close(),
    "freeze": lambda s: s.region.freeze(),
    "import a region": lambda s: s.keep(Region.from_allocations(s.driver, received(s), users=[THERE], nbytes=7)),
    "create an array": lambda s: s.keep(Array.create(s.driver, HERE, (G, 2), "int8", capacity=2 * G)),
    "resize up": lambda s: s.array.resize(3 * G // 8),
    "resize down": lambda s: s.array.resize(1),
    "write": lambda s: s.array.__setitem__(slice(0, 3), 7),
    "fill": lambda s: s.array.fill(7),
    "to_host": lambda s: s.array[:9].to_host(),
    "copy": lambda s: s.driver.copy(s.region.address, s.array.address, 4096),
    "copy between GPUs": other_gpu,
    "dlpack with a stream": shown_on_a_stream,
    "stream": lambda s: s.also(s.driver.stream_destroy, s.driver.stream_create(THERE)),
    "event": lambda s: s.also(s.driver.event_destroy, s.driver.event_create(THERE)),
    "record and wait": record_and_wait,
    "register host memory": registered,
    "memory that is free": lambda s: s.driver.mem_info(HERE),
    "support": lambda s: s.driver.support(HERE),
}
# What a failure is an answer to: it changes what is said, and nothing is raised.
ANSWERS = {"support", "freeze", "a driver"}
# Before memory is unmapped the work on it is waited for, and whether that went well is nobody's question then.
SETTLES = {"dlpack with a stream", "shrink", "close", "resize down", "copy between GPUs"}
# What cannot be taken back: giving memory up, and the stream that an array was told.
CHANGES = {"resize down", "shrink", "close", "freeze", "dlpack with a stream"}

# The driver's answer to the first attempt is no, and then it is asked why.
ASKS = {"copy between GPUs"}
# What they give back in a `finally` has its say last.
LAST = {"copy between GPUs", "dlpack with a stream", "support"}


def take_back_what_is_noted(driver: CudaDriver, before: dict[str, set[int]]) -> int:
    """Take back what the driver could not while it unwound, and said so; return how many there were."""
    extra = {name: set(books) - before[name] for name, books in books_of(driver).items()}
    for name, undo in UNDO.items():
        for number in extra[name]:
            getattr(driver, undo)(number)
    return sum(map(len, extra.values()))


UNDO = {"handles": "mem_release", "streams": "stream_destroy", "events": "event_destroy",
        "registered": "host_unregister"}  # fmt: skip


def books_of(driver: CudaDriver) -> dict[str, Any]:
    tables = {name: getattr(driver.work, name).out for name in ("streams", "events", "registered")}
    return {"handles": driver.books.handles, **tables}


def current() -> int:
    from cuda.bindings import driver as api

    return int(api.cuCtxGetCurrent()[1])


def pop_what_stuck(before: int) -> int:
    """A pop that failed leaves a context current; nobody can help that, so the test does."""
    from cuda.bindings import driver as api

    count = 0
    while current() != before and count < 9:
        api.cuCtxPopCurrent()
        count += 1
    return count


@dataclass
class Outcome:
    raised: BaseException | None
    warned: list[str]
    played: int
    first: str  # the function that failed

    @property
    def is_of_undo(self) -> bool:
        """Whether what failed may have been a call that takes something back."""
        return self.first in (BALANCE, "cuCtxPushCurrent", "cuEventDestroy", "cuStreamDestroy", "cuMemRelease")

    @property
    def notes(self) -> list[str]:
        return getattr(self.raised, "__notes__", [])

    @property
    def said(self) -> str:
        return "\n".join([str(self.raised), *self.notes, *self.warned])


def attempt(act: Callable[[Scene], object], here: Scene, nth: int, code: int, forever: bool) -> Outcome:
    """Run an operation with a fault, and say what came of it."""
    control = standin.Standin()
    raised: BaseException | None = None
    with warnings.catch_warnings(record=True) as warned, control.failing("*", nth, code, forever=forever):
        warnings.simplefilter("always")
        try:
            act(here)
        except Exception as error:
            raised = error.with_traceback(None)
            # An error that is replaced keeps the frames of the first, and they what we are about to count.
            raised.__context__ = None
        played = control.faults_played()
    messages = [str(warning.message) for warning in warned if issubclass(warning.category, ReleaseWarning)]
    assert len(messages) == len(warned), [str(warning.message) for warning in warned]
    return Outcome(raised, messages, played, getattr(raised, "call", ""))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("operation", some([*OPERATIONS], 20))
def test_a_failed_call_leaves_nothing_and_changes_nothing_i4(operation: str, code: int) -> None:
    act = OPERATIONS[operation]
    here = Scene.make()
    try:
        for nth in nths():
            warm(here, nth)
            before, context = here.state(), current()
            books = {name: set(found) for name, found in books_of(here.driver).items()}
            came = attempt(act, here, nth, code, forever=False)
            if not came.played:
                assert came.raised is None, came.said
                assert not came.warned
                break
            gc.collect()
            popped = pop_what_stuck(context)
            assert popped == 0 or BALANCE in came.said or operation in SETTLES, f"call {nth}: {popped}, {came.said}"
            stuck = take_back_what_is_stuck()
            noted = take_back_what_is_noted(here.driver, books) if came.raised or operation in ANSWERS else 0
            if came.raised is None:  # an undo failed, and closing never raises; or it was an answer
                assert len(came.warned) == stuck, came.said
                if not stuck and operation not in ANSWERS | SETTLES:
                    pytest.fail(f"call {nth} of {operation} failed and nobody heard of it")
                here.close()
                here = Scene.make()
                continue
            assert isinstance(came.raised, VramError), came.said
            assert CODES[code] in came.said or str(came.raised), came.said
            if operation in ASKS:  # the first error was the driver's own
                came.notes.clear()
            elif isinstance(came.raised, DriverError):
                assert came.raised.code == code
                assert isinstance(came.raised, OutOfMemoryError) or code != 2 or isinstance(came.raised, MemoryError)
            # One failure: everything could be taken back, unless it was just that which failed.
            assert noted <= came.is_of_undo, came.said
            assert stuck == len(came.notes) == 0, came.said
            if operation in CHANGES:
                here.close()
                here = Scene.make()
                continue
            assert here.state() == before, f"call {nth}: {came.said}"
        assert nth > 1
    finally:
        here.close()


def warm(here: Scene, nth: int) -> None:
    """Forget what the driver looked up, so that the next try asks as many questions as the first."""
    here.driver.memory._ways.clear()
    here.driver.capabilities._support.clear()
    here.driver.memory._grants.clear()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("operation", some([*OPERATIONS], 12))
def test_the_first_error_is_raised_and_the_others_noted_i4(operation: str, code: int) -> None:
    """Everything fails from the Nth call on, undo calls included: what could not be taken back is said, and is all
    that is left."""
    act = OPERATIONS[operation]
    for nth in nths():
        here = Scene.make()
        try:
            books = {name: set(found) for name, found in books_of(here.driver).items()}
            alone = attempt(act, here, nth, code, forever=False)
            pop_what_stuck(0)
            take_back_what_is_stuck()
            if alone.raised is not None:
                take_back_what_is_noted(here.driver, books)
        finally:
            here.close()
        here = Scene.make()
        try:
            before = here.state()
            books = {name: set(found) for name, found in books_of(here.driver).items()}
            came = attempt(act, here, nth, code, forever=True)
            gc.collect()
            assert pop_what_stuck(0) <= came.said.count(BALANCE) + (operation in SETTLES), came.said
            if not came.played:
                break
            if alone.raised is not None and operation not in LAST:
                # INVALID_VALUE for an attribute reads as one that the driver does not know.
                what, reason = alone.raised, code == 1 and isinstance(came.raised, UnsupportedError)
                assert (type(came.raised), str(came.raised)) == (type(what), str(what)) or reason, came.said
            said = Counter("could not take back" in text for text in [*came.notes, *came.warned])
            stuck = take_back_what_is_stuck()
            assert said[True] == stuck, came.said
            noted = take_back_what_is_noted(here.driver, books)
            converted = isinstance(came.raised, ProtocolError)  # made of an error that had the note
            if operation not in LAST:
                assert noted <= said[False] + came.is_of_undo + converted, came.said
            if came.raised is not None and operation not in CHANGES:
                assert here.state() == before, f"call {nth}: {came.said}"
        finally:
            here.close()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """What the stand-in has given out is as before, whatever happened in between."""
    before = {kind: n for kind, n in standin.Standin().live().items() if not kind.startswith("context")}
    yield
    standin.Standin().clear()
    gc.collect()
    take_back_what_is_stuck()
    after = {kind: n for kind, n in standin.Standin().live().items() if not kind.startswith("context")}
    assert after == before


def test_it_works_again_when_the_fault_is_gone() -> None:
    here = Scene.make()
    for operation, act in OPERATIONS.items():
        for code in CODES:
            if operation not in CHANGES:
                books = {name: set(found) for name, found in books_of(here.driver).items()}
                attempt(act, here, 1, code, forever=True)
                pop_what_stuck(0)
                take_back_what_is_noted(here.driver, books)
        if operation != "freeze":
            act(here)
    here.close()


def test_memory_and_addresses_run_out_in_their_own_words() -> None:
    from vram.errors import AddressSpaceError

    driver = CudaDriver()
    with pytest.raises(AddressSpaceError, match="addresses") as no_addresses:
        driver.address_reserve(1 << 50)
    assert not isinstance(no_addresses.value, OutOfMemoryError)
    with pytest.raises(OutOfMemoryError, match="on cuda:0") as no_memory:
        driver.mem_create(1 << 50, HERE, HandleKind.POSIX_FD)
    assert not isinstance(no_memory.value, AddressSpaceError)
    assert (no_memory.value.code, no_memory.value.name) == (2, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(OutOfMemoryError):
        Region.create(HERE, driver=driver, capacity=1 << 45, nbytes=1 << 45)
    assert driver.live().reservations == 0
