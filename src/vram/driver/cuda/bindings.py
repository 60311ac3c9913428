"""cuda-bindings made even: one way to call it, whichever of its releases is there (12.9.6 and newer, 13.x).

Calls return the bindings' own objects: who keeps one takes ``int()`` of it (``CUdeviceptr(5) == 5`` is False).
Masks and opaque bytes go through the structs' own pointers: several releases refuse a mask of handle types that is no
single member of the enumeration. Pointer attributes are asked of the driver itself (:meth:`Bindings.past`): 12.9.6,
13.3.1 and 13.4.1 say 0 for the GPU of every pointer, measured on two H200. So is what makes or takes back something,
for another reason: see :mod:`.functions`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import textwrap
from collections.abc import Callable
from typing import Any

from ...errors import DeviceLostError, DriverError, ForkedError, UnsupportedError, UsageError
from .failures import failure
from .functions import exported

_OLDEST = (12, 9, 6)  # before it the GIL was held in calls, and struct fields differed
# As cuDriverGetVersion says it. The newest function that every use needs is cuDeviceGetUuid_v2, which bindings 13 call
# (CUDA 11.4); pools came with 11.2, virtual memory management with 10.2. Newer functions are looked up when used.
_OLDEST_DRIVER = 11040
_SHOWN = 300  # characters of somebody else's words
_ONE = 1 << 64
_UNKNOWN_STATUS = re.compile(r"(-?\d+)(?: is not a valid \S*CUresult\S*)?")
_started = _forked = False


class Bindings:
    """The driver API of this process. `driver_version` is 12010 for 12.1; `lost` is the first call that found a loss:
    for all GPUs of the process every call then raises DeviceLostError at once, and :meth:`undo` does nothing."""

    def __init__(self) -> None:
        self.api = _import()
        self._functions: dict[str, Callable[..., tuple[Any, ...]]] = {}
        self._past: dict[str, Callable[..., int]] = {}
        self.driver_version = 0
        self.bindings_version = _bindings_version()
        self.lost: tuple[str, int, str] | None = None
        global _started
        _started = True
        try:
            # Before cuInit, so that an error of that can say which driver it was.
            self.driver_version = int(self("cuDriverGetVersion"))
            if self.driver_version < _OLDEST_DRIVER:
                raise UnsupportedError(
                    "memory on a GPU", f"a driver of CUDA {version_text(_OLDEST_DRIVER)} or newer",
                    version_text(self.driver_version), 'Upgrade the NVIDIA driver, or use device="host"',
                )  # fmt: skip
            self("cuInit", 0)
        except DriverError as error:
            raise _no_device(error, self.driver_version) from None

    def __call__(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver API and return what it puts out: nothing, a value, or a tuple of them.
        Raises a typed DriverError with code and name, or UnsupportedError if the driver has no such function."""
        if _forked or self.lost is not None:
            raise self._refusal(name)
        function = self._functions.get(name)
        if function is None:
            function = self._resolve(name)
        try:
            outcome = function(*arguments)
        except Exception as error:  # noqa: BLE001  (the types differ between releases)
            raise self._unforeseen(name, error) from None
        status = outcome[0]
        if status:
            raise self.failure(name, int(status))
        return outcome[1] if len(outcome) == 2 else outcome[1:] or None

    def past(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver itself, past the bindings, with numbers and addresses of the caller's memory.
        Raises as a call through the bindings does."""
        function = self._past.get(name)
        if function is None or _forked or self.lost is not None:
            function = self.function(name)  # which says why not
        status = function(*arguments)
        if status:
            raise self.failure(name, status)

    def function(self, name: str) -> Callable[..., int]:
        """Return a function of the driver itself, which takes numbers and addresses, and returns its status. Raises
        DeviceLostError or ForkedError if it must not be called any more, UnsupportedError if the driver lacks it."""
        if _forked or self.lost is not None:
            raise self._refusal(name)
        found = self._past.get(name)
        if found is None:
            found = self._past[name] = exported(name, version_text(self.driver_version))
        return found

    def undo(self, name: str, *arguments: Any) -> None:
        """Take something back, as :meth:`past`. With the device it is lost anyway: then nothing is said."""
        if self.lost is None:
            with contextlib.suppress(DeviceLostError):
                self.past(name, *arguments)

    def failure(self, name: str, code: int) -> Exception:
        """Return the error for a status, with the driver's own name and words for it."""
        known = _status(self.api, code)
        word = getattr(known, "name", f"CUDA_ERROR_{code}")
        text = word.removeprefix("CUDA_ERROR_").replace("_", " ").lower() if known is not code else ""
        for function in ("cuGetErrorName", "cuGetErrorString"):
            with contextlib.suppress(Exception):
                status, found = getattr(self.api, function)(known)
                if not status and found:
                    said = found.decode() if isinstance(found, bytes) else str(found)
                    word, text = (said, text) if function == "cuGetErrorName" else (word, said)
        error = failure(name, code, word, text)
        if isinstance(error, DeviceLostError) and self.lost is None:
            self.lost = (name, code, word)  # not the error itself, which keeps what its frames hold
        return error

    def has(self, name: str) -> bool:
        """Whether these bindings know a function; the driver may still lack it."""
        return hasattr(self.api, name)

    def _refusal(self, name: str) -> Exception:
        """Why nothing is called any more."""
        if _forked or self.lost is None:
            return ForkedError(_FORKED)
        first, code, word = self.lost
        return DeviceLostError(
            name, code, word, f"not called, since {first} found the device lost; no GPU can be used any more in this "
            "process, start a new one"
        )  # fmt: skip

    def _resolve(self, name: str) -> Callable[..., tuple[Any, ...]]:
        found = getattr(self.api, name, None)
        if found is None:
            raise UnsupportedError(
                name, "cuda-bindings that know it", f"cuda-bindings {self.bindings_version}",
                "Upgrade: pip install -U '.[cuda13]' in a clone of vram",
            )  # fmt: skip
        self._functions[name] = found
        return found  # type: ignore[no-any-return]

    def _unforeseen(self, name: str, error: Exception) -> Exception:
        kind = type(error).__name__
        if kind == "FunctionNotFoundError" or (isinstance(error, RuntimeError) and "not found" in str(error)):
            return UnsupportedError(
                name, "a driver that has this function", f"driver {version_text(self.driver_version)}, which has not",
                "Upgrade the NVIDIA driver",
            )  # fmt: skip
        if isinstance(error, (ValueError, KeyError)):
            # A status newer than the bindings: their enumeration refuses it, and the message holds the number.
            number = _UNKNOWN_STATUS.fullmatch(str(error))
            if number is not None:
                return self.failure(name, int(number[1]))
        if isinstance(error, OverflowError):
            return UsageError(f"{name}: a number is negative or does not fit the driver's 64 bits ({error})")
        return error


def check_numbers(call: str, *numbers: int) -> None:
    """Refuse what does not fit the driver's 64 bits: cut to them, it would be another number."""
    if min(numbers) < 0 or max(numbers) >= _ONE:
        raise UsageError(f"{call}: a number is negative or does not fit the driver's 64 bits ({numbers})")


def version_text(version: int) -> str:
    """Write 12010 as ``12.1``."""
    return f"{version // 1000}.{version % 1000 // 10}"


def write(struct: Any, offset: int, kind: type[Any], value: int) -> None:
    """Write a field of a driver struct through its pointer, whatever the bindings think of the value."""
    kind.from_address(int(struct.getPtr()) + offset).value = value


def read(struct: Any, offset: int, kind: type[Any]) -> int:
    """Read a field of a driver struct through its pointer."""
    return int(kind.from_address(int(struct.getPtr()) + offset).value)


def _import() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        raise UnsupportedError(
            "memory on a GPU", "the package cuda-bindings", "no such package",
            "Install it: pip install '.[cuda13]' in a clone of vram (or '.[cuda12]' for a driver of CUDA 12)",
        ) from None  # fmt: skip
    release = tuple(int(part) for part in re.findall(r"\d+", _bindings_version())[:3])
    if release and release < _OLDEST:
        raise UnsupportedError(
            "memory on a GPU", f"cuda-bindings {'.'.join(map(str, _OLDEST))} or newer", _bindings_version(),
            "Upgrade: pip install -U '.[cuda13]' in a clone of vram",
        )  # fmt: skip
    try:
        driver.cuDriverGetVersion()
    except Exception as error:  # noqa: BLE001  (a RuntimeError, or a type of cuda-pathfinder's own)
        raise UnsupportedError(
            "memory on a GPU", "an NVIDIA driver (libcuda.so.1)", f"none that can be loaded: {_first_line(error)}",
            'Install the NVIDIA driver, or use device="host"',
        ) from None  # fmt: skip
    return driver


def _bindings_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("cuda-bindings")
    except PackageNotFoundError:
        return ""


def _no_device(error: DriverError, version: int) -> Exception:
    """Why cuInit failed, in words that tell the causes apart."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if error.code == 100:
        why = f"none that the driver ({version_text(version)}) finds"
        why += f" with CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""
        return UnsupportedError("memory on a GPU", "a GPU", why, 'Use device="host"')
    if error.code == 34:
        return UnsupportedError(
            "memory on a GPU", "an NVIDIA driver", "the stub library of the CUDA toolkit",
            "Take the toolkit's lib/stubs folder out of LD_LIBRARY_PATH",
        )  # fmt: skip
    return error


def _status(api: Any, code: int) -> Any:
    try:
        return api.CUresult(code)
    except (ValueError, KeyError):
        return code


def _first_line(error: Exception) -> str:
    """The first line of somebody else's words, without the period that ours follow; whole words where it is long."""
    line = (str(error).splitlines() or [""])[0].strip().rstrip(".") or type(error).__name__
    return line if len(line) <= _SHOWN else textwrap.shorten(line, _SHOWN, placeholder=" ...")


def _after_fork_in_child() -> None:
    global _forked
    _forked = _started  # a parent that never began leaves its children free to


_FORKED = "the CUDA driver does not survive a fork; start workers with the spawn method"

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

UINT32, UINT64 = ctypes.c_uint32, ctypes.c_uint64
