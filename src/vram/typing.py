"""Names for annotations: arrays and streams as the verbs take them, and the classes of what the verbs return.

Programs name them in signatures and in ``isinstance``. Each name is loaded on first use, with its room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arrays.hints import ArrayLike, StreamLike
    from .arrays.route import ShareRoute
    from .collectives.symmetric import SymmetricBuffer
    from .entries.follower import Follower
    from .entries.frames import Frame, Frames
    from .entries.lend import Lending
    from .entries.publish import Published
    from .entries.reading import Section
    from .entries.ring import NewFrame
    from .entries.update import Update
    from .nodes.replicate import Replicated

_HOMES = {
    "ArrayLike": "arrays.hints", "Follower": "entries.follower", "Frame": "entries.frames", "Frames": "entries.frames",
    "Lending": "entries.lend", "NewFrame": "entries.ring", "Published": "entries.publish",
    "Replicated": "nodes.replicate", "Section": "entries.reading", "ShareRoute": "arrays.route",
    "StreamLike": "arrays.hints", "SymmetricBuffer": "collectives.symmetric", "Update": "entries.update",
}  # fmt: skip

__all__ = [
    "ArrayLike", "Follower", "Frame", "Frames", "Lending", "NewFrame", "Published", "Replicated", "Section",
    "ShareRoute", "StreamLike", "SymmetricBuffer", "Update",
]  # fmt: skip


if not TYPE_CHECKING:  # with it a name that is not there would be an `object` to a type checker, and no mistake

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"vram.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
