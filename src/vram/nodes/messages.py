"""Messages between a reader and a carrier: msgpack by msgspec, typed, bounded, versioned; never pickle.

A frame is four bytes of length and one message. The bytes of a piece follow the frame that announces them, as they are.
A layout is believed once :func:`check_layout` has looked at it (S7).
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ..arrays.dtypes import dtype_of
from ..errors import (
    AccessDeniedError,
    AsleepError,
    BusyError,
    NotFoundError,
    PeerError,
    PeerGoneError,
    ProtocolError,
    QuotaError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from ..sharing.descriptor import check_array_name, most_arrays
from ..spec import printable
from .digests import digest

PROTOCOL = 5
PIECE = 16 << 20  # bytes of a piece at most
MAX_FRAME = 16 << 20  # bytes of a message: a description of 100,000 arrays is shorter
MAX_GREETING = 512  # bytes of one from somebody who has not shown the key yet
MAX_REQUEST = (1 << 20) + 4096  # bytes of a reader's: what it asks an engine is the longest
MAX_PIECES = 1 << 20
AT_ONCE = 16  # digests in a message: each may have to be found out first, and a timeout is to be one of silence
_MOST = 2**47  # bytes: what a process has addresses for

_Size = Annotated[int, Meta(ge=0, le=_MOST)]
_Count = Annotated[int, Meta(ge=0, lt=2**62)]
_Number = Annotated[int, Meta(ge=0, lt=MAX_PIECES)]
_Name = Annotated[str, Meta(min_length=1, max_length=200)]
_Address = Annotated[str, Meta(max_length=300)]
_Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Mac = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Content = Annotated[bytes, Meta(max_length=16)]  # a digest of a whole version, or empty
MAX_WHY = 500  # characters of a reason
MAX_ENGINES = 8  # that a carrier has, tcp among them

_Engine = Annotated[str, Meta(max_length=32)]
_Data = Annotated[bytes, Meta(max_length=1 << 20)]


class Piece(NamedTuple):
    """A part of a replica: its number, and where it lies in the replica's memory, in bytes."""

    number: int
    offset: int
    nbytes: int


# -- the greeting -------------------------------------------------------------------------------------------------
class Hello(Struct, frozen=True, tag=True):
    """The first message of a reader: its protocol, a nonce, and the address of the carrier that it means.
    `machine` is the machine whose loopback address `place` is (:func:`~.address.machine_of`), else empty."""

    protocol: int
    nonce: _Nonce
    place: _Address = ""
    machine: Annotated[bytes, Meta(max_length=16)] = b""


class Challenge(Struct, frozen=True, tag=True):
    """The carrier's number used once."""

    nonce: _Nonce


class Proof(Struct, frozen=True, tag=True):
    """The sender has the key: an HMAC of all that was said before. The reader's comes first, then the carrier's."""

    mac: _Mac


class Refused(Struct, frozen=True, tag=True):
    """A request is refused; the connection goes on, unless it was a greeting."""

    kind: Annotated[str, Meta(max_length=32)]
    message: Annotated[str, Meta(max_length=4096)]


