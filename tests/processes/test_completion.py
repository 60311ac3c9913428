"""What a shell offers when tab is pressed: in a real bash, of a real keeper, and of one that says other things."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.support import commands
from tests.support.deadlines import SOON
from tests.support.keeper_here import is_stopped
from tests.support.samples import in_turns
from tests.support.terminal import on_terminal

import vram
from vram.cli import completion


def offered(*words: str, wait: float = SOON / 2, **environment: str) -> list[str]:
    """Return what is offered for the last of these words, as the script for bash asks."""
    code = (
        "import sys; sys.argv[0] = 'vram'; from vram.cli import completion, main; "
        f"completion.WAIT = {wait}; main()"  # as long as a busy machine may take, but for who tests that
    )
    asked = {"_VRAM_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(("vram", *words)), "COMP_CWORD": str(len(words))}
    done = commands.python(code, environment={**asked, **environment})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def publish(*names: str) -> None:
    for name in names:
        vram.publish(name, {"a": np.zeros(1)})


@in_turns(5)
def test_commands_and_names_are_offered(kept: vram.Keeper) -> None:
    publish("mini/lm", "mini/moe", "other")
    assert offered("sh") == ["show"]
    for command in ("show", "rm", "park", "revoke", "ls", "publish-file"):
        assert offered(command, "mini/") == ["mini/lm", "mini/moe"], command
    assert offered("show", "") == ["mini/lm", "mini/moe", "other"]
    assert offered("show", "x") == []
    assert offered("bench", "pub") == ["publish-file"]


def test_the_keeper_that_was_named_is_asked(kept: vram.Keeper) -> None:
    publish("here")
    assert offered("show", "--socket", kept.path, "h", VRAM_KEEPER="/nowhere/keeper.sock") == ["here"]
    assert offered("show", "h", VRAM_KEEPER="/nowhere/keeper.sock") == []


@in_turns(5)
def test_a_keeper_that_stands_still_is_not_waited_for(kept: vram.Keeper) -> None:
    """Others have half a minute to be answered (REQUEST); who pressed a key has a second."""
    publish("here")
    pid = vram.statistics().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        while not is_stopped(pid):
            pass
        assert offered("show", "h", wait=completion.WAIT) == []
        assert is_stopped(pid)  # it ended all the same
    finally:
        os.kill(pid, signal.SIGCONT)
    assert offered("show", "h") == ["here"]


HOSTILE = [
    "ok/name", "$(touch owned)", "`touch owned`", "a b", "a;b", "a\x1b[31m", "a\nb", "a'b", 'a"b', "-rf", "~root/x",
    "*", "a|b", "a&b", "a\x00b", "\u202eevil", "a\\b", "!x", "#x", "{a,b}", "ok:name", "ok@1+2",
]  # fmt: skip


def test_what_a_shell_would_take_as_its_own_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [HOSTILE, []]

    class Liar:
        def page(self, prefix: str, after: str) -> tuple[list[SimpleNamespace], bool]:
            return [SimpleNamespace(name=name) for name in pages.pop(0)], True

    monkeypatch.setattr("vram.keeper.client.client", lambda path, timeout: Liar())
    context = SimpleNamespace(params={})
    assert completion.entry_names(context, "") == ["ok/name", "ok:name", "ok@1+2"]  # type: ignore[arg-type]


def test_tab_in_a_bash_completes_a_name(kept: vram.Keeper, tmp_path: Path) -> None:
    publish("mini/lm-of-mine")
    plain = tmp_path / "inputrc"
    plain.write_text("set enable-bracketed-paste off\nset bell-style none\n")
    program = tmp_path / "vram"
    program.write_text(
        f"#!{sys.executable}\nfrom vram.cli import completion, main\ncompletion.WAIT = {SOON / 2}\nmain()\n"
    )
    program.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PS1": "$ ",
        "HOME": str(tmp_path),
        "INPUTRC": str(plain),
    }
    with on_terminal(["bash", "--norc", "--noprofile", "-i"], environment=environment) as terminal:
        terminal.press('eval "$(vram --show-completion)"; echo rea""dy\n')
        terminal.until(lambda: "ready" in terminal.before)
        terminal.press("vram show mini/l\t")
        terminal.until(lambda: "mini/lm-of-mine" in terminal.before)
        terminal.press("\n")
        terminal.until(lambda: "current" in terminal.before)
        terminal.press("exit\n")
        assert terminal.end() == 0
