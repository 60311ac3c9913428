"""What the doctor finds: on this machine, and on machines whose files of the kernel's were written for a test."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import standin
import vram
from vram import driver as drivers
from vram.doctor import Finding, examine, gpus, keepers, packages, system, unmet
from vram.driver.cuda import CudaDriver
from vram.driver.cuda.attributes import misread
from vram.driver.cuda.bindings import Bindings
from vram.errors import UnsupportedError
from vram.spec import Location

WELL = {
    "proc/meminfo": "MemTotal:       1024 kB\nMemAvailable:    512 kB\n",
    "proc/self/cgroup": "0::/\n",
    "proc/self/uid_map": "         0          0 4294967295\n",
    "proc/sys/vm/max_map_count": "1048576\n",
    "proc/sys/vm/overcommit_memory": "0\n",
    "proc/sys/kernel/yama/ptrace_scope": "0\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
    "sys/devices/system/node/online": "0\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a machine on which nothing is limited."""
    for name, text in WELL.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "proc/self/ns").mkdir()
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    return tmp_path


@pytest.fixture
def enough_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def named(findings: list[Finding], check: str) -> Finding:
    (found,) = [one for one in findings if one.check == check]
    return found


# -- the host -------------------------------------------------------------------------------------------------------
def test_memory_and_updates_work_where_these_tests_run() -> None:
    found = system.examine()
    assert named(found, "shared memory").verdict == named(found, "updates in place").verdict == "ok"


def test_nothing_is_limited_where_nothing_is(root: Path) -> None:
    found = system.examine(root)
    of_files = ("memory", "addresses", "huge pages", "NUMA", "processes", "users", "ptrace")
    assert {check: named(found, check).verdict for check in of_files} == dict.fromkeys(of_files, "ok")
    assert all(not one.remedy for one in found if one.check in of_files)


@pytest.mark.parametrize(
    ("check", "file", "text", "said", "remedy"),
    [
        ("memory", "proc/meminfo", "MemTotal: 99999999999 kB\n", "control group sets that limit (0::/)", "room"),
        ("addresses", "proc/sys/vm/max_map_count", "100\n", "100 mappings", "vm.max_map_count=65530"),
        ("addresses", "proc/sys/vm/overcommit_memory", "2\n", "1048576", "overcommit_memory=0"),
        ("huge pages", "sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [never]\n", "4 KiB", "echo advise"),
        ("NUMA", "sys/devices/system/node/online", "0-2,5\n", "4 NUMA nodes", "numactl"),
        ("users", "proc/self/uid_map", "0 1000 1\n1 100000 65536\n", "65537 ids", "65534"),
    ],
)
def test_a_limit_is_said_with_what_to_do(root: Path, check: str, file: str, text: str, said: str, remedy: str) -> None:
    (root / file).write_text(text)
    found = named(system.examine(root), check)
    assert found.verdict == "limited"
    assert said in found.said
    assert remedy in found.remedy


def test_a_pid_namespace_of_its_own_is_seen(root: Path) -> None:
    (root / "proc/self/ns/pid").unlink()
    (root / "proc/self/ns/pid").symlink_to("pid:[4026532000]")
    found = named(system.examine(root), "processes")
    assert (found.verdict, "container" in found.said) == ("limited", True)


def test_tracing_that_is_not_allowed_is_said_to_those_who_need_it(root: Path) -> None:
    (root / "proc/sys/kernel/yama/ptrace_scope").write_text("1\n")
    found = named(system.examine(root), "ptrace")
    assert (found.verdict, "NIXL" in found.said) == ("ok", True)


def test_gpus_are_placed_on_their_nodes(root: Path) -> None:
    device = root / "sys/bus/pci/drivers/nvidia/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert "0000:1b:00.0 on 1" in named(system.examine(root), "NUMA").said


def test_a_machine_without_these_files_is_no_error(tmp_path: Path) -> None:
    found = system.examine(tmp_path)
    assert all(one.verdict != "broken" for one in found)
    assert named(found, "processes").verdict == "limited"


def test_few_descriptors_are_a_limit(enough_descriptors: None) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    found = named(system.examine(), "descriptors")
    assert (found.verdict, "RLIMIT_NOFILE is 1024" in found.said) == ("limited", True)
    assert found.remedy.startswith("ulimit -n ")


