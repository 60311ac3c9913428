"""Ctrl-C at points of all verbs, against a real keeper, lender or peer, and a real SIGINT each time (I12).

After each interrupt the keeper holds as many leases, claims and connections as before, this process as many threads,
descriptors, mappings and handles, and the next call on the very same object does its work within its timeout.
``make test`` draws the verbs and the points by the number of the commit, ``make test-all`` takes each different one.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.support.deadlines import SOON, until
from tests.support.interrupts import chosen, interrupt, points
from tests.support.places import private_socket, short_directory
from tests.support.samples import some

import standin
import vram
from vram import driver, lifetime
from vram.entries.by_name import attach_array
from vram.handover.pickling import Endpoint, endpoint, shut_down
from vram.handover.reducers import _reduce
from vram.keeper.client import KeeperClient, close_client
from vram.keeper.messages import Claimed
from vram.open_files import close_fds
from vram.spec import HOST

ROWS = (4, 1000)


def array() -> vram.Array:
    return vram.zeros(ROWS, "float32", device="host")


@dataclass(slots=True)
class Scene:
    """A keeper and what looks at it over a connection of its own; a directory to lend in; what a verb works on."""

    path: str
    watcher: KeeperClient
    directory: str
    at: str = ""
    mine: Any = None
    other: Any = None
    ends: Any = None
    version: int = 0
    was_interrupted: bool = False

    def books(self) -> dict[str, object]:
        """Count what is there, at the keeper and in this process."""
        said = self.watcher.statistics()
        live = driver.get(HOST).live()
        if not os.environ.get("VRAM_TEST_GPU") and standin.missing() is None:
            standin.Standin().live()  # which closes what it had open to see whether the keeper has it still
        return {
            "leases": said.leases,
            "connections": said.connections,
            "waiting": said.waiting,
            "versions": said.versions,
            "descriptors of the keeper": said.descriptors,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "memory": live,
            "handles": len(lifetime.live()),
            "sockets": os.listdir(self.directory),
            "leaks": said.stuck,
        }


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with private_socket() as path, short_directory() as directory:
        with KeeperClient.connect(path, label="watcher") as watcher:
            watcher.statistics()
            yield Scene(path, watcher, directory, os.path.join(directory, "lent.sock"))


@pytest.fixture(autouse=True)
def default_keeper(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VRAM_KEEPER", scene.path)
    with array() as one, array() as two:
        scene.version = vram.publish("weights", {"a": one, "b": two}).version
    # Its manifest is longer than what a message has room for, and comes as a descriptor of its own.
    vram.publish("many", {f"{'x' * 180}{number}": np.zeros(8) for number in range(200)})
    yield
    for name in ("weights", "many"):
        vram.remove(name)
    close_client(scene.path)
    shut_down()
    scene.mine = scene.other = scene.ends = None


# -- what the verbs work on, and the next call on the same object ------------------------------------------------------
def nothing(s: Scene) -> None:
    pass


def attached(s: Scene) -> None:
    with vram.attach("weights", timeout=SOON) as lease:
        assert lease["b"].numpy()[3, 999] == 0


def leased(s: Scene) -> None:
    s.mine = vram.attach("weights")
    s.mine["a"].numpy()


def leased_no_more(s: Scene) -> None:
    s.mine.close()
    attached(s)


def listened(s: Scene) -> None:
    """Whoever asked for it listens now, by either way; the thread ends with the lease."""
    heard: list[vram.Lease] = []
    s.mine.on_revoke(heard.append)
    assert select.select([s.mine], [], [], 0)[0] == []
    assert heard == []
    leased_no_more(s)


def grown(s: Scene) -> None:
    """A lease whose entry has a newer version, in memory that begins with the same."""
    s.other = vram.empty((1, 1 << 18), "int64", device="host", capacity=4, chunk="2MiB")
    s.other.fill(1)
    vram.publish("grown", {"a": s.other}, writable=True)
    s.mine = vram.attach("grown", growing=True, timeout=SOON)
    s.mine.on_revoke(id)
    s.mine["a"].numpy()
    s.other.resize(3)
    s.other.fill(2)
    vram.publish("grown", {"a": s.other}, writable=True)


def followed(s: Scene) -> None:
    """It is on the one version or the other, whole, and goes on to the newer one."""
    before = len(s.mine["a"])
    assert before in (1, 3)
    assert s.mine.refresh() == (("a",) if before == 1 else ())
    assert s.mine["a"].numpy()[:, ::999].min() == 2
    assert len(s.mine["a"]) == 3
    assert s.watcher.statistics().leases == 1
    heard: list[vram.Lease] = []
    s.mine.on_grow(heard.append)
    vram.publish("grown", {"a": s.other}, writable=True)
    until(lambda: heard == [s.mine], seconds=SOON / 4, what="the callback")
    s.mine.close()
    s.other.close()
    vram.remove("grown")


def follows(s: Scene) -> None:
    s.mine = vram.follow("weights", timeout=SOON)
    s.other = iter(s.mine)


def read_current(s: Scene) -> None:
    with s.mine.current() as lease:
        lease["a"].numpy()
        lease.is_stale()


def follows_no_more(s: Scene) -> None:
    """Whatever was interrupted, the follower is where it was, and goes on to what is published next."""
    if s.mine is None or s.mine.is_closed:
        follows(s)
    assert s.mine["b"].numpy()[3, 999] == 0
    vram.publish("weights", {"a": np.full(ROWS, 1), "b": np.full(ROWS, 1)})
    versions = (lease for lease in s.other if lease["b"].numpy()[3, 999] == 1)
    next(versions).close()
    assert s.mine["b"].numpy()[3, 999] == 1
    with array() as one, array() as two:
        vram.publish("weights", {"a": one, "b": two})
    s.mine.close()
    del versions
    assert next(s.other, None) is None


def missing(s: Scene) -> None:
    with contextlib.suppress(vram.errors.NotFoundError):
        vram.remove("loaded")


def load_and_publish(s: Scene) -> vram.Lease:
    return vram.attach_or_publish("loaded", lambda: {"a": np.zeros(1000)}, timeout=SOON)


def loaded(s: Scene) -> None:
    # From a connection of its own: a claim that was left would have it wait, until it is told that it waited too long.
    with KeeperClient.connect(s.path) as another:
        got = another.attach_or_claim("loaded", timeout=SOON / 4)
        if isinstance(got, Claimed):
            another.abandon(got)
        else:
            close_fds(got.fds)
    load_and_publish(s).close()
    vram.remove("loaded")


def own_array(s: Scene) -> None:
    s.mine = array()


def published(s: Scene) -> None:
    vram.publish("published", {"a": s.mine})
    with vram.attach("published", timeout=SOON) as lease:
        assert lease["a"].shape == ROWS
    vram.remove("published")
    s.mine.close()


def to_update(s: Scene) -> None:
    with array() as one, array() as two:
        vram.publish("updated", {"a": one, "b": two}, updatable=True)
    s.other = vram.attach("updated", timeout=SOON)


def to_swap(s: Scene) -> None:
    with array() as one, array() as two:
        vram.publish("updated", {"a": one, "b": two}, updatable=True, swap=True)
    s.other = vram.attach("updated", timeout=SOON)


def create_ring() -> vram.Ring:
    return vram.Ring.create("ring", shape=ROWS, dtype="float32", slots=2)


def a_ring(s: Scene) -> None:
    s.mine = create_ring()
    s.other = vram.Ring.attach("ring", timeout=SOON)


def a_full_ring(s: Scene) -> None:
    a_ring(s)
    for number in (1, 2):
        s.mine.put(np.full(ROWS, number, np.float32))


def put_and_read(s: Scene) -> None:
    """The consumer gives one frame back while the producer waits for it."""
    s.other.next(timeout=SOON / 4)
    pause = time.sleep

    def read_meanwhile(seconds: float) -> None:
        s.other.next(timeout=0)
        pause(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vram.entries.ring.time.sleep", read_meanwhile)
        s.mine.put(np.full(ROWS, 3, np.float32), timeout=SOON / 4)


def ring_works(s: Scene) -> None:
    """Frames come in their order and whole, whatever the interrupt came upon; the producer is kept out by nobody."""
    gc.collect()  # what the interrupt came out of
    before = s.mine.sequence
    seen = [frame.sequence for frame in iter_ready(s.other)]
    assert seen == list(range(before - len(seen) + 1, before + 1))
    for number in range(before + 1, before + 5):
        s.mine.put(np.full(ROWS, number, np.float32), timeout=SOON / 4)
        frame = s.other.next(timeout=SOON / 4)
        assert (frame.sequence, frame.array.min(), frame.array.max()) == (number, number, number)
    s.other.close()
    s.mine.close()
    del frame
    ring_created(s)


def iter_ready(frames: Any) -> Iterator[Any]:
    """Return the frames that are there."""
    return iter([frames.next(timeout=0) for _ in range(frames.behind)])


def ring_created(s: Scene) -> None:
    """The name is free for a new one, which works; what was interrupted left nothing to that."""
    if s.other is not None:
        s.other.close()
    gc.collect()
    with create_ring() as ring, vram.Ring.attach("ring", timeout=SOON) as frames:
        ring.put(np.ones(ROWS, np.float32))
        assert frames.next(timeout=SOON / 4).array.all()


def ring_closed(s: Scene) -> None:
    s.mine.close()
    assert list(s.other) == []
    with pytest.raises(vram.errors.NotFoundError):
        vram.Ring.attach("ring")
    ring_created(s)


def update_one(s: Scene) -> None:
    """The other array is copied over."""
    with vram.update("updated", only=["a"], timeout=SOON / 4) as arrays:
        arrays["a"].fill(0)


def swapped(s: Scene) -> None:
    """Nothing is ever torn, and nobody is kept from the next one (I14)."""

    def seen() -> set[float]:
        with s.other.reading(timeout=SOON / 4):
            return {float(number) for one in s.other.values() for number in one.numpy()[::3, ::999].ravel()}

    gc.collect()  # what the interrupt came out of
    assert len(seen()) == 1
    assert not s.other.torn
    for number in (2, 3):
        update(s, number)
        assert seen() == {float(number)}
    s.other.close()
    vram.remove("updated")


def update(s: Scene, number: int = 1) -> None:
    with vram.update("updated", timeout=SOON / 4) as arrays:
        for one in arrays.values():
            one.fill(number)


def read_section(s: Scene) -> None:
    with s.other.reading(timeout=SOON / 4):
        pass


def updated(s: Scene) -> None:
    """Nobody sees half of it (I14), and nobody is kept from the next one."""

    def seen() -> set[float]:
        with s.other.reading(timeout=SOON / 4):
            return {float(number) for one in s.other.values() for number in one.numpy()[::3, ::999].ravel()}

    gc.collect()  # what the interrupt came out of
    with contextlib.suppress(vram.errors.TornError):
        assert len(seen()) == 1
    update(s, 2)
    assert seen() == {2.0}
    s.other.close()
    vram.remove("updated")


def to_park(s: Scene) -> None:
    with vram.zeros(ROWS, "float32", device="cuda:0") as one:
        one.fill(7)
        vram.publish("parked", {"a": one})


def to_wake(s: Scene) -> None:
    to_park(s)
    vram.park("parked", timeout=SOON)


def parked(s: Scene) -> None:
    """It is parked or it is not, and whole in either case (I13); and it can be parked again."""
    gc.collect()  # what the interrupt came out of has a lease
    for _ in range(2):
        with vram.attach("parked", wake=True, timeout=SOON / 4) as lease:
            assert (lease["a"].to_host() == 7).all()
        del lease
        vram.park("parked", timeout=SOON / 4)
    vram.remove("parked")


def leased_twice(s: Scene) -> None:
    """One of them is closed as the other one wakes, so that there are never more leases than before."""
    leased(s)
    s.other = vram.attach("weights")


def asleep(s: Scene, *, release: bool = False) -> None:
    leased_twice(s)
    s.mine.sleep(release=release)


def wake_one(s: Scene) -> None:
    s.other.close(wait=True)
    s.mine.wake(timeout=SOON / 4)


def awake(s: Scene) -> None:
    """It is asleep or it is awake, all of it, and can be the other."""
    gc.collect()  # what the interrupt came out of has a lease
    s.other.close()
    for _ in range(2):
        s.mine.wake(timeout=SOON / 4)
        assert s.mine["a"].numpy()[3, 999] == s.mine["b"].numpy()[0, 0] == 0
        s.mine.sleep()
    s.mine.close()


def lent(s: Scene) -> None:
    own_array(s)
    s.other = vram.lend({"a": s.mine}, at=s.at)


def lendable(s: Scene) -> None:
    if s.other is not None:
        s.other.close()
    with vram.lend({"a": s.mine}, at=s.at), vram.borrow(s.at, timeout=SOON) as borrowed:
        borrowed["a"].numpy()
    close_client(s.at)
    s.mine.close()


def borrowed(s: Scene) -> None:
    until(lambda: not s.other.holders(), seconds=SOON / 4, what="the return of what was borrowed")
    with vram.borrow(s.at, timeout=SOON) as again:
        again["a"].numpy()
    close_client(s.at)
    s.other.close()
    s.mine.close()


def channel(s: Scene) -> None:
    own_array(s)
    s.ends = vram.ArrayChannel.pair()


def channel_used(s: Scene) -> None:
    """What was sent before is closed here, and the other end has it: that it lets go is heard with the next send."""
    channel(s)
    with array() as before:
        s.ends[0].send(before, timeout=SOON)
        s.ends[1].recv(timeout=SOON)
    s.ends[0].send("hear", timeout=SOON)
    s.ends[1].recv(timeout=SOON)


def message_sent(s: Scene, value: Callable[[Scene], object] = lambda s: s.mine) -> None:
    channel(s)
    s.ends[0].send(value(s), timeout=SOON)


def many_parts_sent(s: Scene) -> None:
    """An array of more chunks than one message has descriptors: the other end asks to go on from the first of two."""
    s.mine = vram.empty((PARTS, 2 << 20), "uint8", device="host", chunk=2 << 20)
    s.ends = vram.ArrayChannel.pair()
    s.other = threading.Thread(target=lambda one=s.ends[0], mine=s.mine: one.send(mine, timeout=SOON), daemon=True)
    s.other.start()


def receive(s: Scene) -> object:
    return s.ends[1].recv(timeout=SOON)


def hand_overs(s: Scene, came: int | None = None) -> None:
    """Everything that was sent comes, in its order, and both ends go on."""
    one, two = s.ends
    if s.other is None:  # or somebody sends already
        assert not any(end._talk.sending.locked() or end._talk.receiving.locked() for end in s.ends), (
            "a lock was left taken"
        )
        s.other = threading.Thread(target=lambda: None)
        s.other.start()
    with array() as another:
        thread = threading.Thread(target=_send_two, args=(one, another, s.other), daemon=True)
        thread.start()
        found = list(iter(lambda: two.recv(timeout=SOON / 4), "end"))
        thread.join(SOON)
        assert not thread.is_alive(), "a send hangs"
        assert isinstance(found[-1], vram.Array)
        assert found[-1].shape == ROWS
        if came is not None:
            assert len(found) == came + 1, "a message was lost, or came twice"
        two.send("back", timeout=SOON)
        assert one.recv(timeout=SOON) == "back"
        found.clear()
    one.close()
    two.close()
    s.mine.close()


def _send_two(one: vram.ArrayChannel, another: vram.Array, before: threading.Thread) -> None:
    before.join(SOON)
    one.send(another, timeout=SOON)
    one.send("end", timeout=SOON)


def received(s: Scene) -> None:
    """An interrupted recv took nothing: what was sent comes with the next."""
    hand_overs(s, came=1 if s.was_interrupted else 0)


def to_pickle(s: Scene) -> None:
    """What one endpoint pickles another one unpickles, as that of another process would."""
    own_array(s)
    s.ends = Endpoint()
    endpoint()


def to_pickle_first(s: Scene) -> None:
    to_pickle(s)
    shut_down()


def write_down(s: Scene) -> None:
    s.other = None
    s.other = _reduce(s.mine)[1]


def pickled(s: Scene) -> None:
    to_pickle(s)
    write_down(s)


def pickled_many(s: Scene) -> None:
    """More descriptors than one message has."""
    to_pickle(s)
    s.mine.close()
    s.mine = vram.empty((PARTS, 2 << 20), "uint8", device="host", chunk=2 << 20)
    write_down(s)


def pickled_again(s: Scene) -> None:
    """The reader has the memory already."""
    pickled(s)
    read(s).close()
    write_down(s)


@lifetime.shielded  # as the function is that unpickling calls
def read(s: Scene) -> vram.Array:
    return s.ends.read(*s.other)


@lifetime.shielded
def read_at_home(s: Scene) -> vram.Array:
    return endpoint().read(*s.other)


def unpickled(s: Scene) -> None:
    """What is pickled next is unpickled, and nothing is in flight any more that nobody will unpickle."""
    here = endpoint()
    if s.other is not None and not s.was_interrupted:
        read(s).close()
    s.other = None
    locks = [part._lock for each in (here, s.ends) for part in (each, each.flights, *each._clients.values())]
    # The thread of either end may have one for a moment.
    until(lambda: not any(lock.locked() for lock in locks), seconds=SOON / 4, what="the end of a lock that was taken")
    with s.ends.read(*here.reduce(s.mine)) as array:
        assert array.shape == s.mine.shape
    until(lambda: not here.flights._flights, seconds=SOON / 4, what="the end of what is in flight")
    fds = [client.fd for client in s.ends._clients.values()]
    until(lambda: not select.select(fds, [], [], 0)[0], seconds=SOON / 4, what="the end of a late answer")
    s.ends.close()
    s.mine.close()


def read_once(s: Scene) -> None:
    """What was interrupted was in no queue any more: it counts as unpickled."""
    s.other = None
    unpickled(s)


PARTS = 254
NOT_YET = 4  # points of a shielded call before the shield
SLOW = {"recv parts": 10, "unpickle, long": 10}  # points of what takes long
# What it works on, the call, and the next call, which shows that the object still works and ends what is left of it.
VERBS: dict[str, tuple[Callable[[Scene], object], Callable[[Scene], object], Callable[[Scene], object]]] = {
    "attach": (nothing, lambda s: vram.attach("weights", timeout=SOON), attached),
    "attach, first call": (lambda s: close_client(s.path), lambda s: vram.attach("weights", timeout=SOON), attached),
    "attach, long manifest": (nothing, lambda s: vram.attach("many", timeout=SOON), attached),
    "upgrade": (leased, lambda s: s.mine.upgrade(timeout=SOON), leased_no_more),
    "close a lease": (leased, lambda s: s.mine.close(), leased_no_more),
    "close a lease and wait": (leased, lambda s: s.mine.close(wait=True), leased_no_more),
    "fileno": (leased, lambda s: s.mine.fileno(), listened),
    "on_revoke": (leased, lambda s: s.mine.on_revoke(id), listened),
    "sleep": (leased_twice, lambda s: s.mine.sleep(), awake),
    "sleep, and release": (leased_twice, lambda s: s.mine.sleep(release=True), awake),
    "wake a lease": (asleep, wake_one, awake),
    "wake a lease that was released": (lambda s: asleep(s, release=True), wake_one, awake),
    "detach_all": (leased_twice, lambda s: vram.detach_all(), awake),
    "refresh": (grown, lambda s: s.mine.refresh(), followed),
    "follow": (nothing, lambda s: vram.follow("weights", timeout=SOON), follows_no_more),
    "current version": (follows, read_current, follows_no_more),
    "next version": (follows, lambda s: next(s.other)["a"].numpy(), follows_no_more),
    "close a follower": (follows, lambda s: (s.mine["a"].numpy(), s.mine.close()), follows_no_more),
    "on_grow": (leased, lambda s: s.mine.on_grow(id), listened),
    "by name": (nothing, lambda s: attach_array(s.path, "weights", s.version, "a", "r", 0, ROWS, "float32"), attached),
    "entry": (nothing, lambda s: vram.entry("weights"), attached),
    "attach_or_publish": (missing, load_and_publish, loaded),
    "publish a copy": (own_array, lambda s: vram.publish("published", {"a": np.zeros(1000)}), published),
    "publish in place": (own_array, lambda s: vram.publish("published", {"a": s.mine}), published),
    "update": (to_update, update, updated),
    "reading, first section": (to_update, read_section, updated),
    "update two slots": (to_swap, update, swapped),
    "update one array of two slots": (to_swap, update_one, swapped),
    "reading of two slots": (to_swap, read_section, swapped),
    "create a ring": (nothing, lambda s: create_ring(), ring_created),
    "attach a ring": (a_ring, lambda s: vram.Ring.attach("ring", timeout=SOON), ring_works),
    "put": (a_ring, lambda s: s.mine.put(np.ones(ROWS, np.float32), timeout=SOON / 4), ring_works),
    "put, and wait for room": (a_full_ring, put_and_read, ring_works),
    "next of a ring": (a_full_ring, lambda s: s.other.next(timeout=SOON / 4), ring_works),
    "close a ring": (a_ring, lambda s: s.mine.close(), ring_closed),
    "park": (to_park, lambda s: vram.park("parked", timeout=0), parked),
    "wake": (to_wake, lambda s: vram.attach("parked", wake=True, timeout=0).close(), parked),
    "lend": (own_array, lambda s: vram.lend({"a": s.mine}, at=s.at), lendable),
    "close a lending": (lent, lambda s: s.other.close(), lendable),
    "borrow": (lent, lambda s: vram.borrow(s.at, timeout=SOON), borrowed),
    "send": (channel, lambda s: s.ends[0].send(s.mine, timeout=SOON), hand_overs),
    "send and hear": (channel_used, lambda s: s.ends[0].send(s.mine, timeout=SOON), hand_overs),
    "send a container": (channel, lambda s: s.ends[0].send({"a": [s.mine, s.mine]}, timeout=SOON), hand_overs),
    "recv": (message_sent, receive, received),
    "recv a value": (lambda s: message_sent(s, lambda s: 17), receive, received),
    "recv a container": (lambda s: message_sent(s, lambda s: [s.mine]), receive, received),
    "recv parts": (many_parts_sent, receive, received),
    "pickle": (to_pickle, write_down, unpickled),
    "pickle, first call": (to_pickle_first, write_down, unpickled),
    "unpickle": (pickled, read, read_once),
    "unpickle, long": (pickled_many, read, read_once),
    "unpickle again": (pickled_again, read, read_once),
    "unpickle at home": (pickled, read_at_home, read_once),
}  # fmt: skip
MARKED = [pytest.param(verb, marks=[pytest.mark.standin] * (verb in ("park", "wake"))) for verb in VERBS]


def once(s: Scene, verb: str, nth: int) -> bool:
    """Prepare, interrupt the verb at its Nth point, and go on; whether there are as many."""
    prepare, act, go_on = VERBS[verb]
    s.mine = s.other = s.ends = None
    prepare(s)
    held = s.watcher.statistics().leases
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what was made and never handed out is dropped, as anything may be
        s.was_interrupted = False
        came, returned = interrupt(nth, lambda: act(s))
        s.was_interrupted = not returned
        until(lambda: s.watcher.statistics().leases <= held, seconds=SOON / 4, what="the return of a lease")
        go_on(s)
    s.mine = s.other = s.ends = None
    return came


def baseline(s: Scene, verb: str) -> dict[str, object]:
    """What is there after a call that nothing interrupted, and was, when that is made again."""
    for _ in range(2):
        once(s, verb, 1 << 30)
    gc.collect()
    return settled(s)


def settled(s: Scene) -> dict[str, object]:
    """The books, once two looks at them agree, and no thread is left that ends by itself after a moment."""
    # A lender that was dropped, not closed; and a thread of one that had something to close.
    brief = {"lender", "vram: closing", "vram: following"}
    until(lambda: not any(each.name in brief for each in threading.enumerate()), what="the end of every lender")
    before: dict[str, object] = {}
    while before != (before := s.books()):
        time.sleep(0.01)
    return before


@pytest.mark.parametrize("verb", some([*MARKED], 24))
def test_an_interrupt_leaves_no_lease_claim_memory_thread_or_lock_i12(scene: Scene, verb: str) -> None:
    prepare, act, go_on = VERBS[verb]
    before, came = baseline(scene, verb), 0
    prepare(scene)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scene.was_interrupted = False
        found = points(lambda: act(scene))
        go_on(scene)
    scene.mine = scene.other = scene.ends = None
    for nth in chosen(found, SLOW.get(verb, len(set(found))), seed=1):
        if verb.startswith("unpickle") and nth <= NOT_YET:
            continue  # what was not begun is still in flight
        try:
            came += once(scene, verb, nth)
        except BaseException as error:
            error.add_note(f"interrupted at {found[nth - 1]}, point {nth}")
            raise
        deadline = time.monotonic() + SOON / 4
        while (now := scene.books()) != before:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # as in `once`
                gc.collect()  # what an interrupt left in a cycle of frames
            left = {what: (before[what], now[what]) for what in now if now[what] != before[what]}
            assert time.monotonic() < deadline, f"left by an interrupt at {found[nth - 1]}, point {nth}: {left}"
    assert came  # a late one may not: where another thread takes part, the call may go another way
