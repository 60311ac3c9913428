"""A keeper in a process of its own, and everything a client can ask of it."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.connections import close_clients
from tests.support.deadlines import SOON, until
from tests.support.forked import end_of, refused
from tests.support.impostors import impostor
from tests.support.keeper_here import later
from tests.support.limits import limited
from tests.support.memfds import READ_ONLY, WRITABLE, memfds
from tests.support.other_users import OTHER, as_user
from tests.support.places import private_socket, short_directory
from tests.support.threads import race

from vram.errors import (
    AccessDeniedError,
    BusyError,
    ClosedError,
    DriverError,
    PeerGoneError,
    ProtocolError,
    UnsupportedError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from vram.keeper import client as module
from vram.keeper import messages as m
from vram.keeper.background import Signal
from vram.keeper.client import Attachment, KeeperClient, Segment, client, close_client
from vram.keeper.private import KeeperProcess
from vram.open_files import close_fds
from vram.sharing.channel import Channel

KIB4 = Segment(4096)


@pytest.fixture
def keeper() -> Iterator[str]:
    with private_socket() as path:
        yield path


@pytest.fixture
def one(keeper: str) -> Iterator[KeeperClient]:
    with KeeperClient.connect(keeper, label="one") as connection:
        yield connection


@pytest.fixture
def other(keeper: str) -> Iterator[KeeperClient]:
    with KeeperClient.connect(keeper, label="other") as connection:
        yield connection


def publish(connection: KeeperClient, name: str, **options: object) -> int:
    seals = WRITABLE if options.get("writable") else READ_ONLY
    with memfds(1, seals=seals) as fds:
        return connection.publish(name, [KIB4], fds, **options)  # type: ignore[arg-type]


def attach(connection: KeeperClient, name: str, **options: object) -> Attachment:
    """Attach, and close what came: most tests are about the books."""
    attachment = connection.attach(name, **options)  # type: ignore[arg-type]
    close_fds(list(attachment.fds))
    return attachment


# -- publish, attach, release ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 252, 253, 254, 506, 507, 1024])
def test_s4_many_segments_arrive_in_their_order(one: KeeperClient, other: KeeperClient, count: int) -> None:
    with memfds(count) as fds:
        one.publish("many", [KIB4] * count, fds)
        got = other.attach("many")
    try:
        assert [int(os.pread(fd, 8, 0).rstrip(b"\0")) for fd in got.fds] == list(range(count))
    finally:
        close_fds(got.fds)


def test_i3_finalizers_may_run_in_the_middle_of_any_call(one: KeeperClient) -> None:
    publish(one, "w")

    class Lease:
        """Part of a cycle: the collector decides when it goes."""

        def __init__(self) -> None:
            self.me = self
            self.id = attach(one, "w").lease_id

        def __del__(self) -> None:
            one.release_later(self.id)

    before = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        for _ in range(300):
            Lease()
    finally:
        gc.set_threshold(*before)
        gc.collect()
    assert one.statistics().leases == 0


# -- waiting --------------------------------------------------------------------------------------------------------


def test_an_interrupted_wait_is_forgotten_and_nothing_is_lost(keeper: str, one: KeeperClient) -> None:
    """A signal handler that raises, in the middle of a wait: the lease that may come all the same is given back.

    The wait has no end of its own, and the cancellation goes ahead of the next request: nothing else could end it.
    """

    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def once_it_waits() -> None:
        with KeeperClient.connect(keeper) as looker:
            until(lambda: looker.statistics().waiting == 1, what="the wait")
        signal.pthread_kill(main, signal.SIGALRM)

    main = threading.get_ident()
    before = signal.signal(signal.SIGALRM, interrupt)
    looking = threading.Thread(target=once_it_waits)
    try:
        looking.start()
        with pytest.raises(Interrupted):
            one.attach("late", timeout=None)
    finally:
        signal.signal(signal.SIGALRM, before)
        looking.join(SOON)
    assert one.statistics().waiting == 0, "the keeper was not told that nobody waits any more"
    publish(one, "late")
    assert one.statistics().leases == 0


def test_a_signal_handler_cannot_send_in_the_middle_of_sending_and_hears_so_at_once(
    one: KeeperClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    really = Channel.send

    def handler(*_: object) -> None:
        try:
            heard.append(one.list())
        except BusyError as error:
            heard.append("signal handler" in str(error))

    def send(*arguments: Any, **options: Any) -> None:
        if not heard:
            signal.raise_signal(signal.SIGALRM)
        really(*arguments, **options)

    before = signal.signal(signal.SIGALRM, handler)
    monkeypatch.setattr(Channel, "send", send)
    try:
        assert one.list() == []
    finally:
        signal.signal(signal.SIGALRM, before)
    assert heard == [True]
    assert one.list() == []


def test_a_signal_handler_may_make_a_call_while_its_thread_waits_for_another(one: KeeperClient) -> None:
    heard: list[object] = []
    before = signal.signal(signal.SIGALRM, lambda *_: heard.append(one.list()))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(WaitTimeoutError):
            one.attach("late", timeout=0.4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert heard
    assert all(found == [] for found in heard)


def test_a_signal_handler_cannot_connect_while_its_thread_connects(
    keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F7, for the lock around the process's connections."""
    heard: list[bool] = []
    really = KeeperClient.connect

    def connect(*arguments: Any, **options: Any) -> KeeperClient:
        with pytest.raises(BusyError, match="connecting"):
            client(keeper)
        heard.append(True)
        return really(*arguments, **options)

    monkeypatch.setattr(KeeperClient, "connect", connect)
    try:
        client(keeper)
    finally:
        close_clients()
    assert heard == [True]


