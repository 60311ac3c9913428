"""The checks of tests/architecture catch what they are there for: each bug is planted in a small tree of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.architecture import house
from tests.architecture.journeys import Ceiling, Steps, Walk, loaded_by, over

CLEAN = '"""A module."""\n'
NUMBERS = [*(f"I{n}" for n in range(1, 15)), *(f"S{n}" for n in range(1, 12))]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree in which there is nothing to find."""
    for name in ("src/vram/__init__.py", "src/vram/memory/__init__.py", "src/vram/memory/region.py"):
        write(tmp_path, name, CLEAN)
    write(tmp_path, "tests/unit/test_all.py", '"""' + " ".join(NUMBERS) + '"""\n')
    section = "### {n}. A rule\n\nText.\n\nKept by: `memory/region.py`\n\nCited by: `tests/unit/test_all.py`\n"
    write(tmp_path, "docs/invariants.md", "\n".join(section.format(n=n) for n in NUMBERS))
    write(tmp_path, "Makefile", "demo: weights\n\ttrue\nweights:\n\ttrue\n")
    rows = "| is one | `memory/region.py`; `__init__.py` |\n| is another | `memory/`; `later/` (to come), one day |\n"
    write(tmp_path, "CONTRIBUTING.md", f"# Work\n\n| the line... | belongs in |\n|---|---|\n{rows}\nText.\n")
    write(tmp_path, "README.md", "[the rules](docs/invariants.md), [away](https://example.org), `make demo`\n")
    return tmp_path


def write(tree: Path, name: str, text: str) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def change(tree: Path, name: str, old: str, new: str) -> None:
    path = tree / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_the_clean_tree_passes(tree: Path) -> None:
    checks = (
        house.vague_names,
        house.undocumented,
        house.endings,
        house.unsafe_listings,
        house.unkept,
        house.broken_links,
        house.unknown_verbs,
        house.unmapped,
        house.circles,
    )
    assert [check(tree) for check in checks] == [[]] * len(checks)
    assert house.too_long(tree, {}) == []


@pytest.mark.parametrize("name", ["vram/utils.py", "vram/memory/types.py", "vram/common/__init__.py"])
def test_a_vague_name_is_caught(tree: Path, name: str) -> None:
    write(tree, f"src/{name}", CLEAN)
    assert house.vague_names(tree) == [name]


def test_a_long_module_is_caught_until_it_has_a_reason(tree: Path) -> None:
    write(tree, "src/vram/memory/region.py", CLEAN + "x = 1\n" * house.MAX_LINES)
    assert len(house.too_long(tree, {})) == 1
    assert len(house.too_long(tree, {"vram/memory/region.py": " "})) == 1
    assert house.too_long(tree, {"vram/memory/region.py": "one algorithm"}) == []


def test_a_reason_that_outlived_its_module_is_caught(tree: Path) -> None:
    assert len(house.too_long(tree, {"vram/memory/region.py": "one algorithm"})) == 1
    assert len(house.too_long(tree, {"vram/memory/gone.py": "one algorithm"})) == 1


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("x = 1\n", ["the module"]),
        (CLEAN + "def grow(): ...\n", ["grow()"]),
        (CLEAN + "async def grow(): ...\n", ["grow()"]),
        (CLEAN + "class Region: ...\n", ["class Region"]),
        (CLEAN + 'class Region:\n    """It."""\n    def grow(self): ...\n', ["Region.grow()"]),
        (CLEAN + 'class Region:\n    """It."""\n    @property\n    def size(self): ...\n', ["Region.size()"]),
        (CLEAN + 'class Region:\n    """It."""\n    def __len__(self): ...\n    def _grow(self): ...\n', []),
        (CLEAN + "def test_something(): ...\ndef _grow(): ...\nclass _Hidden:\n    def grow(self): ...\n", []),
    ],
)
def test_a_missing_docstring_is_caught(tree: Path, code: str, found: list[str]) -> None:
    write(tree, "src/vram/memory/region.py", code)
    assert [line.rpartition(": ")[2] for line in house.undocumented(tree)] == found


@pytest.mark.parametrize(
    "line", ["assert x", "sys.exit(1)", "os._exit(1)", "os.abort()", "os.kill(1, 9)", "raise SystemExit(2)", "exit()"]
)
def test_an_end_of_the_process_is_caught(tree: Path, line: str) -> None:
    """I11, and only where users are: the command line may exit, the suites may assert."""
    body = CLEAN + f"def f(x):\n    {line}\n"
    write(tree, "src/vram/memory/region.py", body)
    write(tree, "src/vram/cli/__init__.py", body)
    write(tree, "src/vram/testing/ledger.py", body)
    assert len(house.endings(tree)) == 1


