"""Keepers and their guardians killed at random, under load: nothing lost, nothing twice. `make crash` runs this.

Clients publish (some in several messages), attach, release, update, claim, wait and give up, at one ``vram keep
--survive``. Each knows what it published and holds; what it reads has its own checksum. Meanwhile the keeper is
SIGKILLed, again and again, also while it comes back or is replaced by a planned restart; or its guardian; or both,
after which all is lost, and every client has to hear so. Now and then all stand still, and the keeper's books, all
entries, and the guardian's descriptors have to be what the clients know, no more and no less.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import mmap
import multiprocessing
import operator
import os
import random
import signal
import sys
import threading
import time
import traceback
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what tests of several suites use

import numpy as np

import vram
from support.memfds import make_memfd
from support.places import short_directory
from vram.errors import NotFoundError, PeerGoneError, VramError, WaitTimeoutError
from vram.keeper.client import Attachment, KeeperClient, Segment
from vram.keeper.messages import Claimed
from vram.keeper.private import KeeperProcess
from vram.open_files import close_fds

KILLS = 1000
CLIENTS = 4
NAMES = 6  # of each client
MANY = 70  # descriptors, which is three messages
CHECK_EACH = 25  # kills
ROW = 8  # keepers that are killed, at most, before every client has an answer
HANG = 120.0  # seconds in which a call has to be answered, on a machine that does much else
SPAWN = multiprocessing.get_context("spawn")
READY, STILL, WORK, OVER = range(4)


def content(client: int, name: str, number: int) -> bytes:
    """What a version has."""
    body = f"{client} {name} {number} ".encode() * 20
    return zlib.crc32(body).to_bytes(4, "little") + len(body).to_bytes(4, "little") + body


def look(found: Attachment) -> bytes:
    """Return what an attachment has, once its checksum was looked at."""
    with mmap.mmap(found.fds[0], 4096, prot=mmap.PROT_READ) as memory:
        size = int.from_bytes(memory[4:8], "little")
        body = memory[8 : 8 + size]
        if zlib.crc32(body) != int.from_bytes(memory[:4], "little"):
            raise AssertionError(f"wrong bytes in {found.name} version {found.version}")
        return memory[: 8 + size]


class Worker:
    """One client, and what it knows."""

    def __init__(self, shared: tuple[Any, ...], number: int, path: str, seed: int) -> None:
        self.phase, self.still, self.done, self.versions, self.held, self.lost = shared
        self.number, self.path = number, path
        self.random = random.Random(seed * 1000 + number)
        self.connection = KeeperClient.connect(path, timeout=HANG, label=f"worker {number}")
        self.leases: list[int] = []
        self.counter = 0
        self.updated = 0

    def mine(self, index: int) -> tuple[str, int]:
        return f"c{self.number}/n{index}", self.number * NAMES + index

    def publish(self) -> None:
        index = self.random.randrange(NAMES)
        name, at = self.mine(index)
        number = self.versions[at] + 1
        count = MANY if index == 0 else 1
        fds = [make_memfd(content=content(self.number, name, number)) for _ in range(count)]
        try:
            came = self.connection.publish(name, [Segment(4096)] * count, fds)
        finally:
            close_fds(fds)
        if came != number:
            raise AssertionError(f"{name} became version {came}, not {number}")
        self.versions[at] = number

    def attach(self) -> None:
        client, index = self.random.randrange(CLIENTS), self.random.randrange(NAMES)
        name, at = f"c{client}/n{index}", client * NAMES + index
        least = self.versions[at]
        try:
            found = self.connection.attach(name)
        except NotFoundError:
            if least:
                raise AssertionError(f"{name} version {least} is lost") from None
            return
        try:
            if found.version < least or look(found) != content(client, name, found.version):
                raise AssertionError(f"{name} version {found.version} has other bytes, or is older than {least}")
        finally:
            close_fds(found.fds)
            self.leases.append(found.lease_id)
        self.let_go(8)

    def let_go(self, most: int) -> None:
        while len(self.leases) > most:
            lease = self.leases.pop(self.random.randrange(len(self.leases)))
            if self.random.random() < 0.5:
                self.connection.release_later(lease)
            else:
                self.connection.release([lease])

    def claim(self) -> None:
        got = self.connection.attach_or_claim(f"c{self.number}/claimed", timeout=0.0)
        if not isinstance(got, Claimed):
            raise AssertionError("a name that nobody publishes was attached")
        self.connection.abandon(got)

    def wait(self) -> None:
        with contextlib.suppress(WaitTimeoutError):
            self.connection.attach(f"c{self.number}/never", timeout=0.02)
            raise AssertionError("a name that nobody publishes was attached")

    def give_up(self) -> None:
        """Ask, and hear no answer in time."""
        self.connection.grace = self.random.choice([0.0005, 0.001, 0.002])
        try:
            found = self.connection.attach(self.mine(1)[0])
        except (WaitTimeoutError, NotFoundError):
            return
        finally:
            self.connection.grace = HANG
        close_fds(found.fds)
        self.leases.append(found.lease_id)

    def update(self) -> None:
        """Of an array, with the verbs that programs use."""
        name = f"u{self.number}"
        if not self.updated:
            with vram.zeros(1024, "int64", device="host") as array:
                vram.publish(name, {"x": array}, keeper=self.path, updatable=True)
        self.updated += 1
        with vram.update(name, keeper=self.path) as arrays:
            arrays["x"].numpy()[:] = self.updated
        with vram.attach(name, keeper=self.path) as lease:
            seen = lease["x"].numpy()
            if not np.all(seen == self.updated):
                raise AssertionError(f"{name} is {seen[0]} to {seen[-1]}, not {self.updated}")

    def begin_again(self, told: PeerGoneError) -> None:
        """Both were killed, and this client was told: it knows of nothing now."""
        epoch, deadline = self.lost.value, time.monotonic() + HANG / 2
        while self.lost.value == epoch and self.phase.value != OVER:  # until there is another keeper
            if time.monotonic() > deadline:
                raise told
            time.sleep(0.01)
        self.connection.close()
        self.leases.clear()
        self.updated = 0
        self.connection = KeeperClient.connect(self.path, timeout=HANG, label=f"worker {self.number}")

    def run(self) -> None:
        acts = [self.publish] * 4 + [self.attach] * 8 + [self.claim, self.wait, self.give_up, self.update]
        self.connection.grace = HANG
        epoch, stands = self.lost.value, 0
        while self.phase.value != OVER:
            try:
                if self.phase.value == STILL:
                    stands += 1
                    self.let_go(0 if stands % 2 == 0 else 8)
                    self.connection.statistics()  # whatever was said before has been heard
                    self.held[self.number] = len(self.leases)
                    self.still[self.number] = 1
                    while self.phase.value == STILL:
                        time.sleep(0.005)
                    self.still[self.number] = 0
                    continue
                self.random.choice(acts)()
                self.done[self.number] += 1
            except PeerGoneError as told:
                self.still[self.number] = 2  # it was told
                self.begin_again(told)
                self.still[self.number] = 0
                if self.lost.value == epoch and self.phase.value != OVER:
                    raise
                epoch = self.lost.value
        self.connection.close()


def work(shared: tuple[Any, ...], number: int, path: str, seed: int, errors: Any) -> None:
    """Be a client, and say what went wrong."""
    faulthandler.register(signal.SIGUSR1)
    try:
        Worker(shared, number, path, seed).run()
    except BaseException:
        errors.put(f"client {number}: {traceback.format_exc()}")
        raise


class Crash:
    """The processes, and what was done to them."""

    def __init__(self, place: str, kills: int, seed: int) -> None:
        self.path, self.kills, self.seed = f"{place}/k", kills, seed
        self.random = random.Random(seed)
        self.keeper = KeeperProcess(self.path, ["--survive"])
        self.epoch = 0
        self.counts: Counter[str] = Counter()
        self.back: list[float] = []
        self.said: list[str] = []  # complaints of keepers that were replaced
        self.shared = (
            SPAWN.Value("i", WORK, lock=False), SPAWN.Array("i", CLIENTS, lock=False),
            SPAWN.Array("q", CLIENTS, lock=False), SPAWN.Array("q", CLIENTS * NAMES, lock=False),
            SPAWN.Array("i", CLIENTS, lock=False), SPAWN.Value("i", 0, lock=False),
        )  # fmt: skip
        self.phase, self.still, self.done, self.versions, self.held, self.lost = self.shared
        self.errors = SPAWN.Queue()
        self.watcher = KeeperClient.connect(self.path, timeout=HANG, label="watcher")
        self.watcher.grace = HANG
        self.guardian = self.keeper.pid
        self.clients = [
            SPAWN.Process(target=work, args=(self.shared, number, self.path, seed, self.errors))
            for number in range(CLIENTS)
        ]
        for client in self.clients:
            client.start()

    def check(self) -> None:
        """Raise what a client found."""
        if not self.errors.empty() or any(client.exitcode for client in self.clients):
            time.sleep(0.2)
            raise AssertionError(self.errors.get(timeout=5) if not self.errors.empty() else "a client died")

    def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + HANG
        while not condition():
            self.check()
            if time.monotonic() > deadline:
                for client in self.clients:
                    os.kill(client.pid or 0, signal.SIGUSR1)
                time.sleep(1)
                raise AssertionError(f"no {what} for {HANG:g} s")
            time.sleep(0.005)

    def keeper_pid(self) -> int:
        """The keeper that the guardian started last, also while it comes back; 0: none now."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children = Path(f"/proc/{self.guardian}/task/{self.guardian}/children").read_text().split()
            if children:
                return int(children[-1])
        return 0

    def serving(self) -> int:
        """Wait for an answer, and return who gave it. What was asked is answered in time, or a client hangs."""
        begin = time.monotonic()
        pid = self.watcher.statistics().pid
        self.back.append(time.monotonic() - begin)
        return pid

    def answer_all(self) -> None:
        """Wait until every client was answered what it asked for, or has given up."""
        before = list(self.done)
        self.until(lambda: all(map(operator.gt, self.done, before)), "answer to every client")

    def kill_keeper(self) -> None:
        pid = self.serving() if self.random.random() < 0.7 else self.keeper_pid()
        if not pid:
            pid = self.serving()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.counts["keeper"] += 1

    def kill_guardian(self) -> None:
        """Then the keeper starts another, which is told everything before the keeper answers again."""
        pid, before = self.serving(), self.guardian
        os.kill(before, signal.SIGKILL)
        if before == self.keeper.pid:
            self.keeper.process.wait(HANG)
        found: list[int] = []

        def look() -> bool:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            found[:] = [one for one in map(int, children) if one != before]
            return bool(found)

        self.until(look, "other guardian")
        self.guardian = found[0]
        self.serving()
        self.counts["guardian"] += 1

    def kill_both(self) -> None:
        """All is lost, and everybody is told; then there is another keeper."""
        pid = self.serving()
        os.kill(self.guardian, signal.SIGSTOP)  # it would start a keeper in between
        os.kill(pid, signal.SIGKILL)
        os.kill(self.guardian, signal.SIGKILL)
        self.keeper.process.wait(HANG)
        self.until(lambda: all(still == 2 for still in self.still), "word to all clients that all is lost")
        with contextlib.suppress(PeerGoneError):
            self.watcher.statistics()
            raise AssertionError("a keeper that was killed with its guardian answers")
        self.watcher.close()
        self.keeper.stop()
        self.keeper = KeeperProcess(self.path, ["--survive"])
        self.guardian = self.keeper.pid
        self.watcher = KeeperClient.connect(self.path, timeout=HANG, label="watcher")
        self.watcher.grace = HANG
        self.versions[:] = [0] * len(self.versions)  # nobody works now
        self.lost.value += 1
        self.until(lambda: all(still != 2 for still in self.still), "client that goes on")
        self.counts["both"] += 1

    def taken_over(self) -> KeeperProcess:
        """Start the next keeper; once more, if the running one was killed just as it had said that it ends."""
        while True:
            try:
                return KeeperProcess(self.path, ["--survive", "--takeover"])
            except PeerGoneError as error:
                if "nothing was taken over" not in str(error):
                    raise AssertionError(f"a keeper that was to take over: {error}") from None

    def restart(self) -> None:
        """Have another keeper take over; of three times once the running one is killed somewhere in the middle."""
        before, guardian, pid = self.keeper, self.guardian, self.serving()
        timer = threading.Timer(self.random.random() * 0.4, lambda: _kill(pid))
        if self.random.random() < 0.3:
            timer.start()
        try:
            self.keeper = self.taken_over()
            self.guardian = self.keeper.pid
            self.until(lambda: _is_over(guardian), "end of the guardian before")
            before.stop()
            self.said += before.said().splitlines()
            self.counts["restart"] += 1
        finally:
            timer.cancel()
            if timer.ident:
                timer.join()
        self.serving()

    def compare(self) -> None:
        """Have all stand still, and look at everything."""
        self.phase.value = STILL
        self.until(lambda: all(still == 1 for still in self.still), "standstill")
        found = self.watcher.statistics()
        expected = {f"c{at // NAMES}/n{at % NAMES}": number for at, number in enumerate(self.versions) if number}
        listed = {row.name: row.version for row in self.watcher.list() if row.name.startswith("c")}
        if listed != expected:
            raise AssertionError(f"there are {listed}, and not {expected}")
        for name, number in expected.items():
            got = self.watcher.attach(name)
            right = content(int(name[1 : name.index("/")]), name, number)
            wrong = [got] if got.version != number or look(got) != right else []
            close_fds(got.fds)
            self.watcher.release([got.lease_id])
            if wrong:
                raise AssertionError(f"{name} version {got.version}, not {number}, or other bytes")
        want = sum(self.held)
        if found.leases != want or found.waiting or (not want and found.versions != found.entries):
            raise AssertionError(f"{found.leases} leases, not {want}; {found.waiting} wait; {found.versions} versions")
        deadline = time.monotonic() + HANG
        while (there := memory_of(self.guardian)) != (here := memory_of(found.pid)) or len(there) != found.descriptors:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"the guardian has {len(there)} descriptors of memory, the keeper {len(here)}, its books "
                    f"{found.descriptors}: {there - here} and {here - there} are only there, and only here"
                )
            time.sleep(0.02)
        self.counts["compared"] += 1
        self.phase.value = WORK
        self.until(lambda: not any(self.still), "work")

    def run(self) -> None:
        """Kill until all is done."""
        row = 0
        self.until(lambda: all(self.done), "work of every client")
        for number in range(1, self.kills + 1):
            self.check()
            if self.random.random() < 0.8:
                time.sleep(self.random.random() * 0.2)
            if self.random.random() < 0.05:
                self.restart()
                row = 0
            draw = self.random.random()
            if draw < 0.88:
                self.kill_keeper()
                row += 1
            elif draw < 0.97:
                self.kill_guardian()
            else:
                self.kill_both()
                row = 0
            if row >= ROW:
                self.answer_all()
                row = 0
            if number % CHECK_EACH == 0 or number == self.kills:
                self.compare()
                row = 0
                print(f"{number} kills: {dict(self.counts)}, {sum(self.done):,} calls", flush=True)

    def close(self) -> list[str]:
        """End everybody, and return what went wrong on the way."""
        self.phase.value = OVER
        wrong = []
        for number, client in enumerate(self.clients):
            client.join(HANG if not wrong else 5)
            if client.is_alive():
                wrong.append(f"client {number} hangs")
                client.kill()
                client.join()
        self.watcher.close()
        for pid in (self.guardian,):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        status = self.keeper.stop()
        wrong += self.said + [line for line in self.keeper.said().splitlines() if line]
        if status not in (0, -signal.SIGKILL):
            wrong.append(f"it ended with status {status}")
        while not self.errors.empty():
            wrong.append(self.errors.get())
        return wrong


