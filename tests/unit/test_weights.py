"""safetensors files: every byte of a good one, a typed error for a bad one, and nothing left behind (I4)."""

from __future__ import annotations

import contextlib
import errno
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
from tests.support.faulty_driver import FaultyDriver

from vram import driver, lifetime
from vram.arrays import Array, file_copy, weights
from vram.arrays.dtypes import dtype_name, dtype_of
from vram.driver.protocol import Driver, HostMemory
from vram.errors import MissingFileError, RangeError, ReadOnlyError, UnreadableFileError, UsageError, VramError
from vram.memory import Region
from vram.spec import HOST, Access

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
    (file,) = plan.files
    assert len(file.runs) == 1, "what the library writes is aligned: one stream"
    assert plan.nbytes == sum(tensor.nbytes for tensor in plan.tensors.values())
    assert file.runs[0][1:] == (0, plan.nbytes)


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
    assert len(plan.files[0].runs) == 2, "two and three go together"
    del plan
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


def test_into_memory_that_the_cpu_cannot_address(host: Driver, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_copy, "_BOUNCE", 1 * MIB + 7)
    far: Any = FaultyDriver(host, hide=[HostMemory])
    arrays = weights.load(large, far, HOST)
    with safe_open(large, framework="np") as file:
        for name, array in arrays.items():
            np.testing.assert_array_equal(array.copy(), file.get_tensor(name))
    close(arrays)


# -- types of which several elements share a byte ---------------------------------------------------------------------
@pytest.mark.parametrize(
    ("kind", "shape", "shown", "name"),
    [
        ("F4", [2, 16], (2, 8), "float4_e2m1fn_x2"),
        ("F4", [2, 3], (3,), "float4_e2m1fn_x2"),
        ("F4", [0, 4], (0, 2), "float4_e2m1fn_x2"),
        ("F6_E2M3", [2, 8], (2, 6), "float6_e2m3fn_packed"),
        ("F6_E3M2", [4, 2], (6,), "float6_e3m2fn_packed"),
    ],
)
def test_packed_tensors_are_bytes_with_the_name_of_their_type(
    host: Driver, tmp_path: Path, kind: str, shape: list[int], shown: tuple[int, ...], name: str
) -> None:
    nbytes = int(np.prod(shown))
    data = bytes(range(nbytes))
    header = {"w": entry(kind, shape, 0, nbytes), "s": entry("F8_E8M0", [2], nbytes, nbytes + 2)}
    arrays = weights.load(write(tmp_path / "x", header, data + b"\x7f\x80"), host, HOST)
    packed = arrays["w"]
    assert (packed.shape, packed.dtype, dtype_name(packed.dtype)) == (shown, np.uint8, name)
    assert dtype_of(name).metadata == packed.dtype.metadata
    assert packed.numpy().tobytes() == data
    assert arrays["s"].numpy().tolist() == [1.0, 2.0]
    close(arrays)


# -- checkpoints of several files -------------------------------------------------------------------------------------
@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder with two files, each with a tensor that does not count, and their index."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    parts = {
        "model-00001-of-00002.safetensors": {"a": np.full(5, 1, "u1"), "b": np.full(70_000, 2, "f4")},
        "model-00002-of-00002.safetensors": {"c": np.full((2, 3), 3, "f8"), "e": np.zeros((0, 4), "f4")},
    }
    for name, tensors in parts.items():
        save_file(tensors, folder / name, metadata={"format": "np", "from": name})
    write_index(folder, {tensor: name for name, tensors in parts.items() for tensor in tensors})
    return folder


def write_index(folder: Path, places: dict[str, str]) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
    (folder / "model.safetensors.index.json").write_text(text)


