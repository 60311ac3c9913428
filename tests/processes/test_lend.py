"""lend and borrow: directly between two processes, leases whole, orderly ends and others (S1 to S6, S10)."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.connections import close_clients
from tests.support.deadlines import AT_ONCE, SOON, until
from tests.support.forked import end_of, refused
from tests.support.lend_children import COUNT, Hand, Sources, numbers
from tests.support.memfds import READ_ONLY, make_memfd
from tests.support.order import undone_until_waited_for
from tests.support.other_process import OtherProcess
from tests.support.other_users import OTHER, as_user
from tests.support.places import short_directory
from tests.support.samples import in_turns, some

import standin
import vram
from vram import driver as drivers
from vram.errors import (
    AccessDeniedError,
    BusyError,
    ClosedError,
    PeerGoneError,
    ReleaseWarning,
    UnsupportedError,
    UsageError,
    VramError,
    WaitTimeoutError,
)
from vram.keeper.client import KeeperClient, Segment, client
from vram.keeper.lend_server import LENT
from vram.spec import Location

GPU = Location("cuda", 0)
BY_HANDLE = ("legacy", "pool")
KINDS = ["host", *(pytest.param(kind, marks=pytest.mark.standin) for kind in ("cuda:0", "vmm", *BY_HANDLE))]


@pytest.fixture
def path() -> Iterator[str]:
    with short_directory() as directory:
        yield f"{directory}/lent"
        assert os.listdir(directory) == [], "the path outlives what was lent there"
    close_clients()


@pytest.fixture(scope="module")
def running_hand() -> Iterator[OtherProcess]:
    with OtherProcess(Hand) as other:
        other.call("warm_up")
        yield other


@pytest.fixture
def hand(running_hand: OtherProcess) -> Iterator[OtherProcess]:
    """Another process; a test that leaves anything in it fails."""
    before = running_hand.call("books")
    yield running_hand
    until(lambda: running_hand.call("books")[:2] == before[:2], what=f"{before[:2]} in the other process")
    after = running_hand.call("books")
    assert after == before


@pytest.fixture
def sources() -> Iterator[Sources]:
    with Sources() as made:
        yield made


@contextlib.contextmanager
def another() -> Iterator[OtherProcess]:
    """A process of one's own, that may be killed."""
    with OtherProcess(Hand) as other:
        yield other


# -- what is there --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", KINDS)
def test_s2_what_is_borrowed_is_the_same_memory(kind: str, path: str, hand: OtherProcess, sources: Sources) -> None:
    """Interior pointers included: what another library made is shown from byte 4,096 of its allocation on."""
    x = sources.make(kind)
    device = "host" if kind == "host" else "cuda:0"
    with vram.lend(x, at=path, writable=True) as lending:
        assert (lending.nbytes, lending.path) == (4 * COUNT, path)
        assert hand.call("borrow", path, access="rw") == {"array": (device, (COUNT,), "int32", False)}
        assert (hand.call("read") == numbers()).all()
        with vram.share(x) as here:
            here[...] = numbers(7)
            assert (hand.call("read") == numbers(7)).all()
            assert hand.call("write", 5) == ""
            assert (here.to_host() == 5).all()
        hand.call("close")
        until(lambda: lending.holders() == [], what="the end of the lease")
    assert not os.path.exists(path)


@pytest.mark.parametrize("kind", KINDS)
def test_s8_what_is_lent_read_only_is_not_written(kind: str, path: str, hand: OtherProcess, sources: Sources) -> None:
    with vram.lend(sources.make(kind), at=path):
        assert hand.call("try_borrow", path, access="rw")[0] == "AccessDeniedError"
        assert hand.call("borrow", path)["array"][3] is True
        assert hand.call("write", 1) in ("ReadOnlyError", "ValueError")
        assert (hand.call("read") == numbers()).all()
        hand.call("close")


