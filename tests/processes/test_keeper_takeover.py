"""One keeper takes over from another: nobody notices, and SIGKILL of either before any of their messages costs nothing
that the state diagram does not say."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pytest
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import serving
from tests.support.memfds import memfds
from tests.support.other_users import OTHER, as_user

from vram.errors import PeerGoneError, QuotaError, UnsupportedError
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient
from vram.keeper.leases import Attachment, PublishClaim, Segment
from vram.keeper.notices import Signal
from vram.keeper.private import KeeperProcess, short_directory
from vram.keeper.restart import take_over
from vram.keeper.server import KeeperServer
from vram.open_files import close_fds
from vram.sharing.channel import Channel

pytestmark = pytest.mark.slow  # goes with takeover by a successor

STOPPED = Path(__file__).parents[1].joinpath("support", "stopped.py")
KIB4 = Segment(4096)


@pytest.fixture
def place() -> Iterator[str]:
    with short_directory() as directory:
        yield directory


class Stopping:
    """A keeper that stops right before its n-th message of a takeover; the others it has no channel for."""

    def __init__(self, path: str, stop_at: int, *options: str, **environment: str) -> None:
        ready, ready_child = os.pipe()
        parent_child, self.parent = os.pipe()
        fds = ["--ready-fd", str(ready_child), "--parent-fd", str(parent_child)]
        self.process = subprocess.Popen(
            [sys.executable, STOPPED, str(stop_at), "keeper", path, *fds, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[ready_child, parent_child],
            env={**os.environ, **environment},
        )
        os.close(ready_child)
        os.close(parent_child)
        self.ready = ready
        self.serves = False

    def wait_until_it_serves(self) -> bool:
        """Return whether it serves, or ended without."""
        self.serves = bool(os.read(self.ready, 4096))
        return self.serves

    def line(self) -> str:
        """Return what it says next: where it stopped, or nothing if it serves or ended."""
        assert self.process.stdout is not None
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        if not self.serves:
            poll.register(self.ready, select.POLLIN)
        came = [fd for fd, _ in poll.poll(SOON * 1000)]
        assert came, "nothing happened"
        return self.process.stdout.readline().strip() if self.process.stdout.fileno() in came else ""

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.lines, self.said = self.process.communicate(timeout=SOON)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise
        if self.ready >= 0:
            os.close(self.ready)
            os.close(self.parent)
        self.ready = -1
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.ready >= 0:  # a test failed before it ended it
            self.end(signal.SIGKILL)


@dataclass
class Scene:
    """A keeper's life in full: everything that can be under way is."""

    path: str
    reader: KeeperClient
    publisher: KeeperClient
    waiter: KeeperClient
    held: Attachment
    old: Attachment
    claim: PublishClaim
    news: Signal
    stranger: socket.socket
    threads: list[threading.Thread] = field(default_factory=list)
    waited: list[object] = field(default_factory=list)

    def check_undisturbed(self) -> None:
        """Everything goes on, as if nothing had been."""
        found = self.reader.statistics()
        assert (found.entries, found.versions, found.leases, found.waiting) == (3, 4, 2, 2)
        assert not self.reader.is_stale(self.held.lease_id)
        assert self.reader.is_stale(self.old.lease_id)
        assert not self.has_news()

    def has_news(self) -> bool:
        """Whether something happened to the version that is held."""
        return bool(select.select([self.news], [], [], 0)[0])

    def finish(self) -> None:
        """Bring everything that is under way to its end."""
        self.check_undisturbed()
        with memfds(1) as fds:
            # the claim, for which one waits, and the entry for which another does
            self.publisher.publish("claimed", [KIB4], fds[:1], claim=self.claim)
            self.publisher.publish("late", [KIB4], fds[:1])
            for thread in self.threads:
                thread.join(SOON)
            assert sorted(getattr(one, "name", repr(one)) for one in self.waited) == ["claimed", "late"]
            # news, and numbers that go on
            assert self.publisher.publish("w", [KIB4], fds[:1]) == 3
        until(self.has_news)
        self.reader.release([self.held.lease_id, self.old.lease_id])
        assert self.reader.statistics().leases == 2
        assert self.stranger.recv(65536) == b""  # a connection without a greeting is to be made again

    def close(self) -> None:
        for one in (self.news, self.reader, self.publisher, self.waiter, self.stranger):
            one.close()
        for thread in self.threads:
            thread.join(SOON)


