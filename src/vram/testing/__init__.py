"""Conformance suites and checkers, for this project and for whoever writes a driver, a wrapper or a transport.

A suite is a class to inherit from: supply the fixtures it names and pytest runs its tests on your implementation.
Needs the extra ``vram[testing]``. Nothing else in the library imports this package.

Importing it in a run of pytest has the asserts of the suites rewritten, so that one that fails shows its values. The
suites are loaded on first use, and no sooner.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .channel import ChannelContract as ChannelContract
    from .driver import DriverContract as DriverContract
    from .faults import FaultyDriver as FaultyDriver
    from .foreign import ForeignContract as ForeignContract
    from .foreign import Stranger as Stranger
    from .ledger import Ledger as Ledger
    from .memory import MemoryContract as MemoryContract
    from .other_process import OtherProcess as OtherProcess
    from .scene import CAPABILITIES as CAPABILITIES
    from .transport import Ends as Ends
    from .transport import LocalEnds as LocalEnds
    from .transport import TransportContract as TransportContract

_HOMES = {
    "CAPABILITIES": "scene",
    "ChannelContract": "channel",
    "DriverContract": "driver",
    "Ends": "transport",
    "FaultyDriver": "faults",
    "ForeignContract": "foreign",
    "Ledger": "ledger",
    "LocalEnds": "transport",
    "MemoryContract": "memory",
    "OtherProcess": "other_process",
    "Stranger": "foreign",
    "TransportContract": "transport",
}

__all__ = sorted(_HOMES)


def _rewrite_asserts() -> None:
    """The children of tests import this package without pytest, which takes its time to load: they do without."""
    if "pytest" not in sys.modules:
        return
    import pkgutil

    import pytest

    pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))


_rewrite_asserts()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return __all__
