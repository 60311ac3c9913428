"""On a system that is not Linux the import works, and use says what is missing (issue: UnsupportedError, not a
traceback from the depths). Shown in a subprocess that has lost what those systems lack."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# What the library stands on works there too, so it is loaded before the pretence begins; then goes what is Linux's.
PRETEND = """
import asyncio, ctypes, json, mmap, multiprocessing, msgspec, numpy, os, rich, selectors, signal, socket, sys, typer
linux = {
    os: ("memfd_create", "eventfd", "pidfd_open", "sched_getaffinity", "posix_fallocate"),
    mmap: ("MAP_POPULATE", "MAP_NORESERVE", "MAP_STACK"),
    socket: ("SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK", "MSG_CMSG_CLOEXEC"),
}
unix = {
    os: ("fork", "register_at_fork", "getuid", "geteuid", "getgid", "getgroups", "chown", "fchmod", "O_CLOEXEC"),
    mmap: ("PROT_READ", "PROT_WRITE", "MAP_SHARED", "MAP_PRIVATE", "MAP_ANONYMOUS"),
    socket: ("AF_UNIX", "SOCK_SEQPACKET", "SCM_RIGHTS", "CMSG_SPACE", "CMSG_LEN", "send_fds", "recv_fds", "socketpair"),
    signal: ("SIGKILL", "SIGHUP"),
}
gone = [linux] + ([unix] if PLATFORM == "win32" else [])
for module, names in ((m, n) for table in gone for m, n in table.items()):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
if PLATFORM == "win32":
    for name in ("fcntl", "grp", "pwd", "resource", "termios"):
        sys.modules[name] = None
sys.platform = PLATFORM

import vram

found = {}
for use in USES:
    try:
        eval(use)
    except BaseException as error:
        found[use] = f"{type(error).__name__}: {error}"
    else:
        found[use] = "worked"
print(json.dumps(found))
"""

USES = [
    'vram.empty((4,), "float32", device="host")',
    'vram.zeros((4,), "float32", device="host")',
    'vram.asarray(numpy.zeros(4), device="host")',
    'vram.publish("name", {"x": numpy.zeros(4)})',
    'vram.attach("name")',
    "vram.private_keeper().__enter__()",
    "vram.list_entries()",
]


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_use_on_another_system_says_so(system: str) -> None:
    code = f"PLATFORM = {system!r}; USES = {USES!r}\n{PRETEND}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert set(found) == set(USES)
    for use, message in found.items():
        assert message.startswith("UnsupportedError: "), f"{use}: {message}"
        assert "Linux" in message, f"{use}: {message}"
        assert system in message, f"{use}: {message}"


@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_import_on_another_system_works(system: str) -> None:
    code = (
        f"import sys; sys.platform = {system!r}; sys.modules['fcntl'] = None; import vram; vram.errors.UnsupportedError"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
