"""Extended attributes of memory: whether this kernel has them."""

from __future__ import annotations

import os

import pytest

from vram.testing.keeper import memfds

NAME = "user.test"


def refused(name: str) -> str:
    """Return why an extended attribute of this name cannot be set, or nothing."""
    with memfds(1) as (fd,):
        try:
            os.setxattr(fd, name, b"1")
        except OSError as error:
            return f"setxattr({name!r}): {error.strerror}"
    return ""


needs_attributes = pytest.mark.skipif(bool(refused(NAME)), reason=refused(NAME))  # memory has them from Linux 6.6 on
