"""A planned restart: the next keeper goes on with everything, and nobody notices."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import serving
from tests.support.memfds import memfds
from tests.support.other_users import OTHER, as_user
from tests.support.places import short_directory
from tests.support.threads import race

from vram.errors import PeerGoneError, QuotaError
from vram.keeper import messages as m
from vram.keeper.background import Signal
from vram.keeper.client import Attachment, KeeperClient, Segment
from vram.keeper.messages import Claimed
from vram.keeper.private import KeeperProcess
from vram.keeper.server import KeeperServer
from vram.open_files import close_fds
from vram.sharing.channel import Channel

KIB4 = Segment(4096)


@pytest.fixture
def place() -> Iterator[str]:
    with short_directory() as directory:
        yield directory


@dataclass
class Scene:
    """A keeper's life in full: everything that can be under way is."""

    path: str
    reader: KeeperClient
    publisher: KeeperClient
    waiter: KeeperClient
    held: Attachment
    old: Attachment
    claim: Claimed
    news: Signal
    stranger: socket.socket
    threads: list[threading.Thread] = field(default_factory=list)
    waited: list[object] = field(default_factory=list)

    def check_undisturbed(self) -> None:
        """Everything goes on, as if nothing had been."""
        found = self.reader.statistics()
        assert (found.entries, found.versions, found.leases, found.waiting) == (3, 4, 2, 2)
        assert not self.reader.is_stale(self.held)
        assert self.reader.is_stale(self.old)
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
        assert isinstance(claim, Claimed)
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.settimeout(SOON)
        stranger.connect(path)
        made = Scene(
            path, reader, publisher, waiter, held, old, claim, reader.signal((held.name, held.version)), stranger
        )

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
    first = KeeperProcess(path, ["--survive"])
    with scene(path) as life:
        second = KeeperProcess(path, ["--takeover"])
        assert first.process.wait(SOON) == 0
        assert first.stop() == 0
        with KeeperClient.connect(path) as fresh:
            assert fresh._channel.peer().pid == fresh.statistics().pid  # the socket listens for who serves
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
        first = KeeperProcess(path, ["--survive"])
        stack.callback(first.stop)
        found = race(*[lambda: KeeperProcess(path, ["--takeover"])] * 2)
        for one in found:
            stack.callback(one.stop)
        until(lambda: sum(one.process.poll() is None for one in (first, *found)) == 1)
        assert first.process.poll() == 0
        with KeeperClient.connect(path) as client:
            assert client.list() == []


def test_without_a_keeper_it_starts_and_says_that_nothing_was_taken_over(place: str) -> None:
    process, lines = spoken(f"{place}/k", "--takeover")
    try:
        assert lines[0] == f"vram keep: no keeper ran at {place}/k: nothing was taken over"
        with KeeperClient.connect(f"{place}/k") as connection:
            assert connection.list() == []
    finally:
        ended(process)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_a_path_that_is_no_utf_8_is_served_and_taken_over(place: str) -> None:
    path = os.fsdecode(os.fsencode(place) + b"/\xff")
    keeper = KeeperProcess(path, ["--survive"])
    successor = KeeperProcess(path, ["--takeover"])
    assert keeper.process.wait(SOON) == 0
    keeper.stop()
    assert limits_of(path) == (None, None)
    successor.stop()


def test_another_user_may_not_take_over(place: str) -> None:
    path = f"{place}/k"
    os.chmod(place, 0o755)
    keeper = KeeperProcess(path, ["--mode", "0666", "--survive"])

    def ask() -> str:
        with Channel.connect(path, SOON) as channel:
            channel.send(m.encode(m.Hello(m.PROTOCOL)), timeout=SOON)
            channel.recv(timeout=SOON)
            channel.send(m.encode(m.Takeover(1)), [channel.fileno()], timeout=SOON)
            return str(m.decode_reply(channel.recv(timeout=SOON)[0]))

    assert "AccessDeniedError" in as_user(OTHER, ask)
    with KeeperClient.connect(path) as connection:
        connection.list()
    keeper.stop()


def test_a_keeper_without_a_guardian_is_not_restarted_and_serves_on(place: str) -> None:
    path = f"{place}/k"
    with serving(KeeperServer(path, raises_limit=False)), KeeperClient.connect(path) as client:
        with pytest.raises(PeerGoneError, match=rf"needs a keeper with a guardian; have pid {os.getpid()}.*ephemeral"):
            KeeperProcess(path, ["--takeover"])
        assert client.list() == []


@pytest.mark.parametrize("options", [["--group", "no-such-group"], ["--max-bytes", "many"]])
def test_a_restart_with_a_mistake_in_its_options_changes_nothing(place: str, options: list[str]) -> None:
    keeper = KeeperProcess(f"{place}/k", ["--survive"])
    with KeeperClient.connect(keeper.path) as client:
        before = client.statistics().pid
        with pytest.raises(PeerGoneError, match=options[1]):
            KeeperProcess(keeper.path, ["--takeover", *options])
        assert client.statistics().pid == before
    keeper.stop()


def test_a_next_keeper_that_may_have_too_few_descriptors_is_refused(place: str) -> None:
    keeper = KeeperProcess(f"{place}/k", ["--survive"])
    with KeeperClient.connect(keeper.path) as client:
        before = client.statistics().pid
        with pytest.raises(PeerGoneError, match=r"this process may have 100 descriptors.* `ulimit -n 192` first"):
            KeeperProcess(keeper.path, ["--takeover"], launcher=["prlimit", "--nofile=100:100"])
        assert client.statistics().pid == before
    keeper.stop()


# -- limits -----------------------------------------------------------------------------------------------------------
def limits_of(path: str) -> tuple[int | None, int | None]:
    with KeeperClient.connect(path) as connection:
        most = {limit.name: limit.most for limit in connection.statistics().limits}
        return most["bytes"], most["entries"]


def pid_of(path: str) -> int:
    with KeeperClient.connect(path) as connection:
        return connection.statistics().pid


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
    limits = ["--max-bytes", "8MiB", "--max-entries", "2", "--max-entries-per-user", "1"]
    first = KeeperProcess(path, ["--survive", "--log", "text", "--patience", "20", *limits])
    pid = pid_of(path)
    second, lines = spoken(path, "--takeover")
    try:
        assert first.process.wait(SOON) == 0
        assert limits_of(path) == (8 << 20, 2)
        assert lines[0] == f"vram keep: took over from pid {pid}, with {' '.join(limits)}"
        with KeeperClient.connect(path) as connection, memfds(1) as fds:
            connection.publish("a", [KIB4], fds)
            connection.publish("b", [KIB4], fds)
            with pytest.raises(QuotaError, match="2 entries"):
                connection.publish("c", [KIB4], fds)
        pid = pid_of(path)
        third, lines = spoken(path, "--takeover", "--max-entries", "3", "--max-bytes", "none")
        try:
            assert second.wait(SOON) == 0
            assert limits_of(path) == (None, 3)
            assert lines[0] == (
                f"vram keep: took over from pid {pid}, with --max-bytes none --max-entries 3 --max-entries-per-user 1"
            )
            os.kill(pid_of(path), signal.SIGKILL)  # the next one has all options from the journal
            assert limits_of(path) == (None, 3)
            with KeeperClient.connect(path) as connection, memfds(1) as fds:
                connection.publish("c", [KIB4], fds)
        finally:
            ended(third)
    finally:
        ended(second)
        first.stop()
