"""Sizes that a stranger chose: what they say, what is behind them, and what they cost others (S7).

Where it matters who does it, another user does it, with the real system calls.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.deadlines import SOON, until
from tests.support.impostors import impostor
from tests.support.memfds import READ_ONLY, WRITABLE, make_memfd, memfds
from tests.support.other_users import OTHER, as_user
from tests.support.peers import SEGMENT, Peer, running
from tests.support.places import short_directory

from vram.errors import CapacityError, ProtocolError, VramError
from vram.info import StatisticsInfo
from vram.keeper import admission, listing, reports  # noqa: F401  (what becomes another user may not be able to read it then)
from vram.keeper import messages as m
from vram.keeper.admission import admit
from vram.keeper.client import KeeperClient, Segment
from vram.keeper.private import KeeperProcess
from vram.open_files import close_fds
from vram.sharing.channel import Channel
from vram.spec import HandleKind

MIB = 1 << 20
HUGE = 2**63 - 4096
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
KIB4 = Segment(4096)


@contextlib.contextmanager
def open_keeper(*options: str) -> Iterator[KeeperProcess]:
    """A keeper that every user of the machine may use."""
    with short_directory() as place:
        os.chmod(place, 0o711)
        with running(f"{place}/k", "--mode", "0666", *options) as process:
            yield process


def told(act: Callable[[], Any]) -> Any:
    """Do it as another user; return what came of it, or the type and text of the error."""
    return as_user(OTHER, act)


def publish_sparse(path: str, *names: str, size: int = HUGE) -> list[str]:
    """Publish memory of that size under each name; return the errors."""
    said = []
    with KeeperClient.connect(path) as client:
        for name in names:
            fd = make_memfd(size)
            try:
                client.publish(name, [Segment(4096)], [fd])
                said.append("")
            except VramError as error:
                said.append(f"{type(error).__name__}: {error}")
            finally:
                os.close(fd)
    return said


# -- sums that no message can carry -----------------------------------------------------------------------------------
@needs_root
def test_s7_memory_of_a_size_that_no_machine_has_is_not_taken_and_costs_nobody_anything() -> None:
    with open_keeper() as keeper, KeeperClient.connect(keeper.path) as good:
        with memfds(1) as fds:
            good.publish("good", [KIB4], fds)
        held = good.attach("good")
        close_fds(held.fds)
        said = told(lambda: publish_sparse(keeper.path, "a", "b", "c"))
        assert [text.partition(":")[0] for text in said] == ["CapacityError"] * 3, said
        assert "140737488355328" in said[0], "the ceiling is said"
        found = good.statistics()
        assert (found.entries, found.nbytes) == (1, 4096)
        assert not good.is_stale(held)


def test_s7_a_version_that_is_stated_larger_than_any_machine_is_refused_before_anything_is_sent() -> None:
    """Also memory of a GPU, whose size is only what its sender says."""
    with open_keeper() as keeper, KeeperClient.connect(keeper.path) as good:
        for nbytes in (2**47 + 1, 2**70):
            with pytest.raises(CapacityError, match="140737488355328"):
                good.offer("w", nbytes)
        good.offer("w", 2**47)
        with contextlib.closing(Peer(keeper.path)) as peer:
            said = peer.ask(m.encode(m.Offer(1, "w", 2**47 + 1)))
            assert isinstance(said, m.Error)
            assert said.kind == "CapacityError"
        with memfds(2) as fds, pytest.raises(CapacityError, match="140737488355328"):
            good.publish("w", [Segment(2**46), Segment(2**46 + 1)], fds)


# -- replies that cannot be read --------------------------------------------------------------------------------------
def converses(*words: Callable[[int], bytes]) -> Callable[[Channel], None]:
    """Answer the greeting, then each call with the next of `words`, made for its number; note what else is said."""

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(1)), timeout=SOON)
        with memfds(1) as fds:
            for word in words:
                request: Any = m.decode_request(channel.recv(timeout=SOON)[0])
                payload = word(request.call)
                channel.send(payload, fds if b"attached" in payload else (), timeout=SOON)

    return answer


ENTRY = m.Entry("w", 1, 0, False, [SEGMENT], ["host"], b"", False, {})
UNREADABLE = {
    "a number that is too large": lambda call: m.encode(["statistics", call, 1, 0.0, 0, 0, 0, 0, 0, 2**64 - 1]),
    "an answer that nobody knows": lambda call: m.encode(["novelty", call, 1]),
    "no answer at all": lambda call: b"\xc1garbage",
    "an answer cut off": lambda call: m.encode(m.Rows(call, [], False))[:-1],
}


@pytest.mark.parametrize("word", UNREADABLE.values(), ids=list(UNREADABLE))
def test_s7_a_reply_that_cannot_be_read_ends_the_connection(word: Callable[[int], bytes]) -> None:
    words = [lambda call: m.encode(m.Attached(call, 7, 1, ENTRY)), word]
    with impostor(converses(*words)) as path, KeeperClient.connect(path) as client:
        close_fds(client.attach("w").fds)
        for _ in range(2):
            with pytest.raises(ProtocolError, match="not an answer of a keeper"):
                client.statistics()
        assert not client.is_usable


def test_a_page_counts_whole() -> None:
    with memfds(1, 1) as (fd,):
        assert admit(fd, 1, kind=1, device="host", writable=False, what="it") == 4096


def send_half(path: str, nbytes: int) -> list[m.Reply | None]:
    """Publish two pieces, stated as 8 bytes each, and send only the first; say what is counted, then wait."""
    peer = Peer(path)
    time.sleep(0.6)  # until the keeper has ceased to watch over one that owes it nothing
    with memfds(1, nbytes) as fds:
        request = m.Publish(1, "half", [m.SegmentRow(8, 1), m.SegmentRow(8, 1)], ["host"])
        said = [peer.ask(m.encode(request), fds)]
    said.append(peer.ask(m.encode(m.Statistics(2))))

    def is_over() -> bool:
        said.append(peer.ask(m.encode(m.Statistics(3))))
        return isinstance(said[-1], m.Rows) and not m.decode_rows(said[-1].rows, StatisticsInfo)[0].nbytes

    until(is_over, what="the end of a publication of which nothing more comes")
    with memfds(1) as fds:
        said = [*said[:2], peer.ask(m.encode(m.Part(4, 1, 1)), fds), peer.ask(m.encode(m.Statistics(5)))]
    peer.close()
    return said


@pytest.mark.slow
@needs_root
def test_half_a_publication_counts_as_it_comes_and_not_for_ever() -> None:
    with open_keeper("--max-bytes", "16MiB", "--patience", "1") as keeper:
        refused = told(lambda: send_half(keeper.path, 32 * MIB))[0]
        assert isinstance(refused, m.Error)
        assert refused.kind == "QuotaError"
        said = told(lambda: send_half(keeper.path, 8 * MIB))
        assert len(said) == 4, said
        begun, counted, late, after = said
        assert begun == m.NextPart(1, 1)
        assert numbers(counted).nbytes == 8 * MIB
        assert (late.kind, "for 1 s" in late.text) == ("NotFoundError", True)
        assert (numbers(after).nbytes, numbers(after).descriptors, numbers(after).connections) == (0, 0, 1)


def numbers(said: m.Reply) -> StatisticsInfo:
    assert isinstance(said, m.Rows)
    return m.decode_rows(said.rows, StatisticsInfo)[0]


# -- what the keeper itself needs --------------------------------------------------------------------------------------
TALKATIVE = {
    f"{number:04x}": "word" for number in range(512)
}  # all that an entry may say, in as small pieces as can be


def test_a_table_leaves_out_what_entries_say_beyond_a_bound() -> None:
    count = 1_500
    with open_keeper() as keeper, KeeperClient.connect(keeper.path) as good:
        with memfds(1) as fds:
            for number in range(count):
                good.publish(f"w{number:05}", [KIB4], fds, meta=TALKATIVE)
        command = [sys.executable, "-P", "-c", "from vram.cli import main; main()", "ls", "--socket", keeper.path]
        done = subprocess.run(command, capture_output=True, check=True, timeout=SOON * 10)
        lines = done.stdout.decode().splitlines()
        assert len(lines) == count + 2  # a heading, and the keeper
        assert lines[1].startswith("w00000")
        assert lines[-2].endswith("...")
        assert good.list("w00000")[0].meta == TALKATIVE


# -- huge pages -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("device", ["host", "GPU-8d6f3b1c-0000-0000-0000-000000000000"])
def test_s7_memory_of_a_pool_of_huge_pages_is_refused(device: str, writable: bool) -> None:
    """A fault that finds the pool empty kills its reader; and what is in it counts for nobody."""
    seals = WRITABLE if writable else READ_ONLY
    try:
        fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"no MFD_HUGETLB here: {error.strerror}")
    try:
        os.ftruncate(fd, 2 << 20)
        fcntl.fcntl(fd, 1033, seals)
        with pytest.raises(ProtocolError, match="segment 0 is of a limited pool of huge pages"):
            admit(fd, 4096, kind=HandleKind.POSIX_FD, device=device, writable=writable, what="segment 0")
    finally:
        os.close(fd)
    with memfds(1, 2 << 20, seals=seals) as (fine,):
        kind = HandleKind.POSIX_FD
        assert admit(fine, 4096, kind=kind, device=device, writable=writable, what="segment 0") == 2 << 20
