"""A program's side of the keeper: synchronous, thread-safe, one connection per process and path."""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec.structs import replace

from ..errors import (
    AccessDeniedError,
    BusyError,
    NotFoundError,
    ProtocolError,
    UsageError,
    WaitTimeoutError,
)
from ..lifetime import shielded, stuck, take, waiting
from ..open_files import close_fds
from ..sharing.channel import OwnedFds
from ..sharing.descriptor import MAX_SEGMENTS
from ..sharing.parcels import Collector, Sender
from ..spec import HandleKind, check_timeout
from . import messages as m
from .failures import no_keeper
from .paths import ENVIRONMENT, find_path
from .rpc_connection import Call, RpcConnection
from .rules import (
    HANDSHAKE,
    MAX_MANIFEST,
    check_meta,
    check_name,
    check_prefix,
    check_size,
    check_ttl,
    check_version,
    clip_label,
)

if TYPE_CHECKING:
    from ..lifetime import Handle
    from .background import Key, Signal, Subscription
    from .reports import EntryInfo, HolderInfo, RevokeInfo, StatisticsInfo, VersionInfo

_PART = 32  # descriptors sent at once: as many as a keeper that may have 1,024 takes from any user


_LISTED = 1000  # leases that are named after a revocation; a user may have many more, and its time is over by then
_FIRST_LOOK, _LAST_LOOK = 0.005, 0.25  # seconds between two polls for the leases that are left on a revoked version

_Row = TypeVar("_Row")


class Segment(NamedTuple):
    """The memory behind one descriptor: bytes, kind of handle, and ``"host"`` or the UUID of its GPU."""

    size: int
    kind: int = int(HandleKind.POSIX_FD)
    device: str = "host"


@dataclass(slots=True)
class Attachment:
    """A lease and its descriptors, both the caller's: ``fds[0]`` is the manifest's if `manifest_fd` is not None.
    `moves` is the right to move the bytes; then `has_publisher` says that another connection published it and lives."""

    lease_id: int
    name: str
    version: int
    owner: int
    segments: Sequence[m.SegmentRow]
    fds: list[int]
    manifest: bytes
    manifest_fd: int | None
    meta: dict[str, str]
    writable: bool
    moves: bool = False
    has_publisher: bool = False


