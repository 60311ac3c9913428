"""Multicast objects on the stand-in driver, the only place where they run: making one can take a shared host down."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.forked import forked
from tests.support.stuck import take_back_what_is_stuck

import standin
from vram import driver as drivers
from vram import lifetime
from vram.errors import (
    AlignmentError,
    BusyError,
    ClosedError,
    ForkedError,
    LeakWarning,
    ProtocolError,
    RangeError,
    ReleaseWarning,
    UnsupportedError,
    UsageError,
    VramError,
)
from vram.memory import AddressReservation, MemoryMapping, MulticastObject, PhysicalAllocation
from vram.spec import HOST, Access, HandleKind, Location

pytestmark = pytest.mark.standin

G = 2 << 20
BOTH = ("cuda:0", "cuda:1")
ZERO, ONE = Location("cuda", 0), Location("cuda", 1)
FD, NONE = HandleKind.POSIX_FD, HandleKind.NONE
SWITCHES = ("VRAM_MULTICAST", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")
Case = tuple[Any, Any, type[VramError], str]


@pytest.fixture(autouse=True)
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[standin.Standin]:
    """Multicast is on, and no test makes a call that would never return on hardware."""
    for switch in SWITCHES:
        monkeypatch.delenv(switch, raising=False)
    monkeypatch.setenv("VRAM_MULTICAST", "on")
    control = standin.Standin()
    control.clear()
    yield control
    hung = control.would_hang()
    control.clear()
    assert hung == 0


@pytest.fixture
def driver() -> Any:
    return drivers.get(ZERO)


def objects() -> dict[str, int]:
    """What the stand-in has given out, without contexts, which stay by design, and descriptors, which others hold."""
    gc.collect()
    live = standin.Standin().live().items()
    return {kind: count for kind, count in live if kind != "pinned" and not kind.startswith("context")}


class Team(contextlib.ExitStack):
    """A whole team: an object of two granules, memory of one granule on each of two devices, and addresses."""

    def set_up(self, driver: Any) -> Team:
        self.driver = driver
        self.object = self.enter_context(MulticastObject.create(driver, BOTH, 2 * G))
        self.memory = [self.made(G, where) for where in BOTH]
        self.reservation = self.enter_context(AddressReservation.reserve(driver, 8 * G))
        self.views = [self.view((6 + number) * G, memory) for number, memory in enumerate(self.memory)]
        return self

    def made(self, nbytes: int, where: str, kinds: HandleKind = FD) -> PhysicalAllocation:
        return self.enter_context(PhysicalAllocation.create(self.driver, nbytes, where, handle_kinds=kinds))

    def view(self, offset: int, memory: PhysicalAllocation) -> MemoryMapping:
        return self.enter_context(MemoryMapping.map(self.reservation, offset, memory))

    def read(self, at: int = 0) -> list[bytes]:
        """What is at an offset of each memory."""
        found = [bytearray(4) for _ in self.views]
        for data, view in zip(found, self.views, strict=True):
            self.driver.copy_out(memoryview(data), view.address + at)
        return [bytes(data) for data in found]


@pytest.fixture
def team(driver: Any) -> Iterator[Team]:
    with Team() as stack:
        yield stack.set_up(driver)


# -- what it is for ---------------------------------------------------------------------------------------------
def test_what_is_written_to_the_mapping_reaches_all_bound_memory(team: Team) -> None:
    for memory in team.memory:
        team.object.bind(memory, G)
    source = team.view(4 * G, team.made(G, "cuda:0"))
    with team.object.map(team.reservation) as mapping:
        team.driver.copy_in(mapping.address + G, memoryview(b"both"))
        assert team.read() == [b"both"] * 2
        team.driver.fill(mapping.address + G + 4, 7, 100)
        assert team.read(4) == [b"\7" * 4] * 2
        team.driver.copy_in(source.address, memoryview(b"copy"))
        team.driver.copy(mapping.address + G, source.address, 4)
        assert team.read() == [b"copy"] * 2
        with pytest.raises(UsageError, match=r"plain reads are undefined; read the memory that is bound"):
            team.driver.copy_out(memoryview(bytearray(4)), mapping.address)
        with pytest.raises(UsageError, match=r"plain reads"):
            team.driver.copy(team.views[0].address, mapping.address, 4)


def test_memory_is_bound_by_its_address(team: Team) -> None:
    with team.made(2 * G, "cuda:0") as second, team.view(2 * G, second) as view:
        team.object.bind((view.address + G, G), G)
        team.object.bind(team.memory[1], G)
    # Neither the mapping nor the allocation is open any more: what is bound is held on its own (I1).
    with team.object.map(team.reservation) as mapping:
        team.driver.copy_in(mapping.address + G, memoryview(b"held"))
        assert team.read()[1] == b"held"
        with pytest.raises(UsageError, match=r"this is a multicast object, which is at no place, not memory"):
            team.object.bind((mapping.address, G))
    assert team.object.bound == ((ZERO, G, G), (ONE, G, G))
    live = team.driver.live()
    team.object.unbind("cuda:0", G, G)
    assert team.driver.live().handles == live.handles - 1
    assert team.driver.live().nbytes == live.nbytes - 2 * G


def test_a_part_of_an_allocation_is_bound(team: Team) -> None:
    memory = team.made(3 * G, "cuda:0")
    team.views = [team.view(2 * G, memory)]
    team.object.bind(memory, G, memory_offset=2 * G)  # to its end
    team.object.bind(memory, 0, memory_offset="2MiB", nbytes="2MiB")
    assert team.object.bound == ((ZERO, G, G), (ZERO, 0, G))
    with team.object.map(team.reservation) as mapping:
        team.driver.copy_in(mapping.address + G - 2, memoryview(b"1234"))
    assert (team.read(2 * G - 2), team.read(G - 2), team.read()) == ([b"1234"], [bytes(4)], [bytes(4)])


# -- the team ---------------------------------------------------------------------------------------------------
def test_nothing_waits_for_a_team_that_is_not_whole(team: Team, control: standin.Standin) -> None:
    from cuda.bindings import driver as api

    with MulticastObject.create(team.driver, 2, 2 * G) as thing:
        thing.add_device("cuda:0")
        control.clear()
        before = objects()
        for act, verb in (
            (lambda: thing.bind(team.memory[0]), "bind memory to"),
            (lambda: thing.bind((team.views[0].address, G)), "bind memory to"),
            (lambda: thing.map(team.reservation), "map"),
        ):
            with pytest.raises(UsageError, match=rf"cannot {verb} the multicast object of 4 MiB for 2 devices: 1 of 2"):
                act()
        assert (objects(), control.called()) == (before, {})
        assert int(api.cuMulticastAddDevice(thing.native_handle, 1)[0]) == 0
        thing.added_elsewhere(1)  # by hand, which is for its owner to say
        thing.bind(team.memory[0])


def test_each_device_is_added_once(driver: Any) -> None:
    with MulticastObject.create(driver, 2, G) as thing, MulticastObject.create(driver, ("cuda:0",), G) as one:
        thing.add_device("cuda:1")
        for to, name, words in (
            (thing, "cuda:1", "was added to the multicast object of 2 MiB for 2 devices already"),
            (thing, f"cuda:{driver.device_info(ONE).uuid}", "was added to"),
            (thing, "cuda:numa:0", "memory of the host; name a GPU"),
            (thing, "host", "the cuda driver serves"),
            (one, "cuda:1", "cannot add cuda:1: all devices of the multicast object"),
        ):
            with pytest.raises(UsageError, match=words):
                to.add_device(name)


@pytest.mark.parametrize(
    ("devices", "nbytes", "kinds", "error", "words"),
    [
        *((odd, G, FD, UsageError, "how many there are in the team") for odd in (0, 1 << 32, (), "cuda:0", None, True)),
        (("cuda:0", "cuda:0"), G, FD, UsageError, "names one twice"),
        (("cuda:0", "cuda:2"), G, FD, UsageError, "no cuda:2 among the 2 GPUs"),
        (3, G, FD, UsageError, "for 3 devices cannot be made .*This process sees 2"),
        (2, G + 1, FD, AlignmentError, "nbytes 2097153 is not a multiple .* 2097152; nearest: 2097152 or 4194304"),
        (2, 0, FD, UsageError, "nbytes is 0"),
        (2, G, HandleKind.WIN32, UnsupportedError, "WIN32 needs Windows"),
    ],
)
def test_what_a_team_cannot_be(
    driver: Any, devices: Any, nbytes: int, kinds: Any, error: type[VramError], words: str
) -> None:
    with pytest.raises(error, match=words):
        MulticastObject.create(driver, devices, nbytes, handle_kinds=kinds)


# -- what is bound, and where it is mapped ----------------------------------------------------------------------
def test_what_cannot_be_bound(team: Team) -> None:
    thing, address, two = team.object, team.views[1].address, team.made(2 * G, "cuda:0")
    closed = team.made(G, "cuda:0")
    closed.close()
    foreign = team.enter_context(PhysicalAllocation.create(drivers.get(HOST), G, "host"))
    thing.bind(team.memory[0], G)
    at, part = (lambda offset: {"offset": offset}), (lambda first, size: {"memory_offset": first, "nbytes": size})
    cases: list[Case] = [
        (team.memory[0], at(5), AlignmentError, f"offset 5 is not a multiple of the granularity, {G}; nearest: {G}"),
        (team.memory[0], at(2 * G), RangeError, f"{G} bytes at offset {2 * G} do not fit .* has {2 * G} bytes"),
        (team.memory[0], at(G), RangeError, f"bytes {G} to {2 * G} of it are bound.*; unbind them first"),
        (two, {}, RangeError, f"bytes {G} to {2 * G} of it are bound"),
        (two, part(G, 2 * G), RangeError, f"bytes {G} to {3 * G} are not within the {2 * G} of <Phys"),
        (two, part(2 * G, None), RangeError, f"bytes {2 * G} to {3 * G} are not within"),
        (two, part(G + 1, None), AlignmentError, "memory_offset 2097153 is not a multiple"),
        (two, part(0, G - 1), AlignmentError, "nbytes 2097151 is not a multiple"),
        (two, part(0, 0), UsageError, "nbytes is 0"),
        (two, part(-G, G), UsageError, "memory_offset"),
        (team.made(3 * G, "cuda:0"), {}, RangeError, "do not fit the multicast object of 4 MiB for 2 devices"),
        (team.made(G, "cuda:numa:0"), {}, UsageError, "cuda:numa:0 has no memory in .* added are cuda:0, cuda:1"),
        (team.made(G, "cuda:0", NONE), {}, UsageError, "only memory that can too; .*handle_kinds=HandleKind.POSIX_FD"),
        (closed, {}, ClosedError, "was closed"),
        (foreign, {}, UsageError, "belong to different drivers"),
        ((address + 5, G), {}, AlignmentError, "address .* is not a multiple"),
        ((address, 5), {}, AlignmentError, "the size 5 is not a multiple"),
        ((address, 0), {}, UsageError, "the size is 0"),
        ((address, 2 * G), {}, RangeError, "go beyond the mapping there.*bind each mapping on its own"),
        ((address, G), part(0, G), UsageError, "an address says its part itself"),
        ((team.reservation.address, G), {}, RangeError, "nothing is mapped at"),
        ("memory", {}, UsageError, "memory must be a PhysicalAllocation or an address and a size"),
        ((address, True), {}, UsageError, "memory must be"),
    ]
    before = objects()
    for memory, given, error, words in cases:
        with pytest.raises(error, match=words):
            thing.bind(memory, **given)
        assert objects() == before  # I4
    thing.bind(team.memory[1], G)  # of another device
    thing.bind(team.memory[0], 0)  # elsewhere; the same memory twice is the driver's business
    with MulticastObject.create(team.driver, BOTH, G, handle_kinds=NONE) as private:
        private.bind(team.made(G, "cuda:0", NONE))
        with pytest.raises(UsageError, match=r"cannot leave the process as POSIX_FD.*handle_kinds=HandleKind.POSIX_FD"):
            private.export()


def test_an_unbind_is_exactly_a_bind(team: Team, control: standin.Standin) -> None:
    thing = team.object
    thing.bind(team.memory[0], G)
    for where, offset, nbytes in (("cuda:0", 0, G), ("cuda:0", G, 2 * G), ("cuda:1", G, G), ("cuda:0", 0, 2 * G)):
        with pytest.raises(RangeError, match=rf"no {nbytes} bytes are bound.*bound: {G} bytes at offset {G} on cuda:0"):
            thing.unbind(where, offset, nbytes)
    assert control.calls("cuMulticastUnbind") == 0  # undefined in the driver: it is not asked
    thing.unbind("cuda:0", "2MiB", "2MiB")
    with pytest.raises(RangeError, match=r"bound: none"):
        thing.unbind("cuda:0", G, G)
    thing.bind(team.memory[0], G)


def test_where_an_object_can_be_mapped(team: Team) -> None:
    foreign = team.enter_context(AddressReservation.reserve(drivers.get(HOST), 2 * G))
    cases: list[Case] = [
        (team.reservation, {"offset": 5}, AlignmentError, f"address there, .* not a multiple of the granularity, {G}"),
        (team.reservation, {"offset": 7 * G}, RangeError, f"{2 * G} bytes at .* do not fit .* {8 * G} byt"),
        (team.reservation, {"offset": 5 * G}, RangeError, "unmap"),
        (team.reservation, {"locations": ()}, UsageError, "no location is named"),
        (team.reservation, {"locations": ("cuda:7",)}, UsageError, "no cuda:7 among the 2 GPUs"),
        (foreign, {}, UsageError, "belong to different drivers"),
    ]
    before = objects()
    for where, given, error, words in cases:
        with pytest.raises(error, match=words):
            team.object.map(where, **given)
        assert objects() == before  # I4
    assert not team.object.is_mapped
    with team.object.map(team.reservation), team.object.map(team.reservation, 2 * G):
        assert team.object.is_mapped
    assert not team.object.is_mapped


# -- lifetimes --------------------------------------------------------------------------------------------------
def refused(thing: MulticastObject, team: Team, error: type[VramError]) -> int:
    """Return how many verbs of an object do not raise an error."""
    verbs: list[Callable[[], Any]] = [
        lambda: thing.bind(team.memory[0]),
        lambda: thing.add_device("cuda:0"),
        lambda: thing.map(team.reservation),
        lambda: thing.unbind("cuda:1", 0, G),
        lambda: thing.export(),
        lambda: thing.native_handle,
        lambda: thing.added_elsewhere(0),
    ]
    done = []
    for verb in verbs:
        with contextlib.suppress(error):
            done.append(verb())
    return len(done)


def test_nothing_is_unbound_under_a_mapping(team: Team) -> None:
    thing = team.object
    thing.bind(team.memory[0])
    with thing.map(team.reservation):
        thing.bind(team.memory[1])  # after the mapping was made
        for where in BOTH:
            with pytest.raises(BusyError, match=r"binding of 2 MiB on cuda:. at offset 0 is still .* mapping of 4 MiB"):
                thing.unbind(where, 0, G)
        with pytest.raises(BusyError, match=r"multicast object of 4 MiB for 2 devices is still in use \(held by: mapp"):
            thing.close(strict=True)
        assert repr(thing).endswith("2/2 devices, 2 bound, mapped>")
    thing.unbind("cuda:0", 0, G)
    with forked(lambda: refused(thing, team, ForkedError) or thing.close() or 0) as child:
        assert child.end() == 0  # I7
    assert thing.bound == ((ONE, 0, G),)
    thing.close(strict=True)
    thing.close()
    assert refused(thing, team, ClosedError) == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_driver_sees_unmap_unbind_release_in_any_order_of_closing_i1(driver: Any, order: tuple[int, ...]) -> None:
    before, live = objects(), driver.live()
    with contextlib.ExitStack() as close:
        thing = MulticastObject.create(driver, BOTH, G)
        memory = PhysicalAllocation.create(driver, G, "cuda:0")
        reservation = AddressReservation.reserve(driver, G)
        thing.bind(memory)
        things = [thing, memory, reservation, thing.map(reservation)]
        assert driver.live().nbytes == live.nbytes + G, "that of the memory, and none for the object"
        for one in things:
            close.enter_context(one)
        for number in order:
            things[number].close()
            if not things[3].is_closed:
                held = objects()
                assert (held["mappings"], held["bindings"], held["multicasts"]) == (1, 1, 1)
    assert (objects(), driver.live()) == (before, live)


def test_an_object_that_is_forgotten_is_taken_back_with_a_warning_i3(driver: Any) -> None:
    before = objects()
    thing = MulticastObject.create(driver, BOTH, G)
    with PhysicalAllocation.create(driver, G, "cuda:0") as memory:
        thing.bind(memory)
    with pytest.warns(LeakWarning, match=r"multicast object of 2 MiB for 2 devices was not closed"):
        del thing
    assert objects() == before


def test_an_imported_object_knows_what_it_was_told(team: Team) -> None:
    maker = team.enter_context(MulticastObject.create(team.driver, 2, G))
    fd = maker.export()
    assert maker.export() == fd
    maker.add_device("cuda:0")
    for wrong in (2, -1, True, "1"):
        with pytest.raises(UsageError, match=r"cannot have been added elsewhere: 1 were added here; 0 to 1"):
            maker.added_elsewhere(wrong)  # type: ignore[arg-type]
    there = team.enter_context(MulticastObject.import_(team.driver, fd, G, 2))
    there.added_elsewhere(1)
    there.add_device("cuda:1")
    maker.added_elsewhere(1)
    there.bind(team.memory[1])
    with pytest.raises(UsageError, match=r"cuda:0 has no memory in .* the devices that this process added are cuda:1"):
        there.bind(team.memory[0])
    maker.bind(team.memory[0])
    with maker.map(team.reservation) as mapping:
        team.driver.copy_in(mapping.address, memoryview(b"here"))
    assert team.read() == [b"here"] * 2
    assert there.export() != fd  # of what was imported, too
    larger = team.enter_context(MulticastObject.import_(team.driver, fd, 2 * G, 2))
    larger.added_elsewhere(2)
    with pytest.raises(ProtocolError, match=r"cannot be mapped as the 4194304 bytes that its owner said"):
        larger.map(team.reservation)
    with there.map(team.reservation, locations=BOTH) as mapping:
        assert mapping.access is Access.READ_WRITE


# -- gates ------------------------------------------------------------------------------------------------------
def test_a_host_has_none() -> None:
    with pytest.raises(UnsupportedError, match=r"a multicast object needs .*; have the host driver, which has none"):
        MulticastObject.create(drivers.get(HOST), 2, G)


@pytest.mark.parametrize(
    ("variable", "value"),
    [*((SWITCHES[0], value) for value in (None, "1")), *zip(SWITCHES[1:], ("0", "1", " True"), strict=True)],
)
def test_each_switch_says_no(
    team: Team, monkeypatch: pytest.MonkeyPatch, control: standin.Standin, variable: str, value: str | None
) -> None:
    driver, fd = team.driver, team.object.export()
    monkeypatch.delenv(variable, raising=False)
    if value is not None:
        monkeypatch.setenv(variable, value)
    control.clear()
    for act in (
        lambda: driver.multicast_check(ZERO),
        lambda: MulticastObject.create(driver, 2, G),
        lambda: MulticastObject.import_(driver, fd, G, 2),
    ):
        with pytest.raises(UnsupportedError, match=r"^a multicast object needs .*(Set|Take)") as caught:
            act()
        needs = "VRAM_MULTICAST=on" if variable in SWITCHES[:1] else f"an environment without {variable}={value}"
        have = f"{variable} not set, which is off" if value is None else f"{variable}={value!r}"
        assert (caught.value.needs, caught.value.have) == (needs, have)
    # No object is made for this: it can be known before one is wanted.
    found = MulticastObject.granularity(driver, BOTH, "6MiB", FD)
    assert (found.minimum, found.recommended) == (G, 256 * G)
    assert not {"cuMulticastCreate", "cuMemImportFromShareableHandle"} & set(control.called())


def test_other_libraries_may_leave_it_on(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, values in ((SWITCHES[1], ("1", "nonsense")), (SWITCHES[3], ("", "false", "0"))):
        for value in values:
            monkeypatch.setenv(variable, value)
            MulticastObject.create(driver, BOTH, G).close()


def test_a_device_without_it_is_named(team: Team, control: standin.Standin) -> None:
    control.clear()
    for act in (
        lambda: MulticastObject.create(team.driver, BOTH, 5 * G),
        lambda: MulticastObject.create(team.driver, 2, 5 * G),
    ):
        with control.failing("cuDeviceGetAttribute", code=1, forever=True):  # which the driver does not know
            with pytest.raises(UnsupportedError, match=r"a GPU with multicast.*cuda:0.*says that it has none"):
                act()
            assert control.calls("cuMulticastCreate") == 0


BINDS = """
from vram import driver
from vram.memory import AddressReservation, Location, MemoryMapping, MulticastObject, PhysicalAllocation
G, cuda = 2 << 20, driver.get(Location("cuda"))
with (
    MulticastObject.create(cuda, ("cuda:0", "cuda:1"), G) as thing,
    PhysicalAllocation.create(cuda, G, "cuda:0") as first,
    PhysicalAllocation.create(cuda, G, "cuda:1") as second,
    AddressReservation.reserve(cuda, G) as reservation,
    MemoryMapping.map(reservation, 0, second) as view,
):
    thing.bind(first)
    thing.bind((view.address, G))
