"""End a keeper in an orderly way: whoever runs it, and whatever started it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import signal
from typing import TYPE_CHECKING

from ..errors import AccessDeniedError, PeerGoneError, UnsupportedError, UsageError, WaitTimeoutError
from ..keeper.client import KeeperClient, own_label
from ..lifetime import shielded, waiting
from .keepers import TIMEOUT

if TYPE_CHECKING:
    from ..keeper.reports import HolderInfo


@dataclasses.dataclass(frozen=True, slots=True)
class Stopped:
    """The result of :func:`stop`. `versions`, `nbytes` and `holders` are as of the question before the signal."""

    path: str
    pid: int
    is_stopped: bool
    versions: int
    nbytes: int
    holders: tuple[HolderInfo, ...]


def _check_user(process: int, pid: int, asking: KeeperClient) -> None:
    """Raise unless a process is of the user who listened at the path.
    If the listener has ended, its pid may belong to a process that another server, which answers now, chose."""
    user, found = asking.server().uid, -1
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/status", "rb") as file:
        found = next((int(line.split()[2]) for line in file if line.startswith(b"Uid:")), -1)
    end = select.poll()
    end.register(process, select.POLLIN)
    if end.poll(0):  # what was read may be another's
        raise PeerGoneError(f"the keeper at {asking.path} has ended just now")
    if found != user:
        whose = f"of uid {found}" if found >= 0 else "not to be seen from here"
        raise PeerGoneError(
            f"the process that listened at {asking.path} (pid {pid}, uid {user}) has ended, and who has its number now "
            f"is {whose}. Nothing was ended: look for who serves there with `ss -xlp`, and end that"
        )


@shielded
def stop(*, force: bool = False, timeout: float = TIMEOUT, keeper: str | os.PathLike[str] | None = None) -> Stopped:
    """End a keeper by SIGTERM and wait for its end; without `force` only if nothing is leased when it is asked.
    Mappings of readers stay. `timeout` is in seconds."""
    # A connection of its own, so that it ends before the keeper is told to.
    with KeeperClient.connect(None if keeper is None else os.fspath(keeper), label=own_label()) as asking:
        if asking.lends:
            raise UsageError(f"{asking.path} is the socket of a program that lends, not of a keeper: end that program")
        pid = asking.server().pid
        if not pid:
            raise UnsupportedError(
                "ending a keeper", "one whose process is to be seen from here", "one of another PID namespace",
                "End it where it was started",
            )  # fmt: skip
        held = asking.statistics()
        holders = tuple(asking.holders())
        found = Stopped(asking.path, pid, False, held.versions, held.nbytes, holders)
        if holders and not force:
            return found
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            raise PeerGoneError(f"the keeper at {asking.path} has ended just now") from None
        try:
            asking.statistics()  # somebody serves there
            _check_user(process, pid, asking)
            try:
                signal.pidfd_send_signal(process, signal.SIGTERM)
            except ProcessLookupError:
                pass
            except PermissionError:
                raise AccessDeniedError(
                    f"the keeper at {asking.path} (pid {pid}) is not of uid {os.geteuid()}, who may not end it"
                ) from None
            end = select.poll()
            end.register(process, select.POLLIN)
            if not waiting(end.poll, timeout * 1000):
                raise WaitTimeoutError(
                    f"the keeper at {asking.path} (pid {pid}) was told to end, and has not within {timeout:g} s: look "
                    f"at it with `ps -fp {pid}`"
                )
        finally:
            os.close(process)
    return dataclasses.replace(found, is_stopped=True)