def parts_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.parametrize("how", ["folder", "index", "files", "folder without index", "snapshot"])
def test_a_checkpoint_of_several_files_is_loaded_as_one(host: Driver, shards: Path, how: str) -> None:
    given: Any = shards
    if how == "index":
        given = shards / "model.safetensors.index.json"
    elif how == "files":
        given = parts_of(shards)
    elif how == "folder without index":
        (shards / "model.safetensors.index.json").unlink()
    elif how == "snapshot":  # as of the Hub's cache: links to files that are called by their digests
        given = shards.with_name("snapshot")
        given.mkdir()
        for number, path in enumerate(sorted(shards.iterdir())):
            path.rename(shards / f"blob{number}")
            (given / path.name).symlink_to(shards / f"blob{number}")
    plan = weights.plan(given)
    assert plan.meta == {"format": "np", "from": "model-00001-of-00002.safetensors"}
    arrays = weights.load(plan, host, HOST)
    assert {name: (array.shape, set(array.numpy().ravel().tolist())) for name, array in arrays.items()} == {
        "a": ((5,), {1}),
        "b": ((70_000,), {2.0}),
        "c": ((2, 3), {3.0}),
        "e": ((0, 4), set()),
    }
    assert len({id(array.region) for array in arrays.values()}) == 1
    close(arrays)


def test_what_an_index_does_not_name_is_left_out_and_said(host: Driver, shards: Path) -> None:
    first, second = parts_of(shards)
    save_file({"a": np.full(5, 1, "u1"), "c": np.zeros(9, "f8"), "z": np.zeros(3, "u1")}, first)
    write_index(shards, {"a": first.name, "c": second.name})
    with pytest.warns(UserWarning, match=r"^not in '.*index.json' and left out: 'z', 'e'$"):
        arrays = weights.load(shards, host, HOST)
    assert set(arrays) == {"a", "c"}
    assert arrays["a"].numpy().tolist() == [1] * 5
    assert arrays["c"].numpy().tolist() == [[3.0] * 3] * 2
    close(arrays)


