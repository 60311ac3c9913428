"""Entries that survive a reboot: ``vram keep --persist`` saves them behind, and publishes them at the next start."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.children import child
from tests.support.deadlines import SOON, until
from tests.support.own_keeper import own_keeper
from tests.support.samples import in_turns
from tests.support.save_children import persist_and_die

import vram

OWN = f"~{os.geteuid()}/m.safetensors"


class Run:
    """A keeper with a folder; its block ends it."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        self._all = ""
        with open(os.memfd_create("log"), "w") as log:
            self._log = os.dup(log.fileno())
            command = [Path(sys.executable).with_name("vram"), "keep", "--persist", folder, *arguments]
            self.process = subprocess.Popen(
                [*map(str, command), "--log", "text"], stdout=log, stderr=log, start_new_session=True
            )
        self.says("vram.keeper.ready")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(SOON)
        self._all = self.said()
        os.close(self._log)

    def said(self) -> str:
        return self._all or os.pread(self._log, 1 << 20, 0).decode()

    def says(self, what: str) -> None:
        until(lambda: what in self.said() or self.process.poll() is not None, what=what)
        assert what in self.said()

    def kill(self) -> None:
        """End keeper and guardian, as the end of the machine does."""
        both = vram.statistics().pid, self.process.pid
        for number in (signal.SIGSTOP, signal.SIGKILL):  # neither has the time to start another one
            for pid in both:
                os.kill(pid, number)
        self.process.wait(SOON)


