"""``WeightTransferConfig(backend="vram")``: new weights from a trainer, through one entry that it updates in place.

The trainer publishes its weights once, and writes each round into the same memory (:func:`vram.update`), which the
engine's workers have attached: no handles and no buffers per round. The workers load out of it inside a section
(:meth:`vram.Lease.reading`), which ends with ``finish_weight_update``: vLLM processes a layer when it has all of its
weights, and until then it keeps what it was given.
"""

from __future__ import annotations

import contextlib
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
from ..errors import UsageError

__all__ = [
    "VramInitInfo",
    "VramTrainerInitInfo",
    "VramTrainerWeightTransferEngine",
    "VramUpdateInfo",
    "VramWeightTransferEngine",
]


@dataclass
class VramInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """What a worker is told first: the entry, and whom to ask for it."""

    name: str
    keeper: str | None = None
    timeout: float | None = 60.0


@dataclass
class VramUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What a worker is told each round: which update it is."""

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
        """Attach the trainer's entry."""
        self.shutdown()
        lease = vram.attach(init_info.name, timeout=init_info.timeout, keeper=init_info.keeper)
        if not lease.updatable:
            lease.close()
            raise UsageError(f"{init_info.name!r} was published without updatable=True: nothing will come of it")
        self._lease, self._timeout = lease, init_info.timeout

    def start_weight_update(self) -> None:
        """Have vLLM load layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if getattr(self.model, "vram_lease", None) is not None:
            raise UsageError(
                "this model's parameters are shared with other engines, and read-only: to update them, load it with "
                '--model-loader-extra-config \'{"mode": "copy"}\' or another load format'
            )
        self._section.close()  # of an update that nobody finished
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: VramUpdateInfo) -> None:
        """Wait for the update, and load it out of the memory that the trainer wrote it to."""
        lease = self._lease
        if lease is None:
            raise UsageError("init_transfer_engine() comes first: it says which entry")
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        lease.wait(newer_than=update_info.version - 1, timeout=self._timeout)
        self._section.close()
        try:
            self._version = self._section.enter_context(lease.reading(timeout=self._timeout))
            with disable_mtp_completeness_check():
                self.model.load_weights(lease.torch().items())
        except BaseException:
            self._section.close()
            raise

    def finish_weight_update(self) -> None:
        """Have the last layers processed, and let the trainer write again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self._section:
            finalize_layerwise_reload(self.model, self.model_config)
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()  # it may still be copying out of there

    def shutdown(self) -> None:
        """Let go of the entry."""
        self._section.close()
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()


@dataclass
class VramTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """What the trainer says first.

    Parameters
    ----------
    name : str
        What its weights are published as.
    keeper : str, optional
        To whom.
    timeout : float or None
        Seconds to wait for workers that read, each round.
    """

    backend: ClassVar[str] = "vram"
    name: str
    keeper: str | None = None
    timeout: float | None = 60.0


class VramTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """The trainer's side. Rank 0 publishes full tensors; the other ranks take part in gathering them."""

    init_info_cls = VramTrainerInitInfo

    def __init__(self, info: VramTrainerInitInfo, *, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender, rank=info.rank)
        self._info = info
        self._version = 1

    @classmethod
    def trainer_init(cls, init_info: VramTrainerInitInfo, *, client: Any, source: Any = None) -> Any:
        """Publish the weights as they are, and have the workers attach them."""
        if source is None or not source.implements_iter_full():
            raise ValueError("backend 'vram' needs a WeightSource with iter_full()")
        engine = cls(init_info, client=client, source=source)
        gathered = ((name, tensor.detach()) for name, tensor in source.iter_full())
        if not engine.is_sender:
            for _ in gathered:
                pass
        else:
            tensors = dict(gathered)
            vram.publish(init_info.name, tensors, updatable=True, keeper=init_info.keeper)
            client.init_weight_transfer_engine(
                {"name": init_info.name, "keeper": init_info.keeper, "timeout": init_info.timeout}
            )
        return engine

    def send_weights(self) -> None:
        """Write the weights into the entry, and drive the workers through one update."""
        if not self.is_sender:
            for _ in self.source.iter_full():
                pass
            return
        with vram.update(self._info.name, timeout=self._info.timeout, keeper=self._info.keeper) as arrays:
            for name, tensor in self.source.iter_full():
                arrays[name].torch().copy_(tensor.detach())
        self._version += 1
        self.client.start_weight_update()
        self.client.update_weights({"version": self._version})
        self.client.finish_weight_update()
