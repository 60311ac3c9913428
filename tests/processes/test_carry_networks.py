"""Two networks on one machine, joined by a cable (veth): what one node offers, the other one pulls over it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.carried import Nodes, model, same, write_key
from tests.support.deadlines import SOON, until
from tests.support.places import private_socket

import vram
from vram.keeper.client import close_client

PIECE = 16 << 20
HERE, THERE = "10.77.0.1", "10.77.0.2"
PROGRAM = "import sys; from vram.cli import main; sys.exit(main())"


def quietly(*command: str) -> bool:
    return not subprocess.run(command, capture_output=True, timeout=SOON).returncode


@dataclass
class Network:
    """One of the two: a process that keeps it, and the address that it has."""

    pid: int
    address: str

    def command(self, *arguments: str) -> list[str]:
        """Return how a command of vram is run in it."""
        return ["nsenter", "-t", str(self.pid), "-n", sys.executable, "-P", "-c", PROGRAM, *arguments]

    def received(self) -> int:
        """Return the bytes that have come over the cable."""
        lines = Path(f"/proc/{self.pid}/net/dev").read_text().splitlines()
        return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("cable"))


@pytest.fixture
def networks() -> Iterator[tuple[Network, Network]]:
    with contextlib.ExitStack() as stage:
        made: list[Network] = []
        for address in (HERE, THERE):
            # It waits for the end of its input, which is this process's end, too.
            holder = subprocess.Popen(["unshare", "-n", "cat"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
            stage.callback(end, holder)
            ours = os.readlink("/proc/self/ns/net")
            with contextlib.suppress(AssertionError):
                until(lambda: holder.poll() is not None or other_network(holder.pid, ours), what="a network", seconds=5)  # noqa: B023
            if holder.poll() is not None or not other_network(holder.pid, ours):
                pytest.skip("network namespaces are forbidden here")
            made.append(Network(holder.pid, address))
        inside = ["nsenter", "-t", str(made[0].pid), "-n", "ip", "link", "add", "cable", "type", "veth"]
        if not quietly(*inside, "peer", "name", "cable", "netns", str(made[1].pid)):
            pytest.skip("network namespaces are forbidden here")
        for one in made:
            enter = ("nsenter", "-t", str(one.pid), "-n", "ip")
            assert quietly(*enter, "addr", "add", f"{one.address}/24", "dev", "cable")
            assert quietly(*enter, "link", "set", "cable", "up")
            assert quietly(*enter, "link", "set", "lo", "up")
        yield made[0], made[1]


def other_network(pid: int, ours: str) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net") != ours
    return False


def end(process: subprocess.Popen[Any]) -> None:
    if process.stdin is not None:
        process.stdin.close()
    process.kill()
    process.wait(SOON)
    if process.stdout is not None:
        process.stdout.close()


def carry(stage: contextlib.ExitStack, network: Network, keeper: str, key: Path, port: int = 0) -> tuple[Any, str]:
    """Start a carrier in a network; return the process and its address."""
    command = network.command("carry", "--at", f"{network.address}:{port}", "--key", str(key), "--socket", keeper)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    stage.callback(end, process)
    said = process.stdout.readline().split() if process.stdout else []
    assert said[:2] == ["carrying", "at"]
    return process, said[2]


def pull(network: Network, address: str, keeper: str, *more: str) -> subprocess.Popen[str]:
    command = network.command("replicate", address, "model", "--socket", keeper, "--json", *more)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def done(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=SOON)
    assert process.returncode == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def refused(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=SOON)
    assert process.returncode == 1, out
    return err


def test_over_a_cable_with_the_key_and_not_without(
    networks: tuple[Network, Network], two: Nodes, tmp_path: Path
) -> None:
    here, there = networks
    key, other = write_key(tmp_path / "key"), write_key(tmp_path / "other", b"x" * 32)
    arrays = model(PIECE + 1000)
    vram.publish("model", arrays, keeper=two.origin)
    with contextlib.ExitStack() as stage:
        without = subprocess.run(
            here.command("carry", "--at", f"{HERE}:0", "--socket", two.origin),
            capture_output=True, text=True, timeout=SOON,
        )  # fmt: skip
        assert without.returncode == 1
        assert "there is no key" in without.stderr
        _, address = carry(stage, here, two.origin, key)
        assert "there is no key" in refused(pull(there, address, two.here))
        assert "another one" in refused(pull(there, address, two.here, "--key", str(other)))
        assert vram.list_entries(keeper=two.here) == []
        assert done(pull(there, address, two.here, "--key", str(key)))["nbytes"] >= PIECE
    with vram.attach("model", keeper=two.here) as lease:
        assert same(lease, arrays)


@pytest.mark.slow
def test_a_cable_that_is_pulled_out_is_said_in_time(
    networks: tuple[Network, Network], two: Nodes, tmp_path: Path
) -> None:
    here, there = networks
    key = write_key(tmp_path / "key")
    vram.publish("model", model(16 * PIECE), keeper=two.origin)
    with contextlib.ExitStack() as stage:
        _, address = carry(stage, here, two.origin, key)
        reader = pull(there, address, two.here, "--key", str(key), "--timeout", "1")
        until(lambda: there.received() > PIECE, what="a piece")
        assert quietly("nsenter", "-t", str(here.pid), "-n", "ip", "link", "set", "cable", "down")
        assert refused(reader)
    assert vram.list_entries(keeper=two.here) == []


@pytest.mark.slow
def test_readers_of_one_network_pass_on_what_came_over_the_cable(
    networks: tuple[Network, Network], two: Nodes, tmp_path: Path
) -> None:
    here, there = networks
    key = write_key(tmp_path / "key")
    arrays = model(8 * PIECE)
    vram.publish("model", arrays, keeper=two.origin)
    with contextlib.ExitStack() as stage:
        _, address = carry(stage, here, two.origin, key)
        keepers = [stage.enter_context(private_socket()) for _ in range(4)]
        readers = [pull(there, address, keeper, "--key", str(key), "--timeout", str(SOON)) for keeper in keepers]
        results = [done(reader) for reader in readers]
        copies = there.received() / (8 * PIECE)
        passed_on = sum(one["from_peers"] for one in results) / (8 * PIECE)
        print(f"{copies:.2f} copies came over the cable, {passed_on:.2f} from other readers")
        assert copies + passed_on >= 4
        assert copies < 3  # usually two: who begins late fetches more over the cable
        for keeper in keepers:
            with vram.attach("model", keeper=keeper) as lease:
                assert same(lease, arrays)
            close_client(keeper)
