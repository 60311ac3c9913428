"""The simulated roll-out to a fleet: the rules of vram.nodes.swarm with clocks instead of networks.

A piece takes as long as the busier of its two network cards allows when it begins. The network in between, disks,
digests and publications are not simulated. Pieces are larger than real ones, which makes a roll-out slower, not faster.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from vram.nodes.swarm import Swarm


@dataclass(frozen=True, slots=True)
class RollOut:
    """The result of a roll-out: seconds until the last and the median of the nodes that finish have everything,
    infinite if none finishes. `most_sent` is the bytes of the busiest node besides the source."""

    seconds: float
    median: float
    finished: int
    source_bytes: int
    most_sent: int


def simulate(
    nodes: int, nbytes: int, rate: float, *, pieces: int = 100, streams: int = 4, share: bool = True, lose: int = 0
) -> RollOut:
    """Roll out `nbytes` to `nodes` that begin at the same time; `rate` is bytes a second, each way, of a network card.
    `streams` is the pieces that a node gets at a time; `lose` nodes die when they have half of the pieces."""
    size = nbytes / pieces
    swarm = Swarm(pieces)
    names = [number.to_bytes(4, "big") for number in range(nodes)]
    address = {f"{number}:1": number + 1 for number in range(nodes)}  # 0 is the source
    sending = [0] * (nodes + 1)
    sent = [0.0] * (nodes + 1)
    receiving = [0] * nodes
    have = [0] * nodes
    alive = [True] * nodes
    finished: list[float] = []
    idle: deque[int] = deque()  # the nodes that wait, the longest first
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
        if node < lose and 2 * have[node] >= pieces:
            alive[node] = False
            swarm.leave(names[node])
        elif have[node] == pieces:
            finished.append(now)
        # Some that wait look again: the piece that has come, and the end that is free, may be what they waited for.
        for other in [node, *(idle.popleft() for _ in range(min(len(idle), 2 * streams)))]:
            fill(other)
    ends = finished or [math.inf]  # in order, as the events are
    return RollOut(ends[-1], ends[len(ends) // 2], len(finished), round(sent[0]), round(max(sent[1:])))
