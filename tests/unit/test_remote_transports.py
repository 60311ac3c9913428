"""Exchanges of transports, where whoever holds one forks (I7)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.support.deadlines import SOON
from tests.support.forked import forked
from tests.support.places import short_directory
from tests.support.transport_children import WAYS


@pytest.mark.parametrize("way", WAYS)
def test_i7_a_forked_child_holds_no_end_open(way: str) -> None:
    """Or the other end would not see who died: the kernel waits for the last copy of a socket, a pipe or a lock."""
    made = []
    with short_directory() as place:
        path = str(Path(place) / "x")
        thread = threading.Thread(target=lambda: made.append(WAYS[way].listen(path, SOON)))
        thread.start()
        here = WAYS[way].connect(path, SOON)
        thread.join(SOON)
    (there,) = made
    with forked(), there:
        assert not there.is_gone()
        if way == "socket":
            here.give_away()  # a shutdown would end all copies at once
        here.close()
        assert there.is_gone(), "the child holds the parent's end open"
