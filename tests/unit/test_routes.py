"""Which way an all-reduce takes: a function of what all ranks know, and of a table that a file may hold."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from vram.collectives import routes as module
from vram.collectives.kernels import BLOCKS, GRID, KINDS, OPS, Layout, may_push
from vram.collectives.routes import LIBRARY, PACKETS, PUSH, SHARES, TWO_SHOTS, Routes, Step, read_routes, written
from vram.errors import UsageError

KIB, MIB = 1 << 10, 1 << 20
SIZES = [
    0,
    1,
    4 * KIB,
    32 * KIB,
    32 * KIB + 1,
    100 * KIB,
    700 * KIB,
    MIB,
    16 * MIB,
    16 * MIB + 1,
    64 * MIB,
    64 * MIB + 1,
]


def table(*steps: Step, size: int = 2, dtype: str = "bfloat16", op: str = "sum") -> Routes:
    return Routes(MappingProxyType({(size, dtype, op): steps}))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 9, 64])
def test_whatever_is_chosen_has_room_and_can_be_computed(size: int) -> None:
    layout = Layout(size)
    most = {PACKETS: layout.packets, PUSH: layout.pushed, TWO_SHOTS: layout.two_shots}
    for dtype, op, nbytes, symmetric in itertools.product(KINDS, OPS, SIZES, (False, True)):
        choice = Routes().choose(size, dtype, op, nbytes, symmetric=symmetric)
        assert choice.route != LIBRARY
        assert choice.route != SHARES or symmetric
        assert choice.route in (PACKETS, SHARES) or may_push(dtype, op)
        assert 0 < choice.piece <= most.get(choice.route, nbytes) or nbytes == 0
        assert 1 <= choice.blocks <= BLOCKS


@pytest.mark.parametrize(
    ("size", "nbytes", "symmetric", "route"),
    [
        (2, 4 * KIB, False, PACKETS),
        (2, 33 * KIB, True, PUSH),
        (2, 6 * MIB, True, PUSH),
        (2, 7 * MIB, True, SHARES),
        (2, 16 * MIB, False, PUSH),
        (2, 17 * MIB, False, PUSH),  # in pieces
        (4, 256 * KIB, False, PUSH),
        (4, 512 * KIB, False, TWO_SHOTS),
        (4, MIB, False, TWO_SHOTS),
        (8, MIB, True, TWO_SHOTS),
        (8, 17 * MIB, True, SHARES),
        (8, 17 * MIB, False, TWO_SHOTS),  # in pieces
        (9, MIB, False, PUSH),
    ],
)
def test_what_is_built_in(size: int, nbytes: int, symmetric: bool, route: str) -> None:
    assert Routes().choose(size, "bfloat16", "sum", nbytes, symmetric=symmetric).route == route


@pytest.mark.parametrize(
    ("size", "nbytes", "blocks"),
    [
        (2, 512 * KIB, GRID), (2, MIB, BLOCKS), (2, 16 * MIB, GRID), (2, 64 * MIB, BLOCKS),
        (4, 4 * MIB, GRID), (4, 16 * MIB, BLOCKS), (4, 64 * MIB, 12), (4, 640 * MIB, 12),
    ],
)  # fmt: skip
def test_how_large_a_grid_is(size: int, nbytes: int, blocks: int) -> None:
    assert Routes().choose(size, "bfloat16", "sum", nbytes, symmetric=True).blocks == blocks


def test_a_digest_is_of_what_is_built_in_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that releases which choose differently do not compute together."""
    before = Routes().digest
    monkeypatch.setitem(module._FASTER_PUSHED, 3, 1 << 19 | 1)
    assert Routes().digest != before


def test_what_is_large_goes_to_a_library_where_there_is_one() -> None:
    for symmetric, dtype in itertools.product((False, True), ("bfloat16", "int32")):
        above = Routes().choose(2, dtype, "sum", 64 * MIB + 1, symmetric=symmetric, library=True)
        assert above.route == LIBRARY
        assert Routes().choose(2, dtype, "sum", 64 * KIB, symmetric=symmetric, library=True).route != LIBRARY
        assert Routes().choose(2, dtype, "sum", 64 * MIB + 1, symmetric=symmetric).route != LIBRARY


def test_a_table_is_gone_by_where_it_has_an_entry_and_the_way_is_open() -> None:
    routes = table(Step(100, PUSH, 3), Step(5000, SHARES), Step(8 * KIB, LIBRARY), Step(None, PUSH, 7))
    said = [(nbytes, routes.choose(2, "bfloat16", "sum", nbytes)) for nbytes in (100, 101, 8 * KIB)]
    assert [(nbytes, one.route, one.blocks) for nbytes, one in said] == [
        (100, PUSH, 3), (101, PUSH, 7), (8 * KIB, PUSH, 7)
    ]  # fmt: skip
    assert routes.choose(2, "bfloat16", "sum", 101, symmetric=True).route == SHARES
    assert routes.choose(2, "bfloat16", "sum", 8 * KIB, library=True).route == LIBRARY
    other = routes.choose(2, "float16", "sum", 100)
    assert (other.route, other.blocks) == (PACKETS, GRID), "of what it does not hold, what is built in"
    assert routes.choose(2, "bfloat16", "sum", 20 * MIB).piece == 16 * MIB, "what has no room goes in pieces"


