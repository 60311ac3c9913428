"""One rank's end of the connection to the hub: its votes, and the thread that hears what the others say."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec

from ..errors import (
    ClosedError,
    PeerGoneError,
    ProtocolError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from ..lifetime import wait_for
from ..open_files import close_fds
from ..sharing.channel import Channel
from . import messages as m

_DECISION = 5.0  # seconds within which the hub, a thread that does nothing else, says what came of a stage


# The vote of one rank: bytes, and descriptors, which are closed with the list that they are in.
Said = tuple[bytes, list[int]]


class _Stage:
    """The outcome of one stage so far. The thread of the spoke writes it, and says when it is decided."""

    __slots__ = ("failure", "is_decided", "said")

    def __init__(self) -> None:
        self.said: dict[int, Said] = {}
        self.failure: Callable[[], VramError] | None = None
        self.is_decided = threading.Event()


class Spoke:
    """Votes with the other ranks over a connection to the hub, taken over; `gone` ranks map to whether they said that
    they leave. `on_gone` is called in the thread that hears of a loss, and neither waits nor raises."""

    def __init__(self, channel: Channel, name: str, rank: int, size: int, on_gone: Callable[[], object]) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.gone: dict[int, bool] = {}
        self.pids: tuple[int, ...] = ()
        self._present: tuple[int, ...] = ()
        self._on_gone = on_gone
        self._channel = channel
        channel.only_memory = True
        self._last = m.FORMING
        self._stages: dict[int, _Stage] = {m.FORMING: _Stage()}
        self._has_left = False
        self._thread = threading.Thread(target=self._listen, name=f"vram group {name} rank {rank}", daemon=True)

    # -- the thread that uses the group ---------------------------------------------------------------------------
    def open(self) -> None:
        """Begin to hear."""
        self._thread.start()

    def form(self, timeout: float) -> None:
        """Say who this is, and wait until all have come. Raises WaitTimeoutError on all ranks, naming those that did
        not come in time, UsageError if the ranks disagree on the group, PeerGoneError if rank 0 is gone."""
        stage = self._stages[m.FORMING]
        self._send(m.Hello(m.PROTOCOL, self.name, self.rank, self.size))
        try:
            self._decide(m.FORMING, stage, timeout)
        except PeerGoneError:
            if self._present:
                raise
            raise _gone(
                f"the group {self.name!r} had met already when rank {self.rank} came, or the process of rank 0 has "
                f"ended: each rank comes once",
                0,
            ) from None
        finally:
            self._stages.pop(m.FORMING, None)

    def vote(self, data: bytes, fds: Sequence[int], timeout: float) -> list[Said]:
        """Say something to all ranks, with lent descriptors, and return what each said, by rank: all ranks hear all, or
        none. The caller closes the descriptors that came. A timeout is raised by every rank, by a late rank at once."""
        if len(data) > m.MAX_DATA:
            raise UsageError(f"{len(data)} bytes in a vote, which has at most {m.MAX_DATA}")
        number = self._last + 1
        stage = self._stages[number] = _Stage()
        try:
            self._last = number
            self.check()
            self._send(m.Vote(number, data), fds)
            self._decide(number, stage, timeout)
            return [stage.said[rank] for rank in range(self.size)]
        except BaseException:
            for said in list(stage.said.values()):
                close_fds(said[1])
            raise
        finally:
            self._stages.pop(number, None)

    def _decide(self, number: int, stage: _Stage, timeout: float) -> None:
        try:
            if not wait_for(stage.is_decided, timeout):
                self._send(m.Abandon(number))
                if not wait_for(stage.is_decided, _DECISION):
                    raise _gone(
                        f"the process of rank 0 of the group {self.name!r} does not answer: it is stopped, or busy "
                        f"with something that keeps all its threads",
                        0,
                    )
        except BaseException:
            if not stage.is_decided.is_set():
                with contextlib.suppress(VramError):
                    self._channel.send(m.encode(m.Abandon(number)), timeout=0)
            raise
        if stage.failure is not None:
            raise stage.failure()

    def _send(self, message: object, fds: Sequence[int] = ()) -> None:
        try:
            self._channel.send(m.encode(message), fds, timeout=_DECISION)
        except (PeerGoneError, WaitTimeoutError):
            raise gone_error({0: False}) from None
        except ClosedError:  # by the thread that hears, after what it heard; or this rank has left
            if self._has_left:
                raise
            raise gone_error(self.gone or {0: False}) from None

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
        """Leave. Idempotent; whoever waits here is woken."""
        self.leave()
        self._channel.close()

    def join(self) -> None:
        """Wait until its thread has ended, after :meth:`close`."""
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()

    # -- the thread that hears ------------------------------------------------------------------------------------
    def _listen(self) -> None:
        while True:
            try:
                payload, fds = self._channel.take()
            except VramError:
                break
            try:
                self._take(m.decode_from_hub(payload), fds)
            except msgspec.MsgspecError as error:
                self._fail_all(partial(ProtocolError, f"rank 0 said what no hub of a group says: {error}"))
                break
            del fds  # they are closed, unless somebody has the list
        if self._has_left:
            self._fail_all(partial(ClosedError, f"the group {self.name!r} was closed here"))
        elif 0 not in self.gone:
            self._lose(0, left=False)
        else:
            self._fail_all(lambda: gone_error(self.gone))  # also what came since it was said
        self._channel.close()

    def _take(self, said: object, fds: list[int]) -> None:
        if isinstance(said, (m.Came, m.Gone)) and said.rank >= self.size:
            raise msgspec.ValidationError(f"rank {said.rank} of a group of {self.size}")
        match said:
            case m.Present():
                self._present = said.ranks
            case m.Formed():
                self.pids = said.pids
                self._open(m.FORMING)
            case m.Refused():
                self._fail(m.FORMING, lambda: UsageError(said.why))
            case m.Came():
                self._note(said, fds)
            case m.Failed():
                self._fail(said.stage, lambda: self._missing(said))
            case m.Gone():
                self._lose(said.rank, left=said.left)

    def _note(self, said: m.Came, fds: list[int]) -> None:
        stage = self._stages.get(said.stage)
        if stage is None and said.stage <= self._last:  # our own thread waits for it no longer
            return
        if stage is None or said.stage == m.FORMING or said.rank in stage.said:
            raise msgspec.ValidationError(f"rank {said.rank} came to stage {said.stage}")
        stage.said[said.rank] = said.data, fds
        if len(stage.said) == self.size:
            stage.is_decided.set()

    def _open(self, number: int) -> None:
        stage = self._stages.get(number)
        if stage is not None:
            stage.is_decided.set()

    def _fail(self, number: int, failure: Callable[[], VramError]) -> None:
        stage = self._stages.get(number)  # none before we come to it: once we do, the hub says so again
        if stage is not None and not stage.is_decided.is_set():
            stage.failure = failure  # also of one that is not kept: our own thread may just have taken it
            stage.is_decided.set()

    def _fail_all(self, failure: Callable[[], VramError]) -> None:
        for number in list(self._stages):
            self._fail(number, failure)

    def _lose(self, rank: int, *, left: bool) -> None:
        self.gone[rank] = left
        self._on_gone()
        self._fail_all(lambda: gone_error(self.gone))

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
