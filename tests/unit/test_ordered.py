"""The dict in the order of its keys, against one that is sorted anew for each question."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram.keeper import ordered
from vram.keeper.ordered import Ordered

KEYS = st.integers(0, 15)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "add", "take", "append"]), KEYS), max_size=120)


@given(steps=STEPS, places=st.lists(KEYS, max_size=5))
def test_what_is_added_and_taken_out_anywhere_is_read_in_order_from_any_key_on(
    steps: list[tuple[str, int]], places: list[int]
) -> None:
    """With blocks of 4, so that they are split, filled and emptied."""
    patch = pytest.MonkeyPatch()
    patch.setattr(ordered, "_MOST", 4)
    try:
        real: Ordered[int, str] = Ordered()
        model: dict[int, str] = {}
        for number, (what, key) in enumerate(steps):
            if what == "take":
                assert real.pop(key, None) == model.pop(key, None)
            else:
                key = max(model, default=0) + key if what == "append" else key
                real[key] = model[key] = f"{number}"
            assert list(real) == sorted(model)
            assert len(real) == len(model)
            assert dict(real) == model
            assert all(0 < len(block) <= 4 for block in real._blocks)
        for place in places:
            assert list(real.beginning(place)) == [model[key] for key in sorted(model) if key >= place]
            assert (place in real) == (place in model)
    finally:
        patch.undo()


def test_what_was_taken_out_is_not_passed_over() -> None:
    """A reader of the last of many finds it at once, however many were there before."""
    real: Ordered[int, int] = Ordered()
    for number in range(20 * ordered._MOST):
        real[number] = number
    for number in range(20 * ordered._MOST - 1):
        del real[number]
    assert len(real._blocks) == 1
    assert list(islice(real.beginning(0), 2)) == [20 * ordered._MOST - 1]
    with pytest.raises(KeyError):
        del real[0]
