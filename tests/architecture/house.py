"""The house rules that neither ruff, mypy nor import-linter knows.

Each check takes a tree, so that a selftest can plant a bug in a copy and see it caught; each returns what is wrong, one
line a finding, with the place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 700
VAGUE = frozenset({"utils", "util", "helpers", "helper", "common", "core", "base", "misc", "types"})

_OF_KINDS = ("vram/driver/", "vram/memory/kinds.py", "vram/sharing/descriptor.py")

_NUMBER = re.compile(r"(?<![A-Za-z0-9])([IS]\d{1,2})(?![A-Za-z0-9])")
_NUMBER_IN_NAME = re.compile(r"\b(?:def|class) [Tt]est\w*?_([is]\d{1,2})(?=[_(:])")
_HEADING = re.compile(r"^### ([IS]\d+)\b.*$", re.MULTILINE)


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the path below ``src`` and the file of every module of the package."""
    source = root / "src"
    for path in sorted(source.rglob("*.py")):
        yield path.relative_to(source).as_posix(), path


def vague_names(root: Path) -> list[str]:
    """Name the modules and packages whose name says nothing about what is in them."""
    return [name for name, _ in modules(root) if VAGUE & set(name.removesuffix(".py").split("/"))]


def kinds_named(root: Path, reasons: Mapping[str, str]) -> list[str]:
    """Name the modules that decide by a handle kind, where its row says what it can; and reasons that nothing needs."""
    found = {
        name
        for name, path in modules(root)
        if re.search(r"\bHandleKind\.(?!NONE\b)[A-Z]", path.read_text()) and not name.startswith(_OF_KINDS)
    }
    return sorted(found.symmetric_difference(reasons))


def too_long(root: Path, reasons: Mapping[str, str]) -> list[str]:
    """Name the modules over the limit that have no reason, and the reasons that nothing needs any more."""
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules(root)}
    long = {name for name, lines in lengths.items() if lines > MAX_LINES}
    given = {name for name, reason in reasons.items() if reason.strip()}
    return [
        *(f"{name}: {lengths[name]} lines and no reason to be over {MAX_LINES}" for name in sorted(long - given)),
        *(f"{name}: a reason to be over {MAX_LINES} lines, but it is not" for name in sorted(given - long)),
    ]


def undocumented(root: Path) -> list[str]:
    """Name the public classes, functions and methods without a docstring.

    A method of a driver may leave its words to the contract it implements, of the same name.
    """
    promised = set()
    contracts = {root / "src/vram/driver/protocol.py"}
    for contract in contracts:
        if contract.exists():
            classes = [node for node in ast.parse(contract.read_text()).body if isinstance(node, ast.ClassDef)]
            promised |= {member.name for cls in classes for member in cls.body if isinstance(member, ast.FunctionDef)}
    found = []
    for name, path in modules(root):
        tree = ast.parse(path.read_text())
        if ast.get_docstring(tree) is None:
            found.append(f"{name}: the module")
        inherited = promised if name.startswith("vram/driver/") and path not in contracts else set()
        found += [f"{name}:{line}: {what}" for line, what in _bare(tree, "", inherited)]
    return found


def _bare(scope: ast.Module | ast.ClassDef, prefix: str, inherited: set[str]) -> Iterator[tuple[int, str]]:
    for node in scope.body:
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            if ast.get_docstring(node) is None:
                yield node.lineno, f"class {prefix}{node.name}"
            yield from _bare(node, f"{prefix}{node.name}.", inherited)
            continue
        decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
        # A test's name is its sentence; an overload and a setter are documented where the thing itself is.
        spoken_for = node.name.startswith("test_") or decorators & {"overload", "setter", "deleter", "override"}
        if ast.get_docstring(node) is None and not spoken_for and not (prefix and node.name in inherited):
            yield node.lineno, f"{prefix}{node.name}()"


