"""What the books of the CUDA driver hold: its allocations and mappings."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ...spec import Access, HandleKind
from ..books import Mapping, Reservation, Ticket

__all__ = ["UNCLAIMED", "Counted", "CudaMapping", "CudaMemory", "Place", "Window"]

Place = tuple[int, int]  # CUmemLocationType and id
UNCLAIMED = "unclaimed"  # among the driver handles of an allocation: nobody's yet


class CudaMemory:
    """An allocation, and who uses it: handles by their number, mappings by themselves.

    What the driver knows of it is a number of its own for each handle, in `raw`; the memory itself lives until the last
    of them is released and the last mapping is gone, which the driver counts.

    The driver exports no memory that it imported (INVALID_VALUE, measured). So of that the descriptor is kept, and what
    goes out again is a duplicate of it.
    """

    __slots__ = ("_fds", "kinds", "nbytes", "place", "raw", "users")

    def __init__(self, nbytes: int, kinds: HandleKind, place: Place, fd: int | None = None) -> None:
        self._fds = [] if fd is None else [fd]
        self.nbytes = nbytes
        self.kinds = kinds
        self.place = place
        self.raw: dict[object, int] = {}
        self.users: dict[object, None] = {}

    def hold(self, user: object) -> int:
        """Write down a user."""
        self.users[user] = None
        return 0

    def drop(self, user: object) -> None:
        """Strike a user out; the last one closes the descriptor."""
        self.users.pop(user, None)
        if not self.users:
            with contextlib.suppress(IndexError):
                os.close(self._fds.pop())

    @property
    def fd(self) -> int | None:
        """What it was imported from, which a user keeps open; None for memory that was made here."""
        return self._fds[0] if self._fds else None


class CudaMapping(Mapping):
    """A memory at an address, and what each place may do there. `access` is the most that any of them may."""

    __slots__ = ("rights",)

    def __init__(self, address: int, memory: Any, reservation: Reservation) -> None:
        super().__init__(address, memory, reservation, False, _NOBODY)
        self.rights: dict[Place, Access] = {}


class Window:
    """A span that somebody else keeps mapped, as the calls that move bytes see it: in the place of a mapping.

    `kind` says which call undoes it; empty if its owner is another library in this process.
    """

    __slots__ = ("address", "kind", "nbytes", "rights")

    memory = None  # none that the books know

    def __init__(self, address: int, nbytes: int, rights: dict[Place, Access], kind: str = "") -> None:
        self.address = address
        self.nbytes = nbytes
        self.rights = rights
        self.kind = kind

    @property
    def access(self) -> Access:
        """The most that any place may do there."""
        return max(self.rights.values())


class Counted(dict[int, int]):
    """Books of what the driver may give out several times under one number: a pool, imported again.

    Every step is one operation of a dictionary or list, which Python makes atomic: no undo waits here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._out: dict[int, list[int]] = {}

    def __setitem__(self, number: int, ordinal: int) -> None:
        self._out.setdefault(number, []).append(ordinal)
        super().__setitem__(number, ordinal)

    def take(self, number: int) -> int | None:
        """Take one of them out; None if all are."""
        out = self._out.get(number)
        try:
            ordinal = out.pop() if out else None
        except IndexError:
            return None
        if not out:
            super().pop(number, None)
            if out:  # another thread was given it in between
                super().__setitem__(number, out[-1])
        return ordinal

    def all(self) -> list[int]:
        """Return the numbers that are out, each as often as it is."""
        return [number for number, out in tuple(self._out.items()) for _ in tuple(out)]


_NOBODY = Ticket()
_NOBODY.is_over = True
