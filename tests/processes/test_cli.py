"""The command line, run as people run it: what it prints, what it exits with, and that errors are one line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.support import commands
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.places import short_directory
from tests.support.samples import in_turns

import vram
from vram.bench import NAMES
from vram.cli import main
from vram.keeper.client import close_client, own_label

VRAM = Path(sys.executable).with_name("vram")


def run(*arguments: object, expect: int = 0, cwd: Path | None = None, **environment: str) -> str:
    """Run a command; return what it printed, on standard error if it fails."""
    done = commands.vram(*arguments, cwd=cwd, environment={"COLUMNS": "200", **environment})
    assert done.returncode == expect, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stderr
    if expect == 0:
        assert done.stderr == ""
        return done.stdout
    assert done.stdout == ""
    return done.stderr


def fails(*arguments: object, **environment: str) -> str:
    """Run a command that fails; return its one line."""
    said = run(*arguments, expect=1, **environment)
    assert said.startswith(("vram: ", "vram keep: ")), said
    assert said.count("\n") == 1, said
    return said


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"weight": np.arange(12, dtype="float32").reshape(3, 4), "bias": np.zeros(3, "float16")}, path)
    return path


def test_publish_file_ls_show_rm(kept: vram.Keeper, file: Path) -> None:
    assert (
        run("publish-file", "mini/lm", file, "--meta", "config=sha256:1")
        == "mini/lm version 1: 2 arrays, 54 B on host, read into shared memory\n"
    )
    published = json.loads(run("publish-file", "mini/lm", file, "--device", "host", "--json", "--ttl", "1000"))
    assert published == {"name": "mini/lm", "version": 2, "arrays": 2, "nbytes": 54, "copied": {}}
    with vram.attach("mini/lm") as lease:
        assert (lease["weight"].numpy() == np.arange(12).reshape(3, 4)).all()

        listed = run("ls")
        assert listed.splitlines()[0].split()[:3] == ["name", "version", "size"]
        assert listed.splitlines()[1].split()[:2] == ["mini/lm", "2"]
        assert "source=model.safetensors" in listed
        (entry,) = json.loads(run("ls", "mini", "--json"))
        assert (entry["name"], entry["version"], entry["readers"], entry["nbytes"]) == ("mini/lm", 2, 1, 2 << 20)
        assert json.loads(run("ls", "max", "--json")) == []

        saved = file.with_name("out")
        assert run("save", "mini/lm", saved) == f"{saved}/model.safetensors\n"
        assert json.loads(run("save", "mini/lm", saved, "--shard", "40", "--json"))[-1].endswith("index.json")

        shown = run("show", "mini/lm")
        assert "current" in shown
        assert str(os.getpid()) in shown
        details = json.loads(run("show", "mini/lm", "--json"))
        assert details["versions"][0]["holders"][0]["pid"] == os.getpid()
        assert details["versions"][0]["meta"] == {"source": "model.safetensors"}
        assert {"name": "weight", "dtype": "float32", "shape": [3, 4], "nbytes": 48} in details["arrays"]
        assert re.search(r"^ *weight +float32 +3 x 4 +48 B *$", shown, re.MULTILINE)
        assert re.search(r"^ *bias +float16 +3 +6 B *$", shown, re.MULTILINE)
        assert 900 < details["ttl_left"] <= 1000

        assert "7" in fails("rm", "mini/lm", "--version", 7)
        assert "count from 1" in fails("rm", "mini/lm", "--version", 0)
        assert len(vram.list_entries()) == 1
        assert run("rm", "mini/lm", "--version", 2) == "removed mini/lm version 2\n"
        assert vram.list_entries() == []
    run("publish-file", "n", file, "--writable")
    assert json.loads(run("rm", "n", "--json")) == {"removed": "n", "version": None}


@in_turns(5)
def test_revoke_says_who_still_holds_it(kept: vram.Keeper, file: Path) -> None:
    run("publish-file", "big/lm", file)
    with vram.attach("big/lm") as lease, vram.attach("big/lm"):
        assert re.search(r"^ *big/lm .* 2 / 2 MiB ", run("ls"), re.MULTILINE)
        line = rf"^ *big/lm +1 +2 MiB +{os.geteuid()} +pid {os.getpid()} +{re.escape(own_label())} +r +[0-9.]+ s *$"
        assert len(re.findall(line, run("ls", "--holders"), re.MULTILINE)) == 2
        assert run("ls", "other", "-l").splitlines()[1:] == []
        held = json.loads(run("ls", "big", "-l", "--json"))
        assert [(one["name"], one["version"], one["nbytes"], one["pid"]) for one in held] == [
            ("big/lm", 1, 2 << 20, os.getpid())
        ] * 2
        done = subprocess.run(
            [VRAM, "revoke", "big/lm", "--timeout", "0.1"], capture_output=True, text=True, timeout=SOON, check=False
        )
        assert (done.returncode, done.stderr) == (1, "")
        assert done.stdout.startswith("revoked big/lm; 2 MiB still held by:\n")
        assert len(re.findall(line, done.stdout, re.MULTILINE)) == 2
        assert lease.is_revoked()
        assert "revoked" in run("show", "big/lm")
        assert re.search(
            rf"^ *1 +2 MiB +[0-9]+ +pid {os.getpid()} +{os.geteuid()} +{re.escape(own_label())} ",
            run("show", "big/lm"),
            re.MULTILINE,
        )
        done = subprocess.run(
            [VRAM, "revoke", "big/lm", "--version", "1", "--timeout", "0", "--json"],
            capture_output=True,
            timeout=SOON,
            check=False,
        )
        left = json.loads(done.stdout)
        assert (done.returncode, left["name"], left["nbytes"], len(left["holders"])) == (1, "big/lm", 2 << 20, 2)
        assert left["holders"] == [{**one, "age": left["holders"][at]["age"]} for at, one in enumerate(held)]
        assert run("ls", "big").splitlines()[1:] == []
    run("publish-file", "big/lm", file)
    with vram.attach("big/lm") as lease:
        lease.on_revoke(vram.Lease.close)
        assert run("revoke", "big/lm", "--timeout", SOON) == "revoked big/lm: nobody holds it any more\n"
    run("publish-file", "big/lm", file)
    assert json.loads(run("revoke", "big/lm", "--version", 3, "--json")) == {
        "name": "big/lm",
        "holders": [],
        "nbytes": 0,
        "more": 0,
    }


def test_the_version_is_said() -> None:
    assert run("--version") == f"vram {vram.__version__}\n"


def test_the_package_is_the_program() -> None:
    done = subprocess.run([sys.executable, "-m", "vram", "--version"], capture_output=True, text=True, timeout=SOON)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"vram {vram.__version__}\n", "")


def test_the_help_of_bench_says_what_each_measures() -> None:
    said = run("bench", "--help")
    for name, what in NAMES.items():
        assert f"{name} " in said
        assert what in said


def test_bench_says_where_the_other_cases_are() -> None:
    assert "in a clone of vram: run `python -m benchmarks ring` in its directory" in fails("bench", "ring")


@in_turns(5)
def test_keep_runs_in_the_foreground_until_it_is_told(file: Path, tmp_path: Path) -> None:
    (tmp_path / "vram.py").write_text("raise SystemExit('not this one')")  # what lies around is not what runs
    with short_directory() as directory:
        path = f"{directory}/k.sock"
        arguments = ["keep", "--socket", path, "--mode", "0660", "--max-bytes", "4MiB", "--max-entries", "2"]
        keeper = subprocess.Popen(
            [VRAM, *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert keeper.stdout is not None
            assert keeper.stdout.readline().startswith(f"vram keep: serving at {path} (pid ")
            assert os.stat(path).st_mode & 0o777 == 0o660
            assert run("publish-file", "one", file, "--socket", path)
            assert "one" in run("ls", "--socket", path)
            assert "one" in run("ls", VRAM_KEEPER=path)
            assert "keeper" in fails("keep", "--socket", path)
            successor = subprocess.Popen(
                [VRAM, "keep", "--socket", path, "--takeover"], cwd=tmp_path, stdout=subprocess.PIPE
            )
            try:
                assert keeper.wait(SOON) == 0
                assert keeper.stdout.read() == ""
                assert "one" in run("ls", "--socket", path)
            finally:
                successor.send_signal(signal.SIGINT)
                said, _ = successor.communicate(timeout=SOON)
            assert successor.returncode == 0
            assert said.decode().endswith("\nvram keep: ended: let go of 1 version, 2 MiB\n")
            assert not os.path.exists(path)
        finally:
            keeper.terminate()  # it would be followed if it was killed
            keeper.communicate(timeout=SOON)


@in_turns(5)
def test_a_keeper_in_the_background_serves_when_its_command_returns_and_is_stopped(file: Path) -> None:
    with short_directory() as directory:
        path = f"{directory}/k.sock"
        said = run("keep", "--background", "--socket", path)
        found = re.fullmatch(rf"vram keep: serving at {re.escape(path)} \(pid (\d+)\); `vram stop` ends it\n", said)
        assert found, said
        pid = int(found[1])
        try:
            assert os.getsid(pid) not in (0, os.getsid(0))  # the end of a terminal is not its own
            assert run("ls", "--socket", path).startswith(f"nothing is published\nkeeper {vram.__version__}, pid ")
            assert f"pid {pid}" in fails("keep", "--background", "--socket", path)
            run("publish-file", "one", file, "--socket", path)
            with vram.attach("one", keeper=path):
                done = subprocess.run(
                    [VRAM, "stop", "--socket", path], capture_output=True, text=True, timeout=SOON, check=False
                )
                assert (done.returncode, done.stderr) == (1, "")
                assert done.stdout.startswith("not ended, since this is leased")
                assert re.search(rf"^ *one .* pid {os.getpid()} ", done.stdout, re.MULTILINE)
                assert "one" in run("ls", "--socket", path)
                said = run("keep", "--background", "--takeover", "--max-entries", "7", "--socket", path)
                assert said.startswith(f"vram keep: took over from pid {pid}, with --max-entries 7\n")
                pid = vram.statistics(keeper=path).pid
                stopped = json.loads(run("stop", "--force", "--json", "--socket", path))
            close_client(path)
            assert (stopped["pid"], stopped["is_stopped"], stopped["versions"]) == (pid, True, 1)
            assert [one["pid"] for one in stopped["holders"]] == [os.getpid()]
            assert not os.path.exists(path)
            assert "no keeper" in fails("stop", "--socket", path)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
                until(lambda: not os.path.exists(path), what="the end of the keeper")


def _of_holder(pid: int) -> int:
    """Return who started a keeper."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _open_in(pid: int) -> dict[str, str]:
    """Return what the descriptors of a process lead to."""
    return {fd.name: os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}


