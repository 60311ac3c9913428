"""One stable address for a piece of memory: grow it in place, share it, keep it alive when its maker is gone.

The verbs are here. The modules :mod:`~vram.aio` (the verbs that wait, to be awaited), :mod:`~vram.errors`,
:mod:`~vram.info` (what a keeper says of what it holds), :mod:`~vram.memory` and :mod:`~vram.sharing` (memory by hand),
:mod:`~vram.transports` and :mod:`~vram.typing` (names for annotations) have the rest, and need no import of their own.

The public names are loaded on first use (PEP 562): ``import vram`` loads neither numpy, sockets, a driver nor a
framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import aio as aio
    from . import errors as errors
    from . import info as info
    from . import memory as memory
    from . import sharing as sharing
    from . import transports as transports
    from . import typing as typing
    from .arrays import Array as Array
    from .arrays.create import asarray as asarray
    from .arrays.create import empty as empty
    from .arrays.create import pack as pack
    from .arrays.create import zeros as zeros
    from .arrays.resize import resize as resize
    from .arrays.share import copy as copy
    from .arrays.share import explain as explain
    from .arrays.share import share as share
    from .arrays.sleep import sleep as sleep
    from .arrays.sleep import wake as wake
    from .arrays.torch_pool import TorchPool as TorchPool
    from .collectives.group import Group as Group
    from .entries.administration import entry as entry
    from .entries.administration import holders as holders
    from .entries.administration import list_entries as list_entries
    from .entries.administration import remove as remove
    from .entries.administration import revoke as revoke
    from .entries.administration import statistics as statistics
    from .entries.asleep import detach_all as detach_all
    from .entries.asleep import reattach_all as reattach_all
    from .entries.attach import attach as attach
    from .entries.attach import attach_or_publish as attach_or_publish
    from .entries.borrow import borrow as borrow
    from .entries.follower import follow as follow
    from .entries.lease import Lease as Lease
    from .entries.lend import lend as lend
    from .entries.park import park as park
    from .entries.publish import publish as publish
    from .entries.publish_file import publish_file as publish_file
    from .entries.ring import Ring as Ring
    from .entries.save import save as save
    from .entries.update import update as update
    from .handover.array_channel import ArrayChannel as ArrayChannel
    from .keeper.private import Keeper as Keeper
    from .keeper.private import private_keeper as private_keeper
    from .maps import memory_map as memory_map
    from .memory.ahead import prepare as prepare
    from .nodes.replicate import replicate as replicate
    from .progress import show_progress as show_progress
    from .version import __version__ as __version__

# The public modules, and where each other public name lives.
_MODULES = "aio errors info memory sharing transports typing"
_HOMES = {
    "arrays": "Array",
    "arrays.create": "asarray empty pack zeros",
    "arrays.resize": "resize",
    "arrays.share": "copy explain share",
    "arrays.sleep": "sleep wake",
    "arrays.torch_pool": "TorchPool",
    "collectives.group": "Group",
    "entries.administration": "entry holders list_entries remove revoke statistics",
    "entries.asleep": "detach_all reattach_all",
    "entries.attach": "attach attach_or_publish",
    "entries.borrow": "borrow",
    "entries.follower": "follow",
    "entries.lease": "Lease",
    "entries.lend": "lend",
    "entries.park": "park",
    "entries.publish": "publish",
    "entries.publish_file": "publish_file",
    "entries.ring": "Ring",
    "entries.save": "save",
    "entries.update": "update",
    "handover.array_channel": "ArrayChannel",
    "keeper.private": "Keeper private_keeper",
    "maps": "memory_map",
    "memory.ahead": "prepare",
    "nodes.replicate": "replicate",
    "progress": "show_progress",
}
_EXPORTS = {name: (name, "") for name in _MODULES.split()}
_EXPORTS |= {name: (module, name) for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_EXPORTS)
_EXPORTS["__version__"] = "version", "__version__"  # not one of those that a star brings


if not TYPE_CHECKING:  # with it a name that is not there would be an `object` to a type checker, and no mistake

    def __getattr__(name: str) -> object:
        home = _EXPORTS.get(name)
        if home is None:
            import sys

            # With these two Python says which name was meant.
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        from importlib import import_module

        if home[0].startswith("arrays"):  # which see no hand-over: this teaches multiprocessing to pass arrays
            import_module(".handover", __name__)
        module = import_module(f".{home[0]}", __name__)
        value = getattr(module, home[1]) if home[1] else module
        globals()[name] = value  # found without this function from now on
        return value


def __dir__() -> list[str]:
    return __all__
