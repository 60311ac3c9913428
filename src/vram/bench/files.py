"""Files of weights for the benchmarks, written without the memory that they would take as arrays."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from ..errors import CapacityError
from ..spec import format_size

_BLOCK = 16 << 20


def write_weights(path: Path, tensors: Mapping[str, int], *, sparse: bool = False) -> None:
    """Write a safetensors file of tensors of so many bytes each; `sparse` data are zeros that take no room."""
    header, at = {}, 0
    for name, nbytes in tensors.items():
        header[name] = {"dtype": "U8", "shape": [nbytes], "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    free = shutil.disk_usage(path.parent).free
    if not sparse and free < at + len(text) + _BLOCK:
        raise CapacityError(
            f"a file of {format_size(at)} is needed, and {path.parent} has room for {format_size(free)}; "
            f"name a larger place with TMPDIR"
        )
    block = os.urandom(min(_BLOCK, at))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if sparse:
            file.truncate(8 + len(text) + at)
            return
        for start in range(0, at, len(block)):
            file.write(block[: at - start])
        file.flush()
        os.fsync(file.fileno())  # or the disk would be busy with it while we measure