@pytest.mark.standin
def test_a_mapping_of_every_kind_at_once(path: str, hand: OtherProcess, sources: Sources) -> None:
    kinds = ("host", "cuda:0", "vmm", "legacy", "pool")
    given = {kind: sources.make(kind, first) for first, kind in enumerate(kinds)}
    given["empty"] = np.empty((0, 3), "f4")
    given["part"] = vram.share(given["legacy"])[10:20]
    with vram.lend(given, at=path, meta={"step": "5"}) as lending:
        found = hand.call("borrow", path)
        assert list(found) == list(given)
        assert found["empty"][1:3] == ((0, 3), "float32")
        for first, kind in enumerate(kinds):
            assert (hand.call("read", "", kind) == numbers(first)).all(), kind
        assert (hand.call("read", "", "part") == numbers(3)[10:20]).all()
        assert hand.call("address", "", "part") == hand.call("address", "", "legacy") + 40
        with pytest.raises(UsageError, match="ask by name"):
            hand.call("read")
        assert [holder.pid for holder in lending.holders()] == [hand.call("pid")]
        hand.call("close")
    given["part"].close()


@pytest.mark.parametrize("kind", KINDS)
def test_copy_on_write(kind: str, path: str, hand: OtherProcess, sources: Sources) -> None:
    x = sources.make(kind)
    with vram.lend(x, at=path) as lending:
        if kind == "host":
            hand.call("borrow", path, access="cow")
            assert hand.call("write", 5) == ""
            assert hand.call("read").tolist() == [5] * COUNT
            assert (x.to_host() == numbers()).all()
            hand.call("close")
        else:
            name, said = hand.call("try_borrow", path, access="cow")
            assert name == "UnsupportedError"
            assert kind not in BY_HANDLE or "vram.copy" in said
            until(lambda: lending.holders() == [], what="the end of the refused lease")


@pytest.mark.standin
@pytest.mark.parametrize("kind", BY_HANDLE)
def test_s6_memory_that_is_borrowed_twice_is_opened_once(
    kind: str, path: str, hand: OtherProcess, sources: Sources
) -> None:
    """Measured: the first free of pool memory that was opened twice takes it away from both."""
    call = {"legacy": "cuIpcOpenMemHandle", "pool": "cuMemPoolImportPointer"}[kind]
    with vram.lend(sources.make(kind), at=path) as lending:
        hand.call("clear_calls")
        for key in "abc":
            hand.call("borrow", path, key)
        assert hand.call("calls", call) == 1
        assert hand.call("calls", "cuMemPoolImportFromShareableHandle") == (kind == "pool")
        assert len({hand.call("address", key) for key in "abc"}) == 1
        assert len(lending.holders()) == 3
        for key in "ba":
            hand.call("close", key)
            assert (hand.call("read", "c") == numbers()).all()
        hand.call("close", "c")
        assert hand.call("standin_live").get("ipc_opens", 0) == 0
        hand.call("borrow", path, "d")  # opened anew
        assert hand.call("calls", call) == 2
        assert (hand.call("read", "d") == numbers()).all()
        hand.call("close", "d")


def test_many_borrowers(path: str, hand: OtherProcess, sources: Sources) -> None:
    with vram.lend(sources.make("host"), at=path) as lending, another() as second:
        for other in (hand, second):
            other.call("borrow", path)
        held = lending.holders()
        assert {one.pid for one in held} == {hand.call("pid"), second.call("pid")}
        assert {one.uid for one in held} == {os.geteuid()}
        assert {(one.access, one.name) for one in held} == {("r", LENT)}
        second.call("pid")
        second._process.kill()
        until(lambda: len(lending.holders()) == 1, what="the end of the killed borrower's lease")
        hand.call("close")


@pytest.mark.standin
@pytest.mark.parametrize("kind", BY_HANDLE)
def test_s3_what_was_borrowed_by_handle_is_its_owners_to_share(
    kind: str, path: str, hand: OtherProcess, sources: Sources
) -> None:
    """Lending, sending and pickling it on are refused, and name the copy; nothing is left of the attempts."""
    with vram.lend(sources.make(kind), at=path):
        hand.call("borrow", path)
        said = hand.call("hand_on", path)
        for way in ("lend", "send", "pickle", "explain"):
            assert said[way][0] in ("UsageError", "UnsupportedError"), (way, said[way])
            assert "copy" in said[way][1], (way, said[way])
        assert said["copy"][0] == "Array"
        hand.call("close")


