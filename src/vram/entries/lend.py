"""Directly between two processes, no keeper: one lends what it has, any number :func:`borrow` it, a lease each."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from .. import driver as drivers
from ..arrays.streams import as_stream
from ..errors import BusyError, ClosedError, OutOfMemoryError, ReleaseWarning, UsageError, VramError
from ..keeper.reports import HolderInfo, RevokeInfo
from ..keeper.rules import LENT, MAX_MANIFEST, check_meta
from ..lifetime import Owned, own, shielded, unwinding
from ..memory import Event
from ..sharing.descriptor import EventEntry, Manifest, encode_manifest
from ..sharing.mapping import device_name
from ..spec import HOST, Location, check_timeout, format_count
from .borrow import as_path
from .keepers import TIMEOUT, as_notes, check_flag
from .manifests import sealed_copy
from .placement import Placement

if TYPE_CHECKING:
    from ..arrays.hints import ArrayLike, StreamLike
    from ..keeper.lend_server import LendServer

_ONE = "array"  # what the array is called where one object is lent


class Lending(Owned):
    """Arrays lent at a path, until it is closed. Made by :func:`lend`.

    Attributes
    ----------
    path : str
        Where it can be borrowed.
    nbytes : int
        Bytes of the arrays that are lent.
    close_timeout : float or None
        Seconds that :meth:`close` waits for borrowers of memory which may not be freed under them; None for ever.
    """

    __slots__ = ("_by_handle", "_manifest", "_server", "close_timeout", "nbytes", "path")

    _warn_on_leak = True

    def __init__(self, server: LendServer, manifest: Manifest, nbytes: int, close_timeout: float | None) -> None:
        self._server = server
        self.nbytes = nbytes
        self._by_handle = bool(manifest.handles)
        self._manifest = manifest
        self.path = server.path
        self.close_timeout = close_timeout
        # Not a method of this object, which would never be collected then. Finalizers come there: nothing waits. Memory
        # that may not be freed is kept until the last lease is over.
        undo = partial(server.end, when_idle=self._by_handle)
        self._claim = own(f"what is lent at {server.path}", undo, at_exit=True)

    @shielded
    def holders(self) -> list[HolderInfo]:
        """Return who has a lease: pid and user as the kernel says, the label as they claim.

        Raises
        ------
        ClosedError
            If nothing is lent any more.
        """
        self.handle  # noqa: B018
        return self._server.holders()

    @shielded
    def revoke(self, *, timeout: float | None = TIMEOUT) -> RevokeInfo:
        """Ask all borrowers for the memory back, and wait until they have let go. Nobody can borrow it from now on.

        They are told through :meth:`Lease.on_revoke`. Nothing is taken from them.

        Parameters
        ----------
        timeout : float or None
            Seconds to wait; 0 only asks them, None waits for ever.

        Returns
        -------
        RevokeInfo
            The remaining holders; empty if all let go.

        Raises
        ------
        ClosedError
            If nothing is lent any more.
        """
        self.handle  # noqa: B018
        seconds = check_timeout(timeout)
        held = () if self._server.revoke(seconds) else tuple(self._server.holders())
        return RevokeInfo(LENT, held, self.nbytes if held else 0)

    @shielded
    def close(self, *, strict: bool = False) -> None:
        """Lend it no longer.

        Memory that travels by descriptor stays with its borrowers: it lives as long as they use it. Memory that lives
        only as long as its maker (cudaMalloc memory, pools) is asked back first, for at most :attr:`close_timeout`
        seconds; whoever still holds it then is named in a ReleaseWarning, and the memory is kept for them until they
        let go or this process ends.

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
        if strict and (leases := self._leases()):
            raise BusyError(f"what is lent at {self.path} is still borrowed", tuple(map(str, leases)))
        held = self._ask_back() if self._by_handle else ""
        super().close()
        if not held:
            self._server.join()  # whoever lends at this path next is not taken for this one
            return
        warnings.warn(  # last: where warnings are errors it is closed all the same
            f"memory lent at {self.path} is still borrowed by {held}, and lives only as long as its maker: it is kept "
            f"until they let go",
            ReleaseWarning,
            stacklevel=2,
        )

    def _ask_back(self) -> str:
        """Ask for what lives only as long as its maker; return who still holds it."""
        with contextlib.suppress(ClosedError):  # as below
            if not self._server.revoke(self.close_timeout):
                return ", ".join(map(str, self._leases()))
        return ""

    def _leases(self) -> list[HolderInfo]:
        with contextlib.suppress(ClosedError):  # its thread has ended, or is the parent's: then nobody is served
            return self._server.holders()
        return []

    def __repr__(self) -> str:
        count = format_count(len(self._manifest.arrays), "array")
        state = "closed" if self.is_closed else f"{count}, {self.nbytes} bytes"
        return f"<Lending at {self.path}, {state}>"


