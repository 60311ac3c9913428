"""Stream-ordered pools: memory that is allocated and freed in the order of a stream, here and in other processes.

A pool leaves the process by a descriptor, and then each of its allocations by 64 bytes. Who may use what, and for how
long, is counted: memory needs its pool, so in whatever order things are closed the driver sees free, then destroy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ..driver.foreign import HANDLE_BYTES
from ..driver.protocol import Driver
from ..errors import BusyError, ClosedError, ProtocolError, UsageError
from ..lifetime import Claim, Handle, Owned, own, shielded, take, unwinding
from ..spec import Access, HandleKind, Location
from . import checks
from .capabilities import pools
from .event import LEGACY_STREAM, stream_number
from .foreign import ForeignRegion, Opened, allocate_pointer, open_pointer

if TYPE_CHECKING:
    from typing import Self

_PATIENCE = 10.0  # seconds to wait for what another thread is just closing


class Destroy:
    """The undo of one pool. Internal to this room; the counted handle comes first and what it owns second."""

    __slots__ = ("driver", "driver_pool", "what", "where")

    def __init__(self, driver: Driver, where: Location, what: str) -> None:
        self.driver = driver
        self.driver_pool: int | None = None
        self.where = where
        self.what = what

    def describe(self) -> str:
        """What the handle is called."""
        return f"{self.what} on {self.where}"

    def __call__(self) -> None:
        if self.driver_pool is not None:
            pools(self.driver).pool_destroy(self.driver_pool)


class Gone:
    """The undo of a handle that what was opened depends on: so it runs when that is closed, and says so."""

    __slots__ = ("done", "key", "opened")

    def __init__(self, opened: dict[bytes, tuple[Opened, Gone]], key: bytes) -> None:
        self.opened = opened
        self.key = key
        # A bare lock, not an Event: setting one of those waits for its inner lock, and finalizers come here (I3).
        self.done = threading.Lock()
        self.done.acquire()

    def __call__(self) -> None:
        found = self.opened.get(self.key)
        if found is not None and found[1] is self:
            self.opened.pop(self.key, None)
        if self.done.locked():
            self.done.release()

    def wait(self, label: str) -> None:
        """Wait until it has run."""
        if not take(self.done, _PATIENCE):
            raise BusyError(f"{label} is being closed, and that does not come to an end")
        self.done.release()


class Pool(Owned):
    """A stream-ordered pool of a GPU. Made by :meth:`create`, or by :meth:`import_` of another process's.

    Closing it gives up this object's claim; the pool goes when nothing that was allocated from it or opened in it is
    in use any more.
    """

    __slots__ = ("_exported", "_is_imported", "_kinds", "_lock", "_opened", "_undo")

    def __init__(self, undo: Destroy, claim: Claim, kinds: HandleKind, *, imported: bool = False) -> None:
        self._undo = undo
        self._kinds = kinds
        self._is_imported = imported
        self._exported: int | None = None
        self._opened: dict[bytes, tuple[Opened, Gone]] = {}
        self._lock = threading.RLock()  # held over driver calls; never reached from a finalizer
        self._claim = claim

    @classmethod
    @shielded
    def create(
        cls, driver: Driver, location: Location | str, *, handle_kinds: HandleKind = HandleKind.POSIX_FD
    ) -> Self:
        """Make a pool.

        Parameters
        ----------
        driver : Driver
            The driver that serves `location`.
        location : Location or str
            The GPU whose memory it hands out.
        handle_kinds : HandleKind
            How its memory must be able to leave this process; this cannot be chosen later. NONE for never.

        Raises
        ------
        UnsupportedError
            If the driver or the device has no pools, or none that leave the process so.
        """
        able = pools(driver)
        place, kinds = checks.place(driver, location), checks.kinds(handle_kinds)
        undo = Destroy(driver, place, "pool")
        return cls(undo, _owned(undo, lambda: able.pool_create(place, kinds)), kinds)

    @classmethod
    @shielded
    def import_(cls, driver: Driver, fd: int, location: Location | str) -> Self:
        """Open another process's pool, to open its allocations one by one; see :meth:`open`.

        Do so once for each pool: what two of these objects open is not counted together.

        Parameters
        ----------
        fd : int
            What :meth:`export` gave there. It is lent: it stays the caller's and may be closed afterwards.
        location : Location or str
            The GPU that the pool is on.

        Raises
        ------
        ProtocolError
            If it is no descriptor of a pool.
        UnsupportedError
            If the driver has no pools.
        """
        able = pools(driver)
        place = checks.place(driver, location)
        number = checks.descriptor(fd)
        undo = Destroy(driver, place, "pool of another process")
        claim = _owned(undo, lambda: able.pool_import(number, HandleKind.POSIX_FD, place))
        return cls(undo, claim, HandleKind.NONE, imported=True)

    # -- what it is ---------------------------------------------------------------------------------------------
    @property
    def driver(self) -> Driver:
        """The driver that made it."""
        return self._undo.driver

    @property
    def location(self) -> Location:
        """The GPU that it is on."""
        return self._undo.where

    @property
    def handle_kinds(self) -> HandleKind:
        """How its memory can leave this process; NONE for another process's pool, which alone hands it on."""
        return self._kinds

    @property
    def driver_pool(self) -> int:
        """The driver's own number for it. Raises ClosedError or ForkedError when that means nothing any more."""
        self.handle  # noqa: B018  (the check)
        return self._undo.driver_pool or 0

    @property
    def is_imported(self) -> bool:
        """Whether another process made it."""
        return self._is_imported

    def __repr__(self) -> str:
        kinds = (self._kinds.name or "none").lower()
        words = {"imported": self._is_imported, "exported": self._exported is not None, "closed": self.is_closed}
        return f"<Pool {self.location}, {kinds}{''.join(f', {word}' for word, state in words.items() if state)}>"

    # -- its memory -----------------------------------------------------------------------------------------------
    @shielded
    def allocate(self, nbytes: int | str, stream: int = LEGACY_STREAM) -> ForeignRegion:
        """Return new memory as a region, which arrays can lie on. What is in it is undefined.

        When the last claim on it goes, all work of the GPU is waited for and the memory freed: that it may be freed
        without waiting, in the order of a stream, is for those who call the driver themselves.

        Parameters
        ----------
        nbytes : int or str
            Its size in bytes.
        stream : int
            The driver's number of the stream whose later work it is ready for; 1 is the legacy default stream. Work on
            other streams has to be put in order with that one.

        Raises
        ------
        OutOfMemoryError
            If there is not enough.
        UsageError
            If another process made the pool, or that is no stream of its GPU.
        """
        size, number = checks.positive(nbytes, "nbytes", 1), stream_number(stream)
        handle = self.handle
        if self._is_imported:
            raise UsageError(f"{handle.label}: only its maker allocates from it; open() what it sends")
        kinds = HandleKind.POOL if HandleKind.POSIX_FD in self._kinds else HandleKind.NONE
        return allocate_pointer(self.driver, self.driver_pool, size, number, self.location, kinds, (handle,))

    @shielded
    def export(self) -> int:
        """Lend a descriptor of the pool: duplicate or send it, never close it.

        Made at the first call and kept (measured: 540 microseconds each); closed with the pool.

        Raises
        ------
        UsageError
            If it was not created to leave the process so, or another process made it.
        """
        handle = self.handle
        if HandleKind.POSIX_FD not in self._kinds:
            why = "another process made it, which alone hands it on" if self._is_imported else (
                "ask for it at creation: handle_kinds=HandleKind.POSIX_FD"
            )  # fmt: skip
            raise UsageError(f"{handle.label} cannot be exported: {why}")
        with self._lock:
            if self._exported is None:
                with handle.claim("export"):  # another thread may close this object while the driver works
                    fd = pools(self.driver).pool_export(self.driver_pool, HandleKind.POSIX_FD)
                    handle.keep(f"exported descriptor of {handle.label}", partial(os.close, fd))
                self._exported = fd
            return self._exported

    @shielded
    def open(
        self, handle: bytes, nbytes: int, *, access: Access = Access.READ_WRITE, depends: Iterable[Handle] = ()
    ) -> ForeignRegion:
        """Open an allocation that the pool's maker sent, as a region.

        What is open already is not opened again: the driver does not count, and the first to be closed would unmap
        both (measured). Each call returns a region object of its own over the same memory, with a claim of its own,
        and the last of them closes it.

        Parameters
        ----------
        handle : bytes
            The 64 bytes that name it.
        nbytes : int
            The size of the whole allocation, as its owner stated it.
        access : Access
            What this region object says that may be done; the driver knows no rights for one process.
        depends : iterable of Handle
            What must outlive it, such as a lease; let go of after it is closed.

        Raises
        ------
        ProtocolError
            If the bytes are none of this pool, its maker freed what they name, or that has not `nbytes`.
        UsageError
            If this process made the pool: what it allocated is there already.
        BusyError
            If it is just being closed, and that does not come to an end.
        """
        mine = self.handle
        if not self._is_imported:
            raise UsageError(f"{mine.label} is this process's own: use the regions that allocate() returned")
        if not isinstance(handle, (bytes, bytearray, memoryview)) or memoryview(handle).nbytes != HANDLE_BYTES:
            raise ProtocolError(f"handle must be {HANDLE_BYTES} bytes, not {handle!r:.80}")
        key, size, right = bytes(handle), checks.size(nbytes, "nbytes"), checks.access(access)
        others = tuple(depends)
        with self._lock:
            found = self._opened.get(key)
            if found is not None:
                known, before = found
                try:
                    return _checked(known, size).region(right, others)
                except ClosedError:
                    for one in (mine, *others):
                        one.check()  # it was none of these that is closed
                    before.wait(known.handle.label)
            gone = Gone(self._opened, key)
            end = own("opened pool memory", gone)
            try:
                region = open_pointer(
                    self.driver, self.driver_pool, key, size, self.location, access=right,
                    depends=(mine, end.handle, *others),
                )  # fmt: skip
                self._opened[key] = (region.opened, gone)
            finally:
                end.release()
            return region


def _checked(known: Opened, nbytes: int) -> Opened:
    """Return what is open if it has as many bytes as its owner says now."""
    there = known.infos[0].nbytes
    if nbytes != there:
        raise ProtocolError(f"{nbytes} bytes were said to be there, and before that {there}, of the same allocation")
    return known


def _owned(undo: Destroy, make: Callable[[], int]) -> Claim:
    """Make a pool whose undo is known already; nothing is left if that fails."""
    claim = own(undo.describe, undo)
    try:
        undo.driver_pool = make()
    except BaseException as error:
        with unwinding(error):
            claim.release()
        raise
    return claim
