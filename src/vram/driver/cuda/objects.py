"""Allocations, mappings, and what else the driver gives out by a number, as they are kept in the books."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

from ...errors import DeviceLostError, UsageError
from ...lifetime import close_all, noted
from ...spec import Access, HandleKind
from ..books import Mapping, Reservation
from .bindings import Bindings
from .devices import Device, Devices

Place = tuple[int, int]  # CUmemLocationType and id
NOWHERE: Place = (0, 0)  # CU_MEM_LOCATION_TYPE_INVALID: not known yet, or a multicast object, which is at no place
UNCLAIMED = "unclaimed"  # among the driver handles of an allocation: nobody's yet


class CudaMemory:
    """An allocation and its users: handles by number, mappings by themselves; `raw` has the driver's own numbers. The
    driver exports no imported memory (INVALID_VALUE): its descriptor or fabric bytes are kept, and sent again."""

    __slots__ = ("_fds", "fabric", "is_imported", "kinds", "nbytes", "place", "raw", "users")

    def __init__(
        self, nbytes: int, kinds: HandleKind, place: Place, fd: int | None = None, fabric: bytes = b""
    ) -> None:
        self._fds = [] if fd is None else [fd]
        self.fabric = fabric  # what it was imported by
        self.is_imported = fd is not None or bool(fabric)
        self.nbytes = nbytes
        self.kinds = kinds
        self.place = place
        self.raw: dict[object, int] = {}
        self.users: dict[object, None] = {}

    @property
    def is_memory(self) -> bool:
        """Whether it is, and no multicast object."""
        return self.place != NOWHERE

    def hold(self, user: object) -> int:
        """Write down a user."""
        self.users[user] = None
        return 0

    def drop(self, user: object) -> None:
        """Strike a user out; the last one closes the descriptor."""
        self.users.pop(user, None)
        if not self.users:
            with contextlib.suppress(IndexError):  # another thread closed it
                close_all(self._fds)

    @property
    def fd(self) -> int | None:
        """The descriptor that it was imported from, which a user keeps open; None for memory that was made here."""
        return self._fds[0] if self._fds else None


class CudaMapping(Mapping):
    """A memory at an address, and what each place may do there. `access` is the most that any of them may."""

    __slots__ = ("rights",)

    def __init__(self, address: int, memory: Any, reservation: Reservation) -> None:
        super().__init__(address, memory, reservation)
        self.rights: dict[Place, Access] = {}


class Window:
    """A span that somebody else keeps mapped, in the place of a mapping for the calls that move bytes. `kind` says
    which call undoes it, empty if another library owns it; `is_gone` says that nothing is left to undo."""

    __slots__ = ("address", "is_gone", "kind", "nbytes", "rights")

    memory = None  # none that the books know

    def __init__(self, address: int, nbytes: int, rights: dict[Place, Access], kind: str = "") -> None:
        self.address = address
        self.nbytes = nbytes
        self.rights = rights
        self.kind = kind
        self.is_gone = False

    @property
    def access(self) -> Access:
        """The most that any place may do there."""
        return max(self.rights.values())


class Counted:
    """The ordinals of GPUs by numbers that the driver may give out several times: a pool, imported again. Each step is
    atomic, of a dictionary or list: no undo waits. A number stays when none is out: pools are few."""

    def __init__(self) -> None:
        self._out: dict[int, list[int]] = {}

    def __setitem__(self, number: int, ordinal: int) -> None:
        self._out.setdefault(number, []).append(ordinal)

    def get(self, number: int, default: int | None = None) -> int | None:
        """Return the ordinal of the GPU, or `default` if it is not out."""
        for ordinal in reversed(self._out.get(number, ())):
            return ordinal
        return default

    def pop(self, number: int, default: None = None) -> int | None:
        """Take one of them out; `default` if all are."""
        out = self._out.get(number, [])
        try:
            return out.pop()
        except IndexError:
            return default

    def __iter__(self) -> Iterator[int]:
        """Each number as often as it is out."""
        return iter([number for number, out in self._out.copy().items() for _ in tuple(out)])

    def __len__(self) -> int:
        return sum(map(len, self._out.copy().values()))


class Table:
    """Objects of one kind that were made under a GPU's context: `out` has the GPU's ordinal by the driver's number.
    `undo` is the function that takes one back, `unknown` what is said of a number that is not out."""

    def __init__(
        self, bindings: Bindings, devices: Devices, undo: str, unknown: str, out: dict[int, int] | Counted | None = None
    ) -> None:
        self._call = bindings
        self._devices = devices
        self._undo = undo
        self._unknown = unknown
        self.out: dict[int, int] | Counted = {} if out is None else out

    def device_of(self, number: int) -> Device:
        """Return the GPU to use an object under: its own, or any for that of another library, which knows its own."""
        return self._devices.used(self.out.get(number))

    def make(self, device: Device, call: str, *arguments: Any, number: int | None = None) -> int:
        """Make something under a device's context and write it down; nothing is left if any of that fails (I4).
        The table has it under `number`, by default what the driver puts out."""
        room, made = ctypes.c_uint64(), 0
        given = arguments if number is not None else (ctypes.byref(room), *arguments)

        def make() -> None:
            nonlocal made
            self._call.past(call, *given)
            made = room.value if number is None else number

        try:
            device.run(make)
            self.out[made] = device.ordinal
        except BaseException as error:
            if made:
                with noted(error):
                    self.out[made] = device.ordinal  # if it fails it stays there
                    self.take_back(call, made)
            raise
        return made

    def take_back(self, call: str, number: int) -> None:
        """Take back what the driver knows by a number, once; after a failure it is in the table again. It leaves the
        table before it leaves the driver, which gives the number out again at once."""
        ordinal, is_gone = self.out.pop(number, None), False
        if ordinal is None:
            raise UsageError(f"{call}({number:#x}): {self._unknown}")

        def undo() -> None:
            nonlocal is_gone
            self._call.undo(self._undo, number)
            is_gone = True

        try:
            self._devices.all[ordinal].run(undo)
        except DeviceLostError:
            return
        except BaseException:
            if not is_gone:  # or it was the context that could not be left
                self.out[number] = ordinal
            raise
