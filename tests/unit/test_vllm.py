"""vLLM's adapter on doubles of vLLM's classes: tests/engines/check_vllm.py has it on vLLM's own, where that is."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support import vllm_like
from tests.support.deadlines import SOON
from tests.support.threads import race

import vram
from vram import engines
from vram.arrays.torch_pool import Usage
from vram.errors import MismatchError, NotFoundError, OutOfMemoryError, PeerError, PeerGoneError, UsageError


@pytest.fixture(autouse=True)
def like_vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for name in [one for one in sys.modules if one.startswith(("vllm", "vram.engines.vllm_"))]:
        if name != "vllm_like":
            monkeypatch.delitem(sys.modules, name)
            monkeypatch.delattr(engines, name.rpartition(".")[2], raising=False)
    made = vllm_like.modules()
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


# -- sleep ----------------------------------------------------------------------------------------------------------
class PoolLike:
    """A pool that notes what it is told."""

    def __init__(self, *tags: str) -> None:
        self.tags = dict.fromkeys(tags, Usage(10, 0))
        self.told: list[tuple[object, ...]] = []
        self.fails: Exception | None = None

    def usage(self) -> dict[str, Usage]:
        return self.tags

    def sleep(self, offload: list[str], discard: list[str], *, shared: str) -> None:
        if self.fails is not None:
            raise self.fails
        self.told.append(("sleep", offload, discard, shared))
        self.tags |= dict.fromkeys([*offload, *discard], Usage(0, 10))

    def wake(self, tags: list[str]) -> None:
        if self.fails is not None:
            raise self.fails
        self.told.append(("wake", tags))
        self.tags |= dict.fromkeys(tags, Usage(10, 0))

    def use(self, tag: str) -> str:
        return f"ours {tag}"


LOAD_CONFIG = vllm_like.LoadConfig({})
TAGS = ("weights", "kv_cache", "runtime", "workspace", "cudagraph")


def backend(pool: PoolLike) -> Any:
    from vram.engines.vllm_sleep import VramSleepModeBackend

    return VramSleepModeBackend(pool)


def test_the_first_level_keeps_weights_and_the_second_does_not() -> None:
    for level, kept, gone in (
        (1, ["cudagraph", "runtime", "weights"], ["kv_cache", "workspace"]),
        (2, ["cudagraph", "runtime"], ["kv_cache", "weights", "workspace"]),
    ):
        pool = PoolLike(*TAGS)
        sleeping = backend(pool)
        sleeping.suspend(level)
        assert pool.told == [("sleep", kept, gone, "unmap")]
        assert sleeping.state() == "SUSPENDED"


def test_weights_and_the_kv_cache_may_be_left_asleep_and_nothing_else() -> None:
    pool = PoolLike(*TAGS)
    sleeping = backend(pool)
    sleeping.suspend(1)
    sleeping.resume(["weights"])
    assert pool.told[-1] == ("wake", ["cudagraph", "runtime", "weights", "workspace"])
    assert sleeping.state() == "SUSPENDED"
    sleeping.resume()
    assert pool.told[-1] == ("wake", ["kv_cache"])
    assert sleeping.state() == "RUNNING"


def test_what_sleeps_with_its_bytes_is_not_discarded() -> None:
    pool = PoolLike(*TAGS)
    sleeping = backend(pool)
    sleeping.discard(("kv_cache", "cudagraph"))
    sleeping.suspend(1)
    sleeping.discard(("weights", "nobody's"))
    assert pool.told == [
        ("sleep", [], ["cudagraph", "kv_cache"], "unmap"),
        ("sleep", ["runtime", "weights"], ["workspace"], "unmap"),
        ("sleep", [], [], "unmap"),
    ]


def test_what_fails_leaves_the_state_as_it_was() -> None:
    pool = PoolLike(*TAGS)
    sleeping = backend(pool)
    pool.fails = OutOfMemoryError("a test's", 2, "ENOMEM")
    with pytest.raises(OutOfMemoryError):
        sleeping.suspend(1)
    assert sleeping.state() == "RUNNING"
    pool.fails = None
    sleeping.suspend(1)
    pool.fails = OutOfMemoryError("a test's", 2, "ENOMEM")
    with pytest.raises(OutOfMemoryError):
        sleeping.resume()
    assert sleeping.state() == "SUSPENDED"


def test_the_worker_allocates_in_our_pool_if_it_was_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from vram.engines import vllm_sleep

    pool = PoolLike()
    monkeypatch.setattr(vllm_sleep, "pool", lambda device: pool)
    for sleeps, name, found in (
        (True, "vram", "ours weights"),
        (False, "vram", "vLLM's weights"),
        (True, "cumem", "vLLM's weights"),
    ):
        worker = vllm_sleep.VramWorker(SimpleNamespace(enable_sleep_mode=sleeps, sleep_mode_backend=name))
        assert worker._maybe_get_memory_pool_context("weights") == found
    pool.tags["kv_cache"] = Usage(10, 0)
    config = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="vram")
    sharing = vllm_sleep.VramWorker(config, load_format="vram")
    assert type(sharing._maybe_get_memory_pool_context("weights")) is contextlib.nullcontext
    assert sharing._maybe_get_memory_pool_context("kv_cache") == "ours kv_cache"
    worker = vllm_sleep.VramWorker(config)
    assert worker._maybe_get_memory_pool_context("runtime") == "ours runtime"
    with pytest.raises(ValueError, match="start another"):
        worker._maybe_get_memory_pool_context("weights")


# -- names ----------------------------------------------------------------------------------------------------------
def test_the_adapter_loads_no_engine() -> None:
    code = "import sys; from vram.engines import sglang, vllm; sys.exit(not {'torch', 'vllm'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=SOON).returncode == 0


def registered(like_vllm: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return vLLM's sleep backends, weight transfers and loaders."""
    sleeps = like_vllm["vllm.device_allocator.sleep_mode_backend"]
    transfers = like_vllm["vllm.distributed.weight_transfer.factory"]
    return (
        sleeps.SleepModeBackendFactory._registry if hasattr(sleeps, "SleepModeBackendFactory") else {},
        transfers.WeightTransferEngineFactory._registry,
        like_vllm["vllm.model_executor.model_loader"]._LOAD_FORMAT_TO_MODEL_LOADER,
    )


