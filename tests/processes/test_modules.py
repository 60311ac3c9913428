"""Modules of torch: published whole, and made again on the published memory, with nothing forgotten and no copy."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import vram
from vram.errors import MismatchError, UsageError

torch = pytest.importorskip("torch", reason="could not import 'torch'")
nn: Any = torch.nn


@pytest.fixture(autouse=True)
def keeper() -> Iterator[None]:
    with vram.private_keeper():
        yield
        gc.collect()


class Rotary(nn.Module):  # type: ignore[misc]
    """As the models of transformers have: a table that is not saved, made from a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0) / 3, persistent=False)

    def forward(self, x: Any) -> Any:
        return x + self.table


class Tied(nn.Module):  # type: ignore[misc]
    """Two names of one parameter, a norm with buffers that are saved, and a table that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.rotary = Rotary()
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.norm(self.rotary(self.embed(tokens))))


class Int8Linear(nn.Module):  # type: ignore[misc]
    """A quantized layer, as those that keep integers and scales as plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-128, 127, (8, 8), dtype=torch.int8), requires_grad=False)
        self.register_buffer("scale", torch.rand(8, 1))

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.weight * self.scale)


class Half(nn.Module):  # type: ignore[misc]
    """A part of a diffusion model: convolutions in 16 bits, a norm of groups, and frequencies that are not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1).to(torch.bfloat16).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(2, 8).to(torch.bfloat16)
        self.register_buffer("frequencies", torch.exp(-torch.arange(8.0)), persistent=False)

    def forward(self, x: Any) -> Any:
        return self.norm(self.conv(x)) * self.frequencies.view(1, 8, 1, 1)


def drawn(kind: Callable[[], Any], seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return kind().eval()


CASES = {
    "tied": (Tied, lambda: torch.arange(6)),
    "int8": (Int8Linear, lambda: torch.ones(2, 8)),
    "half": (Half, lambda: torch.ones(1, 4, 6, 6, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_module_on_published_memory_computes_the_same(case: str) -> None:
    kind, given = CASES[case]
    published = drawn(kind)
    wanted = published(given())
    assert len(vram.publish("m", published).copied) == len(published.state_dict())
    with vram.attach("m") as lease:
        made = lease.module(kind)
        addresses = {tensor.data_ptr() for tensor in lease.torch().values()}
    assert torch.equal(made(given()), wanted)
    assert {tensor.data_ptr() for tensor in made.state_dict().values()} == addresses
    assert not made.training
    assert not any(one.requires_grad for one in made.parameters())
    assert {name: one.dtype for name, one in made.state_dict().items()} == {
        name: one.dtype for name, one in published.state_dict().items()
    }


def test_tied_parameters_stay_tied_and_are_in_memory_once() -> None:
    published = drawn(Tied)
    held = vram.publish("m", published)
    assert held.arrays == 7
    with vram.attach("m") as lease:
        assert lease["embed.weight"].address == lease["head.weight"].address
        made = lease.module(Tied)
        assert made.head.weight is made.embed.weight


def test_one_name_of_a_tied_parameter_is_enough() -> None:
    state = drawn(Tied).state_dict()
    del state["head.weight"]  # as safetensors files have it
    vram.publish("m", state)
    with vram.attach("m") as lease:
        made = lease.module(Tied)
        assert made.head.weight is made.embed.weight
        assert made.head.weight.data_ptr() == lease.torch()["embed.weight"].data_ptr()


def test_a_parameter_that_is_tied_before_it_is_registered_stays_one() -> None:
    def make() -> Any:
        shared = nn.Parameter(torch.ones(3))
        module = nn.Module()
        module.first, module.second = shared, shared
        return module

    vram.publish("m", make())
    with vram.attach("m") as lease:
        made = lease.module(make)
        assert made.first is made.second


def test_making_one_takes_no_memory_for_parameters() -> None:
    seen: list[bool] = []

    def make() -> Any:
        module = nn.Linear(8, 8)
        seen.append(module.weight.is_meta)
        return module

    vram.publish("m", nn.Linear(8, 8))
    with vram.attach("m") as lease:
        lease.module(make)
    assert seen == [True]
    assert not nn.Linear(8, 8).weight.is_meta


def test_another_thread_that_makes_a_module_meanwhile_gets_its_own() -> None:
    def make() -> Any:
        made: list[Any] = []
        other = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        other.start()
        other.join()
        assert not made[0].weight.is_meta
        return nn.Linear(8, 8)

    vram.publish("m", nn.Linear(8, 8))
    with vram.attach("m") as lease:
        assert lease.module(make).weight.data_ptr() == lease.torch()["weight"].data_ptr()


def test_a_module_moves_on_to_a_newer_version() -> None:
    vram.publish("m", drawn(Tied, 1))
    with vram.attach("m") as lease:
        made = lease.module(Tied)
    newer = drawn(Tied, 2)
    vram.publish("m", newer)
    with vram.attach("m") as lease:
        assert lease.module(made) is made
    assert torch.equal(made(torch.arange(6)), newer(torch.arange(6)))
    assert made.head.weight is made.embed.weight


def test_an_updatable_module_shows_updates() -> None:
    trained = nn.Linear(4, 4)
    vram.publish("m", trained, updatable=True)
    with vram.attach("m") as lease:
        made = lease.module(lambda: nn.Linear(4, 4))
        with torch.no_grad():
            trained.weight.add_(1)
        with vram.update("m") as arrays:
            arrays["weight"].torch().copy_(trained.weight.detach())
        with lease.reading():
            assert torch.equal(made.weight, trained.weight)
        del arrays


def test_attach_or_publish_takes_a_module() -> None:
    with vram.attach_or_publish("m", lambda: drawn(Tied)) as lease:
        made = lease.module(Tied)
    assert torch.equal(made(torch.arange(6)), drawn(Tied)(torch.arange(6)))


# -- moved into the published memory ----------------------------------------------------------------------------------
@pytest.mark.parametrize("case", CASES)
def test_a_consumed_module_is_on_the_published_memory(case: str) -> None:
    kind, given = CASES[case]
    module = drawn(kind)
    wanted = module(given())
    vram.publish("m", module.train(), consume=True)
    assert torch.equal(module(given()), wanted), "in evaluation mode"
    assert not any(one.requires_grad for one in module.parameters())
    with vram.attach("m") as lease:
        for name, tensor in module.state_dict().items():
            assert torch.equal(lease[name].torch(), tensor)


TWICE = """
import gc, sys, torch, vram

