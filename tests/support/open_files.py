"""A keeper in this process, and which descriptors are open."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from tests.support.keeper_here import serving

from vram.keeper import admission, listing, reports  # noqa: F401  (what becomes another user may not be able to read it then)
from vram.keeper.private import short_directory
from vram.keeper.server import KeeperServer


@contextlib.contextmanager
def keeper_here(**options: Any) -> Iterator[KeeperServer]:
    """A keeper in a thread of this process, for a look at its memory."""
    with short_directory() as place, serving(KeeperServer(f"{place}/k", raises_limit=False, **options)) as server:
        yield server


def is_open(fd: int) -> bool:
    """Whether this process has such a descriptor."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
