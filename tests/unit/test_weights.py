"""safetensors files: every byte of a good one, a typed error for a bad one, and nothing left behind (I4)."""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from vram import driver, lifetime
from vram.arrays import Array, file_copy, weights
from vram.driver.protocol import Driver
from vram.errors import (
    MissingFileError,
    OutOfMemoryError,
    RangeError,
    ReadOnlyError,
    UnreadableFileError,
    UsageError,
    VramError,
)
from vram.memory import Region
from vram.spec import HOST, Access, HandleKind

MIB = 1 << 20


@pytest.fixture
def host() -> Driver:
    return driver.get(HOST)


def write(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a file by hand, with whatever header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def good(tmp_path: Path) -> Path:
    rng = np.random.default_rng(7)
    tensors = {
        "embeddings.word": rng.random((50, 16), dtype="float32"),
        "bias": np.arange(7, dtype="float16"),
        "ids": np.arange(5, dtype="int64")[None],
        "mask": np.array([True, False, True]),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 4), "float32"),
        "bytes": np.arange(256, dtype="uint8"),
        "ほ": np.ones(2, "uint16"),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "np", "who": "us"})
    return tmp_path / "model.safetensors"


def fill(plan: weights.WeightsPlan, region: Region) -> dict[str, Array]:
    """Load into a region that is there already, and look at what lies where."""
    weights.fill(plan, region)
    return {name: Array(region, t.dtype, t.shape, offset=t.offset) for name, t in plan.tensors.items()}


def close(arrays: dict[str, Array]) -> None:
    for array in arrays.values():
        array.close()


# -- good files -----------------------------------------------------------------------------------------------------
def test_every_tensor_is_the_files(host: Driver, good: Path) -> None:
    arrays = weights.load(good, host, HOST)
    with safe_open(good, framework="np") as file:
        assert set(arrays) == set(file.keys())
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            expected = file.get_tensor(name)
            view = arrays[name].numpy()
            np.testing.assert_array_equal(view, expected)
            assert view.dtype == expected.dtype
            assert view.flags.aligned
            assert view.flags.writeable
    regions = {id(array.region) for array in arrays.values()}
    assert len(regions) == 1
    assert len(arrays["bias"].region.chunks) == 1
    del view
    close(arrays)


def test_the_plan_says_what_will_be(good: Path) -> None:
    plan = weights.plan(str(good))
    assert plan.path == str(good)
    assert plan.meta == {"format": "np", "who": "us"}
    assert plan.tensors["embeddings.word"].shape == (50, 16)
    assert plan.tensors["scalar"].dtype == np.float64
    assert len(plan.runs) == 1, "what the library writes is aligned: one stream"
    assert plan.nbytes == sum(tensor.nbytes for tensor in plan.tensors.values())
    assert plan.runs[0][1:] == (0, plan.nbytes)


def test_loading_by_plan(host: Driver, good: Path) -> None:
    plan = weights.plan(good)
    arrays = weights.load(plan, host, "host")
    assert arrays["ids"].numpy().tolist() == [[0, 1, 2, 3, 4]]
    close(arrays)


def test_the_region_lives_as_long_as_arrays_and_views(host: Driver, good: Path) -> None:
    """I6."""
    before = len(lifetime.live())
    arrays = weights.load(good, host, HOST)
    view = arrays["bias"].numpy()[2:]
    close(arrays)
    assert view[0] == 2
    assert len(lifetime.live()) > before
    del view, arrays
    assert len(lifetime.live()) == before


def test_types_that_numpy_lacks(host: Driver, tmp_path: Path) -> None:
    types = {
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": getattr(ml_dtypes, "float8_e8m0fnu", None),
        "C64": np.complex64,
    }
    for name, kind in types.items():
        if kind is None:
            continue
        data = np.array([0.5, 1, 2, 4]).astype(kind)
        path = write(tmp_path / "x", {"t": entry(name, [2, 2], 0, data.nbytes)}, data.tobytes())
        try:
            with safe_open(path, framework="np"):
                pass
        except SafetensorError:
            continue  # this release of the library does not know it, and then neither do we
        arrays = weights.load(path, host, HOST)
        assert arrays["t"].dtype == data.dtype
        assert arrays["t"].numpy().tobytes() == data.tobytes()
        close(arrays)


