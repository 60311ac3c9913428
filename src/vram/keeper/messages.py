"""Messages between a keeper and its clients.

Each message is one msgpack array whose first item names it; descriptors travel beside it. A receiver ignores items that
it does not know. Both sides speak the same :data:`PROTOCOL`, or not at all (S9): any change of a message is another
number. Nothing here is believed before :func:`decode_request` or :func:`decode_reply`
has checked types and bounds; what the values mean is checked by the catalogue.

A request carries a number, ``call``; its answer carries the same number, and answers may come in any order. Number 0
wants no answer.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Annotated, Final, get_args

import msgspec
from msgspec import Meta, Struct

from .. import errors

PROTOCOL: Final = 1

_LARGEST: Final = 2**63 - 1
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Number = Annotated[int, Meta(ge=0, le=2**53)]
Uid = Annotated[int, Meta(ge=0, lt=2**32)]
Name = Annotated[str, Meta(max_length=256)]
Word = Annotated[str, Meta(max_length=64)]
Label = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=4096)]
Seconds = Annotated[float, Meta(ge=0, le=1e10)]
Notes = Annotated[dict[Text, Text], Meta(max_length=512)]


class SegmentRow(Struct, frozen=True, array_like=True):
    """A segment, the memory behind one descriptor: bytes, kind of handle, and the index of its device's name."""

    size: Annotated[int, Meta(gt=0, le=2**63 - 1)]
    kind: Annotated[int, Meta(ge=0, le=2**31)]
    device: Annotated[int, Meta(ge=0, lt=64)] = 0


Segments = Annotated[list[SegmentRow], Meta(max_length=1024)]
Devices = Annotated[list[Word], Meta(max_length=64)]
Manifest = Annotated[bytes, Meta(max_length=32 * 1024)]


class Entry(Struct, frozen=True, array_like=True):
    """A version of an entry as its readers get it."""

    name: Name
    version: Number
    owner: Number
    writable: bool
    segments: Segments
    devices: Devices
    manifest: Manifest
    manifest_fd: bool
    meta: Notes


# -- requests of a client ---------------------------------------------------------------------------------------------


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """The first message of a connection: the protocol, and what the client calls itself and its host.

    The host is what tells processes apart that are in a PID namespace of their own, and have no pid to the keeper.
    """

    protocol: Number
    label: Label = ""
    host: Label = ""


class Publish(Struct, frozen=True, array_like=True, tag="publish"):
    """A new version. Comes with its first descriptors (the manifest's first of all, if it has one); the rest follows
    in ``Part`` messages, each after the answer to the one before.

    An `updatable` one is sealed against new writable mappings only: its publisher goes on writing. Its last segment is
    the page of the publisher's words (:mod:`.updates`).

    With `lease`, which was granted to park or to wake a version, this is no new version but the memory that holds the
    bytes of that one from now on; meta, ttl and claim say nothing then.
    """

    call: Number
    name: Name
    segments: Segments
    devices: Devices
    manifest: Manifest = b""
    manifest_fd: bool = False
    writable: bool = False
    meta: Notes = {}
    ttl: Seconds | None = None
    claim: Number = 0
    updatable: bool = False
    lease: Number = 0


class Offer(Struct, frozen=True, array_like=True, tag="offer"):
    """Would such a version be taken? Reserves nothing."""

    call: Number
    name: Name
    nbytes: Size
    handles: Number = 1
    meta: Notes = {}
    ttl: Seconds | None = None
    claim: Number = 0


class Part(Struct, frozen=True, array_like=True, tag="part"):
    """More descriptors of the publication that call `publish` began, the first of them the `offset`-th of all."""

    call: Number
    publish: Number
    offset: Number


class Repeating(Struct, frozen=True, array_like=True, tag="repeating"):
    """The answer to ``Recovered``: what was said before counts for nothing, but for what has no number. The requests of
    `calls` come once more now, each as it was, with its number and its descriptors. Nobody waits for those in
    `given_up` any more: what they were granted is given back. With `more` there is another such message."""

    call: Number
    keeper: Number
    calls: Annotated[list[Number], Meta(max_length=4096)] = []
    given_up: Annotated[list[Number], Meta(max_length=4096)] = []
    more: bool = False


