"""vLLM's own classes with ours in them, on the CPU: ``make test-engines``, where vLLM is installed (0.33.0 was).

Not a test of CI, which has no vLLM. Of vLLM are the factories, the loader that ours derives from, the key of its weight
cache, the processing after loading, the reload layer by layer, the reading of a checkpoint for that, and the sleep
backend's and the worker's base classes. Not of vLLM, since they need its kernels or a GPU: the model (two linear
layers), the first loading, the process groups (of one process), and what waits for an accelerator. What is parked has
to be memory of a GPU, which is the stand-in's.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm
from torch import nn
from tqdm import tqdm
from vllm.config.load import LoadConfig
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_cache import ipc_loader
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

import vram
from vram.engines.vllm import register

SOON = 60.0
# Of this process and those that it starts: what the models below are said to be read from.
MODEL = Path(os.environ.setdefault("CHECK_VLLM_MODEL", os.path.join(tempfile.mkdtemp(), "tiny")))
tqdm.monitor_interval = 0  # or its first bar leaves a thread behind


class Tiny(nn.Module):
    """A model with all that loading has to keep: a tied weight, strides of its own, a buffer, and one not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.up = nn.Linear(16, 64, bias=False)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("table", torch.zeros(8), persistent=False)

    def load_weights(self, weights: Any) -> set[str]:
        """Load as vLLM's models do: by name, out of what it is given, with the loader of each parameter."""
        mine = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            loader = getattr(mine[name], "weight_loader", default_weight_loader)
            loader(mine[name], tensor)
            loaded.add(name)
        return loaded


def tiny_from_disk() -> Tiny:
    with torch.device("cpu"):
        torch.manual_seed(7)
        model = Tiny()
    model.up.weight = nn.Parameter(model.up.weight.data.t().contiguous().t(), requires_grad=False)
    model.table.copy_(torch.arange(8.0))
    return model


def model_config() -> Any:
    if not MODEL.exists():
        checkpoint(MODEL, 0.0)
    text = SimpleNamespace(rope_parameters=None, max_position_embeddings=16)
    return SimpleNamespace(
        model=str(MODEL), dtype=torch.float32, quantization=None, quantization_config=None, revision=None,
        word_embeddings_untied_by_checkpoint=False, enable_sleep_mode=False, sleep_mode_backend="cumem",
        hf_config=SimpleNamespace(architectures=["Tiny"]), hf_text_config=text,
    )  # fmt: skip


def vllm_config() -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=()),
        parallel_config=SimpleNamespace(
            enable_eplb=False, enable_expert_parallel=False, expert_placement_strategy="linear"
        ),
        kernel_config=None,
        device_config=SimpleNamespace(device="cpu"),  # as users say it
        model_config=model_config(),
        speculative_config=None,
    )


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    register()
    register()


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What vLLM notes of the layers of a model that was loaded again refers to them, and so to their weights."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    yield
    LAYERWISE_INFO.clear()
    gc.collect()


