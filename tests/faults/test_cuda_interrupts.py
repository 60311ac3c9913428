"""Ctrl-C at every point where it can come while things of a GPU are made, used or taken back, on the stand-in (I12).

Beside the points of Python's own (see ``interrupting.py``) the signal comes in the middle of each call of the driver,
which then succeeds: what it made must not be lost, and what it took back must not be taken back twice.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.interrupts import interrupt, signals
from tests.support.samples import nths

import standin
from faults.test_cuda_faults import current
from faults.test_memory_interrupts import OPERATIONS, UNDOING, G, Scene, made_under_interrupts, undone_under_interrupts
from vram import driver as drivers
from vram import lifetime
from vram.memory import AddressReservation, Event, EventPool, MulticastObject, PhysicalAllocation, Pool, Region
from vram.memory import foreign as memory_of_others
from vram.memory.allocation import adopt_memory
from vram.memory.foreign import find_foreign, open_legacy
from vram.spec import Access, AllocationFlags, AllocationSpec, HandleKind, Location

pytestmark = pytest.mark.standin
HERE, THERE = Location("cuda", 0), Location("cuda", 1)
BOTH = ("cuda:0", "cuda:1")


def in_the_driver(nth: int, act: Callable[[], object]) -> bool:
    """Run `act`, with a signal in the Nth call of the driver; whether there are as many."""
    control = standin.Standin()
    control.clear()
    control.interrupt("*", nth)
    made = None
    with signals(), contextlib.suppress(KeyboardInterrupt):
        made = act()
    calls = sum(control.called().values())
    control.clear()
    del made
    return calls >= nth


def at_some_points(nth: int, act: Callable[[], object]) -> bool:
    """Run `act` with an interrupt at every 11th point only: a sample."""
    return interrupt(11 * nth - 4, act)


WAYS = {
    "at each point": interrupt,
    "at some points": at_some_points,
    "in each call of the driver": in_the_driver,
}
SHORT = ("at some points", "in each call of the driver")
LONG = pytest.param("at each point", marks=pytest.mark.slow)


def given_out() -> dict[str, int]:
    """What the stand-in has given out; primary contexts stay, by design."""
    return {kind: n for kind, n in standin.Standin().live().items() if not kind.startswith("context")}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    drivers.get(HERE).mem_info(HERE)
    before, context = given_out(), current()
    yield
    gc.collect()
    assert given_out() == before
    assert current() == context
    assert not lifetime.stuck()


# -- addresses, memory, mappings and regions: what the host has, too -------------------------------------------------
class Looked(Scene):
    """The scene of the host on a GPU; the driver's books and the driver agree when it is made and when it is closed."""

    def __init__(self) -> None:
        assert_books_agree()
        super().__init__(drivers.get(HERE), HERE)

    def check(self) -> None:
        super().check()
        assert_books_agree()

    def close(self) -> None:
        super().close()
        assert_books_agree()


def assert_books_agree() -> None:
    """The driver has given out what our books of it say, and no context is current."""
    driver: Any = drivers.get(HERE)
    there, books = standin.Standin().live(), driver.live()
    assert current() == 0, "a context stayed current"
    windows = [window for window in driver._windows.values() if window.kind]
    # A mapping of memory that was made in the same call holds a handle of the driver's, too.
    held = [*driver._books.handles.values(), *(mapping.memory for mapping in driver._books.mappings.values())]
    raws = {id(memory): len(memory.raw) for memory in held}
    known = {
        "reservations": books.reservations,
        "mappings": len(driver._books.mappings),
        "handles": sum(raws.values()),
        "events": len(driver._events),
        "streams": len(driver._streams),
        "host": len(driver._registered),
        "pools": len(driver._pools.all()),
        "pool_allocations": sum(window.kind.startswith("pool") for window in windows),
        "ipc_opens": sum(window.kind == "ipc" for window in windows),
    }
    assert known == {kind: there.get(kind, 0) for kind in known}, "what the driver has given out is not in our books"


