"""A program's side of the keeper: synchronous, one connection per process and path, any number of threads.

How threads share the connection: each sends its request and waits for the answer with its number. One of those who
wait reads for all of them, puts down what is for others and, when its own answer has come, leaves reading to the
next. Nobody is woken but for an answer or to read.

Finalizers give leases back too (S5), and may run in any thread at any point: :meth:`KeeperClient.release_later` only
appends to a queue and *tries* to send; who holds the lock for sending looks at the queue again (I3).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from ..errors import (
    PeerGoneError,
    ProtocolError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from ..sharing.channel import MAX_FDS, Channel, close_fds
from ..spec import HandleKind
from . import messages as m
from .failures import raised
from .paths import check_directory, check_server, find_path
from .rules import MAX_MANIFEST, MAX_SEGMENTS, check_meta, check_name, check_prefix, check_ttl, clip_label

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "Attachment",
    "EntryInfo",
    "HolderInfo",
    "KeeperClient",
    "PublishClaim",
    "Segment",
    "StatisticsInfo",
    "VersionInfo",
    "Watch",
    "client",
]

_GRACE = 30.0  # seconds within which a keeper answers what it does not have to wait for
_R = TypeVar("_R", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Segment:
    """One piece of memory: bytes, kind of handle, and ``"host"`` or the UUID of its GPU."""

    size: int
    kind: int = int(HandleKind.POSIX_FD)
    device: str = "host"


@dataclass(slots=True)
class Attachment:
    """A lease and what it gives the right to map. The caller owns the descriptors and the lease.

    Attributes
    ----------
    fds : list of int
        The manifest's first if `manifest_fd` is not None, then one per segment.
    manifest_fd : int or None
        ``fds[0]`` where the manifest is memory of its own, else None and `manifest` holds it.
    owner : int
        The uid of its publisher, as the keeper verified it.
    """

    lease_id: int
    name: str
    version: int
    owner: int
    segments: tuple[Segment, ...]
    fds: list[int]
    manifest: bytes
    manifest_fd: int | None
    meta: dict[str, str]
    writable: bool


@dataclass(frozen=True, slots=True)
class PublishClaim:
    """This process is the one to publish `name`: pass `id` to publish, or abandon it."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class HolderInfo:
    """Who holds a lease: pid (None: not visible from the keeper) and uid are verified, the label is what it says."""

    lease_id: int
    pid: int | None
    uid: int
    label: str
    access: str
    age: float


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version of an entry; `age` and `ttl_left` in seconds, `nbytes` what it occupies."""

    version: int
    owner: int
    is_current: bool
    writable: bool
    nbytes: int
    sizes: tuple[int, ...]
    devices: tuple[str, ...]
    readers: int
    age: float
    ttl_left: float | None
    publisher_pid: int | None
    publisher_label: str
    meta: dict[str, str]
    holders: tuple[HolderInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One name. From ``list`` without its versions, from ``show`` with them, oldest first.

    Attributes
    ----------
    version : int
        The current version, or 0 if only older ones are left, held by their readers.
    nbytes : int
        Bytes of the current version.
    retired : int
        Older versions that readers still hold.
    """

    name: str
    version: int
    owner: int
    nbytes: int
    segments: int
    writable: bool
    readers: int
    retired: int
    age: float
    ttl_left: float | None
    meta: dict[str, str] = field(default_factory=dict)
    versions: tuple[VersionInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class StatisticsInfo:
    """What a keeper holds, and its ceilings (None: none)."""

    pid: int
    uptime: float
    entries: int
    versions: int
    leases: int
    connections: int
    waiting: int
    nbytes: int
    descriptors: int
    max_bytes: int | None
    max_entries: int | None
    max_descriptors: int | None


class KeeperClient:
    """One connection to a keeper. Made by :meth:`connect`, or shared by the process through :func:`client`."""

    def __init__(self, channel: Channel, path: str, label: str, server_pid: int) -> None:
        self.path = path
        self.label = label
        self.server_pid = server_pid
        self._channel = channel
        self._pid = os.getpid()
        self._calls = itertools.count(1)
        self._sending = threading.Lock()
        self._waiting = threading.Condition(threading.Lock())
        self._someone_reads = False
        self._expected: dict[int, tuple[m.Reply, list[int]] | None] = {}
        self._failure: VramError | None = None
        self._given_back: deque[int] = deque()
        self._leases: dict[int, tuple[str, int]] = {}

    @classmethod
    def connect(cls, path: str | None = None, *, timeout: float = 5.0, label: str = "") -> Self:
        """Connect to a keeper.

        Parameters
        ----------
        path : str or None
            Its socket; None is the default path of this user (:func:`~vram.keeper.paths.default_path`).
        timeout : float
            Seconds for all of it.
        label : str
            What this process calls itself, shown to whoever asks who holds what. Not verified.

        Raises
        ------
        PeerGoneError
            If no keeper is there.
        AccessDeniedError
            If the path does not let this user in, or a user listens there who is not to be trusted.
        ProtocolError
            If what listens there is no keeper.
        UnsupportedError
            If the keeper speaks no protocol version that this library speaks.
        WaitTimeoutError
            If it did not answer in time.
        """
        deadline = time.monotonic() + timeout
        found, chosen = find_path(path)
        channel = _open(found, chosen, timeout)
        try:
            welcome = _greet(channel, found, label, deadline)
        except BaseException:
            channel.close()
            raise
        return cls(channel, found, label, welcome.pid)

    @property
    def is_usable(self) -> bool:
        """Whether this is the process that connected and, as far as is known, the keeper is still there."""
        if self._pid != os.getpid() or self._failure is not None or self._channel.is_closed:
            return False
        return not self._channel.is_hung_up()

    def close(self) -> None:
        """End the connection; the keeper takes all its leases back. Idempotent."""
        if self._pid != os.getpid():  # the parent's; its locks may be held by threads that are not here
            return
        if _clients.get(self.path) is self:
            _clients.pop(self.path, None)
        with self._waiting:
            if self._failure is None:
                self._failure = PeerGoneError(f"the connection to the keeper at {self.path} was closed here")
            self._waiting.notify_all()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<KeeperClient {self.path}, {'open' if self.is_usable else 'closed'}>"

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
        claim: PublishClaim | int | None = None,
    ) -> int:
        """Publish a new version of `name`, all at once, and return its number.

        Parameters
        ----------
        segments, fds : sequences of Segment and int
            1 to 1,024 pieces and their descriptors, which are lent: memfds sealed against shrinking and growing, and
            against (future) writing unless `writable`.
        manifest : bytes
            At most 32 KiB that readers get with it.
        manifest_fd : int, optional
            A longer manifest, as a memfd sealed against changes of size and writing.
        writable : bool
            Whether readers may ask to write.
        meta : mapping of str to str
            At most 4 KiB that everybody who may connect can see.
        ttl : float, optional
            Seconds after which the version is taken out of the catalogue.
        claim : PublishClaim or int, optional
            The claim that this publication fulfils.

        Raises
        ------
        UsageError
            For a name, meta or ttl that cannot be.
        AccessDeniedError
            If the name belongs to another user.
        CapacityError
            If the keeper has no room for it.
        ProtocolError
            If the keeper finds the memory unfit to be shared.
        """
        check_name(name)
        if not 1 <= len(segments) <= MAX_SEGMENTS or len(fds) != len(segments):
            raise UsageError(
                f"{len(segments)} segments and {len(fds)} descriptors; a version has 1 to {MAX_SEGMENTS} of each"
            )
        if len(manifest) > MAX_MANIFEST:
            raise UsageError(
                f"a manifest of {len(manifest)} bytes; {MAX_MANIFEST} is the most inside a message: pass manifest_fd"
            )
        devices = list(dict.fromkeys(segment.device for segment in segments))
        index = {device: position for position, device in enumerate(devices)}
        pieces = [m.Piece(segment.size, int(segment.kind), index[segment.device]) for segment in segments]
        everything = list(fds) if manifest_fd is None else [manifest_fd, *fds]
        call = next(self._calls)
        request = m.Publish(
            call,
            name,
            pieces,
            devices,
            manifest,
            manifest_fd is not None,
            writable,
            check_meta(meta or {}),
            check_ttl(ttl),
            _number(claim),
        )
        reply = self._ask(request, call, everything[:MAX_FDS])
        while isinstance(reply, m.Continue):
            sent = reply.received
            if not 0 < sent < len(everything):
                raise self._confused(reply)
            part = next(self._calls)
            reply = self._ask(m.Part(part, call, sent), part, everything[sent : sent + MAX_FDS])
        return self._be(m.Published, reply).version

    def offer(
        self,
        name: str,
        nbytes: int,
        *,
        handles: int = 1,
        writable: bool = False,
        meta: Mapping[str, str] | None = None,
        ttl: float | None = None,
        claim: PublishClaim | int | None = None,
    ) -> None:
        """Ask whether the keeper would take such a version now. Raises what :meth:`publish` would; reserves nothing.

        For publishers who have to do something first that cannot be undone, such as sealing their memory.
        """
        check_name(name)
        call = next(self._calls)
        request = m.Offer(call, name, nbytes, handles, check_meta(meta or {}), check_ttl(ttl), _number(claim))
        self._be(m.Done, self._ask(request, call))

    def abandon(self, claim: PublishClaim | int) -> None:
        """Give up a claim, so that the next in line gets it. One that is over already is no mistake."""
        call = next(self._calls)
        self._be(m.Done, self._ask(m.Abandon(call, _number(claim)), call))

    # -- attaching ------------------------------------------------------------------------------------------------
    def attach(
        self,
        name: str,
        *,
        version: int | None = None,
        access: str = "r",
        expect: Mapping[str, str] | None = None,
        timeout: float | None = 0.0,
    ) -> Attachment:
        """Lease a version.

        Parameters
        ----------
        version : int, optional
            The current one unless given.
        access : {"r", "rw", "cow"}
            What the lease is for; ``"rw"`` needs a version published writable.
        expect : mapping, optional
            What its meta has to say.
        timeout : float or None
            Seconds to wait for it to be published; None waits for ever.

        Raises
        ------
        NotFoundError
            If there is no such entry, or the version is gone.
        WaitTimeoutError
            If it was not published in time.
        MismatchError
            If its meta differs from `expect`.
        AccessDeniedError
            For writing to what was published read-only.
        """
        reply = self._attach(name, version, access, expect, timeout, claim=False)
        if not isinstance(reply, Attachment):
            self._lost(reply, [])
            raise self._confused(reply)
        return reply

    def attach_or_claim(
        self,
        name: str,
        *,
        expect: Mapping[str, str] | None = None,
        access: str = "r",
        timeout: float | None = None,
    ) -> Attachment | PublishClaim:
        """Lease the current version if it is as expected, else become the one who publishes it, or wait for them.

        Returns
        -------
        Attachment
            It is there (now).
        PublishClaim
            This process has to publish it, with this claim, or to abandon the claim. The claim ends with the
            connection.
        """
        reply = self._attach(name, None, access, expect, timeout, claim=True)
        return reply if isinstance(reply, Attachment) else PublishClaim(reply.claim, name)

    def release(self, lease_ids: Sequence[int]) -> None:
        """Give leases back and wait until the keeper has taken note."""
        for lease_id in lease_ids:
            self._leases.pop(lease_id, None)
        for start in range(0, len(lease_ids), 4096):
            call = next(self._calls)
            self._be(m.Done, self._ask(m.Release(call, list(lease_ids[start : start + 4096])), call))

    def release_later(self, lease_id: int) -> None:
        """Give a lease back without waiting; with the next call at the latest. Safe in a finalizer; never raises."""
        self._leases.pop(lease_id, None)
        self._given_back.append(lease_id)
        self._flush()

    # -- watching -------------------------------------------------------------------------------------------------
    def is_stale(self, lease_id: int) -> bool:
        """Return whether the leased version is no longer the one that attaching by name would give."""
        call = next(self._calls)
        return self._be(m.IsStale, self._ask(m.Stale(call, lease_id), call)).stale

    def watch(self, lease_id: int) -> Watch:
        """Open a connection on which the keeper tells what happens to the leased version.

        Raises
        ------
        UsageError
            If this connection has no such lease.
        """
        leased = self._leases.get(lease_id)
        if leased is None:
            raise UsageError(f"lease {lease_id} is not held by this connection to {self.path}")
        return Watch(KeeperClient.connect(self.path, label=self.label), *leased)

    # -- looking --------------------------------------------------------------------------------------------------
    def list(self, prefix: str = "") -> list[EntryInfo]:
        """Return the entries whose names begin with `prefix`, in order."""
        check_prefix(prefix)
        found: list[EntryInfo] = []
        after, more = "", True
        while more:
            call = next(self._calls)
            page = self._be(m.Listing, self._ask(m.List(call, prefix, after), call))
            found += [EntryInfo(*msgspec.structs.astuple(row)) for row in page.rows]
            more = page.more and bool(page.rows)
            after = found[-1].name if found else ""
        return found

    def show(self, name: str) -> EntryInfo:
        """Return everything the keeper knows about a name: its versions, and who holds them.

        Raises
        ------
        NotFoundError
            If there is nothing under that name.
        """
        check_name(name)
        versions: list[VersionInfo] = []
        after, more = 0, True
        while more:
            call = next(self._calls)
            page = self._be(m.VersionList, self._ask(m.Versions(call, name, after), call))
            for row in page.rows:
                holders = tuple(self._holders(name, row.version)) if row.readers else ()
                versions.append(_version(row, holders))
                after = row.version
            more = page.more and bool(page.rows)
        current = next((version for version in versions if version.is_current), None)
        shown = current or versions[-1]
        return EntryInfo(
            name,
            0 if current is None else current.version,
            shown.owner,
            0 if current is None else current.nbytes,
            len(shown.sizes),
            shown.writable,
            shown.readers,
            len(versions) - (current is not None),
            shown.age,
            shown.ttl_left,
            shown.meta,
            tuple(versions),
        )

    def _holders(self, name: str, version: int) -> Iterator[HolderInfo]:
        after, more = 0, True
        while more:
            call = next(self._calls)
            page = self._be(m.HolderList, self._ask(m.Holders(call, name, version, after), call))
            for row in page.rows:
                yield HolderInfo(row.lease, row.pid or None, row.uid, row.label, row.access, row.age)
                after = row.lease
            more = page.more and bool(page.rows)

    def remove(self, name: str, version: int | None = None, *, revoke: bool = False) -> None:
        """Take a name, or one version of it, out of the catalogue. Readers keep what they have.

        Parameters
        ----------
        revoke : bool
            Tell those who watch it that its memory is wanted back.

        Raises
        ------
        NotFoundError
            If there is no such name or version.
        AccessDeniedError
            If it belongs to another user.
        """
        check_name(name)
        call = next(self._calls)
        self._be(m.Done, self._ask(m.Remove(call, name, version or 0, revoke), call))

    def statistics(self) -> StatisticsInfo:
        """Return what the keeper holds."""
        call = next(self._calls)
        reply = self._be(m.KeeperStatistics, self._ask(m.Statistics(call), call))
        return StatisticsInfo(*msgspec.structs.astuple(reply)[1:])

    # -- inside ---------------------------------------------------------------------------------------------------
    def _attach(
        self,
        name: str,
        version: int | None,
        access: str,
        expect: Mapping[str, str] | None,
        timeout: float | None,
        claim: bool,
    ) -> Attachment | m.Claimed:
        check_name(name)
        if version is not None and version < 1:
            raise UsageError(f"version {version!r} is not a number of a version: they count from 1")
        wanted = None if expect is None else check_meta(expect, what="expect")
        if timeout is not None:
            timeout = max(0.0, min(float(timeout), 1e9))
        call = next(self._calls)
        request = m.Attach(call, name, version or 0, access, wanted, timeout, claim)
        reply, fds = self._converse(request, call, (), None if timeout is None else timeout + _GRACE)
        try:
            if isinstance(reply, m.Attached):
                while len(fds) < reply.total:
                    part = next(self._calls)
                    more, further = self._converse(m.More(part, reply.lease, len(fds)), part, (), _GRACE)
                    fds += further
                    if self._be(m.Descriptors, more).offset != len(fds) - len(further) or not further:
                        raise self._confused(more)
                attachment = _attachment(reply, fds)
                self._leases[reply.lease] = (attachment.name, attachment.version)
                return attachment
            return self._be(m.Claimed, reply)
        except BaseException:
            close_fds(fds)
            if isinstance(reply, m.Attached):
                self.release_later(reply.lease)
            raise

    def _ask(self, request: m.Request, call: int, fds: Sequence[int] = ()) -> m.Reply:
        """Send a request whose answer carries no descriptors and return the answer."""
        reply, came = self._converse(request, call, fds, _GRACE)
        if came:
            close_fds(came)
            self._lost(reply, [])
            raise self._confused(reply)
        return reply

    def _converse(
        self, request: m.Request, call: int, fds: Sequence[int], timeout: float | None
    ) -> tuple[m.Reply, list[int]]:
        """Send a request and wait for the answer with its number; an answer that is an error is raised."""
        if self._pid != os.getpid():
            self._channel.fileno()  # raises ForkedError, before any lock that a lost thread may hold
        deadline = None if timeout is None else time.monotonic() + timeout
        self._expected[call] = None
        try:
            self._send(m.encode(request), fds)
            reply, came = self._wait(call, deadline)
        except BaseException as error:
            # Interrupted, or too late: the answer may still come, and must not be taken for nobody's lease.
            with self._waiting:
                arrived = self._expected.pop(call, None)
            if arrived is not None:
                self._lost(*arrived)
            elif not isinstance(error, PeerGoneError):
                self._say_unheard(m.Cancel(0, call))
            raise
        if isinstance(reply, m.Error):
            close_fds(came)
            raise raised(reply)
        return reply, came

    def _send(self, payload: bytes, fds: Sequence[int]) -> None:
        self._check()
        try:
            with self._sending:
                if self._given_back:
                    self._channel.send(m.encode(m.Release(0, self._returns())), timeout=_GRACE)
                self._channel.send(payload, fds, timeout=_GRACE)
        except PeerGoneError:
            raise self._fail() from None
        finally:
            if self._given_back:  # a finalizer in this very block found the lock taken
                self._flush()

    def _wait(self, call: int, deadline: float | None) -> tuple[m.Reply, list[int]]:
        expected = self._expected
        with self._waiting:
            while True:
                arrived = expected[call]
                if arrived is not None:
                    del expected[call]
                    return arrived
                if self._failure is not None:
                    raise self._failure_again()
                if not self._someone_reads:
                    self._someone_reads = True
                    break
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise self._silent()
                self._waiting.wait(left)
        try:
            return self._read_for_all(call, deadline)
        finally:
            with self._waiting:
                self._someone_reads = False
                if expected:
                    self._waiting.notify_all()

    def _read_for_all(self, call: int, deadline: float | None) -> tuple[m.Reply, list[int]]:
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise self._silent()
            try:
                payload, fds = self._channel.recv(timeout=left)
            except WaitTimeoutError:
                raise self._silent() from None
            except (PeerGoneError, ProtocolError) as error:
                raise self._fail(error) from None
            try:
                reply = m.decode_reply(payload)
            except BaseException as error:
                close_fds(fds)
                if isinstance(error, ProtocolError):
                    raise self._fail(error) from None
                raise
            number = reply.call if not isinstance(reply, m.Welcome) else 0
            if number == call:
                with self._waiting:
                    self._expected.pop(call, None)
                return reply, fds
            with self._waiting:
                if number in self._expected:
                    self._expected[number] = (reply, fds)
                    self._waiting.notify_all()
                    continue
            if number == 0 and isinstance(reply, m.Error):
                close_fds(fds)
                raise self._fail(raised(reply))
            self._lost(reply, fds)

    def _lost(self, reply: object, fds: Sequence[int]) -> None:
        """An answer that nobody waits for: give back what it grants."""
        close_fds(fds)
        if isinstance(reply, m.Attached):
            self.release_later(reply.lease)
        elif isinstance(reply, m.Claimed):
            self._say_unheard(m.Abandon(0, reply.claim))

    def _say_unheard(self, request: m.Request) -> None:
        """Send what needs no answer, if that is possible at all."""
        with contextlib.suppress(VramError, OSError):
            with self._sending:
                self._channel.send(m.encode(request), timeout=1.0)
        self._flush()

    def _returns(self) -> list[int]:
        """Take what finalizers queued, as much as one message holds."""
        leases: list[int] = []
        with contextlib.suppress(IndexError):
            while len(leases) < 4096:
                leases.append(self._given_back.popleft())
        return leases

    def _flush(self) -> None:
        """Send what finalizers queued, unless somebody is sending: they look at the queue again. Never waits."""
        while self._given_back and self._failure is None and self._pid == os.getpid():
            if not self._sending.acquire(blocking=False):
                return
            leases: list[int] = []
            try:
                leases = self._returns()
                self._channel.send(m.encode(m.Release(0, leases)), timeout=0)
            except (VramError, OSError):
                self._given_back.extend(leases)  # no room now; the next call takes them along
                return
            finally:
                self._sending.release()

    # -- inside: failing ------------------------------------------------------------------------------------------
    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure_again()

    def _fail(self, error: VramError | None = None) -> VramError:
        """The connection is of no use any more; say so to everybody."""
        with self._waiting:
            if self._failure is None:
                if error is None or isinstance(error, PeerGoneError):
                    error = PeerGoneError(
                        f"the keeper at {self.path} is gone; what is mapped stays, its leases are over. Start one with "
                        f"`vram keep --socket {self.path}` and publish again"
                    )
                self._failure = error
            self._waiting.notify_all()
        self._channel.close()
        return self._failure_again()

    def _failure_again(self) -> VramError:
        failure = self._failure
        assert failure is not None
        try:
            return type(failure)(*failure.args)
        except TypeError:  # an exception of more arguments than its message
            return PeerGoneError(str(failure))

    def _silent(self) -> WaitTimeoutError:
        return WaitTimeoutError(f"the keeper at {self.path} (pid {self.server_pid}) did not answer in time")

    def _confused(self, reply: object) -> VramError:
        return self._fail(ProtocolError(f"the keeper at {self.path} answered {type(reply).__name__} out of turn"))

    def _be(self, kind: type[_R], reply: object) -> _R:
        if type(reply) is not kind:
            raise self._confused(reply)
        return reply


