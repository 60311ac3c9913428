"""A terminal: runs a program on a pty, presses keys, and reads what its screen says."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence

from tests.support.deadlines import SOON

_CODE = re.compile(r"\x1b(?:\[([?0-9;]*)([@-~])|[^\[])")


class Terminal:
    """A program and the screen that it draws on.

    What it understands is what a program may use here: it fails for anything else, as for what is written past an edge.

    Attributes
    ----------
    lines : list of str
        What is on the screen.
    is_other : bool
        Whether that is the other screen, which is left as if nothing had been.
    has_cursor : bool
        Whether the cursor is shown.
    before : str
        What was written to the first screen.
    """

    def __init__(self, command: Sequence[str], width: int, height: int, environment: Mapping[str, str]) -> None:
        self.width, self.height = width, height
        self.lines = [" " * width] * height
        self.is_other = False
        self.has_cursor = True
        self.before = ""
        self._row = self._column = 0
        self._rest = ""
        self._bytes = b""
        self.fd, theirs = pty.openpty()
        try:
            self.resize(width, height, tell=False)
            self.settings = termios.tcgetattr(theirs)
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
            )
        finally:
            os.close(theirs)

    def resize(self, width: int, height: int, *, tell: bool = True) -> None:
        """Change the size, and tell the program."""
        while tell and self.read(0):
            pass
        self.width, self.height = width, height
        self.lines = [" " * width] * height
        self._row = min(self._row, height - 1)
        self._tolerated = 3 if tell else 0  # what is on its way was drawn for the other size
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        if tell:
            self.process.send_signal(signal.SIGWINCH)

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self.fd, keys.encode())

    @property
    def text(self) -> str:
        """What is on the screen."""
        return "\n".join(line.rstrip() for line in self.lines)

    def until(self, is_so: Callable[[], object], seconds: float = SOON) -> None:
        """Read until something is so."""
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"not within {seconds:g} s; on the screen:\n{self.text}\n{self.before}"
            self.read(0.05)

    def shows(self, *words: str) -> None:
        """Read until all of these are on the screen."""
        self.until(lambda: all(word in self.text for word in words))

    def read(self, seconds: float) -> bool:
        """Read what there is, and wait so long for it; return whether there was any."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return False
        try:
            self._bytes += os.read(self.fd, 65536)
        except OSError:  # everybody has closed the other end
            return False
        try:
            text, self._bytes = self._bytes.decode(), b""
        except UnicodeDecodeError as error:
            text, self._bytes = self._bytes[: error.start].decode(), self._bytes[error.start :]
        self._take(self._rest + text)
        return True

    def end(self) -> int:
        """Read until the program has ended, and return its status."""
        self.until(lambda: self.process.poll() is not None)
        while self.read(0.1):
            pass
        return self.process.returncode

    def _take(self, text: str) -> None:
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                code = _CODE.match(text, at)
                if code is None:
                    break
                self._obey(code[1] or "", code[2] or "", code[0])
                at = code.end()
                continue
            self._put(text[at])
            at += 1
        self._rest = text[at:]

    def _obey(self, numbers: str, letter: str, code: str) -> None:
        if letter == "m":
            return
        if code in ("\x1b[?1049h", "\x1b[?1049l"):
            self.is_other = code.endswith("h")
        elif code in ("\x1b[?25h", "\x1b[?25l"):
            self.has_cursor = code.endswith("h")
        elif code == "\x1b[H":
            self._row = self._column = 0
            self._tolerated -= 1
        elif code == "\x1b[K":
            self._set(self.lines[self._row][: self._column].ljust(self.width))
        elif code in ("\x1b[J", "\x1b[2J"):
            begin = 0 if code == "\x1b[2J" else self._row + 1
            self.lines[begin:] = [" " * self.width] * (self.height - begin)
        else:
            raise AssertionError(f"the terminal does not know {code!r}")

    def _set(self, line: str) -> None:
        self.lines[self._row] = line

    def _put(self, one: str) -> None:
        if not self.is_other:
            self.before += one
        elif one == "\r":
            self._column = 0
        elif one == "\n":
            assert self._tolerated > 0 or self._row + 1 < self.height, "the screen was scrolled"
            self._row = min(self._row + 1, self.height - 1)
        else:
            assert one.isprintable(), f"{one!r} was written to the terminal"
            wide = 2 if unicodedata.east_asian_width(one) in "WF" else 1
            if self._column + wide > self.width:
                assert self._tolerated > 0, f"past the right edge:\n{self.text}"
                return
            line = self.lines[self._row]
            self._set(line[: self._column] + one + " " * (wide - 1) + line[self._column + wide :])
            self._column += wide


@contextlib.contextmanager
def on_terminal(
    command: Sequence[str], width: int = 100, height: int = 30, environment: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run a program on a terminal for the length of a block; it is killed if it has not ended."""
    found = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
    for name in ("COLUMNS", "LINES"):  # where they are set, Rich believes them, and not the terminal
        found.pop(name, None)
    found |= environment or {}
    terminal = Terminal(command, width, height, found)
    try:
        yield terminal
    finally:
        if terminal.process.poll() is None:
            terminal.process.kill()
        terminal.process.wait(SOON)
        os.close(terminal.fd)
