"""Whose turn it is: the scheduler by itself, with a clock and costs of the test's own."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vram.keeper.fairness import ADVANCE, ASKING, LONGEST, MOST, RECENT, RESERVED, SHARE, Fairness

pytestmark = pytest.mark.slow  # goes with the fair shares of a keeper

COST = 0.002  # seconds that one request takes at most


class Sim:
    """A keeper that does nothing but take time: requests come at their times and are answered one by one."""

    def __init__(self) -> None:
        self.turns: Fairness[int] = Fairness()
        self.now = 100.0
        self.costs: list[float] = []
        self.uids: list[int] = []
        self.came: list[float] = []
        self.parked: set[int] = set()
        self.answered: dict[int, float] = {}  # when it began
        self.order: list[int] = []

    def arrive(self, uid: int, cost: float) -> int:
        number = len(self.costs)
        self.costs.append(cost)
        self.uids.append(uid)
        self.came.append(self.now)
        if self.turns.may(uid, self.now):
            self._answer(number, waited=False)
        else:
            self.parked.add(number)
            self.turns.wait(uid, number)
        return number

    def _answer(self, number: int, *, waited: bool) -> None:
        assert number not in self.answered
        begin = self.now
        self.answered[number] = begin
        self.order.append(number)
        self.turns.spent(self.uids[number], self.costs[number], begin, waited=waited)
        self.now = begin + self.costs[number]

    def turn(self) -> bool:
        """Answer one that waits, if its time has come."""
        number = self.turns.next(self.now)
        if number is None:
            return False
        self._answer(number, waited=True)
        return True

    def until(self, when: float) -> None:
        """Let time pass, as the server does: whenever something is due it is done."""
        while True:
            delay = self.turns.delay(self.now)
            if delay is None or self.now + delay > when:
                self.now = max(self.now, when)
                return
            assert 0 <= delay <= RESERVED
            self.now += delay
            assert self.turn(), "the time for something has come, and nothing is taken"


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 1, 2, 3, 4, 5]),
        st.sampled_from([0.0, 0.0, 0.0, 0.0005, 0.003, 0.05, 0.3]),  # after the one before
        st.sampled_from([0.00002, 0.0002, COST]),
        st.integers(1, 12),  # how many at once
    ),
    max_size=60,
)


@given(requests=REQUESTS)
def test_everybody_is_answered_in_a_bounded_time_and_each_user_in_order(
    requests: list[tuple[int, float, float, int]],
) -> None:
    """Nobody starves, whoever comes when."""
    sim = Sim()
    for uid, gap, cost, count in requests:
        sim.until(sim.now + gap)
        for _ in range(count):
            sim.arrive(uid, cost)
            sim.turn()  # the loop: one turn of those who wait for each event
    sim.until(sim.now + 1_000.0)
    assert sim.turns.delay(sim.now) is None
    assert sorted(sim.answered) == list(range(len(sim.costs)))
    for uid in set(sim.uids):
        mine = [number for number in sim.order if sim.uids[number] == uid]
        assert mine == sorted(mine), "of one user first come, first served"
    # The first of a user's that waits is within the share after LONGEST; then it waits for those who owe less.
    users = len(set(sim.uids))
    for number in sim.parked:
        before = [other for other in sim.order if sim.uids[other] == sim.uids[number] and other < number]
        head = max([sim.came[number], *(sim.answered[other] + sim.costs[other] for other in before)])
        waited = sim.answered[number] - head
        others = sum(
            sim.costs[other]
            for other in sim.order
            if other not in sim.parked and head <= sim.answered[other] < sim.answered[number]
        )
        assert waited <= LONGEST + COST / SHARE + users * COST / SHARE + others + 1e-6


@given(requests=REQUESTS)
def test_a_lone_user_never_waits(requests: list[tuple[int, float, float, int]]) -> None:
    sim = Sim()
    for _, gap, cost, count in requests:
        sim.until(sim.now + gap)
        for _ in range(count):
            sim.arrive(7, cost)
    assert not sim.parked


@given(requests=REQUESTS)
def test_who_keeps_within_the_share_never_waits(requests: list[tuple[int, float, float, int]]) -> None:
    """Whatever the others do."""
    sim = Sim()
    owed, at = 0.0, sim.now
    for uid, gap, cost, count in requests:
        sim.until(sim.now + gap)
        for _ in range(count):
            owed = max(0.0, owed - (sim.now - at) * SHARE)
            at = sim.now
            if owed <= ADVANCE:
                owed += 0.0002
                assert sim.arrive(99, 0.0002) not in sim.parked
            sim.arrive(uid, cost)
            sim.turn()


def attack(sim: Sim, seconds: float, connections: int = 100, cost: float = 0.0002, uid: int = 1) -> deque[int]:
    """A user with so many connections, each asking anew once it was answered; and one who asks each millisecond."""
    for _ in range(connections):
        sim.arrive(uid, cost)
    end = sim.now + seconds
    modest: deque[int] = deque()
    while sim.now < end:
        before = len(sim.order)
        sim.until(sim.now + 0.001)
        for number in sim.order[before:]:
            if sim.uids[number] == uid:
                sim.arrive(uid, cost)
        modest.append(sim.arrive(2, 0.00005))
    return modest


def test_beside_somebody_modest_a_greedy_user_has_its_share_and_no_more() -> None:
    sim = Sim()
    sim.arrive(2, 0.0)
    begin = sim.now
    modest = attack(sim, 2.0)
    took = sum(sim.costs[number] for number in sim.answered if sim.uids[number] == 1)
    passed = sim.now - begin
    assert took <= SHARE * passed + MOST + 0.0002, "more than its share"
    assert took >= 0.9 * SHARE * passed, "its share is its own"
    assert not sim.parked & set(modest)


def test_what_is_done_in_time_that_nobody_wants_is_everything() -> None:
    """Two greedy users and nobody else: no time is left idle, and each has half of it."""
    sim = Sim()
    for _ in range(1_500):  # more than can be done
        sim.arrive(1, 0.0002)
        for _ in range(4):
            sim.arrive(2, 0.00005)
    sim.until(sim.now + RESERVED + 0.01)  # at first both were within the share
    begin, done = sim.now, len(sim.order)
    sim.until(begin + 0.05)
    took = {uid: sum(sim.costs[n] for n in sim.order[done:] if sim.uids[n] == uid) for uid in (1, 2)}
    assert sum(took.values()) >= 0.049
    assert abs(took[1] - took[2]) <= 0.1 * (took[1] + took[2]), f"unequal parts: {took}"


def test_who_was_alone_for_long_pays_for_little_of_it() -> None:
    sim = Sim()
    for _ in range(5_000):
        sim.arrive(1, 0.0002)
    assert not sim.parked
    sim.arrive(2, 0.0002)
    late = sim.arrive(1, 0.0002)
    assert late in sim.parked
    came = sim.now
    while late not in sim.answered:
        sim.until(sim.now + 0.001)
        sim.arrive(2, 0.0001)
    assert sim.answered[late] - came <= LONGEST + 0.0002 / SHARE + 0.003, "it pays for all of the past"


def test_who_has_not_asked_for_long_is_not_reckoned_with_and_forgotten() -> None:
    sim = Sim()
    sim.arrive(2, 0.0002)
    sim.now += RECENT
    for _ in range(1_000):
        sim.arrive(1, 0.0002)
    assert not sim.parked
    assert list(sim.turns._users) == [1]
    assert list(sim.turns._modest) == [1]
    sim.arrive(2, 0.0002)
    assert sim.arrive(1, 0.0002) in sim.parked


def test_nothing_overtakes_what_waits_of_the_same_user() -> None:
    """Also where its time has come, and nobody has looked yet."""
    turns: Fairness[str] = Fairness()
    turns.spent(1, 1.0, 0.0)
    turns.spent(2, 0.0, 0.0)
    turns.wait(1, "first")
    assert not turns.may(1, 1_000.0), "it would overtake what waits"
    assert turns.next(1_000.0) == "first"
    assert turns.may(1, 1_000.0)


def test_what_is_dropped_is_not_answered_and_nobody_waits_for_it() -> None:
    turns: Fairness[str] = Fairness()
    turns.spent(1, 1.0, 0.0)
    turns.spent(2, 0.0, 0.0)
    for item in ("a", "b", "c"):
        assert not turns.may(1, 0.0)
        turns.wait(1, item)
    turns.drop(1, "a")
    turns.drop(1, "a")
    turns.drop(2, "b")
    assert turns.delay(0.0) == RESERVED
    assert turns.next(0.0) is None
    assert turns.next(RESERVED) == "b"
    turns.drop(1, "c")
    assert turns.delay(0.0) is None
    assert turns.next(1_000.0) is None
    assert turns.may(2, 0.0)


def busy(sim: Sim, seconds: float, cost: float, pause: float, uid: int = 2) -> tuple[list[int], float]:
    """A greedy user, and one that asks, gets its answer, does something else, and asks again; what each took."""
    for _ in range(100):
        sim.arrive(1, 0.0001)
    begin = sim.now
    mine = [sim.arrive(uid, cost)]
    while sim.now < begin + seconds:
        before = len(sim.order)
        if mine[-1] in sim.answered:
            sim.until(max(sim.now, sim.answered[mine[-1]] + cost + pause))
            mine.append(sim.arrive(uid, cost))
        else:
            sim.until(sim.now + 0.00005)
        for number in sim.order[before:]:
            if sim.uids[number] == 1:
                sim.arrive(1, 0.0001)
    return mine, sum(sim.costs[number] for number in sim.answered if sim.uids[number] == 1) / (sim.now - begin)


def test_who_pauses_as_long_as_its_requests_take_is_not_greedy() -> None:
    """Short requests, one after the other, that need 0.4 of the time: more than a share."""
    sim = Sim()
    mine, others = busy(sim, 2.0, 0.00004, 0.00006)
    late = [number for number in mine[len(mine) // 10 :] if number in sim.parked]
    assert late == [], f"{len(late)} of {len(mine)} requests were made to wait"
    assert others <= SHARE * 1.2, "the greedy one has more than its share"


@pytest.mark.parametrize("others", [(0, 3, 4), (-1, -2)], ids=["who asked once", "what is done for no user"])
def test_only_users_who_ask_are_company_to_who_pauses(others: tuple[int, ...]) -> None:
    """As many as these, asking, would make the same pauses too short."""
    sim = Sim()
    for other in others:
        sim.arrive(other, 0.0001)
    sim.until(sim.now + ASKING)
    if -1 in others:  # as the keeper does, all the time
        sim.turns.spent(-1, 0.0001, sim.now, waited=True)
    mine, greedy = busy(sim, 0.9 * ASKING, 0.00004, 0.00006)
    late = [number for number in mine[len(mine) // 10 :] if number in sim.parked]
    assert late == [], f"{len(late)} of {len(mine)} requests were made to wait"
    assert greedy <= SHARE * 1.3, "the greedy one has more than its share"


def test_each_user_who_asks_makes_the_pauses_longer_that_are_enough() -> None:
    sim = Sim()
    for other in (3, 4, 5, 6):
        sim.arrive(other, 0.0001)
    mine, _ = busy(sim, 0.9 * ASKING, 0.00004, 0.00006)
    assert [number for number in mine if number in sim.parked], "they are as many as can ask at any time"


def test_long_requests_with_pauses_are_greedy_all_the_same() -> None:
    """A millisecond in three would be under way whenever somebody asks."""
    sim = Sim()
    end, modest = sim.now + 2.0, []
    long = sim.arrive(1, 0.001)
    while sim.now < end:
        sim.until(sim.now + 0.0005)
        modest.append(sim.arrive(2, 0.00004))
        if long in sim.answered and sim.now >= sim.answered[long] + 0.003:
            long = sim.arrive(1, 0.001)
    took = sum(sim.costs[number] for number in sim.answered if sim.uids[number] == 1)
    assert took <= SHARE * 2.0 * 1.2 + MOST, "a pause makes up for long requests"
    assert not sim.parked & set(modest)


def test_who_asks_anew_at_once_has_its_share_also_over_one_connection() -> None:
    """To be made to wait is a pause as well, and it brings no more than a share."""
    sim = Sim()
    sim.arrive(2, 0.00004)
    begin = sim.now
    last = sim.arrive(1, 0.00004)
    while sim.now < begin + 2.0:  # one connection that asks anew as soon as it is answered
        sim.until(sim.now + 0.00001)
        if last in sim.answered:
            last = sim.arrive(1, 0.00004)
        if int(sim.now / 0.001) != int((sim.now - 0.00001) / 0.001):
            sim.arrive(2, 0.00004)
    took = sum(sim.costs[number] for number in sim.answered if sim.uids[number] == 1)
    assert took <= (SHARE * 2.0 + MOST) * 1.2, f"it had {took / 2.0:.2f} of the time"
