"""Bugs planted in ``vram.memory``, each in a process of its own: the machine, the contract and the faults see them.

A checker that passes with the bug in place would be worth nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.selftest import reasons

ROOT = Path(__file__).resolve().parents[2]

# Runs with the bug in place; exits with 0 if nothing was noticed and with 1 if a check failed.
MACHINE = """
import os, runpy, sys
sys.path.insert(0, "tests/selftest")
import reasons
reasons.run_machine(runpy.run_path(os.path.abspath("tests/stateful/test_memory_machine.py"))["MemoryMachine"], 200, 40)
"""
SUITE = """
import pytest, sys
raise SystemExit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "reasons", {0!r}, "-k", {1!r}]))
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
allocation.close_all = lambda fds: None
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
right = chunks.partial
def writable(call, *args, **named):
    if "fd" in named:
        named["access"] = named["access"].READ_WRITE
    return right(call, *args, **named)
chunks.partial = writable
"""
PIN_IGNORED = """
lifetime._is_held = lambda serial: False
"""
CHUNK_TOO_MANY = """
right = chunks.Chunks.beyond
chunks.Chunks.beyond = lambda self, nbytes: right(self, max(nbytes - 1, 0))
"""
STALE_CHUNK = """
chunks.Chunks.unmap = lambda self, dropped: None  # shrunk, but the memory is kept
"""
NOT_SEALED = """
right = allocation.seal_memory
allocation.seal_memory = region.seal_memory = lambda memory: None
"""
NO_CEILING = """
right = chunks.plan
chunks.plan = lambda nbytes, mapped, capacity, *rest: right(nbytes, mapped, capacity + (8 << 20), *rest)
"""
HALF_A_GROWTH = """
right, kept = lifetime.Handle.keep, []
def keep(self, label, undo, *, depends=()):
    made = right(self, label, undo, depends=depends)
    if isinstance(undo, reservation.Unmap):
        kept.append(made.claim("half mapped"))
    return made
lifetime.Handle.keep = keep
"""
ACCESS_FOR_EACH = """
right = chunks.Chunks._append
def append(self, pieces, access, into=None):
    before = self.row
    for piece in pieces:
        right(self, [piece], access)
    if into is not None:
        into += self.row[len(before):]
        self.row = before
chunks.Chunks._append = append
"""
RELEASE_SWALLOWED = """
right = lifetime._report
lifetime._report = lambda *args: None
"""

CAUGHT = [
    ("wrong order", WRONG_ORDER, MACHINE, "assert [w.category for w in caught] =="),
    ("wrong order", WRONG_ORDER, CONTRACT, "assert driver.live() == before"),
    ("leaked fd", LEAKED_FD, CONTRACT, "DID NOT RAISE OSError"),
    ("missed release", MISSED_RELEASE, MACHINE, "assert live.handles == held"),
    ("missed release", MISSED_RELEASE, CONTRACT, "left behind:"),
    ("kept on demand", KEPT_ON_DEMAND, MACHINE, "assert live.handles == held"),
    ("writable unasked", WRITABLE_UNASKED, MACHINE, "mem_get_access(address, HOST) == mapped.access"),
    ("pin ignored", PIN_IGNORED, MACHINE, "assert len(region.pinned_by()) =="),
    ("pin ignored", PIN_IGNORED, CONTRACT, "DID NOT RAISE BusyError"),
    ("a chunk too many", CHUNK_TOO_MANY, MACHINE, "held == len(allocations)"),
    ("stale chunk", STALE_CHUNK, MACHINE, "assert live.mappings == len(mapped)"),
    ("not sealed", NOT_SEALED, MACHINE, "assert area.facade.is_frozen"),
    ("no ceiling", NO_CEILING, MACHINE, "assert [w.category for w in caught] =="),
    ("half a growth", HALF_A_GROWTH, FAULTS, "assert here.state() =="),
    ("set_access for each chunk", ACCESS_FOR_EACH, FAULTS, "assert here.state() =="),
    ("failed release not reported", RELEASE_SWALLOWED, FAULTS, "__notes__"),
]


NAMES = {MACHINE: "machine", CONTRACT: "contract", FAULTS: "faults"}


def run(bug: str, checker: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", HEAD + bug + checker],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=reasons.environment(),
    )


@pytest.mark.parametrize(
    ("bug", "checker", "because"),
    [
        pytest.param(
            bug,
            checker,
            because,
            id=f"{name}-{NAMES[checker]}",
        )
        for name, bug, checker, because in CAUGHT
    ],
)
def test_a_planted_bug_is_caught(bug: str, checker: str, because: str) -> None:
    ran = run(bug, checker)
    assert ran.returncode == 1, ran.stdout[-2000:] + ran.stderr[-2000:]
    reasons.require(reasons.of(ran.stdout), because)


@pytest.mark.parametrize("checker", [MACHINE, FAULTS], ids=["machine", "faults"])
def test_without_a_bug_nothing_is_reported(checker: str) -> None:
    ran = run(NONE, checker)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
