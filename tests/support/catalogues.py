"""Users, entries and waiters of a catalogue."""

from __future__ import annotations

from vram.keeper.catalogue import Catalogue
from vram.keeper.limits import Usage
from vram.keeper.messages import Attach
from vram.keeper.records import Claim, Effect, Lease, Session, Version, Waiter

KEEPER, ANN, BOB, NOBODY = 1000, 1001, 1002, 65_534


def publish(
    books: Catalogue, session: Session, name: str = "w", token: str = "t1", now: float = 0.0, **options: object
) -> tuple[Version, list[Effect]]:
    options = {"nbytes": 100, "handles": 1, **options}
    return books.commit(books.begin(session, name, **options), token, now)  # type: ignore[arg-type]


def attach(books: Catalogue, session: Session, name: str, now: float = 0.0, **asked: object) -> Lease | Claim | Waiter:
    return books.attach(session, Attach(asked.pop("call", 0), name, **asked), now)  # type: ignore[arg-type]


def lease(books: Catalogue, session: Session, name: str = "w", **options: object) -> Lease:
    got = attach(books, session, name, **options)
    assert isinstance(got, Lease)
    return got


def waits(books: Catalogue, session: Session, call: int, name: str = "w", **options: object) -> Waiter:
    got = attach(books, session, name, call=call, **{"wait": None, **options})
    assert isinstance(got, Waiter)
    return got


def noted(books: Catalogue) -> dict[object, bool]:
    """Return what is yet to be written, and begin anew."""
    changed, books.changed = books.changed, {}
    return changed


def vars_of(usage: Usage) -> tuple[int, int, int]:
    return usage.nbytes, usage.entries, usage.handles
