"""Calls in CUDA graphs, timed by the GPU's own events: of streams of ours, by the bare calls of cuda-bindings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vram.bench.gpu import Bare


class Timer:
    """Two events of the GPU, and the time between them."""

    def __init__(self, bare: Bare) -> None:
        self._bare = bare
        self._events = [bare.ok(bare.api.cuEventCreate(0)) for _ in range(2)]

    def begin(self, stream: int) -> None:
        """Take the time when a stream comes here."""
        self._bare.ok(self._bare.api.cuEventRecord(self._events[0], stream))

    def end(self, stream: int) -> None:
        """Take the time again."""
        self._bare.ok(self._bare.api.cuEventRecord(self._events[1], stream))

    def microseconds(self) -> float:
        """Wait for the end, and return the time between."""
        bare = self._bare
        bare.ok(bare.api.cuEventSynchronize(self._events[1]))
        milliseconds: float = bare.ok(bare.api.cuEventElapsedTime(*self._events))
        return milliseconds * 1e3

    def close(self) -> None:
        """Give the events back."""
        for event in self._events:
            self._bare.ok(self._bare.api.cuEventDestroy(event))


class Graph:
    """Calls that were captured; made by :func:`graph_of`."""

    def __init__(self, bare: Bare, made: Any) -> None:
        self._bare, self._made = bare, made

    def launch(self, stream: int) -> None:
        """Put all of it on a stream."""
        self._bare.ok(self._bare.api.cuGraphLaunch(self._made, stream))


@contextlib.contextmanager
def graph_of(bare: Bare, stream: int, work: Callable[[], object]) -> Iterator[Graph]:
    """Capture what `work` puts on a stream, for the length of a block."""
    api, ok = bare.api, bare.ok
    ok(api.cuStreamBeginCapture(stream, api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    try:
        work()
    finally:
        captured = ok(api.cuStreamEndCapture(stream))
    made = ok(api.cuGraphInstantiate(captured, 0))
    ok(api.cuGraphDestroy(captured))
    try:
        yield Graph(bare, made)
    finally:
        ok(api.cuStreamSynchronize(stream))
        ok(api.cuGraphExecDestroy(made))