@pytest.mark.parametrize("by", ["--socket", "VRAM_KEEPER"])
def test_a_keeper_in_the_background_is_in_no_directory_and_writes_nowhere(by: str) -> None:
    with short_directory() as directory:
        path = f"{directory}/k.sock"
        given, environment = (("--socket", "k.sock"), {}) if by == "--socket" else ((), {by: "k.sock"})
        paths = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), "here"])
        said = run("keep", "--background", *given, cwd=Path(directory), PYTHONPATH=paths, **environment)
        found = re.fullmatch(r"vram keep: serving at (.*) \(pid (\d+)\); `vram stop` ends it\n", said)
        assert found, said
        first = int(found[2])
        if found[1] != path:
            os.kill(first, signal.SIGTERM)
        assert found[1] == path
        try:
            holder = _of_holder(first)
            os.kill(first, signal.SIGKILL)
            until(lambda: vram.statistics(keeper=path).pid != first, what="the next keeper")
            for pid in (holder, vram.statistics(keeper=path).pid):
                until(lambda pid=pid: _open_in(pid)["2"] == "/dev/null", seconds=AT_ONCE, what="the end of its stderr")  # type: ignore[misc]
                assert os.readlink(f"/proc/{pid}/cwd") == "/"
                variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                (paths,) = [one for one in variables if one.startswith("PYTHONPATH=")]
                assert re.split("[=:]", paths)[-1] == f"{directory}/here"
        finally:
            close_client(path)
            run("stop", "--socket", path)


