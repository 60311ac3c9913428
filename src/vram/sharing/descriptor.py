"""The description of memory that crosses between processes, and its parser, which trusts nothing.

Descriptors are data (S1): msgpack by msgspec, versioned, bounded; never pickle, a pid, or a device's ordinal. A
:class:`MemoryDescriptor` is an ordered list of segments, one allocation each, that the receiver maps one behind the
other (S2); a :class:`Manifest` adds named arrays on such memories. Element types travel as names that
:mod:`vram.arrays.dtypes` looks up in a table.

Every check that needs no driver is made here, before any call is made with a number that a peer chose (S7). An
accepted description is consistent in itself; the driver finds out whether the file descriptors are what it says.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ..errors import ProtocolError, UsageError
from ..spec import HandleKind

MANIFEST_VERSION = 1
MAX_SEGMENTS = 1024
MAX_ARRAYS = 1_000_000
MAX_MANIFEST = 256 << 20
MAX_EVENTS = 64
# How many arrays an entry can have, by its memory: any may have that many, empty ones or parts of each other; beyond
# them one for so many bytes. And how long a manifest of so many can be, their names included.
LEAST_ARRAYS = 65_536
BYTES_PER_ARRAY = 64
WORDS_PER_ARRAY = 256
# The most of another user, who may state any amount of memory without having it. A manifest is built in one step, in
# which no other thread runs: 0.15 s for this many arrays, and 5 s for a million.
STRANGERS_ARRAYS = 65_536
STRANGERS_MANIFEST = 4 << 20
HANDLE_BYTES = 64  # of a legacy IPC handle, a pool's pointer, an event
MAX_NAME = 1024  # characters of an array's name
MAX_ADDRESSES = 2**47  # bytes: what a process has on the machines there are
STRANGERS_ADDRESSES = MAX_ADDRESSES // 8  # that another user may have set aside for all memories of an entry

FD, _LEGACY, _POOL = int(HandleKind.POSIX_FD), int(HandleKind.LEGACY_IPC), int(HandleKind.POOL)
_Bytes = Annotated[int, Meta(ge=0, le=2**62)]
_Name = Annotated[str, Meta(max_length=MAX_NAME)]


class SegmentEntry(Struct, frozen=True, array_like=True):
    """One allocation: its size in bytes and the :class:`~vram.spec.HandleKind` by which it travels."""

    nbytes: Annotated[int, Meta(gt=0, le=2**62)]
    kind: Annotated[int, Meta(ge=0, le=2**31)]


class MemoryDescriptor(Struct, frozen=True, array_like=True):
    """Memory as a receiver maps it, segments one behind the other; `offset` and `nbytes` say which part is meant.
    `capacity` is the owner's address space, to reserve for its growth; `device` is ``"host"`` or a device's UUID."""

    device: Annotated[str, Meta(max_length=64)]
    segments: Annotated[tuple[SegmentEntry, ...], Meta(max_length=MAX_SEGMENTS)]
    offset: _Bytes
    nbytes: _Bytes
    capacity: _Bytes

    def check(self) -> None:
        """Raise :class:`~vram.errors.ProtocolError` unless the numbers agree with each other."""
        mapped = sum([segment.nbytes for segment in self.segments])
        if self.offset + self.nbytes > mapped:
            raise ProtocolError(
                f"descriptor names bytes {self.offset} to {self.offset + self.nbytes} of {mapped} in "
                f"{len(self.segments)} segments"
            )
        if not mapped <= self.capacity <= MAX_ADDRESSES:
            raise ProtocolError(
                f"descriptor asks for {self.capacity} bytes of addresses for {mapped} bytes of memory; at most "
                f"{MAX_ADDRESSES} exist"
            )


class ArrayEntry(Struct, frozen=True, array_like=True):
    """An array: which memory of the manifest, where in it (bytes), its element type's name and its shape.
    `nbytes` allows bounds checks without element types; the maker of the array checks it against type and shape."""

    memory: Annotated[int, Meta(ge=0, lt=MAX_SEGMENTS)]
    offset: _Bytes
    nbytes: _Bytes
    dtype: Annotated[str, Meta(max_length=32)]
    shape: Annotated[tuple[_Bytes, ...], Meta(max_length=64)]


class HandleEntry(Struct, frozen=True, array_like=True):
    """The 64 bytes by which a memory of one segment is opened that no descriptor of its own brings.
    `pool` is the pool's descriptor among those behind all segments'; -1 for memory of no pool."""

    memory: Annotated[int, Meta(ge=0, lt=MAX_SEGMENTS)]
    data: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    pool: Annotated[int, Meta(ge=-1, lt=MAX_SEGMENTS)] = -1


class EventEntry(Struct, frozen=True, array_like=True):
    """An interprocess event that stands for the work that fills the memory: its GPU's UUID, and its 64 bytes."""

    device: Annotated[str, Meta(max_length=64)]
    data: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


