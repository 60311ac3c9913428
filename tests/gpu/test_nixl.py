"""Replicas by NIXL between memory of two GPUs of one host, and to and from the host: two keepers, two processes."""

from __future__ import annotations

import pytest
from tests.support import children as processes
from tests.support import nixl_children as children
from tests.support.deadlines import AT_ONCE
from tests.support.places import private_socket

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]

NBYTES = (100 << 20) + 12_345  # seven pieces, of which the last is no multiple of anything


@pytest.fixture(autouse=True)
def by_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl", reason="could not import 'nixl'")
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)  # loopback, as the engine says by itself
    monkeypatch.delenv("UCX_TLS", raising=False)


@pytest.mark.parametrize(
    ("source", "target"), [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("host", "cuda:1"), ("cuda:0", "host")]
)
def test_a_replica_goes_from_place_to_place_by_nixl_to_the_byte(source: str, target: str) -> None:
    with (
        private_socket() as origin,
        private_socket() as here,
        processes.child(children.carry, origin, source, NBYTES) as carrier,
        processes.child(children.pull_by_nixl, carrier.said(), target, here, NBYTES, AT_ONCE) as reader,
    ):
        engine, why, nbytes, place, equal = reader.said()
        assert (engine, why) == ("nixl", ""), "by NIXL, in the best way that it has"
        assert nbytes >= NBYTES
        assert place == target
        assert equal == (True, [0, 1, 2])