@pytest.mark.parametrize("timeout", [2.2e6, 1e9, float("inf")])
def test_very_long_timeouts_wait(one: KeeperClient, other: KeeperClient, timeout: float) -> None:
    """F12: as the reader, and behind one."""
    threads = [threading.Thread(target=attach, args=(other, "late"), kwargs={"timeout": timeout}) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: one.statistics().waiting == 3)
    publish(one, "late")
    for thread in threads:
        thread.join(SOON)
    assert one.statistics().leases == 3


# -- descriptors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [8, 300])
def test_i4_an_attach_without_room_for_its_descriptors_fails_alone(one: KeeperClient, count: int) -> None:
    """F6: the connection, and with it all other leases, stays."""
    publish(one, "small")
    with memfds(count) as fds:
        one.publish("big", [KIB4] * count, fds)
    held = attach(one, "small")
    used = {int(fd) for fd in os.listdir("/proc/self/fd")}  # and one more, for the listing
    free = [fd for fd in range(2000) if fd not in used]
    for room in (0, 2, count - 40) if count > 253 else (0, 2):  # the last is room for the first part of two
        with limited(resource.RLIMIT_NOFILE, free[room]):
            with pytest.raises(DriverError, match="RLIMIT_NOFILE") as caught:
                one.attach("big")
        assert caught.value.name == "EMFILE"
        assert one.statistics().leases == 1
        assert not one.is_stale(held)
    assert len(attach(one, "big").fds) == count


# -- threads --------------------------------------------------------------------------------------------------------


def test_many_threads_share_one_connection(one: KeeperClient) -> None:
    for name in "abc":
        publish(one, name, meta={"name": name})

    def work(name: str) -> None:
        for _ in range(60):
            got = attach(one, name, expect={"name": name})
            assert got.name == one.show(name).name == name
            one.release([got.lease_id])

    waiter, _ = later(lambda: attach(one, "late", timeout=SOON))  # it reads for all, most of the time
    race(*(functools.partial(work, name) for name in "abc" * 2))
    publish(one, "late")
    waiter.join(SOON)
    assert one.statistics().leases == 1


# -- news -----------------------------------------------------------------------------------------------------------


