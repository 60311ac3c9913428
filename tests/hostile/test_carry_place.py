"""A reader gets what the carrier that it named has, not what another carrier with the same key has."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.carried import Nodes, carrying, model, nodes, write_key
from tests.support.deadlines import SOON

import vram
from vram.errors import AccessDeniedError, UsageError
from vram.nodes import address as addresses
from vram.nodes import messages as m
from vram.nodes.carrier import Carrier
from vram.nodes.connection import Connection, _prove, connect

pytestmark = pytest.mark.slow  # goes with carriers without a key

ANOTHER = "this is another carrier"


@pytest.fixture
def two() -> Iterator[Nodes]:
    with nodes() as found:
        vram.publish("model", model(1000), keeper=found.origin)
        yield found


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return write_key(tmp_path / "key")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def pump(came: socket.socket, target: tuple[str, int]) -> None:
    """Pass on what each of two says to the other, until one of them is gone."""
    with came, socket.create_connection(target, SOON) as other:
        ends = {came: other, other: came}
        while readable := select.select([*ends], [], [], SOON)[0]:
            for one in readable:
                with contextlib.suppress(OSError):
                    if data := one.recv(1 << 16):
                        ends[one].sendall(data)
                        continue
                return


def relay(listener: socket.socket, target: tuple[str, int]) -> None:
    """Be in between, for all that come, until the listener is shut down."""
    while True:
        try:
            came, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=pump, args=(came, target), daemon=True).start()


@contextlib.contextmanager
def passing_on_to(target: tuple[str, int], port: int = 0) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=relay, args=(listener, target))
        thread.start()
        try:
            yield addresses.show_address(listener.getsockname())
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(SOON)
            assert not thread.is_alive()


def test_forwarded_ports_are_told_to_the_carrier(two: Nodes, key: Path) -> None:
    port = free_port()
    forwarded = f"127.0.0.1:{port}"
    with carrying(two.origin, "--key", str(key), "--name", "node7.example:7", "--name", forwarded) as (_, address):
        target = addresses.parse_address(address)
        with passing_on_to(target) as other, pytest.raises(AccessDeniedError, match=ANOTHER):
            vram.replicate(other, "model", key=key, keeper=two.here)
        with passing_on_to(target, port):
            assert vram.replicate(forwarded, "model", key=key, keeper=two.here).origin == forwarded


real = socket.getaddrinfo


def answering(*hosts: str) -> object:
    """Answer for names of hosts, which are here."""

    def getaddrinfo(host: str, *rest: object, **more: object) -> object:
        here = host.lower() in hosts and not int(str(more.get("flags", 0))) & socket.AI_NUMERICHOST
        return real("127.0.0.1" if here else host, *rest, **more)  # type: ignore[arg-type]

    return getaddrinfo


def test_a_name_is_the_carriers_only_if_it_was_told(two: Nodes, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers for names could send readers to any carrier, which is where they connected to then."""
    monkeypatch.setattr(socket, "getaddrinfo", answering("node7.example", "node8.example"))
    with Carrier("node7.example:0", key=key, keeper=two.origin) as carrier:
        port = addresses.parse_address(carrier.address)[1]
        for known in (f"Node7.example:{port}", f"127.0.0.1:{port}", f"localhost:{port}", f"127.1:{port}"):
            connect(known, key.read_bytes(), SOON).close()
        with pytest.raises(AccessDeniedError, match=ANOTHER):
            connect(f"node8.example:{port}", key.read_bytes(), SOON)


@pytest.mark.parametrize("at", ["0.0.0.0:0", "[::]:0"])
def test_a_carrier_of_all_addresses_is_at_each(two: Nodes, key: Path, at: str) -> None:
    with Carrier(at, key=key, keeper=two.origin) as carrier:
        port = addresses.parse_address(carrier.address)[1]
        for host in ("127.0.0.1", "127.0.0.2", "0.0.0.0", *(["[::1]", "[::ffff:127.0.0.1]"] if "::" in at else [])):
            connect(f"{host}:{port}", key.read_bytes(), SOON).close()


def said_by_hand(address: str, hello: m.Hello, key: bytes) -> m.Message:
    """Greet as a reader that says this; return what it is answered."""
    with Connection(socket.create_connection(addresses.parse_address(address), SOON)) as connection:
        challenge = connection.request(hello, m.Challenge, SOON)
        connection.send(m.Proof(_prove(key, b"reader", m.encode(hello) + m.encode(challenge))), SOON)
        return connection.receive(SOON)


def test_a_loopback_address_is_of_one_machine_and_network(two: Nodes, key: Path) -> None:
    """Two containers, or two machines of one home, have a 127.0.0.1 each, and may have a carrier at the same port."""
    secret = key.read_bytes()
    with Carrier("127.0.0.1:0", key=key, keeper=two.origin) as carrier:
        own = addresses.machine_of(carrier.address)
        assert len(own) == 16
        for machine, answer in ((own, m.Proof), (bytes(16), m.Refused), (b"", m.Refused)):
            hello = m.Hello(m.PROTOCOL, b"n" * 32, carrier.address, machine)
            assert isinstance(said_by_hand(carrier.address, hello, secret), answer), machine
    assert addresses.machine_of("10.0.0.7:7070") == b""  # nobody else is told


def test_who_does_not_say_whom_it_means_is_refused(two: Nodes, key: Path) -> None:
    with Carrier("127.0.0.1:0", key=key, keeper=two.origin) as carrier:
        said = said_by_hand(carrier.address, m.Hello(m.PROTOCOL, b"n" * 32), key.read_bytes())
        assert isinstance(said, m.Refused)
        assert "this is another carrier" in said.message


def test_names_that_are_no_addresses(two: Nodes) -> None:
    for names in (["node7"], "node7:7070", [7]):
        with pytest.raises(UsageError):
            Carrier("127.0.0.1:0", names=names, keeper=two.origin)  # type: ignore[arg-type]
