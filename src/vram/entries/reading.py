"""The reader's side of what is updated in place: sections, in which every byte is of one version.

A thread sets its word in the page of its lease, then loads the publisher's state; if an update is under way it clears
the word and waits. The publisher sets its state, then has all readers' threads execute a barrier, then looks at the
words: one of the two sees the other. With two slots the word says which slot it is in, and no reader waits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import time
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

from ..arrays.streams import as_stream
from ..arrays.views import RegionViews
from ..driver.protocol import DeviceMemory
from ..errors import (
    BusyError,
    CapacityError,
    ForkedError,
    NotFoundError,
    PeerGoneError,
    TornError,
    UnsupportedError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from ..lifetime import shielded, take, waiting
from ..open_files import close_fds
from ..spec import check_timeout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..keeper.client import Attachment, KeeperClient
    from ..memory import Region
    from ..spec import Location
    from .lease import Lease

VERSION, STATE, NEXT = 0, 1, 2  # the publisher's words; the last says, of two slots, which version is being written
QUIET, UPDATING, TORN, RING = 0, 1, 2, 3  # what the second may say; the last for good, of a ring (.frames)
SLOTS = 512  # words of a lease's page
INSIDE = 1  # what a thread's word says; of two slots, each has a bit: 1 or 2, and both until it is known which
EITHER = 3

_FIRST_PAUSE, _LAST_PAUSE = 0.00005, 0.002  # seconds between two looks at a word
_SELDOM = 0.01  # the same, of who waits for the next version
_FIRST_ASK, _ASK, _SELDOM_ASK = 0.05, 0.25, 1.0  # seconds after which the keeper is asked whether the publisher lives


class Gpus:
    """The GPUs that work here on what is updated, and how to wait for them; false if it is on the host."""

    __slots__ = ("_places",)

    def __init__(self, regions: Iterable[Region]) -> None:
        found: dict[Location, Any] = {place: region.driver for region in regions for place in region.users}
        self._places = tuple([item for item in found.items() if isinstance(item[1], DeviceMemory)])

    def __bool__(self) -> bool:
        return bool(self._places)

    def stream(self, stream: object) -> int:
        """Return the number of a stream that will be waited for. Raises UsageError if the stream captures a graph."""
        if not self._places:
            raise UnsupportedError("streams", "memory of a GPU", "memory of the host", "Leave out stream=")
        number = as_stream(stream)
        if any(driver.stream_is_capturing(number, place) for place, driver in self._places):
            raise UsageError(
                f"stream {number:#x} captures a graph: what is put on it is done when the graph is launched, and not "
                f"in this block. Enter the block where you launch the graph"
            )
        return number

    def synchronize(self, stream: int | None) -> None:
        """Wait for the work on a stream; without one for all work of this process on these GPUs."""
        for place, driver in self._places:
            if stream is None:
                driver.synchronize(place)
            else:
                driver.stream_synchronize(stream, place)  # 1 and 2 are others on each GPU


def is_torn(client: KeeperClient, leased: Attachment, words: memoryview) -> bool:
    """Whether the last update of what is leased was begun and will never be finished."""
    state = words[STATE]
    return state not in (QUIET, RING) and (state != UPDATING or ask_writer(client, leased, words)[1])


def wait_for(lease: Lease, newer_than: int, timeout: float | None) -> int:
    """Wait for an update after one: see Lease.wait."""
    leased, words = lease._attachment, _checked(lease)
    if type(newer_than) is not int:
        raise UsageError(f"newer_than must be the number of an update, not {newer_than!r:.40}")
    begun = time.monotonic()
    asked, pause = begun + _FIRST_ASK, _FIRST_PAUSE
    while True:
        if words[STATE] not in (QUIET, UPDATING):
            raise _torn(leased)
        version = words[VERSION]
        if version > newer_than:
            return version
        now = time.monotonic()
        if now >= asked:
            asked = now + _SELDOM_ASK
            _check_writer(lease._client, leased, words)
        if timeout is not None and now - begun >= timeout:
            raise WaitTimeoutError(f"{leased.name!r} was not updated within {timeout:g} s")
        waiting(time.sleep, pause if timeout is None else min(pause, max(0.0, begun + timeout - now)))
        pause = min(pause * 1.5, _SELDOM)


def _check_writer(client: KeeperClient, leased: Attachment, words: memoryview) -> None:
    """Raise unless somebody may still update what is leased."""
    has_writer, torn = ask_writer(client, leased, words)
    if torn:
        raise _torn(leased)
    if not has_writer:
        raise PeerGoneError(
            f"the process that published {leased.name!r} version {leased.version} is gone: nobody updates it any "
            f"more. lease.upgrade() attaches what is published anew"
        )
    if client.is_stale(leased):
        raise NotFoundError(
            f"{leased.name!r} version {leased.version} was replaced or removed, and is updated no more: "
            f"lease.upgrade() attaches what is there now"
        )


def _checked(lease: Lease, *, ring: bool = False) -> memoryview:
    if lease._words is None:
        raise UsageError(
            f"{lease._attachment.name!r} was not published with updatable=True: no section can tell whether its bytes "
            f"change, and none is needed where they were published read-only"
        )
    if lease._words[STATE] == RING and not ring:
        raise UsageError(
            f"{lease._attachment.name!r} is a ring, of which each frame is of a version of its own: read it by "
            f"vram.Ring.attach({lease._attachment.name!r})"
        )
    return lease._words


@shielded
def page_of(lease: Lease, *, ring: bool = False) -> Page:
    """Make the page of a lease at its first section, and give it to the keeper; of a `ring`, as it is attached."""
    with alone_with_pages():  # another thread has it while the keeper answers
        words = _checked(lease, ring=ring)
        if lease.access == "cow":
            raise UsageError(
                f"this lease on {lease._attachment.name!r} is a private copy, of which some pages show updates and "
                f'those that were written here do not: attach with access="r"'
            )
        pages = lease._pages  # of all leases on one mapping; another thread may close this one
        if not pages:
            count = len(lease._regions) // lease._manifest.slots
            slots = [lease._regions[at : at + count] for at in range(0, len(lease._regions), count or 1)] or [()]
            pages.append(Page(lease._client, lease._attachment, words, slots, lease._since))
        page = pages[0]
        if not page.is_given:
            page.give()
    return page


@contextlib.contextmanager
def alone_with_pages() -> Iterator[None]:
    """Have no other thread make a page for the length of a block."""
    making = _making
    if making._is_owned():  # type: ignore[attr-defined]  # threading.Condition asks the same
        raise BusyError("this thread is making the page of a lease: what interrupted it cannot begin a section now")
    take(making)
    try:
        yield
    finally:
        making.release()


class Page:
    """The words by which the threads of this process say that they are in sections of one lease.
    No thread enters a section before the keeper has the page (`is_given`). `renewed` has each slot's shown update."""

    __slots__ = (
        "__weakref__", "_client", "_fds", "_leased", "_numbers", "_renewing", "_slots", "gate", "gpus", "is_given",
        "renewed", "slots", "slots_of", "swaps", "words",
    )  # fmt: skip

    def __init__(
        self, client: KeeperClient, leased: Attachment, words: memoryview, slots: Sequence[Sequence[Region]], since: int
    ) -> None:
        from ..driver import words as shared

        _register()
        self.swaps = len(slots) > 1
        self._client, self._leased, self.words, self._slots = client, leased, words, slots
        self.gate: Any = words  # looked at by who enters: others once the lease sleeps
        self.gpus = Gpus([region for slot in slots for region in slot])
        self.renewed = [0] * len(slots)
        self.renewed[(since - 1) % len(slots)] = since
        self._renewing = threading.Lock()  # never taken by a finalizer
        self.is_given = False
        self.slots_of: dict[int, _Slot] = {}
        self._numbers = itertools.count()
        self._fds: list[int] = []
        try:
            self.slots: Any = shared.make(self._fds)
        except BaseException:
            close_fds(self._fds)
            raise
        _pages.add(self)

    def give(self) -> None:
        """Give it to the keeper."""
        self._client.give_page(self._leased.lease_id, self._fds[0])
        self.is_given = True
        close_fds(self._fds)

    def __del__(self) -> None:
        if fds := getattr(self, "_fds", None):  # at the very end of the interpreter close_fds may be None
            close_fds(fds)

    def section(self, stream: object, timeout: float | None) -> Section:
        """Return a section of the calling thread, to be entered."""
        if timeout is not None and not (type(timeout) is float and timeout >= 0):
            timeout = check_timeout(timeout)
        return _Unleft(self, None if stream is None else self.gpus.stream(stream), timeout)

    @shielded
    def renew(self, version: int) -> None:
        """Take away what this process wrote to tensors over the memory, so that they show an update whole (I14)."""
        slot = (version - 1) % len(self._slots)
        with self._renewing:
            if self.renewed[slot] < version:
                for region in self._slots[slot]:
                    RegionViews.of(region).drop_writes()
                self.renewed[slot] = version

    def slot(self) -> _Slot:
        """Return this thread's word, which no other has as long as the thread lives."""
        me = get_ident()
        number = next(self._numbers)
        if number >= SLOTS:
            living = sys._current_frames()
            dead = [one for one in list(self.slots_of) if one not in living and not self.slots_of[one].depth]
            for one in dead:
                slot = self.slots_of.pop(one, None)
                if slot is not None:
                    self.slots_of[me] = slot
                    return slot
            raise CapacityError(
                f"{SLOTS} threads of this process have sections of {self._leased.name!r} already, as many as one lease "
                f"has room for: attach it once more for the others"
            )
        slot = self.slots_of[me] = _Slot(self, number)
        return slot

    def inside(self) -> list[str]:
        """Say how many threads are in a section."""
        count = sum(slot.depth > 0 for slot in list(self.slots_of.values()))
        return [f"{count} of this process's threads, inside lease.reading()"] if count else []

    def verify(self, entered: int, version: int, state: int, following: int = 0) -> None:
        """Raise unless a section was of one version; `version`, `state` and `following` are the words at its end.
        A lease ends with its connection, even in the middle of a section: then the publisher did not wait."""
        leased = self._leased
        if self.swaps and version == entered + 1:
            version, state = entered, UPDATING if following > version else QUIET
        if version != entered or state not in (QUIET, UPDATING):
            raise TornError(
                f"{leased.name!r} version {leased.version} was updated while it was read: the lease was over, so that "
                f"its publisher did not wait. What was read is of no one version; attach it again"
            )
        if state == UPDATING and not self._client.is_usable:
            raise PeerGoneError(
                f"the connection to the keeper at {self._client.path} ended while {leased.name!r} was read and an "
                f"update was under way: nobody can tell whether what was read is of one version; attach it again"
            )

    def wait(self, slot: _Slot, timeout: float | None) -> None:
        """Wait until no update is under way, and set a thread's word then. If it raises, the word may be set."""
        words, slots, index = self.gate, self.slots, slot.index
        begun = time.monotonic()
        asked, pause = begun + _FIRST_ASK, _FIRST_PAUSE
        while True:
            slots[index] = 0
            state = words[STATE]
            if state == QUIET:
                slots[index] = slot.entering
                if words[STATE] == QUIET:
                    return
                continue
            if state != UPDATING:
                raise _torn(self._leased)
            now = time.monotonic()
            if now >= asked:
                asked = now + _ASK
                if ask_writer(self._client, self._leased, words)[1]:
                    raise _torn(self._leased)
            if timeout is not None and now - begun >= timeout:
                raise WaitTimeoutError(
                    f"{self._leased.name!r} version {self._leased.version} was still being updated after {timeout:g} s "
                    f"by the process of uid {self._leased.owner} that published it"
                )
            waiting(time.sleep, pause)
            pause = min(pause * 1.1, _LAST_PAUSE)  # late by a tenth of what it has waited, at most