def is_readable(one: Signal, seconds: float = 0) -> bool:
    poll = select.poll()
    poll.register(one, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def test_a_signal_becomes_readable_with_the_first_news_and_stays_so(one: KeeperClient, other: KeeperClient) -> None:
    publish(one, "w")
    held = attach(other, "w")
    told, before = other.signal((held.name, held.version)), one.statistics().connections
    with contextlib.closing(told), contextlib.closing(other.signal((held.name, held.version))) as also:
        assert not is_readable(told)
        publish(one, "w")
        assert is_readable(told, SOON)
        assert is_readable(also, SOON)
        with contextlib.closing(other.signal((held.name, held.version))) as late:
            assert is_readable(late, SOON)
        with socket.socket(fileno=os.dup(told.fileno())) as reader:
            assert reader.recv(1) == b"", "whoever reads changes nothing"
        assert is_readable(told)
        # Once all were told, the connection ends, and who comes late has a new one.
        until(lambda: one.statistics().connections <= before, what="one connection for all")
    with pytest.raises(ClosedError):
        told.fileno()
    with contextlib.closing(other.signal((held.name, 12345))) as never:  # no such version
        assert is_readable(never, SOON)


# -- looking --------------------------------------------------------------------------------------------------------


def test_listing_takes_as_many_messages_as_it_needs(one: KeeperClient) -> None:
    names = sorted(f"n/{number}" for number in range(300))
    for name in names:
        publish(one, name, meta={"long": "x" * 1_000})
    publish(one, "other")
    assert [entry.name for entry in one.list()] == [*names, "other"]
    assert [entry.name for entry in one.list("n/1")] == [name for name in names if name.startswith("n/1")]
    assert one.list("none") == []
    with pytest.raises(UsageError):
        one.list("a b")


def test_show_says_who_holds_what(one: KeeperClient, other: KeeperClient) -> None:
    with memfds(2) as fds:
        one.publish("w", [Segment(4000), Segment(4096)], fds, meta={"k": "v"})
    held = attach(other, "w", access="cow")
    publish(one, "w", ttl=1000)
    entry = one.show("w")
    assert (entry.name, entry.version, entry.owner, entry.retired) == ("w", 2, os.geteuid(), 1)
    assert entry.ttl_left is not None
    assert 900 < entry.ttl_left <= 1000
    old, new = entry.versions
    assert (old.version, old.is_current, old.sizes, old.meta) == (1, False, (4000, 4096), {"k": "v"})
    assert (old.nbytes, old.publisher_pid, old.publisher_label) == (8192, os.getpid(), "one")
    assert (new.is_current, new.readers, new.holders) == (True, 0, ())
    (holder,) = old.holders
    assert (holder.lease_id, holder.pid, holder.uid) == (held.lease_id, os.getpid(), os.geteuid())
    assert (holder.label, holder.access) == ("other", "cow")
    one.remove("w")
    assert one.show("w").version == 0


def test_more_holders_than_one_message_takes(one: KeeperClient) -> None:
    publish(one, "w")
    leases = [attach(one, "w").lease_id for _ in range(2_000)]
    entry = one.show("w")
    assert [holder.lease_id for holder in entry.versions[0].holders] == leases


# -- connections ----------------------------------------------------------------------------------------------------


def test_one_connection_per_process_and_path(keeper: str) -> None:
    try:
        assert client(keeper) is client(keeper)
        first = client(keeper)
        close_client(keeper)
        assert not first.is_usable
        assert client(keeper) is not first
        with pytest.raises(PeerGoneError, match="closed here"):
            first.list()
    finally:
        close_clients()
    assert module._clients == {}


def test_i7_a_forked_child_makes_its_own_connection_and_cannot_use_its_parents(keeper: str) -> None:
    try:
        mine = client(keeper)
        publish(mine, "forked")
        held = attach(mine, "forked")

        def work() -> int:
            count = refused(mine.list)
            mine.release_later(held.lease_id)  # a finalizer of the parent's object, run here
            mine.close()
            fresh = client(keeper)
            return count * (fresh is not mine and attach(fresh, "forked").version == 1)

        assert end_of(work) == 1
        until(lambda: mine.statistics().leases == 1, what="the end of the child's own lease")
        assert not mine.is_stale(held)
        mine.remove("forked")
    finally:
        close_clients()


def test_a_closed_connection_says_so_and_wakes_who_waits(keeper: str) -> None:
    connection = KeeperClient.connect(keeper)
    waiting = [later(lambda: connection.attach("never", timeout=None)) for _ in range(3)]
    with KeeperClient.connect(keeper) as watcher:
        until(lambda: watcher.statistics().waiting == 3)
        connection.close()
        connection.close()
        until(lambda: watcher.statistics().waiting == 0)
    for thread, ended in waiting:
        thread.join(SOON)
        assert isinstance(ended[0], PeerGoneError | ClosedError)


def test_the_default_path_is_this_users(monkeypatch: pytest.MonkeyPatch) -> None:
    with short_directory() as place:
        monkeypatch.delenv("VRAM_KEEPER", raising=False)
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        with pytest.raises(PeerGoneError, match="vram keep"):
            KeeperClient.connect()
        os.mkdir(f"{place}/vram", 0o700)
        keeper = KeeperProcess(f"{place}/vram/keeper.sock")
        try:
            with KeeperClient.connect() as connection:
                assert connection.path == f"{place}/vram/keeper.sock"
            os.chmod(f"{place}/vram", 0o755)
            with pytest.raises(AccessDeniedError, match="0700"):
                KeeperClient.connect()
        finally:
            keeper.stop()


# -- the keeper's process -------------------------------------------------------------------------------------------


def test_a_second_keeper_does_not_take_the_place_of_the_first(keeper: str) -> None:
    with pytest.raises(PeerGoneError, match=r"serves .* already.*--takeover"):
        KeeperProcess(keeper)
    with KeeperClient.connect(keeper) as connection:
        connection.list()


def test_of_many_keepers_that_start_at_once_over_a_stale_socket_one_serves() -> None:
    with short_directory() as place:
        path = f"{place}/k"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
            stale.bind(path)

        def start() -> KeeperProcess | VramError:
            try:
                return KeeperProcess(path)
            except VramError as error:
                return error

        found = race(*[start] * 5)
        started = [one for one in found if isinstance(one, KeeperProcess)]
        try:
            assert len(started) == 1
            with KeeperClient.connect(path) as connection:
                assert connection.server_pid == started[0].pid
        finally:
            for keeper in started:
                keeper.stop()


def test_a_keeper_leaves_alone_what_is_no_socket() -> None:
    with short_directory() as place:
        path = Path(place) / "file"
        path.write_text("precious")
        with pytest.raises(PeerGoneError, match="no socket"):
            KeeperProcess(str(path))
        assert path.read_text() == "precious"
        with pytest.raises(PeerGoneError, match="107"):
            KeeperProcess(str(path) + "x" * 100)
        with pytest.raises(PeerGoneError, match="no directory"):
            KeeperProcess(f"{place}/none/k")
        with pytest.raises(PeerGoneError, match="group"):
            KeeperProcess(f"{place}/k", ["--group", "no such group"])
        assert os.listdir(place) == ["file"]


@pytest.mark.usefixtures("executed_keepers")
def test_a_keeper_is_quick_to_start_and_small_with_a_thousand_entries() -> None:
    """Under 0.3 s and 40 MiB by the issue. Processor time, of which a busy machine takes little more."""
    with short_directory() as place:
        keeper = KeeperProcess(f"{place}/k")
        ticks = Path(f"/proc/{keeper.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        took = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        try:
            with KeeperClient.connect(keeper.path) as connection:
                with memfds(1) as fds:
                    for number in range(1_000):
                        connection.publish(f"n/{number}", [KIB4], fds, manifest=bytes(300), meta={"k": str(number)})
                status = Path(f"/proc/{keeper.pid}/status").read_text()
                rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
                modules = Path(f"/proc/{keeper.pid}/maps").read_text()
        finally:
            keeper.stop()
        assert took < 1.0
        assert rss < 40 * 1024
        assert "numpy" not in modules
        assert "_ctypes" not in modules


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_other_users_share_what_is_opened_to_them_and_own_what_is_theirs() -> None:
    def act(path: str) -> list[object]:
        results: list[object] = []
        with KeeperClient.connect(path, label="other") as connection, memfds(1) as fds:
            for call in (
                lambda: connection.publish("w", [KIB4], fds),
                lambda: connection.remove("w"),
                lambda: attach(connection, "w").version,
                lambda: connection.publish("mine", [KIB4], fds),
            ):
                try:
                    results.append(call())
                except VramError as error:
                    results.append(type(error))
        return results

    with short_directory() as place:
        os.chmod(place, 0o755)
        path = f"{place}/k"
        keeper = KeeperProcess(path)
        assert as_user(OTHER, lambda: act(path))[0] is AccessDeniedError
        keeper.stop()
        keeper = KeeperProcess(path, ["--mode", "0666"])
        try:
            with KeeperClient.connect(path) as connection:
                publish(connection, "w")
                assert as_user(OTHER, lambda: act(path)) == [AccessDeniedError, AccessDeniedError, 1, 1]
                assert connection.show("mine").owner == OTHER
                with pytest.raises(AccessDeniedError, match=str(OTHER)):
                    publish(connection, "mine")  # the keeper's own user replaces nothing of others either
                connection.remove("mine")  # but may take it out
                unmapped = as_user(65_534, lambda: act(path))
                assert unmapped == [AccessDeniedError, AccessDeniedError, 1, AccessDeniedError]
        finally:
            keeper.stop()


def test_a_device_that_the_keeper_does_not_keep(one: KeeperClient) -> None:
    with memfds(1) as fds:
        with pytest.raises(ProtocolError, match="tpu:0"):
            one.publish("gpu", [Segment(4096, 1, "tpu:0")], fds)
        with pytest.raises(UnsupportedError):
            one.publish("gpu", [Segment(4096, 8)], fds)
    with memfds(1, seals=0) as fds, pytest.raises(ProtocolError, match="segment 0 is not sealed"):
        one.publish("open", [KIB4], fds)
    assert one.list() == []


def test_memory_of_a_gpu_is_a_descriptor_of_its_driver(one: KeeperClient) -> None:
    """On a GPU one of NVIDIA's device files; what is none is refused. A memfd harms nobody, and is the stand-in's."""
    reader, writer = os.pipe()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd in (reader, null):
            with pytest.raises(ProtocolError, match="no memory of a GPU"):
                one.publish("gpu", [Segment(4096, 1, "GPU-1")], [fd])
    finally:
        for fd in (reader, writer, null):
            os.close(fd)
    with memfds(1, seals=0) as fds, pytest.raises(ProtocolError, match="not sealed"):
        one.publish("gpu", [Segment(4096, 1, "GPU-1")], fds)
    with memfds(1) as fds, pytest.raises(ProtocolError, match="bytes"):
        one.publish("gpu", [Segment(1 << 40, 1, "GPU-1")], fds)
    with memfds(1) as fds:
        one.publish("gpu", [Segment(4096, 1, "GPU-1")], fds)
    assert [entry.name for entry in one.list()] == ["gpu"]
    one.remove("gpu")


def test_a_client_that_has_no_room_to_send_reads_what_comes() -> None:
    """A keeper reads nothing from a client that does not read: neither may wait for the other."""
    begin = threading.Event()

    def answer(channel: Channel) -> None:
        channel.recv(timeout=SOON)
        channel.send(m.encode(m.Welcome(1)), timeout=SOON)
        begin.wait(SOON)
        for number in range(3000):
            channel.send(m.encode(m.Notice(0, "w" * 200, number, "replaced", 0)), timeout=SOON)
        while True:
            request = m.decode_request(channel.recv(timeout=SOON)[0])
            if request.call:
                channel.send(m.encode(m.Done(request.call)), timeout=SOON)
                return

    with impostor(answer) as path, KeeperClient.connect(path) as client:
        for number in range(20_000):
            client.release_later(number)  # more than there is room for
        send = client._send

        def send_now(*arguments: Any) -> None:
            begin.set()  # this thread has the turn to read
            send(*arguments)

        client._send = send_now  # type: ignore[method-assign]
        began = time.monotonic()
        client.release([1])
        assert time.monotonic() - began < SOON / 2
