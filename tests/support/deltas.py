"""Carriers that send deltas, and replicas that follow them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.support.carried import Nodes, same

import vram
from vram.nodes import carrier as carriers
from vram.nodes import replicate
from vram.nodes.carrier import Carrier
from vram.nodes.digests import check_installed
from vram.nodes.follow import follow
from vram.typing import Replicated

PIECE = 16 << 20
SIZE = 2 * PIECE + 1000  # bytes of the weights: three pieces


def weights(nbytes: int = SIZE) -> dict[str, Any]:
    draw = np.random.default_rng(1)
    w = draw.standard_normal(nbytes // 2, dtype=np.float32).astype(ml_dtypes.bfloat16)
    return {"w": w, "tables": np.arange(1001, dtype=np.uint8), "step": np.array(0)}


def next_of(arrays: dict[str, Any], share: float = 0.02) -> dict[str, Any]:
    """Give a share of the weights other values."""
    draw = np.random.default_rng(int(arrays["step"]))
    w = arrays["w"].copy()
    some_ = draw.random(len(w)) < share
    w[some_] = draw.standard_normal(int(some_.sum()), dtype=np.float32).astype(ml_dtypes.bfloat16)
    return {**arrays, "w": w, "step": arrays["step"] + 1}


def is_here(two: Nodes, arrays: dict[str, Any]) -> bool:
    """Whether the model is here, with these arrays."""
    with vram.attach("model", keeper=two.here) as lease:
        return same(lease, arrays)


def offering(keeper: str, *, deltas: bool = True, key: Path | None = None) -> Carrier:
    """Begin a carrier, which the caller closes."""
    return Carrier("127.0.0.1:0", key=key, deltas=deltas, keeper=keeper)


@contextlib.contextmanager
def following(address: str, keeper: str, *, key: Path | None = None, **how: Any) -> Iterator[Iterator[Replicated]]:
    """Follow the model for the length of a block."""
    versions = follow(address, "model", key=key, keeper=keeper, **how)
    with contextlib.closing(versions):  # type: ignore[type-var]
        yield versions


def forget_soon(patch: pytest.MonkeyPatch) -> None:
    """Have carriers give versions back soon after the last reader."""
    patch.setattr(carriers, "KEPT", 0.2)


def have_many_memories(patch: pytest.MonkeyPatch) -> None:
    """Have a replica on the host made of a memory for each piece."""
    patch.setattr(replicate, "_LEAST_PART", PIECE)


def be_without(package: str, patch: pytest.MonkeyPatch) -> None:
    """Be where a package is not installed."""
    patch.setitem(sys.modules, package, None)
    check_installed.cache_clear()


def count_offered(carrier: Carrier) -> int:
    """Return how many states a carrier has attached or copied."""
    return len({id(one) for one in (*carrier._offered.values(), *carrier._bases.values())})


def offers_nothing(carrier: Carrier) -> bool:
    """Whether a carrier has no version but bases."""
    return not carrier._offered
