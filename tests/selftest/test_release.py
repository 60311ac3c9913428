"""What ``make release-check`` looks at before anything is published: each thing that was broken is named."""

from __future__ import annotations

import importlib.util
import re
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci/release.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["release"]
    return module


def pack(into: Path, names: set[str], **changed: bytes) -> Path:
    """A wheel with those files of src, some of them changed."""
    wheel = into / "vram-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.writestr(name, changed.get(Path(name).stem, (ROOT / "src" / name).read_bytes()))
        for about in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
            archive.writestr(f"vram-1.dist-info/{about}", "Name: vram\n\nhello\n")
    return wheel


def test_a_whole_wheel_is_whole(release: ModuleType, tmp_path: Path) -> None:
    wanted = release.sources(ROOT)
    assert {"vram/__init__.py", "vram/py.typed", "vram/cli/app.py"} <= wanted
    wheel = pack(tmp_path, wanted)
    assert release.wrong_in_wheel(wheel, wanted, ROOT) == []
    assert release.metadata_of(wheel).endswith("hello\n")


def test_a_module_that_a_wheel_lacks_is_named(release: ModuleType, tmp_path: Path) -> None:
    wanted = release.sources(ROOT)
    wheel = pack(tmp_path, wanted - {"vram/entries/ring.py"})
    assert release.wrong_in_wheel(wheel, wanted, ROOT) == ["vram/entries/ring.py is not in the wheel"]


def test_what_an_sdist_lacks_is_named(release: ModuleType, tmp_path: Path) -> None:
    with tarfile.open(sdist := tmp_path / "vram-1.tar.gz", "w:gz") as archive:
        archive.add(ROOT / "README.md", "vram-1/README.md")
    assert release.wrong_in_sdist(sdist, ["README.md"]) == []
    assert release.wrong_in_sdist(sdist, ["README.md", "LICENSE"]) == ["LICENSE is not in the sdist"]


PAGE = "# One\n\n| a |\n|---|\n| b |\n\n```python\n# no heading\n```\n\n    make it\n\n[x](y)\n"
SHOWN = (
    "<h1>One</h1><table><tr><td>b</td></tr></table><pre># no heading</pre>"
    '<pre><code>make it\n</code></pre><p><a href="y">x</a></p>'
)


@pytest.mark.parametrize(
    ("page", "shown", "said"),
    [
        (PAGE, SHOWN, []),
        (PAGE.replace("```\n\n", "\n"), SHOWN.replace("</pre><pre>", ""), ["a block of code has no end"]),
        (PAGE, SHOWN.replace("<table>", "| a |\n"), ["1 tables are written, 0 are shown"]),
        (PAGE, SHOWN.replace("h1>", "p>"), ["1 headings are written, 0 are shown"]),
        (PAGE, SHOWN + "<p>[x] (y)</p>", ["markup is shown as text: '] (y)'"]),
        (PAGE, SHOWN + "<p>##Two</p>", ["markup is shown as text: '<p>##T'"]),
        (PAGE, SHOWN + "<code>**not bold**</code>", []),
    ],
)
def test_a_page_that_is_not_shown_as_written_is_named(
    release: ModuleType, page: str, shown: str, said: list[str]
) -> None:
    found = release.wrong_on_page(page, shown)
    assert bool(found) == bool(said), found
    for words in said:
        assert any(words in one for one in found), found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("## [1.2.0] - Unreleased\n\n### Added\n### Fixed\n\n## [1.1.0] - 2026-01-02\n### Added\n", None),
        ("## 1.2.0\n", "is not '## [1.2.3] - YYYY-MM-DD'"),
        ("## [1.2.0] - soon\n", "is not '## [1.2.3] - YYYY-MM-DD'"),
        ("## [1.2.0] - Unreleased\n### News\n", "'### News' is none of Added"),
        ("## [1.2.0] - Unreleased\n### Added\n### Added\n", "is there twice"),
        ("## [1.2.0] - 2026-01-02\n## [1.1.0] - Unreleased\n", "only the newest version may be unreleased"),
        ("## [1.2.0] - 2026-01-02\n## [1.3.0] - 2026-01-01\n", "the newest version does not come first"),
        ("## [1.1.0] - 2026-01-02\n", "the newest version is ['1.1.0'], and the package's 1.2.0"),
    ],
)
def test_changes_that_are_in_another_form_are_named(release: ModuleType, text: str, said: str | None) -> None:
    found = release.wrong_in_changes(text, "1.2.0")
    assert found == [] if said is None else any(said in one for one in found), found


def test_the_changes_of_this_tree_have_their_form(release: ModuleType) -> None:
    assert release.wrong_in_changes((ROOT / "CHANGELOG.md").read_text(), release.version_of(ROOT)) == []


def test_every_python_that_is_promised_is_named_in_the_policy(release: ModuleType) -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    policy = (ROOT / "docs/versioning.md").read_text()
    promised = re.findall(r"Python :: (3\.\d+)", settings)
    assert promised
    for version in promised:
        assert version in policy
    for extra in re.findall(r'"(cuda-bindings>=[^"]*)"', settings.partition("[dependency-groups]")[0]):
        assert f"`{extra}`" in policy
