"""Run something as another user. By fork, since that user may not be able to read this interpreter's files.

What runs in the child must have been imported before.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vram.keeper.server import KeeperServer

# Workers of one run have users of their own: the kernel counts descriptors in flight and locked memory by user.
OTHER = 4242 + 16 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be other users")


def as_user(uid: int, act: Callable[[], Any]) -> Any:
    """Return what `act` returns, or the exception it raises, in a child that belongs to `uid`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _become(uid)
            try:
                result = act()
            except BaseException as error:
                result = type(error), str(error)
            os.write(writer, pickle.dumps(result))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(said)


@contextlib.contextmanager
def keeper_of(uid: int, path: str, *, descriptors: int | None = None, **options: Any) -> Iterator[int]:
    """Run a keeper as `uid`, which may have so many descriptors; yield its pid."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            if descriptors is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, descriptors), descriptors))
            _become(uid)
            KeeperServer(path, **options).serve(lambda: os.write(writer, b"r") and None)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            assert pipe.read(1) == b"r", "the keeper did not start"
        yield child
    finally:
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)


def _become(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
