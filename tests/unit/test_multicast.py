"""Multicast objects on the stand-in driver, the only place where they run: making one can take a shared host down."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import standin
from vram import driver as drivers
from vram import lifetime
from vram.driver.host import HostDriver
from vram.errors import (
    AlignmentError,
    BusyError,
    ClosedError,
    DriverError,
    LeakWarning,
    ProtocolError,
    RangeError,
    ReleaseWarning,
    UnsupportedError,
    UsageError,
    VramError,
)
from vram.memory import AddressReservation, MemoryMapping, MulticastMapping, MulticastObject, PhysicalAllocation
from vram.spec import Access, HandleKind, Location

pytestmark = pytest.mark.standin

G = 2 << 20
BOTH = ("cuda:0", "cuda:1")
FD, NONE = HandleKind.POSIX_FD, HandleKind.NONE
SWITCHES = ("VRAM_MULTICAST", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")


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
    return drivers.get(Location("cuda"))


@pytest.fixture
def close() -> Iterator[contextlib.ExitStack]:
    """Close what a test made, the newest first."""
    with contextlib.ExitStack() as stack:
        yield stack


def objects() -> dict[str, int]:
    """What the stand-in has given out, without the contexts, which stay by design."""
    gc.collect()
    return {kind: count for kind, count in standin.Standin().live().items() if not kind.startswith("context")}


class Team:
    """A whole team: an object of `granules`, memory of one granule on each of two devices, and addresses."""

    def __init__(self, driver: Any, close: contextlib.ExitStack, granules: int = 2) -> None:
        self.driver = driver
        self.object = close.enter_context(MulticastObject.create(driver, BOTH, granules * G))
        self.memory = [close.enter_context(PhysicalAllocation.create(driver, G, where)) for where in BOTH]
        self.reservation = close.enter_context(AddressReservation.reserve(driver, 8 * G))
        self.views = [
            close.enter_context(MemoryMapping.map(self.reservation, (6 + n) * G, memory))
            for n, memory in enumerate(self.memory)
        ]

    def read(self, nbytes: int = 4, offset: int = 0) -> list[bytes]:
        """What is at an offset of each memory."""
        found = [bytearray(nbytes) for _ in self.views]
        for data, view in zip(found, self.views, strict=True):
            self.driver.copy_out(memoryview(data), view.address + offset)
        return [bytes(data) for data in found]


@pytest.fixture
def team(driver: Any, close: contextlib.ExitStack) -> Team:
    return Team(driver, close)


# -- what it is for ---------------------------------------------------------------------------------------------
def test_what_is_written_to_the_mapping_reaches_all_bound_memory(team: Team) -> None:
    thing = team.object
    for memory in team.memory:
        thing.bind(memory, G)
    with thing.map(team.reservation) as mapping:
        team.driver.copy_in(mapping.address + G, memoryview(b"both"))
        assert team.read() == [b"both"] * 2
        team.driver.fill(mapping.address + G + 4, 7, 100)
        assert team.read(4, 4) == [b"\7" * 4] * 2
        other = PhysicalAllocation.create(team.driver, G, "cuda:0")
        with other, MemoryMapping.map(team.reservation, 4 * G, other) as source:
            team.driver.copy_in(source.address, memoryview(b"copy"))
            team.driver.copy(mapping.address + G, source.address, 4)
        assert team.read() == [b"copy"] * 2


def test_memory_is_bound_by_its_address(team: Team) -> None:
    second = PhysicalAllocation.create(team.driver, 2 * G, "cuda:0")
    with second, MemoryMapping.map(team.reservation, 2 * G, second) as view:
        team.object.bind((view.address + G, G), G)
        team.object.bind(team.memory[1], G)
    # Neither the mapping nor the allocation is open any more: what is bound is held on its own (I1).
    with team.object.map(team.reservation) as mapping:
        team.driver.copy_in(mapping.address + G, memoryview(b"held"))
        assert team.read()[1] == b"held"
    assert team.object.bound == ((Location("cuda", 0), G, G), (Location("cuda", 1), G, G))
    live = team.driver.live()
    team.object.unbind("cuda:0", G, G)
    assert team.driver.live().handles == live.handles - 1
    assert team.driver.live().nbytes == live.nbytes - 2 * G


def test_a_part_of_an_allocation_is_bound(team: Team, close: contextlib.ExitStack) -> None:
    thing = team.object
    memory = close.enter_context(PhysicalAllocation.create(team.driver, 3 * G, "cuda:0"))
    view = close.enter_context(MemoryMapping.map(team.reservation, 2 * G, memory))
    thing.bind(memory, G, memory_offset=2 * G)  # to its end
    thing.bind(memory, 0, memory_offset="2MiB", nbytes="2MiB")
    assert sorted(part[1:] for part in thing.bound) == [(0, G), (G, G)]
    with thing.map(team.reservation) as mapping:
        team.driver.copy_in(mapping.address + G - 2, memoryview(b"1234"))
    for at, expected in ((2 * G - 2, b"1234"), (G - 2, bytes(4)), (0, bytes(4))):
        found = bytearray(4)
        team.driver.copy_out(memoryview(found), view.address + at)
        assert found == expected
    thing.unbind("cuda:0", 0, G)
    assert [part[1:] for part in thing.bound] == [(G, G)]


def test_a_part_that_is_none_is_not_bound(team: Team, close: contextlib.ExitStack) -> None:
    thing, before = team.object, objects()
    memory = close.enter_context(PhysicalAllocation.create(team.driver, 2 * G, "cuda:0"))
    before = objects()
    for first, nbytes, error, said in (
        (G, 2 * G, RangeError, "bytes 2097152 to 6291456 are not within the 4194304 bytes of the allocation"),
        (2 * G, None, RangeError, "bytes 4194304 to 6291456 are not within"),
        (G + 1, None, AlignmentError, "memory_offset 2097153 is not a multiple"),
        (0, G - 1, AlignmentError, "nbytes 2097151 is not a multiple"),
        (0, 0, UsageError, "nbytes is 0"),
        (-G, G, UsageError, "memory_offset"),
    ):
        with pytest.raises(error, match=said):
            thing.bind(memory, memory_offset=first, nbytes=nbytes)
    with pytest.raises(UsageError, match="an address says it itself"):
        thing.bind((team.views[0].address, G), nbytes=G)
    assert objects() == before
    assert thing.bound == ()


def test_memory_bound_on_its_own_is_written_on_its_own(team: Team) -> None:
    team.object.bind(team.memory[0])
    team.object.bind(team.memory[1], G)
    with team.object.map(team.reservation) as mapping:
        team.driver.fill(mapping.address, 1, 2 * G)
        team.driver.fill(mapping.address + G, 2, 4)
    assert team.read() == [b"\1" * 4, b"\2" * 4]


def test_plain_reads_are_refused_in_words(team: Team) -> None:
    team.object.bind(team.memory[0])
    with team.object.map(team.reservation) as mapping:
        with pytest.raises(UsageError, match=r"plain reads are undefined; read the memory that is bound"):
            team.driver.copy_out(memoryview(bytearray(4)), mapping.address)
        with pytest.raises(UsageError, match=r"plain reads"):
            team.driver.copy(team.views[0].address, mapping.address, 4)


def test_the_state_is_in_the_repr(driver: Any, close: contextlib.ExitStack) -> None:
    thing = close.enter_context(MulticastObject.create(driver, 2, "4MiB"))
    name = f"<MulticastObject {thing._team.driver_handle:#x} 4 MiB, "
    assert repr(thing) == name + "0/2 devices, 0 bound>"
    thing.add_device("cuda:0")
    assert repr(thing) == name + "1/2 devices, 0 bound>"
    thing.add_device(f"cuda:{driver.device_info(Location('cuda', 1)).uuid}")
    assert len(thing.devices) == 2
    memory = close.enter_context(PhysicalAllocation.create(driver, 2 * G, "cuda:1"))
    thing.bind(memory)
    reservation = close.enter_context(AddressReservation.reserve(driver, 4 * G))
    mapping = thing.map(reservation, G, access=Access.NONE)
    assert repr(thing) == name + "2/2 devices, 1 bound, mapped>"
    assert repr(mapping) == f"<MulticastMapping {reservation.address + G:#x} 4 MiB, ->"
    mapping.set_access(Access.READ_WRITE)
    assert repr(mapping).endswith(", rw>")
    assert (mapping.access, mapping.nbytes, mapping.driver) == (Access.READ_WRITE, 2 * G, driver)
    mapping.set_access(Access.NONE, ["cuda:1"])
    assert mapping.access is Access.READ_WRITE, "that of another device"
    driver.mem_set_access(mapping.address, 2 * G, Access.NONE, [Location("cuda", 0)])
    assert mapping.access is Access.NONE, "whoever set it"
    mapping.set_access(Access.READ_WRITE)
    mapping.close()
    assert repr(mapping).endswith(", closed>")
    thing.export()
    assert repr(thing) == name + "2/2 devices, 1 bound, exported>"
    thing.unbind("cuda:1", 0, 2 * G)
    thing.close()
    assert repr(thing) == name + "2/2 devices, 0 bound, exported, closed>"
    assert isinstance(mapping, MulticastMapping)


def test_the_books_count_no_memory_for_an_object(driver: Any, close: contextlib.ExitStack) -> None:
    before = driver.live()
    thing = close.enter_context(MulticastObject.create(driver, BOTH, 4 * G))
    reservation = close.enter_context(AddressReservation.reserve(driver, 4 * G))
    mapping = close.enter_context(thing.map(reservation))
    assert driver.live().nbytes == before.nbytes
    assert (driver.live().handles, driver.live().mappings) == (before.handles + 1, before.mappings + 1)
    thing.close()
    assert (driver.live().handles, driver.live().mappings) == (before.handles + 1, before.mappings + 1)
    mapping.close()
    assert driver.live().handles == before.handles


def test_granularity_is_that_of_the_final_properties(driver: Any) -> None:
    found = MulticastObject.granularity(driver, BOTH, "4MiB", FD)
    assert found == MulticastObject.granularity(driver, 2, 4 << 20, FD)
    assert found == driver.multicast_granularity(2, 4 << 20, FD)
    assert (found.minimum, found.recommended) == (G, 256 * G)


# -- states -----------------------------------------------------------------------------------------------------
def test_nothing_waits_for_a_team_that_is_not_whole(
    driver: Any, close: contextlib.ExitStack, control: standin.Standin
) -> None:
    thing = close.enter_context(MulticastObject.create(driver, 2, 2 * G))
    memory = close.enter_context(PhysicalAllocation.create(driver, G, "cuda:0"))
    reservation = close.enter_context(AddressReservation.reserve(driver, 2 * G))
    addresses = close.enter_context(AddressReservation.reserve(driver, G))
    mapping = close.enter_context(MemoryMapping.map(addresses, 0, memory))
    thing.add_device("cuda:0")
    before = objects()
    for act, verb in (
        (lambda: thing.bind(memory), "bind memory to"),
        (lambda: thing.bind((mapping.address, G)), "bind memory to"),
        (lambda: thing.map(reservation), "map"),
    ):
        with pytest.raises(UsageError, match=rf"cannot {verb} the multicast object of 4 MiB for 2 devices: 1 of 2"):
            act()
    raw = thing._team.driver_handle  # the driver refuses on its own what would certainly wait
    for act in (
        lambda: driver.multicast_bind_mem(raw, 0, memory.driver_handle, 0, G),
        lambda: driver.multicast_bind_address(raw, 0, mapping.address, G),
        lambda: driver.mem_map(reservation.address, 2 * G, 0, raw),
    ):
        with pytest.raises(UsageError, match=r"1 of 2 devices were added to the multicast object; until the last"):
            act()
    assert objects() == before
    assert control.calls("cuMulticastBindMem") == control.calls("cuMulticastBindAddr") == 0
    thing.add_device("cuda:1")
    thing.bind(memory)


def test_each_device_is_added_once(driver: Any, close: contextlib.ExitStack) -> None:
    thing = close.enter_context(MulticastObject.create(driver, 2, G))
    thing.add_device("cuda:1")
    again = f"cuda:{driver.device_info(Location('cuda', 1)).uuid}"
    for name in ("cuda:1", again):
        with pytest.raises(UsageError, match=r"was added to the multicast object of 2 MiB for 2 devices already"):
            thing.add_device(name)
    with pytest.raises(UsageError, match=r"added to this object already"):
        driver.multicast_add_device(thing._team.driver_handle, Location("cuda", 1))
    with pytest.raises(UsageError, match=r"memory of the host; name a GPU"):
        thing.add_device("cuda:numa:0")
    with pytest.raises(UsageError, match=r"not served by the cuda driver"):
        thing.add_device("host")
    thing.add_device("cuda:0")
    one = close.enter_context(MulticastObject.create(driver, 1, G))
    one.add_device("cuda:0")
    with pytest.raises(UsageError, match=r"cannot add cuda:1: all devices of the multicast object"):
        one.add_device("cuda:1")
    with pytest.raises(UsageError, match=r"all 1 devices of this object were added"):
        driver.multicast_add_device(one._team.driver_handle, Location("cuda", 1))


@pytest.mark.parametrize("devices", [0, -1, (), "cuda:0", None, 1.5, True])
def test_a_team_is_a_number_or_named(driver: Any, devices: Any) -> None:
    with pytest.raises(UsageError, match=r"devices must be how many there are in the team"):
        MulticastObject.create(driver, devices, G)


def test_what_a_team_cannot_be(driver: Any) -> None:
    with pytest.raises(UsageError, match=r"names one twice"):
        MulticastObject.create(driver, ("cuda:0", "cuda:0"), G)
    with pytest.raises(UsageError, match=r"for 3 devices cannot be made .*This process sees 2"):
        MulticastObject.create(driver, 3, G)
    with pytest.raises(UsageError, match=r"no cuda:2 among the 2 GPUs"):
        MulticastObject.create(driver, ("cuda:0", "cuda:2"), G)
    with pytest.raises(
        AlignmentError, match=r"nbytes 2097153 is not a multiple .* 2097152; nearest: 2097152 or 4194304"
    ):
        MulticastObject.create(driver, 2, G + 1)
    with pytest.raises(UsageError, match=r"nbytes is 0"):
        MulticastObject.create(driver, 2, 0)
    with pytest.raises(UsageError, match=r"handle kinds must be"):
        MulticastObject.create(driver, 2, G, handle_kinds=1)  # type: ignore[arg-type]
    with pytest.raises(AlignmentError, match=r"multicast_create: 5 bytes"):
        driver.multicast_create(2, 5, FD)
    with pytest.raises(UnsupportedError, match=r"FABRIC needs an IMEX channel"):
        MulticastObject.create(driver, 2, G, handle_kinds=HandleKind.FABRIC)
    with pytest.raises(UnsupportedError, match=r"WIN32 needs Windows"):
        MulticastObject.create(driver, 2, G, handle_kinds=HandleKind.WIN32)


def test_what_cannot_be_bound(team: Team, driver: Any, close: contextlib.ExitStack) -> None:
    thing = team.object
    before = objects()
    large = close.enter_context(PhysicalAllocation.create(driver, 3 * G, "cuda:0"))
    host = close.enter_context(PhysicalAllocation.create(driver, G, "cuda:numa:0"))
    private = close.enter_context(PhysicalAllocation.create(driver, G, "cuda:0", handle_kinds=NONE))
    closed = PhysicalAllocation.create(driver, G, "cuda:0")
    closed.close()
    foreign = close.enter_context(PhysicalAllocation.create(HostDriver(), G, "host"))
    address = team.views[0].address
    made = objects()
    for memory, offset, error, words in (
        (team.memory[0], 5, AlignmentError, f"offset 5 is not a multiple of the granularity, {G}; nearest: {G}"),
        (team.memory[0], 2 * G, RangeError, f"{G} bytes at offset {2 * G} do not fit .*; the last offset is {G}"),
        (large, 0, RangeError, "do not fit the multicast object of 4 MiB for 2 devices.*; make it larger"),
        (host, 0, UsageError, "cuda:numa:0 has no memory in the multicast .* added are cuda:0, cuda:1"),
        (private, 0, UsageError, "takes only memory that can too; create it with handle_kinds=HandleKind.POSIX_FD"),
        (closed, 0, ClosedError, "was closed"),
        (foreign, 0, UsageError, "belong to different drivers"),
        ((address + 5, G), 0, AlignmentError, "address .* is not a multiple"),
        ((address, 5), 0, AlignmentError, "the size of the memory, 5 is not a multiple"),
        ((address, 0), 0, UsageError, "the size of the memory, is 0"),
        ((address, 2 * G), 0, RangeError, "go beyond the mapping there.*bind each mapping on its own"),
        ((team.reservation.address, G), 0, RangeError, "nothing is mapped at"),
        ("memory", 0, UsageError, "memory must be a PhysicalAllocation or an address and a size"),
        ((address, True), 0, UsageError, "memory must be"),
        (thing, 0, UsageError, "memory must be"),
    ):
        with pytest.raises(error, match=words):
            thing.bind(memory, offset)
        assert objects() == made  # I4
    assert len(made) >= len(before)
    one = close.enter_context(MulticastObject.create(driver, ("cuda:1",), G))
    with pytest.raises(UsageError, match=r"cuda:0 has no memory in .* the devices that this process added are cuda:1"):
        one.bind(team.memory[0])


def test_a_span_of_a_device_is_bound_once(team: Team, close: contextlib.ExitStack) -> None:
    whole = close.enter_context(PhysicalAllocation.create(team.driver, 2 * G, "cuda:0"))
    team.object.bind(team.memory[0], G)
    for memory, offset in ((team.memory[0], G), (whole, 0)):
        with pytest.raises(RangeError, match=rf"bytes {G} to {2 * G} of this device are bound.*; unbind them first"):
            team.object.bind(memory, offset)
    team.object.bind(team.memory[1], G)  # another device
    team.object.bind(team.memory[0], 0)  # another span; the same memory twice is the driver's business


def test_an_object_that_stays_here_takes_memory_that_stays_here(driver: Any, close: contextlib.ExitStack) -> None:
    thing = close.enter_context(MulticastObject.create(driver, BOTH, G, handle_kinds=NONE))
    thing.bind(close.enter_context(PhysicalAllocation.create(driver, G, "cuda:0", handle_kinds=NONE)))
    thing.bind(close.enter_context(PhysicalAllocation.create(driver, G, "cuda:1")))
    with pytest.raises(UsageError, match=r"cannot be exported as POSIX_FD.*handle_kinds=HandleKind.POSIX_FD"):
        thing.export()


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


def test_nothing_is_unbound_under_a_mapping(team: Team) -> None:
    thing = team.object
    thing.bind(team.memory[0])
    with thing.map(team.reservation):
        thing.bind(team.memory[1])  # after the mapping was made
        for where in BOTH:
            with pytest.raises(
                BusyError, match=r"binding of 2 MiB on cuda:. at offset 0 is still in use .*mapping of 4"
            ):
                thing.unbind(where, 0, G)
        with pytest.raises(BusyError, match=r"multicast object of 4 MiB for 2 devices is still in use \(held by: mapp"):
            thing.close(strict=True)
        assert repr(thing).endswith("2/2 devices, 2 bound, mapped>")
    thing.unbind("cuda:0", 0, G)
    thing.close(strict=True)
    thing.close()
    for act in (
        lambda: thing.bind(team.memory[0]),
        lambda: thing.add_device("cuda:0"),
        lambda: thing.map(team.reservation),
        lambda: thing.unbind("cuda:1", 0, G),
        lambda: thing.export(),
        lambda: thing.added_elsewhere(0),
    ):
        with pytest.raises(ClosedError, match=r"multicast object of 4 MiB for 2 devices was closed"):
            act()


def test_where_an_object_can_be_mapped(team: Team, close: contextlib.ExitStack) -> None:
    thing, before = team.object, objects()
    for offset, error, words in (
        (5, AlignmentError, f"not a multiple of the granularity, {G}; offset 0 is.*reserve with alignment={G}"),
        (7 * G, RangeError, f"{2 * G} bytes at offset {7 * G} do not fit a reservation of {8 * G} bytes"),
        (5 * G, RangeError, "cannot map"),
    ):
        with pytest.raises(error, match=words):
            thing.map(team.reservation, offset)
    with pytest.raises(UsageError, match=r"nobody would be given access"):
        thing.map(team.reservation, locations=())
    with pytest.raises(UsageError, match=r"access must be"):
        thing.map(team.reservation, access=3)  # type: ignore[arg-type]
    foreign = close.enter_context(AddressReservation.reserve(HostDriver(), 2 * G))
    with pytest.raises(UsageError, match=r"belong to different drivers"):
        thing.map(foreign)
    with pytest.raises(UsageError, match=r"no cuda:7 among the 2 GPUs"):
        thing.map(team.reservation, locations=("cuda:7",))  # known only to the driver: mapped, and unmapped again (I4)
    assert objects() == before
    assert not thing.is_mapped
    with thing.map(team.reservation), thing.map(team.reservation, 2 * G, locations=("cuda:1",)):
        assert thing.is_mapped
    assert not thing.is_mapped


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_driver_sees_unmap_unbind_release_in_any_order_of_closing_i1(
    driver: Any, order: tuple[int, ...], control: standin.Standin
) -> None:
    before = objects()
    with contextlib.ExitStack() as close:
        thing = MulticastObject.create(driver, BOTH, G)
        memory = PhysicalAllocation.create(driver, G, "cuda:0")
        reservation = AddressReservation.reserve(driver, G)
        thing.bind(memory)
        things = [thing, memory, reservation, thing.map(reservation)]
        for one in things:
            close.enter_context(one)
        for number in order:
            things[number].close()
            if not things[3].is_closed:
                held = objects()
                assert (held["mappings"], held["bindings"], held["multicasts"]) == (1, 1, 1)
    assert objects() == before


def test_an_object_that_is_forgotten_is_taken_back_with_a_warning_i3(driver: Any) -> None:
    before = objects()
    thing = MulticastObject.create(driver, BOTH, G)
    memory = PhysicalAllocation.create(driver, G, "cuda:0")
    thing.bind(memory)
    memory.close()
    with pytest.warns(LeakWarning, match=r"multicast object of 2 MiB for 2 devices was not closed"):
        del thing
    assert objects() == before


# -- other handles ----------------------------------------------------------------------------------------------
def test_memory_and_objects_are_told_apart(team: Team, driver: Any) -> None:
    raw, memory = team.object._team.driver_handle, team.memory[0].driver_handle
    for act in (
        lambda: driver.multicast_add_device(memory, Location("cuda", 0)),
        lambda: driver.multicast_bind_mem(memory, 0, memory, 0, G),
        lambda: driver.multicast_unbind(memory, Location("cuda", 0), 0, G),
    ):
        with pytest.raises(UsageError, match=r"a handle to memory, not to a multicast object"):
            act()
    with pytest.raises(UsageError, match=r"a multicast object cannot be bound to another one"):
        driver.multicast_bind_mem(raw, 0, raw, 0, G)
    with pytest.raises(UsageError, match=r"a multicast object, not memory; it is at no location"):
        driver.mem_properties(raw)
    with pytest.raises(UsageError, match=r"no such handle"):
        driver.multicast_add_device(1, Location("cuda", 0))
    before = objects()
    with pytest.raises(ProtocolError, match=r"no memory, but something else .* such as a multicast object"):
        PhysicalAllocation.import_(driver, team.object.export(), 2 * G)
    with pytest.raises(ProtocolError, match=r"this is memory, not a multicast object"):
        MulticastObject.import_(driver, team.memory[0].export(), G, 2)
    ours, theirs = os.pipe()
    with pytest.raises(ProtocolError, match=r"nothing that the driver exported"):
        MulticastObject.import_(driver, ours, G, 2)
    os.close(ours)
    os.close(theirs)
    with pytest.raises(UsageError, match=r"no open file descriptor"):
        MulticastObject.import_(driver, ours, G, 2)
    with pytest.raises(UsageError, match=r"how many there are in the team"):
        MulticastObject.import_(driver, 0, G, BOTH)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"kind must be POSIX_FD"):
        MulticastObject.import_(driver, 0, G, 2, kind=HandleKind.FABRIC)
    assert {**objects(), "pinned": 0} == {**before, "pinned": 0}


def test_a_host_has_none() -> None:
    with pytest.raises(
        UnsupportedError, match=r"a multicast object needs GPUs .*; have the host driver, which has none"
    ):
        MulticastObject.create(HostDriver(), 2, G)


def test_an_imported_object_knows_what_it_was_told(driver: Any, close: contextlib.ExitStack) -> None:
    maker = close.enter_context(MulticastObject.create(driver, 2, G))
    with pytest.raises(UsageError, match=r"nobody else can have added devices: .* was never exported"):
        maker.added_elsewhere(1)
    fd = maker.export()
    assert maker.export() == fd
    maker.add_device("cuda:0")
    for wrong in (2, -1, True, "1"):
        with pytest.raises(
            UsageError, match=r"cannot have been added elsewhere: the team is of 2, and 1 were added here"
        ):
            maker.added_elsewhere(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"3 devices cannot have been added"):
        MulticastObject.import_(driver, fd, G, 2, added_elsewhere=3)
    there = close.enter_context(MulticastObject.import_(driver, fd, G, 2, added_elsewhere=1))
    assert repr(there).endswith("2 MiB, 1/2 devices, 0 bound, imported>")
    reservation = close.enter_context(AddressReservation.reserve(driver, 2 * G))
    with pytest.raises(UsageError, match=r"1 of 2 devices were added"):
        there.map(reservation)
    there.add_device("cuda:1")
    maker.added_elsewhere(1)
    with pytest.raises(UsageError, match=r"all devices"):
        maker.add_device("cuda:1")
    memory = [close.enter_context(PhysicalAllocation.create(driver, G, where)) for where in BOTH]
    private = close.enter_context(PhysicalAllocation.create(driver, G, "cuda:1", handle_kinds=NONE))
    with pytest.raises(UsageError, match=r"takes only memory that can too"):
        there.bind(private)
    there.bind(memory[1])
    with pytest.raises(UsageError, match=r"cuda:0 has no memory in .* the devices that this process added are cuda:1"):
        there.bind(memory[0])
    maker.bind(memory[0])
    with maker.map(reservation) as mapping, MemoryMapping.map(reservation, G, memory[1]) as view:
        driver.copy_in(mapping.address, memoryview(b"here"))
        found = bytearray(4)
        driver.copy_out(memoryview(found), view.address)
        assert found == b"here"
    assert there.export() != fd  # of what was imported, too
    wrong = close.enter_context(MulticastObject.import_(driver, fd, 2 * G, 2, added_elsewhere=2))
    with pytest.raises(ProtocolError, match=r"cannot be mapped as the 4194304 bytes that its owner said"):
        wrong.map(reservation, locations=("cuda:0",))


# -- gates ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("variable", "value", "needs", "have"),
    [
        ("VRAM_MULTICAST", None, "VRAM_MULTICAST=on", "VRAM_MULTICAST not set, which is off"),
        ("VRAM_MULTICAST", "off", "VRAM_MULTICAST=on", "VRAM_MULTICAST='off'"),
        ("VRAM_MULTICAST", "1", "VRAM_MULTICAST=on", "VRAM_MULTICAST='1'"),
        ("NCCL_NVLS_ENABLE", "0", "NCCL_NVLS_ENABLE other than 0", "NCCL_NVLS_ENABLE='0'"),
        (
            "TORCH_SYMM_MEM_DISABLE_MULTICAST",
            "1",
            "no TORCH_SYMM_MEM_DISABLE_MULTICAST=1",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST='1'",
        ),
        ("NVSHMEM_DISABLE_NVLS", "true", "no NVSHMEM_DISABLE_NVLS=1", "NVSHMEM_DISABLE_NVLS='true'"),
    ],
)
def test_each_switch_says_no(
    driver: Any,
    monkeypatch: pytest.MonkeyPatch,
    control: standin.Standin,
    variable: str,
    value: str | None,
    needs: str,
    have: str,
) -> None:
    with MulticastObject.create(driver, BOTH, G) as made:
        fd = made.export()
        if value is None:
            monkeypatch.delenv(variable)
        else:
            monkeypatch.setenv(variable, value)
        control.clear()
        for act in (
            lambda: driver.multicast_check(Location("cuda", 0)),
            lambda: driver.multicast_create(2, G, FD),
            lambda: driver.multicast_import(fd, FD, G, 2),
            lambda: MulticastObject.create(driver, BOTH, G),
            lambda: MulticastObject.import_(driver, fd, G, 2),
        ):
            with pytest.raises(UnsupportedError) as caught:
                act()
            error = caught.value
            assert error.capability == "a multicast object"
            assert needs in error.needs
            assert error.have == have
            assert variable in error.remedy
        assert control.called() == {}
        # No object is made for this: it can be known before one is wanted.
        found = MulticastObject.granularity(type(driver)(), 2, 3 * G, FD)
        assert (found.minimum, found.recommended) == (G, 256 * G)
        assert control.calls("cuMulticastGetGranularity") == 2
        assert control.calls("cuMulticastCreate") == 0


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NCCL_NVLS_ENABLE", "1"),
        ("NCCL_NVLS_ENABLE", "2"),
        ("NCCL_NVLS_ENABLE", "nonsense"),
        ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0"),
        ("NVSHMEM_DISABLE_NVLS", ""),
        ("NVSHMEM_DISABLE_NVLS", "false"),
    ],
)
def test_other_libraries_may_leave_it_on(
    driver: Any, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    MulticastObject.create(driver, BOTH, G).close()


def test_ours_is_asked_first_and_on_is_not_stronger_than_theirs(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    with pytest.raises(UnsupportedError, match=r"NCCL_NVLS_ENABLE='0'"):
        driver.multicast_check(Location("cuda", 0))
    monkeypatch.delenv("VRAM_MULTICAST")
    with pytest.raises(UnsupportedError, match=r"VRAM_MULTICAST not set"):
        driver.multicast_check(Location("cuda", 0))


def test_a_device_without_it_is_named(driver: Any, control: standin.Standin) -> None:
    with control.failing("cuDeviceGetAttribute", code=1, forever=True):  # an attribute that the driver does not know
        for act in (
            lambda: MulticastObject.create(driver, BOTH, 5 * G),
            lambda: MulticastObject.create(driver, 2, 5 * G),
        ):
            with pytest.raises(UnsupportedError, match=r"a GPU with multicast.*cuda:0.*, which says that it has none"):
                act()
        assert control.calls("cuMulticastCreate") == 0
    with MulticastObject.create(driver, 2, G) as thing, control.failing("cuDeviceGetAttribute", code=1, forever=True):
        with pytest.raises(UnsupportedError, match=r"\(cuda:1\), which says that it has none"):
            thing.add_device("cuda:1")
        assert control.calls("cuMulticastAddDevice") == 0


IN_A_CHILD = """
import sys
from vram import driver
from vram.errors import UnsupportedError
from vram.memory import AddressReservation, MemoryMapping, MulticastObject, PhysicalAllocation
from vram.spec import Location
G = 2 << 20
cuda = driver.get(Location("cuda"))
"""


def in_a_child(code: str, **settings: object) -> str:
    """Run code in a process with another stand-in, and return what it printed."""
    environment = {**standin.child_environment(**settings), "VRAM_MULTICAST": "on"}
    program = IN_A_CHILD + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


CREATE = """
try:
    MulticastObject.create(cuda, ("cuda:0", "cuda:1"), G)
