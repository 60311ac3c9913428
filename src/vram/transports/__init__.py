"""Moves bytes between places: GPUs and the host, within a process and between two, by measured speed.

:func:`select` ranks what there is and makes the fastest; :mod:`.contract` says what all of them promise, and
``vram.testing.transport`` checks it.
"""

from __future__ import annotations

from .contract import Estimate, ExportedBuffer, No, Statistics, Traffic, Yes
from .endpoint import Transport
from .exchanges import Exchange, SocketExchange
from .ipc import IpcTransport
from .local import LocalTransport
from .memory_file import SharedMemoryExchange
from .peer import PeerTransport
from .pipes import PipeExchange
from .remote import RemoteTransport
from .selection import Ranked, Selection, register, select
from .shm import ShmTransport
from .staged import StagedTransport
from .vmm import VmmTransport

__all__ = [
    "Estimate",
    "Exchange",
    "ExportedBuffer",
    "IpcTransport",
    "LocalTransport",
    "No",
    "PeerTransport",
    "PipeExchange",
    "Ranked",
    "RemoteTransport",
    "Selection",
    "SharedMemoryExchange",
    "ShmTransport",
    "SocketExchange",
    "StagedTransport",
    "Statistics",
    "Traffic",
    "Transport",
    "VmmTransport",
    "Yes",
    "register",
    "select",
]
