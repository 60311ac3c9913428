"""Contracts for the authors of drivers and of transports, as suites of pytest, and the ledger.

A contract is a class to inherit from: supply the fixtures that it names, and pytest runs its tests on your
implementation. It needs the extra ``vram[testing]``. No other part of the library imports this package.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .driver import CAPABILITIES, DriverContract
    from .ledger import Ledger
    from .transport import Ends, LocalEnds, TransportContract

__all__ = ["CAPABILITIES", "DriverContract", "Ends", "Ledger", "LocalEnds", "TransportContract"]
_HOMES = dict(zip(__all__, ("driver", "driver", "transport", "ledger", "transport", "transport"), strict=True))

if "pytest" in sys.modules:  # without it, as in the children of tests, nothing asserts
    sys.modules["pytest"].register_assert_rewrite(*(f"{__name__}.{home}" for home in set(_HOMES.values())))


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return globals().setdefault(name, getattr(import_module(f".{_HOMES[name]}", __name__), name))


def __dir__() -> list[str]:
    return __all__
