"""Contracts for the authors of drivers and of transports, as suites of pytest, and the ledger.

A contract is a class to inherit from: supply the fixtures that it names, and pytest runs its tests on your
implementation. It needs the extra ``vram[testing]``. No other part of the library imports this package.
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.driver", f"{__name__}.transport")  # before they are imported

from .driver import CAPABILITIES, DriverContract  # noqa: E402
from .ledger import Ledger  # noqa: E402
from .transport import Ends, LocalEnds, TransportContract  # noqa: E402

__all__ = ["CAPABILITIES", "DriverContract", "Ends", "Ledger", "LocalEnds", "TransportContract"]
