"""Whether anything grew between the warm-up of a soak and its end, and what.

How flat is judged, from the samples after the warm-up, of which each was taken while all stood still:

* What is counted (descriptors, mappings of shared memory, threads, and all that a keeper counts) is exactly what it
  was: the least of the last third is no more than the most of the first third.
* What is mapped in all, where the allocator of the interpreter has its part, has grown by at most 16 mappings.
* Memory (RSS, and PSS, which shares what is shared) has grown by at most 1 MiB and 2 %, from the median of the first
  third to the median of the last: an allocator settles by less, and one byte for each of the millions is more.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Sample", "grown", "look_at", "table"]

KIB = 1024
MEMORY = ("rss", "pss")  # bytes
LOOSE = {"mapped": 16}
SLACK, SHARE = 1 << 20, 0.02


@dataclass(frozen=True, slots=True)
class Sample:
    """What each process, by its name, held at one moment; and what had been done by then.

    Attributes
    ----------
    seconds : float
        Since the beginning.
    done : mapping of str to int
        How many of what was done.
    held : mapping of str to mapping of str to int
        For each process and for the keeper's own counters what it holds.
    """

    seconds: float
    done: Mapping[str, int]
    held: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def look_at(pid: int) -> dict[str, int]:
    """Return what a process holds, as the kernel says."""
    here = Path(f"/proc/{pid}")
    memory = {}
    for line in (here / "smaps_rollup").read_text().splitlines():
        word, _, rest = line.partition(":")
        if word.lower() in MEMORY:
            memory[word.lower()] = int(rest.split()[0]) * KIB
    maps = (here / "maps").read_text().splitlines()
    return {
        **memory,
        "fds": len(list((here / "fd").iterdir())),
        "shared": sum("/memfd:" in line for line in maps),
        "mapped": len(maps),
        "threads": len(list((here / "task").iterdir())),
    }


def grown(samples: Sequence[Sample]) -> list[str]:
    """Return a line for everything that grew; nothing if all was flat.

    Parameters
    ----------
    samples : sequence of Sample
        Those after the warm-up, three at least.
    """
    third = len(samples) // 3
    if not third:
        return [f"{len(samples)} samples after the warm-up are too few to judge by: run it for longer"]
    found = []
    for who in samples[0].held:
        for what in samples[0].held[who]:
            early = [one.held[who][what] for one in samples[:third]]
            late = [one.held[who][what] for one in samples[-third:]]
            if what in MEMORY:
                before, after = statistics.median(early), statistics.median(late)
                limit = before + SLACK + SHARE * before
            else:
                before, after = max(early), min(late)
                limit = before + LOOSE.get(what, 0)
            if after > limit:
                found.append(f"{who}: {what} grew from {before:,.0f} to {after:,.0f}; {limit:,.0f} is flat")
    return found


def table(samples: Sequence[Sample]) -> list[str]:
    """Return the samples for people: one line each, memory in MiB, the most of any process and the sum of all."""
    lines = [
        "   seconds  hand-overs   attaches   PSS of all  most RSS    fds  shared  mapped  threads  keeper's counters"
    ]
    for one in samples:
        processes = {who: held for who, held in one.held.items() if "rss" in held}
        counters = {
            what: count for who, held in one.held.items() if who not in processes for what, count in held.items()
        }

        def total(what: str, processes: Mapping[str, Mapping[str, int]] = processes) -> int:
            return sum(held[what] for held in processes.values())

        lines.append(
            f"{one.seconds:10.1f} {one.done.get('hand-overs', 0):11,} {one.done.get('attaches', 0):10,} "
            f"{total('pss') / 2**20:8.1f} MiB {max(held['rss'] for held in processes.values()) / 2**20:5.1f} MiB "
            f"{total('fds'):6} {total('shared'):7} {total('mapped'):7} {total('threads'):8}  "
            + " ".join(f"{what} {count}" for what, count in counters.items())
        )
    return lines
