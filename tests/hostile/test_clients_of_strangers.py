"""What a stranger does to a client who borrows, receives or lists what is the stranger's, or asks strangers to let go.

Each of these costs a client a bounded time and bounded memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.hostile import fuse_files
from tests.hostile.fuse_files import unanswered_files
from tests.hostile.test_keeper_fairness import GREEDY
from tests.hostile.test_trial3_keeper import locked_for_ever
from tests.keeper_here import later
from tests.processes.other_users import _become

import vram
from vram.entries.placement import Placement
from vram.errors import ProtocolError
from vram.keeper.client import close_client
from vram.keeper.private import short_directory
from vram.testing.keeper import FUTURE_WRITE, SOON, WRITABLE, make_memfd

GRANULE = 2 << 20
GET_SEALS = 1034

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be other users")
needs_fuse = pytest.mark.skipif(fuse_files.missing() is not None, reason=str(fuse_files.missing()))


@contextlib.contextmanager
def stranger(act: Callable[[], object]) -> Iterator[None]:
    """Have another user do something, in a process that keeps what came of it until the end of the block."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            _become(GREEDY)
            kept = act()
            os.write(writer, b"r")
            signal.pause()
            assert kept
        except BaseException as error:
            print("the stranger:", repr(error), file=sys.stderr)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            assert pipe.read(1) == b"r", "the attack did not begin"
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@contextlib.contextmanager
def lent_by_a_stranger(fd: int) -> Iterator[str]:
    """Memory that another user lends as read-only and has not sealed; yields the path."""

    def lend(path: str) -> Any:
        Placement.freeze, Placement.descriptors = (lambda self: None), (lambda self: [fd])  # type: ignore[method-assign]
        return vram.lend(vram.zeros(4096, "uint8", device="host"), at=path, mode=0o666)

    with short_directory() as place:
        os.chown(place, GREEDY, -1)
        os.chmod(place, 0o755)
        with vram.zeros(8, "uint8", device="host") as array, vram.lend(array, at=f"{place}/s"):
            pass  # loads what the other user may not be able to read
        with stranger(lambda: lend(f"{place}/s")):
            yield f"{place}/s"
        close_client(f"{place}/s")


# -- borrowing --------------------------------------------------------------------------------------------------------
@needs_root
@needs_fuse
def test_a_borrower_does_not_wait_for_whoever_writes_to_what_is_lent() -> None:
    """No interrupt ends a wait for the lock of a file, which its lender holds for as long as it likes."""
    fd = make_memfd(GRANULE, seals=WRITABLE)
    try:
        with lent_by_a_stranger(fd) as path, unanswered_files() as files, locked_for_ever(files.place, fd):
            thread, came = later(lambda: vram.borrow(path, timeout=1.0))
            thread.join(4.0)
            ended = not thread.is_alive()
            assert files.is_served
            files.die()
            thread.join(SOON)
        assert ended, "it waits for a lock that the lender holds"
        assert isinstance(came[0], ProtocolError), came
        assert "said to be read-only can still be written by others" in str(came[0])
    finally:
        os.close(fd)


@needs_root
@pytest.mark.parametrize("sealed", [WRITABLE, WRITABLE | FUTURE_WRITE], ids=["not at all", "future"])
def test_a_borrower_seals_nothing_of_a_stranger(sealed: int) -> None:
    fd = make_memfd(GRANULE, seals=sealed)
    try:
        with lent_by_a_stranger(fd) as path:
            with pytest.raises(ProtocolError, match=r"said to be read-only.*F_SEAL_WRITE.*writable=True"):
                vram.borrow(path)
            assert fcntl.fcntl(fd, GET_SEALS) == sealed
    finally:
        os.close(fd)
