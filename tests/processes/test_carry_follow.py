"""A replica that is kept at the newest version: by the command, and by a loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from tests.support.carried import Nodes, model, same
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.places import private_socket

import vram
from vram.errors import AccessDeniedError, PeerGoneError
from vram.keeper.client import close_client
from vram.nodes.carrier import Carrier
from vram.nodes.follow import follow


def test_each_version_comes(two: Nodes) -> None:
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        following = follow(carrier.address, "model", keeper=two.here)
        for seed in (1, 2, 3):
            vram.publish("model", model(1000, seed), keeper=two.origin)
            assert next(following).origin_version == seed
            with vram.attach("model", keeper=two.here) as lease:
                assert same(lease, model(1000, seed))
        following.close()


def test_what_is_here_to_the_byte_is_not_transferred_again(two: Nodes) -> None:
    vram.publish("model", model(1000, 1), keeper=two.origin)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        vram.replicate(carrier.address, "model", keeper=two.here)
        sent = carrier.sent
        following = follow(carrier.address, "model", keeper=two.here)
        command = [sys.executable, "-c", PUBLISH_LATER, two.origin]
        with subprocess.Popen(command) as publisher:
            assert next(following).origin_version == 2
            following.close()
        assert publisher.returncode == 0
        assert carrier.sent - sent < 2000  # version 2 alone


PUBLISH_LATER = """
import sys, time, numpy, vram
deadline = time.monotonic() + 60
while vram.entry("model", keeper=sys.argv[1]).readers < 2 and time.monotonic() < deadline:
    time.sleep(0.01)  # until it is watched: the carrier has a lease besides
vram.publish("model", {"w": numpy.arange(100)}, keeper=sys.argv[1])
"""


def test_another_keeper_with_the_same_numbers_is_found_out(two: Nodes) -> None:
    vram.publish("model", model(1000, 1), keeper=two.origin)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        vram.replicate(carrier.address, "model", keeper=two.here)
    with private_socket() as other:
        vram.publish("model", model(1000, 2), keeper=other)
        # Who does not find it out waits for ever for another number: it is given one, and then it is too late.
        late = threading.Timer(AT_ONCE, vram.publish, ("model", model(1000, 3)), {"keeper": other})
        with Carrier(carrier.address, keeper=other):
            following = follow(carrier.address, "model", keeper=two.here)
            late.start()
            try:
                assert next(following).origin_version == 1
            finally:
                late.cancel()
                late.join(SOON)
                following.close()
        close_client(other)
    with vram.attach("model", keeper=two.here) as lease:
        assert same(lease, model(1000, 2))


def test_a_carrier_that_is_gone_is_waited_for_in_time(two: Nodes) -> None:
    vram.publish("model", model(1000, 1), keeper=two.origin)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        following = follow(carrier.address, "model", timeout=0.5, keeper=two.here)
        next(following)
    with pytest.raises(PeerGoneError):
        next(following)


def test_the_command_follows_and_ends_when_it_is_told(two: Nodes) -> None:
    program = "import sys; from vram.cli import main; sys.exit(main())"
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        vram.publish("model", {"w": np.zeros(10)}, keeper=two.origin)
        command = [sys.executable, "-c", program, "follow", carrier.address, "model", "--socket", two.here]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert "model version 1, which is 1 of" in process.stdout.readline()
            vram.publish("model", {"w": np.ones(10)}, keeper=two.origin)
            assert "model version 2, which is 2 of" in process.stdout.readline()
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(SOON) == 0
    with vram.attach("model", keeper=two.here) as lease:
        assert (lease["w"].numpy() == 1).all()


def test_what_is_removed_stays_here_and_is_waited_for(two: Nodes) -> None:
    vram.publish("model", {"w": np.zeros(10)}, keeper=two.origin)
    with Carrier("127.0.0.1:0", keeper=two.origin) as carrier:
        following = follow(carrier.address, "model", keeper=two.here)
        next(following)
        vram.remove("model", keeper=two.origin)
        assert vram.entry("model", keeper=two.here).version == 1
        vram.publish("model", {"w": np.ones(10)}, keeper=two.origin)
        assert next(following).version == 2
        following.close()
    until(lambda: vram.entry("model", keeper=two.here).version == 2, what="the replica")


def test_what_is_not_offered_is_not_followed(two: Nodes) -> None:
    with Carrier("127.0.0.1:0", prefix="public/", keeper=two.origin) as carrier:
        with pytest.raises(AccessDeniedError, match="only entries under 'public/'"):
            next(follow(carrier.address, "model", timeout=SOON, keeper=two.here))