class Attach(Struct, frozen=True, array_like=True, tag="attach"):
    """Lease a version (0: the current one), waiting up to `wait` seconds for it (None: for ever).

    With `claim`: where there is none, or none as expected, be the one who makes it. With `owner` it has to belong to
    that uid.

    `purpose` is "park" for who is about to move its bytes into memory of the host, and "wake" for who would bring them
    back, or wait for somebody who does.
    """

    call: Number
    name: Name
    version: Number = 0
    access: Word = "r"
    expect: Notes | None = None
    wait: Seconds | None = 0.0
    claim: bool = False
    owner: Uid | None = None
    purpose: Word = ""


class More(Struct, frozen=True, array_like=True, tag="more"):
    """Send the descriptors of a lease from the `offset`-th on."""

    call: Number
    lease: Number
    offset: Number


class Release(Struct, frozen=True, array_like=True, tag="release"):
    """Nothing is mapped under these leases any more."""

    call: Number
    leases: Annotated[list[Number], Meta(max_length=4096)]


class Abandon(Struct, frozen=True, array_like=True, tag="abandon"):
    """The claim will not be used: the next in line gets it."""

    call: Number
    claim: Number


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """Nobody waits for the answer to call `waiting` any more."""

    call: Number
    waiting: Number


class Stale(Struct, frozen=True, array_like=True, tag="stale"):
    """Is the leased version still the current one?"""

    call: Number
    lease: Number


class Watch(Struct, frozen=True, array_like=True, tag="watch"):
    """Send a ``Notice`` whenever something happens to a version, and at once if it is not the current one now."""

    call: Number
    name: Name
    version: Number


class List(Struct, frozen=True, array_like=True, tag="list"):
    """The entries whose names begin with `prefix` and come behind `after`, as many as one message takes.

    Meta of more than `most_meta` bytes is left out, for clients that show only its beginning. With `devices` each row
    says which it is on, which takes as long again as all the rest.
    """

    call: Number
    prefix: Name = ""
    after: Name = ""
    most_meta: Size = 2**63 - 1
    devices: bool = False


class Versions(Struct, frozen=True, array_like=True, tag="versions"):
    """The versions of one name that are above `after`."""

    call: Number
    name: Name
    after: Number = 0


class Holders(Struct, frozen=True, array_like=True, tag="holders"):
    """The leases on one version that are above `after`."""

    call: Number
    name: Name
    version: Number
    after: Number = 0


class Leases(Struct, frozen=True, array_like=True, tag="leases"):
    """The leases on names that begin with `prefix`, also on names that cannot be attached any more: those behind the
    lease `after`, which is the last one of the page before (0: from the beginning), in an order that is the keeper's.

    Newer than the first keepers, which take it for no request and hang up: ask on a connection of its own.
    """

    call: Number
    prefix: Name = ""
    after: Number = 0


class Remove(Struct, frozen=True, array_like=True, tag="remove"):
    """Take a name, or one version of it (0: all), out of the catalogue. `revoke` asks its readers to let go.

    `force` ends their leases, and disconnects them.
    """

    call: Number
    name: Name
    version: Number = 0
    revoke: bool = False
    force: bool = False


class Page(Struct, frozen=True, array_like=True, tag="page"):
    """Comes with one descriptor: the page of words in which the holder of a lease says that it reads."""

    call: Number
    lease: Number


class Update(Struct, frozen=True, array_like=True, tag="update"):
    """I am about to update this version in place, which this connection published."""

    call: Number
    name: Name
    version: Number


class Pages(Struct, frozen=True, array_like=True, tag="pages"):
    """Who reads the version that this connection updates, of the leases that are above `after`?

    A word that is `but` does not count: who is in that slot of what has two.
    """

    call: Number
    name: Name
    version: Number
    after: Number = 0
    but: Annotated[int, Meta(ge=0, le=2)] = 0


class Cursors(Struct, frozen=True, array_like=True, tag="cursors"):
    """Which frame is each reader done with, of the ring that this connection published, of the leases above `after`?"""

    call: Number
    name: Name
    version: Number
    after: Number = 0


