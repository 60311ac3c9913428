"""Streams between two ends of a transport: an event goes along, and nobody waits on the processor (S10)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import transport_children as children
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import later
from tests.support.places import short_directory
from tests.support.transports import answer, child

from vram.errors import PeerGoneError
from vram.spec import Location
from vram.transports import SocketExchange, VmmTransport

pytestmark = pytest.mark.standin
GPU = Location("cuda", 0)


@pytest.fixture
def filling() -> Iterator[tuple[Any, Any, Any]]:
    """A process that sends what its stream has not filled yet, its pipe, and the end that receives here."""
    with short_directory() as place:
        path = str(Path(place) / "x")
        with child(children.filler, path) as (process, pipe):
            with VmmTransport(GPU, GPU, SocketExchange.listen(path, SOON), timeout=SOON) as transport:
                assert answer(pipe), "the sender waited for its stream"
                yield process, pipe, transport


def test_s10_an_event_of_a_process_that_was_killed_is_not_waited_for(filling: tuple[Any, Any, Any]) -> None:
    process, _, transport = filling
    thread, ended = later(lambda: transport.recv(timeout=SOON))
    until(lambda: 1 in transport._talk.stream_events._theirs, what="the event")
    process.kill()
    thread.join(SOON)
    assert [type(error) for error in ended] == [PeerGoneError]
    assert "was filling" in str(ended[0])
    with pytest.raises(PeerGoneError):
        transport.recv(timeout=SOON)
