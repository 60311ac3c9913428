"""Changes of size, of one region or of many in one call: all of them come about, or none (I4, I5, I6).

All checks come first. Then memory is mapped behind the addresses of the regions that grow, which nobody sees yet; then
the regions that shrink are smaller, and the work of devices on their ends is waited for. Up to here everything can be
taken back. From then on nothing can fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, Literal

from ..errors import BusyError, UsageError
from ..lifetime import Handle, shielded, unwinding
from ..spec import Access
from . import chunks
from .pin import Span
from .reservation import settle

_address = attrgetter("region.address")  # of a change


class _Change:
    """The change of one region (which imports this module), and of nobody else's: `made` chunks come behind its end,
    `dropped` go."""

    __slots__ = ("before", "dropped", "handle", "made", "nbytes", "region", "row", "shrinks", "sizes")

    handle: Handle  # the region's, as planned

    def __init__(self, region: Any, nbytes: int) -> None:
        self.region = region
        self.before = self.nbytes = nbytes
        self.shrinks = False
        self.row = region._chunks.row
        self.sizes: list[int] = []
        self.made = chunks.Made([], [])
        self.dropped: tuple[chunks.Chunk, ...] = ()

    def plan(self, verb: str) -> None:
        """See what there is to do, and refuse what cannot be."""
        region = self.region
        self.handle = region.handle  # first: another thread may have closed it while this one waited for its turn
        if region.asleep is not None:
            raise region.sleeps()
        self.row, self.before = region._chunks.row, region._nbytes
        self.shrinks = self.nbytes < self.before
        if self.shrinks:
            if verb == "grow":
                raise UsageError(
                    f"cannot grow to {self.nbytes} bytes: the region has {self.before}; use shrink or resize"
                )
            self.dropped = region._chunks.beyond(self.nbytes)
        elif self.nbytes > self.before and verb == "shrink":
            raise UsageError(f"cannot shrink to {self.nbytes} bytes: the region has {self.before}; use grow or resize")
        elif self.nbytes > self.before:
            if region.is_updatable:  # the rest of the last chunk is with them already
                raise BusyError(
                    f"{region.handle.label} was published with updatable=True: its readers would see what it grows by "
                    f"before that is published. Copy it to grow it"
                )
            self.sizes = region._growth(self.nbytes)

    def make(self) -> None:
        """Map memory behind its end, in the place of zeros if such are there. Nobody sees it before :meth:`show`."""
        region = self.region
        region._chunks.make(self.sizes, region._kinds, region._access, region._flags, self.made)
        if region._chunks.zeros is not None:
            region._chunks.zeros.cover()

    def show(self) -> None:
        """Let everybody at what was made."""
        region = self.region
        if self.nbytes > self.before:
            region._chunks.row = (*self.row, *self.made.chunks)
            region._reached = max(region._reached, self.nbytes)  # before the size: see Region.clear
            region._nbytes = self.nbytes

    def unmap(self) -> None:
        """Give back what goes, on which no device works any more."""
        mapped = self.region._chunks
        if self.dropped:
            for chunk in self.dropped:
                chunk.undo.is_idle = True
            mapped.unmap(self.dropped)
            if not self.nbytes:  # what others could see is gone, and what comes next is new
                self.region.is_updatable = False
            self.region._reached = min(self.region._reached, mapped.mapped)
        if mapped.zeros is not None:
            mapped.zeros.mend()

    def take_back(self) -> None:
        """Let go of what was made, which no device has ever worked on; what was kept ready is ready again."""
        for chunk in self.made.chunks:
            chunk.undo.is_idle = True
        mapped = self.region._chunks
        mapped.give_back(self.made.chunks)
        chunks.put_back(self.made.taken)
        if mapped.zeros is not None and self.sizes:
            mapped.zeros.mend()


@shielded
def resize_regions(
    sizes: Mapping[Any, int],
    *,
    after: int | None = None,
    verb: Literal["grow", "shrink", "resize"] = "resize",
    then: Callable[[], object] | None = None,
) -> None:
    """Set the sizes of regions, in bytes, all or none. Work on memory that goes is done at the event `after`; without
    it, all devices that may use it are waited for. `then` is called with the new sizes in force, before any unmap."""
    changes = [_Change(region, nbytes) for region, nbytes in sizes.items()]
    # In one order, so that two calls over the same regions do not wait for one another.
    locks = [change.region._alone() for change in sorted(changes, key=_address)]
    under(locks, _resize, changes, after, verb, then)


def under(locks: Sequence[Any], call: Callable[..., object], *arguments: object) -> None:
    """Make a call while locks are held, which are taken in their order."""
    if len(locks) == 1:
        with locks[0]:
            call(*arguments)
        return
    with ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)
        call(*arguments)


def _resize(changes: Sequence[_Change], after: int | None, verb: str, then: Callable[[], object] | None) -> None:
    using, growing, smaller = [], [], []
    is_decided = False
    try:
        for change in changes:
            change.plan(verb)
            using.append(change.handle.claim("resize"))  # a region that is closed meanwhile goes afterwards
            if change.sizes:
                growing.append(change)
            elif change.shrinks:
                smaller.append(change)
        if growing:
            _refuse_pinned(smaller)
            rows = [change.region._chunks for change in growing]
            settle([row.where for row in rows if row.zeros is not None], after)  # devices may be reading zeros there
        for change in growing:
            change.make()
        if smaller:
            locks = [change.region._size_lock for change in sorted(smaller, key=_address)]
            under(locks, _make_smaller, smaller)  # no pin is half taken
        due = [change.region for change in changes if change.dropped or (after and change.nbytes <= change.before)]
        settle([region._chunks.where for region in due], after)
        for change in changes:
            change.region.handle  # noqa: B018  (which says that it was closed)
        is_decided = True  # from here on the sizes are the new ones, whatever comes
        _finish(changes, then)
    except BaseException as error:
        if not is_decided:
            _take_back(changes, error)
        raise
    finally:
        for claim in using:
            claim.release()


def _refuse_pinned(smaller: Sequence[_Change]) -> None:
    """Refuse what cannot shrink, if somebody looks at what would go."""
    found = []
    for change in smaller:
        if busy := [tag for tag in change.handle.tags() if isinstance(tag, Span) and tag.stop > change.nbytes]:
            found.append((change, busy))
    if not found:
        return
    change, busy = found[0]
    least = max(span.stop for span in busy)
    keep = f", or keep at least {least} bytes" if least < change.before else ""
    more = f" (the same of {len(found) - 1} more)" if len(found) > 1 else ""
    raise BusyError(
        f"cannot shrink {change.region._chunks.handle.label} from {change.before} to {change.nbytes} bytes: something "
        f"looks at what is beyond; let go of it (drop views and tensors with their slices, close leases and "
        f"lendings){keep}{more}",
        tuple(f"{span.holder} [{span.start}:{span.stop}]" for _, spans in found for span in spans),
    )


def _make_smaller(smaller: Sequence[_Change]) -> None:
    """Lower sizes, from when on nobody takes a pin of what goes; not if somebody has one."""
    try:
        for change in smaller:
            change.region._nbytes = change.nbytes
        _refuse_pinned(smaller)
    except BaseException:
        for change in smaller:
            change.region._nbytes = change.before
        raise


def _finish(changes: Sequence[_Change], then: Callable[[], object] | None) -> None:
    """Show what grew, and unmap what goes, of which some may be kept for the next growth."""
    for change in changes:
        change.show()
    if then is not None:
        then()
    kept: list[tuple[Any, chunks.Ready]] = []
    if chunks.supplies:
        from .ahead import set_aside

        kept = set_aside(
            [
                (change.region._chunks, change.region._kinds, change.region._flags, change.dropped)
                for change in changes
                if change.dropped and not change.region.is_imported and change.region._access is Access.READ_WRITE
            ]
        )
    for change in changes:
        change.unmap()
    chunks.put_back(kept)
    for change in changes:
        for _, (_, claim) in change.made.taken:
            claim.release()  # the mappings keep it now
    for supply in chunks.supplies.copy().values():
        supply._refill()


def _take_back(changes: Sequence[_Change], error: BaseException) -> None:
    """Make everything as it was."""
    with unwinding(error):
        for change in [change for change in changes if change.shrinks]:
            change.region._nbytes = change.before
        for change in reversed(changes):
            change.take_back()
