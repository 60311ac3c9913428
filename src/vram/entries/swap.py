"""Two slots of what is updated in place: readers stay in one while the publisher writes the other.

Version `v` is in slot ``(v - 1) % 2``, so no reader waits; before version ``v + 1`` is written, the publisher waits for
the readers in version ``v - 1``. A thread that enters sets its word to "either slot" before it loads the version, and
to the slot after that: so the publisher sees the word, or the thread sees the version that was counted before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

from ..arrays import Array
from ..errors import UsageError

if TYPE_CHECKING:
    from .lease import Lease


def slot_of(version: int) -> int:
    """Return the slot that a version is in."""
    return (version - 1) & 1


# -- the reader's ------------------------------------------------------------------------------------------------------
class Slot(Mapping[str, Array]):
    """The arrays of one slot of a lease, by name: where they are never changes, and what is in them is of no one
    version but inside of a section that is in this slot."""

    __slots__ = ("_lease", "_number")

    def __init__(self, lease: Lease, number: int) -> None:
        self._lease, self._number = lease, number

    def __getitem__(self, name: str) -> Array:
        return self._lease._array_in(self._number, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._lease._manifest.arrays)

    def __len__(self) -> int:
        return len(self._lease._manifest.arrays)

    def __repr__(self) -> str:
        return f"<slot {self._number} of {self._lease!r}>"


def slots(lease: Lease) -> tuple[Slot, ...]:
    """Return the slots of a lease on what has several."""
    return tuple([Slot(lease, number) for number in range(lease._manifest.slots)])


def current(lease: Lease) -> int:
    """Return the slot that the calling thread's section is in. Raises UsageError outside of a section of this lease."""
    for page in lease._pages:
        mine = page.slots_of.get(get_ident())
        if mine is not None and mine.depth and mine.version:
            return slot_of(mine.version)
    raise UsageError(
        f"{lease.name!r} was published with swap=True: which of its two slots is read is decided where a section "
        f"begins, and this thread is in none. Ask inside of lease.reading(), or lease.slots for the arrays of both"
    )


# -- the publisher's ---------------------------------------------------------------------------------------------------
class Span(NamedTuple):
    """Bytes of one memory: its number, where they begin and where they end."""

    memory: int
    start: int
    stop: int


class Given(Mapping[str, Array]):
    """The arrays that the block of an update may write.
    A name that is asked for is added to `asked` and `differs` before its array is given out: the block may raise."""

    __slots__ = ("_arrays", "_asked", "_differs")

    def __init__(self, arrays: Mapping[str, Array], asked: set[str], differs: set[str]) -> None:
        self._arrays, self._asked, self._differs = arrays, asked, differs

    def __getitem__(self, name: str) -> Array:
        array = self._arrays[name]
        self._differs.add(name)
        self._asked.add(name)
        return array

    def __contains__(self, name: object) -> bool:
        return name in self._arrays  # to ask whether it is there is not to ask for it

    def __eq__(self, other: object) -> bool:
        return self is other  # not by its arrays, which comparing would ask for

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def difference(spans: Iterable[Span], cuts: Iterable[Span]) -> list[Span]:
    """Return the bytes of `spans` that are in none of `cuts`, each once and in order, in as few spans as that takes."""
    left: list[Span] = []
    holes = _joined(cuts)
    at = 0
    for memory, start, stop in _joined(spans):
        while at < len(holes) and (holes[at].memory, holes[at].stop) <= (memory, start):
            at += 1
        begin, hole = start, at
        while hole < len(holes) and holes[hole].memory == memory and holes[hole].start < stop:
            if holes[hole].start > begin:
                left.append(Span(memory, begin, holes[hole].start))
            begin = max(begin, holes[hole].stop)
            hole += 1
        if begin < stop:
            left.append(Span(memory, begin, stop))
    return left


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return spans in order, those that touch or overlap as one."""
    found: list[Span] = []
    for span in sorted(spans):
        last = found[-1] if found else None
        if last is not None and last.memory == span.memory and span.start <= last.stop:
            found[-1] = Span(last.memory, last.start, max(last.stop, span.stop))
        elif span.start < span.stop:
            found.append(span)
    return found
