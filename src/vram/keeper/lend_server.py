"""A keeper of one entry, in a thread of the process whose memory it is.

Lent memory is leased by the rules and the protocol of a keeper: leases end with their connection, a release is
acknowledged, memory can be revoked, and the kernel verifies the holders. So a borrower is a reader, and the tools for a
keeper work on a lender. Two things differ: only the process itself publishes, and memory without a descriptor can be
lent, since its maker is here.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from ..errors import ClosedError, NotFoundError, WaitTimeoutError
from ..lifetime import wait_for
from ..open_files import close_fds
from . import listing
from . import messages as m
from .client import Segment, own_label
from .connection import Connection, Held
from .failures import no_keeper
from .records import Session
from .reports import HolderInfo
from .rpc_connection import own_host
from .rules import IDLE, LENT, REQUEST
from .server import KeeperServer

_T = TypeVar("_T")
_servers: set[LendServer] = set()  # whose thread runs; only the threads put them in and take them out
_REFUSED = (m.Publish, m.Offer, m.Part, m.Remove, m.Takeover, m.Page, m.Update, m.Pages)


class LendServer:
    """A keeper of one entry at a socket, in a thread of its own; every user who may connect may borrow.
    `patience` is the seconds that a borrower may keep it waiting before it is disconnected."""

    def __init__(self, path: str, *, mode: int = 0o600, group: str | None = None, patience: float = IDLE) -> None:
        self.keeper = KeeperServer(path, mode=mode, group=group, patience=patience, raises_limit=False)
        self.path = self.keeper.path
        service = self.keeper.service
        service.lends = secrets.token_hex(8)
        service.handlers.update(dict.fromkeys(_REFUSED, self._refuse))
        self._attach, service.handlers[m.Attach] = service.handlers[m.Attach], self._lend
        self._owner = self.keeper.catalogue.connect(os.geteuid(), os.getpid(), own_label(), own_host())
        self._version: Any = None
        self._freed = threading.Event()
        self._keeps: object = None
        self._asked: set[Future[Any]] = set()
        self._fds: list[int] = []  # to be lent; closed by the thread only, while there is one (I9)
        self._thread: threading.Thread | None = None
        self._ends_when_idle = False
        self._has_ended = False  # whether it was told to, perhaps before there was a loop to be told

    def _refuse(self, connection: Connection, session: Session, request: Any, fds: list[int]) -> None:
        raise no_keeper(self.path, self.keeper.pid)

    def _lend(self, connection: Connection, session: Session, request: m.Attach, fds: list[int]) -> None:
        if request.claim:
            self._refuse(connection, session, request, fds)
        if request.name != LENT:  # it never comes either
            raise NotFoundError(
                f"{self.path} is a lender, not a keeper, and has no {request.name!r}: "
                f"vram.borrow({self.path!r}) maps what it lends"
            )
        if self.was_asked_back:  # it never comes back: nobody is to wait for it
            raise NotFoundError(f"what was lent at {self.path} is not lent any more: it was asked back")
        self._attach(connection, session, request, fds)

    def start(self) -> None:
        """Listen, and serve from a thread until :meth:`end`. Errors of the listener are raised here."""
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="lender", daemon=True)
        self._thread.start()
        if not _is_done(started):
            raise WaitTimeoutError(f"the thread that lends at {self.path} did not start within {REQUEST:g} s")
        started.result()

    def _run(self, started: Future[None]) -> None:
        """Serve, in the thread."""

        def ready() -> None:
            started.set_result(None)
            if self._has_ended:
                self.keeper.stop()

        try:
            _servers.add(self)
            if self._has_ended:
                self._never()
            self.keeper.listen()
            self.keeper.serve(ready, signals=False)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:  # the loop is closed: whoever asks from here on is told so
            if self.keeper.is_bound:  # there was no loop to be had, which would have seen to it
                self.keeper.listener.unlink()
                self.keeper.listener.sock.close()
            close_fds(self._fds)
            self._keeps = None
            for asked in list(self._asked):
                if not asked.done():
                    _carry_out(asked, self._never)
            _servers.discard(self)

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
        """Put the one entry in; `fds` are lent, `nbytes` counts also what has no descriptor. `keeps` is kept until the
        lending was ended and the last lease is over. If this fails, the lender is of no use, and the caller ends it."""
        self._keeps = keeps
        # Close-on-exec, as all that Python makes. From here on they are the thread's, which alone knows whether it has
        # put them in: a number that is closed here too would be another's.
        self._fds.extend(map(os.dup, fds if manifest_fd is None else (manifest_fd, *fds)))
        devices = list(dict.fromkeys([segment.device for segment in segments]))
        rows = [m.SegmentRow(segment.size, int(segment.kind), devices.index(segment.device)) for segment in segments]
        has_manifest_fd = manifest_fd is not None
        request = m.Publish(0, LENT, rows, devices, manifest, has_manifest_fd, writable=writable, meta=dict(meta))

        def put_in() -> None:
            keeper = self.keeper
            handles = len(self._fds)
            publication = keeper.catalogue.begin(self._owner, request, nbytes=nbytes, handles=handles, least=0)
            fds, self._fds = self._fds, []
            self._version = keeper.service.commit(publication, Held(fds, nbytes, self._returned))
            keeper.service.carry_out(())  # for those who came between the socket and this

        self._do(put_in)

    # -- what its process asks ------------------------------------------------------------------------------------
    def holders(self) -> list[HolderInfo]:
        """Return who holds a lease, longest first."""
        leases, now = self.keeper.catalogue.leases, self.keeper.now
        return self._do(lambda: [listing.holder(one, now()) for one in leases.values()])

    def revoke(self, timeout: float | None) -> bool:
        """Ask all who borrowed to let go, and wait; return whether they have. Nobody can borrow from now on."""
        self._do(self._ask_back)
        return wait_for(self._freed, timeout)

    @property
    def was_asked_back(self) -> bool:
        """Whether nobody can borrow it any more."""
        return self._version is not None and (self._version.revoked or self._freed.is_set())

    def _ask_back(self) -> None:
        if self._version is not None and not self.was_asked_back:
            self.keeper.service.carry_out(
                self.keeper.catalogue.remove(self._owner, LENT, now=self.keeper.now(), revoke=True)
            )

    def end(self, *, when_idle: bool) -> None:
        """Stop, with `when_idle` once the last lease is over; the path goes at once. Idempotent; never waits."""
        self._has_ended = True
        if self.keeper.is_bound:
            self.keeper.listener.unlink()
        with contextlib.suppress(RuntimeError, AttributeError):  # the loop was closed, or never made
            self.keeper.loop.call_soon_threadsafe(self._end, when_idle)

    def join(self) -> None:
        """Wait until the thread has ended."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        if thread.is_alive():  # or it was not begun; if it is yet to be, it ends at once
            thread.join(REQUEST)
        if not thread.is_alive():
            close_fds(self._fds)  # what came when it had ended already

    def _end(self, when_idle: bool) -> None:
        self.keeper.loop.remove_reader(self.keeper.listener.sock)
        self.keeper.listener.unlink()
        if when_idle and self._version is not None and not self._freed.is_set():
            self._ends_when_idle = True
            self._ask_back()  # who dropped it without closing it has not; with nobody to wait for it ends here
        else:
            self.keeper.stop()

    def _returned(self, fds: list[int], _number: int) -> None:
        """Nobody holds what was lent any more."""
        close_fds(fds)
        self._keeps = None
        self._freed.set()
        if self._ends_when_idle:
            self.keeper.stop()

    def _do(self, call: Callable[[], _T]) -> _T:
        """Have the thread call a function, and return its result."""
        if threading.current_thread() is self._thread:  # the finalizer of an owner that it let go of
            return call()
        asked: Future[_T] = Future()
        try:
            self._asked.add(asked)
            if self._thread is None or not self._thread.is_alive():
                self._never()
            try:
                self.keeper.loop.call_soon_threadsafe(_carry_out, asked, call)
            except RuntimeError:  # its loop was closed
                self._never()
            try:
                _is_done(asked)
            finally:
                # Late: either it does not run any more, or what it uses is its own and it ends soon.
                is_late = asked.cancel() or not _is_done(asked)
            if is_late:
                raise WaitTimeoutError(f"the thread that lends at {self.path} did not answer within {REQUEST:g} s")
            return asked.result()
        finally:
            self._asked.discard(asked)
            del asked  # or its error, which keeps this frame, would keep itself

    def _never(self) -> NoReturn:
        raise ClosedError(f"what was lent at {self.path} is not lent any more")


def _carry_out(asked: Future[_T], call: Callable[[], _T]) -> None:
    if not asked.set_running_or_notify_cancel():
        return  # whoever asked waits no longer, and has taken back what this would have used
    try:
        asked.set_result(call())
    except BaseException as error:  # noqa: BLE001  (whoever asked raises it)
        asked.set_exception(error)


def _is_done(asked: Future[Any]) -> bool:
    """Wait for a result, and let interrupts in."""
    done = threading.Event()
    asked.add_done_callback(lambda _: done.set())
    return wait_for(done, REQUEST)


def _after_fork_in_child() -> None:
    """Close the parent's sockets, or borrowers would not see the parent's end."""
    for keeper in [server.keeper for server in _servers]:
        for connection in [*keeper.pending, *keeper.connections.values()]:
            connection.sock.close()
        if keeper.is_bound:
            keeper.listener.sock.close()
    _servers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