# -- what a reader asks ---------------------------------------------------------------------------------------------
class Open(Struct, frozen=True, tag=True):
    """A request to offer an entry; `layout` is the digest of what was opened before, and empty the first time.
    `puller` is the same on each connection of a reader, `serves` its address for others, `have` one bit a piece.
    `base_version` is what the reader has of this entry, and `base` the digest of all of that; empty for none. Of what
    is updated in place, the number of the update goes with the version."""

    name: _Name
    version: _Count
    updates: _Count
    puller: _Digest
    layout: Annotated[bytes, Meta(max_length=16)] = b""
    serves: _Address = ""
    have: Annotated[bytes, Meta(max_length=MAX_PIECES // 8)] = b""
    base_version: _Count = 0
    base_updates: _Count = 0
    base: _Content = b""


class Next(Struct, frozen=True, tag=True):
    """Which piece shall I get? `arrived` says whether the one before is here and right; None where there was none."""

    arrived: bool | None = None


class Fetch(Struct, frozen=True, tag=True):
    """Send me the bytes of a piece on this connection; a delta to the piece of a `base` will do as well."""

    number: _Number
    base: _Content = b""


class Digests(Struct, frozen=True, tag=True):
    """Tell me the digests of the next few pieces, from a number on."""

    first: _Number


class Ask(Struct, frozen=True, tag=True):
    """Something between the two halves of an engine."""

    engine: _Engine
    data: _Data


class Watch(Struct, frozen=True, tag=True):
    """Tell me when the current version of a name is another one than this, or updated, within so many seconds."""

    name: _Name
    version: _Count
    updates: _Count
    seconds: Annotated[float, Meta(ge=0, le=60)]


# -- what a carrier answers -----------------------------------------------------------------------------------------
class ArrayPlace(Struct, frozen=True, array_like=True):
    """One array: where in the replica's memory it lies (bytes), its element type's name and its shape."""

    offset: _Size
    nbytes: _Size
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[_Size, ...], Meta(max_length=64)]


class Opened(Struct, frozen=True, tag=True):
    """The layout of a replica; `updates` is 0 for what is not updated in place. `extents` are (offset, bytes),
    ascending; all other bytes are zero. By engine, `offers` has what the reader's half has to know, and `refusals` why
    it is not offered. With another `instance`, pieces that arrived before are compared with their digests. `whole` says
    why there are no deltas to the reader's base."""

    name: _Name
    version: Annotated[int, Meta(ge=1, lt=2**62)]
    updates: _Count
    instance: _Digest
    nbytes: _Size
    extents: tuple[tuple[_Size, _Size], ...]
    arrays: dict[str, ArrayPlace]
    meta: dict[str, str]
    offers: Annotated[dict[_Engine, _Data], Meta(max_length=MAX_ENGINES)]
    refusals: Annotated[dict[_Engine, Annotated[str, Meta(max_length=MAX_WHY)]], Meta(max_length=MAX_ENGINES)] = {}
    whole: Annotated[str, Meta(max_length=MAX_WHY)] = ""


class Direction(Struct, frozen=True):
    """An answer to :class:`Next`."""


class Assigned(Direction, frozen=True, tag=True):
    """Get this piece, which has this digest (xxh3-128): from the peer that is named, or from here."""

    number: _Number
    digest: _Digest
    peer: _Address = ""


class Wait(Direction, frozen=True, tag=True):
    """Others are getting what you lack, and you shall have it from them: ask again."""


class Finished(Direction, frozen=True, tag=True):
    """The reply that this reader lacks no piece that it is not getting; `others` says that other readers lack some."""

    others: bool = False


class PieceHead(Struct, frozen=True, tag=True):
    """The bytes of a piece follow, or `packed` bytes of a delta that gives it."""

    number: _Number
    nbytes: Annotated[int, Meta(ge=1, le=PIECE)]
    packed: Annotated[int, Meta(ge=0, le=PIECE // 2)] | None = None


class DigestList(Struct, frozen=True, tag=True):
    """Digests of pieces, from the number that was asked for."""

    digests: Annotated[tuple[_Digest, ...], Meta(max_length=AT_ONCE)]


class Answer(Struct, frozen=True, tag=True):
    """A message of the carrier's half of an engine."""

    data: _Data


class Newest(Struct, frozen=True, tag=True):
    """The current version, 0 if there is none, and its last update in place."""

    version: _Count
    updates: _Count = 0


Message: TypeAlias = (
    Hello | Challenge | Proof | Refused
    | Open | Next | Fetch | Digests | Ask | Watch
    | Opened | Assigned | Wait | Finished | PieceHead | DigestList | Answer | Newest
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(data: bytes | bytearray) -> Message:
    """Return a message. Raises ProtocolError if it is none."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a message that nobody says here: {error!s:.200}") from None


# -- errors that travel ---------------------------------------------------------------------------------------------
_KINDS: dict[str, type[VramError]] = {
    "access": AccessDeniedError,
    "asleep": AsleepError,
    "busy": BusyError,
    "gone": PeerGoneError,
    "late": WaitTimeoutError,
    "not found": NotFoundError,
    "protocol": ProtocolError,
    "quota": QuotaError,
}


def refusal(error: VramError) -> Refused:
    """Return how a carrier says an error."""
    kind = next((kind for kind, known in _KINDS.items() if isinstance(error, known)), "other")
    return Refused(kind, printable(str(error)[:4000]))


def refused(said: Refused, where: str) -> VramError:
    """Return the error for a refusal, said by whoever is at `where`."""
    return _KINDS.get(said.kind, PeerError)(f"{where}: {printable(said.message)}")


# -- the layout of a replica ----------------------------------------------------------------------------------------
def cut(extents: tuple[tuple[int, int], ...]) -> tuple[Piece, ...]:
    """Return the pieces that extents are sent in: each lies in one of them."""
    pieces: list[Piece] = []
    for offset, nbytes in extents:
        for at in range(0, nbytes, PIECE):
            pieces.append(Piece(len(pieces), offset + at, min(PIECE, nbytes - at)))
    return tuple(pieces)


def check_layout(opened: Opened) -> tuple[Piece, ...]:
    """Return the pieces of an offer. Raises ProtocolError if it contradicts itself or exceeds the limits."""
    end = count = 0
    for offset, nbytes in opened.extents:
        if offset < end or not nbytes or offset + nbytes > opened.nbytes:
            raise ProtocolError(f"bytes {offset} to {offset + nbytes} of a replica of {opened.nbytes}, after {end}")
        end = offset + nbytes
        count += -(-nbytes // PIECE)
    if count > MAX_PIECES:
        raise ProtocolError(f"a replica of {count} pieces; at most {MAX_PIECES} are read")
    if len(opened.arrays) > most_arrays(opened.nbytes):
        raise ProtocolError(f"{len(opened.arrays)} arrays in a replica of {opened.nbytes} bytes")
    for name, place in opened.arrays.items():
        try:
            check_array_name(name)
            size = dtype_of(place.dtype).itemsize * math.prod(place.shape)
        except UsageError as error:
            raise ProtocolError(f"array {name!r:.80} is described wrongly: {error}") from None
        if place.nbytes != size or place.offset + size > opened.nbytes:
            raise ProtocolError(
                f"array {name!r:.80} of {place.shape} {place.dtype} is said to have {place.nbytes} bytes from "
                f"{place.offset} on, of {opened.nbytes}"
            )
    return cut(opened.extents)


def layout_digest(opened: Opened) -> bytes:
    """Return what two offers have in common exactly if one can go on where the other was broken off."""
    layout: tuple[object, ...] = (opened.name, opened.version, opened.updates, opened.nbytes, opened.extents)
    arrays = [(name, place.offset, place.nbytes, place.dtype, place.shape) for name, place in opened.arrays.items()]
    return digest(encode((layout, arrays, sorted(opened.meta.items()))))
