"""Replicas from one keeper to another: what comes, what is said of it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.support.carried import Nodes, carrying, model, same, write_key

import vram
from vram.errors import (
    AccessDeniedError,
    MismatchError,
    MissingFileError,
    NotFoundError,
    PeerGoneError,
    UsageError,
)
from vram.nodes.carrier import Carrier

SIZE = 20 << 20  # bytes: two pieces, one of them short


def test_what_is_replicated_is_the_same_and_says_where_it_came_from(two: Nodes) -> None:
    arrays = model(SIZE)
    vram.publish("model", arrays, meta={"revision": "7"}, keeper=two.origin)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        done = vram.replicate(carrier.address, "model", keeper=two.here)
    assert (done.version, done.origin_version, done.arrays, done.engine) == (1, 1, 4, "tcp")
    assert SIZE <= done.nbytes < SIZE + (1 << 20)
    assert done.seconds > 0
    with vram.attach("model", keeper=two.here) as lease:
        assert same(lease, arrays)
        said = lease.meta
        assert len(said.pop("origin_content")) == 32
        assert said == {"revision": "7", "origin": carrier.address, "origin_version": "1"}


def test_a_carrier_of_the_command_line(two: Nodes, tmp_path: Path) -> None:
    key = write_key(tmp_path / "key")
    arrays = model(1000)
    vram.publish("model", arrays, keeper=two.origin)
    with carrying(two.origin, "--key", str(key)) as (process, address):
        with vram.replicate(address, "model", key=key, if_missing=True, keeper=two.here) as lease:
            assert same(lease, arrays)
        with pytest.raises(AccessDeniedError, match="each user has one of their own"):
            vram.replicate(address, "model", keeper=two.here)
        with pytest.raises(AccessDeniedError, match="another one"):
            vram.replicate(address, "model", key=write_key(tmp_path / "other", b"x" * 32), keeper=two.here)
        process.terminate()
        assert process.wait(30) == 0


def test_if_missing_attaches_what_is_here(two: Nodes) -> None:
    vram.publish("model", model(1000), keeper=two.origin)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        with vram.replicate(carrier.address, "model", if_missing=True, keeper=two.here) as lease:
            assert lease.version == 1
        sent = carrier.sent
        with vram.replicate(carrier.address, "model", if_missing=True, keeper=two.here) as lease:
            assert lease.version == 1
        assert carrier.sent == sent


def test_a_name_that_is_here_from_elsewhere_is_left_alone(two: Nodes) -> None:
    vram.publish("model", model(1000), keeper=two.origin)
    vram.publish("model", {"mine": np.arange(3)}, keeper=two.here)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        for if_missing in (False, True):
            with pytest.raises(MismatchError, match="was not replicated"):
                vram.replicate(carrier.address, "model", if_missing=if_missing, keeper=two.here)
        assert carrier.sent == 0
    assert vram.entry("model", keeper=two.here).version == 1


def test_what_is_not_there_is_said(two: Nodes, tmp_path: Path) -> None:
    with Carrier("127.0.0.1:0", prefix="public/", keeper=two.origin) as carrier:
        vram.publish("public/a", model(10), keeper=two.origin)
        with pytest.raises(NotFoundError):
            vram.replicate(carrier.address, "public/b", keeper=two.here)
        with pytest.raises(NotFoundError):
            vram.replicate(carrier.address, "public/a", version=7, keeper=two.here)
        with pytest.raises(AccessDeniedError, match="only entries under"):
            vram.replicate(carrier.address, "private", keeper=two.here)
        with pytest.raises(MissingFileError):
            vram.replicate(carrier.address, "public/a", key=tmp_path / "none", keeper=two.here)
    with pytest.raises(PeerGoneError, match="vram carry"):
        vram.replicate(carrier.address, "public/a", timeout=0.2, keeper=two.here)
    with pytest.raises(UsageError, match="address"):
        vram.replicate("nowhere", "public/a", keeper=two.here)


def test_without_a_key_no_other_machine_is_spoken_to(two: Nodes) -> None:
    with pytest.raises(AccessDeniedError, match="no key"):
        Carrier("0.0.0.0:0", keeper=two.origin)
    with pytest.raises(AccessDeniedError, match="no key"):
        vram.replicate("192.0.2.1:7", "model", keeper=two.here)


def test_a_key_that_others_may_read_is_refused(two: Nodes, tmp_path: Path) -> None:
    key = write_key(tmp_path / "key")
    key.chmod(0o640)
    with pytest.raises(AccessDeniedError, match="chmod 600"):
        Carrier("127.0.0.1:0", key=key, keeper=two.origin)
    with pytest.raises(UsageError, match="16 to"):
        Carrier("127.0.0.1:0", key=write_key(tmp_path / "short", b"short"), keeper=two.origin)
