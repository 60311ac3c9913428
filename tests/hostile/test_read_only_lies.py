"""S8: who says "read-only" and keeps a way to write is refused, by the kernel, the keeper, and every reader.

With real memfds, mappings and processes: a publisher maps its memory writable, seals what the kernel lets it,
publishes, and goes on writing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import open_to_all
from tests.support.memfds import FUTURE_WRITE, READ_ONLY, WRITABLE, WRITE, make_memfd
from tests.support.other_users import OTHER, as_user
from tests.support.places import short_directory
from tests.support.spoiled_descriptors import _Nobody as Nobody

import vram
from vram import driver as drivers
from vram.driver import memfds as memfds_module
from vram.driver import seals
from vram.entries.lease import Lease
from vram.errors import BusyError, ProtocolError
from vram.keeper import admission
from vram.keeper.client import Attachment, KeeperClient, Segment, close_client
from vram.open_files import close_fds
from vram.sharing.channel import Channel
from vram.sharing.descriptor import (
    MANIFEST_VERSION,
    ArrayEntry,
    Manifest,
    MemoryDescriptor,
    SegmentEntry,
    encode_manifest,
)
from vram.spec import HOST, Access, HandleKind

GRANULE = 2 << 20


ADD_SEALS, GET_SEALS = 1033, 1034


_libc = ctypes.CDLL(None, use_errno=True)


class Pages:
    """A page of an array, given to a pipe by vmsplice: pinned until it is read, as by a read with O_DIRECT."""

    def __init__(self, address: int) -> None:
        self.reader, self.writer = os.pipe()
        vector = (ctypes.c_size_t * 2)(address, 4096)
        if _libc.vmsplice(self.writer, vector, ctypes.c_ulong(1), ctypes.c_uint(0)) != 4096:
            raise OSError(ctypes.get_errno(), "vmsplice")

    def let_go(self) -> None:
        if self.reader >= 0:
            os.read(self.reader, 4096)
            os.close(self.reader)
            os.close(self.writer)
            self.reader = -1


@pytest.fixture(scope="module")
def running() -> Iterator[str]:
    """The socket of a keeper to which every user may connect."""
    with open_to_all() as path:
        yield path


@pytest.fixture
def kept(running: str) -> Iterator[vram.Keeper]:
    """That keeper, with nothing in it and no connection of this process at the end."""
    yield vram.Keeper(running)
    close_client(running)
    with KeeperClient.connect(running, label="cleaner") as cleaner:
        until(lambda: not cleaner.statistics().leases, what="the return of every lease")
        for entry in cleaner.list():
            cleaner.remove(entry.name)


@contextlib.contextmanager
def hostile(sealed: int = WRITABLE | FUTURE_WRITE) -> Iterator[tuple[int, mmap.mmap]]:
    """A memfd that is sealed as far as the kernel grants it, and a mapping from before that can write to it."""
    fd = make_memfd(GRANULE, seals=WRITABLE, content=b"true")
    kept = mmap.mmap(fd, GRANULE)
    try:
        fcntl.fcntl(fd, ADD_SEALS, sealed)
        yield fd, kept
    finally:
        kept.close()
        os.close(fd)


def seals_of(fd: int) -> int:
    return fcntl.fcntl(fd, GET_SEALS)


# -- the kernel -----------------------------------------------------------------------------------------------------
def test_the_facts_that_this_stands_on() -> None:
    """F_SEAL_FUTURE_WRITE leaves a writer behind; F_SEAL_WRITE is refused as long as there is one."""
    with hostile() as (fd, kept):
        kept[:4] = b"lies"
        assert os.pread(fd, 4, 0) == b"lies"
        with pytest.raises(OSError, match="busy"):
            fcntl.fcntl(fd, ADD_SEALS, WRITE)
        kept.close()
        fcntl.fcntl(fd, ADD_SEALS, WRITE)


# -- the keeper -----------------------------------------------------------------------------------------------------
def publish_hostile(path: str, extra: int = 0) -> str:
    """Publish as a hostile publisher does; return how it was refused."""
    with hostile() as (fd, kept), KeeperClient.connect(path) as client:
        try:
            if extra:
                with contextlib.closing(_Fd(make_memfd(GRANULE, seals=READ_ONLY))) as good:
                    client.publish("lies", [Segment(GRANULE)], [good.fd], manifest_fd=fd)
            else:
                client.publish("lies", [Segment(GRANULE)], [fd])
        except ProtocolError as error:
            return str(error)
        kept[:4] = b"lies"
        return "taken"


class _Fd:
    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


@pytest.mark.parametrize("uid", [None, OTHER], ids=["this user", "another user"])
def test_s8_a_keeper_refuses_memory_that_its_publisher_can_go_on_writing(kept: vram.Keeper, uid: int | None) -> None:
    if uid is not None and os.geteuid():
        pytest.skip("becoming another user needs root")
    said = as_user(os.geteuid() if uid is None else uid, lambda: publish_hostile(kept.path))
    assert "segment 0 of a read-only version is sealed with F_SEAL_FUTURE_WRITE only" in said
    assert "publish it by vram.publish, or with writable=True" in said
    assert "the manifest of a read-only version" in publish_hostile(kept.path, extra=1)
    assert vram.list_entries("lies", keeper=kept.path) == []


# -- readers --------------------------------------------------------------------------------------------------------
@pytest.fixture
def client() -> Iterator[Nobody]:
    one, other = Channel.pair()
    with one, other, Nobody(one) as client:
        yield client


def lease(client: Nobody, fd: int, access: str, *, writable: bool = False) -> Lease:
    """Attach memory as a keeper hands it over that asks for less than we do. A lender's leases are the same."""
    memory = MemoryDescriptor("host", (SegmentEntry(GRANULE, 1),), 0, 4096, GRANULE)
    arrays = {"x": ArrayEntry(0, 0, 4, "uint8", (4,))}
    data = encode_manifest(Manifest(MANIFEST_VERSION, (memory,), arrays))
    attachment = Attachment(1, "n", 1, 0, (Segment(GRANULE),), [os.dup(fd)], data, None, {}, writable)
    return Lease(client, attachment, access)


