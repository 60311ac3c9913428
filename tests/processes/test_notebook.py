"""The notebook of the documentation, in a real kernel: each cell twice, interrupted, the kernel killed, restarted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.deadlines import SOON, until
from tests.support.drawn_maps import check_html, check_svg

import vram

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs/notebooks/outlives.ipynb"
HTML, PLAIN = "text/html", "text/plain"


@pytest.fixture(scope="module")
def runs(running_keeper: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What its cells showed: run twice, interrupted, after that, and after a restart."""
    home = str(tmp_path_factory.mktemp("home"))
    environment = {
        **os.environ,
        **dict.fromkeys(("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"), home),
        "JUPYTER_PLATFORM_DIRS": "1",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "VRAM_KEEPER": running_keeper,
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1].joinpath("support", "notebook_kernel.py")), str(NOTEBOOK)],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=5 * SOON,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_cell_runs_twice_and_again_after_an_interrupt_and_a_restart(runs: list[dict[str, Any]]) -> None:
    first, second, interrupted, third, restarted = runs
    for run in (first, second, third, restarted):
        assert not [cell for cell, outputs in run.items() if any("error" in one for one in outputs)]
    assert interrupted["interrupted"] == [{"stream": "begun\n"}, {"error": "KeyboardInterrupt"}]


def test_it_shows_tables_and_a_drawing(runs: list[dict[str, Any]]) -> None:
    for run in (runs[0], runs[-1]):
        assert "2 arrays" in check_html(run["attach"][0][HTML]).text
        assert "100000 x 64" in check_html(run["attach"][0][HTML]).text
        assert "elements" in check_html(run["array"][0][HTML]).text
        assert "notebook/vectors" in check_html(run["entries"][0][HTML]).text
        # Two: a cell that was run twice showed two leases, and IPython's `Out` keeps what was shown.
        assert "2 leases" in check_html(run["holders"][0][HTML]).text
        assert "asleep, its bytes nowhere" in check_html(run["rows"][0][HTML]).text
        check_svg(run["draw"][0][HTML])
        assert run["numpy"][0][PLAIN] == "(10, 64)"


def test_what_was_published_is_there_after_the_kernel_was_killed(runs: list[dict[str, Any]], kept: vram.Keeper) -> None:
    """The same version: nothing was loaded again. Neither the killed kernel nor the last one holds anything now."""
    assert runs[0]["attach"][0][PLAIN] == runs[-1]["attach"][0][PLAIN]
    until(lambda: not vram.holders(), what="the end of the last kernel's lease")
    assert [one.name for one in vram.list_entries()] == ["notebook/vectors"]


def test_it_is_committed_without_what_it_showed() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert {cell["execution_count"] for cell in cells if cell["cell_type"] == "code"} == {None}
    assert not [cell for cell in cells if cell.get("outputs")]
    assert NOTEBOOK.stat().st_size < 20_000