@pytest.fixture(autouse=True)
def place(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VRAM_KEEPER", place)


def publish(name: str, value: int = 1, **options: object) -> None:
    array = vram.zeros((300, 5), "float32", device="host")
    array.fill(value)
    vram.publish(name, {"x": array, "tied": array}, meta={"of": name}, **options)  # type: ignore[arg-type]


def check(name: str, value: int = 1) -> None:
    with vram.attach(name) as lease:
        assert (lease.meta, set(lease)) == ({"of": name}, {"x", "tied"})
        assert lease["x"].address == lease["tied"].address
        assert (lease["x"].to_host() == np.full((300, 5), value, np.float32)).all()


def names() -> set[str]:
    return {entry.name for entry in vram.list_entries()}


@in_turns(3)
def test_all_is_there_after_keeper_and_guardian_were_killed(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with Run(disk) as first:
        for name in ("a", "a/b", "a/b/c", OWN, "removed"):
            publish(name)
        publish("short", ttl=3600.0)
        publish("written", writable=True)
        for name in ("a", "a/b", "a/b/c", OWN, "removed"):
            first.says(f"vram.disk.saved vram.entry.name={name}\n")
        vram.remove("removed")
        first.says("vram.disk.removed vram.entry.name=removed\n")
        publish("late")  # and all ends before it is saved
        first.kill()
    assert (disk.stat().st_mode & 0o777, (disk / "a").stat().st_mode & 0o777) == (0o700, 0o700)
    files = {file: file.stat().st_mtime_ns for file in disk.rglob("model*")}
    for stranger in ("broken", "stranger"):
        (disk / stranger).mkdir()
    (disk / "broken" / "saved.json").write_bytes(b'{"version": 3}')
    (disk / "torn").mkdir()
    (disk / "torn" / "saved.json").touch()
    (disk / "broken" / "model.safetensors").write_bytes(b"\xff" * 100)
    (disk / "stranger" / "model.safetensors").write_bytes(b"mine")
    with Run(disk) as second:
        assert names() == {"a", "a/b", "a/b/c", OWN}, "what it says it serves is there"
        assert second.said().count("vram.disk.restored ") == 4
        for name in ("broken", "torn"):
            assert second.said().count(f"vram.disk.not_restored vram.entry.name={name} ") == 1
        for name in ("a", "a/b", "a/b/c", OWN):
            check(name)
        publish("broken", 7)
        publish("stranger", 7)
        second.says("vram.disk.saved vram.entry.name=broken\n")
        second.says("vram.disk.not_saved vram.entry.name=stranger ")
    kept = {file: file.stat().st_mtime_ns for file in disk.rglob("model*")}
    assert files.items() <= kept.items(), "the end of a keeper removes nothing, and what is saved is not saved again"
    assert (disk / "stranger" / "model.safetensors").read_bytes() == b"mine"


def test_an_orderly_end_saves_the_last_bytes(tmp_path: Path) -> None:
    with Run(tmp_path, "--persist-prefix", "u"):
        publish("u/updated", updatable=True)
        with vram.update("u/updated", timeout=SOON) as arrays:
            arrays["x"].fill(2)
        publish("u/replaced")
        publish("u/replaced", 3)
        publish("other")
    assert sorted(os.listdir(tmp_path)) == [",keeper", ",program", "u,replaced", "u,updated"]
    with Run(tmp_path) as again:
        check("u/updated", 2)
        check("u/replaced", 3)
        vram.remove("u/updated")
    assert again.process.returncode == 0
    assert sorted(os.listdir(tmp_path)) == [",keeper", ",program", "u,replaced"]


def test_a_signal_to_all_processes_at_once_is_one_signal(tmp_path: Path) -> None:
    with Run(tmp_path) as first:
        for number in range(100):  # which takes longer to save than the second until a save begins by itself
            publish(f"e/{number}")
        os.killpg(first.process.pid, signal.SIGINT)  # as a terminal does, and a service manager
        first.process.wait(SOON)
    assert len(list(tmp_path.glob("e,*/saved.json"))) == 100


@in_turns(3)
def test_what_changes_all_the_time_is_saved_as_well(tmp_path: Path) -> None:
    with Run(tmp_path) as first:
        publish("updated", updatable=True)
        publish("replaced")
        saved = [f"vram.disk.saved vram.entry.name={name}\n" for name in ("updated", "replaced")]

        def change() -> bool:
            with vram.update("updated", timeout=SOON) as arrays:
                arrays["x"].fill(2)
            publish("replaced", 2)
            return all(one in first.said() for one in saved)

        until(change, what="a save of each")
        first.kill()
    with Run(tmp_path):
        assert names() == {"updated", "replaced"}


@in_turns(3)
def test_two_keepers_have_a_folder_each_and_another_prefix_touches_nothing(tmp_path: Path) -> None:
    with Run(tmp_path) as first:
        publish("a")
        publish("b/c")
        for name in ("a", "b/c"):
            first.says(f"vram.disk.saved vram.entry.name={name}\n")
        command = [Path(sys.executable).with_name("vram"), *f"keep --persist {tmp_path} --socket {tmp_path}/it".split()]
        second = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=SOON, check=False)
        assert (second.returncode, "another keeper saves in" in second.stderr) == (1, True)
    with Run(tmp_path, "--persist-prefix", "b/") as third:
        assert names() == {"b/c"}
        before = vram.statistics().pid
        os.kill(before, signal.SIGKILL)
        until(lambda: vram.statistics().pid != before, what="the next keeper")
        vram.remove("b/c")
        third.says("vram.disk.removed vram.entry.name=b/c\n")
    with Run(tmp_path):
        assert names() == {"a"}


@in_turns(3)
def test_what_was_removed_does_not_come_back_with_the_next_keeper(tmp_path: Path) -> None:
    with Run(tmp_path) as first:
        for name in ("stays", "goes", "moved"):
            publish(name)
            first.says(f"vram.disk.saved vram.entry.name={name}\n")
        (tmp_path / "moved" / "model.safetensors").unlink()
        before = vram.statistics().pid
        vram.remove("goes")
        os.kill(before, signal.SIGKILL)  # before the removal reached the folder
        until(lambda: vram.statistics().pid != before, what="the next keeper")
        first.says("vram.disk.removed vram.entry.name=goes\n")
        until(lambda: (tmp_path / "moved" / "model.safetensors").exists(), what="what was missing, saved again")
        with subprocess.Popen([Path(sys.executable).with_name("vram"), "keep", "--takeover"]) as other:
            first.process.wait(SOON)
            publish("new")
            other.terminate()  # the folder is that of the keeper before
        assert sorted(os.listdir(tmp_path)) == [",keeper", ",program", "moved", "new", "stays"]
        assert first.said().count("vram.disk.saved vram.entry.name=stays\n") == 1


@in_turns(3)
def test_a_keeper_that_goes_on_does_not_end_for_its_folder(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with Run(disk) as first:
        publish("a")
        first.says("vram.disk.saved vram.entry.name=a\n")
        disk.chmod(0o777)
        before = vram.statistics().pid
        os.kill(before, signal.SIGKILL)
        until(lambda: vram.statistics().pid != before, what="the next keeper")
        check("a")
        shutil.rmtree(disk)
        before = vram.statistics().pid
        os.kill(before, signal.SIGKILL)
        until(lambda: vram.statistics().pid != before, what="the next keeper")
        check("a")
        until(lambda: (disk / "a" / "saved.json").exists(), what="the entry, saved again")


@in_turns(3)
def test_a_full_disk_is_said_once_and_the_bytes_of_before_stay(tmp_path: Path) -> None:
    with Run(tmp_path) as first:
        publish("w")
        first.says("vram.disk.saved vram.entry.name=w\n")
        resource.prlimit(vram.statistics().pid, resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
        publish("other", 2)
        first.says("vram.disk.not_saved vram.entry.name=other ")
        publish("w", 2)
    assert first.said().count("vram.disk.not_saved vram.entry.name=w ") == 1
    with Run(tmp_path):
        check("w", 1)
        assert names() == {"w"}


def test_killed_at_any_step_one_of_the_two_is_there_and_the_next_goes_on(tmp_path: Path) -> None:
    seen, value, stop_at = set(), 1, 0
    with own_keeper():
        publish("w", value)
        while stop_at < 100:
            version = vram.list_entries("w")[0].version
            is_over = False
            with (
                child(persist_and_die, str(tmp_path), version, stop_at, may_end=False) as saver,
                contextlib.suppress(EOFError),
            ):
                is_over = saver.said() == "saved"
            found = 0
            if (tmp_path / "w" / "model.safetensors").exists():
                vram.publish_file("again", tmp_path / "w", device="host")
                with vram.attach("again") as lease:
                    found = int(lease["x"].to_host()[0, 0])
                vram.remove("again")
            assert found in (value - 1, value)
            seen.add(found == value)
            if is_over and seen == {False, True}:
                break
            if found == value:
                publish("w", value := value + 1)
            stop_at = 0 if is_over else stop_at + 1
    assert sorted(os.listdir(tmp_path / "w")) == ["model.safetensors", "saved.json"]


def test_mistakes_are_said_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for folder, why in (("", "is no folder"), (tmp_path / "file", "file"), (tmp_path / "open", "yours alone")):
        command = [str(Path(sys.executable).with_name("vram")), "keep", "--persist", str(folder)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False)
        assert ended.returncode == 1
        assert why in ended.stderr
        assert ended.stderr.count("\n") == 1
