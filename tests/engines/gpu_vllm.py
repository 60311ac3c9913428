"""``vllm serve`` on GPUs with our loader, weight transfer and sleep, beside vLLM's own, over HTTP:
``python tests/engines/gpu_vllm.py``.

By hand, on a machine whose Python has vLLM 0.33, vram and a GPU (two for the parts `nccl` and `pair`), with nothing at
port 20000 and those above. With CUDA graphs; each figure is printed with what was compared. Weights of two seeds answer
differently from the first token on, so that an answer by half an update is seen.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

import servers
import torch
from check_vllm import ask
from safetensors.torch import load_file
from servers import Keeper, Server, Servers, post
from transformers import LlamaForCausalLM

import vram

RUN = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"
OPTIONS = "--dtype bfloat16 --max-model-len 512 --max-num-seqs 8 --served-model-name m --no-enable-prefix-caching "
OPTIONS += "--gpu-memory-utilization 0.3 --kv-cache-memory-bytes 8589934592"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "NCCL_NVLS_ENABLE": "0", "VRAM_MULTICAST": "off",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "NCCL_SOCKET_IFNAME": "lo", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}  # fmt: skip
GRAPHS = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}')
SHARED = ("--load-format", "vram")
CACHED = ("--load-format", "ipc_cache", "--model-loader-extra-config", '{"fallback": false}')
SLEEPS = ("--enable-sleep-mode",)
OURS = ("--sleep-mode-backend", "vram", "--worker-cls", "vram.engines.vllm_sleep.VramWorker")
PAIR = ("--tensor-parallel-size", "2", "--disable-custom-all-reduce")
UPDATES = 20
RESTING = 60  # answers with the same weights, by as many requests at a time as beside updates


def say(what: str) -> None:
    """Print at once."""
    print(what, flush=True)


def timed(act: Callable[[], Any]) -> float:
    """Return the seconds that something takes."""
    begun = time.monotonic()
    act()
    return time.monotonic() - begun


class Run:
    """A checkpoint of each seed, the engines that serve the first, and what they answer."""

    def __init__(self, engines: Servers, place: Path, keeper: Keeper) -> None:
        self.engines, self.place, self.keeper = engines, place, keeper
        plain, seconds = self.started()
        self.first = ask(plain)
        say(f"plain: serves after {seconds}")
        plain.kill()

    def started(self, *options: str) -> tuple[Server, str]:
        """Start a server on the first checkpoint; return it when it answers, and the seconds that this took."""
        begun = time.monotonic()
        server = self.engines.start("model", self.place / "0", *options, *GRAPHS).ready()
        loaded = re.findall(r"Model loading took .*?([0-9.]+) seconds", "".join(line for _, line in server.log))
        return server, f"{time.monotonic() - begun:.1f} s, of which loading {', '.join(loaded)} s"

    def trainer(self, backend: str, server: Server, model: Any) -> Any:
        """Return what sends the weights of a model to a server."""
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        from vram.engines.vllm import register
        from vram.engines.vllm_transfer import VramTrainerInitInfo

        register()
        client = HTTPVLLMWeightSyncClient(server.url, timeout=servers.ANSWER)
        info = {
            "vram": lambda: VramTrainerInitInfo("policy", self.keeper.path, servers.ANSWER, rank=0),
            "ipc": lambda: IPCTrainerInitInfo(rank=0),
            "nccl": lambda: NCCLTrainerInitInfo("127.0.0.1", 29511, 2, rank=0),
        }[backend]()
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))

    def updates(self, backend: str, device: str) -> None:
        """Send weights again and again while requests run, and look at every answer."""
        server, _ = self.started("--weight-transfer-config", f'{{"backend": "{backend}"}}')
        torch.cuda.set_device(device)
        model = LlamaForCausalLM.from_pretrained(self.place / "0" / "model", dtype=torch.bfloat16).to(device)
        states = [load_file(self.place / str(seed) / "model" / "model.safetensors", device) for seed in (0, 1)]
        trainer = self.trainer(backend, server, model)

        def send(seed: int) -> float:
            model.load_state_dict(states[seed])
            torch.cuda.synchronize()
            return timed(trainer.send_weights)

        with requests(server) as at_rest:  # a batch of another size may round in another way, and so answer differently
            await_more(at_rest, RESTING)
        took = [send(1)]
        second = ask(server)
        assert all(one != other for one, other in zip(self.first, second, strict=True))
        with requests(server) as other:
            await_more(other, RESTING)
        right = [{tuple(answer[at]) for _, _, answer in at_rest + other} for at in range(len(second))]
        pauses: list[tuple[float, float]] = []
        with requests(server) as answers:
            for number in range(UPDATES):
                begun = time.monotonic()
                post(f"{server.url}/pause?mode=wait", {})
                took.append(send(number % 2))
                post(f"{server.url}/resume", {})
                pauses.append((begun, time.monotonic()))
                await_more(answers, 3)
        last = ask(server)
        wrong = 0
        for begun, ended, answer in answers:
            beside = [number for number, (since, until) in enumerate(pauses) if begun < until and since < ended]
            for at, one in enumerate(answer):
                if tuple(one) not in right[at]:
                    wrong += 1
                    same = [sum(1 for _ in takewhile(bool, map(eq, one, of))) for of in sorted(right[at])]
                    say(f"  prompt {at}, beside updates {beside}: leaves those at rest after {same} tokens: {one}")
        nbytes, times = sum(one.nbytes for one in states[0].values()), sorted(took[1:])
        say(f"weight transfer by {backend}, {nbytes >> 20} MiB, the trainer on {device}: {UPDATES} updates, "
            f"{1e3 * times[len(times) // 2]:.0f} ms ({1e3 * times[0]:.0f} to {1e3 * times[-1]:.0f}), the first "
            f"{1e3 * took[0]:.0f}; of {len(answers)} x {len(second)} answers {wrong} are neither weights'; at rest "
            f"there are {[len(one) for one in right]}")  # fmt: skip
        server.kill()
        assert last == (self.first if UPDATES % 2 else second)
        assert not wrong

    def shared(self) -> None:
        """Two engines on one copy, of which one is killed and starts again."""
        one, published = self.started(*SHARED)
        other, attached = self.started(*SHARED)
        assert [ask(one), ask(other)] == [self.first, self.first]
        assert len(vram.list_entries("vllm/", keeper=self.keeper.path)) == 1
        one.kill()
        assert ask(other) == self.first
        again, back = self.started(*SHARED)
        assert ask(again) == self.first
        self.keeper.kill()
        assert [ask(again), ask(other)] == [self.first, self.first]
        self.keeper.start()
        assert [ask(again), ask(other)] == [self.first, self.first]
        say(f"load format vram, CUDA graphs: serves after {published} as it publishes, {attached} attached, {back} "
            f"after SIGKILL of one; the same tokens, also with the keeper killed")  # fmt: skip
        again.kill()
        other.kill()

    def cached(self) -> None:
        """Two engines on vLLM's own cache of weights."""
        with preloaded(self.place / "0") as seconds:
            (one, first), (other, second) = self.started(*CACHED), self.started(*CACHED)
            assert [ask(one), ask(other)] == [self.first, self.first]
            say(f"ipc_cache: preload ready after {seconds:.1f} s; serve after {first} and {second}")
            one.kill()
            other.kill()

    def sleeping(self) -> None:
        """Sleep at levels 1 and 2, by both backends; and beside shared weights, which stay."""
        ways = {"vram": (*SLEEPS, *OURS), "vLLM's own": SLEEPS, "vram, weights shared": (*SLEEPS, *OURS, *SHARED)}
        for name, options in ways.items():
            server, _ = self.started(*options)
            assert ask(server) == self.first
            for level in (1, 1, 1) if "shared" in name else (1, 1, 1, 2):
                before = torch.cuda.mem_get_info(0)[0]
                asleep = timed(partial(post, f"{server.url}/sleep?level={level}", {}))
                freed = torch.cuda.mem_get_info(0)[0] - before
                awake = timed(partial(post, f"{server.url}/wake_up", {}))
                if level == 2:
                    post(f"{server.url}/collective_rpc", {"method": "reload_weights"})
                assert ask(server) == self.first, f"{name}, level {level}"
                say(f"sleep by {name}, level {level}: {asleep:.3f} s, {freed >> 20} MiB free; awake in {awake:.3f} s")
            server.kill()

    def pair(self) -> None:
        """One engine on two GPUs, whose ranks publish and attach a part each."""
        plain, seconds = self.started(*PAIR)
        answer = ask(plain)
        plain.kill()
        one, published = self.started(*PAIR, *SHARED)
        assert ask(one) == answer
        one.kill()
        again, attached = self.started(*PAIR, *SHARED)
        assert ask(again) == answer
        again.kill()
        names = [entry.name for entry in vram.list_entries("vllm/", keeper=self.keeper.path)]
        say(f"two GPUs: plain after {seconds}, publishing {published}, attached after SIGKILL {attached}, with the "
            f"same tokens; entries: {names}")  # fmt: skip