@contextlib.contextmanager
def scene(path: str) -> Iterator[Scene]:
    with contextlib.ExitStack() as stack:
        reader, publisher, waiter = (stack.enter_context(KeeperClient.connect(path)) for _ in range(3))
        with memfds(300) as fds:
            publisher.publish("w", [KIB4], fds[:1], meta={"k": "v"})
            old = reader.attach("w")
            close_fds(old.fds)
            publisher.publish("w", [KIB4] * 300, fds, manifest=b"manifest", ttl=10_000)
            held = reader.attach("w")
            close_fds(held.fds)
            publisher.publish("a", [KIB4], fds[:1])
            publisher.publish("b", [KIB4], fds[:1])
        claim = publisher.attach_or_claim("claimed")
        assert isinstance(claim, PublishClaim)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.settimeout(SOON)
        stranger.connect(path)
        made = Scene(path, reader, publisher, waiter, held, old, claim, reader.signal(held.lease_id), stranger)

        def wait(name: str) -> None:
            try:
                got = waiter.attach_or_claim(name) if name == "claimed" else waiter.attach(name, timeout=SOON * 3)
            except PeerGoneError as error:
                made.waited.append(error)
            else:
                if isinstance(got, Attachment):
                    close_fds(got.fds)
                made.waited.append(got)

        made.threads = [threading.Thread(target=wait, args=(name,)) for name in ("late", "claimed")]
        for thread in made.threads:
            thread.start()
        until(lambda: reader.statistics().waiting == 2)
        try:
            yield made
        finally:
            made.close()


def test_everything_goes_on_as_if_nothing_had_been(place: str) -> None:
    path = f"{place}/k"
    first = KeeperProcess(path)
    with scene(path) as life:
        second = KeeperProcess(path, ["--takeover"])
        assert first.process.wait(SOON) == 0
        assert first.stop() == 0
        with KeeperClient.connect(path) as fresh:
            assert fresh.server_pid == second.pid
            assert fresh._channel.peer().pid == second.pid
        third = KeeperProcess(path, ["--takeover"])
        assert second.process.wait(SOON) == 0
        assert second.stop() == 0
        life.finish()
    assert third.stop() == 0
    assert [first.said(), second.said(), third.said()] == ["", "", ""]
    assert os.listdir(place) == []