class KeeperClient(RpcConnection):
    """A client of a keeper, made by :meth:`connect` or shared by the process through :func:`client`.
    `writers` has by name what updates a publication; `placed` its version, and handles and bytes of its GPU memory."""

    writers: dict[str, Any] | None = None
    placed: dict[str, tuple[int, list[tuple[Handle | None, int]]]] | None = None

    # -- publishing -----------------------------------------------------------------------------------------------
    def publish(
        self,
        name: str,
        segments: Sequence[Segment],
        fds: Sequence[int],
        *,
        manifest: bytes = b"",
        manifest_fd: int | None = None,
        writable: bool = False,
        meta: Mapping[str, str] | None = None,
        ttl: float | None = None,
        claim: m.Claimed | None = None,
        updatable: bool = False,
        lease: int = 0,
    ) -> int:
        """Publish a new version in one step, or with `lease` move the bytes of one; return its number. `fds` are lent.
        Memfds are sealed in size, and against writing unless `writable`; `manifest` has at most 32 KiB."""
        if self.lends:  # it would say so itself, but its socket takes no message with descriptors
            raise no_keeper(self.path, self.server_pid)
        check_name(name)
        if not 1 <= len(segments) <= MAX_SEGMENTS or len(fds) != len(segments):
            raise UsageError(
                f"{len(segments)} segments and {len(fds)} descriptors; a version has 1 to {MAX_SEGMENTS} of each"
            )
        if len(manifest) > MAX_MANIFEST:
            raise UsageError(
                f"a manifest of {len(manifest)} bytes; {MAX_MANIFEST} is the most inside a message: pass manifest_fd"
            )
        check_size(sum([segment.size for segment in segments]))
        devices = list(dict.fromkeys([segment.device for segment in segments]))
        rows = [m.SegmentRow(segment.size, int(segment.kind), devices.index(segment.device)) for segment in segments]
        everything = list(fds) if manifest_fd is None else [manifest_fd, *fds]
        fields = (
            name, rows, devices, manifest, manifest_fd is not None, writable, check_meta(meta) if meta else {},
            None if ttl is None else check_ttl(ttl), 0 if claim is None else claim.claim, updatable, lease,
        )  # fmt: skip
        while True:
            generation = self._generation
            try:
                version = self._publish_in_parts(fields, everything)
                break
            except NotFoundError:  # of the parts that a keeper had got, the one that follows it has none
                if generation == self._generation:
                    raise
        if self.writers:
            self.writers.pop(name, None)  # what was replaced is updated no more
        return version

    def _publish_in_parts(self, fields: tuple[Any, ...], fds: Sequence[int]) -> int:
        """Send a publication with its descriptors, and return the number of the version."""
        request = m.Publish(next(self._numbers), *fields)
        parcels = Sender(len(fds), _PART)
        for part in parcels:
            said = m.Part(next(self._numbers), request.call, part.start) if part.start else request
            reply, _ = self._converse(said, fds[part], time.monotonic() + self.grace)
            if parcels.sent == parcels.total and type(reply) is m.Published:
                return reply.version
            if type(reply) is not m.NextPart:
                break
            try:
                parcels.acknowledge(reply.received)
            except ProtocolError as error:
                raise self._fail(error) from None
        raise self._protocol_error(reply)

    def offer(
        self,
        name: str,
        nbytes: int,
        *,
        handles: int = 1,
        meta: Mapping[str, str] | None = None,
        ttl: float | None = None,
        claim: m.Claimed | None = None,
    ) -> None:
        """Raise what :meth:`publish` would raise now; reserve nothing.
        It is for publishers that first have to do what cannot be undone, such as sealing their memory."""
        check_name(name)
        check_size(nbytes)
        notes, number = check_meta(meta) if meta else {}, 0 if claim is None else claim.claim
        self._request(m.Done, m.Offer, name, nbytes, handles, notes, None if ttl is None else check_ttl(ttl), number)

    def abandon(self, claim: m.Claimed) -> None:
        """Give up a claim, so that the next in line gets it. One that is over already is no mistake."""
        self.release([claim.claim])

    def take_over(self, fd: int) -> None:
        """Have the keeper end, and a guardian at the other end of `fd` get everything."""
        owner = self.server().uid
        if owner != os.geteuid():
            raise AccessDeniedError(f"the keeper at {self.path} is of uid {owner}, not of uid {os.geteuid()}")
        self._request(m.Done, m.Takeover, fds=[fd])

    # -- attaching ------------------------------------------------------------------------------------------------
    def attach(self, name: str, **asked: Any) -> Attachment:
        """Lease a version; the caller gives it back. The arguments are those of :meth:`attach_request`."""
        request = self.attach_request(name, **asked)
        deadline = None if request.wait is None else time.monotonic() + request.wait + self.grace
        return self._leased_by(*self._converse(request, (), deadline), deadline)

    def attach_or_claim(self, name: str, *, timeout: float | None = None, **asked: Any) -> Attachment | m.Claimed:
        """Lease the current version if it is as expected; else claim the name to publish it, or wait for its claimant.
        The claim is to be fulfilled or abandoned. It ends with the connection, and passes on to a waiter."""
        request = self.attach_request(name, timeout=timeout, claim=True, **asked)
        deadline = None if request.wait is None else time.monotonic() + request.wait + self.grace
        reply, fds = self._converse(request, (), deadline)
        return reply if isinstance(reply, m.Claimed) else self._leased_by(reply, fds, deadline)

    def attach_request(
        self,
        name: str,
        *,
        version: int | None = None,
        access: str = "r",
        expect: Mapping[str, str] | None = None,
        timeout: float | None = 0.0,
        claim: bool = False,
        owner: int | None = None,
        purpose: str = "",
    ) -> m.Attach:
        """Return the request for a lease on a version, which may wait up to `timeout` seconds (None: for ever).
        With `purpose` ``"park"`` or ``"wake"`` the lease may be one to move the bytes by, and says so."""
        check_name(name)
        if version is not None:
            check_version(version)
        wanted = None if expect is None else check_meta(expect, what="expect")
        if timeout is not None:
            if not (type(timeout) is float and timeout >= 0):  # as every attach has it; a call costs more
                check_timeout(timeout)
            timeout = min(float(timeout), 1e9)
        call = next(self._numbers)
        return m.Attach(call, name, version or 0, access, wanted, timeout, claim, owner, purpose)

    def give_back(self, leased: Attachment) -> None:
        """Give a lease and its descriptors back. Never waits."""
        self.release_later(leased.lease_id)
        close_fds(leased.fds)

    def release(self, lease_ids: Sequence[int]) -> None:
        """Give leases back and wait until the keeper has taken note."""
        self._request(m.Done, m.Release, list(lease_ids))

    def rest(self, lease_id: int, *, asleep: bool = True) -> None:
        """Say that nothing is mapped by a lease any more, so that its version may be parked, or that it is again."""
        self._request(m.Done, m.Sleep, lease_id, asleep)

    # -- watching -------------------------------------------------------------------------------------------------
    def state(self, lease_id: int) -> m.LeaseState:
        """Return the state of a leased version."""
        return self._request(m.LeaseState, m.State, lease_id)

    def is_stale(self, leased: Attachment) -> bool:
        """Return whether the leased version is no longer the one that attaching by name would give."""
        return self.state(leased.lease_id).stale

    def is_revoked(self, leased: Attachment) -> bool:
        """Return whether the readers of the leased version were asked to let go."""
        return self.state(leased.lease_id).revoked

    @shielded(undo=lambda _, made: made.stop())
    def watch(self, key: Key, owner: object, tell: Callable[[Any], object], *, of_all: bool = False) -> Subscription:
        """Have ``tell(owner)`` called once, in a thread of the library, when a version is revoked, or if it was
        already. `owner` is held weakly. `of_all` adds a newer version, a removal, and the end of the keeper."""
        from .background import Subscription  # few leases are watched

        if not self.is_usable:
            raise self._hung_up()  # another keeper may be at that path, with other memory of that name and number
        # Before the keeper is asked, so that its first news has an address.
        made = Subscription(self.subscriptions, key, owner, tell, of_all)
        try:
            self._request(m.Done, m.Watch, *key)
            made.is_accepted = True
        except BaseException:
            made.stop()
            raise
        return made

    def signal(self, key: Key) -> Signal:
        """Return a descriptor that becomes readable with the first news of a leased version, or the keeper's end."""
        from .background import Signal

        made = Signal()
        try:
            made.subscription = self.watch(key, made, Signal.give, of_all=True)
        except BaseException:
            made.close()
            raise
        return made

    # -- retiring -------------------------------------------------------------------------------------------------
    def remove(self, name: str, version: int | None = None, *, revoke: bool = False) -> None:
        """Take a name, or one version of it, out of the catalogue; with `revoke` its readers are asked to let go."""
        check_name(name)
        self._request(m.Done, m.Remove, name, version or 0, revoke)
        for known in (self.writers, self.placed):
            if known and not version:
                known.pop(name, None)

    def revoke(self, name: str, version: int | None = None, *, timeout: float | None = 10.0) -> RevokeInfo:
        """Remove a name or version, ask its readers to let go, and wait for that, up to `timeout` seconds."""
        from .reports import RevokeInfo  # loaded here: processes that only attach need none of it

        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self.remove(name, version, revoke=True)
        asked = {row.version for row in self._left(name) if row.is_revoked} if version is None else {version}
        pause = _FIRST_LOOK
        while True:
            left = [row for row in self._left(name) if row.version in asked]
            time_left = deadline - time.monotonic()
            if not left or time_left <= 0:
                break
            # Most readers release at once or not soon: polled seldom, a keeper is not kept busy by this wait.
            waiting(time.sleep, min(pause, time_left))
            pause = min(pause * 1.5, _LAST_LOOK)
        holders = (holder for row in left for holder in self.holders_of(name, row.version))
        listed = tuple(itertools.islice(holders, _LISTED))
        more = max(0, sum(row.readers for row in left) - _LISTED) if len(listed) == _LISTED else 0
        held = {holder.version for holder in listed}
        if more:  # what is behind the last one that is listed was not looked at
            held.update(row.version for row in left if row.version > listed[-1].version)
        return RevokeInfo(name, listed, sum(row.nbytes for row in left if row.version in held), more)

    def _left(self, name: str) -> Sequence[VersionInfo]:
        """Return the versions of a name that nobody can attach by name and somebody holds."""
        try:
            return [row for row in self.versions(name) if row.readers and not row.is_current]
        except NotFoundError:
            return []

    def _leased_by(self, reply: m.Reply, first: list[int] | None, deadline: float | None = None) -> Attachment:
        """Return the lease that a reply grants, once all of its descriptors have come, before a deadline. Raises an
        error that it is."""
        if first is None or isinstance(reply, m.Error):
            raise self._refused(reply)
        if not isinstance(reply, m.Attached):
            raise self._protocol_error(reply)
        entry, fds = reply.entry, first
        total = len(entry.segments) + entry.manifest_fd
        try:
            if reply.total != total:
                raise ProtocolError(f"a lease is said to come with {reply.total} descriptors for {total}")
            for segment in entry.segments:
                if segment.device >= len(entry.devices):
                    raise ProtocolError(f"a lease came with memory on device {segment.device} of {len(entry.devices)}")
            if len(first) != total:
                fds = parts = Collector(total, is_armed=False)
                parts.take(0, first)
                while not parts.is_complete:
                    until = min(time.monotonic() + self.grace, deadline or math.inf)
                    more, came = self._converse(m.More(next(self._numbers), reply.lease, len(parts)), (), until)
                    if type(more) is not m.Descriptors:
                        raise self._protocol_error(more)
                    parts.take(more.offset, came)
        except BaseException as error:
            close_fds(fds)
            self._drop(reply, first)
            if isinstance(error, ProtocolError):
                raise self._fail(error) from None
            raise
        if isinstance(fds, OwnedFds):
            fds.is_armed = False  # the caller closes them
        return Attachment(
            reply.lease, entry.name, entry.version, entry.owner, entry.segments, fds, entry.manifest,
            fds[0] if entry.manifest_fd else None, entry.meta, entry.writable, reply.moves, reply.has_publisher,
        )  # fmt: skip

    # -- updates in place -------------------------------------------------------------------------------------------
    # The publisher's page of words says what readers look at before and after each section; the page of each lease says
    # whether a thread of its holder is in one. The keeper looks at those for the publisher, and remembers whether an
    # update is under way, since it hears of the end of the process that makes it.
    def give_page(self, lease_id: int, fd: int) -> None:
        """Have the keeper keep the page of words of a lease, for the publisher of its version. `fd` is lent."""
        self._request(m.Done, m.Page, lease_id, fds=[fd])

    def begin_update(self, name: str, version: int) -> None:
        """Say that this process is about to update a version, which it published over this connection."""
        self._request(m.Done, m.Update, name, version)

    def pages(self, name: str, version: int, after: int, but: int = 0, *, first: bool = False) -> m.PageList:
        """Return the readers of a version of this connection, of some leases above `after`, that are in a section of
        another slot than `but`; or with `first` those of a ring, with the frame that each is done with."""
        return self._request(m.PageList, m.Pages, name, version, after, but, first)

    def end_update(self, name: str, version: int, updates: int, *, whole: bool) -> None:
        """Say that an update is over, and how many of them were whole."""
        self._request(m.Done, m.Update, name, version, updates, whole)

    # -- looking ------------------------------------------------------------------------------------------------------
    # The classes of the replies are loaded by the first of these: each takes a millisecond to make, and a process that
    # only attaches asks for none.
    def list(self, prefix: str = "") -> list[EntryInfo]:
        """Return the entries whose names begin with `prefix`, in order."""
        from .reports import EntryInfo

        check_prefix(prefix)
        return [*self._rows(EntryInfo, lambda call, row: m.List(call, prefix, row.name if row else ""))]

    def page(self, prefix: str = "", after: str = "") -> tuple[Sequence[EntryInfo], bool]:
        """Return the entries behind the name `after`, as many as one message takes, with devices and without meta;
        and whether there are more."""
        from .reports import EntryInfo

        page = self._request(m.Rows, m.List, check_prefix(prefix), after, True)
        return m.decode_rows(page.rows, EntryInfo), page.more

    def show(self, name: str) -> EntryInfo:
        """Return everything the keeper knows about a name: its versions and their leases."""
        from .reports import shown_entry

        versions = list(self.versions(check_name(name)))
        holders: defaultdict[int, list[HolderInfo]] = defaultdict(list)
        for one in itertools.takewhile(lambda one: one.name == name, self._leases_under(name, (name, 0, 0))):
            holders[one.version].append(one)
        return shown_entry(name, [replace(row, holders=tuple(holders[row.version])) for row in versions])

    def versions(self, name: str, after: int = 0) -> Iterator[VersionInfo]:
        """Yield the versions of a name that are above `after`, without their holders, oldest first."""
        from .reports import VersionInfo

        return self._rows(VersionInfo, lambda call, row: m.Versions(call, name, row.version if row else after))

    def holders_of(self, name: str, version: int) -> Iterator[HolderInfo]:
        """Yield the leases on a version, oldest first; none, once it or its name is gone."""
        found = self._leases_under(name, (name, version, 0))
        return itertools.takewhile(lambda one: (one.name, one.version) == (name, version), found)

    def holders(self, prefix: str = "") -> Sequence[HolderInfo]:
        """Return the leases on names that begin with `prefix`, by name, version and age.
        Leases on removed versions are included; leases that this connection has given back are not."""
        return list(self._leases_under(check_prefix(prefix), ("", 0, 0)))

    def _leases_under(self, prefix: str, after: tuple[str, int, int]) -> Iterator[HolderInfo]:
        """Yield the leases on names that begin with `prefix` behind a place: a name, a version and a lease."""
        from .reports import HolderInfo

        return self._rows(
            HolderInfo,
            lambda call, row: m.Holders(call, prefix, (row.name, row.version, row.lease_id) if row else after),
        )

    def _rows(self, kind: type[_Row], request: Callable[[int, Any], m.Request]) -> Iterator[_Row]:
        """Yield the rows of all pages. `request` makes one from the number of the call and the last row, if any."""
        row: Any = None
        while True:
            page = self._request(m.Rows, request, row)
            for row in m.decode_rows(page.rows, kind):
                yield row
            if not page.more or not page.rows:
                return

    def statistics(self) -> StatisticsInfo:
        """Return how much the keeper holds, and how much this process could not release."""
        from .reports import StatisticsInfo

        (info,) = m.decode_rows(self._request(m.Rows, m.Statistics).rows, StatisticsInfo)
        return replace(info, stuck=len(stuck()))

    def measure(self) -> m.Measurements:
        """Return the counts of the keeper since its start."""
        return self._request(m.Measurements, m.Measure)


