"""Many who wait for one name: what it costs, that it is done in parts, and what may happen in between."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.pages import calls_of

from vram.errors import BusyError
from vram.keeper import records
from vram.keeper.catalogue import COMPARED, SERVED, Catalogue
from vram.keeper.records import Claim, Claimed, Effect, Free, Granted, Refused, Serve, Session, Waiter

pytestmark = pytest.mark.slow  # goes with the fair shares of a keeper

ANN, BOB = 1001, 1002
MANY = 1_000  # what one connection may have waiting, about
NOTES = {f"{number:03x}": "v" for number in range(500)}


@pytest.fixture
def books() -> Catalogue:
    return Catalogue(keeper_uid=1000, nobody=65_534)


@pytest.fixture
def ann(books: Catalogue) -> Session:
    return books.connect(ANN)


@pytest.fixture
def bob(books: Catalogue) -> Session:
    return books.connect(BOB)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The length of whatever notes were unpacked."""
    seen: list[int] = []
    right = records._unpack

    def unpack(notes: Any) -> dict[str, str]:
        seen.append(len(notes))
        return right(notes)

    monkeypatch.setattr(records, "_unpack", unpack)
    return seen


def publish(books: Catalogue, session: Session, **options: Any) -> list[Effect]:
    _, effects = books.commit(books.begin(session, "w", nbytes=1, handles=1, **{"meta": NOTES, **options}), "t", 0.0)
    return effects


def waits(books: Catalogue, session: Session, call: int, **options: Any) -> Waiter:
    got = books.attach(session, "w", 0.0, call=call, wait=None, **options)
    assert isinstance(got, Waiter)
    return got


def claims(books: Catalogue, session: Session, **options: Any) -> Claim:
    got = books.attach(session, "w", 0.0, claim=True, **options)
    assert isinstance(got, Claim)
    return got


def goes_on(effects: list[Effect]) -> bool:
    """Whether some are left to be served; that is said once, and last."""
    assert not any(isinstance(effect, Serve) for effect in effects[:-1])
    return bool(effects) and isinstance(effects[-1], Serve)


def other(number: int = 0) -> dict[str, str]:
    """Notes that differ in the last."""
    return {**NOTES, "1f3": f"other {number}"}


def test_what_many_expect_alike_is_compared_once(books: Catalogue, ann: Session, unpacked: list[int]) -> None:
    publish(books, ann)
    claims(books, ann, expect=other())
    for call in range(1, MANY):
        waits(books, ann, call, expect=other(), claim=True)
    unpacked.clear()
    told = books.at_once(publish(books, ann), 0.0)
    assert [type(effect) for effect in told] == [Free], "all go on waiting"
    assert len(unpacked) == 2, "of the version, and of one who waits"


def test_what_each_expects_is_compared_once_with_each_version(
    books: Catalogue, ann: Session, unpacked: list[int]
) -> None:
    publish(books, ann)
    claim = claims(books, ann, expect=other())
    for call in range(1, MANY):
        waits(books, ann, call, expect=other(call), claim=True)
    publish(books, ann)
    unpacked.clear()
    books.at_once([Serve("w")], 0.0)
    assert MANY * 0.9 < sum(1 for _ in unpacked) < MANY * 1.5, "the version's once in each part"
    unpacked.clear()
    for _ in range(50):
        (claimed,) = books.at_once(books.drop_claim(ann, claim.id, 0.0), 0.0)
        assert isinstance(claimed, Claimed)
        claim = claimed.claim
    assert unpacked == []


@pytest.mark.parametrize("wanted", ["alike", "each its own", "nothing", "what is there"])
def test_a_new_version_is_told_in_parts_that_are_short(
    books: Catalogue, ann: Session, bob: Session, unpacked: list[int], wanted: str
) -> None:
    """The next part is for later, and each unpacks and tells little, whatever those who wait want."""
    expect = {"alike": lambda _: other(), "each its own": other, "nothing": lambda _: None}.get(wanted, lambda _: NOTES)
    for call in range(1, MANY + 1):
        waits(books, bob, call, expect=expect(call))
    part = publish(books, ann)
    calls: list[int] = []
    while True:
        unpacked.clear()
        more = goes_on(part)
        told = part[:-1] if more else part
        calls += [effect.call for effect in told if isinstance(effect, Granted | Refused)]
        assert len(told) <= SERVED
        if not more:
            break
        part = books.serve_on("w", 0.0)
        assert len(unpacked) <= SERVED // COMPARED + 2
    assert calls == list(range(1, MANY + 1)), "in the order in which they came"
    assert books.waiting == 0


def test_a_claim_passes_on_at_the_same_cost_however_many_wait() -> None:
    def cost(many: int) -> int:
        books = Catalogue(keeper_uid=1000, nobody=65_534)
        ann = books.connect(ANN)
        publish(books, ann)
        claim = claims(books, ann, expect=other())
        for call in range(1, many):
            waits(books, ann, call, expect=other(call), claim=True)
        return calls_of(lambda: books.at_once(books.drop_claim(ann, claim.id, 0.0), 0.0))

    assert cost(MANY) <= cost(10) * 1.1 + 20


