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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from tests.support import fuse_files
from tests.support.deadlines import SOON, until
from tests.support.fuse_files import DEADLINE, Unanswered, unanswered_files
from tests.support.held_pipes import HeldPipe, Refused, held_pipe
from tests.support.impostors import impostor
from tests.support.memfds import READ_ONLY, memfds
from tests.support.unanswered import GRANULE, manifest

import vram
from vram import driver as drivers
from vram import open_files
from vram.driver import memfds as memfds_module
from vram.entries import manifests
from vram.errors import ProtocolError
from vram.keeper import admission
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.leases import Segment
from vram.keeper.private import KeeperProcess, short_directory
from vram.open_files import close_fds
from vram.sharing.channel import Channel
from vram.spec import HOST, Access, HandleKind, Location

pytestmark = pytest.mark.slow  # goes with lanes of closing

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
def held() -> Iterator[HeldPipe]:
    with contextlib.ExitStack() as stack:
        try:
            pipe = stack.enter_context(held_pipe())
        except Refused:
            pytest.skip("needs a user namespace, to mount something at its /dev")
        yield pipe
        pipe.die()  # as above
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


@pytest.mark.parametrize("kind", ["pipe", "named pipe"])
def test_a_pipe_that_somebody_holds_is_known_without_waiting_for_them(kind: str, tmp_path: Path) -> None:
    """Whoever splices from it to a socket that is full has it locked for as long as they please."""
    if kind == "pipe":
        reading, writing = os.pipe()
    else:
        os.mkfifo(tmp_path / "nvidia0")
        reading = os.open(tmp_path / "nvidia0", os.O_RDONLY | os.O_NONBLOCK)
        writing = os.open(tmp_path / "nvidia0", os.O_WRONLY)
        os.set_blocking(reading, True)
    one, other = socket.socketpair()
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            one.send(bytes(4096))
    one.setblocking(True)
    os.write(writing, bytes(4096))

    def splice() -> None:
        with contextlib.suppress(ConnectionError):  # the other end is closed
            os.splice(reading, one.fileno(), 4096)

    splicing = threading.Thread(target=splice)
    found: list[bool] = []
    looking = threading.Thread(target=lambda: found.append(open_files.is_gpu(writing)))
    try:
        splicing.start()
        until(lambda: is_stuck(splicing), what="a splice that waits")
        looking.start()
        looking.join(SOON / 4)
        assert found == [False], "it waits for who holds the pipe"
    finally:
        other.close()  # ends the splice, and so everything
        splicing.join(SOON)
        looking.join(SOON)
        one.close()
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("mode", ["rw", "r", "w"])
def test_a_held_pipe_called_like_a_gpus_device_is_known_and_closed_without_waiting(held: HeldPipe, mode: str) -> None:
    fd = held.fds[mode]
    assert os.readlink(f"/proc/self/fd/{fd}") == "/dev/nvidia0"
    assert not open_files.is_memory(fd)
    assert open_files.attributes(fd) is None
    assert not open_files.is_gpu(fd)
    close_fds([os.dup(fd), os.dup(fd)])
    assert held.is_held, "it waits for who holds the pipe"


def is_stuck(thread: threading.Thread) -> bool:
    """Whether a thread waits in the kernel."""
    with open(f"/proc/self/task/{thread.native_id}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in "SD"


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
        lambda: driver.pool_import(fd, HandleKind.POSIX_FD, GPU),
    ]
    with promptly(files):
        for call in calls:
            with pytest.raises(ProtocolError, match="a file, a directory or a pipe"):
                call()


@pytest.mark.standin
def test_a_gpus_driver_is_never_asked_about_a_held_pipe(gpu: str, held: HeldPipe) -> None:
    driver: Any = drivers.get(GPU)
    with pytest.raises(ProtocolError, match="a file, a directory or a pipe"):
        driver.mem_import(held.fds["rw"], HandleKind.POSIX_FD, GRANULE)
    assert held.is_held, "it waits for who holds the pipe"


# -- a hostile keeper, or lender ------------------------------------------------------------------------------------


