"""Frozen values that every room speaks: places, rights, kinds of handles, sizes, and seconds to wait."""

from __future__ import annotations

import enum
import numbers
import operator
import re
from dataclasses import dataclass
from typing import Any, cast

from .errors import UsageError

__all__ = [
    "Access",
    "AllocationFlags",
    "AllocationSpec",
    "HandleKind",
    "Location",
    "check_timeout",
    "format_count",
    "format_size",
    "parse_size",
    "printable",
    "round_up",
]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)
_ELSEWHERE = re.compile(r"(cpu|ram|host|cuda|gpu)(?::?(\d{1,4}))?", re.IGNORECASE)
_DEVICE = re.compile(r"cuda:(\d{1,4}|GPU-[0-9a-fA-F-]{36}|host|numa(?::\d{1,4})?)", re.ASCII)


class Access(enum.IntEnum):
    """Rights of a location to a mapping; the values are the CUDA driver's."""

    NONE = 0
    READ = 1
    READ_WRITE = 3

    @property
    def letters(self) -> str:
        """The right as people write it: ``-``, ``r`` or ``rw``."""
        return {0: "-", 1: "r", 3: "rw"}[int(self)]


class HandleKind(enum.IntFlag):
    """How an allocation can cross to another process; a mask where several are asked for.

    The first four values are ``CUmemAllocationHandleType``; the last two are routes of ours for memory that was not
    made with that API.
    """

    NONE = 0
    POSIX_FD = 1
    WIN32 = 2
    WIN32_KMT = 4
    FABRIC = 8
    LEGACY_IPC = 1 << 16
    POOL = 1 << 17


class AllocationFlags(enum.IntFlag):
    """Uses of memory of a GPU, chosen when it is made; a mask where there are several.

    The values are the bytes of ``CUmemAllocationProp::allocFlags`` (CUDA Driver API, "Data types used by CUDA driver",
    ``CUmemAllocationProp``): the type of compression, whether it is for GPUDirect RDMA, and the usage mask.

    Attributes
    ----------
    COMPRESSIBLE
        The GPU may keep it compressed. The driver may decline without an error: what was granted is among the
        properties of the memory. It may not be mappable on every GPU.
    GPU_DIRECT_RDMA
        Other devices, such as network cards, will read and write it on their own.
    TILE_POOL
        It backs sparse CUDA arrays, and nothing else.
    HW_DECOMPRESS
        The hardware's decompression works on it (CUDA 12.8 on).
    """

    NONE = 0
    COMPRESSIBLE = 1
    GPU_DIRECT_RDMA = 1 << 8
    TILE_POOL = 1 << 16
    HW_DECOMPRESS = 1 << 17


@dataclass(frozen=True, slots=True)
class Location:
    """A place where memory can live.

    Parameters
    ----------
    kind : {"host", "cuda"}
        The kind of place, which also names the driver that serves it.
    id : int or str
        The ordinal of a device in this process, or its UUID as ``"GPU-..."``; always 0 for the host. For ``cuda``
        also ``"host"``, ``"numa"`` and ``"numa:<node>"``.
    """

    kind: str
    id: int | str = 0

    @classmethod
    def parse(cls, text: str | Location) -> Location:
        """Read ``"host"``, ``"cuda:0"`` or ``"cuda:GPU-<uuid>"``.

        Also ``"cuda:numa:0"``, ``"cuda:numa"`` and ``"cuda:host"``: memory of the host that NVIDIA's driver makes, on
        one NUMA node, on the calling thread's, or anywhere.

        Raises
        ------
        UsageError
            For anything else.
        """
        if isinstance(text, Location):
            return text
        if isinstance(text, str) and text == "host":  # a numpy array compares in its own way
            return HOST
        match = _DEVICE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise UsageError(
                f'device {text!r:.80} is not one of "host", "cuda:0", "cuda:GPU-<uuid>"{_meant(str(text)[:80])}'
            )
        return cls("cuda", int(match[1]) if match[1].isdigit() else match[1])

    def __str__(self) -> str:
        return self.kind if self.kind == "host" else f"{self.kind}:{self.id}"