def test_a_connection_ends_in_parts_by_claim(books: Catalogue, ann: Session, bob: Session) -> None:
    held = [books.attach(ann, f"n/{number}", 0.0, claim=True) for number in range(20)]
    for number in range(20):
        books.attach(bob, f"n/{number}", 0.0, call=number + 1, wait=None, claim=True)
    parts = list(books.leaving(ann, 0.0))
    assert len(held) == 20
    assert max(map(len, parts)) == 1
    told = [effect for part in parts for effect in books.at_once(part, 0.0)]
    assert [effect.call for effect in told if isinstance(effect, Claimed)] == list(range(1, 21))


def test_a_claim_that_passes_on_while_its_connection_ends_is_no_mistake(ann: Session, books: Catalogue) -> None:
    for name in ("a", "b"):
        books.attach(ann, name, 0.0, claim=True)
    bob = books.connect(BOB)
    books.attach(bob, "b", 0.0, call=1, wait=None, claim=True)
    parts = books.leaving(ann, 0.0)
    assert next(parts) == []
    assert next(parts) == [], "nobody waits for the first"
    (claimed,) = books.expire(1_000.0)
    assert isinstance(claimed, Claimed)
    assert list(parts) == []
    assert [claim.session for claim in books.claims.values()] == [bob]


def test_what_is_published_between_two_parts_is_what_the_rest_get(books: Catalogue, ann: Session, bob: Session) -> None:
    for call in range(1, 101):
        waits(books, bob, call)
    first = publish(books, ann)
    assert goes_on(first)
    second = publish(books, ann)
    assert second == [], "the part that is due goes on with it"
    rest = books.at_once(first[-1:], 0.0)
    got = [effect for effect in first[:-1] + rest if isinstance(effect, Granted)]
    assert [effect.call for effect in got] == list(range(1, 101))
    assert [effect.lease.version.number for effect in got] == [1] * SERVED + [2] * (100 - SERVED)


def test_what_is_removed_between_two_parts_is_waited_for(books: Catalogue, ann: Session, bob: Session) -> None:
    for call in range(1, 101):
        waits(books, bob, call)
    first = publish(books, ann)
    books.remove(ann, "w")
    assert books.at_once(first[-1:], 0.0) == []
    assert books.waiting == 100 - SERVED
    assert len(books.at_once(publish(books, ann), 0.0)) == 100 - SERVED


def test_who_goes_between_two_parts_is_not_served(books: Catalogue, ann: Session, bob: Session) -> None:
    for call in range(1, 101):
        waits(books, bob, call)
    carl = books.connect(1003)
    waits(books, carl, 7)
    first = publish(books, ann)
    books.cancel(bob, 90)
    books.disconnect(carl, 0.0)
    got = [effect.call for effect in books.at_once(first[-1:], 0.0) if isinstance(effect, Granted)]
    assert got == [call for call in range(SERVED + 1, 101) if call != 90]


def test_who_comes_between_two_parts_does_not_get_a_claim_before_who_waits(books: Catalogue, ann: Session) -> None:
    """The last in line is the first who wants the claim, and is asked some parts later."""
    publish(books, ann)
    claim = claims(books, ann, expect=other())
    for call in range(1, 101):
        waits(books, ann, call, expect={"000": "new"}, claim=True)
    waits(books, ann, 101, expect=other(), claim=True)
    first = publish(books, ann, claim=claim.id, meta={"000": "new"})
    assert goes_on(first)
    late = books.connect(ANN)
    with pytest.raises(BusyError, match="those who waited for 'w' before are being served"):
        books.attach(late, "w", 0.0, claim=True, expect=other())
    waits(books, late, 1, expect=other(), claim=True)
    *granted, last = books.at_once(first, 0.0)
    assert [effect.call for effect in granted if isinstance(effect, Granted)] == list(range(1, 101))
    assert isinstance(last, Claimed)
    assert (last.session, last.call) == (ann, 101)
    (then,) = books.at_once(books.drop_claim(ann, last.claim.id, 0.0), 0.0)
    assert isinstance(then, Claimed)
    assert then.session is late


def test_who_comes_between_two_parts_is_asked_at_their_end(books: Catalogue, ann: Session) -> None:
    """Where nobody before wants the claim: no later event would give it to who came."""
    publish(books, ann)
    claim = claims(books, ann, expect=other())
    for call in range(1, 101):
        waits(books, ann, call, expect={"000": "new"}, claim=True)
    first = publish(books, ann, claim=claim.id, meta={"000": "new"})
    late = books.connect(ANN)
    waits(books, late, 1, expect=other(), claim=True)
    last = books.at_once(first, 0.0)[-1]
    assert isinstance(last, Claimed)
    assert last.session is late
