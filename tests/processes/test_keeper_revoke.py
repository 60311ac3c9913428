"""An owner asks for memory back: who reads it is told, nothing is taken from them, and who keeps it is named (S5)."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import select
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.forked import end_of, forked, refused
from tests.support.keeper_here import is_open, later
from tests.support.other_users import OTHER, as_user
from tests.support.own_keeper import own_keeper
from tests.support.samples import in_turns
from tests.support.threads import race

import vram
from vram.errors import (
    AccessDeniedError,
    ClosedError,
    LeakWarning,
    NotFoundError,
    PeerGoneError,
    UsageError,
)
from vram.keeper import background, catalogue
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.private import KeeperProcess
from vram.open_files import close_fds

MIB = 1 << 20
THREAD = "vram: revoked leases"

# Attaches what it is told to, says what happens to it, and does what its mode is. Ends with its standard input.
READER = """
import sys
import vram
mode, name = sys.argv[1:3]
sys.argv[0] = f"reader-{mode}"
lease = vram.attach(name)
view = lease["x"].numpy()
def told(which):
    print("told", which is lease, which.is_revoked(), flush=True)
    if mode == "polite":
        global view
        del view
        lease.close()
        print("closed", flush=True)
if mode != "deaf":
    lease.on_revoke(told)
print("holds", flush=True)
for line in sys.stdin:
    print(int(view.sum()), lease.is_revoked(), flush=True)