class Watch:
    """News about one version, on a connection of its own.

    ``fileno()`` becomes readable when there is news, or when the keeper is gone; :meth:`pump` reads it.

    Attributes
    ----------
    reason : str or None
        The newest: ``"replaced"``, ``"removed"``, ``"expired"``, ``"revoked"``, or ``"gone"`` if the keeper is.
    current : int
        The version that attaching by name gave when the news came; 0 is none.
    """

    def __init__(self, connection: KeeperClient, name: str, version: int) -> None:
        self.name = name
        self.version = version
        self.reason: str | None = None
        self.current = version
        self._client = connection
        self._channel = connection._channel
        try:
            # News follows the answer; nobody but pump() reads from then on.
            connection._be(m.Done, connection._ask(m.Watch(1, name, version), 1))
        except BaseException:
            connection.close()
            raise

    def fileno(self) -> int:
        """Lend the descriptor to wait on with select, poll or an event loop."""
        return self._channel.fileno()

    def pump(self) -> bool:
        """Read what there is without waiting; return whether there is news, now or from before."""
        while self.reason != "gone":
            try:
                payload, fds = self._channel.recv(timeout=0)
            except WaitTimeoutError:
                break
            except (PeerGoneError, ProtocolError):
                self.reason = "gone"
                break
            close_fds(fds)
            self._note(m.decode_reply(payload))
        return self.reason is not None

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, reply: m.Reply) -> None:
        if isinstance(reply, m.Notice):
            self.reason, self.current = reply.reason, reply.current


