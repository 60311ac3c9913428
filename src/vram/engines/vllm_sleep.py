"""Sleep and wake of a vLLM worker on vram: the worker allocates in a pool of ours, and the backend puts that to sleep.

Against vLLM's own (``cumem``): all or nothing, also when memory is short at waking; the pinned memory of the backup is
kept for the next time; copies in both directions at once. Published memory, such as weights of ``--load-format vram``,
is unmapped here and stays where it is for the others.

Memory of captured graphs does not sleep: vLLM allocates it in the pool of its own backend or in torch's, whatever
``sleep_mode_offload_cudagraph`` says. Graphs stay valid all the same, since addresses stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm.device_allocator import DEFERRABLE_TAGS
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
from vllm.v1.worker.gpu_worker import Worker

from .vllm_pools import pool


class VramWorker(Worker):  # type: ignore[misc]
    """vLLM's worker, with sleep mode on a pool of ours: ``--worker-cls vram.engines.vllm_sleep.VramWorker``."""

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        config = self.vllm_config.model_config
        if not config.enable_sleep_mode or config.sleep_mode_backend != "vram":
            found: AbstractContextManager[None] = super()._maybe_get_memory_pool_context(tag)
            return found
        if tag == "weights" and self.vllm_config.load_config.load_format == "vram":
            return nullcontext()  # it publishes what it loads, and takes what is this engine's own from the pool itself
        ours = pool(self.device)
        if tag == "weights" and ours.usage():
            raise ValueError("this process has the weights of an engine already, and tags would mix: start another one")
        return ours.use(tag)


class VramSleepModeBackend(SleepModeBackend):  # type: ignore[misc]
    """``--sleep-mode-backend vram``: puts a pool to sleep, by default that of the current GPU."""

    # Kept at every level, as in vLLM's own; weights at the first. vLLM uses "cudagraph" with its own backend only.
    _OFFLOADED = ("runtime", "cudagraph")

    def __init__(self, pool: Any = None) -> None:
        super().__init__()
        self._state: Any = "RUNNING"
        self._given = pool

    @property
    def _pool(self) -> Any:
        return pool(None) if self._given is None else self._given

    def suspend(self, level: int = 1) -> None:
        """Put everything to sleep: with its bytes, but for the KV cache and scratch; at level 2 without the weights."""
        kept = (*self._OFFLOADED, "weights") if level == 1 else self._OFFLOADED
        awake = self._awake()
        self._sleep(offload=awake.intersection(kept), discard=awake.difference(kept))

    def resume(self, tags: list[str] | None = None) -> None:
        """Wake everything, or some: weights and the KV cache may be left asleep."""
        asleep = {tag for tag, usage in self._pool.usage().items() if usage.asleep}
        if tags is not None:
            asleep = {tag for tag in asleep if tag in tags or tag not in DEFERRABLE_TAGS}
        before = self._state
        self._state = "RESUMING"
        try:
            self._pool.wake(sorted(asleep))
        except BaseException:
            self._state = before
            raise
        self._state = "SUSPENDED" if any(usage.asleep for usage in self._pool.usage().values()) else "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Put some to sleep without their bytes. Memory that sleeps already stays as it is."""
        self._sleep(offload=(), discard=self._awake().intersection(tags))

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Communicators stay: their memory is not of the pool."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Nothing is compiled again: addresses stay."""
        return True

    def _awake(self) -> set[str]:
        return {tag for tag, usage in self._pool.usage().items() if usage.awake}

    def _sleep(self, offload: Iterable[str], discard: Iterable[str]) -> None:
        self._pool.sleep(offload=sorted(offload), discard=sorted(discard), shared="unmap")
        self._state = "SUSPENDED"
