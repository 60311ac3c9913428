"""The simulated roll-out to a fleet: the rules of :mod:`.swarm` with clocks instead of networks.

A piece takes as long as the busier of its two network cards allows when it begins. The network in between, disks,
digests and publications are not simulated. Pieces are larger than real ones, which makes a roll-out slower, not faster.
``python -m vram.nodes.fleet --nodes 1000 --bytes 100e9 --rate 25e9`` prints the result.
"""

from __future__ import annotations

import argparse
import heapq
from collections import deque
from dataclasses import dataclass

from .swarm import Swarm


@dataclass(frozen=True, slots=True)
class RollOut:
    """The result of a roll-out: seconds until the first, the median and the last node have everything.
    `most_sent` is the bytes of the busiest node besides the source; `lost` nodes died and count nowhere else."""

    seconds: float
    first: float
    median: float
    source_bytes: int
    most_sent: int
    lost: int


def simulate(
    nodes: int, nbytes: int, rate: float, *, pieces: int = 100, streams: int = 4, share: bool = True, lose: int = 0
) -> RollOut:
    """Roll out `nbytes` to `nodes` that begin at the same time; `rate` is bytes a second, each way, of a network card.
    `streams` is the pieces that a node gets at a time; `lose` nodes die, each when it has half of the pieces."""
    size = nbytes / pieces
    swarm = Swarm(pieces)
    names = [number.to_bytes(4, "big") for number in range(nodes)]
    address = {f"{number}:1": number + 1 for number in range(nodes)}  # 0 is the source
    sending = [0] * (nodes + 1)
    sent = [0.0] * (nodes + 1)
    receiving = [0] * nodes
    have = [0] * nodes
    alive = [True] * nodes
    doomed = set(range(lose))
    finished: list[float] = []
    idle: deque[int] = deque()  # who waits, the longest first
    events: list[tuple[float, int, int, int]] = []  # when, which node, its piece, from whom
    for number, name in enumerate(names):
        swarm.join(name, f"{number}:1" if share else "")
    now = 0.0

    def begin(node: int) -> bool:
        given = swarm.next(names[node])
        if given is None:
            return False
        sender = address[given.peer] if given.peer else 0
        sending[sender] += 1
        receiving[node] += 1
        share_of = max(sending[sender], receiving[node])
        heapq.heappush(events, (now + size * share_of / rate, node, given.number, sender))
        return True

    def fill(node: int) -> None:
        while alive[node] and receiving[node] < streams:
            if not begin(node):
                if not swarm.is_done(names[node]):
                    idle.append(node)
                return

    for node in range(nodes):
        fill(node)
    while events:
        now, node, piece, sender = heapq.heappop(events)
        sending[sender] -= 1
        receiving[node] -= 1
        if not alive[node] or (sender and not alive[sender - 1]):
            if alive[node]:
                swarm.failed(names[node], piece)
                fill(node)
            continue
        sent[sender] += size
        swarm.got(names[node], piece)
        have[node] += 1
        if have[node] == pieces:
            finished.append(now)
        if node in doomed and have[node] >= pieces // 2:
            alive[node] = False
            doomed.discard(node)
            swarm.leave(names[node])
        # Some who wait look again: the piece that has come, and the end that is free, may be what they waited for.
        for other in [node, *(idle.popleft() for _ in range(min(len(idle), 2 * streams)))]:
            fill(other)
    finished.sort()
    return RollOut(
        finished[-1], finished[0], finished[len(finished) // 2], round(sent[0]), round(max(sent[1:])), lose
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    """Print what a roll-out costs, with and without passing on."""
    parser = argparse.ArgumentParser(prog="python -m vram.nodes.fleet", description="Simulate a roll-out to a fleet.")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--bytes", type=float, default=100e9, dest="nbytes", help="bytes that each node is to have")
    parser.add_argument("--rate", type=float, default=25e9 / 8, help="bytes a second of a network card")
    parser.add_argument("--pieces", type=int, default=100)
    given = parser.parse_args(arguments)
    nbytes = int(given.nbytes)
    alone = nbytes / given.rate
    print(f"{given.nodes} nodes, {nbytes / 1e9:g} GB each, {given.rate / 1e9:g} GB/s: one copy takes {alone:.0f} s")
    for what, lose in (("they pass on", 0), ("they pass on, and 1 % dies", max(1, given.nodes // 100))):
        found = simulate(given.nodes, nbytes, given.rate, pieces=given.pieces, lose=lose)
        print(
            f"{what}: {found.seconds:.0f} s, {found.seconds / alone:.2f} times that; half of them {found.median:.0f} s"
        )
        source, busiest = found.source_bytes / nbytes, found.most_sent / nbytes
        print(f"  the source sends {source:.2f} copies, the busiest of the others {busiest:.2f}")
    print(f"all from the source: {given.nodes * alone:.0f} s, {given.nodes} copies")


if __name__ == "__main__":
    main()
