"""Exceptions as messages and back: an error of the keeper is raised in its client, by the same name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import errors
from .messages import Error

if TYPE_CHECKING:
    from .records import Evicted

__all__ = ["failure", "goodbye", "no_keeper", "no_lender", "raised"]

_KINDS: dict[str, type[errors.VramError]] = {
    kind.__name__: kind
    for kind in (
        errors.UsageError,
        errors.RangeError,
        errors.AsleepError,
        errors.BusyError,
        errors.PeerGoneError,
        errors.ProtocolError,
        errors.AccessDeniedError,
        errors.NotFoundError,
        errors.MismatchError,
        errors.WaitTimeoutError,
        errors.UnsupportedError,
    )
}
# Its name on the wire, from before it had one of its own: an older client knows no other.
_KINDS["CapacityError"] = errors.QuotaError
_WRITTEN = {"QuotaError": "CapacityError"}


def failure(call: int, error: Exception) -> Error:
    """Write an exception as a message. One that is not ours says no more than that something broke."""
    names = (_WRITTEN.get(base.__name__, base.__name__) for base in type(error).__mro__)
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


def goodbye(evicted: Evicted, path: str) -> Error:
    """Return the last message to a process whose lease was ended by force, before its connection is closed."""
    said = errors.PeerGoneError(
        f"the user who runs the keeper at {path} took back {evicted.name!r} version {evicted.version} by force, which "
        f"ended this process's connection: its leases are over, what is mapped stays mapped until it is closed here"
    )
    return Error(0, type(said).__name__, str(said), [evicted.name, str(evicted.version)])
