"""Carriers and readers that name no key: other users of the machine are neither let in nor believed."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (what a child of another user looks addresses up by, and may not read)
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.carried import Nodes, carrying, nodes
from tests.support.carriers import honest, properly
from tests.support.deadlines import SOON
from tests.support.other_users import OTHER, as_user, needs_root
from tests.support.own_keys import child, home_of

import vram
from vram.errors import AccessDeniedError, UsageError, VramError
from vram.nodes import messages as m
from vram.nodes.carrier import Carrier
from vram.nodes.connection import Connection, _prove, connect
from vram.nodes.own_key import own_key, own_key_path
from vram.nodes.server import Server

pytestmark = pytest.mark.slow  # goes with carriers without a key

OWN = "key=, --key or"


@pytest.fixture
def two() -> Iterator[Nodes]:
    with nodes() as found:
        yield found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's settings that have nothing of ours yet."""
    place = tmp_path / "settings"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place))
    return place


def as_other(act: Callable[[], object]) -> object:
    """Do something as another user, who has a home of their own."""
    with home_of(OTHER) as place:

        def there() -> object:
            os.environ["XDG_CONFIG_HOME"] = place
            return act()

        return as_user(OTHER, there)


# -- other users ------------------------------------------------------------------------------------------------------
@needs_root
def test_another_user_is_not_let_in(two: Nodes) -> None:
    """Whoever could connect to the loopback address was sent all that the carrier's user may attach."""
    vram.publish("model", {"w": np.ones(10, np.uint8)}, keeper=two.origin)
    with carrying(two.origin) as (_, address):
        kind, said = as_other(lambda: connect(address, b"", SOON).ask(m.Open("model", 0, b"r" * 16), SOON))  # type: ignore[misc]
        assert kind is AccessDeniedError
        assert OWN in said
        assert vram.replicate(address, "model", keeper=two.here).version == 1


@needs_root
def test_another_user_who_listens_in_the_carriers_place_is_not_believed(two: Nodes) -> None:
    """What it said was published as the carrier's, with the carrier's address as its origin."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def listen(ready: int) -> None:
        def serve(connection: Connection) -> None:
            while True:
                reply = properly(m.decode_request(connection.receive(SOON)), connection, honest())
                if reply is not None:
                    connection.send(reply, SOON)

        server = Server("127.0.0.1", port, b"", serve)
        server.open()
        os.write(ready, b"r")
        threading.Event().wait(SOON)
        server.close()

    with home_of(OTHER) as place, child(listen, place):
        with pytest.raises(AccessDeniedError, match=OWN):
            vram.replicate(f"127.0.0.1:{port}", "model", keeper=two.here)
    assert vram.list_entries(keeper=two.here) == []


@pytest.mark.parametrize("claims", [True, False], ids=["says that it has the key", "says that it has none"])
def test_whoever_cannot_show_the_key_is_not_believed(two: Nodes, claims: bool) -> None:
    """Such as a carrier of before there was always a key, and whoever takes that part."""

    def accept(listener: socket.socket) -> None:
        connection = Connection(listener.accept()[0])
        with contextlib.suppress(VramError), connection:
            m.decode_greeting(connection.receive(SOON))
            connection.send(m.Challenge(b"n" * 32, claims), SOON)
            connection.receive(SOON)
            connection.send(m.Accepted(b"m" * 32), SOON)
            connection.receive(SOON)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        with pytest.raises(AccessDeniedError, match="does not have the key" if claims else "has no key") as raised:
            vram.replicate(f"127.0.0.1:{listener.getsockname()[1]}", "model", keeper=two.here)
        assert OWN in str(raised.value)
        thread.join(SOON)
        assert not thread.is_alive()


def test_a_reader_that_says_it_has_no_key_is_not_let_in(two: Nodes) -> None:
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        host, _, port = carrier.address.rpartition(":")
        with Connection(socket.create_connection((host, int(port)), SOON)) as connection:
            hello = m.Hello(m.PROTOCOL, b"n" * 32, False)
            connection.send(hello, SOON)
            challenge = m.decode_greeting(connection.receive(SOON))
            assert isinstance(challenge, m.Challenge)
            connection.send(m.Proof(_prove(b"", b"reader", m.encode(hello) + m.encode(challenge))), SOON)
            said = m.decode_greeting(connection.receive(SOON))
            assert isinstance(said, m.Refused)
            assert OWN in said.message


# -- the file ---------------------------------------------------------------------------------------------------------
def test_it_is_made_once_and_is_this_users_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        key = own_key()
    finally:
        os.umask(before)
    path = own_key_path()
    assert path == home / "vram" / "nodes.key"
    assert (path.stat().st_mode & 0o7777, path.parent.stat().st_mode & 0o7777) == (0o600, 0o700)
    assert len(key) == 32
    assert own_key() == key == path.read_bytes()
    assert os.listdir(path.parent) == ["nodes.key"]


def test_processes_that_make_it_at_the_same_time_have_the_same(home: Path) -> None:
    program = "import sys; from vram.nodes.own_key import own_key; sys.stdin.read(1); print(own_key().hex())"
    children = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    for one in children:
        assert one.stdin is not None
        one.stdin.write("x")
        one.stdin.flush()
    said = {one.communicate(timeout=SOON)[0] for one in children}
    assert said == {own_key().hex() + "\n"}


def test_where_another_one_made_it_first_that_is_the_key(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def link(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool) -> None:
        monkeypatch.setattr(os, "link", real)
        first.append(own_key())
        real(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)

    first: list[bytes] = []
    monkeypatch.setattr(os, "link", link)
    assert [own_key()] == first
    assert os.listdir(own_key_path().parent) == ["nodes.key"]


def a_link_to_a_directory(place: Path) -> None:
    (place.parent / "elsewhere").mkdir(0o700)
    place.mkdir()
    (place / "vram").symlink_to(place.parent / "elsewhere")


def a_directory_that_others_may_write(place: Path) -> None:
    (place / "vram").mkdir(parents=True)
    (place / "vram").chmod(0o777)


def a_link_to_a_file(place: Path) -> None:
    own_key()
    own_key_path().rename(place / "elsewhere")
    own_key_path().symlink_to(place / "elsewhere")


def a_file_that_others_may_read(place: Path) -> None:
    own_key()
    own_key_path().chmod(0o644)


def a_pipe(place: Path) -> None:
    own_key()
    own_key_path().unlink()
    os.mkfifo(own_key_path(), 0o600)


def an_empty_file(place: Path) -> None:
    own_key()
    own_key_path().write_bytes(b"")


def a_directory_of_another_user(place: Path) -> None:
    (place / "vram").mkdir(0o700, parents=True)
    os.chown(place / "vram", OTHER, OTHER)


def settings_of_another_user(place: Path) -> None:
    place.mkdir(0o700)
    os.chown(place, OTHER, OTHER)


def settings_that_others_may_write(place: Path) -> None:
    place.mkdir(0o700)
    place.chmod(0o770)


def above_them_others_may_write(place: Path) -> None:
    place.mkdir(0o700)
    place.parent.chmod(0o777)


def a_home_of_another_user_without_settings(place: Path) -> None:
    os.chown(place.parent, OTHER, OTHER)


def a_link_of_another_user(place: Path) -> None:
    """To root's own directory: what was made there, root had not chosen (by ``su -m``, which keeps HOME)."""
    (place.parent / "etc").mkdir(0o700)
    place.symlink_to(place.parent / "etc")
    os.lchown(place, OTHER, OTHER)
    place.parent.chmod(0o1777)


