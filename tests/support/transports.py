"""A process at the other end of a transport."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from tests.support.children import CHILDREN
from tests.support.deadlines import SOON


@contextlib.contextmanager
def child(work: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Connection]]:
    """Another process, and a pipe to it; ended at the end of the block."""
    ours, theirs = CHILDREN.Pipe()
    process = CHILDREN.Process(target=work, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        ours.close()
        process.join(120)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def answer(pipe: Connection) -> Any:
    assert pipe.poll(SOON), "no answer in time"
    return pipe.recv()
