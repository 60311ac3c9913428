"""The command that keeps entries across reboots, and programs beside a keeper, which end with it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..programs import python
from ..spec import printable
from .options import Socket


def persist(
    folder: Annotated[Path, typer.Argument(help="Where entries are saved; it is made if it is missing.")],
    prefix: Annotated[str, typer.Option(metavar="NAME", help="Only entries whose names begin like this.")] = "",
    socket: Socket = None,
    parent_fd: Annotated[int, typer.Option(hidden=True, help="End when this reads end of file.")] = -1,
) -> None:
    """Keep your entries across reboots, until Ctrl-C or SIGTERM: publish what a folder has and the keeper lacks, then
    save each new version there, and remove what is removed. So does `vram keep --persist`.
    """
    from ..entries.persist import Persistence
    from ..keeper.rules import check_prefix

    heard, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    ends = select.poll()
    for fd in (heard, *([parent_fd] if parent_fd >= 0 else [])):
        ends.register(fd, select.POLLIN)

    def end(number: int, _: object) -> None:
        os.write(told, b".")  # what is being saved is saved; a second signal does not wait for that
        signal.signal(number, signal.SIG_DFL)

    def say(line: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads it: what is kept is kept
            sys.stderr.write(f"vram persist: {printable(' '.join(line.split()))}\n")

    persistence = Persistence(str(folder), check_prefix(prefix), say)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    persistence.run(lambda seconds: bool(ends.poll(int(seconds * 1000))), socket)


def beside(program: list[str], arguments: list[str], *, background: bool = False, says: bool = True) -> int:
    """Start a program of vram beside the keeper that this process becomes or starts: it ends when that does. Return the
    descriptor that the keeper is to inherit: the keeper knows nothing of it, and it closes when the keeper ends."""
    ours, theirs = os.pipe()
    subprocess.Popen(
        [python(), "-P", "-m", *program, "--parent-fd", str(ours), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if background else None,
        stderr=None if says else subprocess.DEVNULL,
        start_new_session=background,
        cwd="/" if background else None,
        pass_fds=[ours],
    )
    os.close(ours)
    os.set_inheritable(theirs, True)
    return theirs
