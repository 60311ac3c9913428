"""The judge of planted bugs: what counts as caught, and what does not."""

from __future__ import annotations

import json

import pytest
from tests.selftest import reasons
from tests.selftest.reasons import Reason

PLACE = ("test_x.py::TestBug::test_rule", "call")
ASSERTED = Reason(*PLACE, "AssertionError", "assert 3 == 2", "assert live == before")


def test_an_assertion_with_the_words_is_a_proof() -> None:
    for because in ("assert 3 == 2", "live == before"):
        reasons.require([ASSERTED], because)
    reasons.require([Reason(*PLACE, "Failed", "DID NOT RAISE UsageError", "")], "DID NOT RAISE UsageError")


def test_another_assertion_is_none() -> None:
    with pytest.raises(pytest.fail.Exception, match="assert 3 == 2"):
        reasons.require([ASSERTED], "DID NOT RAISE")
    with pytest.raises(pytest.fail.Exception, match="not caught at all"):
        reasons.require([], "DID NOT RAISE")


def test_a_crash_of_the_plant_is_no_proof() -> None:
    """Although the words are in it; unless the table says that this error is what the bug does."""
    crash = Reason(*PLACE, "AttributeError", "no attribute 'x'", "assert live == before")
    with pytest.raises(pytest.fail.Exception, match="AttributeError"):
        reasons.require([crash], "live == before")
    reasons.require([crash], "AttributeError: no attribute 'x'")


def test_what_was_printed_is_read_back() -> None:
    printed = f"..F\nREASON {json.dumps(list(ASSERTED))}\n1 failed\n"
    assert reasons.of(printed) == [ASSERTED]
