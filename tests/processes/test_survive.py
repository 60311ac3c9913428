"""A keeper that is killed is followed by one that goes on: nothing is lost, and nobody hangs."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import is_stopped, later
from tests.support.memfds import make_memfd, memfds
from tests.support.places import short_directory
from tests.support.samples import in_turns, is_whole, nths, some

from vram.doctor.keepers import examine
from vram.errors import NotFoundError, PeerGoneError, VramError, WaitTimeoutError
from vram.info import StatisticsInfo
from vram.keeper import messages as m
from vram.keeper.client import Attachment, KeeperClient, Segment, close_client
from vram.keeper.messages import Claimed
from vram.keeper.private import KeeperProcess
from vram.open_files import close_fds
from vram.sharing.channel import Channel

KILLED = str(Path(__file__).parents[1].joinpath("support", "killed_keeper.py"))


class Survivor:
    """A keeper with a guardian, that can be told to kill itself."""

    def __init__(self, place: str, *options: str) -> None:
        self.place = Path(place)
        self.process = KeeperProcess(f"{place}/k", options, launcher=[sys.executable, KILLED])
        self.path = self.process.path
        self.file = "kill"
        self.armed: list[Path] = []

    def succeed(self) -> bool:
        """Have another take over, which is to be killed by another file; return whether it does."""
        file = "kill-2" if self.file == "kill" else "kill"
        try:
            new = KeeperProcess(self.path, ["--takeover"], launcher=[sys.executable, KILLED, file])
        except PeerGoneError as error:
            if "nothing was taken over" in str(error) or "it said nothing" in str(error):
                return False
            raise
        before, self.process, self.file = self.process, new, file
        until(lambda: before.process.poll() is not None, what="the end of the one before")
        assert before.process.returncode in (0, 128 + signal.SIGKILL)  # killed when it had nothing more to do
        before.stop()
        assert before.said() == ""
        return True

    def _serving(self) -> int:
        with KeeperClient.connect(self.path) as anybody:
            return anybody.statistics().pid

    @property
    def pid(self) -> int:
        """The keeper's process: the only child of its guardian."""
        found: list[int] = []

        def look() -> bool:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            found[:] = map(int, children)
            return len(found) == 1

        until(look, what="a keeper")
        return found[0]

    def kill(self) -> None:
        before = self.pid
        os.kill(before, signal.SIGKILL)
        until(lambda: self.pid != before, what="the next keeper")

    def kill_at(self, step: int | str, file: str = "") -> None:
        path = self.place / (file or self.file)
        path.write_text(str(step))
        self.armed.append(path)

    @property
    def was_killed(self) -> bool:
        """Whether any of that came about; what did not is not to be any more."""
        came = False
        for path in self.armed:
            try:
                path.unlink()
            except FileNotFoundError:
                came = True
        self.armed.clear()
        return came


@pytest.fixture
def survivor() -> Iterator[Survivor]:
    with short_directory() as place:
        made = Survivor(place)
        yield made
        assert made.process.stop() == 0
        assert made.process.said() == ""


def publish(connection: KeeperClient, name: str, content: bytes, count: int = 1) -> int:
    fds = [make_memfd(content=content) for _ in range(count)]
    try:
        return connection.publish(name, [Segment(4096)] * count, fds)
    finally:
        close_fds(fds)


def content(found: Attachment) -> bytes:
    with mmap.mmap(found.fds[0], 4096, prot=mmap.PROT_READ) as memory:
        return memory[:16].rstrip(b"\0")


def read(connection: KeeperClient, name: str, version: int | None = None) -> bytes:
    found = connection.attach(name, version=version)
    try:
        return content(found)
    finally:
        close_fds(found.fds)
        connection.release([found.lease_id])


def books(connection: KeeperClient) -> tuple[int, ...]:
    found = connection.statistics()
    return found.entries, found.versions, found.leases, found.connections, found.nbytes, found.descriptors


