"""``sglang.launch_server`` on a GPU with our weight loader and our transport of its weight cache, beside its own:
``python tests/engines/gpu_sglang.py``.

By hand, on a machine whose Python has SGLang 0.5.23, vram and a GPU, with nothing at port 20000 and those above. With
torch's own kernels and no CUDA graphs, so that a build of SGLang's kernels for this torch is not needed; each figure is
printed with what was compared. With ``--device cpu`` the plain part and that of updates run at a small shape.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import servers
import torch
from check_sglang import ENVIRONMENT, LOADER, ask, client
from safetensors.torch import load_file
from servers import Server, Servers

import vram
from vram.engines.sglang import send_update

OPTIONS = "--dtype bfloat16 --attention-backend torch_native --sampling-backend pytorch --disable-radix-cache "
OPTIONS += "--context-length 512 --max-total-tokens 4096 --max-running-requests 8 --log-level-http warning "
ON = {"cpu": "--device cpu", "cuda": "--device cuda --disable-cuda-graph --mem-fraction-static 0.3"}
MODELS = Path(importlib.util.find_spec("sglang").submodule_search_locations[0], "srt/models")
ON_GPU = {
    "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0",
    "VRAM_MULTICAST": "off", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1",
    # Each layer in plain torch; nothing is compiled by nvcc or Inductor while a server starts.
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch", "TORCHDYNAMO_DISABLE": "1", "SGLANG_CRASH_ON_JIT_COMPILE": "1",
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the other one is compiled with another torch
    "SGLANG_IS_FLASHINFER_AVAILABLE": "0", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    # Importing all models takes some seconds of each start.
    "SGLANG_DISABLED_MODEL_ARCHS": ",".join(one.stem for one in MODELS.glob("*.py") if one.stem != "llama"),
}  # fmt: skip
DAEMONS = {"vmm_fd": "vram.engines.sglang_daemon", "torch_ipc": "sglang.srt.weight_cache.daemon"}
CACHED = ("--weight-cache-mode", "client")
UPDATES = 10
START = 110.0  # seconds for a server to answer
PART = 200.0  # seconds for a part


def say(what: str) -> None:
    """Print at once."""
    print(what, flush=True)


def used(device: str) -> int:
    """Return the MiB of the GPU that all its processes use."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) >> 20


class Run:
    """A checkpoint of each seed, and what servers that were started on them answer."""

    def __init__(self, engines: Servers, daemons: dict[str, Servers], place: Path, device: str) -> None:
        self.engines, self.daemons, self.device = engines, daemons, device
        self.models = [place / str(seed) for seed in (0, 1)]
        self.answers: list[list[list[int]]] = []

    def started(self, models: list[Path], *options: str) -> tuple[list[Server], str]:
        """Start servers at the same time; return them when they answer, and the seconds and memory that this took."""
        before, begun = used(self.device), time.monotonic()
        made = [self.engines.start(str(model), model, *options) for model in models]
        seconds = [since(begun, one.ready()) for one in made]
        more = (used(self.device) - before) // len(made)
        return made, f"{' and '.join(seconds)}, each with {more} MiB more of the GPU"

    def plain(self) -> None:
        """Serve both checkpoints, and keep the server of the first one."""
        both, seconds = self.started(self.models, *LOADER)
        self.answers = [ask(one) for one in both]
        assert all(one != other for one, other in zip(*self.answers, strict=True))
        say(f"plain: two servers at a time serve after {seconds}")
        self.server = both[0]
        both[1].kill()

    def updates(self) -> None:
        """Send weights again and again, and look at the answers."""
        states = [load_file(model / "model.safetensors", self.device) for model in self.models]
        engine = client(self.server)
        begun = time.monotonic()
        vram.publish("policy", states[1], updatable=True)
        published = time.monotonic() - begun
        took, wrote, wrong = [], [], []
        for version in range(1, UPDATES + 2):
            begun = time.monotonic()
            if version > 1:
                with vram.update("policy") as arrays:
                    for name, tensor in states[version % 2].items():
                        arrays[name].torch().copy_(tensor)
                    if self.device == "cuda":
                        torch.cuda.synchronize()
            written = time.monotonic()
            send_update(engine, "policy", version)
            took.append(time.monotonic() - written)
            wrote.append(written - begun)
            if ask(self.server) != self.answers[version % 2]:
                wrong.append(version)
        nbytes = sum(one.nbytes for one in states[0].values())
        say(f"updates by vram, {nbytes >> 20} MiB on {self.device}: published in {published:.2f} s; {UPDATES} updates "
            f"written in {spread(wrote[1:])}, loaded in {spread(took[1:])}, the first in {1e3 * took[0]:.0f} ms; "
            f"answers that are not those of a server started on these weights: after updates {wrong}")  # fmt: skip
        assert not wrong
        if self.device == "cuda":
            self.others(engine, states)
        self.server.kill()
        del states
        vram.remove("policy")

    def others(self, engine: Any, states: list[dict[str, torch.Tensor]]) -> None:
        """Update in the two ways that SGLang has of its own for this."""

        def from_disk(seed: int) -> Any:
            return servers.post(f"{self.server.url}/update_weights_from_disk", {"model_path": str(self.models[seed])})

        def from_tensor(seed: int) -> Any:
            engine.begin_weight_update()
            said = engine.update_weights_from_tensor(list(states[seed].items()), flush_cache=True)
            engine.end_weight_update()
            return said

        for way in (from_disk, from_tensor):
            took = []
            for seed in (0, 1, 0, 1):
                begun = time.monotonic()
                said = way(seed)
                took.append(time.monotonic() - begun)
                assert said["success"], said
                assert ask(self.server) == self.answers[seed]
            say(f"  by SGLang's own update {way.__name__}: {spread(took[1:])}, the first in {1e3 * took[0]:.0f} ms")

    def cache(self) -> None:
        """Serve from a daemon's weights over vram."""
        self.cached("vmm_fd")

    def ipc(self) -> None:
        """Serve from a daemon's weights over SGLang's own transport."""
        self.cached("torch_ipc")

    def cached(self, transport: str) -> None:
        """Serve twice from the weights of a daemon; over vram one is killed and starts again, and the daemon ends."""
        before, begun = used(self.device), time.monotonic()
        daemon = self.daemons[transport].start(str(self.models[0]), self.models[0])
        await_line(daemon, "Listening on")
        assert daemon.said(f"Using transport backend: {transport}")
        say(f"weight cache over {transport}: the daemon is ready after {since(begun, daemon)}, with "
            f"{used(self.device) - before} MiB more of the GPU")  # fmt: skip
        (one, other), seconds = self.started([self.models[0]] * 2, *CACHED)
        for server in (one, other):
            assert server.said(f"transport={transport}"), "it loaded from disk"
            assert ask(server) == self.answers[0]
        say(f"  two servers at a time serve after {seconds}; the same tokens as from disk")
        one.kill()
        assert ask(other) == self.answers[0]
        if transport == "vmm_fd":
            (again,), seconds = self.started([self.models[0]], *CACHED)
            assert ask(again) == ask(other) == self.answers[0]
            say(f"  after SIGKILL of one it serves again after {seconds}; the same tokens from both")
            daemon.kill()
            again.kill()
            assert ask(other) == self.answers[0]
            say("  the same tokens after SIGKILL of the daemon, too")
        other.kill()
        daemon.kill()

    def last_lines(self) -> str:
        """Return the end of the log of each server that was not killed."""
        alive = [one for some in (self.engines, *self.daemons.values()) for one in some.running()]
        return "".join(f"--- {one.url}\n{''.join(one.lines(25))}" for one in alive)

    def kill_all(self) -> None:
        """End servers and daemons."""
        for some in (self.engines, *self.daemons.values()):
            some.kill_all()


