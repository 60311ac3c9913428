"""A data base of users that is slow to say whose a name is: who asks waits for it, and nobody else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.keeper_here import later
from tests.support.keepers_for_all import connect, for_all
from tests.support.other_users import needs_root
from tests.support.users import GREEDY, KIB4, MODEST

from vram.errors import AccessDeniedError, QuotaError, WaitTimeoutError
from vram.keeper import lookups
from vram.keeper.catalogue import Catalogue
from vram.keeper.client import KeeperClient, PublishClaim
from vram.keeper.records import Claim, Claimed
from vram.keeper.server import KeeperServer
from vram.keeper.slow_close import Unclosed
from vram.keeper.users import Answer, UserNames
from vram.testing.keeper import AT_ONCE, SOON, memfds, until

pytestmark = [
    pytest.mark.slow,
    needs_root,
]  # goes with names of users


@dataclass
class Slow:
    """A data base that says nothing until it is told to, and what it was asked."""

    asked: list[int | str] = field(default_factory=list)
    says: threading.Event = field(default_factory=threading.Event)

    def name_of(self, uid: int) -> str:
        self.asked.append(uid)
        assert self.says.wait(SOON)
        return f"u{uid}"

    def uid_of(self, name: str) -> int:
        self.asked.append(name)
        assert self.says.wait(SOON)
        return int(name[1:]) if name[1:].isdecimal() else -1


@contextlib.contextmanager
def keeping() -> Iterator[tuple[KeeperServer, Slow, Callable[[int], KeeperClient]]]:
    """A keeper whose users are in such a data base, and what connects to it as one of them."""
    base = Slow()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(for_all(names=UserNames(name_of=base.name_of, uid_of=base.uid_of)))
        stack.callback(base.says.set)  # whatever happens: nobody is to wait for it any more
        yield server, base, lambda uid: connect(stack, server.path, uid)


def within(server: KeeperServer, act: Callable[[], Any]) -> None:
    """Do something in the thread of the keeper's loop, and wait for it."""
    done = threading.Event()
    server.loop.call_soon_threadsafe(lambda: (act(), done.set()))
    assert done.wait(SOON)


def is_left(server: KeeperServer) -> bool:
    """Whether anything is left of requests that waited."""
    kept = server.lookups
    return bool(kept._waiting or kept._nbytes or kept._asked or server.slow_closer.total != Unclosed())


@pytest.mark.parametrize("verb", ["publish", "offer", "claim"])
def test_who_asks_for_a_name_keeps_nobody_else_waiting(verb: str) -> None:
    """The loop asked, and answered nobody until the data base did: one user could have it ask again and again."""
    with keeping() as (server, base, join), memfds(1) as fds:
        greedy, another, modest = join(GREEDY), join(GREEDY), join(MODEST)
        modest.grace = AT_ONCE
        verbs: dict[str, Callable[[], Any]] = {
            "publish": lambda: greedy.publish("~made-up/w", [KIB4], fds),
            "offer": lambda: greedy.offer("~made-up/w", 4096),
            "claim": lambda: greedy.attach_or_claim("~made-up/w"),
        }
        thread, came = later(verbs[verb])
        until(lambda: base.asked, what="the question")
        assert modest.publish("w", [KIB4], fds) == 1
        assert modest.publish(f"~{MODEST}/w", [KIB4], fds) == 1
        assert another.statistics().entries == 2
        assert not came
        base.says.set()
        thread.join(SOON)
        assert isinstance(came[0], AccessDeniedError), came
        assert "no user 'made-up' is known here" in str(came[0])
        assert base.asked == [GREEDY, "made-up"]
        until(lambda: not is_left(server), what="the end of what waited")
        assert greedy.publish("w2", [KIB4], fds) == 1


def test_what_waits_is_done_once_it_is_known_whose_the_name_is() -> None:
    """In the order in which it came; what was read of the same connection meanwhile, nothing, comes behind."""
    with keeping() as (server, base, join), memfds(40) as fds:
        owner, other = join(GREEDY), join(GREEDY)
        name = f"~u{GREEDY}/w"
        ones = [later(lambda: owner.publish(name, [KIB4] * 40, fds)), later(lambda: other.attach_or_claim(f"{name}2"))]
        until(lambda: len(server.lookups._waiting.get(GREEDY, ())) == 2, what="both")
        assert server.slow_closer.of(GREEDY).sent > 0, "what is kept of them counts"
        thread, said = later(owner.statistics)
        base.says.set()
        for each in (thread, *(one for one, _ in ones)):
            each.join(SOON)
        assert ones[0][1] == [1]
        assert isinstance(ones[1][1][0], PublishClaim)
        assert len(said) == 1
        assert base.asked == [GREEDY]
        until(lambda: not is_left(server), what="the end of what waited")