@pytest.fixture
def keeper() -> Iterator[str]:
    with vram.private_keeper() as found:
        yield found.path


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what was loaded."""
    return stand_in(monkeypatch)


def initialize(**_: Any) -> Tiny:
    """Make a model, and note what it is like before its weights are processed, as vLLM's own does."""
    model = Tiny()
    record_metadata_for_reloading(model)
    return model


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for the disk, the process groups and the construction of a model; return what was loaded."""
    from vram.engines.vllm_loader import VramModelLoader

    done: list[str] = []
    group = SimpleNamespace(world_size=1, rank_in_group=0)
    for name, value in (
        ("get_dp_group", lambda: group),
        ("get_pp_group", lambda: group),
        ("get_tensor_model_parallel_world_size", lambda: 1),
        ("get_tensor_model_parallel_rank", lambda: 0),
        ("initialize_model", initialize),
    ):
        assert hasattr(ipc_loader, name)
        monkeypatch.setattr(ipc_loader, name, value)

    def from_disk(self: Any, vllm_config: Any, model_config: Any, prefix: str) -> Tiny:
        done.append(Path(model_config.model).name)
        return tiny_from_disk()

    monkeypatch.setattr(VramModelLoader, "_fallback_load", from_disk)
    return done


def load(keeper: str, **extra: Any) -> Any:
    loader = get_model_loader(
        LoadConfig(load_format="vram", model_loader_extra_config={"keeper": keeper, "timeout": SOON, **extra})
    )
    return loader.load_model(vllm_config(), model_config())


def same(model: Any, other: Any) -> None:
    theirs = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        assert tensor.stride() == theirs[name].stride(), name
        assert isinstance(tensor, nn.Parameter) == isinstance(theirs[name], nn.Parameter), name


def test_the_version_is_the_one_that_was_read() -> None:
    assert vllm.__version__.startswith("0.33."), vllm.__version__


def test_the_first_engine_loads_and_the_others_attach(keeper: str, loads: list[str]) -> None:
    first, second = load(keeper), load(keeper)
    assert loads == ["tiny"]
    for model in (first, second):
        same(model, tiny_from_disk())
        assert model.head.weight is model.embedding.weight
        assert model.vram_lease.version == 1
    assert first.scale.data_ptr() != second.scale.data_ptr()
    second.scale += 1
    assert first.scale.tolist() == [1, 1, 1]
    (entry,) = vram.list_entries(keeper=keeper)
    assert entry.name.startswith("vllm/")
    del first, second, model
    gc.collect()
    assert vram.holders(keeper=keeper) == []


def test_checkpoints_of_one_shape_are_two_entries(keeper: str, loads: list[str], tmp_path: Path) -> None:
    """vLLM's own key is the same for both."""
    kept = [load(keeper)]
    config = model_config()
    for fill in (1.0, 2.0):
        shutil.rmtree(tmp_path / "new", ignore_errors=True)
        config.model = str(checkpoint(tmp_path / "new", fill))
        loader = get_model_loader(LoadConfig(load_format="vram", model_loader_extra_config={"keeper": keeper}))
        kept.append(loader.load_model(vllm_config(), config))
    assert loads == ["tiny", "new", "new"]
    assert len({one.vram_lease.name for one in kept}) == 3
    labels = {one.meta["model"] for one in vram.list_entries(keeper=keeper)}
    assert {label.rpartition("/")[2] for label in labels} == {"tiny", "new"}


