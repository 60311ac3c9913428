"""Which transport to take between two places: what there is, ranked by what was measured, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..errors import UnsupportedError, UsageError, VramError
from ..lifetime import shielded
from ..memory.kinds import BY_MAKER
from ..spec import Location, format_size, parse_size
from .contract import Estimate, No
from .endpoint import Transport
from .exchanges import Exchange
from .local import LocalTransport, PeerTransport
from .places import name_place
from .remote import IpcTransport, RemoteTransport, VmmTransport
from .shm import ShmTransport
from .staged import StagedTransport

_Made = type[LocalTransport | RemoteTransport]
# Of equals the first is taken: what needs no host before what does, what outlives its maker before the rest.
TRANSPORTS: tuple[_Made, ...] = (
    PeerTransport, StagedTransport, VmmTransport, IpcTransport, ShmTransport,
)  # fmt: skip
_registered: list[_Made] = []


def register(cls: _Made) -> None:
    """Have :func:`select` judge a transport of one's own beside this library's.

    ``vram.testing.TransportContract`` is what it must keep. It is measured like the others and taken where it is the
    fastest; of equals, those of this library are taken first.

    `cls` is a subclass of :class:`LocalTransport`, for places in one process, or of :class:`RemoteTransport`, for two;
    its ``kind`` is its name in a ranking. Raises UsageError if it is neither, lacks a method that it must have, has no
    kind, or one that is another transport's.
    """
    if not isinstance(cls, type) or not issubclass(cls, (LocalTransport, RemoteTransport)):
        raise UsageError(f"{cls!r:.80} is no subclass of LocalTransport or RemoteTransport")
    if cls in _registered:
        return
    if lacking := sorted(getattr(cls, "__abstractmethods__", ())):
        raise UsageError(f"{cls.__name__} has no {', '.join(lacking)}, which a transport must have")
    if not isinstance(getattr(cls, "kind", None), str) or not cls.kind:
        raise UsageError(f"{cls.__name__} has no kind, the name of a transport in a ranking, such as kind = 'mine'")
    if any(cls.kind == other.kind for other in _all()):
        raise UsageError(f"a transport of kind {cls.kind!r} is known already: give {cls.__name__} a kind of its own")
    _registered.append(cls)


def _all() -> tuple[_Made, ...]:
    return (*TRANSPORTS, *_registered)


@dataclass(frozen=True, slots=True)
class Ranked:
    """One transport between two places, as it was judged.

    `reason` says why it is where it is in the ranking, or why it cannot be taken; `estimate` is what was measured, None
    if it works between these places in no way, and `seconds` what the transfer asked about should take by that.
    """

    kind: str
    is_available: bool
    reason: str
    estimate: Estimate | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Selection:
    """The transports between two places, the fastest first, then those that cannot be taken. Made by :func:`select`.

    `nbytes` is the size in bytes of the transfer that was asked about, `routes` are all transports that there are.
    """

    src: Location
    dst: Location
    nbytes: int
    routes: tuple[Ranked, ...]
    exchange: Exchange | None = None

    @property
    def best(self) -> Ranked:
        """The fastest that is available. Raises UnsupportedError if there is none, with the reason of each."""
        first = self.routes[0]
        if not first.is_available:
            raise UnsupportedError(
                f"moving bytes from {self.src} to {self.dst}", "a transport between the two",
                "; ".join(f"{route.kind}: {route.reason}" for route in self.routes),
            )  # fmt: skip
        return first

    def transport(self) -> Transport:
        """Make the fastest. Close it; it takes over the exchange that was given to :func:`select`."""
        kind = self.best.kind
        cls = next(cls for cls in _all() if cls.kind == kind)
        if issubclass(cls, RemoteTransport):
            if self.exchange is None:
                raise UsageError(f"the {kind} transport takes an exchange")
            return cls(self.src, self.dst, self.exchange)
        return cls(self.src, self.dst)


@shielded
def select(
    src: Location | str,
    dst: Location | str,
    *,
    nbytes: int | str = "64MiB",
    exchange: Exchange | None = None,
    memory: Literal["vmm", "legacy", "pool"] = "vmm",
) -> Selection:
    """Rank the transports between two places by measured speed, and say of each why.

    A transport that was not measured before in this process is measured now, which takes memory of 64 MiB and some
    milliseconds.

    Parameters
    ----------
    src, dst : Location or str
        From where to where.
    nbytes : int or str
        The size of a transfer, in bytes: for small ones latency decides, for large ones bandwidth.
    exchange : Exchange, optional
        The exchange that leads to the other process, for a transport between two. Without one both places are in this
        process.
    memory : {"vmm", "legacy", "pool"}
        Between two processes: what made the memory. ``"vmm"`` is what vram makes, ``"legacy"`` that of cudaMalloc,
        ``"pool"`` that of a pool that can be shared.

    Raises
    ------
    UsageError
        For text that names no place or no size.
    """
    size = parse_size(nbytes, what="nbytes")
    if memory not in BY_MAKER:
        raise UsageError(f'memory is "vmm", "legacy" or "pool", not {memory!r:.40}')
    if exchange is not None and not hasattr(exchange, "carries_fds"):
        raise UsageError(f"{exchange!r:.60} is no exchange: SocketExchange, PipeExchange and SharedMemoryExchange are")
    here, there = _named(src), _named(dst)
    judged = [_judge(cls, here, there, size, exchange, memory) for cls in _all()]
    usable = sorted((r for r in judged if r.is_available), key=lambda route: route.seconds or 0.0)
    ranked = []
    for route in usable:
        times = (route.seconds or 0.0) / (usable[0].seconds or 1.0)
        said = "the fastest" if route is usable[0] else f"slower: {times:.1f} times as long"
        ranked.append(replace(route, reason=f"{said} for {format_size(size)}, as measured here"))
    ranked += [route for route in judged if not route.is_available]
    return Selection(here, there, size, tuple(ranked), exchange)


def _judge(cls: _Made, src: Location, dst: Location, nbytes: int, exchange: Exchange | None, memory: str) -> Ranked:
    answer = cls.available(src, dst)
    if isinstance(answer, No):
        return Ranked(cls.kind, False, answer.reason)
    try:
        estimate = cls.measure(src, dst)
    except VramError as error:
        return Ranked(cls.kind, False, f"it could not be measured: {error}")
    if not issubclass(cls, RemoteTransport):
        why_not = "" if exchange is None else "it is within one process, and the exchange leads to another"
    elif exchange is None:
        why_not = "it is between two processes: it needs an exchange between them, select(..., exchange=...)"
    else:
        why_not = cls.refusal(memory, exchange, src, dst)
    return Ranked(cls.kind, not why_not, why_not, estimate, estimate.seconds(nbytes))


def _named(place: Location | str) -> Location:
    """The place as this process names it, or as it was written where that is nowhere."""
    try:
        return name_place(place)
    except UnsupportedError:
        return Location.parse(place)
