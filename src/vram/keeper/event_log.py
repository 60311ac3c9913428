"""What happens in a keeper, one line for each event: ``vram keep --log json``.

It is :mod:`logging`'s logger ``vram.keeper`` with a handler and formatters of its own, and off unless :func:`start` was
called: a lender runs the same code inside somebody's program, whose log is not ours to write to.

Every value that a client chose is escaped. A thread writes, since whoever reads the other end may have stopped: what
finds no room in its queue is counted and said, and the keeper never waits.
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
from logging.handlers import QueueHandler, QueueListener
from queue import Full, Queue
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..errors import ProtocolError, QuotaError
from .records import Session, Version

if TYPE_CHECKING:
    from ..sharing.channel import Credentials

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


class _Peer(Protocol):
    """What an event says of a connection."""

    credentials: Credentials
    session: Session | None


class EventHandler(QueueHandler):
    """A handler that writes lines to a lent descriptor from a thread; logging never waits for the reader."""

    def __init__(self, fd: int, form: str) -> None:
        super().__init__(Queue(_MOST_QUEUED))
        self._dropped = 0
        self._listener = QueueListener(self.queue, _Writer(fd, _Json() if form == "json" else _Text()))  # type: ignore[arg-type]
        self._listener.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Leave a record as it is: the thread formats it."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record if there is room."""
        try:
            if self._dropped:
                self.queue.put_nowait(_record(logging.WARNING, "vram.log.dropped", {"vram.log.dropped": self._dropped}))
                self._dropped = 0
            self.queue.put_nowait(record)
        except Full:
            self._dropped += 1

    def handleError(self, record: logging.LogRecord) -> None:
        """Count a record that could not be queued: the keeper has other things to do."""
        self._dropped += 1

    def close(self) -> None:
        """Write what there is, as far as somebody reads it within a second."""
        end = threading.Thread(target=self._listener.stop, daemon=True)  # it waits for whoever reads
        end.start()
        end.join(_LAST)
        super().close()


class _Writer:
    """A writer of records to a descriptor. It is no logging.Handler: at exit, logging waits for the lock of each."""

    def __init__(self, fd: int, form: logging.Formatter) -> None:
        self._fd, self._form = fd, form

    def handle(self, record: logging.LogRecord) -> None:
        rest = (self._form.format(record) + "\n").encode("ascii", "backslashreplace")
        with contextlib.suppress(OSError):  # who read the lines is gone, and the keeper is not
            while rest:
                rest = rest[os.write(self._fd, rest) :]


# -- on and off -------------------------------------------------------------------------------------------------------
def start(form: str, level: str = "info", fd: int = 2) -> None:
    """Log from now on, to a descriptor. What Python's own event loop says goes there as well."""
    global _handler
    stop()
    _handler = EventHandler(fd, form)
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


