"""The 64 bytes by which cudaMalloc memory is opened in another process, for people who have a channel of their own.

For an address inside an allocation the driver returns the handle of its base, and opening that gives the base: so base,
offset and size are asked for together here, and travel beside the bytes. Opened twice, it is opened once and counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from .. import driver as drivers
from ..driver.protocol import HANDLE_BYTES
from ..errors import ProtocolError, RangeError, UsageError
from ..lifetime import Owned, own, shielded
from ..memory.allocation import or_else
from ..memory.capabilities import foreign, legacy
from ..memory.foreign import ForeignRegion, open_handle
from ..memory.kinds import BY_MAKER, LEGACY
from ..spec import Access, Location, format_size, parse_size
from .opened import Openings

if TYPE_CHECKING:
    from ..driver.protocol import Driver

_OTHERS = {
    "opened": "it is another process's, opened here: ask its owner for the handle, which is good for any process",
    "managed": "it is managed memory, which does not leave its process: copy it",
    "host": "it is memory of the host, which has no such handle: copy it, or make it with device='host'",
}


@dataclass(frozen=True, slots=True)
class IpcMemHandle:
    """A ``cudaIpcMemHandle_t``: 64 bytes that name an allocation of ``cudaMalloc`` to other processes.

    The memory lives as long as its maker lets it, and the bytes are no secret and not checked by the driver: whoever
    has them reads and writes the allocation. Tell its maker when you are done, before it frees the memory.

    Parameters
    ----------
    data : bytes
        The 64 bytes. They name the base of the allocation.
    offset : int
        Where in the allocation, in bytes, what is meant begins.
    nbytes : int
        Bytes from there on to the end of the allocation; 0 where nobody said.
    allocation_nbytes : int
        The size of the whole allocation in bytes; 0 where nobody said.

    Raises
    ------
    UsageError
        Unless these are 64 bytes, and numbers that agree with each other.

    Examples
    --------
    In the process that made the memory, and in another one:

    >>> handle = vram.sharing.IpcMemHandle.of(tensor.data_ptr())  # doctest: +SKIP
    >>> channel.send((handle.to_bytes(), handle.offset, tensor.nbytes))  # doctest: +SKIP

    >>> data, offset, nbytes = channel.recv()  # doctest: +SKIP
    >>> handle = vram.sharing.IpcMemHandle.from_bytes(data, offset=offset)  # doctest: +SKIP
    >>> with handle.open(nbytes, device="cuda:0") as memory:  # doctest: +SKIP
    ...     use(memory.address, memory.nbytes)
    """

    data: bytes
    offset: int = 0
    nbytes: int = 0
    allocation_nbytes: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.data, bytes) or len(self.data) != HANDLE_BYTES:
            came = f"{len(self.data)} bytes" if isinstance(self.data, bytes) else f"{self.data!r:.40}"
            raise UsageError(f"an IpcMemHandle has exactly {HANDLE_BYTES} bytes; {came} came")
        for name in ("offset", "nbytes", "allocation_nbytes"):
            parse_size(getattr(self, name), what=name)
        if self.allocation_nbytes and self.offset + self.nbytes > self.allocation_nbytes:
            raise RangeError(
                f"bytes {self.offset} to {self.offset + self.nbytes} are not within an allocation of "
                f"{self.allocation_nbytes}"
            )

    def __repr__(self) -> str:
        return (
            f"<IpcMemHandle {self.data[:8].hex()}..., {self.nbytes} bytes at {self.offset} of {self.allocation_nbytes}>"
        )

    @classmethod
    def of(cls, address: int, *, driver: Driver | None = None) -> IpcMemHandle:
        """Return the handle of the allocation that an address lies in, and where in it that is.

        Parameters
        ----------
        address : int
            Any address within memory of ``cudaMalloc`` of this process, such as a tensor's ``data_ptr()``.
        driver : Driver, optional
            By default this process's driver of GPUs.

        Raises
        ------
        UsageError
            For any other memory: it says which way that travels.
        UnsupportedError
            If there is no driver of GPUs.
        """
        if isinstance(address, bool) or not isinstance(address, int) or not 0 <= address < 2**64:
            raise UsageError(f"{address!r:.40} is no address: a number such as tensor.data_ptr()")
        asked = drivers.get(Location("cuda")) if driver is None else driver
        able = legacy(asked)
        info = foreign(asked).pointer_info(address)
        kind = BY_MAKER.get(info.made_by)
        if kind is not LEGACY:
            way = _OTHERS.get("host" if info.location.id == "host" else info.made_by, f"it was made by {info.made_by}")
            if kind and info.location.id != "host":
                way = f"it was made with {kind.makes}, and goes {kind.goes} if it was made to be shared: vram.lend"
            raise UsageError(f"the memory at {address:#x} has no {HANDLE_BYTES}-byte handle of cudaMalloc's: {way}")
        offset = address - info.base
        return cls(able.ipc_export(info.base), offset, info.nbytes - offset, info.nbytes)

    def to_bytes(self) -> bytes:
        """Return the 64 bytes, without offset and size: send them beside."""
        return self.data

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, offset: int = 0) -> IpcMemHandle:
        """Read the 64 bytes that another process sent.

        Parameters
        ----------
        data : bytes-like
            The result of :meth:`to_bytes` there, or ``cudaIpcGetMemHandle``.
        offset : int
            Where in the allocation what is meant begins, as the sender said, in bytes.

        Raises
        ------
        UsageError
            If it is no bytes at all.
        ProtocolError
            If they are not 64, or the offset is none.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise UsageError(f"an IpcMemHandle is read from {HANDLE_BYTES} bytes, not from {data!r:.40}")
        raw = bytes(data)
        if len(raw) != HANDLE_BYTES:
            raise ProtocolError(f"an IpcMemHandle has exactly {HANDLE_BYTES} bytes; {len(raw)} came")
        try:
            return cls(raw, offset)
        except UsageError as error:
            raise ProtocolError(f"an IpcMemHandle came that is none: {error}") from None

    def open(self, nbytes: int | str | None = None, *, device: str | Location = "cuda:0") -> OpenedMemory:
        """Open the memory in this process; see :func:`open`."""
        return open(self, nbytes, device=device)


