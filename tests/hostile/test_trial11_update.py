"""Updates in place, against strangers with many leases, and what interrupts or misuses a section or an update (S7)."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import weakref
from collections.abc import Iterator

import pytest
from tests.hostile.test_keeper_fairness import MODEST, being
from tests.hostile.test_keeper_sizes import keeper_here
from tests.processes.update_children import publish, seen

import vram
from vram.driver import words
from vram.entries import update
from vram.errors import BusyError, DriverError
from vram.keeper import updates
from vram.keeper.client import KeeperClient, close_client
from vram.open_files import close_fds
from vram.testing.keeper import SOON

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be other users")


# -- strangers with many leases --------------------------------------------------------------------------------------


@contextlib.contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Let this process have only so many descriptors more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def stranger_of(path: str, leases: int) -> Iterator[memoryview]:
    """Publish "w", on which another user has many leases; yield the words of the page that all of those have."""
    page: list[int] = []
    said = words.make(page)
    try:
        publish()
        with being(MODEST):
            stranger = KeeperClient.connect(path, label="stranger")
        with stranger:
            for _ in range(leases):
                held = stranger.attach("w")
                close_fds(held.fds)
                updates.give_page(stranger, held.lease_id, page[0])
            yield said
    finally:
        close_fds(page)
        close_client(path)


@needs_root
def test_s7_the_sections_of_a_stranger_take_no_descriptors_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the publisher nor of the keeper, which are this process: each would have to be closed, and a close
    goes through all locks that the stranger has set on the file."""
    with keeper_here(mode=0o666) as server:
        os.chmod(os.path.dirname(server.path), 0o711)
        monkeypatch.setenv("VRAM_KEEPER", server.path)
        with stranger_of(server.path, 200) as said:
            with vram.update("w", timeout=SOON):
                pass
            said[100] = 1
            with few_descriptors(8):
                with pytest.raises(BusyError, match="32 or more of its readers did not leave") as refused:
                    vram.update("w", timeout=0.2).__enter__()
                assert len(refused.value.holders) == 20
                assert all(f"uid {MODEST}, label 'stranger'" in str(holder) for holder in refused.value.holders)
                said[100] = 0
                with vram.update("w", timeout=SOON) as arrays:
                    for array in arrays.values():
                        array.fill(3)
            with vram.attach("w") as lease:
                assert seen(lease) == (3, [3])


@needs_root
def test_s7_who_has_more_leases_than_can_be_looked_at_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with keeper_here(mode=0o666) as server:
        os.chmod(os.path.dirname(server.path), 0o711)
        monkeypatch.setenv("VRAM_KEEPER", server.path)
        with stranger_of(server.path, 1000) as said, vram.attach("w") as lease:
            monkeypatch.setattr(update, "_LOOK", 0.0)
            with pytest.raises(BusyError, match=r"more leases than could be looked at within 0 s; 512 were") as refused:
                vram.update("w", timeout=0).__enter__()
            assert refused.value.holders == (f"pid {os.getpid()}, uid {MODEST}, 512 leases",)
            assert seen(lease) == (1, [1])
            monkeypatch.undo()
            monkeypatch.setenv("VRAM_KEEPER", server.path)
            with vram.update("w", timeout=0):
                assert not any(said)


class Local:
    """Something in a frame."""


def test_what_had_no_room_for_descriptors_is_gone_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for the collector, with all that the frames below it hold."""
    with keeper_here() as server:
        monkeypatch.setenv("VRAM_KEEPER", server.path)
        publish()
        alive: list[weakref.ref[Local]] = []

        def attach() -> None:
            local = Local()
            alive.append(weakref.ref(local))
            vram.attach("w")

        name = ""
        gc.disable()
        try:
            with few_descriptors(2):
                try:
                    attach()
                except DriverError as error:
                    name = error.name
            assert name == "EMFILE"
            assert alive[0]() is None
        finally:
            gc.enable()
        close_client(server.path)
