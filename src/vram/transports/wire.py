"""What the two ends of a transport between processes say to each other. Data, bounded; nothing is believed (S1, S7)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ..errors import ProtocolError
from ..handover.messages import Part

__all__ = [
    "MAX_UNMAPPED",
    "VERSION",
    "WINDOW",
    "Allocation",
    "Hello",
    "NextPart",
    "Received",
    "Sent",
    "Unmap",
    "decode",
    "encode",
]

VERSION = 1
WINDOW = 64  # messages that were sent and not received: then the sender waits
MAX_UNMAPPED = 256  # memories in one message, so that it fits into a pipe's

_Size = Annotated[int, Meta(ge=0, le=2**62)]
_Id = Annotated[int, Meta(gt=0, le=2**62)]


class Hello(Struct, frozen=True, array_like=True, tag="h"):
    """The first message of each end: which transport it is, and which version of it."""

    version: _Size
    kind: Annotated[str, Meta(max_length=32)]


class Allocation(Struct, frozen=True, array_like=True, tag="a"):
    """Memory of cudaMalloc: the GPU's UUID, the 64 bytes of its base, and the size of the whole allocation."""

    memory: _Id
    device: Annotated[str, Meta(max_length=64)]
    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    nbytes: Annotated[int, Meta(gt=0, le=2**47)]


class Sent(Struct, frozen=True, array_like=True, tag="s"):
    """An array on memory that was described before: where in it, its bytes, element type and shape."""

    memory: _Id
    offset: _Size
    nbytes: _Size
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[_Size, ...], Meta(max_length=64)]


class Received(Struct, frozen=True, array_like=True, tag="t"):
    """So many of the arrays that came were received, in all."""

    count: _Size


class NextPart(Struct, frozen=True, array_like=True, tag="g"):
    """Answers a part of a memory that is not the last: its descriptors were taken, the next part may come (S4)."""


class Unmap(Struct, frozen=True, array_like=True, tag="x"):
    """Memory that is unmapped where it was described: let go of it."""

    memories: Annotated[tuple[_Id, ...], Meta(max_length=MAX_UNMAPPED)]


Message = Hello | Part | Allocation | NextPart | Sent | Received | Unmap

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def decode(payload: bytes) -> Message:
    """Parse what another process said.

    Raises
    ------
    ProtocolError
        If it is nothing that is said here.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"the other end of a transport said what is no message: {error!s:.200}") from None