except UnsupportedError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"driver_version": 12000}, "a multicast object needs a driver of CUDA 12.1; have 12.0. Upgrade the NVIDIA"),
        (
            {"no_symbols": "cuMulticastGetGranularity"},
            "cuMulticastGetGranularity needs a driver that has this function",
        ),
        ({"no_symbols": "cuMulticastCreate"}, "cuMulticastCreate needs a driver that has this function"),
    ],
)
def test_an_old_driver_is_told_apart(settings: dict[str, object], words: str) -> None:
    assert words in in_a_child(CREATE, **settings)


BINDS = """
with (
    MulticastObject.create(cuda, ("cuda:0", "cuda:1"), G) as thing,
    PhysicalAllocation.create(cuda, G, "cuda:0") as first,
    PhysicalAllocation.create(cuda, G, "cuda:1") as second,
    AddressReservation.reserve(cuda, 2 * G) as reservation,
    MemoryMapping.map(reservation, 0, second) as view,
):
    thing.bind(first)
    thing.bind((view.address, G))
    with thing.map(reservation, G) as mapping:
        cuda.copy_in(mapping.address, memoryview(b"both"))
    found = bytearray(4)
    cuda.copy_out(memoryview(found), view.address)
    assert found == b"both"
    thing.unbind("cuda:1", 0, G)
import standin
print(sorted(name for name in cuda._call._functions if "Bind" in name), standin.Standin().would_hang())
"""


