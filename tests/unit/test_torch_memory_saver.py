"""torch_memory_saver's interface without a GPU, on something like torch. Its own tests run where there is one:
``make test-engines``."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.support.torch_like import OutOfMemoryError as TorchOutOfMemoryError
from tests.support.torch_like import TorchLike, as_torch, read, write  # noqa: F401

import standin
import vram
from vram.arrays import torch_pool
from vram.engines import torch_memory_saver as adapter
from vram.errors import AsleepError, BackupError, CapacityError, OutOfMemoryError, UnsupportedError, UsageError

MIB = 1 << 20
VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF", "TMS_INIT_ENABLE", "TMS_INIT_ENABLE_CPU_BACKUP", "TMS_INIT_ENABLE_DISK_BACKUP",
    "TMS_INIT_CPU_BACKUP_BACKEND", "TMS_RETAIN_CPU_BACKUP", "TMS_DISK_BACKUP_DIR", "TMS_DISK_BACKUP_CHUNK_MB",
)  # fmt: skip
on_gpu = pytest.mark.standin


@pytest.fixture(autouse=True)
def nothing_set(torch: TorchLike, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    torch.from_numpy = lambda array: array


@pytest.fixture
def saver(torch: TorchLike) -> adapter.TorchMemorySaver:
    return adapter.TorchMemorySaver()


def places_of_segments() -> set[int]:
    return {one.views.region.address for one in torch_pool._segments.copy()}


def tensor(address: int, nbytes: int, **more: Any) -> Any:
    return SimpleNamespace(
        is_cuda=True, is_contiguous=lambda: True, device="cuda:0", dtype=np.uint8, shape=(nbytes,), nbytes=nbytes,
        data_ptr=lambda: address,
    ) if not more else SimpleNamespace(**{**tensor(address, nbytes).__dict__, **more})  # fmt: skip


def usage(saver: adapter.TorchMemorySaver) -> tuple[int, int]:
    """Return the bytes that are awake, and asleep, in all pools."""
    assert saver._impl is not None
    every = [one for pool in saver._impl.pools.values() for one in pool.usage().values()]
    return sum(one.awake for one in every), sum(one.asleep for one in every)


# -- pause and resume -------------------------------------------------------------------------------------------
@on_gpu
@pytest.mark.parametrize("backend", ["pinned", "mmap", "disk"])
def test_what_has_a_backup_keeps_its_bytes_and_the_rest_its_address(
    torch: TorchLike, saver: adapter.TorchMemorySaver, backend: Any, tmp_path: Path
) -> None:
    saver.set_disk_backup_dir(str(tmp_path / "backups"))
    how: dict[str, Any] = (
        {"enable_disk_backup": True}
        if backend == "disk"
        else {"enable_cpu_backup": True, "cpu_backup_backend": backend}
    )
    with saver.region("weights", **how):
        weights, more = torch.empty(4 * MIB), torch.empty(2 * MIB)
    with saver.region("kv"):
        kv = torch.empty(2 * MIB)
    write(weights + 3 * MIB, b"weights")
    write(more, b"more")
    write(kv, b"kv")
    for _ in range(3):
        saver.pause()
        assert usage(saver) == (0, 8 * MIB)
        files = list((tmp_path / "backups").iterdir())
        assert [len(files), sum(file.stat().st_size for file in files)] == (
            [2, 6 * MIB] if backend == "disk" else [0, 0]
        )
        saver.resume()
        assert usage(saver) == (8 * MIB, 0)
        assert (read(weights + 3 * MIB, 7), read(more, 4), read(kv, 2)) == (b"weights", b"more", b"\0\0")
        assert list((tmp_path / "backups").iterdir()) == []
    assert saver.get_cpu_backup(tensor(more, 4)) is None


@on_gpu
def test_tags_are_paused_one_by_one(torch: TorchLike, saver: adapter.TorchMemorySaver) -> None:
    with saver.region("weights", enable_cpu_backup=True):
        torch.empty(2 * MIB)
    with saver.region("kv"):
        torch.empty(4 * MIB)
        with saver.region("weights"):  # of another kind: no backup
            torch.empty(6 * MIB)
    saver.pause("kv")
    assert usage(saver) == (8 * MIB, 4 * MIB)
    saver.pause("weights")
    assert usage(saver) == (0, 12 * MIB)
    saver.resume("kv")
    assert usage(saver) == (4 * MIB, 8 * MIB)
    saver.resume("weights")
    saver.pause("nothing of the kind")
    saver.resume("nothing of the kind")
    assert usage(saver) == (12 * MIB, 0)


@on_gpu
def test_what_ended_the_process_is_an_error_that_changes_nothing(
    torch: TorchLike, saver: adapter.TorchMemorySaver
) -> None:
    saver.pause()
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.empty(2 * MIB)
    with saver.region("kv"):
        torch.empty(4 * MIB)
    write(weights, b"weights")
    with pytest.raises(UsageError, match=r"memory of \['kv', 'weights'\] is not paused"):
        saver.resume()
    saver.pause("kv")
    for tag in ("kv", None):
        with pytest.raises(AsleepError, match=r"memory of \['kv'\] is paused already"):
            saver.pause(tag)
    with pytest.raises(UsageError, match=r"memory of \['weights'\] is not paused"):
        saver.resume()
    with pytest.raises(AsleepError, match="is asleep: wake it first"), saver.region("kv"):
        pass
    assert usage(saver) == (2 * MIB, 4 * MIB)
    assert read(weights, 7) == b"weights"
    with pytest.raises(UsageError, match=r"was not allocated in a region of this saver"):
        saver.get_cpu_backup(tensor(1 << 40, 8))
    saver.resume("kv")


@on_gpu
def test_resuming_that_runs_out_of_memory_leaves_all_paused_and_whole(
    torch: TorchLike, saver: adapter.TorchMemorySaver
) -> None:
    with saver.region(enable_cpu_backup=True):
        made = [torch.empty(2 * MIB) for _ in range(3)]
    for number, address in enumerate(made):
        write(address, b"%d" % number)
    saver.pause()
    with standin.Standin().failing("cuMemCreate", nth=2, code=2), pytest.raises(OutOfMemoryError):
        saver.resume()
    assert usage(saver) == (0, 6 * MIB)
    saver.resume()
    assert [read(address, 1) for address in made] == [b"0", b"1", b"2"]


@on_gpu
def test_pausing_without_room_for_the_bytes_leaves_all_awake(
    torch: TorchLike, saver: adapter.TorchMemorySaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with saver.region("kv"):
        torch.empty(2 * MIB)
    with saver.region("weights", enable_cpu_backup=True):
        weights = torch.empty(2 * MIB)
    write(weights, b"weights")
    vram.memory.trim()
    monkeypatch.setenv("VRAM_PINNED_LIMIT", "1MiB")
    with pytest.raises(CapacityError, match="VRAM_PINNED_LIMIT"):
        saver.pause()
    assert usage(saver) == (4 * MIB, 0)
    assert read(weights, 7) == b"weights"
    with saver.region("files", enable_disk_backup=True):
        torch.empty(2 * MIB)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "")))
    with pytest.raises(BackupError, match="No space left"):
        saver.pause("files")
    assert usage(saver) == (6 * MIB, 0)


@on_gpu
def test_two_gpus_are_paused_and_resumed_together_or_not_at_all(
    torch: TorchLike, saver: adapter.TorchMemorySaver
) -> None:
    made = []
    for ordinal in range(2):
        torch.cuda.current_device = lambda ordinal=ordinal: ordinal
        with saver.region("weights", enable_cpu_backup=True, cpu_backup_backend=("pinned", "mmap")[ordinal]):
            made.append(torch.empty(2 * MIB))
        write(made[-1], b"%d" % ordinal)
    assert saver._impl is not None
    assert [str(pool.location) for pool in saver._impl.pools.values()] == ["cuda:0", "cuda:1"]
    saver.pause("weights")
    assert usage(saver) == (0, 4 * MIB)
    with standin.Standin().failing("cuMemCreate", nth=2, code=2), pytest.raises(OutOfMemoryError):
        saver.resume()
    assert usage(saver) == (0, 4 * MIB)
    saver.resume()
    assert [read(address, 1) for address in made] == [b"0", b"1"]


# -- backups ----------------------------------------------------------------------------------------------------
@on_gpu
@pytest.mark.parametrize("backend", ["pinned", "mmap"])
def test_a_backup_is_looked_at_and_retained_at_one_address(
    torch: TorchLike, saver: adapter.TorchMemorySaver, backend: Any
) -> None:
    with saver.region(enable_cpu_backup=True, cpu_backup_backend=backend):
        address = torch.empty(2 * MIB)
    write(address, b"one")
    x = tensor(address, 3)
    assert saver.get_cpu_backup(x) is None
    saver.pause()
    first = saver.get_cpu_backup(x, zero_copy=True)
    place = first.ctypes.data
    copied = saver.get_cpu_backup(x)
    assert (first.tobytes(), copied.tobytes()) == (b"one", b"one")
    assert copied.ctypes.data != place
    assert saver._impl is not None
    assert saver._impl.has_backup_at(place)
    saver.retain_cpu_backup = True
    del first
    saver.resume()
    assert read(address, 3) == b"one"
    write(address, b"two")
    assert saver.get_cpu_backup(x).tobytes() == b"one"  # as of when it was paused
    saver.pause()
    again = saver.get_cpu_backup(x, zero_copy=True)
    assert (again.ctypes.data, again.tobytes()) == (place, b"two")
    saver.retain_cpu_backup = False
    saver.resume()
    assert saver.get_cpu_backup(x) is None
    assert not saver._impl.has_backup_at(place)
    assert again.tobytes() == b"two"  # whose memory stays with it
    assert read(address, 3) == b"two"
    inner = saver.get_cpu_backup(tensor(address + MIB, 4, dtype=np.int32, shape=(1,)))
    assert inner is None


@on_gpu
@pytest.mark.parametrize("paused", [False, True])
def test_a_backup_goes_with_its_memory(torch: TorchLike, saver: adapter.TorchMemorySaver, paused: bool) -> None:
    saver.retain_cpu_backup = True
    with saver.region("gone", enable_cpu_backup=True):
        address = torch.empty(2 * MIB)
    saver.pause()
    place = saver.get_cpu_backup(tensor(address, 1), zero_copy=True).ctypes.data
    if not paused:
        saver.resume()
    inside = saver._impl
    assert inside is not None
    pool = inside._mem_pools.pop(("gone", True, False, "pinned", 0))
    library = inside._binary_wrapper.cdll
    library.cudaHostGetFlags.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    pointer = ctypes.c_void_p(place)
    assert library.cudaHostGetFlags(ctypes.byref(ctypes.c_uint()), pointer) == 0
    torch.drop(address)
    del pool
    gc.collect()
    assert library.cudaHostGetFlags(ctypes.byref(ctypes.c_uint()), pointer) == 1
    assert library.cudaGetLastError() == 0
    assert usage(saver) == (0, 0)
    with saver.region("gone", enable_cpu_backup=True):
        assert torch.empty(2 * MIB)


@on_gpu
def test_a_backup_is_asked_for_rightly(torch: TorchLike, saver: adapter.TorchMemorySaver) -> None:
    with saver.region("kv"):
        address = torch.empty(2 * MIB)
    x = tensor(address, 8)
    assert saver.get_cpu_backup(x) is None
    for wrong in (tensor(address, 8, is_cuda=False), tensor(address, 8, is_contiguous=lambda: False)):
        with pytest.raises(UsageError, match="contiguous tensor on a GPU"):
            saver.get_cpu_backup(wrong)
    saver.pause()
    with pytest.raises(UsageError, match="'kv' has no backup"):
        saver.get_cpu_backup(x)
    saver.resume()
    with saver.region("files", enable_disk_backup=True):
        other = torch.empty(2 * MIB)
    saver.pause("files")
    assert saver.get_cpu_backup(tensor(other, 8)) is None
    saver.resume("files")


@on_gpu
def test_a_backup_in_pieces_is_copied(
    torch: TorchLike, saver: adapter.TorchMemorySaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VRAM_PINNED_LIMIT", "64MiB")
    vram.memory.trim()
    with saver.region("a", enable_cpu_backup=True):
        small = [torch.empty(2 * MIB) for _ in range(32)]
    with saver.region("b", enable_cpu_backup=True):
        large = torch.empty(6 * MIB)
    write(large + 2 * MIB - 2, b"abcd")
    saver.pause("a")  # all that may be pinned
    held = [saver.get_cpu_backup(tensor(address, 1), zero_copy=True) for address in small[1::2]]
    saver.resume("a")
    saver.pause("b")
    x = tensor(large + 2 * MIB - 2, 4)
    assert saver.get_cpu_backup(x).tobytes() == b"abcd"
    with pytest.raises(UnsupportedError, match="2 pieces"):
        saver.get_cpu_backup(x, zero_copy=True)
    saver.resume("b")
    assert read(large + 2 * MIB - 2, 4) == b"abcd"
    assert len(held) == 16


# -- regions ----------------------------------------------------------------------------------------------------
def test_arguments_that_exclude_each_other(torch: TorchLike, saver: adapter.TorchMemorySaver) -> None:
    with pytest.raises(ValueError, match="requires enable_cpu_backup"), saver.region(cpu_backup_backend="mmap"):
        pass
    with pytest.raises(ValueError, match="requires enable_cpu_backup"), saver.cuda_graph(1, cpu_backup_backend="mmap"):
        pass
    wrong: Any = "paper"
    with pytest.raises(UsageError, match="'paper'"), saver.region(enable_cpu_backup=True, cpu_backup_backend=wrong):
        pass
    with (
        pytest.raises(AssertionError, match="mutually exclusive"),
        saver.region(enable_cpu_backup=True, enable_disk_backup=True),
    ):
        pass
    torch.version.hip = "6.2"
    with pytest.raises(ValueError, match="ROCm"), saver.region(enable_cpu_backup=True, cpu_backup_backend="mmap"):
        pass
    torch.xpu = SimpleNamespace(is_available=lambda: True)
    with pytest.raises(ValueError, match="XPU"), saver.region(enable_cpu_backup=True, cpu_backup_backend="pinned"):
        pass


@on_gpu
def test_who_switches_the_region_off_allocates_as_ever(torch: TorchLike, saver: adapter.TorchMemorySaver) -> None:
    """As slime does around the buffers of deep_ep, which must not go when the model is paused."""
    library = saver._ensure_initialized()._binary_wrapper.cdll
    for on in (False, True):  # there is no region to leave or to come back to
        library.tms_set_interesting_region(on)
        assert library.tms_get_interesting_region() is False
    with saver.region("weights"):
        first = torch.empty(2 * MIB)
        for _ in range(2):
            library.tms_set_interesting_region(False)
            library.tms_set_interesting_region(False)
            assert library.tms_get_interesting_region() is False
            other = torch.empty(2 * MIB)
            with pytest.raises(UsageError, match="inside of a region"), saver.disable():
                pass
            with saver.region("weights"):  # whose end is not that of the outer one
                library.tms_set_interesting_region(True)
                second = torch.empty(2 * MIB)
                library.tms_set_interesting_region(False)
            assert library.tms_get_interesting_region() is False
            assert torch.empty(2 * MIB) not in places_of_segments(), "this one is left still"
            library.tms_set_interesting_region(True)
            assert library.tms_get_interesting_region() is True
            assert other not in places_of_segments()
            assert {first, second} <= places_of_segments()
        with saver.disable():
            library.tms_set_interesting_region(False)
            library.tms_set_interesting_region(True)
            assert torch.empty(2 * MIB) not in places_of_segments(), "it is disabled still"
        assert torch.empty(2 * MIB) in places_of_segments()
        library.tms_set_interesting_region(False)  # and never on again
    assert library.tms_get_interesting_region() is False
    with saver.region("weights"):
        assert torch.empty(2 * MIB) in places_of_segments()
    assert not torch.entered
    saver.pause()
    saver.resume()


@on_gpu
def test_the_memory_of_a_graph_is_paused_and_used_by_nothing_else(
    torch: TorchLike, saver: adapter.TorchMemorySaver
) -> None:
    with saver.cuda_graph("graph", tag="graph", enable_cpu_backup=True):
        made = torch.empty(4 * MIB)
        torch.drop(made)  # free within the graph, which writes to it when it is replayed
        number = torch.entered[-1][1].id
    with saver.region("graph", enable_cpu_backup=True):
        assert torch.empty(4 * MIB) != made
    with saver.cuda_graph("other", pool=number, tag="graph", enable_cpu_backup=True):
        assert torch.empty(4 * MIB) == made
    assert usage(saver) == (8 * MIB, 0)
    write(made, b"graph")
    saver.pause("graph")
    assert usage(saver) == (0, 8 * MIB)
    saver.resume("graph")
    assert read(made, 5) == b"graph"
    shared = (7, 7)  # of torch.cuda.graph_pool_handle(), as SGLang passes it
    places = set()
    for name in ("third", "fourth"):
        with saver.cuda_graph(name, pool=shared, tag="shared"):
            places.add(found := torch.empty(2 * MIB))
            torch.drop(found)
    assert len(places) == 1
    assert places < places_of_segments()
    with saver.cuda_graph("fifth", pool=shared, tag="other"):
        assert torch.empty(2 * MIB) not in places
    assert usage(saver) == (12 * MIB, 0)
    assert saver._impl is not None
    for pool in saver._impl.pools.values():
        pool.close()
    with saver.cuda_graph("sixth", pool=shared, tag="shared"):
        assert torch.entered[-1][1].uses == 2


@on_gpu
def test_a_margin_stays_free(torch: TorchLike, saver: adapter.TorchMemorySaver) -> None:
    saver.memory_margin_bytes = 1 << 50
    with pytest.raises(TorchOutOfMemoryError) as caught, saver.region():
        torch.empty(2 * MIB)
    assert any("less than the margin of" in note for note in caught.value.__notes__)
    saver.memory_margin_bytes = 0
    with saver.region():
        assert torch.empty(2 * MIB)
    for wrong in (-1, 1.5, "1GiB"):
        with pytest.raises(UsageError, match="number of bytes"):
            saver.memory_margin_bytes = wrong  # type: ignore[assignment]
    with pytest.raises(NotImplementedError):
        _ = saver.memory_margin_bytes


# -- settings ---------------------------------------------------------------------------------------------------
def test_the_hook_mode_is_set_once_and_preload_is_warned_of(torch: TorchLike, saver: adapter.TorchMemorySaver) -> None:
    assert saver.enabled is True
    with pytest.raises(AttributeError):
        _ = saver.hook_mode
    saver.hook_mode = "torch"
    with pytest.warns(RuntimeWarning, match="vram preloads nothing"):
        saver.hook_mode = "preload"
    with pytest.raises(UsageError, match="'other'"):
        saver.hook_mode = "other"
    saver._ensure_initialized()
    with pytest.raises(UsageError, match="before the first use"):
        saver.hook_mode = "torch"


def test_the_environment_is_heard(
    torch: TorchLike, saver: adapter.TorchMemorySaver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMS_INIT_CPU_BACKUP_BACKEND", "mmap")
    monkeypatch.setenv("TMS_RETAIN_CPU_BACKUP", "yes")
    monkeypatch.setenv("TMS_DISK_BACKUP_DIR", str(tmp_path))
    monkeypatch.setenv("TMS_DISK_BACKUP_CHUNK_MB", "3")
    monkeypatch.setenv("TMS_INIT_ENABLE_CPU_BACKUP", "0")
    monkeypatch.setenv("TMS_INIT_ENABLE_DISK_BACKUP", "TRUE")
    inside = saver._ensure_initialized()
    library = inside._binary_wrapper.cdll
    assert library.tms_get_cpu_backup_backend() == b"mmap"
    assert inside.kind("x", True, False, None) == ("x", True, False, "mmap", 0)
    assert inside.kind("x", True, False, "pinned").backend == "pinned"
    assert inside.kind("x", False, True, None).backend == ""
    assert saver.retain_cpu_backup is library.tms_get_retain_cpu_backup() is True
    assert (inside.directory, inside.piece) == (tmp_path, 3 * MIB)
    assert library.tms_get_enable_disk_backup() is True
    assert library.tms_get_enable_cpu_backup() is False
    assert library.tms_get_current_tag() == b"default"
    assert library.tms_get_interesting_region() is False


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("TMS_INIT_ENABLE", "1", UnsupportedError, "TMS_INIT_ENABLE needs a library that is preloaded"),
        ("TMS_INIT_ENABLE", "perhaps", UsageError, "TMS_INIT_ENABLE is 1 or 0"),
        ("TMS_RETAIN_CPU_BACKUP", "2", UsageError, "TMS_RETAIN_CPU_BACKUP is 1 or 0"),
        ("TMS_INIT_CPU_BACKUP_BACKEND", "paper", UsageError, "'paper'"),
        ("TMS_DISK_BACKUP_CHUNK_MB", "many", UsageError, "number of MiB"),
        ("PYTORCH_CUDA_ALLOC_CONF", "a:1,expandable_segments:True", RuntimeError, "expandable_segments"),
    ],
)
def test_an_environment_that_will_not_do_is_told(
    torch: TorchLike, saver: adapter.TorchMemorySaver, monkeypatch: pytest.MonkeyPatch,
    name: str, value: str, error: type[Exception], words: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(name, value)
    with pytest.raises(error, match=words):
        saver.pause()


# -- the package ------------------------------------------------------------------------------------------------
SCRIPT = """
import multiprocessing, os, subprocess, sys
{0}
import torch_memory_saver
from torch_memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver as saver, utils
from torch_memory_saver.entrypoint import TorchMemorySaver as same
from torch_memory_saver.hooks.mode_preload import configure_subprocess as also
from torch_memory_saver.testing_utils import empty_cache, get_and_print_gpu_memory, get_device
import vram.engines.torch_memory_saver as adapter

