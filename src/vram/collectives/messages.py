"""Messages between the ranks of a group during its set-up, by way of the hub in the process of rank 0.

Bytes of buffers never go this way, nor what a collective says once it runs: that is in shared memory.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

PROTOCOL = 2
MAX_RANKS = 64
MAX_DATA = 32 * 1024  # bytes of what one rank says in one vote
FORMING = 0  # the stage before the first vote: all ranks have come

Rank = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Ranks = Annotated[tuple[Rank, ...], Meta(max_length=MAX_RANKS)]
Stage = Annotated[int, Meta(ge=0, le=2**62)]
Text = Annotated[str, Meta(max_length=2000)]
Data = Annotated[bytes, Meta(max_length=MAX_DATA)]


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """To the hub, first: who comes, and what it takes the group for."""

    protocol: int
    name: Annotated[str, Meta(max_length=128)]
    rank: int
    size: int


class Present(Struct, frozen=True, array_like=True, tag="present"):
    """To all who have come: these have."""

    ranks: Ranks


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """To one who has come: it is none of this group, or there is none that it could be of."""

    why: Text


class Formed(Struct, frozen=True, array_like=True, tag="formed"):
    """To all: everybody is here, the processes with these numbers (0: in a namespace that the hub does not see)."""

    pids: Annotated[tuple[int, ...], Meta(max_length=MAX_RANKS)]


class Vote(Struct, frozen=True, array_like=True, tag="vote"):
    """To the hub: what this rank says in a stage of the set-up; descriptors come with it."""

    stage: Stage
    data: Data


class Came(Struct, frozen=True, array_like=True, tag="came"):
    """To all, once all have voted in a stage: the votes, by rank, in as few messages as they fit into. Each is said
    with the number of its descriptors, which come with it, but for those of the rank itself."""

    stage: Annotated[int, Meta(gt=FORMING, le=2**62)]
    votes: Annotated[tuple[tuple[Data, Annotated[int, Meta(ge=0)]], ...], Meta(max_length=MAX_RANKS)]


class Abandon(Struct, frozen=True, array_like=True, tag="abandon"):
    """To the hub: this rank waits no longer for a stage. The hub says what came of it."""

    stage: Stage


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """To all: a stage is over, and not done, since one rank waits no longer for those that are missing."""

    stage: Stage
    by: Rank
    missing: Ranks


class Gone(Struct, frozen=True, array_like=True, tag="gone"):
    """To all: a rank has left the group, or its connection has ended."""

    rank: Rank
    left: bool


class Leave(Struct, frozen=True, array_like=True, tag="leave"):
    """To the hub: this rank leaves."""


encode = msgspec.msgpack.Encoder().encode
decode_to_hub = msgspec.msgpack.Decoder(Hello | Vote | Abandon | Leave).decode
decode_from_hub = msgspec.msgpack.Decoder(Present | Refused | Formed | Came | Failed | Gone).decode
