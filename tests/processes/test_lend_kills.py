"""SIGKILL of lender and borrower before every single message: nobody hangs, and all comes back (S5, I4)."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.children import Inherited
from tests.support.commands import Running
from tests.support.connections import close_clients
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.lend_children import Sources, numbers
from tests.support.places import short_directory

import standin
import vram
from vram import driver as drivers
from vram.errors import PeerGoneError, ProtocolError, VramError, WaitTimeoutError
from vram.sharing.channel import Channel

STOPPED = Path(__file__).parents[1].joinpath("support", "lend_stopped.py")
SLOW = pytest.mark.slow  # before every message; CI stops before every second one


def books() -> tuple[Any, ...]:
    """What this process holds, of what a dead peer could have left here."""
    gc.collect()
    objects = {name: driver.live() for name, driver in drivers._drivers.items()}
    live = {} if standin.missing() else {k: n for k, n in standin.Standin().live().items() if "context" not in k}
    return len(os.listdir("/proc/self/fd")), objects, live


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as directory:
        yield f"{directory}/lent"
    close_clients()


@pytest.fixture
def sources() -> Iterator[Sources]:
    with Sources() as made:
        yield made


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        pytest.param("pool", 2, marks=pytest.mark.standin),
        *(pytest.param(kind, 1, marks=SLOW) for kind in ("host", "legacy", "pool")),
    ],
)
def test_a_borrower_killed_before_any_message_holds_nothing(
    kind: str, stride: int, path: str, sources: Sources
) -> None:
    """Borrowing, listening for revocation, looking and releasing: the lender goes on, and so do others."""
    x = sources.make(kind)
    with vram.lend(x, at=path) as lending:
        before = books()
        for step in range(0, 100, stride):
            with Running(STOPPED, step, "borrow", path) as borrower:
                where = borrower.line()
                assert where.startswith(f"at {step}") or where == "end"
                assert len(lending.holders()) <= 1
                killed = borrower.kill()
            until(lambda: lending.holders() == [], what="the end of the victim's lease")
            assert time.monotonic() - killed < AT_ONCE
            until(lambda: books() == before, what="the end of what it had")
            if where == "end":
                break
        assert step > 4


@pytest.mark.parametrize(
    ("kind", "stride"), [("host", 2), *(pytest.param(kind, 1, marks=SLOW) for kind in ("host", "legacy", "pool"))]
)
def test_a_lender_killed_before_any_message_is_gone_at_once(kind: str, stride: int, path: str) -> None:
    """Whoever borrows from it then: nobody hangs, and what goes by descriptor stays."""
    with Sources() as warm:
        warm.make("host" if kind == "host" else "legacy")
        ended = 0
        for step in range(0, 100, stride):
            before = books()
            outcome: list[Any] = []
            with Running(STOPPED, step, "lend", path, kind) as lender:
                assert lender.line() == "lent"
                thread = threading.Thread(target=use, args=(path, kind, outcome))
                thread.start()
                wait_for_either(outcome, lender)
                lender.tell()  # it asks for the memory back, if it still can
                where = lender.line()
                killed = lender.kill()
            thread.join(SOON)
            assert not thread.is_alive(), f"hangs after {where}"
            assert outcome[-1][0] in ("read", "gone"), outcome
            assert outcome[-1][1] - killed < AT_ONCE, f"{outcome} after {where}"
            close_clients()
            os.unlink(path) if os.path.exists(path) else None
            until(lambda before=before: books() == before, what="the return of what was borrowed")
            ended += where == "end"
            if ended:
                assert outcome[-1][0] == "read", "who is told in time is not disturbed"
                break
        assert step > 6


def wait_for_either(outcome: list[Any], lender: Running) -> None:
    """Until it was borrowed, or the lender has stopped."""
    until(lambda: outcome or select.select([lender.stdout], [], [], 0)[0], seconds=SOON)


def use(path: str, kind: str, outcome: list[Any]) -> None:
    """Borrow, and use it until the lender wants it back or is gone."""
    try:
        with vram.borrow(path, timeout=5) as lease:
            told = threading.Event()
            lease.on_revoke(lambda lease: told.set())
            assert (lease.array.to_host() == numbers()).all()
            outcome.append(("holds", time.monotonic()))
            while not told.wait(0.01):
                lease.is_stale()
            if kind == "host":
                assert (lease.array.to_host() == numbers()).all()
        outcome.append(("read", time.monotonic()))
    except (PeerGoneError, WaitTimeoutError) as error:
        outcome.append(("gone", time.monotonic(), str(error)))
    except VramError as error:
        outcome.append(("failed", time.monotonic(), repr(error)))


@pytest.mark.parametrize(
    ("what", "kind", "stride"),
    [
        pytest.param("send", "legacy", 2, marks=pytest.mark.standin),
        pytest.param("receive", "pool", 2, marks=pytest.mark.standin),
        *(pytest.param(what, kind, 1, marks=SLOW) for what in ("send", "receive") for kind in ("host", "pool")),
    ],
)
def test_an_end_of_a_channel_killed_before_any_message(what: str, kind: str, stride: int) -> None:
    """In the midst of descriptors, handles, arrays that come back and what is told of dropped ones."""
    with Sources() as sources:
        x = sources.make(kind)
        before: Any = None
        for step in (1000, *range(0, 100, stride)):  # once to the end: what is made then stays, and is no leak
            raw, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with vram.ArrayChannel(Channel(raw)) as channel:
                with Running(STOPPED, step, what, Inherited(theirs.fileno()), kind) as other:
                    theirs.close()
                    outcome: list[Any] = []
                    thread = threading.Thread(target=converse, args=(channel, what, x, outcome))
                    thread.start()
                    where = other.line()
                    killed = other.kill()
                thread.join(SOON)
                assert not thread.is_alive(), f"hangs after {where}"
                assert outcome[0][0] in ("done" if where == "end" else "done gone"), outcome
                assert outcome[0][1] - killed < AT_ONCE, outcome
                outcome.clear()
            if before is None:
                before = books()
            until(lambda before=before: books() == before, what=f"the return of all after {where}")
            if where == "end" and step < 1000:
                break
        # Memory of the host has nobody to be told that it was dropped: what the receiver says is fewer messages.
        assert step >= (3 if (what, kind) == ("receive", "host") else 5)


def receive(channel: vram.ArrayChannel) -> Any:
    """Receive; memory whose maker is dead by then cannot be opened any more."""
    while True:
        with contextlib.suppress(ProtocolError):
            return channel.recv(timeout=SOON)


def converse(channel: vram.ArrayChannel, what: str, x: Any, outcome: list[Any]) -> None:
    """The other side of what the victim does."""
    try:
        if what == "send":
            while (array := receive(channel)) is not None:
                array.to_host()
                if len(array) > 10:
                    channel.send(array)
                del array
            channel.send("done")
        else:
            mine = vram.share(x)
            for _ in range(2):
                channel.send(mine)
                assert channel.recv(timeout=SOON) is mine
            channel.send(mine[10:20])
            channel.send(None)
            assert channel.recv(timeout=SOON) == "done"
        outcome.append(("done", time.monotonic()))
    except PeerGoneError:
        outcome.append(("gone", time.monotonic()))
    except BaseException as error:
        outcome.append(("failed", time.monotonic(), repr(error)))
