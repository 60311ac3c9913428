"""Update what was published, in place: new bytes in the same memory, which no reader sees half of.

In order: the keeper notes the update; the word of state says so, with a barrier behind it; each lease's page is seen
without a thread in a section; the block writes; GPU work is waited for, and the version is counted. An end before the
block changes nothing, an end within it tears the entry. With two slots nothing is torn: the block writes the other one.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from ..arrays import Array
from ..driver import words as shared
from ..errors import AccessDeniedError, BusyError, ForkedError, NotFoundError, TornError, UsageError, VramError
from ..keeper.client import KeeperClient, Segment
from ..keeper.rules import check_name, describe_process
from ..lifetime import let_in, shielded, take, waiting
from ..open_files import close_fds
from ..spec import check_timeout, format_count
from .keepers import NAMED, TIMEOUT, connect, current_of, named_holders
from .reading import NEXT, QUIET, RING, STATE, TORN, UPDATING, VERSION, Gpus
from .swap import Given, Span, difference, slot_of

if TYPE_CHECKING:
    from ..keeper import messages as m
    from ..keeper.private import Keeper
    from ..memory import Region
    from .loaded import Loaded
    from .placement import Placement

_FIRST_PAUSE, _LAST_PAUSE = 0.00005, 0.002  # seconds between two looks at the readers
_ENTERING = 0.005  # seconds in which who enters one of two slots says which, also when others have its processor
_LOOK = 1.0  # seconds that it may take to look at each of them once, however short the timeout is


def update(
    name: str,
    *,
    only: Collection[str] | None = None,
    timeout: float | None = TIMEOUT,
    stream: object = None,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Update:
    """Put new bytes into what this process published with ``updatable=True``, under its readers.

    ``with vram.update("policy") as arrays:`` waits until no reader is in a section (:meth:`Lease.reading`), and keeps
    all out until the block ends; ``arrays["w"].numpy()[...] = new`` then writes into the memory that they have mapped.
    Addresses stay, and no second copy is made. Readers that never enter a section see the bytes change.

    The block has to leave every array whole. If it raises, or this process ends in it, the entry is torn: readers get
    :class:`~vram.errors.TornError` until the next update is complete. Readers may see bytes written outside of such a
    block at any time.

    Of what was published with ``swap=True`` the block gets the arrays of the slot that is not current. Nobody waits for
    readers of the current version, only for those that are still in a section of the version before it. Readers come to
    the new version once the block has ended. If it raises, or this process ends in it, they stay where they are:
    nothing is torn, and the next update begins anew. The block gets the bytes of two versions ago, so it
    writes what it asks for as a whole. Arrays that it does not ask for are copied over at its end, unless both slots
    have the same: the arrays that the update before has asked for, and this one not. Updates that write all copy
    nothing.

    Memory of a GPU may be written on any stream. Readers have waited for their own work there when the block begins,
    and at its end this waits for all work of this process on the GPU; with `stream` for the work on that one alone.

    Parameters
    ----------
    name : str
        The name it was published under.
    only : collection of str, optional
        The arrays that the block writes, by name; it gets no others. By default all of them. An update that is not
        finished tears the entry as a whole, whichever it names, and only one that names these arrays again, or all,
        mends it. With two slots nothing is torn, and the others are copied over.
    timeout : float or None
        Seconds to wait for the readers that are in a section, and for another thread's update; None waits for ever.
    stream : int or object, optional
        The one stream that the block writes by: its number, or an object of torch, CuPy, Numba or cuda.core.
    keeper : Keeper, str or PathLike, optional
        The keeper that has it; see :func:`vram.attach`.

    Returns
    -------
    Update
        A context manager. The block gets a mapping of names to arrays: what was published, where it is.

    Raises
    ------
    BusyError
        When the block is entered: if a reader is still in its section after `timeout` seconds (with two slots: in one
        of the version before the current one), or readers have more leases than can be looked at in that time, and in a
        second; it names them. Nothing has changed then.
    AccessDeniedError
        If another process published it, or nobody who still lives.
    UsageError
        If it was published without ``updatable=True``; if `stream` is not a stream, or captures a graph: what is
        captured is not done in the block; if `only` names no array, or one that is not there.
    TornError
        When the block is entered: if the last update was not finished, and `only` leaves out what that named.
    NotFoundError
        If there is nothing under that name, or it was replaced or removed.
    PeerGoneError
        If there is no keeper. At the end of the block: the update is complete all the same.
    UnsupportedError
        If the kernel lacks ``membarrier``; with `stream`, for memory of the host.
    DriverError
        At the end of the block: if a GPU cannot be waited for, such as while a graph is captured. The entry is torn.
    """
    return Update(check_name(name), _check_only(only), check_timeout(timeout), stream, keeper)


def _check_only(only: object) -> frozenset[str] | None:
    """Return the names of arrays; None for all."""
    if only is None:
        return None
    if isinstance(only, str) or not isinstance(only, Collection) or not only:
        raise UsageError(f"only must be a list of names of arrays, not {only!r:.80}; leave it out to update all")
    if not all(isinstance(name, str) for name in only):
        raise UsageError(f"only names arrays by strings: {only!r:.80}")
    return frozenset(only)


class Writer:
    """The state with which this process updates a version that it published: its words, and arrays over its memory.
    A context manager for the length of the publication, as long as the descriptor of the words is needed."""

    def __init__(self) -> None:
        shared.register()  # or it says now what is missing, and not when the first update is due
        self.name, self.version = "", 0
        self.pid = os.getpid()
        self.slots: list[dict[str, Array]] = []  # of each slot, by name
        self._lent: dict[tuple[int, str], Array] = {}  # what blocks get instead of those, and may close
        self._spans: dict[str, Span] = {}  # of two slots: where each array lies, in the region of the first
        self._regions: list[tuple[Region, Region, int]] = []  # and in both; how far further it lies in the second
        self.differs: set[str] = set()  # of two slots: the arrays that may not be the same in both
        self.is_left = False  # a block has not ended well, and what it had a GPU do may not have been done
        self.gpus = Gpus(())
        self.touched: frozenset[str] = frozenset()  # the arrays that the newest update writes, or wrote
        self.lock = threading.Lock()  # had by whoever updates
        self.owner = 0  # the thread that does
        self._fds: list[int] = []
        try:
            self.words = shared.make(self._fds)
            self.words[VERSION] = 1
        except BaseException:
            close_fds(self._fds)
            raise
        self.segment = Segment(shared.PAGE)

    @property
    def swaps(self) -> bool:
        """Whether there are two slots."""
        return len(self.slots) > 1

    @property
    def arrays(self) -> dict[str, Array]:
        """The published arrays, where they are; of two slots, those of the first."""
        return self.slots[0]

    def guarded(self, plan: Placement | Loaded, segments: Sequence[Segment]) -> list[int]:
        """Return the descriptors of what is published, the page's last; no process can map them writable from now on.
        Memory of a GPU is not sealed: each process maps it as it pleases."""
        self.slots = plan.slots()
        self.gpus = Gpus([array.region for arrays in self.slots for array in arrays.values()])
        if self.swaps:
            self._compare()
        fds = plan.descriptors()
        for fd, segment in zip(fds, segments, strict=False):  # the last segment is the page
            if segment.device == "host":
                shared.guard(fd)
        return [*fds, *self._fds]

    def _compare(self) -> None:
        """Find where in the second slot each array of the first lies. Nothing of it is in the second yet."""
        first, second = self.slots
        numbers: dict[Region, int] = {}
        for name, array in first.items():
            other = second[name]
            number = numbers.setdefault(array.region, len(numbers))
            if number == len(self._regions):
                self._regions.append((array.region, other.region, other.offset - array.offset))
            self._spans[name] = Span(number, array.offset, array.offset + array.nbytes)
        self.differs = set(first)

    def lent(self, name: str, slot: int = 0) -> Array:
        """Return the array that a block gets, another one if some block has closed that."""
        lent = self._lent.get((slot, name))
        if lent is None or lent.is_closed:
            mine = self.slots[slot][name]
            self._lent[slot, name] = lent = Array(mine.region, mine.dtype, mine.shape, offset=mine.offset)
        return lent

    def carry_over(self, slot: int, written: Collection[str]) -> None:
        """Copy into a slot what is not the same in the other one, but for the arrays that were written."""
        spans = self._spans
        differs = self.differs.difference(written)
        if not differs:
            return
        # By their bytes, not their names: two names may be of the same memory, and one of them was written.
        for number, start, stop in difference([spans[name] for name in differs], [spans[name] for name in written]):
            first, second, further = self._regions[number]
            there, here = first.address + start, second.address + start + further
            target, source = (here, there) if slot else (there, here)
            let_in()
            first.driver.copy(target, source, stop - start)

    def published(self, client: KeeperClient, name: str, version: int) -> None:
        """It is: from now on it can be updated by its name."""
        self.name, self.version = name, version
        for arrays in self.slots:
            for array in arrays.values():
                array.region.is_updatable = True
        if client.writers is None:
            client.writers = {}
        client.writers[name] = self

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        close_fds(self._fds)


class Update:
    """One update, made by :func:`update`: enter it once, by ``with``."""

    def __init__(
        self, name: str, only: frozenset[str] | None, timeout: float | None, stream: object,
        keeper: Keeper | str | os.PathLike[str] | None,
    ) -> None:  # fmt: skip
        self._name, self._only, self._timeout, self._stream, self._keeper = name, only, timeout, stream, keeper
        self._number: int | None = None  # the stream's
        self._client: KeeperClient | None = None
        self._writer: Writer | None = None
        self._holds = False  # whether this has the lock
        self._after: int | None = None  # what the word is to say if this ends now; None: it is not ours to say
        self._unwritten: tuple[int | None, frozenset[str], bool]  # what stands until the block begins
        self._asked: set[str] = set()  # of two slots: the arrays that the block has asked for

    def _not_entered(self, _: object) -> None:
        """Take back what was begun for a block that Ctrl-C kept from beginning: nothing was written."""
        if self._writer is not None:
            self._after, self._writer.touched, self._writer.is_left = self._unwritten
        self._end()

    @shielded(undo=_not_entered)
    def __enter__(self) -> Mapping[str, Array]:
        if self._writer is not None or self._client is not None:
            raise UsageError("this update was begun before: call vram.update() for another")
        until = None if self._timeout is None else time.monotonic() + self._timeout
        try:
            self._client = client = connect(self._keeper)
            writer = (client.writers or {}).get(self._name)
            if writer is None:
                raise self._not_ours(client)
            if writer.words[STATE] == RING:
                raise UsageError(f"{self._name!r} is a ring: its frames are written by ring.put() and ring.next()")
            if self._stream is not None:
                self._number = writer.gpus.stream(self._stream)
            self._take(writer, until)
            arrays = self._chosen(writer)
            self._begin(client, writer, until)
        except BaseException:
            self._end()
            raise
        # From here on the block may have written.
        self._unwritten = self._after, writer.touched, writer.is_left
        writer.touched, writer.is_left = frozenset(arrays), True
        if not writer.swaps:
            self._after = TORN
        return arrays

    def _chosen(self, writer: Writer) -> Mapping[str, Array]:
        """Return the arrays that the block gets; of two slots, when it asks for them."""
        only = writer.arrays.keys() if self._only is None else self._only
        for name in sorted(self._only or ()):
            if name not in writer.arrays:
                raise UsageError(f"{self._name!r} has no array {name!r:.80} to update")
        slot = slot_of(writer.words[VERSION] + 1) if writer.swaps else 0
        arrays = {name: writer.lent(name, slot) for name in writer.arrays if name in only}
        if writer.swaps:
            # Before the block has one of them, it is noted as something that the slots do not have in common any more.
            return Given(arrays, self._asked, writer.differs)
        if writer.words[STATE] != QUIET and not writer.touched <= only:
            left = sorted(writer.touched - only)
            raise TornError(
                f"the last update of {self._name!r} was not finished, and may have written "
                f"{format_count(len(left), 'array')} that this one leaves out, such as {left[0]!r:.80}: update what it "
                f"wrote as well"
            )
        return arrays

    def _take(self, writer: Writer, until: float | None) -> None:
        if writer.owner == threading.get_ident():
            raise BusyError(f"this thread is updating {self._name!r} already")
        self._writer = writer
        if not take(writer.lock, None if until is None else until - time.monotonic()):
            raise BusyError(f"{self._name!r} is being updated by another thread of this process")
        self._holds, writer.owner = True, threading.get_ident()

    def _begin(self, client: KeeperClient, writer: Writer, until: float | None) -> None:
        try:
            client.begin_update(self._name, writer.version)
        except NotFoundError:
            if client.writers and client.writers.get(self._name) is writer:
                del client.writers[self._name]  # it will never be updated again
            raise
        words = writer.words
        self._after = words[STATE] if words[STATE] == QUIET else TORN
        if writer.swaps:
            words[NEXT] = words[VERSION] + 1  # for good: nothing relies on it but who is in a section of that slot
        else:
            words[STATE] = UPDATING
        shared.barrier()
        self._wait(client, writer, until)
        if self._after == TORN or writer.is_left:
            writer.gpus.synchronize(None)  # what a block that raised has left behind must not come after this one
        shared.barrier()  # what readers loaded in their sections, they have loaded by now

    def _wait(self, client: KeeperClient, writer: Writer, until: float | None) -> None:
        """Wait until each lease's page was seen without a thread in a section, one lease after the other.
        It ends in time whatever readers write there; the error names readers in a section, or with too many leases."""
        begun = time.monotonic()
        until = math.inf if until is None else until
        after, pause = 0, _FIRST_PAUSE
        looked: dict[tuple[int, int], int] = {}
        but = 0
        if writer.swaps:
            but = 1 << slot_of(writer.words[VERSION])
            until = max(until, begun + _ENTERING)
        while True:
            found = client.pages(self._name, writer.version, after, but)
            now = time.monotonic()
            if found.rows:
                if now >= until:
                    raise self._not_left(found)
                after = found.rows[0].lease - 1  # all before it were seen
                waiting(time.sleep, min(pause, until - now))
                pause = min(pause * 1.1, _LAST_PAUSE)  # late by a tenth of what it has waited, at most
            elif not found.more:
                return
            else:
                for pid, uid, count in found.looked:
                    looked[pid, uid] = looked.get((pid, uid), 0) + count
                if now >= max(until, begun + _LOOK):
                    raise self._not_seen(looked)
                after, pause = found.through, _FIRST_PAUSE

    def _not_left(self, found: m.PageList) -> BusyError:
        count = f"{len(found.rows)} or more" if found.more else len(found.rows)
        which = " of the version before the current one" if self._writer is not None and self._writer.swaps else ""
        return BusyError(
            f"{self._name!r} was not updated: {count} of its readers did not leave their sections{which} "
            f"(lease.reading) within {self._timeout:g} s; nothing has changed",
            named_holders(found.rows),
        )

    def _not_seen(self, looked: dict[tuple[int, int], int]) -> BusyError:
        most = sorted(looked.items(), key=itemgetter(1), reverse=True)
        return BusyError(
            f"{self._name!r} was not updated: its readers have more leases than could be looked at within "
            f"{self._timeout:g} s; {sum(looked.values())} were, and nothing has changed",
            tuple([f"{describe_process(pid, uid, '', '')}, {count} leases" for (pid, uid), count in most[:NAMED]]),
        )

    def _not_ours(self, client: KeeperClient) -> VramError:
        """Return why this process cannot update the entry."""
        row = current_of(client, self._name)
        if row is None:
            return NotFoundError(f"nothing is published as {self._name!r} any more")
        client.begin_update(self._name, row.version)  # raises, unless publishing it was ended in the middle
        client.end_update(self._name, row.version, 1, whole=True)
        return AccessDeniedError(
            f"this process has lost the arrays of {self._name!r}, since their publication was ended before the keeper "
            f"had answered: publish anew"
        )

    # -- the end ------------------------------------------------------------------------------------------------
    @shielded
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        writer = self._writer
        if writer is not None and kind is None:
            if writer.pid != os.getpid():
                raise ForkedError("the update belongs to the parent of this fork")
            if self._after is None:
                raise UsageError("this update is over: call vram.update() for another")
            try:
                if writer.swaps:
                    writer.carry_over(slot_of(writer.words[VERSION] + 1), self._asked)
                writer.gpus.synchronize(self._number)
                shared.barrier()  # what the block stored comes before what is stored now
                writer.differs, writer.is_left, self._after = self._asked, False, QUIET
                writer.words[VERSION] += 1
            except BaseException:
                self._end()
                raise
        self._end(loudly=kind is None)

    def _end(self, *, loudly: bool = False) -> None:
        """Say that it is over, to the readers first. May be called again."""
        writer, client = self._writer, self._client
        if writer is None or client is None or not self._holds or writer.pid != os.getpid():
            return  # it had not begun
        try:
            whole = self._say(writer)
            client.end_update(self._name, writer.version, writer.words[VERSION], whole=whole)
        except VramError:  # the readers know; and what raised it is on its way, unless the block has ended well
            if loudly:
                raise
        finally:
            self._let_go(writer)

    def _say(self, writer: Writer) -> bool:
        """Have the word say how it ended, and return whether what is there is whole."""
        if self._after is not None:
            writer.words[STATE] = self._after
            self._after = None
        return bool(writer.words[STATE] == QUIET)

    def _let_go(self, writer: Writer) -> None:
        if self._holds:
            self._holds, writer.owner = False, 0
            writer.lock.release()

    @shielded
    def __del__(self) -> None:  # of a block that was never left: it only stores words (I3)
        writer = getattr(self, "_writer", None)
        if writer is not None and self._holds and writer.pid == os.getpid():
            self._say(writer)
            self._let_go(writer)
