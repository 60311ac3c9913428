"""``python -m vram.metrics``: serves a keeper's numbers in the foreground."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence

from ..errors import VramError
from .exporter import Exporter, parse_address


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
            host = f"[{exporter.host}]" if ":" in exporter.host else exporter.host
            print(
                f"vram metrics: http://{host}:{exporter.port}/metrics of the keeper at {exporter.keeper}",
                file=sys.stderr,
                flush=True,
            )
            with contextlib.suppress(KeyboardInterrupt):
                exporter.serve(given.parent_fd)
    except VramError as error:
        print(f"vram metrics: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
