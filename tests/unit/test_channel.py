"""What the contract of channels cannot see from outside: truncation, forks, limits, connecting to the wrong thing."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON, until
from tests.support.forked import forked, refused
from tests.support.limits import limited
from tests.support.memfds import memfds
from tests.support.places import short_directory

from vram.errors import (
    AccessDeniedError,
    ClosedError,
    DriverError,
    PeerGoneError,
    ProtocolError,
    UsageError,
    WaitTimeoutError,
)
from vram.sharing import channel as module
from vram.sharing.channel import MAX_MESSAGE, MAX_PATH, Channel, Credentials, DescriptorsLostError


@pytest.fixture
def place() -> Iterator[Path]:
    with short_directory() as directory:
        yield Path(directory)


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    """A socket that can misbehave, connected to a channel."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, Channel(other) as channel:
        yield one, channel


def test_i9_a_message_that_is_too_long_is_refused_and_its_descriptors_closed(
    raw: tuple[socket.socket, Channel],
) -> None:
    sock, channel = raw
    with memfds(2) as fds:
        socket.send_fds(sock, [b"x" * (MAX_MESSAGE + 1)], fds)
        socket.send_fds(sock, [b"x" * (MAX_MESSAGE + 1000)], fds)
    before = os.listdir("/proc/self/fd")
    for _ in range(2):
        with pytest.raises(ProtocolError, match=f"longer than {MAX_MESSAGE}") as caught:
            channel.recv(timeout=SOON)
        assert type(caught.value) is ProtocolError, "its descriptors are not to blame"
        assert len(os.listdir("/proc/self/fd")) == len(before), f"as long as the error is kept: {caught.value}"
    sock.send(b"and on")
    assert channel.recv(timeout=SOON) == (b"and on", [])


def test_i9_descriptors_without_room_are_an_error_and_all_are_closed(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    with memfds(8) as fds:
        channel_first = max(*fds, channel.fileno(), sock.fileno()) + 1
        socket.send_fds(sock, [b"eight"], fds)
        said = r"room for its descriptors: \d of .*RLIMIT_NOFILE"
        with limited(resource.RLIMIT_NOFILE, channel_first + 3):
            with pytest.raises(DescriptorsLostError, match=said) as caught:
                channel.recv(timeout=SOON)
        assert caught.value.payload == b"eight"
        sock.send(b"and on")
        assert channel.recv(timeout=SOON) == (b"and on", [])


def test_no_room_for_a_socket_names_the_limit(place: Path) -> None:
    with limited(resource.RLIMIT_NOFILE, 0):
        for call in (Channel.pair, lambda: Channel.connect(str(place / "k"), 1.0)):
            with pytest.raises(DriverError, match="RLIMIT_NOFILE is 0") as caught:
                call()
            assert (caught.value.code, caught.value.name) == (errno.EMFILE, "EMFILE")


@pytest.mark.parametrize("timeout", [2.2e6, 1e9, 1e300, float("inf")])
def test_a_very_long_time_is_waited(raw: tuple[socket.socket, Channel], place: Path, timeout: float) -> None:
    sock, channel = raw
    late = threading.Timer(0.05, lambda: sock.send(b"late"))
    late.start()
    assert channel.recv(timeout=timeout)[0] == b"late"
    late.join(SOON)
    sent = 0
    with contextlib.suppress(WaitTimeoutError):
        while True:
            channel.send(b"full", timeout=0)
            sent += 1
    sock.settimeout(SOON)
    late = threading.Timer(0.05, lambda: [sock.recv(100) for _ in range(sent)])  # room is told of when most is free
    late.start()
    channel.send(b"x", timeout=timeout)
    late.join(SOON)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place / "k"))
        listener.listen()
        Channel.connect(str(place / "k"), timeout).close()


def test_a_wait_longer_than_one_poll_goes_on(
    raw: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DAY", 0.01)
    sock, channel = raw
    with pytest.raises(WaitTimeoutError):
        channel.recv(timeout=0.05)
    late = threading.Timer(0.05, lambda: sock.send(b"late"))
    late.start()
    assert channel.recv(timeout=SOON)[0] == b"late"
    late.join(SOON)


@pytest.mark.parametrize("timeout", [None, SOON])
def test_who_waits_on_a_connection_that_was_made_here_hears_of_its_end(place: Path, timeout: float | None) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place / "k"))
        listener.listen()
        with Channel.connect(str(place / "k"), SOON) as channel:
            far, _ = listener.accept()
            with far:
                with pytest.raises(WaitTimeoutError):
                    channel.recv(timeout=0.05)
                late = threading.Timer(0.05, lambda: far.send(b"late"))
                late.start()
                assert channel.recv(timeout=timeout)[0] == b"late"
                late.join(SOON)
                closed = threading.Timer(0.05, channel.close)
                closed.start()
                with pytest.raises(ClosedError):
                    channel.recv(timeout=timeout)
                closed.join(SOON)


