"""The benchmarks run, leave nothing behind (the ledger, after each test here) and say what they are supposed to say.

Never how long anything took: that is for people to read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from benchmarks import GPU_NAMES, NAMES, run_benchmarks
from tests.support import samples
from tests.support.places import short_directory

from vram import bench
from vram import driver as drivers
from vram.bench.machine import fitting
from vram.bench.measure import Figure, Row, in_turns
from vram.errors import CapacityError, UsageError
from vram.spec import HOST, Location

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = (sys.executable, "-c", "import vram.cli; vram.cli.main()", "bench")
IN_A_CLONE = (sys.executable, "-m", "benchmarks")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


def check(results: list[dict[str, Any]]) -> None:
    """Check what programs read: figures are positive, ratios name what they are to, targets have verdicts."""
    for result in results:
        assert result["title"]
        assert result["rows"] or any("needs root" in n or "not installed" in n for n in result["notes"])
        for row in result["rows"]:
            place = f"{result['name']}: {row['case']}"
            figure = row["figure"]
            # A difference may be anything.
            is_difference = row["case"].startswith("each further segment") or row["case"].endswith(
                ("above it", "in pairs", "left behind", "growth of memory")
            )
            assert figure["median"] > 0 or is_difference, place
            assert figure["low"] <= figure["median"] <= figure["high"], place
            assert figure["unit"], place
            assert figure["rounds"] >= 1, place
            assert (row["ratio"] is None) == (row["against"] == ""), place
            assert row["ratio"] is None or row["ratio"] > 0, place
            assert (row["target"] == "") == (row["reached"] is None), place
        rows = [(row["case"], row["against"]) for row in result["rows"]]
        assert len(set(rows)) == len(rows), result["name"]
        cases = {case for case, _ in rows}
        assert all(against in cases for _, against in rows if against), result["name"]
        assert all(isinstance(note, str) for note in result["notes"])


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that other users may enter, and all above it, too."""
    with short_directory() as place:
        os.chmod(place, 0o711)
        yield Path(place)


@pytest.mark.slow
def test_everything_runs_and_leaves_nothing_behind(open_place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target of the table has its rows; files, processes, keepers, sockets and memory are gone afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(open_place))
    before = os.sched_getaffinity(0)
    results: list[dict[str, Any]] = msgspec.to_builtins(run_benchmarks([], quick=True, progress=False))
    check(results)
    assert [result["name"] for result in results] == list(NAMES)
    targets = {result["name"]: sum(row["target"] != "" for row in result["rows"]) for result in results}
    wanted = {
        "handover": 1,
        "queues": 2,
        "attach": 6,
        "grow": 3,
        "publish-file": 2,
        "share": 2,
        "workers": 1,
        "engine": 2,
        "asleep": 5,
        "start": 3,
        "first-use": 7,
        "scale": 2,
        "watched": 3,
    }
    assert all(targets[name] >= count for name, count in wanted.items()), targets
    # What multiprocessing makes for itself, where torch hands tensors over by it, goes when the process ends.
    assert [path for path in open_place.iterdir() if not path.name.startswith("pymp-")] == []
    assert os.sched_getaffinity(0) == before
    assert "VRAM_KEEPER" not in os.environ or not os.environ["VRAM_KEEPER"].startswith(str(open_place))


@pytest.mark.slow
@pytest.mark.standin
def test_everything_runs_on_a_gpu_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stand-in: the rows are there, rivals that are not say so, and the driver has everything back."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gpu = Location("cuda", 0)
    free = drivers.get(gpu).mem_info(gpu)
    found = run_benchmarks([], quick=True, progress=False, device="cuda:0")
    results: list[dict[str, Any]] = msgspec.to_builtins(found)
    check(results)
    assert [result["name"] for result in results] == list(GPU_NAMES)
    targets = {result["name"]: [row["case"] for row in result["rows"] if row["target"]] for result in results}
    assert {name: len(cases) for name, cases in targets.items()} == {
        "calls": 9,
        "grow": 4,
        "attach": 3,
        "handover": 2,
        "share": 8,
        "engine": 13,
        "asleep": 5,
        "weights": 2,
        "keeper": 2,
        "allreduce": 0,
        "decoder": 0,
        "pairs": 0,
    }
    for name in ("allreduce", "decoder"):
        (only,) = (result for result in results if result["name"] == name)
        assert any("installed" in note for note in only["notes"]), only["notes"]
    for result in results:
        assert "stand-in 0 (cuda:0)" in result["machine"]
        assert "cuda-bindings" in result["machine"].partition("<")[0]
    by_name = {result["name"]: result for result in results}
    for name in ("grow", "handover"):
        assert any("torch did not run" in note for note in by_name[name]["notes"])
    most = {row["case"]: row for row in by_name["grow"]["rows"] if row["case"].endswith("most memory")}
    assert most["Array.resize, most memory"]["reached"] is True
    assert most["cuMemAlloc and copy, most memory"]["figure"]["median"] > 1.5
    keeper = by_name["keeper"]["rows"]
    assert keeper[-1]["reached"] is True, by_name["keeper"]["notes"]
    assert list(tmp_path.iterdir()) == []
    assert drivers.get(gpu).mem_info(gpu) == free


