"""A Trainer of transformers whose model is served while it trains: new weights after each step, never half of them.

The rollout process attaches once, and answers each batch by the weights of one step.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from multiprocessing.connection import Connection

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Trainer, TrainingArguments

import vram
from vram.engines.transformers import PublishCallback

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
TOKENS = torch.arange(16)
STEPS = 50


def build() -> PreTrainedModel:
    """Make the model, with random weights."""
    return AutoModelForCausalLM.from_config(config)


def roll_out(results: Connection) -> None:
    """Compute with the newest weights until those of the last step are there."""
    losses: dict[int, float] = {}
    results.send("ready")
    with vram.attach("policy", timeout=60.0) as lease:
        model = lease.module(build)  # once: an update writes into this memory
        while max(losses, default=0) <= STEPS:
            with lease.reading() as version, torch.no_grad():
                losses[version] = float(model(input_ids=TOKENS[None], labels=TOKENS[None]).loss)
    results.send(losses)


def main() -> None:
    """Train for some steps, each of which publishes."""
    with vram.private_keeper(), tempfile.TemporaryDirectory() as place:
        ours, theirs = multiprocessing.Pipe()
        worker = multiprocessing.get_context("spawn").Process(target=roll_out, args=(theirs,))
        worker.start()
        ours.recv()
        options = TrainingArguments(
            place, max_steps=STEPS, learning_rate=1e-2, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        rows = [{"input_ids": TOKENS, "labels": TOKENS}] * 40
        Trainer(build(), options, train_dataset=rows, callbacks=[PublishCallback("policy")]).train()
        losses = ours.recv()
        worker.join()
        loss = [losses[version] for version in sorted(losses)]
        print(f"{STEPS} steps, and the rollouts used {len(loss)} versions: loss {loss[0]:.2f} to {loss[-1]:.2f}")


if __name__ == "__main__":
    main()