class Updated(Struct, frozen=True, array_like=True, tag="updated"):
    """The update is over: `whole`, or torn in the middle. `updates` counts those that were whole."""

    call: Number
    name: Name
    version: Number
    updates: Number
    whole: bool


class UpdateState(Struct, frozen=True, array_like=True, tag="update_state"):
    """What has become of the update of the leased version?"""

    call: Number
    lease: Number


class Statistics(Struct, frozen=True, array_like=True, tag="statistics"):
    """How much does the keeper hold?"""

    call: Number


class Measure(Struct, frozen=True, array_like=True, tag="measure"):
    """What have you done so far, for whom, and how long did it take?"""

    call: Number


class Takeover(Struct, frozen=True, array_like=True, tag="takeover"):
    """I am your successor: see :mod:`.takeover` for what follows.

    `goes_on`: I go on with what you have begun, and you need not come to its end before. `precopy`: the answer may be
    ``Bodies``, and I ask again then. `patient`: ``Working`` may come before what is due. `main_pid`: the process that a
    service manager is to watch from then on, which is my holder where I have one; 0: me.
    """

    call: Number
    goes_on: bool = False
    precopy: bool = False
    patient: bool = False
    main_pid: Number = 0


Request = (
    Publish
    | Offer
    | Part
    | Attach
    | More
    | Release
    | Abandon
    | Cancel
    | Stale
    | Watch
    | List
    | Versions
    | Holders
    | Leases
    | Remove
    | Statistics
    | Takeover
    | Page
    | Update
    | Pages
    | Cursors
    | Updated
    | UpdateState
    | Measure
    | Repeating
)


