"""Messages between a keeper and its clients: msgpack arrays whose first item names the message.

Descriptors travel beside a message; items that a receiver does not know are ignored. Both sides speak the same
:data:`PROTOCOL`, which any change of a message changes. :func:`decode_request` and :func:`decode_reply` check types and
bounds, the catalogue the values. Answers come in any order, each with the `call` of its request; 0 wants no answer.
"""

from __future__ import annotations

import functools
from typing import Annotated, Final, TypeVar, get_args

import msgspec
from msgspec import Meta, Raw, Struct

from .. import errors

PROTOCOL: Final = 1
_T = TypeVar("_T")

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
    The host tells processes apart whose PID namespace the keeper does not see."""

    protocol: Number
    label: Label = ""
    host: Label = ""


class Publish(Struct, frozen=True, array_like=True, tag="publish"):
    """A new version with its first descriptors, the manifest's first of all. A ``Part`` after each answer has more.
    An `updatable` one is sealed against new writable mappings only; its last segment is the page of words. With `lease`
    this is no new version, but memory for the bytes of an existing one: meta, ttl and claim say nothing."""

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
    """The answer to ``Recovered`` of keeper number `keeper`: calls from `first` to `last` may come once more."""

    call: Number
    keeper: Number
    first: Number
    last: Number


class Attach(Struct, frozen=True, array_like=True, tag="attach"):
    """A request to lease a version (0: the current one), waiting up to `wait` seconds for it (None: for ever).
    `claim`: if none is as expected, make it. `purpose`: ``"park"`` moves its bytes to the host, ``"wake"`` back."""

    call: Number
    name: Name
    version: Number = 0
    access: Annotated[str, Meta(pattern="^(r|rw|cow)$")] = "r"
    expect: Notes | None = None
    wait: Seconds | None = 0.0
    claim: bool = False
    owner: Uid | None = None
    purpose: Annotated[str, Meta(pattern="^(park|wake)?$")] = ""


class More(Struct, frozen=True, array_like=True, tag="more"):
    """Send the descriptors of a lease from the `offset`-th on."""

    call: Number
    lease: Number
    offset: Number


class Release(Struct, frozen=True, array_like=True, tag="release"):
    """These leases and claims are over: nothing is mapped any more, and the next in line gets the claim."""

    call: Number
    leases: Annotated[list[Number], Meta(max_length=4096)]


class Sleep(Struct, frozen=True, array_like=True, tag="sleep"):
    """Nothing is mapped by a lease any more, or something is again: its version may be parked meanwhile."""

    call: Number
    lease: Number
    asleep: bool = True


class Cancel(Struct, frozen=True, array_like=True, tag="cancel"):
    """Nobody waits for the answer to call `waiting` any more: a lease or claim that it was granted is given back."""

    call: Number
    waiting: Number


class State(Struct, frozen=True, array_like=True, tag="state"):
    """A request for the state of a leased version."""

    call: Number
    lease: Number


class Watch(Struct, frozen=True, array_like=True, tag="watch"):
    """Send a ``Notice`` whenever something happens to a version, and at once if it is not the current one now."""

    call: Number
    name: Name
    version: Number


class List(Struct, frozen=True, array_like=True, tag="list"):
    """A request for the entries with a prefix that come behind `after`, as many as one message takes. With `devices`,
    which take as long again as all the rest, meta is left out."""

    call: Number
    prefix: Name = ""
    after: Name = ""
    devices: bool = False


class Versions(Struct, frozen=True, array_like=True, tag="versions"):
    """The versions of one name that are above `after`."""

    call: Number
    name: Name
    after: Number = 0


class Holders(Struct, frozen=True, array_like=True, tag="holders"):
    """A request for the leases on names with a prefix, removed ones included, by name, version and lease, behind the
    place `after`."""

    call: Number
    prefix: Name = ""
    after: tuple[Name, Number, Number] = ("", 0, 0)


class Remove(Struct, frozen=True, array_like=True, tag="remove"):
    """A request to remove a name or one version of it (0: all); `revoke` asks its readers to let go."""

    call: Number
    name: Name
    version: Number = 0
    revoke: bool = False


class Page(Struct, frozen=True, array_like=True, tag="page"):
    """Comes with one descriptor: the page of words in which the holder of a lease says that it reads."""

    call: Number
    lease: Number


class Update(Struct, frozen=True, array_like=True, tag="update"):
    """An update in place of a version that this connection published begins; or with `whole` it ended, whole or torn in
    the middle, and `updates` counts those that were whole."""

    call: Number
    name: Name
    version: Number
    updates: Number = 0
    whole: bool | None = None


class Pages(Struct, frozen=True, array_like=True, tag="pages"):
    """A request for the leases above `after` of the updatable version that this connection published whose page has a
    word that is neither 0 nor `but`, or with `first` a first word that is not 0: a reader in a section, of the slot of
    two that is written, or the frame that a reader of a ring is done with."""

    call: Number
    name: Name
    version: Number
    after: Number = 0
    but: Annotated[int, Meta(ge=0, le=2)] = 0
    first: bool = False


class Statistics(Struct, frozen=True, array_like=True, tag="statistics"):
    """How much does the keeper hold?"""

    call: Number


class Measure(Struct, frozen=True, array_like=True, tag="measure"):
    """A request for the counts of the keeper: requests, their duration, and usage by user and device."""

    call: Number


class Takeover(Struct, frozen=True, array_like=True, tag="takeover"):
    """A request to end, with a socket over which a guardian asks for everything; see :mod:`.guarded`."""

    call: Number


Request = (
    Publish | Offer | Part | Attach | More | Release | Sleep | Cancel | State | Watch | List | Versions | Holders
    | Remove | Statistics | Takeover | Page | Update | Pages | Measure | Repeating
)  # fmt: skip


# -- replies of a keeper ----------------------------------------------------------------------------------------------


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """The keeper's answer to a greeting. `lends` is the random id of a lender, else empty: a later one has another."""

    pid: Number
    lends: Label = ""


