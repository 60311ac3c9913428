"""What is said between processes that hand arrays to each other, over a channel or from endpoint to endpoint."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ..sharing.descriptor import MAX_SEGMENTS, MemoryDescriptor

__all__ = [
    "MAX_FORGOTTEN",
    "Fetch",
    "Forget",
    "Gone",
    "MemoryPart",
    "Part",
    "Reference",
    "Took",
    "decode_reply",
    "decode_request",
    "encode",
]

MAX_FORGOTTEN = 4096  # memories in one message
Size = Annotated[int, Meta(ge=0, le=2**62)]
Count = Annotated[int, Meta(ge=0, le=MAX_SEGMENTS)]


class Reference(Struct, frozen=True, array_like=True):
    """An array on memory that was shared: the memory's id, how many of its segments must be known, and where in it
    the array lies."""

    memory: Size
    segments: Count
    offset: Size
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[Size, ...], Meta(max_length=64)]


class MemoryPart(Struct, frozen=True, array_like=True):
    """Segments of a memory from the `first` on, with as many file descriptors; `last` ends the series.

    `descriptor` holds the segments of this part; `writable` says how the receiver is to map them.
    """

    memory: Size
    first: Count
    last: bool
    writable: bool
    descriptor: MemoryDescriptor


class Part(Struct, frozen=True, array_like=True, tag="m"):
    """A message with descriptors: memory, or what it has grown by."""

    part: MemoryPart


class Forget(Struct, frozen=True, array_like=True, tag="f"):
    """A message: the sender unmapped these, let go of them."""

    memories: Annotated[tuple[Size, ...], Meta(max_length=MAX_FORGOTTEN)]


# -- between endpoints, besides ---------------------------------------------------------------------------------
class Fetch(Struct, frozen=True, array_like=True, tag="fetch"):
    """Send the descriptors of a memory from the `first` segment on: one :class:`Part` an answer."""

    memory: Size
    first: Count


class Took(Struct, frozen=True, array_like=True, tag="took"):
    """So many pickled arrays on this memory were unpickled."""

    memory: Size
    times: Size


class Gone(Struct, frozen=True, array_like=True, tag="gone"):
    """The answer to a fetch of what is not there any more."""

    memory: Size


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Fetch | Took).decode
decode_reply = msgspec.msgpack.Decoder(Part | Gone | Forget).decode
