"""Keepers in forks of the server of children, which take a tenth of the time of ``python -m vram.keeper``."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from vram.keeper.private import KeeperProcess

from .children import CHILDREN, Inherited

if TYPE_CHECKING:
    import pytest

EXECUTED = KeeperProcess._started


def fork_keepers(patch: pytest.MonkeyPatch) -> None:
    """Have :class:`KeeperProcess` fork, where it would start this very Python as this very user."""
    patch.setattr(KeeperProcess, "_started", staticmethod(_started))


def _started(command: Sequence[str], *, stderr: IO[bytes], fds: Sequence[int]) -> Any:
    if command[0] != sys.executable or command[1] != "-P":
        return EXECUTED(command, stderr=stderr, fds=fds)
    return _Forked(command[command.index("vram.keeper") + 1 :], stderr, fds)


class _Forked:
    """What is used of a Popen."""

    def __init__(self, arguments: Sequence[str], stderr: IO[bytes], fds: Sequence[int]) -> None:
        given = {fd: Inherited(fd) for fd in fds}
        self._process = CHILDREN.Process(
            target=_keep, args=(list(arguments), os.getcwd(), Inherited(stderr.fileno()), given), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._process.exitcode is not None:
            self.returncode = self._process.exitcode
            self._process.close()  # its pipes
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._process.join(timeout)
        if (status := self.poll()) is None:
            raise subprocess.TimeoutExpired(["vram.keeper"], timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _keep(arguments: list[str], cwd: str, stderr: int, fds: Mapping[int, int]) -> None:
    from vram.keeper.__main__ import main

    os.setsid()
    os.chdir(cwd)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number, fd in enumerate((nowhere, nowhere, stderr)):
        os.dup2(fd, number)
    os.close(nowhere)
    os.close(stderr)
    for place in range(1, len(arguments)):
        if arguments[place - 1].endswith("-fd"):
            arguments[place] = str(fds[int(arguments[place])])
    sys.exit(main(arguments))
