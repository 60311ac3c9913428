"""Maps of entries and of other processes: what a keeper and the system say, and the command that draws them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.connections import close_clients
from tests.support.deadlines import SOON
from tests.support.drawn_maps import EVIL, check_html, check_svg
from tests.support.samples import in_turns, some

import vram
from vram.errors import NotFoundError
from vram.typing import Published

MIB = 1 << 20
VRAM = Path(sys.executable).with_name("vram")
HOLDS = """
import os, sys, vram
lease = vram.attach("model")
view = lease["w"].numpy()
mine = vram.zeros(MIB, "uint8", device="host", capacity=8 * MIB)
vram.publish("theirs", {"x": vram.zeros(5, "uint8", device="host")})
print(os.getpid(), flush=True)
sys.stdin.read()
""".replace("MIB", str(MIB))
# Of a name, all that no name of an array may have: control characters and halves of pairs stay in metadata's way.
EVIL_NAME = EVIL.replace("\ud800", "")


@pytest.fixture
def model(kept: vram.Keeper) -> Published:
    """An entry whose arrays and metadata are called what nobody should call them."""
    arrays = {"w": np.ones((3, MIB), "uint8"), EVIL_NAME: np.zeros(7, "float32")}
    return vram.publish("model", arrays, meta={EVIL_NAME: EVIL_NAME, "git": "abc"})


@pytest.fixture
def holder(model: Published) -> Iterator[int]:
    """The PID of a process that holds it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(SOON)


