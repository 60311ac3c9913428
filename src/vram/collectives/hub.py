"""The hub of a group: in the process of rank 0, and all ranks are connected to it, rank 0 as well.

It passes on what the ranks say, and decides what is for one to decide: whether a stage of the set-up is done or has
failed. It decides once, for one thread at a time, and every rank hears the same. That thread is rank 0's in a vote,
which then hears without being woken, and otherwise that of its spoke.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Mapping, Sequence

import msgspec

from ..errors import BusyError, PeerGoneError, VramError, WaitTimeoutError
from ..keeper.bind import Listener
from ..lifetime import waiting
from ..sharing.channel import MAX_FDS, MAX_MESSAGE, Channel, check_free, peer_credentials
from . import messages as m

_ROOM = 8  # descriptors that a hub and a spoke have, and that a first vote brings
_REST = 0.01  # seconds before another try, where there is no descriptor to be had, or too many are on their way
_FRAME = 32  # bytes of a message around a vote, or around all of them: at most
_STRANGERS = 2 * m.MAX_RANKS  # connections at a time that have not said who they are: all ranks may come at once
_Message = tuple[bytes, Sequence[int], object]


class Hub:
    """Serves one group at `path` until rank 0 is gone; nobody comes in once all have come. `channel` is the connection
    of rank 0 itself, whose end is the end of the hub. Raises BusyError or UsageError if somebody listens at the path,
    or nobody can."""

    def __init__(self, path: str, name: str, size: int) -> None:
        self._name, self._size = name, size
        check_free(_ROOM, "meeting the ranks of a group")
        self._listener: Listener | None = Listener(path)
        self.channel, self._own = Channel.pair()
        self._strangers: dict[int, Channel] = {self._own.fileno(): self._own}
        self._ranks: dict[int, Channel] = {}
        self._numbers: dict[int, int] = {}  # descriptor of a connection: its rank
        self._pids: dict[int, int] = {}
        self._owed: dict[int, list[_Message]] = {}  # messages that a rank had no room for, and is to hear yet
        self._votes: dict[int, dict[int, tuple[m.Vote, list[int]]]] = {}  # stage: by rank, until all have voted
        self._done = m.FORMING  # the last stage that all have voted in
        self._failed: dict[int, m.Failed] = {}  # stages after that which never will be done
        self._refused: m.Refused | None = None  # why nobody can be of this group
        self._gone: dict[int, bool] = {}
        self._is_formed = False
        self._ready = select.epoll()
        for fd in (self._listener.sock.fileno(), self._own.fileno(), self.channel.fileno()):
            self._ready.register(fd, select.EPOLLIN)

    def fileno(self) -> int:
        """Lend the descriptor that is ready when there is something to serve, or for rank 0 to hear."""
        return self._ready.fileno()

    def serve(self, timeout: float) -> None:
        """Hear who says something in so many seconds, and answer. Interrupts are let in before somebody does."""
        for fd, events in waiting(self._ready.poll, timeout):
            if self._listener is not None and fd == self._listener.sock.fileno():
                self._let_in(self._listener)
            elif events & select.EPOLLOUT and fd in self._numbers:
                self._pay(self._numbers[fd])
            elif fd in self._numbers or fd in self._strangers:
                self._hear(fd)

    def close(self) -> None:
        """End all connections, once what rank 0 said last is passed on: that it leaves. Idempotent."""
        self.channel.hang_up()
        while 0 not in self._gone:
            self._hear(self._own.fileno())
        self._stop_listening()
        for channel in (*self._ranks.values(), *self._strangers.values()):
            channel.close()
        self._ready.close()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._ready.unregister(listener.sock.fileno())
            listener.unlink()
            listener.sock.close()

    def _let_in(self, listener: Listener) -> None:
        try:
            sock = listener.sock.accept()[0]
        except OSError:  # whoever it was went away again, or there is no descriptor to be had: it stays in line
            time.sleep(_REST)
            return
        uid = peer_credentials(sock).uid
        if uid not in (os.geteuid(), 0) or len(self._strangers) >= _STRANGERS:
            sock.close()
            return
        channel = Channel(sock)
        channel.only_memory = True
        self._strangers[channel.fileno()] = channel
        self._ready.register(channel.fileno(), select.EPOLLIN)

    def _hear(self, fd: int) -> None:
        rank = self._numbers.get(fd)
        channel = self._strangers[fd] if rank is None else self._ranks[rank]
        try:
            payload, fds = channel.take(timeout=0)
            said = m.decode_to_hub(payload)
            if rank is None and isinstance(said, m.Hello):
                del self._strangers[fd]
                self._greet(fd, channel, said)
            elif rank is not None and isinstance(said, m.Vote):
                self._take_vote(rank, said, fds)
            elif rank is not None and isinstance(said, m.Abandon):
                self._give_up(rank, said.stage)
            elif rank is not None and isinstance(said, m.Leave):
                self._lose(rank, left=True)
            else:
                raise msgspec.ValidationError("a second greeting, or none")
        except WaitTimeoutError:  # what could be read was of a connection that had this number a moment ago
            pass
        except (VramError, msgspec.MsgspecError):
            if rank is None:
                del self._strangers[fd]
                self._drop(fd, channel)
                self._note_own_end(channel)
            else:
                self._lose(rank, left=False)

    def _greet(self, fd: int, channel: Channel, said: m.Hello) -> None:
        failed = self._failed.get(m.FORMING) or self._refused
        if failed is not None:
            self._refuse(fd, channel, failed)  # it comes late: it is told what the others were
            return
        why, concerns_all = self._objection(said)
        if why:
            self._refuse(fd, channel, m.Refused(why))
            if concerns_all:
                self._refused = m.Refused(why)  # for those who are yet to come, of whom rank 0 may be one
                self._say_all(self._refused)
            return
        self._ranks[said.rank], self._numbers[fd] = channel, said.rank
        self._pids[said.rank] = os.getpid() if channel is self._own else channel.peer().pid or 0
        self._say_all(m.Present(tuple(sorted(self._ranks))))
        if len(self._ranks) == self._size and not self._is_formed:
            self._is_formed = True
            self._stop_listening()
            self._say_all(m.Formed(tuple(self._pids[rank] for rank in range(self._size))))

    def _objection(self, said: m.Hello) -> tuple[str, bool]:
        """Say why somebody cannot be of this group, if so, and whether then nobody can."""
        if said.protocol != m.PROTOCOL:
            return (
                f"rank {said.rank} speaks protocol {said.protocol}, rank 0 {m.PROTOCOL}: use one version of vram in "
                f"all ranks"
            ), True
        if said.name != self._name:
            return f"here meets the group {self._name!r}, not {said.name!r}: have each meet at a path of its own", False
        if said.size != self._size:
            return f"rank {said.rank} takes the group for one of {said.size}, rank 0 for one of {self._size}", True
        if said.rank in self._ranks:
            pid = self._pids[said.rank]
            return f"rank {said.rank} has come already: it is process {pid}. Each rank comes once", False
        if not 0 <= said.rank < self._size:
            return f"rank {said.rank} of a group of {self._size}", False
        if self._is_formed:
            return f"the group {self._name!r} met without this process, and rank {said.rank} is gone since", False
        return "", False

    def _refuse(self, fd: int, channel: Channel, why: m.Refused | m.Failed) -> None:
        with contextlib.suppress(VramError):
            channel.send(m.encode(why), timeout=0)
        self._drop(fd, channel)
        self._note_own_end(channel)

    def _note_own_end(self, channel: Channel) -> None:
        """Have who came hear that rank 0 does not, if it was its connection that ended before it was one of them."""
        if channel is self._own:
            self._gone[0] = False
            self._say_all(m.Gone(0, False))

    def _take_vote(self, rank: int, vote: m.Vote, fds: list[int]) -> None:
        """Keep a vote, and pass all of its stage on with the last one. Descriptors close with the list they are in."""
        failed = self._failed.get(vote.stage)
        if failed is not None:
            self._send(rank, m.encode(failed))  # it comes late: it is told what the others were
            return
        if self._gone:
            return  # as all have heard: no stage is done any more
        votes = self._votes.setdefault(vote.stage, {})
        if vote.stage <= self._done or rank in votes:
            raise msgspec.ValidationError("a second vote")
        votes[rank] = vote, fds
        if len(votes) < self._size:
            return
        del self._votes[vote.stage]
        self._done = vote.stage  # every rank has come by all those before it
        self._failed = {stage: failed for stage, failed in self._failed.items() if stage > vote.stage}
        replies = [
            (ranks, m.encode(m.Came(vote.stage, tuple((votes[by][0].data, len(votes[by][1])) for by in ranks))))
            for ranks in _parts(votes)
        ]
        for other in sorted(self._ranks, reverse=True):  # rank 0 last: it is here
            for ranks, payload in replies:
                self._send(other, payload, [fd for by in ranks if by != other for fd in votes[by][1]], votes)

    def _give_up(self, rank: int, stage: int) -> None:
        """One waits no longer. Where all had voted it has heard so by now; else nobody is to find it done."""
        if stage == m.FORMING:
            if self._is_formed:
                return
            missing = set(range(self._size)) - set(self._ranks)
        elif stage <= self._done or stage in self._failed:
            return
        else:
            missing = set(range(self._size)) - self._votes.pop(stage, {}).keys()
        self._failed[stage] = failed = m.Failed(stage, rank, tuple(sorted(missing)))
        self._say_all(failed)

    def _lose(self, rank: int, *, left: bool) -> None:
        channel = self._ranks.pop(rank, None)
        if channel is None:
            return
        fd = next(fd for fd, number in self._numbers.items() if number == rank)
        del self._numbers[fd]
        self._owed.pop(rank, None)
        self._drop(fd, channel)
        if self._is_formed or rank == 0:
            self._gone[rank] = left
            self._votes.clear()
            self._say_all(m.Gone(rank, left))
        else:  # it may come again: the group has not begun
            self._say_all(m.Present(tuple(sorted(self._ranks))))

    def _drop(self, fd: int, channel: Channel) -> None:
        self._ready.unregister(fd)
        channel.close()

    def _say_all(self, message: object) -> None:
        payload = m.encode(message)
        for rank in list(self._ranks):
            self._send(rank, payload)

    def _send(self, rank: int, payload: bytes, fds: Sequence[int] = (), keeps: object = None) -> None:
        """Tell a rank something, with descriptors that something keeps open."""
        if rank in self._ranks:  # and was not lost while others were told
            owed = self._owed.setdefault(rank, [])
            owed.append((payload, fds, keeps))
            if len(owed) == 1:
                self._pay(rank)

    def _pay(self, rank: int) -> None:
        """Send messages that a rank is to hear yet, as far as it has room for them, and the others when it has."""
        channel, owed = self._ranks[rank], self._owed[rank]
        count = len(owed)
        try:
            while owed:
                channel.send(owed[0][0], owed[0][1], timeout=0)
                del owed[0]
        except (BusyError, WaitTimeoutError) as error:
            time.sleep(_REST if isinstance(error, BusyError) else 0)
        except PeerGoneError:  # what it has said before, that it leaves above all, is read before the end
            owed.clear()
        except VramError:
            self._lose(rank, left=False)
        if rank in self._ranks and (count > 1 or owed):
            self._ready.modify(channel.fileno(), select.EPOLLIN | (select.EPOLLOUT if owed else 0))


def _parts(votes: Mapping[int, tuple[m.Vote, list[int]]]) -> list[list[int]]:
    """Return which ranks' votes go into one message, in their order."""
    parts: list[list[int]] = []
    nbytes, count = MAX_MESSAGE, 0
    for rank, (vote, fds) in sorted(votes.items()):
        nbytes, count = nbytes + len(vote.data) + _FRAME, count + len(fds)
        if nbytes > MAX_MESSAGE - _FRAME or count > MAX_FDS:
            parts.append([])
            nbytes, count = len(vote.data) + _FRAME, len(fds)
        parts[-1].append(rank)
    return parts
