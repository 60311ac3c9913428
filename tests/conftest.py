"""What every test gets: the ledger, and a summary line for what could not run here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vram.testing.ledger import Ledger


@pytest.fixture(autouse=True)
def ledger() -> Iterator[Ledger]:
    """Fail a test that leaves handles, fds, mappings, children or threads behind."""
    before = Ledger.take()
    yield before
    extra = before.left_behind()
    if extra:
        pytest.fail("left behind:\n  " + "\n  ".join(extra), pytrace=False)