_clients: dict[str, KeeperClient] = {}
_clients_lock = threading.Lock()


def client(path: str | None = None) -> KeeperClient:
    """Return this process's one connection to the keeper at `path`; made on first use, anew after a fork, and anew
    once the keeper went away and another one came. Raises what :meth:`KeeperClient.connect` raises."""
    found, _ = find_path(path)
    existing = _clients.get(found)
    if existing is not None and existing.is_usable:
        return existing
    with _clients_lock:
        existing = _clients.get(found)
        if existing is not None:
            if existing.is_usable:
                return existing
            del _clients[found]
            existing.close()
        made = _clients[found] = KeeperClient.connect(path, label=_own_label())
        return made


def close_client(path: str) -> None:
    """End the connection that :func:`client` made to the keeper at `path`, if there is one."""
    with _clients_lock:
        existing = _clients.pop(path, None)
    if existing is not None:
        existing.close()


def close_clients() -> None:
    """End all connections that :func:`client` made: for tests, and before a fork that should share nothing."""
    with _clients_lock:
        while _clients:
            _clients.popitem()[1].close()


def _number(claim: PublishClaim | int | None) -> int:
    return claim.id if isinstance(claim, PublishClaim) else claim or 0


def _own_label() -> str:
    import sys

    return clip_label(os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python")


def _open(path: str, chosen: bool, timeout: float) -> Channel:
    if not chosen:
        check_directory(os.path.dirname(path))
    try:
        channel = Channel.connect(path, timeout)
    except PeerGoneError as error:
        raise PeerGoneError(f"no keeper: {error}; start one with `vram keep --socket {path}`") from None
    try:
        check_server(path, chosen, channel.peer())
    except BaseException:
        channel.close()
        raise
    return channel


def _greet(channel: Channel, path: str, label: str, deadline: float) -> m.Welcome:
    try:
        channel.send(m.encode(m.Hello(m.OLDEST, m.PROTOCOL, clip_label(label))), timeout=5.0)
    except PeerGoneError:
        pass  # it may have said why
    try:
        payload, fds = channel.recv(timeout=max(0.01, deadline - time.monotonic()))
        close_fds(fds)
        reply = m.decode_reply(payload)
    except WaitTimeoutError:
        raise WaitTimeoutError(f"what listens at {path} did not answer: a keeper that hangs, or no keeper") from None
    except PeerGoneError:
        raise PeerGoneError(f"what listens at {path} hung up: a keeper that stops, or no keeper") from None
    except ProtocolError as error:
        raise ProtocolError(f"what listens at {path} is no keeper ({error})") from None
    if isinstance(reply, m.Error):
        raise raised(reply)
    if not isinstance(reply, m.Welcome):
        raise ProtocolError(f"what listens at {path} is no keeper: it answered {type(reply).__name__}")
    return reply


def _attachment(reply: m.Attached, fds: list[int]) -> Attachment:
    entry = reply.entry
    total = len(entry.segments) + entry.manifest_fd
    if len(fds) != total or any(piece.device >= len(entry.devices) for piece in entry.segments):
        raise ProtocolError(f"a lease came with {len(fds)} descriptors for {total}")
    segments = tuple(Segment(piece.size, piece.kind, entry.devices[piece.device]) for piece in entry.segments)
    return Attachment(
        reply.lease,
        entry.name,
        entry.version,
        entry.owner,
        segments,
        fds,
        entry.manifest,
        fds[0] if entry.manifest_fd else None,
        entry.meta,
        entry.writable,
    )


def _version(row: m.VersionRow, holders: tuple[HolderInfo, ...]) -> VersionInfo:
    return VersionInfo(
        row.version,
        row.owner,
        row.current,
        row.writable,
        row.nbytes,
        tuple(row.sizes),
        tuple(row.devices),
        row.readers,
        row.age,
        row.ttl_left,
        row.publisher_pid or None,
        row.publisher_label,
        row.meta,
        holders,
    )


def _after_fork_in_child() -> None:
    global _clients_lock
    _clients_lock = threading.Lock()
    _clients.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
