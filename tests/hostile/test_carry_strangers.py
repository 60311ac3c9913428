"""Strangers at carriers and readers: who can keep others out, and who is believed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.carried import Nodes, model, nodes, write_key
from tests.support.deadlines import SOON
from tests.support.keeper_here import serving
from tests.support.other_users import OTHER, needs_root
from tests.support.places import short_directory
from tests.support.samples import some

import vram
from vram.errors import AccessDeniedError, PeerGoneError, UsageError
from vram.keeper.client import close_client
from vram.keeper.server import KeeperServer
from vram.nodes import messages as m
from vram.nodes.address import parse_address, read_key
from vram.nodes.carrier import Carrier
from vram.nodes.connection import Connection, connect
from vram.nodes.follow import follow


@pytest.fixture
def two() -> Iterator[Nodes]:
    with nodes() as found:
        yield found


def reader(carrier: Carrier, key: bytes = b"", name: str = "model", serves: str = "") -> Connection:
    """Return a connection that has opened an entry, and says that it has all of it."""
    made = connect(carrier.address, key, SOON)
    made.request(m.Open(name, 0, 0, secrets.token_bytes(16), b"", serves, b"\xff" * 8), m.Opened, SOON)
    return made


def test_a_reader_has_no_long_messages_read(two: Nodes, tmp_path: Path) -> None:
    """40 connections, each with half a message of 16 MiB, had a carrier take 640 MiB."""
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier, connect(carrier.address, b"", SOON) as one:
        one.send_bytes(memoryview((m.MAX_REQUEST + 1).to_bytes(4, "little")), SOON)
        with pytest.raises(PeerGoneError):
            one.receive(2.0)


# -- who is believed --------------------------------------------------------------------------------------------------
SERVES = ["127.0.0.1:9", "a..b:1", "x" * 70 + ":1", "localhost:1", "192.0.2.1:7", "no address"]


@pytest.mark.parametrize("serves", some(["127.0.0.1:9", *SERVES[1:]], 2))
def test_a_reader_is_asked_at_its_own_host_alone(two: Nodes, tmp_path: Path, serves: str) -> None:
    key = write_key(tmp_path / "key")
    vram.publish("model", model(1000), keeper=two.origin)
    with Carrier("127.0.0.1:0", key=key, keeper=two.origin) as carrier:
        with reader(carrier, key.read_bytes(), serves=serves), connect(carrier.address, key.read_bytes(), SOON) as one:
            one.request(m.Open("model", 0, 0, secrets.token_bytes(16)), m.Opened, SOON)
            given = one.request(m.Next(), m.Assigned, SOON)
            assert given.peer == (serves if serves == SERVES[0] else "")


@needs_root
def test_what_another_user_says_is_a_replica_is_not_believed(two: Nodes) -> None:
    """Another user published the name, with the origin in its meta: its bytes were taken for the carrier's."""
    vram.publish("model", {"w": np.ones(10, np.uint8)}, keeper=two.origin)
    with short_directory() as place:
        os.chmod(place, 0o755)
        path = f"{place}/k"
        with serving(KeeperServer(path, mode=0o666)), Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
            os.seteuid(OTHER)
            try:
                vram.publish("model", {"w": np.zeros(10, np.uint8)}, meta={"origin": carrier.address}, keeper=path)
            finally:
                os.seteuid(0)
            for if_missing in (True, False):
                with pytest.raises(AccessDeniedError, match=f"uid {OTHER}"):
                    vram.replicate(carrier.address, "model", if_missing=if_missing, keeper=path)
            with pytest.raises(AccessDeniedError, match=f"uid {OTHER}"):
                next(follow(carrier.address, "model", timeout=SOON, keeper=path))
            close_client(path)


# -- files ------------------------------------------------------------------------------------------------------------
def test_a_key_that_is_no_file_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for odd in (tmp_path, tmp_path / "loop", "/dev/null/key", "a" * 5000):
        with pytest.raises(UsageError):
            read_key(odd)


@pytest.mark.parametrize("text", ["nothing", "9464", ":9464", "host:", "host:x", "host:99999", "h:1²", 5])
def test_an_address_has_a_host_and_a_port(text: object) -> None:
    with pytest.raises(UsageError, match="is no address"):
        parse_address(text)
    assert parse_address("[::1]:9464") == ("::1", 9464)