@pytest.mark.parametrize(("version", "newer"), [(12010, False), (13000, False), (13010, True), (13020, True)])
def test_binds_take_a_device_from_13_1_on(driver: Any, version: int, newer: bool) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    ending = "_v2" if newer and driver._call.has("cuMulticastBindMem_v2") else ""
    expected = ["cuMulticastBindAddr" + ending, "cuMulticastBindMem" + ending]
    program = f"sys.path.insert(0, {tests!r})\n" + BINDS
    assert in_a_child(program, driver_version=version) == f"{expected} 0"


# -- two processes ----------------------------------------------------------------------------------------------
OTHER = """
thing = MulticastObject.import_(cuda, int(sys.argv[1]), G, 2, added_elsewhere=1)
thing.add_device("cuda:1")
print("added", flush=True)
memory = PhysicalAllocation.create(cuda, G, "cuda:1")
thing.bind(memory)
print("bound", flush=True)
assert sys.stdin.readline() == "written\\n"
reservation = AddressReservation.reserve(cuda, 2 * G)
view = MemoryMapping.map(reservation, 0, memory)
found = bytearray(4)
cuda.copy_out(memoryview(found), view.address)
print(found.decode(), flush=True)
mapping = thing.map(reservation, G)
cuda.copy_in(mapping.address, memoryview(b"back"))
print("written", flush=True)
assert sys.stdin.readline() == "end\\n"
for one in (view, mapping, thing, memory, reservation):
    one.close()
"""