def test_what_was_there_is_there_once_the_keeper_was_killed(survivor: Survivor) -> None:
    with KeeperClient.connect(survivor.path) as maker, KeeperClient.connect(survivor.path) as reader:
        for index in range(30):
            publish(maker, f"n{index}", b"content %d" % index)
        held = [reader.attach(f"n{index}") for index in range(10)]
        publish(maker, "n3", b"newer")  # the older one is leased
        before = books(reader)
        for _ in range(3):
            survivor.kill()
            assert books(reader) == before
            assert content(held[3]) == b"content 3"
            assert read(reader, "n3") == b"newer"
            assert read(reader, "n3", 1) == b"content 3"
            assert read(maker, "n7") == b"content 7"
        assert publish(maker, "n3", b"newest") == 3
        for found in held:
            close_fds(found.fds)
            reader.release([found.lease_id])
        entries, versions, leases, *_ = books(reader)
        assert (entries, versions, leases) == (30, 30, 0)


def test_who_dies_is_noticed_by_the_next_keeper_too(survivor: Survivor) -> None:
    with KeeperClient.connect(survivor.path) as maker:
        publish(maker, "w", b"x")
        reader = KeeperClient.connect(survivor.path)
        found = reader.attach("w")
        survivor.kill()
        assert maker.statistics().leases == 1
        close_fds(found.fds)
        reader.close()
        until(lambda: maker.statistics().leases == 0, what="the end of its lease")
        assert maker.statistics().connections == 1


def test_who_waits_goes_on_waiting_and_is_served_by_the_next_keeper(survivor: Survivor) -> None:
    with KeeperClient.connect(survivor.path) as maker, KeeperClient.connect(survivor.path) as reader:
        thread, came = later(lambda: reader.attach("late", timeout=SOON))
        until(lambda: maker.statistics().waiting == 1, what="a waiter")
        survivor.kill()
        assert maker.statistics().waiting == 1
        publish(maker, "late", b"at last")
        thread.join(SOON)
        assert isinstance(came[0], Attachment)
        assert content(came[0]) == b"at last"
        close_fds(came[0].fds)


def test_a_claim_and_a_watch_go_on(survivor: Survivor) -> None:
    with KeeperClient.connect(survivor.path) as maker, KeeperClient.connect(survivor.path) as reader:
        claim = maker.attach_or_claim("c")
        assert isinstance(claim, Claimed)
        publish(maker, "w", b"x")
        heard: list[object] = []
        owner = Survivor.__new__(Survivor)  # anything that can be referred to weakly
        watching = reader.watch(("w", 1), owner, heard.append)
        survivor.kill()
        thread, came = later(lambda: reader.attach("c", timeout=SOON))
        with memfds(1) as fds:
            assert maker.publish("c", [Segment(4096)], fds, claim=claim) == 1
        thread.join(SOON)
        close_fds(came[0].fds)
        maker.remove("w", revoke=True)
        until(lambda: heard, what="the news")
        watching.stop()


def test_many_watches_of_replaced_versions_go_on_with_the_next_keeper(survivor: Survivor) -> None:
    """Each is answered by news at once. A client that first says all, and then reads, has its keeper read nothing."""
    with KeeperClient.connect(survivor.path) as maker:
        owner, heard = Survivor.__new__(Survivor), list[object]()
        watching = []
        for version in range(1, 301):
            publish(maker, "w", b"x")
            close_fds(maker.attach("w").fds)
            watching.append(maker.watch(("w", version), owner, heard.append))
        before = books(maker)
        survivor.kill()
        assert books(maker) == before
        assert not any(one.is_over for one in watching)
        maker.remove("w", 1, revoke=True)
        until(lambda: heard, what="the news")
        for one in watching:
            one.stop()


