"""The host driver where it goes beyond the contract: limits of the system, hostile descriptors, the kernel's word."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON
from tests.support.limits import limited

from vram import driver as drivers
from vram.driver import libc, memfds, seals
from vram.driver.available import AvailableMemory
from vram.driver.books import Mapping
from vram.driver.host import HostDriver
from vram.driver.protocol import LiveObjects
from vram.errors import (
    AccessDeniedError,
    BusyError,
    DriverError,
    OutOfMemoryError,
    ProtocolError,
    RangeError,
    UnsupportedError,
    UsageError,
)
from vram.spec import HOST, Access, HandleKind, Location
from vram.testing.driver import Scene

FD = HandleKind.POSIX_FD
G = 2 << 20


@pytest.fixture
def scene() -> Iterator[Scene]:
    with Scene(HostDriver(), HOST) as scene:
        yield scene


@pytest.fixture
def fds() -> Iterator[list[int]]:
    """Descriptors that a test opens and that are closed in the end."""
    opened: list[int] = []
    yield opened
    for fd in opened:
        os.close(fd)


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    """Run a script in an interpreter of its own, which is ended with its stacks if it hangs."""
    prelude = """
    import faulthandler, os, time
    faulthandler.dump_traceback_later(250, exit=True)
    def alone():  # its thread has said that it ends a moment before the kernel counts it no more
        faulthandler.cancel_dump_traceback_later()
        while len(os.listdir("/proc/self/task")) > 1:
            time.sleep(0.001)
    os.register_at_fork(before=alone)
    from vram.driver.host import HostDriver
    from vram.driver import libc
    from vram.errors import *
    from vram.spec import HOST, Access, HandleKind
    G, FD = 2 << 20, HandleKind.POSIX_FD
    d = HostDriver()
    """
    command = [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_get_returns_one_driver_and_never_another_kind():
    assert drivers.get(HOST) is drivers.get(Location("host"))
    assert isinstance(drivers.get(HOST), HostDriver)
    with pytest.raises(UnsupportedError, match="elsewhere"):
        drivers.get(Location("elsewhere", 0))
    with pytest.raises(UsageError, match=r"must be a Location, such as Location.parse\('cuda:0'\), not 'cuda:0'"):
        drivers.get("cuda:0")


def test_i9_every_descriptor_is_close_on_exec_and_named(scene):
    handle = scene.create()
    exported = scene.driver.mem_export(handle, FD)
    scene.keep(scene.driver.mem_import(exported, FD, G))
    ours = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if target.startswith("/memfd:vram ("):
            ours.append(int(number))
            assert not os.get_inheritable(int(number))
            assert int(number) > 2
    os.close(exported)
    assert len(ours) == 3


def test_memory_is_sealed_against_truncation_at_birth(scene, fds):
    fds.append(fd := scene.driver.mem_export(scene.create(), FD))
    for size in (0, G // 2, 2 * G):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        os.write(fd, bytes(G + 1)), os.write(fd, b"beyond the end")


# -- read-only is the kernel's word (S8) ----------------------------------------------------------------------------
def test_s8_sealing_leaves_no_gap_for_a_reader(scene):
    """A view taken before reads on, at the same address, while the mapping under it is replaced."""
    address, handle = scene.memory()
    scene.write(address, b"still there")
    view = scene.driver.buffer(address, 11, readonly=True)
    scene.driver.mem_seal(handle)
    assert bytes(view) == b"still there"
    view.release()


def test_a_read_only_descriptor_is_read_only_memory(scene, fds):
    address, handle = scene.memory()
    scene.write(address, b"look")
    fds.append(fd := scene.driver.mem_export(handle, FD))
    fds.append(reader := os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC))
    imported = scene.keep(scene.driver.mem_import(reader, FD, G))
    mapped = scene.map(scene.reserve(1), imported, Access.READ)
    assert scene.read(mapped, 4) == b"look"
    scene.refuses(AccessDeniedError, scene.driver.mem_set_access, mapped, G, Access.READ_WRITE, (HOST,))
    scene.refuses(AccessDeniedError, scene.driver.mem_seal, imported)
    private = scene.map(scene.reserve(1), imported, private=True)
    scene.write(private, b"mine")
    assert scene.read(mapped, 4) == b"look"
    scene.driver.populate(mapped, G)
    scene.driver.populate(private, G)


def test_memory_whose_seals_are_closed_cannot_be_frozen(scene, fds):
    fds.append(fd := scene.driver.mem_export(handle := scene.create(), FD))
    fcntl.fcntl(fd, libc.F_ADD_SEALS, 1)  # F_SEAL_SEAL, by a peer
    scene.refuses(AccessDeniedError, scene.driver.mem_seal, handle)
    assert not scene.driver.mem_is_sealed(handle)


def test_s8_a_seal_that_the_kernel_refuses_changes_nothing(scene, fds):
    """Not the rights of any mapping here either: writable, readable and hidden ones are what they were."""
    address, handle = scene.memory()
    mapped = {Access.READ_WRITE: address}
    for access in (Access.NONE, Access.READ):
        mapped[access] = scene.map(scene.reserve(1), handle, access)
    fds.append(fd := scene.driver.mem_export(handle, FD))
    with mmap.mmap(fd, G) as others:  # of which the driver knows nothing
        scene.refuses(BusyError, scene.driver.mem_seal, handle)
        assert not scene.driver.mem_is_sealed(handle)
        for access, at in mapped.items():
            assert scene.driver.mem_get_access(at, HOST) is access
            assert protection_at(at) == {"NONE": "---s", "READ": "r--s", "READ_WRITE": "rw-s"}[access.name] + " memfd"
        others[:5] = b"after"
        assert scene.read(address, 5) == b"after"
        scene.write(address, b"again")
        scene.driver.mem_set_access(mapped[Access.READ], G, Access.READ_WRITE, (HOST,))
        scene.write(mapped[Access.READ], b"whole")
    scene.driver.mem_seal(handle)
    assert scene.driver.mem_is_sealed(handle)
    for at in mapped.values():
        scene.refuses(AccessDeniedError, scene.driver.mem_set_access, at, G, Access.READ_WRITE, (HOST,))
    assert scene.read(address, 5) == b"whole"


def test_s8_a_writer_that_goes_while_the_seal_is_asked_for_is_waited_for(scene, fds, monkeypatch):
    address, handle = scene.memory()
    fds.append(fd := scene.driver.mem_export(handle, FD))
    others, real = mmap.mmap(fd, G), time.sleep
    monkeypatch.setattr(seals.time, "sleep", lambda seconds: (others.close(), real(0)))
    scene.driver.mem_seal(handle)
    assert others.closed
    assert protection_at(address) == "r--s memfd"


def test_s8_sealed_memory_is_mapped_where_the_kernel_wants_a_descriptor_for_reading(scene, monkeypatch):
    """As Linux does before 6.7: a shared mapping counts as writable if its descriptor is, whatever is asked for."""
    address, handle = scene.memory()
    scene.write(address, b"sealed")
    scene.driver.mem_seal(handle)
    real = libc.mmap

    def older(at: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
        if flags & libc.MAP_SHARED and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            ctypes.set_errno(errno.EPERM)
            return -1
        return int(real(at, nbytes, protection, flags, fd, offset))

    monkeypatch.setattr(libc, "mmap", older)
    later = scene.map(scene.reserve(1), handle, Access.READ)
    assert scene.read(later, 6) == b"sealed"
    scene.refuses(AccessDeniedError, scene.driver.mem_set_access, later, G, Access.READ_WRITE, (HOST,))
    monkeypatch.undo()


# -- descriptors of strangers (S7) ----------------------------------------------------------------------------------
def memfd(fds: list[int], nbytes: int = G, seals: int = libc.F_SEAL_SHRINK | libc.F_SEAL_GROW, flags: int = 0) -> int:
    fds.append(fd := os.memfd_create("stranger", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags))
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, libc.F_ADD_SEALS, seals)
    return fd


def test_s7_half_sealed_or_odd_memory_is_refused(scene, fds):
    bad = {
        "only against shrinking": memfd(fds, seals=libc.F_SEAL_SHRINK),
        "only against growing": memfd(fds, seals=libc.F_SEAL_GROW),
        "off the granularity": memfd(fds, G + 4096),
        "empty": memfd(fds, 0),
    }
    fds.append(bad.setdefault("a path only", os.open(f"/proc/self/fd/{memfd(fds)}", os.O_PATH | os.O_CLOEXEC)))
    fds.append(bad.setdefault("a directory", os.open("/", os.O_RDONLY | os.O_CLOEXEC)))
    for fd in bad.values():
        scene.refuses(ProtocolError, scene.driver.mem_import, fd, FD, G)
    for fine in (memfd(fds), memfd(fds, 4 * G)):  # larger than stated: the first bytes are what was asked for
        imported = scene.keep(scene.driver.mem_import(fine, FD, G))
        assert scene.read(scene.map(scene.reserve(1), imported), 4) == bytes(4)


def test_s7_huge_pages_are_refused(scene, fds):
    """A fault that finds their pool empty kills the reader."""
    try:
        fd = memfd(fds, flags=os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"no MFD_HUGETLB here: {error.strerror}")
    for _ in range(2):
        scene.refuses(ProtocolError, scene.driver.mem_import, fd, FD, G)
        scene.keep(scene.driver.mem_import(memfd(fds), FD, G))  # after which only the device tells the two apart


def test_s7_memory_that_cannot_be_read_is_refused_when_mapped(scene, fds):
    fds.append(fd := os.open(f"/proc/self/fd/{memfd(fds)}", os.O_WRONLY | os.O_CLOEXEC))
    imported, address = scene.keep(scene.driver.mem_import(fd, FD, G)), scene.reserve(1)
    scene.refuses(ProtocolError, scene.driver.mem_map, address, G, 0, imported)
    scene.map(address, scene.create())  # the place is as good as before


# -- limits ---------------------------------------------------------------------------------------------------------
def test_too_many_files_names_the_limit(scene):
    handle = scene.create()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(number) for number in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    fillers = []
    try:
        while True:
            try:
                fillers.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                break
        for call in (
            lambda: scene.driver.mem_create(G, HOST, FD),
            lambda: scene.driver.mem_export(handle, FD),
            lambda: scene.driver.mem_import(fillers[0], FD, G),
        ):
            scene.refuses(Exception, call)
        with pytest.raises(DriverError, match="RLIMIT_NOFILE") as caught:
            scene.driver.mem_export(handle, FD)
        assert (caught.value.code, caught.value.name) == (errno.EMFILE, "EMFILE")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in fillers:
            os.close(fd)
    os.close(scene.driver.mem_export(handle, FD))


def test_i4_memory_that_cannot_be_sized_leaves_no_descriptor(scene):
    """The kernel takes no file beyond the limit, a memfd neither."""
    before = sorted(os.listdir("/proc/self/fd"))
    with limited(resource.RLIMIT_FSIZE, G // 2):
        scene.refuses(DriverError, scene.create)
        with pytest.raises(DriverError, match=rf"{G // 2} bytes \(RLIMIT_FSIZE\); raise it with ulimit -f"):
            scene.create()
    assert sorted(os.listdir("/proc/self/fd")) == before, "the memfd is still open"
    scene.create()


def test_i4_at_the_limit_of_mappings_all_can_still_be_taken_back():
    """The kernel then refuses even to replace a mapping by another, which is what an unmap is."""
    script = """
    limit = int(open("/proc/sys/vm/max_map_count").read())
    if limit > 200_000:
        print("skip", limit)
        raise SystemExit
    spare = [bytearray(400) for _ in range(50_000)]
    del spare[::2]  # for the interpreter itself, which will get no mapping either
    def fill(count):
        while count and libc.mmap(0, 4096, 1, 0x21, -1, 0) != -1:
            count -= 1
    fill(limit - 2000)
    a, h = d.address_reserve(4000 * G), d.mem_create(G, HOST, FD)
    places = []
    try:
        for n in range(2000):
            d.mem_map(a + 2 * n * G, G, 0, h)
            places.append(a + 2 * n * G)
    except AddressSpaceError as error:
        assert "vm.max_map_count" in str(error) and "mappings" in str(error), error
    else:
        raise AssertionError("no limit was met")
    fill(limit)  # to the very last one
    for n, place in enumerate(places):
        d.mem_unmap(place, G)
        if n == 10:
            fill(limit)
    d.mem_release(h)
    d.address_free(a, 4000 * G)
    print(d.live())
    """
    done = run_script(script)
    if done.stdout.startswith("skip"):
        pytest.skip(f"vm.max_map_count is {done.stdout.split()[1]} here: too many to fill up")
    nothing = "LiveObjects(reservations=0, handles=0, mappings=0, nbytes=0)\n"
    assert (done.stdout, done.stderr) == (nothing, "")


def test_too_little_address_space_names_the_limit():
    script = """
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
    try:
        d.address_reserve(4 << 30)
    except AddressSpaceError as error:
        print(isinstance(error, MemoryError), error)
    """
    done = run_script(script)
    assert done.stdout.startswith("True ")
    assert "RLIMIT_AS" in done.stdout
    assert "ENOMEM" in done.stdout


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (errno.ENFILE, DriverError, "fs.file-max"),
        (errno.ENOSPC, OutOfMemoryError, "free some"),
        (errno.ENOMEM, OutOfMemoryError, "free some"),
        (errno.EIO, DriverError, "Input/output error"),
        (99999, DriverError, "unknown"),
    ],
)
def test_i10_an_errno_becomes_a_typed_error_with_a_remedy(code, kind, words):
    error = libc.failure("memfd_create for 5 bytes", code)
    assert type(error) is kind
    assert (error.call, error.code) == ("memfd_create for 5 bytes", code)
    assert words in str(error)


def test_flags_that_a_kernel_does_not_know_are_left_out():
    driver = HostDriver()
    memfds._flags |= 1 << 12  # unknown to all kernels so far
    with pytest.raises(DriverError, match="EINVAL"):
        driver.mem_create(G, HOST, FD)
    assert not memfds._flags & libc.MFD_NOEXEC_SEAL  # it tried without
    memfds._flags &= ~(1 << 12)
    driver.mem_release(driver.mem_create(G, HOST, FD))


def test_populate_where_the_kernel_lacks_the_advice(scene, monkeypatch):
    """The touching itself, which kernels before 5.14 get: memory is taken, contents stay."""
    monkeypatch.setattr(libc, "MADV_POPULATE_WRITE", 0x7FFF)
    monkeypatch.setattr(libc, "MADV_POPULATE_READ", 0x7FFF)
    address, handle = scene.memory(2)
    scene.write(address + G - 2, b"kept")
    scene.driver.populate(address, 2 * G)
    fd = scene.driver.mem_export(handle, FD)
    assert os.fstat(fd).st_blocks * 512 == 2 * G
    os.close(fd)
    private = scene.map(scene.reserve(2), handle, private=True)
    scene.driver.populate(private, 2 * G)
    scene.driver.mem_set_access(address, 2 * G, Access.READ, (HOST,))
    scene.driver.populate(address, 2 * G)
    assert scene.read(address + G - 2, 4) == b"kept"


def test_populate_takes_the_memory(scene):
    address, handle = scene.memory(2)
    fd = scene.driver.mem_export(handle, FD)
    assert os.fstat(fd).st_blocks == 0
    scene.driver.populate(address + G, 1)
    assert os.fstat(fd).st_blocks * 512 == 4096
    scene.driver.populate(address, 2 * G)
    assert os.fstat(fd).st_blocks * 512 == 2 * G
    os.close(fd)


def small_and_large(address: int) -> tuple[int, int]:
    """Return how many KiB of the mapping that begins at an address are in memory, and how many in pages of 2 MiB."""
    rows = Path("/proc/self/smaps").read_text().split(f"\n{address:x}-")[1].splitlines()
    found = {row.split(":")[0]: row.split(":")[1].split()[0] for row in rows[1:25] if ":" in row}
    return int(found["Rss"]), int(found["ShmemPmdMapped"])


@pytest.mark.parametrize("lacks", [False, True])
def test_large_pages_keep_what_is_there_and_are_a_hint(scene, monkeypatch, lacks):
    """Holes and what was written, in whole units of 2 MiB; of a kernel that has none nothing is asked for again."""
    if lacks:
        monkeypatch.setattr(libc, "MADV_COLLAPSE", 0x7FFF)
    address, _ = scene.memory(4)
    scene.write(address + G - 2, b"kept")
    scene.driver.collapse(address, 4 * G - 1, 60.0)
    rss, large = small_and_large(address)
    if lacks:
        assert (rss, large) == (12, 0)  # what was written, and the first page of the first unit only
    elif large:  # whether there was memory in one piece is not ours to say
        assert large in (2 << 10, 4 << 10, 6 << 10)
    assert scene.read(address + G - 2, 4) == b"kept"
    assert scene.read(address + 4 * G - 4, 4) == bytes(4)


# -- what is available ----------------------------------------------------------------------------------------------
class Groups:
    """Control groups made of ordinary files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.membership = root.parent / "membership"

    def write(self, folder: str, **files: object) -> None:
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (self.root / folder / name.replace("__", ".")).write_text(f"{content}\n")

    def available(self, membership: str) -> AvailableMemory:
        self.membership.write_text(membership)
        return AvailableMemory(str(self.root), str(self.membership))


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    return Groups(tmp_path / "cgroup")


