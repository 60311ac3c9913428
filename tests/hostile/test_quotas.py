"""Every ceiling, as another user meets it: at it, one over, and back under it; and what versions share counts once.

The keeper runs as root, and these users are others to it. What is refused takes nothing: neither a descriptor nor room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from tests.support.deadlines import until
from tests.support.keeper_here import serving
from tests.support.memfds import READ_ONLY, make_memfd, memfds
from tests.support.other_users import OTHER, needs_root
from tests.support.peers import Peer
from tests.support.places import short_directory
from tests.support.users import GREEDY, MODEST, being

from vram.entries.administration import usage
from vram.errors import QuotaError
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient, Segment
from vram.keeper.limits import OPTIONS, Quotas
from vram.keeper.server import KeeperServer
from vram.open_files import close_fds


@contextlib.contextmanager
def keeper(**ceilings: int | None) -> Iterator[KeeperServer]:
    """A keeper in a thread of this process, to which every user may connect."""
    with short_directory() as place:
        os.chmod(place, 0o711)
        with serving(made(f"{place}/k", **ceilings)) as server:
            yield server


def made(path: str, **ceilings: int | None) -> KeeperServer:
    quotas = Quotas(**ceilings)
    return KeeperServer(path, mode=0o666, raises_limit=False, quotas=quotas)


KIB = 1024
KIB4 = Segment(4 * KIB)

pytestmark = needs_root


def connect(stack: contextlib.ExitStack, path: str, uid: int) -> KeeperClient:
    with being(uid):
        return stack.enter_context(KeeperClient.connect(path))


@dataclass
class Scene:
    """A user at a keeper, and memory."""

    stack: contextlib.ExitStack
    server: KeeperServer
    client: KeeperClient
    fds: list[int]
    leases: list[int] = dataclasses.field(default_factory=list)

    def publish(self, name: str, count: int = 1, first: int = 0) -> None:
        self.client.publish(name, [KIB4] * count, self.fds[first : first + count])

    def attach(self, name: str) -> None:
        held = self.client.attach(name)
        close_fds(held.fds)
        self.leases.append(held.lease_id)

    def release(self) -> None:
        self.client.release([self.leases.pop()])

    def refused(self, act: Callable[[], object], *says: str) -> None:
        """It is refused, says what is said, and leaves everything as it was."""
        self.client.statistics()  # what was replaced is closed after its publisher has the answer
        before = self.books()
        with pytest.raises(QuotaError) as caught:
            act()
        for words in says:
            assert words in str(caught.value)
        until(lambda: self.books() == before, what="nothing of what was refused")

    def books(self) -> Any:
        """Everything that counts, and the descriptors of this process, which is the keeper's, too."""
        accounts, server = self.server.catalogue.accounts, self.server
        open_now = len(os.listdir("/proc/self/fd"))
        return (
            *(dataclasses.astuple(one) for one in (accounts.total, accounts.of(GREEDY))),
            dict(server.by_user), open_now,
        )  # fmt: skip


@contextlib.contextmanager
def scene(**ceilings: int | None) -> Iterator[Scene]:
    with keeper(**ceilings) as server, contextlib.ExitStack() as stack:
        fds = stack.enter_context(memfds(6))
        yield Scene(stack, server, connect(stack, server.path, GREEDY), fds)


def whose(prefix: str) -> str:
    return f"uid {GREEDY} may hold" if prefix == "user" else "the keeper may hold"


def option(prefix: str, name: str) -> str:
    return next(one.flag for one in OPTIONS if one.field == f"{prefix}_{name}")


BOTH = pytest.mark.parametrize("prefix", ["user", "max"])


