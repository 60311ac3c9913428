"""Users, entries and waiters of a catalogue."""

from __future__ import annotations

from vram.keeper.catalogue import Catalogue
from vram.keeper.limits import Usage
from vram.keeper.records import Effect, Lease, Session, Version, Waiter

KEEPER, ANN, BOB, NOBODY = 1000, 1001, 1002, 65_534


def publish(
    books: Catalogue, session: Session, name: str = "w", token: str = "t1", now: float = 0.0, **options: object
) -> tuple[Version, list[Effect]]:
    options = {"nbytes": 100, "handles": 1, **options}
    return books.commit(books.begin(session, name, **options), token, now)  # type: ignore[arg-type]


def lease(books: Catalogue, session: Session, name: str = "w", **options: object) -> Lease:
    got = books.attach(session, name, 0.0, **options)  # type: ignore[arg-type]
    assert isinstance(got, Lease)
    return got


def waits(books: Catalogue, session: Session, call: int, name: str = "w", **options: object) -> Waiter:
    got = books.attach(session, name, 0.0, call=call, **{"wait": None, **options})  # type: ignore[arg-type]
    assert isinstance(got, Waiter)
    return got


def noted(books: Catalogue) -> dict[object, bool]:
    """Return what is yet to be written, and begin anew."""
    changed, books.changed = books.changed, {}
    return changed


def vars_of(usage: Usage) -> tuple[int, int, int]:
    return usage.nbytes, usage.entries, usage.handles
