"""A keeper in a thread of this process: its limits, and its clock, are the test's to choose."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import serving
from tests.support.memfds import memfds
from tests.support.servers import connect, make

from vram.errors import (
    AccessDeniedError,
    BusyError,
    NotFoundError,
    ProtocolError,
    QuotaError,
    UnsupportedError,
    VramError,
    WaitTimeoutError,
)
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient
from vram.keeper.leases import Segment
from vram.keeper.private import short_directory
from vram.keeper.restart import take_over
from vram.keeper.server import KeeperServer
from vram.open_files import close_fds
from vram.sharing.channel import Channel

KIB4 = Segment(4096)


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as place:
        yield f"{place}/k"


def test_one_user_has_at_most_half_of_the_connections(path: str) -> None:
    with serving(make(path)) as server, contextlib.ExitStack() as stack:
        one, *_ = [connect(stack, path) for _ in range(3)]
        with pytest.raises(
            QuotaError, match=rf"uid {os.geteuid()} may hold 3 connections .*holds 3 and would hold 4; .*half of all"
        ):
            connect(stack, path)
        one.close()
        until(lambda: server.by_user == {os.geteuid(): 2}, what="the end of the connection")
        assert connect(stack, path).statistics().connections == 3


def test_a_connection_that_ended_makes_room_for_one_of_the_same_user(path: str) -> None:
    with serving(make(path)) as server, contextlib.ExitStack() as stack:
        for _ in range(20):
            one = connect(stack, path)
            one.close()
            until(lambda: not server.by_user, what="the end of the connection")
        for _ in range(3):
            connect(stack, path)


def test_the_keepers_own_user_has_all_connections(path: str) -> None:
    with serving(make(path, uid=os.geteuid())), contextlib.ExitStack() as stack:
        for _ in range(6):
            connect(stack, path)
        with pytest.raises(QuotaError, match="the keeper may hold 6 connections"):
            connect(stack, path)


def test_one_user_has_at_most_half_of_the_descriptors(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 512))
    server = make(path)
    most = server.catalogue.accounts.quotas.max_descriptors
    assert most is not None
    assert 200 < most < 300, "what is left of 512"
    with serving(server), contextlib.ExitStack() as stack:
        one = connect(stack, path)
        one.offer("w", 4096, handles=most // 2)
        with pytest.raises(QuotaError, match=rf"descriptors more: uid {os.geteuid()} may hold {most // 2}"):
            one.offer("w", 4096, handles=most // 2 + 1)
    with serving(make(path, uid=os.geteuid())), contextlib.ExitStack() as stack:
        one = connect(stack, path)
        one.offer("w", 4096, handles=most // 2 + 1)
        with pytest.raises(QuotaError, match="descriptors more: the keeper may hold"):
            one.offer("w", 4096, handles=most + 1)


def test_what_falls_due_during_a_takeover_is_done_by_the_successor(path: str) -> None:
    """A time to live, and a wait: the successor's clock is an hour ahead, so both are over when it begins."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(make(path)))
        one, other = connect(stack, path), connect(stack, path)
        with memfds(1) as fds:
            one.publish("brief", [KIB4], fds, ttl=1800.0)
            one.publish("lasting", [KIB4], fds, ttl=7200.0)
        waited: list[BaseException] = []

        def wait() -> None:
            try:
                other.attach("late", timeout=1800.0)
            except WaitTimeoutError as error:
                waited.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        try:
            until(lambda: one.statistics().waiting == 1, what="the wait")
            assert [entry.name for entry in one.list()] == ["brief", "lasting"]
            successor = make(path)
            successor.now = lambda: time.monotonic() + 3600
            assert take_over(successor)
            stack.enter_context(serving(successor))
            until(lambda: [entry.name for entry in one.list()] == ["lasting"], what="the end of the time to live")
            until(lambda: waited, what="the end of the wait")
            assert "late" in str(waited[0])
        finally:
            other.close()
            waiting.join(SOON)
        with pytest.raises(NotFoundError):
            one.attach("brief")
        close_fds(one.attach("lasting").fds)


@pytest.mark.parametrize("passes", [False, True], ids=["Linux 6.16", "before"])
def test_who_is_refused_may_have_sent_descriptors(path: str, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Linux 6.16 on the kernel lets none through before the greeting; before, they are closed elsewhere."""
    if passes:
        for module in ("bind", "server"):
            monkeypatch.setattr(f"vram.keeper.{module}.pass_rights", lambda *_: None)
    server = make(path, connections=2)
    elsewhere: list[object] = []
    put = server.closer.put
    monkeypatch.setattr(server.closer, "put", lambda task: elsewhere.append(task) or put(task))
    with serving(server), contextlib.ExitStack() as stack:
        one = connect(stack, path)
        late = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        sent, come = threading.Event(), threading.Event()

        def send() -> None:  # in the keeper's thread, so that it is all there before it is accepted
            late.connect(path)
            with contextlib.suppress(PermissionError), open("/dev/null", "rb") as file:
                socket.send_fds(late, [b"x"], [file.fileno()])
                sent.set()
            come.set()

        server.loop.call_soon_threadsafe(send)
        assert come.wait(SOON)
        assert sent.is_set() or not passes
        late.settimeout(SOON)
        said = b""
        with contextlib.suppress(ConnectionResetError):  # it may be told first that what it sent was not read
            said = late.recv(4096)
        said = said or late.recv(4096)
        assert b"may hold 1 connection (--max-connections-per-user), holds 1" in said
        until(lambda: bool(elsewhere) == sent.is_set(), what="the end of the refused one")
        one.close()
        until(lambda: not server.by_user, what="the end of the connection")
        assert connect(stack, path).statistics().connections == 1


# -- over a takeover ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (m.Error(1, "BusyError", "it has no time"), BusyError, "it has no time"),
        (m.Error(1, "AccessDeniedError", "not by you"), AccessDeniedError, "not by you"),
        (m.Descriptors(1, 0), ProtocolError, "Descriptors was said where HandOver was due"),
    ],
)
def test_a_keeper_that_is_not_handed_over_says_why(
    path: str, answer: object, error: type[VramError], words: str
) -> None:
    """And the successor leaves it alone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(1)

        def be_a_keeper() -> None:
            sock, _ = listener.accept()
            with Channel(sock) as channel:
                channel.recv(timeout=SOON)
                channel.send(m.encode(m.Welcome(os.getpid())), timeout=SOON)
                channel.recv(timeout=SOON)
                with memfds(1) as fds:
                    channel.send(m.encode(answer), fds if isinstance(answer, m.HandOver) else [], timeout=SOON)
                with contextlib.suppress(VramError):
                    channel.recv(timeout=SOON)

        thread = threading.Thread(target=be_a_keeper)
        thread.start()
        try:
            with pytest.raises(error, match=words):
                take_over(make(path))
        finally:
            thread.join(SOON)
        assert os.path.exists(path)


def test_a_keeper_that_cannot_hand_over_says_so_and_serves_on(path: str) -> None:
    with serving(KeeperServer(path, raises_limit=False)), KeeperClient.connect(path) as client:
        with pytest.raises(UnsupportedError, match=f"started by `vram keep`; have one inside of pid {os.getpid()}"):
            take_over(KeeperServer(path, raises_limit=False))
        assert client.list() == []
