"""Versions whose bytes move: who may move them, what ends a move, who is next, and what counts (I13)."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.catalogues import attach, begin, noted, vars_of

from vram.errors import AccessDeniedError, AsleepError, BusyError, NotFoundError, QuotaError, UsageError, VramError
from vram.keeper.catalogue import Catalogue
from vram.keeper.limits import Quotas
from vram.keeper.records import Answered, Claim, Effect, Free, Lease, Session, Version, Waiter

KEEPER, ANN, BOB = 1000, 1001, 1002


@pytest.fixture
def books() -> Catalogue:
    return Catalogue(keeper_uid=KEEPER)


@pytest.fixture
def ann(books: Catalogue) -> Session:
    return books.connect(ANN, 11, "ann")


@pytest.fixture
def bob(books: Catalogue) -> Session:
    return books.connect(BOB, 12, "bob")


def published(books: Catalogue, session: Session, name: str = "w", **options: Any) -> Version:
    half = begin(books, session, name, nbytes=100, handles=3, **options)
    return books.commit(half, "gpu memory", 0.0)[0]


def lease(books: Catalogue, session: Session, purpose: str = "", now: float = 1.0, name: str = "w") -> Lease:
    found = attach(books, session, name, now, purpose=purpose)
    assert isinstance(found, Lease)
    return found


def moved(books: Catalogue, session: Session, by: Lease, token: str, now: float = 2.0) -> tuple[Version, list[Effect]]:
    half = begin(books, session, "w", nbytes=80, handles=2, lease=by.id)
    return books.commit(half, token, now)


def parked(books: Catalogue, session: Session) -> Version:
    version = published(books, session)
    by = lease(books, session, "park")
    moved(books, session, by, "host memory")
    books.release(session, by.id, 0.0)
    return version


def wait(books: Catalogue, session: Session, call: int, seconds: float | None = None) -> Waiter:
    found = attach(books, session, "w", 2.0, call=call, purpose="wake", wait=seconds)
    assert isinstance(found, Waiter)
    return found


def used(books: Catalogue, uid: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of one user and of all: bytes, entries, descriptors."""
    return vars_of(books.accounts.of(uid)), vars_of(books.accounts.total)


# -- parking ----------------------------------------------------------------------------------------------------
def test_what_counts_is_the_memory_that_there_is(books: Catalogue, ann: Session, bob: Session) -> None:
    published(books, ann)
    assert used(books, ANN)[0] == (100, 1, 3)
    by = lease(books, ann, "park")
    half = begin(books, ann, "w", nbytes=80, handles=2, lease=by.id)
    assert used(books, ANN)[0] == (180, 1, 5)  # the keeper has both
    books.commit(half, "host memory", 2.0)
    assert used(books, ANN) == ((80, 1, 2), (80, 1, 2))
    assert books.names.held("w") == (1, 80)
    books.release(ann, by.id, 0.0)
    assert books.names.held("w") == (0, 0)
    by = lease(books, ann, "wake")
    books.arrived(half := begin(books, ann, "w", nbytes=90, handles=3, lease=by.id), 100)
    books.commit(half, "gpu memory", 3.0, nbytes=100)
    assert used(books, ANN) == ((100, 1, 3), (100, 1, 3))
    books.disconnect(ann, 4.0)
    books.remove(books.connect(KEEPER), "w", now=0.0)
    assert used(books, ANN) == ((0, 0, 0), (0, 0, 0))


def test_a_ceiling_that_holds_one_of_both_is_enough() -> None:
    books = Catalogue(Quotas(max_bytes=100, user_bytes=100), keeper_uid=KEEPER)
    ann = books.connect(ANN)
    published(books, ann)
    by = lease(books, ann, "park")
    with pytest.raises(QuotaError):
        begin(books, ann, "w", nbytes=101, handles=1, lease=by.id)
    half = begin(books, ann, "w", nbytes=50, handles=1, lease=by.id)
    with pytest.raises(QuotaError):
        books.arrived(half, 101)
    books.arrived(half, 100)
    assert books.commit(half, "host memory", 2.0, nbytes=100)[0].parked
    assert used(books, ANN)[0] == (100, 1, 1)