class PendingLease:
    """A lease that was asked for, for as long as it takes; its caller does not wait. `ring` is called in any thread
    when :meth:`take` has something to say; :meth:`cancel` gives back what comes. The other arguments are those of
    :meth:`KeeperClient.attach_request`."""

    def __init__(self, client: KeeperClient, name: str, ring: Callable[[], object], **asked: Any) -> None:
        self.client = client
        self._call = Call(client, client.attach_request(name, **{"timeout": None, **asked}), ring)
        try:
            client._send(self._call)
        except BaseException:
            self.cancel()
            raise

    def take(self) -> Attachment | None:
        """Return the lease if it has come, else None. Raises what the keeper says instead."""
        if not self._call.answers:
            self.client.look(self._call)
            return None
        return self.client._leased_by(*self._call.answers.pop())

    def cancel(self) -> None:
        """Wait no more. Idempotent."""
        self.client.give_up(self._call)

    def __del__(self) -> None:
        if hasattr(self, "_call"):  # its event loop was closed, perhaps
            self.cancel()


_clients: dict[str, KeeperClient] = {}  # changed in single steps, without a lock
# Held by who connects to a path: one for each, or whoever listens at one and does not greet would keep all others
# waiting. Reentrant only to be asked who has it: a signal handler must not wait for its own thread.
_connecting: dict[str, threading.RLock] = {}


