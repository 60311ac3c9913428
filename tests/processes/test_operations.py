"""docs/operations.md, as a new operator would use it: its commands are run, its files are there, and what it says that
is said is said."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.deadlines import SOON
from tests.support.deployments import APART, impossible
from tests.support.samples import in_turns

from vram.errors import NotFoundError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/operations.md").read_text()
SCRIPTS = Path(sys.executable).parent
# With whatever a block is marked; and the block.
BLOCKS = re.findall(r"^(?:<!-- not run: ([^>]*) -->\n)?```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
RUN = [block for mark, block in BLOCKS if not mark]
# A machine with nothing on it but this library: no keeper, no home, nothing in its temporary directory, a network of
# its own. The directory that is shared is this test's alone, and what is covered is covered in its namespaces only.
ENTER = """
set -e
ip link set lo up
mkdir "$1/home" "$1/tmp" "$1/run"
mount -t tmpfs tmpfs /dev/shm
export HOME="$1/home" TMPDIR="$1/tmp" XDG_RUNTIME_DIR="$1/run"
cd "$HOME"
shift
exec bash -eu -c "$1"
"""


@in_turns(4)
def test_every_command_of_the_page_works_for_a_new_operator(tmp_path: Path) -> None:
    why = impossible()
    for program in ("ip", "curl", "bash"):
        why = why or ("" if shutil.which(program) else f"there is no {program}")
    if why:
        pytest.skip(why)
    # One shell, so that what one block leaves running is there for the next one.
    script = "\n".join(f"echo '--- {number}'\n{block}" for number, block in enumerate(RUN)) + "\necho '--- end'\n"
    kept = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    environment = {**kept, "PATH": f"{SCRIPTS}{os.pathsep}/usr/sbin:/usr/bin:/sbin:/bin", "COLUMNS": "120"}
    done = subprocess.run(
        ["unshare", *APART, "sh", "-c", ENTER, "sh", str(tmp_path), script],
        env=environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    parts = re.split(r"^--- (\d+|end)$", done.stdout, flags=re.MULTILINE)
    said = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert len(said) == len(RUN) + 1
    assert "vram_keeper_entries 1.0" in done.stdout
    assert done.stdout.count("took over from pid") == 2  # by the limit, and by the upgrade
    assert "short-lived" in said[str(len(RUN) - 1)]
    assert "Traceback" not in done.stdout + done.stderr


def test_what_is_not_run_says_why_and_most_is_run() -> None:
    assert {mark for mark, _ in BLOCKS} <= {
        "",
        "needs the network",
        "needs systemd",
        "needs Docker",
        "needs Kubernetes",
        "needs what this machine may lack",
        "needs a terminal",
        "runs until it is ended",
    }
    assert len(RUN) >= len(BLOCKS) // 2


def test_files_and_links_of_the_page_are_there() -> None:
    for path in re.findall(r"(?:deploy|docs|tests)/[\w./*-]+", PAGE):
        assert list(ROOT.glob(path.rstrip("./"))), path
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
    }
    for target in re.findall(r"\]\(([^)]*)\)", PAGE):
        path, _, anchor = target.partition("#")
        assert not path or (ROOT / "docs" / path).exists(), target
        assert path or anchor in anchors, target


def test_what_the_page_quotes_is_what_is_said() -> None:
    """Each symptom is found by its text, so the text has to be the one that somebody sees."""
    said = "".join(path.read_text() for path in sorted((ROOT / "src/vram").rglob("*.py")))
    said = re.sub(r'"\s*\n\s*f?"', "", said)  # one message in several literals
    said = re.sub(r"\{[^{}]*\}", "...", said)
    table = PAGE[PAGE.index("## When something is wrong") :]
    symptoms = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| `")]
    quoted = [text for row in symptoms for text in re.findall(r"`([^`]*)`", row)]
    assert len(quoted) >= 12
    for text in quoted:
        for part in text.split("..."):
            assert part.strip() in said, text


# -- the dashboard ----------------------------------------------------------------------------------------------------
@pytest.fixture
def scraped() -> dict[str, set[str]]:
    """Every sample and the names of its labels, of a keeper with ceilings that has refused something."""
    pytest.importorskip("prometheus_client")
    import vram
    from vram.metrics import Exporter

    with vram.private_keeper(max_bytes="1GiB", max_entries=100) as keeper:
        with vram.zeros(8, device="host") as array:
            vram.publish("n", {"a": array}, keeper=keeper)
        with pytest.raises(NotFoundError):
            vram.attach("nobody", keeper=keeper)
        with contextlib.closing(Exporter("127.0.0.1", 0, keeper.path)) as exporter:
            found: dict[str, set[str]] = {}
            for family in exporter.collect():
                for sample in family.samples:
                    found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_dashboard_and_alerts_are_about_samples_that_there_are(scraped: dict[str, set[str]]) -> None:
    dashboard = json.loads((ROOT / "deploy/grafana/dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    alerts = re.findall(r"^\| `([^`]*vram_keeper[^`]*)`", PAGE[PAGE.index("Alerts worth a call") :], re.MULTILINE)
    assert (len(expressions), len(alerts)) >= (15, 4)
    for expression in expressions + alerts:
        names = re.findall(r"vram_\w+", expression)
        assert names
        assert set(names) <= set(scraped), expression
        given = {"instance", *(label for name in names for label in scraped[name])}  # instance is Prometheus's own
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            assert set(labels.split(", ")) <= given, expression
        for labels in re.findall(r"\{([^}]*)\}", expression):
            assert set(re.findall(r"(\w+)=", labels)) <= given, expression
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
