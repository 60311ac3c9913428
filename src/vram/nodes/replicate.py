"""Replicas: an entry of another node's keeper, pulled piece by piece, checked, and published here in one step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, overload

from ..entries.attach import attach
from ..entries.keepers import TIMEOUT, check_flag
from ..entries.keepers import connect as connect_keeper
from ..entries.lease import Lease
from ..entries.publish import publish_loaded
from ..errors import AccessDeniedError, MismatchError, NotFoundError, ProtocolError, UsageError
from ..keeper.client import KeeperClient
from ..keeper.rules import check_meta, check_name
from ..lifetime import shielded
from ..memory import Region
from ..memory.long_work import long_work
from ..sharing.descriptor import ArrayEntry
from ..spec import HOST, Location, check_timeout, round_up
from . import messages as m
from .address import parse_address, read_key
from .delta_engine import base_of
from .digests import check_installed
from .engine import Engine
from .pull import Pull, ReplacedError

if TYPE_CHECKING:
    from ..keeper.private import Keeper

STREAMS = 2  # connections that pieces come over at the same time
_PARTS, _LEAST_PART = 4, 64 << 20  # memories of a replica on the host, and bytes of each at least


@dataclass(frozen=True, slots=True)
class Replicated:
    """The result of :func:`replicate`.

    Attributes
    ----------
    name, version : str, int
        The name to attach here.
    origin, origin_version, origin_updates : str, int, int
        The carrier it came from, the version there, and its last update in place (0 for what is not updated so).
    arrays, nbytes : int
        How many arrays, and the bytes that were transferred for them.
    seconds : float
        How long the transfer took, without the publication.
    engine : str
        The engine that moved the bytes.
    rates : dict of str to float
        Bytes a second of the piece that each engine was measured with; empty where only one was offered.
    why : dict of str to str
        By name of the engine: why it was not used, or did not move the bytes in its fastest way. Engines that did have
        no key. ``"delta"`` says why a piece came whole although the version before is here.
    from_peers : int
        Bytes of `nbytes` that came from other readers.
    reconnected : int
        How many connections broke and were made anew.
    delta_bytes : int
        Bytes that came in place of pieces, as deltas to the version before; 0 if none did.
    """

    name: str
    version: int
    origin: str
    origin_version: int
    arrays: int
    nbytes: int
    seconds: float
    engine: str
    rates: dict[str, float] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    from_peers: int = 0
    reconnected: int = 0
    delta_bytes: int = 0
    origin_updates: int = 0


@overload
def replicate(
    address: str,
    name: str,
    *,
    device: str | Location = ...,
    version: int | None = ...,
    key: str | os.PathLike[str] | None = ...,
    streams: int = ...,
    share: bool = ...,
    engines: Sequence[Engine] = ...,
    if_missing: Literal[False] = ...,
    timeout: float | None = ...,
    keeper: Keeper | str | os.PathLike[str] | None = ...,
) -> Replicated: ...


@overload
def replicate(
    address: str,
    name: str,
    *,
    device: str | Location = ...,
    version: int | None = ...,
    key: str | os.PathLike[str] | None = ...,
    streams: int = ...,
    share: bool = ...,
    engines: Sequence[Engine] = ...,
    if_missing: Literal[True],
    timeout: float | None = ...,
    keeper: Keeper | str | os.PathLike[str] | None = ...,
) -> Lease: ...


@shielded
def replicate(
    address: str,
    name: str,
    *,
    device: str | Location = "host",
    version: int | None = None,
    key: str | os.PathLike[str] | None = None,
    streams: int = STREAMS,
    share: bool = True,
    engines: Sequence[Engine] = (),
    if_missing: bool = False,
    timeout: float | None = TIMEOUT,
    keeper: Keeper | str | os.PathLike[str] | None = None,
) -> Replicated | Lease:
    """Pull an entry from the carrier of another node (``vram carry``), and publish it here under the same name.

    It comes in pieces of 16 MiB at most, and each is checked by its digest. It is published in one step when all are
    right: nobody sees a half. Its `meta` is that of the origin, with ``origin``, ``origin_version`` and
    ``origin_content`` (a digest of all of it) added. A connection that breaks is made anew, and only missing pieces are
    sent again. Readers that pull the same version at the same time pass pieces on to each other. If a
    version from this origin is here, a carrier with deltas sends what changed. For example::

        vram.replicate("10.0.0.7:7070", "model", key="/etc/vram/key")

    Parameters
    ----------
    address : str
        Where the carrier listens, ``HOST:PORT``.
    name : str
        The entry's name, there and here.
    device : str
        Where to keep it: ``"host"``, or a GPU, such as ``"cuda:0"``.
    version : int, optional
        A particular version; by default the current one.
    key : path-like, optional
        The file with the key that all nodes have in common, by default ``$VRAM_NODES_KEY``. It has to be readable by
        its user alone. Without one only loopback addresses are connected to, and there only a carrier of this user,
        who shows a key of this user's own.
    streams : int
        Connections that pieces come over at the same time, 1 to 64.
    share : bool
        Give pieces on to other readers of the same version, as long as this call lasts, at the address by which the
        carrier is reached. Without a key nobody does.
    engines : sequence of Engine, optional
        Engines besides tcp that may move the bytes, if the carrier offers it. Each is measured with a piece, and the
        fastest one moves the rest; the result says which.
    if_missing : bool
        Return a lease on what is here: attached if it is here from this origin, else replicated first. Of several
        processes that do this at the same time each that finds nothing pulls.
    timeout : float or None
        Seconds without progress: until a carrier answers, and then from one piece to the next. None waits for ever.
    keeper : Keeper, str or PathLike, optional
        The keeper to give it to; see :func:`vram.attach`.

    Returns
    -------
    Replicated
        The version, and how it came; with `if_missing` a :class:`Lease`.

    Raises
    ------
    UsageError
        For an address, name, version, number or device that cannot be, or `meta` without room for the origin.
    NotFoundError
        If the carrier has no such entry or version.
    MismatchError
        If the name exists here, and is not a replica from this address.
    AccessDeniedError
        If the keys differ, or the carrier may not, or does not, offer that; without a key for another machine. Also
        if the name here belongs to another user, but with `if_missing` to root.
    PeerGoneError, WaitTimeoutError
        If the carrier, or the keeper here, was not there, or there was no progress within `timeout` seconds.
    ProtocolError
        If the carrier contradicts itself, or a piece is wrong each time that it comes.
    QuotaError, OutOfMemoryError
        If there is no room here: before anything is transferred.
    BusyError
        If an update in place there was begun and not finished.
    UnsupportedError
        If ``vram[nodes]`` is not installed.

    If it raises, nothing has been published.
    """
    check_installed()
    check_name(name)
    parse_address(address)
    location = Location.parse(device)
    check_streams(streams)
    if version is not None and (type(version) is not int or version < 1):
        raise UsageError(f"version must be a number from 1 on, not {version!r:.40}")
    share, if_missing = check_flag(share, "share"), check_flag(if_missing, "if_missing")
    seconds = check_timeout(timeout)
    secret = read_key(key)
    client = connect_keeper(keeper)
    is_here = check_origin(client, name, address)
    if if_missing and is_here:
        with contextlib.suppress(NotFoundError):  # it has just gone
            return attach(name, keeper=client.path)
    while True:
        try:
            with Pull(
                address, secret, name, version or 0,
                timeout=seconds, engines=engines, share=share, base=base_of(is_here),
            ) as pull:  # fmt: skip
                done = _replicate(pull, address, name, client, location, streams)
        except ReplacedError:
            if version is not None:
                raise
            continue  # with the version that is current now
        return attach(name, keeper=client.path) if if_missing else done


def check_streams(streams: object) -> int:
    """Return a number of connections, or raise UsageError."""
    if type(streams) is not int or not 1 <= streams <= 64:
        raise UsageError(f"streams must be 1 to 64 connections, not {streams!r:.40}")
    return streams


def _replicate(
    pull: Pull, address: str, name: str, client: KeeperClient, location: Location, streams: int
) -> Replicated:
    opened = pull.open()
    pull.use_deltas(client.path, opened.whole)
    meta = with_origin(opened, address)
    (region,) = make_room(client, name, location, opened.nbytes, meta)
    with long_work(f"replicating {name}", pull.nbytes, pull.arrived):
        pull.fill(region, streams)
    check_origin(client, name, address)  # others may have published it meanwhile
    meta["origin_content"] = pull.content()
    arrays = entries(opened)
    published = publish_loaded(client, name, region, arrays, meta=meta, writable=False, ttl=None, updatable=False)
    pull.linger()
    return result(pull, opened, address, published.version)


def make_room(
    client: KeeperClient, name: str, location: Location, nbytes: int, meta: dict[str, str], count: int = 1
) -> list[Region]:
    """Ask the keeper for room for replicas, and make their regions, on the host of several memories: the kernel adds
    the pages of one under one lock."""
    nbytes = max(nbytes, 1)  # an entry of empty arrays has memory, too
    chunk = round_up(max(-(-nbytes // _PARTS), _LEAST_PART) if location == HOST else nbytes, m.PIECE)
    client.offer(name, count * nbytes, handles=count * -(-nbytes // chunk), meta=meta)
    # They are sealed in the end: what is forked while it comes in is not to have it mapped.
    return [
        Region.create(location, capacity=nbytes, nbytes=nbytes, chunk=chunk, inherited=False, managed=True)
        for _ in range(count)
    ]


def entries(opened: m.Opened) -> dict[str, ArrayEntry]:
    """Return the arrays of a replica, in its one memory."""
    return {
        called: ArrayEntry(0, place.offset, place.nbytes, place.dtype, place.shape)
        for called, place in opened.arrays.items()
    }


def result(pull: Pull, opened: m.Opened, address: str, version: int) -> Replicated:
    """Return how a replica came, which is this version here."""
    return Replicated(
        opened.name, version, address, opened.version, len(opened.arrays), pull.nbytes, pull.seconds, pull.engine,
        pull.rates, pull.why, pull.from_peers, pull.reconnected, pull.delta_bytes, opened.updates,
    )  # fmt: skip


def with_origin(opened: m.Opened, address: str) -> dict[str, str]:
    """Return the metadata of a replica: the origin's own, its address and version, and room for the content digest."""
    try:
        meta = dict(check_meta(opened.meta))
    except UsageError as error:
        raise ProtocolError(f"{address} says of {opened.name!r} what no entry can say: {error}") from None
    meta.pop("origin_updates", None)  # of an origin that is a replica itself
    room = "0" * 32  # for what is known once all has come
    updates = {"origin_updates": str(opened.updates)} if opened.updates else {}
    known = {"origin": address, "origin_version": str(opened.version), "origin_content": room, **updates}
    return check_meta({**meta, **known})


def check_origin(client: KeeperClient, name: str, address: str) -> dict[str, str]:
    """Return the metadata of the replica from `address` that is here; empty if the name has no version.
    Raises AccessDeniedError if another user than root owns the name, MismatchError if something else has it."""
    try:
        shown = client.show(name)
    except NotFoundError:
        return {}
    if not shown.version:
        return {}
    if shown.owner not in (0, os.geteuid()):  # it may say of itself what it likes
        raise AccessDeniedError(
            f"{name!r} exists here, and belongs to uid {shown.owner}, who may have made it up: take what vram.attach "
            f"returns, if that user is to be trusted, or another name"
        )
    origin = shown.meta.get("origin")
    if origin != address:
        what = "was not replicated" if origin is None else f"is a replica from {origin!r:.80}"
        raise MismatchError(
            f"{name!r} exists here, and {what}: remove it, or replicate it from where it came",
            {"origin": address}, dict(shown.meta),
        )  # fmt: skip
    return dict(shown.meta)
