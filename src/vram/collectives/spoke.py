"""One rank's end of the connection to the hub: its votes, and the thread that hears the rest of what is said."""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from ..errors import ClosedError, PeerGoneError, ProtocolError, UsageError, VramError, WaitTimeoutError
from ..open_files import close_fds
from ..sharing.channel import Channel, OwnedFds
from . import messages as m
from .hub import Hub

_DECISION = 5.0  # seconds within which the hub, a thread that does nothing else, says what came of a stage

# The vote of one rank: bytes, and descriptors, which are closed with the list that they are in.
Said = tuple[bytes, list[int]]


class _Stage:
    """The outcome of one stage so far."""

    __slots__ = ("failure", "is_decided", "number", "said")

    def __init__(self, number: int) -> None:
        self.number = number
        self.said: list[Said] = []
        self.failure: Callable[[], VramError] | None = None
        self.is_decided = False


class Spoke:
    """Votes with the other ranks over a connection to the hub, taken over; `gone` ranks map to whether they said that
    they leave. `on_gone` is called in the thread that hears of a loss, and neither waits nor raises. With a hub, which
    is taken over too, who hears also serves that. A vote hears by itself, without its own thread being woken."""

    def __init__(
        self, channel: Channel, name: str, rank: int, size: int, on_gone: Callable[[], object], hub: Hub | None = None
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.gone: dict[int, bool] = {}
        self.pids: tuple[int, ...] = ()
        self._present: tuple[int, ...] = ()
        self._on_gone = on_gone
        self._channel, self._hub = channel, hub
        channel.only_memory = True
        self._stage = _Stage(m.FORMING)  # the last one that this rank came to
        self._has_left = self._is_over = False
        self._fd = (hub or channel).fileno()
        self._ready = select.epoll()
        self._ready.register(self._fd, select.EPOLLIN)
        self._hearing = threading.RLock()  # of the thread that hears
        self._thread = threading.Thread(target=self._listen, name=f"vram group {name} rank {rank}", daemon=True)

    # -- the thread that uses the group ---------------------------------------------------------------------------
    def open(self) -> None:
        """Begin to hear."""
        self._thread.start()

    def form(self, timeout: float) -> None:
        """Say who this is, and wait until all have come. Raises WaitTimeoutError on all ranks, naming those that did
        not come in time, UsageError if the ranks disagree on the group, PeerGoneError if rank 0 is gone."""
        try:
            self._decide(self._stage, m.Hello(m.PROTOCOL, self.name, self.rank, self.size), (), timeout)
        except PeerGoneError:
            if self._present:
                raise
            raise _gone(
                f"the group {self.name!r} had met already when rank {self.rank} came, or the process of rank 0 has "
                f"ended: each rank comes once",
                0,
            ) from None

    def vote(
        self, data: bytes, fds: Sequence[int], timeout: float, meanwhile: Callable[[], object] | None = None
    ) -> list[Said]:
        """Say something to all ranks, with lent descriptors, and return what each said, by rank: all ranks hear all, or
        none. The caller closes the descriptors that came. A timeout is raised by every rank, by a late rank at once.
        `meanwhile` is called while the vote is on its way."""
        if len(data) > m.MAX_DATA:
            raise UsageError(f"{len(data)} bytes in a vote, which has at most {m.MAX_DATA}")
        stage = _Stage(self._stage.number + 1)
        try:
            self._decide(stage, m.Vote(stage.number, data), fds, timeout, meanwhile)
            return stage.said
        except BaseException:
            for said in stage.said:
                close_fds(said[1])
            raise

    def _decide(
        self, stage: _Stage, message: object, fds: Sequence[int], timeout: float,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """Say something, and hear what comes of the stage that it is about; raise if that is a failure."""
        deadline = time.monotonic() + timeout
        try:
            self._stage = stage
            if stage.number != m.FORMING:
                self.check()
            with self._hearing:
                self._watch(0)
                try:
                    self._send(message, fds)
                    if meanwhile is not None:
                        if self._hub is not None:
                            self._hear(0)  # the others may wait for this rank alone
                        meanwhile()
                    if not self._hear_of(stage, deadline):
                        self._send(m.Abandon(stage.number))
                        if not self._hear_of(stage, time.monotonic() + _DECISION):
                            raise _gone(
                                f"the process of rank 0 of the group {self.name!r} does not answer: it is stopped, or "
                                f"busy with something that keeps all its threads",
                                0,
                            )
                finally:
                    self._watch(select.EPOLLIN)
        except BaseException:
            if not stage.is_decided:
                with contextlib.suppress(VramError):
                    self._channel.send(m.encode(m.Abandon(stage.number)), timeout=0)
            raise
        finally:
            stage.is_decided = True  # what else is said of it comes too late
        if stage.failure is not None:
            raise stage.failure()

    def _hear_of(self, stage: _Stage, deadline: float) -> bool:
        """Hear until a stage is decided, or the deadline; return whether it is."""
        left = 1.0
        while left and not stage.is_decided:
            left = until(deadline)
            self._hear(left)
        return stage.is_decided

    def _watch(self, events: int) -> None:
        """Have the thread of the spoke hear, or not; nobody does once the connection has ended."""
        with contextlib.suppress(OSError, ValueError):
            self._ready.modify(self._fd, events)

    def _send(self, message: object, fds: Sequence[int] = ()) -> None:
        try:
            self._channel.send(m.encode(message), fds, timeout=_DECISION)
        except (ClosedError, PeerGoneError, WaitTimeoutError):
            raise self._over() from None

    def check(self) -> None:
        """Raise :class:`PeerGoneError` if a rank is gone."""
        if self.gone:
            raise gone_error(self.gone)

    def leave(self) -> None:
        """Have the others hear that this rank is one of them no more."""
        self._has_left = True
        with contextlib.suppress(VramError):
            self._channel.send(m.encode(m.Leave()), timeout=0)

    def close(self) -> None:
        """Leave. Idempotent; whoever waits here is woken. The connection is closed by the thread that hears its end."""
        self.leave()
        self._channel.hang_up()
        if self._thread.ident is None:
            self._close()

    def _close(self) -> None:
        if self._hub is not None:
            self._hub.close()
        self._channel.close()
        self._ready.close()

    def join(self) -> None:
        """Wait until its thread has ended, after :meth:`close`; not in that thread, nor in the middle of a vote."""
        is_here = threading.current_thread() is self._thread or self._hearing._is_owned()  # type: ignore[attr-defined]
        if self._thread.ident is not None and not is_here:
            self._thread.join()

    # -- hearing --------------------------------------------------------------------------------------------------
    def _listen(self) -> None:
        while not self._is_over:
            self._ready.poll()
            with self._hearing:
                self._hear(0)
        self._close()

    def _hear(self, timeout: float) -> None:
        """Hear a message if one comes in time, and note it; also that there are no more."""
        try:
            if self._hub is not None:
                self._hub.serve(timeout)
                timeout = 0
            payload, fds = self._channel.take(timeout=timeout)
            return self._take(m.decode_from_hub(payload), fds)  # descriptors are closed, unless somebody has the list
        except WaitTimeoutError:
            return None
        except msgspec.MsgspecError as error:
            self._fail(partial(ProtocolError, f"rank 0 said what no hub of a group says: {error}"))
        except VramError:
            pass
        self._is_over = True
        self._channel.hang_up()
        if not self._has_left and 0 not in self.gone:
            self._lose(0, left=False)
        return self._fail(self._over)  # also for what came since it was said

    def _over(self) -> VramError:
        if self._has_left:
            return ClosedError(f"the group {self.name!r} was closed here")
        return gone_error(self.gone or {0: False})

    def _take(self, said: object, fds: list[int]) -> None:
        if isinstance(said, m.Gone) and said.rank >= self.size:
            raise msgspec.ValidationError(f"rank {said.rank} of a group of {self.size}")
        match said:
            case m.Present():
                self._present = said.ranks
            case m.Formed():
                self.pids = said.pids
                self._stage.is_decided |= self._stage.number == m.FORMING
            case m.Refused():
                self._fail(lambda: UsageError(said.why), m.FORMING)
            case m.Came():
                self._note(said, fds)
            case m.Failed():
                self._fail(lambda: self._missing(said), said.stage)
            case m.Gone():
                self._lose(said.rank, left=said.left)

    def _note(self, said: m.Came, fds: list[int]) -> None:
        stage = self._stage
        if said.stage <= stage.number - (not stage.is_decided):  # nobody waits for it any longer
            return
        counts = [0 if rank == self.rank else count for rank, (_, count) in enumerate(said.votes, len(stage.said))]
        if said.stage != stage.number or len(stage.said) + len(counts) > self.size or sum(counts) != len(fds):
            raise msgspec.ValidationError(f"{len(counts)} ranks came to stage {said.stage}")
        for (data, _), count in zip(said.votes, counts, strict=True):
            stage.said.append((data, OwnedFds(fds[:count])))
            del fds[:count]
        stage.is_decided = len(stage.said) == self.size

    def _fail(self, failure: Callable[[], VramError], number: int | None = None) -> None:
        """Have the stage fail that is under way, if it is this one; the hub says so again of one that is to come."""
        stage = self._stage
        if not stage.is_decided and number in (None, stage.number):
            stage.failure = failure
            stage.is_decided = True

    def _lose(self, rank: int, *, left: bool) -> None:
        self.gone[rank] = left
        self._on_gone()
        self._fail(lambda: gone_error(self.gone))

    def _missing(self, failed: m.Failed) -> VramError:
        who = name_ranks(failed.missing)
        if failed.stage == m.FORMING:
            return WaitTimeoutError(
                f"{who} did not come to the group {self.name!r} of {self.size} before the patience of rank {failed.by} "
                f"was over"
            )
        return WaitTimeoutError(
            f"{who} did not come to a set-up call of the group {self.name!r} before the patience of rank {failed.by} "
            f"was over: every rank makes the same calls in the same order"
        )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``"rank 2"`` or ``"ranks 1, 2 and 3"``."""
    listed = sorted(ranks)
    if len(listed) == 1:
        return f"rank {listed[0]}"
    return f"ranks {', '.join(map(str, listed[:-1]))} and {listed[-1]}" if listed else "no rank"


def gone_error(gone: Mapping[int, bool]) -> PeerGoneError:
    """Return the error that names the ranks that are gone."""
    died = [rank for rank, left in gone.items() if not left]
    left = [rank for rank, left in gone.items() if left]
    said = []
    if died:
        said.append(f"the process of {name_ranks(died)} has ended")
    if left:
        said.append(f"{name_ranks(left)} {'has' if len(left) == 1 else 'have'} left the group")
    return _gone(f"{' and '.join(said)}: those who are left make a new group", *sorted(gone))


def _gone(words: str, *ranks: int) -> PeerGoneError:
    error = PeerGoneError(words)
    error.ranks = ranks
    return error


def gave_up_error(rank: int, name: str) -> PeerGoneError:
    """Return the error that names a rank that goes on no more, though its process may."""
    return _gone(
        f"rank {rank} of the group {name!r} gave up in the middle of a call, and cannot go on with the group: those "
        f"who are left make a new one",
        rank,
    )


def until(deadline: float) -> float:
    """Return the seconds until a deadline of ``time.monotonic``, at least 0."""
    return max(0.0, deadline - time.monotonic())
