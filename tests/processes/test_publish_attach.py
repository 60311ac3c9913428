"""Publish and attach, as users call them: what is shared as it is, what is copied and why, and how leases end."""

from __future__ import annotations

import array as stdlib_array
import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support.deadlines import SOON, until
from tests.support.forked import end_of, refused
from tests.support.keeper_here import is_stopped, later
from tests.support.limits import limited

import vram
from vram import driver as drivers
from vram.arrays import Array
from vram.errors import (
    AccessDeniedError,
    BusyError,
    ClosedError,
    LeakWarning,
    MismatchError,
    NotFoundError,
    QuotaError,
    ReadOnlyError,
    UsageError,
    WaitTimeoutError,
)
from vram.handover.pickling import shut_down
from vram.keeper.client import KeeperClient
from vram.keeper.rules import REQUEST
from vram.sharing.channel import Channel
from vram.spec import HOST

pytestmark = pytest.mark.usefixtures("kept")
MIB = 1 << 20


def made(rows: int = 8, *, capacity: int | None = None, start: int = 0) -> Array:
    """An array of rows of four numbers that are all different."""
    array = vram.empty((rows, 4), "int64", device="host", capacity=capacity)
    array.numpy()[:] = np.arange(start, start + rows * 4).reshape(rows, 4)
    return array


def same_memory(one: Array, other: Array) -> bool:
    """Whether two arrays lie on the same physical memory."""
    (first, *_), _ = one.region.segments(one.offset, one.offset + 1)
    (second, *_), _ = other.region.segments(other.offset, other.offset + 1)
    with first, second:
        return first.identity() == second.identity()