@pytest.mark.parametrize("access", ["r", "cow"])
@pytest.mark.parametrize("sealed", [WRITABLE | FUTURE_WRITE, WRITABLE], ids=["future", "not at all"])
def test_s8_a_reader_refuses_what_is_said_to_be_read_only_and_can_be_written(
    client: Nobody, access: str, sealed: int
) -> None:
    with hostile(sealed) as (fd, kept):
        with pytest.raises(ProtocolError, match="said to be read-only can still be written by others"):
            lease(client, fd, access)
        assert client.returned == [1], "the lease is given back"
        kept[:4] = b"more"  # and nothing was done to it: its owner may publish it writable
        with lease(client, fd, "r", writable=True) as found:
            assert bytes(found["x"].numpy()) == b"more"


def test_s8_a_reader_seals_nothing_itself(client: Nobody) -> None:
    """Nobody has a mapping from before, so the kernel would grant it; but whom it waits for is not known beforehand."""
    with hostile() as (fd, kept):
        kept.close()
        with pytest.raises(ProtocolError, match="published or lent by vram itself"):
            lease(client, fd, "r")
        assert not seals_of(fd) & WRITE


def test_s7_what_is_said_to_be_read_only_memory_and_is_none(client: Nobody) -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(ProtocolError):
            lease(client, reader, "r")
    finally:
        os.close(reader)
        os.close(writer)


# -- a publisher that does not know of the other mapping ------------------------------------------------------------
_WRITER = """
import mmap, sys
kept = mmap.mmap(int(sys.argv[1]), 0)
kept[:8] = b"x" * 8
print("mapped", flush=True)
sys.stdin.readline()  # until it is told to end, which is the end of its input
"""


def descriptor_of(array: vram.Array) -> int:
    (allocation, *_), _ = array.region.segments(array.offset, array.offset + array.nbytes)
    return allocation.export()


@contextlib.contextmanager
def writer_of(array: vram.Array) -> Iterator[None]:
    """Another process that has an array's memory mapped writable, and has written to it."""
    fd = descriptor_of(array)
    child: Any = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(fd)], pass_fds=[fd], text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, cwd=Path(__file__).parent,
    )  # fmt: skip
    with child:
        assert child.stdout.readline() == "mapped\n"
        try:
            yield
        finally:
            child.stdin.close()


def test_s8_memory_that_another_process_can_write_is_not_published_read_only(kept: vram.Keeper) -> None:
    """Nothing has changed then, and what the error says helps."""
    with vram.zeros(1000, "int64", device="host") as a:
        views = a.numpy(), a.numpy()[10:20]
        with writer_of(a):
            with pytest.raises(BusyError, match=r"another process that has it mapped.*vram\.copy.*writable=True"):
                vram.publish("shared", {"a": a}, keeper=kept.path)
            assert vram.list_entries("shared", keeper=kept.path) == []
            assert not seals_of(descriptor_of(a)) & (WRITE | FUTURE_WRITE)
            views[0][:] = np.arange(1000)
            views[1][:] = 7
            a.fill(3)
            with vram.copy(a) as copy:
                assert vram.publish("shared", {"a": copy}, keeper=kept.path).zero_copy
            assert vram.publish("open", {"a": a}, writable=True, keeper=kept.path).zero_copy
        assert vram.publish("shared", {"a": a}, keeper=kept.path).zero_copy, "the other process is gone"
        assert seals_of(descriptor_of(a)) & WRITE


