"""S8: what is published read-only can be written by nobody, in the kernel: not by its user, another one, or root."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.keeper_here import open_to_all
from tests.support.other_users import OTHER, as_user

import vram
from vram.errors import AccessDeniedError

PAGE = 4096
F_ADD_SEALS = 1033
_libc = ctypes.CDLL(None, use_errno=True)


def outcome(attempt: Callable[[], Any]) -> str:
    """How an attempt ended: the name of an errno or of an exception, or ``done``."""
    try:
        attempt()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, type(error).__name__)
    except BaseException as error:
        return type(error).__name__
    return "done"


def attempts(array: vram.Array) -> dict[str, str]:
    """Try everything that an attacker, or a mistake, could try on an array's memory."""
    view = array.numpy()
    (allocation,), _ = array.region.segments(array.offset, array.offset + array.nbytes)
    fd = allocation.export()
    reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    found = {
        "numpy": outcome(lambda: view.fill(1)),
        "the flag": outcome(lambda: view.setflags(write=True)),
        "array": outcome(lambda: array.fill(1)),
        "mprotect": outcome(lambda: protect(array.address)),
        "set_access": outcome(lambda: allow(array)),
        "map": outcome(lambda: mmap.mmap(fd, PAGE).close()),
        "write": outcome(lambda: os.pwrite(fd, b"x", 0)),
        "shrink": outcome(lambda: os.ftruncate(fd, 0)),
        "grow": outcome(lambda: os.ftruncate(fd, 4 << 20)),
        "punch a hole": outcome(lambda: punch(fd)),
        "reopen and map": outcome(lambda: reopen(fd, lambda again: mmap.mmap(again, PAGE).close())),
        "reopen and write": outcome(lambda: reopen(fd, lambda again: os.pwrite(again, b"x", 0))),
        "more seals": outcome(lambda: fcntl.fcntl(fd, F_ADD_SEALS, 0x10)),
        "privately": outcome(lambda: mmap.mmap(fd, PAGE, flags=mmap.MAP_PRIVATE).close()),
    }
    os.close(reopened)
    return found


def protect(address: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), mmap.PROT_READ | mmap.PROT_WRITE):
        raise OSError(ctypes.get_errno(), "mprotect")


def allow(array: vram.Array) -> None:
    driver = array.region.driver
    driver.mem_set_access(array.region.address, 2 << 20, vram.memory.Access.READ_WRITE, [array.device])


def punch(fd: int) -> None:
    if _libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(PAGE)):  # PUNCH_HOLE | KEEP_SIZE
        raise OSError(ctypes.get_errno(), "fallocate")


def reopen(fd: int, use: Callable[[int], Any]) -> None:
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        use(again)
    finally:
        os.close(again)


REFUSED = {
    "numpy": "ValueError",
    "the flag": "ValueError",
    "array": "ReadOnlyError",
    "mprotect": "EACCES",
    "set_access": "AccessDeniedError",
    "map": "EPERM",
    "write": "EPERM",
    "shrink": "EPERM",
    "grow": "EPERM",
    "punch a hole": "EPERM",
    "reopen and map": "EPERM",
    "reopen and write": "EPERM",
    "more seals": "done",  # none of them gives a right back
    "privately": "done",  # a copy of one's own
}


@pytest.fixture(scope="module")
def running_keeper() -> Iterator[str]:
    """The socket of a keeper to which every user may connect."""
    with open_to_all() as path:
        yield path


@pytest.fixture
def open_keeper(kept: vram.Keeper) -> str:
    return kept.path


@pytest.fixture
def published(open_keeper: str) -> Iterator[str]:
    """A keeper that holds the numbers 0 to 999 as array x of entry fixed."""
    vram.publish("fixed", {"x": np.arange(1000)}, keeper=open_keeper)
    yield open_keeper
    with vram.attach("fixed", keeper=open_keeper) as lease:
        assert (lease["x"].numpy() == np.arange(1000)).all(), "somebody wrote to it"


def attack(path: str) -> dict[str, str]:
    """As a reader."""
    with vram.attach("fixed", keeper=path) as lease:
        return attempts(lease["x"])


def test_no_reader_of_this_user_can_write(published: str) -> None:
    assert attack(published) == REFUSED


def test_no_reader_of_another_process_can_write(published: str) -> None:
    assert as_user(os.geteuid(), lambda: attack(published)) == REFUSED


def test_no_reader_of_another_user_can_write(published: str) -> None:
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    found = as_user(OTHER, lambda: attack(published))
    # It may not even open the descriptor for writing: the memfd is its publisher's, and not writable for others.
    assert {**found, "reopen and map": "EPERM", "reopen and write": "EPERM"} == REFUSED
    assert found["reopen and map"] in ("EPERM", "EACCES")


def test_root_cannot_write_to_what_another_user_published(open_keeper: str) -> None:
    if os.geteuid():
        pytest.skip("becoming another user needs root")

    def publish() -> int:
        return vram.publish("theirs", {"x": np.arange(1000)}, keeper=open_keeper).version

    assert as_user(OTHER, publish) == 1
    with vram.attach("theirs", keeper=open_keeper) as lease:
        assert attempts(lease["x"]) == REFUSED
        assert (lease["x"].numpy() == np.arange(1000)).all()
    with pytest.raises(AccessDeniedError, match=f"uid {OTHER}"):
        vram.publish("theirs", {"x": np.arange(3)}, keeper=open_keeper)
    vram.remove("theirs", keeper=open_keeper)  # the keeper's own user may take anything out


def test_the_publisher_cannot_write_any_more(open_keeper: str) -> None:
    with vram.empty(1000, "int64", device="host") as a:
        assert attempts(a)["mprotect"] == "done", "before, it is memory like any other"
        a.numpy()[:] = np.arange(1000)
        vram.publish("own", {"a": a}, keeper=open_keeper)
        assert attempts(a) == REFUSED
        assert (a.numpy() == np.arange(1000)).all()


@pytest.mark.parametrize("who", ["reader", "publisher"])
def test_a_write_through_a_pointer_ends_the_writer_alone(published: str, who: str) -> None:
    """What neither numpy nor we can see is stopped by the kernel: SIGSEGV, for the process that did it."""
    code = f"""
import ctypes, numpy, os, vram
if {who!r} == "reader":
    array = vram.attach("fixed")["x"]
else:
    array = vram.zeros(1000, "int64", device="host")
    numpy_slice = array.numpy()[10:20]
    vram.publish("other", {{"a": array}})
os.write(1, b"here it comes")
ctypes.memset(array.address, 1, 8)
os.write(1, b"and it went through")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        timeout=300,
        cwd=Path(__file__).parent,
        env={**os.environ, "VRAM_KEEPER": published},
    )
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, b"here it comes"), done.stderr.decode()


def test_a_private_mapping_of_read_only_memory_is_the_readers_own(published: str) -> None:
    with vram.attach("fixed", access="cow", keeper=published) as lease:
        lease["x"].fill(7)
        assert (lease["x"].numpy() == 7).all()


def test_writable_memory_is_read_only_by_agreement_only(open_keeper: str) -> None:
    """The other side of the promise: published writable, access="r" is the reader's own mapping, and says so."""
    vram.publish("open", {"x": np.arange(1000)}, writable=True, keeper=open_keeper)
    with vram.attach("open", keeper=open_keeper) as lease:
        found = attempts(lease["x"])
        assert (found["numpy"], found["array"]) == ("ValueError", "ReadOnlyError")
        assert (found["mprotect"], found["write"]) == ("done", "done")
        assert (found["shrink"], found["grow"]) == ("EPERM", "EPERM"), "nobody can take memory away under a reader"
