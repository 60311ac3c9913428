"""What several tests of hostile peers get."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vram import open_files


@pytest.fixture
def nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where the close of all that is closed elsewhere takes for ever; memory, but the first, is closed there too."""
    monkeypatch.setattr(open_files, "_MAX_THREADS", 0)
    monkeypatch.setattr(open_files, "_MOMENT", 0.0)
    yield
    monkeypatch.undo()
    open_files._close_slowly()
