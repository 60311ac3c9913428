"""What tests of several files use: MIB2, PAGE, needs_root."""

from __future__ import annotations

import os

import pytest

from vram.testing.keeper import FUTURE_WRITE, GROW, SHRINK

MIB2 = 2 << 20


PAGE = SHRINK | GROW | FUTURE_WRITE


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be other users")