@pytest.mark.parametrize(
    ("module", "lacks"),
    [
        ("vllm.device_allocator.sleep_mode_backend", "SleepModeBackendFactory"),
        ("vllm.model_executor.model_loader.weight_cache.ipc_loader", "IpcModelLoader"),
        ("vllm.distributed.weight_transfer.factory", "WeightTransferTrainerFactory"),
        ("vllm.version", "__version__"),
        ("vllm.version", "0.32.5"),
        ("vllm.version", "0.34.0"),
        ("vllm.version", "0.330.0"),
        ("vllm.version", "dev"),
    ],
)
def test_a_vllm_that_the_adapter_does_not_know_loads_plainly(
    module: str, lacks: str, torch: Any, like_vllm: dict[str, Any], caplog: pytest.LogCaptureFixture, config: Any
) -> None:
    """Also where everything has the right name: a signature may be another one."""
    from vram.engines import vllm

    if hasattr(like_vllm[module], lacks):
        delattr(like_vllm[module], lacks)
    else:
        like_vllm[module].__version__ = lacks
    vllm.register()
    vllm.register()
    assert {said.partition(",")[0] for said in caplog.messages} == {"vram's adapter works with vLLM 0.33"}
    assert "loads plainly" in caplog.text
    sleeps, transfers, loaders = registered(like_vllm)
    assert (sleeps, transfers, [*loaders]) == ({}, {}, ["vram"])
    settings = vllm_like.LoadConfig({"keeper": "/nowhere", "digest": True})
    loader = loaders["vram"](settings)
    assert (loader.load_config.load_format, loader.load_config.model_loader_extra_config) == ("auto", {})
    assert settings.load_format == "vram", "the configuration is the engine's"
    assert first_of(loader.load_model(engine(config), config)) == 0.0