def peak():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))

def make():
    return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(64)))  # 256 MiB

with vram.private_keeper():
    warm = torch.nn.Linear(8, 8)
    vram.publish("warm", warm, consume=True)
    vram.attach("warm").module(lambda: torch.nn.Linear(8, 8))(torch.ones(1, 8))
    if sys.argv[1] == "consume":
        before = peak()
        model = make()
        vram.publish("m", model, consume=True)
    else:
        state = {f"{n}.weight": vram.zeros((1024, 1024), device="host") for n in range(64)}
        vram.publish("m", state)
        before = peak()
        with vram.attach("m") as lease:
            lease.module(make)
    print(peak() - before)
"""


@pytest.mark.parametrize(("way", "most"), [("consume", 340), ("attach", 60)])
def test_a_model_is_never_in_memory_twice(way: str, most: int) -> None:
    done = subprocess.run([sys.executable, "-c", TWICE, way], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < most, "MiB more than before, of a model of 256"


def test_what_cannot_be_published_leaves_the_module_as_it_was() -> None:
    module = drawn(Tied)
    wanted = module(torch.arange(6))
    with pytest.raises(UsageError):
        vram.publish("no//name", module, consume=True)
    assert torch.equal(module(torch.arange(6)), wanted)


# -- what goes wrong --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: nn.Linear(8, 9, bias=False), r"another shape: weight \(\(9, 8\) in it, \(8, 8\) here\)"),
        (lambda: nn.Linear(8, 8), r"1 of its tensors are not here: bias"),
        (
            lambda: nn.Sequential(nn.Linear(8, 8, bias=False)),
            r"not here: 0.weight; 1 have no place in it: weight",
        ),
    ],
)
def test_a_module_that_was_made_differently_says_what_differs(make: Callable[[], Any], says: str) -> None:
    vram.publish("m", nn.Linear(8, 8, bias=False))
    with vram.attach("m") as lease, pytest.raises(MismatchError, match=says):
        lease.module(make)


def test_a_lease_on_some_arrays_says_so() -> None:
    vram.publish("m", nn.Linear(8, 8))
    with vram.attach("m", only=["w*"]) as lease, pytest.raises(MismatchError, match=r"only=\['w\*'\].*not here: bias"):
        lease.module(lambda: nn.Linear(8, 8))


def test_what_has_no_values_is_named() -> None:
    def naive() -> Any:
        with torch.device("meta"):
            return Tied()

    def derived() -> Any:
        module = nn.Linear(8, 8)
        module.register_buffer("doubled", module.weight.detach() * 2, persistent=False)
        return module

    vram.publish("tied", drawn(Tied))
    vram.publish("linear", nn.Linear(8, 8))
    for name, make, lacks in (("tied", naive, "rotary.table"), ("linear", derived, "doubled")):
        with vram.attach(name) as lease, pytest.raises(UsageError, match=re.escape(lacks)):
            lease.module(make)


@pytest.mark.parametrize("given", [None, {"weight": 1}, lambda: None])
def test_what_makes_no_module_is_refused(given: Any) -> None:
    vram.publish("m", nn.Linear(8, 8))
    with vram.attach("m") as lease, pytest.raises(UsageError, match="module"):
        lease.module(given)


def test_a_state_that_is_no_tensor_is_named() -> None:
    class Noted(nn.Linear):  # type: ignore[misc]
        def get_extra_state(self) -> object:
            return {"a": 1}

        def set_extra_state(self, state: object) -> None:
            raise AssertionError(state)

    with pytest.raises(UsageError, match=r"'_extra_state' in the state of the Noted is of type dict"):
        vram.publish("m", Noted(2, 2))
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="'weight' of the Linear is on meta"):
        vram.publish("m", module)


# -- what others found ------------------------------------------------------------------------------------------------
def test_a_module_that_its_loader_keeps_stays_its_own() -> None:
    module = nn.Linear(4, 4)
    with vram.attach_or_publish("m", lambda: module):
        module.weight.data.add_(1)
    assert module.training
    assert module.weight.requires_grad


def test_an_optimizer_leaves_a_consumed_module_alone() -> None:
    module = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    vram.publish("m", module, consume=True)
    before = module.weight.clone()
    optimizer.step()
    assert torch.equal(module.weight, before)


def test_weights_that_differ_are_not_tied() -> None:
    state = drawn(Tied).state_dict()
    state["head.weight"] = state["head.weight"] + 1
    vram.publish("m", state)
    with (
        vram.attach("m") as lease,
        pytest.raises(MismatchError, match=r"embed.weight and head.weight are one parameter"),
    ):
        lease.module(Tied)
    state["head.weight"] = state["embed.weight"].clone()  # as files have it that say the same twice
    vram.publish("m", state)
    with vram.attach("m") as lease:
        made = lease.module(Tied)
    assert made.head.weight is made.embed.weight


def test_threads_make_modules_at_once() -> None:
    vram.publish("m", nn.LSTM(4, 4))
    failed: list[BaseException] = []

    def make(lease: vram.Lease) -> None:
        try:
            for _ in range(50):
                lease.module(lambda: nn.LSTM(4, 4))(torch.ones(2, 1, 4))
        except BaseException as error:
            failed.append(error)

    with vram.attach("m") as lease:
        threads = [threading.Thread(target=make, args=(lease,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []


def test_a_module_that_does_not_fit_stays_as_it_was() -> None:
    vram.publish("m", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    before = {name: (one.data_ptr(), one.requires_grad) for name, one in module.named_parameters()}
    with vram.attach("m") as lease, pytest.raises(MismatchError, match=r"2 of its tensors are not here: 2.weight"):
        lease.module(module)
    assert {name: (one.data_ptr(), one.requires_grad) for name, one in module.named_parameters()} == before
    assert module.training


def test_one_module_is_made_inside_of_another() -> None:
    vram.publish("inner", nn.Linear(4, 4))
    vram.publish("outer", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    with vram.attach("inner") as inner, vram.attach("outer") as outer:
        made = outer.module(lambda: nn.Sequential(inner.module(lambda: nn.Linear(4, 4)), nn.Linear(4, 2)))
        assert made[0].weight.data_ptr() == outer.torch()["0.weight"].data_ptr()


def test_a_state_of_other_tensors_is_not_moved() -> None:
    class Cloned(nn.Linear):  # type: ignore[misc]
        def state_dict(self, *given: Any, **options: Any) -> Any:
            return {name: one.detach().clone() for name, one in super().state_dict(*given, **options).items()}

    module = Cloned(4, 4)
    with pytest.raises(UsageError, match=r"'weight' in the state of the Cloned is none of its own tensors"):
        vram.publish("m", module, consume=True)
    assert module.weight.requires_grad
    assert vram.publish("m", module).arrays == 2


def test_modules_that_need_values_or_a_call_first_say_so() -> None:
    def orthogonal() -> Any:
        return nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))

    with pytest.raises(UsageError, match="'weight' of the LazyLinear has no shape yet"):
        vram.publish("m", nn.LazyLinear(4))
    published = orthogonal()
    vram.publish("m", published)
    with vram.attach("m") as lease:
        with pytest.raises(UsageError, match="pass the module that it makes"):
            lease.module(orthogonal)
        made = lease.module(orthogonal())
    assert torch.equal(made(torch.ones(1, 4)), published(torch.ones(1, 4)))


def test_a_list_of_parameters_that_have_no_values_is_named() -> None:
    class Listed(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.all = [self.weight]

    vram.publish("m", Listed())
    with vram.attach("m") as lease, pytest.raises(UsageError, match=r"\ball would have no values"):
        lease.module(Listed)
