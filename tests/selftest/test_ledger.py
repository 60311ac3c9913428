"""The ledger sees what a test leaves behind: every kind of thing is leaked here once, on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from tests.support.ledger import Ledger

from vram import driver, lifetime
from vram.driver import addresses as driver_addresses
from vram.driver import libc
from vram.driver.host import HostDriver
from vram.errors import ReleaseWarning
from vram.lifetime import own
from vram.spec import HOST, HandleKind

G = 2 << 20
GRACE = 0.05  # seconds; what is planted here does not go away by itself


@pytest.fixture
def before() -> Ledger:
    return Ledger.take()


def kinds(before: Ledger) -> set[str]:
    """Return the kinds of things that were left behind."""
    return {line.partition(":")[0] for line in before.left_behind(grace=GRACE)}


def test_a_leaked_handle(before):
    leaked = own("a lease nobody gave back", lambda: None)
    found = before.left_behind(grace=GRACE)
    assert len(found) == 1
    assert found[0].startswith("handles: a lease nobody gave back #")
    leaked.release()
    assert kinds(before) == set()


def test_an_undo_in_the_wrong_order(before):
    """A mapping that does not say what it stands on: the addresses are freed under it, and the driver refuses."""
    host = HostDriver()
    address, handle = host.address_reserve(G), host.mem_create(G, HOST, HandleKind.POSIX_FD)
    host.mem_map(address, G, 0, handle)
    reservation = own("reservation", lambda: host.address_free(address, G))
    allocation = own("allocation", lambda: host.mem_release(handle))
    mapping = own("mapping", lambda: host.mem_unmap(address, G))  # depends=... forgotten
    with pytest.warns(ReleaseWarning, match="could not take back reservation: .* 1 mappings are in it"):
        reservation.release()
    allocation.release()
    mapping.release()
    stuck, kept = before.left_behind(grace=GRACE)
    assert stuck.startswith("stuck: reservation #")
    assert kept == f"addresses: {G} bytes at {address:#x}"
    lifetime._stuck.pop()
    host.address_free(address, G)
    assert kinds(before) == set()


def test_objects_of_a_loaded_driver(before):
    host = driver.get(HOST)
    handle = host.mem_create(G, HOST, HandleKind.POSIX_FD)
    address = host.address_reserve(G)
    assert {"objects", "fds"} <= kinds(before)
    host.mem_release(handle)
    found = before.left_behind(grace=GRACE)
    assert [line.partition(":")[0] for line in found] == ["objects", "addresses"]
    assert "reservations=1, handles=0" in found[0]
    assert found[1] == f"addresses: {G} bytes at {address:#x}"
    host.address_free(address, G)
    assert kinds(before) == set()


def test_addresses_that_the_books_do_not_know(before, monkeypatch):
    """A driver that strikes a reservation out and forgets the kernel."""
    host = HostDriver()
    address = host.address_reserve(3 * G)
    monkeypatch.setattr(driver_addresses.libc, "munmap", lambda start, nbytes: 0)
    host.address_free(address, 3 * G)
    monkeypatch.undo()
    assert host.live().reservations == 0
    assert before.left_behind(grace=GRACE) == [f"addresses: {3 * G} bytes at {address:#x}"]
    libc.munmap(address, G)
    assert before.left_behind(grace=GRACE) == [f"addresses: {2 * G} bytes at {address + G:#x}"]
    libc.munmap(address + G, 2 * G)
    assert kinds(before) == set()


def test_addresses_of_others_are_no_false_alarm(before):
    """Threads have guards, and malloc keeps ranges for them, also when they are gone; a driver keeps one page."""
    kept, ready, leave = [], threading.Barrier(9), threading.Event()

    def work() -> None:
        kept.append([bytearray(1 << 17) for _ in range(64)])
        ready.wait(30)
        leave.wait(30)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    ready.wait(30)
    assert kinds(before) == {"threads"}
    leave.set()
    for thread in threads:
        thread.join(30)
    host = HostDriver()
    address, handle = host.address_reserve(G), host.mem_create(G, HOST, HandleKind.POSIX_FD)
    host.mem_map(address, G, 0, handle)
    host.mem_unmap(address, G)
    host.mem_release(handle)
    host.address_free(address, G)
    assert before.left_behind(grace=GRACE) == []


def test_a_leaked_descriptor(before):
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    assert before.left_behind(grace=GRACE) == [f"fds: {fd} -> {os.devnull}"]
    os.close(fd)
    assert kinds(before) == set()


def test_a_descriptor_closed_and_another_opened_in_its_place():
    fd = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    before = Ledger.take()
    os.close(fd)
    other = os.memfd_create("other", os.MFD_CLOEXEC)
    assert other == fd
    assert kinds(before) == {"fds"}
    os.close(other)


def test_a_leaked_mapping(before):
    host = HostDriver()
    address, handle = host.address_reserve(G), host.mem_create(G, HOST, HandleKind.POSIX_FD)
    host.mem_map(address, G, 0, handle)
    host.mem_release(handle)
    assert {"mappings", "fds", "addresses"} == kinds(before)  # a mapped memfd stays open, to be retained
    host.mem_unmap(address, G)
    host.address_free(address, G)
    assert kinds(before) == set()


def test_a_leaked_child(before):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert any(line.startswith(f"children: pid {child.pid} (") for line in before.left_behind(grace=GRACE))
    child.communicate()
    assert kinds(before) == set()


def test_a_leaked_thread(before):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="forgotten", daemon=True)
    thread.start()
    assert before.left_behind(grace=GRACE) == [f"threads: forgotten ({thread.ident})"]
    stop.set()
    thread.join(120)
    assert kinds(before) == set()


def test_every_test_is_checked(tmp_path):
    """The fixture of this project's conftest, in a session of its own, on tests that leak."""
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "conftest.py").read_text())
    (tmp_path / "test_leaks.py").write_text(
        """
import os, threading
from vram.lifetime import own
from vram.driver.host import HostDriver
from vram.spec import HOST, HandleKind

kept = []

def test_leaks_a_descriptor():
    os.open(os.devnull, os.O_RDONLY)

def test_leaks_a_handle():
    kept.append(own("forgotten", lambda: None))

def test_leaks_a_thread():
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()

def test_drops_what_collects_itself():
    own("dropped", lambda: None)

def test_warns():
    import warnings
    warnings.warn("something is off")

def test_leaks_nothing():
    pass
"""
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "-W",
        "error",
    ]
    # With the stand-in and the watchdog, for the copied conftest; what leaks here does not go away by itself.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VRAM_TEST_SECONDS": "1"}
    done = subprocess.run(
        [*command, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert "1 failed, 5 passed, 3 errors" in done.stdout, done.stdout
    for name in ("a_descriptor", "a_handle", "a_thread"):
        assert f"ERROR test_leaks.py::test_leaks_{name}" in done.stdout
    assert "handles: forgotten #" in done.stdout
    assert "FAILED test_leaks.py::test_warns" in done.stdout


@pytest.fixture(scope="session")
def open_file() -> Iterator[IO[str]]:
    with open(os.devnull) as file:
        yield file


def test_a_fixture_of_the_session_is_not_left_behind_by_its_first_test(open_file):
    """The ledger at the end of the test before this one does not have its descriptor."""
    assert not open_file.closed
