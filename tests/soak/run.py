"""Ten million hand-overs and a million attaches: nothing grows from the warm-up to the end. `make soak` runs this.

Eight processes work against one keeper until all is done, or the time is up: four attach an entry, read it and let go;
two hand arrays to two others and back, over an ArrayChannel and through queues of multiprocessing, mostly the same
array again and now and then a new one or one that has grown. Now and then all of them stop where they hold nothing, and
what each process holds, and what the keeper counts, is written down; see :mod:`judge` for how it is judged.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what tests of several suites use

import numpy as np
from judge import Sample, grown, look_at, table

import vram
from support.deadlines import AT_ONCE, SOON, until
from vram.handover.pickling import endpoint
from vram.keeper.private import KeeperProcess

TARGETS = {"hand-overs": 10_000_000, "attaches": 1_000_000}  # unless it is told others
ATTACHERS = 4
FRESH = 100  # rounds with the same array
BURST = 16  # times that it is sent in one round, before it is taken back as often
SAMPLES, LEAST = 40, 0.5  # and seconds between two at least
WARM = 0.1  # of the time, or of the work
# Of the time so far that passes between two samples, at most: all may be done early, and is judged by some twenty then.
STEP = 0.1
SPAWN = multiprocessing.get_context("spawn")


class Gate:
    """Where a worker counts what it did, stands still for a sample, and hears that it is over.

    Parameters
    ----------
    shared : tuple
        The phase (odd: stand still), whether it is over for each kind of work, what each worker did, and in which phase
        each stands still.
    number, kind : int
        Which worker it is, and which of the kinds it does.
    """

    def __init__(self, shared: tuple[Any, ...], number: int, kind: int) -> None:
        self.phase, self.over, self.done, self.still = shared
        self.number, self.kind = number, kind

    def passes(self, count: int, settle: Callable[[], object]) -> bool:
        """Count, and stand still if all are to, after `settle`; False once it is over."""
        self.done[self.number] += count
        phase = self.phase.value
        if phase % 2:
            settle()
            gc.collect()
            self.still[self.number] = phase
            while self.phase.value == phase:
                time.sleep(0.005)
        return not self.over[self.kind]

    def rest(self, settle: Callable[[], object]) -> None:
        """Stand still whenever all are to, until it is over for everybody: all are measured to the end."""
        while not all(self.over):
            self.passes(0, settle)
            time.sleep(0.005)


def attach(shared: tuple[Any, ...], number: int, path: str) -> None:
    """Attach, look, and let go."""
    gate = Gate(shared, number, 1)
    settle = lambda: None  # noqa: E731
    while gate.passes(1, settle):
        with vram.attach("soak", keeper=path) as lease:
            if lease["a"].numpy()[7] != 7 or len(lease) != 3:
                raise AssertionError("an attached array is not what was published")
    gate.rest(settle)


def rounds(
    shared: tuple[Any, ...], number: int, there_and_back: Callable[[list[Any]], list[Any]], settle: Callable[[], object]
) -> None:
    """Hand arrays over and take them back."""
    gate = Gate(shared, number, 0)
    turn, array = 0, new()

    def rest() -> None:
        array.close()
        settle()

    while gate.passes(2 * BURST, rest):
        turn += 1
        if turn % FRESH == 0 or array.is_closed:
            array.close()
            array = new()
        elif turn % (4 * FRESH) == 1:
            array.resize(500_000)
        array.numpy()[0] = turn
        if any(one is not array for one in there_and_back([array] * BURST)) or array.numpy()[0] != turn + BURST:
            raise AssertionError("what came back is not what was sent, and written to there")
    array.close()
    gate.rest(settle)


def new() -> vram.Array:
    """Return an array that can grow."""
    return vram.zeros(64, "int64", device="host", capacity=600_000)


def send(shared: tuple[Any, ...], number: int, channel: vram.ArrayChannel) -> None:
    """Over a channel."""

    def there_and_back(values: list[Any]) -> list[Any]:
        for value in values:
            channel.send(value, timeout=SOON)
        return [channel.recv(timeout=SOON) for _ in values]

    with channel:
        rounds(shared, number, there_and_back, lambda: there_and_back([0]))
        channel.send(None)


def echo(channel: vram.ArrayChannel) -> None:
    """Write into everything, and send it back."""
    with channel:
        while (value := channel.recv()) is not None:
            written(value)
            channel.send(value)
            del value


def written(value: Any) -> None:
    """Add one to the first element of an array."""
    if isinstance(value, vram.Array):
        value.numpy()[0] += 1


def put(shared: tuple[Any, ...], number: int, there: Any, back: Any) -> None:
    """Through queues."""

    def there_and_back(values: list[Any]) -> list[Any]:
        for value in values:
            there.put(value)
        return [back.get() for _ in values]

    rounds(shared, number, there_and_back, lambda: until(lambda: not endpoint().flights._flights))
    there.put(None)


def put_back(there: Any, back: Any) -> None:
    """Write into everything, and put it into the other queue."""
    while (value := there.get()) is not None:
        written(value)
        back.put(value)
        del value


class Soak:
    """The processes and what was seen of them."""

    def __init__(self, seconds: float, targets: Mapping[str, int]) -> None:
        self.keeper = KeeperProcess.private()
        vram.publish("soak", {"a": np.arange(10), "b": np.ones((300, 300)), "c": np.zeros(3)}, keeper=self.keeper.path)
        count = ATTACHERS + 2
        self.shared = (
            SPAWN.Value("Q", 0, lock=False), SPAWN.Array("b", 2, lock=False),
            SPAWN.Array("Q", count, lock=False), SPAWN.Array("Q", count, lock=False),
        )  # fmt: skip
        self.processes: dict[str, Any] = {}
        for number in range(ATTACHERS):
            self._start(f"attacher {number}", attach, self.shared, number, self.keeper.path)
        ours, theirs = vram.ArrayChannel.pair()
        self._start("sender", send, self.shared, ATTACHERS, ours)
        self._start("receiver", echo, theirs)
        for end in (ours, theirs):
            end.close()
        queues = SPAWN.SimpleQueue(), SPAWN.SimpleQueue()
        self._start("producer", put, self.shared, ATTACHERS + 1, *queues)
        self._start("consumer", put_back, *queues)
        self._queues = queues
        self.seconds, self.targets = seconds, targets
        self.began = time.monotonic()
        self.samples: list[Sample] = []
        self.base: Sample | None = None  # the first after the warm-up

    def _start(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        self.processes[name] = SPAWN.Process(target=target, args=arguments, name=name)
        self.processes[name].start()

    def done(self) -> dict[str, int]:
        """Return how much of each kind was done."""
        counts = list(self.shared[2])
        return {"hand-overs": sum(counts[ATTACHERS:]), "attaches": sum(counts[:ATTACHERS])}

    def works(self) -> bool:
        """Whether everybody has done something."""
        self.check()
        return all(count > 100 for count in self.shared[2])

    def check(self) -> None:
        """Raise if a process ended before it was told to."""
        dead = [
            f"{name} ended with status {one.exitcode}" for name, one in self.processes.items() if not one.is_alive()
        ]
        if dead:
            raise AssertionError("; ".join(dead))

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Have everybody stand still."""
        phase, still = self.shared[0], self.shared[3]
        phase.value += 1

        def stands() -> bool:
            self.check()
            return all(seen == phase.value for seen in still)

        try:
            until(stands, what="that all stand still")
            yield
        finally:
            phase.value += 1

    def look(self) -> None:
        """Write down what everybody holds. What is told and not waited for, such as the end of a lease, has time."""
        pids = {"keeper": self.keeper.pid, **{name: one.pid for name, one in self.processes.items()}}
        base = self.base.held if self.base else None
        with self.still():
            deadline = time.monotonic() + AT_ONCE
            while True:
                held = {name: look_at(pid) for name, pid in pids.items()}
                counts = vram.statistics(keeper=self.keeper.path)
                names = ("entries", "versions", "leases", "connections", "waiting", "nbytes", "descriptors")
                held["the keeper's counters"] = {name: getattr(counts, name) for name in names}
                if base is None or time.monotonic() > deadline or not _more(held, base):
                    break
                time.sleep(0.02)
            self.samples.append(Sample(time.monotonic() - self.began, self.done(), held))
        if self.base is None and self.progress(self.samples[-1]) >= WARM:
            self.base = self.samples[-1]

    def progress(self, sample: Sample) -> float:
        """Return how near the end was: of the time, or of the work, whichever ends first."""
        return max(
            sample.seconds / self.seconds, min(sample.done[kind] / count for kind, count in self.targets.items())
        )

    def run(self) -> None:
        """Work until all is done, or the time is up."""
        until(self.works, what="that everybody works")
        self.began = due = time.monotonic()
        while True:
            every = max(min(STEP * (due - self.began), self.seconds / SAMPLES), LEAST)
            due = max(due + every, time.monotonic() + every / 2)
            while time.monotonic() < due:
                self.check()
                time.sleep(min(0.1, every / 4))
            self.look()
            print(table(self.samples[-1:])[-1], flush=True)
            done = self.done()
            for kind, (name, count) in enumerate(self.targets.items()):
                self.shared[1][kind] = done[name] >= count
            if all(self.shared[1]) or time.monotonic() - self.began >= self.seconds:
                return

    def close(self) -> list[str]:
        """End everybody, and return what went wrong on the way."""
        self.shared[1][:] = [1, 1]
        wrong = []
        for name, one in self.processes.items():
            one.join(SOON)
            if one.exitcode:
                wrong.append(f"{name} ended with status {one.exitcode}")
            elif one.is_alive():
                wrong.append(f"{name} did not end")
                one.kill()
                one.join()
        for queue in self._queues:
            queue.close()
        self.keeper.stop()
        return wrong


