"""Entries on disk: what comes back is what was saved, and whoever is killed leaves one of the two whole."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tests.support.children import child
from tests.support.deadlines import SOON
from tests.support.save_children import save_and_die

import vram
from vram.errors import AsleepError, BackupError, BusyError, NotFoundError, UsageError

pytestmark = pytest.mark.usefixtures("kept")
GPU = pytest.param("cuda:0", marks=pytest.mark.standin)
TYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "bfloat16", "complex64", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def publish(device: str = "host", value: int = 1, **options: object) -> dict[str, vram.Array]:
    """Publish arrays of all types full of a number, one of them by two names."""
    arrays = {dtype: vram.zeros((3, 5), dtype, device=device) for dtype in TYPES}
    for array in arrays.values():
        array.fill(value)
    arrays["empty"] = vram.zeros((0, 4), "float32", device=device)
    arrays["tied"] = arrays["float32"]
    vram.publish("w", arrays, meta={"config": "v1", "ä": "ö"}, **options)  # type: ignore[arg-type]
    return arrays


def check(name: str, value: int = 1, device: str = "host") -> None:
    with vram.attach(name) as lease:
        assert lease.meta == {"config": "v1", "ä": "ö"}
        assert set(lease) == {*TYPES, "empty", "tied"}
        for dtype in TYPES:
            array = lease[dtype]
            assert (array.dtype, array.shape, array.region.location) == (
                vram.zeros((1,), dtype, device="host").dtype, (3, 5), vram.memory.Location.parse(device),
            )  # fmt: skip
            assert (array.to_host() == np.full((3, 5), value).astype(array.dtype)).all()
        assert (lease["empty"].shape, lease["tied"].address) == ((0, 4), lease["float32"].address)


@pytest.mark.parametrize("device", ["host", GPU])
@pytest.mark.parametrize(("to", "shard", "files"), [("m.safetensors", "5GiB", 1), ("out", "5GiB", 1), ("out", 300, 5)])
def test_it_comes_back_the_same(tmp_path: Path, device: str, to: str, shard: int | str, files: int) -> None:
    publish(device)
    saved = vram.save("w", tmp_path / to, shard=shard)
    assert len(saved) >= files
    assert all(os.path.isfile(file) for file in saved)
    published = vram.publish_file("again", tmp_path / to, device=device)
    assert published.arrays == len(TYPES) + 2
    check("again", device=device)


def test_other_libraries_read_it(tmp_path: Path) -> None:
    arrays = {"float32": vram.zeros((3, 5), "float32", device="host"), "int8": vram.zeros((7,), "int8", device="host")}
    arrays["tied"] = arrays["float32"]
    vram.publish("w", arrays)
    (file,) = vram.save("w", tmp_path / "out")
    found = load_file(file)
    assert {name: (array.shape, str(array.dtype)) for name, array in found.items()} == {
        "float32": ((3, 5), "float32"), "int8": ((7,), "int8"),
    }  # fmt: skip
    said = Path(file).read_bytes()
    header = json.loads(said[8 : 8 + int.from_bytes(said[:8], "little")])
    assert header["__metadata__"]["format"] == "pt"
    assert "tied" not in header
    with safe_open(file, "numpy") as opened:
        assert set(opened.keys()) == {"float32", "int8"}


def test_what_the_file_before_said_of_itself_is_in_the_next(tmp_path: Path) -> None:
    save_file({"x": np.arange(4)}, tmp_path / "a.safetensors", metadata={"format": "np", "author": "me"})
    vram.publish_file("w", tmp_path / "a.safetensors", device="host")
    vram.save("w", tmp_path / "b.safetensors")
    vram.publish_file("again", tmp_path / "b.safetensors", device="host", meta={"mine": "1"})
    assert vram.entry("again").meta == {**vram.entry("w").meta, "mine": "1"}


def test_a_folder_is_saved_into_again_and_other_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for number, shard in enumerate(["5GiB", 300, 300, "5GiB", 300]):
        publish(value=number)
        saved = vram.save("w", folder, shard=shard)
        assert {*map(os.path.basename, saved), "config.json"} == set(os.listdir(folder))
        vram.publish_file("again", folder, device="host")
        check("again", number)


@pytest.mark.parametrize(("before", "after"), [("5GiB", "5GiB"), (300, 300), ("5GiB", 300), (300, "5GiB")])
def test_killed_at_any_step_one_of_the_two_is_there_whole(tmp_path: Path, before: int | str, after: int | str) -> None:
    publish(value=1)
    vram.save("w", tmp_path / "out", shard=before)
    publish(value=2)
    seen: set[int] = set()
    for stop_at in range(0, 200, 1 if after == "5GiB" else 4):
        with child(save_and_die, str(tmp_path / "out"), after, stop_at, may_end=False) as saver:
            try:
                is_over = saver.said() == "saved"
            except EOFError:
                is_over = False
        vram.publish_file("again", tmp_path / "out", device="host")
        with vram.attach("again") as lease:
            value = int(lease["int8"].to_host()[0, 0])
        check("again", value)
        seen.add(value)
        if is_over:
            break
        if value == 2:  # begin again with what was there before
            publish(value=1)
            vram.save("w", tmp_path / "out", shard=before)
            publish(value=2)
    assert seen == {1, 2}
    assert not [one for one in os.listdir(tmp_path / "out") if one.endswith(".part")], "the next save takes them away"


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    publish(value=1)
    for to in (tmp_path / "m.safetensors", tmp_path / "out"):
        vram.save("w", to)
        before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
        publish(value=2)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1100, limits[1]))
        try:
            with pytest.raises(BackupError, match="cannot be written: File too large"):
                vram.save("w", to, shard=300)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert {file: file.read_bytes() for file in tmp_path.rglob("*.*")} == before


def test_a_folder_loses_no_file_that_is_not_of_its_model(tmp_path: Path) -> None:
    publish()
    vram.save("w", tmp_path)
    names = {"a": "model.safetensors", "b": "config.json", "c": "../outside", "d": "tokenizer.json"}
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    vram.save("w", tmp_path)
    assert set(os.listdir(tmp_path)) == {"model.safetensors", "config.json", "tokenizer.json"}
    for other in ("other.safetensors", "model.fp16.safetensors.index.json"):
        (tmp_path / other).touch()
        with pytest.raises(UsageError, match=other):
            vram.save("w", tmp_path, shard=300)
        (tmp_path / other).unlink()
    assert set(os.listdir(tmp_path)) == {"model.safetensors", "config.json", "tokenizer.json"}


def test_one_saves_into_a_folder_at_a_time(tmp_path: Path) -> None:
    publish()
    lock = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="saving into it"):
            vram.save("w", tmp_path)
    finally:
        os.close(lock)
    vram.save("w", tmp_path)


def test_a_file_keeps_its_mode_and_a_link_what_it_stands_for(tmp_path: Path) -> None:
    publish()
    (file,) = vram.save("w", tmp_path / "real.safetensors")
    os.chmod(file, 0o600)
    (tmp_path / "link.safetensors").symlink_to(file)
    publish(value=2)
    vram.save("w", tmp_path / "link.safetensors")
    assert (tmp_path / "link.safetensors").is_symlink()
    assert os.stat(file).st_mode & 0o777 == 0o600
    vram.publish_file("again", file, device="host")
    check("again", 2)


@pytest.mark.parametrize("item", ['{"min_gb": 24}', "[]", "x", '{"form": 2, "meta": {}, "ties": {}}'])
def test_an_item_of_that_name_that_is_not_ours_is_metadata(tmp_path: Path, item: str) -> None:
    save_file({"x": np.arange(4)}, tmp_path / "a.safetensors", metadata={"vram": item})
    vram.publish_file("w", tmp_path / "a.safetensors", device="host")
    assert json.loads(vram.entry("w").meta["__metadata__"]) == {"vram": item}


@pytest.mark.parametrize("swap", [False, True])
def test_what_is_updated_is_of_one_version(tmp_path: Path, swap: bool) -> None:
    arrays = {name: vram.zeros((1 << 20,), "uint8", device="host") for name in "ab"}
    vram.publish("w", arrays, updatable=True, swap=swap)
    stop = threading.Event()

    def write() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) % 200
            with vram.update("w", timeout=SOON) as written:
                for array in written.values():
                    array.fill(value)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            (file,) = vram.save("w", tmp_path / "m.safetensors", timeout=SOON)
            assert len({int(number) for array in load_file(file).values() for number in np.unique(array)}) == 1
    finally:
        stop.set()
        writer.join(SOON)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        vram.save("w", tmp_path / "out", timeout=0.0)
    vram.publish("w", {"x": np.zeros(3, "complex128")})
    with pytest.raises(UsageError, match="'x' is of type complex128"):
        vram.save("w", tmp_path / "out")
    vram.publish("w", {"__metadata__": np.zeros(3)})
    with pytest.raises(UsageError, match="rename"):
        vram.save("w", tmp_path / "out")
    vram.publish("w", {"x": vram.zeros((4, 8), "float6_e2m3fn_packed", device="host")})
    with pytest.raises(UsageError, match="whole number"):
        vram.save("w", tmp_path / "out")
    for wrong in ("", "nul\0x"):
        with pytest.raises(UsageError, match="no path"):
            vram.save("w", wrong)
    for wrong in (-1, "many", np.ones(2)):
        with pytest.raises(UsageError):
            vram.save("w", tmp_path / "out", shard=wrong)  # type: ignore[arg-type]
    for wrong in (5, None, np.ones(2)):
        with pytest.raises(UsageError):
            vram.save("w", wrong)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    vram.publish("w", {"x": np.zeros(3)})
    with pytest.raises(BackupError, match="cannot be written"):
        vram.save("w", tmp_path / "file" / "out")


@pytest.mark.standin
def test_what_is_parked_is_to_be_woken_first(tmp_path: Path) -> None:
    for array in publish("cuda:0").values():
        array.close()
    vram.park("w")
    with pytest.raises(AsleepError, match="wake=True"):
        vram.save("w", tmp_path / "out")
