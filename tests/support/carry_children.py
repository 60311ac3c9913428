"""Readers in processes of their own: each with a keeper of its own, as each node has."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.support.deadlines import SOON

import vram
from vram.keeper.client import close_client
from vram.keeper.private import private_socket


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