def test_two_that_take_over_at_once_do_so_one_after_the_other(place: str) -> None:
    path = f"{place}/k"
    with contextlib.ExitStack() as stack:
        first = KeeperProcess(path)
        stack.callback(first.stop)
        found: list[KeeperProcess] = []
        threads = [threading.Thread(target=lambda: found.append(KeeperProcess(path, ["--takeover"]))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        for one in found:
            stack.callback(one.stop)
        assert len(found) == 2
        until(lambda: sum(one.process.poll() is None for one in (first, *found)) == 1)
        with KeeperClient.connect(path) as client:
            assert client.statistics().pid in [one.pid for one in found]


def test_without_a_keeper_it_starts_and_says_that_nothing_was_taken_over(place: str) -> None:
    process, lines = spoken(f"{place}/k", "--takeover")
    try:
        assert lines[0] == f"vram keep: no keeper ran at {place}/k: nothing was taken over"
        with KeeperClient.connect(f"{place}/k") as connection:
            assert connection.list() == []
    finally:
        ended(process)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_another_user_may_not_take_over(place: str) -> None:
    path = f"{place}/k"
    os.chmod(place, 0o755)
    keeper = KeeperProcess(path, ["--mode", "0666"])

    def ask() -> str:
        with Channel.connect(path, SOON) as channel:
            channel.send(m.encode(m.Hello(m.PROTOCOL)), timeout=SOON)
            channel.recv(timeout=SOON)
            channel.send(m.encode(m.Takeover(1)), timeout=SOON)
            return str(m.decode_reply(channel.recv(timeout=SOON)[0]))

    assert "AccessDeniedError" in as_user(OTHER, ask)
    with KeeperClient.connect(path) as connection:
        connection.list()
    keeper.stop()


def test_a_keeper_inside_of_a_program_hands_nothing_over_and_serves_on(place: str) -> None:
    path = f"{place}/k"
    with serving(KeeperServer(path, raises_limit=False)), KeeperClient.connect(path) as client:
        with pytest.raises(UnsupportedError, match=f"started by `vram keep`; have one inside of pid {os.getpid()}"):
            take_over(KeeperServer(path, raises_limit=False))
        assert client.list() == []


def test_a_successor_that_hangs_is_abandoned_and_does_not_serve(place: str) -> None:
    path = f"{place}/k"
    for step in (3, 6):  # before it takes the state; in the middle of the descriptors
        old = Stopping(path, 10_000, PATIENCE="2")  # in which a slow machine gets to that step
        assert old.wait_until_it_serves()
        with scene(path) as life:
            new = Stopping(path, step, "--takeover", STOPPED="pause")
            assert new.line()
            started = time.monotonic()
            life.check_undisturbed()
            assert time.monotonic() - started < SOON
            new.go_on()
            assert not new.wait_until_it_serves()
            assert new.end() == 1
            assert "vram keep:" in new.said
            life.finish()
        assert old.end() == 0
        assert "serving on" in old.said


# -- limits -----------------------------------------------------------------------------------------------------------
def limits_of(path: str) -> tuple[int | None, int | None]:
    with KeeperClient.connect(path) as connection:
        found = connection.statistics()
        return found.max_bytes, found.max_entries


def spoken(path: str, *options: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Start a keeper as people do; return it and what it printed until it served."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "vram.keeper", "--socket", path, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    lines = []
    while line := process.stdout.readline():
        lines.append(line.rstrip("\n"))
        if "serving at" in line:
            break
    return process, lines


def ended(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=SOON)
    finally:
        process.kill()
        process.communicate()


def test_a_successor_keeps_the_limits_that_it_is_not_given_anew(place: str) -> None:
    path = f"{place}/k"
    first = KeeperProcess(path, ["--max-bytes", "8MiB", "--max-entries", "2", "--max-entries-per-user", "1"])
    second, lines = spoken(path, "--takeover")
    try:
        assert first.process.wait(SOON) == 0
        assert limits_of(path) == (8 << 20, 2)
        assert lines[0] == (
            f"vram keep: took over from pid {first.pid}; limits: --max-bytes 8 MiB as before, --max-entries 2 as "
            f"before, --max-entries-per-user 1 as before"
        )
        with KeeperClient.connect(path) as connection, memfds(1) as fds:
            connection.publish("a", [KIB4], fds)
            connection.publish("b", [KIB4], fds)
            with pytest.raises(QuotaError, match="2 entries"):
                connection.publish("c", [KIB4], fds)
        third, lines = spoken(path, "--takeover", "--max-entries", "3", "--max-bytes", "none")
        try:
            assert second.wait(SOON) == 0
            assert limits_of(path) == (None, 3)
            assert lines[0] == (
                f"vram keep: took over from pid {second.pid}; limits: --max-bytes none (was 8 MiB), --max-entries 3 "
                f"(was 2), --max-entries-per-user 1 as before"
            )
            with KeeperClient.connect(path) as connection, memfds(1) as fds:
                connection.publish("c", [KIB4], fds)
        finally:
            ended(third)
    finally:
        ended(second)
        first.stop()
