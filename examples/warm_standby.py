"""A warm standby: it has imported everything, has no GPU context and no memory, and serves when the other is killed.

`warm_standby.py cuda:0 7b` measures it with a model of 13 GiB.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import vram

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"  # or "cuda:0"
SHAPE = {} if sys.argv[2:] == ["7b"] else {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 999}


def build() -> PreTrainedModel:
    """Make the model of its configuration."""
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=torch.bfloat16)


def token(model: PreTrainedModel) -> int:
    """Compute the next token."""
    with torch.inference_mode():
        return int(model.eval()(torch.tensor([[1, 2, 3]], device=DEVICE)).logits[0, -1].argmax())


def serve(pipe: Connection) -> None:
    """Publish a model, whose memory is the entry's from then on, and serve it until killed."""
    with torch.device(DEVICE):
        model = build()
    vram.publish("llama", model, consume=True)
    pipe.send(token(model))
    pipe.recv()


def stand_by(pipe: Connection, other: Connection) -> None:
    """Wait for the end of the other; then attach what it published, and go on."""
    pipe.send(other.recv())
    with suppress(EOFError):  # it was killed
        other.recv()
    times = [time.monotonic()]
    with vram.attach("llama") as lease:
        times.append(time.monotonic())
        model = lease.module(build)
    times.append(time.monotonic())
    pipe.send((token(model), *times, time.monotonic()))


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with vram.private_keeper():
        (ours, theirs), (life, serving_end) = context.Pipe(), context.Pipe()
        serving = context.Process(target=serve, args=(serving_end,))
        serving.start()
        serving_end.close()  # the serving process alone has it now
        standby = context.Process(target=stand_by, args=(theirs, life))
        standby.start()
        said, killed = ours.recv(), time.monotonic()
        serving.kill()
        answer, *times = ours.recv()
        standby.join()
        parts = ", ".join(f"{now - before:.3f}" for before, now in zip([killed, *times], times, strict=False))
        print(f"{times[-1] - killed:.2f} s from SIGKILL to the token, the same: {answer == said}")
        print(f"noticed, attached, the model made, the token computed: {parts} s")