HOST = Location("host")


def _meant(text: str) -> str:
    """Return a hint for what other libraries call a device; empty where there is none."""
    match = _ELSEWHERE.fullmatch(text.strip())
    if match is None:
        return ""
    kind, number = match[1].lower(), match[2] or "0"
    meant = "host" if kind in ("cpu", "ram", "host") else f"cuda:{number}"
    return f'; for {text.strip()!r} write "{meant}"'


@dataclass(frozen=True, slots=True)
class AllocationSpec:
    """An allocation to be made; :meth:`PhysicalAllocation.create <vram.memory.PhysicalAllocation.create>` takes one.

    Parameters
    ----------
    nbytes : int
        Size in bytes, a positive multiple of the granularity of such memory.
    location : Location
        Where the memory lives.
    handle_kinds : HandleKind
        How it must be able to leave the process; this cannot be chosen later.
    flags : AllocationFlags
        Its purpose. Memory of the host takes none.
    """

    nbytes: int
    location: Location = HOST
    handle_kinds: HandleKind = HandleKind.POSIX_FD
    flags: AllocationFlags = AllocationFlags.NONE


def parse_size(size: int | str, *, what: str = "size") -> int:
    """Return a number of bytes from an integer or text such as ``"64MiB"`` (kB is 1,000, KiB 1,024, in any case).
    `what` names the parameter in the UsageError for a negative size, a fraction of a byte, or 2**63 bytes and more."""
    if isinstance(size, str):
        match = _SIZE.fullmatch(size) if len(size) <= 64 else None
        factor = _UNITS.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise UsageError(f'{what} {size[:64]!r} is not a size; write bytes or e.g. "64MiB", "1.5GiB", "90MB"')
        whole, _, fraction = match[1].partition(".")
        scaled = int(whole + fraction) * factor  # integers throughout: floats lose bytes from 2**53 on
        nbytes, rest = divmod(scaled, int(10 ** len(fraction)))
        if rest:
            raise UsageError(f"{what} {size!r} is not a whole number of bytes")
    else:
        try:
            nbytes = operator.index(None if isinstance(size, bool) else size)  # type: ignore[arg-type]
        except TypeError:
            raise UsageError(f'{what} must be an int of bytes or a string like "64MiB", not {size!r}') from None
    if not 0 <= nbytes < 2**63:
        raise UsageError(f"{what} {size!r} is out of range: 0 to 2**63 - 1 bytes")
    return nbytes


def format_size(nbytes: int) -> str:
    """Write a number of bytes for people: ``"6 MiB"``, ``"86.6 MiB"``, ``"384 B"``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if round(value, 1) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if value == int(value) else f"{value:.1f} {unit}"


def format_count(number: int, thing: str, things: str = "") -> str:
    """Write a number of things for people: ``"1 name"``, ``"2 names"``, ``"1 entry"`` with `things` ``"entries"``."""
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def printable(text: str) -> str:
    """Return one line of text without characters that a terminal or a reader's eye would obey.
    Control and bidirectional characters and surrogates become ``?``; XML forbids the first and the last of them."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def check_timeout(timeout: object, what: str = "timeout") -> float | None:
    """Return the seconds that a caller is willing to wait; None is for ever. Raises UsageError for anything else."""
    if timeout is None:
        return None
    kind, number = type(timeout), cast("Any", timeout)
    is_number = kind in (float, int) or (kind is not bool and isinstance(timeout, numbers.Real))
    try:
        if is_number and number >= 0:  # not so for NaN
            return float(number)
        shown = f"{timeout!r:.40}"
    except (OverflowError, ValueError):  # an int that no float holds, or of more digits than Python writes
        shown = "of so many digits"
    raise UsageError(f"{what} {shown} is not a number of seconds from 0, or None for ever")
