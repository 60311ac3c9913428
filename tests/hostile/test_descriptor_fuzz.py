"""Manifests as a hostile publisher would write them: refused with ProtocolError, or consistent in themselves (S7)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from tests.support.memfds import READ_ONLY, make_memfd
from tests.support.spoiled_descriptors import GRANULE, _Nobody, spoil_bytes, spoil_values

from vram.entries.lease import Lease
from vram.errors import ProtocolError, UnsupportedError, VramError
from vram.keeper.client import Attachment, Segment
from vram.sharing.channel import Channel
from vram.sharing.descriptor import (
    MANIFEST_VERSION,
    ArrayEntry,
    Manifest,
    MemoryDescriptor,
    SegmentEntry,
    decode_manifest,
    encode_manifest,
)

HOST = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1), SegmentEntry(2 * GRANULE, 1)), 64, 2 * GRANULE, 8 * GRANULE)
GPU = MemoryDescriptor("GPU-6f2b7c1e-0000-4000-8000-0123456789ab", (SegmentEntry(GRANULE, 1),), 0, 512, GRANULE)
SEEDS = [
    encode_manifest(Manifest(MANIFEST_VERSION, memories, arrays))
    for memories, arrays in [
        ((), {}),
        ((HOST,), {"a": ArrayEntry(0, 0, 4096, "float32", (32, 32)), "b": ArrayEntry(0, 8192, 2, "bfloat16", ())}),
        ((HOST, GPU), {"ä/ö": ArrayEntry(1, 0, 512, "int64", (8, 8)), "none": ArrayEntry(0, 0, 0, "int8", (0, 3))}),
        ((HOST,) * 20, {str(n): ArrayEntry(n, n, n, "uint8", (n,)) for n in range(20)}),
    ]
]


def check_is_consistent(manifest: Manifest) -> None:
    """Believe nothing that the parser concluded: say in other words what a mapped manifest must not exceed."""
    assert manifest.version == MANIFEST_VERSION
    assert sum(len(memory.segments) for memory in manifest.memories) <= 1024
    for memory in manifest.memories:
        assert len(memory.device) <= 64
        sizes = [segment.nbytes for segment in memory.segments]
        assert all(size > 0 for size in sizes)
        assert 0 <= memory.offset <= memory.offset + memory.nbytes <= sum(sizes) <= memory.capacity <= 2**47
    for name, entry in manifest.arrays.items():
        assert len(name) <= 1024
        assert len(entry.dtype) <= 32
        assert len(entry.shape) <= 64
        assert all(0 <= length <= 2**62 for length in entry.shape)
        assert 0 <= entry.offset <= entry.offset + entry.nbytes <= manifest.memories[entry.memory].nbytes


def run(seed: int, rounds: int) -> tuple[int, int]:
    """Feed the parser; return how many manifests it took and refused."""
    chance = random.Random(seed)
    spoilers: list[Callable[[random.Random, bytes], bytes]] = [spoil_bytes, spoil_values]
    taken = 0
    for number in range(rounds):
        data = chance.choice(spoilers)(chance, chance.choice(SEEDS))
        try:
            manifest = decode_manifest(data)
        except ProtocolError:
            continue
        except BaseException as error:
            pytest.fail(f"seed {seed}, manifest {number}: {type(error).__name__}: {error}\n{data.hex()}")
        taken += 1
        check_is_consistent(manifest)
    return taken, rounds - taken


def test_s7_mutated_manifests_are_refused_or_consistent() -> None:
    taken, refused = run(20_251, 6_000)
    assert taken > 200, "nothing was left to check: the mutations are too wild"
    assert refused > 2_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_s7_mutated_manifests_are_refused_or_consistent_at_length(seed: int) -> None:
    run(seed, 30_000)


def test_random_bytes_are_no_manifest() -> None:
    chance = random.Random(7)
    for _ in range(2_000):
        with pytest.raises(ProtocolError):
            decode_manifest(chance.randbytes(chance.randrange(200)))


def map_mutated(seed: int, rounds: int) -> int:
    """Attach mutated manifests to real memory; return how many could be."""
    chance = random.Random(seed)
    mapped = 0
    one, other = Channel.pair()
    with one, other, _Nobody(one) as client:
        for number in range(rounds):
            data = chance.choice([spoil_bytes, spoil_values])(chance, SEEDS[1], 1)
            fds = [make_memfd(size, seals=READ_ONLY) for size in (GRANULE, 2 * GRANULE)]
            sizes = (Segment(GRANULE), Segment(2 * GRANULE))
            attachment = Attachment(number, "n", 1, 0, sizes, fds, data, None, {}, False)
            try:
                with Lease(client, attachment, chance.choice(["r", "cow"])) as lease:
                    for name, array in lease.items():
                        view = array.numpy()
                        assert view.nbytes == math.prod(array.shape) * array.itemsize, name
                        assert not view.nbytes or bytes(view.reshape(-1)[-1:].view("u1")) is not None
                        del view
                    del array
                mapped += 1
            except (ProtocolError, UnsupportedError):  # the latter: a GPU that this process does not know
                pass
            except UnboundLocalError:
                mapped += 1  # a manifest without arrays
            except VramError as error:
                pytest.fail(f"seed {seed}, manifest {number}: {type(error).__name__}: {error}\n{data.hex()}")
        assert len(client.returned) == rounds, "a lease was kept"
    return mapped


def test_s7_what_a_mutated_manifest_says_of_real_memory_is_never_believed() -> None:
    """Nothing is left behind, every lease is given back, and every array that comes out can be read to its end."""
    assert map_mutated(3, 600) > 20


@pytest.mark.slow
def test_s7_what_a_mutated_manifest_says_of_real_memory_is_never_believed_at_length() -> None:
    map_mutated(4, 5_000)