def client(path: str | None = None, *, label: str = "", timeout: float = HANDSHAKE) -> KeeperClient:
    """Return this process's one connection to the keeper at `path`, made anew after a fork or another keeper's start.
    `label` is said once a connection, so another one is refused. `timeout` is the seconds to connect and be greeted."""
    named = os.environ.get(ENVIRONMENT, "") if path is None else path
    existing = _clients.get(named)  # as it is mostly named: by an absolute path
    found = find_path(path)[0] if existing is None else existing.path
    existing = existing or _clients.get(found)
    if existing is not None and existing.is_usable:
        return _labelled(existing, label) if label else existing
    return _connected(path, found, label, timeout)


@shielded
def _connected(path: str | None, found: str, label: str, timeout: float) -> KeeperClient:
    """Make the connection to what listens at a path, unless another thread does."""
    lock = _connecting.setdefault(found, threading.RLock())
    if lock._is_owned():  # type: ignore[attr-defined]  # threading.Condition asks the same
        raise BusyError(f"this thread is connecting to {found}: what interrupted it cannot talk to it now")
    deadline = time.monotonic() + timeout
    if not take(lock, timeout):
        raise WaitTimeoutError(f"what listens at {found} has not greeted another thread that connects to it either")
    try:
        existing = _clients.get(found)
        if existing is not None:
            if existing.is_usable:
                return _labelled(existing, label)
            _clients.pop(found, None)
            existing._hung_up()  # closes it; leases that were taken over it say that the keeper is gone
        left = max(0.001, deadline - time.monotonic())
        made = _clients[found] = KeeperClient.connect(path, timeout=left, label=label or own_label())
        return made
    finally:
        lock.release()


