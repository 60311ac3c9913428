"""Following a name: its current version, and the next one as soon as it is published.

Each version is attached anew, at other addresses; a lease with ``growing=True`` grows in place instead
(:mod:`.following`). Each follower has one lease of the keeper, and each reader a lease of its own on the same mapping,
which costs no call. A version is given back with the last lease, array or view of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from ..errors import ClosedError, NotFoundError, PeerGoneError, UsageError, VramError
from ..keeper.rules import check_name
from ..lifetime import Owned, own, shielded, waiting
from ..spec import Location, check_timeout
from .attach import user_of
from .followed import FollowedLease, Following, Wanted
from .keepers import TIMEOUT, as_notes, check_flag, check_owner, wait_for_keeper
from .lease import Lease
from .mapped import wire_access
from .questions import asked

if TYPE_CHECKING:
    from ..arrays import Array
    from ..keeper.private import Keeper

_NAP = 1.0  # seconds that a sleep lasts: a signal that comes just before one does not end it


class Follower(Owned):
    """The current version of an entry, whichever that is. Made by :func:`follow`; close it, or use it in ``with``.

    Iterating yields a lease for the version that there is and then for each newer one, waiting for it; versions that
    were replaced before they were asked for are left out. A lease is closed when the next one is asked for; its arrays
    stay valid. Each iteration is its own, in any thread. ``async for`` does the same in an event loop. Both end when
    the follower is closed.
    """

    __slots__ = ("_following", "_wanted")

    @shielded
    def __init__(
        self, wanted: Wanted, lease: FollowedLease, keeper: str | None, on_version: Callable[[Lease], object] | None
    ) -> None:
        self._wanted = wanted
        self._following = following = Following(wanted, lease, keeper, on_version)
        claim = own(f"follower of {wanted.name!r}", following.stop)
        try:
            if on_version is not None:
                following.holder = self
            following.begin()
        except BaseException:
            claim.release()
            raise
        self._claim = claim

    @property
    def name(self) -> str:
        """The name that is followed."""
        return self._wanted.name

    @property
    def version(self) -> int:
        """The number of the version that is current here; it begins anew where another keeper serves.

        Raises
        ------
        NotFoundError, PeerGoneError
            As :meth:`current`.
        """
        return self._lease().version

    @property
    def state(self) -> str:
        """Properties of the version that is current here.

        * ``"current"``: the name stands for it.
        * ``"removed"``: the name stands for nothing; this version stays until it is published again.
        * ``"refused"``: there is a newer one that cannot be taken, see :attr:`refused`; this one stays.
        * ``"lost"``: the keeper is gone; this version stays until another one serves at its path.
        * ``"revoked"``: its owner wanted it back, and it was let go; nothing is here until it is published again.
        * ``"closed"``: the follower was.
        """
        return "closed" if self.is_closed else self._following.now.state

    @property
    def refused(self) -> VramError | None:
        """Why what the name stands for is not here, such as a MismatchError; None if it is."""
        return self._following.now.problem

    @asked
    def is_stale(self) -> bool:
        """Ask whether the name is known to stand for something else than what is here, or for nothing. No call."""
        self.handle  # noqa: B018
        return self._following.now.state != "current"

    def current(self) -> FollowedLease:
        """Return a lease on the version that is current now, which stays on it: for all that has to be of one version.

        It costs no call of the keeper. Give it up by ``with`` or ``close()``, or drop it: as long as there is one, or
        an array or view of that version, its memory stays mapped.

        Raises
        ------
        NotFoundError
            If it was revoked, and nothing was published since.
        PeerGoneError
            If nothing is here, and the keeper is gone.
        ClosedError, ForkedError
            If the follower was closed; in a forked child, whose parent has it.
        """
        return self._lease().again()

    def __getitem__(self, name: str) -> Array:
        return self._lease()[name]

    def __contains__(self, name: object) -> bool:
        return name in self._lease()

    def __iter__(self) -> Iterator[FollowedLease]:
        self.handle  # noqa: B018
        return _Versions(self)

    def __aiter__(self) -> AsyncIterator[FollowedLease]:
        self.handle  # noqa: B018
        from .event_loop import Versions  # asyncio is loaded by who uses it

        return Versions(self)

    @property
    def bells(self) -> deque[Callable[[], object]]:
        """Called to wake those who wait, of threads and of event loops."""
        return self._following.bells

    def _lease(self) -> FollowedLease:
        self.handle  # noqa: B018
        _, lease, _, problem = self._following.now
        if lease is None:
            self.handle  # noqa: B018  (closed meanwhile)
            kind = PeerGoneError if isinstance(problem, PeerGoneError) else NotFoundError
            raise kind(str(problem)) from problem
        return lease

    def newer(self, seen: int) -> tuple[int, FollowedLease | None]:
        """Return the number of the version that is current, and a lease on it if that is another than was seen."""
        self.handle  # noqa: B018
        count, lease, _, _ = self._following.now
        if lease is None or count == seen:
            return seen, None
        return count, lease.again()

    def __repr__(self) -> str:
        lease = None if self.is_closed else self._following.now.lease
        on = "" if lease is None else f", version {lease.version}"
        return f"<Follower of {self.name!r}, {self.state}{on}>"


class _Versions(Iterator[FollowedLease]):
    """The versions of a follower, one after the other."""

    __slots__ = ("_follower", "_given", "_seen")

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._given: FollowedLease | None = None
        self._seen = 0

    @shielded
    def __next__(self) -> FollowedLease:
        follower, given = self._follower, self._given
        if given is not None:
            given.close()  # the variable of a loop has it, and would keep its memory while this waits
        while not follower.is_closed:
            bell = threading.Lock()
            bell.acquire()
            follower.bells.append(bell.release)  # before the look: what comes in between rings it
            try:
                self._seen, self._given = follower.newer(self._seen)
                if self._given is not None:
                    return self._given
                waiting(bell.acquire, True, _NAP)
            except ClosedError:
                if not follower.is_closed:  # in a forked child
                    raise
            finally:
                with contextlib.suppress(ValueError):
                    follower.bells.remove(bell.release)
        raise StopIteration


@shielded
def follow(
    name: str,
    *,
    on_version: Callable[[Lease], object] | None = None,
    access: str = "r",
    expect: Mapping[str, str] | None = None,
    same_arrays: bool = False,
    timeout: float | None = TIMEOUT,
    device: str | Location | None = None,
    owner: int | str | None = None,
    wake: bool = False,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Follower:
    """Attach a published entry, and each newer version of it as soon as it is published.

    The newer version is mapped by a thread of the library, and then takes the place of the older one, which is given
    back when nobody uses it any more: no lease, array or view of it is left. So a reader may be on a version that is a
    little old, and never on memory that was freed.

    A removed entry stays here until it is published again; a revoked one (:func:`revoke`) is let go. If the keeper
    goes away, the version that is here stays, until another one serves at its path and has the name.
    :attr:`Follower.state` says which of these it is.

    This follows the name, from memory to memory. For memory that grows in place, with readers whose addresses must not
    change, see `growing` of :func:`attach`.

    Parameters
    ----------
    name : str
        The name it is published under.
    on_version : callable, optional
        Called with a lease for the first version and each newer one, from a thread of the library named ``vram:
        following``: one for all followers of the process, which wait for it as long as it takes. An exception of it
        goes to :func:`threading.excepthook`. The follower goes on then until it is closed, also if nothing refers to
        it.
    access : {"r", "rw", "cow"}
        As of :func:`attach`.
    expect : mapping of str to str, optional
        Values that the `meta` of each version must have. A newer one that says something else is not taken, and the one
        before stays: see :attr:`Follower.refused`.
    same_arrays : bool
        Treat a newer version in the same way unless its arrays have the same names, types and shapes as before.
    timeout : float or None
        Seconds to wait for a keeper, and for the first version; 0 does not wait, None waits for ever.
    device : str, optional
        As of :func:`attach`.
    owner : int or str, optional
        The user whom each version must belong to; see :func:`attach`.
    wake : bool
        Bring back what is parked; see :func:`attach`. Without it the version before stays while the newer is parked.
    keeper : Keeper, str or PathLike, optional
        The keeper to ask; see :func:`attach`.

    Returns
    -------
    Follower
        A context manager: ``model["w"]`` is of the version that is current, ``model.current()`` a lease on it, and
        ``for lease in model`` waits for each newer one.

    Raises
    ------
    UsageError
        For what cannot be, as :func:`attach`.
    NotFoundError, WaitTimeoutError
        If nothing was published, or not within `timeout`.
    PeerGoneError
        If there is no keeper, or none came within `timeout`, or it went away before the first version was here.
    MismatchError, AccessDeniedError, AsleepError, QuotaError, UnsupportedError
        As :func:`attach`, of the first version; of later ones see :attr:`Follower.refused`.

    Examples
    --------
    >>> with vram.follow("policy") as model:
    ...     print(model["w"].numpy().sum())
    """
    wanted = as_wanted(name, access, expect, same_arrays, device, owner, wake, on_version)
    client, left = wait_for_keeper(keeper, check_timeout(timeout))
    if client.lends:
        raise UsageError(f"a process lends at {client.path}, and lends one version: borrow it with vram.borrow")
    where = None if keeper is None else client.path
    attachment = client.attach(wanted.name, timeout=left, **wanted.asked)
    return Follower(wanted, wanted.mapped(client, attachment, left, FollowedLease), where, on_version)


def as_wanted(
    name: str, access: str, expect: Mapping[str, str] | None, same_arrays: bool, device: str | Location | None,
    owner: int | str | None, wake: bool, on_version: object = None,
) -> Wanted:  # fmt: skip
    """Check what :func:`follow` was given."""
    asked = {
        "access": wire_access(access),
        "expect": as_notes(expect, what="expect") or None,
        "owner": check_owner(owner),
        "purpose": "wake" if check_flag(wake, "wake") else "",
    }
    if on_version is not None and not callable(on_version):
        raise UsageError(f"on_version {on_version!r:.80} cannot be called; it takes the lease")
    return Wanted(check_name(name), access, asked, user_of(device), check_flag(same_arrays, "same_arrays"))
