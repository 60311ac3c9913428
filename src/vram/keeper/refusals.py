"""The errors of a catalogue for requests that name what is not there, not as expected, or not in time."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import BusyError, MismatchError, NotFoundError, VramError, WaitTimeoutError
from .records import Claim, Version, Waiter


def unknown(name: str) -> NotFoundError:
    """Return the error for a name without versions."""
    return NotFoundError(f"nothing is published as {name!r}; `vram ls` shows what is")


def gone(name: str, version: int, current: Version | None, last: int) -> NotFoundError:
    """Return the error for a version that is not there; `last` is the last number of its name."""
    there = "nothing is current" if current is None else f"the current one is {current.number}"
    # Under a name that is not known, it is above the numbers of all names that were forgotten.
    there += f", and the next one is {last + 1}"
    return NotFoundError(f"{name!r} version {version} is gone or was never there; {there}")


def busy(waiter: Waiter, claim: Claim | None, current: Version | None, now: float) -> VramError | None:
    """Return the error for an attach that does not wait, where another process makes or wakes what it asks for."""
    if waiter.claims and claim is not None:
        made = f"{waiter.name!r} is being made by another process, which has had the claim"
        return BusyError(f"{made} for {now - claim.since:.0f} s", (str(claim.session),))
    if waiter.purpose and current is not None and current.move is not None:
        woken = f"{waiter.name!r} is being woken by another process, for {now - current.move.since:.0f} s so far"
        return BusyError(woken, (str(current.move.session),))
    return None


def too_late(waiter: Waiter, claim: Claim | None, current: Version | None, now: float) -> WaitTimeoutError:
    """Return the error for an attach that waited as long as it may."""
    if waiter.purpose and current is not None and current.move is not None:
        move = current.move
        return WaitTimeoutError(
            f"{waiter.name!r} was not woken in time; {move.session} has been at it for {now - move.since:.0f} s"
        )
    who = ""
    if claim is not None:
        who = f"; {claim.session} has had the claim to publish it for {now - claim.since:.0f} s"
    return WaitTimeoutError(f"{waiter.name!r} was not published in time{who}")


def mismatch(waiter: Waiter, version: Version) -> MismatchError:
    """Return the error for a version that is not as its reader expects."""
    expect, found = waiter.notes, version.meta
    there, difference = f"{waiter.name!r} version {version.number}", _difference(expect, found)
    if not waiter.claims:
        return MismatchError(f"{there} is not what was expected: {difference}", expect, found)
    return MismatchError(
        f"{there} is not what was expected ({difference}) and belongs to uid {version.owner}, so that uid "
        f"{waiter.session.uid} may not replace it",
        expect,
        found,
    )


def _difference(expect: Mapping[str, str], found: Mapping[str, str]) -> str:
    differs = [key for key, value in expect.items() if found.get(key) != value]
    parts = [
        (f"{key} is {found[key]!r:.80}" if key in found else f"{key} is not set") + f", expected {expect[key]!r:.80}"
        for key in differs[:3]
    ]
    return "; ".join(parts) + (f" and {len(differs) - 3} more" if len(differs) > 3 else "")