def _labelled(existing: KeeperClient, label: str) -> KeeperClient:
    if label and clip_label(label) != clip_label(existing.label):
        raise UsageError(
            f"this process is connected to {existing.path} as {clip_label(existing.label)!r}, which is said once: give "
            f"label={label!r:.130} before the first call there, or set VRAM_LABEL"
        )
    return existing


def clients() -> list[KeeperClient]:
    """Return this process's connections to keepers."""
    return list(_clients.values())


def leave_client(connection: KeeperClient) -> None:
    """Have :func:`client` make a new connection next time; this one lasts as long as the leases over it do."""
    taken = _clients.pop(connection.path, None)
    if taken is not None and taken is not connection:
        _clients.setdefault(connection.path, taken)


@shielded
def close_client(path: str) -> None:
    """End the connection that :func:`client` made to the keeper at `path`, if there is one."""
    existing = _clients.pop(path, None)  # in one step: a finalizer may come here (I3)
    if existing is not None:
        existing.close()


def own_label() -> str:
    """Return what this process calls itself: ``VRAM_LABEL`` of its environment, else the name of its program."""
    named = os.environ.get("VRAM_LABEL")
    if not named:
        directory, named = os.path.split(sys.argv[0] if sys.argv else "")
        if named == "__main__.py":  # python -m: the package says what it is
            named = os.path.basename(directory) or named
    return clip_label(named or "python")


def _after_fork_in_child() -> None:
    _connecting.clear()
    _clients.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