@pytest.mark.parametrize(
    "what", some(["publish", "publish in parts", "attach", "release", "remove", "connect", "claim"], 3)
)
def test_killed_before_each_step_a_call_takes_effect_once(survivor: Survivor, what: str) -> None:
    with KeeperClient.connect(survivor.path) as maker:
        publish(maker, "w", b"1")
        publish(maker, "other", b"other")
        clean = books(maker)
        version = 1
        for step in nths():
            expected, leases = clean[1], 0
            if what == "remove":
                publish(maker, "gone", b"x")
            if what == "release":
                found = maker.attach("w")
                close_fds(found.fds)
            survivor.kill_at(step)
            if what == "publish":
                version += 1
                assert publish(maker, "w", b"%d" % version) == version
            elif what == "publish in parts":
                version += 1
                with memfds(300) as fds:
                    assert maker.publish("w", [Segment(4096)] * 300, fds) == version
            elif what == "attach":
                found = maker.attach("w")
                assert content(found) == b"1"
                close_fds(found.fds)
                leases = 1
            elif what == "release":
                maker.release([found.lease_id])
            elif what == "remove":
                maker.remove("gone")
            elif what == "connect":
                with KeeperClient.connect(survivor.path) as another:
                    assert read(another, "w") == b"1"
            else:
                claim = maker.attach_or_claim(f"claimed-{step}")
                assert isinstance(claim, Claimed)
                maker.abandon(claim)
            killed = survivor.was_killed
            if what == "connect":
                until(lambda: maker.statistics().connections == 1, what="the end of the other connection")
            now = maker.statistics()
            assert (now.entries, now.versions, now.leases) == (clean[0], expected, leases)
            assert now.descriptors == clean[5] + (299 if what == "publish in parts" and version > 1 else 0)
            assert read(maker, "other") == b"other"
            if leases:
                maker.release([found.lease_id])
            if not killed:
                break
        assert step > 2
        assert not killed, "it never came to the end"


def test_what_was_sent_to_nobody_takes_effect_once(survivor: Survivor) -> None:
    """The keeper is stopped, asked, and killed: the next one finds the request, and is asked once more."""
    with KeeperClient.connect(survivor.path) as maker:
        publish(maker, "w", b"1")
        keeper = survivor.pid
        os.kill(keeper, signal.SIGSTOP)
        until(lambda: is_stopped(keeper), what="a keeper that stands still")
        thread, came = later(lambda: publish(maker, "w", b"2"))
        until(lambda: _unread(maker), what="a request that is sent to who does not read it")
        os.kill(keeper, signal.SIGKILL)
        thread.join(SOON)
        assert came == [2]
        assert publish(maker, "w", b"3") == 3
        assert read(maker, "w") == b"3"


