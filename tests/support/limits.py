"""Limits of this process, lowered for as long as a block takes."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limited(what: int, soft: int) -> Iterator[None]:
    """Have a soft limit, such as ``resource.RLIMIT_NOFILE``, be another one."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)
