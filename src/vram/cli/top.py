"""``vram top``: a live screen with the rates, latencies, memory and entries of a keeper."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..errors import UsageError, VramError
from ..keeper import messages as m
from ..keeper.client import KeeperClient
from ..keeper.paths import find_path
from ..keeper.reports import EntryInfo, StatisticsInfo, access_of
from ..metrics.rates import Rate, rates, shape
from ..spec import format_count, format_size, printable
from .tables import format_age

MOST: Final = 2000  # entries that one look reads, in pages of about fifty that the keeper takes 0.3 ms for
_KEPT, _BARS = 240, 60  # measurements; characters of a line of bars

_LEAST = {"version": 60, "device": 80, "held": 100, "uid": 90, "age": 50, "state": 80}  # width that a column needs

# The columns: what an entry shows there, and what to sort by. The largest and the newest come first.
_COLUMNS: Final[dict[str, tuple[Callable[[EntryInfo], str], Callable[[EntryInfo], Any]]]] = {
    "name": (lambda row: printable(row.name), lambda row: row.name),
    "version": (lambda row: str(row.version), lambda row: -row.version),
    "size": (lambda row: format_size(row.nbytes), lambda row: -row.nbytes),
    "leases": (lambda row: str(row.leases), lambda row: -row.leases),
    "held": (lambda row: format_size(row.held_bytes) if row.leases else "-", lambda row: -row.held_bytes),
    "device": (lambda row: _devices(row), lambda row: row.devices[:1]),
    "uid": (lambda row: str(row.owner), lambda row: row.owner),
    "age": (lambda row: format_age(row.age), lambda row: row.age),
    "state": (access_of, access_of),
}


def run_top(socket: str | None, *, interval: float, sort: str, once: bool) -> None:
    """Show a keeper until q or Ctrl-C; with `once`, print what it looks like over one interval (seconds)."""
    if sort not in _COLUMNS:
        raise UsageError(f"--sort {sort!r:.40} is no column; there are {', '.join(_COLUMNS)}")
    screen = Screen(find_path(socket)[0], sort)
    console = Console(markup=False, emoji=False, highlight=False)
    if once:
        screen.look()
        time.sleep(interval)
        screen.look()
        if screen.trouble:
            raise VramError(screen.trouble)
        if not console.is_terminal:
            console.width = 120
        console.print(Group(*screen.head(), screen.table(MOST)))
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("vram top needs a terminal to draw on and to read keys from; --once prints one table anywhere")
    live = Live(screen, console=console, screen=True, auto_refresh=False)
    with contextlib.suppress(KeyboardInterrupt), _keys():
        try:  # no with block: whatever comes while it starts is to leave the terminal as it was, too
            live.start()
            _show(live, screen, interval)
        finally:
            live.stop()


def _show(live: Live, screen: Screen, interval: float) -> None:
    """Draw a screen again and again, and obey keys."""
    while True:
        screen.look()
        due = time.monotonic() + interval
        while (left := due - time.monotonic()) > 0:
            live.refresh()
            if select.select([0], [], [], left)[0]:
                pressed = os.read(0, 1)
                if pressed in (b"q", b""):
                    return
                if pressed == b"s":
                    screen.sort_by_next()


class Screen:
    """The last answers of a keeper, and how they are drawn."""

    def __init__(self, path: str, sort: str) -> None:
        self.path, self.sort, self.trouble = path, sort, ""
        self._client: KeeperClient | None = None
        self._rows: list[EntryInfo] = []
        self._held: StatisticsInfo | None = None
        self._done: tuple[float, m.Measurements] | None = None
        self._rates: dict[str, Rate] = {}
        self._history: dict[str, deque[float]] = {}

    def look(self) -> None:
        """Ask the keeper; if it does not answer, keep the last answers and say why in `trouble`."""
        try:
            if self._client is None:
                self._client = KeeperClient.connect(self.path, label="vram top")
            held, done = self._client.statistics(), self._client.measure()
            found: list[EntryInfo] = []
            after = ""
            while len(found) < MOST:
                rows, more = self._client.page("", after)
                found += rows
                if not more:
                    break
                after = rows[-1].name
        except (VramError, OSError) as error:
            client, self._client = self._client, None
            if client is not None:
                client.close()
            self.trouble = " ".join(str(error).split())
            return
        self.trouble, self._held, self._rows = "", held, found
        then, before = self._done or (0.0, None)
        self._done = time.monotonic(), done
        self._rates = rates(before, done, self._done[0] - then)
        values = {kind: rate.per_second for kind, rate in self._rates.items()}
        for name, value in {**values, "errors": self._rates[""].errors, "bytes": held.nbytes}.items():
            self._history.setdefault(name, deque(maxlen=_KEPT)).append(value)

    def sort_by_next(self) -> None:
        """Sort by the next column."""
        names = list(_COLUMNS)
        self.sort = names[(names.index(self.sort) + 1) % len(names)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head = self.head()
        yield from head
        room = max(1, options.size.height - len(head) - 2)
        yield self.table(room, options.max_width)
        total = 0 if self._held is None else self._held.entries
        shown = min(room, len(self._rows))
        sorted_ = f"sorted by {self.sort}" + (f" of the first {MOST:,}" if len(self._rows) < total else "")
        yield Text(f"{shown:,} of {format_count(total, 'entry', 'entries')}, {sorted_}   s sort  q quit", style="dim")

    def head(self) -> list[Text]:
        """Return the lines above the table."""
        title, held = Text("vram top  ", style="bold"), self._held
        if self.trouble:
            title.append(f"{'' if held is None else '(as it was seen last) '}{printable(self.trouble)}", "bold red")
        if held is None or self._done is None:
            return [title]
        if not self.trouble:
            about = f"{held.keeper_version}, pid {held.pid}, up {format_age(held.uptime)}, {printable(self.path)}"
            title.append(about, "not bold dim")
        most = next((one.most for one in held.limits if one.name == "bytes"), None)
        limit = "" if most is None else f" of {format_size(most)}"
        memory = f"{format_size(held.nbytes)}{limit}"
        devices = sorted(self._done[1].devices, key=lambda row: -row.nbytes)[:4]
        users = sorted(self._done[1].users, key=lambda row: -row.nbytes)[:4]
        lines = [
            title,
            Text(f"{format_count(held.entries, 'entry', 'entries')}, {format_count(held.leases, 'lease')}, {memory}"),
            Text("devices  " + ", ".join(f"{_device(row.device)} {format_size(row.nbytes)}" for row in devices)),
            Text("users    " + ", ".join(f"uid {row.uid} {format_size(row.nbytes)}" for row in users)),
            Text(f"{'':<9}{'a second':>10}{'median':>10}{'99 %':>10}  the last minutes", style="dim"),
        ]
        for kind in ("attach", "publish", "release"):
            rate = self._rates.get(kind, Rate(0.0, 0.0, None, None))
            numbers = f"{rate.per_second:>10,.1f}{_latency(rate.median):>10}{_latency(rate.high):>10}  "
            lines.append(Text(f"{kind:<9}{numbers}").append(self._bars(kind), "cyan"))
        errors = f"{self._rates[''].errors:>10,.1f}"
        lines.append(Text(f"{'errors':<9}{errors}{'':>22}").append(self._bars("errors"), "red"))
        lines.append(Text(f"{'memory':<9}{format_size(held.nbytes):>10}{'':>22}").append(self._bars("bytes"), "green"))
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        return lines

    def _bars(self, name: str) -> str:
        return shape(self._history.get(name, ()), _BARS, plain="utf" not in (sys.stdout.encoding or "").lower())

    def table(self, most: int, width: int = 200) -> Table:
        """Return the table of at most so many entries, with the columns for which there is room."""
        columns = {name: cell for name, (cell, _) in _COLUMNS.items() if width >= _LEAST.get(name, 0)}
        table = Table(box=None, expand=True, header_style="bold reverse", padding=(0, 2, 0, 0))
        for name in columns:
            sign = " v" if name == self.sort else ""
            left = name in ("name", "device", "state")
            ratio = 1 if name == "name" else None
            table.add_column(name + sign, justify="left" if left else "right", no_wrap=True, ratio=ratio)
        for row in sorted(self._rows, key=_COLUMNS[self.sort][1])[:most]:
            table.add_row(*(cell(row) for cell in columns.values()), style="dim" if row.parked else None)
        return table


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Read keys as they are pressed; a SIGTERM leaves the block, so that the terminal is as it was."""

    def terminated(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = termios.tcgetattr(0)
    handler = signal.signal(signal.SIGTERM, terminated)
    try:
        tty.setcbreak(0)
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, handler)


def _devices(row: EntryInfo) -> str:
    more = f" +{len(row.devices) - 1}" if len(row.devices) > 1 else ""
    return _device(row.devices[0]) + more if row.devices else "-"


def _device(device: str) -> str:
    """Shorten a device to a text that is unlike all others: a GPU's UUID to its beginning."""
    return printable(device[:12])


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if math.isinf(seconds):
        return "> 1 s"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
