"""Completion for shells: names of entries, from the keeper, and of benchmarks.

Other users choose names, and a completion goes into a command line through a shell script that may evaluate it. So only
names are offered that every shell takes literally, whatever the keeper answers. A shell is blocked until it has its
completions, so the wait for a keeper is short.
"""

from __future__ import annotations

import contextlib
import re
import threading

import typer  # noqa: TC002  (which looks up what it is to pass)

from ..bench import GPU_NAMES, NAMES
from ..errors import VramError

WAIT = 1.0  # seconds
MOST = 500  # names: more than anybody reads
# Without "~", which a shell replaces by a directory, and without what is no name at all, such as an option.
_PLAIN = re.compile(r"[A-Za-z0-9._@:+/][A-Za-z0-9._@:+/\-]*", re.ASCII)


def entry_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the names of entries that begin like this; none where no keeper answers in time."""
    found: list[str] = []
    path = ctx.params.get("socket")

    from ..keeper.client import client  # not within the time that the keeper has

    def ask() -> None:
        with contextlib.suppress(VramError, OSError):
            asking, after = client(path, timeout=WAIT), ""
            while len(found) < MOST:
                rows, _ = asking.page(incomplete, after)
                if not rows:
                    break
                found.extend(row.name for row in rows)
                after = rows[-1].name

    asked = threading.Thread(target=ask, name="vram: names for a shell", daemon=True)
    asked.start()
    asked.join(WAIT)
    return [name for name in found[:MOST] if name.startswith(incomplete) and _PLAIN.fullmatch(name)]


def benchmark_names(incomplete: str) -> list[str]:
    """Return the names of benchmarks that begin like this."""
    return [name for name in dict.fromkeys((*NAMES, *GPU_NAMES)) if name.startswith(incomplete)]
