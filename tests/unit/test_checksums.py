"""Digests of tensors: the bytes, their places, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from vram.engines.checksums import digest


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed: its views are not tested")


def test_each_byte_and_its_place_count(torch: Any) -> None:
    tensor = torch.arange(1003, dtype=torch.int32).view(torch.uint8)[:4009]  # no multiple of 8
    seen = {digest({"w": tensor})}
    for place in (0, 7, 8, 2000, 4007, 4008):
        changed = tensor.clone()
        changed[place] += 1
        seen.add(digest({"w": changed}))
    swapped = tensor.clone()
    swapped[:8], swapped[8:16] = tensor[8:16], tensor[:8]
    seen.add(digest({"w": swapped}))
    assert len(seen) == 8
    assert digest({"w": tensor.clone()}) in seen


def test_names_types_and_shapes_count(torch: Any) -> None:
    zeros = torch.zeros(16)
    found = {
        digest(arrays)
        for arrays in (
            {"w": zeros}, {"v": zeros}, {"w": zeros.reshape(4, 4)}, {"w": zeros.to(torch.int32)}, {"w": zeros[:8]},
            {"w": zeros, "v": zeros}, {"w": torch.zeros(0)}, {},
        )
    }  # fmt: skip
    assert len(found) == 8


def test_where_a_tensor_lies_does_not_count(torch: Any) -> None:
    whole = torch.arange(64, dtype=torch.uint8)
    assert digest({"w": whole[3:50]}) == digest({"w": whole[3:50].clone()})
    ones = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones((), dtype=torch.float64)}
    assert digest(ones) == digest(dict(reversed(ones.items())))


def test_many_pieces_are_one_digest(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1000, dtype=torch.int64)
    at_once = digest({"w": tensor})
    monkeypatch.setattr("vram.engines.checksums._PIECE", 7)
    assert digest({"w": tensor}) == at_once
