"""The kernels of groups: where what lies in a workspace, what is compiled for whom, and the machine code of it.

It is compiled for a GPU that need not be there, and looked at with CUDA's disassembler.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.support.other_users import OTHER, needs_root

from vram.collectives import kernels
from vram.collectives.kernels import BLOCKS, KINDS, OPS, Layout, Variant, compiled
from vram.errors import UnsupportedError

PLAIN = Variant(2, 1, "bfloat16", "sum", (9, 0))
PUSHING = {  # what waits for data and nothing else
    "all_reduce_packets", "all_reduce_push", "all_reduce_two_shots", "all_reduce_norm_packets", "all_reduce_norm_push",
}  # fmt: skip
FENCES = {  # one where it gives up; another one where blocks meet, after what they wrote to all, or for all to read
    "all_reduce_shares": 2, "barrier": 2, "all_reduce_entry": 3,
}  # fmt: skip
VARIANTS = [
    *(replace(PLAIN, dtype=dtype) for dtype in KINDS),
    *(replace(PLAIN, op=op) for op in OPS),
    replace(PLAIN, rank=0),
    *(replace(PLAIN, size=size, rank=size - 1) for size in (1, 3, 4, 8)),
    replace(PLAIN, size=8, rank=3, dtype="int32", op="max"),
    replace(PLAIN, capability=(8, 0)),
]


@pytest.mark.parametrize("size", range(1, 9))
def test_what_lies_in_a_workspace_is_apart_and_aligned(size: int) -> None:
    layout = Layout(size)
    assert layout.packet_row == 2 * layout.packets, "half of each packet is the number of the call"
    parts = [
        (0, 2 * size * layout.packet_row),
        (layout.push_at, 2 * size * layout.pushed),
        (layout.scatter_at, 2 * size * layout.share_row),
        (layout.gather_at, 2 * size * layout.share_row),
        (layout.flags_at, 4 * BLOCKS * 128),
        (layout.staged_at, layout.staged),
    ]
    for (start, nbytes), following in zip(parts, [*(start for start, _ in parts[1:]), layout.nbytes], strict=True):
        assert start % 128 == 0
        assert start + nbytes == following
    assert size * 4 <= 128, "the words of a block for all ranks are in one line"


def test_the_rank_is_a_constant() -> None:
    sources = {replace(PLAIN, size=4, rank=rank).source() for rank in range(4)}
    assert len(sources) == 4
    assert all(re.search(r"#define PEERS u8 \*p0, u8 \*p1, u8 \*p2, u8 \*p3\n", source) for source in sources)


def test_what_has_no_word_to_spare_is_not_pushed() -> None:
    pushing = {(one.dtype, one.op) for one in VARIANTS if "all_reduce_push" in one.names()}
    assert pushing == {(dtype, "sum") for dtype in ("float32", "float16", "bfloat16")}


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(UnsupportedError, match=r"cuda\.core .*pip install '\.\[collectives\]' in a clone"):
        compiled(PLAIN, tmp_path)


# -- machine code -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("cuda.core", reason="cuda.core is not installed: no kernel is compiled")
    pytest.importorskip("nvidia.cu13", reason="cuda.core is not installed: no kernel is compiled")
    return tmp_path_factory.mktemp("kernels")


@cache
def dumped(place: Path, code: bytes) -> dict[str, tuple[str, str]]:
    """Return what the disassembler says of each kernel: the resources it takes, and its instructions."""
    import nvidia.cu13

    tool = Path(next(iter(nvidia.cu13.__path__))) / "bin" / "cuobjdump"
    file = place / "kernels.cubin"
    file.write_bytes(code)

    def said(what: str) -> dict[str, str]:
        done = subprocess.run([tool, what, file], capture_output=True, text=True, timeout=120, check=True)
        return dict(re.findall(r"Function (?:: )?(\w+):?\n(.*?)(?=Function|\Z)", done.stdout, re.S))

    taken, code_of = said("-res-usage"), said("-sass")
    return {name: (taken[name], code_of[name]) for name in code_of}


def wrong(place: Path, variant: Variant, code: bytes) -> list[str]:
    """Return what is wrong with the machine code of a variant."""
    found = dumped(place, code)
    problems = [f"{name} is missing" for name in variant.names() if name not in found]
    for name, (taken, text) in found.items():
        stack, registers = (int(re.search(rf"{word}:(\d+)", taken)[1]) for word in ("STACK", "REG"))  # type: ignore[index]
        if stack > 8:  # when the patience began, whose address the cold path takes
            problems.append(
                f"{name} has {stack} bytes of stack: something is spilled, or indexed by what is no constant"
            )
        if registers > 128:
            problems.append(f"{name} takes {registers} registers of a thread: 512 of those do not fit")
        fences = len(re.findall(r"\bMEMBAR\b", text))
        most = FENCES.get(name, 1)
        if fences > most:
            problems.append(f"{name} has {fences} fences")
        if name in PUSHING:
            for what in (r"LDG\.E\.128\.STRONG\.SYS", r"STG?\.E\.128\.STRONG\.SYS"):
                if variant.size > 1 and not re.search(what, text):
                    problems.append(f"{name} has no access of 16 bytes that all GPUs see: {what}")
            narrow = set(re.findall(r"LDG\.E\.64\.STRONG\.SYS", text))
            if narrow:
                problems.append(f"{name} reads what others send in pieces")
    return problems


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_machine_code_has_no_spills_no_fences_and_whole_accesses(place: Path, variant: Variant) -> None:
    assert wrong(place, variant, compiled(variant, place / "cache")) == []


def test_what_was_compiled_is_kept_for_this_user_alone(place: Path, tmp_path: Path) -> None:
    first = compiled(PLAIN, tmp_path / "cache")
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert compiled(PLAIN, tmp_path / "cache") == first
    assert compiled(replace(PLAIN, rank=0), tmp_path / "cache") != first


def test_what_others_may_write_is_no_place_for_code(place: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert compiled(PLAIN, tmp_path) == compiled(PLAIN, place / "cache")
    assert not list(tmp_path.iterdir())


def test_a_cache_is_made_for_this_user_alone_and_links_to_it_are_followed(tmp_path: Path) -> None:
    found = kernels._safe(tmp_path / "vram" / "kernels")
    assert found == tmp_path / "vram" / "kernels"
    assert found.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "vram")
    assert kernels._safe(tmp_path / "link" / "kernels") == found


@pytest.mark.parametrize("open_to_others", ["cache", "cache/vram", "cache/vram/kernels"])
def test_a_directory_that_others_may_write_is_no_place_for_code(tmp_path: Path, open_to_others: str) -> None:
    place = tmp_path / "cache" / "vram" / "kernels"
    place.mkdir(parents=True)
    (tmp_path / open_to_others).chmod(0o777)
    assert kernels._safe(place) is None
    (tmp_path / open_to_others).chmod(0o1777)
    assert kernels._safe(place) == (None if open_to_others.endswith("kernels") else place)


@needs_root
@pytest.mark.parametrize("theirs", ["cache", "cache/vram", "cache/vram/kernels"])
def test_a_directory_of_another_user_is_no_place_for_code(tmp_path: Path, theirs: str) -> None:
    """What is kept there runs in whoever reads it."""
    place = tmp_path / "cache" / "vram" / "kernels"
    place.mkdir(parents=True)
    os.chown(tmp_path / theirs, OTHER, OTHER)
    assert kernels._safe(place) is None
