"""The hub of a group: a thread in the process of rank 0 that all ranks are connected to, rank 0 as well.

It passes on what the ranks say, and decides what is for one to decide: whether a stage of the set-up is done or has
failed. It decides once, in one thread, and every rank hears the same. Nothing here depends on what the thread of rank 0
that uses the group is doing.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

import msgspec

from ..errors import PeerGoneError, VramError, WaitTimeoutError
from ..keeper.bind import Listener
from ..open_files import close_fds
from ..sharing.channel import Channel, check_free, peer_credentials
from . import messages as m

_SEND = 2.0  # seconds after which a rank whose queue is full, and that reads nothing, is taken for one that is gone
_ROOM = 5  # descriptors that a first vote brings
_REST = 0.01  # seconds before another try to let somebody in, where there is no descriptor to be had
_STRANGERS = 2 * m.MAX_RANKS  # connections at a time that have not said who they are: all ranks may come at once


class Hub:
    """Serves one group at `path`, from the first rank that comes until rank 0 is gone; nobody comes in once all have
    come. `channel` is the connection of rank 0 itself, whose end is the end of the hub."""

    def __init__(self, path: str, name: str, size: int) -> None:
        self._path, self._name, self._size = path, name, size
        self._listener: Listener | None = None
        self._is_listening = threading.Event()
        self._failure: BaseException | None = None
        self._poll = select.poll()
        self.channel, self._own = Channel.pair()
        self._strangers: dict[int, Channel] = {self._own.fileno(): self._own}
        self._ranks: dict[int, Channel] = {}
        self._numbers: dict[int, int] = {}  # descriptor of a connection: its rank
        self._pids: dict[int, int] = {}
        self._votes: dict[int, dict[int, tuple[m.Vote, list[int]]]] = {}  # stage: by rank, until all have voted
        self._done = m.FORMING  # the last stage that all have voted in
        self._failed: dict[int, m.Failed] = {}  # stages after that which never will be done
        self._refused: m.Refused | None = None  # why nobody can be of this group
        self._gone: dict[int, bool] = {}
        self._is_formed = False
        self._thread = threading.Thread(target=self._serve, name=f"vram group {name} hub", daemon=True)

    def open(self) -> None:
        """Begin to serve. Raises BusyError or UsageError if somebody listens at the path, or nobody can."""
        self._thread.start()
        self._is_listening.wait()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the connection of rank 0, and with it the hub. Idempotent."""
        self.channel.close()

    def join(self) -> None:
        """Wait until it has ended, after :meth:`close`."""
        if self._thread.ident is not None:  # it has begun
            self._thread.join()

    # -- the thread -----------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        try:
            check_free(_ROOM, "meeting the ranks of a group")
            self._listener = listener = Listener(self._path)
        except BaseException as error:  # noqa: BLE001  (raised by whoever opens it)
            self._failure = error
            self._own.close()
            return
        finally:
            self._is_listening.set()
        self._poll.register(self._own.fileno(), select.POLLIN)
        self._poll.register(listener.sock.fileno(), select.POLLIN)
        try:
            self._hear_all()
        finally:
            self._stop_listening()
            for channel in (*self._ranks.values(), *self._strangers.values()):
                channel.close()

    def _hear_all(self) -> None:
        """Hear who says something, until nobody is left to."""
        while 0 not in self._gone and (self._ranks or self._strangers):
            for fd, _ in self._poll.poll():
                if self._listener is not None and fd == self._listener.sock.fileno():
                    self._let_in(self._listener)
                elif fd in self._numbers:
                    self._hear(fd)
                elif fd in self._strangers:
                    self._greet(fd)

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._poll.unregister(listener.sock.fileno())
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
        self._poll.register(channel.fileno(), select.POLLIN)

    def _greet(self, fd: int) -> None:
        channel = self._strangers[fd]
        try:
            payload, fds = channel.take(timeout=0)
            close_fds(fds)
            said = m.decode_to_hub(payload)
            if not isinstance(said, m.Hello):
                raise msgspec.ValidationError("no greeting")
        except WaitTimeoutError:  # what could be read was of a connection that had this number a moment ago
            return
        except (VramError, msgspec.MsgspecError):
            del self._strangers[fd]
            self._drop(fd, channel)
            self._note_own_end(channel)
            return
        del self._strangers[fd]
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

    def _hear(self, fd: int) -> None:
        rank = self._numbers[fd]
        channel = self._ranks[rank]
        try:
            payload, fds = channel.take(timeout=0)
        except WaitTimeoutError:  # as in `_greet`
            return
        except VramError:
            self._lose(rank, left=False)
            return
        try:
            said = m.decode_to_hub(payload)
            match said:
                case m.Vote():
                    self._take_vote(rank, said, fds)
                case m.Abandon():
                    self._give_up(rank, said.stage)
                case m.Leave():
                    self._lose(rank, left=True)
                case _:
                    raise msgspec.ValidationError("a second greeting")
        except msgspec.MsgspecError:
            self._lose(rank, left=False)

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
        came = [(by, m.encode(m.Came(vote.stage, by, said.data)), lent) for by, (said, lent) in votes.items()]
        # Rank 0 last: the thread that hears for it is of this process, and once it is awake it has its turn at the
        # interpreter before the others are told.
        for other in sorted(self._ranks, reverse=True):
            for by, payload, lent in came:
                self._send(other, payload, () if other == by else lent)

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
        self._drop(fd, channel)
        if self._is_formed or rank == 0:
            self._gone[rank] = left
            self._votes.clear()
            self._say_all(m.Gone(rank, left))
        else:  # it may come again: the group has not begun
            self._say_all(m.Present(tuple(sorted(self._ranks))))

    def _drop(self, fd: int, channel: Channel) -> None:
        self._poll.unregister(fd)
        channel.close()

    def _say_all(self, message: object) -> None:
        payload = m.encode(message)
        for rank in list(self._ranks):
            self._send(rank, payload)

    def _send(self, rank: int, payload: bytes, fds: list[int] | tuple[()] = ()) -> None:
        channel = self._ranks.get(rank)
        if channel is None:
            return  # lost while others were told
        try:
            channel.send(payload, fds, timeout=_SEND)
        except PeerGoneError:  # what it has said before, that it leaves above all, is read before the end
            pass
        except VramError:
            self._lose(rank, left=False)
