"""Whether this tree could be published: ``make release-check``.

Builds the sdist, and the wheel from that; looks at what is in them, at their metadata and at the README as a package
index shows it; then installs them into empty environments of several Pythons, with each extra, and runs there what the
README says, `vram --help` and `vram doctor --json`. Before that it looks at packages and pages in which something was
broken on purpose: a check that does not say so ends it.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")  # of keepachangelog.com
DEADLINE = 600.0  # seconds for one command
# Gigabytes of CUDA come with what an index has under the name of torch, which .ci/run tests with a build that has none,
# and of nixl. That and ray are run by hand: make test-nodes.
LEFT_OUT = ("nixl", "ray", "torch")


class Refused(Exception):
    """What keeps this tree from being published."""


# -- what is in the packages ----------------------------------------------------------------------------------------
def sources(root: Path) -> set[str]:
    """Return the files of the package in a tree, as a wheel names them."""
    found = (path.relative_to(root / "src") for path in (root / "src/vram").rglob("*") if path.is_file())
    return {path.as_posix() for path in found if "__pycache__" not in path.parts}


def wrong_in_wheel(wheel: Path, wanted: set[str], root: Path) -> list[str]:
    """Return what is wrong with the files of a wheel: what lacks, what differs, and what nobody asked for."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    about = {name for name in inside if name.split("/")[0].endswith(".dist-info")}
    said = [f"{name} is not in the wheel" for name in sorted(wanted - set(inside))]
    said += [f"{name} is in the wheel, and not in src" for name in sorted(set(inside) - wanted - about)]
    same = wanted & set(inside)
    said += [
        f"{name} is another one than in src" for name in same if inside[name] != (root / "src" / name).read_bytes()
    ]
    for needed in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
        if not any(name.endswith(f".dist-info/{needed}") for name in about):
            said.append(f"the wheel has no {needed}")
    return said


def wrong_in_sdist(sdist: Path, wanted: Iterable[str]) -> list[str]:
    """Return which files an sdist lacks."""
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    return [f"{name} is not in the sdist" for name in sorted(set(wanted) - inside)]


