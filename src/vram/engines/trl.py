"""TRL's vLLM server mode, with weights handed over by one entry that the trainer updates in place.

:func:`install` before the trainer is made; the server is started with ``--weight-transfer-config
'{"backend": "vram"}'``, on the same machine, with a keeper. TRL's own way needs a group of NCCL, and so a GPU for the
trainer which is none of the server's; this one needs neither, and works on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

import vram

from ..errors import UsageError
from .weight_sender import WeightSender, to_the_end

_TIMEOUT = 60.0  # seconds


class VramVLLMClient(VLLMClient):  # type: ignore[misc]
    """TRL's client of a vLLM server. The entry is ``trl/<pid>``, in the keeper that ``VRAM_KEEPER`` names."""

    def init_communicator(self, device: Any = 0) -> None:
        """See that the server takes weights from an entry. Nothing is set up before they come."""
        config = self.get_server_info()["weight_transfer_config"]
        if config is None or config.get("backend") != "vram":
            raise UsageError(
                f"the vLLM server at {self.base_url} takes no weights from vram: start it with "
                f'--weight-transfer-config \'{{"backend": "vram"}}\', and with vram installed'
            )
        self._entry = f"trl/{os.getpid()}"
        self._sender: WeightSender | None = None

    def update_named_params(
        self, metadata: Sequence[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Any]]
    ) -> None:
        """Have the server go on with these weights: all of them in one call, the same ones each time."""
        with to_the_end(named_params) as gathered:
            if self._sender is None:
                sender = WeightSender(self._entry, os.environ.get("VRAM_KEEPER"), _TIMEOUT)
                weights = [(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in metadata]
                sender.publish(self, weights, gathered)
                self._sender = sender
                sender.drive(self)
            else:
                self._sender.send(self, gathered)

    def close_communicator(self) -> None:
        """Remove the entry. The server keeps the weights that it has loaded."""
        if self._sender is not None:
            self._sender = None
            vram.remove(self._entry)

    # -- the four messages ----------------------------------------------------------------------------------------
    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        """Have the workers attach the entry."""
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": info})

    def start_weight_update(self) -> None:
        """Have the workers begin an update."""
        self._start_weight_update()

    def update_weights(self, info: dict[str, Any]) -> None:
        """Have the workers load a version of the entry."""
        self._post(f"{self.base_url}/update_weights", json={"update_info": info})

    def finish_weight_update(self) -> None:
        """Have the workers end an update, and let the trainer write again."""
        self._finish_weight_update()


def install() -> None:
    """Have TRL's trainers that are made from here on hand weights over by :class:`VramVLLMClient`."""
    vllm_generation.VLLMClient = VramVLLMClient
