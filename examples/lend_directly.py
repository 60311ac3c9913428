"""Two processes and no keeper: one lends what it has, the other borrows it for a while and gives it back.

The path of the socket can be mounted into a container. Works with memory of other libraries as well: torch tensors,
CuPy arrays (vram.explain says which way it goes, or why it cannot).
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "host"  # or "cuda:0"


def borrow(at: str) -> float:
    """Read what is lent at a path."""
    with vram.borrow(at, timeout=60.0) as lease:
        lease.on_revoke(lambda lease: lease.close())  # give back when asked
        weights = lease["weights"]
        return float((weights.numpy() if DEVICE == "host" else weights.to_host()).mean())  # the CPU sees no GPU memory


def main() -> None:
    """Lend to a process, see who has it, and ask for it back."""
    weights = vram.zeros((1024, 1024), "float32", device=DEVICE)
    weights.fill(2.5)
    print("it would go:", vram.explain(weights))
    with tempfile.TemporaryDirectory() as directory:
        at = f"{directory}/weights.sock"
        with vram.lend({"weights": weights}, at=at) as lending:
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                print("two processes read:", pool.map(borrow, [at, at]))
            with vram.borrow(at) as lease:
                print("one more has it:", [holder.pid for holder in lending.holders()])
                lease.on_revoke(lambda lease: lease.close())
                left = lending.revoke(timeout=60.0)
            print("after asking for it back:", list(left.holders) or "nobody has it")
            assert not left.holders
    weights.resize(0)  # nobody can look any more


if __name__ == "__main__":
    main()
