"""Giving a lease back: once, after the last unmap, by whoever comes last (S5, I3)."""

from __future__ import annotations

from vram.entries.mapped import Claim, LeaseReturn, own


def lease(given: list[int]) -> tuple[LeaseReturn, Claim]:
    back = LeaseReturn(7, given.append)
    return back, own("lease on a test", back)


def test_s5_a_lease_is_given_back_after_what_stands_on_it() -> None:
    given: list[int] = []
    _, claim = lease(given)
    order: list[str] = []
    mapping = own("mapping", lambda: order.append("unmapped"), depends=[claim.handle])
    claim.release()
    assert (given, order) == ([], [])
    mapping.release()
    assert (given, order) == ([7], ["unmapped"])


def test_who_wants_to_wait_for_the_answer_gives_it_back() -> None:
    given: list[int] = []
    back, claim = lease(given)
    back.keep_back()
    assert not back.take(), "it is not due yet"
    claim.release()
    assert given == []
    assert back.take()
    assert not back.take(), "once"
    back.send_on()
    assert given == []


def test_what_is_still_in_use_is_given_back_by_the_last_user() -> None:
    given: list[int] = []
    back, claim = lease(given)
    view = claim.handle.claim("view")
    back.keep_back()
    claim.release()
    assert not back.take()
    back.send_on()
    assert given == []
    view.release()
    assert given == [7]


def test_the_last_user_may_go_between_the_look_and_the_going_on() -> None:
    given: list[int] = []
    back, claim = lease(given)
    view = claim.handle.claim("view")
    back.keep_back()
    claim.release()
    assert not back.take()
    view.release()  # another thread, in this moment
    back.send_on()
    assert given == [7]


def test_i3_the_last_user_may_go_while_it_is_handed_on() -> None:
    """Between the two steps of the handing on: each of the two finds it due, and one of them gives it back."""
    given: list[int] = []

    class Raced(LeaseReturn):
        view: Claim | None = None

        def take(self) -> bool:
            view, self.view = self.view, None
            if view is not None:
                view.release()  # another thread, in this moment
            return super().take()

    back = Raced(7, given.append)
    claim = own("lease on a test", back)
    view = claim.handle.claim("view")
    back.keep_back()
    claim.release()
    assert not back.take()
    back.view = view
    back.send_on()
    assert given == [7]
