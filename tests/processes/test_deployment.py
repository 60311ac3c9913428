"""What is in deploy/: its files are ones that Docker, Compose and Kubernetes understand, and what they stand on is run.

A keeper in one container and its clients in others, as far as the kernel makes containers: namespaces of their own for
everything, no capability, and in common nothing but the directory of the socket.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON
from tests.support.deployments import APART, impossible
from tests.support.places import short_directory
from tests.support.samples import in_turns

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = Path(sys.executable).parent
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def checked(program: str, *arguments: str | Path) -> None:
    """Have a program look at something; skip where it is not installed."""
    found = shutil.which(program, path=f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"there is no {program}")
    done = subprocess.run([found, *map(str, arguments)], capture_output=True, text=True, timeout=SOON, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_dockerfile_is_one_that_hadolint_finds_nothing_in() -> None:
    checked("hadolint", DEPLOY / "Dockerfile")


def test_the_compose_file_is_of_its_specification() -> None:
    checked("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_the_manifests_are_of_kubernetes_schemas(manifest: Path) -> None:
    checked("kubernetes-validate", "--strict", manifest)


@in_turns(5)
def test_what_the_files_start_has_the_options_that_they_give() -> None:
    """Also those of systemd: a command that was renamed would be found by whoever deploys it."""
    seen = set()
    for file in (*DEPLOY.glob("*"), *DEPLOY.glob("kubernetes/*"), *DEPLOY.glob("systemd/*/*.service")):
        if not file.is_file():
            continue
        for text in re.findall(r'"vram", ("[^\]]*")\]|bin/vram ([^\n&]*)', file.read_text()):
            words = re.sub(r'[",]', " ", "".join(text)).split()
            seen.add((words[0], *(word for word in words if word.startswith("--"))))
    assert {command for command, *_ in seen} >= {"keep", "metrics", "doctor", "ls"}
    for command in {command for command, *_ in seen}:
        environment = {**os.environ, "COLUMNS": "200"}
        done = subprocess.run(
            [SCRIPTS / "vram", command, "--help"], env=environment, capture_output=True, text=True, timeout=SOON
        )
        assert done.returncode == 0, done.stderr
        for other, *options in seen:
            for option in options if other == command else ():
                assert f"{option} " in done.stdout, (command, option)


def test_what_is_copied_into_the_image_is_there() -> None:
    for words in re.findall(r"^COPY (?!--)(.*) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE):
        for word in words.split():
            assert (ROOT / word).exists()
            assert f"!{word}\n" in (DEPLOY / "Dockerfile.dockerignore").read_text()


# -- containers -------------------------------------------------------------------------------------------------------

# In a mount namespace of its own. What a container would not see is covered, but for where this interpreter is; at
# /mnt/vram is the one thing that is shared. Then all rights to do so are given up.
ENTER = """
set -e
mount -t tmpfs tmpfs /mnt
mkdir /mnt/vram
mount --bind "$1" /mnt/vram
[ "$2" = rw ] || mount -o remount,bind,ro /mnt/vram
shift 2
while [ "$1" != -- ]; do mount -t tmpfs tmpfs "$1"; shift; done
shift
exec setpriv --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""
WHERE = """
import json, os
print(json.dumps({
    "namespaces": [os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "pid", "net", "mnt", "ipc")],
    "shm": os.listdir("/dev/shm"), "pid": os.getpid(),
    "capabilities": [line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapBnd"))],
}), flush=True)
"""
PUBLISHES = WHERE + "import numpy, vram; vram.publish('ones', {'w': numpy.ones(1 << 20, 'float32')})"
READS = (
    WHERE
    + "import sys, vram\nwith vram.attach('ones', timeout=60) as lease:\n"
    + ("    for line in sys.stdin: print(float(lease['w'].to_host().sum()), flush=True)")
)