def test_misaligned_tensors_are_moved(host: Driver, tmp_path: Path) -> None:
    one, two, three = np.arange(3, dtype="uint8"), np.arange(5, dtype="float64"), np.arange(9, dtype="float32")
    header = {
        "one": entry("U8", [3], 0, 3),
        "two": entry("F64", [5], 3, 43),
        "three": entry("F32", [9], 43, 79),
        "none": entry("F64", [0], 79, 79),
    }
    path = write(tmp_path / "x", header, one.tobytes() + two.tobytes() + three.tobytes())
    plan = weights.plan(path)
    assert [tensor.offset for tensor in plan.tensors.values()] == [0, 64, 104, 144]
    assert len(plan.runs) == 2, "two and three go together"
    arrays = weights.load(path, host, HOST)
    for name, expected in (("one", one), ("two", two), ("three", three)):
        view = arrays[name].numpy()
        np.testing.assert_array_equal(view, expected)
        assert view.flags.aligned
        del view
    assert arrays["none"].shape == (0,)
    close(arrays)


def test_a_file_without_a_byte_of_data(host: Driver, tmp_path: Path) -> None:
    path = write(tmp_path / "x", {"t": entry("F32", [0, 3], 0, 0)})
    arrays = weights.load(path, host, HOST)
    assert arrays["t"].numpy().shape == (0, 3)
    close(arrays)


def test_into_a_region_of_ones_own(host: Driver, good: Path) -> None:
    plan = weights.plan(good)
    with Region.create(HOST, driver=host, capacity="8MiB", nbytes=plan.nbytes + 5) as region:
        arrays = fill(plan, region)
        assert arrays["bias"].region is region
        assert not region.is_closed
        close(arrays)
        assert not region.is_closed
        region.shrink(plan.nbytes - 1)
        with pytest.raises(RangeError, match="grow it first"):
            weights.fill(plan, region)


def test_into_memory_that_is_read_only(host: Driver, good: Path) -> None:
    with Region.create(HOST, driver=host, capacity="2MiB", nbytes=2 * MIB) as region:
        region.freeze()
        with pytest.raises(ReadOnlyError, match="read-only"):
            weights.fill(weights.plan(good), region)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Several chunks of 2 MiB, with a tensor across each border."""
    rng = np.random.default_rng(1)
    tensors = {str(number): rng.integers(0, 255, 700_001 + number, dtype="uint8") for number in range(10)}
    save_file(tensors, tmp_path / "large.safetensors")
    return tmp_path / "large.safetensors"


def _same(arrays: dict[str, Array], path: Path) -> bool:
    with safe_open(path, framework="np") as file:
        return all(np.array_equal(array.numpy(), file.get_tensor(name)) for name, array in arrays.items())


def test_across_chunks(host: Driver, large: Path) -> None:
    plan = weights.plan(large)
    with Region.create(HOST, driver=host, capacity="8MiB", nbytes=plan.nbytes, chunk="2MiB") as region:
        assert len(region.chunks) > 2
        arrays = fill(plan, region)
        assert _same(arrays, large)
        close(arrays)


def test_moved_tensors_across_chunks(host: Driver, tmp_path: Path) -> None:
    """A run that begins in the middle of one chunk and ends in another."""
    first, second = np.arange(251, dtype="uint8"), np.arange(MIB, dtype="float64")
    ends = (first.nbytes, first.nbytes + second.nbytes)
    header = {"first": entry("U8", [251], 0, ends[0]), "second": entry("F64", [MIB], *ends)}
    path = write(tmp_path / "x", header, first.tobytes() + second.tobytes())
    plan = weights.plan(path)
    with Region.create(HOST, driver=host, capacity="16MiB", nbytes=plan.nbytes, chunk="2MiB") as region:
        arrays = fill(plan, region)
        np.testing.assert_array_equal(arrays["first"].numpy(), first)
        np.testing.assert_array_equal(arrays["second"].numpy(), second)
        close(arrays)


def test_through_the_mapping_where_the_kernel_gives_no_descriptor(host: Driver, large: Path) -> None:
    plan = weights.plan(large)
    with Region.create(
        HOST, driver=host, capacity=plan.nbytes, nbytes=plan.nbytes, handle_kinds=HandleKind.NONE
    ) as region:
        arrays = fill(plan, region)
        assert _same(arrays, large)
        close(arrays)


def test_through_a_small_pipe(host: Driver, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user gets it who has many of them."""
    size = os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(file_copy, "_PIPE", size)
    arrays = weights.load(large, host, HOST)
    assert _same(arrays, large)
    close(arrays)
    monkeypatch.setattr(file_copy, "_PIPE", (1 << 32) - 1)  # refused: it stays as it was made
    arrays = weights.load(large, host, HOST)
    assert _same(arrays, large)
    close(arrays)


def test_into_a_private_copy(host: Driver, large: Path) -> None:
    """What is loaded there stays there: the shared memory behind it is not written to."""
    plan = weights.plan(large)
    with Array.create(host, HOST, plan.nbytes, "uint8") as shared:
        allocations, _ = shared.region.segments(0, plan.nbytes)
        with Region.from_allocations(
            host, allocations, nbytes=plan.nbytes, access=Access.READ_WRITE, private=True
        ) as region:
            arrays = fill(plan, region)
            assert _same(arrays, large)
            close(arrays)
        for allocation in allocations:
            allocation.close()
        assert not shared.numpy().any()


