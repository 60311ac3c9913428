"""Messages between processes that hand arrays to each other, over a channel or from endpoint to endpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from ..sharing.descriptor import HANDLE_BYTES, MAX_SEGMENTS, EventEntry, MemoryDescriptor

MAX_UNMAPPED = 4096  # memories in one message that is received
MOST_SENT = 200  # in one that is sent, so that it fits into a pipe's
MAX_ARRAYS = 512  # arrays in one container
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
    """Segments of a memory from the `first` on, with as many descriptors; `last` ends the series. Memory without any is
    one segment with `handle`; `pool` is its pool's number on this connection, whose descriptor comes along."""

    memory: Size
    first: Count
    last: bool
    writable: bool
    descriptor: MemoryDescriptor
    handle: Annotated[bytes, Meta(max_length=HANDLE_BYTES)] = b""
    pool: Annotated[int, Meta(ge=-1, le=2**62)] = -1


class Part(Struct, frozen=True, array_like=True, tag="m"):
    """A message with descriptors: memory, or what it has grown by. It is acknowledged if it `asks`
    for that, as it does if another part follows."""

    part: MemoryPart
    asks: bool = False


class Unmap(Struct, frozen=True, array_like=True, tag="f"):
    """A message: the sender unmapped these, let go of them."""

    memories: Annotated[tuple[Size, ...], Meta(max_length=MAX_UNMAPPED)]


class Unref(Struct, frozen=True, array_like=True, tag="d"):
    """A message: so many arrays that came under these numbers are done with."""

    arrays: Annotated[tuple[tuple[Size, Size], ...], Meta(max_length=MAX_UNMAPPED)]


class Closed(Struct, frozen=True, array_like=True, tag="c"):
    """A message: these, which were to be unmapped, are closed here, so their owner may free them."""

    memories: Annotated[tuple[Size, ...], Meta(max_length=MAX_UNMAPPED)]


# -- over a channel, besides ------------------------------------------------------------------------------------
class Shared(Struct, frozen=True, array_like=True, tag="v"):
    """An array on memory that the sender shared. `keep` is the sender's number for memory that it keeps until it is
    told, `event` that of the event for the work that fills the memory; 0 where there is none."""

    reference: Reference
    keep: Size = 0
    event: Size = 0


class Returned(Struct, frozen=True, array_like=True, tag="r"):
    """An array on memory that the receiver of this message shared."""

    reference: Reference


class EventIs(Struct, frozen=True, array_like=True, tag="e"):
    """The event that is called `number` from now on."""

    number: Size
    event: EventEntry


class NextPart(Struct, frozen=True, array_like=True, tag="g"):
    """The part was taken: send the next."""


class Received(Struct, frozen=True, array_like=True, tag="k"):
    """So many more of the arrays that came were received."""

    times: Size


class Value(Struct, frozen=True, array_like=True, tag="x"):
    """Anything else that msgpack can say; a sender puts in the value itself. :func:`decode_value` makes the received
    value only when it is asked for: 64 KiB of empty dicts take 5 MB."""

    value: Raw


class Mixed(Struct, frozen=True, array_like=True, tag="t"):
    """A container with arrays or tuples in it, as :mod:`.containers` takes it apart; `value` is as in :class:`Value`,
    but encoded by the sender. Each of `arrays` is as if it had come in a message of its own."""

    value: Raw
    arrays: Annotated[tuple[Shared | Returned, ...], Meta(max_length=MAX_ARRAYS)]


class Handle(Struct, frozen=True, array_like=True):
    """The payload of a handle that somebody brings: which end made it, all of the memory, and the array on it."""

    origin: Annotated[bytes, Meta(min_length=16, max_length=16)]
    part: MemoryPart
    reference: Reference


# -- between endpoints, besides ---------------------------------------------------------------------------------
class Fetch(Struct, frozen=True, array_like=True, tag="fetch"):
    """Send the descriptors of a memory from the `first` segment on: one :class:`Part` an answer.
    `by` is the number of the thread that pickled the array, as the pickle says."""

    memory: Size
    first: Count
    by: Size = 0


class Unpickled(Struct, frozen=True, array_like=True, tag="took"):
    """Arrays that were unpickled: the memory of each, and the thread that pickled it."""

    arrays: Annotated[tuple[tuple[Size, Size], ...], Meta(max_length=MAX_UNMAPPED)]


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """The sender of this message ends of its own accord: others may unpickle what it did not."""


class Gone(Struct, frozen=True, array_like=True, tag="gone"):
    """The answer to a fetch of what is not there any more."""

    memory: Size


ASKED = (Fetch, Unpickled, Bye, Gone)
TOLD: dict[str, Callable[..., Struct]] = {"unmap": Unmap, "unmapped": Closed, "unref": Unref, "unpickled": Unpickled}
encode = msgspec.msgpack.Encoder().encode
decode_value = msgspec.msgpack.Decoder().decode
decode_request = msgspec.msgpack.Decoder(Fetch | Unpickled | Bye).decode
decode_reply = msgspec.msgpack.Decoder(Part | Gone | Unmap).decode
decode_message = msgspec.msgpack.Decoder(
    Shared | Returned | Part | NextPart | Unmap | Unref | Closed | EventIs | Received | Value | Mixed
).decode
decode_handle = msgspec.msgpack.Decoder(Handle).decode