# -- mistakes -------------------------------------------------------------------------------------------------------
def test_borrowing_waits_for_a_lender(path: str, hand: OtherProcess) -> None:
    started = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="nobody lent"):
        vram.borrow(path, timeout=0.2)
    assert 0.2 <= time.monotonic() - started < AT_ONCE
    found: list[Any] = []

    def wait() -> None:
        with vram.borrow(path, timeout=SOON) as lease:
            found.append(lease.array.to_host().tolist())

    thread = threading.Thread(target=wait)
    thread.start()
    hand.call("lend", path, "host")
    thread.join(SOON)
    assert found == [numbers().tolist()]
    close_clients()
    hand.call("end", path)


def test_i10_wrong_paths_are_typed_errors(path: str, sources: Sources) -> None:
    x = sources.make("host")
    plain = Path(path)
    plain.write_text("no socket")
    for wrong, kind in (
        (path, UsageError),
        (f"{path}.d/none", UsageError),
        ("/" + "x" * 200, UsageError),
        (5, UsageError),
        (None, UsageError),
        (path.encode(), UsageError),
        ("", UsageError),
        (f"{path}\0", UsageError),
        ("/proc/none", UsageError),
    ):
        with pytest.raises(kind):
            vram.lend(x, at=wrong)  # type: ignore[arg-type]
    x[...] = 1  # and nothing was frozen for it
    plain.unlink()
    for wrong in (5, None, "", b"/x", "/" + "x" * 200):
        with pytest.raises(UsageError):
            vram.borrow(wrong, timeout=0)  # type: ignore[arg-type]
    with pytest.raises(WaitTimeoutError):
        vram.borrow(f"{path}.d/none", timeout=0)
    for options in ({"access": "w"}, {"timeout": -1}, {"timeout": "5"}, {"device": "cuda:99"}, {"stream": 0}):
        with pytest.raises((UsageError, UnsupportedError)):
            vram.borrow(path, **options)  # type: ignore[arg-type]
    for options in (
        {"writable": 1}, {"stream": "x"}, {"mode": "rw"}, {"group": "no such group"}, {"group": 5},
        {"meta": {"a": 1}}, {"meta": 5}, {"close_timeout": "5"}, {"close_timeout": -1},
    ):  # fmt: skip
        with pytest.raises(UsageError):
            vram.lend(x, at=path, **options)  # type: ignore[arg-type]
        assert not os.path.exists(path)
    x[...] = 2


def test_s3_what_cannot_be_lent_says_why(path: str, sources: Sources) -> None:
    x = sources.make("host")
    for obj, kind, words in (
        (np.zeros(5), UnsupportedError, "vram.copy"),
        ({"x": x, "y": np.zeros(5)}, UnsupportedError, "vram.copy"),
        ({}, UsageError, "nothing to lend"),
        ({5: x}, UsageError, "array names"),
        ("text", UsageError, "no array"),
        (x.numpy()[::2], UsageError, "vram.copy"),
    ):
        with pytest.raises(kind, match=words):
            vram.lend(obj, at=path)
        assert not os.path.exists(path)
    x[...] = 1


def test_i4_a_path_where_somebody_listens_is_busy_and_nothing_is_frozen(path: str, sources: Sources) -> None:
    x, y = sources.make("host"), sources.make("host")
    with vram.lend(x, at=path) as lending:
        with pytest.raises(BusyError, match="already"):
            vram.lend(y, at=path)
        y[...] = 1
        until(lambda: lending.holders() == [], what="the end of the lease")
        with vram.borrow(path) as lease:
            assert (lease.array.to_host() == numbers()).all()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(BusyError):
            vram.lend(y, at=path)
        with pytest.raises(VramError):
            vram.borrow(path, timeout=0.1)
    vram.lend(y, at=path).close()  # what somebody left there is replaced


def test_a_lender_is_no_keeper(path: str, sources: Sources) -> None:
    """Publishing, removing, claiming and taking over are refused; looking is not."""
    with vram.lend(sources.make("host"), at=path) as lending, vram.zeros(4, device="host") as y:
        connection = client(path)
        fd = make_memfd(4096, seals=READ_ONLY)
        for act in (
            lambda: vram.publish("n", {"y": y}, keeper=path),
            lambda: vram.publish(LENT, {"y": y}, keeper=path),
            lambda: connection.publish("n", [Segment(4096)], [fd]),
            lambda: connection.remove(LENT),
            lambda: connection.remove(LENT, 1, revoke=True),
            lambda: connection.offer("n", 4096),
            lambda: connection.attach_or_claim("n", timeout=0),
            lambda: connection.attach_or_claim(LENT, timeout=0),
            lambda: connection.take_over(fd),
        ):
            with pytest.raises(AccessDeniedError, match="lender"):
                act()
        os.close(fd)
        assert [row.name for row in connection.list()] == [LENT]
        with vram.borrow(path) as lease:
            assert len(lease) == 1
            assert [holder.pid for holder in vram.holders(LENT, keeper=path)] == [os.getpid()]
        until(lambda: lending.holders() == [], what="the end of the lease")


