"""A question to the keeper that was not asked, for want of its parentheses, is no answer."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import vram
from vram.entries.questions import asked
from vram.errors import UsageError


class Oracle(SimpleNamespace):
    """Something with a question."""

    @asked
    def is_stale(self) -> bool:
        """Ask whether it is."""
        return bool(self.stale)


@pytest.mark.parametrize("stale", [True, False])
def test_a_question_is_asked_by_a_call(stale: bool) -> None:
    one = Oracle(stale=stale)
    assert one.is_stale() is stale
    ask = one.is_stale  # as a callback
    assert ask() is stale


def test_a_question_without_its_call_is_neither_true_nor_false() -> None:
    one: Any = Oracle(stale=False)
    for wrong in (lambda: not one.is_stale, lambda: bool(one.is_stale), lambda: 1 if one.is_stale else 2):
        with pytest.raises(UsageError, match=r"is_stale is asked by a call: write is_stale\(\)"):
            wrong()


@pytest.mark.parametrize("name", ["is_stale", "is_revoked"])
def test_the_questions_of_a_lease_are_such_and_documented(name: str) -> None:
    lease: Any = object.__new__(vram.Lease)
    with pytest.raises(UsageError, match=rf"write {name}\(\)"):
        bool(getattr(lease, name))
    found = getattr(vram.Lease, name)
    assert inspect.isfunction(found)
    assert (found.__doc__ or "").startswith("Ask whether")
    assert str(inspect.signature(found)) == "(self) -> 'bool'"
