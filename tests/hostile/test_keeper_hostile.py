"""Whatever a peer sends, or does not send, or does not read: it costs the keeper that connection and nothing else (S7).

After each test the keeper's descriptors, entries, leases and memory are what they were, it has written nothing to its
standard error, and a well-behaved client never noticed.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator

import pytest
from tests.support.deadlines import until
from tests.support.memfds import FUTURE_WRITE, GROW, READ_ONLY, SHRINK, WRITABLE, WRITE, make_memfd, memfds
from tests.support.mutations import mutated
from tests.support.peers import SEGMENT, Peer, running
from tests.support.places import short_directory
from tests.support.samples import some

from vram.errors import CapacityError, ProtocolError, QuotaError, UsageError, VramError
from vram.keeper import messages as m
from vram.keeper.bind import Listener
from vram.keeper.client import KeeperClient, Segment
from vram.keeper.private import KeeperProcess
from vram.open_files import close_fds
from vram.sharing.channel import MAX_FDS, MAX_MESSAGE

KIB4 = Segment(4096)
PATIENCE = 3  # seconds that the keeper gives who does not read or does not say hello


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture
def keeper() -> Iterator[KeeperProcess]:
    with short_directory() as place, contextlib.ExitStack() as stack:
        process = stack.enter_context(running(f"{place}/k", "--patience", str(PATIENCE)))
        with KeeperClient.connect(process.path, label="good") as good:
            with memfds(1) as fds:
                good.publish("good", [KIB4], fds)
            held = good.attach("good")
            close_fds(held.fds)
            idle = descriptors(process.pid)
            yield process
            for entry in good.list():
                if entry.name != "good":  # mutations publish under names of their own
                    good.remove(entry.name)
            until(lambda: good.statistics().connections == 1, what="the end of the hostile connections")
            found = good.statistics()
            assert (found.entries, found.versions, found.leases, found.waiting) == (1, 1, 1, 0)
            assert (found.nbytes, found.descriptors) == (4096, 1)
            until(lambda: descriptors(process.pid) == idle, what="the end of the hostile descriptors")
            assert not good.is_stale(held)


@pytest.fixture
def peer(keeper: KeeperProcess) -> Iterator[Peer]:
    made = Peer(keeper.path)
    yield made
    made.close()


# -- what is said ---------------------------------------------------------------------------------------------------
NONSENSE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0",
    b"\xff" * 1_000,
    b"\x91" * 60_000,
    os.urandom(MAX_MESSAGE),
    m.encode(m.Attach(1, "good"))[:-2],
    m.encode(m.Hello(m.PROTOCOL)),
    m.encode(m.Done(1)),
    m.encode(["publish", 0, "hostile", [[4096, 1, 0]] * 1025, ["host"]]),
    m.encode(["publish", 1, "hostile", [[4096, 1, 0]] * 1025, ["host"]])[:-1],
]


@pytest.mark.parametrize("payload", some([*NONSENSE], 3), ids=len)
def test_nonsense_ends_the_connection(keeper: KeeperProcess, peer: Peer, payload: bytes) -> None:
    peer.send(payload)
    assert peer.is_cut_off()


@pytest.mark.parametrize("payload", [b"garbage", m.encode(m.Attach(1, "good")), bytes(70_000)], ids=range(3))
def test_nonsense_instead_of_a_greeting(keeper: KeeperProcess, payload: bytes) -> None:
    for fds in ([], [0], [0] * MAX_FDS):
        stranger = Peer(keeper.path, greet=False)
        stranger.send(payload, fds)
        assert stranger.is_cut_off()
        stranger.close()


def test_a_wrong_value_costs_its_call_and_not_the_connection(keeper: KeeperProcess, peer: Peer) -> None:
    attached = peer.ask(m.encode(m.Attach(1, "good")))
    assert isinstance(attached, m.Attached)
    for wrong in (
        ["publish", 7, "hostile", [[4096, 1, 0]] * 1025, ["host"]],
        ["publish", 7, "hostile", [[4096, 1, 0]], ["host"], b"", False, "yes"],
        ["attach", 7, "good", 2**60],
    ):
        with memfds(1) as fds:
            reply = peer.ask(m.encode(wrong), fds)
        assert isinstance(reply, m.Error)
        assert (reply.call, reply.kind) == (7, "UsageError")
    state = peer.ask(m.encode(m.State(8, attached.lease)))
    assert state == m.LeaseState(8, False, 1, False, 0, False, False, False)


# -- descriptors that do not close ----------------------------------------------------------------------------------


# The keeper may still be closing its copy: the end of `deaf` is the end of that.


def test_a_message_that_is_too_long(keeper: KeeperProcess, peer: Peer) -> None:
    with memfds(1) as fds:
        peer.send(m.encode(m.Publish(1, "hostile", [SEGMENT], ["host"])) + bytes(MAX_MESSAGE), fds)
    assert peer.is_cut_off()


def test_s9_a_client_of_another_protocol_is_told_what_to_restart(keeper: KeeperProcess) -> None:
    for protocol in (m.PROTOCOL + 1, 0):
        stranger = Peer(keeper.path, greet=False)
        reply = stranger.ask(m.encode(m.Hello(protocol)))
        assert isinstance(reply, m.Error)
        assert reply.kind == "UnsupportedError"
        assert f"protocol {m.PROTOCOL} (the keeper's); have {protocol} (the client's)" in reply.text
        assert "Restart the older one: the keeper with `vram keep --takeover --background`" in reply.text
        assert stranger.is_cut_off()
        stranger.close()


def test_descriptors_where_none_belong(keeper: KeeperProcess) -> None:
    for message in (m.Attach(1, "good"), m.Statistics(1), m.Release(1, [])):
        peer = Peer(keeper.path)
        with memfds(1) as fds:
            peer.send(m.encode(message), fds * MAX_FDS)
        assert peer.is_cut_off()
        peer.close()


# -- parts ----------------------------------------------------------------------------------------------------------
def test_wrong_parts(keeper: KeeperProcess) -> None:
    def begin(peer: Peer, fds: list[int]) -> None:
        reply = peer.ask(m.encode(m.Publish(1, "hostile", [SEGMENT] * 300, ["host"])), fds * 100)
        assert reply == m.NextPart(1, 100)

    with memfds(1) as fds:
        for wrong in (
            (m.Part(2, 1, 99), 10),  # behind
            (m.Part(2, 1, 101), 10),  # ahead
            (m.Part(2, 1, 100), 0),  # nothing
            (m.Part(2, 1, 100), 201),  # too much
            (m.Publish(1, "hostile", [SEGMENT], ["host"]), 1),  # again
        ):
            peer = Peer(keeper.path)
            begin(peer, fds)
            peer.send(m.encode(wrong[0]), fds * wrong[1])
            assert peer.is_cut_off()
            peer.close()
        for message, count in (
            (m.Publish(1, "hostile", [SEGMENT], ["host"]), 0),
            (m.Publish(1, "hostile", [SEGMENT], ["host"]), 2),
            (m.Publish(1, "hostile", [SEGMENT], ["host"], b"", True), 3),
            (m.Publish(0, "hostile", [SEGMENT], ["host"]), 1),
            (m.Publish(1, "hostile", [m.SegmentRow(4096, 1, 1)], ["host"]), 1),
        ):
            peer = Peer(keeper.path)
            peer.send(m.encode(message), fds * count)
            assert peer.is_cut_off()
            peer.close()
        peer = Peer(keeper.path)
        reply = peer.ask(m.encode(m.Part(2, 1, 0)), fds)
        assert isinstance(reply, m.Error)
        assert reply.kind == "NotFoundError"
        peer.close()


def test_publications_that_are_never_finished_are_bounded(keeper: KeeperProcess, peer: Peer) -> None:
    with memfds(1) as fds:
        replies = [
            peer.ask(m.encode(m.Publish(call, f"hostile/{call}", [SEGMENT] * 300, ["host"])), fds * MAX_FDS)
            for call in range(1, 30)
        ]
    begun = [reply for reply in replies if isinstance(reply, m.NextPart)]
    assert 0 < len(begun) < len(replies)
    peer.close()


# -- memory that is none --------------------------------------------------------------------------------------------
@contextlib.contextmanager
def unfit(kind: str) -> Iterator[int]:
    with contextlib.ExitStack() as stack, short_directory() as place:
        if kind == "pipe":
            fd, other = os.pipe()
            stack.callback(os.close, other)
        elif kind == "socket":
            fd = socket.socket(socket.AF_UNIX).detach()
        elif kind == "file":
            fd = os.open(f"{place}/f", os.O_RDWR | os.O_CREAT)
            os.ftruncate(fd, 1 << 20)
        elif kind == "directory":
            fd = os.open(place, os.O_RDONLY)
        elif kind == "device":
            fd = os.open("/dev/zero", os.O_RDWR)
        elif kind == "path only":
            fd = os.open("/dev/zero", os.O_PATH)
        elif kind == "eventfd":
            fd = os.eventfd(0)
        else:
            seals = {
                "unsealed": 0,
                "may shrink": GROW | WRITE,
                "may grow": SHRINK | WRITE,
                "may be written": WRITABLE,
                "may be written by who mapped it before": WRITABLE | FUTURE_WRITE,
                "small": READ_ONLY,
                "empty": READ_ONLY,
                "not open for writing": WRITABLE,
                "not open for reading": WRITABLE,
            }[kind]
            fd = make_memfd({"small": 4095, "empty": 0}.get(kind, 4096), seals=seals)
            if kind.startswith("not open"):
                reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY if "writing" in kind else os.O_WRONLY)
                os.close(fd)
                fd = reopened
                if "reading" in kind:
                    import fcntl

                    fcntl.fcntl(fd, 1033, WRITE)
        stack.callback(os.close, fd)
        yield fd


@pytest.mark.parametrize(
    "kind",
    [
        *(
            "pipe",
            "socket",
            "file",
            "directory",
            "device",
            "path only",
            "eventfd",
            "unsealed",
            "may shrink",
            "may grow",
        ),
        *("may be written", "may be written by who mapped it before"),
        *("small", "empty", "not open for writing", "not open for reading"),
    ],
)
def test_s8_memory_that_is_unfit_is_refused_and_costs_only_its_publication(keeper: KeeperProcess, kind: str) -> None:
    writable = kind == "not open for writing"
    with KeeperClient.connect(keeper.path) as client, unfit(kind) as fd:
        with memfds(1, seals=WRITABLE if writable else READ_ONLY) as fit:
            with pytest.raises(ProtocolError, match="segment 1"):
                client.publish("hostile", [KIB4] * 2, [*fit, fd], writable=writable)
            with pytest.raises(ProtocolError, match="segment 299"):  # in the second part
                client.publish("hostile", [KIB4] * 300, [*fit * 299, fd], writable=writable)
            if not writable:
                with pytest.raises(ProtocolError, match="manifest") if kind not in ("small",) else _fine():
                    client.publish("hostile", [KIB4], fit, manifest_fd=fd)
            assert client.list("hostile/") == []
            client.publish("hostile/fit", [KIB4], fit, writable=writable)


@contextlib.contextmanager
def _fine() -> Iterator[None]:
    yield


def test_what_is_stated_larger_than_it_is(keeper: KeeperProcess) -> None:
    with KeeperClient.connect(keeper.path) as client, memfds(1) as fds:
        with pytest.raises(ProtocolError, match="4096 bytes; 4097 were stated"):
            client.publish("hostile", [Segment(4097)], fds)
        with pytest.raises((ProtocolError, CapacityError)):
            client.publish("hostile", [Segment(2**62)], fds)


# -- those who do nothing -------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_who_does_not_say_hello_is_not_waited_for(keeper: KeeperProcess) -> None:
    silent = [Peer(keeper.path, greet=False) for _ in range(50)]
    for peer in silent:
        assert peer.is_cut_off()
        peer.close()


@pytest.mark.slow
def test_who_reads_nothing_is_cut_off_and_delays_nobody(keeper: KeeperProcess) -> None:
    with KeeperClient.connect(keeper.path) as good, memfds(MAX_FDS) as fds:
        good.publish("hostile/big", [KIB4] * MAX_FDS, fds, manifest=bytes(30_000))
        deaf = [Peer(keeper.path) for _ in range(10)]
        for peer in deaf:
            peer.sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                for call in range(1, 2_000):
                    peer.send(m.encode(m.Attach(call, "hostile/big")))
        worst = 0.0
        for _ in range(50):
            started = time.monotonic()
            got = good.attach("hostile/big")
            close_fds(got.fds)
            good.release([got.lease_id])
            worst = max(worst, time.monotonic() - started)
        until(lambda: good.statistics().connections == 2, what="the end of those who do not read")
        assert good.statistics().leases == 1
        for peer in deaf:
            peer.close()
        assert worst < 5 * PATIENCE, "it waited for those who do not read, one after the other"


def test_answers_that_wait_keep_their_memory_whatever_happens_to_its_lease(keeper: KeeperProcess) -> None:
    """Descriptors are numbers: one that was closed while its answer was queued would go out as another file."""

    def read_all(peer: Peer) -> list[type]:
        kinds = []
        for _ in range(6):
            payload, came, _, _ = socket.recv_fds(peer.sock, MAX_MESSAGE, MAX_FDS)
            kinds.append(type(m.decode_reply(payload)))
            try:
                if kinds[-1] is m.Attached:
                    found = [os.pread(fd, 6, 0).rstrip(b"\0") for fd in came]
                    assert found == [b"%d" % number for number in range(200)]
            finally:
                close_fds(came)
        return kinds

    with KeeperClient.connect(keeper.path) as good, contextlib.closing(Peer(keeper.path)) as slow:
        for turn in range(2):
            with memfds(200) as fds:
                good.publish("hostile/w", [KIB4] * 200, fds)
            for call in range(1, 6):
                slow.send(m.encode(m.Attach(call, "hostile/w")))
            # One answer is on its way, the second waits for it to be read, the rest has not been read by the keeper.
            until(lambda: good.show("hostile/w").readers == 2)
            first = good.show("hostile/w").versions[-1].holders[0].lease_id
            slow.send(m.encode(m.Release(9, list(range(first, first + 50)))))
            if turn:
                good.remove("hostile/w")
            with memfds(1) as (secret,):
                for number in range(5):
                    good.publish(f"hostile/secret{number}", [KIB4] * 200, [secret] * 200)
            assert read_all(slow) == [*[m.Attached] * 2, *[m.Error if turn else m.Attached] * 3, m.Done]
            if not turn:
                got = good.attach("hostile/w")
                assert [os.pread(fd, 6, 0).rstrip(b"\0") for fd in got.fds] == [b"%d" % n for n in range(200)]
                close_fds(got.fds)
                good.release([got.lease_id])


def test_more_connections_than_the_keeper_takes() -> None:
    launcher = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh"]
    with short_directory() as place, running(f"{place}/k", launcher=launcher) as keeper:
        with KeeperClient.connect(keeper.path) as good, memfds(1) as fds:
            refused = []
            with contextlib.ExitStack() as stack:
                for _ in range(150):
                    try:
                        stack.enter_context(KeeperClient.connect(keeper.path))
                    except VramError as error:
                        refused.append(error)
                assert refused
                assert {type(error) for error in refused} == {QuotaError}
                assert good.list() == []
            until(lambda: good.statistics().connections == 1)
            with pytest.raises(QuotaError, match="descriptors"):
                good.publish("w", [KIB4] * 200, fds * 200)
            good.publish("w", [KIB4] * 50, fds * 50)


def test_a_keeper_without_descriptors_does_not_start() -> None:
    launcher = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    with short_directory() as place, pytest.raises(VramError, match="needs 192 descriptors at least; have 64"):
        KeeperProcess(f"{place}/k", launcher=launcher).kill()


@pytest.mark.parametrize("group", ["²", "99999999999", "4294967295", "9" * 5000, "-1", "", "no such group", "a\0b"])
def test_groups_that_are_none(group: str) -> None:
    with short_directory() as place, pytest.raises(UsageError, match="group"):
        Listener(f"{place}/k", group=group)


# -- at random ------------------------------------------------------------------------------------------------------
PING = m.encode(m.Statistics(2**40))


def _assail(path: str, count: int, seed: int) -> None:
    """Have the keeper read so many mutated messages, on as many connections as it makes necessary.

    Each is followed by a right one: once that is answered, or the connection is cut, the one before was read.
    """
    chance = random.Random(seed)
    fds = [make_memfd(seals=seals) for seals in (READ_ONLY, READ_ONLY, READ_ONLY, WRITABLE, 0)]
    peer: Peer | None = None
    cut = 0
    try:
        for _ in range(count):
            if peer is None:
                peer = Peer(path, greet=chance.random() < 0.9)
            payload, rights = mutated(chance)
            try:
                peer.send(payload, [chance.choice(fds) for _ in range(rights)])
                peer.send(PING)
                while (reply := peer.hear()) is not None and not isinstance(reply, m.Rows):
                    pass
            except (BrokenPipeError, ConnectionResetError):
                reply = None
            if reply is None or chance.random() < 0.01:
                cut += 1
                peer.close()
                peer = None
    finally:
        if peer is not None:
            peer.close()
        close_fds(fds)
    assert count * 0.2 < cut < count * 0.95, "neither all wrong nor all right"


def test_s7_messages_that_are_almost_right(keeper: KeeperProcess) -> None:
    _assail(keeper.path, 3_000, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_s7_a_hundred_thousand_messages_that_are_almost_right(keeper: KeeperProcess, seed: int) -> None:
    _assail(keeper.path, 10_000, seed=seed)


def test_s7_the_parser_takes_nothing_else_for_a_message() -> None:
    chance = random.Random(0)
    understood = 0
    for _ in range(10_000):
        with contextlib.suppress(ProtocolError):
            m.decode_request(mutated(chance)[0])
            understood += 1
    assert 500 < understood < 9_500, "the mutations should be neither all right nor all wrong"
