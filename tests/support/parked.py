"""Whether an entry is parked, and holds what was published."""

from __future__ import annotations

import numpy as np
from tests.support.park_children import NAME

import vram

GPU, OTHER_GPU = "cuda:0", "cuda:1"


def is_parked() -> bool:
    (entry,) = vram.list_entries(NAME)
    return entry.parked


def check(lease: vram.Lease, device: str = GPU) -> None:
    """What is there is what was published."""
    whole = np.concatenate([lease["a"].to_host(), lease["b"].to_host()])
    assert (whole == np.arange(1024, dtype="int32")[:, None]).all()
    assert (str(lease["a"].device), lease.meta, lease["a"].readonly) == (device, {"k": "v"}, True)