@samples.in_turns(5)
@pytest.mark.parametrize("name", samples.some([*NAMES], 2))
def test_a_benchmark_runs_and_leaves_nothing_behind(name: str) -> None:
    results: list[dict[str, Any]] = msgspec.to_builtins(run_benchmarks([name], quick=True, progress=False))
    check(results)
    assert [result["name"] for result in results] == [name]


@samples.in_turns(5)
@pytest.mark.standin
def test_the_command_measures_the_device_that_it_is_told() -> None:
    done = run(*IN_A_CLONE, "--device", "cuda:1", "--quick", "calls")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("vram stand-in 1 (cuda:1), ")
    assert "import: vram.driver, above it" in done.stdout
    done = run(*IN_A_CLONE, "--device", "cuda:1", "publish-file")
    assert done.returncode == 1
    assert "benchmark of cuda:1 is called 'publish-file'" in done.stderr
    help_ = run(*IN_A_CLONE, "--help").stdout
    assert all(what in help_ for what in (*NAMES.values(), *GPU_NAMES.values()))


def test_sizes_are_halved_until_they_fit() -> None:
    notes: list[str] = []
    assert fitting(HOST, 4 << 20, 2, 1.0, notes) == 4 << 20
    assert notes == []
    free, _ = drivers.get(HOST).mem_info(HOST)
    nbytes = fitting(HOST, 1 << 50, 4, 1.5, notes)
    assert nbytes % (2 << 20) == 0
    assert nbytes * 4 * 1.5 <= free * 1.2
    assert "scaled down from 4096 TiB" in notes[0]
    with pytest.raises(CapacityError, match="at the least"):
        fitting(HOST, 1 << 20, 1 << 40, 1.0, notes)


@samples.in_turns(5)
def test_the_command_prints_json_for_programs_and_a_table_for_people() -> None:
    done = run(*IN_A_CLONE, "start", "--quick", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    results = json.loads(done.stdout)
    check(results)
    assert [result["name"] for result in results] == ["start"]
    done = run(*INSTALLED, "publish-file", "--quick")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "at least 0.9x" in done.stdout
    assert "publish-file ..." in done.stderr


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"'pot'.*handover.*scale"):
        run_benchmarks(["publish-file", "pot"], quick=True, progress=False)
    with pytest.raises(UsageError, match=r"'ring'; there are handover, .*: run `python -m benchmarks ring` in its dir"):
        bench.run_benchmarks(["publish-file", "ring"], quick=True, progress=False)
    with pytest.raises(UsageError, match="run `python -m benchmarks calls --device cuda:1`"):
        bench.run_benchmarks(["calls"], quick=True, progress=False, device="cuda:1")


def test_a_ratio_is_taken_of_medians_and_held_against_the_target() -> None:
    rival = Row("theirs", Figure.of([1.0, 2.0, 30.0], "us"))
    figure = Figure.of([0.000_003, 0.000_005, 0.000_004], "us", scale=1e6)
    assert (figure.low, figure.median, figure.high) == pytest.approx((3, 4, 5))
    within = Row.held("ours", figure, rival, at_most=2.01)
    assert (within.ratio, within.against, within.reached) == (pytest.approx(2.0), "theirs", True)
    assert Row.held("ours", figure, rival, at_most=1.5).reached is False
    assert Row.held("ours", figure, rival, at_least=0.9).reached is True
    assert Row.held("ours", figure, rival, at_least=2.1).reached is False
    plain = Row.held("ours", figure, rival)
    assert (plain.target, plain.reached) == ("", None)
    assert Row.limited("ours", figure, at_most=5).target == "at most 5 us"
    assert Row.limited("ours", figure, at_most=3).reached is False


def test_cases_take_turns_and_warming_up_does_not_count() -> None:
    said: list[str] = []
    numbers = iter(range(100))

    def case(name: str) -> float:
        said.append(name)
        return float(next(numbers))

    values = in_turns({"a": lambda: case("a"), "b": lambda: case("b")}, 2, warm=1)
    assert said == ["a", "b", "a", "b", "a", "b"]
    assert values == {"a": [2.0, 4.0], "b": [3.0, 5.0]}
    said.clear()
    in_turns({"a": lambda: case("a"), "b": lambda: case("b")}, 2, warm=1, both_ways=True)
    assert said == ["a", "b", "b", "a", "a", "b"], "nobody is always the first"
    said.clear()
    numbers = iter(range(100))
    assert in_turns({"a": lambda: case("a")}, 1, warm=0, burst=3) == {"a": [2.0]}
    assert len(said) == 4