print(sorted(name for name in cuda.bindings._functions if "Bind" in name))
"""


@pytest.mark.parametrize(("version", "ending"), [(13000, ""), (13010, "_v2")])
def test_binds_take_a_device_from_13_1_on(driver: Any, version: int, ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BINDS], capture_output=True, text=True, timeout=300, check=False,
        env=standin.child_environment(driver_version=version),
    )  # fmt: skip
    ending = ending if driver.bindings.has("cuMulticastBindMem_v2") else ""
    assert done.stdout == f"{[f'cuMulticastBind{one}{ending}' for one in ('Addr', 'Mem')]}\n", done.stderr


# -- failures ---------------------------------------------------------------------------------------------------
def story(driver: Any) -> None:
    """Everything once, ended by hand."""
    with Team() as stack:
        team = stack.set_up(driver)
        thing = team.object
        thing.bind(team.memory[0])
        thing.bind((team.views[1].address, G), G)
        mapping = team.enter_context(thing.map(team.reservation))
        thing.bind(team.memory[1])
        driver.fill(mapping.address, 1, 8)
        assert team.read() == [b"\1" * 4] * 2
        with MulticastObject.import_(driver, thing.export(), 2 * G, 2) as again:
            again.added_elsewhere(2)
            again.map(team.reservation, 2 * G, locations=BOTH).close()
        mapping.close()
        thing.unbind("cuda:1", 0, G)
        with contextlib.suppress(BusyError):  # only if the unmap failed
            thing.close(strict=True)


def played(driver: Any) -> BaseException | None:
    """Tell the story; what cannot be taken back while the fault lasts is said in warnings, and is not an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReleaseWarning)
        try:
            story(driver)
        except VramError as error:
            return error.with_traceback(None)
    return None


