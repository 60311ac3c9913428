"""Ask a keeper what it holds."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..arrays.numpy_on_use import np
from ..errors import CapacityError, ClosedError, NotFoundError, PeerGoneError, ProtocolError, UsageError
from ..keeper.client import KeeperClient, client
from ..keeper.conversation import CONNECT_SECONDS
from ..sharing.channel import close_fds
from .mapping import read_manifest

if TYPE_CHECKING:
    from ..keeper.reports import ArrayInfo, EntryInfo, HolderInfo, RevokeInfo, StatisticsInfo
    from ..keeper.session import Keeper

__all__ = [
    "as_notes",
    "check_flag",
    "check_flags",
    "check_owner",
    "check_version",
    "connect",
    "for_greeting",
    "holders",
    "list_entries",
    "remove",
    "revoke",
    "show",
    "statistics",
    "wait_for_keeper",
]

_FIRST_LOOK, _LAST_LOOK = 0.001, 0.05  # seconds between two looks for a keeper that is not there yet
# Seconds in which a keeper that listens has to greet, where nobody waits for anything: it may be busy.
_ASKED_ONCE = 2.0
_LEAST = 0.001  # seconds that are left for the name, however long the keeper was waited for
_QUIETLY = 3.0  # seconds to wait for one without a word, where nobody set an end


def connect(keeper: Keeper | str | os.PathLike[str] | None) -> KeeperClient:
    """Return this process's connection to a keeper, made on first use.

    Raises
    ------
    PeerGoneError
        If there is none.
    AccessDeniedError, ProtocolError
        If what listens there is not to be trusted, or no keeper.
    ClosedError
        If `keeper` is a Keeper that was closed.
    """
    path, label = _where(keeper)
    return client(path, label=label)


def wait_for_keeper(
    keeper: Keeper | str | os.PathLike[str] | None, timeout: float | None
) -> tuple[KeeperClient, float | None]:
    """Return this process's connection to a keeper, as soon as there is one, and the seconds that are left.

    The one rule of all verbs that wait for something a keeper has: the keeper is waited for as that is, and the time
    is spent once.

    Parameters
    ----------
    timeout : float or None
        Seconds to wait for a keeper to listen, and to greet; None waits for ever for one to listen, and warns of that
        after 3 s. 0 does not wait for one to listen, and gives one that does 2 s to greet. None of them has more than
        5 s for the greeting.

    Raises
    ------
    PeerGoneError
        If none came in time.
    WaitTimeoutError
        If who listens there did not greet in time.
    AccessDeniedError, ProtocolError
        As :func:`connect`, at once: whoever listens there stays who they are.
    """
    path, label = _where(keeper)
    begin = time.monotonic()
    pause, warned = _FIRST_LOOK, False
    while True:
        try:
            found = client(path, label=label, timeout=for_greeting(timeout, begin))
        except PeerGoneError as error:
            waited = time.monotonic() - begin
            if timeout is not None and waited >= timeout:
                if not timeout:
                    raise
                raise PeerGoneError(f"{error} (none was there for {timeout:g} s)") from None
            if timeout is None and waited >= _QUIETLY and not warned:
                warned = True
                warnings.warn(f"{error}; waiting for it for ever (timeout=None)", RuntimeWarning, stacklevel=3)
        else:
            # Never 0 for somebody who waits: that would be to ask without waiting, which is refused in other words.
            left = timeout and max(min(timeout, _LEAST), timeout - (time.monotonic() - begin))
            return found, left
        # Nobody tells when a path comes into being.
        time.sleep(pause if timeout is None else min(pause, max(0.0, timeout - waited)))
        pause = min(pause * 1.5, _LAST_LOOK)


def for_greeting(timeout: float | None, begin: float) -> float:
    """Return the seconds that a new connection may take to be greeted, of those that a caller has since `begin`."""
    if timeout is None:
        return CONNECT_SECONDS
    if not timeout:
        return _ASKED_ONCE
    return min(CONNECT_SECONDS, max(_LEAST, timeout - (time.monotonic() - begin)))


def _where(keeper: Keeper | str | os.PathLike[str] | None) -> tuple[str | None, str]:
    """Return the path of a keeper, if one was named, and what this process calls itself there, if it chose that."""
    if keeper is None or isinstance(keeper, (str, os.PathLike)):
        return None if keeper is None else os.fspath(keeper), ""
    from ..keeper.session import Keeper  # what starts processes: needed only by who has started one with it

    if isinstance(keeper, Keeper):
        if keeper.is_closed:
            raise ClosedError(f"the keeper at {keeper.path} was closed here; start another, or name one that runs")
        if not isinstance(keeper.path, (str, os.PathLike)) or not isinstance(keeper.label, str):
            raise UsageError(f"a Keeper's path and label are strings, not {keeper.path!r:.80} and {keeper.label!r:.80}")
        return os.fspath(keeper.path), keeper.label
    raise UsageError(f"keeper must be a socket path or what vram.keeper() gave, not {keeper!r:.80}")


def as_notes(meta: object, *, what: str = "meta") -> dict[str, str]:
    """Return what was given as `meta` or `expect` as a dictionary of its own; the keeper's rules check the rest.

    Raises
    ------
    UsageError
        If it is no mapping.
    """
    if meta is None:
        return {}
    if not isinstance(meta, Mapping):
        raise UsageError(f'{what} must be a mapping such as {{"config": "sha256:..."}}, not {meta!r:.80}')
    return dict(meta)


def check_version(version: object) -> None:
    """Raise :class:`UsageError` unless `version` is None or may be a version's number."""
    if version is not None and (type(version) is not int or not 0 < version < 2**53):
        raise UsageError(f"version {version!r:.40} is not the number of a version: they count from 1")


