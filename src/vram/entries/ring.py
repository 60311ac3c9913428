"""A ring: frames of one shape from one producer to many consumers, each written once and copied by nobody.

Frame `n`, counted from 1, goes into slot ``(n - 1) % slots`` of one array of an updatable entry. For each frame the
word of the slot is cleared, the block writes, the word has the number of the frame, and then the word of the newest,
with fences in between. To write beyond its limit the producer states it, then has the keeper read all consumers' words.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..arrays.dtypes import as_dtype, dtype_name
from ..arrays.numpy_on_use import np
from ..arrays.shapes import as_shape, nbytes_of
from ..arrays.views import close_when_unused
from ..driver import words as shared
from ..errors import (
    BusyError,
    MismatchError,
    NotFoundError,
    PeerGoneError,
    UnsupportedError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from ..keeper.rules import check_name, describe_process
from ..lifetime import Owned, own, shielded, take, waiting
from ..memory import Region
from ..sharing.descriptor import ArrayEntry
from ..spec import HOST, Location, check_timeout, format_count
from .attach import attach
from .frames import (
    ARRAY,
    ENDED,
    EVICTED,
    EVICTIONS,
    FULL,
    HEAD,
    LAGGED,
    LIMIT,
    MAX_SLOTS,
    OVERWRITES,
    REMEMBERED,
    SLOTS,
    Frames,
)
from .keepers import TIMEOUT, as_notes, check_flags, connect, current_of, named_holders
from .lease import Lease
from .loaded import Loaded
from .publish import publish_planned
from .reading import RING, STATE
from .update import Writer

if TYPE_CHECKING:
    from types import TracebackType

    from ..arrays.hints import ArrayLike
    from ..keeper import messages as m
    from ..keeper.background import Subscription
    from ..keeper.client import KeeperClient
    from ..keeper.private import Keeper

_MAX_CONSUMERS = 4096
_FIRST_PAUSE, _LAST_PAUSE, _LONG_PAUSE = 0.00005, 0.002, 0.005  # seconds between two looks at the consumers
_LOOK = 1.0  # seconds that it may take to look at each of them once, however short the timeout is
_LARGE_PAGES = 1.0  # seconds to spend on large pages, by which each frame is written and read faster


class Ring(Owned):
    """The producer's side of a ring, made by :meth:`create`; a context manager that closes it.

    Consumers, in this process or another, read it by :meth:`attach`. Threads of the producer take turns. For example::

        with vram.Ring.create("cam", shape=(480, 640, 3), dtype="uint8") as ring:  # in the producer
            ring.put(picture)

        with vram.Ring.attach("cam") as frames:  # in a consumer
            for frame in frames:
                show(frame.array)  # of this frame until the next one is asked for

    Attributes
    ----------
    shape, dtype : tuple of int, numpy.dtype
        Of each frame.
    overwrites : bool
        Whether it writes over the oldest frame, and waits for nobody.
    max_lag : float or None
        Seconds that it waits for consumers before it gives them up.
    max_consumers : int
        How many consumers it waits for.
    """

    __slots__ = (
        "_admitted", "_at", "_client", "_evicted", "_full_since", "_lock", "_lost", "_name", "_news", "_owner", "_pid",
        "_slots", "_version", "_view", "_waited", "_words", "dtype", "max_consumers", "max_lag", "overwrites", "shape",
    )  # fmt: skip

    # -- making -------------------------------------------------------------------------------------------------
    @classmethod
    @shielded
    def create(
        cls,
        name: str,
        *,
        shape: int | Sequence[int],
        dtype: object = "float32",
        slots: int = 8,
        overwrite: bool = False,
        max_lag: float | None = None,
        max_consumers: int = 64,
        replace: bool = False,
        meta: Mapping[str, str] | None = None,
        device: str | Location = "host",
        keeper: Keeper | str | os.PathLike[str] | None = None,
    ) -> Ring:
        """Publish a ring, whose one producer is this process.

        A frame is written once, into memory that all consumers have mapped read-only. By default the producer waits
        until every consumer is done with a frame before it writes over it. A consumer that was killed is not waited
        for; one that is stopped or slow is, for as long as the `timeout` of :meth:`next` and `max_lag` say.

        Parameters
        ----------
        name : str
            The name that consumers attach; see :func:`vram.publish`. An entry published under it before is replaced,
            but for the ring of a producer that lives: so a new producer goes on where another one has died, and
            consumers attach again.
        shape : int or sequence of int
            Of each frame.
        dtype : dtype
            Of its elements.
        slots : int
            How many frames there is room for, 2 to 256. The memory is all of them together, in units of 2 MiB, and
            counts against quotas.
        overwrite : bool
            Never wait: write over the oldest frame, whoever reads it. Consumers ask :meth:`Frame.is_whole` after use.
        max_lag : float, optional
            Seconds that :meth:`next` waits for consumers before it gives those up that are not done: they get
            :class:`~vram.errors.TornError` and attach again. They count from the first call that found no room for
            a frame, however short its `timeout`. By default it gives up itself, after its `timeout`.
        max_consumers : int
            How many consumers are waited for, first come, first served. A further one gets
            :class:`~vram.errors.CapacityError`.
        replace : bool
            Take the name from a producer that lives: its :meth:`next` and :meth:`put` raise from then on.
        meta : mapping of str to str, optional
            See :func:`vram.publish`.
        device : str
            ``"host"``; frames on a GPU are refused: see below.
        keeper : Keeper, str or PathLike, optional
            The keeper to give it to; see :func:`vram.attach`.

        Raises
        ------
        UsageError
            For a name, shape, dtype or number that cannot be.
        BusyError
            If a process that lives, which it names, produces a ring under that name, without `replace`. Nothing has
            changed then.
        UnsupportedError
            For memory of a GPU: a consumer would be done with a frame only once its kernels are, and the producer's
            frame there only once its own are; use ``vram.publish(..., updatable=True, swap=True)`` there. Or if the
            kernel lacks ``membarrier``.

        The others are those of :func:`vram.publish`.
        """
        check_name(name)
        lengths, kind = as_shape(shape), as_dtype(dtype)
        nbytes = nbytes_of(lengths, kind)
        if not nbytes:
            raise UsageError(f"frames of shape {lengths} have no bytes")
        _check_count(slots, "slots", 2, MAX_SLOTS)
        _check_count(max_consumers, "max_consumers", 1, _MAX_CONSUMERS)
        overwrite, replace = check_flags(overwrite=overwrite, replace=replace)
        lag = None if max_lag is None else check_timeout(max_lag, "max_lag")
        if overwrite and lag is not None:
            raise UsageError("a ring with overwrite=True waits for nobody: leave max_lag out")
        place = Location.parse(device)
        if place != HOST:
            raise UnsupportedError(
                "a ring in memory of a GPU",
                "frames on the host",
                f"device {str(place)!r}, where a frame is done when kernels are, and no word in memory tells",
                "Put frames on the host, or use vram.publish(..., updatable=True, swap=True) and vram.update there",
            )
        client, notes = connect(keeper), as_notes(meta)
        if not replace:
            _check_free(client, name)
        region = Region.create(HOST, capacity=slots * nbytes, nbytes=slots * nbytes, managed=True)
        try:
            region.populate(large=_LARGE_PAGES)  # or the first frames would wait for their pages
            entry = ArrayEntry(0, 0, slots * nbytes, dtype_name(kind), (slots, *lengths))
            with Writer() as writer:
                words = writer.words
                words[STATE], words[OVERWRITES], words[LIMIT] = RING, overwrite, slots
                ring = cls(name, client, writer, slots, lengths, kind, overwrite, lag, max_consumers)
                plan = Loaded(region, {ARRAY: entry}, updatable=True)
                version = publish_planned(
                    client, name, plan, writable=False, meta=notes, ttl=None, claim=None, writer=writer
                )
                writer.published(client, name, version)
            ring._version, ring._view = version, writer.arrays[ARRAY].numpy()
            ring._listen()
            return ring
        finally:
            close_when_unused(region)

    def __init__(
        self, name: str, client: KeeperClient, writer: Writer, slots: int, shape: tuple[int, ...], dtype: np.dtype[Any],
        overwrites: bool, max_lag: float | None, max_consumers: int,
    ) -> None:  # fmt: skip
        self.shape, self.dtype, self.overwrites = shape, dtype, overwrites
        self.max_lag, self.max_consumers = max_lag, max_consumers
        self._name, self._client, self._slots, self._pid = name, client, slots, os.getpid()
        self._words = writer.words
        self._at = shared.address(writer.words)
        self._lock, self._owner = threading.Lock(), 0  # had by the thread that writes a frame
        self._evicted: set[int] = set()  # leases
        self._admitted: set[int] = set()  # leases, those that were waited for when they were last looked at
        self._full_since = 0, 0.0  # the frame that there was no room for, and since when
        self._waited = 0.0, 0  # when it was last to be seen whether there is room, and for which frame
        self._version = 0
        self._news: Subscription | None = None
        self._lost = ""  # why the name does not stand for this ring any more
        self._view: np.ndarray[Any, Any]
        # Dropping it tells its consumers that no frame comes any more: a store and a call (I3).
        self._claim = own(f"ring {name!r}", partial(_end, writer.words, self._at))

    @staticmethod
    @shielded
    def attach(
        name: str,
        *,
        timeout: float | None = 0.0,
        expect: Mapping[str, str] | None = None,
        owner: int | str | None = None,
        keeper: Keeper | str | os.PathLike[str] | None = None,
    ) -> Frames:
        """Attach a ring as one of its consumers, who begins with the newest frame.

        ``with vram.Ring.attach("camera") as frames:`` and ``for frame in frames: use(frame.array)`` read each frame
        where the producer has put it. The arrays are read-only; a frame is given back when the next one is asked for.

        Parameters
        ----------
        name : str
            The name that the producer gave it.
        timeout : float or None
            Seconds to wait for a keeper, and for the ring to be there; None waits for ever.
        expect, owner, keeper
            As of :func:`vram.attach`.

        Raises
        ------
        UsageError
            If what is there is no ring.
        ProtocolError
            If its producer says what cannot be.

        The others are those of :func:`vram.attach`.
        """
        return Frames(attach(name, timeout=timeout, expect=expect, owner=owner, keeper=keeper))

    # -- what it is ---------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """The name by which consumers attach it."""
        return self._name

    @property
    def slots(self) -> int:
        """How many frames it has room for."""
        return self._slots

    @property
    def sequence(self) -> int:
        """The number of the newest frame; 0 before the first one."""
        return int(self._words[HEAD])

    # -- frames -------------------------------------------------------------------------------------------------
    def next(self, *, timeout: float | None = TIMEOUT) -> NewFrame:
        """Return the place of the next frame, to be filled in a block: ``with ring.next() as frame:``.

        When the block ends, consumers have the frame; if it raises, there is none. The block writes all of it: what is
        there is an older one. Nobody sees what is written before the block ends; nothing is to be written after it.

        Parameters
        ----------
        timeout : float or None
            Seconds to wait until consumers are done with what is in that place, and for another thread's frame; None
            waits for ever.

        Raises
        ------
        BusyError
            When the block is entered: if consumers are not done in time, whom it names, or have so many leases that
            they cannot be looked at in that time and a second; or if this thread is writing a frame already. Nothing
            has changed then.
        PeerGoneError
            When the block is entered: if there is no keeper, and it is to be asked for the consumers.
        NotFoundError
            When the block is entered: if another one was published under the name, or it was removed. A new consumer
            does not get this ring any more: create it again, with `replace` where another producer has the name now.
        ClosedError, ForkedError
            If the ring was closed, or belongs to the parent of a fork.
        """
        self.handle  # noqa: B018
        return NewFrame(self, check_timeout(timeout))

    @shielded
    def put(self, array: ArrayLike, *, timeout: float | None = TIMEOUT) -> int:
        """Copy an array into the ring as its next frame, and return its number.

        Raises
        ------
        MismatchError
            If it has another shape or dtype than the frames of this ring; nothing has changed then.

        The others are those of :meth:`next`.
        """
        given = np.asarray(array)
        if given.shape != self.shape or given.dtype != self.dtype:
            raise MismatchError(
                f"frames of the ring {self._name!r} have shape {self.shape} and dtype {self.dtype}; this has shape "
                f"{given.shape} and dtype {given.dtype}: bring it into that form first"
            )
        with self.next(timeout=timeout) as frame:
            np.copyto(frame.array, given)
        return frame.sequence

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Say that there are no more frames, and take the name out of the catalogue, unless it was published again.

        Consumers still read what they have not read, and then iterating ends. Idempotent.
        """
        super().close(strict=strict)
        if self._news is not None:
            self._news.stop()
        version, writers = self._version, self._client.writers or {}
        if not version or self._pid != os.getpid():
            return
        with contextlib.suppress(VramError):  # no keeper, or it was replaced
            self._client.remove(self._name, version)
        mine = writers.get(self._name)
        if mine is not None and mine.version == version:
            writers.pop(self._name, None)
        self._version = 0  # last: where waiting for the keeper was ended, the next call asks it again

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"at frame {self.sequence}"
        return f"<Ring {self._name!r}, {self._slots} slots of {self.dtype} {self.shape}, {state}>"

    # -- one producer -------------------------------------------------------------------------------------------
    def _listen(self) -> None:
        """Have it noted when something happens to what was published."""
        self._news = self._client.watch((self._name, self._version), self, _heard, of_all=True)

    def _check_name(self) -> None:
        """Raise if the name is known to stand for something else, or for nothing."""
        news = self._news
        if news is not None and news.is_over and not self._lost:
            self._find_out()
        if self._lost:
            raise NotFoundError(self._lost)

    def _find_out(self) -> None:
        try:
            row = current_of(self._client, self._name)
            if row is not None and row.version == self._version:
                self._listen()
                return
        except (BusyError, PeerGoneError, WaitTimeoutError):
            # Its keeper is gone, and nobody takes the name from who has it nowhere. Or, in a handler, it cannot be
            # asked now.
            if not self._client.is_usable:
                self._news = None
            return
        consumers = "nobody who attaches gets its frames"
        if row is None:
            self._lost = f"the ring {self._name!r} was taken out of the catalogue: {consumers}. Create it again"
        else:
            who = describe_process(row.publisher_pid, row.owner, row.publisher_label, row.publisher_host)
            self._lost = (
                f"the ring {self._name!r} is not the one under that name any more: {who} has replaced it by version "
                f"{row.version}, and {consumers}. Close it, or take the name back (vram.Ring.create(..., replace=True))"
            )

    # -- back-pressure ------------------------------------------------------------------------------------------
    def _wait(self, sequence: int, begun: float, timeout: float | None) -> None:
        """Wait until no consumer needs what lies where a frame is to go."""
        if self.overwrites or sequence <= self._words[LIMIT]:
            return
        until = math.inf if timeout is None else begun + timeout
        # Each look has the keeper run, and consumers have the rest of the slots to go on with: at the pace at which
        # they have gone until now, the second look finds room for a quarter of the ring.
        now = time.monotonic()
        then, before = self._waited
        self._waited = now, sequence
        pause = (now - then) / max(1, sequence - before) * self._slots / 4
        pause = min(max(_FIRST_PAUSE, pause), _LONG_PAUSE)
        while True:
            late = self._look(sequence, max(until, now + _LOOK))
            if not late:
                return
            if self._full_since[0] != sequence:
                self._full_since = sequence, begun
            # Since the first call that found no room: each may wait for less than `max_lag`, or not at all.
            give_up = math.inf if self.max_lag is None else self._full_since[1] + self.max_lag
            now = time.monotonic()
            if now >= give_up:
                for row in late:
                    self._evict(row.lease, LAGGED)
                continue
            if now >= until:
                raise BusyError(
                    f"the ring {self._name!r} has no room for frame {sequence}: {format_count(len(late), 'consumer')} "
                    f"did not give frame {sequence - self._slots} back within {timeout:g} s (max_lag= gives them up, "
                    f"overwrite=True waits for none)",
                    named_holders(late),
                )
            waiting(time.sleep, min(pause, until - now, give_up - now))
            pause = min(pause * 1.1, _LAST_PAUSE)

    def _look(self, sequence: int, until: float) -> list[m.PageRow]:
        """Look once at each consumer; say how far this may write, and return who is not done with what is there."""
        self.handle  # noqa: B018  (another thread may have closed it)
        self._check_name()
        words, slots = self._words, self._slots
        newest = max(0, words[HEAD] - 1)  # who joins now begins behind it
        words[LIMIT] = newest + slots
        shared.fence()  # who says from now on where it is, sees that: it has a fence of its own before it looks
        after, stayed = 0, 0
        rows: list[m.PageRow] = []
        while True:
            found = self._client.pages(self._name, self._version, after, first=True)
            rows += found.rows
            stayed += len(self._admitted.intersection([row.lease for row in found.rows]))
            if not found.more or stayed == self.max_consumers:
                break
            after = found.through
            if time.monotonic() >= until:
                raise BusyError(
                    f"the ring {self._name!r} has no room for frame {sequence}: there are more leases on it than could "
                    f"be looked at in time; {len(rows)} have said which frame they are done with"
                )
        waited_for = self._admit(rows)
        # Those that were looked past are over: more may come and go than are ever looked at in one go.
        through = found.through if found.more else math.inf
        seen = {row.lease for row in rows}
        self._evicted = {lease for lease in self._evicted if lease in seen or lease > through}
        words[LIMIT] = min([newest, *[row.word - 1 for row in waited_for]]) + slots
        shared.fence()  # what consumers loaded of frames that they are done with, they have loaded by now
        return [row for row in waited_for if row.word - 1 + slots < sequence]

    def _admit(self, rows: Sequence[m.PageRow]) -> list[m.PageRow]:
        """Return the consumers that are waited for, and tell the others that there is no room.
        A consumer that had a place keeps it, even against an earlier lease that only now says that it reads."""
        admitted: list[m.PageRow] = []
        for row in sorted(rows, key=lambda row: row.lease not in self._admitted):
            if row.lease in self._evicted:
                continue
            if len(admitted) < self.max_consumers:
                admitted.append(row)
            else:
                self._evict(row.lease, FULL)
        self._admitted = {row.lease for row in admitted}
        return admitted

    def _evict(self, lease: int, why: int) -> None:
        """Wait for a consumer no more, and say so."""
        words = self._words
        self._evicted.add(lease)
        self._admitted.discard(lease)
        words[EVICTED + words[EVICTIONS] % REMEMBERED] = lease | why
        words[EVICTIONS] += 1


