"""The errors of a keeper: what they say, and as messages, which a client raises by the same name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .. import errors
from .messages import Error

if TYPE_CHECKING:
    from ..sharing.channel import Credentials
    from .records import Session, Version, Waiter

    Claimant = tuple[Session, float] | None  # the session that has a claim, and since when

_KINDS: dict[str, type[errors.VramError]] = {
    kind.__name__: kind
    for kind in (
        errors.UsageError, errors.RangeError, errors.CapacityError, errors.AsleepError, errors.BusyError,
        errors.PeerGoneError, errors.ProtocolError, errors.AccessDeniedError, errors.NotFoundError, errors.QuotaError,
        errors.MismatchError, errors.WaitTimeoutError, errors.UnsupportedError,
    )
}  # fmt: skip


def failure(call: int, error: Exception) -> Error:
    """Write an exception as a message. One that is not ours says no more than that something broke."""
    names = (base.__name__ for base in type(error).__mro__)
    kind = next((name for name in names if name in _KINDS), "")
    if not kind:
        return Error(call, "InternalError", "the keeper could not do this: an error of its own, see its log")
    details: list[str] = []
    expected: dict[str, str] = {}
    found: dict[str, str] = {}
    if isinstance(error, errors.UnsupportedError):
        details = [error.capability, error.needs, error.have, error.remedy]
    elif isinstance(error, errors.MismatchError):
        expected, found = error.expected, error.found
    elif isinstance(error, errors.BusyError):
        details = [holder[:500] for holder in error.holders[:20]]
    return Error(call, kind, str(error)[:4000], details, expected, found)


def raised(error: Error) -> errors.VramError:
    """Return the exception that a message stands for."""
    kind = _KINDS.get(error.kind)
    if kind is None:
        return errors.InternalError(error.text)
    if kind is errors.UnsupportedError:
        capability, needs, have, remedy = (*error.details, "", "", "", "")[:4]
        return errors.UnsupportedError(capability, needs, have, remedy)
    if kind is errors.MismatchError:
        return errors.MismatchError(error.text, error.expected, error.found)
    if kind is errors.BusyError:
        busy = errors.BusyError(error.text)  # the text names the holders already
        busy.holders = tuple(error.details)
        return busy
    return kind(error.text)


# -- of a catalogue: names of what is not there, not as expected, or not in time ---------------------------------------
def unknown(name: str) -> errors.NotFoundError:
    """Return the error for a name without versions."""
    return errors.NotFoundError(f"nothing is published as {name!r}; `vram ls` shows what is")


def gone(name: str, version: int, current: Version | None, last: int) -> errors.NotFoundError:
    """Return the error for a version that is not there; `last` is the last number of its name."""
    there = "nothing is current" if current is None else f"the current one is {current.number}"
    # Under a name that is not known, it is above the numbers of all names that were forgotten.
    there += f", and the next one is {last + 1}"
    return errors.NotFoundError(f"{name!r} version {version} is gone or was never there; {there}")


def busy(waiter: Waiter, claimant: Claimant, current: Version | None, now: float) -> errors.VramError | None:
    """Return the error for an attach that does not wait, where another process makes or wakes what it asks for."""
    if waiter.asked.claim and claimant is not None:
        made = f"{waiter.asked.name!r} is being made by another process, which has had the claim"
        return errors.BusyError(f"{made} for {now - claimant[1]:.0f} s", (str(claimant[0]),))
    if waiter.asked.purpose and current is not None and current.move is not None:
        woken = f"{waiter.asked.name!r} is being woken by another process, for {now - current.move.since:.0f} s so far"
        return errors.BusyError(woken, (str(current.move.session),))
    return None


def too_late(waiter: Waiter, claimant: Claimant, current: Version | None, now: float) -> errors.WaitTimeoutError:
    """Return the error for an attach that waited as long as it may."""
    if waiter.asked.purpose and current is not None and current.move is not None:
        move = current.move
        return errors.WaitTimeoutError(
            f"{waiter.asked.name!r} was not woken in time; {move.session} has been at it for {now - move.since:.0f} s"
        )
    who = ""
    if claimant is not None:
        who = f"; {claimant[0]} has had the claim to publish it for {now - claimant[1]:.0f} s"
    return errors.WaitTimeoutError(f"{waiter.asked.name!r} was not published in time{who}")


def mismatch(waiter: Waiter, session: Session, version: Version) -> errors.MismatchError:
    """Return the error for a version that is not as its reader expects."""
    expect, found = waiter.notes, version.meta
    there, difference = f"{waiter.asked.name!r} version {version.number}", _difference(expect, found)
    if not waiter.asked.claim:
        return errors.MismatchError(f"{there} is not what was expected: {difference}", expect, found)
    return errors.MismatchError(
        f"{there} is not what was expected ({difference}) and belongs to uid {version.owner}, so that uid "
        f"{session.uid} may not replace it",
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


# -- of a connection ----------------------------------------------------------------------------------------------
def no_keeper(path: str, pid: int) -> errors.AccessDeniedError:
    """Return the error for a client that asks a lender for something that only a keeper does."""
    return errors.AccessDeniedError(
        f"{path} is a lender, not a keeper: what it lends is its process's own. Borrow it, or look at it with "
        f"`vram ls` and `vram show`; only pid {pid} can ask for it back (Lending.revoke)"
    )


def no_lender(path: str) -> errors.AccessDeniedError:
    """Return the error for a client that would borrow from a keeper."""
    return errors.AccessDeniedError(
        f"{path} is a keeper, not a lender: what it keeps has names, which `vram ls --socket {path}` shows. "
        f"vram.attach(name, keeper={path!r}) maps one"
    )


def silent_words(who: Credentials) -> str:
    """Say who it is that does not answer, and what to do."""
    if not who.pid:  # in another PID namespace
        return f"It is of uid {who.uid}, a process that is not to be seen from here"
    try:
        lives = os.stat(f"/proc/{who.pid}").st_uid == who.uid
        with open(f"/proc/{who.pid}/stat", "rb") as file:
            stopped = file.read().rsplit(b")", 1)[1].split()[0] in (b"T", b"t")
    except OSError:  # gone, or not for us to see
        lives = stopped = False
    if not lives:  # it may have left the socket to another process, and its number may be anybody's soon
        return (
            f"Process {who.pid} of uid {who.uid} began to listen there, and is not to be seen: `ss -xlp` says which "
            f"processes have the socket"
        )
    if stopped:
        return f"It is pid {who.pid} of uid {who.uid}, and was stopped: `kill -CONT {who.pid}` has it go on"
    return (
        f"It is pid {who.pid} of uid {who.uid}: look at it with `ps -fp {who.pid}`, end it with "
        f"`kill {who.pid}`, which ends what it keeps, too"
    )
