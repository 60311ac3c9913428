"""Ranks of a group, each in a thread or in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support import children as processes
from tests.support.deadlines import SOON, until
from tests.support.threads import race

import vram
from vram.collectives import messages
from vram.errors import PeerGoneError, VramError
from vram.sharing.channel import Channel


def run(size: int, at: str, work: Callable[[vram.Group], Any], timeout: float = SOON) -> list[Any]:
    """Have ranks work in threads, and return what each returned or raised."""

    def act(rank: int) -> Any:
        try:
            with vram.Group(rank=rank, size=size, at=at, timeout=timeout) as group:
                return work(group)
        except BaseException as error:
            return error

    return race(*(functools.partial(act, rank) for rank in range(size)))


def until_listening(at: str) -> None:
    """Return when rank 0 can be connected to: between bind and listen there is a socket already, and it refuses."""

    def listens() -> bool:
        sockets = [line.split() for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()]
        return any(one[-1] == at and int(one[3], 16) & 0x10000 for one in sockets)  # __SO_ACCEPTCON

    until(listens, what=f"a listener at {at}")


def until_here(at: str, size: int, *others: int) -> None:
    """Return when some ranks of a group have come, by coming as its last one, which goes away again."""
    assert len(others) < size - 1, "it would be complete"
    deadline = time.monotonic() + SOON
    while True:
        try:
            channel = Channel.connect(at, SOON)
            break
        except PeerGoneError:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    with channel:
        channel.send(messages.encode(messages.Hello(messages.PROTOCOL, "group", size - 1, size)))
        while True:
            said = messages.decode_from_hub(channel.recv(timeout=SOON)[0])
            assert isinstance(said, messages.Present)
            if {*others} <= {*said.ranks}:
                return


def right(came: list[Any]) -> list[Any]:
    """Return what ranks returned; raise what one raised, rather than what the others heard of it."""
    for one in sorted(came, key=lambda one: isinstance(one, PeerGoneError)):
        if isinstance(one, BaseException):
            raise one
    return came


@contextlib.contextmanager
def started(
    at: str, size: int, act: Callable[..., None], ranks: Sequence[int] | None = None
) -> Iterator[list[processes.Child]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(processes.child(act, rank, size, first=(at,), may_end=False))
            for rank in (range(size) if ranks is None else ranks)
        ]


def _raised(act: Callable[[], Any]) -> BaseException:
    with pytest.raises(VramError) as caught:
        act()
    return caught.value
