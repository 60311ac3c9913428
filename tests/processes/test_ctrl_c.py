"""SIGINT, as the kernel delivers it, within long system calls: what was begun is finished or taken back (I12).

In a process of its own, so that the signal meets nobody else. When it comes is random, and so are the cases that it
meets; it goes on until the signal has met each of the calls.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.samples import rounds

ROUNDS = rounds(60, 15)

PRELUDE = """
import contextlib, os, random, signal, sys, threading, time
import vram
from vram import driver, lifetime
from vram.spec import HOST

ROWS, WIDE, ROUNDS = 64, 1 << 20, int(sys.argv[1])  # rows of 1 MiB
random.seed(1)
begin, done, idle, over = [], [], [], []  # not Events: an interrupt could leave their locks locked
wait = [0.0]

def sender():
    while not over:
        if begin:
            begin.clear()
            time.sleep(wait[0])
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            again = time.monotonic() + 2
            while not done:  # Python drops an interrupt that comes in a finalizer: then nothing would end
                if time.monotonic() > again:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                    again = time.monotonic() + 2
                time.sleep(0.0005)
            idle.append(1)
        time.sleep(0.0005)

thread = threading.Thread(target=sender)
thread.start()

def interrupted(act):
    # Whether the signal came in the middle of `act`; it comes, in any case, before this returns.
    met = False
    done.clear(), idle.clear()
    wait[0] = random.uniform(0.0, 0.02)
    try:
        begin.append(1)
        try:
            act()
        except KeyboardInterrupt:
            met = True
    except KeyboardInterrupt:
        pass
    while True:
        try:
            done.append(1)
            while not idle:
                time.sleep(0.0005)
            return met
        except KeyboardInterrupt:
            pass

"""
MEMORY = """
host, met = driver.get(HOST), {}
number = -1
while number < ROUNDS or not all(met[what] for what in ("shrink", "grow", "close")):
    number += 1
    a = vram.empty((ROWS, WIDE), "uint8", device="host", capacity=(2 * ROWS, WIDE), populate=True)
    what = ("shrink", "grow", "close", "del")[number % 4]
    if what == "shrink":
        hit = interrupted(lambda: a.resize(0))
        assert len(a) in (0, ROWS)
    elif what == "grow":
        hit = interrupted(lambda: a.resize(2 * ROWS))
        assert len(a) in (ROWS, 2 * ROWS)
    elif what == "close":
        hit = interrupted(a.close)
    else:
        box = [a]
        del a
        hit = interrupted(box.clear)
        a = vram.empty(1, device="host")
    met[what] = met.get(what, 0) + hit
    if what in ("shrink", "grow"):
        assert a.numpy().shape == (len(a), WIDE)
        a.resize(2 * ROWS)  # and it works: every row can be written and given back
        a.numpy()[-1] = number
        a.resize(0)
    a.close()
    del a
    assert not lifetime.stuck(), (number, what, lifetime.stuck())
    live = host.live()
    assert (live.reservations, live.mappings, live.nbytes) == (0, 0, 0), (number, what, live)
over.append(1); thread.join()
print(met)
"""
VERBS = """
import numpy as np
from vram.keeper.client import KeeperClient

met, at = {}, sys.argv[2]
keeper = vram.private_keeper()
watcher = KeeperClient.connect(keeper.path)
a = vram.zeros((8, 1000), device="host")
vram.publish("weights", {"a": a})
claim = watcher.attach_or_claim("claimed")
vram.attach("weights").close()
vram.lend({"a": a}, at=at).close()  # loads asyncio, whose import an interrupt leaves half done

def agreed(what, is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)

def attach_often():
    while True:
        vram.attach("weights", timeout=60).close()

def publish_often():
    while True:
        vram.publish("often", {"a": np.zeros(1000)})

def lend_often():
    while True:
        vram.lend({"a": a}, at=at).close()

def load():
    raise AssertionError("the claim is another's")

WAITING = {
    "attach": lambda: vram.attach("nobody", timeout=60),
    "attach_or_publish": lambda: vram.attach_or_publish("claimed", load, timeout=60),
    "often attached": attach_often,
    "often published": publish_often,
    "often lent": lend_often,
}
threads = len(os.listdir("/proc/self/task"))
for number in range(ROUNDS * 2):
    what = [*WAITING, "send", "recv"][number % (len(WAITING) + 2)]
    if what in WAITING:
        hit = interrupted(WAITING[what])
    else:
        one, two = vram.ArrayChannel.pair()
        count = 0
        if what == "send":  # until the other end's queue is full
            with contextlib.suppress(vram.errors.WaitTimeoutError):
                while True:
                    one.send(b"x" * 60_000, timeout=0)
                    count += 1
            hit = interrupted(lambda: one.send(a, timeout=60))
            for _ in range(count):
                assert two.recv(timeout=60) == b"x" * 60_000
        else:
            hit = interrupted(lambda: two.recv(timeout=60))
        one.send(a, timeout=60)
        one.send("end", timeout=60)
        came = list(iter(lambda: two.recv(timeout=60), "end"))
        assert 1 <= len(came) <= 2, came
        two.send("back", timeout=60)
        assert one.recv(timeout=60) == "back"
        one.close(), two.close()
        del came
    met[what] = met.get(what, 0) + hit
    agreed("a lease or claim that was left", lambda: (s := watcher.statistics()).leases == s.waiting == 0)
    agreed("a thread that was left", lambda: len(os.listdir("/proc/self/task")) <= threads)
    assert not os.path.exists(at)
    assert not watcher.statistics().stuck
    with vram.attach("weights", timeout=60) as lease:
        assert lease["a"].shape == (8, 1000)
watcher.abandon(claim)
with vram.attach_or_publish("claimed", lambda: {"a": a}, timeout=60) as lease:
    pass
over.append(1); thread.join()
watcher.close()
keeper.close()
print(met)
assert all(met.values()), met
"""


def test_what_a_signal_meets_is_finished_or_taken_back_i12() -> None:
    run(MEMORY, str(ROUNDS))


def test_a_verb_that_a_signal_meets_leaves_no_lease_claim_thread_or_lock_i12(tmp_path: Path) -> None:
    run(VERBS, str(ROUNDS), str(tmp_path / "lent.sock"))


def run(script: str, *arguments: str, prelude: str = PRELUDE) -> None:
    command = [sys.executable, "-c", prelude + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