def metadata_of(wheel: Path) -> str:
    """Return the metadata of a wheel, with the README behind it."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


# -- what is read ---------------------------------------------------------------------------------------------------
def wrong_on_page(markdown: str, html: str) -> list[str]:
    """Return what of a page in Markdown did not become what it was meant to be.

    The renderer of an index takes anything; so it is asked whether each heading, table and block of code is one.
    """
    fences = re.findall(r"^(```|~~~)", markdown, re.MULTILINE)
    said = ["a block of code has no end"] if len(fences) % 2 else []
    text = re.sub(r"^```.*?(^```$|\Z)", "", markdown, flags=re.MULTILINE | re.DOTALL)
    for kind, written, shown in (
        ("headings", len(re.findall(r"^#{1,6} ", text, re.MULTILINE)), len(re.findall(r"<h[1-6]\b", html))),
        ("tables", len(re.findall(r"^\|[ :|-]*-[ :|-]*\|$", text, re.MULTILINE)), html.count("<table")),
        ("blocks of code", len(fences) // 2 + len(re.findall(r"\n\n(?: {4}.*\n)+", text)), html.count("<pre")),
    ):
        if written != shown:
            said.append(f"{written} {kind} are written, {shown} are shown")
    bare = re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
    found = re.search(r"```|\] ?\([^ )]*\)|^\|.*\|$|\*\*|(?:^|<p>)#{1,6}\w", bare, re.MULTILINE)
    if found:
        said.append(f"markup is shown as text: {found[0][:60]!r}")
    return said


def wrong_in_changes(text: str, version: str) -> list[str]:
    """Return what is not as keepachangelog.com has it: versions with their dates, and six kinds of changes."""
    said: list[str] = []
    versions: list[str] = []
    kinds: list[str] = []
    for line in text.splitlines():
        if line.startswith("## "):
            found = re.fullmatch(r"## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d|Unreleased)", line)
            if found is None:
                said.append(f"{line!r} is not '## [1.2.3] - YYYY-MM-DD', or Unreleased")
                continue
            if found[2] == "Unreleased" and versions:
                said.append(f"{line!r}: only the newest version may be unreleased")
            versions.append(found[1])
            kinds = []
        elif line.startswith("### "):
            kind = line[4:]
            if kind not in KINDS:
                said.append(f"{line!r} is none of {', '.join(KINDS)}")
            elif kind in kinds:
                said.append(f"{line!r} is there twice in {versions[-1]}")
            kinds.append(kind)
    numbers = [tuple(map(int, one.split("."))) for one in versions]
    if numbers != sorted(set(numbers), reverse=True):
        said.append("the newest version does not come first, or one is there twice")
    if versions[:1] != [version]:
        said.append(f"the newest version is {versions[:1]}, and the package's {version}")
    return said


def version_of(root: Path) -> str:
    """Return the version that a tree says it is."""
    for node in ast.parse((root / "src/vram/version.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise Refused("src/vram/version.py has no __version__")


def render(markdown: str) -> str:
    """Return a page as a package index shows it."""
    from readme_renderer import markdown as renderer

    html = renderer.render(markdown)
    if html is None:
        raise Refused("the README cannot be rendered")
    return str(html)


# -- what must be noticed ---------------------------------------------------------------------------------------------
def prove(shown: Callable[[str], str], root: Path = ROOT) -> list[str]:
    """Look at what was broken on purpose, and return what was not noticed."""
    missed = []
    page = (root / "README.md").read_text()
    end = page.index("```\n", page.index("```python") + 9)
    for what, broken in (
        ("a README whose program has no end", page[:end] + page[end + 4 :]),
        ("a README with a heading that is none", re.sub(r"^## (?=Try)", "##", page, flags=re.MULTILINE)),
        ("a README with a table that is none", page + "\n| a | b |\n|---|\n| 1 | 2 |\n"),
        ("a README with a link that is none", page.replace("](CHANGELOG.md)", "] (CHANGELOG.md)", 1)),
    ):  # fmt: skip
        if broken == page or not wrong_on_page(broken, shown(broken)):
            missed.append(what)
    version = version_of(root)
    changes = (root / "CHANGELOG.md").read_text()
    for what, broken in (
        ("a version without brackets", changes.replace(f"## [{version}]", f"## {version}", 1)),
        ("a kind of change that is none", changes.replace("### Added", "### News", 1)),
        ("changes of another version", changes.replace(f"## [{version}]", "## [99.0.0]", 1)),
    ):
        if broken == changes or not wrong_in_changes(broken, version):
            missed.append(what)
    wanted = sources(root)
    with tempfile.TemporaryDirectory() as directory:
        for what, left_out, added in (
            ("a module that is not in the wheel", "vram/entries/attach.py", None),
            ("a wheel without py.typed", "vram/py.typed", None),
            ("a wheel with a file of nobody's", None, "vram/left_over.py"),
        ):
            wheel = Path(directory) / "vram-0-py3-none-any.whl"
            _pack(wheel, root, wanted - {left_out} | ({added} if added else set()))
            if not wrong_in_wheel(wheel, wanted, root):
                missed.append(what)
        _pack(wheel, root, wanted)
        missed += [f"a whole wheel was refused: {said}" for said in wrong_in_wheel(wheel, wanted, root)]
    return missed


def _pack(wheel: Path, root: Path, names: Iterable[str]) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            file = root / "src" / name
            archive.writestr(name, file.read_bytes() if file.is_file() else b"")
        for about in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
            archive.writestr(f"vram-0.dist-info/{about}", "")


# -- what is run ------------------------------------------------------------------------------------------------------
def run(*command: str | Path, cwd: Path = ROOT, **more: str) -> str:
    """Run a command, and return what it printed; what it said goes into the error."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment | more, capture_output=True, text=True,
        timeout=DEADLINE, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if done.returncode:
        said = (done.stdout + done.stderr)[-3000:]
        raise Refused(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{said}")
    return done.stdout


def pythons(wanted: Sequence[str]) -> dict[str, str]:
    """Return an interpreter for each version that the package promises; a name in PATH may be a shim that complains."""
    found: dict[str, str] = {}
    for version in wanted:
        installed = sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python3"))
        for candidate in (sys.executable, f"python{version}", *map(str, installed)):
            asked = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
            try:
                if run(candidate, "-c", asked).strip() == version:
                    found[version] = candidate
                    break
            except (OSError, Refused):
                continue
        else:
            raise Refused(f"Python {version}, which pyproject.toml promises, is not on this machine")
    return found


def try_out(name: str, python: str, package: Path, extra: str, where: Path) -> str:
    """Install a package into an empty environment, use it there as its README says, and return what that took."""
    begin = time.monotonic()
    home = where / name
    run(python, "-m", "venv", "--without-pip", "--clear", home)
    inside = home / "bin/python"
    wanted = f"{package}[{extra}]" if extra else str(package)
    run(sys.executable, "-m", "pip", "--python", inside, "install", "-q", "--no-compile", wanted)
    run(sys.executable, "-m", "pip", "--python", inside, "check")
    installed = time.monotonic() - begin
    there = run(inside, "-c", "import vram; print(vram.__version__, vram.__file__)", cwd=home).split()
    if there[0] != version_of(ROOT) or not there[1].startswith(str(home)):
        raise Refused(f"{name}: what was installed is {there}")
    if run(inside, "-c", "import importlib.util as u; print(u.find_spec('torch'))", cwd=home).strip() != "None":
        raise Refused(f"{name}: torch came with it")
    if "publish-file" not in run(home / "bin/vram", "--help", cwd=home):
        raise Refused(f"{name}: vram --help does not name its commands")
    if not json.loads(run(home / "bin/vram", "doctor", "--json", cwd=home))["findings"]:
        raise Refused(f"{name}: vram doctor found nothing")
    # As a test runs the README. That what it only names exists, and can be pasted, does not depend on an extra.
    run(
        sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "tests/processes/test_readme.py",
        *(("-k", "readme_works or readme_work") if extra else ()), VRAM_README_PYTHON=str(inside),
    )  # fmt: skip
    shutil.rmtree(home)
    return f"{name}: installed in {installed:.1f} s, {time.monotonic() - begin:.1f} s in all"


def check(out: Path, *, jobs: int, only: Sequence[str]) -> None:
    """Do all of it."""
    missed = prove(render)
    if missed:
        raise Refused(f"not noticed: {'; '.join(missed)}")
    print("what was broken on purpose was noticed")
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = settings["project"]
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out / "dist", ".")
    (wheel,), (sdist,) = out.glob("dist/*.whl"), out.glob("dist/*.tar.gz")
    said = wrong_in_wheel(wheel, sources(ROOT), ROOT)
    beside = {"README.md", "CHANGELOG.md", "Makefile", "benchmarks/__main__.py"}
    said += wrong_in_sdist(sdist, beside | {f"src/{name}" for name in sources(ROOT)})
    said += wrong_on_page(page := metadata_of(wheel).partition("\n\n")[2], render(page))
    said += wrong_in_changes((ROOT / "CHANGELOG.md").read_text(), version_of(ROOT))
    if said:
        raise Refused("\n".join(said))
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    print(
        f"built, whole, and read: {wheel.name} {wheel.stat().st_size} bytes, {sdist.name} {sdist.stat().st_size} bytes"
    )
    local = sorted(set(re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", page)))
    if local and "urls" not in project:
        print(f"note: {len(local)} links of the README lead into the tree; an index shows them, and they lead nowhere")
    promised = [found[1] for one in project["classifiers"] if (found := re.search(r":: (3\.\d+)$", one))]
    extras = [extra for extra in project["optional-dependencies"] if extra not in LEFT_OUT]
    print(f"extras: {', '.join(extras)}; left out: {', '.join(LEFT_OUT)}")
    with tempfile.TemporaryDirectory(prefix="vram-release-") as directory:
        where = Path(directory)
        due = []
        for version, python in pythons(promised).items():
            due += [(f"{version}-{extra or 'alone'}", python, wheel.resolve(), extra) for extra in ("", *extras)]
        due.append((f"{promised[0]}-sdist", pythons(promised[:1])[promised[0]], sdist.resolve(), ""))
        due = [one for one in due if not only or any(word in one[0] for word in only)]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            running = [pool.submit(try_out, *one, where) for one in due]
            failed = []
            for future in concurrent.futures.as_completed(running):
                try:
                    print(future.result(), flush=True)
                except (Refused, subprocess.TimeoutExpired) as error:
                    failed.append(str(error))
    if failed:
        raise Refused("\n".join(failed))


def main() -> None:
    """Read the arguments, and end with status 1 for what is refused."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/release", help="where the packages are put")
    parser.add_argument("--jobs", type=int, default=2, help="how many environments at once")
    parser.add_argument("only", nargs="*", help="only the environments with one of these in their names, as 3.12-alone")
    given = parser.parse_args()
    try:
        check(given.out.resolve(), jobs=given.jobs, only=given.only)
    except Refused as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