class Manifest(Struct, frozen=True, omit_defaults=True):
    """A version's memories, and arrays on them by name; unknown fields are ignored (S9). An updatable version has its
    publisher's words as the last descriptor. `serials`, one for each segment, name memory across versions. Memories of
    the first of several `slots` come first: arrays lie in those, and at the same places in each other slot."""

    version: int
    memories: Annotated[tuple[MemoryDescriptor, ...], Meta(max_length=MAX_SEGMENTS)]
    arrays: Annotated[dict[_Name, ArrayEntry], Meta(max_length=MAX_ARRAYS)]
    handles: Annotated[tuple[HandleEntry, ...], Meta(max_length=MAX_SEGMENTS)] = ()
    pools: Annotated[int, Meta(ge=0, le=MAX_SEGMENTS)] = 0
    events: Annotated[tuple[EventEntry, ...], Meta(max_length=MAX_EVENTS)] = ()
    updatable: bool = False
    serials: Annotated[tuple[Annotated[int, Meta(ge=0, lt=2**62)], ...], Meta(max_length=MAX_SEGMENTS)] = ()
    slots: Annotated[int, Meta(ge=1, le=2)] = 1

    @property
    def memories_of_a_slot(self) -> int:
        """How many of the memories each slot has."""
        return len(self.memories) // self.slots

    @property
    def descriptors(self) -> int:
        """How many file descriptors come with it: one for each segment that has one, then one for each pool; and the
        page of what is updatable."""
        opened = {entry.memory for entry in self.handles}
        return (
            self.pools
            + self.updatable
            + sum([len(memory.segments) for number, memory in enumerate(self.memories) if number not in opened])
        )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)
_SMALL = 64 << 10  # bytes of a manifest that cannot hold enough of anything to hurt
_BESIDES = 512 << 10  # bytes of one that are not its arrays: of 1,024 memories with a handle each it is half of that


class _Version(Struct):
    """The fields that every version of a manifest has. Other fields are skipped and not built."""

    version: int


class _MemoryOutline(Struct, array_like=True):
    """A memory whose segments are counted before they are built."""

    device: msgspec.Raw
    segments: msgspec.Raw


class _Outline(Struct):
    """A manifest whose arrays and segments are counted before they are built."""

    memories: Annotated[tuple[_MemoryOutline, ...], Meta(max_length=MAX_SEGMENTS)] = ()
    arrays: msgspec.Raw = msgspec.Raw(b"\x80")


_OF_STRANGERS = ("", " of another user's entry: have it published in parts, or by a process of your own user")
_version_decoder = msgspec.msgpack.Decoder(_Version)
_outline_decoder = msgspec.msgpack.Decoder(_Outline)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError)


