"""Moves bytes between places: GPUs and the host, within a process and between two, by measured speed.

:func:`select` ranks what there is and makes the fastest; :mod:`.contract` says what all of them promise, and
``vram.testing.transport`` checks it.
"""

from __future__ import annotations

from .contract import Estimate, ExportedBuffer, No, Statistics, Traffic, Yes
from .endpoint import Transport
from .exchanges import Exchange, PipeExchange, SharedMemoryExchange, SocketExchange
from .local import LocalTransport, PeerTransport
from .remote import IpcTransport, RemoteTransport, VmmTransport
from .selection import Ranked, Selection, register, select
from .shm import ShmTransport
from .staged import StagedTransport

__all__ = [
    "Estimate", "Exchange", "ExportedBuffer", "IpcTransport", "LocalTransport", "No", "PeerTransport",
    "PipeExchange", "Ranked", "RemoteTransport", "Selection", "SharedMemoryExchange", "ShmTransport",
    "SocketExchange", "StagedTransport", "Statistics", "Traffic", "Transport", "VmmTransport", "Yes", "register",
    "select",
]  # fmt: skip
