"""Ray's adapter on doubles of Ray's classes: tests/engines/check_ray.py has it on Ray's own, where that is."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.support import ray_like
from tests.support.deadlines import SOON, until
from tests.support.places import private_socket

import vram
from vram import engines
from vram.errors import AccessDeniedError, NotFoundError, PeerGoneError, UnsupportedError, UsageError
from vram.keeper.client import close_client


@pytest.fixture(autouse=True)
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[ray_like.Cluster]:
    made = ray_like.Cluster()
    for name in [one for one in sys.modules if one.partition(".")[0] == "ray" or one == "vram.engines.ray_transport"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(engines, "ray_transport", raising=False)
    for name, module in ray_like.modules(made).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "torch", None)  # has tests of its own, where Ray is
    monkeypatch.setattr(ray_like.CloudPickler, "dispatch", {})
    with private_socket() as keeper:
        monkeypatch.setenv("VRAM_KEEPER", keeper)
        yield made
        gc.collect()
        close_client(keeper)
        monkeypatch.delitem(sys.modules, "vram.engines.ray_transport", raising=False)
        monkeypatch.delattr(engines, "ray_transport", raising=False)


@pytest.fixture
def adapter() -> Any:
    return importlib.import_module("vram.engines.ray_transport")


@pytest.fixture
def transport(adapter: Any) -> Iterator[Any]:
    made = adapter.VramTransport()
    yield made
    vars(made).clear()  # pytest keeps what a fixture made


def names() -> list[str]:
    return [one.name for one in vram.list_entries(names_of.prefix())]


ours = importlib.import_module("vram.engines.ray")
names_of = importlib.import_module("vram.engines.ray_sources")


def source(value: float = 3.0) -> vram.Array:
    array = vram.empty((1000,), "f4", device="host")
    array.numpy()[:] = value
    return array


# -- registration ------------------------------------------------------------------------------------------------------
def test_the_transport_is_registered_once_for_vram_arrays(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "collect_left", lambda: None)
    ours.register()
    ours.register()
    known = sys.modules["ray.experimental.rdt.util"].transport_manager_info
    assert known == {"VRAM": (["cpu", "cuda"], adapter.VramTransport, vram.Array)}


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UnsupportedError, match=r"pip install \"\.\[ray\]\" in a clone of vram"):
        ours.register()


def test_another_serialization_of_rays_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["ray._private.serialization"], "SerializationContext", object)
    with pytest.raises(UnsupportedError, match=r"2\.60"):
        ours.register()


# -- out of a result, and back into it ---------------------------------------------------------------------------------
@pytest.mark.usefixtures("adapter")
def test_numpy_arrays_are_taken_out_of_a_result_with_a_transport_alone(cluster: ray_like.Cluster) -> None:
    array = np.arange(1000)
    words = np.array(["a", None], dtype=object)
    data, taken = cluster.taken_out({"n": array, "words": words})
    assert len(data) < 1000
    assert [one is array for one in taken] == [True]
    back = cluster.put_back(data, [array + 1])
    assert back["n"].tolist() == (array + 1).tolist()
    assert back["words"].tolist() == ["a", None]
    data, buffers = cluster.pickled(array)
    assert len(data) < 1000
    assert len(buffers) == 1, "as numpy does by itself: out of band"
    assert pickle.loads(data, buffers=buffers).tolist() == array.tolist()
    cluster.is_initialized = False
    assert pickle.loads(cluster.pickled(words)[0]).tolist() == ["a", None]


# -- objects -----------------------------------------------------------------------------------------------------------
def test_an_object_is_an_entry_of_this_user_until_it_is_freed(transport: Any) -> None:
    array, ids = source(), np.arange(6).reshape(2, 3).T
    told = transport.extract_tensor_transport_metadata("ab12", [array, ids])
    (entry,) = vram.list_entries()
    assert entry.name == told.name
    assert told.name.startswith(f"~{os.geteuid()}/ray/ab12/")
    assert len(told.name.rpartition("/")[2]) == 32, "nobody guesses it"
    assert told.tensor_meta == [((1000,), np.dtype("f4")), ((3, 2), np.dtype("i8"))]
    assert told.tensor_device == "cpu"
    assert transport.extract_tensor_transport_metadata("ab12", [array, ids]) is told, "a task that is tried again"
    told = pickle.loads(pickle.dumps(told))
    got = transport.recv_multiple_tensors("ab12", told, None)
    assert isinstance(got[0], vram.Array)
    assert type(got[1]) is np.ndarray
    assert got[1].tolist() == ids.tolist()
    array.numpy()[0] = 9.0
    assert got[0].numpy()[0] == 9.0, "it is the same memory, which its source may go on to write to"
    assert not got[0].numpy().flags.writeable
    transport.garbage_collect("ab12", told, [array, ids])
    assert names() == []
    assert got[0].numpy()[1] == 3.0, "who has received it keeps it"
    transport.garbage_collect("ab12", told, [array, ids])
    with pytest.raises(NotFoundError) as caught:
        transport.recv_multiple_tensors("ab12", told, None)
    assert any("Ray has freed object ab12" in note for note in caught.value.__notes__)


def test_an_object_without_arrays_is_no_entry(transport: Any) -> None:
    told = transport.extract_tensor_transport_metadata("ab12", [])
    assert names() == []
    assert transport.recv_multiple_tensors("ab12", told, None) == []
    transport.garbage_collect("ab12", told, [])


def test_what_is_read_only_for_good_is_shared_as_it_is(transport: Any) -> None:
    array = source()
    vram.publish("mine", {"a": array})
    transport.extract_tensor_transport_metadata("ab12", [array])
    assert [entry.writable for entry in vram.list_entries(names_of.prefix())] == [False]


def test_names_and_kinds_of_strangers_are_refused(adapter: Any, transport: Any) -> None:
    vram.publish("other", {"0": source()})
    shape = [((1000,), np.dtype("f4"))]
    for name, kinds in (
        ("other", ("array",)),
        (f"~{os.geteuid() + 1}/ray/x", ("array",)),
        (f"{names_of.prefix()}x", ("bad",)),
    ):
        with pytest.raises(AccessDeniedError, match="its user's own"):
            transport.recv_multiple_tensors("ab12", adapter.VramMetadata(shape, "cpu", name, 1, kinds), None)
    told = transport.extract_tensor_transport_metadata("cd34", [source()])
    with pytest.raises(UnsupportedError, match="copy what you get"):
        transport.recv_multiple_tensors("cd34", told, None, [np.empty(1000, "f4")])
    with pytest.raises(UsageError, match="one sided"):
        transport.send_multiple_tensors([], told, None)


def test_no_keeper_is_a_typed_error_and_nothing_to_free(monkeypatch: pytest.MonkeyPatch, transport: Any) -> None:
    told = transport.extract_tensor_transport_metadata("ab12", [source()])
    there = os.environ["VRAM_KEEPER"]
    monkeypatch.setenv("VRAM_KEEPER", there + ".none")
    with pytest.raises(PeerGoneError):
        transport.recv_multiple_tensors("ab12", told, None)
    with pytest.raises(PeerGoneError):
        transport.extract_tensor_transport_metadata("cd34", [source()])
    transport.garbage_collect("ab12", told, [])


def test_a_receiver_that_dies_is_no_reason_to_kill_its_source(transport: Any) -> None:
    assert transport.is_one_sided()
    assert transport.can_abort_transport(), "else Ray kills both actors"
    transport.abort_transport("ab12", None)


# -- another node ------------------------------------------------------------------------------------------------------
def test_an_object_of_another_node_without_a_carrier_says_what_is_missing(cluster: Any, transport: Any) -> None:
    told = transport.extract_tensor_transport_metadata("ab12", [source()])
    vram.remove(told.name)
    cluster.node = "node b"
    with pytest.raises(UnsupportedError, match="vram carry"):
        transport.recv_multiple_tensors("ab12", told, None)


def test_an_object_of_another_node_is_pulled_from_its_carrier(
    monkeypatch: pytest.MonkeyPatch, cluster: Any, transport: Any
) -> None:
    from vram.nodes.carrier import Carrier

    with Carrier("127.0.0.1:0", prefix=names_of.prefix()) as carrier, private_socket() as here:
        monkeypatch.setenv("VRAM_CARRIER", carrier.address)
        told = transport.extract_tensor_transport_metadata("ab12", [source(), np.arange(4)])
        assert told.origin == carrier.address
        there = os.environ["VRAM_KEEPER"]
        monkeypatch.setenv("VRAM_KEEPER", here)
        cluster.node = "node b"
        got = transport.recv_multiple_tensors("ab12", told, None)
        assert got[0].numpy().tolist() == [3.0] * 1000
        assert got[1].tolist() == [0, 1, 2, 3]
        assert names() == [], "a replica lasts as long as its leases: nobody tells a receiver to free it"
        del got
        gc.collect()
        until(lambda: not vram.statistics().leases)
        told.source = "another/1/1"
        with pytest.raises(AccessDeniedError, match="another than the one"):
            transport.recv_multiple_tensors("ab12", told, None)
        monkeypatch.setenv("VRAM_KEEPER", there)
        close_client(here)


# -- sources that end --------------------------------------------------------------------------------------------------
DIES = (
    "import os, vram; from vram.engines import ray_sources as ray\n"
    "a = vram.zeros((4,), 'f4', device='host')\n"
    "vram.publish(ray.prefix() + 'dead', {'0': a}, meta={ray.SOURCE: str(ray.Process.this())})\n"
    "print(ray.Process.this(), flush=True)\n"
    "os.kill(os.getpid(), 9)\n"
)


def died() -> str:
    done = subprocess.run([sys.executable, "-c", DIES], capture_output=True, text=True, check=False, timeout=SOON)
    return done.stdout.strip()


def test_processes_are_told_apart_also_from_later_ones_of_their_number() -> None:
    this = names_of.Process.this()
    assert not this.has_ended
    assert names_of.Process.parse(str(this)) == this
    assert names_of.Process(this.machine, this.pid, this.started + 1).has_ended
    assert not names_of.Process("elsewhere", this.pid, this.started + 1).has_ended, "nobody here can know"
    assert names_of.Process.parse(died()).has_ended
    for text in ("", "a", "a/b/c", "a/1", "/1/2", "a/1/" + "9" * 100, "a/-1/2"):
        assert names_of.Process.parse(text) is None


def test_a_sweep_removes_what_dead_sources_left_and_nothing_else(transport: Any) -> None:
    died()
    told = transport.extract_tensor_transport_metadata("ab12", [source()])
    vram.publish(f"{names_of.prefix()}unknown", {"0": source()})
    vram.publish("other", {"0": source()}, meta={names_of.SOURCE: "x/1/1"})
    assert ours.sweep() == [f"{names_of.prefix()}dead"]
    assert sorted(names()) == sorted([told.name, f"{names_of.prefix()}unknown"])
    assert ours.sweep() == []


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch, adapter: Any) -> Iterator[Any]:
    made = adapter._Left()
    monkeypatch.setattr(adapter, "_left", made)
    monkeypatch.setattr(adapter, "_AGAIN", 0.05)
    monkeypatch.setattr(adapter, "_TIMES", 100_000)
    made.begin()
    made.begin()
    yield made
    made.end()


def test_a_driver_removes_what_a_dead_source_cannot(adapter: Any, left: Any, cluster: Any, transport: Any) -> None:
    said = died()
    name = f"{names_of.prefix()}dead"
    data = pickle.dumps(adapter.VramMetadata([], "cpu", name, 1, ("array",), "node a", said))
    cluster.worker.mode = 1  # an actor's
    pickle.loads(data)
    cluster.worker.mode = 0
    alive = pickle.dumps(transport.extract_tensor_transport_metadata("ab12", [source()]))
    first, second = pickle.loads(data), pickle.loads(data)
    pickle.loads(alive)
    del first
    until(left._dropped.empty)
    assert len(names()) == 2, "the driver still has a reference, and the other source can be asked"
    del second
    until(lambda: name not in names())
    assert len(names()) == 1
