"""Groups of processes: meeting, symmetric buffers, and the collectives on them."""

from __future__ import annotations

from .group import Group
from .symmetric import SymmetricBuffer

__all__ = ["Group", "SymmetricBuffer"]
