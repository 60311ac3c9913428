"""A keeper of one entry, in a thread of the process whose memory it is.

What a process lends directly is leased by the same rules, in the same words and over the same protocol as what a keeper
keeps: leases that end with their connection, a release that is acknowledged, revocation, holders as the kernel verified
them. So a borrower is a reader, and whatever looks at a keeper looks at a lender. Two things differ: nobody but the
process itself puts anything in, and memory that no descriptor stands for can be lent, since its maker is here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any, TypeVar

import msgspec

from ..errors import AccessDeniedError, ClosedError, NotFoundError, WaitTimeoutError
from ..sharing.channel import close_fds
from . import messages as m
from . import pages
from .client import own_label
from .connection import Connection, Held
from .conversation import own_host
from .leases import Segment
from .records import Session
from .reports import HolderInfo, holder_info
from .rules import LENT
from .server import PATIENCE, KeeperServer
from .service import Service

__all__ = ["LENT", "LenderServer"]

_T = TypeVar("_T")
_ANSWER = 30.0  # seconds within which the thread does what it is asked
_servers: weakref.WeakSet[LenderServer] = weakref.WeakSet()


class LenderService(Service):
    """Answers those who borrow: they may attach, look and give back."""

    def __init__(self, server: LenderServer) -> None:
        super().__init__(server)
        self.lends = secrets.token_hex(8)
        self._lender = server
        for request in (m.Publish, m.Offer, m.Part, m.Abandon, m.Remove, m.Takeover):
            self._handlers[request] = self._refuse

    def _refuse(self, connection: Connection, session: Session, request: Any, fds: list[int]) -> None:
        raise AccessDeniedError(
            f"{self.server.path} is a lender, not a keeper: what it lends is its process's own. Borrow it, or look at "
            f"it with `vram ls` and `vram show`; only pid {self.server.pid} can ask for it back (Lending.revoke)"
        )

    def _attach(self, connection: Connection, session: Session, request: m.Attach, fds: list[int]) -> None:
        if request.claim:
            self._refuse(connection, session, request, fds)
        if self._lender.was_asked_back:  # it never comes back: nobody is to wait for it
            raise NotFoundError(f"what was lent at {self.server.path} is not lent any more: it was asked back")
        super()._attach(connection, session, request, fds)


class LenderServer(KeeperServer):
    """Lends one entry at a socket, from a thread of its own.

    Parameters
    ----------
    path : str
        Where to listen; its directory has to exist.
    mode : int
        Permissions of the socket: who may connect may borrow.
    group : str or None
        Group of the socket.
    patience : float
        Seconds that a borrower may keep it waiting before it is disconnected.
    """

    def __init__(self, path: str, *, mode: int = 0o600, group: str | None = None, patience: float = PATIENCE) -> None:
        super().__init__(path, mode=mode, group=group, patience=patience, raises_limit=False)
        self.service = LenderService(self)
        self.handle = self.service.handle
        self._owner = self.catalogue.connect(os.geteuid(), os.getpid(), own_label(), own_host())
        self._version: Any = None
        self._freed = threading.Event()
        self._keeps: object = None
        self._asked: set[Future[Any]] = set()
        self._thread: threading.Thread | None = None
        self._ends_when_idle = False

    def start(self) -> None:
        """Listen, and serve from a thread until :meth:`end`.

        Raises
        ------
        BusyError, UsageError
            As :class:`~vram.keeper.listener.Listener` does, in the calling thread.
        """
        self.listen()
        ready = threading.Event()
        thread = threading.Thread(target=self.serve, args=(ready.set,), kwargs={"signals": False}, name="lender")
        thread.daemon = True
        _servers.add(self)
        self._thread = thread
        try:
            thread.start()
            started = ready.wait(_ANSWER)
        except BaseException:  # interrupted: what it listens with is there to be ended once it is
            if thread.ident is not None:
                ready.wait(_ANSWER)
            raise
        if not started:
            raise WaitTimeoutError(f"the thread that lends at {self.path} did not start within {_ANSWER:g} s")

    def lend(
        self,
        segments: Sequence[Segment],
        fds: Sequence[int],
        manifest: bytes,
        manifest_fd: int | None,
        *,
        nbytes: int,
        writable: bool,
        meta: Mapping[str, str],
        keeps: object,
    ) -> None:
        """Put the one entry in. `fds` are lent; `keeps` is kept until nobody holds a lease any more and it was ended.

        Parameters
        ----------
        segments : sequence of Segment
            One for each descriptor; those of pools come last.
        nbytes : int
            Bytes that are lent, whether by descriptor or not.
        """
        mine: list[int] = []
        try:
            for fd in fds if manifest_fd is None else (manifest_fd, *fds):
                mine.append(os.dup(fd))  # close-on-exec, as all that Python makes
            self._keeps = keeps
            self._do(lambda: self._put_in(segments, mine, manifest, manifest_fd is not None, nbytes, writable, meta))
        except BaseException:
            close_fds(mine)
            raise

    def _put_in(
        self,
        segments: Sequence[Segment],
        fds: list[int],
        manifest: bytes,
        has_manifest_fd: bool,
        nbytes: int,
        writable: bool,
        meta: Mapping[str, str],
    ) -> None:
        devices = list(dict.fromkeys(segment.device for segment in segments))
        pieces = [m.Piece(segment.size, int(segment.kind), devices.index(segment.device)) for segment in segments]
        publication = self.catalogue.begin(
            self._owner, LENT, nbytes=nbytes, handles=len(fds), writable=writable, meta=meta, least=0
        )
        held = Held(list(fds), nbytes, self._returned)
        version, effects = self.catalogue.commit(publication, held, self.now())
        version.body = msgspec.Raw(
            m.encode(
                m.Entry(
                    LENT, version.number, version.owner, writable, pieces, devices, manifest, has_manifest_fd,
                    version.meta,
                )
            )
        )  # fmt: skip
        self._version = version
        fds.clear()
        self.service.carry_out(effects)  # those who came between the socket and this

    # -- what its process asks ------------------------------------------------------------------------------------
    def holders(self) -> list[HolderInfo]:
        """Return who holds a lease, longest first."""
        return self._do(self._holders)

    def _holders(self) -> list[HolderInfo]:
        leases = self.catalogue.leases.values()
        return [holder_info(pages.holder(one, self.now())) for one in leases]

    def revoke(self, timeout: float | None) -> bool:
        """Ask all who borrowed to let go, and wait; return whether they have. Nobody can borrow from now on."""
        self._do(self._ask_back)
        return self._freed.wait(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))

    @property
    def was_asked_back(self) -> bool:
        """Whether nobody can borrow it any more."""
        return self._version is not None and (self._version.revoked or self._freed.is_set())

    def _ask_back(self) -> None:
        if self._version is not None and not self.was_asked_back:
            self.service.carry_out(self.catalogue.remove(self._owner, LENT, revoke=True))

    def end(self, *, when_idle: bool) -> None:
        """Stop; with `when_idle` only once the last lease is over, until which what was lent is kept.

        Idempotent, and never waits. The path is taken away at once in any case.
        """
        if self._bound:
            self.listener.unlink()
        with contextlib.suppress(RuntimeError, AttributeError):  # the loop was closed, or never made
            self.loop.call_soon_threadsafe(self._end, when_idle)

    def join(self) -> None:
        """Wait until the thread has ended."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_ANSWER)

    def _end(self, when_idle: bool) -> None:
        self.loop.remove_reader(self.listener.sock)
        if when_idle and self._version is not None and not self._freed.is_set():
            self._ends_when_idle = True
            self._ask_back()  # who dropped it without closing it has not; with nobody to wait for it ends here
        else:
            self.stop()

    def _returned(self, fds: list[int], nbytes: int, *, uid: int | None = None) -> None:
        """Nobody holds what was lent any more."""
        close_fds(fds)
        self._keeps = None
        self._freed.set()
        if self._ends_when_idle:
            self.stop()

    def _shut_down(self) -> None:
        super()._shut_down()  # closes the loop: whoever asks from here on is told so
        self._keeps = None
        for done in list(self._asked):
            with contextlib.suppress(InvalidStateError):
                done.set_exception(self._over())

    def _do(self, what: Callable[[], _T]) -> _T:
        """Have the thread do something, and return what comes of it."""
        if threading.current_thread() is self._thread:  # the finalizer of an owner that it let go of
            return what()
        done: Future[_T] = Future()
        self._asked.add(done)

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # whoever asked waits no longer, and has taken back what this would have used
            try:
                done.set_result(what())
            except BaseException as error:  # noqa: BLE001  (whoever asked raises it)
                done.set_exception(error)

        try:
            if self._thread is None or not self._thread.is_alive():
                raise self._over()
            try:
                self.loop.call_soon_threadsafe(run)
            except RuntimeError:  # its loop was closed
                raise self._over() from None
            try:
                wait([done], _ANSWER)
            finally:
                # Late, or interrupted: either it does not run any more, or what it uses is its own and it ends soon.
                if not done.cancel():
                    wait([done], _ANSWER)
            if done.cancelled() or not done.done():
                raise WaitTimeoutError(f"the thread that lends at {self.path} did not answer within {_ANSWER:g} s")
            return done.result()
        finally:
            self._asked.discard(done)

    def _over(self) -> ClosedError:
        return ClosedError(f"what was lent at {self.path} is not lent any more")

    def let_go_in_child(self) -> None:
        """In the child of a fork: let go of the parent's sockets, or borrowers would not see the parent's end."""
        for connection in [*self.strangers, *self.connections.values()]:
            connection.sock.close()
        self.listener.sock.close()


def _after_fork_in_child() -> None:
    for server in list(_servers):
        server.let_go_in_child()
    _servers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
