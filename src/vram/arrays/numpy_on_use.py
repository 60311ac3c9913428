"""numpy, loaded when something of it is first used.

Loading it takes longer than all else that a verb needs (the case ``first-use`` of the benchmarks), and whoever attaches
memory of a GPU or hands arrays on may never need it. So the modules here that use numpy take ``np`` from this one, and
use nothing of it while they are imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["np"]

if TYPE_CHECKING:
    import numpy as np
else:

    class _Numpy:
        """Stands for the module; remembers what was asked for, so that the second time costs what a module does."""

        def __getattr__(self, name: str) -> object:
            import numpy

            value = getattr(numpy, name)
            setattr(self, name, value)
            return value

    np = _Numpy()
