"""Deltas between versions: what changed travels, and all of it where there is no delta; always the same bytes."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.carried import Nodes, carrying, nodes, write_key
from tests.support.deadlines import until
from tests.support.deltas import (
    PIECE,
    SIZE,
    be_without,
    following,
    forget_soon,
    have_many_memories,
    is_here,
    next_of,
    offering,
    offers_nothing,
    weights,
)
from tests.support.samples import some
from tests.support.wires import wire

import vram
from vram.errors import UnsupportedError

Arrays = dict[str, Any]


def test_each_version_comes_as_what_changed(two: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    have_many_memories(monkeypatch)
    arrays = weights()
    with offering(two.origin) as carrier, following(carrier.address, two.here) as versions:
        for version in (1, 2, 3):
            vram.publish("model", arrays, keeper=two.origin)
            before = carrier.sent
            done = next(versions)
            assert (done.origin_version, done.why) == (version, {})
            assert is_here(two, arrays)
            with vram.attach("model", keeper=two.here) as lease:
                assert len(lease["w"].region.segments(0, SIZE)[0]) == 3
            if version > 1:
                assert 0 < done.delta_bytes <= SIZE / 12
                assert carrier.sent - before == done.delta_bytes
            arrays = next_of(arrays)
        assert vram.replicate(carrier.address, "model", keeper=two.here).delta_bytes == 0  # nothing has changed
        assert carrier.sent - before == done.delta_bytes


def test_readers_pass_deltas_on(two: Nodes, tmp_path: Path) -> None:
    key, arrays = write_key(tmp_path / "key"), weights(3 * PIECE)
    with (
        nodes() as more,
        offering(two.origin, key=key) as carrier,
        following(carrier.address, two.here, key=key) as one,
        following(carrier.address, more.here, key=key) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        for _ in range(2):
            vram.publish("model", arrays, keeper=two.origin)
            before = carrier.sent
            done = list(threads.map(next, (one, other)))  # both at the same time
            arrays = next_of(arrays)
        assert all(0 < one.delta_bytes <= 3 * PIECE / 12 for one in done)
        assert carrier.sent - before <= sum(one.delta_bytes for one in done)


SMALL = weights(100_000)
NEXT = next_of(SMALL)
FLIPPED = {
    **SMALL,
    "w": (SMALL["w"].view(np.uint16) ^ (np.arange(50_000, dtype=np.uint16) == 3)).view(SMALL["w"].dtype),
}
# The next version; what is here in place of the first one, and what that says of itself; why there is no delta.
WHOLE: dict[str, tuple[Arrays, Arrays | None, dict[str, str], str]] = {
    "a carrier without deltas": (NEXT, None, {}, "--deltas"),
    "other arrays": ({**SMALL, "more": np.arange(10)}, None, {}, "the arrays lie elsewhere than in version 1"),
    "everything changed": ({**SMALL, "w": -np.roll(SMALL["w"], 7)}, None, {}, "more than half as long"),
    "a base of other content": (NEXT, SMALL, {"origin_content": "0" * 32}, "does not know the version 1"),
    "a base that the carrier lacks": (NEXT, SMALL, {"origin_version": "7"}, "does not have version 7 any more"),
    "a base of which one byte differs": (NEXT, FLIPPED, {}, "1 of 1 deltas were wrong"),
    "a base of another length": (NEXT, {"w": np.arange(10)}, {}, "1 of 1 deltas were wrong"),
    "no base": (NEXT, SMALL, {"origin_content": "of another kind"}, ""),
}


@pytest.mark.parametrize("case", WHOLE)
def test_all_of_it_comes_where_there_is_no_delta_and_why_is_said(two: Nodes, case: str) -> None:
    arrays, base, meta, why = WHOLE[case]
    vram.publish("model", SMALL, keeper=two.origin)
    with offering(two.origin, deltas=why != "--deltas") as carrier:
        vram.replicate(carrier.address, "model", keeper=two.here)
        vram.publish("model", arrays, keeper=two.origin)
        if base is not None:
            said = {**vram.entry("model", keeper=two.here).meta, **meta}
            vram.publish("model", base, meta=said, keeper=two.here)
        done = vram.replicate(carrier.address, "model", keeper=two.here)
    assert done.delta_bytes == 0
    assert why in done.why.get("delta", "")
    assert bool(why) == ("delta" in done.why)
    assert is_here(two, arrays)


def test_a_delta_that_is_torn_on_its_way_is_made_up_for_by_the_piece(two: Nodes) -> None:
    arrays = weights(PIECE)
    vram.publish("model", arrays, keeper=two.origin)
    with wire() as link, link.carrier(two.origin, deltas=True):
        vram.replicate(link.address, "model", keeper=two.here)
        vram.publish("model", next_of(arrays), keeper=two.origin)
        before = link.passed
        link.change = lambda block, at: block[:-1] + b"?" if 100_000 < link.passed - before < 300_000 else block
        done = vram.replicate(link.address, "model", streams=1, keeper=two.here)
        assert "1 of 2 deltas were wrong" in done.why["delta"]
        assert link.passed - before > PIECE
    assert is_here(two, next_of(arrays))


def test_the_base_goes_with_its_carrier_and_the_rest_comes_whole(two: Nodes) -> None:
    arrays = weights()
    vram.publish("model", arrays, keeper=two.origin)
    with (
        wire() as link,
        carrying(two.origin, "--deltas", "--name", link.address) as (first, address),
        carrying(two.origin, "--deltas", "--name", link.address) as (_, other),
    ):
        link.target = address
        vram.replicate(link.address, "model", keeper=two.here)
        before = link.passed
        vram.publish("model", next_of(arrays), keeper=two.origin)

        def change(block: bytes, at: int) -> bytes:
            if link.passed - before > 600_000 and link.target == address:  # in the second delta
                link.target = other
                first.kill()
            return block

        link.change = change
        done = vram.replicate(link.address, "model", streams=1, keeper=two.here)
    assert done.reconnected >= 1
    assert "does not have version 1 any more" in done.why["delta"]
    assert is_here(two, next_of(arrays))


@pytest.mark.parametrize("at", some([0, 300, 200_000, 700_000], 1))
def test_a_reader_that_is_killed_leaves_the_version_before(two: Nodes, at: int) -> None:
    arrays = weights()
    vram.publish("model", arrays, keeper=two.origin)
    program = "import sys; from vram.cli import main; sys.exit(main())"
    with wire() as link, link.carrier(two.origin, deltas=True):
        vram.replicate(link.address, "model", keeper=two.here)
        vram.publish("model", next_of(arrays), keeper=two.origin)
        passed, came = link.passed, link.connections
        command = [sys.executable, "-c", program, "replicate", link.address, "model", "--socket", two.here]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as reader:
            until(lambda: link.connections > came and link.passed >= passed + at, what="its step")
            reader.kill()
        assert is_here(two, arrays) or is_here(two, next_of(arrays))
        assert vram.replicate(link.address, "model", keeper=two.here).delta_bytes <= SIZE / 12
    assert is_here(two, next_of(arrays))


def test_a_version_is_kept_as_a_base_until_another_was_pulled(two: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_soon(monkeypatch)

    def kept() -> list[int]:
        return [one.version for one in vram.entry("model", keeper=two.origin).versions]

    vram.publish("model", SMALL, keeper=two.origin)
    with offering(two.origin) as carrier:
        vram.replicate(carrier.address, "model", keeper=two.here)
        vram.publish("model", NEXT, keeper=two.origin)
        until(lambda: offers_nothing(carrier), what="the end of what is offered")
        assert kept() == [1, 2]
        assert vram.replicate(carrier.address, "model", keeper=two.here).delta_bytes
        until(lambda: kept() == [2], what="the end of the version before")
        vram.remove("model", keeper=two.origin)
        until(lambda: not vram.statistics(keeper=two.origin).leases, what="the end of the base of a name that is gone")


@pytest.mark.parametrize("package", ["xxhash", "zstandard"])
def test_without_the_extra_it_is_named(two: Nodes, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    be_without(package, monkeypatch)
    for act in (offering, lambda keeper: vram.replicate("127.0.0.1:1", "model", keeper=keeper)):
        with pytest.raises(UnsupportedError, match=package):
            act(two.here)


def test_what_can_be_written_to_is_no_base(two: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_soon(monkeypatch)
    vram.publish("model", SMALL, writable=True, keeper=two.origin)
    with offering(two.origin) as carrier:
        vram.replicate(carrier.address, "model", keeper=two.here)
        until(lambda: not vram.statistics(keeper=two.origin).leases, what="the return of the lease")
