"""Entries that are parked in memory of the host and woken: by one of many, and whoever dies at whatever step (I13)."""

from __future__ import annotations

import contextlib
import gc
import os

import numpy as np
import pytest
from tests.support import park_children as children
from tests.support.children import child
from tests.support.deadlines import SOON, until
from tests.support.keeper_here import later
from tests.support.park_children import GPU, NAME, OTHER_GPU, check, is_parked, publish
from tests.support.samples import in_turns

import standin
import vram
from vram import driver as drivers
from vram.driver.protocol import LiveObjects
from vram.errors import (
    AsleepError,
    BusyError,
    NotFoundError,
    OutOfMemoryError,
    PeerGoneError,
    UsageError,
    WaitTimeoutError,
)
from vram.spec import Location

SIZE = 4 << 20
pytestmark = [pytest.mark.usefixtures("kept"), pytest.mark.filterwarnings("default::DeprecationWarning")]


def check_whole() -> None:
    """Wake it, if it is parked, and look."""
    with vram.attach(NAME, wake=True, timeout=SOON) as lease:
        check(lease)
    assert not is_parked()
    info = vram.entry(NAME)
    assert (info.nbytes, info.segments, info.readers) == (SIZE, 2, 0)
    counts = vram.statistics()
    assert (counts.nbytes, counts.descriptors, counts.versions, counts.leases) == (SIZE, 2, 1, 0)


