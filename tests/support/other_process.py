"""A driver in another process, told call by call what to do: what one process alone cannot show.

The process is spawned, never forked. Whatever it is asked has a deadline, after which it is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

from tests.support.deadlines import SOON

from vram.driver.protocol import Driver


class OtherProcess:
    """A process with a driver of its own, which `make` returns there: it is pickled. Use it in a ``with`` block."""

    def __init__(self, make: Callable[[], Any], patience: float = SOON) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._patience = patience
        self._process = context.Process(target=_serve, args=(there, make), daemon=True)
        try:
            self._process.start()
            self._answer()
        except BaseException:
            self.close()
            raise
        finally:
            there.close()

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the driver there, and return or raise what it returns or raises."""
        self._pipe.send(("call", method, arguments, options))
        return self._answer()

    def pass_fd(self, fd: int) -> int:
        """Pass a descriptor, and return its number there; it stays open there until :meth:`close_fd`."""
        self._pipe.send(("fd",))
        reduction.send_handle(self._pipe, fd, self._process.pid)
        return int(self._answer())

    def take_fd(self, fd: int) -> int:
        """Return a descriptor of one that is open there; the caller owns and closes it, and it stays open there."""
        self._pipe.send(("take", fd))
        if not self._pipe.poll(self._patience):
            raise TimeoutError(f"the other process passed no descriptor in {self._patience:.0f} s")
        found = reduction.recv_handle(self._pipe)
        os.set_inheritable(found, False)
        self._answer()
        return found

    def close_fd(self, fd: int) -> None:
        """Close a descriptor there."""
        self._pipe.send(("close", fd))
        self._answer()

    def read(self, address: int, nbytes: int) -> bytes:
        """Return the bytes at an address there, as the driver copies them out."""
        self._pipe.send(("read", address, nbytes))
        return bytes(self._answer())

    def write(self, address: int, data: bytes) -> None:
        """Put bytes at an address there."""
        self._pipe.send(("write", address, data))
        self._answer()

    def close(self) -> None:
        """End the process; kill it if it does not go. Idempotent."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        if self._process.pid is None:
            return
        self._process.join(SOON)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(SOON)

    def _answer(self) -> Any:
        if not self._pipe.poll(self._patience):
            self._process.kill()
            raise TimeoutError(f"the other process did not answer in {self._patience:.0f} s")
        try:
            failed, value = self._pipe.recv()
        except EOFError:
            self._process.join(SOON)
            raise ConnectionError(f"the other process ended with status {self._process.exitcode}") from None
        if failed:
            raise value
        return value

    def __enter__(self) -> OtherProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, make: Callable[[], Driver]) -> None:
    made: list[Driver] = []
    _attempt(pipe, lambda: made.append(make()))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while (request := pipe.recv()) is not None:
            _attempt(pipe, partial(_do, made[0], pipe, *request))


def _attempt(pipe: Connection, call: Callable[[], Any]) -> None:
    try:
        answer = False, call()
    except Exception as error:
        answer = True, error
    pipe.send(answer)


def _do(driver: Any, pipe: Connection, what: str, *given: Any) -> Any:
    if what == "call":
        method, arguments, options = given
        return getattr(driver, method)(*arguments, **options)
    if what == "fd":
        return reduction.recv_handle(pipe)
    if what == "take":
        return reduction.send_handle(pipe, given[0], os.getppid())
    if what == "close":
        return os.close(given[0])
    address, extra = given
    if what == "write":
        return driver.copy_in(address, memoryview(extra))
    found = bytearray(extra)
    driver.copy_out(memoryview(found), address)
    return bytes(found)
