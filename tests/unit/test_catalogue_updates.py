"""Updates in place, as the catalogue keeps them: who may update, what a page of a lease costs, whom an update finds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.support.catalogues import ANN, BOB, KEEPER, NOBODY, lease, publish

from vram.errors import AccessDeniedError, NotFoundError, QuotaError, UsageError
from vram.keeper.catalogue import Catalogue
from vram.keeper.limits import Quotas
from vram.keeper.records import Free, Session


@pytest.fixture
def books() -> Catalogue:
    return Catalogue(keeper_uid=KEEPER, nobody=NOBODY)


@pytest.fixture
def ann(books: Catalogue) -> Session:
    return books.connect(ANN, 11, "ann")


@pytest.fixture
def bob(books: Catalogue) -> Session:
    return books.connect(BOB, 12, "bob")


def page(nbytes: int = 4096) -> SimpleNamespace:
    return SimpleNamespace(nbytes=nbytes)


def used(books: Catalogue) -> tuple[int, int]:
    """Bytes and descriptors that bob pays for."""
    return books.accounts.of(BOB).nbytes, books.accounts.of(BOB).handles


def test_a_publisher_begins_and_ends_an_update(books: Catalogue, ann: Session) -> None:
    published, _ = publish(books, ann, updatable=True)
    assert not published.updating
    assert books.update(ann, "w", 1) is published
    assert published.updating
    books.updated(ann, "w", 1, 5, whole=True)
    assert (published.updating, published.torn, published.updates) == (False, False, 5)


def test_an_update_cut_short_leaves_the_version_torn_until_the_next_whole_one(books: Catalogue, ann: Session) -> None:
    published, _ = publish(books, ann, updatable=True)
    books.update(ann, "w", 1)
    books.updated(ann, "w", 1, 0, whole=False)
    assert (published.updating, published.torn, published.updates) == (False, True, 1)
    books.update(ann, "w", 1)
    books.updated(ann, "w", 1, 2, whole=True)
    assert (published.torn, published.updates) == (False, 2)


def test_each_step_of_an_update_is_a_change_of_the_version(books: Catalogue, ann: Session) -> None:
    published, _ = publish(books, ann, updatable=True)
    books.changed.clear()
    books.update(ann, "w", 1)
    assert books.changed == {published: False}
    books.changed.clear()
    books.updated(ann, "w", 1, 1, whole=True)
    assert books.changed == {published: False}


def test_the_end_of_an_update_to_a_version_that_is_gone_changes_nothing(books: Catalogue, ann: Session) -> None:
    publish(books, ann, updatable=True)
    books.remove(ann, "w", now=0.0)
    books.changed.clear()
    books.updated(ann, "w", 1, 1, whole=True)
    assert books.changed == {}


def test_only_the_publishing_connection_updates(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann, updatable=True)
    with pytest.raises(
        AccessDeniedError,
        match=r"^only the process that published 'w' version 1 may update it in place, pid 11, uid 1001",
    ):
        books.update(bob, "w", 1)
    books.disconnect(ann, 0.0)
    with pytest.raises(AccessDeniedError, match=r"update it in place, which is gone: publish it again$"):
        books.update(bob, "w", 1)


def test_an_update_names_a_version_that_is_current_and_updatable(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann, "frozen")
    with pytest.raises(UsageError, match=r"^'frozen' version 1 was not published with updatable=True$"):
        books.update(ann, "frozen", 1)
    with pytest.raises(NotFoundError, match="'frozen'"):
        books.update(ann, "frozen", 2)
    with pytest.raises(NotFoundError, match="'none'"):
        books.update(bob, "none", 1)
    with pytest.raises(UsageError):
        books.update(bob, "", 1)


def test_a_version_that_was_replaced_is_not_updated(books: Catalogue, ann: Session, bob: Session) -> None:
    first, _ = publish(books, ann, updatable=True)
    lease(books, bob)
    publish(books, ann, token="t2", updatable=True)
    with pytest.raises(
        NotFoundError, match=r"^'w' version 1 was replaced or removed; its readers keep what they have$"
    ):
        books.update(ann, "w", 1)
    assert not first.updating


def test_an_update_sees_the_leases_behind_a_number(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann, updatable=True)
    held = [lease(books, bob) for _ in range(3)]
    with pytest.raises(UsageError, match=r"^this connection does not update 'w' version 1$"):
        books.pages(ann, "w", 1, 0)
    assert list(books.cursors(ann, "w", 1, 0)) == held
    assert list(books.cursors(ann, "w", 1, held[0].id)) == held[1:]
    books.update(ann, "w", 1)
    assert list(books.pages(ann, "w", 1, 0)) == held
    assert list(books.pages(ann, "w", 1, held[1].id)) == held[2:]
    with pytest.raises(UsageError, match=r"^this connection does not update 'w' version 1$"):
        books.pages(bob, "w", 1, 0)
    with pytest.raises(UsageError, match=r"^this connection did not publish 'w' version 1 to be updated$"):
        books.cursors(bob, "w", 1, 0)


def test_a_lease_keeps_one_page_at_a_time_which_its_holder_pays_for(
    books: Catalogue, ann: Session, bob: Session
) -> None:
    publish(books, ann, updatable=True)
    held, first, second = lease(books, bob), page(), page(8192)
    before = used(books)
    assert books.give_page(bob, held.id, first) == []
    assert held.page is first
    books.changed.clear()
    assert books.give_page(bob, held.id, second) == [Free(first)]
    assert (held.page, books.changed) == (second, {held: False})
    assert used(books) == (before[0] + 8192, before[1] + 1)
    assert books.release(bob, held.id, 0.0) == [Free(second)]
    assert used(books) == (0, 0)


def test_a_page_belongs_to_a_lease_of_ones_own_on_an_updatable_version(
    books: Catalogue, ann: Session, bob: Session
) -> None:
    publish(books, ann, updatable=True)
    publish(books, ann, "frozen")
    held, frozen = lease(books, bob), lease(books, bob, "frozen")
    with pytest.raises(NotFoundError, match=rf"^'?lease {held.id} is not held by this connection'?$"):
        books.give_page(ann, held.id, page())
    with pytest.raises(UsageError, match=rf"^lease {frozen.id} is on what is never updated in place$"):
        books.give_page(bob, frozen.id, page())
    assert (held.page, frozen.page) == (None, None)


def test_a_page_over_the_ceiling_is_refused_and_the_earlier_one_stays(books: Catalogue, ann: Session) -> None:
    books.accounts.quotas = Quotas(user_bytes=10_000)
    publish(books, ann, updatable=True)
    held, first = lease(books, ann), page()
    books.give_page(ann, held.id, first)
    with pytest.raises(QuotaError):
        books.give_page(ann, held.id, page(8192))
    assert held.page is first


def test_the_state_of_updates_is_that_of_the_leased_version(books: Catalogue, ann: Session, bob: Session) -> None:
    published, _ = publish(books, ann, updatable=True)
    held = lease(books, bob)
    assert books.update_state(bob, held.id) is published
    with pytest.raises(NotFoundError, match=rf"^'?lease {held.id} is not held by this connection'?$"):
        books.update_state(ann, held.id)


def test_a_version_whose_memory_is_gone_is_taken_out(books: Catalogue, ann: Session, bob: Session) -> None:
    published, _ = publish(books, ann)
    books.forget(published)
    assert (books.versions, books.entries) == (0, 0)
    with pytest.raises(NotFoundError, match="is gone or was never there; nothing is current, and the next one is 2"):
        books.attach(bob, "w", 0.0, version=1)