def memory_of(pid: int) -> Counter[int]:
    """Return the inodes of the memory that a process has descriptors of; not of its log, of which it maps one more."""
    found: Counter[int] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if "memfd:" in (target := os.readlink(fd)) and "vram-journal" not in target and "vram-keeper" not in target:
                found[os.stat(fd).st_ino] += 1
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_over(pid: int) -> bool:
    """Whether a process has ended; its parent may not have asked for its status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def main() -> int:
    """Run it, and return 0 if nothing was lost."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--kills", type=int, default=KILLS)
    options.add_argument("--seed", type=int, default=None)
    given = options.parse_args()
    seed = given.seed if given.seed is not None else int.from_bytes(os.urandom(3), "little")
    print(f"seed {seed}", flush=True)
    begin = time.monotonic()
    wrong: list[str] = []
    with short_directory() as place:
        crash = Crash(place, given.kills, seed)
        try:
            crash.run()
        except (AssertionError, VramError) as error:
            wrong.append(f"{type(error).__name__}: {error}")
            traceback.print_exc()
        finally:
            wrong += crash.close()
    kills = sum(crash.counts[what] for what in ("keeper", "guardian", "both"))
    worst = sorted(crash.back)[-1] if crash.back else 0.0
    print(
        f"crash: {kills} of {given.kills} kills ({crash.counts['keeper']} of keepers, {crash.counts['guardian']} of "
        f"guardians, {crash.counts['both']} of both), {crash.counts['restart']} planned restarts "
        f"and {sum(crash.done):,} calls of {CLIENTS} clients in "
        f"{time.monotonic() - begin:.0f} s, compared {crash.counts['compared']} times; an answer took at most "
        f"{worst:.1f} s: " + ("nothing lost" if not wrong else f"{len(wrong)} WRONG")
    )
    for line in wrong:
        print(f"  {line}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
