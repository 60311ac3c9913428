"""Pages of words that two processes share, each written by one of them, and the barrier between them.

``F_SEAL_FUTURE_WRITE`` leaves a page's maker the only writable mapping. Words are aligned, of 8 bytes, and never torn.
The barrier (``membarrier(2)``) is one-sided: readers need none. Where loads come in the opposite order of stores,
:func:`fence` is enough on x86-64. Waiters sleep in ``futex(2)``, which takes no right to write.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import sys
import time

from ..errors import ProtocolError, UnsupportedError
from ..open_files import is_guarded
from . import libc, memfds

PAGE = 4096  # bytes, of which each word has 8
_GUARDS = libc.F_SEAL_WRITE | libc.F_SEAL_FUTURE_WRITE
# <linux/membarrier.h>, and the number of the system call, which the C library does not wrap
_GLOBAL_EXPEDITED, _REGISTER_GLOBAL_EXPEDITED = 1 << 1, 1 << 2
_CALL = {"x86_64": 324, "aarch64": 283}.get(platform.machine(), -1)

_IS_ORDERED = platform.machine() == "x86_64"

_syscall = libc._library.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_uint, ctypes.c_int]

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1) if sys.byteorder == "little" else -1
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 2**31 - 1
_POLL = 0.001  # seconds between two looks, where there is no such call
_futex = libc._library["syscall"]  # another object than the one above, since its arguments are others
_futex.restype = ctypes.c_long
_futex.argtypes = [
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
]  # fmt: skip
_Timespec = ctypes.c_long * 2


def make(fds: list[int]) -> memoryview:
    """Make a page of zeros and return its words, which only this process can ever write.
    The descriptor is appended to `fds`; the caller closes it."""
    fds.append(memfds.make(PAGE))
    found = words(fds[-1], writable=True)
    guard(fds[-1])
    return found


def words(fd: int, *, writable: bool = False) -> memoryview:
    """Map a page and return its words. The mapping lasts as long as they do; `fd` is lent."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    try:
        return memoryview(mmap.mmap(fd, PAGE, mmap.MAP_SHARED, protection)).cast("Q")
    except OSError as error:
        raise libc.failure(f"mmap of a page of shared words, descriptor {fd}", error.errno) from None


def check(fd: int, whose: str) -> None:
    """Raise :class:`ProtocolError` unless this is a page that nobody can cut, and that only its maker can write."""
    _, seals = memfds.check(whose, fd, PAGE, PAGE)
    if not seals & _GUARDS or os.fstat(fd).st_size != PAGE:
        raise ProtocolError(f"{whose} has seals {seals:#x}; a page of words has 4096 bytes that others cannot write")


def guard(fd: int) -> None:
    """Keep everybody from mapping a memory writable or writing to its file from now on; mappings stay as they are."""
    try:
        fcntl.fcntl(fd, libc.F_ADD_SEALS, libc.F_SEAL_FUTURE_WRITE)
    except OSError as error:
        if not is_guarded(fd):
            raise libc.failure("F_ADD_SEALS with F_SEAL_FUTURE_WRITE", error.errno) from None


def register() -> None:
    """Have this process take part in the barriers of others; once, and again after exec or fork. Idempotent.
    Raises UnsupportedError if the kernel has no such barrier, or a filter of system calls forbids it."""
    _membarrier(_REGISTER_GLOBAL_EXPEDITED)


def barrier() -> None:
    """Have every running thread of every registered process execute a full memory barrier, and this thread too.
    Raises UnsupportedError, as :func:`register` does."""
    _membarrier(_GLOBAL_EXPEDITED)


def fence() -> None:
    """Have all see this thread's stores so far, and loads by others that preceded a store that it has seen, before its
    later stores, if they load in the opposite order. Its later loads also follow its stores. Two threads that store and
    then look at each other's word each need this in between, or one needs :func:`barrier`."""
    if _IS_ORDERED:
        # A locked instruction, behind which also those stores are done that the processor may put off (movnt).
        _thread.allocate_lock().acquire(False)
    else:
        barrier()


def _membarrier(command: int) -> None:
    if _CALL < 0 or _syscall(_CALL, command, 0, 0):
        code = errno.ENOSYS if _CALL < 0 else ctypes.get_errno()
        raise UnsupportedError(
            "updating published arrays in place",
            "membarrier(2) with GLOBAL_EXPEDITED (Linux 4.16, x86-64 or AArch64)",
            f"{platform.machine()}, {errno.errorcode.get(code, str(code))}: {os.strerror(code)}",
            "Allow the call in the container's seccomp profile, or publish a new version instead",
        )


def address(page: memoryview) -> int:
    """Return the address of the words of a page, good as long as they are."""
    with libc.lent("address", page, writable=False) as start:
        return start


def wait(at: int, index: int, seen: int, seconds: float) -> None:
    """Sleep until a word is no longer `seen`, a wake-up, or the timeout; it may return early, so look at the word.
    `at` is the :func:`address` of the page. Only the lower 32 bits of the word are compared."""
    if _FUTEX < 0:
        time.sleep(min(seconds, _POLL))
        return
    whole = int(seconds)
    span = _Timespec(whole, int((seconds - whole) * 1e9))
    _futex(_FUTEX, at + 8 * index, _FUTEX_WAIT, seen & 0xFFFFFFFF, span, None, 0)


def wake(at: int, index: int) -> None:
    """Wake all who wait for a word, in whatever process."""
    if _FUTEX >= 0:
        _futex(_FUTEX, at + 8 * index, _FUTEX_WAKE, _ALL, None, None, 0)
