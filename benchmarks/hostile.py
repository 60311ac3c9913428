"""Attaches of an ordinary user, alone and beside another user who asks and holds as much as it can."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

import vram
from vram import driver as drivers
from vram.bench.children import DEADLINE, Child, child, own_keeper
from vram.bench.measure import Figure, Result, Row, in_turns
from vram.errors import QuotaError
from vram.keeper import messages as m
from vram.keeper.client import KeeperClient, Segment, close_client
from vram.memory import PhysicalAllocation
from vram.sharing.channel import Channel, close_fds
from vram.spec import HOST, HandleKind

from .entries import fill

_ORDINARY, _HOSTILE = 61_001, 61_002  # any two users that are neither root nor each other
_NAME = "model"
_TITLE = "Attach beside a hostile user"
_REACHED = 0.8
_PUBLICATIONS = 16  # of one connection
_WAITING = 1_000  # attaches of one connection that wait
_LITTLE = 2 << 20  # bytes


def on_host(quick: bool) -> Result:
    """Measure attaches per second at a keeper that nobody else uses and at one under attack, in turns."""
    if os.geteuid() != 0:
        return Result("hostile", _TITLE, [], ["did not run: it needs root, to be two other users"])
    place = Path(tempfile.gettempdir()).resolve()
    if closed := [str(one) for one in (place, *place.parents) if not one.stat().st_mode & 0o001]:
        why = f"did not run: other users may not enter {closed[0]}; set TMPDIR to a directory like /tmp"
        return Result("hostile", _TITLE, [], [why])
    few: list[str] = []
    rounds, seconds = (2, 0.02) if quick else (15, 0.2)
    leases, connections, entries, halves, nbytes, waiting = (
        (300, 10, 50, 2 * _PUBLICATIONS, 4 << 20, 50) if quick else (65_000, 1_000, 6_000, 1_000, 512 << 20, 4_000)
    )
    with _open_keeper() as path:  # a user may have half of the descriptors
        room = (vram.statistics(keeper=path).max_descriptors or 2 * entries + 2) // 2 - 1
    if room < entries:
        few.append(f"{entries} entries were wanted; the limit of open descriptors here allows one user {room}")
        entries = room
    attacks: dict[str, list[tuple[Callable[..., None], tuple[int, ...]]]] = {
        f"{leases} leases, {connections} connections that ask for them": [
            (_ask, (leases if number == 0 else 0, connections // 2)) for number in range(2)
        ],
        f"{entries} entries, listed all the time": [(_list, (entries,))],
        f"{halves} publications half sent, again and again": [(_send_halves, (halves,))],
        f"entries of {nbytes >> 20} MiB, removed at once": [(_publish_and_remove, (nbytes,))],
        "connections that are made and closed all the time": [(_come_and_go, ())],
        f"{waiting} who wait for a name, published all the time": [(_publish_to_many, (waiting,))],
    }
    rows = _beside("a process that only computes", [(_compute, ())], rounds, seconds, at_least=None)
    for what, children in attacks.items():
        rows += _beside(what, children, rounds, seconds, at_least=_REACHED)
    notes = [
        "attach, touch, release acknowledged, one after the other, by one process of one user; the attack is by "
        "another user, in one or two processes, which have these cores to share with it and with the keeper. Alone: "
        "at a keeper of its own, while the attack pauses. Beside a process that only computes: what the lack of cores "
        "costs here, whatever the keeper does"
    ]
    return Result("hostile", _TITLE, rows, few + notes)


def _beside(
    what: str,
    children: list[tuple[Callable[..., None], tuple[int, ...]]],
    rounds: int,
    seconds: float,
    *,
    at_least: float | None,
) -> list[Row]:
    with contextlib.ExitStack() as stage:
        quiet, attacked = stage.enter_context(_open_keeper()), stage.enter_context(_open_keeper())
        ordinary = stage.enter_context(child(_attach_on_demand))
        for keeper in (quiet, attacked):
            ordinary.ask(keeper)
        ordinary.ask()
        attackers = [stage.enter_context(child(work, attacked, *amounts)) for work, amounts in children]
        for attacker in attackers:
            attacker.hear()

        def alone() -> float:
            rate: float = ordinary.ask(quiet, seconds)
            return rate

        def beside() -> float:
            with _attacking(attackers):
                rate: float = ordinary.ask(attacked, seconds)
            return rate

        values = in_turns({"alone": alone, "beside": beside}, rounds, warm=1)
    rival = Row(f"alone, in turns with: {what}", Figure.of(values["alone"], "attaches/s"))
    return [rival, Row.held(f"beside {what}", Figure.of(values["beside"], "attaches/s"), rival, at_least=at_least)]


@contextlib.contextmanager
def _open_keeper() -> Iterator[str]:
    """A keeper that everybody may talk to, with the entry to attach."""
    with own_keeper("--mode", "0666") as path, vram.zeros(2 << 20, "uint8", device="host") as array:
        Path(path).parent.chmod(0o711)
        vram.publish(_NAME, {"w": array}, keeper=path)
        yield path


@contextlib.contextmanager
def _attacking(attackers: list[Child]) -> Iterator[None]:
    for attacker in attackers:
        attacker.ask("go")
    try:
        yield
    finally:
        for attacker in attackers:
            attacker.ask("pause")


# -- the ordinary user ------------------------------------------------------------------------------------------------
def _attach_on_demand(pipe: Connection) -> None:
    """Load all that is needed from each keeper that is named; then become somebody else, and attach as told."""
    while said := pipe.recv():
        _attach(*said)
        close_client(*said)
        pipe.send("loaded")
    _become(_ORDINARY)
    pipe.send("ready")
    while True:
        path, seconds = pipe.recv()
        _attach(path)
        begin, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - begin) < seconds:
            _attach(path)
            count += 1
        pipe.send(count / passed)


def _attach(path: str) -> None:
    with vram.attach(_NAME, keeper=path) as lease:
        _ = lease["w"].numpy()[0]


# -- the hostile one --------------------------------------------------------------------------------------------------
def _become(uid: int) -> None:
    """Be another user from here on, who may not be able to read the files of this library."""
    import_module("vram.keeper.reports")
    with _memory(_LITTLE):
        pass
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def _turns(pipe: Connection, attack: Callable[[], None], rest: Callable[[], None] = lambda: None) -> None:
    """Attack from "go" to "pause", a piece at a time, until the parent hangs up; `rest` ends what is under way."""
    pipe.send("ready")
    while True:
        pipe.recv()
        attack()
        pipe.send("going")
        while not pipe.poll():
            attack()
        pipe.recv()
        rest()
        pipe.send("paused")


def _compute(pipe: Connection, path: str) -> None:
    """Ask the keeper nothing."""
    _become(_HOSTILE)

    def attack() -> None:
        sum(range(10_000))

    _turns(pipe, attack)


def _connect(path: str) -> Channel:
    channel = Channel.connect(path, DEADLINE)
    channel.send(m.encode(m.Hello(m.OLDEST, m.PROTOCOL, "hostile")), timeout=DEADLINE)
    _hear(channel)
    return channel


def _hear(channel: Channel) -> m.Reply:
    payload, fds = channel.recv(timeout=DEADLINE)
    close_fds(fds)
    return m.decode_reply(payload)


def _ask(pipe: Connection, path: str, leases: int, connections: int) -> None:
    """Hold leases, and ask over each connection for a page of them, anew as soon as it has come."""
    _become(_HOSTILE)
    with contextlib.ExitStack() as stage:
        holder = stage.enter_context(contextlib.closing(_connect(path)))
        for call in range(leases):
            holder.send(m.encode(m.Attach(call + 1, _NAME)), timeout=DEADLINE)
            _hear(holder)
        asking = [stage.enter_context(contextlib.closing(_connect(path))) for _ in range(connections)]
        by_fd = {channel.fileno(): channel for channel in asking}
        poll = stage.enter_context(contextlib.closing(select.epoll()))
        for fd in by_fd:
            poll.register(fd, select.EPOLLIN)
        question = m.encode(m.Leases(1))
        waiting: set[int] = set()

        def answered(seconds: float) -> None:
            for fd, _ in poll.poll(seconds):
                _, fds = by_fd[fd].recv(timeout=DEADLINE)
                close_fds(fds)
                waiting.discard(fd)

        def attack() -> None:
            for fd in by_fd.keys() - waiting:
                by_fd[fd].send(question, timeout=DEADLINE)
                waiting.add(fd)
            answered(0.01)

        def rest() -> None:
            end = time.monotonic() + DEADLINE
            while waiting and time.monotonic() < end:
                answered(1.0)

        _turns(pipe, attack, rest)


def _list(pipe: Connection, path: str, entries: int) -> None:
    """Have many entries, and list them."""
    _become(_HOSTILE)
    fill(path, entries)
    with KeeperClient.connect(path, label="hostile") as client:

        def attack() -> None:
            client.list("filler/")

        _turns(pipe, attack)


def _send_halves(pipe: Connection, path: str, count: int) -> None:
    """Begin publications and never end them: as many as there may be, then again from the first connection on."""
    _become(_HOSTILE)
    with contextlib.ExitStack() as stage:
        memory = stage.enter_context(_memory(_LITTLE))
        ends: deque[Callable[[], None]] = deque()
        begun = iter(range(1 << 62))

        def attack() -> None:
            if len(ends) * _PUBLICATIONS >= count:
                ends.popleft()()
            channel = _connect(path)
            ends.append(channel.close)
            for call in range(1, _PUBLICATIONS + 1):
                whole = m.Publish(call, f"half/{next(begun)}", [m.SegmentRow(_LITTLE, 1, 0)] * 2, ["host"])
                channel.send(m.encode(whole), [memory], timeout=DEADLINE)
                _hear(channel)

        while (len(ends) + 1) * _PUBLICATIONS < count:
            attack()
        _turns(pipe, attack)  # what is open ends with this process


def _publish_and_remove(pipe: Connection, path: str, nbytes: int) -> None:
    """Publish memory that takes long to free, and remove it."""
    _become(_HOSTILE)
    with KeeperClient.connect(path, label="hostile") as client:

        def attack() -> None:
            with _memory(nbytes) as memory, contextlib.suppress(QuotaError):  # what it removed is not freed yet
                client.publish("big", [Segment(nbytes, HandleKind.POSIX_FD, "host")], [memory])
                client.remove("big")

        _turns(pipe, attack)


def _come_and_go(pipe: Connection, path: str) -> None:
    """Connect, say nothing, and hang up."""
    _become(_HOSTILE)

    def attack() -> None:
        Channel.connect(path, DEADLINE).close()

    _turns(pipe, attack)


def _publish_to_many(pipe: Connection, path: str, waiting: int) -> None:
    """Publish what is not what many are waiting for, so that they go on waiting."""
    _become(_HOSTILE)
    with contextlib.ExitStack() as stage:
        memory = stage.enter_context(_memory(_LITTLE))
        client = stage.enter_context(KeeperClient.connect(path, label="hostile"))
        for first in range(0, waiting, _WAITING):
            channel = stage.enter_context(contextlib.closing(_connect(path)))
            for call in range(1, min(_WAITING, waiting - first) + 1):
                wanted = m.Attach(call, "waited-for", expect={"is": f"not {first + call}"}, wait=None, claim=True)
                channel.send(m.encode(wanted), timeout=DEADLINE)

        def attack() -> None:
            client.publish("waited-for", [Segment(_LITTLE, HandleKind.POSIX_FD, "host")], [memory], meta={"is": "this"})

        _turns(pipe, attack)


@contextlib.contextmanager
def _memory(nbytes: int) -> Iterator[int]:
    """Memory that is really there, sealed; yields its descriptor."""
    with PhysicalAllocation.create(drivers.get(HOST), nbytes, HOST) as memory:
        memory.seal()
        fd = memory.export()
        os.posix_fallocate(fd, 0, memory.nbytes)
        yield fd
