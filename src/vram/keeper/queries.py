"""Queries of a keeper: its entries, how much they hold, and the processes that lease them.

The classes of the replies are loaded by the first query: each takes a millisecond to make, and a process that only
attaches makes no query.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..errors import NotFoundError
from ..lifetime import stuck
from . import messages as m
from .rpc_connection import RpcConnection
from .rules import check_name, check_prefix

if TYPE_CHECKING:
    from .reports import EntryInfo, HolderInfo, StatisticsInfo

__all__ = ["Queries"]


class Queries(RpcConnection):
    """The requests of :class:`~vram.keeper.client.KeeperClient` that change nothing."""

    def list(self, prefix: str = "", *, most_meta: int | None = None) -> list[EntryInfo]:
        """Return the entries whose names begin with `prefix`, in order.

        Parameters
        ----------
        most_meta : int, optional
            Bytes of meta, as it is sent; an entry that says more comes without any, and with how much it was.
        """
        from .reports import entry_info

        check_prefix(prefix)
        most = m.saturated(2**63 if most_meta is None else most_meta)
        found: list[EntryInfo] = []
        after, more = "", True
        while more:
            call = next(self._calls)
            page = self._expect(m.Listing, self._ask(m.List(call, prefix, after, most), call))
            found += [entry_info(row) for row in page.rows]
            more = page.more and bool(page.rows)
            after = found[-1].name if found else ""
        return found

    def show(self, name: str) -> EntryInfo:
        """Return everything the keeper knows about a name: its versions and their leases.

        Raises
        ------
        NotFoundError
            If there is nothing under that name.
        """
        from .reports import shown_entry, version_info

        check_name(name)
        versions = [
            version_info(row, tuple(self.holders_of(name, row)) if row.readers else ()) for row in self.versions(name)
        ]
        return shown_entry(name, versions)

    def versions(self, name: str, after: int = 0) -> Iterator[m.VersionRow]:
        """Yield the versions of a name that are above `after`, as the keeper has them, oldest first.

        Raises
        ------
        NotFoundError
            If the name has none at all.
        """
        more = True
        while more:
            call = next(self._calls)
            page = self._expect(m.VersionList, self._ask(m.Versions(call, name, after), call))
            for row in page.rows:
                yield row
                after = row.version
            more = page.more and bool(page.rows)

    def holders_of(self, name: str, version: m.VersionRow) -> Iterator[HolderInfo]:
        """Yield the leases on a version, oldest first; none, once it or its name is gone."""
        from .reports import holder_info

        after, more = 0, True
        while more:
            call = next(self._calls)
            try:
                page = self._expect(m.HolderList, self._ask(m.Holders(call, name, version.version, after), call))
            except NotFoundError:
                return
            for row in page.rows:
                # An older keeper sends neither the name nor the bytes.
                yield dataclasses.replace(holder_info(row), name=name, nbytes=version.nbytes)
                after = row.lease_id
            more = page.more and bool(page.rows)

    def holders(self, prefix: str = "") -> Sequence[HolderInfo]:
        """Return the leases on names that begin with `prefix`, by name, version and age.

        Those on versions that were removed from the catalogue are included. Asks on a connection of its own, since an
        older keeper does not know the request and hangs up.

        Raises
        ------
        ProtocolError
            If the keeper is that old.
        """
        from .reports import holder_info

        check_prefix(prefix)
        found: list[HolderInfo] = []
        with RpcConnection.connect(self.path, label=self.label) as asking:
            after, more = 0, True
            while more:
                call = next(asking._calls)
                page = asking._expect(m.HolderList, asking._ask(m.Leases(call, prefix, after), call))
                found += [holder_info(row) for row in page.rows]
                more = page.more and bool(page.rows)
                after = page.rows[-1].lease_id if page.rows else 0
        return sorted(found, key=lambda one: (one.name, one.version, one.lease_id))

    def statistics(self) -> StatisticsInfo:
        """Return how much the keeper holds, and how much this process could not release."""
        from .reports import statistics_info

        call = next(self._calls)
        reply = self._expect(m.KeeperStatistics, self._ask(m.Statistics(call), call))
        return statistics_info(reply, len(stuck()))
