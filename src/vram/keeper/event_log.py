"""What happens in a keeper, one line for each event: ``vram keep --log json``.

It is :mod:`logging`'s logger ``vram.keeper`` with a handler and formatters of its own, and off unless :func:`start` was
called: a lender runs the same code inside somebody's program, whose log is not ours to write to.

Strangers choose when events happen and what words are in them. So every value is escaped; each user has
:data:`MOST_LINES` a second, and what is left out is counted and said; and a thread writes, since whoever reads the
other end may have stopped: what finds no room in its queue is counted and said as well, and the keeper never waits.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Protocol

from ..errors import ProtocolError, QuotaError
from .records import Session, Version

if TYPE_CHECKING:
    from ..sharing.channel import Credentials

__all__ = [
    "FORMS", "LEVELS", "MOST_LINES", "SLOW", "EventHandler", "answered", "broke", "connected", "disconnected", "ended",
    "failed", "gave_up_takeover", "overdue", "published", "refused", "removed", "say", "start", "stop",
]  # fmt: skip

FORMS: Final = ("json", "text")
LEVELS: Final = ("debug", "info", "warning", "error")
MOST_LINES: Final = 20  # a second, of one user
SLOW: Final = 0.1  # seconds that a request takes which is said
_MOST_QUEUED: Final = 2_000  # lines that nobody has read
_MOST_TEXT: Final = 500  # characters of a value that others wrote
_LAST: Final = 1.0  # seconds that the end waits for who reads
_PLAIN = re.compile(r"[A-Za-z0-9._/@:+~\-]+")

_Line = tuple[float, str, str, dict[str, Any]]

_log = logging.getLogger("vram.keeper")
_log.propagate = False
_log.addHandler(logging.NullHandler())
_log.setLevel(logging.CRITICAL + 1)
_handler: EventHandler | None = None


class _Peer(Protocol):
    """What an event says of a connection."""

    credentials: Credentials
    session: Session | None


class EventHandler(logging.Handler):
    """Writes lines to a descriptor from a thread, and never waits for whoever reads them.

    Parameters
    ----------
    fd : int
        Borrowed.
    form : str
        ``"json"`` or ``"text"``.
    """

    def __init__(self, fd: int, form: str) -> None:
        super().__init__()
        self._fd = fd
        self._write = _as_json if form == "json" else _as_text
        # What is to be written; nothing wakes the thread, None ends it.
        self._lines: SimpleQueue[_Line | tuple[()] | None] = SimpleQueue()
        self._dropped = 0
        self._second = 0
        self._counts: dict[int, int] = {}  # lines of each user in this second
        self._over = False  # whether some user had more than it may
        self._thread = threading.Thread(target=self._work, name="vram event log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line. With the handler's lock, which the thread holds for no longer than this does."""
        try:
            self._count_and_queue(record)
        except Exception:  # noqa: BLE001  (Logger.log would pass it on to a keeper that has other things to do)
            self._dropped += 1

    def _count_and_queue(self, record: logging.LogRecord) -> None:
        self._end_second(int(time.monotonic()))
        uid = record.__dict__.get("vram", {}).get("user.id")
        if uid is not None:
            count = self._counts[uid] = self._counts.get(uid, 0) + 1
            if count > MOST_LINES:
                if not self._over:
                    self._over = True
                    self._lines.put(())  # the thread waits for the end of this second from now on
                return
        self._queue(_fields(record))

    def _end_second(self, now: int) -> None:
        """Say whose lines were left out in the second that is over."""
        if now == self._second:
            return
        self._second, counts, over = now, self._counts, self._over
        if counts:
            self._counts, self._over = {}, False
        if over:
            for uid, count in counts.items():
                if count > MOST_LINES:
                    said = {"user.id": uid, "vram.log.suppressed": count - MOST_LINES}
                    self._queue((time.time(), "WARNING", "vram.log.suppressed", said))

    def _queue(self, line: _Line) -> None:
        if self._lines.qsize() >= _MOST_QUEUED:
            self._dropped += 1
            return
        self._say_dropped()
        self._lines.put(line)

    def _say_dropped(self) -> None:
        if self._dropped:
            count, self._dropped = self._dropped, 0
            self._lines.put((time.time(), "WARNING", "vram.log.dropped", {"vram.log.dropped": count}))

    def _work(self) -> None:
        while True:
            try:
                line = self._lines.get(timeout=1.0 if self._over else None)
            except Empty:  # nobody says anything more: what was left out is said all the same
                self.acquire()
                try:
                    self._end_second(int(time.monotonic()))
                finally:
                    self.release()
                continue
            if line is None:
                return
            if not line:
                continue
            rest = self._write(*line).encode("ascii", "backslashreplace")
            try:
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
            except OSError:  # who read them is gone: the keeper is not
                continue

    def close(self) -> None:
        """Write what there is, as far as somebody reads it within a second."""
        self.acquire()
        try:
            self._end_second(-1)
            self._say_dropped()
            self._lines.put(None)
        finally:
            self.release()
        self._thread.join(_LAST)
        super().close()


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
    # Not Logger.log, which looks up the line that calls it, for 10 us.
    record = logging.LogRecord(_log.name, level, "", 0, event, None, None)
    record.__dict__["vram"] = fields
    _log.handle(record)


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


def salvaged(error: Exception, entries: int) -> None:
    """Log that the keeper before left a log that does not fit: entries were kept; without a log, print that."""
    if _handler is None:
        print(
            f"vram keep: what the keeper before wrote down does not fit, {entries} entries were kept and every client "
            f"is disconnected: {error}",
            file=sys.stderr,
        )
        return
    said = {"error.type": type(error).__name__, "error.message": str(error), "vram.keeper.entries": entries}
    _event(logging.ERROR, "vram.keeper.salvaged", said)


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
def _fields(record: logging.LogRecord) -> _Line:
    """What a record says: the time, the severity, the event, and its fields. One that is not ours has a text only."""
    fields = record.__dict__.get("vram")
    if fields is not None:
        return record.created, record.levelname, record.msg, fields
    said = {"body": record.getMessage(), "log.logger": record.name}
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        said |= {"error.type": type(error).__name__, "exception.stacktrace": _trace(error)}
    return record.created, record.levelname, "vram.keeper.log", said


def _as_json(when: float, severity: str, event: str, fields: dict[str, Any]) -> str:
    line: dict[str, Any] = {"timestamp": _timestamp(when), "severity": severity, "event.name": event}
    for name, value in fields.items():
        if value is not None:  # as strings, say OpenTelemetry's conventions
            line[name] = str(value) if name == "user.id" else _clipped(value)
    return _quoted(line) + "\n"


def _as_text(when: float, severity: str, event: str, fields: dict[str, Any]) -> str:
    parts = [_timestamp(when), severity, event]
    for name, value in fields.items():
        if value is not None:
            text = str(_clipped(value))
            parts.append(f"{name}={text if _PLAIN.fullmatch(text) else _quoted(text)}")
    return " ".join(parts) + "\n"


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
