"""Memory from one process to another, without a keeper and without names.

One end exports memory and the other imports it: descriptors the first time, an id ever after. :class:`ArrayChannel` and
pickling for :mod:`multiprocessing` are two ways to use it. Importing any module of it teaches :mod:`multiprocessing` to
pass arrays without copying them: at once if it is loaded, else when it is.
"""

from __future__ import annotations

from .reducers import register

register()
