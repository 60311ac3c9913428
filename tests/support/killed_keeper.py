"""A keeper that kills itself right before one of its steps.

In the place of ``python -m vram.keeper`` it starts the guardian, whose keepers are this program. A step is a record, a
word to the guardian, an answer to a client, a row that is read, or what a planned restart says, hears or decides.
Before the N-th from when a file ``kill`` beside the socket says ``N`` (or another file, that is named before), the file
is removed and the keeper is killed, or its guardian if the file says ``-N``. With a request that names ``unfit`` rows
are written that cannot be read, or name what never was. A file ``small`` has journals begin anew after some kilobytes.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any


def _run(file: str, arguments: list[str]) -> int:

    from vram.keeper import connection, guarded, restart
    from vram.keeper.__main__ import main
    from vram.keeper.journal import Journal
    from vram.keeper.rows import LeaseRow, Replayed, encode
    from vram.keeper.service import Service
    from vram.sharing.channel import Channel

    beside = Path(arguments[arguments.index("--socket") + 1]).parent
    wanted, armed, count = beside / file, 0, 0
    links: list[guarded.GuardianLink] = []

    def step() -> None:
        nonlocal armed, count
        try:
            wish = int(wanted.read_text())
        except (FileNotFoundError, ValueError):
            wish = 0
        if wish != armed:
            armed, count = wish, 0
        if not armed:
            return
        count += 1
        if count == abs(armed):
            wanted.unlink()
            if armed > 0:
                os.kill(os.getpid(), signal.SIGKILL)
            os.kill(links[-1].pid, signal.SIGKILL)

    def stepping(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def wrapped(*given: Any, **options: Any) -> Any:
            step()
            result = inner(*given, **options)
            if wanted.exists() and wanted.read_text() == name:  # right after what it names
                wanted.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, wrapped)

    connect = guarded.GuardianLink.__init__

    def connecting(self: guarded.GuardianLink, *given: Any, **options: Any) -> None:
        connect(self, *given, **options)
        links.append(self)

    guarded.GuardianLink.__init__ = connecting  # type: ignore[method-assign]
    stepping(Journal, "append")
    stepping(Journal, "take")
    stepping(Journal, "keep")
    stepping(guarded.GuardianLink, "tell")
    stepping(connection, "transmit")
    stepping(Replayed, "_put")
    stepping(Channel, "send")
    stepping(restart, "_word")
    stepping(restart, "adopt")
    for name in ("gave", "took", "stop"):
        stepping(guarded.GuardedServer, name)
    if (beside / "small").exists():
        guarded._LEAST, guarded._TIMES = 4000, 0

    answer = Service._answer

    def answering(self: Any, peer: Any, payload: bytes, fds: list[int], cut: bool) -> Any:
        if b"unfit" in payload:
            self.server.journal.append(encode([LeaseRow(10**6, 10**6, 10**6, "r", 0.0), ["no row"]]))
        return answer(self, peer, payload, fds, cut)

    Service._answer = answering  # type: ignore[method-assign]
    return main(arguments)


if __name__ == "__main__":
    if sys.argv[1] == "--run":
        sys.exit(_run(sys.argv[2], sys.argv[3:]))
    from vram.keeper.guarded import guardian_command

    rest = sys.argv[sys.argv.index("vram.keeper") + 1 :]
    named = sys.argv[1] if sys.argv[1].startswith("kill") else "kill"
    command = [*guardian_command(), sys.executable, os.path.abspath(__file__), "--run", named, *rest, "--survive"]
    os.execv(command[0], command)