# -- weights --------------------------------------------------------------------------------------------------------
@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed: its views are not tested")


@pytest.fixture
def keeper() -> Iterator[str]:
    with vram.private_keeper() as found:
        yield found.path


def checkpoint(folder: Path, first: float = 0.0) -> str:
    """Write a checkpoint of the shapes below whose weights begin at a number; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(np.arange(first, first + 32, dtype="f4").tobytes())
    return str(folder)


@pytest.fixture
def config(torch: Any, tmp_path: Path) -> Any:
    """A model of one layer: a tied weight, strides of its own, a buffer."""
    made = SimpleNamespace()

    def construct() -> Any:
        model = torch.nn.Module()
        model.first = torch.nn.Linear(4, 8, bias=False)
        model.last = torch.nn.Linear(4, 8, bias=False)
        model.register_buffer("scale", torch.ones(3))
        return model

    def load() -> Any:
        model = construct()
        loader = vllm_like.DefaultModelLoader(LOAD_CONFIG)
        folder = Path(loader._prepare_weights(made.model, None, made.revision, True, None)[0])
        stored = np.frombuffer((folder / "model.safetensors").read_bytes(), "f4")
        weight = torch.tensor(stored).reshape(4, 8).t()
        model.first.weight = torch.nn.Parameter(weight, requires_grad=False)
        model.last.weight = model.first.weight
        return model

    vars(made).update(
        model=checkpoint(tmp_path / "tiny"),
        revision=None,
        hf_config=SimpleNamespace(to_dict=lambda: {"num_hidden_layers": 1}),
        construct=construct,
        load=load,
        loads=[],
        enable_sleep_mode=False,
        sleep_mode_backend="cumem",
    )
    return made


def load(config: Any, keeper: str, **extra: Any) -> Any:
    from vram.engines.vllm_loader import VramModelLoader

    settings = vllm_like.LoadConfig({"keeper": keeper, "timeout": SOON, **extra})
    return VramModelLoader(settings).load_model(engine(config), config)


def loads(config: Any) -> list[str]:
    """Return what was read from the disk."""
    return [Path(one).name for one in config.loads]


def engine(config: Any) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(enable_eplb=False), speculative_config=None, model_config=config,
        cache_config=None, kernel_config=None, device_config=SimpleNamespace(device="cpu"),
    )  # fmt: skip


def test_everything_is_registered_once(torch: Any, like_vllm: dict[str, Any]) -> None:
    from vram.engines import vllm

    vllm.register()
    vllm.register()
    sleeps = like_vllm["vllm.device_allocator.sleep_mode_backend"].SleepModeBackendFactory._registry
    assert sleeps == {"vram": ("vram.engines.vllm_sleep", "VramSleepModeBackend")}
    loaders = like_vllm["vllm.model_executor.model_loader"]._LOAD_FORMAT_TO_MODEL_LOADER
    assert [*loaders] == ["vram"]


def test_one_engine_loads_and_the_others_share_its_parameters(torch: Any, keeper: str, config: Any) -> None:
    models = race(*[lambda: load(config, keeper)] * 3)
    assert loads(config) == ["tiny"]
    expected = config.load()
    for model in models:
        assert torch.equal(model.first.weight, expected.first.weight)
        assert model.first.weight.stride() == expected.first.weight.stride() == (1, 8)
        assert model.last.weight is model.first.weight
        model.scale += 1  # a buffer is each one's own
        assert model.scale.tolist() == [2, 2, 2]
    assert len(vram.holders(keeper=keeper)) == 3
    models.clear()
    del model
    gc.collect()
    assert vram.holders(keeper=keeper) == []


def test_a_copy_needs_no_lease(torch: Any, keeper: str, config: Any) -> None:
    for model in (load(config, keeper, mode="copy"), load(config, keeper, mode="copy")):
        model.first.weight.data.zero_()
        assert not hasattr(model, "vram_lease")
    assert loads(config) == ["tiny"]
    assert vram.holders(keeper=keeper) == []


def test_a_copy_that_sleeps_is_in_the_pool_and_what_is_published_is_not(
    torch: Any, keeper: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vram.engines import vllm_loader

    inside: list[int] = []

    @contextlib.contextmanager
    def use(tag: str) -> Iterator[None]:
        assert tag == "weights"
        assert len(vram.list_entries(keeper=keeper)) == 1, "it was published before"
        inside.append(1)
        yield

    monkeypatch.setattr(vllm_loader, "pool", lambda device: SimpleNamespace(use=use))
    config.enable_sleep_mode, config.sleep_mode_backend = True, "vram"
    loaded: list[Any] = []
    load_it = config.load
    config.load = lambda: loaded.append(load_it()) or loaded[-1]
    published_from = load(config, keeper, mode="copy")
    attached = load(config, keeper, mode="copy")
    assert len(inside) == 2
    assert published_from is loaded[0]
    for model in (published_from, attached):
        assert torch.equal(model.first.weight, load_it().first.weight)
        model.first.weight.data.zero_()


def first_of(model: Any) -> float:
    return float(model.first.weight.flatten()[0])


def test_checkpoints_of_one_shape_are_two_entries(torch: Any, keeper: str, config: Any, tmp_path: Path) -> None:
    """A name says which bytes it stands for (S11)."""
    tiny = load(config, keeper)
    config.model = checkpoint(tmp_path / "finetuned", 100.0)
    finetuned = load(config, keeper)
    again = load(config, keeper)
    assert [first_of(one) for one in (tiny, finetuned, again)] == [0.0, 100.0, 100.0]
    assert tiny.vram_lease.name != finetuned.vram_lease.name == again.vram_lease.name
    assert loads(config) == ["tiny", "finetuned"]
    shown = {one.meta["model"] for one in vram.list_entries(keeper=keeper)}
    assert {name[-5:] for name in shown} == {"/tiny", "tuned"}


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_a_checkpoint_that_is_written_again_is_another_entry(
    torch: Any, keeper: str, config: Any, tmp_path: Path, how: str
) -> None:
    kept = load(config, keeper)
    path = Path(config.model) / "model.safetensors"
    before = path.stat()
    if how == "in place":
        checkpoint(path.parent, 50.0)
    else:
        checkpoint(tmp_path / "new", 50.0)
        os.replace(tmp_path / "new" / path.name, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as tools that copy times do
    assert first_of(load(config, keeper)) == 50.0
    assert first_of(kept) == 0.0
    assert len(vram.list_entries(keeper=keeper)) == 2


def snapshot(hub: Path, commit: str, first: float) -> None:
    """Have the hub's cache get a commit as the newest one: links into blobs."""
    cached = hub / "models--an--owner"
    blob = cached / "blobs" / f"{first}"
    found = cached / "snapshots" / commit
    for folder in (blob.parent, found, cached / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    checkpoint(hub / "scratch", first)
    os.replace(hub / "scratch" / "model.safetensors", blob)
    (found / "model.safetensors").symlink_to(os.path.relpath(blob, found))
    (cached / "refs" / "main").write_text(commit)


def test_a_hub_whose_branch_moves_on_is_another_entry(
    torch: Any, keeper: str, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_like, "HUB", tmp_path / "hub")
    config.model = "an/owner"
    snapshot(vllm_like.HUB, "aaaaaaaaaaaa", 10.0)
    load(config, keeper)
    assert first_of(load(config, keeper)) == 10.0
    snapshot(vllm_like.HUB, "bbbbbbbbbbbb", 20.0)
    assert first_of(load(config, keeper)) == 20.0
    assert config.loads == ["an/owner", "an/owner"]
    shown = {one.meta["model"] for one in vram.list_entries(keeper=keeper)}
    assert shown == {"an/owner@aaaaaaaa", "an/owner@bbbbbbbb"}


@pytest.mark.parametrize(
    "changes",
    [
        lambda config, folder: checkpoint(folder, 7.0),
        lambda config, folder: (folder / "model.safetensors").unlink(),
        lambda config, folder: (folder / "model.safetensors").rename(folder / "renamed.safetensors"),
    ],
    ids=["written", "removed", "renamed"],
)
def test_files_that_change_while_they_are_loaded_are_not_shared(
    torch: Any, keeper: str, config: Any, changes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    load_it = config.load

    def and_change() -> Any:
        model = load_it()
        changes(config, Path(config.model))
        return model

    config.load = and_change
    model = load(config, keeper)
    assert first_of(model) == 0.0
    assert not hasattr(model, "vram_lease")
    assert vram.list_entries(keeper=keeper) == []
    assert "The weights are not shared" in caplog.text
    assert "model.safetensors" in caplog.text
    assert loads(config) == ["tiny"], "and it is loaded once only"


def test_a_load_that_fails_is_not_tried_again(torch: Any, keeper: str, config: Any) -> None:
    def fails() -> Any:
        raise MemoryError("a test's")

    config.load = fails
    with pytest.raises(MemoryError, match="a test's"):
        load(config, keeper)
    assert loads(config) == ["tiny"]
    assert vram.list_entries(keeper=keeper) == []


def test_files_that_cannot_be_found_are_vllms_to_report(
    torch: Any, keeper: str, config: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config.model = str(tmp_path / "nothing")
    with pytest.raises((RuntimeError, OSError)):
        load(config, keeper)
    assert "cannot be said" in caplog.text
    assert vram.list_entries(keeper=keeper) == []


def test_equal_bytes_elsewhere_are_one_entry_where_the_user_asks_for_digests(
    torch: Any, keeper: str, config: Any, tmp_path: Path
) -> None:
    config.hf_config = SimpleNamespace(to_dict=lambda: {"_name_or_path": config.model})  # as transformers has it
    first = load(config, keeper, digest=True)
    config.model = checkpoint(tmp_path / "copy")
    second = load(config, keeper, digest=True)
    assert loads(config) == ["tiny"]
    assert first.vram_lease.name == second.vram_lease.name
    checkpoint(tmp_path / "copy", 3.0)
    assert first_of(load(config, keeper, digest=True)) == 3.0
    (shown, _) = (one.meta["model"] for one in vram.list_entries(keeper=keeper))
    assert shown.startswith("Tiny, sha256 ")


@pytest.mark.parametrize("what", ["config", "overrides", "variable", "dense"])
def test_all_that_the_bytes_depend_on_is_in_the_name(
    torch: Any, keeper: str, config: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder = Path(config.model)
    dense = folder / "1_Dense"
    dense.mkdir()
    (dense / "model.safetensors").write_bytes(b"1")
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Dense"}]')
    load(config, keeper)
    assert load(config, keeper).vram_lease is not None
    assert len(config.loads) == 1
    if what == "config":
        (folder / "config.json").write_text("{}")
    elif what == "overrides":
        config.hf_config = SimpleNamespace(to_dict=lambda: {"num_hidden_layers": 2})
    elif what == "variable":
        monkeypatch.setenv("VLLM_ZENTORCH_WEIGHT_PREPACK", "0")
    else:
        (dense / "model.safetensors").write_bytes(b"2")
    load(config, keeper)
    assert len(config.loads) == 2
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")  # of each engine its own
    load(config, keeper)
    assert len(config.loads) == 2


def test_settings_are_compared_as_they_are_in_each_process() -> None:
    from vram.engines.vllm_checkpoint import plain

    class Odd:
        pass

    said = {"b": {3, 1, 2}, 1: Odd(), "a": (1.5, None), "odd": SimpleNamespace(to_dict=lambda: {"x": True})}
    again = {"odd": SimpleNamespace(to_dict=lambda: {"x": True}), "a": [1.5, None], 1: Odd(), "b": {2, 3, 1}}
    assert plain(said) == plain(again)
    assert " at 0x" not in repr(plain(said))


def test_weights_of_another_user_are_not_taken(torch: Any, keeper: str, config: Any) -> None:
    """Whoever may connect can publish under a free name."""
    load(config, keeper)
    load(config, keeper)
    assert loads(config) == ["tiny"]
    assert not hasattr(load(config, keeper, owner=os.getuid() + 1), "vram_lease")
    assert loads(config) == ["tiny", "tiny"]
    with pytest.raises(MismatchError):
        load(config, keeper, owner=os.getuid() + 1, fallback=False)


def test_without_a_keeper_each_loads_or_says_so(torch: Any, tmp_path: Path, config: Any) -> None:
    nobody = str(tmp_path / "keeper")
    load(config, nobody)
    assert loads(config) == ["tiny"]
    with pytest.raises(PeerGoneError):
        load(config, nobody, fallback=False)


@pytest.mark.parametrize("part", ["_build_model", "_rebind", "_reload_on", "_memory"])
def test_an_engine_that_cannot_share_loads_by_itself(
    torch: Any, keeper: str, config: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """As vLLM's own loader does, whatever it is that fails; without a lease on what it does not use."""
    from vram.engines import vllm_loader

    if part != "_rebind":
        kept = load(config, keeper)

    def fails(*_: Any) -> Any:
        raise RuntimeError("a test's")

    before = len(config.loads)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_loader.VramModelLoader, part, fails)
        model = load(config, keeper)
        assert torch.equal(model.first.weight, config.load().first.weight)
        assert not hasattr(model, "vram_lease")
        model.first.weight.data.zero_()  # it is this engine's own
        assert "The weights are not shared: Traceback" in caplog.text
        assert "RuntimeError: a test's" in caplog.text
        if part == "_rebind":
            vram.remove(vram.list_entries(keeper=keeper)[0].name, keeper=keeper)
        with pytest.raises(RuntimeError, match="a test's"):
            load(config, keeper, fallback=False)
    gc.collect()
    assert len(vram.holders(keeper=keeper)) == (part != "_rebind")
    assert len(config.loads) - before == (3 if part == "_rebind" else 1)
    if part != "_rebind":
        del kept


@pytest.mark.parametrize("how", ["empty", "meta", "packed"])
def test_a_model_whose_weights_a_kernel_keeps_is_not_shared(
    torch: Any, keeper: str, config: Any, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    load_it = config.load

    def packed() -> Any:
        model = load_it()
        weight = model.last.weight
        if how == "empty":  # what oneDNN leaves, and what it keeps
            model.last.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            model.last.cpu_linear = lambda x: x @ weight.t()
        elif how == "meta":
            model.last.weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
        else:
            model.last._cpu_unpacked_conv_weight = weight.clone()
        return model

    config.load = packed
    for _ in range(2):
        model = load(config, keeper)
        assert not hasattr(model, "vram_lease")
        assert "The weights are not shared" in caplog.text
        assert "last" in caplog.text
        caplog.clear()
    assert vram.list_entries(keeper=keeper) == []
    assert loads(config) == ["tiny", "tiny"]
    with pytest.raises(UsageError):
        load(config, keeper, fallback=False)


def test_a_weight_transfer_into_what_is_shared_is_refused_when_the_engine_starts(
    torch: Any, keeper: str, config: Any
) -> None:
    from vram.engines.vllm_loader import VramModelLoader

    settings = engine(config)
    settings.weight_transfer_config = SimpleNamespace(backend="nccl")  # whichever: it writes to parameters
    loader = VramModelLoader(vllm_like.LoadConfig({"keeper": keeper}))
    with pytest.raises(ValueError, match='"mode": "copy"'):
        loader.load_model(settings, config)
    assert config.loads == []
    copies = VramModelLoader(vllm_like.LoadConfig({"keeper": keeper, "mode": "copy"}))
    assert copies.load_model(settings, config) is not None


def test_what_is_published_already_is_external_memory(torch: Any, keeper: str, config: Any) -> None:
    from vram.engines.vllm_loader import VramModelLoader

    loader = VramModelLoader(vllm_like.LoadConfig({"keeper": keeper}))
    assert loader.get_external_weight_memory(engine(config)) == 0
    model = load(config, keeper)
    assert loader.get_external_weight_memory(engine(config)) >= model.first.weight.nbytes
    assert VramModelLoader(vllm_like.LoadConfig({"mode": "copy"})).get_external_weight_memory(engine(config)) == 0


def test_loading_again_writes_to_nothing_that_is_shared(torch: Any, keeper: str, config: Any) -> None:
    from vram.engines.vllm_loader import VramModelLoader

    model = load(config, keeper)
    model.scale.zero_()
    loader = VramModelLoader(vllm_like.LoadConfig({"keeper": keeper}))
    loader.load_weights(model, config)
    assert model.scale.tolist() == [1, 1, 1]
    assert loads(config) == ["tiny"]
    loader.load_weights(config.load(), config)
    assert loads(config) == ["tiny", "in place"]


def test_what_is_read_again_is_the_checkpoint_but_for_what_is_shared(
    torch: Any, keeper: str, config: Any, tmp_path: Path
) -> None:
    from vram.engines.vllm_loader import VramModelLoader

    loader = VramModelLoader(vllm_like.LoadConfig({"keeper": keeper}))
    shared, copied = load(config, keeper), load(config, keeper, mode="copy")
    assert list(loader.get_all_weights(config, shared)) == []
    assert list(loader.get_all_weights(config, copied)) == [("checkpoint", config.model)]
    tiny, config.model = config.model, checkpoint(tmp_path / "other")
    with pytest.raises(UsageError, match="tiny' as it was when they were loaded, shared with other engines"):
        loader.get_all_weights(config, shared)
    config.model = checkpoint(Path(tiny), 5.0)  # written again, in place: it is not what is shared
    with pytest.raises(UsageError, match="as it is now"):
        loader.get_all_weights(config, shared)
    for layer in copied.modules():
        assert layer.info.restore_device == torch.device("cpu"), "and not where it was built, which is nowhere"


@pytest.mark.standin  # only memory of a GPU is parked
def test_what_is_parked_is_no_external_memory_and_is_woken(
    torch: Any, keeper: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vram.engines import vllm_loader

    loader = vllm_loader.VramModelLoader(vllm_like.LoadConfig({"keeper": keeper}))
    named: list[Any] = []
    loader._then = lambda *said: named.append(said)
    loader._with_key(engine(config), config)
    ((expect, name),) = named
    with vram.zeros(4 << 20, dtype="uint8", device="cuda:0") as array:
        vram.publish(name, {"w": array}, meta=expect, keeper=keeper)
    assert loader.get_external_weight_memory(engine(config)) >= 4 << 20
    vram.park(name, keeper=keeper)
    assert loader.get_external_weight_memory(engine(config)) == 0
    monkeypatch.setattr(vllm_loader, "_state", lambda lease: lease)  # this torch is for the CPU
    monkeypatch.setattr(loader, "_build_model", lambda *said: torch.nn.Module())
    model = loader.load_model(engine(config), config)
    assert config.loads == []
    assert not vram.entry(name, keeper=keeper).parked
    model.vram_lease.close()


# -- SGLang ---------------------------------------------------------------------------------------------------------
def test_sglang_loads_the_update_that_is_named(torch: Any) -> None:
    from vram.engines import sglang

    got: list[dict[str, Any]] = []
    model = SimpleNamespace(load_weights=lambda pairs: got.append({name: one.clone() for name, one in pairs}))
    with vram.private_keeper():
        vram.publish("policy", {"w": torch.zeros(4)}, updatable=True)
        with vram.update("policy") as arrays:
            arrays["w"].torch().fill_(3)
        sglang.update(model, [("policy", torch.tensor([2]))])
        assert got[-1]["w"].tolist() == [3, 3, 3, 3]
        vram.publish("policy", {"w": torch.ones(4)}, updatable=True)
        sglang.update(model, [("policy", torch.empty(1, 0))])
        assert got[-1]["w"].tolist() == [1, 1, 1, 1]
        vram.publish("fixed", {"w": torch.ones(4)})
        with pytest.raises(UsageError, match="updatable"):
            sglang.update(model, [("fixed", torch.tensor([1]))])
        sglang._leases.pop("policy").close()


class SglangLike:
    """SGLang's engine 0.5.23: no update outside a session, and refusals that are answers."""

    def __init__(self, model: Any, answers: str) -> None:
        self.model, self.answers = model, answers
        self.open = False
        self.refuses: dict[str, str] = {}

    def _answer(self, call: str, refusal: str | None) -> Any:
        message = self.refuses.get(call, refusal)
        if self.answers == "pairs":
            return message is None, message or "Success"
        if self.answers == "errors" and message:
            error = OSError("400 Client Error")  # requests.HTTPError is one
            error.response = SimpleNamespace(text=message)  # type: ignore[attr-defined]
            raise error
        return {"success": message is None, "message": message or "Success"}

    def begin_weight_update(self, selector: str = "all") -> Any:
        self.open = "begin_weight_update" not in self.refuses
        return self._answer("begin_weight_update", None)

    def end_weight_update(self) -> Any:
        was, self.open = self.open, False
        return self._answer("end_weight_update", None if was else "no weight-update session is open")

    def update_weights_from_tensor(self, pairs: Any, load_format: str | None = None, flush_cache: bool = True) -> Any:
        from vram.engines import sglang

        assert load_format == "vram.engines.sglang.update"
        refusal = None if self.open else "must run between begin_weight_update() and end_weight_update()"
        if refusal is None and "update_weights_from_tensor" not in self.refuses:
            sglang.update(self.model, pairs)
        return self._answer("update_weights_from_tensor", refusal)


@pytest.mark.parametrize("answers", ["pairs", "dictionaries", "errors"])
def test_an_update_for_sglang_is_sent_in_a_session_and_a_refusal_is_an_error(torch: Any, answers: str) -> None:
    from vram.engines import sglang

    got: list[list[float]] = []
    model = SimpleNamespace(load_weights=lambda pairs: got.append(dict(pairs)["w"].tolist()))
    like = SglangLike(model, answers)
    with vram.private_keeper():
        vram.publish("policy", {"w": torch.zeros(2)}, updatable=True)
        with vram.update("policy") as arrays:
            arrays["w"].torch().fill_(3)
        sglang.send_update(like, "policy", 2)
        assert got == [[3, 3]]
        for call in ("begin_weight_update", "update_weights_from_tensor", "end_weight_update"):
            like.refuses = {call: "a test's"}
            with pytest.raises(PeerError, match=f"SGLang refused {call}: a test's"):
                sglang.send_update(like, "policy", 2)
            assert not like.open, "the session was ended"
        like.refuses = {}
        vram.publish("fixed", {"w": torch.ones(2)})
        for name, kind in (("fixed", UsageError), ("missing", NotFoundError)):
            with pytest.raises(kind):
                sglang.send_update(like, name, 1)
            assert not like.open
        sglang._leases.pop("policy").close()


def test_sglang_takes_no_weights_of_another_user(torch: Any, keeper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vram.engines import sglang

    monkeypatch.setenv("VRAM_KEEPER", keeper)
    vram.publish("policy", {"w": np.zeros(4, "float32")}, updatable=True)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(MismatchError):
        sglang.update(SimpleNamespace(), [("policy", torch.tensor([1]))])
