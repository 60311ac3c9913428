"""The stand-in CUDA driver: builds it, puts it in the place of libcuda here and in children, controls it."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

__all__ = ["Standin", "StandinError", "build", "child_environment", "missing", "preload"]

_HERE = Path(__file__).resolve().parent
_BUILT = _HERE.parent.parent / "build" / "standin"
_FLAGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden"]
_LINK = ["-Wl,-soname,libcuda.so.1", "-lpthread"]
_HEADERS = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")
_OLDEST_HEADER = 12090  # CUDA_VERSION; names that came later are written in standin.h


class StandinError(RuntimeError):
    """The stand-in cannot be built or is not what was loaded."""


def missing() -> str | None:
    """Return in one line what this environment lacks to run tests on the stand-in; None if it lacks nothing."""
    if sys.platform != "linux":
        return "the stand-in driver needs Linux"
    try:
        importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return "cuda-bindings is not installed"
    if _compiler() is None:
        return "no C compiler to build the stand-in driver with"
    include = _include()
    if include is None:
        return f"no cuda.h to build the stand-in driver with: install {_HEADERS[0]}"
    version = _header_version(include)
    if version < _OLDEST_HEADER:
        return (
            f"{include / 'cuda.h'} is of CUDA {version // 1000}.{version % 1000 // 10}, and the stand-in driver needs "
            f"that of {_OLDEST_HEADER // 1000}.{_OLDEST_HEADER % 1000 // 10} or newer: install {_HEADERS[0]}"
        )
    return None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc")


@cache
def _include() -> Path | None:
    """Return the directory of cuda.h, newest wheel first; whichever it is, the library serves every binding.

    ``VRAM_STANDIN_INCLUDE`` names another one, such as a toolkit's.
    """
    if chosen := os.environ.get("VRAM_STANDIN_INCLUDE"):
        return Path(chosen) if (Path(chosen) / "cuda.h").exists() else None
    for name in _HEADERS:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if file.name == "cuda.h":
                return Path(str(file.locate())).resolve().parent
    return None


def _header_version(include: Path) -> int:
    found = re.search(r"^#define CUDA_VERSION (\d+)", (include / "cuda.h").read_text(errors="replace"), re.MULTILINE)
    return int(found[1]) if found else 0


def build() -> Path:
    """Compile the stand-in once for each state of its sources.

    Safe in several processes at once: each compiles to a name of its own, and the finished file is put in place whole.

    Returns
    -------
    Path
        The library. It is called libcuda.so.1 and is alone in its directory, so that the directory can go into
        ``LD_LIBRARY_PATH``.

    Raises
    ------
    StandinError
        No compiler, no cuda.h, or the compiler refused; its words are in the message.
    """
    compiler, include = _compiler(), _include()
    if compiler is None or include is None:
        raise StandinError(missing() or "no compiler or header")
    sources = sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")])
    key = hashlib.sha256()
    for part in (compiler, str(include), *_FLAGS, *_LINK):
        key.update(part.encode() + b"\0")
    for source in sources:
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    library = _BUILT / key.hexdigest()[:16] / "libcuda.so.1"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_BUILT, prefix="compiling-") as scratch:
        fresh = Path(scratch) / "libcuda.so.1"
        units = [str(source) for source in sources if source.suffix == ".c"]
        command = [compiler, *_FLAGS, "-isystem", str(include), *units, *_LINK, "-o", str(fresh)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise StandinError(f"the stand-in does not compile:\n{done.stderr}")
        os.replace(fresh, library)
    return library


def preload(*, children: bool = False) -> Standin:
    """Load the stand-in into this process, before anything has loaded a libcuda.

    The bindings ask the loader for ``libcuda.so.1`` by name, and the loader gives what is loaded under that name
    already. Do this before the first driver call; afterwards it is too late, and an error.

    Parameters
    ----------
    children : bool
        Also put the stand-in in front of this process's ``LD_LIBRARY_PATH``, which the loader reads when a process
        starts: so not here, but in every child that is executed (spawned, not forked) from now on.

    Raises
    ------
    StandinError
        Another libcuda is in this process.
    """
    library = build()
    loaded = _loaded_libcudas()
    if loaded - {str(library)}:
        raise StandinError(f"another libcuda is loaded already: {sorted(loaded)}")
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    if children:
        os.environ["LD_LIBRARY_PATH"] = _library_path(library)
    return Standin()


def _library_path(library: Path) -> str:
    rest = [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part and part != str(library.parent)]
    return ":".join([str(library.parent), *rest])


def _loaded_libcudas() -> set[str]:
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    return {path for path in paths if Path(path).name.startswith("libcuda.so")}


def child_environment(**settings: object) -> dict[str, str]:
    """Return this process's environment with the stand-in in front of ``LD_LIBRARY_PATH``, for a child process.

    Parameters
    ----------
    **settings
        Without the prefix and in lower case: ``driver_version=11080`` sets ``VRAM_STANDIN_DRIVER_VERSION``.
        ``visible_devices`` sets ``CUDA_VISIBLE_DEVICES``. True is 1, False is 0, None removes it.
    """
    environment = dict(os.environ)
    environment["LD_LIBRARY_PATH"] = _library_path(build())
    for name, value in settings.items():
        variable = "CUDA_VISIBLE_DEVICES" if name == "visible_devices" else f"VRAM_STANDIN_{name.upper()}"
        if value is None:
            environment.pop(variable, None)
        else:
            environment[variable] = str(int(value)) if isinstance(value, bool) else str(value)
    return environment


class Standin:
    """Speaks to the stand-in that this process has loaded."""

    KINDS = (
        "reservations",  # addresses
        "mappings",
        "allocations",  # physical memory that somebody has a handle of
        "multicasts",
        "handles",  # references to both
        "bindings",  # to multicast objects
        "bytes",  # of device memory, of all kinds
        "legacy",  # cuMemAlloc
        "pool_allocations",
        "host",  # allocated or registered
        "ipc_opens",  # legacy, each opening counted
        "contexts",
        "context_references",  # to primary contexts
        "streams",
        "events",
        "pools",
        "pinned",  # memory released here that an exported descriptor keeps alive somewhere
        "pending",  # work that waits for a synchronisation
    )

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL("libcuda.so.1")
        try:
            ctypes.c_char.in_dll(library, "vram_standin")
        except ValueError:
            raise StandinError("the libcuda.so.1 in this process is not the stand-in") from None
        library.vram_standin_live.restype = ctypes.c_longlong
        for name in ("calls", "would_hang", "would_crash", "illegal", "faults_played", "called"):
            getattr(library, f"vram_standin_{name}").restype = ctypes.c_long
        library.vram_standin_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        library.vram_standin_capture.argtypes = [ctypes.c_void_p]
        library.vram_standin_set_free.argtypes = [ctypes.c_int, ctypes.c_ulonglong]
        library.vram_standin_called.argtypes = [ctypes.c_char_p, ctypes.c_long]

    def live(self) -> dict[str, int]:
        """Count what lives, by kind (see ``KINDS``); kinds of which there is nothing are left out."""
        counts = {kind: int(self._library.vram_standin_live(kind.encode())) for kind in self.KINDS}
        return {kind: count for kind, count in counts.items() if count}

    def fail(self, name: str, nth: int = 1, code: int = 999, *, forever: bool = False) -> None:
        """Make the nth call from now of a function fail, and all after it if forever; nothing else happens in them.

        Parameters
        ----------
        name : str
            Without a version: ``cuMemMap``. ``"*"`` is any call but cuGetErrorName and cuGetErrorString.
        nth : int
            1 is the next one.
        code : int
            CUresult; 0 counts but does not fail.
        """
        self._library.vram_standin_fail(name.encode(), nth, int(code), forever)

    def clear(self) -> None:
        """Forget the faults and set all counts to 0. What lives is left alone."""
        self._library.vram_standin_clear()

    @contextmanager
    def failing(self, name: str, nth: int = 1, code: int = 999, *, forever: bool = False) -> Iterator[Standin]:
        """``fail`` for the length of a block, and ``clear`` on both sides of it."""
        self.clear()
        self.fail(name, nth, code, forever=forever)
        try:
            yield self
        finally:
            self.clear()

    def interrupt(self, name: str = "*", nth: int = 1) -> None:
        """Send this process SIGINT in the nth call of a function from now, which then does what it always does.

        Python handles it when it next asks for signals: the call has taken effect by then. See :meth:`fail`.
        """
        self.fail(name, nth, -1)

    def calls(self, name: str) -> int:
        """Count the calls of a function since the last clear, failed ones included."""
        return int(self._library.vram_standin_calls(name.encode()))

    def called(self) -> dict[str, int]:
        """Return every function that was called since the last clear, with its count."""
        room = ctypes.create_string_buffer(1 << 16)
        self._library.vram_standin_called(room, len(room))
        return {name: self.calls(name) for name in sorted(room.value.decode().split())}

    def would_hang(self) -> int:
        """Count the calls since the last clear that would never have returned on hardware."""
        return int(self._library.vram_standin_would_hang())

    def would_crash(self) -> int:
        """Count the calls since the last clear in which hardware ends the process, inside the driver."""
        return int(self._library.vram_standin_would_crash())

    def illegal(self) -> int:
        """Count the deferred copies and fills since the last clear whose memory was gone when they ran."""
        return int(self._library.vram_standin_illegal())

    def faults_played(self) -> int:
        """Count the faults since the last clear that came to pass."""
        return int(self._library.vram_standin_faults_played())

    def set_free(self, device: int, nbytes: int | None) -> None:
        """Leave this many free bytes on a device from now on, whatever is allocated; None: all. Needs cuInit."""
        if self._library.vram_standin_set_free(device, (1 << 64) - 1 if nbytes is None else nbytes):
            raise StandinError(f"no device {device}, or cuInit was not called")

    def fabric(self, on: bool = True) -> None:
        """Let fabric handles work, or not, in this process; ``VRAM_STANDIN_FABRIC`` says it for children."""
        self._library.vram_standin_fabric(int(on))

    def capture(self, stream: int) -> None:
        """Have a stream say that it captures a graph, so that neither it nor its context can be waited for; 0: none."""
        self._library.vram_standin_capture(stream)

    def defer(self, on: bool = True) -> None:
        """Leave asynchronous work undone until something waits for it; off runs what is pending."""
        self._library.vram_standin_defer(int(on))
