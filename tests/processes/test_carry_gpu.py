"""Replicas from and to memory of GPUs: on the stand-in, staged through memory of the host."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.carried import Nodes, model, same

import vram
from vram.nodes.carrier import Carrier

PIECE = 16 << 20
pytestmark = [pytest.mark.standin, pytest.mark.filterwarnings("default::DeprecationWarning")]


def publish(two: Nodes, arrays: dict[str, Any], device: str) -> None:
    ours = {name: vram.copy(array, device=device) for name, array in arrays.items()}
    vram.publish("model", ours, keeper=two.origin)
    for array in ours.values():
        array.close()


def is_here(two: Nodes, arrays: dict[str, Any]) -> bool:
    with vram.attach("model", keeper=two.here) as lease:
        found = {name: vram.copy(array, device="host") for name, array in lease.items()}
    try:
        return same(found, arrays)
    finally:
        for array in found.values():
            array.close()


@pytest.mark.parametrize(("source", "target"), [("cuda:0", "host"), ("host", "cuda:0"), ("cuda:0", "cuda:1")])
def test_from_a_place_to_another(two: Nodes, source: str, target: str) -> None:
    arrays = model(PIECE + 1000)
    publish(two, arrays, source)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        done = vram.replicate(carrier.address, "model", device=target, keeper=two.here)
    assert done.engine == "tcp"
    assert is_here(two, arrays)
    shown = vram.entry("model", keeper=two.here)
    assert (shown.devices == ("host",)) == (target == "host")


@pytest.mark.parametrize(("source", "target"), [("cuda:0", "host"), ("cuda:0", "cuda:1")])
def test_what_changed_comes_as_a_delta(two: Nodes, source: str, target: str) -> None:
    arrays = model(PIECE + 1000)
    with Carrier("127.0.0.1:0", deltas=True, keeper=two.origin) as carrier:
        for change in (0, 1, 2):
            arrays["w"][:: 100 + change] += change
            publish(two, arrays, source)
            done = vram.replicate(carrier.address, "model", device=target, keeper=two.here)
            assert (0 < done.delta_bytes < PIECE / 12) == (change > 0)
            assert done.why == {}
            assert is_here(two, arrays)