def say(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event. In the names of fields, ``__`` stands for a dot."""
    if _log.isEnabledFor(level):
        _event(level, event, {name.replace("__", "."): value for name, value in fields.items()})


def _event(level: int, event: str, fields: dict[str, Any]) -> None:
    _log.handle(_record(level, event, fields))  # not Logger.log, which looks up the line that calls it, for 10 us


def _record(level: int, event: str, fields: dict[str, Any]) -> logging.LogRecord:
    record = logging.LogRecord(_log.name, level, "", 0, event, None, None)
    record.__dict__["vram"] = fields
    return record


# -- what happens -----------------------------------------------------------------------------------------------------
def answered(peer: _Peer, kind: str, seconds: float) -> None:
    """Log a request that took long; at the level debug, each."""
    if seconds >= SLOW:
        level, event = logging.WARNING, "vram.request.slow"
    else:
        level, event = logging.DEBUG, "vram.request.answered"
    if _log.isEnabledFor(level):
        _event(level, event, {**_who(peer), "vram.request": kind, "vram.request.duration": round(seconds, 6)})


def failed(peer: _Peer, kind: str, error: Exception) -> None:
    """Log a request that was refused: at the level debug, unless it is over quota or breaks the protocol."""
    level, event = logging.DEBUG, "vram.request.refused"
    if isinstance(error, QuotaError):
        level, event = logging.WARNING, "vram.quota.refused"
    elif isinstance(error, ProtocolError):
        level, event = logging.WARNING, "vram.protocol.error"
    if _log.isEnabledFor(level):
        said = {"vram.request": kind, "error.type": type(error).__name__, "error.message": str(error)}
        _event(level, event, {**_who(peer), **said})


def broke(peer: _Peer, kind: str, error: Exception) -> None:
    """Log a mistake of the keeper's own, with where it is; without a log, print that."""
    if _handler is None:
        traceback.print_exc(file=sys.stderr)
        return
    said = {"vram.request": kind, "error.type": type(error).__name__, "error.message": str(error)}
    _event(logging.ERROR, "vram.keeper.error", {**_who(peer), **said, "exception.stacktrace": _trace(error)})


def gave_up_takeover(error: Exception) -> None:
    """Log that a takeover failed and the keeper serves on; without a log, print that."""
    if _handler is None:
        print(f"vram keep: a takeover failed, serving on: {error}", file=sys.stderr)
        return
    said = {"error.type": type(error).__name__, "error.message": str(error)}
    _event(logging.ERROR, "vram.keeper.takeover_failed", said)


def lost(rows: int, entries: int) -> None:
    """Log how many rows of the keeper before could not be read; without a log, print that."""
    if _handler is None:
        said = f"{rows} rows of the journal could not be read: what they said is lost; {entries} entries are kept"
        print(f"vram keep: {said}", file=sys.stderr)
        return
    _event(logging.ERROR, "vram.keeper.rows_lost", {"vram.keeper.rows": rows, "vram.keeper.entries": entries})


def ended(error: Exception) -> bool:
    """Log that the keeper ends, or does not begin, because of an error; whether there is a log."""
    if _handler is not None:
        _event(logging.ERROR, "vram.keeper.failed", {"error.type": type(error).__name__, "error.message": str(error)})
    return _handler is not None


def connected(peer: _Peer) -> None:
    """Log a client that has greeted."""
    if _log.isEnabledFor(logging.DEBUG):
        _event(logging.DEBUG, "vram.client.connected", _who(peer))


def disconnected(peer: _Peer) -> None:
    """Log that a client is gone."""
    if _log.isEnabledFor(logging.DEBUG):
        _event(logging.DEBUG, "vram.client.disconnected", _who(peer))


def refused(who: Credentials, why: str) -> None:
    """Log a client that was not let in."""
    if _log.isEnabledFor(logging.WARNING):
        said = {"error.type": "QuotaError", "error.message": why}
        _event(logging.WARNING, "vram.client.refused", {"user.id": who.uid, "process.pid": who.pid, **said})


def overdue(peer: _Peer) -> None:
    """Log a client that is hung up on, since it did not greet, or does not read."""
    if _log.isEnabledFor(logging.WARNING):
        _event(logging.WARNING, "vram.client.overdue", _who(peer))


def published(session: Session, version: Version, *, is_new: bool) -> None:
    """Log a version that is there now."""
    if _log.isEnabledFor(logging.INFO):
        event = "vram.entry.published" if is_new else "vram.entry.replaced"
        said = {
            "vram.entry.name": version.name,
            "vram.entry.version": version.number,
            "vram.entry.size": version.nbytes,
        }
        _event(logging.INFO, event, {**said, **_whose(session)})


def removed(session: Session, name: str, version: int, *, revoke: bool, force: bool) -> None:
    """Log that an entry, or one version of it, was removed or revoked."""
    if _log.isEnabledFor(logging.INFO):
        said: dict[str, Any] = {"vram.entry.name": name}
        if version:
            said["vram.entry.version"] = version
        if force:
            said["vram.revoke.forced"] = True
        _event(
            logging.INFO, "vram.entry.revoked" if revoke or force else "vram.entry.removed", {**said, **_whose(session)}
        )


def _who(peer: _Peer) -> dict[str, Any]:
    if peer.session is not None:
        return _whose(peer.session)
    return {"user.id": peer.credentials.uid, "process.pid": peer.credentials.pid}


def _whose(session: Session) -> dict[str, Any]:
    """The user and the process are the kernel's word; what it says it is, its own."""
    who: dict[str, Any] = {"user.id": session.uid, "process.pid": session.pid or None}
    if session.label:
        who["vram.client.label"] = session.label
    if session.host:
        who["vram.client.host"] = session.host
    return who


# -- lines ------------------------------------------------------------------------------------------------------------
def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Return the time, the severity, the event and the fields of a record; one that is not ours has a text only."""
    fields, event = record.__dict__.get("vram"), record.msg
    if fields is None:
        event, fields = "vram.keeper.log", {"body": record.getMessage(), "log.logger": record.name}
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields |= {"error.type": type(error).__name__, "exception.stacktrace": _trace(error)}
    said = {name: _clipped(value) for name, value in fields.items() if value is not None}
    return {"timestamp": _timestamp(record.created), "severity": record.levelname, "event.name": event, **said}


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = _fields(record)
        if "user.id" in line:  # as strings, say OpenTelemetry's conventions
            line["user.id"] = str(line["user.id"])
        return _quoted(line)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when, severity, event, *rest = _fields(record).items()
        parts = [when[1], severity[1], event[1]]
        for name, value in rest:
            text = str(value)
            parts.append(f"{name}={text if _PLAIN.fullmatch(text) else _quoted(text)}")
        return " ".join(parts)


def _clipped(value: Any) -> Any:
    return value if not isinstance(value, str) or len(value) <= _MOST_TEXT else value[: _MOST_TEXT - 3] + "..."


def _quoted(value: object) -> str:
    """As JSON, in ASCII alone: whatever anybody wrote, it ends no line and a terminal obeys none of it."""
    return json.dumps(value)


def _timestamp(when: float) -> str:
    """RFC 3339, in UTC, with microseconds."""
    seconds, micro = divmod(round(when * 1e6), 1_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{micro:06}Z"


def _trace(error: BaseException) -> str:
    """The end of a traceback, which is where it broke."""
    return "".join(traceback.format_exception(error))[-_MOST_TEXT:]
