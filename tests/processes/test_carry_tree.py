"""Many readers of one source: each gives on what it has, so that the source sends little more than one copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.carried import Nodes, carrying, nodes, pull, write_key
from tests.support.children import Child, child

import vram
from vram.nodes.address import KEY_VARIABLE

PIECE = 16 << 20


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv(KEY_VARIABLE, str(write_key(tmp_path / "key")))  # without one nothing is passed on
    with nodes() as found:
        yield found


def publish(two: Nodes, nbytes: int) -> int:
    """Publish a model; return the sum of its words."""
    words = np.arange(nbytes // 8, dtype=np.uint64)
    vram.publish("model", {"w": words.view(np.uint8)}, keeper=two.origin)
    return int(words.sum())


def readers(stage: contextlib.ExitStack, count: int, address: str, streams: int = 2) -> list[Child]:
    found = [stage.enter_context(child(pull, address, "model", streams)) for _ in range(count)]
    for one in found:
        assert one.said() == "ready"
    return found


@pytest.mark.slow
def test_readers_that_are_killed_in_the_middle_keep_nobody(two: Nodes) -> None:
    nbytes = 4 * PIECE
    total = publish(two, nbytes)
    with carrying(two.origin) as (_, address), contextlib.ExitStack() as stage:
        doomed = [stage.enter_context(child(pull, address, "model", 2, may_end=False)) for _ in range(2)]
        children = readers(stage, 3, address)
        for one in doomed:
            assert one.said() == "ready"
        for one in (*doomed, *children):
            one.tell()
        for one in doomed:
            one.kill()
        assert [one.said()[2] for one in children] == [total] * 3
