"""Borrow what another process lends: its memory, mapped into this one under a lease of its own."""

from __future__ import annotations

import os
import time
import weakref
from typing import TYPE_CHECKING

from ..arrays.streams import as_stream
from ..errors import AccessDeniedError, NotFoundError, PeerGoneError, ProtocolError, UsageError, WaitTimeoutError
from ..keeper.client import KeeperClient, client, leave_client
from ..keeper.failures import no_lender
from ..keeper.rules import LENT
from ..lifetime import shielded, waiting
from ..spec import Location, check_timeout
from .attach import user_of
from .keepers import FIRST_LOOK, LAST_LOOK, TIMEOUT, for_greeting
from .lease import Lease
from .mapped import wire_access

if TYPE_CHECKING:
    from ..arrays.hints import StreamLike

_connections: weakref.WeakSet[KeeperClient] = weakref.WeakSet()  # to lenders


@shielded
def borrow(
    at: str | os.PathLike[str],
    *,
    access: str = "r",
    timeout: float | None = TIMEOUT,
    device: str | Location | None = None,
    stream: StreamLike | None = None,
) -> Lease:
    """Borrow what another process lends at a path: map its memory into this process, without a copy.

    Parameters
    ----------
    at : str or PathLike
        The path that it is lent at.
    access : {"r", "rw", "cow"}
        As of :func:`vram.attach`; ``"rw"`` if it is lent writable.
    timeout : float or None
        Seconds to wait for somebody to lend there; 0 looks once, None waits for ever. Work of the lender's stream is
        waited for besides, as long as it takes.
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
        If the socket's permissions keep this user out, it is of a user that this one has no reason to trust, it is a
        keeper's, or writing was asked for and is not allowed.
    PeerGoneError
        If the lender went away meanwhile.
    UnsupportedError
        If the memory is on a GPU that this process does not see, is memory of ``cudaMalloc`` or of a pool of this very
        process, or cannot be mapped as `access` or `device` says.
    ProtocolError
        If what was lent is not what the lender says it is.
    UsageError
        For a path, access or stream that cannot be.
    """
    shared = wire_access(access)
    user = user_of(device)
    waits = None if stream is None else as_stream(stream)
    seconds = check_timeout(timeout)
    path = as_path(at)
    begin = time.monotonic()
    deadline = None if seconds is None else begin + seconds
    pause, has_gone = FIRST_LOOK, False
    while True:
        try:
            connection, is_new = _connect(path, for_greeting(seconds, begin))
        except PeerGoneError as error:
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeoutError(f"nobody lent anything at {path} for {seconds:g} s") from error
        else:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                attachment = connection.attach(LENT, access=shared, timeout=left)
                break
            except NotFoundError:
                leave_client(connection)  # somebody else may lend at this path by now
                if deadline is not None and time.monotonic() >= deadline:
                    raise WaitTimeoutError(f"nothing is lent at {path} any more: it was asked back") from None
            except PeerGoneError:
                # The lender before has gone since it was looked at; somebody else may lend at this path by now.
                if is_new or connection.is_usable:  # one that is there says so itself
                    raise
                if not has_gone:
                    has_gone = True
                    continue
                if deadline is not None and time.monotonic() >= deadline:
                    raise
            except WaitTimeoutError as error:
                raise WaitTimeoutError(f"who lends at {path} handed nothing over in {seconds:g} s: {error}") from None
            except AccessDeniedError:
                raise AccessDeniedError(
                    f'what is lent at {path} may only be read: borrow it with access="r", or lend it with writable=True'
                ) from None
        waiting(time.sleep, pause)  # nobody tells when a path comes into being
        pause = min(pause * 1.5, LAST_LOOK)
    try:
        return Lease(connection, attachment, access, user=user, stream=waits)
    except ProtocolError as error:
        if connection.is_usable:
            raise
        raise connection._fail() from error  # its maker is dead: that is why its handles name nothing


def _connect(path: str, timeout: float) -> tuple[KeeperClient, bool]:
    """Return the connection to a lender, one for each path as long as anybody lends there, and whether it is new."""
    connection = client(path, timeout=timeout)
    if not connection.lends:
        raise no_lender(path)
    is_new = connection not in _connections
    if is_new:
        for other in list(_connections):
            if not other.is_usable:  # each lender has a path of its own: nobody would ever look at it again
                other._fail()
                _connections.discard(other)
        _connections.add(connection)
    return connection, is_new


def as_path(at: object) -> str:
    """Return the path of a socket as a string."""
    try:
        path = os.fspath(at)  # type: ignore[call-overload]
    except TypeError:
        path = None
    if not isinstance(path, str) or not path:
        raise UsageError(f"{at!r:.80} is no path of a socket: a str or os.PathLike is")
    return path
