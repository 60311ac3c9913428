"""``WeightTransferConfig(backend="vram")``: new weights from a trainer, through one entry that it updates in place.

The trainer publishes its weights once, and writes each round into the same memory (:func:`vram.update`), which the
engine's workers have attached: no handles and no buffers per round. The workers load out of it inside a section
(:meth:`vram.Lease.reading`), which ends with ``finish_weight_update``: vLLM processes a layer when it has all of its
weights, and until then it keeps what it was given.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

import vram

from ..entries.lease import Lease
from ..errors import TornError, UsageError, VramError
from .weight_sender import WeightSender, to_the_end

_BEFORE = "the model has the weights of before: nothing of this update was loaded"


@dataclass
class VramInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """The first message to a worker: the entry, its keeper, and the uid that it has to belong to (None: its own)."""

    name: str
    keeper: str | None = None
    timeout: float | None = 60.0
    owner: int | None = None


@dataclass
class VramUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The message to a worker for each update: its version."""

    version: int


class VramWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """The worker's side."""

    init_info_cls = VramInitInfo
    update_info_cls = VramUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._lease: Lease | None = None
        self._timeout: float | None = None
        self._section = contextlib.ExitStack()  # of the update that is under way
        self._version = 0

    def init_transfer_engine(self, init_info: VramInitInfo) -> None:
        """Attach the trainer's entry. A model whose parameters are not its own is refused."""
        self.shutdown()
        self._check_own()
        owner = os.getuid() if init_info.owner is None else init_info.owner
        lease = vram.attach(init_info.name, owner=owner, timeout=init_info.timeout, keeper=init_info.keeper)
        if not lease.updatable:
            lease.close()
            raise UsageError(f"{init_info.name!r} was published without updatable=True: nothing will come of it")
        self._lease, self._timeout = lease, init_info.timeout

    def start_weight_update(self) -> None:
        """Refuse a model whose parameters are not its own. The layers stay as they are until the weights are there."""
        self._check_own()
        self._section.close()  # of an update that nobody finished

    def _check_own(self) -> None:
        if getattr(self.model, "vram_lease", None) is not None:
            raise UsageError(
                "this model's parameters are shared with other engines, and read-only: to update them, load it with "
                '--model-loader-extra-config \'{"mode": "copy"}\' or another load format'
            )

    def receive_weights(self, update_info: VramUpdateInfo) -> None:
        """Wait for the update, and load it from the trainer's memory. Raises TornError if only some layers have new
        weights: the engine works on the mixture until an update is complete. Earlier errors change nothing."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        lease = self._lease
        if lease is None:
            raise UsageError("init_transfer_engine() comes first: it says which entry")
        self._section.close()
        try:
            lease.wait(newer_than=update_info.version - 1, timeout=self._timeout)
            self._version = self._section.enter_context(lease.reading(timeout=self._timeout))
        except VramError as error:
            error.add_note(_BEFORE)
            raise
        try:
            initialize_layerwise_reload(self.model)
            with self._told(), disable_mtp_completeness_check():
                self.model.load_weights(lease.torch().items())
        except BaseException:
            self._section.close()
            raise

    def finish_weight_update(self) -> None:
        """Have the last layers processed, and let the trainer write again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._section, self._told():
            finalize_layerwise_reload(self.model, self.model_config)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # it may still be copying out of there

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """If a block fails, have the model whole again, and say what is in it."""
        try:
            yield
        except BaseException as error:
            loaded, layers = self._take_back()
            if not loaded:
                error.add_note(_BEFORE)
            elif isinstance(error, Exception):
                raise TornError(
                    f"the new weights could not all be loaded ({error}): {len(loaded)} of {layers} layers have them, "
                    f"such as {loaded[0]!r}, and the others those of before. Send them again before it serves"
                ) from error
            raise

    def _take_back(self) -> tuple[list[str], int]:
        """End a reload in the middle; return the layers that have their new weights, and how many layers there are. An
        incomplete layer holds tensors without memory; an untouched layer gets its own back."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        loaded: list[str] = []
        layers = 0
        for name, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            if next(layer.parameters(recurse=False), None) is not None:
                layers += 1
                if not info.can_load():
                    loaded.append(name)
            info.loaded_weights.clear()
            info.load_numel = 0
        finalize_layerwise_reload(self.model, self.model_config)
        return loaded, layers

    def shutdown(self) -> None:
        """Let go of the entry."""
        self._section.close()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()


@dataclass
class VramTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """The trainer's first message: entry name, keeper, and seconds to wait for workers that read, each round."""

    backend: ClassVar[str] = "vram"
    name: str
    keeper: str | None = None
    timeout: float | None = 60.0


class VramTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side. Rank 0 publishes full tensors; the other ranks take part in gathering them."""

    init_info_cls = VramTrainerInitInfo

    def __init__(self, info: VramTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender, rank=info.rank)
        self._sender = WeightSender(info.name, info.keeper, info.timeout)

    @classmethod
    def trainer_init(cls, init_info: VramTrainerInitInfo, *, client: Any, source: Any = None) -> Any:
        """Publish the weights as they are, and have the workers attach them. Raises UsageError on each rank, if the
        first does not own all parameters, or the source does not yield what it declares."""
        if source is None or not source.implements_iter_full():
            raise UsageError("backend 'vram' needs a WeightSource with iter_full()")
        _check_owner(source)
        engine = cls(init_info, client=client, source=source)
        with to_the_end(source.iter_full()) as gathered:
            if engine.is_sender:
                weights = [(one.name, one.dtype, tuple(one.shape)) for one in source.metadata]
                engine._sender.publish(client, weights, gathered)
        return engine

    def send_weights(self) -> None:
        """Write the weights into the entry, and drive the workers through one update."""
        with to_the_end(self.source.iter_full()) as gathered:
            if self.is_sender:
                self._sender.send(self.client, gathered)


def _check_owner(source: Any) -> None:
    """Raise :class:`UsageError` if rank 0, which sends, has not got everything."""
    owned = set(source.owned_names(0))
    others = [meta for meta in source.metadata if meta.name not in owned]
    if others:
        raise UsageError(
            f"rank 0 does not own {len(others)} of {len(source.metadata)} parameters, such as {others[0].name!r} (of "
            f"ranks {others[0].owners}), and backend 'vram' publishes what rank 0 has: give it a WeightSource that "
            f"gathers all of them there, or use a backend in which each owner sends its own, such as 'nccl_m2n'"
        )
