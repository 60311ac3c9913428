"""Bugs planted in ``vram.transports``, each in a process of its own: the contract and the tests of order see them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.selftest import reasons

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import pytest
raise SystemExit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "reasons", {0!r}, "-k", {1!r}]))
"""
CONTRACT, ORDER = "tests/conformance/test_transports.py", "tests/unit/test_transports.py"
HEAD = """
from vram.transports import endpoint, ipc, local, measure, peer, places, remote, staged, vmm
from vram.transports.contract import Estimate
"""
BUGS = {
    "nothing": ("", CONTRACT, "PlainCopy or (OnTheHost and bytes)", ""),
    "the base instead of an interior address": (
        """
right = local.LocalTransport._keep
def keep(self, array):
    message = right(self, array)
    message.address = array.region.address
    return message
local.LocalTransport._keep = keep
""",
        CONTRACT, "PlainCopy", 'assert content(came) == data',
    ),
    "one byte too few": (
        """
right = staged.StagedTransport._move
def move(self, message, array):
    message.nbytes -= 1
    right(self, message, array)
    message.nbytes += 1
staged.StagedTransport._move = move
""",
        CONTRACT, "PlainCopy", 'assert content(came) == data',
    ),
    "a message that is lost when its buffer is too small": (
        """
recv = local.LocalTransport.recv
local.LocalTransport.recv = lambda self, buffer=None, stream=None, timeout=None: recv(self, buffer, stream, timeout=1)
right = local.check_fits
def check(array, nbytes, place):
    try:
        right(array, nbytes, place)
    except BaseException:
        import gc
        for one in gc.get_objects():
            if isinstance(one, local.LocalTransport):
                one._waiting.clear()
        raise
local.check_fits = check
""",
        CONTRACT, "PlainCopy and small", 'WaitTimeoutError: nothing was sent for 1 s',
    ),
    "another end's memory mapped for every message": (
        """
right = remote.ExportTable.export
def lend(self, array):
    region = array.region
    known = self._by_region.get(region.handle)
    if known is not None:
        region.handle.drop_dependency(known.handle)
    self._retired = None
    return right(self, array)
remote.ExportTable.export = lend
""",
        CONTRACT, "OnTheHost and again", 'assert len(imported) == 1',
    ),
    "an estimate that is forgotten": (
        "measure._known = type('Forgetful', (dict,), {'get': lambda *a: None})()\n",
        CONTRACT, "PlainCopy and estimate", 'assert ends.receiver.estimate() is found',
    ),
    "a constant called an estimate": (
        """
staged.StagedTransport.measure = classmethod(lambda cls, src, dst: Estimate(25e9, 1e-6))
""",
        ORDER, "constants", "calls('cuMemcpyAsync')",
    ),
    "a copy that does not wait for the other direction": (
        """
right = staged.PinnedRing._across
def across(self, *arguments):
    driver = self._driver
    class Hasty:
        stream_wait = staticmethod(lambda *a: None)
        def __getattr__(self, name):
            return getattr(driver, name)
    self._driver = Hasty()
    try:
        right(self, *arguments)
    finally:
        self._driver = driver
staged.PinnedRing._across = across
""",
        ORDER, "staged_copies", 'assert np.False_',
    ),
    "a send that does not wait for the stream": (
        "local.ready = remote.ready = lambda array, stream: None\n", ORDER, "s10", '== {9}',
    ),
}  # fmt: skip


@pytest.mark.standin
@pytest.mark.parametrize("name", list(BUGS))
def test_a_planted_bug_is_noticed(name: str) -> None:
    bug, suite, which, because = BUGS[name]
    code = HEAD + bug + RUN.format(suite, which)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT, check=False,
        env=reasons.environment(),
    )  # fmt: skip
    assert done.returncode == (1 if because else 0), done.stdout[-3000:] + done.stderr[-2000:]
    if because:
        reasons.require(reasons.of(done.stdout), because)