@contextlib.contextmanager
def nobody_follows(survivor: Survivor) -> Iterator[None]:
    """Have no keeper follow one that is killed until the end of a block."""
    os.kill(survivor.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(survivor.process.pid, signal.SIGCONT)


def until_dead(pid: int) -> None:
    until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z", what="its end")


@in_turns(5)
@pytest.mark.parametrize("what", ["lease", "claim", "waiter"])
def test_what_a_call_was_granted_that_was_given_up_meanwhile_is_taken_back(survivor: Survivor, what: str) -> None:
    with KeeperClient.connect(survivor.path) as maker, KeeperClient.connect(survivor.path) as other:
        publish(maker, "w", b"1")
        keeper = survivor.pid
        with nobody_follows(survivor):
            survivor.kill_at(2)  # after its record, before the answer
            maker.grace = 0.3
            ask = {
                "lease": lambda: maker.attach("w"),
                "claim": lambda: maker.attach_or_claim("c", timeout=0.0),
                "waiter": lambda: maker.attach("later", timeout=0.1),
            }[what]
            with pytest.raises(WaitTimeoutError):
                ask()
            maker.grace = SOON
            if what == "waiter":
                os.kill(keeper, signal.SIGKILL)
            until_dead(keeper)
        survivor.was_killed
        assert maker.statistics().entries == 1  # it has said all that there was to be said
        now = other.statistics()
        assert (now.leases, now.waiting) == (0, 0)
        claim = other.attach_or_claim("c", timeout=0.0)
        assert isinstance(claim, Claimed)


@in_turns(5)
@pytest.mark.parametrize("outcome", ["granted", "too late"])
def test_a_call_that_waited_and_is_answered_before_it_comes_again_is_not_made_twice(
    survivor: Survivor, outcome: str
) -> None:
    """By hand, since a client says it at once."""
    from vram.keeper import messages as m
    from vram.sharing.channel import Channel

    with KeeperClient.connect(survivor.path) as maker, contextlib.closing(Channel.connect(survivor.path)) as channel:
        channel.send(m.encode(m.Hello(m.PROTOCOL, "by hand")))
        assert isinstance(m.decode_reply(channel.take(timeout=SOON)[0]), m.Welcome)
        ask = m.Attach(1, "late", wait=0.5 if outcome == "too late" else 3600.0)
        channel.send(m.encode(ask))
        until(lambda: maker.statistics().waiting == 1, what="a waiter")
        survivor.kill()
        payload = channel.take(timeout=SOON)[0]
        recovered = m.decode_reply(payload)
        assert isinstance(recovered, m.Recovered)
        if outcome == "granted":
            publish(maker, "late", b"x")
        payload, fds = channel.take(timeout=SOON)
        close_fds(fds)
        assert isinstance(m.decode_reply(payload), m.Attached if outcome == "granted" else m.Error)
        channel.send(m.encode(m.Repeating(0, recovered.keeper, 1, 1)))
        channel.send(m.encode(ask))
        channel.send(m.encode(m.Statistics(2)))
        found = m.decode_reply(channel.take(timeout=SOON)[0])
        assert isinstance(found, m.Rows)  # and no second answer before it
        (counts,) = m.decode_rows(found.rows, StatisticsInfo)
        assert (counts.leases, counts.waiting) == (int(outcome == "granted"), 0)


@in_turns(5)
def test_what_comes_again_is_known_also_behind_what_is_new(survivor: Survivor) -> None:
    """By hand: one thread may ask something new before another has said its call again."""
    from vram.keeper import messages as m
    from vram.sharing.channel import Channel

    with KeeperClient.connect(survivor.path) as maker, contextlib.closing(Channel.connect(survivor.path)) as channel:
        publish(maker, "w", b"x")
        channel.send(m.encode(m.Hello(m.PROTOCOL, "by hand")))
        assert isinstance(m.decode_reply(channel.take(timeout=SOON)[0]), m.Welcome)
        survivor.kill_at(2)  # after its record, before the answer
        channel.send(m.encode(m.Attach(1, "w")))
        payload = channel.take(timeout=SOON)[0]
        if isinstance(m.decode_reply(payload), m.Welcome):
            payload = channel.take(timeout=SOON)[0]
        recovered = m.decode_reply(payload)
        assert isinstance(recovered, m.Recovered)
        channel.send(m.encode(m.Repeating(0, recovered.keeper, 1, 1)))
        for call in (2, 1, 3):
            channel.send(m.encode(m.Attach(1, "w") if call == 1 else m.Statistics(call)))
            payload, fds = channel.take(timeout=SOON)
            close_fds(fds)
            found = m.decode_reply(payload)
            assert isinstance(found, m.Attached if call == 1 else m.Rows)
        assert maker.statistics().leases == 1


@in_turns(5)
def test_a_log_begins_anew_and_the_next_keeper_goes_on_from_there() -> None:
    with short_directory() as place:
        Path(place, "small").touch()
        survivor = Survivor(place)
        with KeeperClient.connect(survivor.path) as maker:
            found = [maker.attach("w0")] if publish(maker, "w0", b"0") else []
            for index in range(1, 200):
                publish(maker, f"w{index % 7}", b"%d" % index)
                if index % 40 == 0:
                    before = books(maker)
                    survivor.kill()
                    assert books(maker) == before
            assert read(maker, "w3") == b"199"
            assert content(found[0]) == b"0"
            assert [read(maker, f"w{index}") for index in range(7)] == [
                b"%d" % next(n for n in range(199, 0, -1) if n % 7 == index) for index in range(7)
            ]
            log = [fd for fd in Path(f"/proc/{survivor.pid}/fd").iterdir() if "vram-journal" in os.readlink(fd)]
            assert len(log) == 2  # the descriptor, and that of its mapping
            close_fds(found[0].fds)
        assert survivor.process.stop() == 0


def _log_of(survivor: Survivor) -> set[int]:
    found = set()
    for fd in Path(f"/proc/{survivor.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            if "vram-journal" in os.readlink(fd):
                found.add(fd.stat().st_ino)
    return found


@in_turns(5)
def test_who_reads_no_answers_keeps_no_log_from_beginning_anew() -> None:
    """What was decided for it stands in the new log, and takes effect once."""
    with short_directory() as place:
        Path(place, "small").touch()
        survivor = Survivor(place)
        with (
            KeeperClient.connect(survivor.path) as maker,
            contextlib.closing(Channel.connect(survivor.path, SOON)) as idle,
        ):
            with memfds(200) as fds:
                maker.publish("w", [Segment(4096)] * 200, fds)
            idle.send(m.encode(m.Hello(m.PROTOCOL, "idle")), timeout=SOON)
            idle.take(timeout=SOON)
            calls = list(range(1, 13))
            for call in calls:
                idle.send(m.encode(m.Attach(call, "w")), timeout=SOON)
            until(lambda: maker.statistics().leases > 1, what="a lease that is not heard of")
            before = _log_of(survivor)
            for index in range(60):
                publish(maker, "x" * 100, b"%d" % index)
            assert not before & _log_of(survivor)
            survivor.kill()
            leases, was_queued = set(), 0
            while calls:
                payload, sent = idle.take(timeout=SOON)
                close_fds(sent)
                said = m.decode_reply(payload)
                if isinstance(said, m.Recovered):
                    was_queued = len(calls)
                    idle.send(m.encode(m.Repeating(0, said.keeper, calls[0], calls[-1])), timeout=SOON)
                    for call in calls:
                        idle.send(m.encode(m.Attach(call, "w")), timeout=SOON)
                    continue
                assert isinstance(said, m.Attached)
                leases.add(said.lease)
                calls.remove(said.call)
            assert was_queued > 1
            assert len(leases) == maker.statistics().leases == 12
        assert survivor.process.stop() == 0
        assert survivor.process.said() == ""


def test_a_guardian_that_is_killed_is_replaced(survivor: Survivor) -> None:
    keeper = survivor.pid
    with KeeperClient.connect(survivor.path) as maker, KeeperClient.connect(survivor.path) as reader:
        publish(maker, "w", b"before")
        found = reader.attach("w")
        os.kill(survivor.process.pid, signal.SIGKILL)
        survivor.process.process.wait(SOON)
        guardians = _guardians_of(keeper)  # at once: this keeper may be killed before it has anything to tell
        publish(maker, "v", b"after")
        before = books(reader)
        os.kill(keeper, signal.SIGKILL)
        assert books(reader) == before
        assert (read(maker, "w"), read(maker, "v"), content(found)) == (b"before", b"after", b"before")
        second = _children(guardians)
        assert second
        close_fds(found.fds)
        both = (*second, *guardians)  # then nobody is left
        for number in (signal.SIGSTOP, signal.SIGKILL):  # each would start another of the other kind in between
            for pid in both:
                os.kill(pid, number)
        with pytest.raises(PeerGoneError, match="gone"):
            _ask_for_long(reader)
    survivor.process.kill()
    survivor.process = KeeperProcess(f"{survivor.place}/k")  # what the fixture stops: the path is free again


@in_turns(5)
def test_a_guardian_that_has_no_room_is_replaced_and_nothing_is_lost() -> None:
    with short_directory() as place:
        keeper = KeeperProcess(f"{place}/k", ["--survive"])
        with KeeperClient.connect(keeper.path) as client:
            publish(client, "before", b"x")
            _, most = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (3, most))
            publish(client, "after", b"x")
            assert keeper.process.wait(SOON) in (1, -signal.SIGKILL)  # of the keeper, which sees that it ends
            assert "no room" in keeper.said()
            os.kill(before := client.statistics().pid, signal.SIGKILL)
            for name in ("before", "after"):
                close_fds(client.attach(name).fds)
            now = client.statistics().pid
            assert now != before
            os.kill(now, signal.SIGTERM)
            until(lambda: not Path(f"/proc/{now}").exists(), what="the end of the keeper")
        keeper.stop()


@in_turns(5)
def test_who_dies_with_the_keeper_is_ended_once(survivor: Survivor) -> None:
    program = (
        "import sys, time; from vram.keeper.client import KeeperClient\n"
        "one = KeeperClient.connect(sys.argv[1]); held = [one.attach('w') for _ in range(100)]\n"
        "print(flush=True); time.sleep(3600)"
    )
    with KeeperClient.connect(survivor.path) as client:
        publish(client, "w", b"x")
        held = client.attach("w")
        close_fds(held.fds)
        with subprocess.Popen([sys.executable, "-c", program, survivor.path], stdout=subprocess.PIPE) as dying:
            assert dying.stdout is not None
            assert dying.stdout.readline()
            pid = client.statistics().pid
            os.kill(pid, signal.SIGSTOP)
            dying.kill()
            dying.wait(SOON)
            os.kill(pid, signal.SIGKILL)
        until(lambda: client.statistics().leases == 1, what="the end of the leases of who died")
        os.kill(client.statistics().pid, signal.SIGKILL)
        assert client.statistics().leases == 1
        client.release([held.lease_id])


def test_what_is_gone_is_held_no_longer(survivor: Survivor) -> None:
    """Else memory that was given back would be there as long as the guardian is, and nobody would know."""
    with KeeperClient.connect(survivor.path) as maker:
        publish(maker, "kept", b"kept")
        guardian = survivor.process.pid
        until(lambda: _held_by(guardian) == (1, 3), what="that, and the listener, the keeper and a client")
        for killed in (False, True):
            with KeeperClient.connect(survivor.path) as reader:
                publish(maker, "w", b"1", 3)
                found = reader.attach("w")
                close_fds(found.fds)
                publish(maker, "w", b"2")
                if killed:
                    survivor.kill()
                assert read(maker, "w") == b"2"
                until(lambda: _held_by(guardian) == (5, 4), what="both versions, and another client")
                reader.release([found.lease_id])
                maker.remove("w")
                until(lambda: _held_by(guardian)[0] == 1, what="the end of what was given back")
            until(lambda: _held_by(guardian) == (1, 3), what="the end of the connection")
        assert read(maker, "kept") == b"kept"


def _held_by(pid: int) -> tuple[int, int]:
    """Return how many pieces of memory of these tests a process has open, and how many sockets."""
    open_now: list[str] = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            open_now.append(os.readlink(one))
    return sum("memfd:test" in one for one in open_now), sum(one.startswith("socket:") for one in open_now)


def _unread(connection: KeeperClient) -> int:
    """Return how much of the kernel's memory is taken by what was sent and not read yet (``SIOCOUTQ``, unix(7))."""
    (nbytes,) = struct.unpack("i", fcntl.ioctl(connection._channel.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))
    return int(nbytes)


def _ask_for_long(connection: KeeperClient) -> None:
    for _ in range(1000):
        connection.statistics()
        time.sleep(0.01)


def _guardians_of(keeper: int) -> list[int]:
    found: list[int] = []

    def look() -> bool:
        found[:] = _children([keeper])
        return bool(found)

    until(look, what="another guardian")
    return found


def _children(pids: list[int]) -> list[int]:
    return [int(one) for pid in pids for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@in_turns(5)
def test_a_row_that_cannot_be_read_or_names_what_is_not_there_costs_that_row() -> None:
    with short_directory() as place:
        survivor = Survivor(place)
        with KeeperClient.connect(survivor.path) as maker, KeeperClient.connect(survivor.path) as reader:
            publish(maker, "n0", b"0")
            leased = reader.attach("n0")
            publish(maker, "n0", b"newer")
            with pytest.raises(NotFoundError):
                maker.attach("unfit")
            publish(maker, "many", b"parts", 300)
            found: list[tuple[int, list[str]]] = []
            for _ in range(2):  # the journal of the one that goes on has no such row
                survivor.kill()
                assert {name: read(maker, name) for name in ("n0", "many")} == {"n0": b"newer", "many": b"parts"}
                now = reader.statistics()
                assert (now.entries, now.versions, now.leases, now.connections) == (2, 3, 1, 2)
                found.append((now.lost_rows, [one.said for one in examine(survivor.path) if "journal" in one.check]))
                close_client(survivor.path)
                assert content(leased) == b"0"
            close_fds(leased.fds)
        assert [(count, len(words)) for count, words in found] == [(2, 1), (0, 0)]
        assert found[0][1][0].startswith("2 rows of the journal")
        assert survivor.process.stop() == 0
        (line,) = survivor.process.said().splitlines()
        assert "2 rows of the journal could not be read" in line


@contextlib.contextmanager
def log_of(keeper: int) -> Iterator[mmap.mmap]:
    """The log of a keeper that stands still, as this user could change it."""
    os.kill(keeper, signal.SIGSTOP)
    until(lambda: is_stopped(keeper), what="a keeper that stands still")
    (path, *_) = [fd for fd in Path(f"/proc/{keeper}/fd").iterdir() if "vram-journal" in os.readlink(fd)]
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory
    os.kill(keeper, signal.SIGKILL)


@in_turns(5)
@pytest.mark.parametrize("how", ["changed at its beginning", "cut", "cut to nothing"])
def test_a_log_that_is_none_any_more_ends_both_and_that_is_said(how: str) -> None:
    with short_directory() as place:
        survivor = Survivor(place)
        with KeeperClient.connect(survivor.path) as maker:
            publish(maker, "a", b"1")
            keeper = survivor.pid
            with log_of(keeper) as memory:
                if how.startswith("changed"):
                    memory[4100] ^= 1
                else:
                    fds = Path(f"/proc/{keeper}/fd").iterdir()
                    path = next(fd for fd in fds if "vram-journal" in os.readlink(fd))
                    os.truncate(path, 4096 if how == "cut" else 0)
            with pytest.raises(PeerGoneError, match="published again"):
                _ask_for_long(maker)
            assert survivor.process.process.wait(SOON) == 1
            (line,) = survivor.process.said().splitlines()
            assert "what was kept is lost" in line
            survivor.process.stop()
        assert KeeperProcess(survivor.path).stop() == 0  # nothing is in the way of one that is started


@contextlib.contextmanager
def orphaned(survivor: Survivor) -> Iterator[None]:
    """End what goes on without the process that was started, which is killed in a block."""
    yield
    with KeeperClient.connect(survivor.path) as anybody:
        os.kill(anybody.statistics().pid, signal.SIGTERM)
    until(lambda: not Path(survivor.path).exists(), what="the end of a keeper")
    survivor.process.kill()
    survivor.process = KeeperProcess(f"{survivor.place}/other")  # what the fixture stops


def kill_once_held(connection: KeeperClient, replaced: bool) -> None:
    """Kill the keeper, once another guardian is there if the first was killed: it knows everything."""
    keeper = connection.statistics().pid
    if replaced:
        _guardians_of(keeper)
        connection.statistics()  # it was told everything before this was answered
    os.kill(keeper, signal.SIGKILL)


@pytest.mark.parametrize("what", ["publish", "publish in parts", "attach", "release", "remove", "connect"])
def test_its_guardian_is_killed_before_each_step_and_nothing_is_lost(survivor: Survivor, what: str) -> None:
    with orphaned(survivor), KeeperClient.connect(survivor.path) as maker:
        publish(maker, "other", b"other")
        publish(maker, "gone", b"x")
        for number, step in enumerate(nths(), 1):
            if what == "release":
                found = maker.attach("other")
                close_fds(found.fds)
            survivor.kill_at(-step)
            if what == "publish":
                assert publish(maker, "w", b"%d" % step) == number
            elif what == "publish in parts":
                assert publish(maker, "w", b"%d" % step, 300) == number
            elif what == "attach":
                found = maker.attach("other")
                assert content(found) == b"other"
                close_fds(found.fds)
            elif what == "release":
                maker.release([found.lease_id])
            elif what == "remove":
                maker.remove("gone")
            else:
                with KeeperClient.connect(survivor.path) as another:
                    assert read(another, "other") == b"other"
            before = books(maker)
            killed = survivor.was_killed
            kill_once_held(maker, killed)
            if what != "connect":  # of which the end may not have been seen
                assert books(maker) == before
            assert read(maker, "other") == b"other"
            if what.startswith("publish"):
                assert read(maker, "w") == b"%d" % step
            if what == "remove":
                publish(maker, "gone", b"x")
            if not killed:
                break
        assert step > 1
        assert not killed, "it never came to the end"


def steps_of_a_restart() -> Iterator[int]:
    """Count as :func:`nths` does, with gaps from 40 on: each restart adds rows, which are steps of the next."""
    return (nth for nth in nths() if nth <= 40 or nth % 25 == 0 or not is_whole())


@in_turns(2)
@pytest.mark.parametrize("whose", ["old", "new", "both of the new"])
def test_killed_before_each_step_of_a_restart_one_keeper_serves_with_everything(survivor: Survivor, whose: str) -> None:
    with KeeperClient.connect(survivor.path) as maker:
        publish(maker, "w", b"1")
        before = books(maker)
        for step in steps_of_a_restart():
            other = "kill-2" if survivor.file == "kill" else "kill"
            survivor.kill_at(f"both {step}" if "both" in whose else step, "" if whose == "old" else other)
            taken = survivor.succeed()
            killed = survivor.was_killed
            assert read(maker, "w") == b"1"
            until(lambda: books(maker) == before, what="the end of the connection that asked for it")
            assert survivor.pid == maker.statistics().pid  # the process that is left
            if not killed:
                break
        assert step > 2
        assert taken
        assert not killed, "it never came to the end"


@pytest.mark.parametrize("where", ["everything", "adopt"])
def test_told_to_end_before_it_serves_the_next_keeper_leaves_everything_to_one_as_before(
    survivor: Survivor, where: str
) -> None:
    with KeeperClient.connect(survivor.path) as maker:
        publish(maker, "w", b"1")
        survivor.kill_at(f"stop {where}", "kill-2")
        command = [sys.executable, KILLED, "kill-2", "-m", "vram.keeper", "--socket", survivor.path, "--takeover"]
        successor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        until(lambda: not (survivor.place / "kill-2").exists(), what="a keeper that stands still")
        assert survivor.was_killed
        successor.send_signal(signal.SIGINT)
        said, _ = successor.communicate(timeout=SOON)
        assert "told to end before it served: the keeper before goes on" in said
        assert read(maker, "w") == b"1"
        assert survivor.pid == maker.statistics().pid


def test_stopping_ends_both(survivor: Survivor) -> None:
    keeper = survivor.pid
    with KeeperClient.connect(survivor.path) as maker:
        publish(maker, "w", b"1")
        assert survivor.process.stop() == 0
        assert not Path(f"/proc/{keeper}").exists()
        assert not Path(survivor.path).exists()
        with pytest.raises(VramError):
            maker.statistics()
    survivor.process = KeeperProcess(survivor.path)


@pytest.mark.parametrize("log", some([(), ("--log", "text")], 1))
def test_told_to_end_more_than_once_it_ends_once(log: tuple[str, ...]) -> None:
    """As systemd does, which tells each process of a service, while the guardian passes on what it is told."""
    for _ in range(3):
        with short_directory() as place:
            survivor = Survivor(place, *log)  # a log is another thread, to which a signal may come as well
            keeper = survivor.pid
            with KeeperClient.connect(survivor.path) as maker:
                publish(maker, "w", b"1", 200)
            while survivor.process.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(keeper, signal.SIGTERM)
                    os.kill(survivor.process.pid, signal.SIGTERM)
            status = survivor.process.stop()
            assert status == 0, survivor.process.said()
            assert not Path(survivor.path).exists()
            assert "race" not in survivor.process.said()


def test_a_keeper_that_cannot_start_says_so_once() -> None:
    with short_directory() as place:
        command = [
            sys.executable,
            "-P",
            "-m",
            "vram.keeper",
            "--survive",
            "--socket",
            f"{place}/k",
            "--group",
            "no such",
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SOON)
        assert done.returncode == 1
        assert done.stderr.count("vram keep:") == 1
