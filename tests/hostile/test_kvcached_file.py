"""The file in /dev/shm that kvcached's tools read: everybody may make one of that name, and lock what he can open."""

from __future__ import annotations

import contextlib
import gc
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.other_users import OTHER, as_user, needs_root

from vram.engines import kvcached

PAGE = 2 << 20
SOON = 15.0
WILD = (1 << 40).to_bytes(8, "little") + bytes(16)


@pytest.fixture
def path() -> Iterator[Path]:
    found = Path("/dev/shm", f"vram-test-{os.getpid()}")
    yield found
    gc.collect()
    with contextlib.suppress(FileNotFoundError):
        found.rmdir() if found.is_dir() and not found.is_symlink() else found.unlink()


def allocator(path: Path) -> kvcached.PageAllocator:
    """One whose pages are another process's, so that no memory is needed here."""
    pages = kvcached.PageAllocator(2, 8 * PAGE, PAGE, enable_page_prealloc=False, ipc_name=path.name)
    pages.set_use_worker_ipc(True)
    pages.set_broadcast_map_callback(lambda world, offsets: None)
    pages.set_broadcast_unmap_callback(lambda world, offsets: None)
    return pages


def soon(act: Callable[[], Any]) -> Any:
    """Return what a call returns, which would otherwise hang."""
    said: list[Any] = []
    thread = threading.Thread(target=lambda: said.append(act()), daemon=True)
    thread.start()
    thread.join(SOON)
    assert said, "it waits for whoever has the lock"
    return said[0]


@needs_root
def test_nobody_else_can_open_the_file(path: Path) -> None:
    pages = allocator(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    kind, _ = as_user(OTHER, lambda: os.open(path, os.O_RDONLY))
    assert kind is PermissionError
    assert pages.check_and_get_resize_target(8 * PAGE) == -1


def make_file(path: Path) -> None:
    path.write_bytes(WILD)
    path.chmod(0o666)


def make_pipe(path: Path) -> None:
    os.mkfifo(path)
    path.chmod(0o666)


MADE: dict[str, Callable[[Path], object]] = {
    "file": make_file,
    "pipe": make_pipe,
    "link": lambda path: path.symlink_to("/dev/null"),
    "directory": lambda path: path.mkdir(),
}


@needs_root
@pytest.mark.parametrize("engine", [OTHER + 1, 0], ids=["another", "root"])
@pytest.mark.parametrize("what", MADE)
def test_what_another_user_made_under_its_name_is_neither_believed_nor_changed(
    path: Path, what: str, engine: int, capfd: pytest.CaptureFixture[str]
) -> None:
    as_user(OTHER, lambda: MADE[what](path))
    before = path.lstat()
    assert before.st_uid == OTHER

    def work() -> object:
        pages = allocator(path)
        target = pages.check_and_get_resize_target(8 * PAGE)
        taken = [pages.alloc_page().page_id for _ in range(8)]
        pages.free_pages(taken)
        state = pages.get_page_state()
        del pages
        gc.collect()
        return target, taken, state["free_pages"]

    assert soon(lambda: as_user(engine, work)) == (-1, list(range(8)), 8)
    assert capfd.readouterr().err.count(f"kvctl has no say: {path} cannot be used: ") == 1, "it is said, once"
    after = path.lstat()
    assert (after.st_ino, after.st_uid, after.st_mode, after.st_size) == (
        before.st_ino, before.st_uid, before.st_mode, before.st_size,
    )  # fmt: skip
    if what == "file":
        assert path.read_bytes() == WILD


def test_a_file_of_ones_own_that_is_something_else_is_left_alone(path: Path) -> None:
    path.write_bytes(b"precious" * 4)
    pages = allocator(path)
    assert pages.alloc_page()
    assert pages.check_and_get_resize_target(8 * PAGE) == -1
    del pages
    gc.collect()
    assert path.read_bytes() == b"precious" * 4
