"""The commands for entries on other nodes."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..spec import format_count, format_size
from .options import AsJson, Socket
from .results import print_result

if TYPE_CHECKING:
    from ..nodes.replicate import Replicated

Key = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The key that the nodes have in common; default $VRAM_NODES_KEY, else your own."),
]


def carry(
    at: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 chooses one.")],
    key: Key = None,
    prefix: Annotated[str, typer.Option(metavar="NAME", help="Offer only entries whose names begin like this.")] = "",
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Another address that readers write for it; can be repeated."),
    ] = None,
    deltas: Annotated[
        bool, typer.Option("--deltas", help="Send what changed since the version before, which stays in memory.")
    ] = False,
    socket: Socket = None,
) -> None:
    """Offer the keeper's entries to other nodes until Ctrl-C or SIGTERM: vram.replicate and `vram follow` get them.

    Without a key only loopback addresses are listened at, and only your own processes are let in.
    """
    from ..nodes.carrier import Carrier

    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with Carrier(at, key=key, prefix=prefix, names=name or (), deltas=deltas, keeper=socket) as carrier:
            print(f"carrying at {carrier.address}", flush=True)
            if not carrier.has_named_key:
                print("vram: no key is named: only processes of this user are let in", file=sys.stderr)
            carrier.wait()


Origin = Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where a carrier listens: vram carry.")]
Device = Annotated[str, typer.Option(help='Where to keep it: "host", or a GPU, such as "cuda:0".')]


def replicate(
    origin: Origin,
    name: Annotated[str, typer.Argument(help="An entry of its keeper.")],
    device: Device = "host",
    key: Key = None,
    streams: Annotated[int, typer.Option(min=1, max=64, help="Connections at the same time.")] = 2,
    timeout: Annotated[float, typer.Option(min=0.0, metavar="SECONDS", help="Seconds without progress.")] = 10.0,
    socket: Socket = None,
    as_json: AsJson = False,
) -> None:
    """Pull an entry from another node's carrier, check it, and publish it here under the same name."""
    from ..nodes import replicate as replicas
    from ..progress import show_progress

    with show_progress():
        done = replicas.replicate(origin, name, device=device, key=key, streams=streams, timeout=timeout, keeper=socket)
    print_result(done, as_json, _replicated(done, device))


def follow(
    origin: Origin,
    name: Annotated[str, typer.Argument(help="An entry of its keeper.")],
    device: Device = "host",
    key: Key = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="SECONDS", help="Seconds that the carrier may be gone [default: for ever]."),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Update one version in place: readers keep their addresses.")
    ] = False,
    socket: Socket = None,
) -> None:
    """Keep a replica of another node's entry at its newest version, until Ctrl-C or SIGTERM."""
    from ..nodes.follow import follow as follow_remote
    from ..progress import show_progress

    with contextlib.suppress(KeyboardInterrupt), show_progress():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        for done in follow_remote(
            origin, name, device=device, key=key, in_place=in_place, timeout=timeout, keeper=socket
        ):
            print(_replicated(done, device), flush=True)


def _replicated(done: Replicated, device: str) -> str:
    rate = format_size(int(done.nbytes / max(done.seconds, 1e-9)))
    as_deltas = f", {format_size(done.delta_bytes)} as deltas" if done.delta_bytes else ""
    return (
        f"{done.name} version {done.version}, which is {done.origin_version} of {done.origin}: "
        f"{format_count(done.arrays, 'array')}, {format_size(done.nbytes)} to {device} in {done.seconds:.2f} s "
        f"({rate}/s by {done.engine}, {format_size(done.from_peers)} from other readers{as_deltas})"
    )
