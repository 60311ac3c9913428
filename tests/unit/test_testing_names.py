"""The suites of ``vram.testing`` as others inherit them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vram.errors import UsageError
from vram.testing import DriverContract

THIRD_PARTY = """
import pytest
from vram.driver.host import HostDriver
from vram.spec import HOST
from vram.testing import DriverContract

class TestMine(DriverContract):
    offers: frozenset[str] = frozenset()  # and HostMemory

    @pytest.fixture
    def driver(self):
        return HostDriver()

    @pytest.fixture
    def location(self):
        return HOST
"""


def test_asserts_of_an_inherited_suite_show_their_values(tmp_path: Path) -> None:
    """Without a word about it in the other's conftest, and with warnings as errors."""
    (tmp_path / "test_mine.py").write_text(THIRD_PARTY)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"),
            *("--rootdir", str(tmp_path)),
            *("test_mine.py", "-k", "offers_exactly_what_it_says"),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "Extra items in the left set:\nE         'HostMemory'" in done.stdout, done.stdout + done.stderr


def test_an_offer_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="HostMemory"):
        type("TestMine", (DriverContract,), {"offers": frozenset({"HostMemories"})})
