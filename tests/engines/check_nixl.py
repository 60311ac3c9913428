"""NIXL's own package with our engine on it: ``make test-nodes``, where NIXL is installed (1.5.1 was).

Not a test of CI, which has no NIXL. Host memory over loopback: a carrier in a process of its own, and readers here.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import vram
from vram.bench.children import own_keeper
from vram.errors import PeerError, PeerGoneError, UnsupportedError, WaitTimeoutError
from vram.nodes import messages as m
from vram.nodes import pull
from vram.nodes.engine import Span
from vram.nodes.messages import Piece
from vram.nodes.nixl import Nixl, devices_of
from vram.spec import HOST

SOON = 120.0  # seconds
CARRIER = """
import sys, vram
from vram.nodes.carrier import Carrier
from vram.nodes.nixl import Nixl
keeper, ring = sys.argv[1], sys.argv[2] == "ring"
with Carrier("127.0.0.1:0", keeper=keeper, engines=[Nixl(trusted=True, ring=ring)]) as carrier:
    print(carrier.address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)


@pytest.fixture(scope="module")
def engine() -> Iterator[Nixl]:
    made = Nixl(trusted=True)
    yield made
    made.close()


@contextlib.contextmanager
def carrying(keeper: str, how: str = "direct") -> Iterator[tuple[Any, str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CARRIER, keeper, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(SOON)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


@contextlib.contextmanager
def two() -> Iterator[tuple[str, str]]:
    with own_keeper() as origin, own_keeper() as here:
        yield origin, here


def model(nbytes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(7).integers(0, 2**63, nbytes // 8, dtype="i8")


@pytest.mark.parametrize("how", ["direct", "ring"])
def test_a_replica_comes_by_nixl_and_is_equal(monkeypatch: pytest.MonkeyPatch, engine: Nixl, how: str) -> None:
    monkeypatch.setattr(pull, "TCP", NoTcp())
    weights = model(100 << 20)
    with two() as (origin, here), carrying(origin, how) as (_, address):
        vram.publish("model", {"w": weights, "b": np.arange(3)}, keeper=origin)
        done = vram.replicate(address, "model", engines=[engine], keeper=here)
        assert done.engine == "nixl", done
        with vram.attach("model", keeper=here) as lease:
            assert np.array_equal(lease["w"].numpy(), weights)
            assert lease["b"].numpy().tolist() == [0, 1, 2]


class NoTcp:
    """In the place of tcp in a reader, so that what comes comes by NIXL."""

    name = "tcp"

    def reaches(self, location: Any) -> bool:
        return location == HOST

    def offer(self, spans: Any) -> Any:
        raise UnsupportedError("this tcp", "another", "a test's")

    def open(self, data: bytes, link: Any) -> Any:
        raise UnsupportedError("this tcp", "another", "a test's")


def test_the_engine_is_chosen_by_a_measured_piece_and_said(engine: Nixl) -> None:
    with two() as (origin, here), carrying(origin) as (_, address):
        vram.publish("model", {"w": model(100 << 20)}, keeper=origin)
        done = vram.replicate(address, "model", engines=[engine], keeper=here)
        assert done.rates.keys() == {"nixl", "tcp"}
        assert done.engine == max(done.rates, key=lambda name: done.rates[name])


# -- bad days ----------------------------------------------------------------------------------------------------------
class LinkTo:
    """A connection to an offering of this process."""

    def __init__(self, offering: Any) -> None:
        self.offering = offering

    def fetch(self, piece: Piece, into: memoryview, timeout: float) -> None:
        raise AssertionError("not by tcp")

    def ask(self, engine: str, data: bytes, timeout: float) -> bytes:
        return self.offering.answer(data)


@contextlib.contextmanager
def offered(nbytes: int = m.PIECE, ring: bool = False) -> Iterator[tuple[Nixl, Any, Any]]:
    source = Nixl(trusted=True, ring=ring)
    array = vram.empty((nbytes,), "u1", device="host")
    array.numpy()[:] = 5
    offering = source.offer([Span(0, array.address, nbytes, HOST, array.numpy().data)])
    try:
        yield source, offering, array
    finally:
        offering.close()
        source.close()


def read(engine: Nixl, data: bytes, link: Any, nbytes: int, offset: int = 0, timeout: float = SOON) -> bytes:
    reading = engine.open(data, link)
    try:
        with memoryview(bytearray(nbytes)) as into:
            reading.read(Piece(0, offset, nbytes), Span(offset, 0, nbytes, HOST, into), timeout)
            return bytes(into)
    finally:
        reading.close()
        reading.close()


@pytest.mark.parametrize("ring", [False, True])
def test_two_engines_of_one_process_read_of_each_other(engine: Nixl, ring: bool) -> None:
    with offered(ring=ring) as (_, offering, _):
        assert read(engine, offering.data, LinkTo(offering), 1 << 20, 4096) == b"\5" * (1 << 20)


def test_a_description_that_nixl_cannot_read_is_not_used(engine: Nixl) -> None:
    data = msgspec.msgpack.encode({"metadata": b"\0" * 300, "memory": "DRAM", "places": [(0, 4096, 4096, 0)]})
    with pytest.raises(UnsupportedError, match="nixl"):
        engine.open(data, None)  # type: ignore[arg-type]


def test_an_address_that_was_not_registered_is_not_read(engine: Nixl) -> None:
    with offered() as (_, offering, _):
        said = msgspec.msgpack.decode(offering.data)
        said["places"][0][1] += 1 << 30
        with pytest.raises(UnsupportedError, match="nixlNotFoundError"):
            engine.open(msgspec.msgpack.encode(said), LinkTo(offering))
        said["places"][0][1] -= 1 << 30
        said["places"][0][2] *= 2  # and now longer than it is
        reading = engine.open(msgspec.msgpack.encode(said), LinkTo(offering))
        with memoryview(bytearray(m.PIECE)) as into, pytest.raises(PeerError, match="nixl"):
            reading.read(Piece(1, m.PIECE, m.PIECE), Span(m.PIECE, 0, m.PIECE, HOST, into), SOON)
        reading.close()


def test_a_carrier_that_is_killed_is_a_peer_that_is_gone(monkeypatch: pytest.MonkeyPatch, engine: Nixl) -> None:
    monkeypatch.setattr(pull, "TCP", NoTcp())
    with two() as (origin, here):
        vram.publish("model", {"w": model(64 << 20)}, keeper=origin)
        with carrying(origin) as (process, address):
            seen = []

            class Killing(Nixl):
                def open(self, data: bytes, link: Any) -> Any:
                    reading = engine.open(data, link)
                    plain = reading.read

                    def read(*arguments: Any) -> None:
                        if not seen:
                            seen.append(arguments)
                            process.send_signal(signal.SIGKILL)
                            process.wait(SOON)
                        plain(*arguments)

                    reading.read = read
                    return reading

            with pytest.raises((PeerGoneError, WaitTimeoutError)):
                vram.replicate(address, "model", engines=[Killing(trusted=True)], keeper=here, timeout=2.0)
        assert vram.list_entries(keeper=here) == []


def test_a_carrier_that_stands_still_is_too_slow_and_nothing_is_written_afterwards(
    monkeypatch: pytest.MonkeyPatch, engine: Nixl
) -> None:
    """Over TCP, where it takes the other process to answer: with shared memory the reader does all of it."""
    monkeypatch.setattr(pull, "TCP", NoTcp())
    code = "import os; os.environ['UCX_TLS'] = 'tcp'\n" + CARRIER
    monkeypatch.setattr(sys.modules[__name__], "CARRIER", code)
    monkeypatch.setenv("UCX_TLS", "tcp")
    slow = Nixl(trusted=True)
    with two() as (origin, here):
        vram.publish("model", {"w": model(64 << 20)}, keeper=origin)
        with carrying(origin) as (process, address):
            seen: list[Any] = []

            class Stopping(Nixl):
                def open(self, data: bytes, link: Any) -> Any:
                    reading = slow.open(data, link)
                    plain = reading.read

                    def read(piece: Piece, into: Span, timeout: float) -> None:
                        if not seen:
                            seen.append(slow._made)
                            process.send_signal(signal.SIGSTOP)
                        plain(piece, into, 1.0)

                    reading.read = read
                    return reading

            began = time.monotonic()
            with pytest.raises((PeerGoneError, WaitTimeoutError)):
                vram.replicate(address, "model", engines=[Stopping(trusted=True)], keeper=here, timeout=2.0)
            process.send_signal(signal.SIGCONT)
            assert time.monotonic() - began < SOON
            assert not seen[0].is_usable, "it was given up: else it would go on writing"
        assert vram.list_entries(keeper=here) == []
    slow.close()


def test_a_source_that_restarts_is_another_agent(monkeypatch: pytest.MonkeyPatch, engine: Nixl) -> None:
    monkeypatch.setattr(pull, "TCP", NoTcp())
    with two() as (origin, here):
        vram.publish("model", {"w": model(8 << 20)}, keeper=origin)
        for _ in range(2):
            with carrying(origin) as (_, address):
                assert vram.replicate(address, "model", engines=[engine], keeper=here).engine == "nixl"
            vram.remove("model", keeper=here)
        assert not engine._agent()._peers, "readings are closed, and their peers forgotten"


def test_only_loopback_is_listened_at(engine: Nixl) -> None:
    assert devices_of("127.0.0.1") == "lo"
    with offered() as (_, offering, _):
        read(engine, offering.data, LinkTo(offering), 4096)
        inodes = {
            os.stat(f"/proc/self/fd/{fd}").st_ino
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        }
        listening = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[9]) in inodes:
                    listening.append(fields[1].rpartition(":")[0])
    assert set(listening) <= {"0100007F"}, listening


# -- who means harm ----------------------------------------------------------------------------------------------------
WRITER = """
import ctypes, struct, sys, time
import nixl
metadata, registered, address = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = nixl.nixl_agent_config(enable_prog_thread=True, enable_listen_thread=False, backends=["UCX"])
api = nixl.nixl_agent("writer", config)
source = ctypes.create_string_buffer(b"!" * 8, 8)
row = [(ctypes.addressof(source), 8, 0)]
kept = api.register_memory([(*row[0], "")], mem_type="DRAM")
assert metadata.count(struct.pack("<Q", registered)) == 1
peer = api.add_remote_agent(metadata.replace(struct.pack("<Q", registered), struct.pack("<Q", address)))
there = api.get_xfer_descs([(address, 8, 0)], mem_type="DRAM")
handle = api.initialize_xfer("WRITE", api.get_xfer_descs(row, mem_type="DRAM"), there, peer)
state, until = api.transfer(handle), time.monotonic() + 30
while state == "PROC" and time.monotonic() < until:
    time.sleep(0.001)
    state = api.check_xfer_state(handle)
print("ended as", state)
"""


@pytest.mark.parametrize("ring", [False, True])
def test_registration_keeps_nobody_from_writing_elsewhere(monkeypatch: pytest.MonkeyPatch, ring: bool) -> None:
    """Why its users say ``trusted=True``. If this fails, NIXL or UCX has begun to look: what is said of them is old."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    with offered(ring=ring) as (_, offering, array), vram.zeros(8, "u1", device="host") as other:
        said = msgspec.msgpack.decode(offering.data)
        registered = said["places"][0][1] if ring else array.address
        command = [sys.executable, "-c", WRITER, said["metadata"].hex(), str(registered), str(other.address)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert "ended as DONE" in done.stdout
        assert bytes(other.numpy()) == b"!" * 8
