"""SGLang's weight cache with our transport in it, in this process: ``make test-adapters``.

The daemon of that cache needs a GPU. Its classes around the transport are run, and its calls and those of the loader
are looked for in their source.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import vram

SRT = Path(importlib.util.find_spec("sglang").submodule_search_locations[0], "srt")


@pytest.fixture(scope="session", autouse=True)
def transport() -> Any:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    import sglang.srt.weight_cache.transport as found
    from sglang.srt.plugins.hook_registry import HookRegistry

    from vram.engines.sglang import register

    register()
    register()
    HookRegistry.apply_hooks()
    return found


@pytest.fixture
def keeper() -> Iterator[None]:
    with vram.private_keeper():
        yield


def state() -> dict[str, tuple[torch.Tensor, bool]]:
    weight = torch.arange(24.0).reshape(4, 6)
    return {
        "first.weight": (weight, True),
        "tied.weight": (weight.data, True),
        "turned.weight": (torch.arange(6.0).reshape(2, 3).t(), True),
        "scale": (torch.ones(3), False),
    }


def fetch(transport: Any, daemon: Any, entries: Any) -> tuple[Any, dict[str, Any]]:
    """Hand the answer over as the daemon and the loader do."""
    from sglang.srt.weight_cache.protocol import recv_msg

    theirs, ours = socket.socketpair()
    with theirs, ours:
        answer = threading.Thread(
            target=daemon.send_fetch_state_response,
            args=(theirs,),
            kwargs={"config": {}, "entries": entries, "pid": os.getpid(), "preloaded_weights_bytes": 5},
        )
        answer.start()
        result = recv_msg(ours)
        answer.join()
        client = transport.get_client_transport_backend(result["transport_backend"])
        return client, client.recv_fetch_state_response(ours, result)


def test_without_a_keeper_the_daemon_goes_on_with_torch_ipc(
    transport: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VRAM_KEEPER", str(tmp_path / "nobody"))
    assert type(transport.choose_daemon_transport_backend(state())).__name__ == "TorchIpcTransportBackend"


def test_an_engine_gets_what_the_daemon_has(transport: Any, keeper: None) -> None:
    daemon = transport.choose_daemon_transport_backend(state())
    assert type(daemon).__name__ == "VramTransportBackend"
    entries = daemon.prepare_export(state())
    client, result = fetch(transport, daemon, entries)
    assert result["pid"] is None
    assert result["preloaded_weights_bytes"] == 5
    got = {name: client.import_tensor(entry) for name, entry in result["entries"].items()}
    for name, (tensor, is_param) in state().items():
        assert torch.equal(got[name], tensor), name
        assert got[name].stride() == tensor.stride(), name
        assert got[name].dtype == tensor.dtype
        assert result["entries"][name]["is_param"] == is_param
    assert got["tied.weight"].data_ptr() == got["first.weight"].data_ptr()
    got["scale"] += 1
    assert client.import_tensor(result["entries"]["scale"]).tolist() == [1, 1, 1]
    del daemon
    gc.collect()  # the daemon is gone, and its memory is not
    assert torch.equal(got["first.weight"], state()["first.weight"][0])
    del client, got
    gc.collect()
    assert vram.holders() == []


def test_a_daemon_that_starts_again_replaces_what_was_published(transport: Any, keeper: None) -> None:
    for _ in range(3):
        daemon = transport.choose_daemon_transport_backend(state())
        daemon.prepare_export(state())
        del daemon
        gc.collect()
    (entry,) = vram.list_entries()
    assert entry.name.startswith("sglang/")


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    index = 0
    device = property(lambda self: torch.device("cuda", self.index))  # type: ignore[assignment]


def on_gpu(monkeypatch: pytest.MonkeyPatch, *, free: int, uuid: str = "GPU-1") -> dict[str, tuple[torch.Tensor, bool]]:
    """Return the state on a GPU that has so many bytes free once torch has let go of its cache."""
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free if emptied else 0, 1 << 40))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid))
    return {name: (tensor.as_subclass(OnGpu), is_param) for name, (tensor, is_param) in state().items()}


@pytest.mark.parametrize("fits", [True, False])
def test_where_the_gpu_has_no_room_for_a_copy_the_daemon_goes_on_with_torch_ipc(
    transport: Any, keeper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    fits: bool,
) -> None:  # fmt: skip
    asked = on_gpu(monkeypatch, free=(2 << 20) if fits else (2 << 20) - 1)  # in pieces of 2 MiB
    found = transport.choose_daemon_transport_backend(asked)
    assert type(found).__name__ == ("VramTransportBackend" if fits else "TorchIpcTransportBackend")
    assert ("torch_ipc" in caplog.text) is not fits


def test_the_name_is_of_the_gpu_and_not_of_its_number(
    transport: Any, keeper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    lease = mock.Mock()
    monkeypatch.setattr(vram, "publish", lambda name, arrays, meta: names.append(name) or mock.Mock())
    monkeypatch.setattr(sys.modules["vram.engines.sglang_transport"], "checksum", lambda arrays: "")
    monkeypatch.setattr(vram, "attach", lambda *_, **__: lease)
    for uuid, index in (("GPU-1", 0), ("GPU-1", 3), ("GPU-2", 0)):
        monkeypatch.setattr(OnGpu, "index", index)
        asked = on_gpu(monkeypatch, free=1 << 30, uuid=uuid)
        transport.choose_daemon_transport_backend(asked).prepare_export(asked)
    assert names[0] == names[1] != names[2]


# What the daemon needs GPUs and SGLang's kernels for is left out: its options, and a child that chooses a transport.
DAEMON = """
import multiprocessing

