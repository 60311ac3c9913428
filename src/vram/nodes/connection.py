"""One TCP connection between two nodes, which begins with a proof from each end that it has the key.

The reader proves first, so a stranger is sent nothing that was made with the key, and it names the carrier that it
means, so a relay cannot pass it on to another carrier with the same key. Both proofs cover all earlier messages.
The traffic that follows is neither encrypted nor authenticated; digests find what was damaged in pieces.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
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

_LENGTH = struct.Struct("<I")
_AT_ONCE = 4 << 20  # bytes that one call receives at most
_BUFFER = 4 << 20  # bytes of a socket's buffers, as far as the kernel allows
_GREETING = b"vram nodes 4"
_SAME = (
    "where no key is named, each user has one of their own: name the same file to both "
    f"(key=, --key or ${KEY_VARIABLE})"
)
_T = TypeVar("_T")


class Connection:
    """One end of a connection; it owns the socket. One thread at a time may use it; any thread may call :meth:`cut`.
    Readers give theirs to engines, which use :meth:`fetch` and :meth:`ask`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.most = m.MAX_GREETING  # bytes of a message that is read
        self.pause = math.inf  # seconds of silence within a piece
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            self.where = show_address(sock.getpeername())
            self.here = str(sock.getsockname()[0])
            self.place = place_of(*sock.getsockname()[:2])
        except OSError as error:
            sock.close()
            raise PeerGoneError(f"the other end of a connection is gone: {error}") from None

    # -- messages ---------------------------------------------------------------------------------------------------
    def send(self, message: object, timeout: float) -> None:
        """Send a message. Raises PeerGoneError or WaitTimeoutError if the other end is gone or does not read."""
        data = m.encode(message)
        if len(data) > m.MAX_FRAME:
            raise ProtocolError(f"a message of {len(data)} bytes; at most {m.MAX_FRAME} are sent")
        self.send_bytes(memoryview(_LENGTH.pack(len(data)) + data), timeout)

    def receive(self, timeout: float) -> m.Message:
        """Return the next message. Raises ProtocolError if it is too long, or one that nobody says."""
        until = time.monotonic() + timeout
        head = bytearray(_LENGTH.size)
        self._fill(memoryview(head), until)
        (length,) = _LENGTH.unpack(head)
        if length > self.most:
            raise ProtocolError(f"{self.where} announces a message of {length} bytes; at most {self.most} are read")
        data = bytearray(length)
        self._fill(memoryview(data), until)
        return m.decode(data)

    def hear(self, kind: type[_T], timeout: float) -> _T:
        """Return the next message, of a kind that is due; a refusal is raised as the error that it names."""
        said = self.receive(timeout)
        if isinstance(said, m.Refused):
            raise m.refused(said, self.where)
        if not isinstance(said, kind):
            raise ProtocolError(f"{self.where} says {said!r:.80} where {kind.__name__} is due")
        return said

    def request(self, message: object, kind: type[_T], timeout: float) -> _T:
        """Send a message and return the reply; see :meth:`hear`."""
        self.send(message, timeout)
        return self.hear(kind, timeout)

    # -- what a reader asks -------------------------------------------------------------------------------------------
    def fetch(self, piece: m.Piece, into: memoryview, timeout: float, base: bytes = b"") -> bytearray | None:
        """Have the bytes of a piece sent on this connection, into memory of the host.
        With a `base`, a delta to that may come, which is returned."""
        until = time.monotonic() + timeout
        head = self.request(m.Fetch(piece.number, base), m.PieceHead, timeout)
        most = piece.nbytes if base and head.packed is not None else 0
        if (head.number, head.nbytes) != (piece.number, piece.nbytes) or (head.packed or 0) > most:
            raise ProtocolError(f"{self.where} sends {head!r:.80} in place of {piece}")
        delta = None if head.packed is None else bytearray(head.packed)
        self._fill(into if delta is None else memoryview(delta), until, self.pause)
        return delta

    def ask(self, engine: str, data: bytes, timeout: float) -> bytes:
        """Return what the carrier's half of an engine answers; see :meth:`~.engine.Offering.answer`."""
        return self.request(m.Ask(engine, data), m.Answer, timeout).data

    def digests(self, count: int, timeout: float) -> list[bytes]:
        """Return the digests of all pieces."""
        found: list[bytes] = []
        while len(found) < count:
            some = self.request(m.Digests(len(found)), m.DigestList, timeout).digests
            if not 1 <= len(some) <= count - len(found):
                raise ProtocolError(f"{self.where} says {len(some)} digests from piece {len(found)} of {count} on")
            found += some
        return found

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

    def _fill(self, into: memoryview, until: float, pause: float = math.inf) -> None:
        """Fill memory with what comes, all of it in time, and no byte more than `pause` seconds after another."""
        while into:
            let_in()
            try:
                got = self._sock.recv_into(into[:_AT_ONCE])
            except BlockingIOError:
                self._wait(select.POLLIN, min(until, time.monotonic() + pause))
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

    def fileno(self) -> int:
        """Lend the descriptor, to be polled."""
        return self._sock.fileno()

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


