"""Streams between two ends of a transport: an event goes along, and nobody waits on the processor (S10)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support import transport_children as children
from tests.support.deadlines import SOON, until
from tests.support.transports import answer, child

import standin
import vram
from vram import driver as drivers
from vram.errors import PeerGoneError
from vram.keeper.private import short_directory
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


def test_s10_a_stream_waits_for_the_senders_work_and_nobody_else(filling: tuple[Any, Any, Any]) -> None:
    _, pipe, transport = filling
    driver: Any = drivers.get(GPU)
    control = standin.Standin()
    stream = driver.stream_create(GPU)
    control.defer()
    try:
        with transport.recv(stream=stream, timeout=SOON) as came, vram.zeros(4096, "uint8", device=GPU) as target:
            driver.copy_async(target.address, came.address, 4096, stream)
            pipe.send("work")
            assert answer(pipe) == "done"
            driver.stream_synchronize(stream, GPU)
            assert set(target.to_host()) == {7}
            pipe.send("next")
            assert answer(pipe)
            # Without a stream it is waited for here.
            pipe.send("work")
            with transport.recv(timeout=SOON) as again:
                assert set(again.to_host()) == {8}
            assert answer(pipe) == "done"
    finally:
        control.defer(False)
        driver.stream_destroy(stream)
    pipe.send("end")


@pytest.mark.parametrize("given", [False, True], ids=["its memory", "a buffer"])
def test_s10_what_is_not_filled_yet_is_not_received(filling: tuple[Any, Any, Any], given: bool) -> None:
    _, pipe, transport = filling
    seen: list[set[int]] = []

    def receive() -> None:
        with vram.zeros(4096, "uint8", device=GPU) as buffer:
            with transport.recv(buffer if given else None, timeout=SOON) as came:
                seen.append(set(came.to_host().tolist()))

    thread = threading.Thread(target=receive)
    thread.start()
    until(lambda: 1 in transport._talk.stream_events._theirs, what="the event")
    assert seen == []
    pipe.send("work")
    thread.join(SOON)
    assert seen == [{7}]
    assert answer(pipe) == "done"
    pipe.send("end")


def test_s10_an_event_of_a_process_that_was_killed_is_not_waited_for(filling: tuple[Any, Any, Any]) -> None:
    process, _, transport = filling
    ended: list[BaseException] = []

    def receive() -> None:
        try:
            transport.recv(timeout=SOON)
        except vram.errors.VramError as error:
            ended.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    until(lambda: 1 in transport._talk.stream_events._theirs, what="the event")
    process.kill()
    thread.join(SOON)
    assert [type(error) for error in ended] == [PeerGoneError]
    assert "was filling" in str(ended[0])
    with pytest.raises(PeerGoneError):
        transport.recv(timeout=SOON)
