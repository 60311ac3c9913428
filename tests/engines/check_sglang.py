"""SGLang's server on a CPU with our weight loader, over HTTP: ``make test-adapters``.

Its weight cache needs a GPU: tests/engines/check_sglang_classes.py runs the transport of that without one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
import requests
import servers
import torch
from servers import PROMPTS, TOKENS, Server, Servers, post
from sglang.srt.entrypoints.http_server_engine import HttpServerEngineAdapter
from sglang.srt.server_args import ServerArgs

import vram
from vram.engines.sglang import send_update

OPTIONS = "--device cpu --dtype bfloat16 --attention-backend torch_native --sampling-backend pytorch "
OPTIONS += "--disable-radix-cache --context-length 512 --max-total-tokens 2048 --log-level info"
LOADER = ("--custom-weight-loader", "vram.engines.sglang.update")
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}


def ask(server: Server) -> list[list[int]]:
    """Return the tokens of the greedy answer to each prompt."""
    options = {"sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}
    replies = (post(server.url + "/generate", {"input_ids": prompt, **options}) for prompt in PROMPTS)
    return [reply["output_ids"] for reply in replies]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    patch = pytest.MonkeyPatch()
    with servers.keeper_at(tmp_path_factory.mktemp("keeper")) as keeper, patch.context() as patched:
        patched.setenv("VRAM_KEEPER", keeper.path)
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path"]
        with Servers(command, OPTIONS, ENVIRONMENT) as made:
            yield made


@pytest.fixture(scope="module")
def served(engines: Servers, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, list[list[list[int]]]]:
    """A server on the first of two checkpoints, and the answers of one that was started on each."""
    paths = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for seed, path in enumerate(paths):
        servers.checkpoint(path, seed)
    started = [engines.start(str(path), path, *LOADER) for path in paths]
    answers = [ask(one.ready()) for one in started]
    assert answers[0] != answers[1]
    started[1].kill()
    return started[0], answers


def client(server: Server) -> HttpServerEngineAdapter:
    """Return SGLang's client of a server; its own constructor would start one."""
    made = HttpServerEngineAdapter.__new__(HttpServerEngineAdapter)
    made.server_args = ServerArgs(model_path="dummy", host="127.0.0.1", port=int(server.url.rsplit(":", 1)[1]))
    return made


def test_new_weights_from_a_trainer(
    served: tuple[Server, list[list[list[int]]]], capsys: pytest.CaptureFixture[str]
) -> None:
    server, answers = served
    engine = client(server)
    vram.publish("policy", servers.weights(1), updatable=True)
    send_update(engine, "policy", 1)
    assert ask(server) == answers[1]
    for version, seed in ((2, 0), (3, 1)):
        with vram.update("policy") as arrays:
            for name, tensor in servers.weights(seed).items():
                arrays[name].torch().copy_(tensor)
        begun = time.monotonic()
        send_update(engine, "policy", version)
        with capsys.disabled():
            print(f"\n  an update over HTTP: {time.monotonic() - begun:.2f} s", flush=True)
        assert ask(server) == answers[seed]


def test_what_is_refused_changes_nothing(served: tuple[Server, list[list[list[int]]]]) -> None:
    server, _ = served
    engine = client(server)
    before = ask(server)
    with pytest.raises(vram.errors.NotFoundError):
        send_update(engine, "nothing", 1)
    vram.publish("fixed", servers.weights(0))
    with pytest.raises(vram.errors.UsageError, match="updatable"):
        send_update(engine, "fixed", 1)
    with pytest.raises(requests.HTTPError, match="400"):  # outside of a session
        engine.update_weights_from_tensor([("fixed", torch.empty(1, 0))], load_format="vram.engines.sglang.update")
    engine.begin_weight_update()
    vram.publish("other", servers.weights(0), updatable=True)
    with pytest.raises(vram.errors.PeerError, match=r"refused begin_weight_update: .*already open"):
        send_update(engine, "other", 1)
    engine.end_weight_update()
    assert ask(server) == before
