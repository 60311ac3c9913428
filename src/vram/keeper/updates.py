"""The requests by which a version is updated in place, and its readers are waited for.

The publisher's page of words says what readers look at before and after each section; the page of each lease says
whether a thread of its holder is in one. Neither is looked at by the keeper: it passes pages on, and remembers whether
an update is under way, since it hears of the end of the process that makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ProtocolError
from . import messages as m

if TYPE_CHECKING:
    from .client import KeeperClient

__all__ = ["begin_update", "end_update", "give_page", "pages", "update_state"]


def give_page(client: KeeperClient, lease_id: int, fd: int) -> None:
    """Have the keeper keep the page of words of a lease, for who updates what it is on. `fd` is lent.

    Raises
    ------
    QuotaError
        If the keeper has no room for one more descriptor of this user.
    """
    call = next(client._calls)
    client._expect(m.Done, client._ask(m.Page(call, lease_id), call, [fd]))


def begin_update(client: KeeperClient, name: str, version: int) -> None:
    """Say that this process is about to update a version, which it published over this connection.

    Raises
    ------
    NotFoundError
        If it was replaced or removed.
    AccessDeniedError
        If another process published it.
    UsageError
        If it was not published to be updated.
    """
    call = next(client._calls)
    client._expect(m.Done, client._ask(m.Update(call, name, version), call))


def pages(
    client: KeeperClient, name: str, version: int, after: int, fds: list[int]
) -> tuple[Sequence[m.PageRow], bool]:
    """Return whose pages come next behind a lease, and whether there are more; their descriptors go to `fds`."""
    call = next(client._calls)
    answer = client._converse(m.Pages(call, name, version, after), call, (), client.grace)
    reply = client._expect(m.PageList, answer.reply)
    try:
        if len(answer.fds) != len(reply.rows) or any(row.lease <= after for row in reply.rows[:1]):
            raise client._fail(ProtocolError(f"{len(answer.fds)} pages came for {len(reply.rows)} leases"))
        fds += answer.fds  # two steps, and no interrupt comes in between (I12)
        del answer.fds[:]
    finally:
        answer.give_back()
    return reply.rows, reply.more


def end_update(client: KeeperClient, name: str, version: int, updates: int, *, whole: bool) -> None:
    """Say that an update is over, and how many of them were whole."""
    call = next(client._calls)
    client._expect(m.Done, client._ask(m.Updated(call, name, version, updates, whole), call))


def update_state(client: KeeperClient, lease_id: int) -> m.Updates:
    """Return what the keeper knows of the updates of a leased version."""
    call = next(client._calls)
    return client._expect(m.Updates, client._ask(m.UpdateState(call, lease_id), call))
