"""What ranks of the bench do that exchange memory by bare calls."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection

from benchmarks.bare_exchange import BareExchange

from vram.bench.gpu import bare_calls
from vram.spec import Location

__all__ = ["exchange"]


def exchange(place: str, pipe: Connection, rank: int, size: int) -> None:
    """Exchange memory a few times, and say how much of the driver's is left and how long it took."""
    import standin

    with contextlib.ExitStack() as stage:
        bare = stage.enter_context(bare_calls(Location("cuda", rank)))
        made = BareExchange(stage, bare, place, rank, size)
        pipe.send("made")
        pipe.recv()
        took = [made.set_up(64 << 20) for _ in range(5)]
        live = standin.Standin().live()
        pipe.send((all(one > 0 for one in took), {kind: live.get(kind, 0) for kind in ("mappings", "allocations")}))
        pipe.recv()