@pytest.mark.parametrize("way", ["at each point", "in each call of the driver"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_interrupt_leaves_nothing_that_nobody_owns_i4(operation: str, way: str) -> None:
    points = made_under_interrupts(operation, Looked, WAYS[way], drivers.get(HERE).live())
    assert points >= (3 if way == "at each point" else 0)


@pytest.mark.parametrize("way", ["at each point", "in each call of the driver"])
@pytest.mark.parametrize("operation", UNDOING)
def test_what_an_interrupt_cuts_short_is_undone_all_the_same_i12(operation: str, way: str) -> None:
    points = undone_under_interrupts(operation, Looked, WAYS[way], drivers.get(HERE).live())
    assert points >= (20 if way == "at each point" else 1)


# -- pools, events, streams, memory of others, multicast ---------------------------------------------------------------
class Numbered:
    """What our driver knows by a number, owned as a facade would: nothing but the driver can lose it."""

    def __init__(self, make: Callable[[], int], undo: Callable[[int], object]) -> None:
        numbers = self._numbers = [0]

        def take_back() -> None:
            if numbers[0]:
                undo(numbers[0])
                numbers[0] = 0

        self.claim = lifetime.own("made by a test", take_back)
        numbers[0] = make()

    @property
    def number(self) -> int:
        return self._numbers[0]

    def close(self) -> None:
        self.claim.release()


class Others:
    """One of each, and what the other process lent."""

    def __init__(self, theirs: dict[str, Any]) -> None:
        self.driver = driver = drivers.get(HERE)
        self.theirs = theirs
        self.pinned = ctypes.create_string_buffer(4096)
        self.pool = Pool.create(driver, HERE)
        self.imported = Pool.import_(driver, theirs["fd"], HERE)
        self.region = Region.create(HERE, driver=driver, capacity=2 * G, nbytes=2 * G)
        self.there = Region.create(THERE, driver=driver, capacity=2 * G, nbytes=2 * G)
        self.event = Event.create(driver, HERE, interprocess=True)
        self.events = EventPool(driver, HERE)
        self.stream = self.new_stream()
        self.memory = PhysicalAllocation.create(driver, G, HERE)
        self.reservation = AddressReservation.reserve(driver, 4 * G)
        self.team = MulticastObject.create(driver, BOTH, 2 * G)
        self.made: Any = None

    def new_stream(self) -> Numbered:
        return Numbered(lambda: self.driver.stream_create(HERE), self.driver.stream_destroy)

    def register(self) -> Numbered:
        address = ctypes.addressof(self.pinned)

        def make() -> int:
            self.driver.host_register(address, 4096, HERE)
            return address

        return Numbered(make, self.driver.host_unregister)

    def import_team(self) -> MulticastObject:
        return MulticastObject.import_(self.driver, self.team.export(), 2 * G, 2)

    def mapped_team(self) -> Any:
        return self.team.map(self.reservation)

    def bound(self) -> None:
        self.team.bind(self.memory)

    def adopted(self) -> Any:
        return adopt_memory(self.driver, self.region.address, G, HERE)[1]

    def read(self) -> bytes:
        out = bytearray(16)
        self.driver.copy_out(memoryview(out), self.region.address)
        return bytes(out)

    def close(self) -> None:
        parts: list[Any] = [self.pool, self.imported, self.region, self.there, self.event, self.events, self.stream]
        for part in (*parts, self.memory, self.team, self.reservation):
            part.close()
        if self.made is not None:
            self.made.close()


def unbound(s: Others) -> None:
    s.team.unbind(HERE, 0, G)


def by_the_fabric(s: Others) -> PhysicalAllocation:
    with PhysicalAllocation.create(s.driver, G, HERE, handle_kinds=HandleKind.FABRIC) as maker:
        return PhysicalAllocation.import_fabric(s.driver, maker.export_fabric(), G, HERE)


def team_by_the_fabric(s: Others) -> MulticastObject:
    with MulticastObject.create(s.driver, 2, G, handle_kinds=HandleKind.FABRIC) as maker:
        return MulticastObject.import_fabric(s.driver, maker.export_fabric(), G, 2)


MAKING: dict[str, Callable[[Others], Any]] = {
    "create for RDMA": lambda s: PhysicalAllocation.create(
        s.driver, AllocationSpec(G, HERE, flags=AllocationFlags.GPU_DIRECT_RDMA)
    ),
    "import by the fabric": by_the_fabric,
    "import a team by the fabric": team_by_the_fabric,
    "open a legacy handle of any size": lambda s: open_legacy(s.driver, s.theirs["legacy"], None, HERE),
    "create a pool": lambda s: Pool.create(s.driver, HERE),
    "import a pool": lambda s: Pool.import_(s.driver, s.theirs["fd"], HERE),
    "export a pool": lambda s: s.pool.export(),
    "allow a pool": lambda s: s.driver.pool_set_access(s.pool.driver_pool, Access.READ_WRITE, [THERE]),
    "allocate": lambda s: s.pool.allocate(1000),
    "open a pointer": lambda s: s.imported.open(s.theirs["tokens"][0], G),
    "open a legacy handle": lambda s: open_legacy(s.driver, s.theirs["legacy"], G, HERE),
    "find foreign memory": lambda s: find_foreign(s.driver, s.region.address + 7, 9)[0],
    "adopt": lambda s: s.adopted(),
    "create an event": lambda s: Event.create(s.driver, HERE, interprocess=True),
    "import an event": lambda s: Event.import_(s.driver, s.theirs["event"], HERE),
    "export an event": lambda s: s.event.export(),
    "record and wait": lambda s: (s.event.record(s.stream.number), s.event.wait(s.stream.number), s.event.is_done),
    "synchronize": lambda s: (s.event.synchronize(), s.region.synchronize()),
    "create a stream": lambda s: s.new_stream(),
    "register host memory": lambda s: s.register(),
    "fill": lambda s: s.driver.fill(s.region.address, 7, 16),
    "write and read": lambda s: (s.driver.copy_in(s.region.address, memoryview(b"7" * 16)), s.read()),
    "copy between GPUs": lambda s: s.driver.copy(s.there.address, s.region.address, 16),
    "free memory": lambda s: s.driver.mem_info(HERE),
    "create a team": lambda s: MulticastObject.create(s.driver, BOTH, 2 * G),
    "import a team": lambda s: s.import_team(),
    "export a team": lambda s: s.team.export(),
    "map a team": lambda s: s.mapped_team(),
}
# What there is before, and how it is taken back.
TAKING: dict[str, tuple[Callable[[Others], Any], Callable[[Others], Any]]] = {
    "close a pool": (lambda s: None, lambda s: s.pool.close()),
    "close a pool and its memory": (lambda s: s.pool.allocate(1000), lambda s: (s.pool.close(), s.made.close())),
    "close a pointer": (MAKING["open a pointer"], lambda s: (s.imported.close(), s.made.close())),
    "close a legacy handle": (MAKING["open a legacy handle"], lambda s: s.made.close()),
    "close foreign memory": (MAKING["find foreign memory"], lambda s: s.made.close()),
    "close an event": (MAKING["import an event"], lambda s: (s.made.close(), s.event.close())),
    "close events": (lambda s: s.events.on(s.stream.number) and None, lambda s: s.events.close()),
    "close a stream": (lambda s: None, lambda s: s.stream.close()),
    "unregister": (MAKING["register host memory"], lambda s: s.made.close()),
    "unbind": (lambda s: s.bound(), unbound),
    "close a team": (lambda s: s.bound(), lambda s: s.team.close()),
    "close a team's mapping": (lambda s: (s.bound(), s.mapped_team())[1], lambda s: (s.team.close(), s.made.close())),
    "close all": (MAKING["allocate"], lambda s: s.close()),
}
KEEPS = {"export a pool", "export a team", "import a team"}  # a descriptor that goes with what it is of


@pytest.fixture
def multicast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Multicast is on, and the fabric works."""
    monkeypatch.setenv("VRAM_MULTICAST", "on")
    for variable in ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS"):
        monkeypatch.delenv(variable, raising=False)
    control = standin.Standin()
    control.fabric()
    yield
    control.fabric(False)


def state() -> object:
    driver: Any = drivers.get(HERE)
    books = [sorted(book) for book in (driver._events, driver._streams, driver._registered, driver._pointers)]
    return given_out(), driver.live(), driver._pools.all(), books, len(os.listdir("/proc/self/fd")), lifetime.live()


@pytest.mark.parametrize("way", [*SHORT, LONG])
@pytest.mark.parametrize("operation", MAKING)
def test_what_is_made_for_nobody_goes_i4(operation: str, way: str, theirs: dict[str, Any], multicast: None) -> None:
    act, points = MAKING[operation], 0
    for nth in nths():
        assert_books_agree()
        here = Others(theirs)
        if operation in KEEPS:
            (here.pool if "pool" in operation else here.team)._claim.handle.depend
        before = state()
        memory_of_others._known.infos.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what was made but never handed out is a leak like any other
            met = WAYS[way](nth, lambda here=here: act(here))
            gc.collect(0)
        assert_books_agree()
        if operation not in KEEPS:
            assert state() == before, f"point {nth}"
        again = act(here)  # and it works
        if isinstance(again, (lifetime.Owned, Numbered)):
            again.close()
        elif isinstance(again, lifetime.Claim):
            again.release()
        if operation == "create a team":
            assert len(again.devices) == 2
        here.close()
        del again
        if not met:
            break
        points += 1
    assert_books_agree()
    assert points or way != "at each point"


@pytest.mark.parametrize("way", [*SHORT, LONG])
@pytest.mark.parametrize("operation", TAKING)
def test_what_is_taken_back_is_gone_once_i12(operation: str, way: str, theirs: dict[str, Any], multicast: None) -> None:
    (make, take), points = TAKING[operation], 0
    empty = state()
    for nth in nths():
        here = Others(theirs)
        here.made = make(here)
        met = WAYS[way](nth, lambda here=here: take(here))
        assert not lifetime.stuck(), f"point {nth}"
        assert_books_agree()
        here.close()
        gc.collect(0)
        assert_books_agree()
        assert not lifetime.stuck(), f"point {nth}"
        assert state() == empty, f"point {nth}"
        if not met:
            break
        points += 1
    assert points or way != "at each point"
