"""Ceilings for the rooms, in lines of tracked files, and for the pages, in words. They go down, and never up."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from .house import ROOT

PACKAGE, TESTS, CLASSES, WORDS = 59_870, 75_675, 566, 41_455
ROOMS = {
    "arrays": 5_670, "bench": 1_690, "cli": 1_545, "collectives": 4_560, "doctor": 660, "driver": 5_435,
    "engines": 4_320, "entries": 8_160, "handover": 2_907, "keeper": 8_805, "maps": 610, "memory": 5_150,
    "metrics": 360, "nodes": 3_775, "sharing": 1_410, "testing": 820, "transports": 2_293, "": 1_770,
}  # fmt: skip


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n")


def by_room() -> Counter[str]:
    found: Counter[str] = Counter()
    for file in (ROOT / "src/vram").rglob("*"):
        if file.suffix in (".py", ".cu"):
            room = file.relative_to(ROOT / "src/vram").parts[0]
            found["" if room.endswith(".py") else room] += lines(file)
    return found


def test_no_room_is_above_its_ceiling() -> None:
    found = by_room()
    assert found.keys() == ROOMS.keys()
    assert {room: count for room, count in found.items() if count > ROOMS[room]} == {}
    assert sum(found.values()) <= PACKAGE


def test_a_room_that_shrank_has_a_lower_ceiling() -> None:
    found = by_room()
    assert {room: count for room, count in found.items() if count < 0.95 * ROOMS[room] - 50} == {}


def test_tests_and_pages_are_not_above_their_ceilings() -> None:
    assert sum(lines(file) for file in (ROOT / "tests").rglob("*.py")) <= TESTS
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= WORDS


def test_classes_are_not_above_their_ceiling() -> None:
    trees = (ast.parse(file.read_text()) for file in (ROOT / "src").rglob("*.py"))
    assert sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree)) <= CLASSES
