"""One TCP connection between two nodes: both prove that they have the key, then every message is authenticated.

The reader proves first, so a stranger is sent nothing that was made with the key, and it names the carrier that it
means, so a relay cannot pass it on to another carrier with the same key. Both proofs cover all earlier messages.
Messages are not encrypted; the bytes of pieces are checked by digests that came in authenticated messages.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import AccessDeniedError, BusyError, PeerGoneError, ProtocolError, UsageError, WaitTimeoutError
from ..lifetime import let_in, waiting
from . import messages as m
from .address import KEY_VARIABLE, check_reach, is_in_numbers, machine_of, parse_address, place_of, show_address
from .own_key import own_key

if TYPE_CHECKING:
    from typing import Self

_HEAD = struct.Struct("<I16s")  # length and authentication of what follows
_COUNT = struct.Struct("<Q")
_AT_ONCE = 4 << 20  # bytes that one call receives at most
_BUFFER = 4 << 20  # bytes of a socket's buffers, as far as the kernel allows
_GREETING = b"vram nodes 2"
_SAME = (
    "where no key is named, each user has one of their own: name the same file to both "
    f"(key=, --key or ${KEY_VARIABLE})"
)
_G = TypeVar("_G", bound=m.Greeting)


class Connection:
    """One end of a connection; it owns the socket. One thread at a time may use it; any thread may call :meth:`cut`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            self.where = show_address(sock.getpeername())
            self.here = str(sock.getsockname()[0])
            self.place = place_of(*sock.getsockname()[:2])
        except OSError as error:
            sock.close()
            raise PeerGoneError(f"the other end of a connection is gone: {error}") from None
        self._sending = self._receiving = b""  # keys, once the greeting is over
        self._sent = self._received = 0

    # -- messages ---------------------------------------------------------------------------------------------------
    def send(self, message: object, timeout: float) -> None:
        """Send a message. Raises PeerGoneError or WaitTimeoutError if the other end is gone or does not read."""
        data = m.encode(message)
        if len(data) > m.MAX_FRAME:
            raise ProtocolError(f"a message of {len(data)} bytes; at most {m.MAX_FRAME} are sent")
        mac = _authenticate(self._sending, self._sent, data)
        self._sent += 1
        self.send_bytes(memoryview(_HEAD.pack(len(data), mac) + data), timeout)

    def receive(self, timeout: float, *, most: int = m.MAX_FRAME) -> bytearray:
        """Return the bytes of the next message. Raises ProtocolError if it is too long or wrongly authenticated."""
        until = time.monotonic() + timeout
        head = bytearray(_HEAD.size)
        self._fill(memoryview(head), until)
        length, mac = _HEAD.unpack(head)
        most = most if self._receiving else m.MAX_GREETING
        if length > most:
            raise ProtocolError(f"{self.where} announces a message of {length} bytes; at most {most} are read")
        data = bytearray(length)
        self._fill(memoryview(data), until)
        if not hmac.compare_digest(mac, _authenticate(self._receiving, self._received, data)):
            raise ProtocolError(f"a message from {self.where} was changed, repeated or cut on its way, or made up")
        self._received += 1
        return data

    def ask(self, message: object, timeout: float) -> m.Reply:
        """Send a message and return the carrier's reply; a refusal is raised as the error that it names."""
        self.send(message, timeout)
        reply = m.decode_reply(self.receive(timeout))
        if isinstance(reply, m.Refused):
            raise m.refused(reply, self.where)
        return reply

    # -- bytes as they are --------------------------------------------------------------------------------------------
    def send_bytes(self, data: memoryview, timeout: float) -> None:
        """Send bytes of this process's memory."""
        until = time.monotonic() + timeout
        while data:
            let_in()
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, until)
            except OSError as error:
                raise self._gone(error) from None

    def send_file(self, fd: int, start: int, nbytes: int, timeout: float) -> None:
        """Send bytes of a file, such as memory by its descriptor: they do not come through this process."""
        until, end = time.monotonic() + timeout, start + nbytes
        while start < end:
            let_in()
            try:
                sent = os.sendfile(self._sock.fileno(), fd, start, end - start)
            except BlockingIOError:
                self._wait(select.POLLOUT, until)
                continue
            except OSError as error:
                raise self._gone(error) from None
            if not sent:
                raise ProtocolError(f"memory that is to be sent ends after {start} bytes of {end}")
            start += sent

    def receive_bytes(self, into: memoryview, timeout: float, *, pause: float | None = None) -> None:
        """Fill memory with what comes: all of it within `timeout` seconds, and none of them `pause` after another."""
        self._fill(into, time.monotonic() + timeout, pause)

    def _fill(self, into: memoryview, until: float, pause: float | None = None) -> None:
        while into:
            let_in()
            try:
                got = self._sock.recv_into(into[:_AT_ONCE])
            except BlockingIOError:
                self._wait(select.POLLIN, until if pause is None else min(until, time.monotonic() + pause))
                continue
            except OSError as error:
                raise self._gone(error) from None
            if not got:
                raise PeerGoneError(f"{self.where} has ended the connection")
            into = into[got:]

    def _wait(self, event: int, until: float) -> None:
        poll = select.poll()
        poll.register(self._sock, event)
        left = until - time.monotonic()
        if left <= 0 or not waiting(poll.poll, left * 1000):
            what = "sends nothing" if event == select.POLLIN else "reads nothing"
            raise WaitTimeoutError(f"{self.where} {what} any more")

    def _gone(self, error: OSError) -> PeerGoneError:
        return PeerGoneError(f"the connection to {self.where} broke: {error.strerror or error}")

    # -- the greeting -----------------------------------------------------------------------------------------------
    def keep_keys(self, sending: bytes, receiving: bytes) -> None:
        """Authenticate what is said from here on."""
        self._sending, self._receiving = sending, receiving
        self._sent = self._received = 0

    # -- to wait on ---------------------------------------------------------------------------------------------------
    def fileno(self) -> int:
        """Lend the descriptor, to be polled."""
        return self._sock.fileno()

    def is_over(self) -> bool:
        """Whether the other end is known to be gone."""
        poll = select.poll()
        poll.register(self._sock, select.POLLRDHUP)
        return bool(poll.poll(0))

    # -- the end ----------------------------------------------------------------------------------------------------
    def cut(self) -> None:
        """Wake whoever waits here, in any thread: for them the other end is gone."""
        with contextlib.suppress(OSError):  # it is gone anyway
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen(host: str, port: int, key: bytes, *, backlog: int = 256) -> socket.socket:
    """Listen at an address. Raises AccessDeniedError if other machines could connect and there is no key."""
    family, where = _resolve(host, port)
    check_reach(str(where[0]), key)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        kind = BusyError if error.errno == errno.EADDRINUSE else UsageError
        raise kind(f"nobody can listen at {show_address(where)}: {error.strerror}") from None
    return sock


