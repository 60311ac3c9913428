"""What all the tests of a driver stand on: a driver at work, and the fixtures of the suite."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

from ..driver.foreign import Foreign, InterprocessEvents, LegacyIpc, Pools
from ..driver.protocol import (
    CopyOnWrite,
    DirectMapping,
    Driver,
    Fabric,
    HostAddressable,
    Identity,
    Multicast,
    NativeHandles,
    Sealing,
    StreamOrdered,
    ZeroBacking,
)
from ..errors import UnsupportedError, UsageError
from ..spec import Access, HandleKind, Location
from .keeper import SOON

if TYPE_CHECKING:
    from typing import Self

__all__ = ["CAPABILITIES", "FD", "DriverSuite", "Scene", "is_open", "lent", "remedied", "together"]

_CAPABILITIES: tuple[type, ...] = (
    *(HostAddressable, CopyOnWrite, DirectMapping, Sealing, Identity, Fabric, NativeHandles, StreamOrdered, Multicast),
    ZeroBacking,
    *(Foreign, LegacyIpc, InterprocessEvents, Pools),  # tested by ForeignContract
)
CAPABILITIES = {capability.__name__: capability for capability in _CAPABILITIES}
FD = HandleKind.POSIX_FD


class Scene:
    """A driver at work: makes things, knows what is still out, and takes that back in the end.

    Sizes are in granules (`g` bytes each), so that the tests read alike whatever a driver's granularity is.
    """

    def __init__(self, driver: Driver, location: Location) -> None:
        self.driver = driver
        self.location = location
        self.g = driver.mem_granularity(location, FD).recommended
        self._reserved: dict[int, int] = {}
        self._handles: dict[int, int] = {}
        self._mapped: dict[int, int] = {}

    def reserve(self, granules: int) -> int:
        """Return the base of a new range of addresses."""
        address = self.driver.address_reserve(granules * self.g)
        self._reserved[address] = granules * self.g
        return address

    def free(self, address: int) -> None:
        """Give a whole range back."""
        self.driver.address_free(address, self._reserved[address])
        del self._reserved[address]

    def create(self, granules: int = 1, kinds: HandleKind = FD) -> int:
        """Return a handle to new memory."""
        return self.keep(self.driver.mem_create(granules * self.g, self.location, kinds), granules)

    def keep(self, handle: int, granules: int = 1) -> int:
        """Take over a handle that came about otherwise; return it."""
        self._handles[handle] = granules * self.g
        return handle

    def release(self, handle: int) -> None:
        """Give a handle back."""
        self.driver.mem_release(handle)
        del self._handles[handle]

    def map(self, address: int, handle: int, access: Access = Access.READ_WRITE) -> int:
        """Map memory and allow access to it; return `address`."""
        nbytes = self._handles[handle]
        self.driver.mem_map(address, nbytes, 0, handle)
        self._mapped[address] = nbytes
        self.allow(address, nbytes, access)
        return address

    def map_private(self, address: int, handle: int, access: Access = Access.READ_WRITE) -> int:
        """Map memory privately and allow access to it; return `address`."""
        driver = self.driver
        assert isinstance(driver, CopyOnWrite)
        nbytes = self._handles[handle]
        driver.mem_map_private(address, nbytes, 0, handle)
        self._mapped[address] = nbytes
        self.allow(address, nbytes, access)
        return address

    def put(self, address: int, granules: int = 1) -> int:
        """Take care of what was mapped otherwise; return `address`."""
        self._mapped[address] = granules * self.g
        return address

    def allow(self, address: int, nbytes: int, access: Access) -> None:
        """Allow access, unless it is none that is allowed."""
        if access is not Access.NONE:
            self.driver.mem_set_access(address, nbytes, access, (self.location,))

    def unmap(self, address: int, nbytes: int | None = None) -> None:
        """Unmap the mapping at `address`, or all in a span."""
        nbytes = nbytes or self._mapped[address]
        self.driver.mem_unmap(address, nbytes)
        for start in [start for start in self._mapped if address <= start < address + nbytes]:
            del self._mapped[start]

    def memory(self, granules: int = 1, access: Access = Access.READ_WRITE) -> tuple[int, int]:
        """Return (address, handle) of new memory, mapped in a reservation of its own."""
        handle = self.create(granules)
        return self.map(self.reserve(granules), handle, access), handle

    def write(self, address: int, data: bytes) -> None:
        """Put bytes at an address."""
        self.driver.copy_in(address, memoryview(data))

    def read(self, address: int, nbytes: int) -> bytes:
        """Return the bytes at an address."""
        found = bytearray(nbytes)
        self.driver.copy_out(memoryview(found), address)
        return bytes(found)

    @contextlib.contextmanager
    def refused(self, error: type[Exception]) -> Iterator[None]:
        """Expect an error that says something, and that nothing has changed (I4)."""
        before = self.driver.live()
        with pytest.raises(error) as caught:
            yield
        assert str(caught.value)
        assert self.driver.live() == before

    @contextlib.contextmanager
    def exported(self, handle: int) -> Iterator[int]:
        """Lend a new descriptor of the memory for the length of a block."""
        with lent(self.driver.mem_export(handle, FD)) as fd:
            yield fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for address, nbytes in self._mapped.items():
            self.driver.mem_unmap(address, nbytes)
        for handle in self._handles:
            self.driver.mem_release(handle)
        for address, nbytes in self._reserved.items():
            self.driver.address_free(address, nbytes)


class DriverSuite:
    """The fixtures that the parts of the contract share."""

    offers: frozenset[str] = frozenset()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if unknown := set(cls.offers) - set(CAPABILITIES):
            known = ", ".join(sorted(CAPABILITIES))
            raise UsageError(f"{cls.__name__} offers {sorted(unknown)}, which is none of the capabilities: {known}")

    @pytest.fixture
    def driver(self) -> Driver:
        """Supply a driver of the kind under test."""
        raise NotImplementedError("supply a fixture `driver`")

    @pytest.fixture
    def location(self) -> Location:
        """Supply a location that it serves."""
        raise NotImplementedError("supply a fixture `location`")

    @pytest.fixture
    def scene(self, driver: Driver, location: Location) -> Iterator[Scene]:
        """The driver at work. What a test leaves in it is taken back, and the driver's books must agree."""
        before = driver.live()
        with Scene(driver, location) as scene:
            yield scene
        assert driver.live() == before

    def capability(self, driver: Driver, capability: type) -> Any:
        """Return the driver, or skip the test, saying so, if the suite says that it does not offer `capability`."""
        if capability.__name__ not in self.offers:
            pytest.skip(f"{driver.name} does not offer {capability.__name__}")
        return driver


def is_open(fd: int) -> bool:
    """Whether a descriptor is open in this process."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def remedied(error: UnsupportedError) -> None:
    """Insist that a refusal says what it takes, what there is instead, and what to do."""
    assert error.needs
    assert error.have
    assert error.remedy


@contextlib.contextmanager
def lent(fd: int) -> Iterator[int]:
    """Lend a descriptor for the length of a block, and close it then: whoever was given it must have left it open."""
    try:
        yield fd
    finally:
        left = is_open(fd)
        if left:
            os.close(fd)
    assert left, "it was closed by whom it was lent to: a descriptor stays the caller's"


def together(calls: list[Callable[[], object]]) -> list[object]:
    """Run calls in threads that start at once; return what each returned or raised."""
    barrier = threading.Barrier(len(calls))
    results: list[object] = ["did not end"] * len(calls)

    def run(index: int) -> None:
        barrier.wait(SOON)
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001  (whatever it is, the test looks at it)
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # or each would be done before the next has begun
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
    finally:
        sys.setswitchinterval(interval)
    return results