def test_checkpoints_that_are_not_whole_are_refused_by_name(shards: Path) -> None:
    first, second = parts_of(shards)
    write_index(shards, {"a": second.name, "c": second.name})
    with pytest.raises(UsageError, match=rf"tensor 'a' is in '{second}', which does not have it"):
        weights.plan(shards)
    write_index(shards, {"a": first.name, "x": "three", "y": "four"})
    with pytest.raises(MissingFileError, match=r"names '.*three' and 1 more, which is not there; fetch it again"):
        weights.plan(shards)
    for text, said in (("{}", "no weight_map"), ("[", "no weight_map"), ('{"weight_map": {}}', "names no tensors")):
        (shards / "model.safetensors.index.json").write_text(text)
        with pytest.raises(UsageError, match=said):
            weights.plan(shards)
    (shards / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(UsageError, match=r"several checkpoints: name one of model.* other"):
        weights.plan(shards)
    save_file({"a": np.zeros(1)}, second)
    with pytest.raises(UsageError, match=rf"tensor 'a' is in '{first}' and in '{second}'; leave one"):
        weights.plan([first, second])
    with pytest.raises(UsageError, match="was given twice"):
        weights.plan([first, first])


def test_a_checkpoint_of_very_many_files_keeps_few_open(host: Driver, tmp_path: Path) -> None:
    paths = []
    for number in range(300):
        paths.append(tmp_path / f"{number:03}.safetensors")
        save_file({f"t{number}": np.full(3, number, "i2")}, paths[-1])
    before = len(os.listdir("/proc/self/fd"))
    plan = weights.plan(tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= before + 256
    arrays = weights.load(plan, host, HOST)
    assert [array.numpy().tolist() for array in arrays.values()] == [[number] * 3 for number in range(300)]
    close(arrays)
    paths[-1].write_bytes(paths[-1].read_bytes())
    with pytest.raises(UsageError, match=r"299.safetensors' changed while it was read"):
        weights.load(plan, host, HOST)


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
    "half a byte": (lambda p: write(p, _tensor(dtype="F4", shape=[15]), EIGHT), RangeError, "not its size"),
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
    "an empty folder": (lambda p: (p.mkdir(), p)[1], MissingFileError, "no .safetensors file in the folder"),
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


@pytest.mark.parametrize("path", [None, 7, "a\0b", (), ["a", None]])
def test_paths_that_are_none(host: Driver, path: object) -> None:
    with pytest.raises(UsageError):
        weights.plan(path)  # type: ignore[arg-type]


@pytest.mark.skipif(os.getuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(good: Path) -> None:
    good.chmod(0)
    with pytest.raises(UnreadableFileError, match="may not be read"):
        weights.plan(good)


def failing(code: int) -> Callable[..., Any]:
    def fails(*_: object, **__: object) -> Any:
        raise OSError(code, os.strerror(code))

    return fails


def test_a_folder_that_cannot_be_read_and_a_shard_that_may_not_be_looked_at(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", failing(errno.EIO))
        with pytest.raises(UnreadableFileError, match=r"the folder .* cannot be read: Input/output error"):
            weights.plan(shards)
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", failing(errno.EACCES))
        found = weights.plan(shards / "model.safetensors.index.json")  # it is not called missing
    assert sorted(found.tensors) == ["a", "b", "c", "e"]


def test_an_index_among_files_is_refused(shards: Path) -> None:
    with pytest.raises(UsageError, match="give an index alone"):
        weights.plan([shards / "model.safetensors.index.json"])


def test_every_truncation(host: Driver, good: Path) -> None:
    whole = good.read_bytes()
    for length in itertools.chain(range(0, len(whole) - 1, 97), (len(whole) - 1,)):
        good.write_bytes(whole[:length])
        with pytest.raises((UsageError, RangeError), match=r"model\.safetensors"):
            weights.load(good, host, HOST)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_headers(good: Path, data: st.DataObject) -> None:
    """S7: what is accepted the library reads as we do, if it reads it; nothing ends the process (I11)."""
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
    with contextlib.suppress(SafetensorError), safe_open(bad, framework="np") as file:
        assert set(file.keys()) == set(arrays)
        for name, array in arrays.items():
            assert array.numpy().tobytes() == file.get_tensor(name).tobytes()
    close(arrays)


# -- bad days -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_file_that_is_replaced_is_read_as_it_was(
    host: Driver, good: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The open file is whole, whatever its path means by then."""
    expected = good.read_bytes()
    splice = os.splice

    def replace() -> None:
        other = good.with_name("other")
        other.write_bytes(bytes(len(expected)))
        other.replace(good)

    def meddle(*arguments: int, **options: int) -> int:
        replace()
        return splice(*arguments, **options)

    plan = weights.plan(good)
    if when == "before":
        replace()
    else:
        monkeypatch.setattr(os, "splice", meddle)
    arrays = weights.load(plan, host, HOST)
    assert arrays["ids"].numpy().tolist() == [[0, 1, 2, 3, 4]]
    close(arrays)


def test_a_file_that_cannot_be_read_is_named(host: Driver, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int, **__: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "splice", fail)
    with pytest.raises(UnreadableFileError, match=rf"'{large}' cannot be read to the end: Input/output error"):
        weights.load(large, host, HOST)
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(UnreadableFileError, match=rf"'{large}' cannot be read: Input/output error"):
        weights.plan(large)


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_file_that_changes_while_it_is_read(
    host: Driver, large: Path, monkeypatch: pytest.MonkeyPatch, shrinks: bool
) -> None:
    """I4: nothing is left behind; the ledger looks after it."""
    splice = os.splice

    def meddle(*arguments: int, **options: int) -> int:
        os.truncate(large, 2 * MIB) if shrinks else large.write_bytes(large.read_bytes())
        return splice(*arguments, **options)

    monkeypatch.setattr(os, "splice", meddle)
    with pytest.raises(UsageError, match="changed while it was read"):
        weights.load(large, host, HOST)
    if shrinks:
        monkeypatch.undo()
        with pytest.raises(RangeError, match="truncated"):
            weights.load(large, host, HOST)
