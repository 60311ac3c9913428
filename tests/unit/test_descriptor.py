"""Descriptors: what is written is what is read, old bytes stay readable, and every bound holds (S1, S2, S7, S9)."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgspec
import pytest

from vram.errors import ProtocolError, UsageError
from vram.sharing import descriptor as module
from vram.sharing.descriptor import (
    MANIFEST_VERSION,
    MAX_SEGMENTS,
    ArrayEntry,
    HandleEntry,
    Manifest,
    MemoryDescriptor,
    SegmentEntry,
    check_array_name,
    decode_manifest,
    encode_manifest,
    most_arrays,
    most_manifest,
)
from vram.spec import HandleKind

MIB = 1 << 20
MEMORY = MemoryDescriptor("host", (SegmentEntry(2 * MIB, 1), SegmentEntry(4 * MIB, 1)), 4096, 5 * MIB, 64 * MIB)
OTHER = MemoryDescriptor("GPU-6f2b7c1e-0000-4000-8000-0123456789ab", (SegmentEntry(2 * MIB, 8),), 0, 512, 2 * MIB)
EMPTY = MemoryDescriptor("host", (), 0, 0, 2 * MIB)
MANIFEST = Manifest(
    MANIFEST_VERSION,
    (MEMORY, OTHER),
    {
        "weights/ä": ArrayEntry(0, 0, 1536, "float32", (1, 384)),
        "scalar": ArrayEntry(1, 8, 2, "bfloat16", ()),
        "none": ArrayEntry(0, 5 * MIB, 0, "int8", (0, 7)),
    },
)
# As version 1 was written when it was made. Whoever changes these bytes locks out those who published before.
GOLDEN = bytes.fromhex(
    "83a776657273696f6e01a86d656d6f726965739295a4686f73749292ce002000000192ce0040000001cd1000ce00500000ce0400000095d9"
    "284750552d36663262376331652d303030302d343030302d383030302d3031323334353637383961629192ce00200000080"
    "0cd0200ce00200000a661727261797383aa776569676874732fc3a4950000cd0600a7666c6f617433329201cd0180a67363616c6172950108"
    "02a862666c6f6174313690a46e6f6e659500ce0050000000a4696e7438920007"
)

encode = msgspec.msgpack.encode


def raw(manifest: Manifest = MANIFEST) -> dict[str, Any]:
    """The manifest as plain values, to be spoilt."""
    found: dict[str, Any] = msgspec.msgpack.decode(encode_manifest(manifest))
    return found


def refused(spoilt: object, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        decode_manifest(encode(spoilt))


def test_what_is_written_is_what_is_read() -> None:
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST
    assert decode_manifest(memoryview(encode_manifest(MANIFEST))) == MANIFEST
    assert list(decode_manifest(encode_manifest(MANIFEST)).arrays) == ["weights/ä", "scalar", "none"]


def test_s9_the_bytes_of_version_1_stay_what_they_are() -> None:
    assert encode_manifest(MANIFEST) == GOLDEN
    assert decode_manifest(GOLDEN) == MANIFEST


def test_s9_unknown_fields_are_ignored() -> None:
    newer = raw() | {"colour": {"of": ["the", "sky"]}, "": None}
    for memory in newer["memories"]:
        memory.append("a field of version 1.1")
        for segment in memory[1]:
            segment.append({"numa": 3})
    for entry in newer["arrays"].values():
        entry += [None, 5]
    assert decode_manifest(encode(newer)) == MANIFEST


def test_s9_another_version_is_named() -> None:
    refused(raw() | {"version": 2}, "version 2; this library reads 1")
    refused({"version": 7, "stuff": []}, "it says version 7")
    refused(["not", "a", "map"], "not msgpack|version")
    with pytest.raises(ProtocolError, match="it is not msgpack"):
        decode_manifest(b"\xc1garbage")
    with pytest.raises(ProtocolError):
        decode_manifest(b"")


def test_an_error_does_not_repeat_what_a_stranger_wrote_at_length() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_manifest(encode({"version": "x" * 1_000_000}))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("missing", ["version", "memories", "arrays"])
def test_s7_nothing_may_be_left_out(missing: str) -> None:
    spoilt = raw()
    del spoilt[missing]
    refused(spoilt, missing)


@pytest.mark.parametrize(
    ("at", "values"),
    [
        ((0,), [None, 5, b"host", "x" * 65]),  # device
        ((1,), [None, 7, {}, [[MIB, 1]] * (MAX_SEGMENTS + 1), [MIB], [[MIB]], [None]]),  # segments
        ((1, 0, 0), [0, -1, 2**62 + 1, 2**64 - 1, 1.5, "1", None, True]),  # a segment's size
        ((1, 0, 1), [-1, 2**31 + 1, 1.5, None, "fd"]),  # its kind of handle
        ((2,), [-1, 2**62 + 1, 6 * MIB, 1.5, None, "0"]),  # offset
        ((3,), [-1, 2**62 + 1, 6 * MIB, 1.5, None]),  # length
        ((4,), [-1, 2**47 + 1, 2**62, 6 * MIB - 1, None]),  # capacity
    ],
)
def test_s7_every_number_of_a_memory_is_bounded(at: tuple[int, ...], values: list[object]) -> None:
    for value in values:
        spoilt = raw()
        target = spoilt["memories"][0]
        for step in at[:-1]:
            target = target[step]
        target[at[-1]] = value
        refused(spoilt, "manifest|descriptor|segments")


@pytest.mark.parametrize(
    ("at", "values"),
    [
        (0, [2, 1023, 1024, -1, 2**63, None, 0.0, "0"]),  # memory
        (1, [-1, 5 * MIB, 5 * MIB - 1535, 2**62, 2**62 + 1, 2**64 - 1, None, 0.5]),  # offset
        (2, [-1, 5 * MIB + 1, 2**62, 2**62 + 1, None]),  # bytes
        (3, [None, 32, b"float32", "f" * 33]),  # element type
        (4, [None, 384, [-1], [2**62 + 1], [1.5], ["1"], [1] * 65]),  # shape
    ],
)
def test_s7_every_number_of_an_array_is_bounded(at: int, values: list[object]) -> None:
    for value in values:
        spoilt = raw()
        spoilt["arrays"]["weights/ä"][at] = value
        refused(spoilt, "manifest|array")


def test_s2_a_manifest_has_so_many_segments_and_no_more() -> None:
    half = MemoryDescriptor("host", (SegmentEntry(1, 1),) * (MAX_SEGMENTS // 2), 0, 0, MIB)
    most = Manifest(MANIFEST_VERSION, (half, half), {})
    assert decode_manifest(encode_manifest(most)) == most
    over = Manifest(MANIFEST_VERSION, (half, half, MEMORY), {})
    refused(raw(most) | {"memories": encode_free(over.memories)}, "more than 1024 segments")
    with pytest.raises(UsageError, match="1026 segments"):
        encode_manifest(over)


def encode_free(value: object) -> Any:
    return msgspec.msgpack.decode(encode(value))


def test_memory_without_segments_is_memory_that_may_grow() -> None:
    manifest = Manifest(MANIFEST_VERSION, (EMPTY,), {"a": ArrayEntry(0, 0, 0, "int8", (0,))})
    assert decode_manifest(encode_manifest(manifest)) == manifest
    spoilt = raw(manifest)
    spoilt["arrays"]["a"][2] = 1
    refused(spoilt, "0 to 1 of a memory of 0")


def test_numbers_that_only_together_are_too_much() -> None:
    """No sum wraps around: 1,024 segments of 2**62 bytes are more than any capacity."""
    huge = MemoryDescriptor("host", (SegmentEntry(2**62, 1),) * 4, 2**62, 2**62, 2**47)
    refused(raw() | {"memories": encode_free((huge, OTHER))}, "of addresses")


@pytest.mark.parametrize("name", ["x" * 1025, "\udc80", "", 5, None])
def test_array_names_that_no_reader_would_take_are_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="array name"):
        check_array_name(name)
    with pytest.raises(UsageError, match="array name"):
        encode_manifest(Manifest(MANIFEST_VERSION, (MEMORY,), {name: ArrayEntry(0, 0, 0, "int8", ())}))


def test_array_names_up_to_the_limit_are_read() -> None:
    name = "ü" * 1024
    manifest = Manifest(MANIFEST_VERSION, (MEMORY,), {name: ArrayEntry(0, 0, 0, "int8", ())})
    assert decode_manifest(encode_manifest(manifest)) == manifest
    spoilt = raw(manifest)
    spoilt["arrays"]["ü" * 1025] = spoilt["arrays"][name]
    refused(spoilt, "manifest")


def test_what_is_too_long_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    written = encode_manifest(MANIFEST)
    monkeypatch.setattr(module, "MAX_MANIFEST", len(written) - 1)
    with pytest.raises(UsageError, match=f"{len(written)} bytes"):
        encode_manifest(MANIFEST)
    with pytest.raises(ProtocolError, match=f"{len(written)} bytes"):
        decode_manifest(written)
    monkeypatch.setattr(module, "MAX_ARRAYS", 2)
    with pytest.raises(UsageError, match="3 arrays"):
        encode_manifest(MANIFEST)


@pytest.mark.slow
def test_more_arrays_than_the_format_knows_are_not_read() -> None:
    arrays = {str(number): [0, 0, 0, "int8", []] for number in range(module.MAX_ARRAYS + 1)}
    refused(raw() | {"arrays": arrays}, "manifest")


# -- what reading costs -----------------------------------------------------------------------------------------------

_HEAD = encode({"version": 1, "memories": [MEMORY]})[1:]  # without the count of the fields


def many(count: int) -> bytes:
    """The head of a map or an array, to follow, of so many items."""
    return count.to_bytes(4, "big")


ARRAY = encode([0, 0, 0, "int8", []])
BOMBS = {
    "a version that is a million maps": b"\x81\xa7version\xdd" + many(4_000_000) + b"\x80" * 4_000_000,
    "what nobody knows, before the version": b"\x82\xa1x\xdd" + many(4_000_000) + b"\x80" * 4_000_000 + b"\xa7version",
    "more arrays than there can be": (
        b"\x83" + _HEAD + b"\xa6arrays\xdf" + many(300_000) + b"".join(b"\xa6%06d" % n + ARRAY for n in range(300_000))
    ),
    "segments in every memory": (
        b"\x83\xa7version\x01\xa8memories\xdc\x04\x00"
        + (b"\x95\xa4host\xdc\x04\x00" + b"\x92\x01\x01" * 1024 + b"\x00\x00\x00") * 1024
        + b"\xa6arrays\x80"
    ),
    "arrays that are none": b"\x83" + _HEAD + b"\xa6arrays" + b"\xc4" * 4_000_000,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=list(BOMBS))
def test_s7_what_a_bad_manifest_costs_its_reader_goes_by_its_length(bomb: bytes) -> None:
    """A map of one byte becomes 64 in memory, an array of eleven becomes hundreds: nothing is built to say what is
    wrong, and nothing before it was counted."""
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError) as caught:
            decode_manifest(bomb, 1 << 20)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = len(bomb) + (1 << 20)
    assert peak < size, "reading cost more than what was read"
    assert len(str(caught.value)) < 500


def test_how_much_a_manifest_may_say_goes_by_the_memory_of_its_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (most_arrays(0), most_manifest(0)) == (65_536, 16 << 20)
    assert (most_arrays(64 << 20), most_manifest(2**47)) == (module.MAX_ARRAYS, 256 * module.MAX_ARRAYS)
    monkeypatch.setattr(module, "LEAST_ARRAYS", 2)
    written = encode_manifest(MANIFEST)
    assert decode_manifest(written, 64) == MANIFEST  # three arrays, and 768 bytes
    monkeypatch.setattr(module, "WORDS_PER_ARRAY", 32)
    assert decode_manifest(written) == MANIFEST
    with pytest.raises(ProtocolError, match=f"{len(written)} bytes; at most 96 are read"):
        decode_manifest(written, 64)
    few = MemoryDescriptor("host", (SegmentEntry(64, 1),), 0, 0, 64)
    arrays = {str(number): ArrayEntry(0, 0, 0, "int8", ()) for number in range(4)}
    with pytest.raises(UsageError, match="4 arrays in one version of 64 bytes; at most 3 can be"):
        encode_manifest(Manifest(MANIFEST_VERSION, (few,), arrays))
    del arrays["0"], arrays["1"]
    long = Manifest(MANIFEST_VERSION, (few,), {"x" * 100: arrays["2"]})
    with pytest.raises(UsageError, match="at most 96 are read"):
        encode_manifest(long)


def test_serials_are_one_for_each_segment_or_none_s7() -> None:
    growing = msgspec.structs.replace(MANIFEST, serials=(7, 2**61, 9))
    assert decode_manifest(encode_manifest(growing)) == growing
    assert "serials" not in raw()  # what cannot grow says nothing of it: older readers and writers see no difference
    for spoilt in ([1], [1, 2], [1, 2, 3, 4]):
        refused({**raw(), "serials": spoilt}, "serial numbers")
    for spoilt in ([1, 2, -1], [1, 2, 2**62], [1, 2, "3"], [0] * 1025, 7):
        refused({**raw(), "serials": spoilt}, "not a manifest")


# -- memory that a handle of 64 bytes opens ---------------------------------------------------------------------------


def by_handle(*kinds: HandleKind, handles: tuple[HandleEntry, ...] = (), pools: int = 0, **more: Any) -> Manifest:
    """A manifest of one memory of one segment for each kind."""
    memories = tuple(
        MemoryDescriptor("GPU-1", (SegmentEntry(2 * MIB, int(kind)),), 0, 2 * MIB, 2 * MIB) for kind in kinds
    )
    return Manifest(MANIFEST_VERSION, memories, {}, handles, pools, **more)


def opens(memory: int, pool: int = -1) -> HandleEntry:
    return HandleEntry(memory, bytes([memory]) * 64, pool)


@pytest.mark.parametrize(
    "manifest",
    [
        by_handle(HandleKind.LEGACY_IPC, handles=(opens(0),)),
        by_handle(HandleKind.POOL, handles=(opens(0, 0),), pools=1),
        by_handle(HandleKind.POOL, HandleKind.POOL, handles=(opens(0, 1), opens(1, 0)), pools=2),
        by_handle(HandleKind.POSIX_FD, HandleKind.LEGACY_IPC, handles=(opens(1),)),
        by_handle(HandleKind.FABRIC),
        by_handle(HandleKind.FABRIC, HandleKind.LEGACY_IPC, handles=(opens(1),)),
        by_handle(HandleKind.POSIX_FD, updatable=True),
    ],
    ids=["legacy", "pool", "two of two pools", "beside a descriptor", "fabric", "behind fabric", "updatable"],
)
def test_what_has_its_handle_is_read(manifest: Manifest) -> None:
    assert decode_manifest(encode(manifest)) == manifest


@pytest.mark.parametrize(
    ("manifest", "match"),
    [
        (by_handle(HandleKind.LEGACY_IPC, handles=(opens(1),)), "open memory 1, which has one or is not there$"),
        (by_handle(HandleKind.LEGACY_IPC, handles=(opens(0), opens(0))), "open memory 0, which has one or is not"),
        (by_handle(HandleKind.POOL, handles=(opens(0, 1),), pools=1), "^memory 0 is said to be of pool 1 of 1$"),
        (by_handle(HandleKind.POOL, handles=(opens(0),)), r"^memory 0 has segments of kinds \[\d+\] and a handle$"),
        (by_handle(HandleKind.LEGACY_IPC, handles=(opens(0, 0),), pools=1), "and a handle$"),
        (by_handle(HandleKind.LEGACY_IPC), r"^memory 0 has segments of kinds \[\d+\] and no handle$"),
        (by_handle(HandleKind.FABRIC, HandleKind.POOL), "^memory 1 has segments .* and no handle$"),
        (by_handle(HandleKind.POSIX_FD, handles=(opens(0),)), "and a handle$"),
        (by_handle(HandleKind.LEGACY_IPC, handles=(opens(0),), updatable=True), "^memory that only its maker can keep"),
        (by_handle(HandleKind.POSIX_FD, pools=1, updatable=True), "^memory that only its maker .* updated in place$"),
    ],
    ids=[
        "of nothing", "twice", "of no pool", "a pool's, by itself", "of a pool, by itself", "none",
        "none, of the second", "beside a descriptor", "updatable", "updatable, of a pool",
    ],
)  # fmt: skip
def test_s7_a_handle_too_many_or_too_few_is_refused(manifest: Manifest, match: str) -> None:
    with pytest.raises(ProtocolError, match=match):
        decode_manifest(encode(manifest))


def test_s7_a_handle_opens_one_segment() -> None:
    segments = (SegmentEntry(2 * MIB, int(HandleKind.LEGACY_IPC)),) * 2
    memory = MemoryDescriptor("GPU-1", segments, 0, 4 * MIB, 4 * MIB)
    with pytest.raises(ProtocolError, match=r"and a handle$"):
        decode_manifest(encode(Manifest(MANIFEST_VERSION, (memory,), {}, (opens(0),))))


def two_slots(second: MemoryDescriptor = EMPTY, **more: Any) -> Manifest:
    return Manifest(MANIFEST_VERSION, (EMPTY, second), {}, slots=2, **{"updatable": True, **more})


def test_slots_have_the_same_memories() -> None:
    assert decode_manifest(encode(two_slots())) == two_slots()
    larger = MemoryDescriptor("host", (SegmentEntry(2 * MIB, 1),), 0, MIB, 2 * MIB)
    assert decode_manifest(encode(two_slots(larger))).memories_of_a_slot == 1
    first = Manifest(MANIFEST_VERSION, (larger, EMPTY), {}, slots=2, updatable=True)
    for spoilt, match in (
        (two_slots(updatable=False), "^2 memories, updatable=False, are said to be two slots$"),
        (Manifest(MANIFEST_VERSION, (EMPTY,), {}, slots=2, updatable=True), "^1 memories, updatable=True, are said"),
        (two_slots(OTHER), "^the memories of two slots differ: 0 bytes on 'host', and 512 on 'GPU-"),
        (first, f"^the memories of two slots differ: {MIB} bytes on 'host', and 0 on 'host'$"),
    ):
        with pytest.raises(ProtocolError, match=match):
            decode_manifest(encode(spoilt))


# -- what is counted before it is built -------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [0, 1, 15, 16, 300, 65_535, 65_536, 70_000])
def test_what_an_array_or_a_map_announces_is_counted(count: int) -> None:
    assert module._length(msgspec.Raw(encode([None] * count))) == count
    assert module._length(msgspec.Raw(encode(dict.fromkeys(range(count))))) == count


@pytest.mark.parametrize("other", [None, 7, "text", b"bytes", 1.5])
def test_anything_else_announces_nothing(other: object) -> None:
    assert module._length(msgspec.Raw(encode(other))) == 0


def many(count: int) -> bytes:
    """A manifest of so many tiny arrays."""
    entry = ArrayEntry(0, 0, 0, "int8", (0,))
    return encode(Manifest(MANIFEST_VERSION, (EMPTY,), {f"{number:06d}": entry for number in range(count)}))


def test_s7_as_many_arrays_as_there_may_be_are_read_and_no_more() -> None:
    most = most_arrays(0)
    assert len(decode_manifest(many(most), 0).arrays) == most
    with pytest.raises(ProtocolError, match=f"^manifest names {most + 1} arrays; at most {most} can be on the memory"):
        decode_manifest(many(most + 1), 0)


def test_s7_what_is_said_besides_arrays_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALL", 0)
    plain = encode_manifest(MANIFEST)
    arrays = len(encode(raw()["arrays"]))
    monkeypatch.setattr(module, "_BESIDES", len(plain) - arrays)
    assert decode_manifest(plain) == MANIFEST
    monkeypatch.setattr(module, "_BESIDES", len(plain) - arrays - 1)
    with pytest.raises(ProtocolError, match=f"^a manifest of {len(plain)} bytes, of which too few describe arrays$"):
        decode_manifest(plain)


def test_s7_another_users_manifest_is_shorter_and_has_fewer_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    data = many(100)
    monkeypatch.setattr(module, "_SMALL", 0)
    monkeypatch.setattr(module, "STRANGERS_ARRAYS", 99)
    assert len(decode_manifest(data).arrays) == len(decode_manifest(data, 1 << 40).arrays) == 100
    with pytest.raises(ProtocolError, match="names 100 arrays; at most 99"):
        decode_manifest(data, 1 << 40, strange=True)
    monkeypatch.setattr(module, "STRANGERS_ARRAYS", 100)
    monkeypatch.setattr(module, "STRANGERS_MANIFEST", len(data))
    assert len(decode_manifest(data, 1 << 40, strange=True).arrays) == 100
    monkeypatch.setattr(module, "STRANGERS_MANIFEST", len(data) - 1)
    with pytest.raises(ProtocolError, match=f"at most {len(data) - 1} are read of another user's entry"):
        decode_manifest(data, 1 << 40, strange=True)