MIB = 1 << 20


def test_version_2_groups_limit_up_to_the_root(groups):
    groups.write("a", memory__max=100 * MIB, memory__current=90 * MIB, memory__stat=f"anon 5\ninactive_file {20 * MIB}")
    groups.write("a/b", memory__max=200 * MIB, memory__current=MIB, memory__stat="inactive_file 0")
    groups.write("a/b/c", memory__max="max", memory__current=MIB)
    memory = groups.available("0::/a/b/c\n")
    assert memory.info() == (30 * MIB, 100 * MIB)
    memory.check("mem_create(5)", 30 * MIB)
    with pytest.raises(
        OutOfMemoryError, match=r"31 MiB asked for, 30 MiB available \(limit of the control group .*/a\)"
    ):
        memory.check("mem_create(5)", 31 * MIB)
    with pytest.raises(OutOfMemoryError, match="best effort"):
        memory.check("mem_create(5)", 1 << 50)


def test_version_1_groups(groups):
    groups.write("memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=5 * MIB)
    groups.write("memory/x", memory__limit_in_bytes=64 * MIB, memory__usage_in_bytes=60 * MIB, memory__stat="cache 1")
    memory = groups.available("9:name=systemd:/\n4:cpu,memory:/x\n0::/\n")
    assert memory.info() == (4 * MIB, 64 * MIB)


def test_a_container_sees_only_the_root_of_its_groups(groups):
    groups.write("", memory__max=50 * MIB, memory__current=0)
    for membership in ("0::/docker/of/the/host\n", "0::/../..\n"):
        assert groups.available(membership).info()[1] == 50 * MIB


def test_no_groups_at_all(groups, tmp_path):
    available, total = AvailableMemory(str(tmp_path / "no"), str(tmp_path / "no")).info()
    assert 0 < available <= total
    groups.write("a", memory__max="nonsense", memory__current="")
    assert groups.available("0::/a\n").info()[1] == total


def test_an_overdrawn_group_has_nothing_left(groups):
    groups.write("a", memory__max=10 * MIB, memory__current=11 * MIB)
    memory = groups.available("0::/a\n")
    assert memory.info() == (0, 10 * MIB)
    with pytest.raises(OutOfMemoryError):
        memory.check("mem_create(5)", 2 * MIB)


# -- what the kernel refuses ----------------------------------------------------------------------------------------
def test_i4_a_right_that_is_refused_for_the_second_half_leaves_the_first(scene):
    """The kernel goes through a span in order, and has changed what comes before the part that it refuses."""
    address = scene.reserve(3)
    for at, access in ((0, Access.READ), (1, Access.READ)):
        scene.map(address + at * G, scene.create(), access)
    sealed = scene.create()
    scene.driver.mem_seal(sealed)
    scene.map(address + 2 * G, sealed, Access.READ)
    before = [protection_at(address + at * G) for at in range(3)]
    assert before == ["r--s memfd"] * 3
    scene.refuses(AccessDeniedError, scene.driver.mem_set_access, address, 3 * G, Access.READ_WRITE, (HOST,))
    assert [protection_at(address + at * G) for at in range(3)] == before, "the kernel changed the first half"
    assert [scene.driver.mem_get_access(address + at * G, HOST) for at in range(3)] == [Access.READ] * 3


def test_bytes_do_not_go_on_into_the_next_reservation(scene):
    """Mapped or not, and side by side or not: that somebody else's begins where ours ends is chance."""
    for _ in range(20):
        address = scene.reserve(2)
        scene.free(address)
        pair = [scene.driver.address_reserve(G, address=start) for start in (address, address + G)]
        for start in pair:
            scene._reserved[start] = 1
        if pair == [address, address + G]:
            break
    else:
        pytest.fail("no two reservations came to lie side by side")
    for start in pair:
        scene.map(start, scene.create())
    other = scene.memory()[0]
    driver = scene.driver
    for call in (
        lambda: driver.copy(other, address + G - 2, 4),
        lambda: driver.copy(address + G - 2, other, 4),
        lambda: driver.fill(address + G - 2, 1, 4),
        lambda: driver.buffer(address + G - 2, 4, readonly=True),
        lambda: driver.populate(address, 2 * G),
        lambda: driver.mem_set_access(address, 2 * G, Access.READ, (HOST,)),
        lambda: driver.mem_unmap(address, 2 * G),
    ):
        scene.refuses(RangeError, call)
    assert scene.read(address + G - 2, 2) == scene.read(address + G, 2) == b"\0\0"


def taken() -> int:
    """Return the bytes of addresses of this process that are reserved and no more."""
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if " ---p " in line
    ]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