class _LendOwner:
    """The objects that must stay as long as anybody holds a lease: let go of when the last reference to it is."""

    def __init__(self, plan: Placement, events: list[Event]) -> None:
        self.plan = plan
        self.events = events

    def release(self) -> None:
        """Let go now. Idempotent."""
        for event in self.events:
            with contextlib.suppress(VramError):  # closed already, or a device that is lost
                event.synchronize()  # a stream of a borrower may still wait for it
            event.close()
        self.plan.__exit__(None, None, None)

    def __del__(self) -> None:
        self.release()


@shielded
def lend(
    obj: ArrayLike | tuple[int, int | str, str | Location] | Mapping[str, ArrayLike],
    *,
    at: str | os.PathLike[str],
    writable: bool = False,
    stream: StreamLike | None = None,
    mode: int = 0o600,
    group: str | None = None,
    meta: Mapping[str, str] | None = None,
    close_timeout: float | None = TIMEOUT,
) -> Lending:
    """Lend memory to other processes: they borrow it at a path, without a copy and without a keeper.

    Parameters
    ----------
    obj : object, or mapping of str to objects
        Objects as :func:`vram.share` takes them. Nothing is copied; the owners are kept as long as it is lent. Memory
        goes as whole allocations: who may connect can read all of them, such as the rest of the array that a slice is
        of.
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
    close_timeout : float or None
        Seconds that :meth:`Lending.close` waits for borrowers of memory which may not be freed under them; 0 only asks
        them, None waits for ever.

    Returns
    -------
    Lending
        A context manager.

    Raises
    ------
    UnsupportedError
        If some of the memory cannot be shared as it is, with the reason and the remedy; see :func:`vram.explain`.
    BusyError
        If somebody listens at the path; or if memory of the host is lent read-only, and something else can write to it.
    UsageError
        For something that is no array, or a path that cannot be.

    Examples
    --------
    >>> with vram.lend({"weights": tensor}, at="/run/app/weights.sock") as lending:  # doctest: +SKIP
    ...     wait_until_told()
    """
    from ..keeper.lend_server import LendServer  # a server, with asyncio: not for those who only name the class

    arrays = obj if isinstance(obj, Mapping) else {_ONE: obj}
    waits = None if stream is None else as_stream(stream)
    seconds = check_timeout(close_timeout, "close_timeout")
    notes = check_meta(as_notes(meta))
    if type(mode) is not int or not 0 <= mode <= 0o777:
        raise UsageError(f"mode {mode!r:.40} is no permissions of a file, such as 0o600")
    if group is not None and not isinstance(group, str):
        raise UsageError(f"group {group!r:.40} is no name or number of a group, as text")
    server = LendServer(as_path(at), mode=mode, group=group)
    plan = Placement(arrays, check_flag(writable, "writable"), None, False, lends=True)
    events: list[Event] = []
    kept = _LendOwner(plan, events)
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
            server.join()  # whoever lends at this path next is not taken for this one
            kept.release()  # now, not once the traceback is gone
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
