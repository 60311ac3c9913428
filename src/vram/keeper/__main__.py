"""``python -m vram.keeper``: a keeper in the foreground, without anything that a keeper does not need."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import UsageError, VramError
from .catalogue import CLAIM_TIMEOUT
from .limits import OPTIONS, Quotas, parse_limit, written_limit
from .rules import MAX_TTL
from .server import PATIENCE, KeeperServer

if TYPE_CHECKING:
    from .connection import Connection
    from .messages import Takeover
    from .takeover import Succession


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a keeper until it is told to stop; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m vram.keeper", description="Keep shared memory alive when its maker is gone."
    )
    parser.add_argument("--socket", metavar="PATH", help="where to listen (default: VRAM_KEEPER, or this user's)")
    parser.add_argument(
        "--mode", help="permissions of the socket, octal: who may connect may attach (default: 0600, or kept)"
    )
    parser.add_argument("--group", help="group of the socket")
    for option in OPTIONS:
        metavar = "SIZE" if option.limit.is_size else "N"
        parser.add_argument(option.flag, dest=option.field, metavar=metavar, help=option.help)
    parser.add_argument(
        "--patience", metavar="SECONDS", type=float, default=PATIENCE, help="disconnect who keeps it waiting for longer"
    )
    parser.add_argument(
        "--claim-timeout",
        metavar="SECONDS",
        help=f"after which the claim to publish a name passes to the next who waits (default: {CLAIM_TIMEOUT:g})",
    )
    parser.add_argument(
        "--takeover",
        action="store_true",
        help="take over from the keeper that runs, if one does, with its limits unless others are given",
    )
    parser.add_argument("--ready-fd", metavar="FD", type=int, default=-1, help="write the path here once it serves")
    parser.add_argument("--parent-fd", metavar="FD", type=int, default=-1, help="stop when this reads end of file")
    parser.add_argument(
        "--directory-fd",
        metavar="FD",
        type=int,
        default=-1,
        help="the socket's directory, locked, made for this keeper alone: it is removed in the end",
    )
    given = parser.parse_args(arguments)
    try:
        mode = None if given.mode is None else int(given.mode, 8)
    except ValueError:
        mode = -1
    if mode is not None and not 0 <= mode <= 0o777:
        parser.error(f"--mode {given.mode!r} is not an octal mode such as 0660")

    succession: Succession | None = None

    def ready() -> None:
        if given.ready_fd >= 0:
            os.write(given.ready_fd, os.fsencode(server.path) + b"\n")
            os.close(given.ready_fd)
        else:
            if succession is not None:
                _say(_told(succession))
            _say(f"serving at {server.path} (pid {os.getpid()}); Ctrl-C or SIGTERM ends it")

    try:
        limits = {
            option.field: parse_limit(getattr(given, option.field), option.flag)
            for option in OPTIONS
            if getattr(given, option.field) is not None
        }
        chosen = list(limits)
        claim_timeout = CLAIM_TIMEOUT
        if given.claim_timeout is not None:
            claim_timeout = parse_seconds(given.claim_timeout, "--claim-timeout")
            chosen.append("claim_timeout")
        server = KeeperServer(
            given.socket,
            mode=mode,
            group=given.group,
            quotas=Quotas(**limits),
            patience=given.patience,
            claim_timeout=claim_timeout,
            directory_fd=given.directory_fd,
            hand_over=_hand_over,
        )
        if given.takeover:
            from .takeover import take_over

            succession = take_over(server, chosen)
        server.serve(ready, parent_fd=given.parent_fd)
    except VramError as error:
        print(f"vram keep: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"vram keep: {error}", file=sys.stderr)
        return 1
    finally:
        if given.directory_fd >= 0:  # whoever made it may be dead. Not if another keeper took over: it is not empty
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(given.socket))
    return 0


def _hand_over(server: KeeperServer, connection: Connection, request: Takeover) -> None:
    from .takeover import hand_over  # only the keeper that is replaced needs it

    hand_over(server, connection, request)


def parse_seconds(text: str, option: str) -> float:
    """Read a number of seconds, above 0 and at most ten years.

    Raises
    ------
    UsageError
        For anything else.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TTL:
        raise UsageError(f"{option} {text[:40]!r} is not a number of seconds: above 0 and at most {MAX_TTL:.0f}")
    return seconds


def _told(succession: Succession) -> str:
    """Say which limits hold after a takeover, and which of them are other ones than before."""
    who = f"took over from pid {succession.pid or 'unknown'}"
    before, now = succession.before, succession.now
    if before is None:
        return f"{who}, an older version that does not hand over its limits: those of this command line hold"
    parts = []
    for option in OPTIONS:
        was, limit = (getattr(quotas, option.field) for quotas in (before, now))
        said = f"{option.flag} {written_limit(option, limit)}"
        if was != limit:
            parts.append(f"{said} (was {written_limit(option, was)})")
        elif limit != getattr(Quotas(), option.field):
            parts.append(f"{said} as before")
    was_seconds, seconds = succession.claims_before, succession.claims_now
    if was_seconds is not None and was_seconds != seconds:
        parts.append(f"--claim-timeout {seconds:g} (was {was_seconds:g})")
    elif seconds != CLAIM_TIMEOUT:
        parts.append(f"--claim-timeout {seconds:g}{'' if was_seconds is None else ' as before'}")
    return f"{who}; limits: {', '.join(parts) or 'as before'}"


def _say(line: str) -> None:
    """Print for whoever looks. What cannot be printed is no reason for a keeper to end: it may hold memory already."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # AttributeError: there is no standard output
        print(f"vram keep: {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