@contextmanager
def requests(server: Server) -> Iterator[list[tuple[float, float, list[list[int]]]]]:
    """Ask from three threads for a block; yield when each began, when it ended, and its answers, as they come."""
    answers: list[tuple[float, float, list[list[int]]]] = []
    is_over = threading.Event()

    def request() -> None:
        while not is_over.is_set():
            begun = time.monotonic()
            try:
                answer = ask(server)
                answers.append((begun, time.monotonic(), answer))
            except RuntimeError as error:  # paused
                if not str(error).startswith("503"):
                    raise

    threads = [threading.Thread(target=request) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def await_more(answers: list[Any], count: int) -> None:
    """Wait for so many more answers."""
    enough, until = len(answers) + count, time.monotonic() + servers.ANSWER
    while len(answers) < enough:
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def preloaded(cwd: Path) -> Iterator[float]:
    """Run vLLM's daemon for weights for a block; yield the seconds until it was ready."""
    command = [sys.executable, "-c", RUN, "preload", "--model", "model", "--weight-cache-health-port", "20999"]
    begun = time.monotonic()
    daemon = subprocess.Popen([*command, *OPTIONS.split(), *GRAPHS], cwd=cwd, env={**os.environ, **ENVIRONMENT})
    try:
        while True:
            assert daemon.poll() is None
            assert time.monotonic() - begun < servers.START
            try:
                with urllib.request.urlopen("http://127.0.0.1:20999/health", timeout=5):
                    break
            except OSError:
                time.sleep(0.2)
        yield time.monotonic() - begun
    finally:
        daemon.terminate()
        daemon.wait(servers.ANSWER)


def main() -> None:
    """Run all of it, or some parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="shared,cached,sleeping,vram,ipc,nccl,pair")
    parser.add_argument("--layers", type=int, default=12, help="each of 354 MB")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and servers end with their blocks
    servers.HIDDEN, servers.INNER, servers.HEADS, servers.KV_HEADS = 4096, 11008, 32, 8
    servers.LAYERS = given.layers
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        for seed in (0, 1):
            servers.checkpoint(Path(directory, str(seed), "model"), seed)
        with servers.keeper_at(Path(directory)) as keeper:
            command, environment = [sys.executable, "-c", RUN, "serve"], {**ENVIRONMENT, "VRAM_KEEPER": keeper.path}
            os.environ.update(environment)
            with Servers(command, f"{OPTIONS} --disable-uvicorn-access-log", environment) as engines:
                run = Run(engines, Path(directory), keeper)
                for part in given.parts.split(","):
                    try:
                        if part in ("vram", "ipc", "nccl"):
                            run.updates(part, "cuda:1" if part == "nccl" else "cuda:0")
                        else:
                            getattr(run, part)()
                    except Exception as error:  # the other parts go on
                        failed += 1
                        say(f"{part} FAILED: {type(error).__name__}: {str(error)[-3000:]}")
                        engines.kill_all()
                    torch.cuda.empty_cache()
    sys.exit(failed)


if __name__ == "__main__":
    main()
