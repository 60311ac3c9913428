"""Queries of a keeper: its entries, how much they hold, and the processes that lease them.

The classes of the replies are loaded by the first query: each takes a millisecond to make, and a process that only
attaches makes no query.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import NotFoundError
from ..lifetime import stuck
from . import messages as m
from .rpc_connection import RpcConnection
from .rules import check_name, check_prefix

if TYPE_CHECKING:
    from .reports import EntryInfo, HolderInfo, StatisticsInfo, UserInfo

_Page = TypeVar("_Page", m.Listing, m.VersionList, m.HolderList)


class Queries(RpcConnection):
    """The requests of :class:`~vram.keeper.client.KeeperClient` that change nothing."""

    def list(self, prefix: str = "", *, most_meta: int | None = None) -> list[EntryInfo]:
        """Return the entries whose names begin with `prefix`, in order.
        Meta of more than `most_meta` bytes is left out; the row says how many bytes it has."""
        from .reports import entry_info

        check_prefix(prefix)
        most = m.saturated(2**63 if most_meta is None else most_meta)
        pages = _pages(self, m.Listing, lambda call, row: m.List(call, prefix, row.name if row else "", most))
        return [entry_info(row) for page in pages for row in page.rows]

    def page(self, prefix: str = "", after: str = "") -> m.Listing:
        """Return the entries behind the name `after`, as many as one message takes: with devices, and without meta."""
        call = next(self._numbers)
        return self._expect(m.Listing, self._ask(m.List(call, check_prefix(prefix), after, 0, True), call))

    def show(self, name: str) -> EntryInfo:
        """Return everything the keeper knows about a name: its versions and their leases."""
        from .reports import shown_entry, version_info

        check_name(name)
        versions = [
            version_info(row, tuple(self.holders_of(name, row.version, row.nbytes)) if row.readers else ())
            for row in self.versions(name)
        ]
        return shown_entry(name, versions)

    def versions(self, name: str, after: int = 0) -> Iterator[m.VersionRow]:
        """Yield the versions of a name that are above `after`, as the keeper has them, oldest first."""
        for page in _pages(
            self, m.VersionList, lambda call, row: m.Versions(call, name, row.version if row else after)
        ):
            yield from page.rows

    def holders_of(self, name: str, version: int, nbytes: int) -> Iterator[HolderInfo]:
        """Yield the leases on a version of so many bytes, oldest first; none, once it or its name is gone."""
        from .reports import holder_info

        def request(call: int, row: m.HolderRow | None) -> m.Holders:
            return m.Holders(call, name, version, row.lease_id if row else 0)

        with contextlib.suppress(NotFoundError):
            for page in _pages(self, m.HolderList, request):
                for row in page.rows:
                    yield holder_info(row)

    def holders(self, prefix: str = "") -> Sequence[HolderInfo]:
        """Return the leases on names that begin with `prefix`, by name, version and age.
        Leases on removed versions are included; leases that this connection has given back are not."""
        from .reports import holder_info

        check_prefix(prefix)
        pages = _pages(self, m.HolderList, lambda call, row: m.Leases(call, prefix, row.lease_id if row else 0))
        found = [holder_info(row) for page in pages for row in page.rows]
        return sorted(found, key=lambda one: (one.name, one.version, one.lease_id))

    def statistics(self) -> StatisticsInfo:
        """Return how much the keeper holds, and how much this process could not release."""
        from .reports import statistics_info

        call = next(self._numbers)
        reply = self._expect(m.KeeperStatistics, self._ask(m.Statistics(call), call))
        return statistics_info(reply, len(stuck()))

    def users(self) -> Sequence[UserInfo]:
        """Return the usage of each user, the most bytes first."""
        from .reports import user_info

        return [user_info(row) for row in self.measure().users]

    def measure(self) -> m.Measurements:
        """Return the counts of the keeper since its start."""
        while True:
            call = next(self._numbers)
            found = self._expect(m.Measurements, self._ask(m.Measure(call), call))
            if not found.more:
                return found


def _pages(connection: RpcConnection, kind: type[_Page], request: Callable[[int, Any], m.Request]) -> Iterator[_Page]:
    """Yield the pages of a listing. `request` makes one from the number of the call and the last row before, if any."""
    row = None
    while True:
        call = next(connection._numbers)
        page = connection._expect(kind, connection._ask(request(call, row), call))
        yield page
        if not page.more or not page.rows:
            return
        row = page.rows[-1]
