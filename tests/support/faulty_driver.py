"""Failures on demand: a wrapper of a real driver that refuses the calls it was told to refuse.

No mock: everything else is forwarded, so the memory is real and so are the consequences. The wrapper keeps the
contract of drivers itself.

To see that an operation leaves nothing behind wherever it fails::

    for nth in itertools.count(1):
        with driver.inject(nth=nth) as fault:
            ...  # the operation; if it raised, look at driver.live()
        if not fault.fired:
            break  # it makes fewer than nth calls
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Collection
from typing import Any

from vram.driver.host import HostDriver
from vram.driver.protocol import Driver
from vram.errors import DriverError, OutOfMemoryError, UsageError
from vram.testing import CAPABILITIES

# The calls that take something back.
UNDO = frozenset(
    {"address_free", "mem_release", "mem_unmap", "event_destroy", "ipc_close", "pool_close_pointer", "pool_destroy"}
) | {"ipc_free", "window_close"}

_NEVER = frozenset({"live", "name"})  # the books are how tests see what happened


def _methods(protocol: type) -> frozenset[str]:
    return frozenset(name for name in vars(protocol) if not name.startswith("_")) - _NEVER


_ALL = _methods(Driver).union(*(_methods(capability) for capability in CAPABILITIES.values()))


class Fault:
    """One thing that will go wrong; as a context manager it stops going wrong at the end of the block."""

    def __init__(
        self,
        faults: list[Fault],
        methods: Collection[str],
        nth: int,
        error: BaseException | Callable[[], BaseException] | None,
        forever: bool,
        thread: int,
    ) -> None:
        self._faults = faults
        self._methods = methods
        self._nth = nth
        self._error = error
        self._forever = forever
        self._thread = thread
        self._count = itertools.count(1)  # atomic: drivers are called from finalizers, where a lock must not be
        self._fired: list[str] = []
        self.first: BaseException | None = None  # what was raised first
        faults.append(self)

    @property
    def fired(self) -> tuple[str, ...]:
        """The methods that failed because of this."""
        return tuple(self._fired)

    def remove(self) -> None:
        """Stop. Idempotent."""
        if self in self._faults:
            self._faults.remove(self)

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _strike(self, method: str) -> None:
        if method not in self._methods or self._thread not in (0, threading.get_ident()):
            return
        count = next(self._count)
        if count == self._nth or (self._forever and count > self._nth):
            self._fired.append(method)
            error = self._error or DriverError(f"{method} (injected)", errno.EIO, "EIO")
            error = error if isinstance(error, BaseException) else error()
            self.first = self.first or error
            raise error


class FaultyDriver:
    """Forward to `inner`, except where a fault was injected.

    A call that fails does so before anything was done, as the calls of a real driver do. ``live()`` and ``name``
    neither fail nor count. The wrapper offers the capabilities of `inner` but those to `hide`.
    """

    def __new__(cls, inner: Driver, hide: Collection[type] = ()) -> FaultyDriver:
        names = set(_methods(Driver))
        for capability in CAPABILITIES.values():
            if isinstance(inner, capability) and capability not in hide:
                names |= _methods(capability)
        # A class of its own: the protocols' isinstance looks for methods at the class, not at __getattr__.
        kind = type(cls.__name__, (cls,), {name: _forward(name) for name in names})
        return object.__new__(kind)

    def __init__(self, inner: Driver, hide: Collection[type] = ()) -> None:
        self.inner = inner
        self._faults: list[Fault] = []
        self._calls: list[str] = []

    @property
    def name(self) -> str:
        """The name of what is wrapped."""
        return self.inner.name

    def live(self) -> Any:
        """Return the books of what is wrapped."""
        return self.inner.live()

    def inject(
        self,
        method: str | Collection[str] | None = None,
        nth: int = 1,
        error: BaseException | Callable[[], BaseException] | None = None,
        *,
        forever: bool = False,
        only_here: bool = False,
    ) -> Fault:
        """Let the `nth` of all calls, or of those of a `method`, fail; `forever`: all later ones, too.

        `only_here` counts and fails calls of this thread only. What could never fail is a UsageError.
        """
        methods = _ALL if method is None else frozenset({method} if isinstance(method, str) else method)
        if unknown := methods - _ALL:
            raise UsageError(f"no driver has the methods {sorted(unknown)}; there are {sorted(_ALL)}")
        if nth < 1 or not methods:
            raise UsageError(f"inject: nth is {nth} and methods are {sorted(methods)}; this could never fail")
        return Fault(self._faults, methods, nth, error, forever, threading.get_ident() if only_here else 0)

    def clear(self) -> None:
        """Remove all faults, and forget the calls so far."""
        self._faults.clear()
        self._calls.clear()

    @property
    def calls(self) -> tuple[str, ...]:
        """The names of the methods called since the last :meth:`clear`, in order, failed ones included."""
        return tuple(self._calls)

    def count(self, method: str | Collection[str] | None = None) -> int:
        """Return how often a method was called since the last :meth:`clear`; None means all of them together."""
        if method is None:
            return len(self._calls)
        names = {method} if isinstance(method, str) else method
        return sum(name in names for name in self.calls)


def _forward(name: str) -> Callable[..., Any]:
    def call(self: FaultyDriver, *args: Any, **options: Any) -> Any:
        self._calls.append(name)
        for fault in tuple(self._faults):
            fault._strike(name)
        return getattr(self.inner, name)(*args, **options)

    call.__name__ = name
    return call


class PlainDriver:
    """Real memory through a driver that offers no capability."""

    name = "host"

    def __init__(self) -> None:
        self._inner = HostDriver()

    def __getattr__(self, name: str) -> Any:
        if name not in vars(Driver):
            raise AttributeError(name)
        return getattr(self._inner, name)


def work(*beginnings: str, also: Collection[str] = ()) -> frozenset[str]:
    """Name the calls of the host's driver, and `also` others, that begin so and take nothing back."""
    return frozenset(name for name in {*dir(FaultyDriver(HostDriver())), *also} if name.startswith(beginnings)) - UNDO


ERRORS: dict[str, Callable[[], BaseException]] = {
    "error": lambda: DriverError("injected", errno.EIO, "EIO"),
    "out of memory": lambda: OutOfMemoryError("injected", errno.ENOMEM, "ENOMEM"),
}
