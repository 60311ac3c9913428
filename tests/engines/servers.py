"""Small models, a keeper, and servers of engines over HTTP, for the checks with real engines.

All of it runs on loopback, ends with the test process, and has deadlines. Models are Llama shapes with random weights:
two seeds give two checkpoints with equal shapes, whose tokens at temperature 0 differ from the first one on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

START = 240.0  # seconds for a server to answer
ANSWER = 60.0  # seconds for a reply
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, WORDS = 1024, 2816, 12, 16, 4, 4096
PROMPTS = [[5, 6, 7, 8, 9], list(range(100, 140)), list(range(4000, 3900, -3))]
TOKENS = 12  # of the answer to each prompt


def weights(seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return random weights in the names and shapes of a checkpoint. Those of a seed depend on the device."""
    random = torch.Generator(device).manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=random, device=device) * 0.05).to(torch.bfloat16)

    keys = HIDDEN // HEADS * KV_HEADS
    norm = torch.ones(HIDDEN, dtype=torch.bfloat16, device=device)
    made = {"model.embed_tokens.weight": some(WORDS, HIDDEN), "lm_head.weight": some(WORDS, HIDDEN)}
    made["model.norm.weight"] = norm
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in (("q", HIDDEN), ("k", keys), ("v", keys), ("o", HIDDEN)):
            made[f"{at}self_attn.{name}_proj.weight"] = some(rows, HIDDEN)
        made[at + "mlp.gate_proj.weight"], made[at + "mlp.up_proj.weight"] = some(INNER, HIDDEN), some(INNER, HIDDEN)
        made[at + "mlp.down_proj.weight"] = some(HIDDEN, INNER)
        made[at + "input_layernorm.weight"] = made[at + "post_attention_layernorm.weight"] = norm
    return {name: tensor.clone() for name, tensor in made.items()}


def checkpoint(directory: Path, seed: int, device: str = "cpu") -> int:
    """Write a checkpoint with its tokenizer, over one that is there; return the bytes of its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = weights(seed, device)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS, "vocab_size": WORDS, "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    words = {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(WORDS)}, "unk_token": "t0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    options = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t1", "eos_token": "t2", "unk_token": "t0"}
    for name, value in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", options)):
        (directory / f"{name}.json").write_text(json.dumps(value))
    return sum(one.nbytes for one in tensors.values())


def post(url: str, body: Any) -> Any:
    """Return the JSON of a reply; RuntimeError with what the server said if it refuses."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER) as reply:
            return json.loads(reply.read() or "null")
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{error.code} {error.read().decode()}") from None


class Server:
    """A process that serves, its log with the time of each line, and the processes below it."""

    def __init__(self, command: list[Any], port: int, cwd: Path, environment: Mapping[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log: list[tuple[float, str]] = []
        self._killed = False
        address = ["--host", "127.0.0.1", "--port", str(port)]
        self._process = subprocess.Popen(
            [*map(str, command), *address], cwd=cwd, env={**os.environ, **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.log.append((time.monotonic(), line))

    def ready(self) -> Server:
        """Wait until it answers."""
        until = time.monotonic() + START
        while time.monotonic() < until and self._process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return self
            except OSError:
                time.sleep(0.2)
        raise RuntimeError("no server came up:\n" + "".join(self.lines(60)))

    def has_ended(self) -> bool:
        """Whether its process is gone."""
        return self._process.poll() is not None

    def is_killed(self) -> bool:
        """Whether it was ended with :meth:`kill`."""
        return self._killed

    def lines(self, count: int) -> list[str]:
        """Return the last lines of its log, the start of each: one may have all options in it."""
        return [line.rstrip("\n")[:400] + "\n" for _, line in self.log[-count:]]

    def said(self, pattern: str) -> list[float]:
        """Return when lines came that have a pattern in them."""
        return [when for when, line in list(self.log) if re.search(pattern, line)]

    def between(self, first: str, then: str) -> float:
        """Return the seconds from the first line with a pattern to the next one with another."""
        begun = self.said(first)[0]
        return next(when for when in self.said(then) if when >= begun) - begun

    def pids(self) -> list[int]:
        """Return this process and all below it."""
        found = [self._process.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())
        return found

    def resident(self) -> int:
        """Return bytes of memory, its proportional part where it is shared, without that of files."""
        total = 0
        for pid in self.pids():
            found = dict(re.findall(r"^(Pss_\w+): +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M))
            total += int(found["Pss_Anon"]) + int(found["Pss_Shmem"])
        return total << 10

    def kill(self) -> None:
        """End it and all below it with SIGKILL, at once; show the end of its log if it was not there any more."""
        if not self._killed and self._process.poll() is not None:
            print(f"{self.url} had ended:\n", *self.lines(60))
        for pid in self.pids() if self._process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        self._killed = True
        self._process.wait(ANSWER)


class Servers:
    """Servers of one engine, each at a port of its own; all end with the block."""

    def __init__(self, command: list[Any], options: str, environment: Mapping[str, str]) -> None:
        self._command, self._options, self._environment = command, options.split(), environment
        self._all: list[Server] = []

    def start(self, model: str, cwd: Path, *options: str, environment: Mapping[str, str] | None = None) -> Server:
        """Start one, and return before it answers."""
        made = Server(
            [*self._command, model, *self._options, *options], 20000 + len(self._all), cwd,
            {**self._environment, **(environment or {})},
        )  # fmt: skip
        self._all.append(made)
        return made

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    def running(self) -> list[Server]:
        """Return those that were not killed, ended or not."""
        return [one for one in self._all if not one.is_killed()]

    def kill_all(self) -> None:
        """End all that run."""
        for one in self._all:
            one.kill()


class Keeper:
    """A keeper at a path, in a process that can be killed."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.start()

    def start(self) -> None:
        """Start it, also after it was killed."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vram", "keep", "--socket", self.path], start_new_session=True
        )
        until = time.monotonic() + ANSWER
        while not self._serves():
            assert time.monotonic() < until
            time.sleep(0.05)

    def _serves(self) -> bool:
        import vram

        try:
            vram.statistics(keeper=self.path)
        except vram.errors.VramError:
            return False
        return True

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        self._process.wait(ANSWER)


@contextmanager
def keeper_at(directory: Path) -> Iterator[Keeper]:
    """Run a keeper for a block; what is kept ends with it."""
    made = Keeper(directory / "keeper")
    try:
        yield made
    finally:
        subprocess.run(
            [sys.executable, "-m", "vram", "stop", "--socket", made.path],
            check=False,
            capture_output=True,
            timeout=ANSWER,
        )
        made.kill()
