"""The hand of another process: it lends and borrows what it is told to, one call at a time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import queue
import signal
import threading
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.connections import close_clients
from tests.support.raw_cuda import CudaStranger

import standin
import vram
from vram import driver as drivers
from vram import lifetime
from vram.errors import VramError
from vram.handover import pickling
from vram.spec import HandleKind, Location

GRANULE = 2 << 20
START = 4096  # bytes into its allocation at which what another library made is shown
COUNT = 1000


class Interface:
    """An array of another library, as ``__cuda_array_interface__`` shows it."""

    def __init__(self, address: int, count: int = COUNT, dtype: str = "<i4", *, readonly: bool = False) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, readonly), "shape": (count,), "typestr": dtype, "version": 3
        }  # fmt: skip


def numbers(first: int = 0) -> Any:
    """What is in everything that :class:`Sources` makes."""
    return np.arange(first, first + COUNT, dtype="i4")


def _no(route: vram.typing.ShareRoute) -> None:
    if not route:
        raise vram.errors.UnsupportedError(str(route), "", "", "")


class Sources:
    """Memory of every kind, filled; given back at the end of the block."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._stranger: CudaStranger | None = None
        self.addresses: dict[str, int] = {}

    @property
    def stranger(self) -> CudaStranger:
        if self._stranger is None:
            self._stranger = self._open.enter_context(CudaStranger())
        return self._stranger

    def make(self, kind: str, first: int = 0) -> Any:
        """Return memory that can be lent: of the host, of a GPU by us, or by others (vmm, legacy, pool)."""
        if kind in ("host", "cuda:0", "cuda:1"):
            array = self._open.enter_context(vram.empty(COUNT, "int32", device=kind))
            array[...] = numbers(first)
            return array
        base = {
            "vmm": lambda: self.stranger.mapped((GRANULE,), HandleKind.POSIX_FD),
            "legacy": lambda: self.stranger.legacy(GRANULE),
            "pool": lambda: self.stranger.pooled(GRANULE, shareable=True)[1],
        }[kind]()
        self.addresses[kind] = base
        made = Interface(base + START)
        with vram.share(made) as shared:
            shared[...] = numbers(first)
        return made

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