# -- the keeper -----------------------------------------------------------------------------------------------------
def test_a_keeper_that_serves_is_named_with_what_is_used_of_its_limits() -> None:
    with vram.private_keeper(max_entries=10) as keeper:
        found = keepers.examine(keeper.path)
        assert (found[0].check, found[0].verdict) == ("keeper", "ok")
        pid = vram.statistics(keeper=keeper).pid
        assert f"pid {pid}, of version {vram.__version__}, serves at {keeper.path}" in found[0].said
        assert named(found, "keeper entries").said == "0 of 10 entries are used"


def test_a_keeper_that_is_nearly_full_is_limited() -> None:
    with vram.private_keeper(max_entries=1) as keeper:
        vram.publish("all", {"a": np.zeros(4, "uint8")}, keeper=keeper)
        found = named(keepers.examine(keeper.path), "keeper entries")
        assert (found.verdict, found.said) == ("limited", "1 of 1 entries are used")
        assert "vram rm" in found.remedy


def test_bytes_of_a_limit_are_said_as_sizes() -> None:
    with vram.private_keeper(max_bytes="64MiB") as keeper:
        vram.publish("one", {"a": np.zeros(4, "uint8")}, keeper=keeper)
        found = keepers.examine(keeper.path)
        assert found[0].said.endswith(": 1 entry, 2 MiB")
        assert named(found, "keeper bytes").said == "2 MiB of 64 MiB are used"


def test_where_nobody_listens_the_remedy_starts_one(tmp_path: Path) -> None:
    (found,) = keepers.examine(tmp_path / "k.sock")
    assert (found.verdict, found.code) == ("absent", "ENOENT")
    assert f"vram keep --socket {tmp_path}/k.sock" in found.remedy


def test_a_socket_that_nobody_serves_any_more_is_absent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(str(tmp_path / "k.sock"))
    (found,) = keepers.examine(tmp_path / "k.sock")
    assert (found.verdict, "vram keep" in found.remedy) == ("absent", True)


def test_a_default_directory_that_others_may_enter_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VRAM_KEEPER", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "vram").mkdir()
    (tmp_path / "vram").chmod(0o777)
    (tmp_path / "vram/keeper.sock").touch()
    (found,) = keepers.examine()
    assert (found.verdict, "has to be 0700" in found.said) == ("broken", True)
    assert f"chmod 700 {tmp_path}/vram" in found.remedy


def test_a_path_that_is_too_long_is_broken() -> None:
    (found,) = keepers.examine("/" + "x" * 200)
    assert (found.verdict, "VRAM_KEEPER" in found.remedy) == ("broken", True)


# -- GPUs -----------------------------------------------------------------------------------------------------------
def test_a_driver_that_does_not_answer_is_broken_and_not_waited_for() -> None:
    found = gpus.ask(0.001)
    assert "did not answer within 0.001 s" in found[0].said
    assert [one.verdict for one in found] == ["broken"]