class _Slot:
    """One thread's word, how many of its sections are open, and of which version: 0 until the first is entered."""

    __slots__ = ("depth", "entering", "index", "slots", "swaps", "version", "words")

    def __init__(self, page: Page, index: int) -> None:
        self.index = index  # without the page, which has this: a lease that is closed leaves nothing to the collector
        self.swaps, self.entering = page.swaps, EITHER if page.swaps else INSIDE
        self.slots, self.words = page.slots, page.words
        self.depth = self.version = 0


class Section:
    """Made by :meth:`Lease.reading`; enter it once, by ``with``.

    A section that was left is of this class, which has no finalizer: Python swallows what a signal handler raises
    where one begins, and a loop of sections would swallow every fourth. An open section is of a class that has one.
    """

    __slots__ = ("_page", "_slot", "_stream", "_timeout")

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError("a section is of one thread, and cannot be pickled or copied: call lease.reading() again")

    def __enter__(self) -> int:
        raise UsageError("this section was entered before: call lease.reading() for another")

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Do nothing: it was left."""


class _Unleft(Section):
    """A section until it is left."""

    __slots__ = ()

    # Not shielded, since a section costs less than a shield: whoever enters is noted first, and the word set last;
    # whoever leaves the other way round. A section that was never left ends when it is dropped. Where the GPU cannot be
    # waited for, the word stays, and keeps the publisher out until the lease ends.

    def __init__(self, page: Page, stream: int | None, timeout: float | None) -> None:
        self._slot: _Slot | None = None
        self._page = page
        self._stream = stream
        self._timeout = timeout

    def __enter__(self) -> int:
        if self._slot is not None:
            Section.__enter__(self)  # raises
        slot = self._page.slots_of.get(get_ident()) or self._page.slot()
        if slot.depth:
            version = slot.version
            if not version:
                raise BusyError(
                    "this thread is entering a section of the same lease, and what interrupted it, such as a signal "
                    "handler or a finalizer, cannot read now: an update may be under way"
                )
            slot.depth += 1
            self._slot = slot
            return version
        slot.version, slot.depth = 0, 1  # 0 until this thread is in
        self._slot = slot
        slot.slots[slot.index] = slot.entering
        try:
            if self._page.gate[STATE]:
                self._page.wait(slot, self._timeout)
        except BaseException as error:
            self._leave(slot, type(error))  # nothing was read
            raise
        version = slot.words[VERSION]
        if version not in self._page.renewed:
            try:
                self._page.renew(version)
            except BaseException as error:
                self._leave(slot, type(error))  # nothing was read
                raise
        if slot.swaps:
            slot.slots[slot.index] = 1 << (version - 1 & 1)  # as swap.slot_of says
        slot.version = version
        return version

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        slot = self._slot
        if slot is not None:
            if self._page.gpus:
                self._page.gpus.synchronize(self._stream)
            self._leave(slot, kind)

    def _leave(self, slot: _Slot, kind: type[BaseException] | None) -> None:
        version, state = slot.words[VERSION], slot.words[STATE]  # first: then the publisher may go on
        following = slot.words[NEXT] if slot.swaps else 0
        self._slot = None
        self.__class__ = Section  # type: ignore[assignment]
        slot.depth -= 1
        if slot.depth:
            return
        slot.slots[slot.index] = 0
        if kind is None and (state or version != slot.version):
            self._page.verify(slot.version, version, state, following)

    def __del__(self) -> None:
        if getattr(self, "_slot", None) is not None:
            with contextlib.suppress(VramError):  # nobody could be told anything here
                self.__exit__(GeneratorExit)


def words_of(fd: int, name: str) -> memoryview:
    """Return the words of an entry's publisher from a lent descriptor that came with a lease.
    Raises ProtocolError if it is no page of words, or other processes could write to it."""
    from ..driver import words  # few leases are on what is updated

    words.check(fd, f"the page of the publisher of {name!r}")
    return words.words(fd)


def ask_writer(client: KeeperClient, leased: Attachment, words: memoryview) -> tuple[bool, bool]:
    """Ask the keeper whether the publisher of a lease is there, and whether its last update was not finished."""
    try:
        found = client.state(leased.lease_id)
    except (BusyError, WaitTimeoutError):  # not now: in a signal handler, or the keeper has much to do
        return True, False
    except NotFoundError:
        raise PeerGoneError(f"the lease on {leased.name!r} version {leased.version} was ended by the keeper") from None
    # An update that this process sees under way, and the keeper neither: it has ended in between.
    return found.has_writer, found.torn and not found.updating and words[STATE] != QUIET


def _torn(leased: Attachment) -> TornError:
    return TornError(
        f"an update of {leased.name!r} version {leased.version} was begun and not finished, so that its bytes are of "
        f"no one version. The next complete update by its publisher mends it, or a new publication (lease.upgrade())"
    )


class _Forked:
    """Stands for the words of a lease in a forked child, which shares its parent's memory and must not write there."""

    def __setitem__(self, index: int, value: int) -> None:
        if value:
            raise ForkedError("the lease belongs to the parent of this fork, and so do its sections: attach again here")


_pages: weakref.WeakSet[Page] = weakref.WeakSet()
_making = threading.RLock()  # never reached from a finalizer
_registered = False


def _register() -> None:
    """Have this process take part in the barriers of publishers."""
    global _registered
    if not _registered:
        from ..driver import words

        words.register()
        _registered = True


def _after_fork_in_child() -> None:
    global _making, _registered
    _making, _registered = threading.RLock(), False
    for page in list(_pages):
        page.slots, page.gpus = _Forked(), Gpus(())  # nothing of the driver works here
        for slot in page.slots_of.values():  # of sections that the parent is in: leaving them here does nothing
            slot.slots = page.slots
        page.slots_of = {}
    _pages.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
