"""Whom the producer of a ring waits for, where others want all places that it has."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support.forked import forked
from tests.support.keeper_here import open_to_all
from tests.support.other_users import OTHER, needs_root

import vram
from vram.driver import words as shared
from vram.errors import CapacityError
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.updates import cursors, give_page
from vram.sharing.channel import close_fds
from vram.testing.keeper import SOON

pytestmark = pytest.mark.slow  # goes with the places of a ring per user


PLACES = 8
ALL = 2**62  # more than any frame: who says so is done with all that will come


@pytest.fixture
def path() -> Iterator[str]:
    with open_to_all() as found:
        yield found
        close_client(found)


def create(path: str, **options: Any) -> vram.Ring:
    return vram.Ring.create("camera", shape=4, dtype="uint8", slots=2, keeper=path, **options)


def put(ring: vram.Ring, count: int) -> None:
    for _ in range(count):
        ring.put(np.zeros(4, np.uint8), timeout=SOON)


class Greedy:
    """Leases on a ring, each with a page whose word is the same."""

    def __init__(self, path: str, count: int, word: int) -> None:
        self._stage = contextlib.ExitStack()
        client = self._stage.enter_context(KeeperClient.connect(path, label="greedy"))
        fds: list[int] = []
        self.words = shared.make(fds)
        self.words[0] = word
        self.leased: list[Any] = []
        for _ in range(count):
            one = client.lease("camera", access="r")
            self.leased.append(one)
            close_fds(one.fds)
            give_page(client, one.lease_id, fds[0])
        close_fds(fds)

    def __enter__(self) -> Greedy:
        return self

    def __exit__(self, *_: object) -> None:
        self.leased.clear()
        self._stage.close()


def another(path: str, uid: int, count: int) -> contextlib.AbstractContextManager[Any]:
    """Have so many leases of another user, who says of all that it reads and is done with everything."""
    held: list[Greedy] = []

    def come() -> None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        held.append(Greedy(path, count, ALL))

    return forked(before=come)


def waited_for(ring: vram.Ring) -> Counter[int]:
    """Return for how many consumers of each user the producer waits."""
    rows = cursors(ring._client, "camera", ring._version, 0).rows
    return Counter(row.uid for row in rows if row.lease in ring._admitted)


@needs_root
def test_no_user_takes_all_places_of_a_ring(path: str) -> None:
    """Each has at most half of what the others leave, in the order in which they came; the producer's own the rest."""
    with create(path, max_consumers=PLACES) as ring, contextlib.ExitStack() as stage:
        for uid in (OTHER, OTHER + 1, OTHER + 2):
            stage.enter_context(another(path, uid, 2 * PLACES))
        put(ring, 3)
        assert waited_for(ring) == {OTHER: 4, OTHER + 1: 2, OTHER + 2: 1}
        with vram.Ring.attach("camera", keeper=path) as mine, vram.Ring.attach("camera", keeper=path) as more:
            put(ring, 1)
            mine.next(timeout=SOON).close()
            with pytest.raises(CapacityError, match="max_consumers"):
                more.next(timeout=0)
        assert waited_for(ring)[OTHER] == 4


@needs_root
def test_the_one_place_of_a_ring_is_anybodys(path: str) -> None:
    with create(path, max_consumers=1) as ring, another(path, OTHER, 2):
        put(ring, 3)
        assert waited_for(ring) == {OTHER: 1}


@needs_root
def test_one_other_user_has_half_of_the_places_that_the_producers_user_leaves(path: str) -> None:
    with create(path, max_consumers=PLACES) as ring, Greedy(path, 2, ALL), another(path, OTHER, PLACES):
        put(ring, 3)
        assert waited_for(ring) == {0: 2, OTHER: 3}


def test_who_speaks_late_takes_no_place_that_another_has(path: str) -> None:
    """Places went by the numbers of leases: who leased before anybody, and said nothing, could take them all later."""
    with create(path, max_consumers=2) as ring, Greedy(path, 4, 0) as late, Greedy(path, 2, ALL) as first:
        put(ring, 3)
        assert ring._admitted == {one.lease_id for one in first.leased}
        late.words[0] = ALL
        put(ring, 4)
        assert ring._admitted == {one.lease_id for one in first.leased}
        first.words[0] = 0  # they leave
        put(ring, 4)
        assert not ring._admitted  # who was told that there is no room has none until it leases again
        with Greedy(path, 1, ALL) as new:
            put(ring, 4)
            assert ring._admitted == {new.leased[0].lease_id}
