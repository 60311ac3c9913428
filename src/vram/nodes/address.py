"""Where carriers are, and the key that two ends of a connection have in common."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import socket
import stat
from collections.abc import Container

from ..errors import AccessDeniedError, MissingFileError, UnreadableFileError, UsageError

KEY_VARIABLE = "VRAM_NODES_KEY"
_SHORTEST, _LONGEST = 16, 4096  # bytes of a key


def parse_address(text: object) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, such as ``10.0.0.7:7070`` or ``[::1]:7070``; the host has to be said."""
    if isinstance(text, str):
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if host and host.isprintable() and port.isascii() and port.isdigit() and int(port) <= 65535:
            return host, int(port)
    raise UsageError(f"{text!r:.80} is no address; write host and port, such as 10.0.0.7:7070 or [::1]:7070")


def show_address(where: tuple[object, ...]) -> str:
    """Write an address of a socket as :func:`parse_address` reads it."""
    host, port = where[:2]
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"


def is_in_numbers(host: str) -> bool:
    """Whether the host of an address needs no looking up, in whichever way its numbers are written."""
    try:
        return bool(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST))
    except (OSError, UnicodeError):
        return False


def is_loopback(host: str) -> bool:
    """Whether an address in numbers is of this machine alone."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def place_of(host: str, port: int) -> str:
    """Return an address as both ends of a connection write it, whichever way they were told it."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])  # an interface has another name at the other end
    except ValueError:
        return show_address((host.lower(), port))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return show_address((str(mapped or found), port))


def machine_of(place: str) -> bytes:
    """Return the identity of the machine whose loopback address `place` is; empty for other addresses.
    Each network namespace of each boot has an identity of its own, since each has its own 127.0.0.1."""
    if not is_loopback(parse_address(place)[0]):
        return b""
    parts = []
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", "rb") as file:
        parts.append(file.read().strip())
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/thread-self/ns/net").st_ino).encode())
    return hashlib.sha256(b" ".join(parts)).digest()[:16]


def check_reach(host: str, key: bytes) -> None:
    """Raise AccessDeniedError if `key` is empty and `host`, in numbers, is no loopback address.
    An empty key stands for a user's own key, which is known on one machine only."""
    if not key and not is_loopback(host):
        raise AccessDeniedError(
            f"{host} is another machine's, or reached by others, and there is no key: without one only loopback "
            f"addresses (127.0.0.1, ::1) are spoken to. Make one (head -c 32 /dev/urandom > key; chmod 600 key), copy "
            f"it to each node, and name it: key=, --key or ${KEY_VARIABLE}"
        )


def read_key(path: str | os.PathLike[str] | None) -> bytes:
    """Return the key that nodes share; empty if neither `path` nor ``$VRAM_NODES_KEY`` names a file.
    Raises AccessDeniedError unless the file belongs to this user or root, and nobody else may read or write it."""
    if path is None:
        path = os.environ.get(KEY_VARIABLE)
    if not path:
        return b""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        raise MissingFileError(f"there is no key at {os.fspath(path)!r:.200}") from None
    except PermissionError:
        raise UnreadableFileError(
            f"the key at {os.fspath(path)!r:.200} may not be read by uid {os.geteuid()}"
        ) from None
    except (OSError, ValueError) as error:  # such as links that go round in a circle
        raise UsageError(f"{os.fspath(path)!r:.200} is no path of a key: {error}") from None
    return read_key_file(fd, path, owners=(0, os.geteuid()))


def read_key_file(fd: int, path: str | os.PathLike[str], *, owners: Container[int]) -> bytes:
    """Return the key in an open file, and close the descriptor. `owners` are the uids that may own the file."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise UsageError(f"the key at {os.fspath(path)!r:.200} is no regular file")
    with open(fd, "rb") as file:
        if found.st_uid not in owners or found.st_mode & 0o077:
            raise AccessDeniedError(
                f"the key at {os.fspath(path)!r:.200} has mode {stat.S_IMODE(found.st_mode):04o} and belongs to uid "
                f"{found.st_uid}: it has to be yours alone (chmod 600)"
            )
        key = file.read(_LONGEST + 1)
    if not _SHORTEST <= len(key) <= _LONGEST:
        raise UsageError(f"a key has {_SHORTEST} to {_LONGEST} bytes; at {os.fspath(path)!r:.200} are {len(key)}")
    return key
