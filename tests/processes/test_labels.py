"""What processes call themselves: settable, shown beside what the kernel says, and never believed (S7)."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from tests.support.deadlines import until

import vram
from vram.errors import BusyError, UsageError
from vram.keeper.client import KeeperClient, close_client, own_label

pytestmark = pytest.mark.usefixtures("kept")
X = {"w": np.arange(4)}
HOST = os.uname().nodename


@pytest.fixture
def unconnected(kept: vram.Keeper) -> str:
    """A keeper that this process has not talked to yet."""
    close_client(kept.path)
    return kept.path


def test_the_environment_names_a_process(unconnected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAM_LABEL", "trainer 3")
    vram.publish("n", X)
    with vram.attach("n"):
        (holder,) = vram.holders()
        assert (holder.label, holder.host) == ("trainer 3", HOST)
        assert str(holder) == f"pid {os.getpid()}, uid {os.geteuid()}, label 'trainer 3'"
        (version,) = vram.entry("n").versions
        assert (version.publisher_label, version.publisher_host) == ("trainer 3", HOST)
    monkeypatch.setenv("VRAM_LABEL", "")  # which names nothing
    close_client(unconnected)
    # What was given back over the closed connection, the keeper may read after what comes over the next one.
    until(lambda: vram.holders() == [], what="the return of the lease")
    with vram.attach("n"):
        (holder,) = vram.holders()
        assert (
            holder.label
            == own_label()
            == (os.path.basename(sys.argv[0]) or "python").replace(
                "__main__.py", os.path.basename(os.path.dirname(sys.argv[0]))
            )
        )


def test_a_keeper_is_told_the_label_that_its_object_has(unconnected: str) -> None:
    keeper = vram.Keeper(unconnected, label="evaluator")
    vram.publish("n", X, keeper=keeper)
    with vram.attach("n", keeper=unconnected), vram.attach("n", keeper=keeper):
        assert {holder.label for holder in vram.holders(keeper=keeper)} == {"evaluator"}


def test_a_label_is_said_once(unconnected: str) -> None:
    vram.publish("n", X, keeper=vram.Keeper(unconnected, label="one"))
    with pytest.raises(UsageError, match=r"is connected to .* as 'one', which is said once: give label='other' before"):
        vram.list_entries(keeper=vram.Keeper(unconnected, label="other"))
    assert [entry.name for entry in vram.list_entries(keeper=vram.Keeper(unconnected))] == ["n"]


def test_who_is_busy_is_named_by_label(kept: vram.Keeper) -> None:
    with KeeperClient.connect(kept.path, label="the slow one") as slow:
        slow.attach_or_claim("model", timeout=0)
        with pytest.raises(BusyError, match=rf"pid {os.getpid()}, uid \d+, label 'the slow one'"):
            vram.attach_or_publish("model", lambda: X, timeout=0)


def test_a_borrower_is_named_by_label(tmp_path: object) -> None:
    code = "import sys, vram; lease = vram.borrow(sys.argv[1]); print('has it', flush=True); sys.stdin.read()"
    path = os.path.join(str(tmp_path), "lent")
    with vram.zeros(4, "uint8", device="host") as array, vram.lend(array, at=path) as lending:
        with subprocess.Popen(
            [sys.executable, "-c", code, path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "VRAM_LABEL": "borrower 5"},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stdout.readline() == "has it\n"
            with pytest.raises(BusyError, match=rf"pid {process.pid}, uid \d+, label 'borrower 5'"):
                lending.close(strict=True)
            process.communicate(timeout=60)
