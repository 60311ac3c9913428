"""safetensors files straight into a region: one stream from the page cache to shared memory, one copy.

A file is a length (8 bytes), a header (JSON) and the tensors' bytes without gaps. A checkpoint is one file, or several
with an index that says which tensor is in which. :func:`plan` reads and checks the headers; :func:`fill` moves the rest
into a region, and :func:`load` makes arrays of it. The data section of a file is copied as it is; only what is
misaligned for its type in the file is moved behind, so that every array can be used where it lies.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from ..driver.protocol import Driver
from ..errors import MissingFileError, RangeError, ReadOnlyError, UnreadableFileError, UsageError
from ..lifetime import FileDescriptor, unwinding
from ..memory import Region
from ..spec import Access, Location, round_up
from .array import Array
from .dtypes import dtype_of
from .file_copy import changed, copy_files
from .shapes import nbytes_of
from .views import close_when_unused

if TYPE_CHECKING:
    import numpy as np

_MOST_HEADER = 100_000_000  # bytes; the format's own limit
_ALIGNMENT = 64  # bytes, of what has to be moved, and of where a file begins in the region
_MOST_OPEN = 256  # files that are kept open from plan() to fill(); of more, each is opened again
INDEX = ".safetensors.index.json"  # how the name of an index ends
_BATCH = 64  # files that are read at a time
_UNNAMED = re.compile(r"model-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")  # a shard of a save whose index did not come

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

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
# Several elements of these share a byte: of how many bits each is.
_PACKED = {
    "F4": ("float4_e2m1fn_x2", 4),
    "F6_E2M3": ("float6_e2m3fn_packed", 6),
    "F6_E3M2": ("float6_e3m2fn_packed", 6),
}
# By the name of a type: what the format calls it, and of how many bits an element is where several share a byte.
WORDS = {word: (name, 0) for name, word in reversed(_DTYPES.items())}
WORDS |= {word: (name, bits) for name, (word, bits) in _PACKED.items()}
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


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class TensorPlan(NamedTuple):  # there are thousands in a file: a dataclass takes three times as long
    """One tensor: its type and shape, and where its bytes will be in the region."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """A file of a plan; each of `runs` is a file offset, a region offset and bytes. `stamp` is the state that was
    checked. `kept` is the open file, which stays the same if another replaces it at its path."""

    path: str
    runs: tuple[tuple[int, int, int], ...]
    stamp: os.stat_result
    kept: FileDescriptor | None


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    """A checked file, or several, in the order in which they lie in the region, which takes `nbytes` bytes.
    `path` is what the caller named, or the first of several files; `meta` prefers the first of two that differ."""

    path: str
    tensors: dict[str, TensorPlan]
    meta: dict[str, str]
    nbytes: int
    files: tuple[WeightsFile, ...]


def plan(path: Paths) -> WeightsPlan:
    """Read and check the headers of safetensors: a file, the files of an index or a folder, or several. Tensors that an
    index does not name are left out, with a warning. A missing tensor, or one in two files, raises UsageError."""
    given, paths, places = _chosen(path)
    tensors: dict[str, TensorPlan] = {}
    where: dict[str, str] = {}
    meta: dict[str, str] = {}
    files: list[WeightsFile] = []
    left_out: list[str] = []
    at = 0
    for one in paths:
        file = _opened(one)
        header = _header(one, file.fileno())
        counted = header.tensors
        if places is None:
            twice = next((name for name in counted if name in where), None)
            if twice is not None:
                raise UsageError(f"tensor {twice[:200]!r} is in {where[twice]!r} and in {one!r}; leave one of them out")
            where |= dict.fromkeys(counted, one)
        else:
            wanted = places[one]
            missing = next((name for name in wanted if name not in counted), None)
            if missing is not None:
                raise UsageError(f"{given!r} says that tensor {missing[:200]!r} is in {one!r}, which does not have it")
            left_out += [name for name in counted if name not in wanted]
            counted = {name: entry for name, entry in counted.items() if name in wanted}
        at = round_up(at, _ALIGNMENT)
        placed, runs, at = _lay_out(one, counted, header.nbytes, at)
        tensors |= placed
        meta = header.meta | meta
        kept = file if len(files) < _MOST_OPEN else None
        files.append(WeightsFile(one, runs, header.stamp, kept))
        _check_unchanged(files[-1], file.fileno())
        if kept is None:
            file.close()
    if left_out and places is not None:
        known = {name for wanted in places.values() for name in wanted}
        if strays := [name for name in left_out if name not in known]:
            some = ", ".join(repr(name[:200]) for name in strays[:3]) + (", ..." if len(strays) > 3 else "")
            warnings.warn(f"not in {given!r} and left out: {some}", stacklevel=3)
    return WeightsPlan(given, tensors, meta, at, tuple(files))


def fill(what: WeightsPlan, region: Region) -> None:
    """Copy the tensors of a plan into a region, from its beginning. Raises UsageError if a file changed since the plan
    or meanwhile; a kept file that was replaced at its path has not, since the open one is read."""
    if region.nbytes < what.nbytes:
        raise RangeError(f"{what.path!r} takes {what.nbytes} bytes; the region has {region.nbytes}: grow it first")
    if region.access is not Access.READ_WRITE:
        raise ReadOnlyError(f"weights cannot be loaded into {region!r}: it is read-only")
    for first in range(0, len(what.files), _BATCH):
        batch = what.files[first : first + _BATCH]
        opened = [file.kept or _opened(file.path) for file in batch]
        for file, there in zip(batch, opened, strict=True):
            _check_unchanged(file, there.fileno())
        reads = [(there.fileno(), *run) for file, there in zip(batch, opened, strict=True) for run in file.runs]
        paths = {there.fileno(): file.path for file, there in zip(batch, opened, strict=True)}
        copy_files(reads, paths, region)
        for file, there in zip(batch, opened, strict=True):
            _check_unchanged(file, there.fileno())


def load(path: Paths | WeightsPlan, driver: Driver, location: Location | str) -> dict[str, Array]:
    """Load safetensors files (see :func:`plan`) into shared memory, ready to be published without a further copy. All
    arrays are on one new region of one chunk, which lives as long as they and their views."""
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


# -- which files ------------------------------------------------------------------------------------------------------
def _chosen(path: Paths) -> tuple[str, list[str], dict[str, set[str]] | None]:
    """Return what was asked for, the files, and of each which tensors an index says that it has, if there is one."""
    if isinstance(path, Sequence) and not isinstance(path, str | bytes | bytearray):
        found = [path_of(one) for one in path]
        if index := next((one for one in found if one.endswith(".json")), None):
            raise UsageError(f"{index!r} was given among other files: give an index alone, it names its files itself")
        if not found:
            raise UsageError("no file was given: name at least one")
        twice = next((one for at, one in enumerate(found) if one in found[:at]), None)
        if twice is not None:
            raise UsageError(f"{twice!r} was given twice")
        return found[0], found, None
    given = path_of(path)
    index = given if given.endswith(".json") else None
    if os.path.isdir(given):
        try:
            names = sorted(os.listdir(given))
        except OSError as error:
            raise UnreadableFileError(f"the folder {given!r} cannot be read: {error.strerror}") from None
        indices = [name for name in names if name.endswith(INDEX)]
        if len(indices) > 1:
            raise UsageError(f"{given!r} has several checkpoints: name one of {', '.join(indices[:5])}")
        if not indices:
            names = [name for name in names if name.endswith(".safetensors") and not _UNNAMED.fullmatch(name)]
            files = [os.path.join(given, name) for name in names]
            if not files:
                raise MissingFileError(f"there is no .safetensors file in the folder {given!r}")
            return given, files, None
        index = os.path.join(given, indices[0])
    if index is None:
        return given, [given], None
    places = _read_index(index)
    missing = [file for file in places if _is_missing(file)]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MissingFileError(f"{index!r} names {missing[0]!r}{more}, which is not there; fetch it again")
    return index, [*places], places


def _is_missing(path: str) -> bool:
    """Whether there is no such file. Why one that is there cannot be read is said when it is opened."""
    try:
        os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: no path at all
        return isinstance(error, FileNotFoundError | ValueError)
    return False


def _read_index(path: str) -> dict[str, set[str]]:
    """Return the files that an index names, in its order, with the tensors of each."""
    file = _opened(path)
    size = os.fstat(file.fileno()).st_size
    if size > _MOST_HEADER:
        raise UsageError(f"{path!r} is no index of a checkpoint: it has {size} bytes")
    try:
        index = msgspec.json.decode(os.pread(file.fileno(), size, 0), type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path!r} is no index of a checkpoint: it has no weight_map ({error})") from None
    if not index.weight_map:
        raise UsageError(f"{path!r} names no tensors: there is nothing to load")
    places: dict[str, set[str]] = {}
    folder = os.path.dirname(path)
    for tensor, name in index.weight_map.items():
        places.setdefault(os.path.join(folder, name), set()).add(tensor)
    return places


# -- the header -------------------------------------------------------------------------------------------------------
class _File(NamedTuple):
    """The header of a file: its tensors in their order, and how many bytes come before the first."""

    tensors: dict[str, _Header]
    meta: dict[str, str]
    nbytes: int
    stamp: os.stat_result


def _header(path: str, fd: int) -> _File:
    before = os.fstat(fd)
    size = before.st_size
    start = _read_at(path, fd, 8, 0)
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
    header = _read_at(path, fd, length, 8)
    if len(header) < length:
        raise changed(path)
    tensors, meta = _parse(path, header)
    entries = sorted(tensors.items(), key=lambda item: item[1].data_offsets)
    _check_offsets(path, entries, 8 + length, size)
    return _File(dict(entries), meta, 8 + length, before)


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
        nbytes = _nbytes(path, name, entry)
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


def _dtype(path: str, name: str, entry: _Header) -> np.dtype[Any]:
    packed = _PACKED.get(entry.dtype)
    word = _DTYPES.get(entry.dtype) if packed is None else packed[0]
    known = None if word is None else _known(word)
    if known is not None:
        return known
    raise UsageError(
        f"tensor {name[:200]!r} in {path!r} is of type {entry.dtype[:32]!r}, which is not known to this version"
    )


@functools.cache
def _known(word: str) -> np.dtype[Any] | None:
    with contextlib.suppress(UsageError):  # ml_dtypes may be too old for it
        return dtype_of(word)
    return None


def _nbytes(path: str, name: str, entry: _Header) -> int:
    """Return how many bytes a tensor takes; -1 where no array has such lengths, be it an empty one."""
    dtype = _dtype(path, name, entry)
    try:
        nbytes = nbytes_of(entry.shape, dtype)
    except RangeError:
        return -1
    if entry.dtype in _PACKED:
        bits = nbytes * _PACKED[entry.dtype][1]
        return -1 if bits % 8 else bits // 8
    return nbytes


def _shape(entry: _Header, nbytes: int) -> tuple[int, ...]:
    """Return the shape of the array; of a packed type it is that of the bytes, flat where a byte is of two rows."""
    if entry.dtype not in _PACKED:
        return entry.shape
    *rows, last = entry.shape
    bits = last * _PACKED[entry.dtype][1]
    return (nbytes,) if bits % 8 else (*rows, bits // 8)


def _lay_out(
    path: str, entries: dict[str, _Header], start: int, at: int
) -> tuple[dict[str, TensorPlan], tuple[tuple[int, int, int], ...], int]:
    """Place tensors in the file's order from an offset of the region on; begin a new run where one would be misaligned,
    or something is left out. Return also where the last one ends."""
    placed: dict[str, TensorPlan] = {}
    runs: list[tuple[int, int, int]] = []
    first = stop = 0  # of the run, in the data section
    shift = at  # region offset minus file offset
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        dtype = _dtype(path, name, entry)
        offset = begin + shift
        if begin == end:
            offset = round_up(stop + shift, dtype.alignment)
        elif begin != stop or offset % dtype.alignment:
            if stop > first:
                runs.append((start + first, first + shift, stop - first))
            first, offset = begin, round_up(stop + shift, _ALIGNMENT)
            shift = offset - begin
        if begin < end:
            stop = end
        placed[name] = TensorPlan(dtype, _shape(entry, end - begin), offset, end - begin)
    if stop > first:
        runs.append((start + first, first + shift, stop - first))
    return placed, tuple(runs), max((one.offset + one.nbytes for one in placed.values()), default=at)


# -- a file -----------------------------------------------------------------------------------------------------------
def path_of(path: str | os.PathLike[str]) -> str:
    """Return a path as a string."""
    try:
        return os.fsdecode(os.fspath(path))
    except TypeError:
        raise UsageError(f"path must be a string or a path, not {path!r}") from None


def _opened(path: str) -> FileDescriptor:
    """Open a file, which is closed with the object at the latest."""
    try:
        # O_NONBLOCK: a FIFO must not make us wait.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise MissingFileError(f"there is no file {path!r}; check the path") from None
    except PermissionError:
        raise UnreadableFileError(
            f"{path!r} may not be read by this user; change its mode, or run as its owner"
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path!r} cannot be opened: {error}") from None
    file = FileDescriptor.adopt(fd, path)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        file.close()
        raise UsageError(f"{path!r} is not a regular file; save it to disk first")
    return file


def _read_at(path: str, fd: int, nbytes: int, at: int) -> bytes:
    try:
        return os.pread(fd, nbytes, at)
    except OSError as error:
        raise UnreadableFileError(f"{path!r} cannot be read: {error.strerror}") from None


def _check_unchanged(file: WeightsFile, fd: int) -> None:
    before, now = file.stamp, os.fstat(fd)
    same = [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in (before, now)]
    # A replacement at its path takes a link from the file, which changes its inode and none of its bytes.
    if same[0] != same[1] or (before.st_ctime_ns != now.st_ctime_ns and before.st_nlink == now.st_nlink):
        raise changed(file.path)
