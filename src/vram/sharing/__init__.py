"""Lets other processes in: the mechanism. Messages and descriptors, no drivers and no frameworks.

For people with a channel of their own there is :class:`IpcMemHandle`, the 64 bytes of cudaMalloc memory. It is loaded
on first use, with what it needs; the rest of this room is used by the rooms above it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .legacy_ipc import IpcMemHandle as IpcMemHandle

__all__ = ["IpcMemHandle"]


if not TYPE_CHECKING:  # with it a name that is not there would be an `object` to a type checker, and no mistake

    def __getattr__(name: str) -> object:
        if name != "IpcMemHandle":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from .legacy_ipc import IpcMemHandle

        return IpcMemHandle
