"""Keeps memory alive when its maker is gone: a process that holds descriptors, names and leases, and its client.

Import what you need from the modules: :mod:`.client` in programs, :mod:`.private` for a keeper of your own,
``python -m vram.keeper`` for the process itself. Nothing here imports numpy or a driver.

The room has the name of a verb: ``with vram.keeper() as k`` calls it, and gets :func:`.session.keeper`.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .session import Keeper


class _Room(ModuleType):
    """A module that can be called: importing anything from this room makes it an attribute of ``vram``, where users
    expect the verb."""

    def __call__(self, **options: Any) -> AbstractContextManager[Keeper]:
        from .session import keeper

        return keeper(**options)


sys.modules[__name__].__class__ = _Room