# -- the end --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["host", pytest.param("cuda:0", marks=pytest.mark.standin)])
def test_what_goes_by_descriptor_stays_with_who_borrowed_it(kind: str, path: str, hand: OtherProcess) -> None:
    with Sources() as sources:
        lending = vram.lend(sources.make(kind), at=path)
        hand.call("borrow", path)
        with pytest.raises(BusyError, match=f"pid {hand.call('pid')}"):
            lending.close(strict=True)
        lending.close()
        lending.close()
        assert lending.is_closed
        for act in (lending.holders, lending.revoke):
            with pytest.raises(ClosedError):
                act()
    assert (hand.call("read") == numbers()).all(), "its maker has freed it"
    hand.call("close")


@pytest.mark.standin
@pytest.mark.parametrize("kind", BY_HANDLE)
def test_s5_what_goes_by_handle_is_asked_back_and_kept_until_then(
    kind: str, path: str, hand: OtherProcess, sources: Sources
) -> None:
    x = sources.make(kind)
    lending = vram.lend(x, at=path, close_timeout=0.1)
    hand.call("borrow", path)
    with pytest.raises(BusyError, match=f"pid {hand.call('pid')}"):
        lending.close(strict=True)
    assert hand.call("try_borrow", path, timeout=0) == ("", ""), "a strict close changes nothing"
    with pytest.warns(ReleaseWarning, match=f"pid {hand.call('pid')}.*kept until"):
        lending.close()
    assert not os.path.exists(path)
    assert lending.is_closed
    assert drivers.get(GPU).live().mappings == 1, "the memory is kept"
    assert (hand.call("read") == numbers()).all()
    hand.call("close")
    until(lambda: drivers.get(GPU).live().mappings == 0, what="the owner's release")


@pytest.mark.standin
@pytest.mark.parametrize("kind", BY_HANDLE)
def test_s5_closing_waits_for_who_gives_it_back(kind: str, path: str, hand: OtherProcess, sources: Sources) -> None:
    lending = vram.lend(sources.make(kind), at=path, close_timeout=SOON)
    hand.call("borrow", path)
    hand.call("on_revoke", "close")
    lending.close()  # no warning: they were told, and gave it back
    assert hand.call("was_told")
    assert drivers.get(GPU).live().mappings == 0
    hand.call("close")


