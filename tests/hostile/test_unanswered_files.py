"""What a peer sends may be a file whose server never answers, or memory that changes while it is looked at (S7, S8).

The files are those of a real FUSE mount. Whoever asks for their size, or closes them, waits until its daemon dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest
from tests.support import fuse_files
from tests.support.deadlines import SOON, until
from tests.support.fuse_files import Unanswered, unanswered_files
from tests.support.memfds import READ_ONLY, memfds

from vram import driver as drivers
from vram import open_files
from vram.driver import memfds as memfds_module
from vram.entries import manifests
from vram.errors import ProtocolError
from vram.keeper import admission
from vram.keeper.client import KeeperClient
from vram.keeper.leases import Segment
from vram.keeper.private import KeeperProcess, short_directory
from vram.open_files import close_fds
from vram.spec import HOST, Access, HandleKind, Location

pytestmark = pytest.mark.slow  # goes with lanes of closing

GRANULE = 2 << 20
NAMES = ["file", "nvidia0", "nvidiactl"]  # two regular files and a named pipe
GPU = Location("cuda", 0)

needs_fuse = pytest.mark.skipif(fuse_files.missing() is not None, reason=str(fuse_files.missing()))


@pytest.fixture
def files() -> Iterator[Unanswered]:
    with unanswered_files() as found:
        yield found
        # A stuck thread ends with the daemon, before the ledger looks.
        found.die()
        until(lambda: not any(thread.name == "vram: closing" for thread in threading.enumerate()))


@pytest.fixture
def gpu() -> str:
    """Load the driver first, since that starts processes, which inherit what is open: exec closes that, and hangs."""
    return drivers.get(GPU).device_info(GPU).uuid


@contextlib.contextmanager
def promptly(files: Unanswered) -> Iterator[None]:
    """Fail if it took until the daemon was dead: then it had asked it, whatever error that ended with."""
    try:
        yield
    finally:
        assert files.is_served, "it hung until the file system was gone"


# -- what asks nobody -----------------------------------------------------------------------------------------------
@needs_fuse
@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_known_for_one_and_closed_without_asking_its_server(files: Unanswered, name: str) -> None:
    fd = files.open(name)
    with promptly(files):
        assert not open_files.is_memory(fd)
        assert open_files.attributes(fd) is None
        mine = [os.dup(fd), os.dup(fd)]
        with memfds(1) as more:
            close_fds([*mine, os.dup(more[0])])


def test_what_is_asked_is_memory_or_special() -> None:
    with short_directory() as place, memfds(1) as fds, contextlib.ExitStack() as stack:
        zero = os.open("/dev/zero", os.O_RDWR)
        read, write = os.open("/dev/zero", os.O_RDONLY), os.open("/dev/zero", os.O_WRONLY)
        terminal = os.openpty()
        ends = [end.detach() for end in socket.socketpair()]
        event = os.eventfd(0)
        file = os.open(f"{place}/f", os.O_RDWR | os.O_CREAT)
        path = os.open("/dev/zero", os.O_PATH)
        pipe = os.pipe()
        directory = os.open(place, os.O_RDONLY)
        special, others = [zero, read, write, *terminal, *ends, event], [*pipe, directory, file, path]
        for fd in (*special, *others):
            stack.callback(os.close, fd)
        found = open_files.attributes(fds[0])
        assert found is not None
        assert found.st_size == 4096
        found = open_files.attributes(zero)
        assert found is not None
        assert os.major(found.st_rdev) == 1
        assert [open_files.attributes(fd) for fd in special] == [os.fstat(fd) for fd in special]
        assert [open_files.attributes(fd) for fd in others] == [None] * len(others)
        with pytest.raises(OSError, match="Bad file descriptor"):
            open_files.attributes(10**6)


def test_whatever_is_well_served_is_closed_when_close_fds_returns() -> None:
    with short_directory() as place:
        for _ in range(50):
            fds = [os.open(f"{place}/f", os.O_RDWR | os.O_CREAT), *os.pipe(), os.open("/", os.O_PATH), 10**6]
            close_fds(fds)
            until(lambda fds=fds: not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds), seconds=SOON)


# -- the drivers ----------------------------------------------------------------------------------------------------
@needs_fuse
@pytest.mark.parametrize("name", NAMES)
def test_the_host_driver_refuses_it_in_time(files: Unanswered, name: str) -> None:
    fd = files.open(name)
    driver: Any = drivers.get(HOST)
    address = driver.address_reserve(GRANULE)
    calls: list[Callable[[], object]] = [
        lambda: driver.mem_import(fd, HandleKind.POSIX_FD, GRANULE),
        lambda: driver.mem_map_import(address, GRANULE, fd, HandleKind.POSIX_FD, Access.READ, private=False),
        lambda: driver.mem_identity(fd),
        lambda: manifests.read_sealed(fd),
    ]
    try:
        with promptly(files):
            for call in calls:
                with pytest.raises(ProtocolError, match="no shared memory"):
                    call()
    finally:
        driver.address_free(address, GRANULE)


@needs_fuse
@pytest.mark.standin
@pytest.mark.parametrize("name", NAMES)
def test_a_gpus_driver_is_never_asked_about_it(gpu: str, files: Unanswered, name: str) -> None:
    fd = files.open(name)
    driver: Any = drivers.get(GPU)
    calls: list[Callable[[], object]] = [
        lambda: driver.mem_import(fd, HandleKind.POSIX_FD, GRANULE),
        lambda: driver.pool_import(fd, GPU),
    ]
    with promptly(files):
        for call in calls:
            with pytest.raises(ProtocolError, match="a file, a directory or a pipe"):
                call()


# -- a hostile publisher --------------------------------------------------------------------------------------------
@needs_fuse
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["host", "GPU-6f2b7c1e-0000-4000-8000-0123456789ab"])
def test_a_keeper_that_is_given_one_refuses_it_and_serves_all_others(name: str, device: str) -> None:
    with short_directory() as place:
        keeper = KeeperProcess(f"{place}/k")
        try:
            with unanswered_files() as files, KeeperClient.connect(keeper.path) as good:
                fd = files.open(name)
                with promptly(files), KeeperClient.connect(keeper.path) as hostile:
                    for _ in range(3):
                        with pytest.raises(ProtocolError, match="segment 0"):
                            hostile.publish("bad", [Segment(4096, device=device)], [fd])
                    with memfds(1) as fds, pytest.raises(ProtocolError, match="manifest"):
                        hostile.publish("bad", [Segment(4096)], fds, manifest_fd=fd)
                    with memfds(1) as fds:
                        good.publish("good", [Segment(4096)], fds)
                    assert [entry.name for entry in good.list()] == ["good"]
            assert keeper.stop() == 0
            assert keeper.said() == ""
        finally:
            keeper.kill()


# -- memory that changes while it is looked at ----------------------------------------------------------------------
def at_line(module: ModuleType, number: int, act: Callable[[], None]) -> contextlib.AbstractContextManager[list[int]]:
    """Act once, before the n-th line of a module that this thread runs; yields a list of one: how many lines ran."""

    @contextlib.contextmanager
    def tracing() -> Iterator[list[int]]:
        count = [0]

        def line(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                count[0] += 1
                if count[0] == number:
                    act()
            return line

        def call(frame: FrameType, event: str, argument: object) -> Any:
            return line if frame.f_code.co_filename == module.__file__ else None

        before = sys.gettrace()
        sys.settrace(call)
        try:
            yield count
        finally:
            sys.settrace(before)

    return tracing()


def imported(fd: int) -> None:
    driver = drivers.get(HOST)
    driver.mem_release(driver.mem_import(fd, HandleKind.POSIX_FD, GRANULE))


def admitted(fd: int) -> None:
    admission.admit(fd, GRANULE, kind=1, device="host", writable=False, what="it")


def admitted_as_a_gpus(fd: int) -> None:
    admission.admit(fd, GRANULE, kind=1, device="GPU-1", writable=False, what="it")


@pytest.mark.parametrize(
    ("module", "take"),
    [(memfds_module, imported), (admission, admitted), (admission, admitted_as_a_gpus)],
    ids=["import", "admission", "admission as a GPU's"],
)
def test_s8_memory_truncated_and_sealed_at_any_line_of_the_check_is_never_taken(
    module: ModuleType, take: Callable[[int], None]
) -> None:
    """Who looks at the size and then at the seals takes what was truncated in between: a reader gets SIGBUS."""
    taken = refused = 0
    for number in range(1, 60):
        fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, GRANULE)

            def shrink(fd: int = fd) -> None:
                os.ftruncate(fd, 0)
                fcntl.fcntl(fd, 1033, READ_ONLY)

            with at_line(module, number, shrink) as count:
                try:
                    take(fd)
                    taken += 1
                except ProtocolError:
                    refused += 1
            assert not taken, f"taken with {os.fstat(fd).st_size} bytes after a change before line {number}"
            if count[0] < number:
                break
        finally:
            os.close(fd)
    assert refused >= 2
