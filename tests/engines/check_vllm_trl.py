"""TRL's GRPO on a CPU against ``vllm serve``, with the weights handed over by one entry: ``make test-adapters``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
import torch
from check_vllm import ENVIRONMENT, OPTIONS, TRANSFER, ask, say
from servers import Keeper, Servers

import vram

STEPS = 4


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    with servers.keeper_at(tmp_path_factory.mktemp("keeper")) as made:
        os.environ["VRAM_KEEPER"] = made.path
        yield made
        del os.environ["VRAM_KEEPER"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("trl")
    servers.checkpoint(found / "model", 0)
    return found


@pytest.fixture(scope="module")
def engines(keeper: Keeper) -> Iterator[Servers]:
    command = [Path(sys.executable).with_name("vllm"), "serve"]
    options = f"{OPTIONS} --logprobs-mode processed_logprobs --max-logprobs -1"
    with Servers(command, options, {**ENVIRONMENT, "VRAM_KEEPER": keeper.path}) as made:
        yield made


def test_a_server_answers_with_the_weights_of_each_step(
    engines: Servers, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from vram.engines import trl

    trl.install()
    took: list[float] = []

    class Timed(trl.VramVLLMClient):  # type: ignore[misc]
        def update_named_params(self, *given: Any) -> None:
            begun = time.monotonic()
            super().update_named_params(*given)
            took.append(time.monotonic() - begun)

    trl.vllm_generation.VLLMClient = Timed
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(place / "model", pad_token="t0")
    server = engines.start("model", place, *TRANSFER).ready()
    before = ask(server)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": "t5 t6 t7 t8"}] * 16),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args=GRPOConfig(
            str(tmp_path), use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url, max_steps=STEPS,
            per_device_train_batch_size=4, num_generations=4, max_completion_length=8, use_cpu=True, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=1e-2, bf16=False,
            optim="sgd", dataloader_pin_memory=False, gradient_checkpointing=False,
        ),
    )  # fmt: skip
    trainer.train()
    assert len(took) == STEPS
    held = vram.entry(f"trl/{os.getpid()}")
    assert held.updatable
    trainer.vllm_generation.sync_weights()
    after = ask(server)
    assert after != before
    trainer.model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    other = engines.start("model", tmp_path).ready()
    assert after == ask(other), "the tokens of a server that has read these weights from a file"
    say(capsys, f"TRL: {held.nbytes >> 20} MiB, first {took[0]:.2f} s, each other {sorted(took[1:])[1]:.2f} s")
    trainer.vllm_generation.vllm_client.close_communicator()
    assert vram.list_entries("trl/") == []
    assert ask(server) == after


def test_a_server_with_another_way_is_named(keeper: Keeper) -> None:
    from vram.engines import trl

    class Elsewhere(trl.VramVLLMClient):  # type: ignore[misc]
        def __init__(self, backend: object) -> None:
            self.base_url, self._backend = "http://127.0.0.1:1", backend

        def get_server_info(self) -> dict[str, Any]:
            return {"weight_transfer_config": self._backend}

    for backend in (None, {"backend": "nccl"}):
        with pytest.raises(vram.errors.UsageError, match="--weight-transfer-config"):
            Elsewhere(backend).init_communicator()