class Recovered(Struct, frozen=True, array_like=True, tag="recovered"):
    """This keeper, number `keeper`, goes on for another one: make unanswered calls again (``Repeating``)."""

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
    """A lease, with the first of its `total` descriptors; ``More`` fetches the rest. `moves`: it may move the bytes.
    `has_publisher`: then another connection published it and lives, and may have that memory mapped."""

    call: Number
    lease: Number
    total: Number
    entry: Entry
    moves: bool = False
    has_publisher: bool = False


class Descriptors(Struct, frozen=True, array_like=True, tag="descriptors"):
    """The answer to ``More``."""

    call: Number
    offset: Number


class Claimed(Struct, frozen=True, array_like=True, tag="claimed"):
    """The answer that this client is the one to publish: ``Publish`` with this claim, or ``Release``."""

    call: Number
    claim: Number


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """It is done."""

    call: Number


class LeaseState(Struct, frozen=True, array_like=True, tag="lease_state"):
    """The state of a leased version: whether it is not current any more, which is then (0: none), and whether readers
    were asked to let go. Of updates: how many were whole; whether one is under way, or the last was not finished; and
    whether the process that may make the next one is there."""

    call: Number
    stale: bool
    current: Number
    revoked: bool
    updates: Number
    updating: bool
    torn: bool
    has_writer: bool


class Notice(Struct, frozen=True, array_like=True, tag="notice"):
    """An event of a watched version. `reason` is replaced, removed, expired or revoked; `current` may be 0: none."""

    call: Number
    name: Name
    version: Number
    reason: Word
    current: Number


class Rows(Struct, frozen=True, array_like=True, tag="rows"):
    """A page of EntryInfo, VersionInfo, HolderInfo, or one StatisticsInfo, of :mod:`.reports`, packed; `more` follows
    behind its last row."""

    call: Number
    rows: list[Raw]
    more: bool


class RequestRow(Struct, frozen=True, array_like=True):
    """All requests of one kind: how many; the seconds that the keeper worked on them; how many took at most as long as
    each bound of ``Measurements``, and not as the one before; and how many failed, by the name of the error."""

    kind: Word
    count: Number
    seconds: Seconds
    buckets: Annotated[list[Number], Meta(max_length=64)]
    errors: dict[Word, Number] = {}


