"""Tokens a second of a tensor-parallel stack of decoder layers in torch, by how its sums over the GPUs are made.

Hidden size 8192, 32 layers, one token for each of 1 to 64 sequences, bfloat16, in a CUDA graph: projections, attention
over a short cache, the feed-forward part, and after both a sum over the GPUs, a residual and RMSNorm. All layers have
the same weights, which are more than the GPU's cache holds, so that a stack of this shape fits everywhere. Multicast is
off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import vram
from vram import driver as drivers
from vram.bench.children import DEADLINE, child, workplace
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.spec import Location

from .groups import (
    NCCL,
    ONE_SHOT,
    TWO_SHOT,
    WINDOWS,
    Rivals,
    check_no_multicast,
    group_sizes,
    no_multicast,
    replayed,
    slowest,
)

_HIDDEN, _LAYERS, _INNER, _HEADS, _KV_HEADS, _HEAD, _CACHED = 8192, 32, 28672, 64, 8, 128, 512
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_EPSILON = 1e-5
_FUSED, _PLAIN = "vram, fused with residual and RMSNorm", "vram, and torch's kernels"


def on_gpu(quick: bool, location: Location, gpus: int | None = None) -> Result:
    """Measure tokens a second; with `gpus`, over so many alone."""
    rows: list[Row] = []
    notes: list[str] = []
    title = f"Decoder layers in torch: {_LAYERS} of {_HIDDEN}, tensor-parallel, multicast off"
    devices = drivers.get(location).device_count()
    if devices < 2 and gpus is None:
        return Result("decoder", title, rows, ["it did not run: there is one GPU, and each rank takes one"])
    rounds, batches = (2, _BATCHES[:2]) if quick else (9, _BATCHES)
    with no_multicast():
        for size in group_sizes(devices, gpus):
            with contextlib.ExitStack() as stage:
                place = stage.enter_context(workplace())
                ranks = [stage.enter_context(child(_rank, str(place), rank, size)) for rank in range(size)]
                told = [one.hear() for one in ranks]
                notes += [f"{size} GPUs: {why}" for why in dict.fromkeys(why for _, lacking in told for why in lacking)]
                for batch in batches if told[0][0] else ():
                    cases: dict[str, Callable[[], float]] = {
                        name: partial(slowest, ranks, name, batch) for name in told[0][0]
                    }
                    took = in_turns(cases, rounds, warm=1)
                    figures = {
                        name: Figure.of([batch / seconds for seconds in times], "tokens/s")
                        for name, times in took.items()
                    }
                    case = f"{size} GPUs, batch {batch}"
                    plain = Row(f"{case}: {NCCL}", figures.pop(NCCL))
                    rows += [*(Row.held(f"{case}: {name}", one, plain) for name, one in figures.items()), plain]
    return Result("decoder", title, rows, notes)


def _rank(pipe: Connection, place: str, rank: int, size: int) -> None:
    check_no_multicast()
    with contextlib.ExitStack() as stage:
        rivals = Rivals(stage, place, rank, size)
        names = rivals.names(1)
        if not names:
            pipe.send(([], rivals.lacking))
            return
        stack = _Stack(stage, rivals, place, rank, size)
        pipe.send(([_FUSED, _PLAIN, *names], rivals.lacking))
        while True:
            pipe.send(stack.seconds(*pipe.recv()))


class _Stack:
    """One rank's share of the layers."""

    def __init__(self, stage: contextlib.ExitStack, rivals: Rivals, place: str, rank: int, size: int) -> None:
        import torch

        self._torch, self._rivals = torch, rivals
        at = str(Path(place) / "group")
        self._group = stage.enter_context(vram.Group("decoder", rank=rank, size=size, at=at, timeout=DEADLINE))
        self._heads, self._kv_heads, self._inner = _HEADS // size, max(1, _KV_HEADS // size), _INNER // size
        made = partial(torch.randn, dtype=torch.bfloat16, device=f"cuda:{rank}")
        wide = (self._heads + 2 * self._kv_heads) * _HEAD
        # Small: values stay what a number of 16 bits holds, through all layers.
        self._in, self._out = made(wide, _HIDDEN) * 0.01, made(_HIDDEN, self._heads * _HEAD) * 0.01
        self._up, self._down = made(2 * self._inner, _HIDDEN) * 0.01, made(_HIDDEN, self._inner) * 0.01
        self._weight = torch.ones(_HIDDEN, dtype=torch.bfloat16, device=f"cuda:{rank}")
        self._made = made
        self._kept: tuple[tuple[str, int], Any] | None = None
        stage.callback(self._forget)

    def seconds(self, name: str, batch: int) -> float:
        """Return the seconds of one step of all layers."""
        if self._kept is None or self._kept[0] != (name, batch):
            self._forget()
            self._kept = ((name, batch), self._graph(name, batch))
        spent = replayed(self._torch, *self._kept[1][:2])
        self._group.check()
        return spent

    def _forget(self) -> None:
        self._torch.cuda.synchronize()
        self._kept = None

    def _graph(self, name: str, batch: int) -> tuple[Any, ...]:
        torch = self._torch
        cached = [self._made(batch, self._kv_heads, _CACHED, _HEAD) for _ in range(2)]
        hidden = self._made(batch, _HIDDEN)
        # Torch's symmetric memory and registered windows reduce memory that they have made.
        room = self._rivals.make(name, batch * _HIDDEN * 2) if name in (WINDOWS, ONE_SHOT, TWO_SHOT) else None
        step = partial(self._step, name, hidden, cached, room)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            out = step()
        return graph, stream, out, cached, hidden, room

    def _step(self, name: str, hidden: Any, cached: list[Any], room: Any) -> Any:
        functional = self._torch.nn.functional
        residual = hidden
        x = functional.rms_norm(hidden, (_HIDDEN,), self._weight, _EPSILON)
        for _ in range(_LAYERS):
            x, residual = self._reduced(name, self._attention(x, cached), residual, room)
            gate, up = (x @ self._up.t()).chunk(2, dim=-1)
            x, residual = self._reduced(name, (functional.silu(gate) * up) @ self._down.t(), residual, room)
        return x

    def _attention(self, x: Any, cached: list[Any]) -> Any:
        batch = x.shape[0]
        query = (x @ self._in.t())[:, : self._heads * _HEAD].reshape(batch, self._heads, 1, _HEAD)
        attention = self._torch.nn.functional.scaled_dot_product_attention
        return attention(query, *cached, enable_gqa=True).reshape(batch, -1) @ self._out.t()

    def _reduced(self, name: str, x: Any, residual: Any, room: Any) -> tuple[Any, Any]:
        """Sum up over the GPUs, add the residual and normalize; return that and the sum."""
        if name == _FUSED:
            out, total = self._torch.empty_like(x), self._torch.empty_like(x)
            stream = self._torch.cuda.current_stream()
            self._group.all_reduce_norm(
                x, residual, self._weight, out=out, total=total, epsilon=_EPSILON, stream=stream
            )
            return out, total
        if name == _PLAIN:
            summed = self._torch.empty_like(x)
            self._group.all_reduce(x, out=summed, stream=self._torch.cuda.current_stream())
        else:
            if room is not None:
                x = room.copy_(x.reshape(-1))
            summed = self._rivals.call(name, x).reshape(residual.shape)
        residual = residual + summed
        return self._torch.nn.functional.rms_norm(residual, (_HIDDEN,), self._weight, _EPSILON), residual
