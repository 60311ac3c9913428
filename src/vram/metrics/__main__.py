"""``python -m vram.metrics``: serves a keeper's numbers in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from ..errors import VramError
from ..nodes.address import parse_address, show_address
from .exporter import Exporter


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vram.metrics", description="Serve a keeper's numbers.")
    parser.add_argument("--listen", metavar="HOST:PORT", default="127.0.0.1:9464", help="where to answer scrapes")
    parser.add_argument("--socket", metavar="PATH", help="the keeper's socket (default: VRAM_KEEPER, or this user's)")
    parser.add_argument("--parent-fd", metavar="FD", type=int, default=-1, help="stop when this reads end of file")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.closing(Exporter(*parse_address(given.listen), given.socket)) as exporter:
            where = show_address((exporter.host, exporter.port))
            print(f"vram metrics: http://{where}/metrics of the keeper at {exporter.keeper}", file=sys.stderr)
            with contextlib.suppress(KeyboardInterrupt):
                if given.parent_fd < 0:
                    signal.pause()
                else:
                    os.read(given.parent_fd, 1)  # nobody writes to it
    except VramError as error:
        print(f"vram metrics: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
