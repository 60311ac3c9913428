"""A replica that is kept at the newest version of its origin."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ..entries.keepers import TIMEOUT, check_flag
from ..entries.keepers import connect as connect_keeper
from ..errors import BusyError, NotFoundError, PeerGoneError, WaitTimeoutError
from ..keeper.rules import check_name
from ..spec import Location, check_timeout
from . import messages as m
from .address import parse_address, read_key
from .connection import connect
from .digests import check_installed, content
from .engine import Engine
from .in_place import InPlace
from .replicate import STREAMS, Replicated, check_origin, check_streams, replicate

if TYPE_CHECKING:
    from ..keeper.private import Keeper

__all__ = ["follow"]

_WATCH = 20.0  # seconds of one question for a newer version; the answer comes as soon as there is one
_ANSWER = 5.0  # seconds that whoever listens has to answer
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 2.0  # seconds between two tries to reach the carrier


def follow(
    address: str,
    name: str,
    *,
    device: str | Location = "host",
    key: str | os.PathLike[str] | None = None,
    streams: int = STREAMS,
    share: bool = True,
    engines: Sequence[Engine] = (),
    in_place: bool = False,
    timeout: float | None = TIMEOUT,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Iterator[Replicated]:
    """Keep a replica at the newest version: yield what :func:`vram.replicate` returns, for each version that came.

    Versions that were replaced before they were asked for are left out. Bytes that are here already are
    not transferred again, also after the carrier began anew. An entry that is removed there stays here, and is waited
    for. An update in place by its publisher (:func:`vram.update`) comes as a version does. It ends with the loop::

        for done in follow("10.0.0.7:7070", "policy"):
            print(done.origin_version)

    Parameters
    ----------
    in_place : bool
        Publish one version here, with ``updatable=True, swap=True``, and update that in place as long as the layout
        stays: the addresses that readers have stay, they wait for nobody, and :meth:`Lease.wait` tells them. It takes
        twice the memory, and this process has to stay; if it ends, the entry stays as it is until it is followed again.
    timeout : float or None
        Seconds that the carrier may be gone; None waits for ever. With `in_place` also for readers of the version
        before the last to leave their sections.
    address, name, device, key, streams, share, engines, keeper
        As of :func:`vram.replicate`.

    Raises
    ------
    PeerGoneError, WaitTimeoutError, BusyError
        If the carrier was not reached for `timeout` seconds; if an update there, or a reader here, was in the way.

    The others are those of :func:`vram.replicate`.
    """
    check_installed()
    check_name(name)
    parse_address(address)
    secret, seconds = read_key(key), check_timeout(timeout)
    client = connect_keeper(keeper)
    kept: InPlace | None = None
    if check_flag(in_place, "in_place"):
        kept = InPlace(
            address, secret, name, client, Location.parse(device), streams=check_streams(streams), timeout=seconds,
            engines=engines, share=check_flag(share, "share"),
        )  # fmt: skip

    pause, reached, is_watching = _FIRST_PAUSE, time.monotonic(), False
    while True:
        try:
            here = check_origin(client, name, address).get("origin_content", "") if kept is None else kept.content
            state = _state_of(here, address, name, secret)
            with connect(address, secret, _ANSWER) as link:
                while True:
                    is_watching = True
                    newest = link.request(m.Watch(name, *state, _WATCH), m.Newest, _WATCH + _ANSWER)
                    pause, is_watching = _FIRST_PAUSE, False
                    if not newest.version or (newest.version, newest.updates) == state:
                        reached = time.monotonic()
                        continue
                    with contextlib.suppress(NotFoundError):  # it has just gone
                        if kept is not None:
                            done = kept.renew()
                        else:
                            done = replicate(
                                address, name, device=device, key=key, streams=streams, share=share, engines=engines,
                                timeout=timeout, keeper=client.path,
                            )  # fmt: skip
                        state = done.origin_version, done.origin_updates
                        yield done
                    reached = time.monotonic()
        except (PeerGoneError, WaitTimeoutError, BusyError):
            if is_watching:  # the answer before may be long ago
                reached, is_watching = time.monotonic(), False
            if seconds is not None and time.monotonic() - reached >= seconds:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE)


def _state_of(here: str, address: str, name: str, key: bytes) -> tuple[int, int]:
    """Return the current version of the carrier, and its updates, if its digest is that of what is here; else (0, 0).
    A carrier may have begun anew, and count as before."""
    if not here:
        return 0, 0
    with connect(address, key, _ANSWER) as link, contextlib.suppress(NotFoundError):
        opened = link.request(m.Open(name, 0, 0, secrets.token_bytes(16)), m.Opened, _ANSWER)
        digests = link.digests(len(m.check_layout(opened)), _ANSWER)
        if content(m.layout_digest(opened), digests) == here:
            return opened.version, opened.updates
    return 0, 0