def test_nothing_is_parked_under_its_readers(books: Catalogue, ann: Session, bob: Session) -> None:
    version = published(books, ann)
    reader = lease(books, bob)
    with pytest.raises(BusyError, match="1 lease of 100 B") as refused:
        attach(books, ann, "w", 1.0, purpose="park", wait=10.0)
    assert refused.value.holders == (f"{bob}, 100 B",)
    assert not version.parked
    books.release(bob, reader.id, 0.0)
    lease(books, ann, "park")
    with pytest.raises(BusyError, match="pid 11"):  # another parks it
        attach(books, books.connect(ANN, 13), "w", 1.0, purpose="park")


@pytest.mark.parametrize("uid", [BOB, KEEPER, 65_534])
def test_only_its_owner_parks_and_wakes(books: Catalogue, ann: Session, uid: int) -> None:
    published(books, ann)
    other = books.connect(uid)
    with pytest.raises(AccessDeniedError, match="may park it"):
        attach(books, other, "w", 1.0, purpose="park")
    books.remove(ann, "w", now=0.0)
    parked(books, ann)
    with pytest.raises(AccessDeniedError, match="may wake it"):
        attach(books, other, "w", 1.0, purpose="wake", wait=10.0)
    with pytest.raises(AsleepError, match="wake=True"):
        attach(books, other, "w", 1.0)


def test_a_lease_that_is_not_for_it_moves_nothing(books: Catalogue, ann: Session, bob: Session) -> None:
    version = published(books, ann)
    reader = lease(books, ann)
    for session, number in ((ann, reader.id), (ann, 99), (bob, reader.id)):
        with pytest.raises(VramError):
            begin(books, session, "w", nbytes=80, handles=2, lease=number)
    books.release(ann, reader.id, 0.0)
    by = lease(books, ann, "park")
    published(books, ann, "other")
    with pytest.raises(UsageError, match="no right"):
        begin(books, ann, "other", nbytes=80, handles=2, lease=by.id)
    for how in ("writable", "updatable"):
        with pytest.raises(UsageError, match="read-only"):
            begin(books, ann, "w", nbytes=80, handles=2, lease=by.id, **{how: True})
    assert not version.parked


# -- waking -----------------------------------------------------------------------------------------------------
def test_to_wake_what_is_awake_is_to_attach_it(books: Catalogue, ann: Session, bob: Session) -> None:
    published(books, ann)
    assert [lease(books, one, "wake").purpose for one in (ann, bob)] == ["", ""]


@pytest.mark.parametrize("how", ["removed", "expired"])
def test_what_is_gone_while_it_is_woken_is_for_the_next_in_line_to_publish(
    books: Catalogue, ann: Session, how: str
) -> None:
    """Whoever wakes it has the right for long: who waits for that would wait for nothing."""
    version = published(books, ann, ttl=50.0)
    parking = lease(books, ann, "park")
    moved(books, ann, parking, "host memory")
    books.release(ann, parking.id, 0.0)
    by = lease(books, books.connect(ANN), "wake")
    assert isinstance(attach(books, ann, "w", 2.0, call=1, purpose="wake", claim=True, wait=None), Waiter)
    only = wait(books, ann, 2)
    effects = books.remove(ann, "w", now=0.0) if how == "removed" else books.expire(60.0)
    (claimed,) = [one for one in effects if isinstance(one, Answered) and isinstance(one.result, Claim)]
    assert claimed.call == 1
    assert version.move is None
    assert list(ann.waiters.values()) == [only]  # who does not load waits for who does
    with pytest.raises(NotFoundError, match="removed while"):
        begin(books, by.session, "w", nbytes=80, handles=2, lease=by.id)
    assert books.release(by.session, by.id, 0.0) == [Free("host memory")]
    assert books.expire(2000.0) == []


def test_another_user_waits_only_while_somebody_wakes(books: Catalogue, ann: Session, bob: Session) -> None:
    parked(books, ann)
    by = lease(books, ann, "wake")
    wait(books, bob, 1)
    (refused,) = books.release(ann, by.id, 0.0)
    assert isinstance(refused, Answered)
    assert isinstance(refused.result, AccessDeniedError)


