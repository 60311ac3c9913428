"""vLLM's own classes with ours in them, in this process: ``make test-adapters``.

The failures of a weight transfer, and how it gathers, on a model of two layers and in front of one worker; and what is
registered and logged. tests/engines/check_vllm.py has the rest, with servers.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import vllm
from torch import nn
from tqdm import tqdm
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

import vram
from vram.engines.vllm import register

tqdm.monitor_interval = 0  # or its first bar leaves a thread behind


class Tiny(nn.Module):
    """A model with a tied weight, a buffer, and one that is not stored."""

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


def test_the_trainer_waits_for_a_worker_that_has_not_finished(keeper: str) -> None:
    with trainer_and_worker(keeper) as (trainer, engine, _, _):
        trainer._sender.timeout = 0.2
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
    for source.yields, said in ((0, "not give a single"), (1, r"did not give 1 of 2.*up\.weight")):
        with pytest.raises(vram.errors.UsageError, match=said):
            train(source, None, keeper)
        assert vram.list_entries(keeper=keeper) == []
    source.yields = 2
    with worker(Tiny()) as engine:
        trainer = train(source, Client(engine), keeper)
        for source.yields in (0, 1):
            with pytest.raises(vram.errors.UsageError, match="did not give"):
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
        trainer._sender.timeout = 1.0
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the other worker's"):
                trainer.send_weights()
        trainer.client = Client(engine)
        trainer.send_weights()
        same(served, trained)
