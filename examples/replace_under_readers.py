"""A service that goes on to a new version of its model between two requests, without a restart.

Both versions are in memory from the publication to the service's next request, which frees the old one.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing.connection import Connection

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "host"  # or "cuda:0"


def serve(requests: Connection) -> None:
    """Answer requests with whatever version is current when they come."""
    lease = vram.attach("model", timeout=60.0)
    while (request := requests.recv()) is not None:
        if lease.is_stale():
            newer = lease.upgrade()
            lease.close()  # what is still in use of it stays until it is not
            lease = newer
        weights = lease["w"].numpy() if DEVICE == "host" else lease["w"].torch()  # the shared memory, not a copy
        requests.send((lease.version, float(weights.sum()) * request))
        del weights
    lease.close()


def publish(number: int) -> None:
    """Publish version `number`; each replaces the one before it."""
    weights = vram.zeros((1024, 1024), "float32", device=DEVICE)
    weights.fill(number)
    vram.publish("model", {"w": weights}, meta={"step": str(1000 * number)})


def main() -> None:
    """Publish three versions while a service answers."""
    with vram.private_keeper():
        publish(1)
        ours, theirs = multiprocessing.Pipe()
        service = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,))
        service.start()
        theirs.close()
        for number in (1, 2, 3):
            if number > 1:
                publish(number)
            ours.send(2)
            version, answer = ours.recv()
            print(f"version {version} answers {answer:.0f}")
            assert (version, answer) == (number, 2.0 * number * 1024 * 1024)
        print(f"{vram.statistics().nbytes >> 20} MiB are held: one version")
        ours.send(None)
        service.join()


if __name__ == "__main__":
    main()
