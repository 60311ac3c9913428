"""The requests by which a version is updated in place, and its readers are waited for.

The publisher's page of words says what readers look at before and after each section; the page of each lease says
whether a thread of its holder is in one. The keeper looks at those for the publisher, and remembers whether an update
is under way, since it hears of the end of the process that makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ProtocolError
from . import messages as m

if TYPE_CHECKING:
    from .client import KeeperClient


def give_page(client: KeeperClient, lease_id: int, fd: int) -> None:
    """Have the keeper keep the page of words of a lease, for the publisher of its version. `fd` is lent."""
    call = next(client._numbers)
    client._expect(m.Done, client._ask(m.Page(call, lease_id), call, [fd]))


def begin_update(client: KeeperClient, name: str, version: int) -> None:
    """Say that this process is about to update a version, which it published over this connection."""
    call = next(client._numbers)
    client._expect(m.Done, client._ask(m.Update(call, name, version), call))


def pages(client: KeeperClient, name: str, version: int, after: int, but: int = 0) -> m.PageList:
    """Return the readers of a version that this connection updates, of some leases above `after`, but for words `but`.
    The keeper looks at the pages, since closing a stranger's files takes as long as that stranger likes."""
    call = next(client._numbers)
    reply = client._expect(m.PageList, client._ask(m.Pages(call, name, version, after, but), call))
    if any(row.lease <= after for row in reply.rows[:1]) or (reply.more and reply.through <= after):
        raise client._fail(ProtocolError(f"the leases behind {after} came as those up to {reply.through}"))
    return reply


def cursors(client: KeeperClient, name: str, version: int, after: int) -> m.CursorList:
    """Return the first word, where not 0, of the pages of some leases above `after` on a ring of this connection."""
    call = next(client._numbers)
    reply = client._expect(m.CursorList, client._ask(m.Cursors(call, name, version, after), call))
    if any(row.lease <= after for row in reply.rows) or (reply.more and reply.through <= after):
        raise client._fail(ProtocolError(f"the leases behind {after} came as those up to {reply.through}"))
    return reply


def end_update(client: KeeperClient, name: str, version: int, updates: int, *, whole: bool) -> None:
    """Say that an update is over, and how many of them were whole."""
    call = next(client._numbers)
    client._expect(m.Done, client._ask(m.Updated(call, name, version, updates, whole), call))


def update_state(client: KeeperClient, lease_id: int) -> m.Updates:
    """Return what the keeper knows of the updates of a leased version."""
    call = next(client._numbers)
    return client._expect(m.Updates, client._ask(m.UpdateState(call, lease_id), call))
