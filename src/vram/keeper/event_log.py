"""The event log of a keeper, one line for each event: ``vram keep --log json``.

It is :mod:`logging`'s logger ``vram.keeper`` with a handler and formatters of its own, and off unless :func:`start` was
called: a lender runs the same code inside somebody's program, whose log is not ours to write to.

Every value that a client chose is written as JSON in ASCII, so that it ends no line and a terminal obeys none of it. A
thread writes, since whoever reads the other end may have stopped: what finds no room in its queue is counted and said,
and the keeper never waits.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from queue import Full, Queue
from typing import TYPE_CHECKING, Any, Final

from ..errors import ProtocolError, QuotaError, VramError
from .records import Session

if TYPE_CHECKING:
    from ..sharing.channel import Credentials
    from .connection import Connection

FORMS: Final = ("json", "text")
LEVELS: Final = ("debug", "info", "warning", "error")
SLOW: Final = 0.1  # seconds that a request takes which is said
_MOST_QUEUED: Final = 2_000  # lines that nobody has read
_MOST_TEXT: Final = 500  # characters of a value that others wrote
_LAST: Final = 1.0  # seconds that the end waits for who reads
_PLAIN = re.compile(r"[A-Za-z0-9._/@:+~\-]+")

_log = logging.getLogger("vram.keeper")
_log.propagate = False
_log.addHandler(logging.NullHandler())
_log.setLevel(logging.CRITICAL + 1)
_handler: EventHandler | None = None


class EventHandler(logging.Handler):
    """A handler that writes lines to a lent descriptor from a thread; logging never waits for the reader."""

    def __init__(self, fd: int, line: Callable[[logging.LogRecord], str]) -> None:
        super().__init__()
        self.queue: Queue[logging.LogRecord | None] = Queue(_MOST_QUEUED)
        self._dropped = 0
        self._writer = threading.Thread(target=self._write, args=(fd, line), name="vram: log", daemon=True)
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record if there is room."""
        try:
            if self._dropped:
                self.queue.put_nowait(_record(logging.WARNING, "vram.log.dropped", {"vram.log.dropped": self._dropped}))
                self._dropped = 0
            self.queue.put_nowait(record)
        except Full:
            self._dropped += 1

    def _write(self, fd: int, line: Callable[[logging.LogRecord], str]) -> None:
        # Without the lock of this handler: at exit, logging waits for the lock of each.
        for record in iter(self.queue.get, None):
            rest = (line(record) + "\n").encode("ascii", "backslashreplace")
            with contextlib.suppress(OSError):  # who read the lines is gone, and the keeper is not
                while rest:
                    rest = rest[os.write(fd, rest) :]

    def close(self) -> None:
        """Write what there is, as far as somebody reads it within a second."""
        with contextlib.suppress(Full):
            self.queue.put(None, timeout=_LAST / 2)
            self._writer.join(_LAST / 2)
        super().close()


# -- on and off -------------------------------------------------------------------------------------------------------
def start(form: str, level: str = "info", fd: int = 2) -> None:
    """Log to a descriptor from now on. The log of Python's event loop goes there as well."""
    global _handler
    stop()
    _handler = EventHandler(fd, _json if form == "json" else _text)
    for log in (_log, logging.getLogger("asyncio")):
        log.addHandler(_handler)
        log.propagate = False
    _log.setLevel(level.upper())


def stop() -> None:
    """Log no more, once what there is has been written, or a second later. Idempotent."""
    global _handler
    handler, _handler = _handler, None
    if handler is not None:
        _log.setLevel(logging.CRITICAL + 1)
        for log in (_log, logging.getLogger("asyncio")):
            log.removeHandler(handler)
        logging.getLogger("asyncio").propagate = True
        handler.close()


