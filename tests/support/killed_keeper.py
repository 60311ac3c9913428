"""A keeper that kills itself right before one of its steps.

In the place of ``python -m vram.keeper`` it starts the guardian, whose keepers are this program. A step is a record, a
word to the guardian, an answer to a client, a row that is read, or what begins or ends a planned restart.
Before the N-th from when a file ``kill`` beside the socket says ``N`` (or another file, that is named before), the file
is removed and the keeper is killed, or its guardian if the file says ``-N``, or both if it says ``both N``, as long as
another guardian has everything. With a request that names ``unfit`` rows are written that cannot be read, or name what
never was. A file ``small`` has journals begin anew after some kilobytes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any


def _wish(wanted: Path) -> str:
    """Return what the test wishes for; it may take it back at any time."""
    try:
        return wanted.read_text()
    except FileNotFoundError:
        return ""


def _run(file: str, arguments: list[str]) -> int:

    from vram.keeper import connection, guarded, server
    from vram.keeper.__main__ import main
    from vram.keeper.journal import Journal
    from vram.keeper.rows import LeaseRow, Replayed, encode
    from vram.keeper.service import Service
    from vram.sharing.channel import Channel

    beside = Path(arguments[arguments.index("--socket") + 1]).parent
    wanted, armed, count = beside / file, "", 0
    links: list[guarded.GuardianLink] = []

    def step() -> None:
        nonlocal armed, count
        wish = _wish(wanted)
        if wish != armed:
            armed, count = wish, 0
        both, _, number = wish.rpartition(" ")
        if not number.lstrip("-").isdecimal() or (both and links[-1].is_alone):  # then all would be lost
            return
        count += 1
        if count == abs(int(number)):
            wanted.unlink()
            if both or number[0] == "-":
                os.kill(links[-1].pid, signal.SIGKILL)
            if both or number[0] != "-":
                os.kill(os.getpid(), signal.SIGKILL)

    def stepping(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def wrapped(*given: Any, **options: Any) -> Any:
            step()
            if name == "begin":
                links[-1].is_alone = True
            result = inner(*given, **options)
            wish = _wish(wanted)
            if wish in (name, f"stop {name}"):  # right after what it names
                wanted.unlink()
                os.kill(os.getpid(), signal.SIGKILL if wish == name else signal.SIGSTOP)
            return result

        setattr(owner, name, wrapped)

    connect = guarded.GuardianLink.__init__

    def connecting(self: guarded.GuardianLink, *given: Any, **options: Any) -> None:
        connect(self, *given, **options)
        self.is_alone = False  # type: ignore[attr-defined]  # another guardian would start a keeper
        links.append(self)

    guarded.GuardianLink.__init__ = connecting  # type: ignore[method-assign]
    stepping(Journal, "append")
    stepping(guarded.GuardianLink, "tell")
    stepping(connection, "transmit")
    stepping(Replayed, "_put")
    stepping(Channel, "send")
    stepping(guarded, "adopt")
    stepping(guarded.GuardianLink, "everything")
    stepping(guarded.Guard, "begin")
    for name in ("hand_over", "stop"):
        stepping(server.KeeperServer, name)
    if (beside / "small").exists():
        guarded._LEAST, guarded._TIMES = 4000, 0

    answer = Service._answer

    def answering(self: Any, peer: Any, payload: bytes, fds: list[int], cut: bool) -> Any:
        if b"unfit" in payload:
            self.server.guard.journal.append(encode([LeaseRow(10**6, 10**6, 10**6, "r", 0.0), ["no row"]]))
        return answer(self, peer, payload, fds, cut)

    Service._answer = answering  # type: ignore[method-assign]
    return main(arguments)


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        sys.exit(_run(sys.argv[2], sys.argv[3:]))
    from vram.keeper import __main__ as program

    rest = sys.argv[sys.argv.index("vram.keeper") + 1 :]
    named = sys.argv[1] if sys.argv[1].startswith("kill") else "kill"
    program.PROGRAM[:] = [sys.executable, os.path.abspath(__file__), "--run", named]
    sys.exit(program.main([*rest, "--survive"]))
