"""Ray's own direct transport with ours in it: ``make test-nodes``, where Ray is installed (2.60.0 was).

Not a test of CI, which has no Ray. One cluster of one node serves all tests but the last; tests/engines/check.py runs
them in a network namespace that has a loopback interface only, since Ray listens on all there are.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"  # which leaves a token in the home directory otherwise
os.environ["RAY_rdt_fetch_fail_timeout_milliseconds"] = "30000"  # noqa: SIM112  (Ray's own spelling)

import numpy as np
import pytest
import ray

import vram
from support.deadlines import until
from vram.engines import ray_transport
from vram.engines.ray import register, sweep
from vram.engines.ray_sources import TRANSPORT, prefix
from vram.errors import NotFoundError, PeerGoneError, UnsupportedError

SECONDS = 60.0  # for an answer of an actor
register()


class SourceOf:
    """Makes objects of each kind."""

    def __init__(self) -> None:
        self.kept: Any = None

    @ray.method(tensor_transport="VRAM")
    def make(self, count: int, value: float = 3.0) -> Any:
        array = vram.empty((count,), "f4", device="host")
        array.numpy()[:] = value
        self.kept = array
        return {"weights": [array], "ids": np.arange(5), "words": "as ever"}

    @ray.method(tensor_transport="vram")
    def again(self) -> Any:
        return self.kept

    @ray.method(tensor_transport="VRAM")
    def nothing(self) -> Any:
        return {"words": 7}

    @ray.method(tensor_transport="VRAM")
    def strange(self) -> Any:
        return {
            "transposed": np.arange(12.0).reshape(3, 4).T,
            "none": np.empty((0, 3)),
            "scalar": np.array(2.5),
            "words": np.array(["ray", None], dtype=object),
            "time": np.array(["2026-11-24"], "M8[D]"),
        }

    @ray.method(tensor_transport="VRAM")
    def tensors(self) -> Any:
        import torch

        return {"half": torch.full((4, 4), 2.0, dtype=torch.bfloat16), "trained": torch.ones(3, requires_grad=True)}

    @ray.method(tensor_transport="VRAM")
    def sealed(self) -> Any:
        array = vram.zeros((4,), "f4", device="host")
        vram.publish("mine", {"a": array})
        return array

    def put(self) -> Any:
        return [ray.put(np.arange(3), _tensor_transport=TRANSPORT)]

    @ray.method(tensor_transport="VRAM")
    def numbers(self, value: float) -> Any:
        return np.full(1 << 18, value)

    def plain(self) -> Any:
        return np.ones(1 << 18)

    def write(self, value: float) -> None:
        self.kept.numpy()[:] = value

    def inode(self) -> int:
        return inode(self.kept.address)

    def pid(self) -> int:
        return os.getpid()


class SinkOf:
    """Looks at what comes."""

    def __init__(self) -> None:
        self.kept: Any = None

    def take(self, value: Any, keep: bool = False) -> Any:
        array = value["weights"][0]
        if keep:
            self.kept = array
        seen, ids = array.numpy(), value["ids"]
        return {
            "type": type(array).__name__, "first": float(seen[0]), "count": len(seen), "inode": inode(array.address),
            "writeable": seen.flags.writeable or ids.flags.writeable, "ids": ids.tolist(), "words": value["words"],
        }  # fmt: skip

    def hold(self, value: Any, keep: bool) -> int:
        """Return which memory it is."""
        if keep:
            self.kept = value
        return inode(value.ctypes.data)

    def total(self) -> float:
        return float(self.kept.sum())

    def first(self) -> float:
        return float(self.kept.numpy()[0])

    def shown(self, value: Any) -> str:
        return repr(value)

    def look(self, value: dict[str, np.ndarray[Any, Any]]) -> Any:
        return {name: (one.tolist(), str(one.dtype)) for name, one in value.items()}

    def tensors(self, value: Any) -> Any:
        return {name: (type(one).__name__, str(one.dtype), float(one.sum())) for name, one in value.items()}

    def of_list(self, value: Any) -> Any:
        return ray.get(value[0]).tolist()

    @ray.method(tensor_transport="VRAM")
    def forward(self, value: Any) -> Any:
        return value["weights"]

    def end(self, value: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def pid(self) -> int:
        return os.getpid()


Source = ray.remote(num_cpus=0)(SourceOf)
Sink = ray.remote(num_cpus=0, enable_tensor_transport=True)(SinkOf)


def inode(address: int) -> int:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, number, *_ = line.split()
        low, high = (int(one, 16) for one in span.split("-"))
        if low <= address < high:
            return int(number)
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with vram.private_keeper() as keeper, pytest.MonkeyPatch.context() as patched:
        patched.setenv("VRAM_KEEPER", keeper.path)
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, configure_logging=False, log_to_driver=False,
            object_store_memory=100 << 20, runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        )  # fmt: skip
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    source, sink = Source.remote(), Sink.remote()
    ask(source.pid.remote())
    ask(sink.pid.remote())
    try:
        yield source, sink
    finally:
        ray.kill(source)
        ray.kill(sink)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    if not ray.is_initialized():
        return
    until(lambda: (sweep(), names())[1] == [])  # actors that were killed may not have ended yet


def ask(ref: Any) -> Any:
    return ray.get(ref, timeout=SECONDS)


def names() -> list[str]:
    return [one.name for one in vram.list_entries(prefix())]


def test_arrays_of_a_result_are_passed_without_a_copy_and_freed_with_the_object(pair: Any) -> None:
    source, sink = pair
    ref = source.make.remote(1 << 20)
    got = ask(sink.take.remote(ref, keep=True))
    assert got == {
        "type": "Array", "first": 3.0, "count": 1 << 20, "inode": ask(source.inode.remote()), "writeable": False,
        "ids": [0, 1, 2, 3, 4], "words": "as ever",
    }  # fmt: skip
    (entry,) = vram.list_entries(prefix())
    assert entry.owner == os.geteuid()
    assert entry.nbytes < (4 << 20) + (4 << 20), "one copy of 4 MiB, and the memory of a small array"
    here = ask(ref)
    assert type(here["ids"]) is np.ndarray
    assert here["weights"][0].numpy()[-1] == 3.0
    del here, ref
    until(lambda: not names())
    assert ask(sink.first.remote()) == 3.0, "who has received it keeps it"


def test_an_actor_may_return_the_same_array_again_and_write_to_it(pair: Any) -> None:
    source, sink = pair
    first = source.make.remote(1000)
    assert ask(sink.take.remote(first, keep=True))["first"] == 3.0
    second = source.again.remote()
    assert "3" in ask(sink.shown.remote(second))
    assert len(names()) == 2
    ask(source.write.remote(5.0))
    assert ask(sink.first.remote()) == 5.0, "it is the same memory, as with Ray's other direct transports"


def test_numpy_arrays_of_any_layout_arrive_and_others_go_as_ever(pair: Any) -> None:
    source, sink = pair
    assert ask(sink.look.remote(source.strange.remote())) == {
        "transposed": (np.arange(12.0).reshape(3, 4).T.tolist(), "float64"),
        "none": ([], "float64"),
        "scalar": (2.5, "float64"),
        "words": (["ray", None], "object"),
        "time": (np.array(["2026-11-24"], "M8[D]").tolist(), "datetime64[D]"),
    }


def test_copies_that_were_freed_are_used_again_unless_somebody_has_them(pair: Any) -> None:
    source, sink = pair
    ones = ask(sink.hold.remote(source.numbers.remote(1.0), True))
    until(lambda: names() == [])
    twos = ask(sink.hold.remote(source.numbers.remote(2.0), False))
    until(lambda: names() == [])
    assert twos != ones, "the sink has the first"
    threes = ask(sink.hold.remote(source.numbers.remote(3.0), False))
    until(lambda: names() == [])
    assert threes == twos
    assert ask(sink.total.remote()) == 1.0 * (1 << 18)


def test_a_copy_is_not_used_again_where_the_keeper_that_knew_its_readers_is_lost() -> None:
    def given(value: float) -> dict[str, np.ndarray[Any, Any]]:
        return {"0": np.full(1000, value)}

    copies = ray_transport._Copies()
    with vram.private_keeper() as keeper, pytest.MonkeyPatch.context() as patched:
        patched.setenv("VRAM_KEEPER", keeper.path)
        first = copies.copy(given(1.0))
        copies.free("lost", vram.publish("lost", first, writable=True).version, first)
        second = copies.copy(given(2.0))
        assert second["0"].address == first["0"].address
        copies.free("lost", vram.publish("lost", second, writable=True).version, second)
    with vram.private_keeper() as keeper, pytest.MonkeyPatch.context() as patched:
        patched.setenv("VRAM_KEEPER", keeper.path)
        third = copies.copy(given(3.0))
        assert third["0"].address != first["0"].address
        assert first["0"].numpy()[0] == 2.0


def test_numpy_arrays_of_other_methods_still_come_without_a_copy_through_rays_store(pair: Any) -> None:
    source, sink = pair
    ask(sink.take.remote(source.make.remote(10)))
    got = ask(source.plain.remote())
    assert got.sum() == 1 << 18
    assert not got.flags.writeable, "Ray's zero copy, which arrays pickled in band do not have"


def test_tensors_arrive_as_tensors(pair: Any) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make test-nodes NODES_TORCH=torch==2.13.0")
    source, sink = pair
    assert ask(sink.tensors.remote(source.tensors.remote())) == {
        "half": ("Tensor", "torch.bfloat16", 32.0),
        "trained": ("Tensor", "torch.float32", 3.0),
    }


def test_what_was_received_can_be_passed_on(pair: Any) -> None:
    source, sink = pair
    other = Sink.remote()
    ref = source.make.remote(10)
    forwarded = sink.forward.remote(ref)
    assert "3" in ask(other.shown.remote(forwarded))
    ray.kill(other)


def test_what_is_put_is_passed_by_the_driver_and_by_an_actor(pair: Any) -> None:
    source, sink = pair
    ref = ray.put(np.arange(4), _tensor_transport=TRANSPORT)
    assert ask(sink.shown.remote(ref)) == "array([0, 1, 2, 3])"
    del ref
    until(lambda: not names())
    assert ask(sink.of_list.remote(ask(source.put.remote()))) == [0, 1, 2]


# -- bad days ----------------------------------------------------------------------------------------------------------
def test_an_object_outlives_its_actor_and_is_removed_with_its_last_reference(pair: Any) -> None:
    _, sink = pair
    source = Source.remote()
    pid = ask(source.pid.remote())
    ref = source.make.remote(10)
    assert ask(sink.take.remote(ref))["first"] == 3.0
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert ask(sink.take.remote(ref, keep=True))["first"] == 3.0
    assert len(names()) == 1
    del ref
    until(lambda: not names())
    assert ask(sink.first.remote()) == 3.0


def test_an_object_that_is_gone_when_it_is_attached_is_a_typed_error_and_nothing_worse(pair: Any) -> None:
    source, sink = pair
    ref = source.make.remote(10)
    assert ask(sink.take.remote(ref))["first"] == 3.0
    (name,) = names()
    vram.remove(name)
    with pytest.raises(NotFoundError, match=r"is gone or was never there[\s\S]*Ray has freed object"):
        ask(sink.take.remote(ref))
    assert ask(sink.take.remote(source.make.remote(10)))["first"] == 3.0


def test_a_receiver_that_dies_takes_nobody_along(pair: Any) -> None:
    source, sink = pair
    other = Sink.remote()
    pid = ask(source.pid.remote())
    ref = source.make.remote(10)
    with pytest.raises(ray.exceptions.RayError):
        ask(other.end.remote(ref))
    assert ask(source.pid.remote()) == pid
    assert ask(sink.take.remote(ref))["first"] == 3.0


def test_without_a_keeper_a_result_is_a_typed_error_and_the_actor_lives(pair: Any) -> None:
    _, sink = pair
    lost = Source.options(runtime_env={"env_vars": {"VRAM_KEEPER": "/nonexistent/keeper.sock"}}).remote()
    pid = ask(lost.pid.remote())
    ref = lost.make.remote(10)
    with pytest.raises((PeerGoneError, ray.exceptions.RayError)) as caught:
        ask(ref)
    assert "keeper" in str(caught.value)
    assert ask(lost.pid.remote()) == pid
    with pytest.raises((PeerGoneError, ray.exceptions.RayError), match="keeper"):
        ask(sink.take.remote(ref))
    ray.kill(lost)


def test_a_keeper_that_ends_fails_the_receiver_with_a_typed_error() -> None:
    with vram.private_keeper() as keeper:
        there = {"runtime_env": {"env_vars": {"VRAM_KEEPER": keeper.path}}}
        source, sink = Source.options(**there).remote(), Sink.options(**there).remote()
        ref = source.make.remote(10)
        assert ask(sink.take.remote(ref, keep=True))["first"] == 3.0
    with pytest.raises(PeerGoneError):
        ask(sink.take.remote(ref))
    assert ask(sink.first.remote()) == 3.0, "what is mapped stays"
    del ref
    assert ask(source.pid.remote()) > 0, "there is nothing to remove, and nobody minds"
    ray.kill(source)
    ray.kill(sink)


def test_another_keepers_object_says_whose_it_is(pair: Any) -> None:
    source, _ = pair
    with vram.private_keeper() as keeper:
        sink = Sink.options(runtime_env={"env_vars": {"VRAM_KEEPER": keeper.path}}).remote()
        with pytest.raises(NotFoundError):
            ask(sink.take.remote(source.make.remote(10)))
        ray.kill(sink)


def test_targets_are_refused(pair: Any) -> None:
    source, _ = pair
    ref = source.make.remote(10)
    until(lambda: len(names()) == 1)
    metadata = ray_transport.VramMetadata([((1,), np.dtype("f4"))], "cpu", names()[0], 1, ("array",))
    with pytest.raises(UnsupportedError, match="copy what you get"):
        ray_transport.VramTransport().recv_multiple_tensors("x", metadata, None, [np.empty(1)])
    del ref


def test_an_object_is_replicated_to_another_node_of_rays() -> None:
    """Two nodes of Ray's, each with a keeper of its own; last, since it ends the cluster of the others."""
    from ray.cluster_utils import Cluster

    from vram.nodes.carrier import Carrier

    ray.shutdown()
    with vram.private_keeper() as one, vram.private_keeper() as other, Carrier("127.0.0.1:0", keeper=one) as carrier:
        cluster = Cluster()
        path = os.pathsep.join(sys.path)
        try:
            for resource in ("here", "there"):
                cluster.add_node(
                    num_cpus=1, resources={resource: 1}, include_dashboard=False, object_store_memory=100 << 20
                )
            ray.init(address=cluster.address, configure_logging=False, log_to_driver=False)
            said = {"PYTHONPATH": path, "VRAM_KEEPER": one.path, "VRAM_CARRIER": carrier.address}
            source = Source.options(resources={"here": 1}, runtime_env={"env_vars": said}).remote()
            said = {"PYTHONPATH": path, "VRAM_KEEPER": other.path}
            sink = Sink.options(resources={"there": 1}, runtime_env={"env_vars": said}).remote()
            ref = source.make.remote(1 << 20)
            got = ask(sink.take.remote(ref, keep=True))
            assert (got["first"], got["count"], got["ids"]) == (3.0, 1 << 20, [0, 1, 2, 3, 4])
            assert got["inode"] != ask(source.inode.remote()), "it is a replica"
            assert vram.list_entries(keeper=other) == []
            del ref
            until(lambda: vram.list_entries(keeper=one) == [])
            assert ask(sink.first.remote()) == 3.0
        finally:
            ray.shutdown()
            cluster.shutdown()
