"""A program that stops for good right before its n-th message, so that it can be killed exactly there.

``python stopped.py N WHAT ...``: before its N-th send or receive on a channel (in the thread that reads for a client,
right after it) it writes ``at N`` to standard output and waits to be killed; if it gets to its end before, it writes
``end`` and waits too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from vram.keeper.rpc_connection import READING
from vram.sharing.channel import Channel

_count = 0
_stop_at = int(sys.argv[1])


def _say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


_turn = threading.Lock()  # held for good at the stop: no other thread goes on either


def _count_one(name: str) -> None:
    global _count
    with _turn:
        if _count == _stop_at:
            _say(f"at {_count} {name}")
            signal.pause()
        _count += 1


def _stopping(method: Any) -> Any:
    def wrapped(self: Channel, *arguments: Any, **options: Any) -> Any:
        if threading.current_thread().name == READING:  # it waits for a message long before there is one
            found = method(self, *arguments, **options)
            _count_one(method.__name__)
            return found
        _count_one(method.__name__)
        return method(self, *arguments, **options)

    return wrapped


Channel.send = _stopping(Channel.send)  # type: ignore[method-assign]
Channel.take = _stopping(Channel.take)  # type: ignore[method-assign]  # recv goes through it


def _client(what: str, path: str) -> None:
    from memfds import memfds  # beside this file, which is run as a script

    from vram.keeper.client import KeeperClient, Segment

    connection = KeeperClient.connect(path, label="victim")
    if what == "publish":
        with memfds(600) as fds:
            connection.publish("w", [Segment(4096)] * 600, fds)
    elif what == "claim":
        claim = connection.attach_or_claim("w")
        with memfds(300) as fds:
            connection.publish("w", [Segment(4096)] * 300, fds, claim=claim)  # type: ignore[arg-type]
    else:
        got = connection.attach("w")
        if what == "release":
            connection.release_later(got.lease_id)
            connection.release([got.lease_id])
    _say("end")
    signal.pause()


_client(sys.argv[2], sys.argv[3])