class Parking:
    def test_the_same_version_comes_back(self) -> None:
        publish(GPU).close()
        number = vram.entry(NAME).version
        report = vram.park(NAME)
        assert (report.name, report.version, report.nbytes, report.freed) == (NAME, number, SIZE, SIZE)
        assert report.holders == ()
        info = vram.entry(NAME)
        assert (info.parked, info.version, info.nbytes, info.arrays) == (True, number, SIZE, None)
        assert info.meta == {"k": "v"}
        (version,) = info.versions
        assert (version.parked, version.devices) == (True, ("host",))
        with pytest.raises(AsleepError, match="wake=True"):
            vram.attach(NAME, timeout=SOON)
        with pytest.raises(AsleepError, match="already"):
            vram.park(NAME, timeout=SOON)
        with vram.attach(NAME, wake=True) as lease:
            check(lease)
            assert lease.version == number
            with vram.attach(NAME, wake=True) as again, vram.attach(NAME) as plain:  # it is awake
                check(again)
                check(plain)
        assert [one.name for one in vram.entry(NAME).arrays or ()] == ["a", "b"]
        assert vram.park(NAME).freed == SIZE
        check_whole()

    def test_what_this_process_still_holds_is_not_said_to_be_free(self) -> None:
        with publish(GPU) as array:
            report = vram.park(NAME)
            assert (report.nbytes, report.freed) == (SIZE, 0)
            (holder,) = report.holders
            assert f"pid {os.getpid()} (4 MiB)" in holder
            assert (array.to_host()[:, 0] == np.arange(1024)).all()  # its own, as long as it likes
            check_whole()
        assert vram.park(NAME).freed == SIZE
        vram.remove(NAME)

    def test_a_publisher_elsewhere_is_named(self) -> None:
        with child(children.publish_and_wait, GPU) as maker:
            maker.said()
            report = vram.park(NAME)
            assert report.freed == 0
            assert "the process that published it" in report.holders[0]
            check_whole()
            maker.tell()
            maker.said()
            maker.kill()
        until(lambda: vram.statistics().connections == 1, what="the end of the publisher")
        assert vram.park(NAME).freed == SIZE

    def test_readers_are_named_and_waited_for(self) -> None:
        publish(GPU).close()
        with child(children.hold) as reader:
            pid = reader.said()
            for timeout in (0, 0.1):
                with pytest.raises(BusyError, match=f"pid {pid}, uid {os.getuid()}.*4 MiB") as refused:
                    vram.park(NAME, timeout=timeout)
                assert len(refused.value.holders) == 1
                assert not is_parked()
            thread, came = later(lambda: vram.park(NAME, timeout=SOON))
            reader.tell()
            thread.join(SOON)
            assert came[0].freed == SIZE
            assert reader.said() == "closed"
        with vram.attach(NAME, wake=True), pytest.raises(BusyError, match=f"pid {os.getpid()}"):
            vram.park(NAME, timeout=0)
        check_whole()

    @pytest.mark.parametrize("step", ["_copy", "seal", "send"])
    def test_who_attaches_while_it_is_copied_has_it(self, step: str) -> None:
        publish(GPU).close()
        with child(children.act, "park", 1 if step == "send" else 0, 0.0, step) as parker:
            assert parker.said()[0] == "at"
            with vram.attach(NAME) as lease:
                check(lease)
                parker.tell()
                kind, text, moves = parker.said()
                assert (kind, moves) == ("BusyError", 0)
                assert f"held by: pid {os.getpid()}, uid {os.getuid()}" in text
                check(lease)
            assert not is_parked()
            check_whole()

    def test_one_of_many_wakes_it(self) -> None:
        publish(GPU).close()
        vram.park(NAME)
        with contextlib.ExitStack() as stack:
            wakers = [stack.enter_context(child(children.act, "wake", -1, SOON)) for _ in range(4)]
            found = [waker.said() for waker in wakers]
            assert [one[0] for one in found] == ["woke"] * 4
            assert {tuple(one[1]["a"] + one[1]["b"]) for one in found} == {tuple(range(1024))}
            assert sum(one[2] for one in found) == 1
            assert vram.statistics().nbytes == SIZE
            for waker in wakers:
                waker.tell()
        until(lambda: not vram.statistics().leases, what="the end of all leases")
        check_whole()

    def test_the_next_one_wakes_it_when_one_is_killed(self) -> None:
        publish(GPU).close()
        vram.park(NAME)
        with child(children.act, "wake", 0, SOON, "_copy") as first:
            assert first.said() == ("at", 0, "_copy")
            with pytest.raises(BusyError, match=f"being woken.*pid {first.process.pid}"):
                vram.attach(NAME, wake=True)
            with pytest.raises(WaitTimeoutError, match=f"not woken in time; pid {first.process.pid}"):
                vram.attach(NAME, wake=True, timeout=0.05)
            with pytest.raises(AsleepError):
                vram.attach(NAME, timeout=0.05)
            with pytest.raises(AsleepError):
                vram.park(NAME, timeout=0.05)
            with child(children.act, "wake", -1, SOON) as second:
                until(lambda: vram.statistics().waiting == 1, what="the second one's wait")
                first.kill()
                kind, found, moves = second.said()
                assert (kind, found["a"] + found["b"], moves) == ("woke", list(range(1024)), 1)
                second.tell()
        until(lambda: not vram.statistics().leases, what="the end of all leases")
        check_whole()

    @in_turns(5)
    @pytest.mark.parametrize("verb", ["park", "wake"])
    def test_killed_at_any_step_it_is_as_it_was_or_done(self, verb: str) -> None:
        outcomes = []
        for stop_at in range(100):
            publish(GPU).close()
            if verb == "wake":
                vram.park(NAME)
            with child(children.act, verb, stop_at) as victim:
                said = victim.said()
                victim.kill()
            until(lambda: vram.statistics().connections == 1, what="the end of the victim")
            outcomes.append(is_parked())
            counts = vram.statistics()
            assert (counts.nbytes, counts.descriptors, counts.versions, counts.leases) == (SIZE, 2, 1, 0)
            if verb == "park" and outcomes[-1]:
                assert vram.entry(NAME).versions[0].devices == ("host",)
            with vram.attach(NAME, wake=True, timeout=SOON) as lease:
                whole = np.concatenate([lease["a"].to_host(), lease["b"].to_host()])
                assert (whole == np.arange(1024, dtype="int32")[:, None]).all()
            vram.remove(NAME)
            if said[0] != "at":
                break
        assert said[0] in ("parked", "woke")
        assert outcomes == sorted(outcomes, reverse=verb == "wake")
        assert 8 < len(outcomes) < 100
        assert set(outcomes) == {False, True}

    def test_some_of_it_on_the_host_already(self) -> None:
        with vram.zeros((2, 1024), "int32", device=GPU) as one, vram.zeros((3, 1024), "int32", device="host") as two:
            one.fill(1)
            two.fill(2)
            vram.publish(NAME, {"one": one, "two": two})
        assert vram.park(NAME).nbytes == 2 << 20
        with vram.attach(NAME, wake=True) as lease:
            assert (str(lease["one"].device), str(lease["two"].device)) == (GPU, "host")
            assert (lease["one"].to_host().sum(), lease["two"].numpy().sum()) == (2048, 6144)
        vram.remove(NAME)
        vram.publish(NAME, {"a": np.arange(10)})
        with pytest.raises(UsageError, match="memory of the host already"):
            vram.park(NAME)
        vram.attach(NAME, wake=True).close()

    @pytest.mark.parametrize("how", ["writable", "updatable"])
    def test_what_may_be_written_is_not_parked(self, how: str) -> None:
        device = GPU if how == "writable" else "host"
        with vram.zeros(10, device=device) as array:
            vram.publish(NAME, {"a": array}, **{how: True})  # type: ignore[arg-type]
            with pytest.raises(UsageError, match=f"{how}=True"):
                vram.park(NAME)

    def test_odd_arguments(self) -> None:
        with pytest.raises(NotFoundError):
            vram.park("nothing", timeout=0)
        with pytest.raises(UsageError):
            vram.park("", timeout=0)
        with pytest.raises(UsageError):
            vram.park(NAME, timeout=-1)
        with pytest.raises(UsageError):
            vram.attach(NAME, wake="yes")  # type: ignore[arg-type]
        with pytest.raises(NotFoundError):
            vram.attach(NAME, wake=True)
        with pytest.raises(PeerGoneError):
            vram.park(NAME, keeper="/nowhere/at/all")

    def test_the_books_are_empty(self) -> None:
        gc.collect()
        assert drivers.get(Location("cuda")).live() == LiveObjects(0, 0, 0, 0)