class OpenedMemory(Owned):
    """Memory of another process, open here, from `address` (base plus offset); `region` begins at the base. Closing
    gives up one count: the driver closes the memory after the last, when the work on it is done."""

    __slots__ = ("address", "nbytes", "region")

    def __init__(self, address: int, nbytes: int, region: ForeignRegion) -> None:
        self.address = address
        self.nbytes = nbytes
        self.region = region
        self._claim = own(region.handle.label, region.close)

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"<OpenedMemory {self.region.location} {self.address:#x} {format_size(self.nbytes)}{state}>"


@shielded
def open(handle: IpcMemHandle, nbytes: int | str | None = None, *, device: str | Location = "cuda:0") -> OpenedMemory:
    """Open cudaMalloc memory of another process; `nbytes` from the handle's offset on, by default its own size, or all.
    Raises ProtocolError for a bad or freed handle or too few bytes, UsageError for this process's own memory."""
    if not isinstance(handle, IpcMemHandle):
        raise UsageError(f"open takes an IpcMemHandle, not {handle!r:.40}; see IpcMemHandle.from_bytes")
    if nbytes is None:
        size = handle.nbytes
    elif not (size := parse_size(nbytes, what="nbytes")):
        raise UsageError("nbytes is 0: there is nothing to open; say how many bytes the sender meant, or leave it out")
    region = open_whole(handle.data, Location.parse(device))
    with or_else(region.close):
        size = size or region.nbytes - handle.offset
        if not 0 < size <= region.nbytes - handle.offset:
            what = f"{size} bytes are not" if size > 0 else "nothing is"
            raise ProtocolError(f"{what} at offset {handle.offset}: the allocation has {region.nbytes} bytes")
        return OpenedMemory(region.address + handle.offset, size, region)


_openings = Openings()  # by their 64 bytes and the GPU


def open_whole(data: bytes, place: Location) -> ForeignRegion:
    """Open all of an allocation, of the size that the driver tells, or count one more user of it."""
    driver = drivers.get(place)
    legacy(driver)  # memory of the host has none: says so
    user = driver.canonical(place)
    enter = partial(open_handle, driver, LEGACY, data, None, user)
    return _openings.region((data, user), None, Access.READ_WRITE, (), enter)
