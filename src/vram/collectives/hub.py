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

import msgspec

from ..errors import PeerError, VramError, WaitTimeoutError
from ..keeper.bind import Listener
from ..lifetime import begin
from ..sharing.channel import Channel, accept, peer_credentials
from ..sharing.unread import pass_rights
from . import messages as m

__all__ = ["Hub"]

_SEND = 2.0  # seconds after which a rank that reads nothing is taken for one that is gone
_STRANGERS = 16  # connections at a time that have not said who they are


class Hub:
    """Serves one group, from the first rank that comes until rank 0 is gone.

    Parameters
    ----------
    listener : Listener
        Where the others come to. It ends when all have come, or rank 0 is gone.
    own : Channel
        The connection of rank 0 itself. Its end is the end of the hub.
    name, size : str, int
        What rank 0 takes the group for.
    """

    def __init__(self, listener: Listener, own: Channel, name: str, size: int) -> None:
        self._listener: Listener | None = listener
        self._name, self._size = name, size
        self._poll = select.poll()
        self._strangers: dict[int, Channel] = {own.fileno(): own}
        self._own = own
        self._ranks: dict[int, Channel] = {}
        self._numbers: dict[int, int] = {}  # descriptor of a connection: its rank
        self._pids: dict[int, int] = {}
        self._came: dict[int, set[int]] = {}  # stage: who has voted in it
        self._done = m.FORMING  # the last stage that all have voted in
        self._failed: dict[int, m.Failed] = {}  # stages after that which never will be done
        self._gone: dict[int, bool] = {}
        self._is_formed = False
        self._poll.register(own.fileno(), select.POLLIN)
        self._poll.register(listener.sock.fileno(), select.POLLIN)
        self._thread = threading.Thread(target=self._serve, name=f"vram group {name} hub", daemon=True)
        begin(self._thread)

    def join(self) -> None:
        """Wait until it has ended: the connection of rank 0 has."""
        self._thread.join()

    # -- the thread -----------------------------------------------------------------------------------------------
    def _serve(self) -> None:
        try:
            while 0 not in self._gone and (self._ranks or self._strangers):
                for fd, _ in self._poll.poll():
                    if self._listener is not None and fd == self._listener.sock.fileno():
                        self._let_in(self._listener)
                    elif fd in self._numbers:
                        self._hear(fd)
                    elif fd in self._strangers:
                        self._greet(fd)
        finally:
            self._stop_listening()
            for channel in (*self._ranks.values(), *self._strangers.values()):
                channel.close()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            self._poll.unregister(listener.sock.fileno())
            listener.unlink()
            listener.sock.close()

    def _let_in(self, listener: Listener) -> None:
        try:
            sock = accept(listener.sock)
        except OSError:  # whoever it was went away again, or there is no descriptor to be had: it stays in line
            return
        uid = peer_credentials(sock).uid
        if uid not in (os.geteuid(), 0) or len(self._strangers) >= _STRANGERS:
            sock.close()
            return
        pass_rights(sock, True)
        channel = Channel(sock)
        channel.only_memory = True
        self._strangers[channel.fileno()] = channel
        self._poll.register(channel.fileno(), select.POLLIN)

    def _greet(self, fd: int) -> None:
        channel = self._strangers.pop(fd)
        try:
            payload, fds = channel.take(timeout=0)
            channel.close_received(fds)
            said = m.decode_to_hub(payload)
            if not isinstance(said, m.Hello):
                raise msgspec.ValidationError("no greeting")
        except (VramError, msgspec.MsgspecError):
            self._drop(fd, channel)
            return
        why, concerns_all = self._objection(said)
        if why:
            with contextlib.suppress(VramError):
                channel.send(m.encode(m.Refused(why)), timeout=0)
            self._drop(fd, channel)
            if concerns_all:
                self._say_all(m.Refused(why))
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
        if said.lowest > m.HIGHEST or said.highest < m.LOWEST:
            return (
                f"rank {said.rank} speaks versions {said.lowest} to {said.highest} of what groups say, rank 0 "
                f"{m.LOWEST} to {m.HIGHEST}: use one version of vram in all ranks"
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
        return "", False

    def _hear(self, fd: int) -> None:
        rank = self._numbers[fd]
        channel = self._ranks[rank]
        try:
            payload, fds = channel.take(timeout=0)
        except WaitTimeoutError:
            return
        except PeerError:
            self._lose(rank, left=False)
            return
        try:
            said = m.decode_to_hub(payload)
            match said:
                case m.Vote():
                    self._pass_on(rank, said, fds)
                case m.Abandon():
                    self._give_up(rank, said.stage)
                case m.Leave():
                    self._lose(rank, left=True)
                case _:
                    raise msgspec.ValidationError("a second greeting")
        except msgspec.MsgspecError:
            self._lose(rank, left=False)
        finally:
            channel.close_received(fds)

    def _pass_on(self, rank: int, vote: m.Vote, fds: list[int]) -> None:
        failed = self._failed.get(vote.stage)
        if failed is not None:
            self._say(rank, failed)  # it comes late: it is told what the others were
            return
        self._came.setdefault(vote.stage, set()).add(rank)
        came = m.encode(m.Came(vote.stage, rank, vote.data))
        for other in list(self._ranks):
            self._send(other, came, () if other == rank else fds)
        if len(self._came.get(vote.stage, ())) == self._size:
            del self._came[vote.stage]
            self._done = vote.stage  # every rank has come by all those before it
            self._failed = {stage: failed for stage, failed in self._failed.items() if stage > vote.stage}

    def _give_up(self, rank: int, stage: int) -> None:
        """One waits no longer. Where all had voted it has heard so by now; else nobody is to find it done."""
        if stage == m.FORMING:
            if self._is_formed:
                return
            missing = set(range(self._size)) - set(self._ranks)
        elif stage <= self._done or stage in self._failed:
            return
        else:
            missing = set(range(self._size)) - self._came.pop(stage, set())
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

    def _say(self, rank: int, message: object) -> None:
        self._send(rank, m.encode(message))

    def _send(self, rank: int, payload: bytes, fds: list[int] | tuple[()] = ()) -> None:
        channel = self._ranks.get(rank)
        if channel is None:
            return  # lost while others were told
        try:
            channel.send(payload, fds, timeout=_SEND)
        except VramError:
            self._lose(rank, left=False)
