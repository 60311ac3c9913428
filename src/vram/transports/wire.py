"""What the two ends of a transport between processes say to each other, besides what all say that hand memory over.

Memory, arrays and events are described by :mod:`vram.handover.messages`. Data, bounded; nothing is believed (S1, S7).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ..errors import ProtocolError
from ..handover.messages import Closed, EventIs, MemoryPart, NextPart, Part, Reference, Shared, Size, Unmap, Unref

VERSION = 2
WINDOW = 64  # messages that were sent and not received: then the sender waits
MOST_OF_A_KIND = 200  # memories or arrays in one message, so that it fits into a pipe's

Origin = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Hello(Struct, frozen=True, array_like=True, tag="h"):
    """The first message of each end: which transport it is, which version of it, and a random id of the end."""

    version: Size
    kind: Annotated[str, Meta(max_length=32)]
    origin: Origin = bytes(16)


class Received(Struct, frozen=True, array_like=True, tag="t"):
    """So many of the arrays that came were received, in all."""

    count: Size


class Chunk(Struct, frozen=True, array_like=True, tag="k"):
    """Bytes of an array that lie in a ring of shared memory: `nbytes`, which belong at `at` in the array. `stop` counts
    all bytes of the ring used so far. A chunk at 0 begins an array, and gives an unfinished earlier array up."""

    reference: Reference
    at: Size
    nbytes: Size
    stop: Size


class Drained(Struct, frozen=True, array_like=True, tag="q"):
    """The ring was read up to here, in all: what was there before may be overwritten."""

    stop: Size


class Handle(Struct, frozen=True, array_like=True):
    """The payload of a handle that somebody brings: which end made it, all of the memory, and the array on it."""

    origin: Origin
    part: MemoryPart
    reference: Reference


Message = Hello | Part | NextPart | EventIs | Shared | Received | Unmap | Unref | Closed | Chunk | Drained

encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_handle_decoder = msgspec.msgpack.Decoder(Handle)


def decode(payload: bytes) -> Message:
    """Parse what another process said. Raises ProtocolError if it is nothing that is said here."""
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"the other end of a transport said what is no message: {error!s:.200}") from None


def decode_handle(payload: bytes) -> Handle:
    """Parse a handle that somebody brought; raises as :func:`decode` does."""
    try:
        return _handle_decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a handle of a transport that is none: {error!s:.200}") from None
