"""Drivers and transports of others: registered, and used through the public names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import vram
from vram import driver as drivers
from vram.driver.host import HostDriver
from vram.errors import UnsupportedError, UsageError
from vram.spec import HOST, Location
from vram.transports import Estimate, LocalTransport, No, StagedTransport, Yes, register, select, selection

MINE = Location("mine", 0)


class MyDriver:
    """Memory of the host at a place of another name."""

    name = "mine"

    def __init__(self) -> None:
        self._inner = HostDriver()

    def canonical(self, location: Location) -> Location:
        return location

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            return method(*(_renamed(one) for one in arguments), **{k: _renamed(v) for k, v in options.items()})

        return call


def _renamed(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_renamed, value))
    return HOST if value == MINE else value


class MyTransport(StagedTransport):
    """Faster than all others, it says."""

    kind = "mine"

    @classmethod
    def available(cls, src: Location | str, dst: Location | str) -> Yes | No:
        return Yes() if Location.parse(src) == Location.parse(dst) == HOST else No("mine works on the host")

    @classmethod
    def measure(cls, src: Location, dst: Location) -> Estimate:
        return Estimate(1e15, 1e-12)


@pytest.fixture
def registered() -> Iterator[None]:
    """Nobody else sees what is registered here."""
    drivers.register("mine", MyDriver)  # type: ignore[arg-type]
    register(MyTransport)
    yield
    drivers._makers.pop("mine")
    drivers._drivers.pop("mine", None)
    selection._registered.remove(MyTransport)


@pytest.mark.usefixtures("registered")
def test_memory_on_a_driver_of_ones_own() -> None:
    drivers.register("mine", MyDriver)  # type: ignore[arg-type]  # the same again is fine
    driver = drivers.get(MINE)
    assert isinstance(driver, MyDriver)
    assert drivers.get(MINE) is driver
    with vram.memory.Region.create(MINE, driver=driver, capacity="8MiB", nbytes="2MiB") as region:
        assert region.location == MINE
        driver.copy_in(region.address, memoryview(b"here"))
        region.resize("4MiB")
        found = bytearray(4)
        driver.copy_out(memoryview(found), region.address)
        assert (found, region.nbytes) == (b"here", 4 << 20)
    assert driver.live().nbytes == 0


def test_without_one_the_error_says_how_to_register_it() -> None:
    with pytest.raises(UnsupportedError, match=r"vram\.driver\.register"):
        drivers.get(MINE)


@pytest.mark.usefixtures("registered")
def test_a_transport_of_ones_own_is_ranked_and_taken() -> None:
    register(MyTransport)  # the same again is fine
    found = select("host", "host")
    assert found.best.kind == "mine"
    assert [route.kind for route in found.routes].count("mine") == 1
    with found.transport() as transport, vram.zeros(100, "uint8", device="host") as array:
        assert type(transport) is MyTransport
        array.fill(7)
        transport.send(array)
        with transport.recv(timeout=0) as came:
            assert came.to_host().tolist() == [7] * 100


def test_what_makes_no_driver_is_named_at_its_first_use() -> None:
    drivers.register("mine", lambda: None)  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(UnsupportedError, match="a driver with the name 'mine'; have None"):
            vram.zeros(4, "uint8", device=MINE)
        assert "mine" not in drivers._drivers
    finally:
        drivers._makers.pop("mine")


def test_a_transport_that_could_not_be_taken_is_not_registered() -> None:
    """Or it would fail every selection after that, of whoever asks."""

    class Half(LocalTransport):
        """Without its methods."""

        kind = "half"

    class Nameless(StagedTransport):
        """Called by a number."""

        kind = 5  # type: ignore[assignment]

    for odd, says in ((Half, "Half has no _move, available"), (Nameless, "Nameless has no kind")):
        with pytest.raises(UsageError, match=says):
            register(odd)
    assert selection._registered == []


def test_what_cannot_be_registered_is_refused() -> None:
    class Other(StagedTransport):
        """Of a kind that is taken."""

    for odd in (int, None, Other):
        with pytest.raises(UsageError):
            register(odd)  # type: ignore[arg-type]
    for kind, make in (("host", HostDriver), ("cuda", HostDriver), ("", HostDriver), ("a b", HostDriver), ("x", None)):
        with pytest.raises(UsageError):
            drivers.register(kind, make)  # type: ignore[arg-type]
    assert drivers._makers == {}
    assert selection._registered == []
