"""What tests of several files use: MIB2, PAGE, needs_root."""

from __future__ import annotations

from vram.testing.keeper import FUTURE_WRITE, GROW, SHRINK

MIB2 = 2 << 20


PAGE = SHRINK | GROW | FUTURE_WRITE
