"""News about a version: that it was replaced, removed, expired, or is wanted back."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..errors import PeerGoneError, ProtocolError, WaitTimeoutError
from ..sharing.channel import DescriptorsLostError, close_fds
from . import messages as m
from .rpc_connection import RpcConnection

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Watch"]


class Watch:
    """News about one version, on a connection of its own.

    ``fileno()`` becomes readable when there is news, or when the keeper is gone; :meth:`pump` reads it.

    Attributes
    ----------
    reason : str or None
        The newest: ``"replaced"``, ``"removed"``, ``"expired"``, ``"revoked"``, or ``"gone"`` if the keeper is.
    current : int
        The version that attaching by name gave when the news came; 0 is none.
    """

    def __init__(self, connection: RpcConnection, name: str, version: int) -> None:
        self.name = name
        self.version = version
        self.reason: str | None = None
        self.current = version
        self._client = connection
        self._channel = connection._channel
        try:
            # News follows the answer; nobody but pump() reads from then on.
            connection._expect(m.Done, connection._ask(m.Watch(1, name, version), 1))
        except BaseException:
            connection.close()
            raise

    def fileno(self) -> int:
        """Lend the descriptor to wait on with select, poll or an event loop."""
        return self._channel.fileno()

    def pump(self) -> bool:
        """Read what there is without waiting; return whether there is news, now or from before."""
        while self.reason != "gone":
            try:
                payload, fds = self._channel.take(timeout=0)
            except WaitTimeoutError:
                break
            except DescriptorsLostError as lost:  # news needs none
                payload, fds = lost.payload, []
            except (PeerGoneError, ProtocolError):
                self.reason = "gone"
                break
            close_fds(fds)
            with contextlib.suppress(ProtocolError):  # what cannot be read is no news
                self._note(m.decode_reply(payload))
        return self.reason is not None

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, reply: m.Reply) -> None:
        if isinstance(reply, m.Notice):
            self.reason, self.current = reply.reason, reply.current
