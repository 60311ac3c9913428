"""``vram top``: draws what a :class:`~vram.metrics.watch.Watcher` sees, and passes keys on to it.

A thread asks the keeper, so that keys are obeyed while it does not answer. Drawing (:func:`draw`) needs no terminal.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType

from rich.console import Console, Group
from rich.text import Text

from ..errors import UsageError, VramError
from ..keeper.messages import EntryRow
from ..keeper.paths import find_path
from ..metrics.rates import Rate, shape
from ..metrics.watch import KEYS, View, Wanted, Watcher
from ..spec import format_count, format_size

_HELP = (
    ("up down, k j", "select an entry"),
    ("page up, page down, home, end", "scroll"),
    ("enter", "who holds the selected entry"),
    ("s, 1 to 9", "sort by the next column, or by that one"),
    ("r", "the other way round"),
    ("/", "only names that begin like this"),
    ("x", "revoke the selected entry; asks first"),
    ("space, p", "stand still, and go on"),
    ("q, Ctrl-C", "leave"),
)
_OPENED = 6  # holders that are shown at most
_SPARK = 60  # characters of a line of bars, where there is room
_WIDE = 100  # characters, from which on two things stand side by side


@dataclass(slots=True)
class Looks:
    """What of the screen is not the keeper's doing.

    Attributes
    ----------
    selected : str
        The name of an entry.
    mode : str
        ``""``, ``"help"``, ``"filter"`` or ``"revoke"``: what keys are for.
    doomed : str
        The entry that is asked about in ``"revoke"``, whatever is selected by then.
    typed : str
        The filter as far as it is typed.
    said : str
        What came of the last command.
    paused : bool
        Whether it stands still.
    plain : bool
        In ASCII.
    """

    selected: str = ""
    mode: str = ""
    doomed: str = ""
    typed: str = ""
    said: str = ""
    paused: bool = False
    plain: bool = False


# -- drawing ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Column:
    key: str
    width: int
    least: int  # how wide the terminal has to be
    cell: Callable[[EntryRow], str]
    right: bool = True


_COLUMNS = (
    _Column("version", 7, 60, lambda row: str(row.version)),
    _Column("size", 10, 30, lambda row: format_size(row.nbytes)),
    _Column("leases", 6, 38, lambda row: str(row.leases)),
    _Column("held", 10, 100, lambda row: format_size(row.held_bytes) if row.leases else "-"),
    _Column("device", 12, 72, lambda row: _devices(row.devices), False),
    _Column("uid", 6, 90, lambda row: str(row.owner)),
    _Column("age", 6, 50, lambda row: _age(row.age)),
    _Column("state", 9, 80, lambda row: _state(row), False),
)


def draw(view: View, looks: Looks, width: int, height: int, *, path: str = "") -> Group:
    """Return the screen: exactly so many lines, none wider than that."""
    head = _head(view, looks, width, height, path)
    if looks.mode == "help":
        body = [Text.assemble((f"{keys:>30}  ", "bold"), what) for keys, what in _HELP]
    else:
        opened = _opened(view, height) if view.wanted.opened else []
        space = max(0, height - len(head) - len(opened) - 1)
        view = replace(view, rows=view.rows[: max(0, space - 1)])  # what is not drawn is not counted below
        body = [*_table(view, looks, width, space), *opened]
    foot = _foot(view, looks)
    room = max(0, height - len(head) - 1)
    body = [*body[:room], *(Text() for _ in range(room - len(body)))]
    lines = [*head[: max(0, height - 1)], *body, foot][-height:] if height else []
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return Group(*lines)


def table_height(view: View, looks: Looks, width: int, height: int) -> int:
    """Return how many entries such a screen shows."""
    opened = len(_opened(view, height)) if view.wanted.opened else 0
    return max(1, height - len(_head(view, looks, width, height, "")) - opened - 2)


def _head(view: View, looks: Looks, width: int, height: int, path: str) -> list[Text]:
    held = view.held
    title = Text("vram top", style="bold")
    if view.trouble:
        said = view.trouble if held is None else f"(as it was seen last) {view.trouble}"
        title.append(f"  {_printable(said)}", style="bold red")
    elif held is not None:
        title.append(
            f"  {held.keeper_version}, pid {held.pid}, up {_age(held.uptime)}, "
            f"{format_count(held.connections, 'connection')}  {_printable(path)}",
            style="dim",
        )
    if looks.paused:
        title.append("  PAUSED", style="bold yellow")
    lines = [title]
    if held is None or height < 12:
        return lines
    limit = "" if held.max_bytes is None else f" of {format_size(held.max_bytes)}"
    lines.append(
        Text.assemble(
            (f"{held.entries:,}", "bold"),
            f" {'entry' if held.entries == 1 else 'entries'}, ",
            (f"{held.leases:,}", "bold"),
            f" lease{'' if held.leases == 1 else 's'}, ",
            (format_size(held.nbytes), "bold"),
            limit,
        )
    )
    left = _rates(view, looks, width)
    right = _shares(view, looks, width) if width >= _WIDE else []
    if height < 20:
        return lines
    for index in range(max(len(left), len(right))):
        line = left[index].copy() if index < len(left) else Text()
        if right:
            line.truncate(_left(width) - 2)
            line.pad_right(_left(width) - line.cell_len)
            line.append_text(right[index] if index < len(right) else Text())
        lines.append(line)
    if width < _WIDE and height >= 24:
        lines += _shares_in_lines(view)
    lines.append(Text())
    return lines


def _left(width: int) -> int:
    """How much of a wide screen what is done has; the rest is for who has how much."""
    return width * 3 // 5


def _rates(view: View, looks: Looks, width: int) -> list[Text]:
    bars = max(0, min(_SPARK, (width if width < _WIDE else _left(width) - 2) - 41))
    lines = [Text(f"{'':<9}{'a second':>9}{'median':>10}{'99 %':>10}  the last minutes"[: max(width, 9)], style="dim")]
    none = Rate(0.0, 0.0, None, None)
    for kind in ("attach", "publish", "release"):
        rate = view.done.get(kind, none)
        lines.append(
            Text.assemble(
                f"{kind:<9}", (f"{_number(rate.per_second):>9}", "bold"),
                f"{_latency(rate.median):>10}{_latency(rate.high):>10}  ",
                (shape(view.history.of(kind), bars, plain=looks.plain), "cyan"),
            )
        )  # fmt: skip
    errors = view.done.get("", none).errors
    lines.append(
        Text.assemble(
            f"{'errors':<9}", (f"{_number(errors):>9}", "bold red" if errors else "bold"), " " * 22,
            (shape(view.history.of("errors"), bars, plain=looks.plain), "red"),
        )
    )  # fmt: skip
    lines.append(
        Text.assemble(
            f"{'memory':<9}", (f"{format_size(0 if view.held is None else view.held.nbytes):>9}", "bold"), " " * 22,
            (shape(view.history.of("bytes"), bars, plain=looks.plain), "green"),
        )
    )  # fmt: skip
    return lines


def _shares(view: View, looks: Looks, width: int) -> list[Text]:
    """Who has most: devices, then users, five lines in all and at least two of each, where there are."""
    bars = max(0, min(_SPARK, width - _left(width) - 30))
    lines = [Text(f"{'device or user':<17}{'memory':>10}", style="dim")]
    users = view.users[: max(2, 5 - len(view.devices))]
    for row in view.devices[: 5 - len(users)]:
        drawn = shape(view.history.of(f"device {row.device}"), bars, plain=looks.plain)
        lines.append(_share(_device(row.device), row.nbytes, drawn))
    for user in users:
        drawn = shape(view.history.of(f"user {user.uid}"), bars, plain=looks.plain)
        lines.append(_share("other users" if user.uid is None else f"uid {user.uid}", user.nbytes, drawn))
    return lines


def _share(who: str, nbytes: int, drawn: str) -> Text:
    return Text.assemble(f"{who:<17.17}", (f"{format_size(nbytes):>10}", "bold"), "  ", (drawn, "green"))


def _shares_in_lines(view: View) -> list[Text]:
    devices = ", ".join(f"{_device(row.device)} {format_size(row.nbytes)}" for row in view.devices[:4])
    users = ", ".join(
        f"{'others' if row.uid is None else f'uid {row.uid}'} {format_size(row.nbytes)}"
        for row in view.users[:4]
        if row.nbytes
    )
    return [Text.assemble(("devices  ", "dim"), devices or "-"), Text.assemble(("users    ", "dim"), users or "-")]


def _table(view: View, looks: Looks, width: int, height: int) -> list[Text]:
    columns = [column for column in _COLUMNS if width >= column.least]
    name = max(8, width - sum(column.width + 2 for column in columns))
    wanted = view.wanted
    arrow = ("^" if wanted.backwards else "v") if looks.plain else ("▲" if wanted.backwards else "▼")

    def title(key: str) -> str:
        return key + arrow if key == wanted.key else key

    head = Text(f"{title('name'):<{name}}", style="bold reverse")
    for column in columns:
        at = ">" if column.right else "<"
        head.append(f"  {title(column.key):{at}{column.width}}"[: column.width + 2])
    head.pad_right(max(0, width - head.cell_len))
    lines = [head]
    for row in view.rows[: max(0, height - 1)]:
        line = Text(_printable(row.name))
        line.truncate(name - 1, overflow="ellipsis" if not looks.plain else "crop")
        line.pad_right(name - line.cell_len)
        for column in columns:
            at = ">" if column.right else "<"
            line.append(f"  {column.cell(row):{at}{column.width}.{column.width}}")
        if row.name == looks.selected:
            line.stylize("black on cyan")
            line.pad_right(max(0, width - line.cell_len))
        elif row.parked:
            line.stylize("dim")
        lines.append(line)
    if len(lines) == 1:
        lines.append(
            Text("(no entries)" if not wanted.prefix else f"(no names begin with {wanted.prefix})", style="dim")
        )
    return lines


def _opened(view: View, height: int) -> list[Text]:
    most = max(1, min(_OPENED, height // 4))
    lines = [Text(f"who holds {_printable(view.wanted.opened)}", style="bold")]
    for one in view.holders[:most]:
        lines.append(Text(f"  {_printable(str(one))}, {one.access}, for {_age(one.age)}"))
    if len(view.holders) > most:
        lines.append(Text("  and others: vram ls --holders", style="dim"))
    return lines if view.holders else [*lines, Text("  nobody", style="dim")]


def _foot(view: View, looks: Looks) -> Text:
    if looks.mode == "revoke":
        leases = next((f" ({format_count(row.leases, 'lease')})" for row in view.rows if row.name == looks.doomed), "")
        question = f"revoke {_printable(looks.doomed)}{leases}? y: yes, any other key: no"
        return Text(question, style="bold black on yellow")
    if looks.mode == "filter":
        return Text(f"names that begin with: {_printable(looks.typed)}_", style="bold black on yellow")
    if looks.said:
        return Text(_printable(looks.said), style="bold yellow")
    wanted = view.wanted
    total = 0 if view.held is None else view.held.entries
    where = f"{view.first + 1 if view.rows else 0} to {view.first + len(view.rows)}"
    if wanted.prefix:
        where += f" of {view.known:,}{'' if view.is_whole else ' or more'} that begin with {wanted.prefix}"
    else:
        where += f" of {total:,}"
    if not view.is_whole and (wanted.key != "name" or wanted.backwards):
        where += f", of the first {view.known:,}: the others are being read"
    return Text(f"{where}   h help  s sort  / filter  x revoke  q quit", style="dim")


def _devices(devices: Sequence[str]) -> str:
    return "-" if not devices else _device(devices[0]) + (f" +{len(devices) - 1}" if len(devices) > 1 else "")


def _device(device: str | None) -> str:
    """As short as tells one from the other: of a GPU's UUID the beginning."""
    return "others" if device is None else _printable(device[:12] if device.startswith("GPU-") else device[:15])


