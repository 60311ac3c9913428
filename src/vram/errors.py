"""Everything that can go wrong, under one root.

Three words for misuse: *closed* (you closed it), *broken* (the world or a peer failed), *busy* (somebody else still
has a claim). Every error says what was asked, the numbers, and the nearest legal value or a remedy. Where a built-in
exception fits (``ValueError``, ``MemoryError``, ``KeyError``, ...) ours derives from it too.
"""

from __future__ import annotations

__all__ = [
    "AccessDeniedError",
    "AddressSpaceError",
    "AlignmentError",
    "AsleepError",
    "BackupError",
    "BusyError",
    "CapacityError",
    "ClosedError",
    "DeviceLostError",
    "DriverError",
    "ForkedError",
    "InternalError",
    "LeakWarning",
    "MismatchError",
    "MissingFileError",
    "NotFoundError",
    "OutOfMemoryError",
    "PeerError",
    "PeerGoneError",
    "ProtocolError",
    "QuotaError",
    "RangeError",
    "ReadOnlyError",
    "ReleaseWarning",
    "TornError",
    "UnreadableFileError",
    "UnsupportedError",
    "UsageError",
    "VramError",
    "WaitTimeoutError",
]


class VramError(Exception):
    """Root of every exception this library raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        # Worker processes send exceptions home by pickle, which by default calls the class with the finished message
        # as its only argument; several of ours take others, and a pool would hang on the failure.
        return _rebuilt, (type(self), self.args, self.__dict__)


def _rebuilt(kind: type[VramError], args: tuple[object, ...], state: dict[str, object]) -> VramError:
    # Past __init__, and past MemoryError's own __new__, which refuses classes that have another base as well.
    error: VramError = (OSError if issubclass(kind, OSError) else Exception).__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UsageError(VramError, ValueError):
    """A mistake the caller could have known about: a wrong name, type, size or order of calls."""


class AlignmentError(UsageError):
    """An address or size is not a multiple of the granularity the driver asks for."""


class RangeError(UsageError):
    """An offset, index or span lies outside the object it names."""


class ReadOnlyError(UsageError):
    """Memory was to be written that may only be read here: copy it, or attach it with another `access`."""


class CapacityError(UsageError):
    """Past a size that was fixed before, such as a region's capacity, or past what any process could map."""


class ClosedError(VramError):
    """The object was closed by its owner."""


class ForkedError(ClosedError):
    """The object belongs to the parent of this fork; nothing can be done with it here."""


class BusyError(VramError):
    """Somebody still has a claim.

    Attributes
    ----------
    holders : tuple of str
        The holders, one label each.
    """

    def __init__(self, message: str, holders: tuple[str, ...] = ()) -> None:
        self.holders = tuple(holders)
        if self.holders:
            shown = ", ".join(self.holders[:5])
            more = f" and {len(self.holders) - 5} more" if len(self.holders) > 5 else ""
            message = f"{message} (held by: {shown}{more})"
        super().__init__(message)


class AsleepError(VramError):
    """The memory is asleep: it has an address and no bytes. Wake it first."""


class TornError(VramError):
    """An update in place was begun and never finished: the bytes are of no one version. Update or publish again."""


class BackupError(VramError):
    """Bytes could not be put into a file, or those of sleeping memory are not there any more as they were."""


class PeerError(VramError):
    """The other side of a connection failed or refused."""


class PeerGoneError(PeerError, ConnectionError):
    """The connection ended: the other process died, exited or hung up.

    Attributes
    ----------
    ranks : tuple of int
        Of a group: the ranks that are gone.
    """

    ranks: tuple[int, ...] = ()


class ProtocolError(PeerError):
    """The other side said something that the protocol does not allow."""


class AccessDeniedError(PeerError, PermissionError):
    """The entry belongs to somebody else, or was published without that right."""


class NotFoundError(PeerError, KeyError):
    """No such name, version or object."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class MismatchError(PeerError):
    """The published version differs from what the reader expects, or belongs to another user.

    Attributes
    ----------
    expected, found : dict of str to str
        The metadata asked for, and the metadata of the entry under that name; both empty if it is the owner that
        differs.
    """

    def __init__(
        self, message: str, expected: dict[str, str] | None = None, found: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.expected = dict(expected or {})
        self.found = dict(found or {})


class QuotaError(PeerError):
    """A keeper is full, or this user or this connection has all that it may have there."""


class WaitTimeoutError(PeerError, TimeoutError):
    """A deadline of the caller passed while it waited for the other side."""


class MissingFileError(VramError, FileNotFoundError):
    """There is no file or directory at a path of this machine."""


class UnreadableFileError(VramError, PermissionError):
    """A file of this machine cannot be read: this user may not, or its device fails."""


class UnsupportedError(VramError):
    """This system, driver or device lacks a capability.

    Attributes
    ----------
    capability : str
        The capability that was asked for.
    needs, have : str
        The requirement, and what was found instead.
    remedy : str
        A remedy for the caller; may be empty.
    """

    def __init__(self, capability: str, needs: str, have: str, remedy: str = "") -> None:
        self.capability, self.needs, self.have, self.remedy = capability, needs, have, remedy
        super().__init__(f"{capability} needs {needs}; have {have}" + (f". {remedy}" if remedy else ""))


class DriverError(VramError):
    """A driver or system call failed in a way its caller could not foresee.

    Attributes
    ----------
    call : str
        The call that failed, with the numbers it was given.
    code : int
        The status code or errno.
    name : str
        The code's symbolic name, such as ``ENOMEM`` or ``CUDA_ERROR_INVALID_VALUE``.
    """

    def __init__(self, call: str, code: int, name: str, detail: str = "") -> None:
        self.call, self.code, self.name = call, code, name
        super().__init__(f"{call} failed: {name} ({code})" + (f": {detail}" if detail else ""))


class OutOfMemoryError(DriverError, MemoryError):
    """No physical memory of the kind asked for is left."""


class AddressSpaceError(DriverError, MemoryError):
    """No range of addresses of the size asked for is left, or too many mappings exist."""


class DeviceLostError(DriverError):
    """The device failed and will not come back in this process."""


class InternalError(VramError):
    """An invariant of the library broke: please report it."""


class LeakWarning(ResourceWarning):
    """Something opened by hand was garbage-collected without ``close()``."""


class ReleaseWarning(RuntimeWarning):
    """Taking a driver object back failed; it and what it depends on are kept rather than freed in a wrong order."""
