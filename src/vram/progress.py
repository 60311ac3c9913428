"""A bar for long work, on a terminal: how much of it is done, how fast it goes, and how long it will take."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .memory.long_work import Work, watching
from .spec import format_size, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_SHORT = 0.5  # seconds: what takes no longer is over before it could be read
_PAUSE = 0.1  # seconds between two looks
_OVER = 5.0  # seconds that a rate is of
_WIDEST = 40  # characters of the bar itself


@contextlib.contextmanager
def show_progress() -> Iterator[None]:
    """Show how far long work has come, for the length of a block: on stderr, if that is a terminal, else nothing.

    One line says what is done, how much of it, how fast, and how long it will take; it goes when the work is done.
    Shown is what takes longer than half a second: :func:`vram.publish_file`, :func:`vram.sleep` to a directory and
    :func:`vram.wake` from there, :func:`vram.park` and ``vram.attach(wake=True)``, :func:`vram.replicate`, and
    ``wait()`` of what :func:`vram.prepare` returned. In any thread of this process; the line is of the oldest that is
    under way.

    Examples
    --------
    >>> with vram.show_progress():
    ...     vram.publish_file("model", "model.safetensors", device="cuda:0")  # doctest: +SKIP
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if console.is_dumb_terminal:  # which cannot go back to the beginning of a line
        yield
        return
    over = threading.Event()
    with watching() as under_way:
        # A daemon: whatever keeps this block from its end does not keep the process. It leaves no cursor hidden.
        drawing = threading.Thread(target=_draw, args=(console, under_way, over), name="vram: progress", daemon=True)
        drawing.start()
        try:
            yield
        finally:
            over.set()
            drawing.join()


def _draw(console: Console, under_way: list[Work], over: threading.Event) -> None:
    shown: Work | None = None
    rate, last = Rate(), ""
    # A terminal may be gone; then the bar is lost.
    with contextlib.suppress(OSError, ValueError):
        while not over.wait(_PAUSE):
            now = time.monotonic()
            work = next((one for one in list(under_way) if now - one.began > _SHORT), None)
            if work is not shown:
                shown, rate, last = work, Rate(), ""
                _write(console, None)
            if work is not None:
                rate.add(work.look(), now)
                line = bar(work, rate, console.width, plain=not console.encoding.startswith("utf"))
                if line.plain != last:
                    last = line.plain
                    _write(console, line)
        if shown is not None:
            _write(console, None)


def _write(console: Console, line: Text | None) -> None:
    """Draw over the line that the cursor is in, and leave it at the beginning."""
    with console.capture() as captured:
        if line is not None:
            console.print(line, end="", soft_wrap=True)
    console.file.write(f"\r\x1b[K{captured.get()}\r" if line is not None else "\r\x1b[K")
    console.file.flush()


class Rate:
    """How fast something goes, over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, done: int, now: float) -> None:
        """Note how many bytes are done, and when."""
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > _OVER:
            self._seen.popleft()

    def __float__(self) -> float:
        """Bytes a second; 0 where nothing is known yet."""
        if len(self._seen) < 2:
            return 0.0
        (began, before), (now, done) = self._seen[0], self._seen[-1]
        return (done - before) / (now - began) if now > began else 0.0


def bar(work: Work, rate: Rate, width: int, *, plain: bool = False) -> Text:
    """Return the line for some work, of at most `width` characters; `plain` where a terminal has ASCII alone."""
    from rich.text import Text

    done, speed = work.look(), float(rate)
    share = done / work.total if work.total else 1.0
    what = printable(work.what)  # it may name what others wrote
    if plain:
        what = what.encode("ascii", "replace").decode()
    said = f"{share:4.0%}  {format_size(done)} of {format_size(work.total)}"
    if speed > 0:
        said += f"  {format_size(int(speed))}/s  {_time((work.total - done) / speed)} left"
    room = width - 1 - len(said) - 4  # the last column stays empty: some terminals would go on in the next line
    if room < 4:
        return Text(said[: width - 1])
    what = what if len(what) <= (most := max(room - _WIDEST, room // 2)) else what[: most - 3] + "..."
    length = min(_WIDEST, room - len(what))
    full = round(length * share)
    line = Text(f"{what}  ", overflow="crop", no_wrap=True)
    line.append(("#" if plain else "━") * full, "green")
    line.append(("-" if plain else "━") * (length - full), "" if plain else "bright_black")
    line.append(f"  {said}")
    return line


def _time(seconds: float) -> str:
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole // 60 % 60:02} h"
