"""What tests import: public modules, helpers in ``tests/support``, and the one module that a unit test is of."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SUITES = ("conformance", "faults", "gpu", "hostile", "processes", "stateful", "unit")
# docs/versioning.md; vram.spec has the values that the public verbs take.
PUBLIC = {"aio", "cli", "engines", "errors", "info", "memory", "sharing", "spec", "testing", "transports", "typing"}
# Files that are older than this rule and import more. A file that no longer does leaves the list, and none is added.
OLD = Path(__file__).with_name("old_imports.txt")
MOST_OLD = 147


@functools.cache
def modules(source: str) -> frozenset[str]:
    """Return the names of the modules that a file imports from, wherever in it."""
    return frozenset(_modules(source))


def _modules(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "tests" if node.level else node.module or ""
            if node.module == "tests":
                yield from (f"tests.{alias.name}" for alias in node.names)
            if node.module == "vram":
                yield from (f"vram.{alias.name}" for alias in node.names if (alias.name).islower())


def private(source: str) -> set[str]:
    """Return the modules of the package that a file imports and that are not public."""
    rooms = {path.stem for path in (TESTS.parent / "src/vram").iterdir()}
    named = (name.split(".") for name in modules(source))
    return {".".join(name) for name in named if name[0] == "vram" and name[1:] and name[1] in rooms - PUBLIC}


def reaches_far(path: Path) -> bool:
    """Whether a file of tests imports more modules that are not public than the one it may be the unit test of."""
    return len(private(path.read_text())) > (path.parent.name == "unit")


def test_tests_import_public_names_or_the_one_module_they_are_the_unit_test_of() -> None:
    far = {
        str(path.relative_to(TESTS))
        for suite in SUITES
        for path in (TESTS / suite).glob("test_*.py")
        if reaches_far(path)
    }
    old = set(OLD.read_text().split())
    assert far - old == set(), "import public names, or the one module that the file is the unit test of"
    assert len(old) <= MOST_OLD, f"{OLD.name} only gets shorter: lower this number with it"
    assert old - far == set(), f"these import no more than they may: take them out of {OLD.name}"


def test_no_test_imports_from_another() -> None:
    found = {
        f"{path.relative_to(TESTS)}: {name}"
        for path in TESTS.rglob("test_*.py")
        if path.parent.name in SUITES
        for name in modules(path.read_text())
        if name == "tests" or (name.startswith("tests.") and ".test_" in name)
    }
    assert found == set(), "what several files use is in tests/support"


def test_what_a_file_imports_is_seen() -> None:
    assert private("import vram\nfrom vram import doctor, empty\ndef f():\n    from vram.keeper import messages") == {
        "vram.doctor",
        "vram.keeper",
    }
    assert private("from vram.errors import UsageError\nimport vram.testing.ledger, vram.lifetime") == {"vram.lifetime"}
