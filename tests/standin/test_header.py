"""The stand-in builds with every cuda.h from that of CUDA 12.9 on, though CI has the newest only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import standin

HERE = Path(standin.__file__).parent
OLDEST = HERE / "names-12.9.txt"  # what the stand-in uses, and the cuda.h of 12.9 has: looked up there, one by one
_NO_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.DOTALL)
_DEFINED = re.compile(r"^#define (CU\w+)", re.MULTILINE)


def names(text: str) -> set[str]:
    """The words of cuda.h in a source."""
    return set(re.findall(r"\bCU[A-Za-z_]\w*", _NO_CODE.sub("", text)))


@pytest.fixture
def header(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Another cuda.h than the one that is installed."""
    monkeypatch.setenv("VRAM_STANDIN_INCLUDE", str(tmp_path))
    standin._include.cache_clear()
    yield tmp_path / "cuda.h"
    standin._include.cache_clear()


def test_it_uses_no_name_that_the_oldest_header_lacks() -> None:
    used = set().union(*(names(source.read_text()) for source in HERE.glob("*.[ch]")))
    ours = set(_DEFINED.findall((HERE / "standin.h").read_text()))
    known = set(OLDEST.read_text().split())
    assert used - ours - known == set(), "give it a number in standin.h, or find it in the cuda.h of 12.9 and list it"
    assert known - used == set(), "listed, and not used any more"
    assert len(used) > 100


def test_a_header_that_is_too_old_is_named(header: Path) -> None:
    header.write_text("#define CUDA_VERSION 12040\n")
    said = standin.missing()
    assert said is not None
    assert said.startswith(f"{header} is of CUDA 12.4, and the stand-in driver needs that of 12.9 or newer")
    header.write_text("#define CUDA_VERSION 12090\n")
    assert standin.missing() is None


def test_no_header_at_all(header: Path) -> None:
    assert "no cuda.h" in str(standin.missing())
