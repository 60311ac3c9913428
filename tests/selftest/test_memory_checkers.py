"""Bugs planted in ``vram.memory``, each in a process of its own: the machine, the contract and the faults see them.

A checker that passes with the bug in place would be worth nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs with the bug in place; exits with 0 if nothing was noticed and with 1 if a check failed.
MACHINE = """
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
import runpy
found = runpy.run_path("tests/stateful/test_memory_machine.py")
try:
    run_state_machine_as_test(found["MemoryMachine"], settings=settings(
        max_examples=200, stateful_step_count=40, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck)))
except BaseException as error:
    print("NOTICED", type(error).__name__)
    raise SystemExit(1)
"""
SUITE = """
import pytest, sys
raise SystemExit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", {0!r}, "-k", {1!r}]))
"""
CONTRACT = SUITE.format(
    "tests/conformance/test_host_memory.py",
    "(TestHostMemory or TestMemoryStepByStep) and (0123 or lends or zeroed or below)",
)
FAULTS = SUITE.format("tests/faults/test_memory_faults.py", "grow or resize or freeze or budget or chunk")

HEAD = "from vram import lifetime\nfrom vram.memory import allocation, chunks, pin, region, reservation\n"
NONE = ""
WRONG_ORDER = """
right = reservation.own
def own(label, undo, *, depends=()):
    return right(label, undo, depends=[d for d in depends if not d.label.startswith("reservation")])
reservation.own = own  # a mapping that does not keep its addresses
"""
LEAKED_FD = """
allocation._close = lambda fds: None
"""
MISSED_RELEASE = """
right, kept = chunks.create_memory, []
def create_memory(*args):
    made = right(*args)
    kept.append(made[0].handle.claim("forgotten"))
    return made
chunks.create_memory = create_memory
"""
KEPT_ON_DEMAND = """
right, kept = chunks.retain_memory, []
def retain_memory(*args):
    made = right(*args)
    kept.append(made[0].handle.claim("forgotten"))
    return made
chunks.retain_memory = retain_memory
"""
WRITABLE_UNASKED = """
right = chunks._receive
def receive(driver, one, access, *rest):
    right(driver, one, access.READ_WRITE, *rest)
chunks._receive = receive
"""
PIN_IGNORED = """
right = pin.Span.__init__
def init(self, *args):
    right(self, *args)
    self.is_live = False
pin.Span.__init__ = init
"""
CHUNK_TOO_MANY = """
right = chunks.Chunks.cut
chunks.Chunks.cut = lambda self, nbytes: right(self, max(nbytes - 1, 0))
"""
STALE_CHUNK = """
chunks.Chunks.unmap = lambda self, dropped: None  # shrunk, but the memory is kept
"""
NOT_SEALED = """
right = allocation.PhysicalAllocation.seal
allocation.PhysicalAllocation.seal = lambda self: None
"""
NO_CEILING = """
right = chunks.plan
chunks.plan = lambda nbytes, mapped, capacity, *rest: right(nbytes, mapped, capacity + (8 << 20), *rest)
"""
HALF_A_GROWTH = """
right, kept = chunks.map_at, []
def map_at(*args):
    made = right(*args)
    kept.append(made[0].handle.claim("half mapped"))
    return made
chunks.map_at = map_at
"""
ACCESS_FOR_EACH = """
right = chunks.Chunks._append
def append(self, pieces, access):
    for piece in pieces:
        right(self, [piece], access)
chunks.Chunks._append = append
"""
RELEASE_SWALLOWED = """
right = lifetime._report
lifetime._report = lambda *args: None
"""

CAUGHT = [
    ("wrong order", WRONG_ORDER, MACHINE),
    ("wrong order", WRONG_ORDER, CONTRACT),
    ("leaked fd", LEAKED_FD, CONTRACT),
    ("missed release", MISSED_RELEASE, MACHINE),
    ("missed release", MISSED_RELEASE, CONTRACT),
    ("kept on demand", KEPT_ON_DEMAND, MACHINE),
    ("writable unasked", WRITABLE_UNASKED, MACHINE),
    ("pin ignored", PIN_IGNORED, MACHINE),
    ("pin ignored", PIN_IGNORED, CONTRACT),
    ("a chunk too many", CHUNK_TOO_MANY, MACHINE),
    ("stale chunk", STALE_CHUNK, MACHINE),
    ("not sealed", NOT_SEALED, MACHINE),
    ("no ceiling", NO_CEILING, MACHINE),
    ("half a growth", HALF_A_GROWTH, FAULTS),
    ("set_access for each chunk", ACCESS_FOR_EACH, FAULTS),
    ("failed release not reported", RELEASE_SWALLOWED, FAULTS),
]


def run(bug: str, checker: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", HEAD + bug + checker],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("bug", "checker"),
    [
        pytest.param(
            bug, checker, id=f"{name}-{({MACHINE: 'machine', CONTRACT: 'contract', FAULTS: 'faults'})[checker]}"
        )
        for name, bug, checker in CAUGHT
    ],
)
def test_a_planted_bug_is_caught(bug: str, checker: str) -> None:
    ran = run(bug, checker)
    assert ran.returncode == 1, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "NOTICED" in ran.stdout or "1 failed" in ran.stdout or "1 error" in ran.stdout, ran.stdout[-2000:]


@pytest.mark.parametrize("checker", [MACHINE, FAULTS], ids=["machine", "faults"])
def test_without_a_bug_nothing_is_reported(checker: str) -> None:
    ran = run(NONE, checker)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