def say(
    event: str,
    level: int = logging.INFO,
    who: Connection | Session | Credentials | None = None,
    error: Exception | None = None,
    otherwise: str = "",
    *,
    fields: dict[str, Any] | None = None,
) -> None:
    """Log an event with fields, whose doing it was, and the error that it tells of.
    Without a log print what is to be said `otherwise`."""
    if _handler is None and otherwise:
        print(otherwise, file=sys.stderr)
    elif _log.isEnabledFor(level):
        said = dict(fields or {})
        if who is not None:
            said |= _who(who)
        if error is not None:
            said |= {"error.type": type(error).__name__, "error.message": str(error)}
        _log.handle(_record(level, event, said))  # not Logger.log, which looks up the line that calls it, for 10 us


def _record(level: int, event: str, fields: dict[str, Any]) -> logging.LogRecord:
    record = logging.LogRecord(_log.name, level, "", 0, event, None, None)
    record.__dict__["vram"] = fields
    return record


def answered(peer: Connection, kind: str, seconds: float, error: Exception | None = None) -> None:
    """Log a request that took long, or whose error is over quota, breaks the protocol, or is a mistake of the keeper's
    own (with where it is; without a log that is printed); at the level debug, each."""
    if error is not None:
        event, level, fields, trace = "vram.request.refused", logging.DEBUG, {"vram.request": kind}, ""
        if isinstance(error, QuotaError):
            event, level = "vram.quota.refused", logging.WARNING
        elif isinstance(error, ProtocolError):
            event, level = "vram.protocol.error", logging.WARNING
        elif kind == "hello":
            event, level = "vram.client.refused", logging.WARNING
        if not isinstance(error, VramError):
            event, level, trace = "vram.keeper.error", logging.ERROR, _trace(error)
            fields["exception.stacktrace"] = trace[-_MOST_TEXT:]  # which is where it broke
        say(event, level, peer, error, trace, fields=fields)
    event, level = "vram.request.answered", logging.DEBUG
    if seconds >= SLOW:
        event, level = "vram.request.slow", logging.WARNING
    if _log.isEnabledFor(level):
        say(event, level, peer, fields={"vram.request": kind, "vram.request.duration": round(seconds, 6)})


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _who(of: Connection | Session | Credentials) -> dict[str, Any]:
    """The user and the process are the kernel's word; what it says it is, its own."""
    session: Any = of if isinstance(of, Session) else getattr(of, "session", None)
    known: Any = session or getattr(of, "credentials", of)
    who: dict[str, Any] = {"user.id": known.uid, "process.pid": known.pid or None}
    if session is not None:
        who |= {"vram.client.label": session.label or None, "vram.client.host": session.host or None}
    return who


# -- lines ------------------------------------------------------------------------------------------------------------
def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the time, the severity, the event and the fields of a record; one that is not ours has a text only."""
    fields, event = record.__dict__.get("vram"), record.msg
    if fields is None:
        event, fields = "vram.keeper.log", {"body": record.getMessage(), "log.logger": record.name}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields |= {"error.type": type(error).__name__, "exception.stacktrace": _trace(error)[-_MOST_TEXT:]}
    said = {name: _clipped(value) for name, value in fields.items() if value is not None}
    return {"timestamp": _timestamp(record.created), "severity": record.levelname, "event.name": event, **said}


def _json(record: logging.LogRecord) -> str:
    line = _fields(record)
    if "user.id" in line:  # as strings, say OpenTelemetry's conventions
        line["user.id"] = str(line["user.id"])
    return json.dumps(line)


def _text(record: logging.LogRecord) -> str:
    when, severity, event, *rest = _fields(record).items()
    parts = [when[1], severity[1], event[1]]
    for name, value in rest:
        text = str(value)
        parts.append(f"{name}={text if _PLAIN.fullmatch(text) else json.dumps(text)}")
    return " ".join(parts)


def _clipped(value: Any) -> Any:
    return value if not isinstance(value, str) or len(value) <= _MOST_TEXT else value[: _MOST_TEXT - 3] + "..."


def _timestamp(when: float) -> str:
    """RFC 3339, in UTC, with microseconds."""
    seconds, micro = divmod(round(when * 1e6), 1_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{micro:06}Z"