def test_i4_addresses_of_a_large_alignment_leave_nothing_beside_them(scene):
    """More is taken than asked for, and what is in front and behind is given back."""
    scene.unmap(scene.memory()[0])  # from now on the driver keeps a page of its own
    before, alignment = taken(), 1 << 30
    for _ in range(2):  # the second lies next to the first, so that it is not aligned by luck
        address = scene.driver.address_reserve(G, alignment=alignment)
        scene._reserved[address] = 1
        assert address % alignment == 0
    assert taken() - before == 2 * G, "more addresses were taken than are in the books"
    for address in [address for address in scene._reserved if address % alignment == 0]:
        scene.free(address)
    assert taken() == before


# -- sealing beside other work on the same memory -------------------------------------------------------------------
class During:
    """The real mmap, with something done right before its `nth` call that maps shared memory over an address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: Callable[[], object]) -> None:
        self.real, self.step, self.seen = libc.mmap, step, 0
        monkeypatch.setattr(libc, "mmap", self)

    def __call__(self, address: int, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
        if flags == libc.MAP_SHARED | libc.MAP_FIXED:
            self.seen += 1
            if self.seen == 1:
                self.step()
        return int(self.real(address, nbytes, protection, flags, fd, offset))


def mapped_memory(driver: HostDriver) -> tuple[int, int]:
    """Return (address, handle) of memory that left the process, with a byte in it."""
    address, handle = driver.address_reserve(G), driver.mem_create(G, HOST, FD)
    driver.mem_map(address, G, 0, handle)
    driver.mem_set_access(address, G, Access.READ_WRITE, (HOST,))
    driver.fill(address, 7, G)
    os.close(driver.mem_export(handle, FD))
    return address, handle


def protection_at(address: int) -> str | None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= address < end:
            return f"{line.split()[1]} {'memfd' if 'memfd' in line else ''}".strip()
    return None


@pytest.mark.parametrize("in_thread", [True, False], ids=["thread", "finalizer"])
@pytest.mark.parametrize("interrupted", [False, True])
def test_i3_an_unmap_in_the_middle_of_a_seal_is_carried_out_behind_it(monkeypatch, in_thread, interrupted):
    """It neither waits nor fails, and the address is not given away before the sealer is done with it."""
    driver = HostDriver()
    address, handle = mapped_memory(driver)
    failures: list[BaseException] = []

    def undo() -> None:
        try:
            driver.mem_unmap(address, G)
            with pytest.raises(UsageError):
                driver.mem_unmap(address, G)
            driver.address_free(address, G)
            with pytest.raises(UsageError):
                driver.address_free(address, G)
            assert protection_at(address) is not None  # still taken: a stranger cannot get it
        except BaseException as error:
            failures.append(error)

    def step() -> None:
        if in_thread:
            thread = threading.Thread(target=undo, daemon=True)
            thread.start()
            thread.join(120)
            assert not thread.is_alive()
        else:
            undo()
        if interrupted:
            raise KeyboardInterrupt

    During(monkeypatch, step)
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            driver.mem_seal(handle)
    else:
        driver.mem_seal(handle)
    assert not failures
    driver.mem_release(handle)
    assert driver.live() == LiveObjects(0, 0, 0, 0)
    assert protection_at(address) is None


@pytest.mark.parametrize("refused", [False, True])
def test_what_is_being_mapped_while_it_is_sealed_can_be_read(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    driver = HostDriver()
    address, handle = mapped_memory(driver)
    fd, other = driver.mem_export(handle, FD), driver.address_reserve(G)
    if refused:
        monkeypatch.setattr(seals, "PATIENCE", 0.05)
        elsewhere = mmap.mmap(fd, G)
    waits, errors = threading.Event(), []
    real = Mapping.take_turn

    def take_turn(mapping: Mapping) -> bool:
        waits.set()
        return real(mapping)

    def seal() -> None:
        try:
            driver.mem_seal(handle)
        except BusyError as error:
            errors.append(error)

    def begin_to_seal() -> None:
        thread.start()
        assert waits.wait(SOON)

    monkeypatch.setattr(Mapping, "take_turn", take_turn)
    thread = threading.Thread(target=seal)
    During(monkeypatch, begin_to_seal)
    driver.mem_map_import(other, G, fd, FD, Access.READ, private=False)
    thread.join(SOON)
    assert len(errors) == refused
    assert driver.mem_get_access(other, HOST) is Access.READ
    assert protection_at(other) == "r--s memfd"
    assert protection_at(address) == ("rw-s memfd" if refused else "r--s memfd")
    if refused:
        elsewhere.close()
    os.close(fd)
    for each in (address, other):
        driver.mem_unmap(each, G)
        driver.address_free(each, G)
    driver.mem_release(handle)


def test_an_alignment_that_no_address_has_unmaps_nothing_of_others():
    """2**64 cut to the 64 bits of a size is 0, and what is then unmapped as surplus is memory of others (I11).

    In a process of its own, which would end by a signal.
    """
    code = (
        "from vram import driver as drivers; from vram.errors import AddressSpaceError; from vram.spec import HOST\n"
        "driver = drivers.get(HOST)\n"
        "for alignment in (1 << 62, 1 << 63, 1 << 64, 1 << 100):\n"
        "    for _ in range(20):\n"  # the first mapping may happen to be aligned well enough
        "        try:\n"
        "            driver.address_reserve(2 << 20, alignment=alignment)\n"
        "        except AddressSpaceError:\n"
        "            pass\n"
        "        else:\n"
        "            raise SystemExit('reserved, and no AddressSpaceError')\n"
        "print('fine')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