def test_s8_lending_read_only_is_refused_as_well(tmp_path: Path) -> None:
    with vram.zeros(1000, "int64", device="host") as a:
        with writer_of(a), pytest.raises(BusyError, match="another process"):
            vram.lend(a, at=tmp_path / "s")
        a.fill(3)
        with vram.lend(a, at=tmp_path / "s"), vram.borrow(tmp_path / "s") as lease:
            assert lease.array.region.is_frozen
            assert (lease.array.numpy() == 3).all()
        close_client(str(tmp_path / "s"))


def test_s8_nothing_is_refused_for_mappings_that_cannot_write(kept: vram.Keeper) -> None:
    """Of this very process, by another import, privately, and by a descriptor that is open for reading."""
    with vram.zeros(1000, "int64", device="host") as a:
        fd = descriptor_of(a)
        reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        mapped = [mmap.mmap(fd, 4096, flags=mmap.MAP_PRIVATE), mmap.mmap(reader, 4096, prot=mmap.PROT_READ)]
        mapped[0][:8] = b"privates"
        vram.publish("open", {"a": a}, writable=True, keeper=kept.path)
        with vram.attach("open", access="rw", keeper=kept.path) as own:  # known to the driver: made read-only with it
            own["a"].fill(9)
            assert vram.publish("shut", {"a": a}, keeper=kept.path).zero_copy
            region = own["a"].region
            assert region.driver.mem_get_access(region.address, region.location) is vram.memory.Access.READ
            assert (own["a"].numpy() == 9).all()
        for one in mapped:
            one.close()
        os.close(reader)


# -- a page that is in use ------------------------------------------------------------------------------------------
def test_s8_a_page_that_is_in_use_for_a_moment_is_waited_for(
    kept: vram.Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with vram.zeros(1000, "int64", device="host") as a:
        a.fill(5)
        pages = Pages(a.address)
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            pages.let_go()

        monkeypatch.setattr(seals.time, "sleep", pause)
        assert vram.publish("pinned", {"a": a}, keeper=kept.path).zero_copy
        assert pauses, "the kernel had refused once"
        assert seals_of(descriptor_of(a)) & WRITE


def test_s8_a_page_that_stays_in_use_is_an_error_that_says_so(kept: vram.Keeper) -> None:
    with vram.zeros(1000, "int64", device="host") as a:
        a.fill(5)
        pages = Pages(a.address)
        with pytest.raises(BusyError, match="pinned for a device"):
            vram.publish("pinned", {"a": a}, keeper=kept.path)
        a.fill(6)
        pages.let_go()
        assert vram.publish("pinned", {"a": a}, keeper=kept.path).zero_copy


def test_s8_memory_can_be_mapped_while_the_kernel_decides_on_a_seal() -> None:
    """It refuses every shared mapping for as long as it waits for a pinned page, and here in vain."""
    driver = drivers.get(HOST)
    fd = make_memfd(GRANULE, seals=WRITABLE, content=b"page")
    with mmap.mmap(fd, GRANULE) as shared:
        view = ctypes.c_char.from_buffer(shared)
        pages = Pages(ctypes.addressof(view))
        del view
    answers: list[int | None] = []

    def ask() -> None:
        try:
            fcntl.fcntl(fd, ADD_SEALS, WRITE)
        except OSError as error:
            answers.append(error.errno)

    address, handle = driver.address_reserve(GRANULE), driver.mem_import(fd, HandleKind.POSIX_FD, GRANULE)
    try:
        for _ in range(3):
            asking = threading.Thread(target=ask)
            asking.start()
            while asking.is_alive():
                driver.mem_map(address, GRANULE, 0, handle)
                driver.mem_set_access(address, GRANULE, Access.READ, (HOST,))
                driver.mem_unmap(address, GRANULE)
            asking.join()
    finally:
        pages.let_go()
        driver.mem_release(handle)
        driver.address_free(address, GRANULE)
        os.close(fd)
    assert answers, "the kernel was never asked while it had to wait"
    assert set(answers) == {errno.EBUSY}


# -- files of all kinds, and memory that changes while it is looked at ----------------------------------------------


def test_whatever_is_well_served_is_closed_when_close_fds_returns() -> None:
    with short_directory() as place:
        for _ in range(50):
            fds = [os.open(f"{place}/f", os.O_RDWR | os.O_CREAT), *os.pipe(), os.open("/", os.O_PATH), 10**6]
            close_fds(fds)
            until(lambda fds=fds: not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in fds), seconds=SOON)


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