def check_owner(owner: object) -> int | None:
    """Return the uid of a user who was given by name or uid; None for anybody.

    Raises
    ------
    UsageError
        If there is no such user, or that is none.
    """
    if owner is None:
        return None
    if isinstance(owner, str):
        import pwd  # few ask, and it is not there on every system

        try:
            return pwd.getpwnam(owner).pw_uid
        except (KeyError, ValueError):
            raise UsageError(f"owner {owner!r:.80} is no user of this system; a uid may be given as well") from None
    if type(owner) is not int or not 0 <= owner < 2**32 - 1:
        raise UsageError(f"owner must be the name of a user or a uid, not {owner!r:.80}")
    return owner


def check_flags(**given: object) -> list[bool]:
    """Return choices between two, by their names: see :func:`check_flag`."""
    return [value if isinstance(value, bool) else check_flag(value, what) for what, value in given.items()]


def check_flag(value: object, what: str) -> bool:
    """Return a choice between two. Raises :class:`UsageError` for anything but True or False, numpy's included."""
    if isinstance(value, bool) or isinstance(value, np.bool_):  # noqa: SIM101  (numpy is loaded for what is neither)
        return bool(value)
    raise UsageError(f"{what} must be True or False, not {value!r:.40}")


def list_entries(
    prefix: str = "", *, keeper: Keeper | str | None = None, most_meta: int | None = None
) -> list[EntryInfo]:
    """Return what is published under names that begin with `prefix`, sorted by name.

    Parameters
    ----------
    most_meta : int, optional
        Bytes of `meta` that an entry may come with; one that says more comes without, which is quicker where there are
        many. By default everything comes.

    Raises
    ------
    UsageError
        If `most_meta` is no number of bytes.
    """
    if most_meta is not None and (type(most_meta) is not int or most_meta < 0):
        raise UsageError(f"most_meta must be a number of bytes, 0 or more, or None for all, not {most_meta!r:.40}")
    return connect(keeper).list(prefix, most_meta=most_meta)


def show(name: str, *, keeper: Keeper | str | None = None) -> EntryInfo:
    """Describe one entry: its versions with their sizes, its `meta`, owner, holders, and the arrays in it.

    The keeper does not know the arrays: for those the current version is leased for a moment, which maps nothing of
    its memory.

    Raises
    ------
    NotFoundError
        If there is no such entry.
    """
    client = connect(keeper)
    shown = client.show(name)
    return dataclasses.replace(shown, arrays=_arrays(client, name, shown.version)) if shown.version else shown