def endings(root: Path) -> list[str]:
    """Name what could end a user's process (I11): exits, aborts and asserts outside programs and suites."""
    found = []
    for name, path in modules(root):
        if name.startswith(("vram/testing/", "vram/cli/")) or name.endswith("/__main__.py") or name in _PROGRAMS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                found.append(f"{name}:{node.lineno}: assert")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in _ENDINGS:
                found.append(f"{name}:{node.lineno}: {ast.unparse(node.func)}")
            elif isinstance(node, ast.Name) and node.id == "SystemExit" and isinstance(node.ctx, ast.Load):
                found.append(f"{name}:{node.lineno}: SystemExit")
    return found


# A program by another name: what starts keepers is run as a file.
_PROGRAMS = ("vram/keeper/guardian.py",)
_ENDINGS = frozenset(
    {"sys.exit", "os._exit", "os.abort", "os.kill", "os.killpg", "signal.raise_signal", "exit", "quit"}
)


def unsafe_listings(root: Path) -> list[str]:
    """Name what lists a dictionary in steps between which a finalizer may change it (I3): see vram/lifetime.py."""
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, path in modules(root)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tuple" and _is_of_a_dict(node.args)
    ]


def _is_of_a_dict(arguments: list[ast.expr]) -> bool:
    call = arguments[0] if arguments else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("items", "keys", "values")
        and not ast.unparse(call.func.value).endswith(".copy()")
    )


def circles(root: Path) -> list[str]:
    """Name the circles in which modules of one room import each other, in functions included. A name that only a type
    checker needs is no import: a protocol in its place would say the same twice.

    One line a circle: the room, and its modules in the order of their names.
    """
    known = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for name, path in modules(root)}
    graph = {name: _imported(name, path, known) for name, path in known.items()}
    found = []
    left = dict(graph)
    while left:
        name = next(iter(left))
        around = _reached(graph, name)
        circle = sorted(other for other in around if name in _reached(graph, other)) if name in around else []
        for member in circle or [name]:
            left.pop(member, None)
        if len(circle) > 1:
            found.append(f"{'.'.join(circle[0].split('.')[:2])}: {', '.join(circle)}")
    return found


def _imported(name: str, path: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports from: the package itself only where a name is its own."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    tree = ast.parse(path.read_text())
    ignored = {
        id(one)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for one in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in ignored:
            continue
        parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*parts, *([node.module] if node.module else [])])
        for alias in node.names:
            target = f"{base}.{alias.name}"
            found.add(target if target in known else base)
    return found & known.keys() - {name}


def _reached(graph: Mapping[str, set[str]], name: str) -> set[str]:
    """Return all that can be reached from a module, itself only if it is on a circle."""
    found: set[str] = set()
    ahead = list(graph[name])
    while ahead:
        one = ahead.pop()
        if one not in found:
            found.add(one)
            ahead += graph[one]
    return found


def driver_errors(root: Path, reasons: Mapping[str, str]) -> list[str]:
    """Name what is no driver and makes an error of a driver, and the reasons that nothing needs any more."""
    made = {
        name
        for name, path in modules(root)
        if not name.startswith("vram/driver/")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _DRIVER_ERRORS
    }
    given = {name for name, reason in reasons.items() if reason.strip()}
    return [
        *(f"{name}: makes an error of a driver, and is none" for name in sorted(made - given)),
        *(f"{name}: a reason to make errors of a driver, but it makes none" for name in sorted(given - made)),
    ]


_DRIVER_ERRORS = frozenset({"DriverError", "OutOfMemoryError", "AddressSpaceError", "DeviceLostError"})


def invariants(text: str) -> dict[str, str]:
    """Read the sections of the document of invariants: number to text."""
    parts = _HEADING.split(text)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def citations(root: Path) -> dict[str, set[str]]:
    """Return for each number the test files that cite it, in a name or in words.

    The contracts are tests too. The checks of the checks are not: they cite numbers as examples.
    """
    cited: dict[str, set[str]] = {}
    contracts = ("tests/contracts", "src/vram/testing")
    files = [
        *(root / "tests").rglob("test_*.py"),
        *(path for place in contracts for path in (root / place).glob("*.py")),
    ]
    for path in files:
        place = path.relative_to(root).as_posix()
        if place.startswith("tests/selftest/test_house"):
            continue
        text = path.read_text()
        for number in {*_NUMBER.findall(text), *(n.upper() for n in _NUMBER_IN_NAME.findall(text))}:
            cited.setdefault(number, set()).add(place)
    return cited