def _more(held: dict[str, dict[str, int]], base: Any) -> bool:
    """Whether anything that is counted exactly is more than it was."""
    exact = ("fds", "shared", "leases", "descriptors", "waiting")
    return any(held[who][what] > base[who].get(what, 0) for who in held for what in held[who] if what in exact)


def main() -> int:
    """Run it, and return 0 if all was flat."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=60.0, help="the most that it may take")
    for kind, count in TARGETS.items():
        options.add_argument(f"--{kind}", type=int, default=count, help=f"{kind} after which it ends before")
    said = options.parse_args()
    seconds, targets = said.minutes * 60, {kind: getattr(said, kind.replace("-", "_")) for kind in TARGETS}
    print(table([])[0], flush=True)
    soak = Soak(seconds, targets)
    wrong: list[str] = []
    try:
        soak.run()
    except (AssertionError, vram.errors.VramError) as error:
        wrong.append(str(error))
    finally:
        wrong += soak.close()
    wrong += grown(soak.samples[soak.samples.index(soak.base) :] if soak.base else [])
    done = soak.done()
    took = soak.samples[-1].seconds if soak.samples else 0.0
    print(
        f"soak: {' and '.join(f'{done[kind]:,} of {count:,} {kind}' for kind, count in targets.items())} "
        f"by {ATTACHERS} processes in {took:.0f} s, {len(soak.samples)} samples: "
        + ("flat" if not wrong else f"NOT FLAT, {len(wrong)} wrong")
    )
    for line in wrong:
        print(f"  {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
