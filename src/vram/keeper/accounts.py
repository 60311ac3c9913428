"""How much is kept, by everybody together and by each user, and how much there may be."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakValueDictionary

from ..errors import CapacityError
from ..spec import format_count, format_size
from .records import Session, Tally, Version

__all__ = ["Accounts", "Quotas", "Usage"]

# Of one user who is not the keeper's: what is on the keeper's books only, and bounded by no other quota.
MOST = Tally(leases=65_536, waiters=4_096, claims=4_096, watches=16_384)


@dataclass(frozen=True, slots=True)
class Quotas:
    """Ceilings; None is none. The second three are for each user, the keeper's own excepted."""

    max_bytes: int | None = None
    max_entries: int | None = None
    max_handles: int | None = None
    user_bytes: int | None = None
    user_entries: int | None = None
    user_handles: int | None = None


@dataclass(slots=True, eq=False)
class Usage:
    """Bytes, entries and descriptors in use."""

    nbytes: int = 0
    entries: int = 0
    handles: int = 0

    def add(self, nbytes: int, entries: int, handles: int) -> None:
        """Add what came, or went where the numbers are negative."""
        self.nbytes += nbytes
        self.entries += entries
        self.handles += handles


def _written(number: int, what: str) -> str:
    if what == "byte":
        return format_size(number)
    return format_count(number, what, "entries" if what == "entry" else "")


class Accounts:
    """The sums, kept as things come and go.

    Parameters
    ----------
    quotas : Quotas
        The ceilings.
    keeper_uid : int
        The user whom the ceilings for each user do not bind.
    """

    def __init__(self, quotas: Quotas, keeper_uid: int) -> None:
        self.quotas = quotas
        self.keeper_uid = keeper_uid
        self.total = Usage()
        self._by_user: dict[int, Usage] = {}
        self._tallies: WeakValueDictionary[int, Tally] = WeakValueDictionary()  # as long as a session has it

    def tally(self, uid: int) -> Tally:
        """Return what the sessions of a user share."""
        return self._tallies.setdefault(uid, Tally())

    def count(self, session: Session) -> None:
        """Count what a session holds that came from another keeper."""
        session.tally = tally = self.tally(session.uid)
        tally.leases += len(session.leases)
        tally.waiters += len(session.waiters)
        tally.claims += len(session.claims)
        tally.watches += len(session.watches)

    def check(self, session: Session, what: str) -> None:
        """Raise CapacityError if the session's user has as many ``leases``, ... as one user may have."""
        most = getattr(MOST, what)
        if getattr(session.tally, what) >= most and session.uid != self.keeper_uid:
            raise CapacityError(
                f"uid {session.uid} has {most} {what} at this keeper already, as many as one user may have on all its "
                f"connections together; give some back"
            )

    def of(self, uid: int) -> Usage:
        """Return what one user has."""
        return self._by_user.get(uid) or Usage()

    def admit(self, uid: int, nbytes: int, entries: int, handles: int, replaced: Version | None) -> None:
        """Raise CapacityError unless this much more fits. What a commit would free at once counts as free."""
        freed_bytes = freed_handles = 0
        if replaced is not None and not replaced.leases:
            freed_bytes, freed_handles = replaced.charge, replaced.handles
        quotas, used = self.quotas, self.total
        limits = [
            (quotas.max_bytes, used.nbytes + nbytes - freed_bytes, nbytes, "byte", "the keeper"),
            (quotas.max_entries, used.entries + entries, entries, "entry", "the keeper"),
            (quotas.max_handles, used.handles + handles - freed_handles, handles, "descriptor", "the keeper"),
        ]
        if uid != self.keeper_uid:
            used = self.of(uid)
            limits += [
                (quotas.user_bytes, used.nbytes + nbytes - freed_bytes, nbytes, "byte", f"uid {uid}"),
                (quotas.user_entries, used.entries + entries, entries, "entry", f"uid {uid}"),
                (quotas.user_handles, used.handles + handles - freed_handles, handles, "descriptor", f"uid {uid}"),
            ]
        for limit, total, asked, what, whose in limits:
            if limit is not None and total > limit and asked:
                raise CapacityError(
                    f"no room for {_written(asked, what)} more: {whose} may hold {_written(limit, what)} and would "
                    f"hold {format_size(total) if what == 'byte' else total}; remove entries, wait for readers of old "
                    f"versions, or raise the keeper's limit"
                )

    def add(self, uid: int, nbytes: int, entries: int, handles: int) -> None:
        """Book what came, or went where the numbers are negative."""
        self.total.add(nbytes, entries, handles)
        used = self._by_user.setdefault(uid, Usage())
        used.add(nbytes, entries, handles)
        if not (used.nbytes or used.entries or used.handles):
            del self._by_user[uid]
