"""Entries that survive a reboot: what a folder has is published, and what a keeper keeps is written behind."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.children import child
from tests.support.deadlines import SOON, until
from tests.support.own_keeper import own_keeper
from tests.support.save_children import persist_and_die

import vram

OWN = f"~{os.geteuid()}/m.safetensors"


class Run:
    """A command of vram; its block ends it."""

    def __init__(self, *arguments: object) -> None:
        with open(os.memfd_create("log"), "w") as log:
            self._log = os.dup(log.fileno())
            command = [Path(sys.executable).with_name("vram"), *map(str, arguments)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(SOON)
        os.close(self._log)

    def said(self) -> str:
        return os.pread(self._log, 1 << 16, 0).decode()

    def says(self, what: str) -> None:
        until(lambda: what in self.said(), what=what)


def publish(name: str, value: int = 1, **options: object) -> None:
    array = vram.zeros((300, 5), "float32", device="host")
    array.fill(value)
    vram.publish(name, {"x": array, "tied": array}, meta={"of": name}, **options)  # type: ignore[arg-type]


def check(name: str, value: int = 1) -> None:
    with vram.attach(name) as lease:
        assert (lease.meta, set(lease)) == ({"of": name}, {"x", "tied"})
        assert lease["x"].address == lease["tied"].address
        assert (lease["x"].to_host() == np.full((300, 5), value, np.float32)).all()


def saved(disk: Path, name: str, value: int = 1) -> None:
    """Wait until that value of an entry is on the disk, and written down as saved."""
    file = disk / name.replace("/", ",") / "model.safetensors"
    written = file.with_name("saved.json")
    until(lambda: written.exists() and np.fromfile(file, np.float32)[-1] == value, what=f"{name} with {value}")


def test_all_is_there_after_keeper_and_guardian_were_killed(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VRAM_KEEPER", place)
    with Run("keep", "--persist", tmp_path) as first:
        first.says("serving")
        for name in ("a", "a/b", "a/b/c", OWN, "removed"):
            publish(name)
            saved(tmp_path, name)
        publish("short", ttl=3600.0)
        for value in (2, 3, 4):
            publish("a/b", value)
        saved(tmp_path, "a/b", 4)
        vram.remove("removed")
        until(lambda: not (tmp_path / "removed").exists(), what="its removal")
        both = vram.statistics().pid, first.process.pid
        for number in (signal.SIGSTOP, signal.SIGKILL):  # neither has the time to start another one
            for pid in both:
                os.kill(pid, number)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("model*")}
    for name in ("broken", "no name", ",removed"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\xff" * 100)
    with Run("keep", "--persist", tmp_path) as second:
        second.says("4 entries published")
        assert [second.said().count(f"{name}: not published") for name in ("broken", "no name", "a")] == [1, 1, 0]
        assert {entry.name for entry in vram.list_entries()} == {"a", "a/b", "a/b/c", OWN}
        for name in ("a", "a/b/c", OWN):
            check(name)
        check("a/b", 4)
        with Run("keep", "--takeover", "--persist", tmp_path) as third:  # which knows what is saved
            third.says("0 entries published")
            publish("broken", 7)
            saved(tmp_path, "broken", 7)
    assert files.items() <= {file: file.stat().st_mtime_ns for file in tmp_path.rglob("model*")}.items()
    assert len(list(tmp_path.iterdir())) == 6, "the end of a keeper removes nothing"


def test_a_full_disk_is_said_once_and_tried_again(tmp_path: Path) -> None:
    with own_keeper(), Run("persist", tmp_path) as persist:
        publish("w")
        saved(tmp_path, "w")
        resource.prlimit(persist.process.pid, resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
        publish("w", 2)
        persist.says("w: not saved")
        check("w", 2)
        saved(tmp_path, "w", 1)
        resource.prlimit(persist.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        persist.says("w: saved")
        saved(tmp_path, "w", 2)
        assert persist.said().count("w: not saved") == 1


def test_what_is_updated_is_saved_again_at_the_end(tmp_path: Path) -> None:
    with own_keeper():
        with Run("persist", tmp_path, "--prefix", "u"):
            publish("other")
            publish("u", updatable=True)
            saved(tmp_path, "u")
            with vram.update("u", timeout=SOON) as arrays:
                arrays["x"].fill(2)
        saved(tmp_path, "u", 2)
        assert os.listdir(tmp_path) == ["u"]
        vram.remove("u")  # while nobody looks: it comes back
        with Run("persist", tmp_path) as again:
            again.says("1 entry published")
            check("u", 2)


def test_killed_at_any_step_one_of_the_two_is_there_and_the_next_goes_on(tmp_path: Path) -> None:
    seen, value = set(), 1
    with own_keeper():
        publish("w", value)
        for stop_at in (1000, *range(100)):
            is_over = False
            with child(persist_and_die, str(tmp_path), stop_at, may_end=False) as saver, contextlib.suppress(EOFError):
                is_over = saver.said() == "saved"
            vram.publish_file("again", tmp_path / "w", device="host")
            with vram.attach("again") as lease:
                found = int(lease["x"].to_host()[0, 0])
            vram.remove("again")
            assert found in (value - 1, value)
            seen.add(found == value)
            if found == value:
                publish("w", value := value + 1)
            if is_over and stop_at < 100:
                break
    assert seen == {False, True}
    assert sorted(os.listdir(tmp_path / "w")) == ["model.safetensors", "saved.json"]
