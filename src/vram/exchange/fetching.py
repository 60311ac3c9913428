"""The connections between the endpoints of two processes, to either side: see :mod:`.endpoint`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from queue import Empty, SimpleQueue

import msgspec

from ..arrays import Array
from ..errors import ClosedError, PeerGoneError, ProtocolError, VramError, WaitTimeoutError
from ..lifetime import uninterrupted
from ..sharing.channel import Channel, close_fds
from .borrower import Borrower, UnknownMemoryError
from .wire import MAX_FORGOTTEN, Bye, Fetch, Forget, Gone, Part, Reference, Took, decode_reply, encode

__all__ = ["FETCH_SECONDS", "TELL_SECONDS", "Reader", "Source"]

FETCH_SECONDS = 30.0
TELL_SECONDS = 0.02  # between two messages about what was taken: each wakes a thread of the sender's


class Reader:
    """A process that uses our arrays: what it asked for and is owed, while its socket has no room.

    Attributes
    ----------
    pid : int or None
        As its connection says.
    threads : set of int
        The numbers of those threads here which pickled something that it unpickled.
    said_bye : bool
        Whether it ends of its own accord.
    """

    __slots__ = ("asked", "channel", "fd", "forgets", "is_heard", "pid", "said_bye", "threads")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.fd = channel.fileno()
        self.pid = channel.peer().pid
        self.threads: set[int] = set()
        self.said_bye = False
        self.asked: deque[tuple[Fetch, float]] = deque()
        self.forgets: deque[int] = deque()
        self.is_heard = False

    def tell_forgotten(self) -> None:
        """Send what it has to let go of, as far as there is room; raises WaitTimeoutError where there is none."""
        while self.forgets:
            some = tuple(self.forgets)[:MAX_FORGOTTEN]
            self.channel.send(encode(Forget(some)), timeout=0)
            for _ in some:
                self.forgets.popleft()


class Source:
    """The connection to one process whose arrays this one uses.

    Any thread asks; the endpoint's thread hears the answers and passes them on.

    Parameters
    ----------
    channel : Channel
        Taken over.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.fd = channel.fileno()
        self._borrower = Borrower()
        self._lock = threading.Lock()  # the borrower's; never taken by a finalizer
        self._answers: SimpleQueue[tuple[Part | Gone, list[int]] | None] = SimpleQueue()
        self._forgets: deque[int] = deque()
        self._taken: defaultdict[tuple[int, int], int] = defaultdict(int)  # memories, by whom, and how often
        self._is_waiting = False  # whether somebody waits for an answer
        self._told = 0.0
        self._is_gone = False

    def array(self, reference: Reference, by: int = 0) -> Array:
        """Return the array that a reference means, fetching what is not known of its memory.

        Parameters
        ----------
        reference : Reference
            What the pickle says.
        by : int
            The number of the thread that pickled it.

        Raises
        ------
        PeerGoneError
            If the process is gone, and the memory is not known here.
        ClosedError
            If it has let go of the memory.
        """
        self.tidy()
        asked: int | None = None
        try:
            with self._lock:
                while (found := self._borrower.find(reference)) is None:
                    known = self._borrower.known(reference.memory)
                    if known == asked:  # it answered, and we are none the wiser
                        raise UnknownMemoryError(reference.memory, known)
                    asked = known
                    self._fetch(reference.memory, max(known, 0), by)
                return found
        finally:
            self.tidy()  # what the endpoint's thread left to us, since we were at it

    def known(self, reference: Reference) -> Array | None:
        """Return the array if its memory is mapped here already."""
        if self._forgets or self._is_gone:
            self.tidy()
        with self._lock:
            return self._borrower.find(reference)

    # -- what was taken -----------------------------------------------------------------------------------------
    def took(self, memory: int, times: list[int], by: int) -> bool:
        """Arrays on a memory were unpickled, as often as a list of one number says, which is emptied as it is noted.

        Return whether the process has still to be told, by :meth:`tell`.
        """
        if times:
            self._taken[memory, by] += times[0]  # no interrupt comes before both are done (I12)
            del times[:]
        if time.monotonic() - self._told < TELL_SECONDS:
            return True
        return self.tell()

    def tell(self, timeout: float = 0.0) -> bool:
        """Tell the process what was taken since the last time; return whether that has to be tried again.

        It only needs that to end flights: a queue that is full, or an end, is no reason to fail. But each is told once:
        twice would end a flight that somebody is still to unpickle.
        """
        self._told = time.monotonic()
        fresh: defaultdict[tuple[int, int], int] = defaultdict(int)
        taken, self._taken = self._taken, fresh  # of several threads each has its own share
        try:
            while taken:
                memory, by = key = next(iter(taken))
                self.channel.send(encode(Took(memory, taken[key], by)), timeout=timeout)
                del taken[key]
        except WaitTimeoutError:
            pass
        except (VramError, OSError):
            taken.clear()
        finally:
            while taken:
                key = next(iter(taken))
                self._taken[key] += taken[key]
                del taken[key]
        return bool(self._taken)

    def take_leave(self) -> None:
        """Tell the process, once all is said that was taken, that this one ends of its own accord."""
        with contextlib.suppress(VramError, OSError):  # it then keeps less long what others might still unpickle
            self.channel.send(encode(Bye()), timeout=TELL_SECONDS)

    def _fetch(self, memory: int, first: int, by: int) -> None:
        self._is_waiting = True
        try:
            self._ask_for(memory, first, by)
        finally:
            self._is_waiting = False
            self._discard()  # what an interrupt kept from being looked at; the answer that is on its way is not wanted

    def _ask_for(self, memory: int, first: int, by: int) -> None:
        if self._is_gone:
            raise _gone(memory)
        try:
            self.channel.send(encode(Fetch(memory, first, by)), timeout=FETCH_SECONDS)
        except (PeerGoneError, ClosedError):
            raise _gone(memory) from None
        deadline = time.monotonic() + FETCH_SECONDS
        while True:
            try:
                answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise WaitTimeoutError(f"memory {memory} was not sent for {FETCH_SECONDS:g} s") from None
            if answer is None:
                raise _gone(memory)
            message, fds = answer
            try:
                if isinstance(message, Gone):
                    if message.memory != memory:
                        continue  # the late answer to somebody who did not wait for it
                    raise ClosedError(f"memory {memory} was closed by its sender before it was taken out of the queue")
                if (message.part.memory, message.part.first) != (memory, first):
                    continue
                self._borrower.learn(message.part, fds)
                return
            finally:
                close_fds(fds)

    # -- what the endpoint's thread does ------------------------------------------------------------------------
    def hear(self) -> None:
        """Take one message off the socket.

        Raises
        ------
        ProtocolError
            If it is none.
        PeerGoneError
            If the process is gone.
        """
        payload, fds = self.channel.take(timeout=0)
        message = None
        try:
            message = decode_reply(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a message between endpoints: {error}") from None
        finally:
            if message is None or isinstance(message, Forget):
                close_fds(fds)
        if isinstance(message, Forget):
            self._forgets.extend(message.memories)
            self.tidy()
        else:
            self._answers.put((message, fds))
            if not self._is_waiting:
                self._discard()

    def tidy(self) -> None:
        """Let go of what the lender asked for, unless somebody is at it: they tidy when they are done."""
        while self._forgets or (self._is_gone and not self._answers.empty()):
            held = False
            try:
                held = uninterrupted(self._lock.acquire, False)
                if not held:
                    return
                while self._forgets:
                    self._borrower.forget(self._forgets[0])
                    self._forgets.popleft()  # afterwards: it may be forgotten twice, but not left out
                if self._is_gone:
                    self._discard()
            finally:
                if held:
                    self._lock.release()

    def end(self) -> None:
        """The process is gone. Arrays that are alive keep their memory; nothing else does."""
        self._is_gone = True
        self._answers.put(None)  # wakes whoever waits for one
        self._forgets.extend(self._borrower.numbers())
        self.tidy()
        self.channel.close()

    def _discard(self) -> None:
        """Close the descriptors of answers that nobody waited for."""
        with contextlib.suppress(Empty):
            while True:
                answer = self._answers.get_nowait()
                if answer is not None:
                    close_fds(answer[1])


def _gone(memory: int) -> PeerGoneError:
    return PeerGoneError(
        f"the process that sent memory {memory} is gone, and with it what was not fetched yet; "
        f"publish arrays that must outlive their maker"
    )
