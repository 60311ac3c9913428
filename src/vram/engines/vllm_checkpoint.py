"""The files that vLLM reads the weights of a model from: which bytes an entry stands for.

vLLM's ``WeightCacheKey`` hashes the headers of safetensors files, and so is the same for all checkpoints of one shape.
A :class:`Checkpoint` says which files these are and when each of them changed last, or has a digest of their bytes
(S11).
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ..errors import UsageError

# Files beside the weights that say how they are to be read. Those of tokenizers and templates are not among them.
_SETTINGS = ("config.json", "params.json", "adapter_config.json", "modules.json", "*quant*.json", "*.index.json")
_MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of a sentence-transformers model, in folders
_LONGEST = 48  # characters of a label: vram ls shows 60 of what was said about an entry
_digests: dict[tuple[object, ...], str] = {}  # of files that did not change since they were read


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files of a model as they were when they were looked at. `folder` is a real path, which ends with the commit for a
    hub model; a stamp is real path, device, inode, bytes and times (ns); `digest`, if asked for, is of all bytes."""

    model: str
    folder: str
    files: tuple[str, ...]
    stamps: tuple[tuple[object, ...], ...]
    digest: str | None

    def identity(self) -> object:
        """Return what the bytes are known by: the same in each process of this machine."""
        return ["sha256", self.digest] if self.digest else [self.folder, self.stamps]

    def notes(self, architecture: str) -> dict[str, str]:
        """Return what people read in ``vram ls`` and ``vram show``; it follows from the identity alone."""
        if self.digest:
            return {"model": f"{architecture}, sha256 {self.digest[:12]}"}
        label = _label(self.folder)
        return {"model": label} if label == self.folder else {"model": label, "path": self.folder[-200:]}

    def change(self, read: Collection[str]) -> str | None:
        """Say how the files differ from what they are now, or from the files that were `read`; None if they do not."""
        if unknown := sorted(set(read).difference(self.files)):
            return f"the model was also read from {unknown[0]!r}, which its name does not stand for"
        for path, stamp in zip(self.files, self.stamps, strict=True):
            try:
                same = _stamp(path) == stamp
            except OSError as error:
                return f"{path!r} is gone: {error}"
            if not same:
                return f"{path!r} changed while it was loaded"
        return None


class RecordingLoader(DefaultModelLoader):  # type: ignore[misc]
    """vLLM's loader, which notes the files that it reads in `read`."""

    def __init__(self, load_config: Any) -> None:
        super().__init__(load_config)
        self.read: set[str] = set()

    def _prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._prepare_weights(*args, **kwargs)
        self.read.update(found[1])
        return found


def find(model: str, revision: str | None, load_config: Any, *, by_bytes: bool) -> Checkpoint:
    """Return the checkpoint that vLLM would load a model from now; a model of the hub is downloaded, as vLLM does it.
    Raises UsageError if there are no files, or they cannot be read."""
    try:
        if os.path.isfile(model):
            folder, files = os.path.dirname(model), {model}
        else:
            loader = RecordingLoader(load_config)
            folder = loader._prepare_weights(model, None, revision, True, None)[0]
            files = loader.read
            if os.path.isdir(model):  # a snapshot of the hub is known by its commit
                files.update(_settings(folder), _modules(folder))
        paths = tuple(sorted(files))
        stamps = tuple(_stamp(path) for path in paths)
        digest = _digest(paths, stamps, folder) if by_bytes else None
    except Exception as error:  # of the hub, of the network, of the disk
        raise UsageError(f"which files {model!r} is loaded from cannot be said: {error}") from error
    return Checkpoint(model, os.path.realpath(folder), paths, stamps, digest)


def plain(value: object) -> object:
    """Return settings as JSON has them, the same in each process: sets in order, without addresses and folders."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items() if key != "_name_or_path"}
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(plain(one), sort_keys=True) for one in value)
    if isinstance(value, Iterable):
        return [plain(one) for one in value]
    if callable(to_dict := getattr(value, "to_dict", None)):
        return plain(to_dict())
    text = str(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _stamp(path: str) -> tuple[object, ...]:
    """Say which file it is, and when it changed. The time of change of the inode is one that nobody can set."""
    found = os.stat(path)
    return os.path.realpath(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest(paths: tuple[str, ...], stamps: tuple[tuple[object, ...], ...], folder: str) -> str:
    whole = hashlib.sha256()
    for path, stamp in zip(paths, stamps, strict=True):
        known = _digests.get(stamp)
        if known is None:
            with open(path, "rb") as file:
                known = hashlib.file_digest(file, "sha256").hexdigest()
            _digests[stamp] = known
        whole.update(f"{os.path.relpath(path, folder)}\0{known}\0".encode())
    return whole.hexdigest()


def _settings(folder: str) -> Iterator[str]:
    for pattern in _SETTINGS:
        yield from glob.glob(os.path.join(glob.escape(folder), pattern))


def _modules(folder: str) -> Iterator[str]:
    """Return the weights that vLLM reads while it constructs a sentence-transformers model."""
    listed = os.path.join(folder, "modules.json")
    if not os.path.isfile(listed):
        return
    with open(listed, encoding="utf-8") as file:
        modules = json.load(file)
    for module in modules:
        for name in _MODULE_WEIGHTS:
            path = os.path.join(folder, module.get("path", ""), name)
            if os.path.isfile(path):
                yield path


def _label(folder: str) -> str:
    """Return a short name: of the hub and the commit, or the end of the path."""
    parts = folder.split(os.sep)
    if len(parts) > 2 and parts[-2] == "snapshots":
        owner = parts[-3].removeprefix("models--").replace("--", "/")
        return f"{owner[-_LONGEST + 9 :]}@{parts[-1][:8]}"
    return folder if len(folder) <= _LONGEST else f"...{folder[3 - _LONGEST :]}"
