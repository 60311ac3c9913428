"""Rules for names, metadata, times to live and timeouts: the same for the client, the keeper and the errors."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import CapacityError, UsageError
from ..sharing.descriptor import MAX_ADDRESSES
from ..spec import printable

LENT = "lent"  # the name of the one entry of a lender
MAX_BYTES = MAX_ADDRESSES  # of one version: what nobody could map is no memory, and would only spoil sums
MAX_NAME = 200
MAX_META = 4096  # bytes of all keys and values together
MAX_KEYS = 512
MAX_VERSION = 2**53
MAX_MANIFEST = 32 * 1024  # bytes of a manifest that travels inside a message
MAX_LABEL = 120
MAX_HOST = 64  # of a name of a host, to Linux
MAX_TTL = 10 * 365 * 86400.0  # seconds

# All timeouts of the protocol, in seconds.
HANDSHAKE = 5.0  # for a connection and its greeting, where a caller names no time; for a keeper to end its start
REQUEST = 30.0  # for an answer that needs no wait, to a client, or the maker of a lender
LENDER_REQUEST = 2.0  # for the same from a lender, which has little to do, and may be stopped
CANCEL = 1.0  # for the answer to the cancellation of an interrupted call
IDLE = 30.0  # that a client may owe a greeting, or parts of what it sends, or leave what it asked for unread
GUARDIAN = 5.0  # that a guardian may take nothing
START = 20.0  # for a private keeper to serve
GOODBYE = 1.0  # for a client to read on after a failed send, and to wait for its reading thread

_NAME = re.compile(r"(?:~[0-9]{1,10}/)?[A-Za-z0-9._@:+\-]+(?:/[A-Za-z0-9._@:+\-]+)*", re.ASCII)
_NOT_IN_HOST = re.compile(r"[^A-Za-z0-9._\-]", re.ASCII)
_RULE = (
    f"a name has 1 to {MAX_NAME} of the characters A-Z a-z 0-9 . _ @ : + - and single slashes between parts, "
    'none of which is "." or ".."; in front of all there may be "~uid/", where only that user may publish'
)


def check_name(name: str) -> str:
    """Return `name` if it may name an entry; raise UsageError with the rule otherwise."""
    if not isinstance(name, str):
        raise UsageError(f"a name is a str, not {type(name).__name__}; {_RULE}")
    # `..` is refused although nothing here is a path: somebody will make one of it.
    if (
        len(name) > MAX_NAME
        or _NAME.fullmatch(name) is None
        or ("." in name and any(part in (".", "..") for part in name.split("/")))
    ):
        shown = name if len(name) <= 60 else name[:60] + "..."
        raise UsageError(f"{shown!r} ({len(name)} characters) is not a name for an entry: {_RULE}")
    return name


def home_of(name: str) -> int | None:
    """Return the uid of the user under whom a name is, as it says; None if it is under nobody."""
    return int(name[1 : name.index("/")]) if name.startswith("~") else None


def check_prefix(prefix: str) -> str:
    """Return `prefix` if some name could begin with it."""
    if not isinstance(prefix, str) or len(prefix) > MAX_NAME or re.fullmatch(r"~?[A-Za-z0-9._@:+\-/]*", prefix) is None:
        raise UsageError(f"{str(prefix)[:60]!r} begins no name: {_RULE}")
    return prefix


def check_meta(meta: Mapping[str, str], *, what: str = "meta") -> dict[str, str]:
    """Return a copy of `meta` if it maps str to str, at most 512 keys and 4 KiB of UTF-8 in all."""
    if len(meta) > MAX_KEYS:
        raise UsageError(
            f"{what} has {len(meta)} keys; {MAX_KEYS} is the most. Put a hash there and the rest elsewhere"
        )
    size = 0
    for key, value in meta.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise UsageError(f"{what} maps str to str, not {key!r:.60} to {type(value).__name__}; convert it yourself")
        try:
            size += len(key.encode()) + len(value.encode())
        except UnicodeEncodeError:
            raise UsageError(f"{what} {key!r:.60} has characters that UTF-8 cannot say") from None
    if size > MAX_META:
        raise UsageError(f"{what} has {size} bytes; {MAX_META} is the most. Put a hash there and the rest elsewhere")
    return dict(meta)


def check_version(version: object) -> None:
    """Raise :class:`UsageError` unless `version` may be the number of a version, or is None: none in particular."""
    if version is not None and (type(version) is not int or not 0 < version <= MAX_VERSION):
        # An int of thousands of digits cannot be shown.
        large = type(version) is int and abs(version) > MAX_VERSION
        shown = "beyond 2**53" if large else f"{version!r:.40}"
        raise UsageError(f"version {shown} is not the number of a version: they count from 1")


def check_size(nbytes: int) -> int:
    """Return `nbytes` if one version may have so many: at most 2**47, all the addresses that a process has."""
    if not 0 <= nbytes <= MAX_BYTES:
        raise CapacityError(
            f"a version of {nbytes} bytes; {MAX_BYTES} (128 TiB) is the most that a process could map. Publish several"
        )
    return nbytes


def check_ttl(ttl: float | None) -> float | None:
    """Return `ttl`, seconds, if it is a time to live: above 0 and at most ten years; None is for ever."""
    if ttl is None:
        return None
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl <= MAX_TTL:
        raise UsageError(f"ttl {ttl!r} is not a time to live: seconds above 0 and at most {MAX_TTL:.0f}, or None")
    return float(ttl)


def clip_label(label: str) -> str:
    """Return a label as it is shown: printable, and at most 120 characters."""
    return printable(label[:MAX_LABEL])


def clip_host(host: str) -> str:
    """Return the name of a host as it is shown: at most 64 of the characters that such names have."""
    return _NOT_IN_HOST.sub("?", host[:MAX_HOST])


def describe_process(pid: int | None, uid: int, label: str, host: str) -> str:
    """Return words for a process: pid and uid as the kernel says, label (in quotes) and host as the process claims.
    `pid` is None or 0 where its PID namespace is out of sight; only then the host is named."""
    return f"{describe_pid(pid, host)}, uid {uid}" + (f", label {clip_label(label)!r}" if label else "")


def describe_pid(pid: int | None, host: str) -> str:
    """Return words for a process without its uid and label."""
    return f"pid {pid}" if pid else "pid unknown" + (f", host {clip_host(host)}" if host else "")
