"""Transports stand on hand-overs: memory is opened once and known by minted ids (S6), and what lives only as long as
its maker is kept by whoever sent it until the other end is done."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.support import transport_children as children
from tests.support.deadlines import SOON
from tests.support.lend_children import Sources, numbers
from tests.support.places import short_directory
from tests.support.transports import answer, child

import vram
from vram.errors import ReleaseWarning, UsageError
from vram.handover.remote_refs import unreturned
from vram.transports import ExportedBuffer, IpcTransport, SocketExchange, VmmTransport

FIRST = numbers().astype("int32").tobytes()


@pytest.fixture
def sources() -> Iterator[Sources]:
    with Sources() as made:
        yield made


class Receiver:
    """The other end, in another process."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def tell(self, *words: Any) -> Any:
        self.pipe.send(words)
        return answer(self.pipe)


@pytest.fixture
def both(path: str, request: pytest.FixtureRequest) -> Iterator[tuple[Any, Receiver]]:
    """A sender here and a receiver in another process, of the GPU's memory that lives as long as its maker."""
    with child(children.taker, "ipc", path, "cuda:0", "cuda:0") as (_, pipe):
        with IpcTransport("cuda:0", "cuda:0", SocketExchange.listen(path, SOON), timeout=SOON) as transport:
            assert answer(pipe) == "here"
            yield transport, Receiver(pipe)


@pytest.mark.standin
@pytest.mark.parametrize("kind", ["legacy", "pool"])
def test_s6_what_comes_again_by_hand_or_message_is_opened_once(
    kind: str, both: tuple[Any, Receiver], sources: Sources
) -> None:
    transport, other = both
    made = sources.make(kind)
    for _ in range(2):
        transport.send(made)
        assert other.tell("recv") == FIRST
        if kind == "legacy":
            assert other.tell("import", ExportedBuffer("ipc", transport.export(made).payload)) == FIRST
    opens, imported = other.tell("opens")
    assert imported == 1
    assert opens == (kind == "legacy")
    other.tell("drop")


@pytest.mark.standin
def test_s6_two_connections_have_ids_of_their_own(both: tuple[Any, Receiver], sources: Sources) -> None:
    """Each calls its first memory by the same number, and neither takes the other's for its own."""
    transport, other = both
    with short_directory() as place:
        path = str(Path(place) / "y")
        with child(children.taker, "ipc", path, "cuda:0", "cuda:0") as (_, pipe):
            with IpcTransport("cuda:0", "cuda:0", SocketExchange.listen(path, SOON), timeout=SOON) as second:
                assert answer(pipe) == "here"
                one, two = sources.make("legacy"), sources.make("legacy", 5)
                handles = [
                    ExportedBuffer("ipc", end.export(it).payload) for end, it in ((transport, one), (second, two))
                ]
                transport.send(one)
                second.send(two)
                assert other.tell("recv") == FIRST
                assert Receiver(pipe).tell("recv") == numbers(5).astype("int32").tobytes()
                assert other.tell("import", handles[0]) == FIRST
                Receiver(pipe).tell("drop")
    other.tell("drop")


@pytest.mark.standin
def test_who_closes_first_says_that_it_keeps_what_is_used(both: tuple[Any, Receiver], sources: Sources) -> None:
    transport, other = both
    transport.send(sources.make("legacy"))
    assert other.tell("recv") == FIRST
    with pytest.warns(ReleaseWarning, match="uses 1 arrays"):
        transport.close()
    assert other.tell("read") == FIRST
    unreturned.pop().close()


@pytest.mark.standin
def test_memory_of_a_pool_says_what_it_takes(path: str, sources: Sources) -> None:
    made = sources.make("pool")
    with child(children.talker, "pipes", path):
        exchange = children.WAYS["pipes"].listen(path, SOON)
        with IpcTransport("cuda:0", "cuda:0", exchange) as transport, pytest.raises(UsageError, match="SocketExchange"):
            transport.send(made)
    one, other = SocketExchange.pair()
    with other, IpcTransport("cuda:0", "cuda:1", one) as transport, pytest.raises(UsageError, match="not on cuda:1"):
        transport.send(made)


def test_a_handle_of_another_end_is_refused() -> None:
    ends = [SocketExchange.pair() for _ in range(2)]
    (a, b), (c, d) = [[VmmTransport("host", "host", end) for end in pair] for pair in ends]
    with a, b, c, d, vram.zeros(10, "uint8", device="host") as array:
        with pytest.raises(UsageError, match="not connected"):
            d.import_(a.export(array))
        b.import_(a.export(array)).close()
        assert (b.statistics().imported, d.statistics().imported) == (1, 0)
