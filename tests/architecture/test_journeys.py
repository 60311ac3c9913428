"""No operation takes a longer walk than it did: see :mod:`.journeys`, which prints the table for ``make journeys``."""

from __future__ import annotations

import sys

import pytest
from tests.support.samples import in_turns

from . import journeys

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a keeper and memfds need Linux")


@in_turns(5)
def test_no_journey_is_longer_than_its_ceiling() -> None:
    assert journeys.over(journeys.measure(), journeys.CEILINGS) == []


def test_the_first_attach_loads_what_attaching_needs() -> None:
    loaded = journeys.loaded_by("import vram; vram.attach")
    needless = {
        *("vram.handover.array_channel", "vram.handover.pickling", "vram.handover.exports", "vram.entries.publish"),
        *("vram.entries.placement", "vram.entries.lend", "vram.keeper.server", "vram.keeper.catalogue"),
        *("vram.keeper.reports", "vram.driver.cuda", "vram.transports", "vram.arrays.torch", "vram.arrays.sources"),
    }
    assert not loaded & needless
    assert len(loaded) <= journeys.ATTACH_LOADS
