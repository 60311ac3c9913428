"""Where the processes of a group find each other: who they are said to be, at which path, and the way there."""

from __future__ import annotations

import os
import time
import zlib
from functools import partial

from ..errors import PeerGoneError, UnsupportedError, UsageError, WaitTimeoutError
from ..keeper.paths import absolute, check_server, default_path, prepare_directory
from ..lifetime import waiting
from ..sharing.channel import Channel, check_free, check_path
from ..spec import check_timeout
from .hub import Hub
from .messages import MAX_RANKS
from .spoke import until

_RETRY = 0.002  # seconds between two attempts to reach rank 0, which is not there yet


def check_group(name: object, rank: object, size: object) -> tuple[str, int, int]:
    """Return all three if a group may be called that and have such a rank; else raise UsageError."""
    if not isinstance(name, str) or not 0 < len(name) <= 64 or not all(c.isalnum() or c in "-_." for c in name):
        raise UsageError(f"a group is called by 1 to 64 letters, digits, '-', '_' and '.', not {name!r:.80}")
    if type(size) is not int or not 1 <= size <= MAX_RANKS:
        raise UsageError(f"size must be an int from 1 to {MAX_RANKS}, not {size!r:.40}")
    if type(rank) is not int or not 0 <= rank < size:
        raise UsageError(f"rank must be an int from 0 to {size - 1} (size is {size}), not {rank!r:.40}")
    return name, rank, size


def seconds(timeout: object) -> float:
    """Return how long to wait for other ranks; raise :class:`UsageError` for ever, or for what is no time."""
    given = check_timeout(timeout)
    if given is None or given == float("inf"):
        raise UsageError("a group waits for other ranks for a number of seconds, and not for ever")
    return given


def from_environment() -> tuple[str, int, int]:
    """Return name, rank and size of the group of the processes that ``torchrun`` started on this machine.
    Raises UsageError if a variable is missing or no number, or there are processes on other machines."""
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    here = _number("LOCAL_WORLD_SIZE", size)
    if here != size:
        raise UsageError(f"{here} of {size} processes are on this machine: a group is of one machine")
    run = [os.environ.get(key, "") for key in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    return f"env-{zlib.crc32(repr(run).encode()):08x}", rank, size


def from_torch_group(group: object) -> tuple[str, int, int]:
    """Return name, rank and size for a ``torch.distributed`` group; each of its processes calls this, as rank 0 makes
    up the name. Raises UsageError if processes are of other machines or users, or this process is not in the group."""
    try:
        import torch.distributed as dist
    except ImportError:
        raise UnsupportedError(
            "a group of torch's", "torch", "no such package", "Install it: pip install '.[torch]' in a clone of vram"
        ) from None
    if not dist.is_available() or not dist.is_initialized():
        raise UsageError("torch.distributed is not initialised: call torch.distributed.init_process_group before")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise UsageError("this process is not in that group of torch's")
    said: list[tuple[str, int, str]] = [("", 0, "")] * size
    token = f"torch-{os.urandom(8).hex()}"
    waiting(partial(dist.all_gather_object, said, (_machine(), os.geteuid(), token), group=group))
    others = [other for other, one in enumerate(said) if one[:2] != said[rank][:2]]
    if others:
        raise UsageError(
            f"rank {others[0]} of torch's group is on another machine than rank {rank}, or of another user: a group "
            f"is of one machine and user; make a group of torch's of those that are here (torch.distributed.new_group)"
        )
    return said[0][2], rank, size


def _machine() -> str:
    """Return what tells this machine from others, and from itself before it was started again."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _number(key: str, otherwise: int | None = None) -> int:
    said = os.environ.get(key)
    if said is None and otherwise is not None:
        return otherwise
    try:
        return int(said or "")
    except ValueError:
        raise UsageError(
            f"{key} is {said!r:.40} in the environment, and not a number: start the processes with torchrun, or name "
            f"rank= and size="
        ) from None


def meeting_path(name: str, at: str | os.PathLike[str] | None) -> tuple[str, bool]:
    """Return where a group meets, and whether somebody chose it."""
    named = os.path.join(os.path.dirname(default_path()), f"group-{name}.sock") if at is None else os.fsdecode(at)
    path = absolute(named, "the group's socket")
    check_path(path)
    return path, at is not None


def make_hub(path: str, is_chosen: bool, name: str, size: int) -> Hub:
    """Return the hub of a group, for rank 0."""
    prepare_directory(path, is_chosen)
    return Hub(path, name, size)


def connect(path: str, is_chosen: bool, deadline: float, name: str) -> Channel:
    """Connect to the hub, which may have yet to begin, until the deadline (``time.monotonic``).
    Raises WaitTimeoutError, or AccessDeniedError if an untrusted user listens there."""
    check_free(8, "meeting the ranks of a group")
    while True:
        try:
            return Channel.connect(path, until(deadline), partial(check_server, path, is_chosen))
        except PeerGoneError:
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"rank 0 of the group {name!r} did not come to {path} in time, or the group had met there before"
                ) from None
        waiting(time.sleep, _RETRY)
