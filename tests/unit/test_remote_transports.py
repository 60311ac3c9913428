"""Transports between processes where the other end breaks what was agreed (S7), or whoever holds it forks (I7)."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from tests.support.deadlines import SOON
from tests.support.remote_transports import greeting, memory
from tests.support.transport_children import WAYS

import vram
from vram.errors import ProtocolError
from vram.handover.messages import Reference, Shared, encode
from vram.keeper.private import short_directory
from vram.transports import SocketExchange, VmmTransport
from vram.transports.remote import WINDOW

BYTE = Shared(Reference(1, 1, 0, "uint8", (1,)))


def test_s7_more_messages_than_may_be_under_way_are_refused() -> None:
    """As many as may be are kept while this end sends; one more is a peer that would fill our memory."""
    for count in (WINDOW, WINDOW + 1):
        one, other = SocketExchange.pair()
        with one, VmmTransport("host", "host", other) as transport, vram.zeros(1, "uint8", device="host") as array:
            (allocation,), _ = array.region.segments(0, 1)
            with allocation:
                one.send(greeting("vmm"))
                one.send(memory(1), [allocation.export()])
                for _ in range(count):
                    one.send(encode(BYTE))
                if count <= WINDOW:
                    transport.send(array)
                else:
                    with pytest.raises(ProtocolError, match=f"more than {WINDOW} messages"):
                        transport.send(array)
                for _ in range(WINDOW):
                    transport.recv(timeout=SOON).close()


@pytest.mark.parametrize("way", WAYS)
def test_i7_a_forked_child_holds_no_end_open(way: str) -> None:
    """Or the other end would not see who died: the kernel waits for the last copy of a socket, a pipe or a lock."""
    made = []
    with short_directory() as place:
        path = str(Path(place) / "x")
        thread = threading.Thread(target=lambda: made.append(WAYS[way].listen(path, SOON)))
        thread.start()
        here = WAYS[way].connect(path, SOON)
        thread.join(SOON)
    (there,) = made
    forked, tell = os.pipe()
    wait, go_on = os.pipe()
    child = os.fork()
    if not child:
        os.close(go_on)
        os.write(tell, b"c")
        os.read(wait, 1)  # until the parent closes it
        os._exit(0)
    try:
        assert os.read(forked, 1) == b"c"
        with there:
            assert not there.is_gone()
            if way == "socket":
                here.give_away()  # a shutdown would end all copies at once
            here.close()
            assert there.is_gone(), "the child holds the parent's end open"
    finally:
        for fd in (forked, tell, wait, go_on):
            os.close(fd)
        assert os.waitpid(child, 0)[1] == 0
