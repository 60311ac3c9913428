"""How much is kept, by everybody together and by each user, and how much there may be."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from weakref import WeakValueDictionary

from ..errors import QuotaError
from ..spec import format_count, format_size
from .records import Session, Tally, Version

__all__ = ["MOST_ENTRIES", "MOST_WORDS", "REPLACED", "Accounts", "Quotas", "Usage"]

# Of one user who is not the keeper's: what is on the keeper's books only, and bounded by no other quota.
MOST = Tally(leases=65_536, waiters=4_096, claims=256, watches=16_384)
# The same for what all entries of a user say besides their memory: names, manifests, devices, segments and meta. The
# keeper keeps that in its own memory, and all of it moves when another keeper takes over.
MOST_WORDS = 64 * 1024 * 1024
MOST_ENTRIES = 32_768  # of one user, unless another ceiling or none was chosen: it stops a keeper for so long (031)
REPLACED = 8  # descriptors of a version that may be beyond the ceilings while the next one of its name comes


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
    """Bytes, entries and descriptors in use, and bytes of what is said of them."""

    nbytes: int = 0
    entries: int = 0
    handles: int = 0
    words: int = 0

    def add(self, nbytes: int, entries: int, handles: int, words: int = 0) -> None:
        """Add to the counts; negative numbers subtract."""
        self.nbytes += nbytes
        self.entries += entries
        self.handles += handles
        self.words += words


_WORDS = "byte of words"
_RAISE = "raise the keeper's limit"


def _written(number: int, what: str) -> str:
    if what == "byte":
        return format_size(number)
    if what == _WORDS:
        return f"{format_size(number)} of manifests, devices and meta"
    return format_count(number, what, "entries" if what == "entry" else "")


def _short(number: int, what: str) -> str:
    return format_size(number) if what in ("byte", _WORDS) else str(number)


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
        self._old: dict[int, dict[Version, None]] = {}  # by user: leased versions that are not current any more
        self._tallies: WeakValueDictionary[int, Tally] = WeakValueDictionary()  # as long as a session has it

    def tally(self, uid: int) -> Tally:
        """Return the counts that all sessions of a user share."""
        return self._tallies.setdefault(uid, Tally())

    def count(self, session: Session) -> None:
        """Count the leases, waiters, claims and watches of a session that came from another keeper."""
        session.tally = tally = self.tally(session.uid)
        tally.leases += len(session.leases)
        tally.waiters += len(session.waiters)
        tally.claims += len(session.claims)
        tally.watches += len(session.watches)

    def check(self, session: Session, what: str) -> None:
        """Raise QuotaError if the session's user has as many ``leases``, ... as one user may have."""
        most = getattr(MOST, what)
        if getattr(session.tally, what) >= most and session.uid != self.keeper_uid:
            raise QuotaError(
                f"uid {session.uid} has {most} {what} at this keeper already, as many as one user may have on all its "
                f"connections together; give some back"
            )

    def of(self, uid: int) -> Usage:
        """Return the usage of one user."""
        return self._by_user.get(uid) or Usage()

    def users(self) -> set[int]:
        """Return all who have something, or are connected."""
        return {*self._by_user, *self._tallies}

    def admit(
        self,
        uid: int,
        nbytes: int,
        entries: int,
        handles: int,
        replaced: Version | None,
        words: int = 0,
        *,
        goes: bool = False,
    ) -> None:
        """Raise QuotaError unless this much more fits. What a commit would free at once counts as free: with `goes`,
        when the bytes of a version move, what they were in, whoever leases it.

        Of descriptors only a few do: until the new version is there, which its publisher may never complete, those of
        both are open, and a keeper has no more of them than it says.
        """
        freed_bytes = freed_handles = 0
        if replaced is not None and (goes or not replaced.leases):
            freed_bytes, freed_handles = replaced.charge, min(replaced.handles, REPLACED)
        quotas, used = self.quotas, self.total
        limits = [
            (quotas.max_bytes, used.nbytes + nbytes - freed_bytes, nbytes, "byte", "the keeper"),
            (quotas.max_entries, used.entries + entries, entries, "entry", "the keeper"),
            (quotas.max_handles, used.handles + handles - freed_handles, handles, "descriptor", "the keeper"),
        ]
        if uid != self.keeper_uid:
            used = self.of(uid)
            # What is replaced counts against those who go on holding it: its owner may be one of them.
            moves = replaced is not None and replaced.owner == uid and (goes or uid not in replaced.holders)
            freed_bytes = replaced.charge if moves and replaced else 0
            freed_handles = min(replaced.handles, REPLACED) if moves and replaced else 0
            freed_words = replaced.words if moves and replaced else 0
            limits += [
                (quotas.user_bytes, used.nbytes + nbytes - freed_bytes, nbytes, "byte", f"uid {uid}"),
                (quotas.user_entries, used.entries + entries, entries, "entry", f"uid {uid}"),
                (quotas.user_handles, used.handles + handles - freed_handles, handles, "descriptor", f"uid {uid}"),
                (MOST_WORDS, used.words + words - freed_words, words, _WORDS, f"uid {uid}"),
            ]
        for limit, total, asked, what, whose in limits:
            if limit is not None and total > limit and asked:
                more = "say less (put a hash into meta, the rest into memory)" if what == _WORDS else _RAISE
                raise QuotaError(
                    f"no room for {_written(asked, what)} more: {whose} may hold {_written(limit, what)} and would "
                    f"hold {_short(total, what)}; remove entries, wait for readers of old versions, or {more}"
                    f"{self._old_ones(uid)}"
                )

    def check_lease(self, uid: int, version: Version, *, is_current: bool) -> None:
        """Raise QuotaError if a user may not have a lease on a version.

        A user may not if leases on versions that are not current any more exceed its ceilings, or would with this one.
        """
        new = not is_current and uid not in version.holders
        if uid == self.keeper_uid or not (new or uid in self._old):
            return
        used, quotas = self.of(uid), self.quotas
        nbytes = used.nbytes + (version.charge if new else 0)
        handles = used.handles + (version.handles if new else 0)
        words = used.words + (version.words if new else 0)
        for limit, total, what in (
            (quotas.user_bytes, nbytes, "byte"),
            (quotas.user_handles, handles, "descriptor"),
            (MOST_WORDS, words, _WORDS),
        ):
            if limit is not None and total > limit:
                raise QuotaError(
                    f"no lease on {version.name!r} version {version.number}: uid {uid} may hold "
                    f"{_written(limit, what)} and {'would hold' if new else 'holds'} "
                    f"{_short(total, what)}, with the versions that it leases and that "
                    f"are not current any more{self._old_ones(uid)}"
                )

    def _old_ones(self, uid: int) -> str:
        old = self._old.get(uid)
        if not old:
            return ""
        some = list(itertools.islice(old, 5))
        shown = ", ".join(f"{one.name!r} version {one.number} ({format_size(one.charge)})" for one in some)
        more = f" and {len(old) - 5} more" if len(old) > 5 else ""
        return (
            f". Uid {uid} leases {shown}{more}, not current any more: close those leases, or end the processes that "
            f"have them (vram ls --holders)"
        )

    def add(self, uid: int, nbytes: int, entries: int, handles: int, words: int = 0) -> None:
        """Add to a user's usage and to the total; negative numbers subtract."""
        self.total.add(nbytes, entries, handles, words)
        self._book(uid, nbytes, entries, handles, words)

    def retire(self, version: Version) -> None:
        """A version is not current any more: count it against each user who leases it, and not against its owner.

        Its owner can neither free it nor make its readers let go: each of them can.
        """
        self._book(version.owner, -version.charge, 0, -version.handles, -version.words)
        for uid in version.holders:
            self.hold(uid, version)

    def hold(self, uid: int, version: Version) -> None:
        """A user has a first lease on a version that is not current any more."""
        self._old.setdefault(uid, {})[version] = None
        self._book(uid, version.charge, 0, version.handles, version.words)

    def release_version(self, uid: int, version: Version) -> None:
        """The last lease of a user on a version that is not current any more is over."""
        old = self._old[uid]
        del old[version]
        if not old:
            del self._old[uid]
        self._book(uid, -version.charge, 0, -version.handles, -version.words)

    def _book(self, uid: int, nbytes: int, entries: int, handles: int, words: int) -> None:
        used = self._by_user.setdefault(uid, Usage())
        used.add(nbytes, entries, handles, words)
        if not (used.nbytes or used.entries or used.handles or used.words):
            del self._by_user[uid]