class _Elsewhere:
    """A driver whose memory the CPU cannot address: the host driver without that capability."""

    def __init__(self, inner: Driver) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        if name in ("buffer", "populate"):
            raise AttributeError(name)
        return getattr(self._inner, name)


def test_into_memory_that_the_cpu_cannot_address(host: Driver, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_copy, "_BOUNCE", 1 * MIB + 7)
    far: Driver = _Elsewhere(host)  # type: ignore[assignment]
    arrays = weights.load(large, far, HOST)
    with safe_open(large, framework="np") as file:
        for name, array in arrays.items():
            np.testing.assert_array_equal(array.copy(), file.get_tensor(name))
    close(arrays)


# -- bad files ------------------------------------------------------------------------------------------------------
def _tensor(**changes: Any) -> dict[str, Any]:
    return {"t": {**entry("F32", [2], 0, 8), **changes}}


EIGHT = bytes(8)
BAD: dict[str, tuple[Callable[[Path], Path], type[Exception], str]] = {
    "missing": (lambda p: p, MissingFileError, "there is no file"),
    "in a missing directory": (lambda p: p / "no" / "file", MissingFileError, "there is no file"),
    "under a file": (lambda p: write(p, {}) / "file", UsageError, "cannot be opened"),
    "an empty file": (lambda p: (p.write_bytes(b""), p)[1], RangeError, "it has 0 bytes"),
    "shorter than a length": (lambda p: (p.write_bytes(b"\3\0\0"), p)[1], RangeError, "it has 3 bytes"),
    "text": (lambda p: (p.write_text("hello, this is no tensor"), p)[1], UsageError, "announce a header"),
    "zip": (lambda p: (p.write_bytes(b"PK\3\4" + bytes(99)), p)[1], UsageError, "torch.save"),
    "pickle": (lambda p: (p.write_bytes(b"\x80\x02}q\0." + bytes(99)), p)[1], UsageError, "a pickle"),
    "git lfs": (lambda p: (p.write_text("version https://git-lfs"), p)[1], UsageError, "git lfs pull"),
    "header of no length": (lambda p: write(p, b"", length=0), UsageError, "announce a header of 0"),
    "header too long": (lambda p: write(p, {}, length=2**63), UsageError, "announce a header"),
    "header longer than the file": (lambda p: write(p, {}, length=500), RangeError, "truncated"),
    "header that is no JSON": (lambda p: write(p, b"[1, 2"), UsageError, "no JSON"),
    "header that is a list": (lambda p: write(p, [1]), UsageError, "no JSON of that form"),
    "header that is no text": (lambda p: write(p, b'{"\xff\xfe": 1}'), UsageError, "safetensors file|damaged"),
    "nesting without end": (lambda p: write(p, b'{"a":' * 20000), UsageError, "no JSON"),
    "no tensors": (lambda p: write(p, {}), UsageError, "holds no tensors"),
    "metadata only": (lambda p: write(p, {"__metadata__": {"a": "b"}}), UsageError, "holds no tensors"),
    "metadata of numbers": (lambda p: write(p, {"__metadata__": {"a": 1}, **_tensor()}, EIGHT), UsageError, "JSON"),
    "a key is missing": (lambda p: write(p, {"t": {"dtype": "F32", "shape": [2]}}, EIGHT), UsageError, "wrongly"),
    "a negative length": (lambda p: write(p, _tensor(shape=[-2]), EIGHT), UsageError, "wrongly"),
    "a huge length": (lambda p: write(p, _tensor(shape=[2**63]), EIGHT), UsageError, "wrongly"),
    "lengths that overflow": (lambda p: write(p, _tensor(shape=[2**61, 2**61]), EIGHT), RangeError, "not its size"),
    "too many dimensions": (lambda p: write(p, _tensor(shape=[1] * 40), EIGHT), UsageError, "wrongly"),
    "an unknown type": (lambda p: write(p, _tensor(dtype="Q7"), EIGHT), UsageError, "'Q7', which is not known"),
    "a packed type": (lambda p: write(p, _tensor(dtype="F4", shape=[16]), EIGHT), UsageError, "packs several"),
    "lengths that overflow beside a 0": (
        lambda p: write(p, _tensor(shape=[2**61, 2**61, 0], data_offsets=[0, 0]), b""),
        RangeError,
        "not its size",
    ),
    "a size that is not its own": (lambda p: write(p, _tensor(shape=[3]), EIGHT), RangeError, "not its size"),
    "offsets backwards": (lambda p: write(p, _tensor(data_offsets=[8, 0]), EIGHT), RangeError, "not its size"),
    "a hole before": (lambda p: write(p, _tensor(data_offsets=[8, 16]), EIGHT * 2), RangeError, "bytes are missing"),
    "bytes behind": (lambda p: write(p, _tensor(), EIGHT * 2), RangeError, "8 bytes follow the last"),
    "bytes missing": (lambda p: write(p, _tensor(), b"1234"), RangeError, "truncated"),
    "an overlap": (
        lambda p: write(p, {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)),
        RangeError,
        "overlaps the one before",
    ),
    "the same bytes twice": (
        lambda p: write(p, {"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 0, 8)}, EIGHT),
        RangeError,
        "overlaps",
    ),
    "a directory": (lambda p: (p.mkdir(), p)[1], UsageError, "is a directory"),
    "a pipe": (lambda p: (os.mkfifo(p), p)[1], UsageError, "not a regular file"),
    "a device": (lambda p: Path("/dev/zero"), UsageError, "not a regular file"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_files_are_refused_by_name(host: Driver, tmp_path: Path, kind: str) -> None:
    make, error, says = BAD[kind]
    path = make(tmp_path / "bad")
    for call in (lambda: weights.plan(path), lambda: weights.load(path, host, HOST)):
        with pytest.raises(error, match=says) as caught:
            call()
        assert str(path) in str(caught.value)


def test_a_directory_says_what_is_in_it(host: Driver, good: Path) -> None:
    with pytest.raises(UsageError, match=r"it holds model\.safetensors"):
        weights.plan(good.parent)


@pytest.mark.parametrize("path", [None, 7, "a\0b"])
def test_paths_that_are_none(host: Driver, path: object) -> None:
    with pytest.raises(UsageError):
        weights.plan(path)  # type: ignore[arg-type]


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(good: Path) -> None:
    good.chmod(0)
    with pytest.raises(UnreadableFileError, match="may not be read"):
        weights.plan(good)


def test_every_truncation(host: Driver, good: Path) -> None:
    whole = good.read_bytes()
    for length in itertools.chain(range(0, len(whole) - 1, 97), (len(whole) - 1,)):
        good.write_bytes(whole[:length])
        with pytest.raises((UsageError, RangeError), match=r"model\.safetensors"):
            weights.load(good, host, HOST)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_headers(good: Path, data: st.DataObject) -> None:
    """S7: what the library refuses we refuse; what we accept it reads as we do; nothing else ends the process (I11)."""
    whole = bytearray(good.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, header - 1))] = data.draw(
            st.integers(0, 255) | st.sampled_from(b'0123456789[]{},:"')
        )
    bad = good.with_name("mutated")
    bad.write_bytes(whole)
    try:
        arrays = weights.load(bad, driver.get(HOST), HOST)
    except VramError:
        return
    with safe_open(bad, framework="np") as file:
        assert set(file.keys()) == set(arrays)
        for name, array in arrays.items():
            assert array.numpy().tobytes() == file.get_tensor(name).tobytes()
    close(arrays)


# -- bad days -------------------------------------------------------------------------------------------------------
def test_a_file_that_was_replaced_since_it_was_planned(host: Driver, good: Path) -> None:
    plan = weights.plan(good)
    other = good.with_name("other")
    other.write_bytes(good.read_bytes())
    other.rename(good)
    with pytest.raises(UsageError, match="changed while it was read"):
        weights.load(plan, host, HOST)


def test_a_file_that_changes_while_it_is_read(host: Driver, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I4: nothing is left behind; the ledger looks after it."""
    splice = os.splice

    def meddle(*arguments: int, **options: int) -> int:
        large.write_bytes(large.read_bytes())
        return splice(*arguments, **options)

    monkeypatch.setattr(os, "splice", meddle)
    with pytest.raises(UsageError, match="changed while it was read"):
        weights.load(large, host, HOST)


def test_a_file_that_shrinks_while_it_is_read(host: Driver, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splice = os.splice

    def meddle(*arguments: int, **options: int) -> int:
        os.truncate(large, 2 * MIB)
        return splice(*arguments, **options)

    monkeypatch.setattr(os, "splice", meddle)
    with pytest.raises(UsageError, match="changed while it was read"):
        weights.load(large, host, HOST)
    monkeypatch.undo()
    with pytest.raises(RangeError, match="truncated"):
        weights.load(large, host, HOST)


def test_too_little_memory(host: Driver, tmp_path: Path) -> None:
    """The file is sparse: it claims more than the machine has, and its header does not lie."""
    _, total = host.mem_info(HOST)
    nbytes = total + 64 * MIB
    path = write(tmp_path / "x", {"t": entry("U8", [nbytes], 0, nbytes)})
    os.truncate(path, path.stat().st_size + nbytes)
    with pytest.raises(OutOfMemoryError):
        weights.load(path, host, HOST)
