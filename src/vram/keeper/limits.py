"""Everything that has a ceiling, of all users together and of each: one table.

The options of ``vram keep``, what errors say, statistics and metrics follow from it. One more is a row here, its two
fields in :class:`Quotas`, and where it is counted.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from ..errors import QuotaError, UsageError
from ..spec import format_count, format_size, parse_size

MOST_ENTRIES: Final = 32_768  # of one user: a planned restart stops the keeper while their rows are written and read


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
