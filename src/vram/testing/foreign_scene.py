"""What the tests about memory of others stand on: the other process, and windows that close."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..driver.protocol import LiveObjects
from ..spec import Access
from .other_process import OtherProcess
from .scene import DriverSuite, Scene

__all__ = ["KIB", "ForeignSuite", "refused_there"]

KIB = 1024


class ForeignSuite(DriverSuite):
    """The fixtures that the parts of the contract share."""

    @pytest.fixture(scope="class")
    @classmethod
    def elsewhere(cls) -> Callable[[], Any]:
        """Supply what makes a driver of the same kind in another process: a function of a module, or a class."""
        raise NotImplementedError("supply a fixture `elsewhere`, for the class")

    @pytest.fixture(scope="class")
    @classmethod
    def neighbour(cls, elsewhere: Callable[[], Any]) -> Iterator[OtherProcess]:
        """The other process: one for all tests of a class, since its start takes longer than they do."""
        with OtherProcess(elsewhere) as other:
            yield other

    @pytest.fixture
    def other(self, neighbour: OtherProcess, scene: Scene) -> Iterator[OtherProcess]:
        """The other process. What a test leaves there fails it: the books there must agree, too."""
        before = neighbour.call("live")
        yield neighbour
        assert neighbour.call("live") == before

    @contextlib.contextmanager
    def window(self, scene: Scene, address: int, nbytes: int, access: Access = Access.READ_WRITE) -> Iterator[int]:
        """Open a window for the length of a block."""
        driver: Any = scene.driver
        window = driver.window_open(address, nbytes, scene.location, access)
        try:
            yield window
        finally:
            driver.window_close(window)


@contextlib.contextmanager
def refused_there(other: OtherProcess, error: type[Exception]) -> Iterator[None]:
    """Expect an error that says something from the other process, and that nothing has changed there (I4)."""
    before: LiveObjects = other.call("live")
    with pytest.raises(error) as caught:
        yield
    assert str(caught.value)
    assert other.call("live") == before