def check_array_name(name: object) -> str:
    """Return `name` if an array may be called that: 1 to 1,024 characters that UTF-8 can say. Else raise UsageError."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"array names are non-empty strings, not {name!r:.80}")
    if len(name) > MAX_NAME:
        raise UsageError(f"array name {name[:40]!r}... has {len(name)} characters; at most {MAX_NAME} are allowed")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"array name {name!r:.80} has characters that UTF-8 cannot say; rename it") from None
    return name


def most_arrays(nbytes: int) -> int:
    """Return how many arrays an entry of `nbytes` bytes of memory may have."""
    return min(MAX_ARRAYS, LEAST_ARRAYS + nbytes // BYTES_PER_ARRAY)


def most_manifest(nbytes: int, *, strange: bool = False) -> int:
    """Return how many bytes the manifest of an entry of `nbytes` may have; `strange` if it is another user's."""
    return min(STRANGERS_MANIFEST if strange else MAX_MANIFEST, WORDS_PER_ARRAY * most_arrays(nbytes))


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's bytes, which :func:`decode_manifest` will accept. Raises UsageError beyond the format's
    limits. Memory without a descriptor does not count for them: a reader does not know how much there really is."""
    segments = sum([len(memory.segments) for memory in manifest.memories])
    if segments > MAX_SEGMENTS:
        raise UsageError(f"{segments} segments in one version; at most {MAX_SEGMENTS} can be shared together")
    opened = {entry.memory for entry in manifest.handles}
    nbytes = sum(
        [
            segment.nbytes
            for number, memory in enumerate(manifest.memories)
            if number not in opened
            for segment in memory.segments
        ]
    )
    if len(manifest.arrays) > (most := most_arrays(nbytes)):
        raise UsageError(
            f"{len(manifest.arrays)} arrays in one version of {nbytes} bytes; at most {most} can be: publish several"
        )
    for name in manifest.arrays:
        check_array_name(name)
    data = _encoder.encode(manifest)
    if len(data) > (longest := min(MAX_MANIFEST, WORDS_PER_ARRAY * most)):
        raise UsageError(
            f"a manifest of {len(data)} bytes for {nbytes} bytes of memory; at most {longest} are read: "
            f"publish several versions, or give shorter names"
        )
    return data


def decode_manifest(
    data: bytes | bytearray | memoryview, nbytes: int | None = None, *, strange: bool = False
) -> Manifest:
    """Parse and check a manifest that somebody else wrote. `nbytes` of memory came with it, which bounds its size;
    `strange` is for another user's, of whom :data:`STRANGERS_ARRAYS` are read, in :data:`STRANGERS_MANIFEST` bytes."""
    most = MAX_ARRAYS if nbytes is None else most_arrays(nbytes)
    longest = MAX_MANIFEST if nbytes is None else most_manifest(nbytes, strange=strange)
    if len(data) > longest:
        raise ProtocolError(f"a manifest of {len(data)} bytes; at most {longest} are read{_OF_STRANGERS[strange]}")
    if strange:
        most = min(most, STRANGERS_ARRAYS)
    try:
        if len(data) > _SMALL:
            _count(_outline_decoder.decode(data), len(data), most)
        manifest = _decoder.decode(data)
    except _UNREADABLE as error:
        raise ProtocolError(f"not a manifest this version reads ({_version_of(data)}): {error!s:.200}") from None
    if manifest.version != MANIFEST_VERSION:
        raise ProtocolError(f"manifest version {manifest.version}; this library reads {MANIFEST_VERSION}")
    segments = sum([len(memory.segments) for memory in manifest.memories])
    _check_segments(segments)
    if len(manifest.serials) not in (0, segments):
        raise ProtocolError(f"{len(manifest.serials)} serial numbers are given for {segments} segments")
    for memory in manifest.memories:
        memory.check()
    _check_handles(manifest)
    if manifest.updatable and (manifest.handles or manifest.pools or manifest.events):
        raise ProtocolError("memory that only its maker can keep is said to be updated in place")
    if manifest.slots > 1:
        _check_slots(manifest)
    count = len(manifest.memories) // manifest.slots
    for name, entry in manifest.arrays.items():
        if entry.memory >= count:
            raise ProtocolError(f"array {name!r} lies in memory {entry.memory} of {count}")
        room = manifest.memories[entry.memory].nbytes
        if entry.offset + entry.nbytes > room:
            raise ProtocolError(
                f"array {name!r} names bytes {entry.offset} to {entry.offset + entry.nbytes} of a memory of {room}"
            )
    return manifest