@pytest.mark.parametrize("kind", KINDS)
def test_s5_a_revoke_tells_and_takes_nothing(kind: str, path: str, hand: OtherProcess, sources: Sources) -> None:
    with vram.lend(sources.make(kind), at=path, close_timeout=0.0) as lending:
        hand.call("borrow", path)
        hand.call("on_revoke", "note")
        found = lending.revoke(timeout=0.05)
        assert [holder.pid for holder in found.holders] == [hand.call("pid")]
        assert found.nbytes == 4 * COUNT
        assert hand.call("was_told")
        assert (hand.call("read") == numbers()).all()
        assert hand.call("try_borrow", path, timeout=0.05)[0] in ("NotFoundError", "WaitTimeoutError")
        hand.call("close")
        again = lending.revoke(timeout=SOON)
        assert (again.holders, again.nbytes) == ((), 0)
        with pytest.raises(UsageError):
            lending.revoke(timeout=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_s5_a_release_is_told_after_the_last_view(kind: str, path: str, hand: OtherProcess, sources: Sources) -> None:
    with vram.lend(sources.make(kind), at=path) as lending:
        hand.call("borrow", path)
        hand.call("view")
        hand.call("close")
        assert len(lending.holders()) == 1, "a slice is alive"
        assert hand.call("read_view").tolist() == list(range(10, 20))
        hand.call("drop_view")
        until(lambda: lending.holders() == [])


def test_a_lending_that_is_dropped_warns_and_ends(path: str, sources: Sources) -> None:
    lending = vram.lend(sources.make("host"), at=path)
    assert repr(lending) == f"<Lending at {path}, 1 array, {4 * COUNT} bytes>"
    kept = [lending]
    del lending
    with pytest.warns(vram.errors.LeakWarning):
        kept.clear()
    assert not os.path.exists(path)


@pytest.mark.standin
@pytest.mark.parametrize("kind", BY_HANDLE)
@pytest.mark.parametrize("borrowed", [False, True])
def test_a_lending_by_handle_that_is_dropped_ends_with_its_last_borrower(
    kind: str, borrowed: bool, path: str, hand: OtherProcess, sources: Sources
) -> None:
    """Nobody can close it any more: it asks for the memory itself."""
    kept = [vram.lend(sources.make(kind), at=path)]
    thread = kept[0]._server._thread
    assert thread is not None
    if borrowed:
        hand.call("borrow", path)
        hand.call("on_revoke", "note")
    with pytest.warns(vram.errors.LeakWarning):
        kept.clear()
    if borrowed:
        assert hand.call("was_told")
        assert thread.is_alive()
        assert (hand.call("read") == numbers()).all()
        hand.call("close")
    thread.join(SOON)
    assert not thread.is_alive()
    until(lambda: drivers.get(GPU).live().mappings == 0, what="the owner's release")


@pytest.mark.standin
@pytest.mark.parametrize("kind", BY_HANDLE)
def test_s5_a_path_that_is_lent_at_again_leads_to_the_new_lender(
    kind: str, path: str, hand: OtherProcess, sources: Sources
) -> None:
    """Also for who holds what the old one lent; and news of the old is not taken from the new."""
    old = vram.lend(sources.make(kind), at=path, close_timeout=0.0)
    hand.call("borrow", path, "old")
    with pytest.warns(ReleaseWarning):
        old.close()
    with vram.lend(sources.make(kind, 5), at=path) as lending:
        assert (hand.call("read", "old") == numbers()).all()
        hand.call("on_revoke", "note", "old")
        hand.call("borrow", path, "new")
        assert (hand.call("read", "new") == numbers(5)).all()
        hand.call("on_revoke", "close", "new")
        assert lending.revoke(timeout=SOON).holders == ()
        hand.call("close", "old")


def test_a_lender_that_ends_once_it_was_found_leads_to_the_next_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lendings = [vram.lend(vram.copy(np.full(8, 1), device="host"), at=path)]
    vram.borrow(path).close()
    lease = KeeperClient.attach

    def lease_later(self: KeeperClient, *arguments: Any, **options: Any) -> Any:
        if len(lendings) == 1:
            lendings[0].close()
            lendings.append(vram.lend(vram.copy(np.full(8, 2), device="host"), at=path))
        return lease(self, *arguments, **options)

    monkeypatch.setattr(KeeperClient, "attach", lease_later)
    try:
        with vram.borrow(path, timeout=SOON) as borrowed:
            assert borrowed.array.numpy().tolist() == [2] * 8
    finally:
        lendings[-1].close()
    assert len(lendings) == 2


def test_s5_a_borrower_needs_no_right_to_trace_its_lender(path: str, hand: OtherProcess) -> None:
    """Nor to look into its /proc, as behind a container's seccomp, Yama, or a process that is not dumpable."""
    with another() as other:
        other.call("lend", path, "host")
        other.call("forbid_ptrace")
        hand.call("forbid_ptrace")
        hand.call("borrow", path)
        assert (hand.call("read") == numbers()).all()
        hand.call("close")
        other.call("end", path)


def test_i8_the_end_of_the_interpreter_takes_the_path_away(path: str) -> None:
    script = f"import vram; x = vram.zeros(10, device='host'); lending = vram.lend(x, at={path!r}); print('lent')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == ("lent\n", "")
    assert not os.path.exists(path)


# -- order ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def deferred(hand: OtherProcess) -> Iterator[standin.Standin]:
    with undone_until_waited_for(lambda on: hand.call("defer", on)) as control:
        yield control


@pytest.mark.standin
@pytest.mark.parametrize("kind", ["cuda:0", *BY_HANDLE])
def test_s10_without_a_stream_all_work_is_waited_for(
    kind: str, path: str, hand: OtherProcess, sources: Sources, deferred: standin.Standin, stream: int
) -> None:
    x = vram.share(sources.make(kind))
    driver: Any = drivers.get(GPU)
    driver.fill_async(x.address, 7, x.nbytes, stream)
    with vram.lend(x, at=path):
        assert deferred.live().get("pending", 0) == 0
        hand.call("borrow", path)
        assert (hand.call("read") == 0x07070707).all()
        hand.call("close")
    x.close()


@pytest.mark.standin
@pytest.mark.parametrize(
    ("kind", "over"), [("cuda:0", False), ("cuda:0", True), *((kind, False) for kind in BY_HANDLE)]
)
def test_s10_borrowers_wait_for_the_lenders_stream(
    kind: str, over: bool, path: str, hand: OtherProcess, sources: Sources, deferred: standin.Standin, stream: int
) -> None:
    """The lender returns at once; the borrower returns once the lender's work is done, and not before. Also where it
    names a stream that was destroyed, which waits for nothing."""
    x = vram.share(sources.make(kind))
    driver: Any = drivers.get(GPU)
    there = None
    if over:
        there = hand.call("stream")
        hand.call("destroy_stream", there)
    driver.fill_async(x.address, 7, x.nbytes, stream)
    with vram.lend(x, at=path, stream=stream):
        assert hand.call("start_reading", path, stream=there) == "waits", "nobody waited for the lender's event"
        assert deferred.live()["pending"] > 0, "lending waited"
        driver.stream_synchronize(stream, GPU)
        assert (hand.call("end_reading") == 0x07070707).all()
    x.close()


@pytest.mark.standin
def test_s10_a_borrowers_stream_waits_for_the_lenders(
    path: str, hand: OtherProcess, sources: Sources, deferred: standin.Standin, stream: int
) -> None:
    """The borrower returns at once too: on the GPU its stream waits for the other's."""
    x = sources.make("cuda:0")
    driver: Any = drivers.get(GPU)
    there = hand.call("stream")
    driver.fill_async(x.address, 9, x.nbytes, stream)
    with vram.lend(x, at=path, stream=stream):
        hand.call("borrow", path, stream=there)
        assert deferred.live()["pending"] > 0, "nobody did the work, and nobody waited for it"
        timer = threading.Timer(0.2, lambda: driver.stream_synchronize(stream, GPU))
        timer.start()
        assert (hand.call("copy_on", there) == 0x09090909).all()
        timer.join()
        hand.call("close")
    hand.call("destroy_stream", there)


@pytest.mark.standin
def test_s10_a_stream_of_no_gpu_that_holds_the_memory_is_refused_or_waited_for(
    path: str, hand: OtherProcess, sources: Sources, deferred: standin.Standin
) -> None:
    driver: Any = drivers.get(GPU)
    other = driver.stream_create(Location("cuda", 1))
    x = sources.make("cuda:0")
    with vram.lend(x, at=path, stream=other):
        hand.call("borrow", path)
        assert (hand.call("read") == numbers()).all()
        hand.call("close")
    driver.stream_destroy(other)


# -- in one process -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["host", pytest.param("cuda:0", marks=pytest.mark.standin)])
def test_what_goes_by_descriptor_can_be_borrowed_where_it_was_made(kind: str, path: str, sources: Sources) -> None:
    with vram.lend(sources.make(kind), at=path, stream=1), vram.borrow(path) as lease:
        assert (lease.array.to_host() == numbers()).all()


@pytest.mark.standin
def test_what_goes_by_a_legacy_handle_says_that_it_is_there_already(path: str, sources: Sources) -> None:
    with vram.lend(sources.make("legacy"), at=path) as lending:
        with pytest.raises(UnsupportedError, match=r"process that made it.*Use the array as it is here"):
            vram.borrow(path)
        until(lambda: lending.holders() == [], what="the end of the lease")


# -- forks ----------------------------------------------------------------------------------------------------------
FORKED = """
import os, sys, traceback, vram
from vram.errors import ForkedError
x = vram.zeros(10, "int32", device="host")
lending = vram.lend(x, at=sys.argv[1])
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    try:
        for act in (lending.holders, lending.revoke):
            try:
                act()
            except ForkedError:
                pass
            else:
                raise AssertionError("not refused")
        lending.close()
        assert os.path.exists(sys.argv[1]), "the child took the path away"
        os.write(writer, b"checked")
    except BaseException:
        os.write(writer, traceback.format_exc().encode())
    finally:
        os.read(0, 100)  # lives on, so that what it still has would count
        os.read(0, 100)
        os._exit(0)
os.close(writer)
print(repr(os.read(reader, 10000).decode()), flush=True)
os.read(reader, 1)  # until the child is gone, told by its end of the pipe
"""


def test_i7_a_lender_in_a_forked_child_is_inert(path: str) -> None:
    """Its sockets are closed there: borrowers see the parent's end although the child lives on."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKED, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "'checked'\n"
            with vram.borrow(path, timeout=SOON) as lease:
                assert lease.array.to_host().tolist() == [0] * 10
                assert not lease.is_stale()
                process.kill()
                until(lambda: gone(lease), what="the end of the lender")
                assert select.select([process.stdout], [], [], 0)[0] == [], "the child is alive, and has our output"
        finally:
            process.kill()
            process.stdin.close()  # the child ends
            assert process.stdout.read() == ""
    os.unlink(path)


def gone(lease: vram.Lease) -> bool:
    try:
        lease.is_stale()
    except PeerGoneError:
        return True
    return False


def test_i7_a_borrower_in_a_forked_child_is_inert(path: str, sources: Sources) -> None:
    with vram.lend(sources.make("host"), at=path) as lending, vram.borrow(path) as lease:

        def work() -> int:
            count = refused(lambda: lease.array)
            lease.close()
            return count

        assert end_of(work) == 1
        assert len(lending.holders()) == 1


# -- strangers ------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
def test_another_user_borrows_where_the_mode_lets_it(path: str, sources: Sources) -> None:
    def act() -> Any:
        with vram.borrow(path, timeout=SOON) as lease:
            return lease.array.to_host().tolist()

    os.chmod(os.path.dirname(path), 0o755)
    x = sources.make("host")
    with vram.lend(x, at=path):
        assert as_user(OTHER, act)[0] is AccessDeniedError
    with vram.lend(x, at=path, mode=0o666) as lending:
        assert as_user(OTHER, act) == numbers().tolist()
        until(lambda: lending.holders() == [])


@in_turns(5)
@pytest.mark.standin
@pytest.mark.parametrize("kind", some(["cuda:0", "legacy", "pool"], 1))
def test_s1_devices_travel_by_uuid(kind: str, path: str, sources: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sees one GPU only calls it cuda:0; who does not see it is told so."""
    driver = drivers.get(GPU)
    uuid = driver.device_info(GPU).uuid
    other = driver.device_info(Location("cuda", 1)).uuid
    with vram.lend(sources.make(kind), at=path):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid)
        with another() as seeing:
            assert seeing.call("borrow", path)["array"][0] == "cuda:0"
            assert (seeing.call("read") == numbers()).all()
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", other)
        with another() as blind:
            name, said = blind.call("try_borrow", path)
            assert name == "UnsupportedError"
            assert "CUDA_VISIBLE_DEVICES" in said


