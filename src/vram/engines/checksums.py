"""A digest of the bytes of tensors, computed where they are: for names that say which bytes they stand for (S11)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

_PIECE = 1 << 20  # elements of 8 bytes at a time: the scratch memory is a few times 8 MiB
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # odd, of 64 bits


def digest(arrays: Mapping[str, Any]) -> str:
    """Return a digest of names, types, shapes and bytes of contiguous tensors, in 64 hexadecimal digits. Sums of bytes
    and places are computed on the device: they tell checkpoints apart, and are no protection from an attacker."""
    whole = hashlib.sha256()
    for name, tensor in sorted(arrays.items()):
        sums = _sums(tensor)
        whole.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode() + struct.pack("<2q", *sums))
    return whole.hexdigest()


def _sums(tensor: Any) -> tuple[int, int]:
    """Return two sums over the bytes of a tensor; integers of torch wrap around."""
    import torch

    if not tensor.numel():
        return 0, 0
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    full = flat.numel() // 8 * 8
    if flat.storage_offset() % 8:
        flat = flat.clone()
    totals = torch.zeros(2, dtype=torch.int64, device=flat.device)
    words = flat[:full].view(torch.int64)
    for start in range(0, words.numel(), _PIECE):
        _add(totals, words[start : start + _PIECE], start)
    if full < flat.numel():
        rest = torch.zeros(8, dtype=torch.uint8, device=flat.device)
        rest[: flat.numel() - full] = flat[full:]
        _add(totals, rest.view(torch.int64), words.numel())
    first, second = totals.tolist()
    return int(first), int(second)


def _add(totals: Any, words: Any, start: int) -> None:
    import torch

    places = torch.arange(start, start + words.numel(), dtype=torch.int64, device=words.device)
    for index, factor in enumerate(_FACTORS):
        signed = factor - (1 << 64)
        mixed = (words ^ (places * signed)) * signed
        mixed ^= mixed >> 29  # so that the sum is not one of the words
        totals[index] += (mixed * (places * 2 + 1)).sum()
