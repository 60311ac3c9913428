"""A keeper under systemd, which the test plays: it hears what it is told (NOTIFY_SOCKET). What systemd has programs for
is asked of those: its units, and a user manager that runs them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON, until
from tests.support.places import short_directory
from tests.support.samples import in_turns

import vram
from vram.keeper.client import close_client
from vram.keeper.private import KeeperProcess
from vram.keeper.service_manager import ServiceManager

SCRIPTS = Path(sys.executable).parent
UNITS = Path(__file__).resolve().parents[2] / "deploy/systemd"
# As systemd does it: with the pid of the process that is executed.
START = """
import os, sys
group = os.environ.pop("TEST_CGROUP", "")
if group:
    open(group + "/cgroup.procs", "w").write(str(os.getpid()))
os.execvp(sys.argv[1], sys.argv[1:])
"""
KEEPER = (sys.executable, "-P", "-m", "vram.keeper")


class Systemd:
    """Starts keepers, and hears what they say."""

    def __init__(self, directory: str, *, notify: str = "") -> None:
        self.path = f"{directory}/keeper.sock"
        self.notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.address = notify or f"{directory}/notify"
        self.notified.bind("\0" + self.address[1:] if self.address[0] == "@" else self.address)
        self.notified.settimeout(SOON)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *options: str, command: tuple[str, ...] = KEEPER, **said: str) -> subprocess.Popen[str]:
        """Start the service, or a successor in it."""
        process = subprocess.Popen(
            [sys.executable, "-c", START, *command, *options, "--socket", self.path],
            env={**os.environ, "NOTIFY_SOCKET": self.address, **said},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def hear(self) -> dict[str, str]:
        """Return what is said next."""
        return dict(line.split("=", 1) for line in self.notified.recv(4096).decode().splitlines())

    def hear_ready(self) -> None:
        """The keeper serves; that it is the process that was started needs no words."""
        assert self.hear() == {"READY": "1", "STATUS": f"serving at {self.path}"}

    def end(self, process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str]:
        """Stop a process; return its status and what it said of mistakes."""
        process.send_signal(number)
        _, said = process.communicate(timeout=SOON)
        return process.returncode, said


@pytest.fixture
def directory() -> Iterator[str]:
    with short_directory() as made:
        yield made


@pytest.fixture
def systemd(directory: str) -> Iterator[Systemd]:
    with playing(directory) as made:
        yield made


@contextlib.contextmanager
def playing(directory: str, *, notify: str = "") -> Iterator[Systemd]:
    made = Systemd(directory, notify=notify)
    try:
        yield made
    finally:
        for process in made.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what it started and has left
            process.communicate(timeout=SOON)
        close_client(made.path)
        made.notified.close()


def publish(path: str, name: str) -> None:
    with vram.zeros(64, "int64", device="host") as array:
        array.numpy()[:] = 1
        vram.publish(name, {"a": array}, keeper=path)


def test_a_keeper_says_that_it_serves_and_that_it_ends(systemd: Systemd) -> None:
    process = systemd.start("keep", command=(str(SCRIPTS / "vram"),))
    systemd.hear_ready()
    publish(systemd.path, "kept")
    assert systemd.end(process) == (0, "")
    assert systemd.hear() == {"STOPPING": "1"}
    assert not os.path.exists(systemd.path)


@pytest.mark.parametrize("background", [False, True])
def test_a_successor_is_told_to_the_manager_before_its_predecessor_ends(systemd: Systemd, background: bool) -> None:
    """`systemctl reload`: the service stays the same one, and its entries too."""
    first = systemd.start("--survive")
    systemd.hear_ready()
    publish(systemd.path, "kept")
    options = ["keep", "--takeover", *(["--background"] if background else [])]
    second = systemd.start(*options, command=(str(SCRIPTS / "vram"),))
    said: list[dict[str, str]] = []
    while not any({"READY", "MAINPID"} <= one.keys() for one in said):
        said.append(systemd.hear())
    successor = int(said[-1]["MAINPID"])
    assert said[0]["RELOADING"] == "1"
    assert int(said[0]["MONOTONIC_USEC"]) > 0
    assert "STOPPING" not in {name for one in said for name in one}
    first.communicate(timeout=SOON)
    assert first.returncode == 0
    assert is_guardian_of(successor, keeper_of(systemd.path))
    assert vram.entry("kept", keeper=systemd.path).version == 1
    if background:
        assert second.wait(SOON) == 0  # it only waited until the successor served
        os.kill(successor, signal.SIGTERM)
        until(lambda: not os.path.exists(f"/proc/{successor}"), what="its end")
    else:
        assert successor == second.pid
        assert systemd.end(second)[0] == 0


def is_guardian_of(pid: int, keeper: int) -> bool:
    return Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1] == str(pid)


def keeper_of(path: str) -> int:
    return vram.statistics(keeper=path).pid


def test_a_keeper_of_a_service_that_is_killed_is_followed_in_the_service(systemd: Systemd) -> None:
    first = systemd.start("keep", "--survive", command=(str(SCRIPTS / "vram"),))
    systemd.hear_ready()
    publish(systemd.path, "kept")
    for _ in range(2):
        keeper = keeper_of(systemd.path)
        assert is_guardian_of(first.pid, keeper)
        os.kill(keeper, signal.SIGKILL)
        assert vram.entry("kept", keeper=systemd.path).version == 1
    said = [systemd.hear() for _ in range(2)]
    assert {"READY": "1", "STATUS": f"serving at {systemd.path}"} in said
    assert not any("MAINPID" in one for one in said)  # it is what systemd started
    assert systemd.end(first)[0] == 0


@in_turns(5)
@pytest.mark.parametrize("killed", [False, True])
def test_a_manager_watches_the_guardian_and_not_the_keeper(systemd: Systemd, killed: bool) -> None:
    """Of a successor, and where the guardian was killed: else each end of a keeper would be that of the service."""

    def heard_until(pid: int) -> str:
        told = 0
        while told != pid:
            told = int(systemd.hear().get("MAINPID", told))
        command = Path(f"/proc/{pid}/cmdline")
        until(command.read_text, what="its command line")
        return command.read_text()

    first = systemd.start("--survive")
    systemd.hear_ready()
    publish(systemd.path, "kept")
    if killed:
        keeper = keeper_of(systemd.path)
        first.kill()
        children = Path(f"/proc/{keeper}/task/{keeper}/children")
        until(lambda: children.read_text().strip(), what="another guardian")
        assert "guardian.py" in heard_until(int(children.read_text()))
        # It is said before that guardian has all; what the keeper answers next comes after that.
        assert vram.entry("kept", keeper=systemd.path).version == 1
        os.kill(keeper, signal.SIGKILL)
        assert vram.entry("kept", keeper=systemd.path).version == 1
    second = systemd.start("--takeover", "--survive")
    assert "guardian.py" in heard_until(second.pid)
    until(lambda: first.poll() is not None, what="the end of the one before")
    last = {"MAINPID": str(second.pid)}
    systemd.notified.settimeout(0.0)
    with contextlib.suppress(BlockingIOError):  # whoever says it last
        while True:
            last.update((name, value) for name, value in systemd.hear().items() if name == "MAINPID")
    systemd.notified.settimeout(SOON)
    assert last == {"MAINPID": str(second.pid)}
    os.kill(keeper_of(systemd.path), signal.SIGKILL)
    assert vram.entry("kept", keeper=systemd.path).version == 1
    assert systemd.end(second)[0] == 0


@pytest.fixture
def other_group() -> Iterator[str]:
    """A control group, for a process that is not of the service."""
    for place in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup"):
        group = Path(place, f"vram-test-{os.getpid()}")
        if os.path.exists(f"{place}/cgroup.procs"):
            with contextlib.suppress(OSError):
                group.mkdir()
                break
    else:
        pytest.skip("needs a control group that it may make")
    yield str(group)
    deadline = time.monotonic() + SOON
    while True:
        try:
            for below in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                below.rmdir()
            return group.rmdir()
        except OSError:  # who was in it is being reaped
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_who_is_outside_of_the_service_does_not_take_it_over(systemd: Systemd, other_group: str) -> None:
    """systemd would take the keeper for dead, and start another one."""
    first = systemd.start("--survive")
    systemd.hear_ready()
    publish(systemd.path, "kept")
    stranger = systemd.start("--takeover", TEST_CGROUP=other_group)
    _, said = stranger.communicate(timeout=SOON)
    assert stranger.returncode == 1
    assert "systemctl reload vram-keeper" in said
    assert vram.entry("kept", keeper=systemd.path).version == 1
    assert first.poll() is None


def test_a_keeper_of_a_program_says_nothing_of_that_program(
    systemd: Systemd, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the program that is the service."""
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.address)
    keeper = KeeperProcess(f"{directory}/own.sock")
    assert keeper.stop() == 0
    systemd.notified.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        systemd.hear()