"""


class Reader:
    """A process that holds a lease."""

    def __init__(self, mode: str, name: str = "n") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER, mode, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.buffer = b""
        try:
            assert self.line() == "holds"
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """Return what it says next."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + SOON
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the reader said nothing"
            more = os.read(self.process.stdout.fileno(), 4096)
            assert more, "the reader ended"
            self.buffer += more
        said, _, self.buffer = self.buffer.partition(b"\n")
        return said.decode()

    def ask(self) -> str:
        """Have it read its memory, and say whether it knows that this was revoked."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"?\n")
        self.process.stdin.flush()
        return self.line()

    def kill(self) -> None:
        self.process.kill()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=SOON)


@contextlib.contextmanager
def readers(*modes: str) -> Iterator[list[Reader]]:
    """Run some readers for the length of a ``with`` block."""
    made: list[Reader] = []
    try:
        for mode in modes:
            made.append(Reader(mode))
        yield made
    finally:
        for reader in made:
            reader.end()


def publish(name: str = "n") -> int:
    return vram.publish(name, {"x": np.arange(4)}).version


def alone() -> int:
    """Return how many connections there are, once those of the test before have ended."""
    until(lambda: vram.statistics().connections == 1, what="the end of all connections but this one")
    return 1


def listens() -> bool:
    return any(thread.name == THREAD for thread in threading.enumerate())


# -- asking ---------------------------------------------------------------------------------------------------------


def test_readers_that_let_go_are_waited_for(kept: vram.Keeper) -> None:
    publish()
    with readers("polite", "polite", "polite") as three:
        started = time.monotonic()
        left = vram.revoke("n", timeout=SOON)
        assert time.monotonic() - started < SOON / 2
        assert left == vram.info.RevokeInfo("n", (), 0)
        for reader in three:
            assert (reader.line(), reader.line()) == ("told True True", "closed")
    assert vram.statistics().nbytes == 0
    with pytest.raises(NotFoundError):
        vram.revoke("n")


def test_s5_a_reader_that_keeps_it_is_named_and_keeps_it(kept: vram.Keeper) -> None:
    """Whether it hears and does nothing, or does not listen at all."""
    version = publish()
    with readers("stubborn", "deaf", "polite") as (stubborn, deaf, polite):
        started = time.monotonic()
        left = vram.revoke("n", timeout=0.3)
        assert 0.3 <= time.monotonic() - started < SOON
        assert {holder.pid for holder in left.holders} >= {stubborn.pid, deaf.pid}
        assert polite.line() == "told True True"
        until(lambda: len(vram.holders()) < 3, what="the end of the lease of who lets go, in that time or later")
        left = vram.revoke("n", timeout=0)
        assert {holder.pid for holder in left.holders} == {stubborn.pid, deaf.pid}
        assert left.nbytes == 2 * MIB  # which they share
        for holder in left.holders:
            assert (holder.name, holder.version, holder.nbytes) == ("n", version, 2 * MIB)
            assert (holder.uid, holder.access) == (os.geteuid(), "r")
            assert 0 < holder.age < 10 * SOON
        assert {holder.label for holder in left.holders} == {"reader-stubborn", "reader-deaf"}
        assert stubborn.line() == "told True True"
        assert (stubborn.ask(), deaf.ask()) == ("6 True", "6 True")
        assert vram.list_entries() == []
        assert [one.lease_id for one in vram.holders()] == [one.lease_id for one in left.holders]
        with pytest.raises(NotFoundError):
            vram.attach("n")
        assert len(vram.revoke("n", timeout=0).holders) == 2  # may be asked again; nobody is told twice
        assert stubborn.ask() == "6 True"


def test_sigkill_of_a_reader_in_the_middle_of_a_revoke_ends_its_holding(kept: vram.Keeper) -> None:
    publish()
    with readers("stubborn") as (reader,):
        thread, came = later(lambda: vram.revoke("n", timeout=None))
        assert reader.line() == "told True True"
        assert not came
        reader.kill()
        thread.join(SOON)
        assert came == [vram.info.RevokeInfo("n", (), 0)]


def test_sigkill_of_the_keeper_in_the_middle_of_a_revoke_is_told_at_once() -> None:
    with own_keeper() as keeper:
        publish()
        with readers("stubborn") as (reader,):
            thread, came = later(lambda: vram.revoke("n", timeout=None))
            assert reader.line() == "told True True"
            keeper.kill()
            started = time.monotonic()
            thread.join(SOON)
            assert time.monotonic() - started < AT_ONCE
            (error,) = came
            assert isinstance(error, PeerGoneError)
            assert reader.ask() == "6 True"


def test_one_version_is_revoked_and_the_others_stay(kept: vram.Keeper) -> None:
    publish("one")
    with vram.attach("one") as first:
        publish("one")
        with vram.attach("one") as second:
            heard: list[int] = []
            for lease in (first, second):
                lease.on_revoke(lambda one: heard.append(one.version))
            (holder,) = vram.revoke("one", version=1, timeout=0).holders
            assert (holder.version, holder.pid) == (1, os.getpid())
            until(lambda: heard == [1])
            assert (first.is_revoked(), second.is_revoked(), second.is_stale()) == (True, False, False)
            left = vram.revoke("one", timeout=0)
            assert [one.version for one in left.holders] == [1, 2]
            assert left.nbytes == 4 * MIB
            until(lambda: heard == [1, 2])
            publish("one")  # a new one is none of those that were asked for
            assert len(vram.revoke("one", version=2, timeout=0).holders) == 1
            with pytest.raises(NotFoundError, match="version 7"):
                vram.revoke("one", version=7)
            with vram.attach("one") as third:
                assert not third.is_revoked()


def test_a_version_published_meanwhile_is_not_waited_for(kept: vram.Keeper) -> None:
    publish()
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(vram.attach("n"))
        thread, came = later(lambda: vram.revoke("n", timeout=None))
        until(lambda: old.is_revoked())
        publish()
        new = stack.enter_context(vram.attach("n"))
        old.close()
        thread.join(SOON)
        assert came == [vram.info.RevokeInfo("n", (), 0)]
        assert not new.is_stale()


def test_arguments_that_make_no_sense_are_refused(kept: vram.Keeper) -> None:
    publish()
    for options in ({"version": 0}, {"version": "1"}, {"timeout": -1}, {"timeout": "soon"}):
        with pytest.raises(UsageError):
            vram.revoke("n", **options)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError):
        vram.revoke("other")
    with pytest.raises(UsageError):
        vram.holders("a b")
    with vram.attach("n") as lease:
        with pytest.raises(UsageError, match="takes the lease"):
            lease.on_revoke("close")  # type: ignore[arg-type]
        assert not listens()


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_another_user_may_not_revoke() -> None:
    with own_keeper("--mode", "0666") as keeper:
        os.chmod(os.path.dirname(keeper.path), 0o755)
        publish()
        with vram.attach("n") as lease:
            denied = as_user(OTHER, lambda: vram.revoke("n", timeout=0))
            assert denied[0] is AccessDeniedError
            assert str(OTHER) in denied[1]
            assert (lease.is_revoked(), lease.is_stale()) == (False, False)
            # as others may see who holds what
            (holder,) = as_user(OTHER, vram.holders)
            assert (holder.pid, holder.uid) == (os.getpid(), 0)


# -- being told -----------------------------------------------------------------------------------------------------


def test_a_reader_is_told_once_in_a_thread_of_the_library(kept: vram.Keeper) -> None:
    publish()
    publish("other")
    with vram.attach("n") as lease, vram.attach("other") as other:
        heard: list[tuple[vram.Lease, str]] = []
        lease.on_revoke(lambda one: heard.append((one, threading.current_thread().name)))
        other.on_revoke(lambda one: heard.append((one, "")))
        assert sum(thread.name == THREAD for thread in threading.enumerate()) == 1
        assert all(thread.daemon for thread in threading.enumerate() if thread.name == THREAD)
        publish()  # newer, which is no reason to let go
        vram.revoke("n", timeout=0)
        until(lambda: heard)
        vram.revoke("n", timeout=0)
        vram.revoke("other", timeout=0)
        until(lambda: len(heard) == 2)
        assert heard == [(lease, THREAD), (other, "")]
        until(lambda: not listens(), what="the end of the thread")


def test_a_newer_version_and_a_removal_are_no_revoke(kept: vram.Keeper) -> None:
    publish()
    with vram.attach("n") as lease:
        asked = threading.Event()
        heard: list[bool] = []
        lease.on_revoke(lambda _: heard.append(asked.is_set()))
        publish()
        vram.remove("n")
        # The reply to this comes behind the news of both, on the same connection.
        lease.on_revoke(lambda _: heard.append(asked.is_set()))
        assert (lease.is_stale(), lease.is_revoked(), heard) == (True, False, [])
        asked.set()
        vram.revoke("n", timeout=0)
        until(lambda: len(heard) == 2)
        assert heard == [True, True]


def test_who_stopped_listening_is_not_called(kept: vram.Keeper) -> None:
    """Also between the news and its turn, and whatever the owner is."""
    publish()
    with KeeperClient.connect(kept.path) as reader:
        lease = reader.attach("n")
        for fd in lease.fds:
            os.close(fd)
        heard: list[str] = []
        owner = threading.Event()  # anything that lives
        listenings: list[background.Subscription] = []

        def tell(_: threading.Event) -> None:
            heard.append("told")
            for one in listenings:
                one.stop()

        for _ in range(2):
            listenings.append(reader.watch((lease.name, lease.version), owner, tell))
        vram.revoke("n", timeout=0)
        until(lambda: not listens(), what="the end of the thread")
        assert heard == ["told"]


def test_descriptors_of_leases_cost_no_connection_and_no_thread_once_they_are_closed(kept: vram.Keeper) -> None:
    publish()
    before = alone()
    with contextlib.ExitStack() as stack:
        leases = [stack.enter_context(vram.attach("n")) for _ in range(20)]
        heard: list[vram.Lease] = []
        leases[0].on_revoke(heard.append)
        assert len({lease.fileno() for lease in leases}) == 20
        assert vram.statistics().connections == before
        publish()  # no reason to call back, and for the descriptors news
        for lease in leases:
            assert select.select([lease], [], [], SOON)[0] == [lease]
        assert heard == []
    until(lambda: not listens(), what="the end of the thread")


def test_i7_the_descriptor_of_a_lease_is_its_process_s(kept: vram.Keeper) -> None:
    """A child that was forked in between neither has it nor keeps it from becoming readable."""
    publish()
    with vram.attach("n") as lease:
        fd = lease.fileno()
        with forked(lambda: refused(lease.fileno) + 2 * is_open(fd)) as child:
            vram.revoke("n", timeout=0)
            assert select.select([lease], [], [], SOON)[0] == [lease]
            assert child.end() == 1


def test_who_comes_late_is_told_at_once(kept: vram.Keeper) -> None:
    publish()
    with vram.attach("n") as lease:
        vram.revoke("n", timeout=0)
        heard: list[str] = []
        for _ in range(2):
            lease.on_revoke(lambda _: heard.append(threading.current_thread().name))
        until(lambda: heard == [THREAD] * 2)


def test_i3_a_callback_may_close_its_own_lease_and_the_next(kept: vram.Keeper) -> None:
    publish()
    with vram.attach("n") as one, vram.attach("n") as other:
        heard: list[vram.Lease] = []

        def close_all(lease: vram.Lease) -> None:
            heard.append(lease)
            one.close()
            other.close()

        one.on_revoke(close_all)
        other.on_revoke(close_all)
        assert vram.revoke("n", timeout=SOON).holders == ()
        assert heard == [one]  # the other was closed before its turn
        assert one.is_revoked()
        assert one.is_closed
        with pytest.raises(ClosedError):
            one.on_revoke(print)


def test_a_callback_may_listen_and_revoke(kept: vram.Keeper) -> None:
    publish()
    publish("other")
    with vram.attach("n") as lease, vram.attach("other") as other:
        heard: list[str] = []

        def on(_: vram.Lease) -> None:
            other.on_revoke(lambda _: heard.append("other"))
            vram.revoke("other", timeout=0)

        lease.on_revoke(on)
        vram.revoke("n", timeout=0)
        until(lambda: heard == ["other"])


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3)])
def test_a_callback_that_raises_is_reported_and_harms_nobody(
    kept: vram.Keeper, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish()
    reported: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))
    with vram.attach("n") as lease, vram.attach("n") as other:
        heard: list[vram.Lease] = []

        def fail(_: vram.Lease) -> None:
            raise error

        lease.on_revoke(fail)
        lease.on_revoke(heard.append)
        other.on_revoke(heard.append)
        vram.revoke("n", timeout=0)
        until(lambda: len(heard) == 2)
        assert reported == [error]
    error.__traceback__ = None


def test_closing_ends_the_listening(kept: vram.Keeper) -> None:
    publish()
    fds = len(os.listdir("/proc/self/fd"))
    heard: list[vram.Lease] = []
    with vram.attach("n") as held:
        with vram.attach("n") as lease:
            lease.on_revoke(heard.append)
            held.on_revoke(heard.append)
        held.close()
        held.close()
        until(lambda: not listens(), what="the end of the thread")
    close_client(kept.path)
    assert len(os.listdir("/proc/self/fd")) <= fds
    with vram.attach("n") as again:
        again.on_revoke(heard.append)
        assert listens()
        array = again.keep_only("x")
        until(lambda: not listens(), what="the end of the thread")
        array.close()
    vram.revoke("n", timeout=SOON)
    assert heard == []


def test_a_lease_that_is_dropped_is_not_kept_by_its_callback(kept: vram.Keeper) -> None:
    publish()
    lease = vram.attach("n")
    lease.on_revoke(print)
    gone = weakref.ref(lease)
    dropped = [lease]
    del lease
    with pytest.warns(LeakWarning):
        dropped.clear()
    gc.collect()
    assert gone() is None
    until(lambda: not listens(), what="the end of the thread")
    assert vram.revoke("n", timeout=SOON).holders == ()


def test_s5_losing_the_keeper_is_no_revoke() -> None:
    heard: list[vram.Lease] = []
    with own_keeper() as keeper:
        publish()
        with vram.attach("n") as lease:
            lease.on_revoke(heard.append)
            keeper.kill()
            until(lambda: not listens(), what="the end of the thread")
            assert heard == []
            assert lease["x"].numpy().sum() == 6
            for ask in (lambda: lease.is_revoked(), lambda: lease.on_revoke(heard.append)):
                with pytest.raises(PeerGoneError):
                    ask()
            again = KeeperProcess(keeper.path)  # which knows nothing of that lease, and another `n`
            try:
                publish()
                with vram.attach("n") as other:
                    assert other.version == lease.version
                    with pytest.raises(PeerGoneError):
                        lease.on_revoke(heard.append)
                vram.revoke("n", timeout=0)
                assert heard == []
            finally:
                close_client(keeper.path)
                again.stop()


def test_i7_a_forked_child_does_not_listen_and_leaves_its_parent_listening(kept: vram.Keeper) -> None:
    publish()
    with vram.attach("n") as lease:
        heard: list[vram.Lease] = []
        lease.on_revoke(heard.append)

        def work() -> int:
            count = refused(lambda: lease.on_revoke(heard.append))
            lease.close()
            with vram.attach("n") as own:
                own.on_revoke(lambda one: one.close())
                left = vram.revoke("n", timeout=0.2)
                until(lambda: own.is_closed)
            return count * (len(left.holders) <= 2 and not heard)

        assert end_of(work) == 1
        until(lambda: heard == [lease])


def test_a_connection_watches_so_many_versions(kept: vram.Keeper) -> None:
    """The next one is refused, and the others are told."""
    version = publish()
    heard: list[str] = []
    with KeeperClient.connect(kept.path) as reader, vram.attach("n") as lease:
        first = reader.watch(("n", version), lease, lambda _: heard.append("n"))
        for number in range(catalogue.MAX_WATCHES - 1):
            name = f"m/{number}"
            reader.watch((name, publish(name)), lease, print)
        version = publish("more")
        with pytest.raises(vram.errors.QuotaError, match="1024"):
            reader.watch(("more", version), lease, print)
        vram.revoke("n", timeout=0)
        until(lambda: heard == ["n"])
        assert first.is_over


def test_leases_that_listen_share_the_connection_of_their_process(kept: vram.Keeper) -> None:
    publish()
    with contextlib.ExitStack() as stack:
        before = alone()
        heard: list[vram.Lease] = []
        for _ in range(50):
            stack.enter_context(vram.attach("n")).on_revoke(heard.append)
        assert vram.statistics().connections == before
        vram.revoke("n", timeout=0)
        until(lambda: len(heard) == 50)


def test_listening_and_closing_in_many_threads_leaves_nothing(kept: vram.Keeper) -> None:
    """The thread ends and begins again all the time; nobody waits for it."""
    publish()

    def some() -> None:
        for _ in range(40):
            with vram.attach("n") as lease:
                lease.on_revoke(print)

    race(*[some] * 4)
    until(lambda: not listens(), what="the end of the thread")


# -- who holds what -------------------------------------------------------------------------------------------------


def test_a_listing_counts_who_holds_and_what(kept: vram.Keeper) -> None:
    publish("held")
    publish("free")
    with vram.attach("held"):
        publish("held")
        with vram.attach("held"), vram.attach("held"):
            free, held = vram.list_entries()
            assert (free.leases, free.held_bytes) == (0, 0)
            assert (held.leases, held.held_bytes, held.readers, held.retired) == (3, 4 * MIB, 2, 1)
            shown = vram.entry("held")
            assert (shown.leases, shown.held_bytes) == (3, 4 * MIB)
            found = vram.holders("held")
            assert [(one.name, one.version) for one in found] == [("held", 1), ("held", 2), ("held", 2)]
            assert vram.holders("free") == []
            assert found == sorted(found, key=lambda one: one.lease_id)
    assert vram.holders() == [], "it asks over another connection, and what went over this one comes first"


def test_what_was_given_back_is_not_among_the_holders(kept: vram.Keeper) -> None:
    """It was while it waited to be sent over its connection: holders are asked for over another one."""
    publish()
    with KeeperClient.connect(kept.path) as one:
        given, left = (one.attach("n") for _ in range(2))
        for lease in (given, left):
            close_fds(lease.fds)
        with one._sending:  # as while another thread sends
            one.release_later(given.lease_id)
        assert [holder.lease_id for holder in one.holders()] == [left.lease_id]


def test_more_holders_than_one_message_takes(kept: vram.Keeper) -> None:
    publish()
    with KeeperClient.connect(kept.path, label="x" * 300) as greedy:
        held = [greedy.attach("n") for _ in range(700)]
        for one in held:
            for fd in one.fds:
                os.close(fd)
        assert [one.lease_id for one in vram.holders()] == [one.lease_id for one in held]
        assert len(vram.revoke("n", timeout=0).holders) == 700


def _namespaces() -> str:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return "making a PID namespace takes root and unshare"
    works = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, timeout=300, check=False)
    return "" if works.returncode == 0 else "this system makes no PID namespaces"


@in_turns(5)
def test_a_reader_that_the_keeper_cannot_see_shows_what_it_claims_to_be() -> None:
    """A keeper in a PID namespace of its own, as in a container: the pid of who is outside is not to be had."""
    why = _namespaces()
    if why:
        pytest.skip(why)
    with own_keeper(launcher=["unshare", "--pid", "--fork", "--kill-child"]):
        publish()
        with readers("deaf") as (reader,):
            left = vram.revoke("n", timeout=0)
            (holder,) = left.holders
            assert (holder.pid, holder.label, holder.uid) == (None, "reader-deaf", os.geteuid())
            host = os.uname().nodename  # in a container its own
            assert (holder.host, str(holder)) == (
                host, f"pid unknown, host {host}, uid {os.geteuid()}, label 'reader-deaf'"
            )  # fmt: skip
            code = "import sys; from vram.cli import main; sys.argv[0] = 'vram'; main()"
            program = [sys.executable, "-c", code]
            done = subprocess.run([*program, "ls", "-l"], capture_output=True, text=True, timeout=300, check=True)
            said = done.stdout
            assert re.search(rf" pid unknown, host {re.escape(os.uname().nodename)} +reader-deaf ", said)
            assert str(reader.pid) not in said
            done = subprocess.run([*program, "ls", "-l", "--json"], capture_output=True, timeout=300, check=True)
            (line,) = json.loads(done.stdout)
            assert (line["pid"], line["label"]) == (None, "reader-deaf")
