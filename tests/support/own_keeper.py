"""A keeper that belongs to one test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from tests.support.places import short_directory

from vram.keeper.client import close_client
from vram.keeper.private import KeeperProcess


@contextlib.contextmanager
def own_keeper(*options: str, at: str = "", **how: Any) -> Iterator[KeeperProcess]:
    """Run a keeper that may be killed, as this process's default; `at` is the path of one that is gone."""
    before = os.environ.get("VRAM_KEEPER")
    with short_directory() as place:
        keeper = KeeperProcess(at or f"{place}/k", options, **how)
        os.environ["VRAM_KEEPER"] = keeper.path
        try:
            yield keeper
        finally:
            if before is None:
                del os.environ["VRAM_KEEPER"]
            else:
                os.environ["VRAM_KEEPER"] = before
            close_client(keeper.path)
            keeper.kill()
