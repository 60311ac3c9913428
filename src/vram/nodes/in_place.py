"""A replica that is updated in place, as its origin goes on: one version here, in two slots.

A new state is pulled into the slot that is not current, by deltas to the one that is. So no reader waits, none sees a
piece that was not checked, and nothing is torn when a transfer breaks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..arrays.views import close_when_unused
from ..entries.attach import attach
from ..entries.keepers import current_of
from ..entries.publish import publish_loaded
from ..entries.reading import ask_writer
from ..entries.update import update
from ..errors import AccessDeniedError, NotFoundError
from ..memory import Region
from ..memory.long_work import long_work
from . import messages as m
from .delta_engine import NO_BASE, Base
from .pull import Pull, ReplacedError
from .replicate import Replicated, check_origin, entries, make_room, result, with_origin

if TYPE_CHECKING:
    from ..keeper.client import KeeperClient
    from ..spec import Location
    from .engine import Engine


_PASSING = ("origin_version", "origin_updates", "origin_content")  # notes that do not stay so


class InPlace:
    """The replica of one name, which this process alone updates. `secret` is the key's bytes."""

    def __init__(
        self, address: str, secret: bytes, name: str, client: KeeperClient, location: Location, *, streams: int,
        timeout: float | None, engines: Sequence[Engine], share: bool,
    ) -> None:  # fmt: skip
        self._address, self._secret, self._name, self._client = address, secret, name, client
        self._location, self._streams, self._timeout = location, streams, timeout
        self._engines, self._share = engines, share
        self._base: Base = NO_BASE
        self._version = 0  # here
        self._layout: object = None
        self._regions: list[Region] = []

    @property
    def content(self) -> str:
        """The digest of what is here; empty for nothing."""
        return "" if self.state == (0, 0) else self._base[2].hex()

    @property
    def state(self) -> tuple[int, int]:
        """The version of the origin that is here, and its updates; (0, 0) for none."""
        row = current_of(self._client, self._name) if self._version else None
        if row is None or row.version != self._version:
            self._base = NO_BASE
        return self._base[:2]

    def renew(self) -> Replicated:
        """Pull what is current there, and have it here."""
        while True:
            with contextlib.suppress(ReplacedError):  # else: once more, with what is current now
                is_here = self.state != (0, 0)
                with Pull(
                    self._address, self._secret, self._name, 0, timeout=self._timeout, engines=self._engines,
                    share=self._share, base=self._base,
                ) as pull:  # fmt: skip
                    opened = pull.open()
                    notes = {key: value for key, value in opened.meta.items() if key not in _PASSING}
                    layout = opened.nbytes, opened.extents, opened.arrays, notes
                    if is_here and layout == self._layout:
                        self._update(pull, opened)
                    else:
                        self._publish(pull, opened)
                    self._layout = layout
                    self._base = opened.version, opened.updates, bytes.fromhex(pull.content())
                    pull.linger()
                    return result(pull, opened, self._address, self._version)

    def _update(self, pull: Pull, opened: m.Opened) -> None:
        # A reader that stays in its section of the version before the last is named by the error.
        with update(self._name, timeout=self._timeout, keeper=self._client.path) as arrays:
            (into,) = {arrays[name].region for name in arrays}  # all of them are written
            base = self._regions[self._regions.index(into) - 1]
            pull.use_deltas(self._client.path, opened.whole, base)
            with long_work(f"updating {self._name}", pull.nbytes, pull.arrived):
                pull.fill(into, self._streams)

    def _publish(self, pull: Pull, opened: m.Opened) -> None:
        self._check_nobody_else()
        meta = {key: value for key, value in with_origin(opened, self._address).items() if key not in _PASSING}
        regions = make_room(self._client, self._name, self._location, opened.nbytes, meta, 2)
        try:
            with long_work(f"replicating {self._name}", pull.nbytes, pull.arrived):
                pull.fill(regions[0], self._streams)
            check_origin(self._client, self._name, self._address)  # others may have published it meanwhile
            published = publish_loaded(
                self._client, self._name, regions[0], entries(opened), meta=meta, writable=False, ttl=None,
                updatable=True, spare=regions[1],
            )  # fmt: skip
        finally:
            close_when_unused(regions[1])  # as the pull does with the first
        self._regions, self._version = regions, published.version

    def _check_nobody_else(self) -> None:
        """Raise if something else is here, or another process that lives updates this in place."""
        check_origin(self._client, self._name, self._address)
        if self.state != (0, 0):
            return
        with contextlib.suppress(NotFoundError), attach(self._name, keeper=self._client.path) as lease:
            if lease._words is not None and ask_writer(self._client, lease._attachment, lease._words)[0]:
                raise AccessDeniedError(
                    f"{self._name!r} is updated in place by another process: end that (vram show has its "
                    f"pid), or follow without in_place"
                )