def _state(row: EntryRow) -> str:
    return "parked" if row.parked else "updatable" if row.updatable else "rw" if row.writable else "r"


def _age(seconds: float) -> str:
    for limit, unit in ((120, "s"), (7200, "min"), (172800, "h")):
        if seconds < limit:
            return f"{seconds / {'s': 1, 'min': 60, 'h': 3600}[unit]:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def _number(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if math.isinf(seconds):
        return "> 1 s"
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


# -- keys -------------------------------------------------------------------------------------------------------------
_SEQUENCES = {
    b"[A": "up", b"[B": "down", b"OA": "up", b"OB": "down", b"[5~": "page up", b"[6~": "page down", b"[H": "home",
    b"[F": "end", b"OH": "home", b"OF": "end", b"[1~": "home", b"[4~": "end", b"[7~": "home", b"[8~": "end",
}  # fmt: skip
_SINGLE = {b"\r": "enter", b"\n": "enter", b"\x7f": "back", b"\x08": "back"}


def keys_in(read: bytes) -> Iterator[str]:
    """Yield the keys of what was read from a terminal: names of special ones, characters, ``"escape"``."""
    while read:
        if read[:1] != b"\x1b":
            one, read = read[:1], read[1:]
            yield _SINGLE.get(one) or one.decode("latin-1")
            continue
        found = next((code for code in _SEQUENCES if read[1:].startswith(code)), None)
        if found is not None:
            read = read[1 + len(found) :]
            yield _SEQUENCES[found]
        elif read[1:2] in (b"[", b"O"):  # a key that is nothing here: to the end of its sequence
            end = next((at for at in range(2, len(read)) if 0x40 <= read[at] <= 0x7E), len(read) - 1)
            read = read[end + 1 :]
        else:
            read = read[1:]
            yield "escape"


