"""Which way an all-reduce on GPUs takes: a table, by how many ranks there are, element type, operation and bytes.

The choice is a function of these and of nothing that one rank knows alone, so all ranks come to the same. Which table a
rank has is part of what they agree on when they set up. ``python -m benchmarks allreduce --tune`` measures a table.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from ..errors import UsageError
from .kernels import BLOCKS, GRID, KINDS, OPS, Layout, may_push
from .messages import MAX_RANKS

PACKETS: Final = "packets"  # pushed whole to every rank, the number of the call beside the data
PUSH: Final = "push"  # pushed whole to every rank, zeros say that nothing has come
TWO_SHOTS: Final = "two_shots"  # each rank is sent its share, and sends the result of it to all
SHARES: Final = "shares"  # each rank loads its share of symmetric buffers, and stores the result of it to all
LIBRARY: Final = "library"  # another library's, which the group was given
_KNOWN: Final = (PACKETS, PUSH, TWO_SHOTS, SHARES, LIBRARY)

_FORMAT = 1  # of the file
_LONGEST = 1 << 24  # characters of one
_VARIABLE = "VRAM_ROUTES"  # names a file, where a group is not told another one
_FASTER_IN_PACKETS = 32 << 10  # bytes: above, what goes without numbers beside the data is faster (docs/performance.md)
# Bytes: above, sharing the work is faster than pushing all of it to all, by the number of ranks.
_FASTER_PUSHED = {2: 6 << 20, 3: 512 << 10, 4: 256 << 10}
_FASTER_WIDE = {2: 768 << 10}  # bytes: above, what is pushed is faster with the largest grid
_FASTER_WIDE_BY_MORE = 6 << 20
_FASTER_IN_FEW = 32 << 20  # bytes: up to there two ranks take shares in a grid of the usual size, above in the largest
_UNCROWDED = 12  # blocks: with more of them, shares of more than two ranks crowd the switch (docs/performance.md)
_AS_FAST_AS_NCCL = 64 << 20  # bytes: above, a library is as fast, where there is one


@dataclass(frozen=True, slots=True)
class Step:
    """A way that is taken for arrays of up to `up_to` bytes (None: any), with at most `blocks` blocks."""

    up_to: int | None
    route: str
    blocks: int = GRID


@dataclass(frozen=True, slots=True)
class Choice:
    """The choice for an array: the route, the most bytes of a piece, and the size of the grid."""

    route: str
    piece: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Routes:
    """A table: steps in the order of their sizes, by number of ranks, element type and operation; the built-in table
    serves the rest. `origin` is for people. Raises UsageError for an unknown key, or steps out of order."""

    entries: Mapping[tuple[int, str, str], tuple[Step, ...]] = field(default_factory=lambda: MappingProxyType({}))
    origin: str = "built in"

    def __post_init__(self) -> None:
        try:
            for key, steps in self.entries.items():
                _check(key, steps)
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"no entries of a table of routes: {error}") from None

    @property
    def digest(self) -> str:
        """Of all that decides, what is built in as well: the same on ranks that decide alike."""
        built_in = {
            (size, "", str(pushes)): _built_in(Layout(size), pushes)
            for size in range(1, 10)
            for pushes in (False, True)
        }
        said = [
            [*key, [[step.up_to, step.route, step.blocks] for step in steps]]
            for key, steps in sorted((built_in | dict(self.entries)).items())
        ]
        return hashlib.sha256(json.dumps([_FORMAT, said]).encode()).hexdigest()[:16]

    def steps(self, size: int, dtype: str, op: str) -> tuple[Step, ...]:
        """Return the steps for so many ranks, an element type and an operation: those built in where it holds none."""
        return self.entries.get((size, dtype, op)) or _built_in(Layout(size), may_push(dtype, op))

    def choose(
        self, size: int, dtype: str, op: str, nbytes: int, *, symmetric: bool = False, library: bool = False
    ) -> Choice:
        """Return the way of the first step, of the table and then of those built in, that is open to this call.
        `symmetric`: source and target are symmetric buffers. `library`: the group has a library to hand over to."""
        layout = Layout(size)
        pushes = may_push(dtype, op)
        most = {
            PACKETS: layout.packets,
            PUSH: layout.pushed if pushes else 0,
            TWO_SHOTS: layout.two_shots if pushes else 0,
            SHARES: nbytes if symmetric else 0,
            LIBRARY: nbytes if library else 0,
        }
        for step in (*self.steps(size, dtype, op), *_built_in(layout, pushes)):
            if (step.up_to is None or nbytes <= step.up_to) and nbytes <= most[step.route]:
                return Choice(step.route, max(nbytes, 1), step.blocks)
        if symmetric:
            return Choice(SHARES, nbytes, _grid_of_shares(size, nbytes))
        pieces = max((PACKETS, PUSH, TWO_SHOTS), key=lambda route: most[route])
        return Choice(pieces, most[pieces], BLOCKS)


def _built_in(layout: Layout, pushes: bool) -> tuple[Step, ...]:
    """Return what was fastest on the machines of docs/performance.md, which had two and four GPUs."""
    shares = tuple(
        Step(up_to, SHARES, _grid_of_shares(layout.size, up_to)) for up_to in (_FASTER_IN_FEW, _AS_FAST_AS_NCCL)
    )
    if not pushes:
        return (Step(layout.packets, PACKETS), *shares, Step(None, LIBRARY))
    wide = _FASTER_WIDE.get(layout.size, _FASTER_WIDE_BY_MORE)
    pushed = min(layout.pushed, _FASTER_PUSHED.get(layout.size, layout.pushed))
    return (
        Step(_FASTER_IN_PACKETS, PACKETS),
        Step(min(pushed, wide), PUSH), Step(pushed, PUSH, BLOCKS),
        Step(min(layout.two_shots, wide), TWO_SHOTS), Step(layout.two_shots, TWO_SHOTS, BLOCKS),
        *shares,
        Step(layout.pushed, PUSH, BLOCKS), Step(_AS_FAST_AS_NCCL, TWO_SHOTS, BLOCKS), Step(None, LIBRARY),
    )  # fmt: skip


def _grid_of_shares(size: int, nbytes: int) -> int:
    if size > 2:
        return _UNCROWDED
    return GRID if nbytes <= _FASTER_IN_FEW else BLOCKS


# -- files ------------------------------------------------------------------------------------------------------------
def read_routes(given: Routes | str | os.PathLike[str] | None) -> Routes:
    """Return a table: the given table, that of a file, or by default that of the file in ``VRAM_ROUTES``.
    Raises UsageError if it is neither a table nor a path, or the file cannot be read or is no such table."""
    if isinstance(given, Routes):
        return given
    place = given if given is not None else os.environ.get(_VARIABLE)
    if not place:
        return Routes()
    try:
        path = os.fspath(place)
    except TypeError:
        raise UsageError(f"routes are a table, or the path of a file, not {place!r:.80}") from None
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), encoding="utf-8") as file:
            text = file.read(_LONGEST)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"the table of routes {path} cannot be read: {error}") from None
    try:
        return Routes(MappingProxyType(_parsed(json.loads(text))), path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is no table of routes ({error}): `python -m benchmarks allreduce --device cuda:0 --tune FILE`, "
            f"in a clone of vram, writes one"
        ) from None


def written(routes: Routes, machine: str) -> str:
    """Return a table as the text of a file; `machine` says for people where it was measured."""
    entries = [
        {
            "ranks": size, "dtype": dtype, "op": op,
            "steps": [{"up_to": one.up_to, "route": one.route, "blocks": one.blocks} for one in steps],
        }
        for (size, dtype, op), steps in sorted(routes.entries.items())
    ]  # fmt: skip
    return json.dumps({"format": _FORMAT, "machine": machine, "entries": entries}, indent=1) + "\n"


def _parsed(page: Any) -> dict[tuple[int, str, str], tuple[Step, ...]]:
    if type(page["format"]) is not int or page["format"] != _FORMAT:
        raise ValueError(f"format {page['format']!r:.20}, and this is {_FORMAT}")
    found: dict[tuple[int, str, str], tuple[Step, ...]] = {}
    for entry in page["entries"]:
        key = (entry["ranks"], entry["dtype"], entry["op"])
        if key in found:
            raise ValueError(f"two entries for {key}")
        found[key] = tuple(Step(one["up_to"], one["route"], one.get("blocks", GRID)) for one in entry["steps"])
    return found


def _check(key: tuple[int, str, str], steps: Iterable[Step]) -> None:
    size, dtype, op = key
    if type(size) is not int or not 1 <= size <= MAX_RANKS or dtype not in KINDS or op not in OPS:
        raise ValueError(f"an entry for {key}, of what there is not")
    last = 0
    for step in steps:
        if step.route not in _KNOWN or type(step.blocks) is not int or not 1 <= step.blocks <= BLOCKS:
            raise ValueError(f"{step} has no such route, or its blocks are not 1 to {BLOCKS}")
        if step.up_to is not None and (type(step.up_to) is not int or step.up_to < last):
            raise ValueError(f"{step} is out of the order of sizes")
        last = last if step.up_to is None else step.up_to
