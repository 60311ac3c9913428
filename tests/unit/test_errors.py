"""The errors: one root, the built-in kin they promise, texts that help, and the way home from a worker (I10)."""

from __future__ import annotations

import copy
import pickle

import pytest

from vram import errors
from vram.errors import BusyError, DriverError, MismatchError, NotFoundError, UnsupportedError, VramError

MADE = {
    "BusyError": BusyError("region is still in use", ("a view", "a lease")),
    "MismatchError": MismatchError("it is another one", {"config": "a"}, {"config": "b"}),
    "UnsupportedError": UnsupportedError("sealing", "Linux 5.1", "Linux 4.9", "Upgrade"),
    "DriverError": DriverError("mmap(5)", 12, "ENOMEM", "ask for less"),
    "OutOfMemoryError": errors.OutOfMemoryError("mem_create(5)", 12, "ENOMEM"),
    "AddressSpaceError": errors.AddressSpaceError("mmap(5)", 12, "ENOMEM"),
    "DeviceLostError": errors.DeviceLostError("copy(5)", 719, "CUDA_ERROR_LAUNCH_FAILED"),
}
KINDS = [
    kind
    for kind in (getattr(errors, name) for name in errors.__all__)
    if issubclass(kind, Exception) and not issubclass(kind, Warning)
]
KIN = {
    "UsageError": ValueError,
    "ReadOnlyError": ValueError,  # as numpy says it
    "UnreadableFileError": PermissionError,
    "PeerGoneError": ConnectionError,
    "AccessDeniedError": PermissionError,
    "NotFoundError": KeyError,
    "MissingFileError": FileNotFoundError,
    "WaitTimeoutError": TimeoutError,
    "OutOfMemoryError": MemoryError,
    "AddressSpaceError": MemoryError,
    "LeakWarning": ResourceWarning,
    "ReleaseWarning": RuntimeWarning,
}


def make(kind: type[Exception]) -> Exception:
    return MADE.get(kind.__name__) or kind(f"what a {kind.__name__} says")


def test_one_root():
    assert all(issubclass(kind, VramError) for kind in KINDS)
    public = {name for name, value in vars(errors).items() if isinstance(value, type) and not name.startswith("_")}
    assert public == set(errors.__all__)


@pytest.mark.parametrize(("name", "builtin"), KIN.items())
def test_those_who_know_only_the_builtins_catch_them(name, builtin):
    assert issubclass(getattr(errors, name), builtin)


def test_who_is_at_fault_is_said_by_the_parent():
    """A full keeper is no mistake of whoever asks, and a file that is missing here no other side's."""
    assert issubclass(errors.QuotaError, errors.PeerError)
    assert not issubclass(errors.QuotaError, ValueError)
    assert not issubclass(errors.MissingFileError, errors.PeerError)
    assert issubclass(errors.CapacityError, errors.UsageError)
    assert issubclass(errors.ReadOnlyError, errors.UsageError)
    assert not issubclass(errors.UnreadableFileError, errors.PeerError)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_what_was_said(kind):
    assert str(make(kind))
    if kind.__name__ not in MADE:
        assert str(make(kind)) == f"what a {kind.__name__} says"
    assert str(NotFoundError("no entry 'x'")) == "no entry 'x'"  # and not its repr, as KeyError would


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_a_worker_can_send_it_home(kind, way):
    error = copy.deepcopy(make(kind))
    error.add_note("while unwinding")
    twin = way(error)
    assert type(twin) is kind
    assert str(twin) == str(error)
    assert twin.__dict__ == error.__dict__
    assert twin.__notes__ == error.__notes__


def test_i10_a_driver_error_carries_the_call_the_code_and_a_remedy():
    error = MADE["DriverError"]
    assert (error.call, error.code, error.name) == ("mmap(5)", 12, "ENOMEM")
    assert str(error) == "mmap(5) failed: ENOMEM (12): ask for less"
    assert str(MADE["OutOfMemoryError"]) == "mem_create(5) failed: ENOMEM (12)"


def test_busy_names_the_holders():
    assert str(MADE["BusyError"]) == "region is still in use (held by: a view, a lease)"
    assert MADE["BusyError"].holders == ("a view", "a lease")
    assert str(BusyError("busy")) == "busy"
    many = BusyError("busy", tuple(f"view {number}" for number in range(9)))
    assert str(many) == "busy (held by: view 0, view 1, view 2, view 3, view 4 and 4 more)"
    assert len(many.holders) == 9


def test_unsupported_says_what_it_takes():
    error = MADE["UnsupportedError"]
    assert str(error) == "sealing needs Linux 5.1; have Linux 4.9. Upgrade"
    assert (error.capability, error.needs, error.have, error.remedy) == ("sealing", "Linux 5.1", "Linux 4.9", "Upgrade")
    assert str(UnsupportedError("x", "y", "z")) == "x needs y; have z"


def test_a_mismatch_has_both_sides():
    error = MADE["MismatchError"]
    assert (error.expected, error.found) == ({"config": "a"}, {"config": "b"})
    assert (MismatchError("no").expected, MismatchError("no").found) == ({}, {})