@BOTH
@pytest.mark.parametrize(
    ("what", "ceiling", "count", "said"),
    [
        ("bytes", 8 * KIB, 1, "4 KiB more: {whose} 8 KiB ({option}), holds 8 KiB and would"),
        ("entries", 2, 1, "1 entry more: {whose} 2 entries ({option}), holds 2 and would hold 3"),
        ("descriptors", 4, 2, "2 descriptors more: {whose} 4 descriptors ({option}), holds 4 and would hold 6"),
    ],
)
def test_what_is_held(prefix: str, what: str, ceiling: int, count: int, said: str) -> None:
    with scene(**{"user_descriptors": 9, f"{prefix}_{what}": ceiling}) as one:
        one.publish("a", count)
        one.publish("b", count, count)
        said = "no room for " + said.format(whose=whose(prefix), option=option(prefix, what))
        one.refused(lambda: one.publish("c", count, 2 * count), said, "remove entries (vram rm)", "raise the keeper's")
        one.publish("b", count, 2 * count)  # which is no more than there was
        one.client.remove("a")
        one.publish("c", count)


@BOTH
def test_connections(prefix: str) -> None:
    with scene(**{f"{prefix}_connections": 2}, **({"user_connections": 9} if prefix == "max" else {})) as one:
        more = connect(one.stack, one.server.path, GREEDY)
        said = (
            f"no room for 1 connection more: {whose(prefix)} 2 connections ({option(prefix, 'connections')}), holds 2"
        )

        def another() -> None:
            connect(one.stack, one.server.path, GREEDY)

        one.refused(another, f"{said} and would hold 3")
        own = one.stack.enter_context(KeeperClient.connect(one.server.path))
        assert own.statistics().connections == 3, "who runs the keeper gets in, to raise the ceiling"
        more.close()
        until(lambda: one.server.by_user[GREEDY] == 1, what="the end of the connection")
        own.close()
        until(lambda: 0 not in one.server.by_user, what="the end of the connection")
        another()


# -- what versions share ----------------------------------------------------------------------------------------------
@BOTH
def test_a_version_that_extends_another_by_the_same_memory_counts_what_it_adds(prefix: str) -> None:
    """While the old one is leased, by its own publisher even: three versions of 4, 8 and 12 KiB are 12 KiB."""
    with scene(**{f"{prefix}_bytes": 12 * KIB}) as one:
        for count in (1, 2, 3):
            one.publish("grows", count)
            one.attach("grows")
        held = one.client.statistics()
        assert (held.nbytes, held.descriptors, held.versions) == (12 * KIB, 6, 3)
        assert one.server.catalogue.accounts.of(GREEDY).nbytes == 12 * KIB
        one.refused(lambda: one.publish("grows", 4), "no room for 4 KiB more", "holds 12 KiB and would hold 16 KiB")
        one.refused(lambda: one.client.offer("c", 1), "no room for 1 B more")
        one.publish("same", 3)  # under another name it is no memory more, either
        assert one.client.statistics().nbytes == 12 * KIB
        while one.leases:
            one.release()
        one.client.remove("same")
        assert one.client.statistics().nbytes == 12 * KIB
        one.publish("grows")
        assert one.client.statistics().nbytes == 4 * KIB


def test_memory_of_two_users_counts_for_each_and_once_for_all() -> None:
    with scene(user_bytes=8 * KIB, max_bytes=12 * KIB) as one:
        other = connect(one.stack, one.server.path, MODEST)
        one.publish("a", 2)
        other.publish("b", [KIB4, KIB4], one.fds[:2])
        accounts = one.server.catalogue.accounts
        assert [accounts.of(uid).nbytes for uid in (GREEDY, MODEST)] == [8 * KIB, 8 * KIB]
        assert accounts.total.nbytes == 8 * KIB
        with pytest.raises(QuotaError, match=f"uid {MODEST} may hold 8 KiB"):
            other.publish("c", [KIB4], one.fds[2:3])
        one.client.remove("a")
        assert [accounts.of(uid).nbytes for uid in (GREEDY, MODEST)] == [0, 8 * KIB]
        assert accounts.total.nbytes == 8 * KIB
        other.remove("b")
        assert dataclasses.astuple(accounts.total)[:3] == (0, 0, 0)


