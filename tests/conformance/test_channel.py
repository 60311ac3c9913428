"""A pair of channels, one connected by path, and one in another process keep the contract."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contracts.channel import ChannelContract
from tests.support.places import short_directory

from vram.sharing.channel import Channel

Pair = tuple[Channel, Channel]


class TestPair(ChannelContract):
    @pytest.fixture
    def channels(self) -> Iterator[Pair]:
        one, other = Channel.pair()
        with one, other:
            yield one, other


class TestConnectedByPath(ChannelContract):
    @pytest.fixture
    def channels(self) -> Iterator[Pair]:
        with short_directory() as place, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            path = str(Path(place) / "s")
            listener.bind(path)
            listener.listen()
            one = Channel.connect(path, 5.0)
            other = Channel(listener.accept()[0])
            with one, other:
                yield one, other
