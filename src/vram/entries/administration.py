"""Ask a keeper what it holds; remove and revoke entries."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ..errors import AsleepError, NotFoundError, ProtocolError, QuotaError
from ..keeper.client import KeeperClient
from ..keeper.rules import check_version
from ..lifetime import shielded
from ..open_files import close_fds
from ..spec import check_timeout
from .keepers import TIMEOUT, connect
from .manifests import read_manifest

if TYPE_CHECKING:
    from ..keeper.private import Keeper
    from ..keeper.reports import EntryInfo, HolderInfo, RevokeInfo, StatisticsInfo, UserInfo
    from ..sharing.descriptor import Manifest


def list_entries(prefix: str = "", *, keeper: Keeper | str | os.PathLike[str] | None = None) -> list[EntryInfo]:
    """Return what is published under names that begin with `prefix`, sorted by name.

    Parameters
    ----------
    prefix : str
        A prefix of the names; by default all of them.
    keeper : Keeper, str or PathLike, optional
        The keeper to ask; see :func:`vram.attach`.

    Raises
    ------
    PeerGoneError
        If there is no keeper.
    """
    from ..keeper.reports import Listing

    return Listing(connect(keeper).list(prefix))


def entry(name: str, *, keeper: Keeper | str | os.PathLike[str] | None = None) -> EntryInfo:
    """Describe one entry: its versions with their sizes, its `meta`, owner, holders, and the arrays in it.

    The keeper does not know the arrays: for those the current version is leased for a moment, which maps nothing of
    its memory. Of one that is parked (:func:`vram.park`) they are not read.

    Parameters
    ----------
    name : str
        The name it was published under.
    keeper : Keeper, str or PathLike, optional
        The keeper to ask; see :func:`vram.attach`.

    Raises
    ------
    NotFoundError
        If there is no such entry.
    PeerGoneError
        If there is no keeper.
    """
    return described(name, keeper=keeper)[0]


@shielded
def described(name: str, *, keeper: Keeper | str | os.PathLike[str] | None = None) -> tuple[EntryInfo, Manifest | None]:
    """Return what :func:`entry` returns, and the manifest of the current version, if that is known."""
    from ..keeper.reports import ArrayInfo  # who only attaches does not ask

    client = connect(keeper)
    shown = client.show(name)
    manifest = _manifest(client, name, shown.version) if shown.version else None
    if manifest is None:
        return shown, None
    arrays = [ArrayInfo(called, one.dtype, one.shape, one.nbytes) for called, one in manifest.arrays.items()]
    return replace(shown, arrays=tuple(arrays)), manifest


def _manifest(client: KeeperClient, name: str, version: int) -> Manifest | None:
    """Read what is in a version; None if it is gone by now, or what describes it cannot be read."""
    try:
        lease = client.attach(name, version=version)
        try:
            return read_manifest(client, lease)
        finally:
            close_fds(lease.fds)
            client.release([lease.lease_id])
    except (AsleepError, NotFoundError, ProtocolError, QuotaError):  # of many leases of ours, in the last case
        return None


@shielded
def remove(name: str, *, version: int | None = None, keeper: Keeper | str | os.PathLike[str] | None = None) -> None:
    """Retire an entry, or one version of it. Its memory is freed with the last lease.

    Parameters
    ----------
    name : str
        The entry.
    version : int, optional
        Only this one; by default all that somebody may attach.
    keeper : Keeper, str or PathLike, optional
        The keeper to ask; see :func:`vram.attach`.

    Raises
    ------
    NotFoundError
        If there is no such entry or version.
    AccessDeniedError
        If it belongs to another user, unless this one runs the keeper.
    PeerGoneError
        If there is no keeper.
    """
    check_version(version)
    connect(keeper).remove(name, version)


@shielded
def revoke(
    name: str,
    *,
    version: int | None = None,
    timeout: float | None = TIMEOUT,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> RevokeInfo:
    """Ask everybody who reads an entry to let go, retire it, and wait until nobody holds it any more.

    Readers hear of it through :meth:`Lease.on_revoke`, :meth:`Lease.is_revoked` and :meth:`Lease.fileno`. They decide
    for themselves: nothing is ever closed under them. Their mappings stay valid, on the host and on a GPU,
    because an open descriptor keeps the memory; it is freed when the last of them lets go, or ends.

    Parameters
    ----------
    name : str
        The entry: all its versions that somebody may attach or still holds, those that were removed before included.
    version : int, optional
        Only this one.
    timeout : float or None
        Seconds to wait for the readers; 0 only asks them, None waits for ever.
    keeper : Keeper, str or PathLike, optional
        The keeper to ask; see :func:`vram.attach`.

    Returns
    -------
    RevokeInfo
        The `holders` that are left when the time is over; nobody, if all let go. At most 1,000 leases are named;
        `more` is how many there are besides. May be called again.

    Raises
    ------
    NotFoundError
        If there is no such entry or version, and nobody holds one.
    AccessDeniedError
        If it belongs to another user, unless this one runs the keeper.
    PeerGoneError
        If there is no keeper, or it ends while this waits: its leases are over, what is mapped stays with its readers.
    """
    check_version(version)
    return connect(keeper).revoke(name, version, timeout=check_timeout(timeout))


def holders(prefix: str = "", *, keeper: Keeper | str | os.PathLike[str] | None = None) -> list[HolderInfo]:
    """Return who holds what under names that begin with `prefix`, by name, version and age.

    That is everybody with a lease, also on versions that are not in the catalogue any more.

    Parameters
    ----------
    prefix : str
        A prefix of the names; by default all of them.
    keeper : Keeper, str or PathLike, optional
        The keeper to ask; see :func:`vram.attach`.

    Raises
    ------
    PeerGoneError
        If there is no keeper.
    """
    from ..keeper.reports import Listing

    return Listing(connect(keeper).holders(prefix))


def statistics(*, keeper: Keeper | str | os.PathLike[str] | None = None) -> StatisticsInfo:
    """Return the keeper's counts: entries, bytes, leases, connections; and what this process could not take back.

    Parameters
    ----------
    keeper : Keeper, str or PathLike, optional
        The keeper to ask; see :func:`vram.attach`.

    Raises
    ------
    PeerGoneError
        If there is no keeper.
    """
    return connect(keeper).statistics()


def users(*, keeper: Keeper | str | os.PathLike[str] | None = None) -> list[UserInfo]:
    """Return the usage of each user, as it counts against that user's ceilings, the most bytes first.
    A keeper lists a hundred users and sums up the others."""
    return list(connect(keeper).measure().users)


def usage(keeper: str | os.PathLike[str] | None = None) -> tuple[list[UserInfo], StatisticsInfo]:
    """Return :func:`users` and :func:`statistics`, one after the other. Raises PeerGoneError without a keeper."""
    return users(keeper=keeper), statistics(keeper=keeper)
