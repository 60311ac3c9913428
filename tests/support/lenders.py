"""What tests of several files use: limit_of_descriptors, nothing_is_closed."""

from __future__ import annotations

import contextlib
import resource
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


@contextlib.contextmanager
def limit_of_descriptors(most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
