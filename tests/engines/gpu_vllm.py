"""``vllm serve`` on a GPU with our loader, weight transfer and sleep, over HTTP: ``python tests/engines/gpu_vllm.py``.

By hand, on a machine whose Python has vLLM 0.33, vram and a GPU, with nothing at port 20000 and those above. With CUDA
graphs; each figure is printed with what was compared. Weights of two seeds answer differently from the first token on,
so that an answer by half an update is seen.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import servers
import torch
from check_vllm import ask, train
from servers import Keeper, Server, Servers, post

import vram

SERVE = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"
OPTIONS = "--dtype bfloat16 --max-model-len 512 --max-num-seqs 8 --served-model-name m --no-enable-prefix-caching "
OPTIONS += "--disable-uvicorn-access-log --gpu-memory-utilization 0.2"
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "NCCL_NVLS_ENABLE": "0", "VRAM_MULTICAST": "off",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
}  # fmt: skip
GRAPHS = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}')
TRANSFER = ("--weight-transfer-config", '{"backend": "vram"}')
SLEEP = ("--enable-sleep-mode", "--sleep-mode-backend", "vram", "--worker-cls", "vram.engines.vllm_sleep.VramWorker")
UPDATES = 20


def say(what: str) -> None:
    """Print at once."""
    print(what, flush=True)


def started(engines: Servers, place: Path, *options: str) -> tuple[Server, float]:
    """Start a server; return it when it answers, and the seconds until then."""
    begun = time.monotonic()
    server = engines.start("model", place, *options, *GRAPHS).ready()
    return server, time.monotonic() - begun


def timed(act: Callable[[], Any]) -> float:
    """Return the seconds that something takes."""
    begun = time.monotonic()
    act()
    return time.monotonic() - begun


def updates(server: Server, place: Path, keeper: Keeper, first: Any) -> None:
    """Send weights again and again while requests run, and look at every answer."""

    class Places:
        first = place

    trainer, model = train(server, Places, keeper, "gpu")  # type: ignore[arg-type]
    model.to("cuda:0")
    answers: list[Any] = []
    is_over = threading.Event()

    def request() -> None:
        while not is_over.is_set():
            try:
                answers.append(ask(server))
            except RuntimeError as error:  # paused
                if not str(error).startswith("503"):
                    raise

    threads = [threading.Thread(target=request) for _ in range(3)]
    states = [{name: tensor.cuda() for name, tensor in servers.weights(seed).items()} for seed in (0, 1)]
    model.load_state_dict(states[1])
    took = [timed(trainer.send_weights)]
    second = ask(server)
    assert all(one != other for one, other in zip(first, second, strict=True))
    for thread in threads:
        thread.start()
    for number in range(UPDATES):
        model.load_state_dict(states[number % 2])
        post(f"{server.url}/pause?mode=wait", {})
        took.append(timed(trainer.send_weights))
        post(f"{server.url}/resume", {})
        enough, until = len(answers) + len(threads), time.monotonic() + servers.ANSWER
        while len(answers) < enough and time.monotonic() < until:
            time.sleep(0.01)
    assert ask(server) == (first if UPDATES % 2 else second)
    is_over.set()
    for thread in threads:
        thread.join()
    wrong = [one for answer in answers for one, *right in zip(answer, first, second, strict=True) if one not in right]
    nbytes, middle = sum(one.nbytes for one in states[0].values()), sorted(took)[len(took) // 2]
    say(
        f"weight transfer over HTTP, {nbytes >> 20} MiB, the trainer on the same GPU: {UPDATES} updates beside requests"
    )
    say(f"  {1e3 * middle:.0f} ms, the first {1e3 * took[0]:.0f}; of {len(answers)} answers {len(wrong)} are mixed")
    assert answers
    assert not wrong


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="updates,shared,sleep")
    parts = parser.parse_args().parts.split(",")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, "first")
        servers.checkpoint(place / "model", 0)
        with servers.keeper_at(Path(directory)) as keeper:
            os.environ["VRAM_KEEPER"] = keeper.path
            command = [sys.executable, "-c", SERVE, "serve"]
            with Servers(command, OPTIONS, {**ENVIRONMENT, "VRAM_KEEPER": keeper.path}) as engines:
                plain, seconds = started(engines, place, *TRANSFER)
                first = ask(plain)
                say(f"plain: serves after {seconds:.1f} s")
                if "updates" in parts:
                    updates(plain, place, keeper, first)
                plain.kill()
                if "shared" in parts:
                    shared(engines, place, keeper, first)
                if "sleep" in parts:
                    sleeping(engines, place, first)


def shared(engines: Servers, place: Path, keeper: Keeper, first: Any) -> None:
    """Two engines on one copy, of which one is killed and starts again."""
    one, published = started(engines, place, "--load-format", "vram")
    other, attached = started(engines, place, "--load-format", "vram")
    assert [ask(one), ask(other)] == [first, first]
    assert len(vram.list_entries("vllm/", keeper=keeper.path)) == 1
    one.kill()
    assert ask(other) == first
    again, back = started(engines, place, "--load-format", "vram")
    assert ask(again) == first
    keeper.kill()
    assert [ask(again), ask(other)] == [first, first]
    keeper.start()
    assert [ask(again), ask(other)] == [first, first]
    say(f"load format vram, CUDA graphs: serves after {published:.1f} s as it publishes, {attached:.1f} s attached, "
        f"{back:.1f} s after SIGKILL of one; the same tokens, also with the keeper killed")  # fmt: skip
    again.kill()
    other.kill()


def sleeping(engines: Servers, place: Path, first: Any) -> None:
    """Sleep at levels 1 and 2, and by vLLM's own backend."""
    for name, options in (("vram", SLEEP), ("vLLM's own", ("--enable-sleep-mode",))):
        server, _ = started(engines, place, *options)
        assert ask(server) == first
        for level in (1, 1, 2):
            before = torch.cuda.mem_get_info(0)[0]
            asleep = timed(partial(post, f"{server.url}/sleep?level={level}", {}))
            freed = torch.cuda.mem_get_info(0)[0] - before
            awake = timed(partial(post, f"{server.url}/wake_up", {}))
            if level == 2:
                post(f"{server.url}/collective_rpc", {"method": "reload_weights"})
            assert ask(server) == first, f"{name}, level {level}"
            say(f"sleep by {name}, level {level}: {asleep:.2f} s, {freed >> 20} MiB free; awake in {awake:.2f} s")
        server.kill()


if __name__ == "__main__":
    main()