@in_turns(5)
def test_a_keeper_in_the_background_leaves_the_terminal_alone_once_it_serves() -> None:
    with short_directory() as directory:
        path = f"{directory}/k.sock"
        ours, theirs = os.openpty()
        terminal = os.ttyname(theirs)

        def keep(*options: str) -> int:
            command = [VRAM, "keep", "--background", "--socket", path, *options]
            return subprocess.run(
                command, stdin=theirs, stdout=theirs, stderr=theirs, timeout=SOON, check=False
            ).returncode

        try:
            assert keep("--log", "text") == 1
            assert b"2> FILE" in os.read(ours, 1 << 12)
            assert not os.path.exists(path)
            assert keep() == 0
            assert b"serving at" in os.read(ours, 1 << 12)
            pid = vram.statistics(keeper=path).pid
            for one in (pid, _of_holder(pid)):
                until(lambda one=one: _open_in(one)["2"] == "/dev/null", seconds=AT_ONCE, what="the end of its stderr")  # type: ignore[misc]
                assert terminal not in _open_in(one).values()
            assert keep() == 1  # what goes wrong before it serves is said
            assert b"serves" in os.read(ours, 1 << 12)
            with open(f"{directory}/log", "wb") as log:
                subprocess.run(
                    [VRAM, "keep", "--background", "--takeover", "--log", "text", "--socket", path],
                    stdout=subprocess.DEVNULL, stderr=log, timeout=SOON, check=True,
                )  # fmt: skip
            close_client(path)
            pid = vram.statistics(keeper=path).pid
            assert {_open_in(one)["2"] for one in (pid, _of_holder(pid))} == {f"{directory}/log"}
        finally:
            close_client(path)
            run("stop", "--socket", path)
            os.close(ours)
            os.close(theirs)
        assert "vram.keeper.shutdown" in Path(f"{directory}/log").read_text()
        os.unlink(f"{directory}/log")


