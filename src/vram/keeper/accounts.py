"""How much is kept, by everybody together and by each user, and how much there may be."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..errors import QuotaError
from ..spec import format_size
from .limits import Limit, Quotas, limit_called, over
from .records import Version

REPLACED = 8  # descriptors of a version that may be beyond the ceilings while the next one of its name comes


class Kept(Protocol):
    """A counted object: a version, a publication, or a request for one."""

    @property
    def loose(self) -> int:
        """Bytes that nothing else shares, as far as can be known."""
        ...

    @property
    def pieces(self) -> Mapping[int, int]:
        """The memory that others may have too: what it is known by, and its bytes. It counts once, whoever has it."""
        ...

    @property
    def handles(self) -> int:
        """Descriptors."""
        ...


class Asked(NamedTuple):
    """A request for memory that becomes no version."""

    loose: int = 0
    handles: int = 0
    pieces: Mapping[int, int] = {}


@dataclass(slots=True, eq=False)
class Usage:
    """Bytes, entries and descriptors in use."""

    nbytes: int = 0
    entries: int = 0
    handles: int = 0
    pieces: dict[int, list[int]] = field(default_factory=dict)  # how many versions have it, and its bytes

    def add(self, nbytes: int, entries: int, handles: int) -> None:
        """Add to the counts; negative numbers subtract."""
        self.nbytes += nbytes
        self.entries += entries
        self.handles += handles

    def keep(self, one: Kept, entries: int = 0) -> None:
        """Count a version, or a publication."""
        nbytes = one.loose
        pieces = self.pieces
        for piece, size in one.pieces.items():
            known = pieces.get(piece)
            if known is None:
                pieces[piece] = [1, size]
                nbytes += size
            else:
                known[0] += 1
                if size > known[1]:  # pages have come behind it since
                    nbytes += size - known[1]
                    known[1] = size
        self.add(nbytes, entries, one.handles)

    def drop(self, one: Kept, entries: int = 0) -> None:
        """Count it no more."""
        nbytes = one.loose
        pieces = self.pieces
        for piece in one.pieces:
            known = pieces[piece]
            known[0] -= 1
            if not known[0]:
                del pieces[piece]
                nbytes += known[1]
        self.add(-nbytes, -entries, -one.handles)

    def fresh(self, one: Kept) -> int:
        """Return how many bytes more this would be: what is here already counts once."""
        nbytes = one.loose
        for piece, size in one.pieces.items():
            known = self.pieces.get(piece)
            nbytes += size if known is None else max(0, size - known[1])
        return nbytes

    def freed(self, one: Kept, by: Kept) -> int:
        """Return how many bytes less it would be without one, if another comes in its place."""
        nbytes = one.loose
        for piece in one.pieces:
            uses, size = self.pieces[piece]
            if uses == 1 and piece not in by.pieces:
                nbytes += size
        return nbytes

    @property
    def is_empty(self) -> bool:
        """Whether nothing counts."""
        return not (self.nbytes or self.entries or self.handles)


_BYTES, _ENTRIES, _HANDLES = (limit_called(name) for name in ("bytes", "entries", "descriptors"))


class Accounts:
    """The sums of what is kept, in total and by user. The ceilings for each user do not bind `keeper_uid`."""

    def __init__(self, quotas: Quotas, keeper_uid: int) -> None:
        self.quotas = quotas
        self.keeper_uid = keeper_uid
        self.total = Usage()
        self._by_user: dict[int, Usage] = {}
        self._old: dict[int, dict[Version, None]] = {}  # by user: leased versions that are not current any more

    def of(self, uid: int) -> Usage:
        """Return the usage of one user."""
        return self._by_user.get(uid) or Usage()

    def users(self) -> set[int]:
        """Return all who have something."""
        return {*self._by_user}

    def admit(
        self,
        uid: int,
        asked: Kept,
        entries: int = 0,
        replaced: Version | None = None,
        *,
        goes: bool = False,
    ) -> None:
        """Raise QuotaError unless `asked` fits; bytes that a commit frees at once or moves (`goes`) count as free.
        Of descriptors at most :data:`REPLACED` do: those of both versions are open until the new one is complete."""
        quotas = self.quotas
        frees = replaced is not None and (goes or not replaced.leases)
        self._fits(
            self.total, asked, entries, replaced if frees else None, "the keeper",
            (quotas.max_bytes, quotas.max_entries, quotas.max_descriptors), uid,
        )  # fmt: skip
        if uid == self.keeper_uid:
            return
        # A replaced version counts against the users that still lease it: its owner may be one of them.
        moves = replaced is not None and replaced.owner == uid and (goes or uid not in replaced.holders)
        self._fits(
            self.of(uid), asked, entries, replaced if moves else None, f"uid {uid}",
            (quotas.user_bytes, quotas.user_entries, quotas.user_descriptors), uid,
        )  # fmt: skip

    def _fits(
        self,
        used: Usage,
        asked: Kept,
        entries: int,
        freed: Version | None,
        whose: str,
        ceilings: tuple[int | None, int | None, int | None],
        uid: int,
    ) -> None:
        nbytes = used.fresh(asked)
        less_bytes = less_handles = 0
        if freed is not None:
            less_bytes, less_handles = used.freed(freed, asked), min(freed.handles, REPLACED)
        for limit, most, has, more, less in (
            (_BYTES, ceilings[0], used.nbytes, nbytes, less_bytes),
            (_ENTRIES, ceilings[1], used.entries, entries, 0),
            (_HANDLES, ceilings[2], used.handles, asked.handles, less_handles),
        ):
            if most is not None and more and has + more - less > most:
                raise self._over(limit, whose, most, has, more, has + more - less, uid)

    def _over(self, limit: Limit, whose: str, most: int, used: int, asked: int, would: int, uid: int) -> QuotaError:
        of_user = whose != "the keeper"
        return over(limit, whose, most, used, asked, would=would, of_user=of_user, more=self._old_ones(uid))

    def check_lease(self, uid: int, version: Version, *, is_current: bool) -> None:
        """Raise QuotaError if a user's leases on superseded versions exceed its ceilings, or would with this one."""
        new = not is_current and uid not in version.holders
        if uid == self.keeper_uid or not (new or uid in self._old):
            return
        used, quotas = self.of(uid), self.quotas
        for limit, most, total in (
            (_BYTES, quotas.user_bytes, used.nbytes + (used.fresh(version) if new else 0)),
            (_HANDLES, quotas.user_descriptors, used.handles + (version.handles if new else 0)),
        ):
            if most is not None and total > most:
                had = f"{format_size(total) if limit is _BYTES else total}"
                raise self._no_lease(uid, version, f"{limit.counted(most)} ({limit.option(of_user=True)})", had, new)

    def _no_lease(self, uid: int, version: Version, most: str, total: str, new: bool) -> QuotaError:
        return QuotaError(
            f"no lease on {version.name!r} version {version.number}: uid {uid} may hold {most} and "
            f"{'would hold' if new else 'holds'} {total}, with the versions that it leases and that are not current "
            f"any more{self._old_ones(uid)}"
        )

    def _old_ones(self, uid: int) -> str:
        old = self._old.get(uid)
        if not old:
            return ""
        some = list(itertools.islice(old, 5))
        shown = ", ".join(f"{one.name!r} version {one.number} ({format_size(one.nbytes)})" for one in some)
        more = f" and {len(old) - 5} more" if len(old) > 5 else ""
        return (
            f". Uid {uid} leases {shown}{more}, not current any more: close those leases, or end the processes that "
            f"have them (vram ls --holders)"
        )

    def add(self, uid: int, nbytes: int, entries: int, handles: int) -> None:
        """Add to a user's usage and to the total, of what is no version; negative numbers subtract."""
        self.total.add(nbytes, entries, handles)
        self._used(uid).add(nbytes, entries, handles)
        self._tidy(uid)

    def keep(self, uid: int, one: Kept, entries: int = 0) -> None:
        """Count a version or a publication against a user and all together."""
        self.total.keep(one, entries)
        self._used(uid).keep(one, entries)

    def drop(self, uid: int, one: Kept, entries: int = 0) -> None:
        """Count it against neither."""
        self._used(uid).drop(one, entries)
        self._tidy(uid)
        self.total.drop(one, entries)

    def retire(self, version: Version) -> None:
        """Count a version that is current no more against each user who leases it, and not against its owner.
        The owner can neither free it nor make its readers let go; each reader can."""
        self._used(version.owner).drop(version)
        self._tidy(version.owner)
        for uid in version.holders:
            self.hold(uid, version)

    def hold(self, uid: int, version: Version) -> None:
        """A user has a first lease on a version that is not current any more."""
        self._old.setdefault(uid, {})[version] = None
        self._used(uid).keep(version)

    def release_version(self, uid: int, version: Version) -> None:
        """The last lease of a user on a version that is not current any more is over."""
        old = self._old[uid]
        del old[version]
        if not old:
            del self._old[uid]
        self._used(uid).drop(version)
        self._tidy(uid)

    def _used(self, uid: int) -> Usage:
        return self._by_user.setdefault(uid, Usage())

    def _tidy(self, uid: int) -> None:
        if self._by_user[uid].is_empty:
            del self._by_user[uid]
