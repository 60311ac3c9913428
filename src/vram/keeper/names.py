"""The names of a catalogue: their versions, which of those are current or leased, and the number that comes next."""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from .failures import unknown
from .records import Lease, Name, Version, beginning
from .rules import check_name

MAX_REMEMBERED = 16_384  # names without an entry whose last number is known


class Names:
    """Names, under which versions are found, and listed from a place on that is looked up.
    A name is `known` while a version of it is current or leased; afterwards only its last number is."""

    def __init__(self) -> None:
        self.known: dict[str, Name] = {}
        self.numbers: OrderedDict[str, int] = OrderedDict()  # last number of names that are not known any more
        self.floor = 0  # numbers of forgotten names were not above this
        self.entries = 0  # names that can be attached
        self._sorted: list[str] = []  # all that are known

    # -- finding --------------------------------------------------------------------------------------------------
    def current(self, name: str) -> Version | None:
        """Return the version that attaching by name gives."""
        known = self.known.get(name)
        return None if known is None else known.current

    def find(self, name: str, number: int) -> Version | None:
        """Return a version by its number, if it is there."""
        known = self.known.get(name)
        if known is None or (known.current is not None and known.current.number == number):
            return None if known is None else known.current
        return known.older.get(number)

    def last(self, name: str) -> int:
        """Return the number of the last version of a name, or one that is above those of all forgotten names."""
        known = self.known.get(name)
        return self.numbers.get(name, self.floor) if known is None else known.last

    def versions_of(self, name: str, after: int = 0) -> Iterator[Version]:
        """Return the versions of a name that exist and are above `after`, oldest first."""
        known = self.known.get(name)
        if known is None:
            raise unknown(check_name(name))
        return known.beginning(after + 1)

    def held(self, name: str) -> tuple[int, int]:
        """Return the number of leases on the versions of a name, and the bytes of those versions, each counted once."""
        known = self.known.get(name)
        held = [] if known is None else [one for one in known.beginning(0) if one.leases]
        return sum(len(one.leases) for one in held), sum(one.nbytes for one in held)

    def listed(self, prefix: str = "", after: str = "") -> Iterator[tuple[Version, int]]:
        """Yield the current versions of names beginning with `prefix` and behind `after`, in order of their names,
        each with the number of older versions that are still held."""
        for name in self._from(prefix, after):
            known = self.known[name]
            if known.current is not None and name != after:
                yield known.current, len(known.older)

    def leases_under(self, prefix: str, after: tuple[str, int, int] = ("", 0, 0)) -> Iterator[Lease]:
        """Yield the leases on names beginning with `prefix`, by name, version and number, from behind such a place."""
        for name in self._from(prefix, after[0]):
            _, number, last = after if name == after[0] else ("", 0, 0)
            for version in self.known[name].beginning(number):
                yield from beginning(version.leases, last + 1 if version.number == number else 0)

    def _from(self, prefix: str, place: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, in order, from a place on."""
        start = bisect_left(self._sorted, max(prefix, place))
        return itertools.takewhile(lambda name: name.startswith(prefix), itertools.islice(self._sorted, start, None))

    # -- changing -------------------------------------------------------------------------------------------------
    def add(self, name: str) -> Name:
        """Return a name, which is known from now on."""
        known = self.known.get(name)
        if known is None:
            known = self.known[name] = Name(name, last=self.numbers.pop(name, self.floor))
            insort(self._sorted, name)
        return known

    def set_current(self, known: Name, version: Version) -> None:
        """Have a version be the current one."""
        self.entries += known.current is None
        known.current = version

    def retire(self, known: Name, version: Version) -> None:
        """Have the current version be an older one."""
        self.entries -= 1
        known.current = None
        known.older[version.number] = version

    def tidy(self, known: Name) -> str:
        """Keep of a name without versions nothing but its last number, and of the oldest such names not even that:
        whatever comes under a forgotten name starts above all forgotten numbers. Return a name that was forgotten."""
        if known.current is not None or known.older:
            return ""
        del self.known[known.name], self._sorted[bisect_left(self._sorted, known.name)]
        self.numbers[known.name] = known.last
        if len(self.numbers) <= MAX_REMEMBERED:
            return ""
        forgotten, number = self.numbers.popitem(last=False)
        self.floor = max(self.floor, number)
        return forgotten