def test_whoever_lends_is_not_ended() -> None:
    with short_directory() as directory:
        path = f"{directory}/lent"
        with vram.zeros(4, device="host") as array, vram.lend({"a": array}, at=path):
            assert "lends" in fails("stop", "--socket", path)


@in_turns(5)
def test_memory_without_a_name_is_said(kept: vram.Keeper, file: Path) -> None:
    vram.publish("many", {f"{'x' * 180}{number}": np.zeros(8) for number in range(200)})
    assert "held by leases" not in run("ls")  # of what is longer than a message, the list of arrays is memory, too
    vram.remove("many")
    run("publish-file", "gone", file)
    with vram.attach("gone"):
        vram.remove("gone")
        assert run("ls").splitlines() == [
            "nothing is published",
            "1 older version held by leases, 2 MiB: vram ls -l",
            f"keeper {vram.__version__}, pid {vram.statistics().pid}",
        ]
        assert run("ls", "g") == "nothing is published under a name that begins with g\n"


def test_what_users_have_adds_up(kept: vram.Keeper) -> None:
    titles, *_, everyone, user = (re.split(r"  +", line.strip()) for line in run("ls", "--users").splitlines())
    assert (everyone[0], user[0]) == ("all have", str(os.geteuid()))
    assert everyone[1:] == user[1:]
    assert everyone[titles.index("connections")] == "1"


@in_turns(5)
def test_nothing_is_cut_on_a_narrow_terminal(kept: vram.Keeper, file: Path) -> None:
    name = "qwen/qwen2.5-7b-instruct-awq/rev-3"
    run("publish-file", name, file, "--meta", "note=" + "words " * 8)
    listed = on_a_terminal("ls", COLUMNS="80", TERM="xterm", NO_COLOR="1")
    assert name in listed
    assert "2 MiB" in listed
    assert "(no room for segments, old, meta" in listed
    for said in (listed, on_a_terminal("doctor", COLUMNS="80", TERM="xterm", NO_COLOR="1")):
        assert "…" not in said
    findings = json.loads(run("doctor", "--json"))["findings"]
    printed = run("doctor", COLUMNS="80")
    for one in findings:
        if one["remedy"] and one["area"] != "packages":
            assert f"  {one['check']}: {one['remedy']}\n" in printed


