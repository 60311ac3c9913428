"""The count of steps sees a detour: each is planted in a small package of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.architecture.journeys import Ceiling, Steps, Walk, loaded_by, over

VERB = """
from pathlib import PurePath
import {name}.driver as driver, {name}.keeper as keeper

def verb(numbers):
    keeper.send()
    keeper.receive()
    return driver.take([number + 1 for number in numbers])

def verb_with_a_detour(numbers):
    return check(verb(numbers))

def check(value):
    return value

def verb_by_another_file(numbers):
    driver.room()
    return verb(numbers)

def verb_that_asks_twice(numbers):
    keeper.send()
    keeper.receive()
    return verb(numbers)

def verb_that_also_tells(numbers):
    keeper.send()
    return verb(numbers)

def verb_called_by_others(numbers):
    return list(map(verb, [numbers]))
"""
DRIVER = """
import {name}.room

def take(numbers):
    return sum(each(numbers))

def each(numbers):
    for number in numbers:
        yield number

def room():
    return {name}.room.look()
"""
ROOM = "def look():\n    return 0\n"
KEEPER = "def send():\n    pass\n\ndef receive():\n    pass\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A package of which one verb is known to take five calls, in three files, with one answer waited for."""
    name = f"journeys_{abs(hash(request.node.name))}"
    root = tmp_path / name
    root.mkdir()
    texts = {"__init__": "", "verb": VERB, "driver": DRIVER, "room": ROOM, "keeper": KEEPER}
    for module, text in texts.items():
        (root / f"{module}.py").write_text(text.format(name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__(f"{name}.verb").verb
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def walk(package: Any, verb: str) -> Walk:
    keeper = package.keeper
    steps = Steps(Path(package.__file__).parent, keeper.send.__code__, keeper.receive.__code__)
    before = sys.getprofile()
    sys.setprofile(steps)
    try:
        with steps.counting():
            getattr(package, verb)([1, 2, 3])
    finally:
        sys.setprofile(before)
    return steps.walk()


STRAIGHT = Walk(calls=5, files=3, hops=3, sent=1, asked=1)


def test_a_straight_walk_is_counted_once_for_each_call(package: Any) -> None:
    """The generator counts once, though it is resumed four times; the comprehension does not."""
    assert walk(package, "verb") == STRAIGHT


def test_calls_of_others_are_no_steps_but_do_not_hide_ours(package: Any) -> None:
    assert walk(package, "verb_called_by_others") == STRAIGHT._replace(calls=6)


@pytest.mark.parametrize(
    ("verb", "found"),
    [
        ("verb_with_a_detour", ["it: 7 calls, at most 5"]),
        ("verb_by_another_file", ["it: 8 calls, at most 5", "it: 4 files, at most 3"]),
        ("verb_that_asks_twice", ["it: 8 calls, at most 5", "it: 2 asked, at most 1"]),
        ("verb_that_also_tells", ["it: 7 calls, at most 5"]),
    ],
)
def test_a_detour_is_caught(package: Any, verb: str, found: list[str]) -> None:
    ceilings = {"it": Ceiling(STRAIGHT.calls, STRAIGHT.files, STRAIGHT.asked)}
    assert over({"it": walk(package, "verb")}, ceilings) == []
    assert over({"it": walk(package, verb)}, ceilings) == found


def test_a_journey_that_nobody_walks_or_limits_is_caught() -> None:
    ceilings = {"it": Ceiling(9, 9, 9)}
    assert over({}, ceilings) == ["it: nobody walked it"]
    assert over({"it": STRAIGHT, "other": STRAIGHT}, ceilings) == ["other: it has no ceiling"]


def test_what_is_loaded_is_seen() -> None:
    assert "vram.keeper.server" not in loaded_by("import vram")
    assert "vram.keeper.server" in loaded_by("import vram.keeper.server")
