"""Votes of a group: what each rank says of a set-up call, and what becomes of it where all have said the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ..errors import PeerError, ProtocolError, UsageError, VramError
from ..open_files import close_fds
from ..sharing.descriptor import MemoryDescriptor
from .captured import SharedArray
from .spoke import Said, Spoke, until


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """One rank's statement in a vote: the call, its arguments, and the result of its part or why there is none."""

    call: str
    about: str
    failure: str = ""
    memory: MemoryDescriptor | None = None
    arrays: tuple[SharedArray, ...] = ()


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Offer).decode


class DisagreementError(UsageError):
    """The ranks called different things: all of them have heard so, and can go on."""


def agree(
    spoke: Spoke,
    call: str,
    about: str,
    failure: VramError | None = None,
    memory: MemoryDescriptor | None = None,
    fds: Sequence[int] = (),
    arrays: Sequence[SharedArray] = (),
    *,
    deadline: float,
    meanwhile: Callable[[], object] | None = None,
) -> list[tuple[Offer, list[int]]]:
    """Vote; return what all ranks said if they called the same and none has failed. The caller closes the offers.
    `meanwhile` is called while the vote is on its way."""
    why = "" if failure is None else f"{type(failure).__name__}: {failure}"[:1000]
    offer = Offer(call, about, why, memory, tuple(arrays))
    said = spoke.vote(encode(offer), fds, until(deadline), meanwhile)
    try:
        offers = [_offer_of(rank, one) for rank, one in enumerate(said)]
        if failure is not None:
            raise failure
        _check_offers(offers, spoke.rank, spoke.name)
    except BaseException:
        close_said(said)
        raise
    return [(offer, fds) for offer, (_, fds) in zip(offers, said, strict=True)]


def _check_offers(offers: Sequence[Offer], own_rank: int, name: str) -> None:
    """Raise unless all ranks called the same, and could."""
    mine = offers[own_rank]
    for rank, other in enumerate(offers):
        if other.failure:
            raise PeerError(f"rank {rank} of the group {name!r} could not: {other.failure}")
    for rank, other in enumerate(offers):
        if (other.call, other.about) != (mine.call, mine.about):
            raise DisagreementError(
                f"the ranks of the group {name!r} do not agree: rank {rank} called {other.call} ({other.about}), rank "
                f"{own_rank} called {mine.call} ({mine.about})"
            )


def use_offers(said: Sequence[tuple[Offer, list[int]]], act: Callable[[], None]) -> VramError | None:
    """Call what needs the descriptors of all ranks, close them, and return what went wrong: for the next vote."""
    try:
        act()
    except VramError as error:
        return error
    finally:
        close_said(said)
    return None


def close_said(said: Sequence[tuple[object, list[int]]]) -> None:
    """Close the descriptors that came with a vote."""
    for _, fds in said:
        close_fds(fds)


def _offer_of(rank: int, said: Said) -> Offer:
    try:
        return _decode(said[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"rank {rank} says what no rank of a group does: {error}") from None