MISTAKES: list[tuple[list[str], str]] = [
    (["keep", "--mode", "rw"], "0660"),
    (["keep", "--mode", "7777"], "0660"),
    (["keep", "--max-bytes", "64 bananas"], "64MiB"),
    (["keep", "--max-entries", "-1"], "--max-entries"),
    (["keep", "--log-level", "debug"], "--log json"),
    (["keep", "--background", "--metrics", "127.0.0.1:0"], "vram metrics"),
    (["publish-file", "n", "FILE", "--device", "gpu"], '"host"'),
    (["publish-file", "n", "FILE", "--device", "cuda:99"], "cuda"),
    (["publish-file", "n", "FILE", "--meta", "config"], "KEY=VALUE"),
    (["publish-file", "n", "FILE", "--meta", "=x"], "KEY=VALUE"),
    (["publish-file", "n", "FILE", "--ttl", "nan"], "seconds above 0"),
    (["publish-file", "..", "FILE"], "a name"),
    (["publish-file", "n", "nothing.safetensors"], "no file"),
    (["publish-file", "n", "/"], "no .safetensors file"),
    (["publish-file", "n", __file__], "safetensors"),
    (["show", "n"], "n"),
    (["rm", "n"], "n"),
    (["rm", "a b"], "a name"),
    (["park", "n"], "n"),
    (["park", "n", "--timeout", "-1"], "seconds"),
    (["revoke", "n"], "n"),
    (["revoke", "a b"], "a name"),
    (["revoke", "n", "--version", "0"], "count from 1"),
    (["revoke", "n", "--timeout", "-1"], "seconds"),
    (["ls", "-l", "a b"], "begins no name"),
    (["ls", "a b"], "begins no name"),
    (["demo", "--device", "cuda:99"], "cuda"),
    (["demo", "--weights", "nothing.safetensors"], "no file"),
    (["demo", "--weights", __file__], "safetensors"),
]


