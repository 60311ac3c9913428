"""Arguments that NVIDIA's driver would refuse without saying why."""

from __future__ import annotations

from ...errors import UnsupportedError
from ...spec import HandleKind

__all__ = ["check_kinds"]

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
