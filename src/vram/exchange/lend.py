"""Directly between two processes, no keeper: one lends what it has, any number borrow it, a lease each."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections.abc import Mapping
from functools import partial

from .. import driver as drivers
from ..arrays.cuda import as_stream
from ..errors import (
    BusyError,
    ClosedError,
    NotFoundError,
    OutOfMemoryError,
    PeerGoneError,
    ProtocolError,
    ReleaseWarning,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from ..keeper.client import KeeperClient, client
from ..keeper.lender import LENT, LenderServer
from ..keeper.reports import HolderInfo, RevokeInfo
from ..keeper.rules import MAX_MANIFEST, check_meta
from ..lifetime import Owned, own, unwinding
from ..memory import Event
from ..sharing.descriptor import EventEntry, Manifest, encode_manifest
from ..spec import HOST, Location
from .attach import check_access, user_of
from .keepers import as_notes, check_flag, check_seconds
from .lease import Lease, wire_access
from .mapping import device_name, location_of, sealed_copy
from .placement import Placement

__all__ = ["Lending", "borrow", "lend"]

_ONE = "array"  # what the array is called where one object is lent
_FIRST_LOOK, _LAST_LOOK = 0.001, 0.05  # seconds between two looks for a lender that is not there yet


class Lending(Owned):
    """What is lent at a path, until it is closed. Made by :func:`lend`.

    Attributes
    ----------
    path : str
        Where it can be borrowed.
    nbytes : int
        Bytes of the arrays that are lent.
    patience : float
        Seconds that :meth:`close` waits for borrowers of memory which may not be freed under them.
    """

    __slots__ = ("_by_handle", "_server", "manifest", "nbytes", "path", "patience")

    _warn_on_leak = True

    def __init__(self, server: LenderServer, manifest: Manifest, nbytes: int, patience: float) -> None:
        self._server = server
        self.nbytes = nbytes
        self._by_handle = bool(manifest.handles)
        self.manifest = manifest
        self.path = server.path
        self.patience = patience
        # Not a method of this object, which would never be collected then. Finalizers come there: nothing waits. What
        # may not be freed is kept until the last lease is over.
        undo = partial(server.end, when_idle=self._by_handle)
        self._claim = own(f"what is lent at {server.path}", undo, at_exit=True)

    def holders(self) -> list[HolderInfo]:
        """Return who has a lease: pid and user as the kernel says, the label as they claim.

        Raises
        ------
        ClosedError
            If nothing is lent any more.
        """
        self.handle  # noqa: B018
        return self._server.holders()

    def revoke(self, timeout: float | None = 10.0) -> RevokeInfo:
        """Ask all borrowers for the memory back, and wait until they have let go. Nobody can borrow it from now on.

        They are told through :meth:`Lease.on_revoke`. Nothing is taken from them.

        Parameters
        ----------
        timeout : float or None
            Seconds to wait; None waits for ever.

        Returns
        -------
        RevokeInfo
            Who still holds what; nobody, if all let go.

        Raises
        ------
        ClosedError
            If nothing is lent any more.
        """
        self.handle  # noqa: B018
        seconds = check_seconds(timeout)
        held = () if self._server.revoke(seconds) else tuple(self._server.holders())
        return RevokeInfo(LENT, held, self.nbytes if held else 0)

    def close(self, *, strict: bool = False) -> None:
        """Lend it no longer.

        What travels by descriptor stays with those who borrowed it: it lives as long as they use it. What lives only as
        long as its maker (cudaMalloc memory, pools) is asked back first, for at most :attr:`patience` seconds; whoever
        still holds it then is named in a ReleaseWarning, and the memory is kept for them until they let go or this
        process ends.

        Parameters
        ----------
        strict : bool
            Refuse, and change nothing, while anybody has a lease.

        Raises
        ------
        BusyError
            Only if `strict`, naming the borrowers.
        """
        if self.is_closed:
            return
        if strict and (held := self._server.holders()):
            raise BusyError(f"what is lent at {self.path} is still borrowed", tuple(_who(one) for one in held))
        if self._by_handle:
            self._ask_back()
        super().close()
        if not self._by_handle:
            self._server.join()

    def _ask_back(self) -> None:
        server = self._server
        with contextlib.suppress(ClosedError):  # its thread has ended: then nobody is served
            if not server.revoke(self.patience):
                held = ", ".join(_who(one) for one in server.holders())
                warnings.warn(
                    f"memory lent at {self.path} is still borrowed by {held}, and lives only as long as its maker: it "
                    f"is kept until they let go",
                    ReleaseWarning,
                    stacklevel=3,
                )

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else f"{len(self.manifest.arrays)} arrays, {self.nbytes} bytes"
        return f"<Lending at {self.path}, {state}>"


class _Kept:
    """What must stay as long as anybody holds a lease: let go of when the last reference to it is."""

    def __init__(self, plan: Placement, events: list[Event]) -> None:
        self.plan = plan
        self.events = events

    def let_go(self) -> None:
        """Let go now. Idempotent."""
        for event in self.events:
            with contextlib.suppress(VramError):  # closed already, or a device that is lost
                event.synchronize()  # a stream of a borrower may still wait for it
            event.close()
        self.plan.__exit__(None, None, None)

    def __del__(self) -> None:
        self.let_go()


def lend(
    obj: object,
    *,
    at: str | os.PathLike[str],
    writable: bool = False,
    stream: object = None,
    mode: int = 0o600,
    group: str | None = None,
    meta: Mapping[str, str] | None = None,
    patience: float = 5.0,
) -> Lending:
    """Lend memory to other processes: they borrow it at a path, without a copy and without a keeper.

    Parameters
    ----------
    obj : object, or mapping of str to objects
        What :func:`vram.share` takes. Nothing is copied; the owners are kept as long as it is lent.
    at : str or PathLike
        The path of a unix socket, at most 107 bytes, in a directory that exists; it can be mounted into a container.
    writable : bool
        False: borrowers read. Memory of the host that vram made is then sealed: nobody can write to it any more, this
        process included. On a GPU it is each borrower's mapping that is read-only, which is no security boundary, and
        memory that goes by a 64-byte handle cannot be mapped read-only at all.
    stream : int or stream, optional
        The stream whose work fills the memory: an interprocess event is recorded on it, and borrowers wait for that.
        By default this call waits for all work of the GPUs that the memory is on.
    mode, group : int, str
        Permissions of the socket: who may connect may borrow.
    meta : mapping of str to str, optional
        Up to 4 KiB that borrowers can ask for.
    patience : float
        Seconds that :meth:`Lending.close` waits for borrowers of memory which may not be freed under them.

    Returns
    -------
    Lending
        A context manager.

    Raises
    ------
    UnsupportedError
        If some of the memory cannot be shared as it is, with the reason and the remedy; see :func:`vram.explain`.
    BusyError
        If somebody listens at the path.
    UsageError
        For something that is no array, or a path that cannot be.

    Examples
    --------
    >>> with vram.lend({"weights": tensor}, at="/run/app/weights.sock") as lending:  # doctest: +SKIP
    ...     wait_until_told()
    """
    arrays = obj if isinstance(obj, Mapping) else {_ONE: obj}
    waits = None if stream is None else as_stream(stream)
    seconds = check_seconds(patience)
    if seconds is None:
        raise UsageError("patience is a number of seconds")
    notes = check_meta(as_notes(meta))
    if type(mode) is not int or not 0 <= mode <= 0o777:
        raise UsageError(f"mode {mode!r:.40} is no permissions of a file, such as 0o600")
    server = LenderServer(as_path(at), mode=mode, group=group)
    plan = Placement(arrays, check_flag(writable, "writable"), None, False, lends=True)
    events: list[Event] = []
    kept = _Kept(plan, events)
    sealed = None
    try:
        plan.copy()
        manifest, segments = plan.manifest()
        manifest = _with_events(manifest, plan, waits, events)
        data = encode_manifest(manifest)
        sealed = sealed_copy(data) if len(data) > MAX_MANIFEST else None
        server.start()
        if not writable:
            plan.freeze()  # last, since it cannot be taken back (I4); who connects before has to wait
        server.lend(
            segments,
            plan.descriptors(),
            b"" if sealed else data,
            None if sealed is None else sealed.export(),
            nbytes=plan.nbytes,
            writable=writable,
            meta=notes,
            keeps=kept,
        )
        return Lending(server, manifest, plan.nbytes, seconds)
    except BaseException as error:
        with unwinding(error):
            server.end(when_idle=False)
            kept.let_go()  # now, not once the traceback is gone
        raise
    finally:
        if sealed is not None:
            sealed.close()


def _with_events(manifest: Manifest, plan: Placement, stream: int | None, events: list[Event]) -> Manifest:
    """Order the hand-over after the work that fills the memory (S10): by an event on `stream`, or by waiting here."""
    places = dict.fromkeys(place for place in plan.places() if place != HOST)
    if stream is None or not places:
        plan.synchronize()
        return manifest
    entries: list[EventEntry] = []
    for place in places:  # an event is recorded on streams of its own GPU only
        try:
            event = Event.create(drivers.get(place), place, interprocess=True)
        except OutOfMemoryError:  # interprocess events are scarce
            break
        try:
            event.record(stream)
        except UsageError:
            event.close()
            continue
        events.append(event)
        entries.append(EventEntry(device_name(place), event.export()))
    if not entries:
        plan.synchronize()  # a stated synchronisation where there is no event to be had
        return manifest
    return Manifest(
        manifest.version, manifest.memories, manifest.arrays, manifest.handles, manifest.pools, tuple(entries)
    )


def borrow(
    at: str | os.PathLike[str],
    *,
    access: str = "r",
    timeout: float | None = 5.0,
    device: str | Location | None = None,
    stream: object = None,
) -> Lease:
    """Borrow what another process lends at a path: map its memory into this process, without a copy.

    Parameters
    ----------
    at : str or PathLike
        The path that it is lent at.
    access : {"r", "rw", "cow"}
        As of :func:`vram.attach`; ``"rw"`` if it is lent writable.
    timeout : float or None
        Seconds to wait for somebody to lend there; None waits for ever.
    device : str, optional
        The GPU that will work on memory of a GPU; by default the one that it is on.
    stream : int or stream, optional
        A stream of this process that is to wait for the work which fills the memory, if the lender named its stream.
        By default this call waits.

    Returns
    -------
    Lease
        ``lease.array`` where one object is lent, else a mapping of names to arrays. Closing it gives the memory back;
        :meth:`Lease.on_revoke` tells when its owner wants it.

    Raises
    ------
    WaitTimeoutError
        If nobody lends there in time.
    AccessDeniedError
        If the socket's permissions keep this user out, it is of a user that this one has no reason to trust, or
        writing was asked for and is not allowed.
    PeerGoneError
        If the lender went away meanwhile.
    UnsupportedError
        If the memory is on a GPU that this process does not see, or in this very process.
    """
    check_access(access)
    user = user_of(device)
    waits = None if stream is None else as_stream(stream)
    seconds = check_seconds(timeout)
    path = as_path(at)
    deadline = None if seconds is None else time.monotonic() + seconds
    pause = _FIRST_LOOK
    while True:
        try:
            connection = _connect(path)
        except PeerGoneError as error:
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeoutError(f"nobody lent anything at {path} for {seconds:g} s ({error})") from None
        else:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                attachment = connection.attach(LENT, access=wire_access(access), timeout=left)
                break
            except NotFoundError:
                raise WaitTimeoutError(f"nothing is lent at {path} (any more)") from None
        time.sleep(pause)  # nobody tells when a path comes into being
        pause = min(pause * 1.5, _LAST_LOOK)
    try:
        lease = Lease(connection, attachment, access, user=user, is_lent=True)
        try:
            _wait_for_events(lease, waits)
        except BaseException as error:
            with unwinding(error):
                lease.close()
            raise
    except ProtocolError as error:
        if connection.is_usable:
            raise
        raise connection._fail() from error  # its maker is dead: that is why its handles name nothing
    return lease


_connections: weakref.WeakSet[KeeperClient] = weakref.WeakSet()  # to lenders


def _connect(path: str) -> KeeperClient:
    """Return the connection to a lender: one for each path, as long as anybody lends there."""
    connection = client(path)
    if connection not in _connections:
        for other in list(_connections):
            if not other.is_usable:  # each lender has a path of its own: nobody would ever look at it again
                other._fail()
                _connections.discard(other)
        _connections.add(connection)
    return connection


def _wait_for_events(lease: Lease, stream: int | None) -> None:
    for entry in lease.manifest.events:
        place = location_of(entry.device)
        try:
            event = Event.import_(drivers.get(place), entry.data, place)
        except UsageError:  # this very process lends it
            continue
        with event:
            if stream is None:
                event.synchronize()
                continue
            try:
                event.wait(stream)
            except UsageError:  # a stream of another GPU
                event.synchronize()
                continue
            lease.keep_with_memory(event.handle)  # what is waited for stays until the memory is unmapped


def as_path(at: object) -> str:
    """Return the path of a socket as a string."""
    try:
        path = os.fspath(at)  # type: ignore[call-overload]
    except TypeError:
        path = None
    if not isinstance(path, str) or not path:
        raise UsageError(f"{at!r:.80} is no path of a socket: a str or os.PathLike is")
    return path


def _who(holder: HolderInfo) -> str:
    who = f"pid {holder.pid}" if holder.pid else "a process of another PID namespace"
    return f"{who}, uid {holder.uid}" + (f" ({holder.label})" if holder.label else "")
