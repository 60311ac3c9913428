"""Queries of a keeper: its entries, how much they hold, and the processes that lease them.

The classes of the replies are loaded by the first query: each takes a millisecond to make, and a process that only
attaches makes no query.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from ..lifetime import stuck
from . import messages as m
from .rpc_connection import RpcConnection
from .rules import check_name, check_prefix

if TYPE_CHECKING:
    from .reports import EntryInfo, HolderInfo, StatisticsInfo, VersionInfo

_Row = TypeVar("_Row")


class Queries(RpcConnection):
    """The requests of :class:`~vram.keeper.client.KeeperClient` that change nothing."""

    def list(self, prefix: str = "", *, most_meta: int | None = None) -> list[EntryInfo]:
        """Return the entries whose names begin with `prefix`, in order.
        Meta of more than `most_meta` bytes is left out; the row says how many bytes it has."""
        from .reports import EntryInfo

        check_prefix(prefix)
        most = m.saturated(2**63 if most_meta is None else most_meta)
        rows = self._rows(EntryInfo, lambda call, row: m.List(call, prefix, row.name if row else "", most))
        return [*rows]

    def page(self, prefix: str = "", after: str = "") -> tuple[Sequence[EntryInfo], bool]:
        """Return the entries behind the name `after`, as many as one message takes, with devices and without meta;
        and whether there are more."""
        from .reports import EntryInfo

        page = self._request(m.Rows, m.List, check_prefix(prefix), after, 0, True)
        return m.decode_rows(page.rows, EntryInfo), page.more

    def show(self, name: str) -> EntryInfo:
        """Return everything the keeper knows about a name: its versions and their leases."""
        from .reports import shown_entry

        versions = list(self.versions(check_name(name)))
        holders: defaultdict[int, list[HolderInfo]] = defaultdict(list)
        for one in self._leases_under(name, (name, 0, 0)):
            if one.name != name:
                break
            holders[one.version].append(one)
        return shown_entry(name, [replace(row, holders=tuple(holders[row.version])) for row in versions])

    def versions(self, name: str, after: int = 0) -> Iterator[VersionInfo]:
        """Yield the versions of a name that are above `after`, without their holders, oldest first."""
        from .reports import VersionInfo

        return self._rows(VersionInfo, lambda call, row: m.Versions(call, name, row.version if row else after))

    def holders_of(self, name: str, version: int) -> Iterator[HolderInfo]:
        """Yield the leases on a version, oldest first; none, once it or its name is gone."""
        for one in self._leases_under(name, (name, version, 0)):
            if (one.name, one.version) != (name, version):
                return
            yield one

    def holders(self, prefix: str = "") -> Sequence[HolderInfo]:
        """Return the leases on names that begin with `prefix`, by name, version and age.
        Leases on removed versions are included; leases that this connection has given back are not."""
        return list(self._leases_under(check_prefix(prefix), ("", 0, 0)))

    def _leases_under(self, prefix: str, after: tuple[str, int, int]) -> Iterator[HolderInfo]:
        """Yield the leases on names that begin with `prefix` behind a place: a name, a version and a lease."""
        from .reports import HolderInfo

        return self._rows(
            HolderInfo,
            lambda call, row: m.Holders(call, prefix, (row.name, row.version, row.lease_id) if row else after),
        )

    def _rows(self, kind: type[_Row], request: Callable[[int, Any], m.Request]) -> Iterator[_Row]:
        """Yield the rows of all pages. `request` makes one from the number of the call and the last row, if any."""
        row: Any = None
        while True:
            page = self._request(m.Rows, request, row)
            for row in m.decode_rows(page.rows, kind):
                yield row
            if not page.more or not page.rows:
                return

    def statistics(self) -> StatisticsInfo:
        """Return how much the keeper holds, and how much this process could not release."""
        from .reports import StatisticsInfo

        (info,) = m.decode_rows(self._request(m.Rows, m.Statistics).rows, StatisticsInfo)
        return replace(info, stuck=len(stuck()))

    def users(self) -> Sequence[m.UserInfo]:
        """Return the usage of each user, the most bytes first."""
        return self.measure().users

    def measure(self) -> m.Measurements:
        """Return the counts of the keeper since its start."""
        return self._request(m.Measurements, m.Measure)
