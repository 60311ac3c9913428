"""Pieces of one copy, taken by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from ..lifetime import let_in, wait_for
from ..memory.long_work import current

P = TypeVar("P", bound=tuple[int, ...])


class Pieces(Generic[P]):
    """Pieces of a copy that several threads take, until there are none or one failed. The last number of each is its
    bytes, which count as progress when it is taken. `done` is set when no thread is at any of them and none will be."""

    def __init__(self, pieces: Iterable[P]) -> None:
        waiting = list(pieces)
        self.pieces = len(waiting)
        self._pieces = iter(waiting)
        self._lock = threading.Lock()
        self._stopped = False
        self.is_cancelled = False
        self._inside = 0  # threads that may be at a piece
        self.done = threading.Event()
        self.error: BaseException | None = None
        self._progress = current()  # of who waits for this

    def share_out(self, act: Callable[[int, Pieces[P]], None], most: int, name: str) -> None:
        """Have the pieces copied by so many threads at most, each with a number, and wait until all are."""
        count = min(most, self.pieces)
        if count < 2:  # a small tensor: not worth a thread
            act(0, self)
            return
        for number in range(count):
            try:
                threading.Thread(target=self.run, args=(act, number), name=name, daemon=True).start()
            except RuntimeError as error:  # no thread is to be had
                self.fail(error)
        wait_for(self.done)

    def run(self, act: Callable[[int, Pieces[P]], None], number: int) -> None:
        """Take pieces, and whatever goes wrong with them is the error."""
        with self._lock:
            if self._stopped:
                return
            self._inside += 1
        try:
            act(number, self)
        except BaseException as error:  # noqa: BLE001  (raised where the work was given)
            self.fail(error)
        finally:
            with self._lock:
                self._inside -= 1
                self._end()  # there are no more pieces, or something failed

    def fail(self, error: BaseException) -> None:
        """Have this error raised, unless another came before, and nobody take another piece."""
        with self._lock:
            self.error = self.error or error
            self._end()

    def next(self) -> P | None:
        """Take a piece; None where there are no more, or nobody is to take one."""
        let_in()  # where the caller copies all of them itself
        with self._lock:
            piece = None if self._stopped else next(self._pieces, None)
            if piece is not None and self._progress is not None:
                self._progress.done += piece[-1]
            return piece

    def stop(self) -> None:
        """Have nobody take another piece, nor copy on what was read of one."""
        self.is_cancelled = True
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._stopped = True
        if not self._inside:
            self.done.set()