def hands_out(fd: int, entry: m.Entry, count: int) -> Callable[[Channel], None]:
    """A keeper that answers each attach with one descriptor, so many times, and everything else with Done."""

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(os.getpid())), timeout=SOON)
        while True:
            request = m.decode_request(channel.recv(timeout=SOON)[0])
            if isinstance(request, m.Attach):
                channel.send(m.encode(m.Attached(request.call, 1, count, entry)), [fd] * count, timeout=SOON)
            elif request.call:
                channel.send(m.encode(m.Done(request.call)), timeout=SOON)

    return answer


@needs_fuse
@pytest.mark.parametrize("what", ["segment", "manifest"])
@pytest.mark.parametrize("access", ["r", "cow"])
def test_a_client_that_is_given_one_says_so_in_time(files: Unanswered, what: str, access: str) -> None:
    fd = files.open()
    by_fd = what == "manifest"
    entry = m.Entry("w", 1, 0, False, [m.SegmentRow(GRANULE, 1, 0)], ["host"], b"" if by_fd else manifest(), by_fd, {})
    with impostor(hands_out(fd, entry, 1 + by_fd), times=3) as path:
        try:
            with promptly(files):  # each ends the connection, and the next is made anew
                for _ in range(3):
                    with pytest.raises(ProtocolError, match="no shared memory"):
                        vram.attach("w", keeper=path, access=access, timeout=DEADLINE / 4)
        finally:
            close_client(path)


@needs_fuse
@pytest.mark.standin
def test_a_client_that_is_given_one_as_memory_of_a_gpu_says_so_in_time(gpu: str, files: Unanswered) -> None:
    fd = files.open("nvidia0")
    entry = m.Entry("w", 1, 0, False, [m.SegmentRow(GRANULE, 1, 0)], [gpu], manifest(gpu), False, {})
    with impostor(hands_out(fd, entry, 1)) as path:
        try:
            with promptly(files), pytest.raises(ProtocolError, match="a file, a directory or a pipe"):
                vram.attach("w", keeper=path, timeout=DEADLINE / 4)
        finally:
            close_client(path)


@needs_fuse
def test_descriptors_where_none_belong_are_closed_in_time(files: Unanswered) -> None:
    fd = files.open()

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(b"no keeper", [fd] * 200, timeout=SOON)

    with impostor(answer) as path, promptly(files), pytest.raises(ProtocolError, match="no keeper"):
        KeeperClient.connect(path)


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


@pytest.mark.parametrize("device", ["host", "GPU-6f2b7c1e-0000-4000-8000-0123456789ab"])
def test_a_keeper_that_is_given_a_held_pipe_refuses_it_and_serves_all_others(held: HeldPipe, device: str) -> None:
    with short_directory() as place:
        keeper = KeeperProcess(f"{place}/k")
        try:
            with KeeperClient.connect(keeper.path) as good:
                with KeeperClient.connect(keeper.path) as hostile:
                    for fd in held.fds.values():
                        with pytest.raises(ProtocolError, match="segment 0"):
                            hostile.publish("bad", [Segment(4096, device=device)], [fd])
                with memfds(1) as fds:
                    good.publish("good", [Segment(4096)], fds)
                assert [entry.name for entry in good.list()] == ["good"]
            assert held.is_held, "it waits for who holds the pipe"
            held.die()  # what it closes is closed now
            assert keeper.stop() == 0
            assert keeper.said() == ""
        finally:
            held.die()
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


def test_a_race_of_an_import_with_who_truncates_and_seals() -> None:
    """With real system calls, for a bounded time."""
    driver = drivers.get(HOST)
    until_when = time.monotonic() + 2.0
    tries = 0
    while time.monotonic() < until_when:
        fd = os.memfd_create("hostile", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, GRANULE)
        gate = threading.Barrier(2)

        def shrink(fd: int = fd, gate: threading.Barrier = gate) -> None:
            gate.wait(SOON)
            os.ftruncate(fd, 0)
            fcntl.fcntl(fd, 1033, READ_ONLY)

        thread = threading.Thread(target=shrink)
        thread.start()
        gate.wait(SOON)
        for _ in range(20):
            try:
                driver.mem_release(driver.mem_import(fd, HandleKind.POSIX_FD, GRANULE))
            except ProtocolError:
                continue
            thread.join(SOON)
            assert os.fstat(fd).st_size == GRANULE, f"imported after it was truncated, try {tries}"
        thread.join(SOON)
        os.close(fd)
        tries += 1
    assert tries > 5