@pytest.mark.standin
class TestOnTheStandin(Parking):
    def test_on_another_gpu(self) -> None:
        publish(GPU).close()
        vram.park(NAME)
        with vram.attach(NAME, wake=True, device=OTHER_GPU) as lease:
            check(lease, OTHER_GPU)
        with vram.attach(NAME) as lease:
            check(lease, OTHER_GPU)
        vram.park(NAME)
        with vram.attach(NAME, wake=True) as lease:  # where it was last
            check(lease, OTHER_GPU)

    def test_the_next_one_wakes_it_when_one_has_no_room(self) -> None:
        publish(GPU).close()
        vram.park(NAME)
        with child(children.run_out) as first:
            assert first.said() == ("at", 0, "create")
            with child(children.act, "wake", -1, SOON) as second:
                until(lambda: vram.statistics().waiting == 1, what="the second one's wait")
                first.tell()
                kind, _, moves = first.said()
                assert (kind, moves) == ("OutOfMemoryError", 0)
                kind, found, moves = second.said()
                assert (kind, found["a"] + found["b"], moves) == ("woke", list(range(1024)), 1)
                second.tell()
        until(lambda: not vram.statistics().leases, what="the end of all leases")
        check_whole()

    def test_it_is_woken_once_there_is_room(self) -> None:
        publish(GPU).close()
        vram.park(NAME)
        vram.publish("other", {"x": vram.zeros(1 << 20, "uint8", device=GPU)})
        gpu = standin.Standin()
        gpu.set_free(0, 1 << 20)
        try:
            for patience in (0.0, 0.05):
                with pytest.raises(OutOfMemoryError, match=r"'other' of uid \d+ \(2 MiB\).*wait_for_memory"):
                    vram.attach(NAME, wake=True, wait_for_memory=patience)
            assert is_parked()
            vram.remove("other")
            with pytest.raises(OutOfMemoryError, match="other programs have its memory"):
                vram.attach(NAME, wake=True)
            thread, came = later(lambda: vram.attach(NAME, wake=True, wait_for_memory=SOON))
            until(lambda: vram.statistics().leases == 1, what="the first try")
            gpu.set_free(0, 1 << 30)
            thread.join(SOON)
            with came.pop() as lease:
                check(lease)
        finally:
            gpu.set_free(0, None)
        check_whole()


@pytest.mark.gpu
class TestOnHardware(Parking):
    pass