def _arrays(client: KeeperClient, name: str, version: int) -> tuple[ArrayInfo, ...] | None:
    """Read what is in a version; None if it is gone by now, or what describes it cannot be read."""
    from ..keeper.reports import ArrayInfo  # who only attaches does not ask

    try:
        lease = client.lease(name, version=version)  # given back when its answer is dropped, whatever comes
        try:
            manifest = read_manifest(lease)
        finally:
            close_fds(lease.fds)
            client.release([lease.lease_id])
            if lease.answer is not None:
                lease.answer.owner = None
    except (NotFoundError, ProtocolError, CapacityError):  # of many leases of ours, in the last case
        return None
    return tuple(ArrayInfo(called, entry.dtype, entry.shape, entry.nbytes) for called, entry in manifest.arrays.items())


def remove(name: str, *, version: int | None = None, keeper: Keeper | str | None = None) -> None:
    """Retire an entry, or one version of it. Its memory is freed with the last lease.

    Raises
    ------
    NotFoundError
        If there is no such entry or version.
    AccessDeniedError
        If it belongs to another user, unless this one runs the keeper.
    """
    check_version(version)
    connect(keeper).remove(name, version)


def revoke(
    name: str,
    *,
    version: int | None = None,
    timeout: float | None = 10.0,
    force: bool = False,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> RevokeInfo:
    """Ask everybody who reads an entry to let go, retire it, and wait until nobody holds it any more.

    Readers hear of it through :meth:`Lease.on_revoke`, :attr:`Lease.revoked` and :meth:`Lease.fileno`, and decide for
    themselves: nothing is ever closed under them. What they have mapped stays valid, on the host and on a GPU, because
    an open descriptor keeps the memory; it is freed when the last of them lets go, or ends.

    Parameters
    ----------
    name : str
        The entry: all its versions that somebody may attach or still holds, those that were removed before included.
    version : int, optional
        Only this one.
    timeout : float or None
        Seconds to wait for the readers; 0 only asks them, None waits for ever.
    force : bool
        End the leases of those who have not let go by then, so that the keeper does not count that memory any more; for
        the user who runs the keeper alone. Their connections end, and with them all their leases from this keeper,
        which are stale from then on. What they have mapped stays mapped, and the kernel keeps its memory until they
        close it or end. A call that waits for the keeper then, and :meth:`Lease.fileno` and :meth:`Lease.on_revoke` of
        such a lease, raise `PeerGoneError`, which says why; other calls connect anew. The connection of the process
        that uses force stays.

    Returns
    -------
    RevokeInfo
        The `holders` that are left when the time is over; nobody, if all let go. With `force`, those whose leases were
        ended are in `forced`. May be called again.

    Raises
    ------
    NotFoundError
        If there is no such entry or version, and nobody holds one.
    AccessDeniedError
        If it belongs to another user, unless this one runs the keeper. With `force`, also if it is this user's own,
        unless this one runs the keeper.
    UnsupportedError
        If the keeper is older than `force`.
    PeerGoneError
        If there is no keeper, or it ends while this waits: its leases are over, what is mapped stays with its readers.
    """
    check_version(version)
    by_force = check_flag(force, "force")
    return connect(keeper).revoke(name, version, timeout=check_seconds(timeout), force=by_force)


def holders(prefix: str = "", *, keeper: Keeper | str | os.PathLike[str] | None = None) -> list[HolderInfo]:
    """Return who holds what under names that begin with `prefix`, by name, version and age.

    That is everybody with a lease, also on versions that are not in the catalogue any more.

    Raises
    ------
    PeerGoneError
        If there is no keeper.
    """
    return list(connect(keeper).holders(prefix))


def statistics(*, keeper: Keeper | str | None = None) -> StatisticsInfo:
    """Return the keeper's counts: entries, bytes, leases, connections; and what this process could not take back."""
    return connect(keeper).statistics()


def check_seconds(timeout: object) -> float | None:
    """Return what a caller is willing to wait, in seconds; None is for ever."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise UsageError(f"timeout {timeout!r:.40} is not a number of seconds, or None for ever")
    return float(timeout)
