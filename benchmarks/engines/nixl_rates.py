"""What a replica by NIXL reaches of NIXL's own read of the same bytes: host memory of one machine, in one run.

    python benchmarks/engines/nixl_rates.py [--size 2GiB] [--rounds 3]

Both read what one other process has, in turn, each time into new memory: NIXL's own read of all of it in one request,
without a check, and ``vram.replicate`` in pieces, each checked by its digest and then published. Seconds of the
transfer; tcp is left out. By what UCX moves the bytes is up to UCX: ``UCX_TLS=tcp`` before it makes it take TCP.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import msgspec

import vram
from vram.bench.children import own_keeper
from vram.errors import UnsupportedError
from vram.nodes import pull
from vram.nodes.nixl import Nixl, _Offered
from vram.spec import HOST, parse_size

SOURCE = """
import sys, numpy as np, vram
from vram.nodes.carrier import Carrier
from vram.nodes.nixl import Nixl
keeper, nbytes = sys.argv[1], int(sys.argv[2])
array = vram.empty((nbytes // 8,), "u8", device="host")
array.numpy()[:] = np.arange(nbytes // 8, dtype="u8")
vram.publish("model", {"w": array}, keeper=keeper)
with Carrier("127.0.0.1:0", keeper=keeper, engines=[Nixl(trusted=True)]) as carrier:
    print(carrier.address, flush=True)
    sys.stdin.read()
"""


class NoTcp:
    """In the place of tcp."""

    name = "tcp"

    def open(self, data: bytes, link: Any) -> Any:
        raise UnsupportedError("tcp", "another test", "one of NIXL")


def own(engine: Nixl, offered: _Offered, nbytes: int) -> float:
    """Return the seconds of NIXL's own read."""
    array = vram.empty((nbytes // 8,), "u8", device="host")
    agent = engine._agent()
    peer = agent.add(offered.metadata)
    (place,) = offered.places
    api = agent._api
    registered = api.register_memory([(array.address, nbytes, 0, "")], mem_type="DRAM")
    here = api.get_xfer_descs([(array.address, nbytes, 0)], mem_type="DRAM")
    there = api.get_xfer_descs([(place.address, nbytes, 0)], mem_type="DRAM")
    began = time.perf_counter()
    handle = api.initialize_xfer("READ", here, there, peer)
    state = api.transfer(handle)
    while state == "PROC":
        time.sleep(100e-6)
        state = api.check_xfer_state(handle)
    took = time.perf_counter() - began
    assert state == "DONE"
    api.release_xfer_handle(handle)
    api.deregister_memory(registered)
    agent.drop(peer)
    assert int(array.numpy()[-1]) == nbytes // 8 - 1
    return took


def main() -> int:
    """Print the rates, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    nbytes = parse_size(given.size)
    offered: list[_Offered] = []

    class Heard(Nixl):
        def open(self, data: bytes, link: Any) -> Any:
            offered[:] = [msgspec.msgpack.decode(data, type=_Offered)]
            return super().open(data, link)

    pull.TCP = NoTcp()  # type: ignore[assignment]
    engine = Heard(trusted=True)
    with own_keeper() as origin, own_keeper() as here:
        with subprocess.Popen(
            [sys.executable, "-c", SOURCE, origin, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as source:
            assert source.stdin is not None
            assert source.stdout is not None
            try:
                address = source.stdout.readline().strip()
                theirs, ours = [], []
                for number in range(given.rounds + 1):
                    done = vram.replicate(address, "model", engines=[engine], keeper=here, timeout=60.0)
                    assert done.engine == "nixl"
                    vram.remove("model", keeper=here)
                    took = own(engine, offered[0], nbytes)
                    if number:  # connections are made by the first
                        ours.append(done.seconds)
                        theirs.append(took)
                    print(
                        f"replicate {nbytes / done.seconds / 1e9:.2f} GB/s, "
                        f"NIXL's own read {nbytes / took / 1e9:.2f} GB/s, "
                        f"{took / done.seconds:.2f} of it (load {os.getloadavg()[0]:.1f})",
                        flush=True,
                    )
            finally:
                source.stdin.close()
        engine.close()
    ratio = statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
    print(f"median of {given.rounds}: {ratio:.2f} of NIXL's own read, verified ({given.size}, {HOST} to {HOST})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
