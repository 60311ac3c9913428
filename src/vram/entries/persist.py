"""Entries that survive a reboot: a folder that is published where a keeper lacks it, and written behind what it keeps.

Each entry has a sub-folder of its own, with the slashes of its name as commas, which no name has. A sub-folder that
begins with a comma was an entry, and is on its way out.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..arrays import weights
from ..errors import AccessDeniedError, BusyError, NotFoundError, PeerGoneError, UsageError, VramError
from ..keeper.messages import Claimed
from ..keeper.paths import make_own
from ..keeper.rules import check_meta, check_name
from ..spec import Location, format_count
from .keepers import connect
from .publish_file import Saved, publish_plan, saved_in
from .save import save

if TYPE_CHECKING:
    from ..keeper.client import KeeperClient
    from ..keeper.reports import EntryInfo

LOOK = 1.0  # seconds between two looks at what the keeper has; more, where looking takes a twentieth of that
REST = 30.0  # seconds at least between two saves of an entry that is updated in place
_FIRST_PAUSE, _LAST_PAUSE = 0.1, 1.0  # seconds between two looks for a keeper
_LONGEST = 60.0  # seconds at most until what failed is tried again
_RECORD = "saved.json"
_BOTH = "its keeper or folder"


class Record(msgspec.Struct):
    """The version that a sub-folder has: its number, and when it was published, on the clock of one boot. Without this
    file, or with that of another boot, an entry is saved once more."""

    boot: str
    published: float
    version: int
    updates: int = 0


def own_folder(folder: str) -> str:
    """Return a folder without links, made if it is missing. Raises AccessDeniedError if others may write to it."""
    try:
        return str(make_own(Path(folder)))
    except AccessDeniedError as error:
        raise AccessDeniedError(f"{error}: entries are published from there, so only you may write to it") from None


class Persistence:
    """A folder and what is known of it. One process at a time has a folder.

    Parameters
    ----------
    folder : str
        It is made if it is missing; nobody else may write to it.
    prefix : str
        Only names that begin with it are saved and published.
    say : callable
        It is called with one line about an entry that cannot be saved or published, and when it can be again.
    """

    def __init__(self, folder: str, prefix: str, say: Callable[[str], object]) -> None:
        self._root = own_folder(folder)
        self._prefix, self._say = prefix, say
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self._fd = -1
        self._client: KeeperClient | None = None
        self._pid = 0
        self._known: dict[str, Record | None] = {}  # the names that this connection saw, and what is saved of them
        self._rested: dict[str, float] = {}  # when an updatable entry was looked at last
        self._failed: dict[str, tuple[float, float]] = {}  # when to try again, and after how many seconds then

    def run(self, wait: Callable[[float], bool], keeper: str | None = None) -> None:
        """Publish and save until ``wait(seconds)`` returns True, for whatever keeper serves at the path."""
        import fcntl  # not on every system where this module is imported

        self._fd = lock = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for tries in itertools.count():  # the process of a keeper that is taken over from still has it
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if tries == 1 / _FIRST_PAUSE:
                    self._complain(_BOTH, BusyError(f"another process has {self._root!r}"))
                if wait(_FIRST_PAUSE):
                    return
            pause = 0.0
            while not wait(pause):
                try:
                    pause = self._look(keeper, REST)
                except UsageError:  # such as a path that can be no socket's
                    raise
                except (VramError, OSError) as error:  # it may be a keeper of another version, about to be replaced
                    self._client, pause = None, min(max(2 * pause, _FIRST_PAUSE), _LAST_PAUSE)
                    if pause == _LAST_PAUSE:
                        self._complain(_BOTH, error)
            with contextlib.suppress(VramError, OSError):
                if self._client is not None and self._client.is_usable:
                    self._look(keeper, 0.0)
        finally:
            os.close(lock)

    def _look(self, keeper: str | None, rest: float) -> float:
        """Save what is new, and remove what its owner removed. Return the seconds until the next look."""
        client = connect(keeper)
        self._client, before = client, (self._client, self._pid)
        self._pid = client.server_pid
        if (client, self._pid) != before:  # what this keeper lacks may never have been there: it is published
            self._publish_all(client)
            self._failed.pop(_BOTH, None)
        begun = time.monotonic()
        # What is new nobody tells of: a watch is of a version that is known, and a connection has 1,024 of them.
        own = {entry.name: entry for entry in client.list(self._prefix) if entry.owner == os.geteuid()}
        took = time.monotonic() - begun
        if client.server_pid != self._pid:  # meanwhile another one went on, and may have lost a row
            return 0.0
        for name in self._known.keys() - own.keys():
            if self._try(client, name, "removed from the folder", partial(self._remove, name)):
                del self._known[name]
        for name, entry in own.items():
            if entry.ttl_left is not None:  # it is to end; what was saved before it stays
                self._known.pop(name, None)
            elif self._is_newer(client, entry, begun, rest):
                self._known.setdefault(name, None)
                self._try(client, name, "saved", partial(self._save, client, entry, begun))
        return max(LOOK, 20 * took)

    def _is_newer(self, client: KeeperClient, entry: EntryInfo, now: float, rest: float) -> bool:
        """Return whether an entry is another version than what is saved, or was updated since and had its rest."""
        record = self._known.get(entry.name)
        if record is None or record.version != entry.version:
            return True
        if not entry.updatable or now < self._rested.get(entry.name, 0.0) + rest:
            return False
        self._rested[entry.name] = now
        with contextlib.suppress(VramError):
            return self._updates(client, entry) != record.updates
        return False

    def _updates(self, client: KeeperClient, entry: EntryInfo) -> int:
        leased = client.attach(entry.name, version=entry.version)
        try:
            return client.state(leased.lease_id).updates
        finally:
            client.give_back(leased)

    def _save(self, client: KeeperClient, entry: EntryInfo, now: float) -> None:
        folder = self._folder(entry.name)
        is_new = not os.path.isdir(folder)
        with contextlib.suppress(NotFoundError):  # it was replaced, or removed: the next look sees by what
            updates = self._updates(client, entry) if entry.updatable else 0  # before it is read: or one is missed
            save(entry.name, folder, version=entry.version, keeper=client.path)
            if is_new:
                os.fsync(self._fd)
            self._rested[entry.name] = time.monotonic()
            self._note(entry.name, Record(self._boot, now - entry.age, entry.version, updates))

    def _note(self, name: str, record: Record) -> None:
        """Write down which version is saved, after it was."""
        self._known[name] = record
        made = os.path.join(self._folder(name), f"{_RECORD}.part")
        Path(made).write_bytes(msgspec.json.encode(record))
        os.replace(made, os.path.join(self._folder(name), _RECORD))

    def _remove(self, name: str) -> None:
        folder = self._folder(name)
        gone = os.path.join(self._root, "," + os.path.basename(os.path.dirname(folder)))
        if os.path.lexists(gone):
            shutil.rmtree(gone)
        with contextlib.suppress(FileNotFoundError):
            os.rename(folder, gone)  # in one step: half of the files might be an entry, too
            os.fsync(self._fd)
            shutil.rmtree(gone)

    def _publish_all(self, client: KeeperClient) -> None:
        """Publish what the folder has and the keeper does not."""
        self._known, published = {}, 0
        there = {entry.name: entry for entry in client.list(self._prefix)}
        now = time.monotonic()
        for one in sorted(os.listdir(self._root)):
            name = one.replace(",", "/")
            if not os.path.isdir(os.path.join(self._root, one)):
                continue
            if one.startswith(","):
                self._try(client, one, "removed", partial(shutil.rmtree, os.path.join(self._root, one)))
            elif name in there:
                record, entry = self._recorded(name), there[name]
                same = record and record.version == entry.version and abs(now - entry.age - record.published) < 1.0
                if same and entry.owner == os.geteuid():
                    self._known[name] = record
            elif name.startswith(self._prefix):
                published += self._try(client, name, "published", partial(self._publish, client, name))
        self._say(f"{format_count(published, 'entry', 'entries')} published from {self._root}")

    def _recorded(self, name: str) -> Record | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            record = msgspec.json.decode(Path(self._folder(name), _RECORD).read_bytes(), type=Record)
            return record if record.boot == self._boot else None
        return None

    def _publish(self, client: KeeperClient, name: str) -> None:
        """Publish one entry, unless somebody else does meanwhile: whoever asks for it by then waits."""
        plan = weights.plan(self._folder(check_name(name)))
        saved = saved_in(plan) or Saved(1, {}, {})
        claim = client.attach_or_claim(name, timeout=0.0)
        if not isinstance(claim, Claimed):
            client.give_back(claim)
            return
        try:
            published = publish_plan(
                client, name, plan, Location.parse(saved.device), saved, meta=check_meta(saved.meta),
                writable=saved.writable, claim=claim,
            )  # fmt: skip
        except BaseException:
            with contextlib.suppress(VramError):
                client.abandon(claim)
            raise
        self._known[name] = record = Record(self._boot, time.monotonic(), published.version)
        with contextlib.suppress(OSError):  # a folder that cannot be written to: it is saved when it can
            self._note(name, record)

    def _folder(self, name: str) -> str:
        """Return the sub-folder of a name; with a slash at its end, it is no file whatever the name is."""
        return os.path.join(self._root, name.replace("/", ","), "")

    def _try(self, client: KeeperClient, name: str, what: str, work: Callable[[], None]) -> bool:
        """Do what may fail for one entry, and is tried again later. Raises PeerGoneError if the keeper is gone."""
        again, _ = self._failed.get(name, (0.0, 0.0))
        if time.monotonic() < again:
            return False
        try:
            work()
        except (VramError, OSError, MemoryError) as error:
            if not client.is_usable:
                raise PeerGoneError(client.lost()) from error
            self._complain(name, error, f"not {what}")
            return False
        if self._failed.pop(name, None) is not None:
            self._say(f"{name}: {what}")
        return True

    def _complain(self, name: str, error: BaseException, what: str = "waiting") -> None:
        """Say once what is wrong, until it works again."""
        _, pause = self._failed.get(name, (0.0, 0.0))
        if not pause:
            self._say(f"{name}: {what}: {error or type(error).__name__}")
        pause = min(max(LOOK, 2 * pause), _LONGEST)
        self._failed[name] = time.monotonic() + pause, pause