def unkept(root: Path) -> list[str]:
    """Name the invariants that no test cites, that no module keeps, or whose entry points to what is not there."""
    found = []
    cited = citations(root)
    sections = invariants((root / "docs/invariants.md").read_text())
    for number in (*(f"I{n}" for n in range(1, 15)), *(f"S{n}" for n in range(1, 12))):
        if number not in sections:
            found.append(f"{number}: not in docs/invariants.md")
    for number, text in sections.items():
        if not cited.get(number):
            found.append(f"{number}: no test cites it")
        keepers = _listed(text, "Kept by")
        tests = _listed(text, "Cited by")
        if not keepers:
            found.append(f"{number}: no 'Kept by' line")
        found += [f"{number}: kept by {name}, which does not exist" for name in keepers if not _there(root, name)]
        found += [f"{number}: {name} does not cite it" for name in tests if name not in cited.get(number, ())]
    return found


def _listed(text: str, label: str) -> list[str]:
    line = re.search(rf"^{label}: (.*)$", text, re.MULTILINE)
    return re.findall(r"`([^`]+)`", line[1]) if line else []


def _there(root: Path, name: str) -> bool:
    return (root / "src/vram" / name).exists()


def broken_links(root: Path) -> list[str]:
    """Name the relative links in the documents that lead nowhere."""
    found = []
    for path in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
            if "://" not in target and not target.startswith("mailto:") and not (path.parent / target).exists():
                found.append(f"{path.relative_to(root)}: {target}")
    return found


def unmapped(root: Path) -> list[str]:
    """Name the paths in the map of the rooms that do not exist, and those said to come that are there.

    The map is the table of CONTRIBUTING.md that begins with "the line...". A path begins in ``src/vram``, or beside the
    one before it in its cell.
    """
    text = (root / "CONTRIBUTING.md").read_text()
    table = re.search(r"^\| the line\.\.\. \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    if table is None:
        return ["CONTRIBUTING.md: no table that says where a line belongs"]
    found = []
    for row in table[1].splitlines():
        beside = root / "src/vram"
        for name, to_come in re.findall(r"`([\w/]+(?:\.py|/))`( \(to come\))?", row.strip("|").rpartition("|")[2]):
            place = next((at for at in (root / "src/vram" / name, beside / name) if at.exists()), None)
            if place is not None:
                beside = place if place.is_dir() else place.parent
            if to_come and place is not None:
                found.append(f"CONTRIBUTING.md: {name} is said to come, and is there")
            elif not to_come and place is None:
                found.append(f"CONTRIBUTING.md: {name} is on the map and does not exist")
    return found


def unknown_verbs(root: Path) -> list[str]:
    """Name the ``make`` verbs that the documents promise and the Makefile lacks."""
    verbs = set(re.findall(r"^([a-z][a-z-]*):", (root / "Makefile").read_text(), re.MULTILINE))
    return [
        f"{path.relative_to(root)}: make {verb}"
        for path in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
        for verb in re.findall(r"(?:^|`) *make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE)
        if verb not in verbs
    ]


def list_citations(root: Path) -> None:
    """Rewrite the lines of the document of invariants that say which tests cite them: those that do so most."""
    path = root / "docs/invariants.md"
    text = path.read_text()
    cited = citations(root)
    for number, section in invariants(text).items():
        files = sorted(cited.get(number, ()), key=lambda name: (-(root / name).read_text().count(number), name))
        line = ", ".join(f"`{name}`" for name in files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")
        listed = re.sub(r"^Cited by: .*(?:\n.+)*", f"Cited by: {line or 'no test yet'}", section, flags=re.MULTILINE)
        text = text.replace(section, listed)
    path.write_text(text)


if __name__ == "__main__":
    list_citations(ROOT)
