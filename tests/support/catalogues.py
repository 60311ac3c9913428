"""Users, entries and waiters of a catalogue."""

from __future__ import annotations

from vram.keeper.catalogue import Catalogue
from vram.keeper.limits import Usage
from vram.keeper.messages import Attach, Publish
from vram.keeper.records import Claim, Effect, Lease, Publication, Session, Version, Waiter

KEEPER, ANN, BOB, NOBODY = 1000, 1001, 1002, 65_534


def publish(
    books: Catalogue, session: Session, name: str = "w", token: str = "t1", now: float = 0.0, **options: object
) -> tuple[Version, list[Effect]]:
    return books.commit(begin(books, session, name, **options), token, now)


def begin(
    books: Catalogue, session: Session, name: str, nbytes: int = 100, handles: int = 1, **asked: object
) -> Publication:
    counted = {one: asked.pop(one) for one in ("least", "pieces", "known") if one in asked}
    request = Publish(1, name, [], [], **asked)  # type: ignore[arg-type]
    return books.begin(session, request, nbytes=nbytes, handles=handles, **counted)  # type: ignore[arg-type]


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