def since(begun: float, server: Server) -> str:
    """Say how long ago that was, and how long a server or a daemon says that it loaded."""
    log = "".join(line for _, line in server.log)
    found = re.findall(r"Load weight end. elapsed=([0-9.]+) s|Model loaded from disk in ([0-9.]+)s", log)
    mapped = re.findall(r"mapped \d+ tensors.*time=([0-9.]+)s", log)
    seconds = ", ".join(one or another for one, another in found)
    said = (f", loading {seconds} s" if found else "") + (f", mapping {mapped[0]} s" if mapped else "")
    return f"{time.monotonic() - begun:.1f} s{said}"


def spread(seconds: list[float]) -> str:
    """Say the median, the least and the most of times."""
    times = sorted(1e3 * one for one in seconds)
    return f"{times[len(times) // 2]:.0f} ms ({times[0]:.0f} to {times[-1]:.0f})"


def await_line(server: Server, pattern: str) -> None:
    """Wait until a server's log has a pattern in it."""
    until = time.monotonic() + servers.START
    while not server.said(pattern):
        if time.monotonic() > until or server.has_ended():
            raise RuntimeError(f"no line with {pattern!r}:\n" + "".join(server.lines(60)))
        time.sleep(0.05)


def give_up(number: int, _: object) -> NoReturn:
    """End a part that takes too long, or with SIGTERM all of it; each server is killed by its block."""
    if number == signal.SIGTERM:
        sys.exit(143)
    raise TimeoutError("the part took too long")


def main() -> None:
    """Run all of it, or some parts after the plain one, whose answers they compare with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="plain,updates,cache,ipc")
    parser.add_argument("--device", choices=sorted(ON), default="cuda")
    parser.add_argument("--layers", type=int, default=6, help="each of 354 MB on a GPU")
    parser.add_argument("--patience", type=float, default=1, help="multiplies each deadline, for a slow machine")
    given = parser.parse_args()
    environment = ENVIRONMENT
    if given.device == "cuda":
        servers.HIDDEN, servers.INNER, servers.HEADS, servers.KV_HEADS = 4096, 11008, 32, 8
        servers.LAYERS, environment = given.layers, ON_GPU
    servers.START = START * given.patience
    signal.signal(signal.SIGTERM, give_up)
    signal.signal(signal.SIGALRM, give_up)
    failed = 0
    with tempfile.TemporaryDirectory() as directory, servers.keeper_at(Path(directory)) as keeper:
        os.environ.update({**environment, "VRAM_KEEPER": keeper.path})
        for seed in (0, 1):
            servers.checkpoint(Path(directory, str(seed)), seed, given.device)
        if given.device == "cuda":
            torch.cuda.empty_cache()
        with ExitStack() as stack:

            def of(module: str) -> Servers:
                command = [sys.executable, "-m", module, "--model-path"]
                return stack.enter_context(Servers(command, OPTIONS + ON[given.device], environment))

            daemons = {transport: of(module) for transport, module in DAEMONS.items()}
            run = Run(of("sglang.launch_server"), daemons, Path(directory), given.device)
            for part in dict.fromkeys(["plain", *given.parts.split(",")]):
                signal.setitimer(signal.ITIMER_REAL, PART * given.patience)
                try:
                    getattr(run, part)()
                except Exception as error:  # the other parts go on
                    failed += 1
                    say(f"{part} FAILED: {type(error).__name__}: {str(error)[-4000:]}\n{run.last_lines()}")
                    if part == "plain":
                        break  # nothing to compare with
                    run.kill_all()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
    sys.exit(failed)


if __name__ == "__main__":
    main()
