"""The keeper's books, one promise at a time. What holds for any order of calls is in the state machine beside it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.support.catalogues import ANN, BOB, KEEPER, NOBODY, attach, begin, lease, noted, publish, vars_of, waits
from tests.support.restored import restored

from vram.errors import (
    AccessDeniedError,
    BusyError,
    MismatchError,
    NotFoundError,
    QuotaError,
    UsageError,
    WaitTimeoutError,
)
from vram.keeper import catalogue as module
from vram.keeper import names
from vram.keeper.catalogue import Catalogue
from vram.keeper.limits import Quotas, Usage
from vram.keeper.records import (
    Answered,
    Claim,
    Free,
    Lease,
    Notify,
    Session,
    Waiter,
)
from vram.keeper.rules import MAX_META, MAX_NAME, check_meta, check_version


@pytest.fixture
def books() -> Catalogue:
    return Catalogue(keeper_uid=KEEPER)


@pytest.fixture
def ann(books: Catalogue) -> Session:
    return books.connect(ANN, 11, "ann")


@pytest.fixture
def bob(books: Catalogue) -> Session:
    return books.connect(BOB, 12, "bob")


# -- publishing -----------------------------------------------------------------------------------------------------


def test_a_name_belongs_to_who_published_it(books: Catalogue, ann: Session, bob: Session) -> None:
    root = books.connect(0)
    publish(books, ann)
    for stranger in (bob, root):
        with pytest.raises(AccessDeniedError, match=f"uid {ANN}"):
            publish(books, stranger)
        with pytest.raises(AccessDeniedError, match=f"uid {ANN}"):
            books.remove(stranger, "w", now=0.0)
    books.remove(ann, "w", now=0.0)
    publish(books, bob)


def test_the_first_of_two_who_begin_wins_and_the_others_token_stays_theirs(
    books: Catalogue, ann: Session, bob: Session
) -> None:
    mine, theirs = (begin(books, who, "w", nbytes=100, handles=1) for who in (ann, bob))
    books.commit(theirs, "bobs", 0.0)
    with pytest.raises(AccessDeniedError):
        books.commit(mine, "anns", 0.0)
    assert books.accounts.of(ANN) == Usage() or books.accounts.of(ANN).nbytes == 0


def test_an_unmapped_user_reads_and_owns_nothing(books: Catalogue, ann: Session) -> None:
    unmapped = books.connect(NOBODY)
    with pytest.raises(AccessDeniedError, match="unmapped"):
        publish(books, unmapped)
    with pytest.raises(AccessDeniedError, match="unmapped"):
        attach(books, unmapped, "w", 0.0, claim=True)
    publish(books, ann)
    lease(books, unmapped)
    with pytest.raises(AccessDeniedError):
        books.remove(unmapped, "w", now=0.0)


@pytest.mark.parametrize(
    "name",
    [
        "", "/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "ä", "a b", "a\n", "a\0", "x" * (MAX_NAME + 1), "a\\b", "*",
        "~", "~a", "~/a", "~a/", "a/~b/c", "~a//b", "~a/../b", "a~", "~a b/c", "~~a/b", "~a:b/c",
    ],
)  # fmt: skip
def test_names_that_cannot_be(books: Catalogue, ann: Session, name: str) -> None:
    with pytest.raises(UsageError, match="characters"):
        publish(books, ann, name)
    with pytest.raises(UsageError, match="characters"):
        attach(books, ann, name, 0.0)


@pytest.mark.parametrize("name", ["a", "a/b", "...", "a..b", "x" * MAX_NAME, "A-Z_0.9@host:8000/v1+2", "..a/b.."])
def test_names_that_can_be(books: Catalogue, ann: Session, name: str) -> None:
    publish(books, ann, name)
    assert lease(books, ann, name).version.name == name


@pytest.mark.parametrize("ttl", [0, -1, float("nan"), float("inf"), 1e12])
def test_times_to_live_that_cannot_be(books: Catalogue, ann: Session, ttl: float) -> None:
    with pytest.raises(UsageError, match="ttl"):
        publish(books, ann, ttl=ttl)


def test_meta_is_bounded(books: Catalogue, ann: Session) -> None:
    publish(books, ann, meta={"k": "v" * (MAX_META - 1)})
    with pytest.raises(UsageError, match=str(MAX_META)):
        publish(books, ann, meta={"k": "v" * MAX_META})


# -- quotas ---------------------------------------------------------------------------------------------------------


def test_a_full_keeper_can_replace_what_it_would_free(ann: Session) -> None:
    books = Catalogue(Quotas(max_bytes=100, max_entries=1, max_descriptors=1))
    one = books.connect(0)
    publish(books, one)
    assert publish(books, one, token="t2")[1] == [Free("t1")]
    lease(books, one)
    with pytest.raises(QuotaError, match="would hold"):
        publish(books, one)


def test_what_is_under_way_counts_and_the_real_size_counts_in_the_end() -> None:
    books = Catalogue(Quotas(max_bytes=250))
    one = books.connect(0)
    first = begin(books, one, "a", nbytes=100, handles=1)
    with pytest.raises(QuotaError):
        begin(books, one, "b", nbytes=200, handles=1)
    with pytest.raises(QuotaError):
        books.commit(first, "t1", 0.0, nbytes=251)
    assert vars_of(books.accounts.total) == (0, 0, 0)


@pytest.mark.parametrize(
    ("quota", "asked", "what"),
    [
        ("user_bytes", {"nbytes": 60}, "60 B more"),
        ("user_entries", {"nbytes": 1}, "1 entry more"),
        ("user_descriptors", {"nbytes": 1, "handles": 40}, "40 descriptors more"),
    ],
)
def test_each_ceiling_of_a_user_binds_that_user_alone(quota: str, asked: dict[str, int], what: str) -> None:
    ceiling = {"user_bytes": 100, "user_entries": 1, "user_descriptors": 64}[quota]
    books = Catalogue(Quotas(**{quota: ceiling}), keeper_uid=KEEPER)
    own, one, other = (books.connect(uid) for uid in (KEEPER, ANN, BOB))
    publish(books, one, "a", **asked)
    with pytest.raises(QuotaError, match=f"{what}: uid {ANN} may hold"):
        publish(books, one, "b", **asked)
    publish(books, other, "c", **asked)
    for number in range(3):
        publish(books, own, f"own{number}", **asked)


def used(books: Catalogue, uid: int) -> tuple[int, int, int]:
    return vars_of(books.accounts.of(uid))


def test_a_reader_of_old_versions_uses_up_its_own_ceiling_and_not_their_owners() -> None:
    books = Catalogue(Quotas(user_bytes=250), keeper_uid=KEEPER)
    ann, bob, own = (books.connect(uid) for uid in (ANN, BOB, KEEPER))
    publish(books, ann, "other")
    for number in range(1, 4):
        publish(books, ann, "model", token=f"t{number}")  # which fits beside the other one, whoever reads
        held = lease(books, bob, "model")
    assert used(books, BOB) == (200, 0, 2)
    publish(books, ann, "model", token="t4")
    assert used(books, BOB) == (300, 0, 3), "what it read when it was current is not refused afterwards"
    for name in ("model", "other"):
        with pytest.raises(QuotaError, match=r"'model' version 1 .*close those leases"):
            lease(books, bob, name)
    with pytest.raises(QuotaError, match=r"'model' version 1 .*close those leases"):
        begin(books, bob, "bobs", nbytes=1, handles=1)
    with pytest.raises(QuotaError, match="would hold"):
        lease(books, ann, "model", version=1)  # an owner that has room for no more than what it owns
    for name in ("model", "other"):
        lease(books, own, name)
    lease(books, own, "model", version=1)
    lease(books, ann, "other")
    books.release(bob, held.id, 0.0)
    lease(books, bob, "model")
    publish(books, bob, "bobs", nbytes=50)


def test_who_waits_past_its_ceiling_is_refused_when_its_turn_comes() -> None:
    books = Catalogue(Quotas(user_descriptors=5), keeper_uid=KEEPER)
    own, bob = books.connect(KEEPER), books.connect(BOB)
    publish(books, own, handles=6)
    lease(books, bob)
    waits(books, bob, 1, "late")
    publish(books, own, token="t2")
    (refused,) = publish(books, own, "late")[1]
    assert isinstance(refused, Answered)
    assert isinstance(refused.result, QuotaError)
    assert f"uid {BOB} may hold 5 descriptors (--max-descriptors-per-user) and holds 6" in str(refused.result)


def test_a_replacement_is_measured_by_what_stays_with_its_owner() -> None:
    books = Catalogue(Quotas(user_bytes=100), keeper_uid=KEEPER)
    ann, bob = books.connect(ANN), books.connect(BOB)
    publish(books, ann)
    held = lease(books, bob)
    publish(books, ann, token="t2")
    mine = lease(books, ann)
    with pytest.raises(QuotaError, match="would hold 200 B"):
        publish(books, ann, token="t3")
    books.release(ann, mine.id, 0.0)
    publish(books, ann, token="t3")
    assert (used(books, ANN), used(books, BOB)) == ((100, 1, 1), (100, 0, 1))
    books.release(bob, held.id, 0.0)
    assert used(books, BOB) == (0, 0, 0)


# -- attaching ------------------------------------------------------------------------------------------------------


def test_an_older_version_is_had_by_number_while_it_is_held(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann)
    held = lease(books, ann)
    publish(books, ann, token="t2")
    second = lease(books, bob, version=1)
    assert second.version is held.version
    books.release(ann, held.id, 0.0)
    assert books.release(bob, second.id, 0.0) == [Free("t1")]
    with pytest.raises(NotFoundError, match=r"version 1 is gone.*current one is 2"):
        attach(books, bob, "w", 0.0, version=1)
    for wait in (0.0, None):
        with pytest.raises(NotFoundError):
            attach(books, bob, "w", 0.0, version=1, wait=wait)


def test_a_new_owner_of_a_name_does_not_take_the_old_ones_versions(
    books: Catalogue, ann: Session, bob: Session
) -> None:
    publish(books, ann)
    held = lease(books, ann)
    publish(books, ann, token="t2")
    books.remove(ann, "w", 2, now=0.0)
    publish(books, bob, token="bobs")
    with pytest.raises(AccessDeniedError):
        books.remove(bob, "w", 1, now=0.0)
    assert books.remove(bob, "w", now=0.0) == [Free("bobs")]
    assert lease(books, ann, version=1).version is held.version


# -- waiting --------------------------------------------------------------------------------------------------------


def test_those_who_wait_are_served_in_their_order(books: Catalogue, ann: Session, bob: Session) -> None:
    waits(books, bob, 1)
    waits(books, ann, 7)
    waits(books, bob, 2, expect={"k": "other"})
    waits(books, bob, 3, access="rw")
    version, effects = publish(books, ann, meta={"k": "this"})
    assert [(effect.session, effect.call) for effect in effects] == [(bob, 1), (ann, 7), (bob, 2), (bob, 3)]  # type: ignore[union-attr]
    results = [type(effect.result) for effect in effects]  # type: ignore[union-attr]
    assert results == [Lease, Lease, MismatchError, AccessDeniedError]
    assert len(version.leases) == 2
    assert books.waiting.count == 0


def test_waiting_ends_in_time(books: Catalogue, ann: Session) -> None:
    waits(books, ann, 1, wait=5.0)
    waits(books, ann, 2, wait=3.0)
    assert books.next_deadline == 3.0
    assert books.expire(2.9) == []
    (refused,) = books.expire(3.0)
    assert isinstance(refused, Answered)
    assert refused.call == 2
    assert isinstance(refused.result, WaitTimeoutError)
    assert len(books.expire(10.0)) == 1
    assert (books.next_deadline, books.waiting.count) == (None, 0)


def test_giving_up_for_ever_does_not_pile_up(books: Catalogue, ann: Session) -> None:
    for _ in range(10_000):
        waits(books, ann, 1, wait=1e6)
        books.cancel(ann, 1)
    assert len(books.waiting) < 500


# -- claims ---------------------------------------------------------------------------------------------------------


def claim_of(got: object) -> Claim:
    assert isinstance(got, Claim)
    return got


def test_what_differs_from_what_is_expected_is_claimed_and_replaced(
    books: Catalogue, ann: Session, bob: Session
) -> None:
    publish(books, ann, meta={"v": "old"})
    claim = claim_of(attach(books, ann, "w", 0.0, claim=True, expect={"v": "new"}, wait=None))
    waits(books, ann, 1, claim=True, expect={"v": "new"})
    waits(books, ann, 2, claim=True, expect={"v": "newest"})
    with pytest.raises(MismatchError, match="may not replace"):
        attach(books, bob, "w", 0.0, claim=True, expect={"v": "new"}, wait=None)
    assert lease(books, bob).version.number == 1, "those who do not mind read on"
    _, effects = publish(books, ann, token="t2", meta={"v": "new"}, claim=claim.id)
    assert [type(effect.result) for effect in effects] == [Lease, Claim]


def test_a_failed_publication_keeps_the_claim(books: Catalogue, ann: Session) -> None:
    claim = claim_of(attach(books, ann, "w", 0.0, claim=True, wait=None))
    books.abandon(begin(books, ann, "w", nbytes=1, handles=1, claim=claim.id))
    assert books.waiting.claims == {claim.id: claim}
    publish(books, ann, claim=claim.id)
    with pytest.raises(UsageError, match="not held"):
        publish(books, ann, claim=claim.id)


def test_a_claim_is_for_its_holder_and_its_name(books: Catalogue, ann: Session, bob: Session) -> None:
    claim = claim_of(attach(books, ann, "w", 0.0, claim=True, wait=None))
    for who, name in ((bob, "w"), (ann, "other")):
        with pytest.raises(UsageError, match="not held"):
            publish(books, who, name, claim=claim.id)


# -- claims -----------------------------------------------------------------------------------------------------------
def claims(books: Catalogue, session: Session, now: float = 0.0, name: str = "w", **options: object) -> Claim:
    return claim_of(attach(books, session, name, now, claim=True, **{"wait": None, **options}))  # type: ignore[arg-type]


def test_who_waits_is_told_who_makes_it_and_for_how_long(books: Catalogue) -> None:
    ann, bob = books.connect(ANN, 11, "ann"), books.connect(BOB)
    claims(books, ann)
    waits(books, bob, 1, claim=True, wait=10.0)
    (refused,) = books.expire(12.0)
    assert isinstance(refused, Answered)
    assert f"pid 11, uid {ANN}, label 'ann' has had the claim to publish it for 12 s" in str(refused.result)
    with pytest.raises(BusyError, match=r"had the claim for 13 s \(held by: pid 11"):
        attach(books, bob, "w", 13.0, claim=True)


def test_a_connection_has_so_many_claims_and_no_more(books: Catalogue) -> None:
    ann = books.connect(ANN)
    for number in range(256):
        claims(books, ann, name=f"w{number}")
    with pytest.raises(QuotaError, match="256 claims"):
        claims(books, ann)


def test_a_claim_and_who_waits_for_it_are_there_after_a_restart(books: Catalogue) -> None:
    ann, bob = books.connect(ANN), books.connect(BOB)
    claim = claims(books, ann)
    waits(books, bob, 1, claim=True)
    moved = restored(books)
    (passed,) = moved.release(moved.sessions[ann.id], claim.id, 1.0)
    assert isinstance(passed.result, Claim)
    assert passed.session.uid == BOB


# -- whose it is ------------------------------------------------------------------------------------------------------


def test_what_belongs_to_another_is_not_what_was_asked_for(books: Catalogue, ann: Session, bob: Session) -> None:
    waits(books, bob, 1, owner=BOB)
    (refused,) = publish(books, ann)[1]
    assert isinstance(refused, Answered)
    assert isinstance(refused.result, MismatchError)
    assert f"belongs to uid {ANN}, and not to uid {BOB}" in str(refused.result)
    for options in ({}, {"claim": True}, {"version": 1}, {"wait": None}):
        with pytest.raises(MismatchError, match=f"belongs to uid {ANN}, and not to uid {BOB}"):
            attach(books, bob, "w", 0.0, owner=BOB, **options)  # type: ignore[arg-type]
        assert isinstance(attach(books, bob, "w", 0.0, owner=ANN, **options), Lease)  # type: ignore[arg-type]


def test_what_is_to_belong_to_another_is_made_by_them_alone(books: Catalogue, ann: Session, bob: Session) -> None:
    for wait in (0.0, None):
        with pytest.raises(AccessDeniedError, match=f"is to belong to uid {ANN}: uid {BOB} cannot"):
            attach(books, bob, "w", 0.0, claim=True, owner=ANN, wait=wait)
    claim = claim_of(attach(books, ann, "w", 0.0, claim=True, owner=ANN, wait=None))
    waits(books, bob, 1, claim=True, owner=ANN)
    with pytest.raises(AccessDeniedError):
        attach(books, bob, "w", 0.0, claim=True, owner=ANN + 7, wait=None)
    moved = restored(books)
    for each in (books, moved):
        (refused,) = each.release(each.sessions[ann.id], claim.id, 0.0)
        assert isinstance(refused, Answered)
        assert isinstance(refused.result, AccessDeniedError)


def test_names_under_a_user_are_that_users(books: Catalogue, ann: Session, bob: Session) -> None:
    name = f"~{ANN}/w"
    own = books.connect(KEEPER)
    for other in (bob, own):
        for act in (
            lambda who=other: publish(books, who, name),
            lambda who=other: attach(books, who, name, 0.0, claim=True, wait=None),
        ):
            with pytest.raises(AccessDeniedError, match=rf"only uid {ANN} may .*names under ~{other.uid}/"):
                act()
    claim = claim_of(attach(books, ann, name, 0.0, claim=True, wait=None))
    waits(books, bob, 1, name, claim=True)
    _, effects = publish(books, ann, name, claim=claim.id)
    assert [type(effect.result) for effect in effects] == [Lease]
    lease(books, bob, name)
    with pytest.raises(AccessDeniedError):
        books.remove(bob, name, now=0.0)
    books.remove(own, name, now=0.0)


# -- ends -----------------------------------------------------------------------------------------------------------


def test_s5_the_end_of_a_connection_gives_back_everything(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann)
    for _ in range(3):
        lease(books, bob)
    claim_of(attach(books, bob, "other", 0.0, claim=True, wait=None))
    begin(books, bob, "half", nbytes=10, handles=1)
    waits(books, bob, 1, "never")
    books.watch(bob, "w", 1)
    publish(books, ann, token="t2")
    assert books.disconnect(bob, 0.0) == [Free("t1")]
    assert books.disconnect(bob, 0.0) == []
    assert (books.leases, books.waiting.claims, books.waiting.count) == ({}, {}, 0)
    assert vars_of(books.accounts.total) == (100, 1, 1)


def test_a_replaced_version_does_not_expire_its_successor(books: Catalogue, ann: Session) -> None:
    publish(books, ann, ttl=5.0)
    publish(books, ann, token="t2")
    assert books.expire(100.0) == []
    lease(books, ann)


# -- news -----------------------------------------------------------------------------------------------------------


def test_who_watches_is_told(books: Catalogue, ann: Session, bob: Session) -> None:
    old, _ = publish(books, ann)
    held = lease(books, bob)
    assert books.watch(bob, "w", 1) is None
    assert books.state(bob, held.id) == (old, old)
    new, effects = publish(books, ann, token="t2")
    assert effects == [Notify(bob, "w", 1, "replaced", 2)]
    assert books.state(bob, held.id) == (old, new)
    assert books.remove(ann, "w", 1, revoke=True, now=0.0) == [Notify(bob, "w", 1, "revoked", 2)]
    assert books.remove(ann, "w", now=0.0) == [Free("t2")]
    assert books.state(bob, held.id) == (old, None)


def test_readers_are_asked_to_let_go_once_and_keep_what_they_have(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann)
    held = lease(books, bob)
    books.watch(bob, "w", 1)
    assert books.remove(ann, "w", revoke=True, now=0.0) == [Notify(bob, "w", 1, "revoked", 0)]
    assert held.version.revoked
    assert held.id in books.leases
    for version in (0, 1):
        with pytest.raises(NotFoundError):
            attach(books, bob, "w", 0.0, version=version)
        assert books.remove(ann, "w", version, revoke=True, now=0.0) == [], "they were told"
        with pytest.raises(NotFoundError):
            books.remove(ann, "w", version, now=0.0)
    assert books.watch(ann, "w", 1) == Notify(ann, "w", 1, "revoked", 0)
    assert books.release(bob, held.id, 0.0) == [Free("t1")]
    with pytest.raises(NotFoundError):
        books.remove(ann, "w", revoke=True, now=0.0)


def test_what_was_removed_can_be_revoked_while_it_is_held(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann)
    first = lease(books, bob)
    books.watch(bob, "w", 1)
    books.remove(ann, "w", now=0.0)
    assert not first.version.revoked
    publish(books, ann, token="t2")
    assert books.remove(ann, "w", 1, revoke=True, now=0.0) == [Notify(bob, "w", 1, "revoked", 2)]
    assert books.remove(ann, "w", revoke=True, now=0.0) == [Free("t2")]
    assert books.release(bob, first.id, 0.0) == [Free("t1")]


def test_only_the_owner_and_the_keepers_user_may_revoke(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann)
    held = lease(books, bob)
    with pytest.raises(AccessDeniedError, match=str(BOB)):
        books.remove(bob, "w", revoke=True, now=0.0)
    assert not held.version.revoked
    assert lease(books, bob).version is held.version
    books.remove(ann, "w", now=0.0)
    with pytest.raises(AccessDeniedError, match=str(BOB)):
        books.remove(bob, "w", revoke=True, now=0.0)
    publish(books, bob, token="bobs")
    newer = lease(books, ann)
    # Each asks for their own, also where both have left something under the name.
    books.remove(bob, "w", now=0.0)
    books.remove(bob, "w", revoke=True, now=0.0)
    assert (held.version.revoked, newer.version.revoked) == (False, True)
    books.remove(books.connect(KEEPER, 1), "w", revoke=True, now=0.0)
    assert held.version.revoked


def test_news_that_is_old_is_told_at_once(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann)
    lease(books, ann)
    publish(books, ann, token="t2")
    assert books.watch(bob, "w", 1) == Notify(bob, "w", 1, "replaced", 2)
    assert books.watch(bob, "w", 9) == Notify(bob, "w", 9, "removed", 2)
    assert books.watch(bob, "none", 1) == Notify(bob, "none", 1, "removed", 0)


def test_removing_and_expiring_are_news(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann, ttl=1.0)
    books.watch(bob, "w", 1)
    assert books.expire(1.0) == [Notify(bob, "w", 1, "expired", 0), Free("t1")]
    publish(books, ann, token="t2")
    books.watch(bob, "w", 2)
    assert books.remove(ann, "w", now=0.0) == [Notify(bob, "w", 2, "removed", 0), Free("t2")]


def test_the_state_is_asked_by_who_holds_the_lease(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann)
    held = lease(books, ann)
    with pytest.raises(NotFoundError, match=rf"^'?lease {held.id} is not held by this connection'?$"):
        books.state(bob, held.id)
    assert books.release(bob, held.id, 0.0) == []
    assert held.id in books.leases


# -- looking --------------------------------------------------------------------------------------------------------


def test_listing_goes_by_prefix_and_goes_on_behind(books: Catalogue, ann: Session) -> None:
    for name in ("b/2", "a", "b/1", "b/10", "c"):
        publish(books, ann, name)
    held = lease(books, ann, "b/1")
    publish(books, ann, "b/1")
    books.remove(ann, "b/2", now=0.0)
    assert [version.name for version, _ in books.names.listed()] == ["a", "b/1", "b/10", "c"]
    assert [(version.name, older) for version, older in books.names.listed("b/")] == [("b/1", 1), ("b/10", 0)]
    assert [version.name for version, _ in books.names.listed("b/", "b/1")] == ["b/10"]
    assert [version.name for version, _ in books.names.listed("", "b/10")] == ["c"]
    assert [version.number for version in books.names.versions_of("b/1")] == [1, 2]
    books.release(ann, held.id, 0.0)
    assert [version.number for version in books.names.versions_of("b/1")] == [2]
    with pytest.raises(NotFoundError):
        books.names.versions_of("nothing")


# -- what one connection may have -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "what"),
    [
        ("MAX_LEASES", "holds 2 leases"),
        ("MAX_CLAIMS", "holds 2 claims"),
        ("MAX_WATCHES", "watches 2 versions"),
        ("MAX_WAITERS", "2 calls of this connection wait"),
        ("MAX_PUBLICATIONS", "publishes 2 versions at a time"),
    ],
)
def test_one_connection_has_ceilings_also_of_the_keepers_own_user(
    books: Catalogue, monkeypatch: pytest.MonkeyPatch, limit: str, what: str
) -> None:
    monkeypatch.setattr(module, limit, 2)
    own, other = books.connect(KEEPER), books.connect(KEEPER)
    for number in range(3):
        publish(books, other, f"w{number}")

    def act(session: Session, number: int) -> None:
        if limit == "MAX_LEASES":
            lease(books, session, f"w{number}")
        elif limit == "MAX_CLAIMS":
            attach(books, session, f"c{session.id}/{number}", 0.0, claim=True)
        elif limit == "MAX_WATCHES":
            books.watch(session, f"w{number}", 1)
        elif limit == "MAX_WAITERS":
            waits(books, session, number, "late")
        else:
            begin(books, session, f"p{number}", nbytes=1, handles=1)

    act(own, 0)
    act(own, 1)
    with pytest.raises(QuotaError, match=what):
        act(own, 2)
    act(other, 2)


# -- over a restart ---------------------------------------------------------------------------------------------------
def test_a_time_to_live_goes_on_over_a_restart(books: Catalogue, ann: Session) -> None:
    publish(books, ann, "brief", now=5.0, ttl=10.0)
    publish(books, ann, "lasting", token="t2", now=5.0)
    moved = restored(books)
    assert moved.next_deadline == 15.0
    assert moved.expire(14.9) == []
    assert moved.expire(15.0) == [Free("t1")], "the time to live was lost in the restart"
    assert [version.name for version, _ in moved.names.listed()] == ["lasting"]
    assert moved.next_deadline is None


def test_numbers_are_not_used_again_over_a_restart(
    books: Catalogue, ann: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of names that are known, nor of those whose number is remembered, nor of those forgotten by then."""
    monkeypatch.setattr(names, "MAX_REMEMBERED", 1)
    for _ in range(5):
        publish(books, ann, "forgotten")
    books.remove(ann, "forgotten", now=0.0)
    for _ in range(3):
        publish(books, ann, "remembered")
    books.remove(ann, "remembered", now=0.0)
    publish(books, ann, "here")
    publish(books, ann, "here")
    *_, newest = books.names.versions_of("here")
    here = newest.number
    moved = restored(books)
    again = moved.sessions[ann.id]
    assert publish(moved, again, "forgotten")[0].number == 6, "the number of a forgotten name is used again"
    assert publish(moved, again, "remembered")[0].number == 4
    assert publish(moved, again, "here")[0].number == here + 1