@pytest.mark.parametrize(
    ("ending", "said"), [("kill -SEGV $$", "signal SIGSEGV"), ("echo no >&2; exit 3", "status 3: no")]
)
def test_a_driver_that_ends_its_process_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, said: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{ending}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    (found,) = gpus.ask(60.0)
    assert (found.verdict, said in found.said) == ("broken", True)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment of a process that finds the stand-in."""
    for name, value in standin.child_environment(devices=2).items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.standin
def test_each_gpu_is_named_and_what_it_cannot_do_has_a_code_and_a_remedy(settings: pytest.MonkeyPatch) -> None:
    found = gpus.ask(60.0)
    assert all(one.verdict != "broken" for one in found)
    assert "2 GPUs" in named(found, "driver").said
    assert "GPU-" in named(found, "cuda:1").said
    fabric = named(found, "cuda:0 fabric")
    assert (fabric.verdict, fabric.code) == ("absent", "CUDA_ERROR_NOT_PERMITTED")
    assert "IMEX channels here: none" in fabric.said
    assert "nvidia-imex" in fabric.remedy
    multicast = named(found, "cuda:0 multicast")
    assert (multicast.verdict, "needs VRAM_MULTICAST=on" in multicast.said) == ("absent", True)
    assert named(found, "peers").said == "2 of 2 pairs reach each other's memory"


@pytest.mark.standin
def test_what_the_bindings_tell_wrong_is_said() -> None:
    """As the tests of pointer attributes say it, which compare all of them: by release."""
    driver = drivers.get(Location("cuda", 0))
    assert isinstance(driver, CudaDriver)
    lying = driver.versions[1] in ("12.9.6", "13.3.1", "13.4.1")
    assert driver.misread_attributes() == (
        "for the GPU of a pointer they say 0 where the driver says -2" if lying else ""
    )


class OldBindings(Bindings):
    """As the releases that pass every attribute on but the GPU of a pointer, for which they answer 0."""

    def __call__(self, name: str, *arguments: object) -> object:
        found = super().__call__(name, *arguments)
        return [0] if name == "cuPointerGetAttributes" else found


@pytest.mark.standin
def test_what_is_told_wrong_is_found_by_comparing() -> None:
    assert misread(OldBindings()) == "for the GPU of a pointer they say 0 where the driver says -2"


@pytest.mark.standin
def test_a_driver_that_is_too_old_is_said(settings: pytest.MonkeyPatch) -> None:
    settings.setenv("VRAM_STANDIN_DRIVER_VERSION", "11020")
    (found,) = gpus.ask(60.0)
    assert (found.verdict, "11.4" in found.said) == ("absent", True)


def test_a_kernel_with_nvidias_module_and_no_driver_is_broken(tmp_path: Path) -> None:
    error = UnsupportedError("memory on a GPU", "cuda-bindings", "none", "pip install cuda-bindings")
    assert gpus._no_driver(error, tmp_path).verdict == "absent"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    found = gpus._no_driver(error, tmp_path)
    assert (found.verdict, found.remedy) == ("broken", "pip install cuda-bindings")


@pytest.mark.standin
def test_a_choice_of_gpus_is_said(settings: pytest.MonkeyPatch) -> None:
    settings.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = gpus.ask(60.0)
    assert "sees 1 only" in named(found, "CUDA_VISIBLE_DEVICES").said
    assert [one for one in found if one.check == "cuda:1"] == []


# -- all of it ------------------------------------------------------------------------------------------------------
def test_packages_are_named_by_their_releases() -> None:
    found = packages.examine()
    assert named(found, "numpy").said.startswith("numpy ")
    assert {one.verdict for one in found} <= {"ok", "limited", "absent"}
    assert all(one.remedy for one in found if one.verdict == "absent")


def test_torch_for_the_cpu_has_no_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "version", lambda _: "2.11.0+cpu")
    found = named(packages.examine(), "torch")
    assert (found.verdict, found.said) == (
        "limited",
        "torch 2.11.0+cpu, a build for the CPU: tensors on the host, and no vram.TorchPool",
    )
    monkeypatch.setattr(packages, "version", lambda _: "2.11.0+cu130")
    assert named(packages.examine(), "torch").verdict == "ok"


def test_everything_is_looked_at_in_order() -> None:
    with vram.private_keeper() as keeper:
        areas = [one.area for one in examine(keeper.path)]
    assert sorted(set(areas), key=areas.index) == ["host", "keeper", "gpu", "packages"]
    assert areas == sorted(areas, key=["host", "keeper", "gpu", "packages"].index)


def test_needs_are_areas_or_checks() -> None:
    found = [
        Finding(area="host", check="kernel", verdict="limited", said="old"),
        Finding(area="gpu", check="driver", verdict="ok", said="580"),
        Finding(area="gpu", check="cuda:0 fabric", verdict="absent", said="no channel"),
        Finding(area="keeper", check="keeper", verdict="absent", said="nobody listens"),
    ]
    assert unmet(found, ["host", "gpu", "driver"]) == []
    assert unmet(found, ["cuda:0 fabric"]) == ["cuda:0 fabric: no channel"]
    assert unmet(found, ["keeper"]) == ["keeper: keeper: nobody listens"]
    assert unmet(found, ["cuda:7"]) == ["cuda:7: nothing of that name was looked at"]
    broken = [*found, Finding(area="gpu", check="cuda:0 vmm", verdict="broken", said="refused")]
    assert unmet(broken, ["gpu"]) == ["gpu: cuda:0 vmm: refused"]


def test_it_leaves_nothing_behind(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    live = drivers.get(Location("host")).live()
    examine(tmp_path / "none.sock")
    assert drivers.get(Location("host")).live() == live
    assert sorted(os.listdir("/proc/self/fd")) == before
