"""A keeper with ceilings, to which every user may connect."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tests.support.keeper_here import serving

from vram.keeper.limits import Quotas
from vram.keeper.private import short_directory
from vram.keeper.restart import hand_over
from vram.keeper.server import KeeperServer


@contextlib.contextmanager
def keeper(**ceilings: int | None) -> Iterator[KeeperServer]:
    """A keeper in a thread of this process, to which every user may connect."""
    with short_directory() as place:
        os.chmod(place, 0o711)
        with serving(made(f"{place}/k", **ceilings)) as server:
            yield server


def made(path: str, **ceilings: int | None) -> KeeperServer:
    quotas = Quotas(**ceilings)
    return KeeperServer(path, mode=0o666, raises_limit=False, hand_over=hand_over, quotas=quotas)
