"""A program that stops for good right before its n-th message, so that it can be killed exactly there.

``python lend_stopped.py N borrow PATH``, ``... N lend PATH KIND`` or ``... N send|receive FD KIND``. Before its n-th
message it writes ``at N``, at its end ``end``, and waits to be killed. A lender writes ``lent`` first, and asks for the
memory back when it gets a line.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]  # for the stand-in and its users

_count = 0
_stop_at = int(sys.argv[1])


def _say(text: str) -> None:
    os.write(1, text.encode() + b"\n")


def _forever() -> None:
    threading.Event().wait()


def _stopping(what: Any) -> Any:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        global _count
        if _count == _stop_at:
            _say(f"at {_count} {what.__name__}")
            _forever()
        _count += 1
        return what(*arguments, **options)

    return wrapped


def _borrow(path: str) -> None:
    import vram

    with vram.borrow(path, timeout=120) as lease:
        lease.on_revoke(lambda lease: None)
        lease.array.to_host()
        assert not lease.is_stale()


def _lend(path: str, kind: str) -> None:
    from tests.support.lend_children import Sources

    import vram

    with Sources() as sources:
        x = sources.make(kind)
        with vram.lend(x, at=path, close_timeout=120) as lending:
            _say("lent")
            sys.stdin.readline()
            lending.revoke(timeout=120)


def _channel(what: str, fd: str, kind: str) -> None:
    from tests.support.lend_children import Sources

    import vram

    # Closed without ado where it is killed: what is left is the other end's to take back.
    with Sources() as sources, vram.ArrayChannel(socket.socket(fileno=int(fd))) as channel:
        if what == "send":
            x = vram.share(sources.make(kind))
            for _ in range(2):
                channel.send(x)
                assert channel.recv(timeout=120) is x
            channel.send(x[10:20])
            channel.send(None)
            assert channel.recv(timeout=120) == "done"
            x.close()
        else:
            while (array := channel.recv(timeout=120)) is not None:
                array.to_host()
                if len(array) > 10:
                    channel.send(array)
            channel.send("done")


def main() -> None:
    what, *arguments = sys.argv[2:]
    if what == "lend":
        from vram.keeper import connection

        connection.transmit = _stopping(connection.transmit)  # type: ignore[attr-defined]
        connection.receive = _stopping(connection.receive)  # type: ignore[attr-defined]
        _lend(*arguments)
    else:
        from vram.sharing.channel import Channel

        Channel.send = _stopping(Channel.send)  # type: ignore[method-assign]
        Channel.recv = _stopping(Channel.recv)  # type: ignore[method-assign]
        if what == "borrow":
            _borrow(*arguments)
        else:
            _channel(what, *arguments)
    _say("end")
    _forever()


if __name__ == "__main__":
    main()
