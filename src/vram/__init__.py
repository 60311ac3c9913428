"""One stable address for a piece of memory: grow it in place, share it, keep it alive when its maker is gone.

The public names are loaded on first use (PEP 562): ``import vram`` loads neither numpy, sockets, a driver nor a
framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"
