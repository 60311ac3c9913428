"""Draws vram-demo.svg: ``vram demo`` as a terminal shows it. ``python docs/pictures/draw_demo.py``, in some seconds.

The demo runs on a terminal of its own, and its output is drawn.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 128


def main() -> None:
    """Run it, and draw what it wrote."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("vram-demo.svg"))
    ours, theirs = pty.openpty()
    code = "import sys; sys.argv[:] = ['vram', 'demo']; from vram.cli import main; main()"
    demo = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        env={**os.environ, "COLUMNS": str(WIDTH), "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    try:
        while part := os.read(ours, 65536):
            said += part
    except OSError:  # nobody has the other end any more
        pass
    if demo.wait():
        raise SystemExit(said.decode())
    console = Console(record=True, width=WIDTH, force_terminal=True, file=io.StringIO(), markup=False, highlight=False)
    console.print(Text("$ vram demo", "bold"))
    shown = re.sub(r"(Linux \d+\.\d+)[^ ,]*", r"\1", said.decode())  # whose build of it says nothing to others
    for line in shown.replace("\r\n", "\n").splitlines():
        console.print(Text.from_ansi(line))
    out.write_text(console.export_svg(title="vram demo"))
    print(out)


if __name__ == "__main__":
    main()