def test_errors_are_one_line_and_exit_with_1(
    kept: vram.Keeper, file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments, says in MISTAKES:
        given = [str(file) if argument == "FILE" else argument for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["vram", *given])
        with pytest.raises(SystemExit) as caught:
            main()
        printed = capfd.readouterr()
        assert (caught.value.code, printed.out) == (1, ""), arguments
        assert says in printed.err
        assert printed.err.startswith("vram: ")
        assert printed.err.count("\n") == 1
    assert vram.list_entries() == []


@pytest.mark.parametrize("arguments", [["ls"], ["publish-file", "n", "FILE"]])
def test_without_a_keeper_it_says_how_to_start_one(file: Path, tmp_path: Path, arguments: list[str]) -> None:
    nobody = str(tmp_path / "nobody.sock")
    given = [str(file) if argument == "FILE" else argument for argument in arguments]
    assert f"start one with `vram keep --socket {nobody}`" in fails(*given, VRAM_KEEPER=nobody)


def test_a_wrong_call_shows_how_it_is_meant() -> None:
    assert "Usage:" in run("publish-file", expect=2)
    assert "No such option" in run("ls", "--nonsense", expect=2)
    assert "Usage:" in run("--help")


@in_turns(5)
def test_words_of_strangers_are_words(kept: vram.Keeper, file: Path) -> None:
    """Neither markup nor what a terminal would obey."""
    meta = {"note": "[red]now[/red] [/] :smile: \x1b[2J\x07", "[bold]": "x\ny"}
    vram.publish("n", {"x": np.arange(3)}, meta=meta)
    for command in (["ls"], ["show", "n"]):
        said = run(*command)
        assert "[red]now[/red] [/] :smile: ?[2J?" in said
        assert "[bold]=x?y" in said
        assert "\x1b" not in said
    assert json.loads(run("show", "n", "--json"))["meta"] == meta
    broken = file.with_name("two\nlines\x1b[2J.safetensors")
    broken.write_bytes(b"no tensors in here")
    assert "\x1b" not in fails("publish-file", "n", broken)


@in_turns(5)
def test_whoever_has_read_enough_may_go(kept: vram.Keeper) -> None:
    for n in range(300):
        vram.publish(f"entry/{n}", {"x": np.arange(1)}, meta={"long": "x" * 300})
    with subprocess.Popen(
        [VRAM, "ls", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(SOON) == 1


@in_turns(5)
def test_the_demo_proves_its_story(file: Path, tmp_path: Path) -> None:
    nobody = str(tmp_path / "nobody.sock")
    told = subprocess.run(
        [VRAM, "demo", "--weights", file, "--workers", "2", "--device", "auto"],
        env={**os.environ, "COLUMNS": "200", "VRAM_KEEPER": nobody, "LD_LIBRARY_PATH": ""},  # no driver at all
        capture_output=True, text=True, timeout=SOON, check=True,
    ).stdout  # fmt: skip
    assert "chose host memory, since memory on a GPU" in told
    assert "published 2 tensors, 54 B" in told
    assert "killed with SIGKILL" in told
    assert "2 processes attached it and compared it byte for byte" in told
    assert "all readers are gone: 0 leases" in told
    held = re.search(r"together they hold ([\d.]+) copies of 2 MiB", told)
    assert held is not None
    assert float(held[1]) < 1.02
    assert told.splitlines()[-1].partition("  ")[2].startswith("proved:")


def on_a_terminal(*arguments: object, **environment: str) -> str:
    """Run a command whose output is a terminal; return all it printed."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    ours, theirs = os.openpty()
    try:
        process = subprocess.Popen(
            [VRAM, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env={**inherited, "COLUMNS": "120", "TERM": "xterm-256color", **environment},
        )
    finally:
        os.close(theirs)
    said = b""
    try:
        with contextlib.suppress(OSError):  # EIO: the last who had the other end is gone
            while part := os.read(ours, 65536):
                said += part
        assert process.wait(SOON) == 0, said.decode()
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return said.decode().replace("\r\n", "\n")


@in_turns(5)
@pytest.mark.standin
def test_the_demo_proves_its_story_on_a_gpu(file: Path, tmp_path: Path) -> None:
    nobody = str(tmp_path / "nobody.sock")
    told = run("demo", "--weights", file, "--workers", 2, "--device", "auto", VRAM_KEEPER=nobody)
    assert "chose cuda:0" in told
    assert "killed with SIGKILL" in told
    assert "byte for byte" in told
    assert "proved:" in told.splitlines()[-1]


@in_turns(5)
def test_the_doctor_exits_by_what_is_needed(kept: vram.Keeper) -> None:
    printed = run("doctor", "--need", "host", "--need", "keeper", VRAM_KEEPER=kept.path)
    assert re.search(r"^ ok +shared memory ", printed, re.MULTILINE)
    done = subprocess.run(
        [VRAM, "doctor", "--need", "cuda:99", "--socket", kept.path], capture_output=True, text=True, timeout=SOON
    )
    assert done.returncode == 1
    assert done.stdout.endswith("needed: cuda:99: nothing of that name was looked at\n")
    assert done.stderr == ""


def test_the_doctor_answers_programs(kept: vram.Keeper) -> None:
    said = json.loads(run("doctor", "--json", VRAM_KEEPER=kept.path))
    assert said["unmet"] == []
    assert {one["area"] for one in said["findings"]} == {"host", "keeper", "gpu", "packages"}
    assert set(said["findings"][0]) == {"area", "check", "verdict", "said", "code", "remedy"}


@in_turns(5)
def test_the_doctor_prints_words_of_others_as_words(tmp_path: Path) -> None:
    (tmp_path / "\x1b[2J").mkdir()
    assert "\x1b" not in run("doctor", VRAM_KEEPER=str(tmp_path / "\x1b[2J/k.sock"))
