"""Homes of other users, where their keys are."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  (what a child of another user looks addresses up by, and may not read)
import os
from collections.abc import Callable, Iterator

from tests.support.other_users import OTHER
from tests.support.places import short_directory


@contextlib.contextmanager
def home_of(uid: int) -> Iterator[str]:
    with short_directory() as place:
        os.chmod(place, 0o711)
        os.mkdir(f"{place}/own", 0o700)
        os.chown(f"{place}/own", uid, uid)
        yield f"{place}/own"


@contextlib.contextmanager
def child(act: Callable[[int], None], place: str) -> Iterator[None]:
    """Run something as another user meanwhile; it says when it is ready, and is killed at the end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(OTHER, OTHER, OTHER)
            os.setresuid(OTHER, OTHER, OTHER)
            os.environ["XDG_CONFIG_HOME"] = place
            act(writer)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            assert pipe.read(1) == b"r", "it did not start"
        yield
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