# -- replies of a keeper ----------------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """The keeper's answer to a greeting.

    `lends` is the random id of a lender, else empty: another lender may listen at its path once it is gone.
    """

    pid: Number
    lends: Label = ""
    survives: bool = False  # another keeper goes on when this one dies


class Recovered(Struct, frozen=True, array_like=True, tag="recovered"):
    """The keeper died, and this is the next one, number `keeper`: say again what was not answered (``Repeating``)."""

    call: Number
    keeper: Number
    pid: Number


class Published(Struct, frozen=True, array_like=True, tag="published"):
    """The version is complete, and readers get it from now on."""

    call: Number
    version: Number


class NextPart(Struct, frozen=True, array_like=True, tag="continue"):
    """`received` descriptors are here; send the next part."""

    call: Number
    received: Number


class Attached(Struct, frozen=True, array_like=True, tag="attached"):
    """A lease, with the first of its `total` descriptors; ``More`` fetches the rest.

    `moves`: it was granted to move the bytes of the version, by a ``Publish`` with this lease. `has_publisher`, then:
    another connection published it and is there still, whose process may have mapped the memory that they move from.
    """

    call: Number
    lease: Number
    total: Number
    entry: Entry
    moves: bool = False
    has_publisher: bool = False


class AttachedRaw(Struct, frozen=True, array_like=True, tag="attached"):
    """``Attached`` as the keeper writes it: the entry is encoded once a version, not once a reader."""

    call: Number
    lease: Number
    total: Number
    entry: msgspec.Raw
    moves: bool = False
    has_publisher: bool = False


class Descriptors(Struct, frozen=True, array_like=True, tag="descriptors"):
    """The answer to ``More``."""

    call: Number
    offset: Number


class Claimed(Struct, frozen=True, array_like=True, tag="claimed"):
    """You are the one to publish it: ``Publish`` with this claim, or ``Abandon``.

    After `seconds` it passes to the next waiter; None: as soon as somebody waits.
    """

    call: Number
    claim: Number
    seconds: Seconds | None = None


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """It is done."""

    call: Number


class IsStale(Struct, frozen=True, array_like=True, tag="is_stale"):
    """Whether something newer is current, or nothing is (`current` 0)."""

    call: Number
    stale: bool
    current: Number


class Notice(Struct, frozen=True, array_like=True, tag="notice"):
    """An event of a watched version. `reason` is replaced, removed, expired or revoked; `current` may be 0: none."""

    call: Number
    name: Name
    version: Number
    reason: Word
    current: Number


class EntryRow(Struct, frozen=True, array_like=True):
    """One name: its current version, and how many older ones are still held.

    `leases` counts those on all its versions, and `held_bytes` is what the versions that they are on have, each once.
    `left_out` is how many bytes its meta has if that was left out. `devices` are those that the current version is on,
    the one with most of it first, where that was asked for.
    """

    name: Name
    version: Number
    owner: Number
    nbytes: Size
    segments: Number
    writable: bool
    readers: Number
    retired: Number
    age: float
    ttl_left: float | None
    meta: Notes
    leases: Number = 0
    held_bytes: Size = 0
    left_out: Size = 0
    parked: bool = False
    updatable: bool = False
    devices: Devices = []


class VersionRow(Struct, frozen=True, array_like=True):
    """One version of a name; `age` in seconds. `is_revoked` is None from a keeper that does not say."""

    version: Number
    owner: Number
    is_current: bool
    writable: bool
    nbytes: Size
    sizes: Annotated[list[Size], Meta(max_length=1024)]
    devices: Devices
    readers: Number
    age: float
    ttl_left: float | None
    publisher_pid: Number
    publisher_label: Label
    meta: Notes
    is_revoked: bool | None = None
    publisher_host: Label = ""
    parked: bool = False
    updatable: bool = False


class HolderRow(Struct, frozen=True, array_like=True):
    """One lease: who holds it (pid 0: in a PID namespace that the keeper does not see), and for how long.

    `nbytes` is what its version has, which it shares with the other leases on it.
    """

    lease_id: Number
    version: Number
    pid: Number
    uid: Number
    label: Label
    access: Word
    age: float
    nbytes: Size = 0
    name: Name = ""
    host: Label = ""


class Listing(Struct, frozen=True, array_like=True, tag="listing"):
    """A page; `more` follows behind its last row."""

    call: Number
    rows: list[EntryRow]
    more: bool


class VersionList(Struct, frozen=True, array_like=True, tag="version_list"):
    """A page of versions."""

    call: Number
    rows: list[VersionRow]
    more: bool


class HolderList(Struct, frozen=True, array_like=True, tag="holder_list"):
    """A page of holders."""

    call: Number
    rows: list[HolderRow]
    more: bool


class KeeperStatistics(Struct, frozen=True, array_like=True, tag="statistics"):
    """How much the keeper holds: counts, bytes, and its ceilings (None: no ceiling)."""

    call: Number
    pid: Number
    uptime: float
    entries: Number
    versions: Number
    leases: Number
    connections: Number
    waiting: Number
    nbytes: Size
    descriptors: Number
    quotas: Annotated[list[Size | None], Meta(max_length=64)]  # all ceilings, in the order of limits.Quotas
    keeper_version: Word


class RequestRow(Struct, frozen=True, array_like=True):
    """All requests of one kind: how many; the seconds that the keeper worked on them; how many took at most as long as
    each bound of ``Measurements``, and not as the one before; and how many failed, by the name of the error."""

    kind: Word
    count: Number
    seconds: Seconds
    buckets: Annotated[list[Number], Meta(max_length=64)]
    errors: dict[Word, Number] = {}


class UserRow(Struct, frozen=True, array_like=True):
    """What one user has; all that are not listed have one row, without a `uid`."""

    uid: Uid | None
    nbytes: Size
    entries: Number
    descriptors: Number
    leases: Number
    connections: Number


class DeviceRow(Struct, frozen=True, array_like=True):
    """What is kept of one device's memory, by the name that publishers gave it; None: of all that are not listed."""

    device: Word | None
    nbytes: Size
    versions: Number


class Measurements(Struct, frozen=True, array_like=True, tag="measurements"):
    """What the keeper has done since it was started, and what it takes.

    `bounds` are in seconds. `more`: bytes of devices are still being counted, and the next request goes on.
    """

    call: Number
    uptime: Seconds
    processor: Seconds
    resident: Size
    bounds: Annotated[list[Seconds], Meta(max_length=64)]
    requests: Annotated[list[RequestRow], Meta(max_length=256)]
    users: Annotated[list[UserRow], Meta(max_length=256)]
    devices: Annotated[list[DeviceRow], Meta(max_length=256)]
    more: bool = False


