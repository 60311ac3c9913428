"""Every transport whose ends can be in one process keeps the contract: on the host and on the stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.contracts.transport import FullTransportContract

from vram import driver as drivers
from vram.spec import HOST, Location
from vram.testing import Ends, LocalEnds
from vram.transports import PeerTransport, ShmTransport, SocketExchange, StagedTransport, VmmTransport

GPU, OTHER = Location("cuda", 0), Location("cuda", 1)


class TestPlainCopy(FullTransportContract):
    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        transport = StagedTransport("host", "host")
        ends = LocalEnds(transport, transport)
        yield ends
        ends.close()


class TestDescriptorsOnTheHost(FullTransportContract):
    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        one, other = SocketExchange.pair()
        ends = LocalEnds(VmmTransport("host", "host", one), VmmTransport("host", "host", other))
        yield ends
        ends.close()


class TestSharedMemoryOnTheHost(FullTransportContract):
    """With a ring that a message fills again and again, and with one that has room for many."""

    @pytest.fixture(params=[(2, "1MiB"), (4, "4MiB")], ids=["small", "large"])
    def ends(self, request: pytest.FixtureRequest) -> Iterator[Ends]:
        one, other = SocketExchange.pair()
        slots, slot = request.param
        sender = ShmTransport("host", "host", one, slots=slots, slot=slot)
        ends = LocalEnds(sender, ShmTransport("host", "host", other))
        yield ends
        ends.close()


def there(request: pytest.FixtureRequest) -> tuple[Location, Location]:
    """The two places of a parameter, if they are here."""
    found: tuple[Location, Location] = request.param
    if OTHER in found:
        request.getfixturevalue("two_gpus")
    return found


def beside(places: tuple[Location, Location]) -> Location:
    """A place that is not the destination: neither of both, if there are so many."""
    seen = (HOST, OTHER, GPU) if drivers.get(GPU).device_count() > 1 else (HOST, GPU)
    free = [place for place in seen if place not in places]
    return next(place for place in (*free, *seen) if place != places[1])


class OnGpus(FullTransportContract):
    @pytest.fixture(params=[(GPU, OTHER), (GPU, GPU)], ids=["two", "one"])
    def places(self, request: pytest.FixtureRequest) -> tuple[Location, Location]:
        return there(request)


class Descriptors(OnGpus):
    @pytest.fixture
    def ends(self, places: tuple[Location, Location]) -> Iterator[Ends]:
        one, other = SocketExchange.pair()
        ends = LocalEnds(VmmTransport(*places, one), VmmTransport(*places, other), HOST)
        yield ends
        ends.close()


class Peer(OnGpus):
    @pytest.fixture
    def ends(self, places: tuple[Location, Location]) -> Iterator[Ends]:
        transport = PeerTransport(*places)
        ends = LocalEnds(transport, transport, HOST)
        yield ends
        ends.close()


class Staged(OnGpus):
    """With few and small buffers, so that they are used again and again."""

    @pytest.fixture(params=[(GPU, OTHER), (GPU, GPU), (HOST, GPU), (GPU, HOST)], ids=["two", "one", "up", "down"])
    def places(self, request: pytest.FixtureRequest) -> tuple[Location, Location]:
        return there(request)

    @pytest.fixture(params=[(2, 4096), (3, 65_536), (4, "4MiB")], ids=["small", "middle", "large"])
    def ends(self, places: tuple[Location, Location], request: pytest.FixtureRequest) -> Iterator[Ends]:
        slots, slot = request.param
        transport = StagedTransport(*places, slots=slots, slot=slot)
        ends = LocalEnds(transport, transport, beside(places))
        yield ends
        ends.close()


class SharedMemory(Staged):
    """The same places, with each end as in a process of its own."""

    @pytest.fixture(params=[(33, 32_768), (4, "4MiB")], ids=["small", "large"])
    def ends(self, places: tuple[Location, Location], request: pytest.FixtureRequest) -> Iterator[Ends]:
        slots, slot = request.param
        one, other = SocketExchange.pair()
        sender = ShmTransport(*places, one, slots=slots, slot=slot)
        ends = LocalEnds(sender, ShmTransport(*places, other), beside(places))
        yield ends
        ends.close()


@pytest.mark.standin
class TestSharedMemoryOnTheStandin(SharedMemory):
    pass


@pytest.mark.gpu
class TestSharedMemoryOnHardware(SharedMemory):
    pass


@pytest.mark.standin
class TestDescriptorsOnTheStandin(Descriptors):
    pass


@pytest.mark.standin
class TestPeerOnTheStandin(Peer):
    pass


@pytest.mark.standin
class TestStagedOnTheStandin(Staged):
    pass


@pytest.mark.gpu
class TestDescriptorsOnHardware(Descriptors):
    pass


@pytest.mark.gpu
class TestPeerOnHardware(Peer):
    pass


@pytest.mark.gpu
class TestStagedOnHardware(Staged):
    pass
