"""safetensors files made of arrays in regions: written under another name, flushed, and put in place in one step."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from secrets import token_hex
from typing import NamedTuple

import msgspec

from ..errors import BackupError, BusyError, UsageError
from ..memory import Region
from .dtypes import dtype_of
from .file_copy import write_files
from .weights import INDEX, WORDS

_ALIGNMENT = 64  # bytes, of where the data section begins
_SHARD = re.compile(r"model-(?:[0-9a-f]{8}-)?\d{5}-of-\d{5}\.safetensors")  # of a model that is replaced
_PART = re.compile(r"model[-\w.]*\.safetensors(?:\.index\.json)?\.[0-9a-f]{8}\.part")  # of a save that was killed


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
        flush(os.path.dirname(os.path.realpath(path)))  # of the file, where this is a link to it
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
    """Write all files, then give them their names. Readers go by the index, or by ``model.safetensors`` where there is
    none, and pass over shards that no index names: so one rename is what makes the folder another one."""
    import fcntl  # not on every system where this module is imported

    with _failing(folder):
        os.makedirs(folder, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{folder!r}: another process, or thread, is saving into it") from None
        _check_folder(folder)
        return _write_locked(folder, shards, meta, lock)
    finally:
        os.close(lock)


def _write_locked(
    folder: str, shards: Sequence[Mapping[str, Tensor]], meta: Mapping[str, str], lock: int
) -> tuple[str, ...]:
    index, whole = os.path.join(folder, f"model{INDEX}"), os.path.join(folder, "model.safetensors")
    save, made = token_hex(4), [whole]
    if len(shards) > 1:
        count = len(shards)
        made = [os.path.join(folder, f"model-{save}-{n:05}-of-{count:05}.safetensors") for n in range(1, count + 1)]
    with contextlib.ExitStack() as opened:
        for file, shard in zip(made, shards, strict=True):
            _write_one(opened.enter_context(_in_place(file)), file, shard, meta)
        if len(shards) > 1:
            weights = {name: os.path.basename(file) for file, shard in zip(made, shards, strict=True) for name in shard}
            total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
            text = msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": weights})
            opened.pop_all().close()  # shards first: the index names them
            made.append(index)
            with _in_place(index) as fd, _failing(index):
                os.write(fd, text)
    with _failing(folder):
        os.fsync(lock)
    remove_model(folder, but=tuple(map(os.path.basename, made)))
    return tuple(made)


def remove_model(folder: str, *, but: Sequence[str] = ()) -> None:
    """Remove what was saved into a folder, but for some of its files. Others stay, and what cannot be removed."""
    stale = {one for one in os.listdir(folder) if _SHARD.fullmatch(one) or _PART.fullmatch(one)}
    stale |= {"model.safetensors", f"model{INDEX}"}
    for one in sorted(stale.difference(but), reverse=True):  # the index before its shards
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(folder, one))


def _check_folder(folder: str) -> None:
    """Raise UsageError for files that readers of the folder would take for parts of what is saved."""
    for one in os.listdir(folder):
        is_ours = one in ("model.safetensors", f"model{INDEX}") or _SHARD.fullmatch(one)
        if one.endswith((".safetensors", INDEX)) and not is_ours:
            raise UsageError(
                f"{folder!r} has {one!r}, which its readers would take for a part: save into a folder without it"
            )


def _write_one(fd: int, path: str, tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> None:
    header: dict[str, object] = {"__metadata__": dict(meta)}
    at = 0
    for name, one in tensors.items():
        word, packed = WORDS[one.dtype]
        shape: tuple[int, ...] = (*one.shape[:-1], one.shape[-1] * 8 // packed) if packed else one.shape
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
    path = os.path.realpath(path)  # what a link stands for is replaced, and not the link
    made = f"{path}.{token_hex(4)}.part"
    with _failing(path):
        fd = os.open(made, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(FileNotFoundError):  # whoever could not read it before cannot now
            os.fchmod(fd, stat.S_IMODE(os.stat(path).st_mode))
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


def flush(folder: str) -> None:
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


def check(tensors: Mapping[str, Tensor]) -> None:
    """Raise UsageError for an array that the format does not have, by its name, type or shape."""
    for name, one in tensors.items():
        if name == "__metadata__":
            raise UsageError("an array is called '__metadata__', which safetensors has for something else; rename it")
        word, packed = WORDS.get(one.dtype, ("", 0))
        if not word:
            raise UsageError(
                f"array {name!r:.80} is of type {one.dtype}, which safetensors does not have; it has {', '.join(WORDS)}"
            )
        if packed and (not one.shape or one.shape[-1] * 8 % packed):
            raise UsageError(
                f"array {name!r:.80} of {one.dtype} {one.shape} has no whole number of elements in its last dimension"
            )
