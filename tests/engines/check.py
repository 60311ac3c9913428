"""Run what can run of an engine, with its adapter in it, on this machine's CPU.

    python tests/engines/check.py kvcached --package CHECKOUT
    python tests/engines/check.py vllm
    python tests/engines/check.py sglang
    python tests/engines/check.py ray
    python tests/engines/check.py nixl

`package` is a checkout of kvcached's repository, without its dependencies. For it this Python needs torch, pytest,
pytest-asyncio, posix_ipc, wrapt and PyYAML.

The others are run as they are installed in this Python (``make test-adapters`` and ``make test-nodes`` make one for
each), in a network namespace with nothing but a loopback interface, since they listen on all that there are, and in a
namespace of processes, which ends all that were started. Without the right to make these (``unshare``) nothing is run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SECONDS = 900


def main() -> int:
    """Return 0 if all that ran passed, and something did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["kvcached", "nixl", "ray", "sglang", "vllm"])
    parser.add_argument("--package", type=Path)
    given = parser.parse_args()
    if given.engine != "kvcached":
        return alone(given.engine)
    if given.package is None:
        parser.error("--package is required")
    return kvcached(given.package.resolve())


def alone(engine: str) -> int:
    """Run the tests of an engine where there is no network but loopback, and no process but theirs."""
    namespace = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--pid", "--fork", "--kill-child"]
    namespace += ["--mount-proc", "--map-root-user"]
    can = subprocess.run([*namespace, "true"], capture_output=True, text=True, check=False, timeout=SECONDS)
    if can.returncode:
        print(f"check {engine}: nothing was run: namespaces cannot be made here: {can.stderr.strip()}")
        return 1
    options = [f"--rootdir={HERE}", f"--confcutdir={HERE}", "-c", os.devnull]
    code = (
        "import fcntl, os, socket, struct, sys\n"
        "with socket.socket() as s:\n"
        "    fcntl.ioctl(s, 0x8914, struct.pack('16sh', b'lo', 0x41))  # SIOCSIFFLAGS: up and running\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'pytest', *sys.argv[1:]])\n"
    )
    command = [sys.executable, "-c", code, "-q", "-ra", "-p", "no:cacheprovider", *options]
    command += sorted(HERE.glob(f"check_{engine}*.py"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [HERE, HERE.parent, ROOT / "src"]))}
    return subprocess.run([*namespace, *command], cwd=HERE, env=environment, check=False, timeout=SECONDS).returncode


def kvcached(checkout: Path) -> int:
    """Run kvcached's CPU tests unchanged, with our ``vmm_ops`` where its compiled one would be."""
    files = (checkout / "tests/manifests/cpu.txt").read_text().split()
    passed = 0
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, "kvcached")
        left_out = shutil.ignore_patterns(".git", "assets", "docs", "build")
        shutil.copytree(checkout, copy, ignore=left_out, symlinks=True)
        (copy / "kvcached/vmm_ops.py").write_text("from vram.engines.kvcached import *  # noqa: F403\n")
        for file in files:  # each alone: some put another module in the place of this one, and leave it there
            status, output = pytest([copy / file], copy, [copy], [])
            found = re.search(r"(\d+) passed", output[-200:])
            passed += int(found[1]) if found else 0
            if status:
                failed.append(file)
    print(f"kvcached's CPU tests: {passed} passed, in {len(files) - len(failed)} of {len(files)} files")
    print("\n".join(f"failed: {file}" for file in failed))
    return 1 if failed or not passed else 0


def pytest(files: list[Path], root: Path, paths: list[Path], options: list[str]) -> tuple[int, str]:
    """Run pytest on files in a process of its own, and return its status and output."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={root}", *options, *files],
        cwd=root, env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT / "src"]))},
        capture_output=True, text=True, check=False, timeout=SECONDS,
    )  # fmt: skip
    print(done.stdout + done.stderr if done.returncode else done.stdout.strip()[-300:], flush=True)
    return done.returncode, done.stdout


if __name__ == "__main__":
    sys.exit(main())
