"""safetensors files made of arrays in regions: written under another name, flushed, and put in place in one step."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from secrets import token_hex
from typing import NamedTuple

import msgspec

from ..errors import BackupError, UsageError
from ..memory import Region
from .dtypes import dtype_of
from .file_copy import write_files
from .weights import INDEX, WORDS

_ALIGNMENT = 64  # bytes, of where the data section begins


class Tensor(NamedTuple):
    """A tensor to be written: the name of its type and its shape, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    region: Region
    offset: int
    nbytes: int


def write(path: str, tensors: Mapping[str, Tensor], meta: Mapping[str, str], most: int) -> tuple[str, ...]:
    """Write tensors to a file that ends with ``.safetensors``, or to a folder: as one file, or several with an index,
    of `most` bytes at most or one tensor. Return the paths. BackupError says that there is no room."""
    # By size of their elements, so that each is aligned though there are no gaps.
    names = sorted(tensors, key=lambda name: (-dtype_of(tensors[name].dtype).alignment, name))
    if path.endswith(".safetensors"):
        with _in_place(path) as fd:
            _write_one(fd, path, {name: tensors[name] for name in names}, meta)
        _flush(os.path.dirname(path) or ".")
        return (path,)
    return _write_folder(
        path, [{name: tensors[name] for name in shard} for shard in _shards(names, tensors, most)], meta
    )


def _shards(names: Sequence[str], tensors: Mapping[str, Tensor], most: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    room = most
    for name in names:
        nbytes = tensors[name].nbytes
        if nbytes > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= nbytes
    return shards


def _write_folder(folder: str, shards: Sequence[Mapping[str, Tensor]], meta: Mapping[str, str]) -> tuple[str, ...]:
    """Write shards, then the index, which is what readers go by: before it is there the folder is as it was."""
    with _failing(folder):
        os.makedirs(folder, exist_ok=True)
    index, whole = os.path.join(folder, f"model{INDEX}"), os.path.join(folder, "model.safetensors")
    before = _of_index(index)
    if len(shards) == 1:
        with _in_place(whole) as fd:
            _write_one(fd, whole, shards[0], meta)
        stale, made = [index, *before], [whole]
    else:
        save, made = token_hex(4), []
        for number, shard in enumerate(shards, 1):
            made.append(os.path.join(folder, f"model-{save}-{number:05}-of-{len(shards):05}.safetensors"))
            with _in_place(made[-1]) as fd:
                _write_one(fd, made[-1], shard, meta)
        weights = {name: os.path.basename(file) for file, shard in zip(made, shards, strict=True) for name in shard}
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        with _in_place(index) as fd, _failing(index):
            os.write(fd, msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": weights}))
        stale, made = [whole, *before], [*made, index]
    _flush(folder)
    for file in stale:
        with contextlib.suppress(OSError):
            os.unlink(file)
    return tuple(made)


def _of_index(index: str) -> list[str]:
    """Return the files that an index which is there names, of this folder."""
    try:
        with open(index, "rb") as file:
            found = msgspec.json.decode(file.read(), type=dict[str, msgspec.Raw])
        files = msgspec.json.decode(found["weight_map"], type=dict[str, str]).values()
    except (OSError, KeyError, msgspec.MsgspecError):
        return []
    return [os.path.join(os.path.dirname(index), file) for file in set(files) if os.path.basename(file) == file]


def _write_one(fd: int, path: str, tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> None:
    header: dict[str, object] = {"__metadata__": dict(meta)}
    at = 0
    for name, one in tensors.items():
        word, packed = WORDS[one.dtype]
        shape = (*one.shape[:-1], one.shape[-1] * 8 // packed) if packed else one.shape
        header[name] = {"dtype": word, "shape": shape, "data_offsets": (at, at + one.nbytes)}
        at += one.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with _failing(path):
        os.posix_fallocate(fd, 0, 8 + len(text) + at)
        os.write(fd, len(text).to_bytes(8, "little") + text)
        start = 8 + len(text)
        writes: dict[Region, list[tuple[int, int, int, int]]] = {}
        for one in tensors.values():
            if one.nbytes:
                writes.setdefault(one.region, []).append((one.offset, fd, start, one.nbytes))
            start += one.nbytes
        for region, of_region in writes.items():
            write_files(of_region, region)


@contextlib.contextmanager
def _in_place(path: str) -> Iterator[int]:
    """Lend a new file, which takes this name at the end of the block, once its bytes are on the disk."""
    made = f"{path}.{token_hex(4)}.part"
    with _failing(path):
        fd = os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        yield fd
        with _failing(path):
            os.fsync(fd)
            os.rename(made, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise
    finally:
        os.close(fd)


def _flush(folder: str) -> None:
    """Have the names in a folder on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _failing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, "?")
        raise BackupError(f"{path!r} cannot be written: {os.strerror(error.errno or 0)} ({name})") from error


def check_types(dtypes: Mapping[str, str]) -> None:
    """Raise UsageError for the name of an array whose type the format does not have."""
    for name, dtype in dtypes.items():
        if dtype not in WORDS:
            raise UsageError(
                f"array {name!r:.80} is of type {dtype}, which safetensors does not have; it has {', '.join(WORDS)}"
            )
