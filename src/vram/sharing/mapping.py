"""From a region to a descriptor and its file descriptors, and back to a region in another process."""

from __future__ import annotations

from collections.abc import Sequence

from .. import driver as drivers
from ..driver import visible
from ..errors import ProtocolError, UnsupportedError, UsageError
from ..lifetime import Handle
from ..memory import PhysicalAllocation, Received, Region
from ..open_files import is_guarded, is_memory, is_read_only
from ..spec import HOST, Access, Location
from .descriptor import FD, MAX_SEGMENTS, MemoryDescriptor, SegmentEntry

ACCESS = {"r": Access.READ, "rw": Access.READ_WRITE, "cow": Access.READ_WRITE}


def device_name(location: Location) -> str:
    """Return what a device is called on the wire: ``"host"`` or its UUID, never an ordinal (S1)."""
    if location == HOST:
        return "host"
    try:
        return drivers.get(location).device_info(location).uuid
    except UsageError:
        raise UnsupportedError(
            f"sharing memory on {location}", "memory of a GPU, or of the host driver",
            "memory of the host that NVIDIA's driver made", 'Use device="host" for what is shared',
        ) from None  # fmt: skip


def describe(region: Region, start: int, stop: int) -> tuple[MemoryDescriptor, list[int]]:
    """Describe the bytes from `start` to `stop` of a region; return a descriptor for each allocation too, lent by it.
    Raises UsageError if the memory cannot leave this process, or has too many segments."""
    descriptor, allocations = describe_held(region, start, stop)
    return descriptor, [allocation.export() for allocation in allocations]


def describe_held(region: Region, start: int, stop: int) -> tuple[MemoryDescriptor, tuple[PhysicalAllocation, ...]]:
    """Describe the bytes from `start` to `stop` of a region, and return its allocations, each with a claim of its own.
    The file descriptors stay the allocations' to lend; see :func:`describe`."""
    allocations, offset = region.segments(start, stop)
    return describe_allocations(region, allocations, offset, stop - start), allocations


def describe_allocations(
    region: Region, allocations: Sequence[PhysicalAllocation], offset: int, nbytes: int
) -> MemoryDescriptor:
    """Describe `nbytes` bytes of a region that begin at an offset of the first of the allocations that hold them."""
    if len(allocations) > MAX_SEGMENTS:
        raise UsageError(
            f"{len(allocations)} segments hold these {nbytes} bytes; at most {MAX_SEGMENTS} travel together. "
            f"Create the array with a larger chunk="
        )
    segments = [SegmentEntry(one.nbytes, FD) for one in allocations]
    return MemoryDescriptor(device_name(region.location), tuple(segments), offset, nbytes, region.capacity)


def map_memory(
    memory: MemoryDescriptor, fds: Sequence[int], *, access: str, depends: Sequence[Handle] = (), growing: bool = False,
    user: Location | None = None, sealed: bool = False, until: float | None = None, updatable: bool = False,
) -> Region:  # fmt: skip
    """Map a checked description over lent descriptors; `growing` reserves the owner's whole capacity, for growth in
    place. `sealed` memory of the host must really be so (`updatable`: against new writable mappings), or ProtocolError.
    `until` (``time.monotonic``) bounds the wait for a pending seal."""
    location = HOST if memory.device == "host" else location_of(memory.device)
    received = receive(memory.segments, fds, until, sealed=sealed and location == HOST, updatable=updatable)
    total = sum([one.nbytes for one in received])
    capacity, private = memory.capacity if growing else total, access == "cow"
    users = () if user is None or location == HOST else (user,)
    try:
        return Region.from_checked(
            drivers.get(location), location, received, total, capacity, ACCESS[access], private, tuple(depends), users,
            managed=True,
        )  # fmt: skip
    except UsageError as error:
        raise not_memory(error) from None


def receive(
    segments: Sequence[SegmentEntry], fds: Sequence[int], until: float | None, *, sealed: bool = False,
    updatable: bool = False,
) -> list[Received]:  # fmt: skip
    """Put each segment together with its descriptor; see :func:`map_memory`."""
    if len(segments) != len(fds):
        raise ProtocolError(f"{len(fds)} file descriptors came for {len(segments)} segments")
    for segment in segments:
        if segment.kind != FD:
            raise ProtocolError(f"a segment of handle kind {segment.kind} came as a file descriptor")
    for fd in fds if sealed else ():
        # A seal that is missing is not set here, though any receiver could: F_ADD_SEALS waits for whoever
        # writes to the memory, who may do so from a page that never comes, and nothing ends that wait.
        if is_read_only(fd) or not is_memory(fd):  # what is none, the driver refuses
            continue
        if not (updatable and is_guarded(fd)):
            raise _not_sealed()
    return [Received(fd, segment.nbytes, until=until) for segment, fd in zip(segments, fds, strict=True)]


def extend_memory(
    region: Region, segments: Sequence[SegmentEntry], fds: Sequence[int], *, until: float | None = None
) -> None:
    """Map what a followed memory has grown by, behind the same address. `fds` are lent; `until` as in map_memory."""
    more = receive(segments, fds, until)
    try:
        region.extend(more, region.mapped + sum(one.nbytes for one in more))
    except UsageError as error:
        raise not_memory(error) from None


def _not_sealed() -> ProtocolError:
    return ProtocolError(
        "memory that is said to be read-only can still be written by others, its publisher for one: it is not sealed "
        "with F_SEAL_WRITE. Have it published or lent by vram itself, or with writable=True"
    )


def not_memory(error: UsageError) -> ProtocolError:
    """Return the error for a mistake in numbers that the peer chose (S7)."""
    return ProtocolError(f"memory that another process described cannot be mapped: {error}")


def location_of(device: str) -> Location:
    """The place that a peer named. An ordinal would be the peer's own, so it is refused (S1)."""
    if device == "host":
        return HOST
    if device.startswith("GPU-"):
        try:
            named = Location.parse(f"cuda:{device}")
        except UsageError:
            pass
        else:
            return visible(named)
    raise ProtocolError(f"memory on a device called {device[:64]!r}, which is neither host nor a UUID")
