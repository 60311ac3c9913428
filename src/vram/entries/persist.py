"""``python -m vram.entries.persist``: have a folder agree with the entries of a keeper, which starts this, and end.

Its input is an :class:`~vram.keeper.disk.Order`, its output a line for each :class:`~vram.keeper.disk.Outcome`. Each
entry has a sub-folder of its own, with the slashes of its name as commas, which no name has. A sub-folder is ours if it
has a record, which is therefore written first and removed last; other folders and files are left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..arrays import weights
from ..arrays.weights_out import flush, remove_model
from ..errors import NotFoundError, UsageError, VramError
from ..keeper.client import client as client_at
from ..keeper.disk import Order, Outcome, Wanted
from ..keeper.messages import Claimed
from ..keeper.rules import check_meta, check_name
from ..spec import Location
from .publish_file import Saved, publish_plan, saved_in
from .save import save

if TYPE_CHECKING:
    from ..keeper.client import KeeperClient

_RECORD, _PART, _LOCK = "saved.json", "saved.json.part", ",program"  # no entry has a name that begins with a comma
_TRIES = 3  # versions that may be replaced before they are read
_TIMEOUT = 60.0  # seconds for an update that is under way


def _folder(path: Path) -> str:
    return f"{path}/"  # so that it is no file, whatever it is called


class Record(msgspec.Struct):
    """The version that a sub-folder has; version 0: it is being saved for the first time."""

    instance: str = ""
    version: int = 0
    updates: int = 0


class Folder:
    """The folder of one order, and what is done for it."""

    def __init__(self, order: Order, client: KeeperClient) -> None:
        self._order, self._client = order, client

    def agree(self) -> None:
        """Do all that is ordered, and say for each entry what was done, if anything was."""
        rows = {row.name: row for row in self._order.rows}
        if self._order.is_start:
            for one in sorted(os.listdir(self._order.folder)):
                name = one.replace(",", "/")
                if one.isascii() and name.startswith(self._order.prefix) and not (name in rows and rows[name].version):
                    self._try(name, "restored", partial(self._look_at, name, rows))
        for row in rows.values():
            if row.version:
                self._try(row.name, "saved", partial(self._save, row))
            else:
                self._try(row.name, "removed", partial(self._remove, row.name))

    def _look_at(self, name: str, rows: dict[str, Wanted]) -> bool:
        """Publish an entry that the keeper lacks, or have it removed; return whether it was published."""
        record = self._record(name)
        if record is None:
            return False
        if record.instance == self._order.instance:  # it was removed while nobody looked
            rows[name] = Wanted(name, 0, 0)
            return False
        return rows.pop(name, None) is None and record.version > 0 and self._publish(name)

    def _path(self, name: str) -> Path:
        return Path(self._order.folder, name.replace("/", ","))

    def _record(self, name: str) -> Record | None:
        """Return the record of a sub-folder; None if there is none. Raises UsageError if it cannot be read."""
        try:
            return msgspec.json.decode((self._path(name) / _RECORD).read_bytes(), type=Record)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(f"{str(self._path(name) / _RECORD)!r} cannot be read: {error}") from None

    def _note(self, name: str, record: Record) -> None:
        made = self._path(name) / _PART
        with open(made, "wb") as file:
            file.write(msgspec.json.encode(record))
            os.fsync(file.fileno())
        os.rename(made, made.with_name(_RECORD))
        flush(str(made.parent))

    def _save(self, row: Wanted) -> bool:
        """Save a version, unless it is there; return whether it was saved."""
        path = self._path(row.name)
        wanted = Record(self._order.instance, row.version, row.updates)
        with contextlib.suppress(UsageError):  # a record that cannot be read is replaced
            if self._record(row.name) == wanted and self._is_whole(path):
                return False
        if not (path / _RECORD).exists():
            if path.exists() and set(os.listdir(path)) - {_PART}:
                raise UsageError(f"{str(path)!r} is there already, and was not made by this")
            path.mkdir(mode=0o700, exist_ok=True)
            flush(self._order.folder)
            self._note(row.name, Record())
        for _ in range(_TRIES):
            try:
                save(row.name, _folder(path), version=wanted.version, timeout=_TIMEOUT, keeper=self._client.path)
                self._note(row.name, wanted)
                return True
            except NotFoundError:  # replaced or removed: the keeper orders that as well, but not before long
                newer = self._eligible(row.name)
                if newer is None:
                    return False
                wanted = Record(self._order.instance, newer)
        return False

    def _eligible(self, name: str) -> int | None:
        """Return the current version of an entry, if that is to be saved."""
        with contextlib.suppress(NotFoundError):
            shown = self._client.show(name)
            if shown.version and shown.owner == os.geteuid() and shown.ttl_left is None and not shown.writable:
                return shown.version
        return None

    @staticmethod
    def _is_whole(path: Path) -> bool:
        try:
            weights.plan(_folder(path))
        except VramError:
            return False
        return True

    def _remove(self, name: str) -> bool:
        """Remove what was written here of an entry; return whether there was anything."""
        path = self._path(name)
        if not (path / _RECORD).exists():
            return False
        remove_model(str(path))
        for one in (_PART, _RECORD):
            (path / one).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # somebody else has put something there
            path.rmdir()
        return True

    def _publish(self, name: str) -> bool:
        """Publish an entry, unless somebody else does meanwhile: who asks for it by then waits."""
        plan = weights.plan(_folder(self._path(check_name(name))))
        saved = saved_in(plan) or Saved(1, {}, {})
        claim = self._client.attach_or_claim(name, timeout=0.0)
        if not isinstance(claim, Claimed):
            self._client.give_back(claim)
            return False
        try:
            published = publish_plan(
                self._client, name, plan, Location.parse(saved.device), saved, meta=check_meta(saved.meta),
                writable=False, claim=claim,
            )  # fmt: skip
        except BaseException:
            with contextlib.suppress(VramError):
                self._client.abandon(claim)
            raise
        with contextlib.suppress(OSError):  # a disk that cannot be written to: it is saved anew where it can
            self._note(name, Record(self._order.instance, published.version))
        return True

    def _try(self, name: str, done: str, work: Callable[[], bool]) -> None:
        outcome = Outcome(name, done)
        try:
            if not work():
                return
        except (VramError, OSError, MemoryError) as error:
            outcome.error = f"{error}" or type(error).__name__
            outcome.is_final = isinstance(error, UsageError)
        with contextlib.suppress(OSError):  # the keeper has ended, and hears nothing any more
            sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
            sys.stdout.buffer.flush()


def main() -> None:
    """Carry out one order. One process at a time has a folder: that of a keeper that has ended goes on to its end."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    with contextlib.suppress(OSError):  # nothing can be written there, and each entry says so
        os.makedirs(order.folder, 0o700, exist_ok=True)
        lock = os.open(os.path.join(order.folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
    Folder(order, client_at(order.socket, label="vram keep --persist")).agree()


if __name__ == "__main__":
    main()
