"""Memory that nobody can write any more: ``F_SEAL_WRITE``, and what has to go before the kernel grants it.

The kernel refuses it with ``EBUSY`` while anything could still write: a shared mapping, in any process, made from a
descriptor with the right to write, or a page that is pinned. So this process's own mappings go first: each is mapped
anew, at the same address and without a gap for readers, by a descriptor for reading; that is undone if it is refused.
"""

from __future__ import annotations

import errno
import fcntl
import time

from ..errors import AccessDeniedError, BusyError
from ..open_files import is_read_only
from ..spec import Access
from . import libc
from .addresses import HostBooks, map_anew
from .books import Mapping, Memory
from .memfds import reading

# Seconds to retry. The temporary obstacles are a forked process that has not called exec yet, another thread that is
# mapping the memory, and a page in use by a system call; for each of the last kind the kernel itself waits 0.15 s.
PATIENCE = 1.0
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.05  # seconds between two attempts


def seal(call: str, memory: Memory, books: HostBooks) -> None:
    """Seal a memory against writing, this process's own mappings of it included. Idempotent. Raises BusyError, with
    nothing changed, if something else can write to it, and AccessDeniedError if the descriptor may not set seals."""
    # First without: where the seal may not be set at all, or is there, no mapping is touched.
    fd = memory.fd()  # a user of the memory, our caller's handle, keeps it open
    code = _add(fd)
    if code == errno.EPERM and not is_read_only(fd):
        raise AccessDeniedError(
            f"{call}: its descriptor is read-only or its set of seals is closed; only who may write to the memory can "
            f"seal it"
        )
    if code not in (0, errno.EPERM, errno.EBUSY):
        raise libc.failure(call, code)
    if not _open(memory, books) and code != errno.EBUSY:
        return
    taken: list[tuple[Mapping, Access]] = []
    with reading(fd) as reader:
        try:
            deadline, pause = 0.0, _FIRST_PAUSE
            while True:
                for mapping in _open(memory, books):
                    with books.turns((mapping,)) as is_there:
                        if is_there and not mapping.is_final:
                            taken.append((mapping, mapping.access))
                            map_anew(mapping, reader, min(mapping.access, Access.READ))
                            mapping.is_final = True
                code = _add(fd)
                if not code or is_read_only(fd):
                    return
                if code != errno.EBUSY:
                    raise libc.failure(call, code)
                now = time.monotonic()
                deadline = deadline or now + PATIENCE
                if now > deadline:
                    raise BusyError(
                        f"{call}: the kernel does not make this memory read-only (EBUSY), since something else can "
                        f"still write to it: another process that has it mapped, such as a forked child or one that it "
                        f"was sent to, a mapping made from its descriptor without vram, or pages that are pinned for a "
                        f"device (cudaHostRegister, RDMA, io_uring). End those (what was sent over a channel stays "
                        f"mapped until that end of it is closed, over a queue until that process ends), or share a "
                        f"copy of it (vram.copy), or share it with writable=True; nothing has changed"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE)
        except BaseException:
            if not is_read_only(fd):
                for mapping, before in taken:
                    with books.turns((mapping,)) as is_there:
                        if is_there and mapping.is_final:
                            lessened = mapping.access < min(before, Access.READ)  # by another thread meanwhile
                            map_anew(mapping, memory.fd(), mapping.access if lessened else before)
                            mapping.is_final = False
            raise


def _open(memory: Memory, books: HostBooks) -> list[Mapping]:
    """Return the mappings of a memory here that could be made writable."""
    if memory.identity is None:
        ours = [user for user in list(memory.users) if isinstance(user, Mapping)]
    else:
        ours = [m for m in list(books.mappings.values()) if m.memory.identity == memory.identity]
    return [mapping for mapping in ours if not mapping.private and not mapping.is_final]


def _add(fd: int) -> int:
    """Ask for the seal, and return 0 or the kernel's answer."""
    try:
        fcntl.fcntl(fd, libc.F_ADD_SEALS, libc.F_SEAL_WRITE)
    except OSError as error:
        return error.errno or errno.EIO
    return 0