class WeightCacheDaemonArgs:
    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--gpu-id", type=int)
        parser.add_argument("--tp-rank", type=int)
        parser.add_argument("--dist-init-method")
        parser.add_argument("--timeout", type=int, default=1800)
        parser.add_argument("--force", action="store_true")

    from_cli_args = staticmethod(lambda given: given)

def child(server_args):
    from sglang.srt.weight_cache.transport import VmmFdTransportBackend
    print(VmmFdTransportBackend.__name__, server_args, flush=True)

def launch_weight_cache_daemons(server_args, dist_init_method, timeout, force):
    process = multiprocessing.get_context("spawn").Process(target=child, args=(server_args,))
    process.start()
    process.join(60)
    raise SystemExit(process.exitcode)
"""


def test_the_daemons_of_ours_have_the_transport_and_those_of_sglang_do_not(tmp_path: Path) -> None:
    assert "load_plugins" not in (SRT / "weight_cache/daemon.py").read_text(), "then ours is not needed any more"
    real = {"sglang": SRT.parent, "sglang/srt": SRT, "sglang/srt/weight_cache": SRT / "weight_cache"}
    for name, path in real.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"__path__.append({str(path)!r})")
    for name, text in {
        "weight_cache/daemon.py": DAEMON,
        "server_args.py": "prepare_server_args = list",
        "environ.py": "from unittest.mock import MagicMock; envs = MagicMock(); envs.SGLANG_PLUGINS.get = str",
        "utils.py": "import sys, types, pickle\nMultiprocessingSerializer = None\n__path__ = []\n"
        "common = sys.modules['sglang.srt.utils.common'] = types.ModuleType('common')\n"
        "common.safe_pickle_loads = pickle.loads",
    }.items():
        (tmp_path / "sglang/srt" / name).write_text(text)
    ours = Path(vram.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ours)])}
    command = [sys.executable, "-m", "vram.engines.sglang_daemon", "--model-path", "tiny", "--timeout", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "VramTransportBackend ['--model-path', 'tiny']\n", done.stderr
    done = subprocess.run([*command, "--gpu-id", "0"], env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "leave --gpu-id" in done.stderr) == (2, True)


def test_the_calls_are_those_of_the_daemon_and_the_loader() -> None:
    loader, daemon = (SRT / "weight_cache" / name for name in ("ipc_loader.py", "daemon.py"))
    for source, calls in (
        (loader, ("_transport_backend.import_tensor(entry)", "recv_fetch_state_response(sock, result)",
                  'cache_data.get("pid")', "if not daemon_pid or daemon_pid <= 0")),
        (daemon, ("WeightCacheDaemonArgs.add_cli_args(worker_parser)", "prepare_server_args(server_argv)",
                  "daemon_args.gpu_id is not None or daemon_args.tp_rank is not None",
                  "dist_init_method=daemon_args.dist_init_method", "timeout=daemon_args.timeout",
                  "force=daemon_args.force",
                  "transport_backend.prepare_export(state_tensors)", "choose_daemon_transport_backend(state_tensors)",
                  "preloaded_weights_bytes=self.preloaded_weights_bytes")),
        (SRT / "model_executor/model_runner_components/weight_updater.py",
         ("custom_loader = dynamic_import(load_format)", "custom_loader(self.get_model(), named_tensors)")),
    ):  # fmt: skip
        text = source.read_text()
        for call in calls:
            assert call in text, (source.name, call)
