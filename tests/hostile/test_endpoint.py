"""What another user does to a process that pickles arrays: its endpoint has a name that all can read and connect to.

What hangs here hangs for as long as a socket lingers, or until its peer is closed at the end of the test.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.support import peers
from tests.support.deadlines import SOON, until
from tests.support.memfds import memfds
from tests.support.other_users import OTHER, _become
from tests.support.peers import lingering
from tests.support.pickles import dumps, dumps_for, knock, loads, rows

from vram.errors import ProtocolError
from vram.handover import pickling
from vram.handover.pickling import Endpoint, endpoint
from vram.keeper.bind import Listener
from vram.sharing import channel as channel_module
from vram.sharing.channel import Channel, Credentials, peer_credentials
from vram.sharing.unread import _PASSRIGHTS

SERVED = b"\x92\xa1m"  # how an answer begins
LEAST, TIMES = 0.005, 20  # seconds of a rest, and how often it is what refusing took: half of what is meant
LINGERS = 20  # seconds that a socket takes to close; what does not wait for it takes less than half of that


def refuses_rights() -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.getsockopt(socket.SOL_SOCKET, _PASSRIGHTS)
        except OSError:
            return False
    return True


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user")
needs_rights = pytest.mark.skipif(not refuses_rights(), reason="SO_PASSRIGHTS came with Linux 6.16")


@pytest.fixture(autouse=True)
def lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LINGER", LINGERS)


@pytest.fixture
def serving() -> Iterator[Endpoint]:
    with rows() as array:
        dumps(array)
        yield endpoint()
        pickling.shut_down()


@pytest.fixture(params=["before Linux 6.16", pytest.param("from 6.16 on", marks=needs_rights)])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have descriptors pass, as they do where the kernel cannot be told otherwise, or not."""
    if request.param == "before Linux 6.16":
        for module in (pickling, channel_module):
            monkeypatch.setattr(module, "pass_rights", lambda *_: None)
    return str(request.param)


@contextlib.contextmanager
def stranger(act: Callable[[Callable[[bytes], None]], object]) -> Iterator[int]:
    """Have another process of another user do something, to its end; yield where it says more. It keeps what it
    has open until the end of the block."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            _become(OTHER)
            kept = act(lambda said: os.write(writer, said) and None)
            os.write(writer, b"r")
            time.sleep(60)
            assert kept
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 1) == b"r", "the stranger failed"
        yield reader
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def to(address: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(address)
    return sock


def attempt(sock: socket.socket, fd: int) -> bool:
    """Whether a descriptor was sent."""
    try:
        socket.send_fds(sock, [b""], [fd])
    except PermissionError:
        return False
    return True


def let_go(fd: int) -> None:
    """Close a socket that lingers, which is ours alone if nobody took it."""
    with socket.socket(fileno=fd) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))


@contextlib.contextmanager
def busy(serving: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The endpoint's thread is at something until the end of the block: whoever connects waits to be accepted."""
    entered, go_on = threading.Event(), threading.Event()
    really = serving.flights.land

    def land(memory: int, times: int, by: int = 0) -> None:
        entered.set()
        assert go_on.wait(SOON)
        really(memory, times, by)

    with to(serving.address) as sock, monkeypatch.context() as patch:
        patch.setattr(serving.flights, "land", land)
        sock.send(msgspec.msgpack.encode(["took", 99, 1]))
        assert entered.wait(SOON)
        try:
            yield
        finally:
            go_on.set()


def is_closing() -> bool:
    return any(thread.name in ("vram: refused", "vram: closing") for thread in threading.enumerate())


