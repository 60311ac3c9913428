"""Memory with owners against an independent model: any order of making, mapping, growing, sharing and letting go.

The model knows nothing of handles or counts. It holds plain dictionaries of bytes and works out from them what must
still exist: an allocation lives while its object or a mapping of it does, a reservation while its object or a mapping
in it does, a region's chunks while the region or one of its pins does. After every step the driver's books, the number
of counted handles, the sizes and the contents must agree with it.
"""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.samples import rounds

from vram import lifetime
from vram.driver.host import HostDriver
from vram.errors import AccessDeniedError, BusyError, CapacityError, LeakWarning, RangeError, UsageError, VramError
from vram.memory import AddressReservation, MemoryMapping, PhysicalAllocation, Received, Region
from vram.spec import HOST, Access

G = 2 << 20
PAGE = 4096
MOST = 8  # granules that a region or reservation can have
RW, READ = Access.READ_WRITE, Access.READ

# Any size, and more often those beside a seam, where a comparison can be off by one.
seams = st.builds(
    lambda granules, beside: max(granules * G + beside, 0), st.integers(0, MOST), st.sampled_from([-1, 0, 1])
)
sizes = st.one_of(seams, st.integers(0, MOST * G + 1))


@dataclass(eq=False)
class Bytes:
    """Physical memory: what was written to it (all else is 0), and whether that is over."""

    written: dict[int, int] = field(default_factory=dict)
    sealed: bool = False


@dataclass(eq=False)
class Allocation:
    """A way to physical memory: made or imported. `facade` is None once it was closed."""

    facade: PhysicalAllocation | None
    nbytes: int
    memory: Bytes
    exported: bool = False


@dataclass(eq=False)
class Reservation:
    facade: AddressReservation | None
    granules: int


