"""What engines do with memory against an independent model with real bytes: sleep, wake, grow, shrink, update in place.

In any order, also of what is published, lent, looked at, asleep already, and while calls of the driver fail. The model
knows nothing of marks and backups. It holds the bytes of every array in plain numpy arrays, and says of each call
whether it comes about for all or is refused, and how many bytes are put aside, freed and brought back.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.deadlines import SOON
from tests.support.faulty_driver import FaultyDriver
from tests.support.places import private_socket
from tests.support.samples import rounds

import vram
from vram import lifetime
from vram.arrays import Array
from vram.driver.host import HostDriver
from vram.errors import AsleepError, BusyError, CapacityError, NotFoundError, OutOfMemoryError, TornError, VramError
from vram.keeper.client import close_client
from vram.memory.ahead import Prepared, keep_ready
from vram.memory.chunks import Kind
from vram.spec import HOST, AllocationFlags, HandleKind

G = 2 << 20
ROW = 500_000  # bytes: rows end within chunks, four to a chunk
MOST = 8  # rows that an array can have, and what a chunk of them is left over
COUNT = 3
NAME = "w"
SOME = np.random.default_rng(0).integers(1, 256, MOST * ROW + 256, "uint8")
MAPS = {"mem_map", "mem_map_new", "mem_create", "mem_set_access"}
LOOKS = {"synchronize", "buffer"}  # what falling asleep asks of a driver before it unmaps anything

chosen = st.lists(st.integers(0, COUNT - 1), min_size=1, max_size=COUNT, unique=True)
rows = st.one_of(st.integers(0, MOST), st.integers(3, MOST + 1))
seeds = st.integers(1, 255)
fails = st.sampled_from([0, 0, 0, 0, 0, 1, 2, 4])


def make(driver: Any) -> vram.Array:
    """Make an array of no rows."""
    return Array.create(driver, HOST, (0, ROW), "uint8", capacity=MOST, chunk=G)


@dataclass(eq=False)
class Area:
    """An array as the model has it.

    Attributes
    ----------
    reached : int
        Bytes from the first behind which nothing was ever shown.
    content : numpy.ndarray
        Every byte that has memory, also behind the rows.
    asleep : str
        Where its bytes are: "file", "nowhere", or "kept" where only this process's mapping is gone.
    left : int
        Chunks from the first that others have, or had.
    """

    array: vram.Array
    address: int
    rows: int = 0
    reached: int = 0
    content: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(-(-MOST * ROW // G) * G, "uint8"))
    asleep: str = ""
    left: int = 0
    updatable: bool = False
    views: list[np.ndarray[Any, Any]] = field(default_factory=list)
    lent: vram.typing.Lending | None = None
    fixed: int = 0  # rows that an entry or a loan keeps

    @property
    def mapped(self) -> int:
        return -(-self.rows * ROW // G) * G

    @property
    def least(self) -> int:
        """Rows that somebody looks at."""
        return max([self.fixed, *(len(view) for view in self.views)])

    def become(self, count: int) -> None:
        self.rows = count
        self.content[self.mapped :] = 0
        self.reached = min(max(self.reached, count * ROW), self.mapped)
        self.left = min(self.left, self.mapped // G)
        self.updatable = self.updatable and count > 0


@dataclass
class Entry:
    """What is published with ``updatable=True``, and a reader."""

    areas: dict[str, Area]
    lease: vram.Lease
    version: int = 1
    torn: bool = False


class EngineMachine(RuleBasedStateMachine):
    keeper = ""  # the socket of one, for all runs

    @initialize(counts=st.lists(st.integers(0, MOST), min_size=COUNT, max_size=COUNT))
    def begin(self, counts: list[int]) -> None:
        self.driver = FaultyDriver(HostDriver())
        self.directory = tempfile.TemporaryDirectory()
        self.areas = [Area(array := make(self.driver), array.address) for _ in range(COUNT)]
        self.prepared: Prepared | None = None
        self.entry: Entry | None = None
        self.resize(dict(enumerate(counts)), 0)
        for number, count in enumerate(counts):
            if count:
                self.write(number, 0, count, number)

    def attempt(self, call: Callable[[], Any], wrong: list[type[VramError]], nth: int, methods: set[str]) -> Any:
        """Call, perhaps with a driver that fails; return what came of it, or None if nothing was to change."""
        error = OutOfMemoryError("injected", errno.ENOMEM, "ENOMEM")
        raised: VramError | None = None
        came = None
        fired: tuple[str, ...] = ()
        try:
            if nth:
                # Not what is prepared meanwhile: that thread goes on when it can.
                with self.driver.inject(methods, nth, error, forever=True, only_here=True) as fault:
                    try:
                        came = call()
                    finally:
                        fired = fault.fired
            else:
                came = call()
        except VramError as caught:
            raised = caught.with_traceback(None)
        if fired:
            assert raised is error or type(raised) in wrong
            return None
        assert (type(raised) in wrong) if wrong else raised is None, (raised, wrong)
        return None if raised else came or True

    # -- sizes --------------------------------------------------------------------------------------------------
    @rule(new=st.dictionaries(st.integers(0, COUNT - 1), rows, min_size=1), nth=fails)
    def resize(self, new: dict[int, int], nth: int) -> None:
        changes = {self.areas[number]: count for number, count in new.items()}
        refusals = {area: self.refuses(area, count) for area, count in changes.items()}
        wrong = [error for errors in refusals.values() for error in errors]
        if wrong:  # all or none: nobody is another size
            self.attempt(lambda: vram.resize({area.array: count for area, count in changes.items()}), wrong, 0, MAPS)
            changes = {area: count for area, count in changes.items() if not refusals[area]}
        if self.attempt(lambda: vram.resize({area.array: count for area, count in changes.items()}), [], nth, MAPS):
            for area, count in changes.items():
                area.become(count)

    @rule(number=st.integers(0, COUNT - 1), more=st.integers(-2, 2))
    def resize_one(self, number: int, more: int) -> None:
        """Often within a chunk, so that what was there comes back."""
        area = self.areas[number]
        self.resize({number: min(max(area.rows + more, 0), MOST)}, 0)

    def refuses(self, area: Area, count: int) -> list[type[VramError]]:
        """Return why an area cannot have so many rows."""
        wrong: list[type[VramError]] = []
        if count > MOST:
            wrong.append(CapacityError)
        if area.asleep:
            wrong.append(AsleepError)
        if count < min(area.rows, area.least):
            wrong.append(BusyError)
        if count > area.rows and area.updatable:  # its readers would see the rows before anybody publishes them
            wrong.append(BusyError)
        return wrong

    @rule(most=st.integers(0, 4))
    def prepare(self, most: int) -> None:
        """Have chunks made ahead; or give back what is kept, of which nothing that is asleep needs any."""
        if not most:
            vram.memory.trim()
            self.prepared = None
            return
        kind = Kind(self.driver, HOST, HandleKind.POSIX_FD, AllocationFlags.NONE, G)
        self.prepared = keep_ready(kind, most)
        assert self.prepared.wait(SOON)

    # -- sleep --------------------------------------------------------------------------------------------------
    @rule(keeps=st.sampled_from([True, True, False]), unmaps=st.booleans())
    def nap(self, keeps: bool, unmaps: bool) -> None:
        """What happens most: all of it, and back."""
        self.sleep(list(range(COUNT)), keeps, unmaps, 0)
        self.everything_is_as_the_model_says()
        self.wake(list(range(COUNT)), False, 0)

    @rule(numbers=chosen, keeps=st.booleans(), unmaps=st.booleans(), nth=fails)
    def sleep(self, numbers: list[int], keeps: bool, unmaps: bool, nth: int) -> None:
        due = [self.areas[number] for number in numbers]
        wrong: list[type[VramError]] = []
        for area in due:
            if area.asleep:
                wrong.append(AsleepError)
            elif area.left and (area.updatable or not unmaps):
                wrong.append(BusyError)

        def sleep() -> Any:
            to, shared = self.directory.name if keeps else None, "unmap" if unmaps else "refuse"
            return vram.sleep([area.array for area in due], to, shared=shared)  # type: ignore[arg-type]

        if wrong:
            self.attempt(sleep, wrong[:1], 0, LOOKS)
            due = [area for area in due if not area.asleep and not area.left]
        report = self.attempt(sleep, [], nth, LOOKS)
        if report is None:
            return
        freed = stored = 0
        for area in due:
            area.asleep = "kept" if area.left else "file" if keeps else "nowhere"
            if area.asleep != "kept":
                freed += area.mapped
                stored += max(area.reached, area.rows * ROW) if keeps else 0
        assert (report.freed, report.nbytes) == (freed, stored)

    @precondition(lambda self: any(area.asleep for area in self.areas))
    @rule(numbers=st.one_of(st.just(list(range(COUNT))), chosen), discard=st.sampled_from([False, True]), nth=fails)
    def wake(self, numbers: list[int], discard: bool, nth: int) -> None:
        due = [self.areas[number] for number in numbers]
        report = self.attempt(
            lambda: vram.wake([area.array for area in due], discard=discard), [], nth, MAPS | {"buffer"}
        )
        if report is None:
            return
        restored = zeroed = 0
        for area in due:
            if area.asleep == "nowhere" or (area.asleep == "file" and discard):
                area.content[:] = 0
                zeroed += area.reached
            elif area.asleep == "file":
                restored += area.reached
            area.asleep = ""
        assert (report.nbytes, report.discarded) == (restored, zeroed)

    # -- who uses it --------------------------------------------------------------------------------------------
    @rule(
        number=st.integers(0, COUNT - 1), at=st.integers(0, MOST - 1), count=st.integers(1, 3), seed=st.integers(1, 255)
    )
    def write(self, number: int, at: int, count: int, seed: int) -> None:
        area = self.areas[number]
        if area.asleep:
            with pytest.raises(AsleepError):
                area.array.numpy()
            return
        area.array.numpy()[at : at + count] = self.some_bytes(area, slice(at, at + count), seed)

    def some_bytes(self, area: Area, where: slice, seed: int) -> np.ndarray[Any, Any]:
        """Return bytes for some rows, all different from place to place, once the model has them."""
        shown = area.content[: area.rows * ROW].reshape(-1, ROW)[where]
        shown[...] = SOME[seed : seed + shown.size].reshape(shown.shape)
        return shown

    @rule(number=st.integers(0, COUNT - 1))
    def look(self, number: int) -> None:
        """Have a view of one, or no more."""
        area = self.areas[number]
        if area.views:
            area.views.clear()
        elif not area.asleep and area.rows:
            area.views.append(area.array.numpy())

    @rule(number=st.integers(0, COUNT - 1))
    def lend(self, number: int) -> None:
        area = self.areas[number]
        if area.lent is not None:
            area.lent.close()
            area.lent, area.fixed = None, 0
        elif not area.asleep and area.rows and not area.left:
            path = f"{self.directory.name}/lent{number}"
            area.lent = vram.lend(area.array, at=path, writable=True)
            area.left, area.fixed = area.mapped // G, area.rows

    @rule(number=st.integers(0, COUNT - 1))
    def close(self, number: int) -> None:
        """Close one, asleep or not, and begin another."""
        area = self.areas[number]
        if not area.fixed:
            area.views.clear()
            area.array.close()
            array = make(self.driver)
            self.areas[number] = Area(array, array.address)

    # -- updates ------------------------------------------------------------------------------------------------
    @precondition(lambda self: self.entry is None)
    @rule(numbers=chosen)
    def publish(self, numbers: list[int]) -> None:
        due = {f"a{number}": self.areas[number] for number in numbers}
        due = {name: area for name, area in due.items() if not area.asleep and area.rows and not area.left}
        if due:
            arrays = {name: area.array for name, area in due.items()}
            made = vram.publish(NAME, arrays, updatable=True, whole=True, keeper=self.keeper)
            assert made.zero_copy
            for area in due.values():
                area.left, area.updatable, area.fixed = area.mapped // G, True, area.rows
            self.entry = Entry(due, vram.attach(NAME, keeper=self.keeper))

    @precondition(lambda self: self.entry is not None)
    @rule(seed=seeds, goes_wrong=st.sampled_from([False, False, True]), reader=st.booleans())
    def update(self, seed: int, goes_wrong: bool, reader: bool) -> None:
        entry = self.entry
        assert entry is not None
        if reader and not entry.torn:
            with entry.lease.reading(), pytest.raises(BusyError, match="lease"):
                vram.update(NAME, timeout=0, keeper=self.keeper).__enter__()
        try:
            with vram.update(NAME, timeout=SOON, keeper=self.keeper) as arrays:
                for name, area in entry.areas.items():
                    arrays[name].numpy()[...] = self.some_bytes(area, slice(area.fixed), seed)
                    if goes_wrong:
                        raise KeyError("in the middle")
        except KeyError:
            entry.torn = True
        else:
            entry.torn = False
            entry.version += 1

    @precondition(lambda self: self.entry is not None)
    @rule()
    def withdraw(self) -> None:
        entry, self.entry = self.entry, None
        assert entry is not None
        entry.lease.close()
        vram.remove(NAME, keeper=self.keeper)
        with pytest.raises(NotFoundError):
            vram.update(NAME, keeper=self.keeper).__enter__()
        for area in entry.areas.values():
            area.fixed = 0

    # -- what must hold after each step ----------------------------------------------------------------------------
    @invariant()
    def everything_is_as_the_model_says(self) -> None:
        for area in self.areas:
            array, region = area.array, area.array.region
            assert (array.address, array.shape) == (area.address, (area.rows, ROW))
            assert (region.asleep is not None) is bool(area.asleep)
            assert region.mapped == (0 if area.asleep else area.mapped)
            assert all(view.ctypes.data == area.address for view in area.views)
            if area.mapped and not area.asleep:
                found = np.frombuffer(self.driver.inner.buffer(area.address, area.mapped, readonly=True), "uint8")
                if not np.array_equal(found, area.content[: area.mapped]):
                    raise AssertionError(f"byte {np.flatnonzero(found != area.content[: area.mapped])[0]} of {area}")

    @invariant()
    def readers_see_one_version(self) -> None:
        entry = self.entry
        if entry is None:
            return
        if entry.torn:
            with pytest.raises(TornError):
                entry.lease.reading().__enter__()
            return
        with entry.lease.reading(timeout=0) as version:
            assert version == entry.version
            for name, area in entry.areas.items():
                count = area.fixed * ROW
                assert np.array_equal(entry.lease[name].numpy().reshape(-1), area.content[:count])

    @invariant()
    def books_agree(self) -> None:
        if self.prepared is not None and self.prepared.nbytes:
            self.prepared._refill()  # a failure may have kept the thread from it
            assert self.prepared.wait(SOON)
        live = self.driver.live()
        mapped = sum(area.mapped for area in self.areas if not area.asleep)
        kept = sum(area.mapped for area in self.areas if area.asleep == "kept")
        assert live.mappings == mapped // G
        assert live.nbytes == mapped + kept + (0 if self.prepared is None else self.prepared.ready)
        assert live.reservations == COUNT
        assert not lifetime.stuck()

    def teardown(self) -> None:
        if self.entry is not None:
            self.withdraw()
        for area in self.areas:
            area.views.clear()
            if area.lent is not None:
                area.lent.close()
            area.array.close()
        vram.memory.trim()
        self.directory.cleanup()
        self.areas.clear()  # or all that the model holds stays until a collection
        assert self.driver.live() == HostDriver().live()


@pytest.fixture(scope="module", autouse=True)
def running_keeper() -> Iterator[None]:
    """A keeper for all runs."""
    with private_socket() as path:
        EngineMachine.keeper = path
        yield


@pytest.fixture(autouse=True)
def connection(running_keeper: None, ledger: object) -> Iterator[None]:
    """End this process's connection before it is counted what is left."""
    yield
    close_client(EngineMachine.keeper)


TestShortRuns = EngineMachine.TestCase
TestShortRuns.settings = settings(
    max_examples=rounds(40, 15),
    stateful_step_count=40,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink takes minutes
)


@pytest.mark.slow
class TestLongRuns(EngineMachine.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=400, stateful_step_count=60)