class Hand:
    """Does what it is told, in its own process."""

    def __init__(self) -> None:
        self._leases: dict[str, vram.Lease] = {}
        self._views: dict[str, Any] = {}
        self._told: dict[str, threading.Event] = {}
        self._reader: threading.Thread | None = None
        self._found: list[Any] = []
        self._sources = Sources()
        self._lendings: dict[str, vram.typing.Lending] = {}

    # -- borrowing --------------------------------------------------------------------------------------------------
    def borrow(self, path: str, key: str = "", **options: Any) -> dict[str, tuple[Any, ...]]:
        """Borrow, and say what is there."""
        lease = self._leases[key] = vram.borrow(path, **options)
        return {name: (str(a.device), a.shape, str(a.dtype), a.readonly) for name, a in lease.items()}

    def try_borrow(self, path: str, **options: Any) -> tuple[str, str]:
        """Borrow what cannot be borrowed, and return the error's name and words."""
        try:
            vram.borrow(path, **options).close()
        except VramError as error:
            return type(error).__name__, str(error)
        return "", ""

    def start_reading(self, path: str, **options: Any) -> str:
        """Borrow and read in another thread, while the work that fills the memory is undone for as long as the caller
        likes. Return the thread's first step: ``"waits"`` for an event, or ``"read"`` without any wait."""
        driver: Any = drivers.get(Location("cuda"))
        came: queue.SimpleQueue[str] = queue.SimpleQueue()
        real = driver.event_synchronize

        def run() -> None:
            try:
                with vram.borrow(path, **options) as lease:
                    self._found.append(lease.array.to_host())
            except BaseException as error:
                self._found.append(error)
            came.put("read")

        driver.event_synchronize = lambda event: (came.put("waits"), real(event))[1]
        try:
            self._reader = threading.Thread(target=run)
            self._reader.start()
            return came.get(timeout=30)
        finally:
            driver.event_synchronize = real

    def end_reading(self) -> Any:
        """Return what the thread of :meth:`start_reading` read."""
        assert self._reader is not None
        self._reader.join(30)
        return self._found.pop()

    def read(self, key: str = "", name: str | None = None) -> Any:
        """Return what is in an array."""
        lease = self._leases[key]
        return (lease.array if name is None else lease[name]).to_host()

    def write(self, value: int, key: str = "", name: str | None = None) -> str:
        """Write to an array; return the name of the error, if it may not be written."""
        lease = self._leases[key]
        try:
            (lease.array if name is None else lease[name])[...] = value
        except (VramError, ValueError) as error:
            return type(error).__name__
        return ""

    def address(self, key: str = "", name: str | None = None) -> int:
        lease = self._leases[key]
        return (lease.array if name is None else lease[name]).address

    def view(self, key: str = "") -> None:
        """Take a slice that lives on when the lease is closed."""
        self._views[key] = self._leases[key].array[10:20]

    def read_view(self, key: str = "") -> Any:
        return self._views[key].to_host()

    def drop_view(self, key: str = "") -> None:
        del self._views[key]
        gc.collect()

    def close(self, key: str = "") -> None:
        self._leases.pop(key).close()

    def on_revoke(self, how: str, key: str = "") -> None:
        """Be told: ``close`` closes the lease from the callback, ``note`` only notes it."""
        told = self._told[key] = threading.Event()

        def callback(lease: vram.Lease) -> None:
            if how == "close":
                lease.close()
            told.set()

        self._leases[key].on_revoke(callback)

    def was_told(self, key: str = "", timeout: float = 120.0) -> bool:
        return self._told[key].wait(timeout)

    def upgrade(self, key: str = "") -> list[int]:
        """Borrow the same again, from the lease."""
        with self._leases[key].upgrade() as again:
            return list(again.array.to_host()[:3])

    def hand_on(self, path: str, key: str = "") -> dict[str, tuple[str, str]]:
        """Try every way to hand on what was borrowed; say how each is refused."""
        array = self._leases[key].array
        one, other = vram.ArrayChannel.pair()
        ways = {
            "lend": lambda: vram.lend(array, at=path + "2").close(),
            "send": lambda: one.send(array),
            "pickle": lambda: ForkingPickler.dumps(array),
            "explain": lambda: _no(vram.explain(array)),
        }
        said = {}
        with one, other:
            for name, way in ways.items():
                try:
                    way()
                    said[name] = ("", "")
                except VramError as error:
                    said[name] = (type(error).__name__, str(error))
        pickling.shut_down()
        with vram.copy(array) as copied:
            said["copy"] = (type(copied).__name__, str(vram.explain(copied)))
        return said

    def pickle(self, key: str = "") -> bytes:
        return pickle.dumps(self._leases[key].array)

    def unpickle(self, data: bytes) -> Any:
        """Have what another process borrowed, and return its first numbers."""
        with pickle.loads(data) as array:
            return array.to_host()[:3].tolist()

    # -- lending ----------------------------------------------------------------------------------------------------
    def lend(self, path: str, *kinds: str, **options: Any) -> None:
        """Lend memory of a kind, or of several under their names."""
        made = {kind: self._sources.make(kind) for kind in kinds}
        self._lendings[path] = vram.lend(made if len(made) > 1 else made[kinds[0]], at=path, **options)

    def end(self, path: str) -> None:
        self._lendings.pop(path).close()
        if not self._lendings:
            self._sources.__exit__()
            self._sources = Sources()

    # -- what is held -----------------------------------------------------------------------------------------------
    def books(self) -> tuple[Any, ...]:
        """Count what this process holds: handles, objects of the drivers, descriptors, mappings of shared memory."""
        close_clients()
        gc.collect()
        objects = {name: str(driver.live()) for name, driver in drivers._drivers.items()}
        fds = len(os.listdir("/proc/self/fd"))
        maps = Path("/proc/self/maps").read_text().count("/memfd:vram (")
        return sorted(handle.label for handle in lifetime.live()), objects, fds, maps, self.standin_live()

    def descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def standin_live(self) -> dict[str, int]:
        if "cuda" not in drivers._drivers:
            return {}
        return {kind: count for kind, count in standin.Standin().live().items() if not kind.startswith("context")}

    def warm_up(self) -> None:
        """Do once what leaves something behind for good: the first use of a driver and of its context."""
        vram.zeros(10, device="host").close()
        if standin.missing() is not None:
            return
        driver: Any = drivers.get(Location("cuda"))
        driver.stream_destroy(driver.stream_create(Location("cuda", 0)))
        driver.event_destroy(driver.event_create(Location("cuda", 0), interprocess=True))

    def calls(self, name: str) -> int:
        return standin.Standin().calls(name)

    def clear_calls(self) -> None:
        standin.Standin().clear()

    def defer(self, on: bool) -> None:
        standin.Standin().defer(on)

    def stream(self) -> int:
        driver: Any = drivers.get(Location("cuda"))
        return int(driver.stream_create(Location("cuda", 0)))

    def destroy_stream(self, stream: int) -> None:
        driver: Any = drivers.get(Location("cuda"))
        driver.stream_destroy(stream)

    def copy_on(self, stream: int, key: str = "") -> Any:
        """Copy what was borrowed on a stream, and return what came of it once that is done."""
        driver: Any = drivers.get(Location("cuda"))
        source = self._leases[key].array
        with vram.empty(source.shape, source.dtype, device="cuda:0") as target:
            driver.copy_async(target.address, source.address, source.nbytes, stream)
            driver.stream_synchronize(stream, Location("cuda", 0))
            return target.to_host()

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Stop in the middle of everything, as a process does that a debugger looks at."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def forbid_ptrace(self) -> None:
        """Let nobody of this user trace this process, open its descriptors or read its memory."""
        set_dumpable, suid_dump_disable = 4, 0
        assert ctypes.CDLL(None).prctl(set_dumpable, suid_dump_disable, 0, 0, 0) == 0