@dataclass(eq=False)
class Mapped:
    """An allocation at some address, in a reservation or a region."""

    start: int  # bytes
    allocation: Allocation
    access: Access
    pages: dict[int, dict[int, int]] | None = None  # of a private mapping: the pages that were copied on write

    @property
    def stop(self) -> int:
        return self.start + self.allocation.nbytes

    def look(self, offset: int) -> int:
        return (self.pages or {}).get(offset // PAGE, self.allocation.memory.written).get(offset, 0)

    def write(self, offset: int, value: int) -> None:
        shared = self.allocation.memory.written
        if self.pages is None:
            shared[offset] = value
        else:
            page = offset // PAGE
            self.pages.setdefault(page, {at: v for at, v in shared.items() if at // PAGE == page})[offset] = value


@dataclass(eq=False)
class Mapping:
    facade: MemoryMapping | None
    reservation: Reservation
    mapped: Mapped
    address: int


@dataclass(eq=False)
class Area:
    """A region. `facade` is None once it was closed; its chunks live on with its pins."""

    facade: Region | None
    address: int
    capacity: int
    chunk: int  # 0: what was asked for
    nbytes: int = 0
    access: Access = RW
    chunks: list[Mapped] = field(default_factory=list)
    pins: list[tuple[Any, int]] = field(default_factory=list)
    imported: bool = False
    private: bool = False
    frozen: bool = False

    @property
    def alive(self) -> bool:
        return self.facade is not None or bool(self.pins)

    @property
    def mapped(self) -> int:
        return self.chunks[-1].stop if self.chunks else 0


@pytest.fixture(autouse=True)
def nothing_of_other_tests() -> None:
    """What others left in cycles goes now, not in the middle of counting."""
    gc.collect()


class MemoryMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.driver = HostDriver()
        self.before = len(lifetime.live())
        self.allocations: list[Allocation] = []
        self.reservations: list[Reservation] = []
        self.mappings: list[Mapping] = []
        self.regions: list[Area] = []

    # -- what the model works out -------------------------------------------------------------------------------
    def living_mapped(self) -> list[Mapped]:
        return [m.mapped for m in self.mappings] + [c for area in self.regions if area.alive for c in area.chunks]

    def living_allocations(self) -> list[Allocation]:
        mapped = [m.allocation for m in self.living_mapped()]
        return [a for a in self.allocations if a.facade is not None or a in mapped]

    def living_reservations(self) -> list[Reservation]:
        used = [m.reservation for m in self.mappings]
        return [r for r in self.reservations if r.facade is not None or r in used]

    @invariant()
    def books_agree(self) -> None:
        allocations, mapped = self.living_allocations(), self.living_mapped()
        areas = [area for area in self.regions if area.alive]
        live = self.driver.live()
        reservations = self.living_reservations()
        assert live.reservations == len(reservations) + len(areas)
        # The driver's handles, each with one counted handle. Memory that was mapped in the call that made it has none
        # until somebody wants it.
        held = sum(handle.label.startswith("allocation of") for handle in lifetime.live())
        assert live.handles == held <= len(allocations)
        assert live.mappings == len(mapped)
        assert live.nbytes == sum(a.nbytes for a in allocations)
        handles = len(reservations) + 2 * len(areas) + held + len(mapped)
        handles += sum(a.exported for a in allocations)
        assert len(lifetime.live()) - self.before == handles
        assert not lifetime.stuck()

    @invariant()
    def sizes_agree(self) -> None:
        for area in self.regions:
            if area.facade is not None:
                region = area.facade
                assert (region.nbytes, region.capacity, region.address) == (area.nbytes, area.capacity, area.address)
                assert region.chunks == tuple(c.allocation.nbytes for c in area.chunks)
                assert region.mapped == area.mapped
                assert region.access is area.access
                assert len(region.pinned_by()) == len(area.pins)

    @invariant()
    def contents_agree(self) -> None:
        places = [(m.address, m.mapped) for m in self.mappings]
        places += [(a.address + c.start, c) for a in self.regions if a.alive for c in a.chunks]
        for address, mapped in places:
            assert self.driver.mem_get_access(address, HOST) == mapped.access
            if mapped.access is Access.NONE:
                continue
            offsets = {
                0,
                mapped.allocation.nbytes - 1,
                *mapped.allocation.memory.written,
                *(at for page in (mapped.pages or {}).values() for at in page),
            }
            for offset in offsets:
                found = bytearray(1)
                self.driver.copy_out(memoryview(found), address + offset)
                assert found[0] == mapped.look(offset), (hex(address), offset)

    # -- helpers ------------------------------------------------------------------------------------------------
    def one(self, data: st.DataObject, things: list[Any]) -> Any:
        return data.draw(st.sampled_from(things)) if things else None

    def expect(self, error: type[VramError] | None, call: Any, *args: Any, **options: Any) -> Any:
        """Call; `error` is what the model says must be raised."""
        if error is None:
            return call(*args, **options)
        try:
            call(*args, **options)
        except error:
            return None
        raise AssertionError(f"{call.__qualname__}{args} did not raise {error.__name__}")

    def seal_model(self, memory: Bytes) -> None:
        memory.sealed = True
        for mapped in self.living_mapped():
            if mapped.allocation.memory is memory and mapped.pages is None:
                mapped.access = min(mapped.access, READ)

    def put(self, address: int, mapped: Mapped, offset: int, value: int) -> None:
        self.expect(
            None if mapped.access is RW else UsageError,
            self.driver.copy_in,
            address + offset,
            memoryview(bytes([value])),
        )
        if mapped.access is RW:
            mapped.write(offset, value)

    # -- allocations, reservations, mappings --------------------------------------------------------------------
    @rule(granules=st.integers(1, 3))
    def create(self, granules: int) -> None:
        facade = PhysicalAllocation.create(self.driver, granules * G, HOST)
        self.allocations.append(Allocation(facade, granules * G, Bytes()))

    @precondition(lambda self: any(a.facade for a in self.allocations))
    @rule(data=st.data(), less=st.booleans())
    def import_(self, data: st.DataObject, less: bool) -> None:
        source = self.one(data, [a for a in self.allocations if a.facade])
        source.exported = True
        nbytes = max(G, source.nbytes - less * G)
        facade = PhysicalAllocation.import_(self.driver, source.facade.export(), nbytes)
        self.allocations.append(Allocation(facade, nbytes, source.memory))

    @rule(granules=st.integers(1, MOST))
    def reserve(self, granules: int) -> None:
        self.reservations.append(Reservation(AddressReservation.reserve(self.driver, granules * G), granules))

    @precondition(lambda self: any(a.facade for a in self.allocations) and any(r.facade for r in self.reservations))
    @rule(data=st.data(), at=st.integers(0, MOST), access=st.sampled_from(list(Access)), private=st.booleans())
    def map(self, data: st.DataObject, at: int, access: Access, private: bool) -> None:
        allocation = self.one(data, [a for a in self.allocations if a.facade])
        reservation = self.one(data, [r for r in self.reservations if r.facade])
        at %= reservation.granules  # often it fits
        start, stop = at * G, at * G + allocation.nbytes
        taken = [m.mapped for m in self.mappings if m.reservation is reservation]
        if stop > reservation.granules * G or any(m.start < stop and start < m.stop for m in taken):
            error: type[VramError] | None = RangeError
        elif allocation.memory.sealed and access is RW and not private:
            error = AccessDeniedError
        else:
            error = None
        facade = self.expect(
            error, MemoryMapping.map, reservation.facade, start, allocation.facade, access=access, private=private
        )
        if facade is not None:
            mapped = Mapped(start, allocation, access, {} if private else None)
            self.mappings.append(Mapping(facade, reservation, mapped, facade.address))

    @precondition(lambda self: self.mappings)
    @rule(data=st.data(), offset=st.integers(0, G - 1), value=st.integers(1, 255))
    def write(self, data: st.DataObject, offset: int, value: int) -> None:
        mapping = self.one(data, self.mappings)
        self.put(mapping.address, mapping.mapped, offset, value)

    @precondition(lambda self: self.mappings)
    @rule(data=st.data(), access=st.sampled_from(list(Access)))
    def set_access(self, data: st.DataObject, access: Access) -> None:
        mapping = self.one(data, self.mappings)
        mapped = mapping.mapped
        denied = access is RW and mapped.allocation.memory.sealed and mapped.pages is None
        self.expect(AccessDeniedError if denied else None, mapping.facade.set_access, access)
        if not denied:
            mapped.access = access

    @precondition(lambda self: any(a.facade for a in self.allocations))
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        allocation = self.one(data, [a for a in self.allocations if a.facade])
        allocation.facade.seal()
        self.seal_model(allocation.memory)

    @rule(data=st.data(), how=st.sampled_from(["close", "strict", "forget", "cycle"]))
    def end(self, data: st.DataObject, how: str) -> None:
        """Let go of anything, in any of the ways there are."""
        holders: list[Any] = [a for a in self.allocations if a.facade]
        holders += [r for r in self.reservations if r.facade]
        holders += [*self.mappings, *(a for a in self.regions if a.facade)]
        holder = self.one(data, holders)
        if holder is None:
            return
        if how == "strict":
            if isinstance(holder, Allocation):
                busy = any(m.allocation is holder for m in self.living_mapped())
            elif isinstance(holder, Reservation):
                busy = any(m.reservation is holder for m in self.mappings)
            else:
                busy = isinstance(holder, Area) and bool(holder.pins)
            self.expect(BusyError if busy else None, holder.facade.close, strict=True)
            if busy:
                return
        elif how == "close":
            holder.facade.close()
        self.let_go(holder, warns=how in ("forget", "cycle"), cycle=how == "cycle")

    def let_go(self, holder: Any, *, warns: bool, cycle: bool) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if cycle:
                gc.disable()  # a collection that begins by itself here would make the loop too old for the one below
                loop: list[object] = [holder.facade]
                loop.append(loop)
                del loop
            holder.facade = None
            if isinstance(holder, Mapping):
                self.mappings.remove(holder)
            if cycle:
                gc.collect(0)
                gc.enable()
        assert [w.category for w in caught] == [LeakWarning] * warns

    # -- regions ------------------------------------------------------------------------------------------------
    @rule(capacity=sizes, nbytes=sizes, chunk=st.sampled_from([0, 0, G, 2 * G]))
    def region(self, capacity: int, nbytes: int, chunk: int) -> None:
        ceiling = max(-(-capacity // G) * G, G)
        error = CapacityError if nbytes > ceiling else None
        facade = self.expect(
            error, Region.create, HOST, driver=self.driver, capacity=capacity, nbytes=nbytes, chunk=chunk or None
        )
        if facade is not None:
            area = Area(facade, facade.address, ceiling, chunk)
            self.grow_model(area, nbytes)
            self.regions.append(area)

    def grow_model(self, area: Area, nbytes: int) -> None:
        while area.mapped < nbytes:
            size = area.chunk or -(-(nbytes - area.mapped) // G) * G
            size = min(size, area.capacity - area.mapped)
            allocation = Allocation(None, size, Bytes())
            self.allocations.append(allocation)
            area.chunks.append(Mapped(area.mapped, allocation, RW))
        area.nbytes = nbytes

    def pick(self, data: st.DataObject) -> Area:
        return self.one(data, [a for a in self.regions if a.facade])  # type: ignore[no-any-return]

    @precondition(lambda self: any(a.facade for a in self.regions))
    @rule(data=st.data(), nbytes=sizes, verb=st.sampled_from(["grow", "shrink", "resize"]))
    def change(self, data: st.DataObject, nbytes: int, verb: str) -> None:
        area = self.pick(data)
        if verb == "grow":
            nbytes = max(nbytes, area.nbytes)
        elif verb == "shrink":
            nbytes = min(nbytes, area.nbytes)
        error: type[VramError] | None = None
        if nbytes > area.nbytes:
            last_sealed = bool(area.chunks) and area.chunks[-1].allocation.memory.sealed
            if area.imported or (nbytes <= area.capacity and (area.frozen or last_sealed)):
                error = UsageError
            elif nbytes > area.capacity:
                error = CapacityError
        elif any(stop > nbytes for _, stop in area.pins):
            error = BusyError if nbytes < area.nbytes else None
        self.expect(error, getattr(area.facade, verb), nbytes)
        if error is None and nbytes >= area.nbytes:
            self.grow_model(area, nbytes)
        elif error is None:
            area.nbytes = nbytes
            area.chunks = [c for c in area.chunks if c.start < nbytes]

    @precondition(lambda self: any(a.facade for a in self.regions))
    @rule(data=st.data(), full=st.booleans())
    def pin(self, data: st.DataObject, full: bool) -> None:
        area = self.pick(data)
        assert area.facade is not None
        limit = area.capacity if full else area.nbytes
        start = data.draw(st.integers(0, limit))
        stop = data.draw(st.integers(start, limit))
        self.expect(RangeError, area.facade.pin, start, limit + 1, full=full)
        area.pins.append((area.facade.pin(start, stop, "the machine", full=full), stop))

    @precondition(lambda self: any(a.pins for a in self.regions))
    @rule(data=st.data())
    def pin_again(self, data: st.DataObject) -> None:
        """A pin of a pin, also of a region whose object was closed."""
        area = self.one(data, [a for a in self.regions if a.pins])
        pin, last = area.pins[data.draw(st.integers(0, len(area.pins) - 1))]  # Hypothesis keeps what is drawn
        start = data.draw(st.integers(pin.start, last))
        stop = data.draw(st.integers(start, last))
        self.expect(RangeError, pin.subpin, start, last + 1)
        area.pins.append((pin.subpin(start, stop, "again"), stop))

    @precondition(lambda self: any(a.pins for a in self.regions))
    @rule(data=st.data(), how=st.sampled_from(["release", "forget", "cycle"]))
    def unpin(self, data: st.DataObject, how: str) -> None:
        area = self.one(data, [a for a in self.regions if a.pins])
        pin, _ = area.pins.pop(data.draw(st.integers(0, len(area.pins) - 1)))
        if how == "release":
            pin.release()
        elif how == "cycle":
            loop: list[object] = [pin]
            loop.append(loop)
            del loop, pin
            gc.collect(0)

    @precondition(lambda self: any(a.alive and a.chunks for a in self.regions))
    @rule(data=st.data(), value=st.integers(1, 255))
    def write_region(self, data: st.DataObject, value: int) -> None:
        area = self.one(data, [a for a in self.regions if a.alive and a.chunks])
        chunk = self.one(data, area.chunks)
        offset = data.draw(st.integers(0, chunk.allocation.nbytes - 1))
        self.put(area.address + chunk.start, chunk, offset, value)

    @precondition(lambda self: any(a.facade and a.chunks for a in self.regions))
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        area = self.pick(data)
        assert area.facade is not None
        self.expect(UsageError if area.private else None, area.facade.freeze)
        if not area.private:
            area.frozen, area.access = True, min(area.access, READ)
            for chunk in area.chunks:
                self.seal_model(chunk.allocation.memory)
            assert area.facade.is_frozen

    @precondition(lambda self: any(a.facade for a in self.regions))
    @rule(data=st.data(), access=st.sampled_from([READ, RW]), private=st.booleans(), room=st.integers(0, 2))
    def import_region(self, data: st.DataObject, access: Access, private: bool, room: int) -> None:
        """What another process makes of a part of a region: its descriptors, imported and mapped."""
        source, opened = self.pick(data), data.draw(st.booleans())
        assert source.facade is not None
        start = data.draw(st.integers(0, source.nbytes))
        stop = data.draw(st.integers(start, source.nbytes))
        if source.private:
            self.expect(UsageError, source.facade.segments, start, stop)
            return
        segments, offset = source.facade.segments(start, stop)
        chunks = [c for c in source.chunks if c.start < stop and start < c.stop] if start < stop else []
        assert [s.nbytes for s in segments] == [c.allocation.nbytes for c in chunks]
        assert offset == (start - chunks[0].start if chunks else 0)
        capacity = sum(s.nbytes for s in segments) + room * G
        given, arrived = [], []
        for segment, chunk in zip(segments, chunks, strict=True):
            chunk.allocation.exported = True
            sent: Any = Received(segment.export(), segment.nbytes)
            facade = PhysicalAllocation.import_(self.driver, sent.fd, sent.nbytes) if opened else None
            given.append(Allocation(facade, segment.nbytes, chunk.allocation.memory))
            arrived.append(facade if opened else sent)
        denied = access is RW and not private and any(c.allocation.memory.sealed for c in chunks)
        facade = self.expect(
            AccessDeniedError if denied else None,
            Region.from_allocations,
            self.driver,
            arrived,
            nbytes=offset + stop - start,
            capacity=capacity,
            access=access,
            private=private,
        )
        for allocation in given:
            if allocation.facade is not None:
                allocation.facade.close()
                allocation.facade = None
        if facade is not None:
            area = Area(facade, facade.address, max(capacity, G), 0, access=access, imported=True, private=private)
            self.extend_model(area, given, offset + stop - start)
            self.regions.append(area)

    def extend_model(self, area: Area, given: list[Allocation], nbytes: int) -> None:
        for allocation in given:
            if allocation not in self.allocations:
                self.allocations.append(allocation)
            area.chunks.append(Mapped(area.mapped, allocation, area.access, {} if area.private else None))
        area.nbytes = nbytes

    @precondition(lambda self: any(a.facade and a.imported for a in self.regions))
    @precondition(lambda self: any(a.facade for a in self.allocations))
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        area = self.one(data, [a for a in self.regions if a.facade and a.imported])
        allocation = self.one(data, [a for a in self.allocations if a.facade])
        total = area.mapped + allocation.nbytes
        nbytes = data.draw(st.integers(area.nbytes, total))
        error: type[VramError] | None = None
        if total > area.capacity:
            error = CapacityError
        elif area.access is RW and not area.private and allocation.memory.sealed:
            error = AccessDeniedError
        self.expect(error, area.facade.extend, [allocation.facade], nbytes)
        if error is None:
            self.extend_model(area, [allocation], nbytes)

    def teardown(self) -> None:
        for area in self.regions:
            if area.facade is not None:
                area.facade.close()
                area.facade = None
            for pin, _ in area.pins:
                pin.release()
            area.pins = []
        for thing in [*self.mappings, *self.allocations, *self.reservations]:
            if thing.facade is not None:
                thing.facade.close()
        self.mappings = []
        for holder in [*self.allocations, *self.reservations]:
            holder.facade = None
        self.books_agree()
        assert self.driver.live() == HostDriver().live()


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(
    max_examples=rounds(400, 120),
    stateful_step_count=40,
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
