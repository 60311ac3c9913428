"""One odd argument is an error of its own: it costs neither the connection to the keeper nor the leases on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vram

ODD = [1, 0, None, "yes", np.zeros(2)]
CALLS: dict[str, Callable[[], object]] = {
    **{f"publish writable={odd!r}": lambda odd=odd: vram.publish("a", {"x": np.ones(1)}, writable=odd) for odd in ODD},
    "publish ttl=10**400": lambda: vram.publish("a", {"x": np.ones(1)}, ttl=10**400),
    **{f"publish consume={odd!r}": lambda odd=odd: vram.publish("a", {"x": np.ones(1)}, consume=odd) for odd in ODD},
    **{
        f"attach version={odd!r}": lambda odd=odd: vram.attach("a", version=odd)
        for odd in (0, -1, 2**62, 10**30, True, 1.5, "1")
    },
    "remove version=2**62": lambda: vram.remove("a", version=2**62),
    "meta of 600 keys": lambda: vram.publish("a", {"x": np.ones(1)}, meta={f"{n:x}": "" for n in range(600)}),
    "meta of numbers": lambda: vram.publish("a", {"x": np.ones(1)}, meta={"a": 1}),  # type: ignore[dict-item]
    "access is an array": lambda: vram.attach("a", access=np.zeros(2)),  # type: ignore[arg-type]
    "device is an array": lambda: vram.empty(3, device=np.zeros(2)),  # type: ignore[arg-type]
    "attach_or_publish writable=1": lambda: vram.attach_or_publish("a", dict, writable=1),  # type: ignore[arg-type]
}


@pytest.fixture(scope="module")
def lease() -> Iterator[vram.Lease]:
    with vram.private_keeper():
        vram.publish("kept", {"x": np.arange(5)})
        with vram.attach("kept") as lease:
            yield lease


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_an_odd_argument_is_a_usage_error_and_costs_nothing_else(call: Callable[[], Any], lease: vram.Lease) -> None:
    with pytest.raises(vram.errors.UsageError):
        call()
    assert lease.is_stale() is False  # asked over the connection that has the lease
    assert lease["x"].numpy().tolist() == [0, 1, 2, 3, 4]


def test_every_verb_takes_a_keeper_by_its_path(lease: vram.Lease) -> None:
    there = Path(os.environ["VRAM_KEEPER"])
    with vram.Keeper(there) as same:
        assert same.path == str(there)
    for keeper in (there, str(there), vram.Keeper(there)):
        assert vram.publish("path", {"x": np.ones(1)}, keeper=keeper).version
        vram.attach("path", keeper=keeper).close()
        vram.attach_or_publish("path", dict, keeper=keeper).close()
        assert vram.statistics(keeper=keeper).entries
        assert vram.revoke("path", timeout=0, keeper=keeper).holders == ()


def test_numpys_own_booleans_are_booleans(lease: vram.Lease) -> None:
    assert vram.publish("flags", {"x": np.ones(1)}, writable=np.bool_(True)).version == 1  # type: ignore[arg-type]
    vram.remove("flags")
