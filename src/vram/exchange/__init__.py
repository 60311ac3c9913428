"""The verbs people type: each in its module, loaded when it is first used.

Importing any of them teaches :mod:`multiprocessing` to pass arrays without copying them: at once if it is loaded, else
when it is.
"""

from __future__ import annotations

from .reducers import register

register()