BORROWER = (
    "import sys, vram\nwith vram.borrow(sys.argv[1]) as l: print(l.array.to_host().sum(), flush=True); sys.stdin.read()"
)


def namespaces(*options: str) -> list[str]:
    """Return the command that runs something in namespaces of its own; skip where that cannot be."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    command = ["unshare", *options]
    done = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"{' '.join(command)} is not possible here")
    return command


@pytest.mark.parametrize(
    "options",
    [
        ("--pid", "--fork", "--kill-child"),
        ("--user", "--map-root-user", "--pid", "--fork", "--kill-child"),
        ("--user", "--map-current-user", "--mount", "--pid", "--fork", "--kill-child"),
    ],
    ids=["pid", "user", "unprivileged"],
)
def test_s4_a_borrower_in_another_namespace(options: tuple[str, ...], path: str, sources: Sources) -> None:
    """Joined by nothing but the directory of the socket."""
    command = namespaces(*options)
    x = sources.make("host")
    with (
        vram.lend(x, at=path) as lending,
        subprocess.Popen(
            [*command, sys.executable, "-c", BORROWER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{numbers().sum()}\n"
            (holder,) = lending.holders()
            assert holder.pid != os.getpid()
            assert holder.label
            process.communicate(timeout=SOON)
        finally:
            process.kill()
        until(lambda: lending.holders() == [])
