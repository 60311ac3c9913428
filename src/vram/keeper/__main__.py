"""``python -m vram.keeper``: a keeper in the foreground, without anything that a keeper does not need."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..errors import VramError
from ..spec import parse_size
from .server import PATIENCE, KeeperServer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a keeper until it is told to stop; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m vram.keeper", description="Keep shared memory alive when its maker is gone."
    )
    parser.add_argument("--socket", metavar="PATH", help="where to listen (default: VRAM_KEEPER, or this user's)")
    parser.add_argument("--mode", default="0600", help="permissions of the socket, octal: who may connect may attach")
    parser.add_argument("--group", help="group of the socket")
    parser.add_argument("--max-bytes", metavar="SIZE", help='most memory to keep, such as "64GiB"')
    parser.add_argument("--max-entries", metavar="N", type=int, help="most names to keep")
    parser.add_argument("--max-bytes-per-user", metavar="SIZE", help="the same for each user but this one")
    parser.add_argument("--max-entries-per-user", metavar="N", type=int, help="the same for each user but this one")
    parser.add_argument(
        "--patience", metavar="SECONDS", type=float, default=PATIENCE, help="disconnect who keeps it waiting for longer"
    )
    parser.add_argument("--takeover", action="store_true", help="take over from the keeper that runs, if one does")
    parser.add_argument("--ready-fd", metavar="FD", type=int, default=-1, help="write the path here once it serves")
    parser.add_argument("--parent-fd", metavar="FD", type=int, default=-1, help="stop when this reads end of file")
    given = parser.parse_args(arguments)
    try:
        mode = int(given.mode, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        parser.error(f"--mode {given.mode!r} is not an octal mode such as 0660")

    def ready() -> None:
        if given.ready_fd >= 0:
            os.write(given.ready_fd, os.fsencode(server.path) + b"\n")
            os.close(given.ready_fd)
        else:
            print(f"vram keep: serving at {server.path} (pid {os.getpid()}); Ctrl-C or SIGTERM ends it", flush=True)

    try:
        server = KeeperServer(
            given.socket,
            mode=mode,
            group=given.group,
            max_bytes=None if given.max_bytes is None else parse_size(given.max_bytes, what="--max-bytes"),
            max_entries=given.max_entries,
            max_bytes_per_user=(
                None
                if given.max_bytes_per_user is None
                else parse_size(given.max_bytes_per_user, what="--max-bytes-per-user")
            ),
            max_entries_per_user=given.max_entries_per_user,
            patience=given.patience,
        )
        if given.takeover:
            from .takeover import take_over

            take_over(server)
        server.serve(ready, parent_fd=given.parent_fd)
    except VramError as error:
        print(f"vram keep: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"vram keep: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
