"""Checks of arguments, made by every driver before it acts: one error for the same mistake (invariant I10)."""

from __future__ import annotations

from ..errors import AlignmentError, RangeError, UnsupportedError, UsageError
from ..spec import HOST, Access, AllocationFlags, HandleKind, Location, round_up

GRANULARITY = 2 << 20  # the GPUs' own; the host could do with 4 KiB


def check_location(location: Location) -> None:
    """Of the host driver: raise UsageError for a place that is not the host."""
    if location is not HOST and location != HOST:
        raise UsageError(f'the host driver serves the location "host" only, not "{location}"')


def check_kinds(location: Location, kinds: HandleKind) -> None:
    """Of the host driver: raise UsageError for a place that is not the host, and UnsupportedError for a way out of the
    process that its memory does not know."""
    if location is not HOST:
        check_location(location)
    if kinds != HandleKind.POSIX_FD and kinds != HandleKind.NONE:
        raise UnsupportedError(
            "host memory that leaves the process in that way", f"a driver for {kinds!r}", "POSIX_FD on the host"
        )


def check_flags(flags: AllocationFlags) -> None:
    """Of the host driver: raise UnsupportedError for what only memory of a GPU can be meant for."""
    if flags:
        raise UnsupportedError(
            f"host memory with {flags!r}", "memory of a GPU", "the host driver, whose memory takes no flags",
            'Leave flags out, or make it on a GPU, such as "cuda:0"',
        )  # fmt: skip


def check_size(call: str, nbytes: int, granularity: int = GRANULARITY) -> None:
    """Raise AlignmentError for bytes that are no positive multiple of the granularity."""
    if nbytes <= 0 or nbytes % granularity:
        below, above = nbytes - nbytes % granularity, max(round_up(nbytes, granularity), granularity)
        raise AlignmentError(
            f"{call}: nbytes {nbytes} is not a positive multiple of the granularity, {granularity}; nearest: "
            + (f"{below} or {above}" if below > 0 else f"{above}")
        )


def check_alignment(call: str, alignment: int, granularity: int = GRANULARITY) -> None:
    """Raise AlignmentError for what addresses cannot be aligned to; 0 means the granularity."""
    if alignment and (alignment < granularity or alignment & (alignment - 1)):
        raise AlignmentError(f"{call}: alignment {alignment} is not a power of two of at least {granularity}")


def check_address(call: str, address: int, granularity: int = GRANULARITY, what: str = "the granularity, ") -> None:
    """Raise AlignmentError for an address that is no multiple of the granularity, naming the next one that is."""
    if address < 0 or address % granularity:
        raise AlignmentError(
            f"{call}: address {address:#x} is not a multiple of {what}{granularity}; "
            f"the next is {round_up(max(address, 0), granularity):#x}"
        )


def not_exported(call: str, kind: HandleKind, kinds: HandleKind, remedy: str = "") -> UsageError:
    """Return the error for memory that was not created to leave the process in a way, with one that there is."""
    if kind == HandleKind.FABRIC and kind in kinds:
        remedy = "By the fabric it leaves as 64 bytes, not by a descriptor: export_fabric()"
    elif not remedy:
        remedy = "Export it as POSIX_FD, which is asked for at creation: handle_kinds=HandleKind.POSIX_FD"
    return UsageError(f"{call}: it cannot leave the process as {kind.name}: it was created for {kinds.name}. {remedy}")


def check_apart(destination: int, source: int, nbytes: int) -> None:
    """Raise RangeError for a copy between ranges that overlap."""
    if source < destination + nbytes and destination < source + nbytes:
        raise RangeError(f"copy of {nbytes} bytes from {source:#x} to {destination:#x}: the ranges overlap")


def check_byte(value: int) -> None:
    """Raise UsageError for what fills no byte."""
    if not 0 <= value <= 255:
        raise UsageError(f"fill: value {value} is not a byte, 0 to 255")


def check_access(call: str, access: Access) -> None:
    """Raise UsageError for what is no access right."""
    if not isinstance(access, Access):
        raise UsageError(f"{call}: access must be Access.NONE, READ or READ_WRITE, not {access!r}")