class PageRow(Struct, frozen=True, array_like=True):
    """A lease whose page says that a thread of its holder is in a section, and who that is."""

    lease: Number
    pid: Number
    uid: Number
    label: Label = ""
    host: Label = ""


class PageList(Struct, frozen=True, array_like=True, tag="page_list"):
    """The answer to ``Pages``: of the leases up to `through`, those whose holders read. `more` leases are behind it.

    `looked` says whose pages were looked at for that: of each process its pid, its uid and how many.
    """

    call: Number
    rows: list[PageRow]
    more: bool
    through: Number = 0
    looked: list[tuple[Number, Number, Number]] = []


class CursorRow(Struct, frozen=True, array_like=True):
    """A lease whose page begins with a word that is not 0, that word, and whose page it is."""

    lease: Number
    word: Size
    pid: Number
    uid: Number
    label: Label = ""
    host: Label = ""


class CursorList(Struct, frozen=True, array_like=True, tag="cursor_list"):
    """The answer to ``Cursors``, of the leases up to `through`. `more` leases are behind it."""

    call: Number
    rows: list[CursorRow]
    more: bool
    through: Number = 0


class Updates(Struct, frozen=True, array_like=True, tag="updates"):
    """The answer to ``UpdateState``: how many updates were whole; whether one is under way, or the last was not
    finished; and whether the process that may make the next one is there."""

    call: Number
    updates: Number
    updating: bool
    torn: bool
    has_writer: bool


class Error(Struct, frozen=True, array_like=True, tag="error"):
    """An exception of :mod:`vram.errors`, by name.

    With call 0 it is said before the keeper hangs up; then `details` are the name and the version of which a lease was
    ended by force, if that is why.
    """

    call: Number
    kind: Word
    text: Text
    details: Annotated[list[Text], Meta(max_length=64)] = []
    expected: Notes = {}
    found: Notes = {}


# -- messages between a keeper and its successor, after Takeover --------------------------------------------------


class Bodies(Struct, frozen=True, array_like=True, tag="bodies"):
    """Not yet, but bodies of versions, while I serve: ask again. Comes with one memfd of `size` bytes, which begins
    with `head` bytes that say which."""

    call: Number
    head: Size
    size: Size


class HandOver(Struct, frozen=True, array_like=True, tag="hand_over"):
    """Comes with one memfd of `size` bytes that holds all state in `format`; `total` descriptors follow in parts.
    `patient`: as in ``Takeover``."""

    call: Number
    format: Number
    size: Size
    total: Number
    patient: bool = False


class Working(Struct, frozen=True, array_like=True, tag="working"):
    """What is due has not come yet, and comes on: wait for it as long as at first."""


class Received(Struct, frozen=True, array_like=True, tag="taken"):
    """`received` descriptors have arrived so far."""

    received: Number


class Commit(Struct, frozen=True, array_like=True, tag="commit"):
    """The successor has everything and has checked it."""


class Committed(Struct, frozen=True, array_like=True, tag="let_go"):
    """The answer to ``Commit``: the old keeper touches nothing any more, unless its successor dies before it serves."""


class Serving(Struct, frozen=True, array_like=True, tag="serving"):
    """The successor serves."""


class Abandoned(Struct, frozen=True, array_like=True, tag="abandoned"):
    """The old keeper serves on: the successor has nothing."""

    why: Text = ""


Reply = (
    Welcome
    | Published
    | NextPart
    | Attached
    | Descriptors
    | Claimed
    | Done
    | IsStale
    | Notice
    | Listing
    | VersionList
    | HolderList
    | KeeperStatistics
    | Error
    | PageList
    | CursorList
    | Updates
    | Measurements
    | Recovered
)

Succession = (
    Bodies
    | HandOver
    | Working
    | Descriptors
    | Received
    | Commit
    | Committed
    | Serving
    | Abandoned
    | Error
    | Recovered
    | Welcome
)