class UserInfo(Struct, frozen=True, array_like=True):
    """The usage of one user, as it counts against that user's ceilings.
    `nbytes` counts memory that the user has published, and old versions that it leases."""

    uid: Uid
    nbytes: Size
    entries: Number
    descriptors: Number
    leases: Number
    connections: Number


class DeviceRow(Struct, frozen=True, array_like=True):
    """The kept memory of one device, by the name that publishers gave it."""

    device: Word
    nbytes: Size
    versions: Number


class Measurements(Struct, frozen=True, array_like=True, tag="measurements"):
    """The counts of a keeper since its start, and what it takes. `bounds` are in seconds. Of users and devices those
    with the most bytes are listed."""

    call: Number
    uptime: Seconds
    processor: Seconds
    resident: Size
    bounds: Annotated[list[Seconds], Meta(max_length=64)]
    requests: Annotated[list[RequestRow], Meta(max_length=256)]
    users: Annotated[list[UserInfo], Meta(max_length=256)]
    devices: Annotated[list[DeviceRow], Meta(max_length=256)]


class PageRow(Struct, frozen=True, array_like=True):
    """A lease with such a page, its holder, and the first word if that was asked for."""

    lease: Number
    pid: Number
    uid: Number
    label: Label = ""
    host: Label = ""
    word: Size = 0


class PageList(Struct, frozen=True, array_like=True, tag="page_list"):
    """The answer to ``Pages`` for the leases up to `through`; `more` leases are behind it.
    `looked` has pid, uid and number of looked-at pages of each process."""

    call: Number
    rows: list[PageRow]
    more: bool
    through: Number = 0
    looked: list[tuple[Number, Number, Number]] = []


class Error(Struct, frozen=True, array_like=True, tag="error"):
    """An exception of :mod:`vram.errors`, by name. After an error with call 0 the keeper hangs up."""

    call: Number
    kind: Word
    text: Text
    details: Annotated[list[Text], Meta(max_length=64)] = []
    expected: Notes = {}
    found: Notes = {}


Reply = (
    Welcome | Published | NextPart | Attached | Descriptors | Claimed | Done | LeaseState | Notice | Rows | Error
    | PageList | Measurements | Recovered
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_replies = msgspec.msgpack.Decoder(Reply)
_hello = msgspec.msgpack.Decoder(Hello)
_items = msgspec.msgpack.Decoder(list[Raw])
_word = msgspec.msgpack.Decoder(Word)
_number = msgspec.msgpack.Decoder(Number)
_TAGS = frozenset(kind.__struct_config__.tag for kind in get_args(Request))

encode = _encoder.encode


# Only a keeper needs it: it takes a millisecond to make, which no reader has to wait for.
@functools.cache
def _requests() -> msgspec.msgpack.Decoder[Request]:
    return msgspec.msgpack.Decoder(Request)


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
    """Parse a request. Raises MistakenRequestError for a wrong value in a request whose number is known."""
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


def decode_reply(payload: bytes) -> Reply:
    """Parse a reply. Raises :class:`ProtocolError` for anything the protocol does not allow."""
    try:
        reply: Reply = _replies.decode(payload)
    except _UNREADABLE as error:
        raise errors.ProtocolError(f"not an answer of a keeper: {error}") from None
    return reply


def saturated(nbytes: int) -> int:
    """Return a sum of bytes as a message can carry it: at most 2**63 - 1, which then reads as "no less than"."""
    return min(nbytes, _LARGEST)


def decode_rows(rows: list[Raw], kind: type[_T]) -> list[_T]:
    """Parse the rows of a page. Raises :class:`ProtocolError` for anything else."""
    try:
        return [msgspec.msgpack.decode(row, type=kind) for row in rows]
    except _UNREADABLE as error:
        raise errors.ProtocolError(f"not a row of {kind.__name__}: {error}") from None


def check_protocol(hello: Hello) -> None:
    """Raise :class:`UnsupportedError` unless the client speaks this keeper's protocol."""
    if hello.protocol != PROTOCOL:
        raise errors.UnsupportedError(
            "this conversation",
            f"protocol {PROTOCOL} (the keeper's)",
            f"{hello.protocol} (the client's)",
            "Restart the older one: the keeper with `vram keep --takeover --background`, or the program",
        )