# -- what is sent to an endpoint ------------------------------------------------------------------------------------
@needs_root
@needs_rights
def test_nobody_sends_an_endpoint_descriptors(serving: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before it accepts, from whomever; nor afterwards, since no request brings any."""
    with memfds(1) as (fd,):
        with to(serving.address) as mine:
            mine.send(msgspec.msgpack.encode(["fetch", 1, 0]))
            assert mine.recv(3) == SERVED
            assert not attempt(mine, fd), "one of its own user, after it was accepted"

        def act(say: Callable[[bytes], None]) -> object:
            sock = to(serving.address)
            assert not attempt(sock, fd)
            return sock

        with busy(serving, monkeypatch), stranger(act), to(serving.address) as mine:
            assert not attempt(mine, fd), "one of its own user, before it was accepted"


@needs_root
def test_a_strangers_socket_that_lingers_hangs_no_endpoint(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent before the endpoint accepts, which then closes what is unread with the connection."""
    pickling.shut_down()  # one that was made as the kernel is now
    with rows() as array, lingering() as fd:
        dumps(array)
        serving = endpoint()

        def act(say: Callable[[bytes], None]) -> object:
            sock = to(serving.address)
            return sock, attempt(sock, fd) is (kernel == "before Linux 6.16") or os._exit(1)

        with contextlib.ExitStack() as stack:
            with busy(serving, monkeypatch):
                stack.enter_context(stranger(act))
                stack.close()  # the stranger has gone, and what it sent is there
                if kernel == "before Linux 6.16":
                    os.close(fd)
                else:
                    let_go(fd)
            started = time.monotonic()
            assert knock(serving.address) == SERVED, "everybody else is served"
            assert time.monotonic() - started < LINGERS / 2, "it was closed in the endpoint's thread"
            assert is_closing() is (kernel == "before Linux 6.16")
    until(lambda: not is_closing())
    pickling.shut_down()


# -- whom an endpoint or a client connects to -----------------------------------------------------------------------
@needs_root
def test_a_stranger_at_the_address_of_a_sender_that_is_gone_hangs_nobody(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is free again, for anybody. What it sends at once is there before it is known for a stranger."""
    address = f"\0vram-{secrets.token_hex(12)}"

    with rows() as array, lingering() as fd:
        dumps(array)  # has an endpoint: what is timed begins with the connection

        def act(say: Callable[[bytes], None]) -> object:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(address)
            listener.listen()
            say(b"r")
            sock, _ = listener.accept()
            say(b"y" if attempt(sock, fd) else b"n")
            os.close(fd) if kernel == "before Linux 6.16" else let_go(fd)
            say(b"d")
            return listener, sock

        with stranger(act) as reader:
            sent = []

            def late(sock: socket.socket) -> Credentials:
                sent.append(os.read(reader, 1))
                assert os.read(reader, 1) == b"d"
                os.close(fd) if kernel == "before Linux 6.16" else let_go(fd)
                return peer_credentials(sock)

            monkeypatch.setattr(channel_module, "peer_credentials", late)
            started = time.monotonic()
            with pytest.raises(ProtocolError, match="served by another user"):
                loads(dumps_for(address))
            assert time.monotonic() - started < LINGERS / 2, "the connection was closed in its caller's thread"
            assert sent == [b"y" if kernel == "before Linux 6.16" else b"n"]
            assert is_closing() is (kernel == "before Linux 6.16")
    until(lambda: not is_closing())
    pickling.shut_down()


@needs_rights
def test_nobody_sends_a_lender_or_keeper_descriptors_before_it_is_heard(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The socket refuses them from before it is at its path."""
    listener = Listener(str(tmp_path_factory.mktemp("k") / "k"))
    try:
        with memfds(1) as (fd,), to(listener.path) as sock:
            assert not attempt(sock, fd)
    finally:
        listener.unlink()
        listener.sock.close()


def test_a_channel_with_unread_descriptors_that_linger_is_closed_at_once() -> None:
    one, other = Channel.pair()
    with lingering() as fd, one:
        one.send(b"unread")
        one.send(b"with", [fd])
        os.close(fd)
        started = time.monotonic()
        other.close()
        assert time.monotonic() - started < LINGERS / 2, "it was closed in the thread of who closed the channel"
        assert is_closing()
    until(lambda: not is_closing())
