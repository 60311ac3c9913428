"""What others send to a unix socket and nobody reads: kept out of it, and closed with it.

Closing a socket closes the descriptors that are unread in it, which may take as long as whoever sent them pleases: a
TCP socket lingers, the server of a file does not answer.
"""

from __future__ import annotations

import _socket
import contextlib
import socket
from functools import partial

from ..open_files import Closer, close_fds

_PASSCRED = getattr(socket, "SO_PASSCRED", 16)
_PASSRIGHTS = 83  # SO_PASSRIGHTS of <asm-generic/socket.h>, from Linux 6.16 on
_DONTWAIT = int(getattr(socket, "MSG_DONTWAIT", 0))
_PEEK = int(getattr(socket, "MSG_PEEK", 0)) | _DONTWAIT
_CTRUNC = int(getattr(socket, "MSG_CTRUNC", 0))
_CREDENTIALS = socket.CMSG_SPACE(12) if hasattr(socket, "CMSG_SPACE") else 0  # bytes: room for those, for nothing else
_DRAINED = 64  # messages without descriptors that are thrown away at once, before another thread goes on


def pass_rights(sock: socket.socket, passes: bool) -> None:
    """Have the kernel refuse descriptors that are sent to a unix socket, or let them pass again; Linux before 6.16
    always passes them. An accepted socket begins as its listening socket is."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _PASSRIGHTS, passes)


def hang_up(sock: _socket.socket) -> bool:
    """End a connection, for every process that has this socket; return whether to close it takes no time.
    It may take long if unread descriptors are in it. Messages without are discarded, up to some dozens."""
    with contextlib.suppress(OSError):  # also: from here on nothing more gets into its queue
        sock.shutdown(socket.SHUT_RDWR)
    try:
        sock.setsockopt(socket.SOL_SOCKET, _PASSCRED, 1)  # tells the end from an empty message: who sent that
        for _ in range(_DRAINED):
            try:
                payload, sender, said, _ = sock.recvmsg(1, _CREDENTIALS, _PEEK)
            except ConnectionResetError:  # told once; what had come is behind it
                continue
            if not payload and not sender:
                return True
            if said & _CTRUNC:
                return False
            sock.recvmsg(1, 0, _DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def close_filled(sock: _socket.socket, closer: Closer | None = None) -> None:
    """End a connection for every process that has this socket, and close it with all that is unread in it: in a thread
    of `closer`, or as :func:`close_fds` does, if that may take long."""
    if hang_up(sock):
        sock.close()
    elif closer is None:
        close_fds([sock.detach()])
    else:
        closer.put(partial(_drain_and_close, sock))


def _drain_and_close(sock: _socket.socket) -> None:
    """Close a socket that another process may have, too, and close last: it is to find nothing unread."""
    with contextlib.suppress(OSError):
        while True:
            with contextlib.suppress(ConnectionResetError):  # told once
                payload, sender, _, _ = sock.recvmsg(1, _CREDENTIALS, _DONTWAIT)
                if not payload and not sender:
                    break
    sock.close()
