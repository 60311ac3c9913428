"""New weights from a trainer to the workers of engines, through one entry that the trainer updates in place.

The entry is published once, and each round is written into the same memory. The workers are driven by the four messages
of vLLM's weight transfer: init, start, update, finish.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

import vram

from ..errors import UsageError
from ..spec import round_up

_ALIGNMENT = 256  # of tensors in the entry, in bytes: what GPU libraries ask for
Weight = tuple[str, torch.dtype, tuple[int, ...]]  # name, type, shape


class WeightSender:
    """The entry of one trainer. A `client` has the four messages, to all workers; `timeout` is in seconds, for workers
    that still read the round before."""

    def __init__(self, name: str, keeper: str | None, timeout: float | None) -> None:
        self._name, self._keeper, self.timeout = name, keeper, timeout
        self._version = 1

    def publish(self, client: Any, weights: Sequence[Weight], gathered: Iterator[tuple[str, Any]]) -> None:
        """Publish memory for all weights, filled with one after the other: no two copies of all are there."""
        arrays: dict[str, vram.Array] = {}

        def place(device: Any) -> dict[str, vram.Array]:
            offsets: list[int] = []
            end = 0
            for _, dtype, shape in weights:
                offsets.append(end)
                end = round_up(end + math.prod(shape) * dtype.itemsize, _ALIGNMENT)
            where = f"cuda:{device.index}" if device.type == "cuda" else "host"
            region = vram.memory.Region.create(where, capacity=max(end, 1), nbytes=max(end, 1), managed=True)
            for (name, dtype, shape), offset in zip(weights, offsets, strict=True):
                arrays[name] = vram.Array(region, dtype, shape, offset=offset)
            return arrays

        _fill(gathered, place)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # it is shared where it is: nothing else waits for the copies
        # All of this memory is the entry's: nobody needs to look what lies between the arrays.
        vram.publish(self._name, arrays, updatable=True, whole=True, keeper=self._keeper)
        client.init_weight_transfer_engine(
            {"name": self._name, "keeper": self._keeper, "timeout": self.timeout, "owner": os.getuid()}
        )

    def send(self, client: Any, gathered: Iterator[tuple[str, Any]]) -> None:
        """Write the weights into the entry, and drive the workers through one update."""
        with vram.update(self._name, timeout=self.timeout, keeper=self._keeper) as arrays:
            _fill(gathered, lambda _: arrays)
        self._version += 1
        self.drive(client)

    def drive(self, client: Any) -> None:
        """Have the workers load what is in the entry."""
        try:
            client.start_weight_update()
            client.update_weights({"version": self._version})
            client.finish_weight_update()
        except BaseException:
            # Of several workers, those that have loaded it are in their sections, and would keep the next update out.
            with contextlib.suppress(Exception):
                client.finish_weight_update()
            raise


@contextlib.contextmanager
def to_the_end(gathered: Iterable[tuple[str, Any]]) -> Iterator[Iterator[tuple[str, Any]]]:
    """Have a block take what is gathered, and gather what it leaves, which the other ranks wait for."""
    rest = iter(gathered)
    try:
        yield rest
    finally:
        for _ in rest:
            pass


def _fill(gathered: Iterator[tuple[str, Any]], arrays_on: Callable[[Any], Mapping[str, Any]]) -> None:
    """Copy each tensor to where it is published, and let go of it before the next is gathered.
    `arrays_on` returns where that is, for the device of the first tensor."""
    arrays: Mapping[str, Any] = {}
    left: dict[str, None] = {}
    for name, tensor in gathered:
        if not arrays:
            arrays = arrays_on(tensor.device)
            left = dict.fromkeys(arrays)
        if name not in left or tuple(tensor.shape) != arrays[name].shape:
            raise UsageError(
                f"the trainer gave {name!r} of shape {tuple(tensor.shape)}, and had declared "
                f"{arrays[name].shape if name in left else 'nothing of it, or it came before'}"
            )
        arrays[name].torch().copy_(tensor.detach())
        del left[name], tensor
    if not arrays:
        raise UsageError("the trainer did not give a single parameter")
    if left:
        raise UsageError(
            f"the trainer did not give {len(left)} of {len(arrays)} parameters, such as {next(iter(left))!r}"
        )