def test_what_processes_call_themselves_is_cut_to_what_may_be_shown(books: Catalogue) -> None:
    session = books.connect(ANN, 7, "a\x1b[2J\n" + "b" * 200, "c\x07" + "d" * 100)
    assert (session.label, session.host) == ("a?[2J?" + "b" * 114, "c?" + "d" * 62)
    assert str(books.connect(ANN, 0, "maker", "box-1")) == f"pid unknown, host box-1, uid {ANN}, label 'maker'"


def test_the_keepers_own_user_can_make_room_that_another_has_filled() -> None:
    books = Catalogue(Quotas(max_bytes=100), keeper_uid=KEEPER)
    ann, own = books.connect(ANN), books.connect(KEEPER)
    publish(books, ann, "full")
    with pytest.raises(QuotaError):
        publish(books, own, "mine")
    with pytest.raises(AccessDeniedError):
        books.remove(books.connect(BOB), "full", now=0.0)
    with pytest.raises(AccessDeniedError):
        begin(books, own, "full", nbytes=1, handles=1)
    assert books.remove(own, "full", now=0.0) == [Free("t1")]
    publish(books, own, "mine")


def test_rules_for_versions_and_the_number_of_keys() -> None:
    for number in (None, 1, 2**53):
        check_version(number)
    for wrong in (0, -1, 2**53 + 1, 10**5000, -(10**5000), True, 1.0, "1"):
        with pytest.raises(UsageError, match="count from 1"):
            check_version(wrong)
    check_meta({str(number): "" for number in range(512)})
    with pytest.raises(UsageError, match="513 keys"):
        check_meta({str(number): "" for number in range(513)})


