"""A process that does not answer, and one that was killed and does not go.

At the sockets of the latter nobody serves any more, and they stay open: SIGKILL ends a thread once it comes back from
the kernel. One that closes a file of a FUSE mount comes back when the server of that mount answers or dies; until then
all descriptors of its process stay open. A socket of it listens on, and its clients hear of no end.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..sharing.channel import Credentials

__all__ = ["silent_words", "stuck_words", "was_killed"]

_EXITING = 0x4  # PF_EXITING of <linux/sched.h>, among the flags in /proc/PID/stat
_KILLED = 1 << 8  # SIGKILL, number 9, among the pending signals of a thread
_DEAD = ("Z", "X")


def was_killed(pid: int | None) -> bool:
    """Whether a process was killed, all of it, and is not gone yet because a thread is still in the kernel.

    Parameters
    ----------
    pid : int or None
        As this process's PID namespace numbers it; None where that cannot see it.

    Notes
    -----
    A leader that is a zombie is not enough: it may have ended alone, and the other threads serve on. Nor does a process
    that is a zombie altogether, or that is not there, say anything about a socket: it has closed its own, and who still
    listens on it is another process that has it too, as after a takeover whose successor died.

    The pid of a process that this is true of cannot have been given to another one: it is free once the last thread is.
    """
    if not pid:
        return False
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # mounted for another PID namespace
            return False
        threads = os.listdir(f"/proc/{pid}/task")
        states = [_state_of_killed(f"/proc/{pid}/task/{thread}") for thread in threads]
        # Again: a thread that ends by itself may have started another one just before.
        is_whole = set(os.listdir(f"/proc/{pid}/task")) <= set(threads)
    except (OSError, ValueError, IndexError, StopIteration):  # gone meanwhile, or not for us to see
        return False
    return is_whole and all(states) and any(state not in _DEAD for state in states)


def stuck_words(path: str, pid: int | None) -> str:
    """Say that what served at a path was killed and is not gone, and what to do."""
    return (
        f"the keeper at {path}, pid {pid}, was killed and is stuck in closing what it was sent: its sockets stay open, "
        f"and nobody answers. Start a new one with `vram keep --socket {path}` and publish again"
    )


def silent_words(who: Credentials) -> str:
    """Say who it is that does not answer, and what to do."""
    if not who.pid:  # in another PID namespace
        return f"It is of uid {who.uid}, a process that is not to be seen from here"
    try:
        lives = os.stat(f"/proc/{who.pid}").st_uid == who.uid
        with open(f"/proc/{who.pid}/stat", "rb") as file:
            stopped = file.read().rsplit(b")", 1)[1].split()[0] in (b"T", b"t")
    except OSError:  # gone, or not for us to see
        lives = stopped = False
    if not lives:  # it may have left the socket to another process, and its number may be anybody's soon
        return (
            f"Process {who.pid} of uid {who.uid} began to listen there, and is not to be seen: `ss -xlp` says which "
            f"processes have the socket"
        )
    if stopped:
        return f"It is pid {who.pid} of uid {who.uid}, and was stopped: `kill -CONT {who.pid}` has it go on"
    return (
        f"It is pid {who.pid} of uid {who.uid}: look at it with `ps -fp {who.pid}`, end it with "
        f"`kill {who.pid}`, which ends what it keeps, too"
    )


def _state_of_killed(thread: str) -> str:
    """Return the state of a thread that is dead, ending, or ends once it comes back from the kernel; else nothing."""
    with open(f"{thread}/stat", "rb") as file:
        fields = file.read().rsplit(b")", 1)[1].split()  # the name before it may be anything
    state, flags = fields[0].decode(), int(fields[6])
    if state in _DEAD or flags & _EXITING:
        return state
    with open(f"{thread}/status", "rb") as file:
        pending = next(line for line in file if line.startswith(b"SigPnd:"))
    return state if int(pending.split()[1], 16) & _KILLED else ""
