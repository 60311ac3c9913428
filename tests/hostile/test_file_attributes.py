"""Extended attributes of memory are the kernel's memory, in no ceiling: others set none, and no keeper takes any."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from dataclasses import astuple

import pytest
from tests.support.attributes import NAME, needs_attributes, refused
from tests.support.open_files import keeper_here
from tests.support.other_users import OTHER, as_user
from tests.support.peers import Peer
from tests.support.users import KIB4

from vram import driver as drivers
from vram.entries.manifests import sealed_copy
from vram.errors import ProtocolError
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient, Segment
from vram.spec import HOST, HandleKind
from vram.testing.keeper import memfds, until

pytestmark = pytest.mark.slow  # goes with the count of attributes

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")


def tried(*acts: Callable[[], object]) -> list[int]:
    """Return for each call the errno with which it fails, or 0."""
    codes = []
    for act in acts:
        try:
            act()
            codes.append(0)
        except OSError as error:
            codes.append(error.errno or -1)
    return codes


@needs_root
@needs_attributes
@pytest.mark.parametrize("what", ["memory", "manifest"])
def test_another_user_hangs_nothing_to_memory_that_was_made_here(what: str) -> None:
    """It was 500 MiB of the kernel's for a reader of 4 KiB. Who reads may open it again for that, as before 6.7."""
    with contextlib.ExitStack() as stack:
        driver = drivers.get(HOST)
        if what == "manifest":
            fd = stack.enter_context(sealed_copy(b"said")).export()
        else:
            nbytes = driver.mem_granularity(HOST, HandleKind.POSIX_FD).recommended
            handle = driver.mem_create(nbytes, HOST, HandleKind.POSIX_FD)
            stack.callback(driver.mem_release, handle)
            fd = driver.mem_export(handle, HandleKind.POSIX_FD)
            stack.callback(os.close, fd)
        again = f"/proc/self/fd/{fd}"
        assert as_user(
            OTHER,
            lambda: tried(
                lambda: os.setxattr(fd, NAME, b"1"),
                lambda: os.open(again, os.O_RDWR | os.O_CLOEXEC),
                lambda: os.fchmod(fd, 0o777),
                lambda: os.open(again, os.O_RDONLY | os.O_CLOEXEC),
                lambda: os.read(fd, 4),
            ),
        ) == [errno.EACCES, errno.EACCES, errno.EPERM, 0, 0]


@needs_attributes
@pytest.mark.parametrize("device", ["host", "GPU-0"])
def test_memory_with_attributes_is_refused_until_they_are_removed(device: str) -> None:
    with keeper_here() as server, KeeperClient.connect(server.path) as client, memfds(1) as fds:
        segments = [Segment(4096, device=device)]
        os.setxattr(fds[0], NAME, b"1")
        with pytest.raises(ProtocolError, match=r"segment 0 has extended attributes.*removexattr"):
            client.publish("w", segments, fds)
        with pytest.raises(ProtocolError, match=r"the manifest has extended attributes"), memfds(1) as bare:
            client.publish("w", segments, bare, manifest_fd=fds[0])
        os.removexattr(fds[0], NAME)
        assert client.publish("w", segments, fds) == 1


@needs_attributes
def test_memory_with_more_attributes_than_the_kernel_lists_is_refused() -> None:
    with keeper_here() as server, KeeperClient.connect(server.path) as client, memfds(1) as fds:
        for number in range(300):
            os.setxattr(fds[0], f"user.{number:0240}", b"")
        with pytest.raises(OSError, match="too long") as found:
            os.listxattr(fds[0])
        assert found.value.errno == errno.E2BIG
        with pytest.raises(ProtocolError, match="segment 0 has extended attributes"):
            client.publish("w", [KIB4], fds)


SYSTEMS = "security.test"


@pytest.mark.skipif(bool(refused(SYSTEMS)), reason=refused(SYSTEMS))
def test_what_the_system_hangs_to_memory_refuses_nothing() -> None:
    with keeper_here() as server, KeeperClient.connect(server.path) as client, memfds(1) as fds:
        os.setxattr(fds[0], SYSTEMS, b"1")
        assert client.publish("w", [KIB4], fds) == 1


@needs_attributes
def test_memory_that_gets_attributes_while_the_rest_comes_is_refused() -> None:
    """Looked at when it came alone, the first of a publication had them before the last was there."""
    with keeper_here() as server, contextlib.closing(Peer(server.path)) as peer, memfds(3) as fds:
        said = m.Publish(1, "w", [m.SegmentRow(4096, 1, 0)] * 3, ["host"])
        assert isinstance(peer.ask(m.encode(said), fds[:1]), m.NextPart)
        assert isinstance(peer.ask(m.encode(m.Part(2, 1, 1)), fds[1:2]), m.NextPart)
        os.setxattr(fds[0], NAME, b"1")
        reply = peer.ask(m.encode(m.Part(3, 1, 2)), fds[2:])
        assert isinstance(reply, m.Error)
        assert "descriptor 0 has extended attributes" in reply.text
        until(lambda: not any(astuple(server.catalogue.accounts.total)), what="the end of the publication")
        assert isinstance(peer.ask(m.encode(m.Statistics(4))), m.KeeperStatistics), "it cost the connection"
