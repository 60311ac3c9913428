"""The consumer's side of a ring: frames of one shape, one after the other, without a copy.

The producer's page, read-only here, says which frame is the newest, which is in each slot (0: being written) and up to
which frame it may write. The first word of a lease's page is 0, or 1 more than the frame that its consumer is done
with. A consumer stores it, then behind a fence loads the limit; the producer does it the other way round.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, Final

from ..driver import words as shared
from ..errors import (
    CapacityError,
    ClosedError,
    ForkedError,
    PeerGoneError,
    ProtocolError,
    TornError,
    UsageError,
    WaitTimeoutError,
)
from ..lifetime import shielded, waiting
from ..spec import check_timeout
from .reading import RING, STATE, ask_writer, page_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence
    from types import TracebackType

    import numpy as np

    from .lease import Lease
    from .reading import Page

ARRAY: Final = "frames"  # what the one array of the entry is called
# The producer's words, behind those that all have who update in place.
HEAD, LIMIT, ENDED, OVERWRITES, EVICTIONS, EVICTED, SLOTS = 8, 9, 10, 11, 12, 16, 128
REMEMBERED = 64  # of those whom it waits for no more: a lease each, and above that why
MAX_SLOTS = 256
LAGGED, FULL = 1 << 56, 2 << 56  # numbers of leases are below
_WHY = LAGGED | FULL

_MOST = 2**62  # frames, in thousands of years: what follows it fits into a word all the same
_FIRST_ASK, _ASK = 0.05, 0.25  # seconds after which the keeper is asked whether the producer lives
_TRIES = 64  # at the newest frame of what is overwritten, before whoever writes it so fast is called that


class Frame:
    """One frame of a ring, in the memory where its producer has put it: what iterating over :class:`Frames` gives.

    A context manager, which gives the frame back at its end.

    Attributes
    ----------
    array : numpy.ndarray
        The frame, read-only, over the shared memory. Copy data that has to outlive this frame.
    sequence : int
        Its number: the producer's first frame is 1.
    skipped : int
        How many frames before it this consumer did not get, since they were overwritten.
    """

    __slots__ = ("_frames", "array", "sequence", "skipped")

    def __init__(self, frames: Frames, sequence: int, array: np.ndarray[Any, Any], skipped: int) -> None:
        self._frames, self.sequence, self.array, self.skipped = frames, sequence, array, skipped

    def is_whole(self) -> bool:
        """Return whether nobody has begun to write over the frame: asked after use, what was read is of this frame.

        Of a ring that waits for its consumers it is whole until it was given back, unless this consumer was left out.
        """
        return self._frames._is_whole(self.sequence)

    def close(self) -> None:
        """Give the frame back, so that the producer may write over it. Idempotent; the next frame does it too."""
        self._frames._give_back(self.sequence)

    def __enter__(self) -> Frame:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._frames._held == self.sequence:
            self._frames._check_whole(self.sequence)
        self.close()

    def __repr__(self) -> str:
        return f"<Frame {self.sequence} of {self._frames.name!r}, {self.array.dtype} {self.array.shape}>"


class Frames:
    """The frames of a ring, to be read in their order: made by :meth:`Ring.attach`; a context manager.

    Iterating, by ``for`` or in an event loop by ``async for``, waits for each frame, and ends when the producer has
    closed the ring and all was read. One frame is held at a time: it is given back when the next one is asked for, or
    by :meth:`Frame.close`. For one thread; others attach the ring once more.
    """

    @shielded
    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._pid = os.getpid()
        self._page: Page | None = None
        self._held = 0  # the frame that the caller has
        try:
            words = lease._words
            if words is None or words[STATE] != RING:
                raise UsageError(f"{lease.name!r} is no ring: vram.attach({lease.name!r}) attaches it")
            self._words: memoryview = words
            frames = lease.get(ARRAY)
            if frames is None or not 2 <= (len(frames.shape) and frames.shape[0]) <= MAX_SLOTS:
                raise ProtocolError(f"{lease.name!r} says that it is a ring and has not its frames")
            self._view = frames.numpy()
            self._slots = frames.shape[0]
            self._overwrites = bool(words[OVERWRITES])
            self._at = shared.address(words)
            self._evictions = words[EVICTIONS]
            self._cursor = 0  # the last frame that was given out, or passed over
            if self._overwrites:
                shared.register()
                self._cursor = max(0, words[HEAD] - 1)
            else:
                self._page = page_of(lease, ring=True)
                self._join(self._page)
        except BaseException:
            lease.close()
            raise

    def _join(self, page: Page) -> None:
        """Begin with the newest frame, and see to it that the producer had not been free to write over it before."""
        words = self._words
        for _ in range(_TRIES):  # each after the producer has gone on meanwhile, if it tells the truth
            cursor = max(0, words[HEAD] - 1)
            if cursor > _MOST:
                break
            page.slots[0] = cursor + 1
            shared.fence()  # the word is stored before the limit is loaded, as the producer does it the other way round
            self._cursor = cursor
            if words[LIMIT] <= cursor + self._slots:
                return
            if words[LIMIT] > words[HEAD] + self._slots:
                break
        raise ProtocolError(f"the producer of {self.name!r} says that it may write over every frame, or is at none")

    # -- what it is ---------------------------------------------------------------------------------------------
    @property
    def name(self) -> str:
        """The name of the ring."""
        return self._lease.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each frame."""
        shape: tuple[int, ...] = self._view.shape[1:]
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements of each frame."""
        dtype: np.dtype[Any] = self._view.dtype
        return dtype

    @property
    def slots(self) -> int:
        """How many frames the ring has room for."""
        return self._slots

    @property
    def overwrites(self) -> bool:
        """Whether the producer writes over the oldest frame, and waits for nobody."""
        return self._overwrites

    @property
    def behind(self) -> int:
        """How many frames there are that this consumer has not asked for yet."""
        return max(0, self._words[HEAD] - self._cursor)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._lease.is_closed

    # -- frames -------------------------------------------------------------------------------------------------
    def next(self, *, timeout: float | None = None) -> Frame:
        """Give back the frame that was asked for last, and wait for the next one.

        A consumer begins with the newest frame that there is. Where the producer overwrites, and the next frame is
        gone, this goes on with the newest one; :attr:`Frame.skipped` says how many were passed over.

        Parameters
        ----------
        timeout : float or None
            Seconds to wait for the next frame; None, as long as the producer lives.

        Returns
        -------
        Frame

        Raises
        ------
        WaitTimeoutError
            If there was none in time.
        PeerGoneError
            If the producer is gone, or has closed the ring, and all its frames were read: a frame that it was writing
            is none. Or if the keeper is gone.
        TornError
            If the producer waits for its consumers and has given this one up (`max_lag`), or this lease was over: then
            the frame that was asked for last may have been overwritten while it was used. Attach the ring again.
        CapacityError
            If the ring has as many consumers as its producer waits for (`max_consumers`), or this user as
            many as it may have (see :meth:`Ring.create`).
        """
        seconds = None if timeout is None else check_timeout(timeout)
        self._check()
        held = self._held
        if held and not self._overwrites:
            self._check_whole(held)
        self._give_back(held)
        words = self._words
        if words[HEAD] <= self._cursor:
            self.wait(timeout=seconds)
        if not self._overwrites:
            self._check_admitted()
            sequence = self._cursor + 1
            self._check_whole(sequence)
            frame = Frame(self, sequence, self._view[(sequence - 1) % self._slots, ...], 0)
            self._held = self._cursor = sequence  # last, and in one step: this is too short to be shielded
            return frame
        sequence = self._cursor + 1
        for _ in range(_TRIES):
            if self._is_whole(sequence):
                skipped = sequence - self._cursor - 1
                frame = Frame(self, sequence, self._view[(sequence - 1) % self._slots, ...], skipped)
                self._held = self._cursor = sequence
                return frame
            sequence = words[HEAD]
        raise TornError(f"{self.name!r} is written faster than one of its {self._slots} frames can be looked at")

    def __iter__(self) -> Iterator[Frame]:
        while True:
            try:
                frame = self.next()
            except PeerGoneError:
                if self.is_at_end:
                    return
                raise
            yield frame

    def __aiter__(self) -> AsyncIterator[Frame]:
        """Iterate in an event loop, as without one. While it waits a thread does so for it."""
        from .event_loop import Coming  # asyncio is loaded by who uses it

        self._check()
        return Coming(self)

    @property
    def is_at_end(self) -> bool:
        """Whether the producer has closed the ring, and all its frames were read."""
        return bool(self._words[ENDED]) and self._words[HEAD] <= self._cursor and not self._lease.is_closed

    def interrupt(self) -> None:
        """Have who waits look again; harmless to all others."""
        shared.wake(self._at, HEAD)

    def wait(self, *, timeout: float | None = None, over: Sequence[object] = ()) -> None:
        """Wait until there is a frame behind the last one, or something in `over`. Raises what :meth:`next` does."""
        words, seen = self._words, self._cursor
        now = time.monotonic()
        seconds = check_timeout(timeout)
        until = None if seconds is None else now + seconds
        asked, ask = now + _FIRST_ASK, _ASK
        while True:
            ended, head = words[ENDED], words[HEAD]  # in this order: the end comes behind the last frame
            if head > seen or over:
                return
            if head < seen:  # nothing would let this sleep: the word is not the one that is waited for
                raise ProtocolError(
                    f"the producer of {self.name!r} says that frame {head} is its newest, and it had said {seen} before"
                )
            if ended:
                raise PeerGoneError(f"the producer has closed the ring {self.name!r}, and all its frames were read")
            now = time.monotonic()
            if until is not None and now >= until:
                raise WaitTimeoutError(f"no frame came into the ring {self.name!r} within {seconds:g} s")
            if now >= asked:
                asked, ask = now + ask, min(2 * ask, 1.0)
                has_producer, _ = ask_writer(self._lease._client, self._lease._attachment, words)
                if not has_producer and words[HEAD] <= seen and not words[ENDED]:
                    raise PeerGoneError(
                        f"the producer of the ring {self.name!r} is gone, and all its frames were read: attach it "
                        f"again once another process has created it"
                    )
                continue
            waiting(shared.wait, self._at, HEAD, seen, min(asked, asked if until is None else until) - now)

    def _is_whole(self, sequence: int) -> bool:
        return bool(self._words[SLOTS + (sequence - 1) % self._slots] == sequence)

    def _check_whole(self, sequence: int) -> None:
        """Raise, where the producer waits for its consumers, unless it has waited for this one."""
        if not self._overwrites and not self._is_whole(sequence):
            self._check_admitted()
            raise TornError(
                f"frame {sequence} of the ring {self.name!r} was overwritten before it was given back: the lease was "
                f"over, so that the producer did not wait. Attach the ring again"
            )

    def _check_admitted(self) -> None:
        """Raise if the producer has said that it does not wait for this consumer."""
        words = self._words
        count = words[EVICTIONS]
        if count == self._evictions:
            return
        mine = self._lease._attachment.lease_id
        for slot in range(EVICTED, EVICTED + REMEMBERED):
            said = words[slot]
            if said & ~_WHY != mine:
                continue
            if said & FULL:
                raise CapacityError(
                    f"the ring {self.name!r} has as many consumers as its producer waits for, of all users or of this "
                    f"one: its producer may allow more (max_consumers), or overwrite, which waits for none"
                )
            raise TornError(
                f"the producer of the ring {self.name!r} has waited for this consumer as long as its max_lag says, and "
                f"waits no more: frame {self._cursor} may have been overwritten while it was used. Attach it again"
            )
        self._evictions = count

    def _give_back(self, sequence: int) -> None:
        if not sequence or sequence != self._held or self._pid != os.getpid():
            return
        page = self._page
        if page is not None and not self._lease.is_closed:
            page.slots[0] = sequence + 1
        self._held = 0

    def _check(self) -> None:
        if self._pid != os.getpid():
            raise ForkedError(f"the ring {self.name!r} was attached by the parent of this fork: attach it again here")
        if self._lease.is_closed:
            raise ClosedError(f"the ring {self.name!r} was closed here")

    # -- the end ------------------------------------------------------------------------------------------------
    @shielded
    def close(self) -> None:
        """Give the frame and the lease back. Arrays of frames can be read on, and change. Idempotent."""
        self._leave()
        self._lease.close()

    def _leave(self) -> None:
        page = getattr(self, "_page", None)
        if page is not None and self._pid == os.getpid():
            page.slots[0] = 0  # views may keep the lease for longer, and nobody waits for those

    def __enter__(self) -> Frames:
        self._check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # At the very end of the interpreter what is used here is None, and the keeper sees that this process is gone.
        if contextlib is not None:
            with contextlib.suppress(ForkedError):
                self._leave()

    def __repr__(self) -> str:
        state = "closed" if self._lease.is_closed else f"at frame {self._cursor}, {self.behind} behind"
        return f"<Frames of {self.name!r}, {self.dtype} {self.shape}, {state}>"
