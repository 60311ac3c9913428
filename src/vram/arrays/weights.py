"""safetensors files straight into a region: one stream from the page cache to shared memory, one copy.

A file is a length (8 bytes), a header (JSON) and the tensors' bytes without gaps. :func:`plan` reads and checks the
header; :func:`fill` moves the rest into a region, and :func:`load` makes arrays of it. The data section becomes the
beginning of the region as it is; only what is misaligned for its type in the file is moved behind, so that every array
can be used where it lies.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from ..driver.protocol import Driver
from ..errors import MissingFileError, RangeError, ReadOnlyError, UnreadableFileError, UsageError
from ..lifetime import uninterrupted, unwinding
from ..memory import Region
from ..spec import Access, Location, round_up
from .array import Array
from .dtypes import dtype_of
from .file_copy import changed, copy_file
from .shapes import nbytes_of
from .views import close_when_unused

if TYPE_CHECKING:
    import numpy as np

__all__ = ["TensorPlan", "WeightsPlan", "fill", "load", "plan"]

_MOST_HEADER = 100_000_000  # bytes; the format's own limit
_ALIGNMENT = 64  # bytes, of what has to be moved

_DTYPES = {
    "BOOL": "bool",
    **{
        f"{letter}{bits}": f"{word}{bits}" for letter, word in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
    },
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E3M4": "float8_e3m4",
    "F8_E4M3": "float8_e4m3fn",  # the format means the OCP type, as torch does
    "F8_E4M3FN": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_PACKED = ("F4", "F6_E2M3", "F6_E3M2")
_OTHER_FORMATS = {
    b"PK\x03\x04": "a zip archive, as torch.save and numpy.savez write; convert it with safetensors.torch.save_file",
    b"\x80\x02": "a pickle; convert it with safetensors.torch.save_file",
    b"version ": "a Git LFS pointer, not the file it stands for; run git lfs pull",
    b"GGUF": "a GGUF file",
    b"\x93NUMPY": "a .npy file; publish numpy.load(...) instead",
    b"\x89HDF": "an HDF5 file",
}

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Header(msgspec.Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=32)]
    data_offsets: tuple[_Number, _Number]


class TensorPlan(NamedTuple):  # there are thousands in a file: a dataclass takes three times as long
    """One tensor: its type and shape, and where its bytes will be in the region."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """A checked file.

    Attributes
    ----------
    path : str
        The file.
    tensors : dict of str to TensorPlan
        By name, in the order of the file.
    meta : dict of str to str
        The file's ``__metadata__``.
    nbytes : int
        Bytes of region that it takes.
    runs : tuple of (int, int, int)
        What to copy: from where in the file, to where in the region, how many bytes.
    stamp : tuple of int
        Which state of which file was checked.
    """

    path: str
    tensors: dict[str, TensorPlan]
    meta: dict[str, str]
    nbytes: int
    runs: tuple[tuple[int, int, int], ...]
    stamp: tuple[int, ...]


def plan(path: str | os.PathLike[str]) -> WeightsPlan:
    """Read and check the header of a safetensors file.

    It is read twice: by the safetensors library, so that what others refuse is refused here, and by us, who believe
    no offset.

    Raises
    ------
    MissingFileError, UnreadableFileError
        If there is no such file, or it may not be read.
    UsageError
        If it is no safetensors file, is damaged, or holds a type that numpy and `ml_dtypes` cannot show.
    RangeError
        If it is shorter than its header says.
    """
    name = _path(path)
    with _opened(name) as fd:
        return _plan(name, fd)


def fill(what: WeightsPlan, region: Region) -> None:
    """Copy the tensors of a planned file into a region, from its beginning.

    Raises
    ------
    RangeError
        If the region is smaller than the plan's `nbytes`, or the file than its header says.
    ReadOnlyError
        If the region is read-only.
    UsageError
        If the file changed since it was planned, or while it was read.

    The others are those of :func:`plan`.
    """
    if region.nbytes < what.nbytes:
        raise RangeError(f"{what.path!r} takes {what.nbytes} bytes; the region has {region.nbytes}: grow it first")
    if region.access is not Access.READ_WRITE:
        raise ReadOnlyError(f"weights cannot be loaded into {region!r}: it is read-only")
    with _opened(what.path) as fd:
        _check_unchanged(what, fd)
        for start, offset, nbytes in what.runs:
            copy_file(fd, what.path, start, region, offset, nbytes)
        _check_unchanged(what, fd)


def load(path: str | os.PathLike[str] | WeightsPlan, driver: Driver, location: Location | str) -> dict[str, Array]:
    """Load a safetensors file into shared memory, ready to be published without a further copy.

    Parameters
    ----------
    path : str, path or WeightsPlan
        The file, or what :func:`plan` made of it.
    driver : Driver
        The driver that serves `location`.

    Returns
    -------
    dict of str to Array
        In the order of the file, all on one new region of one chunk, which lives as long as they and their views.

    Raises
    ------
    UsageError
        If the file changed while it was read. Nothing is left behind then.
    OutOfMemoryError
        If there is not enough memory.

    The others are those of :func:`plan`.
    """
    what = path if isinstance(path, WeightsPlan) else plan(path)
    region = Region.create(location, driver=driver, capacity=max(what.nbytes, 1), nbytes=what.nbytes, managed=True)
    try:
        fill(what, region)
        arrays = {
            key: Array(region, tensor.dtype, tensor.shape, offset=tensor.offset) for key, tensor in what.tensors.items()
        }
    except BaseException as error:
        with unwinding(error):
            region.close()
        raise
    close_when_unused(region)
    return arrays


# -- the header -------------------------------------------------------------------------------------------------
def _plan(path: str, fd: int) -> WeightsPlan:
    before = _stamp(fd)
    size = os.fstat(fd).st_size
    start = os.pread(fd, 8, 0)
    _check_format(path, start, size)
    length = int.from_bytes(start, "little")
    if length > _MOST_HEADER or length < 2:
        raise UsageError(
            f"{path!r} is not a safetensors file: its first 8 bytes announce a header of {length} bytes "
            f"(2 to {_MOST_HEADER} are possible)"
        )
    if 8 + length > size:
        raise RangeError(
            f"{path!r} is truncated, or not a safetensors file: its header alone should have {length} bytes, the "
            f"whole file has {size}; fetch it again"
        )
    header = os.pread(fd, length, 8)
    if len(header) < length:
        raise changed(path)
    tensors, meta = _parse(path, header)
    entries = sorted(tensors.items(), key=lambda item: item[1].data_offsets)
    _check_offsets(path, entries, 8 + length, size)
    _check_with_library(path, start + header, size)
    placed, runs, nbytes = _lay_out(path, entries, 8 + length)
    found = WeightsPlan(path, placed, meta, nbytes, runs, before)
    _check_unchanged(found, fd)
    return found


def _check_format(path: str, start: bytes, size: int) -> None:
    for magic, what in _OTHER_FORMATS.items():
        if start.startswith(magic):
            raise UsageError(f"{path!r} is not a safetensors file but {what}")
    if size < 8:
        raise RangeError(f"{path!r} is truncated, or not a safetensors file: it has {size} bytes; fetch it again")


def _parse(path: str, header: bytes) -> tuple[dict[str, _Header], dict[str, str]]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        meta = msgspec.json.decode(raw.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path!r} is not a safetensors file: its header is no JSON of that form ({error})") from None
    if not raw:
        raise UsageError(f"{path!r} holds no tensors: there is nothing to load")
    tensors = {}
    for name, entry in raw.items():
        try:
            tensors[name] = msgspec.json.decode(entry, type=_Header)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{path!r} is damaged: tensor {name[:200]!r} is described wrongly ({error})") from None
    return tensors, meta


def _check_offsets(path: str, entries: list[tuple[str, _Header]], start: int, size: int) -> None:
    """Check that the tensors follow one another without overlap and end where the file ends."""
    at = 0
    for name, entry in entries:
        begin, end = entry.data_offsets
        try:
            nbytes = nbytes_of(entry.shape, _dtype(path, name, entry))
        except RangeError:
            nbytes = -1  # no array has such lengths, be it an empty one
        if begin > end or end - begin != nbytes:
            wrong = f"of {entry.dtype} {list(entry.shape)} is said to lie at bytes {begin} to {end}, not its size"
        elif begin < at:
            wrong = f"overlaps the one before it: it begins at byte {begin}, that one ends at {at}"
        elif begin > at:
            wrong = f"begins at byte {begin}, but the one before it ends at {at}: bytes are missing"
        else:
            at = end
            continue
        raise RangeError(f"{path!r} is damaged: tensor {name[:200]!r} {wrong}")
    if start + at > size:
        raise RangeError(
            f"{path!r} is truncated: its header speaks of {start + at} bytes, the file has {size}; fetch it again"
        )
    if start + at < size:
        raise RangeError(f"{path!r} is damaged: {size - start - at} bytes follow the last tensor")


def _check_with_library(path: str, beginning: bytes, size: int) -> None:
    import tempfile  # with shutil, random and more: as slow to load as safetensors, and for the same check

    from safetensors import SafetensorError, safe_open

    try:
        # The library maps what it reads, and a file that somebody truncates meanwhile would kill this process
        # (SIGBUS). So it gets the header in a file of our own, as long as the real one and without its data.
        with tempfile.TemporaryFile(prefix="vram-") as copy:
            copy.write(beginning)
            copy.truncate(size)
            copy.flush()
            with safe_open(f"/proc/self/fd/{copy.fileno()}", framework="np"):
                pass
    except (SafetensorError, ValueError) as error:
        raise UsageError(f"{path!r} is refused by the safetensors library: {error}") from None
    except OSError as error:
        raise UsageError(f"{path!r} cannot be read by the safetensors library: {error}") from None


def _dtype(path: str, name: str, entry: _Header) -> np.dtype[Any]:
    known = _known(entry.dtype) if entry.dtype in _DTYPES else None
    if known is not None:
        return known
    why = "packs several elements into a byte" if entry.dtype in _PACKED else "is not known to this version"
    raise UsageError(f"tensor {name[:200]!r} in {path!r} is of type {entry.dtype[:32]!r}, which {why}")


@functools.cache
def _known(word: str) -> np.dtype[Any] | None:
    with contextlib.suppress(UsageError):  # ml_dtypes may be too old for it
        return dtype_of(_DTYPES[word])
    return None


def _lay_out(
    path: str, entries: list[tuple[str, _Header]], start: int
) -> tuple[dict[str, TensorPlan], tuple[tuple[int, int, int], ...], int]:
    """Place the tensors in the file's order; begin a new run where one would be misaligned."""
    placed: dict[str, TensorPlan] = {}
    runs: list[tuple[int, int, int]] = []
    first = shift = 0  # the run's begin in the data section; region offset minus file offset
    end = 0
    for name, entry in entries:
        begin, end_here = entry.data_offsets
        dtype = _dtype(path, name, entry)
        if (begin + shift) % dtype.alignment and begin < end_here:
            if begin > first:
                runs.append((start + first, first + shift, begin - first))
            first, shift = begin, round_up(begin + shift, _ALIGNMENT) - begin
        offset = begin + shift if begin < end_here else round_up(begin + shift, dtype.alignment)
        placed[name] = TensorPlan(dtype, entry.shape, offset, end_here - begin)
        end = max(end, end_here)
    if end > first:
        runs.append((start + first, first + shift, end - first))
    return placed, tuple(runs), max((t.offset + t.nbytes for t in placed.values()), default=0)


# -- the file ---------------------------------------------------------------------------------------------------
def _path(path: str | os.PathLike[str]) -> str:
    try:
        return os.fsdecode(os.fspath(path))
    except TypeError:
        raise UsageError(f"path must be a string or a path, not {path!r}") from None


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        # O_NONBLOCK: a FIFO must not make us wait.
        fd = uninterrupted(os.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MissingFileError(f"there is no file {path!r}; check the path") from None
    except PermissionError:
        raise UnreadableFileError(
            f"{path!r} may not be read by this user; change its mode, or run as its owner"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path!r} cannot be opened: {error}") from None
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            inside = sorted(name for name in os.listdir(fd) if name.endswith(".safetensors"))
            hint = f"; it holds {', '.join(inside[:3])}" if inside else ""
            raise UsageError(f"{path!r} is a directory; name a .safetensors file{hint}")
        if not stat.S_ISREG(mode):
            raise UsageError(f"{path!r} is not a regular file; save it to disk first")
        yield fd
    finally:
        os.close(fd)


def _stamp(fd: int) -> tuple[int, ...]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _check_unchanged(what: WeightsPlan, fd: int) -> None:
    if _stamp(fd) != what.stamp:
        raise changed(what.path)