def test_a_digest_is_of_what_decides() -> None:
    same = [table(Step(100, PUSH)), Routes(table(Step(100, PUSH)).entries, "from elsewhere")]
    assert same[0].digest == same[1].digest
    others = [
        Routes(), *same[:1], table(Step(101, PUSH)), table(Step(100, PACKETS)), table(Step(100, PUSH, 5)),
        table(Step(100, PUSH), size=4), table(Step(100, PUSH), dtype="float16"), table(Step(None, PUSH)),
    ]  # fmt: skip
    assert len({one.digest for one in others}) == len(others)


def test_a_file_holds_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    routes = table(Step(100, PUSH, 3), Step(None, LIBRARY))
    place = tmp_path / "routes.json"
    place.write_text(written(routes, "a machine"))
    found = read_routes(place)
    assert (dict(found.entries), found.digest, found.origin) == (dict(routes.entries), routes.digest, str(place))
    monkeypatch.delenv("VRAM_ROUTES", raising=False)
    assert read_routes(None) == Routes()
    monkeypatch.setenv("VRAM_ROUTES", str(place))
    assert read_routes(None).digest == routes.digest
    assert read_routes(routes) is routes


STEP = {"up_to": 100, "route": "push", "blocks": 4}
ENTRY = {"ranks": 2, "dtype": "bfloat16", "op": "sum", "steps": [STEP]}
PAGE = {"format": 1, "machine": "", "entries": [ENTRY]}


@pytest.mark.parametrize(
    "page",
    [
        [],
        {**PAGE, "format": 2},
        {**PAGE, "format": True},
        {**PAGE, "format": 1.0},
        {**PAGE, "entries": [ENTRY, ENTRY]},
        {**PAGE, "entries": [{**ENTRY, "ranks": "2"}]},
        {**PAGE, "entries": [{**ENTRY, "ranks": True}]},
        {**PAGE, "entries": [{**ENTRY, "ranks": 0}]},
        {**PAGE, "entries": [{**ENTRY, "ranks": 65}]},
        {**PAGE, "entries": [{**ENTRY, "dtype": "float64"}]},
        {**PAGE, "entries": [{**ENTRY, "op": ["sum"]}]},
        {**PAGE, "entries": [{**ENTRY, "steps": [{**STEP, "route": "multimem"}]}]},
        {**PAGE, "entries": [{**ENTRY, "steps": [{**STEP, "blocks": BLOCKS + 1}]}]},
        {**PAGE, "entries": [{**ENTRY, "steps": [{**STEP, "blocks": 0}]}]},
        {**PAGE, "entries": [{**ENTRY, "steps": [STEP, {**STEP, "up_to": 99}]}]},
        {**PAGE, "entries": [{**ENTRY, "steps": [{**STEP, "up_to": "100"}]}]},
        {**PAGE, "entries": [{**ENTRY, "steps": 3}]},
    ],
    ids=str,
)
def test_what_is_no_table_is_refused(tmp_path: Path, page: Any) -> None:
    place = tmp_path / "routes.json"
    place.write_text(json.dumps(page))
    with pytest.raises(UsageError, match="is no table of routes"):
        read_routes(place)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "words").write_text("{")
    for name in ("nothing", "bytes", "words"):
        with pytest.raises(UsageError, match="table of routes"):
            read_routes(tmp_path / name)


def test_what_is_neither_a_table_nor_a_path_is_refused() -> None:
    with pytest.raises(UsageError, match="the path of a file, not 5"):
        read_routes(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "entries",
    [
        {(2, "bfloat16", "sum"): (Step(100, "multimem"),)},
        {(2, "bfloat16", "sum"): (Step(100, PUSH, 0),)},
        {(2, "bfloat16", "sum"): (Step(100, PUSH, BLOCKS + 1),)},
        {(2, "bfloat16", "sum"): (Step(100, PUSH), Step(99, PUSH))},
        {(65, "bfloat16", "sum"): (Step(100, PUSH),)},
        {(2, "float64", "sum"): (Step(100, PUSH),)},
        {(2, "bfloat16"): (Step(100, PUSH),)},
        {(2, "bfloat16", "sum"): 5},
        5,
    ],
    ids=str,
)
def test_a_table_made_by_hand_is_held_to_the_same(entries: Any) -> None:
    with pytest.raises(UsageError, match="no entries of a table of routes"):
        Routes(entries)