# -- numbers of names that were forgotten -----------------------------------------------------------------------------


def test_who_waits_for_a_number_that_can_come_waits_and_others_are_told_which_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under a name that is not known the next number is above those of all that were forgotten: this may be one."""
    monkeypatch.setattr(names, "MAX_REMEMBERED", 1)
    books = Catalogue()
    ann, bob = books.connect(ANN), books.connect(BOB)
    for _ in range(5):
        publish(books, ann, "old")
    books.remove(ann, "old", now=0.0)
    publish(books, ann, "older")
    books.remove(ann, "older", now=0.0)
    with pytest.raises(NotFoundError, match=r"'new' version 5 is gone or was never there; .* next one is 6"):
        attach(books, bob, "new", 0.0, call=1, version=5, wait=60.0)
    assert isinstance(attach(books, bob, "new", 0.0, call=2, version=6, wait=60.0), Waiter)
    version, effects = publish(books, ann, "new")
    assert version.number == 6
    assert effects
    assert lease(books, bob, "new").version is version


# -- updating in place ----------------------------------------------------------------------------------------------


def page(nbytes: int = 4096) -> SimpleNamespace:
    return SimpleNamespace(nbytes=nbytes)


def paid_by_bob(books: Catalogue) -> tuple[int, int]:
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
    assert list(books.pages(ann, "w", 1, 0)) == held
    assert list(books.pages(ann, "w", 1, held[1].id)) == held[2:]
    with pytest.raises(UsageError, match=r"^this connection did not publish 'w' version 1 to be updated$"):
        books.pages(bob, "w", 1, 0)


def test_a_lease_keeps_one_page_at_a_time_which_its_holder_pays_for(
    books: Catalogue, ann: Session, bob: Session
) -> None:
    publish(books, ann, updatable=True)
    held, first, second = lease(books, bob), page(), page(8192)
    before = paid_by_bob(books)
    assert books.give_page(bob, held.id, first) == []
    assert held.page is first
    books.changed.clear()
    assert books.give_page(bob, held.id, second) == [Free(first)]
    assert (held.page, books.changed) == (second, {held: False})
    assert paid_by_bob(books) == (before[0] + 8192, before[1] + 1)
    assert books.release(bob, held.id, 0.0) == [Free(second)]
    assert paid_by_bob(books) == (0, 0)


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


def test_a_version_whose_memory_is_gone_is_taken_out(books: Catalogue, ann: Session, bob: Session) -> None:
    published, _ = publish(books, ann)
    books.forget(published)
    assert (len(books.versions), books.names.entries) == (0, 0)
    with pytest.raises(NotFoundError, match="is gone or was never there; nothing is current, and the next one is 2"):
        attach(books, bob, "w", 0.0, version=1)


# -- what each operation has written down -----------------------------------------------------------------------------
# Records in `changed`: True is of a version all of which is written, and not only its state.


def test_a_session_is_written_when_it_comes_and_when_it_goes(books: Catalogue) -> None:
    session = books.connect(ANN)
    assert (session.pid, session.label, session.host) == (0, "", "")
    assert noted(books) == {session: False}
    books.disconnect(session, 0.0)
    assert noted(books) == {session: False}


def test_a_version_is_written_whole_and_the_one_before_by_its_state(
    books: Catalogue, ann: Session, bob: Session
) -> None:
    noted(books)
    first, _ = publish(books, ann, token="t1")
    assert noted(books) == {first: True}
    held = lease(books, bob)
    assert noted(books) == {held: False}
    second, _ = publish(books, ann, token="t2")
    assert noted(books) == {first: False, second: True}
    books.release(bob, held.id, 0.0)
    assert noted(books) == {held: False, first: False}


def test_a_removed_version_is_written_by_its_state_and_then_its_number(
    books: Catalogue, ann: Session, bob: Session
) -> None:
    version, _ = publish(books, ann)
    held = lease(books, bob)
    noted(books)
    books.remove(ann, "w", now=0.0)
    assert noted(books) == {version: False}
    books.remove(ann, "w", 1, now=0.0, revoke=True)
    assert noted(books) == {version: False}
    books.release(bob, held.id, 0.0)
    assert noted(books) == {held: False, version: False, "w": False}


def test_what_a_lost_connection_was_updating_is_written_as_torn(books: Catalogue, ann: Session, bob: Session) -> None:
    version, _ = publish(books, ann, updatable=True)
    books.watch(bob, "w", 1)
    assert books.changed[bob, version] is False
    books.update(ann, "w", 1)
    noted(books)
    books.disconnect(ann, 0.0)
    assert (version.writer, version.torn, version.updating) == (None, True, False)
    assert noted(books) == {ann: False, version: False}
    books.disconnect(bob, 0.0)
    assert noted(books) == {bob: False, (bob, version): False}


def test_a_waiter_and_a_claim_are_written_when_they_come_and_when_they_are_over(
    books: Catalogue, ann: Session, bob: Session
) -> None:
    noted(books)
    claim = attach(books, ann, "w", 0.0, claim=True)
    assert noted(books) == {claim: False}
    waiter = waits(books, bob, 7, claim=True)
    assert (waiter.asked.call, noted(books)) == (7, {waiter: False})
    (served,) = books.release(ann, claim.id, 1.0)  # type: ignore[union-attr]
    assert isinstance(served.result, Claim)
    assert noted(books) == {claim: False, waiter: False, served.result: False}


def test_all_that_is_due_is_done_at_once(books: Catalogue, ann: Session, bob: Session) -> None:
    for name in ("a", "b"):
        publish(books, ann, name, name, ttl=1.0)
    waits(books, bob, 1, "none", wait=1.0)
    effects = books.expire(1.0)
    assert [effect for effect in effects if isinstance(effect, Free)] == [Free("a"), Free("b")]
    (refused,) = [effect for effect in effects if isinstance(effect, Answered)]
    assert (refused.session, refused.call) == (bob, 1)
    assert str(refused.result) == "'none' was not published in time"
    assert books.next_deadline is None


# -- what a publication takes -----------------------------------------------------------------------------------------
def test_what_arrives_beyond_what_was_stated_counts_and_less_does_not(books: Catalogue, ann: Session) -> None:
    half = begin(books, ann, "w", nbytes=100, handles=1)
    for nbytes, counted in ((50, 100), (100, 100), (101, 101), (300, 300), (200, 300)):
        books.arrived(half, nbytes)
        assert (half.nbytes, used(books, ANN)[:2]) == (counted, (counted, 1))
    books.abandon(half)
    assert used(books, ANN) == (0, 0, 0)


def test_known_pieces_of_a_publication_add_up_and_count_once(books: Catalogue, ann: Session) -> None:
    half = begin(books, ann, "w", nbytes=100, handles=1)
    books.arrived(half, 100, {1: 40}, 40)
    books.arrived(half, 100, {2: 10}, 10)
    assert (dict(half.pieces), half.known, used(books, ANN)[0]) == ({1: 40, 2: 10}, 50, 100)
    version, _ = books.commit(half, "t", 0.0)
    assert (dict(version.pieces), version.known, version.publisher) == ({1: 40, 2: 10}, 50, ann.id)


def test_a_publication_that_outgrows_the_ceiling_stays_as_it_was(books: Catalogue, ann: Session) -> None:
    books.accounts.quotas = Quotas(user_bytes=150)
    half = begin(books, ann, "w", nbytes=100, handles=1)
    with pytest.raises(QuotaError):
        books.arrived(half, 151, {1: 10}, 10)
    assert (half.nbytes, dict(half.pieces), half.known, used(books, ANN)) == (100, {}, 0, (100, 1, 1))
    books.arrived(half, 150)
    assert half.nbytes == 150


# -- words ------------------------------------------------------------------------------------------------------------
def test_refusals_say_what_was_asked_and_what_may_be(books: Catalogue, ann: Session) -> None:
    def said(call: object) -> str:
        with pytest.raises(UsageError) as caught:
            call()  # type: ignore[operator]
        return str(caught.value)

    both = "what its publisher alone updates cannot be written by its readers: one of the two"
    assert said(lambda: begin(books, ann, "w", nbytes=1, handles=1, writable=True, updatable=True)) == both
    for count in (0, 1026):
        many = f"a version has 1 to 1024 segments, not {count}"
        assert said(lambda count=count: begin(books, ann, "w", nbytes=1, handles=count)) == many
    books.abandon(begin(books, ann, "w", nbytes=1, handles=1025))
    waits(books, ann, 3)
    assert said(lambda: waits(books, ann, 3)) == "call 3 waits already"
    half = begin(books, ann, "w", nbytes=1, handles=1)
    books.abandon(half)
    assert said(lambda: books.commit(half, "t", 0.0)) == "this publication is over"


def test_what_is_missing_is_said_with_its_reason(books: Catalogue, ann: Session, bob: Session) -> None:
    unknown = "nothing is published as 'w'; `vram ls` shows what is"
    with pytest.raises(NotFoundError) as caught:
        attach(books, bob, "w", 0.0)
    assert caught.value.args == (unknown,)
    with pytest.raises(NotFoundError) as caught:
        books.remove(bob, "w", now=0.0)
    assert caught.value.args == (unknown,)
    attach(books, ann, "w", 1.0, claim=True)
    with pytest.raises(BusyError) as busy:
        attach(books, bob, "w", 43.0, claim=True)
    assert str(busy.value).startswith("'w' is being made by another process, which has had the claim for 42 s")
    publish(books, ann)
    with pytest.raises(NotFoundError) as caught:
        attach(books, bob, "w", 0.0, version=2)
    gone = "'w' version 2 is gone or was never there; the current one is 1, and the next one is 2"
    assert caught.value.args == (gone,)
    with pytest.raises(NotFoundError) as caught:
        books.remove(ann, "w", 2, now=0.0)
    assert caught.value.args == (gone,)


def test_a_difference_names_three_keys_and_counts_the_rest(books: Catalogue, ann: Session, bob: Session) -> None:
    publish(books, ann, meta={"a": "1", "b": "2"})
    with pytest.raises(MismatchError) as caught:
        attach(books, bob, "w", 0.0, expect={"a": "0", "b": "2", "c": "3", "d": "4", "e": "5"})
    assert str(caught.value).startswith(
        "'w' version 1 is not what was expected: a is '1', expected '0'; c is not set, expected '3'; d is not set, "
        "expected '4' and 1 more"
    )
    with pytest.raises(MismatchError) as caught:
        attach(books, bob, "w", 0.0, expect={"c": "3"})
    assert "more" not in str(caught.value)