@pytest.mark.parametrize("timeout", [float("nan"), -1, -0.001, "1", 1j, [], float("-inf"), True])
def test_what_is_no_time_to_wait_is_refused(raw: tuple[socket.socket, Channel], timeout: float) -> None:
    for call in (
        lambda: raw[1].recv(timeout=timeout),
        lambda: raw[1].send(b"x", timeout=timeout),
        lambda: Channel.connect("/nowhere", timeout),
    ):
        with pytest.raises(UsageError, match="number of seconds"):
            call()


def test_an_empty_message_reads_as_the_end(raw: tuple[socket.socket, Channel]) -> None:
    sock, channel = raw
    with memfds(1) as fds:
        socket.send_fds(sock, [b""], fds)
    with pytest.raises(PeerGoneError):
        channel.recv(timeout=SOON)


def test_descriptors_in_flight_beyond_the_users_limit_are_waited_for(
    raw: tuple[socket.socket, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, channel = raw
    tries = []
    really = module.transmit

    def transmit(*arguments: object) -> None:
        tries.append(arguments)
        if len(tries) < 3:
            raise OSError(errno.ETOOMANYREFS, "Too many references")
        really(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "transmit", transmit)
    channel.send(b"at last", [0], timeout=SOON)
    assert len(tries) == 3


def test_i7_a_channel_is_closed_in_a_forked_child_and_the_parents_is_not(
    raw: tuple[socket.socket, Channel],
) -> None:
    sock, channel = raw
    with forked(lambda: refused(lambda: channel.send(b"from the child")), before=sock.close) as child:
        channel.send(b"from the parent")
        assert sock.recv(100) == b"from the parent"
        channel.close()
        sock.settimeout(SOON)
        assert sock.recv(100) == b"", "the child holds the parent's connection open"
        assert child.end() == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_who_is_there_is_told_apart_by_user_and_group(place: Path) -> None:
    """As the kernel noted it when they connected, or began to listen."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place / "s"))
        os.chmod(place, 0o755)
        os.chmod(place / "s", 0o666)
        listener.settimeout(SOON)
        os.setegid(23456)
        try:
            listener.listen()
            os.seteuid(12345)
            connected = Channel.connect(str(place / "s"), SOON)
        finally:
            os.seteuid(0)
            os.setegid(0)
        with connected, Channel(listener.accept()[0]) as accepted:
            assert accepted.peer() == Credentials(os.getpid(), uid=12345, gid=23456)
            assert connected.peer() == Credentials(os.getpid(), uid=0, gid=23456)


def test_one_that_is_dropped_is_closed_without_a_word() -> None:
    one, other = Channel.pair()
    del one
    gc.collect()
    with pytest.raises(PeerGoneError):
        other.recv(timeout=SOON)
    other.close()


def test_only_sockets_of_the_right_kind_become_channels() -> None:
    for family, kind in ((socket.AF_UNIX, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_STREAM)):
        with socket.socket(family, kind) as sock:
            with pytest.raises(UsageError, match="SEQPACKET"):
                Channel(sock)


def test_another_kind_of_server(place: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(place / "s"))
        listener.listen()
        with pytest.raises(ProtocolError, match="another kind"):
            Channel.connect(str(place / "s"), 1.0)


def test_a_path_that_is_too_long_is_refused_by_name(place: Path) -> None:
    path = str(place / ("x" * MAX_PATH))
    with pytest.raises(UsageError, match="107"):
        Channel.connect(path)
    with pytest.raises(UsageError):
        Channel.connect("")
    with pytest.raises(UsageError, match="no file name"):
        Channel.connect("\ud800")


def test_a_listener_that_accepts_nobody_is_not_waited_for_for_ever(place: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place / "s"))
        listener.listen(0)
        connected = []
        try:
            with contextlib.suppress(WaitTimeoutError):
                while len(connected) < 10:
                    connected.append(Channel.connect(str(place / "s"), 0.05))
            assert len(connected) < 10
        finally:
            for channel in connected:
                channel.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_a_path_that_keeps_this_user_out(place: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(place / "s"))
        listener.listen()
        os.chmod(place, 0o755)
        os.chmod(place / "s", 0o600)
        seen: list[BaseException] = []

        def connect() -> None:
            os.setegid(12345)
            os.seteuid(12345)
            try:
                Channel.connect(str(place / "s"), 1.0)
            except BaseException as error:
                seen.append(error)

        try:
            connect()
        finally:
            os.seteuid(0)
            os.setegid(0)
        assert [type(error) for error in seen] == [AccessDeniedError]


def test_closing_what_is_closed_closes_the_rest() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    module.close_fds([reader, writer])
    # A pipe is closed in another thread, which is waited for no more than a moment.
    until(lambda: not os.path.exists(f"/proc/self/fd/{writer}"), what="the end of the pipe")