def test_a_manager_at_an_abstract_name(directory: str) -> None:
    with playing(directory, notify=f"@vram-test-{os.getpid()}") as systemd:
        process = systemd.start()
        systemd.hear_ready()
        assert systemd.end(process)[0] == 0


def test_a_manager_that_is_gone_or_unknown_is_no_trouble(tmp_path: Path) -> None:
    for address in (None, "", "vsock:2:1", "relative", f"{tmp_path}/nobody", "@" + "x" * 200):
        manager = ServiceManager(address)
        manager.tell(READY=1, STATUS="here")
        assert bool(manager) == (address is not None and address[:1] in ("/", "@") and address != "")


# -- what systemd has programs for ------------------------------------------------------------------------------------
def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    return subprocess.run(
        ["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=SOON, check=False
    )


@pytest.mark.parametrize("place", ["system", "user"])
def test_the_units_are_ones_that_systemd_understands(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for unit in (UNITS / place).glob("*.s*e*"):
        text = unit.read_text()
        for installed in ("/opt/vram/bin/vram", "%h/.local/share/vram/bin/vram"):
            text = text.replace(installed, str(SCRIPTS / "vram"))
        (tmp_path / unit.name).write_text(text)
    units = sorted(tmp_path.glob("vram-*"))
    assert {unit.suffix for unit in units} == {".service"}
    found = analyze("verify", "--man=no", *(["--user"] if place == "user" else []), *units)
    if "Failed to initialize manager" in found.stderr or "Failed to set up manager" in found.stderr:
        pytest.skip("systemd-analyze needs a place that is not here")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@pytest.mark.parametrize(("unit", "most"), [("vram-keeper.service", 10), ("vram-exporter.service", 15)])
def test_the_units_give_up_what_they_do_not_need(unit: str, most: int) -> None:
    """Ten times the exposure, of 100, that `systemd-analyze security` counts."""
    found = analyze("security", "--offline=true", f"--threshold={most}", UNITS / "system" / unit)
    if "unrecognized option" in found.stderr or "Unknown" in found.stderr:
        pytest.skip("systemd-analyze is too old to look at a unit that is not installed")
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr


# -- a systemd that runs ----------------------------------------------------------------------------------------------
MANAGER = "/lib/systemd/systemd"
# A user manager in namespaces of its own, with a control group of its own, and nothing but our units.
BOOT = """
umount -R /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup && mount -t tmpfs tmpfs /run || exit 77
mkdir -p /run/systemd/system /run/user /run/home/systemd
cp -r "$1" /run/home/systemd/user
export XDG_RUNTIME_DIR=/run/user HOME=/run/home XDG_CONFIG_HOME=/run/home VRAM_KEEPER=/run/user/vram/keeper.sock
unset DBUS_SESSION_BUS_ADDRESS NOTIFY_SOCKET
"$2" --user --log-target=console >/run/said 2>&1 &
"$3" -c "$4" || { status=$?; cat /run/said; exit $status; }
"""
OPERATE = """
import contextlib, os, resource, signal, subprocess, sys, time
import numpy, vram
from vram.errors import NotFoundError, VramError
from tests.support.deadlines import until
UNIT = "vram-keeper.service"
DROP_INS = f"/run/home/systemd/user/{UNIT}.d"

def ctl(*words):
    return subprocess.run(["systemctl", "--user", *words], capture_output=True, text=True, timeout=60)

def main_pid():
    return int(ctl("show", "-p", "MainPID", "--value", UNIT).stdout)

def killed(pid):
    os.kill(pid, signal.SIGKILL)

def keeper():
    return vram.statistics().pid

def options(words):
    os.makedirs(DROP_INS, exist_ok=True)
    with open(f"{DROP_INS}/options.conf", "w") as file:
        print("[Service]", f'Environment="VRAM_KEEP_OPTIONS={words}"', "LimitNOFILE=2000", sep="\\n", file=file)
    assert ctl("daemon-reload").returncode == 0

def most_entries():
    return next(limit.most for limit in vram.statistics().limits if limit.name == "entries")

def is_kept():
    assert vram.entry("kept").version == 1
    until(lambda: ctl("is-active", UNIT).stdout == "active\\n", what="a service that runs")  # and reloads no more
    assert vram.entry("kept").version == 1

until(lambda: os.path.exists("/run/user/systemd/private") and ctl("is-system-running").stdout, what="a manager")
assert ctl("start", UNIT).returncode == 0  # which returns once it serves
vram.publish("kept", {"w": numpy.ones(1000)})
guardian = main_pid()
print("a keeper is killed", flush=True)
before = keeper()
killed(before)
is_kept()
assert (keeper() != before, main_pid()) == (True, guardian)
print("its guardian is killed", flush=True)
before = keeper()
os.kill(before, signal.SIGSTOP)
killed(guardian)
until(lambda: main_pid() == 0, what="a manager that has seen it")  # before it hears of another one
os.kill(before, signal.SIGCONT)
until(lambda: main_pid() not in (0, guardian), what="another main process")
is_kept()
killed(keeper())
is_kept()
print("reload", flush=True)
before = main_pid()
done = ctl("reload", UNIT)
assert done.returncode == 0, done
until(lambda: main_pid() != before, what="a successor")
until(lambda: not os.path.exists(f"/proc/{before}"), what="the end of the one before")
is_kept()
killed(keeper())
is_kept()
before = main_pid()
killed(before)
until(lambda: main_pid() not in (0, before), what="another main process")
is_kept()
print("options", flush=True)
options("--max-entries 7")
for _ in range(2):
    before = keeper()
    done = ctl("reload", UNIT)
    assert done.returncode == 0, done
    assert keeper() != before  # at once: the reload waits for it
    before = keeper()
    is_kept()
    assert (most_entries(), resource.prlimit(before, resource.RLIMIT_NOFILE)[1]) == (7, 2000)
options("--max-entries 8 --group there-is-no-such-group")
before = keeper()
assert ctl("reload", UNIT).returncode != 0
assert (keeper(), most_entries()) == (before, 7)
is_kept()
options("--max-entries 9")
assert ctl("reload", UNIT).returncode == 0
assert most_entries() == 9
is_kept()
print("both are killed", flush=True)
before, other = main_pid(), keeper()
os.kill(before, signal.SIGSTOP)
killed(other)
killed(before)
until(lambda: main_pid() not in (0, before), what="a service that was started anew")

def is_lost():
    with contextlib.suppress(VramError):  # whoever is connected to the one that died hears that first
        return not vram.list_entries()

until(is_lost, what="a keeper that has nothing")
print("stop", flush=True)
assert ctl("show", "-p", "NRestarts", "--value", UNIT).stdout in ("0\\n", "1\\n")  # of both, and of nothing else
assert ctl("stop", UNIT).returncode == 0
assert ctl("is-active", UNIT).stdout == "inactive\\n"
print("done", flush=True)
"""
JOIN = """
echo $$ >"$0/cgroup.procs"
exec unshare --cgroup --mount --pid --fork --kill-child --mount-proc --ipc sh -c "$@"
"""


@in_turns(5)
def test_systemd_runs_the_units_and_a_keeper_that_is_killed_ends_no_service(tmp_path: Path, other_group: str) -> None:
    if not os.path.exists(MANAGER) or not os.path.exists(f"{other_group}/cgroup.type"):
        pytest.skip("no user manager of systemd can run here")
    units = tmp_path / "units"
    units.mkdir()
    for unit in (UNITS / "user").iterdir():
        text = unit.read_text().replace("%h/.local/share/vram/bin/vram", str(SCRIPTS / "vram"))
        passed = [f"Environment={name}={os.environ[name]}" for name in ("PYTHONPATH",) if name in os.environ]
        (units / unit.name).write_text(text.replace("[Service]", "\n".join(["[Service]", *passed])))
    command = ["sh", "-c", JOIN, other_group, BOOT, "sh", str(units), MANAGER, sys.executable, OPERATE]
    here, null = Path(__file__).parents[2], subprocess.DEVNULL
    done = subprocess.run(command, cwd=here, stdin=null, capture_output=True, text=True, timeout=2 * SOON)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no user manager of systemd can run here")
    assert done.stdout.endswith("done\n"), done.stdout[-5000:] + done.stderr[-5000:]
    assert done.returncode == 0