def _heard(_: Ring) -> None:
    """Do nothing: a subscription that is over says that there was news, and only the keeper can say what."""


def _end(words: memoryview, at: int) -> None:
    """Tell consumers that there are no more frames: the undo of a ring."""
    words[ENDED] = 1
    shared.wake(at, HEAD)


class NewFrame:
    """The place of the next frame, made by :meth:`Ring.next`: enter it once, by ``with``.

    Attributes
    ----------
    array : numpy.ndarray
        Where to write it, inside of the block.
    sequence : int
        Its number; 0 before the block.
    """

    __slots__ = ("_holds", "_ring", "_timeout", "array", "sequence")

    def __init__(self, ring: Ring, timeout: float | None) -> None:
        self._ring, self._timeout = ring, timeout
        self._holds = False  # whether this has the ring's lock
        self.sequence = 0
        self.array: np.ndarray[Any, Any]

    @shielded(undo=lambda self, _: self._let_go())
    def __enter__(self) -> NewFrame:
        ring = self._ring
        if self.sequence or self._holds:
            raise UsageError("this frame was begun before: call ring.next() for another")
        ring.handle  # noqa: B018
        if ring._owner == threading.get_ident():
            raise BusyError(f"this thread is writing a frame of the ring {ring.name!r} already")
        begun, left = time.monotonic(), self._timeout
        if not (ring._lock.acquire(False) or take(ring._lock, left)):
            raise BusyError(f"another thread of this process is writing a frame of the ring {ring.name!r}")
        self._holds, ring._owner = True, threading.get_ident()
        try:
            words = ring._words
            ring._check_name()
            sequence = words[HEAD] + 1
            ring._wait(sequence, begun, left)
            slot = (sequence - 1) % ring._slots
            words[SLOTS + slot] = 0
            shared.fence()  # who reads what is written from now on, sees that
            self.sequence, self.array = sequence, ring._view[slot, ...]
        except BaseException:
            self._let_go()
            raise
        return self

    @shielded
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ring = self._ring
        try:
            if kind is None:
                if not self._holds:
                    raise UsageError("this frame is over: call ring.next() for another")
                ring.handle  # noqa: B018  (forked, or closed meanwhile: then consumers were told that there is none)
                shared.fence()  # what the block stored comes before what is stored now
                ring._words[SLOTS + (self.sequence - 1) % ring._slots] = self.sequence
                ring._words[HEAD] = self.sequence
                shared.wake(ring._at, HEAD)
        finally:
            self._let_go()

    def _let_go(self) -> None:
        if self._holds and self._ring._pid == os.getpid():
            self._holds, self._ring._owner = False, 0
            self._ring._lock.release()

    def __del__(self) -> None:  # of a block that was never left: there is no frame
        if getattr(self, "_holds", False):
            self._let_go()


def _check_free(client: KeeperClient, name: str) -> None:
    """Raise BusyError if a live process produces a ring under a name.
    Two producers may both find it free: the first to publish hears from its own ring that it was replaced."""
    row = current_of(client, name)
    if row is None or not row.updatable or any(device != "host" for device in row.devices):
        return  # nothing, or what is no ring
    try:
        with Lease(client, client.attach(name, version=row.version), "r") as lease:
            words = lease._words
            if words is None or words[STATE] != RING or words[ENDED]:
                return
            if not client.state(lease._attachment.lease_id).has_writer:
                return
    except VramError:  # gone meanwhile, or not for this user: whether it can be replaced, publishing says
        return
    who = "this process" if row.publisher_pid == os.getpid() else "a process that lives"
    raise BusyError(
        f"{who} produces {name!r}, as version {row.version}: close that ring or end the process, or take the name from "
        f"it with replace=True",
        (describe_process(row.publisher_pid, row.owner, row.publisher_label, row.publisher_host),),
    )


def _check_count(count: object, what: str, least: int, most: int) -> None:
    if type(count) is not int or not least <= count <= most:
        raise UsageError(f"{what} must be a whole number from {least} to {most}, not {count!r:.40}")