def child():
    from torch_memory_saver.utils import change_env
    with change_env("X", "1"):
        assert os.environ["X"] == "1"
    assert "X" not in os.environ

if __name__ == "__main__":
    assert same is TorchMemorySaver is adapter.TorchMemorySaver
    assert saver is adapter.torch_memory_saver
    assert also is configure_subprocess
    adapter.install()
    assert saver is torch_memory_saver.torch_memory_saver
    assert "torch" not in sys.modules and "numpy" not in sys.modules
    with configure_subprocess():
        process = multiprocessing.get_context("spawn").Process(target=child)
        process.start()
        process.join(60)
    assert process.exitcode == 0, process.exitcode
    code = "import torch_memory_saver as t; print(t.entrypoint.__name__)"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout, end="")
"""


@pytest.mark.parametrize("how", ["install", "path"])
def test_programs_and_their_children_find_it_under_the_name_of_the_package(how: str, tmp_path: Path) -> None:
    install = "if __name__ == '__main__': import vram.engines.torch_memory_saver as a; a.install()"
    (tmp_path / "program.py").write_text(SCRIPT.replace("{0}", install if how == "install" else ""))
    path = [*sys.path] if how == "install" else [str(adapter.SHIMS), *sys.path]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "vram.engines.torch_memory_saver\n"), done.stderr


def test_the_directory_is_printed_and_the_package_itself_is_not_covered_up(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        [sys.executable, "-m", adapter.__name__], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout == f"{adapter.SHIMS}\n"
    monkeypatch.setitem(
        sys.modules, "torch_memory_saver", SimpleNamespace(__file__="/x/torch_memory_saver/__init__.py")
    )
    with pytest.raises(UsageError, match="was imported from /x/torch_memory_saver/"):
        adapter.install()


def test_the_memory_in_use_is_printed(torch: TorchLike, capsys: pytest.CaptureFixture[str]) -> None:
    assert adapter.get_and_print_gpu_memory("now") == 7
    assert capsys.readouterr().out == "GPU 0 memory: 0.00 GB (now)\n"
    assert adapter.get_device() == "cuda"
    adapter.empty_cache()
