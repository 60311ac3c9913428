"""Memory of other processes that is open here by its 64 bytes: each once for all who use it, and counted."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress

from ..errors import BusyError, ClosedError, ProtocolError
from ..lifetime import Handle, take, waiting
from ..memory.foreign import ForeignRegion, Opened
from ..spec import Access

_PATIENCE = 10.0  # seconds to wait for what another thread is just closing


class Openings:
    """A table of open memory, which keeps none of it open: each user has a region of its own, and the last closes it.
    Nothing has to be taken out of it then, so no finalizer comes here (I3)."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # never taken by a finalizer
        self.known: dict[Hashable, Opened] = {}
        _all.add(self)

    def region(
        self,
        key: Hashable,
        nbytes: int | None,
        access: Access,
        depends: Sequence[Handle],
        enter: Callable[[], ForeignRegion],
    ) -> ForeignRegion:
        """Return a region over what is open under a key, or over what `enter` opens. Raises ProtocolError if it has
        other than `nbytes` bytes, where somebody said how many."""
        take(self.lock)
        try:
            for old, opened in self.known.copy().items():
                if opened.handle.is_over:
                    del self.known[old]
            found = self.known.get(key)
            if found is not None:
                real = found.infos[0].nbytes
                if found.handle.is_open and nbytes not in (None, real):
                    raise ProtocolError(f"{nbytes} bytes were said to be in an allocation of {real}")
                with suppress(ClosedError):  # the last one that used it went in this moment
                    return found.region(access, depends)
                for one in depends:
                    one.check()  # it was none of these that is closed
                # Another thread is closing it. A handle that the driver opens before the end of that is closed with it.
                deadline = time.monotonic() + _PATIENCE
                while not found.handle.is_over:
                    if time.monotonic() > deadline:
                        raise BusyError(f"{found.handle.label} is being closed, and that does not come to an end")
                    waiting(time.sleep, 0.0005)
            root = enter()
            try:
                opened = self.known[key] = root.opened
                return opened.region(access, depends)
            finally:
                root.close()  # from here on the regions alone keep it
        finally:
            self.lock.release()


_all: weakref.WeakSet[Openings] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for one in _all:  # a lock may have been held by a thread that does not exist here, where nothing is open
        one.lock = threading.RLock()
        one.known.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