def test_two_processes_write_to_both_memories(driver: Any, close: contextlib.ExitStack) -> None:
    thing = close.enter_context(MulticastObject.create(driver, 2, G))
    thing.add_device("cuda:0")
    memory = close.enter_context(PhysicalAllocation.create(driver, G, "cuda:0"))
    reservation = close.enter_context(AddressReservation.reserve(driver, 2 * G))
    view = close.enter_context(MemoryMapping.map(reservation, 0, memory))
    fd = thing.export()
    child = subprocess.Popen(
        [sys.executable, "-c", IN_A_CHILD + OTHER, str(fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(fd,),
        env={**standin.child_environment(), "VRAM_MULTICAST": "on"},
    )
    deadline = threading.Timer(60, child.kill)
    deadline.start()
    try:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "added\n"
        with pytest.raises(UsageError, match=r"1 of 2 devices"):
            thing.bind(memory)  # the driver knows that the team is whole; this object was not told
        thing.added_elsewhere(1)
        thing.bind(memory)
        assert child.stdout.readline() == "bound\n"
        with thing.map(reservation, G) as mapping:
            driver.copy_in(mapping.address, memoryview(b"here"))
        print("written", file=child.stdin, flush=True)
        assert child.stdout.readline() == "here\n"
        assert child.stdout.readline() == "written\n"
        found = bytearray(4)
        driver.copy_out(memoryview(found), view.address)
        assert found == b"back"
        print("end", file=child.stdin, flush=True)
        assert child.wait(120) == 0
    finally:
        deadline.cancel()
        deadline.join()
        child.kill()
        child.communicate()


# -- failures ---------------------------------------------------------------------------------------------------
def story(driver: Any, close: contextlib.ExitStack) -> None:
    """Everything once, ended by hand."""
    team = Team(driver, close)
    thing = team.object
    thing.bind(team.memory[0])
    thing.bind((team.views[1].address, G), G)
    mapping = close.enter_context(thing.map(team.reservation))
    thing.bind(team.memory[1])
    mapping.set_access(Access.READ_WRITE)
    driver.fill(mapping.address, 1, 8)
    assert team.read() == [b"\1" * 4] * 2
    fd = thing.export()
    with MulticastObject.import_(driver, fd, 2 * G, 2, added_elsewhere=2) as again:
        again.map(team.reservation, 2 * G, locations=BOTH).close()
    mapping.close()
    thing.unbind("cuda:1", 0, G)
    with contextlib.suppress(BusyError):  # only if the unmap failed
        thing.close(strict=True)


def take_back_what_is_stuck() -> int:
    """Undo what the faults kept from being undone, as lifetimes would have; return how many there were."""
    count = 0
    while lifetime._stuck:
        handle = lifetime._stuck.pop(0)
        handle._undo()  # type: ignore[misc]
        handle._state = lifetime._CLOSED
        lifetime._released.extend((other, serial) for serial, other in reversed(handle._depends.items()))
        handle._depends = {}
        lifetime._settle()
        count += 1
    return count


def state(driver: Any) -> object:
    found = {kind: count for kind, count in objects().items() if kind != "pinned"}  # which others may hold
    return found, driver.live(), [handle.label for handle in lifetime.live()], len(os.listdir("/proc/self/fd"))


def played(driver: Any, tell: Callable[..., None]) -> BaseException | None:
    """Tell the story; what cannot be taken back while the fault lasts is said in warnings, and is not an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReleaseWarning)
        try:
            with contextlib.ExitStack() as close:
                tell(driver, close)
        except VramError as error:
            return error.with_traceback(None)
    return None


def calls_of_the_story(driver: Any, control: standin.Standin) -> dict[str, int]:
    control.clear()
    assert played(driver, story) is None
    return {name: count for name, count in control.called().items() if name.startswith(("cuMem", "cuMulticast"))}


def test_the_story_makes_the_calls_that_are_to_fail(driver: Any, control: standin.Standin) -> None:
    before = state(driver)
    calls = calls_of_the_story(driver, control)
    assert {name: calls[name] for name in calls if "Multicast" in name and "Granularity" not in name} == {
        "cuMulticastCreate": 1,
        "cuMulticastAddDevice": 2,
        "cuMulticastBindMem": 2,
        "cuMulticastBindAddr": 1,
        "cuMulticastUnbind": 3,
    }
    assert {"cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemRetainAllocationHandle"} <= set(calls)
    assert {"cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"} <= set(calls)
    assert state(driver) == before


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
def test_a_fault_anywhere_leaves_nothing_i4(driver: Any, control: standin.Standin, forever: bool) -> None:
    played(driver, story)  # whatever is made once in a process
    before = state(driver)
    stuck = 0
    for name, count in calls_of_the_story(driver, control).items():
        for nth in range(1, count + 1):
            with control.failing(name, nth, forever=forever):
                error = played(driver, story)
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
    thing, before = team.object, objects()
    thing.bind(team.memory[0])
    with control.failing("cuMulticastUnbind"), pytest.warns(ReleaseWarning, match=r"could not take back binding of 2"):
        thing.unbind("cuda:0", 0, G)
    assert repr(thing).endswith("1 bound>")
    with pytest.raises(RangeError, match=r"are bound, or could not be unbound"):
        thing.bind(team.memory[0])
    thing.close()
    held = objects()
    assert (held["bindings"], held["multicasts"]) == (1, 1)
    assert take_back_what_is_stuck() == 1
    assert {**before, "multicasts": 0, "handles": before["handles"] - 1} == {**objects(), "multicasts": 0}


def test_a_driver_error_says_the_call(driver: Any, control: standin.Standin) -> None:
    with control.failing("cuMulticastCreate", code=802):
        with pytest.raises(DriverError, match=r"cuMulticastCreate failed: CUDA_ERROR_SYSTEM_NOT_READY"):
            MulticastObject.create(driver, BOTH, G)


# -- handles of CUDA's own ----------------------------------------------------------------------------------------
def test_a_native_handle_is_one_of_cuda(driver: Any, close: contextlib.ExitStack) -> None:
    """What is done with it by hand is for its owner to say."""
    from cuda.bindings import driver as api

    thing = close.enter_context(MulticastObject.create(driver, 2, G))
    with pytest.raises(UsageError, match=r"nobody else can have added devices"):
        thing.added_elsewhere(1)
    native = thing.native_handle
    assert native == thing.native_handle != thing._team.driver_handle
    for device in (0, 1):
        assert int(api.cuMulticastAddDevice(native, device)[0]) == 0
    thing.added_elsewhere(2)
    where = close.enter_context(AddressReservation.reserve(driver, G))
    with thing.map(where, locations=BOTH) as mapping:
        assert mapping.access is Access.READ_WRITE
    thing.close()
    with pytest.raises(ClosedError):
        thing.native_handle


def test_the_rights_to_a_mapping_are_asked_of_the_driver(team: Team) -> None:
    with team.object.map(team.reservation, locations=["cuda:1"]) as mapping:
        assert mapping.get_access() is Access.NONE, "of the first device that was added"
        assert mapping.get_access("cuda:1") is mapping.get_access(Location("cuda", 1)) is Access.READ_WRITE
        with pytest.raises(UsageError, match=r"no cuda:2 among"):
            mapping.get_access("cuda:2")
    with pytest.raises(ClosedError):
        mapping.get_access()
