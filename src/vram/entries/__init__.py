"""The verbs over names and leases: each in its module, loaded when it is first used.

They stand on :mod:`vram.keeper`, which keeps the memory, and on :mod:`vram.handover`, which carries it from process to
process. Importing any of them teaches :mod:`multiprocessing` to pass arrays without copying them.
"""

from __future__ import annotations

from .. import handover as handover
