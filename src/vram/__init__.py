"""One stable address for a piece of memory: grow it in place, share it, keep it alive when its maker is gone.

The public names are loaded on first use (PEP 562): ``import vram`` loads neither numpy, sockets, a driver nor a
framework.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import builtins

    from . import transports as transports
    from .arrays import Array as Array
    from .arrays.create import asarray as asarray
    from .arrays.create import empty as empty
    from .arrays.create import zeros as zeros
    from .arrays.route import Route as Route
    from .arrays.share import copy_in as copy_in
    from .arrays.share import explain as explain
    from .arrays.share import share as share
    from .entries.administration import holders as holders
    from .entries.administration import list_entries as _list_entries
    from .entries.administration import remove as remove
    from .entries.administration import revoke as revoke
    from .entries.administration import show as show
    from .entries.administration import statistics as statistics
    from .entries.attach import attach as attach
    from .entries.attach import attach_or_publish as attach_or_publish
    from .entries.borrow import borrow as borrow
    from .entries.lease import Lease as Lease
    from .entries.lend import Lending as Lending
    from .entries.lend import lend as lend
    from .entries.publish import Published as Published
    from .entries.publish import publish as publish
    from .entries.put import put as put
    from .errors import AccessDeniedError as AccessDeniedError
    from .errors import AddressSpaceError as AddressSpaceError
    from .errors import AlignmentError as AlignmentError
    from .errors import BusyError as BusyError
    from .errors import CapacityError as CapacityError
    from .errors import ClosedError as ClosedError
    from .errors import DeviceLostError as DeviceLostError
    from .errors import DriverError as DriverError
    from .errors import ForkedError as ForkedError
    from .errors import InternalError as InternalError
    from .errors import LeakWarning as LeakWarning
    from .errors import MismatchError as MismatchError
    from .errors import MissingFileError as MissingFileError
    from .errors import NotFoundError as NotFoundError
    from .errors import OutOfMemoryError as OutOfMemoryError
    from .errors import PeerError as PeerError
    from .errors import PeerGoneError as PeerGoneError
    from .errors import ProtocolError as ProtocolError
    from .errors import QuotaError as QuotaError
    from .errors import RangeError as RangeError
    from .errors import ReleaseWarning as ReleaseWarning
    from .errors import UnsupportedError as UnsupportedError
    from .errors import UsageError as UsageError
    from .errors import VramError as VramError
    from .errors import WaitTimeoutError as WaitTimeoutError
    from .handover.array_channel import ArrayChannel as ArrayChannel
    from .keeper import keeper as keeper
    from .keeper.reports import ArrayInfo as ArrayInfo
    from .keeper.reports import EntryInfo as EntryInfo
    from .keeper.reports import HolderInfo as HolderInfo
    from .keeper.reports import RevokeInfo as RevokeInfo
    from .keeper.reports import StatisticsInfo as StatisticsInfo
    from .keeper.reports import VersionInfo as VersionInfo
    from .keeper.session import Keeper as Keeper
    from .memory import AddressReservation as AddressReservation
    from .memory import Event as Event
    from .memory import MemoryMapping as MemoryMapping
    from .memory import MulticastObject as MulticastObject
    from .memory import PhysicalAllocation as PhysicalAllocation
    from .memory import Pool as Pool
    from .memory import Region as Region
    from .sharing.legacy_ipc import IpcMemHandle as IpcMemHandle
    from .spec import Access as Access
    from .spec import AllocationFlags as AllocationFlags
    from .spec import AllocationSpec as AllocationSpec
    from .spec import HandleKind as HandleKind
    from .spec import Location as Location

    list = _list_entries  # type checkers take an import under another name for a private one

__version__ = "0.1.0"

# Where each public name lives, and what it is called there if that differs; the room `keeper` is the verb.
_HOMES = {
    "arrays": "Array",
    "errors": "AccessDeniedError AddressSpaceError AlignmentError BusyError CapacityError ClosedError"
    " DeviceLostError DriverError ForkedError InternalError LeakWarning MismatchError MissingFileError"
    " NotFoundError OutOfMemoryError PeerError PeerGoneError ProtocolError QuotaError RangeError"
    " ReleaseWarning UnsupportedError UsageError VramError WaitTimeoutError",
    "entries.attach": "attach attach_or_publish",
    "arrays.create": "asarray empty zeros",
    "handover.array_channel": "ArrayChannel",
    "entries.administration": "holders list=list_entries remove revoke show statistics",
    "entries.publish": "Published publish",
    "entries.put": "put",
    "entries.lease": "Lease",
    "entries.borrow": "borrow",
    "entries.lend": "Lending lend",
    "arrays.route": "Route",
    "arrays.share": "copy_in explain share",
    "keeper": "keeper=",
    "keeper.reports": "ArrayInfo EntryInfo HolderInfo RevokeInfo StatisticsInfo VersionInfo",
    "keeper.session": "Keeper",
    "memory": "AddressReservation Event MemoryMapping MulticastObject PhysicalAllocation Pool Region",
    "sharing.legacy_ipc": "IpcMemHandle",
    "spec": "Access AllocationFlags AllocationSpec HandleKind Location",
    "transports": "transports=",
}
_EXPORTS = {
    public: (module, inner if equals else public)
    for module, names in _HOMES.items()
    for public, equals, inner in (name.partition("=") for name in names.split())
}

__all__ = sorted(_EXPORTS)


if not TYPE_CHECKING:  # with it a name that is not there would be an `object` to a type checker, and no mistake

    def __getattr__(name: str) -> object:
        home = _EXPORTS.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        if home[0].startswith("arrays"):  # which see no hand-over: this teaches multiprocessing to pass arrays
            import_module(".handover", __name__)
        module = import_module(f".{home[0]}", __name__)
        value = getattr(module, home[1]) if home[1] else module
        globals()[name] = value  # found without this function from now on
        return value


def __dir__() -> builtins.list[str]:
    return __all__
