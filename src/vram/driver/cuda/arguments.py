"""Arguments that NVIDIA's driver would refuse without saying why."""

from __future__ import annotations

from ...errors import AlignmentError, UnsupportedError
from ...spec import HandleKind, round_up

__all__ = ["check_kinds", "check_size"]

_SHAREABLE = HandleKind.POSIX_FD | HandleKind.FABRIC


def check_kinds(call: str, kinds: HandleKind) -> None:
    """Refuse handle kinds that memory made here can never have."""
    if kinds & (HandleKind.WIN32 | HandleKind.WIN32_KMT):
        raise UnsupportedError(
            f"{call}: handle kind {kinds.name}", "Windows", "Linux, where memory is shared by file descriptors",
            "Ask for HandleKind.POSIX_FD",
        )  # fmt: skip
    if kinds & ~_SHAREABLE:
        raise UnsupportedError(
            f"{call}: handle kind {kinds.name}", "memory made by another API (cudaMalloc or a pool)",
            "memory made with cuMemCreate", "Ask for HandleKind.POSIX_FD",
        )  # fmt: skip


def check_size(call: str, nbytes: int, granularity: int) -> None:
    """Refuse a size that is not a positive multiple of the granularity, naming the next one that is."""
    if nbytes <= 0 or nbytes % granularity:
        raise AlignmentError(
            f"{call}: {nbytes} bytes is not a positive multiple of the granularity, {granularity}; "
            f"the next is {max(round_up(nbytes, granularity), granularity)}"
        )
