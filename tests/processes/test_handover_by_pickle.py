"""Arrays in queues, pipes, pools and arguments of multiprocessing: the descriptor travels, the bytes never (I6, S6)."""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support import workers
from tests.support.children import CHILDREN
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.memfds import WRITABLE, make_memfd
from tests.support.other_users import OTHER, as_user
from tests.support.pickles import _Reference, dumps, dumps_for, knock, loads, rows

import vram
from vram.errors import BusyError, ClosedError, PeerGoneError, ProtocolError, WaitTimeoutError
from vram.handover import pickling
from vram.handover import pickling as module
from vram.handover.pickling import endpoint
from vram.handover.reducers import _rebuild
from vram.memory import Pin
from vram.sharing import channel as channel_module
from vram.sharing.channel import Credentials

pytestmark = pytest.mark.usefixtures("hand_over")
GRANULE = 2 << 20


class Servant:
    """A process that does what it is told."""

    def __init__(self) -> None:
        self.pipe, theirs = CHILDREN.Pipe()
        self.process = CHILDREN.Process(target=workers.serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def __call__(self, *order: Any) -> Any:
        self.pipe.send(order)
        del order
        assert self.pipe.poll(SOON), "the servant does not answer"
        answer = self.pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.join(SOON)

    def close(self) -> None:
        """End it, politely if it listens."""
        if self.process.is_alive():
            self.pipe.send(None)
            self.process.join(SOON)
        self.kill()
        self.pipe.close()
        self.process.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[tuple[Servant, Servant]]:
    one, other = Servant(), Servant()
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def servant(processes: tuple[Servant, Servant]) -> Iterator[Servant]:
    """Another process. After the test it holds nothing, and maps nothing of ours."""
    yield processes[0]
    processes[0]("drop")
    module.shut_down()
    until(lambda: processes[0]("mapped") == 0, seconds=SOON, what="the unmapping in the other process")


@pytest.fixture
def second(processes: tuple[Servant, Servant]) -> Iterator[Servant]:
    """A third process."""
    yield processes[1]
    processes[1]("drop")


@pytest.fixture
def mortal() -> Iterator[Servant]:
    """A process to be killed."""
    servant = Servant()
    yield servant
    servant.close()


def landed() -> bool:
    return not endpoint().flights._flights


def mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:vram (")


# -- the ways there are ---------------------------------------------------------------------------------------------


def test_through_a_pipe_and_back_it_is_the_same_object(servant: Servant) -> None:
    with rows(capacity=1_000_000) as a:
        address, shape, writable = servant("keep", "a", a)
        assert (shape, writable) == ((10, 4), True)
        assert address != a.address
        assert servant("add", "a", 1) == a.numpy().sum() == 820
        assert servant("give", "a") is a
        a.resize(900_000)
        assert servant("keep", "a", a) == (address, (900_000, 4), True), "growth is at the same address"
        assert servant("give", "a") is a
        a[899_999] = 7
        assert servant("total", "a") == a.numpy().sum()
        with a[5:7] as part:
            assert servant("keep", "part", part)[0] == address + 5 * 32
            assert servant("give", "part") is part
            assert servant("give", "a") is a
        assert len(dumps(a)) < 400


def test_through_queues_of_spawned_processes() -> None:
    incoming, outgoing = CHILDREN.Queue(), CHILDREN.Queue()
    process = CHILDREN.Process(target=workers.from_queue, args=(incoming, outgoing))
    process.start()
    try:
        with rows() as a:
            for n in range(1, 20):
                incoming.put(a)
                assert outgoing.get(timeout=SOON) is a
                assert a.numpy()[0, 0] == n
        for _ in range(5):  # dropped as soon as they are in
            incoming.put(rows())
        found = [outgoing.get(timeout=SOON) for _ in range(5)]
        assert [int(array.numpy()[9, 3]) for array in found] == [40] * 5
        del found
        incoming.put(None)
        incoming.put("all taken")
        process.join(SOON)
        assert process.exitcode == 0
        until(lambda: landed() and mappings() == 0)
    finally:
        process.kill()
        process.join(SOON)
        process.close()
        for pipe in (incoming, outgoing):
            pipe.close()
            pipe.join_thread()


def test_as_an_argument_of_a_process() -> None:
    ours, theirs = CHILDREN.Pipe()
    with rows() as a, ours:
        process = CHILDREN.Process(target=workers.as_argument, args=(a, theirs))
        process.start()
        theirs.close()
        assert ours.poll(SOON)
        assert ours.recv() == process.pid
        process.join(SOON)
        process.close()
        assert a.numpy()[0, 0] == 1
        until(landed)


def test_through_pools() -> None:
    with rows() as a, CHILDREN.Pool(2) as pool:
        parts = pool.map(workers.second_row, [a] * 8, chunksize=1)
        assert all(part.address == a.address + 32 for part in parts)
        assert a.numpy()[1, 0] == 4 + 8
        with pytest.raises(ValueError, match=r"\(10, 4\)"):
            pool.apply(workers.fail, (a,))
        del parts
        pool.close()
        pool.join()
    with rows() as a, ProcessPoolExecutor(1, mp_context=CHILDREN) as executor:
        part = executor.submit(workers.second_row, a).result(SOON)
        assert part.numpy().tolist() == [[5, 6, 7, 8]]
        part.close()
    # What the workers said of it before they ended, our endpoint may hear after that.
    until(lambda: landed() and mappings() == 0)


def test_i7_a_forked_child_fetches_like_everybody_else() -> None:
    context = multiprocessing.get_context("fork")
    incoming, outgoing = context.SimpleQueue(), context.SimpleQueue()
    with rows() as a, rows() as before:
        incoming.put(before)
        assert incoming.get() is before  # our endpoint is up when we fork
        view = before.numpy()

        def work(view: Any) -> None:
            array = incoming.get()
            array.numpy()[...] += 1
            outgoing.put(array)
            outgoing.put(int(view[9, 3]))
            try:
                outgoing.put(before)
            except ClosedError as error:
                outgoing.put(str(error))
            incoming.get()

        process = context.Process(target=work, args=(view,))
        process.start()
        incoming.put(a)
        assert outgoing.get() is a
        assert a.numpy()[0, 0] == 1
        assert outgoing.get() == 39
        assert "fork" in outgoing.get()
        incoming.put("done")
        process.join(SOON)
        assert process.exitcode == 0
        process.close()
        incoming.put(a)
        assert incoming.get() is a, "our own endpoint is what it was"
        del view
    for pipe in (incoming, outgoing):
        pipe.close()


def test_what_was_attached_goes_by_name(servant: Servant, kept: vram.Keeper) -> None:
    """The keeper knows who holds what."""
    with rows() as a:
        vram.publish("n", {"a": a}, keeper=kept)
        with vram.attach("n", keeper=kept) as lease:
            assert servant("keep", "a", lease["a"][2:4])[1:] == ((2, 4), False)
            assert servant("total", "a") == a.numpy()[2:4].sum()
            assert {holder.pid for holder in vram.entry("n").versions[0].holders} == {os.getpid(), servant.process.pid}
        assert servant("keep", "b", a)[2] is False, "published by us, it is ours to hand over, read-only as it is"
    assert vram.statistics().leases == 1
    servant("drop")
    until(lambda: vram.statistics().leases == 0)


# -- in flight ------------------------------------------------------------------------------------------------------


def test_i6_what_is_in_flight_is_not_shrunk_away(servant: Servant) -> None:
    with rows(200_000, chunk="2MiB", capacity=400_000) as a:
        first = dumps(a)
        a.resize(400_000)
        second = dumps(a)
        with pytest.raises(BusyError, match="in flight"):
            a.resize(300_000)
        servant("read", "first", first)
        servant("read", "second", second)
        until(landed)
        a.resize(8)
        assert servant("total", "first") == sum(range(800_000))
        a.resize(200_000)
        a.fill(1)
        servant("keep", "third", a)
        assert servant("total", "third") == a.numpy().sum(), "what was given back is not what came after"


def test_s8_what_is_in_flight_may_be_frozen(servant: Servant, kept: vram.Keeper) -> None:
    """Published meanwhile, it arrives read-only; an id that was replaced by then is still good."""
    with rows() as a:
        early = dumps(a)
        vram.publish("n", {"a": a}, keeper=kept)
        late = dumps(a)
        assert servant("read", "late", late)[2] is False
        assert servant("read", "early", early)[2] is False
        assert servant("total", "early") == servant("total", "late") == 780
        assert loads(dumps(a)) is a
        until(landed)
        servant("drop")


def test_unpickling_twice_gives_two_arrays_on_one_memory(servant: Servant) -> None:
    with rows() as a:
        pickled = dumps(a)
        assert servant("read", "one", pickled)[0] == servant("read", "two", pickled)[0]
        until(landed)
        assert loads(pickled) is a
        assert loads(pickled) is a
        servant("add", "one", 1)
        assert servant("total", "two") == a.numpy().sum()


def test_flights_that_nobody_ends_end_in_time(monkeypatch: pytest.MonkeyPatch, servant: Servant) -> None:
    module.shut_down()
    with rows() as kept_array:
        forgotten = dumps(kept_array)
        with rows() as a:
            pickled = dumps(a)
        del a
        assert mappings() == 2
        monkeypatch.setattr(pickling, "FLIGHT_SECONDS", 0.3)  # not before: on a busy machine it would be over by now
        endpoint()._poke()
        until(lambda: mappings() == 1)
        assert [memory for memory, _ in endpoint().flights._flights] == [1], "what its sender has is not given up"
        with pytest.raises(ClosedError, match="closed by its sender"):
            servant("read", "a", pickled)
        assert servant("read", "b", forgotten)[1] == (10, 4)
    until(landed)


def test_a_queue_that_is_still_in_use_keeps_its_flights() -> None:
    """Time counts from the last array that was pickled, not from the first."""
    a = rows()
    dumps(a)
    (flight,) = endpoint().flights._flights.values()
    flight.since -= 10 * pickling.FLIGHT_SECONDS
    pickled = dumps(a)
    del a
    gc.collect()
    endpoint().flights.end_stale()
    found = loads(pickled)
    assert found.numpy()[9, 3] == 39
    found.close()
    del found
    flight.since -= 10 * pickling.FLIGHT_SECONDS
    endpoint().flights.end_stale()
    until(lambda: mappings() == 0)


def pickled_elsewhere(array: vram.Array) -> bytes:
    """What another thread pickles, as that of another queue would."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(dumps, array).result(SOON)


def test_what_a_killed_process_was_to_take_can_be_shrunk_at_once(
    mortal: Servant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who holds it is named before; what others are to take stays as it was; a time nobody waits for is not awaited."""
    monkeypatch.setattr(pickling, "ORPHAN_SECONDS", 10 * SOON)
    module.shut_down()
    with rows(200_000, chunk="2MiB") as a, rows(200_000, chunk="2MiB") as b:
        dumps(a)
        with pytest.raises(BusyError, match=r"1 times not yet unpickled.*Nobody is connected who .* try again 600 s"):
            a.resize(8)
        mortal("keep", "a", a)
        until(lambda: endpoint().flights._flights[1, 1].count == 1, seconds=SOON)
        dumps(a)
        pickled_elsewhere(b)
        with pytest.raises(BusyError, match=rf"2 times not yet .*Have process {mortal.process.pid} take it out"):
            a.resize(8)
        mortal.kill()
        until(lambda: is_free_to_shrink(a), seconds=AT_ONCE)
        assert a.nbytes == 8 * 32
        with pytest.raises(BusyError, match="Nobody is connected"):
            b.resize(8)
    module.shut_down()


def is_free_to_shrink(array: vram.Array) -> bool:
    try:
        array.resize(8)
    except BusyError:
        return False
    return True


def orphans() -> list[Any]:
    """Return what is on its way to processes that died."""
    return [flight for flight in list(endpoint().flights._flights.values()) if flight.until < math.inf]


def test_what_a_killed_process_was_to_take_is_freed_soon(mortal: Servant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon, not at once: another may take its place, and finds what is in the queue."""
    module.shut_down()
    before = mappings()
    unread = [rows() for _ in range(3)]
    with rows() as taken:
        mortal("keep", "taken", taken)
        until(landed)
    pickled = [dumps(array) for array in unread]
    unread.clear()
    elsewhere = pickled_elsewhere(rows())
    assert mappings() == before + 4
    mortal.kill()
    until(lambda: len(orphans()) == 3, seconds=AT_ONCE)
    assert loads(pickled.pop()).numpy()[9, 3] == 39, "whoever comes next finds it"
    assert len(orphans()) == 2
    for flight in orphans():
        flight.until -= pickling.ORPHAN_SECONDS
    endpoint()._poke()
    until(lambda: mappings() == before + 1, seconds=AT_ONCE)
    for one in pickled:
        with pytest.raises(ClosedError, match="closed by its sender"):
            loads(one)
    assert loads(elsewhere).numpy()[9, 3] == 39, "that was not for the one who died"
    until(lambda: mappings() == before)  # whoever is at it, here or in the endpoint's thread, unmaps it
    module.shut_down()


def test_what_others_may_take_is_not_given_up_with_one_of_them(mortal: Servant, servant: Servant) -> None:
    module.shut_down()
    with rows() as a:
        mortal("keep", "a", a)
        servant("keep", "a", a)
        until(landed)
        dumps(a)
        (mine,) = (reader for reader in endpoint()._servers.values() if reader.pid == mortal.process.pid)
        mortal.kill()
        until(lambda: mine not in endpoint()._servers.values(), seconds=AT_ONCE)
        assert not orphans()
        with pytest.raises(BusyError, match=f"Have process {servant.process.pid} take it"):
            a.resize(8)
        servant("drop")
    module.shut_down()


def test_who_ends_of_its_own_accord_leaves_the_rest_to_others() -> None:
    """As the workers of a pool do after so many tasks: the next one takes what is in the queue."""
    module.shut_down()
    incoming = CHILDREN.SimpleQueue()
    for _ in range(2):
        incoming.put(rows())
    process = CHILDREN.Process(target=workers.take, args=(incoming, 1))
    process.start()
    until(lambda: len(endpoint().flights._flights) == 1)
    process.join(SOON)
    assert process.exitcode == 0
    process.close()
    until(lambda: not endpoint()._servers, seconds=AT_ONCE)
    assert not orphans()
    assert incoming.get().numpy()[9, 3] == 39
    incoming.close()
    module.shut_down()


def test_an_array_that_its_sender_has_can_be_shrunk_once_nobody_seems_to_wait() -> None:
    """It was held for ever. Who comes later finds what is there then."""
    with rows(200_000, chunk="2MiB") as a:
        pickled = dumps(a)
        (flight,) = endpoint().flights._flights.values()
        with pytest.raises(BusyError, match="in flight"):
            a.resize(8)
        flight.since -= 2 * pickling.FLIGHT_SECONDS
        endpoint().flights.end_stale()
        assert loads(pickled) is a
        dumps(a)
        a_again = endpoint().flights._flights[flight.export.id, flight.by]
        assert isinstance(a_again.kept, Pin), "what is pickled anew is pinned anew"
        a_again.since -= 2 * pickling.FLIGHT_SECONDS
        endpoint().flights.end_stale()
        a.resize(8)
    module.shut_down()


# -- memory of the other process ------------------------------------------------------------------------------------


def test_arrays_of_the_other_process_live_here(servant: Servant) -> None:
    a = servant("make", "x", 5)
    assert a.numpy().sum() == 200
    address = a.address
    servant("add", "x", 1)
    assert a.numpy()[0, 0] == 6
    b = servant("grow", "x", 500_000)
    assert (b.address, b.shape) == (address, (500_000, 4))
    assert servant("keep", "y", b) == servant("keep", "x", servant("give", "x"))
    a.close()
    b.close()
    del a, b
    servant("drop")
    until(lambda: mappings() == 0, what="the unmapping of what the other process has dropped")


def test_what_a_killed_process_made_stays_readable(mortal: Servant) -> None:
    a = mortal("make", "x", 5)
    mortal("make", "y", 6).close()
    pickled = mortal("write_down", "y")
    more = mortal("make", "z", 7)
    late = mortal("write_down", "z")
    mortal.kill()
    until(lambda: not endpoint()._clients, what="the news of its end")
    assert a.numpy().sum() == 200
    with pytest.raises(PeerGoneError, match="publish arrays that must outlive"):
        loads(late)
    with pytest.raises(PeerGoneError, match="publish arrays that must outlive"):
        loads(pickled)
    assert more.numpy().sum() == 280
    a.close()
    more.close()
    del a, more
    until(lambda: mappings() == 0)


def test_through_three_processes_and_back(servant: Servant, second: Servant) -> None:
    with rows() as a:
        servant("keep", "a", a)
        address = second("read", "a", servant("write_down", "a"))[0]
        assert second("add", "a", 1) == a.numpy().sum()
        assert loads(second("write_down", "a")) is a, "home again, by way of two others"
        # The one in between knows the memory already: it is not mapped there a second time (S6).
        before = servant("mapped")
        servant("read", "again", second("write_down", "a"))
        assert servant("mapped") == before
        servant("drop")
        second("add", "a", 1)
        assert a.numpy()[0, 0] == 2
        assert address
        until(landed)


def test_more_segments_than_one_message_takes(servant: Servant) -> None:
    """S4."""
    with vram.empty((600, GRANULE), "uint8", device="host", chunk=GRANULE) as a:
        a.numpy()[:, 0] = np.arange(600) % 251
        assert servant("keep", "a", a)[1] == (600, GRANULE)
        with a[599] as last:
            servant("keep", "last", last)
            assert servant("total", "last") == 599 % 251
        assert servant("give", "a") is a


def test_private_memory_goes_by_name_until_it_is_written_and_then_as_a_copy(
    servant: Servant, kept: vram.Keeper
) -> None:
    vram.publish("n", {"x": np.arange(4)}, keeper=kept)
    with vram.attach("n", access="cow", keeper=kept) as lease:
        servant("keep", "x", lease["x"])
        assert servant("total", "x") == 6
        lease["x"][0] = 9
        servant("keep", "y", lease["x"])
        assert servant("total", "y") == 15
        assert servant("add", "y", 1) == 19
        assert lease["x"].numpy().sum() == 15, "what arrived is memory of its own"
        servant("drop")


def test_closed_arrays_are_refused() -> None:
    a = rows()
    a.close()
    with pytest.raises(ClosedError):
        dumps(a)


def test_what_was_closed_here_comes_back_as_what_it_is(servant: Servant) -> None:
    a = rows()
    servant("keep", "a", a)
    until(landed)
    view = a.numpy()
    a.close()
    found = servant("give", "a")
    assert found is not a
    assert found.numpy().tolist() == view.tolist()
    found[0, 0] = 77
    assert view[0, 0] == 77
    found.close()
    del view, found


def test_our_own_pickle_of_a_closed_array_is_still_good() -> None:
    a = rows()
    pickled = dumps(a)
    view = a.numpy()
    a.close()
    found = loads(pickled)
    found[0, 0] = 5
    assert view[0, 0] == 5
    found.close()
    del view, found
    until(lambda: mappings() == 0)


# -- strangers ------------------------------------------------------------------------------------------------------


def test_another_user_gets_nothing() -> None:
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    with rows() as a:
        dumps(a)
        address = endpoint().address
        assert knock(address) == b"\x93\xa1m"
        assert as_user(OTHER, lambda: knock(address)) in (b"", "ConnectionResetError", "BrokenPipeError")
        kind, text = as_user(OTHER, lambda: loads(dumps_for(address)))
        assert issubclass(kind, (ProtocolError, PeerGoneError)), text


def test_another_user_at_the_address_of_a_sender_that_is_gone_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is free again, for anybody."""
    monkeypatch.setattr(channel_module, "peer_credentials", lambda sock: Credentials(1, os.geteuid() + 1, 1))
    with Impostor() as impostor, pytest.raises(ProtocolError, match="served by another user"):
        loads(dumps_for(impostor.address))


NONSENSE = [
    b"\xc1",
    b"x" * 50_000,
    msgspec.msgpack.encode(["fetch"]),
    msgspec.msgpack.encode(["fetch", -1, 0]),
    msgspec.msgpack.encode(["fetch", 1, 5000]),
    msgspec.msgpack.encode(["took", [[1, -1]]]),
    msgspec.msgpack.encode(["m", 1]),
    b"\x91" * 50_000,
]


def test_s7_a_stranger_that_asks_nonsense_costs_its_connection() -> None:
    with rows() as a:
        dumps(a)
        for garbage in NONSENSE:
            print(garbage[:20])  # shown where it fails
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(endpoint().address)
                sock.settimeout(SOON)
                fd = make_memfd()
                try:
                    socket.send_fds(sock, [garbage], [fd])
                except PermissionError:  # from Linux 6.16 on
                    sock.send(garbage)
                finally:
                    os.close(fd)
                assert sock.recv(1000) == b"", "the connection is over"
            assert knock(endpoint().address) == b"\x93\xa1m", "everybody else is served"


def test_s7_a_stranger_that_asks_for_what_is_not_there_is_told() -> None:
    with rows() as a, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        dumps(a)
        sock.connect(endpoint().address)
        sock.settimeout(SOON)
        for message in (["fetch", 2, 0], ["fetch", 1, 1], ["fetch", 1, 1000], ["fetch", 2**62, 0]):
            sock.send(msgspec.msgpack.encode(message))
            assert msgspec.msgpack.decode(sock.recv(1000))[0] == "gone"
        sock.send(msgspec.msgpack.encode(["took", [[5, 1], [1, 2**62]]]))
        sock.send(msgspec.msgpack.encode(["took", [[1, 1]]]))  # it may give up what it was sent, and nothing else
        until(landed)


class Impostor:
    """A process's address that answers as it likes, from a time on. Memory of the nth answer begins with n."""

    def __init__(self, *answers: tuple[Any, int] | None, late: threading.Event | None = None) -> None:
        self.address = f"\0impostor-{os.getpid()}-{id(self)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, args=(answers, late))
        self._thread.start()

    def _serve(self, answers: tuple[tuple[Any, int] | None, ...], late: threading.Event | None) -> None:
        peer, _ = self._listener.accept()
        with peer, self._listener:
            for number, answer in enumerate(answers, 1):
                if answer is None:
                    break
                peer.recv(1000)
                if late is not None:
                    late.wait(SOON)
                fds = [make_memfd(GRANULE, seals=WRITABLE, content=bytes([number])) for _ in range(answer[1])]
                socket.send_fds(peer, [msgspec.msgpack.encode(answer[0])], fds)
                for fd in fds:
                    os.close(fd)
            else:
                while peer.recv(1000):
                    pass

    def __enter__(self) -> Impostor:
        return self

    def __exit__(self, *_: object) -> None:
        module.shut_down()
        self._thread.join(SOON)


def described(memory: int = 1, first: int = 0, segments: int = 1) -> Any:
    nbytes = segments * GRANULE
    memory_descriptor = ["host", [[GRANULE, 1]] * segments, 0, nbytes, 4 * GRANULE]
    return ["m", [memory, first, True, True, memory_descriptor]]


# The connection ends with nonsense: which of the two depends on who hears it first, who asks or the endpoint.
REFUSED = (ProtocolError, PeerGoneError)
ANSWERS: list[tuple[list[Any], type[Exception] | tuple[type[Exception], ...]]] = [
    ([({"what": "?"}, 1)], REFUSED),
    ([("garbage", 0)], REFUSED),
    ([(["gone", 1], 0)], ClosedError),
    ([(["gone", 1], 3)], ProtocolError),
    ([(described(), 0)], ProtocolError),
    ([(described(), 2)], ProtocolError),
    ([(described(segments=0), 0), (described(segments=0), 0)], ProtocolError),
    ([(described(segments=0), 0), (["gone", 1], 0)], ClosedError),
    ([(described(memory=2), 1)], WaitTimeoutError),
    ([(described(first=1), 1)], ProtocolError),
    ([(["f", [1, 1, 5]], 0)], WaitTimeoutError),
    ([], WaitTimeoutError),
    ([None], PeerGoneError),
]


def test_s7_an_address_that_answers_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickling, "FETCH_SECONDS", 0.2)
    for answers, error in ANSWERS:
        print(answers)
        with Impostor(*answers) as impostor, pytest.raises(error):
            loads(dumps_for(impostor.address))


def test_what_could_not_be_unpickled_is_not_kept_for_ever() -> None:
    """It is not in its queue any more: nobody would ever take it."""
    with rows() as a:
        address, *rest = endpoint().reduce(a)
        segments, offset, _, shape = rest[1]
        rest[1] = (segments, offset, "a type of tomorrow", shape)
        with pytest.raises(ProtocolError, match="whose type this process does not know"):
            _rebuild(address, *rest).numpy()
        assert landed()
        a.resize(2)


def test_s7_an_address_may_not_describe_more_than_it_sends() -> None:
    with Impostor((described(), 1)) as impostor:
        with pytest.raises(ProtocolError, match="does not lie in its memory"):
            ForkingPickler.loads(ForkingPickler.dumps(_Reference(impostor.address, shape=(GRANULE,)))).numpy()
        with loads(dumps_for(impostor.address)) as found:
            assert found.numpy().tolist() == [1, 0, 0, 0]


def test_s7_a_late_answer_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one who asked has given up; the next who asks gets its own answer, and no descriptor is left."""
    monkeypatch.setattr(pickling, "FETCH_SECONDS", 0.3)
    late = threading.Event()
    with Impostor((described(1), 1), (described(2), 1), late=late) as impostor:
        with pytest.raises(WaitTimeoutError):
            ForkingPickler.loads(ForkingPickler.dumps(_Reference(impostor.address, 1))).numpy()
        late.set()
        monkeypatch.setattr(pickling, "FETCH_SECONDS", SOON)
        with ForkingPickler.loads(ForkingPickler.dumps(_Reference(impostor.address, 2))) as found:
            assert found.numpy()[0] == 2
        del found


def test_after_the_end_there_is_a_new_beginning() -> None:
    with rows() as a:
        pickled = dumps(a)
        first = endpoint()
        module.shut_down()
        module.shut_down()
        with pytest.raises(ClosedError):
            first.reduce(a)
        assert endpoint() is not first
        with pytest.raises(PeerGoneError):
            loads(pickled)
        assert loads(dumps(a)) is a
