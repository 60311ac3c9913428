"""Those who wait for a name: who waits for a version that is yet to come costs nobody who publishes."""

from __future__ import annotations

from typing import Any

import pytest

from vram.keeper.catalogue import Catalogue
from vram.keeper.records import Granted, Line, Session, Waiter

pytestmark = pytest.mark.slow  # goes with the fair shares of a keeper


def waiter(order: int, wants: int = 0) -> Waiter:
    session = Session(1, 1000, 1, "")
    return Waiter(order, session, order, "w", wants, "r", None, False, None)


def test_who_is_due_comes_in_order_and_the_rest_is_not_looked_at() -> None:
    line = Line()
    for order, wants in enumerate([3, 0, 2, 2**53, 0, 3]):
        line.add(waiter(order, wants))
    assert [one.order for one in line.due(1)] == [1, 4]
    assert [one.order for one in line.due(2)] == [1, 2, 4]
    assert [one.order for one in line.due(3)] == [0, 1, 2, 4, 5]
    assert [one.order for one in line.due(3)] == [0, 1, 2, 4, 5]
    assert list(line.all) == [0, 1, 2, 3, 4, 5]


def test_who_waits_no_longer_is_nowhere() -> None:
    line = Line()
    some = [waiter(order, wants) for order, wants in enumerate([0, 5, 5, 7])]
    for one in some:
        line.add(one)
    line.remove(some[1])
    assert line._later == [(5, 2), (7, 3)]
    assert [one.order for one in line.due(5)] == [0, 2]
    for one in (some[0], some[2], some[3]):
        line.remove(one)
    assert not line.all
    assert not line.due(9)
    assert not line._later


def test_a_publication_looks_at_nobody_who_waits_for_a_later_version() -> None:
    """One user's 4,096 waiters made each publication of another user's name four times as dear."""
    books = Catalogue()
    publisher, patient = books.connect(1000, 1, "publisher"), books.connect(1001, 2, "patient")
    for call in range(1000):
        books.attach(patient, "w", 0.0, call=call, version=2**53, wait=None)
    books.attach(patient, "w", 0.0, call=1000, version=2, wait=None)
    looked: list[Any] = []
    right = books._try
    books._try = lambda one, *rest: (looked.append(one.call), right(one, *rest))[1]  # type: ignore[method-assign]
    for number in (1, 2):
        publication = books.begin(publisher, "w", nbytes=1, handles=1)
        _, effects = books.commit(publication, None, float(number))
        granted = [effect.call for effect in effects if isinstance(effect, Granted)]
        assert granted == ([1000] if number == 2 else [])
        assert len(books._waiters["w"]._later) == 1000 + (number == 1)
    assert looked == [1000]