def test_many_engines_at_once_load_once(keeper: str, loads: list[str]) -> None:
    models: list[Any] = []
    threads = [threading.Thread(target=lambda: models.append(load(keeper))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert len(models) == 4
    assert loads == ["tiny"]


def test_parameters_are_read_only_and_shared_after_the_first_engine_was_killed(keeper: str, loads: list[str]) -> None:
    here = str(__file__)
    script = textwrap.dedent(f"""
        import importlib.util, os, signal, pytest
        spec = importlib.util.spec_from_file_location("check_vllm", {here!r})
        check = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(check)
        check.register()
        patch = pytest.MonkeyPatch()
        check.stand_in(patch)
        check.load({keeper!r})
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SOON * 2)
    assert killed.returncode == -9, killed.stderr
    model = load(keeper)
    assert loads == []
    same(model, tiny_from_disk())
    address = model.up.weight.data_ptr()
    with open("/proc/self/maps") as maps:
        rights = [line.split()[1] for line in maps if _holds(line, address)]
    assert rights == ["r--s"]


def _holds(line: str, address: int) -> bool:
    first, last = (int(part, 16) for part in line.split()[0].split("-"))
    return first <= address < last


def test_a_copy_is_of_this_engine_and_may_be_written_to(keeper: str, loads: list[str]) -> None:
    load(keeper, mode="copy")
    model = load(keeper, mode="copy")
    assert loads == ["tiny"]
    same(model, tiny_from_disk())
    model.up.weight.data.zero_()
    assert not hasattr(model, "vram_lease")
    assert vram.holders(keeper=keeper) == []


def test_without_a_keeper_it_loads_or_says_so(tmp_path: Any, loads: list[str]) -> None:
    nobody = str(tmp_path / "keeper")
    same(load(nobody), tiny_from_disk())
    assert loads == ["tiny"]
    with pytest.raises(vram.errors.PeerGoneError):
        load(nobody, fallback=False)


def test_a_model_that_a_kernel_of_the_host_packs_is_not_shared(
    keeper: str, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def packed(self: Any, *_: Any) -> Tiny:
        model = tiny_from_disk()
        model.up.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # as dispatch_cpu_unquantized_gemm does
        return model

    from vram.engines.vllm_loader import VramModelLoader

    monkeypatch.setattr(VramModelLoader, "_fallback_load", packed)
    assert not hasattr(load(keeper), "vram_lease")
    assert vram.list_entries(keeper=keeper) == []


def test_what_the_adapter_says_is_in_vllms_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM configures the logger "vllm" alone, which hands nothing on."""
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging

    from vram.engines import vllm as plugin
    from vram.engines import vllm_loader

    top = logging.getLogger("vllm")
    monkeypatch.setattr(top, "handlers", top.handlers)
    monkeypatch.setattr(top, "propagate", top.propagate)
    monkeypatch.setattr(top, "level", top.level)
    configure_logging(LoggingConfig(configure_logging=True))  # as vLLM does in each of its processes
    (handler,) = top.handlers
    assert not top.propagate
    for logger in (vllm_loader.logger, plugin._log):
        assert logger.isEnabledFor(logging.INFO)
        with mock.patch.object(handler, "emit") as emit:
            logger.warning("a test's")
        assert emit.call_count == 1, logger.name


def test_a_vllm_of_another_version_loads_plainly_under_our_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import vllm.version
    from vllm.model_executor import model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    monkeypatch.setattr(vllm.version, "__version__", "0.34.1")
    monkeypatch.setattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    register()
    found = get_model_loader(LoadConfig(load_format="vram", model_loader_extra_config={"keeper": "/k", "name": "n"}))
    assert isinstance(found, DefaultModelLoader)
    weights = dict(found._get_weights_iterator(found.Source(str(checkpoint(tmp_path / "new", 3.0)), None)))
    assert weights["up.weight"].unique().tolist() == [3.0]


def test_what_is_published_is_not_counted_again(keeper: str, loads: list[str]) -> None:
    loader = get_model_loader(LoadConfig(load_format="vram", model_loader_extra_config={"keeper": keeper}))
    config = vllm_config()
    config.model_config = model_config()
    assert loader.get_external_weight_memory(config) == 0
    model = load(keeper)
    assert loader.get_external_weight_memory(config) >= sum(one.nbytes for one in model.parameters())
    assert loads == ["tiny"]


def test_loading_again_in_place_sets_buffers(keeper: str, loads: list[str]) -> None:
    model = load(keeper)
    model.scale.zero_()
    loader = get_model_loader(LoadConfig(load_format="vram", model_loader_extra_config={"keeper": keeper}))
    loader.load_weights(model, model_config())
    same(model, tiny_from_disk())


def reload(model: Any, keeper: str, checkpoint: Path, **extra: Any) -> None:
    """Call what ``collective_rpc("reload_weights")`` calls in each worker."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    config = vllm_config()
    config.lora_config = None
    config.load_config = LoadConfig(load_format="vram", model_loader_extra_config={"keeper": keeper, **extra})
    config.model_config.model = str(checkpoint)
    config.model_config.dtype = torch.float32
    reload_weights(config, model, None, None, True)


def checkpoint(directory: Path, fill: float) -> Path:
    from safetensors.torch import save_file

    weights = {name: torch.full_like(one.data, fill) for name, one in Tiny().named_parameters()}
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    return directory


def test_weights_of_a_copy_are_read_again_from_the_disk(keeper: str, loads: list[str], tmp_path: Path) -> None:
    load(keeper)
    model = load(keeper, mode="copy")
    kept = dict(model.named_parameters())
    with torch.no_grad():
        model.up.weight.zero_()  # as a level-2 sleep does
    reload(model, keeper, checkpoint(tmp_path / "new", 3.0), mode="copy")
    for name, one in model.named_parameters():
        assert one is kept[name]
        assert one.unique().tolist() == [3.0], name


def test_weights_that_are_shared_stay_when_they_are_read_again(keeper: str, loads: list[str], tmp_path: Path) -> None:
    for _ in range(2):  # the engine that published them, and one that attached them
        model = load(keeper)
        kept = dict(model.named_parameters())
        reload(model, keeper, MODEL)
        same(model, tiny_from_disk())
        assert all(one is kept[name] for name, one in model.named_parameters())
        with pytest.raises(vram.errors.UsageError, match='"mode": "copy"'):
            reload(model, keeper, checkpoint(tmp_path / f"other{len(kept)}{_}", 3.0))
        same(model, tiny_from_disk())


@pytest.mark.standin  # only memory of a GPU is parked
def test_what_is_parked_is_not_in_the_way_and_is_woken(
    keeper: str, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vram.engines import vllm_loader

    loader = get_model_loader(LoadConfig(load_format="vram", model_loader_extra_config={"keeper": keeper}))
    config = vllm_config()
    named: list[Any] = []
    loader._then = lambda *said: named.append(said)
    loader._with_key(config, config.model_config)
    (expect, name) = named[0]
    nbytes = 4 << 20
    with vram.zeros(nbytes, dtype="uint8", device="cuda:0") as array:
        vram.publish(name, {"w": array}, meta=expect, keeper=keeper)
    assert loader.get_external_weight_memory(config) >= nbytes
    vram.park(name, keeper=keeper)
    assert loader.get_external_weight_memory(config) == 0, "the GPU has it free; who wakes it takes it"
    assert vram.entry(name, keeper=keeper).parked
    monkeypatch.setattr(vllm_loader, "_state", lambda lease: lease)  # this torch may be for the CPU
    leases: list[Any] = []
    monkeypatch.setattr(loader, "_build_model", lambda *said: leases.append(said[-1]) or nn.Module())
    model = loader.load_model(config, config.model_config)
    assert loads == []
    assert model.vram_lease is leases[0]
    assert leases[0].version == 1
    assert not vram.entry(name, keeper=keeper).parked


def test_what_the_loader_does_not_know_is_refused(keeper: str) -> None:
    with pytest.raises(ValueError, match="socket_path"):
        load(keeper, socket_path="/tmp/x")
    with pytest.raises(ValueError, match="unknown"):
        load(keeper, unknown=1)


# -- sleep ----------------------------------------------------------------------------------------------------------
def test_the_backend_is_found_by_its_name() -> None:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    from vram.engines.vllm_sleep import VramSleepModeBackend, VramWorker

    made = SleepModeBackendFactory.create_backend(SimpleNamespace(sleep_mode_backend="vram"))
    assert type(made) is VramSleepModeBackend
    assert made.state() == "RUNNING"
    assert "_maybe_get_memory_pool_context" in vars(VramWorker)
    theirs = inspect.signature(VramWorker.__mro__[1]._maybe_get_memory_pool_context)
    assert list(theirs.parameters) == list(inspect.signature(VramWorker._maybe_get_memory_pool_context).parameters)


# -- transfer -------------------------------------------------------------------------------------------------------
class Client:
    """What drives the workers, as vLLM's HTTP client would."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        self.engine.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.engine.receive_weights(self.engine.parse_update_info(update_info))  # its own waits for an accelerator

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.engine.finish_weight_update()


@contextlib.contextmanager
def worker(served: nn.Module, made: bool = False) -> Iterator[Any]:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if not made:
        record_metadata_for_reloading(served)  # as vLLM does when it makes a model
    config = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(dtype=torch.float32))
    engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="vram"), config, torch.device("cpu"), served
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def train(source: Any, client: Any, keeper: str, rank: int = 0) -> Any:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from vram.engines.vllm_transfer import VramTrainerInitInfo

    return WeightTransferTrainerFactory.trainer_init(
        VramTrainerInitInfo("policy", keeper, 5.0, rank=rank), client=client, source=source
    )


@contextlib.contextmanager
def trainer_and_worker(keeper: str) -> Iterator[tuple[Any, Any, nn.Module, nn.Module]]:
    trained, served = Tiny(), Tiny()
    with worker(served) as engine:
        yield train(ModuleSource(trained), Client(engine), keeper), engine, trained, served


def test_rounds_of_new_weights_reach_the_worker(keeper: str) -> None:
    with trainer_and_worker(keeper) as (trainer, _, trained, served):
        for _ in range(3):
            with torch.no_grad():
                for one in trained.parameters():
                    one.normal_()
            trainer.send_weights()
            same(served, trained)


def test_the_trainer_waits_for_a_worker_that_has_not_finished(keeper: str) -> None:
    with trainer_and_worker(keeper) as (trainer, engine, _, _):
        trainer._info.timeout = 0.2
        engine.start_weight_update()
        engine.receive_weights(engine.parse_update_info({"version": 1}))
        with pytest.raises(vram.errors.BusyError):
            trainer.send_weights()
        engine.finish_weight_update()
        trainer.send_weights()


def test_a_model_that_is_shared_is_not_written_to(keeper: str) -> None:
    with trainer_and_worker(keeper) as (_, engine, _, served):
        served.vram_lease = object()
        with pytest.raises(vram.errors.UsageError, match="copy"):
            engine.start_weight_update()
        with pytest.raises(vram.errors.UsageError, match="copy"):  # the trainer is told when it begins
            train(ModuleSource(Tiny()), Client(engine), keeper)
        assert not any(one.is_meta for one in served.parameters())


class Gathered(ModuleSource):
    """Weights of which each rank has a part, gathered one by one as they are asked for; the newest, and no others."""

    def __init__(self, module: nn.Module, owners: dict[str, tuple[int, ...]] | None = None) -> None:
        super().__init__(module)
        self._owners = owners or {}
        self.alive = 0
        self.most = 0
        self.ended = 0

    @functools.cached_property
    def metadata(self) -> list[Any]:
        return [
            ParamMeta(name, one.dtype, tuple(one.shape), owners=self._owners.get(name))
            for name, one in self._module.named_parameters()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, one in self._module.named_parameters():
            gathered = one.detach().clone()
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(gathered, self._gone)
            yield name, gathered
            del gathered
        self.ended += 1

    def _gone(self) -> None:
        self.alive -= 1


def test_gathered_tensors_are_let_go_of_one_by_one(keeper: str) -> None:
    source = Gathered(nn.Sequential(*[nn.Linear(5, 7) for _ in range(6)]))
    trainer = train(source, mock.Mock(), keeper)
    assert source.most == 1
    trainer.send_weights()
    assert source.most == 1
    assert source.alive == 0
    with vram.attach("policy", keeper=keeper) as lease:
        assert lease.version == 1
        for name, one in source._module.named_parameters():
            assert torch.equal(lease[name].torch(), one)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_whose_first_rank_has_not_all_is_refused_on_each_rank(keeper: str, rank: int) -> None:
    source = Gathered(Tiny(), {"up.weight": (1, 2)})
    with pytest.raises(vram.errors.UsageError, match=r"rank 0 does not own 1 of 2 parameters.*up\.weight.*\(1, 2\)"):
        train(source, None, keeper, rank)
    assert source.most == 0, "it was refused before anybody waits for others to gather"
    assert vram.list_entries(keeper=keeper) == []


def test_other_ranks_gather_and_send_nothing(keeper: str) -> None:
    source = Gathered(Tiny())
    train(source, None, keeper, 1).send_weights()
    assert source.ended == 2
    assert vram.list_entries(keeper=keeper) == []


def test_the_other_ranks_are_not_left_waiting_when_the_sender_fails(keeper: str) -> None:
    source = Gathered(Tiny())
    with worker(Tiny()) as engine:
        trainer = train(source, Client(engine), keeper)
        vram.remove("policy", keeper=keeper)
        with pytest.raises(vram.errors.NotFoundError):
            trainer.send_weights()
        assert source.ended == 2, "the sender takes part in what the others gather"


def test_a_source_that_leaves_parameters_out_is_told_so(keeper: str) -> None:
    class Short(Gathered):
        yields = 2

        def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(list(super().iter_full())[: self.yields])

    source = Short(Tiny())
    for source.yields, said in ((0, "not yield a single"), (1, r"did not yield 1 of 2.*up\.weight")):
        with pytest.raises(vram.errors.UsageError, match=said):
            train(source, None, keeper)
        assert vram.list_entries(keeper=keeper) == []
    source.yields = 2
    with worker(Tiny()) as engine:
        trainer = train(source, Client(engine), keeper)
        for source.yields in (0, 1):
            with pytest.raises(vram.errors.UsageError, match="did not yield"):
                trainer.send_weights()
            engine.start_weight_update()
            with pytest.raises(vram.errors.TornError):
                Client(engine).update_weights({"version": 1})
        source.yields = 2
        trainer.send_weights()
        same(engine.model, source._module)


def test_an_update_that_does_not_come_leaves_the_engine_as_it_was(keeper: str) -> None:
    with trainer_and_worker(keeper) as (trainer, engine, trained, served):
        before = {name: one.detach().clone() for name, one in served.named_parameters()}
        kept = dict(served.named_parameters())
        engine._timeout = 0.2
        engine.start_weight_update()
        with pytest.raises(vram.errors.WaitTimeoutError) as caught:
            Client(engine).update_weights({"version": 7})
        assert any("weights of before" in note for note in caught.value.__notes__)
        for name, one in served.named_parameters():
            assert one is kept[name]
            assert torch.equal(one, before[name])
        trainer.send_weights()
        same(served, trained)


def test_a_failure_while_it_loads_leaves_the_engine_usable_and_says_so(keeper: str) -> None:
    class Fails(Tiny):
        fails = ""

        def load_weights(self, weights: Any) -> set[str]:
            def until() -> Iterator[tuple[str, torch.Tensor]]:
                for name, tensor in weights:
                    if name == self.fails:
                        raise RuntimeError("a test's")
                    yield name, tensor

            return super().load_weights(until())

    trained, served = Tiny(), Fails()
    kept = dict(served.named_parameters())
    old = {name: one.detach().clone() for name, one in kept.items()}
    with worker(served) as engine:
        client = Client(engine)
        trainer = train(ModuleSource(trained), client, keeper)
        for fails, new, kind in (
            ("embedding.weight", [], RuntimeError),
            ("up.weight", ["embedding.weight"], vram.errors.TornError),
        ):
            served.fails = fails
            with pytest.raises(kind, match="a test's") as caught:
                trainer.send_weights()
            said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
            assert ("1 of 3 layers have them, such as 'embedding'" if new else "nothing of this update was") in said
            for name, one in served.named_parameters():
                assert one is kept[name], "graphs hold their addresses"
                assert torch.equal(one, trained.get_parameter(name) if name in new else old[name])
        served.fails = ""
        trainer.send_weights()
        same(served, trained)


def test_workers_that_succeeded_let_the_trainer_go_on_when_another_failed(keeper: str) -> None:
    class Two(Client):
        """Two workers, of which the other fails; all are asked before one's failure is told."""

        def update_weights(self, update_info: Any) -> None:
            super().update_weights(update_info)
            raise RuntimeError("the other worker's")

    trained, served = Tiny(), Tiny()
    with worker(served) as engine:
        trainer = train(ModuleSource(trained), Two(engine), keeper)
        trainer._info.timeout = 1.0
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the other worker's"):
                trainer.send_weights()
        trainer.client = Client(engine)
        trainer.send_weights()
        same(served, trained)


def test_a_copy_of_what_was_published_takes_new_weights(keeper: str, loads: list[str]) -> None:
    load(keeper)
    model = load(keeper, mode="copy")
    assert loads == ["tiny"]
    trained = Tiny()
    with worker(model, made=True) as engine:
        train(ModuleSource(trained), Client(engine), keeper).send_weights()
    assert not any(one.is_meta for one in model.parameters())
    assert torch.equal(model.up.weight, trained.up.weight)
