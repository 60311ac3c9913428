"""What newcomers stumble over: each mistake is answered by what to do instead, and what it says to do works."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import vram
from vram.errors import AccessDeniedError, BusyError, NotFoundError, PeerGoneError
from vram.keeper.client import close_client


# -- no keeper --------------------------------------------------------------------------------------------------------
def advice(call: Callable[[], object]) -> str:
    """Return what a call without a keeper says."""
    with pytest.raises(PeerGoneError) as caught:
        call()
    return str(caught.value)


def test_a_directory_that_is_not_there_is_to_be_made_first(tmp_path: Path) -> None:
    path = tmp_path / "there is" / "none" / "k.sock"
    said = advice(lambda: vram.attach("x", keeper=path))
    command = re.search(r"start one with `(install -d -m 700 .*) && vram keep --socket (.*)`$", said)
    assert command, said
    subprocess.run(shlex.split(command[1]), check=True, timeout=300)
    assert shlex.split(command[2]) == [str(path)]
    assert advice(lambda: vram.attach("x", keeper=path)).endswith(f"start one with `vram keep --socket {command[2]}`")


def test_a_private_keeper_that_is_gone_is_not_to_be_started_at_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VRAM_KEEPER", raising=False)
    with vram.private_keeper() as kept, vram.zeros(4, device="host") as array:
        path = kept.path
        vram.publish("x", {"a": array})
        lease = vram.attach("x")
        kept.close()
        with lease:
            for said in (advice(lease.is_stale), advice(lease.upgrade), advice(lambda: vram.attach("x", keeper=path))):
                assert "a private keeper, which ends with the program that started it" in said
                assert "vram.private_keeper()" in said
                assert f"--socket {path}" not in said


# -- keepers and lenders ----------------------------------------------------------------------------------------------
def test_a_lender_says_that_it_is_to_be_borrowed_from(tmp_path: Path) -> None:
    path = tmp_path / "lent.sock"
    with vram.zeros(4, device="host") as array, vram.lend({"a": array}, at=path):
        for timeout in (0.0, 20.0):  # a name that never comes is not waited for
            with pytest.raises(NotFoundError) as caught:
                vram.attach("x", keeper=path, timeout=timeout)
            assert str(caught.value) == (
                f"{path} is a lender, not a keeper, and has no 'x': vram.borrow({str(path)!r}) maps what it lends"
            )
        with vram.borrow(path) as lease:
            assert list(lease) == ["a"]
        close_client(str(path))


def test_a_keeper_says_that_it_is_to_be_attached_from(kept: vram.Keeper) -> None:
    with pytest.raises(AccessDeniedError) as caught:
        vram.borrow(kept.path, timeout=100.0)
    assert str(caught.value) == (
        f"{kept.path} is a keeper, not a lender: what it keeps has names, which `vram ls --socket {kept.path}` shows. "
        f"vram.attach(name, keeper={kept.path!r}) maps one"
    )


# -- sizes and places -------------------------------------------------------------------------------------------------


def test_what_keeps_memory_from_being_given_back_is_said_with_the_way_out() -> None:
    with vram.empty((1 << 20, 4), device="host", capacity=(1 << 21, 4)) as array:
        view = array[: 1 << 19].numpy()
        with pytest.raises(BusyError) as caught:
            array.resize(1)
        least = re.search(r"let go of it \(.*\), or keep at least (\d+) bytes", str(caught.value))
        assert least, str(caught.value)
        array.resize(int(least[1]) // 16)  # as it says
        del view
        array.resize(1)
