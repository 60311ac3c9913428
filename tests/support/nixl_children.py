"""A carrier with NIXL, and a reader that gets what it gets by NIXL alone: in processes of their own."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import vram
from vram.errors import UnsupportedError
from vram.nodes import pull
from vram.nodes.carrier import Carrier
from vram.nodes.nixl import Nixl
from vram.spec import HOST


def weights(nbytes: int) -> np.ndarray[Any, Any]:
    """Return bytes that are the same in each process."""
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype="u1")


class _NoTcp:
    """In the place of tcp in a reader, so that what comes comes by NIXL."""

    name = "tcp"

    def reaches(self, location: Any) -> bool:
        return location == HOST

    def open(self, data: bytes, link: Any) -> Any:
        raise UnsupportedError("this tcp", "another", "a test's")


def carry(pipe: Connection, keeper: str, device: str, nbytes: int) -> None:
    """Publish bytes at a place, and carry them until the other end hangs up."""
    made = vram.copy(weights(nbytes), device=device)
    small = vram.copy(np.arange(3), device=device)
    vram.publish("model", {"w": made, "b": small}, keeper=keeper)
    made.close()
    small.close()
    engine = Nixl(trusted=True)
    with Carrier("127.0.0.1:0", keeper=keeper, engines=[engine]) as carrier:
        pipe.send(carrier.address)
        pipe.poll(None)
    engine.close()


def pull_by_nixl(pipe: Connection, address: str, device: str, keeper: str, nbytes: int, timeout: float) -> None:
    """Pull them to a place, and say how that went and what arrived."""
    pull.TCP = _NoTcp()  # type: ignore[assignment]
    engine = Nixl(trusted=True)
    done = vram.replicate(address, "model", device=device, engines=[engine], keeper=keeper, timeout=timeout)
    with vram.attach("model", keeper=keeper) as lease:
        place = str(lease["w"].region.location)
        found = {name: vram.copy(array, device="host") for name, array in lease.items()}
    equal = np.array_equal(found["w"].numpy(), weights(nbytes)), found["b"].numpy().tolist()
    for array in found.values():
        array.close()
    engine.close()
    pipe.send((done.engine, done.why.get("nixl", ""), done.nbytes, place, equal))
    pipe.poll(None)
