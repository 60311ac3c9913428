"""Allocations and mappings, as the CUDA driver keeps them in its books."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...lifetime import close_all
from ...spec import Access, HandleKind
from ..books import Mapping, Reservation

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

    def all(self) -> list[int]:
        """Return the numbers that are out, each as often as it is."""
        return [number for number, out in self._out.copy().items() for _ in tuple(out)]

    def __iter__(self) -> Iterator[int]:
        return iter([number for number, out in self._out.copy().items() if out])

    def __len__(self) -> int:
        return sum(1 for _ in self)
