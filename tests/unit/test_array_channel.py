"""Both ends of an array channel in one process: what does not need a second one."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Iterator

import pytest

import vram
from vram.sharing.channel import Channel


@pytest.fixture
def ends() -> Iterator[tuple[vram.ArrayChannel, vram.ArrayChannel]]:
    one, other = vram.ArrayChannel.pair()
    with one, other:
        yield one, other


@pytest.mark.parametrize("payload", [b"\x92\xa1\xff\x01", b"\xc1", b"\x92\xa1v\x01", b"\x91\xa1q", b"\x90"])
def test_s7_what_is_no_message_is_a_protocol_error(payload: bytes) -> None:
    """The first is a tag that is not UTF-8, for which the decoder raises an error of its own kind."""
    raw, end = Channel.pair()
    with raw, vram.ArrayChannel(end) as channel:
        raw.send(payload)
        with pytest.raises(vram.ProtocolError):
            channel.recv(timeout=5.0)


def test_what_is_sent_again_is_the_same_object_while_it_is_in_use(
    ends: tuple[vram.ArrayChannel, vram.ArrayChannel],
) -> None:
    sender, receiver = ends
    with vram.zeros((4, 2), "int64", device="host", capacity=1000) as array:
        sender.send(array)
        first = receiver.recv(timeout=5.0)
        array.numpy()[:] = 7
        sender.send(array)
        assert receiver.recv(timeout=5.0) is first
        assert (first.numpy() == 7).all()
        address = first.address
        first.close()
        sender.send(array)
        second = receiver.recv(timeout=5.0)
        assert second is not first
        array.resize(1000)
        sender.send(array)
        grown = receiver.recv(timeout=5.0)
        assert grown.shape == (1000, 2)
        assert grown.address == second.address == address
        sender.send(array[1:3])
        assert receiver.recv(timeout=5.0).shape == (2, 2)


def test_a_frozen_array_is_sent_anew_and_read_only(ends: tuple[vram.ArrayChannel, vram.ArrayChannel]) -> None:
    sender, receiver = ends
    with vram.keeper(), vram.zeros(8, device="host") as array:
        sender.send(array)
        assert not receiver.recv(timeout=5.0).readonly
        vram.publish("frozen", {"a": array})
        sender.send(array)
        assert receiver.recv(timeout=5.0).readonly


def test_an_end_that_was_used_is_not_handed_on(ends: tuple[vram.ArrayChannel, vram.ArrayChannel]) -> None:
    ends[0].send(1)
    with pytest.raises(vram.UsageError, match="used already"):
        ends[0].give_away()
    assert ends[1].recv(timeout=5.0) == 1


def test_an_end_that_was_given_away_closes_without_ending_the_connection() -> None:
    one, other = vram.ArrayChannel.pair()
    with one, other:
        taken = vram.ArrayChannel(socket.socket(fileno=os.dup(one.give_away())))
        one.close()
        with taken:
            other.send("still there")
            assert taken.recv(timeout=5.0) == "still there"
        with pytest.raises(vram.PeerGoneError):
            other.recv(timeout=5.0)


def test_what_belongs_to_this_process_refuses_to_be_pickled(
    ends: tuple[vram.ArrayChannel, vram.ArrayChannel],
) -> None:
    with vram.zeros(3, device="host") as array:
        for owned in (ends[0], array.region, array):
            with pytest.raises(vram.UsageError, match="pickle"):
                pickle.dumps(owned)