def connect(address: str, key: bytes, timeout: float) -> Connection:
    """Connect to a carrier and prove the key both ways; an empty key stands for this user's own key.
    Raises AccessDeniedError if the keys differ, or if the carrier is not known by the address that was asked for."""
    host, port = parse_address(address)
    family, where = _resolve(host, port)
    check_reach(str(where[0]), key)
    key = key or own_key()
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise PeerGoneError(f"nobody can connect to {address}: {error.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        sock.settimeout(timeout)
        waiting(sock.connect, where)
    except TimeoutError:
        sock.close()
        raise WaitTimeoutError(f"{address} did not answer within {timeout:g} s") from None
    except OSError as error:
        sock.close()
        raise PeerGoneError(
            f"no carrier can be reached at {address} ({error.strerror}); start one there: vram carry --at {address}"
        ) from None
    except BaseException:
        sock.close()
        raise
    connection = Connection(sock)
    # A name goes as it was written: whoever answers for names might have named another carrier's numbers.
    as_numbers = is_in_numbers(host) or host.lower() == "localhost"
    try:
        _introduce(connection, key, timeout, place_of(*parse_address(connection.where) if as_numbers else (host, port)))
    except BaseException:
        connection.close()
        raise
    return connection


def _resolve(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # the latter of names that cannot be, such as "a..b"
        raise PeerGoneError(f"no host is known as {host!r:.80}: {getattr(error, 'strerror', error)}") from None
    return family, where


def _introduce(connection: Connection, key: bytes, timeout: float, place: str) -> None:
    """Greet, as the one who came."""
    until = time.monotonic() + timeout
    hello = m.Hello(m.PROTOCOL, secrets.token_bytes(32), True, place, machine_of(place))
    connection.send(hello, timeout)
    challenge = _hear(connection, m.Challenge, until)
    if not challenge.has_key:  # as of a carrier of before there was always one
        raise AccessDeniedError(f"whoever listens at {connection.where} has no key, and may be anybody: {_SAME}")
    said = m.encode(hello) + m.encode(challenge)
    connection.send(m.Proof(_prove(key, b"reader", said)), timeout)
    accepted = _hear(connection, m.Accepted, until)
    if not hmac.compare_digest(accepted.mac, _prove(key, b"carrier", said)):
        raise AccessDeniedError(f"whoever listens at {connection.where} does not have the key: {_SAME}")
    connection.keep_keys(_prove(key, b"from reader", said), _prove(key, b"from carrier", said))


def greet(connection: Connection, key: bytes, timeout: float, names: Collection[str] = ()) -> None:
    """Authenticate a reader that connected; if it is refused, it is sent the error, which is raised as well.
    The reader has to mean this end of the connection, or a place in `names`."""
    until = time.monotonic() + timeout
    try:
        hello = _hear(connection, m.Hello, until)
        if hello.protocol != m.PROTOCOL:
            raise ProtocolError(
                f"protocol {m.PROTOCOL} is spoken here, and {hello.protocol} by you: restart the older one"
            )
        challenge = m.Challenge(secrets.token_bytes(32), True)
        connection.send(challenge, timeout)
        said = m.encode(hello) + m.encode(challenge)
        proof = _hear(connection, m.Proof, until)
        if not hmac.compare_digest(proof.mac, _prove(key, b"reader", said)):
            raise AccessDeniedError(f"your key is another one than that of this carrier: {_SAME}")
        # Not sooner: strangers are not told where it is. Neither can whoever is in between have changed what was said.
        here = connection.place, machine_of(connection.place)
        if (hello.place, hello.machine) != here and hello.place not in names:
            raise AccessDeniedError(
                f"you mean {hello.place!r:.300}, and this is another carrier, at {connection.place!r}: somebody passed "
                f"you on. Where that is you, by forwarded ports or another name: vram carry --name {hello.place:.300}"
            )
    except (AccessDeniedError, ProtocolError) as error:
        connection.send(m.refusal(error), timeout)
        raise
    connection.send(m.Accepted(_prove(key, b"carrier", said)), timeout)
    connection.keep_keys(_prove(key, b"from carrier", said), _prove(key, b"from reader", said))


def _hear(connection: Connection, kind: type[_G], until: float) -> _G:
    said = m.decode_greeting(connection.receive(max(0.001, until - time.monotonic())))
    if isinstance(said, m.Refused):
        raise m.refused(said, connection.where)
    if not isinstance(said, kind):
        raise ProtocolError(f"{connection.where} says {type(said).__name__} where {kind.__name__} is due")
    return said


def _prove(key: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"|".join((_GREETING, who, said)), "sha256")


def _authenticate(key: bytes, number: int, data: bytes | bytearray) -> bytes:
    return hmac.digest(key, _COUNT.pack(number) + data, "sha256")[:16]
