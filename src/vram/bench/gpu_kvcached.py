"""kvcached, where it is built for the torch that is there; a rival that is not says so in a line."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from ..spec import Location
from .bare_calls import ordinal_of
from .gpu_torch import torch_on
from .measure import timed

__all__ = ["kvcached_growth"]

_PAGE = 2 << 20  # bytes: what kvcached maps at a time, unless told otherwise


@contextlib.contextmanager
def kvcached_growth(
    location: Location, count: int, step: int, room: int, notes: list[str]
) -> Iterator[dict[str, Callable[[], float]]]:
    """Yield what maps memory behind many tensors of kvcached's, and returns the seconds: by name, none if it is not.

    Parameters
    ----------
    count : int
        Tensors, counted as vram's are: the keys and the values of half as many layers.
    step, room : int
        Bytes that are mapped behind each, a multiple of 2 MiB, and what each has addresses for.
    """
    ops = _compiled(location, notes)
    if ops is None:
        yield {}
        return
    device = f"cuda:{ordinal_of(location)}"
    ops.init_kvcached(device, _PAGE, False)
    try:
        tensors = ops.create_kv_tensors(2 * room, 2, device, count // 2, 2)  # of 16 bits, keys and values
        pages = list(range(0, step, _PAGE))

        def grow() -> float:
            spent = timed(lambda: ops.map_to_kv_tensors(pages))
            ops.unmap_from_kv_tensors(pages)
            return spent

        yield {"kvcached": grow}
        tensors.clear()
    finally:
        ops.shutdown_kvcached()


def _compiled(location: Location, notes: list[str]) -> Any:
    """Return ``kvcached.vmm_ops``, or None and a note why it is not measured."""
    if importlib.util.find_spec("kvcached") is None:
        notes.append("kvcached did not run: it is not installed")
        return None
    if torch_on(location, notes) is None:
        return None
    try:
        return import_module("kvcached.vmm_ops")
    except ImportError as error:
        notes.append(f"kvcached did not run: {error}")
        return None
