"""Sizes that a stranger chose: what they say, what is behind them, and what they cost others (S7).

Where it matters who does it, another user does it, with the real system calls.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Raw
from tests.hostile.test_keeper_client_hostile import impostor
from tests.hostile.test_keeper_hostile import PIECE, running
from tests.processes.other_users import OTHER, as_user

from vram.errors import ProtocolError, UsageError, VramError
from vram.keeper import messages as m
from vram.keeper import pages
from vram.keeper.accounts import Quotas
from vram.keeper.catalogue import Catalogue
from vram.keeper.client import KeeperClient, Segment
from vram.keeper.private import KeeperProcess, short_directory
from vram.keeper.snapshot import restore, save
from vram.sharing.channel import Channel, close_fds
from vram.testing.keeper import SOON, make_memfd, memfds

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
        assert [text.partition(":")[0] for text in said] == ["UsageError"] * 3, said
        assert "140737488355328" in said[0], "the ceiling is said"
        found = good.statistics()
        assert (found.entries, found.nbytes) == (1, 4096)
        assert not good.is_stale(held.lease_id)


def test_s7_a_version_that_is_stated_larger_than_any_machine_is_refused_before_anything_is_sent() -> None:
    """Also memory of a GPU, whose size is only what its sender says."""
    with open_keeper() as keeper, KeeperClient.connect(keeper.path) as good:
        with pytest.raises(UsageError, match="140737488355328"):
            good.offer("w", 2**47 + 1)
        good.offer("w", 2**47)
        with memfds(2) as fds, pytest.raises(UsageError, match="140737488355328"):
            good.publish("w", [Segment(2**46), Segment(2**46 + 1)], fds)


def test_sums_of_bytes_saturate_where_a_message_ends() -> None:
    """From an older keeper more may be taken over than any message can say."""
    books = Catalogue()
    session = books.connect(0)
    for name in "abc":
        made, _ = books.commit(books.begin(session, name, nbytes=1, handles=1), name, 0.0)
        made.body = Raw(m.encode(m.Entry(name, 1, 0, False, [PIECE], ["host"], b"", False, {})))
        books.attach(session, name, 0.0)
    written = save(books, ord)
    for row in written.versions:
        row.nbytes = HUGE
    older = restore(written, chr, Quotas(max_bytes=2**70), keeper_uid=0, nobody=65_534)[0]
    newest, _ = older.commit(older.begin(older.sessions[session.id], "c", nbytes=1, handles=1), "c", 0.0)
    newest.body = older.versions_of("c")[0].body
    older.attach(older.sessions[session.id], "c", 0.0)
    server = SimpleNamespace(catalogue=older, pid=1, started=0.0, now=lambda: 1.0, connections=())
    said: list[m.Reply] = [
        pages.entries(older, m.List(1), 1.0),
        pages.versions(older, m.Versions(1, "c"), 1.0),
        pages.holders(older, m.Holders(1, "a", 1), 1.0),
        pages.leases(older, m.Leases(1), 1.0),
        pages.statistics(server, m.Statistics(1)),  # type: ignore[arg-type]
    ]
    heard: list[Any] = [m.decode_reply(m.encode(reply)) for reply in said]
    assert [row.held for row in heard[0].rows] == [HUGE, HUGE, HUGE + 1]
    assert (heard[4].nbytes, heard[4].max_bytes) == (2**63 - 1, 2**63 - 1)


# -- replies that cannot be read --------------------------------------------------------------------------------------


def converses(*words: Callable[[int], bytes]) -> Callable[[Channel], None]:
    """Answer the greeting, then each call with the next of `words`, made for its number; note what else is said."""

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(1, 1)), timeout=SOON)
        with memfds(1) as fds:
            for word in words:
                request: Any = m.decode_request(channel.recv(timeout=SOON)[0])
                payload = word(request.call)
                channel.send(payload, fds if b"attached" in payload else (), timeout=SOON)

    return answer


ENTRY = m.Entry("w", 1, 0, False, [PIECE], ["host"], b"", False, {})
UNREADABLE = {
    "a number that is too large": lambda call: m.encode(["statistics", call, 1, 0.0, 0, 0, 0, 0, 0, 2**64 - 1]),
    "an answer that nobody knows": lambda call: m.encode(["novelty", call, 1]),
    "no answer at all": lambda call: b"\xc1garbage",
    "an answer cut off": lambda call: m.encode(m.Listing(call, [], False))[:-1],
}


@pytest.mark.parametrize("word", UNREADABLE.values(), ids=list(UNREADABLE))
def test_s5_a_reply_that_cannot_be_read_costs_its_call_and_no_lease(word: Callable[[int], bytes]) -> None:
    words = [
        lambda call: m.encode(m.Attached(call, 7, 1, ENTRY)),
        word,
        lambda call: m.encode(m.IsStale(call, False, 1)),
    ]
    with impostor(converses(*words)) as path, KeeperClient.connect(path) as client:
        held = client.attach("w")
        close_fds(held.fds)
        with pytest.raises(ProtocolError, match="not an answer of a keeper"):
            client.statistics()
        assert client.is_usable
        assert not client.is_stale(held.lease_id)


def test_s5_a_lease_that_came_with_words_that_cannot_be_read_is_given_back() -> None:
    heard: list[m.Request] = []

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(1, 1)), timeout=SOON)
        for said in (["attached", 7, 1, ["w", -1]], ["claimed", -1], ["attached", 9, -1], None):
            while (request := m.decode_request(channel.recv(timeout=SOON)[0])).call == 0:
                heard.append(request)
            with memfds(1) as fds:
                whole = m.encode(m.Done(request.call)) if said is None else m.encode([said[0], request.call, *said[1:]])
                channel.send(whole, fds if said else (), timeout=SOON)

    with impostor(answer) as path, KeeperClient.connect(path) as client:
        for _ in range(3):
            with pytest.raises(ProtocolError, match="not an answer of a keeper"):
                client.attach("w")
        client.abandon(1)
    assert heard == [m.Release(0, [7]), m.Release(0, [9])]


def test_a_reply_that_says_nothing_at_all_is_heard_by_everybody_who_waits() -> None:
    both = threading.Barrier(2)
    ended: list[str] = []

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(1, 1)), timeout=SOON)
        for _ in range(2):
            channel.recv(timeout=SOON)
        channel.send(b"\xc1", timeout=SOON)
        call = m.decode_request(channel.recv(timeout=SOON)[0]).call
        channel.send(m.encode(m.Listing(call, [], False)), timeout=SOON)

    with impostor(answer) as path, KeeperClient.connect(path) as client:

        def wait() -> None:
            both.wait(SOON)
            try:
                client.attach_or_claim("w")
            except VramError as error:
                ended.append(type(error).__name__)

        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert ended == ["ProtocolError"] * 2
        assert client.list() == []