class Containers:
    """Starts containers that share one directory."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.path = "/mnt/vram/keeper.sock"
        here = (sys.executable, os.path.realpath(sys.executable), str(ROOT), *sys.path)
        covered = ["/tmp", "/var/tmp", "/dev/shm", "/run", "/home"]
        self._covered = [one for one in covered if not any(f"{path}/".startswith(f"{one}/") for path in here)]
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *command: str, writable: bool = False) -> subprocess.Popen[str]:
        """Run a command in one."""
        access = "rw" if writable else "ro"
        process = subprocess.Popen(
            ["unshare", *APART, "sh", "-c", ENTER, "sh", self.directory, access, *self._covered, "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "VRAM_KEEPER": self.path},
            cwd="/",
        )
        self._running.append(process)
        return process

    def keep(self, *options: str) -> subprocess.Popen[str]:
        """Run a keeper in one, and return when it serves."""
        keeper = self.start(str(SCRIPTS / "vram"), "keep", "--mode", "0660", *options, writable=True)
        assert keeper.stdout is not None
        line = keeper.stdout.readline()
        while line and "serving at" not in line:
            line = keeper.stdout.readline()
        assert "serving at" in line, keeper.communicate()[1]
        return keeper

    def end(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()


@pytest.fixture
def containers() -> Iterator[Containers]:
    why = impossible()
    if why:
        pytest.skip(why)
    with short_directory() as directory:
        made = Containers(directory)
        try:
            yield made
        finally:
            made.end()


@in_turns(5)
def test_containers_share_a_keeper_by_the_directory_of_its_socket_alone(containers: Containers) -> None:
    keeper = containers.keep()
    publisher = containers.start(sys.executable, "-c", PUBLISHES)
    said, error = publisher.communicate(timeout=SOON)
    assert publisher.returncode == 0, error
    one = json.loads(said)

    reader = containers.start(sys.executable, "-c", READS)
    assert reader.stdin is not None
    assert reader.stdout is not None
    other = json.loads(reader.stdout.readline())
    assert not set(one["namespaces"]) & set(other["namespaces"])
    for where in (one, other):
        assert where["pid"] == 1
        assert where["shm"] == [] or "/dev/shm" not in containers._covered
        assert {int(mask, 16) for mask in where["capabilities"]} == {0}

    def read() -> str:
        reader.stdin.write("\n")
        reader.stdin.flush()
        return reader.stdout.readline()

    assert float(read()) == 1 << 20  # its publisher is gone

    # An upgrade: a keeper in another container takes over, and nobody notices.
    successor = containers.keep("--takeover")
    keeper.communicate(timeout=SOON)
    assert keeper.returncode == 0
    assert float(read()) == 1 << 20
    later = containers.start(sys.executable, "-c", READS)
    said, error = later.communicate("\n", timeout=SOON)
    assert said.splitlines()[1:] == [f"{float(1 << 20)}"], error

    # And the end: readers have what they mapped.
    successor.kill()
    successor.communicate(timeout=SOON)
    assert float(read()) == 1 << 20
    reader.communicate(timeout=SOON)


# -- who pays ---------------------------------------------------------------------------------------------------------
MIB = 1 << 20
JOIN = """
import os, sys
if sys.argv[1]:
    open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
import numpy, vram
"""
FILLS = JOIN + "vram.publish(sys.argv[2], {'w': numpy.ones(int(sys.argv[3]), 'uint8')})"
TOUCHES = JOIN + "assert vram.attach(sys.argv[2])['w'].numpy().sum() == int(sys.argv[3])"


class Group:
    """A control group for memory, of either version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._is_v2 = (path / "memory.current").exists()

    def used(self) -> int:
        name = "memory.current" if self._is_v2 else "memory.usage_in_bytes"
        return int((self.path / name).read_text())

    def limit(self, nbytes: int) -> None:
        (self.path / ("memory.max" if self._is_v2 else "memory.limit_in_bytes")).write_text(str(nbytes))


def memory_groups() -> Path | None:
    """Where control groups for memory can be made."""
    for place in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        trial = Path(place, f"vram-trial-{os.getpid()}")
        with contextlib.suppress(OSError):
            trial.mkdir()
            try:
                if any((trial / name).exists() for name in ("memory.current", "memory.usage_in_bytes")):
                    return Path(place)
            finally:
                trial.rmdir()
    return None


@pytest.fixture
def pod() -> Iterator[Group]:
    """A group with groups in it, as a pod is."""
    place = memory_groups()
    if place is None:
        pytest.skip("needs a control group for memory that it may make")
    made = Group(place / f"vram-pod-{os.getpid()}")
    with contextlib.suppress(OSError):  # version 2: those in it get what it has
        (made.path / "cgroup.subtree_control").write_text("+memory")
    yield made
    deadline = time.monotonic() + SOON
    for path in (*made.path.glob("*/"), made.path):
        while path.exists():
            try:
                path.rmdir()
            except OSError:  # who was in it is being reaped
                assert time.monotonic() < deadline
                time.sleep(0.01)


