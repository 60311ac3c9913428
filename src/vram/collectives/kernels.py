"""The kernels of groups of GPUs, compiled for a rank by NVRTC through cuda.core, and kept on disk.

The source is ``kernels.cu``, and ``instructions.cu`` in front of it, compiled with the number of ranks, the rank, the
element type and the operation as constants.
The C++ compiler of CUDA (NVRTC) comes with the extra ``collectives``, and no toolkit is needed. cuda.core is
imported here alone, and when something is compiled.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Final

from ..errors import AccessDeniedError, UnsupportedError
from ..keeper.paths import make_own

KINDS: Final = {"float32": 0, "float16": 1, "bfloat16": 2, "int32": 3}
OPS: Final = {"sum": 0, "min": 1, "max": 2}
THREADS: Final = 512  # of a block
WIDEST_ROW: Final = 4 * 16 * THREADS  # bytes of a row that is normalized: ROW_UNITS of kernels.cu for each thread
BLOCKS: Final = 128  # of a grid, at most: a block waits for those of its number on other ranks alone
GRID: Final = 64  # blocks of one where no table and no size says otherwise

_LINE = 128  # bytes: the words that a block of one rank waits for have a line of their own
_PACKETS = 64 << 10  # bytes of an array that go in packets, at most
# Bytes of an array that are pushed whole to every rank, at most: from there on each rank reduces a share.
_PUSHED = {2: 16 << 20, 3: 1 << 20, 4: 512 << 10}
_PUSHED_BY_MORE = 128 << 10
# Bytes of an array whose shares are pushed to those who reduce them, at most. For two ranks that is no less than all.
_TWO_SHOTS = 16 << 20
_MOST_IN_TWO_SHOTS = 8  # ranks
_STAGED = 8 << 20  # bytes of an array of a graph that go through the workspace at a time


def may_push(dtype: str, op: str) -> bool:
    """Whether there is a word that no element leaves behind: a zero, which is sent as -0.0, and adds the same."""
    return op == "sum" and dtype != "int32"


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of everything in the workspace of each rank, in bytes: the same on all `size` ranks of a group."""

    size: int

    @property
    def packets(self) -> int:
        """Bytes of an array that go in packets, at most."""
        return _PACKETS

    @property
    def pushed(self) -> int:
        """Bytes of an array that are pushed whole to every rank, at most."""
        return _PUSHED.get(self.size, _PUSHED_BY_MORE)

    @property
    def two_shots(self) -> int:
        """Bytes of an array whose shares are pushed to those who reduce them, at most; 0 where that does not pay."""
        return _TWO_SHOTS if 2 < self.size <= _MOST_IN_TWO_SHOTS else 0

    @property
    def packet_row(self) -> int:
        """Bytes for the packets of one rank: half of each is the number of the call."""
        return 2 * self.packets

    @property
    def push_at(self) -> int:
        """Where the rows of what is pushed begin."""
        return 2 * self.size * self.packet_row

    @property
    def share_row(self) -> int:
        """Bytes for a share of one rank: one of the equal parts of an array, the last of which may be shorter."""
        return -(-self.two_shots // (self.size * _LINE)) * _LINE

    @property
    def scatter_at(self) -> int:
        """Where the rows of shares that this rank reduces begin."""
        return self.push_at + 2 * self.size * self.pushed

    @property
    def gather_at(self) -> int:
        """Where the rows of shares that others have reduced begin."""
        return self.scatter_at + 2 * self.size * self.share_row

    @property
    def flags_at(self) -> int:
        """Where the words of the blocks begin."""
        return self.gather_at + 2 * self.size * self.share_row

    @property
    def staged_at(self) -> int:
        """Where a piece of an array lies that other ranks cannot reach where it is."""
        return self.flags_at + 2 * 2 * BLOCKS * _LINE

    @property
    def staged(self) -> int:
        """Bytes of such a piece, at most."""
        return _STAGED

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.staged_at + self.staged


@dataclass(frozen=True, slots=True)
class Variant:
    """The constants that kernels are compiled for; `capability` ``(9, 0)`` is sm_90."""

    size: int
    rank: int
    dtype: str
    op: str
    capability: tuple[int, int]

    @property
    def is_dependent(self) -> bool:
        """Whether a kernel may begin before the one before it in its stream has ended (PTX ISA, griddepcontrol)."""
        return self.capability >= (9, 0)

    @property
    def may_push(self) -> bool:
        """See :func:`may_push`."""
        return may_push(self.dtype, self.op)

    def names(self) -> list[str]:
        """Return the kernels that there are."""
        pushes = ["all_reduce_push", "all_reduce_norm_packets", "all_reduce_norm_push"] if self.may_push else []
        if self.may_push and Layout(self.size).two_shots:
            pushes.append("all_reduce_two_shots")
        shares = ["all_reduce_shares", "all_reduce_entry", "reduce_scatter"]
        return ["all_reduce_packets", *pushes, *shares, "fetch", "barrier"]

    def source(self) -> str:
        """Return the program, its constants in front."""
        layout = Layout(self.size)
        ranks = range(self.size)
        constants = {
            "WORLD": self.size,
            "RANK": self.rank,
            "KIND": KINDS[self.dtype],
            "OP": OPS[self.op],
            "LL_ROW": f"{layout.packet_row}ull",
            "PUSH_AT": f"{layout.push_at}ull",
            "PUSH_ROW": f"{layout.pushed}ull",
            "SCATTER_AT": f"{layout.scatter_at}ull",
            "GATHER_AT": f"{layout.gather_at}ull",
            "SHARE_ROW": f"{layout.share_row}ull",
            "FLAGS_AT": f"{layout.flags_at}ull",
            "STAGED_AT": f"{layout.staged_at}ull",
            "BLOCKS": BLOCKS,
        }
        for words, one, letter in (("PEERS", "PEER", "p"), ("ROWS", "ROW", "r"), ("OUTS", "OUT", "o")):
            constants[words] = ", ".join(f"u8 *{letter}{rank}" for rank in ranks)
            constants[f"{one}_LIST"] = ", ".join(f"{letter}{rank}" for rank in ranks)
        lines = [f"#define {name} {value}" for name, value in constants.items()]
        if self.is_dependent:
            lines.append("#define DEPENDENT")
        return "\n".join([*lines, instructions(), '#line 1 "kernels.cu"', _program()])


def compiled(variant: Variant, cache: Path | None = None) -> bytes:
    """Return the machine code of the kernels, from disk if it was compiled before. The directory `cache` is not used if
    others may write there or above. Raises UnsupportedError if cuda.core or NVRTC is not installed."""
    try:
        from cuda.core import Program, ProgramOptions
        from cuda.core.utils import FileStreamProgramCache
    except ImportError:
        raise _missing("no package cuda.core") from None
    major, minor = variant.capability
    options = ProgramOptions(arch=f"sm_{major}{minor}", std="c++17", name="vram_collectives.cu")
    place = _directory() if cache is None else cache
    try:
        program = Program(variant.source(), "c++", options)
    except (RuntimeError, ImportError) as error:  # types of cuda-pathfinder's own among them
        raise _missing(f"no NVRTC that can be loaded: {error}") from None
    safe = _safe(place)
    kept = None if safe is None else FileStreamProgramCache(safe)
    return bytes(program.compile("cubin", cache=kept).code)


def _missing(have: str) -> UnsupportedError:
    return UnsupportedError(
        "collectives on GPUs",
        "cuda.core and CUDA's compiler NVRTC",
        have,
        "Install them: pip install '.[collectives]' in a clone of vram",
    )


def _safe(place: Path) -> Path | None:
    """Make a directory that is this user's alone, since what is in it runs in this process; None if that cannot be."""
    try:
        return make_own(place)
    except (OSError, AccessDeniedError):  # a home of others, that cannot be written, or is none
        return None


def _directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vram" / "kernels"


@lru_cache(maxsize=1)
def instructions() -> str:
    """Return what stands in front of the kernels: all that is written in the GPU's own language."""
    return resources.files(__package__).joinpath("instructions.cu").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _program() -> str:
    return resources.files(__package__).joinpath("kernels.cu").read_text(encoding="utf-8")
