"""A model of transformers: the first process loads it, the others attach, and one gets an adapter that it trains.

The shape is small and its weights are random, so that nothing is downloaded. With a real one `load` is
`AutoModelForCausalLM.from_pretrained(name, dtype="auto")`, and `config` is `AutoConfig.from_pretrained(name)`.
"""

from __future__ import annotations

import multiprocessing
import os

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import vram

config = LlamaConfig(
    hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8, vocab_size=1000,
    tie_word_embeddings=True,
)  # fmt: skip
PROMPT = torch.tensor([[1, 2, 3, 4]])


def build() -> PreTrainedModel:
    """Make the model of its configuration; on published weights this takes no memory for parameters."""
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def load() -> PreTrainedModel:
    """Stand for from_pretrained, which takes long. One process calls it, and frees its copy as it publishes."""
    print(f"process {os.getpid()} loads")
    return build()


def answer(_: int) -> list[int]:
    """Generate some tokens with the shared weights."""
    with vram.attach_or_publish("llama", load, timeout=60.0) as lease:
        model = lease.module(build)  # tied parameters stay tied, and rotary tables are made
    made = model.generate(PROMPT, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return made[0].tolist()


def main() -> None:
    """Have three processes answer, and count what is in memory."""
    with vram.private_keeper():
        with multiprocessing.get_context("spawn").Pool(3) as pool:
            answers = pool.map(answer, range(3), chunksize=1)
        assert answers[0] == answers[1] == answers[2]
        entry = vram.entry("llama")
        print(f"3 processes answered {answers[0][4:]} from one copy of {entry.nbytes >> 20} MiB, which outlives them")


if __name__ == "__main__":
    main()