# -- asking -----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Asked:
    """What the thread is to do next, and what came of it."""

    wanted: Wanted
    revoke: str = ""
    ends: bool = False
    changed: bool = True
    view: View | None = None
    said: str | None = None
    failed: BaseException | None = None
    lock: threading.Condition = field(default_factory=threading.Condition)


def _ask(asked: _Asked, watcher: Watcher, interval: float, wake: int, is_paused: Callable[[], bool]) -> None:
    due = time.monotonic()
    while True:
        with asked.lock:
            if not asked.changed:
                asked.lock.wait(max(0.0, due - time.monotonic()))
            if asked.ends:
                break
            wanted, revoke, by_key = asked.wanted, asked.revoke, asked.changed
            asked.changed, asked.revoke = False, ""
        said = _revoke(watcher, revoke) if revoke else None
        is_due = time.monotonic() >= due  # rates are of whole intervals, however many keys are pressed
        if is_due:
            due = time.monotonic() + interval
        if not by_key and (is_paused() or not is_due):
            continue
        try:
            view = watcher.look(wanted, measure=is_due and not is_paused())
        except BaseException as error:  # noqa: BLE001  (the main thread raises it)
            asked.failed = error
            os.write(wake, b"!")
            return
        with asked.lock:
            asked.view = view
            if said is not None:
                asked.said = said
        os.write(wake, b".")
    watcher.close()


