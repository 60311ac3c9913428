"""I8, I11: a process that ends with files of others in its hands ends, whoever is to close them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.support.deadlines import SOON

import vram

# A pipe is closed in another thread, since it may be of those whose close waits. When Python collects what is left of a
# program, no thread can begin any more; before Python 3.12 whoever starts one then waits for ever.
PROGRAM = """
import gc, os
from vram.sharing.channel import OwnedFds

class Held:
    pass

gc.disable()
held = Held()
held.fds = OwnedFds(os.pipe())
held.fds.is_armed = True
{then}
print("the end", flush=True)
"""


@pytest.mark.parametrize("then", ["", "held.itself = held; del held"], ids=["in a variable", "in a cycle"])
def test_i8_descriptors_that_are_left_at_exit_hold_nobody_up(then: str) -> None:
    program = PROGRAM.format(then=then)
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ.copy(), capture_output=True, text=True, timeout=SOON,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "the end", "")


@pytest.mark.parametrize("then", ["", "array.resize(9)"], ids=["made", "used"])
def test_i8_memory_that_is_being_made_ahead_holds_nobody_up(then: str) -> None:
    program = f"""
import vram
array = vram.zeros((0, 1 << 20), "int8", device="host", capacity=9, chunk="1MiB")
vram.prepare("host", "64MiB", chunk="1MiB")
print("the end", flush=True)
{then}
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ.copy(), capture_output=True, text=True, timeout=SOON,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "the end", "")


def test_what_is_let_go_of_at_the_very_end_says_nothing(kept: vram.Keeper) -> None:
    """Modules are emptied one after the other then, each from None on: what finalizers use may be gone before them."""
    program = """
import os, sys
import vram
vram.publish("w", {"a": vram.zeros(4, "float32", device="host")}, updatable=True)
with vram.update("w") as arrays:
    arrays["a"].numpy()[:] = 1
lease = vram.attach("w")
with lease.reading():
    pass
ring = vram.Ring.create("r", shape=4)
writers = [dict(one.writers) for one in vram.keeper.client._clients.values()]
modules = [module for name, module in sys.modules.items() if name.startswith("vram")]
os.kept = [modules, writers, lease, ring, vram.Ring.attach("r")]  # which was imported before, and is emptied after
os.itself = os
print("the end", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SOON, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "the end", "")