def test_nothing_is_left_of_who_hangs_up_meanwhile() -> None:
    with keeping() as (server, base, join), memfds(1) as fds:
        greedy = join(GREEDY)
        thread, came = later(lambda: greedy.publish("~made-up/w", [KIB4], fds))
        until(lambda: base.asked, what="the question")
        greedy.close()
        thread.join(SOON)
        base.says.set()
        until(lambda: not is_left(server), what="the end of what waited")
        assert server.catalogue.entries == 0
        assert len(came) == 1


def test_a_takeover_does_not_wait_for_it_for_long() -> None:
    with keeping() as (server, base, join), memfds(1) as fds:
        greedy = join(GREEDY)
        thread, came = later(lambda: greedy.publish("~made-up/w", [KIB4], fds))
        until(lambda: base.asked, what="the question")
        within(server, lambda: server.lookups.finish(0.01))
        thread.join(SOON)
        assert isinstance(came[0], WaitTimeoutError), came
        assert "another keeper takes over: try again" in str(came[0])
        until(lambda: not is_left(server), what="the end of what waited")
        base.says.set()
        with pytest.raises(AccessDeniedError):
            greedy.publish("~made-up/w", [KIB4], fds)


def test_what_waits_of_one_user_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "_MOST", 1_000)
    with keeping() as (server, base, join):
        clients = [join(GREEDY) for _ in range(3)]
        threads = [later(lambda one=one: one.offer("~made-up/w", 1, meta={"x": "y" * 400})) for one in clients]
        until(lambda: any(came for _, came in threads), seconds=AT_ONCE, what="the end of one")
        ((refused,),) = [came for _, came in threads if came]
        assert isinstance(refused, QuotaError), refused
        base.says.set()
        for thread, _ in threads:
            thread.join(SOON)
        assert sorted(type(came[0]).__name__ for _, came in threads) == ["AccessDeniedError"] * 2 + ["QuotaError"]
        until(lambda: not is_left(server), what="the end of what waited")


def test_the_loop_itself_never_asks_whose_a_name_is() -> None:
    """A name that was found to be somebody's own stays so for what the connection has begun; any other is refused.

    Whoever had the answer forgotten in between (64 other names, or a request at the very end of its ten seconds) had
    the loop ask, and everybody wait.
    """
    now = [0.0]
    names = UserNames(
        lambda: now[0], name_of=lambda uid: pytest.fail("asked"), uid_of=lambda user: pytest.fail("asked")
    )
    books = Catalogue(why_not=names.why_not)
    session, waiting = books.connect(GREEDY, 1, "own"), books.connect(GREEDY, 2, "waits")
    with pytest.raises(AccessDeniedError, match="asked too long ago: try again"):
        books.begin(session, "~own/w", nbytes=1, handles=1)
    names.learn(GREEDY, "own", Answer("own", GREEDY))
    half = books.begin(session, "~own/w", nbytes=1, handles=1)
    claim = books.attach(session, "~own/claimed", 0.0, claim=True)
    assert isinstance(claim, Claim)
    waiter = books.attach(waiting, "~own/claimed", 0.0, call=5, claim=True, wait=None)
    for number in range(64):
        names.learn(GREEDY, f"other{number}", Answer("own", -1))
    now[0] = 11.0
    assert names.why_not(GREEDY, "own") is None
    version, _ = books.commit(half, None, now[0])
    assert version.owner == GREEDY
    effects = books.drop_claim(session, claim.id, now[0])
    assert any(isinstance(one, Claimed) for one in effects), (waiter, effects)
    with pytest.raises(AccessDeniedError, match="try again"):
        books.begin(books.connect(GREEDY, 3, "new"), "~own/w", nbytes=1, handles=1)
    names.learn(GREEDY, "own", Answer("renamed", -1))
    with pytest.raises(AccessDeniedError, match="no user 'own' is known here"):
        books.begin(session, "~own/w", nbytes=1, handles=1)


def test_a_keeper_that_can_start_no_thread_says_so_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop asked itself then, and answered nobody until the data base did."""

    class Refused(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(lookups, "threading", SimpleNamespace(Thread=Refused))
    with keeping() as (server, base, join), memfds(1) as fds:
        greedy, modest = join(GREEDY), join(MODEST)
        refused = [later(lambda nth=nth: greedy.offer(f"~made-up{nth}/w", 4096)) for nth in range(2)]  # type: ignore[misc]
        for thread, came in refused:
            thread.join(SOON)
            said = str(came[0]) if came else "nothing"
            assert "can start no thread to ask the database of users" in said, f"not refused: {said}"
        modest.publish("w", [KIB4], fds)
        assert not base.asked
        within(server, lambda: None)
        assert not is_left(server)
        monkeypatch.undo()
        base.says.set()
        with pytest.raises(AccessDeniedError):
            greedy.offer("~made-up0/w", 4096)
        assert base.asked