def read(name: str, **options: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Attach, copy everything, and close."""
    with vram.attach(name, **options) as lease:
        return {key: array.copy() for key, array in lease.items()}


# -- what is shared as it is ----------------------------------------------------------------------------------------
def test_a_vram_array_is_shared_as_it_is() -> None:
    with made() as a:
        receipt = vram.publish("vectors", {"emb": a}, meta={"config": "sha256:1"})
        assert (receipt.name, receipt.version, receipt.arrays, receipt.nbytes) == ("vectors", 1, 1, 256)
        assert receipt.zero_copy
        assert receipt.copied == {}
        with vram.attach("vectors", expect={"config": "sha256:1"}) as lease:
            assert same_memory(a, lease["emb"])
            assert lease["emb"].address != a.address
            assert (lease["emb"].numpy() == a.numpy()).all()
            assert (lease.name, lease.version, lease.meta, lease.access) == ("vectors", 1, {"config": "sha256:1"}, "r")
            assert lease.nbytes == 2 * MIB
            assert vram.statistics().nbytes == 2 * MIB
            assert repr(lease) == "<Lease 'vectors' version 1, r, 1 array, 2097152 bytes>"


def test_what_is_published_outlives_the_array() -> None:
    made().close()
    with made() as a:
        vram.publish("n", {"a": a})
    assert (read("n")["a"] == np.arange(32).reshape(8, 4)).all()


LOOKS = {
    "slice": lambda a: a[3:7],
    "row": lambda a: a[5],
    "numpy slice": lambda a: a.numpy()[3:7],
    "reshaped": lambda a: a.numpy()[3:7].reshape(2, 8),
    "reinterpreted": lambda a: a.numpy()[2].view("float32"),
    "memoryview of a view": lambda a: memoryview(a.numpy()[1:3]),
    "memoryview": lambda a: a.memoryview(),
    "scalar": lambda a: a.numpy().ravel()[5:6].reshape(()),
}


def test_slices_and_views_are_shared_as_they_are() -> None:
    for what, look in LOOKS.items():
        with made() as a:
            part = look(a)
            wanted = np.asarray(part).copy()
            assert vram.publish("n", {what: part}, whole=True).zero_copy, what
            del part
        found = read("n")[what]
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert (found == wanted).all(), what


def test_arrays_on_one_memory_are_one_memory_for_the_reader() -> None:
    with made() as a, made(start=100) as b:
        receipt = vram.publish("n", {"low": a[:2], "high": a.numpy()[6:], "whole": a, "b": b, "again": a})
        assert receipt.zero_copy
        assert vram.entry("n").segments == 2
        with vram.attach("n") as lease:
            addresses = {name: found.address for name, found in lease.items()}
            base = addresses["whole"]
            assert (addresses["low"], addresses["high"], addresses["again"]) == (base, base + 6 * 32, base)
            assert list(lease) == ["low", "high", "whole", "b", "again"]
            assert (lease["high"].numpy() == a.numpy()[6:]).all()


def test_a_slice_of_a_large_array_takes_only_its_chunks_along() -> None:
    with vram.empty((8, MIB), "uint8", device="host", chunk="2MiB") as a:
        a.numpy()[5] = 5
        vram.publish("n", {"row": a[5]})
        assert vram.statistics().nbytes == 2 * MIB
    assert (read("n")["row"] == 5).all()


def test_writable_memory_is_seen_changing() -> None:
    with made() as a:
        assert vram.publish("n", {"a": a}, writable=True).zero_copy
        with vram.attach("n", access="rw") as writer, vram.attach("n") as reader:
            writer["a"][0, 0] = -1
            assert a.numpy()[0, 0] == -1
            assert reader["a"].numpy()[0, 0] == -1
            assert not a.readonly
            assert reader["a"].readonly
            with pytest.raises(ValueError, match="read-only"):
                reader["a"].numpy()[0, 0] = 1


# -- what is copied -------------------------------------------------------------------------------------------------
def test_what_is_not_in_vram_memory_is_copied_once_and_packed() -> None:
    x, y = np.arange(1000, dtype="int16"), np.linspace(0, 1, 77)
    receipt = vram.publish("n", {"x": x, "y": y})
    assert not receipt.zero_copy
    assert receipt.copied == dict.fromkeys("xy", "it is not in vram memory")
    assert (
        repr(receipt)
        == f"<Published 'n' version {receipt.version}, 2 arrays, 2.6 KiB; 2 copied: it is not in vram memory>"
    )
    assert vram.entry("n").segments == 1
    with vram.attach("n") as lease:
        assert (lease["x"].numpy() == x).all()
        assert (lease["y"].numpy() == y).all()
        assert all(array.address % 256 == 0 for array in lease.values())
    x[0] = 5  # the source is its owner's, as before


def test_the_receipt_says_for_each_array() -> None:
    with made() as a:
        numbers = np.arange(4)
        receipt = vram.publish("n", {"a": a, "column": a.numpy()[:, 1], "numbers": numbers, "back": a.numpy()[::-1]})
        assert receipt.copied == {
            "column": "it is not contiguous",
            "back": "it is not contiguous",
            "numbers": "it is not in vram memory",
        }
        found = read("n")
        assert (found["column"] == a.numpy()[:, 1]).all()
        assert (found["back"] == a.numpy()[::-1]).all()
        assert (found["numbers"] == numbers).all()


SOURCES = [
    np.asfortranarray(np.arange(12).reshape(3, 4)),
    np.broadcast_to(np.arange(3), (4, 3)),
    np.array([(1, 2)], "i4,i4")["f1"],
    np.arange(10)[::-3],
    b"bytes",
    bytearray(b"more"),
    stdlib_array.array("d", [1.5, 2.5]),
    (ctypes.c_int32 * 3)(1, 2, 3),
    np.float32(7),
]


def test_whatever_has_memory_can_be_published() -> None:
    for source in SOURCES:
        vram.publish("n", {"x": source})
        wanted = np.asarray(list(source) if isinstance(source, (bytes, bytearray)) else source)
        found = read("n")["x"]
        assert found.shape == wanted.shape
        assert (found == wanted).all()


DTYPES = [
    *("bool", "int8", "uint64", "float16", "float64", "complex64", "longdouble", "datetime64[ns]", "S5", "U3"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]


def test_every_element_type_arrives() -> None:
    for dtype in DTYPES:
        wanted = np.arange(1, 7).reshape(2, 3).astype(dtype)
        with vram.asarray(wanted, device="host") as a:
            receipt = vram.publish("n", {"copied": wanted, "shared": a})
        assert list(receipt.copied) == ["copied"]
        for found in read("n").values():
            assert found.dtype == wanted.dtype
            assert (found == wanted).all()


def test_empty_arrays_are_published_too() -> None:
    with vram.empty((0, 384), "float32", device="host", capacity=1000) as grows, made() as a:
        receipt = vram.publish("only", {"none": np.empty((3, 0), "int8"), "grows": grows})
        assert receipt.zero_copy
        assert receipt.nbytes == 0
        assert {name: found.shape for name, found in read("only").items()} == {"none": (3, 0), "grows": (0, 384)}
        vram.publish("n", {"none": np.empty((0, 7)), "a": a, "grows": grows, "end": a[8:]})
        assert vram.entry("n").segments == 1, "what is empty needs no memory of its own beside other memory"
        assert read("n")["none"].shape == (0, 7)
        assert read("n")["end"].shape == (0, 4)


def test_s4_1024_segments_are_shared_and_more_are_packed() -> None:
    """S2: the descriptors go in parts; beyond the limit everything is packed, and the receipt says why."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8192:
        pytest.skip(f"needs more descriptors than this user may have ({hard})")
    with limited(resource.RLIMIT_NOFILE, max(soft, 8192)):
        with contextlib.ExitStack() as stack:
            many = {f"a{n}": stack.enter_context(made(1, start=n)) for n in range(1025)}
            last = many.pop("a1024")
            assert vram.publish("n", many).zero_copy
            assert vram.entry("n").segments == 1024
            with vram.attach("n") as lease:
                assert all(found.numpy()[0, 0] == int(name[1:]) for name, found in lease.items())
            receipt = vram.publish("n", {**many, "a1024": last})
            assert set(receipt.copied) == {*many, "a1024"}
            assert receipt.copied["a7"] == "all of it lies in 1025 segments; 1024 is the most"
            assert vram.entry("n").segments == 1
            assert (read("n")["a1024"] == last.numpy()).all()
            # One more copy beside 1,024 shared segments is one segment too many, too.
            receipt = vram.publish("n", {**many, "x": np.arange(3)})
            assert len(receipt.copied) == 1025
        gc.collect()


def test_a_long_manifest_is_memory_of_its_own() -> None:
    source = np.arange(3000)
    receipt = vram.publish("n", {f"layer.{n}.weight": source[n : n + 1] for n in range(3000)})
    assert receipt.arrays == 3000
    assert vram.statistics().descriptors == 2
    with vram.attach("n") as lease:
        assert len(lease) == 3000
        assert [lease[f"layer.{n}.weight"].numpy()[0] for n in (0, 1, 2999)] == [0, 1, 2999]
    with vram.attach("n", access="cow") as lease:
        lease["layer.5.weight"].fill(-1)
        assert lease["layer.5.weight"].numpy()[0] == -1


def test_torch_tensors_are_published_and_attached() -> None:
    torch = pytest.importorskip("torch", reason="could not import 'torch'")
    with made() as a:
        receipt = vram.publish(
            "n",
            {"view": a.torch()[2:4], "own": torch.arange(5, dtype=torch.bfloat16), "column": a.torch()[:, 1]},
            whole=True,
        )
        assert receipt.copied == {"own": "it is not in vram memory", "column": "it is not contiguous"}
    with vram.attach("n") as lease:
        tensors = lease.torch()
        assert tensors["view"].tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
        assert tensors["own"].dtype == torch.bfloat16
        assert tensors["own"].tolist() == [0, 1, 2, 3, 4]
        assert tensors["column"].tolist() == list(range(1, 32, 4))
        del tensors
    with vram.attach("n", access="cow") as lease:
        tensor = lease["view"].torch()
        tensor += 1
        assert tensor[0, 0] == 9
        del tensor


# -- memory that is not simply ours ---------------------------------------------------------------------------------
def test_attached_memory_is_published_again_without_a_copy() -> None:
    vram.publish("one", {"x": np.arange(6)})
    with vram.attach("one") as lease:
        assert vram.publish("two", {"x": lease["x"], "part": lease["x"].numpy()[2:4]}).zero_copy
        assert vram.publish("three", lease).zero_copy
        with vram.attach("two") as again:
            assert same_memory(lease["x"], again["x"])
    vram.remove("one")
    assert read("two")["part"].tolist() == [2, 3]


def test_a_private_copy_is_published_with_its_changes() -> None:
    vram.publish("one", {"x": np.arange(6)})
    with vram.attach("one", access="cow") as lease:
        lease["x"][0] = 99
        receipt = vram.publish("two", {"x": lease["x"]})
    assert receipt.copied == {"x": "it is a private copy of what was attached"}
    assert read("two")["x"].tolist() == [99, 1, 2, 3, 4, 5]
    assert read("one")["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_writable_memory_of_others_is_shared_writable_and_copied_for_reading() -> None:
    vram.publish("one", {"x": np.arange(6)}, writable=True)
    with vram.attach("one", access="rw") as lease, vram.attach("one") as reading:
        assert vram.publish("two", {"x": lease["x"]}, writable=True).zero_copy
        receipt = vram.publish("three", {"x": lease["x"]})
        assert receipt.copied == {"x": "its memory is another process's, which did not make it read-only"}
        assert list(vram.publish("four", {"x": reading["x"]}, writable=True).copied) == ["x"]
        lease["x"][0] = 5
        assert reading["x"].numpy()[0] == 5


def test_read_only_memory_is_copied_for_writing() -> None:
    with made() as a:
        vram.publish("n", {"a": a})
        receipt = vram.publish("n", {"a": a}, writable=True)
        assert receipt.copied == {"a": "its memory is read-only for good, and writable=True was asked for"}
        with vram.attach("n", access="rw") as lease:
            lease["a"][0, 0] = 7
        assert a.numpy()[0, 0] == 0


def test_memory_that_cannot_leave_the_process_is_copied() -> None:
    """S3: the memory says so; nobody tries and fails."""
    region = vram.memory.Region.create(HOST, capacity=2 * MIB, nbytes=2 * MIB, handle_kinds=vram.memory.HandleKind.NONE)
    with region, Array(region, "int64", (4,)) as a:
        a.numpy()[:] = range(4)
        receipt = vram.publish("n", {"a": a})
        assert receipt.copied == {"a": "its memory was made not to leave this process"}
        a[0] = 5
    assert read("n")["a"].tolist() == [0, 1, 2, 3]


# -- tied arrays ------------------------------------------------------------------------------------------------------
def tied() -> dict[str, Any]:
    """Weights as of a model whose last layer is its first, views of one array, and others in between."""
    table, rows = np.arange(MIB, dtype="float32"), np.arange(64, dtype="uint8")
    return {
        "embed": table,
        "rows": rows,
        "alone": np.full(5, 7.0),
        "head": table,
        "part": table[100:200],
        "shape": table.reshape(1024, -1),
        "odd": rows[3:9],
        "across": table[::2],  # not contiguous: it has memory of its own
    }


def places_of(lease: vram.Lease) -> dict[str, int]:
    return {name: array.numpy().__array_interface__["data"][0] for name, array in lease.items()}


@pytest.mark.parametrize("consume", [False, True], ids=["kept", "consumed"])
def test_tied_arrays_are_copied_once_and_tied_where_they_are_attached(consume: bool) -> None:
    expected = tied()
    vram.publish("n", tied(), consume=consume)
    assert vram.entry("n").versions[0].nbytes == 8 * MIB  # 4 of the table, 2 of each other element, and the rest
    with vram.attach("n") as lease:
        for name, array in expected.items():
            np.testing.assert_array_equal(lease[name].numpy(), array)
        at = places_of(lease)
    assert at["embed"] == at["head"] == at["shape"] == at["part"] - 400
    assert at["odd"] - at["rows"] == 3
    assert not at["embed"] <= at["across"] < at["embed"] + 4 * MIB


def test_tied_weights_of_torch_are_tied_where_they_are_attached() -> None:
    torch = pytest.importorskip("torch", reason="could not import 'torch'")
    first, last = torch.nn.Embedding(1000, 64), torch.nn.Linear(64, 1000, bias=False)
    last.weight = first.weight
    model = torch.nn.ModuleDict({"first": first, "last": last})
    vram.publish("n", model.state_dict())
    with vram.attach("n") as lease:
        tensors = lease.torch()
        assert tensors["first.weight"].data_ptr() == tensors["last.weight"].data_ptr()
        other = torch.nn.ModuleDict(
            {"first": torch.nn.Embedding(1000, 64), "last": torch.nn.Linear(64, 1000, bias=False)}
        )
        other.load_state_dict(tensors, assign=True)
        assert other["first"].weight.data_ptr() == other["last"].weight.data_ptr()
        assert torch.equal(other["last"].weight, last.weight)
        del tensors, other


# -- consume --------------------------------------------------------------------------------------------------------
class Watched(MutableMapping[str, Any]):
    """A mapping that notes, at each replacement, which of the first arrays are still alive; it may refuse one."""

    def __init__(self, arrays: Mapping[str, Any], refuse: str = "") -> None:
        self.arrays = dict(arrays)
        self.alive = {name: weakref.ref(array) for name, array in arrays.items()}
        self.refuse = refuse
        self.history: list[list[str]] = []

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]

    def __setitem__(self, name: str, array: Any) -> None:
        if name == self.refuse:
            raise KeyboardInterrupt
        self.arrays[name] = array
        self.history.append([name for name, ref in self.alive.items() if ref() is not None])

    def __delitem__(self, name: str) -> None:
        del self.arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


def test_consume_frees_each_source_as_it_goes() -> None:
    with growth() as sizes:
        sources = Watched({f"w{n}": np.full(MIB // 8, n) for n in range(6)})
        receipt = vram.publish("n", sources, consume=True)
        assert len(receipt.copied) == 6
        assert len(sources) == 0
        # When the n-th was replaced, all before it were gone: one copy and one array at any time.
        assert sources.history == [[f"w{m}" for m in range(n, 6)] for n in range(6)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1], "the copy should grow as the sources go"
    found = read("n")
    assert all((found[f"w{n}"] == n).all() for n in range(6))


@contextlib.contextmanager
def growth() -> Iterator[list[int]]:
    """The sizes that regions were grown to."""
    sizes: list[int] = []
    really = vram.memory.Region.grow

    def grow(self: vram.memory.Region, nbytes: int | str) -> None:
        really(self, nbytes)
        sizes.append(self.mapped)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vram.memory.Region, "grow", grow)
        yield sizes


def test_consume_closes_what_was_shared_as_it_is() -> None:
    a, b = made(), made(start=50)
    view = a.numpy()
    sources: dict[str, Any] = {"a": a, "b": b[2:4], "x": np.arange(3)}
    receipt = vram.publish("n", sources, consume=True, whole=True)
    assert receipt.copied == {"x": "it is not in vram memory"}
    assert sources == {}
    assert a.is_closed
    assert not b.is_closed, "a slice was given away, not the array"
    assert (read("n")["a"] == view).all()
    b.close()
    del view


def test_i4_consume_that_fails_midway_loses_nothing_and_can_be_repeated() -> None:
    wanted = {f"w{n}": np.full(1000, n) for n in range(5)}
    sources = Watched({name: array.copy() for name, array in wanted.items()}, refuse="w3")
    with pytest.raises(KeyboardInterrupt):
        vram.publish("n", sources, consume=True)
    assert set(sources) == set(wanted)
    assert [name for name, array in sources.items() if isinstance(array, Array)] == ["w0", "w1", "w2"]
    for name, array in sources.items():
        assert (np.asarray(array) == wanted[name]).all()
    assert vram.list_entries() == []
    sources.refuse = ""
    receipt = vram.publish("n", sources, consume=True)
    assert list(receipt.copied) == ["w3", "w4"], "what was copied before is shared as it is now"
    assert len(sources) == 0
    found = read("n")
    assert all((found[name] == wanted[name]).all() for name in wanted)


def test_i4_consume_that_is_refused_touches_nothing() -> None:
    x = np.arange(5)
    with made() as a:
        sources: dict[str, Any] = {"a": a, "x": x}
        for name, options in [("..", {}), ("n", {"ttl": -1}), ("n", {"meta": {"k": "v" * 5000}})]:
            with pytest.raises(UsageError):
                vram.publish(name, sources, consume=True, **options)  # type: ignore[arg-type]
            assert sources["a"] is a
            assert sources["x"] is x
            assert not a.readonly


def test_consume_needs_a_mapping_that_can_be_emptied() -> None:
    with pytest.raises(UsageError, match="mappingproxy is fixed"):
        vram.publish("n", MappingProxyType({"x": np.arange(3)}), consume=True)


# -- read-only for good ---------------------------------------------------------------------------------------------
def test_s8_the_publishers_own_views_are_frozen() -> None:
    with made(capacity=1000) as a, made() as other:
        view, part = a.numpy(), a[1:3]
        vram.publish("n", {"a": part, "other": other.numpy()}, whole=True)
        assert a.readonly
        assert part.readonly
        assert other.readonly
        for frozen in (view, part.numpy(), other.numpy()):
            with pytest.raises(ValueError, match="read-only"):
                frozen.fill(0)
        with pytest.raises(ReadOnlyError, match="cow"):
            a[0] = 1
        with pytest.raises(UsageError, match="frozen"):
            a.resize(1000)
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        del view, part, frozen


def test_i4_a_refused_publish_seals_nothing(kept: vram.Keeper) -> None:
    with vram.private_keeper(max_bytes=4 * MIB, max_entries=1) as small, made() as a:
        with vram.empty((8, MIB), "uint8", device="host") as big:
            with pytest.raises(QuotaError, match="room for 10 MiB"):
                vram.publish("n", {"big": big, "a": a}, keeper=small)
            assert not big.readonly
        assert not a.readonly
        vram.publish("first", {"x": np.arange(3)}, keeper=small)
        with pytest.raises(QuotaError):
            vram.publish("second", {"a": a, "y": np.arange(3)}, keeper=small)
        a[0] = 5
        assert vram.publish("first", {"a": a}, keeper=small).version == 2
        assert vram.statistics(keeper=small).versions == 1
        # The copy would fit, but not together with a manifest that is memory of its own.
        large: dict[str, Any] = {"x": np.zeros(3 * MIB, "uint8")}
        vram.publish("first", large, keeper=small)
        with pytest.raises(QuotaError):
            vram.publish("first", large | {f"{'long' * 50}{n}": np.arange(1) for n in range(300)}, keeper=small)
        vram.publish("first", {"x": np.arange(3)}, keeper=small.path)


# -- attach ---------------------------------------------------------------------------------------------------------
def test_a_lease_is_a_mapping() -> None:
    vram.publish("mapping", {"x": np.arange(3), "y": np.arange(4)})
    with vram.attach("mapping") as lease, vram.attach("mapping") as other:
        assert list(lease) == ["x", "y"]
        assert len(lease) == 2
        assert "x" in lease
        assert "z" not in lease
        assert lease["x"] is lease["x"]
        assert lease.get("z") is None
        assert {name: view.sum() for name, view in lease.numpy().items()} == {"x": 3, "y": 6}
        with pytest.raises(KeyError, match="no array 'z'; it has 'x', 'y'"):
            lease["z"]
        assert lease != other, "a lease is a thing to close, not a value"
        assert len({lease, other}) == 2
    with pytest.raises(ClosedError):
        lease["x"]
    with pytest.raises(ClosedError):
        lease.is_stale()
    assert repr(lease) == "<Lease 'mapping' version 1, r, closed>"


def test_access_is_read_only_shared_or_private() -> None:
    vram.publish("fixed", {"x": np.arange(3)})
    vram.publish("open", {"x": np.arange(3)}, writable=True)
    with pytest.raises(AccessDeniedError, match="read-only"):
        vram.attach("fixed", access="rw")
    for name in ("fixed", "open"):
        with vram.attach(name, access="cow") as mine, vram.attach(name, access="cow") as theirs:
            mine["x"][0] = 9
            assert mine["x"].numpy().tolist() == [9, 1, 2]
            assert theirs["x"].numpy().tolist() == [0, 1, 2]
            assert not mine["x"].readonly
    with vram.attach("open", access="rw") as lease, vram.attach("open", access="cow") as private:
        lease["x"][1] = 8
        assert private["x"].numpy()[1] == 8, "what was not written privately is seen changing"
    assert read("fixed")["x"].tolist() == [0, 1, 2]
    with pytest.raises(UsageError, match='"r", "rw", "cow"'):
        vram.attach("open", access="w")


def test_versions_are_numbered_and_the_newest_is_attached() -> None:
    for n in range(3):
        assert vram.publish("numbered", {"x": np.array([n])}).version == n + 1
    with vram.attach("numbered") as newest, vram.attach("numbered", version=3):
        assert newest.version == 3
        vram.publish("numbered", {"x": np.array([3])})
        with vram.attach("numbered", version=3) as old:  # somebody holds it: it can still be had
            assert old["x"].numpy()[0] == 2
    with pytest.raises(NotFoundError, match="3"):
        vram.attach("numbered", version=3)
    with pytest.raises(NotFoundError):
        vram.attach("numbered", version=99)
    with pytest.raises(NotFoundError, match="'nowhere'"):
        vram.attach("nowhere")


def test_what_is_not_as_expected_is_not_attached() -> None:
    vram.publish("n", {"x": np.arange(3)}, meta={"config": "1", "more": "x"})
    read("n", expect={})
    read("n", expect={"more": "x"})
    with pytest.raises(MismatchError, match="config") as caught:
        vram.attach("n", expect={"config": "2"})
    assert caught.value.expected == {"config": "2"}
    assert caught.value.found["config"] == "1"
    with pytest.raises(MismatchError):
        vram.attach("n", expect={"other": ""})


def test_attach_waits_for_what_is_not_there_yet() -> None:
    with pytest.raises(WaitTimeoutError, match="n"):
        vram.attach("n", timeout=0.05)
    attached: list[Any] = []
    waiter = threading.Thread(target=lambda: attached.append(read("n", timeout=None)["x"].tolist()))
    waiter.start()
    until(lambda: vram.statistics().waiting == 1)
    vram.publish("n", {"x": np.arange(3)})
    waiter.join(120)
    assert attached == [[0, 1, 2]]


def test_a_version_ends_with_its_time_to_live() -> None:
    for ttl in (0.2, 2.0, SOON / 8):  # within the first of which a slow machine may not have attached it
        vram.publish("n", {"x": np.arange(3)}, ttl=ttl)
        with contextlib.suppress(NotFoundError):
            lease = vram.attach("n")
            break
    else:
        raise AssertionError("it was over each time before it was attached")
    with lease:
        until(lambda: not vram.list_entries())
        assert lease["x"].numpy().tolist() == [0, 1, 2]
        assert lease.is_stale()
        assert vram.statistics().nbytes
        with pytest.raises(NotFoundError):
            vram.attach("n")
    until(lambda: not vram.statistics().nbytes)


def test_a_lease_learns_of_newer_versions() -> None:
    vram.publish("news", {"x": np.array([1])})
    with vram.attach("news") as lease:
        assert not lease.is_stale()
        assert select.select([lease], [], [], 0) == ([], [], [])
        assert lease.fileno() == lease.fileno()
        with lease.upgrade() as same:
            assert same.version == 1
        vram.publish("news", {"x": np.array([2])})
        assert select.select([lease], [], [], SOON) == ([lease], [], [])
        assert lease.is_stale()
        with lease.upgrade() as newer:
            assert (newer.version, newer["x"].numpy()[0], newer.is_stale()) == (2, 2, False)
            assert lease["x"].numpy()[0] == 1
            vram.remove("news")
            assert newer.is_stale()
            assert select.select([newer], [], [], SOON)[0] == [newer]
            with pytest.raises(NotFoundError):
                newer.upgrade()
            with pytest.raises(WaitTimeoutError):
                newer.upgrade(timeout=0.05)
            with pytest.raises(UsageError, match="timeout"):
                newer.upgrade(timeout="soon")  # type: ignore[arg-type]


def test_an_upgrade_keeps_the_access() -> None:
    vram.publish("n", {"x": np.arange(3)}, writable=True)
    for access in ("r", "rw", "cow"):
        with vram.attach("n", access=access) as lease, lease.upgrade() as newer:
            assert newer.access == access
            assert newer["x"].readonly is (access == "r")


def test_removed_memory_goes_with_its_last_lease() -> None:
    vram.publish("n", {"x": np.arange(3)})
    with vram.attach("n") as lease:
        vram.remove("n")
        assert vram.list_entries() == []
        assert vram.statistics().nbytes == 2 * MIB
        assert lease["x"].numpy().tolist() == [0, 1, 2]
    assert vram.statistics().nbytes == 0
    with pytest.raises(NotFoundError):
        vram.remove("n")
    vram.publish("n", {"x": np.arange(3)})
    for version in (0, -1, True, "2", 1.0):
        with pytest.raises(UsageError, match="version"):
            vram.remove("n", version=version)  # type: ignore[arg-type]
    assert len(vram.list_entries("n")) == 1, "version 0 is no version; it must not stand for all"


# -- the end of a lease ---------------------------------------------------------------------------------------------
def test_i6_views_keep_their_memory_when_the_lease_is_closed() -> None:
    """S5: the version is given back after the unmap, not after close()."""
    vram.publish("n", {"x": np.arange(6), "y": np.arange(3)})
    lease = vram.attach("n")
    view, part = lease["x"].numpy()[2:4], lease["y"][1:]
    array = lease["x"]
    lease.close()
    lease.close()
    assert view.tolist() == [2, 3]
    assert part.numpy().tolist() == [1, 2]
    with pytest.raises(ClosedError):
        array.numpy()
    assert vram.statistics().leases == 1
    del view
    assert vram.statistics().leases == 1
    part.close()
    assert vram.statistics().leases == 0


def test_i2_a_strict_close_refuses_while_somebody_looks() -> None:
    vram.publish("n", {"x": np.arange(6), "y": np.arange(3)})
    lease = vram.attach("n")
    view = lease["x"].numpy()
    part = lease["y"][1:]
    with pytest.raises(BusyError, match=r"numpy view \[0:48\], slice") as caught:
        lease.close(strict=True)
    assert len(caught.value.holders) == 2
    assert lease["x"].numpy().tolist() == [0, 1, 2, 3, 4, 5], "nothing has changed"
    del view
    part.close()
    lease.close(strict=True)
    assert vram.statistics().leases == 0


def test_i2_a_lease_that_is_dropped_is_given_back_with_a_warning() -> None:
    vram.publish("n", {"x": np.arange(6)})
    lease = vram.attach("n")
    view = lease["x"].numpy()
    holder = [lease]
    del lease
    with pytest.warns(LeakWarning, match="lease on 'n' version .* was not closed"):
        holder.clear()
    assert view.tolist() == [0, 1, 2, 3, 4, 5]
    assert vram.statistics().leases == 1
    del view
    assert vram.statistics().leases == 0


def test_i7_a_forked_child_reads_on_and_gives_nothing_back() -> None:
    vram.publish("n", {"x": np.arange(6)})
    with vram.attach("n") as lease:
        views = [lease["x"].numpy()]

        def work() -> int:
            count = refused(lambda: lease["x"], lambda: lease.is_stale(), lease.upgrade, lease.fileno)
            lease.close()
            with vram.attach("n") as own:
                return count * (views[0].tolist() == own["x"].numpy().tolist() == [0, 1, 2, 3, 4, 5])

        assert end_of(work) == 4
        until(lambda: vram.statistics().leases == 1)
        assert not lease.is_stale()
        views.clear()


# -- what fills the memory ------------------------------------------------------------------------------------------
def test_s10_memory_is_handed_over_after_what_fills_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way out of this process first waits for the driver; whoever is told may read at once."""
    told: list[str] = []
    driver = type(drivers.get(HOST))
    waits, publishes, sends = driver.synchronize, KeeperClient.publish, Channel.send

    def synchronize(self: Any, location: Any) -> None:
        waits(self, location)
        told.append("filled")

    def publish(*arguments: Any, **options: Any) -> int:
        told.append("handed over")
        return publishes(*arguments, **options)

    def send(self: Channel, *arguments: Any, **options: Any) -> None:
        if self in (one._channel, other._channel):
            told.append("handed over")
        sends(self, *arguments, **options)

    save_file({"x": np.arange(3)}, tmp_path / "m.safetensors")
    one, other = vram.ArrayChannel.pair()
    with one, other, made() as a:
        monkeypatch.setattr(driver, "synchronize", synchronize)
        monkeypatch.setattr(KeeperClient, "publish", publish)
        monkeypatch.setattr(Channel, "send", send)
        ways: list[Callable[[], object]] = [
            lambda: vram.publish("n", {"a": a}, writable=True),
            lambda: vram.publish("n", {"a": a[:2].numpy()}, writable=True),
            lambda: vram.publish_file("m", tmp_path / "m.safetensors", device="host"),
            lambda: one.send(a),
            lambda: one.send(a),
            lambda: (ForkingPickler.dumps(a), told.append("handed over")),
        ]
        for way in ways:
            told.clear()
            way()
            assert told[0] == "filled"
            assert "handed over" in told
        other.recv(timeout=120).close()
        ForkingPickler.loads(ForkingPickler.dumps(a))
    shut_down()


# -- what a close waits for ------------------------------------------------------------------------------------------
def test_s5_a_close_does_not_wait_for_the_keeper(kept: vram.Keeper) -> None:
    with made() as a:
        vram.publish("vectors", {"emb": a})
    lease = vram.attach("vectors")
    pid = vram.statistics().pid
    mapped = Path("/proc/self/maps").read_text().count("/memfd:vram (")
    os.kill(pid, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        lease.close()
        assert time.monotonic() - begin < REQUEST / 2
        assert Path("/proc/self/maps").read_text().count("/memfd:vram (") == mapped - 1
    finally:
        os.kill(pid, signal.SIGCONT)
    assert vram.statistics().leases == 0  # it was told before it was asked, over the same connection


def test_s5_a_close_that_waits_is_known_to_whoever_asks_next(kept: vram.Keeper) -> None:
    with made() as a:
        vram.publish("vectors", {"emb": a})
    lease = vram.attach("vectors")
    with KeeperClient.connect(kept.path, label="another") as another:
        pid = another.statistics().pid
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: is_stopped(pid), what="the keeper's stop")
            closing, _ = later(lambda: lease.close(wait=True))
            closing.join(0.2)
            assert closing.is_alive(), "it did not wait"
        finally:
            os.kill(pid, signal.SIGCONT)
        closing.join(SOON)
        assert not closing.is_alive()
        assert another.statistics().leases == 0
