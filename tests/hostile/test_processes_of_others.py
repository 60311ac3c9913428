"""Numbers of processes that are another's by now, and waits for a stranger's memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.keeper_here import serving
from tests.support.other_users import OTHER, needs_root

from vram.entries.stop import stop
from vram.errors import PeerGoneError
from vram.keeper.private import short_directory
from vram.keeper.server import KeeperServer

# Listens as another user and is none of theirs any more: as a process is that has got the number of one that is gone.
_LISTENS = f"""
import os, signal, socket, sys
listener = socket.socket(fileno=int(sys.argv[1]))
os.seteuid({OTHER})
listener.listen(16)
os.seteuid(0)
print("listens", flush=True)
signal.pause()
"""


@pytest.fixture
def strangers_path() -> Iterator[str]:
    """Where another user may have a keeper that root talks to when it names the path."""
    with short_directory() as place:
        os.chmod(place, 0o755)
        yield f"{place}/k"


@needs_root
def test_a_number_that_is_another_users_process_by_now_ends_nobody(strangers_path: str) -> None:
    """Who had listened was gone, and a process of root's had got its number: that was ended, by root's own command."""
    with (
        serving(KeeperServer(strangers_path)) as server,
        subprocess.Popen(
            [sys.executable, "-c", _LISTENS, str(server.listener.sock.fileno())],
            pass_fds=[server.listener.sock.fileno()],
            stdout=subprocess.PIPE,
        ) as victim,
    ):
        try:
            os.chown(os.path.dirname(strangers_path), OTHER, OTHER)
            assert victim.stdout is not None
            assert victim.stdout.readline() == b"listens\n"
            with pytest.raises(PeerGoneError, match=rf"pid {victim.pid}, uid {OTHER}\) has ended"):
                stop(keeper=strangers_path, force=True)
            assert victim.poll() is None
        finally:
            victim.kill()
