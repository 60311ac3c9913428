"""Everything that has a ceiling, of all users together and of each, and how much of it is used.

The options of ``vram keep``, errors, statistics and metrics follow from one table. One more quota is a row of it, its
two fields in :class:`Quotas`, and where it is counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Union

import msgspec
from msgspec import Struct

from ..errors import QuotaError, UsageError
from ..spec import format_count, format_size, parse_size

if TYPE_CHECKING:
    from .records import Publication, Version

MOST_ENTRIES: Final = 32_768  # of one user: a planned restart stops the keeper while their rows are written and read

REPLACED = 8  # descriptors of a version that may be beyond the ceilings while the next one of its name comes


class Quotas(Struct, frozen=True, array_like=True):
    """Ceilings (None: no ceiling); ``user`` fields bind each user but the keeper's own."""

    max_bytes: int | None = None
    max_entries: int | None = None
    user_bytes: int | None = None
    user_entries: int | None = MOST_ENTRIES
    max_descriptors: int | None = None
    user_descriptors: int | None = None
    max_connections: int | None = None
    user_connections: int | None = None

    def within(self, connections: int, descriptors: int) -> Quotas:
        """Return these in a process that can have no more than so many: of each, one user has half unless chosen."""
        most = {"connections": connections, "descriptors": descriptors}
        found: dict[str, int] = {}
        for name, here in most.items():
            chosen, of_user = getattr(self, f"max_{name}"), getattr(self, f"user_{name}")
            total = here if chosen is None else min(chosen, here)
            found[f"max_{name}"] = total
            found[f"user_{name}"] = total // 2 if of_user is None else min(of_user, total)
        return msgspec.structs.replace(self, **found)


class Limit(NamedTuple):
    """One quantity that has ceilings; `name` is plural, as in the fields of :class:`Quotas` and in the options.
    `own`: RLIMIT_NOFILE gives a process a ceiling where none is chosen."""

    name: str
    one: str
    what: str
    remedy: str
    own: bool = False

    @property
    def is_size(self) -> bool:
        """Whether it is counted in bytes."""
        return self.name == "bytes"

    def counted(self, number: int) -> str:
        """Write so many of them, for a sentence."""
        if self.is_size:
            return format_size(number)
        return format_count(number, self.one, self.name)

    @property
    def metric(self) -> str:
        """Return what it is called among the metrics, where a unit stands at the end."""
        return "memory" if self.is_size else self.name

    def option(self, *, of_user: bool) -> str:
        """Return the option that sets it."""
        return f"--max-{self.name}{'-per-user' if of_user else ''}"


_REMOVE = "remove entries (vram rm), wait for readers of old versions"

LIMITS: Final = (
    Limit("bytes", "byte", "memory", _REMOVE),
    Limit("entries", "entry", "names", _REMOVE),
    Limit("descriptors", "descriptor", "descriptors of memory", _REMOVE, own=True),
    Limit("connections", "connection", "connections", "end processes that are connected", own=True),
)
_CALLED: Final = {limit.name: limit for limit in LIMITS}


class Option(NamedTuple):
    """How one ceiling is chosen: its option, the field of :class:`Quotas`, and what is counted."""

    flag: str
    field: str
    limit: Limit
    of_user: bool

    @property
    def help(self) -> str:
        """Say what it is, in one line."""
        of = " of each user but this one" if self.of_user else ""
        kind = "a size" if self.limit.is_size else "a number"
        return f'Most {self.limit.what}{of}: {kind}, or "none"{self.default}.'

    @property
    def default(self) -> str:
        """Say what holds where it is not given, if anything does."""
        most = getattr(_NONE_CHOSEN, self.field)
        if most is not None:
            return f" [default: {written_limit(self, most)}]"
        if self.limit.own:
            return " [default: half of them]" if self.of_user else " [default: by RLIMIT_NOFILE]"
        return ""


_NONE_CHOSEN: Final = Quotas()
OPTIONS: Final = tuple(
    Option(limit.option(of_user=of_user), f"{'user' if of_user else 'max'}_{limit.name}", limit, of_user)
    for limit in LIMITS
    for of_user in (False, True)
)


def limit_called(name: str) -> Limit:
    """Return the row of a quantity."""
    return _CALLED[name]


def over(
    limit: Limit,
    whose: str,
    most: int,
    used: int,
    asked: int,
    *,
    would: int | None = None,
    of_user: bool,
    more: str = "",
) -> QuotaError:
    """Return the error for a request beyond a ceiling; `whose` is ``"the keeper"`` or a user.
    `would` is the total afterwards, if something goes in return."""
    option = limit.option(of_user=of_user)
    return QuotaError(
        f"no room for {limit.counted(asked)} more: {whose} may hold {limit.counted(most)} ({option}), holds "
        f"{_short(limit, used)} and would hold {_short(limit, used + asked if would is None else would)}; "
        f"{limit.remedy}, or raise the keeper's limit (vram keep --takeover {option} ...){more}"
    )


def _short(limit: Limit, number: int) -> str:
    return format_size(number) if limit.is_size else str(number)


def parse_limit(text: str, option: str) -> int | None:
    """Return a limit: a size for what is counted in bytes, a whole number for the rest, None for ``"none"``."""
    if text.strip().lower() == "none":
        return None
    limit = next(one.limit for one in OPTIONS if one.flag == option)
    if limit.is_size:
        return parse_size(text, what=option)
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise UsageError(f'{option} {text[:40]!r} is not a number of {limit.name}: 0 or more, or "none"')
    return int(text)


def written_limit(option: Option, limit: int | None) -> str:
    """Write a limit as it may be given."""
    return "none" if limit is None else format_size(limit) if option.limit.is_size else str(limit)


# -- what is used --------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A request for memory that becomes no version; the fields are those that count of a version or publication.
    `loose` is bytes that nothing else shares, as far as can be known. `pieces` is the memory that others may have too,
    what it is known by and its bytes: it counts once, whoever has it."""

    loose: int = 0
    handles: int = 0
    pieces: Mapping[int, int] = {}


Counted = Union["Version", "Publication", Asked]


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

    def keep(self, one: Counted, entries: int = 0) -> None:
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

    def drop(self, one: Counted, entries: int = 0) -> None:
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

    def fresh(self, one: Counted) -> int:
        """Return how many bytes more this would be: what is here already counts once."""
        nbytes = one.loose
        for piece, size in one.pieces.items():
            known = self.pieces.get(piece)
            nbytes += size if known is None else max(0, size - known[1])
        return nbytes

    def freed(self, one: Counted, by: Counted) -> int:
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


_ALL: Final = "the keeper"  # in an error, in place of a user
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
        asked: Counted,
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
            self.total, asked, entries, replaced if frees else None, _ALL,
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
        asked: Counted,
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
                raise over(
                    limit, whose, most, has, more, would=has + more - less, of_user=whose != _ALL,
                    more=self._old_ones(uid),
                )  # fmt: skip

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

    def keep(self, uid: int, one: Counted, entries: int = 0) -> None:
        """Count a version or a publication against a user and all together."""
        self.total.keep(one, entries)
        self._used(uid).keep(one, entries)

    def drop(self, uid: int, one: Counted, entries: int = 0) -> None:
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
