"""The kernel, and what it lets this process have."""

from __future__ import annotations

import os
import platform
import re
import resource
from contextlib import ExitStack
from pathlib import Path

from .. import driver as drivers
from ..driver import words
from ..errors import UnsupportedError, VramError
from ..memory.kinds import OWN
from ..spec import HOST, format_size
from .finding import Finding, failed

_ROOT = Path("/")
_MANY = 4096  # descriptors with which an attach of 1,000 segments leaves room for everything else
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of the kernel's
_MAPPINGS = 65530  # what the kernel lets a process have unless told otherwise


def examine(root: Path = _ROOT) -> list[Finding]:
    """Return the findings about this process's half of the machine. `root` is the directory of ``proc`` and ``sys``."""
    return [
        _kernel(),
        _memory(),
        _updates(),
        _room(root),
        _descriptors(),
        _addresses(root),
        _pages(root),
        _nodes(root),
        _processes(root),
        _users(root),
        _tracing(root),
    ]


def _finding(check: str, said: str, limited: str = "") -> Finding:
    """Return a finding, with a remedy if it sets a limit."""
    return Finding(area="host", check=check, verdict="limited" if limited else "ok", said=said, remedy=limited)


def _kernel() -> Finding:
    release = platform.release()
    said = f"{platform.system()} {release} on {platform.machine()}, Python {platform.python_version()}"
    if platform.system() != "Linux":
        return Finding(
            area="host", check="kernel", verdict="broken", said=said, remedy="memfd and sealing are of Linux"
        )
    return _finding("kernel", said)


def _memory() -> Finding:
    """Shared memory of the host, tried the whole way: made, sealed, sent out, taken in."""
    check = "shared memory"
    try:
        driver = drivers.get(HOST)
        with ExitStack() as undo:
            nbytes = driver.mem_granularity(HOST, OWN.kind).minimum
            handle = driver.mem_create(nbytes, HOST, OWN.kind)
            undo.callback(driver.mem_release, handle)
            fd = driver.mem_export(handle, OWN.kind)
            undo.callback(os.close, fd)
            undo.callback(driver.mem_release, driver.mem_import(fd, OWN.kind, nbytes))
    except (VramError, OSError) as error:
        remedy = (
            "memfd_create and sealing have to be allowed: look at the container's seccomp profile, and at the sysctl "
        )
        return failed("host", check, error, remedy=remedy + "vm.memfd_noexec")
    return _finding(check, "made, sealed, exported and imported: memfd works")


def _updates() -> Finding:
    """Membarrier, without which nothing is updated in place."""
    check = "updates in place"
    try:
        words.register()
        words.barrier()
    except UnsupportedError as error:
        return Finding(
            area="host", check=check, verdict="broken", said=str(error),
            remedy=error.remedy or "membarrier has to be allowed: look at the container's seccomp profile",
        )  # fmt: skip
    return _finding(check, "membarrier works")


def _room(root: Path) -> Finding:
    available, total = drivers.get(HOST).mem_info(HOST)
    said = f"{format_size(available)} of {format_size(total)} can be had"
    found = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    if found and total < int(found[1]) * 1024:
        said += (
            f": the control group sets that limit ({_read(root / 'proc/self/cgroup').strip().rpartition(chr(10))[2]})"
        )
        return _finding(
            "memory", said, "give the group room for what it publishes: pages count for the group that touched them "
            "first, for as long as anybody has them"
        )  # fmt: skip
    return _finding("memory", said)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    said = f"RLIMIT_NOFILE is {soft}, and may be raised to {hard}"
    if soft < _MANY:
        remedy = f"ulimit -n {hard}" if hard >= _MANY else f"ulimit -n {_MANY}, which an administrator has to allow"
        return _finding("descriptors", f"{said}: each segment of an entry takes one while it is attached", remedy)
    return _finding("descriptors", said)


def _addresses(root: Path) -> Finding:
    most = _number(root / "proc/sys/vm/max_map_count")
    strict = _number(root / "proc/sys/vm/overcommit_memory") == 2
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    said = f"{most if most is not None else 'an unknown number of'} mappings a process"
    limits = []
    if strict:
        limits.append("sysctl vm.overcommit_memory=0: with 2 the kernel counts addresses that are only reserved")
    if space != resource.RLIM_INFINITY:
        said += f", {format_size(space)} of addresses (RLIMIT_AS)"
        limits.append("ulimit -v unlimited: what is reserved takes addresses, not memory")
    if most is not None and most < _MAPPINGS:
        limits.append(f"sysctl vm.max_map_count={_MAPPINGS}")
    return _finding("addresses", said, "; ".join(limits))


def _pages(root: Path) -> Finding:
    chosen = re.search(r"\[(\w+)\]", _read(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    if chosen is None:
        return _finding("huge pages", "the kernel has none for shared memory")
    used = chosen[1] not in ("never", "deny")
    return _finding(
        "huge pages",
        f"transparent_hugepage/shmem_enabled is {chosen[1]}: shared memory has pages of {'2 MiB' if used else '4 KiB'}",
        ""
        if used
        else "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, where first touches cost too much",
    )


def _nodes(root: Path) -> Finding:
    online = _read(root / "sys/devices/system/node/online").strip() or "0"
    nodes = _count(online)
    placed = sorted((root / "sys/bus/pci/drivers/nvidia").glob("*:*/numa_node"))
    where = ", ".join(f"{path.parent.name} on {_read(path).strip()}" for path in placed)
    said = f"{nodes} NUMA node{'s' if nodes != 1 else ''}" + (f"; GPUs: {where}" if where else "")
    return _finding(
        "NUMA", said, "copies are fastest from the node of the GPU: numactl --cpunodebind" if nodes > 1 else ""
    )


def _processes(root: Path) -> Finding:
    try:
        namespace = os.readlink(root / "proc/self/ns/pid")
    except OSError as error:
        return _finding("processes", f"no PID namespace can be read ({error.strerror})", "mount /proc")
    if namespace == _FIRST_PID_NAMESPACE:
        return _finding("processes", "the machine's own PID namespace")
    return _finding(
        "processes", "a PID namespace of its own, as in a container",
        "give each container a host name of its own: a keeper in another one does not see this process's pid",
    )  # fmt: skip


def _users(root: Path) -> Finding:
    rows = [[int(number) for number in line.split()] for line in _read(root / "proc/self/uid_map").splitlines()]
    said = f"uid {os.geteuid()}"
    if rows == [[0, 0, (1 << 32) - 1]] or not rows:
        return _finding("users", said + ", in the machine's own user namespace")
    return _finding(
        "users", f"{said}, in a user namespace of {sum(row[2] for row in rows)} ids",
        "a keeper outside sees who it does not know as uid 65534, who may attach and owns nothing: run it in the same "
        "namespace, or map the user",
    )  # fmt: skip


def _tracing(root: Path) -> Finding:
    scope = _number(root / "proc/sys/kernel/yama/ptrace_scope")
    said = "this library traces nobody"
    if scope:
        return _finding(
            "ptrace", f"{said}; yama/ptrace_scope is {scope}, so NIXL's and UCX's copies between processes do not work"
        )
    return _finding("ptrace", said)


def _count(nodes: str) -> int:
    """How many a list such as ``0-1,4`` names."""
    total = 0
    for part in nodes.split(","):
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1
    return total


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    """Return the text of a file of the kernel; empty where there is none, or it may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