@pytest.mark.parametrize("kind", ["items", "values", "keys"])
def test_a_listing_that_a_finalizer_can_break_is_caught(tree: Path, kind: str) -> None:
    write(tree, "src/vram/memory/region.py", CLEAN + f"for x in tuple(known.{kind}()):\n    pass\n")
    assert len(house.unsafe_listings(tree)) == 1
    write(tree, "src/vram/memory/region.py", CLEAN + f"x = tuple(known.copy().{kind}()), list(known.{kind}())\n")
    assert house.unsafe_listings(tree) == []


@pytest.mark.parametrize("number", ["I7", "S7"])
def test_an_invariant_that_no_test_cites_is_caught(tree: Path, number: str) -> None:
    change(tree, "tests/unit/test_all.py", number, number + "7")
    assert house.unkept(tree) == [f"{number}: no test cites it", f"{number}: tests/unit/test_all.py does not cite it"]


@pytest.mark.parametrize("number", ["I4", "S10"])
def test_an_invariant_that_is_not_written_down_is_caught(tree: Path, number: str) -> None:
    change(tree, "docs/invariants.md", f"### {number}.", "### About it.")
    assert f"{number}: not in docs/invariants.md" in house.unkept(tree)


def test_a_link_to_nowhere_is_caught(tree: Path) -> None:
    change(tree, "README.md", "docs/invariants.md", "docs/gone.md")
    assert house.broken_links(tree) == ["README.md: docs/gone.md"]


def test_a_verb_that_make_lacks_is_caught(tree: Path) -> None:
    change(tree, "README.md", "`make demo`", "`make coffee`")
    assert house.unknown_verbs(tree) == ["README.md: make coffee"]


@pytest.mark.parametrize(
    "line",
    [
        "from .region import Region\n",
        "from . import region\n",
        "from vram.memory.region import Region\n",
        "def f():\n    from .region import Region\n",
    ],
)
def test_a_circle_is_caught(tree: Path, line: str) -> None:
    write(tree, "src/vram/memory/region.py", CLEAN + "from .pin import Pin\n")
    write(tree, "src/vram/memory/pin.py", CLEAN)
    assert house.circles(tree) == []
    write(tree, "src/vram/memory/pin.py", CLEAN + line)
    assert house.circles(tree) == ["vram.memory: vram.memory.pin, vram.memory.region"]
    write(tree, "src/vram/memory/pin.py", CLEAN + "if TYPE_CHECKING:\n    from .region import Region\n")
    assert house.circles(tree) == []


def test_an_error_of_a_driver_that_is_made_elsewhere_is_caught(tree: Path) -> None:
    write(tree, "src/vram/driver/host.py", CLEAN + "raise DriverError('open', 2, 'ENOENT')\n")
    assert house.driver_errors(tree, {}) == []
    write(tree, "src/vram/keeper/paths.py", CLEAN + "raise errors.DriverError('open', 2, 'ENOENT')\n")
    assert len(house.driver_errors(tree, {})) == 1
    assert house.driver_errors(tree, {"vram/keeper/paths.py": "a directory"}) == []
    assert len(house.driver_errors(tree, {"vram/keeper/paths.py": "x", "vram/memory/region.py": "y"})) == 1


def test_a_decision_by_a_handle_kind_is_caught_where_its_row_would_say(tree: Path) -> None:
    write(tree, "src/vram/memory/kinds.py", CLEAN + "x = HandleKind.POOL\n")
    write(tree, "src/vram/memory/region.py", CLEAN + "x = HandleKind.NONE\n")
    assert house.kinds_named(tree, {}) == []
    write(tree, "src/vram/memory/region.py", CLEAN + "x = kind is HandleKind.POOL\n")
    assert house.kinds_named(tree, {}) == ["vram/memory/region.py"]
    assert house.kinds_named(tree, {"vram/memory/region.py": "x"}) == []
    assert house.kinds_named(tree, {"vram/memory/region.py": "x", "vram/keeper/paths.py": "y"}) == [
        "vram/keeper/paths.py"
    ]


def test_a_place_of_the_map_that_is_gone_is_caught(tree: Path) -> None:
    (tree / "src/vram/memory/region.py").rename(tree / "src/vram/memory/regions.py")
    assert house.unmapped(tree) == ["CONTRIBUTING.md: memory/region.py is on the map and does not exist"]


# -- journeys ---------------------------------------------------------------------------------------------------------
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
