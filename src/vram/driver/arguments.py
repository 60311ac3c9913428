"""What the host driver says about arguments before it does anything."""

from __future__ import annotations

from ..errors import AlignmentError, UnsupportedError, UsageError
from ..spec import HOST, Access, HandleKind, Location, round_up

__all__ = ["GRANULARITY", "check_access", "check_kinds", "check_location", "check_size"]

GRANULARITY = 2 << 20  # the GPUs' own; the host could do with 4 KiB


def check_location(location: Location) -> None:
    """Raise UsageError for a place that is not the host."""
    if location is not HOST and location != HOST:
        raise UsageError(f'the host driver serves the location "host" only, not "{location}"')


def check_kinds(kinds: HandleKind) -> None:
    """Raise UnsupportedError for a way out of the process that host memory does not know."""
    if int(kinds) not in (HandleKind.NONE, HandleKind.POSIX_FD):
        raise UnsupportedError(
            "host memory that leaves the process in that way", f"a driver for {kinds!r}", "POSIX_FD on the host"
        )


def check_size(call: str, nbytes: int) -> None:
    """Raise AlignmentError for bytes that are no positive multiple of the granularity."""
    if nbytes <= 0 or nbytes % GRANULARITY:
        raise AlignmentError(
            f"{call}: {nbytes} bytes is not a positive multiple of the granularity, {GRANULARITY}; "
            f"the next is {max(round_up(nbytes, GRANULARITY), GRANULARITY)}"
        )


def check_access(call: str, access: Access) -> None:
    """Raise UsageError for what is no access right."""
    if not isinstance(access, Access):
        raise UsageError(f"{call}: access {access!r} is not NONE (0), READ (1) or READ_WRITE (3)")
