"""The descriptors that a keeper accepts: memory that nobody can shrink or rewrite under its readers, and no other.

That is sealed memfds, and descriptors of NVIDIA's driver.
"""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ProtocolError, UnsupportedError
from ..open_files import (
    F_GET_SEALS,
    F_SEAL_FUTURE_WRITE,
    F_SEAL_GROW,
    F_SEAL_SHRINK,
    F_SEAL_WRITE,
    is_gpu,
)
from ..spec import HandleKind, round_up

if TYPE_CHECKING:
    from .messages import Publish

_WORDS = 4096  # bytes of the page in which a reader says that it reads
_ZEROS = bytes(_WORDS)
_ONES = int.from_bytes((b"\1" + bytes(7)) * (_WORDS // 8), "little")  # each word is 1
_LARGEST = 2**63 - 1  # that a message can carry
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Found(NamedTuple):
    """The memory of one part of a publication: bytes as they count, the pieces that other versions may share, and how
    many of the bytes are in those."""

    nbytes: int
    pieces: dict[int, int]
    known: int


class InadmissibleError(ProtocolError):
    """Well-formed words about memory that is not taken: costs the publication, not the connection."""


def admit(fd: int, size: int, *, kind: int, device: str, writable: bool, what: str, updatable: bool = False) -> int:
    """Check a lent descriptor that a stranger sent, without mapping it, and return how many bytes it may come to take.
    Host memory is a memfd of sealed size, sealed against writing unless `writable`; if `updatable`, F_SEAL_FUTURE_WRITE
    is enough. Of a GPU's descriptor only the driver is known: nothing seals it, and its size is the stated one."""
    if kind != HandleKind.POSIX_FD:
        raise UnsupportedError(
            f"{what} on {device!r}", "memory behind a descriptor (kind 1)", f"kind {kind}", "Copy it to the host"
        )
    if device.startswith("GPU-"):
        return _admit_gpu(fd, size, what)
    if device != "host":
        raise InadmissibleError(f'{what} is said to be on {device[:64]!r}, which is neither "host" nor a GPU\'s UUID')
    try:
        # The seals first: fstat asks the file system, and one in user space may never answer.
        seals = fcntl.fcntl(fd, F_GET_SEALS)
        found = os.fstat(fd)
    except OSError:  # EINVAL: not memory that can be sealed; EBADF: a descriptor of a path only
        raise InadmissibleError(f"{what} is not a memfd") from None
    if not stat.S_ISREG(found.st_mode):
        raise InadmissibleError(f"{what} is not a memfd")
    if seals & (F_SEAL_SHRINK | F_SEAL_GROW) != F_SEAL_SHRINK | F_SEAL_GROW:
        raise InadmissibleError(f"{what} is not sealed against shrinking and growing: its owner could end its readers")
    if found.st_size < size:
        raise InadmissibleError(f"{what} has {found.st_size} bytes; {size} were stated")
    mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    if writable:
        if mode != os.O_RDWR:
            raise InadmissibleError(f"{what} of a writable version is not open for reading and writing")
    elif not seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE if updatable else F_SEAL_WRITE):
        raise InadmissibleError(f"{what} of a read-only version {_not_read_only(seals)}")
    elif mode == os.O_WRONLY:
        raise InadmissibleError(f"{what} is not open for reading")
    return _counted(fd, found, what)


def piece_of(fd: int) -> int | None:
    """Return the inode number of admitted memory, which all its descriptors share; None for memory of a GPU.
    All memfds are of one file system, and a number is not used again while the memory is open."""
    found = os.fstat(fd)
    return found.st_ino if stat.S_ISREG(found.st_mode) else None


def look_at(request: Publish, offset: int, fds: list[int]) -> Found:
    """Look at one part of the descriptors of a publication, and take nothing; raises what :func:`admit` raises."""
    pieces: dict[int, int] = {}
    nbytes = known = 0
    for index, fd in enumerate(fds, start=offset - request.manifest_fd):
        if index < 0:
            size = admit(fd, 1, kind=1, device="host", writable=False, what="the manifest")
        else:
            piece = request.segments[index]
            device = request.devices[piece.device]
            size = admit(
                fd,
                piece.size,
                kind=piece.kind,
                device=device,
                writable=request.writable,
                what=f"segment {index}",
                updatable=request.updatable,
            )
        nbytes += size
        number = piece_of(fd)
        if number is not None:
            known += size
            pieces[number] = max(size, pieces.get(number, 0))
    return Found(nbytes, pieces, known)


def admit_page(fd: int, what: str) -> int:
    """Check the page of words of a reader, as :func:`admit` does, and that it is a page; return its bytes."""
    nbytes = admit(fd, _WORDS, kind=HandleKind.POSIX_FD, device="host", writable=False, what=what, updatable=True)
    if os.fstat(fd).st_size != _WORDS:
        raise InadmissibleError(f"{what} has {os.fstat(fd).st_size} bytes; it must have {_WORDS}")
    return nbytes


def is_zero(fd: int, but: int = 0) -> bool:
    """Whether all words of an admitted page are 0 or `but`. The page is read, not mapped: there may be thousands.
    A page that cannot be read counts as not zero: it is swapped out, and its owner's cgroup has no room for it."""
    try:
        words = os.pread(fd, _WORDS, 0)
    except OSError:
        return False
    if words == _ZEROS or not but:
        return words == _ZEROS
    # All words as one number: looking at one after the other takes as long as some fifty pages.
    return not int.from_bytes(words, "little") & ~(_ONES * but)


def first_word(fd: int) -> int:
    """Return the first word, 63 bits, of an admitted page, which a stranger writes; 1 if the page cannot be read.
    1 says that its owner is done with nothing, so the owner is waited for like a stopped process."""
    try:
        return int.from_bytes(os.pread(fd, 8, 0), "little") & _LARGEST
    except OSError:
        return 1


def _not_read_only(seals: int) -> str:
    if seals & F_SEAL_FUTURE_WRITE:
        return (
            "is sealed with F_SEAL_FUTURE_WRITE only: who mapped it before can still write to it. It takes "
            "F_SEAL_WRITE: publish it by vram.publish, or with writable=True"
        )
    return "is not sealed against writing (F_SEAL_WRITE)"


def _counted(fd: int, found: os.stat_result, what: str) -> int:
    """Return the bytes that a memfd counts: its pages, also those that nobody has touched yet."""
    # A sealed file is memory: the kernel answers this, and no file system in user space. A block of tmpfs is a page,
    # and a block of a pool of huge pages is a huge page.
    if os.fstatvfs(fd).f_bsize != _PAGE:
        raise InadmissibleError(
            f"{what} is of a limited pool of huge pages (MFD_HUGETLB): a reader that finds the pool empty would be "
            f"killed. Make it without that flag; the kernel gives ordinary memfds huge pages where "
            f"/sys/kernel/mm/transparent_hugepage/shmem_enabled says so"
        )
    return round_up(found.st_size, _PAGE)


def _admit_gpu(fd: int, size: int, what: str) -> int:
    """Check a descriptor that is said to be memory of a GPU: a device file of NVIDIA's driver."""
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        seals = None
    if seals is not None:
        # A memfd harms nobody whatever is said of it; the driver that our own tests run on shares its memory so.
        if seals & (F_SEAL_SHRINK | F_SEAL_GROW) != F_SEAL_SHRINK | F_SEAL_GROW:
            raise InadmissibleError(f"{what} is not sealed against shrinking and growing")
        found = os.fstat(fd)
        if found.st_size < size:
            raise InadmissibleError(f"{what} has {found.st_size} bytes; {size} were stated")
        return _counted(fd, found, what)
    try:
        found_gpu = is_gpu(fd)
    except OSError:  # a descriptor of a path only
        found_gpu = False
    if not found_gpu:
        raise InadmissibleError(f"{what} is no memory of a GPU: it is not a descriptor of NVIDIA's driver")
    return size
