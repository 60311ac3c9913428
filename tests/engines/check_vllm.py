"""``vllm serve`` on a CPU with our loader and our weight transfer, over HTTP: ``make test-adapters``.

The servers run without oneDNN's AVX-512 kernels where a test does not ask for them: those pack the weights of a linear
layer into memory of their own when they are loaded, and nothing is left to share. With AVX2 they do not.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import servers
import torch
from servers import PROMPTS, TOKENS, Keeper, Server, Servers, post

import vram

LOADING = "Starting to load model"
LOADED = "KV cache layout"
COPY = ("--load-format", "vram", "--model-loader-extra-config", '{"mode": "copy"}')
TRANSFER = ("--weight-transfer-config", '{"backend": "vram"}')
OPTIONS = "--dtype bfloat16 --max-model-len 512 --max-num-seqs 4 --enforce-eager --num-gpu-blocks-override 64 "
OPTIONS += "--served-model-name m --no-enable-prefix-caching --disable-uvicorn-access-log"
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "ONEDNN_MAX_CPU_ISA": "AVX2",
}  # fmt: skip


def ask(server: Server) -> list[list[int]]:
    """Return the tokens of the greedy answer to each prompt."""
    options = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    replies = (post(server.url + "/v1/completions", {"prompt": prompt, **options}) for prompt in PROMPTS)
    return [reply["choices"][0]["token_ids"] for reply in replies]


@dataclass
class Plain:
    """Two engines with vLLM's own loader, on two checkpoints of the same shapes."""

    server: Server
    first: list[list[int]]
    second: list[list[int]]
    resident: int
    seconds: float


@dataclass
class Checkpoints:
    """Two checkpoints whose path is ``model``, each in a directory of its own, and the bytes of the weights of one."""

    first: Path
    second: Path
    nbytes: int


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    made = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    nbytes = [servers.checkpoint(one / "model", seed) for seed, one in enumerate(made)]
    return Checkpoints(*made, nbytes[0])


@pytest.fixture(scope="module")
def keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keeper]:
    with servers.keeper_at(tmp_path_factory.mktemp("keeper")) as made:
        yield made


@pytest.fixture(scope="module")
def engines(keeper: Keeper) -> Iterator[Servers]:
    command = [Path(sys.executable).with_name("vllm"), "serve"]
    with Servers(command, OPTIONS, {**ENVIRONMENT, "VRAM_KEEPER": keeper.path}) as made:
        yield made


@pytest.fixture(scope="module")
def plain(engines: Servers, checkpoints: Checkpoints) -> Plain:
    first = engines.start("model", checkpoints.first, *TRANSFER)
    second = engines.start("model", checkpoints.second)
    answers = [ask(one.ready()) for one in (first, second)]
    assert answers[0] != answers[1]
    found = Plain(first, *answers, first.resident() + second.resident(), first.between(LOADING, LOADED))
    second.kill()
    return found


@pytest.fixture(scope="module")
def pair(engines: Servers, checkpoints: Checkpoints, plain: Plain) -> list[Server]:
    """Two engines on the first checkpoint that start at once."""
    started = [engines.start("model", checkpoints.first, "--load-format", "vram") for _ in range(2)]
    return [one.ready() for one in started]


def holders(keeper: Keeper) -> int:
    return len(vram.holders(keeper=keeper.path))


def entries(keeper: Keeper) -> list[str]:
    return sorted(one.name for one in vram.list_entries("vllm/", keeper=keeper.path))


