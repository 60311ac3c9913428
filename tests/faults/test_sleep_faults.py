"""Sleep and wake with every driver call failing in turn, and with Ctrl-C at every point: all or nothing (I4, I12, I13).

Whatever happens, either all of it is awake or all of it is asleep, and every byte is there. On the host in a file, and
on the stand-in in pinned memory as well, and in the backups that only whoever makes them gets.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.contracts.region import load, store
from tests.support.faulty_driver import ERRORS, FaultyDriver, work
from tests.support.interrupts import chosen, interrupt, points
from tests.support.samples import least, nths, rounds, some

from faults.test_memory_faults import outcome
from vram import driver as drivers
from vram import lifetime
from vram.memory import Region
from vram.memory.backups import Backup, NamedFileBackup, PageableBackup, PinnedBackup
from vram.memory.pinned import trim
from vram.memory.sleep import sleep_regions, wake_regions
from vram.spec import HOST, Location

G = 2 << 20
GPU = Location("cuda", 0)
POINTS = rounds(40, 15)  # of the points where an interrupt can come, so many are tried
WORK = work(
    "mem_", "copy", "buffer", "synchronize", "stream_", "host_reg",
    also=("copy_async", "stream_create", "stream_synchronize", "host_register"),
)  # fmt: skip


MakeBackup = Callable[[Sequence[int]], Backup]


class Scene:
    """Two regions with bytes in them, and where those go."""

    def __init__(
        self, driver: Any, where: Location, to: Path | Literal["host"] | None, make: MakeBackup | None = None
    ) -> None:
        self.driver = driver
        self.to = to
        self.make = make
        self.backups: dict[Region, Backup] = {}
        self.one = Region.create(where, driver=self.driver, capacity=8 * G, chunk=G, nbytes=2 * G)
        self.other = Region.create(where, driver=self.driver, capacity=G, nbytes=10)
        store(self.driver, self.one.address, b"one")
        store(self.driver, self.one.address + G, b"more")
        store(self.driver, self.other.address, b"other")

    def sleep(self) -> object:
        regions = [self.one, self.other]
        if self.make is None:
            return sleep_regions(dict.fromkeys(regions, self.to))
        for region in regions:
            backup = self.backups.get(region)
            if backup is None or backup.sizes != region.chunks:
                self.backups[region] = self.make(region.chunks)
        return sleep_regions(dict(self.backups))

    def wake(self) -> object:
        return wake_regions([self.one, self.other], keep=self.make is PinnedBackup)

    def is_asleep(self) -> bool:
        """Whether both are asleep; that one is and the other is not must never be."""
        asleep = {region.asleep is not None and region.asleep.state == "asleep" for region in (self.one, self.other)}
        mapped = {region.mapped == 0 for region in (self.one, self.other)}
        assert asleep == mapped
        assert len(asleep) == 1
        return asleep.pop()

    def check(self) -> None:
        """Every byte is there, and it works."""
        if self.is_asleep():
            self.wake()
        assert (self.one.asleep, self.other.asleep) == (None, None)
        assert load(self.driver, self.one.address, 4) == b"one\0"
        assert load(self.driver, self.one.address + G, 5) == b"more\0"
        assert load(self.driver, self.other.address, 6) == b"other\0"
        self.one.grow(8 * G)
        self.sleep()
        self.wake()

    def close(self) -> None:
        self.one.close()
        self.other.close()


Make = Callable[..., Scene]


OURS = ["file", "pinned", "pageable", "named", "kept"]  # on the stand-in


@pytest.fixture(params=["host", *(pytest.param(name, marks=pytest.mark.standin) for name in OURS)])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    makes: dict[str, MakeBackup] = {
        "pageable": PageableBackup,
        "named": lambda sizes: NamedFileBackup(sizes, tmp_path),
        "kept": PinnedBackup,  # and once more after waking
    }

    def make(faulty: bool = False) -> Scene:
        where = HOST if request.param == "host" else GPU
        driver = FaultyDriver(drivers.get(where)) if faulty else drivers.get(where)
        return Scene(driver, where, "host" if request.param == "pinned" else tmp_path, makes.get(request.param))

    yield make
    gc.collect()
    trim()
    assert not list(tmp_path.iterdir())  # no file with a name is left
    assert not lifetime.stuck()  # descriptors and the rest are counted after every test


@pytest.mark.parametrize("error", some([*ERRORS], 1))
@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("verb", ["sleep", "wake"])
def test_a_failed_call_changes_nothing_i13(scene: Make, verb: str, error: str, forever: bool) -> None:
    failed = 0
    for nth in nths():
        here = scene(faulty=True)
        if verb == "wake":
            here.sleep()
        # For good, waiting for the device fails in the undo of a mapping as well, which then cannot be taken back.
        methods = WORK - {"synchronize"} if forever else WORK
        with here.driver.inject(methods, nth, ERRORS[error], forever=forever) as fault:
            raised = outcome(here.sleep if verb == "sleep" else here.wake)
        assert raised is fault.first
        if raised is None:
            assert here.is_asleep() is (verb == "sleep")
        else:
            assert here.is_asleep() is (verb == "wake")
            failed += 1
        here.check()
        here.close()
        if raised is None:
            break
    assert failed >= least(3)


@pytest.mark.parametrize("verb", some(["sleep", "wake"], 1))
def test_an_interrupt_leaves_all_asleep_or_all_awake_i12(scene: Make, verb: str) -> None:
    here = scene()
    if verb == "wake":
        here.sleep()
    found = points(here.sleep if verb == "sleep" else here.wake)
    here.check()
    here.close()
    assert len(found) > 100
    for nth in chosen(found, POINTS, seed=11):
        here = scene()
        if verb == "wake":
            here.sleep()
        interrupt(nth, here.sleep if verb == "sleep" else here.wake)
        gc.collect(0)
        here.check()
        here.close()
        gc.collect(0)


# -- pieces that threads pin -------------------------------------------------------------------------------------------
@pytest.mark.standin
class TestPieces:
    """Backups of more than one piece, which threads make and pin while the first copies are under way."""

    NBYTES = 208 << 20

    @pytest.fixture(autouse=True)
    def _trimmed(self) -> Iterator[None]:
        yield
        gc.collect()
        trim()

    def marked(self, driver: Any) -> Region:
        region = Region.create(GPU, driver=driver, capacity=self.NBYTES, nbytes=self.NBYTES)
        for at in range(0, self.NBYTES, 16 << 20):
            store(driver, region.address + at, at.to_bytes(8, "little"))
        return region

    def check(self, region: Region) -> None:
        for at in range(0, self.NBYTES, 16 << 20):
            assert load(region.driver, region.address + at, 8) == at.to_bytes(8, "little")

    def test_every_byte_comes_back_whatever_is_ready_when(self) -> None:
        with self.marked(drivers.get(GPU)) as region:
            for _ in range(2):  # the second time it is pinned already
                sleep_regions({region: "host"})
                wake_regions([region])
            self.check(region)
        assert trim() >= self.NBYTES
        assert trim() == 0

    @pytest.mark.parametrize("nth", [1, 3])
    @pytest.mark.parametrize("call", ["host_register", "copy_async"])
    def test_a_piece_that_fails_leaves_it_awake_and_nothing_pinned(self, call: str, nth: int) -> None:
        driver = FaultyDriver(drivers.get(GPU))
        with self.marked(driver) as region:
            error = ERRORS["error"]()
            with driver.inject({call}, nth, lambda: error, forever=True):
                assert outcome(lambda: sleep_regions({region: "host"})) is error
            assert region.asleep is None
            self.check(region)
            sleep_regions({region: "host"})
            wake_regions([region])
            self.check(region)

    def test_what_sleeps_at_once_is_pinned_at_once_and_shared_out(self) -> None:
        driver = drivers.get(GPU)
        with self.marked(driver) as one, self.marked(driver) as other:
            sleep_regions({one: "host", other: "host"})
            wake_regions([one, other])
            self.check(one)
            self.check(other)

    def test_a_child_that_is_forked_meanwhile_has_none_of_it(self) -> None:
        import os

        with self.marked(drivers.get(GPU)) as region:
            sleep_regions({region: "host"})
            (address, _), *_ = region.asleep.backup.spans(0, self.NBYTES)  # type: ignore[attr-defined]
            child = os.fork()
            if not child:
                first = f"{address:x}-"
                inherited = any(line.startswith(first) for line in Path("/proc/self/maps").read_text().splitlines())
                os._exit(1 if inherited else 0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            wake_regions([region])
            self.check(region)