def _revoke(watcher: Watcher, name: str) -> str:
    try:
        left = watcher.revoke(name)
    except (VramError, OSError) as error:
        return f"{name} is not revoked: {' '.join(str(error).split())}"
    if not left.holders:
        return f"{name} is revoked: nobody holds it any more"
    who = ", ".join(dict.fromkeys(f"pid {one.pid}" if one.pid else "a process not seen" for one in left.holders[:3]))
    count = len(left.holders) + left.more
    return f"{name} is revoked: {format_count(count, 'lease')} left, of {who}{' and others' if count > 3 else ''}"


# -- the terminal -----------------------------------------------------------------------------------------------------
def run_top(socket: str | None, *, interval: float, sort: str, once: bool) -> None:
    """Show a keeper until somebody leaves; with `once`, print what it looks like over one interval.

    Raises
    ------
    UsageError
        If there is no terminal and `once` was not said, or no such key to sort by.
    """
    if sort not in KEYS:
        raise UsageError(f"--sort {sort!r:.40} is no column; there are {', '.join(KEYS)}")
    path, _ = find_path(socket)
    if once:
        _print_once(path, interval, sort)
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("vram top needs a terminal to draw on and to read keys from; --once prints one table anywhere")
    _Top(path, interval, sort).run()


def _print_once(path: str, interval: float, sort: str) -> None:
    wanted = Wanted(count=1_000_000, key=sort)
    with contextlib.closing(Watcher(path)) as watcher:
        view = watcher.look(wanted)
        if not view.trouble:
            threading.Event().wait(interval)
            view = watcher.look(wanted)
        while True:
            if view.is_whole or view.trouble:
                break
            view = watcher.look(wanted, measure=False)
    if view.trouble:
        raise VramError(view.trouble)
    console = Console(markup=False, emoji=False, highlight=False)
    width = console.width if console.is_terminal else 120
    looks = Looks(plain=console.options.ascii_only)
    console.width = width
    console.print(Group(*_head(view, looks, width, 50, path), *_table(view, looks, width, len(view.rows) + 1)))


