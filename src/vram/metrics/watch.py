"""What ``vram top`` shows, without a terminal: the rates of a keeper, and a window onto its entries.

A keeper lists its entries by name, in pages of about fifty, and everybody else waits for 0.3 ms while it makes one. So
by name only those are asked for that are seen. In any other order all have to be known: then :data:`PAGES` of them are
read with each look, round and round, and what is shown is as old as one round.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..errors import NotFoundError, UsageError, VramError
from ..keeper import messages as m
from ..keeper.client import KeeperClient
from ..keeper.reports import HolderInfo, RevokeInfo, StatisticsInfo, holder_info
from .rates import History, Rate, rates

PAGES: Final = 12  # that one look reads at most
_KEPT: Final = 240  # measurements

# What entries can be sorted by. The largest and the newest come first but where it says so.
KEYS: Final[dict[str, Callable[[m.EntryRow], Any]]] = {
    "name": lambda row: row.name,
    "version": lambda row: -row.version,
    "size": lambda row: -row.nbytes,
    "leases": lambda row: -row.leases,
    "held": lambda row: -row.held_bytes,
    "device": lambda row: row.devices[:1],
    "uid": lambda row: row.owner,
    "age": lambda row: row.age,
    "state": lambda row: (not row.parked, not row.updatable, not row.writable),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A window onto the sorted entries: `count` of them from `first` on, with names that begin with `prefix`.
    `key` is one of :data:`KEYS`; `opened` names the entry whose holders are shown (empty: none)."""

    first: int = 0
    count: int = 20
    key: str = "name"
    backwards: bool = False
    prefix: str = ""
    opened: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """The result of one look: `rows` is the window, which begins at `first` of the `known` entries that were read.
    `users` and `devices` are sorted by bytes, the most first. `trouble` says why the view is old, if it is."""

    wanted: Wanted
    rows: Sequence[m.EntryRow] = ()
    first: int = 0
    known: int = 0
    is_whole: bool = False
    held: StatisticsInfo | None = None
    done: dict[str, Rate] = field(default_factory=dict)
    users: Sequence[m.UserRow] = ()
    devices: Sequence[m.DeviceRow] = ()
    history: History = field(default_factory=lambda: History(1))
    holders: Sequence[HolderInfo] = ()
    trouble: str = ""


class Watcher:
    """An observer of the keeper at one socket path, and of the next keeper at that path."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._client: KeeperClient | None = None
        self._rows: dict[str, m.EntryRow] = {}
        self._names: list[str] = []
        self._prefix = ""
        self._is_whole = False
        self._after = ""  # where the round goes on
        self._before: tuple[float, m.Measurements] | None = None
        self._history = History(_KEPT)
        self._view = View(Wanted())

    def look(self, wanted: Wanted, *, measure: bool = True) -> View:
        """Return the current view; if the keeper does not answer, return the last one with the reason in `trouble`.
        `measure` says whether to ask for rates and totals too, or for entries only, as while a user scrolls."""
        if wanted.key not in KEYS:
            raise UsageError(f"cannot sort by {wanted.key!r:.40}: there are {', '.join(KEYS)}")
        old = self._view
        try:
            client = self._client
            if client is None:
                client = self._client = KeeperClient.connect(self.path, label="vram top")
                measure = True
            held, done = (client.statistics(), client.measure()) if measure else (old.held, None)
            self._read(client, wanted)
            holders = _holders(client, wanted.opened) if wanted.opened else ()
        except (VramError, OSError) as error:
            self._hang_up()
            self._view = View(
                old.wanted, old.rows, old.first, old.known, old.is_whole, old.held, old.done, old.users, old.devices,
                old.history, old.holders, " ".join(str(error).split()) or type(error).__name__,
            )  # fmt: skip
            return self._view
        rows, first = self._window(wanted)
        found = old.done
        users, devices = old.users, old.devices
        if done is not None and held is not None:
            now = time.monotonic()
            then, before = self._before or (now, None)
            self._before = now, done
            found = rates(before, done, now - then)
            users = sorted(done.users, key=lambda row: (row.uid is None, -row.nbytes))
            devices = sorted(done.devices, key=lambda row: (row.device is None, -row.nbytes))
            if before is not None:
                self._remember(found, held, users, devices)
        self._view = View(
            wanted, rows, first, len(self._names), self._is_whole, held, found, users, devices, self._history, holders
        )
        return self._view

    def revoke(self, name: str) -> RevokeInfo:
        """Revoke an entry, and do not wait for its readers. Raises what :func:`vram.revoke` raises."""
        with KeeperClient.connect(self.path, label="vram top") as client:
            return client.revoke(name, timeout=0.0)

    def close(self) -> None:
        """Look no more. Idempotent."""
        self._hang_up()

    def _hang_up(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
        self._rows, self._names, self._after, self._is_whole = {}, [], "", False

    def _remember(
        self,
        found: dict[str, Rate],
        held: StatisticsInfo,
        users: Sequence[m.UserRow],
        devices: Sequence[m.DeviceRow],
    ) -> None:
        values = {kind: found[kind].per_second if kind in found else 0.0 for kind in ("attach", "publish", "release")}
        values |= {"errors": found[""].errors, "bytes": float(held.nbytes)}
        values |= {f"user {row.uid}": float(row.nbytes) for row in users}
        values |= {f"device {row.device}": float(row.nbytes) for row in devices}
        self._history.add(values)

    # -- entries --------------------------------------------------------------------------------------------------
    def _read(self, client: KeeperClient, wanted: Wanted) -> None:
        """Read those pages that are needed."""
        if wanted.prefix != self._prefix:
            self._rows, self._names, self._after, self._is_whole = {}, [], "", False
            self._prefix = wanted.prefix
        if wanted.key != "name" or wanted.backwards:
            for _ in range(PAGES):
                self._after = self._read_page(client, self._after)
                if not self._after:
                    return
            return
        first = self._clamped(wanted)
        after = self._names[first - 1] if first else ""
        for _ in range(PAGES):
            after = self._read_page(client, after)
            if not after or bisect_right(self._names, after) >= wanted.first + wanted.count:
                return

    def _read_page(self, client: KeeperClient, after: str) -> str:
        """Read what is behind a name, in place of what was known of that; return where to go on, or nothing."""
        page = client.page(self._prefix, after)
        last = page.rows[-1].name if page.more and page.rows else ""
        begin = bisect_right(self._names, after) if after else 0
        end = bisect_right(self._names, last) if last else len(self._names)
        for name in self._names[begin:end]:
            del self._rows[name]
        self._names[begin:end] = [row.name for row in page.rows]
        self._rows.update((row.name, row) for row in page.rows)
        if not last:
            self._is_whole = True
        elif begin + len(page.rows) == len(self._names):
            self._is_whole = False  # there is more behind all that is known
        return last

    def _clamped(self, wanted: Wanted) -> int:
        return max(0, min(wanted.first, len(self._names) - wanted.count))

    def _window(self, wanted: Wanted) -> tuple[list[m.EntryRow], int]:
        first = self._clamped(wanted)
        if wanted.key == "name":
            names = self._names[::-1] if wanted.backwards else self._names
            return [self._rows[name] for name in names[first : first + wanted.count]], first
        # By name among equals; Python's order is stable.
        key = KEYS[wanted.key]
        ordered = sorted((self._rows[name] for name in self._names), key=key, reverse=wanted.backwards)
        return ordered[first : first + wanted.count], first


def _holders(client: KeeperClient, name: str) -> Sequence[HolderInfo]:
    try:
        return [holder_info(row) for row in client.first_holders(name).rows]
    except NotFoundError:
        return ()