def state(driver: Any) -> object:
    return objects(), driver.live(), [handle.label for handle in lifetime.live()], len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
def test_a_fault_anywhere_leaves_nothing_i4(driver: Any, control: standin.Standin, forever: bool) -> None:
    assert played(driver) is None  # whatever is made once in a process
    before, stuck = state(driver), 0
    control.clear()
    assert played(driver) is None
    calls = {name: count for name, count in control.called().items() if name.startswith(("cuMem", "cuMulticast"))}
    assert (calls["cuMulticastBindMem"], calls["cuMulticastBindAddr"], calls["cuMulticastUnbind"]) == (2, 1, 3)
    for name, count in calls.items():
        for nth in range(1, count + 1):
            with control.failing(name, nth, forever=forever):
                error = played(driver)
                assert control.faults_played() >= 1, (name, nth)
                assert control.would_hang() == 0, (name, nth)
                assert error is None or "999" in str(error) or isinstance(error, (ProtocolError, BusyError)), error
            had = take_back_what_is_stuck()
            stuck += had
            undo = name in ("cuMemUnmap", "cuMemRelease", "cuMulticastUnbind", "cuMemAddressFree")
            assert bool(had) <= undo, (name, nth)  # only an undo that failed keeps anything, and says so
            del error
            assert state(driver) == before, (name, nth)
    assert stuck


def test_what_cannot_be_unbound_is_kept_with_all_it_stands_on_i1(team: Team, control: standin.Standin) -> None:
    thing = team.object
    thing.bind(team.memory[0])
    with control.failing("cuMulticastUnbind"), pytest.warns(ReleaseWarning, match=r"could not take back binding of 2"):
        thing.unbind("cuda:0", 0, G)
    assert repr(thing).endswith("1 bound>")
    for act in (lambda: thing.bind(team.memory[0]), lambda: thing.unbind("cuda:0", 0, G)):
        with pytest.raises(RangeError, match=r"are bound, or could not be unbound|bound: 2097152 bytes at offset 0"):
            act()
    thing.close()
    assert (objects()["bindings"], objects()["multicasts"]) == (1, 1)
    assert take_back_what_is_stuck() == 1
    assert not {"bindings", "multicasts"} & set(objects())
