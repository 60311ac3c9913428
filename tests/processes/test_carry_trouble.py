"""Bad days of replicas: connections break, sources are replaced, restarted or killed, memory changes or is lacking."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tests.support.carried import Nodes, carrying, model, same
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import later
from tests.support.samples import in_turns, some
from tests.support.wires import wire

import vram
from vram.errors import PeerError, PeerGoneError, ProtocolError, QuotaError, WaitTimeoutError
from vram.keeper.client import close_client
from vram.nodes import carrier as carriers
from vram.nodes.carrier import Carrier

PIECE = 16 << 20
SIZE = 5 * PIECE + 1000  # bytes of the model: six pieces


def nothing_is_here(two: Nodes) -> bool:
    return vram.list_entries(keeper=two.here) == []


def test_only_what_is_missing_is_sent_again(two: Nodes) -> None:
    arrays = model(SIZE)
    vram.publish("model", arrays, keeper=two.origin)
    with wire() as link, link.carrier(two.origin):
        link.cut_after = [2 * PIECE + 5000, PIECE // 2]  # in the third piece of the one, the first of the other
        done = vram.replicate(link.address, "model", streams=2, keeper=two.here)
        assert 1 <= done.reconnected <= 2  # the other may have got all the rest before the one comes to a third piece
        assert link.passed < SIZE + 2 * PIECE  # of each that was cut, a part of one piece
        with vram.attach("model", keeper=two.here) as lease:
            assert same(lease, arrays)


def test_cut_at_any_byte_of_what_is_said_it_goes_on(two: Nodes) -> None:
    arrays = model(100_000)
    vram.publish("model", arrays, keeper=two.origin)
    with wire() as link, link.carrier(two.origin):
        nbytes = vram.replicate(link.address, "model", streams=1, share=False, keeper=two.here).nbytes
        said = link.passed - nbytes
        assert 200 < said < 5000
        for limit in [*range(0, said, 11), said + nbytes // 2, said + nbytes - 1]:
            link.cut_after = [limit]
            vram.replicate(link.address, "model", streams=1, share=False, keeper=two.here)
            assert link.cut_after == []
        with vram.attach("model", keeper=two.here) as lease:
            assert same(lease, arrays)


@in_turns(5)
def test_who_never_gets_on_gives_up_in_time_and_leaves_nothing(two: Nodes) -> None:
    vram.publish("model", model(SIZE), keeper=two.origin)
    with wire() as link, link.carrier(two.origin):
        link.cut_after = [PIECE // 2] * 1000
        with pytest.raises(PeerGoneError):
            vram.replicate(link.address, "model", timeout=0.5, keeper=two.here)
    assert nothing_is_here(two)


def test_an_error_names_the_broken_connection_and_not_what_the_carrier_believes(two: Nodes) -> None:
    """The carrier has not heard of any break: to the last connection it says that all was sent."""
    vram.publish("model", model(PIECE // 2), keeper=two.origin)
    with wire() as link, link.carrier(two.origin):
        link.cuts_readers_only = True
        link.cut_after = [PIECE // 4]  # in the only piece

        def change(block: bytes, at: int) -> bytes:
            if link.connections == 2 and at == 0:
                time.sleep(0.6)  # a slow network: the time without progress is over with this answer
            return block

        link.change = change
        with pytest.raises(PeerGoneError):
            vram.replicate(link.address, "model", timeout=0.5, streams=1, share=False, keeper=two.here)
    assert nothing_is_here(two)


@pytest.mark.slow
def test_a_carrier_that_falls_silent_is_given_up_in_time(two: Nodes) -> None:
    vram.publish("model", model(PIECE), keeper=two.origin)
    with wire() as link, link.carrier(two.origin):
        link.is_stalled.set()
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError):
            vram.replicate(link.address, "model", timeout=0.5, keeper=two.here)
        assert time.monotonic() - began < SOON
    assert nothing_is_here(two)


def test_a_piece_that_was_changed_on_its_way_is_got_again(two: Nodes) -> None:
    arrays = model(SIZE)
    vram.publish("model", arrays, keeper=two.origin)
    changed = [1]

    def change(block: bytes, at: int) -> bytes:
        if at > PIECE and changed and len(block) > 10_000:  # the middle of a piece of full size
            changed.pop()
            return block[:500] + bytes([block[500] ^ 1]) + block[501:]
        return block

    with wire() as link, link.carrier(two.origin):
        link.change = change
        vram.replicate(link.address, "model", streams=1, keeper=two.here)
        assert not changed
        assert link.passed > SIZE + PIECE
    with vram.attach("model", keeper=two.here) as lease:
        assert same(lease, arrays)


def test_a_piece_that_is_always_wrong_is_said(two: Nodes) -> None:
    vram.publish("model", model(PIECE), keeper=two.origin)
    with wire() as link, link.carrier(two.origin):
        link.change = lambda block, at: bytes(len(block)) if at > 1 << 20 else block
        with pytest.raises(ProtocolError):
            vram.replicate(link.address, "model", streams=1, keeper=two.here)
    assert nothing_is_here(two)


@in_turns(5)
def test_a_version_that_is_replaced_meanwhile_comes_whole(two: Nodes) -> None:
    """The lease keeps it, also for a reader whose connection broke."""
    old, new = model(SIZE, 1), model(SIZE, 2)
    vram.publish("model", old, keeper=two.origin)
    with wire() as link, link.carrier(two.origin):

        def change(block: bytes, at: int) -> bytes:
            if link.passed > 2 * PIECE and vram.entry("model", keeper=two.origin).version == 1:
                vram.publish("model", new, keeper=two.origin)
                link.cut()
            return block

        link.change = change
        done = vram.replicate(link.address, "model", streams=1, keeper=two.here)
        assert (done.origin_version, done.reconnected > 0) == (1, True)
        with vram.attach("model", keeper=two.here) as lease:
            assert same(lease, old)
        assert vram.replicate(link.address, "model", keeper=two.here).origin_version == 2
    with vram.attach("model", keeper=two.here) as lease:
        assert same(lease, new)


@in_turns(5)
def test_a_version_that_is_gone_with_its_carrier_is_begun_anew(two: Nodes) -> None:
    old, new = model(SIZE, 1), model(SIZE, 2)
    vram.publish("model", old, keeper=two.origin)
    with (
        wire() as link,
        link.carrier(two.origin) as first,
        link.carrier(two.origin) as second,
    ):

        def change(block: bytes, at: int) -> bytes:
            if link.passed > 2 * PIECE and link.target == first.address:
                link.target = second.address
                vram.publish("model", new, keeper=two.origin)
                first.close()  # whose lease was the last one: nobody has that version any more
                until(lambda: versions(two) == [2], what="the end of the version before")
                link.cut()
            return block

        link.change = change
        done = vram.replicate(link.address, "model", streams=1, keeper=two.here)
    assert done.origin_version == 2
    with vram.attach("model", keeper=two.here) as lease:
        assert same(lease, new)


def versions(two: Nodes) -> list[int]:
    return [one.version for one in vram.entry("model", keeper=two.origin).versions]


@in_turns(5)
def test_a_carrier_that_is_killed_and_started_again_goes_on(two: Nodes) -> None:
    arrays = model(SIZE)
    vram.publish("model", arrays, keeper=two.origin)
    with (
        wire() as link,
        carrying(two.origin, "--name", link.address) as (first, address),
        carrying(two.origin, "--name", link.address) as (_, other),
    ):
        link.target = address

        def change(block: bytes, at: int) -> bytes:
            if link.passed > 3 * PIECE and link.target == address:
                link.target = other
                first.kill()
            return block

        link.change = change
        done = vram.replicate(link.address, "model", streams=2, keeper=two.here)
        assert done.reconnected >= 1
        assert link.passed < SIZE + 2 * PIECE + (1 << 20)
    with vram.attach("model", keeper=two.here) as lease:
        assert same(lease, arrays)


@in_turns(5)
@pytest.mark.parametrize("at", some([0, 200, 1500, PIECE // 2, 3 * PIECE, SIZE + 400], 2))
def test_a_reader_that_is_killed_leaves_nothing_or_all_of_it(two: Nodes, at: int) -> None:
    """In the greeting, before the first piece, in the middle of pieces, and where the last one has just come."""
    arrays = model(SIZE)
    vram.publish("model", arrays, keeper=two.origin)
    program = "import sys; from vram.cli import main; sys.exit(main())"
    with wire() as link, link.carrier(two.origin):
        command = [sys.executable, "-c", program, "replicate", link.address, "model", "--socket", two.here]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as reader:
            until(lambda: (link.connections and link.passed >= at) or reader.poll() is not None, what="its step")
            reader.kill()
        if not nothing_is_here(two):
            with vram.attach("model", keeper=two.here) as lease:
                assert same(lease, arrays)
        vram.replicate(link.address, "model", keeper=two.here)
    with vram.attach("model", keeper=two.here) as lease:
        assert same(lease, arrays)


def test_there_is_no_room_and_nothing_is_transferred(two: Nodes) -> None:
    vram.publish("model", model(PIECE), keeper=two.origin)
    with vram.private_keeper(max_bytes=PIECE // 2) as small, Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        with pytest.raises(QuotaError):
            vram.replicate(carrier.address, "model", keeper=small)
        assert carrier.sent == 0
        close_client(small.path)


def test_what_is_updated_in_place_comes_in_one_state(two: Nodes) -> None:
    """Under a publisher that updates all the time, every replica is of one update."""
    size = PIECE + 1000
    vram.publish("model", {"w": np.zeros(size, np.uint8)}, updatable=True, keeper=two.origin)
    over = threading.Event()

    def write() -> None:
        value = 0
        while not over.is_set():
            value = (value + 1) % 256
            with vram.update("model", keeper=two.origin) as arrays:
                arrays["w"].numpy()[:] = value

    thread, came = later(write)
    try:
        with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
            for _ in range(3):
                vram.replicate(carrier.address, "model", keeper=two.here)
                with vram.attach("model", keeper=two.here) as lease:
                    found = lease["w"].numpy()
                    assert (found == found[0]).all()
    finally:
        over.set()
        thread.join(SOON)
        vram.remove("model", keeper=two.origin)
    assert came == [None]


def test_two_slots_and_what_readers_may_write_to(two: Nodes) -> None:
    first = model(1000)
    vram.publish("slots", {"w": first["w"]}, updatable=True, swap=True, keeper=two.origin)
    with vram.update("slots", keeper=two.origin) as arrays:
        arrays["w"].numpy()[:] = 7
    vram.publish("shared", first, writable=True, keeper=two.origin)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        with vram.replicate(carrier.address, "slots", if_missing=True, keeper=two.here) as lease:
            assert (lease["w"].numpy() == 7).all()
            assert not lease.updatable
        with vram.replicate(carrier.address, "shared", if_missing=True, keeper=two.here) as lease:
            assert same(lease, first)
    vram.remove("slots", keeper=two.origin)


def test_versions_are_given_back_when_nobody_has_pulled_for_a_while(
    two: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carriers, "KEPT", 0.2)
    vram.publish("model", model(1000), keeper=two.origin)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        vram.replicate(carrier.address, "model", keeper=two.here)
        until(lambda: not vram.statistics(keeper=two.origin).leases, what="the return of the lease")


def test_the_keeper_of_the_carrier_ends(two: Nodes) -> None:
    with vram.private_keeper() as short:
        vram.publish("model", model(1000), keeper=short)
        carrier = Carrier("127.0.0.1:0", keeper=short)
    with carrier:
        with pytest.raises(PeerError):
            vram.replicate(carrier.address, "model", timeout=0.2, keeper=two.here)
