"""Tables, taken apart into what is published."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from vram.arrays.columns import ENTRY
from vram.arrays.frames import parts_of
from vram.arrays.rebuilt import table_of
from vram.arrays.sources import Source

Arrays = dict[str, Any]


def taken_apart(table: Any) -> tuple[dict[str, Any], Arrays]:
    """Return what is said of a table, and its arrays as a publisher would have written them: ours, to be changed."""
    arrays: Arrays = {}
    for name, value in parts_of(table).items():
        if isinstance(value, Source):
            arrays[name] = np.empty(value.shape, value.dtype)
            assert value.write is not None
            value.write(arrays[name])
        else:
            arrays[name] = np.array(value)
    return msgspec.json.decode(arrays.pop(ENTRY).tobytes()), arrays


def read(words: Any, arrays: Arrays, library: str | None = None, *, whole: bool = True) -> Any:
    data = words if isinstance(words, bytes) else msgspec.json.encode(words)
    return table_of(np.frombuffer(data, np.uint8), arrays, library, whole=whole)
