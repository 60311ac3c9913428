"""Two nodes on one machine: a keeper with a carrier, and a keeper that has nothing yet."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.support.deadlines import SOON, until
from tests.support.places import private_socket

import vram
from vram.keeper.client import KeeperClient, close_client


@dataclass(frozen=True)
class Nodes:
    """The sockets of two keepers: where entries come from, and where they go."""

    origin: str
    here: str


@contextlib.contextmanager
def nodes() -> Iterator[Nodes]:
    """Run two keepers; afterwards nothing is leased at either."""
    with private_socket() as origin, private_socket() as here:
        yield Nodes(origin, here)
        gc.collect()
        for path in (origin, here):
            with KeeperClient.connect(path, label="cleaner") as cleaner:
                until(lambda: not cleaner.statistics().leases, what="the return of every lease")
            close_client(path)


@contextlib.contextmanager
def carrying(keeper: str, *arguments: str, at: str = "127.0.0.1:0", **environment: str) -> Iterator[tuple[Any, str]]:
    """Run ``vram carry`` in a process of its own; yield the process and where it listens."""
    program = "import sys; from vram.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", program, "carry", "--at", at, "--socket", keeper, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    try:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        assert said[:2] == ["carrying", "at"], said
        yield process, said[2]
    finally:
        process.terminate()
        try:
            process.wait(SOON)
        finally:
            process.kill()
            process.wait(SOON)
            process.stdout.close()


def model(nbytes: int, seed: int = 1) -> dict[str, Any]:
    """Return arrays of several types, one of them of so many bytes."""
    random = np.random.default_rng(seed)
    return {
        "w": random.integers(0, 256, nbytes, dtype=np.uint8),
        "bias": random.standard_normal((10, 100)).astype(np.float32),
        "none": np.zeros((0, 4)),
        "scale": np.array(seed, dtype=np.float64),
    }


def same(found: Mapping[str, vram.Array], expected: Mapping[str, Any]) -> bool:
    """Whether arrays are what they should be, to the byte."""
    return set(found) == set(expected) and all(
        found[name].dtype == array.dtype and np.array_equal(found[name].numpy(), array)
        for name, array in expected.items()
    )


def write_key(path: Path, key: bytes = b"k" * 32) -> Path:
    """Make a file with a key that its user alone may read."""
    path.write_bytes(key)
    path.chmod(0o600)
    return path


def pull(pipe: Any, address: str, name: str, streams: int) -> None:
    """Replicate when told to; say how many bytes came, how many of them from others, and the sum of all words."""
    with private_socket() as path:
        pipe.send("ready")
        pipe.recv()
        done = vram.replicate(address, name, streams=streams, timeout=SOON, keeper=path)
        with vram.attach(name, keeper=path) as lease:
            total = int(lease["w"].numpy().view(np.uint64).sum())
        close_client(path)
        pipe.send((done.nbytes, done.from_peers, total))