def _check_slots(manifest: Manifest) -> None:
    """Raise ProtocolError unless what lies in a memory of the first slot has as much room in that of each other."""
    count, memories = manifest.memories_of_a_slot, manifest.memories
    if not manifest.updatable or len(memories) % manifest.slots:
        raise ProtocolError(f"{len(memories)} memories, updatable={manifest.updatable}, are said to be two slots")
    for number, memory in enumerate(memories[count:]):
        first = memories[number % count]
        if memory.device != first.device or memory.nbytes < first.nbytes:
            raise ProtocolError(
                f"the memories of two slots differ: {first.nbytes} bytes on {first.device!r:.80}, and {memory.nbytes} "
                f"on {memory.device!r:.80}"
            )


def _count(outline: _Outline, nbytes: int, most: int) -> None:
    """Refuse more than there can be before it is built: an array of eleven bytes becomes hundreds."""
    # A map may say a key twice, and all of it is built: what is not the arrays that were counted has to be short.
    if nbytes - len(memoryview(outline.arrays)) > _BESIDES:
        raise ProtocolError(f"a manifest of {nbytes} bytes, of which too few describe arrays")
    _check_segments(sum(_length(memory.segments) for memory in outline.memories))
    arrays = _length(outline.arrays)
    if arrays > most:
        raise ProtocolError(f"manifest names {arrays} arrays; at most {most} can be on the memory that came with it")


def _check_segments(count: int) -> None:
    if count > MAX_SEGMENTS:
        raise ProtocolError(f"manifest names more than {MAX_SEGMENTS} segments")


def _length(raw: msgspec.Raw) -> int:
    """Return how many items an array or a map of msgpack announces; 0 for anything else, which is refused later."""
    head = bytes(memoryview(raw)[:5])
    if 0x80 <= head[0] <= 0x9F:
        return head[0] & 0x0F
    wide = {0xDC: 2, 0xDE: 2, 0xDD: 4, 0xDF: 4}.get(head[0], 0)
    return int.from_bytes(head[1 : 1 + wide], "big")


def _check_handles(manifest: Manifest) -> None:
    """Raise ProtocolError unless what has no descriptor of its own has exactly one handle, and nothing else has."""
    handles: dict[int, HandleEntry] = {}
    for entry in manifest.handles:
        if entry.memory >= len(manifest.memories) or handles.setdefault(entry.memory, entry) is not entry:
            raise ProtocolError(f"a handle is said to open memory {entry.memory}, which has one or is not there")
        if entry.pool >= manifest.pools:
            raise ProtocolError(f"memory {entry.memory} is said to be of pool {entry.pool} of {manifest.pools}")
    for number, memory in enumerate(manifest.memories):
        kinds = {segment.kind for segment in memory.segments}
        handle = handles.get(number)
        wanted = FD if handle is None else _LEGACY if handle.pool < 0 else _POOL
        if handle is None and not kinds & {_LEGACY, _POOL}:
            continue  # what other kinds are is for the receiver to say
        if kinds != {wanted} or (handle is not None and len(memory.segments) != 1):
            raise ProtocolError(
                f"memory {number} has segments of kinds {sorted(kinds)} and {'a' if handle else 'no'} handle"
            )


def _version_of(data: bytes | bytearray | memoryview) -> str:
    try:
        return f"it says version {_version_decoder.decode(data).version!r:.40}"
    except msgspec.ValidationError:
        return "it says no version"
    except _UNREADABLE:
        return "it is not msgpack"