_encoder = msgspec.msgpack.Encoder()
_replies = msgspec.msgpack.Decoder(Reply)
_hello = msgspec.msgpack.Decoder(Hello)
_items = msgspec.msgpack.Decoder(list[msgspec.Raw])
_word = msgspec.msgpack.Decoder(Word)
_number = msgspec.msgpack.Decoder(Number)
_TAGS = frozenset(kind.__struct_config__.tag for kind in get_args(Request))

encode = _encoder.encode


# What only a keeper reads: each of these takes a millisecond to make, which no reader has to wait for.
@functools.cache
def _requests() -> msgspec.msgpack.Decoder[Request]:
    return msgspec.msgpack.Decoder(Request)


@functools.cache
def _succession() -> msgspec.msgpack.Decoder[Succession]:
    return msgspec.msgpack.Decoder(Succession)


# A string that is not UTF-8 is no MsgspecError.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode_hello(payload: bytes) -> Hello:
    """Read the first message of a connection. Raises :class:`ProtocolError` if it is something else."""
    try:
        return _hello.decode(payload)
    except _UNREADABLE as error:
        raise errors.ProtocolError(f"not a greeting: {error}") from None


class MistakenRequestError(errors.ProtocolError):
    """A request with a value that cannot be: costs that call, not the connection and all that depends on it."""

    def __init__(self, call: int, text: str) -> None:
        super().__init__(text)
        self.call = call


def decode_request(payload: bytes) -> Request:
    """Parse a request.

    Raises
    ------
    MistakenRequestError
        If it is a request, whose number is known, with a value that the protocol does not allow.
    ProtocolError
        For anything else.
    """
    try:
        request: Request = _requests().decode(payload)
    except msgspec.ValidationError as error:
        call = _call_of(payload)
        if call:
            raise MistakenRequestError(call, f"not a request: {error}") from None
        raise errors.ProtocolError(f"not a request: {error}") from None
    except _UNREADABLE as error:
        raise errors.ProtocolError(f"not a request: {error}") from None
    return request


def _call_of(payload: bytes) -> int:
    """Return the number of a call whose rest may be wrong; 0 if it is no request, or wants no answer."""
    try:
        tag, call, *_ = _items.decode(payload)
        return _number.decode(call) if _word.decode(tag) in _TAGS else 0
    except (*_UNREADABLE, ValueError):
        return 0


class UnreadableReplyError(errors.ProtocolError):
    """A reply with something in it that the protocol does not allow: costs its call, not the connection's leases.

    Attributes
    ----------
    call : int or None
        Whose answer it was; 0 if it was nobody's, None if it does not say.
    lease : int
        The lease that it grants all the same; 0 if it grants none.
    """

    call: int | None = None
    lease: int = 0


def decode_reply(payload: bytes) -> Reply:
    """Parse a reply. Raises :class:`UnreadableReplyError` for anything the protocol does not allow."""
    try:
        reply: Reply = _replies.decode(payload)
    except _UNREADABLE as error:
        unreadable = UnreadableReplyError(f"not an answer of a keeper: {error}")
        with contextlib.suppress(*_UNREADABLE, ValueError):
            tag, call, *rest = _items.decode(payload)
            unreadable.call = _number.decode(call)
            if _word.decode(tag) == Attached.__struct_config__.tag and rest:
                unreadable.lease = _number.decode(rest[0])
        raise unreadable from None
    return reply


def saturated(nbytes: int) -> int:
    """Return a sum of bytes as a message can carry it: at most 2**63 - 1, which then reads as "no less than"."""
    return min(nbytes, _LARGEST)


def decode_succession(payload: bytes) -> Succession:
    """Parse a message of a takeover. Raises :class:`ProtocolError` for anything else."""
    try:
        said: Succession = _succession().decode(payload)
    except _UNREADABLE as error:
        raise errors.ProtocolError(f"not a word of a takeover: {error}") from None
    return said


def check_protocol(hello: Hello) -> None:
    """Raise :class:`UnsupportedError` unless the client speaks this keeper's protocol."""
    if hello.protocol != PROTOCOL:
        raise errors.UnsupportedError(
            "this conversation",
            f"protocol {PROTOCOL} (the keeper's)",
            f"{hello.protocol} (the client's)",
            "Restart the older one: the keeper with `vram keep --takeover --background`, or the program",
        )
