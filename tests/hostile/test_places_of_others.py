"""Files of this user's in places that another user has a hand in, and what the environment says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.other_users import OTHER, needs_root

from vram.collectives.kernels import _safe
from vram.keeper.service_manager import ServiceManager

pytestmark = pytest.mark.slow  # goes with sockets in shared directories


# -- compiled kernels, which run in whoever reads them ----------------------------------------------------------------
def test_a_cache_is_made_for_this_user_alone(tmp_path: Path) -> None:
    found = _safe(tmp_path / "vram" / "kernels")
    assert found == tmp_path / "vram" / "kernels"
    assert found is not None
    assert found.stat().st_mode & 0o777 == 0o700
    assert _safe(found) == found


@pytest.mark.parametrize("open_to_others", ["cache", "cache/vram", "cache/vram/kernels"])
def test_a_directory_that_others_may_write_is_no_place_for_one(tmp_path: Path, open_to_others: str) -> None:
    place = tmp_path / "cache" / "vram" / "kernels"
    place.mkdir(parents=True)
    (tmp_path / open_to_others).chmod(0o777)
    assert _safe(place) is None
    (tmp_path / open_to_others).chmod(0o1777)
    assert _safe(place) == (None if open_to_others.endswith("kernels") else place)


@needs_root
@pytest.mark.parametrize("theirs", ["cache", "cache/vram", "cache/vram/kernels"])
def test_a_directory_of_another_user_is_no_place_for_one(tmp_path: Path, theirs: str) -> None:
    place = tmp_path / "cache" / "vram" / "kernels"
    place.mkdir(parents=True)
    os.chown(tmp_path / theirs, OTHER, OTHER)
    assert _safe(place) is None


@needs_root
def test_nothing_is_made_in_a_directory_of_another_user(tmp_path: Path) -> None:
    os.chown(tmp_path, OTHER, OTHER)
    try:
        assert _safe(tmp_path / "vram" / "kernels") is None
        assert os.listdir(tmp_path) == []
    finally:
        os.chown(tmp_path, 0, 0)


def test_links_are_followed_once(tmp_path: Path) -> None:
    """What comes of it has none: who exchanges one afterwards changes nothing."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert _safe(tmp_path / "link" / "kernels") == tmp_path / "real" / "kernels"


# -- what the environment says ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("said", "seconds"), [("9" * 5000, 0), ("\u0663", 0), ("", 0), ("0", 0), ("-5", 0), ("1", 0.01), ("100000", 0.05)]
)
def test_a_watchdog_of_the_environment_has_a_time_that_can_be(
    monkeypatch: pytest.MonkeyPatch, said: str, seconds: float
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/nobody")
    monkeypatch.setenv("WATCHDOG_USEC", said)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    assert ServiceManager.found().watchdog_interval == seconds
