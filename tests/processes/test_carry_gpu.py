"""Replicas from and to memory of GPUs: on the stand-in, staged through memory of the host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.carried import Nodes, model, nodes, same

import vram
from vram.nodes.carrier import Carrier

PIECE = 16 << 20
pytestmark = [pytest.mark.standin, pytest.mark.filterwarnings("default::DeprecationWarning")]


@pytest.fixture
def two() -> Iterator[Nodes]:
    with nodes() as found:
        yield found


@pytest.mark.parametrize(("source", "target"), [("cuda:0", "host"), ("host", "cuda:0"), ("cuda:0", "cuda:1")])
def test_from_a_place_to_another(two: Nodes, source: str, target: str) -> None:
    arrays = model(PIECE + 1000)
    ours = {name: vram.copy(array, device=source) for name, array in arrays.items()}
    vram.publish("model", ours, keeper=two.origin)
    for array in ours.values():
        array.close()
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        done = vram.replicate(carrier.address, "model", device=target, keeper=two.here)
    assert done.engine == "tcp"
    with vram.attach("model", keeper=two.here) as lease:
        found = {name: vram.copy(array, device="host") for name, array in lease.items()}
    assert same(found, arrays)
    for array in found.values():
        array.close()
    shown = vram.entry("model", keeper=two.here)
    assert (shown.devices == ("host",)) == (target == "host")