def test_the_time_of_who_waits_ends(books: Catalogue, ann: Session) -> None:
    parked(books, ann)
    lease(books, ann, "wake")
    wait(books, ann, 1, seconds=5.0)
    (refused,) = books.expire(8.0)
    assert isinstance(refused, Answered)
    assert "was not woken in time; pid 11, uid 1001" in str(refused.result)


def test_a_new_version_serves_those_who_wait_for_the_old_one(books: Catalogue, ann: Session) -> None:
    parked(books, ann)
    by = lease(books, ann, "wake")
    wait(books, ann, 1)
    half = begin(books, ann, "w", nbytes=100, handles=3)
    version, effects = books.commit(half, "new", 3.0)
    assert [one.result.version for one in effects if isinstance(one, Answered)] == [version]
    with pytest.raises(NotFoundError, match="replaced"):
        moved(books, ann, by, "gpu memory again")
    assert books.release(ann, by.id, 0.0) == [Free("host memory")]


def test_a_version_of_the_past_that_is_parked_is_not_woken(books: Catalogue, ann: Session) -> None:
    parked(books, ann)
    lease(books, ann, "wake")
    published(books, ann)
    with pytest.raises(NotFoundError, match="only the current version"):
        attach(books, ann, "w", 3.0, version=1, purpose="wake")


def test_each_step_of_a_move_is_written(books: Catalogue, ann: Session) -> None:
    version = published(books, ann)
    noted(books)
    by = lease(books, ann, "park")
    assert noted(books) == {by: False, version: False}
    moved(books, ann, by, "host memory")
    assert noted(books) == {version: True, by: False}
    books.release(ann, by.id, 3.0)
    assert noted(books) == {by: False}
    waking = lease(books, ann, "wake")
    assert noted(books) == {waking: False, version: False}
    books.release(ann, waking.id, 3.0)  # in vain
    assert noted(books) == {waking: False, version: False}


def test_a_reader_that_comes_ends_a_parking_which_is_written(books: Catalogue, ann: Session, bob: Session) -> None:
    version = published(books, ann)
    by = lease(books, ann, "park")
    noted(books)
    reader = lease(books, bob)
    assert by.purpose == "over"
    assert noted(books) == {reader: False, by: False, version: False}


def test_what_may_not_move_is_refused_with_its_reason(books: Catalogue, ann: Session, bob: Session) -> None:
    def said(kind: type[VramError], session: Session, purpose: str, name: str = "w") -> str:
        with pytest.raises(kind) as caught:
            attach(books, session, name, 1.0, purpose=purpose)
        return str(caught.value)

    for option in ("writable", "updatable"):
        published(books, ann, option, **{option: True})
        assert said(UsageError, ann, "park", option) == (
            f"'{option}' version 1 was published with {option}=True, and what was written to it while it is parked "
            f"would be lost: publish it read-only, or remove it"
        )
    published(books, ann)
    refused = said(AccessDeniedError, bob, "park")
    assert refused == f"'w' version 1 belongs to uid {ANN}, who alone may park it: not uid {BOB}"
    readers = [lease(books, bob) for _ in range(25)]
    with pytest.raises(BusyError) as busy:
        attach(books, ann, "w", 1.0, purpose="park")
    assert str(busy.value).startswith("'w' version 1 cannot be parked as long as somebody holds it: 25 leases of")
    assert len(busy.value.holders) == 20
    for one in readers:
        books.release(bob, one.id, 1.0)
    by = lease(books, ann, "park")
    moved(books, ann, by, "host memory")
    books.release(ann, by.id, 2.0)
    way_out = "its bytes are in memory of the host. vram.attach('w', wake=True) brings them back"
    assert said(AsleepError, bob, "") == f"'w' version 1 is parked: {way_out}"
    assert said(AsleepError, ann, "park") == f"'w' version 1 is parked already: {way_out}"
    lease(books, ann, "wake", now=10.0)
    with pytest.raises(BusyError) as busy:
        attach(books, ann, "w", 40.0, purpose="wake")
    assert str(busy.value).startswith("'w' is being woken by another process, for 30 s so far")
