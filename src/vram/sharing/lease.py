"""The right to use what somebody else keeps, as a counted handle.

Every mapping made under a lease depends on its handle, so the lease is given back after the last unmap and never
before (S5), in whatever order arrays, views and the lease itself are dropped. The grantor decides what
happens then: :class:`LeaseReturn` is the undo, and it is safe to run from a finalizer.
"""

from __future__ import annotations

from collections.abc import Callable

from ..lifetime import Claim, own


class LeaseReturn:
    """Gives a lease, by the grantor's number, back once nothing is mapped under it.
    `later` takes that number, and neither waits nor raises, since finalizers reach it."""

    # The undo runs in whatever thread drops the last view, also while another one is about to wait for the grantor's
    # answer. `_due` holds the id from the undo on; whoever takes it out, an atomic step, gives the lease back.

    __slots__ = ("_due", "_wait", "granted")

    def __init__(self, lease_id: int, later: Callable[[int], None]) -> None:
        # One value, so that a lease on a newer version that holds the same memory takes its place in one step.
        self.granted = lease_id, later
        self._wait = False
        self._due: list[int] = []

    @property
    def lease_id(self) -> int:
        """The grantor's number for it."""
        return self.granted[0]

    def own(self, label: str) -> Claim:
        """Make the counted handle whose undo this is."""
        return own(label, self)

    def keep_back(self) -> None:
        """From now on only mark the lease as due: its holder wants to give it back itself and wait for the answer."""
        self._wait = True

    @property
    def is_due(self) -> bool:
        """Whether nothing is mapped under the lease any more, and it was not given back yet."""
        return bool(self._due)

    def take(self) -> bool:
        """Whether the lease is due and it is now the caller who has to give it back."""
        try:
            self._due.pop()
        except IndexError:
            return False
        return True

    def send_on(self) -> None:
        """Undo :meth:`keep_back`: if something is still mapped, the last view to go gives the lease back."""
        self._wait = False
        if self.take():  # it went in between, or whoever wanted to give it back could not
            lease_id, later = self.granted
            later(lease_id)

    def __call__(self) -> None:
        self._due.append(self.granted[0])
        if not self._wait and self.take():
            lease_id, later = self.granted
            later(lease_id)
