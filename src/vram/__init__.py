"""One stable address for a piece of memory: grow it in place, share it, keep it alive when its maker is gone.

Here are the verbs, what they return, and the values that both take. The modules :mod:`~vram.aio` (the verbs that wait,
to be awaited), :mod:`~vram.errors`, :mod:`~vram.info` (what a keeper says of what it holds), :mod:`~vram.memory`,
:mod:`~vram.sharing` (memory by hand) and :mod:`~vram.transports` have the rest, and need no import of their own.

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
    from .arrays import Array as Array
    from .arrays.create import asarray as asarray
    from .arrays.create import empty as empty
    from .arrays.create import pack as pack
    from .arrays.create import zeros as zeros
    from .arrays.hints import ArrayLike as ArrayLike
    from .arrays.hints import StreamLike as StreamLike
    from .arrays.resize import resize as resize
    from .arrays.route import ShareRoute as ShareRoute
    from .arrays.share import copy as copy
    from .arrays.share import explain as explain
    from .arrays.share import share as share
    from .arrays.sleep import sleep as sleep
    from .arrays.sleep import wake as wake
    from .arrays.torch_pool import TorchPool as TorchPool
    from .collectives.group import Group as Group
    from .collectives.symmetric import SymmetricBuffer as SymmetricBuffer
    from .entries.administration import entry as entry
    from .entries.administration import holders as holders
    from .entries.administration import list_entries as list_entries
    from .entries.administration import remove as remove
    from .entries.administration import revoke as revoke
    from .entries.administration import statistics as statistics
    from .entries.attach import attach as attach
    from .entries.attach import attach_or_publish as attach_or_publish
    from .entries.borrow import borrow as borrow
    from .entries.follower import Follower as Follower
    from .entries.follower import follow as follow
    from .entries.lease import Lease as Lease
    from .entries.lend import Lending as Lending
    from .entries.lend import lend as lend
    from .entries.park import park as park
    from .entries.publish import Published as Published
    from .entries.publish import publish as publish
    from .entries.publish_file import publish_file as publish_file
    from .entries.ring import Ring as Ring
    from .entries.update import update as update
    from .handover.array_channel import ArrayChannel as ArrayChannel
    from .keeper.session import Keeper as Keeper
    from .keeper.session import private_keeper as private_keeper
    from .maps import memory_map as memory_map
    from .memory import Region as Region
    from .memory.ahead import prepare as prepare
    from .memory.pinned import trim as trim
    from .memory.sleep import on_remap as on_remap
    from .nodes.replicate import Replicated as Replicated
    from .nodes.replicate import replicate as replicate
    from .progress import show_progress as show_progress
    from .spec import Access as Access
    from .spec import AllocationFlags as AllocationFlags
    from .spec import AllocationSpec as AllocationSpec
    from .spec import HandleKind as HandleKind
    from .spec import Location as Location
    from .version import __version__ as __version__

# Where each public name lives; the names of modules end with an equals sign.
_HOMES = {
    "aio": "aio=",
    "arrays": "Array",
    "arrays.create": "asarray empty pack zeros",
    "arrays.hints": "ArrayLike StreamLike",
    "arrays.resize": "resize",
    "arrays.route": "ShareRoute",
    "arrays.share": "copy explain share",
    "arrays.sleep": "sleep wake",
    "arrays.torch_pool": "TorchPool",
    "collectives.group": "Group",
    "collectives.symmetric": "SymmetricBuffer",
    "entries.administration": "entry holders list_entries remove revoke statistics",
    "entries.attach": "attach attach_or_publish",
    "entries.borrow": "borrow",
    "entries.follower": "Follower follow",
    "entries.lease": "Lease",
    "entries.lend": "Lending lend",
    "entries.park": "park",
    "entries.publish": "Published publish",
    "entries.publish_file": "publish_file",
    "entries.ring": "Ring",
    "entries.update": "update",
    "errors": "errors=",
    "handover.array_channel": "ArrayChannel",
    "info": "info=",
    "keeper.session": "Keeper private_keeper",
    "maps": "memory_map",
    "memory": "memory= Region",
    "memory.ahead": "prepare",
    "memory.pinned": "trim",
    "memory.sleep": "on_remap",
    "nodes.replicate": "Replicated replicate",
    "progress": "show_progress",
    "sharing": "sharing=",
    "spec": "Access AllocationFlags AllocationSpec HandleKind Location",
    "transports": "transports=",
}
_EXPORTS = {
    public: (module, "" if is_module else public)
    for module, names in _HOMES.items()
    for public, is_module, _ in (name.partition("=") for name in names.split())
}

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
