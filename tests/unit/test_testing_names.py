"""What ``vram.testing`` gives to others: its names, and asserts that say what they found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import vram.testing
from vram.errors import UsageError
from vram.testing import CAPABILITIES, DriverContract

THIRD_PARTY = """
import pytest
from vram.driver.host import HostDriver
from vram.spec import HOST
from vram.testing import DriverContract

class TestMine(DriverContract):
    offers = frozenset({"HostAddressable", "CopyOnWrite", "DirectMapping", "Sealing", "ZeroBacking"})  # and Identity

    @pytest.fixture
    def driver(self):
        return HostDriver()

    @pytest.fixture
    def location(self):
        return HOST
"""


def test_every_name_is_there() -> None:
    for name in vram.testing.__all__:
        assert getattr(vram.testing, name).__name__ == name if name != "CAPABILITIES" else CAPABILITIES
    assert not hasattr(vram.testing, "nothing")
    assert {"DriverContract", "TransportContract", "Ledger", "CAPABILITIES"} <= set(dir(vram.testing))


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
    assert "Extra items in the left set:\nE         'Identity'" in done.stdout, done.stdout + done.stderr


def test_an_offer_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="CopyOnWrite"):
        type("TestMine", (DriverContract,), {"offers": frozenset({"CopyOnWriting"})})


def test_the_package_alone_loads_neither_pytest_nor_a_suite() -> None:
    code = (
        "import sys, vram.testing\n"
        "print([name for name in ('pytest', 'numpy', 'vram.testing.driver') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"