def test_two_engines_have_one_copy_of_the_weights(
    pair: list[Server], plain: Plain, keeper: Keeper, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [ask(one) for one in pair] == [plain.first, plain.first]
    assert (len(entries(keeper)), holders(keeper)) == (1, 2)
    resident = sum(one.resident() for one in pair)
    say(capsys, f"weights {mib(checkpoints.nbytes)}; two engines, PSS without files: plain {mib(plain.resident)}, "
        f"shared {mib(resident)}, {mib(plain.resident - resident)} less")  # fmt: skip
    assert plain.resident - resident > 0.6 * checkpoints.nbytes


def test_an_engine_that_is_killed_takes_nothing_along_and_starts_again_sooner(
    engines: Servers,
    pair: list[Server],
    plain: Plain,
    keeper: Keeper,
    checkpoints: Checkpoints,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair[0].kill()
    assert ask(pair[1]) == plain.first
    pair[0] = engines.start("model", checkpoints.first, "--load-format", "vram").ready()
    assert ask(pair[0]) == plain.first
    assert holders(keeper) == 2
    seconds = pair[0].between(LOADING, LOADED)
    say(capsys, f"the load stage: plain {plain.seconds:.2f} s, attached {seconds:.2f} s")
    assert seconds < plain.seconds / 2


def test_engines_serve_on_when_their_keeper_is_killed(pair: list[Server], plain: Plain, keeper: Keeper) -> None:
    before = entries(keeper)
    keeper.kill()
    assert [ask(one) for one in pair] == [plain.first, plain.first]
    keeper.start()
    assert entries(keeper) == before
    assert [ask(one) for one in pair] == [plain.first, plain.first]


def test_other_weights_under_the_same_path_are_those_that_are_served(
    engines: Servers, pair: list[Server], plain: Plain, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    shutil.copytree(checkpoints.first / "model", tmp_path / "model")
    other = engines.start("model", checkpoints.second, "--load-format", "vram")
    copy = engines.start(str(tmp_path / "model"), tmp_path, "--load-format", "vram")
    assert ask(copy.ready()) == plain.first
    assert ask(other.ready()) == plain.second, "a relative path means another directory"
    other.kill()
    copy.kill()
    servers.checkpoint(tmp_path / "model", seed=1)
    overwritten = engines.start(str(tmp_path / "model"), tmp_path, "--load-format", "vram").ready()
    assert ask(overwritten) == plain.second, "the file was written anew"
    overwritten.kill()
    assert ask(pair[0]) == plain.first


def test_new_weights_from_a_trainer(
    plain: Plain, keeper: Keeper, checkpoints: Checkpoints, capsys: pytest.CaptureFixture[str]
) -> None:
    import time

    trainer, model = train(plain.server, checkpoints, keeper, "first")
    assert ask(plain.server) == plain.first
    model.load_state_dict(servers.weights(1))
    begun = time.monotonic()
    trainer.send_weights()
    say(capsys, f"weight transfer over HTTP: {time.monotonic() - begun:.2f} s")
    assert ask(plain.server) == plain.second
    model.load_state_dict(servers.weights(0))
    trainer.send_weights()
    assert ask(plain.server) == plain.first


def test_a_copy_takes_new_weights_and_those_of_the_disk_again(
    engines: Servers, plain: Plain, pair: list[Server], keeper: Keeper, checkpoints: Checkpoints
) -> None:
    before = entries(keeper)
    server = engines.start("model", checkpoints.first, *COPY, *TRANSFER)
    shared = engines.start("model", checkpoints.first, "--load-format", "vram", *TRANSFER)
    assert ask(server.ready()) == plain.first
    with pytest.raises(RuntimeError, match="no server came up"):
        shared.ready()
    assert shared.said('ValueError: a weight transfer writes .*"mode": "copy"'), "it is told at once"
    trainer, model = train(server, checkpoints, keeper, "copy")
    model.load_state_dict(servers.weights(1))
    trainer.send_weights()
    assert ask(server) == plain.second
    post(server.url + "/collective_rpc", {"method": "reload_weights"})
    assert ask(server) == plain.first
    assert ask(pair[0]) == plain.first, "what others share is what it was"
    assert entries(keeper) == before
    server.kill()


def test_weights_that_a_kernel_has_packed_are_not_shared(
    engines: Servers, keeper: Keeper, checkpoints: Checkpoints
) -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("without AVX-512 oneDNN packs nothing here")
    kernels = {"ONEDNN_MAX_CPU_ISA": "DEFAULT"}  # their sums differ in the last bit, and so may tokens
    unshared = ("--load-format", "vram", "--model-loader-extra-config", '{"name": "packed"}')
    started = [engines.start("model", checkpoints.first, *one, environment=kernels) for one in ((), unshared)]
    plain, server = (one.ready() for one in started)
    assert ask(server) == ask(plain)
    assert server.said("WARNING.*not shared")
    assert vram.list_entries("packed/", keeper=keeper.path) == []


def train(server: Server, checkpoints: Checkpoints, keeper: Keeper, name: str) -> tuple[Any, torch.nn.Module]:
    """Return a trainer that sends to a server, and its model, which has the first checkpoint's weights."""
    from transformers import LlamaForCausalLM
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from vram.engines.vllm import register
    from vram.engines.vllm_transfer import VramTrainerInitInfo

    register()
    model = LlamaForCausalLM.from_pretrained(checkpoints.first / "model", dtype=torch.bfloat16)
    client = HTTPVLLMWeightSyncClient(server.url, timeout=servers.ANSWER)
    info = VramTrainerInitInfo(f"policy/{name}", keeper.path, servers.ANSWER, rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model)), model


def mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.0f} MiB"


def say(capsys: pytest.CaptureFixture[str], text: str) -> None:
    """Print a figure also where the test passes."""
    with capsys.disabled():
        print(f"\n  {text}", flush=True)
