"""What tests/architecture says of the public names' types catches a name that a type checker does not see."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tests.architecture.user_code import PUBLIC, mypy_as_a_user
from tests.support.samples import some

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed here")


@pytest.mark.parametrize(
    ("line", "instead", "name"),
    some(
        [
            ("    from .entries.administration import entry as entry\n", "", "entry"),
            (
                "    from .entries.publish import publish as publish",
                "    from .entries.publish import publish",
                "publish",
            ),
            ("    from .keeper.private import Keeper as Keeper\n", "", "Keeper"),
            ("    from . import transports as transports\n", "", "transports"),
        ],
        1,
    ),
)
def test_a_name_taken_out_or_not_exported_is_caught(line: str, instead: str, name: str, tmp_path: Path) -> None:
    text = PUBLIC.read_text()
    assert text.count(line) == 1
    wrong = mypy_as_a_user(tmp_path, text.replace(line, instead))
    assert wrong, f"nothing was said about {name}"
    assert any(f'"{name}"' in one or f'"vram.{name}"' in one for one in wrong), wrong
