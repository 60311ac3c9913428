"""A second interrupt while the first one's call is being taken back: what else the process has at its keeper stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import SOON, until

import vram
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import private_socket
from vram.sharing.channel import Channel


class Interrupt(BaseException):
    """A Ctrl-C."""


@pytest.fixture
def keeper() -> Iterator[str]:
    with private_socket() as path:
        yield path
        close_client(path)


def interrupted_twice(monkeypatch: pytest.MonkeyPatch, path: str) -> list[str]:
    """Wait for an entry that is not there, be interrupted, and again where the keeper is to hear of that."""
    met: list[str] = []
    vram.list_entries(keeper=path)  # there is a connection
    take, send = Channel.take, Channel.send

    def taking(self: Channel, *, timeout: float | None = None) -> Any:
        if not met:
            met.append("waiting")
            raise Interrupt
        return take(self, timeout=timeout)

    def sending(self: Channel, payload: bytes, *arguments: Any, **options: Any) -> None:
        if met == ["waiting"] and isinstance(m.decode_request(payload), m.Cancel):
            met.append("taking back")
            raise Interrupt
        send(self, payload, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "take", taking)
        patch.setattr(Channel, "send", sending)
        with pytest.raises(Interrupt):
            vram.attach("later", timeout=None, keeper=path)
    return met


def test_a_second_interrupt_costs_no_lease_and_no_ring(monkeypatch: pytest.MonkeyPatch, keeper: str) -> None:
    """It ended the connection, and with it all that the process had at that keeper."""
    vram.publish("entry", {"a": np.arange(10)}, keeper=keeper)
    with (
        vram.attach("entry", keeper=keeper) as lease,
        vram.Ring.create("ring", shape=(8,), dtype="u1", slots=2, keeper=keeper) as ring,
        KeeperClient.connect(keeper, label="observer") as observer,
    ):
        assert interrupted_twice(monkeypatch, keeper) == ["waiting", "taking back"]
        assert not lease.is_stale()
        assert lease["a"].numpy().tolist() == list(range(10))
        for number in range(1, 6):
            assert ring.put(np.zeros(8, np.uint8), timeout=SOON) == number
        until(lambda: not observer.statistics().waiting, what="the end of the call that nobody waits for")
        held = observer.statistics().leases
        vram.publish("later", {"a": np.arange(3)}, keeper=keeper)
        assert observer.statistics().leases == held, "nobody has a lease that was not asked for any more"


def test_it_is_heard_at_once_where_there_is_room(monkeypatch: pytest.MonkeyPatch, keeper: str) -> None:
    with KeeperClient.connect(keeper, label="observer") as observer:
        assert interrupted_twice(monkeypatch, keeper) == ["waiting", "taking back"]
        until(lambda: not observer.statistics().waiting, what="the end of the call, with no other one made")
