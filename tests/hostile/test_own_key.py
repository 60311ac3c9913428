"""Carriers and readers that name no key: other users of the machine are neither let in nor believed."""

from __future__ import annotations

import encodings.idna  # noqa: F401  (what a child of another user looks addresses up by, and may not read)
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.carried import Nodes, carrying, nodes
from tests.support.deadlines import SOON
from tests.support.other_users import OTHER, as_user, needs_root
from tests.support.own_keys import home_of

import vram
from vram.errors import AccessDeniedError, UsageError
from vram.nodes import messages as m
from vram.nodes.carrier import Carrier
from vram.nodes.connection import Connection, _prove, connect
from vram.nodes.own_key import own_key, own_key_path

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
    vram.publish("model", {"w": np.ones(10, np.uint8)}, keeper=two.origin)
    with carrying(two.origin) as (_, address):

        def ask() -> object:
            return connect(address, b"", SOON).request(m.Open("model", 0, 0, bytes(16)), m.Opened, SOON)

        kind, said = as_other(ask)  # type: ignore[misc]
        assert kind is AccessDeniedError
        assert OWN in said
        assert vram.replicate(address, "model", keeper=two.here).version == 1


def test_a_reader_that_proves_an_empty_key_is_not_let_in(two: Nodes) -> None:
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        host, _, port = carrier.address.rpartition(":")
        with Connection(socket.create_connection((host, int(port)), SOON)) as connection:
            hello = m.Hello(m.PROTOCOL, b"n" * 32)
            challenge = connection.request(hello, m.Challenge, SOON)
            connection.send(m.Proof(_prove(b"", b"reader", m.encode(hello) + m.encode(challenge))), SOON)
            said = connection.receive(SOON)
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


def a_file_of_another_user(place: Path) -> None:
    own_key()
    os.chown(own_key_path(), OTHER, OTHER)


ODD = [
    a_directory_that_others_may_write,
    a_link_to_a_file,
    a_file_that_others_may_read,
    a_pipe,
    an_empty_file,
    pytest.param(a_directory_of_another_user, marks=needs_root),
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


def test_without_a_home_a_key_has_to_be_named(monkeypatch: pytest.MonkeyPatch, two: Nodes) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/none")
    with pytest.raises(UsageError, match=OWN):
        Carrier("127.0.0.1:0", keeper=two.origin)
    with pytest.raises(UsageError, match=OWN):
        vram.replicate("127.0.0.1:9", "model", keeper=two.here)