class _Top:
    """A live screen."""

    def __init__(self, path: str, interval: float, sort: str) -> None:
        self._path = path
        self._interval = interval
        self._looks = Looks(plain="utf" not in (sys.stdout.encoding or "").lower())
        self._view = View(Wanted(key=sort))
        self._asked = _Asked(Wanted(key=sort))
        self._stops = self._resized = False

    def run(self) -> None:
        """Draw and obey keys until somebody leaves. The terminal is as it was afterwards, however this ends."""
        wake_out, wake = os.pipe()
        os.set_blocking(wake_out, False)
        os.set_blocking(wake, False)
        asking = threading.Thread(
            target=_ask,
            args=(self._asked, Watcher(self._path), self._interval, wake, lambda: self._looks.paused),
            daemon=True,  # it may be waiting for a keeper that does not answer
        )
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGTSTP, signal.SIGWINCH)}
        old_wake = -1
        try:
            signal.signal(signal.SIGTERM, _terminated)
            signal.signal(signal.SIGTSTP, self._stop_later)
            signal.signal(signal.SIGWINCH, self._resize_later)
            old_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
            with _screen():
                self._resize()
                asking.start()
                self._loop(wake_out)
        except KeyboardInterrupt:
            pass  # one way to leave
        finally:
            signal.set_wakeup_fd(old_wake)
            for number, handler in before.items():
                signal.signal(number, handler)
            with self._asked.lock:
                self._asked.ends = self._asked.changed = True
                self._asked.lock.notify()
            if asking.ident is not None:
                asking.join(1.0)
            if not asking.is_alive():  # or it would write to somebody else's descriptor
                os.close(wake)
            os.close(wake_out)

    def _stop_later(self, number: int, frame: FrameType | None) -> None:
        self._stops = True

    def _resize_later(self, number: int, frame: FrameType | None) -> None:
        self._resized = True

    def _loop(self, wake: int) -> None:
        while True:
            if self._stops:
                self._stops = False
                with _away():
                    os.kill(os.getpid(), signal.SIGSTOP)
                self._resized = True
            if self._resized:
                self._resized = False
                self._resize()
            self._draw()
            ready, _, _ = select.select([0, wake], [], [])
            if wake in ready:
                with contextlib.suppress(BlockingIOError):
                    while os.read(wake, 4096):
                        pass
                if self._asked.failed is not None:
                    raise self._asked.failed
                with self._asked.lock:
                    if self._asked.view is not None:
                        self._view = self._asked.view
                    if self._asked.said is not None:
                        self._looks.said, self._asked.said = self._asked.said, None
                self._keep_selection()
            if 0 in ready:
                try:
                    read = os.read(0, 1024)
                except OSError:
                    read = b""  # the terminal is gone
                if not read or not all(self._obey(key) for key in keys_in(read)):
                    return

    def _draw(self) -> None:
        width, height = _size()
        console = Console(
            file=io.StringIO(), force_terminal=True, width=width, height=height, markup=False, emoji=False,
            highlight=False, legacy_windows=False,
        )  # fmt: skip
        with console.capture() as capture:
            console.print(draw(self._view, self._looks, width, height, path=self._path), end="")
        lines = capture.get().rstrip("\n").split("\n")[:height]
        # Not past the last line, where the terminal would scroll.
        _write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")

    # -- what is wanted -------------------------------------------------------------------------------------------
    def _want(self, *, revoke: str = "", **changes: object) -> None:
        with self._asked.lock:
            self._asked.wanted = replace(self._asked.wanted, **changes)  # type: ignore[arg-type]
            self._asked.revoke = revoke or self._asked.revoke
            self._asked.changed = True
            self._asked.lock.notify()

    def _resize(self) -> None:
        self._want(count=table_height(self._view, self._looks, *_size()))

    def _keep_selection(self) -> None:
        rows = self._view.rows
        if rows and not any(row.name == self._looks.selected for row in rows):
            self._looks.selected = rows[0].name
        count = table_height(self._view, self._looks, *_size())  # other lines came or went
        if count != self._asked.wanted.count:
            self._want(count=count)

    def _obey(self, key: str) -> bool:
        """Do what a key is for; return whether to go on."""
        looks = self._looks
        looks.said = ""
        if looks.mode == "help":
            looks.mode = ""
        elif looks.mode == "revoke":
            looks.mode = ""
            if key == "y":
                self._want(revoke=looks.doomed)
            else:
                looks.said = f"{looks.doomed} was not revoked"
        elif looks.mode == "filter":
            self._type(key)
        elif key == "q":
            return False
        else:
            self._command(key)
        return True

    def _type(self, key: str) -> None:
        looks = self._looks
        if key == "enter":
            looks.mode = ""
        elif key == "escape":
            looks.mode = looks.typed = ""
        elif key == "back":
            looks.typed = looks.typed[:-1]
        elif len(key) == 1 and (key.isascii() and (key.isalnum() or key in "._@:+-/~")) and len(looks.typed) < 200:
            looks.typed += key
        if key == "~" and looks.typed != "~":
            looks.typed = looks.typed[:-1]  # it is the first character of a name or none
        self._want(prefix=looks.typed, first=0)

    def _command(self, key: str) -> None:
        looks, wanted = self._looks, self._asked.wanted
        steps = {"up": -1, "k": -1, "down": 1, "j": 1}
        pages = {"page up": -wanted.count, "page down": wanted.count, "home": -(1 << 40), "end": 1 << 40}
        pages |= {"g": pages["home"], "G": pages["end"]}
        if key in steps:
            self._move(steps[key])
        elif key in pages:
            total = 0 if self._view.held is None else self._view.held.entries
            self._want(first=max(0, min(self._view.first + pages[key], total - wanted.count)))
        elif key == "s" or (key in "123456789" and len(key) == 1):
            keys = list(KEYS)
            number = keys.index(wanted.key) + 1 if key == "s" else int(key) - 1
            self._want(key=keys[number % len(keys)], backwards=False, first=0)
        elif key == "r":
            self._want(backwards=not wanted.backwards, first=0)
        elif key == "/":
            looks.mode, looks.typed = "filter", wanted.prefix
        elif key == "enter" and looks.selected:
            self._want(opened="" if wanted.opened == looks.selected else looks.selected)
        elif key == "escape":
            self._want(opened="")
        elif key == "x" and looks.selected:
            looks.mode, looks.doomed = "revoke", looks.selected
        elif key in (" ", "p"):
            looks.paused = not looks.paused
        elif key in ("h", "?"):
            looks.mode = "help"

    def _move(self, step: int) -> None:
        """Select the entry above or below, and scroll where that is not to be seen."""
        rows = self._view.rows
        at = next((number for number, row in enumerate(rows) if row.name == self._looks.selected), 0) + step
        if 0 <= at < len(rows):
            self._looks.selected = rows[at].name
            if self._asked.wanted.opened:
                self._want(opened=self._looks.selected)
        elif rows:
            self._want(first=max(0, self._view.first + step))


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _size() -> tuple[int, int]:
    with contextlib.suppress(OSError):
        width, height = os.get_terminal_size(1)
        if width > 0 and height > 0:
            return width, height
    return 80, 24


def _write(text: str) -> None:
    rest = text.encode(errors="replace")
    while rest:
        rest = rest[os.write(1, rest) :]


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """Have the terminal's other screen, without a cursor, and keys as they are pressed."""
    before = termios.tcgetattr(0)
    try:
        tty.setcbreak(0, termios.TCSADRAIN)
        _write("\x1b[?1049h\x1b[?25l\x1b[2J")
        yield
    finally:
        with contextlib.suppress(OSError):
            _write("\x1b[?25h\x1b[?1049l")
        with contextlib.suppress(termios.error):
            termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _away() -> Iterator[None]:
    """Give the terminal back for a while."""
    keys = termios.tcgetattr(0)
    _write("\x1b[?25h\x1b[?1049l")
    cooked = termios.tcgetattr(0)
    cooked[3] |= termios.ICANON | termios.ECHO
    termios.tcsetattr(0, termios.TCSADRAIN, cooked)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, keys)
        _write("\x1b[?1049h\x1b[?25l\x1b[2J")
