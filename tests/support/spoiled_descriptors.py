"""Descriptors in which something was changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from vram.keeper import messages as m
from vram.keeper.client import KeeperClient
from vram.sharing.channel import Channel

GRANULE = 2 << 20


NUMBERS = [0, 1, -1, 5, 63, 64, 1023, 1024, GRANULE, 2**31, 2**32, 2**47, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1]


OTHERS: list[Any] = [
    *(None, True, 0.5, 1e308, float("nan"), "", "host", "float32", "GPU-", "cuda:0", "x" * 2000),
    *(b"", b"\xff\xfe", [], {}, [[]], {"version": 1}, [0] * 70, msgspec.msgpack.Ext(5, b"?")),
]


def spoil_bytes(random: random.Random, data: bytes, most: int = 4) -> bytes:
    """Flip, cut, double and insert bytes."""
    spoilt = bytearray(data)
    for _ in range(random.randint(1, most)):
        at = random.randrange(len(spoilt) + 1)
        match random.randrange(5):
            case 0 if at < len(spoilt):
                spoilt[at] ^= 1 << random.randrange(8)
            case 1 if at < len(spoilt):
                spoilt[at] = random.choice([0, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xC6, 0xCF, 0xD7, 0xDD, 0xDF, 0xFF])
            case 2:
                del spoilt[at : at + random.randint(1, 8)]
            case 3:
                spoilt[at:at] = random.randbytes(random.randint(1, 8))
            case _:
                spoilt[at:at] = spoilt[at : at + random.randint(1, 40)]
    return bytes(spoilt)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, (dict, list)) and value:
            yield from _places(value)


def spoil_values(random: random.Random, data: bytes, most: int = 4) -> bytes:
    """Replace, drop and double values, bytes by others of the same length; what comes of it is msgpack still."""
    tree = msgspec.msgpack.decode(data)
    for _ in range(random.randint(1, most)):
        holder, key = random.choice(list(_places(tree)))
        value = holder[key]
        match random.randrange(7):
            case 0 | 1 | 2:
                holder[key] = random.choice(NUMBERS)
            case 3:
                holder[key] = copy.deepcopy(random.choice(OTHERS))
            case 4 if isinstance(value, bytes) and value:
                at = random.randrange(len(value))
                holder[key] = value[:at] + bytes([value[at] ^ 1 << random.randrange(8)]) + value[at + 1 :]
            case 5 if isinstance(holder, dict) or len(holder) > 1:
                del holder[key]
            case _ if isinstance(holder, list):
                holder.insert(key, random.choice(NUMBERS))
            case _:
                holder[random.choice(["version", "memories", "arrays", "a", ""])] = copy.deepcopy(value)
        if not tree:
            break
    return msgspec.msgpack.encode(tree)


class _Nobody(KeeperClient):
    """A connection to nobody, that notes which leases were given back."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel, "/nowhere", "", m.Welcome(0))
        self.returned: list[int] = []

    def release_later(self, lease_id: int) -> None:
        self.returned.append(lease_id)

    def release(self, lease_ids: Sequence[int]) -> None:
        self.returned += lease_ids
