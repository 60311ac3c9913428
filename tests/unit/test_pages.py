"""What people are shown, page by page: complete, in order, and never at the cost of what others have there."""

from __future__ import annotations

import pytest
from tests.support.catalogues import attach, begin
from tests.support.restored import restored

from vram.keeper import listing
from vram.keeper import messages as m
from vram.keeper.catalogue import Catalogue
from vram.keeper.records import Lease, Session, Version


@pytest.fixture
def books() -> Catalogue:
    return Catalogue(keeper_uid=1000)


@pytest.fixture
def ann(books: Catalogue) -> Session:
    return books.connect(1001, 11, "ann")


@pytest.fixture
def bob(books: Catalogue) -> Session:
    return books.connect(1002, 12, "bob")


def publish(books: Catalogue, session: Session, name: str, nbytes: int = 1) -> Version:
    version, _ = books.commit(begin(books, session, name, nbytes=nbytes, handles=1), name, 0.0)
    version.settle(m.encode(m.Entry(name, version.number, 1, False, [m.SegmentRow(1, 1, 0)], ["host"], b"", False, {})))
    return version


def lease(books: Catalogue, session: Session, name: str = "w") -> Lease:
    got = attach(books, session, name, 0.0)
    assert isinstance(got, Lease)
    return got


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "b", "c"])
def test_pages_of_leases_go_on_behind_the_last_also_when_it_is_over(
    books: Catalogue, ann: Session, bob: Session, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that are there from the first page to the last come once, whatever ends in between."""
    monkeypatch.setattr(listing, "_PAGE", 150)  # some rows
    for name in ("a", "a/b", "b", "a/b", "ab", "a/b/c"):
        publish(books, ann, name)
        for _ in range(7):
            lease(books, bob, name)
    books.remove(ann, "ab", now=0.0)  # it is still held
    there = [one for one in books.leases.values() if one.version.name.startswith(prefix)]
    there.sort(key=lambda one: (one.version.name, one.version.number, one.id))
    ended: set[int] = set()
    found: list[int] = []
    after, more = ("", 0, 0), True
    while more:
        page = listing.holders(books, m.Holders(1, prefix, after), 1.0)
        found += [row.lease_id for row in page.rows]
        more = page.more
        assert page.rows or not there
        if page.rows:
            last = page.rows[-1]
            after = last.name, last.version, last.lease_id
            books.release(bob, last.lease_id, 0.0)  # the very lease behind which the next page begins
            ended.add(last.lease_id)
    assert found == [one.id for one in there]
    assert len(ended) > 1 or not there


def test_leases_are_found_by_name_and_version_after_a_restart(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann, "w", nbytes=10)
    older = [lease(books, bob), lease(books, ann)]
    publish(books, ann, "w", nbytes=5)
    publish(books, ann, "v", nbytes=3)
    newer = [lease(books, bob, "v"), lease(books, bob)]
    there = [newer[0], *older, newer[1]]
    moved = restored(books)
    assert [one.id for one in moved.names.leases_under("")] == [one.id for one in there]
    assert [one.id for one in moved.names.leases_under("w")] == [one.id for one in there[1:]]
    assert (moved.names.held("w"), moved.names.held("v")) == ((3, 15), (1, 3))
    for one in list(moved.leases.values()):
        moved.release(one.session, one.id, 0.0)
    assert list(moved.names.leases_under("")) == []
    assert moved.names.held("w") == (0, 0)
