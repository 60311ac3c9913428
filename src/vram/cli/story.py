"""How a demo is told: a line for each thing that was proved, as it happens, with processes that do it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.style import Style
from rich.table import Table
from rich.text import Text

import vram

from .. import driver as drivers
from ..errors import InternalError, VramError
from ..keeper.reports import StatisticsInfo
from ..spec import Location, format_size
from .tables import printer

if TYPE_CHECKING:
    from rich.console import Console

DEADLINE = 120.0  # seconds for any answer of a child


@dataclass
class Story:
    """What was proved so far; each line is printed as it happens, and what was measured once more in the end."""

    as_json: bool
    facts: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    console: Console = field(default_factory=printer)
    measured: list[tuple[str, ...]] = field(default_factory=list)  # step, what, bytes, time, and what without this

    def tell(self, line: str, style: str = "", **facts: Any) -> None:
        """Print a line, in a rich style where there are colours."""
        self.facts |= facts
        if not self.as_json:
            text = Text(f"{time.perf_counter() - self.began:6.2f} s  ", style="dim")
            text.append(line, style=Style.parse(f"not dim {style}"))
            self.console.print(text, soft_wrap=True)
            self.console.file.flush()

    def measure(
        self, step: str, what: str, nbytes: int | None = None, seconds: float | None = None, *, without: str = ""
    ) -> None:
        """Note a row of the closing table; what it is without this library was found in the same run."""
        size = "" if nbytes is None else format_size(nbytes)
        self.measured.append((step, what, size, "" if seconds is None else duration(seconds), without))

    def close(self, proved: str, *, machine: str = "", headline: str = "") -> None:
        """Print the closing table, on which machine that was, what is to be remembered, and what it all has proved."""
        table = Table(
            box=box.ROUNDED if self.console.is_terminal and self.console.encoding.startswith("utf") else None,
            title="in short", title_justify="left", title_style="bold", header_style="bold", border_style="dim",
            caption=machine or None, caption_justify="left",
        )  # fmt: skip
        table.add_column("step", style="cyan", no_wrap=True)
        table.add_column("what")
        table.add_column("bytes", justify="right", no_wrap=True)
        table.add_column("time", justify="right", no_wrap=True, style="green")
        rows = self.measured
        if any(row[-1] for row in rows):
            table.add_column("without it", style="yellow")
        for row in rows:
            table.add_row(*row[: len(table.columns)])
        self.console.print()
        self.console.print(table)
        if headline:
            self.console.print()
            self.console.print(Text(headline, style="bold"), soft_wrap=True)
        self.console.print()
        self.console.print(Text(proved, style="bold green"), soft_wrap=True)

    def prove(self, holds: bool, claim: str) -> None:
        """Fail unless it holds."""
        if not holds:
            raise InternalError(f"the demo could not prove that {claim}")


@dataclass
class Child:
    """A process and the pipe to it."""

    process: SpawnProcess
    pipe: Connection

    def ask(self, *question: Any) -> Any:
        """Send a question, and return the answer."""
        self.pipe.send(question)
        return self.answer()

    def answer(self) -> Any:
        """Return what it says next; what went wrong there is raised here."""
        if not self.pipe.poll(DEADLINE):
            raise InternalError(f"process {self.process.pid} did not answer within {DEADLINE:g} s")
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise InternalError(f"process {self.process.pid} ended without an answer") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _work(work: Any, pipe: Connection, *arguments: Any) -> None:
    """Do a child's work; what goes wrong is the parent's to print."""
    try:
        work(pipe, *arguments)
    except Exception as error:  # noqa: BLE001  (of whatever kind: it is not lost, but sent on)
        pipe.send(VramError(f"process {os.getpid()} of the demo failed: {type(error).__name__}: {error}"))


@contextlib.contextmanager
def start_child(work: Any, *arguments: Any) -> Iterator[Child]:
    """Start a process that works with its end of a pipe; at the end of the block it has ended, or is killed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(work, theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Child(process, ours)
        process.join(DEADLINE)
    finally:
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()
        process.close()


def wait_for_leases(seconds: float = DEADLINE) -> StatisticsInfo:
    """Ask until no lease is left, at most `seconds`; return what was said last.

    Who closes a lease does not wait for the keeper's answer, and what one connection has sent may be read after what
    another one asks: the readers can be gone before the keeper has heard of it.
    """
    deadline = time.monotonic() + seconds
    while (said := vram.statistics()).leases and time.monotonic() < deadline:
        time.sleep(0.01)
    return said


def choose_device(device: str, story: Story) -> str:
    """Return where the memory of a demo is, and say why."""
    if device != "auto":
        location = Location.parse(device)
        info = drivers.get(location).device_info(location)
        if device != "host":
            story.tell(f"on {device}: {info.name}", device=device)
        return device
    location = Location("cuda", 0)
    try:
        info = drivers.get(location).device_info(location)
    except VramError as error:
        story.tell(f"--device auto: chose host memory, since for {error}", device="host")
        return "host"
    story.tell(f"--device auto: chose {location}, {info.name}", device=str(location))
    return str(location)


def resident(pid: int) -> int:
    """Return the bytes of memory that a process has."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rss(pid: int) -> str:
    """Return the same in words."""
    return format_size(resident(pid))


def duration(seconds: float) -> str:
    """Return a time in words."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def ms_since(started: float) -> str:
    """Return the time since another one, in words."""
    return f"{(time.perf_counter() - started) * 1e3:.0f} ms"