def connect(address: str, key: bytes, timeout: float, *, pause: float = 5.0) -> Connection:
    """Connect to a carrier and prove the key both ways; an empty key stands for this user's own key.
    `pause` is the seconds that the other end may be silent within a piece.
    Raises AccessDeniedError if the keys differ, or if the carrier is not known by the address that was asked for."""
    host, port = parse_address(address)
    family, where = _resolve(host, port)
    check_reach(str(where[0]), key)
    key = key or own_key()
    with contextlib.ExitStack() as undo:
        try:
            sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
            sock.settimeout(timeout)
            waiting(sock.connect, where)
        except TimeoutError:
            raise WaitTimeoutError(f"{address} did not answer within {timeout:g} s") from None
        except OSError as error:
            raise PeerGoneError(
                f"no carrier can be reached at {address} ({error.strerror}); start one there: vram carry --at {address}"
            ) from None
        connection = Connection(sock)
        connection.pause = pause
        # A name goes as it was written: whoever answers for names might have named another carrier's numbers.
        as_numbers = is_in_numbers(host) or host.lower() == "localhost"
        place = place_of(*parse_address(connection.where) if as_numbers else (host, port))
        _introduce(connection, key, timeout, place)
        undo.pop_all()
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
    hello = m.Hello(m.PROTOCOL, secrets.token_bytes(32), place, machine_of(place))
    challenge = connection.request(hello, m.Challenge, timeout)
    said = m.encode(hello) + m.encode(challenge)
    proof = m.Proof(_prove(key, b"reader", said))
    answer = connection.request(proof, m.Proof, max(0.001, until - time.monotonic()))
    if not hmac.compare_digest(answer.mac, _prove(key, b"carrier", said)):
        raise AccessDeniedError(f"whoever listens at {connection.where} does not have the key: {_SAME}")
    connection.most = m.MAX_FRAME


def greet(connection: Connection, key: bytes, timeout: float, names: Collection[str] = ()) -> None:
    """Authenticate a reader that connected; if it is refused, it is sent the error, which is raised as well.
    The reader has to mean this end of the connection, or a place in `names`."""
    until = time.monotonic() + timeout
    try:
        hello = connection.hear(m.Hello, timeout)
        if hello.protocol != m.PROTOCOL:
            raise ProtocolError(
                f"protocol {m.PROTOCOL} is spoken here, and {hello.protocol} by you: restart the older one"
            )
        challenge = m.Challenge(secrets.token_bytes(32))
        proof = connection.request(challenge, m.Proof, max(0.001, until - time.monotonic()))
        said = m.encode(hello) + m.encode(challenge)
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
    connection.send(m.Proof(_prove(key, b"carrier", said)), timeout)
    connection.most = m.MAX_REQUEST


def _prove(key: bytes, who: bytes, said: bytes) -> bytes:
    return hmac.digest(key, b"|".join((_GREETING, who, said)), "sha256")
