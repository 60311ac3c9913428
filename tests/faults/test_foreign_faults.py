"""Memory of others, pools and events with every call of NVIDIA's driver failing in turn, on the stand-in: nothing is
left, and the first error is the one that is raised (I4).

The other process makes what is opened here; its driver never fails.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.support.faulty_driver import UNDO, FaultyDriver
from tests.support.other_process import OtherProcess
from tests.support.raw_cuda import CudaStranger
from tests.support.samples import nths
from tests.support.stuck import take_back_what_is_stuck

import standin
from faults.test_cuda_faults import CODES, attempt, current
from vram import driver as drivers
from vram import lifetime
from vram.errors import DriverError, UsageError, VramError
from vram.memory import Event, EventPool
from vram.memory import foreign as memory_of_others
from vram.memory.foreign import create_legacy, find_foreign, open_handle
from vram.memory.kinds import LEGACY
from vram.spec import HandleKind, Location

pytestmark = pytest.mark.standin
G = 2 << 20
HERE = Location("cuda", 0)
FD = HandleKind.POSIX_FD


@dataclass
class Scene:
    """What there is before an operation, made without faults; what an operation makes is kept in `made`."""

    driver: Any
    neighbour: OtherProcess
    stranger: CudaStranger
    theirs: dict[str, Any]
    legacy: int
    mapped: int
    event: Event
    events: EventPool
    stream: int
    made: list[Any] = field(default_factory=list)

    def keep(self, thing: Any) -> None:
        self.made.append(thing)

    def tidy(self) -> None:
        """Close what an operation made."""
        while self.made:
            self.made.pop().close()

    def close(self) -> None:
        self.tidy()
        for thing in (self.event, self.events):
            thing.close()
        self.driver.stream_destroy(self.stream)


@pytest.fixture
def make(neighbour: OtherProcess, theirs: dict[str, Any]) -> Iterator[Callable[..., Scene]]:
    scenes: list[Scene] = []
    with CudaStranger() as stranger:

        def build(driver: Any = None) -> Scene:
            driver = driver or drivers.get(HERE)
            events = EventPool(driver, HERE)
            stream = driver.stream_create(HERE)
            events.on(stream)
            made = Scene(
                driver, neighbour, stranger, theirs, stranger.legacy(G), stranger.mapped((G, G), FD),
                Event.create(driver, HERE, interprocess=True), events, stream,
            )  # fmt: skip
            scenes.append(made)
            return made

        yield build
        for one in scenes:
            one.close()
    # A pop that failed leaves its context current, and the stranger's is the same one: so it shows only in the end.
    for _ in range(999):
        if not current():
            break
        stranger.api.cuCtxPopCurrent()
    assert not current()


def adopt(s: Scene) -> None:
    with find_foreign(s.driver, s.mapped, 2 * G)[0] as region:
        held, _ = region.segments(G, G + 5)
        s.made.extend(held)


def closing(thing: Any) -> None:
    thing.close()


OPERATIONS: dict[str, Callable[[Scene], object]] = {
    "open a legacy handle": lambda s: s.keep(open_handle(s.driver, LEGACY, s.theirs["legacy"], G, HERE)),
    "open a legacy handle of any size": lambda s: s.keep(open_handle(s.driver, LEGACY, s.theirs["legacy"], None, HERE)),
    "open and close it": lambda s: closing(open_handle(s.driver, LEGACY, s.theirs["legacy"], G, HERE)),
    "make memory that opens by 64 bytes": lambda s: s.keep(create_legacy(s.driver, 3 * G, HERE)),
    "find foreign memory": lambda s: s.keep(find_foreign(s.driver, s.legacy + 7, 9)[0]),
    "find mapped memory": lambda s: s.keep(find_foreign(s.driver, s.mapped + G - 1, 9)[0]),
    "adopt": adopt,
    "create an event": lambda s: s.keep(Event.create(s.driver, HERE, interprocess=True)),
    "import an event": lambda s: s.keep(Event.import_(s.driver, s.theirs["event"], HERE)),
    "open and close an event": lambda s: closing(Event.import_(s.driver, s.theirs["event"], HERE)),
    "export an event": lambda s: s.event.export(),
    "record": lambda s: s.event.record(s.stream),
    "wait": lambda s: s.event.wait(s.stream),
    "is done": lambda s: s.event.is_done,
    "synchronize": lambda s: s.event.synchronize(),
    "an event on a stream": lambda s: s.events.on(s.stream),
}
KEEPS = {"export a pool": 1, "export an event": 0}  # descriptors that stay, with what they are of


def state(s: Scene) -> object:
    """Everything that an operation which failed must leave as it was; contexts stay, by design."""
    counts = {kind: n for kind, n in standin.Standin().live().items() if not kind.startswith("context")}
    driver = drivers.get(HERE)
    return (
        counts,
        driver.live(),
        sorted((w.address, w.nbytes, w.kind) for w in driver.foreign.windows.values()),
        sorted(driver.foreign.pointers),
        [sorted(table.out) for table in (driver.sharing.pools, driver.work.events, driver.work.streams)],
        sorted(handle.label for handle in lifetime.live()),
        len(os.listdir("/proc/self/fd")),
    )


def take_back_what_is_noted(windows: set[int], books: dict[str, list[int]]) -> int:
    """Take back what the driver could not while it unwound, and said so; return how many there were."""
    driver: Any = drivers.get(HERE)
    extra = [window for number, window in tuple(driver.foreign.windows.items()) if number not in windows]
    for window in extra:
        if window.kind == "ipc":
            driver.ipc_close(window.address)
        elif window.kind == "ipc of ours":
            driver.ipc_free(window.address)
        else:
            pytest.fail("a window is closed without the driver")
    count = len(extra)
    for name, undo in (("events", "event_destroy"), ("streams", "stream_destroy")):
        for number in set(getattr(driver.work, name).out) - set(books[name]):
            getattr(driver, undo)(number)
            count += 1
    for handle in set(driver.books.handles) - set(books["handles"]):
        driver.mem_release(handle)
        count += 1
    return count


def books() -> dict[str, list[int]]:
    driver: Any = drivers.get(HERE)
    found = {name: list(getattr(driver.work, name).out) for name in ("events", "streams")}
    return {**found, "pools": list(driver.sharing.pools.out), "handles": list(driver.books.handles)}


def forget_looks() -> None:
    """Ask as many questions as the first time."""
    memory_of_others._known.infos.clear()


@pytest.mark.parametrize(("code", "forever"), [*((code, False) for code in CODES), (2, True)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_failed_call_leaves_nothing_i4(make: Callable[..., Scene], operation: str, code: int, forever: bool) -> None:
    act, here = OPERATIONS[operation], make()
    failed = 0
    for nth in nths():
        if nth > 60:
            pytest.fail("it does not come to an end")
        forget_looks()
        before, known, windows = state(here), books(), set(here.driver.foreign.windows)
        came = attempt(act, here, nth, code, forever)
        gc.collect()
        stuck = take_back_what_is_stuck(UsageError)
        assert sum("could not take back" in text for text in [*came.notes, *came.warned]) == stuck, came.said
        if came.raised is not None:
            failed += 1
            assert came.played
            assert isinstance(came.raised, VramError), came.said
            assert not here.made
            noted = take_back_what_is_noted(windows, known)
            assert noted <= 1 + forever, came.said
            assert forever or noted == 0 or came.is_of_undo, came.said
        here.tidy()
        gc.collect()
        if came.raised is None and operation in KEEPS:
            return
        assert state(here) == before, f"call {nth} of {operation}: {came.said}"
        if not came.played:
            assert came.raised is None, came.said
            assert not came.warned
            break
    assert failed


@pytest.mark.parametrize("operation", OPERATIONS)
def test_our_own_driver_failing_leaves_nothing_i4(make: Callable[..., Scene], operation: str) -> None:
    """The same a floor higher: each call of the driver's contract fails, once and for good; undo calls never."""
    driver = FaultyDriver(drivers.get(HERE))
    act, here = OPERATIONS[operation], make(driver)
    methods = {name for name in dir(type(driver)) if not name.startswith("_")} - UNDO
    methods &= {name for name in dir(driver.inner) if callable(getattr(driver.inner, name, None))}
    methods -= {"live", "inject", "clear", "count", "synchronize", "support"}
    for forever in (False, True):
        for nth in nths():
            forget_looks()
            before = state(here)
            with driver.inject(methods, nth, forever=forever) as fault:
                try:
                    act(here)
                except DriverError as error:
                    assert "injected" in str(error)  # noqa: PT017
                    assert not here.made
            here.tidy()
            gc.collect()
            if not fault.fired:
                break
            assert state(here) == before, (fault.fired, forever)


@pytest.mark.parametrize("undo", ["ipc_close", "ipc_free", "window_close", "event_destroy"])
def test_i1_what_cannot_be_taken_back_is_said_and_keeps_what_it_needs(make: Callable[..., Scene], undo: str) -> None:
    driver = FaultyDriver(drivers.get(HERE))
    here = make(driver)
    before = state(here)
    act = {
        "ipc_close": "open a legacy handle",
        "ipc_free": "make memory that opens by 64 bytes",
        "window_close": "find foreign memory",
        "event_destroy": "create an event",
    }[undo]
    OPERATIONS[act](here)
    with driver.inject(undo), pytest.warns(lifetime.ReleaseWarning, match="could not take back"):
        here.tidy()
    (handle,) = lifetime.stuck()
    for other in handle._depends.values():
        assert other.is_open
    assert take_back_what_is_stuck(UsageError) == 1
    assert state(here) == before