def ran(program: str, group: Group | None, name: str, nbytes: int) -> subprocess.CompletedProcess[str]:
    arguments = [str(group.path) if group else "", name, str(nbytes)]
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=SOON, check=False
    )


@in_turns(5)
def test_memory_is_charged_to_who_first_touched_it_and_stays_so(pod: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """What docs/operations.md says of who pays, asked of the kernel."""
    from tests.support.places import private_socket

    import vram
    from vram.keeper.client import close_client

    with private_socket() as path:
        monkeypatch.setenv("VRAM_KEEPER", path)
        first, reader = Group(pod.path / "publisher"), Group(pod.path / "reader")
        done = ran(FILLS, first, "kept", 64 * MIB)
        assert done.returncode == 0, done.stderr
        assert first.used() >= 64 * MIB  # its process is gone
        assert ran(TOUCHES, reader, "kept", 64 * MIB).returncode == 0
        assert reader.used() < 48 * MIB  # who only reads does not pay

        # The container is gone: what it paid for is its pod's, which has so much less for the next one.
        deadline = time.monotonic() + SOON
        while first.path.exists():
            try:
                first.path.rmdir()
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert pod.used() >= 64 * MIB
        assert ran(TOUCHES, None, "kept", 64 * MIB).returncode == 0

        # At its limit, its next program is refused or killed, and neither the keeper nor what is kept is touched.
        pod.limit(128 * MIB)
        second = Group(pod.path / "second")
        done = ran(FILLS, second, "more", 96 * MIB)
        assert done.returncode == -9 or "OutOfMemoryError" in done.stderr, done.stderr
        assert [entry.name for entry in vram.list_entries()] == ["kept"]
        assert ran(TOUCHES, None, "kept", 64 * MIB).returncode == 0

        vram.remove("kept")  # and only this frees it
        deadline = time.monotonic() + SOON
        while pod.used() >= 64 * MIB:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        close_client(path)


HOLES = JOIN + "vram.publish(sys.argv[2], {'w': vram.zeros(int(sys.argv[3]), dtype='uint8', device='host')})"
SUMS = JOIN + "assert vram.attach(sys.argv[2])['w'].numpy().sum() == 0"
CREEPS = JOIN + (
    "made = [vram.zeros(int(sys.argv[3]), dtype='uint8', device='host') for _ in range(2)]\n"
    "vram.publish(sys.argv[2], {'w': made[0]}, writable=True)\n"
    "print('published', flush=True)\n"
    "for one in made: one.numpy()[...] = 1"
)


@in_turns(5)
def test_who_is_killed_at_its_limit_leaves_keeper_and_holder_alone(pod: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry larger than the group may have is refused before it is made; of one that is filled after it was given to
    the keeper only its publisher dies, and what it has filled is freed when it is removed."""
    import vram
    from vram.keeper.client import close_client
    from vram.keeper.private import KeeperProcess

    with short_directory() as place:
        keeper = KeeperProcess(f"{place}/k", ["--survive"])
        try:
            monkeypatch.setenv("VRAM_KEEPER", keeper.path)
            small, reader = Group(pod.path / "small"), Group(pod.path / "reader")
            small.limit(128 * MIB)
            before = vram.statistics().pid
            done = ran(HOLES, small, "large", 192 * MIB)
            assert "OutOfMemoryError" in done.stderr, done
            done = ran(CREEPS, small, "half", 96 * MIB)
            assert (done.returncode, done.stdout) == (-9, "published\n"), done
            assert vram.statistics().pid == before
            assert keeper.process.poll() is None
            assert ran(SUMS.replace("== 0", "> 0"), None, "half", 96 * MIB).returncode == 0
            vram.remove("half")
            deadline = time.monotonic() + SOON
            while small.used() >= 64 * MIB:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            # Pages that their publisher never touched are charged to who reads them.
            assert ran(HOLES, None, "holes", 96 * MIB).returncode == 0
            reader.limit(80 * MIB)
            assert ran(SUMS, reader, "holes", 96 * MIB).returncode == -9
            assert vram.statistics().pid == before
            close_client(keeper.path)
            assert keeper.stop() == 0
        finally:
            keeper.kill()