def test_the_same_memory_twice_in_a_version_counts_once() -> None:
    with scene() as one:
        one.client.publish("twice", [KIB4, KIB4], [one.fds[0], one.fds[0]])
        assert one.client.statistics().nbytes == 4 * KIB
        one.client.remove("twice")
        assert one.client.statistics().nbytes == 0


def test_what_is_refused_after_some_of_it_came_leaves_nothing() -> None:
    with scene(user_bytes=150 * KIB) as one:
        big = make_memfd(64 * KIB, seals=READ_ONLY)
        one.stack.callback(os.close, big)
        fds = one.stack.enter_context(memfds(34))
        one.publish("a")
        # Of 4 KiB each as is said, and the last of 64 KiB, which is known with the second part.
        one.refused(lambda: one.client.publish("b", [KIB4] * 35, [*fds, big]), "no room for")
        assert one.client.statistics().nbytes == 4 * KIB


def test_each_part_counts_as_it_comes_with_what_it_has_more_than_was_said() -> None:
    with scene(user_bytes=100 * KIB) as one:
        big = [make_memfd(64 * KIB, seals=READ_ONLY) for _ in range(2)]
        one.stack.callback(close_fds, big)
        with being(GREEDY):
            peer = Peer(one.server.path)
        with contextlib.closing(peer):
            said = m.encode(m.Publish(1, "half", [m.SegmentRow(4 * KIB, 1, 0)] * 4, ["host"]))
            assert peer.ask(said, one.fds[:1]) == m.NextPart(1, 1)
            assert one.client.statistics().nbytes == 16 * KIB  # as was said
            assert peer.ask(m.encode(m.Part(2, 1, 1)), big[:1]) == m.NextPart(2, 2)
            assert one.client.statistics().nbytes == 68 * KIB
            refused = peer.ask(m.encode(m.Part(3, 1, 2)), big[1:])
            assert isinstance(refused, m.Error)
            assert (refused.kind, "no room for" in refused.text) == ("QuotaError", True)
            assert one.client.statistics().nbytes == 0


# -- other ceilings ---------------------------------------------------------------------------------------------------
def test_ceilings_that_are_lowered_below_what_is_used_take_nothing() -> None:
    """New requests are refused, and nothing else happens to leases, versions and connections."""
    with short_directory() as place, contextlib.ExitStack() as stack:
        os.chmod(place, 0o711)
        server = stack.enter_context(serving(made(f"{place}/k")))
        fds = stack.enter_context(memfds(2))
        one = Scene(stack, server, connect(stack, server.path, GREEDY), fds)
        one.publish("a")
        one.attach("a")
        server.limit(Quotas(user_bytes=1, user_entries=0, user_descriptors=0, user_connections=0))
        held = one.client.statistics()
        assert (held.entries, held.leases, held.connections) == (1, 1, 1)
        for what, act in (
            ("no room for", lambda: one.publish("b", first=1)),
            ("no room for 1 connection more", lambda: connect(stack, server.path, GREEDY)),
        ):
            with pytest.raises(QuotaError, match=what):
                act()
        one.attach("a")
        assert one.client.statistics().leases == 2
        one.release()
        one.release()
        one.client.remove("a")
        assert one.client.statistics().leases == 0


# -- the table --------------------------------------------------------------------------------------------------------
def test_a_process_has_no_more_than_it_has_whatever_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 512))
    with short_directory() as place:
        quotas = made(f"{place}/k", max_connections=10_000, user_descriptors=10_000).catalogue.accounts.quotas
    assert quotas.max_connections == 170
    assert quotas.user_connections == 85, "half of them"
    assert quotas.max_descriptors is not None
    assert 200 < quotas.max_descriptors < 300
    assert quotas.user_descriptors == quotas.max_descriptors


def held(server: KeeperServer) -> tuple[int, int]:
    """Return how many bytes and entries of the other user's count."""
    rows = [row for row in usage(server.path)[0] if row.uid == OTHER]
    return (rows[0].nbytes, rows[0].entries) if rows else (0, 0)
