"""The public names pass mypy --strict in the code of those who use them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import vram

from .user_code import USES, mypy_as_a_user, program


def test_every_public_name_is_used() -> None:
    assert sorted(name for name in USES if "." not in name) == sorted(vram.__all__)
    assert [name for name in vram.typing.__all__ if f"vram.typing.{name}" not in program()] == []


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed here")
def test_every_public_name_passes_mypy_strict_in_a_users_file(tmp_path: Path) -> None:
    assert mypy_as_a_user(tmp_path) == []
