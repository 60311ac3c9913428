"""The few calls of the C library that Python has no words for, and what their errno values mean.

Prototypes are explicit: without them ctypes would cut addresses to 32 bits. ``CDLL`` lets go of the GIL for the
duration of a call, so that a long populate or the freeing of much memory stops nobody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import operator
import os
from collections.abc import Iterator
from itertools import starmap

from ..errors import AddressSpaceError, DriverError, OutOfMemoryError, UsageError
from ..open_files import F_ADD_SEALS as F_ADD_SEALS
from ..open_files import F_GET_SEALS as F_GET_SEALS
from ..open_files import F_SEAL_FUTURE_WRITE as F_SEAL_FUTURE_WRITE
from ..open_files import F_SEAL_GROW as F_SEAL_GROW
from ..open_files import F_SEAL_SHRINK as F_SEAL_SHRINK
from ..open_files import F_SEAL_WRITE as F_SEAL_WRITE

_library = ctypes.CDLL(None, use_errno=True)

PROT_NONE, PROT_READ, PROT_WRITE = 0, 1, 2
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
MAP_FIXED_NOREPLACE = 0x100000
MADV_DONTNEED, MADV_DONTFORK, MADV_HUGEPAGE, MADV_DONTDUMP = 4, 10, 14, 16
MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_COLLAPSE = 22, 23, 25
MFD_CLOEXEC, MFD_ALLOW_SEALING, MFD_NOEXEC_SEAL = 0x01, 0x02, 0x08
TMPFS_MAGIC = 0x01021994

# Addresses of user space are below 2**63, so a signed result is exact, and failure is -1.
mmap = _library.mmap
mmap.restype = ctypes.c_ssize_t
mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
munmap = _library.munmap
munmap.restype = ctypes.c_int
munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
mprotect = _library.mprotect
mprotect.restype = ctypes.c_int
mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
madvise = _library.madvise
madvise.restype = ctypes.c_int
madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
# The same two, for calls in which no other thread of Python's is to have a turn: this one keeps the GIL.
_alone = ctypes.PyDLL(None, use_errno=True)
_mmap, _madvise = _alone.mmap, _alone.madvise
_mmap.restype, _mmap.argtypes = mmap.restype, mmap.argtypes
_madvise.restype, _madvise.argtypes = madvise.restype, madvise.argtypes
_fstatfs = _library.fstatfs
_fstatfs.restype = ctypes.c_int
_fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]
_Statfs = ctypes.c_long * 32  # f_type comes first; struct statfs is 120 bytes on every 64-bit Linux

# A view of raw memory, without a ctypes type per length (those cost 20 us each and are kept in a cache).
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


class _Buffer(ctypes.Structure):
    """``Py_buffer``, to learn the address of a read-only object, which ctypes' ``from_buffer`` refuses."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.restype = ctypes.c_int
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.restype = None
_release_buffer.argtypes = [ctypes.POINTER(_Buffer)]


def view(address: int, nbytes: int, *, readonly: bool) -> memoryview:
    """Return the bytes at an address as a memoryview that owns nothing."""
    result: memoryview = _view(address, nbytes, 0x100 if readonly else 0x200)
    return result


@contextlib.contextmanager
def lent(call: str, buffer: memoryview, *, writable: bool) -> Iterator[int]:
    """Lend the address of a C-contiguous buffer for the length of a block. UsageError if it is none."""
    raw = _Buffer()
    try:
        _get_buffer(buffer, raw, 1 if writable else 0)
    except BufferError as error:
        words = "destination must be writable and contiguous" if writable else "source must be a contiguous buffer"
        raise UsageError(f"{call}: the {words} ({error})") from None
    try:
        yield raw.buf or 0
    finally:
        _release_buffer(raw)


def map_uninherited(address: int, nbytes: int, right: int, flags: int, fd: int) -> int:
    """Map as :func:`mmap` does, with ``MADV_DONTFORK``, and return the address, or -1 with errno set.
    The GIL is kept throughout: no Python thread forks between the two calls, and no child inherits the mapping."""
    placed: int
    advice = _madvise, address, nbytes, MADV_DONTFORK
    placed, _ = starmap(operator.call, ((_mmap, address, nbytes, right, flags, fd, 0), advice))
    return placed


def filesystem_type(fd: int) -> int:
    """Return the magic number of the file system that `fd` lies on, or 0 where it cannot be told."""
    found = _Statfs()
    return int(found[0]) if _fstatfs(fd, found) == 0 else 0


def failure(call: str, code: int | None = None) -> DriverError:
    """Return the typed error, remedy included, for the errno `code` (default: the last one) of `call`."""
    if code is None:
        code = ctypes.get_errno()
    kind, remedy = _explain(call, code)
    return kind(call, code, errno.errorcode.get(code, "unknown"), remedy)


def _explain(call: str, code: int) -> tuple[type[DriverError], str]:
    if code == errno.EMFILE:
        return DriverError, (
            f"this process is at its limit of open files, {_limit('RLIMIT_NOFILE')} (RLIMIT_NOFILE); raise it with "
            f"ulimit -n or resource.setrlimit, or use fewer and larger chunks"
        )
    if code == errno.ENFILE:
        return DriverError, "the whole system is at its limit of open files; raise sysctl fs.file-max"
    if code == errno.EFBIG:
        return DriverError, (
            f"no file of this process may be that long, and shared memory is one: {_limit('RLIMIT_FSIZE')} bytes "
            f"(RLIMIT_FSIZE); raise it with ulimit -f or resource.setrlimit"
        )
    if code == errno.ENOSPC:
        return OutOfMemoryError, "no memory is left that can be shared; free some or ask for less"
    if code != errno.ENOMEM:
        return DriverError, os.strerror(code)
    if not call.startswith(("mmap", "mprotect", "munmap")):
        return OutOfMemoryError, "the kernel has no memory left for it; free some or ask for less"
    count, limit = _mapping_counts()
    if limit and count >= limit - 64:  # other threads' mappings come and go while we count
        return AddressSpaceError, (
            f"this process holds {count} mappings and the limit is {limit}; use fewer and larger chunks, or raise "
            f"sysctl vm.max_map_count"
        )
    if call.startswith("munmap"):
        return AddressSpaceError, (
            f"giving up a part of a mapping makes two of it, and the kernel had no memory to note that; this process "
            f"holds {count} mappings. Try again, or give up whole ranges"
        )
    return AddressSpaceError, (
        "no such range of addresses is left; ask for less, or raise RLIMIT_AS (ulimit -v) if it is set"
    )


def _limit(name: str) -> int:
    import resource  # only ever needed on the way to an error

    return resource.getrlimit(getattr(resource, name))[0]


def _mapping_counts() -> tuple[int, int]:
    try:
        with open("/proc/self/maps", "rb") as maps:
            count = sum(1 for _ in maps)
        with open("/proc/sys/vm/max_map_count", "rb") as limit:
            return count, int(limit.read())
    except (OSError, ValueError):
        return 0, 0
