"""SIGINT, as the kernel delivers it, within long system calls: what was begun is finished or taken back (I12).

In a process of its own, so that the signal meets nobody else. When it comes is random, and so are the cases that it
meets; that it met the calls at all is asserted.
"""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, random, signal, threading
import vram
from vram import driver, lifetime
from vram.spec import HOST

ROWS, WIDE, ROUNDS = 64, 1 << 20, 60  # rows of 1 MiB
random.seed(1)
begin, sent, over = threading.Event(), threading.Event(), threading.Event()
wait = [0.0]

def sender():
    while begin.wait() and not over.is_set():
        begin.clear()
        threading.Event().wait(wait[0])
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        sent.set()

thread = threading.Thread(target=sender)
thread.start()

def interrupted(act):
    # Whether the signal came in the middle of `act`; it comes, in any case, before this returns.
    met = False
    sent.clear()
    wait[0] = random.uniform(0.0, 0.02)
    try:
        begin.set()
        try:
            act()
        except KeyboardInterrupt:
            met = True
        sent.wait()
    except KeyboardInterrupt:
        sent.wait()
    return met

host, met = driver.get(HOST), {}
for number in range(ROUNDS):
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
over.set(); begin.set(); thread.join()
print(met)
assert all(met[what] for what in ("shrink", "grow", "close")), met
"""


def test_what_a_signal_meets_is_finished_or_taken_back_i12() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
