"""The outbox of a channel: what its other end is to be told, as soon as it reads and nobody else is sending."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from ..errors import VramError, WaitTimeoutError
from .messages import MOST_SENT, Closed, Received, Unmap, Unref, encode


class Outbox(deque[tuple[str, int, int]]):
    """Short messages in their order. Finalizers put them in: nothing waits. `is_over`: the other end is gone.

    By kind: ``unmap``, a memory that was exported is not any more, and the other end is to close it; ``unmapped``, a
    memory that was to be unmapped is closed here; ``unref``, so many arrays that came under a number are done with;
    ``received``, one more array was received; ``idle``, the other end uses a memory no more, and whoever sends next
    decides whether it stays open there."""

    __slots__ = ("is_over",)

    def __init__(self) -> None:
        self.is_over = False

    def put(self, kind: str, number: int = 0, times: int = 0) -> None:
        """Have something told."""
        self.append((kind, number, times))

    def tell(self, channel: Any, idle: Callable[[int], object]) -> bool:
        """Say it all, without waiting; False if the other end does not read. One thread at a time."""
        while self:
            kind, number, _ = self[0]
            if kind == "idle":
                self.popleft()
                idle(number)  # which may put something in
                continue
            # By index: others append meanwhile. At least one of a kind, and those of the kind that follow it.
            count = 1
            while count < min(len(self), MOST_SENT) and self[count][0] == kind:
                count += 1
            some = [self[at] for at in range(count)]
            try:
                channel.send(encode(_message(kind, some)), timeout=0)
            except WaitTimeoutError:
                return False
            except (VramError, OSError):  # the end of the connection makes the other end forget everything
                self.is_over = True
                self.clear()
                return True
            for _ in some:
                self.popleft()
        return True


def _message(kind: str, some: list[tuple[str, int, int]]) -> Received | Unmap | Unref | Closed:
    if kind == "received":
        return Received(len(some))
    if kind == "unref":
        return Unref(tuple((number, times) for _, number, times in some))
    numbers = tuple(number for _, number, _ in some)
    return Unmap(numbers) if kind == "unmap" else Closed(numbers)