def command(*arguments: object, status: int = 0) -> str:
    """Run ``vram map`` and return what it said."""
    done = subprocess.run(
        [VRAM, "map", *map(str, arguments)], capture_output=True, text=True, timeout=SOON, env=os.environ
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


# -- entries -----------------------------------------------------------------------------------------------------------
def test_an_entry_is_drawn_with_its_arrays_its_chunks_and_its_holders(model: Published, holder: int) -> None:
    (lane,) = vram.memory_map("model").lanes
    entry = vram.entry("model")
    assert {span.label: span.nbytes for span in lane.rows["arrays"]} == {"w": 3 * MIB, EVIL_NAME: 28}
    assert [span.nbytes for span in lane.rows["chunks"]] == list(entry.versions[0].sizes)
    assert sum(span.nbytes for span in lane.rows["chunks"]) == lane.nbytes
    assert any(f"held by pid {holder}" in fact for fact in lane.facts)


def test_whatever_an_entry_is_called_its_pages_have_our_own_markup_alone(model: Published) -> None:
    drawn = vram.memory_map("model")
    check_svg(drawn.svg())
    assert "<script>" in check_html(drawn.html()).text
    with vram.attach("model") as lease:
        check_svg(vram.memory_map(lease).svg())
        check_html(lease._repr_html_())
    check_html(vram.entry("model")._repr_html_())
    check_html(vram.list_entries()._repr_html_())  # type: ignore[attr-defined]


def test_two_slots_are_two_bars(kept: vram.Keeper) -> None:
    with vram.zeros(MIB, "uint8", device="host") as array:
        vram.publish("swapped", {"w": array}, updatable=True, swap=True)
        assert [lane.title for lane in vram.memory_map("swapped").lanes] == [
            "version 1, slot 0 of 2",
            "version 1, slot 1 of 2",
        ]
        vram.remove("swapped")


def test_a_lease_is_drawn_with_the_names_of_its_arrays(model: Published) -> None:
    with vram.attach("model") as lease:
        (lane,) = vram.memory_map(lease).lanes
        assert lane.title == f"lease on 'model' version {model.version}"
        assert {span.label for span in lane.rows["arrays"]} == {"w", EVIL_NAME}


def test_what_a_lender_has_is_drawn_as_well(tmp_path: Path) -> None:
    with vram.zeros(MIB, "uint8", device="host") as array, vram.lend({"w": array}, at=tmp_path / "l.sock"):
        (lane,) = vram.memory_map("lent", keeper=tmp_path / "l.sock").lanes
        assert [(span.label, span.nbytes) for span in lane.rows["arrays"]] == [("w", MIB)]
    close_clients()


# -- processes ---------------------------------------------------------------------------------------------------------
def test_another_process_is_drawn_with_its_memory_its_leases_and_what_it_has_published(holder: int) -> None:
    drawn = vram.memory_map(holder)
    by_title = {lane.title: lane for lane in drawn.lanes}
    entry = vram.entry("model")
    assert by_title[f"lease on model version {entry.version}"].nbytes == entry.nbytes
    assert f"published theirs version {vram.entry('theirs').version}" in by_title
    kinds = [span.kind for lane in drawn.lanes if lane.title == "host memory" for span in lane.rows["chunks"]]
    assert "reserved" in kinds  # of an array that may grow
    assert "mapped" in kinds  # the same array, which nobody else has
    check_svg(drawn.svg())
    check_html(drawn.html())


def test_who_else_has_the_memory_is_named(holder: int) -> None:
    with vram.attach("model") as lease:
        assert lease["w"].numpy()[0, 0] == 1
        shared = [lane for lane in vram.memory_map(holder).lanes if f"pid {os.getpid()}" in " ".join(lane.facts)]
    assert [lane.rows["chunks"][0].kind for lane in shared] == ["shared"]


def test_a_process_without_memory_of_ours_is_an_error(kept: vram.Keeper) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with pytest.raises(NotFoundError, match=f"process {process.pid} has no host memory of vram"):
            vram.memory_map(process.pid)
        process.communicate(b"\n", SOON)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_process_of_another_user_is_refused_without_leave_to_look(kept: vram.Keeper) -> None:
    """As uid 1, which may not read the maps of a process of uid 0."""
    code = (
        "import os, sys; sys.path[:0] = sys.argv[2:]; import vram, vram.maps, vram.errors\n"
        "os.setgid(1); os.setuid(1); os.environ['VRAM_KEEPER'] = '/nonexistent/keeper.sock'\n"
        "try:\n    vram.memory_map(int(sys.argv[1]))\n"
        "except vram.errors.AccessDeniedError as error:\n    print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(os.getpid()), *sys.path], capture_output=True, text=True, timeout=SOON
    )
    assert done.stdout.startswith(f"refused: process {os.getpid()} belongs to another user"), done.stderr


# -- the command -------------------------------------------------------------------------------------------------------
@in_turns(5)
def test_the_command_draws_an_entry_to_both_kinds_of_files(model: Published, tmp_path: Path) -> None:
    svg, page = tmp_path / "m.svg", tmp_path / "m.html"
    said = command("model", "--svg", svg, "--html", page)
    assert said.splitlines() == [f"{file}: <MemoryMap of entry model, 1 bar, 4 MiB>" for file in (svg, page)]
    check_svg(svg.read_text())
    check_html(page.read_text())
    assert command("model", "--svg", "-").startswith("<svg ")


@in_turns(5)
def test_the_command_draws_a_process_by_its_number(holder: int, tmp_path: Path) -> None:
    assert f"<MemoryMap of process {holder}, " in command(holder, "--html", tmp_path / "p.html")


@pytest.mark.parametrize(
    ("arguments", "said"),
    some(
        [
            (["nobody", "--svg", "m.svg"], "nobody"),
            (["model"], "name a file to draw to"),
            (["model", "--svg", "m", "--html", "m"], "the same file"),
            (["model", "--svg", "missing/m.svg"], "No such file"),
            (["model", "--html", "/dev/null"], "no regular file that could be replaced"),
            (["9" * 30, "--svg", "m.svg"], "no number of a process"),
            (["a b", "--svg", "m.svg"], "not a name for an entry"),
        ],
        2,
    ),
)
def test_what_cannot_be_drawn_is_one_line_and_leaves_no_file(
    model: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    line = command(*arguments, status=1)
    assert said in line
    assert line.startswith("vram: ")
    assert line.count("\n") == 1
    assert not list(tmp_path.iterdir())


# -- leases, entries and listings, in notebooks and terminals ----------------------------------------------------------
def test_keys_of_a_lease_are_completed_and_a_closed_one_has_none(model: Published) -> None:
    lease = vram.attach("model")
    assert lease._ipython_key_completions_() == ["w", EVIL_NAME]
    lease.close()
    assert lease._ipython_key_completions_() == []
    assert "closed" in check_html(lease._repr_html_()).text