def a_link_of_another_user_to_nothing(place: Path) -> None:
    place.symlink_to(place.parent / "made" / "by")
    os.lchown(place, OTHER, OTHER)
    place.parent.chmod(0o1777)


def links_in_a_circle(place: Path) -> None:
    place.symlink_to(place)


def a_file_of_another_user(place: Path) -> None:
    own_key()
    os.chown(own_key_path(), OTHER, OTHER)


ODD = [
    a_link_to_a_directory,
    a_directory_that_others_may_write,
    a_link_to_a_file,
    a_file_that_others_may_read,
    a_pipe,
    an_empty_file,
    settings_that_others_may_write,
    above_them_others_may_write,
    links_in_a_circle,
    pytest.param(a_home_of_another_user_without_settings, marks=needs_root),
    pytest.param(a_link_of_another_user, marks=needs_root),
    pytest.param(a_link_of_another_user_to_nothing, marks=needs_root),
    pytest.param(a_directory_of_another_user, marks=needs_root),
    pytest.param(settings_of_another_user, marks=needs_root),
    pytest.param(a_file_of_another_user, marks=needs_root),
]


@pytest.mark.parametrize("odd", ODD)
def test_what_others_could_have_put_there_is_no_key(
    home: Path, odd: Callable[[Path], None], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: os.chown(home.parent, os.geteuid(), -1))
    odd(home)
    before = sorted(str(one) for one in home.parent.rglob("*"))
    with pytest.raises((AccessDeniedError, UsageError)):
        own_key()
    assert sorted(str(one) for one in home.parent.rglob("*")) == before


def test_links_of_ones_own_are_followed(home: Path) -> None:
    (home.parent / "real").mkdir(0o700)
    os.symlink("middle", home)
    (home.parent / "middle").symlink_to(home.parent / "real")
    key = own_key()
    assert (home.parent / "real" / "vram" / "nodes.key").read_bytes() == key


def test_without_a_home_a_key_has_to_be_named(monkeypatch: pytest.MonkeyPatch, two: Nodes) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/none")
    with pytest.raises(UsageError, match=OWN):
        Carrier("127.0.0.1:0", keeper=two.origin)
    with pytest.raises(UsageError, match=OWN):
        vram.replicate("127.0.0.1:9", "model", keeper=two.here)
